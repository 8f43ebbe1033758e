"""
Convert ``Thinking`` to the words or numbers that each model accepts. Pure: no SDK, no clock, no I/O.

Claude's families are in ``models/anthropic/families.py``, because they differ in more than thinking.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, Literal, TypeAlias

import attrs
from attrs import frozen

from stepengine.data.models import Effort, Thinking

Json = dict[str, Any]
ThinkingFormat: TypeAlias = Literal[
    "effort", "ollama", "template", "openrouter", "groq", "xai", "deepseek", "mistral", "zai", "moonshot", "cerebras",
    "snowflake", "qwen",
]  # fmt: skip
"""The format in which a service of Chat Completions or Responses expects thinking."""

BUDGETS: dict[Effort, int] = {"none": 0, "low": 2_048, "medium": 8_192, "high": 16_384, "max": 32_768}
"""The budget in tokens for each effort, and the largest budget that becomes that effort."""

CANNOT = "{model} always thinks; Thinking('none') requests {least}"
UNTOLD = "{model} has no known value that switches thinking off; Thinking('none') is not sent"
DEAF = "{model} has no setting for the amount of thinking; {thinking!r} is not sent"
ONE = "{model} has only one amount of thinking; {thinking!r} selects it"
SHOWN = "{model} always sends its thoughts; the show=False of {thinking!r} is not sent"
DEMANDED = "{model} answers a forced tool call without thinking"


@frozen
class ThinkingRequest:
    """
    The thinking members of a request, and a note on unsupported options.

    Attributes:
        members: Members of the body; for Gemini those of ``thinkingConfig``, for Responses those of ``reasoning``.
        note: A sentence on unsupported options of ``Thinking``; ``""`` if all are supported.
    """

    members: Json = attrs.field(factory=dict)
    note: str = ""


NOTHING = ThinkingRequest()


@frozen(kw_only=True)
class ThinkingWords:
    """
    Models that accept the same words for the amount of thinking.

    Attributes:
        names: A regular expression for the start of their names.
        low: The word for ``"low"``, and so on; ``most`` is the word for ``"max"``.
        off: The word that switches thinking off; ``""`` if nothing has to be sent for that, ``None`` if there is no such word.
        least: The word for the least thinking; ``""`` sends nothing.
        deaf: Whether they accept no words.
    """

    names: str = ""
    low: str = "low"
    medium: str = "medium"
    high: str = "high"
    most: str = "high"
    off: str | None = None
    least: str = "low"
    deaf: bool = False

    def get_word_for_effort(self, effort: Effort) -> str:
        """Return the word for an *effort* that is not ``"none"``."""
        return {"low": self.low, "medium": self.medium, "high": self.high}.get(effort, self.most)


# Sources: accepted and rejected requests in recorded traffic, and the references of the services, in August 2026. The first
# matching pattern counts. A name newer than a table counts as the nearest earlier family.
SILENT = ThinkingWords(deaf=True, off="")
STUBBORN = ThinkingWords(deaf=True, least="")
GPT_OSS = ThinkingWords(names=r"gpt-oss")
ANY = ThinkingWords(least="")

OPENAI = (
    GPT_OSS,
    attrs.evolve(SILENT, names=r"(?:ft:)?gpt-(?:3|4|5-chat)|chatgpt-"),
    ThinkingWords(names=r"gpt-5\.\d+-chat", low="medium", high="medium", most="medium", least="medium"),
    ThinkingWords(names=r"gpt-5-pro", low="high", medium="high", least="high"),
    ThinkingWords(names=r"gpt-5\.\d+-pro"),
    ThinkingWords(names=r"gpt-5\.1-codex|gpt-5-codex|o\d"),
    ThinkingWords(names=r"gpt-5(?!\.)", least="minimal"),
    ThinkingWords(names=r"gpt-5\.1(?!\d)", off="none"),
    ThinkingWords(names=r"gpt-5\.[2-5](?!\d)", off="none", most="xhigh"),
    ThinkingWords(names=r"gpt-6-astra", most="max"),
    ThinkingWords(names=r"gpt-(?:5\.|[6-9])", off="none", most="max"),
)
XAI = (
    ThinkingWords(names=r"grok-(?:4\.3(?!\d)|latest)", off="none"),
    ThinkingWords(names=r"grok-(?:4\.(?:[4-9]|[1-9]\d)|[5-9])"),
    ThinkingWords(names=r"grok-3-mini", medium="low"),
    attrs.evolve(STUBBORN, names=r"grok-(?:4(?!.*non-reasoning)|code|build)"),
    attrs.evolve(SILENT, names=r"grok-"),
)
GROQ = (
    GPT_OSS,
    ThinkingWords(names=r"qwen3", low="default", medium="default", high="default", most="default", off="none"),
    attrs.evolve(STUBBORN, names=r"deepseek-r1|qwen-qwq|qwq"),
    attrs.evolve(SILENT, names=r""),
)
MISTRAL = (
    attrs.evolve(STUBBORN, names=r"magistral"),
    attrs.evolve(SILENT, names=r"ministral|devstral|codestral|pixtral|voxtral|open-|mistral-\w+-2[0-5]\d\d"),
    ThinkingWords(names=r"", low="high", medium="high", off="none"),
)
DEEPSEEK = (
    ThinkingWords(names=r"deepseek-v(?:[4-9]|\d\d)", low="high", medium="high", most="max", off="disabled"),
    attrs.evolve(STUBBORN, names=r"deepseek-reasoner"),
    ThinkingWords(names=r"", low="", medium="", high="", most="", off="disabled"),
)
ZAI = (
    ThinkingWords(names=r"glm-5\.2(?!\d)", most="max", off="disabled"),
    ThinkingWords(names=r"glm-(?:5\.(?:[3-9]|[1-9]\d)|[6-9])", medium="high", most="max"),
    attrs.evolve(SILENT, names=r"glm-4(?!\.[5-9])|glm-4\.[56]v"),
    ThinkingWords(names=r"", low="", medium="", high="", most="", off="disabled"),
)
MOONSHOT = (
    attrs.evolve(SILENT, names=r"moonshot-|kimi-latest|kimi-k2-0"),
    attrs.evolve(STUBBORN, names=r"kimi-(?:k2-)?thinking"),
    ThinkingWords(names=r"kimi-k[3-9]", off="disabled"),
    ThinkingWords(names=r"", low="", medium="", high="", most="", off="disabled"),
)
CEREBRAS = (
    GPT_OSS,
    ThinkingWords(names=r"zai-glm|glm-", low="", medium="", high="", most="", off="none"),
    attrs.evolve(SILENT, names=r""),
)
SNOWFLAKE = (ThinkingWords(names=r"claude-", off=""), *OPENAI, attrs.evolve(SILENT, names=r""))
OLLAMA = (GPT_OSS, ThinkingWords(names=r"", off="none"))
TEMPLATE = (GPT_OSS, ThinkingWords(names=r"", off=""))


def _get_thinking_words(table: Iterable[ThinkingWords], model: str) -> ThinkingWords:
    """Return the words of *model*, ``ANY`` for an unknown model; prefixes of the name up to its last slash are ignored."""
    name = model.rpartition("/")[2].lower()
    return next((words for words in table if re.match(words.names, name)), ANY)


def effort_from_thinking(thinking: Thinking) -> Effort:
    """Return the effort of *thinking*, else the effort for its budget; ``"medium"`` if neither is set."""
    if thinking.effort is not None:
        return thinking.effort
    if thinking.tokens is None:
        return "medium"
    return "low" if thinking.tokens <= BUDGETS["low"] else "medium" if thinking.tokens <= BUDGETS["medium"] else "high"


def budget_from_thinking(thinking: Thinking) -> int | None:
    """Return the budget of *thinking* in tokens, or the budget for its effort; ``None`` leaves the amount to the model."""
    if thinking.tokens is not None or thinking.effort is None:
        return thinking.tokens
    return BUDGETS[thinking.effort]


def _is_thinking_off(thinking: Thinking) -> bool:
    return thinking.mode == "none"


def _choose_thinking_word_and_note(thinking: Thinking, words: ThinkingWords, model: str) -> tuple[str, str]:
    """Return (word, note): the model's word for *thinking*, ``""`` to send none, and a note on unsupported options."""
    if _is_thinking_off(thinking):
        if words.off is not None:
            return words.off, ""
        least = f"{words.least} effort"
        return words.least, CANNOT.format(model=model, least=least) if words.least else UNTOLD.format(model=model)
    if words.deaf:
        return "", DEAF.format(model=model, thinking=thinking)
    is_lost = words.low == words.most and (thinking.effort is not None or thinking.tokens is not None)
    return words.get_word_for_effort(effort_from_thinking(thinking)), ONE.format(
        model=model, thinking=thinking
    ) if is_lost else ""


