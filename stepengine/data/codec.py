"""
JSON for every stored type, both ways.

The codec is driven by the annotations of the data classes and closed: ``STORED`` lists what can be stored. A stored
object is a JSON object with the member ``"type"`` and one member per field that differs from its default; member names
are field names. Storing and loading are strict: an unknown type, an unknown field, a wrong value or a newer format is a
``DataError`` that says where. Nothing that is loaded can run code.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar, Union, get_args, get_origin, get_type_hints

import attrs

from stepengine import errors
from stepengine.data import (
    hooks,
    limits,
    messages,
    models,
    outcomes,
    questions,
    server_tools,
    state,
    tools,
    usage,
    waiting,
)
from stepengine.data.fields import (
    CANONICAL,
    ENDLESS,
    PLAIN,
    RAW,
    SCALARS,
    Codec,
    Style,
    fault,
    literal,
    mapping,
    sequence,
    shown,
    within,
)
from stepengine.data.generated import generated
from stepengine.data.json import JsonDict, frozen_texts, mended, quoted
from stepengine.data.transcript import Transcript
from stepengine.errors import DataError, StepEngineError

__all__ = (
    "FORMAT",
    "STORED",
    "bare",
    "bare_any",
    "from_json",
    "plain",
    "restored",
    "restored_any",
    "to_json",
    "writers_twice",
    "written",
    "written_any",
)

FORMAT = 1
"""The version of the stored form; a newer one is refused."""

SAFE_INT = 2**63
"""Below it, and above its opposite, every whole number is one of 64 bits."""

# Reading is strict, so a field that a class loses would make every older record of it unreadable; whoever removes one
# enters it here.
FORGOTTEN: Mapping[str, frozenset[str]] = {"ToolSpec": frozenset({"kind"})}
"""Fields that were stored once and say nothing any more: they are read and dropped."""

MODULES = (hooks, limits, messages, models, outcomes, questions, server_tools, state, tools, usage, waiting)


# A closed list, and no class path in what is stored: a record that could name any class would decide what is imported
# and run where it is read, as one serialiser did that fell back to calling what the record names (CVE-2025-64439). What
# is taken out below is of one process only, such as functions and hooks.
def _stored_classes() -> dict[str, type[Any]]:
    found: dict[str, type[object]] = {}
    for module in MODULES:
        for name in module.__all__:
            member = getattr(module, name)
            if isinstance(member, type) and attrs.has(member):
                found[name] = member
    how_calls_run = ("Asking", "Control", "Driving", "Ordinary", "Spawning", "Yielding")
    for name in (
        "BodyEnd",
        "Ended",
        "HookContext",
        "Hooks",
        "RunInfo",
        "RunResult",
        "SetOutput",
        "StepContext",
        "ToolBinding",
        "Validated",
        "Waited",
        "Waits",
        *how_calls_run,
    ):
        found.pop(name)
    for name in errors.__all__:
        member = getattr(errors, name)
        if issubclass(member, StepEngineError):
            found[name] = member
    found["Transcript"] = Transcript
    return found


STORED: Mapping[str, type[Any]] = types.MappingProxyType(_stored_classes())
"""Every class that can be stored, by the name that ``"type"`` holds."""


# With the version of the form, for whatever is kept by itself (sessions, definitions). Values inside of a journal have
# that of their journal, once.
def to_json(value: Any) -> dict[str, Any]:
    """
    Return *value*, an instance of a class in ``STORED``, as a JSON object with the format's version.

    Raises:
        DataError: when *value* or something in it cannot be stored, naming the place.
    """
    return {"stepengine": FORMAT, **bare(value)}


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


def written_any(value: object, style: Style) -> str:
    """Return the JSON text of ``bare_any(value)``; errors as ``bare``."""
    cls = type(value)
    return written(value, style) if cls in style.writers or _is_stored(cls) else style.json(bare_any(value))


# The text is made directly, and `bare` only when it fails: the generated writer is quick because it keeps no place, so
# the slow way is walked once more to say where the fault is. The same pair stands for reading (`_decode_object`,
# `_decode_slowly`).
def written(value: object, style: Style) -> str:
    """
    Return the JSON text of ``bare(value)`` in a style, without making that object.

    Raises:
        DataError: as ``bare``.
    """
    cls = type(value)
    try:
        return (style.writers.get(cls) or _new_writer(cls, style))(value)
    except DataError:
        bare(value)
        raise
    except RecursionError:
        msg = "nested too deeply to be stored"
        raise fault(msg) from None


def writers_twice(style: Style) -> Mapping[type[Any], Callable[[Any], tuple[str, str]]]:
    """
    Return what makes, by class, both texts of an object: the plain one and the one in a *style* that sorts; errors as ``written``.

    A journal needs both of each message, and made in one go they take half the time.
    """
    return _Pairs(style)


def _new_writer(cls: type[object], style: Style) -> Callable[[Any], str]:
    shape = _SHAPES.get(cls) or _shape(cls)
    made = style.writers[cls] = _writer_of(shape.name, shape.members, style)
    return made


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
    if type(version) is not int or version != FORMAT:
        raise within(fault(f"this version of stepengine reads format {FORMAT}, not {shown(version)}"), ".stepengine")
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
    if _is_stored(type(value)):
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


def _is_stored(cls: object) -> bool:
    return isinstance(cls, type) and STORED.get(cls.__name__) is cls


class _Member(NamedTuple):
    """A field of a stored class: its codec, and its default."""

    codec: Codec
    default: Any
    computed: Callable[[Any], Any] | None = None

    @property
    def has_default(self) -> bool:
        """Whether the field may be left out."""
        return self.computed is not None or self.default is not attrs.NOTHING


# `encode` and `decode` are generated and quick, and neither says where a fault is; the slow pair does
# (`_encode_slowly`, `_decode_slowly`), and runs only where there is one.
class _Shape(NamedTuple):
    """
    What a stored class is made of.

    Attributes:
        name: Its name.
        members: Its fields.
        required: Those without a default.
        encode: Makes a JSON object of an instance; it does not say where a fault is.
        decode: Makes an instance of a JSON object, for the classes of which there are most; neither does it.
    """

    name: str
    members: Mapping[str, _Member]
    required: tuple[str, ...]
    encode: Callable[[Any], dict[str, Any]]
    decode: Callable[[dict[str, Any]], Any] | None = None


def _encode_object(value: object) -> dict[str, object]:
    cls = type(value)
    shape = _SHAPES.get(cls) or _shape(cls)
    try:
        return shape.encode(value)
    except DataError:
        return _encode_slowly(value, shape)


def _encode_slowly(value: Any, shape: _Shape) -> dict[str, object]:
    """Raise the error of a value that cannot be stored, and say where."""
    cls = type(value)
    data: dict[str, object] = {"type": shape.name}
    field = ""
    try:
        if cls is Transcript:
            field, data["messages"] = "messages", _MESSAGES.encode(value[:])
            return data
        for field, (codec, default, computed) in shape.members.items():
            item = getattr(value, field)
            usual = default if computed is None else computed(value)
            if item is not usual and item != usual:
                data[field] = codec.encode(item)
    except DataError as error:
        raise within(error, f".{field}") from None
    return data


# What is allowed here is narrower than what can be stored: a member that holds a message must not come back as an
# error, although both are known types.
def _decode_object(data: object, allowed: tuple[type[object], ...] = (object,)) -> object:
    name = data.get("type") if type(data) is dict or isinstance(data, Mapping) else None
    if not isinstance(name, str):
        msg = f"expected an object with a 'type', not {shown(data)}"
        raise fault(msg)
    cls = STORED.get(name)
    if cls is None or not issubclass(cls, allowed):
        known = "" if allowed == (object,) else f"; it can be {[c.__name__ for c in allowed]}"
        msg = f"unknown type {shown(name)}{known}"
        raise fault(msg)
    shape = _SHAPES.get(cls) or _shape(cls)
    if shape.decode is not None and type(data) is dict:
        try:
            return shape.decode(data)
        except DataError:
            pass
    return _decode_slowly(data, cls, shape)


def _decode_slowly(data: Any, cls: type[object], shape: _Shape) -> object:
    """Return the instance that *data* holds, or say where it holds none."""
    name, members, values = shape.name, shape.members, dict[str, Any]()
    for field, item in data.items():
        if field == "type":
            continue
        member = members.get(field)
        if member is None:
            if field in FORGOTTEN.get(name, ()):
                continue
            raise within(fault(f"unknown field of {name}, which has {sorted(members)}"), f".{field}")
        try:
            values[field] = member.codec.decode(item)
        except DataError as error:
            raise within(error, f".{field}") from None
    return _make_decoded(cls, shape.required, values)


# Constructors check more than codecs do, and raise what they like; whoever reads a journal must see one kind of error,
# with a place.
def _make_decoded(cls: type[Any], required: Sequence[str], values: Mapping[str, Any]) -> Any:
    for name in required:
        if name not in values:
            raise within(fault(f"{cls.__name__} needs this field"), f".{name}")
    make = models.Thinking.of_stored if cls is models.Thinking else cls
    try:
        return make(**values)
    except (TypeError, ValueError, StepEngineError) as error:
        msg = f"this is no {cls.__name__}: {error}"
        raise fault(msg) from error


# Made when a class is first stored or read, and not for all of them on import: hints have to be evaluated for it, which
# would be felt in every `import stepengine`. What is wrong is told by `fault`, whose path begins at `$`; each level on
# the way out puts its own step before it (`within`), so nobody has to carry a path on the way in.
def _shape(cls: type[object]) -> _Shape:
    """Find out what a class is made of, once."""
    if not _is_stored(cls):
        msg = f"a {cls.__name__} cannot be stored"
        raise fault(msg)
    members = _members_of_error(cls) if issubclass(cls, StepEngineError) else _members_of_attrs(cls)
    made = _SHAPES[cls] = _shape_of(cls, members)
    return made


def _shape_of(cls: type[object], members: Mapping[str, _Member]) -> _Shape:
    required = [f for f, m in members.items() if m.default is attrs.NOTHING and m.computed is None]
    encode = _encode_transcript if cls is Transcript else _encoder_of(cls.__name__, members)
    make = QUICK.get(cls)
    return _Shape(
        cls.__name__, members, tuple(required), encode, None if make is None else _decoder_of(cls, members, make)
    )


def _encode_transcript(value: Any) -> dict[str, Any]:
    return {"type": "Transcript", "messages": _MESSAGES.encode(value[:])}


# --- the loops over the members of a class, unrolled once for it ------------------------------------------------------


# Generated code, where a loop over the fields would do: of parts, results and usage a journal holds thousands, and the
# loop looks up name, codec and default of each field anew for each of them. The source is built from our own
# annotations alone, never from data, and has lines that tracebacks and pdb can show.
def _encoder_of(name: str, members: Mapping[str, _Member]) -> Callable[[Any], dict[str, object]]:
    """Return what makes a JSON object of an instance: a member for each field that has not its default."""
    known: dict[str, object] = {}
    lines = [f"data = {{'type': {name!r}}}"]
    for number, (field, member) in enumerate(members.items()):
        known[f"encode{number}"] = member.codec.encode
        lines += _unless_usual(number, field, member, known, f"data[{field!r}] = encode{number}(item)")
    return _function(f"encoder of {name}", "value", [*lines, "return data"], known)


# One f-string for each class: what is constant (names of members, colons, commas) is in it as text, so only values are
# formatted at run time. A comma belongs to whatever may be missing, or an object whose first fields have their defaults
# would begin with one.
def _writer_of(name: str, members: Mapping[str, _Member], style: Style) -> Callable[[Any], str]:
    """
    Return what makes the text of that object: an f-string, in which what is there whatever the value is stands as it is.

    Whether a field has its default takes eight steps of the interpreter, and most have it. So all fields that seldom say
    anything are asked first, two steps each, and mostly a shorter f-string does.
    """
    if name == "Transcript":
        return lambda value: style.json(_encode_transcript(value))
    order = _order(members, style)
    style = style.inside or style
    known: dict[str, object] = {"style": style, "json": style.json, "quoted": quoted, "JsonDict": JsonDict}
    known |= {"ascii": str.isascii, "slowly": lambda value: style.json(_encode_object(value))}
    fields = [(number, field) for number, field in enumerate(order) if field != "type"]
    texts, absent = (
        {field: _written_by(number, members[field].codec, style, known) for number, field in fields},
        dict[str, str](),
    )
    reads, seldom = {field: f"item{number} = value.{field}" for number, field in fields}, dict[str, str]()
    for number, field in fields:
        member = members[field]
        if not member.has_default:
            continue
        usual = _usual(number, member, known)
        if member.computed is not None:
            reads[field] += f"; usual{number}_ = {usual}"
            usual = f"usual{number}_"
        elif not isinstance(member.default, tuple | Mapping):
            seldom[field] = usual
        # What holds anything is not the default that holds nothing, and to ask that takes half as long as to compare.
        holds = f"item{number} or " if member.computed is None and not member.default else ""
        absent[field] = f"item{number} is {usual} or not ({holds}item{number} != {usual})"
    lines = _writing(reads, seldom, order, lambda names: _object_text(name, names, texts, absent))
    return _function(f"writer of {name}", "value", _trying(lines, "slowly"), known)


def _writing(
    reads: Mapping[str, str], seldom: Mapping[str, str], order: Sequence[str], text: Callable[[Sequence[str]], str]
) -> list[str]:
    """Return the lines that read an object's members and return its text; what *seldom* has another value than this is read last."""
    lines = [read for field, read in reads.items() if field not in seldom]
    if seldom:
        asked = " and ".join([f"value.{field} is {usual}" for field, usual in seldom.items()])
        lines.append(f"if {asked}: return {text([field for field in order if field not in seldom])}")
    return [*lines, *[reads[field] for field in seldom], f"return {text(order)}"]


