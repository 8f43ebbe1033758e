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

__all__ = ("Block", "Broken", "Text", "mark_in", "of_codebuff", "split_blocks")

FENCE = "```"
OPEN = re.compile(r"```|<(tool_call|codebuff_tool_call)>")
MARKS = ("<tool_call>", "<codebuff_tool_call>", "[TOOL_CALLS]", "<function=", "<|tool_call")
"""Words with which models begin a call that they write into their text."""
BLANK = re.compile(r"\s*")
DECODER = json.JSONDecoder()
MAX_BROKEN_BLOCKS = 100
"""How many blocks that cannot be read are told of: to say where each one is wrong, the whole text is gone over."""


class Text(NamedTuple):
    """Text between blocks, trimmed and never empty."""

    text: str


class Block(NamedTuple):
    """A well-formed block."""

    name: str
    input: JsonDict


class Broken(NamedTuple):
    """A closed block that cannot be read, and why."""

    name: str
    problem: str


def mark_in(text: str) -> str:
    """Return the word that a call in *text* begins with, ``""`` when there is none."""
    return next((mark for mark in MARKS if mark in text), "")


def split_blocks(text: str) -> list[Text | Block | Broken]:
    """Return the pieces of *text* in order."""
    pieces: list[Text | Block | Broken] = []
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
        piece, position = _block(tag, text, match.end(), closing)
        broken += isinstance(piece, Broken)
        _add_text(pieces, text[shown : match.start()])
        pieces.append(piece)
        shown = position
    _add_text(pieces, text[shown:])
    return pieces


def _add_text(pieces: list[Any], text: str) -> None:
    if text.strip():
        pieces.append(Text(text.strip()))


def _block(tag: str, text: str, start: int, closing: int) -> tuple[Block | Broken, int]:
    """Return the block whose body begins at *start*, and where the text goes on after it."""
    end = f"</{tag}>"
    try:
        value, stopped = DECODER.raw_decode(text, _skip_blank(text, start))
    except (ValueError, RecursionError) as error:
        return Broken("", f"the block is not JSON: {error}"), closing + len(end)
    stopped = _skip_blank(text, stopped)
    if text.startswith(end, stopped):
        return _read(tag, value), stopped + len(end)
    return Broken("", "the block holds more than one JSON object"), closing + len(end)


def _skip_blank(text: str, position: int) -> int:
    match = BLANK.match(text, position)
    return match.end() if match else position


def of_codebuff(value: Mapping[str, object]) -> tuple[object, dict[str, Any]]:
    """Return what codebuff's form names as the tool, and the input that stands beside it."""
    return value.get("cb_tool_name"), {k: v for k, v in value.items() if k not in ("cb_tool_name", "cb_easp")}


def _read(tag: str, value: object) -> Block | Broken:
    if not isinstance(value, dict):
        return Broken("", f"the block holds a {type(value).__name__}, not an object")
    name, given = (value.get("name"), value.get("input", {})) if tag == "tool_call" else of_codebuff(value)
    if not isinstance(name, str) or not name:
        return Broken("", "the block names no tool")
    if not isinstance(given, dict):
        return Broken(name, f"the input of {name!r} is a {type(given).__name__}, not an object")
    try:
        return Block(name, freeze(given))
    except DataError as error:
        return Broken(name, error.message)
