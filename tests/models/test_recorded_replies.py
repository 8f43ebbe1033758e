"""Every recorded reply of the wires that have an adapter, through our codecs (recorded traffic, use R6)."""

from __future__ import annotations

import base64
import json
from collections import Counter
from typing import Any

import pytest

from stepengine.data.json import thaw
from stepengine.data.messages import CitationPart, DocumentPart, ImagePart, OpaquePart
from stepengine.data.models import (
    ModelReply,
    StopReason,
)
from stepengine.errors import ModelError
from stepengine.models._failures import error_from_body
from tests.models.recorded import Recording, needs_recordings, of, recordings

pytestmark = needs_recordings

EXPECTED = {
    ("anthropic", "plain"): 92,
    ("anthropic", "stream"): 8,
    ("anthropic", "error"): 1,
    ("openai-responses", "plain"): 83,
    ("openai-responses", "stream"): 20,
    ("openai-responses", "error"): 3,
    ("google-gla", "plain"): 66,
    ("google-gla", "stream"): 8,
    ("openai-chat", "plain"): 56,
    ("openai-chat", "stream"): 29,
    ("openai-chat", "error"): 4,
    ("openrouter", "plain"): 18,
    ("openrouter", "stream"): 6,
    ("openrouter", "error"): 3,
    ("bedrock", "plain"): 1,
}


EACH_WIRE = pytest.mark.parametrize("wire", sorted({wire for wire, _ in EXPECTED}))


@pytest.mark.deep
@pytest.mark.smoke
def test_recorded_traffic_is_complete():
    kinds = Counter((r.wire, "error" if r.status >= 400 else "stream" if r.stream else "plain") for r in recordings())
    plain = {key: count for key, count in kinds.items() if key[1] != "error"}
    assert kinds == EXPECTED, plain


COUNTED_WRONG = {"google-gla/test_google__test_google_instructions_only_with_tool_calls.yaml#0": 3}
"""Replies that hold three equal calls where the index of the recordings counts one."""


def check_reply(recording: Recording, reply: ModelReply) -> None:
    assert len(reply.tool_calls) == COUNTED_WRONG.get(recording.name, recording.tool_calls)
    assert all(call.input_error is None and call.tool_call_id == "" for call in reply.tool_calls)
    usage = reply.usage
    raw = thaw(reply.provider_data["usage"])
    if recording.wire == "openai-responses" and raw is None:
        assert reply.stop_reason is StopReason.ERROR  # queued in the background, which nobody here polls
        return
    assert usage is not None
    figures = (
        usage.input_tokens,
        usage.output_tokens,
        usage.cache_read_tokens,
        usage.cache_write_tokens,
        usage.reasoning_tokens,
    )
    assert min(figures) >= 0
    assert (usage.prompt_tokens, usage.completion_tokens) == totals(recording.wire, raw)


def beside(raw: dict[str, Any]) -> list[dict[str, Any]]:
    """What Anthropic ran beside the message, which its totals leave out."""
    return [entry for entry in raw.get("iterations") or () if entry["type"] != "message"]


def totals(wire: str, raw: dict[str, Any]) -> tuple[int, int]:
    """The provider's own totals of prompt and completion."""
    if wire == "anthropic":
        prompt = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
        entries = [raw, *beside(raw)]
        return sum(e.get(name) or 0 for e in entries for name in prompt), sum(e["output_tokens"] for e in entries)
    if wire == "openai-responses":
        return raw["input_tokens"], raw["output_tokens"]
    if wire == "google-gla":
        completion = (raw.get("candidatesTokenCount") or 0) + (raw.get("thoughtsTokenCount") or 0)
        assert (
            raw["totalTokenCount"] == raw["promptTokenCount"] + (raw.get("toolUsePromptTokenCount") or 0) + completion
        )
        return raw["totalTokenCount"] - completion, completion
    if wire == "bedrock":
        return raw["totalTokens"] - raw["outputTokens"], raw["outputTokens"]
    return raw["prompt_tokens"], raw["completion_tokens"]


