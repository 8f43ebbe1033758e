"""
Encode requests for the Converse API, all body members except the messages. Pure: no SDK, no clock, no I/O.

**Prompt caching.** A mark is a block of its own after the cached content. A request marks the tools, the system prompt and
the last message; the API allows four marks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import attrs
from attrs import frozen

from stepengine.data.json import compact
from stepengine.data.models import ModelRequest, ModelSettings
from stepengine.data.server_tools import CodeExecution, ServerTool, WebSearch
from stepengine.data.tools import ToolSpec
from stepengine.models._failures import INVALID_SIGNATURE
from stepengine.models._schemas import make_strict_schema
from stepengine.models._settings import (
    DROPPED,
    SettingConverter,
    WireSettings,
    convert_settings,
    make_unsupported_tool_error,
)
from stepengine.models._thinking_levels import CANNOT, DEAF, SHOWN, ThinkingRequest, effort_from_thinking
from stepengine.models._wire import (
    continues_paused_reply,
    encode_body_members,
    encode_json,
    join_json_members,
    make_schema_name,
    resolve_tool_choice,
)
from stepengine.models.bedrock_converse.encode import ConverseEncodeOptions, encode_messages
from stepengine.models.bedrock_converse.families import ConverseFamily

TIERS: dict[str, dict[str, Any]] = {
    "auto": {},
    "standard": {"serviceTier": {"type": "default"}},
    "flex": {"serviceTier": {"type": "flex"}},
    "priority": {"serviceTier": {"type": "priority"}},
    "fast": {"performanceConfig": {"latency": "optimized"}},
}
"""The body members for each service tier."""
UNDEMANDED = frozenset({None, "auto", "none"})
NOT_MARKED = frozenset({"", "document", "video"})
"""The kinds of last blocks after which the service rejects a mark; ``""`` is the assistant's."""
WIRE = {"max_tokens": "maxTokens", "temperature": "temperature", "top_p": "topP", "stop_sequences": "stopSequences"}
FIELDS = "additionalModelRequestFields"
END = b"]}]"

Json = dict[str, Any]


@frozen(kw_only=True)
class ConverseRequestOptions:
    """
    The options of a request apart from its messages and settings.

    Attributes:
        provider: The provider's name.
        model: The model's name at the provider.
        family: The model's family.
        cache: The lifetime of cached prompts; ``None`` turns caching off.
        thinking: The model's own members for thinking.
        previous_failure: The failure kind of the previous attempt.
    """

    provider: str
    model: str
    family: ConverseFamily
    cache: Literal["5m", "1h"] | None = "5m"
    thinking: Mapping[str, Any] = attrs.field(factory=dict)
    previous_failure: str = ""

    def encode_cache_mark(self, section: Literal["tools", "messages"]) -> bytes:
        """Return the encoded cache mark to put after *section*; ``b""`` if the section is not cached."""
        if self.cache is None or not self.family.caches or (section == "tools" and self.family.caches != "tools"):
            return b""
        longer = {"ttl": "1h"} if self.cache == "1h" and self.family.longer else {}
        return encode_json({"cachePoint": {"type": "default", **longer}})

    @property
    def encode_options(self) -> ConverseEncodeOptions:
        """The encode options for messages, except ``calls``."""
        manual = self.thinking.get("thinking", {}).get("type") == "enabled"
        return ConverseEncodeOptions(
            self.provider, "" if self.previous_failure == INVALID_SIGNATURE else self.model, self.family, manual=manual
        )


def encode(request: ModelRequest, options: ConverseRequestOptions, tools: bytes) -> bytes:
    """
    Return the body of a request. The path, not the body, requests a stream.

    Raises:
        ModelError: for a server tool that the model does not have, and for an unsupported part.
    """
    settings = request.settings
    said = encode_provider_settings(request, options.model, options.family, options.provider).members
    limits = {
        "max_tokens": settings.max_tokens,
        "temperature": settings.temperature,
        "top_p": settings.top_p,
        "stop_sequences": list(settings.stop_sequences) or None,
    }
    left_out = find_unsupported_limits(options, settings)
    config = {WIRE[name]: value for name, value in limits.items() if value is not None and name not in left_out}
    head = {
        "inferenceConfig": config or None,
        FIELDS: dict(options.thinking) or None,
        "outputConfig": _encode_output_config(request),
        **{name: value for name, value in said.items() if name != "toolConfig"},
    }
    members = encode_body_members(attrs.evolve(request, tools=()), head, b"")
    members.pop("toolConfig", None)
    members.update(_encode_prompt_members(request, options, tools, said.get("toolConfig", {}).get("tools", ())))
    return join_json_members(members)


