"""Where every job stands: id -> job, the queues, unique keys, dependencies, counts.

A pure function of the records (design I1): `enter` and `leave` are all there is, a change is leave, alter, enter.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from gqueue.engine.queue import Queue
from gqueue.model import Job, State

if TYPE_CHECKING:
    from gqueue.engine.delivery import Pull

_PARTS = 64  # one dict of all jobs would stop the broker for 60-90 ms whenever it doubles

Slot = tuple[str, str, str]  # kind ("unique", "debounce"), queue, key


class Index:
    """All jobs in memory, and what follows from their records."""

    def __init__(self) -> None:
        self._parts: list[dict[str, Job]] = [{} for _ in range(_PARTS)]
        self.queues: dict[str, Queue] = {}
        self.shadows: dict[str, Queue] = {}  # names that are waited for but not registered
        self.slots: dict[Slot, Job] = {}
        self.dependents: dict[str, dict[int, Job]] = {}  # id -> blocked jobs that wait for its completion
        self.completions: deque[tuple[int, Job]] = deque()  # (finished_at, job), oldest first; entries dropped lazily
        self.completed = 0  # completed jobs in memory
        self.woken: list[Queue] = []  # queues with waiters that got a ready job

    # ---------------------------------------------------------------- look-ups

    def get(self, id: str) -> Job | None:
        return self._parts[hash(id) & 63].get(id)

    def jobs(self) -> Iterator[Job]:
        for part in self._parts:
            yield from part.values()

    def __len__(self) -> int:
        return sum(map(len, self._parts))

    def queue(self, name: str) -> Queue:
        """The queue of this name; registered if it is new."""
        queue = self.queues.get(name)
        if queue is None:
            queue = self.queues[name] = self.shadows.pop(name) if name in self.shadows else Queue(name)
        return queue

    def shadow(self, name: str) -> Queue:
        """A place to wait for jobs of a queue that does not exist: a pull registers no name (core 4.4)."""
        queue = self.shadows.get(name)
        if queue is None:
            queue = self.shadows[name] = Queue(name)
        return queue

    def unpark(self, pull: Pull) -> Queue | None:
        """Take a parked pull away; its queue, if that is registered."""
        queue = self.queues.get(pull.queue)
        if queue is not None:
            queue.waiters.pop(pull, None)
            return queue
        shadow = self.shadows.get(pull.queue)
        if shadow is not None:
            shadow.waiters.pop(pull, None)
            if not shadow.waiters:
                del self.shadows[pull.queue]
        return None

    def forget(self, queue: Queue) -> None:
        """Drop a queue's name; whoever waits for its jobs goes on waiting."""
        if self.queues.pop(queue.name, None) is not None and queue.waiters:
            shadow = self.shadow(queue.name)
            shadow.waiters = queue.waiters

    def all_queues(self) -> list[Queue]:
        """Every queue, registered or only waited for."""
        return [*self.queues.values(), *self.shadows.values()]

    def holder(self, slot: Slot, now: int) -> Job | None:
        """The job that owns a unique key or debounce id at `now`."""
        job = self.slots.get(slot)
        if job is None:
            return None
        extra = job.more
        until = extra.unique_until if slot[0] == "unique" else extra.debounce_until
        if until is not None and until <= now:
            del self.slots[slot]
            return None
        return job

    # ---------------------------------------------------------------- in and out

    def add(self, job: Job, now: int) -> None:
        """A job that was not here before: its identity, then its place."""
        self._parts[hash(job.id) & 63][job.id] = job
        self.enter(job, now)

    def recall(self, job: Job) -> None:
        """A completed job that only the store had: counted already, and older than those in memory."""
        queue = self.queues.get(job.queue) or self.queue(job.queue)
        job.queue = queue.name
        self._parts[hash(job.id) & 63][job.id] = job
        queue.completed[job.seq] = job
        self.completed += 1
        self.completions.appendleft((job.finished_at or 0, job))

    def discard(self, job: Job) -> None:
        """A job that is gone for good, or from memory."""
        self.leave(job)
        part = self._parts[hash(job.id) & 63]
        if part.get(job.id) is job:
            del part[job.id]

    def enter(self, job: Job, now: int) -> None:
        queue = self.queues.get(job.queue) or self.queue(job.queue)
        state = job.state
        if state is State.QUEUED:
            queue.add_queued(job, now)
            if queue.waiters:
                self.woken.append(queue)
        elif state is State.ACTIVE:
            queue.active[job.seq] = job
            if job.extra is not None and job.extra.group_id is not None:
                queue.group(job.extra.group_id).active += 1
        elif state is State.COMPLETED:
            queue.completed[job.seq] = job
            queue.finished += 1
            self.completed += 1
            self.completions.append((job.finished_at or 0, job))
            return
        elif state is State.FAILED:
            queue.failed[job.seq] = job
            return
        else:
            queue.blocked[job.seq] = job
            for id in job.more.pending:
                self.dependents.setdefault(id, {})[job.seq] = job
        if job.extra is not None:
            for slot, until in slots_of(job):
                if (until is None or until > now) and slot not in self.slots:
                    self.slots[slot] = job

    def leave(self, job: Job) -> None:
        queue = self.queues[job.queue]
        state = job.state
        if state is State.QUEUED:
            queue.remove_queued(job)
        elif state is State.ACTIVE:
            del queue.active[job.seq]
            if job.extra is not None and job.extra.group_id is not None:
                group = queue.groups[job.extra.group_id]
                group.active -= 1
                queue.drop_if_idle(job.extra.group_id, group)
            if queue.limits is not None and queue.waiters:
                self.woken.append(queue)
        elif state is State.COMPLETED:
            del queue.completed[job.seq]
            queue.finished -= 1
            self.completed -= 1
            return
        elif state is State.FAILED:
            del queue.failed[job.seq]
            return
        else:
            del queue.blocked[job.seq]
            for id in job.more.pending:
                waiting = self.dependents[id]
                del waiting[job.seq]
                if not waiting:
                    del self.dependents[id]
        if job.extra is not None:
            for slot, _ in slots_of(job):
                if self.slots.get(slot) is job:
                    del self.slots[slot]

    def oldest_completion(self) -> Job | None:
        """The completed job in memory that finished first."""
        completions = self.completions
        while completions:
            finished_at, job = completions[0]
            if job.state is State.COMPLETED and job.finished_at == finished_at and self.get(job.id) is job:
                return job
            completions.popleft()
        return None

    # ---------------------------------------------------------------- the proof of I1

    def picture(self, now: int) -> dict[str, Any]:
        """All that follows from the records, in comparable form: two indexes of the same records give the same."""
        queues: dict[str, Any] = {}
        for name, queue in self.queues.items():
            queue.mature(now)
            if queue.empty:
                continue
            queues[name] = {
                "ready": sorted(job.id for job in queue.ready_jobs()),
                "delayed": sorted((job.run_at, job.id) for job in queue.delayed_jobs()),
                "active": sorted(
                    (job.id, job.delivery, job.lease.token if job.lease else "") for job in queue.active.values()
                ),
                "blocked": sorted((job.id, sorted(job.more.pending)) for job in queue.blocked.values()),
                "completed": sorted(job.id for job in queue.completed.values()),
                "failed": sorted(job.id for job in queue.failed.values()),
                "counts": (
                    queue.ready,
                    queue.prioritized,
                    queue.delayed_live,
                    queue.finished,
                    sorted(queue.priorities.items()),
                ),
                "groups": sorted((id, group.depth, group.active) for id, group in queue.groups.items()),
                "paused": queue.paused,
                "stall": sorted(queue.stall.items()),
            }
        return {
            "queues": queues,
            "slots": sorted(
                (slot, job.id) for slot, job in list(self.slots.items()) if self.holder(slot, now) is not None
            ),
            "dependents": sorted((id, sorted(job.id for job in jobs.values())) for id, jobs in self.dependents.items()),
        }


def slots_of(job: Job) -> list[tuple[Slot, int | None]]:
    """The exclusion slots that a live job claims, each with the instant when its claim ends."""
    extra = job.extra
    if extra is None:
        return []
    slots: list[tuple[Slot, int | None]] = []
    if extra.unique_key is not None and not extra.dropped_key:
        slots.append((("unique", job.queue, extra.unique_key), extra.unique_until))
    elif extra.debounce_id is not None and extra.unique_key is None and not extra.dropped_key:
        slots.append((("debounce", job.queue, extra.debounce_id), extra.debounce_until))
    return slots
