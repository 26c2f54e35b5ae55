"""Core commands: push, pull, ack, fail, leases, heartbeats (core 4, 5)."""

from __future__ import annotations

from typing import Annotated, Any

from gqueue.commands import views
from gqueue.commands.kinds import (
    Anything,
    Backoff,
    CustomId,
    Dedup,
    Delay,
    Flag,
    GroupId,
    JobId,
    Listed,
    Loose,
    Name,
    Number,
    Payload,
    PositiveSafe,
    Priority,
    Queue,
    Repeat,
    Table,
    Tags,
    Text,
    Texts,
    Token,
    Truth,
    longer_as_json,
)
from gqueue.commands.registry import (
    PARKED,
    Alias,
    Context,
    Late,
    Request,
    Wire,
    command,
)
from gqueue.engine.admission import NewJob
from gqueue.engine.archive import Archive, Question
from gqueue.engine.delivery import Pull
from gqueue.engine.settlement import NOTHING_DONE
from gqueue.errors import BadRequest, NotFound, Refused
from gqueue.model import (
    DAY,
    DEFAULT_OPTIONS,
    NIL,
    YEAR,
    Extra,
    Job,
    JobOptions,
    Packed,
    RetryKind,
)

_MAX_TIMESTAMP = 2**53 - 1
_Flag = Annotated[bool, Flag()]


class InQueue(Request):
    """What every command on a queue begins with."""

    queue: Queue


class NewJobFields(Request):
    """The options of one job, as PUSH and the members of PUSHB carry them (core 2.4), in the order of their checks."""

    data: Payload = NIL
    group_id: Annotated[str | None, GroupId()] = None
    priority: Annotated[int, Priority()] = 0
    delay: Delay = 0
    timeout: Annotated[int | None, Number(0, DAY, unit="ms")] = None
    max_attempts: Annotated[int, Number(1, 1000, whole=True)] = 3
    backoff: Annotated[tuple[int, str, int | None], Backoff()] = (1000, "", None)
    ttl: Annotated[int | None, Number(0, YEAR, unit="ms")] = None
    stall_timeout: Annotated[int | None, Number(0, DAY, unit="ms")] = None
    dedup: Annotated[tuple[int | None, bool, bool], Dedup()] = (None, False, False)
    debounce_id: Annotated[str | None, Text(empty_is_none=True)] = None
    debounce_ttl: Annotated[int | None, Number(0, unit="ms")] = None
    depends_on: Annotated[list[str], Texts()] = []  # noqa: RUF012
    parent_id: Annotated[str | None, Text(empty_is_none=True)] = None
    children_ids: Annotated[list[str], Texts()] = []  # noqa: RUF012
    tags: Annotated[tuple[str, ...], Tags()] = ()
    lifo: _Flag = False
    remove_on_complete: Annotated[bool, Truth()] = False
    remove_on_fail: Annotated[bool, Truth()] = False
    durable: _Flag = False
    fail_parent_on_failure: _Flag = False
    remove_dependency_on_failure: _Flag = False
    ignore_dependency_on_failure: _Flag = False
    continue_parent_on_failure: _Flag = False
    stack_trace_limit: Annotated[int, Number(0, 10_000, whole=True)] = 10
    keep_logs: Annotated[int | None, Number(0, 1_000_000, whole=True)] = None
    size_limit: Annotated[int | None, Number(0, 10_485_760, whole=True)] = None
    timestamp: Annotated[int | None, Number(0, _MAX_TIMESTAMP, unit="ms")] = None
    name: Annotated[str | None, Name(), Late] = None
    group_max_size: Annotated[int | None, PositiveSafe("group.maxSize"), Late] = None
    repeat: Annotated[Any, Repeat(), Late] = None


_UniqueKey = Annotated[str | None, Text(most=1024, empty_is_none=True), Late]


class Push(NewJobFields, InQueue):
    """Add one job to a queue."""

    custom_id: Annotated[str | None, Wire("jobId"), Alias("customId"), CustomId(), Late] = None
    unique_key: _UniqueKey = None


