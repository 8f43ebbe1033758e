"""
Our messages as the wire form of Anthropic's Messages API. Pure: no SDK, no clock, no I/O.

Every message is encoded once and keeps its bytes (``Transcript.memo``); a request joins them. Joining merges what the
wire wants merged: the results of one batch and the user messages after them are one user message, results first.

**Foreign calls and thinking.** With a manual thinking budget the API refuses a last assistant turn whose calls do not
follow a thinking block, and calls made by a handler, another model or a turn without thinking have none (design 6).
Such calls and their results are then written as text of the user: the model keeps both its thinking and what the calls
gave. The rule looks at one message at a time, so what was sent once is sent the same way in every later request and the
prompt cache holds. Adaptive thinking has no such demand and sends them as calls.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, assert_never

import attrs

from stepengine.data.json import compact
from stepengine.data.messages import AssistantMessage, Message, ToolMessage, UserMessage
from stepengine.data.models import ModelRequest
from stepengine.data.parts import (
    AssistantPart,
    DocumentPart,
    ImagePart,
    JsonPart,
    OpaquePart,
    RefusalPart,
    ResultPart,
    TextPart,
    ThinkingPart,
    ToolCallPart,
)
from stepengine.data.tools import ToolSpec
from stepengine.models._wire import (
    NUDGE,
    arguments_of,
    base64_of,
    cannot_take,
    encoded,
    is_own,
    join_members,
    safe_name,
    tool_choice_of,
    wire_ids,
)

__all__ = ("Flags", "encode", "encode_messages", "encode_tool", "thinking_of")

MIN_BUDGET = 1024
DEFAULT_BUDGET = 10_000
DEFAULT_MAX_TOKENS = 8_192
IMAGES = frozenset({"image/jpeg", "image/png", "image/gif", "image/webp"})
MANUAL_ONLY = re.compile(r"claude-(?:3|instant|2)|claude-(?:opus|sonnet|haiku)-4(?:-[0156])?(?:-\d{8})?$")
"""Models from before adaptive thinking, which want a budget."""

Json = dict[str, Any]


@attrs.frozen
class Flags:
    """
    What the encoded form of a message depends on beside the message.

    Attributes:
        provider: Whose ids, signatures and opaque parts are sent back.
        model: Whose thinking is sent back (EC99).
        manual: Whether thinking has a budget, so that calls without thinking are written as text.
    """

    provider: str
    model: str
    manual: bool = False


@attrs.frozen
class Turn:
    """One encoded message; which members count depends on its *role*."""

    role: Literal["user", "assistant", "tool"]
    blocks: bytes
    ids: Mapping[str, bytes] = attrs.field(factory=dict)
    texts: Mapping[str, bytes] = attrs.field(factory=dict)
    call_id: str = ""
    as_text: bytes = b""


def encode(
    request: ModelRequest, model: str, provider: str, tools: bytes, *, stream: bool, max_tokens: int, prompt_cache: bool
) -> bytes:
    """
    Return the body of a request.

    Args:
        request: What is asked.
        model: The model's name at the provider.
        provider: The provider's name.
        tools: The encoded tools.
        stream: Whether the reply shall be a stream.
        max_tokens: The output limit when the request has none; the API demands one (EC95).
        prompt_cache: Whether the API shall cache the prompt up to the last message (EC93).
    """
    settings = request.settings
    thinking = thinking_of(request, model)
    manual = thinking is not None and thinking["type"] == "enabled"
    limit = settings.max_tokens
    if limit is None:
        limit = max(max_tokens, thinking["budget_tokens"] + max_tokens) if manual and thinking else max_tokens
    elif manual and thinking and limit <= thinking["budget_tokens"]:
        thinking = {**thinking, "budget_tokens": max(MIN_BUDGET, limit - 1)}
    head: Json = {"model": model, "max_tokens": limit}
    optional = {
        "system": request.system_prompt or None,
        "temperature": settings.temperature,
        "top_p": settings.top_p,
        "stop_sequences": list(settings.stop_sequences) or None,
        "thinking": thinking,
        "tool_choice": _tool_choice(request),
        "cache_control": {"type": "ephemeral"} if prompt_cache else None,
        "stream": True if stream else None,
    }
    head.update({name: value for name, value in optional.items() if value is not None})
    members = {name: encoded(value) for name, value in head.items()}
    if request.tools:
        members["tools"] = tools
    members.update({name: encoded(value) for name, value in settings.extra.items()})
    members["messages"] = encode_messages(request, Flags(provider, model, manual))
    return join_members(members)


def thinking_of(request: ModelRequest, model: str) -> Json | None:
    """
    Return the ``thinking`` member; ``None`` sends nothing.

    ``enabled`` leaves the amount to the model, ``extended`` sends the budget. A forced tool choice switches thinking off
    for that request, because the API refuses both together (EC85).
    """
    thinking = request.settings.thinking
    if thinking is None or thinking.mode == "none":
        return None
    if tool_choice_of(request) not in {None, "auto", "none"}:
        return None
    if thinking.mode == "extended":
        return {"type": "enabled", "budget_tokens": max(MIN_BUDGET, thinking.budget_tokens)}
    if MANUAL_ONLY.match(model):
        return {"type": "enabled", "budget_tokens": DEFAULT_BUDGET}
    return {"type": "adaptive"}


def encode_tool(spec: ToolSpec) -> Json:
    """Return a tool definition."""
    return {"name": spec.name, "description": spec.description, "input_schema": spec.input_schema}


def _tool_choice(request: ModelRequest) -> Json | None:
    choice = tool_choice_of(request)
    single = request.settings.parallel_tool_calls is False and bool(request.tools)
    if choice is None and not single:
        return None
    words = {None: "auto", "auto": "auto", "none": "none", "required": "any"}
    value: Json = {"type": words[choice]} if choice in words else {"type": "tool", "name": choice}
    if single and value["type"] != "none":
        value["disable_parallel_tool_use"] = True
    return value


# --- joining --------------------------------------------------------------------------------------------------------


def encode_messages(request: ModelRequest, flags: Flags) -> bytes:
    """Return the ``messages`` array: history and tail, roles in turn, from user to user."""
    turns = request.messages.memo(("anthropic", flags), lambda message: encode_message(message, flags))
    tail = [encode_message(message, flags) for message in request.tail]
    joiner = _Joiner()
    seen: set[bytes] = set()
    for index, turn in enumerate([*turns, *tail]):
        if turn.ids:
            if not seen.isdisjoint(turn.ids.values()):
                turn = encode_message(_at(request, index), flags, own_ids=False)  # noqa: PLW2901 - the id is taken
            seen.update(turn.ids.values())
        joiner.add(turn)
    # A reply that the provider paused is handed back as the last message, to be gone on with (MP56).
    paused = bool(request.tail) and type(request.tail[-1]) is AssistantMessage
    return joiner.joined(nudge=not paused)


def _at(request: ModelRequest, index: int) -> Message:
    history = len(request.messages)
    return request.messages[index] if index < history else request.tail[index - history]


NUDGE_BLOCK = encoded({"type": "text", "text": NUDGE})
OPEN = {"user": b'{"role":"user","content":[', "assistant": b'{"role":"assistant","content":['}


class _Joiner:
    """Puts encoded messages in a row and merges neighbours of one role."""

    def __init__(self) -> None:
        self._out: list[bytes] = []
        self._role = ""
        self._ids: Mapping[str, bytes] = {}
        self._texts: Mapping[str, bytes] = {}

    def add(self, turn: Turn) -> None:
        if turn.role == "tool":
            wire_id = self._ids.get(turn.call_id)
            if wire_id is None:
                self._put("user", self._texts[turn.call_id] + b"," + turn.as_text)
            else:
                self._put("user", b'{"type":"tool_result","tool_use_id":' + wire_id + turn.blocks)
            return
        if turn.role == "assistant":
            self._ids, self._texts = turn.ids, turn.texts
        if turn.blocks:
            self._put(turn.role, turn.blocks)

    def _put(self, role: Literal["user", "assistant"], blocks: bytes) -> None:
        out = self._out
        if role == self._role and role == "user":
            out.append(b",")
        else:
            if self._role:
                out.append(b"]},")
            if role == "assistant" and self._role != "user":
                out += (OPEN["user"], NUDGE_BLOCK, b"]},")
            out.append(OPEN[role])
            self._role = role
        out.append(blocks)

    def joined(self, *, nudge: bool) -> bytes:
        if not self._role or (nudge and self._role == "assistant"):
            self._put("user", NUDGE_BLOCK)
        return b"[" + b"".join(self._out) + b"]}]"


# --- one message ----------------------------------------------------------------------------------------------------


def encode_message(message: Message, flags: Flags, *, own_ids: bool = True) -> Turn:
    """Encode one message; *own_ids* false sends made ids in place of the provider's."""
    match message:
        case UserMessage():
            return Turn("user", _joined([_content(part, flags) for part in message.content]))
        case AssistantMessage():
            return _assistant(message, flags, own_ids)
        case ToolMessage():
            return _result(message, flags)
        case _ as never:
            assert_never(never)


