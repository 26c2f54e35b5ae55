"""What the tests of the running server share: jobs brought into a state, pictures of a queue, raw frames."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgpack
import pytest

import gqueue.commands  # noqa: F401 - fills the table of commands
from gqueue.commands.registry import COMMANDS

#: Every state a job can be asked about. "leased" is active with a lease, "active" is active without one.
STATES = (
    "waiting",
    "prioritized",
    "delayed",
    "waiting-children",
    "active",
    "leased",
    "completed",
    "failed",
    "unknown",
)

#: Queries that together show a queue.
LOOKS = ("GetJobs", "GetJobCounts", "Count", "GetCountsPerPriority", "IsPaused", "GetStallConfig", "GetQueueLimits")

HOUR = 3_600_000  # ms
NOBODY = "018f0000-0000-7000-8000-000000000000"  # an id that was never given to a job
NO_OP = {"ok": True, "data": {"applied": False, "reason": "already-finalized"}}


def offered(cmd: str, field: str | None = None) -> bool:
    """Whether the broker knows a command, and the command a field (by its wire name)."""
    return cmd in COMMANDS and (field is None or any(field == each.wire for each in COMMANDS[cmd].fields))


def needs(cmd: str, field: str | None = None) -> None:
    """Skip the test while the broker does not offer a command or a field of it."""
    if not offered(cmd, field):
        pytest.skip(f"needs {cmd}{f' with {field}' if field else ''}, which this broker does not offer")


def e1(id: str) -> str:
    """The refusal of ACK and FAIL for a job that is not active (core 3.3)."""
    return f"Job not found or not in processing state: {id}"


def t1(id: str) -> str:
    """The refusal for a leased job when no token came (core 3.3)."""
    return f"Lock token required for job {id}"


def t2(id: str) -> str:
    """The refusal for a leased job when another token came (core 3.3)."""
    return f"Invalid or expired lock token for job {id}"


def frame(value: Any) -> bytes:
    """One frame holding `value` as MessagePack."""
    return framed(msgpack.packb(value))


def framed(payload: bytes) -> bytes:
    """One frame holding `payload` as it is."""
    return len(payload).to_bytes(4, "big") + payload


def until(probe: Callable[[], Any], timeout: float = 10.0, every: float = 0.01) -> Any:
    """Ask `probe` again until it answers something true, and return that; fails after `timeout` seconds.

    Only for changes that no event announces.
    """
    deadline = time.monotonic() + timeout
    while not (answer := probe()):
        assert time.monotonic() < deadline, f"still {answer!r} after {timeout} s"
        time.sleep(every)
    return answer


@dataclass(slots=True)
class Placed:
    """A job somebody brought into a state; `token` is that of its current lease."""

    id: str
    token: str | None = None


def lease(wire: Any, queue: str, **options: Any) -> tuple[dict[str, Any], str]:
    """Pull one job with a lease: (job, token)."""
    options.setdefault("owner", "tester")
    reply = wire.send("PULL", queue=queue, **options)
    assert reply["ok"] and reply["job"], reply
    return reply["job"], reply["token"]


def place(wire: Any, queue: str, state: str, **options: Any) -> Placed:
    """A new job of `queue` in `state`; the queue must hold no other claimable job."""
    if state == "unknown":
        return Placed(NOBODY)
    if state == "delayed":
        return Placed(wire.push(queue, {"n": 1}, delay=HOUR, **options))
    if state == "prioritized":
        return Placed(wire.push(queue, {"n": 1}, priority=7, **options))
    if state == "waiting-children":
        blocker = wire.push(f"{queue}.blockers", {"n": 0}, delay=HOUR)
        return Placed(wire.push(queue, {"n": 1}, dependsOn=[blocker], **options))
    id = wire.push(queue, {"n": 1}, **options)
    if state == "waiting":
        return Placed(id)
    if state == "leased":
        job, token = lease(wire, queue, lockTtl=HOUR)
        assert job["id"] == id
        return Placed(id, token)
    job = wire.pull(queue)
    assert job is not None and job["id"] == id
    if state == "completed":
        assert wire.send("ACK", id=id, result={"r": 1}) == {"ok": True}
    elif state == "failed":
        assert wire.send("FAIL", id=id, error="boom", unrecoverable=True) == {"ok": True}
    else:
        assert state == "active"
    return Placed(id)


def shown(state: str) -> str:
    """How the server names a state of STATES."""
    return "active" if state == "leased" else state


def picture(wire: Any, *queues: str) -> list[dict[str, Any]]:
    """Everything a client can see of these queues, asked in one write."""
    asked: list[dict[str, Any]] = []
    for queue in queues:
        asked += [{"cmd": cmd, "queue": queue} for cmd in LOOKS]
        asked.append({"cmd": "GetDeduplicationJobId", "queue": queue, "deduplicationId": "taken"})
    answers = wire.pipeline(asked)
    assert all(answer["ok"] for answer in answers), answers
    return [{key: value for key, value in answer.items() if key != "reqId"} for answer in answers]


def settled(wire: Any, queue: str) -> None:
    """Counters and listings of a queue nobody is changing agree with each other (core 16.7)."""
    counts = wire.counts(queue)
    listed: dict[str, int] = dict.fromkeys(counts, 0)
    jobs = wire.send("GetJobs", queue=queue, limit=1_000_000)["jobs"]
    for job in jobs:
        listed[job["state"]] += 1
    assert listed == counts
    for state, number in counts.items():
        assert len(wire.send("GetJobs", queue=queue, state=state, limit=1_000_000)["jobs"]) == number, state
    assert wire.send("Count", queue=queue)["count"] == len(jobs)
    queued = counts["waiting"] + counts["prioritized"] + counts["delayed"]
    assert sum(wire.send("GetCountsPerPriority", queue=queue)["counts"].values()) == queued


def swept(wire: Any, queue: str, times: int = 2) -> None:
    """Return after the broker's cleanup has run `times` times from now on.

    An empty queue is forgotten by the cleanup alone (core 9.6), so its name tells when it has run.
    """
    for n in range(times):
        name = f"{queue}.sweep{n}"
        wire.send("Cancel", id=wire.push(name))
        until(lambda name=name: name not in wire.send("ListQueues")["queues"], timeout=15)


def types_of(events: list[dict[str, Any]], id: str) -> list[str]:
    """The types of the events of one job, in order."""
    return [event["eventType"] for event in events if event["jobId"] == id]


def heard(wire: Any, other: Any, queue: str, timeout: float = 5.0) -> list[dict[str, Any]]:
    """Every event that reached `wire` up to now. `wire` is subscribed to `queue`; `other` marks the end with a Pause
    and a Resume, which both send an event in any state."""
    other.send("Pause", queue=queue)
    other.send("Resume", queue=queue)
    events: list[dict[str, Any]] = []
    while not events or events[-1]["eventType"] != "resumed":
        events.append(wire.event(timeout))
    return [event for event in events if event["eventType"] not in ("paused", "resumed")]
