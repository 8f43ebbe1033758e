"""Every recorded reply of the wires that have an adapter, through our codecs (recorded traffic, use R6)."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from genai_prices import extract_usage

from stepengine.data.json import thaw
from stepengine.data.models import ModelReply, TextChunk, ThinkingChunk, ToolCallChunk, ToolCallEnded, ToolCallStarted
from stepengine.data.parts import OpaquePart
from stepengine.errors import ModelError, TruncatedReply
from stepengine.models._failures import body_failure
from stepengine.models.pricing import cost_of
from tests.models.recorded import Recording, needs_recordings, of, recordings

pytestmark = needs_recordings

EXPECTED = {
    ("anthropic", "plain"): 92,
    ("anthropic", "stream"): 8,
    ("anthropic", "error"): 1,
    ("openai-chat", "plain"): 56,
    ("openai-chat", "stream"): 29,
    ("openai-chat", "error"): 4,
    ("openrouter", "plain"): 18,
    ("openrouter", "stream"): 6,
    ("openrouter", "error"): 3,
}


def test_the_whole_recorded_traffic_is_read():
    kinds = Counter((r.wire, "error" if r.status >= 400 else "stream" if r.stream else "plain") for r in recordings())
    plain = {key: count for key, count in kinds.items() if key[1] != "error"}
    assert kinds == EXPECTED, plain


def check_reply(recording: Recording, reply: ModelReply) -> None:
    assert len(reply.tool_calls) == recording.tool_calls
    assert all(call.input_error is None and call.tool_call_id == "" for call in reply.tool_calls)
    usage = reply.usage
    assert usage is not None
    figures = (
        usage.input_tokens,
        usage.output_tokens,
        usage.cache_read_tokens,
        usage.cache_write_tokens,
        usage.reasoning_tokens,
    )
    assert min(figures) >= 0
    raw = thaw(reply.provider_data["usage"])
    if recording.wire == "anthropic":
        prompt = [
            raw.get(name) or 0 for name in ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
        ]
        assert (usage.prompt_tokens, usage.completion_tokens) == (sum(prompt), raw["output_tokens"])
    else:
        assert (usage.prompt_tokens, usage.completion_tokens) == (raw["prompt_tokens"], raw["completion_tokens"])


@pytest.mark.spec("requirements:G3", "requirements:G16", "ecosystem:EC214")
@pytest.mark.parametrize("recording", of(stream=False))
def test_a_reply_in_one_piece_decodes(recording: Recording):
    reply = recording.decoded()
    check_reply(recording, reply)
    if recording.wire == "anthropic":
        known = {"text", "thinking", "redacted_thinking", "tool_use"}
        unknown = [block for block in json.loads(recording.reply)["content"] if block["type"] not in known]
        assert [thaw(p.data) for p in reply.content if isinstance(p, OpaquePart)] == unknown


@pytest.mark.spec("requirements:G4", "requirements:G5", "ecosystem:EC71", "ecosystem:EC72")
@pytest.mark.parametrize("recording", of(stream=True))
def test_a_stream_gives_the_same_reply_however_it_is_cut_into_pieces(recording: Recording):
    deltas, whole = recording.streamed(len(recording.reply))
    check_reply(recording, whole)
    for piece in (1, 7, 4096):
        again, reply = recording.streamed(piece)
        assert reply == whole
        assert again == deltas
    assert "".join([d.text for d in deltas if isinstance(d, TextChunk)]) == whole.text
    thinking = "".join([part for d in deltas if isinstance(d, ThinkingChunk) for part in [d.text]])
    assert thinking == "".join([p.text for p in whole.content if type(p).__name__ == "ThinkingPart"])
    check_calls(deltas, whole)


def check_calls(deltas: list[object], reply: ModelReply) -> None:
    started = {d.index: d.tool_name for d in deltas if isinstance(d, ToolCallStarted)}
    assert list(started.values()) == [call.tool_name for call in reply.tool_calls]
    assert {d.index for d in deltas if isinstance(d, ToolCallEnded)} == set(started)
    for index, call in enumerate(reply.tool_calls):
        text = "".join([d.text for d in deltas if isinstance(d, ToolCallChunk) and d.index == index])
        assert json.loads(text or "{}") == call.input


@pytest.mark.spec("reliability:MP20", "ecosystem:EC213")
@pytest.mark.parametrize("recording", of(stream=True))
def test_a_stream_cut_at_any_event_before_its_terminal_marker_is_no_reply(recording: Recording):
    marker = b"event: message_stop" if recording.wire == "anthropic" else b'"finish_reason":"'
    end = recording.reply.index(marker)
    events = recording.reply[:end].split(b"\n\n")
    reader = recording.reader()
    for event in events[:-1]:
        reader.feed(event + b"\n\n")
        with pytest.raises(TruncatedReply) as caught:
            reader.finish()
        assert caught.value.retryable


@pytest.mark.parametrize("recording", of(ok=False))
@pytest.mark.spec("reliability:MP01", "reliability:MP05")
def test_an_error_answer_becomes_the_right_error_with_the_provider_s_words(recording: Recording):
    failure = body_failure(recording.reply, recording.status, {}, recording.call)
    assert isinstance(failure, ModelError)
    assert failure.status == recording.status
    assert failure.retryable == (recording.status == 429)
    error = json.loads(recording.reply)["error"]
    assert error["message"] in failure.message
    if isinstance(error.get("metadata"), dict) and error["metadata"].get("raw"):
        assert error["metadata"]["raw"][:100] in failure.message


@pytest.mark.spec("requirements:G17")
def test_a_cost_that_openrouter_reports_is_the_cost_of_the_reply():
    found = [
        r for r in recordings() if r.wire == "openrouter" and r.status == 200 and not r.stream and b'"cost"' in r.reply
    ]
    assert found
    for recording in found:
        assert float(recording.decoded().cost) == json.loads(recording.reply)["usage"]["cost"]


def test_the_recorded_usage_can_be_priced():
    from datetime import UTC, datetime

    at = datetime(2026, 11, 1, tzinfo=UTC)
    priced = [cost_of(r.call.model, r.decoded().usage, at) for r in recordings() if r.status == 200 and not r.stream]
    assert sum(cost is not None and cost > 0 for cost in priced) > len(priced) / 2


@pytest.mark.spec("ecosystem:EC214", "ecosystem:EC76")
@pytest.mark.parametrize("recording", of(stream=False))
def test_the_buckets_add_up_to_what_the_price_list_s_own_reader_finds(recording: Recording):
    flavor = {"api_flavor": "chat"} if recording.wire != "anthropic" else {}
    data = {"model": recording.model, "usage": json.loads(recording.reply)["usage"]}
    try:
        found = extract_usage(data, provider_id=recording.call.provider, **flavor).usage
    except (LookupError, ValueError):
        pytest.skip("its reader does not know the model or refuses the figures")
    usage = recording.decoded().usage
    assert usage.prompt_tokens == (found.input_tokens or 0)
    assert usage.completion_tokens == (found.output_tokens or 0)
    assert usage.cache_read_tokens == (found.cache_read_tokens or 0)
    # Some servers report more cached tokens than prompt; our buckets never hold more than the total.
    assert usage.cache_write_tokens == min(found.cache_write_tokens or 0, usage.prompt_tokens - usage.cache_read_tokens)
