"""Every refusal of core 1 to 9 and 12 as one row: the command, the exact text, and that nothing has changed.

Texts of flows (core 4.3), of the dead-letter commands and of schedules have tables of their own.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import msgpack
import pytest

from tests.server.scenes import HOUR, NOBODY, Placed, framed, lease, needs, offered, picture, place, until

NAN, INF = math.nan, math.inf
DAY = 86_400_000  # ms
YEAR = 31_536_000_000  # ms
SAFE = 2**53 - 1
TOO_LARGE = "Job data too large (max 10MB)"
BAD_NAME = "Job name must be a non-empty string of at most 256 characters"
BAD_TAGS = "tags must be an array of strings of at most 256 characters"
BAD_BACKOFF = "backoff.type must be 'fixed' or 'exponential'"
BAD_SIZE = "group.maxSize must be a positive safe integer"
BAD_REPEAT = "repeat requires exactly one of every or pattern"
E1 = "Job not found or not in processing state: "
L1 = "Lock not found or invalid token"
H1 = "Job not found or not active (or invalid token)"
C1 = "Job not found or cannot be cancelled"
U1 = "Job not found or cannot be updated"
P1 = "Job not found or not in queue"
R1 = "Job not found or not delayed"
D1 = "Job not found or cannot change delay"
M1 = "Job is not active"


class Big:
    """Stands for a text of `size` characters, so that the names of tests stay short."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __repr__(self) -> str:
        return f"text[{self.size}]"


@dataclass(slots=True)
class Row:
    """One refusal. "$name" in a field or in the text stands for a job, a token or a queue of the scene."""

    cmd: str
    fields: dict[str, Any]
    text: str

    def name(self) -> str:
        told = ",".join(f"{key}={value!r}" for key, value in self.fields.items() if key not in ("queue", "name"))
        return f"{self.cmd}({told})"[:90]


# ---------------------------------------------------------------- the tables


def number(name: str, low: float | None = None, high: float | None = None, *, whole: bool = False) -> list[Any]:
    """The refusals of a number: (value, text) each. Bounds are inclusive."""
    rows: list[Any] = [(bad, f"{name} must be a number") for bad in ("5", True, [1], {"a": 1})]
    rows += [(bad, f"{name} must be a finite number") for bad in (NAN, INF, -INF)]
    if whole:
        rows.append((1.5, f"{name} must be an integer"))
    if low is not None:
        rows += [(bad, f"{name} must be at least {low}") for bad in (low - 1, -(2**40))]
    if high is not None:
        rows += [(bad, f"{name} must be at most {high}") for bad in (high + 1, float(high * 2))]
    return rows


def safe_integer(name: str) -> list[Any]:
    return [(bad, f"{name} must be a positive safe integer") for bad in (0, -1, 1.5, "2", True, NAN, SAFE + 1)]


def boolean(name: str) -> list[Any]:
    return [(bad, f"{name} must be a boolean") for bad in (1, 0, "true", [True])]


def text(name: str) -> list[Any]:
    return [(bad, f"{name} must be a string") for bad in (5, True, ["a"], {"a": 1})]


def array_of_texts(name: str) -> list[Any]:
    return [("a", f"{name} must be an array"), ({}, f"{name} must be an array"), ([5], f"{name}[0] must be a string"),
            (["a", None], f"{name}[1] must be a string")]  # fmt: skip


def options() -> Iterator[tuple[dict[str, Any], str]]:
    """Every refusal that one job's options can meet, for PUSH and for a member of PUSHB: (options, text)."""
    single: dict[str, list[Any]] = {
        "name": [(bad, BAD_NAME) for bad in ("", Big(257), 5, ["a"], True)],
        "priority": number("priority", -1_000_000, 1_000_000, whole=True),
        "delay": number("delay", 0, YEAR),
        "maxAttempts": number("maxAttempts", 1, 1000, whole=True),
        "ttl": number("ttl", 0, YEAR),
        "timeout": number("timeout", 0, DAY),
        "stallTimeout": number("stallTimeout", 0, DAY),
        "stackTraceLimit": number("stackTraceLimit", 0, 10_000, whole=True),
        "keepLogs": number("keepLogs", 0, 1_000_000, whole=True),
        "sizeLimit": [*number("sizeLimit", 0, 10_485_760, whole=True), (5, "Job data exceeds sizeLimit of 5 bytes")],
        "timestamp": number("timestamp", 0, SAFE),
        "debounceTtl": number("debounceTtl", 0),
        "debounceId": text("debounceId"),
        "uniqueKey": [*text("uniqueKey"), (Big(1025), "uniqueKey must be at most 1024 characters")],
        "dependsOn": [*array_of_texts("dependsOn"), (["nobody"], "Dependency job not found: nobody"),
                      (["$waiting", "nobody"], "Dependency job not found: nobody")],
        "childrenIds": array_of_texts("childrenIds"),
        "parentId": text("parentId"),
        "tags": [(bad, BAD_TAGS) for bad in ("a", {}, [5], ["ok", Big(257)])],
        "groupId": [*text("groupId"), ("", "groupId must be a non-empty string"),
                    (Big(257), "groupId must be at most 256 characters"),
                    ("a\0b", "groupId must not contain NUL characters")],
        "groupMaxSize": [(bad, BAD_SIZE) for bad, _ in safe_integer("")],
        "backoff": [
            *[row for row in number("backoff", 0, DAY) if not isinstance(row[0], dict)],
            ({}, BAD_BACKOFF), ({"delay": 5}, BAD_BACKOFF), ({"type": "linear", "delay": 5}, BAD_BACKOFF),
            ({"type": 5, "delay": 5}, BAD_BACKOFF), ({"type": "fixed"}, "backoff.delay is required"),
            ({"type": "fixed", "delay": None}, "backoff.delay is required"),
            *[({"type": "exponential", "delay": bad}, said) for bad, said in number("backoff.delay", 0, DAY)],
            *[({"type": "fixed", "delay": 5, "maxDelay": bad}, said)
              for bad, said in number("backoff.maxDelay", 0, DAY)],
        ],
        "dedup": [
            *[(bad, "dedup must be an object") for bad in ("a", 5, True, [1])],
            *[({"ttl": bad}, said) for bad, said in number("dedup.ttl", 0)],
            *[({"extend": bad}, said) for bad, said in boolean("dedup.extend")],
            *[({"replace": bad}, said) for bad, said in boolean("dedup.replace")],
        ],
        "repeat": [
            *[(bad, "repeat must be an object") for bad in ("a", 5, True, [1])],
            ({}, BAD_REPEAT), ({"every": 5, "pattern": "* * * * *"}, BAD_REPEAT), ({"limit": 5}, BAD_REPEAT),
            *[({"every": bad}, "repeat.every must be a positive finite number")
              for bad in (0, -1, NAN, INF, "5", True)],
            *[({"every": HOUR, name: bad}, f"repeat.{name} must be a finite timestamp")
              for name in ("startDate", "endDate") for bad in ("soon", NAN, True)],
            ({"every": HOUR, "endDate": 1_000_000_000_000}, "repeat.endDate is in the past"),
        ],
    }  # fmt: skip
    for name in ("failParentOnFailure", "removeDependencyOnFailure", "ignoreDependencyOnFailure",
                 "continueParentOnFailure", "lifo", "durable"):  # fmt: skip
        single[name] = boolean(name)
    for name, rows in single.items():
        for bad, said in rows:
            yield {name: bad}, said

    for bad in ("5", True, NAN, INF, [1]):
        yield {"groupId": "g", "priority": bad}, "group.priority must be a finite number"
    yield {"groupId": "g", "priority": 1.5}, "group.priority must be an integer"
    for bad in (-1, 2_097_152):
        yield {"groupId": "g", "priority": bad}, "group.priority must be between 0 and 2097151"
    yield {"data": {"name": ""}, "name": None}, BAD_NAME  # the legacy name
    yield {"data": {"name": Big(257)}, "name": None}, BAD_NAME
    yield ({"repeat": {"every": HOUR}, "dependsOn": ["$waiting"]},
           "repeat jobs cannot participate in parent or dependency relationships")  # fmt: skip


