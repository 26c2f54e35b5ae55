"""Hostile bytes: whatever one connection sends, the server and every other connection live on.

Seeded: a failure names its seed and round, and the same numbers make the same bytes. Bounded by rounds, not by time.
"""

from __future__ import annotations

import os
import random
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest

from tests.server.scenes import frame, framed

#: Commands that a mutation starts from: every kind of field, every reader of a queue.
SEEDS: list[dict[str, Any]] = [
    {"cmd": "Ping", "reqId": "1"},
    {"cmd": "Hello", "protocolVersion": 3, "capabilities": ["pipelining"], "reqId": "1"},
    {"cmd": "PUSH", "queue": "$", "name": "j", "data": {"a": [1, 2.5, None, b"x"]}, "priority": 5, "delay": 10**6,
     "tags": ["a", "b"], "backoff": {"type": "fixed", "delay": 5}, "uniqueKey": "k", "dedup": {"ttl": 5},
     "groupId": "g", "reqId": "1"},
    {"cmd": "PUSHB", "queue": "$", "jobs": [{"name": "j", "data": 1}, {"name": "k", "data": {}, "customId": "c"}],
     "reqId": 2},
    {"cmd": "PULL", "queue": "$", "timeout": 0, "owner": "w", "lockTtl": 1000, "group": {"concurrency": 1},
     "reqId": "1"},
    {"cmd": "PULLB", "queue": "$", "count": 3, "reqId": "1"},
    {"cmd": "ACK", "id": "x", "result": {"a": 1}, "token": "t", "reqId": "1"},
    {"cmd": "ACKB", "ids": ["a", "b"], "tokens": ["t", None], "results": [1, 2], "reqId": "1"},
    {"cmd": "FAIL", "id": "x", "error": "e", "stack": ["a", "b"], "reqId": "1"},
    {"cmd": "GetJobs", "queue": "$", "state": ["waiting", "paused"], "limit": 5, "reqId": "1"},
    {"cmd": "SetStallConfig", "queue": "$", "config": {"stallInterval": 5000}, "reqId": "1"},
    {"cmd": "JobHeartbeatB", "ids": ["a"], "tokens": ["t"], "reqId": "1"},
    {"cmd": "RegisterWorker", "name": "w", "queues": ["$"], "reqId": "1"},
    {"cmd": "Clean", "queue": "$", "grace": 0, "state": "waiting", "limit": 1, "reqId": "1"},
]  # fmt: skip

#: Values that a mutation puts where something else belongs.
ODD: list[Any] = [
    None, True, False, 0, -1, 2**31, 2**63 - 1, 2**64 - 1, -(2**63), 1.5, float("nan"), float("inf"), "", "\0",
    "é" * 300, "__proto__", b"", b"\xff\xfe", [], [[[]]], [None] * 50, {}, {"a": {"b": {}}}, {5: 6}, {None: None},
    {(1, 2): 3},
    msgpack.ExtType(0, b"\0"), msgpack.ExtType(1, b"abc"), msgpack.ExtType(127, b"\0\0\0\0"), msgpack.Timestamp(1, 2),
    "x" * 70_000,
]  # fmt: skip


@pytest.fixture
def bystander(broker: Any, queue: str) -> Iterator[Any]:
    """Another connection, with a parked pull and a subscription; at the end both still work."""
    conn = broker.connect()
    parked = conn.start("PULL", queue=f"{queue}.quiet", timeout=60_000)
    assert conn.send("Ping")["ok"]
    pid = broker.pid
    yield conn
    assert conn.send("Ping")["ok"]
    id = conn.push(f"{queue}.quiet", {"still": "here"})
    job = parked.result(10)["job"]
    assert (job["id"], job["data"]) == (id, {"still": "here"})
    assert broker.pid == pid
    os.kill(pid, 0)  # the same process, and it lives
    conn.close()


def exchange(broker: Any, data: bytes, *, patience: float = 0.02) -> bytes:
    """Send bytes on a connection of their own, take whatever comes within `patience` seconds, hang up."""
    with socket.create_connection((broker.host, broker.port), timeout=5) as raw:
        answer = b""
        try:
            raw.sendall(data)
            raw.settimeout(patience)
            while chunk := raw.recv(1 << 16):
                answer += chunk
        except (TimeoutError, ConnectionError):
            pass
        return answer


