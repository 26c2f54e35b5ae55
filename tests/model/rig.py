"""A broker without sockets, threads and clocks: commands go in as maps, replies come out when their batch is durable.

What `server/app.py` does with a loop and a thread is done here by hand, one step at a time, so that a test decides when
a batch reaches the store, when a deadline comes, and what a crash finds.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import msgpack
from hypothesis import HealthCheck, settings

from gqueue.engine.archive import Question, Recalled
from gqueue.engine.delivery import Session
from gqueue.engine.engine import Engine, EngineSettings
from gqueue.engine.journal import Journal, Outgoing
from gqueue.engine.recovery import recover
from gqueue.errors import StorageError
from gqueue.server.dispatch import Dispatch, framed
from gqueue.storage.base import Batch, Storage
from gqueue.storage.memory import MemoryStorage
from gqueue.storage.sqlite import SQLiteStorage
from gqueue.wire import codec

START = 1_700_000_000_000  # ms since the epoch
SECOND = 1_000  # ms

#: How many times more examples than by default; more than 1 also leaves the fixed seed. Give pytest `--timeout 0` then.
FACTOR = int(os.environ.get("GQUEUE_EXAMPLES", "1"))


def examples(count: int, *, steps: int = 50) -> settings:
    """The settings of a property test: the same examples in every run, no limit of time that a busy machine breaks."""
    return settings(
        max_examples=count * FACTOR,
        stateful_step_count=steps,
        deadline=None,
        derandomize=FACTOR == 1,
        database=None,
        report_multiple_bugs=False,
        print_blob=False,
        suppress_health_check=list(HealthCheck),
    )


class Peer:
    """One client: what the server's Connection is to the dispatcher, without a socket."""

    def __init__(self, rig: Rig) -> None:
        self.server = rig
        self.session = Session(self)
        self.authenticated = True
        self.parked = 0
        self.backlog: tuple[()] = ()
        self.closed = False
        self.replies: dict[int, dict[str, Any]] = {}
        self.events: list[dict[str, Any]] = []

    def send(self, frame: bytes) -> None:
        """A frame of the broker's arrives."""
        if self.closed:
            return
        reply = codec.unpack(frame[4:])
        if "event" in reply:
            self.events.append(reply["event"])
        else:
            number = reply.pop("reqId")
            assert number not in self.replies, f"a second reply to request {number}: {reply}"
            self.replies[number] = reply

    def hold(self, question: Question, fields: dict[str, Any]) -> None:
        """A command needs jobs that only the store has: they come back first, then it runs."""
        self.server.recall(question, lambda _error: self.server.dispatch.run(self, fields, recalled=True))


@dataclass(slots=True)
class Store:
    """How to open the store of a rig, again and again. A memory store is one object that outlives its brokers."""

    open: Callable[[], Storage]


def memory_store() -> Store:
    kept = MemoryStorage(keep=True)
    return Store(lambda: kept)


def sqlite_store(folder: Path) -> Store:
    url = f"sqlite:///{folder}/model.db"
    # whether a power cut is survived is no question here, and fsync takes most of the time
    return Store(lambda: SQLiteStorage(url, durability="commit"))


@dataclass(slots=True)
class Flight:
    """A batch on its way to the store."""

    batch: Batch
    done: Callable[[StorageError | None], None]