def _add_note_on_ignored_hiding(thinking_request: ThinkingRequest, thinking: Thinking, model: str) -> ThinkingRequest:
    """Return *thinking_request*; if *thinking* hides thoughts and it has no note, with the note that ``show=False`` has no effect."""
    if thinking.show or _is_thinking_off(thinking) or thinking_request.note:
        return thinking_request
    return attrs.evolve(thinking_request, note=SHOWN.format(model=model, thinking=thinking))


# --- Responses -------------------------------------------------------------------------------------------------------


def encode_thinking_for_responses(
    thinking: Thinking | None, thinking_format: ThinkingFormat, model: str
) -> ThinkingRequest:
    """Return the members of ``reasoning``, with a budget in tokens as an effort, and a note on unsupported options."""
    if thinking is None:
        return NOTHING
    word, note = _choose_thinking_word_and_note(
        thinking, _get_thinking_words(XAI if thinking_format == "xai" else OPENAI, model), model
    )
    if not word:
        return ThinkingRequest({}, note)
    shown = {"summary": "auto"} if thinking.show and not _is_thinking_off(thinking) else {}
    return ThinkingRequest({"effort": word, **shown}, note)


# --- Chat Completions ------------------------------------------------------------------------------------------------


def encode_thinking_for_chat(
    thinking: Thinking | None,
    thinking_format: ThinkingFormat,
    model: str,
    *,
    is_call_forced: bool,
    is_rejected: bool,
) -> ThinkingRequest:
    """
    Return the members for thinking of a body of Chat Completions, in the format of the service, and a note on unsupported options.

    Args:
        thinking: The requested thinking.
        thinking_format: The format of the service.
        model: The model's name at the service.
        is_call_forced: Whether a call is forced, which some services do not support together with thinking.
        is_rejected: Whether to switch thinking off because the service rejected it for this request.
    """
    if thinking_format == "deepseek" and is_call_forced:
        return ThinkingRequest(
            _encode_thinking_switch("disabled")
        )  # on by default, and incompatible with a forced call
    if thinking is None:
        return NOTHING
    wish = Thinking("none") if is_rejected else thinking
    match thinking_format:
        case "openrouter":
            asked = _encode_thinking_for_openrouter(wish, model, is_call_forced=is_call_forced)
        case "groq":
            asked = _encode_thinking_for_groq(wish, model)
        case "deepseek" | "zai" | "moonshot":
            asked = _encode_thinking_by_switch(wish, thinking_format, model)
        case "template" | "qwen":
            asked = _encode_thinking_by_template(wish, thinking_format, model)
        case _:
            asked = _encode_thinking_by_word(wish, thinking_format, model)
    return attrs.evolve(asked, note="") if is_rejected else asked


