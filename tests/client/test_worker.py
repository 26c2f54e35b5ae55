"""Workers: what becomes of jobs when handlers return, raise, hang or die, and when the broker goes away."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gqueue import Client, GQueueError, Job, JobFailed, Queue, Retry, UnrecoverableError, Worker
from gqueue.client import delivery as delivery_module
from tests.client.fake import HANG_UP, SILENT, Answer, Fake, Peer

PATIENCE = 15.0  # seconds for what takes a fraction of one


@pytest.fixture(scope="module")
def client(broker: Any) -> Iterator[Client]:
    with Client(broker.url) as opened:
        yield opened


@pytest.fixture
def q(client: Client, queue: str) -> Iterator[Queue]:
    made = Queue(queue, client)
    yield made
    made.obliterate()


@pytest.fixture
def work(q: Queue) -> Iterator[Callable[..., Worker]]:
    """Start workers of the queue; all are closed at the end."""
    workers: list[Worker] = []

    def start(processor: Callable[[Job[Any]], Any] | None = None, **options: Any) -> Worker:
        workers.append(Worker(q, processor, **options))
        return workers[-1]

    yield start
    for worker in workers:
        worker.close(PATIENCE)


def until(probe: Callable[[], Any], timeout: float = PATIENCE) -> Any:
    """Ask again until the answer is true: for what no event announces."""
    deadline = time.monotonic() + timeout
    while not (answer := probe()):
        assert time.monotonic() < deadline, f"still {answer!r}"
        time.sleep(0.01)
    return answer


class Gate:
    """A handler that waits until it is let go, and says when it has begun."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.go = threading.Event()
        self.runs: Counter[str] = Counter()

    def __call__(self, job: Job[Any]) -> str:
        self.runs[job.id] += 1
        self.begun.set()
        assert self.go.wait(PATIENCE)
        return "done"


# ---------------------------------------------------------------- outcomes


def test_what_a_handler_returns_is_the_result_of_the_job(q: Queue, work: Callable[..., Worker]) -> None:
    work(lambda job: {"got": job.data})
    jobs = q.add_bulk([{"name": "n", "data": number} for number in range(50)])
    assert [job.result(PATIENCE) for job in jobs] == [{"got": number} for number in range(50)]


def test_a_handler_that_raises_is_retried_and_then_failed_with_its_stack(
    q: Queue, work: Callable[..., Worker], caplog: pytest.LogCaptureFixture
) -> None:
    def fail(job: Job[Any]) -> None:
        raise ValueError(f"attempt {job.attempts}")

    with caplog.at_level(logging.ERROR, "gqueue.worker"):
        work(fail)
        job = q.add("n", {"secret": "payload"}, attempts=2, backoff=1)
        with pytest.raises(JobFailed, match="attempt 1") as caught:
            job.result(PATIENCE)
    assert caught.value.stack[0] == "ValueError: attempt 1"
    assert "in fail" in caught.value.stack[1]
    assert job.refresh().attempts == 2
    records = [record for record in caplog.records if record.name == "gqueue.worker" and record.levelname == "ERROR"]
    assert [record.getMessage().split(" failed in ")[1] for record in records] == ["attempt 1 of 2", "attempt 2 of 2"]
    assert all(record.exc_info for record in records)
    assert "payload" not in caplog.text


def test_an_unrecoverable_error_fails_the_job_at_once(q: Queue, work: Callable[..., Worker]) -> None:
    runs: list[str] = []

    def fail(job: Job[Any]) -> None:
        runs.append(job.id)
        raise UnrecoverableError("never")

    work(fail)
    with pytest.raises(JobFailed, match="never"):
        q.add("n", attempts=5, backoff=0).result(PATIENCE)
    assert len(runs) == 1


def test_a_retry_puts_the_job_off_without_losing_an_attempt(q: Queue, work: Callable[..., Worker]) -> None:
    attempts: list[int] = []

    def later(job: Job[Any]) -> str:
        attempts.append(job.attempts)
        if len(attempts) < 3:
            raise Retry(delay="20ms")
        return "at last"

    work(later)
    job = q.add("n", attempts=1)
    assert job.result(PATIENCE) == "at last"
    assert attempts == [0, 0, 0]


