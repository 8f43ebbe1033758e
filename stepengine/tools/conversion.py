"""
Conversion of return values to tool results and JSON, and of results back to annotated types.

The size limits of error messages, images and documents are here, too.
"""

from __future__ import annotations

import datetime as dt
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from enum import Enum
from functools import partial
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, cast

import attrs

from stepengine.data.json import JsonDict, JsonList, JsonValue, canonical, compact, freeze, hint_at_mistake
from stepengine.data.media_types import IMAGES, find_media_type
from stepengine.data.messages import (
    DocumentPart,
    ImagePart,
    JsonPart,
    ResultPart,
    TextPart,
    ToolReferencePart,
    ToolResult,
)
from stepengine.data.result_cuts import SMALL, is_shortened, shorten_parts
from stepengine.data.typed_values import get_compared_fields, list_validation_problems, to_round_trip_json
from stepengine.data.visible import cut_end
from stepengine.errors import DataError, DefinitionError, ToolError
from stepengine.tools.iterables import REMEDY, find_one_shot_iterable

if TYPE_CHECKING:
    from pydantic import TypeAdapter

MIB = 1024 * 1024
"""The number of bytes in a mebibyte."""
ERROR_CHARS = 4_000
"""A screen or two of a traceback: the model needs its message, and pays for the rest at every further step."""
IMAGE_BYTES = 5 * MIB
"""Anthropic documents 5 MB for an image, the strictest limit among the providers."""
DOCUMENT_BYTES = 32 * MIB
"""Anthropic documents 32 MB for a whole request, so a larger document cannot be sent at all."""

PARTS = (TextPart, JsonPart, ImagePart, DocumentPart, ToolReferencePart)
PLAIN = frozenset({*SMALL, str, JsonDict, JsonList})
"""Types whose values are JSON."""
SURROGATE = re.compile("[\ud800-\udfff]")
PDF = "application/pdf"


def make_tool_result(value: Any, max_chars: int | None = None, result_type: Any = Any) -> ToolResult:
    """
    Return the tool result for the return value of a body; an error result if the value cannot be encoded.

    Args:
        value: Text, JSON, a part, a sequence of parts and strings, a ``ToolResult``, or a value that ``encode`` accepts.
        max_chars: The limit of ``request_truncation``, in characters; ``None`` without one.
        result_type: The type to which the caller may decode the result; a value that would not be equal then is an error.
    """
    kind = type(value)
    try:
        if max_chars is None and kind is str:
            return ToolResult((TextPart(value if value.isascii() else replace_surrogates(value)),))
        if max_chars is None and kind in SMALL:
            return ToolResult((JsonPart(value),))
        result = _wrap_result(value, result_type)
        useless = result.change.find_misuse("tool") if result.change is not None else ""
        return ToolResult.error(f"the tool returned {useless}") if useless else _clean_and_cut_parts(result, max_chars)
    except DataError as error:
        return ToolResult.error(f"the tool's result is not serialisable: {error}")
    except Exception as error:  # noqa: BLE001  (a value may be hostile in any way)
        return ToolResult.error(
            f"the tool's result is not serialisable: a {kind.__name__} raised {format_tool_error(error)}"
        )


def _wrap_result(value: object, result_type: Any) -> ToolResult:
    """Return a returned value as a tool result: results and parts unchanged, text as text, other values encoded as JSON."""
    if isinstance(value, ToolResult):
        return value
    if isinstance(value, str):
        return ToolResult((TextPart(str.__str__(value)),))
    if isinstance(value, PARTS):
        return ToolResult((value,))
    if isinstance(value, list | tuple) and any(isinstance(v, PARTS) for v in value):
        return ToolResult(value)
    return ToolResult((JsonPart(_encode_result(value, result_type)),))


def _encode_result(value: object, result_type: Any) -> JsonValue:
    """Return a returned value as JSON; a value that is not plain JSON is encoded by *result_type*, if that can be decoded again."""
    adapter = None if result_type is Any or not contains_non_json_value(value) else _find_type_adapter(result_type)
    # Includes computed fields, for readers of the JSON, if the type allows it.
    return (
        encode(value)
        if adapter is None
        else encode_typed(value, adapter, "result", lambda stored: adapter.validate_json(compact(stored)), [encode])
    )


