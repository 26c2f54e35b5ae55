"""How a command is declared, and the table of all of them.

A request class names its fields in the order in which they are checked; a field's kind checks and converts one value.
From the declaration follow dispatch, validation and docs/commands.md.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import (
    Annotated,
    Any,
    ClassVar,
    Protocol,
    Self,
    get_args,
    get_origin,
    get_type_hints,
)

from gqueue.engine.archive import Archive, Question
from gqueue.engine.delivery import Session
from gqueue.engine.engine import Engine
from gqueue.engine.turns import Turns
from gqueue.errors import BadRequest

#: A handler's answer when the reply comes later, by the function that `Context.park` gave.
PARKED: dict[str, Any] = {}


class Answer(Protocol):
    """Gives the reply to a parked request. `revealed` is the number of the batch that it shows something of; else it
    follows the newest one."""

    def __call__(self, fields: dict[str, Any], revealed: int | None = None, /) -> None: ...


#: A handler that may have to deal with many jobs is a generator: it yields when others may go (`engine/turns.py`).
Handler = Callable[[Any, Any], dict[str, Any] | Turns[dict[str, Any]]]
Recalls = Callable[[Any, Archive], Question | None]


class Context(Protocol):
    """What a handler may use besides its request."""

    engine: Engine
    session: Session
    now: int  # ms since the epoch; the same for all that a command does
    revealed: int  # number of the newest batch that the reply shows something of; PULL sets it

    def park(self, *, pull: bool = False) -> Answer:
        """Keep the request open: the function takes the reply's fields, once, at any later time."""
        ...

    @property
    def version(self) -> str:
        """Of the program."""
        ...


class Kind:
    """What one field may hold. `check` returns the value to use, or raises BadRequest with the field's name in it."""

    #: For the documentation: type, bounds, unit.
    says: str = "any"

    #: True: whether a value fits depends on other fields; `check_among` gets all of them.
    looks_around: bool = False

    #: True: the value names a job, which is brought back from the archive before the command runs.
    names_job: bool = False

    def check(self, value: Any, field: str) -> Any:
        return value

    def check_among(self, value: Any, field: str, values: dict[str, Any]) -> Any:
        return self.check(value, field)

    def absent(self, field: str) -> BadRequest:
        """The refusal of a required field that is not there."""
        return BadRequest(f"{field} is required")


class Field:
    """One field of a request."""

    __slots__ = ("aliases", "attribute", "default", "kind", "late", "nil", "required", "wire")

    def __init__(
        self,
        attribute: str,
        wire: str,
        kind: Kind,
        *,
        required: bool,
        default: Any,
        late: bool,
        nil: bool,
        aliases: tuple[str, ...],
    ) -> None:
        self.attribute = attribute
        self.wire = wire
        self.kind = kind
        self.required = required
        self.default = default
        self.late = late  # its refusal waits until the job's dependencies are known to exist
        self.nil = nil  # nil is a value of its own
        self.aliases = aliases

    @property
    def name(self) -> str:
        return self.attribute


#: For each key to look at: its wire name, the attribute, its check, and the field when it needs more than that.
Plan = tuple[tuple[str, str, Callable[[Any, str], Any], Field | None], ...]


class Request:
    """The base of all request classes. What a client did not send is the class's own default."""

    FIELDS: ClassVar[tuple[Field, ...]] = ()
    _PLANS: ClassVar[dict[tuple[str, ...], Plan]] = {}
    fault: BadRequest | None = None

    def __init_subclass__(cls) -> None:
        cls.FIELDS = _fields(cls)
        cls._PLANS = {}

    @classmethod
    def read(cls, values: dict[str, Any]) -> Self:
        """Check the fields of one command in the declared order. Raises BadRequest at the first fault."""
        names = tuple(values)
        plan = cls._PLANS.get(names)
        if plan is None:
            plan = cls._plan(names)
        request = cls.__new__(cls)
        kept = request.__dict__
        for wire, attribute, check, special in plan:
            value = values.get(wire)
            if special is None:
                if value is not None:
                    kept[attribute] = check(value, wire)
            elif value is None and not special.nil:
                if special.required:
                    raise special.kind.absent(special.wire)
            else:
                try:
                    looks = special.kind.looks_around
                    kept[attribute] = special.kind.check_among(value, wire, values) if looks else check(value, wire)
                except BadRequest as error:
                    if not special.late:
                        raise
                    kept.setdefault("fault", error)
        return request

    @classmethod
    def _plan(cls, names: tuple[str, ...]) -> Plan:
        """Which of these keys to look at, in the order of the class; missing required fields come in their turn."""
        present = set(names)
        plan = []
        for field in cls.FIELDS:
            wire = next((name for name in (field.wire, *field.aliases) if name in present), None)
            if wire is not None or field.required:
                special = field if field.required or field.late or field.nil or field.kind.looks_around else None
                plan.append((wire or field.wire, field.attribute, field.kind.check, special))
        done = tuple(plan)
        if len(cls._PLANS) < 512:  # a client may make up any number of keys
            cls._PLANS[names] = done
        return done


