"""TLS over memory buffers: no socket in here, so a thread that waits never holds what another one needs."""

from __future__ import annotations

import ssl

from gqueue.client.target import Target
from gqueue.errors import ConnectionClosedError

_CHUNK = 1 << 16  # bytes


class Tls:
    """TLS over memory buffers. The ssl object bears one thread at a time: its owner holds a lock, but never waits."""

    __slots__ = ("_object", "_target", "incoming", "outgoing")

    def __init__(self, target: Target) -> None:
        context = ssl.create_default_context() if target.tls is True else target.tls
        assert isinstance(context, ssl.SSLContext)
        self._target = target
        self.incoming = ssl.MemoryBIO()
        self.outgoing = ssl.MemoryBIO()
        self._object = context.wrap_bio(self.incoming, self.outgoing, server_hostname=target.host)

    def shaken(self) -> bool:
        """Take the handshake as far as it goes; true when it is done."""
        try:
            self._object.do_handshake()
        except ssl.SSLWantReadError:
            return False
        except ssl.SSLCertVerificationError as exc:
            raise ConnectionClosedError(
                f"the certificate of {self._target} is not trusted: {exc.verify_message}"
            ) from None
        except ssl.SSLError as exc:
            raise ConnectionClosedError(
                f"the TLS handshake with {self._target} failed ({exc.reason}); is TLS on there?"
            ) from None
        return True

    def seal(self, data: bytes) -> bytes:
        self._object.write(data)
        return self.outgoing.read()

    def feed(self, chunk: bytes) -> bytes:
        self.incoming.write(chunk)
        parts: list[bytes] = []
        while True:
            try:
                part = self._object.read(_CHUNK)
            except (ssl.SSLWantReadError, ssl.SSLZeroReturnError):
                break
            if not part:
                break
            parts.append(part)
        return b"".join(parts)


def trusting(ca: str | None = None, *, verify: bool = True) -> ssl.SSLContext:
    """A context that trusts the certificates in `ca` (a PEM file) or, with verify false, anything."""
    context = ssl.create_default_context(cafile=ca)
    if not verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context
