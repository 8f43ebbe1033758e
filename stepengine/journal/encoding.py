"""
Values to records to lines: forms of effects and outcomes, differences between requests, blobs, checksums.

Member names are Python field names. Pure data only: functions are stored as their names, a value that is not JSON as the
name of its type; secrets are taken out on the way.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import attrs

from stepengine.data.codec import decode_stored, decode_stored_or_json, encode_stored, encode_stored_or_json, is_stored
from stepengine.data.effects import (
    KINDS,
    ROWS,
    RUNS,
    WAITS,
    AskPerson,
    AwaitTime,
    CallBody,
    CallFunction,
    CallModel,
    CallTool,
    Leaf,
    RunInBackground,
    Spawn,
)
from stepengine.data.faults import prefix_path
from stepengine.data.json import MAX_LINE_DEPTH_LEVELS, JsonDict, compact, freeze, is_nested_deeper, thaw
from stepengine.data.models import DEFAULT_SETTINGS, ModelRequest
from stepengine.data.outcomes import Failure, Value
from stepengine.data.questions import Question
from stepengine.data.record_sizes import (
    ESCAPED_CHAR_BYTES,
    MAX_INLINE_CHARS,
    MAX_LINE_BYTES,
    MAX_VALUE_BYTES,
    find_length_problem,
)
from stepengine.data.state import ChildResult, RunStatus
from stepengine.data.tools import Yielding
from stepengine.data.transcript import Transcript
from stepengine.data.typed_values import dump_model, is_model
from stepengine.errors import DataError, DefinitionError, JournalWriteFailed, LimitExceeded, StepEngineError
from stepengine.journal.fingerprints import Fingerprints, describe_tool, fingerprint
from stepengine.journal.records import (
    EXTRAS,
    ROOT,
    Address,
    Blob,
    Head,
    Input,
    Intent,
    Record,
    Result,
    encode_line,
    escape_line_separators,
    format_address,
)
from stepengine.machine.plan import RunPlan
from stepengine.redaction import Redactor
from stepengine.runtime.performer import Item
from stepengine.workspace.writes import FileWrite

__all__ = (
    "Encoder",
    "decode_outcome",
    "decode_stored",
    "decode_with_blobs",
    "drop_secret_old_content",
    "encode_call_with_durability",
    "encode_effect",
    "encode_outcome_members",
    "encode_request_members",
    "encode_stored",
    "encode_with_blobs",
    "get_name_without_module",
    "get_recorded_questions",
    "get_sandbox_name",
    "make_stored_call",
    "may_change_world_if_repeated",
    "must_start_be_durable",
    "to_comparable_json",
    "to_storable_error",
)

Form = Mapping[str, Any]
COMPARED_CHILD = ("agent_id", "run_id", "status", "output")
LOCATION = re.compile(r" ?\([^()\n]*:\d+\)")
"""Where an error came from, as it stands in messages: ``(agents/mine.py:12)``."""
FOLDERS = re.compile(r"""(?<![\w.])(?:<\w+>)?(?:/[^\s/'"<>():,]+)*/(?=[^\s/])""")
"""The folders of an absolute path, also with a placeholder in place of the first ones."""
MEMORY_ADDRESS = re.compile(r"\bat 0x[0-9a-fA-F]+")


# What stands in a journal is written out by hand, here or as `members` in the row of the effect, and not derived from its
# class: that may get a field or another name any day, while a form that was written once has to be read for ever
# (replay:J34). For the same reason a member is left out where it says nothing, so that older recordings keep their
# fingerprints.
def encode_effect(item: Item) -> CallModel | Form:
    """Return the stored form of an effect; a model call is returned unchanged, because it is stored as a difference to earlier ones."""
    effect = item.effect
    if isinstance(effect, CallTool):
        return encode_call_with_durability(effect, item.plan)[0]
    return DESCRIBE.get(type(effect), _encode_effect_attributes)(effect)


# Each effect that must last costs a run on a disk one sync. Model calls do not: asked twice they cost money and
# change nothing outside (reliability:R3).
def encode_call_with_durability(effect: CallTool, plan: RunPlan) -> tuple[Form, bool]:
    """Return the stored form of a tool call, and whether its start must be durable (see ``must_start_be_durable``)."""
    tool = effect.tool_name
    form = make_stored_call(tool, effect.input, effect.tool_call_id, effect.source)
    binding, lasts = plan.tools.get(tool), True
    if binding is not None:
        spec = binding.spec
        notes = spec.annotations
        if notes.idempotent or notes.read_only:
            form["idempotent"] = True
            # What it writes may be undone.
            lasts = spec.category == "write" and not notes.read_only
    if not isinstance(effect, CallBody):
        return form, lasts
    form["yields"] = True
    name = get_sandbox_name(plan, tool)
    if name:
        form["sandbox"] = name
    return form, False


def make_stored_call(tool_name: str, tool_input: JsonDict, tool_call_id: str, source: str) -> dict[str, Any]:
    """Return the members that every stored tool call has."""
    return {
        "type": "tool_call",
        "tool_name": tool_name,
        "input": tool_input,
        "tool_call_id": tool_call_id,
        "source": source,
    }


# Recorded, since another version of a sandbox may work a program out to something else; a divergence below the call
# then names it as the likely cause.
def get_sandbox_name(plan: RunPlan, tool_name: str) -> str:
    """Return name and version of the sandbox that runs a tool's body, or ``""`` if it needs none or it is not installed."""
    binding = plan.tools.get(tool_name)
    sandbox = binding.runs.sandbox if binding is not None and isinstance(binding.runs, Yielding) else None
    if sandbox is None:
        return ""
    try:
        return sandbox()
    except DefinitionError:
        return ""


def _encode_spawn(effect: Spawn) -> Form:
    form: dict[str, object] = {
        "type": "agent_call",
        "agent_id": effect.agent_id,
        "prompt": effect.prompt,
        "params": effect.params,
    }
    if effect.is_background:
        form["background"] = True
    return form | _encode_optional_call_id(effect)


def _encode_function_call(effect: CallFunction) -> Form:
    call = effect.call
    form: dict[str, object] = {
        "type": "perform",
        "name": get_name_without_module(call.fn),
        "args": [_encode_argument(a) for a in call.args],
    }
    form["kwargs"] = {k: _encode_argument(v) for k, v in call.kwargs.items()}
    if find_length_problem(form):
        # Arguments are only compared, so of what no record holds type and length are enough. Not a fingerprint: by that of a
        # secret whoever guesses it knows that the guess is right.
        form["args"] = [_shorten_argument(a) for a in form["args"]]  # type: ignore[attr-defined]
        form["kwargs"] = {k: _shorten_argument(v) for k, v in form["kwargs"].items()}  # type: ignore[attr-defined]
    return form | ({"idempotent": True} if call.is_idempotent else {})


def _encode_ask(effect: AskPerson) -> Form:
    form = {"type": "ask", "questions": [_encode_question(q) for q in effect.questions], "purpose": effect.purpose}
    return form | _encode_optional_call_id(effect)


def _encode_optional_call_id(effect: Spawn | AskPerson) -> dict[str, object]:
    """Return ``{"tool_call_id": ...}`` for an effect of a tool call, else ``{}``."""
    return {"tool_call_id": effect.tool_call_id} if effect.tool_call_id else {}


def _encode_wait_time(effect: AwaitTime) -> Form:
    until = None if effect.until is None else effect.until.isoformat()
    return {"type": "sleep", "seconds": effect.seconds} if until is None else {"type": "sleep", "until": until}


def _encode_effect_attributes(effect: Leaf) -> Form:
    """Return the stored form of an effect: its kind, and the attributes that its row names as members."""
    row = ROWS[type(effect)]
    form: dict[str, object] = {"type": row.kind}
    for member in row.members:
        value = getattr(effect, member.rstrip("?"))
        if member[-1] != "?" or value not in (None, ""):
            form[member.rstrip("?")] = list(value) if isinstance(value, tuple) else value
    return form


def _refuse_background(effect: RunInBackground) -> Form:
    """Raise: the run of a background child has no intent of its own."""
    msg = f"the run of the child {effect.agent_id!r} in the background has no intent of its own"
    raise StepEngineError(msg)


DESCRIBE: Mapping[type[Leaf], Callable[[Any], CallModel | Form]] = {
    CallModel: lambda effect: effect,
    Spawn: _encode_spawn,
    CallFunction: _encode_function_call,
    AskPerson: _encode_ask,
    AwaitTime: _encode_wait_time,
    RunInBackground: _refuse_background,
}
"""The stored form of effects whose members are not their attributes; calls of tools, which are frequent, are encoded in ``encode_effect``."""


def _encode_question(question: Question) -> dict[str, Any]:
    """Return the stored form of a question, without the parts that are rebuilt each time it is shown."""
    is_bare = question.remember is None and not question.descriptions
    return encode_stored(question if is_bare else attrs.evolve(question, remember=None, wider=(), descriptions=()))


# An argument may be a client or a connection, which no journal holds. It is recorded by what it is called, so that a
# replay can compare it at all; `repr` would hold an address in memory, and differ each time.
def _encode_argument(value: object) -> object:
    """Return an argument as JSON, or a placeholder with its type's name if it cannot be encoded."""
    try:
        return _freeze_argument(value)
    except Exception:  # noqa: BLE001  (what an author hands on may raise whatever is asked of it)
        return {"type": "object", "name": type(value).__qualname__}


def _shorten_argument(form: object) -> object:
    """Return the stored form of an argument, or a placeholder with its type and length if it is not a short value."""
    is_short = (
        len(form) <= SHORT_ARGUMENT_CHARS if isinstance(form, str) else form is None or isinstance(form, int | float)
    )
    return form if is_short else {"type": "object", "name": type(form).__name__, "bytes": len(compact(form).encode())}


def _freeze_argument(value: object) -> object:
    """Return an argument as JSON or in stored form, or a placeholder with the name of the function, class or type."""
    try:
        return freeze(value)
    except DataError:
        pass
    if is_stored(type(value)):
        return encode_stored(value)
    if is_model(value):
        return freeze(dump_model(value))
    return {"type": "object", "name": get_name_without_module(value if hasattr(value, "__qualname__") else type(value))}


def get_name_without_module(function_or_class: object) -> str:
    """Return the qualified name without module and ``<locals>``; the name of its class for any other object."""
    try:
        function_or_class = getattr(function_or_class, "func", function_or_class)
        name: str = getattr(function_or_class, "__qualname__", type(function_or_class).__qualname__)
    except Exception:  # noqa: BLE001  (it may raise whatever is asked of it)
        name = type(function_or_class).__qualname__
    return name.rpartition("<locals>.")[2]


def must_start_be_durable(item: Item, form: Form) -> bool:
    """
    Return whether the start of an effect must be durable: it is not repeatable, can be undone, or people see it.

    *form* is its stored form. For tool calls ``encode_call_with_durability`` decides.
    """
    if isinstance(item.effect, AskPerson):
        return True
    return not isinstance(item.effect, (*RUNS, *WAITS)) and not form.get("idempotent")


def may_change_world_if_repeated(form: object) -> bool:
    """Return whether repeating a recorded effect may change something outside of the run again."""
    if not isinstance(form, Mapping) or not KINDS[form["type"]].changes_world:
        return False
    # What the body of a tool did is in its own effects.
    return not (form.get("idempotent") or form.get("yields"))


def get_recorded_questions(form: object) -> tuple[Question, ...]:
    """Return the questions of a recorded ``Ask``; none of any other effect."""
    if isinstance(form, Mapping) and form.get("type") == "ask":
        return tuple([decode_stored(q) for q in form["questions"]])
    return ()


# --- outcomes -------------------------------------------------------------------------------------------------------


def to_storable_error(error: StepEngineError) -> StepEngineError:
    """
    Return *error*, or its nearest ancestor that can be stored, with the same message.

    Another process cannot load a subclass that only this process defines. A handler must catch the same error live and on replay.
    """
    kind = type(error)
    if is_stored(kind):
        return error
    known = cast("type[StepEngineError]", next(c for c in kind.__mro__ if is_stored(c)))
    named: Callable[..., StepEngineError] = known
    made = named(error.message, **{f: getattr(error, f) for f in known.fields})
    made.__cause__ = error
    return made


# Without the type of the outcome and its time: a record has members of its own for both, and a journal holds as many of
# these as effects.
def encode_outcome_members(outcome: Value | Failure) -> dict[str, Any]:
    """Return the members of the result record for an outcome."""
    if isinstance(outcome, Failure):
        members = {"error": encode_stored(Failure(outcome.error))["error"]}
    else:
        value = outcome.value
        if isinstance(value, ChildResult):
            value = _replace_output_by_json(value)
        try:
            members = {"value": encode_stored_or_json(value)}
        except DataError as error:
            raise prefix_path(error, ".value") from None
    if outcome.inputs:
        members["inputs"] = [encode_stored(message) for message in outcome.inputs]
    return members


def decode_outcome(members: Mapping[str, Any]) -> Value | Failure:
    """
    Return the outcome in the members of a result record.

    Raises:
        DataError: when the current codec cannot decode the outcome.
    """
    inputs = tuple([decode_stored(message) for message in members["inputs"]]) if "inputs" in members else ()
    at = members["at"]
    if "error" in members:
        return Failure(decode_stored({"type": "failure", "error": members["error"]}).error, at, inputs)
    try:
        return Value(decode_stored_or_json(members["value"]), at, inputs)
    except DataError as error:
        raise prefix_path(error, ".value") from None


def _replace_output_by_json(child: ChildResult) -> ChildResult:
    """Return a child's result with its output as JSON, which serves only for comparisons, and with a storable error."""
    output = _encode_argument(child.output)
    error = to_storable_error(child.error) if child.error is not None else None
    return attrs.evolve(child, output=output, error=error)


def to_comparable_json(child: ChildResult) -> Form:
    """
    Return a child's result as JSON for comparison with another run of the child.

    An error is reduced to class, kind and message, without folders, lines and memory addresses, which differ by machine and edit.
    Derived texts are left out, since their rules may change: the text of the run, and the description of a spent budget.
    """
    data = encode_stored(_replace_output_by_json(child))
    same = {name: data.get(name) for name in COMPARED_CHILD}
    error = None if child.status is RunStatus.MAX_STEPS else child.error
    return {
        **thaw(same),
        "status": child.status.value,
        "error": None if error is None else _describe_error(to_storable_error(error)),
    }


def _describe_error(error: StepEngineError) -> str:
    """Return class, kind and message of an error, without folders, lines and memory addresses."""
    kind = getattr(error, "kind", "")
    name = f"{type(error).__name__} ({kind})" if kind else type(error).__name__
    if isinstance(error, LimitExceeded):
        return name
    words = LOCATION.sub("", error.message)
    return f"{name}: {MEMORY_ADDRESS.sub('at 0x', FOLDERS.sub('', words))}"


KEPT_REQUESTS = 4
"""A request mostly continues one of the last few of its path: pruning and a hook alternate between two or three. Each is compared."""
SHORT_ARGUMENT_CHARS = 100
"""A shorter text is always stored itself."""
VOLATILE = frozenset({"created", "id", "service_tier", "system_fingerprint"})


# Requests are stored as differences to earlier ones, or a run of n steps would hold n conversations (replay:J19).
class Encoder:
    """
    Makes the lines of one journal, in order.

    Args:
        redactor: Removes secrets.
        link: Whether each checksum starts from the previous one.
        previous: The checksum of the last stored line.
        blobs: The fingerprints of the stored blobs.
        stable: Whether to omit members that differ between two recordings of the same run.
        inline: The maximum length of a text in a record, in characters; longer texts become blobs.
        keeps_macs: Whether a record that was read keeps its keyed digest, which is valid only after the same preceding lines.

    Attributes:
        add_mac: Returns the keyed digest of each line, in order; ``None`` (default) for lines without one.
    """

    def __init__(
        self,
        redactor: Redactor,
        *,
        link: bool,
        previous: int = 0,
        blobs: Sequence[str] = (),
        stable: bool = False,
        inline: int = MAX_INLINE_CHARS,
        keeps_macs: bool = True,
    ) -> None:
        self.prints = Fingerprints(redactor)
        self._redactor = redactor
        self._link = link
        self._previous = previous
        self._blobs = set(blobs)
        self._stable = stable
        self._inline = inline
        self._keeps_macs = keeps_macs
        self._bases = _KnownRequests(self.prints)
        self.add_mac: Callable[[bytes], str] | None = None

    def set_request_base(self, path: str, seq: int, transcript: Transcript) -> None:
        """Store later requests as differences to this one, which the journal holds already."""
        self._bases.set_request_base(path, seq, transcript)

    def encode_record_lines(self, record: Record) -> list[bytes]:
        """
        Return the lines of a record: those of its new blobs, then its own; remember its blobs and checksum.

        Raises:
            JournalWriteFailed: when the line would be longer than 20 MiB.
            SecretFound: when the rules look for secrets by shape, and one remains.
        """
        if isinstance(record, Blob):
            self._blobs.add(record.fp)
        where = getattr(record, "path", ""), getattr(record, "seq", -1)
        line = record.line
        # A record that was read is written with the members that it had, unknown ones included: an older version must
        # not remove what a newer one wrote (replay:J34).
        if line is not None:
            dropped = ("crc",) if self._keeps_macs and self.add_mac is None else ("mac", "crc")
            kept = {name: value for name, value in line.items() if name not in dropped}
            return [self._encode_line(kept, record.kind, *where)]
        return [self._encode_line(members, record.kind, *where) for members in self._make_line_members(record)]

    def encode_text_line(self, text: str) -> bytes:
        """Return the line of a record that is encoded as JSON already, such as a signature, without a keyed digest."""
        if self.add_mac is not None:
            self.add_mac(text[:-1].encode())
        line, crc = encode_line(text, self._previous)
        self._previous = crc if self._link else 0
        return line

    def _encode_line(self, members: Mapping[str, object] | str, kind: str, path: str, seq: int) -> bytes:
        """Return a record's line with its checksum; raise if it is longer than 20 MiB."""
        line, crc = encode_line(members, self._previous, self.add_mac)
        if len(line) > MAX_LINE_BYTES:
            where = format_address(path, seq)
            msg = f"the {kind} of {where} has {len(line)} bytes; a record has at most {MAX_LINE_BYTES}"
            raise JournalWriteFailed(msg)
        self._previous = crc if self._link else 0
        return line

    # Secrets go first, long texts second: a blob is found by the fingerprint of what is in it, and one of a text with a
    # secret would tell whoever guesses the secret that the guess is right.
    def _make_line_members(self, record: Record) -> Iterator[Mapping[str, object] | str]:
        """Return the members of a record's lines, or their text, without secrets and long texts; its blobs first."""
        members, kind = self._encode_record(record), record.kind
        text = compact(members)
        if self._redactor.may_contain_secret(text):
            members = self._redact(members, kind)
            text = compact(members)
        # A journal that keeps long texts in place takes the same values as others: where they would make a line too long, they are
        # blobs.
        is_long = len(text) > MAX_VALUE_BYTES // ESCAPED_CHAR_BYTES
        inline = min(self._inline, MAX_INLINE_CHARS) if is_long else self._inline
        # The head names no blob: it stands before all of them.
        if kind != Head.kind and (len(text) > inline or '"$' in text):
            blobs: dict[str, object] = {}
            raw, members = members, encode_with_blobs(members, blobs, inline)
            if is_long and isinstance(record, Intent) and isinstance(record.given, CallModel):
                _move_long_messages_to_blobs(raw["effect"]["request"], members["effect"]["request"], blobs)
            for fp, data in blobs.items():
                yield from self._encode_new_blob(fp, data)
            text = ""
        effect = record.given if isinstance(record, Intent) else None
        if isinstance(effect, CallModel):
            shared = self._fingerprint_shared_members(effect.request)
            yield from self._encode_new_request_blobs(effect.request, shared)
            members["effect"]["request"].update({name: {"$blob": fp} for name, fp in shared.items()})
            text = ""
        # Encoding takes most of the time of a record: a text that is still right is not made again.
        yield escape_line_separators(text) if text else members

    def _redact(self, members: dict[str, object], kind: str) -> dict[str, object]:
        """Return the members with secrets redacted; raise if the rules look for shapes and one is left."""
        clean: dict[str, object] = self._redactor.value(members)
        if self._redactor.shapes:
            self._redactor.check_no_secrets(clean, f"the {kind} record")
        return clean

    def _encode_new_blob(self, fp: str, data: object) -> Iterator[Mapping[str, object]]:
        """Yield a blob record and remember it, unless the journal holds it already."""
        if fp not in self._blobs:
            self._blobs.add(fp)
            yield {"kind": "blob", "fp": fp, "data": data}

    def _encode_record(self, record: Record) -> dict[str, Any]:
        """Return the members of a record; a request has ``None`` in place of its prompt and tools, which are blobs."""
        match record:
            case Head():
                return encode_head_members(record)
            case Intent():
                return self._encode_intent(record)
            case Result():
                return self._encode_result(record)
            case Input():
                address = {"kind": "input", "path": record.path, "seq": record.seq}
                return {**address, "at": record.at, "input": record.input}
            case Blob():
                return {"kind": "blob", "fp": record.fp, "data": record.data}

    def _encode_intent(self, record: Intent) -> dict[str, Any]:
        """Return the members of an intent's line; set its missing fingerprint, and remember a request as a base for later ones."""
        effect = record.effect
        if isinstance(effect, CallModel):
            if not record.fp:
                record.fp = self.prints.for_request(effect.request)
            messages = self._bases.encode_and_remember_difference(record.path, record.seq, effect.request.messages)
            request = encode_request_members(effect.request, messages, includes_prompt_and_tools=False)
            form: Mapping[str, Any] = {"type": "model_call", "purpose": effect.purpose, "request": request}
        else:
            form = effect
            if not record.fp:
                record.fp = self.prints.for_effect(form)
            if (record.path, record.seq) == ROOT and form.get("previous"):
                # Known by its messages, not by its buffer: the run continues from a copy of this state.
                self._bases.set_request_base(*ROOT, decode_stored(form["previous"]).view)
        members = {"kind": "intent", "path": record.path, "seq": record.seq, "fp": record.fp, "effect": form}
        if record.gather is not None:
            members["gather"] = record.gather
        if record.program_line:
            members["program_line"] = record.program_line
        return members

    def _encode_result(self, record: Result) -> dict[str, Any]:
        members: dict[str, object] = {"kind": "result", "path": record.path, "seq": record.seq, "at": record.at}
        if extras := record.extras:
            # In the order of the rows, so that a copy has the same bytes; a member without a row is an error.
            members.update({name: extras[name] for name in sorted(extras, key=[*EXTRAS].index)})
        outcome = record.outcome
        assert outcome is not None  # noqa: S101 - a result of this process has its outcome
        members.update(encode_outcome_members(outcome))
        value = members.get("value")
        if self._stable and isinstance(value, dict):
            members["value"] = _remove_volatile_members(value)
        return members

    # Nearly every request has the same prompt and tools, so each is a blob, however short.
    def _fingerprint_shared_members(self, request: ModelRequest) -> dict[str, str]:
        """Return the fingerprints of a request's system prompt and tools, by member, if it has them."""
        shared: dict[str, str] = {}
        if request.system_prompt:
            shared["system_prompt"] = self.prints.for_prompt(request.system_prompt)
        if request.tools:
            shared["tools"] = self.prints.for_tools(request.tools)
        return shared

    def _encode_new_request_blobs(
        self, request: ModelRequest, shared: Mapping[str, str]
    ) -> Iterator[Mapping[str, object]]:
        """Yield blob records for the shared members of a request that the journal does not hold yet, redacted."""
        for name, fp in shared.items():
            if fp not in self._blobs:
                data = request.system_prompt if name == "system_prompt" else [describe_tool(t) for t in request.tools]
                clean = self._redactor.value(data) if self._redactor.may_contain_secret(compact(data)) else data
                yield from self._encode_new_blob(fp, clean)


def _remove_volatile_members(value: dict[str, Any]) -> dict[str, Any]:
    """Return a model's reply or a child's result without the members that differ between recordings or machines."""
    if value.get("type") == "child_result":
        # A warning names files of this machine, and a replay makes it again.
        return {name: member for name, member in value.items() if name != "warnings"}
    if value.get("type") != "model_reply":
        return value
    said = {k: v for k, v in value.get("provider_data", {}).items() if k not in VOLATILE}
    kept = {name: member for name, member in value.items() if name not in ("request_id", "provider_data")}
    return {**kept, **({"provider_data": said} if said else {})}


# A head has a member for each thing that a run may bring along, and is the one record whose form grows with the
# package. Members are left out where they say nothing: each that was added later would otherwise change the bytes of
# every recording that is made anew.
def encode_head_members(head: Head) -> dict[str, Any]:
    """Return the members of a head's line; optional ones only if they are set."""
    members: dict[str, object] = {"kind": "head", "format": head.format, "engine": head.engine, "agent": head.agent}
    members |= {"definition": head.definition, "run": head.run, "seed": head.seed, "created": head.created}
    members |= {"parent": head.parent} if head.parent else {}
    members |= {"since": head.since} if head.since else {}
    members |= {"hooks": list(head.hooks)} if head.hooks else {}
    members |= {"packages": dict(head.packages)} if head.packages else {}
    members |= {"link": True} if head.link else {}
    members |= {"signed": head.signed} if head.signed else {}
    return members | ({"workspace": head.workspace} if head.workspace else {})


# Settings at their default are left out, so that a setting that is added later changes no recorded request
# (replay:J39).
def encode_request_members(
    request: ModelRequest, messages: Sequence[object], *, includes_prompt_and_tools: bool
) -> dict[str, Any]:
    """Return the stored form of a request with the history *messages*; *includes_prompt_and_tools* adds prompt and tools."""
    members: dict[str, object] = {"model": request.model}
    if request.system_prompt:
        members["system_prompt"] = request.system_prompt if includes_prompt_and_tools else None
    members["messages"] = list(messages)
    if request.tools:
        members["tools"] = [describe_tool(t) for t in request.tools] if includes_prompt_and_tools else None
    if request.tool_choice is not None:
        members["tool_choice"] = request.tool_choice
    if request.settings != DEFAULT_SETTINGS:
        members["settings"] = encode_stored(request.settings)
    if request.tail:
        members["tail"] = [encode_stored(m) for m in request.tail]
    return members


# --- blobs ----------------------------------------------------------------------------------------------------------


# A long output of a tool stands in its result, in the next request, and in each one that is not a difference to it;
# named by its fingerprint it stands in the journal once.
def encode_with_blobs(value: object, blobs: dict[str, object], max_inline_chars: int = MAX_INLINE_CHARS) -> Any:
    """
    Encode *value* for a journal: move texts of more than *max_inline_chars* to *blobs*, and escape reserved objects.

    Each moved text is replaced by ``{"$blob": fp}``. An object with a single member whose name starts with ``$`` is wrapped in
    ``{"$obj": ...}`` (replay:J8).
    """
    if isinstance(value, str):
        return _move_to_blob(value, blobs) if len(value) > max_inline_chars else value
    if isinstance(value, list | tuple):
        return [encode_with_blobs(v, blobs, max_inline_chars) for v in value]
    if not isinstance(value, Mapping):
        return value
    members = {k: encode_with_blobs(v, blobs, max_inline_chars) for k, v in value.items()}
    return {"$obj": members} if _is_reserved_object(members) else members


def _move_to_blob(value: object, blobs: dict[str, object]) -> dict[str, str]:
    """Store *value* in *blobs* by its fingerprint, and return the reference that replaces it."""
    fp = fingerprint(value)
    blobs[fp] = value
    return {"$blob": fp}


def _is_reserved_object(members: Mapping[str, object]) -> bool:
    """Return whether an object has exactly one member, whose name starts with ``$``, as in the stored form ``$blob``."""
    return len(members) == 1 and next(iter(members)).startswith("$")


# An object of the user's with one member that begins with `$` was wrapped when it was stored, so whatever looks like
# one of our marks here is one.
def decode_with_blobs(value: object, blobs: Mapping[str, object], depth: int = 0) -> Any:
    """
    Decode a value of a journal: replace each ``{"$blob": fp}`` by its value in *blobs*, and unwrap ``$obj``.

    *depth* is the level of nesting of *value*.

    Raises:
        KeyError: when a blob is missing.
        DataError: when a blob makes the value deeper than the limit for lines.
    """
    if isinstance(value, list):
        return [decode_with_blobs(v, blobs, depth + 1) for v in value]
    if not isinstance(value, dict):
        return value
    if _is_reserved_object(value):
        name, inner = next(iter(value.items()))
        if name == "$blob":
            blob = blobs[inner]
            # The line and the blob are within the cap, each by itself.
            if not isinstance(blob, str) and is_nested_deeper(blob, MAX_LINE_DEPTH_LEVELS - depth):
                msg = f"nested deeper than {MAX_LINE_DEPTH_LEVELS} levels"
                raise DataError(msg)
            return blob
        return {k: decode_with_blobs(v, blobs, depth + 1) for k, v in inner.items()} if name == "$obj" else value
    return {k: decode_with_blobs(v, blobs, depth + 1) for k, v in value.items()}


# The old content of a file is kept so that a write can be undone. One that holds a secret is not: with a placeholder in
# it, an undo would write the placeholder into the file.
def drop_secret_old_content(write: FileWrite, redactor: Redactor) -> FileWrite:
    """Return a file write without its old content if the redactor finds a secret in it."""
    old = write.before
    if old is None or old.content is None:
        return write
    text = old.content.decode("latin-1")
    is_secret = redactor.may_contain_secret(text) and redactor.value(text) != text
    return attrs.evolve(write, before=old.without_content()) if is_secret else write


# Each message fits into a record, but all that a run heard or added since its last request may not.
def _move_long_messages_to_blobs(raw: Mapping[str, Any], packed: dict[str, Any], blobs: dict[str, object]) -> None:
    """Replace the new messages of a *packed* request by blobs if all are too long for one line; *raw* is the unpacked request."""
    if len(compact(packed["messages"])) <= MAX_VALUE_BYTES // ESCAPED_CHAR_BYTES:
        return
    for index, message in enumerate(raw["messages"]):
        if message.get("type") != "slice" and not find_length_problem([compact(message)]):
            packed["messages"][index] = _move_to_blob(message, blobs)


# --- differences ----------------------------------------------------------------------------------------------------


@attrs.define(eq=False)
class _KnownRequest:
    """
    The last of several requests of one path that extend each other; later requests are stored as differences to it.

    Attributes:
        seq: The number of the effect.
        shared: The part of the transcript shared with later ones, see ``Transcript.parts``.
        length: The number of messages in the transcript.
        longest: The length of the longest remembered transcript of the path.
        count: The number of requests in the group, counted only up to a limit.
    """

    seq: int
    shared: Any
    length: int
    longest: int
    count: int = 1


# Four requests of each path are kept, and not one: a handler may ask something beside the conversation in between, and
# the next step is a difference to the step before it, not to that. Not all of them either: a run of n steps would hold
# n transcripts. Of those that go on from each other the last one is as good as all, as none of them shares more with anything; so
# they are counted.
class _KnownRequests:
    """The last requests of each path, which later ones are stored as differences to."""

    def __init__(self, prints: Fingerprints) -> None:
        self._prints = prints
        self._last: dict[str, _KnownRequest] = {}
        self._known: dict[str, list[_KnownRequest]] = {}

    def set_request_base(self, path: str, seq: int, transcript: Transcript) -> None:
        """Remember a request as the newest of its path, as a base for later ones."""
        kept = self._list_recent_bases(path)
        shared, length = transcript.parts
        last = self._last[path] = _KnownRequest(seq, shared, length, length)
        self._known[path] = [*kept, last]
        last.longest = max([base.length for base in self._list_recent_bases(path)])

    def _list_recent_bases(self, path: str) -> list[_KnownRequest]:
        """Return the remembered requests among the last four of a path, the newest last."""
        kept, room = list[_KnownRequest](), KEPT_REQUESTS
        for base in reversed(self._known.get(path, ())):
            if room > 0:
                kept.insert(0, base)
            room -= base.count
        return kept

    # Nearly every request is the one before with something behind it. That is told by identity of the shared beginning,
    # without a look at messages, so a step costs the same at 10 messages and at 10,000 (replay:J39).
    def encode_and_remember_difference(self, path: str, seq: int, transcript: Transcript) -> list[Mapping[str, Any]]:
        """Return *transcript* as stored messages and slices of earlier requests, and remember it as a base for later ones."""
        last = self._last.get(path)
        if last is not None:
            shared, length = transcript.parts
            before = last.length
            if 0 < last.longest == before and (
                length >= before
                if shared is last.shared
                else before == _get_base_transcript(last).shared_prefix_length(transcript)
            ):
                # It goes on from the last one, as it nearly always does.
                said = {"type": "slice", "seq": last.seq, "start": 0, "stop": before}
                last.seq, last.shared = seq, shared
                last.length = last.longest = length
                if last.count < KEPT_REQUESTS:
                    last.count += 1
                    if last.count == KEPT_REQUESTS:
                        self._known[path] = [last]  # nothing else is kept, nor what that was
                return [said, *[encode_stored(message) for message in transcript.list_messages_after(before)]]
        items = self._encode_transcript((path, seq), transcript)
        self.set_request_base(path, seq, transcript)
        return [item if isinstance(item, dict) else encode_stored(item) for item in items]

    def _encode_transcript(self, address: Address, transcript: Transcript) -> list[Any]:
        """Return *transcript* as slices of earlier requests, which are objects, and messages."""
        base = self._find_best_base(address[0], transcript)
        if base is None:
            return list(transcript)
        (path, seq), known, shared = base
        where: dict[str, object] = {"type": "slice"} | ({"path": path} if path != address[0] else {}) | {"seq": seq}
        made: list[object] = [{**where, "start": 0, "stop": shared}] if shared else []
        if shared in (len(known), len(transcript)):
            return made + list(transcript[shared:])
        return made + list(self._replace_known_by_slices(where, known, transcript, shared))

    # The newest that shares most. A child looks at its parent's requests when it has none: one that inherits the
    # history begins with thousands of messages that stand in the journal already.
    def _find_best_base(self, path: str, transcript: Transcript) -> tuple[Address, Transcript, int] | None:
        """Return the earlier request that shares most with *transcript*; a child may share its parent's."""
        candidates: list[_KnownRequest] = []
        while True:
            candidates += reversed(self._list_recent_bases(path))
            if candidates or not path:
                break
            path = path.rpartition(".")[0]
        if not candidates or not transcript:
            return None
        last = candidates[0]
        shared = _get_base_transcript(last).shared_prefix_length(transcript)
        for base in candidates:
            if shared < last.length or base.length > last.length:
                break
        else:
            return (path, last.seq), _get_base_transcript(last), shared  # none of the others can share more
        bases = [((path, base.seq), _get_base_transcript(base)) for base in candidates]
        found = [(address, known, known.shared_prefix_length(transcript)) for address, known in bases]
        return max(found, key=lambda base: (base[2], len(base[1])))

    # After a cut of the history nothing is shared from the beginning, and still most messages are known: so they are
    # found by their digests, which are kept beside each message anyway. The digest says where to look, and equality
    # decides.
    def _replace_known_by_slices(
        self, where: Mapping[str, object], known: Transcript, transcript: Transcript, start: int
    ) -> Iterator[object]:
        """Yield *transcript* from *start* on, with the parts that *known* has as slices."""
        places: dict[bytes, int] = {}
        theirs, ours = self._prints.list_digests(known), self._prints.list_digests(transcript)
        for index in range(len(known)):
            places.setdefault(theirs[index], index)
        index = start
        while index < len(transcript):
            place = places.get(ours[index], -1)
            count = 0
            while place >= 0 and _is_same_message(known, place + count, transcript, index + count):
                count += 1
            if count:
                yield {**where, "start": place, "stop": place + count}
            else:
                yield transcript[index]
            index += count or 1


def _get_base_transcript(base: _KnownRequest) -> Transcript:
    return Transcript.from_parts(base.shared, base.length)


def _is_same_message(a: Transcript, i: int, b: Transcript, j: int) -> bool:
    """Return whether message *i* of *a* equals message *j* of *b*; False where one has none."""
    return i < len(a) and j < len(b) and (a[i] is b[j] or a[i] == b[j])
