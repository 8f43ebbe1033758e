"""
Encode requests for Chat Completions, all body members except the messages. Pure: no SDK, no clock, no I/O.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import attrs

from stepengine.data.models import ModelRequest
from stepengine.data.server_tools import ServerTool, WebSearch
from stepengine.data.tools import ToolSpec
from stepengine.models._failures import FORCED_THINKING, INVALID_SIGNATURE
from stepengine.models._schemas import make_strict_schema, remove_references_and_nulls
from stepengine.models._settings import (
    DROPPED,
    SettingConverter,
    WireSettings,
    convert_settings,
    encode_openai_cache_lifetime,
    encode_user_location,
    make_unsupported_tool_error,
)
from stepengine.models._thinking_levels import ThinkingRequest, encode_thinking_for_chat
from stepengine.models._wire import (
    encode_body_members,
    encode_json,
    join_json_members,
    make_schema_name,
    resolve_tool_choice,
)
from stepengine.models.openai_chat.encode import ChatEncodeOptions, encode_messages
from stepengine.models.presets import Preset

WORDS = frozenset({"auto", "none", "required"})
MARKED = re.compile(r"~?anthropic/")
"""Models of gateways that cache only marked prompts; requests mark them by default."""
MARKS = {"5m": {"type": "ephemeral"}, "1h": {"type": "ephemeral", "ttl": "1h"}}
WITHOUT_STOPS = re.compile(r"o3|o4-mini")
"""Models of OpenAI that reject stop sequences (providers:PV13)."""
SEARCHES = re.compile(r"gpt-.*-search")
"""Models of OpenAI that search the web through Chat Completions."""

Json = dict[str, Any]


def encode(
    request: ModelRequest, model: str, preset: Preset, tools: bytes, *, stream: bool, previous_failure: str = ""
) -> bytes:
    """
    Return the body of a request.

    Args:
        request: The request.
        model: The model's name at the provider.
        preset: The preset of the server.
        tools: The encoded tools.
        stream: Whether the reply is requested as a stream, with usage at its end (ecosystem:EC58).
        previous_failure: The failure kind of the previous attempt. After a rejected signature, earlier thinking is left out. After a
            rejected forced call, thinking is switched off.
    """
    settings = request.settings
    said = encode_provider_settings(request, model, preset)
    optional = {
        "model": model,
        preset.limit_member: settings.max_tokens,
        "temperature": settings.temperature,
        "top_p": settings.top_p,
        "stop": (list(settings.stop_sequences) or None) if supports_stop_sequences(preset, model) else None,
        "tool_choice": _encode_tool_choice(request, preset) if request.tools or "tools" in said.members else None,
        "parallel_tool_calls": _encode_parallel_calls(request, preset),
        "response_format": _encode_response_format(
            settings.response_schema, strict=supports_strict_schemas(preset, model)
        ),
        "stream": True if stream else None,
        "stream_options": {"include_usage": True} if stream and preset.stream_usage else None,
        **encode_thinking(request, model, preset, is_off=previous_failure == FORCED_THINKING).members,
        **said.members,
    }
    members = encode_body_members(request, optional, tools)
    if members.get("tools") == NO_TOOLS:
        del members["tools"]
    bridged = bool(preset.bridged and re.fullmatch(preset.bridged, model))
    mark = _make_cache_mark(settings.cache, model, preset)
    members["messages"] = encode_messages(
        request,
        ChatEncodeOptions(preset, "" if previous_failure == INVALID_SIGNATURE else model),
        is_bridged=bridged,
        cache_mark=None if mark is None else encode_json(mark),
    )
    return join_json_members(members)


NO_TOOLS = b"[]"


def encode_provider_settings(request: ModelRequest, model: str, preset: Preset) -> WireSettings:
    """Return the body members for the settings that only some services support, and the names of dropped settings."""
    tiers = dict(preset.tiers)
    converters: dict[str, SettingConverter] = {
        "service_tier": lambda tier: {"service_tier": tiers[tier]} if tier in tiers else None,
        "seed": lambda seed: {preset.seed_member: seed} if preset.seed_member else None,
        "logprobs": lambda most: (
            {"logprobs": True, **({"top_logprobs": most} if most else {})} if preset.logprobs else None
        ),
        "store": lambda keep: {"store": keep} if preset.supports_store else None,
        "cache": lambda lifetime: _encode_cache_lifetime(lifetime, model, preset),
        "cache_key": lambda key: {preset.key_member: key} if preset.key_member else None,
        "server_tools": lambda items: _encode_server_tools(items, model, preset),
    }
    return convert_settings(request.settings, converters)


def _encode_cache_lifetime(lifetime: str, model: str, preset: Preset) -> Json | None:
    """Return the body members for a cache lifetime, ``{}`` where marks in the messages set it; ``None`` if unsupported."""
    if preset.cache_marks and re.fullmatch(preset.cache_marks, model):
        return {}
    return encode_openai_cache_lifetime(lifetime, model, preset)


def _make_cache_mark(lifetime: str | None, model: str, preset: Preset) -> Json | None:
    """Return the cache mark for the messages, without a *lifetime* only for Claude at a gateway; ``None`` for no mark."""
    if not preset.cache_marks or not re.fullmatch(preset.cache_marks, model):
        return None
    wanted = lifetime or ("5m" if MARKED.match(model) else "off")
    return dict(MARKS[wanted]) if wanted in MARKS else None


def _encode_server_tools(items: tuple[ServerTool, ...], model: str, preset: Preset) -> Json:
    """Return the members for a web search; raise ``ModelError`` for other server tools, which Chat Completions does not support."""
    members: Json = {DROPPED: []}
    for item in items:
        if not isinstance(item, WebSearch):
            raise make_unsupported_tool_error(item, model, preset.name)
        if preset.name == "openrouter":
            members["tools"] = [*members.get("tools", ()), _encode_openrouter_search(item, model)]
        elif item.allowed_domains or item.blocked_domains:
            raise make_unsupported_tool_error(item, model, preset.name, "its search cannot be restricted to domains")
        elif preset.name in OPENAI_ITSELF and SEARCHES.match(model):
            place = {} if item.location is None else {"type": "approximate", "approximate": item.location}
            members["web_search_options"] = {"user_location": place} if place else {}
            members[DROPPED] += ["server_tools.max_uses"] if item.max_uses is not None else []
        else:
            raise make_unsupported_tool_error(item, model, preset.name)
    return members


def _encode_openrouter_search(item: WebSearch, model: str) -> Json:
    """Return the definition of OpenRouter's search, which prefers the provider's own search; raise ``ModelError`` for unsupported options."""
    if item.allowed_domains and item.blocked_domains:
        raise make_unsupported_tool_error(
            item, model, "openrouter", "it accepts allowed_domains or blocked_domains, not both"
        )
    if item.blocked_domains and model.startswith("openai/"):
        raise make_unsupported_tool_error(item, model, "openrouter", "OpenAI's models ignore blocked_domains")
    parameters = {
        "max_uses": item.max_uses,
        "allowed_domains": list(item.allowed_domains) or None,
        "excluded_domains": list(item.blocked_domains) or None,
        "user_location": encode_user_location(item.location),
    }
    given = {name: value for name, value in parameters.items() if value is not None}
    return {"type": "openrouter:web_search", **({"parameters": given} if given else {})}


OPENAI_ITSELF = frozenset({"openai_chat", "azure"})


def supports_stop_sequences(preset: Preset, model: str) -> bool:
    """Return whether stop sequences can be sent; else replies are cut at them locally."""
    return preset.stops and not (preset.name in OPENAI_ITSELF and WITHOUT_STOPS.match(model))


def demands_unsupported_call(request: ModelRequest, model: str, preset: Preset) -> bool:
    """Return whether the request forces a call although the server does not support that, or no tool is offered."""
    if resolve_tool_choice(request) in {None, "auto", "none"}:
        return False
    callable_ = request.tools or "tools" in encode_provider_settings(request, model, preset).members
    return not preset.required_word or not callable_


def limit_tools_if_choice_unsupported(request: ModelRequest, preset: Preset) -> tuple[ToolSpec, ...]:
    """Return the tools of the request; only the chosen one, or none, if the server does not support that tool choice."""
    # (ecosystem:EC107)
    choice = resolve_tool_choice(request)
    if choice == "none" and preset.ignores_none:
        return ()
    if preset.named_choice or choice is None or choice in WORDS:
        return request.tools
    return tuple([tool for tool in request.tools if tool.name == choice]) or request.tools


def encode_tool(spec: ToolSpec) -> Json:
    """Return a tool definition."""
    function = {"name": spec.name, "description": spec.description, "parameters": spec.input_schema}
    return {"type": "function", "function": function}


def encode_strict_tool(spec: ToolSpec) -> Json:
    """Return a tool definition, with a strict schema if the tool asks for one and its schema supports it."""
    tool = encode_tool(spec)
    form = make_strict_schema(spec.input_schema, "openai") if spec.strict else None
    return tool if form is None else {**tool, "function": {**tool["function"], "parameters": form, "strict": True}}


def encode_simplified_tool(spec: ToolSpec) -> Json:
    """Return a tool definition with a schema without references, constants and null unions."""
    # (ecosystem:EC102)
    function = {
        "name": spec.name,
        "description": spec.description,
        "parameters": remove_references_and_nulls(spec.input_schema),
    }
    return {"type": "function", "function": function}


def _encode_tool_choice(request: ModelRequest, preset: Preset) -> object:
    """Return the tool choice in the words of the service, ``required`` for an unsupported name; ``None`` sends none."""
    choice = resolve_tool_choice(request)
    if choice == "none" and preset.ignores_none:
        return None
    if choice is None or choice in {"auto", "none"}:
        return choice
    if choice == "required" or not preset.named_choice:
        return preset.required_word or None
    return {"type": "function", "function": {"name": choice}}


def _encode_parallel_calls(request: ModelRequest, preset: Preset) -> bool | None:
    """Return the ``parallel_tool_calls`` member; ``None`` without tools, without a setting, or if the service does not support it."""
    if not request.tools or (preset.ignores_none and resolve_tool_choice(request) == "none"):
        return None
    asked = request.settings.parallel_tool_calls if preset.supports_parallel else None
    return True if asked is None and preset.parallel else asked


def supports_strict_schemas(preset: Preset, model: str) -> bool:
    """Return whether the service supports strict schemas for *model*."""
    return bool(preset.strict and re.fullmatch(preset.strict, model))


def _encode_response_format(schema: Mapping[str, object] | None, *, strict: bool) -> Json | None:
    """Return the member with the schema of the reply; ``None`` without a schema."""
    if schema is None:
        return None
    form = make_strict_schema(schema, "openai") if strict else None
    if form is not None:
        return {
            "type": "json_schema",
            "json_schema": {"name": make_schema_name(schema), "schema": form, "strict": True},
        }
    return {"type": "json_schema", "json_schema": {"name": make_schema_name(schema), "schema": schema}}


def encode_thinking(request: ModelRequest, model: str, preset: Preset, *, is_off: bool = False) -> ThinkingRequest:
    """Return the thinking members of a request; *is_off* switches thinking off, after the service rejected thinking."""
    is_call_forced = resolve_tool_choice(request) not in {None, "auto", "none"}
    asked = encode_thinking_for_chat(
        request.settings.thinking, preset.thinking, model, is_call_forced=is_call_forced, is_rejected=is_off
    )
    given, only = request.settings.temperature, asked.members.get("temperature")
    if only is not None and given not in (None, only):
        return attrs.evolve(asked, note=f"{model} thinks at temperature {only} only; temperature={given} is not sent")
    return asked
