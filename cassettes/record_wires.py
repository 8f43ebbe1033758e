"""
Records the exchanges of the four wires again: ``python -m cassettes.record_wires [FOLDER]``.

A server on this machine speaks the four protocols and says what is written below. Requests go through our codecs and the
providers' own SDKs, and what goes over the wire becomes one cassette per wire. No key, no provider, no network. The texts
are ours; the forms are those that the protocols document.
"""

# ruff: noqa: T201 - a script that says what it wrote

from __future__ import annotations

import asyncio
import json
import queue
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs

from cassettes.local_server import Answer, Redirected, save_cassette, serve, source_of
from stepengine.data.messages import (
    AssistantMessage,
    DocumentPart,
    ImagePart,
    Message,
    ToolCallPart,
    ToolMessage,
    UserMessage,
)
from stepengine.data.models import ModelReply, ModelRequest, ModelSettings, ReplyDone, Thinking
from stepengine.data.tools import ToolSpec
from stepengine.data.transcript import Transcript
from stepengine.errors import ModelError
from stepengine.models import AnthropicProvider, GoogleProvider, OpenAIChatProvider, OpenAIProvider, Provider
from stepengine.testing import Cassette, RecordTransport

WIRES = Path(__file__).resolve().parent / "wires"
SOURCE = source_of("record_wires")
HOST = "https://wires.test"
IDENTIFIED = {"request-id": "req_local"}
SIGNATURE = "c2lnbmVkIGJ5IHRoZSBzZXJ2ZXIgb2YgdGhlIHRlc3RzIC8rPQ=="
PNG = bytes.fromhex(
    "89504e470d0a1a0a0000000d49484452000000010000000108060000001f15c4890000000d49444154789c6360000000000500017ff37e2c0000000049454e44ae426082"
)
NUMBERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a", "b"]}
TOOLS = (ToolSpec("add", "Add two numbers.", NUMBERS),)

Json = dict[str, Any]


# --- what is said ---------------------------------------------------------------------------------------------------


@attrs.frozen
class Said:
    """
    A reply to be said.

    Attributes:
        text: Its text.
        thinking: What was thought before, which is signed.
        calls: Inputs of the tool.
        tool: The name of the tool.
        refusal: The words of a refusal, in the place of a text.
        is_cut: Whether it ends at the output limit.
        breaks_off: Whether its stream ends before the protocol's end.
    """

    text: str = ""
    thinking: str = ""
    calls: tuple[Json, ...] = ()
    tool: str = "add"
    refusal: str = ""
    is_cut: bool = False
    breaks_off: bool = False

    @property
    def ending(self) -> str:
        """Return our word for how it ends."""
        return "refusal" if self.refusal else "length" if self.is_cut else "calls" if self.calls else "end"


@attrs.frozen
class Scene:
    """
    A conversation.

    Attributes:
        asked: What the user says.
        replies: What the model says, one reply after another; between them are the results of the calls.
        settings: How it is asked.
        status: The HTTP status, of an error when it is not 200.
        stream_only: Whether it can only happen to a stream.
    """

    asked: tuple[Any, ...]
    replies: tuple[Said, ...] = ()
    settings: ModelSettings = ModelSettings(max_tokens=4_000)
    status: int = 200
    stream_only: bool = False


THINKING = ModelSettings(max_tokens=4_000, thinking=Thinking("extended", 2_000))
TWO = ({"a": 2, "b": 3}, {"a": 4, "b": 5})
SCENES = {
    "text": Scene(("What is 2 + 3?",), (Said("It is five: 2 + 3 = 5. \u2713"),)),
    "calls": Scene(("Add 2 and 3, and 4 and 5.",), (Said("I add both.", calls=TWO), Said("They are 5 and 9."))),
    "thinking": Scene(
        ("Think, then add 2 and 3.",),
        (Said("Let me see.", "Two and three.\nThat is a sum.", TWO[:1]), Said("It is 5.")),
        THINKING,
    ),
    "refusal": Scene(("Say something bad.",), (Said(refusal="I will not say that."),)),
    "cut": Scene(("Count to a thousand.",), (Said("One, two, three", is_cut=True),)),
    "media": Scene(
        (
            "What do you see?",
            ImagePart(data=PNG, mime_type="image/png"),
            DocumentPart(data=b"Two words.\n", mime_type="text/plain", name="words.txt"),
        ),
        (Said("One pixel, and a page of two words."),),
    ),
    "error": Scene(("Are you there?",), status=429),
    "breaks off": Scene(("Are you still there?",), (Said("Yes, I am", breaks_off=True),), stream_only=True),
}


