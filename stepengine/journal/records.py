"""
The records of a journal, their lines and the checks of their content.

A journal may be anybody's, with checksums that are right, so names and types of members are checked before anybody relies
on them. A check of shape raises ``ValueError`` or ``DataError``, which whoever knows the record's place makes a
``JournalCorrupt`` of.
"""

from __future__ import annotations

import re
import shlex
import zlib
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, ClassVar, NamedTuple, Protocol, TypeAlias, cast, get_args

import attrs
from attrs import frozen

from stepengine.data.codec import decode_stored
from stepengine.data.effects import KINDS, CallModel
from stepengine.data.faults import SHOWN_CHARS
from stepengine.data.json import compact
from stepengine.data.limits import Limits
from stepengine.data.messages import AssistantMessage, ToolMessage, UserMessage
from stepengine.data.models import ModelSettings
from stepengine.data.outcomes import Failure, PartialUsage, StopKind, Value
from stepengine.data.questions import Answer, Question
from stepengine.data.state import AgentState, ChildResult
from stepengine.data.usage import Usage, parse_amount
from stepengine.data.waits import ChildRef
from stepengine.data.yields import LAST_YEAR
from stepengine.errors import JournalCorrupt, JournalVersion, StepEngineError

SIGNED = "signature"
"""The type of the input that a signature is recorded as."""
UNREADABLE = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)
"""The errors of reading malformed data from outside, except ``DataError``, which is handled separately."""

# Bounds for numbers that come from a file: whoever wrote it may have put in one with a million digits.
MAX_SEQ = 10**9
MAX_AT_MS = 10**13
"""More than three hundred years in milliseconds; what is added to a date must leave a date."""
# Groups of at most nine digits, so that no path is longer to turn into numbers than a path of a run can be.
PATH = re.compile(r"(?:[0-9]{1,9}(?:\.[0-9]{1,9})*)?")
KEY = re.compile(r"[A-Za-z0-9+/]{68}")
"""A public ed25519 key in OpenSSH's form, as base64."""
MESSAGES = UserMessage | AssistantMessage | ToolMessage
ANY = object

Shape = Mapping[str, type]
"""Types by name; a name that ends in ``?`` may be missing."""

START: Shape = {
    "run_id": str, "previous?": dict, "session_id?": str, "user_id?": str, "metadata?": dict, "model?": str, "models?": dict, "run_models?": dict,
    "limits?": dict,
}  # fmt: skip
REQUEST: Shape = {
    "model": str, "messages": list, "system_prompt?": str, "tools?": list, "tool_choice?": ANY, "settings?": dict, "tail?": list,
}  # fmt: skip
TOOL: Shape = {"name": str, "description": str, "input_schema": dict}
SLICE: Shape = {"seq": int, "start": int, "stop": int, "path?": str}
OUTCOMES: Mapping[str, Any] = {
    **{kind: row.outcome for kind, row in KINDS.items()},
    "agent_call": ChildResult,
    "agent_start": ChildRef,
}
"""What an effect gives, by its type; an ``agent_call`` in the background is an ``agent_start``."""


def check_members(value: object, shape: Shape, subject: str) -> None:
    """Raise unless *value* is an object with the members of *shape*; the error calls it *subject*."""
    if not isinstance(value, Mapping):
        msg = f"{subject} should be an object, not a {type(value).__name__}"
        raise ValueError(msg)  # noqa: TRY004 - one kind of error for whatever was read
    for name, kind in shape.items():
        member = name.rstrip("?")
        if member not in value:
            if member == name:
                msg = f"{subject} lacks the member {member!r}"
                raise ValueError(msg)
        # `type(...) is` and not `isinstance`: a bool is an int to the latter, and JSON's `true` no number of an effect.
        elif kind is not ANY and type(value[member]) is not kind:
            msg = (
                f"the member {member!r} of {subject} should be a {kind.__name__}, not a {type(value[member]).__name__}"
            )
            raise ValueError(msg)


