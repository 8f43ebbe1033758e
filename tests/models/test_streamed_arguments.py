"""Arguments of calls that Gemini streams in pieces, ``streamFunctionCallArguments``: by key path, kind by kind."""

from __future__ import annotations

import json
import re
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepengine.data.json import thaw
from stepengine.data.messages import AssistantMessage, ToolMessage, UserMessage
from stepengine.data.models import (
    ModelReply,
    ModelRequest,
    StopReason,
    ToolCallChunk,
    ToolCallEnded,
    ToolCallStarted,
)
from stepengine.data.transcript import Transcript
from stepengine.errors import ModelError, TruncatedReply
from stepengine.models.google.decode import decode
from tests.faults.scripts import google_chunk, unnamed
from tests.models.wires import made, provider_of, reader, sent

SIGNED = {"thoughtSignature": "c2lnbmVk"}


def call_of(**members: Any) -> dict[str, Any]:
    return {"functionCall": members}


def text(path: str, said: str, *, more: bool = False) -> dict[str, Any]:
    return {"jsonPath": path, "stringValue": said, **({"willContinue": True} if more else {})}


def going(*pieces: dict[str, Any]) -> dict[str, Any]:
    return call_of(partialArgs=list(pieces), willContinue=True)


BEGIN = {**call_of(name="book", id="fc_1", willContinue=True), **SIGNED}
WHOLE = [
    BEGIN,
    going(text("$.city", "New ", more=True)),
    going(text("$.city", "Delhi")),
    going({"jsonPath": "$.nights", "numberValue": 3}, {"jsonPath": "$.breakfast", "boolValue": False}),
    going({"jsonPath": "$.until", "nullValue": "NULL_VALUE"}, {"jsonPath": "$.until2", "nullValue": None}),
    going({"jsonPath": "$.guests[0].name", "stringValue": "Ada"}, text("$.guests[1]['full name']", "Bo", more=True)),
    going(text("$.guests[1]['full name']", "b"), {"jsonPath": "$.guests[1]['full name']"}),
    call_of(),
]
ARGUMENTS = {
    "city": "New Delhi",
    "nights": 3,
    "breakfast": False,
    "until": None,
    "until2": None,
    "guests": [{"name": "Ada"}, {"full name": "Bob"}],
}


def chunks(parts: list[dict[str, Any]], finish: str = "STOP") -> list[bytes]:
    last = len(parts) - 1
    return [unnamed(google_chunk([part], finish if index == last else None)) for index, part in enumerate(parts)]


def streamed(parts: list[dict[str, Any]], finish: str = "STOP") -> tuple[list[Any], ModelReply]:
    it = reader("google")
    deltas = [delta for piece in chunks(parts, finish) for delta in it.feed(piece)]
    return deltas, it.finish()


@pytest.mark.spec("requirements:G5", "ecosystem:EC91")
def test_call_with_streamed_arguments_gets_all_of_them():
    """Each piece used to be a call by itself, so that the tool ran with nothing; 4 of 4 recorded streams did."""
    deltas, reply = streamed(WHOLE)
    (call,) = reply.content

    assert ("book", ARGUMENTS, None) == (call.tool_name, thaw(call.input), call.input_error)
    assert (StopReason.TOOL_USE, "fc_1", SIGNED["thoughtSignature"]) == (
        reply.stop_reason,
        call.provider_data["id"],
        call.provider_data["signature"],
    )
    assert [ToolCallStarted, ToolCallChunk, ToolCallEnded] == [type(delta) for delta in deltas]
    assert json.loads(deltas[1].text) == ARGUMENTS


def test_streamed_call_goes_back_whole_and_signed():
    _, reply = streamed(WHOLE)
    numbered = [attrs.evolve(call, tool_call_id="c1") for call in reply.tool_calls]
    asked = UserMessage("go"), AssistantMessage(numbered), ToolMessage("c1", "book", ["done"])
    (part,) = sent_as("m", *asked)[1]["parts"]

    assert part == {"functionCall": {"id": "fc_1", "name": "book", "args": ARGUMENTS}, **SIGNED}


def sent_as(model: str, *messages: Any) -> list[dict[str, Any]]:
    request = ModelRequest(f"google/{model}", messages=Transcript(messages))
    return json.loads(provider_of("google")._encode(request, stream=False).content)["contents"]


@pytest.mark.spec("reliability:MP20")
@pytest.mark.parametrize("end", range(len(WHOLE)))
def test_stream_cut_inside_a_call_is_truncated(end):
    """Neither where the connection ends, nor where an end is told of before the call is whole."""
    it = reader("google")
    for piece in chunks(WHOLE)[:end]:
        it.feed(piece)
    with pytest.raises(TruncatedReply):
        it.finish(is_clean=False)
    if end:
        with pytest.raises(TruncatedReply, match="its call of 'book' is incomplete"):
            streamed(WHOLE[:end])


