"""
``History``: the records of a journal by address, in valid order, decoded on demand; and the opening of its run.

The opening is the head, and the Spawn of the root at ``("", -1)``. ``RecordedTree`` finds the runs of the records, ``RecordedFacts`` has
the facts in the inputs, and ``RecordBlobs`` the long texts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from functools import cache
from typing import Any, TypeAlias, assert_never, cast

import attrs
from attrs import frozen

from stepengine.data.definition import AgentDefinition
from stepengine.data.effects import KINDS, CallModel
from stepengine.data.faults import SHOWN_CHARS
from stepengine.data.json import JsonDict, JsonValue
from stepengine.data.limits import MAX_LEVELS, Limits
from stepengine.data.outcomes import Failure, Stop, Value
from stepengine.data.state import AgentState, RunInfo, RunStatus
from stepengine.data.tools import Control
from stepengine.data.waits import Awaited, ChildRef
from stepengine.errors import (
    AgentError,
    JournalCorrupt,
    JournalError,
    JournalMissing,
    LimitExceeded,
    StepEngineError,
)
from stepengine.journal.encoding import (
    decode_outcome,
    decode_stored,
    decode_with_blobs,
    encode_request_members,
    encode_stored,
    get_name_without_module,
)
from stepengine.journal.fingerprints import definition_fingerprint
from stepengine.journal.record_blobs import RecordBlobs
from stepengine.journal.recorded_facts import RecordedFacts
from stepengine.journal.recorded_tree import RecordedTree
from stepengine.journal.records import (
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
    check_effect,
    check_input,
    check_outcome,
    check_same_address,
    format_address,
    get_starter_address,
)
from stepengine.machine.plan import RunPlan
from stepengine.runtime.performer import child_path
from stepengine.workspace.installed import get_installed_version
from stepengine.workspace.writes import FileWrite

ChosenModels: TypeAlias = tuple[Mapping[str, str], Mapping[str, str]]
"""The models in place of those that agents name, by agent id: the engine's, and those of one run alone."""


