"""A queue of a broker: adding, finding and controlling its jobs, and the tasks that run on it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Concatenate, Literal, ParamSpec, Self, TypeVar, Unpack, overload

from gqueue.client.client import Client
from gqueue.client.job import Job
from gqueue.client.options import JobOptions, wire_options
from gqueue.client.task import Arguments, Task
from gqueue.client.values import Duration, Reviver, milliseconds
from gqueue.errors import CommandError

if TYPE_CHECKING:
    from ssl import SSLContext

P = ParamSpec("P")
R = TypeVar("R")


class Queue:
    """One queue. Connects on first use; threads may share it.

    `client` is a Client, a URL, or None for what `host`, `port`, `token`, `tls` or the environment say. `defaults` are
    options of every job added here; `prefix_key` is put in front of the name.
    """

    def __init__(
        self,
        name: str,
        client: Client | str | None = None,
        *,
        defaults: JobOptions | None = None,
        prefix_key: str = "",
        host: str | None = None,
        port: int | None = None,
        token: str | None = None,
        tls: bool | SSLContext | None = None,
        timeout: float = 10.0,
    ) -> None:
        self.name = prefix_key + name
        self.defaults: JobOptions = defaults or {}
        self.tasks: dict[str, Task[..., Any]] = {}
        self._wire_defaults = wire_options(self.defaults)
        self._owned = not isinstance(client, Client)
        if isinstance(client, Client):
            self.client = client
        else:
            self.client = Client(client, host=host, port=port, token=token, tls=tls, timeout=timeout)

    def __repr__(self) -> str:
        return f"<Queue {self.name} at {self.client.target}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the connection, unless the client was given."""
        if self._owned:
            self.client.close()

    disconnect = close

    # ------------------------------------------------------------ adding

    def add(self, name: str, data: Any = None, **options: Unpack[JobOptions]) -> Job[Any]:
        """Push one job. On return it is stored.

        Raises CommandError for what the broker refuses, SerializationError for data that cannot travel, and
        ConnectionClosedError with `maybe_applied` when it is not known whether the broker got it; with `job_id` the
        push is simply sent again.
        """
        return self.push(name, data, wire_options(options))

    def add_bulk(
        self,
        jobs: Iterable[Mapping[str, Any]],
        *,
        batch: int = 500,
        progress: Callable[[int], None] | None = None,
    ) -> list[Job[Any]]:
        """Push many: mappings with `name`, `data` and options, inline or under `opts`.

        Each `batch` of them is stored at once or not at all; `progress` is told how many are stored so far.
        """
        members = ({"name": name, "data": data, **wire_options(options)} for name, data, options in map(_member, jobs))
        return self.push_many(members, batch=batch, progress=progress)

    def push(self, name: str, data: Any, fields: Mapping[str, Any], revive: Reviver | None = None) -> Job[Any]:
        """Push with wire fields, the queue's defaults below them."""
        reply = self.client.call("PUSH", queue=self.name, name=name, data=data, **{**self._wire_defaults, **fields})
        return Job({"id": reply["id"], "queue": self.name, "name": name, "data": data}, self._client, revive=revive)

    def push_many(
        self,
        members: Iterable[dict[str, Any]],
        *,
        batch: int = 500,
        progress: Callable[[int], None] | None = None,
        revive: Reviver | None = None,
    ) -> list[Job[Any]]:
        """Push members with wire fields, one PUSHB for each `batch`."""
        if batch < 1:
            raise ValueError("batch must be at least 1")
        made: list[Job[Any]] = []
        for portion in _portions(members, batch):
            for member in portion:
                for field, value in self._wire_defaults.items():
                    member.setdefault(field, value)
                if "jobId" in member:
                    member["customId"] = member.pop("jobId")
            ids = self.client.call("PUSHB", queue=self.name, jobs=portion)["ids"]
            for id, member in zip(ids, portion, strict=True):
                raw = {"id": id, "queue": self.name, "name": member["name"], "data": member["data"]}
                made.append(Job(raw, self._client, revive=revive))
            if progress is not None:
                progress(len(made))
        return made

    def _client(self) -> Client:
        return self.client

    # ------------------------------------------------------------ tasks

    @overload
    def task(self, fn: Callable[P, R], /) -> Task[P, R]: ...

    @overload
    def task(
        self,
        fn: None = None,
        /,
        *,
        name: str | None = None,
        bind: Literal[False] = False,
        **options: Unpack[JobOptions],
    ) -> Callable[[Callable[P, R]], Task[P, R]]: ...

    @overload
    def task(
        self, fn: None = None, /, *, name: str | None = None, bind: Literal[True], **options: Unpack[JobOptions]
    ) -> Callable[[Callable[Concatenate[Job[Any], P], R]], Task[P, R]]: ...

    def task(
        self,
        fn: Callable[..., Any] | None = None,
        /,
        *,
        name: str | None = None,
        bind: bool = False,
        **options: Unpack[JobOptions],
    ) -> Any:
        """Make a function a task of this queue: `@q.task` or `@q.task(attempts=5, timeout="5m")`.

        The job's name is `name` or the function's. `bind=True` passes the Job as the first argument. Raises TypeError
        at decoration for positional-only parameters and `*args`, which cannot be sent by name.
        """
        if fn is None:
            return lambda fn: self._register(fn, name, bind, options)
        return self._register(fn, name, bind, options)

    def _register(self, fn: Callable[..., R], name: str | None, bind: bool, options: Mapping[str, Any]) -> Task[..., R]:
        if inspect.iscoroutinefunction(fn):
            raise TypeError(f"{fn.__qualname__} is async; workers run synchronous functions")
        task: Task[..., R] = Task(fn, self, name or fn.__name__, bind, options)
        known = self.tasks.get(task.name)
        if known is not None and (known.fn.__module__, known.fn.__qualname__) != (fn.__module__, fn.__qualname__):
            raise ValueError(f"queue {self.name} has a task {task.name!r} already; give this one another name=")
        self.tasks[task.name] = task
        return task

    def enqueue(self, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Job[R]:
        """Push a call of an undecorated module-level function, named `module:function`.

        A worker runs it only with `imports=` that match the module.
        """
        if isinstance(fn, Task):
            return fn.delay(*args, **kwargs)
        qualname = getattr(fn, "__qualname__", "")
        if "." in qualname or not qualname or fn.__module__ == "__main__":
            raise TypeError(
                f"{fn!r} cannot be found by a worker: only functions at the top of an importable module can"
            )
        arguments = Arguments(fn)
        return self.push(f"{fn.__module__}:{qualname}", arguments.bound(args, kwargs), {}, arguments.result)

    # ------------------------------------------------------------ finding

    def get_job(self, id: str) -> Job[Any] | None:
        """A job by its id, in any state; None when there is none."""
        return self._found(lambda: self.client.get_job(id))

    def get_job_by_custom_id(self, custom_id: str) -> Job[Any] | None:
        return self._found(lambda: self.client.get_job_by_custom_id(custom_id))

    def _found(self, ask: Callable[[], dict[str, Any]]) -> Job[Any] | None:
        try:
            return Job(ask()["job"], self._client)
        except CommandError as exc:
            if "not found" in str(exc):  # core 14: on these commands the words mean just that
                return None
            raise

    def get_jobs(
        self,
        state: str | Sequence[str] | None = None,
        *,
        limit: int = 100,
        offset: int = 0,
        asc: bool = True,
    ) -> list[Job[Any]]:
        """Jobs in the order of their creation; of all states, one, or several."""
        jobs = self.client.get_jobs(self.name, state, limit, offset, asc)["jobs"]
        return [Job(raw, self._client) for raw in jobs]

    def iter_jobs(self, state: str | Sequence[str] | None = None, *, page: int = 500) -> Iterator[Job[Any]]:
        """All of them, page by page. Jobs that change their state meanwhile may be missed or come twice."""
        offset = 0
        while True:
            jobs = self.get_jobs(state, limit=page, offset=offset)
            yield from jobs
            if len(jobs) < page:
                return
            offset += len(jobs)

    def get_waiting(self, start: int = 0, end: int = 1000) -> list[Job[Any]]:
        """Jobs `start` up to but not including `end`, as with the other states below."""
        return self.get_jobs("waiting", limit=end - start, offset=start)

    def get_prioritized(self, start: int = 0, end: int = 1000) -> list[Job[Any]]:
        return self.get_jobs("prioritized", limit=end - start, offset=start)

    def get_delayed(self, start: int = 0, end: int = 1000) -> list[Job[Any]]:
        return self.get_jobs("delayed", limit=end - start, offset=start)

    def get_active(self, start: int = 0, end: int = 1000) -> list[Job[Any]]:
        return self.get_jobs("active", limit=end - start, offset=start)

    def get_completed(self, start: int = 0, end: int = 1000) -> list[Job[Any]]:
        return self.get_jobs("completed", limit=end - start, offset=start)

    def get_failed(self, start: int = 0, end: int = 1000) -> list[Job[Any]]:
        return self.get_jobs("failed", limit=end - start, offset=start)

    def get_waiting_children(self, start: int = 0, end: int = 1000) -> list[Job[Any]]:
        return self.get_jobs("waiting-children", limit=end - start, offset=start)

    # ------------------------------------------------------------ counting

    def get_job_counts(self) -> dict[str, int]:
        """How many jobs are in each state. While paused, ready ones count as `paused`."""
        return {state: int(number) for state, number in self.client.get_job_counts(self.name)["counts"].items()}

    counts = get_job_counts

    def count(self) -> int:
        """Jobs in all states."""
        return int(self.client.count(self.name)["count"])

    def get_counts_per_priority(self) -> dict[int, int]:
        """How many queued jobs each priority has."""
        counts = self.client.get_counts_per_priority(self.name)["counts"]
        return {int(priority): int(number) for priority, number in counts.items()}

    def get_waiting_count(self) -> int:
        return self.get_job_counts()["waiting"]

    def get_prioritized_count(self) -> int:
        return self.get_job_counts()["prioritized"]

    def get_delayed_count(self) -> int:
        return self.get_job_counts()["delayed"]

    def get_active_count(self) -> int:
        return self.get_job_counts()["active"]

    def get_completed_count(self) -> int:
        return self.get_job_counts()["completed"]

    def get_failed_count(self) -> int:
        return self.get_job_counts()["failed"]

    def get_waiting_children_count(self) -> int:
        return self.get_job_counts()["waiting-children"]

    # ------------------------------------------------------------ controlling the queue

    def pause(self) -> None:
        """Deliver nothing; running jobs go on."""
        self.client.pause(self.name)

    def resume(self) -> None:
        self.client.resume(self.name)

    def is_paused(self) -> bool:
        return bool(self.client.is_paused(self.name)["paused"])

    def drain(self) -> int:
        """Remove all jobs that have not started; how many."""
        return int(self.client.drain(self.name)["count"])

    def obliterate(self) -> None:
        """Remove the queue with every job in every state."""
        self.client.obliterate(self.name)

    def clean(self, grace: Duration, limit: int | None = None, state: str | None = None) -> int:
        """Remove jobs older than `grace`, queued ones unless `state` says otherwise; how many."""
        return int(self.client.clean(self.name, milliseconds(grace), state, limit)["count"])

    def promote_jobs(self, count: int | None = None) -> int:
        """Make delayed jobs ready now; how many."""
        return int(self.client.promote_jobs(self.name, count)["count"])

    def retry_completed(self, job_id: str | None = None, count: int | None = None) -> int:
        """Put completed jobs back to waiting; how many."""
        return int(self.client.retry_completed(self.name, job_id, count)["count"])

    def get_stall_config(self) -> dict[str, Any]:
        return dict(self.client.get_stall_config(self.name)["config"])

    def set_stall_config(self, config: Mapping[str, Any]) -> None:
        """`enabled`, `stallInterval`, `maxStalls`, `gracePeriod`, in the wire's names and ms."""
        self.client.set_stall_config(self.name, config)

    def set_global_rate_limit(self, max_jobs: int, duration: Duration | None = None) -> None:
        """Deliver at most `max_jobs` in any `duration`, 1 s."""
        self.client.rate_limit(self.name, max_jobs, None if duration is None else milliseconds(duration))

    def remove_global_rate_limit(self) -> None:
        self.client.rate_limit_clear(self.name)

    def set_global_concurrency(self, concurrency: int) -> None:
        """Let at most so many jobs be active at once."""
        self.client.set_concurrency(self.name, concurrency)

    def remove_global_concurrency(self) -> None:
        self.client.clear_concurrency(self.name)

    def get_deduplication_job_id(self, deduplication_id: str) -> str | None:
        """The job that holds a unique key."""
        id = self.client.get_deduplication_job_id(self.name, deduplication_id)["data"]["jobId"]
        return None if id is None else str(id)

    def remove_deduplication_key(self, deduplication_id: str) -> int:
        """Free a unique key; 1, or 0 when it was free."""
        return int(self.client.remove_deduplication_key(self.name, deduplication_id)["data"]["count"])

    # ------------------------------------------------------------ one job, by its id

    def get_state(self, job_id: str) -> str:
        return str(self.client.get_state(job_id)["state"])

    def get_result(self, job_id: str) -> Any:
        """What is stored now; None when there is nothing. `wait_for_job` waits."""
        return self.client.get_result(job_id).get("result")

    def wait_for_job(self, job_id: str, timeout_ms: int = 30_000) -> Any:
        """Wait for the job and return its result, as `Job.result` does."""
        return Job[Any]({"id": job_id, "queue": self.name}, self._client).result(timeout_ms / 1000)

    def get_progress(self, job_id: str) -> dict[str, Any]:
        """`progress` and `message` of an active job."""
        reply = self.client.get_progress(job_id)
        return {"progress": reply["progress"], "message": reply.get("message")}

    def get_children_values(self, job_id: str) -> dict[str, Any]:
        return dict(self.client.get_children_values(job_id)["data"]["values"])

    def cancel(self, job_id: str) -> None:
        """Remove a job that has not started."""
        self.client.cancel(job_id)

    remove = cancel

    def discard(self, job_id: str) -> None:
        """Fail a job for good."""
        self.client.discard(job_id)

    def promote_job(self, job_id: str) -> None:
        self.client.promote(job_id)

    def retry_job(self, job_id: str) -> None:
        """Make a job ready again."""
        self.client.move_to_wait(job_id)

    move_job_to_wait = retry_job

    def move_job_to_delayed(self, job_id: str, delay: Duration, token: str | None = None) -> None:
        self.client.move_to_delayed(job_id, milliseconds(delay), token)

    def move_job_to_completed(self, job_id: str, result: Any = None, token: str | None = None) -> None:
        self.client.ack(job_id, result, token)

    def move_job_to_failed(self, job_id: str, error: BaseException | str, token: str | None = None) -> None:
        self.client.fail(job_id, str(error), token=token)

    def change_job_priority(self, job_id: str, priority: int, lifo: bool | None = None) -> None:
        self.client.change_priority(job_id, priority, lifo)

    def change_job_delay(self, job_id: str, delay: Duration) -> None:
        self.client.change_delay(job_id, milliseconds(delay))

    def update_job_data(self, job_id: str, data: Any) -> None:
        self.client.update(job_id, data)

    def update_job_progress(self, job_id: str, progress: float, message: str | None = None) -> None:
        self.client.progress(job_id, progress, message)

    def extend_job_lock(self, job_id: str, token: str, duration: Duration) -> None:
        self.client.extend_lock(job_id, milliseconds(duration), token)

    def add_job_log(self, job_id: str, message: str, level: Literal["info", "warn", "error"] | None = None) -> None:
        self.client.add_log(job_id, message, level)

    def get_job_logs(self, job_id: str, start: int | None = None, end: int | None = None) -> list[dict[str, Any]]:
        return list(self.client.get_logs(job_id, start, end)["data"]["logs"])

    def clear_job_logs(self, job_id: str, keep_logs: int | None = None) -> None:
        self.client.clear_logs(job_id, keep_logs)

    # ------------------------------------------------------------ the broker

    def list_queues(self) -> list[str]:
        return [str(name) for name in self.client.list_queues()["queues"]]

    def get_workers(self) -> list[dict[str, Any]]:
        """The workers that have this queue."""
        workers = self.client.list_workers()["data"]["workers"]
        return [worker for worker in workers if self.name in worker["queues"]]

    def get_workers_count(self) -> int:
        return len(self.get_workers())

    def ping(self) -> bool:
        return bool(self.client.ping()["ok"])

    def wait_until_ready(self) -> None:
        """Connect now. Raises ConnectionClosedError or AuthError when that fails."""
        self.client.ping()


def _member(job: Mapping[str, Any]) -> tuple[str, Any, dict[str, Any]]:
    """name, data and options of one member of a bulk."""
    options = dict(job)
    try:
        name = options.pop("name")
    except KeyError:
        raise TypeError("a job of a bulk needs a name") from None
    data = options.pop("data", None)
    nested = options.pop("opts", None)
    return name, data, {**options, **(nested or {})}


def _portions(members: Iterable[dict[str, Any]], size: int) -> Iterator[list[dict[str, Any]]]:
    portion: list[dict[str, Any]] = []
    for member in members:
        portion.append(member)
        if len(portion) == size:
            yield portion
            portion = []
    if portion:
        yield portion
