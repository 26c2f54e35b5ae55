"""The `gqueue` program: verbs, output forms, exit codes, and one clear line for everything that can go wrong."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from gqueue import Client, Queue, __version__
from gqueue.cli import cli, main

NAMES = (
    "GQUEUE_URL", "GQUEUE_HOST", "GQUEUE_PORT", "GQUEUE_TCP_PORT", "GQUEUE_TOKEN", "HOST", "TCP_PORT", "BUNQUEUE_HOST",
    "BUNQUEUE_TCP_PORT", "BUNQUEUE_TOKEN", "BQ_HOST", "BQ_TCP_PORT", "BQ_TOKEN",
)  # fmt: skip


class Ran(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Run = Callable[..., Ran]


@pytest.fixture
def bare(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """The program without any broker in its environment."""
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)

    def run(*args: str) -> Ran:
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main(args)
        captured = capsys.readouterr()
        return Ran(int(ended.value.code or 0), captured.out, captured.err)

    return run


@pytest.fixture
def gqueue(bare: Run, broker: Any, monkeypatch: pytest.MonkeyPatch) -> Run:
    """The program with the broker in its environment."""
    monkeypatch.setenv("GQUEUE_URL", broker.url)
    return bare


@pytest.fixture
def q(broker: Any, queue: str) -> Iterator[Queue]:
    with Queue(queue, broker.url) as made:
        yield made
        made.obliterate()


def job_id(ran: Ran) -> str:
    assert ran.code == 0, ran
    assert ran.out.startswith("Job created: ")
    return ran.out.removeprefix("Job created: ").strip()


# ---------------------------------------------------------------- verbs


def test_a_job_goes_from_push_to_its_result(gqueue: Run, q: Queue) -> None:
    id = job_id(gqueue("push", q.name, '{"to": "a@b"}', "--name", "mail", "-P", "3", "--max-attempts", "5"))
    assert gqueue("job", "state", id) == Ran(0, "State: prioritized\n", "")
    pulled = gqueue("pull", q.name)
    assert pulled.code == 0
    for line in (
        f"ID:        {id}",
        "Name:      mail",
        "State:     active",
        "Attempts:  0 of 5",
        'Data:      {"to": "a@b"}',
    ):
        assert line in pulled.out.splitlines()
    assert gqueue("ack", id, "-r", '{"sent": true}') == Ran(0, "OK\n", "")
    assert gqueue("job", "result", id) == Ran(0, 'Result: {"sent": true}\n', "")
    assert gqueue("job", "wait", id, "-t", "1000") == Ran(0, 'Result: {"sent": true}\n', "")


def test_options_of_a_push_reach_the_job(gqueue: Run, q: Queue) -> None:
    ran = gqueue(
        "push", q.name, "1", "-d", "1h", "--backoff", "2s", "--ttl", "1d", "--timeout", "5m", "-u", "key",
        "--job-id", f"own-{q.name}", "--tags", "a,b", "-g", "group", "--lifo",
        "--remove-on-complete", "--remove-on-fail", "--durable",
    )  # fmt: skip
    assert job_id(ran) == f"own-{q.name}"
    found = gqueue("job", "get", f"own-{q.name}", "--custom", "--json").json["job"]
    wanted = {
        "backoff": 2000, "ttl": 86_400_000, "timeout": 300_000, "uniqueKey": "key", "tags": ["a", "b"],
        "groupId": "group", "removeOnComplete": True, "removeOnFail": True, "state": "delayed",
    }  # fmt: skip
    assert {name: found[name] for name in wanted} == wanted


def test_data_comes_from_a_file_or_standard_input(
    gqueue: Run, q: Queue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import io

    (tmp_path / "data.json").write_text('{"from": "file"}')
    id = job_id(gqueue("push", q.name, f"@{tmp_path / 'data.json'}"))
    assert gqueue("job", "get", id, "--json").json["job"]["data"] == {"from": "file"}
    monkeypatch.setattr(sys, "stdin", io.StringIO("[1, 2]"))
    id = job_id(gqueue("push", q.name, "-"))
    assert gqueue("job", "get", id, "--json").json["job"]["data"] == [1, 2]


def test_data_may_start_with_a_minus_sign(gqueue: Run, q: Queue) -> None:
    id = job_id(gqueue("push", q.name, "-5", "-P", "-1"))
    job = gqueue("job", "get", id, "--json").json["job"]
    assert (job["data"], job["priority"]) == (-5, -1)
    assert job_id(gqueue("push", q.name, "--", "-6"))


def test_a_file_of_lines_is_pushed_in_bulk(gqueue: Run, q: Queue, tmp_path: Path) -> None:
    (tmp_path / "jobs.jsonl").write_text("\n".join(str(number) for number in range(600)) + "\n\n")
    ran = gqueue("push", q.name, "--bulk", str(tmp_path / "jobs.jsonl"), "--name", "n")
    assert ran == Ran(0, "Jobs created: 600\n", "")
    assert sorted(job.data for job in q.iter_jobs()) == list(range(600))
    ids = gqueue("push", q.name, "--bulk", str(tmp_path / "jobs.jsonl"), "-o", "ids").out.split()
    assert len(ids) == 600
    (tmp_path / "jobs.jsonl").write_text("1\nno\n")
    assert gqueue("push", q.name, "--bulk", str(tmp_path / "jobs.jsonl")).err == "Error: Invalid JSON in line 2\n"


def test_a_push_can_wait_for_the_result(gqueue: Run, q: Queue) -> None:
    from gqueue import Worker

    with Worker(q, lambda job: job.data * 2):
        ran = gqueue("push", q.name, "21", "--wait", "10")
        assert ran.code == 0
        assert ran.out.splitlines()[1] == "Result: 42"
        assert gqueue("push", q.name, "21", "--wait", "--json").json["result"] == 42


def test_leased_jobs_are_acknowledged_and_failed_with_their_token(gqueue: Run, q: Queue) -> None:
    q.add_bulk([{"name": "n", "data": number} for number in range(3)])
    reply = gqueue("pull", q.name, "-n", "3", "--owner", "me", "--lock-ttl", "1m", "--json").json
    first, second, third = (job["id"] for job in reply["jobs"])
    assert gqueue("ack", first) == Ran(1, "", f"Error: Lock token required for job {first}\n")
    assert gqueue("ack", first, "--lock", reply["tokens"][0]).code == 0
    ran = gqueue("fail", second, "-e", "broken", "--unrecoverable", "--lock", reply["tokens"][1])
    assert ran == Ran(0, "OK\n", "")
    shown = gqueue("job", "get", second).out
    assert "State:     failed" in shown
    assert "Error:     broken" in shown
    assert gqueue("fail", third, "--lock", "wrong").code == 1


def test_several_jobs_are_acknowledged_at_once(gqueue: Run, q: Queue) -> None:
    jobs = q.add_bulk([{"name": "n"}] * 3)
    gqueue("pull", q.name, "-n", "3")
    assert gqueue("ack", *(job.id for job in jobs), "-r", "7").code == 0
    assert [job.result(5) for job in jobs] == [7, 7, 7]


def test_an_empty_queue_is_no_error_unless_asked(gqueue: Run, q: Queue) -> None:
    assert gqueue("pull", q.name) == Ran(0, "No job available\n", "")
    assert gqueue("pull", q.name, "-t", "20", "--fail-empty").code == 1
    assert gqueue("pull", q.name, "--json").json["job"] is None


def test_queues_are_listed_counted_paused_and_resumed(gqueue: Run, q: Queue) -> None:
    q.add("n")
    assert f"  - {q.name}" in gqueue("queue", "list").out.splitlines()
    assert q.name in gqueue("queue", "list", "-o", "ids").out.split()
    assert gqueue("queue", "pause", q.name) == Ran(0, "OK\n", "")
    assert gqueue("queue", "counts", q.name, "--json").json["counts"]["paused"] == 1
    assert gqueue("queue", "resume", q.name, "-q") == Ran(0, "", "")
    rows = dict(line.split() for line in gqueue("queue", "counts", q.name).out.splitlines()[2:])
    assert rows["waiting"] == "1"


def test_ping_and_version_answer(gqueue: Run) -> None:
    assert gqueue("ping") == Ran(0, "PONG\n", "")
    assert gqueue("version") == Ran(0, f"gqueue {__version__}\n", "")
    assert gqueue("version", "--json").json == {"version": __version__}
    assert gqueue("--version").out == f"gqueue, version {__version__}\n"


def test_connection_options_work_before_and_after_the_verb(bare: Run, broker: Any) -> None:
    for args in (
        ("--url", broker.url, "ping"),
        ("ping", "--url", broker.url),
        ("-H", "127.0.0.1", "-p", str(broker.port), "ping"),
        ("-H", "nowhere.invalid", "ping", "-H", "127.0.0.1", "-p", str(broker.port)),
    ):
        assert bare(*args) == Ran(0, "PONG\n", "")
    assert bare("--json", "ping", "--url", broker.url).json["data"]["pong"] is True


@pytest.mark.parametrize(
    "args",
    [
        ("push", "QUEUE", "1"),
        ("pull", "QUEUE"),
        ("queue", "list"),
        ("queue", "counts", "QUEUE"),
        ("queue", "pause", "QUEUE"),
        ("queue", "resume", "QUEUE"),
        ("ping",),
        ("version",),
        ("job", "state", "nobody"),
        ("job", "get", "nobody"),
        ("job", "result", "nobody"),
        ("job", "wait", "nobody"),
        ("ack", "nobody"),
        ("fail", "nobody"),
        ("push", "QUEUE", "no json"),
        ("push", "bad queue", "1"),
    ],
)
def test_with_json_there_is_one_json_value_on_standard_output_and_nothing_else(
    gqueue: Run, q: Queue, args: tuple[str, ...]
) -> None:
    ran = gqueue(*(q.name if arg == "QUEUE" else arg for arg in args), "--json")
    assert isinstance(ran.json, dict)
    assert ran.err == ""
    assert ran.json.get("ok", True) is (ran.code == 0 or args[:2] == ("job", "state"))


# ---------------------------------------------------------------- what can go wrong


@pytest.mark.parametrize(
    ("args", "code", "line"),
    [
        (("pusj",), 2, "Unknown command: pusj. Use: "),
        (("queue", "nope"), 2, "Unknown queue subcommand: nope. Use: counts, list, pause, resume"),
        (("push",), 2, "Missing required argument: queue"),
        (("push", "q"), 2, "Missing required argument: data"),
        (("push", "q", "bad"), 2, "Invalid JSON for data: bad"),
        (("push", "q", "@/no/such/file"), 2, "/no/such/file: No such file or directory"),
        (("push", "q", "1", "--prioriti", "3"), 2, "No such option '--prioriti'."),
        (("push", "q", "1", "-d", "soon"), 2, "'soon' is not a duration"),
        (("push", "q", "1", "-P", "x"), 2, "'x' is not a valid integer"),
        (("push", "q", "--bulk", "/no/such/file"), 2, "No such file or directory"),
        (("ack",), 2, "Missing required argument: ids"),
        (("ping", "--url", "redis://h"), 2, "unknown scheme 'redis'"),
        (("ping", "--token-file", "/no/such/file"), 2, "--token-file /no/such/file: No such file or directory"),
        (("ping", "--tls-ca", "/no/such/file"), 2, "--tls-ca /no/such/file: No such file or directory"),
        (("worker", "run", "no.such.module:q"), 2, "cannot import no.such.module"),
        (("worker", "run", "json:loads"), 2, "json:loads is no Queue"),
        (("worker", "run", "json:nothing"), 2, "json has no 'nothing'"),
        (("worker", "run", "json"), 2, "json has no Queue"),
        (("demo", "--storage", "memory://"), 2, "memory:// survives no restart"),
    ],
)
def test_a_mistake_is_one_line_that_names_it(bare: Run, args: tuple[str, ...], code: int, line: str) -> None:
    ran = bare(*args)
    assert ran.code == code
    assert ran.out == ""
    assert ran.err.startswith("Error: ")
    assert line in ran.err
    assert ran.err.count("\n") == 1


def test_a_broker_that_is_not_there_is_one_line_and_exit_code_1(bare: Run) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    ran = bare("ping", "-H", "127.0.0.1", "-p", str(port))
    assert ran == Ran(1, "", f"Error: cannot reach the broker at 127.0.0.1:{port}: Connection refused\n")


def test_a_refusal_is_one_line_and_exit_code_1(gqueue: Run) -> None:
    assert gqueue("job", "get", "nobody") == Ran(1, "", "Error: Job not found\n")
    assert gqueue("job", "state", "nobody") == Ran(1, "State: unknown\n", "")
    assert gqueue("push", "bad queue", "1") == Ran(1, "", "Error: Queue name contains invalid characters\n")


def test_a_job_that_does_not_end_in_time_is_exit_code_1(gqueue: Run, q: Queue) -> None:
    id = job_id(gqueue("push", q.name, "1"))
    assert gqueue("job", "wait", id, "-t", "20") == Ran(1, "", "Error: Job not completed within timeout\n")


def test_a_wrong_token_is_one_line(bare: Run, fresh_broker: Any, tmp_path: Path) -> None:
    broker = fresh_broker(env={"AUTH_TOKENS": "right,other"})
    url = broker.url
    assert bare("ping", "--url", url).err == "Error: Not authenticated\n"
    ran = bare("-t", "wrong", "ping", "--url", url)
    assert ran == Ran(1, "", f"Error: the broker at 127.0.0.1:{broker.port} does not accept the token\n")
    assert bare("ping", "-t", "right", "--url", url).code == 0
    (tmp_path / "token").write_text("other\n")
    assert bare("ping", "--token-file", str(tmp_path / "token"), "--url", url).code == 0


def test_tls_against_a_plain_broker_is_one_line(bare: Run, broker: Any) -> None:
    ran = bare("ping", "--url", broker.url, "--tls")
    assert ran.code == 1
    assert "is TLS on there?" in ran.err
    assert ran.err.count("\n") == 1


def test_help_names_every_verb_and_option(bare: Run) -> None:
    shown = bare("--help").out
    for name in cli.commands:
        assert name in shown
    assert "--max-attempts" in bare("push", "--help").out


# ---------------------------------------------------------------- the program itself


def test_the_program_starts_without_the_server_or_any_store() -> None:
    program = """
        import sys, gqueue.cli
        heavy = "gevent redis sqlite_utils tabulate ssl gqueue.server gqueue.engine gqueue.storage".split()
        print([name for name in heavy if name in sys.modules])
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=30, check=True
    )
    assert done.stdout == "[]\n"


