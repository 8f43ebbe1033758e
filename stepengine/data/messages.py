"""
The elements of a conversation: parts, tool results and messages, each a closed union.

There is no system message: the system prompt lives in the state. Every message has a private slot for derived values
that ``Transcript.memo`` fills, so that encoded blocks travel with the message that they belong to.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from decimal import Decimal
from typing import Any, ClassVar, Literal, TypeAlias, overload

import attrs
from attrs import frozen

from stepengine.data.checks import find_iteration_mistake
from stepengine.data.json import (
    JsonDict,
    JsonValue,
    compact,
    freeze,
    freeze_object,
    replace_lone_surrogates,
    require_storable_text,
)
from stepengine.data.media_types import is_data_url, parse_data_url, resolve_media_type
from stepengine.data.provenance import Trust
from stepengine.data.thoughts import split_thoughts
from stepengine.data.usage import Usage, require_cost
from stepengine.errors import DataError


@frozen(weakref_slot=False)
class TextPart:
    """Plain text; *provider_data* is returned unchanged to the provider that sent the text."""

    text: str = attrs.field(converter=require_storable_text)
    provider_data: JsonDict | None = attrs.field(
        default=None, converter=attrs.converters.optional(freeze_object), kw_only=True
    )


@frozen
class ThinkingPart:
    """
    A model's thoughts before its answer.

    Attributes:
        text: The thoughts; may be empty if the provider hides them.
        provider_data: Data that must be returned to its provider with the part, such as a signature.
    """

    text: str = attrs.field(converter=require_storable_text)
    provider_data: JsonDict | None = attrs.field(
        default=None, converter=attrs.converters.optional(freeze_object), kw_only=True
    )


@frozen
class RefusalPart:
    """The text with which a model refused."""

    text: str = attrs.field(converter=require_storable_text)
    provider_data: JsonDict | None = attrs.field(
        default=None, converter=attrs.converters.optional(freeze_object), kw_only=True
    )


@frozen(weakref_slot=False)
class ToolCallPart:
    """
    A tool call inside an assistant message.

    Attributes:
        tool_call_id: ``c<n>`` inside a run; empty in a reply that the machine has not numbered yet.
        tool_name: The tool's name as the model wrote it.
        input: The arguments, a JSON object; empty when they could not be read.
        raw_input: The arguments' text as received, kept only when it could not be read or was cut off.
        input_error: Why *raw_input* could not be read; ``None`` when *input* is good.
        provider_data: With ``"id"``, the provider's own id of the call. A part without data of the target provider is
            *foreign* there.
    """

    tool_call_id: str
    tool_name: str = attrs.field(converter=require_storable_text)
    input: JsonDict = attrs.field(default=JsonDict(), converter=freeze_object)
    raw_input: str | None = attrs.field(
        default=None, converter=attrs.converters.optional(require_storable_text), kw_only=True
    )
    input_error: str | None = attrs.field(
        default=None, converter=attrs.converters.optional(require_storable_text), kw_only=True
    )
    provider_data: JsonDict | None = attrs.field(
        default=None, converter=attrs.converters.optional(freeze_object), kw_only=True
    )

    def with_id(self, tool_call_id: str) -> ToolCallPart:
        """Return this call with another id."""
        # Every call of every step gets one, and `attrs.evolve` takes three times as long.
        return ToolCallPart(
            tool_call_id,
            self.tool_name,
            self.input,
            raw_input=self.raw_input,
            input_error=self.input_error,
            provider_data=self.provider_data,
        )


def _validate_and_normalize_media(part: ImagePart | DocumentPart) -> None:
    """Raise unless a part has one source; in place, decode a ``data:`` address and correct the type by the bytes."""
    name = type(part).__name__
    if sum(source is not None for source in (part.url, part.data, part.file_id)) != 1:
        msg = f"{name} needs exactly one of url=, data= and file_id="
        raise DataError(msg)
    if not isinstance(part.data, bytes | None):
        msg = f"the data of {name} must be bytes, not a {type(part.data).__name__}"
        raise DataError(msg)
    if part.file_id == "" or (part.file_id is None) != (part.provider == ""):
        msg = f"{name} needs file_id= together with provider=, the name of the provider that holds the file"
        raise DataError(msg)
    if is_data_url(part.url):
        stated, data = parse_data_url(part.url or "")
        _set_frozen_attributes(part, url=None, data=data, mime_type=stated or part.mime_type)
    kind = resolve_media_type(require_storable_text(part.mime_type), part.data)
    if kind != part.mime_type:
        _set_frozen_attributes(part, mime_type=kind)


def _set_frozen_attributes(part: ImagePart | DocumentPart, **values: object) -> None:
    """Set attributes of a part that is being made."""
    for name, value in values.items():
        object.__setattr__(part, name, value)


@frozen
class ImagePart:
    """
    An image, by *url*, as bytes in *data*, or by *file_id*.

    Attributes:
        url: Where the provider finds it; of a ``data:`` address the content becomes *data*.
        data: Its bytes.
        mime_type: Its type; that of the bytes where they tell it, whatever is stated.
        file_id: The id of an uploaded file; it means something to the *provider* that holds the file and to no other.
        provider: The name of that provider, such as ``"anthropic"``; ``""`` for what is not uploaded.
        provider_data: What goes back with it to the provider that it came from, unchanged.
    """

    url: str | None = attrs.field(default=None, converter=attrs.converters.optional(require_storable_text))
    data: bytes | None = None
    mime_type: str = "image/png"
    provider_data: JsonDict | None = attrs.field(
        default=None, converter=attrs.converters.optional(freeze_object), kw_only=True
    )
    file_id: str | None = attrs.field(
        default=None, converter=attrs.converters.optional(require_storable_text), kw_only=True
    )
    provider: str = attrs.field(default="", converter=require_storable_text, kw_only=True)

    def __attrs_post_init__(self) -> None:
        _validate_and_normalize_media(self)


@frozen
class DocumentPart:
    """
    Any file but an image: a document, sound or video, by *url*, as bytes in *data*, or by *file_id*.

    Attributes:
        url: Where the provider finds it; of a ``data:`` address the content becomes *data*.
        data: Its bytes.
        mime_type: Its type; that of the bytes where they tell it, whatever is stated. By it a wire knows sound (``"audio/wav"``) and video (``"video/mp4"``) from documents.
        name: A file name to show.
        file_id: As with ``ImagePart``.
        provider: As with ``ImagePart``.
        provider_data: As with ``ImagePart``.
    """

    url: str | None = attrs.field(default=None, converter=attrs.converters.optional(require_storable_text))
    data: bytes | None = None
    mime_type: str = "application/pdf"
    name: str = ""
    provider_data: JsonDict | None = attrs.field(
        default=None, converter=attrs.converters.optional(freeze_object), kw_only=True
    )
    file_id: str | None = attrs.field(
        default=None, converter=attrs.converters.optional(require_storable_text), kw_only=True
    )
    provider: str = attrs.field(default="", converter=require_storable_text, kw_only=True)

    def __attrs_post_init__(self) -> None:
        _validate_and_normalize_media(self)


@frozen(weakref_slot=False)
class JsonPart:
    """A JSON value inside a tool result."""

    value: JsonValue = attrs.field(converter=freeze)


@frozen
class ToolReferencePart:
    """
    A word in a tool result that the model may call a tool with ``defer_loading`` from now on, by its name.

    The definition is sent where the wire wants it: in place of this part, behind the result, or among the tools.
    """

    tool_name: str = attrs.field(converter=require_storable_text)

    @property
    def text(self) -> str:
        """The reference as text."""
        return f"The tool {self.tool_name} can be called from now on."


@frozen
class OpaquePart:
    """
    A reply part that only its provider understands; it is stored unchanged and sent to no other provider.

    Attributes:
        provider: The adapter that made it, such as ``"anthropic"``.
        data: The part as the provider sent it.
        tool: The provider's tool that it belongs to: ``"web_search"``, ``"url_context"``, ``"code_execution"``,
            ``"file_search"`` or the provider's own word; ``""`` for none.
        text: The input or the result of that tool, for people: a query, code, output, addresses. It is never sent.
    """

    provider: str
    data: JsonDict = attrs.field(converter=freeze_object)
    tool: str = attrs.field(default="", kw_only=True)
    text: str = attrs.field(default="", converter=require_storable_text, kw_only=True)


@frozen
class CitationPart:
    """
    The source of a statement in the preceding texts, for people; it is never sent.

    Attributes:
        url: The address of the source; ``""`` for a file.
        title: The title of the source.
        quote: The words of the source.
        said: The words of the reply that are based on it, if the provider reports them.
        source: The provider's id of a file; ``""`` for none.
    """

    url: str = attrs.field(default="", converter=require_storable_text)
    title: str = attrs.field(default="", converter=require_storable_text)
    quote: str = attrs.field(default="", converter=require_storable_text, kw_only=True)
    said: str = attrs.field(default="", converter=require_storable_text, kw_only=True)
    source: str = attrs.field(default="", converter=require_storable_text, kw_only=True)


UserPart: TypeAlias = TextPart | ImagePart | DocumentPart
AssistantPart: TypeAlias = (
    TextPart | ThinkingPart | ToolCallPart | RefusalPart | ImagePart | DocumentPart | OpaquePart | CitationPart
)
ResultPart: TypeAlias = TextPart | JsonPart | ImagePart | DocumentPart | ToolReferencePart
Part: TypeAlias = UserPart | AssistantPart | ResultPart


_MEDIA = frozenset((TextPart, ImagePart, DocumentPart))
_USER: frozenset[type] = _MEDIA
_ASSISTANT: frozenset[type] = _MEDIA | {ThinkingPart, ToolCallPart, RefusalPart, OpaquePart, CitationPart}
_RESULT: frozenset[type] = _MEDIA | {JsonPart, ToolReferencePart}


def to_user_parts(content: str | UserPart | Sequence[str | UserPart]) -> tuple[UserPart, ...]:
    """Return a string, a part or a sequence of both as the parts of a user message."""
    return to_parts(content, _USER, "a user message")


def to_assistant_parts(content: str | AssistantPart | Sequence[str | AssistantPart]) -> tuple[AssistantPart, ...]:
    """Return a string, a part or a sequence of both as the parts of an assistant message."""
    return to_parts(content, _ASSISTANT, "an assistant message")


def to_result_parts(content: str | ResultPart | Sequence[str | ResultPart]) -> tuple[ResultPart, ...]:
    """Return a string, a part or a sequence of both as the parts of a tool result; an empty string is a part, too."""
    return (TextPart(content),) if isinstance(content, str) else to_parts(content, _RESULT, "a tool result")


def to_parts(content: object, allowed: frozenset[type], where: str) -> tuple[Any, ...]:
    """
    Return *content* as parts of the *allowed* classes, without their subclasses, which could not be stored.

    Raises:
        DataError: for anything else; the message starts with *where*.
    """
    if isinstance(content, tuple) and allowed.issuperset(map(type, content)):
        return content
    if isinstance(content, str):
        return (TextPart(content),) if content else ()
    if type(content) in allowed:
        return (content,)
    if not isinstance(content, (list, tuple)):
        msg = f"{where} must contain a string or a sequence of parts, not a {type(content).__name__}"
        raise DataError(msg)
    parts = tuple([TextPart(p) if isinstance(p, str) else p for p in content])
    for part in parts:
        if type(part) not in allowed:
            msg = f"{where} cannot contain a {type(part).__name__}"
            raise DataError(msg)
    return parts


def to_string_tuple(value: str | Iterable[str]) -> tuple[str, ...]:
    """Return one string or several as a tuple."""
    if isinstance(value, tuple):
        return value
    return (value,) if isinstance(value, str) else to_tuple(value)


def to_tuple(value: Iterable[object]) -> tuple[Any, ...]:
    """
    Return an iterable as a tuple; raise ``DataError`` for a text, a mapping and whatever else is no list.

    Raises:
        DataError: for a text, bytes, a mapping or a yieldable, and for a value that is not iterable.
    """
    if isinstance(value, tuple):
        return value
    if problem := find_iteration_mistake(value):
        raise DataError(problem)
    return tuple(value)


def join_text_parts(parts: tuple[Any, ...]) -> str:
    """Return the text and refusal parts of *parts* joined, JSON parts as compact JSON, references to tools as lines."""
    if len(parts) == 1 and isinstance(parts[0], TextPart):
        return parts[0].text
    texts = []
    for part in parts:
        if isinstance(part, (TextPart, RefusalPart)):
            texts.append(part.text)
        elif isinstance(part, JsonPart):
            texts.append(compact(part.value))
        elif isinstance(part, ToolReferencePart):
            texts.append(f"{part.text}\n")
    return "".join(texts)


Source: TypeAlias = Literal["model", "handler", "hook", "tool"]
"""The origin of a tool call: a model, a handler, a hook, or the body of a tool that yields."""
ResultStatus: TypeAlias = Literal["ok", "error", "pending", "skipped", "denied", "cancelled"]


class _TextOfResult:
    """``result.text`` is the text of a result; ``ToolResult.text("...")`` makes one."""

    @overload
    def __get__(self, instance: None, owner: type[ToolResult]) -> Callable[..., ToolResult]: ...
    @overload
    def __get__(self, instance: ToolResult, owner: type[ToolResult]) -> str: ...
    def __get__(self, instance: ToolResult | None, owner: type[ToolResult]) -> object:
        if instance is not None:
            return join_text_parts(instance.content)
        return lambda text, **fields: owner(TextPart(text), **fields)


@frozen
class SideEffect:
    """
    Something a tool did to the world, for the log.

    Attributes:
        kind: A word such as ``"file_written"``.
        target: The affected object, such as a path.
        details: Free JSON.
    """

    kind: str
    target: str = ""
    details: JsonValue = attrs.field(default=None, converter=freeze)


CUT_OFF = "cut_off"
"""The kind of the side effect of a call that was cut off from outside: its server is gone, or its work was cancelled."""


class RequestedChange(ABC):
    """
    The changes that a tool requests from its run; ``stepengine.Change`` is the one implementation.

    Attributes:
        context: Members to set in ``AgentState.context``.
    """

    __slots__ = ()
    context: JsonDict | None

    @abstractmethod
    def find_misuse(self, point: str) -> str:
        """Return the reason why a field cannot be used at *point*; ``""`` if there is none."""


@frozen(weakref_slot=False)
class ToolResult:
    """
    The result of one tool call.

    Make one with ``ToolResult.text("...")``, ``.json(value)``, ``.error("...")`` or ``.parts([...])``.

    Attributes:
        content: The ordered parts.
        status: ``"ok"``, or why there is no ordinary result: ``"error"``, ``"pending"``, ``"skipped"``, ``"denied"``,
            ``"cancelled"``. Everything but ``"ok"`` and ``"pending"`` is an error.
        tool_name: The tool that was called; set by the machine.
        tool_call_id: The call that this answers; set by the machine.
        credits_used: Credits that the tool reports, never money.
        usage: Tokens of models that the tool called, as far as they are known; ``None`` for a tool that calls none.
        cost: US dollars that the call cost. With a *usage*, ``None`` means that the cost is unknown. Without one, the usage of the
            run becomes a lower bound.
        side_effects: The side effects of the call, for the log.
        change: What the tool wants changed in its run, such as ``Change(context={...})``; made once, when the call has
            run, so that the next call and every hook see it.
        structured: What ``data`` is where *content* says the same in words, as with control tools; no model reads it.
        trust: ``"untrusted"`` where it may hold text of third parties; set by the engine, from the tool's ``results``.
    """

    content: tuple[ResultPart, ...] = attrs.field(default=(), converter=to_result_parts)
    status: ResultStatus = attrs.field(default="ok", kw_only=True)
    tool_name: str = attrs.field(default="", kw_only=True)
    tool_call_id: str = attrs.field(default="", kw_only=True)
    credits_used: float = attrs.field(default=0, kw_only=True)
    side_effects: tuple[SideEffect, ...] = attrs.field(default=(), converter=to_tuple, kw_only=True)
    change: RequestedChange | None = attrs.field(default=None, kw_only=True)
    structured: JsonValue = attrs.field(default=None, converter=freeze, kw_only=True)
    usage: Usage | None = attrs.field(default=None, kw_only=True)
    cost: Decimal | None = attrs.field(default=None, converter=require_cost, kw_only=True)
    trust: Trust = attrs.field(default="untrusted", kw_only=True)

    text = _TextOfResult()

    @classmethod
    def json(cls, value: JsonValue, **fields: Any) -> ToolResult:
        """Return a result with one JSON value."""
        return cls((JsonPart(value),), **fields)

    @classmethod
    def parts(cls, parts: Sequence[ResultPart | str], **fields: Any) -> ToolResult:
        """Return a result with *parts* in order."""
        return cls(parts, **fields)

    @classmethod
    def error(cls, message: str, **fields: Any) -> ToolResult:
        """Return an error result with *message* as its text."""
        return cls((TextPart(replace_lone_surrogates(message)),), **{"status": "error", **fields})

    @classmethod
    def make_pending(cls, question_id: str, **fields: Any) -> ToolResult:
        """Return the placeholder result for an answer that has not arrived yet."""
        text = f"Pending: waiting for the answer to question {question_id}."
        return cls((TextPart(text),), **{"status": "pending", **fields})

    def with_call(self, call: ToolCallPart) -> ToolResult:
        """Return this result with the tool name and the id of *call*."""
        if self.tool_name == call.tool_name and self.tool_call_id == call.tool_call_id:
            return self
        # Every result of every step gets them, and `attrs.evolve` is twice as slow.
        return ToolResult(
            self.content,
            status=self.status,
            tool_name=call.tool_name,
            tool_call_id=call.tool_call_id,
            credits_used=self.credits_used,
            side_effects=self.side_effects,
            change=self.change,
            structured=self.structured,
            usage=self.usage,
            cost=self.cost,
            trust=self.trust,
        )

    @property
    def is_error(self) -> bool:
        """Whether the call did not succeed: it failed, was denied, skipped or cancelled."""
        return self.status not in ("ok", "pending")

    @property
    def data(self) -> JsonValue:
        """The value of *structured*, else of the first JSON part; ``None`` without either."""
        if self.structured is not None:
            return self.structured
        for part in self.content:
            if isinstance(part, JsonPart):
                return part.value
        return None

    @property
    def media(self) -> tuple[ImagePart | DocumentPart, ...]:
        """The image and document parts."""
        return tuple([p for p in self.content if isinstance(p, ImagePart | DocumentPart)])


@frozen(weakref_slot=False)
class ToolCallLog:
    """
    One tool call of a run as the result lists it.

    Attributes:
        tool_name: The tool.
        input: Its input as executed, after hooks changed it.
        result: The result of the call.
        step: The step index in which it ran.
        duration_ms: Milliseconds by the run's clock, 0 for control tools.
        tool_call_id: The call's id, also when it is not in the history.
        source: Who asked for it.
        path: The path of the run that made it; ``""`` for the run itself, another one after a hand-off.
    """

    tool_name: str
    input: JsonValue = attrs.field(converter=freeze)
    result: ToolResult
    step: int
    duration_ms: int
    tool_call_id: str
    source: Source = "model"
    path: str = ""

    @property
    def is_error(self) -> bool:
        """Whether the call did not succeed: it failed, was denied, skipped or cancelled."""
        return self.result.is_error


TimeToLive: TypeAlias = Literal["agent_step", "user_prompt"]
"""When a message leaves the history: at the end of the step that it is there for, or of the run."""


def _validate_lifetime(value: TimeToLive) -> TimeToLive:
    """Return a valid time-to-live unchanged; raise ``DataError`` for anything else."""
    if value in ("agent_step", "user_prompt"):
        return value
    msg = f"the time-to-live of a message must be 'agent_step', 'user_prompt' or None, not {value!r}"
    raise DataError(msg)


def _make_memo_field() -> Any:
    return attrs.field(init=False, default=None, eq=False, repr=False)


@frozen(weakref_slot=False)
class UserMessage:
    """
    A message to the model from a person, or from the engine on a person's behalf.

    Attributes:
        content: The parts; a string is one text part.
        tags: The kinds of the message, for hooks and pruning: ``USER_PROMPT``, ``INSTRUCTIONS_PROMPT``, ``STEP_PROMPT`` ...
        ttl: When it is removed from the history; ``None`` for never.
    """

    role: ClassVar[Literal["user"]] = "user"
    content: tuple[UserPart, ...] = attrs.field(converter=to_user_parts)
    tags: tuple[str, ...] = attrs.field(default=(), converter=to_string_tuple)
    ttl: TimeToLive | None = attrs.field(
        default=None, converter=attrs.converters.optional(_validate_lifetime), kw_only=True
    )
    _memo: dict[Any, Any] | None = _make_memo_field()

    @property
    def text(self) -> str:
        """The text parts joined."""
        return join_text_parts(self.content)


@frozen(weakref_slot=False)
class AssistantMessage:
    """
    One reply of a model, its parts in the order received.

    Attributes:
        content: The parts; a string is one text part.
        tags: What the message is, for hooks and pruning.
        ttl: When it leaves the history; ``None`` keeps it, and so do tool calls in it.
    """

    role: ClassVar[Literal["assistant"]] = "assistant"
    content: tuple[AssistantPart, ...] = attrs.field(converter=to_assistant_parts)
    tags: tuple[str, ...] = attrs.field(default=(), converter=to_string_tuple)
    ttl: TimeToLive | None = attrs.field(
        default=None, converter=attrs.converters.optional(_validate_lifetime), kw_only=True
    )
    _memo: dict[Any, Any] | None = _make_memo_field()

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

    @property
    def thinking(self) -> tuple[str, ...]:
        """The non-empty thinking texts in order."""
        return tuple([p.text for p in self.content if isinstance(p, ThinkingPart) and p.text])


@frozen(weakref_slot=False)
class ToolMessage:
    """
    The result of one tool call in the history.

    Attributes:
        tool_call_id: The call that this answers.
        tool_name: The tool that was called.
        content: The ordered parts of the result.
        status: As in ``ToolResult``.
        trust: As in ``ToolResult``.
    """

    role: ClassVar[Literal["tool"]] = "tool"
    ttl: ClassVar[None] = None
    tool_call_id: str
    tool_name: str
    content: tuple[ResultPart, ...] = attrs.field(converter=to_result_parts)
    status: ResultStatus = "ok"
    trust: Trust = attrs.field(default="untrusted", kw_only=True)
    _memo: dict[Any, Any] | None = _make_memo_field()

    @classmethod
    def from_result(cls, result: ToolResult) -> ToolMessage:
        """Return the message for *result*."""
        return cls(result.tool_call_id, result.tool_name, result.content, result.status, trust=result.trust)

    @property
    def is_error(self) -> bool:
        """Whether the call did not succeed: it failed, was denied, skipped or cancelled."""
        return self.status not in ("ok", "pending")

    @property
    def text(self) -> str:
        """The text parts joined, JSON parts as compact JSON."""
        return join_text_parts(self.content)

    @property
    def result(self) -> ToolResult:
        """The stored result."""
        return ToolResult(
            self.content,
            status=self.status,
            tool_name=self.tool_name,
            tool_call_id=self.tool_call_id,
            trust=self.trust,
        )


Message: TypeAlias = UserMessage | AssistantMessage | ToolMessage
"""A message of a conversation."""


SUMMARY_REQUEST = "SUMMARY_REQUEST"
"""The tag of a request for a summary of a conversation. Its answer is plain text, whatever the agent's settings are."""


def system_reminder(text: str) -> str:
    """Return *text* in the tags of a system reminder, for a user message."""
    return f"<system-reminder>\n{text}\n</system-reminder>"
