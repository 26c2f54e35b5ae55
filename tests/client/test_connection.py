"""One connection and all that can happen to it: a scripted peer answers late, twice, never, or hangs up."""

from __future__ import annotations

import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from gqueue import AuthError, Client, CommandError, CommandTimeoutError, ConnectionClosedError, SerializationError
from gqueue.client import connection as connection_module
from gqueue.client.line import pause
from tests.client.fake import HANG_UP, PATIENCE, SILENT, Answer, Fake, Peer, frame


def echo(command: dict[str, Any], peer: Peer) -> Answer:
    return {"cmd": command["cmd"], "peer": peer.number}


def once(cmd: str, first: Answer) -> Callable[[dict[str, Any], Peer], Answer]:
    """`first` for the first `cmd`, then echoes."""
    seen: list[str] = []

    def script(command: dict[str, Any], peer: Peer) -> Answer:
        if command["cmd"] == cmd and cmd not in seen:
            seen.append(cmd)
            return first
        return echo(command, peer)

    return script


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


# ---------------------------------------------------------------- answers


def test_answers_in_any_order_reach_their_callers() -> None:
    """The peer answers the first command last."""
    kept: list[dict[str, Any]] = []

    def script(command: dict[str, Any], peer: Peer) -> Answer:
        kept.append(command)
        if len(kept) == 3:
            for late in reversed(kept):
                peer.reply(late, queue=late["queue"])
        return SILENT

    with Fake(script) as fake, Client(fake.url) as client:
        with client.pipeline() as pipe:
            for name in "abc":
                pipe.count(name)
        assert [reply["queue"] for reply in pipe] == ["a", "b", "c"]


def test_threads_share_one_connection_and_each_gets_its_own_answers() -> None:
    def script(command: dict[str, Any], peer: Peer) -> Answer:
        return {"queue": command["queue"]}

    wrong: list[Any] = []
    with Fake(script) as fake, Client(fake.url) as client:

        def ask(number: int) -> None:
            for turn in range(100):
                name = f"{number}-{turn}"
                if client.count(name)["queue"] != name:
                    wrong.append(name)

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
        assert not any(thread.is_alive() for thread in threads)
        assert len(fake.peers) == 1
        assert len(fake.commands) == 800
    assert not wrong


def test_a_reader_that_gives_up_passes_the_duty_on() -> None:
    """Thread A receives for all and times out; B, which waits beside it, still gets its answer."""
    later = threading.Event()

    def script(command: dict[str, Any], peer: Peer) -> Answer:
        if command["cmd"] == "Count":
            threading.Thread(target=lambda: (later.wait(PATIENCE), peer.reply(command, count=7)), daemon=True).start()
        return SILENT

    answers: list[Any] = []

    def ping(client: Client) -> None:
        try:
            answers.append(client.ping())
        except CommandTimeoutError as error:
            answers.append(type(error))

    with Fake(script) as fake, Client(fake.url) as client:
        first = threading.Thread(target=ping, args=(client.within(0.3),))
        first.start()
        fake.until(lambda: "Ping" in fake.names())
        second = threading.Thread(target=lambda: answers.append(client.count("q")["count"]))
        second.start()
        first.join(PATIENCE)
        later.set()
        second.join(PATIENCE)
    assert answers == [CommandTimeoutError, 7]


def test_a_refusal_is_an_error_with_the_text_of_the_broker() -> None:
    refusal = {"ok": False, "error": "Job not found"}
    with (
        Fake(lambda command, peer: refusal) as fake,
        Client(fake.url) as client,
        pytest.raises(CommandError, match="^Job not found$"),
    ):
        client.get_job("x")


def test_no_answer_in_time_is_an_error_and_a_late_one_confuses_nobody() -> None:
    held: list[tuple[Peer, dict[str, Any]]] = []

    def script(command: dict[str, Any], peer: Peer) -> Answer:
        if command["cmd"] == "Count":
            held.append((peer, command))
            return SILENT
        return echo(command, peer)

    with Fake(script) as fake, Client(fake.url, timeout=0.2) as client:
        with pytest.raises(CommandTimeoutError, match=r"Count: no answer within 0\.2 s"):
            client.count("q")
        peer, command = held[0]
        peer.reply(command, count=1)
        assert client.ping()["cmd"] == "Ping"
        assert len(fake.peers) == 1


def test_a_long_poll_may_take_its_own_time_on_top() -> None:
    def script(command: dict[str, Any], peer: Peer) -> Answer:
        threading.Timer(0.5, lambda: peer.reply(command, job=None)).start()
        return SILENT

    with Fake(script) as fake, Client(fake.url, timeout=0.3) as client:
        assert client.pull("q", 400)["job"] is None


