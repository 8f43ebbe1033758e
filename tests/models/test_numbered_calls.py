"""
Calls in a stream are numbered as calls, in the order of the reply, whatever else it says between them: who watches tells
them apart by that, and finds each among the calls of the finished reply.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepengine.data.json import thaw
from stepengine.data.models import ModelReply, ToolCallChunk, ToolCallEnded, ToolCallStarted
from stepengine.models.base import split_reply_into_deltas
from tests.faults.scripts import GOOGLE_USAGE, chunk, event, google_chunk, unnamed
from tests.models.wires import FOUR, reader

USAGE = {"input_tokens": 3, "output_tokens": 2}


@attrs.frozen
class Said:
    """A part of a reply: a text, a thought, or a call with its arguments as JSON and how those are cut in two."""

    kind: str
    text: str
    cut: int = 0
    number: int = 0

    @property
    def pieces(self) -> list[str]:
        return [piece for piece in (self.text[: self.cut], self.text[self.cut :]) if piece]

    @property
    def name(self) -> str:
        return f"tool_{self.number}"


def anthropic(parts: list[Said], _: st.DataObject) -> list[bytes]:
    """The blocks in order; a search that the provider did by itself is a block, too."""
    head = {"id": "m", "role": "assistant", "model": "m", "content": [], "stop_reason": None, "usage": USAGE}
    events: list[dict[str, Any]] = [{"type": "message_start", "message": head}]
    for index, part in enumerate(parts):
        block, delta, member = {
            "text": ({"type": "text", "text": ""}, "text_delta", "text"),
            "thought": ({"type": "thinking", "thinking": "", "signature": "s"}, "thinking_delta", "thinking"),
            "call": ({"type": "tool_use", "id": f"t{index}", "name": part.name, "input": {}}, "input_json_delta", "partial_json"),
        }[part.kind]  # fmt: skip
        events.append({"type": "content_block_start", "index": index, "content_block": block})
        for piece in part.pieces:
            said = {"type": delta, member: piece}
            events.append({"type": "content_block_delta", "index": index, "delta": said})
        events.append({"type": "content_block_stop", "index": index})
    events.append({"type": "message_delta", "delta": {"stop_reason": "tool_use"}, "usage": USAGE})
    return [event(data) for data in (*events, {"type": "message_stop"})]


def responses(parts: list[Said], _: st.DataObject) -> list[bytes]:
    """The items in order."""
    events: list[dict[str, Any]] = [{"type": "response.created", "response": {"id": "r", "output": []}}]
    items = []
    for index, part in enumerate(parts):
        text = {"type": "output_text", "text": part.text, "annotations": []}
        item, delta = {
            "text": ({"type": "message", "role": "assistant", "content": [text]}, "response.output_text.delta"),
            "thought": (
                {"type": "reasoning", "summary": [{"type": "summary_text", "text": part.text}]},
                "response.reasoning_summary_text.delta",
            ),
            "call": (
                {"type": "function_call", "call_id": f"c{index}", "name": part.name, "arguments": part.text},
                "response.function_call_arguments.delta",
            ),
        }[part.kind]
        items.append({"id": f"i{index}", "status": "completed", **item})
        events.append({"type": "response.output_item.added", "output_index": index, "item": items[-1]})
        events += [{"type": delta, "output_index": index, "delta": piece} for piece in part.pieces]
        events.append({"type": "response.output_item.done", "output_index": index, "item": items[-1]})
    done = {"id": "r", "model": "m", "status": "completed", "output": items, "usage": USAGE}
    return [event(data) for data in (*events, {"type": "response.completed", "response": done})]


def chat(parts: list[Said], data: st.DataObject) -> list[bytes]:
    """Texts and thoughts first; the pieces of all calls side by side, each call's own in their order."""
    members = {"text": "content", "thought": "reasoning_content"}
    events = [chunk({members[part.kind]: part.text}) for part in parts if part.kind in members and part.text]
    calls = [part for part in parts if part.kind == "call"]
    for index, part in enumerate(calls):
        function = {"name": part.name, "arguments": ""}
        events.append(
            chunk({"tool_calls": [{"index": index, "id": f"c{index}", "type": "function", "function": function}]})
        )
    left = [(index, list(part.pieces)) for index, part in enumerate(calls)]
    while left := [(index, pieces) for index, pieces in left if pieces]:
        index, pieces = data.draw(st.sampled_from(left))
        events.append(chunk({"tool_calls": [{"index": index, "function": {"arguments": pieces.pop(0)}}]}))
    usage = {"prompt_tokens": 3, "completion_tokens": 2}
    return [*events, chunk({}, "tool_calls"), unnamed({"choices": [], "usage": usage}), b"data: [DONE]\n\n"]


