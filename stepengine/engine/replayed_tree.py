"""
``ReplayedTree``: the machines of a recorded run and of its children, to which recorded results are sent one by one.

No event loop, no thread, no performer. The code between two yields of an author runs again; everything else comes from the record.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from types import GeneratorType
from typing import TYPE_CHECKING, Any, cast

import attrs

from stepengine.data.effects import (
    ROWS,
    RUNS,
    WAITS,
    AskPerson,
    AwaitRuns,
    CallBody,
    CallModel,
    Compute,
    Effect,
    EndRuns,
    Gather,
    Leaf,
    Notify,
    RunInBackground,
    Spawn,
)
from stepengine.data.hooks import HOOK_POINTS, Hooks
from stepengine.data.models import ModelRequest
from stepengine.data.outcomes import Failure, Gathered, Outcome, Single, Stop, Value
from stepengine.data.programs import ProgramVariables
from stepengine.data.state import AgentState, ChildResult, RunStatus
from stepengine.data.tools import Yielding
from stepengine.engine.moments import HookCall
from stepengine.engine.tape import Tape
from stepengine.errors import ReplayDivergence, StepEngineError
from stepengine.journal.divergence import find_waiting_location, make_divergence_error
from stepengine.journal.encoding import encode_effect
from stepengine.journal.records import Address, Intent, Result, format_address, get_starter_address
from stepengine.machine.plan import Finished, RunPlan
from stepengine.machine.run import Machine
from stepengine.machine.signals import belongs_to_caller
from stepengine.runtime.performer import Item, child_path, run_compute
from stepengine.runtime.questions import render_questions
from stepengine.tools.context import RunResources

if TYPE_CHECKING:
    from stepengine.journal.journaled_run import JournaledRun
    from stepengine.journal.recorded_part import RecordedPart
    from stepengine.journal.replayer import Replayer
    from stepengine.runtime.services import Services


class ReplayedRun:
    """
    One run of the tree: its machine, the effects that the machine waits for, and its background children.

    Attributes:
        path: Its path in the tree.
        plan: Its plan, with hooks that record their calls.
        machine: Its machine.
        effect: The effect that the machine waits for, or a ``Gather`` of several; ``None`` once the machine has ended.
        waits: The members of *effect*, by their numbers.
        slots: The outcomes of these that are known by now.
        request: Its last model request.
        hooks: The calls of hooks since its last outcome.
        background: Background children whose ends it did not receive yet, by path, with these ends once they are known.
        reported: The ends that it received.
        end: The effect for its own end, if it runs in the background.
        finished: How it ended; ``None`` before.
    """

    __slots__ = (
        "_start_state", "background", "effect", "end", "finished", "hooks", "machine", "path", "plan", "reported", "request", "slots",
        "waits",
    )  # fmt: skip

    def __init__(self, path: str, plan: RunPlan, state: AgentState) -> None:
        self.background: dict[str, ChildResult | None] = {}
        self.reported: dict[str, ChildResult] = {}
        self.end = Item(path, RunInBackground(plan.agent.definition.id, plan=plan, state=state), plan)
        self.path = path
        self.plan = plan
        self._start_state = state
        self.machine: Generator[Effect, Outcome | None, Finished] = None  # type: ignore[assignment]
        self.effect: Effect | None = None
        self.waits: dict[int, Item] = {}
        self.slots: dict[int, Single] = {}
        self.request: ModelRequest | None = None
        self.hooks: list[HookCall] = []
        self.finished: Finished | None = None

    @property
    def state(self) -> AgentState:
        """Its state now, or at its end."""
        if self.finished is not None:
            return self.finished.state
        return self.machine.state if isinstance(self.machine, Machine) else self._start_state


class ReplayedTree:
    """
    Sends recorded results to the machines of a run tree, and compares their effects with the record.

    Args:
        tape: The record.
        session: The journaled run, which compares effects with the record.
        services: Makes machines, and plans children.

    Attributes:
        runs: The root and the children that have started and whose ends were not applied, by path.
        position: The number of results that were applied.
        at: The time of the latest of them, in milliseconds since the root run was created.
    """

    def __init__(self, tape: Tape, session: JournaledRun, services: Services) -> None:
        self.runs: dict[str, ReplayedRun] = {}
        self.position = 0
        self.at = 0
        self._tape = tape
        self._history = tape.history
        self._services = services
        self._writer = session.writer
        self._replayer = cast("Replayer", session.replayer)
        self._recorded_part = cast("RecordedPart", session.recorded_part)
        self._resources: dict[str, RunResources] = {}

    def start_run(self, plan: RunPlan, state: AgentState, path: str) -> ReplayedRun:
        """Start a run, and let its machine continue to its first effect."""
        run = self.runs[path] = ReplayedRun(path, plan, state)
        if plan.agent.hooks:
            agent = attrs.evolve(plan.agent, hooks=_with_recorded_calls(plan.agent.hooks, run.hooks.append))
            run.plan = plan = attrs.evolve(plan, agent=agent)
        run.machine = self._services.machine(plan, state)
        self._send_to_machine(run, None)
        return run

    def get_or_start_run(self, path: str) -> ReplayedRun:
        """Return the run at a path; a child starts when its first result or its state is needed."""
        # Started late, when its first result is due or somebody looks: a run of thousands of children is stepped
        # through with those alone that are under way.
        known = self.runs.get(path)
        if known is not None:
            return known
        above, seq = get_starter_address(path)
        parent = self.get_or_start_run(above)
        item = parent.waits.get(seq)
        if item is None:
            raise self._make_unexpected_result_error(parent, (above, seq))
        plan, state = self._services.planner(parent.plan, item.effect, path)
        known_end = self._history.results.get((above, seq))
        if isinstance(item.effect, Spawn) and item.effect.is_background:
            parent.background[path] = None
        elif known_end is not None and isinstance(self._history.outcome(known_end), Failure):
            # Another member of its race won: nothing that it asks for then is recorded.
            self._replayer.ends.mark_race_loser(path)
        return self.start_run(plan, state, path)

    def apply_results_until(self, position: int) -> None:
        """
        Send results to the machines until *position* of them were applied.

        Raises:
            ReplayDivergence: when a run does something else than is recorded.
        """
        tape = self._tape
        try:
            while self.position < position:
                self._apply_result(*tape.order[self.position])
        finally:
            # Effects with an applied result were compared before.
            tape.verified = max(tape.verified, self.position)

    def find_unused_record_error(self) -> ReplayDivergence | None:
        """Return the error for records that the ended root run did not reach; ``None`` before its end, or if it reached all."""
        if self.position < self._tape.last_position or not self._history.is_complete:
            return None
        root = self.runs[""]
        return (
            None
            if root.finished is None
            else self._recorded_part.find_unused_difference(root.plan.agent.definition.id, root.finished.error)
        )

    def list_accepted_addresses(self) -> list[str]:
        """Return the addresses of the effects and ends that differ from the record and were accepted; see ``AllowedDifferences``."""
        return [format_address(note.path, note.seq) for note in self._replayer.acceptance.notes]

    def get_program_variables(self, path: str) -> dict[str, str]:
        """Return the variables that programs have left in a run, as texts by name."""
        found = [one for one in self._resources.get(path, ()) if isinstance(one, ProgramVariables)]
        return {name: text for one in found for name, text in one.variables().items()}

    def close(self, path: str = "") -> None:
        """Close the machines of a run and of all below it, children first, so that their ``finally`` blocks run."""
        # As in a live run: a parent's `finally` may rely on its children having ended.
        below = [known for known in self.runs if not path or known == path or known.startswith(f"{path}.")]
        for known in sorted(below, key=lambda path: path.count(".") + bool(path), reverse=True):
            self.runs.pop(known).machine.close()
            self._close_resources(known)

    def _close_resources(self, path: str) -> None:
        """Close the objects that programs left in an ended run."""
        kept = self._resources.pop(path, None)
        if kept is not None:
            kept.close_without_waiting()

    # --- results ------------------------------------------------------------------------------------------------------

    def _apply_result(self, path: str, seq: int) -> None:
        """Apply one recorded result. A run continues once all effects that it waits for have their outcomes."""
        run = self.get_or_start_run(path)
        known = self._history.results[run.path, seq]
        if seq == -1:
            self._apply_background_end(run, known)
            self._advance_position(known)
            return
        item = run.waits.get(seq)
        if item is None:
            raise self._make_unexpected_result_error(run, (run.path, seq))
        outcome = self._replay_outcome(run, item, known)
        self._advance_position(known)
        run.slots[seq] = outcome
        if len(run.slots) == len(run.waits):
            self._send_outcomes(run)

    def _advance_position(self, recorded_result: Result) -> None:
        """Count a result as applied, and advance the time to it."""
        self.position += 1
        self.at = max(self.at, recorded_result.at)

    def _replay_outcome(self, run: ReplayedRun, item: Item, recorded_result: Result) -> Single:
        """Return the recorded outcome of an effect; replay the child runs that it starts or waits for."""
        effect = item.effect
        if isinstance(effect, Spawn) and effect.is_background:
            return self._replay_background_start(run, item, recorded_result)
        if isinstance(effect, RUNS):
            return self._replay_child_end(item, recorded_result)
        outcome = self._replayer.answer_from_record(recorded_result, item)
        return self._add_child_results(run, item, outcome) if isinstance(effect, (AwaitRuns, EndRuns)) else outcome

    def _make_unexpected_result_error(self, run: ReplayedRun, address: Address) -> StepEngineError:
        """Return the error for a recorded result that a run does not wait for."""
        unused = self._recorded_part.find_unused_difference(
            run.plan.agent.definition.id, None if run.finished is None else run.finished.error
        )
        if unused is None:
            said = "the run does not wait for the recorded result"
            location = find_waiting_location(run.machine)
            unused = make_divergence_error(self._history, address, "unused", problem=said, location=location)
        return self._writer.keep_first_fatal_error(unused)

    def _send_outcomes(self, run: ReplayedRun) -> None:
        """Send the outcomes of all waiting effects to the machine of a run."""
        run.hooks.clear()
        effect = run.effect
        outcomes = [run.slots[seq] for seq in run.waits]
        self._send_to_machine(run, Gathered(tuple(outcomes)) if isinstance(effect, Gather) else outcomes[0])

    def _send_to_machine(self, run: ReplayedRun, outcome: Outcome | None) -> None:
        """Send an outcome to a machine, run it to its next effect or its end, and compare this effect with the record."""
        run.effect, run.waits, run.slots = None, {}, {}
        try:
            effect = run.machine.send(outcome)
            while isinstance(effect, (Notify, Compute)):
                # A computation runs here at once: no other run waits while a debugger steps.
                kept = self._resources.setdefault(run.path.rpartition(".")[0], RunResources())
                effect = run.machine.send(run_compute(effect, kept) if isinstance(effect, Compute) else None)
        except StopIteration as stop:
            run.finished = stop.value
            self._close_resources(run.path)
            return
        # An error that would end the caller's program, such as `sys.exit`, ends only the run: a debugger goes on.
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt) or not belongs_to_caller(error):
                raise
            run.finished = Finished(status=RunStatus.FAILED, state=run.state, error=error)
            return
        run.effect = effect
        members = effect.effects if isinstance(effect, Gather) else (effect,)
        together = effect if isinstance(effect, Gather) and len(members) > 1 else None
        for member in cast("Sequence[Leaf]", members):
            item = run.waits[member.seq] = Item(run.path, member, run.plan, together)
            if isinstance(member, CallModel):
                run.request = member.request
            self._compare_with_record(item)

    def _compare_with_record(self, item: Item) -> None:
        """Compare an effect with the record; for an effect that was compared before, compare only its kind."""
        address = item.address
        position = self._tape.positions.get(address)
        if (
            position is not None
            and position < self._tape.verified
            and self._history.intents[address].type == ROWS[type(item.effect)].kind
        ):
            self._recorded_part.mark_used(address)
            return
        together = None if item.gather is None else item.gather.effects[0].seq
        self._replayer.match_with_record(item, Intent(*address, encode_effect(item), gather=together))

    # --- children -----------------------------------------------------------------------------------------------------

    def _replay_background_start(self, run: ReplayedRun, item: Item, recorded_result: Result) -> Single:
        """Start a recorded background child and return the outcome of its start, a reference to it."""
        refused = self._replayer.consume_unstarted_outcome(item.address, item)
        if refused is not None:
            return refused
        path = child_path(item.path, item.effect.seq)
        if path not in run.background:
            try:
                self.get_or_start_run(path)
            except ReplayDivergence:
                raise
            except StepEngineError as error:
                return self._confirm_child_outcome(recorded_result, Failure(error, recorded_result.at), item)
        return self._replayer.answer_from_record(recorded_result, item)

    def _apply_background_end(self, run: ReplayedRun, recorded_result: Result) -> None:
        """Apply the end of a background child, which is recorded at the child's own path."""
        parent = self.runs.get(get_starter_address(run.path)[0])
        if parent is None or run.path not in parent.background:
            raise self._make_unexpected_result_error(run, (run.path, -1))
        ended = self._confirm_child_outcome(
            recorded_result, Value(self._finish_run(run).to_child_result(), recorded_result.at), run.end
        )
        parent.background[run.path] = ended.value  # type: ignore[union-attr]  # how a run ended is a value
        self.close(run.path)

    def _add_child_results(self, run: ReplayedRun, item: Item, outcome: Value | Failure) -> Single:
        """Return the outcome of an effect about background children, with the results of the ended ones."""
        if not isinstance(outcome, Value):
            return outcome
        ended: dict[str, ChildResult] = {}
        for path in outcome.value.done:
            child = run.background.get(path) or run.reported.get(path)
            if child is None:
                raise self._make_unexpected_result_error(run, item.address)
            ended[path] = run.reported[path] = child
            run.background.pop(path, None)
        return attrs.evolve(outcome, value=attrs.evolve(outcome.value, ended=ended))

    def _replay_child_end(self, item: Item, recorded_result: Result) -> Single:
        """Replay a child or tool body to its end, and return its recorded outcome."""
        effect, address = item.effect, item.address
        path = child_path(*address)
        refused = self._replayer.consume_unstarted_outcome(address, item)
        if refused is not None:
            if (path, 0) in self._history.intents:
                # It had begun when another member of its race won, and did no more.
                self.get_or_start_run(path)
                self.close(path)
            return refused
        try:
            run = self.get_or_start_run(path)
        except ReplayDivergence:
            raise
        except StepEngineError as error:
            if isinstance(effect, CallBody):
                raise
            child: ChildResult = ChildResult(agent_id=effect.agent_id, status=RunStatus.FAILED, error=error)  # type: ignore[union-attr]
            given = Value(child, recorded_result.at)
        else:
            given = _outcome_from_run_end(self._finish_run(run), item, recorded_result.at)
            del self.runs[path]
        return self._confirm_child_outcome(recorded_result, given, item)

    def _confirm_child_outcome(self, recorded_result: Result, outcome: Value | Failure, item: Item) -> Single:
        """Return the recorded outcome of a child run, if *outcome* is the same; raise ``ReplayDivergence`` if not."""
        confirmed = self._replayer.confirm_child_end(recorded_result, outcome, item)
        assert confirmed is not None  # noqa: S101 - nothing is performed, so nothing can be new
        return confirmed

    def _finish_run(self, run: ReplayedRun) -> Finished:
        """Continue a run to its end and return the end. Effects without a recorded result are stopped as when recorded."""
        while run.finished is None:
            for seq, item in run.waits.items():
                if seq not in run.slots:
                    run.slots[seq] = self._make_recorded_stop(item)
            self._send_outcomes(run)
        finished = run.finished
        if run.background:
            finished = finished.with_children([self._finish_unreceived_child(path, run) for path in run.background])
        run.background.clear()
        run.finished = finished
        return finished

    def _finish_unreceived_child(self, path: str, run: ReplayedRun) -> ChildResult:
        """Return the end or suspension of a background child that its parent never received."""
        child = run.background[path]
        if child is not None:
            return child
        ended = self._finish_run(self.runs[path]).to_child_result()
        del self.runs[path]
        return ended

    def _make_recorded_stop(self, item: Item) -> Stop:
        """Return the stop of an effect without a recorded result; a child or tool body is first replayed to its own stop."""
        address = item.address
        if isinstance(item.effect, AskPerson):
            return self._replayer.ends.make_record_end_stop(item.path, render_questions(item))
        is_background = isinstance(item.effect, Spawn) and item.effect.is_background
        if not isinstance(item.effect, RUNS) or is_background or not self._replayer.has_recorded_progress(address):
            stop = self._replayer.ends.make_record_end_stop(item.path, (), waits=isinstance(item.effect, WAITS))
            return attrs.evolve(stop, begun=self._replayer.find_stopped_call_usage(item))
        path = child_path(*address)
        ended = self._finish_run(self.get_or_start_run(path))
        del self.runs[path]
        if isinstance(item.effect, CallBody):
            return attrs.evolve(
                self._replayer.ends.make_record_end_stop(item.path, ended.pending), body=ended.to_body_end()
            )
        child = ended.to_child_result(is_inline=cast("Spawn", item.effect).is_inline)
        return attrs.evolve(self._replayer.ends.make_record_end_stop(item.path, child.questions), child=child)


