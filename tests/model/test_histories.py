"""Random histories of commands, deadlines, dropped connections, restarts and crashes, against a small model.

After each step every job is in the state that the model says, with the same attempts, lease and time to run; the counts
add up (R02), no token is given twice (R05), claims come in order (R08), and what was acknowledged survives a crash
(R03).
After each restart an index built anew from the store equals the one that has lived through it all (design I1).

GQUEUE_EXAMPLES=20 runs twenty times as many histories, and other ones each time.
"""

from __future__ import annotations

import copy
import pickle
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import msgpack
from hypothesis import note
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from gqueue.engine.engine import Engine, EngineSettings
from gqueue.engine.states import state_name
from gqueue.model import Job as RealJob
from gqueue.storage.base import job_row
from gqueue.wire import codec
from tests.model.model import OK, TTL_SWEEP, Claimed, Job, Model, Poll, Refusal, Reply
from tests.model.rig import Peer, Rig, examples, memory_store, sqlite_store

QUEUES = ("a", "b")
KEYS = ("k", "l")
CUSTOM = tuple("cdefgh")
MAX_LOST, MAX_RELEASES = 3, 2  # small, so that a short history reaches them
#: ms. No two sums of these fall on one instant, so that the order of deadlines is never a matter of chance.
LOCK_TTL, TIMEOUTS, STALLS, TTLS, DELAYS = (1_009, 7_013, 61_031), (1_511, 9_029), (2_003,), (0, 3_301), (1_703, 8_111)

queues = st.sampled_from(QUEUES)
peers = st.integers(0, 2)
picks = st.integers(0, 40)
flags = st.booleans()
rarely = st.sampled_from((False, False, False, True))
tokens = st.sampled_from(("own", "own", "own", "own", "none", "old", "wrong"))

backoffs = st.sampled_from(
    (0, 100, 2_000, {"type": "fixed", "delay": 500}, {"type": "exponential", "delay": 900, "maxDelay": 1_000})
)
#: What may be said of a new job; `dependsOn` comes from the jobs that there are.
members = st.fixed_dictionaries(
    {},
    optional={
        "jobId": st.sampled_from(CUSTOM),
        "uniqueKey": st.sampled_from(KEYS),
        "priority": st.sampled_from((-1, 0, 5, 9)),
        "lifo": flags,
        "delay": st.sampled_from(DELAYS),
        "maxAttempts": st.integers(1, 3),
        "backoff": backoffs,
    },
)
dedups = st.sampled_from(({"ttl": 2_503}, {"ttl": 2_503, "extend": True}, {"replace": True}, {"extend": True}))
rarer = st.fixed_dictionaries(
    {},
    optional={
        "ttl": st.sampled_from(TTLS),
        "timeout": st.sampled_from(TIMEOUTS),
        "stallTimeout": st.sampled_from(STALLS),
        "removeOnComplete": flags,
        "removeOnFail": flags,
        "dedup": dedups,
    },
)
polls = st.fixed_dictionaries(
    {"owner": st.sampled_from(("w", "w", "")), "detach": rarely},
    optional={"lockTtl": st.sampled_from(LOCK_TTL)},
)


