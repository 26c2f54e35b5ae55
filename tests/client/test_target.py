"""Where a client looks for its broker."""

from __future__ import annotations

from typing import Any

import pytest

from gqueue.client.target import Target

NAMES = (
    "GQUEUE_URL", "GQUEUE_HOST", "GQUEUE_PORT", "GQUEUE_TCP_PORT", "GQUEUE_TOKEN", "HOST", "TCP_PORT", "BUNQUEUE_HOST",
    "BUNQUEUE_TCP_PORT", "BUNQUEUE_TOKEN", "BQ_HOST", "BQ_TCP_PORT", "BQ_TOKEN",
)  # fmt: skip


@pytest.fixture(autouse=True)
def _empty_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("url", "target"),
    [
        ("gqueue://db", Target("db")),
        ("gqueue://db:7000", Target("db", 7000)),
        ("gqueue://secret@db", Target("db", token="secret")),
        ("gqueue://:secret@db", Target("db", token="secret")),
        ("gqueue://a%40b@db", Target("db", token="a@b")),
        ("gqueue+tls://db", Target("db", tls=True)),
        ("gqueue://[::1]:7000", Target("::1", 7000)),
        ("unix:///run/g.sock", Target(path="/run/g.sock")),
        ("localhost", Target()),
        ("db:7000", Target("db", 7000)),
    ],
)
def test_a_url_names_the_broker(url: str, target: Target) -> None:
    assert Target.find(url) == target


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("redis://h", "unknown scheme 'redis'"),
        ("gqueue://", "names no host"),
        ("gqueue://h:99999", "port"),
        ("gqueue://h:x", "port"),
        ("gqueue://h/0", "behind the host"),
        ("unix://", "names no socket"),
    ],
)
def test_a_bad_url_says_what_is_wrong(url: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Target.find(url)


def test_a_token_is_never_shown() -> None:
    assert "secret" not in repr(Target.find("gqueue://secret@db"))
    with pytest.raises(ValueError, match="port") as caught:
        Target.find("gqueue://secret@db:0x1")
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("environment", "target"),
    [
        ({}, Target("localhost", 6789)),
        ({"GQUEUE_URL": "gqueue://t@a:1", "GQUEUE_HOST": "b"}, Target("a", 1, token="t")),
        ({"GQUEUE_HOST": "a", "GQUEUE_PORT": "1", "GQUEUE_TOKEN": "t"}, Target("a", 1, token="t")),
        ({"HOST": "a", "TCP_PORT": "2", "BQ_TOKEN": "t", "BUNQUEUE_TOKEN": "u"}, Target("a", 2, token="t")),
        ({"GQUEUE_HOST": "a", "HOST": "b", "BUNQUEUE_TOKEN": "u"}, Target("a", token="u")),
        ({"GQUEUE_TOKEN": "", "BQ_TOKEN": "t"}, Target(token="t")),
    ],
)
def test_the_environment_fills_in_what_was_not_given(
    environment: dict[str, str], target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert Target.find() == target


def test_what_is_given_goes_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GQUEUE_URL", "gqueue://t@a:1")
    assert Target.find(host="b") == Target("b")
    assert Target.find("gqueue://c:3", port=4, token="x") == Target("c", 4, token="x")


@pytest.mark.parametrize("port", ["x", "0", "65536", "-1"])
def test_a_bad_port_in_the_environment_is_named(port: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TCP_PORT", port)
    with pytest.raises(ValueError, match="TCP_PORT"):
        Target.find()


@pytest.mark.parametrize(
    ("port", "error"), [(0, ValueError), (70_000, ValueError), ("1", TypeError), (True, TypeError)]
)
def test_a_port_must_be_one(port: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        Target.find(port=port)
