"""Runs a storage strategy, which blocks, off the hub: on a native thread, or in a process of its own.

A host gives out one batch at a time; a watcher of the loop brings the outcome back. `submit` is called on the hub, and
so is every `done`. Reads beside the commits run on gevent's thread pool, and the upkeep on one more native thread.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import signal
import socket
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

import gevent
from gevent.monkey import get_original

from gqueue.storage import writer
from gqueue.storage.base import Batch, Storage, StorageError, attempt

log = logging.getLogger("gqueue.storage")
T = TypeVar("T")
Done = Callable[[StorageError | None], None]

_start_thread = get_original("_thread", "start_new_thread")
_Queue: Any = __import__("_queue").SimpleQueue  # the native one, whatever gevent has patched
_native_sleep = get_original("time", "sleep")
_native_waitpid = get_original("os", "waitpid")
_NativeSocket: Any = get_original("socket", "socket")

_GOODBYE = 30.0  # s for the writer's last flush


def host_of(storage: Storage, kind: str) -> Host:
    """What runs a store, by `kind`: "thread" or "process". A store that gains nothing by a process gets a thread."""
    return ProcessHost(storage) if kind == "process" and storage.forkable else ThreadHost(storage)


class Host(ABC):
    """Opens a store, commits to it off the hub, reads and maintains it, and gives it up."""

    def __init__(self, storage: Storage) -> None:
        self.storage = storage
        self._idle_ticks = 0
        self._stopped = False

    def start(self, use: Callable[[Storage], T]) -> T:
        """Open the store and run `use` with it, before the hub serves anybody. Re-raises."""
        self.storage.open()
        try:
            result = use(self.storage)
            self._begin()
        except BaseException:
            self.storage.close()
            raise
        if self.storage.durable:
            _start_thread(self._keep, ())
        return result

    @abstractmethod
    def _begin(self) -> None:
        """Get ready for batches."""

    @abstractmethod
    def submit(self, batch: Batch, done: Done) -> None:
        """Commit a batch; `done` gets None, or the error after which it has to be sent again."""

    @abstractmethod
    def _end(self) -> None:
        """No more batches; return when the last one is over. Raises StorageError when it failed."""

    def read(self, ask: Callable[[Storage], T]) -> T:
        """What `ask` finds in the store, on a thread beside the commits; only the calling greenlet waits. Re-raises."""
        found: T
        found, error = gevent.get_hub().threadpool.apply(_asked, (ask, self.storage))
        if error is not None:
            raise error
        return found

    def close(self) -> None:
        """Give the store up, after the running commit. Raises StorageError when the last flush failed."""
        self._stopped = True
        try:
            self._end()
        finally:
            self.storage.close()

    def _keep(self) -> None:
        while not self._stopped:
            _native_sleep(1)
            self._idle_ticks += 1
            try:
                if not self._stopped:
                    self.storage.maintain(idle=self._idle_ticks > 60)
            except StorageError as error:
                log.warning("upkeep of the store failed: %s", error)


class ThreadHost(Host):
    """One native thread that commits."""

    def __init__(self, storage: Storage) -> None:
        super().__init__(storage)
        self._work: Any = _Queue()
        self._results: Any = _Queue()
        self._over: Any = _Queue()
        self._watcher: Any = None

    def _begin(self) -> None:
        sys.setswitchinterval(0.0002)  # the commit gets the interpreter back soon (performance 4)
        self._watcher = gevent.get_hub().loop.async_()
        self._watcher.start(self._deliver)
        _start_thread(self._run, ())

    def submit(self, batch: Batch, done: Done) -> None:
        self._idle_ticks = 0
        self._work.put((batch, done))

    def _end(self) -> None:
        if self._watcher is not None:
            self._work.put(None)
            self._over.get()
            self._watcher.stop()
            self._watcher.close()

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            batch, done = work
            self._results.put((done, attempt(partial(self.storage.commit, batch))))
            self._watcher.send()
        self._over.put(None)

    def _deliver(self) -> None:
        while not self._results.empty():
            done, error = self._results.get()
            done(error)


class ProcessHost(Host):
    """A child that commits, where its statements do not compete for the interpreter (performance 4).

    A child that has died is replaced, and its batch sent again: it is the batch number that tells whether it had got
    through. One that dies over the same batch again is an error of the store like any other.
    """

    def __init__(self, storage: Storage) -> None:
        super().__init__(storage)
        self._lock = -1
        self._options: dict[str, Any] = {}
        self._socket: Any = None
        self._pid = 0
        self._ready = False  # the child has opened the store
        self._answers = bytearray()
        self._unsent = memoryview(b"")
        self._batch = b""  # the message under way
        self._done: Done | None = None
        self._second_try = False
        self._reader: Any = None
        self._writer: Any = None

    def _begin(self) -> None:
        self._lock, self._options = self.storage.release()
        self._spawn()
        error = writer.outcome(self._wait_for_answer())
        if error is not None:
            raise error
        self._ready = True
        self._watch()

    def _spawn(self) -> None:
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-P", "-m", "gqueue.storage.writer", "3", "4", json.dumps(self._options)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}  # it finds what this process has found
        with theirs:
            # from above 4: a number must not be overwritten before its turn
            given = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 5) for fd in (theirs.fileno(), self._lock)]
            try:
                actions = [(os.POSIX_SPAWN_DUP2, fd, number) for number, fd in enumerate(given, 3)]
                self._pid = os.posix_spawn(sys.executable, command, environment, file_actions=actions)
            finally:
                for fd in given:
                    os.close(fd)
        self._socket = _NativeSocket(fileno=ours.detach())
        self._answers.clear()
        self._ready = False

    def _watch(self) -> None:
        self._socket.setblocking(False)
        loop = gevent.get_hub().loop
        self._reader = loop.io(self._socket.fileno(), 1)
        self._reader.start(self._readable)
        self._writer = loop.io(self._socket.fileno(), 2)

    def _unwatch(self) -> None:
        for watcher in (self._reader, self._writer):
            if watcher is not None:
                watcher.stop()
                watcher.close()
        self._reader = self._writer = None

    def _forget(self) -> None:
        """The child is gone, or has to go."""
        self._unwatch()
        if self._socket is not None:
            self._socket.close()
            self._socket = None
            with suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
            with suppress(ChildProcessError):  # the loop may have seen its end first
                _native_waitpid(self._pid, 0)

    def submit(self, batch: Batch, done: Done) -> None:
        self._idle_ticks = 0
        self._batch = writer.message(batch.pack())
        self._done = done
        self._second_try = False
        if self._socket is None:
            self._replace()
        self._send()

    def _replace(self) -> None:
        self._spawn()
        self._watch()

    def _send(self) -> None:
        self._unsent = memoryview(self._batch)
        if self._ready:
            self._writable()

    def _writable(self) -> None:
        try:
            sent = self._socket.send(self._unsent)
        except BlockingIOError:
            sent = 0
        except OSError:
            return  # it has died: the reading side is told, too
        self._unsent = self._unsent[sent:]
        if self._unsent:
            self._writer.start(self._writable)
        else:
            self._writer.stop()

    def _readable(self) -> None:
        try:
            chunk = self._socket.recv(65_536)
        except BlockingIOError:
            return
        except OSError:
            chunk = b""
        if not chunk:
            self._died()
            return
        self._answers += chunk
        payload = self._answer()
        if payload is None:
            return
        error = writer.outcome(payload)
        if not self._ready and error is None:
            self._ready = True
            if self._unsent:
                self._writable()
            return
        if not self._ready:
            self._forget()
        done, self._done = self._done, None
        if done is not None:
            done(error)

    def _answer(self) -> bytes | None:
        size = writer.HEADER.size
        if len(self._answers) < size:
            return None
        end = size + writer.HEADER.unpack_from(self._answers)[0]
        if len(self._answers) < end:
            return None
        payload = bytes(self._answers[size:end])
        del self._answers[:end]
        return payload

    def _died(self) -> None:
        log.error("the writer process %d ended; a new one is started", self._pid)
        self._forget()
        if self._done is None:
            return
        if not self._second_try:
            self._second_try = True
            self._replace()
            self._send()
            return
        done, self._done = self._done, None
        done(StorageError("io_error", "the writer process ended during a commit"))

    def _wait_for_answer(self) -> bytes:
        """Natively, while the hub serves nobody."""
        self._socket.settimeout(_GOODBYE)
        while (payload := self._answer()) is None:
            try:
                chunk = self._socket.recv(65_536)
            except OSError:
                chunk = b""
            if not chunk:
                raise StorageError("io_error", "the writer process ended")
            self._answers += chunk
        return payload

    def _end(self) -> None:
        self._unwatch()
        if self._socket is None:
            return
        try:
            self._socket.settimeout(_GOODBYE)
            if self._done is not None:  # nobody waits for this batch any longer, but it has to be over
                self._wait_for_answer()
            self._socket.sendall(writer.message(b""))
            error = writer.outcome(self._wait_for_answer())
        finally:
            self._forget()
        if error is not None:
            raise error


def _asked(ask: Callable[[Storage], Any], storage: Storage) -> tuple[Any, Exception | None]:
    """An error comes back as a value: the thread pool would print it."""
    try:
        return ask(storage), None
    except Exception as error:  # noqa: BLE001 - it is raised again where it belongs
        return None, error