class Member(NewJobFields):
    """One job of a batch."""

    custom_id: Annotated[str | None, Alias("jobId"), CustomId(), Late] = None
    unique_key: _UniqueKey = None


#: Fields that leave a job as plain as can be.
_PLAIN_FIELDS = frozenset(("queue", "name", "data", "priority", "delay", "timestamp", "custom_id", "group_max_size"))
_EXTRA_FIELDS = frozenset(
    ("lifo", "group_id", "unique_key", "custom_id", "debounce_id", "depends_on", "parent_id", "children_ids", "tags")
)
_NAMED = ("timeout", "ttl", "stall_timeout", "remove_on_complete", "remove_on_fail", "durable", "stack_trace_limit")
_SAME = frozenset(
    (
        *_NAMED,
        "max_attempts",
        "keep_logs",
        "size_limit",
        "fail_parent_on_failure",
        "remove_dependency_on_failure",
        "ignore_dependency_on_failure",
        "continue_parent_on_failure",
        "debounce_ttl",
    )
)
_shared: dict[JobOptions, JobOptions] = {}  # equal options are one object, however many jobs have them


def _new_job(request: NewJobFields) -> NewJob:
    """A checked request as the engine takes it."""
    given = request.__dict__
    priority = request.priority
    name: str | BadRequest | None = request.name
    data = request.data
    if name is None and "fault" not in given:
        name, data = _legacy_name(data)
    fault = request.fault
    if isinstance(name, BadRequest):
        fault = fault or name
        name = "default"
    keys = given.keys()
    if keys <= _PLAIN_FIELDS:
        custom_id = given.get("custom_id")
        return NewJob(
            name or "default",
            data,
            DEFAULT_OPTIONS,
            priority=priority,
            delay=request.delay,
            timestamp=request.timestamp,
            custom_id=custom_id,
            group_max_size=request.group_max_size,
            extra=None if custom_id is None else Extra(custom_id=custom_id),
            fault=fault,
        )
    options = _options(request)
    if options.size_limit is not None and longer_as_json(data, options.size_limit):
        raise BadRequest(f"Job data exceeds sizeLimit of {options.size_limit} bytes")
    extra = None
    fields = {key: given[key] for key in _EXTRA_FIELDS & keys if given[key]}
    if fields:
        for key in ("depends_on", "children_ids"):
            if key in fields:
                fields[key] = tuple(fields[key])
        extra = Extra(**fields)
    return NewJob(
        name or "default",
        data,
        options,
        priority=priority,
        delay=request.delay,
        timestamp=request.timestamp,
        custom_id=given.get("custom_id"),
        group_max_size=request.group_max_size,
        extra=extra,
        fault=fault,
    )


def _options(request: NewJobFields) -> JobOptions:
    given = request.__dict__
    values = {key: given[key] for key in _SAME & given.keys()}
    if "backoff" in given:
        delay, kind, cap = request.backoff
        values["backoff"] = delay
        if kind:
            values["backoff_config"] = (kind, delay, cap)
            values["retry_kind"] = RetryKind.FIXED if kind == "fixed" else RetryKind.EXPONENTIAL
    if "dedup" in given:
        ttl, extend, replace = request.dedup
        values.update(deduplication_ttl=ttl, deduplication_extend=extend, deduplication_replace=replace)
    options = JobOptions(**values)
    if options == DEFAULT_OPTIONS:
        return DEFAULT_OPTIONS
    if len(_shared) > 10_000:
        _shared.clear()
    return _shared.setdefault(options, options)


def _legacy_name(data: Packed) -> tuple[str | BadRequest | None, Packed]:
    """Old clients put the job's name into its data: take it out (core 2.4, legacy name rule)."""
    if data.find(b"\xa4name") < 0 or not views.is_map(data):
        return None, data
    parts = views.map_items(data)
    at = next((at for at, (key, _) in enumerate(parts) if key == b"\xa4name"), None)
    if at is None:
        return None, data
    name = views.unpack(parts[at][1])
    if type(name) is not str:
        return None, data
    rest = views.join_items(parts[:at] + parts[at + 1 :])
    if not 1 <= len(name) <= 256:
        return BadRequest("Job name must be a non-empty string of at most 256 characters"), rest
    return name, rest


