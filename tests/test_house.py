"""The house keeps its own rules: docs follow the declarations, layers stay apart, nothing names a machine."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import gqueue.commands  # noqa: F401 - fills the table of commands
from gqueue.commands.registry import COMMANDS
from gqueue.engine.states import NAMES
from gqueue.errors import StartError
from gqueue.settings import SETTINGS

ROOT = Path(__file__).resolve().parent.parent
SOURCES = sorted([*(ROOT / "gqueue").rglob("*.py"), *(ROOT / "storage").glob("*.py")])
MODULES = [path for path in SOURCES if "gqueue/storage" not in str(path)]  # a link to ../storage
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_the_rendered_pages_follow_the_declarations() -> None:
    done = subprocess.run(
        [sys.executable, "scripts/render_docs.py", "--check"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_stale_pages_are_named_and_left_alone(tmp_path: Path) -> None:
    for folder in ("scripts", "docs"):
        (tmp_path / folder).mkdir()
    script = shutil.copy(ROOT / "scripts/render_docs.py", tmp_path / "scripts")
    done = subprocess.run(
        [sys.executable, script, "--check"], cwd=ROOT, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert [line.split()[0] for line in done.stderr.splitlines()] == [
        "docs/settings.md",
        "docs/commands.md",
        "docs/lifecycle.md",
    ]
    assert list((tmp_path / "docs").iterdir()) == []


def test_every_command_and_every_setting_is_explained() -> None:
    assert [one.name for one in COMMANDS.values() if not one.doc] == []
    assert [one.name for one in SETTINGS if not one.says.endswith(".")] == []
    page = (ROOT / "docs/commands.md").read_text()
    assert [one for one in COMMANDS if f"### {one}" not in page] == []


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)", page.read_text()):
        assert "://" in target or (page.parent / target).exists(), target
    heads = {head.lower().replace(" ", "-") for head in re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)}
    assert set(re.findall(r"\]\(#([^)]+)", page.read_text())) <= heads


def test_the_files_that_the_design_names_exist() -> None:
    """Paths in it are below the root or below gqueue/."""
    paths = re.findall(r"`([a-z_]+(?:/[a-z_]*)+(?:\.\w+)?)`", (ROOT / "docs/design.md").read_text())
    assert len(paths) > 20
    assert [path for path in paths if not any((base / path).exists() for base in (ROOT, ROOT / "gqueue"))] == []


def test_the_exit_codes_of_a_start_are_explained() -> None:
    page = (ROOT / "docs/design.md").read_text()
    errors = [StartError, *StartError.__subclasses__()]
    assert [error.__name__ for error in errors if f"\n| {error.code} | " not in page] == []


@pytest.mark.parametrize("script", ["setup", "check", "test"])
def test_a_script_can_be_run(script: str) -> None:
    assert os.access(ROOT / "scripts" / script, os.X_OK)
    subprocess.run(["bash", "-n", f"scripts/{script}"], cwd=ROOT, check=True)


@pytest.mark.parametrize(
    "entry", ["setup.cfg", "pyproject.toml", "gqueue", "storage", "tests", "scripts", "docs", "README.md", "LICENSE"]
)
def test_the_top_level_is_that_of_the_design_card(entry: str) -> None:
    assert (ROOT / entry).exists()


@pytest.mark.parametrize("path", MODULES, ids=name)
def test_a_module_says_what_lives_in_it(path: Path) -> None:
    text = path.read_text()
    assert not text or ast.get_docstring(ast.parse(text))


def _imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def test_only_programs_patch_the_standard_library() -> None:
    """The broker on its first line, and `gqueue worker run --pool gevent` before it loads the user's tasks."""
    patching = [name(path) for path in MODULES if re.search(r"^ *monkey\.patch_all", path.read_text(), re.MULTILINE)]
    assert patching == ["gqueue/cli.py", "gqueue/server/__main__.py"]


def test_the_store_is_imported_by_its_public_name() -> None:
    every = [*MODULES, *(ROOT / "tests").rglob("*.py"), *(ROOT / "scripts").glob("*.py")]
    assert [name(path) for path in every if any(one.split(".")[0] == "storage" for one in _imports(path))] == []


def test_the_engine_reads_no_clock_and_does_no_io() -> None:
    banned = {"time", "datetime", "socket", "gevent", "threading", "os", "sqlite3", "asyncio", "random.random"}
    found = {
        name(path): sorted({one.split(".")[0] for one in _imports(path)} & banned)
        for path in MODULES
        if "engine" in path.parts
    }
    assert {path: bad for path, bad in found.items() if bad} == {}


@pytest.mark.parametrize("module", ["gqueue", "gqueue.client.client"])
def test_a_client_loads_no_broker_and_no_gevent(module: str) -> None:
    program = f"import sys, {module}; print(*sorted(m for m in sys.modules if '.' not in m or m.startswith('gqueue.')))"
    out = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    loaded = set(out.split())
    assert not loaded & {"gevent", "click", "sqlite3", "sqlite_utils", "redis", "cronsim"}
    assert not [one for one in loaded if one.startswith(("gqueue.server", "gqueue.engine", "gqueue.storage"))]
    if module == "gqueue":
        assert [one for one in loaded if one.startswith("gqueue.")] == []


def test_every_state_is_drawn_and_nothing_else() -> None:
    page = (ROOT / "docs/lifecycle.md").read_text()
    diagram = page.split("```mermaid")[1].split("```")[0]
    arrows = re.findall(
        r"^    (\S+) --> (\S+): ([^:;\n]+)$", diagram, re.MULTILINE
    )  # a label ends at a colon or semicolon
    assert len(arrows) == diagram.count("-->")
    drawn = {state for source, target, _ in arrows for state in (source, target)}
    assert drawn == {"[*]", "delayed", *(name.replace("-", "_") for name in NAMES.values())}


def test_nothing_names_a_machine() -> None:
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False).stdout.split()
    if not tracked:
        pytest.skip("not a checkout")
    private = re.compile("|".join(["/" + "work/", "/" + "home/[a-z]", "/" + "tmp/venv", "127[.]0[.]0[.]1:3" + "128"]))
    found = [
        one
        for one in tracked
        if (ROOT / one).is_file() and private.search((ROOT / one).read_text(encoding="utf-8", errors="replace"))
    ]
    assert found == []