@dataclass(slots=True, kw_only=True)
class Rig:
    """The broker. `busy`: the store takes its time, a batch stays in flight until `land` or `crash`."""

    store: Store = field(default_factory=memory_store)
    settings: EngineSettings = field(default_factory=EngineSettings)
    now: int = START
    seed: int = 0
    busy: bool = False
    step: int = 0  # counted by `send`, `tick` and `drop`
    engine: Engine = field(init=False)
    journal: Journal = field(init=False)
    dispatch: Dispatch = field(init=False)
    storage: Storage = field(init=False)
    peers: list[Peer] = field(init=False, default_factory=list)
    flight: Flight | None = field(init=False, default=None)
    #: Number of a batch -> the last step whose changes it holds.
    sealed: dict[int, int] = field(init=False, default_factory=dict)
    random: Random = field(init=False)
    given: list[str] = field(init=False, default_factory=list)  # ids and tokens made up by the last command, in order
    _numbers: Any = field(init=False)
    _woken: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        self._numbers = count(1)
        self.random = Random(self.seed)
        self._start()

    def _start(self) -> None:
        self.storage = self.store.open()
        self.storage.open()
        snapshot = self.storage.load(self.settings.max_completed_jobs)
        self.journal = Journal(
            snapshot.number,
            submit=self._submit,
            release=_release,
            wake=self._wake,
            later=lambda: None,  # `tick` and `flush` ripen
            stand=_never_stands,
        )
        self.engine = Engine(
            self.settings,
            journal=self.journal,
            deliver=self._deliver,
            new_id=self.new_id,
            random=self.random,
            recall=self.recall,
        )
        recover(self.engine, snapshot, self.now)
        self.dispatch = Dispatch(self.engine, lambda: self.now, frozenset(), "model")
        self.flight = None
        self.busy = False
        self._woken = False
        self.sealed = {snapshot.number: self.step}

    # ---------------------------------------------------------------- clients

    def new_id(self) -> str:
        """Ascending, like the server's; never given twice, not even after a crash."""
        id = f"{next(self._numbers):08d}"
        self.given.append(id)
        return id

    def connect(self) -> Peer:
        peer = Peer(self)
        self.peers.append(peer)
        return peer

    def post(self, peer: Peer, cmd: str, **fields: Any) -> int:
        """Send a command as bytes, as a client does; the number under which `peer.replies` will have the answer."""
        self.step += 1
        number = next(self._numbers)
        self.given.clear()
        packed = msgpack.packb({"cmd": cmd, **fields, "reqId": number})
        self.dispatch.run(peer, codec.read_command(packed))
        self.turn()
        return number

    def ask(self, peer: Peer, cmd: str, **fields: Any) -> dict[str, Any]:
        """A command and its reply, which must be there at once."""
        number = self.post(peer, cmd, **fields)
        assert number in peer.replies, f"{cmd} was not answered"
        return peer.replies.pop(number)

    def drop(self, peer: Peer) -> None:
        """The connection of a client closes."""
        self.step += 1
        peer.closed = True
        self.peers.remove(peer)
        self.engine.delivery.close(peer.session, self.now)
        self.engine.settle(self.now)
        self.turn()

    # ---------------------------------------------------------------- time

    def advance(self, ms: int) -> None:
        """Let time pass; every deadline in between is met on its millisecond."""
        until = self.now + ms
        while (due := self.engine.timers.next) <= until:
            self.now = max(self.now, due)
            self.tick()
        self.now = until

    def tick(self) -> None:
        """Run the deadlines that are due now."""
        self.step += 1
        self.engine.tick(self.now)
        self.journal.ripen()
        self.turn()

    # ---------------------------------------------------------------- the store

    def turn(self) -> None:
        """The end of a turn of the loop: the open batch goes to the store, if that is free."""
        if self._woken:
            self._woken = False
            self.journal.flush()
        self._seal()

    def _seal(self) -> None:
        """While the open batch is empty, nothing has changed since the one before it."""
        if not self.journal.dirty:
            self.sealed[self.journal.number - 1] = self.step

    def land(self) -> None:
        """The batch in flight becomes durable; its replies leave, and the next batch is on its way."""
        flight, self.flight = self.flight, None
        if flight is not None:
            self.storage.commit(flight.batch)
            flight.done(None)

    def flush(self) -> None:
        """Everything becomes durable, and the store is fast again."""
        self.busy = False
        self.journal.ripen()
        self.turn()
        while self.flight is not None:
            self.land()
        assert not self.journal.dirty

    @property
    def durable_step(self) -> int:
        """Every change up to this step is in the store."""
        return self.sealed[self.journal.durable]

    def _wake(self) -> None:
        self._woken = True

    def _submit(self, batch: Batch, done: Callable[[StorageError | None], None]) -> None:
        self.sealed[batch.number] = self.step
        assert self.flight is None, "two batches in flight"
        if self.busy:
            self.flight = Flight(batch, done)
        else:
            self.storage.commit(batch)
            done(None)

    def _deliver(self, sessions: set[Any], event: dict[str, Any]) -> None:
        frame = framed(codec.encode({"type": "event", "event": event}))
        for session in sessions:
            if not self.journal.attach(self.journal.latest, (session.connection, frame)):
                session.connection.send(frame)

    def recall(self, question: Question, then: Recalled) -> None:
        """Bring archived jobs into the index; what the server does on a thread."""
        while True:
            landed = self.journal.begin_read()
            rows = question(self.storage)
            answer = rows, self.storage.logs_of([row.seq for row in rows])
            if not self.engine.archive.admit(answer, self.journal.end_read(landed)):
                break
        then(None)
        self.engine.upkeep.shed()
        self.engine.settle(self.now)

    # ---------------------------------------------------------------- ends and new beginnings

    def restart(self) -> None:
        """A clean stop and a new start on the same store (R111): nothing is lost, nobody is blamed."""
        self.engine.closing = True
        self.engine.delivery.answer_all()
        self.flush()
        self._end()
        self._start()

    def crash(self, *, landed: bool = False) -> int:
        """The process is killed: memory and the open batch are gone; the one in flight got through if `landed`.

        The last step that the store knows.
        """
        known = self.durable_step
        if landed and self.flight is not None:
            self.storage.commit(self.flight.batch)
            known = self.sealed[self.flight.batch.number]
        self._end()
        self._start()
        return known

    def _end(self) -> None:
        for peer in self.peers:
            peer.closed = True
        self.peers.clear()
        self.storage.close()

    def rebuilt(self) -> Engine:
        """A second engine, made from what the store has once everything is durable (design I1)."""
        self.flush()
        snapshot = self.storage.load(self.settings.max_completed_jobs)
        journal = Journal(
            snapshot.number,
            submit=_no_commits,
            release=_release,
            wake=lambda: None,
            later=lambda: None,
            stand=_never_stands,
        )
        engine = Engine(
            self.settings,
            journal=journal,
            deliver=lambda _sessions, _event: None,
            new_id=self.new_id,
            random=Random(self.seed),
            recall=self.recall,
        )
        recover(engine, snapshot, self.now)
        return engine

    def close(self) -> None:
        self._end()


def _release(outgoing: list[Outgoing]) -> None:
    for peer, frame in outgoing:
        peer.send(frame)


def _never_stands(error: StorageError | None) -> None:
    raise AssertionError(f"the store of a rig never fails: {error}")


def _no_commits(batch: Batch, _done: object) -> None:
    raise AssertionError(f"recovery must change nothing: {batch}")
