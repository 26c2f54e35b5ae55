"""Get, list, count; changes nothing (core 7)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from gqueue.engine.queue import Queue
from gqueue.engine.states import state_name
from gqueue.engine.turns import Turns, first_of
from gqueue.errors import NotFound
from gqueue.model import Job

if TYPE_CHECKING:
    from gqueue.engine.engine import Engine

_ALL = ("waiting", "prioritized", "delayed", "active", "completed", "failed", "waiting-children")


class Queries:
    """Answers from memory."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def job(self, id: str) -> Job:
        """Raises NotFound."""
        job = self.engine.index.get(id)
        if job is None:
            raise NotFound("Job not found")
        return job

    def by_custom_id(self, custom_id: str) -> Job:
        """Raises NotFound, also for a generated id (core 7.2)."""
        job = self.engine.index.get(custom_id)
        if job is None or job.more.custom_id is None:
            raise NotFound("Job not found")
        return job

    def state(self, id: str, now: int) -> str:
        job = self.engine.index.get(id)
        return "unknown" if job is None else state_name(job, now)

    def counts(self, name: str, now: int) -> dict[str, int]:
        """Jobs of a queue by state; O(1) (core 7.6)."""
        queue = self.engine.index.queues.get(name)
        if queue is None:
            return dict.fromkeys((*_ALL, "paused"), 0)
        queue.mature(now)
        ready = 0 if queue.paused else queue.ready
        prioritized = 0 if queue.paused else queue.prioritized
        return {
            "waiting": ready - prioritized,
            "prioritized": prioritized,
            "delayed": queue.delayed_live,
            "active": len(queue.active),
            "completed": queue.finished,
            "failed": len(queue.failed),
            "waiting-children": len(queue.blocked),
            "paused": queue.ready if queue.paused else 0,
        }

    def count(self, name: str, now: int) -> int:
        """Jobs of a queue in any state (core 7.8)."""
        return sum(self.counts(name, now).values())

    def totals(self) -> dict[str, int]:
        """Jobs by the stored state, of all queues."""
        queues = self.engine.index.queues.values()
        return {
            "queued": sum(queue.ready + queue.delayed_live for queue in queues),
            "active": sum(len(queue.active) for queue in queues),
            "blocked": sum(len(queue.blocked) for queue in queues),
            "failed": sum(len(queue.failed) for queue in queues),
            "completed": sum(queue.finished for queue in queues),
        }

    def per_priority(self, name: str) -> dict[str, int]:
        """Queued jobs of a queue by priority, as text (core 7.7)."""
        queue = self.engine.index.queues.get(name)
        return {} if queue is None else {str(priority): count for priority, count in sorted(queue.priorities.items())}

    def page(
        self, name: str, states: list[str] | None, *, limit: int, offset: int, asc: bool, now: int
    ) -> Turns[list[tuple[Job, str]]]:
        """Jobs of a queue with the state each matched under, by (created_at, id) (core 7.5)."""
        queue = self.engine.index.queues.get(name)
        if queue is None or limit == 0:
            return []
        queue.mature(now)
        wanted = dict.fromkeys("waiting" if state == "wait" else state for state in states or _ALL)
        first: list[tuple[Job, str]] = []
        for state in wanted:
            jobs = self._in_state(queue, state, listed=bool(states))
            some = yield from first_of(jobs, offset + limit, _creation, last=not asc)
            first += [(job, "paused" if state == "paused" else "") for job in some]
        first.sort(key=lambda pair: _creation(pair[0]), reverse=not asc)
        return [(job, state or state_name(job, now)) for job, state in first[offset : offset + limit]]

    def _in_state(self, queue: Queue, state: str, *, listed: bool) -> Iterable[Job]:
        if state in ("waiting", "prioritized"):
            if queue.paused and listed:
                return ()
            return _by_priority(queue.ready_jobs(), above=state == "prioritized")
        if state == "paused":
            return queue.ready_jobs() if queue.paused else ()
        if state == "delayed":
            return queue.delayed_jobs()
        tables = {
            "active": queue.active,
            "completed": queue.completed,
            "failed": queue.failed,
            "waiting-children": queue.blocked,
        }
        return tables[state].values() if state in tables else ()

    def children_values(self, id: str) -> dict[str, bytes]:
        """Results of a job's children, by `queue:id` (core 7.10)."""
        job = self.engine.index.get(id)
        values: dict[str, bytes] = {}
        for child_id in job.more.children_ids if job is not None else ():
            child = self.engine.index.get(child_id)
            if child is not None and child.result is not None:
                values[f"{child.queue}:{child_id}"] = child.result
        return values


def _creation(job: Job) -> tuple[int, str]:
    return job.created_at, job.id


def _by_priority(jobs: Iterator[Job], *, above: bool) -> Iterator[Job]:
    return (job for job in jobs if (job.priority > 0) is above)