def check_address(path: str, seq: int, at: int = 0) -> None:
    """Raise unless these are a valid address and time."""
    if PATH.fullmatch(path) is None:
        msg = f"{path[:SHOWN_CHARS]!r} is not a path of a run"
        raise ValueError(msg)
    if not (-1 <= seq < MAX_SEQ and 0 <= at < MAX_AT_MS):
        msg = f"seq {seq} and at {at} should be below {MAX_SEQ} and {MAX_AT_MS}"
        raise ValueError(msg)


def check_head(created: str, parent: object, hooks: object, packages: object) -> None:
    """Raise unless these members of a head are valid."""
    when = datetime.fromisoformat(created)
    # What is near the ends of the calendar cannot be told in another time zone.
    if when.tzinfo is None or not 1 < when.year <= LAST_YEAR:
        msg = f"the run cannot have been created at {created!r}"
        raise ValueError(msg)
    if parent is not None:
        check_members(parent, {"run": str, "at": str}, "the parent")
    if not isinstance(hooks, list) or not all(isinstance(name, str) for name in hooks):
        msg = "the hooks should be a list of names"
        raise ValueError(msg)
    if not isinstance(packages, dict) or not all(isinstance(package, str) for package in packages.values()):
        msg = "the packages should be texts such as 'name==1.0'"
        raise ValueError(msg)


def check_effect(form: Mapping[str, Any], *, is_start: bool) -> None:
    """Raise unless *form*, with its blobs filled in, is a valid stored effect; *is_start*: it starts the root run."""
    row = KINDS.get(form["type"])
    # What is not known here is refused and not left out, as an input is: an effect of a newer version may have changed
    # the world, and a run that goes on without it would do it again.
    if row is None or (is_start and form["type"] != "agent_call"):
        msg = f"{form['type'][:SHOWN_CHARS]!r} is not an effect that can be here"
        raise ValueError(msg)
    check_members(form, row.members, "the effect")
    check = _check_root_start if is_start else MORE.get(form["type"])
    if check is not None:
        check(form)


def _check_root_start(form: Mapping[str, Any]) -> None:
    """Raise unless a stored effect has valid members for the start of a root run."""
    check_members({k: v for k, v in form.items() if v is not None}, START, "the start of the run")
    if form["params"] is not None:
        check_members(form["params"], {}, "what params hold")
    for name in ("models", "run_models"):
        if not all(isinstance(model, str) for model in (form.get(name) or {}).values()):
            msg = f"the member {name!r} of the start of the run should hold names of models"
            raise ValueError(msg)
    _check_stored_types([form.get("previous")] if form.get("previous") is not None else [], AgentState)
    _check_stored_types([form.get("limits")] if form.get("limits") is not None else [], Limits)


def _check_child_paths(paths: Sequence[object]) -> None:
    for path in paths:
        if not isinstance(path, str) or not path or PATH.fullmatch(path) is None:
            msg = f"{str(path)[:SHOWN_CHARS]!r} is not a path of a child"
            raise ValueError(msg)