# A text is asked for being one by what only texts can be asked, since a question for its class takes twice as long as that;
# whatever is none takes the slow way, which says so.
def _trying(lines: Sequence[str], instead: str) -> list[str]:
    """Return lines that do what *lines* do, and where these meet what is no text call the function *instead*."""
    return ["try:", *[f"    {line}" for line in lines], f"except TypeError: return {instead}(value)"]


def _order(members: Mapping[str, _Member], style: Style) -> list[str]:
    """Return the members of an object in the order in which a style has them."""
    names = [field for field in ("type", *members) if field not in style.without]
    return sorted(names) if style.is_sorted else names


def _object_text(name: str, order: Sequence[str], texts: Mapping[str, str], absent: Mapping[str, str]) -> str:
    """
    Return the f-string for an object of members in this *order*.

    Args:
        name: Of its class.
        order: The names of its members, and ``"type"``.
        texts: The expression for the text of each.
        absent: The expression for whether it is left out, of those that may be.
    """
    text, is_open = "", True
    for field in order:
        # Whatever may be missing brings its comma: after itself up to the first member that is always there, then before.
        before, after = ("", ",") if is_open else (",", "")
        if field in absent:
            behind = f" + '{after}'" if after else ""
            text += f"{{'' if {absent[field]} else '{before}\"{field}\":' + {texts[field]}{behind}}}"
            continue
        text += f'{before}"type":"{name}"' if field == "type" else f'{before}"{field}":{{{texts[field]}}}'
        is_open = False
    return f"f'''{{{{{text}}}}}'''"


