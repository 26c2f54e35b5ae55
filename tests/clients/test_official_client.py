"""The official Python SDK of the protocol, unchanged, against a real broker: producer, worker, queries, control."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

bunqueue = pytest.importorskip("bunqueue")

HOUR = 3_600_000  # ms
PATIENCE = 15.0  # seconds for what takes a fraction of one


class Seen:
    """Counts calls from worker threads; `wait` returns once there were enough."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.changed = threading.Condition()

    def __call__(self, *args: Any) -> None:
        with self.changed:
            self.calls.append(args)
            self.changed.notify_all()

    def wait(self, enough: int) -> list[tuple[Any, ...]]:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.calls) >= enough, PATIENCE), self.calls
            return list(self.calls)


@pytest.fixture
def producer(broker: Any, queue: str) -> Iterator[Any]:
    with bunqueue.Queue(queue, host=broker.host, port=broker.port) as opened:
        yield opened


@pytest.fixture
def start(broker: Any, queue: str) -> Iterator[Callable[..., Any]]:
    """Start workers of the queue; all are closed at the end."""
    workers = []

    def begin(processor: Callable[[Any], Any], **options: Any) -> Any:
        options = {"host": broker.host, "port": broker.port, "poll_timeout_ms": 500, **options}
        worker = bunqueue.Worker(queue, processor, **options)
        workers.append(worker)
        worker.wait_until_ready(PATIENCE)
        return worker

    yield begin
    for worker in workers:
        assert worker.close(PATIENCE)


def test_a_job_goes_from_the_queue_through_a_worker_to_its_result(producer: Any, start: Callable[..., Any]) -> None:
    completed = Seen()
    worker = start(lambda job: {"sum": job.data["a"] + job.data["b"], "name": job.raw["name"]})
    worker.on("completed", completed)
    job = producer.add("add", {"a": 2, "b": 3}, priority=5, tags=["math"], attempts=4)
    assert producer.wait_for_job(job.id, 15_000) == {"sum": 5, "name": "add"}
    ((done, result),) = completed.wait(1)
    assert (done.id, result["sum"]) == (job.id, 5)
    stored = producer.get_job(job.id)
    assert (stored.state, stored.priority, stored.tags, stored.max_attempts) == ("completed", 5, ["math"], 4)
    assert stored.data == {"a": 2, "b": 3}
    assert stored.started_at <= stored.completed_at
    assert producer.get_result(job.id) == {"sum": 5, "name": "add"}
    assert producer.get_state(job.id) == "completed"


def test_a_worker_of_many_threads_takes_every_job_of_a_bulk_once(producer: Any, start: Callable[..., Any]) -> None:
    handled = Seen()
    ids = producer.add_bulk([{"name": "j", "data": {"n": n}, "priority": n % 3} for n in range(200)])
    assert len(set(ids)) == 200
    threads = set()

    def process(job: Any) -> int:
        threads.add(threading.get_ident())
        handled(job.id)
        return int(job.data["n"]) * 2

    start(process, concurrency=6)
    start(process, concurrency=6, ack_batch={"max_size": 20, "max_delay_ms": 5})
    for n, id in enumerate(ids):
        assert producer.wait_for_job(id, 15_000) == n * 2
    assert Counter(id for (id,) in handled.calls) == Counter(ids)
    assert len(threads) > 1
    counts = producer.get_job_counts()
    assert (counts["completed"], counts["waiting"], counts["active"]) == (200, 0, 0)


def test_a_failing_job_is_retried_and_then_completes(producer: Any, start: Callable[..., Any]) -> None:
    failed = Seen()

    def process(job: Any) -> str:
        if job.attempts < 2:
            raise ValueError(f"not yet {job.attempts}")
        return f"try {job.attempts}"

    worker = start(process)
    worker.on("failed", failed)
    job = producer.add("flaky", {"x": 1}, attempts=5, backoff={"type": "fixed", "delay": 20})
    assert producer.wait_for_job(job.id, 15_000) == "try 2"
    assert [str(error) for _, error in failed.wait(2)] == ["not yet 0", "not yet 1"]
    stored = producer.get_job(job.id)
    assert stored.attempts == 2
    assert stored.raw["failedReason"] == "not yet 1"


def test_a_job_that_keeps_failing_ends_failed_with_its_stack(producer: Any, start: Callable[..., Any]) -> None:
    def process(job: Any) -> None:
        raise RuntimeError("never")

    start(process)
    job = producer.add("bad", None, attempts=2, backoff=1)
    with pytest.raises(bunqueue.CommandError):
        producer.wait_for_job(job.id, 15_000)
    stored = producer.get_job(job.id)
    assert (stored.state, stored.attempts, stored.raw["failedReason"]) == ("failed", 2, "never")
    assert stored.stacktrace[-1] == "RuntimeError: never"
    assert [each.id for each in producer.get_failed()] == [job.id]


