"""Recorded exchanges of the protocol, replayed on a real broker: each scenario on each store is one test."""

from __future__ import annotations

import json
import re
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest

import gqueue.commands  # noqa: F401 - fills the registry
from gqueue.commands.registry import COMMANDS
from tests.conformance.matching import Differs, Matcher
from tests.harness import Broker, Wire

_FOLDER = Path(__file__).parent / "scenarios"
_VARIABLE = re.compile(r"\$\{([A-Za-z_][\w.]*)\}")
_SCENARIOS = {
    str(path.relative_to(_FOLDER).with_suffix("")): json.loads(path.read_text())
    for path in sorted(_FOLDER.rglob("*.json"))
}

#: Scenarios that need what the broker does not have yet, besides those that use a command it does not know.
LATER = {
    "push/parent-metadata-link": "links of flows in the data of a job",
    **{name: "repeat" for name in _SCENARIOS if name.startswith("repeat/")},
    **{f"groups/{name}-default": "limits of groups" for name in ("concurrency", "rate")},
    "limits/rate-limit-bursts": "decided otherwise: an exact sliding window",
}


class Int64(int):
    """Travels as a 64-bit integer; all others outside int32 go as float64, as JavaScript clients send them."""


def as_sent(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: as_sent(item) for key, item in value.items()}
    if isinstance(value, list):
        return [as_sent(item) for item in value]
    if type(value) is int and not -(2**31) <= value < 2**31:
        return float(value)
    return int(value) if isinstance(value, Int64) else value


