"""The strategy interface: what a store must do, the batch it is handed, and how a URL chooses one.

Strategies are plain blocking code. They know neither gevent nor the engine: the server hosts them on a native thread
or in a process of their own, and asks them for nothing but what is declared here.
"""

from __future__ import annotations

import importlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, NamedTuple

import msgpack

from gqueue.errors import BadSetting, StartError, StorageError
from gqueue.model import (
    DEFAULT_OPTIONS,
    EXTRA_DEFAULTS,
    Extra,
    Face,
    Job,
    JobOptions,
    Lease,
    LiveKind,
    Packed,
    RetryKind,
    State,
)

__all__ = ["Batch", "JobRow", "Snapshot", "Storage", "StorageError", "attempt", "job_of", "job_row", "open_storage"]

log = logging.getLogger("gqueue.storage")

#: How each state is written in a store, for people who read it.
STATE_NAMES = {
    State.QUEUED: "queued",
    State.BLOCKED: "waiting-children",
    State.ACTIVE: "active",
    State.COMPLETED: "completed",
    State.FAILED: "failed",
}


class JobRow(NamedTuple):
    """One job as a store keeps it. Instants are ms since the epoch."""

    seq: int  # the key
    id: str
    queue: str
    name: str
    state: int  # a State
    priority: int
    run_at: int
    attempts: int
    created_at: int
    started_at: int | None
    finished_at: int | None
    data: bytes | None  # MessagePack; None in a batch = as stored already
    result: bytes | None  # MessagePack; None = no result
    rest: bytes | None  # everything else that differs from the defaults, one MessagePack map; None = nothing does


@dataclass(slots=True)
class Batch:
    """Changes that become durable together, or not at all.

    A seq is in at most one of `jobs` and `removed`. A strategy applies `obliterated`, then `removed`, then the rest.
    """

    number: int
    jobs: list[JobRow] = field(default_factory=list)  # upserts by seq; `data` None leaves the stored data
    removed: list[int] = field(default_factory=list)  # seqs; with them go their logs
    obliterated: list[tuple[str, int]] = field(default_factory=list)  # (queue, n): every job of it with seq <= n
    logs: list[tuple[int, int, bytes]] = field(default_factory=list)  # (seq, number of the entry, entry) to add
    logs_trimmed: list[tuple[int, int]] = field(default_factory=list)  # (seq, n): entries below n go
    queues: dict[str, bytes | None] = field(default_factory=dict)  # settings of a queue, packed; None = forget it
    proofs: dict[str, bytes | None] = field(default_factory=dict)  # id -> packed proof of a removed completion
    meta: dict[str, bytes | None] = field(default_factory=dict)
    durable: bool = False  # fsync whatever the level: it holds a `durable: true` push

    def pack(self) -> bytes:
        """As one MessagePack value, for a writer in another process."""
        return msgpack.packb([getattr(self, f.name) for f in fields(self)])

    @classmethod
    def unpack(cls, packed: bytes) -> Batch:
        values: list[Any] = msgpack.unpackb(packed, strict_map_key=False)
        batch = cls(*values)
        batch.jobs = [JobRow._make(row) for row in batch.jobs]
        for name in ("obliterated", "logs", "logs_trimmed"):
            setattr(batch, name, [tuple(row) for row in getattr(batch, name)])
        return batch


@dataclass(slots=True)
class Snapshot:
    """What a store holds when a broker starts on it."""

    number: int  # of the last durable batch; 0 for a new store
    seq: int  # the highest seq ever used
    meta: dict[str, bytes]
    queues: dict[str, bytes]
    proofs: dict[str, bytes]
    completed: dict[str, int]  # queue -> how many completed jobs the store holds, loaded or not
    rows: Iterator[JobRow]  # live and failed jobs by seq, then the newest completed ones, oldest completion first
    logs: Iterator[tuple[int, int, bytes]]  # of those jobs; read it after `rows` is exhausted
    quarantined: list[str] = field(
        default_factory=list
    )  # ids of rows that could not be read; grows while `rows` is read


class Storage(ABC):
    """One store. Every method blocks and raises `StorageError`; none may be called on the hub's thread.

    `open`, `load`, `commit` and `close` are called by one writer, one at a time. The cold reads (`find`, `page`,
    `oldest`) and `status` may run on other threads meanwhile, and see only what is committed.
    """

    #: The word of the URL, for people: "memory", "sqlite", "redis".
    kind: ClassVar[str]
    #: False: nothing survives the process, so what leaves memory is gone.
    durable: ClassVar[bool] = True
    #: True: worth hosting in a process of its own, where its statements do not compete for the interpreter.
    forkable: ClassVar[bool] = False

    @abstractmethod
    def open(self) -> None:
        """Take ownership and bring the schema up to date.

        Raises StoreOwned, NewerSchema, DamagedStore, BadSetting (all before anything is changed) or StorageError.
        """

    @abstractmethod
    def load(self, completed: int) -> Snapshot:
        """Everything but cold data: all live and failed jobs, and the newest `completed` completed ones."""

    @abstractmethod
    def commit(self, batch: Batch) -> None:
        """Make one batch durable: on return all of it is, on an error none of it.

        Sending the same batch again is harmless: a batch whose number is not above the stored one is skipped.
        """

    @abstractmethod
    def find(self, ids: Sequence[str]) -> list[JobRow]:
        """The finished jobs with these ids, in any order."""

    @abstractmethod
    def page(self, queue: str, state: State, *, limit: int, asc: bool) -> list[JobRow]:
        """The first `limit` finished jobs of a queue in one state by (created_at, id), or the last if not `asc`."""

    @abstractmethod
    def oldest(self, queue: str | None, state: State, *, until: int, limit: int) -> list[JobRow]:
        """Up to `limit` finished jobs (of one queue, or of all) with finished_at <= until, oldest first."""

    @abstractmethod
    def logs_of(self, seqs: Sequence[int]) -> list[tuple[int, bytes]]:
        """The logs of these jobs: (seq, entry), the entries of a job oldest first."""

    @abstractmethod
    def status(self) -> dict[str, Any]:
        """Figures for people: size in bytes and whatever else the kind knows. Never a secret."""

    def release(self) -> tuple[int, dict[str, Any]]:
        """Leave commits to a process that opens the store with these options: (descriptor of the lock, options).

        Cold reads and upkeep stay here, and so does the lock. Only for a `forkable` store.
        """
        raise NotImplementedError

    def maintain(self, *, idle: bool) -> None:  # noqa: B027 - most stores have nothing to do
        """A slice of upkeep (checkpoints, reclaiming space). Called now and then on a thread of its own."""

    @abstractmethod
    def close(self) -> None:
        """Flush and give the store up. Harmless when it is closed already."""


