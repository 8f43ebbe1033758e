"""
``simulate``: the whole machine in a synchronous, seeded world in which things go wrong.

No event loop, no model, no tool is run. What lives here takes the seeds, shrinks what fails and tells it;
world, faults, answers and checks stand in modules of their own.
"""

from __future__ import annotations

import copy
import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from random import Random
from typing import TYPE_CHECKING

import attrs
from attrs import frozen

from stepengine.data.definition import AgentDefinition
from stepengine.data.hooks import Hooks
from stepengine.data.limits import Limits
from stepengine.data.questions import AnswerLike
from stepengine.data.state import RunStatus
from stepengine.data.tools import ToolLike
from stepengine.errors import DataError
from stepengine.journal.history import History, parse_recorded_start
from stepengine.journal.sources import JournalLike, as_journal
from stepengine.machine import Finished
from stepengine.testing.faults import (
    CRASHES,
    FAULTS,
    KINDS,
    MEANINGS,
    ON_RECORD,
    Fault,
    RandomFaults,
    validate_fault_kind,
)
from stepengine.testing.invariants import (
    Violation,
    describe_effect,
    expect_same_end,
    format_address,
    raise_violation,
    remove_request_counts,
)
from stepengine.testing.recorded import RecordedOutcomes, RecordedRunIndex
from stepengine.testing.world import (
    GeneratedOutcomes,
    Invariant,
    Replies,
    SimulationSetting,
    World,
)
from stepengine.tools.agent_tools import BUILT_IN, iterate_reachable_tools
from stepengine.tools.definition import Tool

if TYPE_CHECKING:
    from stepengine.engine.catalog import Catalog

__tracebackhide__ = True  # a failed test ends at its author's line

TOOL_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
MAX_SHOWN = 100
MAX_SHRUNK = 5
REPEATED = 2
"""Every so many seeds the run is repeated over its records, which costs time; every run of an exhaustive simulation is."""
MAX_RECORDED, MAX_PLACES = 40, 200
"""Effects of a recorded run at which everything goes wrong once, and at how many places of a longer one."""
MAX_EFFECTS = 12
"""Effects of a run that is gone through exhaustively."""
RULES: Mapping[str, str] = {
    "I1": "every tool call has one result, its own, in call order",
    "I2": "effects are numbered 0, 1, 2, ... on every path",
    "I3": "the same answers lead to the same effects and the same end, after a crash and in every replay",
    "I4": "usage never shrinks, and an unknown cost stays unknown",
    "I5": "a state never changes after it was seen",
    "I6": "a started handler is closed once, before the end of its run is reported",
    "I7": "nothing happens after the end",
    "I8": "no limit is exceeded, and a run that was refused something reports it",
    "I9": "events come in the order of a step",
    "I10": "the usage of a run and of its children adds up",
    "I11": "a run that dies and is resumed ends as without a crash",
    "I12": "a stopped run ends as stopped, and its handler is closed and does not see the stop",
    "R3": "an effect that may have happened before a crash, and must not happen twice, is not repeated",
    "R1": "a run ends, and nothing that was sent to it is lost",
    "WT3": "no child in the background outlives the run that started it",
    "WT4": "the order in which children in the background end changes nothing, with orders=",
    "own": "the author's own rules always hold, with invariants=",
    "handler": "a handler raises no error of its own; list allowed errors with may_raise=(...,)",
}
"""The text of each invariant, for the message of a failure."""


@frozen
class Simulated:
    """
    The result of a simulation: its worlds and effects.

    Attributes:
        runs: The number of worlds: one per seed, or all worlds of an exhaustive simulation.
        effects: The number of performed effects.
        statuses: The number of root runs by status.
        faults: The number of faults by kind.
    """

    runs: int
    effects: int
    statuses: Mapping[RunStatus, int]
    faults: Mapping[str, int]


class SimulationFailed(AssertionError):
    """
    A run of a simulation violated an invariant.

    Attributes:
        seed: The seed of the run.
        faults: The shortest list of faults with which it still fails.
        row: The row that it violates, such as ``"I1"``.
    """

    def __init__(self, message: str, *, seed: int, faults: tuple[Fault, ...], row: str) -> None:
        super().__init__(message)
        self.seed = seed
        self.faults = faults
        self.row = row


