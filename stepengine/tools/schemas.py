"""
JSON Schemas from users and third parties: validation in bounded time, with the keywords of ``jsonschema``.

That package is imported when the first schema is compiled. It implements most keywords, but this module traverses schemas and
values itself, since a validation by the package has no limit: its patterns backtrack, it follows a reference again on each
path to it, and its messages repeat invalid values. Here all work is counted, a reference is checked once for each value, and
patterns run on Rust's engine, which cannot backtrack. No reference leaves the schema.
"""

from __future__ import annotations

import base64
import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias
from urllib.parse import unquote

from attrs import frozen

from stepengine.data.alike import list_names
from stepengine.data.json import JsonDict, JsonValue, canonical, compact, freeze_object
from stepengine.data.schemas import find_subschemas
from stepengine.data.tools import Validated
from stepengine.data.visible import cut_after
from stepengine.errors import DataError, DefinitionError, ToolInputError

if TYPE_CHECKING:
    from pydantic_core import SchemaValidator

UNFOLLOWED = ("$dynamicRef", "$recursiveRef")
OLD_DRAFTS = re.compile(r"https?://json-schema\.org/draft-0([3467])/schema#?")
PART_OF_PATTERN = re.compile(r"\\c[A-Za-z]|\\.|\[\^?\]?|--|-\\[dwsDWS]|.", re.DOTALL)

MAX_SCHEMAS = 10_000
"""Schemas of real tools have some hundred parts; compiling ten thousand takes about a second."""
MAX_PATTERN_STATES = 50_000
"""All patterns of a schema together. A guess: far above real ones, and still compiled in a fraction of a second."""
MAX_ISSUES = 100
"""More problems of one value than a model reads; the first ones tell what is wrong."""
MOST_WORK = 2_000_000
"""Keywords to be looked at for one value, half a microsecond each: once to decide whether it fits, once to say what is wrong."""
SHOWN_CHARS, SHORT_CHARS = 1_000, 100
"""A value in a message has a screen at most, and a short one a line: a model reads them with each attempt."""
CLASS, STEPS, CHARS = 10, 100, 100
"""The size of a class in a pattern; what else is as much work as a keyword: states times characters of a search, characters shown."""
ESCAPED_CLASSES = {
    "d": "0-9",
    "w": "0-9A-Za-z_",
    "s": r"\t-\r \u00A0\u1680\u2000-\u200A\u2028\u2029\u202F\u205F\u3000\uFEFF",
}

KEYWORDS = (
    *("type", "const", "enum", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    *("minLength", "maxLength", "minItems", "maxItems", "uniqueItems", "minProperties", "maxProperties"),
    *("required", "dependentRequired", "properties", "patternProperties", "additionalProperties", "propertyNames"),
    *("items", "additionalItems", "prefixItems", "contains", "contentEncoding", "contentMediaType"),
    *("dependencies", "dependentSchemas", "allOf", "anyOf", "oneOf", "not", "if"),
    *("unevaluatedProperties", "unevaluatedItems", "pattern"),
)
"""In the order in which they are looked at, and journals have what they said."""
TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
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
    "contains": "holds no item, or too many, of the form that it should contain",
    "false": "is not allowed",
}
TOO_LONG = "takes too long to be checked against its schema"


class JsonSchema:
    """
    A compiled JSON Schema.

    ``$schema`` selects draft 4, 6 or 7; every other schema is of draft 2020-12. ``$ref`` refers to a pointer or an ``$anchor``
    in the same schema. ``format`` is not checked.

    Args:
        where: The name of the schema for messages, such as ``"input_schema of tool 'x'"``.
        schema: The schema as JSON.

    Raises:
        DefinitionError: If it is not a valid schema, refers to another document, or is too large to be checked.
    """

    def __init__(self, where: str, schema: Mapping[str, object]) -> None:
        outline = _SchemaIndex(where, schema)
        uri = outline.root.get("$schema")
        old = OLD_DRAFTS.fullmatch(uri) if isinstance(uri, str) else None
        if old is not None and old[1] == "3":
            _raise_schema_error(where, "#/$schema", "draft 3 is not supported; use draft 4, 6, 7 or 2020-12")
        draft = _load_draft(old[1] if old else "202012")
        self._rules = _Rules(draft.keywords, draft.is_type, outline.targets)
        for pattern, at in outline.patterns.items():
            self._rules.compile_pattern(pattern, where, at)
        draft.check_schemas(where, outline.schemas)
        self._root = outline.root

    def issues(self, value: JsonValue, path: str = "") -> list[str]:
        """
        Return one sentence for each invalid part of a value, at most 100; an empty list for a valid value.

        Args:
            value: The value.
            path: The path of the value, for the sentences.
        """
        return self._rules.find_issues(value, self._root, path)


# --- keywords: of jsonschema, and those that it would decide without a bound, or of which journals say something else ----

Keyword: TypeAlias = "Callable[[Any, Any, Any, Any], Iterable[Any]]"
"""Takes a walk, the keyword's value, the instance and the schema; returns a non-empty iterable if the instance is invalid."""
Form: TypeAlias = "dict[str, Any] | bool"
MISFIT = (None,)
KINDS = {"object": dict, "array": list, "string": str, "boolean": bool, "null": type(None)}


def _has_json_type(value: object, name: str) -> bool:
    """
    Return True if a value has the given JSON type.

    jsonschema's own check panics on stack overflow, and that panic is not an ``Exception``.
    """
    if name in KINDS:
        return isinstance(value, KINDS[name])
    if isinstance(value, float):
        return name == "number" or value.is_integer()
    return isinstance(value, int) and not isinstance(value, bool)


def _has_json_type_of_draft_4(value: object, name: str) -> bool:
    """Return True if a value has the given JSON type in draft 4, in which 1.0 is no integer."""
    return _has_json_type(value, name) and not (name == "integer" and isinstance(value, float))


def _find_type_misfit(walk: _Walk, types: str | list[str], instance: object, _: object) -> Sequence[None]:
    """Return a misfit if the instance has none of *types*, which are names of JSON types."""
    if isinstance(types, str):
        return () if walk.is_type(instance, types) else MISFIT
    return () if any(walk.is_type(instance, one) for one in types) else MISFIT


