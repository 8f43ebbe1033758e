"""
Events of streams and the pieces in them: each is read, kept, or told of by name (``ModelReply.provider_data["unread"]``).

What an SDK knows of events is walked as in ``test_members_of_the_sdks``; what no SDK knows yet is put wherever it may stand.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from typing import Any, get_args

import attrs
import pytest

from stepengine.data.codec import to_json
from stepengine.data.messages import CitationPart
from stepengine.data.models import ModelReply
from stepengine.models._reply import MAX_UNREAD_NAMES
from stepengine.models.openai.decode import IN_EVENT, READ, REPEATED
from tests.models.members import TOMORROW, at_once, in_pieces, lost_by, objects_in, stream_of, with_more
from tests.models.wires import FOUR

Events = list[dict[str, Any]]


def unread(reply: ModelReply) -> list[str]:
    return list(reply.provider_data.get("unread", ()))


def without_names(reply: ModelReply) -> ModelReply:
    kept = {name: value for name, value in reply.provider_data.items() if name != "unread"}
    return attrs.evolve(reply, provider_data=kept)


def block(index: int, begin: dict[str, Any], *deltas: dict[str, Any]) -> Events:
    return [
        {"type": "content_block_start", "index": index, "content_block": begin},
        *[{"type": "content_block_delta", "index": index, "delta": delta} for delta in deltas],
        {"type": "content_block_stop", "index": index},
    ]


ANTHROPIC_BEGIN = {"type": "message_start", "message": {"id": "m1", "model": "m", "usage": {"input_tokens": 1}}}
ANTHROPIC_END = [
    {"type": "message_delta", "delta": {"stop_reason": "tool_use"}, "usage": {"output_tokens": 1}},
    {"type": "message_stop"},
]
SEARCH = {"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {}}
FOUND = {"type": "web_search_tool_result", "tool_use_id": "s1", "content": []}
ANTHROPIC = [
    ANTHROPIC_BEGIN,
    *block(
        0,
        {"type": "thinking", "thinking": "", "signature": ""},
        {"type": "thinking_delta", "thinking": "Hm"},
        {"type": "signature_delta", "signature": "c2ln"},
    ),
    *block(1, {"type": "redacted_thinking", "data": "eA=="}),
    *block(
        2,
        {"type": "text", "text": ""},
        {"type": "text_delta", "text": "Yes"},
        {"type": "citations_delta", "citation": {"type": "web_search_result_location", "url": "u"}},
    ),
    *block(3, SEARCH, {"type": "input_json_delta", "partial_json": '{"query":"x"}'}),
    *block(4, FOUND),
    *block(5, {"type": "tomorrows", "x": ""}, {"type": "tomorrows_delta", "x": "y"}),
    *block(
        6,
        {"type": "tool_use", "id": "t1", "name": "look", "input": {}},
        {"type": "input_json_delta", "partial_json": '{"at":"1"}'},
    ),
    *ANTHROPIC_END,
]
TEXT = {"type": "output_text", "text": "Yes", "annotations": [{"type": "url_citation", "url": "u"}]}
MESSAGE = {"type": "message", "id": "i0", "role": "assistant", "status": "completed", "content": [TEXT]}
REASONING = {"type": "reasoning", "id": "i1", "summary": [{"type": "summary_text", "text": "Hm"}]}
CALL = {"type": "function_call", "id": "i2", "call_id": "t1", "name": "look", "arguments": '{"at":"1"}'}
RESPONSE = {"id": "r1", "model": "m", "status": "completed", "usage": {"input_tokens": 1, "output_tokens": 1}}


def item(index: int, whole: dict[str, Any], *pieces: dict[str, Any]) -> Events:
    where = {"output_index": index, "item_id": whole["id"]}
    return [
        {"type": "response.output_item.added", "output_index": index, "item": whole},
        *[{**piece, **where} for piece in pieces],
        {"type": "response.output_item.done", "output_index": index, "item": whole},
    ]


RESPONSES = [
    {"type": "response.created", "response": {**RESPONSE, "output": []}},
    {"type": "response.in_progress", "response": {**RESPONSE, "output": []}},
    *item(
        0,
        REASONING,
        {"type": "response.reasoning_summary_part.added", "summary_index": 0, "part": {"type": "summary_text"}},
        {"type": "response.reasoning_summary_text.delta", "summary_index": 0, "delta": "Hm"},
    ),
    *item(
        1,
        MESSAGE,
        {"type": "response.content_part.added", "content_index": 0, "part": {"type": "output_text", "text": ""}},
        {"type": "response.output_text.delta", "content_index": 0, "delta": "Yes", "logprobs": []},
        {"type": "response.output_text.done", "content_index": 0, "text": "Yes"},
    ),
    *item(2, CALL, {"type": "response.function_call_arguments.delta", "delta": '{"at":"1"}'}),
    {"type": "response.completed", "response": {**RESPONSE, "output": [REASONING, MESSAGE, CALL]}},
]


def piece(finish: str | None = None, **delta: Any) -> dict[str, Any]:
    return {"id": "x", "model": "m", "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}


CHAT = [
    piece(role="assistant", content="", reasoning="Hm", reasoning_details=[{"type": "reasoning.text", "text": "Hm", "index": 0}]),
    piece(content="Yes", annotations=[{"type": "file", "file": {"id": "f"}}], audio={"id": "a", "transcript": "Yes"}),
    piece(content=[{"type": "text", "text": "!"}, {"type": "reference", "ids": [1]}, {"type": "thinking", "thinking": "Hm"}]),
    piece(tool_calls=[{"index": 0, "id": "t1", "type": "function", "function": {"name": "look", "arguments": ""}}]),
    piece(tool_calls=[{"index": 0, "function": {"arguments": '{"at":"1"}'}}]),
    {**piece("tool_calls"), "usage": {"prompt_tokens": 1, "completion_tokens": 1}},
]  # fmt: skip


def parts(*parts: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"candidates": [{"content": {"role": "model", "parts": [*parts]}, **more}], "modelVersion": "m"}


GEMINI = [
    parts({"text": "Hm", "thought": True}),
    parts({"text": "Yes"}, {"text": "!"}),
    parts({"functionCall": {"name": "look", "willContinue": True}}),
    parts({"functionCall": {"partialArgs": [{"jsonPath": "$.at", "stringValue": "1"}], "willContinue": True}}),
    parts({"functionCall": {}}),
    parts({"executableCode": {"code": "1"}}, groundingMetadata={"webSearchQueries": ["x"]}),
    {**parts({"functionCall": {"name": "look", "args": {}}}, finishReason="STOP"), "usageMetadata": {"promptTokenCount": 1}},
]  # fmt: skip
STREAMS: dict[str, Events] = {"anthropic": ANTHROPIC, "openai": RESPONSES, "openai_chat": CHAT, "google": GEMINI}
SAID_AGAIN = {
    "response.created": "the event at the end has the response as it became",
    "response.output_item.added": "output_item.done has the item as it became",
    "response.reasoning_summary_part.added": "output_item.done has the part",
}
IN_ANOTHER_WAY = {
    "output": "output_item.done has the item",
    "input": "the pieces that follow take the place of the input that a block begins with",
    "args": "what stands there is an argument",
    "partialArgs": "a piece of arguments is its path and its value",
}
"""Events and members below which a member that nobody knows may be lost, and why."""


def said_again(data: dict[str, Any], path: tuple[str | int, ...]) -> bool:
    kind = data.get("type")
    return kind in REPEATED or (kind in SAID_AGAIN and bool(path)) or not IN_ANOTHER_WAY.keys().isdisjoint(path)


@pytest.mark.spec("reliability:MP59", "requirements:G5")
@pytest.mark.parametrize("wire", FOUR)
def test_unknown_event_member_is_kept_or_reported_anywhere(wire):
    events = STREAMS[wire]
    plain = in_pieces(wire, events)
    assert [] == unread(plain)
    for index, data in enumerate(events):
        for path in objects_in(data):
            if not said_again(data, path):
                reply = in_pieces(wire, [*events[:index], with_more(data, path), *events[index + 1 :]])
                kept = TOMORROW["tomorrow"] in json.dumps(to_json(reply))

                assert kept != any("tomorrow" in name for name in unread(reply)), (data, path)
                assert plain.text == reply.text
                assert [call.input for call in plain.tool_calls] == [call.input for call in reply.tool_calls]


@pytest.mark.spec("reliability:MP59")
@pytest.mark.parametrize("wire", ["anthropic", "openai"])
def test_unknown_event_is_reported_once_and_changes_nothing(wire):
    events = STREAMS[wire]
    plain = in_pieces(wire, events)
    kinds = [{"type": "response.tomorrow.delta", "delta": "x", "output_index": 0}, {"type": "tomorrow", "index": 0}]
    for at in range(1, len(events)):
        for data in kinds:
            reply = in_pieces(wire, [*events[:at], data, data, *events[at:]])

            assert [data["type"]] == [name for name in unread(reply) if name == data["type"]]
            assert plain == without_names(reply)


@pytest.mark.spec("reliability:MP59")
def test_unread_names_are_few_short_and_printable():
    odd = [{"type": f"\x1b[31m{number}" + "x" * 500} for number in range(100)]
    names = unread(in_pieces("anthropic", [ANTHROPIC[0], *odd, *ANTHROPIC[1:]]))

    assert len(names) == MAX_UNREAD_NAMES
    assert all(name.isprintable() and len(name) < 100 for name in names)


# --- more than one answer ---------------------------------------------------------------------------------------------


@pytest.mark.spec("reliability:MP59")
def test_second_choice_is_reported_and_the_first_is_used():
    choice = {"index": 0, "message": {"content": "first"}, "finish_reason": "stop"}
    other = {"index": 1, "message": {"content": "second"}, "finish_reason": "length"}
    candidate = {"content": {"parts": [{"text": "first"}]}, "finishReason": "STOP"}
    beside = {"content": {"parts": [{"text": "second"}]}, "finishReason": "MAX_TOKENS", "index": 1}
    both = piece(content="first"), {"choices": [{**piece("length", content="second")["choices"][0], "index": 1}]}
    replies = {
        "choices[1]": [
            at_once("openai_chat", {"choices": [choice, other]}),
            in_pieces("openai_chat", [*both, *both[1:], piece("stop")]),
        ],
        "candidates[1]": [
            at_once("google", {"candidates": [candidate, beside]}),
            in_pieces("google", [{"candidates": [candidate, beside]}]),
        ],
    }
    for name, ways in replies.items():
        for reply in ways:
            assert ("first", [name]) == (reply.text, unread(reply))
            assert "second" not in json.dumps(to_json(reply))


@pytest.mark.spec("providers:PV81")
def test_gateway_cost_in_a_stream_is_read():
    """Vercel's gateway states its price there, which was lost in streams."""
    told = piece("stop", content="Hi.", provider_metadata={"gateway": {"cost": "0.5"}})

    assert "0.5" == str(in_pieces("openai_chat", [told]).cost)


