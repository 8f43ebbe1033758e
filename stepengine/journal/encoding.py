"""
Values to records to lines: forms of effects and outcomes, differences between requests, blobs, checksums (replay J4, J5, J19, J20, K2).

Member names are Python field names. Pure data only: functions are stored as their names, a value that is not JSON as the
name of its type; secrets are taken out on the way.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, assert_never, cast

import attrs

from stepengine.data.codec import STORED, bare, bare_any, restored, restored_any, written, written_any
from stepengine.data.effects import AskPerson, CallFunction, CallModel, CallTool, Spawn
from stepengine.data.fields import PLAIN, within
from stepengine.data.json import freeze, quoted, thaw
from stepengine.data.models import ModelRequest
from stepengine.data.outcomes import Failure, Value, quick_value
from stepengine.data.questions import Question
from stepengine.data.state import ChildResult, RunStatus
from stepengine.data.transcript import Transcript
from stepengine.errors import DataError, JournalWriteFailed, StepEngineError
from stepengine.journal.fingerprints import DEFAULT_SETTINGS, Fingerprints, fingerprint, offered_tool
from stepengine.journal.records import (
    ROOT,
    Address,
    Blob,
    Head,
    Input,
    Intent,
    Record,
    Result,
    for_line,
    shown_address,
    to_line,
    to_text,
)
from stepengine.redaction import Redactor
from stepengine.runtime.performer import Item

__all__ = (
    "Encoder",
    "bare",
    "comparable",
    "describe",
    "is_repeatable",
    "must_last",
    "name_of",
    "outcome_members",
    "outcome_of",
    "packed",
    "questions_of",
    "request_members",
    "restored",
    "storable",
    "touched_world",
    "unpacked",
)

Form = Mapping[str, Any]
COMPARED_CHILD = ("agent_id", "run_id", "status", "output")


def describe(item: Item) -> CallModel | Form:
    """Return the stored form of an effect; a model call stays as it is, it is stored as a difference to earlier ones."""
    effect = item.effect
    match effect:
        case CallModel():
            return effect
        case CallTool():
            form: dict[str, Any] = {"type": "CallTool", "tool_name": effect.tool_name, "input": effect.input}
            form |= {"tool_call_id": effect.tool_call_id, "source": effect.source}
            return form | ({"idempotent": True} if is_repeatable(item) else {})
        case Spawn():
            form = {"type": "Spawn", "agent_id": effect.agent_id, "prompt": effect.prompt, "params": effect.params}
            return form | ({"tool_call_id": effect.tool_call_id} if effect.tool_call_id else {})
        case CallFunction(call=call):
            form = {"type": "Perform", "name": name_of(call.fn), "args": [_argument(a) for a in call.args]}
            form["kwargs"] = {k: _argument(v) for k, v in call.kwargs.items()}
            return form | ({"idempotent": True} if call.is_idempotent else {})
        case AskPerson():
            form = {"type": "Ask", "questions": [_asked(q) for q in effect.questions], "purpose": effect.purpose}
            return form | ({"tool_call_id": effect.tool_call_id} if effect.tool_call_id else {})
        case _ as never:
            assert_never(never)


def _asked(question: Question) -> dict[str, Any]:
    """Return the stored form of a question, without what is made anew whenever it is shown."""
    return bare(question if question.remember is None else attrs.evolve(question, remember=None))


def _argument(value: Any) -> Any:
    try:
        return freeze(value)
    except DataError:
        pass
    if STORED.get(type(value).__name__) is type(value):
        return bare(value)
    dump = getattr(value, "model_dump", None)
    if dump is not None and not isinstance(value, type):
        return freeze(dump(mode="json"))
    return {"type": "object", "name": name_of(value if hasattr(value, "__qualname__") else type(value))}


def name_of(thing: Any) -> str:
    """Return the name of a function or class without its module: the same file may be loaded under several names."""
    thing = getattr(thing, "func", thing)
    name: str = getattr(thing, "__qualname__", type(thing).__qualname__)
    return name.rpartition("<locals>.")[2]


def is_repeatable(item: Item) -> bool:
    """Return whether an effect may simply happen again when nobody knows whether it has (reliability R3)."""
    effect = item.effect
    if type(effect) is CallTool:
        binding = item.plan.tools.get(effect.tool_name)
        notes = binding.spec.annotations if binding is not None else None
        return notes is not None and (notes.idempotent or notes.read_only)
    return effect.call.is_idempotent if type(effect) is CallFunction else True


def must_last(item: Item) -> bool:
    """Return whether it has to outlive a crash that an effect was begun: it cannot happen again, may be undone, or people see it."""
    effect = item.effect
    if type(effect) is AskPerson:
        return True
    if type(effect) is CallTool:
        binding = item.plan.tools.get(effect.tool_name)
        if binding is not None and binding.spec.category == "write":
            return not binding.spec.annotations.read_only
    return not is_repeatable(item)


def touched_world(form: Any) -> bool:
    """Return whether a recorded effect may have changed something outside that a second time would change again."""
    return isinstance(form, Mapping) and form["type"] in ("CallTool", "Perform") and not form.get("idempotent")


def questions_of(form: Any) -> tuple[Question, ...]:
    """Return the questions of a recorded ``Ask``; none of any other effect."""
    if isinstance(form, Mapping) and form.get("type") == "Ask":
        return tuple([restored(q) for q in form["questions"]])
    return ()


# --- outcomes -------------------------------------------------------------------------------------------------------


def storable(error: StepEngineError) -> StepEngineError:
    """
    Return *error*, or its nearest ancestor that can be stored, with the same message.

    A subclass that only this process knows cannot be read back; whoever catches it must see the same live and on replay.
    """
    kind = type(error)
    if STORED.get(kind.__name__) is kind:
        return error
    known = cast("type[StepEngineError]", next(c for c in kind.__mro__ if STORED.get(c.__name__) is c))
    named: Callable[..., StepEngineError] = known
    made = named(error.message, **{f: getattr(error, f) for f in known.fields})
    made.__cause__ = error
    return made


def outcome_members(outcome: Value | Failure) -> dict[str, Any]:
    """Return the members of a result record that an outcome makes."""
    if type(outcome) is Failure:
        members = {"error": bare(Failure(outcome.error))["error"]}
    else:
        value = cast("Value", outcome).value
        if isinstance(value, ChildResult):
            value = _plain_child(value)
        members = {"value": _stored_value(value)}
    if outcome.inputs:
        members["inputs"] = [bare(message) for message in outcome.inputs]
    return members


def _stored_value(value: Any) -> Any:
    try:
        return bare_any(value)
    except DataError as error:
        raise within(error, ".value") from None


def outcome_of(members: Mapping[str, Any]) -> Value | Failure:
    """
    Return the outcome that a result record holds.

    Raises:
        DataError: when it does not fit the codec any more.
    """
    inputs = tuple([restored(message) for message in members["inputs"]]) if "inputs" in members else ()
    at = members["at"]
    if "error" in members:
        return Failure(restored({"type": "Failure", "error": members["error"]}).error, at, inputs)
    try:
        return quick_value(restored_any(members["value"]), at, inputs)
    except DataError as error:
        raise within(error, ".value") from None


def _plain_child(child: ChildResult[Any]) -> ChildResult[Any]:
    """Return a child's result with an output that is JSON; in process the child is run again, so it is only compared."""
    output = _argument(child.output)
    error = storable(child.error) if child.error is not None else None
    return attrs.evolve(child, output=output, error=error)