# A message stands in a request as it is, and in the fingerprint of that request with its members sorted. In these each field is
# read and quoted once for both texts; a message in which anything rare stands is written twice.

Texts: TypeAlias = "tuple[str, str]"
"""The plain text of something, and the canonical one."""


class _Pairs(dict[type[Any], Callable[[Any], Texts]]):
    """What makes both texts of an object, by class; the canonical one in the given *style*."""

    def __init__(self, style: Style) -> None:
        self._style = style

    def __missing__(self, cls: type[object]) -> Callable[[Any], Texts]:
        shape = _SHAPES.get(cls) or _shape(cls)
        members = {} if cls is Transcript else shape.members
        found = self[cls] = _pair_of(shape.name, members, self._style)
        return found


def _pair_of(name: str, members: Mapping[str, _Member], style: Style) -> Callable[[Any], Texts]:
    """Return what makes both texts of an instance."""
    known: dict[str, object] = {"texts": frozen_texts, "quoted": quoted, "ascii": str.isascii, "pairs": _PAIRS}
    known |= {"JsonDict": JsonDict, "apart": lambda value: (written(value, PLAIN), written(value, style))}
    read, lines, asked, plain, canonical = list[str](), list[str](), list[str](), dict[str, str](), dict[str, str]()
    lists = list[str]()
    for number, (field, member) in enumerate(members.items()):
        both = _both_by(number, member.codec, known)
        if both is None or (member.has_default and member.codec is not SCALARS[JsonDict]):
            # What is never asked for is never known to have its default, and such an object is always written twice.
            asked.append(f"value.{field} is {_usual(number, member, known)}" if member.has_default else "False")
            continue
        read.append(f"item{number} = value.{field}")
        condition, made = both
        asked.append(condition)
        lines += made
        plain[field], canonical[field] = f"p{number}", f"c{number}"
        if member.codec.item is not None:
            lists += [f"p{number}", f"c{number}"]
    read.append(f"if not ({' and '.join(asked)}): return apart(value)")
    texts = [
        _object_text(name, [field for field in order if field == "type" or field in plain], of, {})
        for order, of in ((_order(members, PLAIN), plain), (_order(members, style), canonical))
    ]
    for item in lists:
        texts = [text.replace(f"{{{item}}}", f"[{{{item}}}]") for text in texts]
    done = [*read, *lines, f"return {', '.join(texts)}"]
    return _function(f"writer of {name}, twice", "value", _trying(done, "apart"), known)


