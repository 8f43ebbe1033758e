"""
Codecs of what stored objects are made of: text, numbers, bytes, choices, lists, objects.

Each codec checks both ways and says what is wrong and where. Places are put together on the way out: a fault starts at
``$``, and every level that it passes puts its own step in front with ``within``.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable, Mapping
from decimal import Decimal, InvalidOperation
from enum import Enum
from typing import Any

from stepengine.data.json import (
    JsonDict,
    JsonValue,
    freeze,
    freeze_object,
    frozen_compact,
    frozen_text,
    quoted,
    thaw,
)
from stepengine.data.named import NamedTuple
from stepengine.errors import DataError

__all__ = (
    "CANONICAL",
    "ENDLESS",
    "PLAIN",
    "RAW",
    "SCALARS",
    "Codec",
    "Style",
    "fault",
    "literal",
    "mapping",
    "sequence",
    "shown",
    "within",
)

SHOWN = 60


class Style(NamedTuple):
    """
    How JSON text is made.

    Attributes:
        json: Makes it of a JSON value.
        is_sorted: Whether the members of objects are sorted.
        writers: What makes it of the instances of a class, by class; filled in when it is needed first.
        without: Members that are left out of an object.
        inside: The style of the objects in it; by default the same.
    """

    json: Callable[[Any], str]
    is_sorted: bool
    writers: dict[type[Any], Callable[[Any], str]]
    without: tuple[str, ...] = ()
    inside: Style | None = None


CANONICAL = Style(frozen_text, is_sorted=True, writers={})
PLAIN = Style(frozen_compact, is_sorted=False, writers={})


class Codec(NamedTuple):
    """
    Two functions that raise ``DataError``: a value to JSON, and JSON to a value.

    *text*, where it is there, makes the JSON text of what *encode* would return, in one go; see ``writer``. A codec of stored
    objects names their *classes*, that of a tuple has the codec of an *item*.
    """

    encode: Callable[[Any], Any]
    decode: Callable[[Any], Any]
    text: Callable[[Any, Style], str] | None = None
    classes: tuple[type[Any], ...] = ()
    item: Codec | None = None

    @property
    def writer(self) -> Callable[[Any, Style], str]:
        """A function that makes the JSON text of what *encode* would return, in a style."""
        return self.text or (lambda value, style: style.json(self.encode(value)))


def fault(why: str) -> DataError:
    """Return the error for a value that is wrong right here."""
    return DataError(f"{why} at $", path="$")


def within(error: DataError, step: str) -> DataError:
    """Return *error* as seen from one level up, where the faulty value is reached by *step*."""
    path = f"${step}{error.path[1:]}"
    before, found, after = error.message.rpartition(f" at {error.path}")
    return DataError(f"{before} at {path}{after}" if found else f"{error.message} at {path}", path=path)


def shown(value: Any) -> str:
    """Return a short text for *value* in a message."""
    if isinstance(value, (str, int, float, type(None))):
        text = repr(value) if not isinstance(value, int) or value.bit_length() <= SHOWN else "a huge number"
        return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."
    return f"a {type(value).__name__}"


def _check_only(check: Callable[[Any], object]) -> Codec:
    return Codec(check, check)


def _frozen_scalar(kinds: tuple[type, ...], what: str) -> Codec:
    def check(value: object) -> Any:
        if type(value) in kinds or (isinstance(value, kinds) and not isinstance(value, bool)):
            return freeze(value)
        msg = f"expected {what}, not {shown(value)}"
        raise fault(msg)

    return _check_only(check)


def _decimal_to_text(value: object) -> str:
    if isinstance(value, Decimal) and value.is_finite():
        return str(value)
    msg = f"expected a finite decimal number, not {shown(value)}"
    raise fault(msg)


def _text_to_decimal(data: object) -> Decimal:
    try:
        value = Decimal(data if isinstance(data, str) else "")
    except InvalidOperation:
        value = Decimal("NaN")
    if value.is_finite():
        return value
    msg = f"expected a decimal number as text, not {shown(data)}"
    raise fault(msg)


def _bytes_to_text(value: object) -> str:
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    msg = f"expected bytes, not {shown(value)}"
    raise fault(msg)


def _text_to_bytes(data: object) -> bytes:
    try:
        return base64.b64decode(data if isinstance(data, str) else "*", validate=True)
    except ValueError:
        msg = f"expected base64 text, not {shown(data)}"
        raise fault(msg) from None


def _text_written(value: object, _: Style) -> str:
    return quoted(value if type(value) is str and value.isascii() else _TEXT.encode(value))


def _freeze_json(value: object) -> JsonValue:
    """Return a value of a JSON field as JSON. An output may be a pydantic model, which has a JSON form of its own."""
    plain: JsonValue
    try:
        plain = freeze(value)
    except DataError:
        dump = getattr(value, "model_dump", None)
        if dump is None or isinstance(value, type):
            raise
        plain = freeze(dump(mode="json"))
    return plain


_TEXT = _frozen_scalar((str,), "text")
RAW = Codec(lambda value: thaw(_freeze_json(value)), freeze, lambda value, style: style.json(_freeze_json(value)))
SCALARS: dict[Any, Codec] = {
    str: _TEXT._replace(text=_text_written),
    int: _frozen_scalar((int,), "a whole number"),
    float: _frozen_scalar((int, float), "a number"),
    bool: _frozen_scalar((bool,), "true or false"),
    Decimal: Codec(_decimal_to_text, _text_to_decimal),
    bytes: Codec(_bytes_to_text, _text_to_bytes),
    JsonDict: Codec(
        lambda value: thaw(freeze_object(value)),
        freeze_object,
        lambda value, style: style.json(freeze_object(value)),
    ),
}


def _time_to_json(value: object) -> object:
    return "inf" if value == float("inf") else value if value is None else SCALARS[float].encode(value)


def _json_to_time(data: object) -> object:
    return float("inf") if data == "inf" else data if data is None else SCALARS[float].decode(data)


ENDLESS = Codec(_time_to_json, _json_to_time)
"""Seconds without an end are a text: JSON has no number for them."""


def literal(values: tuple[object, ...], make: type[Enum] | None = None) -> Codec:
    """Return the codec of a choice between strings; *make* turns them into members of an enumeration."""

    def check(data: object) -> Any:
        if isinstance(data, str) and data in values:
            return make(data) if make else str.__str__(data)
        msg = f"expected one of {list(values)}, not {shown(data)}"
        raise fault(msg)

    return Codec(lambda value: str.__str__(check(value)), check)


def sequence(item: Codec) -> Codec:
    """Return the codec of a tuple of *item*."""

    def each(values: Iterable[Any], convert: Callable[[Any], Any]) -> list[Any]:
        if not isinstance(values, (list, tuple)):
            msg = f"expected a list, not {shown(values)}"
            raise fault(msg)
        done: list[object] = []
        try:
            for value in values:
                done.append(convert(value))  # noqa: PERF401 - the error below needs to know how far it came
        except DataError as error:
            raise within(error, f"[{len(done)}]") from None
        return done

    write = item.writer

    def text(values: Any, style: Style) -> str:
        if type(values) is not tuple:
            return style.json(each(values, item.encode))
        if len(values) == 1:
            return f"[{write(values[0], style)}]"
        return f"[{','.join([write(value, style) for value in values])}]"

    return Codec(lambda values: each(values, item.encode), lambda data: tuple(each(data, item.decode)), text, item=item)


def mapping(item: Codec) -> Codec:
    """Return the codec of an object whose members are *item*; ``type`` is a member like any other."""

    def each(values: Any, convert: Callable[[Any], Any]) -> dict[str, Any]:
        if not isinstance(values, Mapping):
            msg = f"expected an object, not {shown(values)}"
            raise fault(msg)
        done: dict[str, object] = {}
        for key, value in values.items():
            name = SCALARS[str].decode(key)
            try:
                done[name] = convert(value)
            except DataError as error:
                raise within(error, f".{name}") from None
        return done

    return Codec(lambda values: each(values, item.encode), lambda data: JsonDict(each(data, item.decode)))