class Lenient:
    """A connection that reads whatever MessagePack can say: user data comes back as it was sent, damage included."""

    def __init__(self, broker: Any) -> None:
        self.raw = socket.create_connection((broker.host, broker.port), timeout=20)
        self.stream = self.raw.makefile("rb")

    def send(self, data: bytes) -> None:
        self.raw.sendall(data)

    def recv(self) -> Any:
        size = int.from_bytes(self.read(4), "big")
        return lenient(self.read(size))

    def read(self, size: int) -> bytes:
        data = self.stream.read(size)
        assert len(data) == size, "the server closed the connection"
        return data

    def close(self) -> None:
        self.stream.close()
        self.raw.close()


def lenient(payload: bytes) -> Any:
    """Decode a payload; texts that are no UTF-8 and keys that are lists included."""
    return msgpack.unpackb(
        payload,
        strict_map_key=False,
        use_list=False,
        unicode_errors="surrogateescape",
        object_pairs_hook=lambda pairs: {repr(key) if isinstance(key, dict) else key: value for key, value in pairs},
    )


def answers(data: bytes) -> list[Any]:
    """The whole frames in an answer."""
    found = []
    while len(data) >= 4:
        size = int.from_bytes(data[:4], "big")
        if len(data) < 4 + size:
            break
        found.append(lenient(data[4 : 4 + size]))
        data = data[4 + size :]
    return found


def mutated(rng: random.Random, queue: str) -> bytes:
    """A command with something odd in one or more of its places, or with damaged bytes; framed."""
    command = {key: (queue if value == "$" else value) for key, value in rng.choice(SEEDS).items()}
    for _ in range(rng.randint(0, 3)):
        spot = rng.random()
        if spot < 0.6:
            command[rng.choice(list(command))] = rng.choice(ODD)
        elif spot < 0.8:
            command.pop(rng.choice(list(command)), None)
        else:
            odd = rng.choice(ODD)
            command[odd if isinstance(odd, (str, int, float, bytes, bool, type(None))) else "more"] = rng.choice(ODD)
        command = command or {"cmd": "Ping"}
    payload = bytearray(msgpack.packb(command))
    damage = rng.random()
    if damage < 0.25:
        for _ in range(rng.randint(1, 6)):
            payload[rng.randrange(len(payload))] = rng.randrange(256)
    elif damage < 0.35:
        del payload[rng.randrange(len(payload)) :]
    elif damage < 0.45:
        spot = rng.randrange(len(payload) + 1)
        payload[spot:spot] = rng.randbytes(rng.randint(1, 40))
    return framed(bytes(payload))


@pytest.mark.parametrize("seed", range(8))
def test_mutated_commands_are_answered_one_by_one(broker: Any, bystander: Any, queue: str, seed: int) -> None:
    """Whole frames: each is answered exactly once, with a map that says ok or why not, and no word of Python in it."""
    rng = random.Random(seed)
    conn = Lenient(broker)
    for round in range(150):
        data = mutated(rng, f"{queue}.{rng.randrange(3)}")
        conn.send(data + frame({"cmd": "Ping", "reqId": f"end {round}"}))
        replies = [conn.recv(), conn.recv()]  # in either order: one may wait for its commit
        place = (seed, round, data[:80])
        assert f"end {round}" in [reply.get("reqId") for reply in replies], (place, replies)
        (ping,) = [reply for reply in replies if reply.get("reqId") == f"end {round}"]
        assert ping["ok"], place
        replies.remove(ping)
        reply = replies[0]
        assert isinstance(reply["ok"], bool), place
        if not reply["ok"]:
            assert isinstance(reply["error"], str) and reply["error"], place
            for word in (
                "Traceback",
                "object has no",
                "Error:",
                "NoneType",
                "unhashable",
                "msgpack",
                "not subscriptable",
            ):
                assert word not in reply["error"], (place, reply)
            assert reply["error"] != "Internal server error", place
    conn.close()


