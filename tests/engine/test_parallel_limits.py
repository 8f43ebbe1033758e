"""
Limits of money and tokens where model calls run at the same time: exceeded by one reply at most, and without failures before.
"""

from __future__ import annotations

import asyncio
from decimal import Decimal
from typing import Any

import attrs
import hypothesis
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepengine import (
    STEP,
    AgentCall,
    AgentDefinition,
    Engine,
    GenerateN,
    Limits,
    ModelSettings,
    Parallel,
    Race,
    RunStatus,
    Start,
    Wait,
)
from stepengine.data.models import ModelReply, ModelRequest
from stepengine.data.usage import Usage
from stepengine.errors import LimitExceeded, ModelError
from stepengine.evaluation import Case, Evaluation, contains, evaluate
from stepengine.journal import MemoryJournal, SharedBudget
from stepengine.models import AnthropicProvider, Batched, Models, Provider, fallback
from stepengine.models.clouds import BedrockProvider
from stepengine.runtime import RetryPolicy
from stepengine.testing import ScriptedModel, text, tool_call

MODEL = "anthropic/claude-sonnet-4-5"
"""Its replies have 64,000 tokens at most, and that is sent as the limit; 20,000 of them cost 0.30 dollars."""


@attrs.define(eq=False)
class Writer(Provider):
    """A model whose replies have a size, and that counts how many are under way."""

    size: int = 20_000
    name: str = "anthropic"
    is_billed: bool = True
    calls: int = 0
    running: int = 0
    most: int = 0

    async def complete(self, request: Any) -> ModelReply:
        self.calls += 1
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            for _ in range(10):
                await asyncio.sleep(0)
        finally:
            self.running -= 1
        usage = Usage(input_tokens=10, output_tokens=self.size)
        return ModelReply("done", usage=usage if self.is_billed else None)


def child(max_tokens: int | None = None, model: str = MODEL) -> AgentDefinition:
    return AgentDefinition("child", model=model, settings=ModelSettings(max_tokens=max_tokens))


def in_parallel(kid: AgentDefinition, count: int) -> Any:
    def handle(ctx: Any) -> Any:
        yield from Parallel([AgentCall(kid, str(n)) for n in range(count)])

    return handle


def in_background(kid: AgentDefinition, count: int) -> Any:
    def handle(ctx: Any) -> Any:
        started = []
        for n in range(count):
            started += [(yield from Start(AgentCall(kid, str(n))))]
        yield from Wait(*started)

    return handle


def in_a_race(kid: AgentDefinition, count: int) -> Any:
    def handle(ctx: Any) -> Any:
        yield from Race([AgentCall(kid, str(n)) for n in range(count)])

    return handle


def as_candidates(kid: AgentDefinition, count: int) -> Any:
    def handle(ctx: Any) -> Any:
        yield from GenerateN(count)

    return handle


def with_steps(kid: AgentDefinition, count: int) -> Any:
    def handle(ctx: Any) -> Any:
        yield from Parallel([AgentCall(kid, str(n)) for n in range(count)])
        yield STEP

    return handle


WAYS = (in_parallel, in_background, in_a_race, as_candidates, with_steps)


async def run_parent(way: Any, count: int, model: Writer, limits: Limits, **options: Any) -> Any:
    kid = child(options.pop("max_tokens", None))
    parent = AgentDefinition(
        "parent", model=MODEL, settings=kid.settings, handle_steps=way(kid, count), spawnable_agents=[kid]
    )
    async with Engine([parent, kid], models=model) as engine:
        result = await engine.run(parent, "x", limits=limits, journal=options.get("journal"))
        if options.get("journal") is not None:
            again = await engine.replay(options["journal"])
            assert (again.status, again.usage, again.cost) == (result.status, result.usage, result.cost)
    return result


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("reliability:R6", "reliability:I8")
@hypothesis.settings(max_examples=20, deadline=None)
@given(
    group=st.tuples(st.sampled_from(WAYS), st.integers(2, 8)),
    size=st.integers(1, 64_000),
    max_tokens=st.none() | st.just(64_000),
    tokens=st.integers(100, 400_000),
    in_dollars=st.booleans(),
)
def test_parallel_calls_exceed_a_limit_by_one_reply(
    group: tuple[Any, int], size: int, max_tokens: int | None, tokens: int, in_dollars: bool
) -> None:
    way, count = group

    async def check() -> None:
        model, journal = Writer(size), MemoryJournal()
        dollars = Decimal(15 * tokens) / 1_000_000
        limits = Limits(max_cost_usd=dollars) if in_dollars else Limits(max_tokens=tokens)
        result = await run_parent(way, count, model, limits, max_tokens=max_tokens, journal=journal)

        reply = 0 if max_tokens else size + 10
        assert model.calls == result.usage.requests
        assert result.usage.total_tokens <= tokens + reply + 100 * in_dollars
        if (count + 1) * 64_200 <= tokens:
            assert RunStatus.COMPLETED is result.status

    asyncio.run(check())


