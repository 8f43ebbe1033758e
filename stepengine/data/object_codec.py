"""
The codec of stored objects, for any closed list of their classes.

It is driven by the annotations of the classes. A stored object is a JSON object with the member ``"type"``, its tag, and one member
per field that differs from its default. Storing and loading are strict: an unknown type, an unknown field or a wrong value is a
``DataError`` that says where. Nothing that is loaded can run code.
"""

from __future__ import annotations

import base64
import inspect
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from decimal import Decimal
from enum import Enum
from typing import Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

import attrs

from stepengine import errors
from stepengine.data.alike import list_names
from stepengine.data.faults import fault, format_value, prefix_path
from stepengine.data.json import MAX_INT, JsonDict, JsonValue, freeze, freeze_object, thaw
from stepengine.data.typed_values import is_model, model_to_json
from stepengine.data.usage import is_amount, parse_amount
from stepengine.errors import DataError, StepEngineError

FORMAT_VERSION = 1
"""The version of the stored form; a newer one is refused."""


class StoredType(NamedTuple):
    """
    One row of the table.

    Attributes:
        tag: The value of the member ``"type"``.
        cls: The class.
        members: The stored fields in order, separated by spaces, as ``field`` or ``field:member``.
        items: Of a class that is a sequence: the classes of what it holds, which is its one member.
        make: Makes a value of its stored fields, where that is not the class itself.
    """

    tag: str
    cls: type[Any]
    members: str
    items: tuple[type[Any], ...] = ()
    make: Callable[..., Any] | None = None

    def get_member_names(self) -> dict[str, str]:
        """Return the stored member name of each field."""
        pairs = [pair.partition(":") for pair in self.members.split()]
        return {field: member or field for field, _, member in pairs}


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
        is_sequence: Whether its one member is what it holds.
    """

    tag: str
    members: Mapping[str, _Member]
    required: tuple[str, ...]
    is_sequence: bool


class ObjectCodec:
    """
    Stores and loads the objects of some classes.

    Args:
        rows: The classes.

    Attributes:
        stored: The classes by their tags.
    """

    # A closed list, and no class path in the stored form: if a record could name any class, it would decide which code is
    # imported and run. One serializer called whatever the record named (CVE-2025-64439).
    def __init__(self, rows: Sequence[StoredType]) -> None:
        self.stored: Mapping[str, type[Any]] = types.MappingProxyType({row.tag: row.cls for row in rows})
        self._rows = {row.cls: row for row in rows}
        self._shapes: dict[type[Any], _Shape] = {}
        self._any = _Codec(self._encode_any, self._decode_any)
        self._copy_items = _make_sequence_codec(self._make_object_codec((object,)))

    def is_stored(self, cls: object) -> bool:
        """Return whether instances of a class can be stored."""
        return cls in self._rows

    def get_tag(self, cls: type[Any]) -> str:
        """Return the tag of a class."""
        return self._rows[cls].tag

    # With the version of the form, for values that are stored alone (sessions, definitions). Values inside of a journal have
    # the version of their journal, once.
    def to_json(self, value: Any) -> dict[str, Any]:
        """
        Return *value*, an instance of one of the classes, as a JSON object with the format's version.

        Raises:
            DataError: when *value* or something in it cannot be stored, naming the place.
        """
        return {"stepengine": FORMAT_VERSION, **self.encode_stored(value)}

    def encode_stored(self, value: object) -> dict[str, Any]:
        """Return *value* as ``to_json`` does, without the format's version, which the container states once."""
        try:
            return self._encode_object(value)
        except RecursionError:
            msg = "nested too deeply to be stored"
            raise fault(msg) from None

    def encode_stored_or_json(self, value: object) -> object:
        """Return the stored form of a stored type, of a sequence of them, or of JSON; see ``decode_stored_or_json``."""
        try:
            return self._encode_any(value)
        except RecursionError:
            msg = "nested too deeply to be stored"
            raise fault(msg) from None

    def from_json(self, data: object) -> Any:
        """
        Return the value in *data*, as stored by ``to_json``.

        Raises:
            DataError: for a newer format, an unknown type or field, or a value that does not fit, naming the place.
        """
        if not isinstance(data, Mapping) or "stepengine" not in data:
            msg = "not a stored stepengine value: there is no member 'stepengine' with the format's version"
            raise fault(msg)
        version = data["stepengine"]
        if type(version) is not int or version != FORMAT_VERSION:
            raise prefix_path(
                fault(f"this version of stepengine reads format {FORMAT_VERSION}, not {format_value(version)}"),
                ".stepengine",
            )
        return self.decode_stored({k: v for k, v in data.items() if k != "stepengine"})

    def decode_stored(self, data: object) -> Any:
        """
        Return the value in *data*, as stored by ``encode_stored``.

        Raises:
            DataError: as ``from_json``.
        """
        return _decode_with_depth_error(data, self._decode_object)

    def decode_stored_or_json(self, data: object) -> Any:
        """
        Return the value of a member that contains a stored value or JSON.

        Raises:
            DataError: as ``from_json``.
        """
        return _decode_with_depth_error(data, self._decode_any)

    def _encode_object(self, value: Any) -> dict[str, object]:
        cls = type(value)
        shape = self._shapes.get(cls) or self._make_and_cache_shape(cls)
        data: dict[str, object] = {"type": shape.tag}
        name = ""
        try:
            if shape.is_sequence:
                (name,) = shape.required
                data[name] = shape.members[name].codec.encode(value[:])
                return data
            for name, (field, codec, default, computed) in shape.members.items():
                item = getattr(value, field)
                usual = default if computed is None else computed(value)
                if item is not usual and item != usual:
                    data[name] = codec.encode(item)
        except DataError as error:
            raise prefix_path(error, f".{name}") from None
        return data

    # The allowed classes are narrower than the storable ones: a member for a message must not be read as an error, although
    # both are known types.
    def _decode_object(self, data: object, allowed: tuple[type[object], ...] = (object,)) -> object:
        tag = data.get("type") if isinstance(data, (dict, Mapping)) else None
        if not isinstance(tag, str):
            msg = f"expected an object with a 'type', not {format_value(data)}"
            raise fault(msg)
        cls = self.stored.get(tag)
        if cls is None or not issubclass(cls, allowed):
            known = (
                ""
                if allowed == (object,)
                else f"; it can be {list_names([self._get_type_label(c) for c in allowed], tag, quoted=True)}"
            )
            msg = f"unknown type {format_value(tag)}{known}"
            raise fault(msg)
        return self._decode_members(data, cls, self._shapes.get(cls) or self._make_and_cache_shape(cls))

    def _decode_members(self, data: Any, cls: type[object], shape: _Shape) -> object:
        members, values = shape.members, dict[str, Any]()
        for name, item in data.items():
            if name == "type":
                continue
            member = members.get(name)
            if member is None:
                raise prefix_path(
                    fault(
                        f"unknown member of {shape.tag!r}, which has {list_names(sorted(members), name, quoted=True)}"
                    ),
                    f".{name}",
                )
            try:
                values[member.field] = member.codec.decode(item)
            except DataError as error:
                raise prefix_path(error, f".{name}") from None
        for name in shape.required:
            if name not in data:
                raise prefix_path(fault(f"{shape.tag!r} needs this member"), f".{name}")
        return _make_instance(self._rows[cls], values)

    # Made when a class is first stored or read, not for all classes on import: evaluating hints would slow every
    # `import stepengine`. Errors come from `fault`, whose path starts at `$`. Each level adds its own step to the path of the
    # error (`prefix_path`), so no path is passed down.
    def _make_and_cache_shape(self, cls: type[object]) -> _Shape:
        """Compute, store and return the shape of a class."""
        if not self.is_stored(cls):
            msg = f"a {cls.__name__} cannot be stored"
            raise fault(msg)
        made = self._shapes[cls] = _make_shape(self._rows[cls], self._make_members(cls))
        return made

    def _make_members(self, cls: type[Any]) -> list[_Member]:
        """Return the stored members of a class, by its fields or its row."""
        row = self._rows[cls]
        if row.items:
            return [_Member(row.members, _make_sequence_codec(self._make_object_codec(row.items)), attrs.NOTHING)]
        return self._make_error_members(cls) if issubclass(cls, StepEngineError) else self._make_attrs_members(cls)

    # A field with its default, fixed or computed, is omitted when it is stored: a state has twenty fields, most of them
    # default. A field marked as not stored belongs to this process, such as a function.
    def _make_attrs_members(self, cls: type[Any]) -> list[_Member]:
        hints = get_type_hints(cls, localns=_NAMES)
        members = []
        for field in attrs.fields(cls):
            if not field.init or not field.metadata.get("stored", True):
                continue
            default, computed = field.default, None
            if isinstance(default, attrs.Factory):  # type: ignore[arg-type]
                default, computed = (None, default.factory) if default.takes_self else (default.factory(), None)
            codec = _ENDLESS if field.metadata.get("endless") else self._make_codec(hints[field.name])
            members.append(_Member(field.name, codec, default, computed))
        return members

    def _make_error_members(self, cls: type[StepEngineError]) -> list[_Member]:
        hints = get_type_hints(cls.__init__, globalns=vars(errors))
        parameters = inspect.signature(cls).parameters
        return [_Member(f, self._make_codec(hints[f]), parameters[f].default) for f in ("message", *cls.fields)]

    # From annotations, so that the stored form cannot differ from the class: a manual list of fields would miss new ones,
    # and a field that is not stored is lost at the first resume.
    def _make_codec(self, hint: Any) -> _Codec:
        origin = get_origin(hint) or hint
        arguments = get_args(hint)
        if hint in _SCALARS:
            return _SCALARS[hint]
        if hint is _Raw or isinstance(hint, TypeVar):
            return _RAW
        if hint is Any:
            return self._any
        if origin is Literal:
            return _make_choice_codec(arguments)
        if origin in (Union, types.UnionType):
            return self._make_union_codec(arguments)
        return self._make_class_codec(origin, arguments)

    def _make_class_codec(self, cls: type[object], arguments: tuple[object, ...]) -> _Codec:
        if issubclass(cls, Mapping):
            return _make_mapping_codec(self._make_codec(arguments[1]))
        if cls is tuple or cls is Sequence:
            return _make_sequence_codec(self._make_codec(arguments[0]))
        if issubclass(cls, Enum):
            return _make_choice_codec(tuple([m.value for m in cls]), cls)
        # The stored value of a base class is of one of its subclasses.
        derived = (
            () if self.is_stored(cls) else tuple([row.cls for row in self._rows.values() if issubclass(row.cls, cls)])
        )
        return self._make_object_codec(derived or (cls,))

    def _get_type_label(self, cls: type[object]) -> str:
        return self._rows[cls].tag if cls in self._rows else cls.__name__

    def _make_object_codec(self, classes: tuple[type[object], ...]) -> _Codec:
        def require_instance(value: object) -> object:
            if isinstance(value, classes):
                return value
            msg = f"expected one of {list_names([self._get_type_label(c) for c in classes], quoted=True)}, not {format_value(value)}"
            raise fault(msg)

        return _Codec(
            lambda value: self._encode_object(require_instance(value)), lambda data: self._decode_object(data, classes)
        )

    # Our own classes are identified by their `type`; for anything else each option is tried.
    def _make_union_codec(self, options: tuple[Any, ...]) -> _Codec:
        optional = type(None) in options
        classes = tuple([get_origin(o) or o for o in options if self.is_stored(get_origin(o) or o)])
        codecs = [
            self._make_codec(o) for o in options if o is not type(None) and not self.is_stored(get_origin(o) or o)
        ]
        if classes:
            codecs.append(self._make_object_codec(classes))
        chosen = codecs[0] if len(codecs) == 1 else _make_first_match_codec(codecs)
        return _make_optional_codec(chosen) if optional else chosen

    # A result may be one of our values, several of them, or an author's JSON. Reading must distinguish the three: an author's
    # JSON that looks like one of our values would otherwise be read as one.
    def _encode_any(self, value: object) -> object:
        """Return the stored form of a stored object, of a tuple of them, or of JSON."""
        if self.is_stored(type(value)):
            return self._encode_object(value)
        if isinstance(value, tuple) and all(self.is_stored(type(v)) for v in value):
            return {"type": "tuple", "items": self._copy_items.encode(value)}
        return {"type": "json", "value": _RAW.encode(value)}

    def _decode_any(self, data: Any) -> object:
        """Return the value that ``_encode_any`` stored."""
        kind = data.get("type") if isinstance(data, (dict, Mapping)) else None
        if kind == "json":
            return _decode_single_member(data, "value", _RAW)
        return _decode_single_member(data, "items", self._copy_items) if kind == "tuple" else self._decode_object(data)