class History:
    """
    The records of one journal.

    Args:
        records: All records, in order.
        name: The journal's name, for errors.
        missing: Makes the error for a journal without a run.

    Attributes:
        head: The head; ``None`` for an empty journal.
        records: All records, in order.
        intents: Intents by address.
        results: Results by address.
        open: Intents without a result, by address, in order; few even in a long journal.
        inputs: Inputs, in order.
        facts: The facts about runs and effects in the inputs.
        tree: The runs of the record.
        blobs: The long texts that other records refer to.
        last_at: The latest time in milliseconds since the root run was created.

    Raises:
        JournalCorrupt: when one run cannot have written these records in this order.
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
        self.facts = RecordedFacts(self.open, self.results)
        self.tree = RecordedTree(self.intents, self.results, self.outcome)
        self.blobs = RecordBlobs(self.records)
        self.last_at = 0
        self._next: dict[str, int] = {}
        # Intents whose stored form was looked at and found sound.
        self._sound: set[Address] = set()
        self._append_records(self.records)

    def grow(self, records: Sequence[Record]) -> None:
        """Append records written after the known ones; raise ``JournalCorrupt`` for invalid ones."""
        # A new one, since the tree stores look-ups, which hold for the earlier records only.
        self.tree = RecordedTree(self.intents, self.results, self.outcome)
        first = len(self.records) + 1
        self.records += records
        self._append_records(records, first)

    def _append_records(self, records: Sequence[Record], first: int = 1) -> None:
        """Append records; raise for one that does not fit those before it. *first* is the number of the first one."""
        for number, record in enumerate(records, first):
            problem = self._append_record_or_find_problem(record)
            if problem:
                where = f"record {number} of {self.name}"
                msg = f"{where} does not fit the records before it: {problem}; a record is missing, repeated or moved"
                raise JournalCorrupt(msg)

    @property
    def is_complete(self) -> bool:
        """Whether the root run has ended; a suspended or interrupted one has not."""
        return ROOT in self.results

    @property
    def duration_ms(self) -> int:
        """The milliseconds from the start of the run, or of the fork, to its last record."""
        return self.compute_time_since_start(self.last_at)

    @property
    def started(self) -> str:
        """The start time of the run or fork, RFC 3339 in UTC; ``""`` without a head."""
        head = self.head
        if head is None or not head.since:
            return "" if head is None else head.created
        return _format_utc_time(parse_created(head) + timedelta(milliseconds=head.since))

    def compute_time_since_start(self, at: int) -> int:
        """Return a recorded time in milliseconds since the start of this run; 0 for records that a fork copied."""
        return max(0, at - (0 if self.head is None else self.head.since))

    @property
    def stop(self) -> Input | None:
        """The stop from outside, if it is the last record."""
        last = next(
            (r for r in reversed(self.records) if not isinstance(r, Input) or r.input.get("type") != SIGNED), None
        )
        return last if isinstance(last, Input) and last.input.get("type") == "stop" else None

    @property
    def root(self) -> Mapping[str, Any]:
        """The stored effect that started the root run."""
        intent = self.intents.get(ROOT)
        if intent is None:
            raise self._missing()
        return self.form(intent)

    def _append_record_or_find_problem(self, record: Record) -> str:
        """Append a record and return ``""``, or return why the record is invalid here. After a problem the history is unusable."""
        if (self.head is None) != (isinstance(record, Head)):
            return "the head must be the first record, and no other record may be a head"
        # Of these two there are most; a `match` would ask of each what it is not.
        if isinstance(record, Intent):
            return self._append_intent_and_find_problem(record)
        if isinstance(record, Result):
            return self._append_result_or_find_problem(record)
        match record:
            case Head():
                self.head = record
            case Input():
                if not self.tree.has_run(record.path):
                    return f"there is no run at path {record.path!r}"
                self._append_external_input(record)
            case Blob():
                self.blobs.values[record.fp] = record.data
            case _ as never:
                assert_never(never)
        return ""

    def _append_external_input(self, record: Input) -> None:
        """Append an external input, such as an answer or a stop, with its blobs filled in, and store its fact; raise if it is invalid."""
        if record.line is not None:
            with self.convert_damage_errors(record):
                record = attrs.evolve(record, input=self.get_filled_input(record))
                check_input(record.input)
        self.inputs.append(record)
        self.last_at = max(self.last_at, record.at)
        if record.input.get("type") == "gap":
            self._next[record.path] = record.seq
        self.facts.add(record)

    def _append_intent_and_find_problem(self, record: Intent) -> str:
        """Append an intent, also at an invalid position; return why its type or position is invalid, or ``""``."""
        path, seq, kind = record.path, record.seq, record.type
        if kind not in KINDS:
            return f"{kind[:SHOWN_CHARS]!r} is not an effect"
        if (path, seq) == ROOT:
            problem = "the root run starts twice" if self.intents else ""
        else:
            problem = self._find_order_problem(record)
        self._next[path] = seq + 1
        self.intents[path, seq] = self.open[path, seq] = record
        return problem

    def _find_order_problem(self, record: Intent) -> str:
        """Return the reason why an effect cannot start at this point, or ``""``."""
        path, seq = record.path, record.seq
        if ROOT in self.results:
            return "the root run has ended before it"
        # Numbers follow each other without repetition (replay:J41): a line that is missing, doubled or moved would
        # otherwise give every effect behind it the result of its neighbour, in a journal whose checksums may all be
        # right.
        expected = self._next.get(path)
        if expected is None:
            expected = 0
            if path.count(".") >= MAX_LEVELS:
                return f"runs are nested deeper than {MAX_LEVELS} levels, more than any run"
            if get_starter_address(path) not in self.intents:
                return f"nothing started a run at path {path!r}"
        if seq != expected:
            return f"the next effect of path {path!r} is {format_address(path, expected)}, not #{seq}"
        before = self.intents.get((path, seq - 1)) if seq else None
        if before is None:
            return ""
        # Else each effect could name another group, whose effects would be looked at again for each.
        if record.gather not in {None, seq, before.gather}:
            return f"it started together with #{record.gather}, and the effect before it did not"
        first = seq - 1 if before.gather is None else before.gather
        is_same_group = record.gather is not None and record.gather == before.gather
        may_start = is_same_group or all((path, number) in self.results for number in range(first, seq))
        return "" if may_start else f"{format_address(path, seq - 1)} before it has no result"

    def _append_result_or_find_problem(self, record: Result) -> str:
        """Append a valid result and return ``""``; else return why the result is invalid here."""
        address = (record.path, record.seq)
        if address not in self.intents and not (record.seq == -1 and self.tree.is_background(record.path)):
            return f"there is no intent {format_address(*address)}"
        if address in self.results:
            return f"{format_address(*address)} has two results"
        self.results[address] = record
        self.open.pop(address, None)
        self.last_at = max(self.last_at, record.at)
        return ""

    # --- values -------------------------------------------------------------------------------------------------------

    def form(self, intent: Intent) -> Mapping[str, Any]:
        """Return the stored form of an effect with its blobs filled in; slices of requests remain."""
        effect = intent.effect
        if isinstance(effect, CallModel):
            request = encode_request_members(
                effect.request, [encode_stored(m) for m in effect.request.messages], includes_prompt_and_tools=True
            )
            return {"type": "model_call", "purpose": effect.purpose, "request": request}
        if not intent.is_stored:
            return effect
        address = (intent.path, intent.seq)
        with self.convert_damage_errors(intent):
            form: Mapping[str, object] = decode_with_blobs(effect, self.blobs.get_counted_texts("intent", intent))
            # A checksum finds damage and no intent: whoever made the file may have put anything into it. So each form
            # is looked at before it is believed, once, and when it is first needed.
            if address not in self._sound:
                check_effect(form, is_start=address == ROOT)
                if form["type"] != intent.type:
                    msg = f"its effect is a {intent.type} at the start of its line, and a {form['type']} after that"
                    raise ValueError(msg)
                self._sound.add(address)
        return form

    @contextlib.contextmanager
    def convert_damage_errors(self, record: Record) -> Iterator[None]:
        """In the block, convert an error in reading the content of *record* to ``JournalCorrupt``."""
        try:
            yield
        except JournalError:
            raise
        except (StepEngineError, *UNREADABLE) as error:
            raise self.make_corrupt_error(record, error) from error

    def make_corrupt_error(self, record: Record, error: BaseException) -> JournalCorrupt:
        """Return the error for a record whose content cannot be read because of *error*."""
        number = next((n for n, known in enumerate(self.records, 1) if known is record), 0)
        why = error.message if isinstance(error, StepEngineError) else f"{type(error).__name__}: {error}"
        return JournalCorrupt(f"record {number} of {self.name} is not valid: {why}")

    def outcome(self, result: Result) -> Value | Failure:
        """
        Return the outcome in a result record.

        Raises:
            JournalCorrupt: when the current codec cannot decode the outcome, or a blob is missing.
        """
        known = result.outcome
        if known is not None:
            return known
        # Not kept: what of it is still needed stands in the state of the run.
        with self.convert_damage_errors(result):
            made = decode_outcome(self._read_filled_members(result))
            if result.seq == -1 and result.path:
                check_outcome("agent_call", made)
                return made
            intent = self.intents[result.path, result.seq]
            count = len(self.form(intent)["questions"]) if intent.type == "ask" else 0
            check_outcome("agent_start" if intent.is_background else intent.type, made, count)
            told = made.value if isinstance(made, Value) else None
            if isinstance(told, Awaited):
                self._check_reported_children(intent, told)
            elif isinstance(told, ChildRef):
                _check_child_path(intent, told)
        return made

    def _check_reported_children(self, intent: Intent, awaited: Awaited) -> None:
        """Raise ``ValueError`` unless a wait reports its own children, enough of them ended, and each ended one has a recorded end."""
        asked = self.form(intent)
        children = asked["children"]
        for path in awaited.done:
            if (path, -1) not in self.results:
                msg = f"it reports the end of the child at {path[:SHOWN_CHARS]!r}, which has not ended"
                raise ValueError(msg)
        need = 0 if "timeout" in asked else asked.get("need", len(children))
        if len(awaited.done) < need or sorted((*awaited.done, *awaited.open)) != sorted(children):
            msg = "it reports too few ended children, or children that the wait does not name"
            raise ValueError(msg)

    def _read_filled_members(self, result: Result) -> Mapping[str, object]:
        """Return the members of a result's line with its blobs filled in."""
        source, texts = result.read_from, self.blobs.get_counted_texts("result", result)
        if source is None or isinstance(source, Mapping):
            return cast("Mapping[str, Any]", decode_with_blobs(source, texts))
        members = source.read_filled_members(result.start, result.end, texts)
        check_same_address(result, members)
        return members

    def get_filled_input(self, record: Input) -> dict[str, Any]:
        """
        Return the content of an input with its blobs filled in.

        Raises:
            DataError: when the decoded size exceeds the reading limit.
            KeyError: when a blob is missing.
        """
        filled: dict[str, Any] = decode_with_blobs(record.input, self.blobs.get_counted_texts("input", record))
        return filled

    def writes(self, result: Result) -> list[FileWrite]:
        """
        Return the file writes of a tool call, in order, for undoing.

        Raises:
            JournalCorrupt: when the writes cannot be read, or a blob is missing.
        """
        with self.convert_damage_errors(result):
            return [FileWrite.from_json(form) for form in self.extras(result).get("writes", ())]

    def extras(self, result: Result) -> Mapping[str, Any]:
        """
        Return the members of a result besides its outcome, with long texts filled in.

        Raises:
            JournalCorrupt: when a blob is missing.
        """
        if result.given is not None or not result.extras:
            return result.extras
        with self.convert_damage_errors(result):
            return cast(
                "Mapping[str, Any]", decode_with_blobs(result.extras, self.blobs.get_counted_texts("extras", result))
            )

    def model(self, intent: Intent) -> str:
        """Return the name of the model of a recorded model call."""
        # The stored form as it is: putting blobs back in would cost more than the model is worth.
        with self.convert_damage_errors(intent):
            model = intent.subject
        return str(model if isinstance(model, str) else self.form(intent)["request"]["model"])


