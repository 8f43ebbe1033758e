"""
Every OpenAI-compatible service that is known by name, as one table (ecosystem section 3, EC104 to EC115).

A preset is data: where the service is, where its key comes from, and flags for what it does in its own way. Values come
from the services' documents and from recorded traffic; no service was called to fill them in.
"""

from __future__ import annotations

from typing import Literal

import attrs

from stepengine.models._reading import Timeouts

__all__ = ("PRESETS", "Preset", "preset_of")


@attrs.frozen(kw_only=True, cache_hash=True)
class Preset:
    """
    One service, or one kind of server. The defaults are the safest values for a server that nothing is known of.

    Attributes:
        name: The provider's name and prefix.
        adapter: Which protocol it speaks best: Chat Completions or Responses.
        base_url: Its address; ``None`` when there is none by default.
        base_url_variable: The environment variable that holds another address.
        base_url_suffix: What belongs behind an address from that variable.
        key_variable: The environment variable that holds the key; ``""`` for none.
        key_required: Whether it answers nobody without a key.
        no_key: What is sent as the key when there is none.
        model_patterns: Models that are taken to be its own when a model string names no provider.
        limit_member: How the output limit is called.
        thinking: How thinking is asked for: by effort, OpenRouter's way, or DeepSeek's switch.
        takes_files: Whether user messages may hold documents, as bytes and, for OpenRouter, by URL.
        refusals: Whether an assistant message may hold a refusal; else it is sent as text.
        named_choice: Whether one tool can be demanded by name; else only that tool is offered, and a call demanded.
        required_word: The tool choice that demands a call; ``""`` when it cannot be demanded.
        parallel: Send ``parallel_tool_calls: true`` when nothing else is asked, because it is off by default.
        stream_usage: Whether usage must be asked for in a stream.
        nine_letter_ids: Whether call ids are exactly nine letters and digits.
        reasoning_with_calls: The member that every assistant message with calls must hold, even empty.
        plain_schemas: Models, as a regular expression, whose schemas must do without ``$ref``, ``const`` and null unions.
        cache_key: Whether to name the conversation, so that it meets the same prompt cache.
        encrypted_reasoning: Whether encrypted reasoning must be asked for (Responses).
        stops: Whether stop sequences may be sent; else replies are cut here.
        azure: Whether models are deployments, which older API versions have in the path.
        timeouts: How long calls may take.
    """

    name: str
    adapter: Literal["openai_chat", "openai"] = "openai_chat"
    base_url: str | None = None
    base_url_variable: str | None = None
    base_url_suffix: str = ""
    key_variable: str = ""
    key_required: bool = False
    no_key: str = "none"
    model_patterns: tuple[str, ...] = ()
    limit_member: Literal["max_completion_tokens", "max_tokens"] = "max_tokens"
    thinking: Literal["effort", "openrouter", "deepseek"] = "effort"
    takes_files: Literal["no", "bytes", "all"] = "no"
    refusals: bool = False
    named_choice: bool = True
    required_word: str = "required"
    parallel: bool = False
    stream_usage: bool = True
    nine_letter_ids: bool = False
    reasoning_with_calls: str = ""
    plain_schemas: str = ""
    cache_key: bool = False
    encrypted_reasoning: bool = False
    stops: bool = True
    azure: bool = False
    timeouts: Timeouts = Timeouts()


OPENAI = Preset(
    name="openai",
    adapter="openai",
    base_url="https://api.openai.com/v1",
    base_url_variable="OPENAI_BASE_URL",
    key_variable="OPENAI_API_KEY",
    key_required=True,
    model_patterns=(r"gpt-.+", r"chatgpt-.+", r"o\d.*", r"ft:gpt-.+"),
    limit_member="max_completion_tokens",
    takes_files="bytes",
    refusals=True,
    stops=False,
)

PRESETS = {
    preset.name: preset
    for preset in (
        OPENAI,
        attrs.evolve(OPENAI, name="openai_chat", adapter="openai_chat", model_patterns=(), stops=True),
        Preset(
            name="openrouter",
            base_url="https://openrouter.ai/api/v1",
            base_url_variable="OPENROUTER_BASE_URL",
            key_variable="OPENROUTER_API_KEY",
            key_required=True,
            thinking="openrouter",
            takes_files="all",
            plain_schemas=r"google/.*",
        ),
        Preset(
            name="ollama",
            base_url="http://localhost:11434/v1",
            base_url_variable="OLLAMA_BASE_URL",
            no_key="ollama",
        ),
        Preset(
            name="vllm",
            base_url="http://localhost:8000/v1",
            base_url_variable="VLLM_BASE_URL",
            key_variable="VLLM_API_KEY",
        ),
        Preset(
            name="llamacpp",
            base_url="http://localhost:8080/v1",
            base_url_variable="LLAMACPP_BASE_URL",
            key_variable="LLAMACPP_API_KEY",
            named_choice=False,
            parallel=True,
        ),
        Preset(
            name="lmstudio",
            base_url="http://localhost:1234/v1",
            base_url_variable="LMSTUDIO_BASE_URL",
            key_variable="LMSTUDIO_API_KEY",
            no_key="lm-studio",
            named_choice=False,
        ),
        Preset(
            name="groq",
            base_url="https://api.groq.com/openai/v1",
            base_url_variable="GROQ_BASE_URL",
            key_variable="GROQ_API_KEY",
            key_required=True,
            limit_member="max_completion_tokens",
        ),
        Preset(
            name="together",
            base_url="https://api.together.ai/v1",
            base_url_variable="TOGETHER_BASE_URL",
            key_variable="TOGETHER_API_KEY",
            key_required=True,
        ),
        Preset(
            name="mistral",
            base_url="https://api.mistral.ai/v1",
            base_url_variable="MISTRAL_BASE_URL",
            key_variable="MISTRAL_API_KEY",
            key_required=True,
            model_patterns=(r"(?:mistral|ministral|magistral|devstral|codestral|pixtral|open-mi[sx]tral)-.+",),
            required_word="any",
            stream_usage=False,
            nine_letter_ids=True,
        ),
        Preset(
            name="deepseek",
            base_url="https://api.deepseek.com",
            base_url_variable="DEEPSEEK_BASE_URL",
            key_variable="DEEPSEEK_API_KEY",
            key_required=True,
            model_patterns=(r"deepseek-.+",),
            thinking="deepseek",
            reasoning_with_calls="reasoning_content",
        ),
        Preset(
            name="xai",
            adapter="openai",
            base_url="https://api.x.ai/v1",
            base_url_variable="XAI_BASE_URL",
            key_variable="XAI_API_KEY",
            key_required=True,
            model_patterns=(r"grok-.+",),
            cache_key=True,
            encrypted_reasoning=True,
            stops=False,
            timeouts=Timeouts(first_byte=900.0, idle=900.0, silence=900.0, total=3_600.0),
        ),
        Preset(
            name="azure",
            base_url_variable="AZURE_OPENAI_ENDPOINT",
            base_url_suffix="/openai/v1",
            key_variable="AZURE_OPENAI_API_KEY",
            key_required=True,
            limit_member="max_completion_tokens",
            refusals=True,
            azure=True,
        ),
    )
}
"""The services that are known by name, by their prefix."""

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
