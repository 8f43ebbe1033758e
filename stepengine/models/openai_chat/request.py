"""
Requests of Chat Completions: everything of the body but its messages. Pure: no SDK, no clock, no I/O.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from stepengine.data.models import Effort, ModelRequest, Thinking
from stepengine.data.tools import ToolSpec
from stepengine.models._failures import FORCED_THINKING, INVALID_SIGNATURE
from stepengine.models._schemas import plain_schema, strict_form
from stepengine.models._wire import effort_of, join_members, members_of, schema_name, tool_choice_of
from stepengine.models.openai_chat.encode import Flags, encode_messages
from stepengine.models.presets import Preset

__all__ = ("encode", "encode_plain_tool", "encode_strict_tool", "encode_tool", "offered", "promises")

WORDS = frozenset({"auto", "none", "required"})

Json = dict[str, Any]


def encode(request: ModelRequest, model: str, preset: Preset, tools: bytes, *, stream: bool, after: str = "") -> bytes:
    """
    Return the body of a request.

    Args:
        request: What is asked.
        model: The model's name at the provider.
        preset: The server's ways.
        tools: The encoded tools.
        stream: Whether the reply shall be a stream, with usage at its end (EC58).
        after: How the same request failed before: a refused signature leaves earlier thinking out, a demanded call beside
            thinking asks for none.
    """
    settings = request.settings
    optional = {
        "model": model,
        preset.limit_member: settings.max_tokens,
        "temperature": settings.temperature,
        "top_p": settings.top_p,
        "stop": (list(settings.stop_sequences) or None) if preset.stops else None,
        "tool_choice": _tool_choice(request, preset),
        "parallel_tool_calls": _parallel(request, preset),
        "response_format": _response_format(settings.response_schema, strict=promises(preset, model)),
        "stream": True if stream else None,
        "stream_options": {"include_usage": True} if stream and preset.stream_usage else None,
        **_thinking_members(request, preset, refused=after == FORCED_THINKING),
    }
    members = members_of(request, optional, tools)
    bridged = bool(preset.bridged and re.fullmatch(preset.bridged, model))
    members["messages"] = encode_messages(
        request, Flags(preset, "" if after == INVALID_SIGNATURE else model), bridged=bridged
    )
    return join_members(members)


def offered(request: ModelRequest, preset: Preset) -> tuple[ToolSpec, ...]:
    """Return the tools to offer: only the demanded one, where a server cannot be told to call it (EC107, EC108)."""
    choice = tool_choice_of(request)
    if preset.named_choice or choice is None or choice in WORDS:
        return request.tools
    return tuple([tool for tool in request.tools if tool.name == choice]) or request.tools


def encode_tool(spec: ToolSpec) -> Json:
    """Return a tool definition."""
    function = {"name": spec.name, "description": spec.description, "parameters": spec.input_schema}
    return {"type": "function", "function": function}


def encode_strict_tool(spec: ToolSpec) -> Json:
    """Return a tool definition that a server may promise to keep to, if it is asked for and can be."""
    tool = encode_tool(spec)
    form = strict_form(spec.input_schema, "openai") if spec.strict else None
    return tool if form is None else {**tool, "function": {**tool["function"], "parameters": form, "strict": True}}


def encode_plain_tool(spec: ToolSpec) -> Json:
    """Return a tool definition whose schema holds no references, constants and null unions (EC102)."""
    function = {"name": spec.name, "description": spec.description, "parameters": plain_schema(spec.input_schema)}
    return {"type": "function", "function": function}


def _tool_choice(request: ModelRequest, preset: Preset) -> Any:
    choice = tool_choice_of(request)
    if choice is None or choice in {"auto", "none"}:
        return choice
    if choice == "required" or not preset.named_choice:
        return preset.required_word
    return {"type": "function", "function": {"name": choice}}


def _parallel(request: ModelRequest, preset: Preset) -> bool | None:
    if not request.tools:
        return None
    asked = request.settings.parallel_tool_calls
    return True if asked is None and preset.parallel else asked


def promises(preset: Preset, model: str) -> bool:
    """Return whether *model* may be asked to keep to a schema strictly."""
    return bool(preset.strict and re.fullmatch(preset.strict, model))


def _response_format(schema: Mapping[str, Any] | None, *, strict: bool) -> Json | None:
    if schema is None:
        return None
    form = strict_form(schema, "openai") if strict else None
    if form is not None:
        return {"type": "json_schema", "json_schema": {"name": schema_name(schema), "schema": form, "strict": True}}
    return {"type": "json_schema", "json_schema": {"name": schema_name(schema), "schema": schema}}


def _thinking_members(request: ModelRequest, preset: Preset, *, refused: bool) -> Json:
    thinking = request.settings.thinking
    if preset.thinking == "deepseek":
        # Thinking is on by default there, and refuses a demanded call.
        demanded = tool_choice_of(request) not in {None, "auto", "none"}
        off = demanded or (thinking is not None and thinking.mode == "none")
        return {"thinking": {"type": "disabled" if off else "enabled"}} if off or thinking is not None else {}
    if preset.thinking == "mistral" and thinking is not None and "magistral" not in request.model:
        return {"reasoning_effort": "none" if refused or thinking.mode == "none" else "high"}
    if refused or thinking is None or thinking.mode == "none" or preset.thinking == "mistral":
        return {}
    if preset.thinking == "openrouter":
        return {"reasoning": {**_amount(thinking), **({} if thinking.show else {"exclude": True})}}
    return {"reasoning_effort": _word(effort_of(thinking))}


def _amount(thinking: Thinking) -> Json:
    if thinking.tokens is not None:
        return {"max_tokens": thinking.tokens}
    return {"enabled": True} if thinking.effort is None else {"effort": _word(thinking.effort)}


def _word(effort: Effort) -> str:
    """Return an effort in the words that all of these services know."""
    return "high" if effort == "max" else effort
