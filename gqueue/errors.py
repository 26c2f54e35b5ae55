"""Every error of gqueue, in one tree: what a command is refused with, what a client raises, what ends a start."""

from __future__ import annotations

from typing import Any


class GQueueError(Exception):
    """The root: catching it catches everything gqueue raises on purpose."""


# ---------------------------------------------------------------- commands


class CommandError(GQueueError):
    """A command was refused. Its text goes over the wire as it is; on the client it is the broker's answer.

    The engine raises one of the subclasses below, always before anything has changed.
    """


class BadRequest(CommandError):
    """A field is missing, of the wrong type or out of its bounds."""


class NotFound(CommandError):
    """No such job, worker or lease."""


class WrongState(CommandError):
    """The job is there, but not in a state in which the command means something."""


class LeaseLost(CommandError):
    """The job is leased, and the token sent is missing, wrong or retired."""


class Refused(CommandError):
    """A rule of the broker forbids it now: a full group, a taken id, a shutdown, a store that cannot write."""


# ---------------------------------------------------------------- clients


class StorageUnavailable(CommandError):
    """The store takes no change now, or cannot be read; `reason` is one of R20."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"Storage unavailable: {reason}")


class AuthError(CommandError):
    """The broker wants a token, or does not know the one it got."""


class ConnectionClosedError(GQueueError):
    """The connection ended before the answer came.

    `maybe_applied` is true when the command had been sent, so that the broker may have carried it out.
    """

    def __init__(self, message: str, *, maybe_applied: bool = False) -> None:
        super().__init__(message)
        self.maybe_applied = maybe_applied


class CommandTimeoutError(GQueueError):
    """No answer within the command's time-out. The command may still be carried out."""


class SerializationError(GQueueError):
    """A value that MessagePack and gqueue's extensions of it cannot carry."""


class JobFailed(GQueueError):
    """The job whose result was asked for has failed for good."""

    def __init__(
        self, message: str, *, job: Any = None, error: str | None = None, stack: list[str] | None = None
    ) -> None:
        super().__init__(message)
        self.job = job
        self.error = error
        self.stack = stack or []


class JobTimeout(GQueueError):
    """The job whose result was asked for did not end in time. It goes on."""


class UnrecoverableError(GQueueError):
    """Raise it in a handler to fail the job at once, with no further attempt."""


class Retry(GQueueError):
    """Raise it in a handler to run the job again later without losing an attempt.

    `delay` is in the spellings of a duration: ms as a number, `"5s"`, a timedelta.
    """

    def __init__(self, delay: Any = 0) -> None:
        super().__init__(f"run again after {delay}")
        self.delay = delay


# ---------------------------------------------------------------- storage and start


class StorageError(GQueueError):
    """The store could not do what was asked. `reason` is one of `REASONS` (robustness R20)."""

    #: Reasons that may pass: the batch is held and tried again.
    HEALING = frozenset({"disk_full", "io_error", "unreachable", "readonly", "loading", "out_of_memory"})
    #: Reasons that cannot: the process ends, the next start reads the store.
    FATAL = frozenset({"fenced", "corrupt"})
    REASONS = HEALING | FATAL

    def __init__(self, reason: str, message: str) -> None:
        assert reason in self.REASONS, reason
        super().__init__(message)
        self.reason = reason


class StartError(GQueueError):
    """The program cannot start or go on; one line says why. `code` is the exit code (surface 4)."""

    code = 1


class BadSetting(StartError):
    """A flag, environment variable or key of the settings file that does not exist or does not fit."""

    code = 2


class StoreOwned(StartError):
    """Another broker owns the store."""

    code = 4


class NewerSchema(StartError):
    """The store was written by a newer gqueue."""

    code = 5


class DamagedStore(StartError):
    """The file is not a readable database; it is left as it is."""

    code = 6
