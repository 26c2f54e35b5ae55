"""The eight rules of the concurrency contract (core 16), from many connections at once.

Rule 6, storage that refuses, is proved in test_storage_faults.py.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from tests.server.scenes import HOUR, e1, heard, lease, needs, settled


def together(actions: Iterable[Callable[[], Any]]) -> list[Any]:
    """Run every action in a thread of its own, all starting in the same moment; their results in order."""
    actions = list(actions)
    barrier = threading.Barrier(len(actions))

    def run(action: Callable[[], Any]) -> Any:
        barrier.wait(10)
        return action()

    with ThreadPoolExecutor(len(actions)) as pool:
        return [future.result(60) for future in [pool.submit(run, action) for action in actions]]


@pytest.fixture
def conns(broker: Any) -> Iterable[list[Any]]:
    """Eight connections beside the test's own."""
    opened = [broker.connect() for _ in range(8)]
    yield opened
    for conn in opened:
        conn.close()


# ---------------------------------------------------------------- 1: one winner per delivery


def test_one_of_many_acks_of_a_delivery_wins(wire: Any, conns: list[Any], queue: str) -> None:
    """Rule 1."""
    for round in range(20):
        id = wire.push(queue)
        assert wire.pull(queue)["id"] == id
        replies = together(
            [lambda conn=conn, n=n, id=id: (n, conn.send("ACK", id=id, result=n)) for n, conn in enumerate(conns)]
        )
        winners = [n for n, reply in replies if reply["ok"]]
        assert len(winners) == 1, (round, replies)
        assert all(reply == {"ok": False, "error": e1(id)} for n, reply in replies if n not in winners)
        assert wire.send("GetResult", id=id)["result"] == winners[0]


def test_a_delivery_ends_in_exactly_one_of_the_ways_that_race_for_it(wire: Any, conns: list[Any], queue: str) -> None:
    """Rule 1: the state after the race is the winner's, and losers are answered as of that state."""
    ways: tuple[tuple[str, dict[str, Any], str], ...] = (
        ("ACK", {}, "completed"),
        ("FAIL", {"error": "x", "unrecoverable": True}, "failed"),
        ("Discard", {}, "failed"),
        ("ACK", {}, "completed"),
        ("FAIL", {"error": "y", "unrecoverable": True}, "failed"),
        ("MoveToDelayed", {"delay": HOUR}, "delayed"),
        ("ChangeDelay", {"delay": HOUR}, "delayed"),
    )
    for _ in range(15):
        id = wire.push(queue)
        _, token = lease(wire, queue, lockTtl=HOUR)
        replies = together(
            [
                lambda conn=conn, way=way, id=id, token=token: (
                    way,
                    conn.send(way[0], id=id, token=token, **way[1]),
                )
                for conn, way in zip(conns, ways, strict=False)
            ]
        )
        # A job that was moved to delayed may still be moved or discarded by those who come later.
        finishers = [way[2] for way, reply in replies if reply["ok"] and way[0] in ("ACK", "FAIL")]
        discards = [way[2] for way, reply in replies if reply["ok"] and way[0] == "Discard"]
        moves = [way[2] for way, reply in replies if reply["ok"] and way[2] == "delayed"]
        assert len(finishers) + len(discards) <= 1, replies
        expected = (finishers + discards + moves)[0]
        assert wire.state(id) == expected, replies
        wire.send("Cancel", id=id)
    settled(wire, queue)


def test_a_timeout_and_an_ack_in_the_same_moment_have_one_winner(wire: Any, conns: list[Any], queue: str) -> None:
    """Rule 1: either the job completes without a failed attempt, or the ACK is the no-op of a delivery that is over."""
    jobs = []
    for conn in conns:
        wire.push(queue, None, timeout=80, maxAttempts=1)
        job, token = lease(conn, queue, lockTtl=HOUR)
        jobs.append((job["id"], token))
    rng = random.Random(16)
    waits = [0.08 + rng.uniform(-0.006, 0.006) for _ in conns]

    def finish(conn: Any, id: str, token: str, wait: float) -> Any:
        threading.Event().wait(wait)
        return conn.send("ACK", id=id, token=token)

    replies = together([lambda c=c, j=j, w=w: finish(c, *j, w) for c, j, w in zip(conns, jobs, waits, strict=True)])
    for (id, _), reply in zip(jobs, replies, strict=True):
        job = wire.job(id)
        assert reply["ok"], reply
        expected = ("completed", 0) if "data" not in reply else ("failed", 1)
        assert (job["state"], job["attempts"]) == expected, reply


