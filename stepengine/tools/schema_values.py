"""JSON values as JSON Schema sees them: types, bounds, equality, and how a value's place is called in a message."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

__all__ = ("BOUNDS", "TYPES", "Check", "anything", "below", "equal", "is_number", "issues_of", "kind_of", "never")

Check: TypeAlias = Callable[[Any, str, list[str]], None]
"""Takes a value, its place and the list to which it adds one sentence per problem."""


def is_number(value: Any) -> bool:
    """Return whether a value is a JSON number; booleans are not."""
    return isinstance(value, int | float) and not isinstance(value, bool)


TYPES: Mapping[str, Callable[[Any], bool]] = {
    "object": lambda v: isinstance(v, Mapping),
    "array": lambda v: isinstance(v, list),
    "string": lambda v: isinstance(v, str),
    "boolean": lambda v: isinstance(v, bool),
    "null": lambda v: v is None,
    "integer": lambda v: is_number(v) and (isinstance(v, int) or v.is_integer()),
    "number": is_number,
}

BOUNDS: Mapping[str, tuple[str, Callable[[Any, Any], bool], str]] = {
    "minimum": ("number", lambda v, b: v >= b, "should be at least {}"),
    "maximum": ("number", lambda v, b: v <= b, "should be at most {}"),
    "exclusiveMinimum": ("number", lambda v, b: v > b, "should be more than {}"),
    "exclusiveMaximum": ("number", lambda v, b: v < b, "should be less than {}"),
    "minLength": ("string", lambda v, b: len(v) >= b, "should have at least {} characters"),
    "maxLength": ("string", lambda v, b: len(v) <= b, "should have at most {} characters"),
    "minItems": ("array", lambda v, b: len(v) >= b, "should have at least {} items"),
    "maxItems": ("array", lambda v, b: len(v) <= b, "should have at most {} items"),
    "minProperties": ("object", lambda v, b: len(v) >= b, "should have at least {} members"),
    "maxProperties": ("object", lambda v, b: len(v) <= b, "should have at most {} members"),
}
"""Keyword to the type it applies to, its test, and the sentence for a value that fails it."""


def kind_of(value: Any) -> str:
    """Return the name of a value's JSON type."""
    return next(name for name, test in TYPES.items() if test(value))


def equal(a: Any, b: Any) -> bool:
    """Return whether two values are equal as JSON: ``true`` is not ``1``, ``1`` is ``1.0``."""
    if isinstance(a, bool) or isinstance(b, bool):
        return a is b
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(equal, a, b))
    return bool(a == b)


def below(path: str, name: str | int) -> str:
    """Return the place of a member or item of the value at *path*."""
    return f"{path}.{name}" if path else str(name)


def anything(_: Any, __: str, ___: list[str]) -> None:
    """Check nothing."""


def never(_: Any, path: str, issues: list[str]) -> None:
    """Refuse every value."""
    issues.append(f"{path}: is not allowed")


def issues_of(check: Check, value: Any, path: str) -> list[str]:
    """Return what one check says about a value."""
    issues: list[str] = []
    check(value, path, issues)
    return issues
