"""
What a journal says: its records by address, checked for structure, requests put together again, its opening.

The opening is what the run was started with: the head, and the Spawn of the root at ``("", -1)``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from functools import cache
from typing import Any, Literal, NamedTuple, TypeAlias, assert_never, cast

import attrs
from attrs import frozen

from stepengine.data.definition import AgentDefinition
from stepengine.data.effects import KINDS, CallModel
from stepengine.data.json import JsonDict, JsonValue
from stepengine.data.limits import Limits
from stepengine.data.messages import Message
from stepengine.data.models import ModelRequest
from stepengine.data.outcomes import Begun, Failure, Stop, Value
from stepengine.data.questions import Question
from stepengine.data.state import AgentState, RunInfo, RunStatus
from stepengine.data.tools import Control, ToolSpec
from stepengine.data.transcript import Transcript
from stepengine.data.usage import add_cost
from stepengine.data.waiting import Awaited, ChildRef, Received, Waits, WaitsFor
from stepengine.errors import (
    AgentError,
    DataError,
    JournalCorrupt,
    JournalError,
    JournalMissing,
    LimitExceeded,
    StepEngineError,
)
from stepengine.journal.encoding import (
    bare,
    name_of,
    outcome_of,
    questions_of,
    request_members,
    restored,
    unpack_texts,
    without_secret,
)
from stepengine.journal.fingerprints import definition_fingerprint
from stepengine.journal.records import (
    EFFECTS,
    ROOT,
    SIGNED,
    UNREADABLE,
    Address,
    Blob,
    Head,
    Input,
    Intent,
    Record,
    Result,
    begun_of,
    check_effect,
    check_input,
    check_outcome,
    shown_address,
)
from stepengine.machine.plan import RunPlan
from stepengine.redaction import Redactor
from stepengine.runtime.performer import child_path
from stepengine.workspace.installed import installed_version
from stepengine.workspace.writes import FileWrite

__all__ = (
    "STABLE_CREATED",
    "ChosenModels",
    "History",
    "Opening",
    "changes_since",
    "created_of",
    "engine_version",
    "new_head",
    "opening_of",
    "other_packages",
    "parent_of",
    "root_form",
    "stop_of",
)

WAITING: Mapping[str, WaitsFor] = {kind: row.waits_for for kind, row in KINDS.items() if row.waits_for}
"""What each type of effect that only waits waits for."""
ChosenModels: TypeAlias = tuple[Mapping[str, str], Mapping[str, str]]
"""The models in place of those that agents name, by agent id: the engine's, and those of one run alone."""
KEPT_TRANSCRIPTS = 64
"""A walk through a run with dozens of children still finds the last request of each; a transcript shares its messages."""
MAX_MESSAGES = 1_000_000
"""No context window holds as many. A damaged journal can name slices of slices that would fill the memory."""


class _MessageRange(NamedTuple):
    """The messages from *start* to *stop* of the request at *address*."""

    address: Address
    start: int = 0
    stop: int | None = None


def parent_of(path: str) -> Address:
    """Return the address of what started the run at *path*: a Spawn, or the call of a tool that yields; the root's is ``("", -1)``."""
    if not path:
        return ROOT
    parent, _, seq = path.rpartition(".")
    return parent, int(seq)


