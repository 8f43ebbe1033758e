"""What replies become: stop reasons, usage, tool arguments, tool calls in pieces, and streams in an impossible order."""

from __future__ import annotations

from typing import Any

import pytest

from stepengine.data.messages import CitationPart, RefusalPart
from stepengine.data.models import StopReason
from stepengine.data.usage import Usage
from stepengine.errors import ContextOverflow, ModelError
from stepengine.models._json import make_call_part
from stepengine.models.anthropic.decode import decode as decode_anthropic
from stepengine.models.anthropic.decode import parse_usage as anthropic_usage
from stepengine.models.openai_chat.decode import decode as decode_chat
from stepengine.models.openai_chat.decode import parse_usage as chat_usage
from tests.models.wires import made


def anthropic(content: list[Any], stop: str | None, **more: Any) -> Any:
    return decode_anthropic({"content": content, "stop_reason": stop, **more}, made("anthropic"), "m", None)


def chat(message: dict[str, Any], finish: str | None, **more: Any) -> Any:
    return decode_chat(
        {"choices": [{"message": message, "finish_reason": finish}], **more}, made("openai_chat"), "m", None
    )


TEXT = [{"type": "text", "text": "hi"}]
CALL = [{"type": "tool_use", "id": "t", "name": "f", "input": {}}]
CHAT_CALL = {"content": None, "tool_calls": [{"id": "t", "function": {"name": "f", "arguments": "{}"}}]}

# --- stop reasons ---------------------------------------------------------------------------------------------------


@pytest.mark.spec("ecosystem:EC97", "reliability:MP58")
@pytest.mark.parametrize(
    ("raw", "content", "stop"),
    [
        ("end_turn", TEXT, StopReason.END_TURN),
        ("end_turn", CALL, StopReason.TOOL_USE),
        ("tool_use", CALL, StopReason.TOOL_USE),
        ("tool_use", TEXT, StopReason.END_TURN),
        ("max_tokens", TEXT, StopReason.MAX_TOKENS),
        ("stop_sequence", TEXT, StopReason.STOP_SEQUENCE),
        ("refusal", [], StopReason.REFUSAL),
        ("pause_turn", TEXT, StopReason.PAUSE),
        ("compaction", TEXT, StopReason.PAUSE),
        ("word_of_the_future", TEXT, StopReason.END_TURN),
        ("word_of_the_future", CALL, StopReason.TOOL_USE),
        (None, TEXT, StopReason.END_TURN),
    ],
)
def test_anthropic_stop_reasons_map_onto_ours_and_the_content_decides(raw, content, stop):
    reply = anthropic(content, raw, stop_details={"category": "cyber"} if raw == "refusal" else None)
    assert (reply.stop_reason, reply.raw_stop_reason) == (stop, raw)
    if stop is StopReason.REFUSAL:
        assert reply.provider_data["stop_details"]["category"] == "cyber"


@pytest.mark.spec("ecosystem:EC97", "reliability:MP54", "reliability:MP58")
@pytest.mark.parametrize(
    ("raw", "message", "stop"),
    [
        ("stop", {"content": "hi"}, StopReason.END_TURN),
        ("stop", CHAT_CALL, StopReason.TOOL_USE),
        ("tool_calls", CHAT_CALL, StopReason.TOOL_USE),
        ("tool_calls", {"content": "hi"}, StopReason.END_TURN),
        ("length", {"content": "hi"}, StopReason.MAX_TOKENS),
        ("content_filter", {"content": None}, StopReason.REFUSAL),
        ("stop", {"content": None, "refusal": "No."}, StopReason.REFUSAL),
        ("error", {"content": None}, StopReason.ERROR),
        ("function_call", CHAT_CALL, StopReason.TOOL_USE),
        ("model_length", {"content": "hi"}, StopReason.MAX_TOKENS),
        ("eos", {"content": "hi"}, StopReason.END_TURN),
        ("", {"content": "hi"}, StopReason.END_TURN),
        ("word_of_the_future", CHAT_CALL, StopReason.TOOL_USE),
    ],
)
def test_chat_finish_reasons_map_onto_ours_and_the_content_decides(raw, message, stop):
    reply = chat(message, raw)
    assert (reply.stop_reason, reply.raw_stop_reason) == (stop, raw or None)
    assert [p.text for p in reply.content if type(p) is RefusalPart] == (
        [message["refusal"]] if "refusal" in message else []
    )


@pytest.mark.spec("ecosystem:EC97")
@pytest.mark.parametrize("raw", ["aborted", "insufficient_system_resource"])
def test_completion_given_up_by_the_server_is_retryable(raw):
    with pytest.raises(ModelError, match=raw) as caught:
        chat({"content": "hi"}, raw, usage={"prompt_tokens": 3, "completion_tokens": 1})
    assert (caught.value.kind, caught.value.retryable, caught.value.usage) == ("given_up", True, Usage(3, 1))


@pytest.mark.spec("ecosystem:EC97", "reliability:MP02")
def test_full_context_window_raises_context_overflow():
    with pytest.raises(ContextOverflow) as caught:
        anthropic(TEXT, "model_context_window_exceeded", usage={"input_tokens": 9, "output_tokens": 1})
    assert caught.value.usage == Usage(9, 1)


@pytest.mark.spec("reliability:MP15", "reliability:MP54")
def test_completion_without_choices_or_with_an_error_raises():
    with pytest.raises(ModelError) as caught:
        decode_chat({"choices": [], "usage": None}, made("openai_chat"), "m", None)
    assert caught.value.kind == "protocol"
    with pytest.raises(ModelError) as caught:
        decode_chat({"choices": [{"error": {"code": 429, "message": "slow"}}]}, made("openrouter"), "m", None)
    assert (caught.value.status, caught.value.retryable) == (429, True)


