"""Which command works in which state (core 3.3), what each transition does and announces (3.2, 13), and the outcomes
that come too late (4.6)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.server.scenes import HOUR, NO_OP, NOBODY, STATES, Placed, e1, heard, lease, place, shown, t1, t2, until

NF = "Job not found"
C1 = "Job not found or cannot be cancelled"
U1 = "Job not found or cannot be updated"
P1 = "Job not found or not in queue"
R1 = "Job not found or not delayed"
D1 = "Job not found or cannot change delay"
M1 = "Job is not active"
H1 = "Job not found or not active (or invalid token)"
L1 = "Lock not found or invalid token"


def a1(state: str) -> str:
    return f"Job is not active (current state: {state})"


def w1(state: str) -> str:
    return f"Cannot move job from state '{state}' to waiting"


#: Command -> its other fields, and for each state of STATES either "ok" with the state afterwards ("=" is the same), or
#: the text of the refusal. "E1" stands for the one with the job's id.
# fmt: off
MATRIX: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "ACK": ({}, ("E1", "E1", "E1", "E1", "ok completed", "ok completed", "E1", "E1", "E1")),
    "FAIL": ({"unrecoverable": True}, ("E1", "E1", "E1", "E1", "ok failed", "ok failed", "E1", "E1", "E1")),
    "Cancel": ({}, ("ok unknown", "ok unknown", "ok unknown", "ok unknown", C1, C1, C1, C1, C1)),
    "Discard": ({}, ("ok failed",) * 6 + (NF, NF, NF)),
    "Progress": ({"progress": 40}, (
        a1("waiting"), a1("prioritized"), a1("delayed"), a1("waiting-children"), "ok =", "ok =",
        a1("completed"), a1("failed"), NF)),
    "GetProgress": ({}, (
        a1("waiting"), a1("prioritized"), a1("delayed"), a1("waiting-children"), "ok =", "ok =",
        a1("completed"), a1("failed"), NF)),
    "Update": ({"data": {"n": 2}}, ("ok =",) * 6 + (U1, U1, U1)),
    "ChangePriority": ({"priority": 9}, ("ok prioritized", "ok =", "ok =", P1, P1, P1, P1, P1, P1)),
    "Promote": ({}, (R1, R1, "ok waiting", R1, R1, R1, R1, R1, R1)),
    "ChangeDelay": ({"delay": HOUR}, ("ok delayed",) * 3 + (D1, "ok delayed", "ok delayed", D1, D1, D1)),
    "MoveToDelayed": ({"delay": HOUR}, ("ok delayed",) * 3 + (
        a1("waiting-children"), "ok delayed", "ok delayed", a1("completed"), a1("failed"), NF)),
    "MoveToWait": ({}, (
        "ok =", "ok =", "ok waiting", w1("waiting-children"), "ok waiting", "ok waiting", w1("completed"), "ok waiting",
        w1("unknown"))),
    # With nothing open the job is queued again at once (design 7).
    "MoveToWaitingChildren": ({}, (M1, M1, M1, M1, "ok waiting", "ok waiting", M1, M1, M1)),
    "AddLog": ({"message": "m"}, ("ok =",) * 8 + (NF,)),
    "JobHeartbeat": ({}, (H1, H1, H1, H1, "ok =", "ok =", H1, H1, H1)),
    "ExtendLock": ({"duration": 60_000}, (L1, L1, L1, L1, L1, "ok =", L1, L1, L1)),
    "GetJob": ({}, ("ok =",) * 8 + (NF,)),
    "GetState": ({}, ("ok =",) * 9),
    "GetResult": ({}, ("ok =",) * 9),
    "RemoveJobDeduplicationKey": ({}, ("ok =",) * 9),
}
# fmt: on

#: Commands that want the token of a leased job, with their other fields.
GUARDED = {
    "ACK": {}, "FAIL": {}, "Discard": {}, "MoveToWait": {}, "MoveToWaitingChildren": {}, "MoveToDelayed": {"delay": 5},
    "ChangeDelay": {"delay": 5},
}  # fmt: skip


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("cmd", MATRIX)
def test_a_command_works_in_its_states_and_is_refused_in_the_others(
    wire: Any, queue: str, cmd: str, state: str
) -> None:
    fields, answers = MATRIX[cmd]
    expected = answers[STATES.index(state)]
    job = place(wire, queue, state)
    before = wire.send("GetJob", id=job.id)
    token = {"token": job.token} if state == "leased" else {}
    reply = wire.send(cmd, id=job.id, **token, **fields)
    if expected.startswith("ok "):
        assert reply["ok"], reply
        after = expected.removeprefix("ok ")
        assert wire.state(job.id) == (shown(state) if after == "=" else after)
    else:
        assert reply == {"ok": False, "error": e1(job.id) if expected == "E1" else expected}
        assert wire.send("GetJob", id=job.id) == before


@pytest.mark.parametrize("cmd", GUARDED)
def test_a_leased_job_is_moved_by_its_token_only(wire: Any, queue: str, cmd: str) -> None:
    job = place(wire, queue, "leased")
    before = wire.job(job.id)
    for fields, text in (({}, t1(job.id)), ({"token": ""}, t1(job.id)), ({"token": "x"}, t2(job.id))):
        assert wire.send(cmd, id=job.id, **fields, **GUARDED[cmd]) == {"ok": False, "error": text}
    assert wire.job(job.id) == before
    assert wire.send(cmd, id=job.id, token=job.token, **GUARDED[cmd])["ok"]
    assert wire.state(job.id) != "active" or cmd == "MoveToDelayed"


@pytest.mark.parametrize("cmd", GUARDED)
def test_an_unleased_job_ignores_a_token(wire: Any, queue: str, cmd: str) -> None:
    job = place(wire, queue, "active")
    assert wire.send(cmd, id=job.id, token="whatever", **GUARDED[cmd])["ok"]
    assert wire.state(job.id) != "active"


@pytest.mark.parametrize("state", STATES)
def test_waiting_for_a_job_in_each_state(wire: Any, queue: str, state: str) -> None:
    """Core 8.11: it waits while the job may still end, and answers at once for one that has."""
    job = place(wire, queue, state)
    reply = wire.send("WaitJob", id=job.id, timeout=30)
    if state == "completed":
        assert reply == {"ok": True, "completed": True, "result": {"r": 1}}
    elif state == "failed":
        assert reply == {"ok": True, "completed": False, "failed": True, "error": "boom"}
    elif state == "unknown":
        assert reply == {"ok": False, "error": NF}
    else:
        assert reply == {"ok": True, "completed": False}


# ---------------------------------------------------------------- transitions and their events


@dataclass(slots=True)
class Move:
    """One row of core 3.2: from a state, by a command or a passing of time, to a state, with these events."""

    start: str
    cmd: str  # the command on the job, or one of the words `happen` knows
    fields: dict[str, Any]
    end: str
    events: list[dict[str, Any]]  # each a subset of the frame's event, in order
    attempts: int = 0
    stalls: int = 0
    options: dict[str, Any] = field(default_factory=dict)

    def name(self) -> str:
        return f"{self.start}-{self.cmd}-{self.end}" + "".join(f"-{name}" for name in self.fields)


def ev(kind: str, **more: Any) -> dict[str, Any]:
    return {"eventType": kind, **more}


DATA = {"n": 1}  # what `place` pushes
FAILED_FOR_GOOD = {"terminal": True, "data": DATA}

MOVES = [
    Move("active", "ACK", {"result": 5}, "completed", [ev("completed", data=5)]),
    Move("leased", "ACK", {"result": 5}, "completed", [ev("completed", data=5)]),
    Move("active", "ACK", {}, "completed", [ev("completed", data=None)]),
    Move("active", "ACK", {"removeOnComplete": True}, "unknown", [ev("completed")]),
    Move("active", "ACK", {"result": 1}, "unknown", [ev("completed", data=1)], options={"removeOnComplete": True}),
    Move(
        "active",
        "FAIL",
        {"error": "e"},
        "delayed",
        [ev("failed", error="e", data=DATA, terminal=False), ev("retried", prev="failed")],
        1,
        options={"backoff": HOUR},
    ),
    Move(
        "active",
        "FAIL",
        {"error": "e"},
        "waiting",
        [ev("failed", error="e", terminal=False), ev("retried", prev="failed")],
        1,
        options={"backoff": 0},
    ),
    Move(
        "active",
        "FAIL",
        {"error": "e"},
        "failed",
        [ev("failed", error="e", **FAILED_FOR_GOOD)],
        1,
        options={"maxAttempts": 1},
    ),
    Move("active", "FAIL", {"unrecoverable": True}, "failed", [ev("failed", error=None, **FAILED_FOR_GOOD)], 1),
    Move(
        "active",
        "FAIL",
        {"error": "e"},
        "unknown",
        [ev("failed", error="e", terminal=True)],
        options={"maxAttempts": 1, "removeOnFail": True},
    ),
    Move("active", "FAIL", {"removeOnFail": True, "unrecoverable": True}, "unknown", [ev("failed", terminal=True)]),
    Move(
        "active",
        "timeout",
        {},
        "delayed",
        [ev("failed", error="Job timeout exceeded", terminal=False), ev("retried", prev="failed")],
        1,
        options={"timeout": 60, "backoff": HOUR},
    ),
    Move(
        "leased",
        "timeout",
        {},
        "failed",
        [ev("failed", error="Job timeout exceeded", **FAILED_FOR_GOOD)],
        1,
        options={"timeout": 60, "maxAttempts": 1},
    ),
    Move("short-lease", "expiry", {}, "waiting", [ev("stalled", data={"stallCount": 1, "action": "retry"})], 1, 1),
    Move(
        "short-lease",
        "expiry",
        {},
        "failed",
        [
            ev("stalled", data={"stallCount": 1, "action": "move_to_dlq"}),
            ev("failed", error="Lock expired (max attempts reached)", terminal=True),
        ],
        1,
        1,
        options={"maxAttempts": 1},
    ),
    Move(
        "active",
        "silence",
        {},
        "delayed",
        [ev("stalled", data={"stallCount": 1, "action": "retry"})],
        1,
        1,
        options={"backoff": HOUR},
    ),
    Move(
        "active",
        "silence",
        {},
        "failed",
        [ev("stalled", data={"stallCount": 1, "action": "move_to_dlq"}), ev("failed", **FAILED_FOR_GOOD)],
        1,
        1,
        options={"maxAttempts": 1},
    ),
    Move("active", "close", {}, "waiting", [ev("waiting", prev="active")]),
    Move("leased", "close", {}, "waiting", [ev("waiting", prev="active")]),
    Move("active", "MoveToWait", {}, "waiting", [ev("waiting", prev="active")]),
    Move("leased", "MoveToDelayed", {"delay": HOUR}, "delayed", [ev("delayed", delay=HOUR)]),
    Move("leased", "ChangeDelay", {"delay": HOUR}, "delayed", [ev("delayed", delay=HOUR)]),
    Move("active", "MoveToDelayed", {"delay": 0}, "waiting", [ev("delayed", delay=0)]),
    Move("active", "Discard", {}, "failed", [ev("failed", error=None, **FAILED_FOR_GOOD)]),
    Move("waiting", "ChangeDelay", {"delay": HOUR}, "delayed", [ev("delayed", delay=HOUR)]),
    Move("prioritized", "MoveToDelayed", {"delay": HOUR}, "delayed", [ev("delayed", delay=HOUR)]),
    Move("delayed", "ChangeDelay", {"delay": 2 * HOUR}, "delayed", [ev("delayed", delay=2 * HOUR)]),
    Move("delayed", "Promote", {}, "waiting", [ev("waiting", prev="delayed")]),
    Move("delayed", "PromoteJobs", {}, "waiting", [ev("waiting", prev="delayed")]),
    Move("delayed", "MoveToWait", {}, "waiting", [ev("waiting", prev="delayed")]),
    Move("waiting", "ChangePriority", {"priority": 3}, "prioritized", []),
    Move("prioritized", "ChangePriority", {"priority": 0}, "waiting", []),
    Move("waiting", "Discard", {}, "failed", [ev("failed", **FAILED_FOR_GOOD)]),
    Move("delayed", "Discard", {}, "failed", [ev("failed", **FAILED_FOR_GOOD)]),
    Move("waiting-children", "Discard", {}, "failed", [ev("failed", **FAILED_FOR_GOOD)]),
    Move("waiting", "Cancel", {}, "unknown", [ev("removed", prev="waiting")]),
    Move("prioritized", "Cancel", {}, "unknown", [ev("removed", prev="prioritized")]),
    Move("delayed", "Cancel", {}, "unknown", [ev("removed", prev="delayed")]),
    Move("waiting-children", "Cancel", {}, "unknown", [ev("removed", prev="waiting-children")]),
    Move("waiting", "Clean", {"grace": 0}, "unknown", [ev("removed", prev="waiting")]),
    Move("delayed", "Clean", {"grace": 0}, "unknown", [ev("removed", prev="delayed")]),
    Move(
        "waiting",
        "ttl",
        {},
        "unknown",
        [ev("removed", prev="waiting", data={"reason": "ttl-expired"})],
        options={"ttl": 60},
    ),
    Move(
        "delayed",
        "ttl",
        {},
        "unknown",
        [ev("removed", prev="delayed", data={"reason": "ttl-expired"})],
        options={"ttl": 60},
    ),
    Move("waiting", "replace", {}, "unknown", [ev("removed", prev="waiting")], options={"uniqueKey": "k"}),
    Move("waiting-children", "resolve", {}, "waiting", [ev("waiting", prev="waiting-children")]),
    Move("waiting-children", "resolve", {}, "delayed", [ev("delayed")], options={"delay": HOUR}),
    Move(
        "waiting-children",
        "resolve",
        {},
        "prioritized",
        [ev("waiting", prev="waiting-children")],
        options={"priority": 4},
    ),
    Move("failed", "MoveToWait", {}, "waiting", [ev("waiting", prev="failed")]),
    Move("completed", "RetryCompleted", {}, "waiting", [ev("waiting", prev="completed")]),
    Move("completed", "again", {}, "waiting", [ev("pushed")], options={"jobId": "$id"}),
    Move("failed", "again", {}, "waiting", [ev("pushed")], options={"jobId": "$id"}),
    Move(
        "active",
        "Progress",
        {"progress": 150, "message": "m"},
        "active",
        [ev("progress", progress=100, data={"progress": 100, "message": "m"})],
    ),
    Move("waiting", "PULL", {}, "active", [ev("pulled")]),
    Move("waiting", "PULLB", {"count": 5}, "active", [ev("pulled")]),
]

ON_THE_QUEUE = ("PromoteJobs", "Clean", "RetryCompleted", "PULL", "PULLB")


def happen(move: Move, wire: Any, holder: Any, queue: str, job: Placed) -> None:
    """Make the move's cause happen."""
    if move.cmd in ("timeout", "expiry", "silence", "ttl"):
        return  # time alone does it
    if move.cmd == "close":
        holder.close()
    elif move.cmd == "replace":
        assert wire.push(queue, None, uniqueKey="k", dedup={"replace": True}) != job.id
    elif move.cmd == "again":
        assert wire.push(queue, DATA, jobId=job.id) == job.id
    elif move.cmd == "resolve":
        (dependency,) = wire.job(job.id)["dependsOn"]
        assert wire.send("Promote", id=dependency)["ok"]
        assert wire.pull(f"{queue}.blockers")["id"] == dependency
        assert wire.send("ACK", id=dependency) == {"ok": True}
    else:
        target = {"queue": queue} if move.cmd in ON_THE_QUEUE else {"id": job.id}
        token = {"token": job.token} if move.start == "leased" and job.token else {}
        assert wire.send(move.cmd, **target, **token, **move.fields)["ok"]