def _named_by_push(req: Push, archive: Archive) -> Question | None:
    """A push may name jobs that are there: by its own custom id, and by what it depends on."""
    return archive.by_ids((req.custom_id, *req.depends_on))


@command(Push, group="core", name="PUSH", writes=True, recalls=_named_by_push)
def push(req: Push, ctx: Context) -> dict[str, Any]:
    id, duplicate = ctx.engine.admission.push(req.queue, _new_job(req), ctx.now)
    return {"id": id, "duplicate": True} if duplicate else {"id": id}


class PushBatch(Request):
    """Add many jobs to one queue: all of them, or none."""

    queue: Queue
    jobs: Annotated[list[Any], Listed(Anything())]


def _named_by_members(req: PushBatch, archive: Archive) -> Question | None:
    """The same for the members, which are not checked yet."""
    ids: list[Any] = []
    for fields in req.jobs:
        if type(fields) is dict:
            depends_on = fields.get("dependsOn")
            ids += (fields.get("customId"), fields.get("jobId"), *(depends_on if type(depends_on) is list else ()))
    return archive.by_ids(id for id in ids if type(id) is str)


@command(PushBatch, group="core", name="PUSHB", writes=True, recalls=_named_by_members)
def push_batch(req: PushBatch, ctx: Context) -> dict[str, Any]:
    news = []
    first: BadRequest | None = None
    for at, fields in enumerate(req.jobs):
        if type(fields) is not dict:
            first = BadRequest(f"jobs[{at}] must be an object")
            break
        try:
            new = _new_job(Member.read(fields))
        except BadRequest as error:
            first = BadRequest(f"jobs[{at}]: {error}")
            break
        news.append(new)
    if first is not None:  # unless an earlier member is refused for its dependencies or what is checked after them
        ctx.engine.admission.check_all(req.queue, news, ctx.now)
        raise first
    return {"ids": ctx.engine.admission.push_all(req.queue, news, ctx.now)}


# ---------------------------------------------------------------- pull


class GroupDefaults(Table):
    """`group` of a pull (core 11.4). The limits take effect with the group commands."""

    says = "map {concurrency, limit: {max, duration}, affinity}"

    def check(self, value: Any, field: str) -> dict[str, Any]:
        super().check(value, field)
        if value.get("concurrency") is not None:
            PositiveSafe("group.concurrency").check(value["concurrency"], field)
        limit = value.get("limit")
        if limit is not None:
            if type(limit) is not dict:
                raise BadRequest("group.limit must be an object")
            for name in ("max", "duration"):
                PositiveSafe(f"group.limit.{name}").check(limit.get(name), field)
        if value.get("affinity") is not None and type(value["affinity"]) is not str:
            raise BadRequest("group.affinity must be a string or null")
        return value  # type: ignore[no-any-return]


class PullFields(Request):
    """What PULL and PULLB share."""

    timeout: Annotated[int, Number(0, 60_000, unit="ms")] = 0
    owner: Annotated[str | None, Text(empty_is_none=True)] = None
    lock_ttl: Annotated[int, Number(1, DAY, unit="ms")] = 30_000
    detach: _Flag = False
    group: Annotated[dict[str, Any] | None, GroupDefaults()] = None


class PullOne(PullFields, InQueue):
    """Take the next job of a queue; with `timeout` wait for one, with `owner` hold it by a lease."""


class PullMany(PullFields, InQueue):
    """Take up to `count` jobs of a queue."""

    count: Annotated[int, Number(1, 1000, whole=True)]


def _pull(req: Any, ctx: Context, count: int) -> Pull:
    engine = ctx.engine
    if engine.closing:
        raise Refused("Server is shutting down")
    return Pull(
        ctx.session,
        req.queue,
        count=count,
        leased=req.owner is not None,
        lock_ttl=req.lock_ttl,
        explicit="lock_ttl" in req.__dict__,
        detach=req.detach,
    )