@pytest.mark.spec("reliability:R6")
@pytest.mark.parametrize("way", WAYS)
async def test_eight_children_at_once_hold_a_dollar_limit(way: Any) -> None:
    model = Writer()
    result = await run_parent(way, 8, model, Limits(max_cost_usd=0.35))

    assert Decimal("0.30003") <= result.cost <= Decimal("0.65006")
    assert 1 == model.most


@pytest.mark.spec("reliability:R6")
async def test_calls_that_fit_together_run_at_the_same_time() -> None:
    model = Writer()
    result = await run_parent(in_parallel, 8, model, Limits(max_cost_usd=8))

    assert (RunStatus.COMPLETED, 8) == (result.status, model.most)


@pytest.mark.spec("reliability:R6")
async def test_calls_without_room_wait_instead_of_failing() -> None:
    model = Writer(size=100)
    result = await run_parent(in_parallel, 8, model, Limits(max_tokens=70_000))

    assert (RunStatus.COMPLETED, 8, 1) == (result.status, model.calls, model.most)


@pytest.mark.spec("reliability:R6")
async def test_calls_without_a_bound_run_one_at_a_time() -> None:
    kid = child(model="own/model")
    parent = AgentDefinition("parent", model="own/model", handle_steps=in_parallel(kid, 4), spawnable_agents=[kid])
    model = Writer(size=100)
    async with Engine([parent, kid], models={"own": model}) as engine:
        result = await engine.run(parent, "x", limits=Limits(max_tokens=1_000_000))

    assert (RunStatus.COMPLETED, 4, 1) == (result.status, model.calls, model.most)


@pytest.mark.spec("reliability:R6")
async def test_unpriced_calls_count_the_cost_that_they_state() -> None:
    kid = child(model="test/model")
    parent = AgentDefinition("parent", model="test/model", handle_steps=in_parallel(kid, 8), spawnable_agents=[kid])
    async with Engine([parent, kid], models=ScriptedModel(lambda _: text("x", cost="0.30"))) as engine:
        result = await engine.run(parent, "x", limits=Limits(max_cost_usd=0.35, allow_unpriced=True))

    assert Decimal("0.60") == result.cost


@pytest.mark.spec("reliability:R6")
async def test_children_of_a_model_wait_for_each_other() -> None:
    kid = child()
    parent = AgentDefinition("parent", model=MODEL, spawnable_agents=[kid], tools=["spawn_agents"])
    spawned = tool_call("spawn_agents", {"agents": [{"agent_type": "child", "prompt": str(n)} for n in range(6)]})

    class Spawning(Writer):
        async def complete(self, request: Any) -> ModelReply:
            reply = await super().complete(request)
            return attrs.evolve(spawned, usage=Usage(input_tokens=10)) if 1 == self.calls else reply

    model = Spawning()
    async with Engine([parent, kid], models=model) as engine:
        result = await engine.run(parent, "x", limits=Limits(max_tokens=30_000))

    assert 1 == model.most
    assert 3 == model.calls
    assert 40_030 == result.usage.total_tokens


@pytest.mark.spec("reliability:R6", "reliability:R21")
async def test_paid_failures_count_before_the_next_attempt() -> None:
    class Failing(Writer):
        async def complete(self, request: Any) -> ModelReply:
            raise ModelError("busy", retryable=True, usage=(await super().complete(request)).usage)

    model, kid = Failing(), child()
    parent = AgentDefinition("parent", model=MODEL, handle_steps=in_parallel(kid, 4), spawnable_agents=[kid])
    async with Engine([parent, kid], models=model, retry=RetryPolicy(base_seconds=0)) as engine:
        await engine.run(parent, "x", limits=Limits(max_cost_usd=0.35))
        alone = await engine.run(kid, "x", limits=Limits(max_cost_usd=0.35))

    assert 4 == model.calls
    assert "; not retried: " in str(alone.error)


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("reliability:R6")
@pytest.mark.parametrize("way", [in_parallel, in_background, in_a_race, as_candidates])
async def test_a_resumed_run_holds_its_limit(way: Any) -> None:
    """Replies that are recorded count; calls of the killed process that have no reply wait for room like new ones."""
    journal = MemoryJournal()
    await run_parent(way, 6, Writer(), Limits(max_cost_usd=9), journal=journal)
    whole = journal.records()
    kid = child()
    parent = AgentDefinition("parent", model=MODEL, handle_steps=way(kid, 6), spawnable_agents=[kid])
    for cut in range(2, len(whole), 3):
        cut_journal, model = MemoryJournal(), Writer()
        cut_journal.replace(whole[:cut])
        async with Engine([parent, kid], models=model) as engine:
            result = await engine.resume(cut_journal, limits=Limits(max_cost_usd=1.0))
        assert result.cost is not None
        assert result.cost <= Decimal("1.31") or not model.calls, (cut, result.cost)