@pytest.mark.parametrize("seed", range(4))
def test_random_bytes_end_at_most_their_own_connection(broker: Any, bystander: Any, seed: int) -> None:
    rng = random.Random(1000 + seed)
    for round in range(40):
        kind = rng.randrange(4)
        if kind == 0:
            data = rng.randbytes(rng.randint(1, 2000))
        elif kind == 1:
            data = b"".join(framed(rng.randbytes(rng.randint(0, 60))) for _ in range(rng.randint(1, 30)))
        elif kind == 2:  # the wrong length: shorter or longer than what follows
            payload = msgpack.packb(rng.choice(SEEDS))
            data = struct.pack(">I", max(0, len(payload) + rng.randint(-9, 9))) + payload + rng.randbytes(8)
        else:
            data = struct.pack(">I", rng.choice([0x04000000, 0x03FFFFFF, 0x04000001, 0xFFFFFFFF])) + rng.randbytes(50)
        for reply in answers(exchange(broker, data)):
            assert isinstance(reply, dict) and isinstance(reply["ok"], bool), (seed, round)
        if round % 10 == 0:
            assert bystander.send("Ping")["ok"], (seed, round)


def test_a_stream_cut_anywhere_is_put_together_again(broker: Any, wire: Any, queue: str) -> None:
    """Frames split and coalesced at every boundary (core 1.1), one byte at a time included."""
    rng = random.Random(7)
    commands = [
        {"cmd": "PUSH", "queue": queue, "name": "j", "data": "x" * rng.randint(0, 300), "reqId": n} for n in range(40)
    ]
    stream = b"".join(frame(command) for command in commands)
    for seed in range(4):
        conn = broker.connect()
        rng = random.Random(seed)
        spot = 0
        while spot < len(stream):
            step = 1 if seed == 0 and spot < 400 else rng.choice([1, 3, 4, 5, 100, 2000])
            conn.raw(stream[spot : spot + step])
            spot += step
        replies = [conn.recv(10) for _ in commands]
        assert sorted(reply["reqId"] for reply in replies) == list(range(40))
        assert all(reply["ok"] for reply in replies)
        conn.close()
    assert wire.send("Count", queue=queue)["count"] == 160


def test_a_frame_that_never_ends_leaves_nothing(broker: Any, bystander: Any, wire: Any, queue: str) -> None:
    """Twenty connections that hang up in the middle of a push."""
    whole = frame({"cmd": "PUSH", "queue": queue, "name": "j", "data": "x" * 100})
    for cut in range(1, len(whole), 6):
        assert exchange(broker, whole[:cut], patience=0.001) == b""
    assert wire.send("Count", queue=queue)["count"] == 0


def nested(depth: int, kind: str) -> bytes:
    """A MessagePack value of `depth` containers in one another."""
    if kind == "list":
        return b"\x91" * depth + b"\xc0"
    return b"\x81\xa1a" * depth + b"\xc0"


def with_field(command: dict[str, Any], name: str, value: bytes) -> bytes:
    """The frame of `command` with one more field whose value is already packed."""
    packed = msgpack.packb(command)
    assert packed[0] & 0xF0 == 0x80 and len(command) < 15
    return framed(bytes([packed[0] + 1]) + packed[1:] + msgpack.packb(name) + value)


@pytest.mark.parametrize("kind", ["list", "map"])
def test_nesting_is_accepted_up_to_512(broker: Any, bystander: Any, wire: Any, queue: str, kind: str) -> None:
    """R62: deeper is refused by an error, however deep, and never by the end of anything."""
    conn = broker.connect()
    push = {"cmd": "PUSH", "queue": queue, "name": "j", "reqId": "r"}
    conn.raw(with_field(push, "data", nested(512, kind)))
    reply = conn.recv(10)
    assert reply["ok"], reply
    for depth in (514, 1023, 1024, 1025, 5_000, 100_000, 1_000_000):
        conn.raw(with_field(push, "data", nested(depth, kind)))
        reply = conn.recv(10)
        assert not reply["ok"], depth
        assert conn.send("Ping")["ok"], depth
    assert wire.send("Count", queue=queue)["count"] == 1
    conn.close()
    got = broker.connect()
    got.raw(frame({"cmd": "PULL", "queue": queue, "reqId": "r"}))
    assert_nested(got, 512)
    got.close()


def assert_nested(conn: Any, depth: int) -> None:
    """The next frame is a delivery whose data is `depth` deep, exactly as it was pushed."""
    job = conn.recv(10)["job"]
    data, count = job["data"], 0
    while data is not None:
        data = data[0] if isinstance(data, list) else data["a"]
        count += 1
    assert count == depth