def as_read(value: Any) -> Any:
    """Map keys compare as text, integral floats as integers."""
    if isinstance(value, dict):
        return {str(as_read(key)): as_read(item) for key, item in value.items()}
    if isinstance(value, list):
        return [as_read(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def dig(value: Any, path: str) -> Any:
    for part in filter(None, path.replace("[", ".").replace("]", "").split(".")):
        if isinstance(value, list):
            value = value[int(part)] if int(part) < len(value) else None
        else:
            value = value.get(part) if isinstance(value, dict) else None
    return value


class Play:
    """One run of one scenario."""

    def __init__(self, broker: Broker, scenario: dict[str, Any]) -> None:
        self.broker = broker
        self.scenario = scenario
        run = uuid.uuid4().hex[:10]
        self.variables: dict[str, Any] = {"run": run, "q": f"q-{run}"}
        self.matcher = Matcher()
        self.wires: dict[str, Wire] = {}
        self.started: dict[str, tuple[Any, float]] = {}

    def run(self) -> None:
        try:
            for number, step in enumerate(self.scenario["steps"], 1):
                try:
                    self.step(step)
                except (Differs, TimeoutError, ConnectionError) as error:
                    raise AssertionError(f"step {number}: {error}") from None
        finally:
            for wire in self.wires.values():
                wire.close()

    def step(self, step: dict[str, Any]) -> None:
        for kind in ("send", "start", "await", "pipeline", "event", "no_event_ms", "raw_hex", "frame_hex", "recv",
                     "closed", "close", "open", "restart", "sleep_ms", "assert"):  # fmt: skip
            if kind in step:
                getattr(self, f"do_{kind}")(step)
                return
        raise AssertionError(f"unknown step {step}")

    # ---------------------------------------------------------------- values

    def fill(self, value: Any, more: dict[str, Any] | None = None) -> Any:
        """Put variables in, and expand what stands for a value that JSON cannot hold."""
        known = self.variables | (more or {})
        if isinstance(value, str):
            whole = _VARIABLE.fullmatch(value)
            if whole:
                return self.look_up(whole[1], known)
            return _VARIABLE.sub(lambda found: str(self.look_up(found[1], known)), value)
        if isinstance(value, list):
            return [self.fill(item, more) for item in value]
        if not isinstance(value, dict):
            return value
        if len(value) == 1:
            (form, argument), *_ = value.items()
            made: dict[str, Callable[[], Any]] = {
                "$now": lambda: int(time.time() * 1000) + argument,
                "$add": lambda: sum(self.fill(item, more) for item in argument),
                "$rep": lambda: argument[0] * argument[1],
                "$list": lambda: [self.fill(argument[0], {**(more or {}), "i": n}) for n in range(argument[1])],
                "$nest": lambda: nested(argument),
                "$bytes": lambda: bytes.fromhex(argument),
                "$float": lambda: float(argument),
                "$int": lambda: Int64(self.fill(argument, more)),
                "$ext": lambda: msgpack.ExtType(argument[0], bytes.fromhex(argument[1])),
            }
            if form in made:
                return made[form]()
        return {self.fill(key, more): self.fill(item, more) for key, item in value.items()}

    def look_up(self, name: str, known: dict[str, Any]) -> Any:
        head, _, rest = name.partition(".")
        return dig(known[head], rest)

    def wire(self, step: dict[str, Any]) -> Wire:
        name = step.get("conn", "main")
        if name not in self.wires:
            self.wires[name] = self.broker.connect()
        return self.wires[name]

    def expect(self, step: dict[str, Any], reply: Any, pattern: Any = None) -> None:
        places = {
            name: tuple(self.scenario.get(name, ())) + tuple(step.get(name, ())) for name in ("unordered", "ignore")
        }
        reply = as_read(reply)
        pattern = step.get("expect") if pattern is None else pattern
        if pattern is not None:
            self.matcher.match(self.expected(pattern), reply, **places)
        for name, path in step.get("save", {}).items():
            self.variables[name] = dig(reply, path)

    def expected(self, pattern: Any) -> Any:
        """Patterns keep their own forms; only variables are put in."""
        if isinstance(pattern, str):
            return self.fill(pattern) if "${" in pattern else pattern
        if isinstance(pattern, list):
            return [self.expected(item) for item in pattern]
        if isinstance(pattern, dict):
            return {self.expected(key): self.expected(item) for key, item in pattern.items()}
        return pattern

    def took(self, step: dict[str, Any], began: float) -> None:
        if "took_ms" in step:
            low, high = step["took_ms"]
            took = (time.monotonic() - began) * 1000
            assert low <= took <= high * 4 + 1000, f"took {took:.0f} ms, expected {low}..{high}"

    # ---------------------------------------------------------------- steps

    def do_send(self, step: dict[str, Any]) -> None:
        began = time.monotonic()
        deadline = began + step.get("within_ms", 10_000) / 1000
        while True:
            command = as_sent(self.fill(step["send"]))
            wire = self.wire(step)
            if step.get("bare"):
                payload = msgpack.packb(command)
                wire.raw(len(payload).to_bytes(4, "big") + payload)
                reply = wire.recv(15)
            else:
                reply = wire.begin([command])[0].result(90)
            if "until" not in step or Matcher().fits(self.expected(step["until"]), as_read(reply)):
                break
            assert time.monotonic() < deadline, f"still {reply}"
            time.sleep(step.get("every_ms", 50) / 1000)
        self.took(step, began)
        self.expect(step, reply)

    def do_start(self, step: dict[str, Any]) -> None:
        names = [step["as"]] if "times" not in step else [f"{step['as']}.{n}" for n in range(step["times"])]
        for n, name in enumerate(names):
            command = as_sent(self.fill(step["start"], {"i": n}))
            self.started[name] = (self.wire(step).begin([command])[0], time.monotonic())

    def do_await(self, step: dict[str, Any]) -> None:
        name = step["await"]
        many = sorted(key for key in self.started if key.startswith(f"{name}."))
        replies = []
        for key in many or [name]:
            pending, began = self.started.pop(key)
            replies.append(pending.result(90))
            self.took(step, began)
        if not many:
            self.expect(step, replies[0])
            return
        for reply in replies:
            if "expect_each" in step:
                self.expect({}, reply, step["expect_each"])
        if "expect" in step:
            self.expect(step, replies)
        for variable, path in step.get("save_all", {}).items():
            self.variables[variable] = [dig(as_read(reply), path) for reply in replies]

    def do_pipeline(self, step: dict[str, Any]) -> None:
        plan = step["pipeline"]
        if isinstance(plan, dict):
            commands = [as_sent(self.fill(plan["template"], {"i": n})) for n in range(plan["n"])]
        else:
            commands = [as_sent(self.fill(command)) for command in plan]
        replies = self.wire(step).pipeline(commands)
        for reply in replies:
            if "expect_each" in step:
                self.expect({}, reply, step["expect_each"])
        if "expect" in step:
            self.expect(step, replies)
        for variable, path in step.get("save_all", {}).items():
            self.variables[variable] = [dig(as_read(reply), path) for reply in replies]

    def do_event(self, step: dict[str, Any]) -> None:
        wire = self.wire(step)
        deadline = time.monotonic() + step.get("within_ms", 10_000) / 1000
        where = self.expected(step.get("where", {}))
        while True:
            event = wire.event(max(deadline - time.monotonic(), 0.01))
            if Matcher().fits(where, as_read(event)):
                break
        if step["event"] is not True:
            self.matcher.match(self.expected(step["event"]), as_read(event))
        self.expect(step, {"type": "event", "event": event})

    def do_no_event_ms(self, step: dict[str, Any]) -> None:
        try:
            event = self.wire(step).event(step["no_event_ms"] / 1000)
        except TimeoutError:
            return
        raise AssertionError(f"unexpected event {event}")

    def do_raw_hex(self, step: dict[str, Any]) -> None:
        self.wire(step).raw(bytes.fromhex(step["raw_hex"]))

    def do_frame_hex(self, step: dict[str, Any]) -> None:
        payload = bytes.fromhex(step["frame_hex"])
        self.wire(step).raw(len(payload).to_bytes(4, "big") + payload)

    def do_recv(self, step: dict[str, Any]) -> None:
        self.expect(step, self.wire(step).recv(15))

    def do_closed(self, step: dict[str, Any]) -> None:
        assert self.wire(step).closed(15), "the connection is still open"

    def do_close(self, step: dict[str, Any]) -> None:
        wire = self.wires.pop(step["close"])
        if step.get("abort"):
            wire.abort()
        else:
            wire.close()

    def do_open(self, step: dict[str, Any]) -> None:
        self.wires[step["open"]] = self.broker.connect()

    def do_restart(self, step: dict[str, Any]) -> None:
        for wire in self.wires.values():
            wire.close()
        self.wires.clear()
        self.broker.restart(step["restart"])

    def do_sleep_ms(self, step: dict[str, Any]) -> None:
        time.sleep(step["sleep_ms"] / 1000)

    def do_assert(self, step: dict[str, Any]) -> None:
        left, right = self.fill(step.get("left")), self.fill(step.get("right"))
        checks: dict[str, Callable[[], bool]] = {
            "near": lambda: abs(left - right - step.get("plus", 0)) <= step["tol"],
            "eq": lambda: bool(left == right),
            "ne": lambda: bool(left != right),
            "lt": lambda: bool(left < right),
            "le": lambda: bool(left <= right),
            "re": lambda: re.fullmatch(right, left, re.DOTALL) is not None,
            "len": lambda: len(left) == right,
            "unique": lambda: len(set(left)) == len(left),
            "sorted": lambda: sorted(left) == left,
            "same_set": lambda: sorted(left) == sorted(right),
            "disjoint": lambda: not set(left) & set(right),
        }
        assert checks[step["assert"]](), f"{step['assert']}: {left!r}, {right!r}"


def nested(depth: int) -> Any:
    value: Any = "leaf"
    for _ in range(depth):
        value = {"d": value}
    return value


def unknown_commands(scenario: dict[str, Any]) -> set[str]:
    """The commands of a scenario that the broker does not know and that the scenario does not want refused."""
    names = set()
    for step in scenario["steps"]:
        sent = [step.get("send"), step.get("start")]
        plan = step.get("pipeline", [])
        sent += [plan["template"]] if isinstance(plan, dict) else plan
        expected = step.get("expect")
        wanted_refused = isinstance(expected, dict) and str(expected.get("error", "")).startswith("Unknown")
        for command in sent:
            name = command.get("cmd") if command else None
            if (
                isinstance(name, str)
                and name not in COMMANDS
                and name != "Auth"
                and not wanted_refused
                and name.isalnum()
            ):
                names.add(name)
    return names


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Broker]]:
    """Brokers that scenarios without needs of their own share, by store."""
    brokers: dict[str, Broker] = {}
    yield brokers
    for broker in brokers.values():
        broker.close()


