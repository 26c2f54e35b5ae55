"""The options of a job as users write them, and as they travel (core 2.4)."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, TypedDict

from gqueue.client.values import Duration, milliseconds, number

if TYPE_CHECKING:
    from gqueue.client.job import Job


class JobOptions(TypedDict, total=False):
    """What a push may say about a job. Durations: ms as a number, "5s", a timedelta. Defaults are the broker's."""

    priority: int  # higher first; in a group 0 first, then ascending
    delay: Duration  # before the first run
    attempts: int  # runs in all, 3
    backoff: Duration | Mapping[str, Any]  # base of the exponential retry delay, 1 s; or {"type": "fixed", "delay": …}
    ttl: Duration  # dropped when it has not started by then
    timeout: Duration  # of one run
    job_id: str  # a push with the id of a live job adds nothing
    unique_key: str  # one live job for each key in a queue
    deduplication: Mapping[str, Any]  # {"id": key, "ttl": …, "extend": bool, "replace": bool}
    depends_on: Sequence[str | Job[Any]]
    tags: Sequence[str]
    group_id: str
    group_max_size: int
    lifo: bool
    remove_on_complete: bool
    remove_on_fail: bool
    durable: bool
    repeat: Mapping[str, Any]  # {"every": …} or {"pattern": cron}, "limit", "tz", …
    parent_id: str
    children_ids: Sequence[str]
    fail_parent_on_failure: bool
    remove_dependency_on_failure: bool
    ignore_dependency_on_failure: bool
    continue_parent_on_failure: bool
    stall_timeout: Duration
    stack_trace_limit: int
    keep_logs: int
    size_limit: int
    debounce: Mapping[str, Any]  # {"id": key, "ttl": …}
    timestamp: int | datetime  # of creation


def wire_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """The wire fields of PUSH. Raises TypeError or ValueError that names the option, before anything is sent."""
    fields: dict[str, Any] = {}
    for name, value in options.items():
        translate = _OPTIONS.get(name)
        if translate is None:
            close = difflib.get_close_matches(name, _OPTIONS, 1)
            raise TypeError(f"there is no job option {name!r}" + (f"; did you mean {close[0]!r}?" if close else ""))
        if value is not None:
            try:
                fields.update(translate(value))
            except (TypeError, ValueError) as exc:
                raise type(exc)(f"{name}: {exc}") from None
    return {field: number(value) if type(value) is int else value for field, value in fields.items()}


_Translate = Callable[[Any], dict[str, Any]]


def camel(name: str) -> str:
    """max_attempts -> maxAttempts."""
    first, *rest = name.split("_")
    return first + "".join(word.capitalize() for word in rest)


def _as(field: str) -> _Translate:
    return lambda value: {field: value}


def _ms(field: str) -> _Translate:
    return lambda value: {field: milliseconds(value)}


def _backoff(value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        return {"backoff": milliseconds(value)}
    fields = {camel(key): item for key, item in value.items()}
    for key in ("delay", "maxDelay"):
        if fields.get(key) is not None:
            fields[key] = milliseconds(fields[key])
    return {"backoff": fields}


def _keyed(kind: str, value: Any, allowed: tuple[str, ...]) -> dict[str, Any]:
    if not isinstance(value, Mapping) or not value.get("id"):
        raise TypeError('a mapping with an "id" is expected')
    for key in value:
        if key not in allowed:
            raise TypeError(f"{kind} has no {key!r}; it knows {', '.join(allowed)}")
    return {**value, **({"ttl": milliseconds(value["ttl"])} if value.get("ttl") is not None else {})}


def _deduplication(value: Any) -> dict[str, Any]:
    fields = _keyed("deduplication", value, ("id", "ttl", "extend", "replace"))
    key = fields.pop("id")
    return {"uniqueKey": key, **({"dedup": fields} if fields else {})}


def _debounce(value: Any) -> dict[str, Any]:
    fields = _keyed("debounce", value, ("id", "ttl"))
    return {"debounceId": fields["id"], **({"debounceTtl": fields["ttl"]} if fields.get("ttl") is not None else {})}


def _repeat(value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise TypeError('a mapping with "every" or "pattern" is expected')
    fields = {camel(key): item for key, item in value.items() if item is not None}
    for key in ("every", "offset"):
        if key in fields:
            fields[key] = milliseconds(fields[key])
    for key in ("startDate", "endDate"):
        if key in fields:
            fields[key] = instant(fields[key])
    return {"repeat": fields}


def _depends_on(value: Any) -> dict[str, Any]:
    if isinstance(value, str):
        raise TypeError("a list of ids or jobs is expected")
    return {"dependsOn": [item if isinstance(item, str) else item.id for item in value]}


def instant(value: float | datetime) -> int:
    """Milliseconds since the epoch."""
    if isinstance(value, datetime):
        if value.tzinfo is None:
            raise ValueError("the datetime needs a time zone")
        return round(value.timestamp() * 1000)
    return round(value)


_DURATIONS = ("delay", "ttl", "timeout", "stall_timeout")
_SPECIAL: dict[str, _Translate] = {
    "attempts": _as("maxAttempts"),
    "backoff": _backoff,
    "deduplication": _deduplication,
    "debounce": _debounce,
    "repeat": _repeat,
    "depends_on": _depends_on,
    "timestamp": lambda value: {"timestamp": instant(value)},
}
_OPTIONS: dict[str, _Translate] = {
    name: _SPECIAL.get(name) or (_ms(camel(name)) if name in _DURATIONS else _as(camel(name)))
    for name in JobOptions.__annotations__
}
