"""
Find billed items of a reply without a known price, which make its cost a lower bound. Pure: no SDK, no clock, no I/O.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from stepengine.models._json import find_objects, find_text, parse_token_count

ORDINARY_TIERS = frozenset({"", "auto", "default", "standard", "standard_only", "on_demand", "unspecified"})
TRAFFIC = {"on_demand": "", "traffic_type_unspecified": "", "on_demand_priority": "priority", "on_demand_flex": "flex"}
"""Vertex AI's names of tiers."""
DEARER = frozenset({"priority", "fast", "ultrafast", "optimized"})
"""Tiers that are known to cost more than the ordinary one."""

PAID_MODALITIES = ("input_audio_tokens", "output_audio_tokens", "output_image_tokens", "output_video_tokens")
"""Tokens that cost more than text. Input images and pages are billed as text tokens."""

FREE_CALLS = frozenset(
    {
        *("function_call", "custom_tool_call", "computer_call", "local_shell_call", "apply_patch_call"),
        *("tool_search_call", "mcp_call"),
    }
)
"""Calls of Responses that only cost their tokens."""
PRICED_CALLS = frozenset({"web_search_call", "file_search_call", "image_generation_call"})
IMAGES = "image_gen"
"""OpenAI's name for the token counts of a separate image model."""
FREE_OF_ANTHROPIC = frozenset({"web_search_requests", "web_fetch_requests", "tool_search_requests"})
"""Anthropic's counts that only cost tokens, and its web search, which has a known price."""
FREE_OF_XAI = frozenset({"mcp_calls"})


def find_service_tier(data: Mapping[str, Any], raw_usage: Mapping[str, Any]) -> str:
    """Return the service tier of a reply, or Bedrock's latency setting; ``""`` for a tier in ``ORDINARY_TIERS``."""
    bedrock = [find_text(data, *path) for path in (("performanceConfig", "latency"), ("serviceTier", "type"))]
    if special := [tier for tier in bedrock if tier not in ORDINARY_TIERS]:
        return special[0]
    told = data.get("service_tier") or raw_usage.get("service_tier") or raw_usage.get("serviceTier")
    tier = (told if isinstance(told, str) else "").lower().removeprefix("service_tier_")
    if not tier:
        traffic = find_text(raw_usage, "trafficType").lower()
        tier = TRAFFIC.get(traffic, traffic)
    return "" if tier in ORDINARY_TIERS else tier


def count_openai_web_searches(data: Mapping[str, Any], items: Sequence[Mapping[str, Any]]) -> int:
    """Return the number of web searches that OpenAI bills: the reported number, else the search calls in the reply."""
    usage = data.get("tool_usage")
    search = usage.get("web_search") if isinstance(usage, Mapping) else None
    told = parse_token_count(search.get("num_requests")) if isinstance(search, Mapping) else None
    if told is not None:
        return told
    return sum(
        item.get("type") == "web_search_call" and find_text(item, "action", "type") == "search" for item in items
    )


def list_unpriced_tools(
    data: Mapping[str, Any], items: Sequence[Mapping[str, Any]], priced: Mapping[str, object], *, has_search_price: bool
) -> list[str]:
    """
    Return the names of billed server tools of a reply without a known price.

    Args:
        data: The ``provider_data`` of the reply.
        items: The data of the opaque parts of the reply.
        priced: xAI's counts with a known price.
        has_search_price: Whether a web search has a known price.
    """
    raw_usage: Mapping[str, Any] = data.get("usage") or {}
    found = [name for name in _list_nonzero_names(raw_usage.get("server_tool_use")) if name not in FREE_OF_ANTHROPIC]
    found += _list_nonzero_names(raw_usage.get("serverToolUsage"))
    told = raw_usage.get("server_side_tool_usage_details")
    if isinstance(told, Mapping):
        found += [name for name in _list_nonzero_names(told) if name not in FREE_OF_XAI and name not in priced]
    else:
        found += (
            ["num_server_side_tools_used"] if parse_token_count(raw_usage.get("num_server_side_tools_used")) else []
        )
        found += [find_text(item, "type") for item in items if _is_unpriced_call(item)]
        found += ["web_search"] if not has_search_price and count_openai_web_searches(data, items) else []
    used = data.get("tool_usage")
    if isinstance(used, Mapping):
        found += [
            name for name, told in used.items() if name not in {"web_search", IMAGES} and _list_nonzero_names(told)
        ]
    found += ["num_search_queries"] if parse_token_count(raw_usage.get("num_search_queries")) else []
    grounding = data.get("groundingMetadata")
    found += ["imageSearchQueries"] if isinstance(grounding, Mapping) and grounding.get("imageSearchQueries") else []
    found += ["google_maps"] if any(chunk.get("maps") for chunk in find_objects(grounding, "groundingChunks")) else []
    return list(dict.fromkeys(found))


def _is_unpriced_call(item: Mapping[str, Any]) -> bool:
    """Return whether an item of Responses is a billed call without a known price."""
    kind = find_text(item, "type")
    if kind == "shell_call" and find_text(item, "environment", "type") == "local":
        return False
    return kind.endswith("_call") and kind not in FREE_CALLS and kind not in PRICED_CALLS


def _list_nonzero_names(counts: object) -> list[str]:
    """Return the names in *counts* with a count other than 0."""
    return [name for name, count in counts.items() if parse_token_count(count)] if isinstance(counts, Mapping) else []


def list_unpriced_token_kinds(extracted: object, prices: object) -> list[str]:
    """Return the kinds of tokens in a usage that cost more than text and have no listed price."""
    return [
        name
        for name in PAID_MODALITIES
        if getattr(extracted, name, None) and getattr(prices, f"{name.removesuffix('_tokens')}_mtok", None) is None
    ]
