"""What a field may hold: type, bounds, unit, and the words of its refusal (core 1.3, 1.4)."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Annotated, Any

import msgpack
from cronsim import CronSim, CronSimError

from gqueue.commands.registry import Kind
from gqueue.errors import BadRequest
from gqueue.model import DAY, YEAR, Packed

_QUEUE_NAME = re.compile(r"[A-Za-z0-9_.:\-]+").fullmatch
MAX_DATA = 10 * 1024 * 1024  # characters of JSON (core 2.5)
_CONTAINERS = 100_000  # made to measure one payload (R62)
SAFE = 2**53 - 1  # the largest integer of JavaScript


class QueueName(Kind):
    says = "queue name: 1–256 of `A-Z a-z 0-9 _ . : -`"

    def __init__(self) -> None:
        self._known: dict[str, None] = {}  # names that have passed, at most 10,000

    def check(self, value: Any, field: str) -> str:
        if type(value) is str:
            if value in self._known:
                return value
        else:
            raise BadRequest(f"{field} must be a string")
        if not value:
            raise BadRequest("Queue name is required")
        if len(value) > 256:
            raise BadRequest("Queue name too long (max 256 characters)")
        if _QUEUE_NAME(value) is None:
            raise BadRequest("Queue name contains invalid characters")
        if len(self._known) < 10_000:
            self._known[value] = None
        return value

    def absent(self, field: str) -> BadRequest:
        return BadRequest("Queue name is required")


class Text(Kind):
    """A string. `least` 1 refuses the empty one as missing; `most` in characters."""

    def __init__(self, *, least: int = 0, most: int | None = None, empty_is_none: bool = False) -> None:
        self.least = least
        self.most = most
        self.empty_is_none = empty_is_none
        self.says = "string" + (f", at most {most} characters" if most else "")

    def check(self, value: Any, field: str) -> str | None:
        if type(value) is not str:
            raise BadRequest(f"{field} must be a string")
        if not value:
            if self.empty_is_none:
                return None
            if self.least:
                raise BadRequest(f"{field} is required")
        if self.most is not None and len(value) > self.most:
            raise BadRequest(f"{field} must be at most {self.most} characters")
        return value


class CustomId(Text):
    """A client's own job id."""

    def __init__(self) -> None:
        super().__init__(most=1024, empty_is_none=True)

    def check(self, value: Any, field: str) -> str | None:
        return super().check(value, "jobId" if field == "customId" else field)


class Name(Kind):
    says = "string, 1–256 characters"

    def check(self, value: Any, field: str) -> str:
        if type(value) is not str or not 1 <= len(value) <= 256:
            raise BadRequest("Job name must be a non-empty string of at most 256 characters")
        return value


class GroupId(Kind):
    says = "string, 1–256 characters, no NUL"

    def check(self, value: Any, field: str) -> str:
        if type(value) is not str:
            raise BadRequest("groupId must be a string")
        if not value:
            raise BadRequest("groupId must be a non-empty string")
        if len(value) > 256:
            raise BadRequest("groupId must be at most 256 characters")
        if "\0" in value:
            raise BadRequest("groupId must not contain NUL characters")
        return value


class Number(Kind):
    """A finite number between two bounds. `whole` refuses fractions, otherwise they are cut off."""

    def __init__(
        self,
        low: float | None = None,
        high: float | None = None,
        *,
        whole: bool = False,
        fraction: bool = False,
        unit: str = "",
    ) -> None:
        self.low = low
        self.high = high
        self.whole = whole
        self.fraction = fraction  # keeps them
        bounds = (
            f" {low if low is not None else ''}..{high if high is not None else ''}"
            if low is not None or high is not None
            else ""
        )
        self.says = ("integer" if whole else "number") + bounds + (f" {unit}" if unit else "")

    def check(self, value: Any, field: str) -> Any:
        kind = type(value)
        if kind is float:
            if not math.isfinite(value):
                raise BadRequest(f"{field} must be a finite number")
        elif kind is not int:
            raise BadRequest(f"{field} must be a number")
        if kind is float:
            if value.is_integer():
                value = int(value)
            elif self.whole:
                raise BadRequest(f"{field} must be an integer")
        if self.low is not None and value < self.low:
            raise BadRequest(f"{field} must be at least {self.low}")
        if self.high is not None and value > self.high:
            raise BadRequest(f"{field} must be at most {self.high}")
        return value if self.fraction or type(value) is int else math.floor(value)


