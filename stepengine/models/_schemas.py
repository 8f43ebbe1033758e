"""JSON Schemas for servers that understand only part of JSON Schema (ecosystem EC102)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ("plain_schema",)

MAX_DEPTH = 32
NULL = {"type": "null"}


def plain_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    """
    Return *schema* without ``$ref``, ``const`` and unions with null; a schema that refers to itself ends as an object.

    A value that could be null is described by what it is otherwise, since the model may leave out what is optional.
    """
    definitions = {
        f"#/{word}/{name}": found
        for word in ("$defs", "definitions")
        for name, found in (schema.get(word) or {}).items()
    }
    plain = _plain(schema, definitions, 0)
    return plain if isinstance(plain, dict) else dict(schema)


def _plain(value: Any, definitions: Mapping[str, Any], depth: int) -> Any:
    if isinstance(value, list):
        return [_plain(item, definitions, depth) for item in value]
    if not isinstance(value, Mapping):
        return value
    if depth > MAX_DEPTH:
        return {"type": "object"}
    if "$ref" in value:
        rest = {name: item for name, item in value.items() if name != "$ref"}
        target = definitions.get(value["$ref"], {"type": "object"})
        return _plain({**target, **rest}, definitions, depth + 1)
    found = _without_null({name: item for name, item in value.items() if name not in ("$defs", "definitions")})
    if "$ref" in found:
        return _plain(found, definitions, depth + 1)
    return {name: _members(name, item, definitions, depth) for name, item in found.items()}


def _without_null(found: dict[str, Any]) -> dict[str, Any]:
    """Return *found* without constants and null, one level deep."""
    if "const" in found and not isinstance(found["const"], Mapping):
        found["enum"] = [found.pop("const")]
    for word in ("anyOf", "oneOf"):
        members = found.get(word)
        if isinstance(members, list) and NULL in members:
            left = [member for member in members if member != NULL]
            del found[word]
            found = {**(left[0] if len(left) == 1 else {word: left}), **found}
    if isinstance(found.get("type"), list):
        kinds = [kind for kind in found["type"] if kind != "null"]
        found["type"] = kinds[0] if len(kinds) == 1 else kinds
    return found


def _members(name: str, item: Any, definitions: Mapping[str, Any], depth: int) -> Any:
    if name in {"enum", "default", "examples", "required", "const"}:
        return item
    if name in {"properties", "patternProperties"} and isinstance(item, Mapping):
        return {key: _plain(value, definitions, depth + 1) for key, value in item.items()}
    return _plain(item, definitions, depth + 1)