KNOWN = {
    "anthropic": {"text", "thinking", "redacted_thinking", "tool_use"},
    "openai-responses": {"message", "reasoning", "function_call"},
}


def as_it_came(part: OpaquePart | ImagePart | DocumentPart) -> Any:
    """A part that is carried, or a made image or file, as the provider wrote it."""
    if isinstance(part, OpaquePart):
        return thaw(part.data)
    data, kept = base64.b64encode(part.data).decode(), thaw(part.provider_data)
    if "item" in kept:
        return {**kept["item"], "result": data}
    signed = {"thoughtSignature": kept["signature"]} if "signature" in kept else {}
    return {"inlineData": {"mimeType": part.mime_type, "data": data}, **signed}


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("requirements:G1", "ecosystem:EC76", "providers:PV52")
@EACH_WIRE
def test_a_reply_in_one_piece_decodes(wire: str, subtests: pytest.Subtests):
    for recording in of(wire, stream=False):
        with subtests.test(recording.name):
            reply = recording.decoded()
            check_reply(recording, reply)
            opaque = [as_it_came(p) for p in reply.content if isinstance(p, OpaquePart | ImagePart | DocumentPart)]
            data = json.loads(recording.reply)
            if recording.wire in KNOWN:
                blocks = data["content" if recording.wire == "anthropic" else "output"]
                assert opaque == [block for block in blocks if block["type"] not in KNOWN[recording.wire]]
            elif recording.wire == "google-gla":
                assert opaque == [
                    p
                    for p in data["candidates"][0]["content"].get("parts", ())
                    if not {"text", "functionCall"} & set(p)
                ]


TOLD = {"server_tool_use", "web_search_call", "code_interpreter_call", "file_search_call", "executableCode", "toolCall"}
"""Parts that say what a tool of the provider was asked."""


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("providers:PV56", "providers:PV60", "providers:PV62")
@EACH_WIRE
def test_provider_tool_use_and_sources_are_shown(wire: str, subtests: pytest.Subtests):
    for recording in of(wire):
        with subtests.test(recording.name):
            reply = recording.streamed(10**9)[1] if recording.stream else recording.decoded()
            for part in reply.content:
                if isinstance(part, OpaquePart) and TOLD & {str(part.data.get("type")), *part.data}:
                    assert part.tool
                    asked = part.data.get("toolCall", part.data)
                    assert part.text or not (asked.get("args") or asked.get("input") or asked.get("action"))
            raw = [
                note
                for part in reply.content
                for member in ("citations", "annotations")
                for note in (getattr(part, "provider_data", None) or {}).get(member) or ()
            ]
            grounded = (reply.provider_data.get("groundingMetadata") or {}).get("groundingSupports") or ()
            raw += [index for support in grounded for index in support.get("groundingChunkIndices") or ()]
            shown = [part for part in reply.content if isinstance(part, CitationPart)]
            assert len(shown) >= len(raw)
            if raw and not grounded:
                assert len(shown) == len(raw)
            assert all(part.url or part.source or part.title or part.quote for part in shown)
            assert all(part.said in reply.text for part in shown)


@pytest.mark.spec("reliability:MP01", "reliability:MP05")
@EACH_WIRE
def test_recorded_error_answer_becomes_the_matching_error(wire: str, subtests: pytest.Subtests):
    for recording in of(wire, ok=False):
        with subtests.test(recording.name):
            failure = error_from_body(recording.reply, recording.status, {}, recording.call)
            assert isinstance(failure, ModelError)
            assert failure.status == recording.status
            assert failure.retryable == (recording.status == 429)
            error = json.loads(recording.reply)["error"]
            assert error["message"] in failure.message
            if isinstance(error.get("metadata"), dict) and error["metadata"].get("raw"):
                assert error["metadata"]["raw"][:100] in failure.message