def test_a_job_that_its_handler_gave_away_is_not_acknowledged(q: Queue, work: Callable[..., Worker]) -> None:
    def park(job: Job[Any]) -> str:
        job.move_to_delayed("1h")
        return "ignored"

    worker = work(park)
    job = q.add("n")
    until(lambda: job.get_state() == "delayed")
    assert worker.close(PATIENCE)
    assert job.get_state() == "delayed"


def test_a_result_that_cannot_travel_fails_the_job(q: Queue, work: Callable[..., Worker]) -> None:
    work(lambda job: object())
    with pytest.raises(JobFailed, match="cannot be sent"):
        q.add("n", attempts=1).result(PATIENCE)


def test_a_handler_that_exits_fails_only_its_job(q: Queue, work: Callable[..., Worker]) -> None:
    def handler(job: Job[Any]) -> str:
        if job.data == "exit":
            sys.exit(3)
        return "fine"

    work(handler, concurrency=1)
    with pytest.raises(JobFailed, match="3"):
        q.add("n", "exit", attempts=1).result(PATIENCE)
    assert q.add("n", "stay").result(PATIENCE) == "fine"


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError("no file \udc80"), "no file .udc80"),
        (ValueError("x" * 1_000_000), "x" * 9_000),
        (ValueError(), "ValueError"),
        (Retry(delay="soon"), "'soon' is not a duration"),
    ],
    ids=["not text", "very long", "empty", "bad delay"],
)
def test_whatever_a_handler_raises_reaches_the_broker(
    q: Queue, work: Callable[..., Worker], error: Exception, words: str
) -> None:
    def fail(job: Job[Any]) -> None:
        raise error

    work(fail, concurrency=1)
    for _ in range(2):  # the handler thread is still there for the second
        with pytest.raises(JobFailed, match=words):
            q.add("n", attempts=1).result(PATIENCE)


def test_a_job_of_an_unknown_name_fails_with_the_known_names(q: Queue, work: Callable[..., Worker]) -> None:
    q.task(name="alpha")(lambda: 1)
    q.task(name="beta")(lambda: 2)
    work()
    with pytest.raises(JobFailed, match=f"no task 'gamma' in queue {q.name}; known: alpha, beta"):
        q.add("gamma", attempts=5).result(PATIENCE)


def test_a_function_runs_only_from_a_module_that_imports_allows(q: Queue, work: Callable[..., Worker]) -> None:
    work(imports=["textwrap"])
    assert q.add("textwrap:dedent", {"text": " a"}).result(PATIENCE) == "a"
    with pytest.raises(JobFailed, match="no task 'os:system'"):
        q.add("os:system", {"command": "true"}).result(PATIENCE)


def test_a_bound_task_gets_its_job(q: Queue, work: Callable[..., Worker]) -> None:
    @q.task(bind=True)
    def count(job: Job[Any], start: int) -> int:
        job.update_progress(50, "half")
        job.log("counting")
        return start + job.max_attempts

    work()
    job = count.delay(40)
    assert job.result(PATIENCE) == 43
    assert job.refresh().progress == 50
    assert [line["message"] for line in job.logs()] == ["counting"]


def test_middleware_stands_around_every_run(q: Queue, work: Callable[..., Worker]) -> None:
    seen: list[str] = []

    def outer(job: Job[Any], call_next: Callable[[Job[Any]], Any]) -> Any:
        seen.append("outer")
        return f"<{call_next(job)}>"

    def inner(job: Job[Any], call_next: Callable[[Job[Any]], Any]) -> Any:
        seen.append("inner")
        return f"({call_next(job)})"

    work(lambda job: "x", middleware=[outer, inner])
    assert q.add("n").result(PATIENCE) == "<(x)>"
    assert seen == ["outer", "inner"]


