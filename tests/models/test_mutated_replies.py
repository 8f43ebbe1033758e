"""
Replies that were changed at random: every one is a reply or a ``ModelError``, and nothing in a reply was made up.
"""

from __future__ import annotations

import json
import random
import re

import httpx2
import pytest

from stepengine.data.codec import encode_stored
from stepengine.data.messages import AssistantMessage, OpaquePart, ToolCallPart
from stepengine.data.models import ReplyDone, TextChunk, ThinkingChunk, ToolCallChunk, ToolCallStarted
from stepengine.errors import ModelError
from stepengine.models import BedrockProvider, GoogleInteractionsProvider
from stepengine.models._json import parse_json
from stepengine.models.base import split_reply_into_deltas
from tests.faults.cloud_server import AWS_STREAM
from tests.faults.cloud_server import message as framed
from tests.faults.scripts import WIRES, Wire, converse_events, converse_reply, interactions_reply, interactions_stream

pytestmark = pytest.mark.anyio
ODD = [
    None, True, False, 0, -1, 1, 7, 2**63, 2**70, 10**30, 1.5, 12.0, -0.0, 1e308, "", "x", "12", "null", "{}", "[]", "\u0000",
    [], {}, [None], ["a"], [[]], {"a": 1}, {"text": {}}, {"": ""}, ["text"], "\\ud800", "lone", [{"type": "text"}], "tool_use",
    {"type": "text", "text": 5}, {"index": 9}, [1, "b", {}], "text", "thinking", "stop", "STOP", "completed", "a" * 500,
]  # fmt: skip
RAW = [
    b'"\\ud83d"',
    b"1e400",
    b"NaN",
    b"-Infinity",
    b"9" * 5_000,
    b"[" * 300 + b"]" * 300,
    b'{"a":1,"a":{}}',
    b"\xff\xfe",
    b'"\\u0000"',
]
MARK = "\u2063odd\u2063"


def converse(api_key: str, base_url: str | None, **options):
    given = {"region": "us-east-1", "name": "bedrock_converse", "endpoint": "converse"}
    return BedrockProvider(api_key, base_url, **given, **options)


def as_lines(*said) -> list[bytes]:
    """The events of a stream of Converse, each in lines, so that it can be changed as those of others are."""
    return [f"event: {name}\ndata: {json.dumps(told)}\n\n".encode() for name, told in converse_events(*said)]


def in_messages(body: bytes) -> bytes:
    """Events in lines as the messages of AWS that they stand for."""
    found = re.findall(rb"event: (\w+)\ndata: (.*)\n\n", body)
    return b"".join([framed(told, event_type=name.decode(), message_type="event") for name, told in found])


CONVERSE = Wire(
    "bedrock_converse",
    converse,
    "bedrock_converse/amazon.nova-pro-v1:0",
    "",
    "",
    as_lines,
    converse_reply,
    None,
    (b"", 0),
    b"",
)
INTERACTIONS = Wire(
    "google_interactions",
    GoogleInteractionsProvider,
    "google_interactions/gemini-3-pro",
    "",
    "",
    interactions_stream,
    interactions_reply,
    None,
    (b"", 0),
    b"",
)
EACH = [*WIRES, CONVERSE, INTERACTIONS]
CALLS = [("add", '{"a": 2, "b": 3}'), ("add", '{"a": 40, "b": "nothing"}')]


def places(value, path=()):
    """Every place in a JSON value, as steps."""
    yield path
    members = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for step, member in members:
        yield from places(member, (*path, step))


def changed(value, chance: random.Random):
    """Return a JSON value with something odd at one place in it."""
    value = json.loads(json.dumps(value))
    path = chance.choice([place for place in places(value) if place])
    *steps, last = path
    node = value
    for step in steps:
        node = node[step]
    match chance.randrange(5):
        case 0:
            del node[last]
        case 1 if isinstance(node, dict):
            node[chance.choice(["type", "text", "content", "x", "id", "usage"])] = node.pop(last)
        case 2 if isinstance(node, list):
            node.insert(chance.randrange(len(node) + 1), node[last])
        case 3 if isinstance(node[last], dict | list):
            node[last] = [node[last]] if isinstance(node[last], dict) else dict(enumerate(map(str, node[last])))
        case _:
            node[last] = MARK if chance.random() < 0.2 else chance.choice(ODD)
    return value


def dumped(value, chance: random.Random) -> bytes:
    return json.dumps(value).encode().replace(json.dumps(MARK).encode(), chance.choice(RAW))