@pytest.mark.spec("reliability:MP59", "providers:PV62")
def test_gemini_citations_survive_later_empty_chunks():
    """Most chunks have an empty ``groundingMetadata``, and each has the quotations of its own text."""
    found = {"groundingChunks": [{"web": {"uri": "u"}}]}
    quoted = [
        {"citationMetadata": {"citationSources": sources}} for sources in ([{"uri": "a"}], [{"uri": "a"}, {"uri": "b"}])
    ]
    end = {"groundingMetadata": {}, "citationMetadata": {}, "finishReason": "STOP"}
    pieces = [
        parts({"text": "x"}, groundingMetadata=found, **quoted[0]),
        parts({"text": "y"}, **quoted[1]),
        parts(**end),
    ]
    reply = in_pieces("google", pieces)

    assert ["u", "a", "b"] == [part.url for part in reply.content if isinstance(part, CitationPart)]


def test_unknown_streamed_texts_and_lists_accumulate_others_are_replaced():
    deltas = [
        {"tune": "la", "notes": [1], "key": 1},
        {"tune": "li", "notes": [2], "key": 2},
        {"tune": None, "key": None},
    ]
    reply = in_pieces("openai_chat", [*[piece(content="x", **delta) for delta in deltas], piece("stop")])
    grown = [{"type": "tomorrows_delta", **delta} for delta in deltas]
    (part,) = in_pieces(
        "anthropic", [ANTHROPIC_BEGIN, *block(0, {"type": "tomorrows"}, *grown), *ANTHROPIC_END]
    ).content

    expected = {"tune": "lali", "notes": [1, 2], "key": 2}
    assert expected == to_json(reply)["provider_data"]["more_of_message"]
    assert {"type": "tomorrows", **expected} == to_json(part)["data"]


