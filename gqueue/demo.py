"""`gqueue demo`: jobs through a broker on a file, a restart half-way, and the proof that each ran exactly once."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import click

from gqueue.client.client import Client
from gqueue.client.job import Job
from gqueue.client.queue import Queue
from gqueue.client.worker import Worker
from gqueue.errors import GQueueError

_START = 15.0  # s until the broker listens
_STOP = 15.0  # s until it has ended
_QUIET = 30.0  # s without a single job done before the demo gives up

queue = Queue("demo")


@queue.task
def square(number: int) -> int:
    """What the jobs of the demo do. `gqueue worker run gqueue.demo:queue` finishes what an interrupted demo left."""
    return number * number


class DemoFailed(GQueueError):
    """The demo did not come out as it must; the text says what was different."""


class Broker:
    """A gqueue-server in a process of its own, on a free port."""

    def __init__(self, storage: str) -> None:
        self.storage = storage
        self.port = 0  # chosen by the system at the first start, kept at the next
        self.output: list[str] = []
        self._process: subprocess.Popen[str] | None = None
        self._listening = threading.Event()

    def start(self) -> None:
        """Start it and wait until it listens. Raises DemoFailed with what it said instead."""
        self._listening.clear()
        self.output.clear()
        command = [sys.executable, "-m", "gqueue.server", "--host", "127.0.0.1", "--port", str(self.port)]
        command += ["--http-port", "-1", "--storage", self.storage]
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=_environment(),
        )
        self._process = process
        threading.Thread(target=self._read, args=(process,), daemon=True).start()
        if not self._listening.wait(_START) or process.poll() is not None or not self.port:
            self.stop()
            raise DemoFailed("the broker did not start: " + (" / ".join(self.output[-3:]) or "it said nothing"))

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self.output.append(line.rstrip())
            found = re.search(r"\blistening \S*:(\d+)", line)
            if found and not self._listening.is_set():
                self.port = int(found[1])
                self._listening.set()
        self._listening.set()  # it ended

    def stop(self, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Ask it to end and wait for that; `meanwhile` runs when it has been asked."""
        process = self._process
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        meanwhile()
        try:
            process.wait(_STOP)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        self._process = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


class Runs:
    """Counts how often each job was run, and holds the handlers half-way until the broker has been asked to stop."""

    def __init__(self, jobs: int) -> None:
        self.times: Counter[str] = Counter()
        self.half = threading.Event()
        self.go_on = threading.Event()
        self.changed = threading.Event()
        self._jobs = jobs
        self._lock = threading.Lock()

    def __call__(self, job: Job[Any], call_next: Callable[[Job[Any]], Any]) -> Any:
        with self._lock:
            self.times[job.id] += 1
            if 2 * len(self.times) >= self._jobs:
                self.half.set()
        if self.half.is_set():
            self.go_on.wait(_START)
        value = call_next(job)
        self.changed.set()
        return value


def run(*, jobs: int, workers: int, storage: str | None, keep: bool) -> None:
    """The whole demo, printed as it goes. Raises GQueueError when a job is missing, ran twice or is not completed."""
    logging.getLogger("gqueue").addHandler(logging.NullHandler())  # that the broker goes away is part of the show
    with _folder(keep) as folder:
        url = storage or f"sqlite:///{folder / 'gqueue.db'}"
        with Broker(url) as broker, Client(host="127.0.0.1", port=broker.port) as client:
            demo = Queue(queue.name, client)
            demo.tasks.update(queue.tasks)
            if demo.count():
                raise DemoFailed(f"the store has jobs in the queue {demo.name!r} already; the demo wants an empty one")
            click.echo(f"broker   port {broker.port}, {_shown(url)}")
            started = time.monotonic()
            pushed = _push(demo, jobs)
            push_time = time.monotonic() - started

            runs = Runs(jobs)
            started = time.monotonic()
            worker = Worker(demo, concurrency=workers, lock_ttl="5s", middleware=[runs])
            try:
                if not runs.half.wait(_QUIET):
                    raise DemoFailed("the worker got no jobs")
                broker.stop(meanwhile=runs.go_on.set)
                click.echo(f"restart  stopped after {len(runs.times)} jobs", nl=False)
                broker.start()
                click.echo(", started again on the same store")
                _wait(demo, runs, jobs)
                work_time = time.monotonic() - started
            finally:
                runs.go_on.set()
                worker.close(5)
            _verify(demo, pushed, runs)
            _report(demo, jobs, workers, push_time, work_time)
        if keep:
            click.echo(f"kept     {folder}")