TABLES: dict[ThinkingFormat, tuple[ThinkingWords, ...]] = {
    "effort": OPENAI, "xai": XAI, "groq": GROQ, "mistral": MISTRAL, "deepseek": DEEPSEEK, "zai": ZAI, "moonshot": MOONSHOT,
    "cerebras": CEREBRAS, "snowflake": SNOWFLAKE, "ollama": OLLAMA, "template": TEMPLATE,
}  # fmt: skip


def _encode_thinking_by_word(thinking: Thinking, thinking_format: ThinkingFormat, model: str) -> ThinkingRequest:
    """Return thinking as a word for the amount, mostly in the member ``reasoning_effort``, and a note on unsupported options."""
    words = _get_thinking_words(TABLES[thinking_format], model)
    word, note = _choose_thinking_word_and_note(thinking, words, model)
    if thinking_format == "snowflake" and not _is_thinking_off(thinking) and words.names == SNOWFLAKE[0].names:
        return _add_note_on_ignored_hiding(
            ThinkingRequest({"reasoning": {"effort": word}, "temperature": 1}, note), thinking, model
        )
    members: Json = {"reasoning_effort": word} if word else {}
    if thinking_format == "cerebras" and not words.deaf and words is not GPT_OSS and not _is_thinking_off(thinking):
        members["clear_thinking"] = False
    if thinking_format == "cerebras" and not words.deaf and not thinking.show and not _is_thinking_off(thinking):
        return ThinkingRequest({**members, "reasoning_format": "hidden"}, note)
    # OpenAI's own models never send their thoughts through Chat Completions.
    hidden = thinking_format == "effort" and words is not ANY and words is not GPT_OSS
    return (
        ThinkingRequest(members, note)
        if hidden or words.deaf
        else _add_note_on_ignored_hiding(ThinkingRequest(members, note), thinking, model)
    )


