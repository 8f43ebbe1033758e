"""
Budgets of a run tree.
"""

from __future__ import annotations

import asyncio
from decimal import Decimal

import attrs
import pytest

from stepengine.data.effects import CallModel, Gather
from stepengine.data.limits import Limits
from stepengine.data.messages import UserMessage
from stepengine.data.models import ModelReply, ModelRequest, ModelSettings
from stepengine.data.outcomes import Failure, PartialUsage, Value
from stepengine.data.transcript import Transcript
from stepengine.data.usage import Usage
from stepengine.errors import LimitExceeded
from tests.loop_clock import put_clock_ahead

REQUEST = ModelRequest("test/m", "", Transcript([UserMessage("x" * 40)]))


def calls(world, count, seen, *, together=False, request=REQUEST):
    def machine(plan, state):
        effects = tuple([CallModel(seq, request) for seq in range(count)])
        if together:
            seen.extend((yield Gather(effects)).outcomes)
        else:
            for effect in effects:
                seen.append((yield effect))
        return world.done(state)

    return machine


def replies(count, **usage):
    return [ModelReply("x", usage=Usage(**usage)) for _ in range(count)]


@pytest.mark.spec("reliability:R6")
async def test_call_exceeding_remaining_tokens_does_not_start(world):
    seen, provider = [], world.Provider(replies(5, input_tokens=30, output_tokens=10))
    plan = world.plan(limits=Limits(max_tokens=85))
    await world.tree(calls(world, 5, seen), models=provider, plan=plan).run()

    assert 2 == len(provider.requests)
    assert [Value, Value, Failure, Failure, Failure] == [type(o) for o in seen]
    assert ("tokens", 85) == (seen[2].error.kind, seen[2].error.limit)


@pytest.mark.spec("reliability:R6", "reliability:I8")
async def test_concurrent_calls_reserve_remaining_tokens_one_by_one(world):
    async def slow(request):
        await asyncio.sleep(0)
        return ModelReply("x", usage=Usage(input_tokens=10, output_tokens=90))

    seen, provider = [], world.Provider([slow] * 8)
    request = ModelRequest("test/m", "", REQUEST.messages, settings=ModelSettings(max_tokens=90))
    plan = world.plan(limits=Limits(max_tokens=150))
    await world.tree(calls(world, 8, seen, together=True, request=request), models=provider, plan=plan).run()

    assert 1 == len(provider.requests)
    assert 7 == sum(isinstance(o, Failure) for o in seen)


@pytest.mark.spec("reliability:R6", "reliability:I8")
async def test_cost_is_reserved_by_price_and_counted_by_use(world):
    def pricing(model, usage, at):
        return Decimal(usage.total_tokens)

    seen, provider = [], world.Provider(replies(5, input_tokens=10, output_tokens=10))
    plan = world.plan(limits=Limits(max_cost_usd=60))
    await world.tree(calls(world, 5, seen), models=provider, plan=plan, pricing=pricing).run()

    assert 3 == len([o for o in seen if isinstance(o, Value)])
    assert "cost" == seen[3].error.kind


@pytest.mark.spec("reliability:MP63")
@pytest.mark.parametrize("pricing", [None, lambda model, usage, at: None])
async def test_cost_limit_refuses_an_unpriced_model_before_the_first_call(world, pricing):
    seen, provider = [], world.Provider()
    plan = world.plan(limits=Limits(max_cost_usd=1))
    await world.tree(calls(world, 1, seen), models=provider, plan=plan, pricing=pricing).run()

    assert [] == provider.requests
    assert "unpriced_model" == seen[0].error.kind


@pytest.mark.spec("reliability:MP63")
async def test_allowed_unpriced_models_count_as_free(world):
    def pricing(model, usage, at):
        return Decimal(usage.total_tokens) if model == "priced/m" else None

    def machine(plan, state):
        outcomes = []
        for seq, model in enumerate(("free/m", "priced/m", "free/m", "priced/m")):
            request = ModelRequest(model, "", REQUEST.messages)
            outcomes += [(yield CallModel(seq, request))]
        return world.done(state, outcomes)

    provider = world.Provider(replies(4, input_tokens=20))
    plan = world.plan(limits=Limits(max_cost_usd=25, allow_unpriced=True))
    finished = await world.tree(machine, models=provider, plan=plan, pricing=pricing).run()

    assert [Value, Value, Value, Failure] == [type(outcome) for outcome in finished.output]
    assert "cost" == finished.output[3].error.kind