def _joined(blocks: Sequence[Json | None]) -> bytes:
    return b",".join([encoded(block) for block in blocks if block is not None])


def _assistant(message: AssistantMessage, flags: Flags, own_ids: bool) -> Turn:  # noqa: FBT001 - private
    calls = message.tool_calls
    ids = wire_ids(calls, flags.provider, own=own_ids)
    blocks = [block for block in [_assistant_block(part, flags, ids) for part in message.content] if block is not None]
    if not calls:
        return Turn("assistant", _joined(blocks))
    if flags.manual and blocks[0]["type"] not in {"thinking", "redacted_thinking"}:
        texts = {call.tool_call_id: encoded(_text(_call_text(call))) for call in calls}
        return Turn("assistant", _joined([block for block in blocks if block["type"] != "tool_use"]), texts=texts)
    return Turn("assistant", _joined(blocks), ids={ours: encoded(theirs) for ours, theirs in ids.items()})


def _call_text(call: ToolCallPart) -> str:
    return f"The tool {call.tool_name} was called with {compact(arguments_of(call))}. Its result:"


def _assistant_block(part: AssistantPart, flags: Flags, ids: Mapping[str, str]) -> Json | None:
    match part:
        case TextPart():
            return _text(part.text, part.provider_data if is_own(part.provider_data, flags.provider) else None)
        case RefusalPart():
            return _text(part.text)
        case ThinkingPart():
            return _thinking(part, flags)
        case ToolCallPart():
            name = safe_name(part.tool_name)
            return {"type": "tool_use", "id": ids[part.tool_call_id], "name": name, "input": arguments_of(part)}
        case OpaquePart():
            return dict(part.data) if part.provider == flags.provider else None
        case _ as never:
            assert_never(never)


