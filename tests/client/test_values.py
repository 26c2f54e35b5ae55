"""Durations and the Python values that travel."""

from __future__ import annotations

import dataclasses
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from enum import Enum, IntEnum
from typing import Any
from uuid import UUID

import pytest

from gqueue import SerializationError
from gqueue.client.options import wire_options
from gqueue.client.values import milliseconds, pack, reviver, seconds
from gqueue.wire.codec import unpack


class Colour(Enum):
    RED = "red"


class Size(IntEnum):
    BIG = 3


@dataclasses.dataclass
class Point:
    x: int
    when: datetime


@pytest.mark.parametrize(
    ("given", "ms"),
    [(5, 5), (5.4, 5), ("5", 5), ("500ms", 500), ("5s", 5000), ("1.5s", 1500), ("10m", 600_000), ("2h", 7_200_000),
     ("1d", 86_400_000), ("1h 30m", 5_400_000), (timedelta(seconds=2), 2000), (0, 0)],
)  # fmt: skip
def test_a_duration_of_an_option_counts_in_milliseconds(given: Any, ms: int) -> None:
    assert milliseconds(given) == ms


def test_a_bare_number_of_a_timeout_counts_in_seconds() -> None:
    assert seconds(1.5) == 1.5
    assert seconds("1500ms") == 1.5
    assert seconds(timedelta(minutes=1)) == 60


@pytest.mark.parametrize(
    "given", ["", "5x", "s", -1, "-5s", float("nan"), float("inf"), timedelta(seconds=-1), "5 s 3"]
)
def test_what_is_no_duration_is_refused(given: Any) -> None:
    with pytest.raises(ValueError, match="is not a duration"):
        milliseconds(given)


@pytest.mark.parametrize("given", [None, True, [1]])
def test_a_duration_of_the_wrong_type_is_refused(given: Any) -> None:
    with pytest.raises(TypeError, match="a duration is a number"):
        milliseconds(given)


def test_integers_stay_integers_whatever_their_size() -> None:
    for number in (0, -1, 2**31, -(2**31) - 1, 2**53 + 1, 2**63, -(2**63)):
        assert unpack(pack(number)) == number
        assert type(unpack(pack(number))) is int


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC), "2026-01-02T03:04:05Z"),
        (datetime(2026, 1, 2, 3, tzinfo=timezone(timedelta(hours=1))), "2026-01-02T02:00:00Z"),
        (date(2026, 1, 2), "2026-01-02"),
        (UUID(int=1), "00000000-0000-0000-0000-000000000001"),
        (Decimal("1.10"), "1.10"),
        (Colour.RED, "red"),
        (Size.BIG, 3),
        ((1, 2), [1, 2]),
        (frozenset({1}), [1]),
        (Point(1, datetime(2026, 1, 2, tzinfo=UTC)), {"x": 1, "when": "2026-01-02T00:00:00Z"}),
        (b"\x00\xff", b"\x00\xff"),
    ],
)
def test_extended_values_travel_as_plain_ones(value: Any, plain: Any) -> None:
    assert unpack(pack({"deep": [value]})) == {"deep": [plain]}


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (object(), "builtins.object cannot be sent"),
        (len, "send data, not code"),
        (Point, "send data, not code"),
        (2**64, "cannot be sent"),
        (datetime(2026, 1, 1), "time zone"),
        ("\ud800", "cannot be sent"),
    ],
)
def test_what_cannot_travel_is_refused_with_a_reason(value: Any, words: str) -> None:
    with pytest.raises(SerializationError, match=words):
        pack([value])


def test_a_value_that_contains_itself_is_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(SerializationError):
        pack(loop)


@pytest.mark.parametrize(
    ("annotation", "value"),
    [
        (datetime, datetime(2026, 1, 2, 3, 4, 5, 6, tzinfo=UTC)),
        (date, date(2026, 1, 2)),
        (UUID, UUID(int=7)),
        (Decimal, Decimal("1.10")),
        (Colour, Colour.RED),
        (Point, Point(1, datetime(2026, 1, 2, tzinfo=UTC))),
        (list[UUID], [UUID(int=1), UUID(int=2)]),
        (dict[str, Decimal], {"a": Decimal(1)}),
        (tuple[int, UUID], (1, UUID(int=1))),
        (set[Colour], {Colour.RED}),
        (UUID | None, None),
        (datetime | None, datetime(2026, 1, 1, tzinfo=UTC)),
    ],
)
def test_annotations_bring_values_back(annotation: Any, value: Any) -> None:
    revive = reviver(annotation)
    assert revive is not None
    assert revive(unpack(pack(value))) == value


@pytest.mark.parametrize("annotation", [int, str, Any, dict[str, int], list[int], int | str, None, "unresolved"])
def test_plain_annotations_change_nothing(annotation: Any) -> None:
    assert reviver(annotation) is None


def test_a_value_that_does_not_fit_its_annotation_is_passed_on_as_it_came() -> None:
    revive = reviver(UUID)
    assert revive is not None
    assert revive("no uuid") == "no uuid"
    assert revive(None) is None


def test_job_options_become_wire_fields() -> None:
    fields = wire_options(
        {
            "attempts": 5,
            "delay": "2s",
            "backoff": {"type": "fixed", "delay": "1s", "max_delay": timedelta(minutes=1)},
            "deduplication": {"id": "k", "ttl": "1m", "replace": True},
            "debounce": {"id": "d", "ttl": 5},
            "repeat": {"every": "1h", "start_date": datetime(1970, 1, 1, 0, 1, tzinfo=UTC)},
            "remove_on_complete": True,
            "timestamp": datetime(1970, 1, 2, tzinfo=UTC),
            "tags": None,
        }
    )
    assert fields == {
        "maxAttempts": 5,
        "delay": 2000,
        "backoff": {"type": "fixed", "delay": 1000, "maxDelay": 60_000},
        "uniqueKey": "k",
        "dedup": {"ttl": 60_000, "replace": True},
        "debounceId": "d",
        "debounceTtl": 5,
        "repeat": {"every": 3_600_000, "startDate": 60_000},
        "removeOnComplete": True,
        "timestamp": 86_400_000,
    }


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"priorty": 1}, "no job option 'priorty'; did you mean 'priority'"),
        ({"delay": "soon"}, "delay: 'soon' is not a duration"),
        ({"deduplication": {"ttl": 1}}, "deduplication: a mapping with an"),
        ({"deduplication": {"id": "k", "til": 1}}, "deduplication has no 'til'"),
        ({"depends_on": "abc"}, "depends_on: a list of ids"),
    ],
)
def test_a_wrong_option_is_named_before_anything_is_sent(options: dict[str, Any], words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        wire_options(options)