def comparable(child: ChildResult[Any]) -> Form:
    """
    Return what two results of one child are compared by.

    Lines and paths in error texts may differ. So may what follows from the rest by rules that journals outlive: the text, and
    the error that names a spent budget. What a parent does with these is compared by itself.
    """
    data = bare(_plain_child(child))
    same = {name: data.get(name) for name in COMPARED_CHILD}
    error = None if child.status is RunStatus.MAX_STEPS else child.error
    return {**thaw(same), "error": type(error).__name__ if error is not None else None}


MAX_INLINE = 32 * 1024
MAX_LINE = 16 * 1024 * 1024
KEPT_BASES = 4
Shared: TypeAlias = "tuple[str, str, Any]"
"""A member of a request that nearly every one holds, its fingerprint, and its value."""
VOLATILE = frozenset({"created", "id", "service_tier", "system_fingerprint"})


@attrs.define(eq=False)
class _Frame:
    """
    What stands around the messages of a request.

    Attributes:
        request: One of the requests that it belongs to.
        shared: What the line names by fingerprints.
        before: The text before the messages.
        after: The text after them.
        is_shared: Whether the journal has the blobs of what is shared.
    """

    request: ModelRequest | None
    shared: tuple[Shared, ...] = ()
    before: str = ""
    after: str = ""
    is_shared: bool = False

    def is_of(self, request: ModelRequest) -> bool:
        """Return whether it stands around the messages of *request* too."""
        known = self.request
        return (
            known is not None
            and known.tools is request.tools
            and known.system_prompt is request.system_prompt
            and known.model is request.model
            and known.settings is request.settings
            and known.tool_choice is request.tool_choice
            and known.tail is request.tail
        )


