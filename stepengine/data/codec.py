"""
JSON for every stored type, both ways.

The codec is driven by the annotations of the data classes and closed: ``STORED`` lists what can be stored. A stored
object is a JSON object with the member ``"type"``, its tag, and one member per field that differs from its default; tags
and member names are those of ``stepengine.data.stored``. Storing and loading are strict: an unknown type, an unknown field, a wrong value or a newer format is a
``DataError`` that says where. Nothing that is loaded can run code.
"""

from __future__ import annotations

import base64
import inspect
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from decimal import Decimal, InvalidOperation
from enum import Enum
from typing import Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

import attrs

from stepengine import errors
from stepengine.data import messages, models
from stepengine.data.alike import list_names
from stepengine.data.faults import fault, shown, within
from stepengine.data.json import JsonDict, JsonValue, freeze, freeze_object, mended, thaw
from stepengine.data.stored import STORED_TYPES, StoredType
from stepengine.data.tools import ToolLike
from stepengine.data.transcript import Transcript
from stepengine.errors import DataError, StepEngineError

__all__ = (
    "FORMAT_VERSION",
    "STORED",
    "bare",
    "bare_any",
    "from_json",
    "is_stored",
    "plain",
    "restored",
    "restored_any",
    "tag_of",
    "to_json",
)

FORMAT_VERSION = 1
"""The version of the stored form; a newer one is refused."""

# A closed list, and no class path in what is stored: a record that could name any class would decide what is imported
# and run where it is read, as one serialiser did that fell back to calling what the record names (CVE-2025-64439).
STORED: Mapping[str, type[Any]] = types.MappingProxyType({row.tag: row.cls for row in STORED_TYPES})
"""Every class that can be stored, by its tag, the value of the member ``"type"``."""

_ROWS: Mapping[type[Any], StoredType] = types.MappingProxyType({row.cls: row for row in STORED_TYPES})


def is_stored(cls: object) -> bool:
    """Return whether instances of a class can be stored."""
    return cls in _ROWS


def tag_of(cls: type[Any]) -> str:
    """Return the tag of a class in ``STORED``."""
    return _ROWS[cls].tag


# With the version of the form, for whatever is kept by itself (sessions, definitions). Values inside of a journal have
# that of their journal, once.
def to_json(value: Any) -> dict[str, Any]:
    """
    Return *value*, an instance of a class in ``STORED``, as a JSON object with the format's version.

    Raises:
        DataError: when *value* or something in it cannot be stored, naming the place.
    """
    return {"stepengine": FORMAT_VERSION, **bare(value)}


def bare(value: object) -> dict[str, Any]:
    """Return *value* as ``to_json`` does, without the format's version: for what says it once for many values."""
    try:
        return _encode_object(value)
    except RecursionError:
        msg = "nested too deeply to be stored"
        raise fault(msg) from None


def bare_any(value: object) -> object:
    """Return what ``restored_any`` reads: a stored value as ``bare`` does, several of them, or JSON."""
    try:
        return _encode_any(value)
    except RecursionError:
        msg = "nested too deeply to be stored"
        raise fault(msg) from None


def from_json(data: object) -> Any:
    """
    Return the value that ``to_json`` stored in *data*.

    Raises:
        DataError: for a newer format, an unknown type or field, or a value that does not fit, naming the place.
    """
    if not isinstance(data, Mapping) or "stepengine" not in data:
        msg = "not a stored stepengine value: there is no member 'stepengine' with the format's version"
        raise fault(msg)
    version = data["stepengine"]
    if type(version) is not int or version != FORMAT_VERSION:
        raise within(
            fault(f"this version of stepengine reads format {FORMAT_VERSION}, not {shown(version)}"), ".stepengine"
        )
    return restored({k: v for k, v in data.items() if k != "stepengine"})


def restored(data: object) -> Any:
    """
    Return the value that ``bare`` stored in *data*.

    Raises:
        DataError: as ``from_json``.
    """
    return _read(data, _decode_object)


def restored_any(data: object) -> Any:
    """
    Return the value of a member that may hold any stored value, or JSON.

    Raises:
        DataError: as ``from_json``.
    """
    return _read(data, _decode_any)


def _read(data: object, decode: Callable[[Any], object]) -> Any:
    try:
        return decode(data)
    except RecursionError:
        msg = "nested too deeply to be read"
        raise fault(msg) from None