def test_a_job_of_a_closing_connection_is_finished_or_released_never_both(broker: Any, wire: Any, queue: str) -> None:
    """Rule 1: the ACK written right before the connection breaks counts wholly or not at all."""
    for n in range(20):
        id = wire.push(queue, None, backoff=0)
        conn = broker.connect()
        _, token = lease(conn, queue)
        conn.start("ACK", id=id, token=token, result=n)
        conn.abort() if n % 2 else conn.close()
        again = wire.pull(queue, timeout=300)
        job = wire.job(id)
        if again is None:
            assert (job["state"], job["returnvalue"]) == ("completed", n)
        else:
            assert again["id"] == id
            assert job["state"] == "active"
            assert "returnvalue" not in job
            assert wire.send("ACK", id=id) == {"ok": True}


# ---------------------------------------------------------------- 2: claims are indivisible


def test_no_job_is_in_two_places_or_in_none_while_many_claim(wire: Any, conns: list[Any], queue: str) -> None:
    """Rule 2: each job is delivered once, and every count taken meanwhile adds up to all jobs."""
    total = 600
    ids = wire.send("PUSHB", queue=queue, jobs=[{"name": "j", "data": n} for n in range(total)])["ids"]
    done = threading.Event()

    def watch() -> int:
        looks = 0
        while not done.is_set():
            counts = wire.counts(queue)
            assert sum(counts.values()) == total, counts
            looks += 1
        return looks

    def drain(conn: Any, batch: int) -> list[str]:
        got: list[str] = []
        while True:
            if batch == 1:
                job = conn.pull(queue)
                jobs = [job] if job else []
            else:
                jobs = conn.send("PULLB", queue=queue, count=batch)["jobs"]
            if not jobs:
                return got
            got += [job["id"] for job in jobs]
            if len(got) % 3 == 0:
                assert conn.send("ACK", id=jobs[0]["id"])["ok"]

    with ThreadPoolExecutor(1) as pool:
        watcher: Future[int] = pool.submit(watch)
        try:
            delivered = together([lambda c=c, n=n: drain(c, 1 + n % 3) for n, c in enumerate(conns)])
        finally:
            done.set()
        assert watcher.result(10) > 0
    assert sorted(id for part in delivered for id in part) == sorted(ids)
    settled(wire, queue)


# ---------------------------------------------------------------- 3: no wake-up is lost


def test_every_parked_pull_is_woken_by_a_push_that_races_with_its_parking(
    broker: Any, wire: Any, conns: list[Any], queue: str
) -> None:
    """Rule 3: consumers park for up to 20 s; none may sleep while a job waits."""
    per_consumer = 25

    def consume(conn: Any) -> list[str]:
        got = []
        for _ in range(per_consumer):
            job = conn.pull(queue, timeout=20_000)
            assert job is not None
            got.append(job["id"])
            assert conn.send("ACK", id=job["id"])["ok"]
        return got

    def produce(seed: int) -> list[str]:
        rng = random.Random(seed)
        with broker.connect() as conn:
            made: list[str] = []
            while len(made) < per_consumer * 3:
                if rng.random() < 0.5:
                    made.append(conn.push(queue))
                else:
                    n = min(rng.randint(1, 4), per_consumer * 3 - len(made))
                    made += conn.send("PUSHB", queue=queue, jobs=[{"name": "j", "data": 0}] * n)["ids"]
            return made

    consumers = [lambda c=c: consume(c) for c in conns[:6]]
    results = together([*consumers, lambda: produce(1), lambda: produce(2)])
    consumed = [id for part in results[:6] for id in part]
    produced = [id for part in results[6:] for id in part]
    assert sorted(consumed) == sorted(produced)


