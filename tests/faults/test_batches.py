"""Calls of many runs go out in batches and come back, on every wire that has them, before a server that is strict about their forms."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import attrs
import pytest

from stepengine import AgentDefinition, Engine, ModelSettings, RunStatus
from stepengine.data.messages import UserMessage
from stepengine.data.models import ModelRequest
from stepengine.data.transcript import Transcript
from stepengine.errors import DataError, ModelError
from stepengine.journal import FileJournal
from stepengine.models import AnthropicProvider, Batched, GoogleProvider, OpenAIChatProvider, OpenAIProvider
from stepengine.models.pricing import LIST_PRICES
from stepengine.testing import ScriptedModel
from tests.faults.batch_server import BatchServer
from tests.faults.media_server import running

MODELS = {
    "anthropic": "claude-sonnet-4-5",
    "openai": "gpt-5-mini",
    "openai_chat": "gpt-5-mini",
    "google": "gemini-2.5-flash",
}
wires = pytest.mark.parametrize("wire", MODELS)


def provider_at(wire: str, url: str) -> Any:
    match wire:
        case "anthropic":
            return AnthropicProvider("k", url)
        case "openai":
            return OpenAIProvider("k", f"{url}/v1")
        case "google":
            return GoogleProvider("k", url)
        case _:
            provider = OpenAIChatProvider("openai_chat", "k")
            provider._base_url = f"{url}/v1"  # given as an argument it would be a server that nothing is known of
            return provider


@asynccontextmanager
async def batching(wire: str, file: Path, **more: Any) -> AsyncIterator[tuple[BatchServer, Batched]]:
    server = BatchServer()
    async with running(server):
        batched = Batched(provider_at(wire, server.url), file, **{"wait": 0.05, "poll": 0.01, **more})
        try:
            yield server, batched
        finally:
            await batched.close()


def asked(wire: str, text: str, **settings: Any) -> ModelRequest:
    history = Transcript([UserMessage(text)])
    return ModelRequest(f"{wire}/{MODELS[wire]}", "Be brief.", history, settings=ModelSettings(**settings))


@pytest.mark.deep
@pytest.mark.smoke
@wires
@pytest.mark.spec("providers:PV99")
async def test_runs_at_the_same_time_share_a_batch(wire: str, tmp_path: Path) -> None:
    async with batching(wire, tmp_path / "batches.db", most=20, wait=30) as (server, batched):
        agent = AgentDefinition("shouter", model=f"{wire}/{MODELS[wire]}")
        async with Engine([agent], models={wire: batched}) as engine:
            results = await asyncio.gather(*[engine.run("shouter", f"say it {n}") for n in range(20)])

    assert [f"SAY IT {n}" for n in range(20)] == [result.text for result in results]
    assert [20] == [len(batch) for batch in server.batches.values()]


@wires
@pytest.mark.spec("providers:PV99")
async def test_a_reply_of_a_batch_costs_half(wire: str, tmp_path: Path) -> None:
    async with batching(wire, tmp_path / "batches.db", wait=0) as (_, batched):
        reply = await batched.complete(asked(wire, "a"))
    alone = attrs.evolve(reply, provider_data={k: v for k, v in reply.provider_data.items() if k != "processing"})
    half, whole = [
        LIST_PRICES.price_reply(f"{wire}/{MODELS[wire]}", each, datetime.now(UTC)) for each in (reply, alone)
    ]

    # What came from a cache has a price of its own, of which a batch takes off less at some models.
    assert Decimal("0.5") <= half / whole < Decimal("0.52")


@pytest.mark.deep
@pytest.mark.smoke
@wires
@pytest.mark.spec("providers:PV99")
async def test_a_call_that_fails_in_its_batch_fails_alone(wire: str, tmp_path: Path) -> None:
    failing = [
        ("refused", "http", False),
        ("expired", "batch", True),
        ("canceled", "batch", False),
        ("lost", "batch", True),
    ]
    async with batching(wire, tmp_path / "batches.db", most=2) as (_, batched):
        for word, kind, retryable in failing:
            calls = [batched.complete(asked(wire, text)) for text in ("fine", f"is {word}")]
            good, bad = await asyncio.gather(*calls, return_exceptions=True)

            assert "FINE" == good.text
            assert (ModelError, kind, retryable) == (type(bad), bad.kind, bad.retryable)


@pytest.mark.parametrize("wire", ["openai", "google"])
@pytest.mark.spec("providers:PV99")
async def test_a_failed_batch_fails_each_of_its_calls(wire: str, tmp_path: Path) -> None:
    async with batching(wire, tmp_path / "batches.db", most=2) as (server, batched):
        server.fails = True
        first, second = await asyncio.gather(
            *[batched.complete(asked(wire, text)) for text in "ab"], return_exceptions=True
        )

    assert "not so" in str(first)
    assert "not so" in str(second)
    assert first is not second


@pytest.mark.deep
@pytest.mark.smoke
@wires
async def test_a_refused_batch_fails_each_call_and_can_be_retried(wire: str, tmp_path: Path) -> None:
    async with batching(wire, tmp_path / "batches.db", most=2) as (server, batched):
        server.refuses = 529 if wire == "anthropic" else 503
        first, second = await asyncio.gather(
            *[batched.complete(asked(wire, text)) for text in "ab"], return_exceptions=True
        )
        server.refuses = 0
        again = await batched.complete(asked(wire, "a"))

    assert (True, True) == (first.retryable, second.retryable)
    assert "A" == again.text


@pytest.mark.deep
@pytest.mark.smoke
async def test_calls_with_other_headers_or_models_go_in_separate_batches(tmp_path: Path) -> None:
    async with batching("anthropic", tmp_path / "batches.db") as (server, batched):
        await asyncio.gather(*[batched.complete(asked("anthropic", "a", **s)) for s in ({}, {"temperature": 0.5}, {})])
        versions = sorted([len(batch) for batch in server.batches.values()])
    async with batching("openai", tmp_path / "other.db") as (server, batched):
        requests = [ModelRequest(f"openai/gpt-5-{n}", "", Transcript([UserMessage("a")])) for n in ("mini", "nano")]
        await asyncio.gather(*[batched.complete(request) for request in requests])

    assert [1, 2] == versions
    assert [1, 1] == [len(batch) for batch in server.batches.values()]


async def test_full_batches_go_at_once_and_the_rest_in_time(tmp_path: Path) -> None:
    async with batching("anthropic", tmp_path / "batches.db", most=3) as (server, batched):
        await asyncio.gather(*[batched.complete(asked("anthropic", str(n))) for n in range(7)])

    assert [1, 3, 3] == sorted([len(batch) for batch in server.batches.values()])


async def test_a_poll_that_fails_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with batching("anthropic", tmp_path / "batches.db") as (server, batched):
        is_done, failed = server.is_done, []

        def failing(_: BatchServer, name: str) -> bool:
            from tests.faults.media_server import Refused

            if not failed:
                failed.append(name)
                raise Refused("overloaded", 529)
            return is_done(name)

        monkeypatch.setattr(BatchServer, "is_done", failing)
        reply = await batched.complete(asked("anthropic", "a"))

    assert ("A", 1) == (reply.text, len(failed))


@pytest.mark.deep
@pytest.mark.smoke
async def test_a_file_of_batches_belongs_to_one_process(tmp_path: Path) -> None:
    async with batching("anthropic", tmp_path / "batches.db") as (_, batched):
        await batched.complete(asked("anthropic", "a"))
        async with batching("anthropic", tmp_path / "batches.db") as (_, other):
            with pytest.raises(DataError, match="another process uses it; give each process its own file"):
                await other.complete(asked("anthropic", "a"))
    async with batching("anthropic", tmp_path / "batches.db") as (_, batched):
        assert "A" == (await batched.complete(asked("anthropic", "a"))).text


async def test_a_file_that_is_no_database_is_refused(tmp_path: Path) -> None:
    (tmp_path / "batches.db").write_text("notes " * 1000)
    async with batching("anthropic", tmp_path / "batches.db") as (_, batched):
        with pytest.raises(DataError, match="cannot be used"):
            await batched.complete(asked("anthropic", "a"))


@pytest.mark.parametrize("wrong", [{"wait": -1}, {"most": 0}, {"most": 10_001}, {"poll": 0}])
def test_impossible_numbers_are_refused(wrong: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(DataError, match="wait must be at least 0"):
        Batched(AnthropicProvider("k"), tmp_path / "b", **wrong)


@pytest.mark.parametrize(
    "make", [lambda: OpenAIChatProvider("groq", "k"), lambda: ScriptedModel([])], ids=["groq", "scripted"]
)
def test_a_provider_without_batches_is_refused_before_any_request(make: Callable[[], Any], tmp_path: Path) -> None:
    batched = Batched(make(), tmp_path / "batches.db")

    with pytest.raises(ModelError, match="does not support batches; use anthropic, openai or google"):
        batched.check("groq/llama")
    assert not (tmp_path / "batches.db").exists()


# --- a process that dies ----------------------------------------------------------------------------------------------

PROGRAM = """
import asyncio, sys
from stepengine import AgentDefinition, Engine
from stepengine.journal import FileJournal
from stepengine.models import AnthropicProvider, Batched

