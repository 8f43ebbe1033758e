"""Convert JSON Schemas for servers that support only part of JSON Schema."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from stepengine.data.schemas import DEFINITIONS
from stepengine.data.tools import ToolSpec

MAX_DEPTH, NESTED, MOST_PARTS = 32, 1, 20_000
"""Limits for expanded references: depth, repetition of a reference within itself, and parts. Schemas can be recursive."""
NULL = {"type": "null"}


def remove_references_and_nulls(schema: Mapping[str, Any]) -> dict[str, Any]:
    """
    Return *schema* without ``$ref``, ``const`` and unions with null; recursion ends with a plain object.

    An expansion to more than 20,000 parts ends in the same way. A ``const`` becomes an ``enum``. A union with null becomes its other
    member, because the model can leave out optional values.
    """
    definitions = {
        f"#/{word}/{name}": found for word in DEFINITIONS for name, found in (schema.get(word) or {}).items()
    }
    plain = _ReferenceResolver(definitions).convert(schema, ())
    return plain if isinstance(plain, dict) else dict(schema)


class _ReferenceResolver:
    """Replaces references by their definitions, and constants and null unions by plain forms."""

    def __init__(self, definitions: Mapping[str, object]) -> None:
        self._definitions = definitions
        self._made = 0

    def convert(self, value: Any, open_references: tuple[str, ...]) -> Any:
        """Return a schema without references; *open_references* are the references that are being resolved."""
        if isinstance(value, list):
            return [self.convert(item, open_references) for item in value]
        if not isinstance(value, Mapping):
            return value
        self._made += 1
        found = dict(value) if "$ref" in value else _remove_const_and_null(dict(value))
        if "$ref" in found:
            return self._resolve_reference(found.pop("$ref"), found, open_references)
        return {
            name: self._convert_member(name, item, open_references)
            for name, item in found.items()
            if name not in DEFINITIONS
        }

    def _resolve_reference(self, reference: Any, rest: Mapping[str, Any], open_references: tuple[str, ...]) -> object:
        """Return the converted definition behind *reference*, merged with *rest*; a plain object beyond the limits."""
        if open_references.count(reference) > NESTED or len(open_references) >= MAX_DEPTH or self._made > MOST_PARTS:
            return {"type": "object"}
        target = self._definitions.get(reference, {"type": "object"})
        return self.convert({**(target if isinstance(target, Mapping) else {}), **rest}, (*open_references, reference))

    def _convert_member(self, name: str, item: object, open_references: tuple[str, ...]) -> Any:
        """Return the converted value of a keyword; values that are not schemas stay unchanged."""
        if name in {"enum", "default", "examples", "required", "const"}:
            return item
        if name in {"properties", "patternProperties"} and isinstance(item, Mapping):
            return {key: self.convert(value, open_references) for key, value in item.items()}
        return self.convert(item, open_references)


def _remove_const_and_null(schema: dict[str, Any]) -> dict[str, object]:
    """Return *schema* with ``const`` as ``enum`` and without null in unions, at its top level; the argument is changed, too."""
    if "const" in schema and not isinstance(schema["const"], Mapping):
        schema["enum"] = [schema.pop("const")]
    for word in ("anyOf", "oneOf"):
        members = schema.get(word)
        if isinstance(members, list) and NULL in members:
            left = [member for member in members if member != NULL]
            del schema[word]
            schema = {**(left[0] if len(left) == 1 else {word: left}), **schema}
    if isinstance(schema.get("type"), list):
        kinds = [kind for kind in schema["type"] if kind != "null"]
        schema["type"] = kinds[0] if len(kinds) == 1 else kinds
    return schema


# --- strict schemas ---------------------------------------------------------------------------------------------------

KEPT = frozenset({"type", "enum", "const", "title", "description", "required"})
FORMATS = frozenset({"date-time", "time", "date", "duration", "email", "hostname", "uri", "ipv4", "ipv6", "uuid"})
MAX_OPTIONAL, MAX_LEVELS, MAX_FIELDS, MAX_VALUES = 24, 10, 5_000, 1_000
"""
Anthropic documents 24 optional members; OpenAI documents 10 levels, 5,000 fields and 1,000 values (providers:PV43,
providers:PV44).
"""
UNPROMISED = frozenset(
    {
        *("oneOf", "allOf", "not", "if", "then", "else", "default", "minLength", "maxLength", "patternProperties"),
        *("minProperties", "maxProperties", "uniqueItems", "contains", "minContains", "maxContains", "propertyNames"),
        *("definitions", "unevaluatedItems", "unevaluatedProperties", "dependentRequired", "dependentSchemas"),
    }
)
"""The keywords that OpenAI rejects in strict schemas."""


class _UnsupportedSchema(Exception):
    """The provider does not support the schema as a strict one."""


def make_strict_schema(schema: Mapping[str, object], wire: Literal["anthropic", "openai"]) -> dict[str, Any] | None:
    """
    Return *schema* in the strict form of a wire; ``None`` if the provider cannot guarantee it.

    Objects become closed. A map with arbitrary members cannot be closed. Anthropic accepts at most 24 optional members, and bounds and
    patterns move to descriptions. OpenAI requires every member.
    """
    walk = _AnthropicConverter() if wire == "anthropic" else _OpenAIConverter()
    try:
        return walk.convert_root(schema)
    except _UnsupportedSchema:
        return None


def count_optional_members(schema: Mapping[str, object], wire: Literal["anthropic", "openai"]) -> int | None:
    """Return the number of optional members of a schema, cached; ``None`` if the provider does not support the schema as strict."""
    known = _counted.get((id(schema), wire))
    if known is not None and known[0] is schema:
        return known[1]
    walk = _AnthropicConverter() if wire == "anthropic" else _OpenAIConverter()
    try:
        walk.convert_root(schema)
        found: int | None = walk.optional
    except _UnsupportedSchema:
        found = None
    if len(_counted) >= KEPT_SCHEMAS:
        _counted.clear()
    _counted[id(schema), wire] = (schema, found)
    return found


def has_strict_tool_unsupported_by_openai(tools: Iterable[ToolSpec]) -> bool:
    """Return whether one of *tools* is strict although OpenAI does not support its schema as strict."""
    return any(tool.strict and count_optional_members(tool.input_schema, "openai") is None for tool in tools)


_counted: dict[tuple[int, str], tuple[Mapping[str, Any], int | None]] = {}
KEPT_SCHEMAS = 1_000
"""More schemas than a process offers at once; a full cache is cleared."""


OLDER = "definitions"
"""The name of ``$defs`` before JSON Schema 2019-09."""


def _merge_definitions(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a root schema with its ``definitions`` under ``$defs``; raise ``_UnsupportedSchema`` if a name is in both."""
    older, defined = schema.get(OLDER, {}), schema.get("$defs", {})
    if OLDER not in schema:
        return schema
    if not isinstance(older, Mapping) or not isinstance(defined, Mapping) or older.keys() & defined.keys():
        raise _UnsupportedSchema
    return {**{name: value for name, value in schema.items() if name != OLDER}, "$defs": {**defined, **older}}