# --- how the wires say it -------------------------------------------------------------------------------------------


def pieces(text: str) -> list[str]:
    """Return a text in the pieces in which a stream brings it."""
    return [text[start : start + 7] for start in range(0, len(text), 7)]


def sse(data: Json, name: str | None = None) -> bytes:
    """Return one event of a stream."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(data)}\n\n".encode()


def cut_short(events: list[bytes], said: Said, terminal: int) -> bytes:
    """Return the stream of *events*, without the last *terminal* ones, which end it, when it breaks off."""
    return b"".join(events[:-terminal] if said.breaks_off else events)


def anthropic_blocks(said: Said) -> list[Json]:
    """Return the content of a reply of the Messages protocol."""
    blocks: list[Json] = []
    if said.thinking:
        blocks.append({"type": "thinking", "thinking": said.thinking, "signature": SIGNATURE})
    if said.text or said.refusal:
        blocks.append({"type": "text", "text": said.text or said.refusal})
    return blocks + [
        {"type": "tool_use", "id": f"toolu_{n}", "name": said.tool, "input": value}
        for n, value in enumerate(said.calls)
    ]


ANTHROPIC_STOPS = {"end": "end_turn", "calls": "tool_use", "length": "max_tokens", "refusal": "refusal"}
ANTHROPIC_USAGE = {"input_tokens": 25, "cache_read_input_tokens": 5, "cache_creation_input_tokens": 2}


def anthropic_plain(said: Said) -> Json:
    """Return a message of the Messages protocol."""
    head = {"id": "msg_local", "type": "message", "role": "assistant", "model": "claude-sonnet-4-5"}
    stop = {"stop_reason": ANTHROPIC_STOPS[said.ending], "stop_sequence": None}
    return {**head, "content": anthropic_blocks(said), **stop, "usage": {**ANTHROPIC_USAGE, "output_tokens": 12}}


def anthropic_deltas(block: Json) -> tuple[Json, list[Json]]:
    """Return how a block begins, and what is added to it."""
    if block["type"] == "text":
        return {**block, "text": ""}, [{"type": "text_delta", "text": p} for p in pieces(block["text"])]
    if block["type"] == "tool_use":
        parts = pieces(json.dumps(block["input"]))
        return {**block, "input": {}}, [{"type": "input_json_delta", "partial_json": p} for p in ["", *parts]]
    thoughts = [{"type": "thinking_delta", "thinking": p} for p in pieces(block["thinking"])]
    begun = {"type": "thinking", "thinking": "", "signature": ""}
    return begun, [*thoughts, {"type": "signature_delta", "signature": block["signature"]}]


def anthropic_stream(said: Said) -> bytes:
    """Return a stream of the Messages protocol."""
    whole = anthropic_plain(said)
    usage = {**ANTHROPIC_USAGE, "output_tokens": 1}
    message = {**whole, "content": [], "stop_reason": None, "usage": usage}
    events: list[Json] = [{"type": "message_start", "message": message}, {"type": "ping"}]
    for index, block in enumerate(whole["content"]):
        begun, deltas = anthropic_deltas(block)
        events.append({"type": "content_block_start", "index": index, "content_block": begun})
        events += [{"type": "content_block_delta", "index": index, "delta": delta} for delta in deltas]
        events.append({"type": "content_block_stop", "index": index})
    stop = {"stop_reason": whole["stop_reason"], "stop_sequence": None}
    events += [{"type": "message_delta", "delta": stop, "usage": {"output_tokens": 12}}, {"type": "message_stop"}]
    return cut_short([sse(event, event["type"]) for event in events], said, 2)


def responses_items(said: Said) -> list[Json]:
    """Return the output of a reply of the Responses protocol."""
    items: list[Json] = []
    if said.thinking:
        summary = [{"type": "summary_text", "text": said.thinking}]
        items.append({"type": "reasoning", "id": "rs_local", "summary": summary, "encrypted_content": SIGNATURE})
    if said.text:
        part: Json = {"type": "output_text", "text": said.text, "annotations": []}
        items.append({"type": "message", "id": "msg_local", "role": "assistant", "content": [part]})
    if said.refusal:
        part = {"type": "refusal", "refusal": said.refusal}
        items.append({"type": "message", "id": "msg_local", "role": "assistant", "content": [part]})
    for n, value in enumerate(said.calls):
        ids = {"id": f"fc_{n}", "call_id": f"call_{n}"}
        items.append({"type": "function_call", **ids, "name": said.tool, "arguments": json.dumps(value)})
    status = "incomplete" if said.is_cut else "completed"
    return [item if item["type"] == "reasoning" else {**item, "status": status} for item in items]


def responses_plain(said: Said) -> Json:
    """Return a response object of the Responses protocol."""
    details = {"reason": "max_output_tokens"} if said.is_cut else None
    status = "incomplete" if said.is_cut else "completed"
    head = {"id": "resp_local", "object": "response", "created_at": 1_767_225_600, "model": "gpt-5", "status": status}
    counts = {"input_tokens_details": {"cached_tokens": 5}, "output_tokens_details": {"reasoning_tokens": 0}}
    usage = {"input_tokens": 30, "output_tokens": 12, "total_tokens": 42, **counts}
    return {**head, "error": None, "incomplete_details": details, "output": responses_items(said), "usage": usage}


def responses_events(index: int, item: Json) -> Iterator[Json]:
    """Give the events of one item."""
    at = {"output_index": index, "item_id": item["id"]}
    empty = {"message": {"content": []}, "function_call": {"arguments": ""}, "reasoning": {"summary": []}}
    begun = {**item, **empty[item["type"]]}
    yield {"type": "response.output_item.added", "output_index": index, "item": begun}
    if item["type"] == "reasoning":
        kind, text, at = "reasoning_summary_text", item["summary"][0]["text"], {**at, "summary_index": 0}
    elif item["type"] == "function_call":
        kind, text = "function_call_arguments", item["arguments"]
    else:
        part = item["content"][0]
        kind, text = ("refusal", part["refusal"]) if part["type"] == "refusal" else ("output_text", part["text"])
        at = {**at, "content_index": 0}
    yield from ({"type": f"response.{kind}.delta", **at, "delta": piece} for piece in pieces(text))
    yield {"type": "response.output_item.done", "output_index": index, "item": item}


def responses_stream(said: Said) -> bytes:
    """Return a stream of the Responses protocol."""
    whole = responses_plain(said)
    begun = {**whole, "status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
    events: list[Json] = [{"type": "response.created", "response": begun}]
    for index, item in enumerate(whole["output"]):
        events += responses_events(index, item)
    events.append({"type": f"response.{whole['status']}", "response": whole})
    return cut_short([sse({**e, "sequence_number": n}, e["type"]) for n, e in enumerate(events)], said, 1)


CHAT_STOPS = {"end": "stop", "calls": "tool_calls", "length": "length", "refusal": "stop"}
CHAT_USAGE = {
    "prompt_tokens": 30,
    "completion_tokens": 12,
    "total_tokens": 42,
    "prompt_tokens_details": {"cached_tokens": 5},
}


def chat_message(said: Said) -> Json:
    """Return the message of a completion, with thinking as OpenRouter and others send it."""
    message: Json = {"role": "assistant", "content": said.text or None}
    if said.thinking:
        detail = {"type": "reasoning.text", "text": said.thinking, "signature": SIGNATURE, "index": 0}
        message |= {"reasoning": said.thinking, "reasoning_details": [detail]}
    if said.refusal:
        message["refusal"] = said.refusal
    if said.calls:
        message["tool_calls"] = [
            {"id": f"call_{n}", "type": "function", "function": {"name": said.tool, "arguments": json.dumps(value)}}
            for n, value in enumerate(said.calls)
        ]
    return message


def chat_plain(said: Said) -> Json:
    """Return a completion of the Chat Completions protocol."""
    choice = {"index": 0, "message": chat_message(said), "finish_reason": CHAT_STOPS[said.ending]}
    return {**chat_head("chat.completion"), "choices": [choice], "usage": CHAT_USAGE}


def chat_head(kind: str) -> Json:
    """Return what every completion and every chunk begins with."""
    return {"id": "chatcmpl_local", "object": kind, "created": 1_767_225_600, "model": "gpt-5"}


def chat_deltas(message: Json) -> Iterator[Json]:
    """Give what the chunks of a message add."""
    yield {"role": "assistant", "content": ""}
    for detail in message.get("reasoning_details", ()):
        for piece in pieces(detail["text"]):
            yield {"reasoning": piece, "reasoning_details": [{**detail, "text": piece, "signature": None}]}
        yield {"reasoning_details": [{**detail, "text": ""}]}
    for name in ("content", "refusal"):
        yield from ({name: piece} for piece in pieces(message.get(name) or ""))
    for index, call in enumerate(message.get("tool_calls", ())):
        yield {"tool_calls": [{"index": index, **call, "function": {**call["function"], "arguments": ""}}]}
        for piece in pieces(call["function"]["arguments"]):
            yield {"tool_calls": [{"index": index, "function": {"arguments": piece}}]}


def chat_stream(said: Said) -> bytes:
    """Return a stream of the Chat Completions protocol."""
    head = chat_head("chat.completion.chunk")
    ends = [({}, CHAT_STOPS[said.ending])]
    choices = [
        {"index": 0, "delta": delta, "finish_reason": why}
        for delta, why in [*[(delta, None) for delta in chat_deltas(chat_message(said))], *ends]
    ]
    events = [sse({**head, "choices": [choice]}) for choice in choices]
    events += [sse({**head, "choices": [], "usage": CHAT_USAGE}), b"data: [DONE]\n\n"]
    return cut_short(events, said, 3)


GOOGLE_STOPS = {"end": "STOP", "calls": "STOP", "length": "MAX_TOKENS", "refusal": "SAFETY"}


def google_parts(said: Said) -> list[Json]:
    """Return the parts of a candidate; a refused one has none."""
    parts: list[Json] = [{"text": said.thinking, "thought": True}] if said.thinking else []
    parts += [{"text": said.text}] if said.text else []
    signed = {"thoughtSignature": SIGNATURE} if said.thinking else {}
    calls = [{"functionCall": {"id": f"call_{n}", "name": said.tool, "args": v}} for n, v in enumerate(said.calls)]
    return parts + [{**call, **(signed if n == 0 else {})} for n, call in enumerate(calls)]


def google_response(parts: list[Json], ending: str | None) -> Json:
    """Return a response of the Gemini protocol, a whole one or a chunk."""
    candidate: Json = {"index": 0, **({"content": {"role": "model", "parts": parts}} if parts else {})}
    if ending is not None:
        candidate["finishReason"] = GOOGLE_STOPS[ending]
    usage = {"promptTokenCount": 30, "candidatesTokenCount": 12, "totalTokenCount": 42, "cachedContentTokenCount": 5}
    head = {"modelVersion": "gemini-3-pro", "responseId": "resp_local"}
    return {"candidates": [candidate], "usageMetadata": usage, **head}


def google_plain(said: Said) -> Json:
    """Return a whole response of the Gemini protocol."""
    return google_response(google_parts(said), said.ending)


def google_stream(said: Said) -> bytes:
    """Return a stream of the Gemini protocol, whose lines end as Google ends them."""
    parts: list[Json] = []
    for part in google_parts(said):
        parts += [{**part, "text": piece} for piece in pieces(part["text"])] if "text" in part else [part]
    events = [sse(google_response([part], None)) for part in parts] + [sse(google_response([], said.ending))]
    return cut_short(events, said, 1).replace(b"\n", b"\r\n")


@attrs.frozen
class Wire:
    """
    A protocol.

    Attributes:
        name: Of the adapter, and of the cassette.
        model: What it is asked for.
        provider: Makes the adapter with a transport.
        plain: Turns what is said into a reply in one piece.
        stream: Turns it into a stream.
        error: The body of the answer with status 429.
    """

    name: str
    model: str
    provider: Callable[[Any], Provider]
    plain: Callable[[Said], Json]
    stream: Callable[[Said], bytes]
    error: Json

    def answer(self, scene: Scene, said: Said | None, *, stream: bool) -> Answer:
        """Return what the server answers."""
        if said is None:
            return Answer(json.dumps(self.error).encode(), scene.status, headers=IDENTIFIED)
        body = self.stream(said) if stream else json.dumps(self.plain(said)).encode()
        return Answer(body, stream=stream, headers=IDENTIFIED)


BUSY = "You ask too often."
FOUR = (
    Wire(
        "anthropic",
        "anthropic/claude-sonnet-4-5",
        lambda transport: AnthropicProvider("local", base_url=HOST, transport=transport),
        anthropic_plain,
        anthropic_stream,
        {"type": "error", "error": {"type": "rate_limit_error", "message": BUSY}},
    ),
    Wire(
        "openai",
        "openai/gpt-5",
        lambda transport: OpenAIProvider("local", base_url=f"{HOST}/v1", transport=transport),
        responses_plain,
        responses_stream,
        {"error": {"type": "rate_limit_error", "code": "rate_limit_exceeded", "message": BUSY, "param": None}},
    ),
    Wire(
        "openai_chat",
        "openai_chat/gpt-5",
        lambda transport: OpenAIChatProvider("openai_chat", "local", base_url=f"{HOST}/v1", transport=transport),
        chat_plain,
        chat_stream,
        {"error": {"type": "rate_limit_error", "code": "rate_limit_exceeded", "message": BUSY, "param": None}},
    ),
    Wire(
        "google",
        "google/gemini-3-pro",
        lambda transport: GoogleProvider("local", base_url=HOST, transport=transport),
        google_plain,
        google_stream,
        {"error": {"code": 429, "status": "RESOURCE_EXHAUSTED", "message": BUSY}},
    ),
)


# --- conversations ---------------------------------------------------------------------------------------------------


async def asked(provider: Provider, request: ModelRequest, *, stream: bool) -> ModelReply | ModelError:
    """Ask once and return what came."""
    try:
        if not stream:
            return await provider.complete(request)
        async for delta in provider.stream(request):
            if type(delta) is ReplyDone:
                return delta.reply
    except ModelError as error:
        return error
    msg = "the stream ended without a reply"
    raise AssertionError(msg)


async def converse(wire: Wire, provider: Provider, scene: Scene, *, stream: bool) -> list[ModelReply | ModelError]:
    """Have one conversation; between two replies stand the results of the calls, as the machine would put them there."""
    history: list[Message] = [UserMessage(scene.asked)]
    outcomes: list[ModelReply | ModelError] = []
    for _ in scene.replies or (None,):
        messages = Transcript(history)
        request = ModelRequest(wire.model, "Be brief.", messages, TOOLS, settings=scene.settings)
        reply = await asked(provider, request, stream=stream)
        outcomes.append(reply)
        if isinstance(reply, ModelReply):
            history += answered(reply)
    return outcomes


def answered(reply: ModelReply) -> Sequence[Message]:
    """Return a reply as a message with ids of ours, and the results of its calls."""
    numbered = iter(range(1, 100))
    parts = [
        attrs.evolve(part, tool_call_id=f"c{next(numbered)}") if type(part) is ToolCallPart else part
        for part in reply.content
    ]
    calls = [part for part in parts if type(part) is ToolCallPart]
    sums = [ToolMessage(call.tool_call_id, "add", (str(call.input["a"] + call.input["b"]),)) for call in calls]
    return [AssistantMessage(tuple(parts)), *sums]


def ways(scene: Scene) -> tuple[bool, ...]:
    """Return whether a scene is played in a stream, in one piece, or both."""
    return (True,) if scene.stream_only else (False, True)


async def _recorded(wire: Wire, answers: queue.SimpleQueue[Answer], port: int) -> Cassette:
    cassette = Cassette()
    provider = wire.provider(RecordTransport(Redirected(port), cassette, record_errors=True))
    for scene in SCENES.values():
        for stream in ways(scene):
            for said in scene.replies or (None,):
                answers.put(wire.answer(scene, said, stream=stream))
            outcomes = await converse(wire, provider, scene, stream=stream)
            if not answers.empty() or len(outcomes) < len(scene.replies):
                msg = f"{wire.name} did not ask for all that was to be said: {outcomes}"
                raise AssertionError(msg)
    await provider.close()
    return cassette


def record(folder: Path) -> list[Path]:
    """Play every scene of every wire and write what went over the wire into *folder*."""
    written = []
    for wire in FOUR:
        answers: queue.SimpleQueue[Answer] = queue.SimpleQueue()

        def answer(_path: str, _body: bytes, answers: queue.SimpleQueue[Answer] = answers) -> Answer:
            return answers.get_nowait()

        with serve(answer) as port:
            cassette = asyncio.run(_recorded(wire, answers, port))
        written.append(save_cassette(cassette.interactions, SOURCE, folder / f"{wire.name}.yaml"))
    return written


if __name__ == "__main__":
    for file in record(Path(sys.argv[1]) if sys.argv[1:] else WIRES):
        print(f"recorded {file}")