def required(cmd: str, fields: dict[str, Any], *names: str) -> Iterator[Row]:
    """The refusals of fields that must be there: absent and nil."""
    for name in names:
        others = {key: value for key, value in fields.items() if key != name}
        yield Row(cmd, others, f"{name} is required")
        yield Row(cmd, {**others, name: None}, f"{name} is required")


def pushes() -> Iterator[Row]:
    base = {"queue": "$queue", "name": "j", "data": {"n": 1}}
    good = {"name": "j", "data": {"n": 1}}
    for given, said in options():
        yield Row("PUSH", {**base, **given}, said)
        yield Row("PUSHB", {"queue": "$queue", "jobs": [good, {**good, **given}]}, f"jobs[1]: {said}")
    for bad, said in (*text("jobId"), (Big(1025), "jobId must be at most 1024 characters")):
        yield Row("PUSH", {**base, "jobId": bad}, said)
    yield Row("PUSH", {**base, "repeat": {"every": HOUR}, "jobId": "r"},
              "repeat jobs cannot use JobOptions.jobId; use repeat.jobId instead")  # fmt: skip
    full = {"groupId": "full", "groupMaxSize": 1}
    yield Row("PUSH", {**base, **full}, "Group full has reached its maximum size of 1")
    yield Row(
        "PUSHB", {"queue": "$queue", "jobs": [good, {**good, **full}]}, "Group full has reached its maximum size of 1"
    )
    owned = {"uniqueKey": "owned", "dedup": {"replace": True}}
    yield Row("PUSH", {**base, **owned}, "Cannot replace deduplicated job $owner because live jobs depend on it")
    yield Row("PUSH", {**base, "jobId": "$proof"}, "Custom ID $proof still has unresolved dependency consumers")
    self = {**good, "customId": "me", "dependsOn": ["me"]}
    yield Row("PUSHB", {"queue": "$queue", "jobs": [self]}, "jobs[0]: Job cannot depend on itself: me")
    yield from required("PUSHB", {"queue": "$queue", "jobs": []}, "jobs")
    for jobs, said in (("a", "jobs must be an array"), ({}, "jobs must be an array"), (5, "jobs must be an array"),
                       ([good, 5], "jobs[1] must be an object"), (["a"], "jobs[0] must be an object"),
                       ([None], "jobs[0] must be an object")):  # fmt: skip
        yield Row("PUSHB", {"queue": "$queue", "jobs": jobs}, said)


def pulls() -> Iterator[Row]:
    for cmd, more in (("PULL", {}), ("PULLB", {"count": 2})):
        base = {"queue": "$queue", **more}
        for bad, said in number("timeout", 0, 60_000):
            yield Row(cmd, {**base, "timeout": bad}, said)
        for bad, said in text("owner"):
            yield Row(cmd, {**base, "owner": bad}, said)
        for bad, said in number("lockTtl", 1, DAY):
            yield Row(cmd, {**base, "owner": "w", "lockTtl": bad}, said)
        for bad in ("a", 5, True, [1]):
            yield Row(cmd, {**base, "group": bad}, "group must be an object")
            yield Row(cmd, {**base, "group": {"limit": bad}}, "group.limit must be an object")
        for bad, said in safe_integer("group.concurrency"):
            yield Row(cmd, {**base, "group": {"concurrency": bad}}, said)
        for bad, said in safe_integer("group.limit.max"):
            yield Row(cmd, {**base, "group": {"limit": {"max": bad, "duration": 5}}}, said)
        for bad, said in safe_integer("group.limit.duration"):
            yield Row(cmd, {**base, "group": {"limit": {"max": 1, "duration": bad}}}, said)
        yield Row(cmd, {**base, "group": {"affinity": 5}}, "group.affinity must be a string or null")
    yield from required("PULLB", {"queue": "$queue", "count": 2}, "count")
    for bad, said in number("count", 1, 1000, whole=True):
        yield Row("PULLB", {"queue": "$queue", "count": bad}, said)


