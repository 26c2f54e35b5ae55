"""What the broker is to its surroundings: its pid file, its service manager, its file descriptors."""

from __future__ import annotations

import os
import resource
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from gqueue.errors import BadSetting

_CONNECTIONS = 10_000
_SPARE = 64  # descriptors for everything but connections (R70)


@contextmanager
def pid_file(path: str | None) -> Iterator[None]:
    """The number of this process stands in `path` meanwhile. Raises BadSetting when it cannot be written."""
    if path is None:
        yield
        return
    try:
        with open(path, "w") as file:
            file.write(f"{os.getpid()}\n")
    except OSError as error:
        raise BadSetting(f"Cannot write {path}: {error.strerror}") from None
    try:
        yield
    finally:
        with suppress(OSError):
            os.unlink(path)


def most_connections() -> int:
    """As many as this process may have, when it takes all the descriptors that it can get (R70)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _CONNECTIONS + _SPARE
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return _CONNECTIONS if soft == resource.RLIM_INFINITY else max(1, min(_CONNECTIONS, soft - _SPARE))


def notify(state: str) -> None:
    """Tell systemd, if it has started us: READY=1, WATCHDOG=1, STOPPING=1."""
    path = os.environ.get("NOTIFY_SOCKET")
    if not path:
        return
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.setblocking(False)
        sock.connect("\0" + path[1:] if path.startswith("@") else path)
        sock.send(state.encode())


def watchdog_interval() -> float | None:
    """Seconds between two signs of life that systemd wants, half of its limit; None when it wants none."""
    limit = os.environ.get("WATCHDOG_USEC", "")
    return int(limit) / 2_000_000 if limit.isdigit() and int(limit) else None
