"""
Encode requests for the Responses API, all body members except the input items. Pure: no SDK, no clock, no I/O.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

from stepengine.data.models import ModelRequest
from stepengine.data.server_tools import CodeExecution, FileSearch, Programs, ServerTool, WebSearch
from stepengine.data.tools import ToolSpec
from stepengine.errors import ModelError
from stepengine.models._failures import DANGLING_REASONING, INVALID_SIGNATURE, UNKNOWN_FIELD
from stepengine.models._hidden_tools import find_hidden_tool_names
from stepengine.models._json import find_objects
from stepengine.models._programs import make_allowed_callers_member, merge_programs, require_program_tool_offered
from stepengine.models._schemas import make_strict_schema
from stepengine.models._settings import (
    DROPPED,
    SettingConverter,
    WireSettings,
    convert_settings,
    encode_openai_cache_lifetime,
    encode_user_location,
    make_unsupported_tool_error,
)
from stepengine.models._thinking_levels import encode_thinking_for_responses
from stepengine.models._wire import encode_body_members, join_json_members, make_schema_name, resolve_tool_choice
from stepengine.models.openai.encode import OpenAIEncodeOptions, encode_messages
from stepengine.models.presets import Preset

TOOL_SEARCH = {"type": "tool_search"}
"""The definition of the API's tool search (providers:PV64)."""

WORDS = frozenset({"auto", "none", "required"})
KEY_DIGITS = 32
"""128 bits distinguish conversations, and OpenAI documents at most 64 characters."""
PROGRAM = "programmatic"
"""The name of the caller for calls from a program."""
OPENAI_ITSELF = frozenset({"openai", "azure_responses"})
"""Services with OpenAI's own implementation of the API."""

RESULTS = {FileSearch: "file_search_call.results", CodeExecution: "code_interpreter_call.outputs"}
"""The ``include`` values that request the results of server tools; without them the reply has only their calls."""

Json = dict[str, Any]


def encode(
    request: ModelRequest, model: str, preset: Preset, tools: bytes, *, stream: bool, previous_failure: str = ""
) -> bytes:
    """
    Return the body of a request with the whole conversation; raise ``ModelError`` for background replies and unsupported server tools.

    Args:
        request: The request.
        model: The model's name at the provider.
        preset: The preset of the service.
        tools: The encoded tools.
        stream: Whether the reply is requested as a stream.
        previous_failure: The failure kind of the previous attempt. After a rejected signature, earlier reasoning is left out. After
            rejected sources, those of earlier searches are left out.

    Raises:
        ModelError: for a reply in the background, because it would have to be polled, and for a server tool that the
            provider does not have.
    """
    # (ecosystem:EC96)
    settings = request.settings
    if settings.extra.get("background") or (settings.extra.get("body") or {}).get("background"):
        msg = (
            f"ModelSettings(extra=...) asks {model!r} for a reply in the background, which is not supported. Remove "
            "'background', and give the provider longer Timeouts if a reply takes long"
        )
        raise ModelError(msg, kind="request")
    said = dict(encode_provider_settings(request, model, preset).members)
    include = [*(["reasoning.encrypted_content"] if preset.encrypted_reasoning else []), *said.pop("include", [])]
    optional = {
        **_encode_shared_members(request, model, preset),
        "store": False,
        "max_output_tokens": settings.max_tokens,
        "temperature": settings.temperature,
        "top_p": settings.top_p,
        "include": include or None,
        "prompt_cache_key": _make_cache_key(request) if preset.cache_key else None,
        "stream": True if stream else None,
        **said,
    }
    members = encode_body_members(request, optional, tools)
    known = "" if previous_failure in (INVALID_SIGNATURE, DANGLING_REASONING) else model
    flags = OpenAIEncodeOptions(
        preset.name, known, sources=previous_failure != UNKNOWN_FIELD, hidden=find_hidden_tool_names(request)
    )
    members["input"] = encode_messages(request, flags, _make_definition_lookup(request))
    return join_json_members(members)


def encode_token_count_request(request: ModelRequest, model: str, preset: Preset, tools: bytes) -> bytes:
    """Return the body of a request that counts the tokens of *request*."""
    shared = _encode_shared_members(request, model, preset)
    if not request.tools:
        shared["tool_choice"] = None  # server tools are not sent, and the API rejects a choice without tools
    members = encode_body_members(request, shared, tools, with_extra=False)
    flags = OpenAIEncodeOptions(preset.name, model, hidden=find_hidden_tool_names(request))
    members["input"] = encode_messages(request, flags, _make_definition_lookup(request))
    return join_json_members(members)


def _make_definition_lookup(request: ModelRequest) -> Callable[[str], Json]:
    """Return a function that returns the definition of a tool of *request* by its name."""
    programs = merge_programs(request.settings)
    return lambda name: encode_tool(next(tool for tool in request.tools if tool.name == name), programs)


def has_extra_tool_search(request: ModelRequest) -> bool:
    """Return whether ``settings.extra`` already defines the API's tool search, such as one for the client."""
    extra = request.settings.extra
    given = [*find_objects(extra, "tools"), *find_objects(extra, "body", "tools")]
    return any(tool.get("type") == TOOL_SEARCH["type"] for tool in given)


def encode_tool(spec: ToolSpec, programs: Programs | None = None) -> Json:
    """Return a tool definition, always with ``strict``, because the API would otherwise rewrite the schema."""
    # (ecosystem:EC102)
    form = make_strict_schema(spec.input_schema, "openai") if spec.strict else None
    return {
        "type": "function",
        "name": spec.name,
        "description": spec.description,
        "parameters": spec.input_schema if form is None else form,
        "strict": form is not None,
        **make_allowed_callers_member(programs, spec, PROGRAM),
    }


