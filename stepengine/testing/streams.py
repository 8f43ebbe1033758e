"""
Server-sent events as places with texts: a secret may come in pieces, spread over many events of one stream.

The texts that stand at one place of a stream's JSON events, such as ``/delta/text``, are looked at joined. What is found
there is taken out of every piece that holds a part of it; the framing of the events stays.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias

from stepengine.redaction import Redactor, Span

__all__ = ("clean_events", "joined_texts")

Path: TypeAlias = tuple[str | int, ...]
LINE = re.compile(r"(\r\n|\n|\r)")


class Piece(NamedTuple):
    """One text of one event: the number of its line, and the text."""

    line: int
    text: str


def joined_texts(stream: str) -> dict[str, str]:
    """Return the texts at each place of a stream's JSON events, joined."""
    pieces = _pieces(_trees(LINE.split(stream)))
    return {"".join(f"/{step}" for step in path): "".join([p.text for p in found]) for path, found in pieces.items()}


def clean_events(stream: str, redactor: Redactor) -> str:
    """Return *stream* without the secrets that *redactor* finds, in one event or spread over many."""
    lines = LINE.split(stream)
    trees = _trees(lines)
    for path, pieces in _pieces(trees).items():
        spans = redactor.spans("".join([p.text for p in pieces]))
        for piece, changed in _without(pieces, spans):
            _put(trees[piece.line], path, changed)
    for number, line in enumerate(lines):
        if number not in trees:
            lines[number] = redactor.text(line)
        elif (cleaned := redactor.value(trees[number])) != json.loads(line[5:]):
            lines[number] = f"data: {json.dumps(cleaned, ensure_ascii=False, separators=(',', ':'))}"
    return "".join(lines)


def _trees(lines: list[str]) -> dict[int, Any]:
    trees: dict[int, Any] = {}
    for number, line in enumerate(lines):
        if line.startswith("data:") and line[5:].lstrip()[:1] in ("{", "["):
            try:
                trees[number] = json.loads(line[5:])
            except (ValueError, RecursionError):
                continue
    return trees


def _pieces(trees: Mapping[int, Any]) -> dict[Path, list[Piece]]:
    pieces: dict[Path, list[Piece]] = {}
    for number, tree in trees.items():
        for path, text in _texts(tree, ()):
            pieces.setdefault(path, []).append(Piece(number, text))
    return pieces


def _texts(value: Any, path: Path) -> Iterator[tuple[Path, str]]:
    if isinstance(value, str):
        yield path, value
        return
    members = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for step, member in members:
        yield from _texts(member, (*path, step))


def _without(pieces: list[Piece], spans: list[Span]) -> Iterator[tuple[Piece, str]]:
    """Give each piece that holds a part of a span, with a placeholder where a span begins and nothing where it goes on."""
    begin = first = 0
    for piece in pieces if spans else ():
        end = begin + len(piece.text)
        text, at = "", begin
        for number in range(first, len(spans)):
            span = spans[number]
            if span.start >= end:
                break
            text += piece.text[at - begin : max(span.start, at) - begin]
            text += f"<redacted:{span.name}>" if span.start >= at else ""
            at = span.end
            first = number if span.end > end else number + 1
        if at > begin:
            yield piece, text + piece.text[at - begin :]
        begin = end


def _put(tree: Any, path: Path, text: str) -> None:
    *steps, last = path
    for step in steps:
        tree = tree[step]
    tree[last] = text
