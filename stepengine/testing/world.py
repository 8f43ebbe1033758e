"""
The world of a simulated run: machines and trees of them, driven without an event loop, that die and go on.

When nothing goes wrong, replies, results and answers come from a seed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from random import Random
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, TypeAlias, TypeGuard, cast

import attrs
from attrs import frozen

from stepengine.data.definition import AgentDefinition
from stepengine.data.effects import (
    ROWS,
    RUNS,
    AskPerson,
    AwaitMessage,
    AwaitRuns,
    AwaitTime,
    CallBody,
    CallFunction,
    CallModel,
    CallTool,
    Compute,
    Effect,
    EndRuns,
    Gather,
    Leaf,
    Notify,
    RunInBackground,
    SendToRun,
    Spawn,
)
from stepengine.data.events import Event
from stepengine.data.json import freeze
from stepengine.data.messages import TextPart, ToolCallPart, ToolResult, UserMessage
from stepengine.data.models import ModelReply, ModelRequest
from stepengine.data.outcomes import Failure, Gathered, Outcome, Single, Stop, Value, was_given_up
from stepengine.data.questions import AnswerLike, to_answer
from stepengine.data.state import AgentState, ChildResult, RunStatus
from stepengine.data.tools import Yielding
from stepengine.data.usage import Usage
from stepengine.errors import ModelError, ReplayDivergence, StepEngineError, UnknownOutcome
from stepengine.journal.encoding import outcome_members
from stepengine.journal.journaled_run import JournaledRun
from stepengine.journal.run_end import finish_run
from stepengine.journal.run_start import start_run
from stepengine.journal.store import MemoryJournal
from stepengine.machine import Finished, run_agent
from stepengine.machine.plan import RunPlan
from stepengine.machine.run import Machine
from stepengine.machine.signals import belongs_to_caller
from stepengine.models.scripted import Failing
from stepengine.runtime.failfast import has_failed, make_race_loss_outcome
from stepengine.runtime.performer import Item, child_path, is_repeatable, run_compute
from stepengine.runtime.services import Services
from stepengine.testing.backstage import SimulatedChildren, SimulatedMailbox
from stepengine.testing.budgets import Budgets, ForwardingPerformer, run_without_waiting
from stepengine.testing.faults import Fault, ListedFaults, RandomFaults, apply_faults, find_faulty_outcome
from stepengine.testing.invariants import (
    Unwatched,
    Violation,
    WatchedRun,
    describe_effect,
    describe_outcome,
    expect_same_end,
    format_address,
    refuse,
)
from stepengine.testing.walk import is_same_yield
from stepengine.tools.context import RunResources
from stepengine.tools.definition import Tool

if TYPE_CHECKING:
    from stepengine.engine.catalog import Catalog

__tracebackhide__ = True  # a failed test ends at its author's line

Replies: TypeAlias = "Sequence[Any] | Callable[[ModelRequest, Random], Any] | None"
CALL_RATE = 0.6
MANY = 2
NAMING = ("agent_type", "agent_id")
"""Members of inputs that name an agent."""
TEXTS = ("x", "a.py", "some text")
PLAIN: Mapping[str, Callable[[Random], Any]] = {
    "integer": lambda random: random.randint(1, 9),
    "number": lambda _: 1.5,
    "boolean": lambda random: random.random() < 0.5,  # noqa: PLR2004
    "null": lambda _: None,
}
"""Values of the types that hold no others."""
LAST = "done"


def make_stand_in_tool(name: str) -> Tool:
    """Return a tool without a description that accepts every input."""
    return Tool(name, "", {}, lambda _: None)


@frozen
class GeneratedOutcomes:
    """
    The outcomes of a simulated world: scripted results, else random ones.

    Attributes:
        seed: What it depends on.
        replies: Replies of the model in order, then ``"done"``; a function of request and random source; or ``None`` for
            replies that are drawn: texts, and calls of the offered tools.
        results: By name of a tool or of the function of a ``Perform``: what it gives, or a function of the tool's input,
            or of the arguments of the ``Perform``.
        answers: By text of a question: the answer. Others get the first option, or ``"yes"``.
        agents: Ids of agents that a drawn call may name.
    """

    seed: int
    replies: Replies = None
    results: Mapping[str, Any] = attrs.field(factory=dict)
    answers: Mapping[str, AnswerLike] = attrs.field(factory=dict)
    agents: tuple[str, ...] = ()
    _asked: dict[tuple[str, int], int] = attrs.field(factory=dict, init=False)

    def outcome(self, path: str, effect: Leaf, at: int) -> Single:
        """Return the outcome of *effect*."""
        if isinstance(effect, CallModel):
            return self._draw_reply(path, effect, at)
        if isinstance(effect, CallTool):
            result = attrs.evolve(
                self._make_tool_result(effect), tool_name=effect.tool_name, tool_call_id=effect.tool_call_id
            )
            return Value(result, at)
        if isinstance(effect, CallFunction):
            return Value(freeze(self._make_function_result(effect)), at)
        if isinstance(effect, AskPerson):
            return Value(tuple([to_answer(self._answer(q), q) for q in effect.questions]), at)
        msg = f"a child is run, not answered: {effect!r}"
        raise TypeError(msg)

    def _draw_reply(self, path: str, effect: CallModel, at: int) -> Single:
        random = Random(f"{self.seed}:{path}:{effect.seq}:reply")  # noqa: S311
        # By address, so that a call that is made again after a crash gets the same reply.
        index = self._asked.setdefault((path, effect.seq), len(self._asked))
        if self.replies is None:
            item: object = draw_reply(effect.request, random, self.agents)
        elif callable(self.replies):
            item = self.replies(effect.request, random)
        else:
            item = self.replies[index] if index < len(self.replies) else LAST
            item = item(effect.request) if callable(item) else item
        if isinstance(item, Failing):
            error = item.error
            known = isinstance(error, StepEngineError)
            return Failure(error if known else ModelError(str(error)), at)  # type: ignore[arg-type]
        return Value(ModelReply(item, usage=Usage(3, 1)) if isinstance(item, str) else item, at)

    def _make_tool_result(self, effect: CallTool) -> ToolResult:
        made = self.results.get(effect.tool_name, f"result {effect.seq} of {effect.tool_name}")
        made = made(effect.input) if callable(made) else made
        if isinstance(made, ToolResult):
            return made
        return ToolResult.text(made) if isinstance(made, str) else ToolResult.json(made)

    def _make_function_result(self, effect: CallFunction) -> object:
        call = effect.call
        made = self.results.get(call.name)
        return made(*call.args, **call.kwargs) if callable(made) else made

    def _answer(self, question: Any) -> AnswerLike:
        return self.answers.get(question.text, question.options[0] if question.options else "yes")


def draw_reply(request: ModelRequest, random: Random, agents: tuple[str, ...] = ()) -> ModelReply:
    """Return a plausible model reply: a text or calls of offered tools, sometimes with invalid input."""
    usage = Usage(random.randint(1, 99), random.randint(1, 9))
    if not request.tools or random.random() > CALL_RATE:
        return ModelReply((TextPart("fine"),), usage=usage)
    specs = [random.choice(request.tools) for _ in range(random.randint(1, 3))]
    return ModelReply(
        [ToolCallPart("", s.name, _draw_input(s.input_schema, random, agents)) for s in specs], usage=usage
    )


def _draw_input(schema: Mapping[str, Any], random: Random, agents: tuple[str, ...]) -> Mapping[str, Any]:
    if random.random() < 0.1:  # noqa: PLR2004
        return {}
    made = _Drawing(random, schema.get("$defs", {}), agents).value(schema)
    return made if isinstance(made, Mapping) else {}


@frozen
class _Drawing:
    """Draws random values that roughly match a schema; tools reject some of them, which is also tested."""

    random: Random
    known: Mapping[str, Any]
    agents: tuple[str, ...]

    def value(self, schema: Any, depth: int = 0) -> Any:
        if not isinstance(schema, Mapping) or depth > 5:  # noqa: PLR2004
            return "x"
        if "$ref" in schema:
            return self.value(self.known.get(schema["$ref"].rpartition("/")[2]), depth + 1)
        choices: Iterable[object] = schema.get("enum") or ([schema["const"]] if "const" in schema else ())
        if choices:
            return self.random.choice(list(choices))
        for word in ("anyOf", "oneOf"):
            if schema.get(word):
                return self.value(self.random.choice(list(schema[word])), depth + 1)
        return self._draw_of_type(
            schema, schema.get("type", "object" if "properties" in schema else "string"), depth + 1
        )

    def _draw_of_type(self, schema: Mapping[str, Any], kind: object, depth: int) -> object:
        random = self.random
        if kind == "object":
            required, members = schema.get("required", ()), schema.get("properties", {}).items()
            given = {name: s for name, s in members if name in required or random.random() < 0.2}  # noqa: PLR2004
            return {name: self._member(name, member, depth) for name, member in given.items()}
        if kind == "array":
            return [self.value(schema.get("items"), depth) for _ in range(random.randint(1, MANY))]
        made = PLAIN.get(kind) if isinstance(kind, str) else None
        return made(random) if made is not None else random.choice(TEXTS)

    def _member(self, name: str, schema: object, depth: int) -> Any:
        if name in NAMING and self.agents:
            return self.random.choice(self.agents)
        return self.value(schema, depth)


CREATED = datetime(2025, 1, 1, tzinfo=UTC)
MAX_EFFECTS = 2_000
MINUTES = 600_000
HOURS = 6 * 3_600_000
UNSOUND = "R1"


class _Crash(BaseException):
    """The simulated process dies."""


class OutcomeSource(Protocol):
    """A source of the outcomes of a simulated world."""

    @property
    def results(self) -> Mapping[str, Any]:
        """The scripted results, by name of a tool or of the function of a ``Perform``."""

    def outcome(self, path: str, effect: Leaf, at: int) -> Single:
        """Return the outcome of *effect*. After a crash, the same effect has the same outcome."""


Invariant: TypeAlias = Callable[[AgentState, Sequence[Event]], Any]
"""
What must hold at every place of a run: of its state, and of the events of the tree so far.