CASES = [Case(str(number), "x", checks=[contains("done")]) for number in range(8)]


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("evaluation:JG66")
async def test_runs_of_an_evaluation_hold_its_budget() -> None:
    evaluation = Evaluation("e", cases=CASES, agents={"base": child()})
    scripted = Evaluation("e", cases=CASES, agents={"base": AgentDefinition("a", model="test/m")})
    model = Writer()
    report = await evaluate(evaluation, models={"anthropic": model}, budget="0.35", concurrency=4)
    played = await evaluate(scripted, replies=[text("x", cost="0.30")], budget="0.35", concurrency=4)
    enough = await evaluate(evaluation, models={"anthropic": Writer()}, budget="2.5", concurrency=4)

    assert (1, Decimal("0.30003")) == (model.calls, report.spent)
    assert Decimal("0.30") == played.spent
    assert Decimal("2.40024") == enough.spent


@pytest.mark.spec("evaluation:JG7")
async def test_forks_of_one_budget_wait_for_each_other() -> None:
    model, kid, budget = Writer(), child(), SharedBudget("0.35")
    async with Engine([kid], models=model) as engine:
        journal = MemoryJournal()
        await engine.run(kid, "x", journal=journal)
        first = model.calls
        made = await asyncio.gather(
            *[engine.fork(journal, at=-1, reuse=False, tools="recorded", budget=budget) for _ in range(6)]
        )

    assert 2 == model.calls - first
    assert 1 == model.most
    assert Decimal("0.60006") == budget.spent
    assert 4 == sum(isinstance(one.result.error, LimitExceeded) for one in made)


def test_the_output_limit_is_the_one_that_is_sent(tmp_path: Any) -> None:
    own = AnthropicProvider("key", max_tokens=4_096)
    models = Models({"anthropic": own, "bedrock": BedrockProvider(), "batched": Batched(own, tmp_path / "b.db")})
    models.aliases["short"] = MODEL
    standard = Models.standard()

    def limit(model: str, registry: Models = models, **options: Any) -> int | None:
        return registry.output_limit(ModelRequest(model, settings=ModelSettings(**options)))

    assert 4_096 == limit(MODEL) == limit("short") == limit("batched/claude-sonnet-4-5") == limit("anthropic/unknown")
    assert 100 == limit(MODEL, max_tokens=100)
    assert 64_000 == limit(MODEL, standard) == limit("bedrock/us.anthropic.claude-sonnet-4-5")
    assert 128_000 == limit(fallback(MODEL, "anthropic/claude-opus-4-6"), standard)
    assert limit("ollama/unknown", standard) is None
    assert limit("nowhere/unknown", standard) is None


@pytest.mark.spec("reliability:R6")
async def test_calls_run_together_again_after_the_bills_of_others() -> None:
    """What each call reserves is free again with its reply: thirty calls in turns never fill the limit by reservations."""
    model = Writer(size=10)
    kid = child(max_tokens=1_000)

    def handle(ctx: Any) -> Any:
        for _ in range(10):
            yield from Parallel([AgentCall(kid, str(n)) for n in range(3)])
        model.most = 0
        yield from Parallel([AgentCall(kid, str(n)) for n in range(3)])

    parent = AgentDefinition("parent", handle_steps=handle, spawnable_agents=[kid])
    async with Engine([parent], models=model) as engine:
        result = await engine.run(parent, "x", limits=Limits(max_tokens=6_000))

    assert RunStatus.COMPLETED is result.status
    assert (33, 3) == (model.calls, model.most)


@pytest.mark.spec("reliability:R6", "reliability:I11")
async def test_a_resumed_run_reaches_its_limit_at_the_same_call() -> None:
    """A reply that reports nothing counts as reserved, also behind a request that the crash has lost."""

    def handle(ctx: Any) -> Any:
        for _ in range(5):
            yield STEP

    agent = AgentDefinition("stepper", model=MODEL, settings=ModelSettings(max_tokens=100), handle_steps=handle)
    journal, limits = MemoryJournal(), Limits(max_tokens=350, max_steps=5, on_max_steps="stop")
    async with Engine([agent], models=Writer(is_billed=False)) as engine:
        whole = await engine.run(agent, "x", limits=limits, journal=journal)
        lines = journal.lines()
        for cut in range(2, len(lines)):
            result = await engine.resume(MemoryJournal(lines[:cut]))
            assert (whole.status, whole.state.step_index) == (result.status, result.state.step_index), cut

    assert isinstance(whole.error, LimitExceeded)
    assert 0 < whole.state.step_index < 5