def _push(demo: Queue, jobs: int) -> list[Job[Any]]:
    members = ({"name": "square", "data": {"number": number}} for number in range(jobs))
    with click.progressbar(length=jobs, label="push    ", file=sys.stdout) as bar:
        return demo.add_bulk(
            members, batch=max(1, min(500, jobs // 20)), progress=lambda done: bar.update(done - bar.pos)
        )


def _wait(demo: Queue, runs: Runs, jobs: int) -> None:
    """Show how jobs are completed until all are. Raises DemoFailed when nothing more happens."""
    with click.progressbar(length=jobs, label="work    ", file=sys.stdout) as bar:
        last_change = time.monotonic()
        while True:
            done = _completed(demo)
            if done > bar.pos:
                last_change = time.monotonic()
                bar.update(done - bar.pos)
            if done >= jobs:
                return
            if time.monotonic() - last_change > _QUIET:
                raise DemoFailed(f"{jobs - done} of {jobs} jobs are not completed: {demo.counts()}")
            runs.changed.wait(0.1)
            runs.changed.clear()


def _completed(demo: Queue) -> int:
    counts = demo.counts()
    return counts["completed"] + counts["failed"]


def _verify(demo: Queue, pushed: list[Job[Any]], runs: Runs) -> None:
    """Ask the broker for every job's state and result, and compare with what ran here."""
    with demo.client.pipeline() as states:
        for job in pushed:
            states.get_state(job.id)
    with demo.client.pipeline() as results:
        for job in pushed:
            results.get_result(job.id)
    wrong = []
    for job, state, result in zip(pushed, states, results, strict=True):
        times = runs.times[job.id]
        if state.get("state") != "completed" or times != 1 or result.get("result") != job.data["number"] ** 2:
            wrong.append(f"{job.id} is {state.get('state')}, ran {times} times, result {result.get('result')}")
    if len({job.id for job in pushed}) != len(pushed) or len(runs.times) != len(pushed):
        wrong.append(f"{len(pushed)} jobs were pushed, {len(runs.times)} ran")
    if wrong:
        raise DemoFailed(f"{len(wrong)} jobs are not as they must be, the first: {wrong[0]}")


def _report(demo: Queue, jobs: int, workers: int, push_time: float, work_time: float) -> None:
    from tabulate import tabulate  # type: ignore[import-untyped, unused-ignore]

    click.echo(tabulate(demo.counts().items(), headers=("state", "jobs"), tablefmt="simple"))
    click.echo(f"pushed   {jobs / push_time:,.0f} jobs/s")
    click.echo(f"worked   {jobs / work_time:,.0f} jobs/s with {workers} workers, the restart included")
    click.echo(f"checked  {jobs} jobs, each completed exactly once")


@contextlib.contextmanager
def _folder(keep: bool) -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="gqueue-demo-"))
    try:
        yield folder
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)


def _shown(url: str) -> str:
    """A storage URL without its password."""
    return re.sub(r"//[^@/]*@", "//***@", url)


def _environment() -> dict[str, str]:
    """The demo's broker listens to its flags only; it finds this gqueue wherever it was imported from."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("GQUEUE_", "BUNQUEUE_", "BQ_"))}
    root = str(Path(__file__).resolve().parent.parent)
    paths = [root, *filter(None, [kept.get("PYTHONPATH")])]
    dropped = {
        "AUTH_TOKENS",
        "TLS_CERT_FILE",
        "TLS_KEY_FILE",
        "TCP_SOCKET_PATH",
        "HTTP_SOCKET_PATH",
        "DATA_PATH",
        "SQLITE_PATH",
    }
    return {
        **{name: value for name, value in kept.items() if name not in dropped},
        "PYTHONPATH": os.pathsep.join(paths),
    }