def _check_child_path(intent: Intent, ref: ChildRef) -> None:
    """Raise ``ValueError`` unless *ref* has the path of the child that *intent* starts."""
    path = child_path(intent.path, intent.seq)
    if ref.path != path:
        msg = f"the child that is started there is at {path!r}, not at {ref.path[:SHOWN_CHARS]!r}"
        raise ValueError(msg)


STABLE_CREATED = datetime(2026, 1, 1, tzinfo=UTC)


@frozen(kw_only=True)
class RecordedStart:
    """
    The data that an engine needs to start a recorded run again.

    Attributes:
        agent_id: The id of the root's agent.
        prompt: The prompt of the root run.
        params: The params as JSON, or ``None``.
        previous: The state that the run continued, or ``None``.
        info: The data about the run that the caller passed.
        limits: The limits that the caller passed, or ``None``.
        run_id: The run's id, which never changes.
    """

    agent_id: str
    prompt: str
    params: JsonValue
    previous: AgentState | None
    info: RunInfo
    limits: Limits | None
    run_id: str


@cache
def engine_version() -> str:
    """Return the version of stepengine, or ``"0"`` if it is not installed."""
    return get_installed_version("stepengine") or "0"


def make_head(plan: RunPlan, seed: str, *, link: bool, signed: str, workspace: str) -> Head:
    """Return the head of a new journal for the run of *plan*."""
    definition: AgentDefinition = plan.agent.definition
    # What the machine itself does by a tool's name has no code of the agent's that could have changed.
    own = [plan.tools[name] for name in plan.agent.offered if name in plan.tools]
    specs = [binding.spec for binding in own if not isinstance(binding.runs, Control)]
    return Head(
        engine=engine_version(),
        agent=plan.agent.package_id or definition.id,
        definition=definition_fingerprint(definition, specs),
        run=plan.run_id,
        seed=seed,
        created=_format_utc_time(plan.created),
        hooks=_list_hook_names(plan),
        packages=plan.agent.package_versions,
        link=link,
        signed=signed,
        workspace=workspace,
    )


