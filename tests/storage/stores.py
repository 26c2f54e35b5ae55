"""What the tests of the stores share: a store in the hands of its host or of nobody, rows and batches in few words."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gevent.event

from gqueue.model import State
from gqueue.server.hosts import Host, host_of
from gqueue.storage.base import Batch, JobRow, Snapshot, Storage, StorageError, open_storage
from gqueue.storage.memory import MemoryStorage

NOW = 1_700_000_000_000  # ms since the epoch

#: Every way to run a store: (URL, options, host). A host is what the server puts between itself and the store.
VARIANTS: dict[str, tuple[str, dict[str, Any], str | None]] = {
    "memory": ("memory://", {}, None),
    "sqlite-fsync": ("sqlite:///{folder}/jobs.db", {"durability": "fsync"}, None),
    "sqlite-commit": ("sqlite:///{folder}/jobs.db", {"durability": "commit"}, None),
    "sqlite-thread": ("sqlite:///{folder}/jobs.db", {}, "thread"),
    "sqlite-process": ("sqlite:///{folder}/jobs.db", {}, "process"),
}


def row(seq: int, state: State = State.QUEUED, **fields: Any) -> JobRow:
    """A job as a store keeps it; finished ones have ended `seq` ms after NOW."""
    finished = state in (State.COMPLETED, State.FAILED)
    values: dict[str, Any] = {
        "seq": seq,
        "id": f"id-{seq:06}",
        "queue": "q",
        "name": "default",
        "state": int(state),
        "priority": 0,
        "run_at": NOW,
        "attempts": 0,
        "created_at": NOW,
        "started_at": NOW if finished else None,
        "finished_at": NOW + seq if finished else None,
        "data": b"\xa1x",
        "result": None,
        "rest": None,
    }
    return JobRow(**(values | fields))


@dataclass
class Loaded:
    """All that a store says at a start."""

    number: int
    seq: int
    meta: dict[str, bytes]
    queues: dict[str, bytes]
    proofs: dict[str, bytes]
    completed: dict[str, int]
    rows: list[JobRow]
    logs: list[tuple[int, int, bytes]]
    quarantined: list[str]

    @classmethod
    def of(cls, snapshot: Snapshot) -> Loaded:
        rows, logs = list(snapshot.rows), list(snapshot.logs)
        return cls(
            snapshot.number,
            snapshot.seq,
            snapshot.meta,
            snapshot.queues,
            snapshot.proofs,
            snapshot.completed,
            rows,
            logs,
            snapshot.quarantined,
        )


class Store:
    """One store under test."""

    def __init__(self, variant: str, folder: Path) -> None:
        url, options, host = VARIANTS[variant]
        self._url = url.format(folder=folder)
        self._options = options
        self._host_kind = host
        self._kept = MemoryStorage(keep=True) if variant == "memory" else None
        self._host: Host | None = None
        self.storage: Storage
        self.number = 0
        self.open()

    def open(self, completed: int = 50_000) -> Loaded:
        self.storage = self._kept or open_storage(self._url, **self._options)

        def use(storage: Storage) -> Loaded:
            return Loaded.of(storage.load(completed))

        if self._host_kind is None:
            self.storage.open()
            loaded = use(self.storage)
        else:
            self._host = host_of(self.storage, self._host_kind)
            loaded = self._host.start(use)
        self.number = loaded.number
        return loaded

    def close(self) -> None:
        if self._host is not None:
            self._host.close()
        else:
            self.storage.close()

    def reopen(self, completed: int = 50_000) -> Loaded:
        """What the next broker finds."""
        self.close()
        return self.open(completed)

    def send(self, batch: Batch) -> None:
        """Commit as the server does. Raises StorageError."""
        if self._host is None:
            self.storage.commit(batch)
            return
        outcome: list[StorageError | None] = []
        over = gevent.event.Event()

        def done(error: StorageError | None) -> None:
            outcome.append(error)
            over.set()

        self._host.submit(batch, done)
        assert over.wait(20)
        if outcome[0] is not None:
            raise outcome[0]

    def commit(self, **changes: Any) -> Batch:
        """The next batch."""
        self.number += 1
        batch = Batch(self.number, **changes)
        self.send(batch)
        return batch


def by(rows: list[JobRow], key: Callable[[JobRow], Any] = lambda one: one.seq) -> list[Any]:
    return [key(one) for one in rows]
