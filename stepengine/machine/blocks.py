"""
Tool-call blocks in text (generator-contract G30, reliability GN23).

A block is ``<tool_call>{"name": ..., "input": {...}}</tool_call>``, or codebuff's ``<codebuff_tool_call>`` with the name
under ``cb_tool_name`` and the input beside it. Only blocks at the top level count: what stands in a code fence, in
another block, or is never closed, is text.
"""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

from stepengine.data.json import JsonDict, freeze
from stepengine.errors import DataError

__all__ = ("Block", "Broken", "Text", "split_blocks")

BLOCK = re.compile(r"```.*?(?:```|\Z)|<(tool_call|codebuff_tool_call)>(.*?)</\1>", re.DOTALL)


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


def split_blocks(text: str) -> list[Text | Block | Broken]:
    """Return the pieces of *text* in order."""
    pieces: list[Text | Block | Broken] = []
    shown = 0
    for match in BLOCK.finditer(text):
        if match[1] is None:
            continue
        _add_text(pieces, text[shown : match.start()])
        pieces.append(_read(match[1], match[2]))
        shown = match.end()
    _add_text(pieces, text[shown:])
    return pieces


def _add_text(pieces: list[Any], text: str) -> None:
    if text.strip():
        pieces.append(Text(text.strip()))


def _read(tag: str, body: str) -> Block | Broken:
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as error:
        return Broken("", f"the block is not JSON: {error}")
    if not isinstance(value, dict):
        return Broken("", f"the block holds a {type(value).__name__}, not an object")
    if tag == "tool_call":
        name, given = value.get("name"), value.get("input", {})
    else:
        name = value.get("cb_tool_name")
        given = {k: v for k, v in value.items() if k not in ("cb_tool_name", "cb_easp")}
    if not isinstance(name, str) or not name:
        return Broken("", "the block names no tool")
    if not isinstance(given, dict):
        return Broken(name, f"the input of {name!r} is a {type(given).__name__}, not an object")
    try:
        return Block(name, freeze(given))
    except DataError as error:
        return Broken(name, error.message)
