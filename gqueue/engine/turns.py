"""Work on many jobs, in turns: whoever does it gives way every few hundred jobs (R51).

Such a function is a generator: it yields when others may go, and looks again at what it holds when it goes on, since
jobs may have moved meanwhile. With few jobs it never yields, and is one step like any other command.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from heapq import merge
from itertools import islice
from typing import Any, TypeVar

T = TypeVar("T")
Turns = Generator[None, None, T]

SLICE = 500  # jobs between two turns that change something
_LOOKED_AT = 5000  # jobs between two turns that only look


def first_of(items: Iterable[T], count: int, key: Callable[[T], Any], *, last: bool = False) -> Turns[list[T]]:
    """The `count` smallest items by `key` in order, or the largest, the largest first."""
    every = list(items)
    runs = []
    for at in range(0, len(every), _LOOKED_AT):
        if at:
            yield
        runs.append(sorted(every[at : at + _LOOKED_AT], key=key, reverse=last)[:count])
    if len(runs) < 2:
        return runs[0] if runs else []
    first: list[T] = []
    for item in islice(merge(*runs, key=key, reverse=last), count):
        first.append(item)
        if len(first) % _LOOKED_AT == 0:
            yield
    return first
