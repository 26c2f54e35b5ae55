"""Load for scripts/bench.py: one JSON order on stdin, one JSON line of figures on stdout.

Raw sockets and frames that are encoded before the clock starts, so that what is measured is the server. Replies are
counted by their length prefix while the clock runs, and checked when it has stopped.
"""

from __future__ import annotations

import json
import re
import select
import socket
import struct
import sys
import time
from collections.abc import Callable
from typing import Any

import msgpack

_HEADER = struct.Struct(">I")
_TEXT36 = b"\xd9\x24"  # the MessagePack head of a 36-character id or token
_IDS = re.compile(rb"\xa2id\xd9\x24(.{36})", re.DOTALL)
_now = time.monotonic


class Refused(Exception):
    """The server has not done what was asked; there is no figure."""


def frame(fields: dict[str, Any]) -> bytes:
    packed = msgpack.packb(fields)
    return _HEADER.pack(len(packed)) + packed


class Wire:
    """One connection. `frames` takes whatever one recv brings."""

    def __init__(self, port: int) -> None:
        self.sock = socket.create_connection(("127.0.0.1", port))
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._rest = b""

    def frames(self) -> list[bytes]:
        chunk = self.sock.recv(1 << 18)
        if not chunk:
            raise Refused("the server closed the connection")
        data = self._rest + chunk if self._rest else chunk
        found = []
        at, end = 0, len(data)
        while at + 4 <= end:
            stop = at + 4 + _HEADER.unpack_from(data, at)[0]
            if stop > end:
                break
            found.append(data[at + 4 : stop])
            at = stop
        self._rest = data[at:]
        return found

    def ask(self, fields: dict[str, Any]) -> dict[str, Any]:
        """One request and its reply, outside of any measurement."""
        self.sock.sendall(frame(fields))
        while not (found := self.frames()):
            pass
        return _ok(found[0])


def _ok(payload: bytes) -> dict[str, Any]:
    reply: dict[str, Any] = msgpack.unpackb(payload, strict_map_key=False)
    if reply.get("ok") is not True:
        raise Refused(f"refused: {reply.get('error')}")
    return reply


class Span:
    """The time that is measured, and the CPU that this process used in it."""

    def __init__(self) -> None:
        self._cpu = time.process_time()
        self.start = _now()
        self.end = 0.0
        self.cpu = 0.0

    def stop(self) -> None:
        self.end = _now()
        self.cpu = time.process_time() - self._cpu


def each_readable(wires: list[Wire], on: Callable[[int, list[bytes], float], None], busy: Callable[[], bool]) -> None:
    """Give `on` the frames of a connection, and when they came, for as long as it is `busy`."""
    poll = select.epoll()
    of = {wire.sock.fileno(): n for n, wire in enumerate(wires)}
    for fd in of:
        poll.register(fd, select.EPOLLIN)
    while busy():
        ready = poll.poll(20)
        if not ready:
            raise Refused("no reply for 20 s")
        for fd, _ in ready:
            n = of[fd]
            found = wires[n].frames()
            if found:
                on(n, found, _now())
    poll.close()


# ---------------------------------------------------------------- streams: requests that do not depend on replies


def stream(wires: list[Wire], plans: list[list[bytes]], depth: int) -> tuple[Span, list[bytes], list[float]]:
    """Keep `depth` requests of each plan in flight; the replies, and the seconds that each request took.

    The reqId of each frame is its place in its plan, as eight digits.
    """
    sent: list[list[float]] = [[] for _ in plans]
    came: list[list[tuple[float, list[bytes]]]] = [[] for _ in plans]
    left = sum(map(len, plans))

    def on(n: int, found: list[bytes], at: float) -> None:
        nonlocal left
        left -= len(found)
        came[n].append((at, found))
        times = sent[n]
        upto = len(times)
        more = plans[n][upto : upto + len(found)]
        if more:
            times += [_now()] * len(more)
            wires[n].sock.sendall(b"".join(more))

    span = Span()
    for n, wire in enumerate(wires):
        first = plans[n][:depth]
        sent[n] += [span.start] * len(first)
        if first:
            wire.sock.sendall(b"".join(first))
    each_readable(wires, on, lambda: left > 0)
    span.stop()
    replies: list[bytes] = []
    waits: list[float] = []
    for n, chunks in enumerate(came):
        for at, found in chunks:
            for payload in found:
                replies.append(payload)
                waits.append(at - sent[n][int(_req_id(payload))])
    return span, replies, waits


