"""Bedrock's Converse: bodies that AWS's own program takes, and replies in one piece and streamed, as that program reads them."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from decimal import Decimal
from functools import cache
from typing import Any

import attrs
import httpx2
import pytest
from hypothesis import given
from hypothesis import settings as limits
from hypothesis import strategies as st

from stepengine.data.codec import to_json
from stepengine.data.messages import (
    AssistantMessage,
    CitationPart,
    DocumentPart,
    ImagePart,
    JsonPart,
    OpaquePart,
    TextPart,
    ThinkingPart,
    ToolCallPart,
    UserMessage,
)
from stepengine.data.models import ModelReply, ModelRequest, ModelSettings, StopReason, Thinking
from stepengine.data.server_tools import CodeExecution, FileSearch, WebSearch
from stepengine.data.tools import ToolSpec
from stepengine.data.transcript import Transcript
from stepengine.data.usage import Usage
from stepengine.errors import ContextOverflow, ModelError, TruncatedReply
from stepengine.models import BedrockProvider
from stepengine.models._aws_events import AWSParser
from stepengine.models._byte_reader import ReplyReader
from stepengine.models.base import split_reply_into_deltas
from stepengine.models.bedrock_converse.decode import decode
from stepengine.models.bedrock_converse.encode import BETWEEN
from stepengine.models.bedrock_converse.families import get_family
from stepengine.models.bedrock_converse.stream import ConverseAccumulator
from stepengine.models.pricing import LIST_PRICES, get_model_info
from tests.faults.cloud_server import converse_frames
from tests.faults.cloud_server import message as framed
from tests.faults.scripts import CONVERSE_USAGE, converse_events, converse_reply
from tests.models.histories import histories, users
from tests.models.wires import MODEL, TOOL, call, made, provider_of, result

NAME = "bedrock_converse"
NOVA, NOVA_2, LLAMA = "us.amazon.nova-pro-v1:0", "us.amazon.nova-2-lite-v1:0", "us.meta.llama4-scout-17b-instruct-v1:0"
CLAUDE, WRITER, QWEN = "us.anthropic.claude-sonnet-4-5-20250929-v1:0", "writer.palmyra-x5-v1:0", "qwen.qwen3-32b-v1:0"
PNG = b"\x89PNG\r\n\x1a\n"
AT = datetime(2026, 11, 1, tzinfo=UTC)


@cache
def converse() -> Any:
    """AWS's own description of the API."""
    import botocore.session

    return botocore.session.Session().get_service_model("bedrock-runtime").operation_model("Converse")


def provider(**options: Any) -> BedrockProvider:
    return BedrockProvider("a-key-0123456789", region="us-east-1", name=NAME, endpoint="converse", **options)


def body(model: str, *messages: Any, tools: tuple[ToolSpec, ...] = (TOOL,), **fields: Any) -> dict[str, Any]:
    options = {name: fields.pop(name) for name in ("prompt_cache",) if name in fields}
    settings = fields.pop("settings", ModelSettings())
    given = Transcript(messages or [UserMessage("Hello.")])
    request = ModelRequest(f"{NAME}/{model}", "", given, tools, settings=settings)
    request = attrs.evolve(request, **fields)
    return json.loads(provider(**options)._get_prefixed_provider(model)._encode(request, stream=False).content)


def said(model: str, *messages: Any, **fields: Any) -> list[dict[str, Any]]:
    return body(model, *messages, prompt_cache=False, **fields)["messages"]


def read(events: list[tuple[str, dict[str, Any]]], size: int = 100_000) -> ModelReply:
    return streamed(b"".join(converse_frames(*events)), size)


def streamed(content: bytes, size: int = 100_000) -> ModelReply:
    asked = made(NAME)
    reader = ReplyReader(ConverseAccumulator(asked, "m", None), asked, AWSParser(asked))
    for start in range(0, len(content), size):
        reader.feed(content[start : start + size])
    return reader.finish()


def whole(*blocks: dict[str, Any], stop: str = "end_turn", **told: Any) -> ModelReply:
    message = {"role": "assistant", "content": list(blocks)}
    return decode({"output": {"message": message}, "stopReason": stop, "usage": CONVERSE_USAGE, **told}, *ASKED)


ASKED = (made(NAME), "m", None)


# --- what goes out --------------------------------------------------------------------------------------------------------


def faults_of(sent: dict[str, Any], model: str) -> str:
    """What AWS's own program has against a body."""
    from botocore.validate import ParamValidator

    return ParamValidator().validate({"modelId": model, **in_bytes(sent)}, converse().input_shape).generate_report()


def in_bytes(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            name: base64.b64decode(inner)
            if name in {"bytes", "redactedContent"} and isinstance(inner, str)
            else in_bytes(inner)
            for name, inner in value.items()
        }
    return [in_bytes(inner) for inner in value] if isinstance(value, list) else value


SERVER_CALL = {"toolUse": {"toolUseId": "t1", "name": "nova_code_interpreter", "input": {}, "type": "server_tool_use"}}


