"""The connection of a worker: jobs in, outcomes out, both without waiting for the other's answers."""

from __future__ import annotations

import itertools
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from gqueue.client.job import Job
from gqueue.client.line import PING_AFTER, Line, pause
from gqueue.client.target import Target
from gqueue.client.values import pack
from gqueue.errors import AuthError, ConnectionClosedError, GQueueError
from gqueue.wire.frames import frame

log = logging.getLogger("gqueue.worker")

POLL = 5_000  # ms that an empty queue holds a pull
_WINDOW = 4  # outcome frames without an answer; what finishes beyond that is merged into one ACKB
_BATCH = 500  # jobs of one ACKB
_BATCH_BYTES = 4 << 20  # of their results
_RESERVED = 1.0  # s that a job may wait in reserve while no slot becomes free
_PATIENCE = 10.0  # s to connect, and for the kernel to take what is sent

_TRIES = 5  # of an outcome that is refused for reasons that are not expected to pass
_TRANSIENT = ("Storage unavailable", "Rate limit exceeded", "Server is shutting down")  # refusals that pass

_UNDEFINED = b"\xd4\x00\x00"  # no result, which is not the same as a result of nil
_NAMES = {name: pack(name) for name in ("cmd", "ids", "tokens", "results", "reqId", "id", "token", "result")}
_ACK = _NAMES["cmd"] + pack("ACK") + _NAMES["id"]
_ACKB = _NAMES["cmd"] + pack("ACKB") + _NAMES["ids"]


class Outcome:
    """How a run ended, on its way to the broker."""

    __slots__ = ("alone", "cmd", "fields", "job", "result", "sent", "then", "token", "tries")

    def __init__(
        self,
        job: Job[Any],
        cmd: str,
        then: Callable[[Outcome], None],
        *,
        result: bytes | None = None,
        fields: dict[str, Any] | None = None,
    ) -> None:
        self.job = job
        self.token: str = job.token or ""
        self.cmd = cmd  # ACK, FAIL, MoveToDelayed, MoveToWait
        self.then = then  # called when the broker has confirmed it
        self.result = result  # packed
        self.fields = fields or {}  # besides id and token
        self.alone = cmd != "ACK"  # not to be merged
        self.sent = 0  # times it may have reached the broker
        self.tries = 0  # times the broker could not take it