# For eyes: a viewer that fails at one odd value shows nothing at all, so whatever has no stored form is shown as well
# as it can be. What comes out is read back by nobody.
def plain(value: object) -> Any:
    """
    Return *value* as JSON for people to look at; it never fails.

    Stored types are as ``to_json`` has them, other values by their shown fields, the rest as text.
    """
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, Enum):
        return plain(value.value)
    if isinstance(value, str):
        return mended(value)
    if isinstance(value, float):
        return value if abs(value) < float("inf") else str(value)
    return _plain_object(value)


def _plain_object(value: Any) -> object:
    if is_stored(type(value)):
        try:
            return _encode_object(value)
        except (DataError, RecursionError):
            pass
    if attrs.has(type(value)):
        fields = {a.name: plain(getattr(value, a.name)) for a in attrs.fields(type(value)) if a.repr}
        return {"type": type(value).__name__, **fields}
    if isinstance(value, (tuple, list, set, frozenset)):
        return [plain(v) for v in value]
    if isinstance(value, Mapping):
        return {plain(str(k)): plain(v) for k, v in value.items()}
    dump = getattr(value, "model_dump", None)
    return plain(dump(mode="json") if dump is not None and not isinstance(value, type) else str(value))


class _Codec(NamedTuple):
    """Two functions that raise ``DataError``: a value to JSON, and JSON to a value."""

    encode: Callable[[Any], Any]
    decode: Callable[[Any], Any]


class _Member(NamedTuple):
    """A field of a stored class: its name, its codec, and its default."""

    field: str
    codec: _Codec
    default: Any
    computed: Callable[[Any], Any] | None = None

    @property
    def has_default(self) -> bool:
        """Whether the field may be left out."""
        return self.computed is not None or self.default is not attrs.NOTHING


class _Shape(NamedTuple):
    """
    The parts of a stored class.

    Attributes:
        tag: Its tag.
        members: Its fields, by the name of the member.
        required: The members without a default.
    """

    tag: str
    members: Mapping[str, _Member]
    required: tuple[str, ...]


def _encode_object(value: Any) -> dict[str, object]:
    cls = type(value)
    shape = _SHAPES.get(cls) or _shape(cls)
    data: dict[str, object] = {"type": shape.tag}
    name = ""
    try:
        if cls is Transcript:
            name, data["messages"] = "messages", _MESSAGES.encode(value[:])
            return data
        for name, (field, codec, default, computed) in shape.members.items():
            item = getattr(value, field)
            usual = default if computed is None else computed(value)
            if item is not usual and item != usual:
                data[name] = codec.encode(item)
    except DataError as error:
        raise within(error, f".{name}") from None
    return data


# What is allowed here is narrower than what can be stored: a member that holds a message must not come back as an
# error, although both are known types.
def _decode_object(data: object, allowed: tuple[type[object], ...] = (object,)) -> object:
    tag = data.get("type") if isinstance(data, (dict, Mapping)) else None
    if not isinstance(tag, str):
        msg = f"expected an object with a 'type', not {shown(data)}"
        raise fault(msg)
    cls = STORED.get(tag)
    if cls is None or not issubclass(cls, allowed):
        known = (
            "" if allowed == (object,) else f"; it can be {list_names([_name(c) for c in allowed], tag, quoted=True)}"
        )
        msg = f"unknown type {shown(tag)}{known}"
        raise fault(msg)
    return _decode_members(data, cls, _SHAPES.get(cls) or _shape(cls))


def _decode_members(data: Any, cls: type[object], shape: _Shape) -> object:
    members, values = shape.members, dict[str, Any]()
    for name, item in data.items():
        if name == "type":
            continue
        member = members.get(name)
        if member is None:
            raise within(
                fault(f"unknown member of {shape.tag!r}, which has {list_names(sorted(members), name, quoted=True)}"),
                f".{name}",
            )
        try:
            values[member.field] = member.codec.decode(item)
        except DataError as error:
            raise within(error, f".{name}") from None
    for name in shape.required:
        if name not in data:
            raise within(fault(f"{shape.tag!r} needs this member"), f".{name}")
    return _make_decoded(cls, shape.tag, values)


# Constructors check more than codecs do, and raise what they like; whoever reads a journal must see one kind of error,
# with a place.
def _make_decoded(cls: type[Any], tag: str, values: Mapping[str, Any]) -> Any:
    make = models.Thinking.of_stored if cls is models.Thinking else cls
    try:
        return make(**values)
    except (TypeError, ValueError, StepEngineError) as error:
        msg = f"this is not a valid {tag!r}: {error}"
        raise fault(msg) from error