def _make_shape(row: StoredType, fields: Sequence[_Member]) -> _Shape:
    """Return the stored shape of a class; raise ``StepEngineError`` if its row does not match its fields."""
    names = row.get_member_names()
    if names.keys() != {member.field for member in fields}:
        differing = ", ".join(sorted(names.keys() ^ {member.field for member in fields}))
        msg = (
            f"the row {row.tag!r} of stepengine/data/stored.py does not match {row.cls.__name__}; look at: {differing}"
        )
        raise StepEngineError(msg)
    members = {names[member.field]: member for member in fields}
    required = tuple([name for name, member in members.items() if not member.has_default])
    return _Shape(row.tag, members, required, bool(row.items))


# Constructors check more than codecs do, and raise any error; readers of a journal need one kind of error, with a
# location.
def _make_instance(row: StoredType, values: Mapping[str, Any]) -> Any:
    try:
        return (row.make or row.cls)(**values)
    except (TypeError, ValueError, StepEngineError) as error:
        msg = f"this is not a valid {row.tag!r}: {error}"
        raise fault(msg) from error


def _decode_with_depth_error(data: object, decode: Callable[[Any], object]) -> Any:
    """Return the decoded value; a ``RecursionError`` becomes a ``DataError``."""
    try:
        return decode(data)
    except RecursionError:
        msg = "nested too deeply to be read"
        raise fault(msg) from None


