"""The table of states (engine/states.py) against what the broker does: each row can be reached, with the event and the
counts that it names; what stands in no row is refused and leaves no trace; each way out of `active` frees what the
delivery held (design I4).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

import pytest

from gqueue.engine.engine import EngineSettings
from gqueue.engine.states import TRANSITIONS, Transition, state_name
from gqueue.model import Job
from tests.model.rig import SECOND, Peer, Rig

HOUR = 3_600_000  # ms
RETENTION = 60 * SECOND


class Scene:
    """One job of queue `q` in a state, its worker, and somebody else who looks on and gives orders."""

    def __init__(self, **options: Any) -> None:
        self.rig = Rig(settings=EngineSettings(max_lost=1, completed_retention=RETENTION))
        self.worker: Peer = self.rig.connect()
        self.operator: Peer = self.rig.connect()
        self.options = options
        self.id = ""
        self.token: str | None = None
        self.job: Job | None = None
        self.ask("SubscribeEvents", queue="q")

    def ask(self, cmd: str, **fields: Any) -> dict[str, Any]:
        reply = self.rig.ask(self.operator, cmd, **fields)
        assert reply["ok"], reply
        return reply

    def push(self, **fields: Any) -> None:
        self.id = self.ask("PUSH", queue="q", **{**self.options, **fields})["id"]
        self.job = self.rig.engine.index.get(self.id)

    def pull(self, **fields: Any) -> None:
        reply = self.rig.ask(self.worker, "PULL", queue="q", **fields)
        assert reply["job"]["id"] == self.id
        self.token = reply.get("token")

    def place(self, state: str) -> None:
        """Bring the job into a state; "" is none at all, "leased" is active with a lease."""
        if state == "delayed":
            self.push(delay=30 * SECOND)
        elif state == "waiting-children":
            self.push(dependsOn=[self.ask("PUSH", queue="others", jobId="dependency")["id"]])
        elif state:
            self.push()
        if state in ("active", "leased", "completed", "failed"):
            lease = {"owner": "w", "lockTtl": 30 * SECOND} if state != "active" else {}
            self.pull(**lease)
        if state == "completed":
            self.ask("ACK", id=self.id, token=self.token)
        elif state == "failed":
            self.ask("FAIL", id=self.id, token=self.token, unrecoverable=True)
        self.operator.events.clear()

    @property
    def state(self) -> str:
        """The state of this very record; a new job with its id is another one."""
        if self.job is None or self.rig.engine.index.get(self.id) is not self.job:
            return ""
        return state_name(self.job, self.rig.now)

    def counted(self) -> dict[str, int]:
        assert self.job is not None
        return {"attempt": self.job.attempts, "stall": self.job.more.stall_count, "loss": self.job.more.losses}

    def events(self) -> list[str]:
        """The types of the events that tell of the job; those of the whole queue only when it is obliterated."""
        return [
            event["eventType"]
            for event in self.operator.events
            if event["jobId"] == self.id or event.get("data") == {"reason": "obliterated"}
        ]

    def picture(self) -> dict[str, Any]:
        return self.rig.engine.index.picture(self.rig.now)


Act = Callable[[Scene], Any]


def send(cmd: str, **fields: Any) -> Act:
    """Send a command that names the job, with the token that it has."""
    return lambda scene: scene.ask(cmd, id=scene.id, token=scene.token, **fields)


def order(cmd: str, **fields: Any) -> Act:
    """Send a command that names the queue."""
    return lambda scene: scene.ask(cmd, queue="q", **fields)


def later(ms: int) -> Act:
    return lambda scene: scene.rig.advance(ms)


def push(**fields: Any) -> Act:
    def act(scene: Scene) -> None:
        if "dependsOn" in fields:
            scene.ask("PUSH", queue="others", jobId="dependency")
        scene.push(**fields)

    return act


def push_batch(**fields: Any) -> Act:
    def act(scene: Scene) -> None:
        if "dependsOn" in fields:
            scene.ask("PUSH", queue="others", jobId="dependency")
        (scene.id,) = scene.ask("PUSHB", queue="q", jobs=[fields])["ids"]
        scene.job = scene.rig.engine.index.get(scene.id)

    return act


def lost_before(scene: Scene) -> None:
    """The lease of the job has run out: it waits, and its last token may still complete it."""
    scene.push()
    scene.pull(owner="w", lockTtl=SECOND)
    scene.rig.advance(SECOND)
    scene.operator.events.clear()


def dropped_before(scene: Scene) -> None:
    """One worker of the job is gone already: with `max_lost` 1 the next loss is one too many."""
    scene.push()
    scene.pull()
    drop(scene)
    scene.pull()
    scene.operator.events.clear()


def drop(scene: Scene) -> None:
    scene.rig.drop(scene.worker)
    scene.worker = scene.rig.connect()


def expire(scene: Scene) -> None:
    assert scene.job is not None
    scene.rig.advance(scene.job.created_at + scene.job.options.ttl + 1 - scene.rig.now)


def complete_dependency(scene: Scene) -> None:
    scene.rig.ask(scene.worker, "PULL", queue="others")
    scene.ask("ACK", id="dependency")


def park(scene: Scene) -> None:
    scene.ask("PUSH", queue="others", jobId="child")
    scene.ask("MoveToWaitingChildren", id=scene.id, token=scene.token)


@dataclass(slots=True)
class Way:
    """How to make one row of the table happen. `source`, `target` and a part of `trigger` find the row."""

    source: str
    target: str
    trigger: str
    act: Act
    options: dict[str, Any] = field(default_factory=dict)
    place: Act | None = None  # instead of Scene.place
    events: str | None = None  # where the row stands for several triggers and names the event of another
    counts: str | None = None  # the same for what is counted

    def __str__(self) -> str:
        return f"{self.source or 'nothing'} to {self.target or 'nothing'} by {self.trigger}"

    @property
    def rows(self) -> list[Transition]:
        """The rows that it is an example of: there should be one."""
        return [
            row
            for row in TRANSITIONS
            if (row.source, row.target) == (self.source, self.target) and self.trigger in row.trigger
        ]


UNIQUE = {"uniqueKey": "k"}


def _removals(source: str) -> Iterator[Way]:
    yield Way(source, "", "Cancel", send("Cancel"))
    yield Way(source, "", "Drain", order("Drain"))
    yield Way(source, "", "Clean", order("Clean", grace=0))
    yield Way(source, "", "Obliterate", order("Obliterate"))
    yield Way(source, "", "ttl", expire, {"ttl": 10 * SECOND})
    yield Way(source, "", "dedup replace", order("PUSH", **UNIQUE, dedup={"replace": True}), UNIQUE)


ONCE = {"maxAttempts": 1}
WAYS = [
    Way("", "waiting", "PUSH", push()),
    Way("", "waiting", "PUSHB", push_batch()),
    Way("", "delayed", "PUSH, PUSHB with a delay", push(delay=1)),
    Way("", "delayed", "PUSHB with a delay", push_batch(delay=1)),
    Way("", "waiting-children", "PUSH, PUSHB with an open dependency", push(dependsOn=["dependency"])),
    Way("", "waiting-children", "PUSHB with an open dependency", push_batch(dependsOn=["dependency"])),
    Way("delayed", "waiting", "its time comes", later(30 * SECOND)),
    Way("delayed", "waiting", "Promote", send("Promote")),
    Way("delayed", "waiting", "PromoteJobs", order("PromoteJobs")),
    Way("delayed", "waiting", "MoveToWait", send("MoveToWait")),
    Way("delayed", "delayed", "ChangeDelay", send("ChangeDelay", delay=HOUR)),
    Way("delayed", "delayed", "MoveToDelayed", send("MoveToDelayed", delay=HOUR)),
    Way("waiting", "delayed", "ChangeDelay", send("ChangeDelay", delay=HOUR)),
    Way("waiting", "delayed", "MoveToDelayed", send("MoveToDelayed", delay=HOUR)),
    Way("waiting", "active", "PULL", order("PULL")),
    Way("waiting", "active", "PULLB", order("PULLB", count=2)),
    Way("waiting", "completed", "late ACK of the last lost delivery", send("ACK"), place=lost_before),
    Way("waiting", "failed", "Discard", send("Discard")),
    *_removals("waiting"),
    Way("delayed", "failed", "Discard", send("Discard")),
    *_removals("delayed"),
    Way("waiting-children", "waiting", "last open dependency completed", complete_dependency),
    Way(
        "waiting-children",
        "delayed",
        "last open dependency completed, its time has not come",
        complete_dependency,
        {"delay": HOUR},
    ),
    Way("waiting-children", "failed", "Discard", send("Discard")),
    Way("waiting-children", "", "Cancel", send("Cancel")),
    Way("waiting-children", "", "Obliterate", order("Obliterate")),
    Way("waiting-children", "", "dedup replace", order("PUSH", **UNIQUE, dedup={"replace": True}), UNIQUE),
    Way("active", "completed", "ACK", send("ACK")),
    Way("active", "completed", "ACKB", lambda scene: scene.ask("ACKB", ids=[scene.id], tokens=[scene.token])),
    Way("active", "", "ACK with removeOnComplete", send("ACK"), {"removeOnComplete": True}),
    Way("active", "", "Obliterate", order("Obliterate"), events="removed"),
    Way("active", "delayed", "FAIL", send("FAIL", error="boom")),
    Way("active", "delayed", "timeout, attempts left", later(SECOND), {"timeout": SECOND}),
    Way("active", "failed", "FAIL or timeout, none left", send("FAIL"), ONCE),
    Way("active", "failed", "timeout, none left", later(SECOND), {**ONCE, "timeout": SECOND}),
    Way("active", "failed", "unrecoverable", send("FAIL", unrecoverable=True)),
    Way("active", "waiting", "lease expired, attempts left", later(30 * SECOND)),
    Way("active", "delayed", "stall confirmed, attempts left", later(10 * SECOND), {"stallTimeout": 1}),
    Way(
        "active",
        "failed",
        "lease expired or stalled, a budget spent",
        later(30 * SECOND),
        ONCE,
        counts="attempt, stall, loss",
    ),
    Way("active", "failed", "stalled, a budget spent", later(10 * SECOND), {**ONCE, "stallTimeout": 1}),
    Way("active", "waiting", "connection of its worker closed", drop),
    Way("active", "failed", "lost more than maxLost times in a row", drop, place=dropped_before),
    Way("active", "waiting", "MoveToWait", send("MoveToWait")),
    Way("active", "delayed", "MoveToDelayed", send("MoveToDelayed", delay=HOUR)),
    Way("active", "delayed", "ChangeDelay", send("ChangeDelay", delay=HOUR)),
    Way("active", "waiting-children", "MoveToWaitingChildren", park, {"childrenIds": ["child"]}),
    Way("active", "failed", "Discard", send("Discard")),
    Way("failed", "waiting", "MoveToWait", send("MoveToWait")),
    Way("completed", "waiting", "RetryCompleted", order("RetryCompleted")),
    Way("completed", "", "Clean", order("Clean", grace=0, state="completed"), events="removed"),
    Way("completed", "", "Obliterate", order("Obliterate"), events="removed"),
    Way("completed", "", "retention", later(RETENTION + 10 * SECOND)),
    Way("completed", "", "new push of its custom id", order("PUSH", jobId="c"), {"jobId": "c"}, events="pushed"),
    Way("failed", "", "Clean", order("Clean", grace=0, state="failed"), events="removed"),
    Way("failed", "", "Obliterate", order("Obliterate"), events="removed"),
    Way("failed", "", "new push of its custom id", order("PUSH", jobId="c"), {"jobId": "c"}, events="pushed"),
]
OUT_OF_ACTIVE = [way for way in WAYS if way.source == "active"]


def at_start(way: Way, **options: Any) -> Scene:
    scene = Scene(**way.options, **options)
    if way.place is not None:
        way.place(scene)
    else:
        scene.place("leased" if way.source == "active" else way.source)
    assert scene.state == way.source
    return scene


def test_every_row_of_the_table_has_an_example() -> None:
    shown = {row for way in WAYS for row in way.rows}
    assert [row for row in TRANSITIONS if row not in shown] == []


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_each_row_of_the_table_happens_with_its_event_and_its_counts(way: Way) -> None:
    assert len(way.rows) == 1, "an example belongs to one row"
    row = way.rows[0]
    scene = at_start(way)
    before = scene.counted() if way.source else dict.fromkeys(("attempt", "stall", "loss"), 0)

    way.act(scene)

    assert scene.state == way.target
    assert scene.events() == [event for event in (way.events or row.event).split(", ") if event]
    if scene.job is not None and way.target not in ("completed", ""):  # an end that is wanted counts nothing
        after = scene.counted()
        grown = [what for what in after if after[what] > before[what]]
        assert grown == [what for what in (way.counts or row.counts).split(", ") if what]


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_each_transition_leaves_an_index_that_follows_from_what_is_stored(way: Way) -> None:
    """Design I1, for jobs that use as many parts of the index as there are."""
    unique = {} if "uniqueKey" in way.options else UNIQUE
    scene = at_start(way, groupId="g", **unique)

    way.act(scene)

    assert scene.rig.rebuilt().index.picture(scene.rig.now) == scene.picture()


# ---------------------------------------------------------------- ways out of active (design I4)


@pytest.mark.parametrize("way", OUT_OF_ACTIVE, ids=str)
def test_each_way_out_of_active_frees_the_slot_the_lease_and_the_group(way: Way) -> None:
    scene = at_start(way, groupId="g")
    rig = scene.rig
    worker = scene.worker
    scene.ask("SetConcurrency", queue="q", limit=1)
    waiting = rig.post(rig.connect(), "PULL", queue="q", timeout=60 * SECOND, detach=True)
    waiter = rig.peers[-1]
    scene.ask("PUSH", queue="q")
    assert waiting not in waiter.replies, "the slot is taken"
    job, token = scene.job, scene.token
    assert job is not None

    way.act(scene)
    if way.trigger == "Obliterate":
        scene.ask("PUSH", queue="q")  # what waited for the slot is gone too

    delivered = waiter.replies[waiting]["job"]["id"]
    assert worker.session.held == {}
    active = list(rig.engine.index.queues["q"].active.values())
    assert [other.id for other in active] == [delivered]
    if job not in active:
        assert job.lease is None
        assert job.holder is None
    groups = rig.engine.index.queues["q"].groups
    assert sum(group.active for group in groups.values()) == sum(other.more.group_id == "g" for other in active)
    reply = rig.ask(worker if not worker.closed else scene.worker, "ExtendLock", id=scene.id, token=token)
    assert reply == {"ok": False, "error": "Lock not found or invalid token"}


@pytest.mark.parametrize("way", OUT_OF_ACTIVE, ids=str)
def test_each_way_out_of_active_keeps_the_unique_key_of_a_job_that_lives_on(way: Way) -> None:
    """And frees that of one that does not (core 6.3)."""
    scene = at_start(way, **UNIQUE)

    way.act(scene)

    owner = scene.ask("GetDeduplicationJobId", queue="q", deduplicationId="k")["data"]["jobId"]
    assert owner == (scene.id if way.target in ("waiting", "delayed", "waiting-children") else None)


@pytest.mark.parametrize("way", OUT_OF_ACTIVE, ids=str)
def test_after_each_way_out_of_active_no_deadline_of_the_delivery_is_left(way: Way) -> None:
    """Neither its lease, nor its silence, nor the loss of its connection counts any more, nor its timeout."""
    # tests/model/test_found.py has the timeout of a job that is removed
    timeout = {} if way.target == "" or "timeout" in way.options else {"timeout": 35 * SECOND}
    scene = at_start(way, **timeout)
    way.act(scene)
    scene.ask("Pause", queue="q")  # nobody takes it again
    state, counted = scene.state, scene.counted()

    drop(scene)
    scene.rig.advance(25 * SECOND if way.target == "completed" else 65 * SECOND)

    if state == "delayed" and scene.state == "waiting":
        state = "waiting"  # its time has come
    assert (scene.state, scene.counted()) == (state, counted)


@pytest.mark.parametrize(
    ("cmd", "fields"),
    [("FAIL", {}), ("MoveToWait", {}), ("MoveToDelayed", {"delay": 0}), ("ACK", {})],
)
def test_an_outcome_or_a_move_by_will_ends_a_row_of_losses(cmd: str, fields: dict[str, Any]) -> None:
    """With `max_lost` 1 two losses in a row are the end (R90, core 5.5)."""
    scene = Scene(backoff=0)
    scene.push()
    scene.pull()
    drop(scene)
    scene.pull()
    send(cmd, **fields)(scene)
    if cmd == "ACK":
        scene.ask("RetryCompleted", queue="q", id=scene.id)
    scene.pull()

    drop(scene)

    assert scene.state == "waiting"


def test_a_delivery_is_not_blamed_for_its_silence_while_the_broker_was_away() -> None:
    """It has one grace from the new start (R113), however long ago its worker was last heard."""
    scene = Scene()
    scene.push()
    scene.pull(owner="w", lockTtl=120 * SECOND)
    scene.rig.now += 119 * SECOND  # no deadline is met meanwhile
    scene.rig.restart()

    scene.rig.advance(20 * SECOND)  # two checks for stalls are over

    job = scene.rig.engine.index.get(scene.id)
    assert job is not None
    assert (state_name(job, scene.rig.now), job.attempts, job.more.stall_count) == ("active", 0, 0)


# ---------------------------------------------------------------- what stands in no row

#: Command -> how to send it, and the states in which it does something, with the state that the job is in then.
#: In every other state it changes nothing (core 3.3, 9).
ORDERS: dict[str, tuple[Act, dict[str, str]]] = {
    "ACK": (send("ACK"), {"active": "completed", "leased": "completed"}),
    "ACKB": (
        lambda scene: scene.ask("ACKB", ids=[scene.id], tokens=[scene.token]),
        {"active": "completed", "leased": "completed"},
    ),
    "FAIL": (send("FAIL"), {"active": "delayed", "leased": "delayed"}),
    "Cancel": (send("Cancel"), dict.fromkeys(("waiting", "delayed", "waiting-children"), "")),
    "Discard": (
        send("Discard"),
        dict.fromkeys(("waiting", "delayed", "waiting-children", "active", "leased"), "failed"),
    ),
    "Promote": (send("Promote"), {"delayed": "waiting"}),
    "ChangeDelay": (
        send("ChangeDelay", delay=HOUR),
        dict.fromkeys(("waiting", "delayed", "active", "leased"), "delayed"),
    ),
    "MoveToDelayed": (
        send("MoveToDelayed", delay=HOUR),
        dict.fromkeys(("waiting", "delayed", "active", "leased"), "delayed"),
    ),
    "MoveToWait": (send("MoveToWait"), dict.fromkeys(("delayed", "active", "leased", "failed"), "waiting")),
    # without an open child it is queued again at once (design 7)
    "MoveToWaitingChildren": (send("MoveToWaitingChildren"), dict.fromkeys(("active", "leased"), "waiting")),
    "RetryCompleted": (lambda scene: scene.ask("RetryCompleted", queue="q", id=scene.id), {"completed": "waiting"}),
    "PULL": (order("PULL"), {"waiting": "active"}),
    "PULLB": (order("PULLB", count=3), {"waiting": "active"}),
    "PromoteJobs": (order("PromoteJobs"), {"delayed": "waiting"}),
    "Drain": (order("Drain"), {"waiting": "", "delayed": ""}),
    "Clean": (order("Clean", grace=0), {"waiting": "", "delayed": ""}),
    "Clean waiting": (order("Clean", grace=0, state="waiting"), {"waiting": ""}),
    "Clean delayed": (order("Clean", grace=0, state="delayed"), {"delayed": ""}),
    "Clean completed": (order("Clean", grace=0, state="completed"), {"completed": ""}),
    "Clean failed": (order("Clean", grace=0, state="failed"), {"failed": ""}),
    "Clean active": (order("Clean", grace=0, state="active"), {}),
    "Clean waiting-children": (order("Clean", grace=0, state="waiting-children"), {}),
    "a closed connection": (drop, {"active": "waiting", "leased": "waiting"}),
    "Resume": (order("Resume"), {}),
    "JobHeartbeat": (send("JobHeartbeat"), {}),
    "ExtendLock": (send("ExtendLock", duration=60 * SECOND), {}),
}
#: Commands that say so when they change nothing; the others succeed with nothing done.
REFUSE = {"ACK", "ACKB", "FAIL", "Cancel", "Discard", "Promote", "ChangeDelay", "MoveToDelayed"}
REFUSE |= {"MoveToWaitingChildren"}
STATES = ("waiting", "delayed", "waiting-children", "active", "leased", "completed", "failed")


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("cmd", ORDERS)
def test_a_command_moves_a_job_along_the_table_or_not_at_all(cmd: str, state: str) -> None:
    act, does = ORDERS[cmd]
    scene = Scene()
    scene.place(state)
    source = scene.state
    stored = scene.picture()

    if cmd in REFUSE and state not in does:
        with pytest.raises(AssertionError, match="'ok': False"):
            act(scene)
    else:
        with nullcontext() if state in does else suppress(AssertionError):  # refused or done in vain: both are right
            act(scene)

    assert scene.state == does.get(state, source)
    if state in does:
        assert (source, scene.state) in {(row.source, row.target) for row in TRANSITIONS}
    else:
        assert scene.picture() == stored
        assert scene.events() == []


@pytest.mark.parametrize("token", [None, "wrong"])
@pytest.mark.parametrize(
    "cmd", ["ACK", "FAIL", "Discard", "ChangeDelay", "MoveToDelayed", "MoveToWait", "MoveToWaitingChildren"]
)
def test_nobody_but_the_holder_of_the_lease_ends_a_delivery(cmd: str, token: str | None) -> None:
    scene = Scene()
    scene.place("leased")
    stored = scene.picture()

    reply = scene.rig.ask(scene.operator, cmd, id=scene.id, delay=1, token=token)

    text = f"Invalid or expired lock token for job {scene.id}" if token else f"Lock token required for job {scene.id}"
    assert reply == {"ok": False, "error": text}
    assert scene.picture() == stored
    assert scene.events() == []
