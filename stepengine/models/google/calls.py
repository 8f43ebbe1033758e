"""
Assemble function calls with streamed arguments, which arrive as pairs of a JSON path and a value. Pure: no I/O.

``streamFunctionCallArguments`` requests them. The first part of a call has its name, the next ones have none. The call is
complete with the first part without ``willContinue``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import pairwise
from typing import Any, TypeAlias

import attrs

from stepengine.data.json import ABSENT
from stepengine.models._json import (
    encode_utf8,
    get_optional_object,
    get_optional_objects,
    get_optional_text,
    parse_json,
)

IN_PIECES = frozenset({"partialArgs", "willContinue"})
"""The members of a call that only streamed arguments have."""

SEGMENT = re.compile(r"\.([^.\[\]]+)|\[([0-9]{1,9})\]|\['((?:[^'\\]|\\.)*)'\]|\[(\"(?:[^\"\\]|\\.)*\")\]", re.ASCII)
MAX_DEPTH_LEVELS = 100
"""Arguments of tools have some ten levels; a longer path is an error."""
SAYS_NOTHING = frozenset({"jsonPath", "willContinue"})
VALUES = ("stringValue", "numberValue", "boolValue")

Json = dict[str, Any]
Key: TypeAlias = str | int


class PartialCall:
    """
    A function call that is still being received, assembled from parts of the reply.

    Args:
        part: The first part.

    Attributes:
        is_open: Whether more parts follow.
    """

    def __init__(self, part: Mapping[str, object]) -> None:
        self.is_open = True
        self._part: Json = {}
        self._call: Json = {}
        self._root: Json = {}
        self.add_part(part)

    def is_continued_by(self, call: Mapping[str, object]) -> bool:
        """Return whether *call* continues this call: its name and id are empty or the same."""
        return all(
            get_optional_text(call, name) in {"", get_optional_text(self._call, name)} for name in ("name", "id")
        )

    def add_part(self, part: Mapping[str, object]) -> None:
        """
        Add the next *part*.

        Raises:
            ValueError: for a piece with an invalid path, or of an unknown kind.
        """
        call = get_optional_object(part, "functionCall")
        self._part.update({name: value for name, value in part.items() if value is not None})
        rest = {name: value for name, value in call.items() if name not in IN_PIECES and name != "args"}
        self._call.update({name: value for name, value in rest.items() if value is not None})
        self._root.update(get_optional_object(call, "args"))
        for piece in get_optional_objects(call, "partialArgs"):
            if (value := _parse_piece_value(piece)) is not ABSENT:
                _set_or_extend_text_at_path(self._root, _parse_json_path(get_optional_text(piece, "jsonPath")), value)
        self.is_open = call.get("willContinue") is True

    def to_part(self) -> Json:
        """Return the part as the API sends it without streamed arguments; an open call has ``willContinue``."""
        more = {"willContinue": True} if self.is_open else {}
        return {**self._part, "functionCall": {**self._call, "args": _join_open_texts(self._root), **more}}


def join_streamed_arguments(part: Mapping[str, object]) -> Mapping[str, Any]:
    """Return *part*, which contains a call, with its streamed arguments joined; raise ``ValueError`` for invalid pieces."""
    return PartialCall(part).to_part() if get_optional_object(part, "functionCall").get("partialArgs") else part


@attrs.define
class _OpenText:
    """A text value that may still grow."""

    pieces: list[str]


def _parse_piece_value(piece: Mapping[str, object]) -> object:
    """Return the value of a piece of arguments, ``ABSENT`` if it has none; raise ``ValueError`` for an unknown member."""
    for name in VALUES:
        value = piece.get(name)
        if value is not None:
            return _OpenText([get_optional_text(piece, name)]) if name == "stringValue" else value
    if "nullValue" in piece:
        return None
    unknown = sorted(piece.keys() - SAYS_NOTHING - set(VALUES))
    if unknown:
        msg = f"a piece of arguments has the unknown member {unknown[0]!r}"
        raise ValueError(msg)
    return ABSENT


def _parse_json_path(path: str) -> list[Key]:
    """Return the keys of a path such as ``$.foo.bar[0]['a b']`` (RFC 9535); raise ``ValueError`` for an invalid path."""
    keys: list[Key] = []
    at = 1
    while path.startswith("$") and at < len(path) and len(keys) < MAX_DEPTH_LEVELS:
        found = SEGMENT.match(path, at)
        if found is None:
            break
        name, index, single, double = found.groups()
        if single is not None:
            double = '"' + single.replace("\\'", "'").replace('"', '\\"') + '"'
        keys.append(int(index) if index else parse_json(encode_utf8(double)) if double is not None else name)
        at = found.end()
    if not keys or at < len(path):
        msg = f"a piece of arguments has the invalid path {path[:MAX_DEPTH_LEVELS]!r}"
        raise ValueError(msg)
    return keys


def _set_or_extend_text_at_path(root: Json, keys: list[Key], value: object) -> None:
    """Set the value at the path *keys* and create missing containers; extend an open text that is already there."""
    here: object = root
    for key, below in pairwise(keys):
        inside = _get_child(here, key)
        here = _set_child(here, key, [] if type(below) is int else {}) if inside is ABSENT else inside
    before = _get_child(here, keys[-1])
    if isinstance(before, _OpenText) and isinstance(value, _OpenText):
        before.pieces += value.pieces
    else:
        _set_child(here, keys[-1], value)


def _get_child(container: object, key: Key) -> Any:
    """Return the value at *key*, ``ABSENT`` if a value can be added there; raise ``ValueError`` for a key that does not fit."""
    if isinstance(container, dict) and isinstance(key, str):
        return container.get(key, ABSENT)
    if isinstance(container, list) and type(key) is int and key <= len(container):
        return container[key] if key < len(container) else ABSENT
    msg = f"a piece of arguments has the key {key!r}, which does not fit its container"
    raise ValueError(msg)


def _set_child(container: Any, key: Key, value: Any) -> object:
    """Set the value at *key* of *container*, for a list also at the index after its end; return the value."""
    if isinstance(container, list) and key == len(container):
        container.append(value)
    else:
        container[key] = value
    return value


def _join_open_texts(value: object) -> Any:
    """Return a copy of *value* with each text that may still grow as a string."""
    if isinstance(value, dict):
        return {name: _join_open_texts(held) for name, held in value.items()}
    if isinstance(value, list):
        return [_join_open_texts(held) for held in value]
    return "".join(value.pieces) if isinstance(value, _OpenText) else value
