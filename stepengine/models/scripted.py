"""
``ScriptedModel``, a provider that returns scripted replies, and helpers that create its script.

This module uses no wire format.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import aclosing
from decimal import Decimal, InvalidOperation
from inspect import iscoroutine, iscoroutinefunction, isgenerator, isgeneratorfunction
from typing import Any, TypeAlias

import attrs
from attrs import frozen

from stepengine.data.json import compact, freeze_object
from stepengine.data.messages import (
    AssistantPart,
    CitationPart,
    DocumentPart,
    ImagePart,
    OpaquePart,
    RefusalPart,
    TextPart,
    ThinkingPart,
    ToolCallPart,
)
from stepengine.data.models import (
    ModelDelta,
    ModelReply,
    ModelRequest,
    ReplyDone,
    StopReason,
    TextChunk,
    ThinkingChunk,
    ToolCallChunk,
)
from stepengine.data.tools import ToolLike
from stepengine.data.usage import Usage
from stepengine.data.visible import cut_after
from stepengine.errors import DataError, ModelError
from stepengine.models._json import make_call_part
from stepengine.models.base import Provider, split_reply_into_deltas
from stepengine.workspace.after_fork import Lock

__tracebackhide__ = True  # a failed test ends at its author's line

ASSISTANT_PARTS = (TextPart, ThinkingPart, RefusalPart, ToolCallPart, ImagePart, DocumentPart, OpaquePart, CitationPart)
SHOWN_MESSAGES = 3
"""The number of last messages in an error, which identify an unexpected request."""
SHOWN_CHARS = 200
"""About two lines for each message of an error in a test."""


@frozen
class Failing:
    """
    A scripted failure; make one with ``failure(exc)``.

    Attributes:
        error: The exception to raise.
        after: The text that a stream yields before it fails.
    """

    error: BaseException
    after: str = ""


Play: TypeAlias = "ModelReply | str | Failing"
Script: TypeAlias = "Play | Callable[[ModelRequest], Play]"
"""One item of a script: a reply, the text of one, a failure, or a function from the request to one of these."""


Cost: TypeAlias = "Decimal | float | str | None"
"""US dollars, such as ``"0.0125"``; ``None`` when unknown."""


def text(
    content: str, *, usage: Usage | None = None, cost: Cost = None, stop_reason: StopReason | str | None = None
) -> ModelReply:
    """Return a reply with the text *content*, *usage* and *cost*; its *stop_reason* is ``end_turn`` by default."""
    return _make_reply((TextPart(content),), usage, cost, stop_reason)


def tool_call(
    tool: str | ToolLike,
    input: Mapping[str, object] | str | None = None,
    *,
    text: str = "",
    usage: Usage | None = None,
    cost: Cost = None,
    stop_reason: StopReason | str | None = None,
) -> ModelReply:
    """
    Return a reply with one call of *tool*, after *text* if that is set; join several with ``tool_calls``.

    Args:
        tool: The tool, or its name.
        input: The arguments, or their text as a model would write it. Such a text is parsed like that of a real model, so
            ``'{"path": "a'`` is a call with unreadable arguments.
        text: Text before the call.
        usage: The usage of the reply.
        cost: Its cost in US dollars, in place of the price list's.
        stop_reason: Its stop reason; by default ``tool_use``.
    """
    name = tool if isinstance(tool, str) else tool.spec.name
    if isinstance(input, str):
        call = attrs.evolve(make_call_part(name, input, {}), provider_data=None)
    else:
        call = ToolCallPart("", name, freeze_object(input or {}))
    return _make_reply((TextPart(text), call) if text else (call,), usage, cost, stop_reason)


def tool_calls(
    *parts: ModelReply | str,
    text: str = "",
    usage: Usage | None = None,
    cost: Cost = None,
    stop_reason: StopReason | str | None = None,
) -> ModelReply:
    """
    Return one reply with the contents of several ``tool_call(...)`` and texts in order.

    ``tool_calls("First I look.", tool_call("look"), "Then I write.", tool_call("write"), "Done.")`` is one reply of five
    parts. Usage and cost of the parts are ignored.

    Args:
        parts: Replies and texts to join.
        text: A text before all others.
        usage: The usage of the reply.
        cost: Its cost in US dollars.
        stop_reason: Its stop reason; by default ``tool_use`` if it has a call, else ``end_turn``.

    Raises:
        DataError: when a part is neither a reply nor a text.
    """
    content: list[AssistantPart] = [TextPart(text)] if text else []
    for part in parts:
        if isinstance(part, str):
            content.append(TextPart(part))
        elif isinstance(part, ModelReply):
            content.extend(part.content)
        else:
            msg = f"tool_calls accepts tool_call(...), other replies and texts, not {part!r}"
            raise DataError(msg)
    return _make_reply(tuple(content), usage, cost, stop_reason)


def with_thinking(thought: str, reply: ModelReply | str = "") -> ModelReply:
    """Return *reply* with a thinking part before its content."""
    said = reply if isinstance(reply, ModelReply) else ModelReply(reply)
    return attrs.evolve(said, content=(ThinkingPart(thought), *said.content))


def failure(error: BaseException, *, after: str = "") -> Failing:
    """Return an item of a script that raises *error*; a stream yields the text *after* first."""
    return Failing(error, after)


def _make_reply(
    content: tuple[AssistantPart, ...], usage: Usage | None, cost: Cost, stop_reason: StopReason | str | None
) -> ModelReply:
    """Return a reply; its stop reason is by default ``tool_use`` with a call, else ``end_turn``."""
    dollars = None if cost is None else _parse_cost(cost)
    if stop_reason is None:
        reason = StopReason.TOOL_USE if ToolCallPart in map(type, content) else StopReason.END_TURN
        return ModelReply(content, usage=usage, cost=dollars, stop_reason=reason)
    return ModelReply(content, usage=usage, cost=dollars, stop_reason=StopReason(stop_reason))


def _parse_cost(cost: Decimal | float | str) -> Decimal:
    """Return *cost* as a number of US dollars; raise ``DataError`` if it is not a finite number of at least 0."""
    try:
        dollars = Decimal(str(cost))
    except InvalidOperation:
        dollars = Decimal("NaN")
    if dollars.is_finite() and dollars >= 0:
        return dollars
    msg = f"cost={cost!r} is not an amount of US dollars; give a number or a text such as '0.0125', or None when it is unknown"
    raise DataError(msg)


class ScriptedModel(Provider):
    """
    A provider that returns *replies* in order and records its requests.

    It answers every model string; agents without a model use ``"scripted/default"``. Tasks and threads can share one, and
    each request receives the next item. A request after the last item raises a ``ModelError`` of kind ``"script"``, which is
    not retried and shows the request.

    Args:
        replies: A list of ``ModelReply``, str, ``failure(exc)``, and functions from the request to one of these, each used
            once; or one such function, which answers every request.
        chunk: The number of characters in one delta of a stream.

    Attributes:
        calls: All requests in order, including those after the end of the script. In a test with
            ``--stepengine-record=extend`` or ``new`` also those that the record answered.

    Raises:
        DataError: when an item has another type; or at the request, when a function returns another type.
    """

    name = "scripted"
    default_model = "scripted/default"
    source = ""

    def __init__(self, replies: Iterable[Script] | Callable[[ModelRequest], Play] = (), *, chunk: int = 4) -> None:
        self._always = replies if callable(replies) else None
        if self._always is not None:
            _validate_script_item(self._always, 0)
            self._script: tuple[Any, ...] = ()
        elif isinstance(replies, str | Mapping) or not isinstance(replies, Iterable):
            msg = f"a script must be a list of replies, or one function that answers every request, not {replies!r}"
            raise DataError(msg)
        else:
            self._script = tuple([_validate_script_item(item, index) for index, item in enumerate(replies)])
        self._chunk = max(1, chunk)
        self._lock = Lock()
        self.calls: list[ModelRequest] = []

    def __repr__(self) -> str:
        script = f"{len(self._script)} replies" if self._always is None else _get_function_name(self._always)
        return f"ScriptedModel({script}, {len(self.calls)} calls)"

    @property
    def unused(self) -> tuple[Script, ...]:
        """The items that were not used yet."""
        return self._script[len(self.calls) :]

    def supports_model(self, model: str) -> bool:
        """Return True, because a script answers requests for every model."""
        return True

    def check(self, model: str) -> None:
        """Do nothing, because a script answers every model and needs no key."""

    async def complete(self, request: ModelRequest) -> ModelReply:
        """Return the next reply, or raise the scripted error."""
        item = self._record_request_and_get_item(request)
        return item if isinstance(item, ModelReply) else _get_reply_or_raise(item, request)

    def skip_reply(self, request: ModelRequest) -> None:
        """Skip the next reply of the script, because the record of a test has already answered the request."""
        with self._lock:
            if self._always is not None or len(self.calls) < len(self._script):
                self.calls.append(request)

    async def stream(self, request: ModelRequest) -> AsyncIterator[ModelDelta]:
        """Yield the next reply in small deltas, then the reply itself; for a scripted failure yield its text and raise its error."""
        item = self._record_request_and_get_item(request)
        if callable(item):
            item = _validate_script_item(item(request), function=item)
        if isinstance(item, Failing):
            for piece in _split_text(item.after, self._chunk):
                yield TextChunk(piece)
            raise item.error
        for delta in _split_into_small_deltas(item, self._chunk):
            yield delta
        yield ReplyDone(item)

    def assert_complete(self) -> None:
        """
        Raise ``AssertionError`` if replies were not used, or if there were requests after the last reply.

        For a function that answers every request, nothing is checked.

        Raises:
            AssertionError: with a list of the unused replies, or of the further requests.
        """
        if self._always is not None:
            return
        asked, written = len(self.calls), len(self._script)
        if asked < written:
            rest = "".join(f"\n  {index}: {_describe_item(item)}" for index, item in enumerate(self.unused, asked))
            msg = f"{written - asked} of {written} scripted replies were not used:{rest}"
            raise AssertionError(msg)
        if asked > written:
            rest = "".join(
                f"\n  request {i}: {_format_last_message_excerpt(r)}"
                for i, r in enumerate(self.calls[written:], written)
            )
            msg = f"{asked - written} requests came after the last of {written} scripted replies:{rest}"
            raise AssertionError(msg)

    def _record_request_and_get_item(self, request: ModelRequest) -> Any:
        """Record *request*, and return the next item of the script or the function that answers all requests; raise after the last item."""
        with self._lock:
            index = len(self.calls)
            self.calls.append(request)
        if self._always is not None:
            return self._always
        if index < len(self._script):
            return self._script[index]
        raise _make_exhausted_error(request, len(self._script), index, self.source)


class RunScript(ScriptedModel):
    """
    A script for an engine's ``models``: each run starts with the first of *replies* and shares them with its children.

    Parallel children receive the replies in the order of their requests, which may vary. A function of the request can answer
    each child reliably. A ``DurableEngine`` does not accept a ``RunScript``.

    A resumed or forked run continues after the recorded replies. A reply without usage and cost is free. A reply without a model
    names this script as its model, so that a record shows its origin.

    Args:
        replies: As for ``ScriptedModel``.
        source: The name of the script, such as that of its file.
        chunk: As for ``ScriptedModel``.

    Raises:
        DataError: when an item has another type; or at the request, when a function returns another type.
    """

    def __init__(
        self, replies: Iterable[Script] | Callable[[ModelRequest], Play], *, source: str = "script", chunk: int = 4
    ) -> None:
        super().__init__(replies, chunk=chunk)
        self.source = source

    def for_run(self) -> RunScript:
        """Return a new copy of the script for one run."""
        return RunScript(self._script if self._always is None else self._always, source=self.source, chunk=self._chunk)

    async def complete(self, request: ModelRequest) -> ModelReply:
        """Return the next reply, or raise the scripted error."""
        return self._add_script_model_and_cost(await super().complete(request))

    async def stream(self, request: ModelRequest) -> AsyncIterator[ModelDelta]:
        """Yield the next reply in deltas of a few characters, then the reply itself."""
        inner: Any = super().stream(request)
        async with aclosing(inner) as deltas:
            async for delta in deltas:
                yield ReplyDone(self._add_script_model_and_cost(delta.reply)) if isinstance(delta, ReplyDone) else delta

    def _add_script_model_and_cost(self, reply: ModelReply) -> ModelReply:
        """Return *reply* with this script as its model if the reply names no model, and a cost of 0 without usage and cost."""
        if reply.cost is None and reply.usage is None:
            reply = attrs.evolve(reply, cost=Decimal(0))
        return reply if reply.model is not None else attrs.evolve(reply, model=f"{self.name}/{self.source}")


def _get_reply_or_raise(item: Any, request: ModelRequest) -> ModelReply:
    """Return the reply of a script item, calling a function with *request*; raise the error of a scripted failure."""
    if callable(item):
        item = _validate_script_item(item(request), function=item)
    if isinstance(item, Failing):
        raise item.error
    reply: ModelReply = item
    return reply


def _validate_script_item(item: object, index: int | None = None, *, function: object = None) -> Any:
    """Return an item of a script, or the result of *function*; a str becomes a ``ModelReply``. Raise ``DataError`` if it is invalid."""
    if isinstance(item, str):
        return ModelReply(item)
    if isinstance(item, ModelReply | Failing):
        return item
    is_function = callable(item) and not isinstance(item, type)
    if index is not None and is_function and not (iscoroutinefunction(item) or isgeneratorfunction(item)):
        return item
    if iscoroutine(item):
        item.close()
    where = (
        f"item {index} of the script is"
        if function is None
        else f"a function of the script, {_get_function_name(function)}, returned"
    )
    msg = (
        f"{where} {item!r}; valid items are replies, strings, failure(exc) and functions from a request to one of these"
        f"{_make_invalid_item_hint(item)}"
    )
    raise DataError(msg)


def _make_invalid_item_hint(item: object) -> str:
    """Return a hint for a likely mistake in an invalid item; ``""`` without one."""
    if isinstance(item, BaseException) or (isinstance(item, type) and issubclass(item, BaseException)):
        return "; wrap an exception in failure(...)"
    if iscoroutinefunction(item) or isgeneratorfunction(item) or iscoroutine(item) or isgenerator(item):
        return "; such a function is a plain def that returns one reply"
    if isinstance(item, list | tuple):
        return "; several calls and texts become one reply with tool_calls(...)"
    if isinstance(item, ASSISTANT_PARTS):
        return "; parts become a reply with ModelReply([...])"
    return "; calls of tools are written tool_call(name, input)" if isinstance(item, Mapping) else ""


def _get_function_name(function: object) -> str:
    return getattr(function, "__qualname__", repr(function))


def _make_exhausted_error(request: ModelRequest, reply_count: int, index: int, source: str) -> ModelError:
    """Return the error for a request after the end of the script; it shows the last messages."""
    messages = request.all_messages
    first = max(0, len(messages) - SHOWN_MESSAGES)
    shown = "".join(
        f"\n  message {i}, {m.role}: {_format_message_excerpt(m)}" for i, m in enumerate(messages[first:], first)
    )
    replies = "1 reply" if reply_count == 1 else f"{reply_count} replies"
    msg = (
        f"the script{source and f' {source}'} has {replies}, and this is request {index + 1} (model {request.model!r}, "
        f"{len(messages)} messages); add a reply, or send fewer requests. The request ends with:{shown or ' no message'}"
    )
    return ModelError(msg, kind="script")


def _format_last_message_excerpt(request: ModelRequest) -> str:
    """Return role and excerpt of the last message of a request; ``"no messages"`` without one."""
    messages = request.all_messages
    return f"{messages[-1].role}: {_format_message_excerpt(messages[-1])}" if messages else "no messages"


def _format_message_excerpt(message: Any) -> str:
    """Return the text and the calls of a message on one line, cut if long."""
    calls = "".join(f" <calls {c.tool_name} {compact(c.input)}>" for c in getattr(message, "tool_calls", ()))
    return _shorten_to_one_line(message.text + calls)


def _describe_item(item: object) -> str:
    """Return a script item for messages: the text and calls of a reply, or the error of a failure."""
    if isinstance(item, Failing):
        return f"failure({item.error!r})"
    return _format_message_excerpt(item) if isinstance(item, ModelReply) else repr(item)


def _shorten_to_one_line(text: str) -> str:
    """Return *text* with escaped line breaks, cut to 200 characters with a note on its length."""
    text = text.replace("\n", "\\n")
    return cut_after(text, SHOWN_CHARS, f"... ({len(text)} characters)")


def _split_into_small_deltas(reply: ModelReply, size: int) -> Iterator[ModelDelta]:
    """Yield the deltas of *reply*, with texts and arguments in pieces of at most *size* characters."""
    for delta in split_reply_into_deltas(reply):
        if isinstance(delta, TextChunk | ThinkingChunk | ToolCallChunk):
            yield from (attrs.evolve(delta, text=piece) for piece in _split_text(delta.text, size))
        else:
            yield delta


def _split_text(text: str, size: int) -> Iterator[str]:
    """Return an iterator over the pieces of a text, each of at most *size* characters."""
    return (text[start : start + size] for start in range(0, len(text), size))