def simulate(
    agent: AgentDefinition,
    seeds: Iterable[int] | None = range(100),
    *,
    prompt: str = "go",
    params: object = None,
    replies: Replies = None,
    tools: Iterable[ToolLike] = (),
    results: Mapping[str, object] | None = None,
    answers: Mapping[str, AnswerLike] | None = None,
    faults: Iterable[str | Fault] | None = None,
    agents: Iterable[AgentDefinition] = (),
    may_raise: tuple[type[BaseException], ...] = (),
    from_journal: JournalLike | None = None,
    invariants: Iterable[Invariant] = (),
    messages: Mapping[str, Sequence[object]] | None = None,
    orders: int = 0,
) -> Simulated:
    """
    Run *agent* once per seed in a world with failures, and check the invariants of every run.

    Nothing is performed: no model, tool or ``Perform`` function is called; children are run, in the same world. Runs are
    recorded, resumed and repeated by the recorder and the replayer that ship, over a journal in memory. Checked are: every
    call has one result and its own (I1), numbers (I2), a run does the same again, and nothing else, after a crash and, for
    every other seed, over its records alone (I3), nothing that must not happen twice does (R3), and it ends in the same way
    (I11), sums of usage (I4), old states stay as they were (I5), handlers are left once and in time (I6), nothing happens after
    the end (I7), limits of steps, tokens, cost, children and depth, where a token costs a millionth of a dollar (I8), the
    order of a step (I9), how a stopped run ends (I12), and that the handler lets out no error of its own.

    Args:
        agent: The agent.
        seeds: A run for each. ``None`` goes through everything that can happen once to a run of at most 12 effects: every
            kind of fault at every effect, and every two crashes.
        prompt: Its prompt.
        params: Its params.
        replies: What the model says: a list as for ``ScriptedModel``, after which it says "done"; a function of the request
            and a ``random.Random``; by default texts and calls of the offered tools are drawn.
        tools: Tools that agents name, for their schemas; one that is missing takes every input. Tools that no agent
            names and only handlers call, with ``include_tool_call=False``, are known when they are given here or in *results*.
        results: What tools and the functions of ``Perform`` give, by their names: a ``ToolResult``, a text, JSON, or a
            function of the tool's input, or of the arguments of the ``Perform``. By default a tool gives a text, and
            ``Perform`` gives ``None``.
        answers: Answers by the text of the question; the first option, or "yes", by default.
        faults: Kinds of faults to draw from, or the very faults that happen; an empty tuple for none. By default all that can
            be drawn.
        agents: Agents that are spawned by id.
        may_raise: Errors that handlers may let out.
        from_journal: A recorded run, which takes the place of *seeds*, *prompt* and *params*: what it recorded is what the
            world says, and at each of its effects in turn one thing goes wrong: the effect fails, takes too long, the process
            dies before or after it, a person answers the other way, the model says nothing or is cut off. Of a run of more
            than 40 effects 200 such places are drawn. Where the run leaves its record, *replies*, *results* and *answers*
            hold; without replies the model says "done".
        invariants: Functions of an ``AgentState`` and all events so far, called before each effect and at each end; one that
            returns ``False`` or raises ``AssertionError`` fails the simulation.
        messages: What runs are sent on each topic, in order. By default every ``Receive`` is given something that fits its schema,
            or sometimes nothing before its timeout.
        orders: In how many orders the children in the background end, for each seed. Nothing else goes wrong then, unless
            *faults* are given, and the run has to end with the same status and output in all of them.

    Raises:
        SimulationFailed: at the first seed that fails, with the shortest list of its faults, what happened, and the line
            that does it again.
        DataError: when *agent* is no definition, *seeds* is empty, or it is ``None`` and the run has more than 12 effects.
        DefinitionError: when agent and tools do not fit.
        JournalError: when *from_journal* cannot be read.
        InputError: when prompt or params do not fit.
    """
    known = [agent, *agents]
    history = None if from_journal is None else as_journal(from_journal).history()
    usual = () if orders else FAULTS if history is None else ON_RECORD
    given = tuple(usual if faults is None else faults)
    for definition in known:
        if not isinstance(definition, AgentDefinition):
            hint = "; simulate an agent that has the tool" if isinstance(definition, ToolLike) else ""
            msg = f"simulate takes an AgentDefinition, such as load_agent('reviewer') returns, not {definition!r}{hint}"
            raise DataError(msg)
    # Where a recorded run has left its record, what is drawn would say more of chance than of the agent.
    said: Replies = () if history is not None and replies is None else replies
    catalog = _make_catalog(known, tools, {**_collect_unlisted_tool_names(known, history), **(results or {})})
    ids = tuple([definition.id for definition in catalog.definitions if definition is not agent])
    setting = SimulationSetting(
        catalog=catalog,
        agent=agent,
        prompt=prompt,
        params=params,
        canned=lambda seed: GeneratedOutcomes(seed, said, results or {}, answers or {}, ids),
        may_raise=may_raise,
        invariants=tuple(invariants),
        messages=messages or {},
        is_same_in_any_order=bool(orders),
    )
    if history is not None:
        setting = _add_record_to_setting(setting, history)
    statuses: Counter[RunStatus] = Counter()
    happened: Counter[str] = Counter()
    runs = effects = 0
    for seed, world_faults, order in _repeat_in_orders(
        _iterate_seeds_and_faults(setting, seeds, given, history), orders
    ):
        world = World(setting, seed, world_faults, order)
        try:
            finished = _run_and_check_world(setting, world)
        except Violation as violation:
            raise _make_shrunk_failure(setting, seed, world, violation) from None
        runs += 1
        effects += len(world.effects.performed)
        statuses[finished.status] += 1
        happened.update([fault.kind for fault in world.faults.happened])
    if not runs:
        msg = "simulate got no seeds, so it ran nothing; the default is range(100)"
        raise DataError(msg)
    return Simulated(runs, effects, dict(statuses), dict(happened))


