"""How fast the broker is: fresh servers, interleaved runs, each verified, figures as ratios within one repetition.

    scripts/bench.py --quick
    scripts/bench.py --server "peer=some-server --port {port} --data {data}" --repeat 5 --json runs.json
    scripts/bench.py --depths 1000,100000,1000000 --mode fsync
    scripts/bench.py --recovery 1000000 --mode fsync

`CxD` is C connections with D requests in flight. A run that does not verify (each reply ok, each job delivered exactly
once, nothing left over) has no figure, and neither has one whose load program was busy for over 80 % of the time.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import click
from load import Refused, Wire
from tabulate import tabulate

HERE = Path(__file__).resolve().parent
OWN = f"{shlex.quote(sys.executable)} -m gqueue.server --port {{port}} --log-level error --storage "
#: The broker's own modes, by name.
MODES = {
    "memory": OWN + "memory://",
    "commit": OWN + "sqlite:///{data} --durability commit --writer thread",
    "fsync": OWN + "sqlite:///{data} --writer thread",
    "fsync-process": OWN + "sqlite:///{data} --writer process",
}
_BUSY = 0.8  # share of the clock that the load program may use
_PREFILL = {"kind": "pushb", "connections": 2, "depth": 4, "batch": 100}
_DRAIN = {"kind": "take", "connections": 2, "depth": 2, "batch": 100}


@dataclass(frozen=True)
class Workload:
    """What is measured: one order for the load program, or a `beside` that runs with it."""

    name: str
    order: dict[str, Any]
    count: int
    beside: dict[str, Any] | None = None  # the side that takes what `order` pushes
    quick: bool = False


def _load(kind: str, shape: str, **more: Any) -> dict[str, Any]:
    connections, _, depth = shape.partition("x")
    return {"kind": kind, "connections": int(connections), "depth": int(depth), "batch": 0, **more}


WORKLOADS = (
    Workload("PUSH 1x1", _load("push", "1x1"), 2_000),
    Workload("PUSH 16x1", _load("push", "16x1"), 16_000),
    Workload("PUSH 4x64", _load("push", "4x64"), 60_000, quick=True),
    Workload("PUSH 4x64 1KiB", _load("push", "4x64", payload=1024), 40_000),
    Workload("PUSHB 100 2x4", _load("pushb", "2x4", batch=100), 120_000, quick=True),
    Workload("PULL+ACK 1x1", _load("take", "1x1"), 2_000),
    Workload("PULL+ACK 16x1", _load("take", "16x1"), 10_000),
    Workload("PULL+ACK 4x8", _load("take", "4x8"), 24_000, quick=True),
    Workload("PULLB+ACKB 100 2x2", _load("take", "2x2", batch=100), 80_000, quick=True),
    Workload("mixed 4x16 4x8", _load("push", "4x16"), 24_000, _load("take", "4x8", wait=True)),
    Workload("mixed 100", _load("pushb", "2x4", batch=100), 80_000, _load("take", "2x2", batch=100, wait=True)),
    Workload("GetJob 4x32", _load("get", "4x32"), 40_000),
    Workload("delivery 500/s", _load("paced", "1x1", rate=500), 1_000, _load("take", "4x1", wait=True), quick=True),
    Workload("delivery 2000/s", _load("paced", "1x1", rate=2000), 4_000, _load("take", "4x2", wait=True)),
)


@dataclass
class Server:
    """One server process on a fresh data file."""

    name: str
    command: str
    warm: float  # seconds of warm-up
    folder: Any = field(default_factory=lambda: tempfile.TemporaryDirectory(prefix="bench-"))
    port: int = 0
    process: subprocess.Popen[bytes] | None = None
    started_in: float = 0.0  # s until the port answered

    def start(self) -> Self:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        words = shlex.split(self.command.format(port=self.port, data=self.data))
        began = time.monotonic()
        quiet = subprocess.DEVNULL
        self.process = subprocess.Popen(words, cwd=self.folder.name, stdout=quiet, stderr=quiet)
        while True:
            try:
                Wire(self.port).ask({"cmd": "PULL", "queue": "nothing-here", "reqId": "00000000"})
            except (OSError, Refused):
                if self.process.poll() is not None:
                    raise click.ClickException(f"{self.name} ended with {self.process.returncode}: {words}") from None
                if time.monotonic() - began > 180:
                    raise click.ClickException(f"{self.name} does not answer on port {self.port}") from None
                time.sleep(0.02)
            else:
                self.started_in = time.monotonic() - began
                return self

    @property
    def data(self) -> str:
        return f"{self.folder.name}/data.db"

    def kill(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def close(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(15)
            except subprocess.TimeoutExpired:
                self.kill()
        self.folder.cleanup()

    # ------------------------------------------------------------ what it costs

    def _pids(self) -> list[int]:
        assert self.process is not None
        found, more = [], [self.process.pid]
        while more:
            pid = more.pop()
            found.append(pid)
            for children in Path(f"/proc/{pid}/task").glob("*/children"):
                more += map(int, children.read_text().split())
        return found

    def cpu(self) -> float:
        """Seconds of CPU of the process, its threads and its children."""
        total = 0
        for pid in self._pids():
            for thread in Path(f"/proc/{pid}/task").iterdir():
                total += int((thread / "schedstat").read_text().split()[0])
        return total / 1e9

    def rss(self) -> int:
        """Bytes in memory."""
        pages = sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in self._pids())
        return pages * os.sysconf("SC_PAGE_SIZE")


class Load:
    """The load program at work."""

    def __init__(self, server: Server, order: dict[str, Any]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "load.py")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"port": server.port, **order}) + "\n")
        self._process.stdin.flush()

    def result(self) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.close()
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        self._process.wait()
        found: dict[str, Any] = json.loads(line) if line else {"error": "the load program failed"}
        if "error" in found:
            raise Refused(found["error"])
        return found


def left_over(server: Server, queue: str) -> int:
    """Jobs of a queue that are not done."""
    counts = Wire(server.port).ask({"cmd": "GetJobCounts", "queue": queue, "reqId": "00000000"})["counts"]
    return int(sum(counts.get(state, 0) for state in ("waiting", "prioritized", "delayed", "active")))


def measure(server: Server, workload: Workload, queue: str, common: dict[str, Any]) -> dict[str, Any]:
    """One run on one queue, verified. Raises Refused."""
    base = {**common, "queue": queue, "count": workload.count}
    order = {**base, **workload.order}
    kind = order["kind"]
    if kind == "take":
        Load(server, {**base, **_PREFILL}).result()
    elif kind == "get":
        few = min(workload.count, 10_000)
        order["ids"] = Load(server, {**base, **_PREFILL, "count": few, "ids": True}).result()["ids"]
    before = server.rss()
    used = server.cpu()
    taker = None if workload.beside is None else Load(server, {**base, **workload.beside})
    found = Load(server, order).result()
    if taker is not None:
        took = taker.result()
        found = {
            **found,
            "start": min(found["start"], took["start"]) if kind != "paced" else found["start"],
            "end": max(found["end"], took["end"]),
            "cpu": max(found["cpu"], took["cpu"]),
            "lag": took["lag"],
        }
    used = server.cpu() - used
    done = {"push": found["jobs"], "pushb": found["jobs"], "get": None}.get(kind, 0) if taker is None else 0
    if done is not None:
        if (left := left_over(server, queue)) != done:
            raise Refused(f"{left} jobs are left, {done} expected")
        if done:
            Load(server, {**base, **_DRAIN, "count": done, "ordered": order.get("priorities", 1) == 1}).result()
    seconds = found["end"] - found["start"]
    if found["cpu"] > _BUSY * seconds:
        found["busy"] = True
    return found | {
        "per_second": found["jobs"] / seconds,
        "seconds": seconds,
        "cpu_us": used / found["jobs"] * 1e6,
        "rss": [before, server.rss()],
    }


def run(server: Server, workload: Workload, common: dict[str, Any]) -> dict[str, Any]:
    """A fresh server, its warm-up, one measured run."""
    server.start()
    try:
        small = replace(workload, count=max(200, workload.count // 4))
        warm_until = time.monotonic() + server.warm
        n = 0
        while n == 0 or time.monotonic() < warm_until:
            measure(server, small, f"warm-{n}", common)
            n += 1
        return measure(server, workload, "counted", common)
    except Refused as error:
        return {"error": str(error)}
    finally:
        server.close()


# ---------------------------------------------------------------- tables


def spread(values: list[float], digits: int = 0) -> str:
    low, middle, high = min(values), statistics.median(values), max(values)
    if len(values) == 1:
        return f"{middle:,.{digits}f}"
    return f"{middle:,.{digits}f} ({low:,.{digits}f}-{high:,.{digits}f})"


def table(runs: list[dict[str, Any]], names: list[str]) -> str:
    """Workload by workload, server by server."""
    by: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    base: dict[tuple[str, int], float] = {}
    for one in runs:
        by[one["workload"], one["server"]].append(one)
        if one["server"] == names[0] and "error" not in one:
            base[one["workload"], one["repetition"]] = figure(one)
    rows = []
    for (workload, name), all_runs in by.items():
        good = [one for one in all_runs if "error" not in one]
        if not good:
            rows.append([workload, name, f"no figure: {all_runs[0]['error']}"])
            continue
        ratios = [
            figure(one) / reference
            for one in good
            if (reference := base.get((workload, one["repetition"]))) is not None
        ]
        rows.append(
            [
                workload,
                name,
                spread([one["per_second"] for one in good]),
                spread(ratios, 2) if ratios else "",
                spread([one["cpu_us"] for one in good], 1),
                _ms(good, "wait"),
                _ms(good, "lag"),
                f"{good[-1]['rss'][0] >> 20} > {good[-1]['rss'][1] >> 20}",
                "load program busy" if any(one.get("busy") for one in good) else "",
            ]
        )
    heads = [
        "workload",
        "server",
        "jobs/s",
        f"ratio to {names[0]}",
        "CPU us/job",
        "request ms",
        "delivery ms",
        "MiB",
        "",
    ]
    return str(tabulate(rows, heads, disable_numparse=True))


def figure(one: dict[str, Any]) -> float:
    """What the ratio is of: jobs/s, or the median delivery where the rate is given."""
    if one["workload"].startswith("delivery"):
        return float(one["lag"]["p50"])
    return float(one["per_second"])


def _ms(runs: list[dict[str, Any]], key: str) -> str:
    """Medians over the runs: p50 / p99 / p99.9."""
    known = [one[key] for one in runs if one.get(key)]
    if not known:
        return ""
    return " / ".join(f"{statistics.median(one[p] for one in known):.2f}" for p in ("p50", "p99", "p99.9"))


def fsync_cost(folder: str) -> str:
    """ms of an fsync of a file that grows, and of one that overwrites itself."""
    costs = []
    for grows in (True, False):
        with open(f"{folder}/fsync-{grows}", "wb", buffering=0) as file:
            file.write(bytes(1 << 20))
            os.fsync(file.fileno())
            began = time.monotonic()
            for n in range(50):
                if not grows:
                    file.seek(n * 4096)
                file.write(bytes(4096))
                os.fsync(file.fileno())
            costs.append((time.monotonic() - began) / 50 * 1000)
    return f"fsync: {costs[0]:.2f} ms while a file grows, {costs[1]:.2f} ms in place"


# ---------------------------------------------------------------- other measurements


def bench_depths(servers: list[tuple[str, str, float]], depths: list[int], common: dict[str, Any]) -> None:
    """The cost of single operations with more and more jobs queued."""
    rows = []
    shapes = {
        "PUSH 4x64": _load("push", "4x64", count=30_000),
        "PULL+ACK 4x8": _load("take", "4x8", count=15_000, limit=15_000),
        "PULLB+ACKB 100 2x2": _load("take", "2x2", batch=100, count=50_000, limit=50_000),
    }
    for name, command, _warm in servers:
        first: dict[str, float] = {}
        for depth in depths:
            server = Server(name, command, 0).start()
            try:
                base = {**common, "queue": "deep"}
                Load(server, {**base, **_PREFILL, "queue": "warm", "count": 20_000}).result()
                Load(server, {**base, **_DRAIN, "queue": "warm", "count": 20_000}).result()
                Load(server, {**base, **_PREFILL, "count": depth + 65_000}).result()
                for shape, order in shapes.items():
                    used = server.cpu()
                    found = Load(server, {**base, "first": depth + 65_000, **order}).result()
                    cost = (server.cpu() - used) / found["jobs"] * 1e6
                    base_cost = first.setdefault(shape, cost)
                    speed = found["jobs"] / (found["end"] - found["start"])
                    rows.append([name, shape, f"{depth:,}", f"{speed:,.0f}", f"{cost:.1f}", f"{cost / base_cost:.2f}"])
                rows.append([name, "memory, MiB", f"{depth:,}", f"{server.rss() >> 20:,}", "", ""])
            finally:
                server.close()
    print(tabulate(rows, ["server", "workload", "queued", "jobs/s", "CPU us/job", "ratio"], disable_numparse=True))


def bench_recovery(servers: list[tuple[str, str, float]], count: int, common: dict[str, Any]) -> None:
    """SIGKILL after `count` acknowledged pushes, and again after acknowledged ACKs: nothing missing, nothing twice."""
    rows = []
    for name, command, _warm in servers:
        if "memory" in command:
            continue
        server = Server(name, command, 0).start()
        try:
            base = {**common, "queue": "kept"}
            empty = server.rss()
            Load(server, {**base, **_PREFILL, "count": count}).result()
            full = server.rss()
            size = sum(path.stat().st_size for path in Path(server.folder.name).glob("data.db*"))
            server.kill()
            server.start()
            started, loaded = server.started_in, server.rss()
            if (left := left_over(server, "kept")) != count:
                raise Refused(f"{count} pushes acknowledged, {left} after the kill")
            done = count // 2 // 100 * 100
            Load(server, {**base, **_DRAIN, "limit": done, "count": count}).result()
            left = left_over(server, "kept")
            server.kill()
            server.start()
            if not count - done - 400 <= (after := left_over(server, "kept")) <= left:
                raise Refused(f"{left} jobs before the second kill, {after} after it")
            rows.append(
                [
                    name,
                    f"{count:,}",
                    f"{started:.1f}",
                    f"{(full - empty) / count:.0f}",
                    f"{full >> 20} / {loaded >> 20}",
                    f"{size / count:.0f}",
                ]
            )
        except Refused as error:
            rows.append([name, f"{count:,}", f"no figure: {error}"])
        finally:
            server.close()
    heads = ["server", "queued", "restart s", "bytes of memory/job", "MiB pushed / loaded", "file bytes/job"]
    print(tabulate(rows, heads, disable_numparse=True))


def bench_ping(servers: list[tuple[str, str, float]], count: int, common: dict[str, Any]) -> None:
    """Ping beside PUSHB 100 2x4."""
    rows = []
    for name, command, _warm in servers:
        server = Server(name, command, 0).start()
        try:
            pings = Load(server, {**common, "kind": "ping", "connections": 1})
            bulk = Load(server, {**common, **_PREFILL, "queue": "bulk", "count": count}).result()
            found = pings.result()
            wait = found["wait"]
            speed = bulk["jobs"] / (bulk["end"] - bulk["start"])
            rows.append(
                [name, f"{speed:,.0f}", found["jobs"], *(f"{wait[p]:.2f}" for p in ("p50", "p99", "p99.9", "max"))]
            )
        finally:
            server.close()
    print(tabulate(rows, ["server", "bulk jobs/s", "pings", "p50 ms", "p99", "p99.9", "max"], disable_numparse=True))


WORKER = """
import sys, threading, time
from gqueue import Queue, Worker
count = int(sys.argv[2])
queue = Queue("work", f"gqueue://127.0.0.1:{sys.argv[1]}")
for start in range(0, count, 1000):
    queue.add_bulk([{"name": "noop", "data": {"n": n}} for n in range(start, min(start + 1000, count))])
