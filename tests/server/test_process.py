"""The broker among its surroundings: --check, pid file, log, SIGHUP, systemd, limits of connections, a full disk."""

from __future__ import annotations

import json
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.server.scenes import until

ROOT = Path(__file__).resolve().parents[2]


def run(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "gqueue.server", *args],
        env={**os.environ, "PYTHONPATH": str(ROOT), **env},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


def test_check_opens_the_store_and_prints_the_settings_without_secrets(tmp_path: Path) -> None:
    done = run("--check", "--storage", f"sqlite:///{tmp_path}/a.db", "--auth-tokens", "secret1,secret2", "--port", "0")
    assert (done.returncode, done.stderr) == (0, "")
    assert f"storage.url = sqlite:///{tmp_path}/a.db" in done.stdout.splitlines()
    assert "auth.tokens = (2)" in done.stdout.splitlines()
    assert "secret" not in done.stdout
    assert (tmp_path / "a.db").exists()
    assert not (tmp_path / "a.db-wal").exists()


def test_check_names_what_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "a.db").write_text("no database at all")
    done = run("--check", "--storage", f"sqlite:///{tmp_path}/a.db")
    assert done.returncode == 6
    assert len(done.stderr.splitlines()) == 1
    assert run("--check", "--storage", "memory://", "--tls-cert", "x").returncode == 2


def test_the_pid_file_is_there_while_the_broker_is(fresh_broker: Any, tmp_path: Path) -> None:
    path = tmp_path / "gqueue.pid"
    broker = fresh_broker(args=["--pid-file", str(path)])
    assert int(path.read_text()) == broker.pid
    assert broker.terminate() == 0
    assert not path.exists()


def test_a_pid_file_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    done = run("--pid-file", f"{tmp_path}/none/x.pid", "--storage", f"sqlite:///{tmp_path}/a.db", "--port", "0")
    assert done.returncode == 2
    assert done.stderr.splitlines() == [f"gqueue-server: Cannot write {tmp_path}/none/x.pid: No such file or directory"]
    assert run("--check", "--storage", f"sqlite:///{tmp_path}/a.db").returncode == 0  # it was given up


def test_a_json_log_has_one_object_a_line_and_says_what_was_started(fresh_broker: Any, tmp_path: Path) -> None:
    """R13"""
    url = f"sqlite:///{tmp_path}/a.db"
    broker = fresh_broker(url)
    with broker.connect() as wire:
        wire.push("q", 1)
    assert broker.terminate() == 0
    again = fresh_broker(url, args=["--log-format", "json"])
    line = json.loads(until(lambda: again.log).splitlines()[0])
    assert line["level"] == "info"
    assert line["component"] == "gqueue.server"
    assert "storage sqlite, durability fsync, 1 queued, auth off, tls off" in line["message"]


