"""A process that commits: `python -m gqueue.storage.writer SOCKET LOCK OPTIONS`, started by the server.

SOCKET and LOCK are descriptors: of the socket that brings batches, and of the lock of the store, which stays held for
as long as a commit may be under way (performance 4). OPTIONS are the URL and the options of the strategy, as JSON.
A message is four bytes of length and that many of MessagePack: a packed `Batch`, or nothing as the goodbye. The answer
to each, and to the start, is [] or [reason, text].
"""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import sys
from functools import partial

import msgpack

from gqueue.storage.base import Batch, Storage, StorageError, attempt, open_storage

HEADER = struct.Struct(">I")


def message(payload: bytes) -> bytes:
    """A payload with its length."""
    return HEADER.pack(len(payload)) + payload


def answer(error: StorageError | None) -> bytes:
    """What the parent is told of a batch."""
    return message(msgpack.packb([] if error is None else [error.reason, str(error)]))


def outcome(payload: bytes) -> StorageError | None:
    """An answer, read."""
    told = msgpack.unpackb(payload)
    return StorageError(*told) if told else None


def _read(sock: socket.socket, size: int) -> bytearray | None:
    """`size` bytes; None when the parent has gone, and with it everybody who waits for an answer."""
    data = bytearray(size)
    view = memoryview(data)
    at = 0
    while at < size:
        got = sock.recv_into(view[at:])
        if not got:
            return None
        at += got
    return data


def _commit(storage: Storage, payload: bytes) -> None:
    storage.commit(Batch.unpack(payload))


def serve(sock: socket.socket, storage: Storage) -> None:
    """Commit what comes until the goodbye, or until the parent is gone."""
    failed = attempt(storage.open)
    sock.sendall(answer(failed))
    while failed is None and (head := _read(sock, HEADER.size)) is not None:
        payload = _read(sock, HEADER.unpack(head)[0])
        if payload is None:
            return
        if not payload:
            sock.sendall(answer(attempt(storage.close)))
            return
        sock.sendall(answer(attempt(partial(_commit, storage, bytes(payload)))))


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):  # they are for the parent; this process ends after its last batch
        signal.signal(number, signal.SIG_IGN)
    options = json.loads(sys.argv[3])
    storage = open_storage(options.pop("url"), **options, lock_fd=int(sys.argv[2]))
    sock = socket.socket(fileno=int(sys.argv[1]))
    sock.setblocking(True)  # the parent's loop has made the pair non-blocking
    try:
        serve(sock, storage)
    except OSError:
        pass
    finally:
        os._exit(0)  # a close would checkpoint, and a new broker may be waiting for the lock


if __name__ == "__main__":
    main()
