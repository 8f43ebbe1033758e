"""What the encoders of all wires share: names, ids, data URLs, and bodies joined from encoded members."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from stepengine.data.json import compact
from stepengine.data.models import ModelRequest
from stepengine.data.parts import DocumentPart, ImagePart, ToolCallPart
from stepengine.data.tools import ToolChoice, ToolSpec
from stepengine.errors import ModelError
from stepengine.models._json import utf8

__all__ = (
    "NUDGE",
    "ToolsCache",
    "arguments_of",
    "base64_of",
    "cannot_take",
    "data_url",
    "encoded",
    "is_own",
    "join_members",
    "safe_name",
    "tool_choice_of",
    "wire_ids",
)

NUDGE = "Continue."
"""Said in the user's place where a wire wants a user message and the history has none; in no record (EC100)."""

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


def wire_ids(calls: Sequence[ToolCallPart], provider: str, *, own: bool = True) -> dict[str, str]:
    """
    Return the wire id of each call by its own id (EC83).

    The provider's own id when it made the call and the id is not used twice in this message, else one that is made from
    ours and stays the same for ever. *own* false makes all of them.
    """
    ids: dict[str, str] = {}
    used: set[str] = set()
    for call in calls:
        theirs = (
            call.provider_data.get("id")
            if own and is_own(call.provider_data, provider) and call.provider_data
            else None
        )
        wire_id = theirs if isinstance(theirs, str) and theirs and theirs not in used else made_id(call.tool_call_id)
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
    """Keeps the encoded tools of the last request, since steps of one run offer the same specs again and again."""

    def __init__(self, encode: Callable[[ToolSpec], Any]) -> None:
        self._encode = encode
        self._last: tuple[tuple[ToolSpec, ...], bytes] = ((), b"[]")

    def __call__(self, tools: tuple[ToolSpec, ...]) -> bytes:
        """Return *tools* as an encoded JSON array."""
        known, data = self._last
        if len(known) == len(tools) and all(a is b for a, b in zip(known, tools, strict=True)):
            return data
        data = encoded([self._encode(tool) for tool in tools])
        self._last = (tools, data)
        return data
