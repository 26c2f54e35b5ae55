"""A client and a real broker: restarts, tokens, TLS, Unix sockets, speed of a pipeline."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from gqueue import AuthError, Client, ConnectionClosedError, Queue
from gqueue.client.tls import trusting

PATIENCE = 15.0  # seconds for what takes a fraction of one


def test_a_client_tells_what_the_broker_is(broker: Any) -> None:
    with Client(broker.url) as client:
        reply = client.hello()
        assert reply["protocolVersion"] == 3
        assert "pipelining" in reply["capabilities"]


def test_any_command_can_be_called_by_its_wire_name(broker: Any) -> None:
    with Client(broker.url) as client:
        assert client.call("Ping")["data"]["pong"] is True


def test_a_pipeline_of_pushes_gives_ids_in_order(broker: Any, queue: str) -> None:
    with Client(broker.url) as client:
        with client.pipeline() as pipe:
            for number in range(2000):
                pipe.push(queue, "n", number)
        ids = [reply["id"] for reply in pipe]
        assert len(set(ids)) == 2000
        with client.pipeline() as looks:
            for id in ids[::100]:
                looks.get_job(id)
        assert [reply["job"]["data"] for reply in looks] == list(range(0, 2000, 100))
        client.obliterate(queue)


def test_many_threads_push_over_one_connection(broker: Any, queue: str) -> None:
    with Client(broker.url) as client:
        q = Queue(queue, client)

        def push(number: int) -> None:
            for turn in range(50):
                q.add("n", [number, turn])

        threads = [threading.Thread(target=push, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
        assert q.count() == 400
        assert {tuple(job.data) for job in q.iter_jobs()} == {(n, t) for n in range(8) for t in range(50)}
        q.obliterate()


@pytest.mark.parametrize("how", ["kill", "graceful"])
def test_a_client_goes_on_after_a_restart(fresh_broker: Any, how: str) -> None:
    """What was acknowledged is there, the idle connection is made again by itself, a waiting result is asked again."""
    broker = fresh_broker(storage="sqlite")
    with Client(broker.url) as client:
        q = Queue("restarted", client)
        job = q.add("n", {"a": 1})
        values: list[Any] = []
        waiting = threading.Thread(target=lambda: values.append(job.result(PATIENCE)))
        waiting.start()
        broker.restart(how)
        assert q.add("n", 2).get_state() == "waiting"
        reply = client.pull(q.name, owner="tester")
        assert reply["job"]["id"] == job.id
        client.ack(job.id, "after", reply["token"])
        waiting.join(PATIENCE)
        assert values == ["after"]


def test_a_token_opens_a_closed_broker(fresh_broker: Any) -> None:
    broker = fresh_broker(env={"AUTH_TOKENS": "right"})
    with Client(broker.url, token="right") as client:
        assert client.ping()["ok"]
    with Client(f"gqueue://right@127.0.0.1:{broker.port}") as client:
        assert client.ping()["ok"]
    for token in ("wrong", None):
        with Client(broker.url, token=token) as client, pytest.raises(AuthError):
            client.ping()


def test_tls_is_spoken_and_certificates_are_checked(fresh_broker: Any, tmp_path: Path) -> None:
    trustme = pytest.importorskip("trustme")
    authority = trustme.CA()
    certificate = authority.issue_cert("127.0.0.1", "localhost")
    (tmp_path / "key.pem").write_bytes(certificate.private_key_pem.bytes())
    (tmp_path / "cert.pem").write_bytes(b"".join(blob.bytes() for blob in certificate.cert_chain_pems))
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    broker = fresh_broker(args=["--tls-cert", str(tmp_path / "cert.pem"), "--tls-key", str(tmp_path / "key.pem")])

    with Client(host="127.0.0.1", port=broker.port, tls=trusting(str(tmp_path / "ca.pem"))) as client:
        with client.pipeline() as pipe:
            for number in range(300):
                pipe.push("tls", "n", {"number": number, "filler": "x" * 1000})
        assert all(reply["ok"] for reply in pipe)
        threads = [threading.Thread(target=lambda: [client.count("tls") for _ in range(50)]) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
        assert client.count("tls")["count"] == 300
    with Client(host="127.0.0.1", port=broker.port, tls=trusting(verify=False)) as client:
        assert client.ping()["ok"]
    with (
        Client(host="127.0.0.1", port=broker.port, tls=True) as client,
        pytest.raises(ConnectionClosedError, match="is not trusted"),
    ):
        client.ping()
    with Client(host="127.0.0.1", port=broker.port, timeout=3) as client, pytest.raises(ConnectionClosedError):
        client.push("tls", "n", 1)


def test_a_unix_socket_is_a_broker_too(fresh_broker: Any, tmp_path: Path) -> None:
    path = tmp_path / "g.sock"
    fresh_broker(args=["--socket", str(path)])
    with Client(f"unix://{path}") as client:
        assert client.ping()["ok"]
