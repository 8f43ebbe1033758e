"""
What an editor is shown of single events: the kinds of calls, the plan, and what stands on the side.
"""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from stepengine.adapters.acp.updates import ShownTurn
from stepengine.data import events as ev
from stepengine.data.messages import ImagePart, ToolResult
from stepengine.data.questions import Question
from stepengine.data.usage import Usage
from stepengine.testing import text
from tests.web.scenes import TODOS, TOLD, UNTOLD


def updates(*events: ev.Event) -> list[Any]:
    shown = ShownTurn(1, Path("/work"), is_live=False)
    return [update for event in events for update in shown.make_updates(event)]


@pytest.mark.spec("interfaces:IF52")
def test_the_kind_of_a_call_is_that_of_its_tool() -> None:
    categories = {"read_files": "read", "code_search": "read", "glob": "read", "find_files": "read", "write_file": "write",
                  "run_terminal_command": "execute", "read_url": "network", "own": "mcp", "think_deeply": "", "delete_file": "write"}  # fmt: skip
    calls = [
        ev.ToolStarted(tool_name=name, tool_call_id=f"c{n}", input={}, category=category)
        for n, (name, category) in enumerate(categories.items())
    ]

    assert ["read", "search", "search", "search", "edit", "execute", "fetch", "other", "think", "delete"] == [
        update.kind for update in updates(*calls)
    ]


def test_diff_stays_after_success_and_is_replaced_by_an_error() -> None:
    call: dict[str, Any] = {"tool_name": "own_write", "tool_call_id": "c1"}
    began = ev.ToolStarted(**call, input={"path": "a.py", "content": "x"})
    ends = [ev.ToolFinished(**call, result=r) for r in (ToolResult.json("written"), ToolResult.error("denied"))]

    (started, done), (_, failed) = [updates(began, ev.ToolLog(message="a line", **call), end) for end in ends]

    assert ["diff"] == [each.type for each in started.content]
    assert (None, "denied") == (done.content, failed.content[0].content.text)


@pytest.mark.spec("interfaces:IF34")
def test_pending_call_is_not_reported_completed() -> None:
    assert [] == updates(ev.ToolFinished(tool_name="t", tool_call_id="c1", result=ToolResult.make_pending("0.q2")))


def test_root_todos_become_the_plan_and_children_cannot_overwrite_it() -> None:
    hidden = {"task": "see\x1b[2J", "completed": False}
    (plan,) = updates(ev.TodosChanged(todos=[*TODOS, hidden]), ev.TodosChanged(path="3", todos=[]))

    assert "plan" == plan.session_update
    assert [("look", "completed"), ("paint", "pending"), ("see\\x1b[2J", "pending")] == [
        (entry.content, entry.status) for entry in plan.entries
    ]


@pytest.mark.spec("interfaces:IF36")
def test_only_compaction_and_warnings_become_thoughts() -> None:
    step = ev.StepFinished(step=0, ended_turn=True, usage=Usage())
    got = updates(*TOLD, *UNTOLD, step, ev.FileChanged(file="a.txt", action="created"))

    assert ["agent_thought_chunk"] * 2 == [update.session_update for update in got]
    assert ["The conversation was compacted (x).\n", "slow\n"] == [update.content.text for update in got]


@pytest.mark.spec("interfaces:IF21")
def test_root_steps_report_context_use_and_session_cost() -> None:
    model = "anthropic/claude-sonnet-4-5"

    def step(path: str, purpose: str, *, used: int, cost: str | None, model: str = model) -> list[ev.Event]:
        reply = text("Hi.", usage=Usage(input_tokens=used, output_tokens=10))
        return [
            ev.ModelStarted(path=path, model=model, purpose=purpose),
            ev.ModelFinished(path=path, model=model, reply=reply),
            ev.StepFinished(
                path=path, step=0, ended_turn=True, usage=Usage(), cost=None if cost is None else Decimal(cost)
            ),
        ]

    shown = ShownTurn(1, Path("/work"), is_live=True, cost=Decimal("0.5"))
    events = [
        *step("", "step", used=90, cost="0.25"), *step("2", "step", used=500, cost="9"), *step("", "compaction", used=700, cost=None),
        *step("", "step", used=190, cost="0.5", model="m/unknown"),
    ]  # fmt: skip
    told = [update for event in events for update in shown.make_updates(event)]

    assert [(100, 200_000, 0.75), (100, 200_000, None)] == [
        (one.used, one.size, one.cost and one.cost.amount) for one in told
    ]


@pytest.mark.spec("interfaces:IF51")
@pytest.mark.parametrize(
    ("given", "preview", "said"),
    [
        ({"a": 19, "note": "two\nlines"}, None, ["a: 19", "note:\n\n```\ntwo\nlines\n```"]),
        ({"items": [{"x": 1}]}, None, ['items:\n\n```\n[\n  {\n    "x": 1\n  }\n]\n```']),
        ({}, {"action": "Send a mail", "details": "to \x1b[1mBo"}, ["Send a mail", "to \\x1b[1mBo"]),
        ({}, {"action": "Run a shell script", "details": {"cwd": "docs", "script": "a | b", "needs_a_shell_because_of": "a pipe"}},
         ["Run a shell script", "cwd: docs", "```sh\na | b\n```", "needs a shell because of: a pipe"]),
        ({}, {"action": "Delete 'a'", "details": {"unified_diff": "-```"}}, ["Delete 'a'", "````diff\n-```\n````"]),
    ],
)  # fmt: skip
def test_permission_request_shows_the_call_in_words(given: Any, preview: Any, said: list[str]) -> None:
    question = Question("q1", "May it?", tool_name="own", details=given)
    event = ev.PermissionRequested(question=question, tool_name="own", tool_call_id="c1", input=given, preview=preview)
    (content,) = ShownTurn(1, Path("/work"), is_live=True).make_permission_call(event).content

    assert "\n\n".join(said) == content.content.text


def test_results_are_shown_readably_and_images_as_images() -> None:
    results = {
        "ran": ToolResult.json({"command": "x", "exit_code": 0, "stdout": "a\n", "stderr": "b\n", "truncated": False}),
        "failed": ToolResult.json({"command": "x", "exit_code": 2, "stdout": "", "truncated": False}),
        "wrote": ToolResult.json({"file": "a", "message": "Created a."}),
        "read": ToolResult.json([{"path": "a", "content": "x = 1\n", "total_lines": 1}, {"path": "b", "error": "no"}]),
        "own": ToolResult.json({"answer": 42}),
        "drew": ToolResult.parts(["A dot.", ImagePart(data=b"dot")]),
    }
    ended = [ev.ToolFinished(tool_name=n, tool_call_id=n, result=r) for n, r in results.items()]

    assert [
        ["```\na\nb\n```"], ["It ended with the exit code 2."], ["Created a."], ["a\n\n```\nx = 1\n\n```\n\nb: no"], ['{"answer":42}'],
        ["A dot.", "ZG90"],
    ] == [[getattr(c.content, "text", None) or c.content.data for c in update.content] for update in updates(*ended)]  # fmt: skip