def test_parked_commands_never_fill_the_places_of_the_connection() -> None:
    """The broker runs 50 commands of a connection at a time: pulls beyond 40 go over another one."""
    release = threading.Event()

    def script(command: dict[str, Any], peer: Peer) -> Answer:
        if command["cmd"] == "PULL":
            threading.Thread(
                target=lambda: (release.wait(PATIENCE), peer.reply(command, job=None)), daemon=True
            ).start()
            return SILENT
        return echo(command, peer)

    with Fake(script) as fake, Client(fake.url) as client:
        threads = [threading.Thread(target=client.pull, args=("q", 5000)) for _ in range(90)]
        for thread in threads:
            thread.start()
        fake.until(lambda: fake.names().count("PULL") == 90)
        assert len(fake.peers) == 3
        assert client.ping()["peer"] == 1
        release.set()
        for thread in threads:
            thread.join(PATIENCE)


def test_a_value_that_cannot_travel_leaves_the_connection_alone() -> None:
    with Fake(echo) as fake, Client(fake.url) as client:
        client.ping()
        with pytest.raises(SerializationError):
            client.push("q", "n", object())
        client.ping()
        assert fake.names() == ["Ping", "Ping"]


def test_events_are_kept_apart_from_answers() -> None:
    def script(command: dict[str, Any], peer: Peer) -> Answer:
        for number in range(2):
            peer.sock.sendall(frame({"type": "event", "event": {"number": number}}))
        return {}

    with Fake(script) as fake, Client(fake.url) as client:
        assert client.subscribe_events("q") == {"ok": True}
        assert client.next_event(PATIENCE) == {"number": 0}
        assert client.next_event(PATIENCE) == {"number": 1}
        assert client.next_event(0.05) is None
        threading.Timer(0.1, fake.peers[0].hang_up).start()
        with pytest.raises(ConnectionClosedError):
            client.next_event(PATIENCE)


# ---------------------------------------------------------------- losing the connection


@pytest.mark.parametrize(
    ("cmd", "ask"),
    [
        ("GetJob", lambda client: client.get_job("x")),
        ("WaitJob", lambda client: client.wait_job("x", 10)),
        ("ACK", lambda client: client.ack("x", token="t")),
        ("FAIL", lambda client: client.fail("x", "e", token="t")),
        ("ACKB", lambda client: client.ackb(["x"], tokens=["t"])),
        ("PUSH", lambda client: client.push("q", "n", 1, job_id="own")),
        ("PUSHB", lambda client: client.pushb("q", [{"name": "n", "customId": "own"}])),
    ],
)
def test_what_may_be_repeated_is_sent_again_after_a_lost_connection(cmd: str, ask: Callable[[Client], Any]) -> None:
    with Fake(once(cmd, HANG_UP)) as fake, Client(fake.url) as client:
        assert ask(client)["peer"] == 2
        assert fake.names() == [cmd, cmd]
        first, second = fake.commands
        assert first == second


@pytest.mark.parametrize(
    ("cmd", "ask"),
    [
        ("PUSH", lambda client: client.push("q", "n", 1)),
        ("PUSHB", lambda client: client.pushb("q", [{"name": "n", "customId": "own"}, {"name": "n"}])),
        ("ACK", lambda client: client.ack("x")),
        ("FAIL", lambda client: client.fail("x")),
        ("PULL", lambda client: client.pull("q")),
        ("Cancel", lambda client: client.cancel("x")),
    ],
)
def test_what_must_not_be_repeated_says_that_it_may_have_happened(cmd: str, ask: Callable[[Client], Any]) -> None:
    with Fake(once(cmd, HANG_UP)) as fake, Client(fake.url) as client:
        with pytest.raises(ConnectionClosedError) as caught:
            ask(client)
        assert caught.value.maybe_applied
        assert fake.names() == [cmd]
        assert client.ping()["peer"] == 2


def test_an_ack_that_was_sent_twice_and_then_refused_may_have_happened() -> None:
    def script(command: dict[str, Any], peer: Peer) -> Answer:
        return HANG_UP if peer.number == 1 else {"ok": False, "error": "Job not found or not in processing state: x"}

    with Fake(script) as fake, Client(fake.url) as client:
        with pytest.raises(ConnectionClosedError, match="sent twice") as caught:
            client.ack("x", token="t")
        assert caught.value.maybe_applied


def test_an_idle_connection_that_has_ended_is_noticed_before_anything_is_sent() -> None:
    """A push after a restart of the broker is not in doubt."""
    with Fake(echo) as fake, Client(fake.url) as client:
        client.ping()
        fake.peers[0].hang_up()
        assert client.push("q", "n", 1)["peer"] == 2
        assert fake.names() == ["Ping", "PUSH"]


