"""
Corrects common mistakes in the input of a tool before its validation, for models and handlers.

Other spellings of a parameter's name, such as camelCase, are renamed unless the right name is also present. For a list, the JSON
text of a list is decoded, and any other single value becomes a list of one item. For an object, number or boolean, its JSON text
is decoded. The published schema does not mention these corrections.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from stepengine.data.json import MAX_DECODINGS, JsonDict, freeze_object
from stepengine.errors import DataError

Aliases = Mapping[str, Sequence[str]]
"""Dotted path of a parameter, such as ``"replacements.old_string"``, to other names that are accepted for it."""

Expected: TypeAlias = "tuple[Sequence[Mapping[str, Any]], frozenset[str]]"
"""The alternatives of a schema, and the JSON types that they allow."""
DROPPED = "cb_easp"
READ = frozenset({"array", "object", "integer", "number", "boolean"})
"""The JSON types whose values are also decoded from JSON text."""
NOTHING: frozenset[str] = frozenset()
SCALARS: Mapping[type, str] = {str: "string", bool: "boolean", int: "integer", float: "number"}
"""Python types whose values need no repair if their JSON type is expected."""


def _to_camel_case(name: str) -> str:
    return re.sub(r"_([a-z0-9])", lambda m: m[1].upper(), name)


def make_repairer(schema: Mapping[str, object], aliases: Aliases) -> Callable[[JsonDict], JsonDict]:
    """Return a function that corrects names and values in a tool's input; it returns an input that it cannot correct unchanged."""
    repairer: _InputRepairer | None = None
    expected: Mapping[str, frozenset[str]] = {}

    def repair(value: JsonDict) -> JsonDict:
        """Return an input with corrected names and values; the repairer is made at the first call."""
        nonlocal repairer, expected
        if repairer is None:  # most tools are never called
            repairer = _InputRepairer(schema, aliases)
            expected = repairer.list_expected_types()
        # Nearly every input is correct and is returned without a traversal of the schema.
        if not [name for name, member in value.items() if SCALARS.get(type(member)) not in expected.get(name, NOTHING)]:
            return value
        try:
            repaired = repairer.repair_members(value, schema, "")
            return value if repaired is value else freeze_object(repaired)
        except (DataError, RecursionError):
            return value

    return repair


