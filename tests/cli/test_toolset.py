"""The tools of a run on the command line that are made when a handler first calls one."""

from __future__ import annotations

from pathlib import Path

import attrs
import pytest

from stepengine import AgentDefinition, Engine, StepContext, Steps, ToolCall
from stepengine.cli.options import Options
from stepengine.cli.toolset import ToolRequest, make_allowed_tools, make_allowed_workspace
from stepengine.data.tools import ToolLike
from stepengine.tools.bundled.bundled import rootless_tools

NOBODY = AgentDefinition("nobody")


def allowed(agent: AgentDefinition, folder: Path, **options: object) -> list[ToolLike]:
    given, request = attrs.evolve(Options(), cwd=folder, **options), ToolRequest([[agent]])
    return make_allowed_tools(given, request, make_allowed_workspace(given, request))


def listing(_: StepContext) -> Steps:
    found = yield ToolCall("list_directory", {"path": "."}, include_tool_call=False)
    return found.tool_results[0].data["files"]


def test_a_tool_that_waits_works_where_the_run_began(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "here.txt").write_text("here")
    monkeypatch.chdir(tmp_path / "work")
    tools = allowed(NOBODY, Path())
    monkeypatch.chdir(tmp_path)

    with Engine(tools=tools) as engine:
        assert ["here.txt"] == engine.run_sync(AgentDefinition("lists", handle_steps=listing)).output


@pytest.mark.parametrize("folder", ["home", "above"])
def test_home_folder_or_its_parent_gets_no_folder_tools(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    (tmp_path / "above").symlink_to(tmp_path)

    assert [tool.spec.name for tool in rootless_tools()] == [
        tool.spec.name for tool in allowed(NOBODY, tmp_path / folder)
    ]
