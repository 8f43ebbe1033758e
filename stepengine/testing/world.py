"""
The world of a simulated run: machines and trees of them, driven without an event loop, that die and go on.

When nothing goes wrong, replies, results and answers come from a seed.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from random import Random
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias, cast

import attrs
from attrs import frozen

from stepengine.data.definition import AgentDefinition
from stepengine.data.effects import (
    AskPerson,
    AwaitMessage,
    CallFunction,
    CallModel,
    CallTool,
    Compute,
    Effect,
    Gather,
    Leaf,
    Notify,
    Spawn,
)
from stepengine.data.events import Event
from stepengine.data.json import freeze
from stepengine.data.messages import TextPart, ToolCallPart
from stepengine.data.models import ModelReply, ModelRequest
from stepengine.data.outcomes import Failure, Gathered, Outcome, Single, Stop, Value
from stepengine.data.questions import AnswerLike, to_answer
from stepengine.data.state import AgentState, RunStatus
from stepengine.data.usage import Usage
from stepengine.errors import ModelError, ReplayDivergence, StepEngineError
from stepengine.journal.journaled_run import JournaledRun
from stepengine.journal.run_end import finish_run
from stepengine.journal.run_start import start_run
from stepengine.journal.store import MemoryJournal
from stepengine.machine import Finished, run_agent
from stepengine.machine.plan import RunPlan
from stepengine.machine.run import Machine
from stepengine.machine.signals import belongs_to_caller
from stepengine.models.scripted import Failing, ScriptedModel
from stepengine.runtime.failfast import has_failed
from stepengine.runtime.performer import Item, run_compute
from stepengine.runtime.services import ModelSetting, Services
from stepengine.testing.budgets import Budgets, ForwardingPerformer, run_without_waiting
from stepengine.testing.effect_performer import EffectPerformer, OutcomeSource
from stepengine.testing.faults import Fault, RandomFaults
from stepengine.testing.invariants import (
    Unwatched,
    Violation,
    WatchedRun,
    describe_effect,
    describe_outcome,
    expect_same_end,
    format_address,
    raise_violation,
)
from stepengine.testing.performed_effects import EffectRecords, PlannedFaults, WorldClock
from stepengine.testing.short_answers import to_tool_result
from stepengine.testing.simulated_children import SimulatedChildren, SimulatedMailbox
from stepengine.tools.context import RunResources

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

    def create_outcome(self, path: str, effect: Leaf, now_ms: int) -> Single:
        """Return the outcome of *effect* from the scripts of the world, else a made-up one; raise ``TypeError`` for a child."""
        if isinstance(effect, CallModel):
            return self._make_reply_outcome(path, effect, now_ms)
        if isinstance(effect, CallTool):
            made = self.results.get(effect.tool_name, f"result {effect.seq} of {effect.tool_name}")
            result = to_tool_result(made(effect.input) if callable(made) else made)
            return Value(attrs.evolve(result, tool_name=effect.tool_name, tool_call_id=effect.tool_call_id), now_ms)
        if isinstance(effect, CallFunction):
            call = effect.call
            made = self.results.get(call.name)
            return Value(freeze(made(*call.args, **call.kwargs) if callable(made) else made), now_ms)
        if isinstance(effect, AskPerson):
            return Value(tuple([to_answer(self._choose_answer(q), q) for q in effect.questions]), now_ms)
        msg = f"a child is run, not answered: {effect!r}"
        raise TypeError(msg)

    def _make_reply_outcome(self, path: str, effect: CallModel, now_ms: int) -> Single:
        """Return the outcome of a model call: the scripted reply or failure, else a random reply."""
        random = Random(f"{self.seed}:{path}:{effect.seq}:reply")  # noqa: S311
        # By address, so that a call that is made again after a crash gets the same reply.
        index = self._asked.setdefault((path, effect.seq), len(self._asked))
        if self.replies is None:
            item: object = draw_model_reply(effect.request, random, self.agents)
        elif callable(self.replies):
            item = self.replies(effect.request, random)
        else:
            item = self.replies[index] if index < len(self.replies) else LAST
            item = item(effect.request) if callable(item) else item
        if isinstance(item, Failing):
            error = item.error
            known = isinstance(error, StepEngineError)
            return Failure(error if known else ModelError(str(error)), now_ms)  # type: ignore[arg-type]
        return Value(ModelReply(item, usage=Usage(3, 1)) if isinstance(item, str) else item, now_ms)

    def _choose_answer(self, question: Any) -> AnswerLike:
        """Return the scripted answer to *question*, else its first option, else ``"yes"``."""
        return self.answers.get(question.text, question.options[0] if question.options else "yes")


def draw_model_reply(request: ModelRequest, random: Random, agents: tuple[str, ...] = ()) -> ModelReply:
    """Return a plausible model reply: a text or calls of offered tools, sometimes with invalid input."""
    usage = Usage(random.randint(1, 99), random.randint(1, 9))
    if not request.tools or random.random() > CALL_RATE:
        return ModelReply((TextPart("fine"),), usage=usage)
    specs = [random.choice(request.tools) for _ in range(random.randint(1, 3))]
    return ModelReply(
        [ToolCallPart("", s.name, _draw_tool_input(s.input_schema, random, agents)) for s in specs], usage=usage
    )


def _draw_tool_input(schema: Mapping[str, Any], random: Random, agents: tuple[str, ...]) -> Mapping[str, Any]:
    """Return a random input that roughly matches *schema*; one time in ten an empty one."""
    if random.random() < 0.1:  # noqa: PLR2004
        return {}
    made = _Drawing(random, schema.get("$defs", {}), agents).draw_value(schema)
    return made if isinstance(made, Mapping) else {}


@frozen
class _Drawing:
    """Draws random values that roughly match a schema; tools reject some of them, which is also tested."""

    random: Random
    known: Mapping[str, Any]
    agents: tuple[str, ...]

    def draw_value(self, schema: Any, depth: int = 0) -> Any:
        """Return a random value that roughly matches *schema*; ``"x"`` where it is unknown or nested too deep."""
        if not isinstance(schema, Mapping) or depth > 5:  # noqa: PLR2004
            return "x"
        if "$ref" in schema:
            return self.draw_value(self.known.get(schema["$ref"].rpartition("/")[2]), depth + 1)
        choices: Iterable[object] = schema.get("enum") or ([schema["const"]] if "const" in schema else ())
        if choices:
            return self.random.choice(list(choices))
        for word in ("anyOf", "oneOf"):
            if schema.get(word):
                return self.draw_value(self.random.choice(list(schema[word])), depth + 1)
        return self._draw_value_of_type(
            schema, schema.get("type", "object" if "properties" in schema else "string"), depth + 1
        )

    def _draw_value_of_type(self, schema: Mapping[str, Any], kind: object, depth: int) -> object:
        """Return a random object, array or plain value of the type *kind*; a text for an unknown type."""
        random = self.random
        if kind == "object":
            required, members = schema.get("required", ()), schema.get("properties", {}).items()
            given = {name: s for name, s in members if name in required or random.random() < 0.2}  # noqa: PLR2004
            return {name: self._draw_object_member(name, member, depth) for name, member in given.items()}
        if kind == "array":
            return [self.draw_value(schema.get("items"), depth) for _ in range(random.randint(1, MANY))]
        made = PLAIN.get(kind) if isinstance(kind, str) else None
        return made(random) if made is not None else random.choice(TEXTS)

    def _draw_object_member(self, name: str, schema: object, depth: int) -> Any:
        """Return a random value for a member of an object; a known agent id for a member that names an agent."""
        if name in NAMING and self.agents:
            return self.random.choice(self.agents)
        return self.draw_value(schema, depth)


CREATED = datetime(2025, 1, 1, tzinfo=UTC)
UNSOUND = "R1"


class _Crash(BaseException):
    """The simulated process dies."""


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
        first: The run in the first order that was last compared with, by seed and faults.
        undisturbed: The end of the last run without crashes, by seed, faults and order.
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
    first: dict[tuple[int, tuple[Fault, ...]], tuple[World, Finished]] = attrs.field(factory=dict, init=False)
    undisturbed: dict[tuple[int, tuple[Fault, ...], int], Finished] = attrs.field(factory=dict, init=False)


class World:
    """
    The simulated world of one seed: the performed effects and the journal of the run.

    The real recorder and replayer record, resume and replay the runs with a journal in memory. After a crash, only the lines of the
    journal remain.

    Attributes:
        setting: The options of the simulation.
        seed: The seed.
        order: The number of the order in which children end.
        clock: The simulated time.
        faults: The faults of effects.
        effects: The effects that were performed, with their outcomes.
        mailbox: The messages to runs.
        canned: The source of replies, results and answers.
        resumed: Whether the run was resumed after a crash.
        lines: The log of the run.
    """

    def __init__(
        self, setting: SimulationSetting, seed: int, faults: RandomFaults | Sequence[Fault], order: int = 0
    ) -> None:
        self.setting = setting
        self.seed = seed
        self.order = order
        self.clock = WorldClock()
        self.faults = PlannedFaults(faults)
        self.effects = EffectRecords(self.clock)
        self.mailbox = SimulatedMailbox(setting.messages)
        self.canned = setting.canned(seed)
        self.resumed = False
        self.lines: list[str] = []
        self._journal = MemoryJournal(redact="off")
        self._process: SimulatedProcess | None = None

    @property
    def random_seed(self) -> str:
        """The seed of the run's random numbers."""
        return str(self.seed) if self.setting.random_seed is None else self.setting.random_seed

    @property
    def child_order(self) -> Sequence[str]:
        """The background children in the order in which they ended."""
        return () if self._process is None else self._process.simulated_children.order

    def run(self) -> Finished:
        """
        Run the root to its end, and restart the process after each crash.

        Raises:
            Violation: when something does not hold.
        """
        run = JournaledRun.record(self._journal, seed=self.random_seed)
        while True:
            try:
                return self._run_process(run)
            except _Crash:
                self.resumed = True
                self.lines.append("   the process dies; the run is resumed from its journal")
                self.effects.record_crash()
            run = self._resume_in_next_process()

    def _resume_in_next_process(self) -> JournaledRun:
        """Return the resumed run of the next process, which has only the lines of the journal."""
        try:
            self._journal = MemoryJournal(self._journal.lines(), redact="off")
            return JournaledRun.resume(self._journal)
        except StepEngineError as error:
            raise_violation("I11", f"{self.effects.repetition_prefix} the run cannot be resumed: {error.message}")

    def check_replay(self, finished: Finished) -> None:
        """
        Replay the run from its journal; check that it emits the same effects, performs none, and ends in the same way.

        Nobody is shown events this time, so that what a run does cannot depend on it.

        Raises:
            Violation: when it differs.
        """
        self.effects.start_replay()
        told = len(self.lines)
        self.lines.append("   the run is replayed from its records")
        again = self._run_process(JournaledRun.replay(self._journal))
        expect_same_end("I3", "when it is replayed from its records", again, finished)
        self.effects.expect_all_repeated()
        del self.lines[told:]

    def _run_process(self, run: JournaledRun) -> Finished:
        """Run one process, check its recorder, and return the end of the run; a planned crash raises ``_Crash``."""
        self.clock.started = self.clock.now
        try:
            plan, state, services = self._start_or_resume_root(run)
            self._process = SimulatedProcess(self, run, services)
            ended: Finished = run_without_waiting(finish_run(run, self._process.drive(plan, state)))
        finally:
            run.writer.close()
        self._process.expect_recorder_not_failed()
        return ended

    def _start_or_resume_root(self, run: JournaledRun) -> tuple[RunPlan, AgentState, Services]:
        """Plan the root, start or resume its record, and return plan, state and the services that record or replay it."""
        from stepengine.engine.run_plans import Planner, RunModels, RunRequest, with_resolved_system_prompt
        from stepengine.models import Models

        setting, opening, models = self.setting, run.opening, Models.from_value(cast("Any", ScriptedModel()))
        planner = Planner(
            setting.catalog,
            RunModels(registry=models, default="test/model", chosen={}, window=lambda _: None, keep_names=True),
            seed=self.random_seed,
            created=CREATED + timedelta(milliseconds=self.clock.now),
            watched=lambda: not self.effects.is_replay,
        )
        agent = setting.catalog.get_agent(setting.agent)
        prompt, params = (setting.prompt, setting.params) if opening is None else (opening.prompt, opening.params)
        plan, state = planner.plan_root(
            RunRequest(agent=agent, prompt=prompt, params=params, run_id="run", **setting.more)
        )
        try:
            plan, state = start_run(run, plan, with_resolved_system_prompt(plan, state))
        except ReplayDivergence as error:
            raise_violation("I3", f"{self.effects.repetition_prefix} {error.message}")
        return (
            plan,
            state,
            run.wrap_services(
                Services(machine=run_agent, models=ModelSetting(registry=models), planner=planner.plan_child)
            ),
        )

    def list_unscripted_names(self) -> tuple[str, ...]:
        """Return the tools and ``Perform`` functions without a scripted result, in the order of their first use."""
        asked = [effect for effect, _ in self.effects.performed.values()]
        calls = [effect for effect in asked if isinstance(effect, CallTool | CallFunction)]
        used = [call.tool_name if isinstance(call, CallTool) else call.call.name for call in calls]
        return tuple(dict.fromkeys([name for name in used if name not in self.canned.results]))


