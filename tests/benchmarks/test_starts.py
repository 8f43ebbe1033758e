"""What a start loads, which is the same on every machine. Nothing here takes times."""

from __future__ import annotations

import gc
import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.starts import AGENT, CODES, beside_the_sdks, weights
from stepengine.cli import main

ROOT = Path(__file__).resolve().parents[2]
COUNT = """
import json, sys
print(json.dumps(sorted(sys.modules)), file=sys.stderr)
"""
HEAVY = (
    "pydantic",
    "pydantic_core",
    "typer",
    "rich",
    "anthropic",
    "openai",
    "google.genai",
    "httpx2",
    "genai_prices",
    "sqlite3",
)
UNASKED = (
    "stepengine.models.anthropic",
    "stepengine.models.clouds",
    "stepengine.models.openai_chat",
    "stepengine.models._reading",
    "stepengine.tools.web",
)
"""What only a model that is asked needs, or the web."""
NOT_YET = (
    "stepengine.cli.journals",
    "stepengine.journal.replayer",
    "stepengine.journal.signing",
    "stepengine.journal.sleeping",
    "stepengine.journal.sqlite",
    "stepengine.models._price_book",
    "stepengine.models.presets",
    "stepengine.system.root",
    "stepengine.tools.bundled",
)
"""What a new run needs when it ends, sleeps, is signed or asks a model, and where its handler calls a tool of the folder."""
OF_PARTS = ("docstring_parser", "email", "importlib.metadata", "jsonschema", "tomllib")
"""What reads schemas, docstrings, versions and settings, for a run that has none of them to read."""
OF_THE_LOOP = ("asyncio", "logging", "socket", "ssl", "subprocess")
"""asyncio, and what it brings: a third of what the import took while it was loaded with it."""


def loaded(code: str, *arguments: str) -> list[str]:
    """
    Return the modules that a program has loaded in the end.
    """
    program = f"import atexit\natexit.register(lambda: exec({COUNT!r}, {{}}))\n{code}"
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, cwd=ROOT, check=False
    )
    names: list[str] = json.loads(done.stderr.strip().splitlines()[-1])
    return names


def of_ours(names: list[str]) -> set[str]:
    return {".".join(name.split(".")[:2]) for name in names if name.startswith("stepengine.")}


@pytest.mark.spec("performance:Q13")
def test_the_usable_import_builds_no_floor_that_only_a_run_needs() -> None:
    """
    Neither the machine nor the runtime, no permissions, sessions or journals, no adapter of a provider, no event loop.
    """
    names = loaded(CODES["usable import"])

    assert [] == [name for name in (*HEAVY, *OF_THE_LOOP) if name in names]
    assert {"data", "engine", "errors", "models", "system", "tooling"} == {n.split(".")[1] for n in of_ours(names)}
    assert "stepengine.data.events" not in names


@pytest.mark.spec("performance:Q13")
@pytest.mark.parametrize("typed", ["--help", "--version", ""])
def test_the_list_of_commands_loads_nothing_of_the_engine_and_no_parser(typed: str) -> None:
    names = loaded("from stepengine.cli import main; main()", *typed.split())

    unwanted = HEAVY if typed == "--version" else (*HEAVY, *OF_THE_LOOP)  # what reads versions brings sockets

    assert [] == [name for name in unwanted if name in names]
    assert {"stepengine.cli", "stepengine.data", "stepengine.errors"} == of_ours(names)


@pytest.mark.spec("performance:Q13")
def test_a_command_loads_no_other_command() -> None:
    names = loaded("from stepengine.cli import main; main()", "run", "--help")

    assert ["stepengine.cli.commands.run"] == [name for name in names if name.startswith("stepengine.cli.commands.")]