# --- usage ----------------------------------------------------------------------------------------------------------


@pytest.mark.spec("ecosystem:EC76", "reliability:MP61")
@pytest.mark.parametrize(
    ("raw", "usage"),
    [
        (None, None),
        ({}, None),
        ({"input_tokens": None, "output_tokens": None}, None),
        ({"input_tokens": 10, "output_tokens": 4}, Usage(10, 4)),
        (
            {
                "input_tokens": 10,
                "output_tokens": 9,
                "cache_read_input_tokens": 3,
                "cache_creation_input_tokens": 2,
                "output_tokens_details": {"thinking_tokens": 5},
            },
            Usage(10, 4, 3, 2, 5),
        ),
        ({"input_tokens": -1, "output_tokens": 4, "cache_read_input_tokens": None}, Usage(0, 4, at_least=True)),
        (
            {"input_tokens": 1, "output_tokens": 4, "output_tokens_details": {"thinking_tokens": 9}},
            Usage(1, 0, 0, 0, 4),
        ),
        ({"input_tokens": 1}, Usage(1, 0, at_least=True)),
    ],
)
def test_anthropic_usage_falls_into_disjoint_buckets(raw, usage):
    assert anthropic_usage(raw) == usage


@pytest.mark.spec("ecosystem:EC76", "reliability:MP61", "providers:PV81")
@pytest.mark.parametrize(
    ("raw", "usage"),
    [
        (None, None),
        ({"prompt_tokens": None}, None),
        ({"prompt_tokens": 10, "completion_tokens": 4, "prompt_tokens_details": None}, Usage(10, 4)),
        (
            {
                "prompt_tokens": 10,
                "completion_tokens": 9,
                "prompt_tokens_details": {"cached_tokens": 3, "cache_write_tokens": 2},
                "completion_tokens_details": {"reasoning_tokens": 5},
            },
            Usage(5, 4, 3, 2, 5),
        ),
        ({"prompt_tokens": 10, "completion_tokens": 1, "prompt_cache_hit_tokens": 4}, Usage(6, 1, 4)),
        ({"prompt_tokens": 10, "completion_tokens": 1, "num_cached_tokens": 4}, Usage(6, 1, 4)),
        ({"prompt_tokens": 10, "completion_tokens": 1, "cached_tokens": 4}, Usage(6, 1, 4)),
        (
            {"prompt_tokens": 2, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 99}},
            Usage(0, 1, 2, at_least=True),
        ),
        ({"prompt_tokens": 2.0, "completion_tokens": -1}, Usage(2, 0, at_least=True)),
        (
            {
                "prompt_tokens": 10,
                "completion_tokens": 3,
                "total_tokens": 18,
                "completion_tokens_details": {"reasoning_tokens": 5},
            },
            Usage(10, 3, 0, 0, 5),
        ),
    ],
)
def test_chat_usage_splits_into_disjoint_buckets(raw, usage):
    assert chat_usage(raw) == usage


# --- tool arguments -------------------------------------------------------------------------------------------------


@pytest.mark.spec("reliability:MP42", "reliability:MP43", "reliability:MP40")
@pytest.mark.parametrize(
    ("raw", "value"),
    [
        (None, {}),
        ("", {}),
        ("  ", {}),
        ("null", {}),
        ('{"a": 1}', {"a": 1}),
        ({"a": 1}, {"a": 1}),
        ('"{\\"a\\": 1}"', {"a": 1}),
        ('{"a": 1, "a": 2}', {"a": 2}),
        ('{"a": -0.0, "b": 9007199254740993}', {"a": 0.0, "b": 9007199254740993}),
    ],
)
def test_arguments_that_can_be_read_are_an_object(raw, value):
    part = make_call_part("f", raw, {"provider": "p"})
    assert (part.input, part.raw_input, part.input_error) == (value, None, None)


@pytest.mark.spec("reliability:MP40", "reliability:MP42", "reliability:MP44")
@pytest.mark.parametrize(
    "raw",
    [
        '{"a": ',
        "[1]",
        "7",
        "true",
        '"text"',
        '{"a": NaN}',
        '{"a": Infinity}',
        '{"a": 1e999}',
        '{"a": %s}' % ("1" * 5000),
        "{} {}",
    ],
)
def test_unreadable_arguments_are_kept_as_text_with_the_reason(raw):
    part = make_call_part("f", raw, {"provider": "p"})
    assert part.input == {}
    assert part.raw_input == raw
    assert part.input_error


DEEP, HUGE = '{"a":' + "[" * 100_000, '{"a":"%s"}' % ("x" * 5_000_000)


@pytest.mark.spec("reliability:MP44")
def test_deep_and_huge_arguments_are_refused():
    assert make_call_part("f", DEEP, {"provider": "p"}).input_error
    huge = make_call_part("f", HUGE, {"provider": "p"})
    assert "too large" in huge.input_error
    assert len(huge.raw_input) < 100


# --- what an answer rests on ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("told", "part"),
    [
        ({"url": "https://a", "title": "A", "cited_text": "so"}, CitationPart("https://a", "A", quote="so", said="hi")),
        ({"source": "b", "document_title": "B"}, CitationPart("b", "B", said="hi")),
        ({"file_id": "f", "title": None}, CitationPart("", "", said="hi", source="f")),
    ],
    ids=["page", "result", "file"],
)
def test_citation_holds_the_cited_words_and_the_source(told, part):
    reply = anthropic([{**TEXT[0], "citations": [{"type": "c", **told}] * 2}], "end_turn")

    assert ["hi", part, part] == [getattr(reply.content[0], "text", None), *reply.content[1:]]