class Late:
    """Marks a field whose refusal waits for the check of dependencies."""


class Nil:
    """Marks a field for which nil is a value of its own, not absence."""


class Alias:
    """Another wire name of a field, used when the documented one is absent."""

    def __init__(self, *names: str) -> None:
        self.names = names


class Wire:
    """The wire name of a field where it is not the camelCase of the attribute."""

    def __init__(self, name: str) -> None:
        self.name = name


def camel(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(part.capitalize() for part in rest)


def _fields(cls: type) -> tuple[Field, ...]:
    fields = []
    for attribute, hint in get_type_hints(cls, include_extras=True).items():
        marks = _marks(hint)
        kinds = [mark for mark in marks if isinstance(mark, Kind)]
        if not kinds:
            continue
        wire = next((mark.name for mark in marks if isinstance(mark, Wire)), camel(attribute))
        aliases = tuple(name for mark in marks if isinstance(mark, Alias) for name in mark.names)
        fields.append(
            Field(
                attribute,
                wire,
                kinds[-1],
                required=not hasattr(cls, attribute),
                default=getattr(cls, attribute, None),
                late=Late in marks,
                nil=Nil in marks,
                aliases=aliases,
            )
        )
    return tuple(fields)


def _marks(hint: Any) -> list[Any]:
    if get_origin(hint) is Annotated:
        return [*_marks(get_args(hint)[0]), *hint.__metadata__]
    return [mark for arg in get_args(hint) for mark in _marks(arg)]


class Command:
    """One command: its request, what it does, how it behaves when the store fails or the broker stops."""

    __slots__ = ("group", "handler", "name", "recalls", "request", "reveals", "waits", "writes")

    def __init__(
        self,
        name: str,
        group: str,
        request: type[Request],
        handler: Handler,
        *,
        writes: bool,
        waits: bool,
        reveals: bool,
        recalls: Recalls | None,
    ) -> None:
        self.name = name
        self.group = group
        self.request = request
        self.handler = handler
        self.writes = writes  # refused while the store takes no batch
        self.waits = waits  # its reply follows the newest batch with a change in it
        self.reveals = reveals  # its reply follows `Context.revealed` only
        self.recalls = recalls  # what it needs of the archive

    @property
    def doc(self) -> str:
        return (self.request.__doc__ or "").strip()

    @property
    def fields(self) -> tuple[Field, ...]:
        return self.request.FIELDS


def _named_job(request: type[Request]) -> Recalls | None:
    name = next((field.attribute for field in request.FIELDS if field.kind.names_job), None)
    return None if name is None else lambda req, archive: archive.by_ids((getattr(req, name),))


#: Wire name -> command. Filled by the modules of this package when `load` imports them.
COMMANDS: dict[str, Command] = {}


def command(
    request: type[Request],
    *,
    group: str,
    name: str | None = None,
    writes: bool = False,
    waits: bool = True,
    reveals: bool = False,
    recalls: Recalls | None = None,
) -> Callable[[Handler], Handler]:
    """Declare the handler of a request. `handler(request, context)` returns the reply's fields, or PARKED.

    `recalls(request, archive)` says what the command needs of the archive; by default the job that a field names.
    """

    def declare(handler: Handler) -> Handler:
        wire = name or request.__name__
        COMMANDS[wire] = Command(
            wire,
            group,
            request,
            handler,
            writes=writes,
            waits=waits,
            reveals=reveals,
            recalls=recalls or _named_job(request),
        )
        return handler

    return declare