def _clean_and_cut_parts(result: ToolResult, max_chars: int | None) -> ToolResult:
    """Return a result with lone surrogates replaced and media validated, cut to *max_chars* characters if given."""
    parts: list[ResultPart] = []
    for part in result.content:
        if isinstance(part, TextPart):
            text = replace_surrogates(part.text)
            parts.append(part if text is part.text else attrs.evolve(part, text=text))
        elif isinstance(part, ImagePart | DocumentPart):
            parts.append(_require_valid_media(part))
        else:
            parts.append(part)
    made = tuple(parts) if max_chars is None else shorten_parts(tuple(parts), max_chars)
    same = len(made) == len(result.content) and all(a is b for a, b in zip(made, result.content, strict=True))
    return result if same else attrs.evolve(result, content=made)


def replace_surrogates(text: str) -> str:
    """Return *text* with each lone surrogate replaced by U+FFFD, since no encoding can store it."""
    return SURROGATE.sub("\ufffd", text) if SURROGATE.search(text) else text


def _require_valid_media(part: ImagePart | DocumentPart) -> ImagePart | DocumentPart:
    """Return a media part unchanged; raise ``DataError`` if it is too large, or its bytes are not of a supported or the stated type."""
    if part.data is None:
        return part
    is_image = isinstance(part, ImagePart)
    word, cap = ("image", IMAGE_BYTES) if is_image else ("document", DOCUMENT_BYTES)
    if len(part.data) > cap:
        msg = f"the {word} has {len(part.data):,} bytes; at most {cap:,} are allowed"
        raise DataError(msg)
    found = find_media_type(part.data)
    if is_image and found not in IMAGES:
        what = f"{found!r}" if found else "of no type that is known"
        msg = f"the image is said to be {part.mime_type!r}, but its bytes are none of {', '.join(IMAGES)}: they are {what}"
        raise DataError(msg)
    if part.mime_type == PDF and found != PDF:
        msg = f"the document is said to be {PDF!r}, but its bytes are not"
        raise DataError(msg)
    return part


def format_tool_error(error: BaseException) -> str:
    """Return ``ClassName: message`` of an exception, without known secrets, at most 4,000 characters, even if ``__str__`` fails."""
    if isinstance(error, ToolError):
        return redact_and_cut_error_text(error.message)
    name = type(error).__name__
    try:
        text = str(error)
    except Exception:  # noqa: BLE001  (its __str__ is the author's code too)
        text = "(its text could not be read)"
    if isinstance(error, BaseExceptionGroup):
        text = f"{text}: {'; '.join(format_tool_error(e) for e in error.exceptions[:5])}"
    return redact_and_cut_error_text(f"{name}: {text}" if text else name)


def redact_and_cut_error_text(text: str) -> str:
    """Return *text* without known secrets, cut to 4,000 characters; a note reports how many characters are missing."""
    from stepengine.redaction import KNOWN

    return replace_surrogates(cut_end(KNOWN.redact_beginning(text, ERROR_CHARS), ERROR_CHARS, len(text)))


