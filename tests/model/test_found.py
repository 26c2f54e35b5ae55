"""Short histories that once went wrong, found by the random ones or while their model was written.

Each one is as short as it can be. A mark says what still goes wrong, and falls with the fault: it is strict.
"""

from __future__ import annotations

import pytest

from gqueue.engine.states import TRANSITIONS
from tests.model.rig import SECOND, Peer, Rig

undecided = pytest.mark.xfail(strict=True, raises=AssertionError, reason="two rules contradict, or one costs")


@pytest.fixture
def rig() -> Rig:
    return Rig()


@pytest.fixture
def peer(rig: Rig) -> Peer:
    return rig.connect()


def state(rig: Rig, id: str) -> str:
    return rig.engine.queries.state(id, rig.now)


def same_picture(rig: Rig) -> None:
    """Design I1: an index made from the store is the one that has lived through it all."""
    assert rig.rebuilt().index.picture(rig.now) == rig.engine.index.picture(rig.now)


@pytest.mark.parametrize("end", ["completed", "failed"])
def test_a_push_kept_out_by_its_unique_key_leaves_the_finished_job_with_its_custom_id_alone(
    rig: Rig, peer: Peer, end: str
) -> None:
    rig.ask(peer, "PUSH", queue="q", jobId="c")
    rig.ask(peer, "PULL", queue="q")
    if end == "completed":
        rig.ask(peer, "ACK", id="c", result=1)
    else:
        rig.ask(peer, "FAIL", id="c", unrecoverable=True)
    owner = rig.ask(peer, "PUSH", queue="q", uniqueKey="k")["id"]

    assert rig.ask(peer, "PUSH", queue="q", jobId="c", uniqueKey="k")["id"] == owner

    assert state(rig, "c") == end  # a push that stores nothing must not take anything away (core 6.1)


def test_a_push_kept_out_by_its_custom_id_is_not_asked_whom_it_would_replace(rig: Rig, peer: Peer) -> None:
    rig.ask(peer, "PUSH", queue="q", jobId="c")
    owner = rig.ask(peer, "PUSH", queue="q", uniqueKey="k")["id"]
    rig.ask(peer, "PUSH", queue="q", dependsOn=[owner])

    reply = rig.ask(peer, "PUSH", queue="q", jobId="c", uniqueKey="k", dedup={"replace": True})

    assert reply == {"ok": True, "id": "c", "duplicate": True}  # custom id first, then unique key (core 6.1)


@pytest.mark.parametrize("ending", ["removeOnComplete", "Obliterate"])
def test_the_timeout_of_a_delivery_ends_with_its_job(rig: Rig, peer: Peer, ending: str) -> None:
    id = rig.ask(peer, "PUSH", queue="q", timeout=5 * SECOND, removeOnComplete=True)["id"]
    rig.ask(peer, "PULL", queue="q")
    if ending == "Obliterate":
        rig.ask(peer, "Obliterate", queue="q")
    else:
        rig.ask(peer, "ACK", id=id)
    rig.ask(peer, "PUSH", queue="q")

    broken = None
    try:
        rig.advance(5 * SECOND)
    except KeyError as error:  # it takes the other deadlines of that turn with it
        broken = error
    assert broken is None
    assert state(rig, id) == "unknown"


@pytest.mark.parametrize("before", ["active", "waiting-children"])
def test_a_time_to_live_is_watched_after_a_restart_whatever_the_job_was_doing(
    rig: Rig, peer: Peer, before: str
) -> None:
    other = rig.ask(peer, "PUSH", queue="other")["id"]
    depends = [other] if before == "waiting-children" else []
    id = rig.ask(peer, "PUSH", queue="q", ttl=60 * SECOND, dependsOn=depends)["id"]
    token = rig.ask(peer, "PULL", queue="other" if depends else "q", owner="w")["token"]
    assert state(rig, id) == before

    rig.restart()
    peer = rig.connect()
    if depends:
        rig.ask(peer, "ACK", id=other, token=token)
    else:
        rig.ask(peer, "MoveToWait", id=id, token=token)
    assert state(rig, id) == "waiting"
    rig.advance(62 * SECOND)

    assert state(rig, id) == "unknown"  # swept at most one second late (core 3.7), although nobody pulls


