"""What the broker does by itself, by the clock: stall checks, retention, ttl, forgetting, the grace after a restart."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gqueue.engine.states import state_name
from gqueue.engine.timers import Kind
from gqueue.model import Job, State

if TYPE_CHECKING:
    from gqueue.engine.engine import Engine

_SLICE = 500  # jobs in one go, then the hub gets its turn (R51)
_ORPHAN_GRACE = 30_000  # ms for an active job without a lease after a restart: as long as a default lease


class Upkeep:
    """Periodic duties. All of them are deadlines, none is a greenlet."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.proofs: dict[str, str] = {}  # id -> queue of removed completions, oldest first
        self.recovered: dict[int, int] = {}  # seq -> delivery of jobs that were active when the broker started
        self._suspects: dict[int, tuple[int, int]] = {}  # seq -> (delivery, heartbeat_at) of jobs found silent once
        self._stall_check = Kind(_always, self._check_stalls)
        self._cleanup = Kind(_always, self._clean_up)
        self._retirement = Kind(_always, self._retire)
        self._ttl = Kind(self._ttl_stands, self._ttl_over)
        self._orphan = Kind(self._orphan_stands, self._orphan_over)

    def start(self, now: int) -> None:
        """Set the first deadlines."""
        settings = self.engine.settings
        self.engine.timers.at(self._stall_check, now + settings.stall_check, None)
        self.engine.timers.at(self._cleanup, now + settings.cleanup_interval, None)

    # ---------------------------------------------------------------- stalls

    def _check_stalls(self, _item: None, now: int) -> None:
        engine = self.engine
        engine.timers.at(self._stall_check, now + engine.settings.stall_check, None)
        if engine.degraded is not None:
            return
        suspects: dict[int, tuple[int, int]] = {}
        confirmed: list[Job] = []
        for queue in engine.index.queues.values():
            if not queue.active:
                continue
            stall = engine.control.stall_config(queue.name)
            if not stall["enabled"]:
                continue
            grace = stall["gracePeriod"]
            silence = stall["stallInterval"]
            for job in queue.active.values():
                allowed = job.options.stall_timeout or silence
                lease = job.lease
                if lease is not None and lease.explicit and not job.options.stall_timeout and lease.ttl > allowed:
                    allowed = lease.ttl
                if now - job.heartbeat_at <= allowed or now - (job.started_at or now) < grace:
                    continue
                mark = (job.delivery, job.heartbeat_at)
                if self._suspects.get(job.seq) == mark:
                    confirmed.append(job)
                else:
                    suspects[job.seq] = mark
        self._suspects = suspects
        for job in confirmed:
            engine.settlement.stall(job, now)

    # ---------------------------------------------------------------- ttl

    def watch_ttl(self, job: Job, now: int) -> None:
        """Remove the job when its time to live is over and it still waits (core 3.7)."""
        if job.options.ttl is not None:
            self.engine.timers.after(self._ttl, now, max(0, job.created_at + job.options.ttl + 1 - now), job)

    def _ttl_stands(self, job: Job, _at: int) -> bool:
        return job.state <= State.ACTIVE and self.engine.index.get(job.id) is job

    def _ttl_over(self, job: Job, now: int) -> None:
        engine = self.engine
        if job.state is State.QUEUED and engine.degraded is None:
            engine.remove(job, now, reason="ttl-expired", prev=state_name(job, now))
        else:  # it is running or blocked: look again, it may come back to the queue
            engine.timers.at(self._ttl, now + 1000, job)

    # ---------------------------------------------------------------- after a restart

    def take_over(self, job: Job, now: int) -> None:
        """A job that was active when the store was last written: its worker has one grace to come back (R113)."""
        engine = self.engine
        self.recovered[job.seq] = job.delivery
        job.heartbeat_at = now
        engine.delivery.rearm(job, now, grace=job.lease.ttl if job.lease is not None else _ORPHAN_GRACE)
        if job.lease is None:
            engine.timers.at(self._orphan, now + _ORPHAN_GRACE, job)

    def _orphan_stands(self, job: Job, _at: int) -> bool:
        return self.recovered.get(job.seq) == job.delivery and job.state is State.ACTIVE

    def _orphan_over(self, job: Job, now: int) -> None:
        engine = self.engine
        if engine.degraded is not None:
            engine.timers.at(self._orphan, now + 1000, job)
        elif job.heartbeat_at > now - _ORPHAN_GRACE:
            engine.timers.at(self._orphan, job.heartbeat_at + _ORPHAN_GRACE + 1, job)
        else:
            engine.settlement.lose(job, now)

    def after_outage(self, now: int) -> None:
        """The store takes batches again: every delivery gets one grace, so that no worker pays for the outage (R22)."""
        for queue in self.engine.index.queues.values():
            for job in queue.active.values():
                self.engine.delivery.rearm(job, now, grace=job.lease.ttl if job.lease is not None else 1000)
                job.heartbeat_at = now
            if queue.waiters:
                self.engine.index.woken.append(queue)

    # ---------------------------------------------------------------- retention

    def shed(self) -> None:
        """Completed jobs beyond the cap leave memory, oldest first; memory:// loses them for good (core 2.7)."""
        engine = self.engine
        index = engine.index
        while index.completed > engine.settings.max_completed_jobs:
            job = index.oldest_completion()
            if job is None:
                return
            if engine.keeps and job.born > engine.journal.durable:
                return  # its own creation is not in the store yet: a look-up would miss it
            index.completions.popleft()
            index.discard(job)
            if engine.keeps:
                engine.archive.jobs += 1
                index.queues[job.queue].finished += 1
            else:
                engine.journal.remove(job)

    def _clean_up(self, _item: None, now: int) -> None:
        engine = self.engine
        engine.timers.at(self._cleanup, now + engine.settings.cleanup_interval, None)
        if engine.degraded is not None:
            return
        self._retire(None, now)
        for queue in list(engine.index.queues.values()):
            if queue.empty and not queue.active:
                engine.index.forget(queue)
        engine.workers.sweep(now)

    def _retire(self, _item: None, now: int) -> None:
        """Delete completed jobs past their age, up to a slice; the rest follows at once."""
        engine = self.engine
        if engine.settings.completed_retention is None or engine.degraded is not None:
            return
        until = now - engine.settings.completed_retention
        question = engine.archive.oldest(None, until=until, count=_SLICE)
        if question is None or engine.recall is None:
            self._retire_loaded(until, now)
        else:
            engine.recall(question, lambda error: None if error else self._retire_loaded(until, now))

    def _retire_loaded(self, until: int, now: int) -> None:
        engine = self.engine
        for _ in range(_SLICE):
            job = engine.index.oldest_completion()
            if job is None or (job.finished_at or 0) > until:
                return
            engine.index.completions.popleft()
            engine.index.discard(job)
            engine.journal.remove(job)
        engine.timers.at(self._retirement, now + 1, None)


def _always(_item: object, _at: int) -> bool:
    return True
