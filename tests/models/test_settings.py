"""Settings on the four wires: structured output, caching, thinking, stop sequences, and the way out for everything else."""

from __future__ import annotations

import json
import re
from typing import Any

import attrs
import httpx2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepengine import STEP, AgentDefinition, Complete, Engine, StepContext, Steps
from stepengine.data.codec import from_json, to_json
from stepengine.data.messages import AssistantMessage, TextPart, ThinkingPart, ToolCallPart, UserMessage
from stepengine.data.models import ModelReply, ModelRequest, ModelSettings, StopReason, Thinking
from stepengine.data.server_tools import WebSearch
from stepengine.data.transcript import Transcript
from stepengine.errors import ModelError
from stepengine.journal import MemoryJournal
from stepengine.models import AnthropicProvider, BedrockProvider, FoundryProvider
from stepengine.models._reply import cut_at_stop_sequence
from stepengine.models._wire import merge_headers
from tests.models.wires import FOUR, MODEL, TOOL, provider_of

HI = UserMessage("hi")


# --- caching --------------------------------------------------------------------------------------------------------


WITH_OPTIONS, BEFORE = "gpt-5.6-mini", "gpt-5.5"
DROPPED = None


@pytest.mark.spec("providers:PV66")
@pytest.mark.parametrize(
    ("name", "model", "cache", "options"),
    [
        ("openai", WITH_OPTIONS, "1h", {"ttl": "12h"}),
        ("openai", WITH_OPTIONS, "off", {"mode": "explicit"}),
        ("openai", "gpt-5.10", "off", {"mode": "explicit"}),
        ("openai", BEFORE, "1h", DROPPED),
        ("openai_chat", WITH_OPTIONS, "off", {"mode": "explicit"}),
        ("openai_chat", WITH_OPTIONS, "1h", DROPPED),
        ("groq", WITH_OPTIONS, "off", DROPPED),
    ],
)
def test_openai_cache_lifetime_is_sent_or_reported_dropped(name, model, cache, options):
    provider = provider_of(name)
    request = ModelRequest(f"{name}/{model}", messages=Transcript([HI]), settings=ModelSettings(cache=cache))
    got = json.loads(provider._encode(request, stream=False).content)
    assert got.get("prompt_cache_options", {}) == (options or {})
    assert ("cache" in provider._list_unsupported_settings(request)) == (options is DROPPED)
    assert "prompt_cache_retention" not in got
    assert "prompt_cache_breakpoint" not in json.dumps(got)


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("providers:PV66")
@settings(max_examples=60)
@given(st.sampled_from(["5m", "1h"]), st.data())
def test_anthropic_never_gets_more_than_its_four_marks(cache, data):
    """Whatever is said and offered, and with tools that the provider runs, in whose places marks may stand, too."""
    texts = st.lists(st.text(max_size=3).map(TextPart), min_size=1, max_size=3)
    turn = st.builds(lambda parts: UserMessage(tuple(parts)), texts) | st.builds(
        lambda parts: AssistantMessage(tuple(parts)), texts
    )
    request = ModelRequest(
        "anthropic/claude-sonnet-5",
        data.draw(st.sampled_from(["", "Be good."])),
        Transcript(data.draw(st.lists(turn, max_size=5))),
        (TOOL,) * data.draw(st.integers(0, 4)),
        tail=tuple(data.draw(st.lists(turn, max_size=2))),
        settings=ModelSettings(cache=cache),
    )
    for provider in (AnthropicProvider("k"), BedrockProvider("k", region="us-east-1")._wires["claude"]):
        sent = provider._encode(request, stream=False).content
        assert sent.count(b'"cache_control":') <= 4
        assert sent.count(b'"ttl":"1h"') == (sent.count(b'"cache_control":') if cache == "1h" else 0)


