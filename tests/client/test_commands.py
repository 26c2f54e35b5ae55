"""The client has a method for every command, and each sends the fields that the broker declares."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
from typing import Any

import pytest

import gqueue.commands
from gqueue.client.client import Client, Commands
from gqueue.commands import registry

for module in pkgutil.iter_modules(gqueue.commands.__path__):
    importlib.import_module(f"gqueue.commands.{module.name}")


#: Fields of the protocol that the broker does not know yet.
LATER = {"PUSH": {"repeat"}}


class Recorder(Commands[dict[str, Any]]):
    """Keeps what would be sent."""

    def call(self, cmd: str, /, **fields: Any) -> dict[str, Any]:
        return {"cmd": cmd, **fields}


def snake(name: str) -> str:
    """GetJob -> get_job, ACKB -> ackb, JobHeartbeatB -> job_heartbeat_b."""
    return name.lower() if name.isupper() else re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


@pytest.mark.parametrize("name", sorted(registry.COMMANDS))
def test_a_command_has_a_method_with_its_fields(name: str) -> None:
    method = getattr(Recorder(), snake(name), None)
    assert method is not None, f"Client.{snake(name)} is missing"
    sent = method(**{parameter: parameter for parameter in inspect.signature(method).parameters})
    assert sent.pop("cmd") == name
    declared = {field.wire: {field.wire, *field.aliases} for field in registry.COMMANDS[name].fields}
    known = set().union(*declared.values()) if declared else set()
    unknown = set(sent) - known - LATER.get(name, set())
    assert not unknown, f"{name} does not know {unknown}"
    for wire, spellings in declared.items():
        assert spellings & set(sent), f"{snake(name)} cannot send {wire}"


def test_every_method_says_what_it_does() -> None:
    for name, method in vars(Commands).items():
        if not name.startswith("_"):
            assert inspect.getdoc(method), name


def test_a_pipeline_has_the_same_methods() -> None:
    names = {name for name in vars(Commands) if not name.startswith("_")}
    assert names <= set(dir(Client))
    from gqueue.client.client import Pipeline

    assert names <= set(dir(Pipeline))
