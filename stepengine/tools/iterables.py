"""Detection of types whose values can be read only once, such as ``Iterable[int]``, which pydantic validates lazily."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stepengine.errors import DefinitionError

REMEDY = "its values can be read only once, and are empty for the next reader; write list[...] or Sequence[...]"
WRAPPERS = frozenset({"function-after", "function-wrap"})
NOT_SCHEMAS = frozenset({"metadata", "default", "serialization", "cls", "config", "ref", "type", "expected"})
"""Members of a core schema that contain no schema."""
LISTS_OF_FIELDS = {"arguments": "arguments_schema", "dataclass-args": "fields"}
"""Kinds of core schemas whose fields are in a list, and the member with this list."""


def find_one_shot_iterable(schema: Any, path: str = "") -> str | None:
    """
    Return the path of the first generator or iterable type in a pydantic core schema; ``None`` if there is none.

    A type directly within a validator is accepted, since the validator may convert it to a list.
    """
    if isinstance(schema, list | tuple):
        return _find_first_one_shot_iterable([(path, one) for one in schema])
    if not isinstance(schema, Mapping):
        return None
    kind = schema.get("type")
    if kind == "generator":
        return path
    inner = schema.get("schema")
    if kind in WRAPPERS and isinstance(inner, Mapping) and inner.get("type") == "generator":
        return None
    return _find_first_one_shot_iterable(_list_inner_schemas(schema, path))


def raise_for_one_shot_fields(model: Any, where: str) -> None:
    """
    Raise ``DefinitionError`` if a field of a pydantic model is an iterable that can be read only once.

    Raises:
        DefinitionError: With *where* and the field.
    """
    from pydantic import TypeAdapter

    field = find_one_shot_iterable(TypeAdapter(model).core_schema)
    if field is not None:
        msg = f"{where}: the field {field!r} of {model.__name__} is an Iterable or Generator: {REMEDY}"
        raise DefinitionError(msg)


def _list_inner_schemas(schema: Mapping[str, Any], path: str) -> list[tuple[str, Any]]:
    kind = schema.get("type")
    if kind in LISTS_OF_FIELDS:
        return [(_join_path(path, one["name"]), one["schema"]) for one in schema[LISTS_OF_FIELDS[kind]]]
    parts: list[tuple[str, Any]] = []
    for name, one in schema.items():
        # A field of a model, and a tag of a union, can have any name, such as `type`.
        if name == "fields" and isinstance(one, Mapping):
            parts += [(_join_path(path, field), inner) for field, inner in one.items()]
        elif name == "choices" and isinstance(one, Mapping):
            parts += [(path, inner) for inner in one.values()]
        elif name not in NOT_SCHEMAS:
            parts.append((path, one))
    return parts


def _find_first_one_shot_iterable(parts: list[tuple[str, Any]]) -> str | None:
    """Return the path of the first one-shot iterable in *parts*, which are schemas with paths; ``None`` if there is none."""
    return next((found for place, one in parts if (found := find_one_shot_iterable(one, place)) is not None), None)


def _join_path(path: str, name: str) -> str:
    """Return the path of the member *name* of the value at *path*."""
    return f"{path}.{name}" if path else name