def _make_first_match_codec(codecs: Sequence[_Codec]) -> _Codec:
    """Return a codec that tries several codecs in order."""

    def make_converter(method: str) -> Callable[[Any], Any]:
        def convert(value: object) -> object:
            failures = []
            for codec in codecs:
                try:
                    return getattr(codec, method)(value)
                except DataError as error:
                    failures.append(error)
            # The option that decoded the longest part of the value is most likely the intended one.
            raise max(failures, key=lambda error: len(error.path))

        return convert

    return _Codec(make_converter("encode"), make_converter("decode"))


def _make_optional_codec(codec: _Codec) -> _Codec:
    encode, decode = codec.encode, codec.decode
    return _Codec(
        lambda value: None if value is None else encode(value), lambda data: None if data is None else decode(data)
    )


def _decode_single_member(data: Mapping[str, object], member: str, codec: _Codec) -> object:
    """Return the decoded *member* of an object that must have no other member besides its type."""
    if data.keys() != {"type", member}:
        msg = f"an object of type {data['type']!r} has exactly the member {member!r}"
        raise fault(msg)
    try:
        return codec.decode(data[member])
    except DataError as error:
        raise prefix_path(error, f".{member}") from None


# --- scalars, lists and objects --------------------------------------------------------------------------------------


def _make_scalar_codec(kinds: tuple[type, ...], expected: str) -> _Codec:
    """Return the codec of values of *kinds*, which are stored unchanged; *expected* describes them in errors."""

    def check_scalar(value: object) -> Any:
        if isinstance(value, kinds) and (bool in kinds or not isinstance(value, bool)):
            # Members are counts and the like, which are added up and stored in columns; a number of a user is JSON.
            if isinstance(value, int) and not -MAX_INT - 1 <= value <= MAX_INT:
                msg = "the number has more than 64 bits"
                raise fault(msg)
            return freeze(value)
        msg = f"expected {expected}, not {format_value(value)}"
        raise fault(msg)

    return _Codec(check_scalar, check_scalar)


