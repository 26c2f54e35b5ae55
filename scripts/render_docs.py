"""Render docs/settings.md, docs/commands.md and docs/lifecycle.md from the declarations; `--check` only compares."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

import msgpack

import gqueue.commands  # noqa: F401 - fills the table of commands
from gqueue.commands.registry import COMMANDS, Command, Field
from gqueue.engine.states import TRANSITIONS
from gqueue.model import Packed
from gqueue.settings import SETTINGS, Setting

T = TypeVar("T")

DOCS = Path(__file__).resolve().parent.parent / "docs"
NOTE = "<!-- rendered by scripts/render_docs.py: change the declarations, not this page -->\n"

#: The headings, in the order of the page. What is not named here comes last, under its own name.
_TABLES = {
    "server": "Listening",
    "storage": "Storage",
    "auth": "Authentication",
    "timeouts": "Time",
    "limits": "Limits",
    "logging": "Log",
}
_GROUPS = {
    "core": "Push, pull and outcomes",
    "control": "Control of jobs",
    "query": "Queries",
    "logs": "Logs of jobs",
    "queue": "Queues",
    "rates": "Rates and concurrency",
    "config": "Configuration of queues",
    "dedup": "Unique keys",
    "events": "Events",
    "workers": "Workers",
    "system": "The broker",
}

_SETTINGS = f"""\
# Settings

{NOTE}
What `gqueue-server` can be told. A flag goes before the environment, the environment before the settings file, the
file before the default. Of several names in the environment the first one that is set counts. A flag or a key of the
file that does not exist is an error.

The settings file is TOML, named by `--config FILE` (`-c`) or `GQUEUE_CONFIG`; `storage.url` is the key `url` in the
table `[storage]`. A setting in ms takes a bare number, or `500ms`, `5s`, `10m`, `2h`, `1d`. A list is separated by
commas, or a list in the file.

SIGHUP makes a running broker read its tokens, its certificate and the log level again; anything else needs a restart.
"""

_COMMANDS = f"""\
# Commands

{NOTE}
A request is a MessagePack map with `cmd`, the fields of the command and, when the client wants to match replies,
`reqId`. A reply has `ok: true` and the fields of its command, or `ok: false` and an `error`. `nil` counts as absent.
Fields are checked in the order of these tables; the first that does not fit is named in the refusal, and nothing has
changed then.

A command that *changes something* is refused with `Storage unavailable: REASON` while the store takes no batch, and
its reply leaves when the change is durable. One that *reveals* waits for what it shows to be durable, and not for its
own change.

With tokens configured a connection begins with `Auth`, whose one field is `token`; until that has succeeded every
other command is answered `Not authenticated`.
"""

_LIFECYCLE = f"""\
# The life of a job

{NOTE}
```mermaid
stateDiagram-v2
{{diagram}}
```

`delayed`, `waiting` and `prioritized` are one state of the broker, queued, by three names: `delayed` while its time
has not come, then `prioritized` with a priority above 0, else `waiting`. The table and the diagram say `waiting` for
both of the latter. A failed job stays where it is, with its reason, until it is moved back or cleaned. With
`removeOnComplete` or `removeOnFail` the job is gone where it would be `completed` or `failed`. A job that is lost again
waits for its backoff first: it is `delayed`, not `waiting`.

What a way out of `active` *counts*: an attempt is one of the job's `attempts`, a stall one of its stalls, a loss one
of the deliveries in a row whose worker disappeared. Every one of these ways goes through `Settlement.leave`.

{{table}}"""


def table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A Markdown table."""
    heads = list(heads)
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines) + "\n"


def code(words: Iterable[str]) -> str:
    return ", ".join(f"`{word}`" for word in words)


def grouped(items: Iterable[T], group: Callable[[T], str], heads: dict[str, str]) -> list[tuple[str, list[T]]]:
    """(heading, items) of each group, in the order of `heads`."""
    groups: dict[str, list[T]] = {name: [] for name in heads}
    for item in items:
        groups.setdefault(group(item), []).append(item)
    return [(heads.get(name, name.capitalize()), of) for name, of in groups.items() if of]


