"""``DebugNavigation``: the commands of the debugger that move to another position of a run, or search for one."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Never

from stepengine.cli.debug_screen import DebugScreen, RefusedCommand, hide_or_redirect_handler_output, parse_count
from stepengine.cli.exits import print_error
from stepengine.errors import ReplayDivergence

if TYPE_CHECKING:
    from stepengine.debugging.walks import ForkedWalk

LOOK_SECONDS = 3600.0
"""The time limit, in seconds, of a search or fork in its own process, which may replay long handlers."""


class DebugNavigation:
    """
    Commands that move the debugger.

    Args:
        screen: Shows the new position.
        forked: The walk, if it consists of processes. Then a command may end in another process than the one it started in.

    Attributes:
        ignores_breakpoints: Whether ``breakpoint()`` is ignored; false only during a move that should stop at breakpoints.
    """

    def __init__(self, screen: DebugScreen, forked: ForkedWalk | None) -> None:
        self._screen = screen
        self._debugger = screen.debugger
        self._forked = forked
        self.ignores_breakpoints = True

    def move_silently(self, position: int, *, ignores_breakpoints: bool = True, **message: object) -> None:
        """Move to a position without printing; *message* is passed to the process that continues there."""
        self.ignores_breakpoints = ignores_breakpoints
        try:
            with hide_or_redirect_handler_output(self._screen.asked, as_json=self._screen.is_json):
                self._debugger.move_to(position, **message)
        finally:
            self.ignores_breakpoints = True

    def go_to_position(self, position: int, *, ignores_breakpoints: bool = True) -> None:
        """Move to a position and show it; raise at the end of the run."""
        if position > self._debugger.position >= self._debugger.last:
            self._raise_at_end()
        self._move_and_show(position, ignores_breakpoints=ignores_breakpoints)

    def _raise_at_end(self) -> Never:
        """Raise ``RefusedCommand``, because the position is the last one."""
        inside = self._debugger.places.followed_path
        msg = (
            f"the run ends here: it has {self._debugger.last} results"
            if inside is None
            else f"this is the last position of the run {inside}; `out` follows all runs again"
        )
        raise RefusedCommand(msg)

    def parse_position(self, text: str) -> int:
        """Parse a step or an effect and return its position."""
        if not text:
            msg = "name a position: a step such as 12, or an effect such as #5 or 3.2#1"
            raise RefusedCommand(msg)
        return self._debugger.places.get_position(text)

    def move_by(self, typed: str, sign: int = 1, *, counts_steps: bool = False) -> None:
        """
        Move by a count of positions and show the new one.

        Args:
            typed: The count; 1 if empty.
            sign: 1 to move forward, -1 to move back.
            counts_steps: Count steps instead of positions.

        Raises:
            RefusedCommand: at either end, or when *typed* is not a count.
        """
        places = self._debugger.places
        after = places.get_relative_step_position if counts_steps else places.get_relative_position
        target = after(self._debugger.position, sign * parse_count(typed))
        if target == self._debugger.position:
            self._raise_at_end() if sign > 0 else self._raise_at_start()
        self.go_to_position(target, ignores_breakpoints=counts_steps)

    def _raise_at_start(self) -> Never:
        """Raise ``RefusedCommand``, because the position is the first one."""
        inside = self._debugger.places.followed_path
        msg = (
            "this is the first position"
            if inside is None
            else f"this is the first position of the run {inside}; `out` follows all runs again"
        )
        raise RefusedCommand(msg)

    def go_to_typed_position(self, typed: str) -> None:
        """Move to the typed step or effect and show it; raise at the end of the run."""
        self.go_to_position(self.parse_position(typed))

    def go_to_first_or_last(self, *, last: bool) -> None:
        """Move to the first or the last position and show it."""
        self._move_and_show(self._debugger.last if last else 0)

    def _move_and_show(self, position: int, *, ignores_breakpoints: bool = True) -> None:
        """Move to a position and show it, without a check for the end of the run."""
        self._screen.frame = 0
        self.move_silently(position, ignores_breakpoints=ignores_breakpoints, then="show")
        self._screen.show_position()

    def _show_found_position(self) -> None:
        """Show the position that a search moved to, in its outermost frame."""
        self._screen.frame = 0
        self._screen.show_position()

    def run_until(self, typed: str) -> None:
        """Move forward to the next position where a condition is true, or else to the last position, and report the failure."""
        from stepengine.debugging.expressions import has_read_only_syntax

        if not typed:
            msg = "until what? A line (41, file.py:41), @tool_name, error, or an expression"
            raise RefusedCommand(msg)
        start = self._debugger.position
        if self._forked is None or has_read_only_syntax(typed):
            self._search_in_this_process(typed, backwards=False)
        else:
            told = self._search_in_child_process(typed, start + 1, self._debugger.last, backwards=False)
            if told.get("differs"):
                self.move_silently(self._debugger.last)
                # The move shows that the run itself equals its record, so the expression changed it.
                self._screen.report_failure(f"{typed} changes the run, so it cannot be searched for")
                self.move_silently(start, then=None)
                return
            self._report_search_problems(typed, told["problem"], told["looked_at"], is_found=told["found"] is not None)
            self.move_silently(self._debugger.last if told["found"] is None else told["found"])
        self._show_found_position()

    def _search_in_this_process(self, condition: str, *, backwards: bool) -> None:
        """Move to the nearest position where a condition is true, and report problems of the search."""
        with hide_or_redirect_handler_output(self._screen.asked, as_json=self._screen.is_json):
            found = self._debugger.run_until(condition, backwards=backwards)
        self._report_search_problems(condition, self._debugger.problem, self._debugger.looked_at, is_found=found)

    def _search_in_child_process(self, condition: str, first: int, last: int, *, backwards: bool) -> dict[str, Any]:
        """Search for a condition in a child process, because expressions may change the run; return the found position and problems."""
        from stepengine.debugging.expressions import call_in_fork, parse_condition

        def search() -> str:
            """Search for the condition without handler output, and return the result as JSON."""
            if self._forked is not None:
                self._forked.stays = True
            try:
                with hide_or_redirect_handler_output(self._screen.asked, as_json=self._screen.is_json):
                    debugger = self._debugger
                    found = debugger.search(condition, first, last, backwards=backwards)
                    return json.dumps({"found": found, "problem": debugger.problem, "looked_at": debugger.looked_at})
            except ReplayDivergence as error:
                # The child process is discarded; the move in the parent reports the divergence in full, at its position.
                return json.dumps({"found": None, "problem": error.message, "looked_at": 0, "differs": True})

        parse_condition(condition)
        said = call_in_fork(search, seconds=LOOK_SECONDS)
        if not said:
            msg = "the search ended early: the expression or the handler ended the process"
            raise RefusedCommand(msg)
        found: dict[str, object] = json.loads(said)
        return found

    def _report_search_problems(self, condition: str, problem: str, searched_count: int, *, is_found: bool) -> None:
        """Print the problem of a search, and report a search without a match as failed."""
        if problem:
            print_error(self._screen.redact_and_escape(f"{condition}: {problem} (counted as false; shown once)"))
        if not is_found:
            self._screen.report_failure(f"{condition} is true at none of the {searched_count} positions searched")

    def run_back_until(self, typed: str) -> None:
        """Move back to the last position where a condition was true, or else to the first position, and report the failure."""
        from stepengine.debugging.expressions import parse_condition

        start = self._debugger.position
        if not typed:
            msg = "back to what? A line (41, file.py:41), @tool_name, error, or an expression"
            raise RefusedCommand(msg)
        if start == 0:
            self._raise_at_start()
        parse_condition(typed)
        if self._forked is None:
            self._search_in_this_process(typed, backwards=True)
            self._show_found_position()
        else:
            self._forked.wake_nearest_and_exit(start - 1, search=[typed, start, 0, ""])

    def search_back_and_move(self, condition: str, before: int, searched_count: int, problem: str) -> None:
        """Search back from *before* to here and move to the match; without one, wake an earlier process, or move to the start."""
        here = self._debugger.position
        told = self._search_in_child_process(condition, here, before - 1, backwards=True)
        searched_count, problem = searched_count + told["looked_at"], problem or told["problem"]
        if told["found"] is None and here > 0 and self._forked is not None:
            self._forked.wake_nearest_and_exit(here - 1, search=[condition, here, searched_count, problem])
        self._report_search_problems(condition, problem, searched_count, is_found=told["found"] is not None)
        self.move_silently(told["found"] or 0)
        self._show_found_position()

    def follow_child(self, typed: str) -> None:
        """Restrict the debugger to one child run, move to its first position from here on and show it."""
        if not typed:
            msg = "into which child? Name its path, such as 3 or 3.2"
            raise RefusedCommand(msg)
        self._move_and_show(self._debugger.places.follow_child(typed, self._debugger.position))

    def follow_all_runs(self, _: str) -> None:
        """End the restriction to one child run, and print that."""
        self._debugger.places.followed_path = None
        self._screen.print_result("following all runs again", {"inside": None})

    def diff_positions(self, typed: str) -> None:
        """Print the differences between the two typed positions, and return to the current one."""
        places = typed.split()
        if len(places) != 2:  # noqa: PLR2004
            msg = "diff compares two positions: diff 3 5, diff #2 3.2#1"
            raise RefusedCommand(msg)
        one, two = self.parse_position(places[0]), self.parse_position(places[1])
        self.print_differences(one, two, self._debugger.position, known={})

    def print_differences(
        self, first: int, second: int, return_to: int, *, known: dict[str, dict[str, object]]
    ) -> None:
        """Print the differences between two positions and move back to *return_to*. *known* has the summaries made so far."""
        from stepengine.debugging.debugger import diff_summaries, summarize_moment

        for position in sorted((first, second)):
            if str(position) not in known:
                self.move_silently(position, then=["diff", first, second, return_to], known=known)
                known[str(position)] = summarize_moment(self._debugger.moment(), self._debugger.texts)
        lines = diff_summaries(known[str(first)], known[str(second)])
        self._screen.print_result("\n".join(lines) or "nothing differs", {"diff": lines})
        self.move_silently(return_to, then=None)
