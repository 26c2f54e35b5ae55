"""Frames: a 4-byte big-endian length, then that many bytes (core 1.1). Bytes in, payloads out: no socket or msgpack."""

from __future__ import annotations

from struct import Struct

from gqueue.errors import GQueueError

MAX_FRAME = 67_108_864  # bytes of payload
HEADER = Struct(">I")

_unpack_length = HEADER.unpack_from


class FrameTooLarge(GQueueError):
    """A frame announces more than its side may send. What follows on the connection cannot be read any more."""

    def __init__(self, declared: int, maximum: int = MAX_FRAME, payloads: list[bytes] | None = None) -> None:
        super().__init__(f"Frame too large: {declared} bytes exceeds maximum {maximum}")
        self.declared = declared
        self.payloads = payloads or []  # complete ones that came before it in the same chunk


def frame(payload: bytes) -> bytes:
    """One payload with its length in front. Raises FrameTooLarge for one that no peer may accept."""
    size = len(payload)
    if size > MAX_FRAME:
        raise FrameTooLarge(size)
    return HEADER.pack(size) + payload


class Frames:
    """Cuts a byte stream into payloads, whatever the chunks it comes in.

    A frame that is larger than a chunk is collected in a list and joined once, so a 64 MiB frame costs two copies and
    never memory for bytes that were only announced (R60).
    """

    __slots__ = ("_chunks", "_held", "_wanted", "maximum")

    def __init__(self, maximum: int = MAX_FRAME) -> None:
        self.maximum = maximum  # raised once a connection is authenticated
        self._chunks: list[bytes] = []
        self._held = 0  # bytes in _chunks
        self._wanted = 4  # bytes needed before anything can be cut

    @property
    def partial(self) -> int:
        """How many bytes of an incomplete frame are held."""
        return self._held

    def feed(self, chunk: bytes) -> list[bytes]:
        """The payloads that `chunk` completes, in order.

        Raises FrameTooLarge, which carries the payloads before the oversized header.
        """
        if self._held:
            self._chunks.append(chunk)
            self._held += len(chunk)
            if self._held < self._wanted:
                return []
            chunk = b"".join(self._chunks)
            self._chunks = []
            self._held = 0
        payloads: list[bytes] = []
        add = payloads.append
        at = 0
        size = len(chunk)
        maximum = self.maximum
        while size - at >= 4:
            (length,) = _unpack_length(chunk, at)
            if length > maximum:
                raise FrameTooLarge(length, maximum, payloads)
            end = at + 4 + length
            if end > size:
                self._wanted = 4 + length
                break
            add(chunk[at + 4 : end])
            at = end
        else:
            self._wanted = 4
        if at < size:
            self._chunks = [chunk[at:] if at else chunk]
            self._held = size - at
        return payloads
