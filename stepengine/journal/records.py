"""
The records of a journal and their lines (replay J1-J9, J11-J18 as amended by design 3 and 10).

Five kinds. ``head`` stands first, once. ``intent`` says that an effect is about to happen, ``result`` what came of it; a
run starts with the intent of its own Spawn (the root's at ``("", -1)``) and ends with its result. ``input`` is what came
from outside without having been asked for. ``blob`` is a value that others name by its fingerprint.

One line is one JSON object whose last member is the CRC-32 of the bytes before it; in a linked journal it starts from the
CRC of the line before, so that a missing, repeated or swapped line is found.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias, cast

import attrs

from stepengine.data.effects import CallModel
from stepengine.data.fields import PLAIN
from stepengine.data.outcomes import Failure, Value
from stepengine.errors import JournalCorrupt, JournalVersion, StepEngineError
from stepengine.journal.shapes import UNREADABLE, check_attempts, check_head, check_place

if TYPE_CHECKING:
    from stepengine.journal.lines import Line

__all__ = (
    "FORMAT",
    "ROOT",
    "TAIL",
    "TAIL_FORM",
    "Address",
    "Blob",
    "Head",
    "Input",
    "Intent",
    "Record",
    "Result",
    "checked",
    "file_of",
    "for_line",
    "record_of",
    "shown_address",
    "to_line",
    "to_text",
)

FORMAT = "stepengine.journal/1"
NAME = "stepengine.journal"
MAJOR = 1
TAIL = 18
TAIL_FORM = re.compile(rb',"crc":"([0-9a-f]{8})"\}\Z')
# JSON may hold these as they are, but tools that split text into lines take them for line ends (reliability JR05).
SEPARATORS = {0x85: "\\u0085", 0x2028: "\\u2028", 0x2029: "\\u2029"}

Address: TypeAlias = "tuple[str, int]"
"""Path and number of an effect."""

ROOT: Address = ("", -1)
"""The address of the root run itself."""


@attrs.frozen(kw_only=True, eq=False)
class Head:
    """
    The first record of a journal.

    Attributes:
        engine: The version of stepengine that wrote it.
        agent: The root's agent id.
        definition: The fingerprint of the root's definition; only ever a hint.
        run: The id of this journal's run; a fork has its own.
        seed: What randomness is derived from, together with the path.
        created: When the root run was created, RFC 3339 in UTC.
        parent: For a fork ``{"run", "at"}``: where it was cut off from which run.
        hooks: The names of the root's hooks, in order.
        link: Whether each checksum starts from the one before.
        format: Name and major version of the format.
        line: Everything that stood in the line it was read from.
    """

    kind: ClassVar[str] = "head"
    engine: str
    agent: str
    definition: str
    run: str
    seed: str
    created: str
    parent: Mapping[str, Any] | None = None
    hooks: Sequence[str] = ()
    link: bool = False
    format: str = FORMAT
    line: Mapping[str, Any] | None = None


def _read(line: Mapping[str, Any] | Line | None) -> Mapping[str, Any] | None:
    return line if line is None or isinstance(line, Mapping) else line.members()


@attrs.define(eq=False)
class Intent:
    """
    An effect that is about to be performed.

    Attributes:
        path: The path of the run that asks.
        seq: The effect's number on it.
        fp: Its fingerprint; ``""`` until somebody needs it.
        gather: The number of the first effect of those that began together; ``None`` for one that began alone.
    """

    kind: ClassVar[str] = "intent"
    path: str
    seq: int
    _effect: CallModel | Mapping[str, Any] | None
    fp: str = ""
    gather: int | None = None
    _line: Mapping[str, Any] | Line | None = None
    _type: str = ""
    _subject: str | None = None

    @property
    def effect(self) -> CallModel | Mapping[str, Any]:
        """The effect's stored form; for a model call of this process the effect itself."""
        if self._effect is None:
            form: Mapping[str, Any] = cast("Any", self.line)["effect"]
            return form
        return self._effect

    @property
    def type(self) -> str:
        """The name of the effect's type, such as ``"CallModel"``."""
        if not self._type:
            effect = self.effect
            self._type = "CallModel" if type(effect) is CallModel else str(cast("Any", effect)["type"])
        return self._type

    @property
    def subject(self) -> Any:
        """The model of a model call, the tool of a tool call, in the stored form; ``None`` of any other effect."""
        if self._subject is None:
            effect: Any = self.effect
            if type(effect) is CallModel:
                return effect.request.model
            return effect["request"]["model"] if self.type == "CallModel" else effect.get("tool_name")
        return self._subject

    @property
    def live(self) -> CallModel | None:
        """The model call, which is kept as it is while its process lives; ``None`` of any other effect."""
        return self._effect if type(self._effect) is CallModel else None

    @property
    def is_stored(self) -> bool:
        """Whether it was read from a line."""
        return self._line is not None

    @property
    def line(self) -> Mapping[str, Any] | None:
        """Everything that stood in the line it was read from."""
        return _read(self._line)