def _with_work_count(decide: Keyword) -> Keyword:
    """Return *decide* with one change: for an invalid instance, it also counts the work of the message, which repeats the instance."""

    def decide_and_count_work(walk: _Walk, value: object, instance: object, schema: object) -> Sequence[None]:
        """Return a misfit if *decide* yields one, after counting the work of its message."""
        for _ in decide(walk, value, instance, schema):
            walk.judge.spend_work(_count_work(instance))
            return MISFIT
        return ()

    return decide_and_count_work


def _find_multiple_of_misfit(walk: _Walk, divisor: float, instance: float, _: object) -> Sequence[None]:
    """Return a misfit unless a number is a multiple of *divisor*, computed exactly from its decimal digits."""
    if not walk.is_type(instance, "number"):
        return ()
    if isinstance(divisor, int) and isinstance(instance, int):
        return MISFIT if instance % divisor else ()
    from fractions import Fraction

    walk.judge.spend_work(20)
    return MISFIT if Fraction(str(instance)) % Fraction(str(divisor)) else ()  # by its digits, 0.3 is a multiple of 0.1


def _find_unique_items_misfit(walk: _Walk, unique: object, instance: object, _: object) -> Sequence[None]:
    """Return a misfit if two items are equal as JSON; 1 and 1.0 are equal."""
    if not unique or not isinstance(instance, list):
        return ()
    walk.judge.spend_work(4 * _count_work(instance))
    texts = {one if isinstance(one, str) else (canonical(_normalize_numbers(one)),) for one in instance}
    return MISFIT if len(texts) < len(instance) else ()


def _find_property_misfits(walk: _Walk, properties: dict[str, Form], instance: object, _: object) -> Iterator[Any]:
    """Yield the misfits in the values of the members that ``properties`` declares."""
    if isinstance(instance, dict):
        for name in walk.member_names(instance) if len(instance) <= len(properties) else properties:
            if name in properties and name in instance:
                yield from walk.descend(instance[name], properties[name], name)


def _find_pattern_property_misfits(
    walk: _Walk, patterns: dict[str, Form], instance: object, _: object
) -> Iterator[Any]:
    """Yield the misfits of each member under every schema whose pattern matches the member's name."""
    if isinstance(instance, dict):
        for pattern, form in patterns.items():
            for name in walk.member_names(instance):
                if walk.judge.matches(pattern, name):
                    yield from walk.descend(instance[name], form, name)


def _find_member_misfits(
    walk: _Walk, additional_schema: Form, instance: object, schema: dict[str, Any]
) -> Iterator[Any]:
    """Yield the misfits of all members, under ``properties`` and ``patternProperties``, else under *additional_schema*."""
    if not isinstance(instance, dict):
        return
    walk.judge.spend_work(len(instance))
    has_others = False
    for name in walk.member_names(instance):
        forms = list(_find_member_schemas(walk, name, schema))
        has_others = has_others or not forms
        for form in forms or ([] if additional_schema is False else [additional_schema]):
            yield from walk.descend(instance[name], form, name)
    if has_others and additional_schema is False:
        yield None


def _find_member_schemas(walk: _Walk, name: str, schema: dict[str, Any]) -> Iterator[Form]:
    """Yield the schemas that ``properties`` and ``patternProperties`` have for a member."""
    properties = schema.get("properties", {})
    if name in properties:
        yield properties[name]
    for pattern, form in schema.get("patternProperties", {}).items():
        if walk.judge.matches(pattern, name):
            yield form


def _find_misfits_after_prefix(
    walk: _Walk, items_schema: Form, instance: object, schema: dict[str, Any]
) -> Iterator[Any]:
    """Yield the misfits under *items_schema* in the items after those of ``prefixItems``."""
    if isinstance(instance, list):
        for index in range(len(schema.get("prefixItems", ())), len(instance)):
            yield from walk.descend(instance[index], items_schema, index)


def _find_additional_item_misfits(
    walk: _Walk, items_schema: Form, instance: object, schema: dict[str, Any]
) -> Iterator[Any]:
    """Yield the misfits under *items_schema* in the items after those of a list of ``items`` schemas."""
    listed = schema.get("items")
    if not isinstance(instance, list) or not isinstance(listed, list):
        return
    if items_schema is False and len(instance) > len(listed):
        yield None
    for index in range(len(listed), 0 if items_schema is False else len(instance)):
        yield from walk.descend(instance[index], items_schema, index)


def _find_property_name_misfit(walk: _Walk, names_schema: Form, instance: object, _: object) -> Sequence[None]:
    """Return a misfit if the name of a member does not fit *names_schema*."""
    if not isinstance(instance, dict):
        return ()
    return MISFIT if any(walk.judge.descend(name, names_schema) for name in instance) else ()


def _find_any_of_misfit(walk: _Walk, forms: list[Form], instance: object, _: object) -> Sequence[None]:
    """Return a misfit if the instance fits none of *forms*."""
    for form in forms:  # without a comprehension, whose frame would count where values are deep
        if not walk.judge.descend(instance, form):
            return ()
    return MISFIT


def _find_one_of_misfit(walk: _Walk, forms: list[Form], instance: object, _: object) -> Sequence[None]:
    """Return a misfit unless the instance fits exactly one of *forms*."""
    fitting = 0
    for form in forms:
        fitting += not walk.judge.descend(instance, form)
    return () if fitting == 1 else MISFIT


def _find_pattern_misfit(walk: _Walk, pattern: str, instance: object, _: object) -> Sequence[None]:
    """Return a misfit if the instance is a text without a match of *pattern*."""
    return MISFIT if isinstance(instance, str) and not walk.judge.matches(pattern, instance) else ()


def _find_unevaluated_part_misfit(
    walk: _Walk, rest_schema: Form, instance: object, schema: dict[str, Any], container: type
) -> Sequence[None]:
    """Return a misfit if a member or item that no other keyword evaluates does not fit *rest_schema*."""
    return (
        MISFIT
        if isinstance(instance, container) and walk.judge.find_unevaluated_misfits(instance, rest_schema, schema)
        else ()
    )


def _find_content_encoding_misfit(walk: _Walk, encoding: str, instance: object, _: object) -> Sequence[None]:
    """Return a misfit if the instance is a text that is not valid in the content *encoding*."""
    return MISFIT if isinstance(instance, str) and _decode_content(walk, encoding, instance) is None else ()


def _find_content_media_type_misfit(
    walk: _Walk, media_type: str, instance: object, schema: dict[str, Any]
) -> Sequence[None]:
    """Return a misfit if the instance is a text that should contain JSON and does not."""
    if media_type != "application/json" or not isinstance(instance, str):
        return ()
    from pydantic_core import from_json

    content = _decode_content(walk, schema.get("contentEncoding", ""), instance)
    try:
        if content is not None:  # otherwise its encoding is what is wrong
            from_json(content, allow_inf_nan=False, cache_strings="none")
    except ValueError:
        return MISFIT
    return ()