def test_a_debounce_id_that_another_job_has_now_is_not_taken_back_by_a_restart(rig: Rig, peer: Peer) -> None:
    first = rig.ask(peer, "PUSH", queue="q", debounceId="d")["id"]
    rig.ask(peer, "Discard", id=first)
    second = rig.ask(peer, "PUSH", queue="q", debounceId="d")["id"]
    rig.ask(peer, "MoveToWait", id=first)  # it runs again beside the second, which keeps the debounce id
    rig.ask(peer, "Cancel", id=second)

    same_picture(rig)


@undecided
def test_a_token_of_a_completed_delivery_does_not_complete_the_next_one(rig: Rig, peer: Peer) -> None:
    id = rig.ask(peer, "PUSH", queue="q")["id"]
    token = rig.ask(peer, "PULL", queue="q", owner="w")["token"]
    rig.ask(peer, "ACK", id=id, token=token)
    rig.ask(peer, "RetryCompleted", queue="q", id=id)
    rig.ask(peer, "PULL", queue="q")  # without a lease

    rig.ask(peer, "ACK", id=id, token=token)  # the worker's repeated ACK of its first delivery

    assert state(rig, id) == "active"  # a stale token changes nothing (R05)


def test_obliterate_forgets_what_was_completed_and_removed(rig: Rig, peer: Peer) -> None:
    rig.ask(peer, "PUSH", queue="q", jobId="c", removeOnComplete=True)
    rig.ask(peer, "PULL", queue="q")
    rig.ask(peer, "ACK", id="c")
    rig.ask(peer, "Obliterate", queue="q")

    reply = rig.ask(peer, "PUSH", queue="q", dependsOn=["c"])

    assert reply == {"ok": False, "error": "Dependency job not found: c"}  # dependency proofs go too (core 9.4)


def test_a_restart_costs_a_delivery_without_a_lease_no_attempt(rig: Rig, peer: Peer) -> None:
    id = rig.ask(peer, "PUSH", queue="q", timeout=5 * SECOND)["id"]
    rig.ask(peer, "PULL", queue="q")

    rig.restart()
    rig.advance(60 * SECOND)

    job = rig.engine.index.get(id)
    assert job is not None
    assert job.attempts == 0  # a loss, not an attempt (design 7, restart with active jobs)


def test_a_parent_does_not_wait_for_a_child_that_was_cancelled(rig: Rig, peer: Peer) -> None:
    child = rig.ask(peer, "PUSH", queue="children")["id"]
    parent = rig.ask(peer, "PUSH", queue="q", childrenIds=[child])["id"]
    rig.ask(peer, "PULL", queue="q")
    rig.ask(peer, "MoveToWaitingChildren", id=parent)
    rig.ask(peer, "Cancel", id=child)

    rig.ask(peer, "MoveToWait", id=parent)  # the way out once nothing is open (core 8.7), if it is not out already

    assert state(rig, parent) == "waiting"


def test_the_table_of_states_knows_that_a_dependent_may_still_be_delayed(rig: Rig, peer: Peer) -> None:
    rig.ask(peer, "PUSH", queue="others", jobId="d")
    id = rig.ask(peer, "PUSH", queue="q", dependsOn=["d"], delay=60 * SECOND)["id"]
    rig.ask(peer, "PULL", queue="others")
    rig.ask(peer, "ACK", id="d")
    assert state(rig, id) == "delayed"  # its delay keeps running while it is blocked (core 3.10)

    assert ("waiting-children", "delayed") in {(row.source, row.target) for row in TRANSITIONS}