@attrs.define(eq=False)
class Result:
    """
    What came of an effect.

    Attributes:
        path: The path of the run that asked.
        seq: The effect's number on it.
        at: Milliseconds since the root run was created.
        outcome: What the machine is sent; ``None`` for one that stands in a line.
    """

    kind: ClassVar[str] = "result"
    path: str
    seq: int
    at: int
    outcome: Value | Failure | None = None
    _attempts: Sequence[Mapping[str, Any]] | None = ()
    _line: Mapping[str, Any] | Line | None = None
    _writes: Sequence[Mapping[str, Any]] | None = ()

    @property
    def attempts(self) -> Sequence[Mapping[str, Any]]:
        """The failed attempts before it, as JSON objects."""
        if self._attempts is None:
            found: Sequence[Mapping[str, Any]] = cast("Any", self.line).get("attempts", ())
            return found
        return self._attempts

    @property
    def writes(self) -> Sequence[Mapping[str, Any]]:
        """What is needed to undo the writes of a tool call, in order, as JSON objects."""
        if self._writes is None:
            found: Sequence[Mapping[str, Any]] = cast("Any", self.line).get("writes", ())
            return found
        return self._writes

    @property
    def line(self) -> Mapping[str, Any] | None:
        """Everything that stood in the line it was read from."""
        return _read(self._line)

    @property
    def place(self) -> Line | None:
        """Where it stands, if it is read only when somebody needs it."""
        return None if self._line is None or isinstance(self._line, Mapping) else self._line


@attrs.frozen(eq=False)
class Input:
    """
    Something from outside that no effect asked for: a stop, a resolved prompt, one of several answers.

    Attributes:
        path: The path of the run it belongs to.
        seq: The number of the effect that it belongs to or comes before; -1 for the run as a whole.
        at: Milliseconds since the root run was created.
        input: What it is, a JSON object with a ``"type"``.
        line: Everything that stood in the line it was read from.
    """

    kind: ClassVar[str] = "input"
    path: str
    seq: int
    at: int
    input: Mapping[str, Any]
    line: Mapping[str, Any] | None = None


@attrs.frozen(eq=False)
class Blob:
    """A JSON value that other records name by its fingerprint *fp*."""

    kind: ClassVar[str] = "blob"
    fp: str
    data: Any
    line: Mapping[str, Any] | None = None


Record: TypeAlias = Head | Intent | Result | Input | Blob


def file_of(name: str) -> str:
    """Return how a journal is written in a command: its path, where its name is one."""
    return "FILE" if " " in name else name


def shown_address(path: str, seq: int) -> str:
    """Return an address as messages and command lines have it: ``#3``, ``3.2#0``; the root run is ``#-1``."""
    return f"{path}#{seq}"


def to_text(value: Any) -> str:
    """Return a JSON value as text for a line: compact, nothing sorted, no character that any tool takes for a line end."""
    return for_line(PLAIN.json(value))


def for_line(text: str) -> str:
    """Return JSON text with nothing in it that any tool takes for a line end."""
    return text if text.isascii() else text.translate(SEPARATORS)


