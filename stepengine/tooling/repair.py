"""
Mends what is often wrong in a tool's input, before it is validated.

Names are mended for everybody: other spellings of a parameter's name, camelCase among them, are renamed
unless the right name is there too. Values are mended for models alone; a handler's have to be right: where a list is due,
JSON text of a list is read and any other single value becomes a list of one; where an object is due, JSON text of one is
read. The published schema shows none of this.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from stepengine.data.json import JsonDict, freeze_object
from stepengine.errors import DataError

__all__ = ("Aliases", "renamer", "repairer")

Aliases = Mapping[str, Sequence[str]]
"""Dotted path of a parameter, such as ``"replacements.old_string"``, to other names that are accepted for it."""

DROPPED = "cb_easp"
ROUNDS = 3
DEPTH = 8


def _camel(name: str) -> str:
    return re.sub(r"_([a-z0-9])", lambda m: m[1].upper(), name)


def repairer(schema: Mapping[str, object], aliases: Aliases) -> Callable[[JsonDict], JsonDict]:
    """Return the function that mends names and values in inputs of a tool with this schema."""
    return _mending(_Mender(schema, aliases), schema)


def _mending(mender: _Mender, schema: Mapping[str, object]) -> Callable[[JsonDict], JsonDict]:
    plain = mender.plain_names()

    def repair(value: JsonDict) -> JsonDict:
        if value.keys() <= plain:
            return value
        try:
            mended = mender.members(value, schema, "")
            return value if mended is value else freeze_object(mended)
        except (DataError, RecursionError):
            return value

    return repair


def renamer(schema: Mapping[str, object], aliases: Aliases) -> Callable[[JsonDict], JsonDict]:
    """Return the function that mends the names in inputs of a tool with this schema, and no values."""
    plain: frozenset[str] | None = None
    mend: Callable[[JsonDict], JsonDict] | None = None

    def rename(value: JsonDict) -> JsonDict:
        nonlocal plain, mend
        if plain is None or mend is None:  # of most tools no handler ever calls
            mender = _Mender(schema, aliases, has_strict_values=True)
            plain, mend = mender.plain_names(), _mending(mender, schema)
        return value if value.keys() <= plain else mend(value)

    return rename


class _Mender:
    def __init__(self, root: Mapping[str, Any], aliases: Aliases, *, has_strict_values: bool = False) -> None:
        self._root = root
        self._aliases = aliases
        self._has_strict_values = has_strict_values
        self._names: dict[tuple[str, frozenset[str]], dict[str, str]] = {}
        self._known: dict[int, list[Mapping[str, Any]]] = {}
        """Forms by the identity of a schema, which is a part of *root*."""

    def plain_names(self) -> frozenset[str]:
        """Return the parameters at the top whose values never need mending."""
        properties: Mapping[str, object] = self._root.get("properties", {})
        structured = {"array", "object"}
        if self._has_strict_values:
            return frozenset([n for n, s in properties.items() if not self._has_names(s, 0)])
        return frozenset(
            [n for n, s in properties.items() if not any(structured & {*_kinds(f)} for f in self._forms(s))]
        )

    def _has_names(self, schema: object, depth: int) -> bool:
        """Return whether values may hold names that a schema knows: a list of texts does not, however long it is."""
        if depth > DEPTH:
            return True
        forms = self._forms(schema)
        return any(
            "properties" in form or ("items" in form and self._has_names(form["items"], depth + 1)) for form in forms
        )

    def members(self, value: Mapping[str, Any], schema: Mapping[str, Any], path: str) -> Mapping[str, Any]:
        """Return the object with its names and members mended; the same object when nothing was wrong."""
        properties: Mapping[str, object] = schema.get("properties", {})
        if not value.keys() <= properties.keys():
            value = self._renamed(value, properties, path)
        changed = {}
        for name, member in value.items():
            if name in properties:
                mended = self._value(member, properties[name], f"{path}.{name}" if path else name)
                if mended is not member:
                    changed[name] = mended
        return {**value, **changed} if changed else value

    def _renamed(
        self, value: Mapping[str, object], properties: Mapping[str, object], path: str
    ) -> Mapping[str, object]:
        known = self._spellings(properties, path)
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

    def _spellings(self, properties: Mapping[str, object], path: str) -> dict[str, str]:
        key = (path, frozenset(properties))
        if key not in self._names:
            spellings = {_camel(name): name for name in properties}
            for name in properties:
                dotted = f"{path}.{name}" if path else name
                spellings |= dict.fromkeys(self._aliases.get(dotted, ()), name)
            self._names[key] = spellings
        return self._names[key]

    def _value(self, value: object, schema: object, path: str) -> object:
        forms = self._forms(schema)
        if not self._has_strict_values:
            value = _fitting(value, {kind for form in forms for kind in _kinds(form)})
        if isinstance(value, list):
            items = next((f["items"] for f in forms if "items" in f), None)
            mended = [self._value(v, items, path) for v in value] if isinstance(items, Mapping) else value
            return value if all(a is b for a, b in zip(mended, value, strict=True)) else mended
        if isinstance(value, Mapping):
            form = next((f for f in forms if "properties" in f), None)
            if form is None:  # one object where a list of them is due, which some tools take
                return next((self._value(value, f["items"], path) for f in forms if "items" in f), value)
            return self.members(value, form, path)
        return value

    def _forms(self, schema: object) -> list[Mapping[str, object]]:
        """Return the schema, or its alternatives, with references followed."""
        if id(schema) not in self._known:
            self._known[id(schema)] = self._looked_up(schema, set())
        return self._known[id(schema)]

    def _looked_up(self, schema: object, followed: set[str]) -> list[Mapping[str, object]]:
        """As above; a reference that was followed before says nothing new."""
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
        return [form for alternative in alternatives for form in self._looked_up(alternative, followed)]


def _kinds(form: Mapping[str, Any]) -> tuple[str, ...]:
    kind = form.get("type", ())
    return (kind,) if isinstance(kind, str) else tuple(kind) or (("object",) if "properties" in form else ("string",))


def _fitting(value: object, kinds: set[str]) -> object:
    """Return what a value of another kind was probably meant as, where an array or an object is due; else the value."""
    if isinstance(value, str) and "string" not in kinds and kinds & {"array", "object"}:
        value = _decode_if_wanted(value, kinds)
    return [value] if _wants_list(value, kinds) else value


def _wants_list(value: object, kinds: set[str]) -> bool:
    """Return whether a single value stands where only a list of such values would fit."""
    if "array" not in kinds or value is None or isinstance(value, list):
        return False
    return ("object" not in kinds and isinstance(value, Mapping)) or kinds <= {"array", "null"}


def _decode_if_wanted(text: str, kinds: set[str]) -> object:
    """Return what JSON text stands for, when that is of a wanted kind; else the text."""
    value: object = text
    for _ in range(ROUNDS):
        if not isinstance(value, str):
            break
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return text
    fits = (isinstance(value, list) and "array" in kinds) or (isinstance(value, dict) and kinds & {"array", "object"})
    return value if fits else text
