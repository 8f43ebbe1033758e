"""
``Stepper``: steps through a recorded run, one result at a time, and reports the position of each run of the tree.

It drives the machines of the run and of its children by itself: no event loop, no thread, no performer, and no copy of the
journal. Results come in the order in which they stand in the journal, those of the root and of children together; a
*position* is the number of results that were taken so far. What stands between two yields of author code runs again.

It goes forward only, because a generator cannot be copied; ``anew`` gives another one that shares what was read. Who wants
to go back walks again, or keeps steppers, or processes, that wait at positions on the way.
"""

from __future__ import annotations

import json
import linecache
from bisect import bisect_right
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from functools import partial
from types import FrameType, GeneratorType, TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, TypeAlias, cast

import attrs
from attrs import frozen

from stepengine.data.effects import (
    ROWS,
    RUNS,
    WAITS,
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
    summarize_effect,
)
from stepengine.data.functions import PACKAGE
from stepengine.data.hooks import HOOK_POINTS, Hooks
from stepengine.data.models import ModelRequest
from stepengine.data.outcomes import Failure, Gathered, Outcome, Single, Stop, Value
from stepengine.data.programs import ProgramVariables, RunningProgram
from stepengine.data.state import AgentState, ChildResult, RunStatus
from stepengine.data.tools import Yielding
from stepengine.data.transcript import Transcript
from stepengine.engine.options import AgentLike
from stepengine.errors import ReplayDivergence, StepEngineError
from stepengine.journal.divergence import find_waiting_location, make_divergence_error
from stepengine.journal.encoding import encode_effect
from stepengine.journal.history import History
from stepengine.journal.journaled_run import JournaledRun
from stepengine.journal.pending_items import open_questions
from stepengine.journal.recorded_part import NO_LEEWAY, AllowedDifferences, RecordedPart
from stepengine.journal.records import ROOT, Address, Intent, Result, format_address, get_start_address
from stepengine.journal.replayer import Replayer
from stepengine.journal.store import Journal
from stepengine.machine.plan import Finished, RunPlan
from stepengine.machine.run import Machine
from stepengine.machine.signals import belongs_to_caller
from stepengine.runtime.performer import Item, child_path, run_compute
from stepengine.runtime.questions import render_questions
from stepengine.tools.context import RunResources

if TYPE_CHECKING:
    from stepengine.engine.launcher import Launcher

FrameKind: TypeAlias = Literal["handler", "helper", "hook", "tool", "program", "package", "opaque"]
TOPS = ("handler", "hook", "tool")
MAX_FRAMES = 100
"""Handlers delegate a few levels deep; the bound ends a chain that a foreign object makes endless."""
SHOWN_CHARS = 200
"""About two lines for each effect in the list of a debugger."""


def _return_none() -> None:
    return None


@frozen(kw_only=True)
class Frame:
    """
    One frame of author code that waits.

    Attributes:
        function: The function's qualified name; of what is ``opaque``, the name of its type.
        file: Its file; ``""`` where there is none.
        line: The line that waits; 0 where there is none.
        source: The text of that line, as the file has it now; ``""`` where that cannot be read.
        locals: Its variables, a copy: the objects themselves.
        kind: ``handler``, ``hook`` and ``tool`` are the functions that the machine called, ``helper`` a generator that they wait for,
            ``program`` a program that a model wrote, ``package`` one of this package, ``opaque`` what cannot be looked into, such as
            an iterator.
        globals: What its code sees as globals.
        text: The whole text that *line* is one of, where it stands in no file: of a program.
        printed: Gives what a program has printed so far, for as long as it waits here; ``None`` where there is no sandbox that says so.
    """

    function: str
    file: str = ""
    line: int = 0
    source: str = ""
    locals: Mapping[str, Any] = attrs.field(factory=dict, repr=False)
    kind: FrameKind = "helper"
    globals: Mapping[str, Any] = attrs.field(factory=dict, eq=False, repr=False)
    text: str = attrs.field(default="", repr=False)
    printed: Callable[[], str | None] = attrs.field(default=_return_none, eq=False, repr=False)


@frozen
class HookCall:
    """
    One call of a hook, made again by the replay.

    Attributes:
        point: Its point, such as ``"pre_step"``.
        hook: Its name.
        said: What it returned: a ``Change``, a ``Decision``, or ``None``; the error, when it raised one.
    """

    point: str
    hook: str
    said: Any = None


