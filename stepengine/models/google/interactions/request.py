"""Encode requests for the Interactions API, all body members except the input. Pure: no SDK, no clock, no I/O."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stepengine.data.models import ModelRequest, ModelSettings
from stepengine.data.server_tools import CodeExecution, FileSearch, Programs, ServerTool, WebSearch
from stepengine.data.tools import ToolSpec
from stepengine.errors import ModelError
from stepengine.models._failures import INVALID_SIGNATURE
from stepengine.models._settings import (
    DROPPED,
    SettingConverter,
    WireSettings,
    convert_settings,
    make_unsupported_tool_error,
)
from stepengine.models._thinking_levels import CANNOT, ThinkingRequest, effort_from_thinking, get_lowest_gemini_level
from stepengine.models._wire import encode_body_members, join_json_members, resolve_tool_choice
from stepengine.models.google.interactions.encode import InteractionsEncodeOptions, encode_messages
from stepengine.models.google.request import list_dropped_search_options

CHOICES = {"auto": "auto", "none": "none", "required": "any"}
TIERS = {"auto": {}, **{tier: {"service_tier": tier} for tier in ("standard", "flex", "priority")}}
"""The body members for each service tier."""
STATEFUL = ("background", "previous_interaction_id", "agent", "continuation_token")
"""Members of requests that depend on state at the provider, or run in the background."""

Json = dict[str, Any]


def encode(
    request: ModelRequest, model: str, provider: str, tools: bytes, *, stream: bool, previous_failure: str = ""
) -> bytes:
    """
    Return the body of a request with the whole history. The provider stores it only with ``store=True``.

    Raises:
        ModelError: for a server tool that the provider does not have, and for the members ``STATEFUL`` in ``extra``.
    """
    settings = request.settings
    _require_no_stateful_options(settings)
    config = {
        "temperature": settings.temperature,
        "top_p": settings.top_p,
        "max_output_tokens": settings.max_tokens,
        "stop_sequences": list(settings.stop_sequences) or None,
        "tool_choice": _encode_tool_choice(request),
        **encode_thinking(settings, model).members,
    }
    said = encode_provider_settings(request, model, provider).members
    generation = {name: value for name, value in config.items() if value is not None}
    schema = settings.response_schema
    head = {
        "model": model,
        "system_instruction": request.system_prompt or None,
        "response_format": None
        if schema is None
        else {"type": "text", "mime_type": "application/json", "schema": schema},
        "store": False,
        "stream": True if stream else None,
        **said,
        "generation_config": {**generation, **said.get("generation_config", {})} or None,
    }
    members = encode_body_members(request, head, tools)
    flags = InteractionsEncodeOptions(provider, "" if previous_failure == INVALID_SIGNATURE else model)
    members["input"] = encode_messages(request, flags)
    return join_json_members(members)


def _require_no_stateful_options(settings: ModelSettings) -> None:
    """Raise ``ModelError`` for members of ``extra`` that depend on state at the provider or run in the background."""
    body = settings.extra.get("body")
    for place in (settings.extra, body if isinstance(body, Mapping) else {}):
        for name in STATEFUL:
            if place.get(name):
                msg = (
                    f"ModelSettings.extra[{name!r}] cannot be sent to the Interactions API, because each request contains "
                    "its whole history and waits for its reply; remove it"
                )
                raise ModelError(msg, kind="settings")


def encode_tool(spec: ToolSpec) -> Json:
    """Return a function declaration."""
    return {"type": "function", "name": spec.name, "description": spec.description, "parameters": spec.input_schema}


def encode_provider_settings(request: ModelRequest, model: str, provider: str) -> WireSettings:
    """Return the body members for the settings that only some wires support, and the names of dropped settings."""
    converters: dict[str, SettingConverter] = {
        "service_tier": TIERS.get,
        "seed": lambda seed: {"generation_config": {"seed": seed}},
        "store": lambda keep: {"store": keep},
        "safety": lambda safety: {
            "safety_settings": [_encode_safety_setting(name, word) for name, word in safety.items()]
        },
        # The API caches automatically for minutes.
        "cache": lambda lifetime: {} if lifetime == "5m" else None,
        "server_tools": lambda items: _encode_server_tools(items, model, provider),
    }
    return convert_settings(request.settings, converters)


def _encode_safety_setting(category: str, threshold: str) -> Json:
    """Return a safety setting in the API's spelling, without the prefix of a *category* and with that of a *threshold*."""
    word, limit = category.lower().removeprefix("harm_category_"), threshold.lower()
    return {"type": word, "threshold": limit if limit == "off" or limit.startswith("block_") else f"block_{limit}"}


def _encode_server_tools(items: tuple[ServerTool, ...], model: str, provider: str) -> Json:
    """Return the definitions of the server tools, and the names of dropped options."""
    tools = [_encode_server_tool(item, model, provider) for item in items]
    return {"tools": tools, DROPPED: list_dropped_search_options(items)}


def _encode_server_tool(item: ServerTool, model: str, provider: str) -> Json:
    """Return the definition of a server tool; raise ``ModelError`` for unsupported tools and options."""
    if isinstance(item, FileSearch):
        most = {} if item.max_results is None else {"top_k": item.max_results}
        return {"type": "file_search", "file_search_store_names": list(item.stores), **most}
    if isinstance(item, CodeExecution):
        if item.files:
            raise make_unsupported_tool_error(item, model, provider, "it accepts no files; put them into a message")
        return {"type": "code_execution"}
    if isinstance(item, Programs):
        raise make_unsupported_tool_error(item, model, provider)
    if item.allowed_domains or item.blocked_domains:
        raise make_unsupported_tool_error(item, model, provider, "it cannot be restricted to domains")
    return {"type": "google_search"} if isinstance(item, WebSearch) else {"type": "url_context"}


def _encode_tool_choice(request: ModelRequest) -> object:
    """Return the tool choice; ``validated``, which guarantees schemas, for a strict tool without a forced call."""
    choice = resolve_tool_choice(request) if request.tools else None
    if choice in {None, "auto"} and any(tool.strict for tool in request.tools):
        return "validated"
    if choice is None or choice in CHOICES:
        return None if choice is None else CHOICES[choice]
    return {"allowed_tools": {"mode": "any", "tools": [choice]}}


def encode_thinking(settings: ModelSettings, model: str) -> ThinkingRequest:
    """Return the thinking members of a request, with a budget in tokens as a level, and a note on unsupported options."""
    thinking = settings.thinking
    if thinking is None:
        return ThinkingRequest()
    if thinking.mode == "none":
        least = get_lowest_gemini_level(model)
        return ThinkingRequest({"thinking_level": least}, CANNOT.format(model=model, least=f"{least} effort"))
    shown = {"thinking_summaries": "auto" if thinking.show else "none"}
    if thinking.effort is None and thinking.tokens is None:
        return ThinkingRequest(shown)
    effort = effort_from_thinking(thinking)
    return ThinkingRequest({"thinking_level": "high" if effort == "max" else effort, **shown})
