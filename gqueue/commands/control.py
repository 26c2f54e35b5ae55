"""Control of jobs and queues (core 6.5, 8, 9)."""

from __future__ import annotations

from typing import Annotated, Any

from gqueue.commands import views
from gqueue.commands.kinds import (
    Data,
    Delay,
    Flag,
    JobId,
    Loose,
    Number,
    Priority,
    Queue,
    Text,
    Token,
    longer_as_json,
)
from gqueue.commands.registry import Context, Nil, Request, command
from gqueue.engine.archive import Archive, Question
from gqueue.engine.turns import Turns
from gqueue.errors import BadRequest
from gqueue.model import Packed


class Cancel(Request):
    """Remove a job that has not started."""

    id: JobId


@command(Cancel, group="control", writes=True)
def cancel(req: Cancel, ctx: Context) -> dict[str, Any]:
    ctx.engine.control.cancel(req.id, ctx.now)
    return {}


class Progress(Request):
    """How far an active job is, 0 to 100."""

    id: JobId
    progress: Annotated[float, Number(fraction=True)]
    message: Annotated[str | None, Text()] = None
    token: Token = None


@command(Progress, group="control", writes=True)
def progress(req: Progress, ctx: Context) -> dict[str, Any]:
    ctx.engine.control.progress(req.id, req.progress, req.message, req.token, ctx.now)
    return {}


class Update(Request):
    """Replace the payload of a job that is not finished."""

    id: JobId
    data: Annotated[Packed, Data(), Nil]


@command(Update, group="control", writes=True)
def update(req: Update, ctx: Context) -> dict[str, Any]:
    control = ctx.engine.control
    job = control.updatable(req.id)
    data = _with_links(job.data, req.data)
    limit = job.options.size_limit
    if limit is not None and longer_as_json(data, limit):
        raise BadRequest(f"Job data exceeds sizeLimit of {limit} bytes")
    control.update(job, data)
    return {}


_LINKS = tuple(
    views.pack(key) for key in ("__parentId", "__parentQueue", "__childrenIds", "__flowParentId", "__flowParentIds")
)


def _with_links(old: Packed, new: Packed) -> Packed:
    """New data of a job in a flow keeps the links of the old (core 8.3)."""
    if old.find(b"__") < 0 or not views.is_map(old):
        return new
    links = [item for item in views.map_items(old) if item[0] in _LINKS]
    if not links:
        return new
    if not views.is_map(new):
        raise BadRequest("flow job data must be an object")
    items = views.map_items(new)
    for key, _ in items:
        name = views.unpack(key)
        if type(name) is str and name.startswith("__"):
            raise BadRequest(f"flow job data key is reserved: {name}")
    return views.join_items(items + links)


class ChangePriority(Request):
    """Give a queued job another priority."""

    id: JobId
    priority: Annotated[Any, Loose("as in PUSH", lambda value, _field: value)]
    lifo: Annotated[bool | None, Flag()] = None


@command(ChangePriority, group="control", writes=True)
def change_priority(req: ChangePriority, ctx: Context) -> dict[str, Any]:
    job = ctx.engine.index.get(req.id)
    grouped = job is not None and job.more.group_id is not None
    priority = _PRIORITY.grouped(req.priority) if grouped else _PRIORITY.check(req.priority, "priority")
    ctx.engine.control.change_priority(ctx.engine.control.queued(req.id), priority, req.lifo, ctx.now)
    return {}


_PRIORITY = Priority()


class Promote(Request):
    """Let a delayed job run now."""

    id: JobId


@command(Promote, group="control", writes=True)
def promote(req: Promote, ctx: Context) -> dict[str, Any]:
    ctx.engine.control.promote(req.id, ctx.now)
    return {}


class PromoteJobs(Request):
    """Let the oldest delayed jobs of a queue run now, all or `count` of them."""

    queue: Queue
    count: Annotated[int | None, Number()] = None


@command(PromoteJobs, group="control", writes=True)
def promote_jobs(req: PromoteJobs, ctx: Context) -> Turns[dict[str, Any]]:
    return {"count": (yield from ctx.engine.control.promote_all(req.queue, req.count, ctx.now))}


class MoveToWait(Request):
    """Put an active, delayed or failed job back into its queue, to run now."""

    id: JobId
    token: Token = None


@command(MoveToWait, group="control", writes=True)
def move_to_wait(req: MoveToWait, ctx: Context) -> dict[str, Any]:
    ctx.engine.control.move_to_wait(req.id, req.token, ctx.now)
    return {}


class MoveToDelayed(Request):
    """Put a job off by `delay` ms from now; an active one is given up, its attempt is not counted."""

    id: JobId
    delay: Delay
    token: Token = None


@command(MoveToDelayed, group="control", writes=True)
def move_to_delayed(req: MoveToDelayed, ctx: Context) -> dict[str, Any]:
    ctx.engine.control.move_to_delayed(req.id, req.delay, req.token, ctx.now)
    return {}


class ChangeDelay(Request):
    """Let a job run `delay` ms from now instead."""

    id: JobId
    delay: Delay
    token: Token = None


@command(ChangeDelay, group="control", writes=True)
def change_delay(req: ChangeDelay, ctx: Context) -> dict[str, Any]:
    ctx.engine.control.change_delay(req.id, req.delay, req.token, ctx.now)
    return {}


class Discard(Request):
    """Move a job to the dead letters, whatever is left of its attempts."""

    id: JobId
    token: Token = None


