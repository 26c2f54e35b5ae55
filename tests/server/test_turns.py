"""Commands on many jobs give way to others, and are still one command to whoever sent them (R51)."""

from __future__ import annotations

import select
from typing import Any

import pytest

from tests.harness import Broker

MANY = 60_000


@pytest.fixture
def busy(fresh_broker: Any) -> Broker:
    """A broker with MANY waiting jobs in `q`."""
    broker: Broker = fresh_broker("sqlite")
    with broker.connect() as wire:
        for start in range(0, MANY, 5000):
            jobs = [{"data": {"n": n}} for n in range(start, start + 5000)]
            assert wire.send("PUSHB", queue="q", jobs=jobs)["ok"] is True
    return broker


def is_open(wire: Any) -> bool:
    """No reply has come yet."""
    return not select.select([wire.sock], [], [], 0)[0]


@pytest.mark.parametrize(
    ("cmd", "fields"),
    [
        ("Drain", {}),
        ("Obliterate", {}),
        ("Clean", {"grace": 0, "limit": MANY}),
        ("GetJobs", {"limit": 10, "offset": MANY - 10}),
    ],
)
def test_others_are_served_while_a_long_command_runs(busy: Broker, cmd: str, fields: dict[str, Any]) -> None:
    with busy.connect() as long, busy.connect() as other:
        other.send("Ping")
        reply = long.start(cmd, queue="q", **fields)
        served = 0
        while is_open(long):
            assert other.send("Ping")["ok"] is True
            served += 1
        assert reply.result()["ok"] is True
    assert served >= 2  # the first might have come in before it began


def test_commands_behind_it_on_the_same_connection_wait(busy: Broker) -> None:
    with busy.connect() as wire:
        drained, _, counts, page = wire.pipeline(
            [
                {"cmd": "Drain", "queue": "q"},
                {"cmd": "PUSH", "queue": "q", "data": 1},
                {"cmd": "GetJobCounts", "queue": "q"},
                {"cmd": "GetJobs", "queue": "q"},
            ]
        )
    assert drained["count"] == MANY
    assert counts["counts"]["waiting"] == 1
    assert len(page["jobs"]) == 1


def test_jobs_that_are_claimed_meanwhile_are_not_drained_and_none_is_counted_twice(busy: Broker) -> None:
    with busy.connect() as long, busy.connect() as other:
        reply = long.start("Drain", queue="q")
        claimed = []
        while is_open(long) and len(claimed) < 500:
            job = other.pull("q")
            if job is None:
                break
            claimed.append(job["id"])
        count = reply.result()["count"]
        assert claimed
        assert count + len(claimed) == MANY
        assert other.counts("q")["active"] == len(set(claimed)) == len(claimed)
        assert other.send("ACK", id=claimed[0])["ok"] is True


def test_what_is_pushed_while_a_queue_is_obliterated_stays(busy: Broker) -> None:
    with busy.connect() as long, busy.connect() as other:
        other.send("Pause", queue="q")
        held = long.start("Obliterate", queue="q")
        pushed = []
        while is_open(long) and len(pushed) < 500:
            pushed.append(other.push("q", {"late": len(pushed)}))
        assert held.result()["ok"] is True
        left = [job["id"] for job in other.send("GetJobs", queue="q", limit=1000)["jobs"]]
        assert left
        assert left == pushed[-len(left) :]  # the first ones may have come in before it began
        assert other.counts("q")["waiting"] == len(left)  # and the new queue is not paused
    busy.restart("kill")
    with busy.connect() as wire:
        assert [job["id"] for job in wire.send("GetJobs", queue="q", limit=1000)["jobs"]] == left


def test_a_client_that_leaves_does_not_stop_its_command(busy: Broker) -> None:
    with busy.connect() as other:
        with busy.connect() as long:
            long.start("Drain", queue="q")
            other.send("Ping")
        for _ in range(10_000):
            if other.counts("q")["waiting"] == 0:
                break
        assert other.counts("q")["waiting"] == 0
    assert busy.terminate() == 0


@pytest.mark.parametrize(("offset", "asc"), [(0, True), (MANY - 5, True), (0, False), (31_000, False)])
def test_a_page_of_many_is_in_order(busy: Broker, offset: int, asc: bool) -> None:
    with busy.connect() as wire:
        page = wire.send("GetJobs", queue="q", state="waiting", offset=offset, limit=5, asc=asc)["jobs"]
    places = range(MANY) if asc else range(MANY - 1, -1, -1)
    assert [job["data"]["n"] for job in page] == list(places[offset : offset + 5])


def test_a_queue_that_two_clients_obliterate_at_once_keeps_what_is_pushed_meanwhile(busy: Broker) -> None:
    with busy.connect() as first, busy.connect() as second, busy.connect() as other:
        replies = [first.start("Obliterate", queue="q")]
        other.send("Ping")
        replies.append(second.start("Obliterate", queue="q"))
        other.send("Ping")
        pushed = []
        while is_open(first) or is_open(second):
            pushed.append(other.push("q", {"late": len(pushed)}))
        assert all(reply.result()["ok"] for reply in replies)
        pushed.append(other.push("q", {"late": len(pushed)}))
        left = [job["id"] for job in other.send("GetJobs", queue="q", limit=100_000)["jobs"]]
        assert left == pushed[-len(left) :]
        assert len(left) > len(pushed) - 10  # the first ones may have come in before both began
        for id in left:
            assert other.state(id) == "waiting"
        assert other.pull("q")["id"] == left[0]  # type: ignore[index]
    busy.restart("kill")
    with busy.connect() as wire:
        assert [job["id"] for job in wire.send("GetJobs", queue="q", limit=100_000)["jobs"]] == left