def test_sighup_reads_the_tokens_again(fresh_broker: Any, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("one\n")
    broker = fresh_broker(args=["--auth-token-file", str(tokens)])
    with broker.connect() as old:
        assert old.send("Auth", token="one")["ok"] is True
        tokens.write_text("two\n")
        os.kill(broker.pid, signal.SIGHUP)
        until(lambda: "settings read again" in broker.log)
        with broker.connect() as wire:
            assert wire.send("Auth", token="one")["ok"] is False
            assert wire.send("Auth", token="two")["ok"] is True
        assert old.send("Ping")["ok"] is True
        tokens.unlink()
        os.kill(broker.pid, signal.SIGHUP)
        until(lambda: f"settings not read again: Cannot read {tokens}" in broker.log)
    with broker.connect() as wire:
        assert wire.send("Auth", token="two")["ok"] is True


def test_systemd_is_told(fresh_broker: Any, tmp_path: Path) -> None:
    with closing(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(10)
        broker = fresh_broker(env={"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "100000"})
        said = {manager.recv(100) for _ in range(4)}
        assert said == {b"READY=1", b"WATCHDOG=1"}
        assert broker.terminate() == 0
        while (last := manager.recv(100)) == b"WATCHDOG=1":
            pass
        assert last == b"STOPPING=1"


def test_who_says_no_token_is_disconnected(fresh_broker: Any) -> None:
    """R71"""
    broker = fresh_broker(args=["--auth-tokens", "one"])
    start = time.monotonic()
    silent, said = broker.connect(), broker.connect()
    assert said.send("Auth", token="one")["ok"] is True
    assert silent.closed(20)
    assert time.monotonic() - start >= 9
    assert said.send("Ping")["ok"] is True


def test_connections_beyond_the_limit_wait_for_a_place(fresh_broker: Any) -> None:
    """R70: the limit of descriptors leaves room for the store and the log."""
    command = f"ulimit -n 74; exec {sys.executable} -m gqueue.server --port 0 --storage memory://"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        ["sh", "-c", command], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        port = int(process.stdout.readline().rsplit(":", 1)[1])
        ping = b"\x00\x00\x00\x0a\x81\xa3cmd\xa4Ping"
        served = []
        for _ in range(10):
            sock = socket.create_connection(("127.0.0.1", port))
            sock.sendall(ping)
            sock.settimeout(10)
            assert sock.recv(1000)
            served.append(sock)
        waiting = socket.create_connection(("127.0.0.1", port))
        waiting.sendall(ping)
        waiting.settimeout(0.5)
        with pytest.raises(TimeoutError):
            waiting.recv(1000)
        served.pop().close()
        waiting.settimeout(10)
        assert waiting.recv(1000)
        for sock in (*served, waiting):
            sock.close()
        process.terminate()
        assert process.wait(20) == 0
        assert process.stderr is not None
        assert "Traceback" not in process.stderr.read()
    finally:
        process.kill()
        process.wait()


SITE = """
import os
real = os.statvfs
class Little:
    def __init__(self, found): self.found = found
    def __getattr__(self, name):
        return 10 if name == "f_bavail" and os.path.exists(os.environ["LITTLE_ROOM"]) else getattr(self.found, name)
os.statvfs = lambda path: Little(real(path))
"""


def test_with_little_room_new_jobs_are_refused_and_running_ones_can_end(fresh_broker: Any, tmp_path: Path) -> None:
    """R24"""
    site, flag = tmp_path / "site", tmp_path / "little"
    site.mkdir()
    (site / "sitecustomize.py").write_text(SITE)
    path = os.pathsep.join([str(site), str(ROOT)])
    broker = fresh_broker(f"sqlite:///{tmp_path}/a.db", env={"PYTHONPATH": path, "LITTLE_ROOM": str(flag)})
    with broker.connect() as wire:
        ids = [wire.push("q", n) for n in range(3)]
        flag.touch()
        until(lambda: "MiB left for the store: new jobs are refused" in broker.log)
        refusal = {"ok": False, "error": "Storage unavailable: disk_full"}
        assert wire.send("PUSH", queue="q", data=4) == refusal
        assert wire.send("PUSHB", queue="q", jobs=[{"data": 4}]) == refusal
        first, second = wire.pull("q"), wire.pull("q")
        assert first is not None
        assert second is not None
        assert wire.send("ACK", id=first["id"])["ok"] is True
        assert wire.send("FAIL", id=second["id"], error="x")["ok"] is True
        assert wire.send("Cancel", id=ids[2])["ok"] is True
        assert wire.counts("q")["completed"] == 1
        flag.unlink()
        until(lambda: "new jobs are taken again" in broker.log)
        wire.push("q", 5)
    with closing(sqlite3.connect(tmp_path / "a.db")) as db:
        assert db.execute("SELECT count(*) FROM jobs").fetchone() == (3,)


THREADS = """
import os, sqlite3, _thread
ident = _thread.get_ident  # as it is before gevent patches it
hub = ident()
def checked(name):
    def call(self, *args):
        if ident() == hub and os.path.exists(os.environ["SERVING"]):
            os.write(2, b"sqlite3 on the hub\\n")
            os._exit(99)
        return getattr(super(Connection, self), name)(*args)
    return call
class Connection(sqlite3.Connection):
    execute, executemany, cursor, commit, close = map(checked, ("execute", "executemany", "cursor", "commit", "close"))
connect = sqlite3.connect
sqlite3.connect = sqlite3.dbapi2.connect = lambda *args, **kwargs: connect(*args, **{"factory": Connection, **kwargs})
"""


def test_the_store_is_never_touched_on_the_hub(fresh_broker: Any, tmp_path: Path) -> None:
    """R31: a call of SQLite there ends this broker, once it serves."""
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(THREADS)
    serving = tmp_path / "serving"
    path = os.pathsep.join([str(site), str(ROOT)])
    broker = fresh_broker(
        f"sqlite:///{tmp_path}/a.db",
        args=["--max-completed-jobs", "1"],
        env={"PYTHONPATH": path, "SERVING": str(serving)},
    )
    serving.touch()
    with broker.connect() as wire:
        ids = [wire.push("q", n) for n in range(5)]
        for _ in ids:
            job = wire.pull("q")
            assert job is not None
            assert wire.send("ACK", id=job["id"], result=1)["ok"] is True
        assert wire.job(ids[0])["id"] == ids[0]  # from the store
        assert wire.send("GetJobs", queue="q", state="completed")["jobs"]
        assert wire.send("Clean", queue="q", grace=0, state="completed")["count"] == 5
    serving.unlink()
    assert broker.terminate() == 0
