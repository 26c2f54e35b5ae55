"""The records: jobs, leases, what a queue remembers. No behaviour beyond what follows from the fields themselves."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from enum import IntEnum
from typing import Any

YEAR = 365 * 86_400_000  # ms
DAY = 86_400_000  # ms


class Packed(bytes):
    """One MessagePack value, kept as the bytes it came in (design I5)."""

    __slots__ = ()


NIL = Packed(b"\xc0")


class State(IntEnum):
    """Where a job stands. `waiting`, `prioritized` and `delayed` are one state: time and priority tell them apart."""

    QUEUED = 0
    BLOCKED = 1  # waiting-children
    ACTIVE = 2
    COMPLETED = 3
    FAILED = 4


class Face(IntEnum):
    """Which interface made the job; it chooses the texts and small rules in which the two differ (boss 3.1)."""

    BUNQUEUE = 0
    BOSS = 1


class RetryKind(IntEnum):
    """The formula of the delay before the next attempt (core 3.6)."""

    EXPONENTIAL = 0
    FIXED = 1


class LiveKind(IntEnum):
    """How a silent delivery is noticed: by the queue's stall settings, or by the job's own heartbeat (boss 3.1)."""

    STALL = 0
    HEARTBEAT = 1


@dataclass(slots=True, unsafe_hash=True, kw_only=True)
class JobOptions:
    """What a push fixes for the life of the job. Equal options are one shared object: never change one."""

    max_attempts: int = 3
    backoff: int = 1000  # ms, base of the retry delay
    backoff_config: tuple[str, int, int | None] | None = None  # type, delay ms, maxDelay ms; as the client gave it
    ttl: int | None = None  # ms from created_at
    timeout: int | None = None  # ms from started_at
    stall_timeout: int | None = None  # ms of silence
    remove_on_complete: bool = False
    remove_on_fail: bool = False
    durable: bool = False
    stack_trace_limit: int = 10  # lines
    keep_logs: int | None = None  # entries
    size_limit: int | None = None  # characters of JSON
    fail_parent_on_failure: bool = False
    remove_dependency_on_failure: bool = False
    continue_parent_on_failure: bool = False
    ignore_dependency_on_failure: bool = False
    deduplication_ttl: int | None = None  # ms
    deduplication_extend: bool = False
    deduplication_replace: bool = False
    debounce_ttl: int | None = None  # ms
    face: Face = Face.BUNQUEUE
    retry_kind: RetryKind = RetryKind.EXPONENTIAL
    live_kind: LiveKind = LiveKind.STALL
    #: The part of a job's answer that follows from the options alone, packed by whoever shows jobs.
    shown: bytes | None = field(default=None, compare=False, repr=False)


DEFAULT_OPTIONS = JobOptions()


class Lease:
    """The right to finish one delivery: whoever holds the token. Instants and durations in ms."""

    __slots__ = ("expires_at", "explicit", "renewals", "token", "ttl")

    def __init__(self, token: str, ttl: int, expires_at: int, *, explicit: bool = False, renewals: int = 0) -> None:
        self.token = token
        self.ttl = ttl
        self.expires_at = expires_at
        self.explicit = explicit  # the client named the ttl, so it also bounds the silence allowed (core 5.6)
        self.renewals = renewals


@dataclass(slots=True, kw_only=True, eq=False)
class Extra:
    """The fields that most jobs never use. Each has a default, so that only what differs is stored."""

    lifo: bool = False
    group_id: str | None = None
    group_max_size: int | None = None
    unique_key: str | None = None
    unique_until: int | None = None  # ms; the key's expiry, None = until the job ends
    custom_id: str | None = None
    debounce_id: str | None = None
    debounce_until: int | None = None  # ms
    depends_on: tuple[str, ...] = ()
    pending: tuple[str, ...] = ()  # ids of depends_on that are not resolved yet
    parked: bool = False  # put into waiting-children by MoveToWaitingChildren
    parent_id: str | None = None
    children_ids: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    repeat: bytes | None = None  # the client's map, packed
    progress: Any = 0  # a number, or Packed
    progress_message: str | None = None
    stacktrace: tuple[str, ...] | None = None
    stall_count: int = 0
    losses: int = 0  # in a row: closed connections, ended leases, crashes (R90)
    releases: int = 0  # in a row: closed connections only (core 5.5)
    error: str | None = None  # text of the last failed attempt
    attempt_log: tuple[Any, ...] = ()  # [attempt, started_at, failed_at, reason, error, duration] each
    dlq_reason: str | None = None
    dlq_error: str | None = None
    timed_out: tuple[str, ...] = ()  # tokens of deliveries that ended by timeout, newest last
    retired: tuple[str, ...] = ()  # tokens of deliveries that ended otherwise, newest last
    lost_token: str | None = None  # token of the last lost delivery while the job waits again; "" if it had none
    timed_out_unleased: bool = False  # the last delivery had no lease and ended by timeout
    dropped_key: bool = False  # keeps its unique key as a label, but does not own it any more
    timeline: tuple[Any, ...] | None = None  # [state, timestamp, error, attempt] each; None = follows from the record
    log_start: int = 0  # number of the first log entry that is kept
    #: Stored beside the job, not in its record.
    logs: list[Packed] = field(default_factory=list)


#: The stored fields of an Extra and their defaults.
EXTRA_DEFAULTS: dict[str, Any] = {f.name: f.default for f in fields(Extra) if f.name != "logs"}

#: What every job without an `extra` of its own shows. Read only.
PLAIN = Extra()


class Job:
    """One job. The record is the truth: the index can be rebuilt from records alone (design I1)."""

    __slots__ = (
        "attempts",  # finished unsuccessful tries
        "born",  # number of the batch that creates it; memory only
        "created_at",
        "data",  # Packed
        "delivery",  # grows by one with each claim
        "extra",  # Extra, or None when nothing in it is set
        "finished_at",  # completion, or entry into the dead letters
        "heartbeat_at",
        "holder",  # whose connection it is tied to; memory only
        "id",
        "lease",  # Lease, or None
        "name",
        "options",
        "place",  # which of the queue's structures holds it; memory only
        "priority",
        "queue",
        "result",  # Packed, or None = no result
        "run_at",
        "seq",  # admission order over the whole server; the key in the store
        "started_at",
        "state",
    )

    def __init__(
        self,
        seq: int,
        id: str,
        queue: str,
        name: str,
        data: Packed,
        options: JobOptions,
        priority: int,
        created_at: int,
        run_at: int,
    ) -> None:
        self.seq = seq
        self.id = id
        self.queue = queue
        self.name = name
        self.data = data
        self.options = options
        self.priority = priority
        self.created_at = created_at
        self.run_at = run_at
        self.state = State.QUEUED
        self.attempts = 0
        self.delivery = 0
        self.started_at: int | None = None
        self.finished_at: int | None = None
        self.heartbeat_at = created_at
        self.lease: Lease | None = None
        self.extra: Extra | None = None
        self.result: Packed | None = None
        self.born = 0
        self.place = 0
        self.holder: Any = None

    @property
    def more(self) -> Extra:
        """Its extra fields for reading; the shared defaults when it has none."""
        return self.extra or PLAIN

    def edit(self) -> Extra:
        """Its extra fields for writing."""
        if self.extra is None:
            self.extra = Extra()
        return self.extra

    def __lt__(self, other: Job) -> bool:
        """Older first: lets a job stand last in a heap's entry."""
        return self.seq < other.seq

    def __repr__(self) -> str:
        return f"<Job {self.id} {self.state.name.lower()} in {self.queue}>"
