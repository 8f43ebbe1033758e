"""Requests that were sent and have no reply: they count, and the cost says that it is a lower bound."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import attrs
import pytest

from stepengine import (
    AgentCall,
    AgentDefinition,
    Engine,
    Limits,
    Parallel,
    Perform,
    Race,
    RateLimit,
    RetryPolicy,
)
from stepengine.data.models import ModelReply
from stepengine.data.usage import Usage
from stepengine.errors import ModelError, TruncatedReply
from stepengine.journal import FileJournal, MemoryJournal
from stepengine.journal.show import make_result_tree, make_run_tree, render
from stepengine.models import Provider, fallback
from tests.loop_clock import put_clock_ahead

MODEL = "anthropic/claude-sonnet-4-5"
BILLED = Usage(input_tokens=1_000, output_tokens=1_000)
"""What a reply uses; it costs 0.018 dollars."""


@attrs.define(eq=False)
class Model(Provider):
    """A model that first does what *plan* says: hangs, fails, or replies."""

    plan: list[Any]
    name: str = "anthropic"
    sent: int = 0
    is_busy: asyncio.Event = attrs.field(factory=asyncio.Event)

    async def complete(self, request: Any) -> ModelReply:
        self.sent += 1
        what = self.plan.pop(0) if self.plan else None
        if what == "hang":
            self.is_busy.set()
            await asyncio.Event().wait()
        if what == "cut":
            msg = "cut"
            raise TruncatedReply(msg, retryable=True)
        if isinstance(what, Exception):
            raise what
        return ModelReply("done", usage=BILLED)


KID = AgentDefinition("kid", model=MODEL)


def parent(handle: Callable[..., Any]) -> AgentDefinition:
    return AgentDefinition("parent", model=MODEL, handle_steps=handle, spawnable_agents=[KID])


def lose_race(model: Model, *prompts: str) -> AgentDefinition:
    def handle(ctx: Any) -> Any:
        yield from Race([*[AgentCall(KID, prompt) for prompt in prompts or "a"], Perform(model.is_busy.wait)])

    return parent(handle)


def fail_together(model: Model) -> AgentDefinition:
    async def fail() -> None:
        await model.is_busy.wait()
        msg = "broken"
        raise ValueError(msg)

    def handle(ctx: Any) -> Any:
        yield from Parallel([AgentCall(KID, "a"), Perform(fail)], fail_fast=True)

    return parent(handle)


WAYS: dict[str, tuple[Callable[[Model], AgentDefinition], list[str]]] = {
    "loser of a race": (lose_race, ["hang"]),
    "time limit": (lambda _: KID, ["hang"]),
    "sibling of a failed child": (fail_together, ["hang"]),
    "stream that broke off": (lambda _: KID, ["cut"]),
    "streams that broke off for good": (lambda _: KID, ["cut"] * 4),
    "model before a fallback": (
        lambda _: AgentDefinition("kid", model=fallback(MODEL, f"{MODEL}-20250929")),
        ["cut"],
    ),
}


@pytest.mark.spec("reliability:R3", "reliability:I4", "requirements:D15")
@pytest.mark.parametrize("way", WAYS)
async def test_a_request_without_a_reply_counts_as_sent(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make_agent, plan = WAYS[way]
    model, journal = Model(list(plan)), MemoryJournal()
    agent = make_agent(model)
    async with Engine([agent], models=model, retry=RetryPolicy(base_seconds=0)) as engine:
        handle = engine.start(agent, "x", journal=journal, limits=Limits(max_seconds=3_000))
        if way == "time limit":
            await model.is_busy.wait()
            put_clock_ahead(monkeypatch, 6_000)
        result = await handle.result()
        again = await engine.replay(journal)

    assert (model.sent, True) == (result.usage.requests, result.usage.at_least)
    assert BILLED.total_tokens * (model.sent - len(plan)) == result.usage.total_tokens
    assert Decimal("0.018") * (model.sent - len(plan)) == result.cost
    assert (result.usage, result.cost) == (again.usage, again.cost)
    assert make_run_tree(journal)["at_least"]
    assert "at_least" in make_result_tree(result)


@pytest.mark.spec("reliability:R3", "reliability:I4")
async def test_an_interrupted_request_counts_in_every_process(tmp_path: Path) -> None:
    model, path = Model(["hang"]), tmp_path / "run.jsonl"
    async with Engine([KID], models=model) as engine:
        handle = engine.start(KID, "x", journal=FileJournal(path))
        await model.is_busy.wait()
        killed = path.read_bytes()  # what a process that is killed now leaves
        handle.interrupt()
        stopped = await handle.result()
        resumed = await engine.resume(path)

        path.write_bytes(killed)
        shown = make_run_tree(FileJournal(path))
        revived = await engine.resume(path)
        shown_then = render(make_run_tree(FileJournal(path)))
        repeated = await engine.replay(path)

    assert Usage(requests=1, at_least=True) == stopped.usage
    assert (3, True, "0") == (model.sent, shown["at_least"], shown["cost_usd"])
    for result in (resumed, revived, repeated):
        assert (attrs.evolve(BILLED, requests=2, at_least=True), Decimal("0.018")) == (result.usage, result.cost)
    assert "cost at least $0.018" in shown_then


@pytest.mark.spec("reliability:R3")
@pytest.mark.parametrize("error", [ModelError("busy", retryable=True, status=429), None])
async def test_a_cost_without_lost_requests_is_exact(error: ModelError | None) -> None:
    """A refusal is not billed, and a call that waits for a rate limit is not sent."""
    model = Model([error] if error else ["hang"])
    agent = KID if error else lose_race(model, "a", "b")
    limits = {} if error else {"rate_limits": {"anthropic": RateLimit(max_concurrency=1)}}
    async with Engine([agent], models={"anthropic": model}, retry=RetryPolicy(base_seconds=0), **limits) as engine:
        result = await engine.run(agent, "x")

    assert (1, not error) == (result.usage.requests, result.usage.at_least)
