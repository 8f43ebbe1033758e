"""
Every OpenAI-compatible service that is known by name, as one table.

A preset is data: where the service is, where its key comes from, and flags for what it does in its own way. Values come
from the services' documents and from recorded traffic; no service was called to fill them in.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypeAlias

import attrs
from attrs import frozen

from stepengine.models.base import Timeouts

if TYPE_CHECKING:
    from stepengine.models._thinking_levels import Form

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
    One service, or one kind of server. The defaults are the safest values for a server that nothing is known of.

    Attributes:
        name: The provider's name and prefix.
        adapter: Which protocol it speaks best: Chat Completions or Responses.
        base_url: Its address; ``None`` when there is none by default.
        base_url_variable: The environment variable that holds another address.
        base_url_suffix: What belongs behind an address from that variable.
        key_variable: The environment variable that holds the key; ``""`` for none.
        key_required: Whether it answers nobody without a key.
        no_key: What is sent as the key when there is none; ``""`` sends no header for it.
        model_patterns: Models that are taken to be its own when a model string names no provider.
        limit_member: How the output limit is called.
        thinking: How thinking is asked for: by OpenAI's word for an effort, or in the service's own way.
        takes_files: How user messages may hold PDF: as bytes, by URL too, or both as Mistral writes it; on Chat Completions.
        takes_audio: How they may hold WAV and MP3: as base64, or as a data URL; ``""`` for not at all; on Chat Completions.
        takes_video: Whether they may hold video; on Chat Completions.
        holds_files: Whether files can be uploaded, as to OpenAI, and named by their ids.
        takes_batches: Whether requests can be sent in batches, as to OpenAI.
        refusals: Whether an assistant message may hold a refusal; else it is sent as text.
        named_choice: Whether one tool can be demanded by name; else only that tool is offered, and a call demanded.
        required_word: The tool choice that demands a call; ``""`` when it cannot be demanded.
        parallel: Send ``parallel_tool_calls: true`` when nothing else is asked, because it is off by default.
        told_parallel: Whether it can be told whether one reply may hold several calls.
        stream_usage: Whether usage must be asked for in a stream.
        nine_letter_ids: Whether call ids are exactly nine letters and digits.
        reasoning_with_calls: The member that every assistant message with calls must hold, even empty.
        reasoning_with_text: Whether every other assistant message must hold that member, too.
        tagged_thoughts: Models, as a regular expression, whose thoughts go back in the text, between tags.
        text_with_calls: Whether an assistant message with calls must hold a text, even an empty one.
        bridged: Models, as a regular expression, that refuse a message of the user right after a tool's result.
        plain_schemas: Models, as a regular expression, whose schemas must do without ``$ref``, ``const`` and null unions.
        strict: Models, as a regular expression, that can be asked to keep to a schema strictly.
        written_calls: Whether calls that the model wrote as ``<tool_call>`` or ``<codebuff_tool_call>`` into its text are read as calls.
        written_thoughts: Whether thoughts that the model wrote between tags at the beginning of its text are read as such.
        cache_key: Whether to name the conversation, so that it meets the same prompt cache.
        key_member: How a name for the prompt cache is called; ``""`` when it cannot be given.
        caches: Whether prompts are cached without being asked to.
        cache_marks: Models, as a regular expression, whose prompts are cached where they are marked.
        tiers: The service's words for tiers, by ours.
        seed_member: How a seed is called; ``""`` when it cannot be given.
        logprobs: Whether probabilities of tokens can be asked for.
        keeps: Whether it can be told whether to store replies.
        describes: Whether its list of models tells their windows and largest replies, as that of OpenRouter.
        schemas: Whether an answer by a schema can be asked for; else a tool takes it.
        quiet_none: Whether tools are left away when none may be called, because the word for that is not obeyed.
        searches: How the names of models begin, as a regular expression, that search tools by themselves (Responses).
        encrypted_reasoning: Whether encrypted reasoning must be asked for (Responses).
        stops: Whether stop sequences may be sent; else replies are cut here.
        azure: Whether models are deployments, which older API versions have in the path.
        own_members: Members of a request that only this service knows. Requests to other services are sent without them.
        timeouts: How long calls may take.
    """

    name: str
    adapter: Literal["openai_chat", "openai"] = "openai_chat"
    base_url: str | None = None
    base_url_variable: str | None = None
    base_url_suffix: str = ""
    key_variable: str = ""
    key_required: bool = False
    no_key: str = ""
    model_patterns: tuple[str, ...] = ()
    limit_member: Literal["max_completion_tokens", "max_tokens"] = "max_tokens"
    thinking: Form = "effort"
    takes_files: Literal["no", "bytes", "all", "link"] = "no"
    takes_audio: Literal["", "bytes", "data_url"] = ""
    takes_video: bool = False
    holds_files: bool = False
    takes_batches: bool = False
    refusals: bool = False
    named_choice: bool = True
    required_word: str = "required"
    parallel: bool = False
    told_parallel: bool = True
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
    keeps: bool = False
    describes: bool = False
    schemas: bool = True
    quiet_none: bool = False
    searches: str = ""
    encrypted_reasoning: bool = False
    stops: bool = True
    azure: bool = False
    own_members: tuple[str, ...] = ()
    timeouts: Timeouts = Timeouts()