def mutated(body: bytes, chance: random.Random) -> bytes:
    """Return a body in one piece with one to three changes."""
    for _ in range(chance.choice([1, 1, 1, 2, 3])):
        try:
            body = dumped(changed(json.loads(body), chance), chance)
        except (ValueError, IndexError):
            break
    return scratched(body, chance) if chance.random() < 0.15 else body


def scratched(body: bytes, chance: random.Random) -> bytes:
    at = chance.randrange(len(body) + 1)
    match chance.randrange(3):
        case 0:
            return body[:at]
        case 1:
            return body[:at] + bytes([chance.randrange(256)]) + body[at + 1 :]
        case _:
            return body[:at] + body[at : at + 9] + body[at:]


def mutated_stream(events: list[bytes], chance: random.Random) -> bytes:
    """Return a stream of which an event was changed, or which came in another order."""
    events = list(events)
    for _ in range(chance.choice([1, 1, 2, 3])):
        at, other = chance.randrange(len(events)), chance.randrange(len(events))
        match chance.randrange(6):
            case 0:
                events.insert(other, events[at])
            case 1 if len(events) > 1:
                del events[at]
            case 2:
                events[at], events[other] = events[other], events[at]
            case _:
                found = re.search(rb"data: ([\[{].*)", events[at])
                if found:
                    try:
                        data = dumped(changed(json.loads(found[1]), chance), chance)
                    except (ValueError, IndexError):
                        continue
                    events[at] = events[at].replace(found[1], data)
    body = b"".join(events)
    return scratched(body, chance) if chance.random() < 0.1 else body


def strings(value):
    if isinstance(value, str):
        yield value
    for member in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from strings(member)


def said_in(body: bytes) -> set[str]:
    """Every text that a body holds as a value, those of nested JSON too."""
    found: set[str] = {"\n\n"}
    for line in [body, *re.findall(rb"data: ?(.*)", body)]:
        try:
            found.update(strings(parse_json(line)))
        except ValueError:
            continue
    return found


def put_together(text: str, pieces: set[str]) -> bool:
    """Return whether *text* is a row of *pieces*."""
    reached = {0}
    for at in range(len(text)):
        if at in reached:
            reached |= {at + len(piece) for piece in pieces if piece and text.startswith(piece, at)}
    return len(text) in reached


def check(reply, body: bytes) -> None:
    """Assert that *reply* can be stored and shown, and holds nothing that *body* does not say."""
    encode_stored(AssistantMessage(reply.content))
    list(split_reply_into_deltas(reply))
    json.dumps(reply.provider_data)
    pieces = said_in(body)
    for part in reply.content:
        if isinstance(part, ToolCallPart):
            assert put_together(part.tool_name, pieces), part
            spoken = body.decode("utf-8", "replace") + "".join(pieces)
            assert all(leaf in spoken for leaf in strings(dict(part.input))), part
        elif not isinstance(part, OpaquePart):
            assert put_together(part.text, pieces), (part, body)
    usage = reply.usage
    for figure in () if usage is None else (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens):
        assert type(figure) is int
        assert 0 <= figure <= 2**63
    for text in (reply.model, reply.request_id, reply.raw_stop_reason):
        assert text is None or isinstance(text, str)


class Server:
    """One provider, and what its server answers next."""

    def __init__(self, wire) -> None:
        self.wire = wire
        self.request = wire.request()
        self.provider = wire.make(transport=httpx2.MockTransport(lambda request: self.answer))
        self.answer = httpx2.Response(500)

    async def outcome(self, body: bytes, *, stream: bool):
        kind = "text/event-stream" if stream else "application/json"
        if stream and self.wire is CONVERSE:
            kind, body = AWS_STREAM, in_messages(body)
        self.answer = httpx2.Response(200, content=body, headers={"content-type": kind, "x-request-id": "r1"})
        try:
            if not stream:
                return await self.provider.complete(self.request)
            deltas = [delta async for delta in self.provider.stream(self.request)]
        except ModelError as error:
            return error
        return whole(deltas)


async def outcome(wire, body: bytes, *, stream: bool):
    """Return the reply of *wire* to *body*, or the error."""
    server = Server(wire)
    try:
        return await server.outcome(body, stream=stream)
    finally:
        await server.provider.close()


