"""
Compiles the JSON Schema of a tool's input into functions, once per tool.

Keywords that only describe are ignored. A keyword that is neither known nor a description is refused, because an input
that was not checked must not reach a body.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from stepengine.data.json import canonical
from stepengine.errors import DefinitionError
from stepengine.tools.schema_values import (
    BOUNDS,
    TYPES,
    Check,
    Issues,
    anything,
    below,
    equal,
    is_number,
    kind_of,
    never,
)

__all__ = ("Compiler",)

# fmt: off
DESCRIPTIONS = frozenset({
    "$schema", "$id", "$comment", "$anchor", "$defs", "definitions", "title", "description", "default", "examples",
    "deprecated", "readOnly", "writeOnly", "format", "contentEncoding", "contentMediaType",
})
# fmt: on
MOST_SCHEMAS = 10_000
MOST_SIZE = 50_000
CLASS, STEPS = 10, 500
NEAREST_CHARS = 2_000


def _fits_none(path: str, tries: Sequence[Issues]) -> str:
    """Return the sentence for a value that fits none of several forms; it may hold others like it, so it has an end."""
    nearest: Issues = min(tries, key=len)
    said = "; ".join(nearest)
    said = said if len(said) <= NEAREST_CHARS else f"{said[:NEAREST_CHARS]}..."
    return f"{path}: fits none of the {len(tries)} allowed forms; the nearest one says: {said}"


class Compiler:
    """Compiles one schema and the definitions that it refers to."""

    def __init__(self, tool_name: str, root: Mapping[str, Any]) -> None:
        self._name = tool_name
        self._root = root
        self._references: dict[str, Check | None] = {}
        self._count = self._size = 0
        self._keywords: Mapping[str, Callable[[Any, Mapping[str, Any], str], Check]] = {
            "type": self._type,
            "enum": self._enum,
            "const": lambda value, schema, at: self._enum([value], schema, at),
            "properties": self._properties,
            "patternProperties": self._pattern_properties,
            "additionalProperties": self._additional,
            "required": self._required,
            "items": self._items,
            "prefixItems": self._prefix_items,
            "pattern": self._pattern,
            "uniqueItems": self._unique,
            "multipleOf": self._multiple,
            "anyOf": self._any_of,
            "oneOf": self._one_of,
            "allOf": self._all_of,
            "not": self._not,
            "$ref": self._reference,
            "propertyNames": self._property_names,
            **{keyword: self._bound(keyword) for keyword in BOUNDS},
        }

    @property
    def keywords(self) -> frozenset[str]:
        """The keywords that are checked, and those that only describe."""
        return DESCRIPTIONS.union(self._keywords)

    def refuse(self, at: str, problem: str) -> NoReturn:
        """Raise the error for a schema that cannot be checked."""
        msg = f"input_schema of tool {self._name!r} at {at}: {problem}"
        raise DefinitionError(msg)

    def compiled(self, at: str) -> Check:
        """
        Return the check for the whole schema, whose place is called *at*.

        Raises:
            DefinitionError: when it cannot be checked.
        """
        try:
            return self.compile(self._root, at)
        except RecursionError:
            self.refuse(at, "it is nested too deeply")

    def compile(self, schema: Any, at: str) -> Check:
        """Return the check for one schema; *at* is its place."""
        self._count += 1
        if self._count > MOST_SCHEMAS:
            self.refuse(at, f"it consists of more than {MOST_SCHEMAS:,} schemas")
        if isinstance(schema, bool):
            return anything if schema else never
        if not isinstance(schema, Mapping):
            self.refuse(at, f"a schema is an object, not {schema!r}")
        known = [k for k in schema if k not in DESCRIPTIONS and not k.startswith("x-")]
        if strange := [k for k in known if k not in self._keywords]:
            words = ", ".join(sorted(self._keywords))
            self.refuse(at, f"the keyword {strange[0]!r} cannot be checked; these can: {words}")
        checks = [self._keywords[k](schema[k], schema, f"{at}/{k}") for k in known]
        if len(checks) == 1:
            return checks[0]

        def check(value: Any, path: str, issues: Issues) -> None:
            for one in checks:
                one(value, path, issues)

        return check

    def _type(self, kinds: Any, _: Any, at: str) -> Check:
        names = (kinds,) if isinstance(kinds, str) else tuple(kinds) if isinstance(kinds, list) else ()
        if not names or any(n not in TYPES for n in names):
            self.refuse(at, f"{kinds!r} is no type; the types are: {', '.join(TYPES)}")
        tests = [TYPES[n] for n in names]
        wanted = " or ".join(names)

        def check(value: Any, path: str, issues: Issues) -> None:
            if not any(test(value) for test in tests):
                issues.append(f"{path}: should be {wanted}, not {kind_of(value)}")

        return check

    def _enum(self, allowed: Any, _: Any, at: str) -> Check:
        if not isinstance(allowed, list):
            self.refuse(at, "enum is a list of values")
        shown = ", ".join(canonical(v) for v in allowed)

        def check(value: Any, path: str, issues: Issues) -> None:
            issues.spend(len(allowed))
            if not any(equal(value, a) for a in allowed):
                issues.append(f"{path}: should be one of {shown}")

        return check

    def _properties(self, properties: Any, _: Any, at: str) -> Check:
        checks = {name: self.compile(schema, f"{at}/{name}") for name, schema in self._object(properties, at).items()}

        def check(value: Any, path: str, issues: Issues) -> None:
            if isinstance(value, Mapping):
                for name, one in checks.items():
                    if name in value:
                        one(value[name], below(path, name), issues)

        return check

    def _pattern_properties(self, patterns: Any, schema: Mapping[str, Any], at: str) -> Check:
        """Members that match a pattern; those that match none are left to ``additionalProperties``."""
        checks = [(self._regex(p, at), self.compile(s, f"{at}/{p}")) for p, s in self._object(patterns, at).items()]

        def check(value: Any, path: str, issues: Issues) -> None:
            if isinstance(value, Mapping):
                for name, member in value.items():
                    for pattern, one in checks:
                        if pattern(name, issues):
                            one(member, below(path, name), issues)

        return check

    def _additional(self, additional: Any, schema: Mapping[str, Any], at: str) -> Check:
        known = frozenset(schema.get("properties", {}))
        patterns = [self._regex(p, at) for p in schema.get("patternProperties", {})]
        one = None if additional is False else self.compile(additional, at)
        listed = ", ".join(sorted(known)) or "none"

        def check(value: Any, path: str, issues: Issues) -> None:
            if not isinstance(value, Mapping):
                return
            for name, member in value.items():
                if name in known or any(p(name, issues) for p in patterns):
                    continue
                if one is None:
                    issues.append(f"{below(path, name)}: is not a parameter; the parameters are: {listed}")
                else:
                    one(member, below(path, name), issues)

        return check

    def _required(self, names: Any, _: Any, at: str) -> Check:
        if not isinstance(names, list) or not all(isinstance(n, str) for n in names):
            self.refuse(at, "required is a list of names")

        def check(value: Any, path: str, issues: Issues) -> None:
            if isinstance(value, Mapping):
                issues.extend([f"{below(path, n)}: is required" for n in names if n not in value])

        return check

    def _items(self, schema: Any, parent: Mapping[str, Any], at: str) -> Check:
        one = self.compile(schema, at)
        first = len(parent.get("prefixItems", ()))

        def check(value: Any, path: str, issues: Issues) -> None:
            if isinstance(value, list):
                for index, item in enumerate(value[first:], first):
                    one(item, below(path, index), issues)

        return check

    def _prefix_items(self, schemas: Any, _: Any, at: str) -> Check:
        checks = self._each(schemas, at)

        def check(value: Any, path: str, issues: Issues) -> None:
            if isinstance(value, list):
                for index, (item, one) in enumerate(zip(value, checks, strict=False)):
                    one(item, below(path, index), issues)

        return check

    def _bound(self, keyword: str) -> Callable[[Any, Mapping[str, Any], str], Check]:
        kind, test, text = BOUNDS[keyword]
        applies = TYPES[kind]

        def compiled(bound: Any, _: Any, at: str) -> Check:
            if not is_number(bound):
                self.refuse(at, f"{keyword} is a number, not {bound!r}")

            def check(value: Any, path: str, issues: Issues) -> None:
                if applies(value) and not test(value, bound):
                    issues.append(f"{path}: {text.format(bound)}")

            return check

        return compiled

    def _multiple(self, factor: Any, _: Any, at: str) -> Check:
        if not is_number(factor) or factor <= 0:
            self.refuse(at, f"multipleOf is a positive number, not {factor!r}")

        def check(value: Any, path: str, issues: Issues) -> None:
            if is_number(value) and value % factor != 0:
                issues.append(f"{path}: should be a multiple of {factor}")

        return check

    def _pattern(self, pattern: Any, _: Any, at: str) -> Check:
        matches = self._regex(pattern, at)

        def check(value: Any, path: str, issues: Issues) -> None:
            if isinstance(value, str) and not matches(value, issues):
                issues.append(f"{path}: should match {pattern!r}")

        return check

    def _unique(self, wanted: Any, _: Any, __: str) -> Check:
        def check(value: Any, path: str, issues: Issues) -> None:
            if isinstance(value, list) and len({canonical(v) for v in value}) < len(value):
                issues.append(f"{path}: holds an item twice")

        return check if wanted else anything

    def _property_names(self, schema: Any, _: Any, at: str) -> Check:
        one = self.compile(schema, at)

        def check(value: Any, path: str, issues: Issues) -> None:
            if isinstance(value, Mapping):
                for name in value:
                    one(name, below(path, name), issues)

        return check

    def _any_of(self, schemas: Any, _: Any, at: str) -> Check:
        checks = self._each(schemas, at)

        def check(value: Any, path: str, issues: Issues) -> None:
            tries = [issues.of(one, value, path) for one in checks]
            if all(tries):
                issues.append(_fits_none(path, tries))

        return check

    def _one_of(self, schemas: Any, _: Any, at: str) -> Check:
        checks = self._each(schemas, at)

        def check(value: Any, path: str, issues: Issues) -> None:
            tries = [issues.of(one, value, path) for one in checks]
            fitting = sum(not tried for tried in tries)
            if not fitting:
                issues.append(_fits_none(path, tries))
            elif fitting > 1:
                issues.append(f"{path}: fits {fitting} of the {len(checks)} forms, and exactly one is allowed")

        return check

    def _all_of(self, schemas: Any, _: Any, at: str) -> Check:
        checks = self._each(schemas, at)

        def check(value: Any, path: str, issues: Issues) -> None:
            issues.spend(len(checks))
            for one in checks:
                one(value, path, issues)

        return check

    def _not(self, schema: Any, _: Any, at: str) -> Check:
        one = self.compile(schema, at)

        def check(value: Any, path: str, issues: Issues) -> None:
            if not issues.of(one, value, path):
                issues.append(f"{path}: has a form that is excluded")

        return check

    def _reference(self, reference: Any, _: Any, at: str) -> Check:
        if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
            self.refuse(at, f"{reference!r} points outside of this schema; use '#/$defs/...'")
        if reference not in self._references:
            self._references[reference] = None
            self._references[reference] = self.compile(self._resolve(reference, at), reference)

        def check(value: Any, path: str, issues: Issues) -> None:
            target = self._references[reference]
            if target is not None:
                issues.referred(reference, target, value, path)

        return check

    def _resolve(self, reference: str, at: str) -> Any:
        target: Any = self._root
        for part in reference.split("/")[1:]:
            name = part.replace("~1", "/").replace("~0", "~")
            if not isinstance(target, Mapping) or name not in target:
                self.refuse(at, f"{reference!r} does not exist")
            target = target[name]
        return target

    def _each(self, schemas: Any, at: str) -> list[Check]:
        if not isinstance(schemas, list) or not schemas:
            self.refuse(at, "expected a list of schemas")
        return [self.compile(s, f"{at}/{i}") for i, s in enumerate(schemas)]

    def _object(self, value: Any, at: str) -> Mapping[str, Any]:
        if not isinstance(value, Mapping):
            self.refuse(at, "expected an object of schemas")
        return value

    def _regex(self, pattern: Any, at: str) -> Callable[[str, Issues], bool]:
        """
        Return whether a text holds a match; by an engine that cannot backtrack, since schemas and texts are foreign.

        Such an engine follows every way through the pattern at once, so repetitions of repetitions still cost: what is
        compiled has a limit, and what is searched is counted.
        """
        from pydantic_core import SchemaError, SchemaValidator, core_schema

        size = _size_of(pattern) if isinstance(pattern, str) else 1
        self._size += size
        if self._size > MOST_SIZE:
            self.refuse(at, f"{pattern[:80]!r} is too large, with the other patterns: count what braces repeat")
        try:
            has = SchemaValidator(core_schema.str_schema(pattern=pattern, regex_engine="rust-regex")).isinstance_python
        except SchemaError as error:
            reason = str(error).strip().splitlines()[-1].strip()
            self.refuse(at, f"{pattern!r} is no regular expression without look-around and back-references: {reason}")

        def matches(text: str, issues: Issues) -> bool:
            issues.spend(1 + size * len(text) // STEPS)
            return has(text)

        return matches


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