def _both_by(number: int, codec: Codec, known: dict[str, object]) -> tuple[str, list[str]] | None:
    """Return for what an item must be, and the lines that then make both its texts; ``None`` where its codec has no such way."""
    item, p, c = f"item{number}", f"p{number}", f"c{number}"
    if codec is SCALARS[str]:
        return f"ascii({item})", [f"{p} = {c} = quoted({item})"]
    if codec is SCALARS[JsonDict]:
        return f"type({item}) is JsonDict and {item}", [f"{p}, {c} = texts({item})"]
    if codec is RAW:
        return f"type({item}) is int and -{SAFE_INT} < {item} < {SAFE_INT}", [f"{p} = {c} = str({item})"]
    if codec.item is None or not codec.item.classes:
        return None
    known[f"of{number}"] = frozenset(codec.item.classes)
    is_one = f"type({item}) is tuple and len({item}) == 1 and type(one{number} := {item}[0]) in of{number}"
    inner = [f"{p}, {c} = pairs[type(one{number})](one{number})"]
    return is_one, inner


def _usual(number: int, member: _Member, known: dict[str, object]) -> str:
    """Return the expression for the default of a field of ``value``."""
    if member.computed is None and member.default is None:
        return "None"
    known[f"usual{number}"] = member.default if member.computed is None else member.computed
    return f"usual{number}" if member.computed is None else f"usual{number}(value)"


