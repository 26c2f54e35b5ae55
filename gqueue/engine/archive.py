"""Completed jobs that only the store has (core 2.7). What a command needs of them comes back into the index first.

A command cannot wait, so the server asks before it runs: a `Question` is put to the store off the hub, and what it
finds is entered like any other record. The rest of the engine knows no other place for a job than the index.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from gqueue.engine.journal import Changes
from gqueue.model import JobOptions, Packed, State
from gqueue.storage.base import JobRow, Storage, StorageError, job_of

if TYPE_CHECKING:
    from gqueue.engine.engine import Engine

#: Asks a store for rows; runs on a thread of its own.
Question = Callable[[Storage], list[JobRow]]
#: What a store answers: rows, and (seq, entry) of their logs, oldest entry first.
Answer = tuple[list[JobRow], list[tuple[int, bytes]]]
#: Called when the answer is in the index, or with the error of a store that cannot be read.
Recalled = Callable[[StorageError | None], None]

_ALL = (1 << 63) - 1


class Archive:
    """The jobs beyond the completed ones in memory."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.jobs = 0  # how many there are

    # ---------------------------------------------------------------- questions; None: memory knows all of it

    def by_ids(self, ids: Iterable[str | None]) -> Question | None:
        """The jobs of these ids."""
        index = self.engine.index
        missing = [id for id in dict.fromkeys(ids) if id and index.get(id) is None] if self.jobs else None
        return (lambda storage: storage.find(missing)) if missing else None

    def page(self, name: str, count: int, *, asc: bool) -> Question | None:
        """The first `count` completed jobs of a queue by (created_at, id), or the last ones."""
        if not self._has(name) or count <= 0:
            return None
        more = count + self.engine.journal.open_changes  # the store may still show as completed what is so no more
        return lambda storage: storage.page(name, State.COMPLETED, limit=min(more, _ALL), asc=asc)

    def oldest(self, name: str | None, *, until: int | None, count: int | None) -> Question | None:
        """Up to `count` jobs, of one queue or of all, that were completed at `until` or earlier, oldest first."""
        if not (self.jobs if name is None else self._has(name)) or (count is not None and count <= 0):
            return None
        most = _ALL if count is None else min(count + self.engine.journal.open_changes, _ALL)
        last = _ALL if until is None else min(until, _ALL)
        return lambda storage: storage.oldest(name, State.COMPLETED, until=last, limit=most)

    def _has(self, name: str) -> bool:
        queue = self.engine.index.queues.get(name)
        return bool(self.jobs) and queue is not None and queue.finished > len(queue.completed)

    # ---------------------------------------------------------------- answers

    def admit(self, answer: Answer, changes: Changes) -> bool:
        """Enter what a store answered; `changes` are those since it was asked. True: ask it again.

        Memory leads: a job that is in the index, or that changes on its way to the store, stays as it is there. One
        that has changed while the answer was under way, and rests in the store again, has to be read again.
        """
        rows, logs = answer
        index = self.engine.index
        options: dict[JobOptions, JobOptions] = {}
        jobs = {}
        again = False
        for row in sorted(rows, key=lambda row: (row.finished_at or 0, row.seq), reverse=True):
            if row.state != State.COMPLETED or index.get(row.id) is not None or changes.to_come(row):
                continue
            if changes.landed(row):
                again = True
                continue
            job = jobs[row.seq] = job_of(row, options)
            index.recall(job)
            self.jobs -= 1
        for seq, entry in logs:
            if seq in jobs:
                jobs[seq].edit().logs.append(Packed(entry))
        return again