class _InputRepairer:
    def __init__(self, root: Mapping[str, Any], aliases: Aliases) -> None:
        self._root = root
        self._aliases = aliases
        self._names: dict[tuple[str, frozenset[str]], dict[str, str]] = {}
        self._known: dict[int, Expected] = {}
        """By the ``id()`` of a schema, which is a part of *root*."""

    def list_expected_types(self) -> Mapping[str, frozenset[str]]:
        """Return the JSON types of each top-level parameter, declared or guessed."""
        properties: Mapping[str, object] = self._root.get("properties", {})
        return {name: self._get_alternatives_and_types(schema)[1] for name, schema in properties.items()}

    def repair_members(self, value: Mapping[str, Any], schema: Mapping[str, Any], path: str) -> Mapping[str, Any]:
        """Return an object with corrected names and members; the same object if it needs no correction."""
        properties: Mapping[str, object] = schema.get("properties", {})
        if not value.keys() <= properties.keys():
            value = self._rename_members(value, properties, path)
        changed = {}
        for name, member in value.items():
            if name in properties:
                repaired = self._repair_value(member, properties[name], f"{path}.{name}" if path else name)
                if repaired is not member:
                    changed[name] = repaired
        return {**value, **changed} if changed else value

    def _rename_members(
        self, value: Mapping[str, object], properties: Mapping[str, object], path: str
    ) -> Mapping[str, object]:
        """Return an object with other spellings renamed and without the member ``cb_easp``; the same object if it has neither."""
        known = self._map_spellings_to_names(properties, path)
        if not any(name in known or name == DROPPED for name in value if name not in properties):
            return value
        made: dict[str, object] = {}
        for name, member in value.items():
            right = name if name in properties else known.get(name, name)
            if right != name and (right in value or right in made):
                right = name
            if name != DROPPED or name in properties:
                made[right] = member
        return made

    def _map_spellings_to_names(self, properties: Mapping[str, object], path: str) -> dict[str, str]:
        """Return a cached dict from each accepted spelling, in camelCase or an alias, to the name of the property."""
        key = (path, frozenset(properties))
        if key not in self._names:
            spellings = {_to_camel_case(name): name for name in properties}
            for name in properties:
                dotted = f"{path}.{name}" if path else name
                spellings |= dict.fromkeys(self._aliases.get(dotted, ()), name)
            self._names[key] = spellings
        return self._names[key]

    def _repair_value(self, value: object, schema: object, path: str) -> object:
        """Return a value with corrected types and nested names; the same object if it needs no correction."""
        forms, kinds = self._get_alternatives_and_types(schema)
        if SCALARS.get(type(value)) in kinds:
            return value
        value = _convert_value(value, kinds)
        if isinstance(value, list):
            items = next((f["items"] for f in forms if "items" in f), None)
            repaired = [self._repair_value(v, items, path) for v in value] if isinstance(items, Mapping) else value
            return value if all(a is b for a, b in zip(repaired, value, strict=True)) else repaired
        if isinstance(value, dict):
            form = next((f for f in forms if "properties" in f), None)
            if form is None:  # a single object instead of a list, which some tools accept
                return next((self._repair_value(value, f["items"], path) for f in forms if "items" in f), value)
            return self.repair_members(value, form, path)
        return value

    def _get_alternatives_and_types(self, schema: object) -> Expected:
        """Return the alternatives of a schema and their JSON types, cached by the schema's ``id()``."""
        known = self._known.get(id(schema))
        if known is None:
            forms = self._list_alternatives(schema, set())
            known = self._known[id(schema)] = (
                forms,
                frozenset([kind for form in forms for kind in _get_or_guess_types(form)]),
            )
        return known

    def _list_alternatives(self, schema: object, followed: set[str]) -> list[Mapping[str, Any]]:
        """Return the alternatives of a schema with resolved references; a reference in *followed* is skipped, others are added there."""
        if not isinstance(schema, Mapping):
            return []
        reference = schema.get("$ref")
        if reference is not None:
            if str(reference) in followed:
                return []
            followed.add(str(reference))
            target: object = self._root
            for part in str(reference).split("/")[1:]:
                target = target.get(part, {}) if isinstance(target, Mapping) else {}
            if not isinstance(target, Mapping):
                return []
            schema = {**target, **{k: v for k, v in schema.items() if k != "$ref"}}
        alternatives = schema.get("anyOf") or schema.get("oneOf")
        if not isinstance(alternatives, list) or not alternatives:
            return [schema]
        return [form for alternative in alternatives for form in self._list_alternatives(alternative, followed)]


def _get_or_guess_types(form: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the declared JSON types of a schema; without any, guess ``object`` if it has properties, else ``string``."""
    kind = form.get("type", ())
    return (kind,) if isinstance(kind, str) else tuple(kind) or (("object",) if "properties" in form else ("string",))


def _convert_value(value: object, json_types: frozenset[str]) -> object:
    """Return *value* converted to one of the JSON types *json_types* if a mistake is likely; else *value*."""
    if isinstance(value, str) and "string" not in json_types and READ & json_types:
        value = _decode_expected_json(value, json_types)
    return [value] if _needs_list_wrapping(value, json_types) else value


def _needs_list_wrapping(value: object, json_types: frozenset[str]) -> bool:
    if "array" not in json_types or value is None or isinstance(value, list):
        return False
    return ("object" not in json_types and isinstance(value, dict)) or json_types <= {"array", "null"}


def _decode_expected_json(text: str, json_types: frozenset[str]) -> object:
    """Return the value of JSON text, also doubly encoded, if it has one of the JSON types *json_types*; else the text."""
    value: object = text
    for _ in range(MAX_DECODINGS):
        if not isinstance(value, str):
            break
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return text
    wanted = {
        list: {"array"},
        dict: {"array", "object"},
        int: {"integer", "number"},
        float: {"number"},
        bool: {"boolean"},
    }
    if isinstance(value, float) and not math.isfinite(value):
        return text
    return value if json_types & wanted.get(type(value), set()) else text
