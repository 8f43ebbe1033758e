"""What a handler is told of the output: ``StepResult.output`` of this turn, ``agent_state.output`` of the whole run."""

from __future__ import annotations

import copy

import attrs
import pytest
from pydantic import BaseModel

from stepengine import STEP, STEP_ALL, AgentDefinition, Engine, GenerateN, Limits, Perform, StepText, ToolCall, tool
from stepengine.journal import MemoryJournal
from stepengine.testing import ScriptedModel, text, tool_call, tool_calls


class Flight(BaseModel):
    number: str


def found(number: str):
    return tool_call("set_output", {"number": number})


@tool
def look() -> str:
    """Look around."""
    return "seen"


def agent_of(handle_steps, **options):
    fields = {"output_schema": Flight, "tools": [look], **options}
    return AgentDefinition("finder", model="t/m", handle_steps=handle_steps, **fields)


async def ran(handle_steps, *replies, **options):
    journal, agent = MemoryJournal(), agent_of(handle_steps, **options)
    engine = Engine([agent], models=ScriptedModel([*replies]))
    result = await engine.run(agent, "Find it.", journal=journal)
    assert (await engine.replay(journal)).output == result.output
    return result


@pytest.mark.spec("generator-contract:G22")
async def test_output_of_an_earlier_turn_is_not_returned_later():
    """
    In codebuff a handler has ``agentState.output`` alone, which an earlier turn may have set; here it is the same.
    """
    codebuff = [Flight(number="A1"), Flight(number="A1"), Flight(number="B2")]
    seen = []

    def handle_steps(ctx):
        for _ in range(3):
            turn = yield STEP_ALL
            seen.append((turn.output, turn.agent_state.output))

    replies = [found("A1"), text("There is none."), tool_calls(tool_call("look"), found("B2")), text("done")]
    result = await ran(handle_steps, *replies)

    first, second = Flight(number="A1"), Flight(number="B2")
    assert [(first, first), (None, first), (second, second)] * 2 == seen  # the second time in the replay
    assert codebuff == [get_or_create_run_object for _, get_or_create_run_object in seen[:3]]
    assert result.output == second


@pytest.mark.spec("generator-contract:G22")
async def test_turn_of_several_steps_keeps_its_output():
    seen = []

    def handle_steps(ctx):
        assert ctx.agent_state.output is None
        seen.append((yield STEP).output)
        seen.append((yield STEP).output)
        seen.append((yield STEP).output)
        seen.append((yield ToolCall("look")).output)
        seen.append((yield GenerateN(1)).output)
        seen.append((yield STEP).output)

    early = tool_calls(found("A1"), tool_call("look"))
    await ran(handle_steps, early, tool_call("look"), text("done"), text("maybe"), text("none"))
    assert ([Flight(number="A1")] * 5 + [None]) * 2 == seen


@pytest.mark.spec("generator-contract:G22")
async def test_output_set_by_the_handler_is_returned_at_once():
    seen = []

    def handle_steps(ctx):
        seen.append((yield StepText("hello")).output)
        seen.append((yield ToolCall("set_output", {"number": "A1"})).output)

    await ran(handle_steps)
    assert [None, Flight(number="A1")] * 2 == seen


@pytest.mark.spec("generator-contract:G22")
async def test_without_a_schema_the_output_is_json():
    seen = []

    def handle_steps(ctx):
        turn = yield STEP_ALL
        seen.append((turn.output, turn.agent_state.output))
        turn = yield STEP_ALL
        seen.append((turn.output, turn.agent_state.output))

    await ran(
        handle_steps, found("A1"), text("no"), output_schema=None, output_mode="structured_output", tools=["set_output"]
    )
    assert [({"number": "A1"}, {"number": "A1"}), (None, {"number": "A1"})] * 2 == seen


@pytest.mark.spec("generator-contract:G23")
async def test_state_with_a_pydantic_output_can_be_continued():
    kept = []

    def keep(state):
        kept.append(state)

    def handle_steps(ctx):
        turn = yield STEP_ALL
        yield from Perform(keep, turn.agent_state)
        assert turn.agent_state is (yield ToolCall("think_deeply", {"thought": "on"})).agent_state

    result = await ran(handle_steps, found("A1"))
    assert (Flight(number="A1"), {"number": "A1"}) == (kept[0].output, result.state.output)
    assert copy.copy(attrs.evolve(kept[0], step_index=9)).output == Flight(number="A1")
    engine = Engine(models=ScriptedModel(["on"]))
    assert (await engine.run(AgentDefinition("next", model="t/m"), "Go on.", previous=kept[0])).output == "on"


JSON = '{"number": "A1"}'
TEXTS = {
    "alone": text(JSON),
    "in a fenced block": text(f"Here it is:\n```json\n{JSON}\n```"),
    "as data": text(f'{{"data": {JSON}}}'),
    "as the message of end_turn": tool_call("end_turn", {"message": JSON}),
}


@pytest.mark.spec("generator-contract:G22", "generator-contract:S12")
@pytest.mark.parametrize("step", [STEP, STEP_ALL], ids=["STEP", "STEP_ALL"])
@pytest.mark.parametrize("reply", TEXTS.values(), ids=TEXTS)
async def test_valid_json_text_is_the_output_of_its_turn(reply, step):
    seen = []

    def handle_steps(ctx):
        for _ in range(3):  # as in the page for those who come from Pydantic AI
            turn = yield step
            seen.append((turn.output, turn.agent_state.output))
            if turn.output is not None:
                return

    result = await ran(handle_steps, reply, tools=[look, "end_turn"])

    assert [(Flight(number="A1"),) * 2] * 2 == seen  # the second time in the replay
    assert (Flight(number="A1"), 1) == (result.unwrap(), result.usage.requests)


@pytest.mark.spec("generator-contract:G22", "generator-contract:S12")
async def test_final_answer_at_the_step_limit_is_its_turns_output():
    seen = []

    def handle_steps(ctx):
        seen.append((yield STEP_ALL).output)

    result = await ran(handle_steps, tool_call("look"), text(JSON), limits=Limits(max_steps=1))

    assert [Flight(number="A1")] * 2 == seen
    assert ("max_steps", Flight(number="A1")) == (result.status, result.output)


@pytest.mark.spec("generator-contract:G22", "generator-contract:S12")
async def test_text_after_set_output_is_the_output_of_its_turn():
    seen = []

    def handle_steps(ctx):
        for _ in range(4):
            turn = yield STEP_ALL
            seen.append(turn.output and turn.output.number)

    set_and_said = tool_calls(found("B2"), tool_call("look"))
    silent = tool_call("end_turn")
    replies = [text(JSON), set_and_said, text(JSON), silent, text('{"number": "C3"}')]
    result = await ran(handle_steps, *replies, tools=[look, "end_turn"])

    assert ["A1", "B2", None, "C3"] * 2 == seen
    assert Flight(number="C3") == result.output


@pytest.mark.spec("generator-contract:G22", "generator-contract:S12")
@pytest.mark.parametrize("said", ["Not yet.", '{"seat": 1}', f"{JSON} and {JSON}"])
async def test_invalid_text_is_no_output_of_a_turn(said):
    seen = []

    def handle_steps(ctx):
        seen.append((yield STEP_ALL).output)

    result = await ran(handle_steps, text(said), found("B2"))

    assert [None] * 2 == seen
    assert Flight(number="B2") == result.output