# The four kinds of members that most records consist of are written in the f-string itself, each guarded by a question
# that is cheaper than a call; whatever does not fit the guard goes the general way, with the same text for a result.
def _written_by(number: int, codec: Codec, style: Style, known: dict[str, object]) -> str:
    """Return the expression for the text of an item; what there is most of needs no call of ours."""
    item, otherwise = f"item{number}", f"write{number}(item{number}, style)"
    known[f"write{number}"] = codec.writer
    if codec is SCALARS[str]:
        return f"(quoted({item}) if ascii({item}) else {otherwise})"
    if codec is SCALARS[JsonDict]:
        return f"(json({item}) if type({item}) is JsonDict else {otherwise})"
    if codec is RAW:
        return f"(str({item}) if type({item}) is int and -{SAFE_INT} < {item} < {SAFE_INT} else {otherwise})"
    if codec.item is not None and codec.item.classes:
        known[f"of{number}"] = _Writers(codec.item, style)
        first = f"of{number}[type({item}[0])]({item}[0])"
        return f"('[' + {first} + ']' if type({item}) is tuple and len({item}) == 1 else {otherwise})"
    return otherwise


class _Writers(dict[type[Any], Callable[[Any], str]]):
    """What makes the text of the objects of a codec in a style, by class."""

    def __init__(self, codec: Codec, style: Style) -> None:
        self._codec = codec
        self._style = style

    def __missing__(self, cls: type[object]) -> Callable[[Any], str]:
        style = self._style
        if cls not in self._codec.classes:
            return lambda value: self._codec.writer(value, style)
        found = self[cls] = style.writers.get(cls) or _new_writer(cls, style)
        return found


