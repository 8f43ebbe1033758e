"""
``context-pruner``: shortens the conversation of whoever spawns it inline, without a model (generator-contract B33).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stepengine import (
    STEP,
    AgentDefinition,
    AgentState,
    AssistantMessage,
    Engine,
    Perform,
    RunStatus,
    ToolCall,
    UserMessage,
    load_agent,
    tool,
)
from stepengine.events import LogLine
from stepengine.testing import Clock, ScriptedModel, tool_call

from .common import run

PRUNER = load_agent("context-pruner")
WORDS = "The shop sells apples, bread and cheese. " * 100
LONG = [UserMessage("What is this?"), AssistantMessage(WORDS), UserMessage("And that?"), AssistantMessage(WORDS)]


def host(then: Any = None, **params: Any) -> AgentDefinition[Any]:
    """
    Return an agent that has its conversation pruned and then does what *then* yields.
    """

    def handle_steps(_: Any) -> Any:
        call = {"agent_type": "context-pruner", **({"params": params} if params else {})}
        yield ToolCall("spawn_agent_inline", call, include_tool_call=False)
        if then is not None:
            yield then

    return AgentDefinition(
        "host",
        system_prompt="You sell.",
        instructions_prompt="Be brief.",
        spawnable_agents=[PRUNER],
        handle_steps=handle_steps,
    )


def prune(project: Path, **params: Any) -> Any:
    result, model = run(host(**params), project, prompt="And bread?", previous=AgentState.from_messages(LONG))
    assert RunStatus.COMPLETED is result.status
    assert [] == model.calls
    return result


@pytest.mark.spec("generator-contract:B33", "requirements:I2")
@pytest.mark.parametrize("params", [{}, {"max_context_length": 4_000}])
def test_a_short_conversation_is_left_unchanged(project: Path, params: dict[str, int]) -> None:
    result = prune(project, **params)

    assert ["What is this?", "And that?", "And bread?", "Be brief."] == [
        m.text for m in result.state.message_history if m.role == "user"
    ]
    assert False is result.children[0].output


@pytest.mark.spec("generator-contract:B33", "generator-contract:P11", "generator-contract:P30")
def test_a_long_conversation_becomes_a_summary_before_the_request(project: Path) -> None:
    result = prune(project, max_context_length=1_500)
    summary, instructions, live = result.state.message_history

    assert "What is this?" in summary.text
    assert "Be brief." == instructions.text
    assert "And bread?" == live.text
    assert result.children[0].output is True
    assert not any("max_context_length" in m.text for m in result.state.message_history)


@pytest.mark.spec("generator-contract:B33", "generator-contract:P4")
@pytest.mark.parametrize(("idle_ms", "count"), [(300_001, 3), (300_000, 6), (0, 6)])
def test_a_short_conversation_is_pruned_after_cache_expiry(project: Path, idle_ms: int, count: int) -> None:
    result = prune(project, cache_expiry_ms=300_000, idle_ms=idle_ms)

    assert count == len(result.state.message_history)


@pytest.mark.spec("generator-contract:B33", "generator-contract:P22")
def test_each_request_differs_when_every_step_is_pruned() -> None:
    def handle_steps(_: Any) -> Any:
        prune = {"agent_type": "context-pruner", "params": {"max_context_length": 1}}
        while True:
            yield ToolCall("spawn_agent_inline", prune, include_tool_call=False)
            if (yield STEP).steps_complete:
                return

    @tool
    def read_page(number: int) -> str:
        """Read a page."""
        return "word " * 500

    agent = AgentDefinition(
        "host", model="x/y", tools=[read_page], spawnable_agents=[PRUNER], handle_steps=handle_steps
    )
    replies = [tool_call("read_page", {"number": n}, text=f"Now page {n} of the book. " * 20) for n in range(8)]
    model = ScriptedModel([*replies, "Read."])
    with Engine([agent], models=model) as engine:
        engine.run_sync(agent, "Read the book. " * 200).unwrap()
    asked = ["\n".join([message.text for message in request.messages]) for request in model.calls]

    assert len(asked) == len(set(asked))
    assert all(f"Now page {n} of the book." in asked[-1] for n in range(4, 8))


@pytest.mark.spec("generator-contract:B33", "generator-contract:P4")
@pytest.mark.parametrize(("seconds", "is_pruned"), [(300, False), (301, True)])
def test_the_pruner_measures_the_pause_between_its_calls(project: Path, seconds: int, is_pruned: bool) -> None:
    """
    The conversation keeps when it was asked, also from one run to the next, so that `cache_expiry_ms` is all it needs.
    """
    clock = Clock()

    def handle_steps(_: Any) -> Any:
        prune = {"agent_type": "context-pruner", "params": {"cache_expiry_ms": 300_000}}
        yield ToolCall("spawn_agent_inline", prune, include_tool_call=False)
        yield Perform(clock.sleep, seconds)
        said = {"role": "user", "content": "And bread?", "tags": ["USER_PROMPT"]}
        yield ToolCall("add_message", said, include_tool_call=False)
        yield ToolCall("spawn_agent_inline", prune, include_tool_call=False)

    agent = AgentDefinition("host", spawnable_agents=[PRUNER], handle_steps=handle_steps)
    with Engine([agent], clock=clock) as engine:
        result = engine.run_sync(agent, previous=AgentState.from_messages(LONG))

    assert [False, is_pruned] == [child.output for child in result.children]
    assert result.state.context["context_pruner_asked"]


@pytest.mark.spec("generator-contract:B33")
def test_unknown_params_do_not_prevent_pruning(project: Path) -> None:
    """
    Handlers pass their own params on: in codebuff ``params: {...params, cacheExpiryMs}``, which prunes 84 messages to 3.
    """
    codebuff = 3
    result = prune(project, filePaths=["shop.py"], note={"a": 1}, maxContextLength=1_500, cacheExpiryMs=1)

    assert codebuff == len(result.state.message_history)
    assert () == result.warnings


@pytest.mark.spec("generator-contract:L23")
def test_a_failing_inline_agent_is_logged_each_time(project: Path) -> None:
    """
    A handler that prunes before each step does not look at the result, so the screen shows each failure.
    """
    seen: list[str] = []

    def handle_steps(_: Any) -> Any:
        for _ in range(3):
            params = {"max_context_length": "a lot"}
            yield ToolCall(
                "spawn_agent_inline", {"agent_type": "context-pruner", "params": params}, include_tool_call=False
            )

    agent = AgentDefinition("host", spawnable_agents=[PRUNER], handle_steps=handle_steps)
    result, _ = run(
        agent, project, observers=[lambda event: seen.append(event.message) if isinstance(event, LogLine) else None]
    )

    assert RunStatus.COMPLETED is result.status
    assert 3 == len(seen)
    assert {*seen} == {*result.warnings}
    assert "Agent context-pruner did not complete, the history stays as it was" in seen[0]
    assert "max_context_length" in seen[0]
    assert 1 == len(result.warnings)


@pytest.mark.spec("generator-contract:B33", "generator-contract:P32")
def test_a_smaller_budget_keeps_fewer_assistant_messages(project: Path) -> None:
    generous = prune(project, max_context_length=1_500).state.message_history[0].text
    strict = prune(project, max_context_length=1_500, assistant_tool_budget=0).state.message_history[0].text

    assert generous.count("apples") > strict.count("apples")
    assert "What is this?" in strict
