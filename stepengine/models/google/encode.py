"""
Our messages as contents of the Gemini API. Pure: no SDK, no clock, no I/O.

Every message is encoded once and keeps its bytes (``Transcript.memo``); a request joins them. Results answer their calls
by name and order; ids go back only where they came (EC82, EC83).

**Foreign calls.** Gemini 3 and later refuse a call of the current turn without a thought signature, and calls made by a
handler, by another provider or by an older model have none. The first such call of a message then carries the signature
that the API documents for this case, ``skip_thought_signature_validator``. The other way, telling calls as text, would
teach the model to write calls as text. The rule looks at one message at a time, so what was sent once is sent the same
way in every later request and the prompt cache holds.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
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
from stepengine.models._wire import (
    NUDGE,
    arguments_of,
    base64_of,
    cannot_take,
    encoded,
    is_own,
    is_paused,
    message_at,
    safe_name,
)

__all__ = ("DUMMY_SIGNATURE", "Flags", "encode_message", "encode_messages", "generation_of")

DUMMY_SIGNATURE = base64_of(b"skip_thought_signature_validator")
GENERATION = re.compile(r"(?:models/)?gemini-(\d+)")
LATEST = re.compile(r"(?:models/)?gemini-[a-z-]+-latest$")
SIGNED_SINCE = 3
MEDIA = ("image/", "audio/", "video/", "text/", "application/pdf")
IN_RESULTS = frozenset({"image/png", "image/jpeg", "image/webp", "application/pdf", "text/plain"})

Json = dict[str, Any]


@attrs.frozen
class Flags:
    """
    What the encoded form of a message depends on beside the message.

    Attributes:
        provider: Whose ids and opaque parts are sent back.
        model: Whose signatures and thoughts are sent back (EC99).
        signed: Whether the model refuses calls without a signature and takes media inside results (Gemini 3).
    """

    provider: str
    model: str
    signed: bool = False


def generation_of(model: str) -> int:
    """Return the generation in a model's name; the newest known for an alias, 0 for what is no Gemini."""
    found = GENERATION.match(model)
    if found is not None:
        return int(found.group(1))
    return SIGNED_SINCE if LATEST.match(model) else 0


@attrs.frozen
class Turn:
    """
    One encoded message.

    Attributes:
        role: Whose it is.
        parts: The parts joined by commas; of a result what follows its call's id.
        ids: The id of each call that has one, as the member to put into its answer.
        names: The name of each call.
        call_id: The call that a result answers.
        after: Parts that follow the results of the batch, since the wire cannot hold them inside.
        used: The provider's own ids that the message sends.
    """

    role: Literal["user", "assistant", "tool"]
    parts: bytes
    ids: Mapping[str, bytes] = attrs.field(factory=dict)
    names: Mapping[str, bytes] = attrs.field(factory=dict)
    call_id: str = ""
    after: bytes = b""
    used: frozenset[str] = frozenset()


NUDGE_PART = encoded({"text": NUDGE})
OPEN = {"user": b'{"role":"user","parts":[', "model": b'{"role":"model","parts":['}
ANSWER = b'{"functionResponse":{'


def encode_messages(request: ModelRequest, flags: Flags) -> bytes:
    """Return the ``contents`` array: history and tail, roles in turn, from user to user."""
    turns = request.messages.memo(("google", flags), lambda message: encode_message(message, flags))
    tail = [encode_message(message, flags) for message in request.tail]
    joiner = _Joiner()
    seen: set[str] = set()
    for index, turn in enumerate([*turns, *tail]):
        if turn.used:
            if not seen.isdisjoint(turn.used):
                turn = encode_message(message_at(request, index), flags, own_ids=False)  # noqa: PLW2901 - the id is taken
            seen.update(turn.used)
        joiner.add(turn)
    return joiner.joined(nudge=not is_paused(request))


class _Joiner:
    """Puts encoded messages in a row, merges neighbours of one role and moves media behind the results of a batch."""

    def __init__(self) -> None:
        self._out: list[bytes] = []
        self._role = ""
        self._ids: Mapping[str, bytes] = {}
        self._names: Mapping[str, bytes] = {}
        self._after: list[bytes] = []

    def add(self, turn: Turn) -> None:
        if turn.role == "tool":
            self._put("user", ANSWER + self._names[turn.call_id] + self._ids.get(turn.call_id, b"") + turn.parts)
            if turn.after:
                self._after.append(turn.after)
            return
        for parts in self._after:
            self._put("user", parts)
        self._after = []
        if turn.role == "assistant":
            self._ids, self._names = turn.ids, turn.names
        if turn.parts:
            self._put("model" if turn.role == "assistant" else "user", turn.parts)

    def _put(self, role: str, parts: bytes) -> None:
        out = self._out
        if role == self._role and role == "user":
            out.append(b",")
        else:
            if self._role:
                out.append(b"]},")
            if role == "model" and self._role != "user":
                out += (OPEN["user"], NUDGE_PART, b"]},")
            out.append(OPEN[role])
            self._role = role
        out.append(parts)

    def joined(self, *, nudge: bool) -> bytes:
        for parts in self._after:
            self._put("user", parts)
        if not self._role or (nudge and self._role == "model"):
            self._put("user", NUDGE_PART)
        return b"[" + b"".join(self._out) + b"]}]"


