"""
``RecordEnds``: where the record of each run ends, and how.

A run may end in its record because it ended, was stopped, lost a race, or because a crash cut the record off.
"""

from __future__ import annotations

import attrs

from stepengine.data.messages import ToolResult
from stepengine.data.outcomes import Stop, has_lost_or_stopped, make_descendant_stop
from stepengine.data.questions import Question
from stepengine.data.state import ChildResult
from stepengine.errors import AgentError
from stepengine.journal.encoding import decode_stored
from stepengine.journal.history import find_outside_stop
from stepengine.journal.recorded_clock import RunClock
from stepengine.journal.recorded_part import RecordedPart
from stepengine.journal.records import Result, get_starter_address
from stepengine.runtime.failfast import LOST
from stepengine.runtime.performer import Item


class RecordEnds:
    """
    The recorded ends of the runs in a tree.

    Args:
        past: The recorded part of the run.
        timing: The run's own clock.
        is_record_only: Whether nothing is performed after the end of the record.
    """

    def __init__(self, past: RecordedPart, timing: RunClock, *, is_record_only: bool) -> None:
        self._past = past
        self._timing = timing
        self._is_record_only = is_record_only
        self._given_up: set[str] = set()

    def can_perform_effects(self, path: str) -> bool:
        """Return whether effects without result may be performed: not in a run recorded to its end."""
        return (
            not self._is_record_only and self.find_own_or_enclosing_end(path) is None and not self.is_race_loser(path)
        )

    def find_own_or_enclosing_end(self, path: str) -> Result | None:
        """Return the recorded end of the child at *path*, or of the nearest run around it."""
        past = self._past
        # The nearest run around counts, since a child that was cut off when its parent ended has no end of its own.
        while path:
            is_background = past.history.tree.is_background(path)
            known = self._past.find_result((path, -1) if is_background else get_starter_address(path))
            if known is not None:
                return known
            path = get_starter_address(path)[0]
        return None

    def find_stop(self, ended: Result) -> Stop | None:
        """Return the stop from outside in a child's recorded end, such as its time limit, or ``None``."""
        child: object = getattr(self._past.history.outcome(ended), "value", None)
        if isinstance(child, ToolResult):
            return Stop("cancelled") if child.status == "cancelled" else None
        return find_outside_stop(child.status, child.error) if isinstance(child, ChildResult) else None

    def mark_race_loser(self, path: str) -> None:
        """End the run at *path*, which lost a race, where its record ends."""
        self._given_up.add(path)

    def is_race_loser(self, path: str) -> bool:
        """Return whether the run at *path*, or one around it, lost a race."""
        while self._given_up and path:
            if path in self._given_up:
                return True
            path = get_starter_address(path)[0]
        return False

    def has_lost_race(self, item: Item) -> bool:
        """Return whether another member won the race of an effect without result before its process ended."""
        past, gather = self._past, item.gather
        if gather is None or not gather.races:
            return False
        # The winner of a race may have been recorded, and the process have died before its losers were: then these have
        # no result, and must not get one by being performed.
        first, seq = gather.effects[0].seq, item.effect.seq
        for start, stop in gather.races:
            if start <= seq - first < stop:
                others = [past.find_result((item.path, first + n)) for n in range(start, stop)]
                return any(known and not has_lost_or_stopped(past.history.outcome(known)) for known in others)
        return False

    def make_record_end_stop(self, path: str, questions: tuple[Question, ...], *, waits: bool = False) -> Stop:
        """Return the stop of a run where its record stops: the recorded stop, or a suspension."""
        # The run has to end here although nobody stopped it this time, because the recorded one did. Which end that was
        # is looked for from the nearest to the farthest: that of a child around, that of its race, a suspension, the
        # last stop that was written down. A record that says nothing of all this was cut off by a crash, which a replay
        # shows as cancelled.
        at = self._timing.last
        ended = self.find_own_or_enclosing_end(path)
        stop = None if ended is None else self.find_stop(ended)
        if ended is not None and stop is not None:
            is_own = ended.address in ((path, -1), get_starter_address(path))
            return attrs.evolve(stop if is_own else make_descendant_stop(stop), at=at)
        if self.is_race_loser(path):
            # Those below a run that has lost are told nothing of its race, as where nothing is replayed.
            return Stop("cancelled", at, AgentError(LOST) if path in self._given_up else None)
        history = self._past.history
        last = history.stop
        if (questions or waits) and (last is None or last.input["kind"] == "suspended"):
            return Stop("suspended", at, questions=questions)
        for record in reversed(history.inputs):
            if record.input.get("type") == "stop" and record.input["kind"] != "suspended":
                error = record.input.get("error")
                stop = Stop(record.input["kind"], at, decode_stored(error) if error else None)
                return attrs.evolve(make_descendant_stop(stop), at=at) if path else stop
        return Stop("cancelled", at)