class Priority(Kind):
    """Higher first; inside a group lower first, with bounds and words of its own (core 2.4)."""

    says = "integer -1000000..1000000, higher first; with groupId 0..2097151, lower first"
    looks_around = True
    _alone = Number(-1_000_000, 1_000_000, whole=True)

    def check(self, value: Any, field: str) -> int:
        return self._alone.check(value, field)  # type: ignore[no-any-return]

    def check_among(self, value: Any, field: str, values: dict[str, Any]) -> int:
        return self.check(value, field) if values.get("groupId") is None else self.grouped(value)

    def grouped(self, value: Any) -> int:
        """The same for a job of a group."""
        if type(value) not in (int, float) or not math.isfinite(value):
            raise BadRequest("group.priority must be a finite number")
        if value != int(value):
            raise BadRequest("group.priority must be an integer")
        if not 0 <= value <= 2_097_151:
            raise BadRequest("group.priority must be between 0 and 2097151")
        return int(value)


class Flag(Kind):
    says = "boolean"

    def check(self, value: Any, field: str) -> bool:
        if type(value) is not bool:
            raise BadRequest(f"{field} must be a boolean")
        return value


class Truth(Kind):
    """Any value, by its truth as JavaScript sees it: containers always count as true (core 2.4)."""

    says = "boolean (other values by their truth)"

    def check(self, value: Any, field: str) -> bool:
        if isinstance(value, list | dict):
            return True
        return bool(value) and value == value


class PositiveSafe(Kind):
    says = "integer 1..2^53-1"

    def __init__(self, shown: str | None = None) -> None:
        self.shown = shown

    def check(self, value: Any, field: str) -> int:
        if type(value) is float and value.is_integer():
            value = int(value)
        if type(value) is not int or not 1 <= value <= SAFE:
            raise BadRequest(f"{self.shown or field} must be a positive safe integer")
        return value


class Id(Text):
    """The id of a job."""

    names_job = True


class Texts(Kind):
    says = "list of strings"

    def check(self, value: Any, field: str) -> list[str]:
        if type(value) is not list:
            raise BadRequest(f"{field} must be an array")
        for at, item in enumerate(value):
            if type(item) is not str:
                raise BadRequest(f"{field}[{at}] must be a string")
        return value


class Tags(Kind):
    says = "list of strings of at most 256 characters"

    def check(self, value: Any, field: str) -> tuple[str, ...]:
        if type(value) is not list or any(type(item) is not str or len(item) > 256 for item in value):
            raise BadRequest("tags must be an array of strings of at most 256 characters")
        return tuple(value)


class Listed(Kind):
    """A list whose items `item` checks; nil items stay None with `gaps`."""

    def __init__(self, item: Kind, *, gaps: bool = False) -> None:
        self.item = item
        self.gaps = gaps
        self.says = f"list of {item.says}"

    def check(self, value: Any, field: str) -> list[Any]:
        if type(value) is not list:
            raise BadRequest(f"{field} must be an array")
        check = self.item.check
        items: list[Any] = []
        for at, item in enumerate(value):
            if item is None and self.gaps:
                items.append(None)
            else:
                items.append(check(item, f"{field}[{at}]"))
        return items


class Anything(Kind):
    """A payload, as it came."""

    says = "any value"


class Table(Kind):
    says = "map"

    def check(self, value: Any, field: str) -> dict[str, Any]:
        if type(value) is not dict:
            raise BadRequest(f"{field} must be an object")
        return value


