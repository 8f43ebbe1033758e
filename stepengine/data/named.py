"""
``NamedTuple``: what rows of values are declared with, where their names say enough.

It is ``typing.NamedTuple``, but nothing compiles the annotations: for each field that takes 15 us, and most are never
asked for as types. A class whose fields need more than names and defaults, such as a generic one, is left to ``typing``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__all__ = ("NamedTuple",)

if TYPE_CHECKING:
    from typing import NamedTuple
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
