"""Render docs/settings.md, docs/commands.md and docs/lifecycle.md from the declarations; `--check` only compares."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

import gqueue.commands  # noqa: F401 - fills the table of commands
from gqueue.commands.registry import COMMANDS, Command, Field
from gqueue.engine.states import TRANSITIONS
from gqueue.settings import SETTINGS, Setting

DOCS = Path(__file__).resolve().parent.parent / "docs"
NOTE = "<!-- rendered by scripts/render_docs.py: change the declarations, not this page -->\n"

_TABLES = {
    "server": "Listening",
    "storage": "Storage",
    "auth": "Authentication",
    "tls": "TLS",
    "limits": "Limits",
    "timeouts": "Time",
    "logging": "Log",
}
_GROUPS = {
    "core": "Push, pull and outcomes",
    "query": "Queries",
    "control": "Control of jobs and queues",
    "queue": "Queues",
    "dedup": "Deduplication",
    "events": "Events",
    "logs": "Logs",
    "workers": "Workers",
    "rates": "Rates and concurrency",
    "config": "Configuration",
    "system": "Connection",
}


def table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A Markdown table."""
    heads = list(heads)
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines) + "\n"


def code(words: Iterable[str]) -> str:
    return ", ".join(f"`{word}`" for word in words)


# ---------------------------------------------------------------- settings


def settings() -> str:
    parts = [
        "# Settings\n",
        NOTE,
        "What `gqueue-server` can be told. A flag goes before the environment, the environment before the settings\n"
        "file (`--config FILE`, TOML), the file before the default. A name that does not exist is an error, in all\n"
        "three places. Durations are milliseconds, or `500ms`, `5s`, `10m`, `2h`, `1d`.\n",
    ]
    keys: dict[str, list[Setting]] = {}
    for setting in SETTINGS:
        keys.setdefault(setting.key.partition(".")[0], []).append(setting)
    for key, of in keys.items():
        parts.append(f"## {_TABLES.get(key, key.capitalize())}\n")
        rows = ([code(s.flags), code(s.env), f"`{s.key}`", _default(s), s.says] for s in of)
        parts.append(table(("flag", "environment", "file", "default", "meaning"), rows))
    return "\n".join(parts)


def _default(setting: Setting) -> str:
    if setting.default in (None, ()):
        return ""
    if isinstance(setting.default, bool):
        return "on" if setting.default else "off"
    return f"`{setting.default}`" + (f" {setting.unit}" if setting.unit else "")


# ---------------------------------------------------------------- commands


def commands() -> str:
    parts = [
        "# Commands\n",
        NOTE,
        "A request is a MessagePack map with `cmd` and, when the client wants to match replies, `reqId`. A reply has\n"
        "`ok: true` and the fields of its command, or `ok: false` and an `error`. Fields are checked in the order of\n"
        "these tables; the first that does not fit is the refusal, and nothing has changed then.\n\n"
        "**W** changes something: it is refused with `Storage unavailable: …` while the store takes no batch, and its\n"
        "reply leaves when the change is durable.\n",
    ]
    groups: dict[str, list[Command]] = {}
    for one in COMMANDS.values():
        groups.setdefault(one.group, []).append(one)
    for group, of in groups.items():
        parts.append(f"## {_GROUPS.get(group, group.capitalize())}\n")
        for one in of:
            parts.append(f"### {one.name}{' **W**' if one.writes else ''}\n\n{_paragraph(one.doc)}\n")
            if one.fields:
                parts.append(table(("field", "holds", "default"), map(_field, one.fields)))
    return "\n".join(parts)


def _paragraph(text: str) -> str:
    return "\n".join(line.strip() for line in text.splitlines())


def _field(field: Field) -> list[str]:
    names = code((field.wire, *field.aliases))
    if field.required:
        return [names, field.kind.says, "**required**"]
    default = "" if field.default is None else str(field.default).lower() if field.default in (True, False) else None
    return [names, field.kind.says, f"`{field.default}`" if default is None else default]


# ---------------------------------------------------------------- life of a job


def lifecycle() -> str:
    rows = []
    arrows: dict[tuple[str, str], list[str]] = {}
    for one in TRANSITIONS:
        arrows.setdefault((one.source or "[*]", one.target or "[*]"), []).append(one.trigger)
        rows.append(
            [
                one.source or "new",
                one.target or "gone",
                one.trigger,
                code(one.event.split(", ")) if one.event else "",
                one.counts,
            ]
        )
    lines = [f"    {_node(source)} --> {_node(target)}: {'; '.join(why)}" for (source, target), why in arrows.items()]
    return "\n".join(
        [
            "# The life of a job\n",
            NOTE,
            "```mermaid",
            "stateDiagram-v2",
            *lines,
            "```\n",
            "`delayed`, `waiting` and `prioritized` are one state of the broker, queued, by three names: `delayed`\n"
            "while its time has not come, then `prioritized` with a priority above 0, else `waiting`. A failed job\n"
            "stays where it is, with its reason, until it is moved back, cleaned or retired.\n\n"
            "What a way out of `active` *counts*: an attempt is one of the job's `attempts`, a stall one of its\n"
            "stalls, a loss one of the deliveries in a row whose worker disappeared.\n",
            table(("from", "to", "because of", "event", "counts"), rows),
        ]
    )


def _node(state: str) -> str:
    return state.replace("-", "_") if state != "[*]" else state


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
