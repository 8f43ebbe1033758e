"""
Encode requests for the Gemini API, all body members except the contents. Pure: no SDK, no clock, no I/O.

Members have the camel case names of the API's documentation.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import attrs

from stepengine.data.models import ModelRequest
from stepengine.data.server_tools import CodeExecution, FileSearch, Programs, ServerTool, UrlContext, WebSearch
from stepengine.data.tools import ToolSpec
from stepengine.models._failures import INVALID_SIGNATURE
from stepengine.models._settings import (
    DROPPED,
    SettingConverter,
    WireSettings,
    convert_settings,
    make_unsupported_tool_error,
)
from stepengine.models._thinking_levels import encode_thinking_for_gemini
from stepengine.models._wire import encode_body_members, encode_json, join_json_members, resolve_tool_choice
from stepengine.models.google.encode import (
    GOES_ON_WITH,
    SIGNED_SINCE,
    GoogleEncodeOptions,
    encode_messages,
    find_continuation_token,
    parse_generation,
)

MODES = {"auto": "AUTO", "none": "NONE", "required": "ANY"}
CIRCULATES_SINCE = 3
"""The first generation that accepts functions together with server tools and with a schema (providers:PV41)."""
VALIDATING = re.compile(r"(?:models/)?gemini-2\.5")
"""Models before Gemini 3 that can guarantee the schemas of functions."""
TIERS = {"auto": {}, **{tier: {"serviceTier": tier} for tier in ("standard", "flex", "priority")}}
"""The body members for each service tier."""
OURS = b'[{"functionDeclarations":'

Json = dict[str, Any]


def make_request_path(model: str, method: str, *, is_vertex: bool = False) -> str:
    """Return the URL path of a request; a model on Vertex AI is named with its publisher, a tuned model with its collection."""
    if is_vertex and not model.startswith(("projects/", "publishers/", "models/")):
        publisher, _, name = model.rpartition("/")
        return f"publishers/{publisher or 'google'}/models/{name}:{method}"
    return f"{model if '/' in model else f'models/{model}'}:{method}"


def encode(
    request: ModelRequest,
    model: str,
    provider: str,
    tools: bytes,
    *,
    previous_failure: str = "",
    is_vertex: bool = False,
) -> bytes:
    """
    Return the body of a request. The path, not the body, requests a stream.

    Args:
        request: The request.
        model: The model's name at the provider.
        provider: The provider's name.
        tools: The encoded function declarations.
        previous_failure: The failure kind of the previous attempt. After a rejected signature, earlier thoughts and signatures are left out.
        is_vertex: Whether the model runs on Vertex AI.
    """
    # (ecosystem:EC58)
    said = encode_provider_settings(request, model, is_vertex=is_vertex).members
    return join_json_members(
        _encode_body_members(request, model, provider, tools, said, with_thinking=previous_failure != INVALID_SIGNATURE)
    )


def encode_token_count_request(
    request: ModelRequest, model: str, provider: str, tools: bytes, *, is_vertex: bool = False
) -> bytes:
    """Return the body of a request that counts the tokens of *request*, including its system prompt and tools."""
    asked = _encode_body_members(request, model, provider, tools, {}, with_thinking=True)
    if is_vertex:
        asked.pop("toolConfig", None)  # Vertex AI rejects this member here
        return join_json_members(asked)
    members = {"model": encode_json(make_request_path(model, "")[:-1]), **asked}
    return join_json_members({"generateContentRequest": join_json_members(members)})


def encode_tool(spec: ToolSpec) -> Json:
    """Return a function declaration."""
    return {"name": spec.name, "description": spec.description, "parametersJsonSchema": spec.input_schema}


def encode_provider_settings(request: ModelRequest, model: str, *, is_vertex: bool = False) -> WireSettings:
    """Return the body members for the settings that only some wires support, and the names of dropped settings."""
    converters: dict[str, SettingConverter] = {
        "service_tier": TIERS.get,
        "seed": lambda seed: {"generationConfig": {"seed": seed}},
        "logprobs": lambda most: {
            "generationConfig": {"responseLogprobs": True, **({"logprobs": most} if most else {})}
        },
        "store": lambda keep: None if is_vertex else {"store": keep},
        "safety": lambda safety: {
            "safetySettings": [_encode_safety_setting(name, word) for name, word in safety.items()]
        },
        # The API caches automatically for minutes. A longer lifetime requires another request.
        "cache": lambda lifetime: {} if lifetime == "5m" else None,
        "server_tools": lambda items: _encode_server_tools(items, request, model, is_vertex=is_vertex),
    }
    return convert_settings(request.settings, converters)


def _encode_safety_setting(category: str, threshold: str) -> Json:
    """Return a safety setting with the API's prefixes added to *category* and *threshold* where they are missing."""
    word, limit = category.upper(), threshold.upper()
    return {
        "category": word if word.startswith("HARM_CATEGORY_") else f"HARM_CATEGORY_{word}",
        "threshold": limit if limit == "OFF" or limit.startswith("BLOCK_") else f"BLOCK_{limit}",
    }


