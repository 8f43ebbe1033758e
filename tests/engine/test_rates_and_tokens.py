"""
What an engine does with rates and sizes: limits shared by its runs, and how full a context is.
"""

from __future__ import annotations

import asyncio
from typing import Any

import attrs
import pytest

from stepengine import (
    STEP,
    AgentCall,
    AgentDefinition,
    Ask,
    Engine,
    Hooks,
    Limits,
    Parallel,
    ToolCall,
    ToolContext,
    Usage,
    UserMessage,
    tool,
)
from stepengine.context import mask_tool_results, prune_to_summary, raise_on_overflow, summarize, truncate
from stepengine.data.estimate import message_tokens, transcript_tokens
from stepengine.data.transcript import Transcript
from stepengine.errors import DefinitionError
from stepengine.journal import MemoryJournal
from stepengine.models import ModelInfo, ModelReply, ModelRequest, Models, Provider
from stepengine.runtime import RateLimit
from stepengine.testing import ScriptedModel, text, tool_call, tool_calls


class Crowded(Provider):
    """
    A provider that knows how many requests it has at once.
    """

    name = "test"

    def __init__(self) -> None:
        self.running = self.most = self.total = 0

    async def complete(self, request: ModelRequest) -> ModelReply:
        self.running += 1
        self.total += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(0)
        self.running -= 1
        return ModelReply("ok", usage=Usage(10, 1))


def parent() -> AgentDefinition[Any]:
    def handle(ctx: Any) -> Any:
        yield Parallel(*[AgentCall("child", str(n)) for n in range(4)])

    child = AgentDefinition("child", model="test/m")
    return AgentDefinition("parent", spawnable_agents=[child], handle_steps=handle)


def looking(seen: list[int | None]) -> Any:
    """
    A tool that notes how many tokens are left.
    """

    @tool(in_thread=False)
    def look(ctx: ToolContext) -> str:
        """
        Look around.
        """
        seen.append(ctx.remaining_tokens)
        return "x"

    return look


@pytest.mark.spec("requirements:N15", "generator-contract:T34")
async def test_all_runs_of_an_engine_share_provider_rate_limits() -> None:
    provider, events = Crowded(), []
    limit = RateLimit(max_concurrency=2)
    engine = Engine([parent()], models={"test": provider}, rate_limits={"test": limit}, observers=[events.append])
    await asyncio.gather(*[engine.run("parent") for _ in range(5)])
    waits = [e for e in events if e.type == "rate_limited"]

    assert (20, 2) == (provider.total, provider.most)
    assert ("test/m", "test") == (waits[0].model, waits[0].provider)
    assert {"concurrency", "queue"} == {e.limit for e in waits}
    assert all(e.path for e in waits)


def test_rate_limit_for_an_unregistered_provider_is_refused() -> None:
    with pytest.raises(DefinitionError, match="'antropic', which is not registered; registered providers: 'anthropic'"):
        Engine(rate_limits={"antropic": RateLimit(max_concurrency=1)})


@pytest.mark.spec("requirements:N15")
@pytest.mark.parametrize(("limit", "expected"), [(None, 6), (2, 2)])
async def test_tools_of_one_reply_run_concurrently_up_to_the_limit(limit: int | None, expected: int) -> None:
    running = most = 0

    @tool(parallel_safe=True)
    async def look(n: int) -> int:
        """
        Look.

        Args:
            n: Where.
        """
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1
        return n

    calls = tool_calls(*[tool_call("look", {"n": n}) for n in range(6)])
    agent = AgentDefinition("a", model="test/m", tools=[look], limits=Limits(max_concurrent_tools=limit))
    result = await Engine(models=ScriptedModel([calls, text("done")])).run(agent, "go")

    assert expected == most
    assert [str(n) for n in range(6)] == [c.result.text for c in result.tool_calls]


# --- tokens ---------------------------------------------------------------------------------------------------------


@pytest.mark.spec("requirements:X45", "requirements:I1", "requirements:E10")
async def test_tool_sees_tokens_left_from_reported_usage_plus_an_estimate() -> None:
    seen: list[int | None] = []

    @tool(in_thread=False)
    def look(ctx: ToolContext) -> str:
        """
        Look around.
        """
        seen.append(ctx.remaining_tokens)
        return "x" * 400

    def handle(ctx: Any) -> Any:
        yield ToolCall("look", {})
        yield STEP
        yield ToolCall("look", {})

    agent = AgentDefinition("a", model="test/m", tools=[look], handle_steps=handle)
    provider = ScriptedModel([text("hi", usage=Usage(700, 5, cache_read_tokens=200))])
    models = Models({"test": provider}, info={"test/m": ModelInfo(context_window=10_000)})
    result = await Engine(models=models).run(agent, "go")

    assert [None, 10_000 - 900 - message_tokens(result.state.message_history[3])] == seen
    assert "hi" == result.state.message_history[3].text


@pytest.mark.spec("requirements:X45")
@pytest.mark.parametrize("reported", [900, 9_900, 10_000, 20_000])
async def test_there_is_never_less_left_than_nothing(reported: int) -> None:
    seen: list[int | None] = []

    def handle(ctx: Any) -> Any:
        yield STEP
        yield ToolCall("look", {})

    agent = AgentDefinition("a", model="test/m", tools=[looking(seen)], handle_steps=handle)
    provider = ScriptedModel([text("", usage=Usage(reported))])
    models = Models({"test": provider}, info={"test/m": ModelInfo(context_window=10_000)})
    result = await Engine(models=models).run(agent, "go")

    assert [max(0, 10_000 - reported - message_tokens(result.state.message_history[1]))] == seen


