"""Twenty SIGKILLs under load on SQLite: what was acknowledged stays, and nobody holds a job twice."""

from __future__ import annotations

import random
import shutil
import sqlite3
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

KILLS = 20
LEASE = 8_000  # ms
QUEUES = ("crash.a", "crash.b")
DONE = "completed"
STATES = {"queued", "waiting-children", "active", "completed", "failed"}


@dataclass(slots=True)
class Delivery:
    """One job handed to one worker. Times are of the monotonic clock, in seconds."""

    id: str
    token: str
    asked_at: float  # before PULL was sent: the lease lasts at least until then plus its length
    life: int  # how many times the broker had been killed
    kept: bool = False  # the file of a later kill showed this very lease


@dataclass(slots=True)
class Ledger:
    """What the clients were told. Every list is only ever appended to."""

    pushed: list[str] = field(default_factory=list)  # ids in answers of PUSH and PUSHB
    acked: list[tuple[str, str]] = field(default_factory=list)  # (id, token) in ok answers of ACK and ACKB
    delivered: list[Delivery] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)
    life: int = 0


class Client(threading.Thread):
    """A producer or worker that comes back after every kill, until it is told to stop."""

    def __init__(self, broker: Any, ledger: Ledger, seed: int) -> None:
        super().__init__(daemon=True)
        self.broker = broker
        self.ledger = ledger
        self.rng = random.Random(seed)
        self.ended = threading.Event()
        self.up = threading.Event()  # set while the broker is running
        self.up.set()
        self.conn: Any = None

    def run(self) -> None:
        while not self.ended.is_set():
            if not self.up.wait(0.2):
                continue
            try:
                self.conn = self.broker.connect()
                while not self.ended.is_set():
                    self.step()
            except (OSError, EOFError, TimeoutError):
                if self.conn is not None:
                    self.conn.close()
                self.ended.wait(0.02)
            except Exception as fault:  # noqa: BLE001 - a fault of any kind is a finding
                self.ledger.faults.append(f"{type(self).__name__}: {fault!r}")
                return

    def step(self) -> None:
        raise NotImplementedError


class Producer(Client):
    """Pushes singly, in pipelines and in batches; some jobs are leased long, some have priorities."""

    def step(self) -> None:
        queue = self.rng.choice(QUEUES)
        job = {"name": "j", "data": {"n": self.rng.random()}, "priority": self.rng.choice([0, 0, 0, 5])}
        kind = self.rng.random()
        if kind < 0.4:
            replies = [self.conn.send("PUSH", queue=queue, **job)]
        elif kind < 0.7:
            replies = self.conn.pipeline(
                [{"cmd": "PUSH", "queue": queue, **job} for _ in range(self.rng.randint(2, 12))]
            )
        else:
            replies = [self.conn.send("PUSHB", queue=queue, jobs=[job] * self.rng.randint(1, 15))]
        for reply in replies:
            assert reply["ok"], reply
            with self.ledger.lock:
                self.ledger.pushed += reply["ids"] if "ids" in reply else [reply["id"]]
        self.ended.wait(self.rng.uniform(0, 0.004))


class Consumer(Client):
    """Pulls with a lease and acknowledges; an outcome it could not deliver is told again after a kill."""

    def __init__(self, broker: Any, ledger: Ledger, seed: int) -> None:
        super().__init__(broker, ledger, seed)
        self.owed: list[Delivery] = []

    def step(self) -> None:
        for delivery in list(self.owed):
            self.settle([delivery])
        life = self.ledger.life
        asked_at = time.monotonic()
        count = self.rng.choice([1, 1, 4, 10])
        reply = self.conn.send(
            "PULLB", queue=self.rng.choice(QUEUES), count=count, owner="w", lockTtl=LEASE, timeout=50
        )
        assert reply["ok"], reply
        got = [
            Delivery(job["id"], token, asked_at, life)
            for job, token in zip(reply["jobs"], reply["tokens"], strict=True)
        ]
        with self.ledger.lock:
            self.ledger.delivered += got
        self.owed += got
        if self.rng.random() < 0.5:
            self.settle(got)
        else:
            for delivery in got:
                self.settle([delivery])

    def settle(self, deliveries: list[Delivery]) -> None:
        """Acknowledge; after a kill a refusal is all right: the claim was not stored, or the ACK was."""
        life = self.ledger.life
        if len(deliveries) == 1:
            (one,) = deliveries
            reply = self.conn.send("ACK", id=one.id, token=one.token, result=1)
        elif deliveries:
            ids, tokens = [one.id for one in deliveries], [one.token for one in deliveries]
            reply = self.conn.send("ACKB", ids=ids, tokens=tokens)
        else:
            return
        with self.ledger.lock:
            for one in deliveries:
                self.owed.remove(one)
                if reply["ok"]:
                    self.ledger.acked.append((one.id, one.token))
                elif one.life == life and time.monotonic() - one.asked_at < LEASE / 1000 - 0.3:
                    self.ledger.faults.append(f"refused although its lease was live: {one}, {reply}")