# --- what the SDKs know of events -------------------------------------------------------------------------------------

PLACES = "says where the piece belongs"
NAMED = {
    **dict.fromkeys(
        [
            f"{event}.{member}"
            for event in ("BetaRawContentBlockStartEvent", "BetaRawContentBlockDeltaEvent", "BetaRawContentBlockStopEvent")
            for member in ("index", "type")
        ],
        PLACES,
    ),
    **dict.fromkeys(
        [f"BetaRawMessage{event}Event.type" for event in ("Start", "Delta", "Stop")], "the same for every such event"
    ),
    **dict.fromkeys(
        [f"Beta{delta}Delta.type" for delta in ("Text", "InputJSON", "Citations", "Thinking", "Signature", "CompactionContentBlock")],
        "a piece of that kind is made of it",
    ),
    **dict.fromkeys(("BetaMessage.role", "BetaMessage.type"), "the same for every reply"),
    **dict.fromkeys(("ChatCompletionChunk.object", "ChatCompletionChunk.created"), "as of a reply in one piece"),
    "ChatCompletionChunk.obfuscation": "made to hide how long a piece is",
    **dict.fromkeys(("Choice.index", "ChoiceDeltaToolCall.index"), PLACES),
    **dict.fromkeys(("ChoiceDelta.role", "ChoiceDeltaToolCall.type"), "the same for every reply"),
    **dict.fromkeys(
        ("ChoiceDelta.function_call", "ChoiceDeltaFunctionCall.name", "ChoiceDeltaFunctionCall.arguments"),
        "older than tool_calls, and repeats them where both are there",
    ),
}  # fmt: skip
"""What of an event is neither told nor kept, and why."""
BLOCKS = {"text_delta": "text", "citations_delta": "text", "thinking_delta": "thinking", "signature_delta": "thinking"}


