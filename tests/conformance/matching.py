"""Whether an answer is what a scenario expects: placeholders, patterns, and the equalities of the protocol."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_NAMED = re.compile(r"<(?:id|token):\d+>")
_RANGE = re.compile(r"<num:(-?[\d.]+)\.\.(-?[\d.]+)>")


class Differs(AssertionError):
    """The first difference: where, what was expected, what came."""


class Matcher:
    """Compares answers of one scenario. `<id:N>` and `<token:N>` stand for one value each, all different."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}

    def match(
        self, expected: Any, actual: Any, *, unordered: tuple[str, ...] = (), ignore: tuple[str, ...] = ()
    ) -> None:
        """Raises Differs. More keys than expected are fine; None, absent and `undefined` are the same."""
        self._match(expected, actual, (), unordered, ignore)

    def fits(self, expected: Any, actual: Any) -> bool:
        """The same as a question; binds nothing when it does not fit."""
        return self._try(expected, actual, (), (), ())

    def _try(
        self, expected: Any, actual: Any, at: tuple[str, ...], unordered: tuple[str, ...], ignore: tuple[str, ...]
    ) -> bool:
        before = dict(self.values)
        try:
            self._match(expected, actual, at, unordered, ignore)
        except Differs:
            self.values = before
            return False
        return True

    def _match(
        self, expected: Any, actual: Any, at: tuple[str, ...], unordered: tuple[str, ...], ignore: tuple[str, ...]
    ) -> None:
        if any(_is_at(pattern, at) for pattern in ignore):
            return
        if isinstance(expected, Mapping) and len(expected) == 1 and next(iter(expected)).startswith("$"):
            (form, argument), *_ = expected.items()
            if not getattr(self, "_" + form[1:])(argument, actual, at, unordered, ignore):
                raise Differs(f"at {_path(at)}: expected {expected}, got {actual!r}")
        elif isinstance(expected, Mapping):
            if not isinstance(actual, Mapping):
                raise Differs(f"at {_path(at)}: expected {expected}, got {actual!r}")
            for key, value in expected.items():
                name = self._key(key, value, actual, at, unordered, ignore)
                self._match(value, actual.get(name), (*at, name), unordered, ignore)
        elif isinstance(expected, list):
            if not isinstance(actual, list) or len(actual) != len(expected):
                raise Differs(f"at {_path(at)}: expected {expected}, got {actual!r}")
            if any(_is_at(pattern, at) for pattern in unordered):
                left = list(actual)
                for item in expected:
                    found = next(
                        (n for n, other in enumerate(left) if self._try(item, other, at, unordered, ignore)), None
                    )
                    if found is None:
                        raise Differs(f"at {_path(at)}: no {item} in {left!r}")
                    del left[found]
            else:
                for n, (item, other) in enumerate(zip(expected, actual, strict=True)):
                    self._match(item, other, (*at, str(n)), unordered, ignore)
        elif not self._scalar(expected, actual):
            raise Differs(f"at {_path(at)}: expected {expected!r}, got {actual!r}")

    def _key(self, key: str, value: Any, actual: Mapping[str, Any], *rest: Any) -> str:
        if key not in actual and _NAMED.search(key):
            for name in actual:
                before = dict(self.values)
                if self._text(key, name) and self._try(value, actual[name], *rest):
                    return name
                self.values = before
        return key

    def _scalar(self, expected: Any, actual: Any) -> bool:
        if expected is None or expected == "<absent>":
            return actual is None
        if isinstance(expected, bool) or isinstance(actual, bool):
            return expected == "<any>" or expected is actual
        if isinstance(expected, int | float):
            return isinstance(actual, int | float) and abs(actual - expected) <= 1e-9 * max(1.0, abs(expected))
        number = isinstance(actual, int | float)
        if expected == "<any>":
            return actual is not None
        if expected == "<str>":
            return isinstance(actual, str) and actual != ""
        if expected == "<num>":
            return number
        if expected == "<ts>":
            return number and 1.5e12 < actual < 4.2e12
        if bounds := _RANGE.fullmatch(expected):
            return number and float(bounds[1]) <= actual <= float(bounds[2])
        if not isinstance(actual, str):
            return False
        if expected.startswith("<re:"):
            return re.fullmatch(expected[4:-1], actual, re.DOTALL) is not None
        return self._text(expected, actual)

    def _text(self, expected: str, actual: str) -> bool:
        """A text with placeholders in it; binds those that are new."""
        pattern, end, fresh = "", 0, []
        for found in _NAMED.finditer(expected):
            pattern += re.escape(expected[end : found.start()])
            end = found.end()
            name = found[0]
            if name in self.values:
                pattern += re.escape(self.values[name])
            elif name in fresh:
                pattern += f"(?P=n{fresh.index(name)})"
            else:
                pattern += f"(?P<n{len(fresh)}>{'.+' if name == expected else r'[^ ,]+?'})"
                fresh.append(name)
        matched = re.fullmatch(pattern + re.escape(expected[end:]), actual, re.DOTALL)
        if matched is None:
            return False
        new = {name: matched[f"n{n}"] for n, name in enumerate(fresh)}
        taken = set(self.values.values())
        if any(value in taken for value in new.values()) or len(set(new.values())) < len(new):
            return False
        self.values |= new
        return True

    # ---------------------------------------------------------------- forms

    def _contains(self, items: list[Any], actual: Any, *rest: Any) -> bool:
        return isinstance(actual, list) and all(
            any(self._try(item, other, *rest) for other in actual) for item in items
        )

    def _len(self, size: int, actual: Any, *_: Any) -> bool:
        return hasattr(actual, "__len__") and len(actual) == size

    def _in(self, items: list[Any], actual: Any, *rest: Any) -> bool:
        return any(self._try(item, actual, *rest) for item in items)

    def _only_keys(self, keys: list[str], actual: Any, *_: Any) -> bool:
        return isinstance(actual, Mapping) and {key for key, value in actual.items() if value is not None} == set(keys)

    def _lacks(self, items: list[Any], actual: Any, *_: Any) -> bool:
        if isinstance(actual, Mapping):
            return all(actual.get(item) is None for item in items)
        return not isinstance(actual, list) or all(item not in actual for item in items)

    def _bytes(self, text: str, actual: Any, *_: Any) -> bool:
        return actual == bytes.fromhex(text)


def _is_at(pattern: str, at: tuple[str, ...]) -> bool:
    """`a.*.b` is one place; `**.b` any that ends so."""
    parts = pattern.replace("[", ".").replace("]", "").split(".")
    place = list(at)
    if parts[0] == "**":
        parts = parts[1:]
        place = place[-len(parts) :]
    return len(parts) == len(place) and all(part in ("*", name) for part, name in zip(parts, place, strict=True))


def _path(at: tuple[str, ...]) -> str:
    return ".".join(at) or "the answer"
