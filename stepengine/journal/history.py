"""
What a journal says: its records by address, checked for structure, requests put together again, its opening.

The opening is what the run was started with: the head, and the Spawn of the root at ``("", -1)``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import cache
from typing import Any, Literal, NamedTuple, cast

import attrs

from stepengine.data.definition import AgentDefinition
from stepengine.data.effects import CallModel
from stepengine.data.json import JsonDict, JsonValue
from stepengine.data.limits import Limits
from stepengine.data.models import ModelRequest
from stepengine.data.outcomes import Begun, Failure, Value
from stepengine.data.questions import Question
from stepengine.data.state import AgentState, ChildResult, RunInfo, RunStatus
from stepengine.data.tools import Control, ToolSpec
from stepengine.data.transcript import Transcript
from stepengine.data.usage import add_cost
from stepengine.errors import DataError, JournalCorrupt, JournalError, JournalMissing, StepEngineError
from stepengine.journal.encoding import (
    bare,
    name_of,
    outcome_of,
    questions_of,
    request_members,
    restored,
    unpacked,
    without_secret,
)
from stepengine.journal.fingerprints import definition_fingerprint
from stepengine.journal.records import (
    EFFECTS,
    ROOT,
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
from stepengine.system.writes import FileWrite

__all__ = (
    "STABLE_CREATED",
    "History",
    "Opening",
    "changes_since",
    "created_of",
    "new_head",
    "opening_of",
    "parent_of",
    "root_form",
)

KEPT_TRANSCRIPTS = 64
MAX_MESSAGES = 1_000_000


class _Part(NamedTuple):
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
        inputs: Inputs in order.
        prompts: System prompts that were computed, by path.
        windows: Context lengths of models in tokens, by path.
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
        self.inputs: list[Input] = []
        self.prompts: dict[str, str] = {}
        self.windows: dict[str, int] = {}
        self.kept: set[tuple[Address, str]] = set()
        self.begun: dict[Address, Begun] = {}
        self.waiting: set[Address] = set()
        self.blobs: dict[str, Any] = {}
        self.last_at = 0
        self._built: dict[Address, Transcript] = {}
        self._next: dict[str, int] = {}
        self._order: dict[Address, int] = {}
        # Intents whose stored form was looked at and found sound.
        self._sound: set[Address] = set()
        self._tools: dict[str, set[str]] | None = None
        self._about: dict[tuple[str, str, str | None], list[Intent]] | None = None
        self._take_all(self.records)

    def grow(self, records: Sequence[Record]) -> None:
        """Take in records that were written after those that are known; raises as the class."""
        self._tools, self._about, self._order = None, None, {}
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
    def stop(self) -> Input | None:
        """What stopped the run from outside, if that is the last thing recorded: whatever follows a stop went on after it."""
        last = self.records[-1] if self.records else None
        return last if type(last) is Input and last.input.get("type") == "Stop" else None

    @property
    def root(self) -> Mapping[str, Any]:
        """What the root run was started with: the effect of its intent."""
        intent = self.intents.get(ROOT)
        if intent is None:
            raise self._missing()
        return self.form(intent)

    def _take(self, record: Record) -> str:
        """Take a record in; return what is wrong with it, if anything."""
        if (self.head is None) != (type(record) is Head):
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
                if parent_of(record.path) not in self.intents:
                    return f"there is no run at path {record.path!r}"
                self._take_input(record)
            case Blob():
                self.blobs[record.fp] = record.data
        return ""

    def left_cut(self, path: str, seq: int) -> bool:
        """
        Return whether the run at *path* took a reply that was cut, that of its effect *seq*, as it was.

        Runs did so before texts that were cut were continued, and it cannot be seen in a run that stopped right there.
        """
        after = self.intents.get((path, seq + 1))
        if after is None:
            result = self.results.get(parent_of(path))
            value = None if result is None else getattr(self.outcome(result), "value", None)
            return isinstance(value, ChildResult) and value.status is RunStatus.TRUNCATED
        if after.type != "CallModel":
            return True
        tail = self.form(after)["request"].get("tail") or ()
        return not any(message["type"] == "AssistantMessage" for message in tail)

    def named_output(self, path: str) -> bool:
        """Return whether only the type's name is recorded of the output of the run at *path*, as was once done for what is no JSON."""
        result = self.results.get(parent_of(path))
        value = None if result is None else getattr(self.outcome(result), "value", None)
        output = value.output if isinstance(value, ChildResult) else None
        return isinstance(output, Mapping) and output.keys() == {"type", "name"} and output["type"] == "object"

    def _take_input(self, record: Input) -> None:
        if record.line is not None:
            with self._reading(record):
                record = attrs.evolve(record, input=unpacked(record.input, self.blobs))
                check_input(record.input)
        self.inputs.append(record)
        self.last_at = max(self.last_at, record.at)
        if record.input.get("type") == "SystemPrompt":
            self.prompts[record.path] = record.input["text"]
        elif record.input.get("type") == "ContextWindow":
            self.windows[record.path] = record.input["tokens"]
        elif record.input.get("type") == "Kept":
            self.kept.add(((record.path, record.seq), record.input["fp"]))
        elif record.input.get("type") == "Gap":
            self._next[record.path] = record.seq
        elif record.input.get("type") == "Begun":
            self._take_begun((record.path, record.seq), begun_of(record.input))
        elif record.input.get("type") == "Waits":
            self.waiting.add((record.path, record.seq))

    def _take_begun(self, address: Address, more: Begun) -> None:
        """Add what a model call had used when it was stopped, which may happen once in each process that made it."""
        known = self.begun.get(address)
        if known is not None:
            more = Begun(known.usage + more.usage, add_cost(known.cost, more.cost))
        self.begun[address] = more

    def _take_intent(self, record: Intent) -> str:
        path, seq, kind = record.path, record.seq, record.type
        if kind not in EFFECTS:
            return f"{kind[:80]!r} is no effect"
        if (path, seq) == ROOT:
            problem = "the root run starts twice" if self.intents else ""
        else:
            problem = self._out_of_place(record)
        self._next[path] = seq + 1
        self.intents[path, seq] = record
        return problem

    def _out_of_place(self, record: Intent) -> str:
        """Return why an effect cannot have begun here, if it cannot."""
        path, seq = record.path, record.seq
        if ROOT in self.results:
            return "the root run has ended before it"
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

    def _take_result(self, record: Result) -> str:
        address = (record.path, record.seq)
        if address not in self.intents:
            return f"there is no intent {shown_address(*address)}"
        if address in self.results:
            return f"{shown_address(*address)} has two results"
        self.results[address] = record
        self.last_at = max(self.last_at, record.at)
        return ""

    # --- values -------------------------------------------------------------------------------------------------------

    def form(self, intent: Intent) -> Mapping[str, Any]:
        """Return the stored form of an effect with its blobs put in; a request's slices stay slices."""
        effect = intent.effect
        if type(effect) is CallModel:
            request = request_members(effect.request, [bare(m) for m in effect.request.messages], whole=True)
            return {"type": "CallModel", "purpose": effect.purpose, "request": request}
        if not intent.is_stored:
            return cast("Mapping[str, Any]", effect)
        address = (intent.path, intent.seq)
        with self._reading(intent):
            form: Mapping[str, object] = unpacked(effect, self.blobs)
            if address not in self._sound:
                check_effect(form, is_start=address == ROOT)
                self._sound.add(address)
        return form

    @contextlib.contextmanager
    def _reading(self, record: Record) -> Iterator[None]:
        """Call the record damaged when what stands in it cannot be read."""
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
            made = outcome_of(self._filled(result))
            intent = self.intents[result.path, result.seq]
            asked = len(self.form(intent)["questions"]) if intent.type == "Ask" else 0
            check_outcome(intent.type, made, asked)
        except JournalError:
            raise
        except (StepEngineError, *UNREADABLE) as error:
            raise self._corrupt(result, error) from error
        return made

    def _filled(self, result: Result) -> Mapping[str, object]:
        source = result.read_from
        if source is None or isinstance(source, Mapping):
            return cast("Mapping[str, Any]", unpacked(source, self.blobs))
        return source.filled(result.start, result.end, self.blobs)

    def writes(self, result: Result) -> list[FileWrite]:
        """
        Return what is needed to undo the writes of a tool call, in order.

        Raises:
            JournalCorrupt: when that cannot be read, or a blob of it is missing.
        """
        with self._reading(result):
            forms = list(result.writes) if result.given is not None else unpacked(list(result.writes), self.blobs)
            return [FileWrite.of_form(form) for form in forms]

    def tools_of(self, path: str) -> frozenset[str]:
        """Return the names of the tools that the run at *path* called."""
        if self._tools is None:
            self._tools = {}
            for intent in self.intents.values():
                if intent.type == "CallTool":
                    named = intent.subject
                    name = named if isinstance(named, str) else self.form(intent)["tool_name"]
                    self._tools.setdefault(intent.path, set()).add(name)
        return frozenset(self._tools.get(path, ()))

    def about_call(self, kind: Literal["CallTool", "Ask"], path: str, tool_call_id: str | None) -> Sequence[Intent]:
        """
        Return the effects of a kind that are about one tool call of the run at *path*, in order.

        No run has two calls with one id; a journal that somebody else wrote may.
        """
        if self._about is None:
            self._about = {}
            for intent in self.intents.values():
                if intent.type in ("CallTool", "Ask"):
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
        waiting: list[Mapping[str, object] | _Part] = [_Part((intent.path, intent.seq))]
        while waiting:
            entry = waiting.pop()
            if isinstance(entry, _Part):
                opened += 1
                if opened + len(found) > MAX_MESSAGES:
                    msg = f"its request is put together of more than {MAX_MESSAGES} messages"
                    raise self._corrupt(intent, DataError(msg))
                waiting.extend(self._opened(entry))
            else:
                found.append(entry)
        found.reverse()
        return found

    def _opened(self, part: _Part) -> Iterator[Mapping[str, Any] | _Part]:
        """Give what a part of a request is made of: messages, and parts of earlier requests."""
        position = 0
        for item in self._items(part.address):
            sliced = item["type"] == "Slice"
            end = position + (item["stop"] - item["start"] if sliced else 1)
            first, last = max(part.start, position), end if part.stop is None else min(part.stop, end)
            if first < last:
                offset = item["start"] - position if sliced else 0
                source = (item.get("path", part.address[0]), item["seq"]) if sliced else part.address
                if sliced:
                    self._check_earlier(source, part.address)
                yield _Part(source, first + offset, last + offset) if sliced else item
            position = end
        if part.stop is not None and position < part.stop:
            msg = f"a later request shares {part.stop} messages with it, and it has {position}"
            raise self._corrupt(self.intents[part.address], DataError(msg))

    def _check_earlier(self, source: Address, address: Address) -> None:
        """Raise unless a request shares messages with one that came before it: else putting it together would not end."""
        if not self._order:
            self._order = {known: number for number, known in enumerate(self.intents)}
        known = self.intents.get(source)
        if (
            known is None
            or not (source == ROOT or known.type == "CallModel")
            or self._order[source] >= self._order[address]
        ):
            msg = f"it shares messages with {shown_address(*source)}, which is no earlier request"
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
        base = self._built.get(source) if first["type"] == "Slice" else None
        grew = base is not None and (first["start"], first["stop"]) == (0, len(base))
        if base is not None and grew and all(item["type"] != "Slice" for item in items[1:]):
            made = base.extend([restored(m) for m in items[1:]])
        else:
            made = Transcript([restored(m) for m in self.messages(intent)])
        while len(self._built) >= KEPT_TRANSCRIPTS:
            del self._built[next(iter(self._built))]
        self._built[intent.path, intent.seq] = made
        return made

    def anew(self, redactor: Redactor) -> list[Record]:
        """
        Return the records as a process with the rules of *redactor* would make them.

        Blobs are left out: whoever stores the records makes those that it needs.

        Raises:
            JournalCorrupt: when one cannot be read.
        """
        return [self._made_anew(record, redactor) for record in self.records if type(record) is not Blob]

    def _made_anew(self, record: Record, redactor: Redactor) -> Record:
        match record:
            case Intent():
                form: Any = self.form(record)
                if form["type"] == "CallModel":
                    form = CallModel(record.seq, self.request(record), form["purpose"])
                return attrs.evolve(record, given=form, fp="", read_from=None)
            case Result():
                writes = [without_secret(write, redactor).form() for write in self.writes(record)]
                return attrs.evolve(
                    record, given=self.outcome(record), attempts=record.attempts, writes=writes, read_from=None
                )
            case Input():
                with self._reading(record):
                    return attrs.evolve(record, input=unpacked(record.input, self.blobs), line=None)
            case _:
                return attrs.evolve(record, line=None)

    def open_questions(self) -> dict[str, tuple[Address, Question]]:
        """Return the questions that have no answer yet, by id, each with the address of its effect."""
        answered = {i.input["question_id"] for i in self.inputs if i.input.get("type") == "Answered"}
        found: dict[str, tuple[Address, Question]] = {}
        for address, intent in self.intents.items():
            if address in self.results or intent.type != "Ask":
                continue
            for question in questions_of(self.form(intent)):
                if question.id not in answered:
                    found[question.id] = (address, question)
        return found


