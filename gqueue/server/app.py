"""The composition root: settings -> storage -> engine -> listeners; signals and the order of a stop (R110, R111)."""

from __future__ import annotations

import gc
import logging
import os
import signal
import socket
import ssl
import sys
import time
from collections.abc import Callable
from random import Random
from typing import Any

import gevent
from gevent.event import Event
from gevent.pool import Pool
from gevent.server import StreamServer

from gqueue import __version__
from gqueue.engine.archive import Answer, Question, Recalled
from gqueue.engine.engine import Engine, EngineSettings
from gqueue.engine.journal import Journal, Outgoing
from gqueue.engine.recovery import recover
from gqueue.errors import BadSetting, StartError, StorageError
from gqueue.log import log_to_stderr
from gqueue.server.clock import Clock
from gqueue.server.connection import Connection
from gqueue.server.dispatch import Dispatch, framed
from gqueue.server.hosts import host_of
from gqueue.server.process import most_connections, notify, pid_file, watchdog_interval
from gqueue.settings import Settings
from gqueue.storage.base import Storage, open_storage
from gqueue.wire import codec

log = logging.getLogger("gqueue.server")

_SAY_TOKEN = 10.0  # s until a connection has to have said its token (R71)
_HANDSHAKE = 10.0  # s for TLS
_UNSENT = 512 << 20  # bytes of all connections together (R72)
_ROOM = 64 << 20  # bytes below which no new job is taken (R24)
_READS = 5  # of the same rows, when they change under each
_BETWEEN_TURNS = 0.001  # s that a long command leaves to others
_CLAIMS_WAIT = 0.005  # s that deliveries wait for company before they are stored by themselves
_RETRY_FIRST, _RETRY_LAST = 0.1, 5.0  # s between tries of a held batch (design I3)


def new_ids() -> Any:
    """A function that gives ascending UUIDv7 texts."""
    if sys.version_info >= (3, 14):
        from uuid import uuid7
    else:
        from uuid_utils import uuid7
    return lambda: str(uuid7())


