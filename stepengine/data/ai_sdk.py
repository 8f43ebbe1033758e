"""
Messages as the AI SDK, and codebuff with it, writes them, in terms of the ``{"role", "content"}`` form of ``wire``.

Parts of type ``tool-call``, ``reasoning``, ``image``, ``file`` and ``media`` are renamed. Of the other members, ``tags`` and
``timeToLive`` are kept; what is about the sending of a message is dropped.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stepengine.data.media_types import is_data_url, normalize_media_type

LIFETIMES = {"agentStep": "agent_step", "userPrompt": "user_prompt"}
DROPPED = {"sentAt", "providerOptions", "keepDuringTruncation", "keepLastTags"}
RENAMED = {"toolCallId": "tool_call_id", "toolName": "name"}


def convert_to_wire_message(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a message of the AI SDK in the ``{"role", "content"}`` form; members that this form lacks are dropped."""
    content = message.get("content")
    blocks = [_convert_to_wire_block(part) for part in content] if isinstance(content, list | tuple) else content
    own = {RENAMED.get(name, name): value for name, value in message.items() if name not in DROPPED}
    return {**own, **({"content": blocks} if "content" in message else {})}


def _convert_to_wire_block(part: Any) -> Any:
    """Return a content part of the AI SDK as a block of the ``{"role", "content"}`` form."""
    if not isinstance(part, Mapping):
        return part
    known = {name: value for name, value in part.items() if name != "providerOptions"}
    match known.get("type"):
        case "tool-call":
            named = {"id": known.get("toolCallId"), "name": known.get("toolName"), "input": known.get("input")}
            return {"type": "tool_use", **{name: value for name, value in named.items() if value is not None}}
        case "reasoning":
            return {"type": "thinking", "thinking": known.get("text", "")}
        case "image" if "image" in known:
            return _make_media_block(known["image"], known.get("mediaType") or "image/png", "")
        case "file" | "media":
            return _make_media_block(known.get("data"), known.get("mediaType") or "", known.get("filename") or "")
        case _:
            return known


def _make_media_block(data: object, kind: object, title: str) -> dict[str, object]:
    """Return the block of an image or a document; *data* is an address, a data URL or base64 text."""
    source: dict[str, object] = {"type": "base64", "media_type": kind, "data": data}
    if isinstance(data, str) and data.startswith(("http://", "https://")):
        source = {"type": "url", "media_type": kind, "url": data}
    elif isinstance(data, str) and is_data_url(data):
        kind = kind or normalize_media_type(data[len("data:") :].partition(",")[0])
        source = {"type": "url", "media_type": kind, "url": data}
    # Another value than text raises an error with its path where the block is read.
    if isinstance(kind, str) and normalize_media_type(kind).startswith("image/"):
        return {"type": "image", "source": source}
    return {"type": "document", "source": source, "title": title}