@pytest.mark.parametrize("move", MOVES, ids=Move.name)
def test_a_transition_ends_where_it_should_and_is_announced(broker: Any, wire: Any, queue: str, move: Move) -> None:
    """Core 3.2 with the events of 13.2 and 13.3, attempts and stalls as they are counted."""
    silent = {"stallInterval": 60, "gracePeriod": 0} if move.cmd == "silence" else {"enabled": False}
    wire.send("SetStallConfig", queue=queue, config=silent)
    options = {key: (f"{queue}-id" if value == "$id" else value) for key, value in move.options.items()}
    holder, listener = broker.connect(), broker.connect()
    assert listener.send("SubscribeEvents", queue=queue) == {"ok": True}
    if move.start == "short-lease":
        id = holder.push(queue, DATA, **options)
        _, token = lease(holder, queue, lockTtl=80)
        job = Placed(id, token)
    else:
        job = place(holder, queue, move.start, **options)
    preparing = {"pushed"}
    if move.start in ("active", "leased", "short-lease", "completed", "failed"):
        preparing |= {"pulled", move.start}
    happen(move, wire, holder, queue, job)
    until(lambda: wire.state(job.id) == move.end)

    events = [event for event in heard(listener, wire, queue) if event["jobId"] == job.id]
    while events and events[0]["eventType"] in preparing:  # how it came to its first state
        preparing.discard(events[0]["eventType"])
        events.pop(0)
    assert [event["eventType"] for event in events] == [expected["eventType"] for expected in move.events], events
    for event, expected in zip(events, move.events, strict=True):
        for name, value in expected.items():
            assert event.get(name) == value, (name, event)
        assert event["queue"] == queue
    if move.end != "unknown":
        after = wire.job(job.id)
        assert (after["attempts"], after["stallCount"]) == (move.attempts, move.stalls)
        if move.end not in ("active", "completed", "failed"):
            assert after["startedAt"] is None
    holder.close()
    listener.close()


