"""
Encode requests for Anthropic's Messages API, all body members except the messages. Pure: no SDK, no clock, no I/O.

**Prompt caching.** The API caches a prefix in the order tools, system prompt, messages. A request marks the last tool, the
system prompt and, by a mark for the whole request, the last message. The API allows four marks.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

import attrs
from attrs import frozen

from stepengine.data.models import DEFAULT_BUDGET_TOKENS, ModelRequest, ModelSettings
from stepengine.data.server_tools import CodeExecution, Programs, ServerTool, UrlContext, WebSearch
from stepengine.data.tools import ToolSpec
from stepengine.models._failures import FORCED_THINKING, GRAMMAR, INVALID_SIGNATURE, LARGE_LIMIT, LOST_PROGRAM
from stepengine.models._hidden_tools import find_hidden_tool_names
from stepengine.models._programs import (
    RUNS_NEWER_CODE,
    make_allowed_callers_member,
    merge_programs,
    require_program_tool_offered,
)
from stepengine.models._schemas import MAX_OPTIONAL, count_optional_members, make_strict_schema
from stepengine.models._settings import (
    SettingConverter,
    WireSettings,
    convert_settings,
    encode_user_location,
    make_unsupported_tool_error,
)
from stepengine.models._thinking_levels import budget_from_thinking, effort_from_thinking
from stepengine.models._wire import (
    continues_paused_reply,
    encode_body_members,
    encode_json,
    join_json_members,
    resolve_tool_choice,
)
from stepengine.models.anthropic.encode import AnthropicEncodeOptions, encode_messages
from stepengine.models.anthropic.families import DEFAULT_MAX_TOKENS, AnthropicFamily

MIN_BUDGET_TOKENS = 1024
"""Anthropic documents 1,024 tokens as the smallest budget of thinking."""
UNDEMANDED = frozenset({None, "auto", "none"})

BOUND = re.compile(r"claude-fable-5-1")
"""
Models that reject earlier thinking after any change before it, unless the request allows them to drop it (ecosystem:EC98).
A cloud may put a prefix before the name.
"""

BINDING_BETA = "thinking-binding-controls-2026-08-01"

FAST = re.compile(r"claude-opus-(?:4-[6-9]|[5-9])")
"""Models with a faster mode for a higher price."""

FAST_BETA = "fast-mode-2026-02-01"
FALLBACK_BETA = "server-side-fallback-2026-07-01"
MAX_STRICT = 20
"""The largest number of strict tools in one request (providers:PV43)."""

TOOL_SEARCH = {"type": "tool_search_tool_bm25_20251119", "name": "tool_search_tool_bm25"}
"""The definition of the API's tool search by words (providers:PV63)."""

TIERS = {"auto": "auto", "priority": "auto", "standard": "standard_only"}
"""The API's service tier for each of ours; a project's priority capacity is used automatically."""

PROGRAM = "code_execution_20260120"
"""The type of the container with persistent programs that call tools, and the name of a caller there."""
UNPROMISING = re.compile(r"claude-(?:[123]|instant|(?:opus|sonnet|haiku)-4(?:-[01])?(?:[-@]\d{8}|$))")
"""Models from before structured output."""

Json = dict[str, Any]


@frozen(kw_only=True)
class Site:
    """
    The differences in request bodies between hosts of Claude. The defaults are for Anthropic's own servers.

    Attributes:
        name: The name of the host in error messages.
        model_in_body: Whether the model is in the body and the API version in a header; else the model is in the path and the
            version in the body.
        stream_in_body: Whether the body requests a stream; else the path does.
        betas_in_body: Whether the body lists the betas, in place of the header.
        marks_whole: Whether one mark caches the whole request; else the last block is marked.
        is_fast: Whether there is a faster mode.
        has_tiers: Whether there are service tiers.
        opens_pages: Whether its server tools can search the web and open pages.
        searches: Whether the host has a tool search for its models.
        has_fallbacks: Whether the server can ask a fallback model when a model declines.
        runs_programs: Whether programs of its models can call tools of the agent.
    """

    name: str = "anthropic"
    model_in_body: bool = True
    stream_in_body: bool = True
    betas_in_body: bool = False
    marks_whole: bool = True
    is_fast: bool = True
    has_tiers: bool = True
    opens_pages: bool = True
    searches: bool = True
    has_fallbacks: bool = True
    runs_programs: bool = True


