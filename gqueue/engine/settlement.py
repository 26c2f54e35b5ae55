"""How a delivery ends: ack, fail, retry, timeout, lease end, stall, loss. `leave` is the one way out (design I4)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgpack

from gqueue.engine import history
from gqueue.errors import LeaseLost, NotFound
from gqueue.model import Job, Packed, RetryKind, State

if TYPE_CHECKING:
    from gqueue.engine.engine import Engine

#: The cap of a backoff without `maxDelay`, in ms (core 3.6).
BACKOFF_CAP = 3_600_000
_TOKENS = 10  # of ended deliveries that a job remembers
_ATTEMPTS = 20  # records of failed attempts that a job remembers (R80)
_PROOFS = 50_000  # of removed completions (core 2.7)

# What becomes of the token of a delivery that ends: see core 4.6.
DONE, RETIRED, TIMED_OUT, LOST = range(4)

NOTHING_DONE: dict[str, Any] = {"data": {"applied": False, "reason": "already-finalized"}}


class Settlement:
    """Ends deliveries."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    # ---------------------------------------------------------------- the way out

    def leave(
        self, job: Job, to: State | None, now: int, *, fate: int, run_at: int | None = None, started: bool = False
    ) -> None:
        """active -> `to`, or gone when `to` is None: lease, slots and ties are given up, the record is saved.

        `fate` says what the delivery's token is good for from now on, `started` keeps `started_at`.
        """
        engine = self.engine
        if job.holder is not None:
            del job.holder.held[job.seq]
            job.holder = None
        if fate != DONE:
            self._remember(job, fate)
        if engine.upkeep.recovered:
            engine.upkeep.recovered.pop(job.seq, None)
        if to is None:
            engine.index.discard(job)
            job.lease = None
            engine.journal.remove(job)
            return
        engine.index.leave(job)
        job.lease = None
        job.state = to
        if run_at is not None:
            job.run_at = run_at
        if not started:
            job.started_at = None
        engine.index.enter(job, now)
        engine.journal.save(job)

    def _remember(self, job: Job, fate: int) -> None:
        extra = job.edit()
        token = job.lease.token if job.lease is not None else None
        if fate == TIMED_OUT:
            if token is None:
                extra.timed_out_unleased = True
            else:
                extra.timed_out = (*extra.timed_out, token)[-_TOKENS:]
            return
        if token is not None:
            extra.retired = (*extra.retired, token)[-_TOKENS:]
        if fate == LOST:
            extra.lost_token = token or ""

    # ---------------------------------------------------------------- outcomes by the worker

    def check(self, id: str, token: str | None, *, fail: bool = False) -> Job | None:
        """The job that an outcome applies to, active or queued again; None when the outcome is a no-op.

        The table of core 4.6, first match wins. Raises LeaseLost or NotFound.
        """
        job = self.engine.index.get(id)
        if job is None:
            raise NotFound(f"Job not found or not in processing state: {id}")
        extra = job.extra
        if extra is not None:
            if token and token in extra.timed_out:
                return None
            if not token and extra.timed_out_unleased and job.state is not State.ACTIVE:
                return None
            if job.state is State.ACTIVE and token and token in extra.retired:
                raise LeaseLost(f"Invalid or expired lock token for job {id}")
        if job.state is State.ACTIVE:
            lease = job.lease
            if lease is not None and lease.token != token:
                self.engine.delivery.check_token(job, token)
            return job
        if job.state is State.QUEUED and extra is not None and extra.lost_token is not None:
            if token and token == extra.lost_token:
                return None if fail else job
            if not token and extra.lost_token == "" and not fail:
                return job
        raise NotFound(f"Job not found or not in processing state: {id}")

    def ack(self, id: str, token: str | None, result: Packed | None, *, remove: bool, now: int) -> bool:
        """Complete a job. False: the delivery had timed out, nothing changes. Raises LeaseLost or NotFound."""
        job = self.check(id, token)
        if job is None:
            return False

        self.complete(job, result, remove=remove, now=now)
        return True

    def ack_all(
        self,
        ids: list[str],
        tokens: list[str | None],
        results: list[Packed | None],
        removes: list[bool | None],
        now: int,
    ) -> list[int]:
        """Complete all of them or none; the positions of no-ops (core 4.7). Raises LeaseLost before NotFound."""
        found: list[Job | None] = []
        missing: NotFound | None = None
        seen: set[str] = set()
        for id, token in zip(ids, tokens, strict=True):
            try:
                if id in seen:
                    raise NotFound(f"Job not found or not in processing state: {id}")
                seen.add(id)
                found.append(self.check(id, token))
            except NotFound as error:
                missing = missing or error
        if missing is not None:
            raise missing

        ignored = []
        for at, job in enumerate(found):
            if job is None:
                ignored.append(at)
            else:
                self.complete(job, results[at], remove=removes[at] is True, now=now)
        return ignored

    def complete(self, job: Job, result: Packed | None, *, remove: bool, now: int) -> None:
        """The work is done: by the holder of the delivery, or late by the last one that was lost."""
        engine = self.engine
        extra = job.extra
        if extra is not None:
            extra.losses = extra.releases = 0
            if job.state is not State.ACTIVE:
                history.keep(job)
            history.note(job, "completed", now)
            extra.lost_token = None
        remove = remove or job.options.remove_on_complete
        job.result = result
        job.finished_at = now
        job.born = engine.journal.number  # a look-up in the store finds it once this batch is there
        if job.state is State.ACTIVE:
            self.leave(job, None if remove else State.COMPLETED, now, fate=DONE, started=True)
        elif remove:
            engine.index.discard(job)
            engine.journal.remove(job)
        else:
            engine.index.leave(job)
            job.state = State.COMPLETED
            engine.index.enter(job, now)
            engine.journal.save(job)
        if remove:
            self._prove(job)
        events = engine.events
        if events.subscribers:
            events.publish("completed", job.queue, job.id, now, **({} if result is None else {"data": result}))
        if events.waits:
            events.ended(job, result)
        if engine.index.dependents:
            self.resolve(job.id, now)
        if engine.index.completed > engine.settings.max_completed_jobs:
            engine.upkeep.shed()

    def _prove(self, job: Job) -> None:
        """Remember that a removed job was completed, for those that depend on it; the newest 50,000 (core 2.7)."""
        engine = self.engine
        proofs = engine.upkeep.proofs
        proofs[job.id] = job.queue
        engine.journal.save_proof(job.id, msgpack.packb(job.queue))
        if len(proofs) > _PROOFS:
            oldest = next(iter(proofs))
            del proofs[oldest]
            engine.journal.save_proof(oldest, None)

    def resolve(self, id: str, now: int) -> None:
        """A job is completed: what waited for it alone may run (core 3.10)."""
        engine = self.engine
        for job in list(engine.index.dependents.get(id, {}).values()):
            engine.index.leave(job)
            history.keep(job)
            extra = job.edit()
            extra.pending = tuple(other for other in extra.pending if other != id)
            if not extra.pending:
                job.state = State.QUEUED
                extra.parked = False
                if job.run_at > now:
                    history.note(job, "delayed", now)
                    engine.events.publish("delayed", job.queue, job.id, now, delay=job.run_at - now)
                else:
                    history.note(job, "prioritized" if job.priority > 0 else "waiting", now)
                    engine.events.publish("waiting", job.queue, job.id, now, prev="waiting-children")
            engine.index.enter(job, now)
            engine.journal.save(job)

    def fail(
        self,
        id: str,
        token: str | None,
        *,
        error: str | None,
        stack: list[str] | None,
        unrecoverable: bool,
        remove: bool,
        now: int,
    ) -> bool:
        """FAIL: the attempt counts. False: a late outcome, nothing changes. Raises LeaseLost or NotFound."""
        job = self.check(id, token, fail=True)
        if job is None:
            return False

        extra = job.edit()
        if stack is not None:
            extra.stacktrace = tuple(stack[: job.options.stack_trace_limit]) or None
        self._count_attempt(job, error, "explicit_fail", now)
        extra.losses = extra.releases = 0
        if job.attempts < job.options.max_attempts and not unrecoverable:
            self._retry(job, now, fate=RETIRED, error=error)
        else:
            self._give_up(
                job, now, fate=RETIRED, reason="max_attempts_exceeded", error=error, remove=remove, started=True
            )
        return True

    # ---------------------------------------------------------------- outcomes by the clock

    def time_out(self, job: Job, now: int) -> None:
        """The delivery ran longer than the job's timeout (core 3.8)."""
        if self._orphaned(job):
            self.lose(job, now)
            return
        error = "Job timeout exceeded"
        self._count_attempt(job, error, "timeout", now)
        if job.attempts < job.options.max_attempts:
            self._retry(job, now, fate=TIMED_OUT, error=error)
        else:
            self._give_up(job, now, fate=TIMED_OUT, reason="timeout", error=error, started=True)

    def _orphaned(self, job: Job) -> bool:
        """The broker's own restart took the worker away: what ends the delivery is a loss, not an attempt (R113)."""
        return self.engine.upkeep.recovered.get(job.seq) == job.delivery

    def lapse(self, job: Job, now: int) -> None:
        """The lease ran out (core 5.2): runnable again at once, in its old place, while attempts and stalls last."""
        lease = job.lease
        if lease is None:
            return
        if self._orphaned(job):
            self.lose(job, now)
            return
        history.keep(job)
        extra = job.edit()
        extra.losses += 1
        exhausted = self._count_stall(job, now, "Lock expired")
        if exhausted is not None:
            attempts = exhausted == "max_attempts_exceeded"
            text = (
                f"Lock expired at max attempts ({job.options.max_attempts})"
                if attempts
                else f"Lock expired after {lease.renewals} renewals"
            )
            self._stalled(job, now, "move_to_dlq")
            shown = "Lock expired (max attempts reached)" if attempts else "Lock expired (max stalls reached)"
            self._give_up(job, now, fate=LOST, reason=exhausted, error=text, shown=shown)
            return
        if self._lost_too_often(job, now, fate=LOST):
            return
        job.heartbeat_at = now
        self.leave(job, State.QUEUED, now, fate=LOST, run_at=self._after_loss(job, now))
        self._stalled(job, now, "retry")

    def stall(self, job: Job, now: int) -> None:
        """Silent in two checks in a row (core 5.6): retried with backoff, while attempts and stalls last."""
        history.keep(job)
        exhausted = self._count_stall(job, now, "stalled")
        if exhausted is not None:
            extra = job.more
            text = (
                f"Job stalled at max attempts ({job.options.max_attempts})"
                if exhausted == "max_attempts_exceeded"
                else f"Job stalled {extra.stall_count} times"
            )
            self._stalled(job, now, "move_to_dlq")
            self._give_up(job, now, fate=LOST, reason=exhausted, error=text)
            return
        history.note(job, "failed", now, "stalled", job.attempts)
        history.note(job, "waiting", now, None, job.attempts + 1)
        job.heartbeat_at = now
        self.leave(job, State.QUEUED, now, fate=LOST, run_at=now + self.backoff(job, job.attempts))
        self._stalled(job, now, "retry")

    def release(self, job: Job, now: int) -> None:
        """The worker's connection closed (core 5.5): not an attempt, but a loss."""
        extra = job.edit()
        extra.releases += 1
        limit = self.engine.settings.max_job_releases
        if limit and extra.releases > limit:
            text = f"Job released {limit} times by closed connections"
            self._give_up(job, now, fate=RETIRED, reason="worker_lost", error=text)
            return
        self.lose(job, now)

    def lose(self, job: Job, now: int) -> None:
        """Nobody works on the job any more, and nobody is to blame for an attempt: back to its place (R90, R91)."""
        history.keep(job)
        extra = job.edit()
        extra.losses += 1
        if self._lost_too_often(job, now, fate=RETIRED):
            return
        job.heartbeat_at = now
        self.leave(job, State.QUEUED, now, fate=RETIRED, run_at=self._after_loss(job, now))
        if self.engine.events.subscribers:
            self.engine.events.publish("waiting", job.queue, job.id, now, prev="active")

    def _lost_too_often(self, job: Job, now: int, *, fate: int) -> bool:
        limit = self.engine.settings.max_lost
        losses = job.more.losses
        if not limit or losses <= limit:
            return False
        self._give_up(job, now, fate=fate, reason="worker_lost", error=f"Job lost {losses} times in a row")
        return True

    def _after_loss(self, job: Job, now: int) -> int:
        """When a lost job runs again: at once in its old place; after a pause from the second loss in a row (R91)."""
        if job.more.losses < 2:
            return job.run_at
        return now + max(100, self.backoff(job, 0))

    # ---------------------------------------------------------------- counting

    def _count_attempt(self, job: Job, error: str | None, reason: str, now: int) -> None:
        history.keep(job)
        extra = job.edit()
        job.attempts += 1
        extra.error = error
        started = job.started_at if job.started_at is not None else now
        record = (job.attempts, started, now, reason, error, now - started)
        extra.attempt_log = (*extra.attempt_log, record)[-_ATTEMPTS:]
        if reason != "stalled":
            history.note(job, "failed", now, error, job.attempts)

    def _count_stall(self, job: Job, now: int, error: str) -> str | None:
        """Count an attempt and a stall. The DLQ reason when a budget is spent, else None."""
        self._count_attempt(job, error, "stalled", now)
        extra = job.edit()
        extra.stall_count += 1
        most = self.engine.control.stall_setting(job.queue, "maxStalls")
        if job.attempts >= job.options.max_attempts:
            return "max_attempts_exceeded"
        if most > 0 and extra.stall_count >= most:
            return "stalled"
        return None

    def backoff(self, job: Job, attempts: int) -> int:
        """ms before the next try, after `attempts` failed ones (core 3.6)."""
        options = job.options
        cap = BACKOFF_CAP
        if options.backoff_config is not None and options.backoff_config[2] is not None:
            cap = options.backoff_config[2]
        random = self.engine.random
        if options.retry_kind is RetryKind.FIXED:
            return round(min(options.backoff * random.uniform(0.8, 1.2), cap))
        return round(min(options.backoff * (1 << min(attempts, 40)) * random.uniform(0.5, 1.5), cap))

    # ---------------------------------------------------------------- retry, or the end

    def _retry(self, job: Job, now: int, *, fate: int, error: str | None) -> None:
        delay = self.backoff(job, job.attempts)
        history.note(job, "waiting", now, None, job.attempts + 1)
        self.leave(job, State.QUEUED, now, fate=fate, run_at=now + delay)
        events = self.engine.events
        if events.subscribers:
            self._failed(job, now, error, terminal=False)
            events.publish("retried", job.queue, job.id, now, prev="failed")

    def _give_up(
        self,
        job: Job,
        now: int,
        *,
        fate: int,
        reason: str,
        error: str | None,
        shown: str | None = None,
        remove: bool = False,
        started: bool = False,
    ) -> None:
        """The end of an active job that will not be completed: to the dead letters, or gone with removeOnFail."""
        remove = remove or job.options.remove_on_fail
        self.bury(job, reason, error, now, to=None if remove else State.FAILED)
        self.leave(job, None if remove else State.FAILED, now, fate=fate, started=started)
        self._failed(job, now, shown or error, terminal=True)
        if self.engine.events.waits:
            self.engine.events.broken(job, error)

    def bury(self, job: Job, reason: str, error: str | None, now: int, *, to: State | None) -> None:
        """Write the dead letter into the record (core 3.9)."""
        history.keep(job)
        extra = job.edit()
        if error is not None:
            extra.error = error
        extra.dlq_reason = reason
        extra.dlq_error = error
        if to is not None:
            job.finished_at = now

    def discard(self, job: Job, now: int) -> None:
        """Discard: to the dead letters from any live state, the attempt is not counted (core 8.9)."""
        if job.state is State.ACTIVE:
            self.bury(job, "unknown", None, now, to=State.FAILED)
            self.leave(job, State.FAILED, now, fate=RETIRED)
        else:
            self.engine.index.leave(job)
            self.bury(job, "unknown", None, now, to=State.FAILED)
            job.state = State.FAILED
            self.engine.index.enter(job, now)
            self.engine.journal.save(job)
        self._failed(job, now, None, terminal=True)
        if self.engine.events.waits:
            self.engine.events.broken(job, None)

    def _failed(self, job: Job, now: int, error: str | None, *, terminal: bool) -> None:
        events = self.engine.events
        if events.subscribers:
            fields: dict[str, Any] = {"data": job.data, "terminal": terminal}
            if error is not None:
                fields["error"] = error
            events.publish("failed", job.queue, job.id, now, **fields)

    def _stalled(self, job: Job, now: int, action: str) -> None:
        events = self.engine.events
        if events.subscribers:
            data = {"stallCount": job.more.stall_count, "action": action}
            events.publish("stalled", job.queue, job.id, now, data=data)
