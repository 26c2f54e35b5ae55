"""One job: what the broker has told about it, its result, and what a handler may do with it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar, cast

from gqueue.client.values import Duration, Reviver, milliseconds, seconds
from gqueue.errors import CommandError, GQueueError, JobFailed, JobTimeout

if TYPE_CHECKING:
    from gqueue.client.client import Client

R = TypeVar("R")

_ENDED = frozenset({"completed", "failed", "unknown"})
_WAIT = 30.0  # s of one WaitJob

log = logging.getLogger("gqueue.job")


class Job(Generic[R]):
    """A job of a broker.

    Fields are those the broker sent last. A job that was only pushed asks for them when one is first needed;
    `refresh()` asks again.
    """

    __slots__ = ("_cancelled", "_client", "_lost", "_on_progress", "_revive", "id", "queue", "raw", "settled", "token")

    def __init__(
        self,
        raw: dict[str, Any],
        client: Callable[[], Client],
        *,
        token: str | None = None,
        revive: Reviver | None = None,
        on_progress: Callable[[Job[Any], float], None] | None = None,
    ) -> None:
        self.raw = raw  # the broker's map, wire names
        self.id: str = raw["id"]
        self.queue: str = raw["queue"]
        self.token = token  # of the lease, in a worker
        self.settled = False  # the handler has given the job away itself
        self._client = client
        self._revive = revive
        self._on_progress = on_progress
        self._cancelled: threading.Event | None = None
        self._lost = False

    def __repr__(self) -> str:
        return f"<Job {self.id} {self.raw.get('name', '')!r} of {self.queue}>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Job) and other.id == self.id

    def __hash__(self) -> int:
        return hash(self.id)

    # ------------------------------------------------------------ fields

    def _field(self, name: str) -> Any:
        if name not in self.raw and "createdAt" not in self.raw:
            self.refresh()
        return self.raw.get(name)

    def _number(self, name: str) -> int:
        return int(self._field(name) or 0)

    def _instant(self, name: str) -> int | None:
        value = self._field(name)
        return None if value is None else int(value)

    @property
    def name(self) -> str:
        return str(self._field("name"))

    @property
    def data(self) -> Any:
        return self._field("data")

    @property
    def state(self) -> str:
        """Where it stood when the broker was last asked."""
        return str(self._field("state") or ("active" if self.token else "unknown"))

    @property
    def attempts(self) -> int:
        """Runs that have failed."""
        return self._number("attempts")

    @property
    def max_attempts(self) -> int:
        return self._number("maxAttempts")

    @property
    def priority(self) -> int:
        return self._number("priority")

    @property
    def progress(self) -> float:
        """0 to 100."""
        value = self._field("progress") or 0
        return float(value)

    @property
    def timeline(self) -> list[dict[str, Any]]:
        """What happened, oldest first: `state`, `timestamp` in ms, `error`, `attempt`."""
        return list(self._field("timeline") or ())

    @property
    def created_at(self) -> int | None:
        """ms since the epoch, as the other instants."""
        return self._instant("createdAt")

    @property
    def run_at(self) -> int | None:
        return self._instant("runAt")

    @property
    def started_at(self) -> int | None:
        return self._instant("startedAt")

    @property
    def completed_at(self) -> int | None:
        return self._instant("completedAt")

    @property
    def custom_id(self) -> str | None:
        return self._text("customId")

    @property
    def parent_id(self) -> str | None:
        return self._text("parentId")

    @property
    def group_id(self) -> str | None:
        return self._text("groupId")

    @property
    def tags(self) -> list[str]:
        return list(self._field("tags") or ())

    @property
    def depends_on(self) -> list[str]:
        return list(self._field("dependsOn") or ())

    @property
    def children_ids(self) -> list[str]:
        return list(self._field("childrenIds") or ())

    @property
    def stacktrace(self) -> list[str]:
        """Of the last failure, innermost frame first."""
        return list(self._field("stacktrace") or ())

    @property
    def failed_reason(self) -> str | None:
        """The error of the last failed run."""
        return self._text("failedReason")

    def _text(self, name: str) -> str | None:
        value = self._field(name)
        return None if value is None else str(value)

    def refresh(self) -> Job[R]:
        """Read it again. Raises CommandError when the job is gone."""
        self.raw = self._client().get_job(self.id)["job"]
        return self

    # ------------------------------------------------------------ result

    def get_state(self) -> str:
        """Where it stands now; `unknown` when it is gone."""
        return str(self._client().get_state(self.id)["state"])

    def done(self) -> bool:
        """Whether it has ended: completed, failed for good, or removed."""
        return self.get_state() in _ENDED

    def result(self, timeout: Duration | None = None) -> R:
        """Wait for the job to complete and return what its handler returned. The broker answers at once, nothing polls.

        A number is in seconds; None waits for ever. Raises JobFailed when the job has failed for good or was removed,
        JobTimeout when it has not ended in time. A lost connection is made again and asked again.
        """
        deadline = None if timeout is None else time.monotonic() + seconds(timeout)
        while True:
            left = _WAIT if deadline is None else max(deadline - time.monotonic(), 0)
            reply = self._client().wait_job(self.id, milliseconds(round(min(left, _WAIT) * 1000)))
            state = "completed" if reply.get("completed") else "failed" if reply.get("failed") else None
            if state is None and not reply.get("removed"):
                state = self.get_state()  # other brokers of this protocol do not wake us for every end
                if state == "completed":
                    reply = self._client().get_result(self.id)
            if state == "completed":
                value = reply.get("result")
                return cast(R, self._revive(value) if self._revive is not None else value)
            if state == "failed" or reply.get("removed"):
                raise self._failure(reply)
            if deadline is not None and time.monotonic() >= deadline:
                raise JobTimeout(f"job {self.id} did not end within {seconds(timeout or 0):g} s")

    def _failure(self, reply: Mapping[str, Any]) -> JobFailed:
        if reply.get("removed"):
            return JobFailed(f"job {self.id} was removed before it completed", job=self)
        error = reply.get("error")
        try:
            self.refresh()
        except CommandError:  # dropped as soon as it had failed
            return JobFailed(f"job {self.id} failed: {error}", job=self, error=error)
        error = error if error is not None else self.failed_reason
        return JobFailed(f"job {self.id} ({self.name}) failed: {error}", job=self, error=error, stack=self.stacktrace)

    def add_done_callback(self, fn: Callable[[Job[R]], object]) -> None:
        """Call `fn(job)` from another thread when the job has ended, however. Each callback has a waiting thread."""

        def wait() -> None:
            try:
                self.result()
            except GQueueError as exc:
                if not isinstance(exc, JobFailed | CommandError):
                    log.warning("gave up waiting for job %s: %s", self.id, exc)
                    return
            try:
                fn(self)
            except Exception:
                log.exception("a done callback of job %s failed", self.id)

        threading.Thread(target=wait, name=f"gqueue-wait-{self.id}", daemon=True).start()

    # ------------------------------------------------------------ changing it

    def update_data(self, data: Any) -> None:
        self._client().update(self.id, data)
        self.raw["data"] = data

    def change_priority(self, priority: int, lifo: bool | None = None) -> None:
        self._client().change_priority(self.id, priority, lifo)

    def change_delay(self, delay: Duration) -> None:
        """Let it run `delay` from now."""
        self._client().change_delay(self.id, milliseconds(delay), self.token)
        self.settled = self.token is not None

    def promote(self) -> None:
        """Run it now instead of after its delay."""
        self._client().promote(self.id)

    def retry(self) -> None:
        """Make it ready again: a failed, delayed or active one."""
        self._client().move_to_wait(self.id, self.token)
        self.settled = self.token is not None

    def remove(self) -> None:
        """Cancel it. Refused when it is running or has ended."""
        self._client().cancel(self.id)

    # ------------------------------------------------------------ in a handler

    @property
    def cancelled(self) -> threading.Event:
        """Set when the result of this run will not count any more: the lease is lost or the worker gives up waiting.

        A long handler may look at it, or wait on it instead of sleeping.
        """
        event = self._cancelled
        if event is None:
            event = self._cancelled = threading.Event()
        if self._lost:
            event.set()
        return event

    @property
    def lost(self) -> bool:
        """Whether `cancelled` is set."""
        return self._lost

    def lose(self) -> None:
        """Mark this run as cancelled."""
        self._lost = True
        if self._cancelled is not None:
            self._cancelled.set()

    def update_progress(self, progress: float, message: str | None = None) -> None:
        """0 to 100; also shows that the job is alive."""
        self._client().progress(self.id, progress, message, token=self.token)
        self.raw["progress"] = progress
        if self._on_progress is not None:
            self._on_progress(self, progress)

    def log(self, message: str, level: Literal["info", "warn", "error"] | None = None) -> None:
        """Add a line to the job's log in the broker."""
        self._client().add_log(self.id, message, level)

    def logs(self) -> list[dict[str, Any]]:
        """`message`, `level`, `timestamp` of each line, oldest first."""
        return list(self._client().get_logs(self.id)["data"]["logs"])

    def extend_lock(self, duration: Duration) -> None:
        """Let the lease end `duration` from now. A worker renews its leases by itself."""
        self._client().extend_lock(self.id, milliseconds(duration), self.token)

    def heartbeat(self) -> None:
        """Renew the lease now."""
        self._client().job_heartbeat(self.id, self.token)

    def move_to_delayed(self, delay: Duration) -> None:
        """Give it back to run again `delay` from now, with no attempt counted. What the handler returns is ignored."""
        self._client().move_to_delayed(self.id, milliseconds(delay), self.token)
        self.settled = True

    def move_to_waiting_children(self) -> None:
        """Park it until its children are done. The handler's return is then ignored."""
        self._client().move_to_waiting_children(self.id, self.token)
        self.settled = True

    def discard(self) -> None:
        """Fail it for good. The handler's return is then ignored."""
        self._client().discard(self.id, self.token)
        self.settled = True

    def children_values(self) -> dict[str, Any]:
        """Results of its children, by `queue:id`."""
        return dict(self._client().get_children_values(self.id)["data"]["values"])

    def get_children_values(self) -> dict[str, Any]:
        """The same as `children_values`, under the name of the official client."""
        return self.children_values()