class History:
    """
    The records of one journal.

    Args:
        records: All of them, in order.
        name: The journal's name, for errors.
        missing: Makes the error for a journal without a run.

    Attributes:
        head: The head; ``None`` for an empty journal.
        records: All records, in order.
        intents: Intents by address.
        results: Results by address.
        open: Intents that have no result, by address, in order: few, however long the journal is.
        inputs: Inputs in order.
        prompts: System prompts that were computed, by path.
        windows: Context lengths of models in tokens, by path.
        kinds: The kinds of inputs, by address.
        begun: What model calls had used when they were stopped, by address.
        kept: Which other fingerprints were accepted at which addresses when the run went on after an edit.
        blobs: Blob values by fingerprint.
        last_at: The latest time in milliseconds since the root run was created.

    Raises:
        JournalCorrupt: when the records cannot have been written one after the other by one run.
    """

    def __init__(
        self,
        records: Iterable[Record],
        name: str = "the journal",
        missing: Callable[[], JournalMissing] = lambda: JournalMissing("the journal holds no run"),
    ) -> None:
        self.name = name
        self._missing = missing
        self.head: Head | None = None
        self.records: list[Record] = list(records)
        self.intents: dict[Address, Intent] = {}
        self.results: dict[Address, Result] = {}
        self.open: dict[Address, Intent] = {}
        self.inputs: list[Input] = []
        self.prompts: dict[str, str] = {}
        self.windows: dict[str, int] = {}
        self.kinds: dict[Address, set[str]] = {}
        self.kept: set[tuple[Address, str]] = set()
        self.begun: dict[Address, Begun] = {}
        self.waiting: set[Address] = set()
        self.blobs: dict[str, Any] = {}
        self.last_at = 0
        # Transcripts that were put together: a request is stored as a difference to an earlier one, which is mostly the
        # one before. Only a few are kept, or a journal of n steps would hold n conversations again.
        self._built: dict[Address, Transcript] = {}
        self._next: dict[str, int] = {}
        self._order: dict[Address, int] = {}
        # Intents whose stored form was looked at and found sound.
        self._sound: set[Address] = set()
        # These are made when first asked: most who read a journal ask for none of them, and each is a walk through all
        # of it.
        self._tools: dict[str, set[str]] | None = None
        self._about: dict[tuple[str, str, str | None], list[Intent]] | None = None
        self._told: dict[str, Address] | None = None
        self._unheard: dict[str, list[str]] | None = None
        self._wakes: dict[Address, int] | None = None
        self._computed: dict[Address, Sequence[Any]] | None = None
        self._take_all(self.records)

    def grow(self, records: Sequence[Record]) -> None:
        """Take in records that were written after those that are known; raises as the class."""
        # Forgotten, and made anew when asked for: who follows a run grows it at each record, and asks for these hardly
        # ever.
        self._tools, self._about, self._order, self._told = None, None, {}, None
        self._unheard = self._wakes = self._computed = None
        first = len(self.records) + 1
        self.records += records
        self._take_all(records, first)

    def _take_all(self, records: Sequence[Record], first: int = 1) -> None:
        for number, record in enumerate(records, first):
            problem = self._take(record)
            if problem:
                where = f"record {number} of {self.name}"
                msg = f"{where} does not follow from those before it: {problem}; a record is missing, repeated or moved"
                raise JournalCorrupt(msg)

    @property
    def is_complete(self) -> bool:
        """Whether the root run has ended; a suspended or interrupted one has not."""
        return ROOT in self.results

    @property
    def computed(self) -> Mapping[Address, Sequence[Any]]:
        """The results of the work in bodies of tools, in order, by the address of the call, as far as the call has its result."""
        if self._computed is None:
            found = [record for record in self.inputs if record.input.get("type") == "computed"]
            self._computed = {(record.path, record.seq): record.input["values"] for record in found}
        return self._computed

    @property
    def stop(self) -> Input | None:
        """What stopped the run from outside, if that is the last thing recorded: whatever follows a stop went on after it."""
        last = next(
            (r for r in reversed(self.records) if not isinstance(r, Input) or r.input.get("type") != SIGNED), None
        )
        return last if isinstance(last, Input) and last.input.get("type") == "stop" else None

    @property
    def root(self) -> Mapping[str, Any]:
        """What the root run was started with: the effect of its intent."""
        intent = self.intents.get(ROOT)
        if intent is None:
            raise self._missing()
        return self.form(intent)

    def _take(self, record: Record) -> str:
        """Take a record in; return what is wrong with it, if anything."""
        if (self.head is None) != (isinstance(record, Head)):
            return "the head stands first and only there"
        # Of these two there are most; a `match` would ask of each what it is not.
        if isinstance(record, Intent):
            return self._take_intent(record)
        if isinstance(record, Result):
            return self._take_result(record)
        match record:
            case Head():
                self.head = record
            case Input():
                if not self.has_run(record.path):
                    return f"there is no run at path {record.path!r}"
                self._take_input(record)
            case Blob():
                self.blobs[record.fp] = record.data
            case _ as never:
                assert_never(never)
        return ""

    def _take_input(self, record: Input) -> None:
        if record.line is not None:
            with self._reading(record):
                record = attrs.evolve(record, input=unpack_texts(record.input, self.blobs))
                check_input(record.input)
        self.inputs.append(record)
        self.last_at = max(self.last_at, record.at)
        kind, path, address = record.input.get("type"), record.path, (record.path, record.seq)
        self.kinds.setdefault(address, set()).add(str(kind))
        match kind:
            case "system_prompt":
                self.prompts[path] = record.input["text"]
            case "context_window":
                self.windows[path] = record.input["tokens"]
            case "accepted_difference":
                self.kept.add((address, record.input["fp"]))
            case "gap":
                self._next[path] = record.seq
            case "partial_usage":
                self._take_begun(address, begun_of(record.input))
            case "result_pending":
                self.waiting.add(address)
            case _:
                pass

    def _take_begun(self, address: Address, more: Begun) -> None:
        """Add what a model call had used when it was stopped, which may happen once in each process that made it."""
        known = self.begun.get(address)
        if known is not None:
            more = Begun(known.usage + more.usage, add_cost(known.cost, more.cost))
        self.begun[address] = more

    def _take_intent(self, record: Intent) -> str:
        path, seq, kind = record.path, record.seq, record.type
        if kind not in EFFECTS:
            return f"{kind[:80]!r} is not an effect"
        if (path, seq) == ROOT:
            problem = "the root run starts twice" if self.intents else ""
        else:
            problem = self._out_of_place(record)
        self._next[path] = seq + 1
        self.intents[path, seq] = self.open[path, seq] = record
        return problem

    def _out_of_place(self, record: Intent) -> str:
        """Return why an effect cannot have begun here, if it cannot."""
        path, seq = record.path, record.seq
        if ROOT in self.results:
            return "the root run has ended before it"
        # Numbers follow each other without repetition (replay:J41): a line that is missing, doubled or moved would
        # otherwise give every effect behind it the result of its neighbour, in a journal whose checksums may all be
        # right.
        expected = self._next.get(path)
        if expected is None:
            expected = 0
            if parent_of(path) not in self.intents:
                return f"nothing started a run at path {path!r}"
        if seq != expected:
            return f"the next effect of path {path!r} is {shown_address(path, expected)}, not #{seq}"
        return "" if self._may_follow(record) else f"{shown_address(path, seq - 1)} before it has no result"

    def _may_follow(self, record: Intent) -> bool:
        """Return whether the effect before, and all that began together with it, have results, or this began with them."""
        path, seq = record.path, record.seq
        before = self.intents.get((path, seq - 1)) if seq else None
        if before is None:
            return True
        if before.gather is None:
            return (path, seq - 1) in self.results
        return before.gather == record.gather or all((path, n) in self.results for n in range(before.gather, seq))

    def last_together(self, address: Address) -> int:
        """Return the number of the last effect that began together with the one at *address*; its own when it was alone."""
        path, seq = address
        known = self.intents.get(address)
        while known is not None and known.gather is not None:
            after = self.intents.get((path, seq + 1))
            if after is None or after.gather != known.gather:
                break
            seq += 1
        return seq

    def end_of(self, path: str) -> Result | None:
        """Return the record of how the run at *path* ended: at what started it, or where it ran in the background at its own path."""
        if path and self.is_background(path):
            return self.results.get((path, -1))
        return self.results.get(parent_of(path))

    def is_background(self, path: str) -> bool:
        """Return whether the run at *path* was started in the background."""
        started = self.intents.get(parent_of(path)) if path else None
        return started is not None and started.is_background

    def told_at(self, path: str) -> Address | None:
        """Return where the run around the child at *path*, which ran in the background, was first told how that ended."""
        if self._told is None:
            self._told = {}
            for address, intent in self.intents.items():
                result = self.results.get(address) if intent.type in ("wait", "cancel") else None
                awaited = None if result is None else getattr(self.outcome(result), "value", None)
                for child in awaited.done if isinstance(awaited, Awaited) else ():
                    self._told.setdefault(child, address)
        return self._told.get(path)

    def _take_result(self, record: Result) -> str:
        address = (record.path, record.seq)
        if address not in self.intents and not (record.seq == -1 and self.is_background(record.path)):
            return f"there is no intent {shown_address(*address)}"
        if address in self.results:
            return f"{shown_address(*address)} has two results"
        self.results[address] = record
        self.open.pop(address, None)
        self.last_at = max(self.last_at, record.at)
        return ""

    # --- values -------------------------------------------------------------------------------------------------------

    def form(self, intent: Intent) -> Mapping[str, Any]:
        """Return the stored form of an effect with its blobs put in; a request's slices stay slices."""
        effect = intent.effect
        if isinstance(effect, CallModel):
            request = request_members(effect.request, [bare(m) for m in effect.request.messages], whole=True)
            return {"type": "model_call", "purpose": effect.purpose, "request": request}
        if not intent.is_stored:
            return effect
        address = (intent.path, intent.seq)
        with self._reading(intent):
            form: Mapping[str, object] = unpack_texts(effect, self.blobs)
            # A checksum finds damage and no intent: whoever made the file may have put anything into it. So each form
            # is looked at before it is believed, once, and when it is first needed.
            if address not in self._sound:
                check_effect(form, is_start=address == ROOT)
                self._sound.add(address)
        return form

    @contextlib.contextmanager
    def _reading(self, record: Record) -> Iterator[None]:
        """Report a record as damaged when its content cannot be read."""
        try:
            yield
        except JournalError:
            raise
        except (StepEngineError, *UNREADABLE) as error:
            raise self._corrupt(record, error) from error

    def _corrupt(self, record: Record, error: BaseException) -> JournalCorrupt:
        number = next((n for n, known in enumerate(self.records, 1) if known is record), 0)
        why = error.message if isinstance(error, StepEngineError) else f"{type(error).__name__}: {error}"
        return JournalCorrupt(f"record {number} of {self.name} holds what no run writes: {why}")

    def outcome(self, result: Result) -> Value | Failure:
        """
        Return what a result holds.

        Raises:
            JournalCorrupt: when it does not fit the codec any more, or a blob of it is missing.
        """
        known = result.outcome
        if known is not None:
            return known
        # Not kept: what of it is still needed stands in the state of the run.
        try:
            made = outcome_of(self._fill_blobs(result))
            if result.seq == -1 and result.path:
                check_outcome("agent_call", made)
                return made
            intent = self.intents[result.path, result.seq]
            asked = len(self.form(intent)["questions"]) if intent.type == "ask" else 0
            check_outcome("agent_start" if intent.is_background else intent.type, made, asked)
            told = made.value if isinstance(made, Value) else None
            if isinstance(told, Awaited):
                self._check_ends(intent, told)
            elif isinstance(told, ChildRef):
                _check_ref(intent, told)
        except JournalError:
            raise
        except (StepEngineError, *UNREADABLE) as error:
            raise self._corrupt(result, error) from error
        return made

    def _check_ends(self, intent: Intent, told: Awaited) -> None:
        """Raise ``ValueError`` when a run is told of an end that its child does not have: a replay would wait for it."""
        waited = self.form(intent)["children"]
        for path in told.done:
            if path not in waited or (path, -1) not in self.results:
                msg = f"it tells of the end of the child at {path[:80]!r}, which has none"
                raise ValueError(msg)

    def _fill_blobs(self, result: Result) -> Mapping[str, object]:
        source = result.read_from
        if source is None or isinstance(source, Mapping):
            return cast("Mapping[str, Any]", unpack_texts(source, self.blobs))
        return source.filled(result.start, result.end, self.blobs)

    def writes(self, result: Result) -> list[FileWrite]:
        """
        Return what is needed to undo the writes of a tool call, in order.

        Raises:
            JournalCorrupt: when that cannot be read, or a blob of it is missing.
        """
        with self._reading(result):
            forms = list(result.writes) if result.given is not None else unpack_texts(list(result.writes), self.blobs)
            return [FileWrite.of_form(form) for form in forms]

    def tools_of(self, path: str) -> frozenset[str]:
        """Return the names of the tools that the run at *path* called."""
        if self._tools is None:
            self._tools = {}
            for intent in self.intents.values():
                if intent.type == "tool_call":
                    named = intent.subject
                    name = named if isinstance(named, str) else self.form(intent)["tool_name"]
                    self._tools.setdefault(intent.path, set()).add(name)
        return frozenset(self._tools.get(path, ()))

    def about_call(self, kind: Literal["tool_call", "ask"], path: str, tool_call_id: str | None) -> Sequence[Intent]:
        """
        Return the effects of a kind that are about one tool call of the run at *path*, in order.

        No run has two calls with one id; a journal that somebody else wrote may.
        """
        if self._about is None:
            self._about = {}
            for intent in self.intents.values():
                if intent.type in ("tool_call", "ask"):
                    key = intent.type, intent.path, self.form(intent).get("tool_call_id")
                    self._about.setdefault(key, []).append(intent)
        return self._about.get((kind, path, tool_call_id), ())

    def model(self, intent: Intent) -> str:
        """Return the model of a recorded model call."""
        # The stored form as it is: putting blobs back in would cost more than the model is worth.
        with self._reading(intent):
            model = intent.subject
        return str(model if isinstance(model, str) else self.form(intent)["request"]["model"])

    def messages(self, intent: Intent) -> list[Mapping[str, Any]]:
        """Return the history of a recorded request as JSON, its slices put together."""
        if intent.live is not None:
            return [bare(m) for m in intent.live.request.messages]
        found: list[Mapping[str, object]] = []
        opened = 0
        # From the last message to the first, without recursion: one request may lead through all before it.
        waiting: list[Mapping[str, object] | _MessageRange] = [_MessageRange((intent.path, intent.seq))]
        while waiting:
            entry = waiting.pop()
            if isinstance(entry, _MessageRange):
                opened += 1
                if opened + len(found) > MAX_MESSAGES:
                    msg = f"its request is put together of more than {MAX_MESSAGES} messages"
                    raise self._corrupt(intent, DataError(msg))
                waiting.extend(self._expand_part(entry))
            else:
                found.append(entry)
        found.reverse()
        return found

    def _expand_part(self, part: _MessageRange) -> Iterator[Mapping[str, Any] | _MessageRange]:
        """Give what a part of a request is made of: messages, and parts of earlier requests."""
        position = 0
        for item in self._items(part.address):
            sliced = item["type"] == "slice"
            end = position + (item["stop"] - item["start"] if sliced else 1)
            first, last = max(part.start, position), end if part.stop is None else min(part.stop, end)
            if first < last:
                offset = item["start"] - position if sliced else 0
                source = (item.get("path", part.address[0]), item["seq"]) if sliced else part.address
                if sliced:
                    self._check_earlier(source, part.address)
                yield _MessageRange(source, first + offset, last + offset) if sliced else item
            position = end
        if part.stop is not None and position < part.stop:
            msg = f"a later request shares {part.stop} messages with it, and it has {position}"
            raise self._corrupt(self.intents[part.address], DataError(msg))

    def _check_earlier(self, source: Address, address: Address) -> None:
        """Raise unless a request shares messages with one that came before it: else putting it together would not end."""
        # A request that shares messages with itself, or two that share with each other, would be put together for ever;
        # no run writes that, and a stranger's file may hold it.
        if not self._order:
            self._order = {known: number for number, known in enumerate(self.intents)}
        known = self.intents.get(source)
        if (
            known is None
            or not (source == ROOT or known.type == "model_call")
            or self._order[source] >= self._order[address]
        ):
            msg = f"it shares messages with {shown_address(*source)}, which is not an earlier request"
            raise self._corrupt(self.intents[address], DataError(msg))

    def _items(self, address: Address) -> list[Mapping[str, Any]]:
        intent = self.intents[address]
        if address == ROOT:
            return _view_of(self.root)
        if intent.live is not None:
            return [bare(m) for m in intent.live.request.messages]
        items: list[Mapping[str, object]] = self.form(intent)["request"]["messages"]
        return items

    def request(self, intent: Intent) -> ModelRequest:
        """Return the request of a recorded model call."""
        if intent.live is not None:
            return intent.live.request
        members = self.form(intent)["request"]
        with self._reading(intent):
            return self._request(intent, members)

    def _request(self, intent: Intent, members: Mapping[str, Any]) -> ModelRequest:
        settings = {"settings": restored(members["settings"])} if "settings" in members else {}
        return ModelRequest(
            members["model"],
            members.get("system_prompt", ""),
            self._transcript(intent, members["messages"]),
            tuple([ToolSpec(**spec) for spec in members.get("tools", ())]),
            members.get("tool_choice"),
            tail=tuple([restored(m) for m in members.get("tail", ())]),
            **settings,
        )

    def _transcript(self, intent: Intent, items: Sequence[Mapping[str, Any]]) -> Transcript:
        """Return the history of a recorded request; one that only grew shares its messages with the one it grew from."""
        first = items[0] if items else {"type": ""}
        source: Address = (str(first.get("path", intent.path)), int(first.get("seq", -2)))
        base = self._built.get(source) if first["type"] == "slice" else None
        grew = base is not None and (first["start"], first["stop"]) == (0, len(base))
        if base is not None and grew and all(item["type"] != "slice" for item in items[1:]):
            made = base.extend([restored(m) for m in items[1:]])
        else:
            known = self._messages_if_built(intent, items)
            made = Transcript([restored(m) for m in self.messages(intent)] if known is None else known)
        while len(self._built) >= KEPT_TRANSCRIPTS:
            del self._built[next(iter(self._built))]
        self._built[intent.path, intent.seq] = made
        return made

    def _messages_if_built(self, intent: Intent, items: Sequence[Mapping[str, Any]]) -> list[Message] | None:
        """
        Return the messages of a request that shares with others which are built; ``None`` when one of them is not, or is shorter.

        A history that is cut at every step leads through all requests before it, one into the other.
        """
        found: list[Message] = []
        for item in items:
            if item["type"] != "slice":
                found.append(restored(item))
                continue
            source: Address = (str(item.get("path", intent.path)), int(item["seq"]))
            base, start, stop = self._built.get(source), item["start"], item["stop"]
            if base is None or stop > len(base) or len(found) + stop - start > MAX_MESSAGES:
                return None
            self._check_earlier(source, (intent.path, intent.seq))
            found += base[start:stop]
        return found

    def anew(self, redactor: Redactor) -> list[Record]:
        """
        Return the records as a process with the rules of *redactor* would make them.

        Blobs are left out: whoever stores the records makes those that it needs.

        Raises:
            JournalCorrupt: when one cannot be read.
        """
        return [self._made_anew(record, redactor) for record in self.records if not isinstance(record, Blob)]

    def _made_anew(self, record: Record, redactor: Redactor) -> Record:
        match record:
            case Intent():
                form: Any = self.form(record)
                if form["type"] == "model_call":
                    form = CallModel(record.seq, self.request(record), form["purpose"])
                return attrs.evolve(record, given=form, fp="", read_from=None)
            case Result():
                writes = [without_secret(write, redactor).form() for write in self.writes(record)]
                return attrs.evolve(
                    record, given=self.outcome(record), attempts=record.attempts, writes=writes, read_from=None
                )
            case Input():
                with self._reading(record):
                    return attrs.evolve(record, input=unpack_texts(record.input, self.blobs), line=None)
            case Head() | Blob():
                return attrs.evolve(record, line=None)

    def has_run(self, path: str) -> bool:
        """Return whether the effect that starts the run at *path* is recorded."""
        return parent_of(path) in self.intents

    def has_ended(self, path: str) -> bool:
        """Return whether a child, or a run around it, has a recorded end, so that nothing in it can go on."""
        while path:
            if self.end_of(path) is not None:
                return True
            path = parent_of(path)[0]
        return False

    def unread_messages(self) -> list[dict[str, Any]]:
        """Return the messages that were sent to runs and that none of them took or refused, in the order in which they came."""
        gone = {i.input["id"] for i in self.inputs if i.input.get("type") == "rejected_message"}
        for address, intent in self.intents.items():
            result = self.results.get(address) if intent.type == "receive" else None
            received = None if result is None else getattr(self.outcome(result), "value", None)
            if isinstance(received, Received):
                gone.add(received.id)
        found = [i for i in self.inputs if i.input.get("type") == "message" and i.input["topic"]]
        names = ("id", "topic", "value")
        return [{"path": i.path, **{n: i.input[n] for n in names}} for i in found if i.input["id"] not in gone]

    def unheard(self, path: str) -> list[str]:
        """Return what the run at *path* was told, by its parent or by letters, and did not take before the record ends."""
        if self._unheard is None:
            self._unheard = self._find_unheard()
        return self._unheard.get(path, [])

    def _find_unheard(self) -> dict[str, list[str]]:
        told: dict[str, list[str]] = {}
        for record in self.inputs:
            said = record.input
            is_input = said.get("type") == "mailbox_message" and said["kind"] == "input"
            if is_input or (said.get("type") == "message" and not said["topic"]):
                told.setdefault(record.path, []).append(str(said["value"]))
        for (path, _), result in self.results.items() if told else ():
            waiting = told.get(path)
            # What a handle was given to say stands in no input: each text is told as often as it was not taken.
            for message in self.outcome(result).inputs if waiting else ():
                with contextlib.suppress(ValueError):
                    waiting.remove(message.text)  # type: ignore[union-attr]
        return told

    def kept_ids(self) -> set[str]:
        """Return the ids of the messages and letters that the record has."""
        kinds = ("message", "rejected_message", "mailbox_message")
        return {str(i.input["id"]) for i in self.inputs if i.input.get("type") in kinds}

    def waits(self) -> list[Waits]:
        """Return what the run, whose process has ended, waits for: questions without an answer first."""
        asks = [
            Waits(kind="question", path=path, seq=seq, question=question)
            for (path, seq), question in self.open_questions().values()
        ]
        return [*asks, *[self._wait_of(a, i) for a, i in self.open.items() if self._only_waits(a, i)]]

    def _only_waits(self, address: Address, intent: Intent) -> bool:
        return intent.type in WAITING and not self.is_complete and not self.has_ended(address[0])

    def _wait_of(self, address: Address, intent: Intent) -> Waits:
        if self._wakes is None:
            known = [i for i in self.inputs if i.input.get("type") == "wake_time"]
            self._wakes = {(i.path, i.seq): int(i.input["until"]) for i in known}
        form, until, head = self.form(intent), self._wakes.get(address), self.head
        wakes_at = None
        if until is not None and head is not None:
            with contextlib.suppress(OverflowError):
                wakes_at = created_of(head) + timedelta(milliseconds=until)
        at: dict[str, Any] = {"path": address[0], "seq": address[1], "kind": WAITING[intent.type], "wakes_at": wakes_at}
        if intent.type == "receive":
            return Waits(**at, topic=str(form.get("topic", "")))
        if intent.type == "wait":
            return Waits(**at, children=tuple(map(str, form.get("children", ()))))
        return Waits(**at)

    def open_questions(self) -> dict[str, tuple[Address, Question]]:
        """Return the questions that have no answer yet, by id, each with the address of its effect."""
        found: dict[str, tuple[Address, Question]] = {}
        asked = [(a, i) for a, i in self.open.items() if i.type == "ask" and not self.has_ended(a[0])]
        # A long run may have been told much; where nobody is asked, none of it is looked at.
        answered = {i.input["question_id"] for i in self.inputs if i.input.get("type") == "answer"} if asked else ()
        for address, intent in asked:
            for question in questions_of(self.form(intent)):
                if question.id not in answered:
                    found[question.id] = (address, question)
        return found


