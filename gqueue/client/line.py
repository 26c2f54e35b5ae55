"""One socket to a broker: frames out, answers in. No reconnecting and no matching of answers here.

Everything that could wait is taken from `Net`, so that a native thread of a gevent-patched program can have the real
primitives while all other threads get whatever `socket`, `select` and `threading` hold when they are used.
"""

from __future__ import annotations

import contextlib
import random
import select
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gqueue.client.target import Target
from gqueue.errors import AuthError, CommandTimeoutError, ConnectionClosedError
from gqueue.wire import codec
from gqueue.wire.frames import Frames, FrameTooLarge, frame

if TYPE_CHECKING:
    from gqueue.client.tls import Tls

PING_AFTER = 10.0  # s without a byte while somebody waits; after two unanswered pings the socket counts as dead (R94)
_CHUNK = 1 << 16  # bytes of one read


@dataclass(frozen=True, slots=True)
class Net:
    """The primitives that block."""

    socket: Any
    getaddrinfo: Any
    poll: Any
    lock: Callable[[], Any]


def current() -> Net:
    """What this program uses, patched or not."""
    return Net(socket.socket, socket.getaddrinfo, select.poll, threading.Lock)


def native() -> Net:
    """The real ones, also where gevent has replaced them. They block a whole thread: for threads of their own."""
    return Net(
        original("socket", "socket"),
        original("socket", "getaddrinfo"),
        original("select", "poll"),
        original("_thread", "allocate_lock"),
    )


def original(module: str, name: str) -> Any:
    """`module.name` as it was before gevent patched it; gevent is asked only where it is loaded anyway."""
    monkey = sys.modules.get("gevent.monkey")
    if monkey is None:
        return getattr(sys.modules[module], name)
    return monkey.get_original(module, name)


def pause(attempt: int) -> float:
    """Seconds before attempt 0, 1, 2, … to reconnect: full jitter below 50 ms doubling to 5 s (R94)."""
    return random.uniform(0, min(5.0, 0.05 * 2.0 ** min(attempt, 10)))


