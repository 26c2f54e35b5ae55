"""`gqueue demo`: the first thing anybody runs."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import gqueue
from gqueue import Client, Queue, Worker
from gqueue import demo as demo_module
from gqueue.demo import Broker, DemoFailed, Runs


def run(*args: str, **environment: str) -> subprocess.CompletedProcess[str]:
    root = str(Path(gqueue.__file__).resolve().parent.parent)
    paths = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    return subprocess.run(
        [sys.executable, "-m", "gqueue.cli", "demo", *args],
        capture_output=True, text=True, timeout=60, check=False, env={**os.environ, "PYTHONPATH": paths, **environment},
    )  # fmt: skip


def test_every_job_runs_exactly_once_although_the_broker_restarts() -> None:
    done = run()
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^completed +1000$", done.stdout, re.MULTILINE)
    assert "started again on the same store" in done.stdout
    assert "1000 jobs, each completed exactly once" in done.stdout
    assert done.stderr == ""


def test_the_environment_of_the_user_does_not_disturb_it(tmp_path: Path) -> None:
    done = run("--jobs", "40", "--workers", "2", GQUEUE_URL="gqueue://nowhere:1", AUTH_TOKENS="x", GQUEUE_TCP_PORT="1")
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_kept_store_holds_the_jobs(tmp_path: Path) -> None:
    done = run("--jobs", "20", "--workers", "1", "--keep", TMPDIR=str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    kept = re.search(r"^kept +(\S+)$", done.stdout, re.MULTILINE)
    assert kept
    with Broker(f"sqlite:///{kept[1]}/gqueue.db") as broker, Client(host="127.0.0.1", port=broker.port) as client:
        assert Queue("demo", client).counts()["completed"] == 20


def test_what_a_killed_demo_left_is_finished_by_another_worker(tmp_path: Path) -> None:
    """Demo, worker and broker end by SIGKILL half-way; the kept store has everything, and the task can be imported."""
    root = str(Path(gqueue.__file__).resolve().parent.parent)
    paths = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    with subprocess.Popen(
        [sys.executable, "-m", "gqueue.cli", "demo", "--jobs", "500", "--keep"],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": paths, "TMPDIR": str(tmp_path)},
    ) as process:
        seen = ""
        assert process.stdout is not None
        while "stopped after" not in seen:
            seen += process.stdout.read(1)
        os.killpg(process.pid, signal.SIGKILL)
    (folder,) = tmp_path.iterdir()
    with Broker(f"sqlite:///{folder}/gqueue.db") as broker, Client(host="127.0.0.1", port=broker.port) as client:
        q = Queue("demo", client)
        assert 0 < q.counts()["completed"] < 500
        with Worker(demo_module.queue, client=client):
            for job in q.get_jobs(["waiting", "active"], limit=500):
                assert job.result(30) == job.data["number"] ** 2
        assert q.counts()["completed"] == 500


def test_nothing_is_left_behind_otherwise(tmp_path: Path) -> None:
    assert run("--jobs", "20", TMPDIR=str(tmp_path)).returncode == 0
    assert list(tmp_path.iterdir()) == []


def test_a_broker_that_does_not_start_is_reported_with_its_own_words() -> None:
    done = run("--jobs", "10", "--storage", "nonsense://x")
    assert done.returncode == 1
    assert done.stderr.startswith("Error: the broker did not start: ")
    assert "nonsense" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_job_that_ran_twice_makes_it_fail(broker: Any, queue: str) -> None:
    """The proof itself: it must notice."""
    with Client(broker.url) as client:
        q = Queue(queue, client)
        jobs = q.add_bulk([{"name": "square", "data": {"number": number}} for number in range(3)])
        runs = Runs(3)
        for job in jobs:
            reply = client.pull(q.name, owner="tester")
            client.ack(reply["job"]["id"], reply["job"]["data"]["number"] ** 2, reply["token"])
            runs.times[job.id] += 1
        demo_module._verify(q, jobs, runs)
        runs.times[jobs[1].id] += 1
        with pytest.raises(
            DemoFailed, match=f"1 jobs are not as they must be, the first: {jobs[1].id} is completed, ran 2"
        ):
            demo_module._verify(q, jobs, runs)
        runs.times[jobs[1].id] = 1
        lost = q.add("square", {"number": 9})
        runs.times[lost.id] += 1
        with pytest.raises(DemoFailed, match="is waiting"):
            demo_module._verify(q, [*jobs, lost], runs)
        q.obliterate()
