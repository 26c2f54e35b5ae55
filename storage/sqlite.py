"""Jobs in one SQLite file (WAL). The only module that opens it.

`jobs` has the sequence number as its key and what a person may want to ask as columns; what else differs from the
defaults is one MessagePack map in `rest`. Live rows carry no secondary index: the broker finds them in memory.
Payloads over 4 KiB stand in a table of their own, so that a change of state does not write them again.
"""

from __future__ import annotations

import fcntl
import os
import re
import socket
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, ClassVar

import msgpack
from sqlite_utils import Database

from gqueue.errors import BadSetting, DamagedStore, NewerSchema, StoreOwned
from gqueue.model import State
from gqueue.storage.base import STATE_NAMES, Batch, JobRow, Snapshot, Storage, StorageError

SCHEMA = 1
_APPLICATION_ID = 0x67717565  # "gque": tells our files from other people's
_LARGE = 4096  # bytes of payload kept beside its row
_LAST_COMMIT = 10.0  # s that the writer process of a dead broker may take to end
_ROWS = 1000  # of one statement, below the limit of variables
_STATE_OF = {name: int(state) for state, name in STATE_NAMES.items()}
_NAME_OF = {int(state): name for state, name in STATE_NAMES.items()}
_NETWORK = re.compile(r"nfs\d?|cifs|smb\w*|9p|virtiofs|fuse\..*")

_COLUMNS = (
    "seq, id, queue, name, state, priority, run_at, attempts, created_at, started_at, finished_at, data, result, rest"
)
_INSERT = (
    f"INSERT INTO jobs ({_COLUMNS}) VALUES {{rows}} ON CONFLICT (seq) DO UPDATE SET id = excluded.id, "
    "queue = excluded.queue, name = excluded.name, state = excluded.state, priority = excluded.priority, "
    "run_at = excluded.run_at, attempts = excluded.attempts, created_at = excluded.created_at, "
    "started_at = excluded.started_at, finished_at = excluded.finished_at, "
    "data = excluded.data, result = excluded.result, rest = excluded.rest"
)
_INSERT_ROW = "(?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
_UPDATE = (
    "WITH new (seq, state, priority, run_at, attempts, started_at, finished_at, result, rest) AS (VALUES {rows}) "
    "UPDATE jobs SET state = new.state, priority = new.priority, run_at = new.run_at, attempts = new.attempts, "
    "started_at = new.started_at, finished_at = new.finished_at, result = new.result, rest = new.rest "
    "FROM new WHERE jobs.seq = new.seq"
)
_UPDATE_ROW = "(?, ?, ?, ?, ?, ?, ?, ?, ?)"
_DATA = "COALESCE((SELECT p.data FROM payloads p WHERE p.seq = jobs.seq), jobs.data),"
_SELECT = f"SELECT {_COLUMNS.replace('data,', _DATA)} FROM jobs"

_SCHEMA_SQL = """
CREATE TABLE jobs (
    seq INTEGER PRIMARY KEY, id TEXT NOT NULL, queue TEXT NOT NULL, name TEXT NOT NULL, state TEXT NOT NULL,
    priority INTEGER NOT NULL, run_at INTEGER NOT NULL, attempts INTEGER NOT NULL, created_at INTEGER NOT NULL,
    started_at INTEGER, finished_at INTEGER, data BLOB, result BLOB, rest BLOB
);
CREATE INDEX jobs_finished_by_id ON jobs (id) WHERE state IN ('completed', 'failed');
CREATE INDEX jobs_finished_by_time ON jobs (state, finished_at) WHERE state IN ('completed', 'failed');
CREATE TABLE payloads (seq INTEGER PRIMARY KEY, data BLOB NOT NULL);
CREATE TABLE logs (seq INTEGER NOT NULL, n INTEGER NOT NULL, entry BLOB NOT NULL, PRIMARY KEY (seq, n)) WITHOUT ROWID;
CREATE TABLE queues (name TEXT PRIMARY KEY, settings BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE proofs (id TEXT PRIMARY KEY, proof BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE meta (key TEXT PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE quarantine (seq INTEGER PRIMARY KEY, id TEXT, reason TEXT, row BLOB);
"""