NO_FRAME = _Frame(None, is_shared=True)
"""Of whatever is no request."""


class Encoder:
    """
    Makes the lines of one journal, in order.

    Args:
        redactor: What takes secrets out.
        link: Whether each checksum starts from the one before.
        previous: The checksum of the last line that is there already.
        blobs: Fingerprints of blobs that are there already.
        stable: Whether what differs between two recordings of the same thing is left out (replay J23).
    """

    def __init__(
        self, redactor: Redactor, *, link: bool, previous: int = 0, blobs: Sequence[str] = (), stable: bool = False
    ) -> None:
        self.prints = Fingerprints(redactor)
        self._redactor = redactor
        self._link = link
        self._previous = previous
        self._blobs = set(blobs)
        self._stable = stable
        self._bases = _Bases(self.prints)
        self._last_frame: _Frame | None = None

    def remember(self, path: str, seq: int, transcript: Transcript) -> None:
        """Let later requests be stored as differences to one that is in the journal already."""
        self._bases.remember(path, seq, transcript)

    def lines(self, record: Record) -> list[bytes]:
        """
        Return the lines of a record: those of its blobs, then its own.

        Raises:
            JournalWriteFailed: when the line would be longer than 16 MiB.
            SecretFound: when shapes are looked for and one is left.
        """
        return [self._line(members, record) for members in self._all_members(record)]

    def _line(self, members: Mapping[str, Any] | str, record: Record) -> bytes:
        line, crc = to_line(members, self._previous)
        if len(line) > MAX_LINE:
            where = shown_address(getattr(record, "path", ""), getattr(record, "seq", -1))
            msg = f"the {record.kind} of {where} has {len(line)} bytes; a record has at most {MAX_LINE}"
            raise JournalWriteFailed(msg)
        self._previous = crc if self._link else 0
        return line

    def _all_members(self, record: Record) -> Iterable[Mapping[str, Any] | str]:
        """Return the members of each line, or its text where that was made already."""
        kind = type(record)
        if kind is Blob:
            self._blobs.add(cast("Blob", record).fp)
        line = record.line
        if line is not None:
            return ({name: value for name, value in line.items() if name != "crc"},)
        frame = self._frame(record.live.request) if kind is Intent and record.live is not None else NO_FRAME  # type: ignore[union-attr]
        text = self._text(record, frame)
        if len(text) <= MAX_INLINE and text.count('"$') == len(frame.shared) and not self._redactor.suspicious(text):
            # In a run the first request brings the blobs, and nothing else has any.
            return (text,) if frame.is_shared else (*self._share(frame), text)
        return self._packed(record, json.loads(text), frame)

    def _packed(self, record: Record, members: dict[str, Any], frame: _Frame) -> Iterator[Mapping[str, Any]]:
        """Give what stands in lines without secrets and long texts."""
        for name, _, _ in frame.shared:
            members["effect"]["request"][name] = None
        text = to_text(members)
        if self._redactor.suspicious(text):
            members = self._cleaned(members, record.kind)
            text = to_text(members)
        if len(text) > MAX_INLINE or '"$' in text:
            blobs: dict[str, Any] = {}
            members = packed(members, blobs)
            for fp, data in blobs.items():
                yield from self._new_blob(fp, data)
        for name, fp, _ in frame.shared:
            members["effect"]["request"][name] = {"$blob": fp}
        yield from self._share(frame)
        yield members

    def _cleaned(self, members: dict[str, Any], kind: str) -> dict[str, Any]:
        clean: dict[str, Any] = self._redactor.value(members)
        if self._redactor.shapes:
            self._redactor.refuse(clean, f"the {kind} record")
        return clean

    def _shared(self, request: ModelRequest) -> list[Shared]:
        """Return what nearly every request holds: the member, its fingerprint, its value."""
        shared: list[Shared] = []
        if request.system_prompt:
            shared.append(("system_prompt", self.prints.prompt(request.system_prompt), request.system_prompt))
        if request.tools:
            shared.append(("tools", self.prints.tools(request.tools), request.tools))
        return shared

    def _share(self, frame: _Frame) -> Iterator[Mapping[str, Any]]:
        """Give the blobs of what the members name by fingerprints."""
        frame.is_shared = True
        for name, fp, value in frame.shared:
            if fp not in self._blobs:
                data = value if name == "system_prompt" else [offered_tool(t) for t in value]
                clean = self._redactor.value(data) if self._redactor.suspicious(to_text(data)) else data
                yield from self._new_blob(fp, clean)

    def _new_blob(self, fp: str, data: Any) -> Iterator[Mapping[str, Any]]:
        if fp not in self._blobs:
            self._blobs.add(fp)
            yield {"kind": "blob", "fp": fp, "data": data}

    def _text(self, record: Record, frame: _Frame) -> str:
        """Return the text of a record, in which fingerprints stand for what is shared."""
        match record:
            case Intent():
                return self._intent(record, frame)
            case Result():
                return self._quick_result(record) or to_text(self._result(record))
            case Head():
                return to_text(head_members(record))
            case Input():
                address = {"kind": "input", "path": record.path, "seq": record.seq}
                return to_text({**address, "at": record.at, "input": record.input})
            case Blob():
                return to_text({"kind": "blob", "fp": record.fp, "data": record.data})

    def _intent(self, record: Intent, frame: _Frame) -> str:
        effect = record.effect
        record.fp = record.fp or self.prints.of(effect)
        if type(effect) is CallModel:
            messages = self._messages(record, effect.request.messages)
            request = f"{frame.before}[{messages}]{frame.after}"
            form = f'{{"type":"CallModel","purpose":{quoted(effect.purpose)},"request":{request}}}'
        else:
            stored = cast("Mapping[str, Any]", effect)
            form = PLAIN.json(stored)
            if (record.path, record.seq) == ROOT and stored.get("previous"):
                # Known by its messages, not by its buffer: the run goes on from a copy of this state.
                self._bases.remember(*ROOT, restored(stored["previous"]).view)
        together = "" if record.gather is None else f',"gather":{record.gather}'
        return for_line(f'{_address(record)},"fp":"{record.fp}","effect":{form}{together}}}')

    def _messages(self, record: Intent, transcript: Transcript) -> str:
        items = self._bases.difference((record.path, record.seq), transcript)
        self._bases.remember(record.path, record.seq, transcript)
        return ",".join([PLAIN.json(i) if type(i) is dict else written(i, PLAIN) for i in items])

    def _frame(self, request: ModelRequest) -> _Frame:
        """Return what stands around the messages of a request; in a run it is nearly always the same."""
        known = self._last_frame
        if known is None or not known.is_of(request):
            shared = tuple(self._shared(request))
            blobs = {name: {"$blob": fp} for name, fp, _ in shared}
            members = request_members(request, (), whole=False) | blobs
            before, _, after = PLAIN.json(members).partition('"messages":[]')
            known = self._last_frame = _Frame(request, shared, f'{before}"messages":', after)
        return known

    def _quick_result(self, record: Result) -> str:
        """Return the text of a result without attempts, writes and messages, of which there are most; ``""`` for any other one."""
        outcome = record.outcome
        if type(outcome) is not Value or record.attempts or record.writes or outcome.inputs or self._stable:
            return ""
        if type(outcome.value) is ChildResult:
            return ""
        return for_line(f'{_address(record)},"at":{record.at},"value":{written_any(outcome.value, PLAIN)}}}')

    def _result(self, record: Result) -> dict[str, Any]:
        members: dict[str, Any] = {"kind": "result", "path": record.path, "seq": record.seq, "at": record.at}
        if record.attempts:
            members["attempts"] = list(record.attempts)
        if record.writes:
            members["writes"] = list(record.writes)
        assert record.outcome is not None  # noqa: S101 - a result of this process has its outcome
        members.update(outcome_members(record.outcome))
        value = members.get("value")
        if self._stable and isinstance(value, dict) and value.get("type") == "ModelReply":
            value.pop("request_id", None)
            said = {k: v for k, v in value.pop("provider_data", {}).items() if k not in VOLATILE}
            members["value"] = {**value, **({"provider_data": said} if said else {})}
        return members


