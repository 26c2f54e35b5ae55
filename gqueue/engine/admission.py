"""New jobs: every check first, then all of it or nothing (core 4.1, 4.2, 6)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gqueue.engine.states import state_name
from gqueue.errors import BadRequest, CommandError, NotFound, Refused, StorageUnavailable
from gqueue.model import Extra, Job, JobOptions, Packed, State

if TYPE_CHECKING:
    from gqueue.engine.engine import Engine


class NewJob:
    """One push as it is asked for, its fields checked. Durations in ms.

    `fault` is the refusal of a field that is checked after the dependencies exist (core 2.4, check order).
    """

    __slots__ = (
        "custom_id",
        "data",
        "delay",
        "extra",
        "fault",
        "group_max_size",
        "name",
        "options",
        "priority",
        "timestamp",
    )

    def __init__(
        self,
        name: str,
        data: Packed,
        options: JobOptions,
        *,
        priority: int = 0,
        delay: int = 0,
        timestamp: int | None = None,
        custom_id: str | None = None,
        group_max_size: int | None = None,
        extra: Extra | None = None,
        fault: BadRequest | None = None,
    ) -> None:
        self.name = name
        self.data = data
        self.options = options
        self.priority = priority
        self.delay = delay
        self.timestamp = timestamp
        self.custom_id = custom_id
        self.group_max_size = group_max_size
        self.extra = extra
        self.fault = fault


class Admission:
    """Lets jobs in."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def push(self, queue: str, new: NewJob, now: int) -> tuple[str, bool]:
        """The id of the job, and whether it was there before: found by its custom id, unique key or debounce id."""
        self._check_open()
        if new.extra is not None or new.fault is not None or new.custom_id is not None:
            self._check(queue, new, (), now)
            self._check_groups(queue, [new], now)
        id, fresh = self._admit(queue, new, now)
        self._tell(queue, [(id, fresh)], now)
        return id, not fresh

    def _check_open(self) -> None:
        """Whether any job is let in now. Raises Refused or StorageUnavailable."""
        if self.engine.closing:
            raise Refused("Server is shutting down")
        if self.engine.full:
            raise StorageUnavailable("disk_full")

    def push_all(self, queue: str, news: list[NewJob], now: int) -> list[str]:
        """The ids, one for each member in order. Raises with the member's index in front, before anything is stored."""
        self._check_open()
        if not self.check_all(queue, news, now):
            self._check_groups(queue, news, now)
        admitted = [self._admit(queue, new, now) for new in news]
        self._tell(queue, admitted, now)
        return [id for id, _ in admitted]

    def check_all(self, queue: str, news: list[NewJob], now: int) -> bool:
        """Check the members of a batch one by one. True: all are plain. Raises with the member's index in front."""
        plain = True
        members: set[str] | None = None
        for at, new in enumerate(news):
            if new.extra is not None or new.fault is not None or new.custom_id is not None:
                plain = False
                if members is None:
                    members = {other.custom_id for other in news if other.custom_id is not None}
                try:
                    self._check(queue, new, members, now)
                except CommandError as error:
                    raise type(error)(f"jobs[{at}]: {error}") from None
        return plain

    # ---------------------------------------------------------------- checks

    def _check(self, queue: str, new: NewJob, members: set[str] | tuple[()], now: int) -> None:
        index = self.engine.index
        extra = new.extra
        if extra is not None:
            for id in extra.depends_on:
                if id == new.custom_id:
                    raise BadRequest(f"Job cannot depend on itself: {id}")
                if id not in members and index.get(id) is None and id not in self.engine.upkeep.proofs:
                    raise NotFound(f"Dependency job not found: {id}")
        if new.fault is not None:
            raise new.fault
        if new.custom_id is not None and new.custom_id in self.engine.upkeep.proofs and self._counted_on(new.custom_id):
            raise Refused(f"Custom ID {new.custom_id} still has unresolved dependency consumers")
        old = None if new.custom_id is None else index.get(new.custom_id)
        if old is not None and old.state <= State.ACTIVE:
            return  # it is that job, whatever its unique key says (core 6.1)
        if extra is not None and extra.unique_key is not None and new.options.deduplication_replace:
            owner = index.holder(("unique", queue, extra.unique_key), now)
            if owner is not None and owner.state is not State.ACTIVE and owner.id in index.dependents:
                raise Refused(f"Cannot replace deduplicated job {owner.id} because live jobs depend on it")

    def _counted_on(self, id: str) -> bool:
        """Whether a blocked job depends on this removed completion; rare, so it is looked for."""
        return any(
            id in job.more.depends_on for queue in self.engine.index.queues.values() for job in queue.blocked.values()
        )

    def _check_groups(self, queue: str, news: list[NewJob], now: int) -> None:
        """groupMaxSize, each member against the depth with the members before it (core 4.2, 11.5)."""
        found = self.engine.index.queues.get(queue)
        added: dict[str, int] = {}
        taken: set[tuple[str, str]] = set()
        for new in news:
            group_id = None if new.extra is None else new.extra.group_id
            suppressed, replaces = self._fate(queue, new, taken, now)
            if suppressed or new.extra is None or group_id is None or new.extra.depends_on:
                continue
            depth = (0 if found is None else found.depth(group_id)) + added.get(group_id, 0)
            if new.group_max_size is not None and depth >= new.group_max_size and not replaces:
                raise Refused(f"Group {group_id} has reached its maximum size of {new.group_max_size}")
            if not replaces:
                added[group_id] = added.get(group_id, 0) + 1

    def _fate(self, queue: str, new: NewJob, taken: set[tuple[str, str]], now: int) -> tuple[bool, bool]:
        """Whether a push will be suppressed, and whether it replaces another; `taken` collects what it takes itself."""
        index = self.engine.index
        names: list[tuple[str, str]] = []
        if new.custom_id is not None:
            old = index.get(new.custom_id)
            if (old is not None and old.state <= State.ACTIVE) or ("custom", new.custom_id) in taken:
                return True, False
            names.append(("custom", new.custom_id))
        extra = new.extra
        replaces = False
        if extra is not None:
            kind, key = _slot(extra)
            if key is not None:
                held = index.holder((kind, queue, key), now) is not None or (kind, key) in taken
                if held and not (kind == "unique" and new.options.deduplication_replace):
                    return True, False
                replaces = held
                names.append((kind, key))
        taken.update(names)
        return False, replaces

    # ---------------------------------------------------------------- changes

    def _admit(self, queue: str, new: NewJob, now: int) -> tuple[str, bool]:
        """Store one job, or find the one that suppresses it: its id, and whether it is new."""
        engine = self.engine
        index = engine.index
        extra = new.extra
        id = new.custom_id
        old = None if id is None else index.get(id)
        if id is not None and old is not None and old.state <= State.ACTIVE:
            return id, False
        if extra is not None:
            owner_id = self._claim_key(queue, new, extra, now)
            if owner_id is not None:
                return owner_id, False
        if old is not None:  # finished: it makes way for a job that is certain to come
            index.discard(old)
            engine.journal.remove(old)
        if id is not None and id in engine.upkeep.proofs:
            del engine.upkeep.proofs[id]
            engine.journal.save_proof(id, None)

        created_at = now if new.timestamp is None else new.timestamp
        run_at = created_at + new.delay if new.delay else created_at
        engine.seq += 1
        found = index.queues.get(queue) or index.queue(queue)
        job = Job(
            engine.seq,
            id or engine.new_id(),
            found.name,
            new.name,
            new.data,
            new.options,
            new.priority,
            created_at,
            run_at,
        )
        if extra is not None:
            job.extra = extra
            if extra.depends_on:
                extra.pending = tuple(dict.fromkeys(dep for dep in extra.depends_on if not self._resolved(dep)))
                if extra.pending:
                    job.state = State.BLOCKED
        if new.timestamp is not None:
            job.edit().timeline = ((state_name(job, now), now, None, None),)
        index.add(job, now)
        engine.journal.create(job)
        if new.options.ttl is not None:
            engine.upkeep.watch_ttl(job, now)
        return job.id, True

    def _claim_key(self, queue: str, new: NewJob, extra: Extra, now: int) -> str | None:
        """Make way for a job with a unique key or debounce id; the id of the job that keeps it out, if one does."""
        engine = self.engine
        index = engine.index
        kind, key = _slot(extra)
        if key is None:
            return None
        options = new.options
        owner = index.holder((kind, queue, key), now)
        if owner is not None:
            if kind == "unique" and options.deduplication_replace:
                if owner.state is State.ACTIVE:
                    index.leave(owner)
                    owner.edit().dropped_key = True
                    index.enter(owner, now)
                    engine.journal.save(owner)
                else:
                    engine.remove(owner, now, reason="replaced", prev=state_name(owner, now))
            else:
                if kind == "unique" and options.deduplication_extend and options.deduplication_ttl is not None:
                    owner.edit().unique_until = now + options.deduplication_ttl
                    engine.journal.save(owner)
                return owner.id
        if kind == "unique":
            extra.unique_until = None if options.deduplication_ttl is None else now + options.deduplication_ttl
        else:
            extra.debounce_until = None if options.debounce_ttl is None else now + options.debounce_ttl
        return None

    def _resolved(self, id: str) -> bool:
        job = self.engine.index.get(id)
        if job is None:
            return id in self.engine.upkeep.proofs
        return job.state is State.COMPLETED

    def _tell(self, queue: str, admitted: list[tuple[str, bool]], now: int) -> None:
        events = self.engine.events
        if queue in events.subscribers:
            for kind, wanted in (("pushed", True), ("duplicated", False)):
                for id, fresh in admitted:
                    if fresh is wanted:
                        events.publish(kind, queue, id, now)


def _slot(extra: Extra) -> tuple[str, str | None]:
    if extra.unique_key is not None:
        return "unique", extra.unique_key
    return "debounce", extra.debounce_id
