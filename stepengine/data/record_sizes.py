"""
Size limits for values, errors and texts that enter a run, by the capacity of a record, with and without a journal.

A value over the limit raises an error where it enters, for the caller to catch. Texts for people and models are cut instead: the
messages of errors, and texts in the results of tools. A run without a journal follows the same rules, so that it ends as one
with a journal does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from operator import attrgetter
from typing import Any, TypeVar

import attrs

from stepengine.data.effects import CallTool
from stepengine.data.json import JsonDict, compact
from stepengine.data.messages import JsonPart, ResultPart, TextPart, ToolCallPart, ToolResult, UserMessage
from stepengine.data.models import ModelReply
from stepengine.data.result_cuts import cut_result_text
from stepengine.data.state import ChildResult, RunInfo, RunStatus
from stepengine.data.visible import cut_end
from stepengine.errors import HandlerError, StepEngineError

E = TypeVar("E", bound=BaseException)

MAX_INLINE_CHARS = 32 * 1024
"""A longer text has a record of its own, which others name. Shorter ones stay readable in place and cost few copies."""
MAX_VALUE_BYTES = 16 * 1024 * 1024
"""A document of 10 MB fits as base64. A reader has a line, its text and its values in memory at once."""
MAX_LINE_BYTES = 20 * 1024 * 1024
"""Room for the largest value and the rest of its line: address, time, warnings, and messages that arrived meanwhile."""
MAX_ERROR_CHARS = 20_000
"""About 5,000 tokens: a long traceback fits, and people read no more of an error."""
MAX_ERROR_MEMBERS = 200
"""The most texts of an error's list that are recorded, such as its issues."""
ESCAPED_CHAR_BYTES = 6
"""The most bytes of a character in JSON: a control character becomes ``\\u001f``."""
MIN_VALUE_CHARS = 5
"""The least number of characters that a value counts, such as a number with its separators."""
MAX_MESSAGES_CHARS = 300_000
"""The size of messages in one record: half of its room apart from a value, if all were control characters."""
MESSAGE_CHARS = 100
"""The number of characters that a message counts in addition to its texts."""
LONG_INT_BITS = 64
"""A number with more bits is counted by its digits."""
BITS_PER_DIGIT = 3.3
"""A little below the logarithm of 10 to base 2, so that the estimate is never too low."""


# An estimate that is never too low, made without encoding: exact counting would encode every output twice, for the rare
# one that is too long.
def may_exceed_value_limit(value: Any) -> bool:
    """
    Return whether *value* may need more than ``MAX_VALUE_BYTES`` bytes as JSON; a cheap estimate, never too low.

    What is never stored counts for nothing.
    """
    left, values = MAX_VALUE_BYTES // ESCAPED_CHAR_BYTES, [value]
    for one in values:  # it grows meanwhile
        count = COUNTS.get(type(one))
        if count is not None:
            left -= count(one)
            continue
        members = LONG_MEMBERS.get(type(one), _list_members)(one)
        left -= MIN_VALUE_CHARS * (WIDEST_FIELDS + len(members))
        if left < 0:
            break
        values += filter(None, members)
    return left < 0


def _list_members(value: Any) -> Sequence[Any]:
    """Return the members of a container or stored object; keys of a dict included."""
    if isinstance(value, (*SEQUENCES, str, bytes)):  # of a subclass of a text each character counts
        return value
    if isinstance(value, int):
        return (int(value),)
    if isinstance(value, dict):
        return [*value, *value.values()]
    return _list_stored_values(value)


def find_length_problem(value: object) -> str:
    """
    Return the reason why *value* is too long for a record; ``""`` if it fits, or cannot be measured.

    A text over ``MAX_INLINE_CHARS`` characters has a record of its own, and counts by itself.
    """
    if not may_exceed_value_limit(value):
        return ""
    lengths: list[int] = []
    try:
        rest = _encode_without_long_texts(value, lengths)
        length = max([_count_json_bytes(rest), *lengths])
    except (RecursionError, ValueError):
        return ""  # not JSON, which is reported elsewhere
    return (
        f"its record would have {length:,} bytes, and one has at most {MAX_VALUE_BYTES:,}"
        if length > MAX_VALUE_BYTES
        else ""
    )