def _encode_thinking_for_openrouter(thinking: Thinking, model: str, *, is_call_forced: bool) -> ThinkingRequest:
    """Return thinking as the object that OpenRouter translates for each model."""
    if _is_thinking_off(thinking):
        return ThinkingRequest({"reasoning": {"effort": "none"}})
    amount: Json = {"enabled": True}
    if thinking.tokens is not None:
        amount = {"max_tokens": thinking.tokens}
    elif thinking.effort is not None:
        amount = {"effort": "high" if thinking.effort == "max" else thinking.effort, "enabled": True}
    lost = is_call_forced and model.startswith("anthropic/")
    shown = {} if thinking.show else {"exclude": True}
    return ThinkingRequest({"reasoning": {**amount, **shown}}, DEMANDED.format(model=model) if lost else "")


def _encode_thinking_for_groq(thinking: Thinking, model: str) -> ThinkingRequest:
    """Return thinking as Groq's members: a word, and whether the thoughts are sent separately or hidden."""
    words = _get_thinking_words(GROQ, model)
    word, note = _choose_thinking_word_and_note(thinking, words, model)
    members: Json = {"reasoning_effort": word} if word else {}
    if words.off in ("", word):
        return ThinkingRequest(members, note)
    if words is GPT_OSS:
        return ThinkingRequest(
            members if thinking.show and not _is_thinking_off(thinking) else {**members, "include_reasoning": False},
            note,
        )
    return ThinkingRequest(
        {**members, "reasoning_format": "parsed" if thinking.show and not _is_thinking_off(thinking) else "hidden"},
        note,
    )


def _encode_thinking_switch(state: str, **more: object) -> Json:
    """Return the ``thinking`` member with the type *state*, and with *more* members."""
    return {"thinking": {"type": state, **more}}


def _encode_thinking_by_switch(thinking: Thinking, thinking_format: ThinkingFormat, model: str) -> ThinkingRequest:
    """Return thinking as a switch, with a word for the amount if the model accepts words."""
    words = _get_thinking_words(TABLES[thinking_format], model)
    word, note = _choose_thinking_word_and_note(thinking, words, model)
    if words.deaf or word == "disabled":
        return ThinkingRequest(_encode_thinking_switch("disabled") if word == "disabled" else {}, note)
    more: Json = (
        {"clear_thinking": False}
        if thinking_format == "zai"
        else {"keep": "all"}
        if thinking_format == "moonshot"
        else {}
    )
    effort = word if thinking.effort is not None or thinking.tokens is not None else ""
    if thinking_format == "moonshot" and effort:
        # Without the switch, because both at once are rejected.
        return _add_note_on_ignored_hiding(ThinkingRequest({"reasoning_effort": effort}, note), thinking, model)
    beside: Json = {"reasoning_effort": effort} if effort else {}
    return _add_note_on_ignored_hiding(
        ThinkingRequest({**_encode_thinking_switch("enabled", **more), **beside}, note), thinking, model
    )


def _encode_thinking_by_template(thinking: Thinking, thinking_format: ThinkingFormat, model: str) -> ThinkingRequest:
    """Return thinking as a switch of the model's chat template, or as the member of Qwen's API."""
    words = _get_thinking_words(TEMPLATE, model)
    word, note = _choose_thinking_word_and_note(thinking, words, model)
    if thinking_format == "template" and words is GPT_OSS:
        return _add_note_on_ignored_hiding(ThinkingRequest({"reasoning_effort": word}, note), thinking, model)
    is_on = not _is_thinking_off(thinking)
    if thinking_format == "template":
        beside: Json = {"reasoning_effort": word} if word and thinking.effort is not None else {}
        return _add_note_on_ignored_hiding(
            ThinkingRequest({"chat_template_kwargs": {"enable_thinking": is_on}, **beside}), thinking, model
        )
    budget = budget_from_thinking(thinking) if is_on else None
    amount: Json = {} if budget is None else {"thinking_budget": budget}
    return _add_note_on_ignored_hiding(ThinkingRequest({"enable_thinking": is_on, **amount}), thinking, model)


