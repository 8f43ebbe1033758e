"""Calls that a model wrote into its text: read where that is asked for, and told of in the result where it is not (PV75)."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepengine import AgentDefinition, Engine, tool
from stepengine.data.messages import TextPart, ToolCallPart
from stepengine.data.models import ModelReply, StopReason
from stepengine.models.openai_chat.written_calls import parse_written_calls
from stepengine.testing import ScriptedModel, text

pytestmark = [pytest.mark.anyio, pytest.mark.spec("providers:PV75")]

BLOCK = "<codebuff_tool_call>\n{}\n</codebuff_tool_call>"
INPUTS = st.dictionaries(
    st.text("abc_", min_size=1).filter(lambda key: not key.startswith("cb_")),
    st.none() | st.integers() | st.text('ab <>{}"\\\n') | st.lists(st.booleans(), max_size=2),
    max_size=3,
)


@given(before=st.text("ab \n"), given=INPUTS, after=st.text("ab \n"), is_ours=st.booleans())
def test_codebuff_block_is_a_call_between_its_texts(before, given, after, is_ours):
    legacy = {} if is_ours else {"cb_easp": True}
    block = BLOCK.format(json.dumps({"cb_tool_name": "put", **legacy, **given}, indent=2))
    reply = parse_written_calls(ModelReply(f"{before}{block}{after}"))

    (call,) = reply.tool_calls
    assert ("put", given) == (call.tool_name, call.input)
    said = [part.text if type(part) is TextPart else "call" for part in reply.content]
    assert [each for each in (before.strip(), "call", after.strip()) if each] == said
    assert StopReason.TOOL_USE is reply.stop_reason


def test_both_written_forms_are_parsed_and_others_stay_text():
    ours = '<tool_call>{"name": "look", "arguments": {"at": "x"}}</tool_call>'
    theirs = BLOCK.format('{"cb_tool_name": "put", "x": 1}')
    nameless = BLOCK.format('{"name": "put"}')
    crossed = '<codebuff_tool_call>{"cb_tool_name": "put"}</tool_call>'
    reply = parse_written_calls(ModelReply(f"{theirs} {nameless} {ours} {crossed}"))

    kinds = [part.tool_name if type(part) is ToolCallPart else part.text for part in reply.content]
    assert ["put", nameless, "look", crossed] == kinds


@pytest.mark.parametrize(
    "written", ["<tool_call>no call</tool_call>", "<tool_call>[1]</tool_call>", "<tool_call><function=>x</tool_call>"]
)
def test_a_block_that_is_no_call_stays_text(written):
    assert (TextPart(written),) == parse_written_calls(ModelReply(written)).content


@tool
def put(x: int) -> str:
    """Put something down."""
    return f"put {x}"


WRITTEN = BLOCK.format('{"cb_tool_name": "put", "x": 1}')
TOLD = "the model wrote {!r} into its text, which looks like a tool call, but no tool was called"


@pytest.mark.parametrize(
    ("said", "mark"),
    [
        (WRITTEN, "<codebuff_tool_call>"),
        ("I put.\n<tool_call>{}</tool_call>", "<tool_call>"),
        ('[TOOL_CALLS][{"name": "put"}]', "[TOOL_CALLS]"),
        ("<think>I could write <tool_call>.</think>Yes.", ""),
        ("a < b", ""),
    ],
)
async def test_written_call_is_warned_about_once_in_the_result(said, mark):
    agent = AgentDefinition("writer", model="test/m", tools=[put])
    async with Engine([agent], models=ScriptedModel([text(said)])) as engine:
        result = await engine.run("writer", "Go.")

    assert [mark] * bool(mark) == [mark for warning in result.warnings if TOLD.format(mark) in warning]
    assert ("written_calls=True" in "".join(result.warnings)) is bool(mark)
    assert () == result.tool_calls


async def test_agent_without_tools_gets_no_written_call_warning():
    agent = AgentDefinition("writer", model="test/m")
    async with Engine([agent], models=ScriptedModel([text(WRITTEN)])) as engine:
        assert () == (await engine.run("writer", "Go.")).warnings