def test_a_worker_runs_the_tasks_of_a_module(broker: Any, queue: str, tmp_path: Path) -> None:
    (tmp_path / "app_tasks.py").write_text(
        textwrap.dedent(f"""
        from gqueue import Queue
        q = Queue({queue!r})

        @q.task
        def double(n):
            return n * 2

        @q.task
        def broken():
            raise ValueError("out of order")
        """)
    )
    with Client(broker.url) as client:
        q = Queue(queue, client)
        good = q.add("double", {"n": 4})
        bad = q.add("broken", {}, attempts=1)
        command = [sys.executable, "-m", "gqueue.cli", "worker", "run", "app_tasks:q", "--burst", "-c", "2"]
        done = subprocess.run(
            [*command, "--url", broker.url, "--log-format", "json"],
            capture_output=True, text=True, timeout=30, check=False, cwd=tmp_path, env=_with_this_checkout(),
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert done.stdout == ""
        first, *lines = done.stderr.splitlines()
        assert first == f"{queue}: broken, double"
        records = [json.loads(line) for line in lines]
        (failure,) = [record for record in records if record["level"] == "error"]
        assert failure["component"] == "gqueue.worker"
        assert "ValueError: out of order" in failure["data"]
        assert good.result(5) == 8
        assert bad.get_state() == "failed"
        q.obliterate()


def test_a_reader_that_goes_away_causes_no_traceback(broker: Any) -> None:
    done = subprocess.run(
        f"{sys.executable} -m gqueue.cli --url {broker.url} --help | head -1",
        shell=True, capture_output=True, text=True, timeout=30, check=False, env=_with_this_checkout(),
    )  # fmt: skip
    assert done.stdout.startswith("Usage: ")
    assert "Traceback" not in done.stderr


def _with_this_checkout() -> dict[str, str]:
    import os

    import gqueue

    root = str(Path(gqueue.__file__).resolve().parent.parent)
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))}