@frozen(kw_only=True)
class Moment:
    """
    The state before the outcome at a position is sent: the waiting effect, its run and the author's frames.

    Attributes:
        position: How many results were taken.
        step: In which step of its run that is: the number of its model calls so far, this one included; 0 before the first.
        address: The address of the effect whose outcome comes next, such as ``"3.2#1"``; ``""`` after the last one.
        agent_id: The agent that waits for it.
        asked: What is asked for, in a line; as it is, with nothing taken out.
        effect: The effect; ``None`` after the last one.
        outcome: What is recorded of it; ``None`` where nothing is.
        state: The state of the run that waits.
        view: What its model is shown of its history.
        request: The last request that this run made, up to this effect; ``None`` before the first.
        frames: The author's frames, outermost first; none where nothing of the author's waits.
        location: ``file:line`` of the innermost of them that is the author's own.
        hooks: The hooks of this run that were called since its last outcome.
        at: Milliseconds since the root run was created, when the outcome came; the last known time where there is none.
    """

    position: int
    step: int
    address: str
    agent_id: str
    asked: str
    effect: Leaf | None
    outcome: Value | Failure | None
    state: AgentState
    view: Transcript
    request: ModelRequest | None
    frames: tuple[Frame, ...]
    location: str
    hooks: tuple[HookCall, ...]
    at: int


class Tape:
    """
    What all steppers of one journal share: its records, parsed once, and the order of its results.

    Args:
        journal: The journal; it is read once, and only read.

    Attributes:
        verified: Up to which position the effects were compared with the record.
    """

    def __init__(self, journal: Journal) -> None:
        self.journal = journal
        self.history: History = journal.history()
        # The order of results is that in which they really came, so siblings that ran at once are stepped through as it
        # happened. The number of a result in it is a place that one can go to.
        self.order: list[Address] = [
            (record.path, record.seq)
            for record in self.history.records
            if isinstance(record, Result) and (record.path, record.seq) != ROOT
        ]
        self.places = {address: position for position, address in enumerate(self.order)}
        self.steps: dict[str, list[int]] = {}
        for (path, seq), intent in self.history.intents.items():
            if intent.type == "model_call":
                self.steps.setdefault(path, []).append(seq)
        self.verified = 0

    def step_of(self, address: Address) -> int:
        """Return the step that an effect belongs to, as ``stepengine show`` numbers them; a child's own end, to its last."""
        path, seq = address
        steps = self.steps.get(path, ())
        return len(steps) if seq == -1 else bisect_right(steps, seq)

    def waiting(self) -> Address | None:
        """Return the first effect that waits where the record ends: a question that is open goes before all others."""
        history = self.history
        if history.is_complete:
            return None
        asked = [address for address, _ in open_questions(history).values()]
        left = [a for a, i in history.intents.items() if a not in history.results and a != ROOT and not i.begins_run]
        # What was cancelled with a run that has ended never finishes.
        return next((a for a in [*asked, *left] if not history.tree.has_ended(a[0])), None)


class _ReplayedRun:
    """One run of the tree: its machine, what that waits for, and the children that it started in the background."""

    __slots__ = (
        "background", "effect", "end", "finished", "hooks", "machine", "path", "plan", "request", "slots", "state", "told",
        "waits",
    )  # fmt: skip

    def __init__(self, path: str, plan: RunPlan, state: AgentState) -> None:
        # Those of which it was not told how they ended, by path, with that once they have.
        self.background: dict[str, ChildResult | None] = {}
        self.told: dict[str, ChildResult] = {}
        # Its own end, where it runs in the background.
        self.end = Item(path, RunInBackground(plan.definition.id, plan=plan, state=state), plan)
        self.path = path
        self.plan = plan
        self.state = state
        self.machine: Generator[Effect, Outcome | None, Finished] = None  # type: ignore[assignment]
        self.effect: Effect | None = None
        self.waits: dict[int, Item] = {}
        self.slots: dict[int, Single] = {}
        self.request: ModelRequest | None = None
        self.hooks: list[HookCall] = []
        self.finished: Finished | None = None


