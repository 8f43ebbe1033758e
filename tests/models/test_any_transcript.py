"""Whatever the transcript is, what goes out is a legal conversation, and each message is encoded once."""

from __future__ import annotations

import json
import re
from importlib import import_module
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepengine.data.messages import AssistantMessage, ToolMessage, UserMessage
from stepengine.data.models import ModelRequest, ModelSettings, Thinking
from stepengine.data.parts import (
    DocumentPart,
    ImagePart,
    JsonPart,
    OpaquePart,
    RefusalPart,
    TextPart,
    ThinkingPart,
    ToolCallPart,
)
from stepengine.data.transcript import Transcript
from stepengine.models import AnthropicProvider, OpenAIChatProvider
from tests.models.wires import MANUAL, MODEL, TOOL, provider_of

words = st.text(st.characters(exclude_categories=("Cs",)), max_size=6)
makers = st.sampled_from(["anthropic", "openai", "somebody"])
owners = (
    makers.map(lambda name: {"provider": name, "model": MODEL.get(name, "m"), "id": "same", "signature": "s"})
    | st.none()
)
texts = st.builds(TextPart, words, provider_data=owners)
images = st.builds(ImagePart, st.just("https://x/i.png"))
documents = st.builds(DocumentPart, data=st.binary(max_size=4), mime_type=st.just("text/plain"), name=words)
opaques = st.builds(OpaquePart, makers, words.map(lambda word: {"type": "strange", "text": word}))
talk = texts | st.builds(ThinkingPart, words, provider_data=owners) | st.builds(RefusalPart, words) | opaques
inputs = st.dictionaries(words, words | st.integers(-(2**60), 2**60), max_size=2)
contents = st.lists(texts | images | documents | st.builds(JsonPart, inputs), max_size=3)
users = st.builds(UserMessage, st.lists(texts | images | documents, max_size=3))


@st.composite
def steps(draw: st.DrawFn) -> list[Any]:
    parts: list[Any] = draw(st.lists(talk | st.just("call"), max_size=4))
    messages: list[Any] = []
    for index, part in enumerate(parts):
        if part == "call":
            call_id = f"c{draw(st.integers(0, 10**9))}_{draw(st.uuids())}"
            error = draw(st.none() | words)
            parts[index] = ToolCallPart(
                call_id, draw(words), draw(inputs), raw_input=error, input_error=error, provider_data=draw(owners)
            )
            status = draw(st.sampled_from(["ok", "error", "pending"]))
            messages.append(ToolMessage(call_id, "t", tuple(draw(contents)), status))
    return [AssistantMessage(tuple(parts)), *messages]


histories = st.lists(users.map(lambda message: [message]) | steps(), max_size=6).map(
    lambda groups: [message for group in groups for message in group]
)
settings = st.sampled_from([ModelSettings(), MANUAL, ModelSettings(thinking=Thinking("enabled"))])


def fresh(message: Any) -> Any:
    """The same message without what it remembers."""
    return attrs.evolve(message)


@pytest.mark.spec("requirements:G10", "ecosystem:EC82", "ecosystem:EC87")
@given(histories, settings, st.lists(users, max_size=1))
def test_any_transcript_is_a_legal_anthropic_conversation(messages, how, tail):
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


@pytest.mark.spec("requirements:G10", "ecosystem:EC82")
@given(histories, st.lists(users, max_size=1))
def test_any_transcript_is_a_legal_chat_conversation(messages, tail):
    request = ModelRequest("openai/gpt-4o", "system", Transcript(messages), tail=tail)
    said = json.loads(OpenAIChatProvider("openai", "k")._encode(request, stream=True).content)["messages"]
    assert said[0] == {"role": "system", "content": "system"}
    assert said[-1]["role"] in ("user", "tool")
    open_calls: list[str] = []
    seen: set[str] = set()
    previous = "system"
    for message in said[1:]:
        role = message["role"]
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


@pytest.mark.spec("requirements:G10")
@pytest.mark.parametrize("name", ["anthropic", "openai"])
@given(data=st.data())
def test_joined_memoised_bytes_are_those_of_encoding_from_scratch(name, data):
    messages, how = data.draw(histories), data.draw(settings)
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


@pytest.mark.parametrize("name", ["anthropic", "openai"])
def test_a_message_is_encoded_once_and_its_bytes_travel_with_it(name, monkeypatch):
    module = import_module(f"stepengine.models.{'anthropic' if name == 'anthropic' else 'openai_chat'}.encode")
    count = []
    original = module.encode_message
    monkeypatch.setattr(module, "encode_message", lambda *a, **k: count.append(1) or original(*a, **k))
    provider = provider_of(name)
    transcript = Transcript()
    for number in range(20):
        transcript = transcript.extend([UserMessage(f"u{number}"), AssistantMessage(f"a{number}")])
        provider._encode(ModelRequest(f"{name}/{MODEL[name]}", messages=transcript), stream=True)
    provider._encode(ModelRequest(f"{name}/{MODEL[name]}", messages=Transcript(list(transcript)[4:])), stream=True)
    assert len(count) == 40
