"""Payload -> command -> reply. The one place where errors become answers."""

from __future__ import annotations

import hmac
import logging
import time
from collections.abc import Callable
from typing import Any

import gqueue.commands  # noqa: F401 - fills the registry
from gqueue.commands.registry import COMMANDS, PARKED, Answer, Command
from gqueue.engine.delivery import Session
from gqueue.engine.engine import Engine
from gqueue.errors import BadRequest, CommandError, StorageUnavailable
from gqueue.wire import codec
from gqueue.wire.frames import HEADER, MAX_FRAME

log = logging.getLogger("gqueue.server")

_TURN = 0.010  # s of a long command before others have theirs (R51)


def framed(payload: bytes) -> bytes:
    """A reply with its length; one that no client may read becomes a refusal (core 1.1)."""
    size = len(payload)
    if size > MAX_FRAME:
        payload = codec.refusal(f"Response too large: {size} bytes exceeds maximum {MAX_FRAME}")
        size = len(payload)
    return HEADER.pack(size) + payload


class Dispatch:
    """Runs commands, one at a time, to their end. It is the Context of every handler."""

    def __init__(self, engine: Engine, clock: Callable[[], int], tokens: frozenset[bytes], version: str) -> None:
        self.engine = engine
        self.clock = clock
        self.tokens = tokens
        self.version = version
        self.now = 0
        self.revealed = 0
        self.session: Session = Session(None)
        self._connection: Any = None
        self._req_id: bytes | None = None

    def run(self, connection: Any, fields: dict[str, Any], *, recalled: bool = False) -> None:
        """One command of a connection; its reply goes out now, with a batch, or later when it is parked.

        A command that needs archived jobs is put off until they are `recalled`.
        """
        req_id = fields.pop("reqId", None)
        name = fields.pop("cmd", None)
        if type(name) is not str or not name:
            connection.send(framed(codec.refusal("Invalid command", req_id if _is_text(req_id) else None)))
            return
        if name == "Auth":
            self._auth(connection, fields.get("token"), req_id)
            return
        if not connection.authenticated:
            connection.send(framed(codec.refusal("Not authenticated", req_id)))
            return
        command = COMMANDS.get(name)
        if command is None:
            connection.send(framed(codec.refusal(f"Unknown command: {name}", req_id)))
            return
        engine = self.engine
        session = connection.session
        self.session = session
        self._connection = connection
        self._req_id = req_id
        self.now = self.clock()
        number = 0
        try:
            if command.writes and engine.degraded is not None:
                raise StorageUnavailable(engine.degraded)
            request = command.request.read(fields)
            if engine.archive.jobs and command.recalls is not None and not recalled:
                question = command.recalls(request, engine.archive)
                if question is not None:
                    again = {"cmd": name, **fields} if req_id is None else {"cmd": name, **fields, "reqId": req_id}
                    connection.hold(question, again)
                    return
            found = command.handler(request, self)
            reply = found if type(found) is dict else self._go_on(connection, command, found, req_id)
            if reply is PARKED:
                if engine.index.woken:
                    engine.settle(self.now)
                return
            payload = codec.reply(reply, req_id)
            if command.reveals and session.subscription is None:
                number = self.revealed
            elif command.waits and (command.writes or engine.degraded is None):
                number = engine.journal.latest
        except Exception as error:  # noqa: BLE001 - what is no refusal is logged there
            payload = self._refused(command, error, req_id)
        self._reply(connection, payload, number)

    def _refused(self, command: Command, error: Exception, req_id: bytes | None) -> bytes:
        if isinstance(error, CommandError):
            return codec.refusal(str(error), req_id)
        log.error("%s failed", command.name, exc_info=error)
        return codec.refusal("Internal server error", req_id)

    def _reply(self, connection: Any, payload: bytes, number: int) -> None:
        """Send a reply once batch `number` is durable, and serve whom the command has woken."""
        engine = self.engine
        frame = framed(payload)
        if not engine.journal.attach(number, (connection, frame)):
            connection.send(frame)
        if engine.index.woken:
            engine.settle(self.now)

    def _go_on(self, connection: Any, command: Command, turns: Any, req_id: bytes | None) -> dict[str, Any]:
        """A long command: its reply, or PARKED when others have waited long enough and the rest comes later."""
        until = time.monotonic() + _TURN
        try:
            while time.monotonic() < until:
                next(turns)
        except StopIteration as over:
            return over.value  # type: ignore[no-any-return]
        connection.give_way(lambda: self._resume(connection, command, turns, req_id))
        return PARKED

    def _resume(self, connection: Any, command: Command, turns: Any, req_id: bytes | None) -> bool:
        """The next turn of a long command. False: it is not over yet."""
        engine = self.engine
        if command.writes and engine.degraded is not None:
            connection.give_way(lambda: self._resume(connection, command, turns, req_id))
            return False
        self.session = connection.session
        self._connection = connection
        self._req_id = req_id
        self.now = self.clock()
        try:
            reply = self._go_on(connection, command, turns, req_id)
            if reply is PARKED:
                if engine.index.woken:
                    engine.settle(self.now)
                return False
            payload = codec.reply(reply, req_id)
        except Exception as error:  # noqa: BLE001 - what is no refusal is logged there
            payload = self._refused(command, error, req_id)
        waits = command.writes or engine.degraded is None
        self._reply(connection, payload, engine.journal.latest if waits else 0)
        return True

    def park(self, *, pull: bool = False) -> Answer:
        """Keep the running request open (core 1.6: it occupies one of the connection's 50 places)."""
        connection = self._connection
        req_id = self._req_id
        connection.parked += 1

        def answer(fields: dict[str, Any], revealed: int | None = None) -> None:
            connection.parked -= 1
            frame = framed(codec.reply(fields, req_id))
            journal = self.engine.journal
            number = journal.latest if revealed is None or connection.session.subscription is not None else revealed
            if self.engine.degraded is not None and not fields.get("job") and not fields.get("jobs"):
                number = 0
            if not journal.attach(number, (connection, frame)):
                connection.send(frame)
            if connection.backlog:
                connection.server.later(connection.work_off)

        return answer

    def _auth(self, connection: Any, token: Any, req_id: bytes | None) -> None:
        given = token.encode() if type(token) is str else b""
        found = False
        for known in self.tokens:
            found |= hmac.compare_digest(given, known)
        if found:
            connection.authenticated = True
            connection.send(framed(codec.reply({}, req_id)))
            return
        connection.failed_auths += 1
        connection.send(framed(codec.refusal("Invalid token", req_id)))
        if connection.failed_auths >= 10:
            connection.finish()


def _is_text(packed: bytes | None) -> bool:
    return packed is not None and (0xA0 <= packed[0] <= 0xBF or packed[0] in (0xD9, 0xDA, 0xDB))


def read(payload: bytes) -> dict[str, Any] | bytes:
    """The fields of a command, or the reply to bytes that are none."""
    try:
        return codec.read_command(payload)
    except BadRequest as error:
        return codec.refusal(str(error))
