"""Runs the jobs of queues: in threads, in greenlets, or one by one in the calling thread."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import logging
import queue as queues_of_python
import signal
import socket
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

from gqueue.client.client import Client
from gqueue.client.delivery import Delivery, Outcome
from gqueue.client.job import Job
from gqueue.client.leases import Leases, patched, registration
from gqueue.client.queue import Queue
from gqueue.client.task import Arguments, Task
from gqueue.client.values import Duration, milliseconds, number, pack, seconds
from gqueue.errors import GQueueError, Retry, SerializationError, UnrecoverableError
from gqueue.wire.frames import MAX_FRAME

if TYPE_CHECKING:
    from ssl import SSLContext

log = logging.getLogger("gqueue.worker")

Processor = Callable[[Job[Any]], Any]
#: `def m(job, call_next): return call_next(job)`, around every run; the first one is outermost.
Middleware = Callable[[Job[Any], Processor], Any]

EVENTS = ("ready", "active", "completed", "failed", "progress", "drained", "error", "closed")

_LARGEST_RESULT = MAX_FRAME - 4096  # bytes; the rest of an ACK is smaller than that
_STACK = 100  # entries that the broker reads of a stack
_LONGEST_TEXT = 10_000  # characters of an error, or of one entry of its stack
_MOST_QUEUES = 40  # each has a parked pull, and a connection has 50 places


class Worker:
    """Takes jobs from one or several queues and runs them.

    With `processor` every job goes to `processor(job)`; without one each goes to the task of its name, of the Queue
    objects given, or to a function that `imports` allows. What it returns is the job's result. What it raises fails the
    attempt; `Retry(delay=)` puts the job off without losing one, `UnrecoverableError` fails it for good.

    Leases last `lock_ttl` and are renewed every `heartbeat`, from a thread that handlers cannot stop. `batch_size`
    bounds one pull, and the jobs held in reserve while runs are short. Durations: ms as numbers, "30s", timedeltas.
    """

    def __init__(
        self,
        queue: Queue | str | Sequence[Queue | str],
        processor: Processor | None = None,
        *,
        client: Client | str | None = None,
        concurrency: int = 4,
        pool: Literal["thread", "gevent", "process", "solo"] = "thread",
        batch_size: int = 10,
        lock_ttl: Duration = "30s",
        heartbeat: Duration = "10s",
        group: Mapping[str, Any] | None = None,
        imports: Sequence[str] = (),
        middleware: Sequence[Middleware] = (),
        name: str | None = None,
        autorun: bool = True,
        host: str | None = None,
        port: int | None = None,
        token: str | None = None,
        tls: bool | SSLContext | None = None,
    ) -> None:
        given = [queue] if isinstance(queue, Queue | str) else list(queue)
        self._check(given, processor, concurrency, pool, batch_size, imports)
        self._owned = client is None and not any(isinstance(item, Queue) for item in given)
        if isinstance(client, Client):
            self.client = client
        elif client is None and not self._owned and host is None and port is None:
            self.client = next(item for item in given if isinstance(item, Queue)).client
        else:
            self._owned = True
            self.client = Client(client, host=host, port=port, token=token, tls=tls)
        self.id = str(uuid.uuid4())
        self.name = name or f"{socket.gethostname()}-{self.id[:8]}"
        self.queues = list(dict.fromkeys(item.name if isinstance(item, Queue) else item for item in given))
        self.concurrency = 1 if pool == "solo" else concurrency
        self.pool = pool
        self.processed = 0  # confirmed by the broker
        self.failed = 0
        self._tasks: dict[tuple[str, str], Callable[[Job[Any]], Any]] = {
            (item.name, task.name): task.run
            for item in given
            if isinstance(item, Queue)
            for task in item.tasks.values()
        }
        self._queue_objects = [item for item in given if isinstance(item, Queue)]
        self._processor = processor
        self._imports = tuple(imports)
        self._call = _chain(processor or self._run_task, middleware)
        self._listeners: dict[str, list[Callable[..., object]]] = {event: [] for event in EVENTS}
        self._threads: list[threading.Thread] = []
        self._ready: queues_of_python.SimpleQueue[Job[Any] | None] = queues_of_python.SimpleQueue()
        self._control: queues_of_python.SimpleQueue[str] = queues_of_python.SimpleQueue()
        self._closed = threading.Event()
        self._connected = threading.Event()
        self._closing = threading.Lock()
        self._started = False
        self._last_start = self._last_put = time.monotonic()
        ttl = milliseconds(lock_ttl)
        if ttl < 1:
            raise ValueError("lock_ttl must be at least 1 ms")
        self._leases = Leases(
            self.client.target,
            every=max(min(seconds(f"{milliseconds(heartbeat)}ms"), ttl / 3_000), 0.05),
            worker=registration(self.id, self.name, self.queues, self.concurrency),
            counts=self._counts,
            tell=self._tell,
            lost=lambda token: self._delivery.lost(token),
            trouble=lambda exc: log.warning("leases cannot be renewed: %s", exc),
        )
        self._delivery = Delivery(
            self.client.target,
            self.queues,
            owner=self.id,
            lock_ttl=ttl,
            group=dict(group) if group is not None else None,
            slots=self.concurrency,
            batch_size=batch_size,
            held=self._leases.held,
            make=self._job,
            take=self._put,
            unstarted=self._take_back,
            kept=self._kept,
            on_ready=self._on_ready,
            on_drained=lambda: self._emit("drained"),
            on_error=lambda exc: self._emit("error", exc),
            on_done=lambda: self._control.put("done"),
        )
        if autorun and pool != "solo":
            self.start()

    @staticmethod
    def _check(
        given: list[Queue | str], processor: Any, concurrency: int, pool: str, batch_size: int, imports: Sequence[str]
    ) -> None:
        if not 1 <= len(given) <= _MOST_QUEUES:
            raise ValueError(f"a worker has 1 to {_MOST_QUEUES} queues")
        if concurrency < 1:
            raise ValueError("concurrency must be at least 1")
        if not 1 <= batch_size <= 1000:
            raise ValueError("batch_size must be 1 to 1000")
        if pool == "process":
            raise NotImplementedError(
                "pool='process' is not in this version; use 'thread', and several workers for several cores"
            )
        if pool not in ("thread", "gevent", "solo"):
            raise ValueError(f"there is no pool {pool!r}; it is 'thread', 'gevent' or 'solo'")
        if pool == "gevent" and not patched():
            raise RuntimeError(
                "pool='gevent' needs a program that called gevent.monkey.patch_all() before its other imports"
            )
        if inspect.iscoroutinefunction(processor):
            raise TypeError("the processor is async; workers run synchronous functions")
        if processor is not None and not callable(processor):
            raise TypeError("the processor must be a function of one argument, the job")
        if processor is None and not imports and not any(isinstance(item, Queue) and item.tasks for item in given):
            raise ValueError("nothing to run: give a processor, a Queue with tasks, or imports=")

    def __repr__(self) -> str:
        return f"<Worker {self.name} of {', '.join(self.queues)}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ------------------------------------------------------------ life

    def start(self) -> Self:
        """Start working in the background. Does nothing when it has started already."""
        if self._started:
            return self
        self._started = True
        self._leases.start()
        self._delivery.start()
        if self.pool != "solo":
            self._start_threads(self.concurrency)
        return self

    def _start_threads(self, number: int) -> None:
        for place in range(number):
            thread = threading.Thread(target=self._work, name=f"gqueue-handler-{place}", daemon=True)
            thread.start()
            self._threads.append(thread)

    def run(self, *, burst: bool = False, max_jobs: int | None = None) -> None:
        """Work until stopped, and close.

        In the main thread SIGTERM and SIGINT let the running jobs finish; a second one does not wait for them. `burst`
        ends when the queues are empty and nothing runs, `max_jobs` after so many jobs.
        """
        self._delivery.burst = burst
        self._delivery.remaining = max_jobs
        with self._signals():
            self.start()
            if self.pool == "solo":
                self._work_solo()
            else:
                self._control.get()
            self.close(None)

    def _work_solo(self) -> None:
        stopper = threading.Thread(target=self._stop_solo, name="gqueue-control", daemon=True)
        stopper.start()
        self._work()

    def _stop_solo(self) -> None:
        self._control.get()
        self._delivery.stop()
        self._ready.put(None)

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """SIGTERM and SIGINT ask for an end, where a program may say what they do."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        asked: list[int] = []

        def ask(number: int, _frame: FrameType | None) -> None:
            if asked:
                raise KeyboardInterrupt
            asked.append(number)
            self._control.put("signal")

        before = {number: signal.signal(number, ask) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        except KeyboardInterrupt:
            self.close(0)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def close(self, timeout: Duration | None = "30s") -> bool:
        """Take no more jobs, wait for the running ones and for the answers to their outcomes, and disconnect.

        A number is in seconds, None waits for ever. After the time the rest is given back to the broker, although its
        handlers cannot be ended: their `job.cancelled` is set. Returns whether everything was finished.
        """
        with self._closing:
            if self._closed.is_set():
                return True
            self._control.put("close")
            finished = True
            if self._started:
                self._delivery.stop()
                finished = self._delivery.wait_settled(None if timeout is None else seconds(timeout))
                if not finished:
                    for job in self._delivery.abandon():
                        log.warning("job %s (%s) is still running; it is given back", job.id, job.name)
                    self._delivery.wait_settled(1)
                self._leases.stop()
                self._delivery.close()
                for _ in range(self.concurrency):
                    self._ready.put(None)
                if finished:
                    for thread in self._threads:
                        if thread is not threading.current_thread():
                            thread.join(5)
            if self._owned:
                self.client.close()
            self._closed.set()
        self._emit("closed")
        return finished

    stop = close

    def pause(self) -> None:
        """Take no more jobs until `resume`; a pull that is waiting may still bring some."""
        self._delivery.paused = True

    def resume(self) -> None:
        self._delivery.paused = False
        self._delivery.pump()

    def is_paused(self) -> bool:
        return self._delivery.paused

    def is_running(self) -> bool:
        return self._started and not self._closed.is_set()

    def is_closed(self) -> bool:
        return self._closed.is_set()

    def wait_until_ready(self, timeout: float = 10.0) -> None:
        """Wait until it is connected. Raises GQueueError after `timeout` seconds."""
        if not self._connected.wait(timeout):
            raise GQueueError(f"the worker did not reach the broker at {self.client.target} within {timeout:g} s")

    # ------------------------------------------------------------ events

    def on(self, event: str, fn: Callable[..., object]) -> Self:
        """Call `fn` on: ready(), active(job), completed(job, result), failed(job, error), progress(job, progress),
        drained(), error(error), closed(). `completed` and `failed` come when the broker has confirmed them."""
        if event not in self._listeners:
            raise ValueError(f"there is no event {event!r}; a worker has {', '.join(EVENTS)}")
        self._listeners[event].append(fn)
        if event == "ready" and self._connected.is_set():
            fn()
        return self

    def off(self, event: str, fn: Callable[..., object]) -> Self:
        """Undo `on`."""
        with contextlib.suppress(ValueError, KeyError):
            self._listeners[event].remove(fn)
        return self

    def _emit(self, event: str, *args: Any) -> None:
        for fn in tuple(self._listeners[event]):
            try:
                fn(*args)
            except Exception:
                log.exception("a listener of %r failed", event)

    def _on_ready(self) -> None:
        self._connected.set()
        self._emit("ready")

    def _tell(self, action: Callable[[], None]) -> None:
        """Run something for the native thread. Where threads are greenlets only one of them may."""
        if patched():
            self._delivery.note(action)
        else:
            action()

    def _counts(self) -> dict[str, int]:
        return {"activeJobs": self._delivery.running, "processed": self.processed, "failed": self.failed}

    # ------------------------------------------------------------ jobs

    def _job(self, raw: dict[str, Any], token: str) -> Job[Any]:
        return Job(raw, self._client, token=token, on_progress=self._on_progress)

    def _client(self) -> Client:
        return self.client

    def _on_progress(self, job: Job[Any], progress: float) -> None:
        self._emit("progress", job, progress)

    def _take_back(self) -> list[Job[Any]]:
        """The jobs that no handler has taken yet."""
        jobs: list[Job[Any]] = []
        ends = 0
        with contextlib.suppress(queues_of_python.Empty):
            while True:
                job = self._ready.get_nowait()
                if job is None:
                    ends += 1
                else:
                    jobs.append(job)
        for _ in range(ends):
            self._ready.put(None)
        return jobs

    def _put(self, job: Job[Any]) -> None:
        self._last_put = time.monotonic()
        self._ready.put(job)

    def _kept(self) -> float:
        """How long jobs have been waiting here while no handler was free."""
        return 0.0 if self._ready.empty() else time.monotonic() - max(self._last_start, self._last_put)

    def _work(self) -> None:
        """A handler thread."""
        take = self._ready.get
        while (job := take()) is not None:
            self._handle(job)

    def _handle(self, job: Job[Any]) -> None:
        delivery = self._delivery
        self._last_start = started = time.monotonic()
        if self._listeners["active"]:
            self._emit("active", job)
        outcome: Outcome | None
        try:
            value = self._call(job)
            outcome = Outcome(job, "ACK", self._completed, result=None if value is None else self._packed(value))
            if self._listeners["completed"]:
                outcome.fields["value"] = value
        except KeyboardInterrupt:  # solo, in the main thread: the second signal
            delivery.give_back(job)
            raise
        except BaseException as exc:  # noqa: BLE001 - a handler that raises SystemExit has failed too
            outcome = self._raised(job, exc)
        took = time.monotonic() - started
        delivery.pace = took if delivery.pace > 1e9 else delivery.pace + 0.1 * (took - delivery.pace)
        delivery.finish(None if job.settled else outcome, job.token or "")

    def _packed(self, value: Any) -> bytes:
        packed = pack(value)
        if len(packed) > _LARGEST_RESULT:
            raise SerializationError(f"the result is {len(packed)} bytes; a frame holds {MAX_FRAME}")
        return packed

    def _completed(self, outcome: Outcome) -> None:
        self.processed += 1
        if self._listeners["completed"]:
            self._emit("completed", outcome.job, outcome.fields.get("value"))

    def _raised(self, job: Job[Any], exc: BaseException) -> Outcome:
        """What an exception means for the job, logged."""
        if isinstance(exc, Retry):
            try:
                delay = milliseconds(exc.delay)
            except (TypeError, ValueError) as wrong:
                exc = wrong
            else:
                log.info("job %s (%s) of %s asks to run again in %d ms", job.id, job.name, job.queue, delay)
                return Outcome(job, "MoveToDelayed", _nothing, fields={"delay": number(delay)})
        error = exc
        log.error(
            "job %s (%s) of %s failed in attempt %d of %d",
            job.id,
            job.name,
            job.queue,
            job.attempts + 1,
            job.max_attempts,
            exc_info=exc,
        )
        fields: dict[str, Any] = {"error": _text(exc), "stack": _stack(exc)}
        if isinstance(exc, UnrecoverableError):
            fields["unrecoverable"] = True

        def confirmed(outcome: Outcome) -> None:
            self.failed += 1
            self._emit("failed", job, error)

        return Outcome(job, "FAIL", confirmed, fields=fields)

    def _run_task(self, job: Job[Any]) -> Any:
        """The function that the job's name stands for."""
        run = self._tasks.get((job.queue, job.name)) or self._late_task(job) or self._imported(job)
        return run(job)

    def _late_task(self, job: Job[Any]) -> Callable[[Job[Any]], Any] | None:
        """A task that was declared after the worker was made."""
        for queue in self._queue_objects:
            task: Task[..., Any] | None = queue.tasks.get(job.name) if queue.name == job.queue else None
            if task is not None:
                self._tasks[job.queue, job.name] = task.run
                return task.run
        return None

    def _imported(self, job: Job[Any]) -> Callable[[Job[Any]], Any]:
        """`module:function` of a module that `imports` allows. Raises UnrecoverableError for any other name."""
        module, colon, function = job.name.partition(":")
        if not colon or not any(fnmatchcase(module, pattern) for pattern in self._imports):
            known = ", ".join(sorted(name for queue, name in self._tasks if queue == job.queue)) or "none"
            raise UnrecoverableError(f"no task {job.name!r} in queue {job.queue}; known: {known}")
        found = getattr(importlib.import_module(module), function, None)
        if isinstance(found, Task):
            run: Callable[[Job[Any]], Any] = found.run
        elif inspect.isfunction(found) and found.__module__ == module:
            run = Arguments(found).call
        else:
            raise UnrecoverableError(f"{module} has no function {function!r}")
        self._tasks[job.queue, job.name] = run
        return run


def _chain(innermost: Processor, middleware: Sequence[Middleware]) -> Processor:
    call = innermost
    for around in reversed(middleware):
        call = _around(around, call)
    return call


def _around(middleware: Middleware, call_next: Processor) -> Processor:
    return lambda job: middleware(job, call_next)


def _nothing(outcome: Outcome) -> None:
    pass


def _text(exc: BaseException) -> str:
    return _sendable(str(exc) or type(exc).__name__)


def _sendable(text: str) -> str:
    """Text that fits into a frame, whatever an exception has in it: file names may hold lone surrogates."""
    return text[:_LONGEST_TEXT].encode("utf-8", "backslashreplace").decode()


def _stack(exc: BaseException) -> list[str]:
    """The exception and its frames, innermost first: the broker keeps the first ones (core 4.8)."""
    lines = [line.strip() for line in traceback.format_exception_only(exc)]
    ours = __file__.rpartition("/")[0]
    lines += [
        f'File "{entry.filename}", line {entry.lineno}, in {entry.name}: {entry.line or ""}'.rstrip(": ")
        for entry in reversed(traceback.extract_tb(exc.__traceback__))
        if not entry.filename.startswith(ours)
    ]
    return [_sendable(line) for line in lines[:_STACK]]
