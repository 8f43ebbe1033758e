"""
Quick makers of frozen values, for the few that are made at every step.

The constructor of a frozen attrs class converts and checks what it is given and sets each field past the class's own
refusal to be changed, which costs three times what the object itself costs. A maker fills an object of an *open twin*, a
class with the same slots that can be changed, and then gives it the frozen class: from there on it is such a value and
nothing else. Nothing is converted or checked, so only code that has just made or checked the fields itself may call a
maker; at every door of the package the constructor stands.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Generic, ParamSpec, Protocol, TypeVar, cast

import attrs

from stepengine.data.generated import generated

__all__ = ("changer_of", "is_twin", "maker_of", "quick")

P = ParamSpec("P")
T = TypeVar("T")


def maker_of(cls: Callable[P, T]) -> Callable[P, T]:
    """
    Return a function with the parameters of a frozen attrs class that makes its instances unconverted and unchecked.

    The class needs ``weakref_slot=False``: a twin with that slot has another layout. A default that a factory makes is made
    once, so it must be frozen; where one depends on other fields, that field must be given, by name. A field that is no
    parameter and depends on others is made of those before it.

    Raises:
        TypeError: for a class that has no such maker.
    """
    frozen = cast("type[Any]", cls)
    known: dict[str, object] = {"_twin": _twin_of(frozen), "_frozen": frozen}
    required, optional, lines = [], [], []
    for field in attrs.fields(frozen):
        default: Any = field.default
        depends = isinstance(default, attrs.Factory) and default.takes_self  # type: ignore[arg-type]
        value = field.alias if field.init else f"_default_{field.name}{'(made)' if depends else ''}"
        lines.append(f"    made.{field.name} = {value}")
        if isinstance(default, attrs.Factory):  # type: ignore[arg-type]
            default = default.factory if depends else default.factory()
        known[f"_default_{field.name}"] = default
        if field.init and (default is attrs.NOTHING or depends):
            required.append(field.alias)
        elif field.init:
            optional.append(f"{field.alias}=_default_{field.name}")
    what = f"maker of {frozen.__name__}"
    made: Callable[P, T] = _compile_function(what, [*required, *optional], lines, known)
    return made


class _Quick(Protocol):
    def __call__(self, cls: Callable[P, T], /) -> Callable[P, T]: ...


quick = cast("_Quick", cache(maker_of))
"""
Return ``maker_of`` a class, which is made when it is first asked for.

Writing one takes 0.1 ms. For values that most processes never make, such as the events of a run that nobody watches, that is more
than looking the maker up at each call.
"""


def changer_of(cls: type[T], *names: str) -> Callable[..., T]:
    """
    Return a function of an instance of a frozen attrs class and of new values of the fields *names*, in that order.

    What it gives is a copy with these values, unconverted and unchecked; every other field is as it was, also where it was made
    of one that is changed.

    Raises:
        TypeError: for a class that has no quick maker.
    """
    known: dict[str, object] = {"_twin": _twin_of(cls), "_frozen": cls}
    fields = [field.name for field in attrs.fields(cls)]  # type: ignore[arg-type]
    lines = [f"    made.{name} = {name if name in names else f'_of.{name}'}" for name in fields]
    what = f"changer of {cls.__name__}: {', '.join(names)}"
    changed: Callable[..., T] = _compile_function(what, ["_of", *names], lines, known)
    return changed


def is_twin(cls: type[object]) -> bool:
    """Return whether a class below a frozen base is the open twin of another; a base that lists its kinds leaves it out."""
    return cls.__setattr__ is object.__setattr__


def _twin_of(frozen: type[Any]) -> type[object]:
    # `Generic` has no fields, and from Python 3.12 on no `__slots__` that would say so.
    classes = [base for base in frozen.__mro__ if base not in {object, Generic}]
    slots = [slot for base in classes for slot in base.__dict__.get("__slots__", ("__dict__",))]
    if "__weakref__" not in frozen.__slots__:
        # That of a base is the twin's, too; only beside fields of its own it makes another layout.
        slots = [slot for slot in slots if slot != "__weakref__"]
    fields = attrs.fields(frozen)
    if set(slots) != {field.name for field in fields}:
        msg = f"{frozen.__qualname__} has no quick maker: it needs slots for its fields and for nothing else (weakref_slot=False)"
        raise TypeError(msg)
    # `__delattr__` as well: where a frozen base has its own, the interpreter takes the long way for each field that is
    # set, and a value of nine fields takes 0.55 us instead of 0.12.
    plain = {name: getattr(object, name) for name in ("__init__", "__setattr__", "__delattr__")}
    return type(f"Open{frozen.__name__}", frozen.__bases__, {"__slots__": frozen.__slots__, **plain})


def _compile_function(
    what: str, parameters: Sequence[str], lines: Sequence[str], known: dict[str, object]
) -> Callable[..., Any]:
    """Return the function that fills a twin by *lines*."""
    source = [
        f"def make({', '.join(parameters)}):",
        "    made = _twin()",
        *lines,
        "    made.__class__ = _frozen",
        "    return made",
    ]
    return generated(what, "\n".join(source), known)