def test_a_push_is_announced_and_so_is_its_suppression(broker: Any, wire: Any, queue: str) -> None:
    """Core 13.2 and 13.3: `pushed` once, `duplicated` for every kind of suppression, nothing for a refusal."""
    listener = broker.connect()
    listener.send("SubscribeEvents", queue=queue)
    keyed = wire.push(queue, None, uniqueKey="k")
    custom = wire.push(queue, None, jobId=f"{queue}-c")
    assert wire.push(queue, None, uniqueKey="k") == keyed
    assert wire.push(queue, None, uniqueKey="k", dedup={"extend": True, "ttl": HOUR}) == keyed
    assert wire.push(queue, None, jobId=f"{queue}-c") == custom
    assert not wire.send("PUSH", queue=queue, name="", data=1)["ok"]
    batch = [{"name": "j", "data": 1}, {"name": "j", "data": 1, "uniqueKey": "k"}, {"name": "j", "data": 2}]
    first, second, third = wire.send("PUSHB", queue=queue, jobs=batch)["ids"]
    assert second == keyed
    events = [(event["eventType"], event["jobId"]) for event in heard(listener, wire, queue)]
    assert events == [
        ("pushed", keyed), ("pushed", custom), ("duplicated", keyed), ("duplicated", keyed), ("duplicated", custom),
        ("pushed", first), ("pushed", third), ("duplicated", keyed),
    ]  # fmt: skip


