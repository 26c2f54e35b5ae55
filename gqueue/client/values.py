"""What users write and what travels: durations, and Python values as MessagePack (surface 6.2, boss 1.2)."""

from __future__ import annotations

import dataclasses
import math
import re
import types
import typing
from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from enum import Enum
from typing import Any
from uuid import UUID

from gqueue.errors import SerializationError
from gqueue.wire import codec

#: A number is ms in options and seconds in `timeout=`; a timedelta and "500ms", "5s", "10m", "2h", "1d" say it.
Duration = int | float | timedelta | str

_UNITS = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_DURATION = re.compile(r"(?:\d+(?:\.\d+)?(?:ms|s|m|h|d)\s*)+")
_PART = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)")
_BARE = re.compile(r"\d+(?:\.\d+)?")


def milliseconds(value: Duration) -> int:
    """A duration of an option, in whole milliseconds. Raises ValueError or TypeError for what is none."""
    return round(_duration(value, 1))


def seconds(value: Duration) -> float:
    """A duration of a `timeout=`, in seconds. Raises ValueError or TypeError for what is none."""
    return _duration(value, 1_000) / 1_000


def _duration(value: Duration, unit: int) -> float:
    """Milliseconds; `unit` is what a bare number counts in."""
    if isinstance(value, timedelta):
        ms = value / timedelta(milliseconds=1)
    elif isinstance(value, str):
        text = value.strip()
        if _BARE.fullmatch(text):
            ms = float(text) * unit
        elif _DURATION.fullmatch(text):
            ms = sum(float(number) * _UNITS[suffix] for number, suffix in _PART.findall(text))
        else:
            raise ValueError(f"{value!r} is not a duration; write a number, or 500ms, 5s, 10m, 2h, 1d")
    elif isinstance(value, int | float) and not isinstance(value, bool):
        ms = value * unit
    else:
        raise TypeError(f"a duration is a number, a timedelta or text such as '5s', not {type(value).__name__}")
    if not math.isfinite(ms) or ms < 0:
        raise ValueError(f"{value!r} is not a duration: it must be finite and not negative")
    return ms


# ---------------------------------------------------------------- out

_INT32 = range(-(2**31), 2**31)


def number(value: int) -> int | float:
    """A number of a command's own. Outside int32 it travels as float64: to JavaScript a 64-bit integer is a BigInt."""
    return value if value in _INT32 else float(value)


def pack(value: Any) -> bytes:
    """One MessagePack value. Raises SerializationError, naming the type that does not fit."""
    try:
        return codec.pack(value, default=plain)
    except SerializationError:
        raise
    except (TypeError, ValueError, OverflowError, RecursionError) as exc:
        raise SerializationError(f"cannot be sent: {exc or type(exc).__name__}") from None


def plain(value: Any) -> Any:
    """A value of a type that MessagePack does not know, as one it knows."""
    match value:
        case datetime():
            if value.tzinfo is None:
                raise SerializationError(
                    "a datetime without a time zone says no instant; use datetime.now(UTC) or .astimezone()"
                )
            return value.astimezone(UTC).isoformat().replace("+00:00", "Z")
        case date():
            return value.isoformat()
        case UUID() | Decimal():
            return str(value)
        case Enum():
            return value.value
        case set() | frozenset():
            return list(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if callable(value):
        raise SerializationError(f"{getattr(value, '__qualname__', value)} is a function or class: send data, not code")
    raise SerializationError(
        f"{type(value).__module__}.{type(value).__qualname__} cannot be sent; turn it into plain data first"
    )


# ---------------------------------------------------------------- in

#: Turns what travelled back into what the annotation of a parameter or a result names.
Reviver = Callable[[Any], Any]


def reviver(annotation: Any) -> Reviver | None:
    """How a value of this annotation comes back, or None when it comes as it is.

    Understood: datetime, date, UUID, Decimal, enums, dataclasses, and these in `X | None`, list, tuple, set, dict.
    A value that does not fit is passed on as it came: the function that gets it knows better what is wrong with it.
    """
    make = _reviver(annotation)
    if make is None:
        return None
    exact = make

    def revive(value: Any) -> Any:
        try:
            return exact(value)
        except (ValueError, TypeError, ArithmeticError, KeyError):
            return value

    return revive


def _reviver(annotation: Any) -> Reviver | None:
    origin = typing.get_origin(annotation)
    arguments = typing.get_args(annotation)
    if origin is typing.Annotated:
        return _reviver(arguments[0])
    if origin is typing.Union or origin is types.UnionType:
        others = [argument for argument in arguments if argument is not type(None)]
        inner = _reviver(others[0]) if len(others) == 1 else None
        return None if inner is None else _optional_reviver(inner)
    if origin in (list, set, frozenset, tuple) and arguments:
        return _items_reviver(origin, arguments)
    if annotation in (set, frozenset, tuple):
        return typing.cast(Reviver, annotation)
    if origin is dict and len(arguments) == 2:
        inner = _reviver(arguments[1])
        return None if inner is None else _mapping_reviver(inner)
    if not isinstance(annotation, type):
        return None
    if issubclass(annotation, datetime | date):
        return annotation.fromisoformat
    if issubclass(annotation, UUID | Decimal | Enum):
        return annotation
    if dataclasses.is_dataclass(annotation):
        return _dataclass_reviver(annotation)
    return None


def _optional_reviver(inner: Reviver) -> Reviver:
    return lambda value: None if value is None else inner(value)


def _mapping_reviver(inner: Reviver) -> Reviver:
    return lambda value: {key: inner(item) for key, item in value.items()}


def _items_reviver(origin: Any, arguments: tuple[Any, ...]) -> Reviver | None:
    uniform = origin is not tuple or (len(arguments) == 2 and arguments[1] is Ellipsis)
    if not uniform:
        each = [_reviver(argument) or _same for argument in arguments]
        return lambda value: tuple(revive(item) for revive, item in zip(each, value, strict=True))
    inner = _reviver(arguments[0])
    if inner is None:
        return None if origin is list else typing.cast(Reviver, origin)
    return lambda value: origin(inner(item) for item in value)


def _dataclass_reviver(annotation: type) -> Reviver:
    hints = typing.get_type_hints(annotation)
    fields = {
        field.name: _reviver(hints[field.name]) or _same for field in dataclasses.fields(annotation) if field.init
    }
    return lambda value: annotation(**{name: fields[name](item) for name, item in value.items()})


def _same(value: Any) -> Any:
    return value
