"""Turns what a body returned, or raised, into a ``ToolResult`` within the caps (requirements E11, E13, E14)."""

from __future__ import annotations

import re
from typing import Any

import attrs

from stepengine.data.json import compact, freeze
from stepengine.data.messages import (
    DocumentPart,
    ImagePart,
    JsonPart,
    ResultPart,
    TextPart,
    ToolResult,
    quick_json,
    quick_result,
    quick_text,
)
from stepengine.errors import DataError, ToolError
from stepengine.redaction import KNOWN
from stepengine.tools.encoding import encode

__all__ = ("as_result", "cut", "error_text")

MIB = 1024 * 1024
RESULT_CHARS = 100_000
ERROR_CHARS = 4_000
IMAGE_BYTES = 5 * MIB
DOCUMENT_BYTES = 32 * MIB

PARTS = (TextPart, JsonPart, ImagePart, DocumentPart)
SMALL = frozenset({int, bool, float, type(None)})
SURROGATE = re.compile("[\ud800-\udfff]")
IMAGES = (
    (re.compile(rb"\x89PNG\r\n\x1a\n"), "image/png"),
    (re.compile(rb"\xff\xd8\xff"), "image/jpeg"),
    (re.compile(rb"GIF8[79]a"), "image/gif"),
    (re.compile(rb"RIFF....WEBP", re.DOTALL), "image/webp"),
)
PDF = b"%PDF-"


def as_result(value: Any, max_chars: int | None = None) -> ToolResult:
    """
    Return what a body returned as a result.

    Args:
        value: Text, JSON, a part, a sequence of parts and strings, a ``ToolResult``, or a value that ``encode`` knows.
        max_chars: The body's own wish for a cap; 100,000 characters always hold.
    """
    limit = RESULT_CHARS if max_chars is None else min(max_chars, RESULT_CHARS)
    kind = type(value)
    if kind is str and len(value) <= limit:
        return quick_result((quick_text(value if value.isascii() else clean(value)),))
    try:
        if kind in SMALL and limit == RESULT_CHARS:
            return quick_result((quick_json(freeze(value)),))
        result = _result(value)
        useless = result.change.useless_at("tool") if result.change is not None else ""
        return ToolResult.error(f"the tool returned {useless}") if useless else _capped(result, limit)
    except DataError as error:
        return ToolResult.error(f"the tool's result is not serialisable: {error}")
    except Exception as error:  # noqa: BLE001  (a value may be hostile in any way)
        return ToolResult.error(f"the tool's result is not serialisable: a {kind.__name__} raised {error_text(error)}")


def _result(value: Any) -> ToolResult:
    if isinstance(value, ToolResult):
        return value
    if isinstance(value, str):
        return ToolResult((TextPart(str.__str__(value)),))
    if isinstance(value, PARTS):
        return ToolResult((value,))
    if isinstance(value, list | tuple) and any(isinstance(v, PARTS) for v in value):
        return ToolResult(value)
    return ToolResult((JsonPart(encode(value)),))


def _capped(result: ToolResult, limit: int) -> ToolResult:
    parts: list[ResultPart] = []
    left = limit
    for part in result.content:
        if isinstance(part, TextPart):
            text = cut(clean(part.text), left)
            left -= min(left, len(part.text))
            parts.append(part if text is part.text else attrs.evolve(part, text=text))
        elif isinstance(part, JsonPart):
            text = compact(part.value)
            parts.append(part if len(text) <= left else TextPart(cut(text, left)))
            left -= min(left, len(text))
        else:
            parts.append(_media(part))
    same = len(parts) == len(result.content) and all(a is b for a, b in zip(parts, result.content, strict=True))
    return result if same else attrs.evolve(result, content=tuple(parts))


def clean(text: str) -> str:
    """Return *text* with lone surrogates, which no encoding can store, as replacement characters."""
    return SURROGATE.sub("\ufffd", text) if SURROGATE.search(text) else text


def cut(text: str, limit: int) -> str:
    """Return *text* with its middle taken out when it is longer than *limit*; says how much is missing."""
    if len(text) <= limit:
        return text
    head = (limit + 1) // 2
    tail = limit - head
    missing = len(text) - limit
    note = f"[... {missing:,} characters were cut here; the result has {len(text):,} in all ...]"
    return f"{text[:head]}\n{note}\n{text[len(text) - tail :]}"


def _media(part: ImagePart | DocumentPart) -> ImagePart | DocumentPart:
    """Return a media part whose type is what its bytes say; raises ``DataError`` for one that no provider takes."""
    if part.data is None:
        return part
    is_image = isinstance(part, ImagePart)
    word, cap = ("image", IMAGE_BYTES) if is_image else ("document", DOCUMENT_BYTES)
    if len(part.data) > cap:
        msg = f"the {word} has {len(part.data):,} bytes; at most {cap:,} are allowed"
        raise DataError(msg)
    found = next((mime for magic, mime in IMAGES if magic.match(part.data)), None)
    if is_image and found is None:
        known = ", ".join(mime for _, mime in IMAGES)
        msg = f"the image is said to be {part.mime_type!r}, but its bytes are none of {known}"
        raise DataError(msg)
    if not is_image:
        found = "application/pdf" if part.data.startswith(PDF) else None
        if found is None and part.mime_type == "application/pdf":
            msg = "the document is said to be 'application/pdf', but its bytes are not"
            raise DataError(msg)
    return part if found in {None, part.mime_type} else attrs.evolve(part, mime_type=found)


def error_text(error: BaseException) -> str:
    """Return ``ClassName: message`` of an exception, at most 4,000 characters, whatever its ``__str__`` does."""
    if isinstance(error, ToolError):
        return told(error.message)
    name = type(error).__name__
    try:
        text = str(error)
    except Exception:  # noqa: BLE001  (its __str__ is the author's code too)
        text = "(its text could not be read)"
    if isinstance(error, BaseExceptionGroup):
        text = f"{text}: {'; '.join(error_text(e) for e in error.exceptions[:5])}"
    return told(f"{name}: {text}" if text else name)


def told(text: str) -> str:
    """Return the first 4,000 characters of what an error says, without secrets that the process knows (TL01, TL05)."""
    return cut_end(KNOWN.beginning(text, ERROR_CHARS), ERROR_CHARS)


def cut_end(text: str, limit: int) -> str:
    """Return the first *limit* characters of a text without lone surrogates."""
    return clean(text[: limit - 1] + "…" if len(text) > limit else text)
