"""gqueue: a durable job queue. The public names, each loaded when it is first used."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

__all__ = [
    "AuthError",
    "Client",
    "CommandError",
    "CommandTimeoutError",
    "ConnectionClosedError",
    "GQueueError",
    "Job",
    "JobFailed",
    "JobTimeout",
    "Queue",
    "Retry",
    "SerializationError",
    "Task",
    "UnrecoverableError",
    "Worker",
    "__version__",
]

if TYPE_CHECKING:
    from gqueue.client.client import Client as Client
    from gqueue.client.job import Job as Job
    from gqueue.client.queue import Queue as Queue
    from gqueue.client.task import Task as Task
    from gqueue.client.worker import Worker as Worker
    from gqueue.errors import AuthError as AuthError
    from gqueue.errors import CommandError as CommandError
    from gqueue.errors import CommandTimeoutError as CommandTimeoutError
    from gqueue.errors import ConnectionClosedError as ConnectionClosedError
    from gqueue.errors import GQueueError as GQueueError
    from gqueue.errors import JobFailed as JobFailed
    from gqueue.errors import JobTimeout as JobTimeout
    from gqueue.errors import Retry as Retry
    from gqueue.errors import SerializationError as SerializationError
    from gqueue.errors import UnrecoverableError as UnrecoverableError

_HOMES = {
    "Client": "client.client",
    "Job": "client.job",
    "Queue": "client.queue",
    "Task": "client.task",
    "Worker": "client.worker",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'gqueue' has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(f"gqueue.{_HOMES.get(name, 'errors')}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