# --- one message ----------------------------------------------------------------------------------------------------


def encode_message(message: Message, flags: Flags, *, own_ids: bool = True) -> Turn:
    """Encode one message; *own_ids* false leaves out the provider's ids."""
    match message:
        case UserMessage():
            return Turn("user", _joined([_content(part, flags) for part in message.content]))
        case AssistantMessage():
            return _assistant(message, flags, own_ids)
        case ToolMessage():
            return _result(message, flags)
        case _ as never:
            assert_never(never)


def _joined(parts: list[Json | None]) -> bytes:
    return b",".join([encoded(part) for part in parts if part is not None])


def _assistant(message: AssistantMessage, flags: Flags, own_ids: bool) -> Turn:  # noqa: FBT001 - private
    ids = _ids(message.tool_calls, flags) if own_ids else {}
    parts = [_assistant_part(part, flags, ids) for part in message.content]
    calls = [part for part in parts if part is not None and "functionCall" in part]
    if flags.signed and calls and "thoughtSignature" not in calls[0]:
        calls[0]["thoughtSignature"] = DUMMY_SIGNATURE
    return Turn(
        "assistant",
        _joined(parts),
        ids={ours: b',"id":' + encoded(theirs) for ours, theirs in ids.items()},
        names={call.tool_call_id: b'"name":' + encoded(_name(call.tool_name)) for call in message.tool_calls},
        used=frozenset(ids.values()),
    )


def _ids(calls: tuple[ToolCallPart, ...], flags: Flags) -> dict[str, str]:
    """Return the ids that the provider gave; none of them when two are the same, so that order decides (MP49)."""
    own = {call.tool_call_id: call.provider_data for call in calls if is_own(call.provider_data, flags.provider)}
    ids = {ours: str(data["id"]) for ours, data in own.items() if data and data.get("id")}
    return ids if len(set(ids.values())) == len(ids) else {}


def _name(name: str) -> str:
    safe = safe_name(name)
    return safe if safe[0].isalpha() or safe[0] == "_" else f"_{safe}"


def _assistant_part(part: AssistantPart, flags: Flags, ids: Mapping[str, str]) -> Json | None:
    match part:
        case TextPart() | RefusalPart():
            signed = _signed(part.provider_data, flags)
            return {"text": part.text, **signed} if part.text or signed else None
        case ThinkingPart():
            data = part.provider_data
            own = data is not None and is_own(data, flags.provider) and data.get("model") == flags.model
            return {"text": part.text, "thought": True, **_signed(data, flags)} if own else None
        case ToolCallPart():
            call: Json = {"name": _name(part.tool_name), "args": arguments_of(part)}
            if part.tool_call_id in ids:
                call["id"] = ids[part.tool_call_id]
            return {"functionCall": call, **_signed(part.provider_data, flags)}
        case OpaquePart():
            return dict(part.data) if part.provider == flags.provider else None
        case _ as never:
            assert_never(never)


def _signed(data: Mapping[str, Any] | None, flags: Flags) -> Json:
    """Return the signature as it came, for the model that made it."""
    if data is None or not is_own(data, flags.provider) or data.get("model") != flags.model:
        return {}
    return {"thoughtSignature": data["signature"]} if data.get("signature") else {}


def _result(message: ToolMessage, flags: Flags) -> Turn:
    said = [part for part in message.content if isinstance(part, TextPart | JsonPart)]
    media = [part for part in message.content if isinstance(part, ImagePart | DocumentPart)]
    value: Any
    if len(said) == 1 and isinstance(said[0], JsonPart):
        value = said[0].value
    else:
        value = "\n".join([part.text if isinstance(part, TextPart) else compact(part.value) for part in said])
    inside = [part for part in media if flags.signed and part.mime_type in IN_RESULTS]
    outside = [part for part in media if part not in inside]
    after: list[Json | None] = []
    if outside:
        label = f"Images and documents in the result of {message.tool_name} ({message.tool_call_id}):"
        after = [{"text": label}, *[_content(part, flags) for part in outside]]
        if not value:
            value = "(Images and documents follow.)"
    answer: Json = {"response": {"error" if message.is_error else "output": value}}
    if inside:
        answer["parts"] = [_content(part, flags) for part in inside]
    return Turn("tool", b"," + encoded(answer)[1:] + b"}", call_id=message.tool_call_id, after=_joined(after))


def _content(part: ResultPart, flags: Flags) -> Json | None:
    match part:
        case TextPart():
            return {"text": part.text} if part.text else None
        case JsonPart():
            return {"text": compact(part.value)}
        case ImagePart() | DocumentPart():
            if not part.mime_type.startswith(MEDIA):
                raise cannot_take(flags.provider, part, "it takes images, audio, video, text and PDF")
            if part.data is None:
                return {"fileData": {"mimeType": part.mime_type, "fileUri": part.url}}
            return {"inlineData": {"mimeType": part.mime_type, "data": base64_of(part.data)}}
        case _ as never:
            assert_never(never)