@frozen(kw_only=True)
class AnthropicRequestOptions:
    """
    The options of all requests to one provider.

    Attributes:
        provider: The provider's name.
        max_tokens: The output limit of requests that have none; ``None`` for the model's own. The API requires one (ecosystem:EC95).
        cache: The lifetime of cached prompts; ``None`` turns caching off.
        site: The host of the models.
    """

    provider: str
    max_tokens: int | None = None
    cache: Literal["5m", "1h"] | None = "5m"
    site: Site = Site()

    @property
    def cache_mark(self) -> Json | None:
        """The ``cache_control`` mark of a prefix to cache; ``None`` without caching."""
        if self.cache is None:
            return None
        return {"type": "ephemeral"} if self.cache == "5m" else {"type": "ephemeral", "ttl": self.cache}


def encode(
    request: ModelRequest,
    model: str,
    family: AnthropicFamily,
    options: AnthropicRequestOptions,
    tools: bytes,
    *,
    stream: bool,
    previous_failure: str = "",
    more: Mapping[str, object] | None = None,
) -> bytes:
    """
    Return the body of a request.

    Args:
        request: The request.
        model: The model's name at the provider.
        family: The model's family.
        options: The options of all requests.
        tools: The encoded tools.
        stream: Whether the reply is requested as a stream.
        previous_failure: The failure kind of the previous attempt. After a rejected signature, earlier thinking is left out. After a
            rejected forced call, thinking is switched off. After a rejected limit, a smaller one is sent. After a lost container,
            the calls of its program are sent as text.
        more: Additional members for the host.

    Raises:
        ModelError: for a server tool that the provider does not have.
    """
    settings, site = request.settings, options.site
    said = encode_provider_settings(request, model, site)
    asked = encode_thinking(request, model, family, is_off=previous_failure == FORCED_THINKING)
    limit = resolve_output_limit(request, model, family, options, previous_failure=previous_failure)
    manual = asked is not None and asked["type"] == "enabled"
    if asked is not None and manual and limit <= asked["budget_tokens"]:
        asked = {**asked, "budget_tokens": max(MIN_BUDGET_TOKENS, limit - 1)}
    optional = {
        "model": model if site.model_in_body else None,
        "max_tokens": limit,
        "system": _encode_system_prompt(request, options),
        "temperature": settings.temperature,
        "top_p": settings.top_p,
        "stop_sequences": list(settings.stop_sequences) or None,
        "thinking": asked,
        "output_config": _encode_output_config(request, asked, family),
        "tool_choice": _encode_tool_choice(request, family),
        "cache_control": options.cache_mark if site.marks_whole else None,
        "stream": True if stream and site.stream_in_body else None,
        **(more or {}),
        **said.members,
    }
    known = "" if previous_failure == INVALID_SIGNATURE else model
    flags = AnthropicEncodeOptions(
        options.provider, known, manual, _requests_code_execution(request), find_hidden_tool_names(request)
    )
    messages, container = encode_messages(request, flags, is_container_lost=previous_failure == LOST_PROGRAM)
    if container:
        optional["container"] = container
    members = encode_body_members(request, optional, tools)
    members["messages"] = (
        messages if site.marks_whole else _add_cache_mark_to_last_block(messages, request, options.cache_mark)
    )
    return join_json_members(members)


END = b"}]}]"


def _add_cache_mark_to_last_block(messages: bytes, request: ModelRequest, mark: Json | None) -> bytes:
    """Return *messages* with *mark* in the last block, which is never a thought because the last message is the user's."""
    if mark is None or continues_paused_reply(request) or not messages.endswith(END):
        return messages
    return b"".join([messages[: -len(END)], b',"cache_control":', encode_json(mark), END])


def _requests_code_execution(request: ModelRequest) -> bool:
    """Return whether the request has a server tool that runs code."""
    return any(isinstance(tool, CodeExecution | Programs) for tool in request.settings.server_tools)


