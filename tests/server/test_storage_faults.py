"""A store that cannot write: refusals in time, reads as ever, nothing half-done, recovery without a restart (R20-R25).

The faults are real and come from outside: a file-size limit set on the running broker's processes, another process
that holds the write lock, and SQLite's own `max_page_count`.
"""

from __future__ import annotations

import os
import resource
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.server.scenes import HOUR, lease, settled, until

REFUSED = "Storage unavailable"
SOON = 1.0  # seconds in which a mutation is refused while the store is known to be away (R21)
ROOT = Path(__file__).resolve().parents[2]

#: Loaded by the interpreter of the broker: lets a file say how many pages its databases may have.
SITE = """
import os, sqlite3

class Connection(sqlite3.Connection):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.limit = None

    def check(self):
        try:
            with open(os.environ["MAX_PAGES_FILE"]) as file:
                limit = file.read()
        except OSError:
            limit = "4294967294"
        if limit != self.limit:
            self.limit = limit
            super().execute("PRAGMA max_page_count = " + limit).fetchall()

    def execute(self, sql, *args):
        if sql.lstrip().upper().startswith("BEGIN"):
            self.check()
        return super().execute(sql, *args)

    def cursor(self, factory=None):
        return super().cursor(factory or Cursor)

class Cursor(sqlite3.Cursor):
    def execute(self, sql, *args):
        if sql.lstrip().upper().startswith("BEGIN"):
            self.connection.check()
        return super().execute(sql, *args)

connect = sqlite3.connect
def limited(*args, **kwargs):
    kwargs.setdefault("factory", Connection)
    return connect(*args, **kwargs)
sqlite3.connect = sqlite3.dbapi2.connect = limited
"""


def family(pid: int) -> list[int]:
    """The process and all that descend from it: the writer may be one of its own."""
    found = [pid]
    for one in found:
        for path in Path(f"/proc/{one}/task").glob("*/children"):
            found += [int(child) for child in path.read_text().split() if int(child) not in found]
    return found


class Fault:
    """A way to make the store fail, and to heal it."""

    def __init__(self, start: Callable[[], None], stop: Callable[[], None]) -> None:
        self.start = start
        self.stop = stop


@contextmanager
def locked(file: Path) -> Iterator[Fault]:
    """Another process's transaction holds the write lock."""
    db = sqlite3.connect(file, isolation_level=None, timeout=20)

    def stop() -> None:
        if db.in_transaction:
            db.execute("ROLLBACK")

    with closing(db):
        yield Fault(lambda: (db.execute("BEGIN IMMEDIATE"), None)[1], stop)
        stop()


@contextmanager
def limited(broker: Any) -> Iterator[Fault]:
    """No file may grow: every write to the WAL is an I/O error."""
    before = resource.prlimit(broker.pid, resource.RLIMIT_FSIZE)

    def start() -> None:
        for pid in family(broker.pid):
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (4096, before[1]))

    def stop() -> None:
        with suppress(ProcessLookupError):  # killed meanwhile, and its limit with it
            for pid in family(broker.pid):
                resource.prlimit(pid, resource.RLIMIT_FSIZE, before)

    yield Fault(start, stop)
    stop()


@contextmanager
def full(pages: Path) -> Iterator[Fault]:
    """The database may not get one page more: SQLITE_FULL."""
    yield Fault(lambda: (pages.write_text("1"), None)[1], lambda: pages.unlink(missing_ok=True))
    pages.unlink(missing_ok=True)