def attempt(step: Callable[[], object]) -> StorageError | None:
    """What is wrong after one step of a store, if anything: whoever runs it hands that on as a value."""
    try:
        step()
    except StorageError as error:
        return error
    except StartError as error:  # of a file that was good a moment before
        return StorageError("io_error", str(error))
    except BaseException as error:  # a bug of ours: never pretend that it was stored
        log.exception("a step of the store failed")
        return StorageError("corrupt", f"internal error: {type(error).__name__}: {error}")
    return None


#: Kind of URL -> where its strategy lives; imported only when such a URL is used.
BACKENDS = {"memory": "memory:MemoryStorage", "sqlite": "sqlite:SQLiteStorage"}


def open_storage(url: str, **options: Any) -> Storage:
    """The strategy for a URL, not opened yet. `options` go to the strategy (durability, wait_for_lock, …).

    Raises BadSetting for a URL that names no known kind.
    """
    scheme = url.partition(":")[0].lower()
    if scheme not in BACKENDS or "://" not in url:
        known = ", ".join(f"{name}://" for name in BACKENDS)
        raise BadSetting(f"Unknown storage URL: {url.partition('@')[2] or url} (expected one of {known})")
    module, _, name = BACKENDS[scheme].partition(":")
    strategy: Callable[..., Storage] = getattr(importlib.import_module(f"gqueue.storage.{module}"), name)
    return strategy(url, **options)


# ---------------------------------------------------------------- a job as a row

_pack = msgpack.Packer().pack
_OPTION_NAMES = tuple(f.name for f in fields(JobOptions) if f.name != "shown")
_OPTION_DEFAULTS = {name: getattr(DEFAULT_OPTIONS, name) for name in _OPTION_NAMES}
_EXTRA_DEFAULTS = tuple(EXTRA_DEFAULTS.items())


def job_row(job: Job, *, data: bool) -> JobRow:
    """The row of a job as it is now. Without `data` the stored payload stays as it is."""
    rest: dict[str, Any] = {}
    if job.options is not DEFAULT_OPTIONS:
        changed = {
            name: value
            for name, default in _OPTION_DEFAULTS.items()
            if (value := getattr(job.options, name)) != default
        }
        if changed:
            rest["options"] = changed
    started_at = job.started_at
    if job.delivery != (started_at is not None):  # the usual numbers are 0, then 1
        rest["delivery"] = job.delivery
    if job.heartbeat_at != (started_at or job.created_at):
        rest["heartbeat_at"] = job.heartbeat_at
    lease = job.lease
    if lease is not None:
        rest["lease"] = (lease.token, lease.ttl, lease.expires_at, lease.explicit, lease.renewals)
    if job.extra is not None:
        extra = job.extra
        changed = {name: value for name, default in _EXTRA_DEFAULTS if (value := getattr(extra, name)) != default}
        if changed:
            rest["extra"] = changed
    return JobRow(
        job.seq,
        job.id,
        job.queue,
        job.name,
        int(job.state),
        job.priority,
        job.run_at,
        job.attempts,
        job.created_at,
        started_at,
        job.finished_at,
        job.data if data else None,
        job.result,
        _pack(rest) if rest else None,
    )


def job_of(row: JobRow, options: dict[JobOptions, JobOptions]) -> Job:
    """The job of a row. `options` is the table of shared option objects. Raises ValueError for an unreadable row."""
    rest = msgpack.unpackb(row.rest, strict_map_key=False, use_list=False) if row.rest else {}
    shared = DEFAULT_OPTIONS
    if "options" in rest:
        values = rest["options"]
        for name, kind in (("face", Face), ("retry_kind", RetryKind), ("live_kind", LiveKind)):
            if name in values:
                values[name] = kind(values[name])
        made = JobOptions(**values)
        shared = options.setdefault(made, made)
    job = Job(
        row.seq,
        row.id,
        row.queue,
        row.name,
        Packed(row.data or b"\xc0"),
        shared,
        row.priority,
        row.created_at,
        row.run_at,
    )
    if job.run_at == job.created_at:
        job.run_at = job.created_at  # one int object for both: a million queued jobs notice
    job.state = State(row.state)
    job.attempts = row.attempts
    job.started_at = row.started_at
    job.finished_at = row.finished_at
    job.result = None if row.result is None else Packed(row.result)
    job.delivery = rest.get("delivery", int(row.started_at is not None))
    job.heartbeat_at = rest.get("heartbeat_at", row.started_at or job.created_at)
    if "lease" in rest:
        token, ttl, expires_at, explicit, renewals = rest["lease"]
        job.lease = Lease(token, ttl, expires_at, explicit=explicit, renewals=renewals)
    if "extra" in rest:
        job.extra = Extra(**rest["extra"])
    return job