def encode_token_count_request(request: ModelRequest, options: ConverseRequestOptions, tools: bytes) -> bytes:
    """Return the body of a request that counts the tokens of *request*."""
    members = _encode_prompt_members(request, attrs.evolve(options, cache=None), tools, ())
    if options.thinking:
        members[FIELDS] = encode_json(options.thinking)
    return b'{"input":{"converse":' + join_json_members(members) + b"}}"


def offers_tools(request: ModelRequest) -> bool:
    """
    Return whether the request offers tools, without which earlier calls are sent as text.

    The API has no tool choice ``"none"``, so that choice offers no tools.
    """
    offered = request.tools or request.settings.server_tools or _find_extra_tool_config(request).get("tools")
    return bool(offered) and resolve_tool_choice(request) != "none"


def _encode_prompt_members(
    request: ModelRequest, options: ConverseRequestOptions, tools: bytes, server_tools: object
) -> dict[str, bytes]:
    """Return the members that count as the prompt: tools, system prompt and messages, with their cache marks."""
    members: dict[str, bytes] = {}
    mark, offers = options.encode_cache_mark("messages"), offers_tools(request)
    if offers:
        members["toolConfig"] = _encode_tool_config(request, options, tools, server_tools)
    if request.system_prompt.strip():
        system = encode_json({"text": request.system_prompt})
        members["system"] = b"[" + system + (b"," + mark if mark else b"") + b"]"
    content, last = encode_messages(request, attrs.evolve(options.encode_options, calls=offers))
    if mark and last not in NOT_MARKED and not continues_paused_reply(request):
        content = b"".join([content[: -len(END)], b",", mark, END])
    members["messages"] = content
    return members


def _encode_tool_config(
    request: ModelRequest, options: ConverseRequestOptions, tools: bytes, server_tools: Any
) -> bytes:
    """Return ``toolConfig``: the agent's *tools*, *server_tools*, tools of ``extra``, a cache mark and the tool choice."""
    given = _find_extra_tool_config(request)
    more = given.get("tools")
    lists = [
        tools[1:-1],
        *[encode_json(tool) for tool in (*server_tools, *(more if isinstance(more, list | tuple) else ()))],
    ]
    config = {"tools": b"[" + b",".join(filter(None, [*lists, options.encode_cache_mark("tools")])) + b"]"}
    choice = _encode_tool_choice(request, options.family)
    if choice is not None:
        config["toolChoice"] = encode_json(choice)
    return join_json_members(
        {**config, **{name: encode_json(value) for name, value in given.items() if name != "tools"}}
    )


def _find_extra_tool_config(request: ModelRequest) -> Mapping[str, Any]:
    """Return the ``toolConfig`` of ``settings.extra``, whose tools follow those of the agent; ``{}`` if there is none."""
    extra = request.settings.extra
    body = extra.get("body")
    found = [place.get("toolConfig") for place in (extra, body) if isinstance(place, Mapping)]
    merged: Json = {}
    for config in found:
        merged.update(config if isinstance(config, Mapping) else {})
    return merged


def _encode_tool_choice(request: ModelRequest, family: ConverseFamily) -> Json | None:
    """Return the tool choice; ``None`` without a forced call, or if the model does not support it."""
    choice = resolve_tool_choice(request)
    if choice in UNDEMANDED or demands_unsupported_call(request, family):
        return None
    if choice == "required":
        return {"any": {}}
    return {"tool": {"name": choice}}


def demands_unsupported_call(request: ModelRequest, family: ConverseFamily) -> bool:
    """Return whether the request forces a call and the model does not support that."""
    choice = resolve_tool_choice(request)
    return choice not in UNDEMANDED and ("any" if choice == "required" else "tool") not in family.demands