def _view_of(root: Mapping[str, Any]) -> list[Mapping[str, object]]:
    state = root.get("previous") or {}
    transcript = state.get("view") or state.get("message_history") or {"messages": []}
    messages: list[Mapping[str, object]] = transcript["messages"]
    return messages


STABLE_CREATED = datetime(2026, 1, 1, tzinfo=UTC)


@attrs.frozen(kw_only=True)
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
def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("stepengine")
    except PackageNotFoundError:
        return "0"


def new_head(plan: RunPlan, seed: str, *, link: bool) -> Head:
    """Return the head of a new journal."""
    definition: AgentDefinition = plan.definition
    # What the machine itself does by a tool's name has no code of the agent's that could have changed.
    own = [plan.tools[name] for name in plan.offered if name in plan.tools]
    specs = [binding.spec for binding in own if type(binding.runs) is not Control]
    return Head(
        engine=_version(),
        agent=definition.id,
        definition=definition_fingerprint(definition, specs),
        run=plan.run_id,
        seed=seed,
        created=_text(plan.created),
        hooks=_hooks_of(plan),
        link=link,
    )


def _hooks_of(plan: RunPlan) -> tuple[str, ...]:
    return tuple([name_of(h) for point in attrs.astuple(plan.hooks, recurse=False) for h in point])