def test_draining_announces_each_job_and_the_whole(broker: Any, wire: Any, queue: str) -> None:
    listener = broker.connect()
    ids = [wire.push(queue), wire.push(queue, None, delay=HOUR), wire.push(queue, None, priority=2)]
    listener.send("SubscribeEvents", queue=queue)
    assert wire.send("Drain", queue=queue) == {"ok": True, "count": 3}
    assert wire.send("Drain", queue=queue) == {"ok": True, "count": 0}
    events = heard(listener, wire, queue)
    assert {event["jobId"] for event in events if event["eventType"] == "removed"} == set(ids)
    assert [event["data"] for event in events if event["eventType"] == "drained"] == [{"count": 3}]
    assert len(events) == 4


def test_parking_until_children_are_done_ends_with_the_last_of_them(broker: Any, wire: Any, queue: str) -> None:
    """active to waiting-children and back (core 8.10)."""
    child = wire.push(f"{queue}.children")
    id = wire.push(queue, None, childrenIds=[child])
    _, token = lease(wire, queue)
    listener = broker.connect()
    listener.send("SubscribeEvents", queue=queue)
    assert wire.send("MoveToWaitingChildren", id=id, token=token) == {"ok": True, "data": {"moved": True}}
    job = wire.job(id)
    assert (job["state"], job["attempts"], job["startedAt"]) == ("waiting-children", 0, None)
    assert job["timeline"][-1]["state"] == "waiting-children"
    assert wire.send("MoveToWait", id=id) == {"ok": False, "error": w1("waiting-children")}
    assert wire.send("ACK", id=id, token=token) == {"ok": False, "error": e1(id)}
    wire.pull(f"{queue}.children")
    assert wire.send("ACK", id=child) == {"ok": True}
    assert wire.state(id) == "waiting"
    kinds = [event["eventType"] for event in heard(listener, wire, queue)]
    assert kinds == ["waiting-children", "waiting"]


