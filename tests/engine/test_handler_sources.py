"""
Lines of handlers, tools and hooks that cannot do what their author meant are reported when an engine is built.
"""

from __future__ import annotations

import inspect
import warnings
from pathlib import Path
from typing import Any

import pytest

import stepengine
from stepengine import (
    STEP,
    AgentCall,
    AgentDefinition,
    Ask,
    Change,
    Engine,
    Hooks,
    Perform,
    ToolCall,
    call,
    load_agent,
    map_agents,
    tool,
)
from stepengine.engine.handler_sources import SourceWarning


@tool
def look(path: str) -> str:
    """Look."""
    return path


@tool
def pay(amount: int) -> str:
    """Pay."""
    return str(amount)


def twice(path: str) -> Any:
    yield from call(look, path)
    yield from call(look, path)


def found(agent: AgentDefinition[Any], *tools: Any, hooks: Hooks | None = None) -> list[tuple[int, str]]:
    """Return the lines and texts of the warnings, the lines counted from that of the handler's ``def``."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Engine([agent], tools, hooks=hooks)
    assert {__file__} >= {one.filename for one in caught}
    assert {SourceWarning} >= {one.category for one in caught}
    first = inspect.getsourcelines(agent.handle_steps)[1] if agent.handle_steps else 0
    return [(one.lineno - first, str(one.message)) for one in caught]


def agent(handle_steps: Any, *tools: Any, **options: Any) -> AgentDefinition[Any]:
    return AgentDefinition("boss", handle_steps=handle_steps, tools=[look, *tools], **options)


@pytest.mark.spec("generator-contract:G57")
def test_unyielded_yieldable_statement_is_reported_with_its_line() -> None:
    def handler(ctx: Any) -> Any:
        ToolCall("look", {"path": "a"})
        call(look, "a")
        stepengine.Perform(int)
        map_agents("child", [])
        twice("a")
        STEP
        yield STEP

    said = [
        "ToolCall(...) has no effect by itself. Write `yield from ToolCall(...)`.",
        "call(...) has no effect by itself. Write `yield from call(...)`.",
        "stepengine.Perform(...) has no effect by itself. Write `yield from stepengine.Perform(...)`.",
        "map_agents(...) has no effect by itself. Write `yield from map_agents(...)`.",
        "twice(...) has no effect by itself. Write `yield from twice(...)`.",
        "STEP has no effect by itself. Write `yield STEP`.",
    ]
    assert [(n, f"handle_steps of 'boss': {text}") for n, text in enumerate(said, start=1)] == found(
        agent(handler, spawnable_agents=[AgentDefinition("child")])
    )


@pytest.mark.spec("generator-contract:G57")
def test_used_yieldable_is_not_reported() -> None:
    def handler(ctx: Any) -> Any:
        asked = ToolCall("look", {"path": "a"})
        if asked == ToolCall("look", {"path": "b"}) or not Ask("Go?"):
            return ToolCall("look", {"path": "c"})
        several = [call(look, "a"), *[Perform(int) for _ in "ab"]]
        several.append(twice("a"))
        print(Perform(int))
        yield asked
        yield from twice("a")
        (yield from call(look, "a"))
        return several

    assert [] == found(agent(handler))


@pytest.mark.spec("generator-contract:G57")
def test_a_name_that_means_something_else_there_is_not_reported() -> None:
    def call(name: str) -> None:
        """Do something at once."""

    def handler(ctx: Any, Ask: Any = print) -> Any:  # noqa: N803
        call("look")
        Ask("Go?")
        yield STEP

    assert [] == found(agent(handler))


@pytest.mark.spec("generator-contract:G57")
def test_check_reads_tools_hooks_and_generators_called_by_a_handler() -> None:
    def careless() -> Any:
        Ask("Go?")
        yield from call(look, "a")

    @tool
    def forgetful() -> str:
        """Forget."""
        ToolCall("look", {"path": "a"})
        return "done"

    def hook(ctx: Any) -> None:
        Perform(int)

    def handler(ctx: Any) -> Any:
        yield from careless()

    said = [
        text.partition(" has no effect")[0] for _, text in found(agent(handler, forgetful, hooks=Hooks(pre_step=hook)))
    ]

    assert [
        "handle_steps of 'boss': Ask(...)",
        "the pre_step hook of agent 'boss': Perform(...)",
        "tool 'forgetful': ToolCall(...)",
    ] == said
    assert [
        "the pre_step hook of the engine: Perform(...) has no effect by itself. Write `yield from Perform(...)`."
    ] == [text for _, text in found(AgentDefinition("plain"), hooks=Hooks(pre_step=hook))]


@pytest.mark.spec("generator-contract:G57")
def test_an_agent_file_is_reported_with_its_own_line(tmp_path: Path) -> None:
    file = tmp_path / "boss.py"
    file.write_text(
        "from stepengine import AgentDefinition, ToolCall\n\n\ndef handle_steps(ctx):\n    ToolCall('end_turn')\n"
        "    yield from ()\n\n\nagent = AgentDefinition('boss', handle_steps=handle_steps)\n"
    )

    with pytest.warns(SourceWarning, match="has no effect") as caught:
        Engine([load_agent(file)])

    assert [(str(file), 5)] == [(one.filename, one.lineno) for one in caught]


@pytest.mark.spec("generator-contract:G57")
def test_unlisted_tool_of_an_agent_is_reported_before_any_question() -> None:
    def handler(ctx: Any) -> Any:
        if (yield from Ask("Pay?", options=("yes", "no"))) == "yes":
            yield from call(pay, 3)
            yield from ToolCall("loook", {})

    boss = agent(handler)

    assert [
        (2, "handle_steps of 'boss': the tool 'pay' is not available. List it in tools=[...] of agent 'boss'."),
        (3, "handle_steps of 'boss': the tool 'loook' is not available; did you mean 'look'?"),
    ] == found(boss)
    # The engine's tools need to be listed, too, where the call enters the conversation.
    assert (
        [
            (
                2,
                "handle_steps of 'boss': the tool 'pay' is not in the tools of the agent. List it in tools=[...] of agent 'boss', "  # noqa: ISC004
                "or call it with ToolCall('pay', {...}, include_tool_call=False).",
            )
        ]
        == found(boss, pay)[:1]
    )


@pytest.mark.spec("generator-contract:G57")
def test_a_tool_that_a_run_may_have_is_not_reported() -> None:
    def handler(ctx: Any) -> Any:
        yield ToolCall("pay", {"amount": 1}, include_tool_call=False)
        yield ToolCall("pay", {"amount": 1}, include_tool_call=bool(ctx))
        yield ToolCall("pay", {"amount": 1}, False)
        yield from call(look, "a")
        yield ToolCall("add_message", {"role": "user", "content": "Hi"})

    def late(ctx: Any) -> Any:
        yield from call(pay, 1)

    assert [] == found(agent(handler), pay)
    assert [] == found(agent(late, hooks=Hooks(pre_run=lambda ctx: Change(tools=(pay,)))))


@pytest.mark.spec("generator-contract:G57")
def test_yielding_tool_may_name_tools_of_its_agent_or_itself() -> None:
    @tool
    def settle() -> Any:
        """Settle."""
        yield from call(look, "a")
        yield from call(pay, 1)

    @tool(uses=[pay])
    def settle_by_itself() -> Any:
        """Settle."""
        yield from call(look, "a")
        yield from call(pay, 1)

    @tool(uses=[pay, settle])
    def around() -> Any:
        """Settle twice."""
        yield from call(settle)

    # What calls a carried tool carries that tool's needs, too.
    assert [] == found(agent(None, around))
    said = "tool 'settle': the tool 'pay' is not available. List it in uses=[...] of the tool 'settle'."
    assert [said] == [text for _, text in found(agent(None, settle))]
    assert [] == found(agent(None, settle_by_itself))


@pytest.mark.spec("generator-contract:G57")
def test_unlisted_spawned_agent_is_reported_unless_its_handler_is_shared() -> None:
    child = AgentDefinition("child")

    def handler(ctx: Any) -> Any:
        yield AgentCall("child")
        yield from map_agents("chlid", ["a"])

    said = "handle_steps of 'boss': the agent 'chlid' may not be spawned; did you mean 'child'?"
    assert [said] == [text for _, text in found(agent(handler, spawnable_agents=[child]))]
    both = [child, AgentDefinition("other", handle_steps=handler)]
    assert [] == found(agent(handler, spawnable_agents=both))


@pytest.mark.spec("requirements:X123")
def test_a_tool_without_a_description_is_reported() -> None:
    @tool
    def nameless(path: str) -> str:
        return path

    said = "tool 'nameless' has no description. Write a docstring: the model reads it to decide when to call the tool."
    assert [said] == [text for _, text in found(agent(None, nameless))]
    assert [] == found(agent(None, tool(description="Find it.")(nameless.body.fn)))
