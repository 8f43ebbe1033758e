"""
What may stand in a field that authors write: checked where it is written, and said with what would have been fine.

Only kinds and signs are judged here. Whether a model takes a temperature of 3 is for its provider to say.
"""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal
from functools import wraps
from typing import Any, NamedTuple, TypeAlias, TypeVar

import attrs

from stepengine.data.alike import find_nearest, list_names
from stepengine.data.faults import shown
from stepengine.errors import DefinitionError, StepEngineError

__all__ = (
    "AMOUNT",
    "CHOICE",
    "COUNT",
    "FLAG",
    "NUMBER",
    "TEXT",
    "Fine",
    "UnknownField",
    "an_instance",
    "fine",
    "named_fields",
    "one_of",
    "or_none",
    "written",
)

T = TypeVar("T")
SHOWN_CHARS = 100
"""A longer literal is named by its type, so that an error message stays on about two lines of a terminal."""
Validator: TypeAlias = Callable[[Any, Any, Any], None]


class Fine(NamedTuple):
    """
    What a value has to be.

    Attributes:
        test: Says whether it is.
        words: The same in words, behind "is".
    """

    test: Callable[[Any], bool]
    words: str

    def problem(self, name: str, value: object) -> str:
        """Return what is wrong with *value*, which stands under *name*; ``""`` when nothing is."""
        return "" if self.test(value) else f"{name} is {self.words}, not {written(value)}"


class UnknownField(DefinitionError, TypeError):
    """A class was given a keyword that is none of its fields; a ``TypeError``, as it is for any function."""


def named_fields(cls: type[T]) -> type[T]:
    """
    Return *cls*, an attrs class of keywords, that says which field was probably meant by one that it does not have.

    The constructor raises ``DefinitionError`` then.
    """
    made: Any = cls
    init: Callable[..., None] = made.__init__

    @wraps(init)
    def __init__(self: object, *args: object, **kwargs: object) -> None:  # noqa: N807 - it becomes the class's own
        try:
            init(self, *args, **kwargs)
        except TypeError:
            fields = [field.alias for field in attrs.fields(made) if field.init]
            unknown = next((name for name in kwargs if name not in fields), None)
            if unknown is None:
                raise
            near = find_nearest(unknown, fields, n=1)
            hint = f"did you mean {near[0]!r}? It takes" if near else "it takes"
            msg = f"{made.__name__} takes no {unknown!r}; {hint}: {list_names(fields)}"
            raise UnknownField(msg) from None

    made.__init__ = __init__
    return cls


def written(value: object) -> str:
    """Return *value* as its author wrote it, if that is short, else what it is."""
    if isinstance(value, (dict, list, tuple, set)):
        text = repr(value)
        return text if len(text) <= SHOWN_CHARS else shown(value)
    return f"the class {value.__name__}" if isinstance(value, type) else shown(value)


def fine(what: Fine, error: type[StepEngineError] = DefinitionError) -> Validator:
    """Return the attrs validator that raises *error* for a value that is not *what*."""

    def check(instance: object, field: attrs.Attribute[Any], value: object) -> None:
        problem = what.problem(f"{type(instance).__name__}({field.name}=...)", value)
        if problem:
            raise error(problem)

    return check


def or_none(what: Fine) -> Fine:
    """Return *what*, or ``None``."""
    return Fine(lambda value: value is None or what.test(value), f"{what.words} or None")


def an_instance(kind: type[object], example: str) -> Fine:
    """Return what only instances of *kind* are, such as *example*."""
    article = "an" if kind.__name__[0] in "AEIO" else "a"
    return Fine(lambda value: isinstance(value, kind), f"{article} {kind.__name__} such as {example}")


def one_of(*values: str) -> Fine:
    """Return what is one of some words."""
    return Fine(
        lambda value: isinstance(value, str) and value in values, " or ".join([repr(value) for value in values])
    )


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_number(value: object) -> bool:
    return isinstance(value, int | float | Decimal) and not isinstance(value, bool) and value == value  # noqa: PLR0124


FLAG = Fine(lambda value: value is True or value is False, "True or False")
TEXT = Fine(lambda value: isinstance(value, str), "text")
COUNT = Fine(_is_count, "a whole number of at least 0")
NUMBER = Fine(_is_number, "a number")
AMOUNT = Fine(lambda value: _is_number(value) and value >= 0, "a number of at least 0")
CHOICE = Fine(lambda value: isinstance(value, str) and value != "", "'auto', 'none', 'required' or the name of a tool")
