"""Lines of the pages about other frameworks that say what differs here without an error."""

from __future__ import annotations

from typing import Any

import pytest

from stepengine import (
    STEP_ALL,
    AgentDefinition,
    Change,
    Engine,
    Hooks,
    RunStatus,
    ToolCall,
    ToolContext,
    ToolResult,
    tool,
)
from stepengine.data.limits import DEFAULT_LIMITS
from stepengine.data.tools import TOOL_SECONDS
from stepengine.sessions import MemorySessions
from stepengine.testing import ScriptedModel, text, tool_call
from stepengine.tools.bundled import agent_tool

from .pages import page

pytestmark = pytest.mark.anyio
HANDS = tool_call("hand_off", {"agent": "billing"})


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


def said(request: Any) -> list[str]:
    """Return the messages of a request, without the list of agents."""
    return [f"{m.role}:{m.text}" for m in request.messages if m.text and not m.text.startswith("<system")]


# --- the page about all frameworks ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("prompt", "later"), [("Base", "Base+"), ("", "+++")])
async def test_prompt_of_a_hook_stays_for_the_run(prompt: str, later: str) -> None:
    adding = Hooks(pre_step=lambda ctx: Change(system_prompt=f"{ctx.system_prompt}+"))
    desk = agent(system_prompt=prompt, tools=[look], hooks=adding)
    model = ScriptedModel([tool_call("look"), text("Hello."), text("Again.")])
    async with Engine([desk], models=model) as engine:
        first = await engine.run("desk", "Hi.")
        await engine.run("desk", "Hi.", previous=first.state)

    assert [f"{prompt}+", f"{prompt}++", later] == [call.system_prompt for call in model.calls]


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


@pytest.mark.parametrize(("value", "stored"), [((1, 2), [1, 2]), ({1}, None)], ids=["tuple", "set"])
async def test_context_stores_json(value: Any, stored: Any) -> None:
    keeps = Hooks(pre_run=lambda ctx: Change(context={"key": value}))
    async with Engine([agent(hooks=keeps)], models=ScriptedModel(["Hello."])) as engine:
        result = await engine.run("desk", "Hi.")

    assert (RunStatus.FAILED if stored is None else RunStatus.COMPLETED, stored) == (
        result.status,
        result.state.context.get("key"),
    )


# --- OpenAI Agents SDK ----------------------------------------------------------------------------------------------


async def test_pre_tool_hook_gets_the_call_of_a_hand_off() -> None:
    named: list[str] = []

    def note(ctx: Any, call: Any) -> None:
        named.append(call.tool_name)

    desk = agent(tools=["hand_off"], spawnable_agents=[agent("billing")], hooks=Hooks(pre_tool=note))
    async with Engine([desk], models=ScriptedModel([HANDS, "Hello."])) as engine:
        await engine.run("desk", "Hi.")

    assert ["hand_off"] == named


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


async def test_pre_run_hook_of_the_engine_reaches_agents_as_tools() -> None:
    model = ScriptedModel([tool_call("child", {"prompt": "Go."}), text("Done."), text("Hello.")])
    named = Hooks(pre_run=lambda ctx: Change(system_prompt=f"Global for {ctx.agent.id}"))
    async with Engine([agent(tools=[agent_tool(agent("child"))])], models=model, hooks=named) as engine:
        await engine.run("desk", "Hi.")

    assert ["Global for desk", "Global for child", "Global for desk"] == [call.system_prompt for call in model.calls]


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