def _list_hook_names(plan: RunPlan) -> tuple[str, ...]:
    """Return the names of all hooks of the agent of *plan*."""
    return tuple(
        [get_name_without_module(h) for point in attrs.astuple(plan.agent.hooks, recurse=False) for h in point]
    )


def describe_plan_changes(head: Head, plan: RunPlan, name: str) -> list[str]:
    """Return a sentence for each change of engine version, hooks or agent packages since *head* was recorded."""
    changes: list[str] = []
    if head.engine != engine_version():
        changes.append(f"{name} was recorded by stepengine {head.engine}; this is stepengine {engine_version()}")
    hooks = _list_hook_names(plan)
    if tuple(head.hooks) != hooks:
        was, now = ", ".join(head.hooks) or "none", ", ".join(hooks) or "none"
        changes.append(f"{name} was recorded with other hooks: {was}; the hooks are now: {now}")
    return [*changes, *describe_package_changes(head, plan.agent.package_versions, name)]


def describe_package_changes(head: Head, packages: Mapping[str, str], name: str) -> Iterator[str]:
    """Yield a sentence for each agent package with a changed or missing version; *packages* are the present ones."""
    for agent, was in sorted(head.packages.items()):
        now = packages.get(agent)
        if now != was:
            yield f"{name} was recorded with {agent} of {was}; {f'{now} is installed now' if now else 'now no package has it'}"