def test_events_tell_the_life_of_a_worker(q: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivery_module, "POLL", 100)
    seen: list[str] = []
    drained = threading.Event()

    def handler(job: Job[Any]) -> str:
        job.update_progress(10)
        if job.data == "bad":
            raise UnrecoverableError("bad")
        return "good"

    worker = Worker(q, handler, concurrency=1, autorun=False)
    worker.on("ready", lambda: seen.append("ready"))
    worker.on("active", lambda job: seen.append(f"active {job.data}"))
    worker.on("progress", lambda job, progress: seen.append(f"progress {progress}"))
    worker.on("completed", lambda job, result: seen.append(f"completed {result}"))
    worker.on("failed", lambda job, error: seen.append(f"failed {error}"))
    worker.on("drained", drained.set)
    worker.on("closed", lambda: seen.append("closed"))
    with pytest.raises(ValueError, match="no event 'done'"):
        worker.on("done", print)
    q.add("n", "ok")
    worker.start()
    worker.wait_until_ready()
    until(lambda: worker.processed == 1)
    q.add("n", "bad")
    assert drained.wait(PATIENCE)
    until(lambda: worker.failed == 1)
    assert worker.close(PATIENCE)
    assert seen == [
        "ready", "active ok", "progress 10", "completed good", "active bad", "progress 10", "failed bad", "closed",
    ]  # fmt: skip


# ---------------------------------------------------------------- running and stopping


def test_a_burst_ends_when_the_queues_are_empty(client: Client, queue: str) -> None:
    queues = [Queue(f"{queue}-{number}", client) for number in range(3)]
    for number, q in enumerate(queues):
        q.add_bulk([{"name": "n", "data": number}] * 20)
    ran: Counter[int] = Counter()
    worker = Worker(queues, lambda job: ran.update([job.data]), autorun=False)
    worker.run(burst=True)
    assert ran == {0: 20, 1: 20, 2: 20}
    assert worker.is_closed()
    assert worker.processed == 60
    for q in queues:
        assert q.counts()["completed"] == 20
        q.obliterate()


def test_a_worker_stops_after_a_number_of_jobs(q: Queue) -> None:
    q.add_bulk([{"name": "n"}] * 30)
    worker = Worker(q, lambda job: None, autorun=False)
    worker.run(max_jobs=7)
    assert worker.processed == 7
    assert q.counts()["waiting"] == 23
    assert q.counts()["active"] == 0


def test_solo_runs_jobs_one_by_one_in_the_calling_thread(q: Queue) -> None:
    threads: set[str] = set()
    q.add_bulk([{"name": "n"}] * 5)
    Worker(q, lambda job: threads.add(threading.current_thread().name), pool="solo").run(burst=True)
    assert threads == {threading.current_thread().name}


def test_close_lets_running_jobs_finish_and_leaves_the_others(q: Queue) -> None:
    gate = Gate()
    worker = Worker(q, gate, concurrency=1)
    first = q.add("n")
    assert gate.begun.wait(PATIENCE)
    second = q.add("n")
    closing = threading.Thread(target=worker.close, args=(PATIENCE,))
    closing.start()
    closing.join(0.1)
    assert closing.is_alive()
    gate.go.set()
    closing.join(PATIENCE)
    assert first.get_state() == "completed"
    assert second.get_state() == "waiting"
    assert gate.runs == {first.id: 1}


def test_close_gives_back_what_does_not_finish_in_time(q: Queue) -> None:
    begun = threading.Event()
    cancelled = threading.Event()

    def stubborn(job: Job[Any]) -> None:
        begun.set()
        if job.cancelled.wait(PATIENCE):
            cancelled.set()

    worker = Worker(q, stubborn)
    job = q.add("n")
    assert begun.wait(PATIENCE)
    assert worker.close(0.1) is False
    assert cancelled.wait(PATIENCE)
    assert job.get_state() == "waiting"
    assert job.refresh().attempts == 0


def test_a_paused_worker_takes_nothing(q: Queue, work: Callable[..., Worker]) -> None:
    worker = work(lambda job: None, autorun=False)
    worker.pause()
    worker.start()
    worker.wait_until_ready()
    job = q.add("n")
    assert worker.is_paused()
    assert job.get_state() == "waiting"
    worker.resume()
    job.result(PATIENCE)