def test_obliterating_a_queue_leaves_nothing_of_it(broker: Any, wire: Any, queue: str) -> None:
    """Core 9.4."""
    listener = broker.connect()
    jobs = [place(wire, queue, state) for state in ("completed", "failed", "active", "leased", "delayed")]
    custom = wire.push(queue, None, jobId=f"{queue}-c", uniqueKey="k")
    wire.send("Pause", queue=queue)
    listener.send("SubscribeEvents", queue=queue)
    assert wire.send("Obliterate", queue=queue) == {"ok": True}
    assert wire.send("Obliterate", queue=queue) == {"ok": True}
    assert queue not in wire.send("ListQueues")["queues"]
    assert set(wire.counts(queue).values()) == {0}
    assert wire.send("IsPaused", queue=queue)["paused"] is False
    for job in (*jobs, Placed(custom)):
        assert wire.state(job.id) == "unknown"
    for job in jobs[2:4]:
        assert wire.send("ACK", id=job.id, token=job.token) == {"ok": False, "error": e1(job.id)}
    assert wire.send("GetDeduplicationJobId", queue=queue, deduplicationId="k")["data"] == {"jobId": None}
    event = listener.event(5)
    assert (event["eventType"], event["jobId"], event["data"]) == ("removed", "", {"reason": "obliterated"})
    assert wire.push(queue, None, jobId=f"{queue}-c") == custom


# ---------------------------------------------------------------- timeline, attempts, what stays and what goes


def timeline(job: dict[str, Any]) -> list[tuple[Any, ...]]:
    return [(entry["state"], entry.get("attempt"), entry.get("error")) for entry in job["timeline"]]


def test_the_timeline_tells_every_try(wire: Any, queue: str) -> None:
    """Core 2.3."""
    id = wire.push(queue, None, maxAttempts=2, backoff=0)
    for n in (1, 2):
        assert wire.pull(queue, timeout=5000)["id"] == id
        wire.send("FAIL", id=id, error=f"e{n}")
    job = wire.job(id)
    assert timeline(job) == [
        ("waiting", None, None), ("active", None, None), ("failed", 1, "e1"), ("waiting", 2, None),
        ("active", None, None), ("failed", 2, "e2"),
    ]  # fmt: skip
    stamps = [entry["timestamp"] for entry in job["timeline"]]
    assert stamps == sorted(stamps)
    assert wire.send("MoveToWait", id=id) == {"ok": True}
    job = wire.job(id)
    assert timeline(job)[-1] == ("waiting", None, None)
    assert (job["attempts"], job["stallCount"]) == (0, 0)


def test_a_move_or_release_leaves_attempts_and_timeline_alone(broker: Any, wire: Any, queue: str) -> None:
    """Core 2.3 "not recorded" and 3.5."""
    id = wire.push(queue, None, delay=HOUR)
    wire.send("Promote", id=id)
    for leave in ("MoveToWait", "close", "MoveToDelayed"):
        holder = broker.connect()
        assert holder.pull(queue, timeout=5000)["id"] == id
        if leave == "close":
            holder.close()
        else:
            assert wire.send(leave, id=id, **({"delay": HOUR} if leave == "MoveToDelayed" else {})) == {"ok": True}
    job = wire.job(id)
    assert timeline(job) == [("delayed", None, None)] + [("active", None, None)] * 3
    assert (job["attempts"], job["stallCount"], job["startedAt"]) == (0, 0, None)


def test_a_completed_job_keeps_what_it_was(wire: Any, queue: str) -> None:
    """Core 2.1: startedAt stays, completedAt comes, progress as reported, failedReason of an earlier try remains."""
    id = wire.push(queue, DATA, backoff=0)
    wire.pull(queue)
    wire.send("FAIL", id=id, error="first", stack=[" a ", "", 5, "b"])
    pulled = wire.pull(queue, timeout=5000)
    wire.send("Progress", id=id, progress=30, message="third")
    wire.send("ACK", id=id, result=None)
    job = wire.job(id)
    assert job["startedAt"] == pulled["startedAt"]
    assert job["completedAt"] >= job["startedAt"]
    assert (job["attempts"], job["progress"], job["progressMessage"]) == (1, 30, "third")
    assert (job["failedReason"], job["stacktrace"]) == ("first", ["a", "b"])
    assert "returnvalue" in job
    assert job["returnvalue"] is None
    assert wire.send("RetryCompleted", queue=queue, id=id) == {"ok": True, "count": 1}
    job = wire.job(id)
    assert (job["state"], job["attempts"], job["progress"], job["progressMessage"]) == ("waiting", 0, 0, None)
    assert (job["startedAt"], job["completedAt"]) == (None, None)
    assert "returnvalue" not in job