def _unless_usual(number: int, field: str, member: _Member, known: dict[str, object], then: str) -> list[str]:
    """Return lines that do *then* with a field of ``value``, unless it has its default."""
    if not member.has_default:
        return [f"item = value.{field}", then]
    usual = _usual(number, member, known)
    return [f"item = value.{field}", f"usual = {usual}", f"if item is not usual and item != usual: {then}"]


# By quick makers, which neither convert nor check: the codecs of the members have just done both. `count` tells at the
# end whether there was a member that no field took; anything odd is handed to the slow way, which says what.
def _decoder_of(
    cls: type[object], members: Mapping[str, _Member], make: Callable[..., object]
) -> Callable[[dict[str, Any]], object]:
    """Return what makes an instance of a JSON object by a quick maker: what was decoded needs no converter any more."""
    known: dict[str, object] = {"MISSING": object(), "make": make, "put": object.__setattr__}
    known["slowly"] = lambda data: _decode_slowly(data, cls, _SHAPES[cls])
    lines, after = ["count = 1"], []
    for number, (field, member) in enumerate(members.items()):
        known |= {f"decode{number}": member.codec.decode, f"usual{number}": member.default}
        absent = f"v{number} = usual{number}"
        if member.computed is not None:
            known[f"usual{number}"] = member.computed
            absent = f"v{number} = MISSING"
            after.append(f"if v{number} is MISSING: put(made, {field!r}, usual{number}(made))")
        elif member.default is attrs.NOTHING:
            absent = "return slowly(data)"
        lines += [
            f"item = data.get({field!r}, MISSING)",
            f"if item is MISSING: {absent}",
            "else:",
            f"    v{number} = decode{number}(item)",
            "    count += 1",
        ]
    given = ", ".join([f"{field}=v{number}" for number, field in enumerate(members)])
    lines += ["if count != len(data): return slowly(data)", f"made = make({given})", *after, "return made"]
    return _function(f"decoder of {cls.__name__}", "data", lines, known)


def _function(what: str, parameter: str, lines: Sequence[str], known: dict[str, object]) -> Callable[[Any], Any]:
    return generated(what, "\n    ".join([f"def made({parameter}):", *lines]), known)


# By its default, made or given, a field is left out when it is stored: a state has forty fields, of which few say
# anything. A field that is marked as not stored is one of this process, such as a function.
def _members_of_attrs(cls: type[Any]) -> dict[str, _Member]:
    hints = get_type_hints(cls, globalns=_NAMES, localns=_NAMES)
    members = {}
    for field in attrs.fields(cls):
        if not field.init or not field.metadata.get("stored", True):
            continue
        default, computed = field.default, None
        if isinstance(default, attrs.Factory):  # type: ignore[arg-type]
            default, computed = (None, default.factory) if default.takes_self else (default.factory(), None)
        codec = ENDLESS if field.metadata.get("endless") else _codec(hints[field.name])
        members[field.name] = _Member(codec, default, computed)
    return members


def _members_of_error(cls: type[StepEngineError]) -> dict[str, _Member]:
    hints = get_type_hints(cls.__init__, globalns=vars(errors))
    parameters = inspect.signature(cls).parameters
    return {f: _Member(_codec(hints[f]), parameters[f].default) for f in ("message", *cls.fields)}


# From annotations, so that the stored form cannot drift from the class: a list of fields by hand would forget the next
# one, and a field that is not stored is lost at the first resume.
def _codec(hint: Any) -> Codec:
    """Return the codec of an annotation."""
    origin = get_origin(hint) or hint
    arguments = get_args(hint)
    if hint in SCALARS:
        return SCALARS[hint]
    if hint is _Raw or isinstance(hint, TypeVar):
        return RAW
    if hint is Any:
        return _ANY
    if origin is Literal:
        return literal(arguments)
    if origin in (Union, types.UnionType):
        return _union(arguments)
    return _codec_of_class(origin, arguments)


