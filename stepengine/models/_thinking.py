"""
What ``Thinking`` becomes where it is asked for in words or numbers: which model takes which. Pure: no SDK, no clock, no I/O.

Claude's families, which have more to say than their thinking, stand in ``models/anthropic/families.py``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, Literal, TypeAlias

import attrs
from attrs import frozen

from stepengine.data.models import Effort, Thinking

__all__ = (
    "CANNOT",
    "Form",
    "ThinkingRequest",
    "asked_in_chat",
    "asked_of_gemini",
    "asked_of_responses",
    "budget_of",
    "effort_of",
)

Json = dict[str, Any]
Form: TypeAlias = Literal[
    "effort", "ollama", "template", "openrouter", "groq", "xai", "deepseek", "mistral", "zai", "moonshot", "cerebras",
    "snowflake", "qwen",
]  # fmt: skip
"""How a service of Chat Completions or Responses is asked for thinking."""

BUDGETS: dict[Effort, int] = {"none": 0, "low": 2_048, "medium": 8_192, "high": 16_384, "max": 32_768}
"""How many tokens of thinking stand for an effort, where a wire knows only tokens; and up to which a budget is one."""

CANNOT = "{model} cannot be kept from thinking; Thinking('none') asks it for {least}"
UNTOLD = "{model} is sent nothing for Thinking('none'): no word is known that keeps it from thinking"
DEAF = "{model} takes no word for how much to think; {thinking!r} is not sent"
ONE = "{model} knows one amount of thinking; {thinking!r} asks for that"
SHOWN = "{model} sends its thoughts in any case; the show=False of {thinking!r} is not sent"
DEMANDED = "{model} answers a demanded call without thinking"


@frozen
class ThinkingRequest:
    """
    What a request says of thinking.

    Attributes:
        members: Members of the body; of Gemini those of its ``thinkingConfig``, of Responses those of ``reasoning``.
        note: What of the wish cannot be had, as a sentence; ``""`` when all of it can.
    """

    members: Json = attrs.field(factory=dict)
    note: str = ""


NOTHING = ThinkingRequest()


@frozen(kw_only=True)
class Words:
    """
    Models that take the same words for how much they think.

    Attributes:
        names: How their names begin, as a regular expression.
        low: The word for ``"low"``, and so on; ``most`` is that for ``"max"``.
        off: The word that keeps them from thinking; ``""`` when nothing has to be sent for that, ``None`` when there is none.
        least: The word nearest to that; ``""`` sends nothing.
        deaf: Whether they refuse every word.
    """

    names: str = ""
    low: str = "low"
    medium: str = "medium"
    high: str = "high"
    most: str = "high"
    off: str | None = None
    least: str = "low"
    deaf: bool = False

    def word(self, effort: Effort) -> str:
        """Return the word for an *effort* that is not ``"none"``."""
        return {"low": self.low, "medium": self.medium, "high": self.high}.get(effort, self.most)


# Which words a model takes: what it was seen to accept and refuse, and its service's reference, in August 2026. The first
# pattern that fits counts; a name that is newer than a table is taken for the nearest family before it.
SILENT = Words(deaf=True, off="")
STUBBORN = Words(deaf=True, least="")
GPT_OSS = Words(names=r"gpt-oss")
ANY = Words(least="")

OPENAI = (
    GPT_OSS,
    attrs.evolve(SILENT, names=r"(?:ft:)?gpt-(?:3|4|5-chat)|chatgpt-"),
    Words(names=r"gpt-5\.\d+-chat", low="medium", high="medium", most="medium", least="medium"),
    Words(names=r"gpt-5-pro", low="high", medium="high", least="high"),
    Words(names=r"gpt-5\.\d+-pro"),
    Words(names=r"gpt-5\.1-codex|gpt-5-codex|o\d"),
    Words(names=r"gpt-5(?!\.)", least="minimal"),
    Words(names=r"gpt-5\.1", off="none"),
    Words(names=r"gpt-5\.[2-5]", off="none", most="xhigh"),
    Words(names=r"gpt-6-astra", most="max"),
    Words(names=r"gpt-(?:5\.|[6-9])", off="none", most="max"),
)
XAI = (
    Words(names=r"grok-(?:4\.3|latest)", off="none"),
    Words(names=r"grok-(?:4\.[4-9]|[5-9])"),
    Words(names=r"grok-3-mini", medium="low"),
    attrs.evolve(STUBBORN, names=r"grok-(?:4(?!.*non-reasoning)|code|build)"),
    attrs.evolve(SILENT, names=r"grok-"),
)
GROQ = (
    GPT_OSS,
    Words(names=r"qwen3", low="default", medium="default", high="default", most="default", off="none"),
    attrs.evolve(STUBBORN, names=r"deepseek-r1|qwen-qwq|qwq"),
    attrs.evolve(SILENT, names=r""),
)
MISTRAL = (
    attrs.evolve(STUBBORN, names=r"magistral"),
    attrs.evolve(SILENT, names=r"ministral|devstral|codestral|pixtral|voxtral|open-|mistral-\w+-2[0-5]\d\d"),
    Words(names=r"", low="high", medium="high", off="none"),
)
DEEPSEEK = (
    Words(names=r"deepseek-v(?:[4-9]|\d\d)", low="high", medium="high", most="max", off="disabled"),
    attrs.evolve(STUBBORN, names=r"deepseek-reasoner"),
    Words(names=r"", low="", medium="", high="", most="", off="disabled"),
)
ZAI = (
    Words(names=r"glm-5\.2", most="max", off="disabled"),
    Words(names=r"glm-(?:5\.[3-9]|[6-9])", medium="high", most="max"),
    attrs.evolve(SILENT, names=r"glm-4(?!\.[5-9])|glm-4\.[56]v"),
    Words(names=r"", low="", medium="", high="", most="", off="disabled"),
)
MOONSHOT = (
    attrs.evolve(SILENT, names=r"moonshot-|kimi-latest|kimi-k2-0"),
    attrs.evolve(STUBBORN, names=r"kimi-(?:k2-)?thinking"),
    Words(names=r"kimi-k[3-9]", off="disabled"),
    Words(names=r"", low="", medium="", high="", most="", off="disabled"),
)
CEREBRAS = (
    GPT_OSS,
    Words(names=r"zai-glm|glm-", low="", medium="", high="", most="", off="none"),
    attrs.evolve(SILENT, names=r""),
)
SNOWFLAKE = (Words(names=r"claude-", off=""), *OPENAI, attrs.evolve(SILENT, names=r""))
OLLAMA = (GPT_OSS, Words(names=r"", off="none"))
TEMPLATE = (GPT_OSS, Words(names=r"", off=""))


def _words_of(table: Iterable[Words], model: str) -> Words:
    """Return the words of *model*, whatever a service has put before its name."""
    name = model.rpartition("/")[2].lower()
    return next((words for words in table if re.match(words.names, name)), ANY)


def effort_of(thinking: Thinking) -> Effort:
    """Return the effort that is asked for, or that stands for a budget, where a wire knows only efforts."""
    if thinking.effort is not None:
        return thinking.effort
    if thinking.tokens is None:
        return "medium"
    return "low" if thinking.tokens <= BUDGETS["low"] else "medium" if thinking.tokens <= BUDGETS["medium"] else "high"


def budget_of(thinking: Thinking) -> int | None:
    """Return the tokens that are asked for, or that stand for an effort; ``None`` leaves the amount to the model."""
    if thinking.tokens is not None or thinking.effort is None:
        return thinking.tokens
    return BUDGETS[thinking.effort]


def _is_off(thinking: Thinking) -> bool:
    return thinking.mode == "none"


def _word_for_thinking(thinking: Thinking, words: Words, model: str) -> tuple[str, str]:
    """Return the word to send, ``""`` for none, and what of the wish cannot be had."""
    if _is_off(thinking):
        if words.off is not None:
            return words.off, ""
        least = f"{words.least} effort"
        return words.least, CANNOT.format(model=model, least=least) if words.least else UNTOLD.format(model=model)
    if words.deaf:
        return "", DEAF.format(model=model, thinking=thinking)
    is_lost = words.low == words.most and (thinking.effort is not None or thinking.tokens is not None)
    return words.word(effort_of(thinking)), ONE.format(model=model, thinking=thinking) if is_lost else ""


def _note_shown(asked: ThinkingRequest, thinking: Thinking, model: str) -> ThinkingRequest:
    """Return *asked*, with the note that thoughts are shown in any case, where nothing else is to be said."""
    if thinking.show or _is_off(thinking) or asked.note:
        return asked
    return attrs.evolve(asked, note=SHOWN.format(model=model, thinking=thinking))


# --- Responses -------------------------------------------------------------------------------------------------------


def asked_of_responses(thinking: Thinking | None, form: Form, model: str) -> ThinkingRequest:
    """Return the members of ``reasoning``; a number of tokens has no place there and becomes an effort."""
    if thinking is None:
        return NOTHING
    word, note = _word_for_thinking(thinking, _words_of(XAI if form == "xai" else OPENAI, model), model)
    if not word:
        return ThinkingRequest({}, note)
    shown = {"summary": "auto"} if thinking.show and not _is_off(thinking) else {}
    return ThinkingRequest({"effort": word, **shown}, note)


# --- Chat Completions ------------------------------------------------------------------------------------------------


def asked_in_chat(
    thinking: Thinking | None, form: Form, model: str, *, demanded: bool = False, off: bool = False
) -> ThinkingRequest:
    """
    Return the members of a body of Chat Completions.

    Args:
        thinking: What is wished for.
        form: How the service is asked.
        model: The model's name at the service.
        demanded: Whether a call is demanded, beside which some services do not let a model think.
        off: Whether the service refused thinking beside this request, so that it is to be switched off.
    """
    if form == "deepseek" and demanded:
        return ThinkingRequest(_switch("disabled"))  # on by default there, and it refuses a demanded call
    if thinking is None:
        return NOTHING
    wish = Thinking("none") if off else thinking
    match form:
        case "openrouter":
            asked = _at_openrouter(wish, model, demanded=demanded)
        case "groq":
            asked = _at_groq(wish, model)
        case "deepseek" | "zai" | "moonshot":
            asked = _ask_by_switch(wish, form, model)
        case "template" | "qwen":
            asked = _ask_by_template(wish, form, model)
        case _:
            asked = _ask_by_word(wish, form, model)
    return attrs.evolve(asked, note="") if off else asked


TABLES: dict[Form, tuple[Words, ...]] = {
    "effort": OPENAI, "xai": XAI, "groq": GROQ, "mistral": MISTRAL, "deepseek": DEEPSEEK, "zai": ZAI, "moonshot": MOONSHOT,
    "cerebras": CEREBRAS, "snowflake": SNOWFLAKE, "ollama": OLLAMA, "template": TEMPLATE,
}  # fmt: skip


def _ask_by_word(thinking: Thinking, form: Form, model: str) -> ThinkingRequest:
    """By one word beside the conversation."""
    words = _words_of(TABLES[form], model)
    word, note = _word_for_thinking(thinking, words, model)
    if form == "snowflake" and not _is_off(thinking) and words.names == SNOWFLAKE[0].names:
        return _note_shown(ThinkingRequest({"reasoning": {"effort": word}, "temperature": 1}, note), thinking, model)
    members: Json = {"reasoning_effort": word} if word else {}
    if form == "cerebras" and not words.deaf and words is not GPT_OSS and not _is_off(thinking):
        members["clear_thinking"] = False
    if form == "cerebras" and not words.deaf and not thinking.show and not _is_off(thinking):
        return ThinkingRequest({**members, "reasoning_format": "hidden"}, note)
    # OpenAI's own models never send their thoughts over this wire.
    hidden = form == "effort" and words is not ANY and words is not GPT_OSS
    return (
        ThinkingRequest(members, note)
        if hidden or words.deaf
        else _note_shown(ThinkingRequest(members, note), thinking, model)
    )


def _at_openrouter(thinking: Thinking, model: str, *, demanded: bool) -> ThinkingRequest:
    """By an object that OpenRouter translates for the model behind it."""
    if _is_off(thinking):
        return ThinkingRequest({"reasoning": {"effort": "none"}})
    amount: Json = {"enabled": True}
    if thinking.tokens is not None:
        amount = {"max_tokens": thinking.tokens}
    elif thinking.effort is not None:
        amount = {"effort": "high" if thinking.effort == "max" else thinking.effort, "enabled": True}
    lost = demanded and model.startswith("anthropic/")
    shown = {} if thinking.show else {"exclude": True}
    return ThinkingRequest({"reasoning": {**amount, **shown}}, DEMANDED.format(model=model) if lost else "")


def _at_groq(thinking: Thinking, model: str) -> ThinkingRequest:
    """By a word, and beside it whether thoughts are a part of their own or are left out."""
    words = _words_of(GROQ, model)
    word, note = _word_for_thinking(thinking, words, model)
    members: Json = {"reasoning_effort": word} if word else {}
    if words.off in ("", word):
        return ThinkingRequest(members, note)
    if words is GPT_OSS:
        return ThinkingRequest(
            members if thinking.show and not _is_off(thinking) else {**members, "include_reasoning": False}, note
        )
    return ThinkingRequest(
        {**members, "reasoning_format": "parsed" if thinking.show and not _is_off(thinking) else "hidden"}, note
    )


def _switch(state: str, **more: object) -> Json:
    return {"thinking": {"type": state, **more}}


def _ask_by_switch(thinking: Thinking, form: Form, model: str) -> ThinkingRequest:
    """By a switch, and beside it a word where the model takes one."""
    words = _words_of(TABLES[form], model)
    word, note = _word_for_thinking(thinking, words, model)
    if words.deaf or word == "disabled":
        return ThinkingRequest(_switch("disabled") if word == "disabled" else {}, note)
    more: Json = {"clear_thinking": False} if form == "zai" else {"keep": "all"} if form == "moonshot" else {}
    effort = word if thinking.effort is not None or thinking.tokens is not None else ""
    if form == "moonshot" and effort:
        # Without the switch: both at once are refused.
        return _note_shown(ThinkingRequest({"reasoning_effort": effort}, note), thinking, model)
    beside: Json = {"reasoning_effort": effort} if effort else {}
    return _note_shown(ThinkingRequest({**_switch("enabled", **more), **beside}, note), thinking, model)


def _ask_by_template(thinking: Thinking, form: Form, model: str) -> ThinkingRequest:
    """By a switch of the model's own template, which servers hand on, and of which Qwen's API has made a member."""
    words = _words_of(TEMPLATE, model)
    word, note = _word_for_thinking(thinking, words, model)
    if form == "template" and words is GPT_OSS:
        return _note_shown(ThinkingRequest({"reasoning_effort": word}, note), thinking, model)
    is_on = not _is_off(thinking)
    if form == "template":
        beside: Json = {"reasoning_effort": word} if word and thinking.effort is not None else {}
        return _note_shown(
            ThinkingRequest({"chat_template_kwargs": {"enable_thinking": is_on}, **beside}), thinking, model
        )
    budget = budget_of(thinking) if is_on else None
    amount: Json = {} if budget is None else {"thinking_budget": budget}
    return _note_shown(ThinkingRequest({"enable_thinking": is_on, **amount}), thinking, model)


# --- Gemini ----------------------------------------------------------------------------------------------------------

LEVELS_SINCE = 3
"""The generation of Gemini that takes a level of thinking in place of a budget."""
THINKS_SINCE = 2.5
"""The generation of Gemini that thinks first."""
UNMINIMAL = re.compile(r"gemini-(?:\d+(?:\.\d+)?-pro|pro-|3\.[78]-flash(?!-lite)|[4-9])")
"""Models of these generations whose lowest level is ``"low"``."""
LEVELS_ONLY_SINCE = 4
"""The generation that refuses a number of tokens."""
MORE_THAN_HIGH = re.compile(r"gemini-4-hydrogen")
"""Models that take ``"xhigh"``; Argon and Carbon refuse it."""
FLASH_MOST, PRO_MOST, PRO_LEAST = 24_576, 32_768, 128
"""The limits of a budget in tokens that Google documents for Gemini 2.5 (providers:PV16)."""
VERSION = re.compile(r"gemini-(\d+(?:\.\d+)?)")
LATEST = re.compile(r"gemini-.*-latest")


def asked_of_gemini(thinking: Thinking | None, model: str) -> ThinkingRequest:
    """
    Return the members of ``thinkingConfig``: from Gemini 3 on a level, before that a number of tokens.

    A number that is given is sent to newer models too, which take either but not both.
    """
    if thinking is None:
        return NOTHING
    name = model.removeprefix("models/")
    found = VERSION.match(name)
    version = float(found.group(1)) if found else LEVELS_SINCE if LATEST.match(name) else 0.0
    if version < THINKS_SINCE:
        return NOTHING if _is_off(thinking) else ThinkingRequest({}, DEAF.format(model=model, thinking=thinking))
    if version >= LEVELS_SINCE:
        return _by_level(thinking, model, name, takes_tokens=version < LEVELS_ONLY_SINCE)
    return _by_budget(thinking, model, is_pro="pro" in name)


def _by_level(thinking: Thinking, model: str, name: str, *, takes_tokens: bool) -> ThinkingRequest:
    least = "low" if UNMINIMAL.match(name) else "minimal"
    if _is_off(thinking):
        return ThinkingRequest({"thinkingLevel": least}, CANNOT.format(model=model, least=f"{least} effort"))
    config: Json = {"includeThoughts": thinking.show}
    if thinking.tokens is not None and takes_tokens:
        return ThinkingRequest({**config, "thinkingBudget": thinking.tokens})
    if thinking.tokens is None and thinking.effort is None:
        return ThinkingRequest(config)
    level, most = effort_of(thinking), "xhigh" if MORE_THAN_HIGH.match(name) else "high"
    return ThinkingRequest({**config, "thinkingLevel": most if level == "max" else level})


def _by_budget(thinking: Thinking, model: str, *, is_pro: bool) -> ThinkingRequest:
    least, most = (PRO_LEAST, PRO_MOST) if is_pro else (0, FLASH_MOST)
    if _is_off(thinking):
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
