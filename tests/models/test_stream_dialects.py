"""
Tool calls of Chat Completions in every dialect of a stream: the calls come out as the model made them, or the reply is refused.

A dialect is a choice of how ids, indices, names and arguments are sent, and in which order; the table beside
``stepengine.models.openai_chat.calls`` says who sends what.
"""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import attrs
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from stepengine.data.json import thaw
from stepengine.data.models import ModelRequest, ToolCallChunk, ToolCallEnded, ToolCallStarted
from stepengine.data.tools import ToolSpec
from stepengine.errors import ModelError
from stepengine.models._byte_reader import ReplyReader
from stepengine.models.openai_chat.decode import ChatAccumulator
from tests.faults.scripts import chunk, event, google_chunk, unnamed
from tests.models.wires import made
from tests.models.wires import reader as wire_reader

NAMES = ("look", "get_weather", "get_time")
TOOLS = tuple(ToolSpec(name, "", {"type": "object"}) for name in NAMES)
IDS = ("first", "every", "changing", "none", "empty", "null")
INDICES = ("right", "zero", "missing", "null", "moved")
HEADS = ("first", "every", "pieces", "so far", "blank", "null")
TEXTS = ("pieces", "so far", "repeated", "repeated twice encoded", "object")
ORDERS = ("one by one", "mixed", "one chunk")


@attrs.frozen
class Dialect:
    """How a server sends the parts of a call, and the calls among each other."""

    ids: str
    index: str
    names: str
    text: str
    order: str

    def is_certain(self, wanted: list[tuple[str, Any]]) -> bool:
        """Whether the calls can be told apart by index, by id, or since each is whole before another one begins."""
        has_ids = self.ids in {"first", "every"}
        if self.ids == "changing" and self.names in {"every", "pieces", "so far"}:
            return False
        if self.names == "every" and self.text.startswith("repeated") and not has_ids:
            return False
        if self.index == "right":
            return True
        if self.index == "moved" and self.names in {"every", "pieces", "so far"}:
            return False
        if self.order == "mixed":
            return self.ids == "every" and self.index != "moved" and self.names not in {"pieces", "so far"}
        if self.order == "one chunk" and self.index in {"missing", "null"}:
            return True
        return has_ids or not any(one == other for one, other in pairwise(wanted))

    @property
    def is_another(self) -> bool:
        """Whether nothing tells the calls apart, or the stream is one of another dialect: Ollama's two calls alike, for one."""
        is_blind = self.order == "mixed" and self.index != "right" and self.ids != "every"
        is_said = self.index == "moved" or (self.ids == "changing" and self.text.startswith("repeated"))
        return is_blind or (is_said and self.names == "every")


dialects = st.builds(
    Dialect, st.sampled_from(IDS), st.sampled_from(INDICES), st.sampled_from(HEADS), st.sampled_from(TEXTS),
    st.sampled_from(ORDERS),
)  # fmt: skip
values = st.one_of(st.integers(0, 9), st.sampled_from(["", "}", '{"', "a b", "\\"]), st.just({"n": [1, {}]}))
arguments = st.dictionaries(st.sampled_from("nm"), values, max_size=2)
calls = st.lists(st.tuples(st.sampled_from(NAMES), arguments), min_size=1, max_size=4)


def cut(text: str, data: st.DataObject, most: int = 3) -> list[str]:
    places = sorted(data.draw(st.lists(st.integers(1, max(1, len(text) - 1)), max_size=most, unique=True)))
    bounds = [0, *[place for place in places if place < len(text)], len(text)]
    return [text[start:end] for start, end in pairwise(bounds)]


def so_far(pieces: list[str]) -> list[str]:
    return ["".join(pieces[: end + 1]) for end in range(len(pieces))]


def encode_text(given: dict[str, Any], dialect: Dialect, data: st.DataObject) -> list[Any]:
    text = json.dumps(given)
    if dialect.order == "one chunk":
        return [given if dialect.text == "object" else text]
    head = [""] if data.draw(st.booleans()) or dialect.names in {"pieces", "so far"} or dialect.order == "mixed" else []
    pieces = cut(text, data)
    match dialect.text:
        case "so far":
            return [*head, *so_far(pieces)]
        case "repeated":
            return [*head, *cut(text, data), text]
        case "repeated twice encoded":
            return [*head, *cut(text, data), json.dumps(text)]
        case "object":
            return [*head, given]
    return [*head, *pieces]


