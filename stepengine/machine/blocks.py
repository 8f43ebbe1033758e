"""
Tool-call blocks in text.

A block is ``<tool_call>{"name": ..., "input": {...}}</tool_call>``, or codebuff's ``<codebuff_tool_call>`` with the name
under ``cb_tool_name`` and the input beside it. Only blocks at the top level count: what stands in a code fence, in
another block, or is never closed, is text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from stepengine.data.json import JsonDict, freeze
from stepengine.errors import DataError

FENCE = "```"
OPEN = re.compile(r"```|<(tool_call|codebuff_tool_call)>")
MARKS = ("<tool_call>", "<codebuff_tool_call>", "[TOOL_CALLS]", "<function=", "<|tool_call")
"""Words with which models begin a call that they write into their text."""
BLANK = re.compile(r"\s*")
DECODER = json.JSONDecoder()
MAX_BROKEN_BLOCKS = 100
"""How many blocks that cannot be read are told of: to say where each one is wrong, the whole text is gone over."""


class TextPiece(NamedTuple):
    """Text between blocks, trimmed and never empty."""

    text: str


class CallBlock(NamedTuple):
    """A well-formed block."""

    name: str
    input: JsonDict


class BrokenBlock(NamedTuple):
    """A closed block that cannot be read, and why."""

    name: str
    problem: str


def find_call_mark(text: str) -> str:
    """Return the marker with which a call in *text* begins, or ``""``."""
    return next((mark for mark in MARKS if mark in text), "")


def split_blocks(text: str) -> list[TextPiece | CallBlock | BrokenBlock]:
    """Split *text* into texts, tool-call blocks and broken blocks, in order."""
    pieces: list[TextPiece | CallBlock | BrokenBlock] = []
    unclosed: set[str] = set()
    shown = position = broken = 0
    while broken < MAX_BROKEN_BLOCKS and (match := OPEN.search(text, position)) is not None:
        tag = match[1]
        if tag is None:
            closing = text.find(FENCE, match.end())
            position = len(text) if closing < 0 else closing + len(FENCE)
            continue
        closing = -1 if tag in unclosed else text.find(f"</{tag}>", match.end())
        if closing < 0:
            unclosed.add(tag)
            position = match.end()
            continue
        piece, position = _parse_block(tag, text, match.end(), closing)
        broken += isinstance(piece, BrokenBlock)
        _append_text(pieces, text[shown : match.start()])
        pieces.append(piece)
        shown = position
    _append_text(pieces, text[shown:])
    return pieces


def _append_text(pieces: list[Any], text: str) -> None:
    if text.strip():
        pieces.append(TextPiece(text.strip()))


def _parse_block(tag: str, text: str, start: int, closing: int) -> tuple[CallBlock | BrokenBlock, int]:
    """Return the block whose body begins at *start*, and the position after it."""
    end = f"</{tag}>"
    try:
        value, stopped = DECODER.raw_decode(text, _skip_blank(text, start))
    except (ValueError, RecursionError) as error:
        return BrokenBlock("", f"the block is not JSON: {error}"), closing + len(end)
    stopped = _skip_blank(text, stopped)
    if text.startswith(end, stopped):
        return _parse_call_value(tag, value), stopped + len(end)
    return BrokenBlock("", "the block holds more than one JSON object"), closing + len(end)


def _skip_blank(text: str, position: int) -> int:
    match = BLANK.match(text, position)
    return match.end() if match else position


def parse_codebuff_call(value: Mapping[str, object]) -> tuple[object, dict[str, Any]]:
    """Return the tool name and the input from codebuff's form of a call."""
    return value.get("cb_tool_name"), {k: v for k, v in value.items() if k not in ("cb_tool_name", "cb_easp")}


def _parse_call_value(tag: str, value: object) -> CallBlock | BrokenBlock:
    if not isinstance(value, dict):
        return BrokenBlock("", f"the block holds a {type(value).__name__}, not an object")
    name, given = (value.get("name"), value.get("input", {})) if tag == "tool_call" else parse_codebuff_call(value)
    if not isinstance(name, str) or not name:
        return BrokenBlock("", "the block names no tool")
    if not isinstance(given, dict):
        return BrokenBlock(name, f"the input of {name!r} is a {type(given).__name__}, not an object")
    try:
        return CallBlock(name, freeze(given))
    except DataError as error:
        return BrokenBlock(name, error.message)