def test_an_unrecoverable_error_is_not_retried(producer: Any, start: Callable[..., Any]) -> None:
    handled = Seen()

    def process(job: Any) -> None:
        handled(job.id)
        raise bunqueue.UnrecoverableError("give up")

    start(process)
    job = producer.add("bad", {}, attempts=5, backoff=1)
    with pytest.raises(bunqueue.CommandError):
        producer.wait_for_job(job.id, 15_000)
    assert producer.get_job(job.id).attempts == 1
    producer.retry_job(job.id)
    handled.wait(2)


def test_progress_and_logs_are_seen_while_the_job_runs(producer: Any, start: Callable[..., Any]) -> None:
    reported, go_on = threading.Event(), threading.Event()

    def process(job: Any) -> str:
        job.update_progress(40, "halfway")
        job.log("first")
        job.log("second", level="warn")
        job.heartbeat()
        job.extend_lock(60_000)
        reported.set()
        assert go_on.wait(PATIENCE)
        return job.get_state()

    progress = Seen()
    worker = start(process)
    worker.on("progress", progress)
    job = producer.add("long", {})
    assert reported.wait(PATIENCE)
    assert producer.get_progress(job.id) == {"progress": 40, "message": "halfway"}
    assert [each.id for each in producer.get_active()] == [job.id]
    go_on.set()
    assert producer.wait_for_job(job.id, 15_000) == "active"
    assert progress.wait(1)[0][1] == 40
    logs = producer.get_job_logs(job.id)
    assert [(entry["message"], entry["level"]) for entry in logs] == [("first", "info"), ("second", "warn")]
    producer.add_job_log(job.id, "third")
    assert [entry["message"] for entry in producer.get_job_logs(job.id, 1, 2)] == ["second", "third"]
    producer.clear_job_logs(job.id)
    assert producer.get_job_logs(job.id) == []


def test_waiting_too_short_is_a_time_out(producer: Any) -> None:
    job = producer.add("slow", {}, delay=HOUR)
    with pytest.raises(bunqueue.CommandTimeoutError):
        producer.wait_for_job(job.id, 30)


def test_options_and_custom_ids_reach_the_broker(producer: Any, queue: str) -> None:
    first = producer.add("j", {"v": 1}, job_id=f"{queue}-1", delay=HOUR, ttl=2 * HOUR, timeout=5000, group_id="g",
                         stall_timeout=7000, durable=True, keep_logs=5, size_limit=1000,
                         stack_trace_limit=3)  # fmt: skip
    again = producer.add("j", {"v": 2}, job_id=f"{queue}-1")
    assert first.id == again.id == f"{queue}-1"
    raw = producer.get_job_by_custom_id(f"{queue}-1").raw
    assert raw["data"] == {"v": 1}
    for name, value in (("ttl", 2 * HOUR), ("timeout", 5000), ("groupId", "g"), ("stallTimeout", 7000),
                        ("durable", True), ("keepLogs", 5), ("sizeLimit", 1000), ("stackTraceLimit", 3),
                        ("state", "delayed")):  # fmt: skip
        assert raw[name] == value, name
    assert raw["runAt"] - raw["createdAt"] == HOUR
    assert producer.add_bulk([{"name": "j", "data": {}, "job_id": f"{queue}-2"}]) == [f"{queue}-2"]
    keyed = producer.add("j", {}, deduplication={"id": "key", "ttl": 60_000})
    assert producer.add("j", {}, deduplication={"id": "key", "ttl": 60_000}).id == keyed.id
    assert producer.get_job("nobody") is None
    assert producer.get_job_by_custom_id("nobody") is None
    for bad in ({"priority": 10_000_000}, {"attempts": 0}, {"backoff": {"type": "linear", "delay": 5}}):
        with pytest.raises(bunqueue.CommandError):
            producer.add("j", {}, **bad)


def test_a_dependency_holds_a_job_back(producer: Any, start: Callable[..., Any]) -> None:
    order = Seen()
    first = producer.add("first", {}, delay=HOUR)
    second = producer.add("second", {}, depends_on=[first.id])
    assert producer.get_state(second.id) == "waiting-children"
    assert producer.get_waiting_children_count() == 1
    start(lambda job: order(job.id))
    producer.promote_job(first.id)
    producer.wait_for_job(second.id, 15_000)
    assert [id for (id,) in order.calls] == [first.id, second.id]


def test_the_queue_is_controlled_and_asked(producer: Any, queue: str) -> None:
    urgent = producer.add("a", {}, priority=9)
    plain = producer.add("b", {})
    late = producer.add("c", {}, delay=HOUR)
    assert [job.id for job in producer.get_prioritized()] == [urgent.id]
    assert [job.id for job in producer.get_waiting()] == [plain.id]
    assert [job.id for job in producer.get_delayed()] == [late.id]
    assert producer.count() == 3
    assert producer.get_counts_per_priority() == {"9": 1, "0": 2}
    assert queue in producer.list_queues()
    producer.pause()
    assert producer.is_paused()
    assert producer.get_job_counts()["paused"] == 2
    producer.resume()
    assert not producer.is_paused()
    producer.change_job_priority(plain.id, 20)
    assert producer.get_job(plain.id).priority == 20
    producer.change_job_delay(late.id, 2 * HOUR)
    producer.update_job_data(late.id, {"new": True})
    assert producer.get_job(late.id).data == {"new": True}
    assert producer.promote_jobs() == 1
    producer.move_job_to_delayed(urgent.id, HOUR)
    assert producer.get_state(urgent.id) == "delayed"
    producer.remove(urgent.id)
    assert producer.get_state(urgent.id) == "unknown"
    producer.discard(plain.id)
    assert producer.get_state(plain.id) == "failed"
    assert producer.clean(0, state="waiting") == 1
    producer.add("d", {})
    assert producer.drain() == 1
    producer.set_stall_config({"stallInterval": 9000})
    assert producer.get_stall_config()["stallInterval"] == 9000
    producer.obliterate()
    assert producer.count() == 0
    assert producer.ping()