def settlements() -> Iterator[Row]:
    inactive = ("$waiting", "$delayed", "$blocked", "$completed", "$failed", NOBODY)
    for cmd in ("ACK", "FAIL"):
        yield from required(cmd, {"id": "$active"}, "id")
        for bad, said in text("token"):
            yield Row(cmd, {"id": "$leased", "token": bad}, said)
        for id in inactive:
            yield Row(cmd, {"id": id}, f"{E1}{id}")
            yield Row(cmd, {"id": id, "token": "x"}, f"{E1}{id}")
        for fields in ({}, {"token": ""}, {"token": None}):
            yield Row(cmd, {"id": "$leased", **fields}, "Lock token required for job $leased")
        yield Row(cmd, {"id": "$leased", "token": "x"}, "Invalid or expired lock token for job $leased")
    pair = {"ids": ["$active", "$leased"]}
    yield from required("ACKB", pair, "ids")
    for name in ("ids", "tokens"):
        for bad, said in (("a", f"{name} must be an array"), (["$active", 5], f"{name}[1] must be a string")):
            yield Row("ACKB", {**pair, name: bad}, said)
    for name in ("results", "removeOnCompletes"):
        yield Row("ACKB", {**pair, name: "a"}, f"{name} must be an array")
    for name in ("tokens", "results", "removeOnCompletes"):
        for wrong in ([], [None], [None] * 3):
            yield Row("ACKB", {**pair, name: wrong}, f"ACKB {name} length must match ids length")
    for tokens in ([None, None], ["", ""], ["x", ""]):
        yield Row("ACKB", {**pair, "tokens": tokens}, "Lock token required for job $leased")
    yield Row("ACKB", pair, "Lock token required for job $leased")
    yield Row("ACKB", {**pair, "tokens": [None, "x"]}, "Invalid or expired lock token for job $leased")
    for id in inactive:
        yield Row("ACKB", {"ids": ["$active", id]}, f"{E1}{id}")
    yield Row("ACKB", {"ids": ["$active", "$active"]}, f"{E1}$active")


def leases() -> Iterator[Row]:
    for cmd, said in (("ExtendLock", L1), ("JobHeartbeat", H1)):
        yield from required(cmd, {"id": "$leased"}, "id")
        for id in ("$waiting", "$delayed", "$blocked", "$completed", "$failed", NOBODY):
            yield Row(cmd, {"id": id}, said)
            yield Row(cmd, {"id": id, "token": "x", "duration": 5}, said)
        yield Row(cmd, {"id": "$leased", "token": "x"}, said)
        for bad, said in text("token"):
            yield Row(cmd, {"id": "$leased", "token": bad}, said)
    yield Row("ExtendLock", {"id": "$active"}, L1)
    for bad, said in number("duration", 1, DAY):
        yield Row("ExtendLock", {"id": "$leased", "token": "$token", "duration": bad}, said)
    all_three = {"ids": ["$leased"], "tokens": ["$token"], "durations": [5]}
    yield from required("ExtendLocks", all_three, "ids", "tokens", "durations")
    for name in ("tokens", "durations"):
        yield Row("ExtendLocks", {**all_three, name: []}, f"ExtendLocks {name} length must match ids length")
        yield Row("ExtendLocks", {**all_three, name: "a"}, f"{name} must be an array")
    yield from required("JobHeartbeatB", {"ids": ["$leased"]}, "ids")
    yield Row("JobHeartbeatB", {"ids": "a"}, "ids must be an array")
    yield Row("JobHeartbeatB", {"ids": [5]}, "ids[0] must be a string")
    yield Row("JobHeartbeatB", {"ids": ["$leased"], "tokens": []}, "JobHeartbeatB tokens length must match ids length")
    yield from required("SetStallConfig", {"queue": "$queue", "config": {}}, "config")
    for bad in ("a", 5, [1]):
        yield Row("SetStallConfig", {"queue": "$queue", "config": bad}, "config must be an object")


def queries() -> Iterator[Row]:
    for cmd in ("GetJob", "GetState", "GetResult", "GetProgress", "GetChildrenValues", "GetLogs", "WaitJob"):
        yield from required(cmd, {"id": "$waiting"}, "id")
    for cmd in ("GetJob", "GetProgress", "WaitJob"):
        yield Row(cmd, {"id": NOBODY}, "Job not found")
    yield from required("GetJobByCustomId", {"customId": "x"}, "customId")
    for id in (NOBODY, "$waiting"):  # a generated id is no custom id
        yield Row("GetJobByCustomId", {"customId": id}, "Job not found")
    for id, state in (("$waiting", "waiting"), ("$delayed", "delayed"), ("$blocked", "waiting-children"),
                      ("$completed", "completed"), ("$failed", "failed")):  # fmt: skip
        yield Row("GetProgress", {"id": id}, f"Job is not active (current state: {state})")
    for name in ("limit", "offset"):
        for bad, said in number(name, 0, whole=True):
            yield Row("GetJobs", {"queue": "$queue", name: bad}, said)
    for bad, said in number("timeout", 0, 600_000):
        yield Row("WaitJob", {"id": "$waiting", "timeout": bad}, said)
    for cmd in ("GetDeduplicationJobId", "RemoveDeduplicationKey"):
        yield from required(cmd, {"queue": "$queue", "deduplicationId": "x"}, "deduplicationId")
    yield from required("RemoveJobDeduplicationKey", {"id": "x"}, "id")


