"""A real gqueue-server as a process of its own, and a plain client that shows every frame as it came."""

from __future__ import annotations

import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import msgpack

_STOLEN = ("GQUEUE_", "BUNQUEUE_", "AUTH_TOKENS", "TCP_", "HTTP_", "RATE_LIMIT", "DATA_PATH", "SQLITE_PATH", "TLS_")


class Broker:
    """One broker. `storage` is "memory", "sqlite" (a file in `folder`) or a URL."""

    def __init__(
        self,
        storage: str = "memory",
        folder: Path | None = None,
        args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
    ) -> None:
        urls = {"memory": "memory://", "sqlite": f"sqlite:///{folder}/gqueue.db"}
        self.storage = urls.get(storage, storage)
        self.args = list(args)
        self.env = {name: value for name, value in os.environ.items() if not name.startswith(_STOLEN)}
        self.env |= {"PYTHONPATH": str(Path(__file__).parent.parent)} | dict(env or {})
        self.host = "127.0.0.1"
        self.port = 0
        self.pid = 0
        self.log = ""
        self._process: subprocess.Popen[str] | None = None
        self._wires: list[Wire] = []

    @property
    def url(self) -> str:
        return f"gqueue://{self.host}:{self.port}"

    def start(self) -> Broker:
        """Returns when the port answers."""
        command = [
            sys.executable,
            "-m",
            "gqueue.server",
            "--host",
            self.host,
            "--port",
            str(self.port),
            "--storage",
            self.storage,
        ]
        process = subprocess.Popen(
            [*command, *self.args], env=self.env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        self._process = process
        self.pid = process.pid
        weakref.finalize(self, _end, process)
        assert process.stdout is not None
        assert process.stderr is not None
        threading.Thread(target=self._read_log, args=(process.stderr,), daemon=True).start()
        for line in process.stdout:
            if line.startswith("listening "):
                self.port = int(line.rsplit(":", 1)[1])
                return self
        process.wait(10)
        raise RuntimeError(f"the broker did not start (exit code {process.returncode}): {self.log}")

    def _read_log(self, stream: Any) -> None:
        for line in stream:
            self.log += line

    def kill(self) -> None:
        """SIGKILL: no goodbye."""
        assert self._process is not None
        self._process.send_signal(signal.SIGKILL)
        self._process.wait(10)

    def wait(self, timeout: float = 40) -> int:
        """Until it ends by itself; the exit code."""
        assert self._process is not None
        return self._process.wait(timeout)

    def terminate(self, timeout: float = 40) -> int:
        """SIGTERM; the exit code."""
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        return self._process.wait(timeout)

    def restart(self, how: str = "kill") -> Broker:
        """Stop and start on the same store and port."""
        if how == "kill":
            self.kill()
        else:
            assert self.terminate() == 0
        return self.start()

    def connect(self) -> Wire:
        wire = Wire(self.host, self.port)
        self._wires.append(wire)
        return wire

    def close(self) -> None:
        for wire in self._wires:
            wire.close()
        if self._process is not None and self._process.poll() is None:
            self.kill()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()


def _end(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        process.kill()
        process.wait(10)


class Pending:
    """A command that was sent; its reply can be asked for once."""

    def __init__(self, wire: Wire, req_id: str, *, own: bool) -> None:
        self.wire = wire
        self.req_id = req_id
        self.own = own

    def result(self, timeout: float = 10) -> dict[str, Any]:
        """The reply; with its reqId only if the command had one of its own. Raises TimeoutError."""
        reply = self.wire._await(lambda: self.wire._replies.pop(self.req_id, None), timeout)
        if not self.own:
            del reply["reqId"]
        return reply


class Wire:
    """One connection. Replies are matched by reqId; everything else is an event or an uncorrelated frame."""

    def __init__(self, host: str, port: int) -> None:
        self.sock = socket.create_connection((host, port), timeout=10)
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._count = 0
        self._buffer = b""
        self._awaited: set[Any] = set()
        self._replies: dict[Any, dict[str, Any]] = {}
        self._events: deque[dict[str, Any]] = deque()
        self._loose: deque[Any] = deque()
        self._over = False

    # ---------------------------------------------------------------- out

    def _next_id(self) -> str:
        self._count += 1
        return f"wire-{self._count}"

    def raw(self, data: bytes) -> None:
        """Bytes as they are."""
        self.sock.settimeout(30)
        self.sock.sendall(data)

    def begin(self, commands: Sequence[Mapping[str, Any]]) -> list[Pending]:
        """All in one write, without waiting. A command keeps a reqId of its own."""
        frames, pending = [], []
        for command in commands:
            req_id = command.get("reqId") or self._next_id()
            self._awaited.add(req_id)
            payload = msgpack.packb({**command, "reqId": req_id})
            frames.append(struct.pack(">I", len(payload)) + payload)
            pending.append(Pending(self, req_id, own="reqId" in command))
        self.raw(b"".join(frames))
        return pending

    def start(self, cmd: str, **fields: Any) -> Pending:
        """Send a command without waiting."""
        return self.begin([{"cmd": cmd, **fields}])[0]

    def send(self, cmd: str, **fields: Any) -> dict[str, Any]:
        """Send a command; its reply without the reqId."""
        return self.start(cmd, **fields).result(30)

    def pipeline(self, commands: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """All in one write; the replies in order."""
        return [pending.result(30) for pending in self.begin(commands)]

    # ---------------------------------------------------------------- in

    def _await(self, look: Any, timeout: float) -> Any:
        deadline = time.monotonic() + timeout
        while True:
            found = look()
            if found is not None:
                return found
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError(f"nothing within {timeout} s")
            self._read(left)

    def _read(self, timeout: float) -> None:
        if self._over:
            raise ConnectionError("the broker closed the connection")
        self.sock.settimeout(timeout)
        try:
            chunk = self.sock.recv(1 << 18)
        except TimeoutError:
            raise TimeoutError(f"nothing within {timeout:.1f} s") from None
        except ConnectionError:
            chunk = b""
        if not chunk:
            self._over = True
            return
        self._buffer += chunk
        while len(self._buffer) >= 4:
            size = int.from_bytes(self._buffer[:4], "big")
            if len(self._buffer) < 4 + size:
                break
            payload, self._buffer = self._buffer[4 : 4 + size], self._buffer[4 + size :]
            self._sort(msgpack.unpackb(payload, strict_map_key=False, ext_hook=lambda _code, _data: None))

    def _sort(self, value: Any) -> None:
        if isinstance(value, dict) and value.get("type") == "event":
            self._events.append(value["event"])
        elif isinstance(value, dict) and isinstance(value.get("reqId"), str) and value["reqId"] in self._awaited:
            self._awaited.discard(value["reqId"])
            self._replies[value["reqId"]] = value
        else:
            self._loose.append(value)

    def recv(self, timeout: float = 10) -> Any:
        """The next frame that answers no reqId of ours."""
        return self._await(lambda: self._loose.popleft() if self._loose else None, timeout)

    def event(self, timeout: float = 10, **match: Any) -> dict[str, Any]:
        """The next event that has these fields; others before it are dropped."""

        def look() -> dict[str, Any] | None:
            while self._events:
                event = self._events.popleft()
                if all(event.get(name) == value for name, value in match.items()):
                    return event
            return None

        found: dict[str, Any] = self._await(look, timeout)
        return found

    def closed(self, timeout: float = 10) -> bool:
        """Whether the broker closes the connection in time."""
        deadline = time.monotonic() + timeout
        while not self._over:
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            try:
                self._read(left)
            except TimeoutError:
                return False
        return True

    def close(self) -> None:
        self.sock.close()

    def abort(self) -> None:
        """Close with a reset."""
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.sock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---------------------------------------------------------------- shorthands

    def push(self, queue: str, data: Any = None, **options: Any) -> str:
        options.setdefault("name", "job")
        reply = self.send("PUSH", queue=queue, data=data, **options)
        assert reply["ok"], reply
        id: str = reply["id"]
        return id

    def pull(self, queue: str, **options: Any) -> dict[str, Any] | None:
        reply = self.send("PULL", queue=queue, **options)
        assert reply["ok"], reply
        job: dict[str, Any] | None = reply["job"]
        return job

    def state(self, id: str) -> str:
        state: str = self.send("GetState", id=id)["state"]
        return state

    def counts(self, queue: str) -> dict[str, int]:
        counts: dict[str, int] = self.send("GetJobCounts", queue=queue)["counts"]
        return counts

    def job(self, id: str) -> dict[str, Any]:
        reply = self.send("GetJob", id=id)
        assert reply["ok"], reply
        job: dict[str, Any] = reply["job"]
        return job