def _encode_without_long_texts(value: Any, lengths: list[int]) -> object:
    """Return the stored JSON of *value* with long texts replaced by empty ones; their lengths are added to *lengths*."""
    if isinstance(value, str):
        if len(value) <= MAX_INLINE_CHARS:
            return value
        lengths.append(_count_json_bytes(value))
        return ""
    if isinstance(value, int):
        return "0" * _estimate_digit_count(value) if value.bit_length() > LONG_INT_BITS else value
    if value is None or isinstance(value, float):
        return value if value is None or math.isfinite(value) else 0
    if isinstance(value, SEQUENCES):
        return [_encode_without_long_texts(one, lengths) for one in value]
    if isinstance(value, Mapping):
        return {str(name): _encode_without_long_texts(one, lengths) for name, one in value.items()}
    if isinstance(value, bytes):
        lengths.append(len(value))
        return ""
    return [_encode_without_long_texts(one, lengths) for one in _list_stored_values(value)]


def _count_json_bytes(value: object) -> int:
    return len(compact(value).encode(errors="surrogatepass"))


def _estimate_digit_count(number: int) -> int:
    return int(number.bit_length() / BITS_PER_DIGIT)


def _list_stored_values(value: Any) -> Sequence[Any]:
    kind: Any = type(value)
    names = ("message", *value.fields) if isinstance(value, StepEngineError) else _list_stored_fields(kind)
    return [getattr(value, name, None) for name in names]


@cache
def _list_stored_fields(kind: Any) -> Sequence[str]:
    if not attrs.has(kind):
        return ()
    return tuple([field.name for field in attrs.fields(kind) if field.metadata.get("stored", True)])


LONG_MEMBERS: Mapping[type, Callable[[Any], Sequence[Any]]] = {
    ModelReply: lambda reply: (*reply.content, reply.provider_data),
    TextPart: attrgetter("text", "provider_data"),
    ToolCallPart: lambda part: (*part.input, *part.input.values(), part.raw_input, part.provider_data),
    JsonPart: lambda part: (part.value,),
    JsonDict: lambda members: (*members, *members.values()),
    ToolResult: lambda result: (*result.content, result.structured, result.change, *result.side_effects),
    CallTool: attrgetter("tool_name", "input"),
    RunInfo: attrgetter("session_id", "user_id", "metadata"),
}
"""The members with possibly long values in frequent classes; their other members are a few words and numbers."""
COUNTS: Mapping[type, Callable[[Any], int]] = {
    str: len,
    bytes: len,
    int: int.bit_length,  # never fewer than its digits
    bool: int.bit_length,
    float: lambda _: 0,
}
"""The number of characters that a text or number counts in addition to ``MIN_VALUE_CHARS``."""
SEQUENCES = (tuple, list)
"""Types of ordered collections."""
WIDEST_FIELDS = 20
"""Above the number of fields of each of these classes, so that the estimate is never too low."""


# --- cutting ----------------------------------------------------------------------------------------------------------


# In place, so that the error keeps its identity, class, cause and traceback, and an author's class is not instantiated.
def cut_error_texts(error: E) -> E:
    """
    Cut the long texts of *error* in place, and return it: its notes, and the message and fields of a ``StepEngineError``.

    A text keeps ``MAX_ERROR_CHARS`` characters, and so do all texts of a tuple together.
    """
    notes = getattr(error, "__notes__", ())
    if any(len(note) > MAX_ERROR_CHARS for note in notes):
        error.__notes__ = [cut_end(note, MAX_ERROR_CHARS) for note in notes]
    if not isinstance(error, StepEngineError):
        return error
    # Read with a default and set where that is possible: a subclass of the author's may have made them in a way of its own.
    message = getattr(error, "message", "")
    if len(message) > MAX_ERROR_CHARS:
        error.message = cut_end(message, MAX_ERROR_CHARS)
        error.args = (error.message, *error.args[1:])
    for name in (*error.fields, "where"):
        value = getattr(error, name, None)
        short = _cut_error_field(value)
        if short is not value:
            with suppress(AttributeError):
                setattr(error, name, short)
    return error


