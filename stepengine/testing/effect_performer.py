"""
The performer of effects in a simulated process: results are scripted or random, waits take no real time, children run at once.

This module does not know the journal, and does not check the values that the run receives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, cast

import attrs

from stepengine.data.effects import (
    ROWS,
    AskPerson,
    AwaitMessage,
    AwaitRuns,
    AwaitTime,
    CallBody,
    CallFunction,
    CallModel,
    CallTool,
    EndRuns,
    Leaf,
    RunInBackground,
    SendToRun,
    Spawn,
)
from stepengine.data.messages import UserMessage
from stepengine.data.outcomes import Failure, Single, Stop, Value
from stepengine.data.state import AgentState, ChildResult, RunStatus
from stepengine.data.tools import Yielding
from stepengine.errors import StepEngineError
from stepengine.machine import Finished
from stepengine.machine.plan import RunPlan
from stepengine.runtime.failfast import make_race_loss_outcome
from stepengine.runtime.performer import Item, child_path
from stepengine.testing.faults import change_outcome_by_faults, find_outcome_of_fault
from stepengine.testing.invariants import format_address
from stepengine.testing.performed_effects import EffectRecords, WorldClock
from stepengine.testing.simulated_children import SimulatedChildren, SimulatedMailbox

__tracebackhide__ = True  # a failed test ends at its author's line

MINUTES = 600_000
HOURS = 6 * 3_600_000


class OutcomeSource(Protocol):
    """A source of the outcomes of a simulated world."""

    @property
    def results(self) -> Mapping[str, Any]:
        """The scripted results, by name of a tool or of the function of a ``Perform``."""

    def create_outcome(self, path: str, effect: Leaf, now_ms: int) -> Single:
        """Return the outcome of *effect*. After a crash, the same effect has the same outcome."""


@attrs.frozen
class EffectPerformer:
    """
    Performs the effects of one simulated process.

    Attributes:
        clock: The clock of the world.
        effects: The effects performed so far.
        canned: The source of replies, results and answers.
        mailbox: The messages to runs.
        simulated_children: The background children of the process.
        plan_child: Plans the run of a child or of a tool's body, as the engine does.
        drive: Runs a planned run to its end.
    """

    clock: WorldClock
    effects: EffectRecords
    canned: OutcomeSource
    mailbox: SimulatedMailbox
    simulated_children: SimulatedChildren
    plan_child: Callable[..., tuple[RunPlan, AgentState]]
    drive: Callable[[RunPlan, AgentState], Finished]

    def perform(self, item: Item, kinds: Sequence[str]) -> Single:
        """Return the outcome of an effect with faults of these *kinds*, and with the messages that arrived for the run."""
        effect, at = item.effect, item.address
        self.clock.advance_past_effect(
            at, HOURS if "lost_wake" in kinds else MINUTES if {"slow", "late"} & {*kinds} else 1
        )
        now = self.clock.elapsed
        stopped = self.simulated_children.find_cancellation(*at) or self.simulated_children.find_child_stop()
        if stopped is not None and not isinstance(effect, RunInBackground) and not self.effects.is_recorded(at):
            return attrs.evolve(stopped, at=now)
        if at in self.effects.lost:
            return make_race_loss_outcome(item, now)
        made = next((o for kind in kinds if (o := find_outcome_of_fault(kind, effect, now)) is not None), None)
        if made is None:
            made = HAPPENS.get(type(effect), EffectPerformer._make_empty_outcome)(self, item)
        made = change_outcome_by_faults(kinds, effect, made)
        heard = self.mailbox.list_inputs_before_effect(*at)
        if heard and not isinstance(made, Stop):
            made = attrs.evolve(made, inputs=(*made.inputs, *heard))
        if "duplicate" in kinds and not isinstance(made, Stop):
            sent = UserMessage(f"sent twice during {format_address(at)}")
            return attrs.evolve(made, inputs=(sent, sent))
        return made

    def _get_canned_outcome(self, item: Item) -> Single:
        """Return the outcome that the source of the world has for an effect."""
        return self.canned.create_outcome(item.path, item.effect, self.clock.elapsed)

    def _make_empty_outcome(self, item: Item) -> Single:
        """Return the empty value of an effect's result type: ``""``, ``False`` or ``None``."""
        kind: Any = ROWS[type(item.effect)].outcome
        return Value(kind(), self.clock.elapsed)

    # --- waits --------------------------------------------------------------------------------------------------------

    def _perform_sleep(self, item: Item) -> Single:
        """Advance the clock to the end of the sleep, and return its empty outcome."""
        self._advance_clock_past_wait(item)
        return Value(None, self.clock.elapsed)

    def _perform_receive(self, item: Item) -> Single:
        """Return the next message; at a timeout, advance the clock and return None."""
        made = self.simulated_children.perform_receive(item, self.clock.elapsed)
        if isinstance(made, Value) and made.value is None:
            self._advance_clock_past_wait(item)
        return attrs.evolve(made, at=self.clock.elapsed)

    def _perform_wait(self, item: Item) -> Single:
        """Return the results of the children that have ended; advance the clock if the wait times out."""
        made = self.simulated_children.perform_wait(item, self.clock.elapsed)
        if isinstance(made, Value) and len(made.value.done) < cast("AwaitRuns", item.effect).need:
            self._advance_clock_past_wait(item)
        return attrs.evolve(made, at=self.clock.elapsed)

    def _advance_clock_past_wait(self, item: Item) -> None:
        """Advance the clock to the planned end of a wait."""
        effect = cast("AwaitTime", item.effect)
        self.clock.advance_to_wait_end(item.address, max(0, (effect.wakes or 0) - effect.asked))

    def _perform_send(self, item: Item) -> Single:
        """Send a message to a child, and return whether it is still running."""
        return Value(self.simulated_children.send_to_child(item), self.clock.elapsed)

    def _perform_cancel(self, item: Item) -> Single:
        """Cancel children, and return their results."""
        return attrs.evolve(self.simulated_children.perform_cancel(item), at=self.clock.elapsed)

    # --- runs ---------------------------------------------------------------------------------------------------------

    def _run_background_child(self, item: Item) -> Single:
        """Run a background child to its end, and return its result; one that was cancelled has ended."""
        finished = self.drive(*self.simulated_children.get_child_plan_and_state(item.path))
        child = finished.to_child_result()
        # One that is recorded to have been ended comes to that end, whatever stops it this time.
        is_cut = item.path in self.simulated_children.cut or self.effects.is_recorded((item.path, -1))
        if is_cut and finished.status in (RunStatus.SUSPENDED, RunStatus.CANCELLED):
            child = attrs.evolve(child, status=RunStatus.CANCELLED, questions=(), error=None)
            return Value(child, self.clock.elapsed)
        return self._find_stop(finished, child=child) or Value(child, self.clock.elapsed)

    def _run_yielding_tool_body(self, item: Item) -> Single:
        """Run the body of a tool that yields as a run of its own, and return the result of the call."""
        effect = cast("CallBody", item.effect)
        try:
            plan, state = self.plan_child(item.plan, effect, child_path(item.path, effect.seq))
        except StepEngineError as error:
            return Failure(error, self.clock.elapsed)
        finished = self.drive(plan, state)
        body = finished.to_body_end()
        if (stop := self._find_stop(finished, body=body)) is not None:
            return stop
        runs = cast("Yielding", item.plan.tools[effect.tool_name].runs)
        result = finished.to_call_result(runs, is_typed=effect.source != "model")
        return Value(result, self.clock.elapsed, body=body)

    def _perform_spawn(self, item: Item) -> Single:
        """Run a child to its end, or register one in the background; return its outcome."""
        effect = cast("Spawn", item.effect)
        try:
            plan, state = self.plan_child(item.plan, effect, child_path(item.path, effect.seq))
        except StepEngineError as error:
            if effect.is_background:
                return Failure(error, self.clock.elapsed)
            failed = ChildResult(agent_id=effect.agent_id, status=RunStatus.FAILED, error=error)
            return Value(failed, self.clock.elapsed)
        if effect.is_background:
            return Value(self.simulated_children.register_child(plan, state), self.clock.elapsed)
        finished = self.drive(plan, state)
        child = finished.to_child_result(is_inline=effect.is_inline)
        return self._find_stop(finished, child=child) or Value(child, self.clock.elapsed)

    def _find_stop(self, finished: Finished, **run: Any) -> Stop | None:
        """Return the stop of a run that was suspended, or cancelled with its whole tree; ``None`` for one that ended."""
        if finished.status is RunStatus.SUSPENDED:
            return Stop("suspended", self.clock.elapsed, questions=finished.pending, **run)
        return Stop("cancelled", self.clock.elapsed, **run) if finished.status is RunStatus.CANCELLED else None


HAPPENS: Mapping[type[Leaf], Callable[[EffectPerformer, Item], Single]] = {
    **dict.fromkeys((CallModel, CallTool, CallFunction, AskPerson), EffectPerformer._get_canned_outcome),  # noqa: SLF001 - its own table
    CallBody: EffectPerformer._run_yielding_tool_body,  # noqa: SLF001
    Spawn: EffectPerformer._perform_spawn,  # noqa: SLF001
    AwaitTime: EffectPerformer._perform_sleep,  # noqa: SLF001
    AwaitMessage: EffectPerformer._perform_receive,  # noqa: SLF001
    AwaitRuns: EffectPerformer._perform_wait,  # noqa: SLF001
    SendToRun: EffectPerformer._perform_send,  # noqa: SLF001
    EndRuns: EffectPerformer._perform_cancel,  # noqa: SLF001
    RunInBackground: EffectPerformer._run_background_child,  # noqa: SLF001
}
"""How an effect happens that gives more than an empty value."""