@pytest.fixture(params=["locked", "io-error", "full"])
def fault_name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=["thread", "process"])
def failing(
    request: pytest.FixtureRequest, fault_name: str, fresh_broker: Any, tmp_path: Path
) -> Iterator[tuple[Any, Path, Fault]]:
    """(broker, its file, the fault)."""
    file = tmp_path / "faults.db"
    env: dict[str, str] = {"STALL_CHECK_MS": "100"}
    if fault_name == "full":
        site = tmp_path / "site"
        site.mkdir()
        (site / "sitecustomize.py").write_text(SITE)
        path = [str(site), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        env |= {"PYTHONPATH": os.pathsep.join(path), "MAX_PAGES_FILE": str(tmp_path / "pages")}
    if fault_name == "io-error" and not hasattr(resource, "prlimit"):
        pytest.skip("needs prlimit")
    broker = fresh_broker(f"sqlite:///{file}", env=env, args=["--writer", request.param])
    made = {
        "locked": lambda: locked(file),
        "io-error": lambda: limited(broker),
        "full": lambda: full(tmp_path / "pages"),
    }
    with made[fault_name]() as fault:
        yield broker, file, fault


BULKY = "x" * 200_000  # more than the free pages of a small database hold


def push(conn: Any, queue: str = "q", **more: Any) -> tuple[Any, float]:
    """A push that needs room: its pending answer, and when it was sent."""
    return conn.start("PUSH", queue=queue, name="j", data=BULKY, **more), time.monotonic()


def degrade(broker: Any, fault: Fault) -> list[Any]:
    """Start the fault and push until one is refused: the answers that are still open, held with their batch."""
    fault.start()
    conn = broker.connect()
    held: list[Any] = []
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        pending, _ = push(conn, "held")
        try:
            reply = pending.result(0.3)
        except TimeoutError:
            held.append(pending)
            continue
        if not reply["ok"]:
            assert reply["error"].startswith(REFUSED), reply
            return held
    raise AssertionError("the broker never noticed that it cannot write")


def recovered(broker: Any) -> None:
    """Return when a push is accepted again; until then every push is refused in the right words."""
    conn = broker.connect()

    def accepted() -> bool:
        reply = conn.send("PUSH", queue="probe", name="j", data=BULKY)
        assert reply["ok"] or reply["error"].startswith(REFUSED), reply
        return bool(reply["ok"])

    until(accepted, timeout=20, every=0.1)
    conn.close()


def rows(file: Path) -> dict[str, str]:
    """id -> state, as the store has it."""
    with closing(sqlite3.connect(file, timeout=20)) as db:
        return dict(db.execute("SELECT id, state FROM jobs").fetchall())


def test_a_store_that_cannot_write_refuses_changes_and_serves_reads(failing: tuple[Any, Path, Fault]) -> None:
    """R20 to R23: the whole course of a fault, from the last good change to the first after it."""
    broker, file, fault = failing
    wire = broker.connect()
    done = wire.push("q", 1)
    assert wire.pull("q")["id"] == done
    wire.send("ACK", id=done, result="r")
    kept = wire.push("q", {"n": 2})
    job, token = lease(wire, "q", lockTtl=HOUR)
    assert job["id"] == kept
    before = wire.send("GetJobs", queue="q")["jobs"]
    names = wire.send("ListQueues")["queues"]

    held = degrade(broker, fault)

    # Changes are refused soon, each of them, and change nothing.
    for cmd, fields in (
        ("PUSH", {"queue": "q", "name": "j", "data": BULKY}),
        ("PUSHB", {"queue": "new", "jobs": [{"name": "j", "data": BULKY}] * 3}),
        ("PUSH", {"queue": "new", "name": "j", "data": BULKY, "jobId": "mine", "uniqueKey": "k"}),
        ("Pause", {"queue": "q"}),
        ("Update", {"id": kept, "data": BULKY}),
        ("ACK", {"id": kept, "token": token, "result": BULKY}),
        ("FAIL", {"id": kept, "token": token, "error": "e"}),
        ("Cancel", {"id": kept}),
        ("SetStallConfig", {"queue": "new", "config": {"maxStalls": 9}}),
    ):
        sent = time.monotonic()
        reply = wire.send(cmd, **fields)
        assert time.monotonic() - sent < SOON, cmd
        assert not reply["ok"], cmd
        assert reply["error"].startswith(REFUSED) or cmd == "Cancel", (cmd, reply)
        for word in ("sqlite", "disk I/O", "database", str(file), "Traceback"):
            assert word not in reply["error"], reply

    # Reads, heartbeats and everything that only looks goes on.
    for cmd, fields in (
        ("Ping", {}), ("Hello", {}), ("GetJob", {"id": kept}), ("GetState", {"id": done}), ("GetResult", {"id": done}),
        ("GetJobs", {"queue": "q"}), ("GetJobCounts", {"queue": "q"}), ("ListQueues", {}), ("IsPaused", {"queue": "q"}),
        ("JobHeartbeat", {"id": kept, "token": token}), ("SubscribeEvents", {"queue": "q"}),
    ):  # fmt: skip
        sent = time.monotonic()
        assert wire.send(cmd, **fields)["ok"], cmd
        assert time.monotonic() - sent < SOON, cmd

    seen = wire.send("GetJobs", queue="q")["jobs"]
    volatile = ("lastHeartbeat",)
    assert [strip(job, volatile) for job in seen] == [strip(job, volatile) for job in before]
    assert wire.state("mine") == "unknown"
    assert [name for name in wire.send("ListQueues")["queues"] if name not in ("held",)] == names

    fault.stop()
    recovered(broker)
    for pending in held:  # what was held was kept, whole
        reply = pending.result(20)
        assert reply["ok"], reply
        assert wire.state(reply["id"]) == "waiting"
    assert wire.send("ACK", id=kept, token=token, result="after") == {"ok": True}
    assert wire.send("PUSH", queue="q", name="j", data=1, jobId="mine", uniqueKey="k") == {"ok": True, "id": "mine"}
    for queue in ("q", "held", "probe"):
        settled(wire, queue)
    alive = {
        job["id"]: job["state"] for queue in ("q", "held", "probe") for job in wire.send("GetJobs", queue=queue)["jobs"]
    }
    as_stored = {"waiting": "queued", "completed": "completed", "active": "active"}
    assert rows(file) == {id: as_stored[state] for id, state in alive.items()}

    broker.restart("kill")
    again = broker.connect()
    assert again.job(kept)["returnvalue"] == "after"
    assert {job["id"]: job["state"] for queue in ("q", "held", "probe")
            for job in again.send("GetJobs", queue=queue)["jobs"]} == alive  # fmt: skip


def strip(job: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {key: value for key, value in job.items() if key not in names}


def test_a_broker_killed_while_its_store_cannot_write_has_lost_nothing_it_acknowledged(
    failing: tuple[Any, Path, Fault],
) -> None:
    """I3: what was not answered is open, what was refused did not happen, what was acknowledged is there."""
    broker, _, fault = failing
    wire = broker.connect()
    ids = [wire.push("q", n) for n in range(5)]
    held = degrade(broker, fault)
    assert not wire.send("PUSH", queue="q", name="j", data=BULKY, jobId="refused")["ok"]
    broker.kill()
    fault.stop()
    broker.start()
    again = broker.connect()
    assert [job["id"] for job in again.send("GetJobs", queue="q")["jobs"]] == ids
    assert again.state("refused") == "unknown"
    stored = again.send("GetJobs", queue="held")["jobs"]
    assert len(stored) <= len(held)  # all or none of the one batch
    assert all(job["data"] == BULKY for job in stored)


def test_leases_and_timeouts_wait_while_the_store_is_away(fresh_broker: Any, tmp_path: Path) -> None:
    """R22: a lease that ends meanwhile gets one grace; its holder may still finish afterwards."""
    file = tmp_path / "faults.db"
    broker = fresh_broker(f"sqlite:///{file}", env={"STALL_CHECK_MS": "100"})
    wire = broker.connect()
    id = wire.push("q")
    job, token = lease(wire, "q", lockTtl=2_000)
    with limited(broker) as fault:
        degrade(broker, fault)
        until(lambda: wire.send("Ping")["data"]["time"] > job["startedAt"] + 2_500, timeout=20, every=0.05)
        assert wire.state(id) == "active"
        assert wire.send("ACK", id=id, token=token)["error"].startswith(REFUSED)
        fault.stop()
        recovered(broker)
        assert wire.send("ACK", id=id, token=token, result="kept") == {"ok": True}
    done = wire.job(id)
    assert (done["state"], done["attempts"], done["stallCount"]) == ("completed", 0, 0)


def test_a_short_lock_is_waited_for(fresh_broker: Any, tmp_path: Path) -> None:
    """An outside reader or writer that is soon done costs a little time and no refusal of what was held."""
    file = tmp_path / "faults.db"
    broker = fresh_broker(f"sqlite:///{file}")
    wire = broker.connect()
    wire.push("q")
    with locked(file) as fault:
        fault.start()
        pending = wire.start("PUSH", queue="q", name="j", data=1)
        with pytest.raises(TimeoutError):
            pending.result(0.2)
        fault.stop()
        assert pending.result(15)["ok"]
    assert wire.send("Count", queue="q")["count"] == 2


def test_an_outside_reader_stops_nothing(fresh_broker: Any, tmp_path: Path) -> None:
    """A read transaction of another process, open the whole time."""
    file = tmp_path / "faults.db"
    broker = fresh_broker(f"sqlite:///{file}")
    wire = broker.connect()
    wire.push("q")
    with closing(sqlite3.connect(file, isolation_level=None)) as db:
        db.execute("BEGIN")
        assert db.execute("SELECT count(*) FROM jobs").fetchone() == (1,)
        ids = [wire.push("q", n) for n in range(50)]
        assert db.execute("SELECT count(*) FROM jobs").fetchone() == (1,)
        assert len(set(ids)) == 50
        db.execute("COMMIT")
    assert len(rows(file)) == 51


# ---------------------------------------------------------------- ends of the program


def run(*args: str, env: dict[str, str] | None = None, timeout: float = 20) -> subprocess.CompletedProcess[str]:
    """gqueue-server with these arguments, to its end."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("GQUEUE_", "AUTH_", "TCP_"))}
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.run(
        [sys.executable, "-m", "gqueue.server", "--port", "0", "--http-port", "-1", *args],
        env={**clean, "PYTHONPATH": path, **(env or {})},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def one_line(done: subprocess.CompletedProcess[str]) -> str:
    """What it said: exactly one line on stderr, nothing on stdout, no traceback."""
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    assert len(lines) == 1, done.stderr
    assert done.stdout == ""
    return lines[0]


def test_a_second_broker_on_the_same_file_ends_with_code_4(fresh_broker: Any, tmp_path: Path) -> None:
    """R10: within 5 s, in one line that names who owns it; the first one notices nothing. A link is the same file."""
    file = tmp_path / "one.db"
    broker = fresh_broker(f"sqlite:///{file}")
    wire = broker.connect()
    id = wire.push("q")
    link = tmp_path / "link.db"
    link.symlink_to(file)
    for path in (file, link):
        began = time.monotonic()
        done = run("--storage", f"sqlite:///{path}")
        assert done.returncode == 4, done.stderr
        assert time.monotonic() - began < 10
        assert any(str(pid) in one_line(done) for pid in family(broker.pid))
    assert wire.pull("q")["id"] == id
    broker.kill()
    broker.start()  # the lock fell with the process
    assert broker.connect().job(id)["id"] == id


def test_a_damaged_file_is_left_as_it_is(tmp_path: Path) -> None:
    """R26: exit code 6."""
    file = tmp_path / "bad.db"
    file.write_bytes(b"This is no database at all. " * 500)
    before = file.read_bytes()
    done = run("--storage", f"sqlite:///{file}")
    assert done.returncode == 6, done.stderr
    assert str(file) in one_line(done)
    assert file.read_bytes() == before


def test_a_header_of_sqlite_with_damage_behind_it_is_left_as_it_is(fresh_broker: Any, tmp_path: Path) -> None:
    file = tmp_path / "bad.db"
    broker = fresh_broker(f"sqlite:///{file}")
    wire = broker.connect()
    for n in range(200):
        wire.push("q", "x" * 500 + str(n))
    assert broker.terminate(20) == 0
    data = bytearray(file.read_bytes())
    data[4096:] = os.urandom(len(data) - 4096)
    file.write_bytes(data)
    done = run("--storage", f"sqlite:///{file}")
    assert done.returncode == 6, done.stderr
    one_line(done)
    assert file.read_bytes() == bytes(data)


def test_a_newer_schema_is_refused_untouched(fresh_broker: Any, tmp_path: Path) -> None:
    """R13: exit code 5. `user_version` or a row of `meta` may hold the version; whichever grows is raised."""
    file = tmp_path / "new.db"
    broker = fresh_broker(f"sqlite:///{file}")
    broker.connect().push("q")
    assert broker.terminate(20) == 0
    with closing(sqlite3.connect(file)) as db:
        (version,) = db.execute("PRAGMA user_version").fetchone()
        assert version > 0, "the schema's version stands in user_version"
        db.execute(f"PRAGMA user_version = {version + 1}")
        db.commit()
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    before = file.read_bytes()
    done = run("--storage", f"sqlite:///{file}")
    assert done.returncode == 5, done.stderr
    one_line(done)
    assert file.read_bytes() == before


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (["--prot", "5"], 2, "--prot"),
        (["--nonsense"], 2, "--nonsense"),
        (["--port", "70000"], 2, "70000"),
        (["--port", "abc"], 2, "abc"),
        (["--storage", "postgres://x"], 2, "postgres"),
        (["--storage", "nothing"], 2, "nothing"),
        (["--durability", "maybe"], 2, "maybe"),
        (["--tls-cert", "only.pem"], 2, "tlsCertFile is set but tlsKeyFile (TLS_KEY_FILE) is missing"),
        (["--tls-key", "only.pem"], 2, "tlsKeyFile is set but tlsCertFile (TLS_CERT_FILE) is missing"),
        (["--tls-cert", "/nowhere/c.pem", "--tls-key", "/nowhere/k.pem"], 2, "TLS cert file not found: /nowhere/c.pem"),
        (["--config", "/nowhere/gqueue.toml"], 2, "/nowhere/gqueue.toml"),
        (["--host", "256.1.1.1"], 1, "256.1.1.1"),
    ],
)  # fmt: skip
def test_a_wrong_flag_is_one_line(args: list[str], code: int, words: str) -> None:
    storage = [] if "--storage" in args else ["--storage", "memory://"]
    done = run(*storage, *args)
    assert done.returncode == code, done.stderr
    assert words in one_line(done)


@pytest.mark.parametrize(
    ("name", "value", "unit"),
    [
        ("STALL_CHECK_MS", "soon", "milliseconds"),
        ("TCP_IDLE_TIMEOUT_MS", "-1", "milliseconds"),
        ("SHUTDOWN_TIMEOUT_MS", "1e3", "milliseconds"),
        ("TCP_MAX_WRITE_QUEUE_BYTES", "big", "bytes"),
    ],
)  # fmt: skip
def test_a_malformed_environment_value_is_one_line(name: str, value: str, unit: str) -> None:
    """Core 15."""
    done = run("--storage", "memory://", env={name: value})
    assert done.returncode == 2, done.stderr
    assert f'Invalid {name}: "{value}" (expected a whole number of {unit} >= 0)' in one_line(done)


def test_a_port_that_is_taken_is_one_line(fresh_broker: Any, tmp_path: Path) -> None:
    """Exit code 1, and the store is free again."""
    broker = fresh_broker("memory")
    file = tmp_path / "free.db"
    done = run("--storage", f"sqlite:///{file}", "--port", str(broker.port))
    assert done.returncode == 1, done.stderr
    assert str(broker.port) in done.stderr.splitlines()[-1]
    other = fresh_broker(f"sqlite:///{file}")
    assert other.connect().send("Ping")["ok"]


def test_the_file_is_its_owners_alone(fresh_broker: Any, tmp_path: Path) -> None:
    """R35."""
    folder = tmp_path / "private"
    folder.mkdir()
    file = folder / "mine.db"
    broker = fresh_broker(f"sqlite:///{file}")
    broker.connect().push("q")
    for path in folder.iterdir():
        assert path.stat().st_mode & 0o077 == 0, path.name


def test_a_stop_signal_lets_the_holder_finish(fresh_broker: Any, tmp_path: Path) -> None:
    """R111: parked pulls end empty, new work is refused, an ACK is taken, then exit 0 and the job is completed."""
    file = tmp_path / "stop.db"
    broker = fresh_broker(f"sqlite:///{file}")
    wire, other = broker.connect(), broker.connect()
    id = wire.push("q")
    _, token = lease(wire, "q", lockTtl=HOUR)
    parked = other.start("PULL", queue="q", timeout=60_000)
    assert other.send("Ping")["ok"]
    os.kill(broker.pid, signal.SIGTERM)
    assert parked.result(10)["job"] is None
    assert wire.send("PUSH", queue="q", name="j", data=1) == {"ok": False, "error": "Server is shutting down"}
    assert wire.send("PULL", queue="q") == {"ok": False, "error": "Server is shutting down"}
    assert wire.state(id) == "active"
    assert wire.send("ACK", id=id, token=token, result="r") == {"ok": True}
    assert broker.wait(20) == 0  # a second signal would end it at once (R112)
    assert rows(file) == {id: "completed"}
