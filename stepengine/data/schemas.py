"""
JSON Schemas as data: where schemas are inside a schema, and where their references lead.

Checking a value against a schema is the job of ``stepengine.tools.schemas``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from stepengine.data.alike import NEAR_RATIO, find_nearest
from stepengine.errors import DataError

ESCAPED_BYTE = re.compile(rb"%([0-9A-Fa-f]{2})")
DEFINITIONS = ("$defs", "definitions")
"""Keywords of the schemas for references."""
NAMED_SCHEMAS = frozenset({"properties", "patternProperties", "dependentSchemas", "dependencies", *DEFINITIONS})
"""Keywords of JSON Schema whose value is an object of schemas by name."""
SCHEMAS = frozenset(
    {
        *("items", "prefixItems", "additionalItems", "unevaluatedItems", "contains"),
        *("additionalProperties", "unevaluatedProperties", "propertyNames", "contentSchema"),
        *("anyOf", "oneOf", "allOf", "not", "if", "then", "else"),
    }
)
"""Keywords of JSON Schema whose value is a schema, or a list of schemas. The value of any other keyword is data."""


def find_subschemas(keyword: str, value: object, pointer: str) -> Iterator[tuple[object, str]]:
    """Yield each schema directly below *keyword* of the schema at *pointer*, with its own pointer."""
    if keyword in NAMED_SCHEMAS and isinstance(value, Mapping):
        for name, one in value.items():
            if keyword != "dependencies" or not isinstance(one, list):
                yield one, f"{pointer}/{keyword}/{name.replace('~', '~0').replace('/', '~1')}"
    elif keyword in SCHEMAS:
        if isinstance(value, list):
            yield from ((one, f"{pointer}/{keyword}/{index}") for index, one in enumerate(value))
        else:
            yield value, f"{pointer}/{keyword}"


KEYWORDS = frozenset(
    {
        *NAMED_SCHEMAS,
        *SCHEMAS,
        *(
            "$schema",
            "$id",
            "id",
            "$ref",
            "$anchor",
            "$dynamicRef",
            "$dynamicAnchor",
            "$recursiveRef",
            "$recursiveAnchor",
        ),
        *("$vocabulary", "$comment", "type", "const", "enum", "format", "pattern", "multipleOf", "required"),
        *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "minLength", "maxLength"),
        *("minItems", "maxItems", "uniqueItems", "minContains", "maxContains", "minProperties", "maxProperties"),
        *("dependentRequired", "contentEncoding", "contentMediaType"),
        *("title", "description", "default", "deprecated", "readOnly", "writeOnly", "example", "examples"),
    }
)
"""The keywords of JSON Schema, and ``example`` of OpenAPI."""
EXTENSIONS = frozenset(
    {"discriminator", "nullable", "xml", "externalDocs", "enumNames", "markdownDescription", "propertyOrdering"}
)
"""Of other programs, and similar to a keyword."""
SHORT_KEYWORDS = frozenset({"if", "not", "id", "$id", "then", "else", "xml"})
"""Too short for a meaningful similarity: ``note`` is no misspelled ``not``."""
OTHER_WORDS = {"min": "minimum", "max": "maximum", "regex": "pattern", "choices": "enum", "fields": "properties"}
"""The names of keywords in other schema languages."""
TYPES = frozenset({"null", "boolean", "integer", "number", "string", "array", "object"})


def list_member_names(schema: object) -> Iterator[str]:
    """Yield the names of the members in a schema, at any depth."""
    if isinstance(schema, Mapping):
        found = schema.get("properties")
        yield from found if isinstance(found, Mapping) else ()
    for part in schema.values() if isinstance(schema, Mapping) else schema if isinstance(schema, list) else ():
        yield from list_member_names(part)


def find_keyword_problem(schema: Mapping[str, Any]) -> str:
    """
    Return where a schema has a misspelt keyword or a misplaced member, which checks nothing; ``""`` if it has none.

    A word that resembles no keyword is an annotation, as JSON Schema says.
    """
    parts = list(_iterate_subschemas(schema))
    # A reference may lead below any word.
    used = {name for part, _ in parts if isinstance(part.get("$ref"), str) for name in part["$ref"].split("/")[1:2]}
    known = KEYWORDS | EXTENSIONS | used
    for part, at in parts:
        unknown = [word for word in part if word not in known and not word.startswith("x-")]
        hints = [(word, hint) for word in unknown if (hint := _suggest_keyword(word, part[word]))]
        if hints:
            return f"{at}: {hints[0][0]!r} is not a keyword of JSON Schema and is ignored; {hints[0][1]}"
        if at == "#" and unknown and len(unknown) == len(part):
            return f"{at}: it has no keyword of JSON Schema, only {unknown[0]!r}; put members below 'properties'"
    return ""


def _iterate_subschemas(schema: Mapping[str, Any]) -> Iterator[tuple[Mapping[str, Any], str]]:
    """Yield a schema and all schemas in it, each with its pointer."""
    left: list[tuple[object, str]] = [(schema, "#")]
    seen: set[int] = set()
    while left:
        one, at = left.pop()
        if isinstance(one, Mapping) and id(one) not in seen:
            seen.add(id(one))
            yield one, at
            for word, value in one.items():
                left.extend(find_subschemas(word, value, at))


def _suggest_keyword(word: str, value: object) -> str:
    """Return a hint at the keyword that an unknown word of a schema stands for, or at ``properties``; ``""`` without one."""
    plain = {_to_lower_alphanumerics(known): known for known in KEYWORDS}
    same = plain.get(_to_lower_alphanumerics(word)) or OTHER_WORDS.get(word.lower())
    near = (same,) if same else find_nearest(word, KEYWORDS - SHORT_KEYWORDS, min_similarity=NEAR_RATIO, max_count=1)
    if near:
        return f"did you mean {near[0]!r}?"
    kind = value.get("type") if isinstance(value, Mapping) else None
    return "put it below 'properties'" if isinstance(kind, str) and kind in TYPES else ""


def _to_lower_alphanumerics(word: str) -> str:
    return "".join([sign for sign in word if sign.isalnum()]).lower()


def nest_schema_under_property(schema: Mapping[str, Any], name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """
    Return *schema* as the property *name* of an object schema, and its dialect and definitions for the outer schema.

    Returns:
        The schema of the property, and the members that belong at the top of the object schema: its definitions and
        ``$schema``. References keep their targets.
    """
    inner: dict[str, Any] = _rebase_references(schema, f"#/properties/{name}")
    dialect = {"$schema": schema["$schema"]} if "$schema" in schema else {}
    return inner, {**dialect, **{word: inner.pop(word) for word in DEFINITIONS if word in inner}}


def _rebase_references(schema: Any, prefix: str) -> Any:
    """Return *schema*, without ``$schema``, with *prefix* before each reference that is a pointer, except those to definitions."""
    if not isinstance(schema, Mapping):
        return schema
    made: dict[str, Any] = {}
    for word, value in schema.items():
        if word == "$schema":
            continue
        if word == "$ref" and isinstance(value, str):
            made[word] = prefix + value[1:] if _needs_rebase(value) else value
        elif word in NAMED_SCHEMAS and isinstance(value, Mapping):
            made[word] = {name: _rebase_references(one, prefix) for name, one in value.items()}
        elif word in SCHEMAS:
            made[word] = (
                [_rebase_references(one, prefix) for one in value]
                if isinstance(value, list)
                else _rebase_references(value, prefix)
            )
        else:
            made[word] = value
    return made


def _needs_rebase(reference: str) -> bool:
    is_pointer = reference == "#" or reference.startswith("#/")
    return is_pointer and not reference.startswith(tuple([f"#/{word}/" for word in DEFINITIONS]))


def check_references(where: str, schema: Mapping[str, Any]) -> None:
    """
    Raise ``DataError`` unless each ``$ref`` in *schema* has a target inside *schema*.

    Providers reject a request with a reference that does not resolve, and some ignore it.

    Raises:
        DataError: naming *where* and the first reference without a target.
    """
    anchors: set[str] = set()
    references: dict[str, str] = {}
    found: set[str] = set()
    seen: set[int] = set()
    left: list[tuple[object, str]] = [(schema, "#")]
    while True:
        while left:
            one, at = left.pop()
            if isinstance(one, Mapping) and id(one) not in seen:
                seen.add(id(one))
                _collect_references(one, at, anchors, references)
                for word, value in one.items():
                    left.extend(find_subschemas(word, value, at))
        new = [reference for reference in references if reference not in found and reference not in anchors]
        if not new:
            return
        # A target may be below a keyword that is no keyword of JSON Schema, where nothing was looked at yet.
        for reference in new:
            target = _find_reference_target(schema, reference)
            if target is None:
                msg = (
                    f"{where} at {references[reference]}: the reference {reference!r} does not exist; "
                    "define its target below '$defs' at the top"
                )
                raise DataError(msg)
            found.add(reference)
            left.append((target, reference))


def _collect_references(schema: Mapping[str, Any], at: str, anchors: set[str], references: dict[str, str]) -> None:
    """Add the reference and the anchor of one schema, not of those inside it, to *references* and *anchors*."""
    if isinstance(schema.get("$ref"), str):
        references.setdefault(schema["$ref"], f"{at}/$ref")
    if isinstance(schema.get("$anchor"), str):
        anchors.add(f"#{schema['$anchor']}")


def _decode_percents(reference: str) -> str:
    """Return *reference* with percent-encoded bytes decoded; the package may not import urllib."""
    return ESCAPED_BYTE.sub(lambda found: bytes([int(found[1], 16)]), reference.encode()).decode(errors="replace")


def _find_reference_target(schema: Mapping[str, Any], reference: str) -> object:
    """Return the schema at a pointer such as ``#/$defs/Name``, or ``None``."""
    for pointer in (reference, _decode_percents(reference)):
        if pointer != "#" and not pointer.startswith("#/"):
            continue
        target: Any = schema
        for part in pointer.split("/")[1:]:
            name = part.replace("~1", "/").replace("~0", "~")
            if isinstance(target, Mapping):
                target = target.get(name)
            elif isinstance(target, list) and name.isdecimal() and int(name) < len(target):
                target = target[int(name)]
            else:
                target = None
        if isinstance(target, Mapping | bool):
            return target
    return None
