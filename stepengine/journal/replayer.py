"""``Replayer``: answers the effects of a run from its past, and says where the past ends."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

import attrs

from stepengine.data.effects import Ask, CallModel
from stepengine.data.outcomes import Failure, Single, Stop, Value
from stepengine.data.questions import Question
from stepengine.data.state import ChildResult
from stepengine.errors import JournalCorrupt, JournalError, ReplayDivergence
from stepengine.journal.forms import restored
from stepengine.journal.history import parent_of
from stepengine.journal.past import is_refused, stop_of
from stepengine.journal.records import ROOT, Address, Intent, Result
from stepengine.runtime.performer import Item, child_path

if TYPE_CHECKING:
    from stepengine.journal.past import Past
    from stepengine.journal.session import Session

__all__ = ("Replayer", "live_kinds")

KINDS = {"call_model": "CallModel", "call_tool": "CallTool", "perform": "Perform"}


def live_kinds(names: Collection[str]) -> frozenset[str]:
    """
    Return the types of effects that a replay is to perform for real.

    Raises:
        JournalError: when a name is none of theirs.
    """
    given = (names,) if isinstance(names, str) else names
    wrong = [name for name in given if name not in KINDS]
    if wrong:
        msg = f"live={wrong[0]!r} is no kind of effect that a replay can perform; those are: {', '.join(KINDS)}"
        raise JournalError(msg)
    return frozenset([KINDS[name] for name in given])


class Replayer:
    """
    The part of a session that deals with what was recorded.

    Args:
        session: The session.
        past: What was recorded.

    Attributes:
        accepts: Says whether an effect that is not quite the recorded one is answered with its outcome (replay D14).
        keeps: Whether any effect of the recorded kind is, because the run goes on after an edit (requirements X58).
    """

    def __init__(self, session: Session, past: Past) -> None:
        self._session = session
        self._past = past
        self._copies = session.mode != "resume"
        self._closed = session.mode == "replay" or (session.mode == "resume" and past.history.is_complete)
        self._live: frozenset[str] = frozenset()
        self.accepts: Callable[[ReplayDivergence], bool] | None = None
        self.keeps = False
        # Where the results of effects stand that are answered although they have another address now.
        self._elsewhere: dict[Address, Address] = {}

    def perform_live(self, kinds: frozenset[str]) -> None:
        """
        Let effects of these types be performed for real (replay D12).

        The results of tools must be the recorded ones. With models, whatever they say, tools answer what they did to an
        equal call, wherever in the run that was.
        """
        self._live = kinds
        self._past.is_loose = "CallModel" in kinds
        self._closed = self._closed and not self._past.is_loose

    def is_performed(self, item: Item) -> bool:
        """Return whether an effect that is recorded is performed nevertheless, to see if its result is still the same."""
        return type(item.effect).__name__ in self._live and type(item.effect) is not CallModel

    def meets(self, item: Item, asked: Intent) -> bool:
        """
        Return whether an effect needs no intent any more: it is recorded, or the replay ends before it.

        Raises:
            ReplayDivergence: when it is not what was recorded, or a run that is recorded to its end goes on.
        """
        session, past = self._session, self._past
        address = (item.path, item.effect.seq)
        if past.is_loose:
            return self._meets_anywhere(address, asked, item)
        known = past.intent(address)
        if known is None:
            ended = self._end_of(item.path)
            over = self._closed and past.history.is_complete if ended is None else self._stop_in(ended) is None
            if over and session.mode == "extend":
                self._cut_off(address)
                return False
            if over:
                raise session.fail(past.beyond(asked, item, session.machines.get(item.path)))
            ends = self._closed or ended is not None
            past.grew = past.grew or not ends
            return ends
        is_equal = past.equals(known, asked)
        if not is_equal and not self._serves(known, asked, item):
            self._cut_off(address)
            return False
        past.use(address)
        if self._copies:
            session.append(asked)
        elif is_equal:
            session.remember(asked)
        return True

    def _serves(self, known: Intent, asked: Intent, item: Item) -> bool:
        """Return whether an effect is answered with the outcome of another one; if not, the record ends before it."""
        session, past, address = self._session, self._past, (asked.path, asked.seq)
        if past.was_kept(address, asked.fp):
            return True
        if session.mode == "extend":
            return False
        if self.keeps and known.type == asked.type and not self._approves_another(address, item):
            session.keep(address, asked.fp)
        else:
            self._accept(past.changed(known, asked, item, session.machines.get(item.path)))
        return True

    def _approves_another(self, address: Address, item: Item) -> bool:
        """
        Return whether an answer would let a call run that nobody was asked about: an approval holds for its input only.

        Where the call has run already, or nobody has agreed, nothing runs.
        """
        effect = item.effect
        if type(effect) is not Ask or effect.purpose != "permission":
            return False
        known = self.result(address)
        if known is None:
            return any(key in self._session.answers for q in effect.questions for key in (q.id, q.text))
        answers: Any = getattr(self._past.history.outcome(known), "value", ())
        return any(answer.agrees for answer in answers) and not self._past.has_run(item.path, effect.tool_call_id)

    def starts_alike(self, asked: Intent) -> None:
        """
        Accept that the root run is started with something else than was recorded.

        Raises:
            ReplayDivergence: when that is to be the same.
        """
        if self._past.was_kept(ROOT, asked.fp):
            return
        if not self.keeps:
            raise self._past.other_start(asked)
        self._session.keep(ROOT, asked.fp)

    def _cut_off(self, address: Address) -> None:
        try:
            self._past.cut_off(address)
        except JournalError as error:
            raise self._session.fail(error) from None

    def _accept(self, error: ReplayDivergence) -> None:
        """Raise *error* unless the effect is of the recorded kind, and the caller says that its recorded outcome serves."""
        if error.kind != "changed" or self.accepts is None or not self.accepts(error):
            raise self._session.fail(error)

    def _meets_anywhere(self, address: Address, asked: Intent, item: Item) -> bool:
        """Return whether an effect is recorded, at this address or at another one; models and children are new."""
        session, past = self._session, self._past
        if asked.type in ("CallModel", "Spawn"):
            return False
        place = past.same_elsewhere(asked)
        if place is None:
            raise session.fail(past.not_recorded(asked, item, session.machines.get(item.path)))
        past.use(place)
        self._elsewhere[address] = place
        session.append(asked)
        return True

    def result(self, address: Address) -> Result | None:
        """Return the recorded result at an address."""
        if self._past.is_loose:
            place = self._elsewhere.get(address)
            return None if place is None else self._past.result(place)
        return self._past.result(address)

    def is_live(self, path: str) -> bool:
        """Return whether what has no result may be performed: not in a run that is recorded to its end."""
        return not self._closed and self._end_of(path) is None

    def _end_of(self, path: str) -> Result | None:
        """Return the recorded result of the child at *path*, or of the nearest run around it that has one."""
        while path:
            address = parent_of(path)
            known = self.result(address)
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
        return not self._past.is_loose and self._past.intent(address) is not None

    def answer(self, known: Result, item: Item) -> Value | Failure:
        """Return the recorded outcome of an effect."""
        session = self._session
        try:
            outcome = self._past.history.outcome(known)
        except JournalCorrupt as error:
            raise session.fail(self._past.undecodable(error.message, item, session.machines.get(item.path))) from error
        if type(item.effect) is CallModel:
            session.tell(item.effect.request, 1 + len(known.attempts))
        self._came_by(known, outcome, item)
        return outcome

    def compare(self, known: Result, outcome: Single, item: Item) -> Single:
        """
        Return the recorded outcome of an effect that was performed again.

        Raises:
            ReplayDivergence: when it had another one.
        """
        session, past = self._session, self._past
        recorded = self.answer(known, item)
        if isinstance(outcome, Stop):
            return outcome
        if not past.same_result(recorded, outcome):
            raise session.fail(past.other_result(recorded, outcome, item, session.machines.get(item.path)))
        return recorded

    def _came_by(self, known: Result, outcome: Value | Failure, item: Item) -> None:
        self._session.timing.came_by(known.at)
        self._past.answered += 1
        if self._copies:
            writes = [write.form() for write in self._past.history.writes(known)] if known.writes else ()
            made = Result(item.path, item.effect.seq, known.at, outcome, known.attempts, writes=writes)
            self._session.append(made)

    def refused_child(self, address: Address, item: Item) -> Single | None:
        """Return the recorded result of a child that never started; it must not start now."""
        known = self.result(address)
        if known is None:
            return None
        outcome = self._past.history.outcome(known)
        refused = type(outcome) is not Value or is_refused(outcome.value)
        return self.answer(known, item) if refused else None

    def has_begun(self, address: Address) -> bool:
        """Return whether a child is recorded as one that ran, whatever would refuse it now."""
        past = self._past
        return not past.is_loose and (past.result(address) or past.intent((child_path(*address), 0))) is not None

    def confirm(self, known: Result, outcome: Single, item: Item) -> Single | None:
        """
        Return what a child gave that was run again; ``None`` when that is new, and may be.

        Raises:
            ReplayDivergence: when it ended in another way than it is recorded.
        """
        session, past = self._session, self._past
        recorded: Any = past.history.outcome(known)
        if type(outcome) is Value and past.same_child(recorded, outcome.value):
            self._came_by(known, recorded, item)
            return Value(outcome.value, known.at, recorded.inputs)
        if session.mode == "extend":
            self._cut_off((item.path, item.effect.seq + 1))
            return None
        return self._other_end(known, recorded, outcome, item)

    def _other_end(self, known: Result, recorded: Any, outcome: Single, item: Item) -> Single:
        """Return the recorded end of a child that ended in another way now, where that serves nevertheless."""
        session, past, address = self._session, self._past, (item.path, item.effect.seq)
        error = past.other_child(recorded, outcome, item, session.machines.get(item.path))
        child: Any = outcome.value if type(outcome) is Value else None
        if not isinstance(child, ChildResult):
            raise session.fail(error)
        fp = past.end_print(child)
        if not past.was_kept(address, fp):
            if self.keeps:
                session.keep(address, fp)
            else:
                self._accept(error)
        decode = session.decoders.get(child_path(*address), _as_it_is)
        was: ChildResult[Any] = recorded.value
        try:
            output = None if was.output is None else decode(was.output)
        except Exception as cause:  # the type is the author's, and may be another one by now
            raise session.fail(error) from cause
        self._came_by(known, recorded, item)
        ended = attrs.evolve(child, status=was.status, output=output, text=was.text, error=was.error)
        return Value(ended, known.at, recorded.inputs)

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


def _as_it_is(output: Any) -> Any:
    """Return the output of an agent whose output is JSON."""
    return output