class Stepper:
    """
    Goes through a recorded run; one that is made stands at position 0. Make one with ``Engine.stepper``.

    Args:
        launcher: What makes the plan of the recorded run.
        tape: The record.
        agent: Stands in for the agent that the journal names.
        leeway: What the run may do differently.

    Attributes:
        position: How many results were taken.
        diverged: Why the run is not the recorded one any more; it stands at the effect that differs, and goes no further.

    Raises:
        AgentError: when the engine has no such agent.
        JournalError: when the journal is damaged, of a newer version, or holds no run.
        ReplayDivergence: when the run begins with something else than is recorded.
    """

    def __init__(
        self, launcher: Launcher, tape: Tape, agent: AgentLike | None = None, *, leeway: AllowedDifferences = NO_LEEWAY
    ) -> None:
        self.position = 0
        self.diverged: ReplayDivergence | None = None
        self._made_of = (launcher, tape, agent)
        self._leeway = leeway
        self._tape = tape
        self._at = 0
        session = JournaledRun.walk(tape.journal, tape.history, leeway=leeway)
        tree = launcher.again(session, agent=agent).tree
        self._services = tree.services
        self._writer = session.writer
        self._replayer: Replayer = cast("Replayer", session.replayer)
        self._past: RecordedPart = cast("RecordedPart", session.recorded_part)
        self._runs: dict[str, _ReplayedRun] = {}
        self._kept: dict[str, RunResources] = {}
        self._track_divergence(partial(self._start, tree.root.plan, tree.root.state, ""))

    def anew(self) -> Stepper:
        """
        Return another stepper at position 0, which shares what was read.

        Effects that one of them compared with the record are compared by their kind alone.
        """
        # To go back is to begin again: a generator can neither be copied nor turned round. What was read is shared, and
        # what was compared is not compared again, so that going back costs the machine's own work alone.
        return Stepper(*self._made_of, leeway=self._leeway)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close all handlers and hooks, children first, so that their ``finally`` blocks run; may be called twice."""
        self._close_runs("")

    def _close_runs(self, path: str) -> None:
        """Close a run and all below it."""
        # Children first, as in a live run: a parent's `finally` may rely on them being over.
        below = [known for known in self._runs if not path or known == path or known.startswith(f"{path}.")]
        for known in sorted(below, key=lambda path: path.count(".") + bool(path), reverse=True):
            self._runs.pop(known).machine.close()
            self._close_resources(known)

    def _close_resources(self, path: str) -> None:
        """End what was kept for a run that has ended."""
        kept = self._kept.pop(path, None)
        if kept is not None:
            kept.close()

    # --- places -------------------------------------------------------------------------------------------------------

    @property
    def journal(self) -> Journal:
        """The journal."""
        return self._tape.journal

    @property
    def history(self) -> History:
        """What is recorded."""
        return self._tape.history

    @property
    def kept(self) -> list[str]:
        """The addresses of changed model requests that got the recorded reply; see ``AllowedDifferences``."""
        return [format_address(note.path, note.seq) for note in self._replayer.acceptance.notes]

    @property
    def last(self) -> int:
        """The last position: the number of results in the journal, that of the root run apart."""
        return len(self._tape.order)

    @property
    def is_in_address_order(self) -> bool:
        """Whether the record stands in the order of addresses, as that of a test, so that siblings follow one another."""
        return self.journal.stable and any(path for path, _ in self._tape.order)

    def address_at(self, position: int) -> Address | None:
        """Return whose outcome comes next at a position; at the last one, what waits there, ``None`` when nothing does."""
        order = self._tape.order
        return order[position] if position < len(order) else self._tape.waiting()

    def position_of(self, path: str, seq: int) -> int | None:
        """Return the position before the outcome of an effect is sent; ``None`` when there is no such effect in the record."""
        known = self._tape.places.get((path, seq))
        return self.last if known is None and self._tape.waiting() == (path, seq) else known

    def step_at(self, position: int) -> int:
        """Return the step of the run that waits at a position; 0 before its first."""
        address = self.address_at(position)
        return self._tape.step_of(address) if address is not None else len(self._tape.steps.get("", ()))

    def position_of_step(self, step: int, path: str = "") -> int | None:
        """Return the position before the reply of a step of a run, from 1; ``None`` when it has no such step."""
        calls = self._tape.steps.get(path, ())
        return self.position_of(path, calls[step - 1]) if 0 < step <= len(calls) else None

    def steps(self, path: str = "") -> int:
        """Return how many steps a run has."""
        return len(self._tape.steps.get(path, ()))

    # --- going --------------------------------------------------------------------------------------------------------

    def advance(self) -> bool:
        """
        Take the next result; return whether there was one.

        Raises:
            ReplayDivergence: when the run does something else than is recorded then; it stands there, and stays.
        """
        if self.diverged is not None:
            raise self.diverged
        if self.position >= self.last:
            return False
        self.go(self.position + 1)
        return True

    def go(self, position: int) -> None:
        """Take results until so many were taken; raises as ``advance`` does."""
        if self.diverged is not None and self.position < position:
            raise self.diverged
        if self.position < (end := min(position, self.last)):
            self._track_divergence(partial(self._apply_results_until, end))

    def _apply_results_until(self, position: int) -> None:
        tape = self._tape
        order, take = tape.order, self._take
        try:
            while self.position < position:
                take(*order[self.position])
        finally:
            # What was answered was compared before.
            tape.verified = max(tape.verified, self.position)

    def _track_divergence(self, act: Callable[[], object]) -> None:
        try:
            act()
        except ReplayDivergence as error:
            self.diverged = error
            raise
        if self.position == self.last and (finished := self._runs[""].finished) is not None:
            unused = self._past.unused(self._runs[""].plan.definition.id, finished.error)
            if unused is not None and self.history.is_complete:
                self.diverged = unused
                raise unused

    def _take(self, path: str, seq: int) -> None:
        run = self._get_or_start_run(path)
        known = self.history.results[run.path, seq]
        if seq == -1:
            self._apply_background_end(run, known)
            self._count(known)
            return
        item = run.waits.get(seq)
        if item is None:
            raise self._error_for_absent(run, (run.path, seq))
        outcome = self._outcome(run, item, known)
        self._count(known)
        run.slots[seq] = outcome
        if len(run.slots) == len(run.waits):
            self._answer(run)

    def _outcome(self, run: _ReplayedRun, item: Item, known: Result) -> Single:
        """Return what is recorded of an effect, together with the runs that it is about."""
        effect = item.effect
        if isinstance(effect, Spawn) and effect.is_background:
            return self._of_start(run, item, known)
        if type(effect) in RUNS:
            return self._replay_child_end(item, known)
        outcome = self._replayer.answer(known, item)
        return self._add_child_results(run, item, outcome) if isinstance(effect, (AwaitRuns, EndRuns)) else outcome

    def _count(self, known: Result) -> None:
        self.position += 1
        self._at = max(self._at, known.at)

    def _error_for_absent(self, run: _ReplayedRun, address: Address) -> StepEngineError:
        """Return the error for a run that has ended, or waits for something else, where it was to take a result."""
        unused = self._past.unused(run.plan.definition.id, None if run.finished is None else run.finished.error)
        if unused is None:
            said = "the run does not wait for the result that is recorded here"
            location = find_waiting_location(run.machine)
            unused = make_divergence_error(self.history, address, "unused", asked=said, location=location)
        return self._writer.fail(unused)

    def _start(self, plan: RunPlan, state: AgentState, path: str) -> _ReplayedRun:
        run = self._runs[path] = _ReplayedRun(path, plan, state)
        if plan.hooks:
            run.plan = plan = attrs.evolve(plan, hooks=_with_recorded_calls(plan.hooks, run.hooks.append))
        run.machine = self._services.machine(plan, state)
        self._send(run, None)
        return run

    def _send(self, run: _ReplayedRun, outcome: Outcome | None) -> None:
        """Send an outcome to a machine, and let it go on to what it asks for next."""
        send = run.machine.send
        run.effect, run.waits, run.slots = None, {}, {}
        try:
            effect = send(outcome)
            while isinstance(effect, (Notify, Compute)):
                # What is to be worked out is worked out here and now: nobody else waits while somebody steps.
                kept = self._kept.setdefault(run.path.rpartition(".")[0], RunResources())
                effect = send(run_compute(effect, kept) if isinstance(effect, Compute) else None)
        except StopIteration as stop:
            run.finished = stop.value
            self._close_resources(run.path)
            return
        # A handler under a debugger may do what it likes, `sys.exit` included; whoever looks at it wants to go on
        # looking.
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt) or not belongs_to_caller(error):
                raise
            # What ends the program of who runs it, such as ``sys.exit``, ends the run, and nothing of who looks at it.
            run.finished = Finished(status=RunStatus.FAILED, state=_current_state(run), error=error)
            return
        run.effect = effect
        members = effect.effects if isinstance(effect, Gather) else (effect,)
        together = effect if isinstance(effect, Gather) and len(members) > 1 else None
        for member in cast("Sequence[Leaf]", members):
            item = run.waits[member.seq] = Item(run.path, member, run.plan, together)
            if isinstance(member, CallModel):
                run.request = member.request
            self._meet(item)

    def _meet(self, item: Item) -> None:
        """Compare an effect with the record; one that was compared before is only checked for its kind."""
        address = item.address
        place = self._tape.places.get(address)
        if (
            place is not None
            and place < self._tape.verified
            and self.history.intents[address].type == ROWS[type(item.effect)].kind
        ):
            self._past.use(address)
            return
        together = None if item.gather is None else item.gather.effects[0].seq
        self._replayer.meets(item, Intent(*address, encode_effect(item), gather=together))

    def _answer(self, run: _ReplayedRun) -> None:
        """Send a machine what it waits for."""
        run.hooks.clear()
        effect = run.effect
        outcomes = [run.slots[seq] for seq in run.waits]
        self._send(run, Gathered(tuple(outcomes)) if isinstance(effect, Gather) else outcomes[0])

    # --- children -----------------------------------------------------------------------------------------------------

    def _get_or_start_run(self, path: str) -> _ReplayedRun:
        """Return the run at a path; a child starts when somebody first wants to know of it."""
        # Started late, when its first result is due or somebody looks: a run of thousands of children is stepped
        # through with those alone that are under way.
        known = self._runs.get(path)
        if known is not None:
            return known
        above, seq = get_start_address(path)
        parent = self._get_or_start_run(above)
        item = parent.waits.get(seq)
        if item is None:
            raise self._error_for_absent(parent, (above, seq))
        plan, state = self._services.planner(parent.plan, item.effect, path)
        if isinstance(item.effect, Spawn) and item.effect.is_background:
            parent.background[path] = None
        elif isinstance(self._recorded_outcome((above, seq)), Failure):
            # Another member of its race won: nothing that it asks for then is recorded.
            self._replayer.ends.give_up(path)
        return self._start(plan, state, path)

    def _recorded_outcome(self, address: Address) -> Value | Failure | None:
        known = self.history.results.get(address)
        return None if known is None else self.history.outcome(known)

    def _of_start(self, run: _ReplayedRun, item: Item, known: Result) -> Single:
        """Return the outcome of a background start: the child's reference; the child is started to keep its plan."""
        refused = self._replayer.find_refused_outcome(item.address, item)
        if refused is not None:
            return refused
        path = child_path(item.path, item.effect.seq)
        if path not in run.background:
            try:
                self._get_or_start_run(path)
            except ReplayDivergence:
                raise
            except StepEngineError as error:
                confirmed = self._replayer.confirm(known, Failure(error, known.at), item)
                assert confirmed is not None  # noqa: S101 - nothing is performed, so nothing can be new
                return confirmed
        return self._replayer.answer(known, item)

    def _apply_background_end(self, run: _ReplayedRun, known: Result) -> None:
        """Apply the end of a background child, which is recorded at the child's own path."""
        parent = self._runs.get(get_start_address(run.path)[0])
        if parent is None or run.path not in parent.background:
            raise self._error_for_absent(run, (run.path, -1))
        ended = self._replayer.confirm(known, Value(self._finish_run(run).as_child(), known.at), run.end)
        assert ended is not None  # noqa: S101 - nothing is performed, so nothing can be new
        parent.background[run.path] = ended.value  # type: ignore[union-attr]  # how a run ended is a value
        self._close_runs(run.path)

    def _add_child_results(self, run: _ReplayedRun, item: Item, outcome: Value | Failure) -> Single:
        """Return the outcome of an effect about background children, with the results of the ended ones."""
        if not isinstance(outcome, Value):
            return outcome
        ended: dict[str, ChildResult] = {}
        for path in outcome.value.done:
            child = run.background.get(path) or run.told.get(path)
            if child is None:
                raise self._error_for_absent(run, item.address)
            ended[path] = run.told[path] = child
            run.background.pop(path, None)
        return attrs.evolve(outcome, value=attrs.evolve(outcome.value, ended=ended))

    def _replay_child_end(self, item: Item, known: Result) -> Single:
        """Replay a child, or a tool's body, to its end, and return its outcome, which is the recorded one."""
        effect, address = item.effect, item.address
        path = child_path(*address)
        refused = self._replayer.find_refused_outcome(address, item)
        if refused is not None:
            if (path, 0) in self.history.intents:
                # It had begun when another member of its race won, and did no more.
                self._get_or_start_run(path)
                self._close_runs(path)
            return refused
        try:
            run = self._get_or_start_run(path)
        except ReplayDivergence:
            raise
        except StepEngineError as error:
            if isinstance(effect, CallBody):
                raise
            child: ChildResult = ChildResult(agent_id=effect.agent_id, status=RunStatus.FAILED, error=error)  # type: ignore[union-attr]
            given = Value(child, known.at)
        else:
            given = _outcome_of_run(self._finish_run(run), item, known.at)
            del self._runs[path]
        confirmed = self._replayer.confirm(known, given, item)
        assert confirmed is not None  # noqa: S101 - nothing is performed, so nothing can be new
        return confirmed

    def _finish_run(self, run: _ReplayedRun) -> Finished:
        """Return the end of a run; one that waits where its record ends is stopped as it was when recorded."""
        while run.finished is None:
            for seq, item in run.waits.items():
                if seq not in run.slots:
                    run.slots[seq] = self._make_stop(item)
            self._answer(run)
        finished = run.finished
        if run.background:
            finished = finished.add_children([self._end_unreported_child(path, run) for path in run.background])
        run.background.clear()
        run.finished = finished
        return finished

    def _end_unreported_child(self, path: str, run: _ReplayedRun) -> ChildResult:
        """Return the end or suspension of a background child that its parent never received."""
        child = run.background[path]
        if child is not None:
            return child
        ended = self._finish_run(self._runs[path]).as_child()
        del self._runs[path]
        return ended

    def _make_stop(self, item: Item) -> Stop:
        address = item.address
        if isinstance(item.effect, AskPerson):
            return self._replayer.ends.stop_at(item.path, render_questions(item))
        is_background = isinstance(item.effect, Spawn) and item.effect.is_background
        if type(item.effect) not in RUNS or is_background or not self._replayer.has_begun(address):
            stop = self._replayer.ends.stop_at(item.path, (), waits=type(item.effect) in WAITS)
            return attrs.evolve(stop, begun=self._replayer.find_stopped_call(item))
        path = child_path(*address)
        ended = self._finish_run(self._get_or_start_run(path))
        del self._runs[path]
        if isinstance(item.effect, CallBody):
            return attrs.evolve(self._replayer.ends.stop_at(item.path, ended.pending), body=ended.as_body())
        child = ended.as_child(is_inline=cast("Spawn", item.effect).is_inline)
        return attrs.evolve(self._replayer.ends.stop_at(item.path, child.questions), child=child)

    # --- looking ------------------------------------------------------------------------------------------------------

    def moment(self) -> Moment:
        """Return the moment of the run whose outcome is next; raises as ``advance`` where it begins differently."""
        address = self._current_address()
        if address is None:
            return self._last_moment()
        run, effect = self._runs[address[0]], self.effect()
        known = self.history.results.get(address) if self.diverged is None else None
        state = _current_state(run)
        return Moment(
            position=self.position,
            step=self._tape.step_of(address),
            address=format_address(*address),
            agent_id=run.plan.definition.id,
            asked="" if effect is None else SAID.get(type(effect), summarize_effect)(effect),
            effect=effect,
            outcome=self.outcome(),
            state=state,
            view=state.view,
            request=run.request,
            frames=self.frames(),
            location=find_waiting_location(run.machine),
            hooks=tuple(run.hooks),
            at=self._at if known is None else known.at,
        )

    def frames(self) -> tuple[Frame, ...]:
        """Return the frames of the moment alone; raises as ``moment``."""
        return tuple(self._frames())

    def variables(self) -> Mapping[str, str]:
        """Return what programs have left in the run of the moment, by name and as texts; nothing while one waits; raises as ``moment``."""
        address = self._current_address()
        kept = self._kept.get("" if address is None else address[0])
        found = [] if kept is None else [one for one in kept if isinstance(one, ProgramVariables)]
        return {name: text for one in found for name, text in one.variables().items()}

    def outermost(self) -> Frame | None:
        """Return the frame of the handler or hook alone, if one waits; raises as ``moment``."""
        return next((frame for frame in self._frames() if frame.kind in TOPS), None)

    def _frames(self) -> Iterator[Frame]:
        address = self._current_address()
        return _frames(self._runs["" if address is None else address[0]].machine)

    def effect(self) -> Leaf | None:
        """Return the effect of the moment alone; raises as ``moment``."""
        address = self._current_address()
        if address is None:
            return None
        run, seq = self._runs[address[0]], address[1]
        item = run.end if seq == -1 else run.waits.get(seq)
        return None if item is None else item.effect

    def outcome(self) -> Value | Failure | None:
        """Return the recorded outcome of the moment alone; raises as ``moment``."""
        address = self._current_address()
        known = None if address is None or self.diverged is not None else self.history.results.get(address)
        return None if known is None else self.history.outcome(known)

    def _current_address(self) -> Address | None:
        """Return the address of the effect whose outcome comes next; its run is started if nothing did yet."""
        address = self._divergence_address() or self.address_at(self.position)
        if address is not None and address[0] not in self._runs:
            self._track_divergence(partial(self._get_or_start_run, address[0]))
        return address

    def _divergence_address(self) -> Address | None:
        """Return the address at which a run differs from its record; ``None`` if no run does and waits there."""
        if self.diverged is None:
            return None
        path, _, seq = self.diverged.address.rpartition("#")
        run = self._runs.get(path)
        return (path, int(seq)) if run is not None and int(seq) in run.waits else None

    def _last_moment(self) -> Moment:
        root = self._runs[""]
        state = root.finished.state if root.finished is not None else _current_state(root)
        return Moment(
            position=self.position,
            step=len(self._tape.steps.get("", ())),
            address="",
            agent_id=root.plan.definition.id,
            asked="nothing that is recorded"
            if root.finished is None
            else f"nothing more: {_describe_end(root.finished)}",
            effect=None,
            outcome=None,
            state=state,
            view=state.view,
            request=root.request,
            frames=tuple(_frames(root.machine)),
            location=find_waiting_location(root.machine),
            hooks=tuple(root.hooks),
            at=self.history.last_at,
        )

    @property
    def finished(self) -> Finished | None:
        """How the root run ended; ``None`` before it has."""
        return self._runs[""].finished

    def moments(self) -> Iterator[Moment]:
        """Give the moment at each position from here to the last one; raises as ``advance`` does."""
        yield self.moment()
        while self.advance():
            yield self.moment()