def _decode_content(walk: _Walk, encoding: str, text: str) -> bytes | None:
    """Return the decoded bytes of a text, ``None`` if it cannot be decoded; with an unknown encoding, the text as bytes."""
    walk.judge.spend_work(len(text) // CHARS)
    decoders: dict[str, Callable[[str], bytes]] = {
        "base64": functools.partial(base64.b64decode, validate=True),
        "base64url": lambda given: base64.b64decode(given, altchars=b"-_", validate=True),
        "base32": base64.b32decode,
        "base16": base64.b16decode,
    }
    try:
        return decoders[encoding](text) if encoding in decoders else text.encode()
    except ValueError:
        return None


OWN_KEYWORDS: dict[str, Keyword] = {
    "type": _find_type_misfit,
    "multipleOf": _find_multiple_of_misfit,
    "uniqueItems": _find_unique_items_misfit,
    "additionalItems": _find_additional_item_misfits,
    "properties": _find_property_misfits,
    "patternProperties": _find_pattern_property_misfits,
    "additionalProperties": _find_member_misfits,
    "propertyNames": _find_property_name_misfit,
    "anyOf": _find_any_of_misfit,
    "oneOf": _find_one_of_misfit,
    "pattern": _find_pattern_misfit,
    "unevaluatedProperties": functools.partial(_find_unevaluated_part_misfit, container=dict),
    "unevaluatedItems": functools.partial(_find_unevaluated_part_misfit, container=list),
}
BELOW = frozenset({"items", "prefixItems", "dependencies", "dependentSchemas", "allOf", "if"})
"""Keywords of jsonschema that only apply other schemas, to the value or to its parts."""
CONTENT: dict[str, Keyword] = {
    "contentEncoding": _find_content_encoding_misfit,
    "contentMediaType": _find_content_media_type_misfit,
}


@functools.cache
def _load_draft(name: str) -> _Draft:
    """Return the keyword functions, type test and meta-schema of a draft, cached. This imports jsonschema."""
    import jsonschema

    theirs: Any = getattr(jsonschema, f"Draft{name}Validator")
    known = {word: decide if word in BELOW else _with_work_count(decide) for word, decide in theirs.VALIDATORS.items()}
    known |= {word: decide for word, decide in OWN_KEYWORDS.items() if word in known}
    if name == "202012":  # of which the draft says that it may be written as before
        known |= {
            "items": _find_misfits_after_prefix,
            "dependencies": jsonschema.Draft7Validator.VALIDATORS["dependencies"],
        }
    elif name != "4":
        known |= CONTENT
    keywords = {word: known[word] for word in KEYWORDS if word in known}
    return _Draft(keywords, _has_json_type_of_draft_4 if name == "4" else _has_json_type, theirs.META_SCHEMA)


class _Draft:
    """
    A draft of JSON Schema.

    Attributes:
        keywords: The functions that check values, by keyword.
        is_type: Returns whether a value has a JSON type.
    """

    def __init__(self, keywords: Mapping[str, Keyword], is_type: Callable[[Any, str], bool], meta: Any) -> None:
        self.keywords, self.is_type = keywords, is_type
        self._a_schema = {"type": meta["type"]}
        self._documents = {"": meta}
        self._shapes = dict(self._iterate_keyword_schemas(meta))
        self._rules = _Rules(keywords, is_type, {})

    def _iterate_keyword_schemas(self, meta: Any) -> Iterator[tuple[str, Form]]:
        """Yield each keyword with the schema of its value from the meta-schema; first load the documents of the meta-schema."""
        from jsonschema_specifications import REGISTRY

        for part in meta.get("allOf", ()):
            self._documents[part["$ref"]] = REGISTRY.contents(meta["$id"].removesuffix("schema") + part["$ref"])
        for document in self._documents.values():
            for word, shape in document["properties"].items():
                yield word, self._inline_references(shape, document)

    def _inline_references(self, shape: Any, document: Any) -> Any:
        """Return the schema of a keyword's value with references replaced by their targets; a nested schema becomes a type check."""
        if isinstance(shape, list):
            return [self._inline_references(one, document) for one in shape]
        if not isinstance(shape, dict):
            return shape
        if "$dynamicRef" in shape or shape.get("$ref") == "#":
            return self._a_schema
        found = {word: self._inline_references(value, document) for word, value in shape.items() if word != "$ref"}
        if "$ref" in shape:
            name, _, pointer = shape["$ref"].partition("#")
            there = self._documents[name] if name else document
            target = functools.reduce(_find_member, pointer.split("/")[1:], there)
            found = {**self._inline_references(target, there), **found}
        return found

    def check_schemas(self, where: str, schemas: Mapping[str, object]) -> None:
        """Raise ``DefinitionError`` if one of *schemas*, the parts of one schema by pointer, is invalid."""
        for place, schema in schemas.items():
            for word, value in schema.items() if isinstance(schema, dict) else ():
                if word in self._shapes:
                    self._check_keyword_value(where, place, word, value)

    def _check_keyword_value(self, where: str, pointer: str, word: str, value: object) -> None:
        """Raise ``DefinitionError`` if the value of a keyword is invalid or contains an invalid subschema."""
        for one, at in find_subschemas(word, value, pointer):
            if not isinstance(one, dict | bool):
                _raise_schema_error(where, at, f"a schema must be an object, not {cut_after(repr(one), SHORT_CHARS)}")
        shape = self._shapes[word]
        issues = self._rules.find_issues(value, shape, word)
        if issues:
            given = cut_after(repr(value), SHORT_CHARS)
            problem = f"{given} does not fit the keyword: {issues[0].removeprefix(f'{word}: ')}"
            if word == "type":
                problem = f"{given} is not a type; valid types: {list_names(sorted(TYPES), given)}"
            elif shape is self._a_schema:
                problem = f"a schema must be an object, not {given}"
            _raise_schema_error(where, f"{pointer}/{word}", problem)


# --- walks ----------------------------------------------------------------------------------------------------------


class _CheckLimitExceeded(Exception):
    """The check exceeds its limit of work."""


@frozen
class _Target:
    """The schema to which a reference resolves."""

    place: str
    schema: Form


@frozen
class _Steps:
    """The compiled steps that check a schema: its keywords with their values, a reference, and the work."""

    keywords: tuple[tuple[str, Keyword, Any], ...]
    target: _Target | None
    work: int


class _Rules:
    """
    The keywords of a draft and the compiled schemas and patterns.

    Schemas are identified by their ``id()``, so they must exist as long as this object.
    """

    def __init__(
        self, keywords: Mapping[str, Keyword], is_type: Callable[[Any, str], bool], targets: Mapping[str, _Target]
    ) -> None:
        self.is_type = is_type
        self.steps = {id(True): _Steps((), None, 1), id(False): _Steps((("false", lambda *_: MISFIT, None),), None, 1)}
        self._keywords = keywords
        self._targets = targets
        self._patterns: dict[str, tuple[int, SchemaValidator]] = {}

    def compile_steps(self, schema: Any) -> _Steps:
        """Compile a schema to its check steps, cache them by the schema's ``id()``, and return them."""
        words = {*schema}
        if schema.get("additionalProperties", True) is True:
            words.discard("additionalProperties")
        else:
            words -= {"properties", "patternProperties"}
        steps = [(word, decide, schema[word]) for word, decide in self._keywords.items() if word in words]
        if _reports_required_last(schema):
            places = [word for word, _, _ in steps]
            steps.insert(places.index("additionalProperties"), steps.pop(places.index("required")))
        target = self._targets[schema["$ref"]] if isinstance(schema.get("$ref"), str) else None
        made = self.steps[id(schema)] = _Steps(
            tuple(steps), target, 1 + sum([_count_keyword_work(word, value) for word, _, value in steps])
        )
        return made

    def compile_pattern(self, pattern: str, where: str = "", pointer: str = "") -> tuple[int, SchemaValidator]:
        """Return (number of states, compiled form) of a pattern, cached; raise ``DefinitionError`` for an invalid pattern."""
        if pattern not in self._patterns:
            from pydantic_core import SchemaError, SchemaValidator, core_schema

            schema = core_schema.str_schema(pattern=_to_rust_pattern(pattern), regex_engine="rust-regex")
            try:
                self._patterns[pattern] = _estimate_pattern_states(pattern), SchemaValidator(schema)
            except SchemaError:
                _raise_schema_error(
                    where,
                    pointer,
                    f"{pattern!r} is not a valid regular expression here; look-around and back-references are not supported",
                )
        return self._patterns[pattern]

    def find_issues(self, value: object, schema: Form, path: str) -> list[str]:
        """Return a sentence for each invalid part of a value; one sentence if the check takes too long or is nested too deeply."""
        judge = _ValueCheck(self)
        judge.known[id(schema), id(value)] = False
        try:
            if not judge.descend(value, schema):
                return []
        except (_CheckLimitExceeded, RecursionError):
            return [f"{path}: {TOO_LONG}"]
        judge.left = MOST_WORK
        try:
            said = _IssueReport(judge, path, {}).find_reference_issues(value, _Target("#", schema))
        except _CheckLimitExceeded:
            return [f"{path}: {TOO_LONG}"]
        except RecursionError:
            return [f"{path}: does not fit its schema, and is nested too deeply to say where"]
        return [*said] or [f"{path}: does not fit its schema"]


class _ValueCheck:
    """
    Decides whether one value is valid, and stops at the first violation.

    Keywords of jsonschema use it as their validator; it has the members of that protocol that they need.
    """

    def __init__(self, rules: _Rules) -> None:
        self.judge = self
        self.left = MOST_WORK
        self.rules = rules
        self.is_type = rules.is_type
        self.known: dict[tuple[int, int], bool] = {}
        self._evaluated: dict[tuple[int, int, bool], set[Any]] = {}

    def spend_work(self, work: int) -> None:
        """Subtract *work* from the remaining work; raise ``_CheckLimitExceeded`` if that is not enough."""
        self.left -= work
        if self.left < 0:
            raise _CheckLimitExceeded

    def descend(
        self, instance: object, schema: Form, path: str | int | None = None, schema_path: object = None
    ) -> Sequence[None]:
        """Return an empty sequence if *instance* is valid, else a misfit; it is invalid under a reference that is being followed."""
        asked = []
        while True:  # along references, for which a call each would be too many where values are deep
            steps = self.rules.steps.get(id(schema)) or self.rules.compile_steps(schema)
            self.spend_work(steps.work)
            for _, decide, value in steps.keywords:
                for _ in decide(self, value, instance, schema):
                    return MISFIT
            if steps.target is None:
                break
            schema = steps.target.schema
            key = (id(schema), id(instance))
            if key in self.known:
                if not self.known[key]:
                    return MISFIT
                break
            self.known[key] = False
            asked.append(key)
        for key in asked:
            self.known[key] = True
        return ()

    def member_names(self, instance: dict[str, Any]) -> Iterable[str]:
        """Return the names of an object's members, in the order of the object."""
        return instance

    def evolve(self, *, schema: Form) -> _SubschemaValidator:
        """Return a validator for *schema*, with the same rules and limit of work."""
        return _SubschemaValidator(self, schema)

    def matches(self, pattern: str, text: str) -> bool:
        """Return whether *pattern* matches a part of *text*."""
        size, search = self.rules.compile_pattern(pattern)
        self.spend_work(1 + size * len(text) // STEPS)
        return search.isinstance_python(text)

    def find_unevaluated_misfits(self, instance: Any, rest_schema: Form, schema: dict[str, Any]) -> list[str | int]:
        """Return the unevaluated members or items of an instance that do not match *rest_schema*."""
        evaluated = self._find_evaluated_keys(instance, schema, is_inner=False)
        names = instance if isinstance(instance, dict) else range(len(instance))
        return [name for name in names if name not in evaluated and self.descend(instance[name], rest_schema)]

    def _find_evaluated_keys(self, instance: Any, schema: Form, *, is_inner: bool = True) -> set[Any]:
        """Return the member names or item indexes that a schema and its matching in-place subschemas evaluate, cached."""
        if isinstance(schema, bool):
            return set()
        key = (id(schema), id(instance), is_inner)
        if key in self._evaluated:
            return self._evaluated[key]
        self.spend_work(1 + len(instance))
        find_keys = self._find_evaluated_names if isinstance(instance, dict) else self._find_evaluated_indexes
        found = self._evaluated[key] = find_keys(instance, schema, is_inner=is_inner)
        for form in self._iterate_in_place_subschemas(instance, schema):
            if not self.descend(instance, form):
                found |= self._find_evaluated_keys(instance, form)
        return found

    def _find_evaluated_names(self, instance: dict[str, Any], schema: dict[str, Any], *, is_inner: bool) -> set[Any]:
        """Return the members that the schema's own keywords evaluate; for an inner schema, ``unevaluatedProperties`` counts, too."""
        if "additionalProperties" in schema or (is_inner and "unevaluatedProperties" in schema):
            return set(instance)
        return {name for name in instance if any(True for _ in _find_member_schemas(self, name, schema))}

    def _find_evaluated_indexes(self, instance: list[Any], schema: dict[str, Any], *, is_inner: bool) -> set[Any]:
        """Return the items that the schema's own keywords evaluate; for an inner schema, ``unevaluatedItems`` counts, too."""
        if "items" in schema or (is_inner and "unevaluatedItems" in schema):
            return set(range(len(instance)))
        found = set(range(len(schema.get("prefixItems", ()))))
        if "contains" in schema:
            found |= {index for index, one in enumerate(instance) if not self.descend(one, schema["contains"])}
        return found

    def _iterate_in_place_subschemas(self, instance: Any, schema: dict[str, Any]) -> Iterator[Form]:
        """Yield the subschemas for the same value, matching or not; of ``if``, only the branch that applies."""
        for word in ("allOf", "anyOf", "oneOf"):
            yield from schema.get(word, ())
        yield from [form for name, form in schema.get("dependentSchemas", {}).items() if name in instance]
        if "if" in schema:
            yield schema["if"]
            yield schema.get("else" if self.descend(instance, schema["if"]) else "then", True)
        steps = self.rules.steps[id(schema)]
        if steps.target is not None:
            yield steps.target.schema


class _SubschemaValidator:
    """The validator of one schema, in the form that keywords of jsonschema call."""

    def __init__(self, judge: _ValueCheck, schema: Form) -> None:
        self._judge = judge
        self._schema = schema

    def is_valid(self, instance: object) -> bool:
        return not self._judge.descend(instance, self._schema)


class _IssueReport:
    """
    Describes the problems of the value at a path, in sentences.

    Keywords use it as their validator. Each of their results is a sentence, or a misfit for which a sentence is made.
    """

    def __init__(
        self,
        judge: _ValueCheck,
        path: str,
        cached_issues: dict[tuple[int, int, str], Sequence[str]],
        *,
        is_referred: bool = False,
    ) -> None:
        self.judge = judge
        self.path = path
        self.is_referred = is_referred
        self.is_type = judge.is_type
        self.evolve = judge.evolve
        self._told = cached_issues

    def descend(
        self, instance: object, schema: Form, path: str | int | None = None, schema_path: object = None
    ) -> Iterator[str]:
        """Yield a sentence for each invalid part of *instance*."""
        place = self.path if path is None else member_path(self.path, path)
        at = _IssueReport(self.judge, place, self._told, is_referred=self.is_referred)
        steps = self.judge.rules.steps.get(id(schema)) or self.judge.rules.compile_steps(schema)
        self.judge.spend_work(steps.work)
        for word, decide, value in steps.keywords:
            is_said = False
            for one in decide(at, value, instance, schema):
                if isinstance(one, str):
                    yield one
                elif not is_said:
                    is_said = True
                    yield from at._describe_violation(word, value, instance, schema)
        if steps.target is not None:
            yield from _IssueReport(self.judge, place, self._told, is_referred=True).find_reference_issues(
                instance, steps.target
            )

    def member_names(self, instance: dict[str, Any]) -> Iterable[str]:
        """Return the names of an object's members in their order; below a reference, sorted, as journals have them."""
        return sorted(instance) if self.is_referred else instance

    def find_reference_issues(self, instance: object, target: _Target) -> Sequence[str]:
        """Return the issues of an instance under the schema of a reference, cached; a reference to itself is an issue."""
        key = (id(target.schema), id(instance), self.path)
        if key in self._told or self.judge.known.get(key[:2]):
            return self._told.get(key, ())
        self._told[key] = (f"{self.path}: its schema {target.place!r} refers to itself without an end",)
        said = []
        for one in self.descend(instance, target.schema):
            said.append(one)
            if len(said) > MAX_ISSUES:
                break
        told = [*dict.fromkeys(said)]
        self._told[key] = [*told[:MAX_ISSUES], *([": and there is more"] if len(told) > MAX_ISSUES else ())]
        return self._told[key]

    def _describe_violation(self, word: str, value: Any, instance: Any, schema: Any) -> Iterable[str]:
        """Return the sentences for a keyword that *instance* violates; the violation is not checked again."""
        self.judge.spend_work(_count_work(value) + _count_work(instance))
        if word in SAYINGS:
            return SAYINGS[word](self, value, instance, schema)
        if word in LIMITS:
            return (f"{self.path}: {_format_limit_issue(word, value, instance, schema)}",)
        return (f"{self.path}: {OTHERS[word]}",)


_Walk: TypeAlias = "_ValueCheck | _IssueReport"


# --- a schema before it is used -------------------------------------------------------------------------------------


class _SchemaIndex:
    """
    The subschemas of a schema by pointer, with their references resolved and their size checked.

    Attributes:
        root: The schema as plain JSON, with sorted member names.
        schemas: The schema and all its subschemas, by pointer.
        targets: The target of each reference.
        patterns: Each pattern with the pointer of one of its uses.
    """

    def __init__(self, where: str, schema: Mapping[str, object]) -> None:
        self._where = where
        try:
            self.root: dict[str, Any] = _sort_members(freeze_object(schema, "schema"))
        except (DataError, TypeError) as error:
            _raise_schema_error(where, "#", f"it is not JSON: {error}")
        self.schemas: dict[str, Any] = {}
        self.patterns: dict[str, str] = {}
        self.targets: dict[str, _Target] = {}
        self._anchors: dict[str, str] = {}
        self._references: dict[str, str] = {}
        self._size = 0
        self._record_subschemas(self.root, "#")
        while new := [reference for reference in self._references if reference not in self.targets]:
            for reference in new:
                place = self._resolve_reference(reference, self._references[reference])
                self.targets[reference] = _Target(place, self.schemas[place])

    def _record_subschemas(self, top: object, pointer: str) -> None:
        """Record the schema at a pointer and all its subschemas; raise ``DefinitionError`` if there are too many."""
        left = [(top, pointer)]
        while left:
            schema, place = left.pop()
            if place in self.schemas:
                continue
            self.schemas[place] = schema
            if len(self.schemas) > MAX_SCHEMAS:
                _raise_schema_error(
                    self._where, pointer, f"it contains more than {MAX_SCHEMAS:,} schemas; make it smaller"
                )
            if isinstance(schema, dict):
                self._record_references_and_patterns(schema, place)
                for word, value in schema.items():
                    left.extend(find_subschemas(word, value, place))

    def _record_references_and_patterns(self, schema: dict[str, Any], pointer: str) -> None:
        """Record the references, anchor and patterns of a schema; raise ``DefinitionError`` for unsupported or outside references."""
        if unfollowed := [word for word in UNFOLLOWED if word in schema]:
            _raise_schema_error(
                self._where,
                f"{pointer}/{unfollowed[0]}",
                f"{unfollowed[0]!r} is not supported; use '$ref' with '#/$defs/...'",
            )
        reference = schema.get("$ref")
        if isinstance(reference, str):
            if not reference.startswith("#"):
                _raise_schema_error(
                    self._where, f"{pointer}/$ref", f"{reference!r} points outside of this schema; use '#/$defs/...'"
                )
            self._references.setdefault(reference, f"{pointer}/$ref")
        if isinstance(schema.get("$anchor"), str):
            self._anchors[f"#{schema['$anchor']}"] = pointer
        if isinstance(schema.get("pattern"), str):
            self._add_pattern(schema["pattern"], f"{pointer}/pattern")
        if isinstance(schema.get("patternProperties"), dict):
            for pattern in schema["patternProperties"]:
                self._add_pattern(pattern, f"{pointer}/patternProperties")

    def _add_pattern(self, pattern: str, pointer: str) -> None:
        """Record a pattern with its pointer; raise ``DefinitionError`` if all patterns together are too large."""
        self._size += _estimate_pattern_states(pattern)
        if self._size > MAX_PATTERN_STATES:
            _raise_schema_error(
                self._where,
                pointer,
                f"{pattern[:80]!r} makes the patterns of this schema too large; lower the counts in braces",
            )
        self.patterns.setdefault(pattern, pointer)

    def _resolve_reference(self, reference: str, at: str) -> str:
        """Record the target of a reference and return its pointer; raise ``DefinitionError`` if the target does not exist."""
        if reference in self._anchors:
            return self._anchors[reference]
        for pointer in (reference, unquote(reference)):
            target: object = self.root
            for part in pointer.split("/")[1:] if pointer != "#" else ():
                target = _find_member(target, part.replace("~1", "/").replace("~0", "~"))
            if isinstance(target, dict | bool) and (pointer == "#" or pointer.startswith("#/")):
                self._record_subschemas(target, pointer)
                return pointer
        return _raise_schema_error(self._where, at, f"{reference!r} does not exist; use '#/$defs/...'")


def _find_member(value: object, part: str | int) -> Any:
    """Return the member or item *part* of a JSON value; ``None`` if it does not exist."""
    if isinstance(value, dict):
        return value.get(part)
    if isinstance(value, list) and str(part).isdecimal() and int(part) < len(value):
        return value[int(part)]
    return None


def _sort_members(value: object) -> Any:
    """Return a plain copy of JSON with the members of objects sorted by name."""
    if isinstance(value, Mapping):
        return {name: _sort_members(value[name]) for name in sorted(value)}
    return [_sort_members(one) for one in value] if isinstance(value, list | tuple) else value


def _normalize_numbers(value: object) -> Any:
    """Return a copy of JSON in which whole floats are integers, so that equal numbers are encoded alike."""
    if isinstance(value, dict):
        return {name: _normalize_numbers(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_normalize_numbers(one) for one in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _count_work(value: object) -> int:
    """Return the work of traversing or showing a JSON value: its values, and one more for each 100 characters."""
    values = chars = 0
    left = [value]
    while left:
        one = left.pop()
        values += 1
        if isinstance(one, str):
            chars += len(one)
        elif isinstance(one, dict):
            chars += sum(map(len, one))
            left.extend(one.values())
        elif isinstance(one, list):
            left.extend(one)
    return values + chars // CHARS


def _reports_required_last(schema: dict[str, Any]) -> bool:
    """Return True if issues of ``required`` are reported after those of ``additionalProperties``, as journals have them."""
    is_closed = schema.get("additionalProperties") is False and "patternProperties" not in schema
    return is_closed and "properties" in schema and len(schema.get("required", ())) == 1


def _count_keyword_work(keyword: str, value: object) -> int:
    """Return the work of checking a keyword, without that of its subschemas."""
    if keyword in {"enum", "const", "dependentRequired", "dependencies"}:
        return _count_work(value)
    return 1 + len(value) if isinstance(value, list | dict) else 1


def _to_rust_pattern(pattern: str) -> str:
    """Return an ECMAScript pattern in the syntax of Rust's engine, in which classes and brackets have another meaning."""
    parts: list[str] = []
    is_class = False
    for part in PART_OF_PATTERN.findall(pattern):
        made = part
        if part[0] == "\\":
            made = _to_rust_escape(part)
        elif part.startswith("-\\"):  # a range that has no end
            made = ("\\-" if is_class else "-") + _to_rust_escape(part[1:])
        elif part[0] == "[":
            made = f"\\{part}" if is_class else part
            is_class = not (is_class and part.endswith("]"))
        elif is_class:
            is_class = part != "]"
            if part == "--":  # first it begins a range, later it ends one
                made = "\\--" if parts[-1][0] == "[" else "-\\-"
            elif part in "&~":
                made = f"\\{part}"
        parts.append(made)
    return "".join(parts)


def _to_rust_escape(escape: str) -> str:
    """Return a backslash escape of an ECMAScript pattern in Rust's syntax."""
    letter = escape[1]
    if letter.lower() in ESCAPED_CLASSES:
        return f"[{'^' if letter.isupper() else ''}{ESCAPED_CLASSES[letter.lower()]}]"
    if letter == "c" and escape != "\\c":
        return f"\\x{ord(escape[2]) % 32:02X}"
    return "\\c" if letter == "a" else escape  # a bell to Rust, and nothing to ECMAScript


def _estimate_pattern_states(pattern: str) -> int:
    """Return the approximate number of states of a pattern: 1 per character, 10 per class, times the repetitions."""
    if len(pattern) > MAX_PATTERN_STATES:
        return len(pattern)
    sizes, last, at = [0], 0, 0
    while at < len(pattern):
        char, at = pattern[at], at + 1
        if char == "{":
            end = pattern.find("}", at)
            counts = "".join([c if c.isdigit() else " " for c in pattern[at : end if end >= 0 else at]]).split()
            times = max([int(count[:9]) for count in counts], default=1)
            sizes[-1] = min(sizes[-1] + last * max(0, times - 1), MAX_PATTERN_STATES + 1)
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


def member_path(path: str, name: str | int) -> str:
    """Return the path of a member or item of the value at *path*."""
    return f"{path}.{name}" if path else str(name)


def _raise_schema_error(where: str, pointer: str, problem: str) -> NoReturn:
    """Raise ``DefinitionError`` for a *problem* of the schema *where* at a JSON pointer."""
    msg = f"{where} at {pointer}: {problem}"
    raise DefinitionError(msg)


Saying: TypeAlias = Callable[[_IssueReport, Any, Any, Any], Iterable[str]]


def _format_type_issue(report: _IssueReport, types: str | list[str], instance: object, _: object) -> Iterator[str]:
    """Yield the sentence for an instance that has none of *types*."""
    wanted = [one for one in TYPES if one in ([types] if isinstance(types, str) else types)]
    yield f"{report.path}: should be {' or '.join(wanted)}, not {_get_json_type_name(instance)}"


def _format_enum_issue(report: _IssueReport, options: list[object], instance: object, _: object) -> Iterator[str]:
    """Yield the sentence for an instance that is none of *options*."""
    allowed, given = ", ".join(map(canonical, options)), canonical(instance)
    if not isinstance(instance, str):
        given = repr(_sort_members(instance))
    yield f"{report.path}: should be one of {cut_after(allowed, SHOWN_CHARS)}; not {cut_after(given, SHORT_CHARS)}"


def _format_limit_issue(keyword: str, limit: float, instance: object, schema: Mapping[str, object]) -> str:
    """Return the sentence for a violated limit, without the path; a boolean ``exclusiveMinimum`` of draft 4 changes it."""
    strict = f"exclusive{keyword[0].upper()}{keyword[1:]}"
    if keyword in {"minimum", "maximum"} and schema.get(strict) is True:  # in draft 4
        keyword = strict
    if not keyword.endswith("imum"):
        return LIMITS[keyword].format(int(limit))
    return f"{LIMITS[keyword].format(limit)}, not {instance}"


def _format_required_issues(
    report: _IssueReport, names: list[str], instance: dict[str, object], _: object
) -> Iterator[str]:
    """Yield a sentence for each of *names* that *instance* lacks."""
    return (f"{member_path(report.path, name)}: is required" for name in names if name not in instance)


def _format_dependent_issues(
    report: _IssueReport, names: dict[str, list[str]], instance: dict[str, object], _: object
) -> Iterator[str]:
    """Yield a sentence for each missing member that a present member requires."""
    for name, others in names.items():
        if name in instance and isinstance(others, list):
            yield from _format_required_issues(report, others, instance, _)


def _format_unexpected_member_issues(
    report: _IssueReport, names: Iterable[str | int], schema: dict[str, Any]
) -> Iterator[str]:
    """Yield a sentence for each of *names*, with the declared parameters, the most similar first."""
    known = list(schema.get("properties", ()))
    return (
        f"{member_path(report.path, name)}: is not a parameter; the parameters are: {list_names(known, name)}"
        for name in names
    )


def _format_additional_member_issues(
    report: _IssueReport, _: object, instance: dict[str, object], schema: dict[str, Any]
) -> Iterator[str]:
    """Yield a sentence for each member that neither ``properties`` nor ``patternProperties`` declares."""
    return _format_unexpected_member_issues(
        report,
        [name for name in report.member_names(instance) if not [*_find_member_schemas(report, name, schema)]],
        schema,
    )


def _format_unevaluated_issues(
    report: _IssueReport, rest_schema: Form, instance: object, schema: dict[str, Any]
) -> Iterator[str]:
    """Yield a sentence for each unevaluated member that does not match *rest_schema*, or one sentence for all such items."""
    unexpected = report.judge.find_unevaluated_misfits(instance, rest_schema, schema)
    if isinstance(instance, dict):
        return _format_unexpected_member_issues(
            report, [name for name in report.member_names(instance) if name in unexpected], schema
        )
    return _format_disallowed_items_issue(report, "Unevaluated", len(unexpected))


def _format_disallowed_items_issue(report: _IssueReport, kind: str, count: int) -> Iterator[str]:
    """Yield the sentence for *count* items of a *kind*, such as additional, that are not allowed."""
    yield f"{report.path}: {kind} items are not allowed ({count} item{'s' if count > 1 else ''})"


def _format_property_name_issues(
    report: _IssueReport, names_schema: Form, instance: dict[str, object], _: object
) -> Iterator[str]:
    """Yield the sentences for member names that do not match the schema *names_schema*."""
    for name in report.member_names(instance):
        for said in report.descend(name, names_schema):
            place = report.path if names_schema is False else member_path(report.path, name)
            yield f"{place}: {said.removeprefix(f'{report.path}: ')}"


def _format_any_of_issue(report: _IssueReport, forms: list[Form], instance: object, _: object) -> Iterator[str]:
    """Yield the sentence for a value that matches none of *forms*, with its issues under the nearest form."""
    tries: list[list[str]] = []
    for form in forms:
        tries.append([*report.descend(instance, form)])  # noqa: PERF401 - a comprehension has a frame of its own
    here = f"{report.path}: should be "  # a form that wants another value altogether is far away
    nearest = min(tries, key=lambda said: (any(one.startswith(here) for one in said), len(said)))
    told = cut_after("; ".join(nearest), SHOWN_CHARS)
    yield f"{report.path}: fits none of the {len(tries)} allowed forms; the nearest one says: {told}"


def _format_one_of_issue(report: _IssueReport, forms: list[Form], instance: object, _: object) -> Iterator[str]:
    """Return the sentence for a value that matches none or several of *forms*."""
    fitting = [report.judge.descend(instance, form) for form in forms].count(())
    if not fitting:
        return _format_any_of_issue(report, forms, instance, _)
    return iter((f"{report.path}: fits {fitting} of the {len(forms)} forms, and exactly one is allowed",))


SAYINGS: dict[str, Saying] = {
    "type": _format_type_issue,
    "enum": _format_enum_issue,
    "const": lambda at, value, instance, _: _format_enum_issue(at, [value], instance, _),
    "multipleOf": lambda at, of, _, __: (f"{at.path}: should be a multiple of {of}",),
    "pattern": lambda at, pattern, _, __: (f"{at.path}: should match {pattern!r}",),
    "required": _format_required_issues,
    "dependentRequired": _format_dependent_issues,
    "dependencies": _format_dependent_issues,
    "additionalProperties": _format_additional_member_issues,
    "unevaluatedProperties": _format_unevaluated_issues,
    "additionalItems": lambda at, _, instance, schema: _format_disallowed_items_issue(
        at, "Additional", len(instance) - len(schema["items"])
    ),
    "unevaluatedItems": _format_unevaluated_issues,
    "propertyNames": _format_property_name_issues,
    "anyOf": _format_any_of_issue,
    "oneOf": _format_one_of_issue,
    "contentEncoding": lambda at, name, _, __: (f'{at.path}: it is not compliant with "{name}" content encoding',),
    "contentMediaType": lambda at, name, _, __: (f'{at.path}: it is not compliant with "{name}" media type',),
}
"""The functions that format the issues of a keyword; ``LIMITS`` and ``OTHERS`` have the keywords with a fixed sentence."""


def _get_json_type_name(value: object) -> str:
    if value is None or isinstance(value, bool):
        return "null" if value is None else "boolean"
    kinds = ((str, "string"), (int, "integer"), (Mapping, "object"), (list, "array"))
    return next((name for kind, name in kinds if isinstance(value, kind)), "number")


def make_tool_input_error(tool_name: str, issues: Sequence[str], call_input: Mapping[str, object]) -> ToolInputError:
    """Return the error for an invalid input, with the sentences *issues* and the input, cut to 1,000 characters."""
    shown = compact(call_input)
    if len(shown) > SHOWN_CHARS:
        shown = f"{shown[:SHOWN_CHARS]}... ({len(shown):,} characters in all)"
    msg = f"Invalid parameters for {tool_name}: {'; '.join(issues)}\nThe input was: {shown}"
    return ToolInputError(msg, tool_name=tool_name, issues=tuple(issues))


# --- the tools of the engine itself ---------------------------------------------------------------------------------

STRING = {"type": "string"}


def make_object_schema(required: tuple[str, ...] = (), **properties: object) -> JsonDict:
    """Return the schema of an object with only the members *properties*, of which *required* must be present."""
    schema = {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}
    return freeze_object(schema)


def with_description(schema: Mapping[str, object], text: str) -> dict[str, Any]:
    """Return *schema* with a description."""
    return {**schema, "description": text}


def make_validator(
    tool_name: str, schema: JsonDict, find_more_issues: Callable[[JsonDict], Iterator[str]] | None = None
) -> Callable[[JsonDict], Validated]:
    """
    Return a function that validates a tool's inputs and raises ``ToolInputError``; the schema is compiled at the first call.

    *find_more_issues* yields further issues of an input that matches the schema.
    """
    compiled = functools.cache(lambda: JsonSchema(f"input_schema of tool {tool_name!r}", schema))

    def validate(value: JsonDict) -> Validated:
        """Return a validated input; raise ``ToolInputError`` with all issues of an invalid one."""
        issues = compiled().issues(value)
        if find_more_issues is not None and not issues:
            issues.extend(find_more_issues(value))
        return _accept_or_raise(tool_name, issues, value)

    return validate


# --- the input of a tool --------------------------------------------------------------------------------------------

PROPERTY_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
UNFIT_AT_TOP = ("anyOf", "oneOf", "allOf", "not", "enum", "$ref")


class SchemaInputs:
    """
    Validates inputs against a JSON Schema. The validated value is the input itself; defaults are not added.

    Args:
        tool_name: The name of the tool, for messages.
        schema: A JSON Schema of an object.

    Raises:
        DefinitionError: If the schema cannot be compiled, or no provider would accept it.
    """

    def __init__(self, tool_name: str, schema: Mapping[str, object]) -> None:
        if not isinstance(schema, Mapping):
            msg = f"input_schema of tool {tool_name!r} must be a JSON Schema of an object, not {cut_after(repr(schema), SHORT_CHARS)}"
            raise DefinitionError(msg)
        try:
            self.schema = freeze_object({"type": "object", "properties": {}, **schema}, "input_schema")
        except (DataError, TypeError) as error:
            msg = f"input_schema of tool {tool_name!r} is not JSON: {error}"
            raise DefinitionError(msg) from error
        self._name = tool_name
        check_schema_for_providers(tool_name, self.schema)
        self._checked = JsonSchema(f"input_schema of tool {tool_name!r}", self.schema)

    def validate(self, value: JsonDict) -> Validated:
        """
        Return the input unchanged if it is valid.

        Raises:
            ToolInputError: If it is invalid; the message lists every invalid field.
        """
        return _accept_or_raise(self._name, self._checked.issues(value), value)


def _accept_or_raise(tool_name: str, issues: Sequence[str], value: JsonDict) -> Validated:
    """Return the input as ``Validated``; raise ``ToolInputError`` if there are issues."""
    if issues:
        raise make_tool_input_error(tool_name, [issue.removeprefix(": ") for issue in issues], value)
    return Validated(value, value)


def check_schema_for_providers(tool_name: str, schema: Mapping[str, Any]) -> None:
    """
    Raise ``DefinitionError`` for an input schema that every provider rejects.

    Raises:
        DefinitionError: If the top level is not a plain object, or a parameter's name has invalid characters.
    """
    problem = ""
    properties = schema.get("properties", {})
    if schema.get("type") != "object":
        problem = (
            f"its type is {cut_after(repr(schema.get('type')), SHORT_CHARS)}; the input of a tool must be an object"
        )
    elif unfit := [word for word in UNFIT_AT_TOP if word in schema]:
        problem = f"providers refuse {unfit[0]!r} at the top level; move it into a property"
    elif not isinstance(properties, Mapping):
        shown = cut_after(repr(properties), SHORT_CHARS)
        problem = f"its 'properties' are {shown}; use an object with a schema for each parameter, or {{}} for none"
    elif strange := [n for n in properties if not PROPERTY_NAME.fullmatch(n)]:
        problem = f"providers refuse the parameter name {strange[0]!r}; use up to 64 letters, digits, '_', '.' and '-'"
    if problem:
        msg = f"input_schema of tool {tool_name!r} is not valid: {problem}"
        raise DefinitionError(msg)
