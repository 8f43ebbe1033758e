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
from stepengine.models._failures import FORCED_THINKING, INVALID_SIGNATURE, LARGE_LIMIT
from stepengine.models._schemas import strict_form
from stepengine.models._wire import budget_of, effort_of, join_members, members_of, tool_choice_of
from stepengine.models.anthropic.encode import Flags, encode_messages
from stepengine.models.anthropic.families import DEFAULT_MAX_TOKENS, Family, family_of

__all__ = (
    "BINDING_BETA",
    "Ways",
    "binds_thinking",
    "encode",
    "encode_count",
    "encode_tool",
    "limit_of",
    "offered",
    "thinking_of",
    "thinks_anyway",
)

MIN_BUDGET = 1024
DEFAULT_BUDGET = 10_000
UNDEMANDED = frozenset({None, "auto", "none"})

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
        max_tokens: The output limit of requests that have none; ``None`` for the model's own. The API demands one (EC95).
        cache: How long prompts are cached; ``None`` for not at all.
    """

    provider: str
    max_tokens: int | None = None
    cache: Literal["5m", "1h"] | None = "5m"

    @property
    def mark(self) -> Json | None:
        """The mark of a prefix that shall be cached."""
        if self.cache is None:
            return None
        return {"type": "ephemeral"} if self.cache == "5m" else {"type": "ephemeral", "ttl": self.cache}


def encode(request: ModelRequest, model: str, ways: Ways, tools: bytes, *, stream: bool, after: str = "") -> bytes:
    """
    Return the body of a request.

    Args:
        request: What is asked.
        model: The model's name at the provider.
        ways: What holds for all requests.
        tools: The encoded tools.
        stream: Whether the reply shall be a stream.
        after: How the same request failed before: a signature that was refused leaves earlier thinking out, a demanded
            call beside thinking switches thinking off, a limit that was too large is replaced by one that is not.
    """
    settings = request.settings
    asked = thinking_of(request, model, off=after == FORCED_THINKING)
    limit = limit_of(request, model, ways, after=after)
    manual = asked is not None and asked["type"] == "enabled"
    if asked is not None and manual and limit <= asked["budget_tokens"]:
        asked = {**asked, "budget_tokens": max(MIN_BUDGET, limit - 1)}
    optional = {
        "model": model,
        "max_tokens": limit,
        "system": _system(request, ways),
        "temperature": settings.temperature,
        "top_p": settings.top_p,
        "stop_sequences": list(settings.stop_sequences) or None,
        "thinking": asked,
        "output_config": _output(request, asked, family_of(model)),
        "tool_choice": _tool_choice(request, family_of(model)),
        "cache_control": ways.mark,
        "stream": True if stream else None,
    }
    members = members_of(request, optional, tools)
    members["messages"] = encode_messages(
        request, Flags(ways.provider, "" if after == INVALID_SIGNATURE else model, manual)
    )
    return join_members(members)


def limit_of(request: ModelRequest, model: str, ways: Ways, *, after: str = "") -> int:
    """
    Return the output limit of a request: its own, else the provider's, else the largest that the model has.

    Thinking counts as output, so a number of tokens for it comes on top of a limit that the request did not set.
    """
    if request.settings.max_tokens is not None:
        return request.settings.max_tokens
    most = family_of(model).max_output
    limit = DEFAULT_MAX_TOKENS if after == LARGE_LIMIT else ways.max_tokens or most or DEFAULT_MAX_TOKENS
    asked = thinking_of(request, model)
    if asked is None or after == LARGE_LIMIT or "budget_tokens" not in asked:
        return limit
    wanted: int = asked["budget_tokens"] + limit
    return wanted if most is None else max(limit, min(wanted, most))


def encode_count(request: ModelRequest, model: str, ways: Ways, tools: bytes) -> bytes:
    """Return the body of the question how many tokens a request has (EC75)."""
    asked = thinking_of(request, model)
    optional = {
        "model": model,
        "system": request.system_prompt or None,
        "thinking": asked,
        "tool_choice": _tool_choice(request, family_of(model)),
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


def _output(request: ModelRequest, asked: Json | None, family: Family) -> Json | None:
    """Return what is said of the reply as a whole: its schema, and how hard a model thinks that decides by itself."""
    schema, thinking = request.settings.response_schema, request.settings.thinking
    output: Json = {}
    if schema is not None:
        output["format"] = {"type": "json_schema", "schema": strict_form(schema, "anthropic") or schema}
    if thinking is None or (thinking.effort is None and thinking.tokens is None):
        return output or None
    if thinking.mode == "none":
        return {**output, "effort": "low"} if family.off == "never" else output or None
    if asked is not None and asked["type"] == "adaptive":
        output["effort"] = effort_of(thinking)
    return output or None


def thinking_of(request: ModelRequest, model: str, *, off: bool = False) -> Json | None:
    """
    Return the ``thinking`` member; ``None`` sends nothing.

    Where the model can, it decides by itself, by the effort beside it; a number of tokens is sent as it is where the model
    takes one, and stands for an effort where it does not. Older models want a number, and refuse it together with a
    demanded call, so that such a call switches it off for that request (EC85). *off* does so for any model. A model that
    binds its thinking to what came before is told to drop what no longer fits, since hooks may prune and prompts may
    change (EC98).
    """
    thinking, family = request.settings.thinking, family_of(model)
    if off or (thinking is not None and thinking.mode == "none"):
        return {"type": "disabled"} if family.off == "word" else None
    if thinking is None:
        return None
    bound: Json = {"block_binding": {"prefix_mismatch_behavior": "drop_block"}} if BOUND.match(model) else {}
    demanded = tool_choice_of(request) not in UNDEMANDED
    if family.adaptive and (thinking.tokens is None or demanded or not family.enabled):
        shown = {"display": "summarized"} if family.display else {}
        return {"type": "adaptive", **bound, **(shown if thinking.show else {"display": "omitted"})}
    if demanded:
        return None
    budget = budget_of(thinking)
    amount = max(MIN_BUDGET, DEFAULT_BUDGET if budget is None else budget)
    return {"type": "enabled", "budget_tokens": amount, **bound, **({} if thinking.show else {"display": "omitted"})}


def thinks_anyway(request: ModelRequest, model: str) -> bool:
    """Return whether the request asks for no thinking of a model that cannot be kept from it."""
    thinking = request.settings.thinking
    return thinking is not None and thinking.mode == "none" and family_of(model).off == "never"


def offered(request: ModelRequest, model: str) -> tuple[ToolSpec, ...]:
    """Return the tools to offer: only the wanted one, where a call of it cannot be demanded."""
    choice = tool_choice_of(request)
    if choice in UNDEMANDED or choice == "required" or family_of(model).demands:
        return request.tools
    return tuple([tool for tool in request.tools if tool.name == choice]) or request.tools


def binds_thinking(request: ModelRequest, model: str) -> bool:
    """Return whether the request says what shall become of thinking that no longer fits, which needs a beta header."""
    return "block_binding" in (thinking_of(request, model) or {})


def encode_tool(spec: ToolSpec) -> Json:
    """Return a tool definition."""
    tool: Json = {"name": spec.name, "description": spec.description, "input_schema": spec.input_schema}
    form = strict_form(spec.input_schema, "anthropic") if spec.strict else None
    return tool if form is None else {**tool, "input_schema": form, "strict": True}


def _tool_choice(request: ModelRequest, family: Family) -> Json | None:
    choice = tool_choice_of(request)
    if choice not in UNDEMANDED and not family.demands:
        choice = "auto"
    single = request.settings.parallel_tool_calls is False and bool(request.tools)
    if choice is None and not single:
        return None
    words = {None: "auto", "auto": "auto", "none": "none", "required": "any"}
    value: Json = {"type": words[choice]} if choice in words else {"type": "tool", "name": choice}
    if single and value["type"] != "none":
        value["disable_parallel_tool_use"] = True
    return value
