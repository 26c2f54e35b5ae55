"""Fixtures that every test may use: a broker on each store, a connection, a queue of its own."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.harness import Broker, Wire

_numbers = itertools.count()


@pytest.fixture(scope="module", params=["memory", "sqlite"])
def store(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def broker(store: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    """One broker for a module; its periodic duties run often, so that tests need not wait for them."""
    env = {"STALL_CHECK_MS": "100", "CLEANUP_INTERVAL_MS": "200"}
    with Broker(store, tmp_path_factory.mktemp("broker"), env=env) as running:
        yield running


@pytest.fixture
def wire(broker: Broker) -> Iterator[Wire]:
    opened = broker.connect()
    yield opened
    opened.close()


@pytest.fixture
def queue() -> str:
    """A name that no other test uses."""
    return f"q{next(_numbers)}"


@pytest.fixture
def fresh_broker(tmp_path: Path) -> Iterator[Callable[..., Broker]]:
    """Start brokers of one's own; all of them are ended."""
    started: list[Broker] = []

    def start(storage: str = "memory", **options: Any) -> Broker:
        made = Broker(storage, tmp_path, **options)
        started.append(made)
        return made.start()

    yield start
    for made in started:
        made.close()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Logs of hostile texts hold half characters, which cannot travel from one test process to another."""
    report.sections = [(title, text.encode("utf-8", "backslashreplace").decode()) for title, text in report.sections]