def whole(deltas):
    """Return the reply at the end of *deltas*, which are all of the kinds that they say."""
    for delta in deltas[:-1]:
        if isinstance(delta, TextChunk | ThinkingChunk | ToolCallChunk):
            assert type(delta.text) is str
        if isinstance(delta, ToolCallStarted):
            assert type(delta.tool_name) is str
    assert type(deltas[-1]) is ReplyDone
    return deltas[-1].reply


async def mutate(wire, count: int, seed: str) -> dict[str, int]:
    """Ask *wire* with *count* changed replies; return how many were replies and how many failures of each kind."""
    told: dict[str, int] = {}
    server = Server(wire)
    for number in range(count):
        chance = random.Random(f"{wire} {seed} {number}")
        stream = chance.random() < 0.5
        text, calls = chance.choice([("It is five.", []), ("Adding.", CALLS), ("", CALLS[:1])])
        stop = "tool_use" if calls else "end_turn"
        body = (
            mutated_stream(wire.stream(text, calls, stop), chance)
            if stream
            else mutated(wire.reply(text, calls, stop), chance)
        )
        try:
            found = await server.outcome(body, stream=stream)
            if isinstance(found, ModelError):
                assert found.message.isprintable()
                assert len(found.message) < 3_000
            else:
                check(found, body)
        except BaseException as error:
            error.add_note(f"{wire} {seed} {number} stream={stream}: {body[:3000]!r}")
            raise
        kind = found.kind if isinstance(found, ModelError) else "reply"
        told[kind] = told.get(kind, 0) + 1
    await server.provider.close()
    return told


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("reliability:R22", "reliability:MP28", "reliability:MP44")
@pytest.mark.parametrize("wire", EACH, ids=str)
async def test_mutated_reply_is_a_reply_or_a_model_error(wire):
    told = await mutate(wire, 100, "fast")

    assert told["reply"] > 10
    assert told["protocol"] > 10


HIDDEN = "The answer is 42."


def reply_with(**members):
    """A chat completion whose message has *members*."""
    choice = {"index": 0, "message": {"role": "assistant", **members}, "finish_reason": "stop"}
    return json.dumps({"id": "x", "model": "m", "choices": [choice]}).encode()


CHAT = next(wire for wire in WIRES if wire.name == "openai_chat")


@pytest.mark.spec("reliability:R22")
@pytest.mark.parametrize(
    "members",
    [
        {"content": {"a": 1}},
        {"content": {"text": HIDDEN}},
        {"content": 5},
        {"content": True},
        {"content": [{"type": "text", "text": {}}]},
        {"content": [{"type": "text", "text": 2**70}]},
        {"content": [[HIDDEN]]},
        {"content": "x", "tool_calls": {"a": 1}},
        {"content": "x", "tool_calls": [{"function": "add"}]},
        {"content": "x", "tool_calls": [{"function": {"name": {"a": 1}, "arguments": "{}"}}]},
        {"content": "x", "reasoning_details": "abc"},
        {"content": None, "refusal": ["no"]},
    ],
    ids=str,
)
async def test_member_of_another_type_is_a_protocol_error(members):
    failed = await outcome(CHAT, reply_with(**members), stream=False)

    assert (ModelError, "protocol", True) == (type(failed), failed.kind, failed.retryable)


@pytest.mark.spec("reliability:MP42", "reliability:MP40")
@pytest.mark.parametrize("arguments", [False, [], 1.5], ids=str)
async def test_non_object_arguments_are_an_input_error(arguments):
    calls = [{"id": "c", "function": {"name": "add", "arguments": arguments}}]
    reply = await outcome(CHAT, reply_with(content=None, tool_calls=calls), stream=False)
    (call,) = reply.tool_calls

    assert call.input_error
    assert json.dumps(arguments, separators=(",", ":")) == call.raw_input


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("reliability:R22", "reliability:R3")
@pytest.mark.parametrize("wire", EACH, ids=str)
async def test_odd_usage_figures_become_unknown_and_keep_the_reply(wire):
    for odd in ({}, [], "12", True, -3, 2**70, 1e300, None, [1], {"a": 1}):
        body = re.sub(rb"(?<=[a-zA-Z]\": )\d+(?=[,}])", json.dumps(odd).encode(), wire.reply("five", [], "end_turn"))
        found = await outcome(wire, body, stream=False)

        if isinstance(found, ModelError):  # what is kept of the message cannot be stored
            assert (2**70, "protocol") == (odd, found.kind)
            continue
        assert "five" == found.text
        assert found.usage is None or (0, True) == (found.usage.total_tokens, found.usage.at_least), odd


