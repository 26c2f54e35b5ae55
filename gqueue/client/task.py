"""Functions as jobs: what `@queue.task` makes of them, and how a worker calls them."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Iterable, Mapping
from functools import update_wrapper
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar, Unpack

from gqueue.client.job import Job
from gqueue.client.options import JobOptions, wire_options
from gqueue.client.values import Reviver, reviver

if TYPE_CHECKING:
    from gqueue.client.queue import Queue

P = ParamSpec("P")
R = TypeVar("R")

_KINDS = inspect.Parameter


class Task(Generic[P, R]):
    """A function that can be called here, or sent as a job.

    Arguments travel as a map of parameter names, so that programs in other languages can push the same job.
    """

    def __init__(self, fn: Callable[..., R], queue: Queue, name: str, bind: bool, options: Mapping[str, Any]) -> None:
        self.fn = fn
        self.queue = queue
        self.name = name
        self.bind = bind
        self.default_options = dict(options)
        self._wire_options = wire_options(options)
        self._arguments = Arguments(fn, bind)
        update_wrapper(self, fn)

    def __repr__(self) -> str:
        return f"<Task {self.name} of {self.queue.name}>"

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the function here; no broker takes part. With `bind=True` the caller passes the job himself."""
        return self.fn(*args, **kwargs)

    def delay(self, *args: P.args, **kwargs: P.kwargs) -> Job[R]:
        """Push a job that calls the function. Raises TypeError at once for arguments that do not fit it."""
        return self.queue.push(
            self.name, self._arguments.bound(args, kwargs), self._wire_options, self._arguments.result
        )

    def map(self, arguments: Iterable[Iterable[Any] | Mapping[str, Any]]) -> list[Job[R]]:
        """Push many at once, one for each tuple of positional or mapping of named arguments; all are checked first."""
        members = [
            {
                "name": self.name,
                "data": self._arguments.bound((), item)
                if isinstance(item, Mapping)
                else self._arguments.bound(item, {}),
                **self._wire_options,
            }
            for item in arguments
        ]
        return self.queue.push_many(members, revive=self._arguments.result)

    def options(self, **options: Unpack[JobOptions]) -> Task[P, R]:
        """The same task with other options: `send.options(priority=9, delay="10m").delay(…)`."""
        return Task(self.fn, self.queue, self.name, self.bind, {**self.default_options, **options})

    def run(self, job: Job[Any]) -> R:
        """Call the function with the arguments of a job."""
        return typing.cast(R, self._arguments.call(job))


class Arguments:
    """The parameters of one function: bound to names on the way out, revived by their annotations on the way in."""

    def __init__(self, fn: Callable[..., Any], bind: bool = False) -> None:
        self._fn = fn
        self._bind = bind
        signature = inspect.signature(fn)
        parameters = list(signature.parameters.values())
        if bind:
            if not parameters or parameters[0].kind not in (_KINDS.POSITIONAL_ONLY, _KINDS.POSITIONAL_OR_KEYWORD):
                raise TypeError(f"{fn.__qualname__}: with bind=True the first parameter receives the job")
            parameters = parameters[1:]
        for parameter in parameters:
            if parameter.kind in (_KINDS.POSITIONAL_ONLY, _KINDS.VAR_POSITIONAL):
                raise TypeError(
                    f"{fn.__qualname__}: {parameter} cannot be sent by name, as positional-only parameters and *args"
                )
        self._signature = signature.replace(parameters=parameters)
        self._rest = next((p.name for p in parameters if p.kind is _KINDS.VAR_KEYWORD), None)
        self._revivers: dict[str, Reviver] | None = None
        self._result: Reviver | None = None

    def bound(self, args: Iterable[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments by parameter name; defaults are left to the worker."""
        named = self._signature.bind(*args, **kwargs).arguments
        if self._rest is not None:
            named.update(named.pop(self._rest, {}))
        return named

    def call(self, job: Job[Any]) -> Any:
        """Raises TypeError when the job's data does not fit the function."""
        data = job.data
        if data is None:
            data = {}
        if not isinstance(data, dict):
            raise TypeError(
                f"{self._fn.__qualname__} takes a map of arguments, the data of the job is {type(data).__name__}"
            )
        revivers = self._revivers
        if revivers is None:
            revivers = self._resolve()
        if revivers:
            data = {name: revivers[name](value) if name in revivers else value for name, value in data.items()}
        return self._fn(job, **data) if self._bind else self._fn(**data)

    def result(self, value: Any) -> Any:
        """A result as the return annotation has it."""
        if self._revivers is None:
            self._resolve()
        return value if self._result is None else self._result(value)

    def _resolve(self) -> dict[str, Reviver]:
        """Read the annotations, not before they are needed: they may name what is defined later."""
        try:
            hints = typing.get_type_hints(self._fn)
        except Exception:  # noqa: BLE001 - an annotation that cannot be read says nothing about values
            hints = {}
        self._result = reviver(hints.get("return"))
        self._revivers = {
            name: revive
            for name in self._signature.parameters
            if name in hints and name != self._rest and (revive := reviver(hints[name])) is not None
        }
        return self._revivers