@pytest.mark.spec("ecosystem:EC98", "ecosystem:EC54")
def test_binding_models_are_asked_to_drop_mismatched_thinking():
    settings = ModelSettings(thinking=Thinking("enabled"), extra={"headers": {"anthropic-beta": "mine"}})
    for model, bound in (("claude-fable-5-1", True), ("claude-opus-5", False)):
        encoded = AnthropicProvider("k")._encode(ModelRequest(f"anthropic/{model}", settings=settings), stream=False)
        thinking = json.loads(encoded.content)["thinking"]
        expected = {"block_binding": {"prefix_mismatch_behavior": "drop_block"}} if bound else {}
        assert thinking == {"type": "adaptive", "display": "summarized", **expected}
        assert encoded.headers.get("anthropic-beta") == ("thinking-binding-controls-2026-08-01" if bound else None)


# --- the way out ----------------------------------------------------------------------------------------------------


@pytest.mark.spec("requirements:A15")
@pytest.mark.parametrize("name", FOUR)
@pytest.mark.anyio
async def test_extra_headers_and_members_are_sent_and_objects_are_merged(name):
    seen = []

    def answer(request: httpx2.Request) -> httpx2.Response:
        seen.append(request)
        return httpx2.Response(500, json={})

    extra: dict[str, Any] = {"headers": {"X-Mine": "yes"}, "body": {"nested": {"b": 2}}, "nested": {"a": 1}}
    extra["tools"] = [{"type": "web_search"}]
    provider = provider_of(name, transport=httpx2.MockTransport(answer), headers={"x-always": "here"})
    request = ModelRequest(
        f"{name}/{MODEL[name]}", "s", Transcript([HI]), (TOOL,), settings=ModelSettings(extra=extra, max_tokens=9)
    )
    with pytest.raises(ModelError):
        await provider.complete(request)
    await provider.close()
    (got,) = seen
    assert (got.headers["x-mine"], got.headers["x-always"]) == ("yes", "here")
    sent = json.loads(got.content)
    assert sent["nested"] == {"a": 1, "b": 2}
    assert len(sent["tools"]) == 2
    assert sent["tools"][1] == {"type": "web_search"}
    assert "headers" not in sent
    assert "body" not in sent


ROUTING = {"provider": {"only": ["anthropic"]}, "body": {"transforms": [], "kept": 1}}


@pytest.mark.spec("requirements:A15")
@pytest.mark.parametrize("name", [*FOUR, "openrouter", "ollama", "bedrock_converse"])
@pytest.mark.anyio
async def test_the_routing_of_openrouter_is_sent_to_openrouter_alone(name, caplog):
    """
    codebuff's ``providerOptions`` are such members, and there every model is asked through OpenRouter.
    """
    codebuff = {"only": ["anthropic"]}
    seen = []

    def answer(request: httpx2.Request) -> httpx2.Response:
        seen.append(json.loads(request.content))
        return httpx2.Response(500, json={})

    provider = provider_of(name, transport=httpx2.MockTransport(answer))
    request = ModelRequest(
        f"{name}/{MODEL[name]}", "s", Transcript([HI]), settings=ModelSettings(extra=ROUTING, max_tokens=9)
    )
    with pytest.raises(ModelError):
        await provider.complete(request)
    with pytest.raises(ModelError):
        await provider.complete(attrs.evolve(request, settings=attrs.evolve(request.settings, unsupported="error")))
    await provider.close()

    is_theirs = name == "openrouter"
    assert (seen[0].get("provider"), seen[0].get("transforms")) == ((codebuff, []) if is_theirs else (None, None))
    assert seen[0]["kept"] == 1
    assert len(seen) == (2 if is_theirs else 1)
    warned = sorted(record.setting for record in caplog.records if record.name == "stepengine.models")
    assert warned == ([] if is_theirs else ["extra['provider']", "extra['transforms']"])


@pytest.mark.spec("requirements:A15")
@pytest.mark.anyio
async def test_the_result_warns_of_settings_that_were_not_sent():
    """
    Once for all requests of the run, whoever asked for them; also in a replay.
    """

    def handle_steps(ctx: StepContext) -> Steps[str]:
        yield STEP
        return (yield from Complete("Say it again."))

    said = {"content": [{"type": "text", "text": "Hi."}], "stop_reason": "end_turn", "usage": {}}
    answer = {"id": "m", "type": "message", "role": "assistant", "model": MODEL["anthropic"], **said}
    provider = AnthropicProvider("k", transport=httpx2.MockTransport(lambda _: httpx2.Response(200, json=answer)))
    agent = AgentDefinition(
        "a",
        model="anthropic/claude-sonnet-4-5",
        settings=ModelSettings(extra=ROUTING, seed=1),
        handle_steps=handle_steps,
    )
    journal = MemoryJournal()
    async with Engine([agent], models={"anthropic": provider}) as engine:
        result = await engine.run("a", "Hi.", journal=journal)
        again = await engine.replay(journal)

    told = [re.fullmatch(r"anthropic does not support (.+) of ModelSettings .*", text) for text in result.warnings]
    assert ["seed", "extra['provider']", "extra['transforms']"] == [found and found[1] for found in told]
    assert result.warnings == again.warnings


