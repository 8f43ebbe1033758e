"""JSON Schemas for servers that understand only part of JSON Schema (ecosystem EC102)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ("plain_schema",)

DEFINITIONS = ("$defs", "definitions")
MAX_DEPTH, NESTED, MOST_PARTS = 32, 1, 20_000
NULL = {"type": "null"}


def plain_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    """
    Return *schema* without ``$ref``, ``const`` and unions with null; a schema that refers to itself ends as an object.

    So does what would make a schema of more than 20,000 parts: references to references may stand for any number of them.
    A value that could be null is described by what it is otherwise, since the model may leave out what is optional.
    """
    definitions = {
        f"#/{word}/{name}": found for word in DEFINITIONS for name, found in (schema.get(word) or {}).items()
    }
    plain = _Plain(definitions).of(schema, ())
    return plain if isinstance(plain, dict) else dict(schema)


class _Plain:
    """Puts definitions in the places that refer to them."""

    def __init__(self, definitions: Mapping[str, Any]) -> None:
        self._definitions = definitions
        self._made = 0

    def of(self, value: Any, within: tuple[str, ...]) -> Any:
        """Return a schema without references; *within* are those in whose place it stands."""
        if isinstance(value, list):
            return [self.of(item, within) for item in value]
        if not isinstance(value, Mapping):
            return value
        self._made += 1
        found = dict(value) if "$ref" in value else _without_null(dict(value))
        if "$ref" in found:
            return self._referred(found.pop("$ref"), found, within)
        return {name: self._member(name, item, within) for name, item in found.items() if name not in DEFINITIONS}

    def _referred(self, reference: Any, rest: Mapping[str, Any], within: tuple[str, ...]) -> Any:
        if within.count(reference) > NESTED or len(within) >= MAX_DEPTH or self._made > MOST_PARTS:
            return {"type": "object"}
        target = self._definitions.get(reference, {"type": "object"})
        return self.of({**(target if isinstance(target, Mapping) else {}), **rest}, (*within, reference))

    def _member(self, name: str, item: Any, within: tuple[str, ...]) -> Any:
        if name in {"enum", "default", "examples", "required", "const"}:
            return item
        if name in {"properties", "patternProperties"} and isinstance(item, Mapping):
            return {key: self.of(value, within) for key, value in item.items()}
        return self.of(item, within)


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