class Delivery:
    """Pulls for the slots that are free and sends what has finished.

    No thread waits for an answer. A handler that finishes leaves its outcome in a deque and lets `pump` write what is
    due, unless another thread is writing already, which then takes it along. One reader thread handles the answers.
    """

    def __init__(
        self,
        target: Target,
        queues: list[str],
        *,
        owner: str,
        lock_ttl: int,
        group: dict[str, Any] | None,
        slots: int,
        batch_size: int,
        held: dict[str, str],
        make: Callable[[dict[str, Any], str], Job[Any]],
        take: Callable[[Job[Any]], None],
        unstarted: Callable[[], list[Job[Any]]],
        kept: Callable[[], float],
        on_ready: Callable[[], None],
        on_drained: Callable[[], None],
        on_error: Callable[[GQueueError], None],
        on_done: Callable[[], None],
    ) -> None:
        self.target = target
        self.queues = queues
        self.pace = math.inf  # s of a run, a running mean: short runs allow for jobs in reserve
        self.paused = False
        self.burst = False
        self.remaining: int | None = None  # jobs still to take, with max_jobs
        self._owner = owner
        self._lock_ttl = lock_ttl
        self._group = group
        self._slots = slots
        self._batch_size = batch_size
        self._held = held  # token -> id: see Leases
        self._make = make
        self._take = take
        self._unstarted = unstarted  # takes the jobs in reserve back
        self._kept = kept  # s that jobs have been in reserve without any being started; 0 when none is
        self._on_ready = on_ready
        self._on_drained = on_drained
        self._on_error = on_error
        self._on_done = on_done
        self._in_hand: dict[str, Job[Any]] = {}  # token -> job that waits for a slot or runs
        self._outcomes: deque[Outcome] = deque()
        self._later: list[tuple[float, Outcome]] = []  # to be tried again, with the time
        self._flying: dict[str, list[Outcome]] = {}  # reqId -> sent, not answered
        self._pulls: dict[str, tuple[str, int]] = {}  # reqId -> queue and count of a pull without an answer
        self._pulling: set[str] = set()  # queues that have one
        self._dry: set[str] = set()  # queues whose last pull was empty, in a burst
        self._not_before: dict[str, float] = {}  # queue -> when to pull again after a refusal
        self._refusals = 0
        self._busy = True  # something came since the queues were last empty
        self._numbers = itertools.count(1)
        self._sending = threading.Lock()
        self._line: Line | None = None
        self._stopping = False
        self._closed = threading.Event()
        self._settled = threading.Event()
        self._notes: deque[Callable[[], None]] = deque()
        self._thread: threading.Thread | None = None

    # ------------------------------------------------------------ for the worker

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="gqueue-delivery", daemon=True)
        self._thread.start()

    @property
    def running(self) -> int:
        """Jobs in hand."""
        return len(self._in_hand)

    @property
    def connected(self) -> bool:
        return self._line is not None

    def finish(self, outcome: Outcome | None, token: str) -> None:
        """A run has ended: its slot is free, its outcome is sent as soon as the socket takes it."""
        if outcome is not None:
            self._outcomes.append(outcome)  # before the slot is free: at no moment is the job nowhere
        else:
            self._held.pop(token, None)
        self._in_hand.pop(token, None)
        self.pump()
        if outcome is None:
            self._check_settled()

    def give_back(self, job: Job[Any]) -> None:
        """Return a job that has not started."""
        self.finish(Outcome(job, "MoveToWait", _nothing), job.token or "")

    def lost(self, token: str) -> None:
        """A lease could not be renewed."""
        self._held.pop(token, None)
        job = self._in_hand.get(token)
        if job is not None:
            log.warning("the lease of job %s (%s) is lost: its outcome will not count", job.id, job.name)
            job.lose()

    def note(self, action: Callable[[], None]) -> None:
        """Run something in the reader thread, at the latest when it looks for a ping."""
        self._notes.append(action)

    def stop(self) -> None:
        """Take no more jobs."""
        self._stopping = True
        for job in self._unstarted():
            self.give_back(job)
        self._check_settled()

    def wait_settled(self, timeout: float | None) -> bool:
        """After stop: wait until nothing runs and every outcome is answered."""
        self._check_settled()
        return self._settled.wait(timeout)

    def abandon(self) -> list[Job[Any]]:
        """Give the running jobs back to the broker although their handlers go on; they are told."""
        jobs = list(self._in_hand.values())
        for job in jobs:
            job.settled = True  # what the handler returns is not sent any more
            self.give_back(job)
            job.lose()
        return jobs

    def close(self) -> None:
        """End the connection. What was not answered is settled by the broker: jobs without an outcome run again."""
        self._stopping = True
        self._closed.set()
        line = self._line
        if line is not None:
            line.close()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_PATIENCE)

    # ------------------------------------------------------------ out

    def pump(self) -> None:
        """Write what is due. Called whenever something may have become due; costs two checks when nothing has."""
        while self._line is not None and (self._outcome_due() or self._pull_due()):
            if not self._sending.acquire(blocking=False):
                return  # that thread looks again when it has written
            line = self._line
            try:
                if line is not None:
                    data = b"".join((*self._outcome_frames(), *self._pull_frames()))
                    if data:
                        line.send(data, time.monotonic() + _PATIENCE)
            except ConnectionClosedError:
                return  # the line is closed now: the reader wakes and sees to everything
            finally:
                self._sending.release()

    def _outcome_due(self) -> bool:
        return bool(self._outcomes) and len(self._flying) < _WINDOW

    def _outcome_frames(self) -> list[bytes]:
        frames: list[bytes] = []
        outcomes = self._outcomes
        while outcomes and len(self._flying) < _WINDOW:
            merged: list[Outcome] = []
            size = 0
            while outcomes and not outcomes[0].alone and len(merged) < _BATCH and size < _BATCH_BYTES:
                outcome = outcomes.popleft()
                merged.append(outcome)
                size += len(outcome.result or b"")
            if len(merged) > 1:
                frames.append(self._ackb(merged))
            else:
                frames.append(self._single(merged[0] if merged else outcomes.popleft()))
        return frames

    def _fly(self, outcomes: list[Outcome]) -> str:
        key = f"{next(self._numbers):x}"
        for outcome in outcomes:
            outcome.sent += 1
        self._flying[key] = outcomes
        return key

    def _single(self, outcome: Outcome) -> bytes:
        key = self._fly([outcome])
        token = outcome.token
        if outcome.cmd == "ACK":
            parts = [_ACK, pack(outcome.job.id), _NAMES["token"], pack(token), _NAMES["reqId"], pack(key)]
            if outcome.result is not None:
                parts += (_NAMES["result"], outcome.result)
            return frame(bytes((0x80 | (4 if outcome.result is None else 5),)) + b"".join(parts))
        return frame(pack({"cmd": outcome.cmd, "id": outcome.job.id, "token": token, **outcome.fields, "reqId": key}))

    def _ackb(self, outcomes: list[Outcome]) -> bytes:
        parts = [
            _ACKB,
            pack([outcome.job.id for outcome in outcomes]),
            _NAMES["tokens"],
            pack([outcome.token for outcome in outcomes]),
            _NAMES["reqId"],
            pack(self._fly(outcomes)),
        ]
        if any(outcome.result is not None for outcome in outcomes):
            count = len(outcomes)
            parts.append(_NAMES["results"])
            parts.append(bytes((0x90 | count,)) if count < 16 else b"\xdc" + count.to_bytes(2))
            parts += [_UNDEFINED if outcome.result is None else outcome.result for outcome in outcomes]
            return frame(b"\x85" + b"".join(parts))
        return frame(b"\x84" + b"".join(parts))

    # ------------------------------------------------------------ pulling

    def _capacity(self) -> int:
        """How many more jobs may be asked for: free slots, and a few in reserve while runs are short.

        Long jobs are never held in reserve, where they would wait for a slot here while another worker has one.
        """
        if self._stopping or self.paused:
            return 0
        reserve = min(self._batch_size, int(0.05 * self._slots / max(self.pace, 1e-6)))
        asked = sum([count for _, count in list(self._pulls.values())])
        free = self._slots + reserve - len(self._in_hand) - asked
        return free if self.remaining is None else min(free, self.remaining - asked)

    def _pull_due(self) -> bool:
        if len(self._pulling) == len(self.queues) or self._capacity() < 1:
            return False
        if self._dry or self._not_before:
            return any(self._may_pull(queue) for queue in self.queues)
        return True

    def _may_pull(self, queue: str) -> bool:
        if queue in self._pulling or queue in self._dry:
            return False
        return self._not_before.get(queue, 0) <= time.monotonic()

    def _pull_frames(self) -> list[bytes]:
        """A PULLB for each queue without one.

        Several share the free slots and each gets at least one: with more queues than free slots a few jobs more than
        slots may come, which then wait here.
        """
        capacity = self._capacity()
        queues = [queue for queue in self.queues if self._may_pull(queue)] if capacity > 0 else []
        frames = []
        for place, queue in enumerate(queues):
            count = max(1, min(self._batch_size, -(-capacity // (len(queues) - place))))
            capacity -= count
            key = f"{next(self._numbers):x}"
            self._pulls[key] = (queue, count)
            self._pulling.add(queue)
            fields: dict[str, Any] = {
                "cmd": "PULLB",
                "queue": queue,
                "count": count,
                "timeout": 0 if self.burst else POLL,
                "owner": self._owner,
                "lockTtl": self._lock_ttl,
                "reqId": key,
            }
            if self._group is not None:
                fields["group"] = self._group
            frames.append(frame(pack(fields)))
        return frames

    # ------------------------------------------------------------ in

    def _run(self) -> None:
        attempt = 0
        silent = 0
        try:
            while not self._closed.is_set():
                line = self._line
                try:
                    if line is None:
                        line = Line.open(self.target, _PATIENCE)
                        self._begin(line)
                    replies = line.receive(self._patience())
                except GQueueError as exc:
                    silent = 0
                    if not self._closed.is_set():
                        self._end(line, exc, attempt)
                        self._closed.wait(pause(attempt + (8 if isinstance(exc, AuthError) else 0)))
                    attempt += 1
                    continue
                if replies is None:
                    silent = self._silence(line, silent)
                else:
                    attempt = silent = 0
                    for reply in replies:
                        self._answer(reply)
                while self._notes:
                    self._notes.popleft()()
                if self._later:
                    self._revive_later()
                if self._kept() > _RESERVED:
                    self.pace = math.inf
                    for job in self._unstarted():
                        self.give_back(job)
                self.pump()
        except Exception:
            log.exception("the worker's connection ended by an error of its own")
            raise
        finally:
            self._closed.set()
            self._settled.set()
            self._on_done()

    def _patience(self) -> float:
        """Seconds until something is due that no answer will start."""
        longest = _RESERVED if self._kept() else PING_AFTER
        if not self._not_before and not self._later:
            return longest
        now = time.monotonic()
        for queue, moment in list(self._not_before.items()):
            if moment <= now:
                del self._not_before[queue]
        moments = [*self._not_before.values(), *[moment for moment, _ in self._later]]
        return min([longest, *[max(0.0, moment - now) for moment in moments]])

    def _silence(self, line: Line, silent: int) -> int:
        if self._patience() < PING_AFTER:
            return silent
        if silent == 2:
            line.close()  # the next receive fails
            return 0
        try:
            line.send(frame(pack({"cmd": "Ping", "reqId": "ping"})), time.monotonic() + _PATIENCE)
        except ConnectionClosedError:
            return 0  # the same
        return silent + 1

    def _begin(self, line: Line) -> None:
        self._line = line
        log.debug("connected to %s", line.target)
        self._on_ready()
        self.pump()

    def _end(self, line: Line | None, why: GQueueError, attempt: int) -> None:
        """The line is gone, or could not be had. The broker takes back what has not been renewed, so only running jobs
        stay here: their outcome may still count."""
        if line is not None:
            line.close()
            with self._sending:
                self._line = None
                self._pulls.clear()
                self._pulling.clear()
                for outcomes in self._flying.values():
                    for outcome in reversed(outcomes):
                        outcome.alone = True  # one of them may have been applied, and would refuse all
                        self._outcomes.appendleft(outcome)
                self._flying.clear()
            for job in self._unstarted():
                self.give_back(job)
        if attempt == 0 or attempt % 20 == 0 or isinstance(why, AuthError):
            log.warning("%s; the worker goes on trying", why)
        self._on_error(why)

    def _answer(self, reply: dict[str, Any]) -> None:
        key = reply.get("reqId", "")
        pull = self._pulls.get(key)
        if pull is not None:
            if reply.get("ok"):
                self._delivered(pull[0], reply)
            else:
                self._pull_refused(pull[0], str(reply.get("error")))
            self._pulls.pop(key, None)  # not before its jobs are counted as in hand
            self._pulling.discard(pull[0])
            if self.burst or self.remaining == 0:
                self._check_settled()
            return
        outcomes = self._flying.get(key)
        if outcomes is None:
            return
        if not reply.get("ok"):
            self._refused(outcomes, str(reply.get("error")))
        else:
            data = reply.get("data") or {}
            ignored = set(data.get("ignoredIndices") or ())
            if data.get("applied") is False:
                ignored.add(0)
            for place, outcome in enumerate(outcomes):
                self._held.pop(outcome.token, None)
                if place in ignored:
                    log.warning("job %s had ended already when its outcome came: it took too long", outcome.job.id)
                else:
                    outcome.then(outcome)
        self._flying.pop(key, None)
        self._dry.clear()
        if self._stopping or self.burst or self.remaining == 0:
            self._check_settled()

    def _delivered(self, queue: str, reply: dict[str, Any]) -> None:
        self._refusals = 0
        jobs = reply["jobs"]
        for raw, token in zip(jobs, reply["tokens"], strict=True):
            job = self._make(raw, token)
            self._held[token] = job.id
            self._in_hand[token] = job
            if self._stopping:
                self.give_back(job)
            else:
                self._take(job)
        if jobs:
            self._busy = True
            if self.remaining is not None:
                self.remaining -= len(jobs)
            return
        if self.burst:
            self._dry.add(queue)
        if self._busy and not self._in_hand:
            self._busy = False
            self._on_drained()

    def _pull_refused(self, queue: str, text: str) -> None:
        if self._refusals == 0:
            level = logging.WARNING if text.startswith(_TRANSIENT) else logging.ERROR
            log.log(level, "pulling from %s is refused: %s; the worker goes on trying", queue, text)
        self._not_before[queue] = time.monotonic() + max(pause(self._refusals + 3), 0.05)
        self._refusals += 1
        self._on_error(GQueueError(text))

    def _refused(self, outcomes: list[Outcome], text: str) -> None:
        if len(outcomes) > 1:  # one of them is the cause and none was applied: ask one by one
            for outcome in reversed(outcomes):
                outcome.alone = True
                outcome.sent -= 1
                self._outcomes.appendleft(outcome)
            return
        (outcome,) = outcomes
        if _is_final(text):
            self._held.pop(outcome.token, None)
            if outcome.cmd == "MoveToWait":
                return  # it has gone back by itself
            if outcome.sent > 1 and "not in processing state" in text:
                outcome.then(outcome)  # the first one arrived, its answer did not
                return
            if not outcome.job.lost:  # else that has been said
                log.warning("%s of job %s does not count: %s", outcome.cmd, outcome.job.id, text)
            outcome.job.lose()
            return
        if outcome.tries == _TRIES and not text.startswith(_TRANSIENT):
            self._held.pop(outcome.token, None)
            log.error("%s of job %s is refused again and again: %s; given up", outcome.cmd, outcome.job.id, text)
            return
        if outcome.tries == 0:
            log.error("%s of job %s is refused: %s; the worker goes on trying", outcome.cmd, outcome.job.id, text)
        self._later.append((time.monotonic() + max(pause(outcome.tries + 2), 0.05), outcome))
        outcome.tries += 1

    def _revive_later(self) -> None:
        now = time.monotonic()
        due = [outcome for moment, outcome in self._later if moment <= now]
        if due:
            self._outcomes.extend(due)
            self._later = [entry for entry in self._later if entry[0] > now]

    def _check_settled(self) -> None:
        """Say when a stop, a burst or a number of jobs has come to its end."""
        with self._sending:  # what is being written right now is in neither place
            if self._in_hand or self._outcomes or self._flying or self._later:
                return
        if self._stopping:
            self._settled.set()
        elif (self.burst and len(self._dry) == len(self.queues)) or self.remaining == 0:
            self._on_done()


def _is_final(text: str) -> bool:
    """Refusals that mean the job is not this worker's any more (core 14): there is only their text to know them by."""
    return "lock token" in text or "not found" in text.lower() or "not active" in text or "Cannot move job" in text


def _nothing(outcome: Outcome) -> None:
    pass