def controls() -> Iterator[Row]:
    def at(cmd: str, said: str, *ids: str, **fields: Any) -> Iterator[Row]:
        for id in ids:
            yield Row(cmd, {"id": id, **fields}, said)

    done = ("$completed", "$failed", NOBODY)
    for cmd in ("Cancel", "Update", "Promote", "MoveToWait", "Discard", "MoveToWaitingChildren"):
        yield from required(cmd, {"id": "$waiting"}, "id")
    yield from at("Cancel", C1, "$active", "$leased", *done)
    yield from at("Update", U1, *done, data={})
    yield from at("Promote", R1, "$waiting", "$blocked", "$active", "$leased", *done)
    yield from at("Discard", "Job not found", *done)
    yield from at("MoveToWaitingChildren", M1, "$waiting", "$delayed", "$blocked", *done)
    for id, state in (("$blocked", "waiting-children"), ("$completed", "completed"), (NOBODY, "unknown")):
        yield from at("MoveToWait", f"Cannot move job from state '{state}' to waiting", id)
    for cmd, more in (("Discard", {}), ("MoveToWait", {}), ("MoveToWaitingChildren", {}),
                      ("MoveToDelayed", {"delay": 5}), ("ChangeDelay", {"delay": 5})):  # fmt: skip
        yield from at(cmd, "Lock token required for job $leased", "$leased", **more)
        yield from at(cmd, "Lock token required for job $leased", "$leased", token="", **more)
        yield from at(cmd, "Invalid or expired lock token for job $leased", "$leased", token="x", **more)
        for bad, said in text("token"):
            yield from at(cmd, said, "$leased", token=bad, **more)

    yield Row("Update", {"id": "$waiting", "data": Big(10_485_760)}, TOO_LARGE)
    yield Row("Update", {"id": "$limited", "data": Big(50)}, "Job data exceeds sizeLimit of 20 bytes")

    yield from required("Progress", {"id": "$active", "progress": 5}, "id", "progress")
    for bad, said in number("progress"):
        yield Row("Progress", {"id": "$active", "progress": bad}, said)
    for bad, said in text("message"):
        yield Row("Progress", {"id": "$active", "progress": 5, "message": bad}, said)
    yield Row("Progress", {"id": NOBODY, "progress": 5}, "Job not found")
    yield Row("Progress", {"id": "$leased", "progress": 5, "token": "x"},
              "Invalid or expired lock token for job $leased")  # fmt: skip
    for id, state in (("$waiting", "waiting"), ("$delayed", "delayed"), ("$blocked", "waiting-children"),
                      ("$completed", "completed"), ("$failed", "failed")):  # fmt: skip
        yield Row("Progress", {"id": id, "progress": 5}, f"Job is not active (current state: {state})")
        if state not in ("waiting", "delayed"):
            yield Row("MoveToDelayed", {"id": id, "delay": 5}, f"Job is not active (current state: {state})")
    yield Row("MoveToDelayed", {"id": NOBODY, "delay": 5}, "Job not found")

    yield from required("ChangePriority", {"id": "$waiting", "priority": 5}, "id", "priority")
    for bad, said in number("priority", -1_000_000, 1_000_000, whole=True):
        yield Row("ChangePriority", {"id": "$waiting", "priority": bad}, said)
    for bad in (-1, 2_097_152):
        yield Row("ChangePriority", {"id": "$grouped", "priority": bad}, "group.priority must be between 0 and 2097151")
    for bad, said in boolean("lifo"):
        yield Row("ChangePriority", {"id": "$waiting", "priority": 1, "lifo": bad}, said)
    yield from at("ChangePriority", P1, "$blocked", "$active", "$leased", *done, priority=1)

    for cmd in ("MoveToDelayed", "ChangeDelay"):
        yield from required(cmd, {"id": "$waiting", "delay": 5}, "id", "delay")
        for bad, said in number("delay", 0, YEAR):
            yield Row(cmd, {"id": "$waiting", "delay": bad}, said)
    yield from at("ChangeDelay", D1, "$blocked", *done, delay=5)
    for cmd in ("PromoteJobs", "RetryCompleted"):
        for bad in ("5", True, [1]):
            yield Row(cmd, {"queue": "$queue", "count": bad}, "count must be a number")
    yield from required("Clean", {"queue": "$queue", "grace": 0}, "grace")
    for bad, said in number("grace", 0):
        yield Row("Clean", {"queue": "$queue", "grace": bad}, said)


def logs_and_workers() -> Iterator[Row]:
    yield from required("AddLog", {"id": "$waiting", "message": "m"}, "id", "message")
    for bad in ("debug", "INFO", ""):
        yield Row("AddLog", {"id": "$waiting", "message": "m", "level": bad}, "level must be one of info, warn, error")
    for bad, said in text("message"):
        yield Row("AddLog", {"id": "$waiting", "message": bad}, said)
    yield Row("AddLog", {"id": NOBODY, "message": "m"}, "Job not found")
    yield from required("ClearLogs", {"id": "$waiting"}, "id")
    worker = {"name": "w", "queues": ["$queue"]}
    yield from required("RegisterWorker", worker, "name", "queues")
    for bad, said in array_of_texts("queues"):
        yield Row("RegisterWorker", {**worker, "queues": bad}, said)
    for bad, said in text("name"):
        yield Row("RegisterWorker", {**worker, "name": bad}, said)
    yield from required("Heartbeat", {"id": "x"}, "id")
    yield Row("Heartbeat", {"id": NOBODY}, "Worker not found")
    yield from required("UnregisterWorker", {"workerId": "x"}, "workerId")
    yield Row("UnregisterWorker", {"workerId": NOBODY}, "Worker not found")


