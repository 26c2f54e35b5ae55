"""What is due when: one clock-free table of deadlines. Says when it wants to be woken; the server owns the real timer.

Nearly all deadlines are "so many ms from now" with few different durations, so each duration has a lane, a deque that
is in order by itself: adding one costs O(1), and those that are settled early leave from the head. Everything
else goes to one heap. A deadline that is no longer wanted is not looked for: it is dropped when it reaches the front.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from heapq import heapify, heappop, heappush
from typing import Any

_LANES = 256  # distinct durations with a lane of their own
NEVER = 1 << 62


class Kind:
    """One reason to be woken: `wanted(item, at)` says whether it still stands, `fire(item, now)` acts on it."""

    __slots__ = ("fire", "lanes", "wanted")

    def __init__(self, wanted: Callable[[Any, int], bool], fire: Callable[[Any, int], None]) -> None:
        self.wanted = wanted
        self.fire = fire
        self.lanes: dict[int, deque[tuple[int, Any]]] = {}


class Timers:
    """All deadlines of the broker, in ms since the epoch by the broker's clock."""

    def __init__(self) -> None:
        self.next = NEVER  # nothing is due before this
        self._heap: list[tuple[int, int, Kind, Any]] = []
        self._count = 0
        self._lanes: dict[tuple[Kind, int], deque[tuple[int, Any]]] = {}

    def after(self, kind: Kind, now: int, duration: int, item: Any) -> None:
        """Wake `kind` for `item`, `duration` ms after `now`."""
        at = now + duration
        lane = kind.lanes.get(duration)
        if lane is None:
            if len(self._lanes) >= _LANES:
                self._drop_empty_lanes()
            if len(self._lanes) >= _LANES:
                self.at(kind, at, item)
                return
            lane = kind.lanes[duration] = self._lanes[kind, duration] = deque()
        wanted = kind.wanted
        while lane and not wanted(lane[0][1], lane[0][0]):
            lane.popleft()
        if lane and lane[-1][0] > at:
            self.at(kind, at, item)  # the clock was set back
            return
        lane.append((at, item))
        self.next = min(self.next, at)

    def at(self, kind: Kind, at: int, item: Any) -> None:
        """Wake `kind` for `item` at an instant."""
        self._count += 1
        heappush(self._heap, (at, self._count, kind, item))
        self.next = min(self.next, at)
        if self._count & 0xFFFF == 0:
            self._heap = [entry for entry in self._heap if entry[2].wanted(entry[3], entry[0])]
            heapify(self._heap)

    def run(self, now: int, limit: int = 500) -> None:
        """Fire what is due, oldest first, at most `limit` of it; then `next` says when to come back."""
        fired = 0
        while fired < limit:
            at, kind, item = self._pop_due(now)
            if kind is None:
                break
            if kind.wanted(item, at):
                fired += 1
                kind.fire(item, now)
        self.next = self._front()

    def _pop_due(self, now: int) -> tuple[int, Kind | None, Any]:
        heap = self._heap
        best = heap[0][0] if heap else NEVER
        source: tuple[Kind, int] | None = None
        for name, lane in self._lanes.items():
            if lane and lane[0][0] < best:
                best = lane[0][0]
                source = name
        if best > now:
            return best, None, None
        if source is not None:
            at, item = self._lanes[source].popleft()
            return at, source[0], item
        at, _, kind, item = heappop(heap)
        return at, kind, item

    def _front(self) -> int:
        front = self._heap[0][0] if self._heap else NEVER
        for lane in self._lanes.values():
            if lane and lane[0][0] < front:
                front = lane[0][0]
        return front

    def _drop_empty_lanes(self) -> None:
        for (kind, duration), lane in list(self._lanes.items()):
            while lane and not kind.wanted(lane[0][1], lane[0][0]):
                lane.popleft()
            if not lane:
                del self._lanes[kind, duration]
                del kind.lanes[duration]
