"""Keeps the leases of a worker alive, from a native thread on a connection of its own (robustness R94)."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

from gqueue.client.line import Line, native, original, pause
from gqueue.client.target import Target
from gqueue.client.values import number
from gqueue.errors import CommandTimeoutError, ConnectionClosedError, GQueueError

_PATIENCE = 10.0  # s for connecting and for each answer


class Leases:
    """What a worker holds, by token, and the thread that renews it.

    The thread is a real one even in a program patched by gevent, where a busy handler would stop every other greenlet.
    It therefore touches only plain dicts and native locks; what it has to say goes through `tell`, which the worker
    may run in another thread.
    """

    def __init__(
        self,
        target: Target,
        *,
        every: float,
        worker: dict[str, Any],
        counts: Callable[[], dict[str, int]],
        tell: Callable[[Callable[[], None]], None],
        lost: Callable[[str], None],
        trouble: Callable[[GQueueError], None],
    ) -> None:
        self.held: dict[str, str] = {}  # token -> job id; from the delivery until its outcome is answered
        self._target = target
        self._every = every  # s between renewals
        self._worker = worker  # fields of RegisterWorker
        self._counts = counts  # fields of Heartbeat
        self._tell = tell
        self._lost = lost
        self._trouble = trouble
        self._net = native()
        self._bell = self._net.lock()
        self._bell.acquire()
        self._stopping = False
        self._known: frozenset[str] = frozenset()  # tokens held at the last round
        self._line: Line | None = None

    def start(self) -> None:
        """Start the thread; it announces the worker and then renews every so often."""
        original("_thread", "start_new_thread")(self._run, ())

    def stop(self) -> None:
        """Stop renewing and take the worker off the broker's list, with the connection."""
        self._stopping = True
        with contextlib.suppress(RuntimeError):  # it rings already
            self._bell.release()

    def _run(self) -> None:
        attempt = 0
        rest = 0.0
        while not self._stopping:
            try:
                self._renew()
            except GQueueError as exc:
                if self._line is not None:
                    self._line.close()
                    self._line = None
                if attempt == 1:  # the first failure may be a restart of the broker; the worker's own line reports that
                    self._tell(lambda exc=exc: self._trouble(exc))  # type: ignore[misc]
                rest = pause(attempt)
                attempt += 1
            else:
                attempt = 0
                rest = self._every
            self._bell.acquire(timeout=rest)
        if self._line is not None:
            self._line.close()

    def _renew(self) -> None:
        line = self._line
        if line is None or line.hung_up():
            if line is not None:
                line.close()
            line = self._line = Line.open(self._target, _PATIENCE, self._net)
            self._ask("RegisterWorker", self._worker)
        now = self.held.copy()
        # Not those that are new since the last time: what has never been renewed goes back to the queue as soon as this
        # process dies (core 5.5), so a lease is first renewed after one to two rounds, of which it lasts three.
        held = {token: id for token, id in now.items() if token in self._known}
        self._known = frozenset(now)
        if held:
            tokens = list(held)
            reply = self._ask("JobHeartbeatB", {"ids": list(held.values()), "tokens": tokens})
            if reply.get("ok") and int(reply["data"]["count"]) < len(tokens):
                self._sort_out(held)
        self._ask("Heartbeat", {"id": self._worker["workerId"], **self._counts()})

    def _sort_out(self, held: dict[str, str]) -> None:
        """Some of many were not renewed: find out which, and say so for those that are still held."""
        for token, id in held.items():
            if token in self.held and not self._ask("JobHeartbeat", {"id": id, "token": token}).get("ok"):
                self._tell(lambda token=token: self._lost(token))  # type: ignore[misc]

    def _ask(self, cmd: str, fields: dict[str, Any]) -> dict[str, Any]:
        line = self._line
        assert line is not None
        try:
            return line.ask(cmd, fields, time.monotonic() + _PATIENCE)
        except CommandTimeoutError as exc:
            raise ConnectionClosedError(str(exc)) from None


def registration(worker_id: str, name: str, queues: list[str], concurrency: int) -> dict[str, Any]:
    """The fields of RegisterWorker for this process."""
    return {
        "name": name,
        "queues": queues,
        "concurrency": concurrency,
        "workerId": worker_id,
        "hostname": socket.gethostname(),
        "pid": os.getpid(),
        "startedAt": number(int(time.time() * 1000)),
    }


def patched() -> bool:
    """Whether gevent has replaced this program's threads."""
    monkey = sys.modules.get("gevent.monkey")
    return monkey is not None and bool(monkey.is_module_patched("threading"))