def test_long_jobs_are_not_held_in_reserve(q: Queue, work: Callable[..., Worker]) -> None:
    """A second worker gets what the first has no slot for, although its batch size would allow it to take more."""
    gate = Gate()
    work(gate, concurrency=1, batch_size=10)
    jobs = q.add_bulk([{"name": "n"}] * 3)
    assert gate.begun.wait(PATIENCE)
    assert q.counts()["active"] == 1
    others: list[str] = []
    work(lambda job: others.append(job.id), concurrency=1)
    until(lambda: len(others) == 2)
    gate.go.set()
    assert jobs[0].result(PATIENCE) == "done"


def test_a_worker_that_was_idle_for_long_does_not_give_fresh_jobs_back(
    q: Queue, work: Callable[..., Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delivery_module, "_RESERVED", 0.05)
    worker = work(lambda job: "ok", concurrency=1)
    worker.wait_until_ready()
    time.sleep(0.2)  # longer than a job may wait in reserve
    assert q.add("n").result(PATIENCE) == "ok"


def test_a_worker_is_listed_while_it_works(q: Queue, work: Callable[..., Worker]) -> None:
    worker = work(lambda job: None, concurrency=3, name="lister", heartbeat="50ms")
    (listed,) = until(q.get_workers)
    assert (listed["id"], listed["name"], listed["concurrency"], listed["pid"]) == (worker.id, "lister", 3, os.getpid())
    q.add("n").result(PATIENCE)
    until(lambda: q.get_workers()[0]["processedJobs"] == 1)
    worker.close(PATIENCE)
    until(lambda: q.get_workers() == [])


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"pool": "process"}, NotImplementedError, "not in this version"),
        ({"pool": "gevent"}, RuntimeError, "monkey"),
        ({"pool": "threads"}, ValueError, "no pool 'threads'"),
        ({"concurrency": 0}, ValueError, "concurrency"),
        ({"batch_size": 0}, ValueError, "batch_size"),
        ({"lock_ttl": 0}, ValueError, "lock_ttl"),
        ({"processor": 5}, TypeError, "processor"),
        ({"processor": None}, ValueError, "nothing to run"),
    ],
)
def test_a_worker_that_makes_no_sense_is_refused(options: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        Worker("q", **{"processor": lambda job: None, "autorun": False, **options})


# ---------------------------------------------------------------- leases and lost connections


def test_a_lease_is_renewed_for_as_long_as_its_handler_runs(q: Queue, work: Callable[..., Worker]) -> None:
    """The handler sleeps three times the lease; nobody else gets the job."""
    runs: list[str] = []

    def slow(job: Job[Any]) -> str:
        runs.append(job.id)
        time.sleep(1.8)
        return "slept"

    work(slow, lock_ttl="600ms", heartbeat="100ms")
    job = q.add("n")
    assert job.result(PATIENCE) == "slept"
    assert len(runs) == 1
    assert job.refresh().attempts == 0


def test_a_handler_that_does_not_yield_cannot_stop_the_renewals_in_a_patched_program(broker: Any, queue: str) -> None:
    """Under gevent a busy handler stops every greenlet; the thread that renews is a real one."""
    pytest.importorskip("gevent")
    printed = python(
        """
        from gevent import monkey
        sleep = __import__("time").sleep  # the real one: it blocks the whole loop
        monkey.patch_all()
        import sys
        from gqueue import Queue, Worker
        runs = []
        q = Queue(sys.argv[2], sys.argv[1])
        def busy(job):
            runs.append(job.id)
            sleep(1.5)
        job = q.add("n")
        worker = Worker(q, busy, pool="gevent", concurrency=20, lock_ttl="500ms", heartbeat="100ms", autorun=False)
        worker.run(burst=True)
        print(job.result(10), len(runs), job.refresh().attempts)
        q.obliterate()
        """,
        broker.url,
        queue,
    )
    assert printed.split("\n")[0] == "None 1 0"


def test_a_lost_lease_is_told_to_the_handler_and_logged_once(
    q: Queue, work: Callable[..., Worker], caplog: pytest.LogCaptureFixture
) -> None:
    cancelled = threading.Event()
    begun = threading.Event()

    def handler(job: Job[Any]) -> None:
        begun.set()
        if job.cancelled.wait(PATIENCE):
            cancelled.set()

    with caplog.at_level(logging.WARNING, "gqueue.worker"):
        worker = work(handler, heartbeat="50ms")
        job = q.add("n")
        assert begun.wait(PATIENCE)
        q.obliterate()  # the job is gone, and its lease with it
        assert cancelled.wait(PATIENCE)
        assert worker.close(PATIENCE)
    lines = [record.getMessage() for record in caplog.records if job.id in record.getMessage()]
    assert len(lines) == 1
    assert "is lost: its outcome will not count" in lines[0]


def test_a_worker_that_is_killed_loses_no_job(broker: Any, q: Queue) -> None:
    """The broker takes the job back as soon as the process is gone, without waiting for the lease to end."""
    program = """
        import sys, time
        from gqueue import Queue, Worker
        def handler(job):
            print("begun", flush=True)
            time.sleep(60)
        Worker(Queue(sys.argv[2], sys.argv[1]), handler, autorun=False).run()
    """
    job = q.add("n", attempts=1)
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program), broker.url, q.name], stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "begun\n"
            assert job.get_state() == "active"
        finally:
            process.kill()
    with Worker(q, lambda job: "again"):
        assert job.result(PATIENCE) == "again"
    assert job.refresh().attempts == 0


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_the_running_job_finish(broker: Any, q: Queue, sent: int, tmp_path: Path) -> None:
    program = """
        import sys, time, pathlib
        from gqueue import Queue, Worker
        go = pathlib.Path(sys.argv[3])
        def handler(job):
            print("begun", flush=True)
            while not go.exists():
                time.sleep(0.01)
            return "finished"
        Worker(Queue(sys.argv[2], sys.argv[1]), handler, concurrency=1, autorun=False).run()
        print("ended", flush=True)
    """
    job = q.add("n")
    go = tmp_path / "go"
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program), broker.url, q.name, str(go)], stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "begun\n"
            process.send_signal(sent)
            other = q.add("n")
            go.touch()
            assert process.stdout.readline() == "ended\n"
            assert process.wait(PATIENCE) == 0
        finally:
            process.kill()
    assert job.result(PATIENCE) == "finished"
    assert other.get_state() == "waiting"


