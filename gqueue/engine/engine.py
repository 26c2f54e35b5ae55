"""Builds the broker's parts. Every command runs to its end on these, without waiting (design I2)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from gqueue.engine.admission import Admission
from gqueue.engine.archive import Archive, Question, Recalled
from gqueue.engine.control import Control
from gqueue.engine.delivery import Delivery
from gqueue.engine.events import Events
from gqueue.engine.index import Index
from gqueue.engine.journal import Journal
from gqueue.engine.limits import Limiter
from gqueue.engine.logs import Logs
from gqueue.engine.queries import Queries
from gqueue.engine.queue import Queue
from gqueue.engine.settlement import Settlement
from gqueue.engine.timers import Timers
from gqueue.engine.upkeep import Upkeep
from gqueue.engine.workers import Workers
from gqueue.model import Job


@dataclass(slots=True, kw_only=True)
class EngineSettings:
    """What an operator can set of the engine. Durations in ms."""

    max_completed_jobs: int = 50_000  # in memory; a durable store keeps the rest
    completed_retention: int | None = None
    stall_check: int = 5_000
    cleanup_interval: int = 10_000
    max_job_releases: int = 10  # 0 = no limit
    max_lost: int = 10  # 0 = no limit
    worker_timeout: int = 30_000
    worker_cleanup_interval: int = 60_000


class Engine:
    """The whole broker in memory. `now` is ms since the epoch and comes in with every call."""

    def __init__(
        self,
        settings: EngineSettings,
        *,
        journal: Journal,
        deliver: Callable[[set[Any], dict[str, Any]], None],
        new_id: Callable[[], str],
        random: Random,
        recall: Callable[[Question, Recalled], None] | None = None,
    ) -> None:
        self.settings = settings
        self.journal = journal
        self.new_id = new_id
        self.random = random
        self.keeps = recall is not None  # the store keeps what leaves memory
        self.recall = recall  # asks the store for archived jobs, then calls back
        self.seq = 0  # the last one given out
        self.degraded: str | None = None  # why the store takes no batch now
        self.full = False  # the store has little room: no new pushes (R24)
        self.closing = False  # no new pushes and pulls (R111)
        self.index = Index()
        self.timers = Timers()
        self.events = Events(self.timers, deliver)
        self.limits = Limiter(self)
        self.settlement = Settlement(self)
        self.delivery = Delivery(self)
        self.admission = Admission(self)
        self.control = Control(self)
        self.queries = Queries(self)
        self.logs = Logs(self)
        self.workers = Workers(self)
        self.upkeep = Upkeep(self)
        self.archive = Archive(self)

    def settle(self, now: int) -> None:
        """Serve the parked pulls that a command or a deadline has given something to. Called after each of them."""
        woken = self.index.woken
        while woken:
            self.delivery.serve(woken.pop(), now)

    def tick(self, now: int) -> None:
        """Run everything that is due. `timers.next` says when to call again."""
        self.timers.run(now)
        if self.index.woken:
            self.settle(now)

    def save_queue(self, queue: Queue) -> None:
        """Keep the settings of a queue."""
        self.journal.save_queue(queue.name, queue.settings())

    def remove(self, job: Job, now: int, *, reason: str | None, prev: str | None) -> None:
        """A job that is not active disappears before its end: Cancel, Drain, Clean, ttl, dedup replace."""
        self.index.discard(job)
        self.journal.remove(job)
        fields: dict[str, Any] = {}
        if prev is not None:
            fields["prev"] = prev
        if reason is not None:
            fields["data"] = {"reason": reason}
        if self.events.subscribers:
            self.events.publish("removed", job.queue, job.id, now, **fields)
        if self.events.waits:
            self.events.gone(job)