def encode_call(
    number: int, call: tuple[str, dict[str, Any]], dialect: Dialect, data: st.DataObject
) -> list[dict[str, Any]]:
    name, given = call
    texts = encode_text(given, dialect, data)
    if dialect.names in {"pieces", "so far"} and dialect.order != "one chunk":
        parts = cut(name, data, 1)
        names = parts if dialect.names == "pieces" else so_far(parts)
        texts = [*[""] * (len(names) - 1), *texts]
        names += [None] * (len(texts) - len(names))
    else:
        later = {"every": name, "blank": "", "null": "null"}.get(dialect.names)
        names = [name, *[later] * (len(texts) - 1)]
    entries = []
    for place, (part, text) in enumerate(zip(names, texts, strict=True)):
        entry: dict[str, Any] = {"function": {"name": part, "arguments": text}}
        match dialect.ids:
            case "first" if place == 0:
                entry["id"] = f"c{number}"
            case "every":
                entry["id"] = f"c{number}"
            case "changing":
                entry["id"] = f"c{number}-{place}"
            case "empty" | "null":
                entry["id"] = "" if dialect.ids == "empty" else None
        match dialect.index:
            case "right":
                entry["index"] = number
            case "zero":
                entry["index"] = 0
            case "null":
                entry["index"] = None
            case "moved":
                entry["index"] = number if place else 0
        entries.append(entry)
    return entries


def encode(made_calls: list[tuple[str, dict[str, Any]]], dialect: Dialect, data: st.DataObject) -> list[bytes]:
    sent = [encode_call(number, call, dialect, data) for number, call in enumerate(made_calls)]
    chunks: list[list[dict[str, Any]]] = []
    if dialect.order == "one chunk":
        chunks = [[entries[0] for entries in sent]]
    elif dialect.order == "mixed":
        # Heads come in order, as the numbers of the calls tell it; what is behind them in any.
        chunks = [[entries.pop(0)] for entries in sent]
        while left := [entries for entries in sent if entries]:
            chunks.append([data.draw(st.sampled_from(left)).pop(0)])
    else:
        chunks = [[entry] for entries in sent for entry in entries]
    finish = data.draw(st.sampled_from(["tool_calls", "stop", ""]))
    usage = unnamed({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}})
    empty = unnamed({"choices": None})
    ends = [*([chunk({}, finish)] if finish else []), usage, b"data: [DONE]\n\n"]
    return [empty, *[chunk({"tool_calls": entries}) for entries in chunks], *ends]


def read(sent: list[bytes]) -> tuple[list[Any], list[tuple[str, Any]]]:
    request = ModelRequest("vllm/m", tools=TOOLS)
    call = attrs.evolve(made("vllm"), request=request)
    reader = ReplyReader(ChatAccumulator(call, "m", None), call)
    deltas = [delta for each in sent for delta in reader.feed(each)]
    reply = reader.finish()
    return deltas, [(part.tool_name, thaw(part.input)) for part in reply.tool_calls if part.input_error is None]


def check_shown(deltas: list[Any], named: list[str]) -> list[Any]:
    """Each call is shown from its beginning to its end, in the order of the reply; return the arguments as shown."""
    assert [(d.index, d.tool_name) for d in deltas if isinstance(d, ToolCallStarted)] == [*enumerate(named)]
    assert sorted(d.index for d in deltas if isinstance(d, ToolCallEnded)) == [*range(len(named))]
    shown = [
        "".join(d.text for d in deltas if isinstance(d, ToolCallChunk) and d.index == n) for n in range(len(named))
    ]
    return [json.loads(text or "{}") for text in shown]


def check(sent: list[bytes], wanted: list[tuple[str, Any]], dialect: Dialect) -> None:
    """The calls are those that were made; of a dialect that is not certain some may be refused, but no other one runs."""
    deltas, found, refused = list[Any](), list[Any](), None
    try:
        deltas, found = read(sent)
    except ModelError as error:
        refused = error
    if refused is not None:
        assert refused.kind in {"protocol", "truncated", "malformed_call"}, refused
        assert not dialect.is_certain(wanted), refused
        return
    if not dialect.is_certain(wanted):
        left = [*wanted]
        for each in [each for each in found if each[0] in NAMES]:
            assert each in left, found
            left.remove(each)
        return
    assert found == wanted
    assert check_shown(deltas, [name for name, _ in wanted]) == [given for _, given in wanted]


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("ecosystem:EC116", "reliability:MP49")
@given(calls, dialects, st.data())
def test_calls_come_out_exactly_or_the_stream_is_refused(wanted, dialect, data):
    assume(not dialect.is_another)
    check(encode(wanted, dialect, data), wanted, dialect)


