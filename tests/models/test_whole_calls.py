"""Calls of Chat Completions in every form that servers give them, and calls that are nobody's, on all wires."""

from __future__ import annotations

import json
from typing import Any

import pytest

from stepengine.data.json import thaw
from stepengine.data.messages import AssistantMessage, ToolCallPart, ToolMessage, UserMessage
from stepengine.data.models import ModelReply, ModelRequest, StopReason
from stepengine.data.transcript import Transcript
from stepengine.errors import ModelError, TruncatedReply
from stepengine.models.anthropic.decode import decode as decode_anthropic
from stepengine.models.google.decode import decode as decode_google
from stepengine.models.openai.decode import decode as decode_responses
from stepengine.models.openai_chat.decode import decode
from tests.faults.scripts import anthropic_reply, chunk, google_chunk, response_object
from tests.models.wires import made, provider_of, reader

DECODE = {
    "anthropic": decode_anthropic,
    "openai": decode_responses,
    "openai_chat": decode,
    "google": decode_google,
}
SIGNATURE = {"google": {"thought_signature": "c2lnbmVk"}}
SIGNED = {
    "id": "function-call-1",
    "type": "function",
    "function": {"name": "look", "arguments": '{"at":"1"}'},
    "extra_content": SIGNATURE,
}
PLAIN = {"id": "call_2", "type": "function", "function": {"name": "look", "arguments": "{}"}}


def at_once(message: dict[str, Any], finish: str = "tool_calls") -> ModelReply:
    choice = {"index": 0, "message": {"role": "assistant", "content": None, **message}, "finish_reason": finish}
    return decode({"model": "m", "choices": [choice]}, made("openrouter"), "m", None)


def streamed(*deltas: dict[str, Any], finish: str = "tool_calls") -> ModelReply:
    it = reader("openrouter")
    for delta in deltas:
        it.feed(chunk(delta))
    it.feed(chunk({}, finish))
    return it.finish()


def sent_back(reply: ModelReply, *, provider: str = "openrouter", model: str = "m") -> list[dict[str, Any]]:
    calls = [
        ToolCallPart(f"c{n}", call.tool_name, call.input, provider_data=call.provider_data)
        for n, call in enumerate(reply.tool_calls)
    ]
    results = [ToolMessage(f"c{n}", "look", ["seen"]) for n in range(len(calls))]
    history = Transcript([UserMessage("go"), AssistantMessage(calls), *results])
    request = ModelRequest(f"{provider}/{model}", messages=history)
    return json.loads(provider_of(provider)._encode(request, stream=False).content)["messages"][1:]


# --- what a call holds beside its name and its arguments ------------------------------------------------------------


IN_PIECES = (
    {"tool_calls": [{"index": 0, "id": "function-call-1", "type": "function", "function": {"name": "look", "arguments": ""}}]},
    {"tool_calls": [{"index": 0, "function": {"arguments": '{"at":'}, "extra_content": SIGNATURE}]},
    {"tool_calls": [{"index": 0, "function": {"arguments": '"1"}'}}, {"index": 1, **PLAIN}]},
)  # fmt: skip


@pytest.mark.spec("ecosystem:EC91", "ecosystem:EC99", "requirements:G5")
@pytest.mark.parametrize("came", ["at once", "in pieces"])
def test_google_signature_on_openai_endpoint_returns_to_its_model(came):
    """Without it the next request was refused with a 400."""
    reply = at_once({"tool_calls": [SIGNED, PLAIN]}) if came == "at once" else streamed(*IN_PIECES)

    assert [SIGNED, PLAIN] == sent_back(reply)[0]["tool_calls"]
    for elsewhere in ({"model": "other"}, {"provider": "ollama"}):
        assert "extra_content" not in json.dumps(sent_back(reply, **elsewhere))


@pytest.mark.spec("reliability:MP59")
def test_unknown_call_members_go_back_to_the_model():
    call = {**PLAIN, "function": {"name": "look", "arguments": "{}", "strict": True}, "caller": {"type": "direct"}}

    assert [call] == sent_back(at_once({"tool_calls": [call]}))[0]["tool_calls"]
    assert [call] == sent_back(streamed({"tool_calls": [{"index": 0, **call}]}))[0]["tool_calls"]


# --- the form before tool_calls -------------------------------------------------------------------------------------

LEGACY = {"name": "look", "arguments": '{"at":"1"}'}
LEGACY_PIECES = (
    {"function_call": {"name": "look", "arguments": ""}},
    {"function_call": {"arguments": '{"at":'}},
    {"function_call": {"arguments": '"1"}'}},
)