# ---------------------------------------------------------------- settings


def settings() -> str:
    parts = [_SETTINGS]
    for head, of in grouped(SETTINGS, lambda setting: setting.key.partition(".")[0], _TABLES):
        rows = ([code(s.flags), code(s.env), f"`{s.key}`", _value(s), s.unit, s.says] for s in of)
        parts.append(f"## {head}\n")
        parts.append(table(("flag", "environment", "file", "default", "unit", "meaning"), rows))
    return "\n".join(parts)


def _value(setting: Setting) -> str:
    if setting.default in (None, ()):
        return ""
    if isinstance(setting.default, bool):
        return "on" if setting.default else "off"
    return f"`{setting.default}`"


# ---------------------------------------------------------------- commands


def commands() -> str:
    groups = grouped(COMMANDS.values(), lambda command: command.group, _GROUPS)
    parts = [_COMMANDS]
    parts += [f"- {head}: {', '.join(f'[{one.name}](#{one.name.lower()})' for one in of)}" for head, of in groups]
    for head, of in groups:
        files = sorted({one.handler.__module__.replace(".", "/") for one in of})
        parts.append(f"\n## {head}\n\nDeclared in {code(f'{file}.py' for file in files)}.\n")
        parts += map(_command, of)
    return "\n".join(parts)


def _command(command: Command) -> str:
    text = "\n".join(line.strip() for line in command.doc.splitlines())
    marks = [("Changes something", command.writes), ("reveals", command.reveals)]
    mark = ", ".join(word for word, holds in marks if holds)
    parts = [f"### {command.name}\n", text + (f" *{mark}.*" if mark else "") + "\n"]
    if command.fields:
        parts.append(table(("field", "holds", "default"), map(_field, command.fields)))
    return "\n".join(parts)


def _field(field: Field) -> list[str]:
    holds = field.kind.says + ("; `nil` is a value" if field.nil else "")
    return [code((field.wire, *field.aliases)), holds, "**required**" if field.required else _default(field)]


def _default(field: Field) -> str:
    value = field.default
    if isinstance(value, Packed):
        value = msgpack.unpackb(value)
        return "`nil`" if value is None else f"`{value}`"
    if isinstance(value, tuple):  # a map, checked: what it means when nothing of it is given
        value = next((part for part in value if part), None)
    if value is None or value == []:
        return ""
    return f"`{str(value).lower()}`"


# ---------------------------------------------------------------- the life of a job


def lifecycle() -> str:
    arrows: dict[tuple[str, str], list[str]] = {}
    rows = []
    for one in TRANSITIONS:
        arrows.setdefault((one.source, one.target), []).append(one.trigger)
        events = code(one.event.split(", ")) if one.event else ""
        rows.append((one.source or "new", one.target or "gone", one.trigger, events, one.counts))
    states = dict.fromkeys(name for arrow in arrows for name in arrow if _node(name) != name and name)
    lines = [f'state "{name}" as {_node(name)}' for name in states]
    # a label ends at a semicolon
    lines += [f"{_node(source)} --> {_node(target)}: {'<br>'.join(why)}" for (source, target), why in arrows.items()]
    return _LIFECYCLE.format(
        diagram="\n".join(f"    {line}" for line in lines),
        table=table(("from", "to", "because of", "event", "counts"), rows),
    )


def _node(state: str) -> str:
    return state.replace("-", "_") or "[*]"


PAGES = {"settings.md": settings, "commands.md": commands, "lifecycle.md": lifecycle}


def main() -> int:
    """0, or 1 when `--check` has found a page that does not follow the declarations."""
    stale = 0
    for name, render in PAGES.items():
        page = DOCS / name
        text = render()
        if page.exists() and page.read_text() == text:
            continue
        if "--check" in sys.argv[1:]:
            print(f"docs/{name} is stale: run scripts/render_docs.py", file=sys.stderr)
            stale = 1
        else:
            page.write_text(text)
    return stale


if __name__ == "__main__":
    sys.exit(main())