class Line:
    """One live connection, already authenticated.

    Any thread may send; one at a time may receive. Every failure of the socket is a ConnectionClosedError.
    """

    __slots__ = ("_closed", "_frames", "_net", "_poller", "_sending", "_sock", "_tls", "_tls_lock", "target")

    def __init__(self, target: Target, net: Net, sock: Any, tls: Tls | None) -> None:
        self.target = target
        self._net = net
        self._sock = sock
        self._tls = tls
        self._tls_lock = net.lock()
        self._sending = net.lock()
        self._frames = Frames()
        self._closed = False
        self._poller = net.poll()
        self._poller.register(sock, select.POLLIN)

    @classmethod
    def open(cls, target: Target, timeout: float, net: Net | None = None) -> Line:
        """Connect, shake hands, authenticate, all within `timeout` seconds.

        Raises AuthError when the broker does not know the token, else ConnectionClosedError.
        """
        net = net or current()
        deadline = time.monotonic() + timeout
        sock = None
        try:
            sock = _dial(target, net, deadline)
            tls = _tls(target) if target.tls else None
            line = cls(target, net, sock, tls)
            if tls is not None:
                line._shake_hands(tls, deadline)
            if target.token is not None:
                line._authenticate(target.token, deadline)
        except BaseException as exc:
            if sock is not None:
                sock.close()
            if isinstance(exc, TimeoutError):
                raise ConnectionClosedError(
                    f"cannot reach the broker at {target}: no answer within {timeout:g} s"
                ) from None
            if isinstance(exc, OSError):
                raise ConnectionClosedError(f"cannot reach the broker at {target}: {_reason(exc)}") from None
            raise
        return line

    # ------------------------------------------------------------ out

    def send(self, data: bytes, deadline: float) -> None:
        """Hand whole frames to the kernel.

        Raises ConnectionClosedError when not all of `data` has been taken: then its last frame cannot have been read.
        After that the line is unusable.
        """
        with self._sending:
            if self._closed:
                raise ConnectionClosedError(f"the connection to {self.target} is closed")
            try:
                if self._tls is not None:
                    with self._tls_lock:
                        data = self._tls.seal(data)
                self._write(data, deadline)
            except OSError as exc:
                self._end()
                raise ConnectionClosedError(f"the connection to {self.target} was lost: {_reason(exc)}") from None

    def _write(self, data: bytes, deadline: float) -> None:
        send = self._sock.send
        try:
            sent = send(data)
        except BlockingIOError:
            sent = 0
        if sent == len(data):
            return
        rest = memoryview(data)[sent:]
        poller = self._net.poll()
        poller.register(self._sock, select.POLLOUT)
        while rest:
            left = deadline - time.monotonic()
            if left <= 0 or not poller.poll(left * 1000):
                raise TimeoutError("it takes no more data")
            try:
                rest = rest[send(rest) :]
            except BlockingIOError:
                continue

    # ------------------------------------------------------------ in

    def receive(self, timeout: float) -> list[Any] | None:
        """The answers that one read completes; None when nothing came within `timeout` seconds.

        Raises ConnectionClosedError at the end of the stream and for bytes that are no frames.
        """
        if self._closed:
            raise ConnectionClosedError(f"the connection to {self.target} is closed")
        try:
            if not self._poller.poll(max(timeout, 0) * 1000):
                return None
            chunk = self._sock.recv(_CHUNK)
        except BlockingIOError:
            return []
        except (OSError, ValueError) as exc:  # ValueError: closed by another thread meanwhile
            raise ConnectionClosedError(f"the connection to {self.target} was lost: {_reason(exc)}") from None
        if not chunk:
            raise ConnectionClosedError(f"the broker at {self.target} closed the connection")
        try:
            if self._tls is not None:
                chunk = self._opened(self._tls, chunk)
            return [codec.unpack(payload) for payload in self._frames.feed(chunk)]
        except FrameTooLarge:
            raise ConnectionClosedError(
                f"{self.target} does not speak this protocol; is it another port, or TLS?"
            ) from None
        except OSError as exc:  # of the TLS layer
            raise ConnectionClosedError(f"the connection to {self.target} was lost: {_reason(exc)}") from None
        except ValueError as exc:
            raise ConnectionClosedError(f"the broker at {self.target} sent something unreadable: {exc}") from None

    def _opened(self, tls: Tls, chunk: bytes) -> bytes:
        with self._tls_lock:
            plain = tls.feed(chunk)
            answer = tls.outgoing.read()
        if answer:  # a key update wants one
            with self._sending:
                self._write(answer, time.monotonic() + PING_AFTER)
        return plain

    def hung_up(self) -> bool:
        """Whether the broker has closed an idle line. Nobody may be receiving meanwhile."""
        try:
            return bool(self._poller.poll(0)) and not self._sock.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except (OSError, ValueError):
            return True

    def ask(self, cmd: str, fields: dict[str, Any], deadline: float) -> dict[str, Any]:
        """One command and its answer, for whoever has the line to himself. Other answers are dropped."""
        self.send(frame(codec.pack({"cmd": cmd, **fields, "reqId": cmd})), deadline)
        while (left := deadline - time.monotonic()) > 0:
            for reply in self.receive(left) or ():
                if reply.get("reqId") == cmd:
                    return dict(reply)
        raise CommandTimeoutError(f"{cmd}: no answer in time")

    # ------------------------------------------------------------ start and end

    def _shake_hands(self, tls: Tls, deadline: float) -> None:
        while not tls.shaken():
            self._write(tls.outgoing.read(), deadline)
            left = deadline - time.monotonic()
            if left <= 0 or not self._poller.poll(left * 1000):
                raise TimeoutError
            chunk = self._sock.recv(_CHUNK)
            if not chunk:
                raise ConnectionClosedError(
                    f"{self.target} closed the connection during the TLS handshake; is TLS on there?"
                )
            tls.incoming.write(chunk)
        self._write(tls.outgoing.read(), deadline)

    def _authenticate(self, token: str, deadline: float) -> None:
        """A broker without tokens refuses any token and serves everybody: one that refuses Ping too is closed to us."""
        try:
            granted = self.ask("Auth", {"token": token}, deadline).get("ok")
            if not granted and not self.ask("Ping", {}, deadline).get("ok"):
                raise AuthError(f"the broker at {self.target} does not accept the token")
        except CommandTimeoutError:
            raise TimeoutError from None

    def close(self) -> None:
        """End it; whoever is receiving wakes. Safe to call twice and from any thread."""
        with self._sending:
            self._end()

    def _end(self) -> None:
        if not self._closed:
            self._closed = True
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)  # wakes a receiver, which close alone would not
            self._sock.close()

    def forget(self) -> None:
        """Drop a line inherited from the parent process; the parent keeps using it."""
        self._closed = True
        self._sock.close()


def _dial(target: Target, net: Net, deadline: float) -> Any:
    """A connected, non-blocking socket. Tries each address of the name in turn."""
    if target.path is not None:
        addresses = [(socket.AF_UNIX, socket.SOCK_STREAM, 0, "", target.path)]
    else:
        addresses = net.getaddrinfo(target.host, target.port, type=socket.SOCK_STREAM)
    failure: OSError = OSError("no address")
    for family, kind, protocol, _, address in addresses:
        sock = net.socket(family, kind, protocol)
        try:
            sock.settimeout(max(deadline - time.monotonic(), 0.001))
            sock.connect(address)
            if target.path is None:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            sock.setblocking(False)
        except OSError as exc:
            sock.close()
            failure = exc
        else:
            return sock
    raise failure


def _tls(target: Target) -> Tls:
    from gqueue.client.tls import Tls  # ssl takes 15 ms to import: only who uses it pays

    return Tls(target)


def _reason(exc: Exception) -> str:
    return getattr(exc, "strerror", None) or str(exc) or type(exc).__name__
