"""Queries: they change nothing (core 7)."""

from __future__ import annotations

from typing import Annotated, Any

from gqueue.commands import views
from gqueue.commands.kinds import Flag, JobId, Number, Queue
from gqueue.commands.registry import PARKED, Context, Kind, Request, command
from gqueue.engine.archive import Archive, Question
from gqueue.engine.events import Wait
from gqueue.engine.states import state_name
from gqueue.engine.turns import Turns
from gqueue.errors import BadRequest
from gqueue.model import State


class ById(Request):
    """What every command on a job begins with."""

    id: JobId


class GetJob(ById):
    """One job, with its state and outcome."""


@command(GetJob, group="query")
def get_job(req: GetJob, ctx: Context) -> dict[str, Any]:
    job = ctx.engine.queries.job(req.id)
    return {"job": views.job_with_outcome(job, state_name(job, ctx.now))}


class GetJobByCustomId(Request):
    """One job by the id that its client gave it."""

    custom_id: JobId


@command(GetJobByCustomId, group="query")
def get_job_by_custom_id(req: GetJobByCustomId, ctx: Context) -> dict[str, Any]:
    job = ctx.engine.queries.by_custom_id(req.custom_id)
    return {"job": views.job_with_outcome(job, state_name(job, ctx.now))}


class GetState(ById):
    """The state of a job; `unknown` when there is none."""


@command(GetState, group="query")
def get_state(req: GetState, ctx: Context) -> dict[str, Any]:
    return {"id": req.id, "state": ctx.engine.queries.state(req.id, ctx.now)}


class GetResult(ById):
    """The result of a completed job; the key is absent when there is none."""


@command(GetResult, group="query")
def get_result(req: GetResult, ctx: Context) -> dict[str, Any]:
    job = ctx.engine.index.get(req.id)
    if job is None or job.state is not State.COMPLETED or job.result is None:
        return {"id": req.id}
    return {"id": req.id, "result": job.result}


class States(Kind):
    """A state or a list of them; None for all."""

    says = "state, or list of states"

    def check(self, value: Any, field: str) -> list[str] | None:
        if type(value) is str:
            return [value]
        if type(value) is not list:
            raise BadRequest(f"{field} must be a string")
        for at, item in enumerate(value):
            if type(item) is not str:
                raise BadRequest(f"{field}[{at}] must be a string")
        return value or None


class GetJobs(Request):
    """A page of the jobs of a queue, by (createdAt, id)."""

    queue: Queue
    state: Annotated[list[str] | None, States()] = None
    limit: Annotated[int, Number(0, whole=True)] = 100
    offset: Annotated[int, Number(0, whole=True)] = 0
    asc: Annotated[bool, Flag()] = True


def _page(req: GetJobs, archive: Archive) -> Question | None:
    listed = req.state is None or "completed" in req.state
    return archive.page(req.queue, req.offset + req.limit, asc=req.asc) if listed and req.limit else None


@command(GetJobs, group="query", recalls=_page)
def get_jobs(req: GetJobs, ctx: Context) -> Turns[dict[str, Any]]:
    page = yield from ctx.engine.queries.page(
        req.queue, req.state, limit=req.limit, offset=req.offset, asc=req.asc, now=ctx.now
    )
    return {"jobs": views.packed_list([views.job_with_outcome(job, state) for job, state in page])}


class GetJobCounts(Request):
    """Jobs of a queue by state."""

    queue: Queue


@command(GetJobCounts, group="query")
def get_job_counts(req: GetJobCounts, ctx: Context) -> dict[str, Any]:
    return {"counts": ctx.engine.queries.counts(req.queue, ctx.now)}


class GetCountsPerPriority(Request):
    """Queued jobs of a queue by priority."""

    queue: Queue


@command(GetCountsPerPriority, group="query")
def get_counts_per_priority(req: GetCountsPerPriority, ctx: Context) -> dict[str, Any]:
    return {"queue": req.queue, "counts": ctx.engine.queries.per_priority(req.queue)}


class Count(Request):
    """All jobs of a queue, in any state."""

    queue: Queue


@command(Count, group="query")
def count(req: Count, ctx: Context) -> dict[str, Any]:
    return {"count": ctx.engine.queries.count(req.queue, ctx.now)}


class GetProgress(ById):
    """How far an active job is."""


@command(GetProgress, group="query")
def get_progress(req: GetProgress, ctx: Context) -> dict[str, Any]:
    extra = ctx.engine.control.active(req.id, ctx.now).more
    return {"progress": extra.progress, "message": extra.progress_message}


class GetChildrenValues(ById):
    """Results of a job's children."""


@command(GetChildrenValues, group="query")
def get_children_values(req: GetChildrenValues, ctx: Context) -> dict[str, Any]:
    return {"data": {"values": views.packed_map(ctx.engine.queries.children_values(req.id))}}


class WaitJob(ById):
    """Wait for the end of a job, up to `timeout` ms."""

    timeout: Annotated[int, Number(0, 600_000, unit="ms")] = 30_000


@command(WaitJob, group="query")
def wait_job(req: WaitJob, ctx: Context) -> dict[str, Any]:
    engine = ctx.engine
    job = engine.queries.job(req.id)
    if job.state is State.COMPLETED:
        return {"completed": True} if job.result is None else {"completed": True, "result": job.result}
    if job.state is State.FAILED:
        error = job.more.dlq_error
        return {"completed": False, "failed": True} | ({} if error is None else {"error": error})
    if not req.timeout:
        return {"completed": False}
    session = ctx.session
    answer = ctx.park()

    def end(fields: dict[str, Any]) -> None:
        session.waits.discard(wait)
        answer(fields)

    wait = Wait(session, req.id, ctx.now + req.timeout, end)
    session.waits.add(wait)
    engine.events.wait(wait, ctx.now)
    return PARKED