def _iterate_seeds_and_faults(
    setting: SimulationSetting, seeds: Iterable[int] | None, given: Sequence[str | Fault], history: History | None
) -> Iterator[tuple[int, RandomFaults | Sequence[Fault]]]:
    given_faults = [fault for fault in given if isinstance(fault, Fault)]
    kinds = [kind for kind in given if isinstance(kind, str)]
    if history is None and seeds is not None:
        return ((seed, given_faults or RandomFaults(seed, kinds)) for seed in seeds)
    worlds = _iterate_single_faults_and_crash_pairs if history is None else _iterate_faults_of_recorded_run
    return ((0, faults) for faults in worlds(setting, given_faults, [validate_fault_kind(kind) for kind in kinds]))


def _repeat_in_orders(
    worlds: Iterable[tuple[int, RandomFaults | Sequence[Fault]]], orders: int
) -> Iterator[tuple[int, RandomFaults | Sequence[Fault], int]]:
    """Yield each world once for each order. Random faults are copied, because a run uses them up."""
    return ((seed, copy.copy(faults), order) for seed, faults in worlds for order in range(max(1, orders)))


def _expect_same_in_any_order(first: World, first_end: Finished, world: World, finished: Finished) -> None:
    """
    Raise ``Violation`` unless a run has the same status and output in two orders of its children.

    Raises:
        Violation: with both orders, and the first effect in which the runs differ.
    """
    if (finished.status, finished.output) == (first_end.status, first_end.output):
        return
    raise_violation(
        "WT4",
        f"when children end in the order {', '.join(world.child_order)} the run is {finished.status.value} with the output "
        f"{finished.output!r}, in the order {', '.join(first.child_order)} {first_end.status.value} with {first_end.output!r}; "
        f"{_describe_first_difference(first, world)}",
    )


def _describe_first_difference(first: World, world: World) -> str:
    """Describe the first effect in which two runs differ, or that they differ in none."""
    before, now = first.effects.performed, world.effects.performed
    for at in sorted({*before, *now}, key=lambda at: (at[0].count(".") + bool(at[0]), at)):
        asked, other = before.get(at), now.get(at)
        if asked is None or other is None or describe_effect(asked[0]) != describe_effect(other[0]):
            said = ["nothing" if one is None else describe_effect(one[0]) for one in (other, asked)]
            return f"they differ at {format_address(at)}, which is {said[0]}, but was {said[1]}"
    return "they request the same effects, but the handler uses the results differently"