class Histories(RuleBasedStateMachine):
    """The broker on a memory store that keeps its rows."""

    def __init__(self) -> None:
        super().__init__()
        self.rig = self.make_rig()
        self.model = Model(self.rig.now, MAX_LOST, MAX_RELEASES)
        self.peers: list[Peer] = [self.rig.connect() for _ in range(3)]
        self.waiting: dict[tuple[int, int], tuple[int, str, Any]] = {}  # (peer, request) -> step, command, reply
        self.acked = 0  # the last step that a client knows to be done
        self.tokens: dict[str, tuple[int, int]] = {}  # all that were ever given -> (seq, delivery)
        self.past: dict[int, bytes] = {}  # step -> the model after it, as far back as a crash may lead
        self.numbers = 0
        self.gone: list[str] = []  # ids of jobs that are no more
        self.remember()

    def make_rig(self) -> Rig:
        return Rig(store=memory_store(), settings=self.settings(), seed=1)

    def settings(self) -> EngineSettings:
        return EngineSettings(max_lost=MAX_LOST, max_job_releases=MAX_RELEASES)

    def teardown(self) -> None:
        self.rig.close()

    # ---------------------------------------------------------------- the step of a test

    def do(self, peer: int, cmd: str, expect: Any, **fields: Any) -> None:
        """Run a command, let the model do the same, and compare. `expect` gives the reply, or raises it."""
        note(f"{self.rig.now} {cmd} {fields}")
        number = self.rig.post(self.peers[peer], cmd, **fields)
        try:
            reply = expect()
        except Refusal as refusal:
            reply = refusal.reply
        self.waiting[peer, number] = (self.rig.step, cmd, reply)
        self.model.settle()
        self.check()

    def check(self) -> None:
        """Every job is as the model has it; then the replies that have come."""
        self.adopt()
        self.compare()
        self.remember()
        self.collect()

    def adopt(self) -> None:
        """Take over what only the broker can know: jitter, tokens, and when an expired job is swept."""
        index = self.rig.engine.index
        model = self.model
        for job in list(model.jobs.values()):
            real = index.get(job.id)
            if job.expires_at is not None and job.state == "queued" and model.now > job.expires_at:
                if real is None:
                    del model.jobs[job.id]
                    continue
                late = model.now - max(job.expires_at, job.queued_at)
                assert late <= TTL_SWEEP + 1, f"{job.id}: {late} ms after its ttl"
            if real is None:
                continue  # `compare` will tell
            if job.jitter is not None:
                low, high = job.jitter
                assert low <= real.run_at <= high, f"{job.id} runs again {real.run_at - model.now} ms from now"
                job.run_at = real.run_at
                job.jitter = None
            if job.state == "active" and job.leased and job.token is None and real.lease is not None:
                token = real.lease.token
                assert token not in self.tokens, f"token {token} was given before"
                self.tokens[token] = (job.seq, job.delivery)
                job.token = token

    def compare(self) -> None:
        engine = self.rig.engine
        now = self.rig.now
        real = {job.id: job for job in engine.index.jobs()}
        gone = self.model.jobs.keys() - real.keys() - self.archived()
        assert not gone, f"lost: {[self.model.jobs[id] for id in gone]}"
        more = real.keys() - self.model.jobs.keys()
        assert not more, f"too many: {[real[id] for id in more]}"
        for id, job in self.model.jobs.items():
            if id not in real:
                continue
            is_, should = seen(real[id], now), wanted(self.model, job)
            assert is_ == should, f"{id} is {is_}, should be {should}"
        for queue in QUEUES:
            counts = Counter(self.model.state(job) for job in self.model.jobs.values() if job.queue == queue)
            if queue in self.model.paused:
                counts["paused"] = counts.pop("waiting", 0) + counts.pop("prioritized", 0)
            told = engine.queries.counts(queue, now)
            assert {state: number for state, number in told.items() if number} == {
                state: number for state, number in counts.items() if number
            }, queue

    def archived(self) -> set[str]:
        """Jobs that need not be in memory."""
        return set()

    def remember(self) -> None:
        step = self.rig.step
        durable = self.rig.durable_step
        self.past = {at: model for at, model in self.past.items() if at >= durable}
        self.past[step] = pickle.dumps(self.model)

    def collect(self) -> None:
        """Compare the replies that have arrived with those that were expected."""
        for poll, claimed in self.model.answers:
            step, cmd, _ = self.waiting[poll.peer, poll.number]
            self.waiting[poll.peer, poll.number] = (step, cmd, claimed)
        self.model.answers.clear()
        durable = self.rig.durable_step
        for at, peer in enumerate(self.peers):
            for number, reply in list(peer.replies.items()):
                del peer.replies[number]
                step, cmd, expected = self.waiting.pop((at, number))
                if isinstance(expected, list):
                    self.check_delivery(cmd, reply, expected, durable)
                    continue
                assert reply == expected, cmd
                if reply["ok"] and cmd != "JobHeartbeat":  # which is kept in memory only (R113)
                    assert step <= durable, f"{cmd} was acknowledged before it was durable"
                    self.acked = max(self.acked, step)
        if self.rig.flight is None:
            missing = [(cmd, expected) for _, cmd, expected in self.waiting.values() if expected is not None]
            assert not missing, f"not answered: {missing}"

    def check_delivery(self, cmd: str, reply: Reply, expected: list[Claimed], durable: int) -> None:
        jobs = [reply["job"]] if cmd == "PULL" and reply["job"] is not None else reply.get("jobs") or []
        assert [job["id"] for job in jobs] == [claimed.id for claimed in expected]
        given = [reply["token"]] if "token" in reply else reply.get("tokens", [])
        for claimed, token in zip(expected, given, strict=False):
            assert self.tokens[token] == (claimed.seq, claimed.delivery)
        assert all(claimed.born <= durable for claimed in expected), "a job was shown before it was durable"

    # ---------------------------------------------------------------- choices

    def pick(self, number: int, *states: str) -> str:
        """The id of a job in one of these states; now and then of any other, or of none."""
        if number % 8 == 7:
            return (sorted(self.model.jobs) + self.gone[-5:] + ["nobody"])[number % (len(self.model.jobs) + 1)]
        jobs = self.model.in_state(*states)
        return jobs[number % len(jobs)].id if jobs else "nobody"

    def token(self, id: str, which: str) -> str | None:
        job = self.model.jobs.get(id)
        if which == "none" or job is None:
            return None
        if which == "wrong":
            return "wrong"
        old = [job.lost] * bool(job.lost) + job.timed_out[-1:] + job.retired[-1:]
        return old[0] if old and (which == "old" or job.state != "active") else job.token

    def fields(
        self, member: dict[str, Any], more: dict[str, Any], depends: list[int], batch: list[str]
    ) -> dict[str, Any]:
        self.numbers += 1
        fields = {**member, **more, "data": {"n": self.numbers}}
        if depends:
            known = sorted(self.model.jobs) + sorted(self.model.proofs) + batch
            fields["dependsOn"] = [
                known[number % len(known)] if number < 38 else "nobody" for number in depends if known
            ]
        return fields

    # ---------------------------------------------------------------- rules: jobs come

    @initialize(first=st.lists(members, min_size=2, max_size=4), queue=queues)
    def begin(self, first: list[dict[str, Any]], queue: str) -> None:
        self.push_all(0, queue, [self.fields(member, {}, [], []) for member in first])

    @rule(
        peer=peers,
        queue=queues,
        member=members,
        more=st.one_of(st.just({}), rarer),
        depends=st.lists(picks, max_size=2),
    )
    def push(self, peer: int, queue: str, member: dict[str, Any], more: dict[str, Any], depends: list[int]) -> None:
        fields = self.fields(member, more, depends[:1] if len(depends) == 1 else [], [])

        def expect() -> Reply:
            before = set(self.model.jobs)
            seq = self.model.seq
            ids = self.model.push(queue, [copy.deepcopy(fields)], list(self.rig.given), self.rig.step, batch=False)
            self.bury(before)
            return {**OK, "id": ids[0]} if self.model.seq > seq else {**OK, "id": ids[0], "duplicate": True}

        self.do(peer, "PUSH", expect, queue=queue, **fields)

    @rule(peer=peers, queue=queues, key=st.sampled_from(KEYS), dedup=dedups)
    def push_again(self, peer: int, queue: str, key: str, dedup: dict[str, Any]) -> None:
        """Among all the options of a push it is rare that a key meets its owner."""
        self.push(peer, queue, {"uniqueKey": key}, {"dedup": dedup}, [])

    @rule(
        peer=peers,
        queue=queues,
        several=st.lists(st.tuples(members, st.one_of(st.just({}), rarer), st.lists(picks, max_size=2)), max_size=4),
    )
    def push_batch(
        self, peer: int, queue: str, several: list[tuple[dict[str, Any], dict[str, Any], list[int]]]
    ) -> None:
        customs = [member["jobId"] for member, _, _ in several if "jobId" in member]
        self.push_all(peer, queue, [self.fields(*one, customs) for one in several])

    def push_all(self, peer: int, queue: str, batch: list[dict[str, Any]]) -> None:
        def expect() -> Reply:
            before = set(self.model.jobs)
            ids = self.model.push(queue, copy.deepcopy(batch), list(self.rig.given), self.rig.step, batch=True)
            self.bury(before)
            return {**OK, "ids": ids}

        self.do(peer, "PUSHB", expect, queue=queue, jobs=batch)

    def bury(self, before: set[str]) -> None:
        self.gone += sorted(before - self.model.jobs.keys())

    # ---------------------------------------------------------------- rules: jobs are delivered

    @rule(
        peer=peers,
        queue=queues,
        poll=polls,
        count=st.sampled_from((None, None, 1, 3)),
        timeout=st.sampled_from((0, 0, 4_001)),
    )
    def pull_any(self, peer: int, queue: str, poll: dict[str, Any], count: int | None, timeout: int) -> None:
        self.pull(peer, queue, poll, count, timeout)

    def pull(self, peer: int, queue: str, poll: dict[str, Any], count: int | None, timeout: int) -> None:
        ttl = poll.get("lockTtl", 30_000)
        wanted = Poll(peer, 0, queue, count, bool(poll["owner"]), ttl, "lockTtl" in poll, poll["detach"])

        def expect() -> list[Claimed] | None:
            # the request's number is known only now; the model has to name it when the poll is answered
            wanted.number = self.number
            return self.model.pull(wanted, timeout)

        if count is None:
            self.do_pull(peer, "PULL", expect, queue=queue, timeout=timeout, **poll)
        else:
            self.do_pull(peer, "PULLB", expect, queue=queue, timeout=timeout, count=count, **poll)

    def do_pull(self, peer: int, cmd: str, expect: Any, **fields: Any) -> None:
        note(f"{self.rig.now} {cmd} {fields}")
        self.number = self.rig.post(self.peers[peer], cmd, **fields)
        self.waiting[peer, self.number] = (self.rig.step, cmd, expect())
        self.model.settle()
        self.check()

    # ---------------------------------------------------------------- rules: deliveries end

    @rule(queue=queues)
    def pull_three(self, queue: str) -> None:
        """The plainest pull, a second time among the rules: without active jobs most others have nothing to do."""
        self.pull(0, queue, {"owner": "w", "detach": False}, 3, 0)

    @rule(peer=peers, number=picks, token=tokens, remove=rarely)
    def ack(self, peer: int, number: int, token: str, remove: bool) -> None:
        id = self.pick(number, "active")
        given = self.token(id, token)
        fields = {"token": given} if given is not None else {}
        self.do(peer, "ACK", lambda: self.model.ack(id, given, remove=remove), id=id, removeOnComplete=remove, **fields)

    @rule(peer=peers, number=picks, token=tokens)
    def late_ack(self, peer: int, number: int, token: str) -> None:
        """By a worker whose delivery is over: mostly of a job that waits for its next one."""
        id = self.pick(number, "queued")
        given = self.token(id, "old" if token == "own" else token)
        fields = {"token": given} if given is not None else {}
        self.do(peer, "ACK", lambda: self.model.ack(id, given, remove=False), id=id, **fields)

    @rule(peer=peers, numbers=st.lists(picks, min_size=1, max_size=3), token=tokens)
    def ack_batch(self, peer: int, numbers: list[int], token: str) -> None:
        ids = [self.pick(number, "active") for number in numbers]
        given = [self.token(id, token) for id in ids]
        self.do(peer, "ACKB", lambda: self.model.ack_all(ids, given), ids=ids, tokens=given)

    @rule(peer=peers, number=picks, token=tokens, unrecoverable=rarely)
    def fail(self, peer: int, number: int, token: str, unrecoverable: bool) -> None:
        id = self.pick(number, "active")
        given = self.token(id, token)
        self.do(
            peer,
            "FAIL",
            lambda: self.model.fail(id, given, unrecoverable=unrecoverable),
            id=id,
            token=given,
            error="boom",
            unrecoverable=unrecoverable,
        )

    @rule(peer=peers, number=picks, token=tokens, duration=st.sampled_from((None, 503)))
    def extend(self, peer: int, number: int, token: str, duration: int | None) -> None:
        id = self.pick(number, "active")
        given = self.token(id, token)
        self.do(
            peer,
            "ExtendLock",
            lambda: self.model.extend(id, given, duration),
            id=id,
            token=given,
            duration=duration,
        )

    @rule(peer=peers, number=picks, token=tokens)
    def beat(self, peer: int, number: int, token: str) -> None:
        id = self.pick(number, "active")
        given = self.token(id, token)
        self.do(peer, "JobHeartbeat", lambda: self.model.beat(id, given), id=id, token=given)

    # ---------------------------------------------------------------- rules: control

    @rule(peer=peers, number=picks)
    def cancel(self, peer: int, number: int) -> None:
        id = self.pick(number, "queued", "blocked")
        self.gone.append(id)
        self.do(peer, "Cancel", lambda: self.model.cancel(id), id=id)

    @rule(peer=peers, number=picks)
    def promote(self, peer: int, number: int) -> None:
        id = self.pick(number, "queued")
        self.do(peer, "Promote", lambda: self.model.promote(id), id=id)

    @rule(peer=peers, number=picks, delay=st.sampled_from((0, 600, 5_501)), token=tokens)
    def move_to_delayed(self, peer: int, number: int, delay: int, token: str) -> None:
        id = self.pick(number, "queued", "active")
        given = self.token(id, token)
        self.do(
            peer,
            "MoveToDelayed",
            lambda: self.model.move_to_delayed(id, delay, given),
            id=id,
            delay=delay,
            token=given,
        )

    @rule(peer=peers, number=picks, token=tokens)
    def move_to_wait(self, peer: int, number: int, token: str) -> None:
        id = self.pick(number, "failed", "active", "queued")
        given = self.token(id, token)
        self.do(peer, "MoveToWait", lambda: self.model.move_to_wait(id, given), id=id, token=given)

    @rule(peer=peers, number=picks, token=tokens)
    def move_to_waiting_children(self, peer: int, number: int, token: str) -> None:
        id = self.pick(number, "active")
        given = self.token(id, token)
        self.do(peer, "MoveToWaitingChildren", lambda: self.model.park(id, given), id=id, token=given)

    @rule(peer=peers, number=picks, token=tokens)
    def discard(self, peer: int, number: int, token: str) -> None:
        id = self.pick(number, "queued", "blocked", "active")
        given = self.token(id, token)
        self.do(peer, "Discard", lambda: self.model.discard(id, given), id=id, token=given)

    @rule(peer=peers, number=picks, queue=queues)
    def retry_completed(self, peer: int, number: int, queue: str) -> None:
        id = self.pick(number, "completed")
        self.do(peer, "RetryCompleted", lambda: self.model.retry_completed(queue, id), queue=queue, id=id)

    @rule(peer=peers, number=picks, priority=st.sampled_from((-1, 0, 5, 9)), lifo=st.sampled_from((None, True, False)))
    def change_priority(self, peer: int, number: int, priority: int, lifo: bool | None) -> None:
        id = self.pick(number, "queued")
        self.do(
            peer,
            "ChangePriority",
            lambda: self.model.change_priority(id, priority, lifo),
            id=id,
            priority=priority,
            lifo=lifo,
        )

    @rule(peer=peers, queue=queues, paused=rarely)
    def pause_or_resume(self, peer: int, queue: str, paused: bool) -> None:
        if paused:
            self.do(peer, "Pause", lambda: self.model.pause(queue), queue=queue)
        else:
            self.do(peer, "Resume", lambda: self.model.resume(queue), queue=queue)

    @precondition(lambda self: len(self.model.jobs) > 4)
    @rule(peer=peers, queue=queues)
    def drain(self, peer: int, queue: str) -> None:
        self.do(peer, "Drain", lambda: self.model.drain(queue), queue=queue)

    @precondition(lambda self: len(self.model.jobs) > 6)
    @rule(peer=peers, queue=queues, sure=rarely)
    def obliterate(self, peer: int, queue: str, sure: bool) -> None:
        if sure:
            self.do(peer, "Obliterate", lambda: self.model.obliterate(queue), queue=queue)

    @rule(
        peer=peers,
        queue=queues,
        state=st.sampled_from((None, "wait", "prioritized", "delayed", "completed", "failed", "active")),
        grace=st.sampled_from((0, 0, 3_000)),
        limit=st.sampled_from((1, 2, 1000)),
    )
    def clean(self, peer: int, queue: str, state: str | None, grace: int, limit: int) -> None:
        def expect() -> Reply:
            gone = self.model.clean(queue, state, grace, limit)
            return {**OK, "count": len(gone), "ids": gone}

        self.do(peer, "Clean", expect, queue=queue, state=state, grace=grace, limit=limit)

    # ---------------------------------------------------------------- rules: time, connections, the store

    @rule(ms=st.one_of(st.integers(0, 50), st.integers(51, 3_000), st.integers(3_001, 70_000)))
    def time_passes(self, ms: int) -> None:
        self.wait(ms)

    def wait(self, ms: int) -> None:
        """Let time pass, with every deadline on its millisecond."""
        note(f"{self.rig.now} wait {ms}")
        until = self.rig.now + ms
        while (due := self.rig.engine.timers.next) <= until:
            self.rig.now = max(self.rig.now, due)
            self.rig.tick()
            self.model.advance(self.rig.now)
            self.check()
        self.rig.now = until
        self.model.advance(until)
        self.check()

    @rule(peer=peers)
    def drop(self, peer: int) -> None:
        """A worker is gone; another takes its place."""
        note(f"{self.rig.now} drop {peer}")
        self.rig.drop(self.peers[peer])
        self.peers[peer] = self.rig.connect()
        self.waiting = {key: value for key, value in self.waiting.items() if key[0] != peer}
        self.model.drop(peer)
        self.model.settle()
        self.check()

    @rule()
    def slow_store(self) -> None:
        """From now on a batch stays in flight until it lands."""
        note("the store is busy")
        self.rig.busy = True

    @precondition(lambda self: self.rig.busy)
    @rule()
    def land(self) -> None:
        note("a batch lands")
        self.rig.land()
        self.check()

    @precondition(lambda self: self.rig.busy)
    @rule()
    def fast_store(self) -> None:
        note("the store is fast")
        self.rig.flush()
        self.check()

    @rule()
    def restart(self) -> None:
        note("restart")
        for poll in self.model.polls:  # a broker that stops answers them empty (R111)
            self.model.answers.append((poll, []))
        peers = self.peers
        self.rig.restart()
        self.peers = peers
        self.collect()
        self.come_back()

    @rule(landed=flags)
    def crash(self, landed: bool) -> None:
        note(f"crash, landed={landed}")
        known = self.rig.crash(landed=landed)
        assert known >= self.acked, "an acknowledged change is lost"
        if known != self.rig.step:
            self.model = pickle.loads(self.past[known])  # noqa: S301 - our own
        self.come_back()

    def come_back(self) -> None:
        self.model.now = self.rig.now
        self.model.restarted()
        self.waiting.clear()
        self.past.clear()
        self.peers = [self.rig.connect() for _ in range(3)]
        self.wait(0)  # what expired meanwhile is due at once
        self.same_picture()

    def same_picture(self) -> None:
        """Design I1: the index follows from the records."""
        built = self.rig.rebuilt()
        assert self.picture(built) == self.picture(self.rig.engine)
        stored = {job.id: record(job) for job in built.index.jobs()}
        for job in self.rig.engine.index.jobs():
            if job.id not in self.archived():
                assert stored[job.id] == record(job)

    def picture(self, engine: Engine) -> dict[str, Any]:
        return engine.index.picture(self.rig.now)

    @invariant()
    def store_is_enough(self) -> None:
        """I1 also without a restart, whenever nothing is on its way."""
        if self.rig.flight is None and not self.rig.journal.dirty and self.rig.step % 5 == 0:
            busy = self.rig.busy
            self.same_picture()
            self.rig.busy = busy


