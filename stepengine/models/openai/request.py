"""
Requests of the Responses API: everything of the body but its input items. Pure: no SDK, no clock, no I/O.
"""

from __future__ import annotations

import hashlib
import re
from typing import Any

from stepengine.data.models import ModelRequest, Thinking
from stepengine.data.tools import ToolSpec
from stepengine.errors import ModelError
from stepengine.models._failures import INVALID_SIGNATURE
from stepengine.models._schemas import strict_form
from stepengine.models._wire import effort_of, join_members, members_of, schema_name, tool_choice_of
from stepengine.models.openai.encode import Flags, encode_messages
from stepengine.models.presets import Preset

__all__ = ("encode", "encode_count", "encode_tool")

WORDS = frozenset({"auto", "none", "required"})
KEY_LENGTH = 32
SWITCHED = re.compile(r"gpt-(?:5\.[1-9](?!-(?:pro|codex|chat))|[6-9])")
"""Models that can be kept from reasoning by a word; the others refuse it."""

MORE = re.compile(r"gpt-5\.[2-5]")
"""Models that know one effort above "high"."""

MOST = re.compile(r"gpt-(?:5\.[6-9]|[6-9])")
"""Models that know two."""

Json = dict[str, Any]


def encode(request: ModelRequest, model: str, preset: Preset, tools: bytes, *, stream: bool, after: str = "") -> bytes:
    """
    Return the body of a request. Nothing is stored at the provider: the whole conversation is sent (EC96).

    Args:
        request: What is asked.
        model: The model's name at the provider.
        preset: The service's ways.
        tools: The encoded tools.
        stream: Whether the reply shall be a stream.
        after: How the same request failed before: a refused signature leaves earlier reasoning out.

    Raises:
        ModelError: when the reply shall be made in the background, where it would have to be polled.
    """
    settings = request.settings
    if settings.extra.get("background") or (settings.extra.get("body") or {}).get("background"):
        msg = (
            f"background replies are not polled, and {model!r} was asked for one by ModelSettings(extra=...); leave it "
            "out: a reply may take as long as Timeouts of the provider say"
        )
        raise ModelError(msg, kind="request")
    optional = {
        **_shared(request, model),
        "store": False,
        "max_output_tokens": settings.max_tokens,
        "temperature": settings.temperature,
        "top_p": settings.top_p,
        "include": ["reasoning.encrypted_content"] if preset.encrypted_reasoning else None,
        "prompt_cache_key": _cache_key(request) if preset.cache_key else None,
        "stream": True if stream else None,
    }
    members = members_of(request, optional, tools)
    members["input"] = encode_messages(request, Flags(preset.name, "" if after == INVALID_SIGNATURE else model))
    return join_members(members)


def encode_count(request: ModelRequest, model: str, preset: Preset, tools: bytes) -> bytes:
    """Return the body of the question how many tokens a request has (EC75)."""
    members = members_of(request, _shared(request, model), tools, extra=False)
    members["input"] = encode_messages(request, Flags(preset.name, model))
    return join_members(members)


def encode_tool(spec: ToolSpec) -> Json:
    """Return a tool definition. ``strict`` is said, because the API would otherwise rewrite the schema (EC102)."""
    form = strict_form(spec.input_schema, "openai") if spec.strict else None
    return {
        "type": "function",
        "name": spec.name,
        "description": spec.description,
        "parameters": spec.input_schema if form is None else form,
        "strict": form is not None,
    }


def _shared(request: ModelRequest, model: str) -> Json:
    return {
        "model": model,
        "instructions": request.system_prompt or None,
        "reasoning": _reasoning(request, model),
        "text": _text(request),
        "tool_choice": _tool_choice(request),
        "parallel_tool_calls": request.settings.parallel_tool_calls if request.tools else None,
    }


def _reasoning(request: ModelRequest, model: str) -> Json | None:
    """Return how much to reason; a budget has no place in this wire and becomes an effort."""
    thinking = request.settings.thinking
    if thinking is None:
        return None
    if thinking.mode == "none":
        return {"effort": "none"} if SWITCHED.match(model) else None
    word = effort_of(thinking)
    if word == "max" and not MOST.match(model):
        return _shown("xhigh" if MORE.match(model) else "high", thinking)
    return _shown(word, thinking)


def _shown(effort: str, thinking: Thinking) -> Json:
    return {"effort": effort, "summary": "auto"} if thinking.show else {"effort": effort}


def _text(request: ModelRequest) -> Json | None:
    schema = request.settings.response_schema
    if schema is None:
        return None
    form = strict_form(schema, "openai")
    named = {"type": "json_schema", "name": schema_name(schema)}
    return {"format": {**named, "schema": schema if form is None else form, "strict": form is not None}}


def _tool_choice(request: ModelRequest) -> Any:
    choice = tool_choice_of(request)
    return choice if choice is None or choice in WORDS else {"type": "function", "name": choice}


def _cache_key(request: ModelRequest) -> str:
    """Return a name that the requests of one conversation share: made from how it begins."""
    digest = hashlib.sha256(request.system_prompt.encode("utf-8", "replace"))
    if len(request.messages):
        digest.update(request.messages[0].text.encode("utf-8", "replace"))
    return digest.hexdigest()[:KEY_LENGTH]