@pytest.mark.parametrize(
    ("hinder", "wake"),
    [
        pytest.param([], [("Promote", {"id": "$delayed"})], id="promote"),
        pytest.param([("PUSH", {"data": 0, "delay": HOUR})], [("PromoteJobs", {})], id="promote-all"),
        pytest.param([], [("ChangeDelay", {"id": "$delayed", "delay": 0})], id="shortened-delay"),
        pytest.param([], [("ChangeDelay", {"id": "$delayed", "delay": 50})], id="shortened-delay-matures"),
        pytest.param([], [("MoveToWait", {"id": "$delayed"})], id="move-delayed-to-wait"),
        pytest.param([], [("MoveToWait", {"id": "$active"})], id="move-active-to-wait"),
        pytest.param([], [("MoveToWait", {"id": "$failed"})], id="dead-letter-retry"),
        pytest.param([], [("MoveToDelayed", {"id": "$active", "delay": 50})], id="moved-delay-matures"),
        pytest.param([], [("FAIL", {"id": "$active", "error": "x"})], id="retry"),
        pytest.param([], [("RetryCompleted", {"id": "$completed"})], id="retry-completed"),
        pytest.param([], [("ACK", {"id": "$blocker"})], id="dependency"),
        pytest.param(["Pause"], [("PUSH", {"data": 1}), ("Resume", {})], id="resume"),
        pytest.param(
            [("SetConcurrency", {"limit": 1})], [("PUSH", {"data": 1}), ("ACK", {"id": "$active"})], id="slot"
        ),
        pytest.param(
            [("SetConcurrency", {"limit": 1})],
            [("PUSH", {"data": 1}), ("SetConcurrency", {"limit": 2})],
            id="raised-concurrency",
        ),
        pytest.param(
            [("SetConcurrency", {"limit": 1})], [("PUSH", {"data": 1}), ("ClearConcurrency", {})], id="no-concurrency"
        ),
        pytest.param(
            [("RateLimit", {"limit": 1, "duration": HOUR}), ("PUSH", {"data": 0}), ("PULL", {})],
            [("PUSH", {"data": 1}), ("RateLimitClear", {})],
            id="no-rate-limit",
        ),
        pytest.param(
            [("RateLimit", {"limit": 1, "duration": 500}), ("PUSH", {"data": 0}), ("PULL", {})],
            [("PUSH", {"data": 1})],
            id="rate-window",
        ),
        pytest.param(
            [("RateLimit", {"limit": 1, "duration": HOUR, "ttl": 500}), ("PUSH", {"data": 0}), ("PULL", {})],
            [("PUSH", {"data": 1})],
            id="rate-ttl",
        ),
        pytest.param(
            [("PauseGroup", {"groupId": "g"})],
            [("PUSH", {"data": 1, "groupId": "g"}), ("ResumeGroup", {"groupId": "g"})],
            id="resume-group",
        ),
        pytest.param(
            [("RateLimitGroup", {"groupId": "g", "duration": 400})],
            [("PUSH", {"data": 1, "groupId": "g"})],
            id="group-deadline",
        ),
    ],
)
def test_a_parked_pull_is_woken_by(
    broker: Any, wire: Any, queue: str, hinder: list[Any], wake: list[tuple[str, dict[str, Any]]]
) -> None:
    """Rule 3, with every cause of core 4.4-5; the pull could wait 60 s and is answered in a small part of that."""
    for step in (*hinder, *wake):
        needs(step if isinstance(step, str) else step[0])
    made: dict[str, str] = {}
    needed = {value for _, fields in wake for value in fields.values() if isinstance(value, str) and value[0] == "$"}
    if any(isinstance(step, tuple) and step[0] == "SetConcurrency" for step in hinder):
        needed.add("$active")
    for name in needed:
        if name == "$delayed":
            made[name] = wire.push(queue, None, delay=HOUR)
        elif name == "$blocker":
            made[name] = wire.push(f"{queue}.other")
            wire.pull(f"{queue}.other")
            wire.push(queue, None, dependsOn=[made[name]])
        else:
            made[name] = wire.push(queue, None, backoff=1)
            wire.pull(queue)
            if name == "$failed":
                wire.send("FAIL", id=made[name], unrecoverable=True)
            elif name == "$completed":
                wire.send("ACK", id=made[name])
    for step in hinder:
        cmd, fields = (step, {}) if isinstance(step, str) else step
        assert wire.send(cmd, queue=queue, **fields)["ok"], step

    with broker.connect() as other:
        parked = other.start("PULL", queue=queue, timeout=60_000)
        assert other.send("Ping")["ok"]
        for cmd, fields in wake:
            fields = {
                name: made.get(value, value) if isinstance(value, str) else value for name, value in fields.items()
            }
            assert wire.send(cmd, **({} if "id" in fields and cmd != "RetryCompleted" else {"queue": queue}), **fields)[
                "ok"
            ]
        assert parked.result(10)["job"] is not None