began = time.monotonic()
worker = Worker(queue, lambda job: None)
worker.run(burst=True)
print(count / (time.monotonic() - began))
"""


def bench_worker(servers: list[tuple[str, str, float]], count: int) -> None:
    """No-op jobs in one process with default settings."""
    rows = []
    for name, command, _warm in servers:
        if not command.startswith(OWN):
            continue
        server = Server(name, command, 0).start()
        try:
            out = subprocess.run(
                [sys.executable, "-c", WORKER, str(server.port), str(count)],
                capture_output=True,
                text=True,
                check=False,
            )
            left = left_over(server, "work")
            ok = out.returncode == 0 and left == 0
            rows.append([name, f"{float(out.stdout):,.0f}" if ok else f"no figure: {left} left, {out.stderr[-200:]}"])
        finally:
            server.close()
    print(tabulate(rows, ["server", "worker: no-op jobs/s"], disable_numparse=True))


# ---------------------------------------------------------------- command line


@click.command(help=__doc__.split("\n")[0] if __doc__ else None)
@click.option("--server", "peers", multiple=True, metavar="NAME=COMMAND", help="Another server ({port} {data} in it).")
@click.option("--mode", "modes", multiple=True, type=click.Choice(list(MODES)), help="Own modes to run. [all]")
@click.option("--only", multiple=True, metavar="TEXT", help="Workloads whose name contains this.")
@click.option("--quick", is_flag=True, help="A subset, in under a minute.")
@click.option("--repeat", default=3, show_default=True, help="Repetitions.")
@click.option("--scale", default=1.0, show_default=True, help="Times the number of jobs.")
@click.option("--payload", default=64, show_default=True, help="Bytes of each payload.")
@click.option("--priorities", default=1, show_default=True, help="How many different priorities.")
@click.option("--warm", default=3.0, show_default=True, help="Seconds of warm-up of another server.")
@click.option("--depths", metavar="N,N,…", help="Measure cost by queued jobs instead.")
@click.option("--recovery", type=int, metavar="N", help="Measure restart with N jobs instead.")
@click.option("--ping", type=int, metavar="N", help="Measure Ping beside a bulk load of N jobs instead.")
@click.option("--worker", type=int, metavar="N", help="Measure the Python worker with N no-op jobs instead.")
@click.option("--json", "json_file", type=click.Path(dir_okay=False), help="Keep every run.")
def main(
    peers: tuple[str, ...],
    modes: tuple[str, ...],
    only: tuple[str, ...],
    quick: bool,
    repeat: int,
    scale: float,
    payload: int,
    priorities: int,
    warm: float,
    depths: str | None,
    recovery: int | None,
    ping: int | None,
    worker: int | None,
    json_file: str | None,
) -> None:
    servers = [(*peer.partition("=")[::2], warm) for peer in peers]
    servers += [(mode, MODES[mode], 0.0) for mode in modes or MODES]
    common = {"payload": payload, "priorities": priorities}
    with tempfile.TemporaryDirectory() as folder:
        print(fsync_cost(folder), flush=True)
    if depths or recovery or ping or worker:
        if depths:
            bench_depths(servers, [int(depth) for depth in depths.split(",")], common)
        if recovery:
            bench_recovery(servers, recovery, common)
        if ping:
            bench_ping(servers, ping, common)
        if worker:
            bench_worker(servers, worker)
        return
    chosen = [
        replace(workload, count=max(100, int(workload.count * scale * (0.5 if quick else 1))))
        for workload in WORKLOADS
        if (not quick or workload.quick) and (not only or any(text in workload.name for text in only))
    ]
    runs: list[dict[str, Any]] = []
    for repetition in range(1 if quick else repeat):
        for workload in chosen:
            for name, command, warm_up in servers:
                found = run(Server(name, command, warm_up), workload, common)
                runs.append({"workload": workload.name, "server": name, "repetition": repetition, **found})
            print(".", end="", flush=True)
    print("\n" + table(runs, [server[0] for server in servers]))
    if json_file:
        Path(json_file).write_text(json.dumps(runs, indent=1))
    if any("error" in one for one in runs):
        sys.exit(1)


if __name__ == "__main__":
    main()
