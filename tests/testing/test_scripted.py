"""
`ScriptedModel` plays given replies, shows what it was asked, and fails on what is missing or left over.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from functools import partial

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepengine import STEP, AgentCall, AgentDefinition, Ask, Engine, tool
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
from stepengine.testing import Clock, RunScript, ScriptedModel, failure, text, tool_call, tool_calls, with_thinking


def asking(said: str = "hello", model: str = "any/model") -> ModelRequest:
    return ModelRequest(model, messages=Transcript([UserMessage(said)]))


async def deltas_of(model: ScriptedModel, request: ModelRequest) -> list:
    return [delta async for delta in model.stream(request)]


@pytest.mark.spec("requirements:P4")
async def test_replies_come_in_order_in_every_form():
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
    assert [ThinkingPart("hm"), ToolCallPart("", "now")] == list(with_thinking("hm", tool_call("now")).content)
    assert StopReason.TOOL_USE is with_thinking("hm", tool_call("now")).stop_reason


@pytest.mark.spec("requirements:P4")
async def test_a_request_beyond_the_script_is_shown_and_not_retried():
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
def test_unused_replies_fail_and_are_listed():
    model = ScriptedModel([text("a"), tool_call("add", {"a": 1}), failure(ValueError("boom"))])
    asyncio.run(model.complete(asking()))

    with pytest.raises(AssertionError) as caught:
        model.assert_complete()

    assert (
        "2 of 3 scripted replies were not used:\n  1:  <calls add {\"a\":1}>\n  2: failure(ValueError('boom'))"
    ) == str(caught.value)


async def test_a_scripted_failure_is_raised_after_the_streamed_text():
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


@pytest.mark.deep
@pytest.mark.smoke
@given(st.lists(parts, max_size=5), st.integers(1, 9))
def test_a_stream_gives_small_pieces_and_ends_with_the_reply(content, chunk):
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
    model = ScriptedModel([str(i) for i in range(100)])

    with ThreadPoolExecutor(8) as pool:
        replies = list(pool.map(lambda i: asyncio.run(model.complete(asking(str(i)))).text, range(100)))

    assert sorted(map(str, range(100))) == sorted(replies)
    assert sorted(map(str, range(100))) == sorted(r.messages[0].text for r in model.calls)
    model.assert_complete()


async def later(_):
    return "hi"


@pytest.mark.spec("requirements:P4")
@pytest.mark.parametrize(
    ("item", "hint"),
    [
        (None, ""),
        (ValueError("boom"), "; wrap an exception in failure(...)"),
        ({"text": "hi"}, "; calls of tools are written tool_call(name, input)"),
        (later, "; such a function is a plain def that returns one reply"),
        ([text("a"), text("b")], "; several calls and texts become one reply with tool_calls(...)"),
        (TextPart("hi"), "; parts become a reply with ModelReply([...])"),
    ],
)
async def test_an_invalid_item_of_a_script_is_refused_with_advice(item, hint):
    with pytest.raises(DataError, match=r"item 1 of the script is .*failure\(exc\)") as written:
        ScriptedModel(["fine", item])
    assert written.value.message.endswith(f"a request to one of these{hint}")
    if not callable(item):
        with pytest.raises(DataError, match=r"a function of the script, .*<lambda>, returned") as asked:
            await ScriptedModel([lambda _: item]).complete(asking())
        assert asked.value.message.endswith(f"a request to one of these{hint}")


@pytest.mark.parametrize("script", ["hi", {"a": "b"}, None])
def test_a_script_is_a_list_or_a_function(script):
    with pytest.raises(
        DataError, match="a script must be a list of replies, or one function that answers every request, not"
    ):
        ScriptedModel(script)


async def test_a_coroutine_from_a_plain_function_is_refused_and_closed():
    """
    Nothing is left that was never awaited: warnings are errors here.
    """

    def hasty(request):
        return later(request)

    with pytest.raises(DataError, match="a plain def that returns one reply"):
        await ScriptedModel(hasty).complete(asking())


@pytest.mark.spec("requirements:P4")
async def test_one_function_answers_every_request():
    def parrot(request):
        said = request.messages[0].text
        return failure(ValueError(said)) if said == "boom" else f"you said {said}"

    model = ScriptedModel(parrot)
    assert ["you said a", "you said b"] == [(await model.complete(asking(said))).text for said in "ab"]
    assert "you said c" == (await deltas_of(model, asking("c")))[-1].reply.text
    with pytest.raises(ValueError, match="boom"):
        await model.complete(asking("boom"))
    assert "ScriptedModel(test_one_function_answers_every_request.<locals>.parrot, 4 calls)" == repr(model)
    assert () == model.unused
    model.assert_complete()
    model.skip_reply(asking("d"))
    assert ["a", "b", "c", "boom", "d"] == [request.messages[0].text for request in model.calls]


# --- what a reply can be --------------------------------------------------------------------------------------------------


def test_texts_may_precede_separate_and_follow_calls():
    reply = tool_calls("First.", tool_call("look", text="Hm."), "Then.", tool_call("look"), text("Done."), text="Well.")

    call = ToolCallPart("", "look")
    said = [TextPart(said) for said in ("Well.", "First.", "Hm.", "Then.", "Done.")]
    assert [*said[:3], call, said[3], call, said[4]] == list(reply.content)
    assert StopReason.TOOL_USE is reply.stop_reason
    assert StopReason.END_TURN is tool_calls("only", "words").stop_reason
    with pytest.raises(DataError, match=r"tool_calls accepts tool_call\(\.\.\.\), other replies and texts, not 7"):
        tool_calls(tool_call("look"), 7)


@pytest.mark.parametrize(
    "make", [partial(text, "hi"), partial(tool_call, "add"), partial(tool_calls, tool_call("add"))]
)
def test_a_reply_states_its_cost(make):
    assert [Decimal("0.0125")] * 3 == [make(cost=cost).cost for cost in (Decimal("0.0125"), 0.0125, "0.0125")]
    assert None is make().cost
    for wrong in ("much", -1, "NaN", float("inf")):
        with pytest.raises(DataError, match="is not an amount of US dollars"):
            make(cost=wrong)


@tool
def add(a: int, b: int = 0) -> int:
    """Add two numbers."""
    return a + b


@pytest.mark.spec("requirements:P4")
@pytest.mark.parametrize("stream", [False, True])
async def test_an_agent_survives_unreadable_arguments(stream):
    script = [
        tool_calls(
            "Let me see.", tool_call(add, '{"a": 1,'), "Or so:", tool_call(add, '{"a": 1}'), "There.", cost="0.5"
        ),
        text("1", cost="0.25"),
    ]
    model = ScriptedModel(script)
    seen = []
    agent = AgentDefinition("adder", model="any/model", tools=[add])
    async with Engine([agent], models=model, observers=[seen.append] if stream else ()) as engine:
        result = await engine.run("adder", "1 + 0")

    broken, fine = [message for message in model.calls[1].messages if message.role == "tool"]
    assert "the arguments are not a JSON object" in broken.text
    assert ("error", "1") == (broken.status, fine.text)
    assert "Let me see.Or so:There." == model.calls[1].messages[1].text
    assert ("1", Decimal("0.75")) == (result.text, result.cost)
    assert bool(seen) == stream


def test_text_arguments_are_read_as_a_provider_reads_them():
    (call,) = tool_call("add", '{"a": 1}').content
    assert ({"a": 1}, None, None, None) == (call.input, call.raw_input, call.input_error, call.provider_data)
    (broken,) = tool_call("add", "[1]").content
    assert ({}, "[1]") == (broken.input, broken.raw_input)
    assert broken.input_error


def asks_twice(ctx):
    first = yield from AgentCall("kid", prompt="one")
    said = yield from Ask("go on?")
    second = yield from AgentCall("kid", prompt="two")
    turn = yield STEP
    return [first, said, second, turn.text]


TWICE = [
    AgentDefinition("boss", model="any/boss", handle_steps=asks_twice, spawnable_agents=["kid"]),
    AgentDefinition("kid", model="any/kid"),
]


@pytest.mark.spec("studio:ST12")
async def test_each_run_has_its_own_script_shared_with_its_children():
    async with Engine(TWICE, models=RunScript(["a", "b", "c"], source="s.json")) as engine:
        runs = await asyncio.gather(*[engine.run("boss", answers={"go on?": "yes"}) for _ in range(3)])

    assert [["a", "yes", "b", "c"]] * 3 == [run.unwrap() for run in runs]


@pytest.mark.spec("studio:ST12")
@pytest.mark.parametrize("failures", [0, 2])
async def test_a_resumed_run_continues_its_script_after_recorded_attempts(tmp_path, failures):
    lost = [failure(ModelError("away", kind="overloaded", retryable=True)) for _ in range(failures)]
    replies = [*lost, "a", "b", "c"]
    async with Engine(TWICE, models=RunScript(replies), clock=Clock()) as engine:
        first = await engine.run("boss", journal=tmp_path / "run.jsonl")
    async with Engine(TWICE, models=RunScript(replies), clock=Clock()) as engine:
        again = await engine.resume(tmp_path / "run.jsonl", answers={"go on?": "yes"})
        fork = await engine.fork(tmp_path / "run.jsonl", at=1, edit="no", into=tmp_path / "fork.jsonl")

    assert "suspended" == first.status.value
    assert ["a", "yes", "b", "c"] == again.unwrap()
    assert ["a", "no", "b", "c"] == fork.unwrap()


@pytest.mark.spec("studio:ST12")
@pytest.mark.parametrize("stream", [False, True])
async def test_a_reply_of_a_run_script_is_marked_and_free(stream):
    async def reply(model):
        return (await deltas_of(model, asking()))[-1].reply if stream else await model.complete(asking())

    used = Usage(input_tokens=3, output_tokens=4)
    own = attrs.evolve(text("two", usage=used), model="mine/own")
    model = RunScript(["one", own], source="replies.json").for_run()
    one, two = await reply(model), await reply(model)
    with pytest.raises(ModelError, match=r"the script replies\.json has 2 replies, and this is request 3 ") as raised:
        await reply(model)

    assert ("scripted/replies.json", Decimal(0)) == (one.model, one.cost)
    assert own == two
    assert ("script", False) == (raised.value.kind, raised.value.retryable)
