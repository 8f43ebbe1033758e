"""Model calls that are stopped before their reply is whole: what was used until then counts, as a lower bound."""

from __future__ import annotations

import asyncio
from decimal import Decimal
from functools import partial
from typing import Any

import httpx2
import pytest

from stepengine import (
    AgentDefinition,
    Engine,
    Limits,
    RetryPolicy,
    RunStatus,
    Usage,
)
from stepengine.data.models import ModelReply, ReplyDone, TextChunk, ThinkingChunk, ToolCallChunk, ToolCallStarted
from stepengine.errors import ModelError
from stepengine.journal import FileJournal
from stepengine.journal.show import compute_spending
from stepengine.models import Provider
from tests.faults.scripts import WIRES
from tests.loop_clock import put_clock_ahead

PIECES = (ThinkingChunk("t" * 40), TextChunk("x" * 200), ToolCallStarted(0, "look"), ToolCallChunk(0, "y" * 40))
STREAMED = Usage(0, 60, 0, 0, 10, 1, at_least=True)
SAID = ModelReply("Hi.", usage=Usage(100, 5))
DOLLAR = Decimal("0.01")


def priced(model: str, usage: Usage, at: Any) -> Decimal:
    return DOLLAR * usage.total_tokens


class Half(Provider):
    """Streams pieces and waits for ever, as often as *halves* says; then it gives a whole reply."""

    name = "test"

    def __init__(self, halves: int = 1, pieces: tuple[Any, ...] = PIECES) -> None:
        self.halves, self.pieces = halves, pieces
        self.waits = asyncio.Event()

    async def complete(self, request):
        return SAID

    async def stream(self, request):
        self.halves -= 1
        if self.halves >= 0:
            for piece in self.pieces:
                yield piece
            self.waits.set()
            await asyncio.Event().wait()
        yield ReplyDone(SAID)


def agent(**more: Any) -> AgentDefinition:
    return AgentDefinition("asker", model="test/m", **more)


def built(model: Provider, *agents: AgentDefinition, **options: Any) -> Engine:
    return Engine(agents, models={"test": model}, pricing=priced, observers=[lambda event: None], **options)


async def interrupted(engine: Engine, model: Half, definition: AgentDefinition, **options: Any):
    handle = engine.start(definition, "go", **options)
    await model.waits.wait()
    handle.interrupt()
    return await handle.result()


@pytest.mark.spec("requirements:D15", "requirements:N6", "reliability:MP19")
async def test_text_streamed_before_an_interrupt_counts_as_lower_bound():
    """It used to be a run without a model call, for nothing."""
    model = Half()
    async with built(model) as engine:
        result = await interrupted(engine, model, agent())

    assert (RunStatus.CANCELLED, STREAMED, 70 * DOLLAR) == (result.status, result.usage, result.cost)
    assert {"test/m": STREAMED} == dict(result.usage_by_model)
    assert {"test/m": 70 * DOLLAR} == dict(result.cost_by_model)


async def test_cancelled_and_timed_out_calls_are_counted_alike(monkeypatch):
    told = []
    model = Half()
    async with Engine(models={"test": model}, pricing=priced, observers=[told.append]) as engine:
        task = asyncio.create_task(engine.run(agent(), "go"))
        await model.waits.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert (STREAMED, 70 * DOLLAR) == (told[-1].result.usage, told[-1].result.cost)

    model = Half()
    async with built(model) as engine:
        handle = engine.start(agent(limits=Limits(max_seconds=3_000)), "go")
        await model.waits.wait()
        put_clock_ahead(monkeypatch, 6_000)
        result = await handle.result()
    assert (RunStatus.FAILED, STREAMED) == (result.status, result.usage)