def _req_id(payload: bytes) -> bytes:
    at = payload.rfind(b"\xa5reqId\xa8")
    if at >= 0:
        return payload[at + 7 : at + 15]
    return str(_ok(payload)["reqId"]).encode()


def spread(total: int, wires: int, make: Callable[[int, str], bytes]) -> list[list[bytes]]:
    """`make(n, reqId)` for n in range(total), dealt out to the connections."""
    plans: list[list[bytes]] = [[] for _ in range(wires)]
    for n in range(total):
        plan = plans[n % wires]
        plan.append(make(n, f"{len(plan):08}"))
    return plans


def body(n: int, order: dict[str, Any]) -> dict[str, Any]:
    return {"n": n, "p": "x" * order["payload"]}


def options(n: int, order: dict[str, Any]) -> dict[str, Any]:
    return {"priority": n % order["priorities"]} if order["priorities"] > 1 else {}


def push(order: dict[str, Any], wires: list[Wire]) -> dict[str, Any]:
    """PUSH: one job a request."""
    queue, count, first = order["queue"], order["count"], order.get("first", 0)
    plans = spread(
        count,
        len(wires),
        lambda n, req: frame(
            {
                "cmd": "PUSH",
                "queue": queue,
                "data": body(first + n, order),
                **options(n, order),
                "reqId": req,
            }
        ),
    )
    span, replies, waits = stream(wires, plans, order["depth"])
    ids = {_ok(reply)["id"] for reply in replies}
    if len(ids) != count:
        raise Refused(f"{count} jobs pushed, {len(ids)} ids returned")
    return figures(span, count, count, waits) | {"ids": sorted(ids) if order.get("ids") else None}