def _revealed(jobs: list[Job]) -> int:
    return max([job.born for job in jobs]) if jobs else 0


@command(PullOne, group="core", name="PULL", writes=True, reveals=True)
def pull(req: PullOne, ctx: Context) -> dict[str, Any]:
    wanted = _pull(req, ctx, 1)
    jobs = ctx.engine.delivery.pull(wanted, ctx.now)
    if not jobs and req.timeout:
        answer = ctx.park(pull=True)
        ctx.engine.delivery.park(wanted, req.timeout, ctx.now, lambda jobs: answer(_one(wanted, jobs), _revealed(jobs)))
        return PARKED
    ctx.revealed = _revealed(jobs)
    return _one(wanted, jobs)


def _one(pull: Pull, jobs: list[Job]) -> dict[str, Any]:
    if not jobs:
        return {"job": None, "token": None} if pull.leased else {"job": None}
    job = jobs[0]
    if pull.leased and job.lease is not None:
        return {"job": views.job(job), "token": job.lease.token}
    return {"job": views.job(job)}


@command(PullMany, group="core", name="PULLB", writes=True, reveals=True)
def pull_batch(req: PullMany, ctx: Context) -> dict[str, Any]:
    wanted = _pull(req, ctx, req.count)
    jobs = ctx.engine.delivery.pull(wanted, ctx.now)
    if not jobs and req.timeout:
        answer = ctx.park(pull=True)
        ctx.engine.delivery.park(
            wanted, req.timeout, ctx.now, lambda jobs: answer(_many(wanted, jobs), _revealed(jobs))
        )
        return PARKED
    ctx.revealed = _revealed(jobs)
    return _many(wanted, jobs)


def _many(pull: Pull, jobs: list[Job]) -> dict[str, Any]:
    fields: dict[str, Any] = {"jobs": views.packed_list([views.job(job) for job in jobs])}
    if pull.leased:
        fields["tokens"] = [job.lease.token if job.lease is not None else None for job in jobs]
    return fields


# ---------------------------------------------------------------- outcomes


class Ack(Request):
    """The job is done. `result` is kept with it; without the key it has none."""

    id: JobId
    result: Annotated[Packed | None, Anything()] = None
    token: Token = None
    remove_on_complete: Annotated[bool, Truth()] = False


@command(Ack, group="core", name="ACK", writes=True)
def ack(req: Ack, ctx: Context) -> dict[str, Any]:
    applied = ctx.engine.settlement.ack(req.id, req.token, req.result, remove=req.remove_on_complete, now=ctx.now)
    return {} if applied else NOTHING_DONE


class AckBatch(Request):
    """Several jobs are done: all of them, or none."""

    ids: Annotated[list[str], Texts()]
    tokens: Annotated[list[str | None] | None, Listed(Text(), gaps=True)] = None
    results: Annotated[list[Packed | None] | None, Listed(Anything(), gaps=True)] = None
    remove_on_completes: Annotated[list[bool | None] | None, Listed(Truth(), gaps=True)] = None


@command(AckBatch, group="core", name="ACKB", writes=True, recalls=lambda req, archive: archive.by_ids(req.ids))
def ack_batch(req: AckBatch, ctx: Context) -> dict[str, Any]:
    ids = req.ids
    size = len(ids)
    for name, given in (
        ("tokens", req.tokens),
        ("results", req.results),
        ("removeOnCompletes", req.remove_on_completes),
    ):
        if given is not None and len(given) != size:
            raise BadRequest(f"ACKB {name} length must match ids length")
    nothing: list[Any] = [None] * size
    ignored = ctx.engine.settlement.ack_all(
        ids, req.tokens or nothing, req.results or nothing, req.remove_on_completes or nothing, ctx.now
    )
    if not ignored:
        return {}
    return {"data": {"ignoredIds": [ids[at] for at in ignored], "ignoredIndices": ignored}}


def _error_text(value: Any, _field: str) -> str:
    return value if type(value) is str else str(value)