@pytest.mark.spec("requirements:X45")
async def test_usage_reported_for_a_rewritten_history_does_not_count() -> None:
    seen: list[Any] = []

    @tool(in_thread=False)
    def look(ctx: ToolContext) -> str:
        """
        Look around.
        """
        seen.append((ctx.remaining_tokens, ctx.agent_state.context_tokens))
        return "x"

    def handle(ctx: Any) -> Any:
        yield STEP
        yield ToolCall("set_messages", {"messages": [{"role": "user", "content": "short"}]})
        yield ToolCall("look", {})

    agent = AgentDefinition("a", model="test/m", tools=[look], handle_steps=handle)
    provider = ScriptedModel([text("hi", usage=Usage(900))])
    models = Models({"test": provider}, info={"test/m": ModelInfo(context_window=10_000)})
    await Engine(models=models).run(agent, "go")

    assert [(10_000 - estimate, estimate) for _, estimate in seen] == seen


@pytest.mark.spec("requirements:X45")
async def test_usage_reported_before_a_suspension_counts_after_resume() -> None:
    seen: list[int | None] = []
    look = looking(seen)

    def handle(ctx: Any) -> Any:
        yield STEP
        yield Ask("go on?")
        yield ToolCall("look", {})

    agent = AgentDefinition("a", model="test/m", tools=[look], handle_steps=handle)
    provider = ScriptedModel([text("hi", usage=Usage(900))])
    models = Models({"test": provider}, info={"test/m": ModelInfo(context_window=10_000)})
    engine, journal = Engine([agent], models=models), MemoryJournal()
    waiting = await engine.run(agent, "go", journal=journal)
    result = await engine.resume(journal, answers={"go on?": "yes"})

    assert ("suspended", "completed") == (waiting.status, result.status)
    assert [10_000 - 900 - message_tokens(result.state.message_history[1])] == seen


@pytest.mark.spec("ecosystem:EC75", "requirements:I1")
async def test_tokens_are_counted_by_the_provider_or_else_estimated() -> None:
    class Counting(ScriptedModel):
        counted: int | None = 42

        async def count_tokens(self, request: ModelRequest) -> int | None:
            return self.counted

    request = ModelRequest("test/m", messages=Transcript([UserMessage("x" * 400)]))
    provider = Counting([])

    assert 42 == await Engine(models=provider).count_tokens(request)

    provider.counted = None
    estimates = {await Engine(models=model).count_tokens(request) for model in (provider, ScriptedModel([]))}

    assert {transcript_tokens(request.messages)} == estimates


@pytest.mark.spec("requirements:X45", "requirements:I2")
@pytest.mark.parametrize(
    ("policy", "limit", "of_engine"),
    [
        (truncate(500), 500, False),
        (truncate(500), 500, True),
        (truncate(5_000), 1_000, False),
        (truncate(), 800, False),
        (mask_tool_results(500), 500, False),
        (prune_to_summary(500), 500, False),
        (raise_on_overflow(500), 500, False),
        (summarize(500), 500, False),
        (summarize(window_ratio=0.5), 500, False),
        (summarize(500, auto=False), 1_000, False),
    ],
)
async def test_the_tokens_left_are_those_that_the_policy_allows(policy: Any, limit: int, of_engine: bool) -> None:
    by_tool: list[int | None] = []
    by_hook: list[int | None] = []
    look = looking(by_tool)
    own = Hooks(pre_tool=[lambda ctx, call: by_hook.append(ctx.remaining_tokens)])
    policies = Hooks(pre_step=[policy])
    replies = [attrs.evolve(tool_call("look", {}), usage=Usage(100)), "done"]
    models = Models({"test": ScriptedModel(replies)}, info={"test/m": ModelInfo(context_window=1_000)})
    agent = AgentDefinition("a", model="test/m", tools=[look], hooks=own if of_engine else policies + own)
    await Engine(models=models, hooks=policies if of_engine else None).run(agent, "go")

    assert [limit - 100] == by_tool == by_hook


async def test_context_policy_bounds_a_model_with_unknown_window() -> None:
    by_tool: list[int | None] = []
    agent = AgentDefinition("a", model="test/m", tools=[looking(by_tool)], hooks=Hooks(pre_step=[truncate(500)]))
    replies = [attrs.evolve(tool_call("look", {}), usage=Usage(100)), "done"]
    await Engine(models={"test": ScriptedModel(replies)}).run(agent, "go")

    assert [400] == by_tool


@pytest.mark.spec("requirements:G15")
async def test_context_length_is_that_of_the_overridden_model() -> None:
    seen: list[int | None] = []
    look = looking(seen)

    def registry(window: int) -> Models:
        calls = [tool_call("look", {}), text("done", usage=Usage(0))]
        info = {"test/m": ModelInfo(context_window=window)}
        return Models({"test": ScriptedModel([attrs.evolve(r, usage=Usage(100)) for r in calls])}, info=info)

    agent = AgentDefinition("a", model="test/m", tools=[look])
    engine = Engine(models=registry(1_000))
    with engine.override(models=registry(5_000)):
        await engine.run(agent, "go")
    await engine.run(agent, "go")

    assert [4_900, 900] == seen
