"""Completed jobs that only the store has, while the store lags behind memory (design I2): memory is right."""

from __future__ import annotations

from pathlib import Path

import pytest

from gqueue.engine.engine import EngineSettings
from tests.model.rig import Peer, Rig, memory_store, sqlite_store


@pytest.fixture(params=["memory", "sqlite"])
def rig(request: pytest.FixtureRequest, tmp_path: Path) -> Rig:
    store = memory_store() if request.param == "memory" else sqlite_store(tmp_path)
    return Rig(store=store, settings=EngineSettings(max_completed_jobs=1))


def complete(rig: Rig, peer: Peer, *ids: str) -> None:
    for id in ids:
        rig.ask(peer, "PUSH", queue="q", jobId=id)
        rig.ask(peer, "PULL", queue="q")
        rig.ask(peer, "ACK", id=id, result=id)


def test_an_archived_job_is_gone_as_soon_as_it_is_cleaned(rig: Rig) -> None:
    peer = rig.connect()
    complete(rig, peer, "old", "other", "new")
    assert rig.engine.index.get("old") is None, "it is archived"
    rig.busy = True
    cleaned = rig.post(peer, "Clean", queue="q", grace=0, state="completed", limit=1)

    asked = rig.post(peer, "GetState", id="old")  # the store still has its row
    rig.flush()

    assert peer.replies[cleaned] == {"ok": True, "count": 1, "ids": ["old"]}
    assert peer.replies[asked] == {"ok": True, "id": "old", "state": "unknown"}
    assert rig.ask(peer, "GetJobCounts", queue="q")["counts"]["completed"] == 2
    rig.close()


def test_an_archived_job_that_runs_again_is_not_found_as_completed(rig: Rig) -> None:
    peer = rig.connect()
    complete(rig, peer, "old", "other", "new")
    assert rig.engine.index.get("old") is None, "it is archived"
    rig.busy = True
    retried = rig.post(peer, "RetryCompleted", queue="q", id="old")

    listed = rig.post(peer, "GetJobs", queue="q", state="completed")  # asks the store, which still has it as completed
    rig.flush()

    assert peer.replies[retried] == {"ok": True, "count": 1}
    assert [job["id"] for job in peer.replies[listed]["jobs"]] == ["new", "other"]  # by age, then id
    assert rig.ask(peer, "PULL", queue="q")["job"]["id"] == "old"
    rig.close()
