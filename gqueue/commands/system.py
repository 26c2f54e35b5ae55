"""The connection and the broker itself: Ping, Hello, events, memory (core 1.8, 1.9, 12.8, 13.1)."""

from __future__ import annotations

import gc
from typing import Annotated, Any

from gqueue.commands.kinds import Anything, Queue
from gqueue.commands.registry import Context, Request, command


class Ping(Request):
    """Is the broker there? `time` in ms since the epoch."""


@command(Ping, group="system", waits=False)
def ping(_req: Ping, ctx: Context) -> dict[str, Any]:
    return {"data": {"pong": True, "time": ctx.now}}


class Hello(Request):
    """Which protocol the broker speaks. What the client says of itself is not needed."""

    protocol_version: Annotated[Any, Anything()] = None
    capabilities: Annotated[Any, Anything()] = None


@command(Hello, group="system", waits=False)
def hello(_req: Hello, ctx: Context) -> dict[str, Any]:
    return {
        "protocolVersion": 3,
        "capabilities": ["pipelining", "separate-job-name"],
        "server": "bunqueue",  # a literal of the protocol
        "version": ctx.version,
        "implementation": "gqueue",
    }


class SubscribeEvents(Request):
    """Send what happens in one queue to this connection, from now on."""

    queue: Queue


@command(SubscribeEvents, group="events", waits=False)
def subscribe_events(req: SubscribeEvents, ctx: Context) -> dict[str, Any]:
    ctx.engine.events.subscribe(ctx.session, req.queue)
    return {}


class UnsubscribeEvents(Request):
    """Send no more events."""


@command(UnsubscribeEvents, group="events", waits=False)
def unsubscribe_events(_req: UnsubscribeEvents, ctx: Context) -> dict[str, Any]:
    ctx.engine.events.unsubscribe(ctx.session)
    return {}


class CompactMemory(Request):
    """Give unused memory back."""


@command(CompactMemory, group="system", waits=False)
def compact_memory(_req: CompactMemory, _ctx: Context) -> dict[str, Any]:
    gc.collect(1)
    return {}