def _stack(value: Any, _field: str) -> list[str] | None:
    """The lines of a stack: only strings, of the first hundred, trimmed, none empty (core 4.8)."""
    if type(value) is not list:
        return None
    lines = [line.strip() for line in [line for line in value if type(line) is str][:100]]
    return [line for line in lines if line]


class Fail(Request):
    """The attempt has failed: try again after the job's backoff, or give up."""

    id: JobId
    error: Annotated[str | None, Loose("string", _error_text)] = None
    stack: Annotated[list[str] | None, Loose("list of strings", _stack)] = None
    unrecoverable: Annotated[bool, Truth()] = False
    token: Token = None
    remove_on_fail: Annotated[bool, Truth()] = False


@command(Fail, group="core", name="FAIL", writes=True)
def fail(req: Fail, ctx: Context) -> dict[str, Any]:
    applied = ctx.engine.settlement.fail(
        req.id,
        req.token,
        error=req.error,
        stack=req.stack,
        unrecoverable=req.unrecoverable,
        remove=req.remove_on_fail,
        now=ctx.now,
    )
    return {} if applied else NOTHING_DONE


# ---------------------------------------------------------------- leases and heartbeats

_Duration = Annotated[int | None, Number(1, DAY, unit="ms")]


class ExtendLock(Request):
    """Hold a job by its lease for longer: `duration` ms from now, or the lease's own ttl."""

    id: JobId
    token: Token = None
    duration: _Duration = None


@command(ExtendLock, group="core", writes=True)
def extend_lock(req: ExtendLock, ctx: Context) -> dict[str, Any]:
    ctx.engine.delivery.extend(req.id, req.token, req.duration, ctx.now)
    return {}


class ExtendLocks(Request):
    """The same for many; the answer counts those that were extended."""

    ids: Annotated[list[str], Texts()]
    tokens: Annotated[list[str | None], Listed(Text(), gaps=True)]
    durations: Annotated[list[int | None], Listed(Number(1, DAY, unit="ms"), gaps=True)]


@command(ExtendLocks, group="core", writes=True)
def extend_locks(req: ExtendLocks, ctx: Context) -> dict[str, Any]:
    for name, given in (("tokens", req.tokens), ("durations", req.durations)):
        if len(given) != len(req.ids):
            raise BadRequest(f"ExtendLocks {name} length must match ids length")
    count = 0
    for id, token, duration in zip(req.ids, req.tokens, req.durations, strict=True):
        try:
            ctx.engine.delivery.extend(id, token, duration, ctx.now)
        except NotFound:
            continue
        count += 1
    return {"count": count}


class JobHeartbeat(Request):
    """Still at work on an active job; with its token the lease is renewed too."""

    id: JobId
    token: Token = None
    duration: _Duration = None


@command(JobHeartbeat, group="core", waits=False)
def job_heartbeat(req: JobHeartbeat, ctx: Context) -> dict[str, Any]:
    ctx.engine.delivery.beat(req.id, req.token, req.duration, ctx.now)
    return {"data": {"ok": True}}


class JobHeartbeatBatch(Request):
    """The same for many; the answer counts those that were accepted."""

    ids: Annotated[list[str], Texts()]
    tokens: Annotated[list[str | None] | None, Listed(Text(), gaps=True)] = None
    durations: Annotated[list[int | None] | None, Listed(Number(1, DAY, unit="ms"), gaps=True)] = None


@command(JobHeartbeatBatch, group="core", name="JobHeartbeatB", waits=False)
def job_heartbeat_batch(req: JobHeartbeatBatch, ctx: Context) -> dict[str, Any]:
    nothing: list[Any] = [None] * len(req.ids)
    for name, given in (("tokens", req.tokens), ("durations", req.durations)):
        if given is not None and len(given) != len(req.ids):
            raise BadRequest(f"JobHeartbeatB {name} length must match ids length")
    count = 0
    for id, token, duration in zip(req.ids, req.tokens or nothing, req.durations or nothing, strict=True):
        try:
            ctx.engine.delivery.beat(id, token, duration, ctx.now)
        except NotFound:
            continue
        count += 1
    return {"data": {"ok": True, "count": count}}
