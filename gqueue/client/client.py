"""The protocol as methods: one for each command, same fields in the same order, snake_case (TCP reference)."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Literal, Self, TypeVar

from gqueue.client.connection import Call, Connection, granted
from gqueue.client.target import Target
from gqueue.client.values import Duration, number, seconds
from gqueue.errors import GQueueError

if TYPE_CHECKING:
    from ssl import SSLContext

Answer = TypeVar("Answer")

#: Marks `data` and `result` that were not given: None is a value there, everywhere else it is the same as leaving out.
_PAYLOADS = frozenset({"data", "result"})
_NOT_GIVEN: Any = type("NotGiven", (), {"__repr__": lambda self: "<not given>"})()


class Commands(ABC, Generic[Answer]):
    """Every command of the protocol. What a method returns depends on what `call` does with it.

    Times are in ms, as on the wire. An argument that is None is left out.
    """

    @abstractmethod
    def call(self, cmd: str, /, **fields: Any) -> Answer:
        """Any command by its name, fields as they are on the wire."""

    # ------------------------------------------------------------ core

    def push(
        self,
        queue: str,
        name: str | None = None,
        data: Any = _NOT_GIVEN,
        *,
        priority: int | None = None,
        delay: int | None = None,
        max_attempts: int | None = None,
        backoff: int | Mapping[str, Any] | None = None,
        ttl: int | None = None,
        timeout: int | None = None,
        unique_key: str | None = None,
        job_id: str | None = None,
        depends_on: Sequence[str] | None = None,
        tags: Sequence[str] | None = None,
        group_id: str | None = None,
        group_max_size: int | None = None,
        lifo: bool | None = None,
        remove_on_complete: bool | None = None,
        remove_on_fail: bool | None = None,
        durable: bool | None = None,
        repeat: Mapping[str, Any] | None = None,
        parent_id: str | None = None,
        children_ids: Sequence[str] | None = None,
        fail_parent_on_failure: bool | None = None,
        remove_dependency_on_failure: bool | None = None,
        ignore_dependency_on_failure: bool | None = None,
        continue_parent_on_failure: bool | None = None,
        stall_timeout: int | None = None,
        stack_trace_limit: int | None = None,
        keep_logs: int | None = None,
        size_limit: int | None = None,
        dedup: Mapping[str, Any] | None = None,
        debounce_id: str | None = None,
        debounce_ttl: int | None = None,
        timestamp: int | None = None,
    ) -> Answer:
        """Add a job: `id`."""
        return self.call(
            "PUSH",
            queue=queue,
            name=name,
            data=data,
            priority=priority,
            delay=delay,
            maxAttempts=max_attempts,
            backoff=backoff,
            ttl=ttl,
            timeout=timeout,
            uniqueKey=unique_key,
            jobId=job_id,
            dependsOn=depends_on,
            tags=tags,
            groupId=group_id,
            groupMaxSize=group_max_size,
            lifo=lifo,
            removeOnComplete=remove_on_complete,
            removeOnFail=remove_on_fail,
            durable=durable,
            repeat=repeat,
            parentId=parent_id,
            childrenIds=children_ids,
            failParentOnFailure=fail_parent_on_failure,
            removeDependencyOnFailure=remove_dependency_on_failure,
            ignoreDependencyOnFailure=ignore_dependency_on_failure,
            continueParentOnFailure=continue_parent_on_failure,
            stallTimeout=stall_timeout,
            stackTraceLimit=stack_trace_limit,
            keepLogs=keep_logs,
            sizeLimit=size_limit,
            dedup=dedup,
            debounceId=debounce_id,
            debounceTtl=debounce_ttl,
            timestamp=timestamp,
        )

    def pushb(self, queue: str, jobs: Sequence[Mapping[str, Any]]) -> Answer:
        """Add many jobs at once, all or none: `ids`. The members are maps of wire fields."""
        return self.call("PUSHB", queue=queue, jobs=jobs)

    def pull(
        self,
        queue: str,
        timeout: int | None = None,
        owner: str | None = None,
        lock_ttl: int | None = None,
        detach: bool | None = None,
        group: Mapping[str, Any] | None = None,
    ) -> Answer:
        """Take the next job, waiting up to `timeout` ms: `job`, and `token` with an owner."""
        return self.call(
            "PULL", queue=queue, timeout=timeout, owner=owner, lockTtl=lock_ttl, detach=detach, group=group
        )

    def pullb(
        self,
        queue: str,
        count: int,
        timeout: int | None = None,
        owner: str | None = None,
        lock_ttl: int | None = None,
        group: Mapping[str, Any] | None = None,
        *,
        detach: bool | None = None,
    ) -> Answer:
        """Take up to `count` jobs: `jobs`, and `tokens` with an owner."""
        return self.call(
            "PULLB",
            queue=queue,
            count=count,
            timeout=timeout,
            owner=owner,
            lockTtl=lock_ttl,
            group=group,
            detach=detach,
        )

    def ack(
        self, id: str, result: Any = _NOT_GIVEN, token: str | None = None, *, remove_on_complete: bool | None = None
    ) -> Answer:
        """Complete an active job."""
        return self.call("ACK", id=id, result=result, token=token, removeOnComplete=remove_on_complete)

    def ackb(
        self,
        ids: Sequence[str],
        results: Sequence[Any] | None = None,
        tokens: Sequence[str | None] | None = None,
        *,
        remove_on_completes: Sequence[bool | None] | None = None,
    ) -> Answer:
        """Complete many active jobs, all or none."""
        return self.call("ACKB", ids=ids, results=results, tokens=tokens, removeOnCompletes=remove_on_completes)

    def fail(
        self,
        id: str,
        error: str | None = None,
        stack: Sequence[str] | None = None,
        unrecoverable: bool | None = None,
        token: str | None = None,
        *,
        remove_on_fail: bool | None = None,
    ) -> Answer:
        """Fail an active job: it is retried while it has attempts left."""
        return self.call(
            "FAIL",
            id=id,
            error=error,
            stack=stack,
            unrecoverable=unrecoverable,
            token=token,
            removeOnFail=remove_on_fail,
        )

    # ------------------------------------------------------------ query

    def get_job(self, id: str) -> Answer:
        """`job`; refused when there is none."""
        return self.call("GetJob", id=id)

    def get_state(self, id: str) -> Answer:
        """`state`; `unknown` when there is no such job."""
        return self.call("GetState", id=id)

    def get_result(self, id: str) -> Answer:
        """`result`, absent when there is none."""
        return self.call("GetResult", id=id)

    def get_jobs(
        self,
        queue: str,
        state: str | Sequence[str] | None = None,
        limit: int | None = None,
        offset: int | None = None,
        asc: bool | None = None,
    ) -> Answer:
        """`jobs`, in the order of creation."""
        return self.call("GetJobs", queue=queue, state=state, limit=limit, offset=offset, asc=asc)

    def get_job_counts(self, queue: str) -> Answer:
        """`counts` by state."""
        return self.call("GetJobCounts", queue=queue)

    def get_counts_per_priority(self, queue: str) -> Answer:
        """`counts` by priority, keys as text."""
        return self.call("GetCountsPerPriority", queue=queue)

    def get_job_by_custom_id(self, custom_id: str) -> Answer:
        """`job`; refused when there is none."""
        return self.call("GetJobByCustomId", customId=custom_id)

    def count(self, queue: str) -> Answer:
        """`count` of jobs in all states."""
        return self.call("Count", queue=queue)

    def get_progress(self, id: str) -> Answer:
        """`progress` and `message` of an active job."""
        return self.call("GetProgress", id=id)

    def get_children_values(self, id: str) -> Answer:
        """`data.values`: results of the children."""
        return self.call("GetChildrenValues", id=id)

    # ------------------------------------------------------------ control

    def cancel(self, id: str) -> Answer:
        """Remove a job that has not started."""
        return self.call("Cancel", id=id)

    def progress(self, id: str, progress: float, message: str | None = None, *, token: str | None = None) -> Answer:
        """Set the progress of an active job, 0 to 100."""
        return self.call("Progress", id=id, progress=progress, message=message, token=token)

    def update(self, id: str, data: Any) -> Answer:
        """Replace the data of an unfinished job."""
        return self.call("Update", id=id, data=data)

    def change_priority(self, id: str, priority: int, lifo: bool | None = None) -> Answer:
        """Change the priority of a queued job."""
        return self.call("ChangePriority", id=id, priority=priority, lifo=lifo)

    def promote(self, id: str) -> Answer:
        """Make a delayed job ready now."""
        return self.call("Promote", id=id)

    def move_to_delayed(self, id: str, delay: int, token: str | None = None) -> Answer:
        """Give an active job back, to run again `delay` ms from now."""
        return self.call("MoveToDelayed", id=id, delay=delay, token=token)

    def discard(self, id: str, token: str | None = None) -> Answer:
        """Fail a job for good."""
        return self.call("Discard", id=id, token=token)

    def wait_job(self, id: str, timeout: int | None = None) -> Answer:
        """Wait up to `timeout` ms for a job to end: `completed`, `result`."""
        return self.call("WaitJob", id=id, timeout=timeout)

    def pause(self, queue: str) -> Answer:
        """Deliver nothing from a queue."""
        return self.call("Pause", queue=queue)

    def resume(self, queue: str) -> Answer:
        """Deliver again."""
        return self.call("Resume", queue=queue)

    def is_paused(self, queue: str) -> Answer:
        """`paused`."""
        return self.call("IsPaused", queue=queue)

    def drain(self, queue: str) -> Answer:
        """Remove all queued jobs: `count`."""
        return self.call("Drain", queue=queue)

    def obliterate(self, queue: str) -> Answer:
        """Remove a queue with everything in it."""
        return self.call("Obliterate", queue=queue)

    def clean(self, queue: str, grace: int, state: str | None = None, limit: int | None = None) -> Answer:
        """Remove jobs older than `grace` ms: `count`, `ids`."""
        return self.call("Clean", queue=queue, grace=grace, state=state, limit=limit)

    def list_queues(self) -> Answer:
        """`queues`: their names."""
        return self.call("ListQueues")

    def retry_completed(
        self, queue: str, id: str | None = None, count: int | None = None, timestamp: int | None = None
    ) -> Answer:
        """Put completed jobs back to waiting: `count`."""
        return self.call("RetryCompleted", queue=queue, id=id, count=count, timestamp=timestamp)

    # ------------------------------------------------------------ monitoring and workers

    def ping(self) -> Answer:
        """`data.time`: the broker's clock in ms."""
        return self.call("Ping")

    def hello(self, protocol_version: int = 3, capabilities: Sequence[str] | None = None) -> Answer:
        """What the broker is and can do."""
        return self.call("Hello", protocolVersion=protocol_version, capabilities=capabilities)

    def heartbeat(
        self, id: str, active_jobs: int | None = None, processed: int | None = None, failed: int | None = None
    ) -> Answer:
        """Keep a worker's registration fresh. The counts are totals."""
        return self.call("Heartbeat", id=id, activeJobs=active_jobs, processed=processed, failed=failed)

    def job_heartbeat(self, id: str, token: str | None = None, duration: int | None = None) -> Answer:
        """Show that an active job is alive; with its token, renew its lease."""
        return self.call("JobHeartbeat", id=id, token=token, duration=duration)

    def job_heartbeat_b(
        self,
        ids: Sequence[str],
        tokens: Sequence[str | None] | None = None,
        *,
        durations: Sequence[int | None] | None = None,
    ) -> Answer:
        """The same for many: `data.count` of those that were."""
        return self.call("JobHeartbeatB", ids=ids, tokens=tokens, durations=durations)

    def register_worker(
        self,
        name: str,
        queues: Sequence[str],
        concurrency: int | None = None,
        worker_id: str | None = None,
        hostname: str | None = None,
        pid: int | None = None,
        started_at: int | None = None,
    ) -> Answer:
        """Announce a worker; it is listed until this connection ends."""
        return self.call(
            "RegisterWorker",
            name=name,
            queues=queues,
            concurrency=concurrency,
            workerId=worker_id,
            hostname=hostname,
            pid=pid,
            startedAt=started_at,
        )

    def unregister_worker(self, worker_id: str) -> Answer:
        """Take a worker off the list."""
        return self.call("UnregisterWorker", workerId=worker_id)

    def list_workers(self) -> Answer:
        """`data.workers` and `data.stats`."""
        return self.call("ListWorkers")

    # ------------------------------------------------------------ deduplication, parking, logs, leases

    def get_deduplication_job_id(self, queue: str, deduplication_id: str) -> Answer:
        """`data.jobId` that holds a unique key, or None."""
        return self.call("GetDeduplicationJobId", queue=queue, deduplicationId=deduplication_id)

    def remove_deduplication_key(self, queue: str, deduplication_id: str) -> Answer:
        """Free a unique key: `data.count`."""
        return self.call("RemoveDeduplicationKey", queue=queue, deduplicationId=deduplication_id)

    def remove_job_deduplication_key(self, id: str) -> Answer:
        """Free the unique key of a job that still holds it: `data.removed`."""
        return self.call("RemoveJobDeduplicationKey", id=id)

    def move_to_waiting_children(self, id: str, token: str | None = None) -> Answer:
        """Park an active job until its children are done."""
        return self.call("MoveToWaitingChildren", id=id, token=token)

    def add_log(self, id: str, message: str, level: Literal["info", "warn", "error"] | None = None) -> Answer:
        """Add a line to a job's log."""
        return self.call("AddLog", id=id, message=message, level=level)

    def get_logs(self, id: str, start: int | None = None, end: int | None = None) -> Answer:
        """`data.logs` and their `data.count`."""
        return self.call("GetLogs", id=id, start=start, end=end)

    def extend_lock(self, id: str, duration: int | None = None, token: str | None = None) -> Answer:
        """Let a lease end `duration` ms from now."""
        return self.call("ExtendLock", id=id, duration=duration, token=token)

    def extend_locks(self, ids: Sequence[str], tokens: Sequence[str], durations: Sequence[int]) -> Answer:
        """The same for many: `count` of those that were."""
        return self.call("ExtendLocks", ids=ids, tokens=tokens, durations=durations)

    def change_delay(self, id: str, delay: int, token: str | None = None) -> Answer:
        """Let a queued job run `delay` ms from now."""
        return self.call("ChangeDelay", id=id, delay=delay, token=token)

    def move_to_wait(self, id: str, token: str | None = None) -> Answer:
        """Make a job ready again: an active, delayed or failed one."""
        return self.call("MoveToWait", id=id, token=token)

    def promote_jobs(self, queue: str, count: int | None = None) -> Answer:
        """Make delayed jobs ready now: `count`."""
        return self.call("PromoteJobs", queue=queue, count=count)

    def clear_logs(self, id: str, keep_logs: int | None = None) -> Answer:
        """Clear a job's log, but for the newest `keep_logs` lines."""
        return self.call("ClearLogs", id=id, keepLogs=keep_logs)

    # ------------------------------------------------------------ limits

    def rate_limit(self, queue: str, limit: int, duration: int | None = None, ttl: int | None = None) -> Answer:
        """Deliver at most `limit` jobs in any `duration` ms, 1000; for `ttl` ms, or until cleared."""
        return self.call("RateLimit", queue=queue, limit=limit, duration=duration, ttl=ttl)

    def rate_limit_clear(self, queue: str) -> Answer:
        """Remove the rate limit."""
        return self.call("RateLimitClear", queue=queue)

    def set_concurrency(self, queue: str, limit: int) -> Answer:
        """Let at most `limit` jobs be active at once."""
        return self.call("SetConcurrency", queue=queue, limit=limit)

    def clear_concurrency(self, queue: str) -> Answer:
        """Remove the concurrency limit."""
        return self.call("ClearConcurrency", queue=queue)

    def get_queue_limits(self, queue: str, max_jobs: int | None = None) -> Answer:
        """`data.limits`: what is set, and whether it is reached."""
        return self.call("GetQueueLimits", queue=queue, maxJobs=max_jobs)

    # ------------------------------------------------------------ configuration, events, system

    def set_stall_config(self, queue: str, config: Mapping[str, Any]) -> Answer:
        """Set what counts as a stall: `enabled`, `stallInterval`, `maxStalls`, `gracePeriod`."""
        return self.call("SetStallConfig", queue=queue, config=config)

    def get_stall_config(self, queue: str) -> Answer:
        """`config`."""
        return self.call("GetStallConfig", queue=queue)

    def subscribe_events(self, queue: str) -> Answer:
        """Get a queue's lifecycle events on this connection, in place of those of another queue."""
        return self.call("SubscribeEvents", queue=queue)

    def unsubscribe_events(self) -> Answer:
        """Get no more events."""
        return self.call("UnsubscribeEvents")

    def compact_memory(self) -> Answer:
        """Let the broker give memory back."""
        return self.call("CompactMemory")

    def auth(self, token: str) -> Answer:
        """Authenticate. A client that was given a token has done so already."""
        return self.call("Auth", token=token)


