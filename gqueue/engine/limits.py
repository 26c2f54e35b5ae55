"""How much a queue may deliver: so many in any window, so many at a time (core 10; design 7)."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from gqueue.engine.queue import Queue

if TYPE_CHECKING:
    from gqueue.engine.engine import Engine


class Limits:
    """The limits of one queue. `duration` in ms, `expires_at` ms since the epoch."""

    __slots__ = ("concurrency", "duration", "expires_at", "max", "recent")

    def __init__(self) -> None:
        self.concurrency: int | None = None
        self.max: int | None = None  # deliveries in any `duration`
        self.duration = 1000
        self.expires_at: int | None = None  # of the rate limit
        self.recent: deque[int] = deque()  # instants of the newest deliveries, at most `max`

    def __bool__(self) -> bool:
        return self.concurrency is not None or self.max is not None

    def settings(self) -> dict[str, Any]:
        """What is kept of them."""
        return {
            "concurrency": self.concurrency,
            "max": self.max,
            "duration": self.duration,
            "expires_at": self.expires_at,
        }

    @classmethod
    def of(cls, kept: dict[str, Any]) -> Limits:
        limits = cls()
        limits.concurrency = kept["concurrency"]
        limits.max = kept["max"]
        limits.duration = kept["duration"]
        limits.expires_at = kept["expires_at"]
        return limits


class Limiter:
    """Sets the limits of queues and asks them at every claim."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    # ---------------------------------------------------------------- at a claim

    def take(self, queue: Queue, now: int) -> bool:
        """May one more job be delivered? If so, it counts. Called only when there is one."""
        limits = queue.limits
        if limits is None:
            return True
        if limits.concurrency is not None and len(queue.active) >= limits.concurrency:
            return False
        self._expire(queue, limits, now)
        if limits.max is not None:
            recent = limits.recent
            if len(recent) >= limits.max:
                if recent[0] + limits.duration > now:
                    return False
                recent.popleft()
            recent.append(now)
        return True

    def free_at(self, queue: Queue, now: int) -> int | None:
        """When the rate lets the next job through, if only the rate stands in the way."""
        limits = queue.limits
        if limits is None or limits.max is None:
            return None
        if limits.concurrency is not None and len(queue.active) >= limits.concurrency:
            return None
        if len(limits.recent) < limits.max:
            return None
        at = limits.recent[0] + limits.duration
        return at if limits.expires_at is None else min(at, limits.expires_at)

    def _expire(self, queue: Queue, limits: Limits, now: int) -> None:
        if limits.expires_at is not None and limits.expires_at <= now:
            limits.max = limits.expires_at = None
            limits.recent.clear()
            self._changed(queue)

    def _changed(self, queue: Queue) -> None:
        if not queue.limits:
            queue.limits = None
        self.engine.save_queue(queue)
        self.engine.index.woken.append(queue)

    # ---------------------------------------------------------------- commands

    def set_rate(self, name: str, max: int, duration: int, ttl: int | None, now: int) -> None:
        """RateLimit: never more than `max` deliveries in any `duration` ms; gone after `ttl` ms, if given."""
        queue = self.engine.index.queue(name)
        limits = queue.limits = queue.limits or Limits()
        limits.max = max
        limits.duration = duration
        limits.expires_at = None if ttl is None else now + ttl
        limits.recent.clear()
        self._changed(queue)

    def clear_rate(self, name: str) -> None:
        queue = self.engine.index.queues.get(name)
        if queue is not None and queue.limits is not None and queue.limits.max is not None:
            queue.limits.max = queue.limits.expires_at = None
            queue.limits.recent.clear()
            self._changed(queue)

    def set_concurrency(self, name: str, limit: int | None) -> None:
        """SetConcurrency, or ClearConcurrency with None: at most `limit` active jobs, counting those active now."""
        queue = self.engine.index.queues.get(name) if limit is None else self.engine.index.queue(name)
        if queue is None or (limit is None and queue.limits is None):
            return
        limits = queue.limits = queue.limits or Limits()
        limits.concurrency = limit
        self._changed(queue)

    def show(self, name: str, max_jobs: int | None, now: int) -> dict[str, Any]:
        """GetQueueLimits (core 10.3). `rateLimitTtl` in ms, -2 without a rate limit."""
        queue = self.engine.index.queues.get(name)
        limits = None if queue is None else queue.limits
        if queue is not None and limits is not None:
            self._expire(queue, limits, now)
            limits = queue.limits
        if queue is None or limits is None:
            return {"rateLimit": None, "rateLimitTtl": -2, "concurrencyLimit": None, "maxed": False}
        ttl = -2
        if limits.max is not None:
            used = sum(1 for at in limits.recent if at + limits.duration > now)
            if max_jobs is not None and used < max_jobs:
                ttl = 0
            elif limits.expires_at is not None:
                ttl = limits.expires_at - now
            else:
                ttl = 0 if used < limits.max else limits.recent[0] + limits.duration - now
        return {
            "rateLimit": None if limits.max is None else {"max": limits.max, "duration": limits.duration},
            "rateLimitTtl": ttl,
            "concurrencyLimit": limits.concurrency,
            "maxed": limits.concurrency is not None and len(queue.active) >= limits.concurrency,
        }
