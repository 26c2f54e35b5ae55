"""The order of claims (core 3.4, R08): what comes out of a queue is what a plain sort of its jobs says.

The sort stands here in one line; the broker has lines, heaps and lazily dropped entries for it. Both have to agree
after any mixture of pushes, moves, partial claims and restarts.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.claims import CLAIMS, PUSHES
from tests.model.rig import Peer, Rig, Store, examples, memory_store, sqlite_store

PRIORITIES = st.sampled_from((-1_000_000, -1, 0, 0, 0, 1, 5, 1_000_000))
DELAYS = st.sampled_from((0, 0, 0, 1, 40, 90))


@dataclass(slots=True)
class Queued:
    """What decides on the place of a job."""

    id: str
    seq: int
    run_at: int
    priority: int = 0
    lifo: bool = False


def in_order(jobs: dict[str, Queued], now: int) -> list[str]:
    """The ids of the jobs that may run, first the one that comes first."""

    def key(job: Queued) -> tuple[Any, ...]:
        return -job.priority, not job.lifo, -job.seq if job.lifo else 0, 0 if job.lifo else job.run_at, job.seq

    return [job.id for job in sorted(jobs.values(), key=key) if job.run_at <= now]


class Line:
    """One queue of a broker, and the same jobs in a plain dict."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.peer: Peer = rig.connect()
        self.jobs: dict[str, Queued] = {}
        self.seq = 0

    def send(self, cmd: str, **fields: Any) -> dict[str, Any]:
        reply = self.rig.ask(self.peer, cmd, **fields)
        assert reply["ok"], reply
        return reply

    def push(self, priority: int, lifo: bool, delay: int, age: int) -> None:
        """`age`: how long ago the client says that it made the job."""
        fields = {"timestamp": self.rig.now - age} if age else {}
        id = self.send("PUSH", queue="q", priority=priority, lifo=lifo, delay=delay, **fields)["id"]
        self.seq += 1
        self.jobs[id] = Queued(id, self.seq, self.rig.now - age + delay, priority, lifo)

    def change(self, what: str, number: int, value: int) -> None:
        """Move one of the jobs, if the command is for jobs like it."""
        if not self.jobs:
            return
        job = sorted(self.jobs.values(), key=lambda job: job.seq)[number % len(self.jobs)]
        now = self.rig.now
        if what == "priority":
            job.priority, job.lifo = value % 3, value % 2 == 1
            self.send("ChangePriority", id=job.id, priority=job.priority, lifo=job.lifo)
        elif what == "delay":
            job.run_at = now + value
            self.send("MoveToDelayed", id=job.id, delay=value)
        elif what == "promote" and job.run_at > now:
            job.run_at = now
            self.send("Promote", id=job.id)
        elif what == "cancel":
            del self.jobs[job.id]
            self.send("Cancel", id=job.id)

    def claim(self, count: int) -> list[str]:
        """Some jobs are delivered, in the order that the plain sort says."""
        wanted = in_order(self.jobs, self.rig.now)[:count]
        reply = self.send("PULLB", queue="q", count=count, owner="w", lockTtl=3_600_000)
        got = [job["id"] for job in reply["jobs"]]
        assert got == wanted
        return got

    def claim_and_return(self, count: int) -> None:
        """Some are delivered to a worker that goes away: each is back in its old place."""
        self.peer, staying = self.rig.connect(), self.peer
        self.claim(count)
        self.rig.drop(self.peer)
        self.peer = staying

    def restart(self) -> None:
        self.rig.restart()
        self.peer = self.rig.connect()

    def crash(self) -> None:
        """All of it is stored: nothing may be lost, or have moved."""
        self.rig.flush()
        self.rig.crash()
        self.peer = self.rig.connect()


pushes = st.tuples(PRIORITIES, st.booleans(), DELAYS, st.sampled_from((0, 0, 0, 30)))
steps = st.one_of(
    st.tuples(st.just("push"), pushes),
    st.tuples(st.just("push"), pushes),
    st.tuples(
        st.just("change"),
        st.tuples(st.sampled_from(("priority", "delay", "promote", "cancel")), st.integers(0, 99), st.integers(0, 60)),
    ),
    st.tuples(st.just("claim"), st.integers(1, 4)),
    st.tuples(st.just("wait"), st.integers(0, 60)),
    st.tuples(st.sampled_from(("return", "restart", "crash")), st.just(0)),
)