@pytest.mark.spec("reliability:MP55", "reliability:MP54")
def test_call_cut_by_limit_is_text_and_by_refusal_dropped():
    _, cut = streamed(WHOLE[:3], "MAX_TOKENS")
    _, refused = streamed([{"text": "I"}, *WHOLE[:3]], "SAFETY")

    assert (StopReason.MAX_TOKENS, '{"city":"New Delhi"}') == (cut.stop_reason, cut.content[-1].raw_input)
    assert (StopReason.REFUSAL, "I", ()) == (refused.stop_reason, refused.text, refused.tool_calls)


@pytest.mark.parametrize(
    "parts",
    [
        pytest.param([going(text("$.city", "x"))], id="a piece of no call"),
        pytest.param([BEGIN, call_of(name="look", args={})], id="another call meanwhile"),
        pytest.param([BEGIN, going({"jsonPath": "$.a", "mapValue": {"b": 1}}), call_of()], id="a kind of the future"),
        *[
            pytest.param([BEGIN, going(text(path, "x")), call_of()], id=path or "no path")
            for path in ("", "$", "city", "$.a..b", "$.a[", "$.a[1]", "$[0]", "$.a[x]", "$" + ".a" * 101)
        ],
        pytest.param([BEGIN, going(text("$.a", "x"), text("$.a.b", "y")), call_of()], id="inside of a text"),
    ],
)  # fmt: skip
def test_pieces_that_cannot_be_joined_are_refused(parts):
    with pytest.raises(ModelError) as caught:
        streamed(parts)

    assert caught.value.kind in {"protocol", "malformed_call", "truncated"}
    assert caught.value.retryable


def test_partial_arguments_in_a_whole_reply_are_joined():
    part = call_of(name="book", partialArgs=[text("$.city", "Oslo")])
    reply = decode(google_chunk([part], "STOP"), made("google"), "m", None)

    assert [{"city": "Oslo"}] == [thaw(call.input) for call in reply.tool_calls]


@pytest.mark.spec("reliability:MP59")
def test_unknown_call_members_go_back_to_the_model():
    part = {"functionCall": {"name": "look", "args": {}, "mood": "calm"}, "newer": [1]}
    begun = [call_of(name="look", mood="calm", willContinue=True), {**call_of(), "newer": [1]}]
    replies = [decode(google_chunk([part], "STOP"), made("google"), "m", None), streamed(begun)[1]]
    for reply in replies:
        numbered = [attrs.evolve(call, tool_call_id="c1") for call in reply.tool_calls]
        asked = UserMessage("go"), AssistantMessage(numbered), ToolMessage("c1", "look", ["done"])

        assert [part] == sent_as("m", *asked)[1]["parts"]
        assert "mood" not in json.dumps(sent("anthropic", *asked))


# --- any arguments ----------------------------------------------------------------------------------------------------

LEAVES = st.none() | st.booleans() | st.integers(-(10**9), 10**9) | st.text(max_size=8)
VALUES = st.recursive(
    LEAVES,
    lambda inside: st.lists(inside, min_size=1, max_size=3) | st.dictionaries(st.text(max_size=5), inside, min_size=1, max_size=3),
    max_leaves=12,
)  # fmt: skip


def paths(value: Any, path: str = "$") -> list[tuple[str, Any]]:
    if isinstance(value, dict):
        named = [(f".{key}" if re.fullmatch("[a-z]+", key) else f"[{json.dumps(key)}]", key) for key in value]
        return [leaf for step, key in named for leaf in paths(value[key], path + step)]
    if isinstance(value, list):
        return [leaf for index, inner in enumerate(value) for leaf in paths(inner, f"{path}[{index}]")]
    return [(path, value)]


def in_pieces(path: str, value: Any, cut: int) -> list[dict[str, Any]]:
    if isinstance(value, str):
        return [text(path, value[:cut], more=True), text(path, value[cut:])]
    kind = "nullValue" if value is None else "boolValue" if isinstance(value, bool) else "numberValue"
    return [{"jsonPath": path, kind: value}]


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("requirements:G5")
@given(st.dictionaries(st.text(max_size=5), VALUES, max_size=4), st.integers(0, 8), st.integers(1, 4))
def test_any_arguments_are_the_same_in_pieces_as_at_once(arguments, cut, together):
    pieces = [piece for path, value in paths(arguments) for piece in in_pieces(path, value, cut)]
    parts = [going(*pieces[at : at + together]) for at in range(0, len(pieces), together)]
    _, reply = streamed([BEGIN, *parts, call_of()])

    (call,) = reply.tool_calls
    whole = decode(google_chunk([call_of(name="book", args=arguments)], "STOP"), made("google"), "m", None)
    assert whole.tool_calls[0].input == call.input