def _describe_end(finished: Finished) -> str:
    """Return how a run ended, in a line."""
    error, said = finished.error, f"the run has ended, {finished.status.value}"
    return said if error is None else f"{said} with {type(error).__name__}: {getattr(error, 'message', error)}"


def _outcome_of_run(ended: Finished, item: Item, at: int) -> Value:
    """Return the outcome of an effect from the end of the run that it started."""
    effect = item.effect
    if isinstance(effect, CallBody):
        runs = cast("Yielding", item.plan.tools[effect.tool_name].runs)
        return Value(ended.as_tool_result(runs, is_typed=effect.source != "model"), at, body=ended.as_body())
    return Value(ended.as_child(is_inline=cast("Spawn", effect).is_inline), at)


SAID: Mapping[type[Leaf], Callable[[Any], str]] = {
    CallModel: lambda effect: f"model {effect.request.model} with {len(effect.request.messages)} messages",
    CallTool: lambda effect: f"{effect.tool_name} {_shorten_json(effect.input)}",
    CallBody: lambda effect: f"{effect.tool_name} {_shorten_json(effect.input)}",
    Spawn: lambda effect: f"agent {effect.agent_id} {_shorten_json(effect.prompt)}",
    CallFunction: lambda effect: f"perform {effect.call.name}",
    AskPerson: lambda effect: " / ".join([question.text for question in effect.questions]),
    AwaitTime: lambda effect: (
        f"sleep until {effect.until}" if effect.seconds is None else f"sleep {effect.seconds:g} s"
    ),
    AwaitMessage: lambda effect: f"message on {effect.topic}",
    AwaitRuns: lambda effect: f"{effect.need} of the children at {', '.join(effect.children)}",
    SendToRun: lambda effect: f"to the child at {effect.child}: {_shorten_json(effect.value)}",
    EndRuns: lambda effect: f"the end of the children at {', '.join(effect.children)}",
    RunInBackground: lambda effect: f"the end of agent {effect.agent_id} in the background",
}
"""What an effect asks for, in a line, where it is not said by its row."""


