"""
`stepengine agents tools`: a line for every bundled tool, and what one takes and gives.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from stepengine.cli.app import app
from stepengine.data.tools import ToolSpec
from stepengine.tools.bundled import document_tools
from stepengine.tools.bundled.names import BUNDLED
from stepengine.tools.schemas import JsonSchema


def typed(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["agents", "tools", *arguments])


def test_every_bundled_tool_has_a_line_of_its_own() -> None:
    shown = typed()

    assert 0 == shown.exit_code
    assert list(BUNDLED) == [line.split()[0] for line in shown.output.splitlines()]


@pytest.mark.parametrize("name", BUNDLED)
def test_tool_page_shows_parameters_result_keys_and_a_call(name: str) -> None:
    (one,) = [each for each in document_tools() if each.name == name]
    shown = typed(name).output

    said = [*[p.name for p in one.parameters], *[key.name for form in one.forms for key in form.keys]]
    assert [] == [word for word in said if not re.search(rf"^ +{word}\b", shown, re.MULTILINE)]
    assert f"yield from call({name}" in shown
    for line in re.findall(r"^  (from stepengine.* import .*)$", shown, re.MULTILINE):
        exec(line, names := {})
        assert names.keys() & {"call", name}
    assert f"from stepengine.tools.bundled import {name}\n" in shown
    assert all(part in shown for part in (one.text, one.errors, one.limits, one.maker))


@pytest.mark.parametrize(
    ("name", "hint"), [("read-file", "did you mean 'read_files'?"), ("zzz", "`stepengine agents tools`")]
)
def test_unknown_tool_suggests_the_nearest_one(name: str, hint: str) -> None:
    shown = typed(name)

    assert 2 == shown.exit_code
    assert hint in shown.stderr


@pytest.mark.parametrize("one", document_tools(), ids=lambda one: one.name)
def test_example_call_is_valid_for_its_tool(one: Any) -> None:
    spec: ToolSpec = one.spec

    assert [] == JsonSchema(one.name, spec.input_schema).issues(one.example)
    assert one.example == BUNDLED[one.name].name.arguments(**one.example)
    assert one.example or not one.parameters or one.name == "end_turn"


LEAD = """
from stepengine import AgentDefinition, ToolCall


def help_with(ctx):
    yield from ()
    return f"done: {ctx.prompt}"


def handle_steps(ctx):
    yield ToolCall("sleep", {"seconds": 0})
    yield ToolCall("start_agents", {"agents": [{"agent_type": "helper", "prompt": "x"}]})
    waited = yield ToolCall("wait_agents", {})
    return waited.tool_result.text


helper = AgentDefinition("helper", handle_steps=help_with)
names = ["start_agents", "wait_agents", "sleep"]
agent = AgentDefinition("lead", handle_steps=handle_steps, spawnable_agents=[helper], tools=names)
"""


@pytest.mark.spec("waiting:WT10", "waiting:WT11")
def test_agent_file_names_tools_for_waiting_and_background_agents(tmp_path: Path) -> None:
    file = tmp_path / "lead.py"
    file.write_text(LEAD)
    ran = CliRunner().invoke(app, ["run", str(file), "", "--cwd", str(tmp_path), "--quiet"])
    other = tmp_path / "watcher.py"
    other.write_text(LEAD.replace('"sleep"]', '"sleep", "watch"]'))
    watches = CliRunner().invoke(app, ["run", str(other), "", "--cwd", str(tmp_path)])

    assert "done: x" in ran.stdout, ran.output
    assert "runs programs with watch; allow that with --shell" in watches.output