def _make_reference_member(schema: Mapping[str, Any]) -> dict[str, object]:
    """Return only the ``$ref`` member of a schema, with ``definitions`` in it replaced by ``$defs``; ``{}`` without a reference."""
    if "$ref" not in schema:
        return {}
    reference, start = schema["$ref"], f"#/{OLDER}/"
    is_older = isinstance(reference, str) and reference.startswith(start)
    return {"$ref": f"#/$defs/{reference.removeprefix(start)}" if is_older else reference}


class _StrictConverter(ABC):
    """Converts a schema to a strict one with closed objects."""

    def __init__(self) -> None:
        self.optional = self.fields = self.values = 0

    def convert_root(self, schema: Mapping[str, Any]) -> dict[str, Any]:
        """Return the converted root schema; raise ``_UnsupportedSchema`` if it is not an object or exceeds the limits."""
        if schema.get("type") != "object" or any(word in schema for word in ("anyOf", "oneOf", "allOf", "$ref")):
            raise _UnsupportedSchema
        found = self.convert(_merge_definitions(schema), 0)
        if self.optional > MAX_OPTIONAL or self.fields > MAX_FIELDS or self.values > MAX_VALUES:
            raise _UnsupportedSchema
        return found

    @abstractmethod
    def convert(self, schema: Any, level: int) -> dict[str, Any]:
        """Return the converted form of a part of the schema at depth *level*."""

    def convert_mapping(self, schemas: Any, level: int) -> dict[str, Any]:
        """Return the converted schemas by name; raise if *schemas* is not a mapping."""
        if not isinstance(schemas, Mapping):
            raise _UnsupportedSchema
        return {name: self.convert(schema, level) for name, schema in schemas.items()}

    def convert_list(self, schemas: Any, level: int) -> list[Any]:
        """Return the converted schemas of a list; raise if *schemas* is not a list."""
        if not isinstance(schemas, list):
            raise _UnsupportedSchema
        return [self.convert(schema, level) for schema in schemas]

    def convert_members(self, schema: Mapping[str, object], level: int) -> dict[str, Any]:
        """Return the converted members of an object and count them; raise if ``additionalProperties`` is set and not false."""
        if schema.get("additionalProperties", False) is not False:
            raise _UnsupportedSchema
        properties, required = schema.get("properties", {}), schema.get("required", [])
        if not isinstance(properties, Mapping) or not isinstance(required, list):
            raise _UnsupportedSchema
        self.fields += len(properties)
        self.optional += len(properties.keys() - {name for name in required if isinstance(name, str)})
        return {"properties": self.convert_mapping(properties, level + 1), "additionalProperties": False}