def _cut_error_field(value: Any) -> Any:
    """Return a field of an error, a text or a tuple, with long texts cut and a tuple shortened; *value* itself if none is long."""
    if isinstance(value, str):
        return value if len(value) <= MAX_ERROR_CHARS else cut_end(value, MAX_ERROR_CHARS)
    if not isinstance(value, tuple):
        return value
    is_short = (
        len(value) <= MAX_ERROR_MEMBERS and sum([len(one) for one in value if isinstance(one, str)]) <= MAX_ERROR_CHARS
    )
    if is_short:
        return value
    kept, left = list[object](), MAX_ERROR_CHARS
    for one in value[:MAX_ERROR_MEMBERS]:
        if left <= 0:
            break
        kept.append(cut_end(one, left) if isinstance(one, str) and len(one) > left else one)
        left -= len(one) if isinstance(one, str) else 0
    more = len(value) - len(kept)
    return (*kept, f"{more:,} more are left out") if more else tuple(kept)


def select_fitting_messages(messages: tuple[UserMessage, ...]) -> tuple[UserMessage, ...]:
    """Return the first of *messages* that fit into one record together with a value; at least one."""
    left = MAX_MESSAGES_CHARS
    for count, message in enumerate(messages):
        texts = [part.text for part in message.content if isinstance(part, TextPart)]
        left -= sum([len(text) for text in texts if len(text) <= MAX_INLINE_CHARS]) + MESSAGE_CHARS
        if left < 0 and count:
            return messages[:count]
    return messages


def fit_tool_result(result: ToolResult, tool_name: str) -> ToolResult:
    """Return *result* within the size limit: with its texts cut, or as an error result if that is not enough."""
    why = find_length_problem(result)
    if not why:
        return result
    # Most texts have one byte for each character, and none has more than six.
    for limit in (MAX_VALUE_BYTES * 3 // 4, MAX_VALUE_BYTES // 4, MAX_VALUE_BYTES // ESCAPED_CHAR_BYTES // 2):
        short = attrs.evolve(result, content=_cut_parts(result.content, limit))
        if not find_length_problem(short):
            return short
    text = f"The result of {tool_name} is too long: {why}. Return less, or write it to a file and return its path."
    effects = () if find_length_problem(result.side_effects) else result.side_effects
    return attrs.evolve(
        ToolResult.error(text), side_effects=effects, usage=result.usage, cost=result.cost, trust=result.trust
    )


# Without the mark of ``shorten_parts``, since a model receives far less of it.
def _cut_parts(parts: Sequence[ResultPart], limit: int) -> tuple[ResultPart, ...]:
    """Return the parts of a result with at most *limit* characters of text in all; JSON that is longer becomes text."""
    made: list[ResultPart] = []
    left = limit
    for part in parts:
        text = part.text if isinstance(part, TextPart) else compact(part.value) if isinstance(part, JsonPart) else ""
        if len(text) <= left:
            made.append(part)
        elif isinstance(part, TextPart):
            made.append(attrs.evolve(part, text=cut_result_text(text, left)))
        else:
            made.append(TextPart(cut_result_text(text, left)))
        left -= min(left, len(text))
    return tuple(made)


def fit_child_result(child: ChildResult) -> ChildResult:
    """
    Cut long error texts of *child* in place; return it within the size limit, as the result of a failed child if it was over it.

    Long texts of its error are cut in place.
    """
    if child.error is not None:
        cut_error_texts(child.error)
    why = find_length_problem(child)
    if not why:
        return child
    error = HandlerError(f"the result of agent {child.agent_id!r} is too long: {why}", kind="too_long")
    return attrs.evolve(child, status=RunStatus.FAILED, output=None, text="", error=error, questions=(), warnings=())
