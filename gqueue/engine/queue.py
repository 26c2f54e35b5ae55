"""One queue: its ready order, what is delayed, what is active, who waits for its jobs.

The order of ready jobs is core 3.4, and stands nowhere else: by priority, then lifo before the rest, newest first among
lifo, by (run_at, seq) among the rest. Jobs of a group come after all others, in rotation (core 11.2).
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, Any

import msgpack

from gqueue.model import Job

if TYPE_CHECKING:
    from gqueue.engine.delivery import Pull
    from gqueue.engine.limits import Limits

# Where a job of a queue is kept: Job.place.
NOWHERE, FIFO, SIDE, LIFO, GROUPED, DELAYED = range(6)


class _Gone:
    """Keeps the place of a job that left the middle of the line, so that the line stays searchable."""

    __slots__ = ("run_at", "seq")

    def __init__(self, job: Job) -> None:
        self.run_at = job.run_at
        self.seq = job.seq


def _key(entry: Job | _Gone) -> tuple[int, int]:
    return entry.run_at, entry.seq


class Level:
    """The ready jobs of one priority.

    Jobs nearly always arrive in order, so the line is a list with a moving head: O(1) at both ends, and a job in the
    middle is found by bisection. The few that come out of order, and the lifo ones, go to heaps, whose entries are
    dropped lazily when they reach the top.
    """

    __slots__ = ("gone", "head", "lifo", "lifo_live", "line", "live", "priority", "side", "side_live")

    def __init__(self, priority: int) -> None:
        self.priority = priority
        self.live = 0
        self.line: list[Any] = []  # Job or _Gone, by (run_at, seq); None before `head`
        self.head = 0
        self.gone = 0
        self.side: list[tuple[int, int, Job]] = []  # (run_at, seq, job)
        self.side_live = 0
        self.lifo: list[tuple[int, Job]] = []  # (-seq, job)
        self.lifo_live = 0

    def add(self, job: Job) -> None:
        self.live += 1
        line = self.line
        if job.extra is not None and job.extra.lifo:
            job.place = LIFO
            self.lifo_live += 1
            heappush(self.lifo, (-job.seq, job))
        elif self.head == len(line):
            line.clear()
            self.head = 0
            job.place = FIFO
            line.append(job)
        else:
            last = line[-1]
            if job.run_at > last.run_at or (job.run_at == last.run_at and job.seq > last.seq):
                job.place = FIFO
                line.append(job)
            else:
                job.place = SIDE
                self.side_live += 1
                heappush(self.side, (job.run_at, job.seq, job))

    def first(self) -> Job:
        """The job that comes next. There is one: `live` is not 0."""
        if self.lifo_live:
            lifo = self.lifo
            while not self._in_lifo(job := lifo[0][1]):
                heappop(lifo)
            return job
        if self.side_live:
            side = self.side
            while not self._in_side(*side[0]):
                heappop(side)
            job = side[0][2]
            if self.live == self.side_live:
                return job
            other: Job = self._line_first()
            return job if (job.run_at, job.seq) < (other.run_at, other.seq) else other
        return self._line_first()

    def _line_first(self) -> Job:
        line = self.line
        at = self.head
        while type(entry := line[at]) is _Gone:
            line[at] = None
            at += 1
            self.gone -= 1
        self.head = at
        return entry  # type: ignore[no-any-return]

    def remove(self, job: Job) -> None:
        """Take a job out, wherever it stands. Its run_at, priority and lifo must still be what they were at `add`."""
        self.live -= 1
        place, job.place = job.place, NOWHERE
        if place == FIFO:
            line = self.line
            head = self.head
            if line[head] is job:
                line[head] = None
                self.head = head = head + 1
                if head > 1024 and head * 2 > len(line):
                    del line[:head]
                    self.head = 0
                return
            line[bisect_left(line, (job.run_at, job.seq), lo=head, key=_key)] = _Gone(job)
            self.gone += 1
            if self.gone > 64 and self.gone * 2 > len(line) - head:
                self.line = [entry for entry in line[head:] if type(entry) is not _Gone]
                self.head = self.gone = 0
        elif place == SIDE:
            self.side_live -= 1
            if len(self.side) > 64 and len(self.side) > self.side_live * 2:
                self.side = list({entry[2].seq: entry for entry in self.side if self._in_side(*entry)}.values())
                heapify(self.side)
        else:
            self.lifo_live -= 1
            if len(self.lifo) > 64 and len(self.lifo) > self.lifo_live * 2:
                self.lifo = list({entry[1].seq: entry for entry in self.lifo if self._in_lifo(entry[1])}.values())
                heapify(self.lifo)

    def _in_side(self, run_at: int, _seq: int, job: Job) -> bool:
        return job.place == SIDE and job.run_at == run_at and job.priority == self.priority

    def _in_lifo(self, job: Job) -> bool:
        return job.place == LIFO and job.priority == self.priority

    def __iter__(self) -> Iterator[Job]:
        """All jobs of the level, in no particular order."""
        for entry in self.line[self.head :]:
            if type(entry) is not _Gone:
                yield entry
        yield from {entry[2].seq: entry[2] for entry in self.side if self._in_side(*entry)}.values()
        yield from {entry[1].seq: entry[1] for entry in self.lifo if self._in_lifo(entry[1])}.values()


class Group:
    """The ready jobs of one group, by (priority ascending, seq), and its counts."""

    __slots__ = ("active", "depth", "heap", "listed", "live")

    def __init__(self) -> None:
        self.heap: list[tuple[int, int, Job]] = []
        self.live = 0  # ready
        self.depth = 0  # ready and delayed
        self.active = 0
        self.listed = False  # stands in the rotation

    def first(self) -> Job:
        heap = self.heap
        while True:
            priority, _, job = heap[0]
            if job.place == GROUPED and job.priority == priority:
                return job
            heappop(heap)


class Queue:
    """One queue. Only the index puts jobs in and takes them out."""

    __slots__ = (
        "active",
        "alarm",
        "blocked",
        "completed",
        "delayed",
        "delayed_live",
        "failed",
        "finished",
        "groups",
        "levels",
        "limits",
        "name",
        "paused",
        "priorities",
        "prioritized",
        "ranks",
        "ready",
        "ready_grouped",
        "rotation",
        "stall",
        "waiters",
    )

    def __init__(self, name: str) -> None:
        self.name = name
        self.paused = False
        self.stall: dict[str, Any] = {}  # what differs from the defaults
        self.limits: Limits | None = None
        self.ready = 0  # jobs that may run now
        self.prioritized = 0  # those of them with priority > 0
        self.levels: dict[int, Level] = {}
        self.ranks: list[int] = []  # heap of -priority of levels; may name empty ones
        self.priorities: dict[int, int] = {}  # priority -> queued jobs, ready or delayed
        self.delayed: list[tuple[int, int, Job]] = []  # heap of (run_at, seq, job), entries dropped lazily
        self.delayed_live = 0
        self.alarm: int | None = None  # the instant for which a timer of the delayed jobs is set
        self.groups: dict[str, Group] = {}
        self.rotation: deque[str] = deque()
        self.ready_grouped = 0
        self.active: dict[int, Job] = {}  # by seq, oldest delivery first
        self.blocked: dict[int, Job] = {}
        self.completed: dict[int, Job] = {}  # in memory; `finished` also counts those in the store only
        self.finished = 0
        self.failed: dict[int, Job] = {}
        self.waiters: dict[Pull, None] = {}  # parked, oldest first

    # ---------------------------------------------------------------- in and out

    def add_queued(self, job: Job, now: int) -> None:
        priority = job.priority
        self.priorities[priority] = self.priorities.get(priority, 0) + 1
        extra = job.extra
        if extra is not None and extra.group_id is not None:
            self.group(extra.group_id).depth += 1
        if job.run_at > now:
            job.place = DELAYED
            self.delayed_live += 1
            heappush(self.delayed, (job.run_at, job.seq, job))
        else:
            self._add_ready(job)

    def _add_ready(self, job: Job) -> None:
        self.ready += 1
        priority = job.priority
        if priority > 0:
            self.prioritized += 1
        extra = job.extra
        if extra is not None and extra.group_id is not None:
            job.place = GROUPED
            group = self.group(extra.group_id)
            group.live += 1
            self.ready_grouped += 1
            heappush(group.heap, (priority, job.seq, job))
            if not group.listed:
                group.listed = True
                self.rotation.append(extra.group_id)
            return
        level = self.levels.get(priority)
        if level is None:
            level = self.levels[priority] = Level(priority)
            heappush(self.ranks, -priority)
        level.add(job)

    def remove_queued(self, job: Job) -> None:
        priority = job.priority
        left = self.priorities[priority] - 1
        if left:
            self.priorities[priority] = left
        else:
            del self.priorities[priority]
        place = job.place
        if place == DELAYED:
            job.place = NOWHERE
            self.delayed_live -= 1
            if len(self.delayed) > 64 and len(self.delayed) > self.delayed_live * 2:
                self.delayed = list({entry[1]: entry for entry in self.delayed if self._is_delayed(*entry)}.values())
                heapify(self.delayed)
        else:
            self.ready -= 1
            if priority > 0:
                self.prioritized -= 1
            if place == GROUPED:
                job.place = NOWHERE
                group_id = job.more.group_id or ""
                group = self.groups[group_id]
                group.live -= 1
                self.ready_grouped -= 1
                if group.live == 0:
                    group.heap.clear()
                    if group.listed:
                        group.listed = False
                        if self.rotation[-1] == group_id:  # its turn has just passed
                            self.rotation.pop()
                        else:
                            self.rotation.remove(group_id)
            else:
                self.levels[priority].remove(job)
        extra = job.extra
        if extra is not None and extra.group_id is not None:
            group = self.groups[extra.group_id]
            group.depth -= 1
            self.drop_if_idle(extra.group_id, group)

    def group(self, group_id: str) -> Group:
        group = self.groups.get(group_id)
        if group is None:
            group = self.groups[group_id] = Group()
        return group

    def drop_if_idle(self, group_id: str, group: Group) -> None:
        if group.depth == 0 and group.active == 0:
            del self.groups[group_id]

    def depth(self, group_id: str) -> int:
        """Queued jobs of a group (core 11.1)."""
        group = self.groups.get(group_id)
        return 0 if group is None else group.depth

    # ---------------------------------------------------------------- order

    def mature(self, now: int) -> None:
        """Delayed jobs whose time has come are ready."""
        delayed = self.delayed
        while delayed and delayed[0][0] <= now:
            entry = heappop(delayed)
            if self._is_delayed(*entry):
                self.delayed_live -= 1
                self._add_ready(entry[2])

    def _is_delayed(self, run_at: int, _seq: int, job: Job) -> bool:
        return job.place == DELAYED and job.run_at == run_at

    def next_delayed(self) -> int | None:
        """When the first delayed job is due."""
        delayed = self.delayed
        while delayed and not self._is_delayed(*delayed[0]):
            heappop(delayed)
        return delayed[0][0] if delayed else None

    def first(self) -> Job | None:
        """The job that a claim gets, of those that may run now."""
        if self.ready > self.ready_grouped:
            ranks = self.ranks
            while True:
                level = self.levels[-ranks[0]]
                if level.live:
                    return level.first()
                heappop(ranks)
                del self.levels[level.priority]
        if self.ready_grouped:
            return self.groups[self.rotation[0]].first()
        return None

    def pass_turn(self) -> None:
        """The group whose job is taken now goes to the end of the rotation."""
        self.rotation.rotate(-1)

    # ---------------------------------------------------------------- listings

    def ready_jobs(self) -> Iterator[Job]:
        """All ready jobs, in no particular order."""
        for level in self.levels.values():
            yield from level
        for group in self.groups.values():
            yield from {e[1]: e[2] for e in group.heap if e[2].place == GROUPED and e[2].priority == e[0]}.values()

    def delayed_jobs(self) -> Iterator[Job]:
        """All delayed jobs, in no particular order."""
        yield from {entry[1]: entry[2] for entry in self.delayed if self._is_delayed(*entry)}.values()

    def settings(self) -> bytes | None:
        """What is kept of the queue itself, packed; None when it is as it was born."""
        kept: dict[str, Any] = {}
        if self.paused:
            kept["paused"] = True
        if self.stall:
            kept["stall"] = self.stall
        if self.limits is not None:
            kept["limits"] = self.limits.settings()
        return msgpack.packb(kept) if kept else None

    def members(self) -> list[Job]:
        """Every job in it, in whatever state."""
        queued = [*self.ready_jobs(), *self.delayed_jobs(), *self.blocked.values()]
        return [*self.active.values(), *queued, *self.failed.values(), *self.completed.values()]

    @property
    def empty(self) -> bool:
        """Nothing in it and nothing configured: the name may be forgotten (core 9.6)."""
        return not (
            self.ready
            or self.delayed_live
            or self.active
            or self.blocked
            or self.finished
            or self.failed
            or self.paused
            or self.stall
            or self.limits
        )