@pytest.mark.spec("performance:Q13")
def test_a_run_loads_no_adapter_and_no_sdk_that_it_does_not_ask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STEPENGINE_STATE_DIR", str(tmp_path / "state"))
    (tmp_path / "mine.py").write_text(AGENT)

    names = loaded("from stepengine.cli import main; main()", "run", str(tmp_path / "mine.py"), "--quiet")

    assert [] == [name for name in (*HEAVY, *OF_PARTS) if name in names and name != "typer"]
    assert [] == [n for n in names if n.startswith(UNASKED)]
    assert "stepengine.judging" not in of_ours(names)


SAYS = f"""
import json, sys
from stepengine import AgentDefinition, Perform

def spent():
    return [name for name in {NOT_YET!r} if name in sys.modules]

def handle_steps(ctx):
    return (yield from Perform(spent))

agent = AgentDefinition("starting", handle_steps=handle_steps)
"""


def output_in_project(code: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """
    Return the output of an agent that is run as a command in a folder of its own.
    """
    monkeypatch.setenv("STEPENGINE_STATE_DIR", str(folder / "state"))
    project = folder / "project"
    project.mkdir()
    (project / "mine.py").write_text(code)
    done = subprocess.run(
        [sys.executable, "-m", "stepengine", "run", "mine.py", "--quiet"],
        capture_output=True,
        text=True,
        cwd=project,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=True,
    )
    return json.loads(done.stdout)


@pytest.mark.spec("performance:Q13")
def test_at_its_first_effect_a_run_has_loaded_nothing_that_it_may_never_need(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert [] == output_in_project(SAYS, tmp_path, monkeypatch)


TELLS = """
import sys
from stepengine import AgentDefinition, ToolCall

def handle_steps(ctx):
    before = "pydantic" in sys.modules
    found = yield ToolCall("list_directory", {"path": "."}, include_tool_call=False)
    return [before, str(found.tool_results[0])]

agent = AgentDefinition("telling", handle_steps=handle_steps)
"""


@pytest.mark.spec("performance:Q13")
def test_a_handler_may_call_a_tool_that_was_not_made_before_it_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, listed = output_in_project(TELLS, tmp_path, monkeypatch)

    assert not before
    assert "mine.py" in listed


COLLECTS = """
import gc
from stepengine import AgentDefinition

def handle_steps(ctx):
    return [gc.isenabled(), gc.get_freeze_count() > 10_000]
    yield

agent = AgentDefinition("collecting", handle_steps=handle_steps)
"""


@pytest.mark.spec("performance:Q13")
def test_what_a_command_loads_is_not_looked_through_again_and_what_it_makes_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STEPENGINE_STATE_DIR", str(tmp_path / "state"))
    (tmp_path / "mine.py").write_text(COLLECTS)

    done = subprocess.run(
        [sys.executable, "-m", "stepengine", "run", str(tmp_path / "mine.py"), "--quiet"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=True,
    )

    assert [True, True] == json.loads(done.stdout)


def test_the_collector_is_back_when_the_command_line_was_called_in_a_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["stepengine", "--help"])
    with pytest.raises(SystemExit):
        main()

    assert gc.isenabled()


@pytest.mark.spec("performance:Q14")
def test_every_part_of_an_installation_is_weighed_once() -> None:
    found = weights()

    assert {"stepengine", "attrs", "openai", "pydantic-core"} <= found.keys()
    assert min(found.values()) > 0
    assert 0 < beside_the_sdks(found) < sum(found.values()) - found["openai"] - found["anthropic"]


def test_the_page_tells_what_each_part_of_an_installation_weighs() -> None:
    """
    Within a fifth, since versions differ from environment to environment; the parts are those that are installed.
    """
    written = (
        (ROOT / "docs" / "install.md")
        .read_text(encoding="utf-8")
        .partition("<!-- weights:")[2]
        .partition("<!-- end")[0]
    )
    told = {
        name: float(megabytes) for name, megabytes in re.findall(r"^\| (.+) \| ([\d.]+) \|$", written, re.MULTILINE)
    }
    made = runpy.run_path(str(ROOT / "docs" / "make_weights.py"))["figures"]()

    assert [*made] == [*told]
    assert told == {name: pytest.approx(megabytes, rel=0.2, abs=0.1) for name, megabytes in made.items()}
