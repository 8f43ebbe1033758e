"""
Closed loops of recorded traffic: what we decode from one exchange re-encodes to the next request (recorded use R7).

The requests are read into our types here; nothing in the package reads a wire's requests.
"""

from __future__ import annotations

import base64
import json
from itertools import pairwise
from typing import Any

import attrs
import pytest

from stepengine.data.messages import AssistantMessage, Message, ToolMessage, UserMessage
from stepengine.data.models import ModelReply, ModelRequest, ModelSettings, Thinking
from stepengine.data.parts import DocumentPart, ImagePart, TextPart, ToolCallPart
from stepengine.data.transcript import Transcript
from stepengine.models._wire import NUDGE
from stepengine.models.anthropic.decode import decode as decode_anthropic
from stepengine.models.anthropic.encode import Flags as AnthropicFlags
from stepengine.models.anthropic.encode import encode_messages as encode_anthropic
from stepengine.models.anthropic.encode import thinking_of
from stepengine.models.openai_chat.decode import decode as decode_chat
from stepengine.models.openai_chat.encode import Flags as ChatFlags
from stepengine.models.openai_chat.encode import encode_messages as encode_chat
from stepengine.models.openai_chat.presets import preset_of
from tests.models.recorded import FOLDER, NAMES, Recording, needs_recordings, recordings, take

pytestmark = needs_recordings

WIRES = ("anthropic", "openai-chat")
NO_PART_FOR = {"container_upload", "input_audio", "tool_addition", "tool_reference", "uploaded file"}
"""What user messages and results of the recordings hold and ours cannot; such loops cannot be built from our types."""


def loops() -> list[Any]:
    if not FOLDER.is_dir():
        return []
    by_name = {r.name: r for r in recordings()}
    index = {e["file"]: e for e in map(json.loads, (FOLDER / "index.jsonl").read_text(encoding="utf-8").splitlines())}
    pairs = []
    for line in (FOLDER / "closed_loops.jsonl").read_text(encoding="utf-8").splitlines():
        loop = json.loads(line)
        if loop["wire"] not in WIRES:
            continue
        for a, b in pairwise(loop["steps"]):
            first, second = [by_name.get(f"{loop['file']}#{n}") or compatible(index[loop["file"]], n) for n in (a, b)]
            pairs.append(pytest.param(first, second, id=f"{loop['file']}#{a}-{b}"))
    return pairs


def compatible(entry: dict[str, Any], number: int) -> Recording:
    """Another provider's endpoint that speaks Chat Completions (recorded R8c)."""
    return take(entry, number, {**entry["interactions"][number], "provider": "openai-chat"})


# --- requests in our types ------------------------------------------------------------------------------------------


@attrs.define
class Reader:
    """Builds messages and numbers calls."""

    recording: Recording
    messages: list[Message] = attrs.field(factory=list)
    ids: dict[str, str] = attrs.field(factory=dict)
    waiting: list[str] = attrs.field(factory=list)
    results: dict[str, ToolMessage] = attrs.field(factory=dict)

    def assistant(self, reply: ModelReply) -> None:
        parts = []
        for given in reply.content:
            part = given
            if isinstance(given, ToolCallPart):
                ours = f"c{len(self.ids)}"
                theirs = (given.provider_data or {}).get("id") or f"none{len(self.ids)}"
                self.ids[theirs] = ours
                self.waiting.append(theirs)
                part = attrs.evolve(given, tool_call_id=ours)
            parts.append(part)
        self.messages.append(AssistantMessage(tuple(parts)))

    def result(self, theirs: str, content: list[Any], error: bool = False) -> None:
        if theirs not in self.ids:  # the reply had none, the recording client made one
            theirs = next(name for name in self.waiting if name not in self.results)
        self.results[theirs] = ToolMessage(self.ids[theirs], "tool", tuple(content), "error" if error else "ok")
        if set(self.results) == set(self.waiting):
            self.messages += [self.results[theirs] for theirs in self.waiting]
            self.waiting, self.results = [], {}

    def user(self, parts: list[Any]) -> None:
        if parts:
            self.messages.append(UserMessage(tuple(parts)))


def read_anthropic(reader: Reader, messages: list[dict[str, Any]]) -> None:
    for message in messages:
        blocks = (
            [{"type": "text", "text": message["content"]}]
            if isinstance(message["content"], str)
            else message["content"]
        )
        if message["role"] == "assistant":
            fake = {"content": blocks, "usage": {}, "stop_reason": None}
            reader.assistant(decode_anthropic(fake, reader.recording.call, reader.recording.model, None))
            continue
        parts: list[Any] = []
        for block in blocks:
            if block["type"] == "tool_result":
                content = block.get("content") or []
                content = [{"type": "text", "text": content}] if isinstance(content, str) else content
                reader.result(
                    block["tool_use_id"], [anthropic_part(b) for b in content], block.get("is_error") or False
                )
            else:
                parts.append(anthropic_part(block))
        reader.user(parts)