def test_a_worker_goes_on_after_a_restart_of_the_broker(fresh_broker: Any) -> None:
    """Jobs that run while the broker is away are completed when it is back, and run once."""
    broker = fresh_broker(storage="sqlite")
    gate = Gate()
    with Client(broker.url) as client:
        q = Queue("restarted", client)
        jobs = q.add_bulk([{"name": "n"}] * 12)
        with Worker(q, gate, concurrency=4) as worker:
            until(lambda: len(gate.runs) == 4)
            Queue("other", client).add("n")  # stored after the claims: now the broker remembers the deliveries
            broker.restart("kill")
            gate.go.set()
            assert [job.result(PATIENCE) for job in jobs] == ["done"] * 12
            assert set(gate.runs.values()) == {1}
            until(lambda: worker.processed == 12)  # a result may be here before the worker's own confirmation
            assert q.counts()["completed"] == 12


# ---------------------------------------------------------------- how outcomes travel (a scripted broker)


def job_map(id: str, queue: str = "q") -> dict[str, Any]:
    return {"id": id, "queue": queue, "name": "n", "data": None, "createdAt": 1.0, "attempts": 0, "maxAttempts": 3}


class ScriptedBroker:
    """Delivers given jobs to the first pull, then parks; outcomes are answered by `settle`."""

    def __init__(self, ids: list[str], settle: Callable[[dict[str, Any], Peer], Answer]) -> None:
        self.ids = list(ids)
        self.settle = settle
        self.lock = threading.Lock()

    def __call__(self, command: dict[str, Any], peer: Peer) -> Answer:
        cmd = command["cmd"]
        if cmd == "PULLB":
            with self.lock:
                ids, self.ids = self.ids[: command["count"]], self.ids[command["count"] :]
            if not ids:
                return SILENT
            return {"jobs": [job_map(id) for id in ids], "tokens": [f"t-{id}" for id in ids]}
        if cmd in ("ACK", "ACKB", "FAIL", "MoveToDelayed", "MoveToWait"):
            return self.settle(command, peer)
        if cmd == "JobHeartbeatB":
            return {"data": {"count": len(command["ids"])}}
        return {"data": {}}