@pytest.mark.spec("requirements:A15")
@pytest.mark.anyio
async def test_a_server_at_another_address_is_sent_any_member(caplog):
    seen = []

    def answer(request: httpx2.Request) -> httpx2.Response:
        seen.append(json.loads(request.content))
        return httpx2.Response(500, json={})

    gateway = AnthropicProvider("k", base_url="https://gateway.example", transport=httpx2.MockTransport(answer))
    with pytest.raises(ModelError):
        await gateway.complete(
            ModelRequest("anthropic/m", "s", Transcript([HI]), settings=ModelSettings(extra=ROUTING))
        )
    await gateway.close()

    assert seen[0]["provider"] == {"only": ["anthropic"]}
    assert [record for record in caplog.records if record.name == "stepengine.models"] == []


@pytest.mark.spec("requirements:G23", "reliability:SC05")
@pytest.mark.parametrize(
    "header", ["Authorization", "x-api-key", "X-Goog-Api-Key", "api-key", "Helicone-Auth", "X-My-Token"]
)
@pytest.mark.anyio
async def test_key_in_extra_headers_is_refused(header):
    provider = provider_of("anthropic", transport=httpx2.MockTransport(lambda request: httpx2.Response(500)))
    settings = ModelSettings(extra={"headers": {header: "sk-secret"}})
    with pytest.raises(ModelError, match="settings are recorded") as caught:
        await provider.complete(ModelRequest("anthropic/m", settings=settings))
    await provider.close()
    assert "sk-secret" not in caught.value.message


# --- counting -------------------------------------------------------------------------------------------------------


@pytest.mark.spec("ecosystem:EC75")
@pytest.mark.anyio
@pytest.mark.parametrize(
    ("name", "path", "reply"),
    [
        ("anthropic", "/v1/messages/count_tokens", {"input_tokens": 42}),
        ("openai", "/v1/responses/input_tokens", {"input_tokens": 42}),
        ("google", "/v1/models/gemini-3-pro:countTokens", {"totalTokens": 42}),
    ],
)
async def test_provider_counts_request_tokens_where_supported(name, path, reply):
    seen = []

    def answer(request: httpx2.Request) -> httpx2.Response:
        seen.append(request)
        return httpx2.Response(200, json=reply)

    provider = provider_of(name, transport=httpx2.MockTransport(answer))
    history = Transcript([HI, AssistantMessage("hello"), UserMessage("and?")])
    settings = ModelSettings(max_tokens=9, temperature=0.1, thinking=Thinking("enabled"), extra={"seed": 1})
    request = ModelRequest(f"{name}/{MODEL[name]}", "Be good.", history, (TOOL,), settings=settings)
    assert await provider.count_tokens(request) == 42
    await provider.close()
    assert seen[0].url.path == path
    sent = json.dumps(json.loads(seen[0].content))
    for word in ("Be good.", "and?", "Looks."):
        assert word in sent
    for word in ("max_tokens", "stream", "cache_control"):
        assert word not in sent


