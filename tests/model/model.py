"""A small model of the broker, from the specification (core 3 to 9, robustness R90, R91, R113), not from its code.

It knows no index, no heap and no journal: a dict of jobs, and each rule as the specification words it. What chance
decides (the jitter of a backoff, ids and tokens) it takes over from the broker, within the bounds of the rule.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

Reply = dict[str, Any]

NO_OP: Reply = {"ok": True, "data": {"applied": False, "reason": "already-finalized"}}
OK: Reply = {"ok": True}
LIVE = ("queued", "blocked", "active")

LEASE = 30_000  # ms, of a pull that names none
STALL_CHECK = 5_000  # ms between two checks (5.6)
STALL_GRACE = 5_000  # ms after a start without a check
SILENCE = 30_000  # ms
MAX_STALLS = 3
BACKOFF_CAP = 3_600_000  # ms (3.6)
ORPHAN_GRACE = 30_000  # ms that an unleased delivery outlives its broker (R113)
TTL_SWEEP = 1_000  # ms that the removal of an expired job may be late (3.7)


class Refusal(Exception):
    """What a refused command is answered."""

    @property
    def reply(self) -> Reply:
        return {"ok": False, "error": str(self)}


def _e1(id: str) -> Refusal:
    return Refusal(f"Job not found or not in processing state: {id}")


@dataclass(slots=True)
class Job:
    """One job. `state` is queued, blocked, active, completed or failed; time and priority tell the rest (3.1)."""

    id: str
    queue: str
    seq: int  # admission order over the whole server
    data: Any
    options: dict[str, Any]  # as on the wire
    priority: int
    lifo: bool
    created_at: int
    run_at: int
    born: int  # the step that made it
    state: str = "queued"
    queued_at: int = 0
    finished_at: int = 0
    attempts: int = 0
    stalls: int = 0
    losses: int = 0
    releases: int = 0
    delivery: int = 0
    open: list[str] = field(default_factory=list)  # dependencies that are not resolved
    parked: bool = False  # blocked by MoveToWaitingChildren
    jitter: tuple[int, int] | None = None  # bounds of run_at until the broker's choice is known
    owns_key: bool = False
    key_dropped: bool = False
    key_until: int | None = None
    # of the delivery
    leased: bool = False
    token: str | None = None  # None while leased: not known yet
    lease_ttl: int = 0
    lease_end: int = 0
    explicit: bool = False
    renewals: int = 0
    started: int = 0
    heartbeat: int = 0
    holder: int | None = None  # the connection that it is tied to
    recovered: bool = False  # its broker went away under it, and its worker was not heard of since
    orphan_at: int = 0
    # of earlier deliveries (4.6)
    timed_out: list[str] = field(default_factory=list)
    retired: list[str] = field(default_factory=list)
    lost: str | None = None  # the last lost delivery's token, "" if it had none
    timed_out_unleased: bool = False

    @property
    def max_attempts(self) -> int:
        return int(self.options.get("maxAttempts", 3))

    @property
    def key(self) -> str | None:
        return self.options.get("uniqueKey")

    @property
    def expires_at(self) -> int | None:
        """The last instant at which it may still be delivered (3.7)."""
        ttl = self.options.get("ttl")
        return None if ttl is None else self.created_at + int(ttl)


@dataclass(slots=True)
class Claimed:
    """A delivery, as a reply shows it."""

    id: str
    seq: int
    delivery: int
    leased: bool
    born: int


@dataclass(slots=True)
class Poll:
    """A PULL or PULLB; parked while it is in `Model.polls`."""

    peer: int
    number: int
    queue: str
    count: int | None  # None: PULL
    leased: bool
    ttl: int
    explicit: bool
    detach: bool
    until: int = 0


@dataclass(slots=True)
class Model:
    """The broker as the specification has it."""

    now: int
    max_lost: int
    max_releases: int
    jobs: dict[str, Job] = field(default_factory=dict)
    proofs: dict[str, str] = field(default_factory=dict)  # id -> queue of removed completions
    paused: set[str] = field(default_factory=set)
    polls: list[Poll] = field(default_factory=list)
    answers: list[tuple[Poll, list[Claimed]]] = field(default_factory=list)  # to parked polls, not looked at yet
    seq: int = 0
    next_check: int = 0
    suspects: dict[str, tuple[int, int, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.next_check = self.now + STALL_CHECK

    # ---------------------------------------------------------------- what can be seen

    def state(self, job: Job) -> str:
        """The name of a job's state (3.1)."""
        if job.state == "queued":
            if job.run_at > self.now:
                return "delayed"
            return "prioritized" if job.priority > 0 else "waiting"
        return "waiting-children" if job.state == "blocked" else job.state

    def ready(self, queue: str) -> list[Job]:
        """The jobs of a queue that may be delivered now, in the order of core 3.4."""
        ready = [
            job
            for job in self.jobs.values()
            if job.queue == queue
            and job.state == "queued"
            and job.run_at <= self.now
            and (job.expires_at is None or self.now <= job.expires_at)
        ]
        return sorted(
            ready, key=lambda job: (-job.priority, *((0, -job.seq) if job.lifo else (1, job.run_at, job.seq)))
        )

    def owner(self, queue: str, key: str) -> Job | None:
        """The live job that owns a unique key (6.3)."""
        for job in self.jobs.values():
            if job.queue == queue and job.key == key and job.owns_key:
                return job if job.key_until is None or job.key_until > self.now else None
        return None

    def in_state(self, *states: str) -> list[Job]:
        return [job for job in self.jobs.values() if job.state in states]

    # ---------------------------------------------------------------- admission (4.1, 4.2, 6)

    def push(self, queue: str, members: list[dict[str, Any]], ids: list[str], step: int, *, batch: bool) -> list[str]:
        """`ids` are those that the broker gave to members without a custom id, in order."""
        customs = {member["jobId"] for member in members if "jobId" in member} if batch else set()
        for at, member in enumerate(members):
            try:
                self._check(queue, member, customs)
            except Refusal as refusal:
                raise Refusal(f"jobs[{at}]: {refusal}" if batch else str(refusal)) from None

        return [self._admit(queue, member, ids, step) for member in members]

    def _check(self, queue: str, member: dict[str, Any], customs: set[str]) -> None:
        custom = member.get("jobId")
        for id in member.get("dependsOn", ()):
            if id == custom:
                raise Refusal(f"Job cannot depend on itself: {id}")
            if id not in customs and id not in self.jobs and id not in self.proofs:
                raise Refusal(f"Dependency job not found: {id}")
        if custom in self.jobs and self.jobs[custom].state in LIVE:
            return  # custom id first, then unique key (6.1)
        if custom in self.proofs and any(
            custom in job.options.get("dependsOn", ()) for job in self.in_state("blocked")
        ):
            raise Refusal(f"Custom ID {custom} still has unresolved dependency consumers")
        key = member.get("uniqueKey")
        if key is not None and member.get("dedup", {}).get("replace"):
            owner = self.owner(queue, key)
            if owner is not None and owner.state != "active" and self._needed(owner.id):
                raise Refusal(f"Cannot replace deduplicated job {owner.id} because live jobs depend on it")

    def _needed(self, id: str) -> bool:
        return any(id in job.open for job in self.in_state("blocked"))

    def _admit(self, queue: str, member: dict[str, Any], ids: list[str], step: int) -> str:
        custom = member.get("jobId")
        if custom in self.jobs and self.jobs[custom].state in LIVE:
            return str(custom)
        key = member.get("uniqueKey")
        dedup = member.get("dedup", {})
        if key is not None and (owner := self.owner(queue, key)) is not None:
            if not dedup.get("replace"):
                if dedup.get("extend") and dedup.get("ttl") is not None:
                    owner.key_until = self.now + dedup["ttl"]
                return owner.id
            if owner.state == "active":
                owner.owns_key = False
                owner.key_dropped = True
            else:
                del self.jobs[owner.id]
        if key is not None:
            for job in self.jobs.values():
                if job.queue == queue and job.key == key:
                    job.owns_key = False  # its time is over, and now another has the key
        id = custom if custom is not None else ids.pop(0)
        self.proofs.pop(id, None)
        self.jobs.pop(id, None)
        self.seq += 1
        job = Job(
            id,
            queue,
            self.seq,
            member["data"],
            member,
            member.get("priority", 0),
            member.get("lifo", False),
            self.now,
            self.now + member.get("delay", 0),
            step,
            queued_at=self.now,
            heartbeat=self.now,
        )
        if key is not None:
            job.owns_key = True
            job.key_until = None if dedup.get("ttl") is None else self.now + dedup["ttl"]
        job.open = [dep for dep in dict.fromkeys(member.get("dependsOn", ())) if not self._resolved(dep)]
        if job.open:
            job.state = "blocked"
        self.jobs[id] = job
        return str(id)

    def _resolved(self, id: str) -> bool:
        job = self.jobs.get(id)
        return id in self.proofs if job is None else job.state == "completed"

    # ---------------------------------------------------------------- delivery (4.4, 4.5)

    def pull(self, poll: Poll, timeout: int) -> list[Claimed] | None:
        """What it gets now; None: it is parked."""
        claimed = self._claim(poll)
        if not claimed and timeout:
            poll.until = self.now + timeout
            self.polls.append(poll)
            return None
        return claimed

    def _claim(self, poll: Poll) -> list[Claimed]:
        if poll.queue in self.paused:
            return []
        claimed = []
        for job in self.ready(poll.queue)[: poll.count or 1]:
            job.state = "active"
            job.delivery += 1
            job.started = job.heartbeat = self.now
            job.leased = poll.leased
            job.token = None
            job.lease_ttl = poll.ttl
            job.lease_end = self.now + poll.ttl
            job.explicit = poll.explicit
            job.renewals = 0
            job.holder = None if poll.detach else poll.peer
            job.recovered = False
            job.lost = None
            job.timed_out_unleased = False
            claimed.append(Claimed(job.id, job.seq, job.delivery, job.leased, job.born))
        return claimed

    def settle(self) -> None:
        """Parked polls get what they can, in the order in which they came (4.4-4)."""
        for poll in list(self.polls):
            if claimed := self._claim(poll):
                self.polls.remove(poll)
                self.answers.append((poll, claimed))

    # ---------------------------------------------------------------- the end of a delivery (4.6 to 4.8, 5)

    def _leave(self, job: Job, fate: str) -> None:
        if fate == "timed out":
            if job.leased and job.token:
                job.timed_out.append(job.token)
            else:
                job.timed_out_unleased = True
        elif fate != "done":
            if job.leased and job.token:
                job.retired.append(job.token)
            if fate == "lost":
                job.lost = job.token or ""
        job.leased = job.recovered = False
        job.token = job.holder = None

    def _queue(self, job: Job, run_at: int) -> None:
        job.state = "queued"
        job.run_at = run_at
        job.queued_at = self.now

    def _queue_between(self, job: Job, low: float, high: float) -> None:
        """Somewhere in these bounds, which the broker rounds to whole ms; `low` until it is known where."""
        self._queue(job, self.now + round(low))
        job.jitter = (self.now + round(low), self.now + round(high))

    def _backoff(self, job: Job, attempts: int) -> tuple[float, float]:
        """Bounds of the delay after so many failures (3.6)."""
        backoff = job.options.get("backoff", 1000)
        kind, base, cap = "exponential", backoff, BACKOFF_CAP
        if isinstance(backoff, dict):
            kind, base, cap = backoff["type"], backoff["delay"], backoff.get("maxDelay", BACKOFF_CAP)
        if kind == "fixed":
            return min(base * 0.8, cap), min(base * 1.2, cap)
        return min(base * 2**attempts * 0.5, cap), min(base * 2**attempts * 1.5, cap)

    def _retry(self, job: Job, fate: str) -> None:
        self._leave(job, fate)
        self._queue_between(job, *self._backoff(job, job.attempts))

    def _bury(self, job: Job, fate: str, *, remove: bool = False) -> None:
        self._leave(job, fate)
        if remove or job.options.get("removeOnFail"):
            del self.jobs[job.id]
            return
        job.state = "failed"
        job.finished_at = self.now
        job.owns_key = False

    def _complete(self, job: Job, *, remove: bool = False) -> None:
        job.losses = job.releases = 0
        job.lost = None
        self._leave(job, "done")
        job.owns_key = False
        if remove or job.options.get("removeOnComplete"):
            del self.jobs[job.id]
            self.proofs[job.id] = job.queue
        else:
            job.state = "completed"
            job.finished_at = self.now
        for other in self.in_state("blocked"):
            if job.id in other.open:
                other.open.remove(job.id)
                if not other.open:
                    other.parked = False
                    self._queue(other, other.run_at)

    def _outcome(self, id: str, token: str | None, *, fail: bool) -> Job | None:
        """The decision table of 4.6; None is its no-op envelope."""
        job = self.jobs.get(id)
        if job is None:
            raise _e1(id)
        if token and token in job.timed_out:
            return None
        if not token and job.timed_out_unleased and job.state != "active":
            return None
        if job.state == "active":
            if token and token in job.retired:
                raise Refusal(f"Invalid or expired lock token for job {id}")
            self._check_token(job, token)
            return job
        if job.state == "queued" and job.lost is not None:
            if token and token == job.lost:
                return None if fail else job
            if not token and job.lost == "" and not fail:
                return job
        raise _e1(id)

    def _check_token(self, job: Job, token: str | None) -> None:
        if job.leased and not token:
            raise Refusal(f"Lock token required for job {job.id}")
        if job.leased and token != job.token:
            raise Refusal(f"Invalid or expired lock token for job {job.id}")

    def ack(self, id: str, token: str | None, *, remove: bool) -> Reply:
        job = self._outcome(id, token, fail=False)
        if job is None:
            return NO_OP
        self._complete(job, remove=remove)
        return OK

    def ack_all(self, ids: list[str], tokens: list[str | None]) -> Reply:
        """4.7: a wrong token refuses the whole batch, then whatever is not active; no-ops are reported."""
        found: list[Job | None] = []
        missing: Refusal | None = None
        for at, (id, token) in enumerate(zip(ids, tokens, strict=True)):
            try:
                if id in ids[:at]:
                    raise _e1(id)
                found.append(self._outcome(id, token, fail=False))
            except Refusal as refusal:
                if "processing state" not in str(refusal):
                    raise
                missing = missing or refusal
        if missing is not None:
            raise missing
        ignored = [at for at, job in enumerate(found) if job is None]
        for job in found:
            if job is not None:
                self._complete(job)
        return {**OK, "data": {"ignoredIds": [ids[at] for at in ignored], "ignoredIndices": ignored}} if ignored else OK

    def fail(self, id: str, token: str | None, *, unrecoverable: bool) -> Reply:
        job = self._outcome(id, token, fail=True)
        if job is None:
            return NO_OP
        job.attempts += 1
        job.losses = job.releases = 0
        if job.attempts < job.max_attempts and not unrecoverable:
            self._retry(job, "retired")
        else:
            self._bury(job, "retired")
        return OK

    def extend(self, id: str, token: str | None, duration: int | None) -> Reply:
        job = self.jobs.get(id)
        if job is None or job.state != "active" or not job.leased or (token and token != job.token):
            raise Refusal("Lock not found or invalid token")
        self._renew(job, duration)
        return OK

    def beat(self, id: str, token: str | None) -> Reply:
        job = self.jobs.get(id)
        if job is None or job.state != "active" or (token and (not job.leased or token != job.token)):
            raise Refusal("Job not found or not active (or invalid token)")
        job.heartbeat = self.now
        if token:
            self._renew(job, None)
        return {**OK, "data": {"ok": True}}

    def _renew(self, job: Job, duration: int | None) -> None:
        job.lease_end = self.now + (job.lease_ttl if duration is None else duration)
        job.renewals += 1
        job.heartbeat = self.now
        job.recovered = False

    # ---------------------------------------------------------------- losses (5.2, 5.5, 5.6, R90, R91)

    def _lose(self, job: Job, fate: str) -> None:
        if job.losses > self.max_lost:
            self._bury(job, fate)
            return
        again = job.losses >= 2
        self._leave(job, fate)
        if again:
            low, high = self._backoff(job, 0)
            self._queue_between(job, max(100, low), max(100, high))
        else:
            self._queue(job, job.run_at)

    def _count_stall(self, job: Job) -> bool:
        """Whether a budget is spent."""
        job.attempts += 1
        job.stalls += 1
        return job.attempts >= job.max_attempts or job.stalls >= MAX_STALLS

    def _lapse(self, job: Job) -> None:
        job.losses += 1
        if job.recovered:  # the broker's own end took the worker away: a loss, not an attempt (R113)
            self._lose(job, "retired")
        elif self._count_stall(job):
            self._bury(job, "lost")
        else:
            self._lose(job, "lost")

    def _time_out(self, job: Job) -> None:
        if job.recovered:  # as with the lease
            job.losses += 1
            self._lose(job, "retired")
            return
        job.attempts += 1
        if job.attempts < job.max_attempts:
            self._retry(job, "timed out")
        else:
            self._bury(job, "timed out")

    def drop(self, peer: int) -> None:
        """A connection closes (5.5)."""
        self.polls = [poll for poll in self.polls if poll.peer != peer]
        for job in self.in_state("active"):
            if job.holder == peer:
                job.holder = None
                if job.leased and job.renewals:
                    continue
                job.releases += 1
                job.losses += 1
                if self.max_releases and job.releases > self.max_releases:
                    self._bury(job, "retired")
                else:
                    self._lose(job, "retired")

    def _check_stalls(self) -> None:
        self.next_check = self.now + STALL_CHECK
        suspects = {}
        for job in self.in_state("active"):
            own = job.options.get("stallTimeout")
            allowed = own or SILENCE
            if job.leased and job.explicit and not own:
                allowed = max(allowed, job.lease_ttl)
            if self.now - job.started < STALL_GRACE or self.now - job.heartbeat <= allowed:
                continue
            mark = (job.seq, job.delivery, job.heartbeat)
            if self.suspects.get(job.id) == mark:
                if self._count_stall(job):
                    self._bury(job, "lost")
                else:
                    self._retry(job, "lost")
            else:
                suspects[job.id] = mark
        self.suspects = suspects

    def restarted(self) -> None:
        """The broker is back: everything is as it was, and each delivery has one grace (3.11 as in R113)."""
        self.polls.clear()
        self.answers.clear()
        self.next_check = self.now + STALL_CHECK
        self.suspects = {}
        for job in self.in_state("active"):
            grace = job.lease_ttl if job.leased else ORPHAN_GRACE
            job.holder = None
            job.recovered = True
            job.heartbeat = self.now
            job.lease_end = max(job.lease_end, self.now + grace)
            job.orphan_at = self.now + ORPHAN_GRACE
            timeout = job.options.get("timeout")
            if timeout:
                job.started = max(job.started, self.now + grace - timeout)

    # ---------------------------------------------------------------- time

    def _due(self) -> list[tuple[int, int, Callable[[], None]]]:
        """Every deadline: when, which first of those at one instant, what happens."""
        due: list[tuple[int, int, Callable[[], None]]] = [(self.next_check, 3, self._check_stalls)]
        for job in self.in_state("active"):
            if job.leased:
                due.append((job.lease_end, 0, lambda job=job: self._lapse(job)))
            timeout = job.options.get("timeout")
            if timeout:
                due.append((job.started + timeout, 1, lambda job=job: self._time_out(job)))
            if job.recovered and not job.leased:
                due.append((job.orphan_at, 0, lambda job=job: self._forsake(job)))
        waited_for = {poll.queue for poll in self.polls}
        due += [
            (job.run_at, 4, lambda: None)
            for job in self.in_state("queued")
            if job.queue in waited_for and job.run_at > self.now
        ]
        due += [(poll.until, 5, lambda poll=poll: self._give_up(poll)) for poll in self.polls]
        return due

    def _forsake(self, job: Job) -> None:
        if job.heartbeat > self.now - ORPHAN_GRACE:
            job.orphan_at = job.heartbeat + ORPHAN_GRACE + 1
        else:
            job.losses += 1
            self._lose(job, "retired")

    def _give_up(self, poll: Poll) -> None:
        self.settle()
        if poll in self.polls:
            self.polls.remove(poll)
            self.answers.append((poll, []))

    def advance(self, now: int) -> None:
        """Everything that is due up to `now`, each at its own time."""
        while True:
            at = min(self._due(), key=lambda entry: entry[:2])[0]
            if at > now:
                break
            self.now = max(self.now, at)
            while True:  # one may take away another: each is looked for again
                at, _, happen = min(self._due(), key=lambda entry: entry[:2])
                if at > self.now:
                    break
                happen()
            self.settle()
        self.now = now

    # ---------------------------------------------------------------- control (8, 9)

    def cancel(self, id: str) -> Reply:
        job = self.jobs.get(id)
        if job is None or job.state not in ("queued", "blocked"):
            raise Refusal("Job not found or cannot be cancelled")
        del self.jobs[id]
        return OK

    def promote(self, id: str) -> Reply:
        job = self.jobs.get(id)
        if job is None or self.state(job) != "delayed":
            raise Refusal("Job not found or not delayed")
        job.run_at = self.now
        return OK

    def change_priority(self, id: str, priority: int, lifo: bool | None) -> Reply:
        job = self.jobs.get(id)
        if job is None or job.state != "queued":
            raise Refusal("Job not found or not in queue")
        job.priority = priority
        if lifo is not None:
            job.lifo = lifo
        return OK

    def move_to_delayed(self, id: str, delay: int, token: str | None) -> Reply:
        job = self.jobs.get(id)
        if job is None:
            raise Refusal("Job not found")
        if job.state not in ("queued", "active"):
            raise Refusal(f"Job is not active (current state: {self.state(job)})")
        if job.state == "queued":
            job.run_at = self.now + delay
        else:
            self._check_token(job, token)
            self._give_back(job, self.now + delay)
        return OK

    def _give_back(self, job: Job, run_at: int) -> None:
        job.losses = job.releases = 0
        self._leave(job, "retired")
        self._queue(job, run_at)

    def move_to_wait(self, id: str, token: str | None) -> Reply:
        job = self.jobs.get(id)
        if job is None:
            raise Refusal("Cannot move job from state 'unknown' to waiting")
        if job.state == "active":
            self._check_token(job, token)
            self._give_back(job, self.now)
        elif job.state == "queued":
            job.run_at = min(job.run_at, self.now)
        elif job.state == "failed":
            if self._key_taken(job):
                raise Refusal("Failed job not in DLQ")
            self._revive(job)
        elif job.state == "blocked" and job.parked and not job.open:
            job.parked = False
            self._queue(job, self.now)
        else:
            raise Refusal(f"Cannot move job from state '{self.state(job)}' to waiting")
        return OK

    def _key_taken(self, job: Job) -> bool:
        return job.key is not None and not job.key_dropped and self.owner(job.queue, job.key) is not None

    def _revive(self, job: Job) -> None:
        if job.key is not None and not job.key_dropped:
            for other in self.jobs.values():
                if other.queue == job.queue and other.key == job.key:
                    other.owns_key = False
            job.owns_key = True
            job.key_until = None
        job.attempts = job.stalls = job.losses = job.releases = 0
        self._queue(job, self.now)

    def retry_completed(self, queue: str, id: str) -> Reply:
        job = self.jobs.get(id)
        if job is None or job.state != "completed" or job.queue != queue or self._key_taken(job):
            return {**OK, "count": 0}
        self._revive(job)
        return {**OK, "count": 1}

    def park(self, id: str, token: str | None) -> Reply:
        job = self.jobs.get(id)
        if job is None or job.state != "active":
            raise Refusal("Job is not active")
        self._check_token(job, token)
        open = [
            dep
            for dep in dict.fromkeys(job.options.get("dependsOn", ()))
            if dep in self.jobs and self.jobs[dep].state != "completed"
        ]
        self._give_back(job, job.run_at if open else self.now)
        if open:
            job.state = "blocked"
            job.parked = True
            job.open = open
        return {**OK, "data": {"moved": True}}

    def discard(self, id: str, token: str | None) -> Reply:
        job = self.jobs.get(id)
        if job is None or job.state not in LIVE:
            raise Refusal("Job not found")
        if job.state == "active":
            self._check_token(job, token)
            self._leave(job, "retired")
        job.state = "failed"
        job.finished_at = self.now
        job.owns_key = False
        return OK

    def pause(self, queue: str) -> Reply:
        self.paused.add(queue)
        return OK

    def resume(self, queue: str) -> Reply:
        self.paused.discard(queue)
        return OK

    def drain(self, queue: str) -> Reply:
        gone = [job.id for job in self.in_state("queued") if job.queue == queue]
        for id in gone:
            del self.jobs[id]
        return {**OK, "count": len(gone)}

    def obliterate(self, queue: str) -> Reply:
        self.jobs = {id: job for id, job in self.jobs.items() if job.queue != queue}
        self.proofs = {id: of for id, of in self.proofs.items() if of != queue}
        self.paused.discard(queue)
        return OK

    def clean(self, queue: str, state: str | None, grace: int, limit: int) -> list[str]:
        """What is removed, the oldest first; of one age in the order of admission."""
        names = {None: ("waiting", "prioritized", "delayed"), "wait": ("waiting",)}.get(state, (state,))

        def age(job: Job) -> tuple[int, int]:
            return (job.finished_at if job.state in ("completed", "failed") else job.created_at), job.seq

        if state in ("active", "waiting-children"):
            return []
        old = [
            job
            for job in self.jobs.values()
            if job.queue == queue and self.state(job) in names and age(job)[0] <= self.now - grace
        ]
        gone = [job.id for job in sorted(old, key=age)[: max(0, limit)]]
        for id in gone:
            del self.jobs[id]
        return gone
