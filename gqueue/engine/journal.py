"""Changes -> Batch -> Storage.commit, in order; replies leave when their batch is durable (design I2, I3).

One batch is on its way to the store, the next one fills meanwhile: the batch size follows the load by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gqueue.model import Job
from gqueue.storage.base import Batch, JobRow, StorageError, job_row

#: Something to be handed out once a batch is durable: (connection, frame). Only the server looks inside.
Outgoing = tuple[Any, bytes]


class Changes:
    """Batches that a read of the store may have missed."""

    def __init__(self, coming: list[Batch], landed: list[Batch]) -> None:
        self._coming = [_Touched(batch) for batch in coming]
        self._landed = [_Touched(batch) for batch in landed]

    def to_come(self, row: JobRow) -> bool:
        """Whether a batch that is not durable yet changes this row."""
        return any(row in touched for touched in self._coming)

    def landed(self, row: JobRow) -> bool:
        """Whether one that became durable while the store was read changed it."""
        return any(row in touched for touched in self._landed)


class _Touched:
    """The rows that a batch changes or removes."""

    def __init__(self, batch: Batch) -> None:
        self._seqs = {row.seq for row in batch.jobs}.union(batch.removed)
        self._obliterated = batch.obliterated

    def __contains__(self, row: JobRow) -> bool:
        return row.seq in self._seqs or any(row.queue == queue and row.seq <= last for queue, last in self._obliterated)


class Journal:
    """The open batch, the one in flight, and what waits for either.

    `submit(batch, done)` starts a commit off the hub; `release(outgoing)` sends what has become durable; `wake()` asks
    for `flush` at the end of the turn, and `later()` for `ripen` in a few ms; `stand(error)` tells of a store that
    stopped taking batches, or takes them again.
    """

    def __init__(
        self,
        number: int,
        *,
        submit: Callable[[Batch, Callable[[StorageError | None], None]], None],
        release: Callable[[list[Outgoing]], None],
        wake: Callable[[], None],
        later: Callable[[], None],
        stand: Callable[[StorageError | None], None],
    ) -> None:
        self.number = number + 1  # of the open batch
        self.durable = number  # of the last batch that is safe
        self.dirty = False  # the open batch holds a change
        self.urgent = False  # and is sent as soon as the store is free; claims alone can wait for company
        self.flying: Batch | None = None
        self.error: StorageError | None = None  # why the flying batch is held
        self.batches = 0  # committed since the start
        self.rows = 0
        self._submit = submit
        self._release = release
        self._wake = wake
        self._later = later
        self._ripening = False
        self._stand = stand
        self._flying_out: list[Outgoing] = []
        self._reads: list[list[Batch]] = []  # for each read under way, the batches that became durable since
        self._fresh()

    def _fresh(self) -> None:
        self._saved: dict[int, Job] = {}
        self._with_data: set[int] = set()
        self._removed: set[int] = set()
        self._obliterated: list[tuple[str, int]] = []
        self._logs: list[tuple[int, int, bytes]] = []
        self._logs_trimmed: dict[int, int] = {}
        self._queues: dict[str, bytes | None] = {}
        self._proofs: dict[str, bytes | None] = {}
        self._meta: dict[str, bytes | None] = {}
        self._safe = False
        self.out: list[Outgoing] = []

    # ---------------------------------------------------------------- changes

    def _touch(self) -> None:
        self.dirty = self.urgent = True
        if self.flying is None:
            self._wake()

    def create(self, job: Job) -> None:
        """A job that the store does not have yet, or whose payload has changed."""
        job.born = self.number
        seq = job.seq
        self._saved[seq] = job
        self._with_data.add(seq)
        if job.options.durable:
            self._safe = True
        if not self.urgent:
            self._touch()

    def save(self, job: Job) -> None:
        """Any other change of a job's record."""
        self._saved[job.seq] = job
        if not self.urgent:
            self._touch()

    def claim(self, job: Job) -> None:
        """A delivery, which no reply waits for: it is stored with the next change, or by itself in a few ms.

        The outcome of a short job meets it in the open batch, and the store sees one change instead of two.
        """
        self._saved[job.seq] = job
        self.dirty = True
        if not self.urgent and not self._ripening:
            self._ripening = True
            self._later()

    def ripen(self) -> None:
        """Claims that have found no company have waited long enough."""
        self._ripening = False
        if self.dirty and not self.urgent:
            self._touch()

    def remove(self, job: Job) -> None:
        seq = job.seq
        self._saved.pop(seq, None)
        self._with_data.discard(seq)
        self._removed.add(seq)
        if not self.urgent:
            self._touch()

    def obliterate(self, queue: str, seq: int) -> None:
        """Everything of a queue up to a sequence number is gone, loaded or not."""
        gone = [job for job in self._saved.values() if job.queue == queue and job.seq <= seq]
        for job in gone:
            del self._saved[job.seq]
            self._with_data.discard(job.seq)
        seqs = {job.seq for job in gone}
        self._logs = [entry for entry in self._logs if entry[0] not in seqs]
        self._obliterated.append((queue, seq))
        if not self.urgent:
            self._touch()

    def log(self, job: Job, number: int, entry: bytes) -> None:
        self._logs.append((job.seq, number, entry))
        if not self.urgent:
            self._touch()

    def trim_log(self, job: Job, start: int) -> None:
        """Entries of a job's log before number `start` are gone."""
        self._logs_trimmed[job.seq] = start
        if not self.urgent:
            self._touch()

    def save_queue(self, name: str, settings: bytes | None) -> None:
        self._queues[name] = settings
        if not self.urgent:
            self._touch()

    def save_proof(self, id: str, proof: bytes | None) -> None:
        self._proofs[id] = proof
        if not self.urgent:
            self._touch()

    def save_meta(self, key: str, value: bytes | None) -> None:
        self._meta[key] = value
        if not self.urgent:
            self._touch()

    # ---------------------------------------------------------------- waiting for a batch

    @property
    def latest(self) -> int:
        """The number of the newest batch with a change in it; what is revealed now may come from it."""
        return self.number if self.dirty else self.number - 1

    def attach(self, number: int, outgoing: Outgoing) -> bool:
        """Keep something until batch `number` is durable. False: it is already, send it."""
        if number <= self.durable:
            return False
        if number == self.number and not self.urgent:
            self._touch()
        (self.out if number == self.number else self._flying_out).append(outgoing)
        return True

    # ---------------------------------------------------------------- reads of the store

    @property
    def open_changes(self) -> int:
        """How many jobs the store may show otherwise than memory does."""
        flying = 0 if self.flying is None else len(self.flying.jobs) + len(self.flying.removed)
        return flying + len(self._saved) + len(self._removed)

    def begin_read(self) -> list[Batch]:
        """The store is about to be read: to be given to `end_read`."""
        landed: list[Batch] = []
        self._reads.append(landed)
        return landed

    def end_read(self, landed: list[Batch]) -> Changes:
        """What the read may have missed."""
        self._reads = [other for other in self._reads if other is not landed]
        coming = [self._seal()] if self.dirty else []
        if self.flying is not None:
            coming.append(self.flying)
        return Changes(coming, landed)

    # ---------------------------------------------------------------- commits

    def flush(self) -> None:
        """Send the open batch to the store, if it holds something and the store is free."""
        if self.flying is not None or not self.dirty:
            return
        batch = self._seal()
        self.flying = batch
        self._flying_out = self.out
        self.dirty = self.urgent = False
        self.number += 1
        self._fresh()
        self._submit(batch, self._done)

    def _seal(self) -> Batch:
        with_data = self._with_data
        removed = self._removed
        saved = self._saved
        return Batch(
            self.number,
            jobs=[job_row(job, data=seq in with_data) for seq, job in saved.items()],
            removed=[seq for seq in removed if seq not in saved] if removed else [],
            obliterated=self._obliterated,
            logs=[entry for entry in self._logs if entry[0] not in removed] if removed else self._logs,
            logs_trimmed=list(self._logs_trimmed.items()),
            queues=self._queues,
            proofs=self._proofs,
            meta=self._meta,
            durable=self._safe,
        )

    def _done(self, error: StorageError | None) -> None:
        batch = self.flying
        if batch is None:
            return
        if error is not None:
            self.error = error
            self._stand(error)
            return
        if self.error is not None:
            self.error = None
            self._stand(None)
        self.flying = None
        self.durable = batch.number
        for landed in self._reads:
            landed.append(batch)
        self.batches += 1
        self.rows += len(batch.jobs) + len(batch.removed)
        out, self._flying_out = self._flying_out, []
        if self.urgent:
            self.flush()  # before the replies: the store works while they are written
        if out:
            self._release(out)

    def retry(self) -> None:
        """Send the held batch again."""
        if self.flying is not None:
            self._submit(self.flying, self._done)
