"""The log of each job: lines its worker wrote (core 12.1-12.3). Kept in the store beside the job."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgpack

from gqueue.errors import NotFound
from gqueue.model import PLAIN, Job, Packed

if TYPE_CHECKING:
    from gqueue.engine.engine import Engine

_KEPT = 100  # entries of a job without `keepLogs`


class Logs:
    """Entries are packed maps {message, level, timestamp}; each has a number that grows per job."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def add(self, id: str, message: str, level: str, now: int) -> None:
        """Raises NotFound."""
        job = self.engine.index.get(id)
        if job is None:
            raise NotFound("Job not found")

        extra = job.edit()
        entry = Packed(msgpack.packb({"message": message, "level": level, "timestamp": float(now)}))
        kept = _KEPT if job.options.keep_logs is None else job.options.keep_logs
        self.engine.journal.log(job, extra.log_start + len(extra.logs), entry)
        extra.logs.append(entry)
        self._trim(job, kept)

    def read(self, id: str, start: int, end: int | None) -> tuple[list[Packed], int]:
        """Entries start..end, both inclusive, counted from the end when negative; and how many there are."""
        job = self.engine.index.get(id)
        logs = [] if job is None or job.extra is None else job.extra.logs
        total = len(logs)
        first = max(start + total, 0) if start < 0 else start
        last = total - 1 if end is None else end + total if end < 0 else end
        return logs[first : last + 1], total

    def clear(self, id: str, keep: int) -> None:
        """Only the newest `keep` entries stay."""
        job = self.engine.index.get(id)
        if job is not None and job.more is not PLAIN:
            self._trim(job, max(keep, 0))

    def _trim(self, job: Job, kept: int) -> None:
        extra = job.edit()
        surplus = len(extra.logs) - kept
        if surplus > 0:
            del extra.logs[:surplus]
            extra.log_start += surplus
            self.engine.journal.trim_log(job, extra.log_start)
            self.engine.journal.save(job)