It fails by returning ``False`` or raising an ``AssertionError``.
"""


@frozen(kw_only=True)
class SimulationSetting:
    """
    The options that all seeds of a simulation share.

    Attributes:
        catalog: Agents and tools.
        agent: The root's agent.
        prompt: Its prompt.
        params: Its params.
        canned: Makes what the world of a seed says.
        may_raise: Errors that handlers may let out.
        invariants: Called with the state of the run that waits and all events so far, before each effect and at each end.
        messages: By topic what runs are sent, in order; others get what is drawn.
        random_seed: What chance in the run depends on; by default the seed of the world.
        more: What else the run is started with: ``previous``, ``limits``.
        is_same_in_any_order: Whether the run of a seed has to end in the same way in whatever order its children do.
        first: By seed the first world, and how it ended, where that is so.
        undisturbed: How the run ended that was last compared with, by seed, faults and order.
    """

    catalog: Catalog
    agent: AgentDefinition
    prompt: str
    params: Any
    canned: Callable[[int], OutcomeSource]
    may_raise: tuple[type[BaseException], ...]
    invariants: tuple[Invariant, ...] = ()
    messages: Mapping[str, Sequence[object]] = attrs.field(factory=dict)
    random_seed: str | None = None
    more: Mapping[str, Any] = attrs.field(factory=dict)
    is_same_in_any_order: bool = False
    first: dict[int, tuple[World, Finished]] = attrs.field(factory=dict, init=False)
    undisturbed: dict[tuple[int, tuple[Fault, ...], int], Finished] = attrs.field(factory=dict, init=False)


class World:
    """
    The simulated world of one seed: the runs of its tree, their journal, and the effects performed.

    Runs are recorded, resumed and repeated by the recorder and the replayer that ship, over a journal in memory; when a process
    dies, nothing of it is left but the lines of the journal. What stands here beside that is what they are judged by: what
    really happened, and what came of it.

    Attributes:
        seed: The seed.
        resumed: Whether the run went on after a crash.
        unknown: Whether an effect may have happened whose outcome nobody knows.
        records: Each effect that was answered, and its outcome, by path and number.
        happened: The faults that came up.
        lines: What happened, as text.
    """

    def __init__(
        self, setting: SimulationSetting, seed: int, faults: RandomFaults | ListedFaults, order: int = 0
    ) -> None:
        self._setting = setting
        self.seed = seed
        self.order = order
        self._letters = SimulatedMailbox(setting.messages)
        self._lost: set[tuple[str, int]] = set()
        self._asked: dict[tuple[str, int], int] = {}
        self.resumed = False
        self.unknown = False
        self._kept: dict[str, RunResources] = {}
        self._faults = faults
        self._canned = setting.canned(seed)
        self._journal = MemoryJournal(redact="off")
        self._now = 0
        self._since = 0
        self._again = False
        self._died: set[tuple[str, int, str]] = set()
        self._begun: set[tuple[str, int]] = set()
        self._doubtful: set[tuple[str, int]] = set()
        self._open: set[tuple[str, int]] = set()
        self._met: set[tuple[str, int]] = set()
        self._kinds: dict[tuple[str, int], list[str]] = {}
        self._given: dict[tuple[str, int], Single] = {}
        self.records: dict[tuple[str, int], tuple[Leaf, Single]] = {}
        self.happened: list[Fault] = []
        self.lines: list[str] = []
        self._events: list[Event] = []
        self._random_seed = str(seed) if setting.random_seed is None else setting.random_seed

    def run(self) -> Finished:
        """
        Run the root to its end, and restart the process after each crash.

        Raises:
            Violation: when something does not hold.
        """
        run = JournaledRun.record(self._journal, seed=self._random_seed)
        while True:
            try:
                return self._run_process(run)
            except _Crash:
                self.resumed = True
                self.lines.append("   the process dies; the run is resumed from its journal")
                self._doubtful |= self._open
                self._given.clear()
            run = self._open_next_process()

    def _open_next_process(self) -> JournaledRun:
        """Return the run of the next process, which has only the lines of the journal."""
        try:
            self._journal = MemoryJournal(self._journal.lines(), redact="off")
            return JournaledRun.resume(self._journal)
        except StepEngineError as error:
            refuse("I11", f"{self._describe_moment} the run cannot be resumed: {error.message}")

    def list_unscripted(self) -> tuple[str, ...]:
        """Return the tools and ``Perform`` functions without a scripted result, in the order of their first use."""
        used = [
            e.tool_name if isinstance(e, CallTool) else e.call.name for e, _ in self.records.values() if _is_named(e)
        ]
        return tuple(dict.fromkeys([name for name in used if name not in self._canned.results]))

    def repeat(self, finished: Finished) -> None:
        """
        Replay the run from its journal; check that it emits the same effects, performs none, and ends in the same way.

        Nobody is shown events this time, so that what a run does cannot depend on it.

        Raises:
            Violation: when it differs.
        """
        self._again = True
        self._met.clear()
        told = len(self.lines)
        self.lines.append("   the run is repeated over its records")
        again = self._run_process(JournaledRun.replay(self._journal))
        expect_same_end("I3", "when it is repeated over its records", again, finished)
        missing = self.records.keys() - self._met
        if missing:
            refuse("I3", f"repeated over its records, the run does not ask for {format_address(min(missing))}")
        del self.lines[told:]

    def _run_process(self, run: JournaledRun) -> Finished:
        """Run one process until the run ends or the process dies."""
        try:
            finished = self._start(run)
            ended: Finished = run_without_waiting(finish_run(run, finished))
        finally:
            run.writer.close()
        self._expect_sound(run)
        return ended

    def _start(self, run: JournaledRun) -> Finished:
        from stepengine.engine.run_plans import Planner, RunModels, RunRequest, resolve_system_prompt
        from stepengine.models import Models

        setting, opening, models = self._setting, run.opening, Models.from_value(_draw_any())
        self._run, self._since = run, self._now
        self._events.clear()
        key = f"{self.seed}:{self.order}"
        self.backstage = SimulatedChildren(key, self._run_in_background, self._letters, _draw_message)
        planner = Planner(
            setting.catalog,
            RunModels(registry=models, default="test/model", chosen={}, window=lambda _: None, keep_names=True),
            seed=self._random_seed,
            created=CREATED + timedelta(milliseconds=self._now),
            watched=lambda: not self._again,
        )
        agent = setting.catalog.find(setting.agent)
        prompt, params = (setting.prompt, setting.params) if opening is None else (opening.prompt, opening.params)
        plan, state = planner.plan_root(
            RunRequest(agent=agent, prompt=prompt, params=params, run_id="run", **setting.more)
        )
        try:
            plan, state = start_run(run, plan, resolve_system_prompt(plan, state))
        except ReplayDivergence as error:
            self._refuse_divergence(error)
        self._services = run.wrap(Services(machine=run_agent, models=models, planner=planner.plan_child))
        (recorder,) = self._services.middlewares
        self._budgets = Budgets(
            lambda gate: ForwardingPerformer(
                recorder(ForwardingPerformer(gate, self._store_outcome)), self._check_outcome
            ),
            self._perform_with_faults,
            lambda: self._now - self._since,
            self.backstage.results,
        )
        return self._drive(plan, state)

    def _run_in_background(self, item: Item) -> Single:
        return self._budgets.run(item)

    def _drive(self, plan: RunPlan, state: AgentState) -> Finished:
        if not plan.path:
            self._kept = {}  # another process keeps nothing of this one
        run = Unwatched(plan) if self._again else WatchedRun(plan, self._setting.may_raise, is_bare=self.seed % 2 == 1)
        self._budgets.opens(plan)
        finished = self._drive_machine(run, self._services.machine(run.plan, state))
        if self._again:
            # What was at work when a run was stopped has its records, too.
            self.backstage.finish(plan.path, {path for path, _ in self.records})
        self._budgets.closes(plan.path)
        self.lines.append(
            f"   run {plan.path or 'root'} ended: {finished.status.value} {finished.error or ''}".rstrip()
        )
        run.ended(finished)
        left = self.backstage.at_work(plan.path)
        if left and finished.status not in (RunStatus.SUSPENDED, RunStatus.CANCELLED):
            refuse("WT3", f"the run {plan.path or 'root'} has ended, and its children at {', '.join(left)} have not")
        return finished

    def _drive_machine(self, run: WatchedRun, machine: Generator[Effect, Outcome | None, Finished]) -> Finished:
        outcome: Outcome | None = None
        try:
            while True:
                effect = _advance_machine(machine, outcome)
                if isinstance(effect, Finished):
                    self._check_author_invariants(effect.state, run.plan.path)
                    return effect
                run.emitted(effect)
                self._check_before_effect(effect, machine, run.plan.path)
                outcome = self._answer(run, effect)
        finally:
            # A handler that ignores its close has its say in the checks of a run that went to its end.
            with suppress(RuntimeError):
                machine.close()
            kept = self._kept.pop(run.plan.path, None)
            if kept is not None:
                kept.close()

    # --- the author's own invariants ------------------------------------------------------------------------------------

    def _check_before_effect(self, effect: Effect, machine: object, path: str) -> None:
        if not self._setting.invariants or self._again:
            return
        if isinstance(effect, Notify):
            self._events.append(effect.event)
            return
        if isinstance(machine, Machine):
            self._check_author_invariants(machine.state, path)

    def _check_author_invariants(self, state: AgentState, path: str) -> None:
        """Check the invariants of the author."""
        events = tuple(self._events)
        for holds in () if self._again else self._setting.invariants:
            name = getattr(holds, "__name__", repr(holds))
            try:
                said = holds(state, events)
            except AssertionError as error:
                refuse("own", f"{name} does not hold in the run {path or 'root'}: {str(error) or 'it says no more'}")
            if said is False:
                refuse("own", f"{name} does not hold in the run {path or 'root'}")

    # --- effects ------------------------------------------------------------------------------------------------------

    def _answer(self, run: WatchedRun, effect: Effect) -> Outcome | None:
        if isinstance(effect, Notify):
            return None
        if isinstance(effect, Compute):
            return run_compute(effect, self._kept.setdefault(run.plan.path.rpartition(".")[0], RunResources()))
        members = effect.effects if isinstance(effect, Gather) else (effect,)
        outcomes: tuple[Single, ...]
        if isinstance(effect, Gather):
            outcomes = self._answer_members(run, members, effect)
        else:
            self._begin(run, members, None)
            outcomes = (self._budgets.perform(run, effect),)
        run.answered(members, outcomes)
        return Gathered(outcomes) if isinstance(effect, Gather) else outcomes[0]

    def _begin(self, run: WatchedRun, members: Sequence[Leaf], gather: Gather | None) -> None:
        try:
            self._budgets.begin(run, members, gather)
        except ReplayDivergence as error:
            self._refuse_divergence(error)
        self._open |= {(run.plan.path, member.seq) for member in members}

    def _answer_members(self, run: WatchedRun, members: Sequence[Leaf], gather: Gather) -> tuple[Single, ...]:
        """
        Return the outcomes of *members*, performed in a random order; after a stop or a failed child the rest is not started.

        Of each race one is drawn who wins it; the others are given up.
        """
        path, fail_fast = run.plan.path, gather.fail_fast
        order = [*range(len(members))]
        random = Random(f"{self.seed}:{path}:{members[0].seq}:order")  # noqa: S311
        random.shuffle(order)
        for race in gather.races:
            winner = random.randrange(*race)
            losers = [index for index in range(*race) if index != winner]
            self._lost |= {(path, members[index].seq) for index in losers}
            order = [*[index for index in order if index not in losers], *losers]
        done: dict[int, Single] = {}
        stop: Stop | None = None
        failed = False
        for index in self._begin_in_order(run, members, gather, order, done):
            member = members[index]
            if stop is not None:
                done[index] = attrs.evolve(stop, child=None, questions=())
                continue
            if failed and isinstance(member, Spawn):
                self._budgets.give_up(path, member)
            done[index] = outcome = self._budgets.perform(run, member, gather if gather.races else None)
            stop = outcome if isinstance(outcome, Stop) else None
            failed = failed or (fail_fast and has_failed(outcome))
        return tuple([done[index] for index in range(len(members))])

    def _begin_in_order(
        self,
        run: WatchedRun,
        members: Sequence[Leaf],
        gather: Gather,
        order: Sequence[int],
        done: Mapping[int, Single],
    ) -> Iterator[int]:
        """
        Begin as many members at a time as the limits have room for, and yield them in this *order* to be performed.

        After a stop among what is *done* none begins.
        """
        start, together = 0, gather if len(members) > 1 else None
        while start < len(members):
            if any(isinstance(outcome, Stop) for outcome in done.values()):
                yield from range(start, len(members))
                return
            end = start + self._budgets.count_startable(run, members[start:], together)
            self._begin(run, members[start:end], together)
            now = [index for index in order if start <= index < end]
            if self._budgets.is_bounded(run.plan.path):
                # A child is driven to its end here, and its calls could not wait for one that comes behind it.
                now.sort(key=lambda index: not isinstance(members[index], CallModel))
            yield from now
            start = end

    def _check_outcome(self, item: Item, outcome: Single) -> Single:
        """Check an outcome from the recorder, whether new or recorded."""
        self._expect_sound(self._run)
        at = item.address
        self._met.add(at)
        if self._is_recorded(at) or (self._again and at in self.records):
            self._expect_same(at, item.effect, outcome)
            return outcome
        if self._again:
            refuse(
                "I3",
                f"{self._describe_moment} the run asks for {format_address(at)}, {describe_effect(item.effect)}, which it did not do before",
            )
        if len(self.records) >= MAX_EFFECTS:
            refuse(
                "R1", f"the run does not end: {MAX_EFFECTS} effects, the last of them {describe_effect(item.effect)}"
            )
        self._expect_world_outcome(at, item, outcome)
        self.records[at] = (item.effect, outcome)
        self.lines.append(
            f"{format_address(at):>8}  {describe_effect(item.effect)}{self._fault_marks(at)}\n          -> {describe_outcome(outcome)}"
        )
        if not isinstance(outcome, Stop):
            self._open.discard(at)
        self._crash_if_planned(item.effect, at, "crash_after")
        return outcome

    def _is_recorded(self, at: tuple[str, int]) -> bool:
        """Return whether the journal must have the outcome of an effect, which it has unless the effect was stopped."""
        return at in self.records and not isinstance(self.records[at][1], Stop)

    def _expect_same(self, at: tuple[str, int], effect: Leaf, outcome: Single) -> None:
        """Check that a repeated effect is the same as before and has the same outcome; all stops of one type are equal."""
        recorded, due = self.records[at]
        if not _is_same(recorded, effect):
            refuse(
                "I3",
                f"{self._describe_moment} {format_address(at)} is {describe_effect(effect)}, and was {describe_effect(recorded)}",
            )
        if not _is_equal(outcome, due):
            refuse(
                "I3",
                f"{self._describe_moment} {format_address(at)}, {describe_effect(effect)}, gives {describe_outcome(outcome)}, and gave {describe_outcome(due)}",
            )

    def _expect_world_outcome(self, at: tuple[str, int], item: Item, outcome: Single) -> None:
        """Check that a new outcome equals that of the world. It may be unknown only after a crash."""
        given = self._given.get(at)
        if given is not None:
            was_lost = at in self._doubtful and isinstance(item.effect, CallModel)
            if not _is_equal(_without_lost_requests(outcome, given) if was_lost else outcome, given):
                refuse(
                    "R1",
                    f"{format_address(at)}, {describe_effect(item.effect)}, gave {describe_outcome(given)}, and the run is sent {describe_outcome(outcome)}",
                )
        elif (at in self._lost and was_given_up(outcome)) or (isinstance(outcome, Stop) and self._has_ended(at[0])):
            self._now += 1  # that another one has won, or that the run was ended there, stands in the record
        elif at in self._doubtful and not is_repeatable(item) and _is_unknown(outcome):
            self._now += 1
            self.unknown = True
        else:
            refuse(
                "R1",
                f"{format_address(at)}, {describe_effect(item.effect)}, did not happen, and the run is sent {describe_outcome(outcome)}",
            )

    def _has_ended(self, path: str) -> bool:
        """Return whether the end of the run at *path*, as a child in the background or below one, is recorded."""
        while path and (path, -1) not in self.records:
            path = path.rpartition(".")[0]
        return bool(path)

    def _expect_sound(self, run: JournaledRun) -> None:
        if run.writer.fatal is not None:
            self._refuse_divergence(run.writer.fatal)

    def _refuse_divergence(self, error: StepEngineError) -> NoReturn:
        refuse("I3", f"{self._describe_moment} {error.message}")

    @property
    def _describe_moment(self) -> str:
        return "repeated over its records," if self._again else "after a crash"

    def _fault_marks(self, at: tuple[str, int]) -> str:
        kinds = self._kinds.get(at)
        return f"   !! {', '.join(kinds)}" if kinds else ""

    def _store_outcome(self, item: Item, outcome: Single) -> Single:
        """Store the real outcome of an effect before it is recorded."""
        self._given[item.address] = outcome
        return outcome

    def _perform_with_faults(self, item: Item) -> Single:
        """Perform an effect with its planned faults."""
        effect, at = item.effect, item.address
        if at not in self._kinds:
            self._kinds[at] = self._faults.find_faults(item.path, effect)
            self.happened += [Fault(effect.seq, kind, item.path) for kind in self._kinds[at]]
        self._expect_due(item, at)
        self._crash_if_planned(effect, at, "crash")
        self._crash_if_planned(effect, at, "lost_wake")
        made = self._perform_effect(item, at)
        self._crash_if_planned(effect, at, "crash_inside")
        return made

    def _expect_due(self, item: Item, at: tuple[str, int]) -> None:
        """Check that the effect may be performed now; runs of children always may, since they replay their own records."""
        if isinstance(item.effect, (*RUNS, RunInBackground)):
            return
        if self._again or self._is_recorded(at):
            refuse(
                "I3",
                f"{self._describe_moment} {format_address(at)}, {describe_effect(item.effect)}, happens although its outcome is recorded",
            )
        if at in self._doubtful and not is_repeatable(item):
            refuse(
                "R3",
                f"{self._describe_moment} {format_address(at)}, {describe_effect(item.effect)}, happens although it may have happened before",
            )

    def _perform_effect(self, item: Item, at: tuple[str, int]) -> Single:
        effect, kinds = item.effect, self._kinds[at]
        self._asked.setdefault(at, self._now)
        if at not in self._begun:
            self._begun.add(at)
            self._now += HOURS if "lost_wake" in kinds else MINUTES if {"slow", "late"} & {*kinds} else 1
        now = self._now - self._since
        stopped = self.backstage.find_cut(*at) or self.backstage.stopped()
        if stopped is not None and not isinstance(effect, RunInBackground) and not self._is_recorded(at):
            return attrs.evolve(stopped, at=now)
        if at in self._lost:
            return make_race_loss_outcome(item, now)
        made = next((o for kind in kinds if (o := find_faulty_outcome(kind, effect, now)) is not None), None)
        if made is None:
            made = HAPPENS.get(type(effect), World._make_empty_outcome)(self, item)
        made = apply_faults(kinds, effect, made)
        heard = self._letters.inbox(*at)
        if heard and not isinstance(made, Stop):
            made = attrs.evolve(made, inputs=(*made.inputs, *heard))
        if "duplicate" in kinds and not isinstance(made, Stop):
            sent = UserMessage(f"sent twice during {format_address(at)}")
            return attrs.evolve(made, inputs=(sent, sent))
        return made

    def _crash_if_planned(self, effect: Leaf, at: tuple[str, int], kind: str) -> None:
        """End the simulated process if a fault of this *kind* is planned at *effect*."""
        if kind not in self._kinds.get(at, ()) or (*at, kind) in self._died:
            return
        self._died.add((*at, kind))
        self.lines.append(f"{format_address(at):>8}  {describe_effect(effect)}   !! {kind}")
        raise _Crash

    def _canned_outcome(self, item: Item) -> Single:
        return self._canned.outcome(item.path, item.effect, self._now - self._since)

    def _make_empty_outcome(self, item: Item) -> Single:
        """Return the empty value of the type that an effect gives: ``""``, ``False`` or ``None``."""
        kind: Any = ROWS[type(item.effect)].outcome
        return Value(kind(), self._now - self._since)

    # --- what waits ---------------------------------------------------------------------------------------------------

    def _perform_sleep(self, item: Item) -> Single:
        self._advance_clock(item)
        return Value(None, self._now - self._since)

    def _perform_receive(self, item: Item) -> Single:
        made = self.backstage.received(item, self._now - self._since)
        if isinstance(made, Value) and made.value is None:
            self._advance_clock(item)
        return attrs.evolve(made, at=self._now - self._since)

    def _perform_wait(self, item: Item) -> Single:
        made = self.backstage.waited(item, self._now - self._since)
        if isinstance(made, Value) and len(made.value.done) < cast("AwaitRuns", item.effect).need:
            self._advance_clock(item)
        return attrs.evolve(made, at=self._now - self._since)

    def _advance_clock(self, item: Item) -> None:
        """Advance the clock by the time of a wait. Waits that started together end together."""
        effect = cast("AwaitTime", item.effect)
        patience = max(0, (effect.wakes or 0) - effect.asked)
        self._now = max(self._now, self._asked[item.path, effect.seq] + patience)

    def _perform_send(self, item: Item) -> Single:
        return Value(self.backstage.send_to_child(item), self._now - self._since)

    def _end_children(self, item: Item) -> Single:
        return attrs.evolve(self.backstage.ended(item, 0), at=self._now - self._since)

    def _run_background_child(self, item: Item) -> Single:
        """Run a child in the background to its end."""
        finished = self._drive(*self.backstage.planned(item.path))
        child, now = finished.as_child(), self._now - self._since
        # One that is recorded to have been ended comes to that end, whatever stops it this time.
        is_cut = item.path in self.backstage.cut or self._is_recorded((item.path, -1))
        if is_cut and finished.status in (RunStatus.SUSPENDED, RunStatus.CANCELLED):
            return Value(attrs.evolve(child, status=RunStatus.CANCELLED, questions=(), error=None), now)
        if finished.status is RunStatus.SUSPENDED:
            return Stop("suspended", now, questions=finished.pending, child=child)
        return Stop("cancelled", now, child=child) if finished.status is RunStatus.CANCELLED else Value(child, now)

    # --- runs ---------------------------------------------------------------------------------------------------------

    def _call_body(self, item: Item) -> Single:
        """Run the body of a tool that yields."""
        effect = cast("CallBody", item.effect)
        try:
            plan, state = self._services.planner(item.plan, effect, child_path(item.path, effect.seq))
        except StepEngineError as error:
            return Failure(error, self._now - self._since)
        finished = self._drive(plan, state)
        body, now = finished.as_body(), self._now - self._since
        if finished.status is RunStatus.SUSPENDED:
            return Stop("suspended", now, questions=finished.pending, body=body)
        if finished.status is RunStatus.CANCELLED:
            return Stop("cancelled", now, body=body)
        runs = cast("Yielding", item.plan.tools[effect.tool_name].runs)
        return Value(finished.as_tool_result(runs, is_typed=effect.source != "model"), now, body=body)

    def _perform_spawn(self, item: Item) -> Single:
        effect = cast("Spawn", item.effect)
        path = child_path(item.path, effect.seq)
        try:
            plan, state = self._services.planner(item.plan, effect, path)
        except StepEngineError as error:
            if effect.is_background:
                return Failure(error, self._now - self._since)
            return Value(
                ChildResult(agent_id=effect.agent_id, status=RunStatus.FAILED, error=error), self._now - self._since
            )
        if effect.is_background:
            return Value(self.backstage.start(plan, state), self._now - self._since)
        finished = self._drive(plan, state)
        child, now = finished.as_child(is_inline=effect.is_inline), self._now - self._since
        if finished.status is RunStatus.SUSPENDED:
            return Stop("suspended", now, questions=finished.pending, child=child)
        if finished.status is RunStatus.CANCELLED:
            # Only the whole tree is cancelled here.
            return Stop("cancelled", now, child=child)
        return Value(child, now)


def _advance_machine(
    machine: Generator[Effect, Outcome | None, Finished], outcome: Outcome | None
) -> Effect | Finished:
    try:
        return machine.send(outcome)
    except StopIteration as stop:
        finished: Finished = stop.value
        return finished
    except BaseException as error:
        if belongs_to_caller(error):
            raise
        problem = f"the machine raised {type(error).__name__}: {error}"
        raise Violation(UNSOUND, problem) from error


def _is_named(effect: Leaf) -> TypeGuard[CallTool | CallFunction]:
    return isinstance(effect, CallTool | CallFunction)


def _is_same(a: Leaf, b: Leaf) -> bool:
    if isinstance(a, CallFunction) and isinstance(b, CallFunction):
        return a.seq == b.seq and is_same_yield(a.call, b.call)
    return type(a) is type(b) and a == b


def _is_equal(a: Single, b: Single) -> bool:
    """Return whether two outcomes are equal; a stop is compared less strictly, since it is not recorded."""
    if isinstance(a, Stop) or isinstance(b, Stop):
        return type(a) is type(b)
    if isinstance(a, Value) and isinstance(b, Value) and a.value is b.value:
        return a.inputs == b.inputs
    return outcome_members(a) == outcome_members(b)


def _without_lost_requests(outcome: Single, given: Single) -> Single:
    """Return the outcome of a repeated model call with the usage of the last request alone, which *given* has."""
    if isinstance(outcome, Value) and isinstance(given, Value) and isinstance(outcome.value, ModelReply):
        return attrs.evolve(outcome, value=attrs.evolve(outcome.value, usage=given.value.usage, cost=given.value.cost))
    if isinstance(outcome, Failure) and isinstance(given, Failure) and isinstance(outcome.error, ModelError):
        error = copy.copy(outcome.error)
        error.usage = getattr(given.error, "usage", None)
        return attrs.evolve(outcome, error=error)
    return outcome


def _is_unknown(outcome: Single) -> bool:
    return isinstance(getattr(outcome, "error", None), UnknownOutcome)


HAPPENS: Mapping[type[Leaf], Callable[[World, Item], Single]] = {
    **dict.fromkeys((CallModel, CallTool, CallFunction, AskPerson), World._canned_outcome),  # noqa: SLF001
    CallBody: World._call_body,  # noqa: SLF001
    Spawn: World._perform_spawn,  # noqa: SLF001
    AwaitTime: World._perform_sleep,  # noqa: SLF001 - it is the world's own table
    AwaitMessage: World._perform_receive,  # noqa: SLF001
    AwaitRuns: World._perform_wait,  # noqa: SLF001
    SendToRun: World._perform_send,  # noqa: SLF001
    EndRuns: World._end_children,  # noqa: SLF001
    RunInBackground: World._run_background_child,  # noqa: SLF001
}
"""How an effect happens that gives more than an empty value."""


def _draw_message(effect: AwaitMessage, random: Random) -> object:
    """Return a message that roughly matches the expected schema."""
    schema = effect.schema
    if schema is None:
        return random.choice(TEXTS)
    wanted = schema if isinstance(schema, Mapping) else schema.model_json_schema()
    return _Drawing(random, wanted.get("$defs", {}), ()).value(wanted)


def _draw_any() -> Any:
    from stepengine.models.scripted import ScriptedModel

    return ScriptedModel()
