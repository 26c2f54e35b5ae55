"""Queue -> worker: pulls and long polls, leases and heartbeats, and what a closed connection held (core 4.4, 5)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from gqueue.engine import history
from gqueue.engine.events import Wait
from gqueue.engine.queue import GROUPED, Queue
from gqueue.engine.states import state_name
from gqueue.engine.timers import Kind
from gqueue.errors import LeaseLost, NotFound
from gqueue.model import Job, Lease, State

if TYPE_CHECKING:
    from gqueue.engine.engine import Engine


class Session:
    """One connection as the engine sees it: what it holds, and what ends with it."""

    __slots__ = ("connection", "held", "pulls", "subscription", "waits", "workers")

    def __init__(self, connection: Any) -> None:
        self.connection = connection
        self.held: dict[int, Job] = {}  # by seq: deliveries tied to it
        self.pulls: set[Pull] = set()
        self.waits: set[Wait] = set()
        self.workers: set[str] = set()
        self.subscription: str | None = None


class Pull:
    """One PULL or PULLB: what it wants, and while it is parked, whom to tell. `deadline` is in ms since the epoch."""

    __slots__ = ("answer", "count", "deadline", "detach", "explicit", "group", "leased", "lock_ttl", "queue", "session")

    def __init__(
        self,
        session: Session,
        queue: str,
        *,
        count: int = 1,
        leased: bool = False,
        lock_ttl: int = 30_000,
        explicit: bool = False,
        detach: bool = False,
    ) -> None:
        self.session = session
        self.queue = queue
        self.count = count
        self.leased = leased
        self.lock_ttl = lock_ttl
        self.explicit = explicit  # the client named the ttl
        self.detach = detach
        self.deadline = 0
        self.answer: Callable[[list[Job]], None] | None = None  # None: not parked, or not any more


class Delivery:
    """Claims, and everything that is tied to one."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.lease_end = Kind(self._lease_stands, self._lease_over)
        self.timeout = Kind(self._timeout_stands, self._timed_out)
        self.poll_end = Kind(self._parked, self._poll_over)
        self.alarm = Kind(self._alarm_stands, self._alarm)

    # ---------------------------------------------------------------- claims

    def pull(self, pull: Pull, now: int) -> list[Job]:
        """The jobs for a pull, now active; empty when there is nothing for it yet."""
        queue = self.engine.index.queues.get(pull.queue)
        if queue is None:
            return []
        if queue.waiters:
            self.serve(queue, now)  # whoever waits longer goes first
        return self._claim(queue, pull, now)

    def park(self, pull: Pull, timeout: int, now: int, answer: Callable[[list[Job]], None]) -> None:
        """Wait for a job, up to `timeout` ms. `answer` is called once with the jobs, or with none when time is up."""
        pull.answer = answer
        pull.deadline = now + timeout
        pull.session.pulls.add(pull)
        queue = self.engine.index.queues.get(pull.queue)
        if queue is None:
            queue = self.engine.index.shadow(pull.queue)
        queue.waiters[pull] = None
        self.engine.timers.after(self.poll_end, now, timeout, pull)
        self._arm(queue, now)

    def serve(self, queue: Queue, now: int) -> None:
        """Give what can be claimed to the parked pulls, first come, first served."""
        if self.engine.degraded is not None:
            return
        waiters = queue.waiters
        while waiters:
            pull = next(iter(waiters))
            jobs = self._claim(queue, pull, now)
            if not jobs:
                self._arm(queue, now)
                return
            del waiters[pull]
            pull.session.pulls.discard(pull)
            answer, pull.answer = pull.answer, None
            if answer is not None:
                answer(jobs)

    def _claim(self, queue: Queue, pull: Pull, now: int) -> list[Job]:
        if queue.paused:
            return []
        if queue.delayed:
            queue.mature(now)
        if not queue.ready:
            return []
        engine = self.engine
        index = engine.index
        jobs: list[Job] = []
        limits = queue.limits
        session = pull.session
        subscribers = engine.events.subscribers
        for _ in range(pull.count):
            job = queue.first()
            while job is not None and job.options.ttl is not None and now > job.created_at + job.options.ttl:
                engine.remove(job, now, reason="ttl-expired", prev=state_name(job, now))
                job = queue.first()
            if job is None:
                break
            if limits is not None and not engine.limits.take(queue, now):
                break
            if job.place == GROUPED:
                queue.pass_turn()
            index.leave(job)
            job.state = State.ACTIVE
            job.delivery += 1
            job.started_at = job.heartbeat_at = now
            if pull.leased:
                ttl = pull.lock_ttl
                job.lease = Lease(engine.new_id(), ttl, now + ttl, explicit=pull.explicit)
                engine.timers.after(self.lease_end, now, ttl, job)
            extra = job.extra
            if extra is not None:
                extra.lost_token = None
                extra.timed_out_unleased = False
                history.note(job, "active", now)
            if not pull.detach:
                job.holder = session
                session.held[job.seq] = job
            timeout = job.options.timeout
            if timeout:
                engine.timers.after(self.timeout, now, timeout, job)
            index.enter(job, now)
            engine.journal.claim(job)
            if subscribers:
                engine.events.publish("pulled", queue.name, job.id, now)
            jobs.append(job)
        return jobs

    # ---------------------------------------------------------------- when to look again

    def _arm(self, queue: Queue, now: int) -> None:
        """Somebody waits: come back when the next delayed job is due, or the limit lets one through."""
        at = queue.next_delayed()
        if queue.limits is not None and queue.ready:
            free = self.engine.limits.free_at(queue, now)
            if free is not None and (at is None or free < at):
                at = free
        if at is not None and (queue.alarm is None or at < queue.alarm):
            queue.alarm = at
            self.engine.timers.at(self.alarm, at, queue)

    def _alarm_stands(self, queue: Queue, at: int) -> bool:
        return queue.alarm == at

    def _alarm(self, queue: Queue, now: int) -> None:
        queue.alarm = None
        if queue.waiters:
            self.serve(queue, now)

    def _parked(self, pull: Pull, _at: int) -> bool:
        return pull.answer is not None

    def _poll_over(self, pull: Pull, now: int) -> None:
        pull.session.pulls.discard(pull)
        answer, pull.answer = pull.answer, None
        queue = self.engine.index.unpark(pull)
        if answer is not None:
            answer(self._claim(queue, pull, now) if queue is not None and self.engine.degraded is None else [])

    def answer_all(self) -> None:
        """The broker stops: every long poll is answered empty at once (R111)."""
        for queue in self.engine.index.all_queues():
            waiters, queue.waiters = queue.waiters, {}
            for pull in waiters:
                pull.session.pulls.discard(pull)
                answer, pull.answer = pull.answer, None
                if answer is not None:
                    answer([])

    # ---------------------------------------------------------------- leases

    def _lease_stands(self, job: Job, at: int) -> bool:
        return job.lease is not None and job.lease.expires_at == at and job.state is State.ACTIVE

    def _lease_over(self, job: Job, now: int) -> None:
        if self.engine.degraded is None:
            self.engine.settlement.lapse(job, now)

    def _timeout_stands(self, job: Job, at: int) -> bool:
        return (
            job.state is State.ACTIVE
            and job.started_at is not None
            and job.started_at + (job.options.timeout or 0) == at
            and self.engine.index.get(job.id) is job
        )

    def _timed_out(self, job: Job, now: int) -> None:
        if self.engine.degraded is None:
            self.engine.settlement.time_out(job, now)

    def rearm(self, job: Job, now: int, grace: int | None = None) -> None:
        """Set the deadlines of an active job again after a restart or an outage: with one grace (R22, R113)."""
        lease = job.lease
        if lease is not None:
            lease.expires_at = max(lease.expires_at, now + lease.ttl)
            self.engine.timers.at(self.lease_end, lease.expires_at, job)
        if job.options.timeout:
            started = job.started_at or now
            if started + job.options.timeout <= now + (grace or 0):
                job.started_at = now + (grace or 0) - job.options.timeout
            self.engine.timers.at(self.timeout, (job.started_at or now) + job.options.timeout, job)

    def extend(self, id: str, token: str | None, duration: int | None, now: int) -> None:
        """ExtendLock. Raises NotFound in its words, whatever is wrong (core 5.3)."""
        job = self.engine.index.get(id)
        lease = job.lease if job is not None and job.state is State.ACTIVE else None
        if job is None or lease is None or lease.expires_at <= now or (token and token != lease.token):
            raise NotFound("Lock not found or invalid token")

        self._renew(job, lease, duration, now)
        self.engine.journal.save(job)

    def beat(self, id: str, token: str | None, duration: int | None, now: int) -> None:
        """JobHeartbeat: alive; with a token the lease is renewed too (core 5.4). Raises NotFound in its words.

        Kept in memory only: after a restart every lease has one grace anyway (R113).
        """
        job = self.engine.index.get(id)
        if job is None or job.state is not State.ACTIVE:
            raise NotFound("Job not found or not active (or invalid token)")
        lease = job.lease
        if token and (lease is None or lease.token != token or lease.expires_at <= now):
            raise NotFound("Job not found or not active (or invalid token)")

        if token and lease is not None:
            self._renew(job, lease, duration, now)
        else:
            job.heartbeat_at = now

    def _renew(self, job: Job, lease: Lease, duration: int | None, now: int) -> None:
        ttl = lease.ttl if duration is None else duration
        lease.expires_at = now + ttl
        lease.renewals += 1
        job.heartbeat_at = now
        self.engine.timers.after(self.lease_end, now, ttl, job)
        self.engine.upkeep.recovered.pop(job.seq, None)

    def check_token(self, job: Job, token: str | None) -> None:
        """The holder of a leased delivery is who has its token (core 3.3). Raises LeaseLost."""
        lease = job.lease
        if lease is None:
            return
        if not token:
            raise LeaseLost(f"Lock token required for job {job.id}")
        if token != lease.token:
            raise LeaseLost(f"Invalid or expired lock token for job {job.id}")

    # ---------------------------------------------------------------- a closed connection

    def close(self, session: Session, now: int) -> None:
        """A connection is gone: its polls and waits end, its workers go, its jobs go back (core 1.5, 5.5)."""
        engine = self.engine
        for pull in session.pulls:
            pull.answer = None
            engine.index.unpark(pull)
        session.pulls.clear()
        engine.events.unsubscribe(session)
        for wait in session.waits:
            engine.events.drop(wait)
        session.waits.clear()
        engine.workers.drop(session)
        held = list(session.held.values())
        session.held.clear()
        for job in held:
            job.holder = None
            if job.lease is None or job.lease.renewals == 0:
                engine.settlement.release(job, now)