def test_limits_are_set_and_lifted(producer: Any, start: Callable[..., Any]) -> None:
    running, together, most = 0, threading.Lock(), Seen()

    def process(job: Any) -> None:
        nonlocal running
        with together:
            running += 1
            most(running)
        threading.Event().wait(0.01)
        with together:
            running -= 1

    producer.set_global_concurrency(1)
    ids = producer.add_bulk([{"name": "j", "data": {}} for _ in range(10)])
    start(process, concurrency=4)
    for id in ids:
        producer.wait_for_job(id, 15_000)
    assert {number for (number,) in most.calls} == {1}
    producer.remove_global_concurrency()
    producer.set_global_rate_limit(1000)
    producer.remove_global_rate_limit()


def test_a_worker_is_listed_while_it_lives(producer: Any, start: Callable[..., Any], queue: str) -> None:
    worker = start(lambda job: None, name=f"{queue}-worker", concurrency=3)
    (listed,) = [each for each in producer.get_workers() if each["name"] == f"{queue}-worker"]
    assert (listed["id"], listed["queues"], listed["concurrency"], listed["status"]) == (
        worker.worker_id, [queue], 3, "active"
    )  # fmt: skip
    assert worker.close(PATIENCE)
    assert [each for each in producer.get_workers() if each["name"] == f"{queue}-worker"] == []


def test_heartbeats_keep_a_short_lease(producer: Any, start: Callable[..., Any]) -> None:
    """The lease is 300 ms, the work takes three of them."""
    handled = Seen()

    def process(job: Any) -> str:
        handled(job.id)
        threading.Event().wait(0.9)
        return "once"

    start(process, lock_ttl_ms=300, heartbeat_interval_s=0.1)
    job = producer.add("long", {})
    assert producer.wait_for_job(job.id, 15_000) == "once"
    assert len(handled.calls) == 1
    assert producer.get_job(job.id).attempts == 0


def test_closing_a_worker_waits_for_its_job(producer: Any, start: Callable[..., Any]) -> None:
    begun = threading.Event()

    def process(job: Any) -> str:
        begun.set()
        threading.Event().wait(0.3)
        return "finished"

    worker = start(process)
    job = producer.add("long", {})
    assert begun.wait(PATIENCE)
    assert worker.close(PATIENCE)
    assert producer.get_state(job.id) == "completed"
    assert producer.get_result(job.id) == "finished"


def test_a_token_is_wanted_and_accepted(fresh_broker: Any) -> None:
    broker = fresh_broker("memory", env={"AUTH_TOKENS": "secret"})
    with bunqueue.Queue("q", host=broker.host, port=broker.port, token="secret") as queue:
        assert queue.get_state(queue.add("j", {}).id) == "waiting"
    for token in ("wrong", None):
        with pytest.raises(bunqueue.BunqueueError):
            bunqueue.Queue("q", host=broker.host, port=broker.port, token=token).add("j", {})


@pytest.mark.timeout(150)
def test_work_goes_on_after_the_broker_was_killed(fresh_broker: Any, tmp_path: Any) -> None:
    """Producer and worker reconnect by themselves; nothing that was acknowledged is lost.

    A job whose outcome the kill swallowed waits until the lease of its lost delivery ends (30 s).
    """
    broker = fresh_broker(f"sqlite:///{tmp_path / 'sdk.db'}")
    handled = Seen()
    with bunqueue.Queue("q", host=broker.host, port=broker.port) as queue:
        ids = queue.add_bulk([{"name": "j", "data": {"n": n}} for n in range(20)])
        broker.kill()
        broker.start()
        worker = bunqueue.Worker(
            "q", lambda job: handled(job.id), host=broker.host, port=broker.port, poll_timeout_ms=300
        )
        try:
            handled.wait(10)
            broker.kill()
            broker.start()
            more = again(lambda: queue.add("late", {}).id)
            for id in [*ids, more]:
                assert again(lambda id=id: queue.wait_for_job(id, 60_000)) is None
        finally:
            assert worker.close(PATIENCE)
        assert queue.get_completed_count() == 21


def again(action: Callable[[], Any]) -> Any:
    """The action's result; tried once more when the connection broke under it."""
    try:
        return action()
    except (bunqueue.ConnectionClosedError, OSError):
        return action()