def _thinking(part: ThinkingPart, flags: Flags) -> Json | None:
    data = part.provider_data
    if data is None or not is_own(data, flags.provider) or data.get("model") != flags.model:
        return None
    if data.get("redacted"):
        return {"type": "redacted_thinking", "data": data["redacted"]}
    signature = data.get("signature")
    return {"type": "thinking", "thinking": part.text, "signature": signature} if signature else None


def _text(text: str, data: Mapping[str, Any] | None = None) -> Json | None:
    """Return a text block; the API refuses one without a visible character."""
    if not text.strip():
        return None
    block: Json = {"type": "text", "text": text}
    if data is not None and data.get("citations"):
        block["citations"] = data["citations"]
    return block


def _result(message: ToolMessage, flags: Flags) -> Turn:
    blocks = [block for block in [_content(part, flags) for part in message.content] if block is not None]
    rest: Json = {}
    if len(blocks) == 1 and blocks[0]["type"] == "text":
        rest["content"] = blocks[0]["text"]
    elif blocks:
        rest["content"] = blocks
    if message.is_error:
        rest["is_error"] = True
    members = encoded(rest)[1:]
    as_text = _joined(blocks or [_text("(nothing)")]) if flags.manual else b""
    return Turn("tool", (b"," if rest else b"") + members, call_id=message.tool_call_id, as_text=as_text)


def _content(part: ResultPart, flags: Flags) -> Json | None:
    match part:
        case TextPart():
            return _text(part.text)
        case JsonPart():
            return _text(compact(part.value))
        case ImagePart():
            return {"type": "image", "source": _image_source(part, flags)}
        case DocumentPart():
            block: Json = {"type": "document", "source": _document_source(part, flags)}
            return {**block, "title": part.name} if part.name else block
        case _ as never:
            assert_never(never)


def _image_source(part: ImagePart, flags: Flags) -> Json:
    if part.data is None:
        return {"type": "url", "url": part.url}
    if part.mime_type not in IMAGES:
        raise cannot_take(flags.provider, part, "it takes JPEG, PNG, GIF and WebP")
    return {"type": "base64", "media_type": part.mime_type, "data": base64_of(part.data)}


def _document_source(part: DocumentPart, flags: Flags) -> Json:
    if part.data is None:
        return {"type": "url", "url": part.url}
    if part.mime_type == "application/pdf":
        return {"type": "base64", "media_type": part.mime_type, "data": base64_of(part.data)}
    if part.mime_type.startswith("text/"):
        return {"type": "text", "media_type": "text/plain", "data": part.data.decode("utf-8", "replace")}
    raise cannot_take(flags.provider, part, "it takes PDF and plain text")