def seen(job: RealJob, now: int) -> tuple[Any, ...]:
    """What the broker says of a job."""
    lease = job.lease
    return (
        job.queue,
        state_name(job, now),
        job.attempts,
        job.priority,
        job.run_at,
        job.delivery,
        None if lease is None else (lease.token, lease.expires_at),
        codec.unpack(job.data),
    )


def record(job: RealJob) -> dict[str, Any]:
    """All that a store keeps of a job, without what a new broker sets anew for the deliveries it takes over (R113)."""
    row = job_row(job, data=True)._replace(started_at=None)
    rest = msgpack.unpackb(row.rest) if row.rest else {}
    return {
        **row._asdict(),
        "rest": {key: value for key, value in rest.items() if key not in ("heartbeat_at", "lease")},
    }


def wanted(model: Model, job: Job) -> tuple[Any, ...]:
    return (
        job.queue,
        model.state(job),
        job.attempts,
        job.priority,
        job.run_at,
        job.delivery,
        (job.token, job.lease_end) if job.state == "active" and job.leased else None,
        job.data,
    )


class HistoriesInAFile(Histories):
    """The same on SQLite."""

    def make_rig(self) -> Rig:
        self.folder = tempfile.TemporaryDirectory(prefix="gqueue-model-")
        return Rig(store=sqlite_store(Path(self.folder.name)), settings=self.settings(), seed=2)

    def teardown(self) -> None:
        super().teardown()
        self.folder.cleanup()


class HistoriesWithAnArchive(HistoriesInAFile):
    """The same with room for two completed jobs in memory: the others come back when a command needs them."""

    def settings(self) -> EngineSettings:
        return EngineSettings(max_lost=MAX_LOST, max_job_releases=MAX_RELEASES, max_completed_jobs=2)

    def archived(self) -> set[str]:
        return {job.id for job in self.model.in_state("completed")}

    def picture(self, engine: Engine) -> dict[str, Any]:
        """Which of the completed jobs are in memory depends on who was asked for; how many there are does not."""
        picture = super().picture(engine)
        for queue in picture["queues"].values():
            del queue["completed"]
        return picture


TestHistories = Histories.TestCase
TestHistories.settings = examples(300)
TestHistoriesInAFile = HistoriesInAFile.TestCase
TestHistoriesInAFile.settings = examples(40)
TestHistoriesWithAnArchive = HistoriesWithAnArchive.TestCase
TestHistoriesWithAnArchive.settings = examples(100)