def _check_ref(intent: Intent, ref: ChildRef) -> None:
    path = child_path(intent.path, intent.seq)
    if ref.path != path:
        msg = f"the child that is started there is at {path!r}, not at {ref.path[:80]!r}"
        raise ValueError(msg)


def _view_of(root: Mapping[str, Any]) -> list[Mapping[str, object]]:
    state = root.get("previous") or {}
    transcript = state.get("view") or state.get("message_history") or {"messages": []}
    messages: list[Mapping[str, object]] = transcript["messages"]
    return messages


STABLE_CREATED = datetime(2026, 1, 1, tzinfo=UTC)


@frozen(kw_only=True)
class Opening:
    """
    What an engine needs to start a recorded run again.

    Attributes:
        agent_id: The root's agent.
        prompt: Its prompt.
        params: Its params as JSON; ``None`` for none.
        previous: The state that it continued; ``None`` for none.
        info: What the caller said of it.
        limits: The limits that the caller gave; ``None`` for none.
        run_id: The run's id, which stays the same for ever.
    """

    agent_id: str
    prompt: str = ""
    params: JsonValue = None
    previous: AgentState | None = None
    info: RunInfo = RunInfo()
    limits: Limits | None = None
    run_id: str = ""


@cache
def engine_version() -> str:
    """Return the version of stepengine; ``"0"`` where it is not installed."""
    return installed_version("stepengine") or "0"