# Made when a class is first stored or read, and not for all of them on import: hints have to be evaluated for it, which
# would be felt in every `import stepengine`. What is wrong is told by `fault`, whose path begins at `$`; each level on
# the way out puts its own step before it (`within`), so nobody has to carry a path on the way in.
def _shape(cls: type[object]) -> _Shape:
    """Find out what a class is made of, once."""
    if not is_stored(cls):
        msg = f"a {cls.__name__} cannot be stored"
        raise fault(msg)
    fields = _members_of_error(cls) if issubclass(cls, StepEngineError) else _members_of_attrs(cls)
    made = _SHAPES[cls] = _shape_of(_ROWS[cls], fields)
    return made


def _shape_of(row: StoredType, fields: Sequence[_Member]) -> _Shape:
    names = row.names()
    if names.keys() != {member.field for member in fields}:
        differing = ", ".join(sorted(names.keys() ^ {member.field for member in fields}))
        msg = (
            f"the row {row.tag!r} of stepengine/data/stored.py does not match {row.cls.__name__}; look at: {differing}"
        )
        raise StepEngineError(msg)
    members = {names[member.field]: member for member in fields}
    return _Shape(row.tag, members, tuple([name for name, member in members.items() if not member.has_default]))


# By its default, made or given, a field is left out when it is stored: a state has forty fields, of which few say
# anything. A field that is marked as not stored is one of this process, such as a function.
def _members_of_attrs(cls: type[Any]) -> list[_Member]:
    hints = get_type_hints(cls, localns=_NAMES)
    members = []
    for field in attrs.fields(cls):
        if not field.init or not field.metadata.get("stored", True):
            continue
        default, computed = field.default, None
        if isinstance(default, attrs.Factory):  # type: ignore[arg-type]
            default, computed = (None, default.factory) if default.takes_self else (default.factory(), None)
        codec = _ENDLESS if field.metadata.get("endless") else _codec(hints[field.name])
        members.append(_Member(field.name, codec, default, computed))
    return members


def _members_of_error(cls: type[StepEngineError]) -> list[_Member]:
    hints = get_type_hints(cls.__init__, globalns=vars(errors))
    parameters = inspect.signature(cls).parameters
    return [_Member(f, _codec(hints[f]), parameters[f].default) for f in ("message", *cls.fields)]


# From annotations, so that the stored form cannot drift from the class: a list of fields by hand would forget the next
# one, and a field that is not stored is lost at the first resume.
def _codec(hint: Any) -> _Codec:
    """Return the codec of an annotation."""
    origin = get_origin(hint) or hint
    arguments = get_args(hint)
    if hint in _SCALARS:
        return _SCALARS[hint]
    if hint is _Raw or isinstance(hint, TypeVar):
        return _RAW
    if hint is Any:
        return _ANY
    if origin is Literal:
        return _literal(arguments)
    if origin in (Union, types.UnionType):
        return _union(arguments)
    return _codec_of_class(origin, arguments)


def _codec_of_class(cls: type[object], arguments: tuple[object, ...]) -> _Codec:
    if issubclass(cls, Mapping):
        return _mapping(_codec(arguments[1]))
    if cls is tuple or cls is Sequence:
        return _sequence(_codec(arguments[0]))
    if issubclass(cls, Enum):
        return _literal(tuple([m.value for m in cls]), cls)
    return _objects((cls,))


def _name(cls: type[object]) -> str:
    return _ROWS[cls].tag if cls in _ROWS else cls.__name__


def _objects(classes: tuple[type[object], ...]) -> _Codec:
    def checked(value: object) -> object:
        if isinstance(value, classes):
            return value
        msg = f"expected one of {list_names([_name(c) for c in classes], quoted=True)}, not {shown(value)}"
        raise fault(msg)

    return _Codec(lambda value: _encode_object(checked(value)), lambda data: _decode_object(data, classes))


# Our own classes say what they are by their `type`; of anything else it has to be tried which option fits.
def _union(options: tuple[Any, ...]) -> _Codec:
    optional = type(None) in options
    classes = tuple([get_origin(o) or o for o in options if is_stored(get_origin(o) or o)])
    codecs = [_codec(o) for o in options if o is not type(None) and not is_stored(get_origin(o) or o)]
    if classes:
        codecs.append(_objects(classes))
    chosen = codecs[0] if len(codecs) == 1 else _first_of(codecs)
    return _or_none(chosen) if optional else chosen


def _first_of(codecs: Sequence[_Codec]) -> _Codec:
    def first(way: str) -> Callable[[Any], Any]:
        def convert(value: object) -> object:
            failures = []
            for codec in codecs:
                try:
                    return getattr(codec, way)(value)
                except DataError as error:
                    failures.append(error)
            # The option that got furthest into the value is the one that was meant.
            raise max(failures, key=lambda error: len(error.path))

        return convert

    return _Codec(first("encode"), first("decode"))