@command(Discard, group="control", writes=True)
def discard(req: Discard, ctx: Context) -> dict[str, Any]:
    ctx.engine.control.discard(req.id, req.token, ctx.now)
    return {}


class MoveToWaitingChildren(Request):
    """Let an active job wait for the end of its open children; without one it runs again at once."""

    id: JobId
    token: Token = None


@command(MoveToWaitingChildren, group="control", writes=True)
def move_to_waiting_children(req: MoveToWaitingChildren, ctx: Context) -> dict[str, Any]:
    ctx.engine.control.park(req.id, req.token, ctx.now)
    return {"data": {"moved": True}}


# ---------------------------------------------------------------- queues


class Pause(Request):
    """Deliver nothing from a queue; what is active goes on."""

    queue: Queue


@command(Pause, group="queue", writes=True)
def pause(req: Pause, ctx: Context) -> dict[str, Any]:
    ctx.engine.control.pause(req.queue, ctx.now)
    return {}


class Resume(Request):
    """Deliver from a queue again."""

    queue: Queue


@command(Resume, group="queue", writes=True)
def resume(req: Resume, ctx: Context) -> dict[str, Any]:
    ctx.engine.control.resume(req.queue, ctx.now)
    return {}


class IsPaused(Request):
    """Whether a queue is paused."""

    queue: Queue


@command(IsPaused, group="queue")
def is_paused(req: IsPaused, ctx: Context) -> dict[str, Any]:
    queue = ctx.engine.index.queues.get(req.queue)
    return {"paused": queue is not None and queue.paused}


class Drain(Request):
    """Remove every waiting, prioritized and delayed job of a queue."""

    queue: Queue


@command(Drain, group="queue", writes=True)
def drain(req: Drain, ctx: Context) -> Turns[dict[str, Any]]:
    return {"count": (yield from ctx.engine.control.drain(req.queue, ctx.now))}


class Obliterate(Request):
    """Remove a queue with everything in it, active jobs too."""

    queue: Queue


@command(Obliterate, group="queue", writes=True)
def obliterate(req: Obliterate, ctx: Context) -> Turns[dict[str, Any]]:
    yield from ctx.engine.control.obliterate(req.queue, ctx.now)
    return {}


class Clean(Request):
    """Remove the oldest jobs in a state that are older than `grace` ms."""

    queue: Queue
    grace: Annotated[int, Number(0, unit="ms")]
    state: Annotated[str | None, Text(empty_is_none=True)] = None
    limit: Annotated[int, Number()] = 1000


def _cleanable(req: Clean, archive: Archive) -> Question | None:
    return archive.oldest(req.queue, until=None, count=req.limit) if req.state == "completed" else None


@command(Clean, group="queue", writes=True, recalls=_cleanable)
def clean(req: Clean, ctx: Context) -> Turns[dict[str, Any]]:
    ids = yield from ctx.engine.control.clean(req.queue, req.grace, req.state, req.limit, ctx.now)
    return {"count": len(ids), "ids": ids}


class ListQueues(Request):
    """The names of all queues, in the order in which they were first used."""


@command(ListQueues, group="queue")
def list_queues(_req: ListQueues, ctx: Context) -> dict[str, Any]:
    return {"queues": list(ctx.engine.index.queues)}


class RetryCompleted(Request):
    """Let completed jobs run again: one by `id`, or the oldest completions first."""

    queue: Queue
    id: Annotated[str | None, Text(empty_is_none=True)] = None
    count: Annotated[int | None, Number()] = None
    timestamp: Annotated[float | None, Number(fraction=True)] = None


def _retriable(req: RetryCompleted, archive: Archive) -> Question | None:
    if req.id is not None:
        return archive.by_ids((req.id,))
    return archive.oldest(req.queue, until=None if req.timestamp is None else int(req.timestamp), count=req.count)


@command(RetryCompleted, group="queue", writes=True, recalls=_retriable)
def retry_completed(req: RetryCompleted, ctx: Context) -> Turns[dict[str, Any]]:
    control = ctx.engine.control
    return {"count": (yield from control.retry_completed(req.queue, req.id, req.count, req.timestamp, ctx.now))}


# ---------------------------------------------------------------- unique keys

_Key = Annotated[str, Text(least=1)]


class GetDeduplicationJobId(Request):
    """Which job owns a unique key."""

    queue: Queue
    deduplication_id: _Key


@command(GetDeduplicationJobId, group="dedup")
def get_deduplication_job_id(req: GetDeduplicationJobId, ctx: Context) -> dict[str, Any]:
    return {"data": {"jobId": ctx.engine.control.key_owner(req.queue, req.deduplication_id, ctx.now)}}


class RemoveDeduplicationKey(Request):
    """Free a unique key; its job stays."""

    queue: Queue
    deduplication_id: _Key


@command(RemoveDeduplicationKey, group="dedup", writes=True)
def remove_deduplication_key(req: RemoveDeduplicationKey, ctx: Context) -> dict[str, Any]:
    return {"data": {"count": int(ctx.engine.control.free_key(req.queue, req.deduplication_id, ctx.now))}}


class RemoveJobDeduplicationKey(Request):
    """Free the unique key of a job, if the job owns it."""

    id: JobId


@command(RemoveJobDeduplicationKey, group="dedup", writes=True)
def remove_job_deduplication_key(req: RemoveJobDeduplicationKey, ctx: Context) -> dict[str, Any]:
    return {"data": {"removed": ctx.engine.control.free_job_key(req.id, ctx.now)}}