def limits_and_groups() -> Iterator[Row]:
    for cmd in ("RateLimit", "SetConcurrency"):
        for bad in ("x", NAN, INF, True, [1], {}):
            yield Row(cmd, {"queue": "$queue", "limit": bad}, "limit must be a finite number")
    for bad in (0, -1, 0.5, "0"):
        yield Row("RateLimit", {"queue": "$queue", "limit": bad}, "limit must be at least 1")
    yield Row("SetConcurrency", {"queue": "$queue", "limit": -1}, "limit must be at least 0")
    more: dict[str, dict[str, Any]] = {
        "GetGroupJobsCount": {}, "GetGroupActiveCount": {}, "GetGroupRateLimit": {}, "RemoveGroupRateLimit": {},
        "GetGroupRateLimitTtl": {}, "GetGroupConcurrency": {}, "RemoveGroupConcurrency": {}, "PauseGroup": {},
        "ResumeGroup": {}, "IsGroupPaused": {}, "SetGroupRateLimit": {"max": 1, "duration": 5},
        "SetGroupConcurrency": {"concurrency": 1}, "RateLimitGroup": {"duration": 5},
    }  # fmt: skip
    for cmd, fields in more.items():
        base = {"queue": "$queue", "groupId": "g", **fields}
        yield from required(cmd, base, "groupId")
        for bad, said in ((5, "groupId must be a string"), ("", "groupId must be a non-empty string"),
                          (Big(257), "groupId must be at most 256 characters"),
                          ("a\0", "groupId must not contain NUL characters")):  # fmt: skip
            yield Row(cmd, {**base, "groupId": bad}, said)
        for name in fields:
            for bad, said in safe_integer(name):
                yield Row(cmd, {**base, name: bad}, said)


#: Each command that takes a queue, with its other fields as they should be.
TAKES_QUEUE: dict[str, dict[str, Any]] = {
    "PUSH": {"name": "j", "data": 1}, "PUSHB": {"jobs": [{"name": "j", "data": 1}]}, "PULL": {}, "PULLB": {"count": 1},
    "SetStallConfig": {"config": {"maxStalls": 9}}, "GetStallConfig": {},
    "GetDeduplicationJobId": {"deduplicationId": "k"},
    "RemoveDeduplicationKey": {"deduplicationId": "k"}, "GetJobs": {}, "GetJobCounts": {}, "GetCountsPerPriority": {},
    "Count": {}, "PromoteJobs": {}, "Pause": {}, "Resume": {}, "IsPaused": {}, "Drain": {}, "Obliterate": {},
    "Clean": {"grace": 0}, "RetryCompleted": {}, "RateLimit": {"limit": 5}, "RateLimitClear": {},
    "SetConcurrency": {"limit": 5}, "ClearConcurrency": {}, "GetQueueLimits": {}, "SubscribeEvents": {},
    "GetGroupJobsCount": {"groupId": "g"}, "GetGroupsJobsCount": {}, "PauseGroup": {"groupId": "g"},
    "SetGroupConcurrency": {"groupId": "g", "concurrency": 1},
}  # fmt: skip


def queue_names() -> Iterator[Row]:
    bad: list[tuple[Any, str]] = [(value, "Queue name is required") for value in (None, "")]
    bad.append((Big(257), "Queue name too long (max 256 characters)"))
    bad += [(value, "Queue name contains invalid characters") for value in ("a b", "é", "a/b", "a\n", "a*", "\0")]
    for cmd, fields in TAKES_QUEUE.items():
        yield Row(cmd, dict(fields), "Queue name is required")
        for value, said in bad if cmd == "PUSH" else (bad[0], bad[1], bad[2], bad[3]):
            yield Row(cmd, {"queue": value, **fields}, said)


# ---------------------------------------------------------------- the scene they are tried on


@dataclass(slots=True)
class Scene:
    """One queue with a job in each state; every refusal must leave all of it as it is."""

    conn: Any
    queue: str
    names: dict[str, str] = field(default_factory=dict)
    before: list[Any] = field(default_factory=list)
    queues: set[str] = field(default_factory=set)

    def fill(self, value: Any) -> Any:
        """`value` with the scene's ids for "$name" and real texts for Big, at any depth."""
        if isinstance(value, str):
            for name, real in self.names.items():
                value = value.replace(f"${name}", real)
            return value
        if isinstance(value, Big):
            return "x" * value.size
        if isinstance(value, list):
            return [self.fill(item) for item in value]
        if isinstance(value, dict):
            return {key: self.fill(item) for key, item in value.items()}
        return value

    def look(self) -> list[Any]:
        """What clients can see of it."""
        look: list[Any] = picture(self.conn, self.queue, self.names["other"])
        asked: list[dict[str, Any]] = [{"cmd": "GetLogs", "id": self.names["waiting"]}, {"cmd": "ListWorkers"}]
        asked += [
            {"cmd": cmd, "queue": self.queue, "groupId": group}
            for group in ("full", "g")
            for cmd in ("GetGroupJobsCount", "IsGroupPaused", "GetGroupConcurrency", "GetGroupRateLimit")
            if offered(cmd)
        ]
        answers = self.conn.pipeline(asked)
        assert all(answer["ok"] for answer in answers), answers
        return [*look, *(answer["data"] for answer in answers)]


