"""
`run_script` holds a handler to a script: what it shall yield, and what it is sent for it.
"""

from __future__ import annotations

import pytest

from stepengine.data.definition import AgentDefinition
from stepengine.data.messages import ToolResult
from stepengine.data.yields import STEP, STEP_ALL, AgentCall, ToolCall
from stepengine.errors import DataError, DefinitionError, ToolError
from stepengine.testing import run_script


def listed(folder):
    files = yield from ToolCall("list_files", {"path": folder})
    return files.data


def fixer(ctx):
    files = yield from listed(ctx.prompt or ".")
    turn = yield ToolCall("run_tests", {"files": files})
    if turn.tool_result.is_error:
        yield STEP_ALL
        return "fixed"
    return "fine"


LIST = ToolCall("list_files", {"path": "src"})
TEST = ToolCall("run_tests", {"files": ["a.py"]})


@pytest.mark.spec("requirements:P5")
@pytest.mark.parametrize(
    ("script", "returned"),
    [
        ([(LIST, ["a.py"]), (TEST, "passed")], "fine"),
        ([(LIST, ["a.py"]), (TEST, ToolResult.error("1 failed")), STEP_ALL], "fixed"),
        ([(ToolCall, ["a.py"]), (lambda y: y.input["files"] == ["a.py"], lambda y: f"ran {y.tool}")], "fine"),
    ],
)
def test_a_handler_that_keeps_to_its_script_returns_its_value(script, returned):
    assert returned == run_script(AgentDefinition("fixer", handle_steps=fixer), script, "src")


@pytest.mark.spec("requirements:P5")
@pytest.mark.parametrize(
    ("script", "told"),
    [
        (
            [(LIST, ["a.py"]), (ToolCall("build"), "built"), (STEP, "done")],
            [
                "the handler yielded something else",
                "  0  ToolCall(tool='list_files', input={'path': 'src'}, include_tool_call=True)\n     <- ['a.py']",
                "expected at 1:\n  ToolCall(tool='build'",
                "came:\n  ToolCall(tool='run_tests', input={'files': ['a.py']}",
                "test_run_with.py:",
                "left after that:\n  2  STEP",
            ],
        ),
        (
            [(LIST, ["a.py"])],
            ["the script has ended, but the handler continues", "expected at 1:\n  the end of the handler"],
        ),
        (
            [(LIST, ["a.py"]), (TEST, "passed"), STEP_ALL],
            ["the handler returned 'fine' before the end of the script", "expected at 2:\n  STEP_ALL"],
        ),
        ([(AgentCall, "x")], ["exchange so far:\n  nothing", "any AgentCall"]),
        ([(callable, "x")], ["a yield that callable accepts"]),
    ],
)
def test_a_mismatch_shows_the_whole_exchange_so_far(script, told):
    with pytest.raises(AssertionError) as failed:
        run_script(fixer, script, "src")
    assert [] == [part for part in told if part not in str(failed.value)]


@pytest.mark.spec("requirements:P5")
def test_a_scripted_error_arrives_at_the_yield_with_the_exchange():
    with pytest.raises(ToolError) as failed:
        run_script(fixer, [(LIST, ToolError("no such folder"))], "src")
    assert "came:\n  the handler raised ToolError('no such folder')" in failed.value.__notes__[0]


def test_an_assertion_of_the_handler_comes_with_the_exchange():
    def asserting(ctx):
        yield STEP
        assert not ctx.prompt, "the handler's own"

    with pytest.raises(AssertionError, match="the handler's own") as failed:
        run_script(asserting, [STEP], "x")
    assert "exchange so far" in failed.value.__notes__[0]


def test_an_invalid_script_is_refused_and_the_handler_closed():
    closed = []

    def handler(ctx):
        try:
            yield STEP
        finally:
            closed.append(ctx.prompt)
            yield STEP

    with pytest.raises(DataError, match="item 0 of the script is 'STEP'"):
        run_script(handler, ["STEP"])
    with pytest.raises(DefinitionError, match="no handle_steps"):
        run_script(AgentDefinition("bare"), [])
    with pytest.raises(AssertionError, match="something else"):
        run_script(handler, [STEP_ALL], "p")
    assert ["p"] == closed
