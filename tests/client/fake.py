"""A scripted peer of the protocol: answers, stays silent or hangs up as a test says."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from typing import Any, Self

import msgpack

#: What a script returns for a command: the reply's fields, or one of the two below.
Answer = dict[str, Any] | object
SILENT = object()
HANG_UP = object()

Script = Callable[[dict[str, Any], "Peer"], Answer]

PATIENCE = 10.0  # seconds for what takes milliseconds


def frame(value: Any) -> bytes:
    payload = msgpack.packb(value)
    return len(payload).to_bytes(4, "big") + payload


class Peer:
    """One accepted connection; `number` counts from 1."""

    def __init__(self, sock: socket.socket, number: int) -> None:
        self.sock = sock
        self.number = number
        self.names: list[str] = []  # of the commands it got

    def reply(self, command: dict[str, Any], **fields: Any) -> None:
        """Answer a command later."""
        self.sock.sendall(frame({"ok": True, **fields, "reqId": command["reqId"]}))

    def hang_up(self) -> None:
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)
        self.sock.close()


class Fake:
    """Listens on a free port and keeps every command it got, in order."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.commands: list[dict[str, Any]] = []
        self.peers: list[Peer] = []
        self.changed = threading.Condition()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.url = f"gqueue://127.0.0.1:{self.port}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = self._listener.accept()
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                with self.changed:
                    peer = Peer(sock, len(self.peers) + 1)
                    self.peers.append(peer)
                    self.changed.notify_all()
                threading.Thread(target=self._serve, args=(peer,), daemon=True).start()

    def _serve(self, peer: Peer) -> None:
        data = b""
        with contextlib.suppress(OSError):
            while chunk := peer.sock.recv(65536):
                data += chunk
                while len(data) >= 4 and len(data) >= 4 + (size := int.from_bytes(data[:4], "big")):
                    command = msgpack.unpackb(data[4 : 4 + size], ext_hook=lambda code, _: None)
                    data = data[4 + size :]
                    with self.changed:
                        self.commands.append(command)
                        peer.names.append(command["cmd"])
                        self.changed.notify_all()
                    answer = self.script(command, peer)
                    if answer is HANG_UP:
                        peer.hang_up()
                        return
                    if isinstance(answer, dict):
                        peer.sock.sendall(frame({"ok": True, **answer, "reqId": command.get("reqId")}))

    def names(self) -> list[str]:
        return [command["cmd"] for command in self.commands]

    def until(self, probe: Callable[[], Any]) -> Any:
        """Wait for a command or a connection that makes `probe` true."""
        with self.changed:
            assert self.changed.wait_for(probe, PATIENCE), self.names()
            return probe()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for peer in self.peers:
            peer.hang_up()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
