"""Thoughts that a model wrote into its text, where its server has no parser for them (PV76)."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import httpx2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepengine.data.messages import AssistantMessage, TextPart, ThinkingPart, ToolCallPart, UserMessage
from stepengine.data.models import ModelReply, ModelRequest, ReplyDone, TextChunk, ThinkingChunk, ToolCallStarted
from stepengine.data.thoughts import TAGS
from stepengine.data.transcript import Transcript
from stepengine.models import OpenAIChatProvider
from stepengine.models.openai_chat.written_calls import WrittenThoughtFilter, parse_written_thoughts
from tests.faults.scripts import chunk
from tests.models.wires import TOOL

pytestmark = [pytest.mark.spec("providers:PV76")]

REQUEST = ModelRequest("vllm/m", messages=Transcript([UserMessage("hi")]), tools=(TOOL,))
MARK = {"provider": "vllm", "model": "m"}


def answering(*pieces: Any, stream: bool) -> Any:
    """Answer with the pieces of a text, and with what else stands in a delta."""
    deltas = [{"content": piece} if isinstance(piece, str) else piece for piece in pieces]

    def answer(request: httpx2.Request) -> httpx2.Response:
        if stream:
            body = b"".join([*[chunk(delta) for delta in deltas], chunk({}, "stop"), b"data: [DONE]\n\n"])
            return httpx2.Response(200, content=body, headers={"content-type": "text/event-stream"})
        message = {"content": "".join(piece for piece in pieces if isinstance(piece, str))}
        message |= {name: value for delta in deltas for name, value in delta.items() if name != "content"}
        return httpx2.Response(200, json={"choices": [{"message": message, "finish_reason": "stop"}]})

    return httpx2.MockTransport(answer)


async def asked(*pieces: Any, stream: bool, **options: Any) -> tuple[list[Any], ModelReply]:
    provider = OpenAIChatProvider("vllm", transport=answering(*pieces, stream=stream), **options)
    try:
        if not stream:
            return [], await provider.complete(REQUEST)
        *deltas, last = [delta async for delta in provider.stream(REQUEST)]
        assert type(last) is ReplyDone
        return deltas, last.reply
    finally:
        await provider.close()


def shown(deltas: list[Any]) -> tuple[str, str]:
    return tuple(["".join([d.text for d in deltas if type(d) is kind]) for kind in (ThinkingChunk, TextChunk)])  # type: ignore[return-value]


FORMS = [
    ("<think>deep</think>\n\nYes.", "deep", "Yes.", "<think>deep</think>\n\n"),
    (" \n<thinking>a\nb</thinking>c ", "a\nb", "c ", " \n<thinking>a\nb</thinking>"),
    ("[THINK]deep[/THINK]\nYes.", "deep", "Yes.", "[THINK]deep[/THINK]\n"),
    ("[THINK]never closed", "never closed", "", "[THINK]never closed"),
    ("<think>never closed\n", "never closed", "", "<think>never closed\n"),
    ("<think></think>Yes.", "", "Yes.", "<think></think>"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("text", "thought", "said", "written"), FORMS)
async def test_leading_written_thoughts_become_thinking_if_enabled(text, thought, said, written, stream):
    deltas, reply = await asked(*text, stream=stream, written_thoughts=True)

    assert said == reply.text
    assert (thought, {**MARK, "written": written}) == (reply.content[0].text, reply.content[0].provider_data)
    if stream:
        assert (thought, said) == (shown(deltas)[0].strip(), shown(deltas)[1])


@pytest.mark.parametrize("stream", [False, True])
async def test_thoughts_without_opening_tag_become_thinking_in_the_reply(stream):
    deltas, reply = await asked("It is hard.", "\n</think>\n\nYes.", stream=stream, written_thoughts=True)

    thinking, text = reply.content
    assert ("It is hard.", "Yes.", "It is hard.\n</think>\n\n") == (
        thinking.text,
        text.text,
        thinking.provider_data["written"],
    )
    if stream:
        assert ("", "It is hard.\n</think>\n\nYes.") == shown(deltas)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("text", ["Write <think> first.", "<thin air", " <b>x</b>", "[THIN]", "1 < 2"])
async def test_text_without_a_leading_thought_is_unchanged(text, stream):
    deltas, reply = await asked(*text, stream=stream, written_thoughts=True)

    assert (TextPart(text),) == reply.content
    if stream:
        assert ("", text) == shown(deltas)


@pytest.mark.parametrize("stream", [False, True])
async def test_without_the_option_written_thoughts_stay_text(stream):
    deltas, reply = await asked("<think>deep</think>", "\n\nYes.", stream=stream)

    assert ((TextPart("<think>deep</think>\n\nYes."),), "Yes.") == (reply.content, reply.text_without_thoughts)
    if stream:
        assert ("", "<think>deep</think>\n\nYes.") == shown(deltas)


@pytest.mark.parametrize("stream", [False, True])
async def test_blank_text_before_a_call_is_dropped(stream):
    call = {"tool_calls": [{"index": 0, "id": "x", "function": {"name": "look", "arguments": '{"at": "1"}'}}]}
    deltas, reply = await asked("\n\n", call, stream=stream, written_thoughts=True)
    assert [ToolCallPart] == [type(part) for part in reply.content]
    assert stream == (ToolCallStarted(0, "look") in deltas)
    assert ("", "") == shown(deltas)

    text = "<think>I could write <tool_call>{}</tool_call>.</think>Yes."
    _, reply = await asked(*text, stream=stream, written_thoughts=True, written_calls=True)
    assert ((), "Yes.") == (reply.tool_calls, reply.text)


def test_written_thoughts_return_only_to_their_own_model():
    text = "<think>deep</think>\n\nYes."
    reply = parse_written_thoughts(ModelReply(text, provider_data=MARK))
    history = Transcript([UserMessage("a"), AssistantMessage(reply.content), UserMessage("b")])

    def said_to(name: str, model: str = "m") -> Any:
        request = ModelRequest(f"{name}/{model}", messages=history)
        return json.loads(OpenAIChatProvider(name, "k")._encode(request, stream=False).content)["messages"][1]

    assert {"role": "assistant", "content": text} == said_to("vllm")
    assert {"role": "assistant", "content": "Yes."} == said_to("groq") == said_to("vllm", "other")


@given(
    st.sampled_from([*[(f"<{tag}>", f"</{tag}>") for tag in TAGS], ("[THINK]", "[/THINK]"), ("", "")]),
    st.text("ab <>[/]thinkTHINK\n", max_size=12),
    st.text("ab <>[/]thinkTHINK\n", max_size=12),
    st.lists(st.integers(0, 40), max_size=8),
)
def test_nothing_is_lost_however_a_stream_is_cut(tags, thought, said, cuts):
    text = f"{tags[0]}{thought}{tags[1]}{said}"
    edges = sorted({0, len(text), *[cut for cut in cuts if cut < len(text)]})
    told = WrittenThoughtFilter()
    deltas = [d for a, b in pairwise(edges) for d in told.convert_delta(TextChunk(text[a:b]))] + told.flush()
    whole = WrittenThoughtFilter()

    assert shown(deltas) == shown(whole.convert_delta(TextChunk(text)) + whole.flush())
    assert sorted("".join(shown(deltas)).split()) or not said.strip()
    reply = parse_written_thoughts(ModelReply(text, provider_data=MARK))
    written = [part.provider_data["written"] for part in reply.content if type(part) is ThinkingPart]
    assert text == "".join([*written, reply.text]) or not text.strip() or not reply.text
