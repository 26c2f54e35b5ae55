"""Which state may follow which, and why a job goes there. docs/lifecycle.md is drawn from here."""

from __future__ import annotations

from typing import NamedTuple

from gqueue.model import Job, State

#: What each state is called on the wire. QUEUED has three names: see `state_name`.
NAMES = {
    State.QUEUED: "waiting",
    State.BLOCKED: "waiting-children",
    State.ACTIVE: "active",
    State.COMPLETED: "completed",
    State.FAILED: "failed",
}


def state_name(job: Job, now: int) -> str:
    """The name of a job's state at `now` (core 3.1)."""
    if job.state is State.QUEUED:
        if job.run_at > now:
            return "delayed"
        return "prioritized" if job.priority > 0 else "waiting"
    return NAMES[job.state]


class Transition(NamedTuple):
    """One way from one state to another. `event` is what a subscriber of the queue sees."""

    source: str  # as on the wire; "" = not there before
    target: str  # "" = gone afterwards
    trigger: str
    event: str
    counts: str = ""  # what it adds to


TRANSITIONS = (
    Transition("", "waiting", "PUSH, PUSHB", "pushed"),
    Transition("", "delayed", "PUSH, PUSHB with a delay", "pushed"),
    Transition("", "waiting-children", "PUSH, PUSHB with an open dependency", "pushed"),
    Transition("delayed", "waiting", "its time comes", ""),
    Transition("delayed", "waiting", "Promote, PromoteJobs, MoveToWait", "waiting"),
    Transition("delayed", "delayed", "ChangeDelay, MoveToDelayed", "delayed"),
    Transition("waiting", "delayed", "ChangeDelay, MoveToDelayed", "delayed"),
    Transition("waiting", "active", "PULL, PULLB", "pulled"),
    Transition("waiting", "completed", "late ACK of the last lost delivery", "completed"),
    Transition("waiting", "failed", "Discard", "failed"),
    Transition("waiting", "", "Cancel, Drain, Clean, Obliterate, ttl, dedup replace", "removed"),
    Transition("delayed", "failed", "Discard", "failed"),
    Transition("delayed", "", "Cancel, Drain, Clean, Obliterate, ttl, dedup replace", "removed"),
    Transition("waiting-children", "delayed", "last open dependency completed, its time has not come", "delayed"),
    Transition("waiting-children", "waiting", "last open dependency completed, MoveToWait", "waiting"),
    Transition("waiting-children", "failed", "Discard", "failed"),
    Transition("waiting-children", "", "Cancel, Obliterate, dedup replace", "removed"),
    Transition("active", "completed", "ACK, ACKB", "completed"),
    Transition("active", "", "ACK with removeOnComplete, Obliterate", "completed"),
    Transition("active", "delayed", "FAIL or timeout, attempts left", "failed, retried", "attempt"),
    Transition("active", "failed", "FAIL or timeout, none left, or unrecoverable", "failed", "attempt"),
    Transition("active", "waiting", "lease expired, attempts left", "stalled", "attempt, stall, loss"),
    Transition("active", "delayed", "stall confirmed, attempts left", "stalled", "attempt, stall"),
    Transition("active", "failed", "lease expired or stalled, a budget spent", "stalled, failed", "attempt, stall"),
    Transition("active", "waiting", "connection of its worker closed", "waiting", "loss"),
    Transition("active", "failed", "lost more than maxLost times in a row", "failed", "loss"),
    Transition("active", "waiting", "MoveToWait", "waiting"),
    Transition("active", "delayed", "MoveToDelayed, ChangeDelay", "delayed"),
    Transition("active", "waiting-children", "MoveToWaitingChildren", "waiting-children"),
    Transition("active", "failed", "Discard", "failed"),
    Transition("failed", "waiting", "MoveToWait", "waiting"),
    Transition("completed", "waiting", "RetryCompleted", "waiting"),
    Transition("completed", "", "Clean, Obliterate, retention, new push of its custom id", ""),
    Transition("failed", "", "Clean, Obliterate, new push of its custom id", ""),
)

_STATES = {name: state for state, name in NAMES.items()} | {"delayed": State.QUEUED, "prioritized": State.QUEUED}

#: The same as a table of states, which `Engine.move` checks.
MOVES: dict[State, frozenset[State]] = {
    state: frozenset(_STATES[t.target] for t in TRANSITIONS if t.source and t.target and _STATES[t.source] is state)
    for state in State
}
