"""Where the broker is: URLs, environment, token and TLS (surface 5, services 7.1)."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING
from urllib.parse import parse_qs, unquote, urlsplit

if TYPE_CHECKING:
    from ssl import SSLContext

PORT = 6789

_HOSTS = ("GQUEUE_HOST", "HOST", "BUNQUEUE_HOST", "BQ_HOST")
_PORTS = ("GQUEUE_PORT", "GQUEUE_TCP_PORT", "TCP_PORT", "BUNQUEUE_TCP_PORT", "BQ_TCP_PORT")
_TOKENS = ("GQUEUE_TOKEN", "BQ_TOKEN", "BUNQUEUE_TOKEN")


@dataclass(frozen=True, slots=True)
class Target:
    """A broker's address. `path` is a Unix socket and excludes host and port; `token` is never shown."""

    host: str = "localhost"
    port: int = PORT
    path: str | None = None
    token: str | None = field(default=None, repr=False)
    tls: bool | SSLContext = False

    def __str__(self) -> str:
        if self.path is not None:
            return self.path
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @classmethod
    def find(
        cls,
        url: str | None = None,
        *,
        host: str | None = None,
        port: int | None = None,
        token: str | None = None,
        tls: bool | SSLContext | None = None,
    ) -> Target:
        """The address from what was given; what was not given comes from the environment, then from the defaults.

        `url` or GQUEUE_URL decides host, port and TLS together; `host`, `port`, `token`, `tls` go before parts of it.
        Raises ValueError with one line about what is wrong.
        """
        if url is None and host is None and port is None:
            url = os.environ.get("GQUEUE_URL") or None
        if url is not None:
            target = _parse(url)
        else:
            target = cls(host=_environment(_HOSTS) or "localhost", port=_environment_port())
        if host is not None:
            target = replace(target, host=host, path=None)
        if port is not None:
            target = replace(target, port=_port(port), path=None)
        if token is None and target.token is None:
            token = _environment(_TOKENS)
        if token is not None:
            target = replace(target, token=token or None)
        if tls is not None:
            target = replace(target, tls=tls)
        return target


def _parse(url: str) -> Target:
    """`gqueue://[token@]host[:port]`, `gqueue+tls://…`, `unix:///path[?token=…]`, or a bare host[:port]."""
    if "://" not in url:
        url = f"gqueue://{url}"
    parts = urlsplit(url)
    if parts.scheme == "unix":
        path = unquote(parts.netloc + parts.path)
        if not path:
            raise ValueError(f"{url!r} names no socket; write unix:///path/to/socket")
        return Target(path=path, token=parse_qs(parts.query).get("token", [None])[0])
    if parts.scheme not in ("gqueue", "gqueue+tls", "bunqueue", "bunqueue+tls"):
        raise ValueError(
            f"unknown scheme {parts.scheme!r}; a broker's URL is gqueue://host, gqueue+tls://host or unix:///path"
        )
    if not parts.hostname:
        raise ValueError(f"{_without_token(url)!r} names no host; write gqueue://host[:port]")
    if parts.path.strip("/") or parts.query:
        raise ValueError(f"{_without_token(url)!r} has something behind the host; write gqueue://[token@]host[:port]")
    try:
        port = parts.port
    except ValueError:
        raise ValueError(f"{_without_token(url)!r} has no valid port") from None
    # a token may be written as user or as password: redis users expect the second
    token = unquote(parts.password or parts.username or "") or None
    return Target(
        host=parts.hostname, port=_port(PORT if port is None else port), token=token, tls=parts.scheme.endswith("+tls")
    )


def _without_token(url: str) -> str:
    head, at, tail = url.rpartition("@")
    return f"{head.partition('://')[0]}://***@{tail}" if at else url


def _port(port: int) -> int:
    if isinstance(port, bool) or not isinstance(port, int):
        raise TypeError(f"port must be a number, not {type(port).__name__}")
    if not 1 <= port <= 65_535:
        raise ValueError(f"{port} is not a port; it must be 1 to 65535")
    return port


def _environment(names: tuple[str, ...]) -> str | None:
    """The first that is set to something."""
    return next((os.environ[name] for name in names if os.environ.get(name)), None)


def _environment_port() -> int:
    for name in _PORTS:
        if text := os.environ.get(name):
            if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= 65_535:
                raise ValueError(f"{name}={text!r} is not a port; it must be 1 to 65535")
            return int(text)
    return PORT
