"""What an engine was not given and the package has: the error leads to the line that gives it."""

from __future__ import annotations

import re
from typing import Any

import pytest

from stepengine import AgentDefinition, Engine, StepContext, Steps, ToolCall, load_agent
from stepengine.errors import AgentError, DefinitionError, ToolNotAvailable
from stepengine.tools import ToolRegistry
from stepengine.tools.bundled import read_files
from stepengine.tools.makers import MAKERS, format_tools_argument
from tests.phrases import NO_AGENT

GIVEN = re.compile(r"pass the engine (workspace|tools)=(.*?), with `(from [^`]+)`")
STAND_INS = "hooks = [FileChangeHook('types', ['true'], pattern='**')]"


def refused(*tools: str) -> str:
    with pytest.raises(DefinitionError) as caught:
        Engine([AgentDefinition("fixer", model="test/model", tools=tools)])
    return caught.value.message


def given_by(message: str) -> dict[str, Any]:
    """Return the arguments of the engine that the lines of a message make."""
    given: dict[str, Any] = {}
    for argument, line, imports in GIVEN.findall(message):
        names: dict[str, Any] = {}
        exec(f"from stepengine.tools.bundled import *\n{STAND_INS}\n{imports}\nmade = {line}", names)
        given[argument] = names["made"]
    assert given, message
    return given


def test_error_lines_give_every_bundled_tool_an_agent_lists(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    wanted = [name for name, maker in MAKERS.items() if maker is not None]
    given = given_by(refused(*wanted))

    assert {"workspace", "tools"} == given.keys()
    with Engine([AgentDefinition("fixer", model="test/model", tools=wanted)], **given) as engine:
        assert "fixer" == engine.agent("fixer").id


def test_unknown_tool_is_refused_with_the_nearest_package_name():
    message = refused("read_file", "str_replace")

    assert "'read_file' does not exist; did you mean 'read_files'?" in message
    assert "'str_replace' comes with stepengine" in message
    assert "with stepengine" not in refused("frobnicate")
    assert "did you mean 'read_files'? 'code_serch' does not exist; did you mean" in refused("read_file", "code_serch")


def test_text_in_place_of_a_tool_names_its_constructor():
    with pytest.raises(DefinitionError, match=re.escape('pass tools=[*file_tools(".")]')):
        Engine(tools=[read_files])
    with pytest.raises(DefinitionError, match="names go into the tools of an agent"):
        Engine(tools=["order"])
    with pytest.raises(ToolNotAvailable, match=re.escape('tools=[*file_tools(".")]')):
        ToolRegistry().specs(["read_files"])
    assert "" == format_tools_argument(["order", "set_output"])


@pytest.mark.parametrize("given", ["file-lister", "file_lister"])
def test_agent_of_the_package_is_suggested_as_its_loading_call(given):
    loads = "load_agent('file-lister')"
    boss = AgentDefinition("boss", model="test/model", tools=["spawn_agents"], spawnable_agents=[given])
    with Engine([AgentDefinition("boss", model="test/model")]) as engine, pytest.raises(AgentError) as unknown:
        engine.run_sync(given, "Go")
    # Among the spawnable agents the id alone is enough; what the engine then lacks are the agent's tools.
    with pytest.raises(DefinitionError, match=re.escape('workspace=Workspace(".")')) as unspawnable:
        Engine([boss])

    assert loads in unknown.value.message
    assert "agent 'file-lister' lists the tool" in unspawnable.value.message
    assert "file-lister" == load_agent("file-lister").id


def test_misspelt_agent_names_the_nearest_id_except_to_models():
    def handle_steps(ctx: StepContext) -> Steps[object]:
        turn = yield ToolCall("lookup_agent_info", {"agent_id": "file-lister"}, include_tool_call=False)
        return turn.tool_result.data

    lister = AgentDefinition("lister", handle_steps=handle_steps)
    with Engine([lister]) as engine:
        with pytest.raises(AgentError, match="did you mean 'file-lister'"):
            engine.run_sync("file-listr", "Go")
        told = engine.run_sync("lister").output

    assert {"found": False, "error": f"{NO_AGENT} 'file-lister'; known are: 'lister'"} == told
