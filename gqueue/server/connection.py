"""One client: reads, at most 50 parked commands, a bounded write queue, and what it holds (core 1.5, 1.6, 1.12)."""

from __future__ import annotations

import select
import socket
import ssl
import struct
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import gevent
from gevent.event import Event

from gqueue.engine.archive import Question
from gqueue.engine.delivery import Session
from gqueue.errors import StorageError, StorageUnavailable
from gqueue.server import dispatch
from gqueue.server.ratelimit import Window
from gqueue.wire import codec
from gqueue.wire.frames import Frames, FrameTooLarge

if TYPE_CHECKING:
    from gqueue.server.app import Server

_CHUNK = 256 * 1024  # bytes of one recv
_PLACES = 50  # parked commands (core 1.6)
_BACKLOG = 1000  # commands that wait for a place; beyond it, or 8 MiB, nothing more is read
_BACKLOG_BYTES = 8 << 20


class Connection:
    """A greenlet that waits for its socket, reads once each time it is readable, and runs what has arrived inline."""

    def __init__(self, server: Server, sock: Any) -> None:
        self.server = server
        self.sock = sock
        self.session = Session(self)
        self.opened = time.monotonic()  # s
        self.authenticated = not server.dispatch.tokens
        self.failed_auths = 0
        self.parked = 0
        self.backlog: deque[tuple[dict[str, Any], int]] = deque()
        self.backlog_bytes = 0
        self.held = False  # a command waits for archived jobs, and those behind it for the command
        self.partial_since: float | None = None  # monotonic s
        self.closed = False
        self.out: list[bytes] = []
        self._reading = False
        self._room = Event()
        self._frames = Frames()
        self._unsent = b""
        self._write_watcher: Any = None
        self._finishing = False
        self._secure = isinstance(sock, ssl.SSLSocket)
        self._writing = Event()
        self._window = (
            Window(server.settings.rate_limit, server.settings.rate_window) if server.settings.rate_limit else None
        )

    # ---------------------------------------------------------------- reading

    def run(self) -> None:
        """Serve the client until either side closes."""
        sock = self.sock
        hub = gevent.get_hub()
        watcher = None
        writer = None
        try:
            if self._secure:
                writer = gevent.spawn(self._write_secure)
            else:
                sock.settimeout(0)
                watcher = hub.loop.io(sock.fileno(), 1)
            while not self.closed:
                if watcher is not None:
                    hub.wait(watcher)
                try:
                    chunk = sock.recv(_CHUNK)
                except BlockingIOError:
                    continue
                if not chunk or self.closed:
                    break
                if not self._take(chunk):
                    break
                if self._secure:
                    gevent.sleep(0)
                while self._full() and not self.closed:
                    self._room.clear()
                    self._room.wait(0.5)
                    if self._hung_up():
                        return
        except (OSError, ValueError):
            pass
        finally:
            if watcher is not None:
                watcher.stop()
                watcher.close()
            self.close()
            if writer is not None:
                self._writing.set()
                writer.join(1)
            sock.close()

    def _take(self, chunk: bytes) -> bool:
        """Run the commands that a chunk completes. False: the stream cannot be read any further."""
        self._reading = True
        try:
            for payload in self._frames.feed(chunk):
                self._handle(payload)
        except FrameTooLarge as error:
            for payload in error.payloads:
                self._handle(payload)
            self.send(dispatch.framed(codec.refusal(str(error))))
            self.finish()
            return False
        finally:
            self._reading = False
            self.partial_since = time.monotonic() if self._frames.partial else None
            self.flush()
            self.server.rearm()
        return True

    def _handle(self, payload: bytes) -> None:
        fields = dispatch.read(payload)
        if self._window is not None and not self._window.admit(self.server.clock.now()):
            req_id = fields.get("reqId") if type(fields) is dict else None
            self.send(
                dispatch.framed(codec.refusal("Rate limit exceeded", req_id if dispatch._is_text(req_id) else None))
            )
        elif type(fields) is bytes:
            self.send(dispatch.framed(fields))
        elif self.parked >= _PLACES or self.backlog or self.held:
            self.backlog.append((fields, len(payload)))  # type: ignore[arg-type]
            self.backlog_bytes += len(payload)
        else:
            self.server.dispatch.run(self, fields)  # type: ignore[arg-type]

    def work_off(self) -> None:
        """A place is free: run what waited for it, in order."""
        while self.backlog and self.parked < _PLACES and not self.held and not self.closed:
            fields, size = self.backlog.popleft()
            self.backlog_bytes -= size
            self.server.dispatch.run(self, fields)
        if not self._full():
            self._room.set()
        self.flush()
        self.server.rearm()

    def hold(self, question: Question, fields: dict[str, Any]) -> None:
        """Put a command off until the store has answered; then it and what came after it run."""
        self.held = True

        def go_on(error: StorageError | None) -> None:
            self.held = False
            if self.closed:
                return
            if error is None:
                self.server.dispatch.run(self, fields, recalled=True)
            else:
                refusal = str(StorageUnavailable(error.reason))
                self.send(dispatch.framed(codec.refusal(refusal, fields.get("reqId"))))
            self.work_off()

        self.server.recall(question, go_on)

    def give_way(self, go_on: Callable[[], bool]) -> None:
        """Let others have a turn, then `go_on` until that says True; commands behind this one wait."""
        self.held = True

        def turn() -> None:
            self.held = False
            if go_on():
                if not self.closed:
                    self.work_off()
            else:
                self.server.rearm()

        self.server.next_turn(turn)

    def _full(self) -> bool:
        return len(self.backlog) >= _BACKLOG or self.backlog_bytes >= _BACKLOG_BYTES

    def _hung_up(self) -> bool:
        poll = select.poll()
        poll.register(self.sock.fileno(), select.POLLRDHUP)
        return bool(poll.poll(0))

    # ---------------------------------------------------------------- writing

    def send(self, frame: bytes) -> None:
        """Queue a frame; all frames of a turn leave in one send."""
        if self.closed:
            return
        if not self.out and not self._reading:
            self.server.touch(self)
        self.out.append(frame)

    def flush(self) -> None:
        if self.closed or not self.out or self._reading:
            return
        if self._secure:
            self._writing.set()
            return
        if self._write_watcher is not None:
            self._bound()
            return
        data = (
            self._unsent + b"".join(self.out)
            if self._unsent
            else self.out[0]
            if len(self.out) == 1
            else b"".join(self.out)
        )
        self.out = []
        try:
            sent = self.sock.send(data)
        except BlockingIOError:
            sent = 0
        except OSError:
            self.abort()
            return
        if sent == len(data):
            self._unsent = b""
            if self._finishing:
                self._shut()
            return
        self._unsent = data[sent:]
        self._write_watcher = gevent.get_hub().loop.io(self.sock.fileno(), 2)
        self._write_watcher.start(self._writable)
        self._bound()

    @property
    def unsent(self) -> int:
        """Bytes that wait for the client to read."""
        return len(self._unsent) + sum(map(len, self.out))

    def _bound(self) -> None:
        """A reader that is too slow loses its connection (core 1.12)."""
        limit = self.server.settings.max_write_queue
        if limit and self.unsent > limit:
            self.abort()

    def _writable(self) -> None:
        try:
            sent = self.sock.send(memoryview(self._unsent)[: 1 << 20])
        except BlockingIOError:
            return
        except OSError:
            self.abort()
            return
        self._unsent = self._unsent[sent:]
        if not self._unsent:
            self._stop_writing()
            if self.out:
                self.flush()
            elif self._finishing:
                self._shut()

    def _write_secure(self) -> None:
        """TLS has no send that takes what fits: a greenlet waits in its place."""
        while True:
            self._writing.wait()
            self._writing.clear()
            while self.out:
                data = b"".join(self.out)
                self.out = []
                try:
                    self.sock.sendall(data)
                except OSError:
                    self.abort()
                    return
            if self._finishing:
                self._shut()
            if self.closed:
                return

    # ---------------------------------------------------------------- the end

    def finish(self) -> None:
        """Close once everything that is queued has been sent."""
        self._finishing = True
        if not self.out and not self._unsent:
            self._shut()

    def _shut(self) -> None:
        with suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)

    def abort(self, *, reset: bool = False) -> None:
        """Close at once; what is queued is dropped."""
        if reset:
            with suppress(OSError):
                self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._shut()
        self.close()

    def close(self) -> None:
        """Give back what the connection held. Harmless when it is done already."""
        if self.closed:
            return
        self.closed = True
        self._stop_writing()
        self.out = []
        self.backlog.clear()
        self._room.set()
        self._writing.set()
        self.server.connections.discard(self)
        engine = self.server.engine
        now = self.server.clock.now()
        engine.delivery.close(self.session, now)
        engine.settle(now)
        self.server.rearm()

    def _stop_writing(self) -> None:
        if self._write_watcher is not None:
            self._write_watcher.stop()
            self._write_watcher.close()
            self._write_watcher = None
