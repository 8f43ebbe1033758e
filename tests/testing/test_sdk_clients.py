"""
The clients of the three SDKs over a cassette: the right address whatever the environment says, no retries, no waiting, and no
way around the transport.
"""

from __future__ import annotations

import json
from typing import Any

import httpx2
import pytest

from stepengine import AgentDefinition, Engine, RetryPolicy
from stepengine.models.anthropic import AnthropicProvider
from stepengine.testing import Cassette, CassetteMiss, ReplayTransport
from stepengine.testing.cassette_files import Interaction, RecordedRequest, RecordedResponse
from stepengine.testing.engines import Clock
from stepengine.testing.transport import Clients

JSON = (("content-type", "application/json"),)
ANTHROPIC = "https://api.anthropic.com/v1/messages"
OPENAI = "https://api.openai.com/v1/chat/completions"
GOOGLE = "https://generativelanguage.googleapis.com/v1beta/models/m:generateContent"
ASKED: dict[str, Any] = {
    ANTHROPIC: {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]},
    OPENAI: {"model": "m", "messages": [{"role": "user", "content": "hi"}]},
    GOOGLE: {"contents": [{"role": "user", "parts": [{"text": "hi"}]}]},
}
ANSWERED: dict[str, Any] = {
    ANTHROPIC: {
        "id": "i", "type": "message", "role": "assistant", "model": "m", "content": [{"type": "text", "text": "yo"}],
        "stop_reason": "end_turn", "stop_sequence": None, "usage": {"input_tokens": 1, "output_tokens": 1},
    },
    OPENAI: {
        "id": "i", "object": "chat.completion", "created": 1, "model": "m",
        "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "yo"}}],
    },
    GOOGLE: {"candidates": [{"content": {"role": "model", "parts": [{"text": "yo"}]}, "finishReason": "STOP"}]},
}  # fmt: skip
VARIABLES = (
    "ANTHROPIC_BASE_URL", "OPENAI_BASE_URL", "GOOGLE_GEMINI_BASE_URL", "ANTHROPIC_CUSTOM_HEADERS", "OPENAI_ORG_ID",
    "OPENAI_PROJECT_ID", "GOOGLE_GENAI_API_VERSION", "ANTHROPIC_API_KEY", "OPENAI_API_KEY", "GEMINI_API_KEY", "GOOGLE_API_KEY",
)  # fmt: skip


def talk(url: str, status: int = 200, headers: Any = JSON) -> Interaction:
    asked, answered = json.dumps(ASKED[url]).encode(), json.dumps(ANSWERED[url]).encode()
    return Interaction(RecordedRequest("POST", url, JSON, asked), RecordedResponse(status, "", headers, answered))


def held(*interactions: Interaction) -> tuple[Cassette, Clients]:
    cassette = Cassette(interactions or [talk(url) for url in ASKED for _ in range(2)])
    return cassette, Clients(ReplayTransport(cassette))


def ask_all(clients: Clients) -> list[str]:
    return [
        clients.anthropic.messages.create(**ASKED[ANTHROPIC]).content[0].text,
        clients.openai.chat.completions.create(**ASKED[OPENAI]).choices[0].message.content,
        clients.google.models.generate_content(model="m", contents="hi").text,
    ]


async def ask_all_async(clients: Clients) -> list[str]:
    google = await clients.google.aio.models.generate_content(model="m", contents="hi")
    return [
        (await clients.async_anthropic.messages.create(**ASKED[ANTHROPIC])).content[0].text,
        (await clients.async_openai.chat.completions.create(**ASKED[OPENAI])).choices[0].message.content,
        google.text,
    ]


@pytest.mark.spec("replay:C20", "replay:C27", "replay:Y11")
@pytest.mark.parametrize("environment", ["empty", "misleading"])
async def test_every_client_finds_its_recording_without_a_key(
    environment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
        if environment == "misleading" and not name.endswith("_KEY"):
            value = "https://elsewhere.test" if name.endswith("_URL") else "v9" if "VERSION" in name else "x-a: b"
            monkeypatch.setenv(name, value)
    cassette, clients = held()
    async with clients:
        assert ask_all(clients) == await ask_all_async(clients) == ["yo"] * 3
    cassette.assert_all_used()


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("replay:C20", "ecosystem:EC194")
async def test_googles_async_client_stays_on_the_transport_despite_aiohttp(monkeypatch: pytest.MonkeyPatch) -> None:
    from google.genai import _api_client

    monkeypatch.setattr(_api_client, "has_aiohttp", True)
    _, clients = held()
    async with clients:
        assert clients.google._api_client._use_aiohttp() is False
        assert (await clients.google.aio.models.generate_content(model="m", contents="hi")).text == "yo"
    one_sided = Clients(ReplayTransport(Cassette()))
    one_sided.__dict__["_shared_async_http"] = None
    assert one_sided.google._api_client._use_aiohttp() is True


@pytest.mark.spec("replay:C20")
@pytest.mark.parametrize("url", list(ASKED))
def test_no_client_tries_again(url: str) -> None:
    busy = talk(url, 429, (*JSON, ("retry-after", "20")))
    cassette, clients = held(busy, talk(url), talk(url))
    with clients, pytest.raises(Exception, match="429") as failed:
        ask_one(clients, url)

    assert not isinstance(failed.value, CassetteMiss)
    assert cassette.unused == (1, 2)


def ask_one(clients: Clients, url: str) -> Any:
    if url == ANTHROPIC:
        return clients.anthropic.messages.create(**ASKED[url])
    if url == OPENAI:
        return clients.openai.chat.completions.create(**ASKED[url])
    return clients.google.models.generate_content(model="m", contents="hi")


@pytest.mark.spec("ecosystem:EC210")
@pytest.mark.parametrize("url", [ANTHROPIC, OPENAI])
def test_a_pre_encoded_body_reaches_the_transport_as_equal_request(url: str) -> None:
    cassette, clients = held(talk(url))
    other_order = json.dumps(dict(reversed(ASKED[url].items())), indent=1).encode()
    with clients:
        client, path = (
            (clients.anthropic, "/v1/messages") if url == ANTHROPIC else (clients.openai, "/chat/completions")
        )
        options = {"headers": {"content-type": "application/json"}}
        got = client.post(path, content=other_order, cast_to=httpx2.Response, options=options)
    assert got.json() == ANSWERED[url]
    cassette.assert_all_used()


@pytest.mark.spec("replay:C43", "replay:Y11")
async def test_a_replayed_outage_costs_no_real_time() -> None:
    asked: list[RecordedRequest] = []

    class Script(Cassette):
        """Answers every request with what is next."""

        def consume(self, request: RecordedRequest) -> Interaction:
            asked.append(request)
            return self.interactions[len(asked) - 1]

    # Whoever waited for so long would wait for longer than a test may take.
    script = [talk(ANTHROPIC, 429, (*JSON, ("retry-after", "2500"))), talk(ANTHROPIC, 529), talk(ANTHROPIC)]
    clock = Clock()
    provider = AnthropicProvider("replay", transport=ReplayTransport(Script(script)))
    async with Engine(
        models={"anthropic": provider}, clock=clock, retry=RetryPolicy(max_retry_after_seconds=3_000)
    ) as engine:
        agent = AgentDefinition("a", model="anthropic/m")
        result = await engine.run(agent, "hi")
    assert (result.text, len(asked)) == ("yo", 3)
    assert clock.now_ms() >= 2_500_000
