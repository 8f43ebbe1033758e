"""
Model calls: deltas, retries, prices, and what a provider may do wrong.
"""

from __future__ import annotations

import asyncio
from decimal import Decimal

import pytest
from hypothesis import HealthCheck, example, given, settings

from stepengine.data import record_sizes
from stepengine.data.effects import CallModel
from stepengine.data.messages import TextPart, ThinkingPart, ToolCallPart
from stepengine.data.models import ModelReply, ModelRequest, ReplyDone, TextChunk, ToolCallChunk, ToolCallStarted
from stepengine.data.outcomes import Failure, Stop, Value
from stepengine.data.state import RunStatus
from stepengine.data.usage import Usage
from stepengine.errors import ModelError, TruncatedReply, UnknownModel
from stepengine.machine.plan import Finished
from stepengine.models.base import Provider
from tests import strategies

REQUEST = ModelRequest("test/m")


def one_call(seen):
    def machine(plan, state):
        seen.append((yield CallModel(0, REQUEST)))
        return Finished(status=RunStatus.COMPLETED, state=state)

    return machine


def busy(**fields):
    return ModelError("overloaded", retryable=True, **{"status": 529, **fields})


@pytest.mark.spec("reliability:MP10", "reliability:R21")
async def test_retry_after_is_waited_and_each_retry_is_an_event(world):
    seen, events, clock = [], [], world.JumpingClock()
    provider = world.Provider([busy(status=429, retry_after=2), "done"])
    await world.tree(one_call(seen), models=provider, clock=clock, observers=[events.append]).run()
    retry = next(e for e in events if e.type == "model_retry")

    assert clock.sleeps[0] >= 2
    assert (1, "overloaded") == (retry.attempt, retry.error)
    assert retry.wait == clock.sleeps[0]
    assert "done" == seen[0].value.text
    assert seen[0].at >= 2000


@pytest.mark.spec("reliability:MP33")
async def test_cancel_while_waiting_for_a_retry_returns_at_once(world):
    waiting = asyncio.Event()

    class Clock(world.JumpingClock):
        async def sleep(self, seconds):
            waiting.set()
            await asyncio.Event().wait()

    seen, provider = [], world.Provider(default=busy(retry_after=50))
    task = asyncio.create_task(world.tree(one_call(seen), models=provider, clock=Clock()).run())
    await waiting.wait()
    task.cancel()
    async with asyncio.timeout(50):
        await task

    assert isinstance(seen[0], Stop)
    assert 1 == len(provider.requests)


@pytest.mark.spec("reliability:R3", "requirements:D15")
async def test_usage_of_failed_attempts_is_counted(world):
    seen, clock = [], world.JumpingClock()
    known = busy(usage=Usage(input_tokens=10))
    lost = busy(status=None, kind="connection")
    reply = ModelReply("done", usage=Usage(input_tokens=100, output_tokens=5))
    await world.tree(one_call(seen), models=world.Provider([known, lost, reply]), clock=clock).run()

    assert Usage(input_tokens=110, output_tokens=5, requests=3, at_least=True) == seen[0].value.usage


@pytest.mark.spec("requirements:D15")
async def test_final_model_error_carries_usage_of_all_attempts(world):
    seen = []
    provider = world.Provider(default=busy(usage=Usage(input_tokens=10)))
    provider.items = [busy(usage=Usage(input_tokens=10)) for _ in range(4)]
    await world.tree(one_call(seen), models=provider, clock=world.JumpingClock()).run()

    assert Usage(input_tokens=40, requests=4) == seen[0].error.usage


async def test_model_is_streamed_only_while_watched(world):
    for observers in ([], [lambda event: None]):
        provider = world.Provider([(TextChunk("a"), ReplyDone(ModelReply("a")))] if observers else ["a"])
        seen = []
        await world.tree(one_call(seen), models=provider, observers=observers).run()

        assert "a" == seen[0].value.text


async def test_text_and_tool_input_deltas_carry_their_address(world):
    events = []
    deltas = (
        TextChunk("he"),
        TextChunk("y"),
        ToolCallStarted(0, "add"),
        ToolCallChunk(0, '{"a"'),
        ReplyDone(ModelReply("hey")),
    )
    await world.tree(one_call([]), models=world.Provider([deltas]), observers=[events.append]).run()

    assert ["he", "y"] == [e.text for e in events if e.type == "text_delta"]
    assert [("add", '{"a"', 0)] == [(e.tool_name, e.text, e.seq) for e in events if e.type == "tool_input_delta"]


class Whole(Provider):
    """A model without a stream of its own."""

    name = "whole"

    def __init__(self, reply):
        self.reply = reply

    async def complete(self, request):
        return self.reply

    def provider_for(self, model):
        return self


class InPieces(Whole):
    """The same one with a stream, which is the one that every model has."""

    async def stream(self, request):
        async for delta in super().stream(request):
            yield delta


