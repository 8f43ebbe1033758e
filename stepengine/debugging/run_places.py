"""``RunPlaces``: the positions of the steps and effects of a recorded run, or of the one child that the user follows."""

from __future__ import annotations

from stepengine.data.alike import list_names
from stepengine.engine.tape import Tape
from stepengine.errors import JournalError
from stepengine.journal.recorded_part import parse_address
from stepengine.journal.records import ROOT, format_address


class RunPlaces:
    """
    Finds positions of a recorded run.

    Args:
        tape: The run.

    Attributes:
        followed_path: The path of the child to which moves are restricted; ``None`` for all runs.
    """

    def __init__(self, tape: Tape) -> None:
        self.followed_path: str | None = None
        self._tape = tape

    def get_position(self, at: int | str) -> int:
        """
        Return the position of an effect such as ``"3.2#1"`` or a step such as ``3`` of the followed run or the root; raise if it is missing.

        Raises:
            JournalError: when there is no such step or effect; the message names valid ones.
        """
        tape, path = self._tape, self.followed_path or ""
        if isinstance(at, int) or at.isdecimal():
            if len(str(at)) > 9:  # noqa: PLR2004
                at = 10**9
            found = 0 if int(at) == 0 else tape.find_step_position(int(at), path)
            if found is None:
                msg = f"step {at} does not exist; the run has {tape.count_steps(path)} steps"
                raise JournalError(msg)
            return found
        address = parse_address(at)
        found = tape.find_position(*address)
        if found is None:
            known = address in tape.history.intents and address != ROOT
            why = "never finished" if known else f"is not in {tape.journal.name}"
            msg = f"effect {format_address(*address)} {why}; {tape.last_position} effects have a result"
            raise JournalError(msg)
        return found

    def get_relative_position(self, current_position: int, offset: int) -> int:
        """
        Return the position *offset* positions after *current_position*, before it if negative, at most the last or first one.

        If a child is followed, only its own positions count, and *current_position* is returned if it has no more.
        """
        if self.followed_path is None:
            return max(0, min(current_position + offset, self._tape.last_position))
        mine = self._list_searchable_positions()
        ahead = (
            [n for n in mine if n > current_position] if offset > 0 else [n for n in mine[::-1] if n < current_position]
        )
        return ahead[min(abs(offset), len(ahead)) - 1] if ahead and offset else current_position

    def get_relative_step_position(self, current_position: int, offset: int) -> int:
        """
        Return the position of the step *offset* steps after *current_position*, or before it, in the followed run or the root run.

        With fewer steps it is the last one in that direction. Without any, it is the last position of the whole tree, or 0 backwards.
        """
        tape, path = self._tape, self.followed_path or ""
        steps = range(1, tape.count_steps(path) + 1)
        calls = [position for step in steps if (position := tape.find_step_position(step, path)) is not None]
        ahead = (
            [p for p in calls if p > current_position]
            if offset > 0
            else [p for p in calls[::-1] if p < current_position]
        )
        if not ahead or not offset:
            return tape.last_position if offset > 0 else 0
        return ahead[min(abs(offset), len(ahead)) - 1]

    def follow_child(self, run_path: str, current_position: int) -> int:
        """
        Restrict moves to the positions of a child, and return its first position at or after *current_position*.

        Returns:
            The first position of the child at or after *current_position*; its first position if it ended before.

        Raises:
            JournalError: when no run has the path *run_path*.
        """
        intents = self._tape.history.intents.values()
        if not any(intent.path == run_path for intent in intents):
            paths = sorted({i.path for i in intents if i.path})
            msg = f"no run has the path {run_path[:80]!r}; known paths: {list_names(paths, run_path, none='none but the root')}"
            raise JournalError(msg)
        self.followed_path = run_path
        mine = self._list_searchable_positions()
        return next((n for n in mine if n >= current_position), mine[0] if mine else current_position)

    def is_position_searchable(self, position: int) -> bool:
        """Return whether a search tests a position: those of the followed child; without one, those of the root run and the end."""
        address = self._tape.find_address_at(position)
        if address is None:
            return self.followed_path is None
        return address[0] == (self.followed_path or "")

    def _list_searchable_positions(self) -> list[int]:
        """Return all positions that a search tests."""
        return [n for n in range(self._tape.last_position + 1) if self.is_position_searchable(n)]