def google(parts: list[Said], _: st.DataObject) -> list[bytes]:
    """The parts in order, each in a chunk of its own."""
    forms = [
        {"functionCall": {"name": part.name, "args": json.loads(part.text), "id": f"g{part.number}"}}
        if part.kind == "call"
        else {"text": part.text, **({"thought": True} if part.kind == "thought" else {})}
        for part in parts
    ]
    return [unnamed(google_chunk([form])) for form in forms] + [
        unnamed(google_chunk([{"text": ""}], "STOP", usageMetadata=GOOGLE_USAGE))
    ]


STREAMS: dict[str, Callable[[list[Said], st.DataObject], list[bytes]]] = {
    "anthropic": anthropic, "openai": responses, "openai_chat": chat, "google": google,
}  # fmt: skip
words = st.text("abc ", min_size=1, max_size=8)
arguments = st.dictionaries(st.sampled_from("abc"), st.integers(0, 99), max_size=2).map(json.dumps)
said = st.one_of(
    st.builds(Said, st.sampled_from(["text", "thought"]), words, st.integers(0, 9)),
    st.builds(Said, st.just("call"), arguments, st.integers(0, 20)),
)
replies = st.lists(said, min_size=1, max_size=6).map(
    lambda parts: [attrs.evolve(part, number=number) for number, part in enumerate(parts)]
)


def check_numbers(deltas: list[Any], reply: ModelReply, named: list[str]) -> None:
    """Each call has its place in the reply as its number, begins in that order, and gets its arguments while it is open."""
    calls = reply.tool_calls
    started = [(delta.index, delta.tool_name) for delta in deltas if isinstance(delta, ToolCallStarted)]

    assert [call.tool_name for call in calls] == named
    assert started == [*enumerate(named)]
    assert [*range(len(calls))] == sorted(delta.index for delta in deltas if isinstance(delta, ToolCallEnded))
    told, is_open = dict.fromkeys(range(len(calls)), ""), set[int]()
    for delta in deltas:
        if isinstance(delta, ToolCallStarted):
            is_open.add(delta.index)
        elif isinstance(delta, ToolCallChunk):
            assert delta.index in is_open
            told[delta.index] += delta.text
        elif isinstance(delta, ToolCallEnded):
            is_open.remove(delta.index)
    assert [json.loads(text or "{}") for text in told.values()] == [thaw(call.input) for call in calls]


@pytest.mark.spec("requirements:G4", "interfaces:IF12")
@given(parts=replies, data=st.data())
def test_calls_are_numbered_in_the_order_of_the_reply(parts, data):
    for wire in FOUR:
        check_calls(wire, parts, data)


def check_calls(wire, parts, data):
    it = reader(wire)
    deltas = [delta for piece in STREAMS[wire](parts, data) for delta in it.feed(piece)]
    reply = it.finish()

    named = [part.name for part in parts if part.kind == "call"]
    check_numbers(deltas, reply, named)
    # What a reply in one piece is shown as is numbered alike.
    check_numbers([*split_reply_into_deltas(reply)], reply, named)