def new_head(plan: RunPlan, seed: str, *, link: bool, signed: str = "", workspace: str = "") -> Head:
    """Return the head of a new journal."""
    definition: AgentDefinition = plan.definition
    # What the machine itself does by a tool's name has no code of the agent's that could have changed.
    own = [plan.tools[name] for name in plan.offered if name in plan.tools]
    specs = [binding.spec for binding in own if not isinstance(binding.runs, Control)]
    return Head(
        engine=engine_version(),
        agent=plan.published or definition.id,
        definition=definition_fingerprint(definition, specs),
        run=plan.run_id,
        seed=seed,
        created=_text(plan.created),
        hooks=_hooks_of(plan),
        packages=plan.packages,
        link=link,
        signed=signed,
        workspace=workspace,
    )


def _hooks_of(plan: RunPlan) -> tuple[str, ...]:
    return tuple([name_of(h) for point in attrs.astuple(plan.hooks, recurse=False) for h in point])


def changes_since(head: Head, plan: RunPlan, name: str) -> list[str]:
    """Return what is not as it was when *head* was written; only effects decide whether that matters."""
    changes: list[str] = []
    if head.engine != engine_version():
        changes.append(f"{name} was recorded by stepengine {head.engine}; this is {engine_version()}")
    hooks = _hooks_of(plan)
    if tuple(head.hooks) != hooks:
        was, now = ", ".join(head.hooks) or "none", ", ".join(hooks) or "none"
        changes.append(f"{name} was recorded with other hooks; then: {was}; now: {now}")
    return [*changes, *other_packages(head, plan.packages, name)]