# --- Gemini ----------------------------------------------------------------------------------------------------------

LEVELS_SINCE = 3
"""The first generation of Gemini with levels of thinking in place of budgets."""
THINKS_SINCE = 2.5
"""The first generation of Gemini that thinks."""
UNMINIMAL = re.compile(r"gemini-(?:\d+(?:\.\d+)?-pro|pro-|3\.[78]-flash(?!-lite)|[4-9])")
"""Models with ``"low"`` as their lowest level."""
LEVELS_ONLY_SINCE = 4
"""The first generation that rejects a budget in tokens."""
MORE_THAN_HIGH = re.compile(r"gemini-4-hydrogen")
"""Models that accept ``"xhigh"``; Argon and Carbon reject it."""
FLASH_MOST, PRO_MOST, PRO_LEAST = 24_576, 32_768, 128
"""The limits of a budget in tokens that Google documents for Gemini 2.5 (providers:PV16)."""
VERSION = re.compile(r"gemini-(\d+(?:\.\d+)?)")
LATEST = re.compile(r"gemini-.*-latest")


def encode_thinking_for_gemini(thinking: Thinking | None, model: str) -> ThinkingRequest:
    """
    Return the members of ``thinkingConfig``: a level since Gemini 3, a budget in tokens before.

    An explicit budget is also sent to Gemini 3, which accepts either, but not both.
    """
    if thinking is None:
        return NOTHING
    name = model.removeprefix("models/")
    found = VERSION.match(name)
    version = float(found.group(1)) if found else LEVELS_SINCE if LATEST.match(name) else 0.0
    if version < THINKS_SINCE:
        return (
            NOTHING if _is_thinking_off(thinking) else ThinkingRequest({}, DEAF.format(model=model, thinking=thinking))
        )
    if version >= LEVELS_SINCE:
        return _encode_thinking_by_level(thinking, model, name, accepts_budget=version < LEVELS_ONLY_SINCE)
    return _encode_thinking_by_budget(thinking, model, is_pro="pro" in name)


def get_lowest_gemini_level(model: str) -> str:
    """Return the word for the least thinking of a Gemini model that accepts levels."""
    return "low" if UNMINIMAL.match(model.removeprefix("models/")) else "minimal"


def _encode_thinking_by_level(thinking: Thinking, model: str, name: str, *, accepts_budget: bool) -> ThinkingRequest:
    """Return thinking for Gemini 3 and later: a level, or an explicit budget if the model accepts one."""
    least = get_lowest_gemini_level(name)
    if _is_thinking_off(thinking):
        return ThinkingRequest({"thinkingLevel": least}, CANNOT.format(model=model, least=f"{least} effort"))
    config: Json = {"includeThoughts": thinking.show}
    if thinking.tokens is not None and accepts_budget:
        return ThinkingRequest({**config, "thinkingBudget": thinking.tokens})
    if thinking.tokens is None and thinking.effort is None:
        return ThinkingRequest(config)
    level, most = effort_from_thinking(thinking), "xhigh" if MORE_THAN_HIGH.match(name) else "high"
    return ThinkingRequest({**config, "thinkingLevel": most if level == "max" else level})


def _encode_thinking_by_budget(thinking: Thinking, model: str, *, is_pro: bool) -> ThinkingRequest:
    """Return thinking for Gemini 2.5: a budget in tokens within the limits of the model."""
    least, most = (PRO_LEAST, PRO_MOST) if is_pro else (0, FLASH_MOST)
    if _is_thinking_off(thinking):
        return ThinkingRequest(
            {"thinkingBudget": least}, CANNOT.format(model=model, least=f"{least} tokens") if least else ""
        )
    config: Json = {"includeThoughts": thinking.show}
    if thinking.tokens is not None:
        return ThinkingRequest({**config, "thinkingBudget": min(max(thinking.tokens, least), most)})
    if thinking.effort is None:
        return ThinkingRequest(config)
    wanted = FLASH_MOST if thinking.effort == "high" else BUDGETS[thinking.effort]
    return ThinkingRequest({**config, "thinkingBudget": min(wanted, most)})