def _address(record: Intent | Result) -> str:
    return f'{{"kind":"{record.kind}","path":"{record.path}","seq":{record.seq}'


def head_members(head: Head) -> dict[str, Any]:
    """Return the members of a head."""
    members: dict[str, Any] = {"kind": "head", "format": head.format, "engine": head.engine, "agent": head.agent}
    members |= {"definition": head.definition, "run": head.run, "seed": head.seed, "created": head.created}
    members |= {"parent": head.parent} if head.parent else {}
    members |= {"hooks": list(head.hooks)} if head.hooks else {}
    return members | ({"link": True} if head.link else {})


def request_members(request: ModelRequest, messages: Sequence[Any], *, whole: bool) -> dict[str, Any]:
    """Return the stored form of a request whose history is *messages*; *whole* says whether prompt and tools are in it."""
    members: dict[str, Any] = {"model": request.model}
    if request.system_prompt:
        members["system_prompt"] = request.system_prompt if whole else None
    members["messages"] = list(messages)
    if request.tools:
        members["tools"] = [offered_tool(t) for t in request.tools] if whole else None
    if request.tool_choice is not None:
        members["tool_choice"] = request.tool_choice
    if request.settings != DEFAULT_SETTINGS:
        members["settings"] = bare(request.settings)
    if request.tail:
        members["tail"] = [bare(m) for m in request.tail]
    return members