@pytest.mark.spec("reliability:MP62")
async def test_answering_model_is_priced_instead_of_the_requested_one(world):
    asked = []

    def pricing(model, usage, at):
        asked.append(model)
        return Decimal(usage.total_tokens) * (100 if model == "dear/m" else 1)

    seen = []
    provider = world.Provider([ModelReply("x", usage=Usage(input_tokens=20), model="dear/m"), "never"])
    plan = world.plan(limits=Limits(max_cost_usd=1_000))
    await world.tree(calls(world, 2, seen), models=provider, plan=plan, pricing=pricing).run()

    assert 2_000 == seen[0].value.cost
    assert "cost" == seen[1].error.kind
    assert 1 == len(provider.requests)


@pytest.mark.spec("requirements:X76")
@pytest.mark.parametrize(
    ("cost", "usage"),
    [
        (Decimal(2), Usage()),
        (Decimal(2), Usage(input_tokens=1)),  # the stated cost is larger
        (None, Usage(input_tokens=2_000)),
    ],
)
async def test_cost_limit_counts_the_larger_of_stated_and_computed_cost(world, cost, usage):
    def pricing(model, usage, at):
        return Decimal(usage.total_tokens) / 1_000

    seen, provider = [], world.Provider([ModelReply("x", usage=usage, cost=cost)] * 6)
    plan = world.plan(limits=Limits(max_cost_usd=5))
    await world.tree(calls(world, 6, seen), models=provider, plan=plan, pricing=pricing).run()

    assert 3 == len(provider.requests)
    assert ("cost", 5) == (seen[3].error.kind, seen[3].error.limit)


@pytest.mark.spec("requirements:X76")
async def test_reply_without_usage_counts_its_reserved_tokens(world):
    request = attrs.evolve(REQUEST, settings=ModelSettings(max_tokens=90))
    seen, provider = [], world.Provider([ModelReply("x", cost=Decimal(1))] * 3)
    plan = world.plan(limits=Limits(max_tokens=250))
    await world.tree(calls(world, 3, seen, request=request), models=provider, plan=plan).run()

    assert [Value, Value, Failure] == [type(outcome) for outcome in seen]


@pytest.mark.spec("requirements:X76")
async def test_pricing_of_reply_prices_the_whole_reply(world):
    """A pricing with ``price_reply`` knows more than the tokens, such as a cheaper tier."""

    class Tiers:
        def __call__(self, model, usage, at):
            return Decimal(usage.total_tokens) / 1_000

        def price_reply(self, model, reply, at):
            return Decimal(reply.usage.total_tokens) / 2_000

    seen, provider = [], world.Provider(replies(6, input_tokens=2_000))
    plan = world.plan(limits=Limits(max_cost_usd=4.5))
    await world.tree(calls(world, 6, seen), models=provider, plan=plan, pricing=Tiers()).run()

    assert 5 == len(provider.requests)


@pytest.mark.spec("requirements:X76")
async def test_reply_after_the_deadline_counts_its_stated_cost(world, monkeypatch):
    async def late(request):
        put_clock_ahead(monkeypatch, 6_000)  # no timer can stop the call before it returns
        return ModelReply("x", cost=Decimal(2))

    def machine(plan, state):
        stopped = yield CallModel(0, REQUEST)
        return world.done(state, stopped.begun)

    plan = world.plan(limits=Limits(max_seconds=3_000))
    finished = await world.tree(machine, models=world.Provider([late]), plan=plan).run()

    assert PartialUsage(Usage(requests=1, at_least=True), Decimal(2)) == finished.output


@pytest.mark.spec("reliability:R6")
async def test_max_seconds_cancels_the_active_call_and_stops_the_run(world, monkeypatch):
    seen = []

    async def hang(request):
        put_clock_ahead(monkeypatch, 6_000)
        await asyncio.Event().wait()

    plan = world.plan(limits=Limits(max_seconds=3_000))
    tree = world.tree(calls(world, 2, seen), models=world.Provider([hang]), plan=plan)
    await tree.run()

    assert ["limit", "limit"] == [o.kind for o in seen]
    assert isinstance(seen[0].error, LimitExceeded)
    assert "seconds" == seen[0].error.kind
    assert not tree.root.cancelled