def other_packages(head: Head, packages: Mapping[str, str], name: str) -> Iterator[str]:
    """Say which agents of packages now have another version, or none; *packages* are the present ones."""
    for agent, was in sorted(head.packages.items()):
        now = packages.get(agent)
        if now != was:
            yield f"{name} was recorded with {agent} of {was}; {f'installed is {now}' if now else 'now it is of no package'}"


def _text(when: datetime) -> str:
    return when.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def created_of(head: Head) -> datetime:
    """
    Return when the recorded root run was created.

    Raises:
        JournalCorrupt: when that is not a time.
    """
    try:
        return datetime.fromisoformat(head.created)
    except ValueError as error:
        msg = f"the head says that the run was created at {head.created!r}, which is not a time"
        raise JournalCorrupt(msg) from error


def root_form(
    plan: RunPlan, state: AgentState, limits: Limits | None, model: str | None, models: ChosenModels
) -> dict[str, Any]:
    """
    Return the stored form of the Spawn that starts a root run.

    Args:
        plan: Its plan.
        state: Its state.
        limits: The limits that the caller gave.
        model: A model that the agent itself does not name.
        models: Models in place of those that agents name.
    """
    form: dict[str, object] = {"type": "agent_call", "agent_id": plan.definition.id, "prompt": plan.prompt}
    form |= {"params": plan.params_json, "run_id": plan.run_id}
    if state.message_history or state.context or state.next_call != 1 or state.left_out:
        form["previous"] = bare(attrs.evolve(state, system_prompt="", tool_definitions=JsonDict(), steps_remaining=0))
    form |= {name: value for name, value in attrs.asdict(plan.info, recurse=False).items() if value}
    form |= {"model": model} if model is not None else {}
    form |= {name: dict(chosen) for name, chosen in zip(("models", "run_models"), models, strict=True) if chosen}
    return form | ({"limits": bare(limits)} if limits is not None else {})


def opening_of(history: History) -> Opening:
    """Return what a recorded run was started with."""
    form, head = history.root, history.head
    previous, limits = form.get("previous"), form.get("limits")
    return Opening(
        # Of an agent of a package the head names the publisher, which tells it from another one of its name.
        agent_id=form["agent_id"] if head is None or "/" not in head.agent else head.agent,
        prompt=form["prompt"],
        params=form["params"],
        previous=None if previous is None else restored(previous),
        info=RunInfo(form.get("session_id"), form.get("user_id"), form.get("metadata", {})),
        limits=None if limits is None else restored(limits),
        run_id=form["run_id"],
    )


def stop_of(status: RunStatus, error: BaseException | None) -> Stop | None:
    """Return what stopped a run from outside, or ``None`` for one that ended by itself."""
    if status is RunStatus.SUSPENDED:
        return Stop("suspended")
    if status is RunStatus.CANCELLED or (error is not None and not isinstance(error, Exception)):
        return Stop("cancelled", error=error if isinstance(error, AgentError) else None)
    # Time is the one limit that comes from outside and at no recorded place; all the others are spent by effects, and a
    # replay comes to them by itself.
    if isinstance(error, LimitExceeded) and error.kind == "seconds":
        return Stop("limit", error=error)
    return None