@pytest.mark.parametrize("lost_by", ["lease", "stall", "close"])
def test_a_parked_pull_is_woken_by_a_lost_delivery(broker: Any, wire: Any, queue: str, lost_by: str) -> None:
    """Rule 3: lease end, confirmed stall and a closed connection, each without anything else happening."""
    wire.send(
        "SetStallConfig", queue=queue, config={"stallInterval": 100 if lost_by == "stall" else HOUR, "gracePeriod": 0}
    )
    id = wire.push(queue, None, backoff=1)
    holder = broker.connect()
    options = {"owner": "w", "lockTtl": 200} if lost_by == "lease" else {}
    assert holder.pull(queue, **options)["id"] == id
    parked = wire.start("PULL", queue=queue, timeout=60_000)
    if lost_by == "close":
        assert wire.send("Ping")["ok"]
        holder.close()
    assert parked.result(10)["job"]["id"] == id


# ---------------------------------------------------------------- 4: first come, first served


def test_parked_pulls_are_served_in_the_order_they_came(broker: Any, wire: Any, conns: list[Any], queue: str) -> None:
    """Rule 4: three rounds over eight connections, and one PULLB in the line."""
    parked = []
    for round in range(3):
        for n, conn in enumerate(conns):
            if (round, n) == (1, 3):
                parked.append(conn.start("PULLB", queue=queue, count=1, timeout=30_000))
            else:
                parked.append(conn.start("PULL", queue=queue, timeout=30_000))
            assert conn.send("Ping")["ok"]
    ids = wire.send("PUSHB", queue=queue, jobs=[{"name": "j", "data": n} for n in range(10)])["ids"]
    ids += [wire.push(queue) for _ in range(len(parked) - 10)]
    got = []
    for pull in parked:
        reply = pull.result(5)
        got.append((reply["jobs"][0] if "jobs" in reply else reply["job"])["id"])
    assert got == ids


def test_a_later_pull_never_overtakes_a_parked_one(broker: Any, wire: Any, conns: list[Any], queue: str) -> None:
    """Rule 4: pulls without waiting hammer the queue, yet each job goes to the pull that was parked for it."""
    done = threading.Event()

    def hammer(conn: Any) -> list[str]:
        stolen = []
        while not done.is_set():
            job = conn.pull(queue)
            if job:
                stolen.append(job["id"])
        return stolen

    with ThreadPoolExecutor(3) as pool:
        line = [conn.start("PULL", queue=queue, timeout=30_000) for conn in conns for _ in range(5)]
        for conn in conns:
            assert conn.send("Ping")["ok"]
        thieves = [broker.connect() for _ in range(3)]
        hammers = [pool.submit(hammer, thief) for thief in thieves]
        try:
            ids = [wire.push(queue) for _ in line]
            got = [pull.result(10)["job"]["id"] for pull in line]
        finally:
            done.set()
        assert [future.result(10) for future in hammers] == [[], [], []]
    assert sorted(got) == sorted(ids)


def test_a_parked_pull_whose_connection_closes_takes_no_job_with_it(broker: Any, wire: Any, queue: str) -> None:
    """Rules 2 and 4, core 1.5: twenty dead waiters in front of a living one."""
    for _ in range(20):
        dead = broker.connect()
        dead.start("PULL", queue=queue, timeout=30_000)
        assert dead.send("Ping")["ok"]
        dead.abort()
    living = broker.connect()
    pull = living.start("PULL", queue=queue, timeout=30_000)
    assert living.send("Ping")["ok"]
    id = wire.push(queue)
    assert pull.result(5)["job"]["id"] == id
    assert wire.counts(queue)["active"] == 1


# ---------------------------------------------------------------- 5: validation before mutation