def build(conn: Any, queue: str) -> Scene:
    """A new scene on `conn`."""
    scene = Scene(conn, queue)
    other = f"{queue}.blockers"
    names = scene.names
    names["other"] = other
    stalls = {"enabled": False}
    for name in (queue, other):
        conn.send("SetStallConfig", queue=name, config=stalls)
    placed: dict[str, Placed] = {}
    for state in ("active", "leased", "completed", "failed", "waiting-children", "delayed"):
        placed[state] = place(conn, queue, state)
    names["proof"] = f"{queue}-proof"
    conn.push(queue, None, jobId=names["proof"], removeOnComplete=True)
    assert conn.pull(queue)["id"] == names["proof"]
    blocker = conn.push(other, None, delay=HOUR)
    conn.push(queue, None, dependsOn=[names["proof"], blocker])
    assert conn.send("ACK", id=names["proof"]) == {"ok": True}
    names["owner"] = conn.push(queue, None, uniqueKey="owned")
    conn.push(queue, None, dependsOn=[names["owner"]])
    conn.push(queue, None, uniqueKey="taken")
    names["grouped"] = conn.push(queue, None, groupId="full")
    names["limited"] = conn.push(queue, "x", sizeLimit=20)
    placed["waiting"] = place(conn, queue, "waiting")
    names["blocked"] = placed.pop("waiting-children").id
    token = placed["leased"].token
    assert token is not None
    names["token"] = token
    for state, job in placed.items():
        names[state] = job.id
    names["queue"] = queue  # last: a name must not be a prefix of one that is tried after it
    scene.names = dict(sorted(names.items(), key=lambda item: -len(item[0])))
    scene.before = scene.look()
    scene.queues = set(conn.send("ListQueues")["queues"])
    return scene


@pytest.fixture(scope="module")
def scenes() -> dict[int, Scene]:
    return {}


@pytest.fixture
def scene(broker: Any, queue: str, scenes: dict[int, Scene]) -> Scene:
    """The scene of this broker, built anew after a refusal that did not leave it as it was."""
    if broker.pid not in scenes:
        scenes[broker.pid] = build(broker.connect(), queue)
    return scenes[broker.pid]


def rows(*tables: Iterable[Row]) -> list[Any]:
    every = [row for table in tables for row in table]
    return [pytest.param(row, id=row.name()) for row in every]


def refused(scene: Scene, scenes: dict[int, Scene], broker: Any, row: Row) -> None:
    needs(row.cmd)
    if "repeat" in str(row.fields):
        needs("PUSH", "repeat")
    fields = {key: scene.fill(value) for key, value in row.fields.items()}
    expected = scene.fill(row.text)
    try:
        assert scene.conn.send(row.cmd, **fields) == {"ok": False, "error": expected}
        after = scene.look()
        # Listed again one by one: what another test left behind may be forgotten meanwhile, nothing may be new.
        assert set(scene.conn.send("ListQueues")["queues"]) <= scene.queues
        assert after == scene.before
    except BaseException:
        scenes.pop(broker.pid, None)
        raise


@pytest.mark.parametrize("row", rows(pushes()))
def test_a_push_is_refused(row: Row, broker: Any, scene: Scene, scenes: dict[int, Scene]) -> None:
    refused(scene, scenes, broker, row)


@pytest.mark.parametrize("row", rows(pulls()))
def test_a_pull_is_refused(row: Row, broker: Any, scene: Scene, scenes: dict[int, Scene]) -> None:
    refused(scene, scenes, broker, row)


@pytest.mark.parametrize("row", rows(settlements()))
def test_a_settlement_is_refused(row: Row, broker: Any, scene: Scene, scenes: dict[int, Scene]) -> None:
    refused(scene, scenes, broker, row)


@pytest.mark.parametrize("row", rows(leases()))
def test_a_lease_command_is_refused(row: Row, broker: Any, scene: Scene, scenes: dict[int, Scene]) -> None:
    refused(scene, scenes, broker, row)


@pytest.mark.parametrize("row", rows(queries()))
def test_a_query_is_refused(row: Row, broker: Any, scene: Scene, scenes: dict[int, Scene]) -> None:
    refused(scene, scenes, broker, row)


@pytest.mark.parametrize("row", rows(controls()))
def test_a_control_command_is_refused(row: Row, broker: Any, scene: Scene, scenes: dict[int, Scene]) -> None:
    refused(scene, scenes, broker, row)


@pytest.mark.parametrize("row", rows(logs_and_workers()))
def test_a_log_or_worker_command_is_refused(row: Row, broker: Any, scene: Scene, scenes: dict[int, Scene]) -> None:
    refused(scene, scenes, broker, row)


@pytest.mark.parametrize("row", rows(limits_and_groups()))
def test_a_limit_or_group_command_is_refused(row: Row, broker: Any, scene: Scene, scenes: dict[int, Scene]) -> None:
    refused(scene, scenes, broker, row)


@pytest.mark.parametrize("row", rows(queue_names()))
def test_a_queue_name_is_refused(row: Row, broker: Any, scene: Scene, scenes: dict[int, Scene]) -> None:
    refused(scene, scenes, broker, row)


# ---------------------------------------------------------------- what the rows cannot say


