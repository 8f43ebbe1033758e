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
from functools import cache, partial
from typing import Any, Generic, ParamSpec, Protocol, TypeVar, cast

import attrs

from stepengine.data.generated import generated, generated_later

__all__ = ("changer_of", "is_twin", "maker_in_order", "maker_of", "quick")

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
    _check_layout(frozen)
    made: Callable[P, T] = generated_later(partial(_maker, frozen))
    return made


def maker_in_order(cls: type[T], *names: str) -> Callable[..., T]:
    """
    Return ``maker_of`` a class that takes these parameters of its constructor alone, in this order; the others have their defaults.

    It is called by position, which takes a sixth less than by name. For values of which most fields are filled in by others, such
    as events.

    Raises:
        TypeError: for a class that has no such maker; when it is first called, also where a parameter without a default is left out.
    """
    _check_layout(cls)
    made: Callable[..., T] = generated_later(partial(_maker, cls, names))
    return made


def _maker(frozen: type[Any], names: Sequence[str] = ()) -> Callable[..., Any]:
    known: dict[str, object] = {"_twin": _twin_of(frozen), "_frozen": frozen}
    required, optional, lines = [], [], []
    for field in attrs.fields(frozen):
        default: Any = field.default
        depends = isinstance(default, attrs.Factory) and default.takes_self  # type: ignore[arg-type]
        is_given = field.init and (not names or field.alias in names)
        value = field.alias if is_given else f"_default_{field.name}{'(made)' if depends else ''}"
        lines.append(f"    made.{field.name} = {value}")
        if isinstance(default, attrs.Factory):  # type: ignore[arg-type]
            default = default.factory if depends else default.factory()
        if default is attrs.NOTHING and not is_given:
            msg = f"a maker of {frozen.__qualname__} needs {field.alias!r}, which has no default"
            raise TypeError(msg)
        known[f"_default_{field.name}"] = default
        if field.init and (default is attrs.NOTHING or depends):
            required.append(field.alias)
        elif field.init:
            optional.append(f"{field.alias}=_default_{field.name}")
    what = f"maker of {frozen.__name__}"
    return _compile_function(what, names or [*required, *optional], lines, known)


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
    _check_layout(cls)
    changed: Callable[..., T] = generated_later(partial(_changer, cls, names))
    return changed


def _changer(cls: type[Any], names: Sequence[str]) -> Callable[..., Any]:
    known: dict[str, object] = {"_twin": _twin_of(cls), "_frozen": cls}
    fields = [field.name for field in attrs.fields(cls)]
    lines = [f"    made.{name} = {name if name in names else f'_of.{name}'}" for name in fields]
    what = f"changer of {cls.__name__}: {', '.join(names)}"
    return _compile_function(what, ["_of", *names], lines, known)


def is_twin(cls: type[object]) -> bool:
    """Return whether a class below a frozen base is the twin of another; a base that lists its kinds leaves it out."""
    return cls.__setattr__ is object.__setattr__


def _check_layout(frozen: type[Any]) -> None:
    # `Generic` has no fields, and from Python 3.12 on no `__slots__` that would say so.
    classes = [base for base in frozen.__mro__ if base not in {object, Generic}]
    slots = {slot for base in classes for slot in base.__dict__.get("__slots__", ("__dict__",))}
    # A base's `__weakref__` is the twin's, too; only beside fields of its own it makes another layout.
    if "__dict__" in slots or "__weakref__" in frozen.__slots__:
        msg = f"{frozen.__qualname__} has no quick maker: it needs slots for its fields and for nothing else (weakref_slot=False)"
        raise TypeError(msg)


def _twin_of(frozen: type[Any]) -> type[object]:
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