def test_every_waiting_thread_hears_of_the_end() -> None:
    with Fake(lambda command, peer: SILENT) as fake, Client(fake.url, reconnect=False) as client:
        ended: list[bool] = []

        def ask() -> None:
            with pytest.raises(ConnectionClosedError) as caught:
                client.ping()
            ended.append(caught.value.maybe_applied)

        threads = [threading.Thread(target=ask) for _ in range(5)]
        for thread in threads:
            thread.start()
        fake.until(lambda: len(fake.commands) == 5)
        fake.peers[0].hang_up()
        for thread in threads:
            thread.join(PATIENCE)
    assert ended == [True] * 5


def test_a_broker_that_is_not_there_is_reported_at_once() -> None:
    port = free_port()
    with Client(host="127.0.0.1", port=port) as client:
        started = time.monotonic()
        with pytest.raises(ConnectionClosedError, match=f"cannot reach the broker at 127.0.0.1:{port}: ") as caught:
            client.push("q", "n", 1)
        assert not caught.value.maybe_applied
        assert time.monotonic() - started < 5


def test_a_broker_that_was_there_is_waited_for() -> None:
    with Fake(echo) as first:
        client = Client(first.url)
        client.ping()
    # the port is free now; a new broker takes it a little later
    answers: list[Any] = []
    waiting = threading.Thread(target=lambda: answers.append(client.ping()))
    waiting.start()
    waiting.join(0.2)
    assert waiting.is_alive()
    listener = socket.create_server(("127.0.0.1", first.port))
    sock, _ = listener.accept()
    got = sock.recv(100)
    key = got[got.index(b"reqId") + 6 :].decode()
    sock.sendall(frame({"ok": True, "reqId": key}))
    waiting.join(PATIENCE)
    assert answers == [{"ok": True}]
    client.close()
    sock.close()
    listener.close()


def test_close_wakes_whoever_waits_and_forbids_more() -> None:
    with Fake(lambda command, peer: SILENT) as fake:
        client = Client(fake.url)
        ended = threading.Event()

        def ask() -> None:
            with pytest.raises(ConnectionClosedError):
                client.push("q", "n", 1)
            ended.set()

        threading.Thread(target=ask).start()
        fake.until(lambda: fake.commands)
        client.close()
        assert ended.wait(PATIENCE)
        with pytest.raises(ConnectionClosedError, match="closed"):
            client.ping()


def test_two_missed_pings_end_a_silent_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_module, "PING_AFTER", 0.1)

    def script(command: dict[str, Any], peer: Peer) -> Answer:
        return SILENT if peer.number == 1 else echo(command, peer)

    with Fake(script) as fake, Client(fake.url) as client:
        assert client.count("q")["peer"] == 2
        assert fake.names() == ["Count", "Ping", "Ping", "Count"]


def test_a_slow_answer_that_still_sends_pongs_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_module, "PING_AFTER", 0.05)

    def script(command: dict[str, Any], peer: Peer) -> Answer:
        if command["cmd"] == "Ping":
            return {}
        threading.Timer(0.5, lambda: peer.reply(command, count=3)).start()
        return SILENT

    with Fake(script) as fake, Client(fake.url) as client:
        assert client.count("q")["count"] == 3
        assert len(fake.peers) == 1


def test_bytes_that_are_no_frames_end_the_connection_with_a_reason() -> None:
    def script(command: dict[str, Any], peer: Peer) -> Answer:
        peer.sock.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        return SILENT

    words = "does not speak this protocol"
    with Fake(script) as fake, Client(fake.url, timeout=1) as client, pytest.raises(ConnectionClosedError, match=words):
        client.push("q", "n", 1)


def test_pauses_between_attempts_have_full_jitter_up_to_five_seconds() -> None:
    for attempt, most in ((0, 0.05), (3, 0.4), (7, 5.0), (1000, 5.0)):
        pauses = [pause(attempt) for _ in range(200)]
        assert 0 <= min(pauses) < most / 4
        assert most / 2 < max(pauses) <= most


# ---------------------------------------------------------------- tokens


def closed_broker(command: dict[str, Any], peer: Peer) -> Answer:
    if command["cmd"] == "Auth":
        return {} if command["token"] == "right" else {"ok": False, "error": "Invalid token"}
    return {"ok": False, "error": "Not authenticated"}


