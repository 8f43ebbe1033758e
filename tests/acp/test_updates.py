"""
What an editor is shown of single events: the kinds of calls, the plan, and what stands on the side.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stepengine.acp.updates import Shown
from stepengine.data import events as ev
from stepengine.data.messages import ToolResult
from stepengine.data.usage import Usage
from tests.web.scenes import TODOS, TOLD, UNTOLD


def updates(*events: ev.Event) -> list[Any]:
    shown = Shown(1, Path("/work"), is_live=False)
    return [update for event in events for update in shown.of(event)]


@pytest.mark.spec("interfaces:IF52")
def test_the_kind_of_a_call_is_that_of_its_tool() -> None:
    categories = {"read_files": "read", "code_search": "read", "glob": "read", "find_files": "read", "write_file": "write",
                  "run_terminal_command": "execute", "read_url": "network", "own": "mcp", "think_deeply": ""}  # fmt: skip
    calls = [
        ev.ToolStarted(tool_name=name, tool_call_id=f"c{n}", input={}, category=category)
        for n, (name, category) in enumerate(categories.items())
    ]

    assert ["read", "search", "search", "search", "edit", "execute", "fetch", "other", "think"] == [
        update.kind for update in updates(*calls)
    ]


def test_a_diff_stays_when_its_call_has_ended_and_gives_way_to_what_went_wrong() -> None:
    call: dict[str, Any] = {"tool_name": "own_write", "tool_call_id": "c1"}
    began = ev.ToolStarted(**call, input={"path": "a.py", "content": "x"})
    ends = [ev.ToolFinished(**call, result=r) for r in (ToolResult.json("written"), ToolResult.error("denied"))]

    (started, done), (_, failed) = [updates(began, ev.ToolLog(message="a line", **call), end) for end in ends]

    assert ["diff"] == [each.type for each in started.content]
    assert (None, "denied") == (done.content, failed.content[0].content.text)


@pytest.mark.spec("interfaces:IF34")
def test_the_todos_of_the_root_are_the_plan_and_a_child_does_not_write_over_it() -> None:
    hidden = {"task": "see\x1b[2J", "completed": False}
    (plan,) = updates(ev.TodosChanged(todos=[*TODOS, hidden]), ev.TodosChanged(path="3", todos=[]))

    assert "plan" == plan.session_update
    assert [("look", "completed"), ("paint", "pending"), ("see\\x1b[2J", "pending")] == [
        (entry.content, entry.status) for entry in plan.entries
    ]


@pytest.mark.spec("interfaces:IF36", "interfaces:IF37")
def test_of_what_happens_on_the_side_only_a_shorter_conversation_and_warnings_are_thoughts() -> None:
    step = ev.StepFinished(step=0, ended_turn=True, usage=Usage())
    got = updates(*TOLD, *UNTOLD, step, ev.FileChanged(file="a.txt", action="created"))

    assert ["agent_thought_chunk"] * 2 == [update.session_update for update in got]
    assert ["The conversation was made shorter (x).\n", "slow\n"] == [update.content.text for update in got]