class _AnthropicConverter(_StrictConverter):
    def convert(self, schema: Any, level: int) -> dict[str, Any]:
        """Return a part of the schema with unsupported keywords moved to its description; raise if Anthropic cannot guarantee it."""
        if not isinstance(schema, Mapping) or level > MAX_DEPTH or OLDER in schema:
            raise _UnsupportedSchema
        defined = {"$defs": self.convert_mapping(schema["$defs"], level + 1)} if "$defs" in schema else {}
        if "$ref" in schema:
            return {**defined, **_make_reference_member(schema)}
        rest = {name: value for name, value in schema.items() if name != "$defs"}
        found = {**defined, **{name: rest.pop(name) for name in schema if name in KEPT}}
        if found.get("type") == "object":
            found |= self.convert_members(schema, level)
            rest = {name: value for name, value in rest.items() if name not in found}
        found |= self._pop_supported_keywords(rest, level)
        if "enum" in found or "const" in found:
            found.pop("type", None)
        if not found.keys() & {"type", "enum", "const", "anyOf", "allOf"}:
            raise _UnsupportedSchema
        if rest:
            told = "{" + ", ".join([f"{name}: {value}" for name, value in rest.items()]) + "}"
            found["description"] = f"{found['description']}\n\n{told}" if "description" in found else told
        return found

    def _pop_supported_keywords(self, rest: dict[str, object], level: int) -> dict[str, object]:
        """Remove ``anyOf``, ``oneOf``, ``allOf``, ``items``, and supported bounds and formats, from *rest*; return them converted."""
        found: dict[str, object] = {}
        for word in ("anyOf", "oneOf", "allOf"):
            if word in rest:
                found["anyOf" if word == "oneOf" else word] = self.convert_list(rest.pop(word), level + 1)
        if "items" in rest:
            found["items"] = self.convert(rest.pop("items"), level + 1)
        if rest.get("minItems") in (0, 1):
            found["minItems"] = rest.pop("minItems")
        if isinstance(rest.get("format"), str) and rest["format"] in FORMATS:
            found["format"] = rest.pop("format")
        return found


class _OpenAIConverter(_StrictConverter):
    def convert(self, schema: Any, level: int) -> dict[str, Any]:
        """Return a part of the schema; raise for keywords, depths and patterns that OpenAI does not support."""
        if not isinstance(schema, Mapping) or level > MAX_LEVELS or not UNPROMISED.isdisjoint(schema):
            raise _UnsupportedSchema
        if "$ref" in schema and schema.keys() - {"$ref", "$defs"}:
            raise _UnsupportedSchema
        if not schema.keys() & {"type", "enum", "const", "anyOf", "$ref"} or _has_lookaround(schema.get("pattern")):
            raise _UnsupportedSchema
        values = schema.get("enum", [])
        self.values += len(values) if isinstance(values, list) else 0
        found = {**schema, **_make_reference_member(schema)}
        if found.get("type") == "object" or "properties" in found:
            found |= self.convert_members(schema, level)
        if "$defs" in found:
            found["$defs"] = self.convert_mapping(found["$defs"], 1)
        if "anyOf" in found:
            found["anyOf"] = self.convert_list(found["anyOf"], level)
        if found.get("type") == "array" or "items" in found:
            found["items"] = self.convert(found.get("items"), level + 1)
        return found

    def convert_members(self, schema: Mapping[str, Any], level: int) -> dict[str, Any]:
        """Return the converted members of an object; raise unless all of them are required."""
        found = super().convert_members(schema, level)
        names = list(found["properties"])
        if set(schema.get("required", ())) != set(names):
            raise _UnsupportedSchema
        return {**found, "required": names}


def _has_lookaround(pattern: object) -> bool:
    """Return whether a regular expression has a lookahead or lookbehind."""
    return isinstance(pattern, str) and any(word in pattern for word in ("(?=", "(?!", "(?<=", "(?<!"))