def outcomes(fake: Fake) -> list[dict[str, Any]]:
    return [command for command in fake.commands if command["cmd"] in ("ACK", "ACKB", "FAIL")]


def test_an_ack_is_sent_at_once_and_not_awaited_before_the_next_job() -> None:
    """Each job begins although no ACK has been answered, and sees that the one before it has been sent."""
    ran: list[str] = []

    def handler(job: Job[Any]) -> None:
        fake.until(lambda: len(outcomes(fake)) == len(ran))
        ran.append(job.id)

    with Fake(ScriptedBroker(["a", "b", "c"], lambda command, peer: SILENT)) as fake:
        worker = Worker("q", handler, client=fake.url, concurrency=1)
        fake.until(lambda: len(outcomes(fake)) == 3)
        assert [(command["cmd"], command["token"]) for command in outcomes(fake)] == [
            ("ACK", "t-a"),
            ("ACK", "t-b"),
            ("ACK", "t-c"),
        ]
        worker.close(0)


def sent_ids(command: dict[str, Any]) -> list[str]:
    return list(command["ids"]) if command["cmd"] == "ACKB" else [command["id"]]


def test_what_finishes_while_acks_are_unanswered_is_merged_into_one() -> None:
    ids = [f"j{number}" for number in range(30)]
    held: list[tuple[Peer, dict[str, Any]]] = []

    def settle(command: dict[str, Any], peer: Peer) -> Answer:
        held.append((peer, command))
        return SILENT

    completed: list[str] = []
    with Fake(ScriptedBroker(ids, settle)) as fake:
        worker = Worker(
            "q", lambda job: job.id if job.id != "j29" else None, client=fake.url, concurrency=1, autorun=False
        )
        worker.on("completed", lambda job, result: completed.append(job.id))
        worker.start()
        fake.until(lambda: len(held) == 4)
        first = [id for _, command in held for id in sent_ids(command)]
        until(lambda: len(worker._delivery._outcomes) == 30 - len(first))
        assert len(held) == 4
        assert completed == []
        peer, command = held[0]
        peer.reply(command)
        fake.until(lambda: len(held) == 5)
        merged = held[4][1]
        assert merged["cmd"] == "ACKB"
        assert merged["ids"] == ids[len(first) :]
        assert merged["tokens"] == [f"t-{id}" for id in merged["ids"]]
        assert merged["results"] == [*merged["ids"][:-1], None]
        for peer, command in held[1:]:
            peer.reply(command)
        until(lambda: sorted(completed) == sorted(ids))
        assert worker.close(PATIENCE)
        assert worker.processed == 30


def test_a_refused_batch_is_settled_one_by_one(caplog: pytest.LogCaptureFixture) -> None:
    """One stale token refuses all; the others must still count."""
    ids = [f"j{number}" for number in range(20)]
    held: list[tuple[Peer, dict[str, Any]]] = []
    release = threading.Event()

    def settle(command: dict[str, Any], peer: Peer) -> Answer:
        if not release.is_set():
            held.append((peer, command))
            return SILENT
        return verdict(command)

    def verdict(command: dict[str, Any]) -> dict[str, Any]:
        stale = "j10" in sent_ids(command)
        return {"ok": False, "error": "Invalid or expired lock token for job j10"} if stale else {"ok": True}

    with Fake(ScriptedBroker(ids, settle)) as fake, caplog.at_level(logging.WARNING, "gqueue.worker"):
        worker = Worker("q", lambda job: None, client=fake.url, concurrency=1)
        fake.until(lambda: len(held) == 4)
        first = [id for _, command in held for id in sent_ids(command)]
        until(lambda: len(worker._delivery._outcomes) == 20 - len(first))
        release.set()
        for peer, command in held:
            peer.reply(command, **verdict(command))
        until(lambda: worker.processed == 19)
        assert worker.close(PATIENCE)
        assert worker.processed == 19
        assert "ACKB" in fake.names()
    lines = [record.getMessage() for record in caplog.records if "j10" in record.getMessage()]
    assert lines == ["ACK of job j10 does not count: Invalid or expired lock token for job j10"]


