"""The timeline of a job: what happened to it, oldest first (core 2.3)."""

from __future__ import annotations

from gqueue.model import Job, State

Entry = tuple[str, int, str | None, int | None]  # state, timestamp in ms, error, attempt

_KEPT = 20  # entries: the first and the newest others


def timeline(job: Job) -> list[Entry]:
    """The entries of a job. A job that went the plain way needs none of its own: they follow from its record."""
    own = job.more.timeline
    if own is not None:
        return list(own)
    if job.more.depends_on:
        admitted = "waiting-children"
    elif job.run_at > job.created_at:
        admitted = "delayed"
    else:
        admitted = "prioritized" if job.priority > 0 else "waiting"
    entries: list[Entry] = [(admitted, job.created_at, None, None)]
    if job.state is State.ACTIVE or job.state is State.COMPLETED:
        if job.started_at is not None:
            entries.append(("active", job.started_at, None, None))
        if job.state is State.COMPLETED:
            entries.append(("completed", job.finished_at or 0, None, None))
    return entries


def keep(job: Job) -> None:
    """Write the timeline down: the record is about to change so that it would not follow any more."""
    extra = job.edit()
    if extra.timeline is None:
        extra.timeline = tuple(timeline(job))


def note(job: Job, state: str, at: int, error: str | None = None, attempt: int | None = None) -> None:
    """Add an entry, if the timeline is written down already."""
    extra = job.extra
    if extra is None or extra.timeline is None:
        return
    entries = (*extra.timeline, (state, at, error, attempt))
    if len(entries) > _KEPT:
        entries = (entries[0], *entries[1 - _KEPT :])
    extra.timeline = entries
