"""
A table of all OpenAI-compatible services that are known by name.

A preset is data: the base URL of a service, the source of its key, and flags for its deviations. The values are from the
documentation of the services (``page``) and from recorded traffic.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypeAlias

import attrs
from attrs import frozen

from stepengine.models.base import Timeouts

if TYPE_CHECKING:
    from stepengine.models._thinking_levels import ThinkingFormat

Tiers: TypeAlias = tuple[tuple[str, str], ...]
OPENAI_TIERS: Tiers = (
    ("auto", "auto"),
    ("standard", "default"),
    ("flex", "flex"),
    ("priority", "priority"),
    ("fast", "fast"),
)
OPENROUTER_TIERS: Tiers = (("flex", "flex"), ("priority", "priority"))
GROQ_TIERS: Tiers = (("auto", "auto"), ("standard", "on_demand"), ("flex", "flex"))


@frozen(kw_only=True, cache_hash=True)
class Preset:
    """
    One service, or one kind of server. The defaults are safe for an unknown server.

    Attributes:
        name: The provider's name and prefix.
        page: The URL of its documentation of models and prices, or of its documentation in general.
        adapter: Its preferred protocol: Chat Completions or Responses.
        base_url: Its base URL; ``None`` if there is no default.
        base_url_variable: The environment variable that holds another base URL.
        base_url_suffix: The path to append to a base URL of any source without ``/v1`` at its end, except for Azure's dated APIs.
        key_variable: The environment variable that holds the key; ``""`` for none.
        key_required: Whether it requires a key.
        no_key: The key to send without a key; ``""`` sends no header for it.
        model_patterns: Regular expressions of its models in model strings without a provider.
        limit_member: The member for the output limit.
        thinking: The format for thinking: OpenAI's ``reasoning_effort``, or that of a service.
        file_format: The format for PDF in user messages: bytes, also URLs, or both as Mistral's ``document_url`` (Chat
            Completions).
        audio_format: The format for WAV and MP3 in user messages: base64, or a data URL; ``""`` for none (Chat Completions).
        supports_video: Whether user messages may have video (Chat Completions).
        stores_files: Whether it stores uploaded files with ids, as OpenAI.
        supports_batches: Whether it has batches, as OpenAI.
        refusals: Whether an assistant message may have a refusal; else that is sent as text.
        named_choice: Whether a call of one tool can be forced by name; else only that tool is offered, and any call is forced.
        required_word: The tool choice that forces a call; ``""`` if a call cannot be forced.
        parallel: Send ``parallel_tool_calls: true`` by default, because it is off otherwise.
        supports_parallel: Whether ``parallel_tool_calls`` is supported.
        stream_usage: Whether usage must be requested in a stream.
        nine_letter_ids: Whether call ids must have exactly nine letters and digits.
        reasoning_with_calls: The member that every assistant message with calls must have, even if empty.
        reasoning_with_text: Whether every other assistant message must have that member, too.
        tagged_thoughts: A regular expression of models that expect their thoughts between tags in the text.
        text_with_calls: Whether an assistant message with calls must have a text, even if empty.
        bridged: A regular expression of models that reject a user message right after a tool result.
        plain_schemas: A regular expression of models that do not support ``$ref``, ``const`` and null unions in schemas.
        strict: A regular expression of models that support strict schemas.
        written_calls: Whether ``<tool_call>`` and ``<codebuff_tool_call>`` blocks in the text are parsed as tool calls.
        written_thoughts: Whether thoughts between tags at the start of the text are parsed as thinking.
        cache_key: Whether to send a cache key for each conversation.
        key_member: The member for a cache key; ``""`` if that is not supported.
        caches: Whether prompts are cached by default.
        cache_marks: A regular expression of models that cache marked prompts.
        tiers: The service's names of tiers, by ours.
        seed_member: The member for a seed; ``""`` if that is not supported.
        logprobs: Whether token probabilities are supported.
        supports_store: Whether a request can choose whether the reply is stored.
        describes: Whether its list of models has their context windows and largest outputs, as that of OpenRouter.
        schemas: Whether response schemas are supported; else a tool receives the answer.
        ignores_none: Whether to send no tools for the tool choice ``"none"``, because the service ignores that choice.
        searches: A regular expression for the start of names of models with their own tool search (Responses).
        encrypted_reasoning: Whether encrypted reasoning must be requested (Responses).
        stops: Whether stop sequences are supported; else replies are cut at them locally.
        azure: Whether models are deployments, which older API versions have in the path.
        own_members: Members of a request that only this service knows, and that are not sent to others.
        timeouts: Time limits of calls.
    """

    name: str
    page: str
    adapter: Literal["openai_chat", "openai"] = "openai_chat"
    base_url: str | None = None
    base_url_variable: str | None = None
    base_url_suffix: str = ""
    key_variable: str = ""
    key_required: bool = False
    no_key: str = ""
    model_patterns: tuple[str, ...] = ()
    limit_member: Literal["max_completion_tokens", "max_tokens"] = "max_tokens"
    thinking: ThinkingFormat = "effort"
    file_format: Literal["no", "bytes", "all", "link"] = "no"
    audio_format: Literal["", "bytes", "data_url"] = ""
    supports_video: bool = False
    stores_files: bool = False
    supports_batches: bool = False
    refusals: bool = False
    named_choice: bool = True
    required_word: str = "required"
    parallel: bool = False
    supports_parallel: bool = True
    stream_usage: bool = True
    nine_letter_ids: bool = False
    reasoning_with_calls: str = ""
    reasoning_with_text: bool = False
    tagged_thoughts: str = ""
    text_with_calls: bool = False
    bridged: str = ""
    plain_schemas: str = ""
    strict: str = ""
    written_calls: bool = False
    written_thoughts: bool = False
    cache_key: bool = False
    key_member: str = ""
    caches: bool = False
    cache_marks: str = ""
    tiers: Tiers = ()
    seed_member: str = "seed"
    logprobs: bool = True
    supports_store: bool = False
    describes: bool = False
    schemas: bool = True
    ignores_none: bool = False
    searches: str = ""
    encrypted_reasoning: bool = False
    stops: bool = True
    azure: bool = False
    own_members: tuple[str, ...] = ()
    timeouts: Timeouts = Timeouts()


def _make_preset(name: str, base_url: str, page: str, *, key_required: bool = True) -> Preset:
    """Return a preset with environment variables by *name*, such as ``GROQ_BASE_URL`` and ``GROQ_API_KEY`` for ``groq``."""
    return Preset(
        name=name,
        page=page,
        base_url=base_url,
        base_url_variable=f"{name.upper()}_BASE_URL",
        key_variable=f"{name.upper()}_API_KEY",
        key_required=key_required,
    )


OPENAI = attrs.evolve(
    _make_preset("openai", "https://api.openai.com/v1", "https://platform.openai.com/docs/models"),
    adapter="openai",
    model_patterns=(r"gpt-(?!oss:).+", r"chatgpt-.+", r"o\d.*", r"ft:gpt-.+"),
    limit_member="max_completion_tokens",
    file_format="bytes",
    audio_format="bytes",
    stores_files=True,
    supports_batches=True,
    refusals=True,
    strict=".*",
    stops=False,
    key_member="prompt_cache_key",
    caches=True,
    tiers=OPENAI_TIERS,
    supports_store=True,
    searches=r"gpt-(?:5\.(?:[4-9]|[1-9]\d)|[6-9])",
)

MISTRAL_ELSEWHERE = r"mistralai/.*"

AZURE = Preset(
    name="azure",
    page="https://learn.microsoft.com/azure/ai-services/openai/",
    base_url_variable="AZURE_OPENAI_ENDPOINT",
    base_url_suffix="/openai/v1",
    key_variable="AZURE_OPENAI_API_KEY",
    key_required=True,
    limit_member="max_completion_tokens",
    refusals=True,
    strict=".*",
    azure=True,
    key_member="prompt_cache_key",
    caches=True,
    supports_store=True,
)

PRESETS = {
    preset.name: preset
    for preset in (
        OPENAI,
        attrs.evolve(OPENAI, name="openai_chat", adapter="openai_chat", model_patterns=(), stops=True),
        attrs.evolve(
            _make_preset("openrouter", "https://openrouter.ai/api/v1", "https://openrouter.ai/models"),
            thinking="openrouter",
            file_format="all",
            audio_format="bytes",
            supports_video=True,
            bridged=MISTRAL_ELSEWHERE,
            plain_schemas=r"google/.*",
            strict=r"openai/.*",
            cache_marks=r"~?(?:anthropic|google)/.*",
            caches=True,
            tiers=OPENROUTER_TIERS,
            describes=True,
            own_members=("provider", "route", "transforms"),
        ),
        Preset(
            name="ollama",
            page="https://docs.ollama.com",
            base_url="http://localhost:11434/v1",
            base_url_variable="OLLAMA_BASE_URL",
            model_patterns=(r"gpt-oss:.+",),
            no_key="ollama",
            thinking="ollama",
        ),
        attrs.evolve(
            _make_preset("vllm", "http://localhost:8000/v1", "https://docs.vllm.ai", key_required=False),
            audio_format="bytes",
            thinking="template",
            bridged=MISTRAL_ELSEWHERE,
        ),
        attrs.evolve(
            _make_preset(
                "llamacpp", "http://localhost:8080/v1", "https://github.com/ggml-org/llama.cpp", key_required=False
            ),
            audio_format="bytes",
            thinking="template",
            named_choice=False,
            parallel=True,
        ),
        attrs.evolve(
            _make_preset("lmstudio", "http://localhost:1234/v1", "https://lmstudio.ai/docs", key_required=False),
            no_key="lm-studio",
            named_choice=False,
        ),
        attrs.evolve(
            _make_preset("groq", "https://api.groq.com/openai/v1", "https://console.groq.com/docs/models"),
            thinking="groq",
            limit_member="max_completion_tokens",
            tiers=GROQ_TIERS,
            logprobs=False,
        ),
        _make_preset("together", "https://api.together.ai/v1", "https://docs.together.ai"),
        attrs.evolve(
            _make_preset("mistral", "https://api.mistral.ai/v1", "https://docs.mistral.ai"),
            model_patterns=(r"(?:mistral|ministral|magistral|devstral|codestral|pixtral|open-mi[sx]tral)-.+",),
            thinking="mistral",
            file_format="link",
            required_word="any",
            stream_usage=False,
            bridged=".*",
            nine_letter_ids=True,
            text_with_calls=True,
            seed_member="random_seed",
            logprobs=False,
            ignores_none=True,
        ),
        attrs.evolve(
            _make_preset("deepseek", "https://api.deepseek.com", "https://api-docs.deepseek.com/quick_start/pricing"),
            model_patterns=(r"deepseek-.+",),
            thinking="deepseek",
            reasoning_with_calls="reasoning_content",
            reasoning_with_text=True,
            caches=True,
            seed_member="",
            schemas=False,
        ),
        attrs.evolve(
            _make_preset("xai", "https://api.x.ai/v1", "https://docs.x.ai/docs/models"),
            adapter="openai",
            model_patterns=(r"grok-.+",),
            thinking="xai",
            cache_key=True,
            key_member="prompt_cache_key",
            caches=True,
            supports_store=True,
            encrypted_reasoning=True,
            stops=False,
            timeouts=Timeouts(first_byte=900.0, idle=900.0, silence=900.0, total=3_600.0),
        ),
        attrs.evolve(
            _make_preset("cerebras", "https://api.cerebras.ai/v1", "https://inference-docs.cerebras.ai"),
            thinking="cerebras",
            tagged_thoughts=r"(?:zai-)?glm-.*|qwen.*",
            supports_parallel=False,
        ),
        _make_preset("fireworks", "https://api.fireworks.ai/inference/v1", "https://docs.fireworks.ai"),
        attrs.evolve(
            _make_preset(
                "huggingface", "https://router.huggingface.co/v1", "https://huggingface.co/docs/inference-providers"
            ),
            key_variable="HF_TOKEN",
        ),
        attrs.evolve(
            _make_preset("moonshot", "https://api.moonshot.ai/v1", "https://platform.moonshot.ai/docs"),
            model_patterns=(r"(?:kimi|moonshot)-.+",),
            thinking="moonshot",
            reasoning_with_calls="reasoning_content",
        ),
        attrs.evolve(
            _make_preset("zai", "https://api.z.ai/api/paas/v4", "https://docs.z.ai"),
            model_patterns=(r"glm-.+",),
            thinking="zai",
        ),
        attrs.evolve(
            _make_preset(
                "qwen",
                "https://dashscope-intl.aliyuncs.com/compatible-mode/v1",
                "https://www.alibabacloud.com/help/en/model-studio/",
            ),
            model_patterns=(r"qwen(?:\d.*)?-.+", r"qwq-.+"),
            key_variable="DASHSCOPE_API_KEY",
            base_url_variable="DASHSCOPE_BASE_URL",
            thinking="qwen",
            audio_format="data_url",
        ),
        attrs.evolve(
            _make_preset("perplexity", "https://api.perplexity.ai", "https://docs.perplexity.ai"),
            model_patterns=(r"sonar(?:-.+)?",),
            stream_usage=False,
            supports_parallel=False,
            seed_member="",
            logprobs=False,
            stops=False,
            written_thoughts=True,
        ),
        Preset(
            name="snowflake",
            page="https://docs.snowflake.com",
            key_variable="SNOWFLAKE_TOKEN",
            key_required=True,
            limit_member="max_completion_tokens",
            thinking="snowflake",
        ),
        AZURE,
        attrs.evolve(AZURE, name="azure_responses", adapter="openai", encrypted_reasoning=True, stops=False),
    )
}
"""The presets by prefix."""

ELSEWHERE = Preset(
    name="openai_chat",
    page="",
    base_url_variable="STEPENGINE_OPENAI_CHAT_BASE_URL",
    key_variable="STEPENGINE_OPENAI_CHAT_API_KEY",
)


def get_preset_or_safe_default(name: str, base_url: str | None) -> Preset:
    """
    Return the preset of *name*, or the safe defaults of an unknown server.

    ``openai_chat`` with a *base_url* is such a server, so OpenAI's key is not sent there.
    """
    known = PRESETS.get(name)
    if known is None or (name == "openai_chat" and base_url is not None):
        return attrs.evolve(ELSEWHERE, name=name)
    return known
