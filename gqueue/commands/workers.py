"""The worker registry (core 12.4-12.7)."""

from __future__ import annotations

from typing import Annotated, Any

from gqueue.commands import views
from gqueue.commands.kinds import SAFE, Number, Text, Texts, WorkerId
from gqueue.commands.registry import Context, Request, command

_Figure = Annotated[int | None, Number(0, SAFE)]


class RegisterWorker(Request):
    """Say that a worker is there. The registration ends with its connection."""

    name: Annotated[str, Text()]
    queues: Annotated[list[str], Texts()]
    concurrency: Annotated[int, Number(0, SAFE)] = 1
    worker_id: Annotated[str | None, Text(empty_is_none=True)] = None
    hostname: Annotated[str, Text()] = "unknown"
    pid: Annotated[int, Number(0, SAFE)] = 0
    started_at: Annotated[int | None, Number(0, SAFE, unit="ms")] = None


@command(RegisterWorker, group="workers", waits=False)
def register_worker(req: RegisterWorker, ctx: Context) -> dict[str, Any]:
    worker = ctx.engine.workers.register(
        ctx.session,
        req.worker_id,
        req.name,
        ctx.now if req.started_at is None else req.started_at,
        ctx.now,
        queues=req.queues,
        concurrency=req.concurrency,
        hostname=req.hostname,
        pid=req.pid,
    )
    return {"data": {"workerId": worker.id, **views.worker(worker), "status": "active"}}


class Heartbeat(Request):
    """A worker is alive; its figures are absolute."""

    id: WorkerId
    active_jobs: _Figure = None
    processed: _Figure = None
    failed: _Figure = None


@command(Heartbeat, group="workers", waits=False)
def heartbeat(req: Heartbeat, ctx: Context) -> dict[str, Any]:
    ctx.engine.workers.beat(req.id, req.active_jobs, req.processed, req.failed, ctx.now)
    return {"data": {"ok": True}}


class UnregisterWorker(Request):
    """A worker leaves."""

    worker_id: WorkerId


@command(UnregisterWorker, group="workers", waits=False)
def unregister_worker(req: UnregisterWorker, ctx: Context) -> dict[str, Any]:
    ctx.engine.workers.unregister(req.worker_id)
    return {"data": {"removed": True}}


class ListWorkers(Request):
    """All registered workers, and their totals."""


@command(ListWorkers, group="workers", waits=False)
def list_workers(_req: ListWorkers, ctx: Context) -> dict[str, Any]:
    registry = ctx.engine.workers
    workers = list(registry.workers.values())
    alive = [worker for worker in workers if registry.alive(worker, ctx.now)]
    rows = [
        {
            "id": worker.id,
            **views.worker(worker),
            "status": "active" if registry.alive(worker, ctx.now) else "stale",
            "uptime": ctx.now - worker.registered_at,
        }
        for worker in workers
    ]
    stats = {
        "total": len(workers),
        "active": len(alive),
        "totalProcessed": registry.total_processed,
        "totalFailed": registry.total_failed,
        "activeJobs": sum(worker.active_jobs for worker in workers),
        "concurrencySlots": sum(worker.concurrency for worker in alive),
    }
    return {"data": {"workers": rows, "stats": stats}}