def anthropic_events(*events) -> bytes:
    names = [event["type"] if isinstance(event, dict) else "message" for event in events]
    return b"".join([f"event: {n}\ndata: {json.dumps(e)}\n\n".encode() for n, e in zip(names, events, strict=True)])


START = {"type": "message_start", "message": {"content": [], "usage": {}}}
TEXT = {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
CALL = {"type": "content_block_start", "index": 0, "content_block": {"type": "tool_use", "id": "t", "name": "add"}}
SAID = {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "{}"}}
WROTE = {"type": "content_block_delta", "index": 0, "delta": {"type": "input_json_delta", "partial_json": "{}"}}
STOPPED = {"type": "content_block_stop", "index": 0}
END = [{"type": "message_delta", "delta": {"stop_reason": "end_turn"}}, {"type": "message_stop"}]


@pytest.mark.spec("reliability:MP28", "ecosystem:EC71")
@pytest.mark.parametrize(
    "events",
    [
        [START, START, TEXT, SAID, STOPPED],
        [START, SAID, TEXT, STOPPED],
        [START, {**TEXT, "index": 1}, {**SAID, "index": 1}, {**STOPPED, "index": 1}],
        [START, {**TEXT, "index": False}, SAID, STOPPED],
        [START, TEXT, {**SAID, "index": False}, STOPPED],
        [START, TEXT, {**SAID, "index": -1}, STOPPED],
        [START, TEXT, WROTE, STOPPED],
        [START, CALL, SAID, STOPPED],
        [START, TEXT, SAID, STOPPED, SAID],
        [START, TEXT, TEXT, SAID, STOPPED],
        [START, TEXT, SAID],
        [START, {"type": "content_block_delta"}],
        [START, 7],
        [START, END[1]],
        [TEXT, SAID, STOPPED],
        [],
    ],
    ids=str,
)
async def test_events_in_an_impossible_order_break_the_protocol_of_messages(events):
    failed = await outcome(WIRES[0], anthropic_events(*events, *END), stream=True)

    assert ("protocol", True) == (failed.kind, failed.retryable)


CREATED = {"type": "response.created", "response": {"id": "r", "output": []}}
ITEM = {"type": "message", "id": "m", "content": [{"type": "output_text", "text": "five"}]}
ADDED = {"type": "response.output_item.added", "output_index": 0, "item": {**ITEM, "content": []}}
DELTA = {"type": "response.output_text.delta", "output_index": 0, "delta": "five"}
DONE = {"type": "response.output_item.done", "output_index": 0, "item": ITEM}
COMPLETED = {"type": "response.completed", "response": {"id": "r", "status": "completed", "output": []}}


@pytest.mark.spec("reliability:MP28")
@pytest.mark.parametrize(
    "events",
    [
        [CREATED, CREATED, ADDED, DELTA, DONE],
        [CREATED, DELTA, ADDED, DONE],
        [CREATED, {**ADDED, "output_index": 1}, {**DONE, "output_index": 1}, ADDED, DELTA, DONE],
        [CREATED, ADDED, ADDED, DONE],
        [CREATED, DONE],
        [CREATED, ADDED, DELTA],
        [CREATED, ADDED, DELTA, DONE, DELTA],
        [CREATED, ADDED, DELTA, DONE, DONE],
        [CREATED, ADDED, DELTA, DONE, ADDED],
        [CREATED, 7],
        [CREATED, ADDED, {**DELTA, "output_index": "0"}, DONE],
    ],
    ids=str,
)
async def test_events_in_an_impossible_order_break_the_protocol_of_responses(events):
    wire = next(wire for wire in WIRES if wire.name == "openai")
    failed = await outcome(wire, anthropic_events(*events, COMPLETED), stream=True)

    assert ("protocol", True) == (failed.kind, failed.retryable)
    assert "five" == (await outcome(wire, anthropic_events(CREATED, ADDED, DELTA, DONE, COMPLETED), stream=True)).text


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("reliability:MP24")
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "complete"])
@pytest.mark.parametrize("wire", EACH, ids=str)
async def test_reply_text_is_limited_to_four_mebibytes(wire, stream):
    for size, kind in ((4 * 1024 * 1024, None), (4 * 1024 * 1024 + 1, "too_large")):
        text = "a" * size
        body = b"".join(wire.stream(text, [], "end_turn")) if stream else wire.reply(text, [], "end_turn")
        found = await outcome(wire, body, stream=stream)

        assert kind == getattr(found, "kind", None)
        assert not getattr(found, "retryable", False)
