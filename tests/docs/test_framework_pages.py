"""Lines of the pages about other frameworks that say what differs here without an error."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import BaseModel

from stepengine import (
    STEP_ALL,
    AgentCall,
    AgentDefinition,
    AgentState,
    Ask,
    Change,
    Decision,
    Engine,
    Hooks,
    Parallel,
    Perform,
    RunStatus,
    ToolCall,
    ToolContext,
    ToolResult,
    tool,
)
from stepengine.data.limits import DEFAULT_LIMITS
from stepengine.errors import AnswerRejected
from stepengine.events import TextDelta
from stepengine.journal import MemoryJournal
from stepengine.sessions import MemorySessions
from stepengine.testing import ScriptedModel, failure, text, thinking, tool_call, tool_calls
from stepengine.tools.bundled import agent_tool
from stepengine.tools.execution import TOOL_SECONDS

from .pages import page

pytestmark = pytest.mark.anyio
HANDS = tool_call("hand_off", {"agent": "billing"})


class City(BaseModel):
    name: str


@tool
def look() -> str:
    """Look."""
    return "seen"


@tool
def remember(key: str) -> ToolResult:
    """Remember a key."""
    return ToolResult.text("ok", change=Change(context={key: 1}))


@tool
def recall(ctx: ToolContext) -> str:
    """Return what is remembered."""
    return ",".join(ctx.agent_state.context)


def agent(agent_id: str = "desk", **fields: Any) -> AgentDefinition:
    return AgentDefinition(agent_id, model=f"test/{agent_id}", **fields)


def coded(handle_steps: Any, **fields: Any) -> AgentDefinition:
    """Return an agent without a model."""
    return AgentDefinition("desk", handle_steps=handle_steps, **fields)


def said(request: Any) -> list[str]:
    """Return the messages of a request, without the list of agents."""
    return [f"{m.role}:{m.text}" for m in request.messages if m.text and not m.text.startswith("<system")]


# --- the page about all frameworks ----------------------------------------------------------------------------------


async def test_failed_run_returns_its_status() -> None:
    async with Engine([agent()], models=ScriptedModel([failure(ValueError("down"))])) as engine:
        assert (await engine.run("desk", "Hi.")).status is RunStatus.FAILED


@pytest.mark.parametrize(("prompt", "later"), [("Base", "Base+"), ("", "+++")])
async def test_prompt_of_a_hook_stays_for_the_run(prompt: str, later: str) -> None:
    adding = Hooks(pre_step=lambda ctx: Change(system_prompt=f"{ctx.system_prompt}+"))
    desk = agent(system_prompt=prompt, tools=[look], hooks=adding)
    model = ScriptedModel([tool_call("look"), text("Hello."), text("Again.")])
    async with Engine([desk], models=model) as engine:
        first = await engine.run("desk", "Hi.")
        await engine.run("desk", "Hi.", previous=first.state)

    assert [f"{prompt}+", f"{prompt}++", later] == [call.system_prompt for call in model.calls]


@pytest.mark.parametrize("prompt", ["Base", ""])
async def test_prompt_built_from_the_definition_does_not_grow(prompt: str) -> None:
    adding = Hooks(pre_run=lambda ctx: Change(system_prompt=f"Global {ctx.agent.system_prompt}"))
    model = ScriptedModel([text("One."), text("Two.")])
    async with Engine([agent(system_prompt=prompt)], models=model, hooks=adding) as engine:
        first = await engine.run("desk", "Hi.")
        await engine.run("desk", "Hi.", previous=first.state)

    assert [f"Global {prompt}"] * 2 == [call.system_prompt for call in model.calls]


async def test_view_stays_in_later_runs_and_the_record_is_whole() -> None:
    last = Hooks(pre_step=lambda ctx: Change(view=ctx.messages[-1:]))
    model = ScriptedModel([text("One."), text("Two."), text("Three.")])
    async with Engine([agent(hooks=last), agent("plain")], models=model, sessions=MemorySessions()) as engine:
        await engine.run("desk", "First.", session_id="s")
        await engine.run("desk", "Second.", session_id="s")
        result = await engine.run("plain", "Third.", session_id="s")

    assert ["user:Second.", "assistant:Two.", "user:Third."] == said(model.calls[-1])
    assert 6 == len(result.state.message_history)


@pytest.mark.parametrize("adds", [False, True])
async def test_returned_answer_is_in_the_history_only_if_added(adds: bool) -> None:
    def handle_steps(ctx: Any) -> Any:
        if ctx.prompt != "Hi.":
            return (yield STEP_ALL).text
        if adds:
            yield ToolCall("add_message", {"role": "assistant", "content": "Hello."}, include_tool_call=False)
        return "Hello."

    model = ScriptedModel([text("You said hi.")])
    async with Engine([agent(handle_steps=handle_steps)], models=model) as engine:
        first = await engine.run("desk", "Hi.")
        await engine.run("desk", "What did you say?", previous=first.state)

    assert ["user:Hi.", *(["assistant:Hello."] if adds else []), "user:What did you say?"] == said(model.calls[0])
    assert first.output == "Hello."


async def test_agent_as_a_tool_has_a_context_of_its_own() -> None:
    child = agent("child", tools=[recall, remember])
    desk = agent(tools=[remember, agent_tool(child)])
    inner = [tool_call("recall"), tool_call("remember", {"key": "inner"}), text("Done.")]
    child_call = tool_call("child", {"prompt": "Go."})
    model = ScriptedModel([tool_call("remember", {"key": "outer"}), child_call, *inner, text("Done.")])
    async with Engine([desk], models=model) as engine:
        result = await engine.run("desk", "Hi.")

    assert "" == model.calls[3].messages[-1].text
    assert {"outer": 1} == result.state.context


async def test_limits_on_the_page_are_the_defaults() -> None:
    table = page("coming-from/index.md")

    assert f"longer than {TOOL_SECONDS:.0f} seconds" in table
    assert f"at most {DEFAULT_LIMITS.max_total_children} in a run, and [{DEFAULT_LIMITS.max_depth} levels]" in table


async def test_events_of_a_called_agent_are_in_the_stream() -> None:
    model = ScriptedModel([tool_call("child", {"prompt": "Go."}), text("Inner."), text("Outer.")])
    async with Engine([agent(tools=[agent_tool(agent("child"))])], models=model) as engine:
        told = [(e.path != "", e.text) async for e in engine.stream("desk", "Hi.") if isinstance(e, TextDelta)]

    assert ("Inner.", "Outer.") == tuple("".join(t for below, t in told if below is child) for child in (True, False))


@pytest.mark.parametrize(
    ("replies", "status", "output"),
    [
        ([text("Once", stop_reason="max_tokens"), text(" more.")], RunStatus.COMPLETED, "Once more."),
        ([text("a", stop_reason="max_tokens")] * 4, RunStatus.TRUNCATED, "aaaa"),
        ([thinking("Hm."), text("Yes.")], RunStatus.COMPLETED, "Yes."),
        ([text(" \n"), text("Yes.")], RunStatus.COMPLETED, "Yes."),
        ([text("<think>Hm.</think>Yes.")], RunStatus.COMPLETED, "Yes."),
    ],
    ids=["cut", "cut four times", "thoughts", "blanks", "tags"],
)
async def test_cut_replies_are_continued_and_thoughts_are_no_output(
    replies: Any, status: RunStatus, output: str
) -> None:
    async with Engine([agent()], models=ScriptedModel(replies)) as engine:
        result = await engine.run("desk", "Hi.")

    assert (status, output) == (result.status, result.output)


async def test_repeated_denials_get_advice_and_end_the_run() -> None:
    def deny(ctx: Any, call: Any) -> Decision:
        return Decision.deny("No.")

    model = ScriptedModel([tool_call("look")] * 10)
    async with Engine([agent(tools=[look], hooks=Hooks(pre_tool=deny))], models=model) as engine:
        result = await engine.run("desk", "Hi.")

    told = [call.result.text for call in result.tool_calls]
    assert ["No.", "No."] == told[:2]
    assert all("do not call it again" in each for each in told[2:])
    assert (RunStatus.FAILED, 10) == (result.status, len(told))


async def test_only_placeholders_of_codebuff_are_filled() -> None:
    model = ScriptedModel(["Hello."])
    async with Engine([agent(system_prompt="{name} {CODEBUFF_USER_INPUT_PROMPT}")], models=model) as engine:
        await engine.run("desk", "Hi.")

    assert "{name} Hi." == model.calls[0].system_prompt


@pytest.mark.parametrize(("value", "stored"), [((1, 2), [1, 2]), ({1}, None)], ids=["tuple", "set"])
async def test_context_stores_json(value: Any, stored: Any) -> None:
    keeps = Hooks(pre_run=lambda ctx: Change(context={"key": value}))
    async with Engine([agent(hooks=keeps)], models=ScriptedModel(["Hello."])) as engine:
        result = await engine.run("desk", "Hi.")

    assert (RunStatus.FAILED if stored is None else RunStatus.COMPLETED, stored) == (
        result.status,
        result.state.context.get("key"),
    )


async def test_empty_prompt_sends_no_message() -> None:
    model = ScriptedModel(["Hello."])
    async with Engine([agent(system_prompt="You help.")], models=model) as engine:
        await engine.run("desk", "")

    assert () == tuple(model.calls[0].messages)


async def test_model_sees_nothing_of_children_that_the_handler_starts() -> None:
    def handle_steps(ctx: Any) -> Any:
        yield from AgentCall("billing", "Go.")
        yield STEP_ALL

    model = ScriptedModel(["Billed.", "Hello."])
    async with Engine([agent(handle_steps=handle_steps, spawnable_agents=[agent("billing")])], models=model) as engine:
        await engine.run("desk", "Hi.")

    assert ["user:Hi."] == said(model.calls[1])


async def test_arguments_in_another_form_are_converted() -> None:
    ran = []

    @tool
    def refund(order_id: str, items: list[int]) -> str:
        """Refund."""
        ran.append((order_id, items))
        return "refunded"

    model = ScriptedModel([tool_call("refund", {"orderId": "7", "items": 3}), text("Done.")])
    async with Engine([agent(tools=[refund])], models=model) as engine:
        await engine.run("desk", "Hi.")

    assert [("7", [3])] == ran


# --- OpenAI Agents SDK ----------------------------------------------------------------------------------------------


async def test_value_of_set_output_wins_over_a_later_text() -> None:
    calls = tool_calls(tool_call("set_output", {"name": "Rome"}), tool_call("look"))
    model = ScriptedModel([calls, text('{"name": "Lima"}')])
    async with Engine([agent(tools=[look], output_schema=City)], models=model) as engine:
        assert City(name="Rome") == (await engine.run("desk", "Hi.")).output


@pytest.mark.parametrize("returns", [True, False])
@pytest.mark.parametrize("reply", [text('{"name": "Rome"}'), tool_call("set_output", {"name": "Rome"})])
async def test_returned_text_replaces_a_structured_output(returns: bool, reply: Any) -> None:
    seen = []

    def handle_steps(ctx: Any) -> Any:
        turn = yield STEP_ALL
        seen.append(turn.agent_state.output)
        return turn.text if returns else None

    model = ScriptedModel([reply, reply])
    async with Engine([agent(handle_steps=handle_steps, output_schema=City)], models=model) as engine:
        assert City(name="Rome") == (await engine.run("desk", "Hi.")).output

    assert [City(name="Rome")] == seen
    assert (2 if returns else 1) == len(model.calls)


async def test_pre_tool_hook_gets_the_call_of_a_hand_off() -> None:
    named: list[str] = []

    def note(ctx: Any, call: Any) -> None:
        named.append(call.tool_name)

    desk = agent(tools=["hand_off"], spawnable_agents=[agent("billing")], hooks=Hooks(pre_tool=note))
    async with Engine([desk], models=ScriptedModel([HANDS, "Hello."])) as engine:
        await engine.run("desk", "Hi.")

    assert ["hand_off"] == named


async def test_calls_after_one_that_ends_the_turn_are_skipped() -> None:
    @tool(ends_turn=True)
    def stop() -> str:
        """Stop."""
        return "stopped"

    model = ScriptedModel([tool_calls(tool_call("stop"), tool_call("look"))])
    async with Engine([agent(tools=[stop, look])], models=model) as engine:
        result = await engine.run("desk", "Hi.")

    assert [("stop", "ok"), ("look", "skipped")] == [(c.tool_name, c.result.status) for c in result.tool_calls]


async def test_agent_without_model_inherits_the_previous_model() -> None:
    desk = agent(
        tools=["hand_off", agent_tool(AgentDefinition("child"))], spawnable_agents=[AgentDefinition("billing")]
    )
    model = ScriptedModel([tool_call("child", {"prompt": "Go."}), text("Done."), HANDS, text("Hello.")])
    async with Engine([desk], models=model, default_model="test/other") as engine:
        await engine.run("desk", "Hi.")

    assert {"test/desk"} == {call.model for call in model.calls}
    assert not any(spec.strict for call in model.calls for spec in call.tools)


async def test_system_message_of_a_history_needs_an_empty_prompt() -> None:
    state = AgentState.from_dicts([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi."}])
    model = ScriptedModel(["Hello.", "Hello."])
    async with Engine([agent(system_prompt="You help."), agent("plain")], models=model) as engine:
        await engine.run("desk", "Well?", previous=state)
        await engine.run("plain", "Well?", previous=state)

    assert ["You help.", "Be brief."] == [call.system_prompt for call in model.calls]


# --- ADK ------------------------------------------------------------------------------------------------------------


async def test_two_users_with_one_session_id_share_a_session() -> None:
    model = ScriptedModel(["One.", "Two."])
    async with Engine([agent()], models=model, sessions=MemorySessions()) as engine:
        await engine.run("desk", "I am Ann.", session_id="1", user_id="ann")
        await engine.run("desk", "Who am I?", session_id="1", user_id="bob")

    assert ["user:I am Ann.", "assistant:One.", "user:Who am I?"] == said(model.calls[1])


async def test_workflow_agent_that_takes_over_keeps_the_conversation() -> None:
    told = []

    def handle_steps(ctx: Any) -> Any:
        told.append((ctx.prompt, [m.text for m in ctx.inherited_messages if m.role == "user"]))
        yield from ()
        return "Billed."

    desk = agent(tools=["hand_off"], spawnable_agents=[agent("billing", handle_steps=handle_steps)])
    async with Engine([desk], models=ScriptedModel([HANDS])) as engine:
        first = await engine.run("desk", "A bill.")
        second = await engine.run("desk", "More.", previous=first.state)

    assert [("", ["A bill."]), ("More.", ["A bill."])] == told
    assert ("Billed.", "Billed.") == (first.output, second.output)


async def test_state_belongs_to_one_conversation_whatever_its_prefix() -> None:
    model = ScriptedModel(
        [tool_calls(*[tool_call("remember", {"key": k}) for k in ("user:a", "temp:b")]), "One.", "Two.", "Three."]
    )
    async with Engine([agent(tools=[remember])], models=model, sessions=MemorySessions()) as engine:
        results = [await engine.run("desk", "Hi.", session_id=s, user_id="ann") for s in ("1", "1", "2")]

    assert [["temp:b", "user:a"], ["temp:b", "user:a"], []] == [sorted(result.state.context) for result in results]


async def test_pre_run_hook_of_the_engine_reaches_agents_as_tools() -> None:
    model = ScriptedModel([tool_call("child", {"prompt": "Go."}), text("Done."), text("Hello.")])
    named = Hooks(pre_run=lambda ctx: Change(system_prompt=f"Global for {ctx.agent.id}"))
    async with Engine([agent(tools=[agent_tool(agent("child"))])], models=model, hooks=named) as engine:
        await engine.run("desk", "Hi.")

    assert ["Global for desk", "Global for child", "Global for desk"] == [call.system_prompt for call in model.calls]


async def test_hooks_of_a_point_run_as_a_chain() -> None:
    adds = [
        lambda ctx, call, result: ToolResult.text(f"{result.text}1"),
        lambda ctx, call, result: ToolResult.text(f"{result.text}2"),
    ]
    model = ScriptedModel([tool_call("look"), text("Done.")])
    async with Engine([agent(tools=[look], hooks=Hooks(post_tool=adds))], models=model) as engine:
        assert "seen12" == (await engine.run("desk", "Hi.")).tool_calls[0].result.text


async def test_history_keeps_the_arguments_of_the_model() -> None:
    ran = []

    @tool
    def count(n: int) -> str:
        """Count."""
        ran.append(n)
        return "counted"

    changes = Hooks(pre_tool=lambda ctx, call: Change(input={"n": 5}))
    model = ScriptedModel([tool_call("count", {"n": 1}), text("Done.")])
    async with Engine([agent(tools=[count], hooks=changes)], models=model) as engine:
        result = await engine.run("desk", "Hi.")

    assert ([5], 5) == (ran, result.tool_calls[0].input["n"])
    assert [{"n": 1}] == [call.input for m in model.calls[1].messages if m.role == "assistant" for call in m.tool_calls]


# --- LangGraph ------------------------------------------------------------------------------------------------------


async def test_local_variables_start_anew_and_the_context_stays() -> None:
    def handle_steps(ctx: Any) -> Any:
        yield from ()
        return ctx.agent_state.context["n"]

    counts = Hooks(pre_run=lambda ctx: Change(context={"n": ctx.state.context.get("n", 0) + 1}))
    async with Engine([coded(handle_steps, hooks=counts)], sessions=MemorySessions()) as engine:
        assert [1, 2] == [(await engine.run("desk", "Hi.", session_id="s")).output for _ in range(2)]


@pytest.mark.parametrize(
    ("value", "kept"), [((1, 2), [1, 2]), ({1}, None), ({1: "a"}, None)], ids=["tuple", "set", "keys"]
)
async def test_perform_stores_json(value: Any, kept: Any) -> None:
    def handle_steps(ctx: Any) -> Any:
        return (yield from Perform(lambda: value))

    async with Engine([coded(handle_steps)]) as engine:
        result = await engine.run("desk", "Hi.")

    assert (RunStatus.FAILED if kept is None else RunStatus.COMPLETED, kept) == (result.status, result.output)


def asks(ctx: Any) -> Any:
    return (yield from Ask("Sure?", key="sure"))


@pytest.mark.parametrize("answer", [{"approved": True}, 5, ["a"], None], ids=json.dumps)
async def test_answers_are_text_or_bool(answer: Any) -> None:
    journal = MemoryJournal()
    async with Engine([coded(asks)]) as engine:
        await engine.run("desk", "Hi.", journal=journal)
        with pytest.raises(AnswerRejected):
            await engine.resume(journal, answers={"sure": answer})

        assert "yes" == (await engine.resume(journal, answers={"sure": True})).output


async def test_new_message_of_a_waiting_session_answers_the_question() -> None:
    async with Engine([coded(asks)], sessions=MemorySessions()) as engine:
        await engine.run("desk", "Hi.", session_id="s")

        assert "What now?" == (await engine.run("desk", "What now?", session_id="s")).output


async def test_failed_run_continues_in_a_fork_alone() -> None:
    calls: list[str] = []

    def second() -> int:
        calls.append("second")
        if len(calls) == 2:
            raise RuntimeError("down")
        return 2

    def handle_steps(ctx: Any) -> Any:
        first = yield from Perform(lambda: calls.append("first") or 1)
        return first + (yield from Perform(second))

    journal = MemoryJournal()
    async with Engine([coded(handle_steps)]) as engine:
        await engine.run("desk", "Hi.", journal=journal)
        resumed = await engine.resume(journal)
        forked = await engine.fork(journal, at=0, allow_repeat=True)

    assert (RunStatus.FAILED, 3) == (resumed.status, forked.output)
    assert ["first", "second", "second"] == calls


async def test_session_that_was_handed_over_goes_to_no_third_agent() -> None:
    desk = agent(tools=["hand_off"], spawnable_agents=[agent("billing")])
    model = ScriptedModel([HANDS, "One.", "Two."])
    async with Engine([desk, agent("third")], models=model, sessions=MemorySessions()) as engine:
        await engine.run("desk", "Hi.", session_id="s")
        await engine.run("third", "Hi.", session_id="s")

    assert ["test/desk", "test/billing", "test/billing"] == [call.model for call in model.calls]


async def test_failed_branch_of_a_parallel_is_a_result() -> None:
    def handle_steps(ctx: Any) -> Any:
        good, bad = yield from Parallel(AgentCall("billing", "Go."), AgentCall("third", "Go."))
        return [good.unwrap(), bad.output, bad.is_error]

    def reply(request: Any) -> Any:
        return failure(ValueError("down")) if request.model == "test/third" else text("Billed.")

    desk = agent(handle_steps=handle_steps, spawnable_agents=[agent("billing"), agent("third")])
    async with Engine([desk], models=ScriptedModel(reply)) as engine:
        assert ["Billed.", None, True] == (await engine.run("desk", "Hi.")).output