def _codec_of_class(cls: type[object], arguments: tuple[object, ...]) -> Codec:
    if issubclass(cls, Mapping):
        return mapping(_codec(arguments[1]))
    if cls is tuple or cls is Sequence:
        return sequence(_codec(arguments[0]))
    if issubclass(cls, Enum):
        return literal(tuple([m.value for m in cls]), cls)
    return _objects((cls,))


def _objects(classes: tuple[type[object], ...]) -> Codec:
    def checked(value: object) -> object:
        if isinstance(value, classes):
            return value
        msg = f"expected one of {[c.__name__ for c in classes]}, not {shown(value)}"
        raise fault(msg)

    def text(value: Any, style: Style) -> str:
        cls = type(value)
        write = style.writers.get(cls) if cls in classes else None
        return write(value) if write is not None else written(checked(value), style)

    return Codec(
        lambda value: _encode_object(checked(value)), lambda data: _decode_object(data, classes), text, classes
    )


# Our own classes say what they are by their `type`; of anything else it has to be tried which option fits.
def _union(options: tuple[Any, ...]) -> Codec:
    optional = type(None) in options
    classes = tuple([get_origin(o) or o for o in options if _is_stored(get_origin(o) or o)])
    codecs = [_codec(o) for o in options if o is not type(None) and not _is_stored(get_origin(o) or o)]
    if classes:
        codecs.append(_objects(classes))
    chosen = codecs[0] if len(codecs) == 1 else _first_of(codecs)
    return _or_none(chosen) if optional else chosen


def _first_of(codecs: Sequence[Codec]) -> Codec:
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

    return Codec(first("encode"), first("decode"))


def _or_none(codec: Codec) -> Codec:
    encode, decode, write = codec.encode, codec.decode, codec.writer
    return Codec(
        lambda value: None if value is None else encode(value),
        lambda data: None if data is None else decode(data),
        lambda value, style: "null" if value is None else write(value, style),
    )


# A result may be one of our values, several of them, or an author's JSON, and the three must stay apart when they are
# read: JSON of an author that looks like one of ours would otherwise come back as ours.
def _encode_any(value: object) -> object:
    if _is_stored(type(value)):
        return _encode_object(value)
    if type(value) is tuple and all(_is_stored(type(v)) for v in value):
        return {"type": "tuple", "items": _ITEMS.encode(value)}
    return {"type": "json", "value": RAW.encode(value)}


def _decode_any(data: Any) -> object:
    kind = data.get("type") if isinstance(data, (dict, Mapping)) else None
    if kind == "json":
        return _decode_only(data, "value", RAW)
    return _decode_only(data, "items", _ITEMS) if kind == "tuple" else _decode_object(data)


def _decode_only(data: Mapping[str, object], member: str, codec: Codec) -> object:
    if data.keys() != {"type", member}:
        msg = f"an object of type {data['type']!r} has exactly the member {member!r}"
        raise fault(msg)
    try:
        return codec.decode(data[member])
    except DataError as error:
        raise within(error, f".{member}") from None


class _Raw:
    """Stands for ``JsonValue`` in annotations."""


def _names() -> dict[str, object]:
    names: dict[str, object] = {}
    for module in MODULES:
        names.update(vars(module))
    return {**names, **STORED, "JsonDict": JsonDict, "JsonValue": _Raw}


QUICK: Mapping[type[Any], Callable[..., Any]] = {
    models.ModelReply: models.quick_reply,
    messages.JsonPart: messages.quick_json,
    messages.TextPart: messages.quick_text,
    messages.ToolCallPart: messages.quick_call,
    messages.ToolResult: messages.quick_result,
    usage.Usage: usage.quick_usage,
}
"""
Makers for what a journal holds most of. Each of these classes only converts what it is given into what its codec has
made already, and checks nothing else.
"""
_SHAPES: dict[type[Any], _Shape] = {}
_NAMES = _names()
_ANY = Codec(_encode_any, _decode_any)
_ITEMS = sequence(_objects((object,)))
_MESSAGES = sequence(_objects((messages.UserMessage, messages.AssistantMessage, messages.ToolMessage)))
_PAIRS = _Pairs(CANONICAL)
_SHAPES[Transcript] = _shape_of(Transcript, {"messages": _Member(_MESSAGES, attrs.NOTHING)})
