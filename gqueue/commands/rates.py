"""Limits of queues (core 10)."""

from __future__ import annotations

from typing import Annotated, Any

from gqueue.commands.kinds import (
    ConcurrencyMax,
    LooseMilliseconds,
    Number,
    Queue,
    RateMax,
)
from gqueue.commands.registry import Context, Request, command


class RateLimit(Request):
    """Deliver at most `limit` jobs of a queue in any `duration` ms; the limit ends by itself after `ttl` ms."""

    queue: Queue
    limit: RateMax
    duration: LooseMilliseconds = None
    ttl: LooseMilliseconds = None


@command(RateLimit, group="rates", writes=True)
def rate_limit(req: RateLimit, ctx: Context) -> dict[str, Any]:
    ctx.engine.limits.set_rate(req.queue, req.limit, req.duration or 1000, req.ttl, ctx.now)
    return {}


class RateLimitClear(Request):
    """Take the rate limit of a queue away."""

    queue: Queue


@command(RateLimitClear, group="rates", writes=True)
def rate_limit_clear(req: RateLimitClear, ctx: Context) -> dict[str, Any]:
    ctx.engine.limits.clear_rate(req.queue)
    return {}


class SetConcurrency(Request):
    """At most `limit` active jobs of a queue, those active now included; 0 delivers nothing."""

    queue: Queue
    limit: ConcurrencyMax


@command(SetConcurrency, group="rates", writes=True)
def set_concurrency(req: SetConcurrency, ctx: Context) -> dict[str, Any]:
    ctx.engine.limits.set_concurrency(req.queue, req.limit)
    return {}


class ClearConcurrency(Request):
    """Take the concurrency limit of a queue away."""

    queue: Queue


@command(ClearConcurrency, group="rates", writes=True)
def clear_concurrency(req: ClearConcurrency, ctx: Context) -> dict[str, Any]:
    ctx.engine.limits.set_concurrency(req.queue, None)
    return {}


class GetQueueLimits(Request):
    """The limits of a queue, and how they stand."""

    queue: Queue
    max_jobs: Annotated[int | None, Number(0)] = None


@command(GetQueueLimits, group="rates")
def get_queue_limits(req: GetQueueLimits, ctx: Context) -> dict[str, Any]:
    return {"data": {"limits": ctx.engine.limits.show(req.queue, req.max_jobs, ctx.now)}}
