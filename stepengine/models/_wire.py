"""What the encoders of all wires share: names, ids, data URLs, and bodies joined from encoded members."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from stepengine.data.json import compact
from stepengine.data.messages import AssistantMessage, Message
from stepengine.data.models import ModelRequest, ModelSettings, Thinking
from stepengine.data.parts import DocumentPart, ImagePart, ToolCallPart
from stepengine.data.tools import ToolChoice, ToolSpec
from stepengine.errors import ModelError
from stepengine.models._json import utf8

__all__ = (
    "NUDGE",
    "ToolsCache",
    "all_headers",
    "arguments_of",
    "base64_of",
    "cannot_take",
    "data_url",
    "effort_of",
    "encoded",
    "extra_headers",
    "extra_members",
    "is_own",
    "is_paused",
    "join_members",
    "joined_tools",
    "made_id",
    "message_at",
    "safe_name",
    "schema_name",
    "tool_choice_of",
    "wire_ids",
)

NUDGE = "Continue."
"""Said in the user's place where a wire wants a user message and the history has none; in no record (EC100)."""

BETAS = "anthropic-beta"
RESERVED = frozenset({"headers", "body"})
SECRET_HEADERS = frozenset({"authorization", "x-api-key", "x-goog-api-key", "api-key", "proxy-authorization", "cookie"})

EFFORTS = ((2_048, "low"), (8_192, "medium"))
MAX_ID = 64
MAX_NAME = 64
UNSAFE = re.compile(r"[^A-Za-z0-9_-]+")


def encoded(value: Any) -> bytes:
    """Return *value* as compact JSON in UTF-8."""
    return utf8(compact(value))


def join_members(members: Mapping[str, bytes]) -> bytes:
    """Return the JSON object of already encoded *members*."""
    return b"{" + b",".join([encoded(name) + b":" + value for name, value in members.items()]) + b"}"


def is_own(data: Mapping[str, Any] | None, provider: str) -> bool:
    """Return whether *provider* made the part whose ``provider_data`` is *data*."""
    return data is not None and data.get("provider") == provider


def safe_name(name: str) -> str:
    """Return a tool name that every wire takes; what a model made up may hold anything (reliability MP48)."""
    return UNSAFE.sub("_", name)[:MAX_NAME] or "unknown"


def arguments_of(part: ToolCallPart) -> Mapping[str, Any]:
    """Return the arguments of a past call; those that could not be read are shown under one name, as an object."""
    return {"unreadable_arguments": part.raw_input or ""} if part.input_error is not None else part.input


def extra_headers(settings: ModelSettings) -> dict[str, str]:
    """
    Return the HTTP headers in ``settings.extra["headers"]``.

    Raises:
        ModelError: for a header that holds a key: settings are recorded, keys belong to the provider.
    """
    headers = settings.extra.get("headers")
    if headers is None:
        return {}
    if not isinstance(headers, Mapping) or not all(isinstance(value, str) for value in headers.values()):
        msg = "ModelSettings.extra['headers'] is an object of header names and texts, such as {'x-title': 'my app'}"
        raise ModelError(msg, kind="settings")
    secret = sorted(name for name in headers if name.lower() in SECRET_HEADERS)
    if secret:
        msg = (
            f"ModelSettings.extra['headers'] holds {secret[0]!r}, but settings are recorded; give keys to the provider"
        )
        raise ModelError(msg, kind="settings")
    return dict(headers)


def all_headers(*layers: Mapping[str, str]) -> dict[str, str]:
    """Return the headers of all *layers*, later ones on top; lists of betas are joined."""
    merged: dict[str, str] = {}
    for layer in layers:
        for name, value in layer.items():
            low = name.lower()
            merged[low] = f"{merged[low]},{value}" if low == BETAS and low in merged else value
    return merged


