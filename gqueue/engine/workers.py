"""Who says that it works (core 12.4-12.7). A registration lives with its connection and touches no delivery."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gqueue.errors import NotFound

if TYPE_CHECKING:
    from gqueue.engine.delivery import Session
    from gqueue.engine.engine import Engine


class Worker:
    """One registration. Instants in ms since the epoch."""

    __slots__ = (
        "active_jobs",
        "concurrency",
        "failed",
        "hostname",
        "id",
        "last_seen",
        "name",
        "pid",
        "processed",
        "queues",
        "registered_at",
        "session",
    )

    def __init__(self, id: str, name: str, registered_at: int) -> None:
        self.id = id
        self.name = name
        self.registered_at = registered_at
        self.queues: list[str] = []
        self.concurrency = 1
        self.hostname = "unknown"
        self.pid = 0
        self.last_seen = registered_at
        self.active_jobs = 0
        self.processed = 0
        self.failed = 0
        self.session: Session | None = None


class Workers:
    """The registry of one broker; in memory only, as workers register again with every connection."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.workers: dict[str, Worker] = {}
        self.total_processed = 0  # of all workers ever
        self.total_failed = 0

    def register(
        self, session: Session, id: str | None, name: str, registered_at: int, now: int, **fields: Any
    ) -> Worker:
        """Add a worker, or renew the one with this id; it belongs to this connection from now on."""
        worker = self.workers.get(id) if id is not None else None
        if worker is None:
            worker = Worker(id or self.engine.new_id(), name, registered_at)
            self.workers[worker.id] = worker
        if worker.session is not None:
            worker.session.workers.discard(worker.id)
        worker.session = session
        session.workers.add(worker.id)
        for field, value in fields.items():
            setattr(worker, field, value)
        worker.last_seen = now
        return worker

    def beat(self, id: str, active_jobs: int | None, processed: int | None, failed: int | None, now: int) -> None:
        """Heartbeat; the figures are absolute. Raises NotFound."""
        worker = self.workers.get(id)
        if worker is None:
            raise NotFound("Worker not found")

        worker.last_seen = now
        if active_jobs is not None:
            worker.active_jobs = active_jobs
        if processed is not None:
            self.total_processed += max(0, processed - worker.processed)
            worker.processed = processed
        if failed is not None:
            self.total_failed += max(0, failed - worker.failed)
            worker.failed = failed

    def unregister(self, id: str) -> None:
        """Raises NotFound."""
        worker = self.workers.pop(id, None)
        if worker is None:
            raise NotFound("Worker not found")
        if worker.session is not None:
            worker.session.workers.discard(id)

    def drop(self, session: Session) -> None:
        """Its connection is gone."""
        for id in session.workers:
            self.workers.pop(id, None)
        session.workers.clear()

    def alive(self, worker: Worker, now: int) -> bool:
        return now - worker.last_seen <= self.engine.settings.worker_timeout

    def sweep(self, now: int) -> None:
        """Forget workers that have been silent for three time-outs."""
        limit = now - 3 * self.engine.settings.worker_timeout
        for worker in [worker for worker in self.workers.values() if worker.last_seen < limit]:
            self.unregister(worker.id)