#: One fault for each check of a push in the order of core 2.4: (fields, text).
IN_ORDER: list[tuple[dict[str, Any], str]] = [
    ({"queue": "a b"}, "Queue name contains invalid characters"),
    ({"data": Big(10_485_760)}, TOO_LARGE),
    ({"groupId": 5}, "groupId must be a string"),
    ({"priority": 1.5}, "priority must be an integer"),
    ({"delay": -1}, "delay must be at least 0"),
    ({"timeout": -1}, "timeout must be at least 0"),
    ({"maxAttempts": 0}, "maxAttempts must be at least 1"),
    ({"backoff": -1}, "backoff must be at least 0"),
    ({"ttl": -1}, "ttl must be at least 0"),
    ({"stallTimeout": -1}, "stallTimeout must be at least 0"),
    ({"dedup": {"ttl": -1}}, "dedup.ttl must be at least 0"),
    ({"debounceId": 5}, "debounceId must be a string"),
    ({"debounceTtl": -1}, "debounceTtl must be at least 0"),
    ({"tags": 5}, BAD_TAGS),
    ({"lifo": 5}, "lifo must be a boolean"),
    ({"durable": 5}, "durable must be a boolean"),
    ({"failParentOnFailure": 5}, "failParentOnFailure must be a boolean"),
    ({"stackTraceLimit": -1}, "stackTraceLimit must be at least 0"),
    ({"keepLogs": -1}, "keepLogs must be at least 0"),
    ({"sizeLimit": -1}, "sizeLimit must be at least 0"),
    ({"timestamp": -1}, "timestamp must be at least 0"),
    ({"dependsOn": ["nobody"]}, "Dependency job not found: nobody"),
    ({"name": ""}, BAD_NAME),
    ({"groupMaxSize": 0}, BAD_SIZE),
    ({"repeat": {}}, BAD_REPEAT),
    ({"jobId": 5}, "jobId must be a string"),
    ({"uniqueKey": 5}, "uniqueKey must be a string"),
]


@pytest.mark.parametrize("first", range(len(IN_ORDER)), ids=[next(iter(fault)) for fault, _ in IN_ORDER])
def test_the_first_check_of_a_push_answers(first: int, scene: Scene) -> None:
    """With every fault from `first` on in one push, the one that is checked first is named (core 2.4)."""
    if "repeat" in IN_ORDER[first][0]:
        needs("PUSH", "repeat")
    fields: dict[str, Any] = {"queue": scene.queue, "name": "j", "data": 1}
    for fault, _ in reversed(IN_ORDER[first:]):
        fields |= fault
    filled = {key: scene.fill(value) for key, value in fields.items()}
    assert scene.conn.send("PUSH", **filled) == {"ok": False, "error": IN_ORDER[first][1]}


def test_the_first_faulty_member_of_a_batch_answers(wire: Any, queue: str) -> None:
    jobs = [{"name": "j", "data": 1}, {"name": "", "data": 1}, {"name": "j", "delay": -1}]
    assert wire.send("PUSHB", queue=queue, jobs=jobs) == {"ok": False, "error": f"jobs[1]: {BAD_NAME}"}


def test_data_is_limited_at_the_byte(wire: Any, queue: str) -> None:
    """The JSON text of the data may have 10 MB, its two quotes included (core 2.5)."""
    assert wire.send("PUSH", queue=queue, name="j", data="x" * 10_485_758)["ok"]
    for size in (10_485_759, 10_485_760):
        reply = wire.send("PUSH", queue=queue, name="j", data="x" * size)
        assert reply == {"ok": False, "error": TOO_LARGE}
    jobs = [{"name": "j", "data": 1}, {"name": "j", "data": "x" * 10_485_760}]
    assert wire.send("PUSHB", queue=queue, jobs=jobs) == {"ok": False, "error": f"jobs[1]: {TOO_LARGE}"}
    assert wire.send("Count", queue=queue)["count"] == 1
    wire.send("Obliterate", queue=queue)


def test_a_custom_id_must_be_well_formed(broker: Any, wire: Any, queue: str) -> None:
    """A lone surrogate, as JavaScript knows it: no UTF-8, so the frame may be refused before its field is."""
    payload = msgpack.packb(
        {"cmd": "PUSH", "queue": queue, "name": "j", "data": 1, "jobId": "a\ud800", "reqId": "r"},
        unicode_errors="surrogatepass",
    )
    conn = broker.connect()
    conn.raw(framed(payload))
    reply = conn.recv(5)
    assert not reply["ok"]
    assert reply["error"] in ("custom ID must be well-formed Unicode", "Invalid command format")
    assert wire.send("Count", queue=queue)["count"] == 0


@pytest.mark.parametrize("pattern", ["nope", "61 * * * *", "* * *", ""])
def test_a_repeat_pattern_is_refused_with_its_reason(wire: Any, queue: str, pattern: str) -> None:
    needs("PUSH", "repeat")
    reply = wire.send("PUSH", queue=queue, name="j", data=1, repeat={"pattern": pattern})
    assert not reply["ok"]
    assert reply["error"].startswith("Invalid repeat pattern: ") or (pattern == "" and reply["error"] == BAD_REPEAT)
    assert wire.send("Count", queue=queue)["count"] == 0


def test_a_lost_lease_cannot_be_renewed(broker: Any, wire: Any, queue: str) -> None:
    """Core 5.2: neither does trying take it away from who still may finish with it."""
    wire.send("SubscribeEvents", queue=queue)
    id = wire.push(queue)
    _, token = lease(wire, queue, lockTtl=150)
    wire.event(5, eventType="stalled", jobId=id)
    assert wire.send("ExtendLock", id=id, token=token, duration=1000) == {"ok": False, "error": L1}
    assert wire.send("JobHeartbeat", id=id, token=token) == {"ok": False, "error": H1}
    assert wire.send("ACK", id=id, token=token) == {"ok": True}


