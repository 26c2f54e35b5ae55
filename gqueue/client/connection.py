"""Commands over one socket from many threads: pipelining, time-outs, reconnecting, and what may be sent again."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from gqueue.client.line import PING_AFTER, Line, pause
from gqueue.client.target import Target
from gqueue.client.values import pack
from gqueue.errors import AuthError, CommandError, CommandTimeoutError, ConnectionClosedError
from gqueue.wire.frames import frame

#: Commands that change nothing: after a lost connection they are simply asked again.
READS = frozenset({
    "Count", "CronGet", "CronList", "DashboardOverview", "DashboardQueue", "DashboardQueues", "Dlq",
    "GetChildrenValues", "GetCountsPerPriority", "GetDeduplicationJobId", "GetDlqConfig", "GetDlqStats",
    "GetFailedChildrenValues", "GetGroupActiveCount", "GetGroupConcurrency", "GetGroupJobsCount",
    "GetGroupRateLimit", "GetGroupRateLimitTtl", "GetGroupsJobsCount", "GetIgnoredChildrenFailures", "GetJob",
    "GetJobByCustomId", "GetJobCounts", "GetJobs", "GetLogs", "GetProgress", "GetQueueLimits", "GetResult",
    "GetStallConfig", "GetState", "Hello", "IsGroupPaused", "IsPaused", "ListQueues", "ListWebhooks",
    "ListWorkers", "Metrics", "Ping", "Prometheus", "Stats", "StorageStatus", "WaitJob",
})  # fmt: skip

_PING = frame(pack({"cmd": "Ping", "reqId": "ping"}))


def repeatable(cmd: str, fields: dict[str, Any]) -> bool:
    """Whether a command may be sent again when it is not known if the broker has carried it out (surface 6.2)."""
    if cmd in READS:
        return True
    if cmd in ("ACK", "FAIL"):
        return bool(fields.get("token"))
    if cmd == "ACKB":
        return bool(fields.get("tokens")) and all(fields["tokens"])
    if cmd == "PUSH":
        return bool(fields.get("jobId"))
    if cmd == "PUSHB":
        return all(job.get("customId") for job in fields.get("jobs", ()))
    return False


class Call:
    """One command on its way: the frame, and the answer when it is there."""

    __slots__ = ("bell", "cmd", "done", "error", "frame", "key", "repeat", "reply", "sent")

    def __init__(self, key: str, cmd: str, fields: dict[str, Any]) -> None:
        self.key = key
        self.cmd = cmd
        self.frame = frame(pack({"cmd": cmd, **fields, "reqId": key}))
        self.repeat = repeatable(cmd, fields)
        self.sent = 0  # how many times it may have reached a broker
        self.done = False
        self.reply: dict[str, Any] | None = None
        self.error: ConnectionClosedError | None = None  # the line ended before the answer
        self.bell: Any = None  # a held lock; releasing it wakes the thread that waits for this call


class _Process:
    """What one process has of a Connection. A forked child starts with a fresh one, locks included."""

    __slots__ = ("connected", "events", "line", "lock", "opening", "pending", "reading", "sleepers", "watchers")

    def __init__(self) -> None:
        self.lock = threading.Lock()  # guards all below; never held while waiting
        self.opening = threading.Lock()  # held by the one thread that connects
        self.line: Line | None = None
        self.connected = False  # has been, once
        self.pending: dict[str, Call] = {}
        self.sleepers: dict[str, Call] = {}  # calls whose threads wait for their bell
        self.reading = False  # a thread is receiving for everybody
        self.events: deque[dict[str, Any]] = deque(maxlen=10_000)  # frames nobody has asked for yet
        self.watchers: list[Call] = []  # threads in next_event


class Connection:
    """One socket shared by all threads of a process.

    There is no reader thread: of the threads that wait for an answer one receives for all, rings the others, and passes
    the duty on when its own answer has come. A program with one thread therefore pays no switch of threads.
    """

    def __init__(self, target: Target, *, timeout: float, reconnect: bool) -> None:
        self.target = target
        self.timeout = timeout  # s, of a command that names none
        self.reconnect = reconnect
        self.on_event: Callable[[dict[str, Any]], None] | None = None
        self._numbers = itertools.count(1)
        self._ended = threading.Event()
        self._processes: dict[int, _Process] = {}

    # ------------------------------------------------------------ calls

    def prepare(self, cmd: str, fields: dict[str, Any]) -> Call:
        """A call ready to be sent. Raises SerializationError for a value that cannot travel."""
        return Call(f"{next(self._numbers):x}", cmd, fields)

    def perform(self, calls: Sequence[Call], timeout: float) -> None:
        """Send all calls at once and wait until each has its `reply`.

        Raises CommandTimeoutError when that takes more than `timeout` seconds, ConnectionClosedError when the
        connection is lost and cannot be had again in that time or when a command must not be sent twice.
        """
        deadline = time.monotonic() + timeout
        process = self._process()
        todo = calls
        while True:
            try:
                line = self._connected(process, deadline)
                self._send(process, line, todo, deadline)
                for call in todo:
                    self._await(process, line, call, deadline, timeout)
            except BaseException:
                with process.lock:
                    for call in todo:
                        process.pending.pop(call.key, None)
                    self._wake_reader(process)  # this thread may have been the one that was to go on receiving
                raise
            todo = [call for call in todo if call.reply is None]
            if not todo:
                return
            for call in todo:
                assert call.error is not None
                if not self.reconnect or (call.sent and not call.repeat):
                    raise ConnectionClosedError(str(call.error), maybe_applied=call.sent > 0)
                call.done = False

    def next_event(self, timeout: float | None) -> dict[str, Any] | None:
        """The next event frame of the current line, or None after `timeout` seconds."""
        deadline = float("inf") if timeout is None else time.monotonic() + timeout
        process = self._process()
        watcher = self.prepare("event", {})
        while True:
            with process.lock:
                if process.events:
                    return process.events.popleft()
                line = process.line
                if line is None:
                    raise ConnectionClosedError("there is no connection that could be subscribed to events")
                watcher.done = False
                process.pending[watcher.key] = watcher  # so that it hears of the line's end
                process.watchers.append(watcher)
            try:
                self._await(process, line, watcher, deadline, timeout or 0)
            except CommandTimeoutError:
                return None
            finally:
                with process.lock:
                    process.pending.pop(watcher.key, None)
                    process.watchers.remove(watcher)
                    self._wake_reader(process)
            if watcher.error is not None:
                raise watcher.error

    def close(self) -> None:
        """End the connection; threads that wait get ConnectionClosedError. Nothing can be sent afterwards."""
        self._ended.set()
        process = self._processes.get(os.getpid())
        if process is not None and process.line is not None:
            self._lose(process, process.line, ConnectionClosedError("the client was closed"))

    def _process(self) -> _Process:
        pid = os.getpid()
        process = self._processes.get(pid)
        if process is None:
            process = self._processes.setdefault(pid, _Process())
            for other in [key for key in self._processes if key != pid]:
                inherited = self._processes.pop(other).line
                if inherited is not None:
                    inherited.forget()
        return process

    # ------------------------------------------------------------ connecting

    def _connected(self, process: _Process, deadline: float) -> Line:
        """The line, opened if need be. Tries again until the deadline only if there once was a connection."""
        line = process.line
        if line is not None:
            if not process.pending and self._stale(process, line):
                self._lose(process, line, ConnectionClosedError("the broker closed the idle connection"))
            else:
                return line
        if not process.opening.acquire(timeout=max(deadline - time.monotonic(), 0)):
            raise CommandTimeoutError(f"cannot reach the broker at {self.target} in time")
        try:
            for attempt in itertools.count():
                if self._ended.is_set():
                    raise ConnectionClosedError("the client was closed")
                if process.line is not None:
                    return process.line
                try:
                    line = Line.open(self.target, max(deadline - time.monotonic(), 0.001))
                except ConnectionClosedError:
                    rest = pause(attempt)
                    if not (self.reconnect and process.connected) or time.monotonic() + rest >= deadline:
                        raise
                    self._ended.wait(rest)
                    continue
                with process.lock:
                    process.line = line
                    process.connected = True
        finally:
            process.opening.release()
        raise AssertionError

    def _stale(self, process: _Process, line: Line) -> bool:
        """Whether an idle line has ended unnoticed: better found before a command is sent than after."""
        with process.lock:
            if process.reading or process.pending or process.line is not line:
                return False
            return line.hung_up()

    def _lose(self, process: _Process, line: Line, why: ConnectionClosedError) -> None:
        """Forget a line that has ended, and tell everybody who waits for an answer on it."""
        with process.lock:
            if process.line is not line:
                return
            process.line = None
            for call in process.pending.values():
                call.error = why
                self._finish(process, call)
            process.pending.clear()
        line.close()

    # ------------------------------------------------------------ sending and waiting

    def _send(self, process: _Process, line: Line, calls: Sequence[Call], deadline: float) -> None:
        with process.lock:
            lost = process.line is not line
            for call in calls:
                call.error = None
                if not lost:
                    process.pending[call.key] = call
        try:
            if lost:
                raise ConnectionClosedError(f"the connection to {self.target} was lost")
            line.send(calls[0].frame if len(calls) == 1 else b"".join([call.frame for call in calls]), deadline)
        except ConnectionClosedError as exc:
            # the kernel did not take everything: a single frame cannot have been read; of several, some may have been
            if len(calls) > 1 and not lost:
                for call in calls:
                    call.sent += 1
            with process.lock:
                for call in calls:
                    call.error = exc
                    call.done = True
                    process.pending.pop(call.key, None)
            self._lose(process, line, exc)
            return
        for call in calls:
            call.sent += 1

    def _await(self, process: _Process, line: Line, call: Call, deadline: float, timeout: float) -> None:
        """Return when the call is done: receiving for everybody, or woken by the one who does."""
        while not call.done:
            left = deadline - time.monotonic()
            if left <= 0:
                raise CommandTimeoutError(f"{call.cmd}: no answer within {timeout:g} s")
            with process.lock:
                if call.done:
                    return
                lead = not process.reading
                if lead:
                    process.reading = True
                else:
                    call.bell = bell = threading.Lock()
                    bell.acquire()
                    process.sleepers[call.key] = call
            if lead:
                try:
                    self._read_until(process, line, call, deadline)
                finally:
                    self._hand_over(process)
            else:
                bell.acquire(timeout=min(left, threading.TIMEOUT_MAX))
                with process.lock:
                    process.sleepers.pop(call.key, None)
                    call.bell = None

    def _read_until(self, process: _Process, line: Line, call: Call, deadline: float) -> None:
        silent = 0
        while not call.done:
            left = deadline - time.monotonic()
            if left <= 0:
                return
            try:
                replies = line.receive(min(left, PING_AFTER))
                if replies is None and left > PING_AFTER:
                    if silent == 2:
                        raise ConnectionClosedError(
                            f"the broker at {self.target} has been silent for {3 * PING_AFTER:g} s"
                        )
                    silent += 1
                    line.send(_PING, deadline)
                    continue
            except ConnectionClosedError as exc:
                self._lose(process, line, exc)
                # a line that was not the current one any more has no pending calls, but this one may have been its
                if not call.done and process.line is not line:
                    call.error = call.error or exc
                    call.done = True
                return
            silent = 0
            if replies:
                self._deliver(process, replies)

    def _deliver(self, process: _Process, replies: list[Any]) -> None:
        events: list[dict[str, Any]] = []
        with process.lock:
            for reply in replies:
                call = process.pending.pop(reply.pop("reqId", None), None)
                if call is not None:
                    call.reply = reply
                    self._finish(process, call)
                elif reply.get("type") == "event":
                    events.append(reply["event"])
            if events and self.on_event is None:
                process.events.extend(events)
                for watcher in process.watchers:
                    self._finish(process, watcher)
        if self.on_event is not None:
            for event in events:
                self.on_event(event)

    def _finish(self, process: _Process, call: Call) -> None:
        """Mark a call done and wake its thread. Under the lock."""
        call.done = True
        if process.sleepers.pop(call.key, None) is not None:
            call.bell.release()

    def _hand_over(self, process: _Process) -> None:
        """Stop receiving; if others still wait, one of them goes on."""
        with process.lock:
            process.reading = False
            self._wake_reader(process)

    def _wake_reader(self, process: _Process) -> None:
        """See to it that somebody receives while somebody waits. Under the lock."""
        if process.sleepers and not process.reading:
            _, heir = process.sleepers.popitem()
            heir.bell.release()


def granted(call: Call) -> dict[str, Any]:
    """The answer of a performed call. Raises what a refusal means."""
    reply = call.reply
    assert reply is not None
    if reply.get("ok"):
        return reply
    text = str(reply.get("error"))
    if text in ("Not authenticated", "Invalid token"):
        raise AuthError(text)
    if call.sent > 1 and call.cmd in ("ACK", "ACKB", "FAIL"):
        # the first one may have been carried out, and then this refusal is about a job that is finished already
        raise ConnectionClosedError(f"{call.cmd} was sent twice, the second was refused: {text}", maybe_applied=True)
    raise CommandError(text)
