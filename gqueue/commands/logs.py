"""Logs of jobs (core 12.1-12.3)."""

from __future__ import annotations

from typing import Annotated, Any

from gqueue.commands import views
from gqueue.commands.kinds import JobId, Number, OneOf, Text
from gqueue.commands.registry import Context, Request, command


class AddLog(Request):
    """Add a line to a job's log."""

    id: JobId
    message: Annotated[str, Text()]
    level: Annotated[str, OneOf("info", "warn", "error")] = "info"


@command(AddLog, group="logs", writes=True)
def add_log(req: AddLog, ctx: Context) -> dict[str, Any]:
    ctx.engine.logs.add(req.id, req.message, req.level, ctx.now)
    return {"data": {"added": True}}


class GetLogs(Request):
    """Lines of a job's log: both indexes inclusive, counted from the end when negative."""

    id: JobId
    start: Annotated[int, Number()] = 0
    end: Annotated[int | None, Number()] = None


@command(GetLogs, group="logs")
def get_logs(req: GetLogs, ctx: Context) -> dict[str, Any]:
    logs, count = ctx.engine.logs.read(req.id, req.start, req.end)
    return {"data": {"logs": views.packed_list(logs), "count": count}}


class ClearLogs(Request):
    """Empty a job's log, or keep its newest `keepLogs` lines."""

    id: JobId
    keep_logs: Annotated[int, Number()] = 0


@command(ClearLogs, group="logs", writes=True)
def clear_logs(req: ClearLogs, ctx: Context) -> dict[str, Any]:
    ctx.engine.logs.clear(req.id, req.keep_logs)
    return {}