class SimulatedProcess:
    """
    A process of a world: it drives the machines of a tree of runs, and may crash.

    Args:
        world: The world, which outlives it.
        run: The run: recorded, resumed or replayed.
        services: The services that record or replay it.

    Attributes:
        simulated_children: The background children.
    """

    def __init__(self, world: World, run: JournaledRun, services: Services) -> None:
        self._world = world
        self._run = run
        self._services = services
        self._kept: dict[str, RunResources] = {}
        self._invariants = () if world.effects.is_replay else world.setting.invariants
        self._events: list[Event] = []
        self.simulated_children = SimulatedChildren(
            f"{world.seed}:{world.order}", self._run_background_child, world.mailbox, _draw_message
        )
        self._performer = EffectPerformer(
            world.clock,
            world.effects,
            world.canned,
            world.mailbox,
            self.simulated_children,
            services.planner,
            self.drive,
        )
        (recorder,) = services.middlewares
        self._budgets = Budgets(
            lambda gate: ForwardingPerformer(
                recorder(ForwardingPerformer(gate, world.effects.store_outcome)), self._check_log_and_crash
            ),
            self._perform_with_faults,
            lambda: world.clock.elapsed,
            self.simulated_children.run_children,
        )

    def _run_background_child(self, item: Item) -> Single:
        """Run a background child through recorder and limits, and return its outcome."""
        return self._budgets.run_background_child(item)

    def drive(self, plan: RunPlan, state: AgentState) -> Finished:
        """Drive the machine of a planned run to its end, check its effects and its end, and return the end."""
        world, is_replay = self._world, self._world.effects.is_replay
        run = Unwatched(plan) if is_replay else WatchedRun(plan, world.setting.may_raise, is_bare=world.seed % 2 == 1)
        self._budgets.open_run(plan)
        finished = self._drive_machine(run, self._services.machine(run.plan, state))
        if is_replay:
            # What was at work when a run was stopped has its records, too.
            self.simulated_children.run_recorded_children(plan.path, {path for path, _ in world.effects.performed})
        self._budgets.close_run(plan.path)
        world.lines.append(
            f"   run {plan.path or 'root'} ended: {finished.status.value} {finished.error or ''}".rstrip()
        )
        run.check_end(finished)
        left = self.simulated_children.list_running_children(plan.path)
        if left and finished.status not in (RunStatus.SUSPENDED, RunStatus.CANCELLED):
            raise_violation(
                "WT3", f"the run {plan.path or 'root'} has ended, but its children at {', '.join(left)} have not"
            )
        return finished

    def _drive_machine(self, run: WatchedRun, machine: Generator[Effect, Outcome | None, Finished]) -> Finished:
        """Return the end of a machine, after performing and checking each of its effects."""
        outcome: Outcome | None = None
        try:
            while True:
                effect = _advance_machine(machine, outcome)
                if isinstance(effect, Finished):
                    self._check_author_invariants(effect.state, run.plan.path)
                    return effect
                run.check_and_track_effect(effect)
                if self._invariants and isinstance(machine, Machine) and not isinstance(effect, Notify):
                    self._check_author_invariants(machine.state, run.plan.path)
                outcome = self._perform_machine_effect(run, effect)
        finally:
            # A handler that ignores its close has its say in the checks of a run that went to its end.
            with suppress(RuntimeError):
                machine.close()
            kept = self._kept.pop(run.plan.path, None)
            if kept is not None:
                kept.close_without_waiting()

    def _check_author_invariants(self, state: AgentState, path: str) -> None:
        """Call the author's invariants with a state and all events so far; raise ``Violation`` for one that does not hold."""
        for holds in self._invariants:
            name = getattr(holds, "__name__", repr(holds))
            try:
                said = holds(state, tuple(self._events))
            except AssertionError as error:
                raise_violation(
                    "own", f"{name} does not hold in the run {path or 'root'}: {str(error) or 'no message'}"
                )
            if said is False:
                raise_violation("own", f"{name} does not hold in the run {path or 'root'}")

    def _perform_machine_effect(self, run: WatchedRun, effect: Effect) -> Outcome | None:
        """Perform an effect, alone or a ``Gather``, and return its outcome; a ``Notify`` only stores its event and returns ``None``."""
        if isinstance(effect, Notify):
            self._events.append(effect.event)
            return None
        if isinstance(effect, Compute):
            return run_compute(effect, self._kept.setdefault(run.plan.path.rpartition(".")[0], RunResources()))
        members = effect.effects if isinstance(effect, Gather) else (effect,)
        outcomes: tuple[Single, ...]
        if isinstance(effect, Gather):
            outcomes = self._perform_gather_members(run, members, effect)
        else:
            self._start_effects(run, members, None)
            outcomes = (self._budgets.perform(run, effect),)
        run.track_outcomes(members, outcomes)
        return Gathered(outcomes) if isinstance(effect, Gather) else outcomes[0]

    def _start_effects(self, run: WatchedRun, members: Sequence[Leaf], gather: Gather | None) -> None:
        """Reserve room for effects within the limits, and mark them as started; a divergence raises ``Violation``."""
        try:
            self._budgets.start_effects(run, members, gather)
        except ReplayDivergence as error:
            self._raise_divergence(error)
        self._world.effects.start_effects(run.plan.path, members)

    def _perform_gather_members(self, run: WatchedRun, members: Sequence[Leaf], gather: Gather) -> tuple[Single, ...]:
        """
        Return the outcomes of *members*, performed in a random order; after a stop or a failed child the rest is not started.

        Of each race one is drawn who wins it; the others are given up.
        """
        path, fail_fast = run.plan.path, gather.fail_fast
        order = [*range(len(members))]
        random = Random(f"{self._world.seed}:{path}:{members[0].seq}:order")  # noqa: S311
        random.shuffle(order)
        for race in gather.races:
            winner = random.randrange(*race)
            losers = [index for index in range(*race) if index != winner]
            self._world.effects.lost |= {(path, members[index].seq) for index in losers}
            order = [*[index for index in order if index not in losers], *losers]
        done: dict[int, Single] = {}
        stop: Stop | None = None
        failed = False
        for index in self._start_members_in_order(run, members, gather, order, done):
            member = members[index]
            if stop is not None:
                done[index] = attrs.evolve(stop, child=None, questions=())
                continue
            if failed and isinstance(member, Spawn):
                self._budgets.refuse_child_start(path, member)
            done[index] = outcome = self._budgets.perform(run, member, gather if gather.races else None)
            stop = outcome if isinstance(outcome, Stop) else None
            failed = failed or (fail_fast and has_failed(outcome))
        return tuple([done[index] for index in range(len(members))])

    def _start_members_in_order(
        self,
        run: WatchedRun,
        members: Sequence[Leaf],
        gather: Gather,
        order: Sequence[int],
        done: Mapping[int, Single],
    ) -> Iterator[int]:
        """
        Start as many members at a time as the limits allow, and yield their indexes in this *order* to be performed.

        After a stop among the outcomes in *done*, the rest is yielded without a start.
        """
        start, together = 0, gather if len(members) > 1 else None
        while start < len(members):
            if any(isinstance(outcome, Stop) for outcome in done.values()):
                yield from range(start, len(members))
                return
            end = start + self._budgets.count_startable(run, members[start:], together)
            self._start_effects(run, members[start:end], together)
            now = [index for index in order if start <= index < end]
            if self._budgets.has_bounded_calls(run.plan.path):
                # A child is driven to its end here, and its calls could not wait for one that comes behind it.
                now.sort(key=lambda index: not isinstance(members[index], CallModel))
            yield from now
            start = end

    def _check_log_and_crash(self, item: Item, outcome: Single) -> Single:
        """Check an outcome from the recorder and return it; log a new one, and crash if a crash is planned after it."""
        self.expect_recorder_not_failed()
        if self._world.effects.check_and_record_outcome(item, outcome):
            at, kinds = format_address(item.address), self._world.faults.get_known_faults(item.address)
            marks = f"   !! {', '.join(kinds)}" if kinds else ""
            asked, got = describe_effect(item.effect), describe_outcome(outcome)
            self._world.lines.append(f"{at:>8}  {asked}{marks}\n          -> {got}")
            self._crash_if_planned(item, "crash_after")
        return outcome

    def expect_recorder_not_failed(self) -> None:
        """Check that the recorder has not failed."""
        if self._run.writer.fatal is not None:
            self._raise_divergence(self._run.writer.fatal)

    def _raise_divergence(self, error: StepEngineError) -> NoReturn:
        """Raise ``Violation`` for a run that differs from its record."""
        raise_violation("I3", f"{self._world.effects.repetition_prefix} {error.message}")

    def _perform_with_faults(self, item: Item) -> Single:
        """Return the outcome of an effect with its planned faults; a planned crash before or during it raises ``_Crash``."""
        kinds = self._world.faults.find_or_draw_faults(item)
        self._world.effects.expect_performable(item)
        self._crash_if_planned(item, "crash")
        self._crash_if_planned(item, "lost_wake")
        made = self._performer.perform(item, kinds)
        self._crash_if_planned(item, "crash_inside")
        return made

    def _crash_if_planned(self, item: Item, kind: str) -> None:
        """End the simulated process if a fault of this *kind* is planned at an effect."""
        if self._world.faults.consume_planned_crash(item.address, kind):
            self._world.lines.append(f"{format_address(item.address):>8}  {describe_effect(item.effect)}   !! {kind}")
            raise _Crash


def _advance_machine(
    machine: Generator[Effect, Outcome | None, Finished], outcome: Outcome | None
) -> Effect | Finished:
    """Send *outcome* to a machine, and return its next effect or its end; its own error raises ``Violation``."""
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


def _draw_message(effect: AwaitMessage, random: Random) -> object:
    """Return a message that roughly matches the expected schema."""
    schema = effect.schema
    if schema is None:
        return random.choice(TEXTS)
    wanted = schema if isinstance(schema, Mapping) else schema.model_json_schema()
    return _Drawing(random, wanted.get("$defs", {}), ()).draw_value(wanted)