def _shorten_json(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= SHOWN_CHARS else f"{text[:SHOWN_CHARS]}..."


# --- looking into machines ------------------------------------------------------------------------------------------


def _delegation_chain(generator: object) -> Iterator[object]:
    """Yield a generator, the one that it delegates to, and so on; the last may be any object."""
    for _ in range(MAX_FRAMES):
        if generator is None:
            return
        yield generator
        generator = getattr(generator, "gi_yieldfrom", None)


def _current_state(run: _ReplayedRun) -> AgentState:
    """Return the state of a run whose machine waits, or has ended."""
    if run.finished is not None:
        return run.finished.state
    return run.machine.state if isinstance(run.machine, Machine) else run.state


def _frames(machine: object) -> Iterator[Frame]:
    """Give the frames of the author's generator that a machine waits for: of a hook, where one was called."""
    if not isinstance(machine, Machine) or not machine.authors:
        return
    author = machine.authors[-1]
    top: FrameKind = author.by
    program = author.program
    for generator in _delegation_chain(author.steps):
        frame: FrameType | None = getattr(generator, "gi_frame", None)
        if frame is None:
            yield Frame(function=type(generator).__name__, kind="opaque")
            return
        if program is not None and program.file:
            yield _frame_of_program(program, frame.f_code.co_qualname, "handler")
            return
        file, is_ours = frame.f_code.co_filename, frame.f_code.co_filename.startswith(PACKAGE)
        kind: FrameKind = "package" if is_ours and not file.startswith(f"{PACKAGE}_agents") else top
        yield Frame(
            function=frame.f_code.co_qualname,
            file=file,
            line=frame.f_lineno,
            source=linecache.getline(file, frame.f_lineno).rstrip(),
            locals=dict(frame.f_locals),
            kind=kind,
            globals=frame.f_globals,
        )
        if kind == "package" and program is not None and program.line:
            yield _frame_of_program(program, "program", "program")
            program = None
        top = top if kind == "package" and top != "handler" else "helper"


def _frame_of_program(program: RunningProgram, function: str, kind: FrameKind) -> Frame:
    """Return where a program waits: a handler in the sandbox, which has a file, or what a model wrote."""
    lines = program.code.split("\n")
    return Frame(
        function=function,
        file=program.file,
        line=program.line,
        source=lines[program.line - 1].rstrip() if 0 < program.line <= len(lines) else "",
        kind=kind,
        text="" if program.file else program.code,
        printed=program.printed,
    )


# --- noting hooks ---------------------------------------------------------------------------------------------------


def _with_recorded_calls(hooks: Hooks, note: Callable[[HookCall], None]) -> Hooks:
    """Return hooks that behave like *hooks* and report each call with its return value to *note*."""
    points = {
        point: tuple([_RecordedHook(hook, point, note) for hook in hooks.get_hooks(point)]) for point in HOOK_POINTS
    }
    return Hooks(**points)


class _RecordedHook:
    """A hook that reports its return values; it has the original's name and place, which stand in messages."""

    def __init__(self, hook: Callable[..., object], point: str, note: Callable[[HookCall], None]) -> None:
        self._hook = hook
        self._point = point
        self._note = note

    def __call__(self, *args: object) -> Any:
        try:
            said = self._hook(*args)
        except BaseException as error:
            self._record_return(error)
            raise
        return self._run_and_record(said) if isinstance(said, GeneratorType) else self._record_return(said)

    def _run_and_record(self, steps: Generator[object, Any, object]) -> Generator[object, Any, object]:
        said = yield from steps
        return self._record_return(said)

    def _record_return(self, said: object) -> object:
        # A hook of the engine's own that changed nothing is no part of what an author wrote.
        is_ours = str(getattr(self._hook, "__module__", "")).startswith("stepengine.")
        if said is not None or not is_ours:
            self._note(HookCall(self._point, self.__qualname__, said))
        return said

    def __getattr__(self, name: str) -> Any:
        if name == "__qualname__":
            return getattr(self._hook, name, type(self._hook).__qualname__)
        return getattr(self._hook, name)

    def __repr__(self) -> str:
        return repr(self._hook)