def to_line(members: Mapping[str, Any] | str, previous: int) -> tuple[bytes, int]:
    """
    Return the line of a record, with its newline, and its checksum.

    Args:
        members: Everything but the checksum, in order; or the text that ``to_text`` made of it.
        previous: The checksum that this one starts from; 0 in a journal that is not linked.
    """
    body = (members if isinstance(members, str) else to_text(members))[:-1].encode()
    crc = zlib.crc32(body, previous)
    return body + b',"crc":"%08x"}\n' % crc, crc


def checked(line: bytes, previous: int) -> int | None:
    """Return the checksum of a line without its newline, or ``None`` when it is missing or wrong."""
    crc = zlib.crc32(memoryview(line)[:-TAIL], previous)
    return crc if line[-TAIL:] == b',"crc":"%08x"}' % crc else None


def record_of(members: Mapping[str, Any], where: object) -> Record:
    """
    Return the record that a line's members are; *where* is the text, or has the text, that an error begins with.

    Raises:
        JournalVersion: for a format or a kind that this version does not know.
        JournalCorrupt: when a member is missing or of the wrong type.
    """
    kind = members.get("kind")
    if not isinstance(kind, str):
        msg = f"{where} does not say of which kind it is"
        raise JournalCorrupt(msg)
    make = _MAKERS.get(kind)
    if make is None:
        msg = f"{where} is of the unknown kind {kind!r}; it was written by a newer version of stepengine: upgrade to read it"
        raise JournalVersion(msg)
    try:
        return make(members)
    except JournalVersion:
        raise
    except (StepEngineError, *UNREADABLE) as error:
        msg = f"{where} is no {kind} record: {type(error).__name__}: {error}"
        raise JournalCorrupt(msg) from error


def _typed(members: Mapping[str, Any], name: str, kind: type) -> Any:
    value = members[name]
    if type(value) is not kind:
        msg = f"the member {name!r} should be of type {kind.__name__}"
        raise TypeError(msg)
    return value


def _head(members: Mapping[str, Any]) -> Head:
    form = _typed(members, "format", str)
    name, _, major = form.partition("/")
    if name != NAME or not major.isdecimal():
        msg = f"the format {form!r} is not one of ours"
        raise ValueError(msg)
    if int(major) != MAJOR:
        engine = members.get("engine")
        msg = f"this journal has the format {form}, written by stepengine {engine}; this version reads {FORMAT}: upgrade to read it"
        raise JournalVersion(msg)
    texts = {n: _typed(members, n, str) for n in ("engine", "agent", "definition", "run", "seed", "created")}
    check_head(texts["created"], members.get("parent"), members.get("hooks", []))
    return Head(
        **texts,
        parent=members.get("parent"),
        hooks=tuple(members.get("hooks", ())),
        link=members.get("link", False) is True,
        format=form,
        line=members,
    )


def _address(members: Mapping[str, Any]) -> Address:
    path, seq = _typed(members, "path", str), _typed(members, "seq", int)
    check_place(path, seq)
    return path, seq


def _at(members: Mapping[str, Any]) -> int:
    at: int = _typed(members, "at", int)
    check_place("", 0, at)
    return at


def _intent(members: Mapping[str, Any]) -> Intent:
    effect, fp = _typed(members, "effect", dict), _typed(members, "fp", str)
    gather = members.get("gather")
    if gather is not None:
        check_place("", _typed(members, "gather", int))
    return Intent(*_address(members), effect, fp, gather, members, _typed(effect, "type", str))


def _result(members: Mapping[str, Any]) -> Result:
    if ("value" in members) == ("error" in members):
        msg = "it has either a value or an error"
        raise ValueError(msg)
    attempts = _typed(members, "attempts", list) if "attempts" in members else ()
    check_attempts(attempts)
    writes = _typed(members, "writes", list) if "writes" in members else ()
    return Result(*_address(members), _at(members), None, attempts, members, writes)


def _input(members: Mapping[str, Any]) -> Input:
    return Input(*_address(members), _at(members), _typed(members, "input", dict), members)


def _blob(members: Mapping[str, Any]) -> Blob:
    return Blob(_typed(members, "fp", str), members["data"], members)


_MAKERS: Mapping[str, Callable[[Mapping[str, Any]], Record]] = {
    "head": _head,
    "intent": _intent,
    "result": _result,
    "input": _input,
    "blob": _blob,
}
