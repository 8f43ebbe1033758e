"""
``Stepper``: steps through a recorded run, one result at a time, and reports the state of the run that the next result is for.

``Tape`` has the positions in the record, and ``ReplayedTree`` the machines; a ``Stepper`` moves one through the other and looks at both.

It goes forward only, because a generator cannot be copied. To go back, start again with ``copy_at_start``, or have steppers or processes that
wait at earlier positions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Self

from stepengine.data.effects import Leaf
from stepengine.data.outcomes import Failure, Value
from stepengine.engine.moments import TOPS, Frame, Moment, describe_end, format_effect_request, iterate_author_frames
from stepengine.engine.options import AgentLike
from stepengine.engine.replayed_tree import ReplayedRun, ReplayedTree
from stepengine.engine.tape import Tape
from stepengine.errors import ReplayDivergence
from stepengine.journal.divergence import find_waiting_location
from stepengine.journal.journaled_run import JournaledRun
from stepengine.journal.recorded_part import NO_LEEWAY, AllowedDifferences
from stepengine.journal.records import Address, Result, format_address
from stepengine.machine.plan import Finished

if TYPE_CHECKING:
    from stepengine.engine.launcher import Launcher


class Stepper:
    """
    Goes through a recorded run from position 0 on. Make one with ``Engine.stepper``.

    Args:
        launcher: Makes the plan of the recorded run.
        tape: The record.
        agent: Replaces the agent that the journal names.
        leeway: The differences from the record that are accepted.

    Attributes:
        tape: As given.
        diverged: Why the run differs from the record; the stepper stays at the effect that differs.

    Raises:
        AgentError: when the engine has no such agent.
        JournalError: when the journal is damaged, of a newer version, or holds no run.
        ReplayDivergence: when the first effect of the run differs from the record.
    """

    def __init__(
        self, launcher: Launcher, tape: Tape, agent: AgentLike | None = None, *, leeway: AllowedDifferences = NO_LEEWAY
    ) -> None:
        self.tape = tape
        self.diverged: ReplayDivergence | None = None
        self._create_another = partial(Stepper, launcher, tape, agent, leeway=leeway)
        session = JournaledRun.open_for_stepping(tape.journal, tape.history, leeway=leeway)
        planned = launcher.create_run_from_record(session, agent=agent).tree
        self._tree = ReplayedTree(tape, session, planned.services)
        self._call_and_store_divergence(partial(self._tree.start_run, planned.root.plan, planned.root.state, ""))

    def copy_at_start(self) -> Stepper:
        """
        Return another stepper at position 0, which shares the parsed record.

        Effects that one of them compared with the record are compared by their kind alone.
        """
        # The record is not read or compared again, so that going back costs the machine's own work alone.
        return self._create_another()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close all handlers and hooks, children first, so that their ``finally`` blocks run; may be called twice."""
        self._tree.close()

    @property
    def position(self) -> int:
        """The number of results that were applied so far."""
        return self._tree.position

    @property
    def accepted_addresses(self) -> list[str]:
        """The addresses at which an accepted effect or end differs from the record; see ``AllowedDifferences``."""
        return self._tree.list_accepted_addresses()

    @property
    def finished(self) -> Finished | None:
        """How the root run ended; ``None`` before it has."""
        return self._tree.runs[""].finished

    # --- movement -----------------------------------------------------------------------------------------------------

    def advance(self) -> bool:
        """
        Apply the next result; return whether there was one.

        Raises:
            ReplayDivergence: when the run differs from the record here; the position does not change any more.
        """
        if self.diverged is not None:
            raise self.diverged
        if self.position >= self.tape.last_position:
            return False
        self.advance_to(self.position + 1)
        return True

    def advance_to(self, position: int) -> None:
        """Apply results up to a position; raises as ``advance`` does."""
        if self.diverged is not None and self.position < position:
            raise self.diverged
        if self.position < (end := min(position, self.tape.last_position)):
            self._call_and_store_divergence(partial(self._tree.apply_results_until, end))

    def _call_and_store_divergence(self, act: Callable[[], object]) -> None:
        """Call *act*; store and raise its divergence, or the one for records that the ended run did not reach."""
        try:
            act()
            if (unused := self._tree.find_unused_record_error()) is not None:
                raise unused
        except ReplayDivergence as error:
            self.diverged = error
            raise

    # --- the state at the position ------------------------------------------------------------------------------------

    def moment(self) -> Moment:
        """Return the moment of the run whose outcome is next; raises as ``advance`` if its first effect differs."""
        address = self._find_address_and_start_run()
        run, known = self._get_run(address), self._find_result(address)
        effect, state = self.effect(), run.state
        if address is not None:
            step, text = self.tape.get_step_number(address), "" if effect is None else format_effect_request(effect)
            at = self._tree.at if known is None else known.at
        else:
            step, at, text = self.tape.count_steps(), self.tape.history.last_at, "nothing that is recorded"
            if run.finished is not None:
                text = f"nothing more: {describe_end(run.finished)}"
        return Moment(
            position=self.position,
            step=step,
            address="" if address is None else format_address(*address),
            agent_id=run.plan.agent.definition.id,
            asked=text,
            effect=effect,
            outcome=None if known is None else self.tape.history.outcome(known),
            state=state,
            view=state.view,
            request=run.request,
            frames=self.frames(),
            location=find_waiting_location(run.machine),
            hooks=tuple(run.hooks),
            at=at,
        )

    def moments(self) -> Iterator[Moment]:
        """Yield the moment at each position from here to the last one; raises as ``advance`` does."""
        yield self.moment()
        while self.advance():
            yield self.moment()

    def frames(self) -> tuple[Frame, ...]:
        """Return ``moment().frames`` without the rest of the moment; raises as ``moment``."""
        return tuple(iterate_author_frames(self._get_run(self._find_address_and_start_run()).machine))

    def outermost_frame(self) -> Frame | None:
        """Return the frame of the waiting handler, hook or tool, without its helpers; raises as ``moment``."""
        frames = iterate_author_frames(self._get_run(self._find_address_and_start_run()).machine)
        return next((frame for frame in frames if frame.kind in TOPS), None)

    def variables(self) -> Mapping[str, str]:
        """Return the variables that programs left in the run of the moment, as texts; none while one waits; raises as ``moment``."""
        address = self._find_address_and_start_run()
        return self._tree.get_program_variables("" if address is None else address[0])

    def effect(self) -> Leaf | None:
        """Return ``moment().effect`` without the rest of the moment; raises as ``moment``."""
        address = self._find_address_and_start_run()
        if address is None:
            return None
        run, seq = self._get_run(address), address[1]
        item = run.end if seq == -1 else run.waits.get(seq)
        return None if item is None else item.effect

    def outcome(self) -> Value | Failure | None:
        """Return ``moment().outcome`` without the rest of the moment; raises as ``moment``."""
        known = self._find_result(self._find_address_and_start_run())
        return None if known is None else self.tape.history.outcome(known)

    def _find_address_and_start_run(self) -> Address | None:
        """
        Return the address of the effect with the next outcome; start its run if necessary.

        After a divergence it is the effect that differs, and at the end of the record the waiting effect; ``None`` without one.
        """
        address = self._find_divergence_address() or self.tape.find_address_at(self.position)
        if address is not None and address[0] not in self._tree.runs:
            self._call_and_store_divergence(partial(self._tree.get_or_start_run, address[0]))
        return address

    def _find_divergence_address(self) -> Address | None:
        """Return the address at which a run differs from its record; ``None`` if no run does and waits there."""
        if self.diverged is None:
            return None
        path, _, seq = self.diverged.address.rpartition("#")
        run = self._tree.runs.get(path)
        return (path, int(seq)) if run is not None and int(seq) in run.waits else None

    def _get_run(self, address: Address | None) -> ReplayedRun:
        return self._tree.runs["" if address is None else address[0]]

    def _find_result(self, address: Address | None) -> Result | None:
        """Return the recorded result of an effect; ``None`` from a divergence on."""
        return None if address is None or self.diverged is not None else self.tape.history.results.get(address)