def variants(kind: Any) -> Iterator[Any]:
    """The classes of a union of events, however it is annotated."""
    if inspect.isclass(kind):
        yield kind
    else:
        for inner in get_args(kind):
            yield from variants(inner) if not isinstance(inner, str) else ()


def of_anthropic(data: dict[str, Any]) -> Any:
    """What comes of a stream in which an event stands where it belongs."""
    begin, inner = ANTHROPIC_BEGIN, data.get("delta", {})
    kind = inner.get("type") if isinstance(inner, dict) else None
    of_kind = {"type": BLOCKS.get(kind, "tool_use" if kind == "input_json_delta" else "tomorrows"), "name": "look"}
    if data["type"] == "message_start":
        return to_json(in_pieces("anthropic", stream_of("anthropic", data["message"])))
    if data["type"] == "message_delta":
        return to_json(in_pieces("anthropic", [begin, data, *ANTHROPIC_END[1:]]))
    if data["type"] == "content_block_start":
        return to_json(in_pieces("anthropic", [begin, {**data, "index": 0}, block(0, {})[-1], *ANTHROPIC_END]))
    if data["type"] == "content_block_delta":
        first, last = block(0, {"text": "", "thinking": "", **of_kind})
        return to_json(in_pieces("anthropic", [begin, first, {**data, "index": 0}, last, *ANTHROPIC_END]))
    return {}


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("reliability:MP59", "requirements:G5")
def test_every_known_anthropic_event_member_is_read_or_kept():
    from anthropic.types.beta import BetaRawMessageStreamEvent

    kinds = list(variants(BetaRawMessageStreamEvent))
    lost = set()
    for kind in kinds:
        lost |= lost_by(of_anthropic, kind, *(("message", "content") if "message" in kind.model_fields else ()))

    assert len(kinds) > 5
    assert set() == lost - NAMED.keys()


@pytest.mark.spec("reliability:MP59", "requirements:G5")
def test_every_known_chat_chunk_member_is_read_or_kept():
    from openai.types.chat import ChatCompletionChunk

    def read(body: dict[str, Any]) -> Any:
        return to_json(in_pieces("openai_chat", [{**body, "choices": [{**c, "index": 0} for c in body["choices"]]}]))

    lost = lost_by(read, ChatCompletionChunk, "choices", "delta", "tool_calls")

    assert set() == lost - NAMED.keys()


NOT_READ = {
    "response.audio.delta": "sound, which Responses gives to nobody who did not ask for it in its own words",
    "response.audio.done": "its end",
    "response.audio.transcript.delta": "its words",
    "response.audio.transcript.done": "their end",
}
"""Events of Responses that are told of and not read, and why."""
OURS = {"keepalive", "ping", "response.cancelled"}
"""Those that recorded streams hold and the SDK has no type for."""


@pytest.mark.spec("reliability:MP59", "requirements:G5")
def test_every_known_responses_event_is_read_or_reported():
    from openai.types.responses import ResponseStreamEvent

    kinds = {get_args(kind.model_fields["type"].annotation)[0]: kind for kind in variants(ResponseStreamEvent)}
    told = set()
    for name in kinds.keys() - READ - {"error"}:
        told.update(unread(in_pieces("openai", [RESPONSES[0], {"type": name}, *RESPONSES[1:]])))

    assert told == NOT_READ.keys()
    assert (READ | REPEATED) - kinds.keys() == OURS
    for name in READ & kinds.keys():
        assert set() == kinds[name].model_fields.keys() - IN_EVENT, name
