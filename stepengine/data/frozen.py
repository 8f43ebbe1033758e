"""
``frozen``: what values are declared with.

It is ``attrs.frozen``, but attrs is asked when a class is first used. Most classes of a process are never made, compared or
shown, and what attrs writes for a class (constructor, fields, comparison, hash, representation) takes ten times as long as the
class itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from types import FunctionType
from typing import TYPE_CHECKING, Any, TypeVar

import attrs

__all__ = ("TWIN", "frozen", "is_declared")

T = TypeVar("T")

if TYPE_CHECKING:
    from attrs import frozen
else:

    def frozen(cls: type[T] | None = None, /, **options: Any) -> Any:
        """Do what ``attrs.frozen`` does, with the same options; what a class says of its methods itself holds at once."""
        if cls is None:
            return lambda declared: frozen(declared, **options)
        compared = not OF_EQUALITY & {*vars(cls), *options}
        shown = not {"__repr__", "repr"} & {*vars(cls), *options}
        given = {**options, **({"eq": False} if compared else {}), "repr": options.get("repr", False)}
        made: Any = _Completion(cls, given).shell() if _waits(cls, given) else attrs.frozen(**given)(cls)
        if compared:
            made.__eq__, made.__hash__ = _eq, _hash
        if shown:
            made.__repr__ = _repr
        return made


OF_EQUALITY = {"__eq__", "__ne__", "__hash__", "eq", "hash", "unsafe_hash", "cache_hash", "order", "cmp"}


def _eq(self: object, other: object) -> bool:
    _write(type(self))
    return type(self).__eq__(self, other)


def _hash(self: object) -> int:
    _write(type(self))
    return type(self).__hash__(self)


def _repr(self: object) -> str:
    _write(type(self))
    return type(self).__repr__(self)


LATER = {"__eq__": _eq, "__hash__": _hash, "__repr__": _repr}
"""What stands in place of a method that is not written yet."""


def _write(kind: type[Any]) -> None:
    """Give *kind* and its bases the methods that attrs writes for a class of their fields; none of them names its class."""
    for cls in kind.__mro__:
        later = [name for name, stands in LATER.items() if vars(cls).get(name) is stands]
        if later:
            fields = {
                field.name: attrs.field(eq=field.eq_key or field.eq, hash=field.hash, repr=field.repr)
                for field in attrs.fields(cls)
            }
            body = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
            twin = attrs.make_class(cls.__name__, fields, class_body=body, init=False, frozen=True)
            for name in later:
                setattr(cls, name, getattr(twin, name))


def is_declared(cls: type[object]) -> bool:
    """Return whether *cls* is a class of attrs, as ``attrs.has`` does, which would have it completed."""
    return any("__attrs_attrs__" in vars(each) for each in cls.__mro__)


# --- classes that wait for attrs --------------------------------------------------------------------------------------

OF_THE_CLASS = ("ClassVar", "typing.ClassVar")
TWIN = "__stepengine_twin__"
"""Marks the class that attrs makes in the end, which only lends its members: what registers subclasses passes it by."""
EMPTY = vars(attrs.frozen(type("Empty", (), {})))
REFUSING = {name: EMPTY[name] for name in ("__setattr__", "__delattr__")}
"""By these attrs itself knows a frozen class."""
WRITTEN = ("__attrs_attrs__", "__attrs_props__", "__getstate__", "__setstate__", "__match_args__", "__replace__")
"""What attrs gives every class, the constructor apart, as far as this version of Python has it."""
GIVEN = [name for name in WRITTEN if name in EMPTY]
OF_CLASSES = {"__slots__", "__getattr__", "__attrs_init__", *WRITTEN, *REFUSING}
"""Where a class has one of these itself, it is left to attrs at once."""
LATE_ANNOTATIONS = {"__annotate__", "__annotate_func__"}
"""Python 3.14 has these in a class whose module does not ask for annotations as texts: its fields are not known without asking them."""
SIMPLE = {
    "kw_only": {True, False},
    "weakref_slot": {True, False},
    "eq": {False},
    "init": {True, False},
    "repr": {False},
}
"""The options, with their values, that change nothing in what is done here."""


def _waits(cls: type[Any], options: dict[str, Any]) -> bool:
    """Return whether attrs can be asked later: not where the class is more than fields and methods."""
    body = vars(cls)
    return (
        options.get("eq") is False
        and all(name in SIMPLE and value in SIMPLE[name] for name, value in options.items())
        and not OF_CLASSES & body.keys()
        and not LATE_ANNOTATIONS & body.keys()
        and ("__annotations__" in body or not any(hasattr(value, "counter") for value in body.values()))
        and not any(type(value).__name__ == "cached_property" for value in body.values())
        and not issubclass(cls, BaseException)
    )


class _Completion:
    """
    A declared class, and how attrs is to complete it.

    Args:
        declared: The class as it is written.
        options: Those of ``attrs.frozen``.
    """

    __slots__ = ("_declared", "_options", "_shell")

    def __init__(self, declared: type[Any], options: dict[str, Any]) -> None:
        self._declared = declared
        self._options = options
        self._shell: type[Any] = declared

    def shell(self) -> type[Any]:
        """Return the class with its slots and its own methods, and for what attrs writes something that has it written."""
        cls = self._declared
        annotations: dict[str, object] = vars(cls).get("__annotations__", {})
        fields = [name for name, kind in annotations.items() if not str(kind).startswith(OF_THE_CLASS)]
        left = {*fields, "__dict__", "__weakref__"}
        body = {name: value for name, value in vars(cls).items() if name not in left}
        bases = cls.__mro__[1:-1]
        # A field that a base has, too, lies where it lies there.
        held = {name: getattr(base, name) for base in reversed(bases) for name in vars(base).get("__slots__", ())}
        body |= {name: held[name] for name in fields if name in held}
        own = [name for name in fields if name not in held] if held else fields
        refers = any(vars(base).get("__weakref__") is not None for base in bases)
        if self._options.get("weakref_slot", True) and not refers:
            own = [*own, "__weakref__"]
        has_init = self._options.get("init", True) and "__init__" not in body
        waiting = {name: _Waiting(self, name) for name in (*GIVEN, "__init__" if has_init else "__attrs_init__")}
        functions = [*body.values()]
        body |= {**REFUSING, **waiting, "__slots__": tuple(own), "__qualname__": cls.__qualname__}
        metaclass: Any = type(cls)
        self._shell = metaclass(cls.__name__, cls.__bases__, body)
        self._repoint(functions)
        return self._shell

    def _repoint(self, members: Iterable[Any]) -> None:
        """Let ``super()`` in methods mean the class that is used, as attrs does for its own."""
        for member in members:
            kind = type(member)
            if kind is FunctionType:
                function = member
            elif kind is property:
                function = member.fget
            else:
                function = getattr(member, "__func__", None)
            for cell in getattr(function, "__closure__", None) or ():
                with suppress(ValueError):  # one of a name that is not known yet
                    if cell.cell_contents is self._declared:
                        cell.cell_contents = self._shell

    def complete(self) -> None:
        """Give the class what attrs writes for it. Two threads may do so at once: both write the same."""
        setattr(self._declared, TWIN, True)
        written = vars(attrs.frozen(**self._options)(self._declared))
        for name, value in vars(self._shell).copy().items():
            if type(value) is _Waiting:
                setattr(self._shell, name, written[name])


class _Waiting:
    """What stands for a member that attrs has not written yet."""

    __slots__ = ("_completion", "_name")

    def __init__(self, completion: _Completion, name: str) -> None:
        self._completion = completion
        self._name = name

    def __get__(self, instance: object, owner: type[Any] | None = None) -> Any:
        self._completion.complete()
        written = vars(self._completion._shell)[self._name]  # noqa: SLF001 - two halves of one thing
        bind = getattr(type(written), "__get__", None)
        return written if bind is None else bind(written, instance, owner)