@pytest.mark.spec("requirements:D15", "reliability:I4")
@pytest.mark.parametrize("watched", [True, False])
async def test_failed_attempts_count_when_their_retry_wait_is_interrupted(watched):
    class Failing(Half):
        async def complete(self, request):
            self.waits.set()
            raise ModelError("later", retryable=True, retry_after=50, usage=Usage(7, 3))

        async def stream(self, request):
            await self.complete(request)
            yield

    model = Failing()
    seen = {"observers": [lambda event: None]} if watched else {}
    async with Engine(models={"test": model}, pricing=priced, retry=RetryPolicy(), **seen) as engine:
        handle = engine.start(agent(), "go")
        await model.waits.wait()
        await asyncio.sleep(0)
        handle.interrupt()
        result = await handle.result()

    assert Usage(7, 3, requests=1, at_least=True) == result.usage
    assert 10 * DOLLAR == result.cost


# --- journals ---------------------------------------------------------------------------------------------------------


@pytest.mark.spec("reliability:R3", "requirements:D15", "replay:D1")
@pytest.mark.parametrize("goes_on", [Engine.resume, partial(Engine.resume, on_divergence="extend")])
async def test_usage_of_a_stopped_call_survives_replay_and_resume(goes_on, tmp_path):
    path, model = tmp_path / "run.jsonl", Half(halves=2)
    async with built(model, agent()) as engine:
        first = await interrupted(engine, model, agent(), journal=FileJournal(path))
        again = await engine.replay(path)
        shown = compute_spending(FileJournal(path).history())

        assert (first.usage, first.cost) == (again.usage, again.cost)
        assert (70, True, first.cost) == (shown.usage.total_tokens, shown.usage.at_least, shown.cost)
        assert path.read_bytes() == again.journal.content()

        model.waits.clear()
        task = asyncio.create_task(goes_on(engine, path))
        await model.waits.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        twice = await engine.replay(path)
        done = await engine.resume(path)
        repeated = await engine.replay(path)

    assert (140, True) == (twice.usage.total_tokens, twice.usage.at_least)
    assert (RunStatus.COMPLETED, "Hi.") == (done.status, done.text)
    assert Usage(100, 125, 0, 0, 20, 3, at_least=True) == done.usage
    assert (140 + 105) * DOLLAR == done.cost
    assert (done.usage, done.cost) == (repeated.usage, repeated.cost)


# --- the wires --------------------------------------------------------------------------------------------------------


class Hanging(httpx2.AsyncByteStream):
    """The first events of a stream, and then nothing any more."""

    def __init__(self, events: list[bytes]) -> None:
        self._events = events
        self.waits = asyncio.Event()

    async def __aiter__(self):
        for event in self._events:
            yield event
        self.waits.set()
        await asyncio.Event().wait()


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("requirements:D15", "reliability:I12")
@pytest.mark.parametrize("wire", WIRES, ids=str)
async def test_partial_usage_from_the_provider_counts_for_a_stopped_call(wire):
    events = wire.stream("x" * 400, [("add", '{"a": 2, "b": 3}')], "tool_use")
    end = next(index for index, event in enumerate(events) if wire.marker in event)
    body = Hanging(events[:end])
    answer = httpx2.Response(200, stream=body, headers={"content-type": "text/event-stream"})
    provider = wire.make(transport=httpx2.MockTransport(lambda _: answer))
    prefix, _, name = wire.model.partition("/")
    async with Engine(models={prefix: provider}, pricing=priced, observers=[lambda event: None]) as engine:
        handle = engine.start(AgentDefinition("asker", model=f"{prefix}/{name}"), "go")
        await body.waits.wait()
        handle.interrupt()
        result = await handle.result()
    await provider.close()

    assert (RunStatus.CANCELLED, True, 1) == (result.status, result.usage.at_least, result.usage.requests)
    assert result.usage.output_tokens >= 100
    assert DOLLAR * result.usage.total_tokens == result.cost
    if str(wire) == "anthropic":
        assert (25, 5, 2) == (
            result.usage.input_tokens,
            result.usage.cache_read_tokens,
            result.usage.cache_write_tokens,
        )
