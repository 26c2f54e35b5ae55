"""Queue, Job and tasks against a real broker."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any
from uuid import UUID, uuid4

import pytest

from gqueue import Client, CommandError, Job, JobFailed, JobTimeout, Queue, Worker
from gqueue.client.task import Task

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


def leased(q: Queue) -> tuple[Job[Any], str]:
    reply = q.client.pull(q.name, owner="tester")
    return Job(reply["job"], lambda: q.client, token=reply["token"]), reply["token"]


# ---------------------------------------------------------------- adding and finding


def test_a_job_is_added_with_its_options_and_found_again(q: Queue) -> None:
    job = q.add("mail", {"to": "a@b"}, priority=3, attempts=5, backoff="2s", tags=["x"], timeout="1m", delay="1h")
    found = q.get_job(job.id)
    assert found is not None
    assert (found.name, found.data, found.priority, found.max_attempts) == ("mail", {"to": "a@b"}, 3, 5)
    assert found.raw["backoff"] == 2000
    assert found.raw["timeout"] == 60_000
    assert found.tags == ["x"]
    assert found.state == "delayed"
    assert found.run_at == (found.created_at or 0) + 3_600_000
    assert found == job


def test_a_pushed_job_asks_the_broker_for_fields_it_does_not_know(q: Queue) -> None:
    job = q.add("mail", 1)
    assert job.max_attempts == 3
    assert job.attempts == 0
    assert job.timeline[0]["state"] == "waiting"


def test_integers_of_users_come_back_as_they_were(q: Queue) -> None:
    data = {"big": 2**40, "small": -(2**50), "edge": 2**63, "float": 2.0, "bytes": b"\x00", "none": None}
    job = q.add("n", data)
    found = q.get_job(job.id)
    assert found is not None
    assert found.data == data
    assert {name: type(value) for name, value in found.data.items()} == {name: type(v) for name, v in data.items()}


def test_a_missing_job_is_none(q: Queue) -> None:
    assert q.get_job(str(uuid4())) is None
    assert q.get_job_by_custom_id("never") is None


def test_a_push_with_a_taken_id_adds_nothing(q: Queue) -> None:
    id = f"own-{uuid4()}"
    first = q.add("n", 1, job_id=id)
    second = q.add("n", 2, job_id=id)
    assert first.id == second.id == id
    found = q.get_job_by_custom_id(id)
    assert found is not None
    assert found.data == 1
    assert found.custom_id == id


def test_many_jobs_are_added_in_portions_and_iterated_in_pages(q: Queue) -> None:
    told: list[int] = []
    jobs = q.add_bulk(
        ({"name": "n", "data": number, "priority": number % 2} for number in range(25)), batch=10, progress=told.append
    )
    assert told == [10, 20, 25]
    assert len({job.id for job in jobs}) == 25
    assert sorted(job.data for job in q.iter_jobs(page=10)) == list(range(25))
    assert [job.data for job in q.get_jobs("prioritized", limit=2)] == [1, 3]
    assert q.counts()["waiting"] == 13
    assert q.get_counts_per_priority() == {0: 13, 1: 12}


def test_a_bulk_is_stored_whole_or_not_at_all(q: Queue) -> None:
    with pytest.raises(CommandError, match=r"jobs\[1\]"):
        q.add_bulk([{"name": "n", "data": 1}, {"name": "n", "data": 2, "opts": {"attempts": 0}}])
    assert q.counts()["waiting"] == 0


def test_members_of_a_bulk_have_ids_of_their_own(q: Queue) -> None:
    id = f"own-{uuid4()}"
    (job,) = q.add_bulk([{"name": "n", "data": 1, "opts": {"job_id": id}}])
    assert job.id == id


def test_defaults_of_a_queue_go_below_the_options_of_a_job(client: Client, queue: str) -> None:
    q = Queue(queue, client, defaults={"attempts": 7, "priority": 2})
    assert q.add("n", 1).max_attempts == 7
    assert q.add("n", 1, attempts=1).max_attempts == 1
    (job,) = q.add_bulk([{"name": "n", "priority": 5}])
    assert (job.max_attempts, job.priority) == (7, 5)
    q.obliterate()


def test_a_prefix_is_part_of_the_name(broker: Any) -> None:
    with Queue("mails", broker.url, prefix_key="test-") as q:
        assert q.name == "test-mails"


def test_a_refused_option_names_itself(q: Queue) -> None:
    with pytest.raises(CommandError, match="maxAttempts must be at most 1000"):
        q.add("n", 1, attempts=1001)


# ---------------------------------------------------------------- results


def test_a_result_is_waited_for_without_polling(q: Queue) -> None:
    job = q.add("n", 1)
    values: list[Any] = []
    waiting = threading.Thread(target=lambda: values.append(job.result(PATIENCE)))
    waiting.start()
    _, token = leased(q)
    q.client.ack(job.id, {"answer": 42}, token)
    waiting.join(PATIENCE)
    assert values == [{"answer": 42}]
    assert job.done()


def test_a_job_that_does_not_end_in_time_raises_job_timeout_and_goes_on(q: Queue) -> None:
    job = q.add("n", 1)
    with pytest.raises(JobTimeout):
        job.result(timeout="50ms")
    assert job.get_state() == "waiting"
    assert not job.done()


def test_a_failed_job_raises_job_failed_with_error_and_stack(q: Queue) -> None:
    job = q.add("n", 1, attempts=1)
    _, token = leased(q)
    q.client.fail(job.id, "it broke", ["line one", "line two"], token=token)
    with pytest.raises(JobFailed, match="it broke") as caught:
        job.result(timeout=PATIENCE)
    assert caught.value.error == "it broke"
    assert caught.value.stack == ["line one", "line two"]
    assert caught.value.job is job


def test_a_done_callback_is_called_for_success_and_failure(q: Queue) -> None:
    ended: list[str] = []
    changed = threading.Condition()

    def note(job: Job[Any]) -> None:
        with changed:
            ended.append(job.get_state())
            changed.notify_all()

    good = q.add("n", 1)
    good.add_done_callback(note)
    job, token = leased(q)
    q.client.ack(job.id, token=token)
    bad = q.add("n", 1, attempts=1)
    bad.add_done_callback(note)
    job, token = leased(q)
    q.client.fail(job.id, "e", token=token)
    with changed:
        assert changed.wait_for(lambda: len(ended) == 2, 2 * PATIENCE)
    assert sorted(ended) == ["completed", "failed"]


# ---------------------------------------------------------------- controlling


def test_a_queue_is_paused_drained_cleaned_and_obliterated(q: Queue) -> None:
    q.add_bulk([{"name": "n"}] * 3)
    q.pause()
    assert q.is_paused()
    assert q.counts()["paused"] == 3
    q.resume()
    assert not q.is_paused()
    assert q.drain() == 3
    job, token = (q.add("n"), leased(q)[1])
    q.client.ack(job.id, token=token)
    assert q.clean(0, state="completed") == 1
    q.add("n")
    assert q.count() == 1
    q.obliterate()
    assert q.count() == 0


def test_one_job_is_changed_by_its_id(q: Queue) -> None:
    job = q.add("n", 1, delay="1h")
    q.update_job_data(job.id, {"new": True})
    q.change_job_priority(job.id, 4)
    q.change_job_delay(job.id, "2h")
    q.add_job_log(job.id, "hello", "warn")
    assert [(line["message"], line["level"]) for line in q.get_job_logs(job.id)] == [("hello", "warn")]
    q.clear_job_logs(job.id)
    assert q.get_job_logs(job.id) == []
    q.promote_job(job.id)
    job.refresh()
    assert (job.data, job.priority, job.state) == ({"new": True}, 4, "prioritized")
    q.cancel(job.id)
    assert q.get_state(job.id) == "unknown"
    with pytest.raises(CommandError, match="Job not found"):
        job.refresh()


def test_a_leased_job_is_worked_on_through_its_handle(q: Queue) -> None:
    q.add("n", 1)
    job, _ = leased(q)
    job.update_progress(40, "soon")
    assert q.get_progress(job.id) == {"progress": 40, "message": "soon"}
    job.log("hello")
    assert [line["message"] for line in job.logs()] == ["hello"]
    job.heartbeat()
    job.extend_lock("1m")
    job.move_to_delayed("1h")
    assert job.settled
    assert job.get_state() == "delayed"


def test_unique_keys_are_looked_up_and_freed(q: Queue) -> None:
    job = q.add("n", 1, deduplication={"id": "key"})
    assert q.add("n", 2, unique_key="key").id == job.id
    assert q.get_deduplication_job_id("key") == job.id
    assert q.remove_deduplication_key("key") == 1
    assert q.get_deduplication_job_id("key") is None


def test_failed_and_completed_jobs_are_made_ready_again(q: Queue) -> None:
    job = q.add("n", 1, attempts=1)
    _, token = leased(q)
    q.move_job_to_failed(job.id, ValueError("bad"), token)
    q.retry_job(job.id)
    assert job.get_state() == "waiting"
    _, token = leased(q)
    q.move_job_to_completed(job.id, 5, token)
    assert q.get_result(job.id) == 5
    assert q.wait_for_job(job.id, 1000) == 5
    assert q.retry_completed() == 1
    assert job.get_state() == "waiting"


# ---------------------------------------------------------------- tasks


@dataclasses.dataclass
class Order:
    id: UUID
    placed: datetime


def test_a_task_is_called_here_or_sent_as_a_map_of_its_arguments(q: Queue) -> None:
    @q.task(attempts=4)
    def send(to: str, subject: str = "hi", **headers: str) -> str:
        return f"{to} {subject} {headers}"

    assert isinstance(send, Task)
    assert send("a@b") == "a@b hi {}"
    job = send.delay("a@b", subject="x", reply="c")
    found = q.get_job(job.id)
    assert found is not None
    assert (found.name, found.data, found.max_attempts) == (
        "send",
        {"to": "a@b", "subject": "x", "reply": "c"},
        4,
    )


def test_arguments_that_do_not_fit_are_refused_at_the_caller(q: Queue) -> None:
    @q.task
    def send(to: str) -> None: ...

    with pytest.raises(TypeError, match="missing a required argument: 'to'"):
        send.delay()  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="unexpected keyword argument 'too'"):
        send.map([{"to": "a"}, {"to": "a", "too": "a"}])
    assert q.count() == 0


def test_a_task_with_other_options_is_the_same_task(q: Queue) -> None:
    @q.task(attempts=4)
    def send(to: str) -> None: ...

    job = send.options(priority=9, delay="10m").delay("a")
    assert (job.name, job.priority, job.max_attempts, job.refresh().state) == ("send", 9, 4, "delayed")
    assert send.default_options == {"attempts": 4}
    with pytest.raises(TypeError, match="did you mean 'priority'"):
        send.options(priorty=9)  # type: ignore[call-arg]


def test_a_map_is_one_push(q: Queue) -> None:
    @q.task
    def add(a: int, b: int = 0) -> int:
        return a + b

    jobs = add.map([(1,), (2, 3), {"b": 4, "a": 5}])
    assert [job.data for job in jobs] == [{"a": 1}, {"a": 2, "b": 3}, {"a": 5, "b": 4}]
    with Worker(q, autorun=False) as worker:
        worker.run(burst=True)
    assert [job.result(PATIENCE) for job in jobs] == [1, 5, 9]


def test_rich_values_come_back_by_their_annotations(q: Queue) -> None:
    got: list[Any] = []

    @q.task
    def ship(order: Order, at: datetime, tags: set[str]) -> Order:
        got.extend((order, at, tags))
        return order

    order = Order(uuid4(), datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC))
    job = ship.delay(order, datetime(2026, 5, 6, tzinfo=UTC), {"a"})
    with Worker(q, autorun=False) as worker:
        worker.run(burst=True)
    assert job.result(PATIENCE) == order
    assert got == [order, datetime(2026, 5, 6, tzinfo=UTC), {"a"}]


def test_functions_whose_arguments_have_no_names_are_refused_at_decoration(q: Queue) -> None:
    def positional(a: int, /) -> None: ...

    def many(*values: int) -> None: ...

    async def later() -> None: ...

    for fn, words in ((positional, "cannot be sent by name"), (many, "cannot be sent by name"), (later, "is async")):
        with pytest.raises(TypeError, match=words):
            q.task(fn)
    with pytest.raises(TypeError, match="first parameter receives the job"):
        q.task(bind=True)(lambda: None)


def test_two_functions_cannot_have_one_name(q: Queue) -> None:
    q.task(name="x")(lambda a: a)

    def other(a: int) -> int:
        return a

    with pytest.raises(ValueError, match="has a task 'x' already"):
        q.task(name="x")(other)


def test_an_undecorated_function_is_sent_by_its_module_and_name(q: Queue) -> None:
    from textwrap import dedent

    job = q.enqueue(dedent, text="  a")
    assert job.name == "textwrap:dedent"
    assert q.get_job(job.id).data == {"text": "  a"}  # type: ignore[union-attr]
    with Worker(q, autorun=False, imports=["text*"]) as worker:
        worker.run(burst=True)
    assert job.result(PATIENCE) == "a"
    with pytest.raises(TypeError, match="cannot be found by a worker"):
        q.enqueue(lambda: None)
