"""Requests to models and their replies, in provider-independent form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from decimal import Decimal
from enum import StrEnum
from typing import Any, Literal, TypeAlias, get_args

import attrs
from attrs import frozen

from stepengine.data.checks import (
    CHOICE,
    COUNT,
    FLAG,
    NUMBER,
    TEXT,
    FieldCheck,
    allow_none,
    make_choice_check,
    make_instance_check,
    make_validator,
    with_keyword_hints,
)
from stepengine.data.json import JsonDict, freeze_object
from stepengine.data.messages import (
    AssistantPart,
    Message,
    ToolCallPart,
    join_text_parts,
    to_assistant_parts,
    to_tuple,
)
from stepengine.data.schemas import check_references, find_keyword_problem
from stepengine.data.server_tools import ServerTool, to_texts
from stepengine.data.thoughts import split_thoughts
from stepengine.data.tools import ToolChoice, ToolSpec
from stepengine.data.transcript import Transcript
from stepengine.data.usage import Usage, require_cost
from stepengine.errors import DataError, DefinitionError


class StopReason(StrEnum):
    """Why a model stopped; provider values map onto this closed set."""

    END_TURN = "end_turn"
    TOOL_USE = "tool_use"
    MAX_TOKENS = "max_tokens"
    STOP_SEQUENCE = "stop_sequence"
    REFUSAL = "refusal"
    PAUSE = "pause"
    ERROR = "error"


Effort: TypeAlias = Literal["none", "low", "medium", "high", "max"]
"""How much a model thinks, in words; every adapter translates them into the nearest that its provider knows."""

EFFORTS: tuple[Effort, ...] = get_args(Effort)
MODES = ("none", "enabled", "extended")
DEFAULT_BUDGET_TOKENS = 10_000
"""Enough for a page or two of code to be thought through, and below the output limit of every model that thinks."""


def _default_budget(self: Any) -> int | None:
    return DEFAULT_BUDGET_TOKENS if self.mode == "extended" else None


def _default_effort(self: Any) -> str | None:
    return "none" if self.mode == "none" else None


@with_keyword_hints
@frozen(init=False, repr=False)
class Thinking:
    """
    Whether and how much a model thinks before its answer; ``Thinking()`` leaves the amount to the provider.

    *tokens* is sent to providers that accept a number, *effort* to those that accept words. If only the other one is set, it
    is converted. Without ``ModelSettings.thinking`` nothing is sent.

    Args:
        effort: ``"none"``, ``"low"``, ``"medium"``, ``"high"`` or ``"max"``. ``"none"`` turns thinking off. If a model does
            not support that, the least effort is requested, with one warning.
        tokens: The most tokens for thinking.
        show: Whether the thoughts are returned as text, if a provider can omit them.
        mode: Another spelling: ``"none"``, ``"enabled"`` (the provider's amount, unless a number is set) or ``"extended"``
            (10,000 tokens, unless a number is set). It may also be passed instead of *effort*.
        budget_tokens: Another name of *tokens*, which takes precedence.

    Raises:
        DefinitionError: for an invalid value, and for *tokens* together with ``"none"``.
    """

    # The fields have their former names, because a value is stored, compared and fingerprinted by them.
    mode: Literal["none", "enabled", "extended"] = "none"
    budget_tokens: int | None = attrs.field(default=attrs.Factory(_default_budget, takes_self=True))
    effort: Effort | None = attrs.field(default=attrs.Factory(_default_effort, takes_self=True))
    show: bool = True

    def __init__(
        self,
        effort: Effort | Literal["enabled", "extended"] | None = None,
        tokens: int | None = None,
        show: bool = True,  # noqa: FBT001, FBT002 - the third of three words about one thing
        *,
        mode: Literal["none", "enabled", "extended"] | None = None,
        budget_tokens: int | None = None,
    ) -> None:
        if effort == "enabled" or effort == "extended":  # noqa: PLR1714 - as type checkers narrow it
            mode, effort = effort, None
        for name, value, what in (
            ("effort", effort, allow_none(make_choice_check(*EFFORTS))),
            ("tokens", tokens, allow_none(COUNT)),
            ("show", show, FLAG),
            ("mode", mode, allow_none(make_choice_check(*MODES))),
            ("budget_tokens", budget_tokens, allow_none(COUNT)),
        ):
            if problem := what.find_problem(f"Thinking({name}=...)", value):
                raise DefinitionError(problem)
        if effort is None and mode == "none":
            effort = "none"
        if effort == "none" and tokens is not None:
            msg = f"Thinking('none') cannot be combined with a number of tokens ({tokens}); leave out one of them"
            raise DefinitionError(msg)
        budget = budget_tokens if tokens is None else tokens
        if effort == "none":
            mode, budget = "none", None
        elif budget is None and mode == "extended":
            budget = DEFAULT_BUDGET_TOKENS
        else:
            mode = "enabled" if budget is None else "extended"
        self.__attrs_init__(mode, budget, effort, show)

    @classmethod
    def from_stored(cls, *, mode: Literal["none", "enabled", "extended"] = "none", **members: Any) -> Thinking:
        """Return the value of stored members; a missing *mode* is ``"none"``, the default of the stored form."""
        return cls(mode=mode, **members)

    def __repr__(self) -> str:
        given = {"effort": (self.effort, None), "tokens": (self.tokens, None), "show": (self.show, True)}
        return (
            f"Thinking({', '.join([f'{name}={value!r}' for name, (value, usual) in given.items() if value != usual])})"
        )

    @property
    def tokens(self) -> int | None:
        """The maximum number of thinking tokens; ``None`` if it is not set."""
        return self.budget_tokens


THINKING = make_instance_check(Thinking, 'Thinking("high")')
STOPS = FieldCheck(
    lambda value: isinstance(value, tuple) and all(isinstance(text, str) for text in value), "a text or a list of texts"
)


def _check_and_freeze_response_schema(value: Mapping[str, object] | None) -> JsonDict | None:
    """Return a JSON Schema as an immutable object; raise ``DataError`` for an unknown reference or keyword."""
    if value is None:
        return None
    schema = freeze_object(value, "response_schema")
    check_references("response_schema", schema)
    if problem := find_keyword_problem(schema):
        msg = f"response_schema at {problem}"
        raise DataError(msg)
    return schema


def _freeze_extra(value: Mapping[str, object]) -> JsonDict:
    return freeze_object(value, "extra")


def _freeze_safety(value: Mapping[str, object]) -> JsonDict:
    return freeze_object(value, "safety")


def _to_cache_lifetime(value: str | bool | None) -> Any:  # noqa: FBT001 - a converter has one positional argument
    """Return a cache lifetime; True is the shortest, False no caching."""
    return {True: "5m", False: "off"}.get(value, value) if isinstance(value, bool) else value


def _to_tool_tuple(value: ServerTool | Sequence[ServerTool]) -> Any:
    return tuple(value) if isinstance(value, list) else (value,) if isinstance(value, ServerTool) else value


ServiceTier: TypeAlias = Literal["auto", "standard", "flex", "priority", "fast"]
"""The price and speed class of a provider's answers; ``"auto"`` uses the provider's project setting."""

TIER = make_choice_check(*get_args(ServiceTier))
CACHE = make_choice_check("off", "5m", "1h")
WHOLE = FieldCheck(lambda value: isinstance(value, int) and not isinstance(value, bool), "a whole number")
LIKELY = FieldCheck(lambda value: COUNT.test(value) and value <= MAX_TOP_LOGPROBS, "a whole number from 0 to 20")
MAX_TOP_LOGPROBS = 20
"""OpenAI and Google document 20 as the most alternatives that they return for a token."""
SAFETY = FieldCheck(
    lambda value: all(isinstance(word, str) and word for word in value.values()),
    "words by category, such as {'harassment': 'only_high'}",
)
SERVER_TOOLS = FieldCheck(
    lambda value: isinstance(value, tuple) and all(isinstance(item, ServerTool) for item in value),
    "a list of WebSearch, UrlContext, CodeExecution, FileSearch and Programs",
)


@with_keyword_hints
@frozen(kw_only=True)
class ModelSettings:
    """
    How a model is asked; ``None`` leaves the provider's default.

    Attributes:
        temperature: Sampling temperature.
        top_p: Nucleus sampling.
        max_tokens: Output limit of one reply.
        stop_sequences: Texts at which the model stops.
        tool_choice: ``"auto"``, ``"none"``, ``"required"`` or a tool name.
        parallel_tool_calls: Whether one reply may hold several calls.
        thinking: Whether and how much the model thinks; ``None`` sends nothing.
        response_schema: JSON Schema of the text that the model shall answer with, for providers that can promise it.
        continue_cut: Whether a reply of text alone that was cut at its limit is continued within its step, up to three times;
            otherwise it ends the run as ``truncated``, as it does after that, and as an answer by a schema does.
        output: How an answer by *response_schema* is asked for: ``"native"`` by the provider's own promise, ``"tool"`` as the
            input of a tool that is offered for that; ``None`` is ``"native"`` where the provider and the schema allow it.
        service_tier: At what price and speed it is answered.
        seed: For sampling that can be repeated.
        logprobs: How many of the likeliest tokens are returned for each place, up to 20, with their probabilities; 0 returns only
            that of the chosen token. They are in ``ModelReply.provider_data``.
        store: Whether the provider keeps the reply.
        safety: From where on content is blocked, by category: ``"off"``, ``"none"``, ``"only_high"``,
            ``"medium_and_above"`` or ``"low_and_above"`` for ``"harassment"``, ``"hate_speech"`` and the like.
        cache: For how long at least the provider shall cache the prompt: ``"5m"``, which may be written ``True``, ``"1h"``, or
            ``"off"``, which may be written ``False``; ``None`` is the provider's default.
        cache_key: A name that requests with the same beginning share, so that they meet the same cache.
        server_tools: Tools that the provider runs by itself.
        fallbacks: Models of the same provider that answer in place of one that declines to, in their order, for providers that
            ask them in the same call; ``"default"`` leaves it to the provider which. ``stepengine.models.fallback`` names models
            for any other trouble, of any providers.
        unsupported: What happens to a setting that the provider has no word for: ``"warn"`` leaves it out, with a warning in the
            log and the result, and names it in ``ModelReply.provider_data["dropped"]``; ``"error"`` sends nothing.
        oversize: What happens to a request that is longer than its model's window, by estimate and where the window is known:
            ``"send"`` lets the provider judge; ``"refuse"`` is for servers that cut a prompt without a word, and sends nothing:
            a policy shortens it once, else it is a ``ContextOverflow``. Of a fallback each provider judges.
        extra: What only one provider knows, at the author's own risk: under ``"headers"`` HTTP headers, under ``"body"``
            or beside it further members of the wire body. Objects are merged into what is sent anyway. OpenRouter's own
            members (``provider``, ``route``, ``transforms``) are left out for other services.

    Raises:
        DefinitionError: for a value of another kind.
        DataError: for a *response_schema* or *extra* that is not a JSON object, or a *response_schema* with a reference
            without a target.
    """

    temperature: float | None = attrs.field(default=None, validator=make_validator(allow_none(NUMBER)))
    top_p: float | None = attrs.field(default=None, validator=make_validator(allow_none(NUMBER)))
    max_tokens: int | None = attrs.field(default=None, validator=make_validator(allow_none(COUNT)))
    stop_sequences: tuple[str, ...] = attrs.field(default=(), converter=to_texts, validator=make_validator(STOPS))
    tool_choice: ToolChoice | None = attrs.field(default=None, validator=make_validator(allow_none(CHOICE)))
    parallel_tool_calls: bool | None = attrs.field(default=None, validator=make_validator(allow_none(FLAG)))
    thinking: Thinking | None = attrs.field(default=None, validator=make_validator(allow_none(THINKING)))
    response_schema: JsonDict | None = attrs.field(default=None, converter=_check_and_freeze_response_schema)
    continue_cut: bool = attrs.field(default=True, validator=make_validator(FLAG))
    output: Literal["native", "tool"] | None = attrs.field(
        default=None, validator=make_validator(allow_none(make_choice_check("native", "tool")))
    )
    service_tier: ServiceTier | None = attrs.field(default=None, validator=make_validator(allow_none(TIER)))
    seed: int | None = attrs.field(default=None, validator=make_validator(allow_none(WHOLE)))
    logprobs: int | None = attrs.field(default=None, validator=make_validator(allow_none(LIKELY)))
    store: bool | None = attrs.field(default=None, validator=make_validator(allow_none(FLAG)))
    safety: JsonDict = attrs.field(factory=JsonDict, converter=_freeze_safety, validator=make_validator(SAFETY))
    cache: Literal["off", "5m", "1h"] | None = attrs.field(
        default=None, converter=_to_cache_lifetime, validator=make_validator(allow_none(CACHE))
    )
    cache_key: str | None = attrs.field(default=None, validator=make_validator(allow_none(TEXT)))
    server_tools: tuple[ServerTool, ...] = attrs.field(
        default=(), converter=_to_tool_tuple, validator=make_validator(SERVER_TOOLS)
    )
    fallbacks: tuple[str, ...] = attrs.field(default=(), converter=to_texts, validator=make_validator(STOPS))
    unsupported: Literal["warn", "error"] = attrs.field(
        default="warn", validator=make_validator(make_choice_check("warn", "error"))
    )
    oversize: Literal["send", "refuse"] = attrs.field(
        default="send", validator=make_validator(make_choice_check("send", "refuse"))
    )
    extra: JsonDict = attrs.field(factory=JsonDict, converter=_freeze_extra)

    def merge(self, over: ModelSettings | None) -> ModelSettings:
        """Return these settings overridden by the members of *over* that differ from the defaults."""
        if over is None:
            return self
        default = DEFAULT_SETTINGS
        values = {a.name: getattr(over, a.name) for a in attrs.fields(ModelSettings)}
        return attrs.evolve(self, **{k: v for k, v in values.items() if v != getattr(default, k)})


DEFAULT_SETTINGS = ModelSettings()
"""The settings without any choice: a single object, so that code can identify it."""


@frozen(weakref_slot=False)
class ModelRequest:
    """
    One request to a model.

    Attributes:
        model: Model string, ``provider/model``.
        system_prompt: The system prompt; ``""`` for none.
        messages: The history that the model is shown.
        tools: The tools it may call.
        tool_choice: As in ``ModelSettings``; ``None`` for the provider's default.
        settings: How it is asked.
        tail: Step-scoped messages after the history, in neither record nor view.
    """

    model: str
    system_prompt: str = ""
    messages: Transcript = attrs.field(factory=Transcript)
    tools: tuple[ToolSpec, ...] = attrs.field(default=(), converter=to_tuple)
    tool_choice: ToolChoice | None = None
    settings: ModelSettings = attrs.field(factory=ModelSettings)
    tail: tuple[Message, ...] = attrs.field(default=(), converter=to_tuple)

    @property
    def all_messages(self) -> tuple[Message, ...]:
        """History and tail together, as the model sees them."""
        return (*self.messages, *self.tail)


def _default_stop_reason(self: Any) -> StopReason:
    return StopReason.TOOL_USE if ToolCallPart in map(type, self.content) else StopReason.END_TURN


@frozen(weakref_slot=False)
class ModelReply:
    """
    One completed reply.

    Attributes:
        content: The parts in the order received; a string is one text part.
        usage: The tokens of the reply; ``None`` if the provider did not report them.
        stop_reason: Why it stopped; by default ``tool_use`` when there are calls, else ``end_turn``.
        cost: US dollars; ``None`` when unknown.
        raw_stop_reason: The provider's own word.
        model: The model string that answered, when it is not the one asked.
        request_id: The provider's id of the request.
        provider_data: Further data of the provider: service tier, refusal category, raw usage.
    """

    content: tuple[AssistantPart, ...] = attrs.field(converter=to_assistant_parts)
    usage: Usage | None = attrs.field(default=None, kw_only=True)
    stop_reason: StopReason = attrs.field(
        default=attrs.Factory(_default_stop_reason, takes_self=True), converter=StopReason, kw_only=True
    )
    cost: Decimal | None = attrs.field(default=None, converter=require_cost, kw_only=True)
    raw_stop_reason: str | None = attrs.field(default=None, kw_only=True)
    model: str | None = attrs.field(default=None, kw_only=True)
    request_id: str | None = attrs.field(default=None, kw_only=True)
    provider_data: JsonDict = attrs.field(default=JsonDict(), converter=freeze_object, kw_only=True)

    @property
    def text(self) -> str:
        """The text and refusal parts joined."""
        return join_text_parts(self.content)

    @property
    def text_without_thoughts(self) -> str:
        """The text without thoughts that some models write into it."""
        return split_thoughts(self.text).said

    @property
    def tool_calls(self) -> tuple[ToolCallPart, ...]:
        """The tool call parts in order."""
        return tuple([p for p in self.content if isinstance(p, ToolCallPart)])


@frozen
class TextChunk:
    """More visible text."""

    text: str


@frozen
class ThinkingChunk:
    """More thinking text."""

    text: str


@frozen
class ToolCallStarted:
    """A tool call starts; *index* distinguishes calls of one reply."""

    index: int
    tool_name: str


@frozen
class ToolCallChunk:
    """More of a tool call's arguments, as raw JSON text."""

    index: int
    text: str


@frozen
class ToolCallEnded:
    """A tool call's arguments are complete."""

    index: int


@frozen
class ReplyDone:
    """The protocol's terminal marker has arrived; *reply* is the completed reply."""

    reply: ModelReply


ModelDelta: TypeAlias = TextChunk | ThinkingChunk | ToolCallStarted | ToolCallChunk | ToolCallEnded | ReplyDone
"""The items of a provider's stream; exactly one ``ReplyDone``, last."""