def anthropic_part(block: dict[str, Any]) -> Any:
    if block["type"] == "text":
        return TextPart(block["text"])
    source = block["source"]
    url = source.get("url")
    if block["type"] == "image":
        data = base64.b64decode(source["data"]) if url is None else None
        return ImagePart(url, data, source.get("media_type", "image/png"))
    data = None if url else source["data"].encode() if source["type"] == "text" else base64.b64decode(source["data"])
    return DocumentPart(url, data, source.get("media_type", "application/pdf"), block.get("title") or "")


def read_chat(reader: Reader, messages: list[dict[str, Any]]) -> None:
    for message in messages:
        content = message.get("content")
        if message["role"] == "assistant":
            fake = {"choices": [{"message": message}]}
            reader.assistant(decode_chat(fake, reader.recording.call, reader.recording.model, None))
        elif message["role"] == "tool":
            texts = [content] if isinstance(content, str) else [piece["text"] for piece in content]
            reader.result(message["tool_call_id"], [TextPart(text) for text in texts])
        else:
            reader.user([TextPart(content)] if isinstance(content, str) else [chat_part(piece) for piece in content])


def chat_part(piece: dict[str, Any]) -> Any:
    if piece["type"] == "text":
        return TextPart(piece["text"])
    if piece["type"] == "image_url":
        return ImagePart(piece["image_url"]["url"])
    head, _, data = piece["file"]["file_data"].partition(";base64,")
    return DocumentPart(None, base64.b64decode(data), head.removeprefix("data:"), piece["file"]["filename"])


# --- comparing ------------------------------------------------------------------------------------------------------


def clean(value: Any) -> Any:
    """Leave out what differs in the recordings and is no difference."""
    if isinstance(value, list):
        return [clean(item) for item in value]
    if not isinstance(value, dict):
        return value
    dropped = {"cache_control", "caller", "refusal", "annotations", "detail"}
    return {k: clean(v) for k, v in value.items() if k not in dropped and v not in (None, [], False)}


def blocks_of(content: Any) -> list[Any]:
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else list(content or [])
    blocks = [clean(block) for block in blocks]
    for block in blocks:
        if block.get("type") == "tool_result":
            block["content"] = blocks_of(block.get("content"))
    return blocks


def normal(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One form for both sides: contents as lists, arguments as JSON, neighbouring user messages merged."""
    found: list[dict[str, Any]] = []
    for message in messages:
        item = {**clean(message), "content": blocks_of(message.get("content"))}
        for call in item.get("tool_calls", ()):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
        if found and item["role"] == "user" == found[-1]["role"]:
            found[-1]["content"] += item["content"]
        else:
            found.append(item)
    return found


def without_ids(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    for message in messages:
        message.pop("tool_call_id", None)
        for call in message.get("tool_calls", ()):
            call.pop("id")
    return messages


def types_in(value: Any) -> set[str]:
    if isinstance(value, list):
        return set().union(*[types_in(item) for item in value])
    if isinstance(value, dict):
        kind = "uploaded file" if "file_id" in value else str(value.get("type"))
        return {kind}.union(*[types_in(item) for item in value.values()])
    return set()


@pytest.mark.spec("requirements:G10", "reliability:MP60", "ecosystem:EC99")
@pytest.mark.parametrize(("first", "second"), loops())
def test_the_next_request_is_what_our_types_encode_to(first: Recording, second: Recording):
    reader = Reader(first)
    read = read_anthropic if first.wire == "anthropic" else read_chat
    alien = types_in(second.request["messages"]) & NO_PART_FOR
    if alien:
        pytest.skip(f"our messages cannot hold {alien}")
    system = [m["content"] for m in first.request["messages"] if m["role"] in ("system", "developer")]
    before = [m for m in first.request["messages"] if m["role"] not in ("system", "developer")]
    after = [m for m in second.request["messages"] if m["role"] not in ("system", "developer")]
    read(reader, before)
    reply = first.streamed(4096)[1] if first.stream else first.decoded()
    reader.assistant(reply)
    read(reader, after[len(before) + 1 :])
    if first.wire == "anthropic":
        thinking = (second.request.get("thinking") or {}).get("budget_tokens")
        settings = ModelSettings(thinking=Thinking("extended", thinking)) if thinking else ModelSettings()
        request = ModelRequest("anthropic/x", "", Transcript(reader.messages), settings=settings)
        manual = (thinking_of(request, first.model) or {}).get("type") == "enabled"
        encoded = encode_anthropic(request, AnthropicFlags("anthropic", first.model, manual))
    else:
        request = ModelRequest("openai/x", "", Transcript(reader.messages))
        encoded = encode_chat(request, ChatFlags(preset_of(NAMES[first.wire], None), first.model))
    assert len(system) == len([m for m in second.request["messages"] if m["role"] in ("system", "developer")])
    ours, theirs = normal(json.loads(encoded)), normal(after)
    if reply.tool_calls and all("id" not in call.provider_data for call in reply.tool_calls):
        ours, theirs = without_ids(ours), without_ids(theirs)
    assert ours == theirs
    assert NUDGE not in encoded.decode()


def test_only_loops_with_content_that_ours_cannot_hold_are_left_out():
    pairs = [(p.values[0], p.values[1]) for p in loops()]
    left_out = [b for _, b in pairs if types_in(b.request["messages"]) & NO_PART_FOR]
    assert (len(pairs), len(left_out)) == (61, 11)
