"""What is done to jobs and queues from outside: promote, delay, cancel, pause, drain, clean (core 8, 9)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from gqueue.engine import history
from gqueue.engine.queue import Queue
from gqueue.engine.settlement import RETIRED
from gqueue.engine.states import state_name
from gqueue.engine.turns import SLICE, Turns, first_of
from gqueue.errors import NotFound, Refused, WrongState
from gqueue.model import Job, Packed, State

if TYPE_CHECKING:
    from gqueue.engine.engine import Engine

#: Stall configuration of a queue (core 5.6). Durations in ms.
STALL_DEFAULTS: dict[str, Any] = {"enabled": True, "stallInterval": 30_000, "maxStalls": 3, "gracePeriod": 5_000}

_TOLD = 1000  # `removed` events for one command (core 9.3)


class Control:
    """Commands that move, change or remove jobs."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    # ---------------------------------------------------------------- one job

    def cancel(self, id: str, now: int) -> None:
        """Remove a job that has not started. Raises WrongState for any other."""
        job = self.engine.index.get(id)
        if job is None or job.state not in (State.QUEUED, State.BLOCKED):
            raise WrongState("Job not found or cannot be cancelled")

        self.engine.remove(job, now, reason=None, prev=state_name(job, now))

    def progress(self, id: str, progress: float, message: str | None, token: str | None, now: int) -> None:
        """Progress of an active job, cut to 0..100. Raises NotFound, WrongState, LeaseLost (only for a wrong token)."""
        job = self.active(id, now)
        if token:
            self.engine.delivery.check_token(job, token)

        extra = job.edit()
        progress = min(max(progress, 0), 100)
        extra.progress = int(progress) if progress == int(progress) else progress
        if message is not None:
            extra.progress_message = message
        job.heartbeat_at = now
        self.engine.journal.save(job)
        events = self.engine.events
        if events.subscribers:
            data = {"progress": extra.progress, "message": extra.progress_message}
            events.publish("progress", job.queue, job.id, now, progress=extra.progress, data=data)

    def active(self, id: str, now: int) -> Job:
        """The active job of this id. Raises NotFound or WrongState in the words of Progress (core 3.3)."""
        job = self.engine.index.get(id)
        if job is None:
            raise NotFound("Job not found")
        if job.state is not State.ACTIVE:
            raise WrongState(f"Job is not active (current state: {state_name(job, now)})")
        return job

    def update(self, job: Job, data: Packed) -> None:
        """Replace the payload of an unfinished job."""
        job.data = data
        self.engine.journal.create(job)

    def updatable(self, id: str) -> Job:
        """The unfinished job of this id. Raises WrongState."""
        job = self.engine.index.get(id)
        if job is None or job.state > State.ACTIVE:
            raise WrongState("Job not found or cannot be updated")
        return job

    def queued(self, id: str) -> Job:
        """The waiting, prioritized or delayed job of this id. Raises WrongState in the words of ChangePriority."""
        job = self.engine.index.get(id)
        if job is None or job.state is not State.QUEUED:
            raise WrongState("Job not found or not in queue")
        return job

    def change_priority(self, job: Job, priority: int, lifo: bool | None, now: int) -> None:
        """Place a queued job anew; its admission order stays."""
        index = self.engine.index
        index.leave(job)
        history.keep(job)
        job.priority = priority
        if lifo is not None:
            job.edit().lifo = lifo
        index.enter(job, now)
        self.engine.journal.save(job)

    def promote(self, id: str, now: int) -> None:
        """delayed -> waiting. Raises WrongState."""
        job = self.engine.index.get(id)
        if job is None or job.state is not State.QUEUED or job.run_at <= now:
            raise WrongState("Job not found or not delayed")

        self._requeue(job, now, now)

    def promote_all(self, name: str, count: int | None, now: int) -> Turns[int]:
        """Promote the oldest delayed jobs of a queue by (created_at, id); how many."""
        queue = self.engine.index.queues.get(name)
        if queue is None or (count is not None and count <= 0):
            return 0
        queue.mature(now)
        wanted = queue.delayed_live if count is None else count
        jobs = yield from first_of(queue.delayed_jobs(), wanted, lambda job: (job.created_at, job.id))
        promoted = 0
        for number, job in enumerate(jobs, 1):
            if job.state is State.QUEUED and job.run_at > now and self._is_here(job):
                self._requeue(job, now, now)
                promoted += 1
            if number % SLICE == 0:
                yield
        return promoted

    def _is_here(self, job: Job) -> bool:
        """Not removed in a turn of somebody else's."""
        return self.engine.index.get(job.id) is job

    def _requeue(self, job: Job, run_at: int, now: int) -> None:
        """Give a queued job another time."""
        index = self.engine.index
        was_delayed = job.run_at > now
        index.leave(job)
        history.keep(job)
        job.run_at = run_at
        index.enter(job, now)
        self.engine.journal.save(job)
        events = self.engine.events
        if events.subscribers:
            if run_at > now:
                events.publish("delayed", job.queue, job.id, now, delay=run_at - now)
            elif was_delayed:
                events.publish("waiting", job.queue, job.id, now, prev="delayed")

    def move_to_delayed(self, id: str, delay: int, token: str | None, now: int) -> None:
        """MoveToDelayed. Raises NotFound, WrongState or LeaseLost."""
        job = self.engine.index.get(id)
        if job is None:
            raise NotFound("Job not found")
        if job.state not in (State.QUEUED, State.ACTIVE):
            raise WrongState(f"Job is not active (current state: {state_name(job, now)})")
        self._delay(job, delay, token, now)

    def change_delay(self, id: str, delay: int, token: str | None, now: int) -> None:
        """ChangeDelay: the same in other words. Raises WrongState or LeaseLost."""
        job = self.engine.index.get(id)
        if job is None or job.state not in (State.QUEUED, State.ACTIVE):
            raise WrongState("Job not found or cannot change delay")
        self._delay(job, delay, token, now)

    def _delay(self, job: Job, delay: int, token: str | None, now: int) -> None:
        if job.state is State.QUEUED:
            self._requeue(job, now + delay, now)
            return
        self.engine.delivery.check_token(job, token)

        self._give_back(job, State.QUEUED, now, run_at=now + delay)
        self.engine.events.publish("delayed", job.queue, job.id, now, delay=delay)

    def _give_back(self, job: Job, to: State, now: int, *, run_at: int | None = None) -> None:
        """active -> queued or parked by will: nothing is counted."""
        history.keep(job)
        extra = job.edit()
        extra.losses = extra.releases = 0
        self.engine.settlement.leave(job, to, now, fate=RETIRED, run_at=run_at)

    def move_to_wait(self, id: str, token: str | None, now: int) -> None:
        """MoveToWait (core 8.7). Raises WrongState or LeaseLost."""
        job = self.engine.index.get(id)
        if job is None:
            raise WrongState("Cannot move job from state 'unknown' to waiting")
        events = self.engine.events
        if job.state is State.ACTIVE:
            self.engine.delivery.check_token(job, token)
            self._give_back(job, State.QUEUED, now, run_at=now)
            events.publish("waiting", job.queue, job.id, now, prev="active")
        elif job.state is State.QUEUED:
            if job.run_at > now:
                self._requeue(job, now, now)
        elif job.state is State.FAILED:
            self.revive(job, now)
        elif job.state is State.BLOCKED and job.more.parked and not any(map(self._is_open, job.more.pending)):
            self._unblock(job, now)
        else:
            raise WrongState(f"Cannot move job from state '{state_name(job, now)}' to waiting")

    def _is_open(self, id: str) -> bool:
        """A child or dependency that is there and not completed: worth waiting for."""
        other = self.engine.index.get(id)
        return other is not None and other.state is not State.COMPLETED

    def _unblock(self, job: Job, now: int) -> None:
        index = self.engine.index
        index.leave(job)
        history.keep(job)
        extra = job.edit()
        extra.parked = False
        extra.pending = ()
        job.state = State.QUEUED
        job.run_at = now
        history.note(job, "waiting", now)
        index.enter(job, now)
        self.engine.journal.save(job)
        self.engine.events.publish("waiting", job.queue, job.id, now, prev="waiting-children")

    def revive(self, job: Job, now: int) -> None:
        """failed -> waiting, with all its attempts again. Raises Refused when another job has its unique key now."""
        if self._key_taken(job, now):
            raise Refused("Failed job not in DLQ")

        self._restart(job, now, prev="failed")

    def _key_taken(self, job: Job, now: int) -> bool:
        extra = job.more
        if extra.unique_key is None or extra.dropped_key:
            return False
        return self.engine.index.holder(("unique", job.queue, extra.unique_key), now) is not None

    def _restart(self, job: Job, now: int, *, prev: str) -> None:
        """A finished job goes through its queue again (DLQ retry, RetryCompleted)."""
        index = self.engine.index
        history.keep(job)
        index.leave(job)
        extra = job.edit()
        extra.stall_count = extra.losses = extra.releases = 0
        extra.dlq_reason = extra.dlq_error = None
        extra.unique_until = None
        if extra.debounce_id is not None and index.holder(("debounce", job.queue, extra.debounce_id), now) is not None:
            extra.dropped_key = True  # another job has it now, and keeps it
        if prev == "completed":
            extra.progress = 0
            extra.progress_message = None
        job.attempts = 0
        job.result = None
        job.finished_at = job.started_at = None
        job.run_at = now
        job.state = State.QUEUED
        history.note(job, "waiting", now)
        index.enter(job, now)
        self.engine.journal.save(job)
        self.engine.upkeep.watch_ttl(job, now)
        self.engine.events.publish("waiting", job.queue, job.id, now, prev=prev)

    def park(self, id: str, token: str | None, now: int) -> None:
        """MoveToWaitingChildren: until the last open child or dependency is completed; without one, back at once.

        Raises WrongState or LeaseLost.
        """
        index = self.engine.index
        job = index.get(id)
        if job is None or job.state is not State.ACTIVE:
            raise WrongState("Job is not active")
        self.engine.delivery.check_token(job, token)

        extra = job.edit()
        pending = [other for other in dict.fromkeys((*extra.depends_on, *extra.children_ids)) if self._is_open(other)]
        if not pending:
            self._give_back(job, State.QUEUED, now, run_at=now)
            self.engine.events.publish("waiting", job.queue, job.id, now, prev="active")
            return
        history.keep(job)
        history.note(job, "waiting-children", now)
        extra.pending = tuple(pending)
        extra.parked = True
        self._give_back(job, State.BLOCKED, now)
        self.engine.events.publish("waiting-children", job.queue, job.id, now, prev="active")

    def discard(self, id: str, token: str | None, now: int) -> None:
        """To the dead letters, whatever is left of its attempts. Raises NotFound or LeaseLost."""
        job = self.engine.index.get(id)
        if job is None or job.state > State.ACTIVE:
            raise NotFound("Job not found")
        if job.state is State.ACTIVE:
            self.engine.delivery.check_token(job, token)

        self.engine.settlement.discard(job, now)

    # ---------------------------------------------------------------- one queue

    def pause(self, name: str, now: int) -> None:
        """No deliveries from the queue any more; what is active goes on."""
        queue = self.engine.index.queue(name)
        if not queue.paused:
            queue.paused = True
            self.engine.save_queue(queue)
        self.engine.events.publish("paused", name, "", now)

    def resume(self, name: str, now: int) -> None:
        queue = self.engine.index.queues.get(name)
        if queue is not None and queue.paused:
            queue.paused = False
            self.engine.save_queue(queue)
            self.engine.index.woken.append(queue)
        self.engine.events.publish("resumed", name, "", now)

    def drain(self, name: str, now: int) -> Turns[int]:
        """Remove every queued job; how many (core 9.3)."""
        queue = self.engine.index.queues.get(name)
        if queue is None:
            return 0
        queue.mature(now)
        gone = yield from self._remove_all([*queue.ready_jobs(), *queue.delayed_jobs()], now, "drained")
        if gone:
            self.engine.events.publish("drained", name, "", now, data={"count": len(gone)})
        return len(gone)

    def _remove_all(self, jobs: list[Job], now: int, reason: str) -> Turns[list[str]]:
        """Remove jobs, all in one state, that still are in it when their turn comes; their ids."""
        engine = self.engine
        state = jobs[0].state if jobs else None
        told = len(jobs) <= _TOLD
        gone = []
        for number, job in enumerate(jobs, 1):
            if job.state is state and self._is_here(job):
                gone.append(job.id)
                if told:
                    engine.remove(job, now, reason=reason, prev=state_name(job, now))
                else:
                    engine.index.discard(job)
                    engine.journal.remove(job)
                    if engine.events.waits:
                        engine.events.gone(job)
            if number % SLICE == 0:
                yield
        return gone

    def obliterate(self, name: str, now: int) -> Turns[None]:
        """Everything of a queue is gone: jobs in every state, settings, the name itself (core 9.4).

        Jobs that are pushed in a turn of somebody else's come after it, and stay.
        """
        engine = self.engine
        index = engine.index
        queue = index.queues.get(name)
        if queue is None:
            return
        last = engine.seq
        for number, job in enumerate(queue.members(), 1):
            if self._is_here(job):
                ended = job.state in (State.COMPLETED, State.FAILED)
                if job.state is State.ACTIVE:
                    engine.settlement.leave(job, None, now, fate=RETIRED)
                else:
                    index.discard(job)
                    engine.journal.remove(job)
                if not ended:
                    engine.events.gone(job)
            if number % SLICE == 0:
                yield
        queue = index.queues.get(name)
        if queue is None:  # forgotten in a turn of somebody else's
            return
        for job in list(queue.completed.values()):
            if job.seq <= last:  # recalled meanwhile
                index.discard(job)
        later = queue.members()
        for job in later:
            index.leave(job)
        engine.archive.jobs -= queue.finished
        queue.finished = 0
        for id in [id for id, of in engine.upkeep.proofs.items() if of == name]:
            del engine.upkeep.proofs[id]
            engine.journal.save_proof(id, None)
        engine.journal.obliterate(name, last)
        engine.journal.save_queue(name, None)
        index.forget(queue)
        for job in later:
            index.enter(job, now)
        engine.events.publish("removed", name, "", now, data={"reason": "obliterated"})

    def clean(self, name: str, grace: int, state: str | None, limit: int, now: int) -> Turns[list[str]]:
        """Remove the oldest jobs in a state that were there before `now - grace`; their ids (core 9.5)."""
        queue = self.engine.index.queues.get(name)
        if queue is None or limit <= 0:
            return []
        queue.mature(now)
        before = now - grace
        if state in ("completed", "failed"):
            old = [job for job in self._cleanable(queue, state) if (job.finished_at or 0) <= before]
            jobs = yield from first_of(old, limit, lambda job: (job.finished_at or 0, job.seq))
        else:
            old = [job for job in self._cleanable(queue, state) if job.created_at <= before]
            jobs = yield from first_of(old, limit, lambda job: (job.created_at, job.seq))
        ids = yield from self._remove_all(jobs, now, "cleaned")
        return ids

    def _cleanable(self, queue: Queue, state: str | None) -> Iterable[Job]:
        if state is None:
            return [*queue.ready_jobs(), *queue.delayed_jobs()]
        if state in ("waiting", "wait"):
            return [job for job in queue.ready_jobs() if job.priority <= 0]
        if state == "prioritized":
            return [job for job in queue.ready_jobs() if job.priority > 0]
        if state == "paused":
            return list(queue.ready_jobs()) if queue.paused else ()
        if state == "delayed":
            return list(queue.delayed_jobs())
        if state == "completed":
            return list(queue.completed.values())
        if state == "failed":
            return list(queue.failed.values())
        return ()

    def retry_completed(
        self, name: str, id: str | None, count: int | None, until: float | None, now: int
    ) -> Turns[int]:
        """Completed jobs go through the queue again, oldest completion first; how many (core 9.7)."""
        queue = self.engine.index.queues.get(name)
        if queue is None or (count is not None and count <= 0 and id is None):
            return 0
        if id is not None:
            job = self.engine.index.get(id)
            jobs = [job] if job is not None and job.queue == name and job.state is State.COMPLETED else []
        else:
            jobs = [job for job in queue.completed.values() if until is None or (job.finished_at or 0) <= until]
            wanted = len(jobs) if count is None else count
            jobs = yield from first_of(jobs, wanted, lambda job: (job.finished_at or 0, job.seq))
        revived = 0
        for number, job in enumerate(jobs, 1):
            if job.state is State.COMPLETED and self._is_here(job) and not self._key_taken(job, now):
                self._restart(job, now, prev="completed")
                revived += 1
            if number % SLICE == 0:
                yield
        return revived

    # ---------------------------------------------------------------- unique keys

    def key_owner(self, name: str, key: str, now: int) -> str | None:
        job = self.engine.index.holder(("unique", name, key), now)
        return None if job is None else job.id

    def free_key(self, name: str, key: str, now: int) -> bool:
        """The owner keeps the key as a label only. False when nobody owns it."""
        job = self.engine.index.holder(("unique", name, key), now)
        if job is None:
            return False
        self._drop_key(job, now)
        return True

    def free_job_key(self, id: str, now: int) -> bool:
        """The same, named by the job; only if it owns its key."""
        job = self.engine.index.get(id)
        if job is None or job.more.unique_key is None:
            return False
        if self.engine.index.holder(("unique", job.queue, job.more.unique_key), now) is not job:
            return False
        self._drop_key(job, now)
        return True

    def _drop_key(self, job: Job, now: int) -> None:
        index = self.engine.index
        index.leave(job)
        job.edit().dropped_key = True
        index.enter(job, now)
        self.engine.journal.save(job)

    # ---------------------------------------------------------------- stall configuration

    def stall_config(self, name: str) -> dict[str, Any]:
        """The configuration in force: what was set, over the defaults."""
        queue = self.engine.index.queues.get(name)
        return STALL_DEFAULTS if queue is None or not queue.stall else STALL_DEFAULTS | queue.stall

    def stall_setting(self, name: str, key: str) -> Any:
        return self.stall_config(name)[key]

    def set_stall_config(self, name: str, config: dict[str, Any]) -> None:
        """Merge; None puts a key back to its default, what makes no sense is dropped (core 5.6)."""
        index = self.engine.index
        queue = index.queues.get(name)
        stall = {} if queue is None else dict(queue.stall)
        for key, value in config.items():
            if key not in STALL_DEFAULTS:
                continue
            if value is None:
                stall.pop(key, None)
            elif (kept := _stall_value(key, value)) is not None:
                stall[key] = kept
        stall = {key: value for key, value in stall.items() if value != STALL_DEFAULTS[key]}
        if queue is None and not stall:
            return
        queue = index.queue(name)
        queue.stall = stall
        self.engine.save_queue(queue)


def _stall_value(key: str, value: Any) -> Any:
    """A value in its type, or None when it has none that fits."""
    if key == "enabled":
        return value if isinstance(value, bool) else None
    if isinstance(value, bool):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    if not 0 <= number < 2**53:
        return None
    return int(number) if number == int(number) else number