def test_a_refused_batch_is_never_seen_even_in_part(broker: Any, wire: Any, conns: list[Any], queue: str) -> None:
    """Rule 5: while eight connections send batches whose last member is refused, no look sees any of it."""
    needs("GetGroupJobsCount")
    good = {"name": "j", "data": 1, "groupId": "g"}
    refused: list[dict[str, Any]] = [
        {"name": "j", "data": 1, "priority": -1, "groupId": "g"},
        {"name": "", "data": 1},
        {"name": "j", "dependsOn": ["nobody"]},
        {"name": "j", "groupId": "g", "groupMaxSize": 1},
    ]
    done = threading.Event()

    def watch() -> None:
        while not done.is_set():
            assert set(wire.counts(queue).values()) == {0}
            assert wire.send("GetGroupJobsCount", queue=queue, groupId="g")["data"]["count"] == 0
            assert wire.send("GetDeduplicationJobId", queue=queue, deduplicationId="k")["data"]["jobId"] is None

    def offend(conn: Any, n: int) -> None:
        for i in range(15):
            last = refused[(n + i) % len(refused)]
            mine = [{**good, "customId": f"{queue}-{n}-{i}"}, {**good, "uniqueKey": "k"}, *[good] * 10, last]
            assert not conn.send("PUSHB", queue=queue, jobs=mine)["ok"]

    with ThreadPoolExecutor(1) as pool:
        watcher = pool.submit(watch)
        try:
            together([lambda c=c, n=n: offend(c, n) for n, c in enumerate(conns)])
        finally:
            done.set()
        watcher.result(10)
    assert wire.state(f"{queue}-0-0") == "unknown"
    assert queue not in wire.send("ListQueues")["queues"]


def test_the_last_place_of_a_group_is_given_once(wire: Any, conns: list[Any], queue: str) -> None:
    """Rule 5: a cap of 20 holds although eight connections push into the group at once."""
    member = {"name": "j", "data": 1, "groupId": "g", "groupMaxSize": 20}

    def push(conn: Any) -> int:
        stored = 0
        for _ in range(5):
            stored += bool(conn.send("PUSH", queue=queue, **member)["ok"])
            stored += 2 * bool(conn.send("PUSHB", queue=queue, jobs=[member, member])["ok"])
        return stored

    assert sum(together([lambda c=c: push(c) for c in conns])) == 20
    assert wire.counts(queue)["waiting"] == 20


def test_one_id_or_key_pushed_by_many_is_stored_once(wire: Any, conns: list[Any], queue: str) -> None:
    """Rules 1 and 5: everybody is answered with the one job."""
    for n in range(10):
        ids = together([lambda c=c, n=n: c.push(queue, None, uniqueKey=f"k{n}") for c in conns])
        assert len(set(ids)) == 1
        ids = together([lambda c=c, n=n: c.push(queue, None, jobId=f"{queue}-{n}") for c in conns])
        assert set(ids) == {f"{queue}-{n}"}
    assert wire.send("Count", queue=queue)["count"] == 20


# ---------------------------------------------------------------- 7 and 8: counts, and nothing lost in silence


def churn(conn: Any, queue: str, seed: int, rounds: int) -> list[str]:
    """Random commands on one queue; the ids of every job it pushed."""
    rng = random.Random(seed)
    mine: list[str] = []
    held: list[str] = []
    for _ in range(rounds):
        dice = rng.random()
        some = rng.choice(mine) if mine else "nobody"
        if dice < 0.30:
            options = rng.choice(
                [{}, {"priority": 3}, {"delay": HOUR}, {"delay": 20}, {"groupId": "g"}, {"uniqueKey": f"{seed}k"},
                 {"removeOnComplete": True}, {"ttl": 30}, {"lifo": True}, {"maxAttempts": 1}]
            )  # fmt: skip
            mine.append(conn.push(queue, {"seed": seed}, **options))
        elif dice < 0.40:
            batch = [{"name": "j", "data": n} for n in range(rng.randint(1, 4))]
            mine += conn.send("PUSHB", queue=queue, jobs=batch)["ids"]
        elif dice < 0.55:
            reply = conn.send("PULLB", queue=queue, count=rng.randint(1, 4))
            held += [job["id"] for job in reply["jobs"]]
        elif dice < 0.68 and held:
            conn.send("ACK", id=held.pop(rng.randrange(len(held))), result=1)
        elif dice < 0.76 and held:
            conn.send("FAIL", id=held.pop(), error="x")
        else:
            cmd, fields = rng.choice(
                [
                    ("Cancel", {"id": some}), ("Discard", {"id": some}), ("Promote", {"id": some}),
                    ("ChangeDelay", {"id": some, "delay": 10}), ("MoveToWait", {"id": some}),
                    ("ChangePriority", {"id": some, "priority": rng.randint(-2, 2)}),
                    ("MoveToDelayed", {"id": some, "delay": 30}), ("RetryCompleted", {"queue": queue, "count": 1}),
                    ("Clean", {"queue": queue, "grace": 0, "state": rng.choice(["waiting", "failed"]), "limit": 2}),
                    ("PromoteJobs", {"queue": queue, "count": 1}),
                ]
            )  # fmt: skip
            conn.send(cmd, **fields)
    return mine