@pytest.mark.parametrize(
    "where", ["tags", "dependsOn", "backoff", "dedup", "repeat", "group", "ids", "nonsense", "cmd", "reqId"]
)
def test_a_bomb_in_a_control_field_is_refused(broker: Any, bystander: Any, queue: str, where: str) -> None:
    """Deep and wide values where the server has to look inside (R62)."""
    command = {"cmd": "PULL" if where == "group" else "ACKB" if where == "ids" else "PUSH", "queue": queue, "name": "j"}
    if where == "cmd":
        del command["cmd"]
    conn = broker.connect()
    for bomb in (
        nested(200_000, "list"), nested(200_000, "map"),
        b"\xdd" + struct.pack(">I", 300_000) + b"\x90" * 300_000,  # 300,000 empty lists
        b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff",
        b"\xc9\xff\xff\xff\xff\x00",
    ):  # fmt: skip
        conn.raw(with_field(command, where, bomb))
        reply = conn.recv(15)
        # An unknown field may be skipped unread and a reqId goes back as it came; every other place must refuse.
        assert not reply["ok"] or where in ("nonsense", "reqId"), (where, bomb[:8])
        assert conn.send("Ping")["ok"]
    conn.close()


def peak(pid: int, *, anew: bool = False) -> int:
    """The highest resident size a process has had, in bytes; `anew` forgets what was before now."""
    if anew:
        Path(f"/proc/{pid}/clear_refs").write_text("5")
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no VmHWM")


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
@pytest.mark.parametrize("where", ["data", "tags"])
def test_a_hostile_frame_of_8_mb_costs_little(broker: Any, queue: str, where: str) -> None:
    """R62: 8 million empty lists add less than 64 MiB to the process, and others are answered meanwhile."""
    other = broker.connect()
    other.send("Ping")
    before = peak(broker.pid, anew=True)
    conn = broker.connect()
    size = 8_000_000
    command = {"cmd": "PUSH", "queue": queue, "name": "j"}
    conn.raw(with_field(command, where, b"\xdd" + struct.pack(">I", size) + b"\x90" * size))
    assert other.send("Ping")["ok"]
    reply = conn.recv(30)
    assert where == "data" or not reply["ok"]
    assert peak(broker.pid) - before < 64 << 20
    if reply["ok"]:
        other.send("Obliterate", queue=queue)
    assert conn.send("Ping")["ok"]
    conn.close()


def test_announced_lengths_cost_nothing(broker: Any, bystander: Any) -> None:
    """R60: fifty connections announce 64 MiB each and send none of it; buffers grow with what has come."""
    before = peak(broker.pid, anew=True) if Path("/proc/self/status").exists() else 0
    held = []
    for _ in range(50):
        raw = socket.create_connection((broker.host, broker.port), timeout=5)
        raw.sendall(struct.pack(">I", 64 << 20) + b"\xdd\x7f\xff\xff\xff")
        held.append(raw)
    assert bystander.send("Ping")["ok"]
    if before:
        assert peak(broker.pid) - before < 64 << 20
    for raw in held:
        raw.close()


def test_a_frame_before_auth_is_small(fresh_broker: Any) -> None:
    """R60: who has not said the token yet may not send more than 64 KiB at once."""
    broker = fresh_broker("memory", env={"AUTH_TOKENS": "secret"})
    conn = broker.connect()
    conn.raw(frame({"cmd": "Auth", "token": "x" * 70_000}))
    reply = conn.recv(5)
    assert not reply["ok"]
    assert broker.connect().send("Auth", token="secret") == {"ok": True}


def test_a_peer_that_never_reads_is_cut_off_alone(fresh_broker: Any) -> None:
    """Core 1.12: beyond the write queue its connection is reset; its job goes to somebody else."""
    broker = fresh_broker("memory", env={"TCP_MAX_WRITE_QUEUE_BYTES": str(2 << 20)})
    other = broker.connect()
    held = other.push("held")
    other.push("big", "x" * (1 << 20))
    (big,) = (job["id"] for job in other.send("GetJobs", queue="big")["jobs"])
    with socket.create_connection((broker.host, broker.port), timeout=5) as deaf:
        deaf.sendall(frame({"cmd": "PULL", "queue": "held", "reqId": 0}))
        deaf.recv(1)
        assert other.state(held) == "active"
        waiting = other.start("PULL", queue="held", timeout=60_000)
        try:
            for n in range(60):
                deaf.sendall(frame({"cmd": "GetJob", "id": big, "reqId": n}))
        except ConnectionError:
            pass
        assert waiting.result(20)["job"]["id"] == held
    assert other.send("Ping")["ok"]