def run(line: Line, history: list[tuple[str, Any]]) -> None:
    returned = False
    for what, value in history:
        if what == "push":
            line.push(*value)
        elif what == "change":
            line.change(*value)
        elif what == "claim":
            for id in line.claim(value):
                del line.jobs[id]
        elif what == "wait":
            line.rig.advance(value)
        elif what == "restart":
            line.restart()
        elif what == "crash":
            line.crash()
        elif not returned:  # a second loss of the same job would make it wait (R91)
            returned = True
            line.claim_and_return(3)
    line.rig.advance(200)  # all that was delayed is due
    while line.jobs:
        for id in line.claim(3):
            del line.jobs[id]
    assert line.send("PULLB", queue="q", count=1)["jobs"] == []


@examples(400)
@given(st.lists(steps, max_size=40))
def test_jobs_are_claimed_in_the_order_of_a_plain_sort(history: list[tuple[str, Any]]) -> None:
    run(Line(Rig(store=memory_store())), history)


@examples(40)
@given(st.lists(steps, max_size=40))
def test_jobs_are_claimed_in_that_order_from_a_file_too(
    tmp_path_factory: pytest.TempPathFactory, history: list[tuple[str, Any]]
) -> None:
    rig = Rig(store=sqlite_store(tmp_path_factory.mktemp("order")))
    run(Line(rig), history)
    rig.close()


@pytest.mark.parametrize("between", ["nothing", "restart", "crash"])
def test_the_order_of_a_long_queue_is_the_same_after_a_restart(between: str, tmp_path: Path) -> None:
    """Long enough that lines and heaps are cleaned up on the way, which short histories never reach."""
    rig = Rig(store=sqlite_store(tmp_path))
    line = Line(rig)
    random = rig.random
    for _ in range(600):
        line.push(random.choice((0, 0, 3)), random.random() < 0.2, random.choice((0, 0, 5)), random.choice((0, 7)))
    for number in range(400):
        line.change(random.choice(("priority", "delay", "cancel", "promote")), random.randrange(10_000), number % 50)
    if between != "nothing":
        getattr(line, between)()
    rig.advance(60)

    while line.jobs:
        for id in line.claim(7):
            del line.jobs[id]
    rig.close()


@pytest.fixture(params=["memory", "sqlite"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return memory_store() if request.param == "memory" else sqlite_store(tmp_path)


def test_the_order_that_the_reference_server_has_shown(store: Store) -> None:
    """The pushes measured in core 3.4."""
    rig = Rig(store=store)
    peer = rig.connect()
    for name, fields in PUSHES:
        rig.ask(peer, "PUSH", queue="q", jobId=name, **fields)

    jobs = rig.ask(peer, "PULLB", queue="q", count=20)["jobs"]

    assert [job["id"] for job in jobs] == CLAIMS
    rig.close()


@pytest.mark.parametrize(
    ("cmd", "fields"),
    [
        ("MoveToWait", {}),
        ("MoveToDelayed", {"delay": 0}),
        ("FAIL", {}),
    ],
)
def test_a_job_that_is_put_back_by_will_goes_behind_those_that_wait(
    store: Store, cmd: str, fields: dict[str, Any]
) -> None:
    """Its time is now; only a lost delivery comes back to its old place."""
    rig = Rig(store=store)
    peer = rig.connect()
    first = rig.ask(peer, "PUSH", queue="q", backoff=0)["id"]
    rig.advance(1)
    second = rig.ask(peer, "PUSH", queue="q")["id"]
    rig.advance(1)
    assert rig.ask(peer, "PULL", queue="q")["job"]["id"] == first

    rig.ask(peer, cmd, id=first, **fields)

    assert [job["id"] for job in rig.ask(peer, "PULLB", queue="q", count=5)["jobs"]] == [second, first]
    rig.close()


def test_a_lost_job_is_back_in_its_old_place_after_a_restart_too(store: Store) -> None:
    rig = Rig(store=store)
    peer = rig.connect()
    first = rig.ask(peer, "PUSH", queue="q")["id"]
    second = rig.ask(peer, "PUSH", queue="q")["id"]
    rig.ask(peer, "PULL", queue="q", owner="w", lockTtl=1_000)
    rig.flush()  # the claim is stored
    rig.crash()
    rig.advance(1_000)  # its grace is over

    jobs = rig.ask(rig.connect(), "PULLB", queue="q", count=5)["jobs"]

    assert [job["id"] for job in jobs] == [first, second]
    rig.close()
