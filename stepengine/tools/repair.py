"""
Corrects common mistakes in the input of a tool, before it is validated; for models and handlers alike.

Other spellings of a parameter's name, camelCase among them, are renamed unless the right name is there too. Where a list is
expected, JSON text of a list is read, and any other single value becomes a list of one. Where an object, a number or a
boolean is expected, JSON text of one is read. The published schema shows none of this.
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
"""What a schema expects: the forms that a value may have, and their types of JSON."""
DROPPED = "cb_easp"
READ = frozenset({"array", "object", "integer", "number", "boolean"})
"""The types of JSON Schema whose values are also read from JSON text."""
NOTHING: frozenset[str] = frozenset()
SCALARS: Mapping[type, str] = {str: "string", bool: "boolean", int: "integer", float: "number"}
"""Values that are what they should be where their type of JSON Schema is expected."""


def _to_camel_case(name: str) -> str:
    return re.sub(r"_([a-z0-9])", lambda m: m[1].upper(), name)


def make_repairer(schema: Mapping[str, object], aliases: Aliases) -> Callable[[JsonDict], JsonDict]:
    """Return a function that corrects names and values in a tool's inputs; an input that cannot be corrected stays as it is."""
    mender: _Mender | None = None
    expected: Mapping[str, frozenset[str]] = {}

    def repair(value: JsonDict) -> JsonDict:
        nonlocal mender, expected
        if mender is None:  # most tools are never called
            mender = _Mender(schema, aliases)
            expected = mender.expected_types()
        # Nearly every input is right as it is, and is returned without a look at its schema.
        if all(SCALARS.get(type(member)) in expected.get(name, NOTHING) for name, member in value.items()):
            return value
        try:
            mended = mender.mend_members(value, schema, "")
            return value if mended is value else freeze_object(mended)
        except (DataError, RecursionError):
            return value

    return repair


class _Mender:
    def __init__(self, root: Mapping[str, Any], aliases: Aliases) -> None:
        self._root = root
        self._aliases = aliases
        self._names: dict[tuple[str, frozenset[str]], dict[str, str]] = {}
        self._known: dict[int, Expected] = {}
        """By the identity of a schema, which is a part of *root*."""

    def expected_types(self) -> Mapping[str, frozenset[str]]:
        """Return the JSON types that each top-level parameter may have."""
        properties: Mapping[str, object] = self._root.get("properties", {})
        return {name: self._get_expected_forms(schema)[1] for name, schema in properties.items()}

    def mend_members(self, value: Mapping[str, Any], schema: Mapping[str, Any], path: str) -> Mapping[str, Any]:
        """Return an object with names and members corrected; the same object if nothing was wrong."""
        properties: Mapping[str, object] = schema.get("properties", {})
        if not value.keys() <= properties.keys():
            value = self._rename_members(value, properties, path)
        changed = {}
        for name, member in value.items():
            if name in properties:
                mended = self._mend_value(member, properties[name], f"{path}.{name}" if path else name)
                if mended is not member:
                    changed[name] = mended
        return {**value, **changed} if changed else value

    def _rename_members(
        self, value: Mapping[str, object], properties: Mapping[str, object], path: str
    ) -> Mapping[str, object]:
        """Return an object with other spellings renamed and the member ``cb_easp`` dropped; the same object if there are none."""
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
        """Return the accepted spelling to name of each property: camelCase and aliases; cached."""
        key = (path, frozenset(properties))
        if key not in self._names:
            spellings = {_to_camel_case(name): name for name in properties}
            for name in properties:
                dotted = f"{path}.{name}" if path else name
                spellings |= dict.fromkeys(self._aliases.get(dotted, ()), name)
            self._names[key] = spellings
        return self._names[key]

    def _mend_value(self, value: object, schema: object, path: str) -> object:
        """Return a value with types and nested names corrected; the same object if nothing was wrong."""
        forms, kinds = self._get_expected_forms(schema)
        if SCALARS.get(type(value)) in kinds:
            return value
        value = _convert_value(value, kinds)
        if isinstance(value, list):
            items = next((f["items"] for f in forms if "items" in f), None)
            mended = [self._mend_value(v, items, path) for v in value] if isinstance(items, Mapping) else value
            return value if all(a is b for a, b in zip(mended, value, strict=True)) else mended
        if isinstance(value, dict):
            form = next((f for f in forms if "properties" in f), None)
            if form is None:  # one object where a list of them is due, which some tools take
                return next((self._mend_value(value, f["items"], path) for f in forms if "items" in f), value)
            return self.mend_members(value, form, path)
        return value

    def _get_expected_forms(self, schema: object) -> Expected:
        """Return the forms and JSON types that a schema expects, cached by the schema's identity."""
        known = self._known.get(id(schema))
        if known is None:
            forms = self._expand_schema(schema, set())
            known = self._known[id(schema)] = (
                forms,
                frozenset([kind for form in forms for kind in _get_expected_types(form)]),
            )
        return known

    def _expand_schema(self, schema: object, followed: set[str]) -> list[Mapping[str, Any]]:
        """Return the alternatives of a schema with references resolved; a reference that was already followed adds none."""
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
        return [form for alternative in alternatives for form in self._expand_schema(alternative, followed)]


def _get_expected_types(form: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the JSON types in a schema; without any, ``object`` if it has properties, else ``string``."""
    kind = form.get("type", ())
    return (kind,) if isinstance(kind, str) else tuple(kind) or (("object",) if "properties" in form else ("string",))


def _convert_value(value: object, kinds: frozenset[str]) -> object:
    """Return *value* converted to one of *kinds* if that was probably meant; else *value*."""
    if isinstance(value, str) and "string" not in kinds and READ & kinds:
        value = _decode_expected_json(value, kinds)
    return [value] if _wants_list(value, kinds) else value


def _wants_list(value: object, kinds: frozenset[str]) -> bool:
    """Return True if a single value is given where a list is expected."""
    if "array" not in kinds or value is None or isinstance(value, list):
        return False
    return ("object" not in kinds and isinstance(value, dict)) or kinds <= {"array", "null"}


def _decode_expected_json(text: str, kinds: frozenset[str]) -> object:
    """Return the value of a JSON text, also doubly encoded, if it has an expected type; else the text."""
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
    return value if kinds & wanted.get(type(value), set()) else text
