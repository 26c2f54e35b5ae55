"""Jobs that live as long as the process: for tests, for caches, and as the measure of what a store costs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from gqueue.model import State
from gqueue.storage.base import Batch, JobRow, Snapshot, Storage


class MemoryStorage(Storage):
    """Nothing survives the process, so nothing is kept: the broker's own index is the only copy.

    `keep=True` keeps the rows as a real store would; the contract suite compares the others with that.
    """

    kind: ClassVar[str] = "memory"
    durable: ClassVar[bool] = False

    def __init__(self, url: str = "memory://", *, keep: bool = False, **_options: Any) -> None:
        self.url = url
        self.keep = keep
        self.number = 0
        self.seq = 0
        self.rows: dict[int, JobRow] = {}
        self.logs: dict[int, dict[int, bytes]] = {}
        self.queues: dict[str, bytes] = {}
        self.proofs: dict[str, bytes] = {}
        self.meta: dict[str, bytes] = {}

    def open(self) -> None:
        """Nothing to take ownership of."""

    def load(self, completed: int) -> Snapshot:
        rows = sorted(self.rows.values())
        done = sorted(
            (row for row in rows if row.state == State.COMPLETED), key=lambda row: (row.finished_at or 0, row.seq)
        )
        loaded = [row for row in rows if row.state != State.COMPLETED] + (done[-completed:] if completed else [])
        counts: dict[str, int] = {}
        for row in done:
            counts[row.queue] = counts.get(row.queue, 0) + 1
        logs = ((row.seq, n, entry) for row in loaded for n, entry in sorted(self.logs.get(row.seq, {}).items()))
        return Snapshot(
            self.number, self.seq, dict(self.meta), dict(self.queues), dict(self.proofs), counts, iter(loaded), logs
        )

    def commit(self, batch: Batch) -> None:
        if batch.number <= self.number:
            return
        self.number = batch.number
        if not self.keep:
            return
        for queue, last in batch.obliterated:
            for seq in [row.seq for row in self.rows.values() if row.queue == queue and row.seq <= last]:
                self._forget(seq)
        for seq in batch.removed:
            self._forget(seq)
        for row in batch.jobs:
            self.seq = max(self.seq, row.seq)
            if row.data is None:
                row = row._replace(data=self.rows[row.seq].data)
            self.rows[row.seq] = row
        for seq, n, entry in batch.logs:
            self.logs.setdefault(seq, {})[n] = entry
        for seq, start in batch.logs_trimmed:
            self.logs[seq] = {n: entry for n, entry in self.logs.get(seq, {}).items() if n >= start}
        for table, changes in ((self.queues, batch.queues), (self.proofs, batch.proofs), (self.meta, batch.meta)):
            for key, value in changes.items():
                if value is None:
                    table.pop(key, None)
                else:
                    table[key] = value

    def _forget(self, seq: int) -> None:
        self.rows.pop(seq, None)
        self.logs.pop(seq, None)

    def find(self, ids: Sequence[str]) -> list[JobRow]:
        return [row for row in self.rows.values() if row.id in ids and row.state >= State.COMPLETED]

    def page(self, queue: str, state: State, *, limit: int, asc: bool) -> list[JobRow]:
        rows = [row for row in self.rows.values() if row.queue == queue and row.state == state]
        return sorted(rows, key=lambda row: (row.created_at, row.id), reverse=not asc)[:limit]

    def oldest(self, queue: str | None, state: State, *, until: int, limit: int) -> list[JobRow]:
        rows = [
            row
            for row in self.rows.values()
            if row.state == state and (queue is None or row.queue == queue) and (row.finished_at or 0) <= until
        ]
        return sorted(rows, key=lambda row: (row.finished_at or 0, row.seq))[:limit]

    def logs_of(self, seqs: Sequence[int]) -> list[tuple[int, bytes]]:
        return [(seq, entry) for seq in seqs for _, entry in sorted(self.logs.get(seq, {}).items())]

    def status(self) -> dict[str, Any]:
        return {"kind": self.kind, "durability": "none", "jobs": len(self.rows)}

    def close(self) -> None:
        """Nothing to flush."""
