"""Searches for the position of a recorded run where a condition holds: a line, a tool call, an error or an expression."""

from __future__ import annotations

import re
from collections.abc import Callable

from attrs import frozen

from stepengine.data.outcomes import Failure
from stepengine.debugging.expressions import compile_expression, evaluate_in_frame, is_harmless, safe_error_text
from stepengine.debugging.run_places import RunPlaces
from stepengine.debugging.texts import SafeTexts
from stepengine.debugging.walks import AnyWalk
from stepengine.engine.moments import Frame
from stepengine.engine.stepper import Stepper
from stepengine.errors import StepEngineError

LINE = re.compile(r"(?:(?P<file>[^:]*):)?(?P<line>[0-9]{1,9})")


@frozen
class Condition:
    """A condition on a position; *expression* is the text of one that is evaluated."""

    holds: Callable[[Stepper], bool]
    expression: str = ""


def parse_condition(what: str) -> Condition:
    """
    Parse a condition of ``Debugger.run_until``.

    Raises:
        InputError: when *what* is not an expression.
    """
    what = what.strip()
    line = LINE.fullmatch(what)
    if line is not None:
        file, number = line["file"] or "", int(line["line"])
        return Condition(
            lambda stepper: any(
                frame.line == number and (frame.file.endswith(file) if file else frame.kind != "package")
                for frame in stepper.frames()
            )
        )
    if what.startswith("@"):
        return Condition(lambda stepper: getattr(stepper.effect(), "tool_name", None) == what[1:])
    if what == "error":
        return Condition(_has_error_outcome)
    code = compile_expression(what)
    return Condition(lambda stepper: evaluate_in_frame(code, _waiting_author_frame(stepper)), what)


class ConditionSearch:
    """
    Searches a range of positions for a condition.

    Args:
        walk: Moves in the run.
        places: The positions to look at.

    Attributes:
        problem: The first error that the expression of the last search raised, in a line; ``""`` for none.
        looked_at: The number of positions at which the last search looked.
    """

    def __init__(self, walk: AnyWalk, places: RunPlaces) -> None:
        self.problem = ""
        self.looked_at = 0
        self._walk = walk
        self._places = places

    def find(self, what: str, first: int, last: int, *, backwards: bool = False) -> int | None:
        """Move from *first* to *last*, and return the first, *backwards* the last, position where *what* holds; ``None`` if there is none."""
        wanted = parse_condition(what)
        self.problem, self.looked_at = "", 0
        found: int | None = None
        for position in range(first, last + 1):
            if not self._places.is_searchable(position):
                continue
            self._walk.move_to(position)
            self.looked_at += 1
            if self._holds(wanted):
                found = position
                if not backwards:
                    break
        if wanted.expression and not is_harmless(wanted.expression):
            self._walk.replay_again()
        return found

    def _holds(self, wanted: Condition) -> bool:
        try:
            return bool(wanted.holds(self._walk.stepper))
        except StepEngineError:
            raise
        except Exception as error:  # noqa: BLE001 - the expression is the user's own
            self.problem = self.problem or f"{type(error).__name__}: {SafeTexts().clean(safe_error_text(error), 200)}"
            return False


def _waiting_author_frame(stepper: Stepper) -> Frame:
    """Return the author's frame that waits, in which expressions are evaluated; an empty one if none waits."""
    return stepper.outermost() or Frame(function="")


def _has_error_outcome(stepper: Stepper) -> bool:
    outcome = stepper.outcome()
    return isinstance(outcome, Failure) or bool(getattr(getattr(outcome, "value", None), "is_error", False))
