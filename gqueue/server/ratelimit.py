"""How many requests one connection may send: a guard against runaway clients (core 1.11, R74)."""

from __future__ import annotations

from collections import deque


class Window:
    """Admits a frame if fewer than `most` were admitted in the last `window` ms."""

    __slots__ = ("_count", "_recent", "most", "window")

    def __init__(self, most: int, window: int) -> None:
        self.most = most
        self.window = window
        self._recent: deque[list[int]] = deque()  # [ms, frames in it]
        self._count = 0

    def admit(self, now: int) -> bool:
        recent = self._recent
        while recent and recent[0][0] <= now - self.window:
            self._count -= recent.popleft()[1]
        if self._count >= self.most:
            return False
        self._count += 1
        if recent and recent[-1][0] == now:
            recent[-1][1] += 1
        else:
            recent.append([now, 1])
        return True
