"""
Requests of the Gemini API: everything of the body but its contents. Pure: no SDK, no clock, no I/O.

Names are written as the API documents them, in camel case.
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
from stepengine.models._settings import DROPPED, Way, WireSettings, convert_settings, make_unsupported_tool_error
from stepengine.models._thinking_levels import thinking_for_gemini
from stepengine.models._wire import encode_json, encode_members, join_members, resolve_tool_choice
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
"""The generation that takes functions beside the provider's own tools and beside a schema (providers:PV41)."""
VALIDATING = re.compile(r"(?:models/)?gemini-2\.5")
"""Models before Gemini 3 that can be held to the schemas of functions."""
TIERS = {"auto": None, "standard": "standard", "flex": "flex", "priority": "priority"}
OURS = b'[{"functionDeclarations":'

Json = dict[str, Any]


def make_request_path(model: str, method: str, *, is_vertex: bool = False) -> str:
    """Return where a request goes; tuned models are named with their collection, those on Vertex AI with their publisher."""
    if is_vertex and not model.startswith(("projects/", "publishers/", "models/")):
        publisher, _, name = model.rpartition("/")
        return f"publishers/{publisher or 'google'}/models/{name}:{method}"
    return f"{model if '/' in model else f'models/{model}'}:{method}"


def encode(
    request: ModelRequest, model: str, provider: str, tools: bytes, *, after: str = "", is_vertex: bool = False
) -> bytes:
    """
    Return the body of a request; whether the reply is a stream stands in the path and not here (ecosystem:EC58).

    Args:
        request: What is asked.
        model: The model's name at the provider.
        provider: The provider's name.
        tools: The encoded function declarations.
        after: How the same request failed before: a refused signature leaves earlier thoughts and signatures out.
        is_vertex: Whether the model runs on Vertex AI.
    """
    said = encode_settings(request, model, is_vertex=is_vertex).members
    return join_members(
        _encode_body_members(request, model, provider, tools, said, thinking=after != INVALID_SIGNATURE)
    )


def encode_token_count_request(
    request: ModelRequest, model: str, provider: str, tools: bytes, *, is_vertex: bool = False
) -> bytes:
    """Return the body of the question how many tokens a request has, with its system prompt and tools."""
    asked = _encode_body_members(request, model, provider, tools, {}, thinking=True)
    if is_vertex:
        asked.pop("toolConfig", None)  # it knows the members of a request one by one, and not this one
        return join_members(asked)
    members = {"model": encode_json(make_request_path(model, "")[:-1]), **asked}
    return join_members({"generateContentRequest": join_members(members)})


def encode_tool(spec: ToolSpec) -> Json:
    """Return a function declaration."""
    return {"name": spec.name, "description": spec.description, "parametersJsonSchema": spec.input_schema}


def encode_settings(request: ModelRequest, model: str, *, is_vertex: bool = False) -> WireSettings:
    """Return what the settings of a request become that only some wires know."""
    ways: dict[str, Way] = {
        "service_tier": lambda tier: _encode_tier(tier) if tier in TIERS else None,
        "seed": lambda seed: {"generationConfig": {"seed": seed}},
        "logprobs": lambda most: {
            "generationConfig": {"responseLogprobs": True, **({"logprobs": most} if most else {})}
        },
        "store": lambda keep: None if is_vertex else {"store": keep},
        "safety": lambda safety: {"safetySettings": [_encode_safety(name, word) for name, word in safety.items()]},
        # It caches by itself for minutes, and what is to be kept longer is made by another request.
        "cache": lambda lifetime: {} if lifetime == "5m" else None,
        "server_tools": lambda items: _encode_server_tools(items, request, model, is_vertex=is_vertex),
    }
    return convert_settings(request.settings, ways)


def _encode_tier(tier: str) -> Json:
    word = TIERS[tier]
    return {} if word is None else {"serviceTier": word}


def _encode_safety(category: str, threshold: str) -> Json:
    """Return a threshold in the API's words; words that are its own already are left as they are."""
    word, limit = category.upper(), threshold.upper()
    return {
        "category": word if word.startswith("HARM_CATEGORY_") else f"HARM_CATEGORY_{word}",
        "threshold": limit if limit == "OFF" or limit.startswith("BLOCK_") else f"BLOCK_{limit}",
    }


