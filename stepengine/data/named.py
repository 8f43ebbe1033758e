"""
``NamedTuple`` and ``TypedDict``: what rows of values, and the keywords of functions, are declared with.

They are those of ``typing``, but nothing compiles the annotations: for each field that takes 15 us, and most are never
asked for as types. What needs more is left to ``typing``: generic rows, and dictionaries that pydantic or a schema reads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__all__ = ("NamedTuple", "TypedDict")

if TYPE_CHECKING:
    from typing import NamedTuple, TypedDict
else:
    from collections import namedtuple

    OF_DECLARATIONS = {"__annotations__", "__module__", "__qualname__"}

    class _Declaring(type):
        """Makes a class of named tuples of a declaration; what is declared beside its fields is added, as ``typing`` does."""

        def __new__(cls, name: str, _: tuple[type, ...], body: dict[str, Any]) -> type:
            fields = body.get("__annotations__", {})
            usual = [field for field in fields if field in body]
            if usual != [*fields][len(fields) - len(usual) :]:
                msg = f"{name}: each field behind {usual[0]!r}, which has a default, needs one, too"
                raise TypeError(msg)
            defaults = [body[field] for field in usual]
            made = namedtuple(name, fields, defaults=defaults, module=body["__module__"])  # noqa: PYI024 - what is declared by us
            made.__annotations__ = made.__new__.__annotations__ = fields
            for key, value in body.items():
                if key not in fields and key not in OF_DECLARATIONS:
                    setattr(made, key, value)
            return made

    NamedTuple = type.__new__(_Declaring, "NamedTuple", (), {})

    class _Keys(type):
        """Makes a class of dictionaries of a declaration, which knows its keys and those of its bases."""

        def __new__(cls, name: str, bases: tuple[Any, ...], body: dict[str, Any], *, total: bool = True) -> type:
            keys = {key: kind for base in bases for key, kind in base.__annotations__.items()}
            keys |= body.get("__annotations__", {})
            return type.__new__(cls, name, (dict,), {**body, "__annotations__": keys, "__total__": total})

        __call__ = dict  # what is made of one is a plain dictionary, as with those of `typing`

    TypedDict = type.__new__(_Keys, "TypedDict", (), {"__annotations__": {}})