def _format_utc_time(when: datetime) -> str:
    return when.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def parse_created(head: Head) -> datetime:
    """
    Return the time at which the recorded root run was created.

    Raises:
        JournalCorrupt: when the head has no valid time.
    """
    try:
        return datetime.fromisoformat(head.created)
    except ValueError as error:
        msg = f"the head says that the run was created at {head.created!r}, which is not a time"
        raise JournalCorrupt(msg) from error


def encode_root_start(
    plan: RunPlan, state: AgentState, limits: Limits | None, model: str | None, models: ChosenModels
) -> dict[str, Any]:
    """
    Return the stored form of the Spawn that starts a root run.

    Args:
        plan: The plan of the root run.
        state: The state of the root run.
        limits: The limits that the caller passed.
        model: The model of the run, if the agent does not name one.
        models: Models that replace those of the agents.
    """
    form: dict[str, object] = {"type": "agent_call", "agent_id": plan.agent.definition.id, "prompt": plan.input.prompt}
    form |= {"params": plan.input.json, "run_id": plan.run_id}
    if state.message_history or state.context or state.next_call != 1 or state.left_out:
        form["previous"] = encode_stored(
            attrs.evolve(state, system_prompt="", tool_definitions=JsonDict(), steps_remaining=0)
        )
    form |= {name: value for name, value in attrs.asdict(plan.info, recurse=False).items() if value}
    form |= {"model": model} if model is not None else {}
    form |= {name: dict(chosen) for name, chosen in zip(("models", "run_models"), models, strict=True) if chosen}
    return form | ({"limits": encode_stored(limits)} if limits is not None else {})


def parse_recorded_start(history: History) -> RecordedStart:
    """Return the agent, prompt, state, limits and run id that a recorded run started with."""
    form, head = history.root, history.head
    previous, limits = form.get("previous"), form.get("limits")
    return RecordedStart(
        # Of an agent of a package the head names the publisher, which tells it from another one of its name.
        agent_id=form["agent_id"] if head is None or "/" not in head.agent else head.agent,
        prompt=form["prompt"],
        params=form["params"],
        previous=None if previous is None else decode_stored(previous),
        info=RunInfo(form.get("session_id"), form.get("user_id"), form.get("metadata", {})),
        limits=None if limits is None else decode_stored(limits),
        run_id=form["run_id"],
    )


def find_outside_stop(status: RunStatus, error: BaseException | None) -> Stop | None:
    """Return the stop from outside that ended a run, or ``None`` if the run was not stopped."""
    if status is RunStatus.SUSPENDED:
        return Stop("suspended")
    if status is RunStatus.CANCELLED or (error is not None and not isinstance(error, Exception)):
        return Stop("cancelled", error=error if isinstance(error, AgentError) else None)
    # Time is the one limit that comes from outside and at no recorded place; all the others are spent by effects, and a
    # replay comes to them by itself.
    if isinstance(error, LimitExceeded) and error.kind == "seconds":
        return Stop("limit", error=error)
    return None