def _parameters() -> Iterator[Any]:
    for name, scenario in _SCENARIOS.items():
        reason = LATER.get(name) or ", ".join(sorted(unknown_commands(scenario)))
        marks = [pytest.mark.skip(reason=f"needs {reason}")] if reason else []
        slow = [pytest.mark.timeout(150)] if "slow" in scenario.get("tags", ()) else []
        stores = ["sqlite"] if scenario.get("server", {}).get("persist") else ["memory", "sqlite"]
        for store in stores:
            yield pytest.param(store, name, id=f"{name}-{store}", marks=[*marks, *slow])


@pytest.mark.parametrize(("kept_in", "name"), list(_parameters()))
def test_scenario(kept_in: str, name: str, shared: dict[str, Broker], tmp_path: Path) -> None:
    scenario = _SCENARIOS[name]
    server = scenario.get("server", {})
    env: dict[str, str] = {}
    if "auth_tokens" in server:
        env["AUTH_TOKENS"] = ",".join(server["auth_tokens"])
    if "rate_limit" in server:
        env["RATE_LIMIT_MAX_REQUESTS"] = str(server["rate_limit"]["max"])
        env["RATE_LIMIT_WINDOW_MS"] = str(server["rate_limit"]["window_ms"])
    if server:
        with Broker(kept_in, tmp_path, env=env) as broker:
            Play(broker, scenario).run()
        return
    if kept_in not in shared:
        shared[kept_in] = Broker(kept_in, tmp_path).start()
    Play(shared[kept_in], scenario).run()
