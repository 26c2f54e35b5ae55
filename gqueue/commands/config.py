"""Configuration of queues: stall detection (core 5.6)."""

from __future__ import annotations

from typing import Annotated, Any

from gqueue.commands.kinds import Queue, Table
from gqueue.commands.registry import Context, Request, command


class SetStallConfig(Request):
    """When a silent job of a queue counts as stalled: enabled, stallInterval ms, maxStalls, gracePeriod ms."""

    queue: Queue
    config: Annotated[dict[str, Any], Table()]


@command(SetStallConfig, group="config", writes=True)
def set_stall_config(req: SetStallConfig, ctx: Context) -> dict[str, Any]:
    ctx.engine.control.set_stall_config(req.queue, req.config)
    return {}


class GetStallConfig(Request):
    """The stall configuration in force."""

    queue: Queue


@command(GetStallConfig, group="config")
def get_stall_config(req: GetStallConfig, ctx: Context) -> dict[str, Any]:
    return {"config": dict(ctx.engine.control.stall_config(req.queue))}