def find_unsupported_limits(options: ConverseRequestOptions, settings: ModelSettings) -> tuple[str, ...]:
    """Return the names of set limits (tokens and sampling) that Nova rejects with its highest effort of thinking; else ``()``."""
    nova = options.thinking.get("reasoningConfig", {}).get("maxReasoningEffort")
    limits = ("max_tokens", "temperature", "top_p") if nova == "high" else ()
    return tuple([name for name in limits if getattr(settings, name) is not None])


def _encode_output_config(request: ModelRequest) -> Json | None:
    """Return the member with the schema of the reply; ``None`` without a schema."""
    schema = request.settings.response_schema
    if schema is None:
        return None
    form = make_strict_schema(schema, "anthropic") or schema
    structure = {"jsonSchema": {"schema": compact(form), "name": make_schema_name(schema)}}
    return {"textFormat": {"type": "json_schema", "structure": structure}}


def encode_tool(spec: ToolSpec) -> Json:
    """Return a tool definition, with a strict schema if the tool asks for one and its schema supports it."""
    form = make_strict_schema(spec.input_schema, "anthropic") if spec.strict else None
    told = {"description": spec.description} if spec.description else {}
    schema = {"inputSchema": {"json": spec.input_schema if form is None else form}}
    return {"toolSpec": {"name": spec.name, **told, **schema, **({} if form is None else {"strict": True})}}


def encode_provider_settings(request: ModelRequest, model: str, family: ConverseFamily, provider: str) -> WireSettings:
    """Return the body members for service tier, cache and server tools, and the names of dropped settings."""
    converters: dict[str, SettingConverter] = {
        "service_tier": TIERS.get,
        "cache": lambda lifetime: _encode_cache_lifetime(lifetime, family),
        "server_tools": lambda items: _encode_server_tools(items, model, family, provider),
    }
    return convert_settings(request.settings, converters)


def _encode_cache_lifetime(lifetime: str, family: ConverseFamily) -> Json | None:
    """Return ``{}``, because the marks set the lifetime; ``None`` if the model does not support it."""
    if lifetime == "off":
        return {}
    return {} if family.caches and (lifetime == "5m" or family.longer) else None


def _encode_server_tools(items: tuple[ServerTool, ...], model: str, family: ConverseFamily, provider: str) -> Json:
    """Return the definitions of Nova's server tools, and dropped options; raise for tools that the model does not have."""
    tools: list[Json] = []
    dropped: list[str] = []
    for item in items:
        if isinstance(item, CodeExecution) and "code" in family.runs:
            if item.files:
                raise make_unsupported_tool_error(item, model, provider, "it accepts no files; put them into a message")
            tools.append({"systemTool": {"name": "nova_code_interpreter"}})
        elif isinstance(item, WebSearch) and "web" in family.runs:
            if item.allowed_domains or item.blocked_domains:
                raise make_unsupported_tool_error(item, model, provider, "it cannot be restricted to domains")
            dropped += [f"server_tools.{name}" for name in ("max_uses", "location") if getattr(item, name) is not None]
            tools.append({"systemTool": {"name": "nova_grounding"}})
        else:
            raise make_unsupported_tool_error(item, model, provider)
    return {"toolConfig": {"tools": tools}, DROPPED: dropped}


def encode_non_claude_thinking(settings: ModelSettings, model: str, family: ConverseFamily) -> ThinkingRequest:
    """Return the thinking members for models other than Claude, with a note on unsupported options."""
    thinking = settings.thinking
    if thinking is None:
        return ThinkingRequest()
    is_off, effort = thinking.mode == "none", effort_from_thinking(thinking)
    word = "high" if effort == "max" else effort
    hidden = "" if thinking.show or is_off else SHOWN.format(model=model, thinking=thinking)
    match family.thinking:
        case "nova":
            switch = {"type": "disabled"} if is_off else {"type": "enabled", "maxReasoningEffort": word}
            return ThinkingRequest({"reasoningConfig": switch})
        case "effort":
            note = CANNOT.format(model=model, least="low effort") if is_off else hidden
            return ThinkingRequest({"reasoning_effort": "low" if is_off else word}, note)
        case "qwen":
            note = CANNOT.format(model=model, least="low effort") if is_off else hidden
            return ThinkingRequest(
                {"reasoning_config": "high" if word in {"medium", "high"} and not is_off else "low"}, note
            )
        case _:
            return ThinkingRequest(
                {}, "" if is_off and not family.thinking else DEAF.format(model=model, thinking=thinking)
            )
