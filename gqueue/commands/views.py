"""How jobs, workers and the like look in a reply: wire names, and a job put together from packed pieces.

Packing the 47 fields of a job one by one costs ten times as much as joining four pieces: what varies, what follows from
the options (packed once for each distinct set of them), what follows from the extra fields (a constant for most jobs),
and the payload as it came.
"""

from __future__ import annotations

from struct import Struct
from typing import Any

import msgpack

from gqueue.engine import history
from gqueue.engine.workers import Worker
from gqueue.model import PLAIN, Extra, Face, Job, JobOptions, Packed, State

_packer = msgpack.Packer()
_pack = _packer.pack
_INT32 = range(-(2**31), 2**31)


def number(value: float) -> float:
    """A number as it leaves: outside int32 as a float, which JavaScript reads as a number (core 1.4)."""
    return value if value in _INT32 or type(value) is float else float(value)


_FIELDS = 47
_HEAD = msgpack.Packer().pack_map_header(_FIELDS)
_MORE_HEAD = {extra: msgpack.Packer().pack_map_header(_FIELDS + extra) for extra in range(4)}

_ID = _pack("id")
_QUEUE = _pack("queue")
_NAME = _pack("name")
_DATA = _pack("data")
_STARTED = _pack("startedAt")
_COMPLETED = _pack("completedAt")
_ATTEMPTS = _pack("attempts")
_PRIORITY = _pack("priority")
_TIMELINE = _pack("timeline")
_NIL = b"\xc0"

_two_times = Struct(">11sd7sd").pack  # createdAt, runAt
_CREATED_KEY = _pack("createdAt") + b"\xcb"
_RUN_KEY = _pack("runAt") + b"\xcb"
_beat = Struct(">15sd").pack
_BEAT_KEY = _pack("lastHeartbeat") + b"\xcb"
_double = Struct(">cd").pack

_STATE_ENTRY = {
    state: b"\x82" + _pack("state") + _pack(state) + _pack("timestamp") + b"\xcb"
    for state in ("waiting", "prioritized", "delayed", "waiting-children", "active", "completed", "failed")
}
_time = Struct(">d").pack


def _options_piece(options: JobOptions) -> bytes:
    """The fields that follow from a job's options, packed once."""
    config = options.backoff_config
    fields: dict[str, Any] = {
        "maxAttempts": options.max_attempts,
        "backoff": options.backoff,
        "backoffConfig": None
        if config is None
        else {"type": config[0], "delay": config[1]} | ({} if config[2] is None else {"maxDelay": config[2]}),
        "ttl": options.ttl,
        "timeout": options.timeout,
        "childrenCompleted": 0,
        "removeOnComplete": options.remove_on_complete,
        "removeOnFail": options.remove_on_fail,
        "durable": options.durable,
        "stallTimeout": options.stall_timeout,
        "stackTraceLimit": options.stack_trace_limit,
        "keepLogs": options.keep_logs,
        "sizeLimit": options.size_limit,
        "failParentOnFailure": options.fail_parent_on_failure,
        "removeDependencyOnFailure": options.remove_dependency_on_failure,
        "continueParentOnFailure": options.continue_parent_on_failure,
        "ignoreDependencyOnFailure": options.ignore_dependency_on_failure,
        "deduplicationTtl": options.deduplication_ttl,
        "deduplicationExtend": options.deduplication_extend,
        "deduplicationReplace": options.deduplication_replace,
        "debounceTtl": options.debounce_ttl,
    }
    piece = _fields(fields)
    if options.face is Face.BUNQUEUE:
        options.shown = piece
    return piece


def _extra_piece(extra: Extra) -> bytes:
    """The fields of a job that most jobs never use."""
    return _fields(
        {
            "lifo": extra.lifo,
            "uniqueKey": extra.unique_key,
            "customId": extra.custom_id,
            "dependsOn": list(extra.depends_on),
            "parentId": extra.parent_id,
            "childrenIds": list(extra.children_ids),
            "tags": list(extra.tags),
            "groupId": extra.group_id,
            "progress": extra.progress,
            "progressMessage": extra.progress_message,
            "stacktrace": None if extra.stacktrace is None else list(extra.stacktrace),
            "repeat": extra.repeat,
            "stallCount": extra.stall_count,
            "debounceId": extra.debounce_id,
        }
    )


def _fields(fields: dict[str, Any]) -> bytes:
    parts = []
    for name, value in fields.items():
        parts.append(_pack(name))
        parts.append(value if type(value) is Packed else _pack(number(value) if type(value) is int else value))
    return b"".join(parts)


_PLAIN_PIECE = _extra_piece(PLAIN)
_NAMES: dict[str, bytes] = {}


def _name(text: str) -> bytes:
    """A queue or job name, packed; the newest few thousand are kept."""
    packed = _NAMES.get(text)
    if packed is None:
        if len(_NAMES) >= 4096:
            _NAMES.clear()
        packed = _NAMES[text] = _pack(text)
    return packed