def _add_record_to_setting(setting: SimulationSetting, history: History) -> SimulationSetting:
    """Return a copy of *setting* with the recorded input, seed, limits and outcomes of a run."""
    opening, head, canned, record = (
        parse_recorded_start(history),
        history.head,
        setting.canned,
        RecordedRunIndex(history),
    )

    return attrs.evolve(
        setting,
        prompt=opening.prompt,
        params=opening.params,
        canned=lambda seed: RecordedOutcomes(record, canned(seed)),
        random_seed=None if head is None else head.seed,
        more={"previous": opening.previous, "limits": opening.limits},
    )


def _collect_unlisted_tool_names(agents: Iterable[AgentDefinition], history: History | None) -> dict[str, object]:
    """Return the names of tools that a recorded run called and that no agent lists, each with the value None."""
    if history is None:
        return {}
    names = [str(history.form(i)["tool_name"]) for i in history.intents.values() if i.type == "tool_call"]
    tools = [tool for agent in agents for tool in agent.tools]
    own = {tool.spec.name for tool in tools if isinstance(tool, ToolLike)}
    return dict.fromkeys([name for name in names if name not in own])


def _list_single_faults(base_world: World, kinds: Sequence[str]) -> list[Fault]:
    """Return one fault for each effect of *base_world* and each kind that fits the effect."""
    return [
        Fault(seq, kind, path)
        for (path, seq), (effect, _) in base_world.effects.performed.items()
        for kind in kinds
        if type(effect) in KINDS[kind]
    ]


def _iterate_faults_of_recorded_run(
    setting: SimulationSetting, given_faults: Sequence[Fault], kinds: Sequence[str]
) -> Iterator[Sequence[Fault]]:
    """Yield the faults of each world of a recorded run: the given ones, then one at each effect, or at a sample."""
    yield given_faults
    if given_faults or not kinds:
        return
    base_world = World(setting, 0, ())
    base_world.run()
    places = _list_single_faults(base_world, kinds)
    if len(base_world.effects.performed) > MAX_RECORDED and len(places) > MAX_PLACES:
        places = Random(0).sample(places, MAX_PLACES)  # noqa: S311
    for fault in places:
        yield [fault]


def _make_catalog(
    agents: Sequence[AgentDefinition], tools: Iterable[ToolLike], results: Mapping[str, object]
) -> Catalog:
    """Return a catalog of the agents and *tools*; tools that are only named by agents or *results* are stand-ins."""
    from stepengine.engine.catalog import Catalog

    family, met = [*agents], set[int]()
    for definition in family:
        met.add(id(definition))
        family += [a for a in definition.spawnable_agents if not isinstance(a, str) and id(a) not in met]
    named = [tool for definition in family for tool in definition.tools]
    own = [*tools, *[tool for tool in named if isinstance(tool, ToolLike)]]
    # What a tool carries is there as it is, whatever result is given for it.
    carried = {tool.spec.name for tool in iterate_reachable_tools(own)} - {tool.spec.name for tool in own}
    # A handler may call tools of the engine that its agent does not list: those that results are given for are there.
    wanted = [name for name in results if TOOL_NAME.fullmatch(name) and name not in carried]
    wanted += [tool for tool in named if isinstance(tool, str)]
    given: dict[str, ToolLike] = {name: Tool(name, "", {}, lambda _: None) for name in wanted if name not in BUILT_IN}
    given |= {tool.spec.name: tool for tool in tools}
    return Catalog(agents, given.values(), Hooks(), Limits())


def _run_and_check_world(setting: SimulationSetting, world: World) -> Finished:
    """Run *world* to its end. After crashes, compare the end with that of a run without crashes (I11)."""
    finished = world.run()
    if world.resumed and not world.effects.has_unknown:
        expected = _run_without_crash(setting, world)
        expect_same_end("I11", "after a crash", remove_request_counts(finished), remove_request_counts(expected))
    if world.seed % REPEATED == 0:
        world.check_replay(finished)
    if setting.is_same_in_any_order:
        _expect_same_in_any_order(*_run_in_first_order(setting, world), world, finished)
    return finished


def _run_in_first_order(setting: SimulationSetting, world: World) -> tuple[World, Finished]:
    """Return the run of *world* with the same faults in the first order, and its end. It is cached for the other orders."""
    faults = tuple(world.faults.happened)
    key = (world.seed, faults)
    if key not in setting.first:
        setting.first.clear()
        first = World(setting, world.seed, faults)
        setting.first[key] = (first, first.run())
    return setting.first[key]