async def main(url, folder):
    agent = AgentDefinition("shouter", model="anthropic/claude-sonnet-4-5")
    batched = Batched(AnthropicProvider("k", url), f"{folder}/batches.db", wait=0.2, poll=0.05)
    async with Engine([agent], models={"anthropic": batched}) as engine:
        runs = [engine.run("shouter", "say it", journal=FileJournal(f"{folder}/{n}.jsonl")) for n in range(3)]
        await asyncio.gather(*runs)

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.mark.deep
async def test_runs_of_a_killed_process_resume_with_their_sent_batch(tmp_path: Path) -> None:
    server = BatchServer(polls=1_000_000)
    async with running(server):
        process = subprocess.Popen(  # noqa: ASYNC220 - it is started at once
            [sys.executable, "-c", textwrap.dedent(PROGRAM), server.url, str(tmp_path)]
        )
        while not server.asked:
            assert process.poll() is None
            await asyncio.sleep(0.05)
        os.kill(process.pid, signal.SIGKILL)
        await asyncio.to_thread(process.wait)
        server.polls = 1
        agent = AgentDefinition("shouter", model="anthropic/claude-sonnet-4-5")
        batched = Batched(AnthropicProvider("k", server.url), tmp_path / "batches.db", wait=0.2, poll=0.05)
        async with Engine([agent], models={"anthropic": batched}) as engine:
            journals = [FileJournal(tmp_path / f"{n}.jsonl") for n in range(3)]
            results = await asyncio.gather(*[engine.resume(journal) for journal in journals])

    assert [RunStatus.COMPLETED] * 3 == [result.status for result in results]
    assert ["SAY IT"] * 3 == [result.text for result in results]
    assert [3] == [len(batch) for batch in server.batches.values()]
