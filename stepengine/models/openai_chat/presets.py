"""What differs between servers that speak Chat Completions, as data (ecosystem section 3)."""

from __future__ import annotations

from typing import Literal

import attrs

__all__ = ("PRESETS", "Preset", "preset_of")


@attrs.frozen(kw_only=True)
class Preset:
    """
    One server, or one kind of server.

    Attributes:
        name: The provider's name and prefix.
        base_url: Its address; ``None`` when there is none by default.
        base_url_variable: The environment variable that holds another address.
        key_variable: The environment variable that holds the key; ``""`` for none.
        key_required: Whether it answers nobody without a key.
        model_patterns: Models that are taken to be its own when a model string names no provider.
        limit_member: How the output limit is called.
        thinking: How thinking is asked for: by effort, or OpenRouter's way.
        takes_files: Whether user messages may hold documents, as bytes and, for OpenRouter, by URL.
        refusals: Whether an assistant message may hold a refusal; else it is sent as text.
    """

    name: str
    base_url: str | None = None
    base_url_variable: str | None = None
    key_variable: str = ""
    key_required: bool = False
    model_patterns: tuple[str, ...] = ()
    limit_member: Literal["max_completion_tokens", "max_tokens"] = "max_tokens"
    thinking: Literal["effort", "openrouter"] = "effort"
    takes_files: Literal["no", "bytes", "all"] = "no"
    refusals: bool = False


OPENAI = Preset(
    name="openai",
    base_url="https://api.openai.com/v1",
    base_url_variable="OPENAI_BASE_URL",
    key_variable="OPENAI_API_KEY",
    key_required=True,
    model_patterns=(r"gpt-.+", r"chatgpt-.+", r"o\d.*", r"ft:gpt-.+"),
    limit_member="max_completion_tokens",
    takes_files="bytes",
    refusals=True,
)

PRESETS = {
    preset.name: preset
    for preset in (
        OPENAI,
        attrs.evolve(OPENAI, name="openai_chat", model_patterns=()),
        Preset(
            name="openrouter",
            base_url="https://openrouter.ai/api/v1",
            base_url_variable="OPENROUTER_BASE_URL",
            key_variable="OPENROUTER_API_KEY",
            key_required=True,
            thinking="openrouter",
            takes_files="all",
        ),
        Preset(name="ollama", base_url="http://localhost:11434/v1", base_url_variable="OLLAMA_BASE_URL"),
        Preset(
            name="vllm",
            base_url="http://localhost:8000/v1",
            base_url_variable="VLLM_BASE_URL",
            key_variable="VLLM_API_KEY",
        ),
    )
}
"""
The servers that are known by name. ``openai`` is served through Chat Completions here until the adapter for the
Responses API takes the name over; ``openai_chat`` keeps meaning Chat Completions.
"""

ELSEWHERE = Preset(
    name="openai_chat",
    base_url_variable="STEPENGINE_OPENAI_CHAT_BASE_URL",
    key_variable="STEPENGINE_OPENAI_CHAT_API_KEY",
)


def preset_of(name: str, base_url: str | None) -> Preset:
    """
    Return the preset of *name*, or the safest one for a server that is not known.

    ``openai_chat`` with a *base_url* of its own is such a server: OpenAI's key is not sent there.
    """
    known = PRESETS.get(name)
    if known is None or (name == "openai_chat" and base_url is not None):
        return attrs.evolve(ELSEWHERE, name=name)
    return known