class OneOf(Kind):
    def __init__(self, *words: str) -> None:
        self.words = words
        self.says = " | ".join(words)

    def check(self, value: Any, field: str) -> str:
        if value not in self.words or type(value) is not str:
            raise BadRequest(f"{field} must be one of {', '.join(self.words)}")
        return value


class Loose(Kind):
    """A value that a function turns into something usable, whatever it is."""

    def __init__(self, says: str, convert: Callable[[Any, str], Any]) -> None:
        self.says = says
        self.convert = convert

    def check(self, value: Any, field: str) -> Any:
        return self.convert(value, field)


class Data(Kind):
    """A job's payload: at most 10 MB as JSON (core 2.5)."""

    says = "any value, at most 10 MB as JSON"

    def check(self, value: Any, field: str) -> Packed:
        if type(value) is not Packed:
            value = Packed(msgpack.packb(value))
        if len(value) * 6 > MAX_DATA and longer_as_json(value, MAX_DATA):
            raise BadRequest("Job data too large (max 10MB)")
        return value  # type: ignore[no-any-return]


def longer_as_json(packed: Packed, limit: int) -> bool:
    """Whether a value has more than `limit` characters as JSON text (UTF-16 units; NaN is null, binary by length)."""
    if len(packed) * 6 <= limit:
        return False
    containers = 0

    def count(items: Any) -> Any:
        nonlocal containers
        containers += 1
        if containers > _CONTAINERS:
            raise OverflowError
        return items

    try:
        value = msgpack.unpackb(
            packed, strict_map_key=False, ext_hook=lambda _code, data: data, object_pairs_hook=count, list_hook=count
        )
    except OverflowError:
        return len(packed) > limit  # so many containers are not made just to measure them (R62)
    except (ValueError, TypeError):
        return len(packed) > limit
    return _json_length(value, limit) > limit


_ESCAPED = re.compile(r'["\\\x08\t\n\f\r]')
_CONTROL = re.compile(r"[\x00-\x07\x0b\x0e-\x1f]")
_ASTRAL = re.compile(r"[\U00010000-\U0010ffff]")


def _json_length(value: Any, limit: int) -> int:
    """Characters of the JSON text, without building it; stops soon after `limit`."""
    total = 0
    stack = [value]
    while stack and total <= limit:
        item = stack.pop()
        if type(item) is str:
            total += len(item) + 2
            if total <= limit:
                total += len(_ESCAPED.findall(item)) + 5 * len(_CONTROL.findall(item)) + len(_ASTRAL.findall(item))
        elif type(item) is list:
            total += 2 + max(len(item) - 1, 0)
            if item and type(item[0]) is tuple:
                total += len(item)
                for key, inner in item:
                    stack.append(key if type(key) is str else str(key))
                    stack.append(inner)
            else:
                stack.extend(item)
        elif type(item) is bytes:
            total += len(item)
        elif type(item) is float:
            total += len(repr(item)) if math.isfinite(item) else 4
        elif item is True or item is None:
            total += 4
        elif item is False:
            total += 5
        else:
            total += len(str(item))
    return total


class Backoff(Kind):
    """A number of ms, or {type, delay, maxDelay}. Gives (base ms, type, maxDelay or None); "" for a number."""

    says = "number 0..86400000 ms, or map {type: fixed | exponential, delay, maxDelay}"
    _base = Number(0, DAY)

    def check(self, value: Any, field: str) -> tuple[int, str, int | None]:
        if type(value) is not dict:
            return self._base.check(value, "backoff"), "", None
        kind = value.get("type")
        if kind not in ("fixed", "exponential"):
            raise BadRequest("backoff.type must be 'fixed' or 'exponential'")
        if value.get("delay") is None:
            raise BadRequest("backoff.delay is required")
        delay = self._base.check(value["delay"], "backoff.delay")
        cap = value.get("maxDelay")
        return delay, kind, None if cap is None else self._base.check(cap, "backoff.maxDelay")


