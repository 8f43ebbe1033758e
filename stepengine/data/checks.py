"""
Checks of the fields in definitions and options, with errors that name valid values.

Only kinds and signs are judged here. Whether a model takes a temperature of 3 is for its provider to say.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from decimal import Decimal
from functools import wraps
from typing import Any, NamedTuple, TypeAlias, TypeVar

import attrs

from stepengine.data.alike import find_nearest, list_names
from stepengine.data.faults import format_value
from stepengine.errors import DefinitionError, StepEngineError

T = TypeVar("T")
NO_HINTS: Mapping[str, str] = {}
SHOWN_CHARS = 100
"""A longer literal is named by its type, so that an error message stays on about two lines of a terminal."""
Validator: TypeAlias = Callable[[Any, Any, Any], None]


class FieldCheck(NamedTuple):
    """
    The description and the test of a valid value.

    Attributes:
        test: Says whether it is.
        words: The same in words, behind "must be".
    """

    test: Callable[[Any], bool]
    words: str

    def find_problem(self, name: str, value: object) -> str:
        """Return the problem with *value* for a message about *name*, or ``""``."""
        return "" if self.test(value) else f"{name} must be {self.words}, not {format_repr_or_type(value)}"


class WrongArguments(DefinitionError, TypeError):
    """A class was called with arguments that do not fit its fields; a ``TypeError``, as it is for any function."""


def with_keyword_hints(cls: type[T], elsewhere: Mapping[str, str] = NO_HINTS) -> type[T]:
    """
    Make the constructor of *cls* raise ``DefinitionError`` with its field names for wrong arguments, and return *cls*.

    *elsewhere* has a hint for each keyword that belongs to another class.
    """
    made: Any = cls
    init: Callable[..., None] = made.__init__

    @wraps(init)
    def __init__(self: object, *args: object, **kwargs: object) -> None:  # noqa: N807 - it becomes the class's own
        try:
            init(self, *args, **kwargs)
        except TypeError:
            problem = _find_argument_problem(made, inspect.signature(init), (self, *args), kwargs, elsewhere)
            if not problem:
                raise
            raise WrongArguments(problem) from None

    made.__init__ = __init__
    return cls


def _find_argument_problem(
    cls: type[object],
    signature: inspect.Signature,
    args: tuple[object, ...],
    kwargs: Mapping[str, object],
    elsewhere: Mapping[str, str],
) -> str:
    """Return the problem with the arguments of a constructor, ``""`` if they fit its signature."""
    fields = list(signature.parameters)[1:]
    unknown = next((name for name in kwargs if name not in fields), None)
    if unknown is not None:
        if unknown in elsewhere:
            hint = f"write {elsewhere[unknown]}. Valid arguments"
        else:
            near = find_nearest(unknown, fields, max_count=1)
            hint = f"did you mean {near[0]!r}? Valid arguments" if near else "valid arguments"
        return f"{cls.__name__} has no argument {unknown!r}; {hint}: {list_names(fields)}"
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        return f"{cls.__name__}(...): {error}; valid arguments: {list_names(fields)}"
    return ""


def format_repr_or_type(value: object) -> str:
    """Return the repr of *value* for an error message, or a short description if the repr is long."""
    if isinstance(value, (dict, list, tuple, set)):
        text = repr(value)
        return text if len(text) <= SHOWN_CHARS else format_value(value)
    return f"the class {value.__name__}" if isinstance(value, type) else format_value(value)


def find_iteration_mistake(value: object) -> str:
    """
    Return the problem with a value that would be iterated by mistake or cannot be iterated, or ``""``.

    A text falls apart into characters, bytes into numbers, a mapping into its keys, and a yieldable asks for an answer.
    """
    hint = getattr(type(value), "_not_json", "")
    if isinstance(value, Iterable) and not (hint or isinstance(value, str | bytes | bytearray | Mapping)):
        return ""
    shown = format_repr_or_type(value)
    return f"expected a list, not {shown}; {hint or f'write [{shown}]'}"


def make_validator(field_check: FieldCheck, error: type[StepEngineError] = DefinitionError) -> Validator:
    """Return the attrs validator that raises *error* for a value that fails the check *field_check*."""

    def check_field(instance: object, field: attrs.Attribute[Any], value: object) -> None:
        problem = field_check.find_problem(f"{type(instance).__name__}({field.name}=...)", value)
        if problem:
            raise error(problem)

    return check_field


def allow_none(field_check: FieldCheck) -> FieldCheck:
    """Return a check that accepts ``None`` in addition to the values of *field_check*."""
    return FieldCheck(lambda value: value is None or field_check.test(value), f"{field_check.words} or None")


def make_instance_check(kind: type[object], example: str) -> FieldCheck:
    """Return a check that accepts instances of *kind*; *example* is shown in messages."""
    article = "an" if kind.__name__[0] in "AEIO" else "a"
    return FieldCheck(lambda value: isinstance(value, kind), f"{article} {kind.__name__} such as {example}")


def make_choice_check(*words: str) -> FieldCheck:
    """Return a check that accepts one of these words."""
    return FieldCheck(
        lambda value: isinstance(value, str) and value in words, " or ".join([repr(value) for value in words])
    )


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_number(value: object) -> bool:
    return isinstance(value, int | float | Decimal) and not isinstance(value, bool) and value == value  # noqa: PLR0124


FLAG = FieldCheck(lambda value: value is True or value is False, "True or False")
TEXT = FieldCheck(lambda value: isinstance(value, str), "text")
COUNT = FieldCheck(_is_count, "a whole number of at least 0")
NUMBER = FieldCheck(_is_number, "a number")
AMOUNT = FieldCheck(lambda value: _is_number(value) and value >= 0, "a number of at least 0")
CHOICE = FieldCheck(
    lambda value: isinstance(value, str) and value != "", "'auto', 'none', 'required' or the name of a tool"
)