def resolve_output_limit(
    request: ModelRequest,
    model: str,
    family: AnthropicFamily,
    options: AnthropicRequestOptions,
    *,
    previous_failure: str = "",
) -> int:
    """
    Return the output limit of a request in tokens: that of the request, else of *options*, else the model's largest output.

    Thinking counts as output, so a thinking budget is added to a limit that the request did not set.
    """
    if request.settings.max_tokens is not None:
        return request.settings.max_tokens
    most = family.max_output
    limit = DEFAULT_MAX_TOKENS if previous_failure == LARGE_LIMIT else options.max_tokens or most or DEFAULT_MAX_TOKENS
    asked = encode_thinking(request, model, family)
    if asked is None or previous_failure == LARGE_LIMIT or "budget_tokens" not in asked:
        return limit
    wanted: int = asked["budget_tokens"] + limit
    return wanted if most is None else max(limit, min(wanted, most))


def encode_token_count_request(
    request: ModelRequest, model: str, family: AnthropicFamily, options: AnthropicRequestOptions, tools: bytes
) -> bytes:
    """Return the body of a request that counts the tokens of *request*."""
    asked = encode_thinking(request, model, family)
    optional = {
        "model": model,
        "system": request.system_prompt or None,
        "thinking": asked,
        # Server tools are not sent, and the API rejects a choice without tools.
        "tool_choice": _encode_tool_choice(request, family) if request.tools else None,
    }
    manual = asked is not None and asked["type"] == "enabled"
    members = encode_body_members(request, optional, tools, with_extra=False)
    flags = AnthropicEncodeOptions(
        options.provider, model, manual, _requests_code_execution(request), find_hidden_tool_names(request)
    )
    members["messages"], _ = encode_messages(request, flags)
    return join_json_members(members)


def _encode_system_prompt(request: ModelRequest, options: AnthropicRequestOptions) -> object:
    """Return the system prompt, with a cache mark if prompts are cached; ``None`` for an empty prompt."""
    text = request.system_prompt
    if not text.strip() or options.cache_mark is None:
        return text or None
    return [{"type": "text", "text": text, "cache_control": options.cache_mark}]


def _encode_output_config(request: ModelRequest, thinking_member: Json | None, family: AnthropicFamily) -> Json | None:
    """Return ``output_config`` with the reply's schema and, if *thinking_member* is adaptive, the effort; ``None`` without both."""
    schema, thinking = request.settings.response_schema, request.settings.thinking
    output: Json = {}
    if schema is not None:
        output["format"] = {"type": "json_schema", "schema": make_strict_schema(schema, "anthropic") or schema}
    if thinking is None or (thinking.effort is None and thinking.tokens is None):
        return output or None
    if thinking.mode == "none":
        return {**output, "effort": "low"} if family.off == "never" else output or None
    if thinking_member is not None and thinking_member["type"] == "adaptive":
        output["effort"] = family.get_nearest_effort(effort_from_thinking(thinking))
    return output or None


def encode_thinking(request: ModelRequest, model: str, family: AnthropicFamily, *, is_off: bool = False) -> Json | None:
    """
    Return the ``thinking`` member; ``None`` if none is sent.

    Thinking is adaptive where the model supports it, with the effort in ``output_config``. A budget in tokens is sent to
    models that accept one, and becomes an effort for others. Older models require a budget. They reject it together with a
    forced call, so a forced call switches thinking off for that request (ecosystem:EC85); *is_off* does so for any model. Some
    models bind thinking to the context before it. Their requests allow them to drop thinking that no longer matches, because
    hooks may prune and prompts may change (ecosystem:EC98).
    """
    thinking = request.settings.thinking
    if is_off or (thinking is not None and thinking.mode == "none"):
        return {"type": "disabled"} if family.off == "word" else None
    if thinking is None:
        return None
    bound: Json = {"block_binding": {"prefix_mismatch_behavior": "drop_block"}} if BOUND.search(model) else {}
    demanded = resolve_tool_choice(request) not in UNDEMANDED
    if family.adaptive and (thinking.tokens is None or demanded or not family.enabled):
        shown = {"display": "summarized"} if family.display else {}
        return {"type": "adaptive", **bound, **(shown if thinking.show else {"display": "omitted"})}
    if demanded:
        return None
    budget = budget_from_thinking(thinking)
    amount = max(MIN_BUDGET_TOKENS, DEFAULT_BUDGET_TOKENS if budget is None else budget)
    return {"type": "enabled", "budget_tokens": amount, **bound, **({} if thinking.show else {"display": "omitted"})}