def stored(file: Path, copy: Path) -> dict[str, tuple[str, bytes | None]]:
    """id -> (state, rest) of every row, read from a copy so that the broker finds the file as the kill left it."""
    copy.mkdir()
    for part in file.parent.glob(f"{file.name}*"):
        if not part.name.endswith((".lock", "-shm")):
            shutil.copy(part, copy / part.name)
    db = sqlite3.connect(copy / file.name)
    try:
        assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        rows = db.execute("SELECT id, state, rest FROM jobs").fetchall()
    finally:
        db.close()
        shutil.rmtree(copy)
    assert len({id for id, _, _ in rows}) == len(rows), "an id is stored twice"
    assert {state for _, state, _ in rows} <= STATES
    return {id: (state, rest) for id, state, rest in rows}


def check_file(rows: dict[str, tuple[str, bytes | None]], ledger: Ledger) -> None:
    """Conservation (R02): what clients were told before the kill is in the file, each job in exactly one state."""
    with ledger.lock:
        pushed, acked, delivered = list(ledger.pushed), list(ledger.acked), list(ledger.delivered)
    missing = [id for id in pushed if id not in rows]
    assert not missing, f"{len(missing)} acknowledged pushes are missing, first {missing[:3]}"
    undone = [id for id, _ in acked if rows[id][0] != DONE]
    assert not undone, f"{len(undone)} acknowledged ACKs are undone, first {undone[:3]}"
    for delivery in delivered:
        state, rest = rows[delivery.id]
        if state == "active" and rest is not None and delivery.token.encode() in rest:
            delivery.kept = True


def check_deliveries(ledger: Ledger) -> None:
    """No two live leases: a lease of this life, or one that the file kept, ends before the next delivery begins."""
    by_id: dict[str, list[Delivery]] = {}
    for delivery in sorted(ledger.delivered, key=lambda one: one.asked_at):
        by_id.setdefault(delivery.id, []).append(delivery)
    acked = set(ledger.acked)
    for id, deliveries in by_id.items():
        assert len({one.token for one in deliveries}) == len(deliveries), id
        for earlier, later in pairwise(deliveries):
            if earlier.life == later.life or earlier.kept:
                apart = later.asked_at - earlier.asked_at
                assert apart > LEASE / 1000 - 0.3, f"{id} was delivered again after {apart:.3f} s of a {LEASE} ms lease"
        # Who was told "completed" held the last delivery: an older token never completes a newer one.
        done = [n for n, one in enumerate(deliveries, 1) if (one.id, one.token) in acked]
        assert done in ([], [len(deliveries)]), (id, done, deliveries)
    assert max(Counter(id for id, _ in ledger.acked).values(), default=1) == 1


@pytest.mark.slow
@pytest.mark.timeout(150)
@pytest.mark.parametrize("writer", ["thread", "process"])
def test_nothing_acknowledged_is_lost_and_nothing_is_held_twice_over_twenty_kills(
    fresh_broker: Any, tmp_path: Path, writer: str
) -> None:
    """R02, R03, R05, R113; conservation is proved from the file after each kill."""
    folder = tmp_path / "data"
    folder.mkdir()
    file = folder / "crash.db"
    broker = fresh_broker(f"sqlite:///{file}", args=["--writer", writer])
    ledger = Ledger()
    clients: list[Client] = [Producer(broker, ledger, seed) for seed in range(3)]
    clients += [Consumer(broker, ledger, 100 + seed) for seed in range(3)]
    for client in clients:
        client.start()
    rng = random.Random(20)
    try:
        for kill in range(KILLS):
            enough = len(ledger.acked) + 30
            deadline = time.monotonic() + 10
            while len(ledger.acked) < enough and time.monotonic() < deadline:
                time.sleep(0.01)
            time.sleep(rng.uniform(0, 0.03))  # anywhere in the load, not right after an answer
            for client in clients:
                client.up.clear()
            broker.kill()
            check_file(stored(file, tmp_path / f"copy{kill}"), ledger)
            ledger.life += 1
            broker.start()
            for client in clients:
                client.up.set()
            assert not ledger.faults, ledger.faults
        for client in clients[:3]:
            client.ended.set()
            client.join(10)
        with broker.connect() as wire:
            deadline = time.monotonic() + 30
            while time.monotonic() < deadline:
                left = sum(count for queue in QUEUES for state, count in wire.counts(queue).items() if state != DONE)
                if not left and not any(client.owed for client in clients if isinstance(client, Consumer)):
                    break
                time.sleep(0.05)
            assert left == 0, left
    finally:
        for client in clients:
            client.ended.set()
        for client in clients:
            client.join(10)
    assert not ledger.faults, ledger.faults
    check_deliveries(ledger)
    assert broker.terminate(30) == 0
    rows = stored(file, tmp_path / "copy-end")
    check_file(rows, ledger)
    assert {state for state, _ in rows.values()} == {DONE}
    assert len(ledger.acked) >= KILLS * 10