@pytest.mark.spec("ecosystem:EC75", "ecosystem:EC98")
@pytest.mark.anyio
@pytest.mark.parametrize("model", ["anthropic/claude-fable-5-1", "openai/gpt-5", "google/gemini-3-pro"])
async def test_token_counts_are_requested_with_valid_members_and_betas(model):
    seen = []

    def answer(request: httpx2.Request) -> httpx2.Response:
        seen.append(request)
        return httpx2.Response(200, json={"input_tokens": 42, "totalTokens": 42})

    provider = provider_of(model.partition("/")[0], transport=httpx2.MockTransport(answer))
    given = ModelSettings(server_tools=(WebSearch(),), thinking=Thinking(effort="high"))
    await provider.count_tokens(ModelRequest(model, "", Transcript([HI]), tool_choice="required", settings=given))
    await provider.close()
    sent = json.loads(seen[0].content)
    assert not {"tool_choice", "toolConfig"} & sent.keys() or "tools" in sent
    assert ("block_binding" in sent.get("thinking", {})) == ("anthropic-beta" in seen[0].headers)
    assert "block_binding" in sent.get("thinking", {}) or not model.startswith("anthropic/")


@pytest.mark.spec("ecosystem:EC75")
@pytest.mark.anyio
async def test_a_server_that_cannot_count_says_so():
    provider = provider_of("ollama")
    assert await provider.count_tokens(ModelRequest("ollama/m")) is None


@pytest.mark.spec("providers:PV110")
@pytest.mark.parametrize(
    ("names", "said"),
    [
        ("default", "default"),
        (
            ["anthropic/claude-opus-4-8", "claude-sonnet-5"],
            [{"model": "claude-opus-4-8"}, {"model": "claude-sonnet-5"}],
        ),
    ],
)
def test_anthropic_fallback_models_are_sent_with_their_beta(names, said) -> None:
    request = ModelRequest(
        "anthropic/claude-fable-5",
        messages=Transcript([UserMessage("hi")]),
        settings=ModelSettings(fallbacks=names, extra={"headers": {"anthropic-beta": "own-beta"}}),
    )
    asked = AnthropicProvider("k")._encode(request, stream=False)

    assert said == json.loads(asked.content)["fallbacks"]
    assert "server-side-fallback-2026-07-01" in asked.headers["anthropic-beta"].split(",")
    assert from_json(to_json(request.settings)) == request.settings


@pytest.mark.spec("providers:PV110")
def test_cloud_reports_unsupported_fallback_models() -> None:
    settings = ModelSettings(fallbacks="default")
    request = ModelRequest("foundry/claude-fable-5", messages=Transcript([UserMessage("hi")]), settings=settings)
    provider = FoundryProvider("k", resource="r")
    asked = provider._encode(request, stream=False)

    assert "fallbacks" not in json.loads(asked.content)
    assert "anthropic-beta" not in asked.headers
    assert ("fallbacks",) == provider._list_unsupported_settings(request)


@pytest.mark.spec("ecosystem:EC93")
def test_anthropic_caches_tools_system_prompt_and_messages():
    for cache, mark in ((True, {"type": "ephemeral"}), ("1h", {"type": "ephemeral", "ttl": "1h"}), (False, None)):
        provider = AnthropicProvider("k", prompt_cache=cache)
        request = ModelRequest("anthropic/m", "Be good.", Transcript([HI]), (TOOL, TOOL))
        got = json.loads(provider._encode(request, stream=False).content)
        marks = [got.get("cache_control"), got["tools"][1].get("cache_control")]
        marks.append(got["system"][0]["cache_control"] if isinstance(got["system"], list) else None)
        assert marks == [mark] * 3
        assert "cache_control" not in got["tools"][0]


@pytest.mark.spec("ecosystem:EC54")
def test_beta_headers_of_caller_and_adapter_are_combined():
    layers = ({"X-A": "1"}, {"anthropic-beta": "ours"}, {"Anthropic-Beta": "theirs", "x-a": "2"})
    assert merge_headers(*layers) == {"x-a": "2", "anthropic-beta": "ours,theirs"}


@pytest.mark.spec("requirements:G1", "ecosystem:EC97")
def test_reply_is_cut_at_the_first_stop_sequence():
    call = ToolCallPart("", "f")
    reply = ModelReply([ThinkingPart("END"), TextPart("one END two STOP"), TextPart("three"), call])
    cut = cut_at_stop_sequence(reply, ("STOP", "END"))
    assert cut.content == (ThinkingPart("END"), TextPart("one "))
    assert (cut.stop_reason, cut.provider_data["stop_sequence"]) == (StopReason.STOP_SEQUENCE, "END")
    assert cut_at_stop_sequence(reply, ("nowhere", "")) is reply