def test_the_backoff_of_each_form_stays_in_its_bounds(wire: Any, queue: str) -> None:
    """Core 3.6 by the runAt of the first two failures; U(0.5, 1.5) and U(0.8, 1.2)."""
    forms: tuple[tuple[Any, float, float, float], ...] = (
        (1_000_000, 0.5 * 2, 1.5 * 2, 3_600_000),
        ({"type": "exponential", "delay": 1_000_000}, 0.5 * 2, 1.5 * 2, 3_600_000),
        ({"type": "fixed", "delay": 1_000_000}, 0.8, 1.2, 3_600_000),
        (86_400_000, 0, 0, 3_600_000),
        ({"type": "exponential", "delay": 1_000_000, "maxDelay": 50_000}, 0, 0, 50_000),
    )
    for backoff, low, high, cap in forms:
        for _ in range(5):
            id = wire.push(queue, None, backoff=backoff)
            wire.pull(queue)
            before = wire.send("Ping")["data"]["time"]
            wire.send("FAIL", id=id, error="e")
            job = wire.job(id)
            after = wire.send("Ping")["data"]["time"]
            base = backoff if isinstance(backoff, int) else backoff["delay"]
            shortest = min(base * low, cap) if low else cap
            longest = min(base * high, cap) if high else cap
            assert before + shortest - 1 <= job["runAt"] <= after + longest + 1, (backoff, job["runAt"] - before)
            assert job["runAt"] == int(job["runAt"])
            assert job["state"] == "delayed"
            wire.send("Cancel", id=id)


def test_too_many_stalls_end_a_job(wire: Any, queue: str) -> None:
    """Core 5.2 and 5.6: the budget of stalls is the queue's, lease ends and silences count alike."""
    wire.send("SetStallConfig", queue=queue, config={"maxStalls": 2, "stallInterval": 60, "gracePeriod": 0})
    wire.send("SubscribeEvents", queue=queue)
    id = wire.push(queue, None, maxAttempts=10, backoff=0)
    lease(wire, queue, lockTtl=80)
    assert wire.event(10, eventType="stalled")["data"] == {"stallCount": 1, "action": "retry"}
    assert wire.pull(queue, timeout=5000)["id"] == id
    assert wire.event(10, eventType="stalled")["data"] == {"stallCount": 2, "action": "move_to_dlq"}
    assert wire.event(5, eventType="failed")["terminal"] is True
    job = wire.job(id)
    assert (job["state"], job["attempts"], job["stallCount"]) == ("failed", 2, 2)
    assert job["failedReason"] == "stalled" or job["failedReason"] == "Job stalled 2 times"


def test_a_heartbeat_between_two_checks_saves_a_silent_job(broker: Any, wire: Any, queue: str) -> None:
    """Core 5.6: this one beats, the other one does not."""
    wire.send("SetStallConfig", queue=queue, config={"stallInterval": 300, "gracePeriod": 0})
    beating = wire.push(queue)
    wire.pull(queue)
    silent = wire.push(queue, None, backoff=HOUR)
    wire.pull(queue)
    wire.send("SubscribeEvents", queue=queue)

    def stalled() -> bool:
        assert wire.send("JobHeartbeat", id=beating) == {"ok": True, "data": {"ok": True}}
        return bool(wire.state(silent) == "delayed")

    until(stalled, every=0.05)
    assert wire.state(beating) == "active"
    assert wire.job(beating)["stallCount"] == 0


@pytest.mark.parametrize("back", ["RetryCompleted", "MoveToWait"])
def test_a_job_that_comes_back_after_its_ttl_is_removed(wire: Any, queue: str, back: str) -> None:
    """Core 3.7: expiry is swept wherever the job has been meanwhile, without anybody pulling."""
    wire.send("SubscribeEvents", queue=queue)
    id = wire.push(queue, None, ttl=100)
    assert wire.pull(queue)["id"] == id
    if back == "RetryCompleted":
        assert wire.send("ACK", id=id) == {"ok": True}
    else:
        assert wire.send("FAIL", id=id, unrecoverable=True) == {"ok": True}
    created = wire.job(id)["createdAt"]
    until(lambda: wire.send("Ping")["data"]["time"] > created + 1_200)  # past its ttl, and past any second look
    assert wire.send(back, **({"queue": queue} if back == "RetryCompleted" else {}), id=id)["ok"]
    assert wire.event(5, eventType="removed", jobId=id)["data"] == {"reason": "ttl-expired"}
    assert wire.state(id) == "unknown"


# ---------------------------------------------------------------- outcomes that come too late (core 4.6)


def lose(broker: Any, wire: Any, queue: str, how: str, **options: Any) -> Placed:
    """A job whose only delivery has just ended in `how`; `token` is that delivery's."""
    listener = broker.connect()
    listener.send("SubscribeEvents", queue=queue)
    stalls = {"stallInterval": 60, "gracePeriod": 0} if how.endswith("stall") else {"enabled": False}
    wire.send("SetStallConfig", queue=queue, config=stalls)
    options.setdefault("backoff", HOUR)
    if how.endswith("timeout"):
        options["timeout"] = 60
    holder = broker.connect()
    id = wire.push(queue, DATA, **options)
    token = None
    if how.startswith("unleased"):
        assert holder.pull(queue)["id"] == id
    else:
        _, token = lease(holder, queue, lockTtl=80 if how == "expiry" else 59 if how == "stall" else HOUR)
    word = {"timeout": "failed", "close": "waiting", "fail": "failed", "move": "waiting"}.get(
        how.split("-")[-1], "stalled"
    )
    if how == "close":
        holder.close()
    elif how == "move":
        assert wire.send("MoveToWait", id=id, token=token) == {"ok": True}
    elif how.endswith("fail"):
        assert wire.send("FAIL", id=id, token=token, error="e") == {"ok": True}
    listener.event(10, eventType=word, jobId=id)
    listener.close()
    wire.send("SetStallConfig", queue=queue, config={"enabled": False})
    return Placed(id, token)