def _encode_server_tools(items: tuple[ServerTool, ...], request: ModelRequest, model: str, *, is_vertex: bool) -> Json:
    """Return the tools of the provider; from Gemini 3 on their calls and results come as parts, which go back (providers:PV41)."""
    circulates = parse_generation(model) >= CIRCULATES_SINCE and not is_vertex
    if not circulates and (request.tools or request.settings.response_schema is not None):
        where = "on Vertex AI" if is_vertex else "before Gemini 3"
        why = f"{where} it stands beside neither the agent's own tools nor a response_schema"
        raise make_unsupported_tool_error(items[0], model, "google", why)
    members: Json = {"tools": [_encode_server_tool(item, model, is_vertex=is_vertex) for item in items]}
    if circulates:
        members["toolConfig"] = {"includeServerSideToolInvocations": True}
    searches = [item for item in items if isinstance(item, WebSearch | UrlContext)]
    dropped = ["server_tools.max_uses"] if any(item.max_uses is not None for item in searches) else []
    if any(isinstance(item, WebSearch) and item.location is not None for item in searches):
        dropped.append("server_tools.location")
    return {**members, DROPPED: dropped}


def _encode_server_tool(item: ServerTool, model: str, *, is_vertex: bool) -> Json:
    if isinstance(item, FileSearch):
        if is_vertex:
            raise make_unsupported_tool_error(item, model, "vertex")
        most = {} if item.max_results is None else {"topK": item.max_results}
        return {"fileSearch": {"fileSearchStoreNames": list(item.stores), **most}}
    if isinstance(item, CodeExecution):
        if item.files:
            raise make_unsupported_tool_error(item, model, "google", "it takes no files; put them into a message")
        return {"codeExecution": {}}
    if isinstance(item, Programs):
        raise make_unsupported_tool_error(item, model, "google")
    if item.allowed_domains or item.blocked_domains:
        raise make_unsupported_tool_error(item, model, "google", "it cannot be held to domains or kept from them")
    return {"googleSearch": {}} if isinstance(item, WebSearch) else {"urlContext": {}}


def _encode_body_members(
    request: ModelRequest, model: str, provider: str, tools: bytes, more: Mapping[str, Any], *, thinking: bool
) -> dict[str, bytes]:
    settings = request.settings
    generation = {
        "temperature": settings.temperature,
        "topP": settings.top_p,
        "maxOutputTokens": settings.max_tokens,
        "stopSequences": list(settings.stop_sequences) or None,
        "thinkingConfig": thinking_for_gemini(settings.thinking, model).members or None,
        "responseMimeType": "application/json" if settings.response_schema is not None else None,
        "responseJsonSchema": settings.response_schema,
    }
    config = {name: value for name, value in generation.items() if value is not None}
    # `more` is what the settings that only some wires know have become (`encode_settings`). Of its objects two are shared with
    # what every wire knows, and are put together here.
    optional = {
        **more,
        "systemInstruction": {"parts": [{"text": request.system_prompt}]} if request.system_prompt else None,
        "toolConfig": {**(_encode_tool_config(request, model) or {}), **more.get("toolConfig", {})} or None,
        "generationConfig": {**config, **more.get("generationConfig", {})} or None,
    }
    members = encode_members(request, optional, OURS + tools + b"}]")
    flags = GoogleEncodeOptions(provider, model if thinking else "", parse_generation(model) >= SIGNED_SINCE)
    if token := find_continuation_token(request, provider):
        request = attrs.evolve(request, tail=request.tail[:-1])
        members[GOES_ON_WITH] = encode_json(token)
    members["contents"] = encode_messages(request, flags)
    return members


def _encode_tool_config(request: ModelRequest, model: str) -> Json | None:
    """Return which functions may be called. Strict ones have a mode that holds a model to their schemas (providers:PV41)."""
    choice = resolve_tool_choice(request) if request.tools else None
    if choice in {None, "auto"} and has_validated_tools(request, model):
        return {"functionCallingConfig": {"mode": "VALIDATED"}}
    if choice is None:
        return None
    if choice in MODES:
        return {"functionCallingConfig": {"mode": MODES[choice]}}
    return {"functionCallingConfig": {"mode": "ANY", "allowedFunctionNames": [choice]}}


def has_validated_tools(request: ModelRequest, model: str) -> bool:
    """Return whether a tool of the request shall be strict and the model can be held to its schema."""
    held = parse_generation(model) >= CIRCULATES_SINCE or VALIDATING.match(model) is not None
    return held and any(tool.strict for tool in request.tools)
