"""What happened, for those who asked: subscribers of a queue, and who waits for the end of a job (core 13, 8.11)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gqueue.engine.timers import Kind, Timers
from gqueue.model import Job, Packed


class Wait:
    """One parked WaitJob. `answer` gets the reply's fields; ends by itself at `deadline` (ms)."""

    __slots__ = ("answer", "deadline", "job_id", "session")

    def __init__(self, session: Any, job_id: str, deadline: int, answer: Callable[[dict[str, Any]], None]) -> None:
        self.session = session
        self.job_id = job_id
        self.deadline = deadline
        self.answer = answer


class Events:
    """Publishes in the order of the changes. `deliver(subscribers, event)` packs and queues the frame."""

    def __init__(self, timers: Timers, deliver: Callable[[set[Any], dict[str, Any]], None]) -> None:
        self.timers = timers
        self.deliver = deliver
        self.subscribers: dict[str, set[Any]] = {}  # by queue name; the queue need not exist
        self.waits: dict[str, dict[Wait, None]] = {}
        self._expiry = Kind(self._waiting, self._expire)

    # ---------------------------------------------------------------- subscribers

    def subscribe(self, session: Any, queue: str) -> None:
        """Send this connection what happens in one queue; replaces its earlier subscription."""
        self.unsubscribe(session)
        self.subscribers.setdefault(queue, set()).add(session)
        session.subscription = queue

    def unsubscribe(self, session: Any) -> None:
        if session.subscription is not None:
            subscribers = self.subscribers[session.subscription]
            subscribers.discard(session)
            if not subscribers:
                del self.subscribers[session.subscription]
            session.subscription = None

    def publish(self, kind: str, queue: str, job_id: str, now: int, **fields: Any) -> None:
        """Tell the subscribers of a queue. Callers on the hot path look at `subscribers` first."""
        subscribers = self.subscribers.get(queue)
        if subscribers:
            self.deliver(subscribers, {"eventType": kind, "queue": queue, "jobId": job_id, "timestamp": now, **fields})

    # ---------------------------------------------------------------- the end of a job

    def wait(self, wait: Wait, now: int) -> None:
        """Park until the job ends, is removed, or the time is over."""
        self.waits.setdefault(wait.job_id, {})[wait] = None
        self.timers.after(self._expiry, now, wait.deadline - now, wait)

    def drop(self, wait: Wait) -> None:
        """Its connection is gone."""
        waits = self.waits.get(wait.job_id)
        if waits is not None and wait in waits:
            del waits[wait]
            if not waits:
                del self.waits[wait.job_id]

    def ended(self, job: Job, result: Packed | None) -> None:
        """The job has been completed."""
        if job.id in self.waits:
            fields: dict[str, Any] = {"completed": True}
            if result is not None:
                fields["result"] = result
            self._answer(job.id, fields)

    def broken(self, job: Job, error: str | None) -> None:
        """The job has failed for good."""
        if job.id in self.waits:
            fields: dict[str, Any] = {"completed": False, "failed": True}
            if error is not None:
                fields["error"] = error
            self._answer(job.id, fields)

    def gone(self, job: Job) -> None:
        """The job was removed before it ended."""
        if job.id in self.waits:
            self._answer(job.id, {"completed": False, "removed": True})

    def _answer(self, job_id: str, fields: dict[str, Any]) -> None:
        for wait in self.waits.pop(job_id):
            wait.answer(fields)

    def _waiting(self, wait: Wait, at: int) -> bool:
        return wait in self.waits.get(wait.job_id, ())

    def _expire(self, wait: Wait, now: int) -> None:
        self.drop(wait)
        wait.answer({"completed": False})