def _encode_server_tools(items: tuple[ServerTool, ...], request: ModelRequest, model: str, *, is_vertex: bool) -> Json:
    """Return the members for server tools, and the names of dropped options; raise ``ModelError`` for unsupported combinations."""
    # Since Gemini 3 the reply has their calls and results as parts to send back (providers:PV41).
    circulates = parse_generation(model) >= CIRCULATES_SINCE and not is_vertex
    if not circulates and (request.tools or request.settings.response_schema is not None):
        where = "on Vertex AI" if is_vertex else "before Gemini 3"
        why = f"{where} it cannot be combined with the agent's own tools or a response_schema"
        raise make_unsupported_tool_error(items[0], model, "google", why)
    members: Json = {"tools": [_encode_server_tool(item, model, is_vertex=is_vertex) for item in items]}
    if circulates:
        members["toolConfig"] = {"includeServerSideToolInvocations": True}
    return {**members, DROPPED: list_dropped_search_options(items)}


def list_dropped_search_options(items: tuple[ServerTool, ...]) -> list[str]:
    """Return the names of the options of searches that Google's APIs do not have."""
    searches = [item for item in items if isinstance(item, WebSearch | UrlContext)]
    dropped = ["server_tools.max_uses"] if any(item.max_uses is not None for item in searches) else []
    if any(isinstance(item, WebSearch) and item.location is not None for item in searches):
        dropped.append("server_tools.location")
    return dropped


def _encode_server_tool(item: ServerTool, model: str, *, is_vertex: bool) -> Json:
    """Return the definition of a server tool; raise ``ModelError`` for unsupported tools and options."""
    if isinstance(item, FileSearch):
        if is_vertex:
            raise make_unsupported_tool_error(item, model, "vertex")
        most = {} if item.max_results is None else {"topK": item.max_results}
        return {"fileSearch": {"fileSearchStoreNames": list(item.stores), **most}}
    if isinstance(item, CodeExecution):
        if item.files:
            raise make_unsupported_tool_error(item, model, "google", "it accepts no files; put them into a message")
        return {"codeExecution": {}}
    if isinstance(item, Programs):
        raise make_unsupported_tool_error(item, model, "google")
    if item.allowed_domains or item.blocked_domains:
        raise make_unsupported_tool_error(item, model, "google", "it cannot be restricted to domains")
    return {"googleSearch": {}} if isinstance(item, WebSearch) else {"urlContext": {}}


def _encode_body_members(
    request: ModelRequest, model: str, provider: str, tools: bytes, more: Mapping[str, Any], *, with_thinking: bool
) -> dict[str, bytes]:
    """Return the encoded members of a body; without *with_thinking*, earlier thoughts and signatures are left out."""
    settings = request.settings
    generation = {
        "temperature": settings.temperature,
        "topP": settings.top_p,
        "maxOutputTokens": settings.max_tokens,
        "stopSequences": list(settings.stop_sequences) or None,
        "thinkingConfig": encode_thinking_for_gemini(settings.thinking, model).members or None,
        "responseMimeType": "application/json" if settings.response_schema is not None else None,
        "responseJsonSchema": settings.response_schema,
    }
    config = {name: value for name, value in generation.items() if value is not None}
    # `more` has the members of `encode_provider_settings`. Two of its objects are merged with the members of other settings.
    optional = {
        **more,
        "systemInstruction": {"parts": [{"text": request.system_prompt}]} if request.system_prompt else None,
        "toolConfig": {**(_encode_tool_config(request, model) or {}), **more.get("toolConfig", {})} or None,
        "generationConfig": {**config, **more.get("generationConfig", {})} or None,
    }
    members = encode_body_members(request, optional, OURS + tools + b"}]")
    flags = GoogleEncodeOptions(provider, model if with_thinking else "", parse_generation(model) >= SIGNED_SINCE)
    if token := find_continuation_token(request, provider):
        request = attrs.evolve(request, tail=request.tail[:-1])
        members[GOES_ON_WITH] = encode_json(token)
    members["contents"] = encode_messages(request, flags)
    return members


def _encode_tool_config(request: ModelRequest, model: str) -> Json | None:
    """Return the tool config: the mode of function calls, and the only function that may be called; ``None`` without a choice."""
    # The mode ``VALIDATED`` guarantees the schemas of strict functions (providers:PV41).
    choice = resolve_tool_choice(request) if request.tools else None
    if choice in {None, "auto"} and has_guaranteed_strict_tool(request, model):
        return {"functionCallingConfig": {"mode": "VALIDATED"}}
    if choice is None:
        return None
    if choice in MODES:
        return {"functionCallingConfig": {"mode": MODES[choice]}}
    return {"functionCallingConfig": {"mode": "ANY", "allowedFunctionNames": [choice]}}


def has_guaranteed_strict_tool(request: ModelRequest, model: str) -> bool:
    """Return whether a tool of the request is strict and the model can guarantee the schemas of tools."""
    held = parse_generation(model) >= CIRCULATES_SINCE or VALIDATING.match(model) is not None
    return held and any(tool.strict for tool in request.tools)
