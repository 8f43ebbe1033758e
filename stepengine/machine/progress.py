"""The progress of a run: its steps and turns, why the last reply stopped, and the author's running generators."""

from __future__ import annotations

from stepengine.data.models import StopReason
from stepengine.machine.author import Author
from stepengine.machine.budget import Budget


class Progress:
    """
    The steps and turns of one run.

    Attributes:
        began: Whether it got past its ``pre_run`` hooks.
        step: The step that runs or comes next.
        step_index: How many steps have begun.
        steps_complete: Whether the last step ended the turn, or no step is left.
        has_asked: Whether the handler asked for a step.
        truncated: Whether the last reply was cut, or the turn was.
        thoughts_in_a_row: How many replies in a row were only thoughts.
        stop_reason: Why the last reply stopped.
        thinking: The thoughts of its replies.
        author_stack: The running generators of the agent's code, outermost first: handler or tool body, then the hook or tool it waits for.
    """

    __slots__ = (
        "_budget",
        "_stops_refused",
        "author_stack",
        "began",
        "has_asked",
        "step",
        "step_index",
        "steps_complete",
        "stop_reason",
        "thinking",
        "thoughts_in_a_row",
        "truncated",
    )

    def __init__(self, step_index: int, budget: Budget) -> None:
        """Start after *step_index* steps; each further one is deducted from *budget*."""
        self._budget = budget
        self.step = self.step_index = step_index
        self.steps_complete = self.has_asked = self.truncated = self.began = False
        self.thoughts_in_a_row = 0
        self.stop_reason: StopReason | None = None
        self.thinking: list[str] = []
        self.author_stack: list[Author] = []
        self._stops_refused = 0

    @property
    def program_position(self) -> tuple[str, int] | None:
        """In a tool body that runs a model's program: the program and the waiting line, from 1."""
        program = self.author_stack[0].program if self.author_stack else None
        return None if program is None or program.file or not program.line else (program.code, program.line)

    def mark_started(self) -> None:
        """Record that the ``pre_run`` hooks let the run start."""
        self.began = True

    def request_step(self) -> bool:
        """Record that a step is requested; return whether one is left."""
        self.has_asked = True
        return self._budget.steps_left > 0 and self._budget.reached is None

    def count_reply(self, reason: StopReason | None, *, has_only_thoughts: bool) -> None:
        """Deduct the step of a reply that has arrived, and count replies in a row with only thoughts."""
        # Counted when the reply is there, not when it is asked for: a request that failed for good is no step, and a
        # handler that catches the error still has its step.
        self._budget.deduct_step()
        self.step_index += 1
        self.stop_reason = reason
        self.truncated = reason is StopReason.MAX_TOKENS
        self.thoughts_in_a_row = self.thoughts_in_a_row + 1 if has_only_thoughts else 0

    def record_turn_completion(self, *, is_complete: bool) -> bool:
        """Set whether the turn is complete, and return it."""
        self.steps_complete = is_complete
        return is_complete

    def reset_refused_stops(self) -> None:
        """Reset the count of refused ends after a turn ended."""
        self._stops_refused = 0

    def refuse_stop(self, max_refusals: int) -> bool:
        """Record that a hook refuses the end of the turn; return False, and record nothing, after *max_refusals* in a row."""
        # A hook that never lets the turn end would spend the whole step budget, with the model saying at each step that
        # it is done.
        if self._stops_refused >= max_refusals:
            return False
        self._stops_refused += 1
        return True
