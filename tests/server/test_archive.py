"""Completed jobs beyond those in memory: the store has them, and every command finds them as if they had never left."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.harness import Broker, Wire

KEPT = 5  # completed jobs in memory


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    with Broker("sqlite", tmp_path, args=["--max-completed-jobs", str(KEPT)]) as broker:
        yield broker


@pytest.fixture
def wire(broker: Broker) -> Wire:
    return broker.connect()


def complete(wire: Wire, count: int, queue: str = "q", **options: Any) -> list[str]:
    """Ids of jobs that were pushed and completed one after the other; each with its number as data and as result."""
    ids = []
    for n in range(count):
        own = {"jobId": f"own-{n}"} if options.get("own") else {}
        ids.append(wire.push(queue, {"n": n}, **own, **{k: v for k, v in options.items() if k != "own"}))
        job = wire.pull(queue)
        assert job is not None
        if options.get("keepLogs"):
            wire.send("AddLog", id=job["id"], message=f"line {n}")
        assert wire.send("ACK", id=job["id"], result=n)["ok"]
    return ids


def lives(broker: Broker) -> Iterator[Wire]:
    """As it runs, and after a restart."""
    yield broker.connect()
    yield restarted(broker)


def restarted(broker: Broker) -> Wire:
    broker.restart("graceful")
    return broker.connect()


def test_a_job_that_has_left_memory_is_found_by_its_id(broker: Broker, wire: Wire) -> None:
    ids = complete(wire, 20, keepLogs=10)
    for client in lives(broker):
        for n, id in enumerate(ids):
            job = client.send("GetJob", id=id)["job"]
            assert (job["data"], job["state"]) == ({"n": n}, "completed")
            assert client.send("GetState", id=id)["state"] == "completed"
            assert client.send("GetResult", id=id)["result"] == n
            assert client.send("WaitJob", id=id, timeout=1000)["completed"] is True
            assert [entry["message"] for entry in client.send("GetLogs", id=id)["data"]["logs"]] == [f"line {n}"]
        assert client.send("GetState", id="nobody")["state"] == "unknown"
        assert client.send("Progress", id=ids[0], progress=5)["error"] == "Job is not active (current state: completed)"


def test_pages_of_completed_jobs_do_not_show_where_each_is_kept(broker: Broker, wire: Wire) -> None:
    ids = complete(wire, 23)
    waiting = wire.push("q", {})
    for client in lives(broker):
        for asc in (True, False):
            order = ids if asc else ids[::-1]
            for offset, limit in ((0, 4), (3, 7), (15, 100), (22, 3), (23, 3), (0, 100)):
                page = client.send("GetJobs", queue="q", state="completed", offset=offset, limit=limit, asc=asc)["jobs"]
                assert [job["id"] for job in page] == order[offset : offset + limit]
        everything = client.send("GetJobs", queue="q", limit=100)["jobs"]
        assert [job["id"] for job in everything] == [*ids, waiting]
        assert client.send("GetJobCounts", queue="q")["counts"]["completed"] == 23
        assert client.send("GetJobs", queue="other", state="completed")["jobs"] == []


def test_the_oldest_completions_are_cleaned_first_wherever_they_are(broker: Broker, wire: Wire) -> None:
    ids = complete(wire, 20)
    assert wire.send("Clean", queue="q", grace=0, state="completed", limit=3)["ids"] == ids[:3]
    wire = restarted(broker)
    assert wire.send("Clean", queue="q", grace=0, state="completed", limit=4)["ids"] == ids[3:7]
    assert wire.send("GetState", id=ids[5])["state"] == "unknown"
    assert wire.send("Clean", queue="q", grace=0, state="completed")["ids"] == ids[7:]
    assert wire.send("GetJobCounts", queue="q")["counts"]["completed"] == 0


def test_completed_jobs_run_again_from_the_store(broker: Broker, wire: Wire) -> None:
    ids = complete(wire, 20, keepLogs=10)
    assert wire.send("RetryCompleted", queue="q", id=ids[1])["count"] == 1
    assert wire.send("RetryCompleted", queue="q", count=3)["count"] == 3
    again = [ids[1], ids[0], ids[2], ids[3]]
    wire = restarted(broker)
    assert (
        wire.send("GetJobCounts", queue="q")["counts"] | {"completed": 16, "waiting": 4}
        == wire.send("GetJobCounts", queue="q")["counts"]
    )
    for _ in again:
        job = wire.pull("q")
        assert job is not None
        assert job["id"] in again
        assert len(wire.send("GetLogs", id=job["id"])["data"]["logs"]) == 1
        assert wire.send("ACK", id=job["id"])["ok"]
    assert wire.send("RetryCompleted", queue="q")["count"] == 20
    assert wire.send("GetJobCounts", queue="q")["counts"]["waiting"] == 20


def test_a_custom_id_of_an_archived_job_starts_a_new_one(broker: Broker, wire: Wire) -> None:
    ids = complete(wire, 20, own=True)
    assert wire.send("GetJobByCustomId", customId="own-0")["job"]["state"] == "completed"
    assert wire.push("q", {"new": True}, jobId="own-0") == ids[0]
    reply = wire.send("PUSHB", queue="q", jobs=[{"name": "n", "data": {}, "customId": f"own-{n}"} for n in (1, 2)])
    assert reply["ids"] == ids[1:3]
    for client in lives(broker):
        job = client.send("GetJob", id="own-0")["job"]
        assert (job["state"], job["data"]) == ("waiting", {"new": True})
        assert client.send("GetResult", id="own-0").get("result") is None
        counts = client.send("GetJobCounts", queue="q")["counts"]
        assert (counts["waiting"], counts["completed"]) == (3, 17)


def test_a_dependency_that_is_archived_is_met(wire: Wire) -> None:
    ids = complete(wire, 20)
    id = wire.push("q", {}, dependsOn=[ids[0], ids[19]])
    assert wire.send("GetState", id=id)["state"] == "waiting"
    assert wire.send("PUSH", queue="q", name="n", data={}, dependsOn=["nobody"])["error"] == (
        "Dependency job not found: nobody"
    )


def test_obliterate_leaves_nothing_in_the_store(broker: Broker, wire: Wire, tmp_path: Path) -> None:
    ids = complete(wire, 20)
    other = complete(wire, 8, queue="other")
    assert wire.send("Obliterate", queue="q")["ok"]
    assert wire.send("GetState", id=ids[0])["state"] == "unknown"
    assert wire.send("GetJobs", queue="q", state="completed")["jobs"] == []
    assert len(wire.send("GetJobs", queue="other", state="completed")["jobs"]) == len(other)
    broker.close()
    with closing(sqlite3.connect(tmp_path / "gqueue.db")) as file:
        assert file.execute("SELECT count(*) FROM jobs").fetchone() == (8,)


def test_completed_jobs_past_their_age_leave_the_store_too(tmp_path: Path) -> None:
    args = ["--max-completed-jobs", "5", "--completed-retention-ms", "600", "--cleanup-interval", "200"]
    with Broker("sqlite", tmp_path, args=args) as broker:
        wire = broker.connect()
        ids = complete(wire, 30)
        done = threading.Event()
        for _ in range(100):
            if wire.send("GetJobCounts", queue="q")["counts"]["completed"] == 0:
                break
            done.wait(0.1)
        assert wire.send("GetState", id=ids[0])["state"] == "unknown"
        assert wire.send("GetJobs", queue="q", state="completed")["jobs"] == []
    with closing(sqlite3.connect(tmp_path / "gqueue.db")) as file:
        assert file.execute("SELECT count(*) FROM jobs").fetchone() == (0,)


def test_commands_behind_one_that_waits_for_the_store_keep_their_order(wire: Wire) -> None:
    ids = complete(wire, 20)
    replies = wire.pipeline(
        [
            {"cmd": "RetryCompleted", "queue": "q", "id": ids[0]},
            {"cmd": "PULL", "queue": "q"},
            {"cmd": "RetryCompleted", "queue": "q", "id": ids[1]},
            {"cmd": "PULL", "queue": "q"},
            {"cmd": "Ping"},
        ]
    )
    assert [replies[1]["job"]["id"], replies[3]["job"]["id"]] == ids[:2]
    assert replies[4]["ok"]


def test_many_clients_see_one_truth_while_archived_jobs_come_and_go(broker: Broker) -> None:
    ids = complete(broker.connect(), 40)
    wrong: list[Any] = []

    def look(start: int) -> None:
        with broker.connect() as wire:
            for n in range(60):
                id = ids[(start + n * 7) % len(ids)]
                if n % 6 == 0:
                    wire.send("RetryCompleted", queue="q", id=id)
                    job = wire.pull("q")
                    if job is not None:
                        wire.send("ACK", id=job["id"], result=-1)
                state = wire.send("GetState", id=id)["state"]
                if state not in ("completed", "waiting", "active"):
                    wrong.append((id, state))

    threads = [threading.Thread(target=look, args=(start,)) for start in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(50)
    assert wrong == []
    wire = broker.connect()
    while (job := wire.pull("q")) is not None:
        wire.send("ACK", id=job["id"])
    assert wire.send("GetJobCounts", queue="q")["counts"]["completed"] == 40
    assert sorted(job["id"] for job in wire.send("GetJobs", queue="q", state="completed")["jobs"]) == sorted(ids)