def test_a_token_is_sent_before_anything_else() -> None:
    def script(command: dict[str, Any], peer: Peer) -> Answer:
        return {}

    with Fake(script) as fake, Client(fake.url, token="right") as client:
        client.ping()
        assert fake.names() == ["Auth", "Ping"]
        assert fake.commands[0]["token"] == "right"


@pytest.mark.parametrize("token", ["wrong", None])
def test_a_broker_that_does_not_know_us_raises_auth_error(token: str | None) -> None:
    with Fake(closed_broker) as fake, Client(fake.url, token=token) as client, pytest.raises(AuthError):
        client.ping()


def test_a_token_for_a_broker_without_tokens_does_no_harm() -> None:
    """Such a broker refuses every token and serves everybody (core 1.7)."""

    def script(command: dict[str, Any], peer: Peer) -> Answer:
        return {"ok": False, "error": "Invalid token"} if command["cmd"] == "Auth" else {"pong": True}

    with Fake(script) as fake, Client(fake.url, token="any") as client:
        assert client.ping()["pong"]


# ---------------------------------------------------------------- pipelines


def test_a_pipeline_is_one_write_and_keeps_refusals_in_their_place() -> None:
    def script(command: dict[str, Any], peer: Peer) -> Answer:
        return {"ok": False, "error": "no"} if command.get("name") == "bad" else {"id": command["name"]}

    with Fake(script) as fake, Client(fake.url) as client:
        with client.pipeline() as pipe:
            for name in ("a", "bad", "c"):
                pipe.push("q", name)
            assert fake.commands == []
        assert list(pipe) == [{"ok": True, "id": "a"}, {"ok": False, "error": "no"}, {"ok": True, "id": "c"}]
        assert len(pipe) == 3


def test_a_large_pipeline_goes_in_portions() -> None:
    with Fake(lambda command, peer: {"n": command["data"]}) as fake, Client(fake.url) as client:
        with client.pipeline() as pipe:
            for number in range(1200):
                pipe.push("q", "n", number)
        assert [reply["n"] for reply in pipe] == list(range(1200))


def test_a_pipeline_sends_nothing_when_its_block_fails() -> None:
    with Fake(echo) as fake, Client(fake.url) as client:
        with pytest.raises(RuntimeError), client.pipeline() as pipe:
            pipe.ping()
            raise RuntimeError
        client.ping()
        assert fake.names() == ["Ping"]


# ---------------------------------------------------------------- other processes


def python(program: str, *args: str) -> str:
    """Run a program in a process of its own and return what it prints."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), *args], capture_output=True, text=True, timeout=30, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_forked_child_opens_its_own_socket() -> None:
    with Fake(echo) as fake:
        printed = python(
            """
            import os, sys
            from gqueue import Client
            client = Client(sys.argv[1])
            print("parent", client.ping()["peer"], flush=True)
            child = os.fork()
            if not child:
                print("child", client.ping()["peer"], flush=True)
                client.close()
                os._exit(0)
            os.waitpid(child, 0)
            print("parent", client.ping()["peer"], flush=True)
            """,
            fake.url,
        )
        assert printed.split("\n")[:3] == ["parent 1", "child 2", "parent 1"]


def test_it_works_in_a_program_patched_by_gevent() -> None:
    """Greenlets share the connection; one that waits does not stop the others."""
    pytest.importorskip("gevent")

    def script(command: dict[str, Any], peer: Peer) -> Answer:
        if command["cmd"] == "PULL":
            threading.Timer(0.5, lambda: peer.reply(command, job=None)).start()
            return SILENT
        return {"queue": command.get("queue")}

    with Fake(script) as fake:
        printed = python(
            """
            from gevent import monkey
            monkey.patch_all()
            import sys, gevent
            from gqueue import Client
            client = Client(sys.argv[1])
            slow = gevent.spawn(client.pull, "slow", 5000)
            quick = [gevent.spawn(lambda n=n: client.count(str(n))["queue"] == str(n)) for n in range(50)]
            gevent.joinall(quick, timeout=10)
            print(all(task.value for task in quick), slow.ready())
            slow.join(timeout=10)
            print(slow.value["job"])
            """,
            fake.url,
        )
        assert printed.split("\n")[:2] == ["True False", "None"]
        assert len(fake.peers) == 1


def test_importing_the_library_loads_nothing_heavy() -> None:
    printed = python(
        """
        import sys, gqueue
        print([name for name in ("gevent", "redis", "sqlite_utils", "click", "msgpack", "ssl") if name in sys.modules])
        gqueue.Queue, gqueue.Worker, gqueue.JobFailed
        print([name for name in ("gevent", "redis", "sqlite_utils", "click", "ssl") if name in sys.modules])
        """
    )
    assert printed.split("\n")[:2] == ["[]", "[]"]