def deliver_again(wire: Any, queue: str, id: str, leased: bool) -> str | None:
    """Deliver a job that waits again, out of its backoff if need be; the new token."""
    if wire.state(id) == "delayed":
        wire.send("Promote", id=id)
    if leased:
        job, token = lease(wire, queue, lockTtl=HOUR)
        assert job["id"] == id
        return token
    assert wire.pull(queue)["id"] == id
    return None


@pytest.mark.parametrize("cmd", ["ACK", "FAIL"])
@pytest.mark.parametrize("how", ["timeout", "unleased-timeout"])
def test_after_a_timeout_the_outcome_changes_nothing(broker: Any, wire: Any, queue: str, how: str, cmd: str) -> None:
    """Rows 1 and 2, while the retry waits."""
    job = lose(broker, wire, queue, how)
    before = wire.job(job.id)
    token = {"token": job.token} if job.token else {}
    assert wire.send(cmd, id=job.id, **token) == NO_OP
    assert wire.job(job.id) == before
    assert wire.send("ACKB", ids=[job.id], tokens=[job.token]) == {
        "ok": True, "data": {"ignoredIds": [job.id], "ignoredIndices": [0]}
    }  # fmt: skip
    for wrong in ({"token": "wrong"}, {} if job.token else {"token": "wrong"}):
        assert wire.send(cmd, id=job.id, **wrong) == {"ok": False, "error": e1(job.id)}
    assert wire.job(job.id) == before


@pytest.mark.parametrize("again", [True, False], ids=["leased-again", "unleased-again"])
@pytest.mark.parametrize("cmd", ["ACK", "FAIL"])
def test_the_token_of_a_timed_out_delivery_stays_a_no_op(
    broker: Any, wire: Any, queue: str, cmd: str, again: bool
) -> None:
    """Row 1 goes before rows 4 to 7: even if a newer delivery is active, and after the job has ended."""
    job = lose(broker, wire, queue, "timeout")
    newer = deliver_again(wire, queue, job.id, again)
    assert wire.send(cmd, id=job.id, token=job.token) == NO_OP
    assert wire.state(job.id) == "active"
    assert wire.send("ACK", id=job.id, **({"token": newer} if newer else {})) == {"ok": True}
    assert wire.send(cmd, id=job.id, token=job.token) == NO_OP
    assert wire.job(job.id)["state"] == "completed"


def test_an_unleased_timeout_is_a_no_op_only_until_the_next_delivery(broker: Any, wire: Any, queue: str) -> None:
    """Row 2 ends where row 7 begins."""
    job = lose(broker, wire, queue, "unleased-timeout")
    deliver_again(wire, queue, job.id, leased=False)
    assert wire.send("ACK", id=job.id) == {"ok": True}
    assert wire.state(job.id) == "completed"
    assert wire.send("ACK", id=job.id) == {"ok": False, "error": e1(job.id)}


@pytest.mark.parametrize("cmd", ["ACK", "FAIL"])
@pytest.mark.parametrize("again", [True, False], ids=["leased-again", "unleased-again"])
@pytest.mark.parametrize("how", ["expiry", "stall", "close", "move"])
def test_the_token_of_an_earlier_delivery_is_refused(
    broker: Any, wire: Any, queue: str, how: str, again: bool, cmd: str
) -> None:
    """Row 4, also when the newer delivery carries no lease."""
    job = lose(broker, wire, queue, how)
    newer = deliver_again(wire, queue, job.id, again)
    before = wire.job(job.id)
    assert wire.send(cmd, id=job.id, token=job.token) == {"ok": False, "error": t2(job.id)}
    assert wire.job(job.id) == before
    assert wire.send("ACK", id=job.id, **({"token": newer} if newer else {})) == {"ok": True}


@pytest.mark.parametrize("how", ["expiry", "stall"])
def test_the_last_lost_lease_may_complete_the_job_from_the_queue(broker: Any, wire: Any, queue: str, how: str) -> None:
    """Row 8: with everything a completion has, and once."""
    dependent_queue = f"{queue}.after"
    job = lose(broker, wire, queue, how, uniqueKey="k")
    dependent = wire.push(dependent_queue, None, dependsOn=[job.id])
    waiter = broker.connect().start("WaitJob", id=job.id, timeout=60_000)
    wire.send("SubscribeEvents", queue=queue)
    for wrong in ({"token": "wrong"}, {"token": ""}, {}):
        assert wire.send("ACK", id=job.id, **wrong) == {"ok": False, "error": e1(job.id)}
    assert wire.send("ACK", id=job.id, token=job.token, result="late") == {"ok": True}
    event = wire.event(5, eventType="completed")
    assert (event["jobId"], event["data"]) == (job.id, "late")
    assert waiter.result(5) == {"ok": True, "completed": True, "result": "late"}
    done = wire.job(job.id)
    assert (done["state"], done["attempts"], done["stallCount"]) == ("completed", 1, 1)
    assert done["timeline"][-1]["state"] == "completed"
    assert done["completedAt"] is not None
    assert wire.state(dependent) == "waiting"
    assert wire.send("GetDeduplicationJobId", queue=queue, deduplicationId="k")["data"] == {"jobId": None}
    assert wire.pull(queue) is None
    assert wire.send("ACK", id=job.id, token=job.token) == {"ok": False, "error": e1(job.id)}


