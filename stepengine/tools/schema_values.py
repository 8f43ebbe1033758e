"""JSON values as JSON Schema sees them: types, bounds, equality, and how a value's place is called in a message."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

__all__ = (
    "BOUNDS", "TYPES", "Check", "Issues", "anything", "below", "equal", "is_number", "issues_of", "kind_of", "never",
)  # fmt: skip


MOST_ISSUES = 100
MOST_TRIES = 500_000


class TooMuch(Exception):
    """A value and its schema take too long to be compared."""


class Issues(list[str]):
    """
    What is wrong with a value, one sentence per problem, each once; of more than 100 only that there are more.

    Schemas and values are foreign. A schema may lead to one part of a value on very many ways, so what a reference says
    about a part is found out once; and what multiplies, such as forms with items, is counted.

    Args:
        whole: The issues of the whole value, of which this is a part.
    """

    def __init__(self, whole: Issues | None = None) -> None:
        super().__init__()
        self._whole = self if whole is None else whole
        self._known: dict[tuple[str, int, str], Issues | None] = {}
        self._left = MOST_TRIES

    def append(self, issue: str) -> None:
        """Add one sentence."""
        if len(self) <= MOST_ISSUES and issue not in self:
            super().append(issue if len(self) < MOST_ISSUES else ": and there is more")

    def extend(self, issues: Iterable[str]) -> None:
        """Add several sentences."""
        for issue in issues:
            self.append(issue)

    def of(self, check: Check, value: Any, path: str) -> Issues:
        """Return what one check says about a part of the value."""
        self.spend(1)
        found = Issues(self._whole)
        check(value, path, found)
        return found

    def referred(self, reference: str, check: Check, value: Any, path: str) -> None:
        """Add what the check of a reference says about a part of the value."""
        known, key = self._whole._known, (reference, id(value), path)  # noqa: SLF001 - its own class
        if key not in known:
            known[key] = None  # as long as it is looked at
            known[key] = self.of(check, value, path)
        found = known[key]
        self.spend(1)
        self.extend([f"{path}: its schema {reference!r} refers to itself without an end"] if found is None else found)

    def spend(self, tries: int) -> None:
        """
        Count what is about to be compared.

        Raises:
            TooMuch: after 500,000.
        """
        self._whole._left -= tries  # noqa: SLF001 - its own class
        if self._whole._left < 0:  # noqa: SLF001
            raise TooMuch


Check: TypeAlias = Callable[[Any, str, Issues], None]
"""Takes a value, its place and the issues to which it adds one sentence per problem."""


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


def anything(_: Any, __: str, ___: Issues) -> None:
    """Check nothing."""


def never(_: Any, path: str, issues: Issues) -> None:
    """Refuse every value."""
    issues.append(f"{path}: is not allowed")


def issues_of(check: Check, value: Any) -> list[str]:
    """Return what a check says about a whole value."""
    try:
        return Issues().of(check, value, "")
    except RecursionError:
        return [": is nested too deeply to be checked"]
    except TooMuch:
        return [": takes too long to be checked against its schema"]