def changes_since(head: Head, plan: RunPlan, name: str) -> list[str]:
    """Return what is not as it was when *head* was written; only effects decide whether that matters."""
    changes: list[str] = []
    if head.engine != _version():
        changes.append(f"{name} was recorded by stepengine {head.engine}; this is {_version()}")
    hooks = _hooks_of(plan)
    if tuple(head.hooks) != hooks:
        was, now = ", ".join(head.hooks) or "none", ", ".join(hooks) or "none"
        changes.append(f"{name} was recorded with other hooks; then: {was}; now: {now}")
    return changes


def _text(when: datetime) -> str:
    return when.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def created_of(head: Head) -> datetime:
    """
    Return when the recorded root run was created.

    Raises:
        JournalCorrupt: when that is no time.
    """
    try:
        return datetime.fromisoformat(head.created)
    except ValueError as error:
        msg = f"the head says that the run was created at {head.created!r}, which is no time"
        raise JournalCorrupt(msg) from error


def root_form(
    plan: RunPlan, state: AgentState, limits: Limits | None, model: str | None, models: Mapping[str, str]
) -> dict[str, Any]:
    """
    Return the stored form of the Spawn that starts a root run.

    Args:
        plan: Its plan.
        state: Its state.
        limits: The limits that the caller gave.
        model: A model that the agent itself does not name.
        models: Models that were chosen in place of those that agents name, by agent id.
    """
    form: dict[str, object] = {"type": "Spawn", "agent_id": plan.definition.id, "prompt": plan.prompt}
    form |= {"params": plan.params_json, "run_id": plan.run_id}
    if state.message_history or state.context or state.next_call != 1:
        form["previous"] = bare(attrs.evolve(state, system_prompt="", tool_definitions=JsonDict(), steps_remaining=0))
    form |= {name: value for name, value in attrs.asdict(plan.info, recurse=False).items() if value}
    form |= {"model": model} if model is not None else {}
    form |= {"models": dict(models)} if models else {}
    return form | ({"limits": bare(limits)} if limits is not None else {})


def opening_of(history: History) -> Opening:
    """Return what a recorded run was started with."""
    form = history.root
    previous, limits = form.get("previous"), form.get("limits")
    return Opening(
        agent_id=form["agent_id"],
        prompt=form["prompt"],
        params=form["params"],
        previous=None if previous is None else restored(previous),
        info=RunInfo(form.get("session_id"), form.get("user_id"), form.get("metadata", {})),
        limits=None if limits is None else restored(limits),
        run_id=form["run_id"],
    )
