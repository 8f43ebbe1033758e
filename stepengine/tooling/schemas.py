"""
JSON Schemas of somebody else: compiled once by ``jsonschema-rs``, checked within a bound.

The validator is imported when the first such schema is compiled. It is fast and its patterns cannot backtrack, but two
things of it have no end: definitions that lead to each other on many ways are looked at once for each way, and what is
wrong with a value is collected for every form of every form. So it follows no reference: what ``$ref`` says about a value
is asked for here, once for each value, and counted. No reference ever leaves the schema.
"""

from __future__ import annotations

import functools
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NoReturn
from urllib.parse import unquote

import attrs

from stepengine.data.frozen import frozen
from stepengine.data.json import JsonDict, JsonValue, canonical, compact, freeze_object, thaw
from stepengine.data.tools import Validated
from stepengine.errors import DataError, DefinitionError, ToolInputError

if TYPE_CHECKING:
    from jsonschema_rs import ValidationError, Validator

__all__ = (
    "NAMED_SCHEMAS", "SCHEMAS", "STRING", "UNFIT_AT_TOP", "UNFOLLOWED", "JsonSchema", "SchemaInputs", "check_providers", "described", "object_schema",
    "refusal", "validator",
)  # fmt: skip

NAMED_SCHEMAS = frozenset(
    {"properties", "patternProperties", "dependentSchemas", "dependencies", "$defs", "definitions"}
)
"""Keywords of JSON Schema whose value is an object of schemas by name."""
SCHEMAS = frozenset(
    {
        *("items", "prefixItems", "additionalItems", "unevaluatedItems", "contains"),
        *("additionalProperties", "unevaluatedProperties", "propertyNames", "contentSchema"),
        *("anyOf", "oneOf", "allOf", "not", "if", "then", "else"),
    }
)
"""Keywords of JSON Schema whose value is a schema, or a list of schemas; whatever else stands in a schema is data."""
IN_PLACE = frozenset({"anyOf", "oneOf", "allOf", "not", "if", "then", "else", "dependentSchemas", "dependencies"})
UNFOLLOWED = ("$dynamicRef", "$recursiveRef")
UNEVALUATED = ("unevaluatedProperties", "unevaluatedItems")
OLD_DRAFTS = re.compile(r"https?://json-schema\.org/draft-0[3467]/schema#?")
REFERENCE: Final = "x-stepengine-ref"
"""What ``$ref`` is called in a schema of an old draft, whose references the validator would follow itself."""

MOST_SCHEMAS = 10_000
MOST_WAYS = 1_000
MOST_SIZE = 50_000
MOST_ISSUES = 100
MOST_DEPTH = 250
MOST_WORK = 500_000
"""Of about a microsecond each, for one value: once to decide whether it fits, once to say what is wrong."""
SHOWN_CHARS, SHORT_CHARS = 1_000, 100
CLASS, STEPS = 10, 500

LIMITS = {
    "minimum": "should be at least {}",
    "maximum": "should be at most {}",
    "exclusiveMinimum": "should be more than {}",
    "exclusiveMaximum": "should be less than {}",
    "minLength": "should have at least {} characters",
    "maxLength": "should have at most {} characters",
    "minItems": "should have at least {} items",
    "maxItems": "should have at most {} items",
    "minProperties": "should have at least {} members",
    "maxProperties": "should have at most {} members",
}
OTHERS = {
    "uniqueItems": "holds an item twice",
    "not": "has a form that is excluded",
    "falseSchema": "is not allowed",
    "contains": "holds no item, or too many, of the form that it should contain",
}
TOO_LONG = "takes too long to be checked against its schema"