# --- blobs ----------------------------------------------------------------------------------------------------------


def packed(value: Any, blobs: dict[str, Any]) -> Any:
    """
    Return *value* with long texts replaced by ``{"$blob": fp}`` and put into *blobs*.

    An object of the user's with a single member that starts with ``$`` is wrapped in ``{"$obj": ...}`` (replay J8).
    """
    if isinstance(value, str):
        return _blob(value, blobs) if len(value) > MAX_INLINE else value
    if isinstance(value, list | tuple):
        return [packed(v, blobs) for v in value]
    if not isinstance(value, Mapping):
        return value
    members = {k: packed(v, blobs) for k, v in value.items()}
    return {"$obj": members} if _is_special(members) else members


def _blob(value: Any, blobs: dict[str, Any]) -> dict[str, str]:
    fp = fingerprint(value)
    blobs[fp] = value
    return {"$blob": fp}


def _is_special(members: Mapping[str, Any]) -> bool:
    return len(members) == 1 and next(iter(members)).startswith("$")


def unpacked(value: Any, blobs: Mapping[str, Any]) -> Any:
    """
    Return what ``packed`` made *value* of, which was read from a line.

    Raises:
        KeyError: when a blob is missing.
    """
    if type(value) is list:
        return [unpacked(v, blobs) for v in value]
    if type(value) is not dict:
        return value
    if _is_special(value):
        name, inner = next(iter(value.items()))
        if name == "$blob":
            return blobs[inner]
        return {k: unpacked(v, blobs) for k, v in inner.items()} if name == "$obj" else value
    return {k: unpacked(v, blobs) for k, v in value.items()}