def encode_provider_settings(request: ModelRequest, model: str, preset: Preset) -> WireSettings:
    """Return the body members for the settings that only some wires support, and the names of dropped settings."""
    has_several, tiers = len(request.settings.server_tools) > 1, dict(preset.tiers)
    converters: dict[str, SettingConverter] = {
        "service_tier": lambda tier: {"service_tier": tiers[tier]} if tier in tiers else None,
        "logprobs": lambda most: {"top_logprobs": most, "include": ["message.output_text.logprobs"]},
        "store": lambda keep: {"store": keep},
        "cache": lambda lifetime: encode_openai_cache_lifetime(lifetime, model, preset),
        "cache_key": lambda key: {preset.key_member: key} if preset.key_member else None,
        "server_tools": lambda items: _encode_server_tools(items, request, model, preset, has_several=has_several),
    }
    return convert_settings(request.settings, converters)


def _encode_server_tools(
    items: tuple[ServerTool, ...], request: ModelRequest, model: str, preset: Preset, *, has_several: bool
) -> Json:
    """Return the definitions of the server tools, their ``include`` values, and their limit of calls."""
    programs = merge_programs(request.settings)
    if programs is not None and preset.name == "openai":
        require_program_tool_offered(request, programs, model, preset.name)
    members: Json = {"tools": [_encode_server_tool(item, model, preset) for item in items]}
    include = [word for kind, word in RESULTS.items() if any(isinstance(item, kind) for item in items)]
    if include and preset.name in OPENAI_ITSELF:
        members["include"] = include
    most = [item.max_uses for item in items if isinstance(item, WebSearch) and item.max_uses is not None]
    if most and (has_several or preset.name not in OPENAI_ITSELF):
        members[DROPPED] = ["server_tools.max_uses"]
    elif most:
        members["max_tool_calls"] = most[0]
    return members


def _encode_server_tool(item: ServerTool, model: str, preset: Preset) -> Json:
    """Return the definition of a server tool; raise ``ModelError`` for unsupported tools and options."""
    if isinstance(item, WebSearch):
        return _encode_web_search(item, model, preset)
    if isinstance(item, CodeExecution):
        files = {"file_ids": list(item.files)} if item.files else {}
        return {"type": "code_interpreter", "container": {"type": "auto", **files}}
    if isinstance(item, FileSearch):
        tool: Json = {"type": "file_search", "vector_store_ids": list(item.stores)}
        return tool if item.max_results is None else {**tool, "max_num_results": item.max_results}
    if isinstance(item, Programs):
        if preset.name != "openai":
            raise make_unsupported_tool_error(item, model, preset.name)
        return {"type": "programmatic_tool_calling"}
    raise make_unsupported_tool_error(
        item, model, preset.name, "its web search opens pages by itself; use WebSearch() instead"
    )


def _encode_web_search(item: WebSearch, model: str, preset: Preset) -> Json:
    """Return the definition of the web search; raise ``ModelError`` for unsupported lists of domains."""
    tool: Json = {"type": "web_search"}
    if item.blocked_domains and preset.name in OPENAI_ITSELF:
        raise make_unsupported_tool_error(item, model, preset.name, "it accepts only allowed_domains")
    if item.allowed_domains and item.blocked_domains:
        raise make_unsupported_tool_error(
            item, model, preset.name, "it accepts allowed_domains or blocked_domains, not both"
        )
    if item.allowed_domains:
        tool["filters"] = {"allowed_domains": list(item.allowed_domains)}
    elif item.blocked_domains:
        tool["filters"] = {"excluded_domains": list(item.blocked_domains)}
    place = encode_user_location(item.location)
    return tool if place is None else {**tool, "user_location": place}


def _encode_shared_members(request: ModelRequest, model: str, preset: Preset) -> Json:
    """Return the members that model calls and token counts have in common."""
    return {
        "model": model,
        "instructions": request.system_prompt or None,
        "reasoning": encode_thinking_for_responses(request.settings.thinking, preset.thinking, model).members or None,
        "text": _encode_text_config(request),
        "tool_choice": _encode_tool_choice(request),
        "parallel_tool_calls": request.settings.parallel_tool_calls if request.tools else None,
    }


def _encode_text_config(request: ModelRequest) -> Json | None:
    """Return the ``text`` member with the schema of the reply; ``None`` without a schema."""
    schema = request.settings.response_schema
    if schema is None:
        return None
    form = make_strict_schema(schema, "openai")
    named = {"type": "json_schema", "name": make_schema_name(schema)}
    return {"format": {**named, "schema": schema if form is None else form, "strict": form is not None}}


def _encode_tool_choice(request: ModelRequest) -> object:
    """Return the tool choice: a word, the only function that may be called, or ``None`` without a choice."""
    choice = resolve_tool_choice(request)
    return choice if choice is None or choice in WORDS else {"type": "function", "name": choice}


def _make_cache_key(request: ModelRequest) -> str:
    """Return a cache key for the conversation: a hash of its system prompt and its first message."""
    digest = hashlib.sha256(request.system_prompt.encode("utf-8", "replace"))
    if len(request.messages):
        digest.update(request.messages[0].text.encode("utf-8", "replace"))
    return digest.hexdigest()[:KEY_DIGITS]