class JsonSchema:
    """
    A compiled JSON Schema.

    A schema of draft 4, 6 or 7 is read as ``$schema`` says, every other one as draft 2020-12. ``$ref`` leads to a place or
    an ``$anchor`` of the same schema. ``format`` describes and is not checked.

    Args:
        where: Whose schema it is, for messages, such as ``"input_schema of tool 'x'"``.
        schema: The schema; JSON.

    Raises:
        DefinitionError: when it is not a schema, refers to what is outside of it, or would take too long to be checked.
    """

    def __init__(self, where: str, schema: Mapping[str, object]) -> None:
        from jsonschema_rs import RegexOptions, ValidationError, validator_map_for

        self._where = where
        self._calls = threading.local()
        self._outline = _Outline(where, schema)
        self._patterns = {text: _pattern(where, text, at) for text, at in self._outline.patterns.items()}
        root = self._outline.root
        drafted = isinstance(root.get("$schema"), str) and OLD_DRAFTS.fullmatch(root["$schema"])
        word = REFERENCE if drafted else "$ref"
        self._reference = word
        plain = self._outline.renamed() if drafted else {k: v for k, v in root.items() if k != "$schema"}
        try:
            self._validators = validator_map_for(
                plain,
                pattern_options=RegexOptions(),
                offline=True,
                validate_formats=False,
                mask="it",
                keywords={  # the class of a keyword is called like any function
                    word: functools.partial(_Keyword, self._follow),  # type: ignore[dict-item]
                    "pattern": functools.partial(_Keyword, self._match),  # type: ignore[dict-item]
                },
            )
        except ValidationError as error:
            _refuse(where, "/".join(("#", *map(str, error.instance_path))), _misfit(error))
        except ValueError as error:
            _refuse(where, "#", f"{error}; one with fewer levels would be fine")

    def issues(self, value: JsonValue, path: str = "") -> list[str]:
        """
        Return what is wrong with a value: one sentence for each offending place, at most a hundred, none when it fits.

        Args:
            value: The value.
            path: What its place is called.
        """
        call = self._calls.now = _Call()
        try:
            problem = self._problem("#", value)
            if problem is None:
                return []
            return [f"{path}: {TOO_LONG}"] if call.is_spent else self._find_issues(value, path)
        finally:
            del self._calls.now

    # --- whether a value fits

    def _problem(self, place: str, value: object) -> str | None:
        """Return why a value does not fit the schema at *place*, in a word; ``None`` when it does."""
        call: _Call = self._calls.now
        key = (place, repr(value) if self._outline.places else "")
        if key in call.known:
            return call.known[key]
        weight = _weight(value)
        schema = self._outline.weights[place]
        call.spend(1 + weight.chars // 200 + weight.values * schema.values // 100)
        call.spend(self._outline.name_size * weight.chars // STEPS)
        if call.is_spent or call.depth > MOST_DEPTH or not _has_room():
            call.is_spent = True
            return TOO_LONG
        call.known[key] = f"its schema {place!r} refers to itself without an end"
        call.depth += 1
        fits = self._validators[place].is_valid(value)
        call.depth -= 1
        call.known[key] = None if fits else f"does not fit {place!r}"
        return call.known[key]

    def _follow(self, reference: str, value: object) -> str | None:
        """Answer for the keyword ``$ref``."""
        return self._problem(self._outline.places[reference], value)

    def _match(self, pattern: str, value: object) -> str | None:
        """Answer for the keyword ``pattern``: count what a text may cost, then ask the validator."""
        if not isinstance(value, str):
            return None
        size, validator = self._patterns[pattern]
        call: _Call = self._calls.now
        call.spend(1 + size * len(value) // STEPS)
        return TOO_LONG if call.is_spent else None if validator.is_valid(value) else f"should match {pattern!r}"

    # --- what is wrong with one that does not

    def _find_issues(self, value: object, path: str) -> list[str]:
        call: _Call = self._calls.now
        call.left = MOST_WORK
        try:
            found = list(dict.fromkeys(self._sentences("#", value, path)))
        except RecursionError:
            return [f"{path}: does not fit its schema, and is nested too deeply to say where"]
        return [f"{path}: {TOO_LONG}"] if call.is_spent else _cut_issues(found)

    def _sentences(self, place: str, value: object, path: str) -> Sequence[str]:
        """Return what is wrong with the value at *path*, of which the schema at *place* says that it does not fit."""
        call: _Call = self._calls.now
        key = (place, path)
        if key in call.told:
            return call.told[key]
        call.told[key] = (f"{path}: its schema {place!r} refers to itself without an end",)
        weight, schema = _weight(value), self._outline.weights[place]
        most = schema.schemas * (weight.values * 10 + weight.chars // 100)
        if most > call.left * 4:
            call.told[key] = (f"{path}: does not fit its schema; there is too much of both to say where",)
            return call.told[key]
        call.spend(1)
        told: list[str] = []
        for error in self._validators[place].iter_errors(value):
            told.extend(self._of_error(error, place, path))
            if len(told) > MOST_ISSUES:
                break
        call.told[key] = _cut_issues(list(dict.fromkeys(told)))
        return call.told[key]

    def _of_error(self, error: ValidationError, place: str, above: str) -> Iterator[str]:
        """Give the sentences for one error; its place is below *above*, its schema below *place*."""
        path = functools.reduce(below, error.instance_path, above)
        kind: Any = error.kind
        word = kind.name
        if word == self._reference:
            schema = self._outline.schema_at(place, error.schema_path[:-1])
            yield from self._sentences(self._outline.places[schema[self._reference]], error.instance, path)
        elif word in {"anyOf", "oneOf"} and all(kind.context):
            tries = [[said for one in form for said in self._of_error(one, place, above)] for form in kind.context]
            yield _fits_none(path, tries)
        elif word == "oneOf":
            fitting = sum(not form for form in kind.context)
            yield f"{path}: fits {fitting} of the {len(kind.context)} forms, and exactly one is allowed"
        elif (
            word in {"additionalProperties", "unevaluatedProperties"} or error.schema_path[-1] == "additionalProperties"
        ):
            schema = self._outline.schema_at(place, error.schema_path[:-1])
            listed = ", ".join(sorted(schema.get("properties", ()))) or "none"
            for name in kind.unexpected if hasattr(kind, "unexpected") else _names(error.instance):
                yield f"{below(path, name)}: is not a parameter; the parameters are: {listed}"
        elif word == "propertyNames":
            name = below(path, kind.error.instance)
            yield from (f"{name}: {s.removeprefix(f'{path}: ')}" for s in self._of_error(kind.error, place, path))
        else:
            yield _sentence(path, word, kind, error)


class _Keyword:
    """A keyword of which this module decides; made by the validator for each place that has it."""

    def __init__(self, ask: Callable[[Any, Any], str | None], _: object, value: object, __: object) -> None:
        self._ask = ask
        self._value = value

    def validate(self, instance: object) -> None:
        """Raise ``ValueError`` for what does not fit."""
        problem = self._ask(self._value, instance)
        if problem is not None:
            raise ValueError(problem)


class _Call:
    """What is known while one value is checked."""

    def __init__(self) -> None:
        self.left = MOST_WORK
        self.is_spent = False
        self.depth = 0
        self.known: dict[tuple[str, str], str | None] = {}
        self.told: dict[tuple[str, str], Sequence[str]] = {}

    def spend(self, work: int) -> None:
        """Count what is about to be done."""
        self.left -= work
        self.is_spent = self.is_spent or self.left < 0


def _has_room(levels: int = 8) -> bool:
    """Return whether a reference can still be followed; the validator takes a ``RecursionError`` for a misfit."""
    try:
        return levels == 0 or _has_room(levels - 1)
    except RecursionError:
        return False


@frozen
class _Weight:
    """How much JSON something is: values of any kind, characters of texts, and schemas if it is one."""

    values: int
    chars: int
    schemas: int = 0


def _weight(value: object) -> _Weight:
    values = chars = 0
    left = [value]
    while left:
        one = left.pop()
        values += 1
        if isinstance(one, str):
            chars += len(one)
        elif isinstance(one, Mapping):
            chars += sum(map(len, one))
            left.extend(one.values())
        elif isinstance(one, list):
            left.extend(one)
    return _Weight(values, chars)


class _Outline:
    """
    The places of a schema: what they hold, where its references lead, and whether that is within the caps.

    Attributes:
        root: The schema as plain JSON.
        patterns: Every pattern with a place that has it.
        places: Reference to the pointer that it stands for.
        weights: Pointer to how much stands there, for the root and every place that is referred to.
        name_size: Size of the patterns of ``patternProperties``, which the validator matches by itself.
    """

    def __init__(self, where: str, schema: Mapping[str, object]) -> None:
        self._where = where
        try:
            self.root: dict[str, Any] = thaw(freeze_object(schema, "schema"))
        except (DataError, TypeError) as error:
            _refuse(where, "#", f"it is not JSON: {error}")
        self._schemas: dict[str, Any] = {}
        self._anchors: dict[str, str] = {}
        self._references: dict[str, str] = {}
        self.patterns: dict[str, str] = {}
        self.places: dict[str, str] = {}
        self.name_size = self._size = 0
        self._visit(self.root, "#")
        while new := [reference for reference in self._references if reference not in self.places]:
            for reference in new:
                self.places[reference] = self._resolved(reference, self._references[reference])
        self.weights = self._weighed({"#", *self.places.values()})
        if any(word in one for one in self._schemas.values() if isinstance(one, dict) for word in UNEVALUATED):
            self._count_ways()

    def _visit(self, top: object, at: str) -> None:
        """Look at the schema at a pointer and at all below it."""
        left = [(top, at)]
        while left:
            schema, place = left.pop()
            if place in self._schemas:
                continue
            self._schemas[place] = schema
            if len(self._schemas) > MOST_SCHEMAS:
                _refuse(self._where, at, f"it consists of more than {MOST_SCHEMAS:,} schemas")
            if not isinstance(schema, dict):
                continue
            self._look_at(schema, place)
            left.extend(_below_schema(schema, place))

    def _look_at(self, schema: dict[str, Any], at: str) -> None:
        if unfollowed := [word for word in UNFOLLOWED if word in schema]:
            _refuse(
                self._where,
                f"{at}/{unfollowed[0]}",
                f"{unfollowed[0]!r} is not followed; use '$ref' with '#/$defs/...'",
            )
        reference = schema.get("$ref")
        if isinstance(reference, str):
            if not reference.startswith("#"):
                _refuse(self._where, f"{at}/$ref", f"{reference!r} points outside of this schema; use '#/$defs/...'")
            self._references.setdefault(reference, f"{at}/$ref")
        if isinstance(schema.get("$anchor"), str):
            self._anchors[f"#{schema['$anchor']}"] = at
        if isinstance(schema.get("pattern"), str):
            self._measure(schema["pattern"], f"{at}/pattern")
        if isinstance(schema.get("patternProperties"), dict):
            for pattern in schema["patternProperties"]:
                self.name_size += self._measure(pattern, f"{at}/patternProperties")

    def _measure(self, pattern: str, at: str) -> int:
        size = _size_of(pattern)
        self._size += size
        if self._size > MOST_SIZE:
            _refuse(
                self._where, at, f"{pattern[:80]!r} is too large, with the other patterns: count what braces repeat"
            )
        self.patterns.setdefault(pattern, at)
        return size

    def _resolved(self, reference: str, at: str) -> str:
        """Return the pointer that a reference stands for, after a look at what is there."""
        if reference in self._anchors:
            return self._anchors[reference]
        for pointer in (reference, unquote(reference)):
            target: object = self.root
            for part in pointer.split("/")[1:] if pointer != "#" else ():
                target = _member(target, part.replace("~1", "/").replace("~0", "~"))
            if isinstance(target, dict | bool) and (pointer == "#" or pointer.startswith("#/")):
                self._visit(target, pointer)
                return pointer
        return _refuse(self._where, at, f"{reference!r} does not exist; use '#/$defs/...'")

    def _weighed(self, places: set[str]) -> dict[str, _Weight]:
        counts = dict.fromkeys(places, 0)
        for place in self._schemas:
            parts = place.split("/")
            for end in range(1, len(parts) + 1):
                above = "/".join(parts[:end])
                if above in counts:
                    counts[above] += 1
        return {at: attrs.evolve(_weight(self._schemas[at]), schemas=count) for at, count in counts.items()}

    def _count_ways(self) -> None:
        """
        Refuse a schema with more than 1,000 ways on which references lead to what holds for one value.

        What is "unevaluated" the validator finds out by itself, once for each way.
        """
        known: dict[str, int] = {}

        def ways(place: str) -> int:
            if place not in known:
                known[place] = MOST_WAYS + 1  # as long as it is counted
                known[place] = 1 + sum(map(ways, self._in_place(place)))
            return min(known[place], MOST_WAYS + 1)

        for place in self._schemas:
            if ways(place) > MOST_WAYS:
                words = " and ".join(map(repr, UNEVALUATED))
                _refuse(
                    self._where,
                    place,
                    f"beside {words}, references lead here to one value on more than {MOST_WAYS:,} ways",
                )

    def _in_place(self, place: str) -> Iterator[str]:
        schema = self._schemas[place]
        if isinstance(schema, dict):
            yield from (at for _, at in _below_schema({k: v for k, v in schema.items() if k in IN_PLACE}, place))
            if isinstance(schema.get("$ref"), str):
                yield self.places[schema["$ref"]]

    def renamed(self) -> dict[str, Any]:
        """Return the schema with another word for ``$ref``."""
        for schema in self._schemas.values():
            if isinstance(schema, dict) and isinstance(schema.get("$ref"), str):
                schema[REFERENCE] = schema.pop("$ref")
        return self.root

    def schema_at(self, place: str, way: Sequence[str | int]) -> Mapping[str, Any]:
        """Return the schema to which *way* leads from a place; an empty one where there is no schema."""
        found = functools.reduce(_member, way, self._schemas[place])
        return found if isinstance(found, dict) else {}


def _below_schema(schema: Mapping[str, object], at: str) -> Iterator[tuple[object, str]]:
    """Give the schemas that stand right below one, each with its pointer."""
    for word, value in schema.items():
        if word in NAMED_SCHEMAS and isinstance(value, dict):
            yield from (
                (one, f"{at}/{word}/{name.replace('~', '~0').replace('/', '~1')}")
                for name, one in value.items()
                if isinstance(one, dict | bool)
            )
        elif word in SCHEMAS:
            if isinstance(value, list):
                yield from ((one, f"{at}/{word}/{index}") for index, one in enumerate(value))
            else:
                yield value, f"{at}/{word}"


def _member(value: object, part: str | int) -> Any:
    """Return a member or item of a JSON value; ``None`` when there is none."""
    if isinstance(value, dict):
        return value.get(part)
    if isinstance(value, list) and str(part).isdecimal() and int(part) < len(value):
        return value[int(part)]
    return None


def _names(value: object) -> list[str]:
    return list(value) if isinstance(value, Mapping) else []


def _pattern(where: str, pattern: str, at: str) -> tuple[int, Validator]:
    """Return the size of a pattern, and what searches a text for it."""
    from jsonschema_rs import Draft202012Validator, RegexOptions, ValidationError

    try:
        return _size_of(pattern), Draft202012Validator({"pattern": pattern}, pattern_options=RegexOptions())
    except (ValidationError, ValueError):
        return _refuse(where, at, f"{pattern!r} is no regular expression without look-around and back-references")


def _size_of(pattern: str) -> int:
    """Return about how many states a pattern has: one for each character, ten for each class, times what braces say."""
    if len(pattern) > MOST_SIZE:
        return len(pattern)
    sizes, last, at = [0], 0, 0
    while at < len(pattern):
        char, at = pattern[at], at + 1
        if char == "{":
            end = pattern.find("}", at)
            counts = "".join([c if c.isdigit() else " " for c in pattern[at : end if end >= 0 else at]]).split()
            times = max([int(count[:9]) for count in counts], default=1)
            sizes[-1] = min(sizes[-1] + last * max(0, times - 1), MOST_SIZE + 1)
            at = max(at, end + 1)
        elif char == "(":
            sizes.append(0)
        elif char == ")" and len(sizes) > 1:
            last = sizes.pop()
            sizes[-1] += last
        else:
            last = CLASS if char in "\\[." else 1
            sizes[-1] += last
            at += char == "\\"
    return max(len(pattern), sum(sizes))


# --- sentences ------------------------------------------------------------------------------------------------------


def below(path: str, name: str | int) -> str:
    """Return the place of a member or item of the value at *path*."""
    return f"{path}.{name}" if path else str(name)


def _refuse(where: str, at: str, problem: str) -> NoReturn:
    msg = f"{where} at {at}: {problem}"
    raise DefinitionError(msg)


def _misfit(error: ValidationError) -> str:
    """Return the sentence for what stands in a schema and is none."""
    given, last = _start(repr(error.instance), SHORT_CHARS), error.instance_path[-1:]
    if last == ["type"]:
        return f"{given} is no type; the types are: array, boolean, integer, null, number, object, string"
    if error.schema_path == ["type"]:
        return f"a schema is an object, not {given}"
    return f"{given} does not fit the keyword: {_start(error.message)}"


def _start(text: str, most: int = SHOWN_CHARS) -> str:
    return text if len(text) <= most else f"{text[:most]}..."


def _cut_issues(sentences: Sequence[str]) -> list[str]:
    """Return at most a hundred sentences, and that there are more."""
    return [*sentences[:MOST_ISSUES], *([": and there is more"] if len(sentences) > MOST_ISSUES else ())]


def _fits_none(path: str, tries: Sequence[Sequence[str]]) -> str:
    """Return the sentence for a value that fits none of several forms; it may hold others like it, so it has an end."""
    here = f"{path}: should be "  # a form that wants another value altogether is far away
    nearest = min(tries, key=lambda said: (any(one.startswith(here) for one in said), len(said)))
    return f"{path}: fits none of the {len(tries)} allowed forms; the nearest one says: {_start('; '.join(nearest))}"


def _sentence(path: str, word: str, kind: Any, error: ValidationError) -> str:
    """Return the sentence for an error that stands for itself."""
    if word == "type":
        return f"{path}: should be {' or '.join(kind.types)}, not {_kind_of(error.instance)}"
    if word == "required":
        return f"{below(path, kind.property)}: is required"
    if word in LIMITS:
        given = "" if isinstance(error.instance, str | list | Mapping) else f", not {error.instance}"
        return f"{path}: {LIMITS[word].format(kind.limit)}{given}"
    if word in {"enum", "const"}:
        allowed = ", ".join(map(canonical, kind.options if word == "enum" else [kind.expected_value]))
        return f"{path}: should be one of {_start(allowed)}; not {_start(_format_value(error.instance), SHORT_CHARS)}"
    if word == "multipleOf":
        return f"{path}: should be a multiple of {kind.multiple_of}"
    return f"{path}: {OTHERS.get(word) or _start(error.message)}"


def _format_value(value: object) -> str:
    return canonical(value) if isinstance(value, str) else repr(value)


def _kind_of(value: object) -> str:
    """Return the name of a value's JSON type."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else "boolean"
    kinds = ((str, "string"), (int, "integer"), (Mapping, "object"), (list, "array"))
    return next((name for kind, name in kinds if isinstance(value, kind)), "number")


def refusal(tool_name: str, issues: Sequence[str], given: Mapping[str, object]) -> ToolInputError:
    """Return the error that lists *issues*, one sentence per offending field, and what was given."""
    shown = compact(given)
    if len(shown) > SHOWN_CHARS:
        shown = f"{shown[:SHOWN_CHARS]}... ({len(shown):,} characters in all)"
    msg = f"Invalid parameters for {tool_name}: {'; '.join(issues)}\nThe input was: {shown}"
    return ToolInputError(msg, tool_name=tool_name, issues=tuple(issues))


# --- the tools of the engine itself ---------------------------------------------------------------------------------

STRING = {"type": "string"}


def object_schema(required: tuple[str, ...] = (), **properties: object) -> JsonDict:
    """Return the schema of an object that has these members and no others."""
    schema = {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}
    return freeze_object(schema)


def described(schema: Mapping[str, object], text: str) -> dict[str, Any]:
    """Return *schema* with a description."""
    return {**schema, "description": text}


def validator(
    tool_name: str, schema: JsonDict, also: Callable[[JsonDict], Iterator[str]] | None = None
) -> Callable[[JsonDict], Validated]:
    """
    Return a function that checks a tool's inputs, and raises ``ToolInputError``; its schema is compiled at the first call.

    *also* looks at inputs that fit and gives what else is wrong.
    """
    compiled = functools.cache(lambda: JsonSchema(f"input_schema of tool {tool_name!r}", schema))

    def validate(value: JsonDict) -> Validated:
        issues = compiled().issues(value)
        if also is not None and not issues:
            issues.extend(also(value))
        return _validated_or_refused(tool_name, issues, value)

    return validate


# --- the input of a tool --------------------------------------------------------------------------------------------

PROPERTY_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
UNFIT_AT_TOP = ("anyOf", "oneOf", "allOf", "not", "enum", "$ref")


class SchemaInputs:
    """
    Validates inputs against a JSON Schema. The validated value is the input itself; defaults are not filled in.

    Args:
        tool_name: For messages.
        schema: A JSON Schema of an object.

    Raises:
        DefinitionError: when the schema cannot be checked, or no provider would accept it.
    """

    def __init__(self, tool_name: str, schema: Mapping[str, object]) -> None:
        try:
            self.schema = freeze_object({"type": "object", "properties": {}, **schema}, "input_schema")
        except (DataError, TypeError) as error:
            msg = f"input_schema of tool {tool_name!r} is not JSON: {error}"
            raise DefinitionError(msg) from error
        self._name = tool_name
        check_providers(tool_name, self.schema)
        self._checked = JsonSchema(f"input_schema of tool {tool_name!r}", self.schema)

    def validate(self, value: JsonDict) -> Validated:
        """
        Return the input as it is, when it fits.

        Raises:
            ToolInputError: listing every field with its problem.
        """
        return _validated_or_refused(self._name, self._checked.issues(value), value)


def _validated_or_refused(tool_name: str, issues: Sequence[str], value: JsonDict) -> Validated:
    if issues:
        raise refusal(tool_name, [issue.removeprefix(": ") for issue in issues], value)
    return Validated(value, value)


def check_providers(tool_name: str, schema: Mapping[str, Any]) -> None:
    """
    Refuse a schema that every provider would answer with an error at the first step.

    Raises:
        DefinitionError: when the top is not a plain object, or a parameter's name has other characters than they take.
    """
    problem = ""
    if schema.get("type") != "object":
        problem = f"its type is {schema.get('type')!r}; the input of a tool is an object"
    elif unfit := [word for word in UNFIT_AT_TOP if word in schema]:
        problem = f"providers refuse {unfit[0]!r} at the top; put it below a property"
    elif strange := [n for n in schema.get("properties", {}) if not PROPERTY_NAME.fullmatch(n)]:
        problem = f"providers refuse the parameter name {strange[0]!r}; use up to 64 letters, digits, '_', '.' and '-'"
    if problem:
        msg = f"input_schema of tool {tool_name!r} does not fit: {problem}"
        raise DefinitionError(msg)