def _make_preset(name: str, base_url: str, *, key_required: bool = True) -> Preset:
    """Return a preset whose variables are named after it, such as ``GROQ_BASE_URL`` and ``GROQ_API_KEY``."""
    return Preset(
        name=name,
        base_url=base_url,
        base_url_variable=f"{name.upper()}_BASE_URL",
        key_variable=f"{name.upper()}_API_KEY",
        key_required=key_required,
    )


OPENAI = attrs.evolve(
    _make_preset("openai", "https://api.openai.com/v1"),
    adapter="openai",
    model_patterns=(r"gpt-(?!oss:).+", r"chatgpt-.+", r"o\d.*", r"ft:gpt-.+"),
    limit_member="max_completion_tokens",
    takes_files="bytes",
    takes_audio="bytes",
    holds_files=True,
    takes_batches=True,
    refusals=True,
    strict=".*",
    stops=False,
    key_member="prompt_cache_key",
    caches=True,
    tiers=OPENAI_TIERS,
    keeps=True,
    searches=r"gpt-(?:5\.[4-9]|[6-9])",
)

MISTRAL_ELSEWHERE = r"mistralai/.*"

AZURE = Preset(
    name="azure",
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
    keeps=True,
)

PRESETS = {
    preset.name: preset
    for preset in (
        OPENAI,
        attrs.evolve(OPENAI, name="openai_chat", adapter="openai_chat", model_patterns=(), stops=True),
        attrs.evolve(
            _make_preset("openrouter", "https://openrouter.ai/api/v1"),
            thinking="openrouter",
            takes_files="all",
            takes_audio="bytes",
            takes_video=True,
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
            base_url="http://localhost:11434/v1",
            base_url_variable="OLLAMA_BASE_URL",
            model_patterns=(r"gpt-oss:.+",),
            no_key="ollama",
            thinking="ollama",
        ),
        attrs.evolve(
            _make_preset("vllm", "http://localhost:8000/v1", key_required=False),
            takes_audio="bytes",
            thinking="template",
            bridged=MISTRAL_ELSEWHERE,
        ),
        attrs.evolve(
            _make_preset("llamacpp", "http://localhost:8080/v1", key_required=False),
            takes_audio="bytes",
            thinking="template",
            named_choice=False,
            parallel=True,
        ),
        attrs.evolve(
            _make_preset("lmstudio", "http://localhost:1234/v1", key_required=False),
            no_key="lm-studio",
            named_choice=False,
        ),
        attrs.evolve(
            _make_preset("groq", "https://api.groq.com/openai/v1"),
            thinking="groq",
            limit_member="max_completion_tokens",
            tiers=GROQ_TIERS,
            logprobs=False,
        ),
        _make_preset("together", "https://api.together.ai/v1"),
        attrs.evolve(
            _make_preset("mistral", "https://api.mistral.ai/v1"),
            model_patterns=(r"(?:mistral|ministral|magistral|devstral|codestral|pixtral|open-mi[sx]tral)-.+",),
            thinking="mistral",
            takes_files="link",
            required_word="any",
            stream_usage=False,
            bridged=".*",
            nine_letter_ids=True,
            text_with_calls=True,
            seed_member="random_seed",
            logprobs=False,
            quiet_none=True,
        ),
        attrs.evolve(
            _make_preset("deepseek", "https://api.deepseek.com"),
            model_patterns=(r"deepseek-.+",),
            thinking="deepseek",
            reasoning_with_calls="reasoning_content",
            reasoning_with_text=True,
            caches=True,
            seed_member="",
            schemas=False,
        ),
        attrs.evolve(
            _make_preset("xai", "https://api.x.ai/v1"),
            adapter="openai",
            model_patterns=(r"grok-.+",),
            thinking="xai",
            cache_key=True,
            key_member="prompt_cache_key",
            caches=True,
            keeps=True,
            encrypted_reasoning=True,
            stops=False,
            timeouts=Timeouts(first_byte=900.0, idle=900.0, silence=900.0, total=3_600.0),
        ),
        attrs.evolve(
            _make_preset("cerebras", "https://api.cerebras.ai/v1"),
            thinking="cerebras",
            tagged_thoughts=r"(?:zai-)?glm-.*|qwen.*",
            told_parallel=False,
        ),
        _make_preset("fireworks", "https://api.fireworks.ai/inference/v1"),
        attrs.evolve(_make_preset("huggingface", "https://router.huggingface.co/v1"), key_variable="HF_TOKEN"),
        attrs.evolve(
            _make_preset("moonshot", "https://api.moonshot.ai/v1"),
            model_patterns=(r"(?:kimi|moonshot)-.+",),
            thinking="moonshot",
            reasoning_with_calls="reasoning_content",
        ),
        attrs.evolve(
            _make_preset("zai", "https://api.z.ai/api/paas/v4"),
            model_patterns=(r"glm-.+",),
            thinking="zai",
        ),
        attrs.evolve(
            _make_preset("qwen", "https://dashscope-intl.aliyuncs.com/compatible-mode/v1"),
            model_patterns=(r"qwen(?:\d.*)?-.+", r"qwq-.+"),
            key_variable="DASHSCOPE_API_KEY",
            base_url_variable="DASHSCOPE_BASE_URL",
            thinking="qwen",
            takes_audio="data_url",
        ),
        attrs.evolve(
            _make_preset("perplexity", "https://api.perplexity.ai"),
            model_patterns=(r"sonar(?:-.+)?",),
            stream_usage=False,
            told_parallel=False,
            seed_member="",
            logprobs=False,
            stops=False,
            written_thoughts=True,
        ),
        Preset(
            name="snowflake",
            key_variable="SNOWFLAKE_TOKEN",
            key_required=True,
            limit_member="max_completion_tokens",
            thinking="snowflake",
        ),
        AZURE,
        attrs.evolve(AZURE, name="azure_responses", adapter="openai", encrypted_reasoning=True, stops=False),
    )
}
"""The services that are known by name, by their prefix."""

ELSEWHERE = Preset(
    name="openai_chat",
    base_url_variable="STEPENGINE_OPENAI_CHAT_BASE_URL",
    key_variable="STEPENGINE_OPENAI_CHAT_API_KEY",
)


def find_preset(name: str, base_url: str | None) -> Preset:
    """
    Return the preset of *name*, or the safest one for a server that is not known.

    ``openai_chat`` with a *base_url* of its own is such a server: OpenAI's key is not sent there.
    """
    known = PRESETS.get(name)
    if known is None or (name == "openai_chat" and base_url is not None):
        return attrs.evolve(ELSEWHERE, name=name)
    return known