def _run_without_crash(setting: SimulationSetting, world: World) -> Finished:
    """Return the end of the run without crashes. It is cached for exhaustive simulations."""
    faults = tuple([fault for fault in world.faults.happened if fault.kind not in CRASHES])
    key = (world.seed, faults, world.order)
    if key not in setting.undisturbed:
        setting.undisturbed.clear()
        setting.undisturbed[key] = World(setting, world.seed, faults, world.order).run()
    return setting.undisturbed[key]


def _iterate_single_faults_and_crash_pairs(
    setting: SimulationSetting, given_faults: Sequence[Fault], kinds: Sequence[str]
) -> Iterator[Sequence[Fault]]:
    """Yield the faults of each world: the given ones, then also each single fault at each effect, then each pair of crashes."""
    yield given_faults
    base_world = World(setting, 0, given_faults)
    base_world.run()
    if len(base_world.effects.performed) > MAX_EFFECTS:
        msg = (
            f"a run of agent {setting.agent.id!r} has {len(base_world.effects.performed)} effects without faults, but seeds=None "
            f"tries runs of at most {MAX_EFFECTS}; give a shorter conversation with replies=[...], or seeds=range(1_000)"
        )
        raise DataError(msg)
    single = _list_single_faults(base_world, kinds)
    for fault in single:
        yield [*given_faults, fault]
    for two in itertools.combinations([fault for fault in single if fault.kind in CRASHES], 2):
        yield [*given_faults, *two]


# --- what is told -------------------------------------------------------------------------------------------------------


def _make_shrunk_failure(setting: SimulationSetting, seed: int, world: World, violation: Violation) -> SimulationFailed:
    """Return the error for a seed that failed, with the fewest faults that still make it fail in the same way."""
    faults = tuple(world.faults.happened)
    for size in range(len(faults) if len(faults) <= MAX_SHRUNK else 0):
        for fewer in itertools.combinations(faults, size):
            again = World(setting, seed, fewer, world.order)
            try:
                _run_and_check_world(setting, again)
            except Violation as same:
                if same.row == violation.row:
                    return _make_simulation_error(setting, seed, fewer, again, same)
    return _make_simulation_error(setting, seed, faults, world, violation)


def _make_simulation_error(
    setting: SimulationSetting, seed: int, faults: tuple[Fault, ...], world: World, violation: Violation
) -> SimulationFailed:
    """Return the error with the broken rule, the faults, the last log lines, and the call that repeats the run."""
    listed = "".join(f"\n  {fault!r}: {MEANINGS[fault.kind]}" for fault in faults) or " none, it fails without faults"
    given = f"[{', '.join(map(repr, faults))}]" if faults else "()"
    dropped = len(world.lines) - MAX_SHOWN
    lines = [f"  ... {dropped} lines before"] * (dropped > 0) + world.lines[-MAX_SHOWN:]
    happened = "\n".join(lines) or "  nothing"
    hint = _format_hint(world, violation)
    msg = (
        f"agent {setting.agent.id!r} breaks {violation}\n"
        f"{violation.row} requires: {RULES[violation.row]}\n"
        f"seed: {seed}\nfaults (the fewest that cause it):{listed}\n"
        f"what happened (number of the effect, request, result):\n{happened}\n"
        f"{hint}to repeat it, with the other arguments unchanged: simulate(agent, seeds=[{seed}], faults={given})"
    )
    return SimulationFailed(msg, seed=seed, faults=faults, row=violation.row)


def _format_hint(world: World, violation: Violation) -> str:
    """Return a hint for the author of the agent, as a line; ``""`` if there is none."""
    if violation.row == "I3":
        return (
            "hint: a handler may depend only on its context and on the values sent to it; use ctx.random, ctx.now and, for "
            "everything else, Perform\n"
        )
    made_up = world.list_unscripted_names() if violation.row == "handler" else ()
    if not made_up:
        return ""
    example = f"results={{{made_up[0]!r}: ...}}"
    return f"hint: no results were given for {', '.join(map(repr, made_up))}, so they are made up; pass {example}\n"