def test_counters_agree_with_listings_whenever_the_queue_rests(wire: Any, conns: list[Any], queue: str) -> None:
    """Rule 7: after each of three rounds of random commands from eight connections.

    The jobs that mature or expire by time rest too once nothing is delayed by a short time.
    """
    for round in range(3):
        together([lambda c=c, seed=100 * round + n: churn(c, queue, seed, 60) for n, c in enumerate(conns)])
        calm(wire, queue)
        settled(wire, queue)


def calm(wire: Any, queue: str) -> None:
    """Return once no job of the queue is about to mature or to expire within the next minute."""

    def restless() -> list[Any]:
        jobs = wire.send("GetJobs", queue=queue, state=["delayed", "waiting", "prioritized"], limit=100_000)["jobs"]
        now = wire.send("Ping")["data"]["time"]
        return [job for job in jobs if now < job["runAt"] < now + 60_000 or job["ttl"] is not None]

    deadline = time.monotonic() + 20
    while left := restless():
        assert time.monotonic() < deadline, [
            {k: j[k] for k in ("state", "ttl", "createdAt", "runAt", "attempts", "timeline")} for j in left
        ]
        time.sleep(0.05)


def test_every_job_that_is_gone_was_announced(broker: Any, wire: Any, conns: list[Any], queue: str) -> None:
    """Rule 8: after random commands with removals, ids that are unknown had a `removed` event, or completed with
    removeOnComplete, or were cleaned from among the failed (part of the answer of Clean only)."""
    wire.send("SubscribeEvents", queue=queue)
    pushed = [id for part in together(
        [lambda c=c, n=n: churn(c, queue, 900 + n, 60) for n, c in enumerate(conns)]) for id in part]  # fmt: skip
    with broker.connect() as other:
        calm(other, queue)
        events = heard(wire, other, queue)
        gone = {id for id in pushed if other.state(id) == "unknown"}
    announced = {e["jobId"] for e in events if e["eventType"] in ("removed", "completed")}
    failed = {e["jobId"] for e in events if e["eventType"] == "failed" and e["terminal"]}
    assert gone <= announced | failed, gone - announced - failed
    kinds = Counter(e["eventType"] for e in events)
    assert kinds["pushed"] == len({e["jobId"] for e in events if e["eventType"] == "pushed"})


def test_events_of_a_queue_come_in_the_order_of_its_changes(
    broker: Any, wire: Any, conns: list[Any], queue: str
) -> None:
    """Rule 1 as a subscriber sees it (R77): each job's events are a possible life, whoever drove it."""
    wire.send("SubscribeEvents", queue=queue)

    def work(conn: Any, n: int) -> None:
        if n < 4:
            for _ in range(25):
                conn.push(queue)
            return
        for _ in range(25):
            job = conn.pull(queue, timeout=20_000)
            assert conn.send("ACK", id=job["id"])["ok"]

    together([lambda c=c, n=n: work(c, n) for n, c in enumerate(conns)])
    with broker.connect() as other:
        events = heard(wire, other, queue)
    lives: dict[str, list[str]] = {}
    for event in events:
        lives.setdefault(event["jobId"], []).append(event["eventType"])
    assert len(lives) == 100
    assert set(map(tuple, lives.values())) == {("pushed", "pulled", "completed")}
    stamps = [event["timestamp"] for event in events]
    assert stamps == sorted(stamps)