def _decimal_to_text(value: object) -> str:
    if is_amount(value):
        return str(value)
    msg = f"expected a finite decimal number, not {format_value(value)}"
    raise fault(msg)


def _text_to_decimal(data: object) -> Decimal:
    value = parse_amount(data)
    if value is not None:
        return value
    msg = f"expected a decimal number as text, not {format_value(data)}"
    raise fault(msg)


def _bytes_to_text(value: object) -> str:
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    msg = f"expected bytes, not {format_value(value)}"
    raise fault(msg)


def _text_to_bytes(data: object) -> bytes:
    try:
        return base64.b64decode(data if isinstance(data, str) else "*", validate=True)
    except ValueError:
        msg = f"expected base64 text, not {format_value(data)}"
        raise fault(msg) from None


def _freeze_json_or_model(value: object) -> JsonValue:
    """Return a value of a JSON field as JSON. An output may be a pydantic model, which has a JSON form of its own."""
    plain: JsonValue
    try:
        plain = freeze(value)
    except DataError:
        if not is_model(value):
            raise
        plain = model_to_json(value)
    return plain


_TEXT = _make_scalar_codec((str,), "text")
_RAW = _Codec(lambda value: thaw(_freeze_json_or_model(value)), freeze)
_SCALARS: dict[Any, _Codec] = {
    str: _TEXT,
    int: _make_scalar_codec((int,), "a whole number"),
    float: _make_scalar_codec((int, float), "a number"),
    bool: _make_scalar_codec((bool,), "true or false"),
    Decimal: _Codec(_decimal_to_text, _text_to_decimal),
    bytes: _Codec(_bytes_to_text, _text_to_bytes),
    JsonDict: _Codec(lambda value: thaw(freeze_object(value)), freeze_object),
}