class Dedup(Kind):
    """{ttl, extend, replace} of a unique key. Gives (ttl ms or None, extend, replace)."""

    says = "map {ttl: ms, extend: boolean, replace: boolean}"
    _ttl = Number(0)
    _flag = Flag()

    def check(self, value: Any, field: str) -> tuple[int | None, bool, bool]:
        if type(value) is not dict:
            raise BadRequest("dedup must be an object")
        ttl, extend, replace = value.get("ttl"), value.get("extend"), value.get("replace")
        return (
            None if ttl is None else self._ttl.check(ttl, "dedup.ttl"),
            extend is not None and self._flag.check(extend, "dedup.extend"),
            replace is not None and self._flag.check(replace, "dedup.replace"),
        )


class Repeat(Kind):
    """The faults of a repeat in their own words (core 2.6); one without any is refused too, until it would repeat.

    To accept a repeat that never comes back would lose it in silence.
    """

    says = "map {every | pattern, …}; refused by this version"
    looks_around = True
    _dates = ("startDate", "endDate", "prevMillis", "offset")

    def check_among(self, value: Any, field: str, values: dict[str, Any]) -> Any:
        if type(value) is not dict:
            raise BadRequest("repeat must be an object")
        every, pattern = value.get("every"), value.get("pattern")
        if (every is None) == (not pattern):
            raise BadRequest("repeat requires exactly one of every or pattern")
        if every is not None and (type(every) not in (int, float) or not math.isfinite(every) or every <= 0):
            raise BadRequest("repeat.every must be a positive finite number")
        if pattern is not None:
            try:
                CronSim(pattern, datetime.now(UTC))
            except (CronSimError, TypeError, AttributeError) as error:
                raise BadRequest(f"Invalid repeat pattern: {error}") from None
        for name in self._dates:
            date = value.get(name)
            if date is not None and (type(date) not in (int, float) or not math.isfinite(date)):
                raise BadRequest(f"repeat.{name} must be a finite timestamp")
        end = value.get("endDate")
        if end is not None and end < datetime.now(UTC).timestamp() * 1000:
            raise BadRequest("repeat.endDate is in the past")
        if values.get("jobId") or values.get("customId"):
            raise BadRequest("repeat jobs cannot use JobOptions.jobId; use repeat.jobId instead")
        if values.get("dependsOn") or values.get("parentId") or values.get("childrenIds"):
            raise BadRequest("repeat jobs cannot participate in parent or dependency relationships")
        raise BadRequest("repeat jobs are not supported by this version")


def _limit(value: Any, field: str, low: int) -> int:
    """A number or the text of one, cut down to a whole one, at least `low` (core 10.1, 10.2)."""
    if type(value) is str:
        try:
            value = float(value)
        except ValueError:
            value = math.nan
    if type(value) not in (int, float) or not math.isfinite(value):
        raise BadRequest(f"{field} must be a finite number")
    value = math.floor(value)
    if value < low:
        raise BadRequest(f"{field} must be at least {low}")
    return int(value)


def _milliseconds(value: Any, _field: str) -> int | None:
    """A positive number of ms or the text of one; None for anything else."""
    if type(value) is str:
        try:
            value = float(value)
        except ValueError:
            return None
    if type(value) not in (int, float) or not math.isfinite(value) or value <= 0:
        return None
    return max(1, int(value))


#: The kinds by the names that request classes use.
Queue = Annotated[str, QueueName()]
JobId = Annotated[str, Id()]
WorkerId = Annotated[str, Text()]
Token = Annotated[str | None, Text(empty_is_none=True)]
Delay = Annotated[int, Number(0, YEAR, unit="ms")]
Payload = Annotated[Packed, Data()]
Count = Annotated[int, Number(0, whole=True)]
RateMax = Annotated[int, Loose("number >= 1, or its text", lambda value, field: _limit(value, field, 1))]
ConcurrencyMax = Annotated[int, Loose("number >= 0, or its text", lambda value, field: _limit(value, field, 0))]
LooseMilliseconds = Annotated[int | None, Loose("number > 0 ms, or its text; else the default", _milliseconds)]
