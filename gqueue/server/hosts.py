"""Runs a storage strategy, which blocks, off the hub: on one native thread; a watcher brings the results back."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import gevent
from gevent.monkey import get_original

from gqueue.storage.base import Batch, Storage, StorageError

log = logging.getLogger("gqueue.storage")
T = TypeVar("T")
Done = Callable[[StorageError | None], None]

_start_thread = get_original("_thread", "start_new_thread")
_Queue: Any = __import__("_queue").SimpleQueue  # the native one, whatever gevent has patched
_allocate_lock = get_original("_thread", "allocate_lock")
_native_sleep = get_original("time", "sleep")


class ThreadHost:
    """One native thread that commits, one batch at a time, and one more for the upkeep of the store.

    `submit` is called on the hub, and so is every `done`.
    """

    def __init__(self, storage: Storage) -> None:
        self.storage = storage
        self._work: Any = _Queue()
        self._results: Any = _Queue()
        self._watcher: Any = None
        self._idle_ticks = 0
        self._stopped = False
        sys.setswitchinterval(0.0002)  # the commit gets the interpreter back soon (performance 4)
        _start_thread(self._run, ())

    def start(self, use: Callable[[Storage], T]) -> T:
        """Open the store and run `use` with it, on the thread that will own it; the caller waits. Re-raises."""

        def opened() -> T:
            self.storage.open()
            try:
                return use(self.storage)
            except BaseException:
                self.storage.close()
                raise

        result: T = self._call(opened)
        self._watcher = gevent.get_hub().loop.async_()
        self._watcher.start(self._deliver)
        if self.storage.durable:
            _start_thread(self._keep, ())
        return result

    def _call(self, function: Callable[[], Any]) -> Any:
        """Run something on the thread and wait for it natively: before the hub serves, and after."""
        lock = _allocate_lock()
        lock.acquire()
        box: list[Any] = [None, None]

        def work() -> None:
            try:
                box[0] = function()
            except BaseException as error:  # noqa: BLE001 - it is raised again where it belongs
                box[1] = error
            lock.release()

        self._work.put((work, None))
        lock.acquire()
        if box[1] is not None:
            raise box[1]
        return box[0]

    def submit(self, batch: Batch, done: Done) -> None:
        """Commit a batch; `done` gets None, or the error after which it has to be sent again."""
        self._work.put((batch, done))

    def read(self, ask: Callable[[Storage], T]) -> T:
        """What `ask` finds in the store, on a thread beside the commits; only the calling greenlet waits. Re-raises."""
        found: T
        found, error = gevent.get_hub().threadpool.apply(_attempt, (ask, self.storage))
        if error is not None:
            raise error
        return found

    def close(self) -> None:
        """Give the store up, after the running commit. Raises StorageError when the last flush failed."""
        self._stopped = True
        self._call(self.storage.close)
        self._work.put((None, None))
        if self._watcher is not None:
            self._watcher.stop()
            self._watcher.close()

    def _run(self) -> None:
        while True:
            work, done = self._work.get()
            if work is None:
                return
            if done is None:
                work()
                continue
            error: StorageError | None = None
            try:
                self.storage.commit(work)
            except StorageError as failed:
                error = failed
            except BaseException as failed:  # a bug of ours: never pretend that it was stored
                log.exception("commit of batch %d failed", work.number)
                error = StorageError("corrupt", f"internal error: {failed}")
            self._idle_ticks = 0
            self._results.put((done, error))
            self._watcher.send()

    def _deliver(self) -> None:
        while not self._results.empty():
            done, error = self._results.get()
            done(error)

    def _keep(self) -> None:
        while not self._stopped:
            _native_sleep(1)
            self._idle_ticks += 1
            try:
                if not self._stopped:
                    self.storage.maintain(idle=self._idle_ticks > 60)
            except StorageError as error:
                log.warning("upkeep of the store failed: %s", error)


def _attempt(ask: Callable[[Storage], Any], storage: Storage) -> tuple[Any, Exception | None]:
    """An error comes back as a value: the thread pool would print it."""
    try:
        return ask(storage), None
    except Exception as error:  # noqa: BLE001 - it is raised again where it belongs
        return None, error
