"""What is particular to the SQLite file: who may open it, what stands in it, what a person finds."""

from __future__ import annotations

import fcntl
import os
import socket
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from gqueue.errors import BadSetting, DamagedStore, NewerSchema, StoreOwned
from gqueue.model import State
from gqueue.storage.base import Batch, StorageError, open_storage
from gqueue.storage.sqlite import SCHEMA, SQLiteStorage
from tests.storage.stores import Loaded, row

LARGE = b"\xc5\x75\x30" + bytes(30_000)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "jobs.db"


def opened(file: Path, **options: Any) -> SQLiteStorage:
    storage = SQLiteStorage(f"sqlite:///{file}", **options)
    storage.open()
    return storage


def ask(file: Path, statement: str) -> list[Any]:
    with closing(sqlite3.connect(file)) as db:
        return db.execute(statement).fetchall()


def test_a_second_owner_is_told_who_has_the_file(file: Path) -> None:
    first = opened(file)
    with pytest.raises(StoreOwned, match=f"owned by pid {os.getpid()} on {socket.gethostname()}"):
        opened(file)
    first.close()
    opened(file).close()


def test_a_lock_that_a_dead_broker_s_writer_still_holds_is_waited_for(file: Path) -> None:
    opened(file).close()
    program = "import fcntl, sys; f = open(sys.argv[1]); fcntl.flock(f, 2); print(flush=True); input()"
    holder = subprocess.Popen(
        [sys.executable, "-c", program, f"{file}.lock"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert holder.stdout is not None
    holder.stdout.readline()
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    Path(f"{file}.lock").write_text(f"pid {dead.pid} on {socket.gethostname()}\n")
    waiting = subprocess.Popen(
        [sys.executable, "-c", f"from tests.storage.test_sqlite_file import *; opened(Path({str(file)!r})).close()"],
        cwd=Path(__file__).parents[2],
    )
    with pytest.raises(subprocess.TimeoutExpired):
        waiting.wait(1)
    holder.communicate(b"\n")
    assert waiting.wait(20) == 0


@pytest.mark.parametrize("content", [b"hello", b"SQLite format 3\0" + bytes(8000), os.urandom(5000)])
def test_a_file_that_is_no_database_is_left_as_it_is(file: Path, content: bytes) -> None:
    file.write_bytes(content)
    with pytest.raises(DamagedStore):
        opened(file)
    assert file.read_bytes() == content
    with open(f"{file}.lock", "rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the failed start has given it up


def test_a_database_of_another_program_is_left_as_it_is(file: Path) -> None:
    with closing(sqlite3.connect(file)) as db:
        db.execute("CREATE TABLE theirs (a)")
    with pytest.raises(DamagedStore, match="another program"):
        opened(file)
    assert ask(file, "SELECT name FROM sqlite_master") == [("theirs",)]


def test_a_newer_schema_is_left_as_it_is(file: Path) -> None:
    opened(file).close()
    with closing(sqlite3.connect(file)) as db:
        db.execute(f"PRAGMA user_version = {SCHEMA + 1}")
    with pytest.raises(NewerSchema, match=f"schema {SCHEMA + 1}"):
        opened(file)
    assert ask(file, "PRAGMA user_version") == [(SCHEMA + 1,)]


@pytest.mark.parametrize(
    "url", ["sqlite:", "sqlite://", "sqlite:///", "sqlite://host/a.db", "sqlite:a.db", "nothing:///a.db", "a.db"]
)
def test_a_url_that_names_no_file_is_refused_in_one_line(url: str) -> None:
    with pytest.raises(BadSetting) as refusal:
        open_storage(url)
    assert "\n" not in str(refusal.value)


def test_a_relative_url_is_a_file_of_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    storage = SQLiteStorage("sqlite:///a.db")
    assert storage.path == str((tmp_path / "a.db").resolve())


@pytest.mark.parametrize("name", ["a b", "ü", "a%20b", "a?mode=ro", "a#b"])
def test_a_name_is_taken_as_it_is(tmp_path: Path, name: str) -> None:
    storage = opened(tmp_path / name)
    storage.commit(Batch(1, jobs=[row(1)]))
    storage.close()
    assert ask(tmp_path / name, "SELECT id FROM jobs") == [("id-000001",)]


@pytest.mark.parametrize(("durability", "level"), [("fsync", 2), ("commit", 1)])
def test_the_durability_is_sqlite_s_synchronous(file: Path, durability: str, level: int) -> None:
    storage = opened(file, durability=durability)
    assert storage._writer.execute("PRAGMA synchronous").fetchone() == (level,)
    assert storage._writer.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    storage.commit(Batch(1, jobs=[row(1)], durable=True))
    assert storage._writer.execute("PRAGMA synchronous").fetchone() == (level,)
    storage.close()


def test_a_durable_job_is_committed_with_fsync_whatever_the_level(file: Path) -> None:
    storage = opened(file, durability="commit")
    seen: list[str] = []
    storage._writer.set_trace_callback(seen.append)
    storage.commit(Batch(1, jobs=[row(1)], durable=True))
    begin = next(n for n, text in enumerate(seen) if text.startswith("BEGIN"))
    assert "PRAGMA synchronous = FULL" in seen[:begin]
    seen.clear()
    storage.commit(Batch(2, jobs=[row(2)]))
    assert not [text for text in seen if "synchronous" in text]
    storage.close()


def test_live_rows_stand_in_no_index_but_the_key(file: Path) -> None:
    storage = opened(file)
    storage.commit(Batch(1, jobs=[row(n) for n in range(1, 100)]))
    storage.close()
    indexes = ask(file, "SELECT sql FROM sqlite_master WHERE type = 'index' AND tbl_name = 'jobs'")
    assert indexes
    assert all("WHERE state IN ('completed', 'failed')" in sql for (sql,) in indexes)


def test_finished_jobs_are_found_by_an_index(file: Path) -> None:
    opened(file).close()
    for statement in (
        "SELECT * FROM jobs WHERE id IN ('a') AND state IN ('completed', 'failed')",
        "SELECT * FROM jobs WHERE state = 'completed' AND state IN ('completed', 'failed') AND finished_at <= 5",
    ):
        plan = " ".join(line[3] for line in ask(file, f"EXPLAIN QUERY PLAN {statement}"))
        assert "USING INDEX jobs_finished_by" in plan


def test_a_change_of_state_does_not_write_a_large_payload_again(file: Path) -> None:
    storage = opened(file)
    storage.commit(Batch(1, jobs=[row(1, data=LARGE)]))
    before = os.path.getsize(f"{file}-wal")
    storage.commit(Batch(2, jobs=[row(1, State.ACTIVE, data=None)]))
    assert os.path.getsize(f"{file}-wal") - before < len(LARGE)
    storage.close()


def test_a_person_can_ask_by_sql(file: Path) -> None:
    storage = opened(file)
    storage.commit(Batch(1, jobs=[row(1), row(2, State.BLOCKED), row(3, State.FAILED, attempts=3)]))
    assert ask(file, "SELECT id, queue, state, attempts FROM jobs ORDER BY seq") == [
        ("id-000001", "q", "queued", 0),
        ("id-000002", "q", "waiting-children", 0),
        ("id-000003", "q", "failed", 3),
    ]
    storage.close()


@pytest.mark.parametrize("column", ["rest = 'text'", "state = 'nonsense'"])
def test_a_row_that_cannot_be_read_is_moved_aside_and_the_rest_is_loaded(file: Path, column: str) -> None:
    """R26"""
    storage = opened(file)
    storage.commit(Batch(1, jobs=[row(1), row(2), row(3)]))
    storage.close()
    with closing(sqlite3.connect(file, isolation_level=None)) as db:
        db.execute(f"UPDATE jobs SET {column} WHERE seq = 2")  # noqa: S608
    storage = opened(file)
    loaded = Loaded.of(storage.load(10))
    assert loaded.rows == [row(1), row(3)]
    assert loaded.quarantined == ["id-000002"]
    storage.close()
    assert ask(file, "SELECT seq, id FROM quarantine") == [(2, "id-000002")]
    assert ask(file, "SELECT seq FROM jobs ORDER BY seq") == [(1,), (3,)]


def test_a_full_file_takes_nothing_of_a_batch_and_all_of_it_once_there_is_room(file: Path) -> None:
    """R20, I3"""
    storage = opened(file, max_pages=20)
    storage.commit(Batch(1, jobs=[row(1)]))
    batch = Batch(2, jobs=[row(2, data=LARGE), row(3, data=LARGE), row(4, data=LARGE), row(5)], queues={"q": b"s"})
    with pytest.raises(StorageError) as failed:
        storage.commit(batch)
    assert failed.value.reason == "disk_full"
    assert ask(file, "SELECT seq FROM jobs") == [(1,)]
    assert ask(file, "SELECT name FROM queues") == []
    storage._writer.execute("PRAGMA max_page_count = 100000").fetchall()
    storage.commit(batch)
    assert ask(file, "SELECT seq FROM jobs ORDER BY seq") == [(1,), (2,), (3,), (4,), (5,)]
    storage.close()


def test_the_figures_tell_sizes(file: Path) -> None:
    storage = opened(file)
    storage.commit(Batch(1, jobs=[row(1)]))
    status = storage.status()
    assert status["path"] == str(file.resolve())
    assert status["wal_bytes"] > 0
    assert status["free_bytes"] > 0
    storage.close()
    assert not os.path.exists(f"{file}-wal") or os.path.getsize(f"{file}-wal") == 0