def disables_unavoidable_thinking(request: ModelRequest, family: AnthropicFamily) -> bool:
    """Return whether the request switches thinking off although the model always thinks."""
    thinking = request.settings.thinking
    return thinking is not None and thinking.mode == "none" and family.off == "never"


def limit_tools_if_choice_unsupported(request: ModelRequest, family: AnthropicFamily) -> tuple[ToolSpec, ...]:
    """Return the tools of the request, or only the tool that must be called if the model does not support forced calls."""
    choice = resolve_tool_choice(request)
    if choice in UNDEMANDED or choice == "required" or family.demands:
        return request.tools
    return tuple([tool for tool in request.tools if tool.name == choice]) or request.tools


def needs_binding_beta(request: ModelRequest, model: str, family: AnthropicFamily) -> bool:
    """Return whether the request allows the model to drop thinking, which requires a beta header."""
    return "block_binding" in (encode_thinking(request, model, family) or {})


def demands_unsupported_call(request: ModelRequest, family: AnthropicFamily) -> bool:
    """Return whether the request forces a call and the model does not support that."""
    return resolve_tool_choice(request) not in UNDEMANDED and not family.demands


def override_cache_lifetime(options: AnthropicRequestOptions, settings: ModelSettings) -> AnthropicRequestOptions:
    """Return *options* with the cache lifetime of *settings*, if that is set."""
    if settings.cache is None:
        return options
    return attrs.evolve(options, cache=None if settings.cache == "off" else settings.cache)


def encode_provider_settings(request: ModelRequest, model: str, site: Site) -> WireSettings:
    """Return the body members for cache, server tools, service tier and fallbacks, and the names of dropped settings."""
    converters: dict[str, SettingConverter] = {
        "cache": lambda _: {},  # the marks hold it
        "server_tools": lambda items: {"tools": _encode_server_tools(items, request, model, site)},
        "service_tier": lambda tier: _encode_service_tier(tier, model, site),
    }
    if site.has_fallbacks:
        converters["fallbacks"] = lambda names: {"fallbacks": _encode_fallbacks(names)}
    return convert_settings(request.settings, converters)


def _encode_fallbacks(names: tuple[str, ...]) -> object:
    """Return the ``fallbacks`` member for model names, with or without a provider prefix."""
    # (providers:PV110)
    return "default" if names == ("default",) else [{"model": name.rpartition("/")[2]} for name in names]


def _encode_service_tier(tier: str, model: str, site: Site) -> Json | None:
    """Return the body members for a service tier; ``None`` if the host does not support it."""
    if tier == "fast":
        return {"speed": "fast"} if uses_fast_mode(tier, model, site) else None
    return {"service_tier": TIERS[tier]} if tier in TIERS and site.has_tiers else None


def uses_fast_mode(tier: str | None, model: str, site: Site) -> bool:
    """Return whether *tier* asks for the faster mode, and both model and host support it."""
    return tier == "fast" and site.is_fast and FAST.search(model) is not None


def _encode_server_tools(items: tuple[ServerTool, ...], request: ModelRequest, model: str, site: Site) -> list[Json]:
    """Return the definitions of the server tools, without duplicates; raise ``ModelError`` for an unsupported tool."""
    programs = merge_programs(request.settings)
    if programs is not None:
        if not site.runs_programs:
            raise make_unsupported_tool_error(programs, model, site.name)
        if not RUNS_NEWER_CODE.search(model):
            raise make_unsupported_tool_error(
                programs, model, site.name, "only Claude 4.5 and newer models can call tools from programs"
            )
        require_program_tool_offered(request, programs, model, site.name)
    definitions: list[Json] = []
    for definition in [_encode_server_tool(item, model, site) for item in items]:
        definitions += [definition] if definition not in definitions else []
    return definitions