@functools.cache
def _get_text_converters() -> tuple[tuple[Any, Callable[[Any], Any]], ...]:
    """Return (types, function) pairs; the function converts a value of these types to JSON. Cached."""
    from uuid import UUID

    return (
        ((dt.datetime, dt.date, dt.time), lambda v: v.isoformat()),
        (dt.timedelta, lambda v: v.total_seconds()),
        ((Decimal, UUID), str),
        (PurePath, lambda v: str(v).encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")),
    )


def encode(value: object) -> Any:
    """
    Return *value* as frozen JSON; raise ``DataError`` for a part without a JSON form.

    Raises:
        DataError: For a part without a JSON form, such as bytes, NaN, cycles or generators; with its type and path.
    """
    try:
        return freeze(value)
    except DataError as error:
        try:
            made = _Encoder().encode(value, "$")
        except RecursionError:
            raise error from None
        return freeze(made)


class _Encoder:
    def __init__(self) -> None:
        self._open: set[int] = set()

    def encode(self, value: object, path: str) -> Any:
        """Return a value as plain JSON; raise ``DataError`` with the *path* of a part that has no JSON form."""
        if value is None or type(value) in {str, int, float, bool, JsonDict, JsonList}:
            return value
        if isinstance(value, Enum):
            return self.encode(value.value, path)
        for kinds, text in _get_text_converters():
            if isinstance(value, kinds):
                return text(value)
        if isinstance(value, str | int | float):
            return value
        return self._encode_unless_cyclic(value, path)

    def _encode_unless_cyclic(self, value: object, path: str) -> object:
        """Return a container or object as plain JSON; raise ``DataError`` if it contains itself, or a part has no JSON form."""
        if id(value) in self._open:
            msg = f"a {type(value).__name__} at {path} contains itself, which JSON cannot"
            raise DataError(msg, path=path)
        self._open.add(id(value))
        try:
            return self._encode_members(value, path)
        finally:
            self._open.discard(id(value))

    def _encode_members(self, value: Any, path: str) -> Any:
        """Return a container, model, dataclass or attrs object as plain JSON; raise ``DataError`` for any other object."""
        import dataclasses

        if isinstance(value, Mapping):
            made = {_encode_key(k, path): self.encode(v, f"{path}.{_encode_key(k, path)}") for k, v in value.items()}
            if len(made) < len(value):
                msg = f"two keys of the {type(value).__name__} at {path} are the same as JSON, such as 1 and '1'; rename one"
                raise DataError(msg, path=path)
            return made
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
        fine = "return text, numbers, lists, dicts, dataclasses, models or result parts"
        msg = f"a {kind} at {path} is not JSON; {fine}{hint_at_mistake(value)}"
        raise DataError(msg, path=path)


def contains_non_json_value(value: object) -> bool:
    """Return True if a value is not plain JSON or contains such a value, for example a model, a date or a tuple."""
    # Without recursion, and each container once: a body may return a container of any depth, or one that contains itself.
    waiting, seen = [value], set()
    while waiting:
        one: Any = waiting.pop()
        kind = type(one)
        if kind is list or kind is dict:
            if id(one) not in seen:
                seen.add(id(one))
                waiting += one.values() if kind is dict else one
        elif kind not in PLAIN:
            return True
    return False


def dump_typed(value: object, adapter: TypeAdapter[Any], *, by_alias: bool = True) -> Any:
    """Return *value* as JSON by the type of *adapter*, without computed fields; the value is not validated."""
    return adapter.dump_python(value, mode="json", by_alias=by_alias, round_trip=True, warnings=False)


def encode_typed(
    value: object,
    adapter: TypeAdapter[Any],
    name: str,
    load: Callable[[JsonValue], Any],
    dumps: Sequence[Callable[[Any], Any]] = (),
) -> JsonValue:
    """
    Return JSON that validates to a value equal to *value*.

    A value of another type is encoded without its type: the type may accept it, such as a dict for a model.

    Args:
        value: The value.
        adapter: The type of the value.
        name: The name of the value, for messages.
        load: Converts the JSON back, as its reader will.
        dumps: Other encoders for values that are not plain JSON; they are tried first.

    Raises:
        DataError: If there is no such JSON; with the path and a suggestion.
    """
    from pydantic import ValidationError

    is_plain = not contains_non_json_value(value)
    forms: tuple[Callable[[Any], Any], ...] = (
        *([freeze] if is_plain else dumps),
        partial(dump_typed, adapter=adapter),
        partial(dump_typed, adapter=adapter, by_alias=False),
    )
    try:
        return to_round_trip_json(value, dumps=forms, load=load, name=name)
    except DataError as error:
        problem = error
    is_object = get_compared_fields(value) is not None
    try:
        typed = None if is_plain else adapter.validate_python(value)
    except ValidationError:
        typed = None
    if is_object and (type(typed) is type(value) or adapter.core_schema.get("cls") is type(value)):
        raise problem
    return (
        cast("JsonValue", encode(value))
        if typed is None
        else to_round_trip_json(typed, dumps=forms, load=load, name=name)
    )


def _encode_key(key: object, path: str) -> str:
    """Return the key of a mapping as a JSON key; raise ``DataError`` if it has no text form."""
    if isinstance(key, Enum):
        key = key.value
    if isinstance(key, str):
        return str.__str__(key)
    if isinstance(key, int) and not isinstance(key, bool):
        return int.__repr__(key)
    for kinds, text in _get_text_converters():
        if isinstance(key, kinds):
            return str(text(key))
    msg = f"a key at {path} is a {type(key).__name__}; JSON keys are strings"
    raise DataError(msg, path=path)


def decode_result(name: str, annotation: Any, result: ToolResult) -> Any:
    """Return the value of a result as the type *annotation*; raise ``ToolError`` for an error result, ``DataError`` for another type."""
    if result.is_error:
        msg = f"tool {name!r} failed: {result.text}"
        raise ToolError(msg, tool_name=name, result=result)
    if annotation is ToolResult:
        return result
    if annotation in PARTS:
        return _require_part(name, annotation, result)
    value = _get_json_or_text(result)
    if annotation not in (Any, str) and any(map(is_shortened, result.content)):
        msg = f"the result of tool {name!r} was cut by its own request_truncation(), so only text is left; remove that call"
        raise DataError(msg)
    if annotation is Any or (annotation is type(value) and type(value) in {str, int, bool}):
        return value
    if annotation is None and value is None:
        return None
    return _validate_result_value(name, annotation, value)


def _require_part(name: str, kind: type[object], result: ToolResult) -> object:
    """Return the first part of type *kind* in a result; raise ``DataError`` if there is none."""
    for part in result.content:
        if isinstance(part, kind):
            return part
    msg = f"the result of tool {name!r} contains no {kind.__name__}"
    raise DataError(msg)


def _get_json_or_text(result: ToolResult) -> object:
    """Return the value of the first JSON part of a result, else its text."""
    for part in result.content:
        if isinstance(part, JsonPart):
            return part.value
    return result.text


@functools.lru_cache(maxsize=1024)
def _make_cached_adapter(annotation: Any) -> TypeAdapter[Any]:
    """Return the pydantic adapter of a type, cached; raise ``DefinitionError`` for an iterable that can be read only once."""
    from pydantic import TypeAdapter

    made: TypeAdapter[Any] = TypeAdapter(annotation)
    place = find_one_shot_iterable(made.core_schema)
    if place is not None:
        msg = f"{place or 'it'} is an Iterable or Generator: {REMEDY}"
        raise DefinitionError(msg)
    return made


def _find_type_adapter(annotation: Any) -> TypeAdapter[Any] | None:
    """Return the pydantic adapter of a type; ``None`` if values of the type cannot be decoded from JSON."""
    from pydantic.errors import PydanticUserError

    try:
        return _make_cached_adapter(annotation)
    except (PydanticUserError, DefinitionError):
        return None
    except TypeError:  # an annotation that cannot be hashed
        return _make_cached_adapter.__wrapped__(annotation)


def _validate_result_value(name: str, annotation: object, value: object) -> Any:
    """Return JSON decoded to the type *annotation*; raise ``DataError`` if it does not match, ``DefinitionError`` for an unusable type."""
    from pydantic import ValidationError
    from pydantic.errors import PydanticUserError

    try:
        try:
            adapter = _make_cached_adapter(annotation)
        except TypeError:  # an annotation that cannot be hashed
            adapter = _make_cached_adapter.__wrapped__(annotation)
    except PydanticUserError as error:
        kind = getattr(annotation, "__name__", annotation)
        msg = f"tool {name!r} returns {kind}, which cannot be read back from JSON; return a dataclass or pydantic model"
        raise DefinitionError(msg) from error
    except DefinitionError as error:
        msg = f"the result of tool {name!r} cannot be read by its return annotation: {error.message}"
        raise DefinitionError(msg) from error
    try:
        return adapter.validate_json(compact(value))
    except ValidationError as error:
        problems = "; ".join(list_validation_problems(error, "result"))
        msg = f"the result of tool {name!r} does not match its return annotation: {problems}"
        raise DataError(msg) from error