#: Payload as hex, the text of the answer, the reqId in it (core 1.2 and 1.10).
MALFORMED: list[tuple[str, str, Any]] = [
    ("", "Invalid command format", None),
    ("c0", "Invalid command format", None),
    ("00", "Invalid command format", None),
    ("a0", "Invalid command format", None),
    ("c2", "Invalid command format", None),
    ("82a3636d64", "Invalid command format", None),  # truncated
    ("81a3636d64a450696e67c0", "Invalid command format", None),  # a Ping with a byte behind it
    ("82a3636d64a450696e67a178d401ff", "Invalid command format", None),  # extension type 1
    ("90", "Invalid command", None),
    ("9101", "Invalid command", None),
    ("05", "Invalid command", None),
    ("ff", "Invalid command", None),
    ("c3", "Invalid command", None),
    ("cb3ff8000000000000", "Invalid command", None),
    ("a3616263", "Invalid command", None),
    ("c403616263", "Invalid command", None),  # bin
    ("80", "Invalid command", None),
    (msgpack.packb({"reqId": "r"}).hex(), "Invalid command", "r"),
    (msgpack.packb({"reqId": 5}).hex(), "Invalid command", None),
    (msgpack.packb({"cmd": None, "reqId": "r"}).hex(), "Invalid command", "r"),
    (msgpack.packb({"cmd": "", "reqId": "r"}).hex(), "Invalid command", "r"),
    (msgpack.packb({"cmd": 0, "reqId": "r"}).hex(), "Invalid command", "r"),
    (msgpack.packb({"cmd": False, "reqId": "r"}).hex(), "Invalid command", "r"),
    (msgpack.packb({"cmd": 5, "reqId": "r"}).hex(), "Invalid command", "r"),
    (msgpack.packb({"cmd": {"a": 1}, "reqId": "r"}).hex(), "Invalid command", "r"),
    (msgpack.packb({"cmd": b"Ping", "reqId": "r"}).hex(), "Invalid command", "r"),
    (msgpack.packb({"cmd": "ping", "reqId": "r"}).hex(), "Unknown command: ping", "r"),
    (msgpack.packb({"cmd": "__proto__", "reqId": 7}).hex(), "Unknown command: __proto__", 7),
]


@pytest.mark.parametrize(("payload", "said", "req_id"), MALFORMED, ids=[row[0][:40] or "empty" for row in MALFORMED])
def test_a_malformed_frame_is_answered_and_the_connection_lives(
    broker: Any, payload: str, said: str, req_id: Any
) -> None:
    conn = broker.connect()
    conn.raw(framed(bytes.fromhex(payload)))
    reply = conn.recv(5)
    assert (reply["ok"], reply["error"]) == (False, said)
    if isinstance(req_id, str) or said.startswith("Unknown"):
        assert reply["reqId"] == req_id
    else:
        assert "reqId" not in reply
    assert conn.send("Ping")["ok"]
    conn.close()


def test_the_never_used_byte_is_answered(broker: Any) -> None:
    """Either text will do for 0xC1 (core 1.2)."""
    conn = broker.connect()
    conn.raw(framed(b"\xc1"))
    assert conn.recv(5)["error"] in ("Invalid command format", "Invalid command")
    assert conn.send("Ping")["ok"]


# ---------------------------------------------------------------- access (core 1.7, 1.11)


def test_nothing_but_auth_is_answered_before_auth(fresh_broker: Any) -> None:
    broker = fresh_broker("memory", env={"AUTH_TOKENS": "one,,two"})
    conn = broker.connect()
    for cmd, fields in (("Ping", {}), ("Hello", {}), ("SubscribeEvents", {"queue": "q"}), ("Nonsense", {}),
                        ("PUSH", {"queue": "q", "name": "j", "data": 1}), ("ListQueues", {})):  # fmt: skip
        assert conn.send(cmd, **fields) == {"ok": False, "error": "Not authenticated"}, cmd
    conn.raw(framed(b"\x80"))
    assert conn.recv(5)["error"] == "Invalid command"
    for fields in ({}, {"token": None}, {"token": ""}, {"token": 5}, {"token": "three"}, {"token": "one,,two"}):
        assert conn.send("Auth", **fields) == {"ok": False, "error": "Invalid token"}, fields
    assert conn.send("Auth", token="two") == {"ok": True}
    assert conn.send("Auth", token="three") == {"ok": False, "error": "Invalid token"}
    assert conn.send("Ping")["ok"]  # still authenticated
    assert conn.send("ListQueues")["queues"] == []  # the refused push left nothing

    one_write = broker.connect()
    assert [reply["ok"] for reply in one_write.pipeline([{"cmd": "Auth", "token": "one"}, {"cmd": "Ping"}])] == [
        True,
        True,
    ]


def test_ten_wrong_tokens_close_the_connection(fresh_broker: Any) -> None:
    """Design 7, R120."""
    broker = fresh_broker("memory", env={"AUTH_TOKENS": "secret"})
    conn = broker.connect()
    for _ in range(10):
        assert conn.send("Auth", token="wrong") == {"ok": False, "error": "Invalid token"}
    assert conn.closed(5)
    again = broker.connect()
    assert again.send("Auth", token="secret") == {"ok": True}


def test_a_server_without_tokens_knows_no_token(wire: Any) -> None:
    assert wire.send("Auth", token="any") == {"ok": False, "error": "Invalid token"}
    assert wire.send("Ping")["ok"]


def test_frames_beyond_the_rate_are_refused_and_cost_nothing(fresh_broker: Any) -> None:
    """Core 1.11: counted per frame, decodable or not, in a window of each connection's own."""
    env = {"RATE_LIMIT_MAX_REQUESTS": "5", "RATE_LIMIT_WINDOW_MS": "1500"}
    broker = fresh_broker("memory", env=env)
    conn, other = broker.connect(), broker.connect()
    conn.raw(framed(b"\x80"))
    assert conn.recv(5)["error"] == "Invalid command"
    replies = conn.pipeline([{"cmd": "PUSH", "queue": "q", "name": "j", "data": n} for n in range(7)])
    assert [reply["ok"] for reply in replies] == [True] * 4 + [False] * 3
    assert {reply["error"] for reply in replies[4:]} == {"Rate limit exceeded"}
    assert other.send("Count", queue="q")["count"] == 4
    until(lambda: admitted(conn), timeout=10, every=0.1)


def admitted(conn: Any) -> bool:
    """Whether `conn` is admitted again."""
    return bool(conn.send("Ping")["ok"])
