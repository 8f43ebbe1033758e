"""
Shortens long tool results for a model.

The record, handlers and hooks have the whole result: only the model's view is cut, and the cut says what is missing.
"""

from __future__ import annotations

from collections.abc import Callable
from types import NoneType
from typing import TypeAlias

from stepengine.data.json import JsonDict, JsonValue, compact
from stepengine.data.messages import JsonPart, Message, ResultPart, TextPart, ToolMessage
from stepengine.data.visible import cut_middle

RESULT_CHARS = 100_000
"""About 25,000 tokens: several of them fit in a context window, and a longer text is rarely read by a model to its end."""
MARK = "shortened"
SMALL = (int, bool, float, NoneType)

ShortenJson: TypeAlias = Callable[[JsonValue, int, str], JsonValue]
"""Returns a JSON value with its long texts cut to a number of characters; the last argument is a hint at the rest."""


def cut_result_text(text: str, limit: int, rest: str = "") -> str:
    """Return *text*; if it is longer than *limit*, a note replaces its middle. *rest* is a hint for reading the missing part."""
    missing = len(text) - limit
    return cut_middle(
        text, limit, f"[... {missing:,} characters were cut here; the result has {len(text):,} in all{rest} ...]"
    )


def make_shortened_part(text: str, limit: int, rest: str) -> TextPart:
    """Return a text over *limit* with its middle cut, as a part with a mark, so that it is not cut again."""
    # Known by a mark and not by the note: a tool may print the same words.
    data = JsonDict({"provider": "stepengine", MARK: len(text)})
    return TextPart(cut_result_text(text, limit, rest), provider_data=data)


def is_shortened(part: ResultPart) -> bool:
    """Return whether a part is a text whose middle was cut."""
    return isinstance(part, TextPart) and part.provider_data is not None and MARK in part.provider_data


def shorten_parts(
    parts: tuple[ResultPart, ...], limit: int, rest: str = "", shorten_json: ShortenJson | None = None
) -> tuple[ResultPart, ...]:
    """
    Return the parts of a result with at most *limit* characters in all and notes, or *parts* itself if they have no more.

    A JSON value over the limit becomes text. *shorten_json* cuts its long texts to *limit* each instead, so its whole may be longer.
    """
    made: list[ResultPart] = []
    left = limit
    for part in parts:
        if isinstance(part, TextPart) and not is_shortened(part):
            made.append(part if len(part.text) <= left else make_shortened_part(part.text, left, rest))
            left -= min(left, len(part.text))
        elif isinstance(part, JsonPart) and not isinstance(part.value, SMALL):
            text = compact(part.value)
            if len(text) <= left:
                made.append(part)
            elif shorten_json is not None:
                made.append(JsonPart(shorten_json(part.value, limit, rest)))
            else:
                made.append(make_shortened_part(text, left, rest))
            left -= min(left, len(text))
        else:
            made.append(part)
    return parts if all(a is b for a, b in zip(made, parts, strict=True)) else tuple(made)


def count_shortenable_chars(message: Message) -> int:
    """Return the number of characters in a tool message that may still be shortened; 0 for other messages."""
    if not isinstance(message, ToolMessage):
        return 0
    chars = 0
    for part in message.content:
        if isinstance(part, JsonPart):
            chars += 0 if isinstance(part.value, SMALL) else len(compact(part.value))
        elif isinstance(part, TextPart) and not is_shortened(part):
            chars += len(part.text)
    return chars
