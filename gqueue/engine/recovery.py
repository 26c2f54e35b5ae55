"""What was stored -> a running engine: enter every record (design I1)."""

from __future__ import annotations

import gc

import msgpack

from gqueue.engine.engine import Engine
from gqueue.engine.limits import Limits
from gqueue.model import JobOptions, Packed, State
from gqueue.storage.base import Snapshot, job_of


def recover(engine: Engine, snapshot: Snapshot, now: int) -> None:
    """Fill a fresh engine. Active jobs keep their leases for one grace (R113)."""
    engine.seq = snapshot.seq
    index = engine.index
    for name, settings in snapshot.queues.items():
        queue = index.queue(name)
        kept = msgpack.unpackb(settings)
        queue.paused = kept.get("paused", False)
        queue.stall = kept.get("stall", {})
        if "limits" in kept:
            queue.limits = Limits.of(kept["limits"])
    engine.upkeep.proofs.update({id: msgpack.unpackb(queue) for id, queue in snapshot.proofs.items()})
    options: dict[JobOptions, JobOptions] = {}
    names: dict[str, str] = {}
    collecting = gc.isenabled()
    gc.disable()  # a million new objects, none of them garbage
    try:
        for row in snapshot.rows:
            job = job_of(row, options)
            job.queue = index.queue(job.queue).name
            job.name = names.setdefault(job.name, job.name)
            index.add(job, now)
            if job.state is State.ACTIVE:
                engine.upkeep.take_over(job, now)
            if job.state <= State.ACTIVE and job.options.ttl is not None:
                engine.upkeep.watch_ttl(job, now)
    finally:
        if collecting:
            gc.enable()
    logs: dict[int, list[Packed]] = {}
    for seq, _, entry in snapshot.logs:
        logs.setdefault(seq, []).append(Packed(entry))
    for job in index.jobs() if logs else ():
        if job.seq in logs:
            job.edit().logs = logs[job.seq]
    for name, count in snapshot.completed.items():
        queue = index.queue(name)
        engine.archive.jobs += count - queue.finished
        queue.finished = count
    engine.upkeep.start(now)
