"""``Replayer``: answers the effects of a run from its past, and says where the past ends."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs

from stepengine.data.outcomes import Single, Stop, Value
from stepengine.data.questions import Question
from stepengine.data.run import ChildResult
from stepengine.errors import DataError
from stepengine.journal.forms import restored
from stepengine.journal.history import parent_of
from stepengine.journal.past import is_refused, stop_of
from stepengine.journal.records import Address, Intent, Result
from stepengine.runtime.performer import Item

if TYPE_CHECKING:
    from stepengine.journal.past import Past
    from stepengine.journal.session import Session

__all__ = ("Replayer",)


class Replayer:
    """
    The part of a session that deals with what was recorded.

    Args:
        session: The session.
        past: What was recorded.
    """

    def __init__(self, session: Session, past: Past) -> None:
        self._session = session
        self._past = past
        self._copies = session.mode != "resume"
        self._closed = session.mode == "replay" or (session.mode == "resume" and past.history.is_complete)

    def meets(self, item: Item, asked: Intent) -> bool:
        """
        Return whether an effect needs no intent any more: it is recorded, or the replay ends before it.

        Raises:
            ReplayDivergence: when it is not what was recorded, or a run that is recorded to its end goes on.
        """
        session, past = self._session, self._past
        address = (item.path, item.effect.seq)
        known = past.intent(address)
        if known is None:
            ended = self._end_of(item.path)
            over = self._closed and past.history.is_complete if ended is None else self._stop_in(ended) is None
            if over:
                raise session.fail(past.beyond(asked, item, session.machines.get(item.path)))
            return self._closed or ended is not None
        if not past.equals(known, asked):
            if session.mode != "extend":
                raise session.fail(past.changed(known, asked, item, session.machines.get(item.path)))
            past.cut.at(address)
            return False
        past.use(address)
        if self._copies:
            session.append(asked)
        else:
            session.remember(asked)
        return True

    def result(self, address: Address) -> Result | None:
        """Return the recorded result at an address."""
        return self._past.result(address)

    def is_live(self, path: str) -> bool:
        """Return whether what has no result may be performed: not in a run that is recorded to its end."""
        return not self._closed and self._end_of(path) is None

    def _end_of(self, path: str) -> Result | None:
        """Return the recorded result of the child at *path*, or of the nearest run around it that has one."""
        while path:
            address = parent_of(path)
            known = self._past.result(address)
            if known is not None:
                return known
            path = address[0]
        return None

    def _stop_in(self, ended: Result) -> Stop | None:
        """Return what stopped a recorded child from outside, such as its time limit, if anything did."""
        child: Any = getattr(self._past.history.outcome(ended), "value", None)
        return stop_of(child.status, child.error) if isinstance(child, ChildResult) else None

    def was_begun(self, address: Address) -> bool:
        """Return whether an effect was begun by a process that ended before it had a result."""
        return self._past.intent(address) is not None

    def answer(self, known: Result, item: Item) -> Single:
        """Return the recorded outcome of an effect."""
        session = self._session
        try:
            outcome = self._past.history.outcome(known)
        except DataError as error:
            raise session.fail(self._past.undecodable(error.message, item, session.machines.get(item.path))) from error
        self._came_by(known)
        return outcome

    def _came_by(self, known: Result) -> None:
        self._session.timing.came_by(known.at)
        if self._copies:
            self._session.append(Result(known.path, known.seq, known.at, known.outcome, known.attempts))

    def refused_child(self, address: Address, item: Item) -> Single | None:
        """Return the recorded result of a child that never started; it must not start now."""
        known = self._past.result(address)
        if known is None:
            return None
        outcome = self._past.history.outcome(known)
        refused = type(outcome) is not Value or is_refused(outcome.value)
        return self.answer(known, item) if refused else None

    def confirm(self, known: Result, outcome: Single, item: Item) -> Single | None:
        """
        Return what a child gave that was run again; ``None`` when that is new, and may be.

        Raises:
            ReplayDivergence: when it ended in another way than it is recorded.
        """
        session, past = self._session, self._past
        recorded: Any = past.history.outcome(known)
        if type(outcome) is Value and past.same_child(recorded, outcome.value):
            self._came_by(known)
            return Value(outcome.value, known.at, recorded.inputs)
        if session.mode == "extend":
            past.cut.at((item.path, item.effect.seq + 1))
            return None
        raise session.fail(past.other_child(recorded, outcome, item, session.machines.get(item.path)))

    def halt(self, path: str, questions: tuple[Question, ...]) -> Stop:
        """Return how a run stops where its record does: as the recorded one did."""
        at = self._session.timing.last
        ended = self._end_of(path)
        stop = None if ended is None else self._stop_in(ended)
        if stop is not None:
            return attrs.evolve(stop, at=at)
        if questions:
            return Stop("suspended", at, questions=questions)
        for record in reversed(self._past.history.inputs):
            if record.input.get("type") == "Stop":
                error = record.input.get("error")
                return Stop(record.input["kind"], at, restored(error) if error else None)
        return Stop("cancelled", at)