def _timeline(job: Job) -> bytes:
    extra = job.extra
    if extra is None or (extra.timeline is None and not extra.depends_on):
        first = "delayed" if job.run_at > job.created_at else "prioritized" if job.priority > 0 else "waiting"
        admitted = _STATE_ENTRY[first] + _time(job.created_at)
        state = job.state
        started = job.started_at
        if state is State.ACTIVE and started is not None:
            return b"\x92" + admitted + _STATE_ENTRY["active"] + _time(started)
        if state is not State.COMPLETED or started is None:
            if state is State.QUEUED or state is State.ACTIVE:
                return b"\x91" + admitted
        else:
            finished = _STATE_ENTRY["completed"] + _time(job.finished_at or 0)
            return b"\x93" + admitted + _STATE_ENTRY["active"] + _time(started) + finished
    entries = []
    for state_word, at, error, attempt in history.timeline(job):
        entry: dict[str, Any] = {"state": state_word, "timestamp": float(at)}
        if error is not None:
            entry["error"] = error
        if attempt is not None:
            entry["attempt"] = attempt
        entries.append(entry)
    return _pack(entries)


def job_parts(job: Job) -> list[bytes]:
    """The 47 fields of a job (core 2.1), without the map's header."""
    options = job.options
    extra = job.extra
    started = job.started_at
    attempts = job.attempts
    priority = job.priority
    return [
        _ID,
        _pack(job.id),
        _QUEUE,
        _name(job.queue),
        _NAME,
        _name(job.name),
        _DATA,
        job.data,
        _two_times(_CREATED_KEY, job.created_at, _RUN_KEY, job.run_at),
        _STARTED,
        _NIL if started is None else _double(b"\xcb", started),
        _COMPLETED,
        _double(b"\xcb", job.finished_at or 0) if job.state is State.COMPLETED else _NIL,
        _ATTEMPTS,
        bytes((attempts,)) if attempts < 128 else _pack(attempts),
        _PRIORITY,
        bytes((priority,)) if 0 <= priority < 128 else _pack(priority),
        _beat(_BEAT_KEY, job.heartbeat_at),
        options.shown or _options_piece(options),
        _PLAIN_PIECE if extra is None else _extra_piece(extra),
        _TIMELINE,
        _timeline(job),
    ]


def job(job: Job) -> Packed:
    """A job as PULL gives it."""
    return Packed(b"".join([_HEAD, *job_parts(job)]))


def job_with_outcome(job: Job, state: str) -> Packed:
    """A job as GetJob and GetJobs give it: with its state, and what has come of it so far (core 2.1)."""
    parts = job_parts(job)
    more = 1
    parts.append(_pack("state"))
    parts.append(_pack(state))
    if job.result is not None:
        more += 1
        parts.append(_pack("returnvalue"))
        parts.append(job.result)
    if job.extra is not None and job.extra.error is not None:
        more += 1
        parts.append(_pack("failedReason"))
        parts.append(_pack(job.extra.error))
    return Packed(b"".join([_MORE_HEAD[more], *parts]))


def packed_list(items: list[Packed]) -> Packed:
    """A list of values that are packed already."""
    return Packed(b"".join([_packer.pack_array_header(len(items)), *items]))


def packed_map(items: dict[str, bytes]) -> Packed:
    """A map of values that are packed already."""
    parts = [_packer.pack_map_header(len(items))]
    for key, value in items.items():
        parts.append(_pack(key))
        parts.append(value)
    return Packed(b"".join(parts))


def unpack(packed: bytes) -> Any:
    """A payload, decoded, for the few features that need a field of it. Extension types become None."""
    return msgpack.unpackb(packed, strict_map_key=False, ext_hook=lambda _code, _data: None)


def pack(value: Any) -> bytes:
    """A value of the broker's own, packed."""
    return _pack(value)


def is_map(packed: bytes) -> bool:
    """Whether a payload is a map."""
    return 0x80 <= packed[0] <= 0x8F or packed[0] in (0xDE, 0xDF)


def map_items(packed: bytes) -> list[tuple[bytes, bytes]]:
    """The keys and values of a packed map, packed as they are."""
    reader = msgpack.Unpacker(max_buffer_size=len(packed) + 1)
    reader.feed(packed)
    items = []
    for _ in range(reader.read_map_header()):
        start = reader.tell()
        reader.skip()
        middle = reader.tell()
        reader.skip()
        items.append((packed[start:middle], packed[middle : reader.tell()]))
    return items


def join_items(items: list[tuple[bytes, bytes]]) -> Packed:
    """A packed map of packed keys and values."""
    return Packed(b"".join([_packer.pack_map_header(len(items)), *(part for item in items for part in item)]))


def worker(worker: Worker) -> dict[str, Any]:
    """A registration, without its id and state (core 12.4)."""
    return {
        "name": worker.name,
        "queues": worker.queues,
        "concurrency": worker.concurrency,
        "hostname": worker.hostname,
        "pid": worker.pid,
        "registeredAt": worker.registered_at,
        "lastSeen": worker.last_seen,
        "activeJobs": worker.active_jobs,
        "processedJobs": worker.processed,
        "failedJobs": worker.failed,
        "currentJob": None,
    }