def as_ours(part: Any) -> Any:
    """The part as if one of its makers were Bedrock, and with nothing that it cannot take: addresses of the web."""
    if isinstance(part, OpaquePart):
        return OpaquePart(NAME, SERVER_CALL) if part.provider == "anthropic" else part
    if isinstance(part, ImagePart) and part.url is not None:
        return ImagePart(data=PNG)
    data = getattr(part, "provider_data", None)
    if data is None or data.get("provider") != "anthropic":
        return part
    mark = {"provider": NAME, "model": NOVA, "signature": "c2ln"}  # all that Bedrock leaves on a thought
    return attrs.evolve(part, provider_data=mark if isinstance(part, ThinkingPart) else {**mark, "id": "same"})


def ours(messages: list[Any]) -> list[Any]:
    return [attrs.evolve(message, content=tuple(map(as_ours, message.content))) for message in messages]


def blocks_in(value: Any, kind: str) -> Iterator[Any]:
    if isinstance(value, dict):
        if kind in value:
            yield value[kind]
        for inner in value.values():
            yield from blocks_in(inner, kind)
    elif isinstance(value, list):
        for inner in value:
            yield from blocks_in(inner, kind)


def check_conversation(messages: list[dict[str, Any]], model: str) -> None:
    """What the service refuses with a 400 although AWS's program lets it out."""
    roles = [message["role"] for message in messages]
    assert roles == ["user", "assistant"] * (len(roles) // 2) + ["user"]
    beside, waiting = get_family(model).beside, list[str]()
    for message in messages:
        kinds = [next(iter(block)) for block in message["content"]]
        assert kinds
        answered = [block["toolResult"]["toolUseId"] for block in message["content"] if "toolResult" in block]
        assert answered == waiting
        assert ["toolResult"] * len(answered) == kinds[: len(answered)]
        assert not answered or beside is None or beside.issuperset(set(kinds) - {"toolResult", "cachePoint"})
        assert "document" not in kinds or "text" in kinds
        calls = [block["toolUse"] for block in message["content"] if "toolUse" in block]
        waiting = [call["toolUseId"] for call in calls if call.get("type") != "server_tool_use"]
        assert len(set(waiting)) == len(waiting)
    assert all(text.strip() for text in blocks_in(messages, "text"))
    names = [document["name"].lower() for document in blocks_in(messages, "document")]
    assert len(set(names)) == len(names)
    assert all(re.fullmatch(r"[a-z0-9()\[\]-]+(?: [a-z0-9()\[\]-]+)*", name) for name in names)


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("providers:PV133", "requirements:G10", "ecosystem:EC82")
@limits(max_examples=60)
@given(
    st.sampled_from([NOVA, LLAMA, WRITER, CLAUDE]), histories, st.lists(users, max_size=1), st.sampled_from([(), (TOOL,)]),
    st.sampled_from([None, 2_000]),
)  # fmt: skip
def test_any_transcript_is_a_valid_converse_conversation(model, messages, tail, tools, tokens):
    thinking = None if tokens is None else Thinking("extended", tokens)
    settings = ModelSettings(thinking=thinking, max_tokens=4_000)
    sent = body(model, *ours(messages), tools=tools, tail=tuple(ours(tail)), settings=settings)

    assert "" == faults_of(sent, model)
    check_conversation(sent["messages"], model)
    asked = sent.get("additionalModelRequestFields", {}).get("thinking", {})
    for one in sent["messages"] if asked.get("type") == "enabled" else ():
        assert "reasoningContent" in one["content"][0] or not list(blocks_in(one["content"], "toolUse"))
    if not tools:
        assert "toolConfig" not in sent
        assert [] == [*blocks_in(sent["messages"], "toolUse"), *blocks_in(sent["messages"], "toolResult")]


MEDIA = {
    "image/webp": ("image", "webp"),
    "application/pdf": ("document", "pdf"),
    "text/csv": ("document", "csv"),
    "text/markdown; charset=utf-8": ("document", "md"),
    "application/json": ("document", "txt"),
    "application/vnd.openxmlformats-officedocument.wordprocessingml.document": ("document", "docx"),
    "application/vnd.ms-excel": ("document", "xls"),
    "video/quicktime": ("video", "mov"),
    "video/3gpp": ("video", "three_gp"),
    "audio/x-wav": ("audio", "wav"),
    "audio/mpeg": ("audio", "mp3"),
}


@pytest.mark.spec("providers:PV133")
@pytest.mark.parametrize("mime", MEDIA)
def test_media_are_sent_as_bytes_or_s3_location(mime):
    kind, form = MEDIA[mime]
    for source in ({"data": b"abc"}, {"url": "s3://bucket/key"}):
        part = (ImagePart if kind == "image" else DocumentPart)(mime_type=mime, **source)
        sent = body(NOVA, UserMessage([TextPart("Look."), part]))
        (block,) = blocks_in(sent["messages"], kind)
        place = {"bytes": "YWJj"} if "data" in source else {"s3Location": {"uri": "s3://bucket/key"}}
        assert (form, place) == (block["format"], block["source"])
        assert "" == faults_of(sent, NOVA)


@pytest.mark.spec("providers:PV133")
@pytest.mark.parametrize(
    ("part", "words"),
    [
        (ImagePart("https://x/i.png"), "URLs in S3"),
        (ImagePart(file_id="f", provider=NAME), "URLs in S3"),
        (ImagePart(data=b"x", mime_type="image/tiff"), "it accepts PNG"),
        (DocumentPart(data=b"x", mime_type="application/rtf"), "it accepts PNG"),
        (DocumentPart(data=b"x", mime_type="application/zip"), "it accepts PNG"),
    ],
)
def test_unsupported_media_are_refused_before_sending(part, words):
    with pytest.raises(ModelError, match=words) as caught:
        body(NOVA, UserMessage([part]))

    assert "unsupported_part" == caught.value.kind


def images_of(model: str) -> list[dict[str, Any]]:
    history = [UserMessage("Look."), AssistantMessage([call(1)]), result(1, TextPart("seen"), ImagePart(data=PNG))]
    return said(model, *history)


@pytest.mark.spec("providers:PV133")
def test_result_image_is_placed_where_the_model_accepts_it():
    claude, zai, qwen, writer = map(images_of, (CLAUDE, "zai.glm-4.7-flash", QWEN, WRITER))

    assert ["text", "image"] == [next(iter(block)) for block in claude[2]["content"][0]["toolResult"]["content"]]
    assert ["toolResult", "text", "image"] == [next(iter(block)) for block in zai[2]["content"]]
    assert ["toolResult", "text", "image"] == [next(iter(block)) for block in qwen[2]["content"]]
    assert [{"text": BETWEEN}] == writer[3]["content"]
    assert ["text", "image"] == [next(iter(block)) for block in writer[4]["content"]]


@pytest.mark.spec("providers:PV133")
def test_failed_call_is_marked_by_status_or_by_text():
    history = [UserMessage("Look."), AssistantMessage([call(1)]), result(1, "gone", status="error")]
    (nova,) = blocks_in(said(NOVA, *history), "toolResult")
    (writer,) = blocks_in(said(WRITER, *history), "toolResult")
    (fine,) = blocks_in(said(NOVA, *history[:2], result(1, JsonPart({"a": 1}))), "toolResult")
    (empty,) = blocks_in(said(NOVA, *history[:2], result(1, "")), "toolResult")

    assert ("error", [{"text": "gone"}]) == (nova["status"], nova["content"])
    assert {"toolUseId": "call_c1", "content": [{"text": "Error: gone"}]} == writer
    assert ("success", [{"text": '{"a":1}'}]) == (fine["status"], fine["content"])
    assert [{"text": "(nothing)"}] == empty["content"]


@pytest.mark.spec("providers:PV134")
@pytest.mark.parametrize(
    ("model", "choice", "expected"),
    [
        (NOVA, "required", {"any": {}}),
        (NOVA, "look", {"tool": {"name": "look"}}),
        (NOVA, "auto", None),
        (LLAMA, "required", None),
        (LLAMA, "look", None),
    ],
)
def test_forced_call_is_sent_where_supported_and_else_reported_dropped(model, choice, expected):
    settings = ModelSettings(tool_choice=choice, parallel_tool_calls=False)
    sent = body(model, settings=settings)
    request = ModelRequest(f"{NAME}/{model}", messages=Transcript([UserMessage("x")]), tools=(TOOL,), settings=settings)
    dropped = provider()._get_prefixed_provider(model)._list_unsupported_settings(request)

    assert expected == sent["toolConfig"].get("toolChoice")
    assert ("tool_choice" in dropped) == (expected is None and choice != "auto")
    assert "parallel_tool_calls" in dropped


@pytest.mark.spec("providers:PV134")
def test_tool_choice_none_drops_tools_and_renders_calls_as_text():
    history = [UserMessage("Look."), AssistantMessage([TextPart("So."), call(1)]), result(1, "gone")]
    extra = {"toolConfig": {"tools": [{"systemTool": {"name": "of_tomorrow"}}]}}
    settings = ModelSettings(tool_choice="none", extra=extra)
    sent = body(NOVA, *history, settings=settings, prompt_cache=False)
    alone = body(NOVA, tools=(), settings=ModelSettings(extra={"toolConfig": {"toolChoice": {"auto": {}}}}))

    assert "toolConfig" not in sent
    assert "toolConfig" not in alone
    assert [{"text": "So."}] == sent["messages"][1]["content"]
    told = 'The tool look was called with {"at":"1"}. Its result:'
    assert [{"text": told}, {"text": "gone"}] == sent["messages"][2]["content"]


MARK = {"cachePoint": {"type": "default"}}
HOUR = {"cachePoint": {"type": "default", "ttl": "1h"}}


@pytest.mark.spec("providers:PV134")
@pytest.mark.parametrize(
    ("model", "cache", "tools", "rest"),
    [
        (CLAUDE, None, MARK, MARK),
        (CLAUDE, "1h", HOUR, HOUR),
        (NOVA, None, None, MARK),
        (NOVA, "1h", None, MARK),
        (NOVA, "off", None, None),
        (QWEN, "5m", None, None),
    ],
)
def test_cache_points_are_set_where_the_model_caches(model, cache, tools, rest):
    sent = body(model, settings=ModelSettings(cache=cache), system_prompt="Be brief.")
    found = [sent["toolConfig"]["tools"][-1], sent["system"][-1], sent["messages"][-1]["content"][-1]]

    assert [tools, rest, rest] == [block if "cachePoint" in block else None for block in found]
    assert "" == faults_of(sent, model)


@pytest.mark.spec("providers:PV134")
def test_no_mark_follows_a_document():
    """AWS refuses a mark behind a document or a video, though not behind an image."""
    pdf, png = DocumentPart(data=b"x"), ImagePart(data=PNG)
    last = [
        body(NOVA, UserMessage(parts))["messages"][-1]["content"][-1]
        for parts in ([TextPart("a"), pdf], [TextPart("a"), png], [pdf, TextPart("a")])
    ]

    assert ["document", "cachePoint", "cachePoint"] == [next(iter(block)) for block in last]


THOUGHTS = {
    (CLAUDE, "low"): {"thinking": {"type": "enabled", "budget_tokens": 2_048}},
    ("us.anthropic.claude-sonnet-4-6", "high"): {
        "thinking": {"type": "adaptive", "display": "summarized"},
        "output_config": {"effort": "high"},
    },
    ("us.anthropic.claude-sonnet-4-6", "none"): None,
}


@pytest.mark.spec("providers:PV134")
@pytest.mark.parametrize(("model", "effort"), THOUGHTS)
def test_thinking_is_asked_for_in_the_words_of_the_model(model, effort):
    settings = ModelSettings(thinking=Thinking("none") if effort == "none" else Thinking(effort=effort))

    assert THOUGHTS[model, effort] == body(model, settings=settings).get("additionalModelRequestFields")


@pytest.mark.spec("providers:PV134")
def test_nova_drops_and_reports_limits_at_highest_effort():
    settings = ModelSettings(thinking=Thinking(effort="high"), max_tokens=500, temperature=0.5, stop_sequences=("x",))
    request = ModelRequest(f"{NAME}/{NOVA_2}", messages=Transcript([UserMessage("x")]), settings=settings)
    wire = provider()._get_prefixed_provider(NOVA_2)
    low = attrs.evolve(settings, thinking=Thinking(effort="low"))

    assert {"stopSequences": ["x"]} == json.loads(wire._encode(request, stream=False).content)["inferenceConfig"]
    assert ("max_tokens", "temperature") == wire._list_unsupported_settings(request)
    assert 500 == body(NOVA_2, settings=low)["inferenceConfig"]["maxTokens"]


SCHEMA = {"type": "object", "properties": {"n": {"type": "integer", "minimum": 2}}, "required": ["n"]}


@pytest.mark.spec("providers:PV134")
def test_schema_is_sent_natively_or_as_a_tool():
    strict = (attrs.evolve(TOOL, strict=True),)
    promised = body(QWEN, tools=strict, settings=ModelSettings(response_schema=SCHEMA))
    asked = body(LLAMA, tools=strict, settings=ModelSettings(response_schema=SCHEMA))
    form = promised["outputConfig"]["textFormat"]["structure"]["jsonSchema"]

    assert {"n": {"type": "integer", "description": "{minimum: 2}"}} == json.loads(form["schema"])["properties"]
    assert "" == faults_of(promised, QWEN)
    assert [True] == [tool["toolSpec"].get("strict") for tool in promised["toolConfig"]["tools"]]
    assert "outputConfig" not in asked
    assert [None, None] == [tool["toolSpec"].get("strict") for tool in asked["toolConfig"]["tools"]]
    dropped = provider()._get_prefixed_provider(LLAMA)._list_unsupported_settings(ModelRequest(LLAMA, tools=strict))
    assert ("strict",) == dropped


@pytest.mark.spec("providers:PV134")
def test_tiers_server_tools_and_guardrails_pass_the_aws_validator():
    guard = {"guardrailIdentifier": "abc123", "guardrailVersion": "1"}
    extra = {"guardrailConfig": guard, "toolConfig": {"tools": [{"systemTool": {"name": "of_tomorrow"}}]}}
    settings = ModelSettings(service_tier="flex", server_tools=(CodeExecution(), WebSearch()), extra=extra, cache="off")
    sent = body(NOVA_2, settings=settings)
    fast = body(NOVA_2, settings=ModelSettings(service_tier="fast"))

    assert {"type": "flex"} == sent["serviceTier"]
    assert {"latency": "optimized"} == fast["performanceConfig"]
    assert guard == sent["guardrailConfig"]
    names = [next(iter(tool.values()))["name"] for tool in sent["toolConfig"]["tools"]]
    assert ["look", "nova_code_interpreter", "nova_grounding", "of_tomorrow"] == names
    assert "" == faults_of(sent, NOVA_2) == faults_of(fast, NOVA_2)
    with pytest.raises(ModelError, match=r"cannot use FileSearch"):
        body(NOVA_2, settings=ModelSettings(server_tools=(FileSearch(stores=("s",)),)))
    with pytest.raises(ModelError, match=r"cannot use CodeExecution"):
        body(NOVA, settings=ModelSettings(server_tools=(CodeExecution(),)))


# --- which model is asked how -----------------------------------------------------------------------------------------------


@pytest.mark.spec("providers:PV131")
@pytest.mark.parametrize(
    ("model", "wire"),
    [
        (NOVA, "converse"),
        (LLAMA, "converse"),
        ("us-gov.amazon.nova-lite-v1:0", "converse"),
        ("arn:aws:bedrock:us-east-1::foundation-model/amazon.nova-lite-v1:0", "converse"),
        ("arn:aws:bedrock:us-east-1:123456789012:custom-model/amazon.nova-lite-v1:0:300k/abcdefghijkl", "converse"),
        ("arn:aws:bedrock:us-east-1:123456789012:inference-profile/in.meta.llama3-3-70b-instruct-v1:0", "converse"),
        ("mistral.mistral-large-3-675b-instruct", "converse"),
        (CLAUDE, "claude"),
        ("claude-sonnet-4-5", "claude"),
        ("arn:aws:bedrock:us-east-1:123456789012:application-inference-profile/mi1dadi0g15f", "claude"),
        ("openai.gpt-5.4", "openai"),
        ("global.openai.gpt-6-sol", "openai"),
        ("in.openai.gpt-6-sol", "openai"),
    ],
)
def test_claude_and_openai_models_keep_their_own_wires(model, wire):
    standard = BedrockProvider("a-key-0123456789", region="us-east-1")

    assert standard._get_prefixed_provider(model) is standard._wires[wire]
    assert provider()._get_prefixed_provider(model).name == NAME


# --- what comes back --------------------------------------------------------------------------------------------------------

SAID = ("It is five.", [("look", '{"at":"x"}'), ("look", "{}")], "tool_use")


@pytest.mark.spec("providers:PV132", "reliability:MP20")
def test_stream_equals_the_whole_reply_at_any_chunk_size():
    expected = decode(json.loads(converse_reply(*SAID)), *ASKED)
    for size in (1, 7, 100_000):
        assert expected == read(converse_events(*SAID), size)

    assert "It is five." == expected.text
    assert [("look", {"at": "x"}), ("look", {})] == [(one.tool_name, dict(one.input)) for one in expected.tool_calls]
    assert ["tooluse_0", "tooluse_1"] == [one.provider_data["id"] for one in expected.tool_calls]
    assert Usage(25, 12, 5, 2) == expected.usage
    assert StopReason.TOOL_USE is expected.stop_reason


@pytest.mark.spec("providers:PV132", "reliability:MP20")
def test_stream_without_message_stop_is_truncated():
    frames = [
        framed(b"", event_type="initial-response", message_type="event"),
        *converse_frames(*converse_events(*SAID)),
    ]
    for end in range(len(frames) - 1):
        for half in (b"", frames[end][: len(frames[end]) // 2]):
            with pytest.raises(TruncatedReply):
                streamed(b"".join(frames[:end]) + half)
    reply = streamed(b"".join(frames[:-1]))

    assert ("It is five.", None) == (reply.text, reply.usage)


@pytest.mark.spec("reliability:MP22", "providers:PV132")
@pytest.mark.parametrize(
    ("kind", "status", "retryable"),
    [
        ("throttlingException", 429, True),
        ("validationException", 400, False),
    ],
)
def test_an_exception_in_a_stream_is_that_error(kind, status, retryable):
    told = b'{"message": "It was too much.", "originalStatusCode": 500}'
    frames = [
        *converse_frames(("messageStart", {"role": "assistant"})),
        framed(told, exception_type=kind, message_type="exception"),
    ]
    with pytest.raises(ModelError, match=r"It was too much\.") as caught:
        streamed(b"".join(frames))

    assert (status, retryable) == (caught.value.status, caught.value.retryable)


START, STOP = ("messageStart", {"role": "assistant"}), ("messageStop", {"stopReason": "end_turn"})
TEXT = ("contentBlockDelta", {"contentBlockIndex": 0, "delta": {"text": "a"}})
CALL = ("contentBlockStart", {"contentBlockIndex": 0, "start": {"toolUse": {"toolUseId": "t", "name": "look"}}})
END = ("contentBlockStop", {"contentBlockIndex": 0})


@pytest.mark.spec("providers:PV132")
@pytest.mark.parametrize(
    "events",
    [
        [TEXT, STOP],
        [START, START, STOP],
        [START, TEXT, STOP],
        [START, TEXT, END, TEXT, STOP],
        [START, TEXT, END, STOP, STOP],
        [START, TEXT, END, STOP, TEXT],
        [START, TEXT, CALL, END, STOP],
        [START, CALL, TEXT, END, STOP],
        [START, CALL, CALL, END, STOP],
        [START, ("messageStop", {})],
        [START, ("contentBlockDelta", {"contentBlockIndex": -1, "delta": {"text": "a"}}), STOP],
        [START, ("contentBlockDelta", {"contentBlockIndex": 0, "delta": {"text": 5}}), STOP],
    ],
)
def test_events_in_an_impossible_order_are_no_reply(events):
    with pytest.raises(ModelError) as caught:
        read(events)

    assert ("protocol", True) == (caught.value.kind, caught.value.retryable)


@pytest.mark.spec("providers:PV132")
def test_blocks_are_ordered_by_index_and_early_usage_is_kept():
    """Numbers may be left out, as others' are; what is between two blocks says nothing of them."""
    later = [
        ("contentBlockDelta", {"contentBlockIndex": 7, "delta": {"text": "b"}}),
        ("contentBlockStop", {"contentBlockIndex": 7}),
    ]
    early = ("metadata", {"usage": CONVERSE_USAGE})
    reply = read([START, *later, early, ("ofTomorrow", {"a": 1}), TEXT, END, STOP])

    assert ["a", "b"] == [part.text for part in reply.content]
    assert 12 == reply.usage.output_tokens


@pytest.mark.spec("providers:PV132")
@pytest.mark.parametrize(
    ("word", "stop"),
    [
        ("end_turn", StopReason.END_TURN),
        ("max_tokens", StopReason.MAX_TOKENS),
        ("stop_sequence", StopReason.STOP_SEQUENCE),
        ("guardrail_intervened", StopReason.REFUSAL),
        ("content_filtered", StopReason.REFUSAL),
        ("a_word_of_tomorrow", StopReason.END_TURN),
    ],
)
def test_stop_reasons_map_and_guardrail_details_are_kept(word, stop):
    trace = {"guardrail": {"actionReason": "Guardrail blocked."}}
    reply = whole({"text": "No."}, stop=word, trace=trace, metrics={"latencyMs": 5}, of_tomorrow={"a": 1})

    assert (stop, word) == (reply.stop_reason, reply.raw_stop_reason)
    kept = reply.provider_data
    assert (trace, {"latencyMs": 5}, {"a": 1}) == (kept["trace"], kept["metrics"], kept["of_tomorrow"])


@pytest.mark.spec("providers:PV132")
@pytest.mark.parametrize(
    ("word", "kind"),
    [
        ("malformed_tool_use", "malformed_call"),
        ("malformed_model_output", "given_up"),
        ("model_context_window_exceeded", "context_overflow"),
    ],
)
def test_broken_output_and_overflow_are_typed_errors_with_usage(word, kind):
    with pytest.raises(ModelError) as caught:
        whole({"text": "Half"}, stop=word)

    assert (kind, Usage(25, 12, 5, 2)) == (caught.value.kind, caught.value.usage)
    assert (kind == "context_overflow") == isinstance(caught.value, ContextOverflow)


CITED = {
    "content": [{"text": "Paris has two million."}],
    "citations": [
        {
            "title": "Paris",
            "sourceContent": [{"text": "2 million"}],
            "location": {"web": {"url": "https://x", "domain": "x"}},
        }
    ],
}
CODE = {
    "toolUse": {
        "toolUseId": "t1",
        "name": "nova_code_interpreter",
        "input": {"snippet": "1+1"},
        "type": "server_tool_use",
    }
}
RAN = {
    "toolResult": {
        "toolUseId": "t1",
        "type": "nova_code_interpreter_result",
        "status": "success",
        "content": [{"json": {"stdOut": "2\n", "stdErr": "", "exitCode": 0}}],
    }
}
BACK = {
    "text": {"text": "Hello."},
    "text of tomorrow": {"text": "Hello.", "mood": "fine"},
    "call": {"toolUse": {"toolUseId": "t9", "name": "look", "input": {"at": "x"}}},
    "call of tomorrow": {"toolUse": {"toolUseId": "t9", "name": "look", "input": {}, "caller": {"by": "code"}}},
    "call of a new type": {"toolUse": {"toolUseId": "t9", "name": "look", "input": {}, "type": "typed"}},
    "signed": {"reasoningContent": {"reasoningText": {"text": "Hm.", "signature": "c2ln", "of": "x"}}},
    "hidden": {"reasoningContent": {"redactedContent": "aGlk"}},
    "thought of tomorrow": {"reasoningContent": {"reasoningText": {"text": "Hm."}, "level": 2}},
    "cited": {"citationsContent": CITED},
    "server call": CODE,
    "server result": RAN,
    "image of tomorrow": {"image": {"format": "avif", "source": {"bytes": "aGlk"}}},
    "block of tomorrow": {"hologram": {"depth": 3}},
}


@pytest.mark.spec("providers:PV132", "generator-contract:T5")
@pytest.mark.parametrize("what", BACK)
def test_each_block_of_a_reply_goes_back_as_it_came(what):
    block = BACK[what]
    reply = decode(
        {"output": {"message": {"content": [block, {"text": "."}]}}, "stopReason": "end_turn"},
        made(NAME, NOVA_2),
        NOVA_2,
        None,
    )
    parts = [attrs.evolve(p, tool_call_id="c1") if isinstance(p, ToolCallPart) else p for p in reply.content]
    history = [UserMessage("Hi."), AssistantMessage(parts)]
    history += [result(1)] if any(isinstance(part, ToolCallPart) for part in parts) else [UserMessage("So?")]

    assert [block, {"text": "."}] == said(NOVA_2, *history)[1]["content"]
    foreign = said(NOVA, *history)[1]["content"]
    if what in {"signed", "hidden"}:
        assert [{"text": "."}] == foreign
    else:
        assert {"text": "."} in foreign


def test_unsigned_thoughts_are_shown_but_not_sent_back():
    reply = whole({"reasoningContent": {"reasoningText": {"text": "Hm."}}}, {"text": "Yes."})
    thought, answer = reply.content

    assert (ThinkingPart, "Hm.") == (type(thought), thought.text)
    assert [{"text": "Yes."}] == said("m", UserMessage("?"), AssistantMessage([thought, answer]), UserMessage("!"))[1][
        "content"
    ]


def test_sources_server_tools_and_images_are_decoded():
    image = base64.b64encode(PNG).decode()
    reply = whole({"citationsContent": CITED}, CODE, RAN, {"image": {"format": "png", "source": {"bytes": image}}})
    text, source, asked, ran, made_image = reply.content

    assert "Paris has two million." == text.text
    said_of = "Paris has two million."
    assert CitationPart("https://x", "Paris", quote="2 million", said=said_of) == source
    assert [("code_execution", "1+1"), ("code_execution", "2")] == [(part.tool, part.text) for part in (asked, ran)]
    assert (PNG, "image/png") == (made_image.data, made_image.mime_type)


BLOCK_STREAMS: dict[str, list[dict[str, Any]]] = {
    "signed": [
        {"delta": {"reasoningContent": {"text": "H"}}},
        {"delta": {"reasoningContent": {"text": "m."}}},
        {"delta": {"reasoningContent": {"signature": "c2ln"}}},
        {"delta": {"reasoningContent": {"of": "x"}}},
    ],
    "hidden": [{"delta": {"reasoningContent": {"redactedContent": "aGlk"}}}],
    "cited": [
        {"delta": {"text": "Paris has "}},
        {"delta": {"citation": CITED["citations"][0]}},
        {"delta": {"text": "two million."}},
    ],
    "server call": [
        {"start": {"toolUse": {name: CODE["toolUse"][name] for name in ("toolUseId", "name", "type")}}},
        {"delta": {"toolUse": {"input": '{"snippet":'}}},
        {"delta": {"toolUse": {"input": '"1+1"}'}}},
    ],
    "server result": [
        {"start": {"toolResult": {name: RAN["toolResult"][name] for name in ("toolUseId", "type", "status")}}},
        {"delta": {"toolResult": RAN["toolResult"]["content"]}},
    ],
    "image of tomorrow": [
        {"start": {"image": {"format": "avif"}}},
        {"delta": {"image": {"source": {"bytes": "aGk="}}}},
        {"delta": {"image": {"source": {"bytes": "ZA=="}}}},
    ],
    "block of tomorrow": [{"start": {"hologram": {}}}, {"delta": {"hologram": {"depth": 3}}}],
}


@pytest.mark.spec("providers:PV132", "generator-contract:T5")
@pytest.mark.parametrize("what", BLOCK_STREAMS)
def test_each_streamed_block_equals_the_whole_block(what):
    events = [
        (f"contentBlock{'Start' if 'start' in piece else 'Delta'}", {"contentBlockIndex": 0, **piece})
        for piece in BLOCK_STREAMS[what]
    ]
    reply = read([START, *events, END, STOP, ("metadata", {"usage": CONVERSE_USAGE})])

    assert whole(BACK[what]) == reply
    assert all(type(delta).__name__ != "ToolCallStarted" for delta in split_reply_into_deltas(reply))


# --- a walk over AWS's own description of the API ------------------------------------------------------------------------------

NAMED = {"Message.role": "the same for every reply"}
"""What of AWS's description of a reply is not found again, and why."""


class Maker:
    """Makes values of shapes of botocore's, with a value of its own in each leaf."""

    def __init__(self) -> None:
        self.leaves: list[tuple[str, str]] = []
        self.number = 100_000

    def of(self, shape: Any, path: str, above: tuple[str, ...] = ()) -> Iterator[Any]:
        """Values of *shape*: one for each variant of the unions in it."""
        if path in NAMED or shape.name in above:
            return
        if shape.type_name == "structure" and not getattr(shape, "is_document_type", False):
            yield from self._structure(shape, (*above, shape.name))
        elif shape.type_name == "list":
            yield list(self.of(shape.member, path, above))
        elif shape.type_name == "map":
            yield {"a key": next(self.of(shape.value, path, above), None)}
        else:
            yield self._leaf(shape, path)

    def _structure(self, shape: Any, above: tuple[str, ...]) -> Iterator[dict[str, Any]]:
        first: dict[str, Any] = {}
        more: list[dict[str, Any]] = []
        for name, member in shape.members.items():
            values = list(self.of(member, f"{shape.name}.{name}", above))
            if shape.is_tagged_union:
                more += [{name: value} for value in values]
            elif values:
                first[name] = values[0]
                more += [{**first, name: value} for value in values[1:]]
        yield from [] if shape.is_tagged_union else [first]
        yield from more

    def _leaf(self, shape: Any, path: str) -> Any:
        self.number += 1
        enum = shape.metadata.get("enum")
        value: Any = f"{path}~{self.number}"
        if enum and shape.name == "ToolUseType":
            value = enum[0]
        elif enum and shape.name == "StopReason":
            value = "end_turn"
        elif shape.type_name in {"integer", "long", "float", "double"}:
            value = self.number
        elif shape.type_name == "boolean":
            value = True
        elif shape.type_name == "blob":
            value = base64.b64encode(str(self.number).encode()).decode()
        elif getattr(shape, "is_document_type", False):
            value = {"inside": value}
        self.leaves.append((path, json.dumps(value)))
        return value


@pytest.mark.spec("providers:PV132", "generator-contract:T5")
def test_every_known_converse_reply_member_is_read_or_kept():
    maker, found = Maker(), list[str]()
    for data in maker.of(converse().output_shape, "ConverseResponse"):
        blocks = data.get("output", {}).get("message", {}).get("content", [])
        for block in blocks or [None]:
            one = {**data, "output": {"message": {"content": [block] if block else []}}}
            found.append(json.dumps(to_json(decode(one, *ASKED))))
    text = "".join(found)
    lost = {path for path, value in maker.leaves if value not in text}

    assert 150 < len(maker.leaves)
    assert set() == lost


# --- what it costs --------------------------------------------------------------------------------------------------------------


@pytest.mark.spec("providers:PV78", "reliability:MP03")
@pytest.mark.parametrize("prefix", [NAME, "bedrock"])
def test_cost_uses_the_cloud_price_with_cache_reads(prefix):
    reply = whole({"text": "x"}, usage={"inputTokens": 1_000_000, "outputTokens": 0, "totalTokens": 1_000_000})
    cached = whole({"text": "x"}, usage={"inputTokens": 0, "outputTokens": 0, "cacheReadInputTokens": 1_000_000})
    costs = [LIST_PRICES.price_reply(f"{prefix}/{NOVA}", one, AT) for one in (reply, cached)]

    assert [Decimal("0.8"), Decimal("0.2")] == costs
    assert LIST_PRICES(f"{prefix}/{NOVA}", reply.usage, AT) == costs[0]
    assert LIST_PRICES.price_reply(f"{prefix}/{LLAMA}", reply, AT) is not None
    assert LIST_PRICES.price_reply(f"{prefix}/ai21.jamba-1-5-large-v1:0", reply, AT) is None
    assert 300_000 == get_model_info(f"{prefix}/{NOVA}").context_window


@pytest.mark.spec("providers:PV78")
def test_hour_cache_writes_cost_the_hourly_cache_price():
    def cost(lifetime: str) -> Decimal | None:
        written = {"cacheWriteInputTokens": 1_000_000, "cacheDetails": [{"ttl": lifetime, "inputTokens": 1_000_000}]}
        reply = whole({"text": "x"}, usage={"inputTokens": 0, "outputTokens": 0, **written})
        return LIST_PRICES.price_reply(f"{NAME}/{CLAUDE}", reply, AT)

    assert [Decimal("4.125"), Decimal("6.6")] == [cost("5m"), cost("1h")]


@pytest.mark.spec("providers:PV78", "requirements:X76")
def test_unpriced_tier_or_tool_makes_the_cost_a_lower_bound():
    fast = whole({"text": "x"}, performanceConfig={"latency": "optimized"})
    priority = whole({"text": "x"}, serviceTier={"type": "priority"})
    plain = whole({"text": "x"}, serviceTier={"type": "default"}, performanceConfig={"latency": "standard"})
    ran = whole(CODE, RAN, {"text": "2"}, usage={**CONVERSE_USAGE, "serverToolUsage": {"webGrounding": 2}})
    told = [LIST_PRICES.list_unpriced(f"{NAME}/{NOVA}", reply, AT) for reply in (fast, priority, plain, ran)]

    assert [("optimized",), ("priority",), (), ("webGrounding",)] == told
    assert LIST_PRICES.price_reply(f"{NAME}/{NOVA}", whole({"text": "x"}, serviceTier={"type": "reserved"}), AT) is None


def test_equal_document_names_become_unique_and_stay_stable():
    """The service refuses a request in which two are called the same, in any case of letters (and dots anywhere)."""
    first = UserMessage(
        [DocumentPart(data=b"a", name="Report v1.0.pdf"), DocumentPart(data=b"b", name="report v1 0.pdf")]
    )
    later = UserMessage([TextPart("And this?"), DocumentPart(data=b"c", mime_type="text/csv", name="日本.csv")])
    answer = AssistantMessage([TextPart("Yes.")])
    alone = [document["name"] for document in blocks_in(said(NOVA, first), "document")]
    names = [document["name"] for document in blocks_in(said(NOVA, first, answer, later, answer, later), "document")]

    assert ["Report v1 0", "report v1 0 (2)"] == alone
    assert [*alone, "Document", "Document (2)"] == names


@pytest.mark.anyio
@pytest.mark.parametrize("data", [{}, {"output": {}}, {"output": {"message": {"role": "assistant"}}}, {"output": 5}])
async def test_a_body_without_a_message_is_no_reply(data):
    transport = httpx2.MockTransport(lambda _: httpx2.Response(200, json=data))
    provider = provider_of("bedrock_converse", transport=transport)
    request = ModelRequest(f"bedrock_converse/{MODEL['bedrock_converse']}", "", Transcript([UserMessage("hi")]))
    with pytest.raises(ModelError) as caught:
        await provider.complete(request)
    await provider.close()

    assert "protocol" == caught.value.kind
