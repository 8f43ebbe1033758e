"""``suggest_followups`` and ``run_file_change_hooks``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepengine import AgentDefinition, Engine
from stepengine.errors import DefinitionError
from stepengine.events import FollowupsSuggested
from stepengine.testing import ScriptedModel, tool_call
from stepengine.tools import ToolRegistry
from stepengine.tools.bundled import FileChangeHook, change_hook_tools, followup_tools
from tests.phrases import NOT_EXECUTED, OUTSIDE_ROOT

SUGGESTED = [{"prompt": "Write tests.", "label": "Tests"}, {"prompt": "Write docs."}]


def agent(*tools: Any) -> AgentDefinition[Any]:
    return AgentDefinition("worker", model="test/model", tools=tools)


@pytest.mark.spec("generator-contract:T3", "requirements:F21")
async def test_followups_are_an_event_and_trigger_no_further_step() -> None:
    (suggest,) = followup_tools()
    model = ScriptedModel([tool_call("suggest_followups", {"followups": SUGGESTED})])
    async with Engine([agent(suggest)], models=model) as engine:
        events = [event async for event in engine.stream("worker", "go")]

    (shown,) = [e for e in events if isinstance(e, FollowupsSuggested)]
    assert (SUGGESTED, "suggest_followups") == (shown.followups, shown.tool_name)
    assert 1 == len(model.calls)
    assert (False, "control") == (suggest.spec.forces_next_step, suggest.spec.category)
    registry = ToolRegistry([suggest])
    for wrong in ([], [{"label": "x"}], [{"prompt": ""}], [{"prompt": "x", "more": 1}]):
        assert "Invalid parameters" in (await registry.execute("suggest_followups", {"followups": wrong})).text
    assert "2 followups" in (await registry.execute("suggest_followups", {"followups": SUGGESTED})).text


def check(name: str, code: str, pattern: str = "**", **options: Any) -> FileChangeHook:
    return FileChangeHook(name, [sys.executable, "-c", code], pattern, **options)


@pytest.mark.spec("generator-contract:T16", "requirements:F21")
async def test_change_hooks_with_matching_patterns_run_in_order(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    hooks = [
        check("types", "print('fine')", "**/*.py"),
        check("web", "print('never')", "web/**"),
        check("tests", "import os, sys; print(os.path.basename(os.getcwd())); sys.exit(3)", cwd="sub"),
        FileChangeHook("gone", ["no-such-program-at-all"]),
    ]
    (tool_,) = change_hook_tools(tmp_path, hooks)
    registry = ToolRegistry([tool_])
    result = await registry.execute("run_file_change_hooks", {"files": ["a.py", "b/c.txt"]})

    types, tests, gone = result.data  # type: ignore[misc]
    assert ("types", "fine", 0) == (types["hook_name"], types["stdout"].strip(), types["exit_code"])
    assert ("tests", "sub", 3) == (tests["hook_name"], tests["stdout"].strip(), tests["exit_code"])
    assert NOT_EXECUTED in gone["error"]
    assert (
        []
        == (
            await ToolRegistry(change_hook_tools(tmp_path, hooks[1:2])).execute(
                "run_file_change_hooks", {"files": ["a.py"]}
            )
        ).data
    )
    assert OUTSIDE_ROOT in (await registry.execute("run_file_change_hooks", {"files": ["../x"]})).text
    assert ("execute", False) == (tool_.spec.category, tool_.spec.annotations.read_only)
    assert {"files"} == set(tool_.spec.input_schema["properties"])


@pytest.mark.spec("generator-contract:T16")
def test_the_hooks_tool_needs_valid_hooks(tmp_path: Path) -> None:
    for hooks in ([], [FileChangeHook("x", ["true"], pattern="/abs")]):
        with pytest.raises(DefinitionError):
            change_hook_tools(tmp_path, hooks)
    with pytest.raises(DefinitionError, match="no command"):
        FileChangeHook("x", [])


@pytest.mark.spec("generator-contract:T16")
@given(st.one_of(st.floats(), st.integers(), st.sampled_from([0.0, 600, 600.1, True, "9"])))
def test_a_hook_keeps_its_timeout_or_is_refused(seconds: Any) -> None:
    if type(seconds) in {int, float} and 0 < seconds <= 600:
        assert FileChangeHook("x", ["true"], timeout=seconds).timeout == seconds
    else:
        with pytest.raises(DefinitionError, match="more than 0 and at most 600"):
            FileChangeHook("x", ["true"], timeout=seconds)