def _outcome_from_run_end(ended: Finished, item: Item, at: int) -> Value:
    """Return the outcome of an effect from the end of the run that it started."""
    effect = item.effect
    if isinstance(effect, CallBody):
        runs = cast("Yielding", item.plan.tools[effect.tool_name].runs)
        return Value(ended.to_call_result(runs, is_typed=effect.source != "model"), at, body=ended.to_body_end())
    return Value(ended.to_child_result(is_inline=cast("Spawn", effect).is_inline), at)


# --- recorded hooks -------------------------------------------------------------------------------------------------


def _with_recorded_calls(hooks: Hooks, record_call: Callable[[HookCall], None]) -> Hooks:
    """Return hooks that behave like *hooks* and report each call with its return value to *record_call*."""
    points = {
        point: tuple([_RecordedHook(hook, point, record_call) for hook in hooks.get_hooks(point)])
        for point in HOOK_POINTS
    }
    return Hooks(**points)


class _RecordedHook:
    """A hook that reports its return values; it has the original's name and location, which messages contain."""

    def __init__(self, hook: Callable[..., object], point: str, record_call: Callable[[HookCall], None]) -> None:
        self._hook = hook
        self._point = point
        self._record_call = record_call

    def __call__(self, *args: object) -> Any:
        try:
            returned = self._hook(*args)
        except BaseException as error:
            self._report_return(error)
            raise
        return (
            self._run_and_report_return(returned)
            if isinstance(returned, GeneratorType)
            else self._report_return(returned)
        )

    def _run_and_report_return(self, steps: Generator[object, Any, object]) -> Generator[object, Any, object]:
        returned = yield from steps
        return self._report_return(returned)

    def _report_return(self, returned: object) -> object:
        """Report a return value or error and return it; ``None`` from a hook of this package is not reported."""
        # A hook of the engine's own that changed nothing is no part of what an author wrote.
        is_ours = str(getattr(self._hook, "__module__", "")).startswith("stepengine.")
        if returned is not None or not is_ours:
            self._record_call(HookCall(self._point, self.__qualname__, returned))
        return returned

    def __getattr__(self, name: str) -> Any:
        if name == "__qualname__":
            return getattr(self._hook, name, type(self._hook).__qualname__)
        return getattr(self._hook, name)

    def __repr__(self) -> str:
        return repr(self._hook)
