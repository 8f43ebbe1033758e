"""Whatever the transcript is, what goes out is a legal conversation, and each message is encoded once."""

from __future__ import annotations

import json
import re
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepengine.data.messages import CitationPart, ToolMessage
from stepengine.data.models import ModelRequest
from stepengine.data.transcript import Transcript
from stepengine.models import AnthropicProvider, GoogleProvider, OpenAIChatProvider, OpenAIProvider
from tests.models.histories import histories, settings, users
from tests.models.wires import EACH, MANUAL, MODEL, TOOL, provider_of


def fresh(message: Any) -> Any:
    """The same message without what it remembers."""
    return attrs.evolve(message)


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("requirements:G10", "providers:PV35", "providers:PV37", "reliability:MP49", "reliability:MP60")
@pytest.mark.spec("ecosystem:EC57", "ecosystem:EC82", "ecosystem:EC86", "ecosystem:EC91")
@given(histories, settings, st.lists(users, max_size=1))
def test_any_transcript_is_a_legal_conversation_on_each_wire(messages, how, tail):
    check_anthropic(messages, how, tail)
    check_chat(messages, tail)
    check_responses(messages, tail)
    for model in ("gemini-3-pro", "gemini-2.5-flash"):
        check_gemini(model, messages, tail)


def check_anthropic(messages, how, tail):
    request = ModelRequest("anthropic/claude-sonnet-4-5", messages=Transcript(messages), settings=how, tail=tail)
    said = json.loads(AnthropicProvider("k")._encode(request, stream=True).content)["messages"]
    roles = [message["role"] for message in said]
    assert roles == ["user", "assistant"] * (len(roles) // 2) + ["user"]
    open_calls: list[str] = []
    seen: set[str] = set()
    for message in said:
        blocks = message["content"]
        assert blocks
        assert all(block.get("text", "x").strip() for block in blocks if block["type"] == "text")
        results = [block["tool_use_id"] for block in blocks if block["type"] == "tool_result"]
        assert results == open_calls
        assert all(block["type"] == "tool_result" for block in blocks[: len(results)])
        calls = [block for block in blocks if block["type"] == "tool_use"]
        open_calls = [block["id"] for block in calls]
        assert not seen.intersection(open_calls)
        assert len(set(open_calls)) == len(open_calls)
        seen.update(open_calls)
        for block in calls:
            assert re.fullmatch(r"[A-Za-z0-9_-]{1,64}", block["id"])
            assert re.fullmatch(r"[A-Za-z0-9_-]{1,64}", block["name"])
            assert isinstance(block["input"], dict)
        if calls and how is MANUAL:
            assert blocks[0]["type"] == "thinking"
        assert message["role"] == "assistant" or not calls
        assert message["role"] == "user" or not [b for b in blocks if b["type"] in ("image", "document", "tool_result")]


def check_chat(messages, tail):
    request = ModelRequest("openai_chat/gpt-4o", "system", Transcript(messages), tail=tail)
    said = json.loads(OpenAIChatProvider("openai_chat", "k")._encode(request, stream=True).content)["messages"]
    assert said[0] == {"role": "system", "content": "system"}
    assert said[-1]["role"] in ("user", "tool")
    open_calls: list[str] = []
    seen: set[str] = set()
    previous = "system"
    for message in said[1:]:
        role = message["role"]
        assert role != "system"
        if role == "tool":
            assert message["tool_call_id"] == open_calls.pop(0)
            assert isinstance(message["content"], str)
        else:
            assert not open_calls
            assert role != previous
            assert message.get("content") or message.get("tool_calls") or message.get("refusal") or role == "user"
            open_calls = [call["id"] for call in message.get("tool_calls", ())]
            assert not seen.intersection(open_calls)
            assert len(set(open_calls)) == len(open_calls)
            seen.update(open_calls)
            for made in message.get("tool_calls", ()):
                assert isinstance(json.loads(made["function"]["arguments"]), dict)
                assert re.fullmatch(r"[A-Za-z0-9_-]{1,64}", made["function"]["name"])
        previous = role


def check_responses(messages, tail):
    request = ModelRequest("openai/gpt-5", "system", Transcript(messages), tail=tail)
    said = json.loads(OpenAIProvider("k")._encode(request, stream=True).content)["input"]
    assert said
    calls = [item["call_id"] for item in said if item.get("type") == "function_call"]
    outputs = [item["call_id"] for item in said if item.get("type") == "function_call_output"]
    assert calls == outputs
    assert len(set(calls)) == len(calls)
    previous = ""
    for item in said:
        kind = item.get("type") or item["role"]
        if kind == "function_call":
            assert isinstance(json.loads(item["arguments"]), dict)
            assert re.fullmatch(r"[A-Za-z0-9_-]{1,64}", item["call_id"])
        if previous == "function_call_output":
            assert kind != "reasoning" or item["encrypted_content"]
        previous = kind
    assert said[-1].get("role") == "user" or said[-1]["type"] == "function_call_output"


def check_gemini(model, messages, tail):
    request = ModelRequest(f"google/{model}", "system", Transcript(messages), tail=tail)
    said = json.loads(GoogleProvider("k")._encode(request, stream=True).content)["contents"]
    assert [content["role"] for content in said] == ["user", "model"] * (len(said) // 2) + ["user"]
    calls: list[Any] = []
    for content in said:
        parts = content["parts"]
        assert parts
        answers = [part["functionResponse"] for part in parts if "functionResponse" in part]
        assert [(a["name"], a.get("id")) for a in answers] == [(c["name"], c.get("id")) for c in calls]
        assert all("functionResponse" in part for part in parts[: len(answers)])
        asked = [part for part in parts if "functionCall" in part]
        calls = [part["functionCall"] for part in asked]
        assert not asked or content["role"] == "model"
        # Gemini 3 refuses the first call of a message without a signature.
        assert not asked or model != "gemini-3-pro" or asked[0]["thoughtSignature"]
        ids = [call["id"] for call in calls if "id" in call]
        assert len(set(ids)) == len(ids)


def here(part: Any) -> Any:
    """A part with its bytes, where it has an address that only other services read."""
    return (
        attrs.evolve(part, url=None, data=b"x")
        if getattr(part, "url", None) and not isinstance(part, CitationPart)
        else part
    )


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("requirements:G10")
@given(histories, settings)
def test_memoised_encoding_equals_encoding_from_scratch(messages, how):
    for name in EACH:
        check_memoised_encoding(name, messages, how)


def check_memoised_encoding(name, messages, how):
    if name == "bedrock_converse":
        messages = [attrs.evolve(message, content=tuple(map(here, message.content))) for message in messages]
    transcript = Transcript()
    provider = provider_of(name)

    def encoded(history: Transcript) -> bytes:
        return provider._encode(
            ModelRequest(f"{name}/{MODEL[name]}", "s", history, (TOOL,), settings=how), stream=True
        ).content

    group: list[Any] = []
    for message in [*messages, None]:
        if group and not isinstance(message, ToolMessage):
            transcript = transcript.extend(group)
            group = []
            assert encoded(transcript) == encoded(Transcript([fresh(m) for m in transcript]))
        group.append(message)
