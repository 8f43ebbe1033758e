"""
`ScriptedModel` plays given replies, shows what it was asked, and fails on what is missing or left over.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepengine.data.json import compact
from stepengine.data.messages import RefusalPart, TextPart, ThinkingPart, ToolCallPart, UserMessage
from stepengine.data.models import (
    ModelReply,
    ModelRequest,
    ReplyDone,
    StopReason,
    TextChunk,
    ThinkingChunk,
    ToolCallChunk,
    ToolCallEnded,
    ToolCallStarted,
)
from stepengine.data.transcript import Transcript
from stepengine.data.usage import Usage
from stepengine.errors import DataError, ModelError
from stepengine.models.base import Provider
from stepengine.testing import ScriptedModel, failure, text, thinking, tool_call, tool_calls


def asking(said: str = "hello", model: str = "any/model") -> ModelRequest:
    return ModelRequest(model, messages=Transcript([UserMessage(said)]))


async def deltas_of(model: ScriptedModel, request: ModelRequest) -> list:
    return [delta async for delta in model.stream(request)]


@pytest.mark.spec("requirements:P4")
async def test_replies_come_in_order_whatever_form_they_were_written_in():
    """
    Strings, replies and functions of the request all become replies, one per request, for every model string.
    """
    model = ScriptedModel(
        ["one", text("two"), lambda request: f"you said {request.messages[0].text}", lambda _: text("4")]
    )

    replies = [await model.complete(asking(said, f"p{i}/m")) for i, said in enumerate(["a", "b", "c", "d"])]

    assert ["one", "two", "you said c", "4"] == [r.text for r in replies]
    assert ["a", "b", "c", "d"] == [r.messages[0].text for r in model.calls]
    assert isinstance(model, Provider)
    assert model.supports_model("p9/whatever")
    model.check("p9/whatever")
    model.assert_complete()


def test_the_helpers_write_replies():
    """
    Each helper gives an ordinary `ModelReply` with the stop reason that its content implies, unless told otherwise.
    """
    usage = Usage(input_tokens=3, output_tokens=1, requests=1)

    assert ModelReply("hi") == text("hi")
    assert ModelReply("hi", usage=usage, stop_reason=StopReason.MAX_TOKENS) == text(
        "hi", usage=usage, stop_reason="max_tokens"
    )
    assert ModelReply([ToolCallPart("", "add", {"a": 1})]) == tool_call("add", {"a": 1})
    assert StopReason.TOOL_USE is tool_call("add").stop_reason
    both = tool_calls(tool_call("add", {"a": 1}), tool_call("now"), text="let me see", usage=usage)
    assert [TextPart("let me see"), ToolCallPart("", "add", {"a": 1}), ToolCallPart("", "now")] == list(both.content)
    assert (StopReason.TOOL_USE, usage) == (both.stop_reason, both.usage)
    assert [ThinkingPart("hm"), ToolCallPart("", "now")] == list(thinking("hm", tool_call("now")).content)
    assert StopReason.TOOL_USE is thinking("hm", tool_call("now")).stop_reason


@pytest.mark.spec("requirements:P4")
async def test_a_request_beyond_the_script_shows_itself_and_is_not_retried():
    """
    The error says how many replies there were and ends with the last messages of the request.
    """
    model = ScriptedModel(["only"])
    await model.complete(asking())

    with pytest.raises(ModelError) as caught:
        await model.complete(asking("what is left?", "anthropic/claude"))

    assert (False, "script") == (caught.value.retryable, caught.value.kind)
    assert (
        "the script has 1 reply, and this is request 2 (model 'anthropic/claude', 1 messages)" in caught.value.message
    )
    assert "message 0, user: what is left?" in caught.value.message
    with pytest.raises(AssertionError, match="1 requests came after the last of 1 scripted replies"):
        model.assert_complete()


@pytest.mark.spec("requirements:P4")
def test_replies_that_nobody_asked_for_fail_and_are_listed():
    """
    `assert_complete` names every reply that is left.
    """
    model = ScriptedModel([text("a"), tool_call("add", {"a": 1}), failure(ValueError("boom"))])
    asyncio.run(model.complete(asking()))

    with pytest.raises(AssertionError) as caught:
        model.assert_complete()

    assert (
        "2 of 3 scripted replies were not asked for:\n  1:  <calls add {\"a\":1}>\n  2: failure(ValueError('boom'))"
    ) == str(caught.value)


async def test_a_failure_is_raised_as_it_is_after_the_text_that_a_stream_gave():
    """
    `failure(exc)` raises that very object; with `after=` a stream shows text first.
    """
    error = ModelError("overloaded", retryable=True)
    model = ScriptedModel([failure(error), failure(error, after="half a w"), lambda _: failure(error)])

    with pytest.raises(ModelError) as first:
        await model.complete(asking())
    seen = []
    with pytest.raises(ModelError) as second:
        async for delta in model.stream(asking()):
            seen.append(delta)  # noqa: PERF401
    with pytest.raises(ModelError) as third:
        await deltas_of(model, asking())

    assert error is first.value is second.value is third.value
    assert [TextChunk("half"), TextChunk(" a w")] == seen


parts = st.one_of(
    st.builds(TextPart, st.text()),
    st.builds(ThinkingPart, st.text()),
    st.builds(RefusalPart, st.text()),
    st.builds(ToolCallPart, st.just(""), st.just("add"), st.dictionaries(st.text(), st.booleans())),
)


@given(st.lists(parts, max_size=5), st.integers(1, 9))
def test_a_stream_gives_the_reply_in_small_pieces_and_ends_with_it(content, chunk):
    """
    Joined deltas are the reply's text, thinking and arguments; the last delta, and only that, is the reply.
    """
    reply = ModelReply(content)

    seen = asyncio.run(deltas_of(ScriptedModel([reply], chunk=chunk), asking()))

    assert ReplyDone(reply) == seen.pop()
    assert not [d for d in seen if isinstance(d, ReplyDone)]
    assert "".join(p.text for p in content if isinstance(p, TextPart | RefusalPart)) == joined(seen, TextChunk)
    assert "".join(p.text for p in content if isinstance(p, ThinkingPart)) == joined(seen, ThinkingChunk)
    calls = [p for p in content if isinstance(p, ToolCallPart)]
    assert [(i, "add") for i in range(len(calls))] == [
        (d.index, d.tool_name) for d in seen if isinstance(d, ToolCallStarted)
    ]
    assert list(range(len(calls))) == [d.index for d in seen if isinstance(d, ToolCallEnded)]
    for index, call in enumerate(calls):
        pieces = [d.text for d in seen if isinstance(d, ToolCallChunk) and d.index == index]
        assert compact(call.input) == "".join(pieces)
        assert all(len(piece) <= chunk for piece in pieces)


def joined(deltas: list, kind: type) -> str:
    return "".join(d.text for d in deltas if isinstance(d, kind))


def test_threads_share_a_script_without_losing_or_doubling_replies():
    """
    Every request gets one reply of its own, and `calls` holds every request.
    """
    model = ScriptedModel([str(i) for i in range(400)])

    with ThreadPoolExecutor(8) as pool:
        replies = list(pool.map(lambda i: asyncio.run(model.complete(asking(str(i)))).text, range(400)))

    assert sorted(map(str, range(400))) == sorted(replies)
    assert sorted(map(str, range(400))) == sorted(r.messages[0].text for r in model.calls)
    model.assert_complete()


@pytest.mark.parametrize("item", [None, 3, ValueError("boom"), ValueError, {"text": "hi"}])
def test_an_item_that_is_no_reply_is_refused_when_the_script_is_written(item):
    """
    The error names the item's place; an exception is told about `failure`.
    """
    with pytest.raises(DataError, match=r"item 1 of the script is .*failure\(exc\)"):
        ScriptedModel(["fine", item])


async def test_a_function_that_gives_no_reply_is_refused_when_it_is_asked():
    """
    What a scripted function returns is held to the same rule as the script.
    """
    with pytest.raises(DataError, match="a function of the script returned 7"):
        await ScriptedModel([lambda _: 7]).complete(asking())