def _or_none(codec: _Codec) -> _Codec:
    encode, decode = codec.encode, codec.decode
    return _Codec(
        lambda value: None if value is None else encode(value), lambda data: None if data is None else decode(data)
    )


# A result may be one of our values, several of them, or an author's JSON, and the three must stay apart when they are
# read: JSON of an author that looks like one of ours would otherwise come back as ours.
def _encode_any(value: object) -> object:
    if is_stored(type(value)):
        return _encode_object(value)
    if isinstance(value, tuple) and all(is_stored(type(v)) for v in value):
        return {"type": "tuple", "items": _ITEMS.encode(value)}
    return {"type": "json", "value": _RAW.encode(value)}


def _decode_any(data: Any) -> object:
    kind = data.get("type") if isinstance(data, (dict, Mapping)) else None
    if kind == "json":
        return _decode_only(data, "value", _RAW)
    return _decode_only(data, "items", _ITEMS) if kind == "tuple" else _decode_object(data)


def _decode_only(data: Mapping[str, object], member: str, codec: _Codec) -> object:
    if data.keys() != {"type", member}:
        msg = f"an object of type {data['type']!r} has exactly the member {member!r}"
        raise fault(msg)
    try:
        return codec.decode(data[member])
    except DataError as error:
        raise within(error, f".{member}") from None


# --- scalars, lists and objects --------------------------------------------------------------------------------------


def _check_only(check: Callable[[Any], object]) -> _Codec:
    return _Codec(check, check)


def _frozen_scalar(kinds: tuple[type, ...], what: str) -> _Codec:
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
_RAW = _Codec(lambda value: thaw(_freeze_json(value)), freeze)
_SCALARS: dict[Any, _Codec] = {
    str: _TEXT,
    int: _frozen_scalar((int,), "a whole number"),
    float: _frozen_scalar((int, float), "a number"),
    bool: _frozen_scalar((bool,), "true or false"),
    Decimal: _Codec(_decimal_to_text, _text_to_decimal),
    bytes: _Codec(_bytes_to_text, _text_to_bytes),
    JsonDict: _Codec(lambda value: thaw(freeze_object(value)), freeze_object),
}


def _time_to_json(value: object) -> object:
    return "inf" if value == float("inf") else value if value is None else _SCALARS[float].encode(value)


def _json_to_time(data: object) -> object:
    return float("inf") if data == "inf" else data if data is None else _SCALARS[float].decode(data)


_ENDLESS = _Codec(_time_to_json, _json_to_time)
"""Seconds without an end are a text: JSON has no number for them."""


def _literal(values: tuple[object, ...], make: type[Enum] | None = None) -> _Codec:
    """Return the codec of a choice between strings; *make* turns them into members of an enumeration."""

    def check(data: object) -> Any:
        if isinstance(data, str) and data in values:
            return make(data) if make else str.__str__(data)
        msg = f"expected one of {list_names(map(str, values), data, quoted=True)}, not {shown(data)}"
        raise fault(msg)

    return _Codec(lambda value: str.__str__(check(value)), check)


def _sequence(item: _Codec) -> _Codec:
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

    return _Codec(lambda values: each(values, item.encode), lambda data: tuple(each(data, item.decode)))


def _mapping(item: _Codec) -> _Codec:
    """Return the codec of an object whose members are *item*; ``type`` is a member like any other."""

    def each(values: Any, convert: Callable[[Any], Any]) -> dict[str, Any]:
        if not isinstance(values, Mapping):
            msg = f"expected an object, not {shown(values)}"
            raise fault(msg)
        done: dict[str, object] = {}
        for key, value in values.items():
            name = _SCALARS[str].decode(key)
            try:
                done[name] = convert(value)
            except DataError as error:
                raise within(error, f".{name}") from None
        return done

    return _Codec(lambda values: each(values, item.encode), lambda data: JsonDict(each(data, item.decode)))


class _Raw:
    """Stands for ``JsonValue`` in annotations."""


_SHAPES: dict[type[Any], _Shape] = {}
_NAMES = {"JsonDict": JsonDict, "JsonValue": _Raw, "ToolLike": ToolLike} | {
    row.cls.__name__: row.cls for row in STORED_TYPES
}
"""Further names in annotations: classes that a module imports for type checkers only."""
_ANY = _Codec(_encode_any, _decode_any)
_ITEMS = _sequence(_objects((object,)))
_MESSAGES = _sequence(_objects((messages.UserMessage, messages.AssistantMessage, messages.ToolMessage)))
_SHAPES[Transcript] = _shape_of(_ROWS[Transcript], [_Member("messages", _MESSAGES, attrs.NOTHING)])
