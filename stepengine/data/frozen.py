"""
``frozen``: what values are declared with.

It is ``attrs.frozen``, but comparison, hash and representation are written when they are first used. Most classes of a process
are never compared or shown, and writing these methods is half of what a class costs when its module is imported.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import attrs

__all__ = ("frozen",)

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
        made: Any = attrs.frozen(
            **{**options, **({"eq": False} if compared else {}), "repr": options.get("repr", False)}
        )(cls)
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
"""What stands in the place of a method that is not written yet."""


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
