"""`--writer process`: the child that commits may die at any time, and outlives its parent by one commit at most."""

from __future__ import annotations

import os
import signal
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.harness import Broker
from tests.server.scenes import until


def children(pid: int) -> list[int]:
    return [int(child) for path in Path(f"/proc/{pid}/task").glob("*/children") for child in path.read_text().split()]


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.fixture
def start(fresh_broker: Any, tmp_path: Path) -> Callable[[], Broker]:
    return lambda: fresh_broker(f"sqlite:///{tmp_path}/writer.db", args=["--writer", "process"])


def stored(folder: Path) -> int:
    with closing(sqlite3.connect(folder / "writer.db")) as db:
        return int(db.execute("SELECT count(*) FROM jobs").fetchone()[0])


def test_a_writer_that_is_killed_is_replaced_and_no_client_notices(start: Any, tmp_path: Path) -> None:
    broker = start()
    pushed = 0
    with broker.connect() as wire:
        for _ in range(5):
            [writer] = children(broker.pid)
            requests = [wire.start("PUSH", queue="q", data={"n": n}) for n in range(200)]
            os.kill(writer, signal.SIGKILL)
            for request in requests:
                assert request.result()["ok"] is True
            pushed += len(requests)
            until(lambda old=writer: [pid for pid in children(broker.pid) if pid != old])
        assert wire.counts("q")["waiting"] == pushed
    assert stored(tmp_path) == pushed
    assert broker.terminate() == 0


def test_an_idle_writer_that_is_killed_is_replaced_by_the_next_change(start: Any, tmp_path: Path) -> None:
    broker = start()
    [writer] = children(broker.pid)
    os.kill(writer, signal.SIGKILL)
    until(lambda: not is_alive(writer))
    with broker.connect() as wire:
        wire.push("q", {"n": 1})
    assert stored(tmp_path) == 1


def test_a_broker_starts_at_once_after_one_that_was_killed_during_a_commit(start: Any, tmp_path: Path) -> None:
    broker = start()
    for life in range(5):
        with broker.connect() as wire:
            assert wire.send("PUSHB", queue="q", jobs=[{"data": life}] * 50)["ok"] is True
            wire.start("PUSHB", queue="q", jobs=[{"data": "x" * 1000}] * 2000)  # under way, or not even read
            broker.restart("kill")
    with broker.connect() as wire:
        waiting = wire.counts("q")["waiting"]
    assert waiting % 50 == 0
    assert waiting >= 250
    assert stored(tmp_path) == waiting


def test_both_processes_end_when_the_broker_is_told_to_stop(start: Any, tmp_path: Path) -> None:
    broker = start()
    [writer] = children(broker.pid)
    os.kill(writer, signal.SIGTERM)  # as a service manager does to the whole group
    os.kill(writer, signal.SIGINT)
    with broker.connect() as wire:
        wire.push("q", {"n": 1})
        assert children(broker.pid) == [writer]
    assert broker.terminate() == 0
    assert not is_alive(writer)
    assert stored(tmp_path) == 1
    wal = tmp_path / "writer.db-wal"
    assert not wal.exists() or wal.stat().st_size == 0


def test_a_writer_ends_when_the_broker_is_killed(start: Any) -> None:
    broker = start()
    [writer] = children(broker.pid)
    broker.kill()
    until(lambda: not is_alive(writer))


def test_a_commit_that_no_writer_survives_is_a_storage_failure_and_heals(fresh_broker: Any, tmp_path: Path) -> None:
    """A child that cannot start at all: changes are refused, nothing hangs, and the first good child takes over."""
    site = tmp_path / "site"
    site.mkdir()
    flag = tmp_path / "no-writer"
    (site / "sitecustomize.py").write_text(
        f"import os, sys\nif 'gqueue.storage.writer' in sys.orig_argv and os.path.exists({str(flag)!r}): os._exit(9)\n"
    )
    root = str(Path(__file__).resolve().parents[2])
    broker = fresh_broker(
        f"sqlite:///{tmp_path}/writer.db",
        args=["--writer", "process"],
        env={"PYTHONPATH": os.pathsep.join([str(site), root])},
    )
    with broker.connect() as wire:
        wire.push("q", {"n": 1})
        [writer] = children(broker.pid)
        flag.touch()
        os.kill(writer, signal.SIGKILL)
        held = wire.start("PUSH", queue="q", data={"n": 2})
        with broker.connect() as other:
            until(lambda: "storage unavailable (io_error)" in broker.log)
            refused = other.send("PUSH", queue="q", data={"n": 3})
            assert refused == {"ok": False, "error": "Storage unavailable: io_error"}
            assert other.counts("q")["waiting"] == 2
            flag.unlink()
            assert held.result(30)["ok"] is True
            until(lambda: other.send("PUSH", queue="q", data={"n": 4})["ok"])
    assert broker.terminate() == 0
    assert stored(tmp_path) >= 3