def _encode_server_tool(item: ServerTool, model: str, site: Site) -> Json:
    """
    Return the definition of a server tool; raise ``ModelError`` for an unsupported tool or option.

    Models of every age accept the tool versions that are used here. A newer version can be given as
    ``ModelSettings(extra={"tools": [...]})``.
    """
    if isinstance(item, WebSearch | UrlContext) and not site.opens_pages:
        raise make_unsupported_tool_error(
            item, model, site.name, f"it cannot open web pages at {site.name}; give the agent its own tool for that"
        )
    if isinstance(item, WebSearch):
        tool: Json = {"type": "web_search_20250305", "name": "web_search", **_encode_search_limits(item, model)}
        place = encode_user_location(item.location)
        return tool if place is None else {**tool, "user_location": place}
    if isinstance(item, UrlContext):
        fetch = {"type": "web_fetch_20250910", "name": "web_fetch", "citations": {"enabled": True}}
        return {**fetch, **_encode_search_limits(item, model)}
    if isinstance(item, CodeExecution):
        if item.files:
            raise make_unsupported_tool_error(
                item, model, "anthropic", "pass files as parts of a message, not to the tool"
            )
        newer = RUNS_NEWER_CODE.search(model)
        return {"type": PROGRAM if newer else "code_execution_20250522", "name": "code_execution"}
    if isinstance(item, Programs):
        return {"type": PROGRAM, "name": "code_execution"}
    raise make_unsupported_tool_error(item, model, "anthropic")


def _encode_search_limits(item: WebSearch | UrlContext, model: str) -> Json:
    """Return the limits of a web tool: its uses and domains; raise if both lists of domains are set."""
    if item.allowed_domains and item.blocked_domains:
        raise make_unsupported_tool_error(
            item, model, "anthropic", "it accepts allowed_domains or blocked_domains, not both"
        )
    limits = {
        "max_uses": item.max_uses,
        "allowed_domains": list(item.allowed_domains) or None,
        "blocked_domains": list(item.blocked_domains) or None,
    }
    return {name: value for name, value in limits.items() if value is not None}


def limit_strict_tools(
    tools: tuple[ToolSpec, ...],
    schema: Mapping[str, object] | None,
    previous_failure: str = "",
    programs: Programs | None = None,
) -> tuple[ToolSpec, ...]:
    """
    Return *tools* with only as many strict tools as the API accepts in one request with *schema*; the others are not strict.

    The API limits strict schemas to 20 tools and 24 optional members in all (providers:PV43). Tools that *programs* call are never strict.
    After the API rejected the grammar as too large, none is strict.
    """
    room = MAX_OPTIONAL - (count_optional_members(schema, "anthropic") or 0 if schema is not None else 0)
    strict, found = 0, []
    for tool in tools:
        optional = count_optional_members(tool.input_schema, "anthropic") if tool.strict else None
        by_program = programs is not None and tool.name in programs.tools
        if tool.strict and (
            optional is None or optional > room or strict >= MAX_STRICT or previous_failure == GRAMMAR or by_program
        ):
            found.append(attrs.evolve(tool, strict=False))
            continue
        if optional is not None:
            strict, room = strict + 1, room - optional
        found.append(tool)
    return tuple(found)


def encode_tool(spec: ToolSpec, programs: Programs | None = None) -> Json:
    """Return a tool definition, with a strict schema if the tool asks for one and its schema supports it."""
    tool: Json = {"name": spec.name, "description": spec.description, "input_schema": spec.input_schema}
    tool.update(make_allowed_callers_member(programs, spec, PROGRAM))
    form = make_strict_schema(spec.input_schema, "anthropic") if spec.strict else None
    return tool if form is None else {**tool, "input_schema": form, "strict": True}


def _encode_tool_choice(request: ModelRequest, family: AnthropicFamily) -> Json | None:
    """Return the ``tool_choice`` member, ``auto`` for an unsupported forced call; ``None`` without a choice."""
    choice = resolve_tool_choice(request)
    if choice not in UNDEMANDED and not family.demands:
        choice = "auto"
    single = (
        request.settings.parallel_tool_calls is False and bool(request.tools) and not merge_programs(request.settings)
    )
    if choice is None and not single:
        return None
    words = {None: "auto", "auto": "auto", "none": "none", "required": "any"}
    value: Json = {"type": words[choice]} if choice in words else {"type": "tool", "name": choice}
    if single and value["type"] != "none":
        value["disable_parallel_tool_use"] = True
    return value