def extra_members(settings: ModelSettings, head: Mapping[str, Any]) -> dict[str, Any]:
    """
    Return the body members *head* with those of ``settings.extra`` put on top; objects are merged member by member.

    All keys of ``extra`` but ``"headers"`` and ``"body"`` are members, and so are those of the object under ``"body"``.
    """
    extra = settings.extra
    if not extra:
        return dict(head)
    plain = {name: value for name, value in extra.items() if name not in RESERVED}
    body = extra.get("body")
    return _merged(_merged(head, plain), body if isinstance(body, Mapping) else {})


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for name, value in above.items():
        old = merged.get(name)
        merged[name] = _merged(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return merged


def joined_tools(tools: bytes, more: Any) -> bytes:
    """Return the encoded array *tools* with *more* behind it: a provider's own tools, from ``settings.extra``."""
    if not isinstance(more, list) or not more:
        return tools
    return tools[:-1] + (b"," if len(tools) > len(b"[]") else b"") + encoded(more)[1:]


def effort_of(thinking: Thinking) -> str:
    """Return the effort that stands for a budget, where a wire knows only efforts."""
    if thinking.mode == "enabled":
        return "medium"
    return next((word for limit, word in EFFORTS if thinking.budget_tokens <= limit), "high")


def schema_name(schema: Mapping[str, Any]) -> str:
    """Return the name under which a structured output goes where a wire demands one."""
    title = schema.get("title")
    return safe_name(title) if isinstance(title, str) and title else "output"


def message_at(request: ModelRequest, index: int) -> Message:
    """Return the message at *index* of history and tail."""
    history = len(request.messages)
    return request.messages[index] if index < history else request.tail[index - history]


def is_paused(request: ModelRequest) -> bool:
    """Return whether a reply that the provider paused is handed back as the last message, to be gone on with (MP56)."""
    return bool(request.tail) and type(request.tail[-1]) is AssistantMessage


def wire_ids(
    calls: Sequence[ToolCallPart], provider: str, *, own: bool = True, make: Callable[[str], str] | None = None
) -> dict[str, str]:
    """
    Return the wire id of each call by its own id (EC83).

    The provider's own id when it made the call and the id is not used twice in this message, else one that is made from
    ours and stays the same for ever. *own* false makes all of them. *make* is for wires with ids of a certain form.
    """
    make = make or made_id
    ids: dict[str, str] = {}
    used: set[str] = set()
    for call in calls:
        theirs = (
            call.provider_data.get("id")
            if own and is_own(call.provider_data, provider) and call.provider_data
            else None
        )
        wire_id = theirs if isinstance(theirs, str) and theirs and theirs not in used else make(call.tool_call_id)
        used.add(wire_id)
        ids[call.tool_call_id] = wire_id
    return ids


def made_id(call_id: str) -> str:
    """Return an id of letters, digits, ``_`` and ``-``, at most 64 long, that differs for different *call_id*."""
    plain = f"call_{call_id}"
    if len(plain) <= MAX_ID and not UNSAFE.search(plain):
        return plain
    return f"call_{hashlib.sha256(utf8(call_id)).hexdigest()[:32]}"


def base64_of(data: bytes) -> str:
    """Return *data* as base64 text."""
    return base64.b64encode(data).decode("ascii")


def data_url(part: ImagePart | DocumentPart) -> str:
    """Return the part's own URL, or a data URL of its bytes."""
    return part.url if part.data is None else f"data:{part.mime_type};base64,{base64_of(part.data)}"  # type: ignore[return-value]


def cannot_take(provider: str, part: ImagePart | DocumentPart, why: str) -> ModelError:
    """Return the error for a part that the provider's wire cannot hold (requirements G24)."""
    name = getattr(part, "name", "") or part.url or ""
    msg = f"{provider} cannot take the {type(part).__name__}{f' {name!r}' if name else ''} of type {part.mime_type!r}: {why}"
    return ModelError(msg, kind="unsupported_part")


def tool_choice_of(request: ModelRequest) -> ToolChoice | None:
    """Return the tool choice in force; ``None`` without one and without tools."""
    return (request.tool_choice or request.settings.tool_choice) if request.tools else None


class ToolsCache:
    """
    Keeps the encoded tools of the last request, since steps of one run offer the same specs again and again.

    Args:
        encode: Gives a tool's definition.
        last: Members that the last definition gets on top, such as a cache mark.
    """

    def __init__(self, encode: Callable[[ToolSpec], Any], last: Mapping[str, Any] | None = None) -> None:
        self._encode = encode
        self._on_last = last or {}
        self._last: tuple[tuple[ToolSpec, ...], bytes] = ((), b"[]")

    def __call__(self, tools: tuple[ToolSpec, ...]) -> bytes:
        """Return *tools* as an encoded JSON array."""
        known, data = self._last
        if len(known) == len(tools) and all(a is b for a, b in zip(known, tools, strict=True)):
            return data
        definitions = [self._encode(tool) for tool in tools]
        if definitions and self._on_last:
            definitions[-1] = {**definitions[-1], **self._on_last}
        data = encoded(definitions)
        self._last = (tools, data)
        return data
