"""The broker's clock: wall time that never jumps by itself (R100)."""

from __future__ import annotations

import time


class Clock:
    """ms since the epoch: the wall clock when it was made, carried on by the monotonic one."""

    def __init__(self) -> None:
        self._offset = time.time() - time.monotonic()

    def now(self) -> int:
        return int((self._offset + time.monotonic()) * 1000)