def test_an_unleased_stalled_delivery_may_complete_without_a_token(broker: Any, wire: Any, queue: str) -> None:
    """Row 9."""
    job = lose(broker, wire, queue, "unleased-stall")
    assert wire.send("ACK", id=job.id, token="x") == {"ok": False, "error": e1(job.id)}
    assert wire.send("ACK", id=job.id, result=1) == {"ok": True}
    assert wire.job(job.id)["returnvalue"] == 1


@pytest.mark.parametrize("how", ["fail", "unleased-fail", "close", "move"])
def test_no_other_late_ack_completes_a_queued_job(broker: Any, wire: Any, queue: str, how: str) -> None:
    """Row 10: a FAIL, a release and a move give the delivery up for good."""
    job = lose(broker, wire, queue, how)
    before = wire.job(job.id)
    for fields in ({"token": job.token or "x"}, {"token": "wrong"}, {}):
        for cmd in ("ACK", "FAIL"):
            assert wire.send(cmd, id=job.id, **fields) == {"ok": False, "error": e1(job.id)}, (cmd, fields)
    assert wire.job(job.id) == before


@pytest.mark.parametrize("how", ["expiry", "stall", "unleased-stall"])
def test_a_late_fail_does_not_touch_the_queued_try(broker: Any, wire: Any, queue: str, how: str) -> None:
    """Core 4.8: a no-op with the token of the lost delivery, E1 without one."""
    job = lose(broker, wire, queue, how)
    before = wire.job(job.id)
    if job.token:
        assert wire.send("FAIL", id=job.id, token=job.token, error="late") == NO_OP
    assert wire.send("FAIL", id=job.id, error="late") == {"ok": False, "error": e1(job.id)}
    assert wire.job(job.id) == before


def test_only_the_last_lost_delivery_counts(broker: Any, wire: Any, queue: str) -> None:
    """Row 8 is for the last lost token; the one before it is row 10 while the job waits."""
    job = lose(broker, wire, queue, "expiry")
    wire.send("SubscribeEvents", queue=queue)
    _, second = lease(wire, queue, lockTtl=80)
    wire.event(10, eventType="stalled", jobId=job.id)
    assert wire.send("ACK", id=job.id, token=job.token) == {"ok": False, "error": e1(job.id)}
    assert wire.send("ACK", id=job.id, token=second) == {"ok": True}


def test_a_lease_past_its_end_may_finish_until_it_is_reclaimed(wire: Any, queue: str) -> None:
    """Row 7: whichever comes first, the ACK right at the end of the lease is accepted."""
    for _ in range(5):
        id = wire.push(queue)
        _, token = lease(wire, queue, lockTtl=1)
        assert wire.send("ACK", id=id, token=token) == {"ok": True}
        assert wire.state(id) == "completed"


def test_a_new_generation_of_a_custom_id_forgets_the_old_tokens(broker: Any, wire: Any, queue: str) -> None:
    """R06: after the id is used again, an old token is just a wrong one."""
    job = lose(broker, wire, queue, "timeout", jobId=f"{queue}-c", maxAttempts=1)
    assert wire.state(job.id) == "failed"
    assert wire.send("ACK", id=job.id, token=job.token) == NO_OP
    assert wire.push(queue, None, jobId=job.id) == job.id
    assert wire.send("ACK", id=job.id, token=job.token) == {"ok": False, "error": e1(job.id)}
    _, token = lease(wire, queue)
    assert wire.send("ACK", id=job.id, token=job.token) == {"ok": False, "error": t2(job.id)}
    assert wire.send("ACK", id=job.id, token=token) == {"ok": True}


def test_the_tie_of_a_connection_is_to_the_delivery_not_to_the_id(broker: Any, wire: Any, queue: str) -> None:
    """Core 5.5: closing a connection takes no job away that was delivered to another one under the same id."""
    first = broker.connect()
    id = wire.push(queue, None, jobId=f"{queue}-c")
    assert first.pull(queue)["id"] == id
    assert wire.send("ACK", id=id) == {"ok": True}
    assert wire.push(queue, None, jobId=id) == id
    assert wire.pull(queue)["id"] == id
    proof = wire.push(f"{queue}.proof")
    assert first.pull(f"{queue}.proof")["id"] == proof
    first.close()
    assert wire.pull(f"{queue}.proof", timeout=5000)["id"] == proof
    assert wire.state(id) == "active"
    assert wire.send("ACK", id=id) == {"ok": True}


def test_a_nobody_has_no_outcome(wire: Any) -> None:
    for cmd in ("ACK", "FAIL"):
        assert wire.send(cmd, id=NOBODY, token="x") == {"ok": False, "error": e1(NOBODY)}
    assert wire.send("ACKB", ids=[NOBODY]) == {"ok": False, "error": e1(NOBODY)}