def called(name, index):
    return ToolCallPart("", name, {"at": index, "ü": None}, raw_input='{"at' if index == 1 else None)


@pytest.mark.deep
@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(reply=strategies.replies)
@example(
    reply=ModelReply([TextPart("a"), called("x", 0), ThinkingPart("b"), called("y", 1), TextPart(""), called("z", 2)])
)
def test_unstreamed_reply_emits_the_events_of_a_streamed_one(world, reply):
    shown = []
    for provider in (Whole(reply), InPieces(reply)):
        seen, events = [], []

        def machine(plan, state, seen=seen):
            seen.append((yield CallModel(0, REQUEST, call_id=lambda number: f"c{number + 1}")))
            return Finished(status=RunStatus.COMPLETED, state=state)

        asyncio.run(world.tree(machine, models=provider, clock=world.JumpingClock(), observers=[events.append]).run())
        assert reply.content == seen[0].value.content
        shown.append([{**event.to_json(), "epoch": ""} for event in events])

    assert shown[0] == shown[1]
    assert [part.tool_name for part in reply.content if type(part) is ToolCallPart] == [
        told["tool_name"] for told in shown[0] if told["type"] == "tool_input_delta"
    ]


async def test_provider_returning_no_reply_is_a_model_error(world):
    seen, events = [], []
    await world.tree(one_call(seen), models=Whole({"text": "hey"}), observers=[events.append]).run()

    assert "returned a dict instead of a ModelReply" in seen[0].error.message
    assert ["model_started", "model_finished"] == [event.type for event in events]


@pytest.mark.spec("reliability:MP19", "reliability:MP20")
@pytest.mark.parametrize("ending", [(), (TruncatedReply("cut", retryable=True),)])
async def test_deltas_of_a_cut_reply_are_followed_by_reply_discarded(world, ending):
    seen, events = [], []
    provider = world.Provider([(TextChunk("half"), *ending), "whole"])
    await world.tree(one_call(seen), models=provider, clock=world.JumpingClock(), observers=[events.append]).run()

    assert "whole" == seen[0].value.text
    assert ["text_delta", "reply_discarded", "model_retry", "text_delta"] == [
        e.type for e in events if e.type not in ("model_started", "model_finished")
    ]


@pytest.mark.spec("reliability:R22")
@pytest.mark.parametrize("item", [ValueError("sdk"), asyncio.CancelledError(), 42])
async def test_provider_misbehaviour_is_a_model_error(world, item):
    seen = []
    await world.tree(one_call(seen), models=world.Provider([item])).run()

    assert isinstance(seen[0], Failure)
    assert isinstance(seen[0].error, ModelError)
    assert "provider" == seen[0].error.kind
    assert seen[0].error.__cause__ is (item if isinstance(item, BaseException) else None)


async def test_reply_too_long_for_a_record_is_a_model_error(world, monkeypatch):
    monkeypatch.setattr(record_sizes, "MAX_VALUE_BYTES", 1_000)
    seen = []
    await world.tree(one_call(seen), models=world.Provider(["x" * 1_001])).run()

    assert isinstance(seen[0].error, ModelError)
    assert "too_large" == seen[0].error.kind


async def test_unknown_model_fails_the_call(world):
    class Nobody:
        def provider_for(self, model):
            raise UnknownModel(f"no provider for {model!r}")

    seen = []
    await world.tree(one_call(seen), models=Nobody()).run()

    assert isinstance(seen[0].error, UnknownModel)


@pytest.mark.spec("requirements:G17")
@pytest.mark.parametrize(
    ("own", "priced", "expected"),
    [
        (None, Decimal(2), Decimal(2)),
        (Decimal(1), Decimal(2), Decimal(1)),
        (None, None, None),
        (None, ValueError(), None),
        (None, Decimal("NaN"), None),
        (None, Decimal("1E+999999999999"), None),
        (None, Decimal(-1), None),
        (None, 0.5, None),
    ],
)
async def test_reported_cost_wins_over_the_computed_cost(world, own, priced, expected):
    def pricing(model, usage, at):
        if isinstance(priced, Exception):
            raise priced
        return priced

    seen = []
    reply = ModelReply("x", usage=Usage(input_tokens=1), cost=own)
    await world.tree(one_call(seen), models=world.Provider([reply]), pricing=pricing).run()

    assert isinstance(seen[0], Value)
    assert expected == seen[0].value.cost


@pytest.mark.spec("reliability:MP10")
@pytest.mark.parametrize(("asked", "requests"), [(61, 1), (60, 2)])
async def test_retry_after_is_obeyed_up_to_one_minute(world, asked, requests):
    seen, provider, clock = [], world.Provider([busy(retry_after=asked)]), world.JumpingClock()
    await world.tree(one_call(seen), models=provider, clock=clock).run()

    assert requests == len(provider.requests)
    if requests == 1:
        assert asked == seen[0].error.retry_after
    else:
        assert 60 == clock.sleeps[0]