@pytest.mark.spec("reliability:MP58", "requirements:G5")
@pytest.mark.parametrize("came", ["at once", "in pieces"])
def test_legacy_function_call_is_read_and_returned_in_its_form(came):
    """It used to be an empty reply, 14 of 14 recorded ones."""
    told: dict[str, Any] = {"finish": "function_call"}
    reply = at_once({"function_call": LEGACY}, **told) if came == "at once" else streamed(*LEGACY_PIECES, **told)

    assert [("look", {"at": "1"})] == [(call.tool_name, thaw(call.input)) for call in reply.tool_calls]
    assert reply.stop_reason is StopReason.TOOL_USE
    assistant, result = sent_back(reply)
    assert (LEGACY, None) == (assistant["function_call"], assistant.get("tool_calls"))
    assert result == {"role": "function", "name": "look", "content": "seen"}
    elsewhere, answered = sent_back(reply, provider="ollama")
    assert ("tool", elsewhere["tool_calls"][0]["id"]) == (answered["role"], answered["tool_call_id"])


def test_repeated_or_empty_function_call_is_not_another_call():
    twice = {"tool_calls": [PLAIN], "function_call": PLAIN["function"]}

    assert len(at_once(twice).tool_calls) == 1
    assert len(streamed({**twice, "tool_calls": [{"index": 0, **PLAIN}]}).tool_calls) == 1
    for nothing in (None, {}, {"name": "", "arguments": ""}, {"name": None, "arguments": None}):
        assert at_once({"content": "Hi.", "function_call": nothing}, "stop").tool_calls == ()
        assert streamed({"content": "Hi.", "function_call": nothing}, finish="stop").tool_calls == ()


@pytest.mark.spec("reliability:MP20")
def test_a_function_call_that_is_cut_is_no_reply():
    it = reader("openrouter")
    for delta in LEGACY_PIECES[:2]:
        it.feed(chunk(delta))
    with pytest.raises(TruncatedReply):
        it.finish(is_clean=False)


# --- calls of custom tools ------------------------------------------------------------------------------------------

CUSTOM = {"id": "call_1", "type": "custom", "custom": {"name": "sql", "input": "SELECT 1"}}


@pytest.mark.parametrize(
    "reply_of",
    [
        pytest.param(lambda: at_once({"tool_calls": [CUSTOM]}), id="at once"),
        pytest.param(
            lambda: streamed(
                {"tool_calls": [{"index": 0, **CUSTOM, "custom": {"name": "sql", "input": ""}}]},
                {"tool_calls": [{"index": 0, "custom": {"input": "SELECT 1"}}]},
            ),
            id="in pieces",
        ),
    ],
)
def test_custom_tool_call_is_refused_as_unanswerable(reply_of):
    with pytest.raises(ModelError, match="needs an action of its client: 'custom'") as caught:
        reply_of()

    assert ("unanswerable", False) == (caught.value.kind, caught.value.retryable)


EMPTY = {"custom": {"name": "", "input": ""}, "id": "call_1", "type": "function"}


@pytest.mark.parametrize("came", [at_once, streamed], ids=["at once", "in pieces"])
def test_empty_custom_member_beside_a_function_call_is_ignored(came):
    entry = {**EMPTY, "function": {"name": "look", "arguments": '{"at":"1"}'}}
    (call,) = came({"tool_calls": [entry if came is at_once else {"index": 0, **entry}]}).tool_calls

    assert ("look", {"at": "1"}) == (call.tool_name, call.input)
    assert "custom" not in call.provider_data.get("more", {})


# --- calls without a name -------------------------------------------------------------------------------------------


def unnamed_reply(wire: str, stop: str) -> dict[str, Any]:
    calls = [("", "{}")]
    if wire == "anthropic":
        return json.loads(anthropic_reply("", calls, stop))
    if wire == "openai":
        return response_object("", calls, stop)
    if wire == "google":
        ends = {"tool_use": "STOP", "max_tokens": "MAX_TOKENS"}
        return google_chunk([{"functionCall": {"args": {}}}], ends[stop])
    calls = [{"id": "x", "type": "function", "function": {"name": None, "arguments": "{}"}}]
    ends = {"tool_use": "tool_calls", "max_tokens": "length"}
    return {"choices": [{"index": 0, "message": {"tool_calls": calls}, "finish_reason": ends[stop]}]}


@pytest.mark.spec("reliability:MP48", "reliability:MP20")
@pytest.mark.parametrize("wire", DECODE)
def test_call_without_a_name_is_refused_and_retryable(wire):
    with pytest.raises(ModelError, match="it has no name") as caught:
        DECODE[wire](unnamed_reply(wire, "tool_use"), made(wire), "m", None)

    assert ("malformed_call", True) == (caught.value.kind, caught.value.retryable)
    # Whatever is last in a reply that was cut is text and not carried out.
    cut = DECODE[wire](unnamed_reply(wire, "max_tokens"), made(wire), "m", None)
    assert cut.stop_reason is StopReason.MAX_TOKENS