def _check_request(request: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` for an invalid recorded model request."""
    check_members(request, REQUEST, "the request")
    for item in request["messages"]:
        if isinstance(item, dict) and item.get("type") == "slice":
            check_members(item, SLICE, "a slice")
            check_address(item.get("path", ""), item["seq"])
            if not 0 <= item["start"] < item["stop"]:
                msg = f"a slice goes from {item['start']} to {item['stop']}"
                raise ValueError(msg)
        else:
            _check_stored_types([item], MESSAGES)
    _check_stored_types(request.get("tail", ()), MESSAGES)
    _check_stored_types([request["settings"]] if "settings" in request else [], ModelSettings)
    for spec in request.get("tools", ()):
        check_members(spec, TOOL, "a tool")
        if set(spec) != set(TOOL):
            msg = "a tool should have a name, a description and an input_schema, and nothing else"
            raise ValueError(msg)


MORE: Mapping[str, Callable[[Mapping[str, Any]], None]] = {
    "model_call": lambda form: _check_request(form["request"]),
    "ask": lambda form: _check_stored_types(form["questions"], Question),
    "wait": lambda form: _check_child_paths(form["children"]),
    "cancel": lambda form: _check_child_paths(form["children"]),
    "send": lambda form: _check_child_paths((form["child"],)),
}
"""What is checked of an effect beside its members, by its type."""


def _check_stored_types(values: Sequence[object], kind: Any) -> None:
    """Decode stored values; raise unless each of them is of type *kind*."""
    for value in values:
        if not isinstance(made := decode_stored(value), kind):
            msg = f"a {type(made).__name__} is not allowed here"
            raise ValueError(msg)  # noqa: TRY004 - one kind of error for whatever was read


def check_outcome(effect_type: str, outcome: Value | Failure, question_count: int = 0) -> None:
    """Raise unless an effect of this type, with this number of questions, may have this outcome."""
    value = outcome.value if isinstance(outcome, Value) else None
    fits = isinstance(outcome, Failure) or isinstance(value, OUTCOMES.get(effect_type, ANY))
    # As many answers as questions: they are told apart by their places, and one too few would give each question behind
    # it the answer of another one.
    if fits and isinstance(value, tuple) and effect_type == "ask":
        fits = len(value) == question_count and all(isinstance(answer, Answer) for answer in value)
    if not fits:
        msg = f"a {type(value).__name__} is not an outcome of this {effect_type}"
        raise ValueError(msg)
    if not all(isinstance(message, UserMessage) for message in outcome.inputs):
        msg = "an input of the run is not a user message"
        raise ValueError(msg)


def check_attempts(attempts: Any) -> None:
    """Raise unless these are failed attempts of a model call."""
    for attempt in attempts:
        check_members(attempt, {"error": dict, "usage?": dict}, "an attempt")
        _check_stored_types([{"type": "failure", "error": attempt["error"]}], Failure)


EXTRAS = ("attempts", "writes")
"""The lists that a result may have besides its outcome, in the order of its line."""
NO_EXTRAS: Mapping[str, Any] = {}


def parse_stopped_usage(content: Mapping[str, Any]) -> PartialUsage:
    """Return the usage and cost of a stopped model call from the content of an input; raise ``ValueError`` if it is invalid."""
    _check_stored_types([content["usage"]], Usage)
    cost = parse_amount(content["cost"]) if "cost" in content else None
    if "cost" in content and (cost is None or cost < 0):
        msg = f"a cost must be a number of dollars, not {content['cost'][:SHOWN_CHARS]!r}"
        raise ValueError(msg)
    return PartialUsage(decode_stored(content["usage"]), cost)


def _check_answer_input(content: Mapping[str, Any]) -> None:
    _check_stored_types([content["answer"]], Answer)


def _check_computed_values(content: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` unless each computed value is an object or ``None``."""
    if not all(value is None or isinstance(value, Mapping) for value in content["values"]):
        msg = "the computed values of a tool body should be objects"
        raise ValueError(msg)


def _check_stop_input(content: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` for a stop with an unknown kind or an invalid error."""
    if content["kind"] not in get_args(StopKind):
        msg = (
            f"the kind of a stop must be one of {', '.join(get_args(StopKind))}, not {content['kind'][:SHOWN_CHARS]!r}"
        )
        raise ValueError(msg)
    _check_stored_types([content["error"]] if "error" in content else [], StepEngineError)


class InputRow(NamedTuple):
    """
    The properties of a type of input.

    Attributes:
        members: The types of its members.
        check: Raises for content that has the types of *members* and that no run writes.
        is_shown: Whether the page of a run has a row for the input. Others are shown with their request or call.
        is_forked: Whether a fork keeps the input.
    """

    members: Shape
    check: Callable[[Mapping[str, Any]], object] | None = None
    is_shown: bool = True
    is_forked: bool = True


INPUTS: Mapping[str, InputRow] = {
    "system_prompt": InputRow({"text": str}, is_shown=False),
    "context_window": InputRow({"tokens": int}, is_shown=False),
    "stop": InputRow({"kind": str, "error?": dict}, _check_stop_input, is_forked=False),
    "answer": InputRow({"question_id": str, "answer": ANY}, _check_answer_input),
    "accepted_difference": InputRow({"fp": str}),
    "partial_usage": InputRow({"usage": dict, "cost?": str}, parse_stopped_usage),
    "manual_result": InputRow({"by": str, "reason": str}),
    "result_pending": InputRow({}, is_shown=False),
    SIGNED: InputRow(
        {
            "key": str,
            "records": int,
            "digest": str,
            "marks": str,
            "found": int,
            "closes": bool,
            "time": str,
            "sig": str,
        },
        is_shown=False,
        is_forked=False,
    ),
    "wake_time": InputRow({"until": int}),
    "computed": InputRow({"values": list}, _check_computed_values, is_shown=False),
    "gap": InputRow({}),
    "message": InputRow({"id": str, "topic": str, "value": ANY}),
    "rejected_message": InputRow({"id": str, "why": str}),
    "mailbox_message": InputRow({"id": str, "kind": str, "value": ANY}),
}
"""Every type of input."""
UNKNOWN_INPUT = InputRow({})
"""The row of an input that a newer version wrote. A run of this version can be read without it."""


def check_input(content: Mapping[str, Any]) -> None:
    """Raise unless this is the valid content of an input record; an unknown type is not checked further."""
    check_members(content, {"type": str}, "the input")
    row = INPUTS.get(content["type"], UNKNOWN_INPUT)
    check_members(content, row.members, "the input")
    if row.check is not None:
        row.check(content)


FORMAT = "stepengine.journal/1"
NAME = "stepengine.journal"
MAJOR_VERSION = 1
"""Readers refuse every other version: a journal that is misread could repeat effects."""
TAIL_BYTES = 18
"""The length of ``,"crc":"01234567"}``, which ends each line."""
SHORT_BYTES = 4096
"""Measured: up to about here, copying takes less time than making a view."""
TAIL_FORM = re.compile(rb',"crc":"([0-9a-f]{8})"\}\Z')
# JSON may hold these as they are, but tools that split text into lines take them for line ends (replay:J1).
SEPARATORS = {0x85: "\\u0085", 0x2028: "\\u2028", 0x2029: "\\u2029"}

Address: TypeAlias = "tuple[str, int]"
"""Path and number of an effect."""

ROOT: Address = ("", -1)
"""The address of the root run itself."""


@frozen(kw_only=True, eq=False)
class Head:
    """
    The first record of a journal.

    Attributes:
        engine: The version of stepengine that wrote the journal.
        agent: The id of the root's agent; ``publisher/name`` for an agent of a package.
        definition: The fingerprint of the root's definition; only a hint.
        run: The id of this journal's run; a fork has its own id.
        seed: The seed for random numbers, which also depend on the path.
        created: The creation time of the root run, RFC 3339 in UTC.
        parent: For a fork ``{"run", "at"}``: the original run and the fork address.
        since: For a fork, its creation time in milliseconds since *created*, which is copied from the parent.
        hooks: The names of the root's hooks, in order.
        packages: The packages of the root's agent and of all possible descendants: ``name==version`` by ``publisher/name``.
        link: Whether each checksum starts from the previous one.
        signed: The public key of the signatures, as base64 of OpenSSH's form; ``""`` for an unsigned journal.
        workspace: The name of the run's workspace, such as ``"docker:python:3.13"``; ``""`` for a folder of this machine.
        format: The name and major version of the format.
        line: All members of the line that the head was read from.
    """

    kind: ClassVar[str] = "head"
    engine: str
    agent: str
    definition: str
    run: str
    seed: str
    created: str
    parent: Mapping[str, Any] | None = None
    since: int = 0
    hooks: Sequence[str] = ()
    packages: Mapping[str, str] = attrs.field(factory=dict)
    link: bool = False
    signed: str = ""
    workspace: str = ""
    format: str = FORMAT
    line: Mapping[str, Any] | None = None


class JournalSource(Protocol):
    """The bytes of a journal, whose records are parsed on demand."""

    def read_line_members(self, start: int, end: int) -> Mapping[str, Any]:
        """Return the members of the line from *start* to *end*; raise ``JournalCorrupt`` if it is no record."""

    def read_filled_members(self, start: int, end: int, blobs: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the line's members with its blobs filled in; raise ``KeyError`` if one is missing."""


def _read_line_members(record: Intent | Result) -> Mapping[str, Any] | None:
    """Return the members of the record's line, parsed if they are still bytes; ``None`` for a record of this process."""
    source = record.read_from
    if source is None or isinstance(source, Mapping):
        return source
    members = source.read_line_members(record.start, record.end)
    check_same_address(record, members)
    return members


def check_same_address(record: Intent | Result, members: Mapping[str, Any]) -> None:
    """
    Raise unless the members of a line have the record's address and fingerprint, which were read from its start alone.

    Raises:
        JournalCorrupt: when they differ because a member occurs twice; the error names the address.
    """
    is_same = (members["path"], members["seq"]) == (record.path, record.seq)
    if not is_same or (isinstance(record, Intent) and record.fp not in ("", members["fp"])):
        msg = f"the {record.kind} of {format_address(record.path, record.seq)} has a second address or fingerprint in its line"
        raise JournalCorrupt(msg)


@attrs.define(eq=False)
class Intent:
    """
    An effect that is about to be performed.

    Attributes:
        path: The path of the run that requests the effect.
        seq: The number of the effect in its run.
        given: The effect's stored form; the effect itself for a model call of this process; ``None`` for an intent that was read.
        fp: The fingerprint; ``""`` until it is needed.
        gather: The number of the first effect of those started together; ``None`` for an effect started alone.
        type: The stored name of the effect's type, such as ``"model_call"``; ``""`` until it is needed.
        subject: The model of a model call, the tool of a tool call; ``None`` for others, and until it is needed.
        program_line: The line of the program that requests the effect, from 1; 0 without a program or if not recorded.
        read_from: The members of the line that it was read from, or the journal's bytes; ``None`` for an intent of this process.
        start: The offset of the line in these bytes. It is a plain number, because a long journal has many records.
        end: The offset of the end of the line, without the newline.
    """

    kind: ClassVar[str] = "intent"
    path: str
    seq: int
    given: CallModel | Mapping[str, Any] | None
    fp: str = ""
    gather: int | None = None
    read_from: Mapping[str, Any] | JournalSource | None = None
    _type: str = ""
    _subject: str | None = None
    program_line: int = 0
    start: int = attrs.field(init=False, repr=False)
    end: int = attrs.field(init=False, repr=False)

    @property
    def address(self) -> Address:
        """The address of the effect."""
        return self.path, self.seq

    @property
    def effect(self) -> CallModel | Mapping[str, Any]:
        """The effect's stored form; for a model call of this process the effect itself."""
        given = self.given
        if given is None:
            form: Mapping[str, object] = cast("Any", self.line)["effect"]
            return form
        return given

    @property
    def type(self) -> str:
        """The name of the effect's type, such as ``"model_call"``."""
        if not self._type:
            effect = self.effect
            self._type = "model_call" if isinstance(effect, CallModel) else str(effect["type"])
        return self._type

    @property
    def starts_child_or_body(self) -> bool:
        """Whether it starts a run at a path of its own: a child, or the body of a tool that yields."""
        kind = self.type
        return kind == "agent_call" or (kind == "tool_call" and "yields" in cast("Any", self.effect))

    @property
    def is_background(self) -> bool:
        """Whether it starts a background child, whose end is recorded at the child's own path and -1."""
        return self.type == "agent_call" and "background" in cast("Any", self.effect)

    @property
    def subject(self) -> Any:
        """The model of a model call or the tool of a tool call, in stored form; ``None`` for other effects."""
        if self._subject is None:
            effect: Any = self.effect
            if isinstance(effect, CallModel):
                return effect.request.model
            return effect["request"]["model"] if self.type == "model_call" else effect.get("tool_name")
        return self._subject

    @property
    def live(self) -> CallModel | None:
        """The model call of this process; ``None`` for other effects and stored ones."""
        given = self.given
        return given if isinstance(given, CallModel) else None

    @property
    def is_stored(self) -> bool:
        """Whether it was parsed from a line."""
        return self.read_from is not None

    @property
    def line(self) -> Mapping[str, Any] | None:
        """All members of the line it was parsed from."""
        return _read_line_members(self)


@attrs.define(eq=False)
class Result:
    """
    The outcome of an effect.

    Attributes:
        path: The path of the run that requested the effect.
        seq: The number of the effect in its run.
        at: Milliseconds since the root run was created.
        given: The outcome; the value itself for a plain ``Value``; ``None`` for a result that was read.
        extras: The members besides the outcome, as in ``EXTRAS``; ``None`` if they are in the line that it was read from.
        read_from: The members of the line that it was read from, or the journal's bytes; ``None`` for a result of this process.
        start: The offset of the line in these bytes; only set there.
        end: The offset of the end of the line, without the newline.
    """

    kind: ClassVar[str] = "result"
    path: str
    seq: int
    at: int
    given: Any = None
    _extras: Mapping[str, Any] | None = NO_EXTRAS
    read_from: Mapping[str, Any] | JournalSource | None = None
    start: int = attrs.field(init=False, repr=False)
    end: int = attrs.field(init=False, repr=False)

    @property
    def address(self) -> Address:
        """The address of the effect."""
        return self.path, self.seq

    @property
    def outcome(self) -> Value | Failure | None:
        """The outcome for the machine; ``None`` for a result that was parsed from a line."""
        given = self.given
        if given is None or isinstance(given, (Value, Failure)):
            return given
        return Value(given, self.at)

    @property
    def extras(self) -> Mapping[str, Any]:
        """The members besides the outcome, as JSON."""
        if self._extras is None:
            line = cast("Any", self.line)
            return {name: line[name] for name in EXTRAS if name in line}
        return self._extras

    @property
    def attempts(self) -> Sequence[Mapping[str, Any]]:
        """The failed attempts before it, as JSON objects."""
        return cast("Sequence[Mapping[str, Any]]", self.extras.get("attempts", ()))

    @property
    def writes(self) -> Sequence[Mapping[str, Any]]:
        """The file writes of a tool call in order, as JSON objects, for undoing."""
        return cast("Sequence[Mapping[str, Any]]", self.extras.get("writes", ()))

    @property
    def line(self) -> Mapping[str, Any] | None:
        """All members of the line it was parsed from."""
        return _read_line_members(self)


@frozen(eq=False)
class Input:
    """
    An external input that is not the result of an effect: a stop, a resolved prompt, one of several answers.

    Attributes:
        path: The path of the run of the input.
        seq: The number of the effect that the input belongs to or precedes; -1 for the run as a whole.
        at: Milliseconds since the root run was created.
        input: The content, a JSON object with a ``"type"``.
        line: All members of the line that the input was read from.
    """

    kind: ClassVar[str] = "input"
    path: str
    seq: int
    at: int
    input: Mapping[str, Any]
    line: Mapping[str, Any] | None = None

    @property
    def address(self) -> Address:
        """The address of the effect that it belongs to or comes before."""
        return self.path, self.seq


def make_computed_record(address: Address, at: int, values: Sequence[Any]) -> Input:
    """Return the record of the ``Compute`` results of a tool body, in order."""
    return Input(*address, at, {"type": "computed", "values": [*values]})


@frozen(eq=False)
class Blob:
    """
    A JSON value that other records name by its fingerprint.

    Attributes:
        fp: The fingerprint.
        data: The value.
        line: All members of the line that the blob was read from.
    """

    kind: ClassVar[str] = "blob"
    fp: str
    data: Any
    line: Mapping[str, Any] | None = None


Record: TypeAlias = Head | Intent | Result | Input | Blob
"""One line of a journal."""


def format_file_argument(name: str) -> str:
    """Return a journal's name, quoted for a shell, or ``FILE`` if it has white space, as names of journals without a file have."""
    return "FILE" if any(character.isspace() for character in name) else shlex.quote(name)


def format_address(path: str, seq: int) -> str:
    """Return an address as messages show it: ``#3``, ``3.2#0``; the root run is ``#-1``."""
    return f"{path}#{seq}"


def get_starter_address(path: str) -> Address:
    """Return the address of the spawn or tool call that started the run at *path*; ``ROOT`` for the root run."""
    if not path:
        return ROOT
    parent, _, seq = path.rpartition(".")
    return parent, int(seq)


def to_compact_json(value: object) -> str:
    """Return a JSON value as compact, unsorted text without line separators."""
    return escape_line_separators(compact(value))


def escape_line_separators(text: str) -> str:
    """Return JSON text with all line separators escaped."""
    return text if text.isascii() else text.translate(SEPARATORS)


def encode_line(
    members: Mapping[str, object] | str, previous: int, add_mac: Callable[[bytes], str] | None = None
) -> tuple[bytes, int]:
    """
    Return the line of a record, with its newline, and its checksum.

    Args:
        members: All members but the checksum, in order; or their text from ``to_compact_json``.
        previous: The checksum from which this one starts; 0 in a journal without linked checksums.
        add_mac: Returns the keyed digest of the line; ``None`` for a line without one.
    """
    body = (members if isinstance(members, str) else to_compact_json(members))[:-1].encode()
    if add_mac is not None:
        body += b',"mac":"%s"' % add_mac(body).encode()
    crc = zlib.crc32(body, previous)
    return body + b',"crc":"%08x"}\n' % crc, crc


def verify_checksum(line: bytes, previous: int) -> int | None:
    """Return the checksum of a line without its newline, or ``None`` if it is missing or wrong."""
    # A copy of a short line takes less time than a view of it.
    crc = zlib.crc32(line[:-TAIL_BYTES] if len(line) < SHORT_BYTES else memoryview(line)[:-TAIL_BYTES], previous)
    return crc if line.endswith(b',"crc":"%08x"}' % crc) else None


def parse_record(members: Mapping[str, object], where: object) -> Record:
    """
    Return the record with the members of a line; *where* starts the message of an error.

    Raises:
        JournalVersion: when this version does not know the format or the kind.
        JournalCorrupt: when a member is missing or of the wrong type.
    """
    kind = members.get("kind")
    if not isinstance(kind, str):
        msg = f"{where} has no kind"
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
        msg = f"{where} is not a valid {kind} record: {type(error).__name__}: {error}"
        raise JournalCorrupt(msg) from error


def _get_member(members: Mapping[str, object], name: str, kind: type) -> Any:
    """Return a member; raise if it is missing or not exactly of type *kind*."""
    value = members[name]
    if type(value) is not kind:
        msg = f"the member {name!r} should be of type {kind.__name__}"
        raise TypeError(msg)
    return value


def _parse_head(members: Mapping[str, Any]) -> Head:
    """Return the head of a journal; raise ``JournalVersion`` for another format version."""
    form = _get_member(members, "format", str)
    name, _, major = form.partition("/")
    if name != NAME or not major.isdecimal():
        msg = f"the format {form!r} is not a stepengine format"
        raise ValueError(msg)
    if int(major) != MAJOR_VERSION:
        engine = members.get("engine")
        msg = f"this journal has the format {form}, written by stepengine {engine}; this version reads {FORMAT}: upgrade to read it"
        raise JournalVersion(msg)
    texts = {n: _get_member(members, n, str) for n in ("engine", "agent", "definition", "run", "seed", "created")}
    check_head(texts["created"], members.get("parent"), members.get("hooks", []), members.get("packages", {}))
    return Head(
        **texts,
        parent=members.get("parent"),
        since=_parse_fork_time(members) if "since" in members else 0,
        hooks=tuple(members.get("hooks", ())),
        packages=members.get("packages", {}),
        link=members.get("link", False) is True,
        signed=_parse_public_key(members) if "signed" in members else "",
        workspace=_get_member(members, "workspace", str) if "workspace" in members else "",
        format=form,
        line=members,
    )


def _parse_fork_time(members: Mapping[str, object]) -> int:
    """Return the member ``since`` of a fork's head: the time of its start in milliseconds."""
    since: int = _get_member(members, "since", int)
    if not 0 <= since < MAX_AT_MS:
        msg = f"since {since} should be below {MAX_AT_MS}"
        raise ValueError(msg)
    return since


def _parse_public_key(members: Mapping[str, object]) -> str:
    """Return the public key of a head; raise ``ValueError`` for an invalid one."""
    key: str = _get_member(members, "signed", str)
    if KEY.fullmatch(key) is None:
        msg = f"{key[:SHOWN_CHARS]!r} is not a public key"
        raise ValueError(msg)
    return key


def _parse_address(members: Mapping[str, object]) -> Address:
    path, seq = _get_member(members, "path", str), _get_member(members, "seq", int)
    check_address(path, seq)
    return path, seq


def _parse_time(members: Mapping[str, object]) -> int:
    """Return the time of a record in milliseconds; raise ``ValueError`` for an invalid one."""
    at: int = _get_member(members, "at", int)
    check_address("", 0, at)
    return at


def _parse_intent(members: Mapping[str, Any]) -> Intent:
    effect, fp = _get_member(members, "effect", dict), _get_member(members, "fp", str)
    gather = members.get("gather")
    if gather is not None:
        check_address("", _get_member(members, "gather", int))
    kind, line = _get_member(effect, "type", str), _parse_program_line(members) if "program_line" in members else 0
    return Intent(*_parse_address(members), effect, fp, gather, members, kind, program_line=line)


def _parse_program_line(members: Mapping[str, object]) -> int:
    line: int = _get_member(members, "program_line", int)
    if not 0 < line < MAX_SEQ:
        msg = f"program_line {line} should be at least 1 and below {MAX_SEQ}"
        raise ValueError(msg)
    return line


def _parse_result(members: Mapping[str, object]) -> Result:
    if ("value" in members) == ("error" in members):
        msg = "it should have either a value or an error"
        raise ValueError(msg)
    extras = {name: _get_member(members, name, list) for name in EXTRAS if name in members}
    check_attempts(extras.get("attempts", ()))
    return Result(*_parse_address(members), _parse_time(members), None, extras, members)


def _parse_input(members: Mapping[str, object]) -> Input:
    return Input(*_parse_address(members), _parse_time(members), _get_member(members, "input", dict), members)


def _parse_blob(members: Mapping[str, object]) -> Blob:
    return Blob(_get_member(members, "fp", str), members["data"], members)


_MAKERS: Mapping[str, Callable[[Mapping[str, Any]], Record]] = {
    "head": _parse_head,
    "intent": _parse_intent,
    "result": _parse_result,
    "input": _parse_input,
    "blob": _parse_blob,
}
