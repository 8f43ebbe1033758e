"""
Requests of Anthropic's Messages API: everything of the body but its messages. Pure: no SDK, no clock, no I/O.

**Prompt caching.** The API caches a prefix in the order tools, system prompt, messages. A request marks the last tool,
the system prompt, and, by a mark for the whole request, the last message: three of the four that it may hold (EC93).
"""

from __future__ import annotations

import re
from typing import Any, Literal

import attrs

from stepengine.data.models import ModelRequest
from stepengine.data.tools import ToolSpec
from stepengine.models._wire import budget_of, join_members, members_of, tool_choice_of
from stepengine.models.anthropic.encode import Flags, encode_messages

__all__ = (
    "BINDING_BETA",
    "DEFAULT_MAX_TOKENS",
    "Ways",
    "binds_thinking",
    "encode",
    "encode_count",
    "encode_tool",
    "thinking_of",
)

MIN_BUDGET = 1024
DEFAULT_BUDGET = 10_000
DEFAULT_MAX_TOKENS = 8_192
MANUAL_ONLY = re.compile(r"claude-(?:3|instant|2)|claude-(?:opus|sonnet|haiku)-4(?:-[0156])?(?:-\d{8})?$")
"""Models from before adaptive thinking, which want a budget."""

BOUND = re.compile(r"claude-fable-5-1")
"""Models that refuse thinking after a change of anything before it, unless they are told to drop it (EC98)."""

BINDING_BETA = "thinking-binding-controls-2026-08-01"

Json = dict[str, Any]


@attrs.frozen(kw_only=True)
class Ways:
    """
    What a provider decides for all of its requests.

    Attributes:
        provider: The provider's name.
        max_tokens: The output limit of requests that have none; the API demands one (EC95).
        cache: How long prompts are cached; ``None`` for not at all.
    """

    provider: str
    max_tokens: int = DEFAULT_MAX_TOKENS
    cache: Literal["5m", "1h"] | None = "5m"

    @property
    def mark(self) -> Json | None:
        """The mark of a prefix that shall be cached."""
        if self.cache is None:
            return None
        return {"type": "ephemeral"} if self.cache == "5m" else {"type": "ephemeral", "ttl": self.cache}


def encode(
    request: ModelRequest, model: str, ways: Ways, tools: bytes, *, stream: bool, thinking: bool = True
) -> bytes:
    """
    Return the body of a request.

    Args:
        request: What is asked.
        model: The model's name at the provider.
        ways: What holds for all requests.
        tools: The encoded tools.
        stream: Whether the reply shall be a stream.
        thinking: Whether earlier thinking goes back to the model that made it.
    """
    settings = request.settings
    asked = thinking_of(request, model)
    manual = asked is not None and asked["type"] == "enabled"
    limit = settings.max_tokens
    if limit is None:
        limit = max(ways.max_tokens, asked["budget_tokens"] + ways.max_tokens) if manual and asked else ways.max_tokens
    elif manual and asked and limit <= asked["budget_tokens"]:
        asked = {**asked, "budget_tokens": max(MIN_BUDGET, limit - 1)}
    optional = {
        "model": model,
        "max_tokens": limit,
        "system": _system(request, ways),
        "temperature": settings.temperature,
        "top_p": settings.top_p,
        "stop_sequences": list(settings.stop_sequences) or None,
        "thinking": asked,
        "output_config": _output(request, asked),
        "tool_choice": _tool_choice(request),
        "cache_control": ways.mark,
        "stream": True if stream else None,
    }
    members = members_of(request, optional, tools)
    members["messages"] = encode_messages(request, Flags(ways.provider, model if thinking else "", manual))
    return join_members(members)


def encode_count(request: ModelRequest, model: str, ways: Ways, tools: bytes) -> bytes:
    """Return the body of the question how many tokens a request has (EC75)."""
    asked = thinking_of(request, model)
    optional = {
        "model": model,
        "system": request.system_prompt or None,
        "thinking": asked,
        "tool_choice": _tool_choice(request),
    }
    manual = asked is not None and asked["type"] == "enabled"
    members = members_of(request, optional, tools, extra=False)
    members["messages"] = encode_messages(request, Flags(ways.provider, model, manual))
    return join_members(members)


def _system(request: ModelRequest, ways: Ways) -> Any:
    text = request.system_prompt
    if not text.strip() or ways.mark is None:
        return text or None
    return [{"type": "text", "text": text, "cache_control": ways.mark}]


def _output(request: ModelRequest, asked: Json | None) -> Json | None:
    """Return what is said of the reply as a whole: its schema, and how hard a model thinks that decides by itself."""
    schema, thinking = request.settings.response_schema, request.settings.thinking
    output: Json = {} if schema is None else {"format": {"type": "json_schema", "schema": schema}}
    if thinking is not None and thinking.effort is not None and asked is not None and asked["type"] == "adaptive":
        output["effort"] = thinking.effort
    return output or None


def thinking_of(request: ModelRequest, model: str) -> Json | None:
    """
    Return the ``thinking`` member; ``None`` sends nothing.

    A number of tokens is sent as it is; otherwise the model decides, by the effort beside it, or where it cannot, by the
    budget that stands for that. A forced tool choice switches thinking off for that request, because the API refuses both
    together (EC85). A model that binds its thinking to what came before
    is told to drop what no longer fits, since hooks may prune and prompts may change (EC98).
    """
    thinking = request.settings.thinking
    if thinking is None or thinking.mode == "none":
        return None
    if tool_choice_of(request) not in {None, "auto", "none"}:
        return None
    bound: Json = {"block_binding": {"prefix_mismatch_behavior": "drop_block"}} if BOUND.match(model) else {}
    shown = bound if thinking.show else {**bound, "display": "omitted"}
    if thinking.tokens is None and not MANUAL_ONLY.match(model):
        return {"type": "adaptive", **shown}
    budget = budget_of(thinking)
    return {"type": "enabled", "budget_tokens": max(MIN_BUDGET, DEFAULT_BUDGET if budget is None else budget), **shown}


def binds_thinking(request: ModelRequest, model: str) -> bool:
    """Return whether the request says what shall become of thinking that no longer fits, which needs a beta header."""
    return "block_binding" in (thinking_of(request, model) or {})


def encode_tool(spec: ToolSpec) -> Json:
    """Return a tool definition."""
    return {"name": spec.name, "description": spec.description, "input_schema": spec.input_schema}


def _tool_choice(request: ModelRequest) -> Json | None:
    choice = tool_choice_of(request)
    single = request.settings.parallel_tool_calls is False and bool(request.tools)
    if choice is None and not single:
        return None
    words = {None: "auto", "auto": "auto", "none": "none", "required": "any"}
    value: Json = {"type": words[choice]} if choice in words else {"type": "tool", "name": choice}
    if single and value["type"] != "none":
        value["disable_parallel_tool_use"] = True
    return value
