"""MessagePack both ways, and everything that JavaScript needs of it. Nothing else in the server decodes a frame."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgpack

from gqueue.errors import BadRequest
from gqueue.model import Packed

#: Values of these fields are the users' own: cut out of the frame as bytes, never decoded here (design I5).
_PAYLOADS = frozenset(("data", "result"))
_CAREFULLY = 1 << 20  # bytes; longer frames are read field by field
_LISTED = 1_000_000  # items of one decoded list or map
_CONTAINERS = 100_000  # in the decoded parts of one frame (R62)
_DEPTH = 512  # nesting of a payload (R62); MessagePack's own reader stops at 1024
_SHIM = b"\x91" * (1024 - _DEPTH)  # put in front of a payload, it lets that reader stop where we want
_NOT_NESTING = bytes(b for b in range(256) if not (0x80 <= b <= 0x9F or 0xDC <= b <= 0xDF))

_MAPS = frozenset((*range(0x80, 0x90), 0xDE, 0xDF))
_LISTS = frozenset((*range(0x90, 0xA0), 0xDC, 0xDD))

_ERRORS = (
    ValueError,
    TypeError,
    IndexError,
    RecursionError,
    OverflowError,
    MemoryError,
    msgpack.exceptions.UnpackException,
)


class Absent:
    """What `undefined` of a JavaScript client decodes to: extension 0. A field that holds it is absent (R63)."""


ABSENT = Absent()


def _extension(code: int, _data: bytes) -> Any:
    if code == 0:
        return ABSENT
    raise ValueError(f"extension type {code}")


class _Reader:
    """One MessagePack reader with its own count of containers. Reused from frame to frame."""

    __slots__ = ("containers", "skip", "start", "tell", "unpack", "unpacker")

    def __init__(self) -> None:
        self.containers = 0
        self.unpacker = msgpack.Unpacker(
            ext_hook=_extension,
            list_hook=self._list,
            object_hook=self._map,
            strict_map_key=False,
            max_buffer_size=1 << 27,
            max_array_len=1 << 27,
            max_map_len=1 << 27,
        )
        self.unpack: Callable[[], Any] = self.unpacker.unpack
        self.skip: Callable[[], None] = self.unpacker.skip
        self.tell: Callable[[], int] = self.unpacker.tell
        self.start = 0  # stream position of the frame being read

    def _list(self, items: list[Any]) -> list[Any]:
        self.containers += 1
        if self.containers > _CONTAINERS:
            raise ValueError("too many containers")
        for at, item in enumerate(items) if ABSENT in items else ():
            if item is ABSENT:
                items[at] = None
        return items

    def _map(self, fields: dict[Any, Any]) -> dict[Any, Any]:
        self.containers += 1
        if self.containers > _CONTAINERS:
            raise ValueError("too many containers")
        if ABSENT in fields.values():
            fields = {key: value for key, value in fields.items() if value is not ABSENT}
        return fields


def _decode_checked(packed: bytes) -> Any:
    """One value of a long frame, with its lists bounded before they are made."""
    reader = _Reader()
    reader.unpacker = msgpack.Unpacker(
        ext_hook=_extension,
        list_hook=reader._list,
        object_hook=reader._map,
        strict_map_key=False,
        max_buffer_size=1 << 27,
        max_array_len=_LISTED,
        max_map_len=_LISTED,
    )
    reader.unpacker.feed(packed)
    return reader.unpacker.unpack()


def payload(raw: bytes) -> Packed:
    """A user's value as it came. Raises ValueError when it is nested more than 512 deep."""
    if len(raw) > _DEPTH and len(raw.translate(None, _NOT_NESTING)) > _DEPTH:
        probe = msgpack.Unpacker(max_buffer_size=1 << 27, max_array_len=1 << 27, max_map_len=1 << 27)
        probe.feed(_SHIM + raw)
        probe.skip()  # raises StackError, a ValueError
    return Packed(raw)


_reader = _Reader()


def read_command(frame: bytes) -> dict[str, Any]:
    """The fields of one command. `data`, `result`, `reqId` and the items of `results` stay Packed; `jobs` is a list.

    Fields that hold extension 0 are left out. Raises BadRequest in the words of core 1.2.
    """
    global _reader
    reader = _reader
    try:
        reader.containers = 0
        reader.unpacker.feed(frame)
        if not frame or frame[0] not in _MAPS:
            raise ValueError("no map")
        fields = _read_map(reader, frame, top=True)
        if reader.tell() - reader.start != len(frame):
            raise ValueError("trailing bytes")
    except _ERRORS:
        _reader = _Reader()
        raise BadRequest(_refusal(frame)) from None
    reader.start += len(frame)
    if reader.start > 1 << 30 or len(frame) > _CAREFULLY:
        _reader = _Reader()  # gives the grown buffer back
    return fields


