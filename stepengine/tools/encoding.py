"""
How Python values that tools return become JSON (requirements E14, reliability TL09).

| value | JSON |
|---|---|
| ``None``, ``bool``, ``int``, ``str``, finite ``float``, ``list``, ``dict`` | itself |
| ``tuple`` | array |
| ``set``, ``frozenset`` | array, sorted by the JSON text of its items |
| ``Enum`` | its value |
| pydantic models and pydantic dataclasses | ``model_dump(mode="json", by_alias=True)`` |
| dataclasses, attrs classes, named tuples | object of the fields (named tuples: array) |
| ``datetime``, ``date``, ``time`` | ISO 8601 |
| ``timedelta`` | seconds |
| ``Decimal``, ``UUID``, ``Path`` | string |
| keys of a mapping | strings as they are; ``int``, ``Enum``, ``date`` and the like as their text |

Everything else is refused with its type and place, never shown by its ``repr``.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
from collections.abc import Callable, Mapping
from decimal import Decimal
from enum import Enum
from pathlib import PurePath
from typing import Any
from uuid import UUID

import attrs

from stepengine.data.json import JsonDict, JsonList, canonical, freeze
from stepengine.errors import DataError

__all__ = ("encode",)

TEXTS: tuple[tuple[Any, Callable[[Any], Any]], ...] = (
    ((dt.datetime, dt.date, dt.time), lambda v: v.isoformat()),
    (dt.timedelta, lambda v: v.total_seconds()),
    ((Decimal, UUID), str),
    (PurePath, lambda v: str(v).encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")),
)


def encode(value: Any) -> Any:
    """
    Return *value* as frozen JSON.

    Raises:
        DataError: naming type and place, for what has no JSON form: bytes, NaN, cycles, generators, other objects.
    """
    try:
        return freeze(value)
    except DataError:
        return freeze(_Encoder().encode(value, "$"))


class _Encoder:
    def __init__(self) -> None:
        self._open: set[int] = set()

    def encode(self, value: Any, path: str) -> Any:
        if value is None or type(value) in {str, int, float, bool, JsonDict, JsonList}:
            return value
        if isinstance(value, Enum):
            return self.encode(value.value, path)
        for kinds, text in TEXTS:
            if isinstance(value, kinds):
                return text(value)
        if isinstance(value, str | int | float):
            return value
        return self._container(value, path)

    def _container(self, value: Any, path: str) -> Any:
        if id(value) in self._open:
            msg = f"a {type(value).__name__} at {path} contains itself, which JSON cannot"
            raise DataError(msg, path=path)
        self._open.add(id(value))
        try:
            return self._members(value, path)
        finally:
            self._open.discard(id(value))

    def _members(self, value: Any, path: str) -> Any:
        if isinstance(value, Mapping):
            return {_key(k, path): self.encode(v, f"{path}.{_key(k, path)}") for k, v in value.items()}
        if isinstance(value, list | tuple):
            return [self.encode(v, f"{path}[{i}]") for i, v in enumerate(value)]
        if isinstance(value, set | frozenset):
            return sorted([self.encode(v, f"{path}{{}}") for v in value], key=canonical)
        serializer = getattr(type(value), "__pydantic_serializer__", None)
        if serializer is not None:
            return serializer.to_python(value, mode="json", by_alias=True)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return {f.name: self.encode(getattr(value, f.name), f"{path}.{f.name}") for f in dataclasses.fields(value)}
        if attrs.has(type(value)):
            return {f.name: self.encode(getattr(value, f.name), f"{path}.{f.name}") for f in attrs.fields(type(value))}
        kind = type(value).__name__
        msg = f"a {kind} at {path} is not JSON; return text, numbers, lists, dicts, dataclasses, models or result parts"
        raise DataError(msg, path=path)


def _key(key: Any, path: str) -> str:
    if isinstance(key, Enum):
        key = key.value
    if isinstance(key, str):
        return str.__str__(key)
    if isinstance(key, int) and not isinstance(key, bool):
        return int.__repr__(key)
    for kinds, text in TEXTS:
        if isinstance(key, kinds):
            return str(text(key))
    msg = f"a key at {path} is a {type(key).__name__}; JSON keys are strings"
    raise DataError(msg, path=path)