def _first_schema(db: Database) -> None:
    """Version 1: the tables of the first release."""
    for statement in _SCHEMA_SQL.split(";"):
        if statement.strip():
            db.conn.execute(statement)


#: Version -> the step that leads to it. Each runs in a transaction of its own.
MIGRATIONS: dict[int, Callable[[Database], None]] = {1: _first_schema}


def _reason(error: sqlite3.Error) -> str:
    """The reason of R20 for an error of SQLite's."""
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    return {
        sqlite3.SQLITE_FULL: "disk_full",
        sqlite3.SQLITE_IOERR: "io_error",
        sqlite3.SQLITE_BUSY: "unreachable",
        sqlite3.SQLITE_LOCKED: "unreachable",
        sqlite3.SQLITE_READONLY: "readonly",
        sqlite3.SQLITE_CANTOPEN: "readonly",
        sqlite3.SQLITE_PERM: "readonly",
        sqlite3.SQLITE_NOMEM: "out_of_memory",
        sqlite3.SQLITE_CORRUPT: "corrupt",
        sqlite3.SQLITE_NOTADB: "corrupt",
    }.get(code, "io_error")


@contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        raise StorageError(_reason(error), str(error)) from error


class SQLiteStorage(Storage):
    """One file, its WAL, and a lock file beside it that is held for life (R10)."""

    kind: ClassVar[str] = "sqlite"
    forkable: ClassVar[bool] = True

    def __init__(
        self,
        url: str,
        *,
        durability: str = "fsync",
        wait_for_lock: float = 0.0,  # seconds
        allow_network_fs: bool = False,
        lock_fd: int | None = None,  # of a parent that holds the lock for us
        max_pages: int | None = None,  # an upper bound of the file, in pages of 4 KiB
        busy_timeout: int = 5000,  # ms
        **_options: Any,
    ) -> None:
        rest = url.partition("://")[2]
        if not rest.startswith("/") or rest == "/":
            raise BadSetting(f"Invalid storage URL: {url} (expected sqlite:///relative.db or sqlite:////absolute.db)")
        self.url = url
        self.path = os.path.realpath(rest[1:])
        self.durability = durability
        self.wait_for_lock = wait_for_lock
        self.allow_network_fs = allow_network_fs
        self.max_pages = max_pages
        self.busy_timeout = busy_timeout
        self.lock_fd = lock_fd
        self._borrowed = lock_fd is not None
        self._connection: sqlite3.Connection | None = None
        self._number = 0
        self._seq = 0
        self._readers = threading.local()
        self._keeper: sqlite3.Connection | None = None

    # ---------------------------------------------------------------- open and close

    def open(self) -> None:
        if not self._borrowed:
            self._check_file_system()
            self._take_lock()
        try:
            self._open_file()
        except BaseException:
            self._drop_lock()
            raise

    def _check_file_system(self) -> None:
        folder = os.path.dirname(self.path)
        if not os.path.isdir(folder):
            raise BadSetting(f"The folder of the database does not exist: {folder}")
        if not os.access(folder, os.W_OK):
            raise BadSetting(f"The folder of the database is not writable: {folder}")
        kind = _file_system(folder)
        if _NETWORK.fullmatch(kind) and not self.allow_network_fs:
            raise BadSetting(f"{self.path} is on a network file system ({kind}); --allow-network-fs overrides this")

    def _take_lock(self) -> None:
        lock = os.open(f"{self.path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        start = time.monotonic()
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                owner = os.pread(lock, 200, 0).decode(errors="replace").strip() or "another process"
                wait = max(self.wait_for_lock, _LAST_COMMIT if _is_gone(owner) else 0)
                if time.monotonic() - start >= wait:
                    os.close(lock)
                    raise StoreOwned(f"{self.path} is owned by {owner}") from None
                time.sleep(0.02)
        os.ftruncate(lock, 0)
        os.pwrite(lock, _this_process().encode(), 0)
        self.lock_fd = lock

    def _drop_lock(self) -> None:
        if self.lock_fd is not None and not self._borrowed:
            os.close(self.lock_fd)
            self.lock_fd = None

    def _open_file(self) -> None:
        new = not os.path.exists(self.path) or os.path.getsize(self.path) == 0
        if new and not self._borrowed:
            os.close(os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600))
        elif not new:
            self._check_header()
        connection: sqlite3.Connection | None = None
        try:
            connection = self._connect()
            if new:
                connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
            if not new and not self._borrowed:
                version = connection.execute("PRAGMA user_version").fetchone()[0]
                if version > SCHEMA:
                    raise NewerSchema(f"{self.path} has schema {version}, this gqueue knows {SCHEMA}: use a newer one")
            connection.execute("PRAGMA journal_mode = WAL")
            if not self._borrowed:
                self._migrate(connection)
            connection.execute(f"PRAGMA synchronous = {'FULL' if self.durability == 'fsync' else 'NORMAL'}")
            connection.execute("PRAGMA cache_size = -65536")
            connection.execute("PRAGMA temp_store = MEMORY")
            connection.execute("PRAGMA wal_autocheckpoint = 0")
            if self.max_pages is not None:
                connection.execute(f"PRAGMA max_page_count = {int(self.max_pages)}")
            meta = dict(connection.execute("SELECT key, value FROM meta WHERE key IN ('batch', 'seq')").fetchall())
        except sqlite3.DatabaseError as error:
            if connection is not None:
                connection.close()
            if _reason(error) == "corrupt":
                raise DamagedStore(f"{self.path} is damaged: {error}; it was left as it is") from None
            raise StorageError(_reason(error), str(error)) from error
        except BaseException:
            if connection is not None:
                connection.close()
            raise
        self._connection = connection
        self._number = msgpack.unpackb(meta["batch"]) if "batch" in meta else 0
        self._seq = msgpack.unpackb(meta["seq"]) if "seq" in meta else 0

    def _check_header(self) -> None:
        """Look before SQLite does: it would happily make something of a foreign file."""
        with open(self.path, "rb") as file:
            head = file.read(16)
        if head != b"SQLite format 3\0":
            raise DamagedStore(f"{self.path} is not a SQLite database; it was left as it is")

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(
            self.path, isolation_level=None, check_same_thread=False, timeout=self.busy_timeout / 1000
        )
        connection.execute(f"PRAGMA busy_timeout = {self.busy_timeout}")
        return connection

    def _migrate(self, connection: sqlite3.Connection) -> None:
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        db = Database(connection)
        if version == 0 and db.table_names():
            raise DamagedStore(f"{self.path} is a database of another program; it was left as it is")
        for step in range(version + 1, SCHEMA + 1):
            connection.execute("BEGIN IMMEDIATE")
            try:
                MIGRATIONS[step](db)
                connection.execute(f"PRAGMA user_version = {step}")
                connection.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
                connection.execute("COMMIT")
            except BaseException:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise

    def release(self) -> tuple[int, dict[str, Any]]:
        self._writer.close()
        self._connection = None
        assert self.lock_fd is not None
        return self.lock_fd, {
            "url": f"sqlite:///{self.path}",
            "durability": self.durability,
            "max_pages": self.max_pages,
            "busy_timeout": self.busy_timeout,
        }

    def close(self) -> None:
        connection, self._connection = self._connection, None
        if self._keeper is not None:
            self._keeper.close()
            self._keeper = None
        try:
            if connection is not None:
                with _translated():
                    with suppress(sqlite3.OperationalError):  # a reader from outside may keep it from shrinking
                        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
                    connection.close()
        finally:
            self._drop_lock()

    # ---------------------------------------------------------------- load

    def load(self, completed: int) -> Snapshot:
        connection = self._writer
        with _translated():
            meta = dict(connection.execute("SELECT key, value FROM meta").fetchall())
            queues = dict(connection.execute("SELECT name, settings FROM queues").fetchall())
            proofs = dict(connection.execute("SELECT id, proof FROM proofs").fetchall())
            counts = dict(
                connection.execute(
                    "SELECT queue, count(*) FROM jobs WHERE state = 'completed' GROUP BY queue"
                ).fetchall()
            )
        for key in ("batch", "seq"):
            meta.pop(key, None)
        snapshot = Snapshot(self._number, self._seq, meta, queues, proofs, counts, iter(()), iter(()))
        snapshot.rows = self._load_rows(completed, snapshot)
        snapshot.logs = self._load_logs()
        return snapshot

    def _load_rows(self, completed: int, snapshot: Snapshot) -> Iterator[JobRow]:
        newest = "SELECT seq FROM jobs WHERE state = 'completed' ORDER BY finished_at DESC, seq DESC LIMIT ?"
        statements: tuple[tuple[str, tuple[int, ...]], ...] = (
            (f"{_SELECT} WHERE state <> 'completed' ORDER BY seq", ()),
            (f"{_SELECT} WHERE seq IN ({newest}) ORDER BY finished_at, seq", (completed,)),
        )
        bad: list[tuple[int, Any, str]] = []
        for statement, values in statements:
            with _translated():
                cursor = self._writer.execute(statement, values)
                while chunk := cursor.fetchmany(5000):
                    for row in chunk:
                        try:
                            yield _row(row)
                        except (ValueError, TypeError, KeyError) as error:
                            bad.append((row[0], row[1], str(error)))
                            snapshot.quarantined.append(str(row[1]))
        if bad:
            self._quarantine(bad)

    def _quarantine(self, bad: list[tuple[int, Any, str]]) -> None:
        """Move rows that cannot be read out of the way; they are kept for a person to look at (R26)."""
        with self._transaction() as connection:
            for seq, id, reason in bad:
                raw = connection.execute("SELECT hex(rest) FROM jobs WHERE seq = ?", (seq,)).fetchone()
                connection.execute(
                    "INSERT OR REPLACE INTO quarantine VALUES (?, ?, ?, ?)",
                    (seq, str(id), reason, str(raw[0]) if raw else None),
                )
                connection.execute("DELETE FROM jobs WHERE seq = ?", (seq,))

    def _load_logs(self) -> Iterator[tuple[int, int, bytes]]:
        with _translated():
            cursor = self._writer.execute("SELECT seq, n, entry FROM logs ORDER BY seq, n")
            while chunk := cursor.fetchmany(5000):
                yield from chunk

    # ---------------------------------------------------------------- commit

    @property
    def _writer(self) -> sqlite3.Connection:
        if self._connection is None:
            raise StorageError("io_error", "the database is closed")
        return self._connection

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        connection = self._writer
        with _translated():
            connection.execute("BEGIN IMMEDIATE")
            try:
                yield connection
                connection.execute("COMMIT")
            except BaseException:
                if connection.in_transaction:  # some errors have ended it already (R25)
                    connection.execute("ROLLBACK")
                raise

    def commit(self, batch: Batch) -> None:
        if batch.number <= self._number:
            return
        safer = batch.durable and self.durability != "fsync"
        if safer:
            self._writer.execute("PRAGMA synchronous = FULL")
        try:
            self._commit(batch)
        finally:
            if safer:
                self._writer.execute("PRAGMA synchronous = NORMAL")

    def _commit(self, batch: Batch) -> None:
        seq = self._seq
        with self._transaction() as connection:
            stored = connection.execute("SELECT value FROM meta WHERE key = 'batch'").fetchone()
            if stored is not None and msgpack.unpackb(stored[0]) >= batch.number:
                self._number = batch.number  # an earlier try got through, only its answer was lost
                return
            for queue, last in batch.obliterated:
                for table in ("payloads", "logs"):
                    connection.execute(
                        f"DELETE FROM {table} WHERE seq IN (SELECT seq FROM jobs WHERE queue = ? AND seq <= ?)",
                        (queue, last),
                    )
                connection.execute("DELETE FROM jobs WHERE queue = ? AND seq <= ?", (queue, last))
            if batch.removed:
                self._remove(connection, batch.removed)
            if batch.jobs:
                seq = max(seq, self._save(connection, batch.jobs))
            if batch.logs:
                connection.executemany("INSERT OR REPLACE INTO logs VALUES (?, ?, ?)", batch.logs)
            if batch.logs_trimmed:
                connection.executemany("DELETE FROM logs WHERE seq = ? AND n < ?", batch.logs_trimmed)
            for table, key, value, changes in (
                ("queues", "name", "settings", batch.queues),
                ("proofs", "id", "proof", batch.proofs),
                ("meta", "key", "value", batch.meta),
            ):
                if changes:
                    gone = [(name,) for name, kept in changes.items() if kept is None]
                    kept = [(name, kept) for name, kept in changes.items() if kept is not None]
                    connection.executemany(f"DELETE FROM {table} WHERE {key} = ?", gone)
                    connection.executemany(f"INSERT OR REPLACE INTO {table} ({key}, {value}) VALUES (?, ?)", kept)
            marks = [("batch", msgpack.packb(batch.number))]
            if seq != self._seq:
                marks.append(("seq", msgpack.packb(seq)))
            connection.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?)", marks)
        self._number = batch.number
        self._seq = seq

    def _remove(self, connection: sqlite3.Connection, seqs: list[int]) -> None:
        for marks, some in _parts(seqs):
            for table in ("jobs", "payloads", "logs"):
                connection.execute(f"DELETE FROM {table} WHERE seq IN ({marks})", some)

    def _save(self, connection: sqlite3.Connection, rows: list[JobRow]) -> int:
        """Upsert rows by few, large statements: beside a busy interpreter each call costs a change of threads."""
        fresh: list[Any] = []
        changed: list[Any] = []
        large: list[tuple[int, bytes]] = []
        small: list[int] = []
        highest = 0
        for (
            seq,
            id,
            queue,
            name,
            state,
            priority,
            run_at,
            attempts,
            created_at,
            started_at,
            finished_at,
            data,
            result,
            rest,
        ) in rows:
            highest = max(highest, seq)
            if data is None:
                changed += (seq, _NAME_OF[state], priority, run_at, attempts, started_at, finished_at, result, rest)
                continue
            if len(data) > _LARGE:
                large.append((seq, data))
                data = None
            elif seq <= self._seq:
                small.append(seq)  # its payload may have been a large one
            fresh += (
                seq, id, queue, name, _NAME_OF[state], priority, run_at, attempts, created_at, started_at, finished_at,
                data, result, rest,
            )  # fmt: skip
        for statement, row, width, values in ((_INSERT, _INSERT_ROW, 14, fresh), (_UPDATE, _UPDATE_ROW, 9, changed)):
            step = _ROWS * width
            for at in range(0, len(values), step):
                part = values[at : at + step]
                connection.execute(statement.format(rows=",".join([row] * (len(part) // width))), part)
        if large:
            connection.executemany("INSERT OR REPLACE INTO payloads VALUES (?, ?)", large)
        for marks, some in _parts(small):
            connection.execute(f"DELETE FROM payloads WHERE seq IN ({marks})", some)
        return highest

    # ---------------------------------------------------------------- cold reads

    def _reader(self) -> sqlite3.Connection:
        """A connection of this thread's own, for reading."""
        connection: sqlite3.Connection | None = getattr(self._readers, "connection", None)
        if connection is None:
            connection = self._readers.connection = self._connect()
            connection.execute("PRAGMA query_only = ON")
        return connection

    def _read(self, statement: str, values: Sequence[Any]) -> list[JobRow]:
        with _translated():
            return [_row(row) for row in self._reader().execute(statement, values).fetchall()]

    def find(self, ids: Sequence[str]) -> list[JobRow]:
        found: list[JobRow] = []
        for marks, some in _parts(ids):
            found += self._read(f"{_SELECT} WHERE id IN ({marks}) AND state IN ('completed', 'failed')", some)
        return found

    def page(self, queue: str, state: State, *, limit: int, asc: bool) -> list[JobRow]:
        way = "ASC" if asc else "DESC"
        return self._read(
            f"{_SELECT} WHERE queue = ? AND state = ? AND state IN ('completed', 'failed') "
            f"ORDER BY created_at {way}, id {way} LIMIT ?",
            (queue, _NAME_OF[int(state)], limit),
        )

    def oldest(self, queue: str | None, state: State, *, until: int, limit: int) -> list[JobRow]:
        return self._read(
            f"{_SELECT} WHERE state = ? AND state IN ('completed', 'failed') AND finished_at <= ? "
            "AND (? IS NULL OR queue = ?) ORDER BY finished_at, seq LIMIT ?",
            (_NAME_OF[int(state)], until, queue, queue, limit),
        )

    def logs_of(self, seqs: Sequence[int]) -> list[tuple[int, bytes]]:
        found: list[tuple[int, bytes]] = []
        with _translated():
            for marks, some in _parts(seqs):
                statement = f"SELECT seq, entry FROM logs WHERE seq IN ({marks}) ORDER BY seq, n"
                found += self._reader().execute(statement, some).fetchall()
        return found

    def status(self) -> dict[str, Any]:
        folder = os.statvfs(os.path.dirname(self.path))
        return {
            "kind": self.kind,
            "path": self.path,
            "durability": self.durability,
            "schema": SCHEMA,
            "bytes": _size(self.path),
            "wal_bytes": _size(f"{self.path}-wal"),
            "free_bytes": folder.f_bavail * folder.f_frsize,
        }

    # ---------------------------------------------------------------- upkeep

    def maintain(self, *, idle: bool) -> None:
        wal = _size(f"{self.path}-wal")
        if wal < 4 << 20 and not (idle and wal > 0):
            return
        if self._keeper is None:
            with _translated():
                self._keeper = self._connect()
                self._keeper.execute("PRAGMA wal_autocheckpoint = 0")
        with suppress(sqlite3.OperationalError):  # busy: next time
            mode = "TRUNCATE" if idle and wal > 64 << 20 else "PASSIVE"
            self._keeper.execute(f"PRAGMA wal_checkpoint({mode})").fetchall()
            if idle:
                self._keeper.execute("PRAGMA incremental_vacuum(200)").fetchall()


def _this_process() -> str:
    """Who owns a lock, for people and for `_is_gone`."""
    return f"pid {os.getpid()} on {socket.gethostname()}\n"


def _is_gone(owner: str) -> bool:
    """The owner named in a lock file has died, and its writer process is about to follow."""
    match = re.fullmatch(r"pid (\d+) on (.*)", owner)
    if match is None or match[2] != socket.gethostname():
        return False
    try:
        os.kill(int(match[1]), 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass  # alive, as somebody else's
    return False


def _parts(values: Sequence[Any]) -> Iterator[tuple[str, Sequence[Any]]]:
    """In lengths that one statement takes, each after its question marks."""
    for at in range(0, len(values), _ROWS):
        some = values[at : at + _ROWS]
        yield ",".join("?" * len(some)), some


def _row(row: tuple[Any, ...]) -> JobRow:
    state = _STATE_OF[row[4]]
    rest = row[13]
    if rest is not None and not isinstance(rest, bytes):
        raise ValueError("rest is not a blob")
    return JobRow._make((*row[:4], state, *row[5:]))


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except FileNotFoundError:
        return 0


def _file_system(folder: str) -> str:
    """The kind of file system a folder is on, by the mount table; "" when there is none to ask."""
    try:
        with open("/proc/self/mounts", encoding="utf-8") as mounts:
            table = [line.split()[1:3] for line in mounts]
    except OSError:
        return ""
    best, kind = "", ""
    for point, name in table:
        point = point.replace("\\040", " ")
        inside = folder == point or folder.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best):
            best, kind = point, name
    return kind