def _read_map(reader: _Reader, frame: bytes, *, top: bool) -> dict[str, Any]:
    start = reader.start
    tell = reader.tell
    skip = reader.skip
    unpack = reader.unpack
    careful = len(frame) > _CAREFULLY
    fields: dict[str, Any] = {}
    for _ in range(reader.unpacker.read_map_header()):
        key = unpack()
        if key in _PAYLOADS or (key == "reqId" and top):
            at = tell() - start
            skip()
            raw = frame[at : tell() - start]
            if raw != b"\xd4\x00\x00":
                fields[key] = payload(raw)
        elif (key == "jobs" or key == "results") and top and frame[tell() - start] in _LISTS:
            fields[key] = _read_jobs(reader, frame) if key == "jobs" else _read_results(reader, frame)
        elif type(key) is not str:
            skip()
        else:
            if careful:
                at = tell() - start
                skip()
                value = _decode_checked(frame[at : tell() - start])
            else:
                value = unpack()
            if value is not ABSENT:
                fields[key] = value
    return fields


def _read_jobs(reader: _Reader, frame: bytes) -> list[Any]:
    """The members of a batch: maps with their payloads packed; anything else as it is, for the refusal."""
    jobs: list[Any] = []
    for _ in range(reader.unpacker.read_array_header()):
        if frame[reader.tell() - reader.start] in _MAPS:
            jobs.append(_read_map(reader, frame, top=False))
        else:
            jobs.append(reader.unpack())
    return jobs


def _read_results(reader: _Reader, frame: bytes) -> list[Packed | None]:
    """One packed value for each job of a batch; None where the client sent `undefined`."""
    start = reader.start
    results: list[Packed | None] = []
    for _ in range(reader.unpacker.read_array_header()):
        at = reader.tell() - start
        reader.skip()
        raw = frame[at : reader.tell() - start]
        results.append(None if raw == b"\xd4\x00\x00" else payload(raw))
    return results


def _refusal(frame: bytes) -> str:
    """Which of two texts an unreadable command gets: a whole value that is not a map is `Invalid command`."""
    if len(frame) > _CAREFULLY:
        return "Invalid command format"
    try:
        value = msgpack.unpackb(frame, ext_hook=_extension, strict_map_key=False)
    except Exception:  # noqa: BLE001 - whatever the decoder says, it is not a command
        return "Invalid command format"
    if isinstance(value, dict) or value is None or value is ABSENT or value in (0, "", False):
        return "Invalid command format"
    return "Invalid command"


# ---------------------------------------------------------------- out

_packer = msgpack.Packer(strict_types=False)
_INT32 = range(-(2**31), 2**31)


def encode(value: Any) -> bytes:
    """A value of the broker's own: Packed parts go in as they are, integers outside int32 as float64 (core 1.4)."""
    kind = type(value)
    if kind is Packed:
        return value  # type: ignore[no-any-return]
    if kind is int:
        return _packer.pack(value if value in _INT32 else float(value))
    if kind is dict:
        parts = [_map_header(len(value))]
        for key, item in value.items():
            parts.append(_packer.pack(key))
            parts.append(encode(item))
        return b"".join(parts)
    if kind is list or kind is tuple:
        return b"".join([_list_header(len(value)), *map(encode, value)])
    return _packer.pack(value)


def _map_header(size: int) -> bytes:
    return bytes((0x80 | size,)) if size < 16 else _packer.pack_map_header(size)


def _list_header(size: int) -> bytes:
    return bytes((0x90 | size,)) if size < 16 else _packer.pack_array_header(size)


_KEYS: dict[str, bytes] = {}
_OK = b"\xa2ok\xc3"
_NOT_OK = b"\xa2ok\xc2\xa5error"
_REQ_ID = b"\xa5reqId"


def reply(fields: dict[str, Any], req_id: bytes | None) -> bytes:
    """The payload of a granted command: `ok`, its fields, and the request's id as it came."""
    parts = [b"", _OK]
    for key, value in fields.items():
        packed = _KEYS.get(key)
        if packed is None:
            packed = _KEYS[key] = _packer.pack(key)
        parts.append(packed)
        parts.append(value if type(value) is Packed else encode(value))
    size = len(fields) + 1
    if req_id is not None:
        parts.append(_REQ_ID)
        parts.append(req_id)
        size += 1
    parts[0] = _map_header(size)
    return b"".join(parts)


def refusal(text: str, req_id: bytes | None = None) -> bytes:
    """The payload of a refused command."""
    if req_id is None:
        return b"\x82" + _NOT_OK + _packer.pack(text)
    return b"".join((b"\x83", _NOT_OK, _packer.pack(text), _REQ_ID, req_id))


# ---------------------------------------------------------------- clients


def pack(value: Any, default: Callable[[Any], Any] | None = None) -> bytes:
    """A value of a client's. Integers keep their width: they may be somebody's data."""
    packed: bytes = msgpack.packb(value, default=default)
    return packed


def unpack(frame: bytes) -> Any:
    """A broker's answer, decoded whole. Extension 0 counts as None."""
    return msgpack.unpackb(frame, ext_hook=_undefined, strict_map_key=False)


def _undefined(code: int, data: bytes) -> Any:
    return None if code == 0 else msgpack.ExtType(code, data)