class Server:
    """Everything of one broker process."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.places = Pool(most_connections())
        self.clock = Clock()
        self.connections: set[Connection] = set()
        self.listeners: list[StreamServer] = []
        self.stopping = Event()
        self.exit_code = 0
        self.engine: Engine
        self.dispatch: Dispatch
        self._loop = gevent.get_hub().loop
        self._touched: list[Connection] = []
        self._timer: Any = None
        self._timer_at = 1 << 62
        self._retry = _RETRY_FIRST
        self._context = self._tls()
        self._tokens_now = self._tokens()
        self._storage = open_storage(
            settings.storage,
            durability=settings.durability,
            wait_for_lock=settings.wait_for_lock,
            allow_network_fs=settings.allow_network_fs,
        )
        self.kind = self._storage.kind
        self.host = host_of(self._storage, settings.writer)

    # ---------------------------------------------------------------- start

    def load(self) -> None:
        """Take the store and rebuild the index from it. Raises StartError."""
        try:
            self.host.start(self._recover)
        except StorageError as error:
            raise StartError(f"Cannot open {self._storage.kind} storage: {error}") from None
        gc.collect()
        gc.freeze()
        gc.set_threshold(50_000, 50, 1_000_000)  # no full pass over the index by itself (R54)
        self.rearm()

    def _recover(self, storage: Storage) -> None:
        settings = self.settings
        snapshot = storage.load(settings.max_completed_jobs)
        journal = Journal(
            snapshot.number,
            submit=self.host.submit,
            release=self._release,
            wake=self._wake,
            later=self._ripen_later,
            stand=self._stand,
        )
        self.engine = Engine(
            EngineSettings(
                max_completed_jobs=settings.max_completed_jobs,
                completed_retention=settings.completed_retention,
                stall_check=settings.stall_check,
                cleanup_interval=settings.cleanup_interval,
                max_job_releases=settings.max_job_releases,
                max_lost=settings.max_lost,
                worker_timeout=settings.worker_timeout,
            ),
            journal=journal,
            deliver=self._deliver,
            new_id=new_ids(),
            random=Random(),
            recall=self.recall if storage.durable else None,
        )
        recover(self.engine, snapshot, self.clock.now())
        self.dispatch = Dispatch(self.engine, self.clock.now, self._tokens_now, __version__)
        if snapshot.quarantined:
            log.error("unreadable jobs moved aside: %s", ", ".join(snapshot.quarantined[:20]))

    def _tokens(self) -> frozenset[bytes]:
        tokens = [token.encode() for token in self.settings.auth_tokens]
        if self.settings.auth_token_file is not None:
            try:
                with open(self.settings.auth_token_file, "rb") as file:
                    tokens += [line.strip() for line in file if line.strip()]
            except OSError as error:
                raise BadSetting(f"Cannot read {self.settings.auth_token_file}: {error.strerror}") from None
        return frozenset(tokens)

    def _tls(self) -> ssl.SSLContext | None:
        cert, key = self.settings.tls_cert, self.settings.tls_key
        if cert is None and key is None:
            return None
        if key is None:
            raise BadSetting("TLS misconfigured: tlsCertFile is set but tlsKeyFile (TLS_KEY_FILE) is missing")
        if cert is None:
            raise BadSetting("TLS misconfigured: tlsKeyFile is set but tlsCertFile (TLS_CERT_FILE) is missing")
        for kind, path in (("cert", cert), ("key", key)):
            if not os.path.exists(path):
                raise BadSetting(f"TLS {kind} file not found: {path}")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            context.load_cert_chain(cert, key)
        except (ssl.SSLError, OSError) as error:
            raise BadSetting(f"Cannot use the TLS certificate: {error}") from None
        return context

    def reload(self, settings: Settings) -> None:
        """Tokens, certificates and the log level anew; the rest needs a restart. Raises BadSetting, nothing changed."""
        before, self.settings = self.settings, settings
        try:
            tokens = self._tokens()
            context = self._tls()
        except BadSetting:
            self.settings = before
            raise
        self.dispatch.tokens = tokens
        self._context = context
        logging.getLogger().setLevel(settings.log_level.upper())

    def listen(self) -> None:
        """Bind. Raises StartError."""
        address = (self.settings.host, self.settings.port)
        serve = self._serve if self._context is None else self._serve_secure
        tcp = StreamServer(address, serve, backlog=1024, spawn=self.places)
        try:
            tcp.start()
        except OSError as error:
            raise StartError(f"Cannot listen on {address[0]}:{address[1]}: {error.strerror or error}") from None
        tcp.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.listeners.append(tcp)
        if self.settings.socket is not None:
            self.listeners.append(self._listen_unix(self.settings.socket))

    def _listen_unix(self, path: str) -> StreamServer:
        sock = socket.socket(socket.AF_UNIX)
        try:
            if os.path.exists(path):
                os.unlink(path)
            sock.bind(path)
            os.chmod(path, 0o600)
            sock.listen(1024)
        except OSError as error:
            raise StartError(f"Cannot listen on {path}: {error.strerror}") from None
        sock.setblocking(False)
        unix = StreamServer(sock, self._serve, spawn=self.places)
        unix.start()
        return unix

    def _serve_secure(self, sock: Any, address: Any) -> None:
        """A failed handshake ends that connection only, without a word on stderr (L14)."""
        assert self._context is not None
        try:
            with gevent.Timeout(_HANDSHAKE):
                secure = self._context.wrap_socket(sock, server_side=True)
        except (ssl.SSLError, OSError, gevent.Timeout):
            sock.close()
            return
        self._serve(secure, address)

    def _serve(self, sock: Any, _address: Any) -> None:
        if sock.family != socket.AF_UNIX:
            for option, value in (
                (socket.TCP_NODELAY, 1),
                (socket.TCP_KEEPIDLE, 15),
                (socket.TCP_KEEPINTVL, 5),
                (socket.TCP_KEEPCNT, 3),
                (socket.TCP_USER_TIMEOUT, 30_000),
            ):
                sock.setsockopt(socket.IPPROTO_TCP, option, value)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection = Connection(self, sock)
        self.connections.add(connection)
        try:
            connection.run()
        except Exception:
            log.exception("a connection failed")
            connection.close()

    # ---------------------------------------------------------------- a turn of the loop

    def later(self, function: Any, *args: Any) -> None:
        """Run something at the end of this turn."""
        self._loop.run_callback(function, *args)

    def next_turn(self, function: Callable[[], None]) -> None:
        """Run something after everybody whose socket is readable has been served."""
        self._loop.timer(_BETWEEN_TURNS if self.engine.degraded is None else _RETRY_FIRST).start(function)

    def _wake(self) -> None:
        self._loop.run_callback(self.engine.journal.flush)

    def _ripen_later(self) -> None:
        self._loop.timer(_CLAIMS_WAIT).start(self.engine.journal.ripen)

    def touch(self, connection: Connection) -> None:
        """A connection has something to send; it leaves at the end of this turn."""
        if not self._touched:
            self._loop.run_callback(self._flush_touched)
        self._touched.append(connection)

    def _flush_touched(self) -> None:
        touched, self._touched = self._touched, []
        for connection in touched:
            connection.flush()

    def _release(self, outgoing: list[Outgoing]) -> None:
        """A batch is durable: what waited for it leaves, all frames of one connection in one send."""
        for connection, frame in outgoing:
            connection.send(frame)
        if self._touched:
            self._flush_touched()

    def _deliver(self, sessions: set[Any], event: dict[str, Any]) -> None:
        frame = framed(codec.encode({"type": "event", "event": event}))
        journal = self.engine.journal
        number = journal.latest
        for session in sessions:
            if not journal.attach(number, (session.connection, frame)):
                session.connection.send(frame)

    def rearm(self) -> None:
        """Set the timer to the first deadline."""
        at = self.engine.timers.next
        if at >= self._timer_at:
            return
        self._set_timer(at)

    def _set_timer(self, at: int) -> None:
        if self._timer is not None:
            self._timer.stop()
            self._timer.close()
        self._timer_at = at
        wait = min(max(at - self.clock.now(), 0) / 1000, 60)
        self._timer = self._loop.timer(wait)
        self._timer.start(self._tick, update=True)

    def _tick(self) -> None:
        self._timer_at = 1 << 62
        try:
            self.engine.tick(self.clock.now())
        except Exception:
            log.exception("a deadline failed")
        self._set_timer(self.engine.timers.next)

    # ---------------------------------------------------------------- what is looked at now and then

    def watch(self) -> None:
        """Connections that hold the broker up, and the room that is left for the store."""
        limit = self.settings.idle_timeout / 1000
        pause = min(1.0, limit / 4) if limit else 1.0
        while True:
            gevent.sleep(pause)
            try:
                self._watch_connections(limit)
                self._watch_room()
            except Exception:
                log.exception("a periodic check failed")

    def _watch_connections(self, limit: float) -> None:
        """Reset those that leave a frame unfinished (core 1.5), say no token (R71), or have too much unsent (R72)."""
        now = time.monotonic()
        for connection in list(self.connections):
            since = connection.partial_since
            if limit and since is not None and now - since > limit:
                connection.abort(reset=True)
            elif not connection.authenticated and now - connection.opened > _SAY_TOKEN:
                connection.abort()
        unsent = {connection: connection.unsent for connection in self.connections}
        total = sum(unsent.values())
        for connection in sorted(unsent, key=lambda one: unsent[one], reverse=True):
            if total <= _UNSENT:
                break
            log.warning("closed a connection with %d bytes unsent", unsent[connection])
            connection.abort()
            total -= unsent[connection]

    def _watch_room(self) -> None:
        """With little room left new jobs are refused, so that the running ones can still end (R24)."""
        if not self._storage.durable:
            return
        free: int = self.host.read(lambda storage: storage.status().get("free_bytes", _ROOM))
        full = free < _ROOM
        if full != self.engine.full:
            self.engine.full = full
            log.warning("%d MiB left for the store: new jobs are %s", free >> 20, "refused" if full else "taken again")

    # ---------------------------------------------------------------- the store

    def _stand(self, error: StorageError | None) -> None:
        """The store has stopped taking batches, or takes them again (design I3)."""
        engine = self.engine
        if error is None:
            log.warning("storage is back")
            engine.degraded = None
            self._retry = _RETRY_FIRST
            now = self.clock.now()
            engine.upkeep.after_outage(now)
            engine.settle(now)
            self.rearm()
            return
        if error.reason in StorageError.FATAL:
            log.critical("storage failed for good (%s): %s", error.reason, error)
            os._exit(3)
        if engine.degraded is None:
            log.error("storage unavailable (%s): %s", error.reason, error)
        engine.degraded = error.reason
        timer = self._loop.timer(self._retry)
        self._retry = min(self._retry * 2, _RETRY_LAST)
        timer.start(engine.journal.retry)

    def recall(self, question: Question, then: Recalled) -> None:
        """Bring archived jobs into the index, then go on; `then` gets the error of a store that cannot be read."""
        gevent.spawn(self._recall, question, then)

    def _recall(self, question: Question, then: Recalled) -> None:
        engine = self.engine
        failed: StorageError | None = None
        for _ in range(_READS):
            landed = engine.journal.begin_read()
            try:
                answer: Answer = self.host.read(lambda storage: _answer(storage, question))
            except StorageError as error:
                log.warning("cannot read the store (%s): %s", error.reason, error)
                answer = [], []
                failed = error
            finally:
                changes = engine.journal.end_read(landed)
            if not engine.archive.admit(answer, changes):
                break
        then(failed)
        engine.upkeep.shed()
        engine.settle(self.clock.now())
        self.rearm()

    # ---------------------------------------------------------------- stop

    def stop(self) -> int:
        """Let workers finish, then close: what is acknowledged is stored (R111)."""
        engine = self.engine
        engine.closing = True
        engine.delivery.answer_all()
        deadline = time.monotonic() + self.settings.shutdown_timeout / 1000
        while (
            time.monotonic() < deadline
            and any(queue.active for queue in engine.index.queues.values())
            and self.connections
        ):
            gevent.sleep(0.02)
        for queue in engine.index.queues.values():
            for job in queue.active.values():
                if job.holder is not None:  # not a loss: the worker may come back to the next broker (R113)
                    job.holder.held.clear()
                    job.holder = None
        self._settle_store(max(deadline, time.monotonic() + 1))
        for connection in list(self.connections):
            connection.finish()
        gevent.sleep(0)
        for connection in list(self.connections):
            connection.abort()
        self._settle_store(time.monotonic() + 1)
        try:
            self.host.close()
        except StorageError as error:
            log.critical("closing the storage failed: %s", error)
            return 3
        return self.exit_code

    def _settle_store(self, deadline: float) -> None:
        journal = self.engine.journal
        journal.flush()
        while (journal.flying is not None or journal.dirty) and time.monotonic() < deadline:
            gevent.sleep(0.002)


def _answer(storage: Storage, question: Question) -> Answer:
    rows = question(storage)
    return rows, storage.logs_of([row.seq for row in rows])


def run(read: Callable[[], Settings]) -> int:
    """Run a broker until a signal ends it; its exit code. `read` reads the settings, again at each SIGHUP.

    Raises StartError before it serves.
    """
    settings = read()
    log_to_stderr(settings.log_level, settings.log_format)
    os.umask(0o077)
    server = Server(settings)
    server.load()
    if settings.check:
        print(settings.shown())
        server.host.close()
        return 0
    try:
        with pid_file(settings.pid_file):
            return _serve_until_told(server, read)
    except StartError:
        server.host.close()
        raise


def _serve_until_told(server: Server, read: Callable[[], Settings]) -> int:
    settings = server.settings
    server.listen()

    def stop() -> None:
        if server.stopping.is_set():
            os._exit(1)
        server.stopping.set()

    def reload() -> None:
        try:
            server.reload(read())
            log.info("settings read again")
        except StartError as error:
            log.warning("settings not read again: %s", error)

    gevent.signal_handler(signal.SIGTERM, stop)
    gevent.signal_handler(signal.SIGINT, stop)
    gevent.signal_handler(signal.SIGHUP, reload)
    gevent.spawn(server.watch)
    interval = watchdog_interval()
    if interval is not None:
        gevent.spawn(_sign_of_life, interval)
    log.info(
        "gqueue %s, storage %s, durability %s, %s, auth %s, tls %s",
        __version__,
        server.kind,
        settings.durability,
        ", ".join(f"{count} {state}" for state, count in server.engine.queries.totals().items() if count) or "no jobs",
        "on" if server.dispatch.tokens else "off",
        "off" if settings.tls_cert is None else "on",
    )
    print(f"listening {settings.host}:{server.listeners[0].server_port}", flush=True)
    notify("READY=1")
    server.stopping.wait()
    notify("STOPPING=1")
    for listener in server.listeners:
        listener.close()
    return server.stop()


def _sign_of_life(interval: float) -> None:
    """From the hub, so that one that hangs is noticed."""
    while True:
        notify("WATCHDOG=1")
        gevent.sleep(interval)