def _wire(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields that were given, numbers in the form that every broker of this protocol understands."""
    return {
        key: number(value) if type(value) is int and key not in _PAYLOADS else value
        for key, value in fields.items()
        if value is not _NOT_GIVEN and (value is not None or key in _PAYLOADS)
    }


class Client(Commands[dict[str, Any]]):
    """A broker, reached over one connection that all threads share; opened on first use.

    Every method returns the broker's answer as a dict, or raises: CommandError when the broker refuses,
    CommandTimeoutError after `timeout` seconds, ConnectionClosedError (`.maybe_applied`) when the connection is lost.
    Reads, ACK and FAIL with a token, and pushes with a job id are sent again by themselves after a reconnect.
    """

    #: PULL and WaitJob occupy one of the broker's 50 places for a connection; beyond this many they use another one.
    _PARKED = 40

    def __init__(
        self,
        url: str | None = None,
        *,
        host: str | None = None,
        port: int | None = None,
        token: str | None = None,
        tls: bool | SSLContext | None = None,
        timeout: float = 10.0,
        reconnect: bool = True,
    ) -> None:
        self._start(Target.find(url, host=host, port=port, token=token, tls=tls), timeout, reconnect)

    def _start(self, target: Target, timeout: float, reconnect: bool) -> None:
        if timeout <= 0:
            raise ValueError("timeout must be more than 0 seconds")
        self.target = target
        self.connection = Connection(target, timeout=timeout, reconnect=reconnect)
        self._free = threading.Semaphore(self._PARKED)
        self._aside: Client | None = None

    @classmethod
    def at(cls, target: Target, *, timeout: float = 10.0, reconnect: bool = True) -> Self:
        """A client of a broker whose address is known already."""
        client = cls.__new__(cls)
        client._start(target, timeout, reconnect)
        return client

    def __repr__(self) -> str:
        return f"<Client of {self.target}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def call(self, cmd: str, /, **fields: Any) -> dict[str, Any]:
        """Send one command and return its answer.

        Fields have their wire names; those that are None are left out, except `data` and `result`. A long poll may take
        its own `timeout` on top of the client's.
        """
        return self._call(cmd, fields, self.connection.timeout)

    def within(self, timeout: Duration) -> Commands[dict[str, Any]]:
        """The same client with another time-out: `client.within(0.5).ping()`. A number is in seconds."""
        return _Within(self, seconds(timeout))

    def pipeline(self) -> Pipeline:
        """Collect commands, send them at once, then iterate over the answers.

        >>> with client.pipeline() as p:
        ...     for n in range(1000):
        ...         p.push("numbers", "square", n)
        >>> ids = [reply["id"] for reply in p]
        """
        return Pipeline(self)

    def next_event(self, timeout: Duration | None = None) -> dict[str, Any] | None:
        """The next event of the subscribed queue; None when none comes within `timeout` (seconds).

        Events are kept, the newest 10,000, while other commands run. Raises ConnectionClosedError when the connection
        has ended, because the subscription has ended with it.
        """
        return self.connection.next_event(None if timeout is None else seconds(timeout))

    def close(self) -> None:
        """End the connection. Threads that wait get ConnectionClosedError."""
        self.connection.close()
        if self._aside is not None:
            self._aside.close()

    def _call(self, cmd: str, fields: dict[str, Any], timeout: float) -> dict[str, Any]:
        wire = _wire(fields)
        if cmd in ("PULL", "PULLB", "WaitJob"):
            return self._park(cmd, wire, timeout)
        call = self.connection.prepare(cmd, wire)
        self.connection.perform((call,), timeout)
        return granted(call)

    def _park(self, cmd: str, fields: dict[str, Any], timeout: float) -> dict[str, Any]:
        """A command that may be answered late. Too many of them on one connection would keep all others waiting."""
        if not self._free.acquire(blocking=False):
            if self._aside is None:
                connection = self.connection
                self._aside = Client.at(self.target, timeout=connection.timeout, reconnect=connection.reconnect)
            return self._aside._park(cmd, fields, timeout)
        try:
            wait = fields.get("timeout", 30_000 if cmd == "WaitJob" else 0)
            call = self.connection.prepare(cmd, fields)
            self.connection.perform((call,), timeout + (wait / 1_000 if isinstance(wait, int | float) else 0))
            return granted(call)
        finally:
            self._free.release()


class _Within(Commands[dict[str, Any]]):
    """A client seen through another time-out."""

    def __init__(self, client: Client, timeout: float) -> None:
        self._client = client
        self._timeout = timeout

    def call(self, cmd: str, /, **fields: Any) -> dict[str, Any]:
        return self._client._call(cmd, fields, self._timeout)


class Pipeline(Commands[None]):
    """Commands collected inside `with`, sent when it ends, answered in the same order.

    Iterating yields the answers; a refused command yields its `{"ok": False, "error": …}`, the others are not affected.
    """

    #: Commands, and bytes, sent in one go before their answers are awaited: bounds what the broker has to hold.
    _PORTION = 500
    _BYTES = 4 << 20

    def __init__(self, client: Client) -> None:
        self._client = client
        self._calls: list[Call] = []

    def call(self, cmd: str, /, **fields: Any) -> None:
        """Add a command. Raises SerializationError at once for a value that cannot travel."""
        self._calls.append(self._client.connection.prepare(cmd, _wire(fields)))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.send()

    def send(self) -> None:
        """Send what was collected and wait for the answers; the time-out counts for each portion."""
        connection = self._client.connection
        portion: list[Call] = []
        size = 0
        for call in self._calls:
            if call.reply is None:
                portion.append(call)
                size += len(call.frame)
                if len(portion) == self._PORTION or size >= self._BYTES:
                    connection.perform(portion, connection.timeout)
                    portion, size = [], 0
        if portion:
            connection.perform(portion, connection.timeout)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for call in self._calls:
            if call.reply is None:
                raise GQueueError("the pipeline has not been sent: iterate after its with block")
            yield call.reply

    def __len__(self) -> int:
        return len(self._calls)