# --- differences ----------------------------------------------------------------------------------------------------


class _Bases:
    """The last requests of each path, which later ones are stored as differences to."""

    def __init__(self, prints: Fingerprints) -> None:
        self._prints = prints
        self._known: dict[str, deque[tuple[Address, Transcript, int]]] = {}

    def remember(self, path: str, seq: int, transcript: Transcript) -> None:
        """Keep a request; handlers that ask beside the conversation must not push the conversation out at once."""
        kept = self._known.get(path)
        if kept is None:
            kept = self._known[path] = deque(maxlen=KEPT_BASES)
        kept.append(((path, seq), transcript, len(transcript)))

    def difference(self, address: Address, transcript: Transcript) -> list[Any]:
        """Return *transcript* as slices of earlier requests, which are objects, and messages."""
        base = self._best(address[0], transcript)
        if base is None:
            return list(transcript)
        (path, seq), known, shared = base
        where: dict[str, Any] = {"type": "Slice"} | ({"path": path} if path != address[0] else {}) | {"seq": seq}
        made: list[Any] = [{**where, "start": 0, "stop": shared}] if shared else []
        if shared in (len(known), len(transcript)):
            return made + list(transcript[shared:])
        return made + list(self._matched(where, known, transcript, shared))

    def _best(self, path: str, transcript: Transcript) -> tuple[Address, Transcript, int] | None:
        """Return the request that most of *transcript* is known to come from; a child may have begun with its parent's."""
        candidates: list[tuple[Address, Transcript, int]] = []
        while True:
            candidates += reversed(self._known.get(path, ()))
            if candidates or not path:
                break
            path = path.rpartition(".")[0]
        if not candidates or not transcript:
            return None
        address, known, length = candidates[0]
        shared = known.shared_prefix(transcript)
        for _, _, other in candidates:
            if shared < length or other > length:
                break
        else:
            return address, known, shared  # none of the others can share more
        found = [(address, known, known.shared_prefix(transcript)) for address, known, _ in candidates]
        return max(found, key=lambda base: (base[2], len(base[1])))

    def _matched(
        self, where: Mapping[str, Any], known: Transcript, transcript: Transcript, start: int
    ) -> Iterator[Any]:
        """Give the part of *transcript* from *start* on, with runs that stand in *known* as slices."""
        places: dict[bytes, int] = {}
        theirs, ours = self._prints.digests(known), self._prints.digests(transcript)
        for index in range(len(known)):
            places.setdefault(theirs[index], index)
        index = start
        while index < len(transcript):
            place = places.get(ours[index], -1)
            count = 0
            while place >= 0 and _equal_at(known, place + count, transcript, index + count):
                count += 1
            if count:
                yield {**where, "start": place, "stop": place + count}
            else:
                yield transcript[index]
            index += count or 1


def _equal_at(a: Transcript, i: int, b: Transcript, j: int) -> bool:
    return i < len(a) and j < len(b) and (a[i] is b[j] or a[i] == b[j])