def pushb(order: dict[str, Any], wires: list[Wire]) -> dict[str, Any]:
    """PUSHB: `batch` jobs a request."""
    queue, batch, first = order["queue"], order["batch"], order.get("first", 0)
    requests = -(-order["count"] // batch)
    count = requests * batch

    def make(n: int, req: str) -> bytes:
        jobs = [{"data": body(first + n * batch + i, order), **options(i, order)} for i in range(batch)]
        return frame({"cmd": "PUSHB", "queue": queue, "jobs": jobs, "reqId": req})

    span, replies, waits = stream(wires, spread(requests, len(wires), make), order["depth"])
    ids = {id for reply in replies for id in _ok(reply)["ids"]}
    if len(ids) != count:
        raise Refused(f"{count} jobs pushed, {len(ids)} ids returned")
    return figures(span, requests, count, waits) | {"ids": sorted(ids) if order.get("ids") else None}


def get_job(order: dict[str, Any], wires: list[Wire]) -> dict[str, Any]:
    """GetJob of the jobs with these `ids`."""
    ids = order["ids"]
    count = order["count"]
    plans = spread(
        count,
        len(wires),
        lambda n, req: frame({"cmd": "GetJob", "id": ids[n * 7919 % len(ids)], "reqId": req}),
    )
    span, replies, waits = stream(wires, plans, order["depth"])
    for reply in replies[:: max(1, count // 5000)]:
        if _ok(reply)["job"]["id"] not in ids:
            raise Refused("GetJob answered another job")
    return figures(span, count, count, waits)


def ping(order: dict[str, Any], wires: list[Wire]) -> dict[str, Any]:
    """Ping, about one a ms, until stdin closes."""
    request = frame({"cmd": "Ping", "reqId": "00000000"})
    waits = []
    span = Span()
    while not select.select([sys.stdin], [], [], 0.001)[0]:
        at = _now()
        wires[0].sock.sendall(request)
        while not (found := wires[0].frames()):
            pass
        waits.append(_now() - at)
        _ok(found[0])
    span.stop()
    return figures(span, len(waits), len(waits), waits)


# ---------------------------------------------------------------- lanes: a pull, then its ack, then the next pull


class Taken:
    """What has been delivered: replies as they came, decoded when the clock has stopped."""

    def __init__(self) -> None:
        self.replies: list[tuple[float, bytes]] = []
        self.acks: list[bytes] = []
        self.waits: list[float] = []
        self.acked = 0

    def verify(self, order: dict[str, Any]) -> list[float]:
        """Each job once; seconds from push to delivery where the data says when it was pushed."""
        seen: set[int] = set()
        ids: set[str] = set()
        lags = []
        jobs = 0
        for at, payload in self.replies:
            reply = _ok(payload)
            for job in reply["jobs"] if "jobs" in reply else [reply["job"]]:
                jobs += 1
                seen.add(job["data"]["n"])
                ids.add(job["id"])
                if "t" in job["data"]:
                    lags.append(at - job["data"]["t"])
        first = order.get("first", 0)
        expected = order["count"]
        if not jobs == len(seen) == len(ids) == expected:
            raise Refused(f"{expected} jobs expected, {jobs} deliveries of {len(seen)} jobs with {len(ids)} ids")
        if order.get("ordered", True) and seen != set(range(first, first + expected)):
            raise Refused("other jobs than the pushed ones were delivered")
        for payload in self.acks:
            _ok(payload)
        return lags


def _map(*parts: bytes) -> bytes:
    packed = b"".join(parts)
    return _HEADER.pack(len(packed)) + packed


def _req(tag: str) -> bytes:
    return b"\xa5reqId\xa4" + tag.encode()


def _array(count: int) -> bytes:
    return bytes([0x90 + count]) if count < 16 else b"\xdc" + count.to_bytes(2, "big")


def _ack_one(payload: bytes, tag: str) -> tuple[bytes, int]:
    """The ACK of a PULL's reply, and how many jobs it holds."""
    found = _IDS.search(payload)
    at = payload.rfind(b"\xa5token" + _TEXT36)
    if found is not None and at >= 0:
        token = payload[at + 6 : at + 44]
        return _map(b"\x84\xa3cmd\xa3ACK\xa2id\xd9\x24", found[1], b"\xa5token", token, _req(tag)), 1
    reply = _ok(payload)
    if reply.get("job") is None:
        return b"", 0
    return frame({"cmd": "ACK", "id": reply["job"]["id"], "token": reply["token"], "reqId": tag}), 1


def _ack_many(payload: bytes, tag: str) -> tuple[bytes, int]:
    """The ACKB of a PULLB's reply, and how many jobs it holds."""
    ids = _IDS.findall(payload)
    at = payload.rfind(b"\xa6tokens")
    if ids and at >= 0:
        head = _array(len(ids))
        tokens = payload[at + 7 : at + 7 + len(head) + 38 * len(ids)]
        if tokens.startswith(head) and tokens.count(_TEXT36) >= len(ids):
            packed = b"".join([_TEXT36 + id for id in ids])
            return _map(b"\x84\xa3cmd\xa4ACKB\xa3ids", head, packed, b"\xa6tokens", tokens, _req(tag)), len(ids)
    reply = _ok(payload)
    jobs = reply["jobs"]
    if not jobs:
        return b"", 0
    ids = [job["id"] for job in jobs]
    return frame({"cmd": "ACKB", "ids": ids, "tokens": reply["tokens"], "reqId": tag}), len(jobs)


def take(order: dict[str, Any], wires: list[Wire]) -> dict[str, Any]:
    """PULL+ACK, or PULLB+ACKB with a `batch`: each lane pulls, acknowledges, pulls again, until `count` are done."""
    batch, count, depth = order["batch"], order["count"], order["depth"]
    wait = {"timeout": 5000} if order.get("wait") else {}
    ack = _ack_many if batch else _ack_one
    sizes = {"count": batch} if batch else {}
    pulls = [
        frame(
            {
                "cmd": "PULLB" if batch else "PULL",
                "queue": order["queue"],
                "owner": "bench",
                **sizes,
                **wait,
                "reqId": f"P{k:03}",
            }
        )
        for k in range(depth)
    ]
    taken = Taken()
    began = [[0.0] * depth for _ in wires]
    lanes = len(wires) * depth

    def on(n: int, found: list[bytes], at: float) -> None:
        nonlocal lanes
        out = []
        mine = began[n]
        for payload in found:
            tag = payload[payload.rfind(b"\xa5reqId\xa4") + 7 :][:4]
            k = int(tag[1:])
            taken.waits.append(at - mine[k])
            mine[k] = at
            if tag[:1] == b"P":
                request, jobs = ack(payload, f"A{k:03}")
                if jobs:
                    taken.replies.append((at, payload))
                    taken.acked += jobs
                    out.append(request)
                elif wait and taken.acked < count:
                    out.append(pulls[k])
                else:
                    lanes -= 1
            else:
                taken.acks.append(payload)
                if taken.acked < count or not wait:
                    out.append(pulls[k])
                else:
                    lanes -= 1
        if out:
            wires[n].sock.sendall(b"".join(out))

    def busy() -> bool:
        return lanes > 0 if not wait else len(taken.acks) < len(taken.replies) or taken.acked < count

    span = Span()
    for n, wire in enumerate(wires):
        began[n] = [span.start] * depth
        wire.sock.sendall(b"".join(pulls))
    if limit := order.get("limit"):  # of a queue that holds more
        each_readable(wires, on, lambda: taken.acked < limit)
        span.stop()
        return figures(span, len(taken.waits), taken.acked, taken.waits)
    each_readable(wires, on, busy)
    span.stop()
    lags = taken.verify(order)
    return figures(span, len(taken.waits), taken.acked, taken.waits) | {"lag": percentiles(lags)}


def paced(order: dict[str, Any], wires: list[Wire]) -> dict[str, Any]:
    """PUSH at `rate` jobs/s, each with the time of its push in its data; replies are read beside it."""
    wire = wires[0]
    count, rate = order["count"], order["rate"]
    stamp = 12345.678901
    frames = [
        frame(
            {
                "cmd": "PUSH",
                "queue": order["queue"],
                "data": {"t": stamp, **body(n, order)},
                "reqId": f"{n:08}",
            }
        )
        for n in range(count)
    ]
    at = frames[0].index(struct.pack(">d", stamp))
    sent: list[float] = []
    waits: list[float] = []
    poll = select.poll()
    poll.register(wire.sock, select.POLLIN)
    span = Span()
    start = span.start
    while len(waits) < count:
        if len(sent) < count and start + len(sent) / rate <= _now():
            text = frames[len(sent)]
            sent.append(_now())
            wire.sock.sendall(text[:at] + struct.pack(">d", sent[-1]) + text[at + 8 :])
        ahead = start + len(sent) / rate - _now() if len(sent) < count else 20
        if poll.poll(max(0, ahead * 1000)):
            came = _now()
            for payload in wire.frames():
                _ok(payload)
                waits.append(came - sent[int(_req_id(payload))])
    span.stop()
    return figures(span, count, count, waits)


# ---------------------------------------------------------------- figures


def percentiles(values: list[float]) -> dict[str, float] | None:
    """In ms."""
    if not values:
        return None
    values = sorted(values)
    last = len(values) - 1
    return {f"p{p}": values[min(last, int(len(values) * p / 100))] * 1000 for p in (50, 99, 99.9)} | {
        "max": values[-1] * 1000
    }


def figures(span: Span, requests: int, jobs: int, waits: list[float]) -> dict[str, Any]:
    return {
        "start": span.start,
        "end": span.end,
        "cpu": span.cpu,
        "requests": requests,
        "jobs": jobs,
        "wait": percentiles(waits),
    }


KINDS = {"push": push, "pushb": pushb, "take": take, "get": get_job, "ping": ping, "paced": paced}


def main() -> None:
    order = json.loads(sys.stdin.readline())
    wires = [Wire(order["port"]) for _ in range(order["connections"])]
    try:
        result = KINDS[order["kind"]](order, wires)
    except Refused as error:
        result = {"error": str(error)}
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