def _seconds_to_json(value: object) -> object:
    return "inf" if value == float("inf") else value if value is None else _SCALARS[float].encode(value)


def _json_to_seconds(data: object) -> object:
    return float("inf") if data == "inf" else data if data is None else _SCALARS[float].decode(data)


_ENDLESS = _Codec(_seconds_to_json, _json_to_seconds)
"""Seconds without an end are a text: JSON has no number for them."""


def _make_choice_codec(values: tuple[object, ...], make: type[Enum] | None = None) -> _Codec:
    """Return the codec of a choice between strings; *make* turns them into members of an enumeration."""

    def check_choice(data: object) -> Any:
        if isinstance(data, str) and data in values:
            return make(data) if make else str.__str__(data)
        msg = f"expected one of {list_names(map(str, values), data, quoted=True)}, not {format_value(data)}"
        raise fault(msg)

    return _Codec(lambda value: str.__str__(check_choice(value)), check_choice)


def _make_sequence_codec(item: _Codec) -> _Codec:
    """Return the codec of a tuple of *item*."""

    def convert_items(values: Iterable[Any], convert: Callable[[Any], Any]) -> list[Any]:
        if not isinstance(values, (list, tuple)):
            msg = f"expected a list, not {format_value(values)}"
            raise fault(msg)
        done: list[object] = []
        try:
            for value in values:
                done.append(convert(value))  # noqa: PERF401 - the error below needs the index
        except DataError as error:
            raise prefix_path(error, f"[{len(done)}]") from None
        return done

    return _Codec(
        lambda values: convert_items(values, item.encode), lambda data: tuple(convert_items(data, item.decode))
    )


def _make_mapping_codec(item: _Codec) -> _Codec:
    """Return the codec of an object whose members are *item*; ``type`` is a member like any other."""

    def convert_members(values: Any, convert: Callable[[Any], Any]) -> dict[str, Any]:
        if not isinstance(values, Mapping):
            msg = f"expected an object, not {format_value(values)}"
            raise fault(msg)
        done: dict[str, object] = {}
        for key, value in values.items():
            name = _SCALARS[str].decode(key)
            try:
                done[name] = convert(value)
            except DataError as error:
                raise prefix_path(error, f".{name}") from None
        return done

    return _Codec(
        lambda values: convert_members(values, item.encode), lambda data: JsonDict(convert_members(data, item.decode))
    )


class _Raw:
    """A placeholder for ``JsonValue`` in annotations."""


_NAMES = {"JsonDict": JsonDict, "JsonValue": _Raw}
"""Names in annotations with another meaning here."""