ARGUMENTS = json.dumps({"path": "/a", "more": {"path": [1, {}]}})
IN_PIECES = [
    pytest.param([ARGUMENTS], id="whole"),
    pytest.param([ARGUMENTS[:9], ARGUMENTS[9:]], id="in pieces"),
    pytest.param([ARGUMENTS[:9], ARGUMENTS[:12], ARGUMENTS], id="so far"),
    pytest.param([ARGUMENTS[:9], ARGUMENTS[9:], ARGUMENTS], id="repeated"),
    pytest.param([ARGUMENTS[:9], ARGUMENTS[9:], json.dumps(ARGUMENTS)], id="repeated twice encoded"),
]


@pytest.mark.parametrize("pieces", [*IN_PIECES, pytest.param([json.loads(ARGUMENTS)], id="an object")])
def test_arguments_behind_anthropics_wire_come_in_every_form(pieces):
    usage = {"input_tokens": 3, "output_tokens": 2}
    block = {"type": "tool_use", "id": "t1", "name": "look", "input": {}}
    deltas = [{"type": "input_json_delta", "partial_json": piece} for piece in pieces]
    events = [
        {
            "type": "message_start",
            "message": {"id": "m", "role": "assistant", "model": "m", "content": [], "usage": usage},
        },
        {"type": "content_block_start", "index": 0, "content_block": block},
        *[{"type": "content_block_delta", "index": 0, "delta": delta} for delta in deltas],
        {"type": "content_block_stop", "index": 0},
        {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": usage},
        {"type": "message_stop"},
    ]
    it = wire_reader("anthropic")
    shown = [delta for each in events for delta in it.feed(event(each))]

    assert [thaw(call.input) for call in it.finish().tool_calls] == [json.loads(ARGUMENTS)]
    assert check_shown(shown, ["look"]) == [json.loads(ARGUMENTS)]


@pytest.mark.parametrize("pieces", IN_PIECES)
@pytest.mark.parametrize("done", ["", None, ARGUMENTS])
def test_responses_items_without_arguments_have_those_of_their_pieces(pieces, done):
    item = {"type": "function_call", "id": "i1", "call_id": "c1", "name": "look", "arguments": ""}
    last = {**item, "id": "other", "arguments": done, "status": "completed"}
    delta = {"type": "response.function_call_arguments.delta", "output_index": 0}
    events = [
        {"type": "response.created", "response": {"id": "r", "output": []}},
        {"type": "response.output_item.added", "output_index": 0, "item": item},
        *[{**delta, "delta": piece} for piece in pieces],
        {"type": "response.output_item.done", "output_index": 0, "item": last},
        {"type": "response.completed", "response": {"id": "r", "model": "m", "status": "completed", "output": []}},
    ]
    it = wire_reader("openai")
    shown = [delta for each in events for delta in it.feed(event(each))]

    assert [thaw(call.input) for call in it.finish().tool_calls] == [json.loads(ARGUMENTS)]
    assert check_shown(shown, ["look"]) == [json.loads(ARGUMENTS)]


@pytest.mark.spec("reliability:MP49")
def test_a_call_with_a_repeated_id_is_refused():
    part = {"functionCall": {"id": "g1", "name": "look", "args": {"n": 1}}}
    it = wire_reader("google")
    for each in (google_chunk([part]), google_chunk([part], "STOP")):
        it.feed(unnamed(each))

    with pytest.raises(ModelError, match="'g1' of 'look' is repeated"):
        it.finish()
    call = {"id": "x", "function": {"name": "look", "arguments": "{}"}}
    again = [chunk({"tool_calls": [{**call, "index": index}]}) for index in (0, 1)]
    with pytest.raises(ModelError, match="'x' of 'look' is repeated"):
        read([*again, chunk({}, "tool_calls")])


def test_duplicate_call_error_names_the_call_and_server():
    head = {"index": 0, "function": {"name": "look", "arguments": "{}"}}

    with pytest.raises(
        ModelError, match=r"vllm violated its protocol.*'look' twice with the same arguments, without an id"
    ):
        read([chunk({"tool_calls": [head]}), chunk({"tool_calls": [head]}), chunk({}, "stop")])


def test_calls_behind_a_finish_reason_are_read_and_end():
    """Gemini's OpenAI endpoint says an end with each call."""
    calls = [{"index": 0, "id": f"c{n}", "function": {"name": "look", "arguments": f'{{"n": {n}}}'}} for n in range(2)]
    deltas, found = read([*[chunk({"tool_calls": [call]}, "stop") for call in calls], b"data: [DONE]\n\n"])

    assert found == [("look", {"n": 0}), ("look", {"n": 1})]
    assert check_shown(deltas, ["look", "look"]) == [{"n": 0}, {"n": 1}]