def test_an_outcome_survives_a_lost_connection() -> None:
    """The first connection ends before the ACK is answered; the second one takes it again."""

    def settle(command: dict[str, Any], peer: Peer) -> Answer:
        return HANG_UP if len(outcomes(fake)) == 1 else {}

    with Fake(lambda command, peer: broker(command, peer)) as fake:
        broker = ScriptedBroker(["a"], settle)
        worker = Worker("q", lambda job: 5, client=fake.url, concurrency=1)
        until(lambda: worker.processed == 1)
        assert [(command["cmd"], command["id"], command["result"]) for command in outcomes(fake)] == [
            ("ACK", "a", 5)
        ] * 2
        assert worker.close(PATIENCE)


def test_an_ack_whose_answer_was_lost_counts_when_the_broker_says_it_is_done() -> None:
    def settle(command: dict[str, Any], peer: Peer) -> Answer:
        if len(outcomes(fake)) == 1:
            return HANG_UP
        return {"ok": False, "error": "Job not found or not in processing state: a"}

    with Fake(lambda command, peer: broker(command, peer)) as fake:
        broker = ScriptedBroker(["a"], settle)
        worker = Worker("q", lambda job: 5, client=fake.url, concurrency=1)
        until(lambda: worker.processed == 1)
        assert worker.close(PATIENCE)


def test_an_outcome_that_the_broker_cannot_store_now_is_sent_again() -> None:
    def settle(command: dict[str, Any], peer: Peer) -> Answer:
        return {"ok": False, "error": "Storage unavailable: disk_full"} if len(outcomes(fake)) < 3 else {}

    with Fake(lambda command, peer: broker(command, peer)) as fake:
        broker = ScriptedBroker(["a"], settle)
        worker = Worker("q", lambda job: 5, client=fake.url, concurrency=1)
        until(lambda: worker.processed == 1)
        assert len(outcomes(fake)) == 3
        assert worker.close(PATIENCE)


def test_jobs_that_had_not_started_are_forgotten_with_their_connection() -> None:
    """The broker takes them back by itself; running them would be running them twice."""
    gate = Gate()
    broker = ScriptedBroker(["a"], lambda command, peer: {})
    with Fake(broker) as fake:
        worker = Worker("q", gate, client=fake.url, concurrency=2, autorun=False)
        worker._delivery.pace = 0.0  # as if runs were short: jobs are taken in reserve
        broker.ids = ["a", "b", "c", "d"]
        worker.start()
        until(lambda: len(gate.runs) == 2)
        fake.until(lambda: "PULLB" in fake.names())
        next(peer for peer in fake.peers if "PULLB" in peer.names).hang_up()  # the other one renews the leases
        fake.until(lambda: fake.names().count("PULLB") >= 2)
        until(lambda: worker._delivery.running == 2)
        gate.go.set()
        until(lambda: worker.processed >= 2)
        assert set(gate.runs) == {"a", "b"}
        assert worker.close(PATIENCE)


def test_a_worker_waits_for_a_broker_that_is_not_there_yet(caplog: pytest.LogCaptureFixture) -> None:
    with Fake(ScriptedBroker([], lambda command, peer: {})) as gone:
        pass
    with caplog.at_level(logging.WARNING, "gqueue.worker"):
        worker = Worker("q", lambda job: None, client=gone.url)
        errors: list[GQueueError] = []
        worker.on("error", errors.append)
        until(lambda: errors)
        with pytest.raises(GQueueError, match="did not reach the broker"):
            worker.wait_until_ready(0.05)
        assert worker.close(1)
    assert any("cannot reach the broker" in record.getMessage() for record in caplog.records)


def python(program: str, *args: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), *args], capture_output=True, text=True, timeout=40, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
