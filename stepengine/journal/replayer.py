"""
``Replayer``: answers the effects of a run from its past, and says where the past ends.

``RecordedPart`` is what a run must repeat: its records by address, and what of them was used. A journal may be cut at an address
``p#n``: everything of ``p`` from n on is gone with the runs it spawned; on the way up, each ancestor loses the result of the
Spawn that leads to ``p`` and everything after it. What began together with that Spawn keeps what it has.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import attrs
from attrs import frozen

from stepengine.data.alike import list_names
from stepengine.data.effects import EFFECT_KINDS, KINDS, RUNS, AskPerson, CallBody, CallModel, Spawn
from stepengine.data.json import JsonDict
from stepengine.data.messages import ToolResult
from stepengine.data.outcomes import Begun, Failure, Single, Stop, Value, was_given_up
from stepengine.data.questions import Answer, Question
from stepengine.data.state import ChildResult
from stepengine.data.tools import Control, ToolBinding, ToolSpec, Validated
from stepengine.errors import AgentError, JournalCorrupt, JournalError, ReplayDivergence
from stepengine.journal.divergence import (
    DivergenceKind,
    Field,
    defined_at,
    divergence_error,
    effect_label,
    fields_between,
    fields_of_effects,
    guess,
    parked_at,
)
from stepengine.journal.encoding import (
    bare,
    comparable,
    outcome_members,
    questions_of,
    restored,
    sandbox_of,
    touched_world,
)
from stepengine.journal.fingerprints import Fingerprints
from stepengine.journal.history import History, changes_since, parent_of, stop_of
from stepengine.journal.modes import RunToReplay
from stepengine.journal.records import ROOT, Address, Intent, Result, computed_record, shown_address
from stepengine.machine.plan import RunPlan
from stepengine.runtime.failfast import LOST
from stepengine.runtime.performer import Item, child_path

__all__ = (
    "NO_LEEWAY",
    "Cut",
    "Leeway",
    "RecordedPart",
    "Replayer",
    "address_of",
    "check_repeats",
    "for_once",
    "is_refused",
    "live_kinds",
    "place_of",
)

LISTED_EFFECTS = 10
"""Enough to see which effects they are; further ones are only counted."""
TEXT_FORM = re.compile(r"(?:(?P<path>[0-9]{1,9}(?:\.[0-9]{1,9})*)?#)?(?P<seq>-1|[0-9]{1,9})")


def for_once(answer: Any) -> Any:
    """Return an answer without what it says of later calls: a yes for good becomes a yes to the call that was asked about."""
    if not isinstance(answer, Answer) or answer.remember is None:
        return answer
    # A journal of somebody else may hold "always allow"; believed as that it would let calls run which its reader never
    # saw. The yes counts for the one recorded call.
    return attrs.evolve(answer, text="yes" if answer.agrees else answer.text, remember=None, covers="")


def _is_permission(item: Item) -> bool:
    return isinstance(item.effect, AskPerson) and item.effect.purpose == "permission"


def place_of(history: History, at: int | str) -> Address:
    """
    Return the address of an effect that has a result, as ``address_of`` does.

    Raises:
        JournalError: for what is not an address; when there is no such effect, or it has no result.
    """
    address = address_of(at)
    _check_place(history, address)
    return address


def address_of(at: int | str) -> Address:
    """
    Return the address that a number of the root's effects, ``"#5"`` or ``"3.2#1"`` means.

    Raises:
        JournalError: for anything else.
    """
    # `True` is an `int` to Python, and would mean effect 1.
    found = None if isinstance(at, bool) else TEXT_FORM.fullmatch(str(at))
    if found is None:
        msg = f"an address is a number of an effect, or text such as '#5' or '3.2#1' (effect 1 of the child 3.2), not {at!r}"
        raise JournalError(msg)
    return found["path"] or "", int(found["seq"])


def _check_place(history: History, address: Address) -> None:
    where = shown_address(*address)
    if address == ROOT:
        return
    # The commonest slip is a number that is too high, so the message says how far they go.
    if address not in history.intents:
        numbers = [seq for path, seq in history.intents if path == address[0] and seq >= 0]
        known = f"the run there has the effects 0 to {max(numbers)}" if numbers else "there is no run at that path"
        msg = f"{history.name} has no effect {where}: {known}"
        raise JournalError(msg)
    if address not in history.results:
        msg = f"effect {where} of {history.name} has no result yet; resume the run, or fork it at an earlier effect"
        raise JournalError(msg)


class Cut:
    """
    The places where a journal was cut; without any, everything stays.

    What a child in the background did is nothing that its parent's effects follow from, before the parent was told how it ended.

    Args:
        history: What is cut.
    """

    def __init__(self, history: History) -> None:
        self._history = history
        self._ends: dict[str, int] = {}

    def __bool__(self) -> bool:
        return bool(self._ends)

    # Not a point in the file but a place in the tree: records of runs that go on beside each other stand in the order
    # in which their results came, so everything behind a line would cut siblings off that have nothing to do with the
    # edit, and what they did would be paid for again.
    def at(self, address: Address) -> None:
        """Cut at *address*: the effect there, and what follows from it, are gone."""
        path, seq = address
        self._end(path, seq)
        while path:
            # What began together with the `Spawn` on the way up stays, which is why the end is behind the last of the
            # group: siblings asked for nothing that the cut child gave. The child's own result goes with the cut, as
            # `keeps_result` says.
            if not self._history.is_background(path):
                self._end(parent_of(path)[0], self._history.last_together(parent_of(path)) + 1)
            elif (told := self._history.told_at(path)) is not None:
                self._end(*told)
            else:
                break
            path = parent_of(path)[0]

    def _end(self, path: str, seq: int) -> None:
        self._ends[path] = min(seq, self._ends.get(path, seq))

    def keeps_intent(self, address: Address) -> bool:
        """Return whether an intent stays."""
        # Asked for each effect of a replay, where nearly never anything was cut.
        if not self._ends or address == ROOT:
            return True
        path, seq = address
        while True:
            if seq >= self._ends.get(path, seq + 1):
                return False
            if not path:
                return True
            path, seq = parent_of(path)

    def keeps_result(self, address: Address) -> bool:
        """Return whether a result stays: not that of a run which was itself cut."""
        if not self._ends:
            return True
        path, seq = address
        # The root's result follows from everything below it, so any cut takes it away.
        if address == ROOT:
            return False
        if seq == -1:
            return path not in self._ends and self.keeps_intent(parent_of(path))
        if not self.keeps_intent(address):
            return False
        started = child_path(*address)
        return started not in self._ends or self._history.is_background(started)


def check_repeats(history: History, cut: Cut, act: str, *, undone: bool = False) -> None:
    """
    Raise when something may happen again that must not, unless somebody says so.

    Args:
        history: What was recorded.
        cut: Where it is cut off.
        act: What cuts it off, such as ``"forking at #3"``.
        undone: Whether the files that were written there are brought back, so that writing them again is no repeat.

    Raises:
        JournalError: it lists the effects that changed the world and are cut off.
    """
    # Refused before anything happens, with all of them listed: by the time a second mail has been sent it is too late
    # to ask (reliability:JR36).
    gone = {a: i for a, i in history.intents.items() if not cut.keeps_intent(a) and touched_world(i.effect)}
    lost = [i for a, i in gone.items() if not (undone and a in history.results and history.results[a].writes)]
    if lost:
        listed = ", ".join(
            [f"{shown_address(i.path, i.seq)} {effect_label(history.form(i))}" for i in lost[:LISTED_EFFECTS]]
        )
        more = f" and {len(lost) - LISTED_EFFECTS} more" if len(lost) > LISTED_EFFECTS else ""
        msg = (
            f"{act} cuts off effects that changed the world and may happen again: {listed}{more}. "
            "Pass allow_repeat=True (--allow-repeat) to go on"
        )
        raise JournalError(msg)


LIVE_KINDS = (*[kind for kind, row in KINDS.items() if row.changes_world], "model_call")


def live_kinds(names: Collection[str], *, has_pace: bool) -> frozenset[str]:
    """
    Return the types of effects that a replay is to perform for real.

    Raises:
        JournalError: when a name is none of theirs, or model calls are to be performed with others, or at a pace.
    """
    # A text is a collection of its letters, and `live="perform"` is what everybody writes first.
    given = (names,) if isinstance(names, str) else names
    wrong = [name for name in given if name not in LIVE_KINDS]
    if wrong:
        msg = f"live={wrong[0]!r} is not a kind of effect that a replay can perform; those are: {list_names(LIVE_KINDS, wrong[0])}"
        raise JournalError(msg)
    if "model_call" in given and (len(given) > 1 or has_pace):
        msg = "live='model_call' goes alone: new replies lead to other calls, which have no recorded result or pace"
        raise JournalError(msg)
    return frozenset(given)


@frozen
class Leeway:
    """
    What a recorded run may do differently this time; by default nothing.

    Attributes:
        live: The types of effects that are performed for real; their results must be the recorded ones.
        may_leave: Whether it may end before its record does.
        may_repeat: Whether effects that changed the world may be cut off, and so happen again.
        keeps: Whether any effect of the recorded kind is answered with its outcome.
        keeps_replies: Whether a model that is asked something else than is recorded is taken to say the same.
        accepts: Says whether one that is not quite the recorded one is.
        doubts_yes: Whether a recorded permission lets nothing run, as one of a journal that somebody else made: it counts for
            the call whose result is recorded with it, once, and for nothing else.
    """

    live: frozenset[str] = frozenset()
    may_leave: bool = False
    may_repeat: bool = False
    keeps: bool = False
    keeps_replies: bool = False
    accepts: Callable[[ReplayDivergence], bool] | None = None
    doubts_yes: bool = False


# One value in place of ten parameters that are handed through five functions; frozen, as one of them is the default of
# all.
NO_LEEWAY = Leeway()


class RecordedPart:
    """
    The recorded part of a run.

    Args:
        history: What was recorded.
        prints: Computes the fingerprints of what is asked for now.

    Attributes:
        cut: Where the record does not hold any more.
        leeway: What may be different this time.
        grew: Whether the run asked for something that is not recorded, and got it.
        refused: Why nothing was cut off, if that was asked for and is not allowed.
        answered: How many effects were answered from the record.
    """

    def __init__(self, history: History, prints: Fingerprints, leeway: Leeway = NO_LEEWAY) -> None:
        self.history = history
        self.prints = prints
        self.leeway = leeway
        self.cut = Cut(history)
        self.grew = False
        self.refused: JournalError | None = None
        self.answered = 0
        self._handler = ""
        # Made when first asked: only a fork with `tools=` looks for an effect by what it is and not by where it stands.
        self._by_print: dict[str, dict[str, list[Address]]] | None = None
        # That a replay has come by every record is what makes it a test: an agent that silently stops doing something
        # gives no other sign (replay:D15).
        self._used: set[Address] = {ROOT}

    def intent(self, address: Address) -> Intent | None:
        """Return the recorded intent at an address that still holds."""
        known = self.history.intents.get(address)
        return known if known is None or not self.cut or self.cut.keeps_intent(address) else None

    def result(self, address: Address) -> Result | None:
        """Return the recorded result at an address that still holds."""
        # By address, never by position: children that run at once come by their records in an order of their own.
        known = self.history.results.get(address)
        return known if known is None or not self.cut or self.cut.keeps_result(address) else None

    def cut_off(self, address: Address) -> None:
        """
        Let the record hold no longer from *address* on.

        Raises:
            JournalError: when effects are cut off that must not happen again; it is kept in ``refused``.
        """
        self.cut.at(address)
        try:
            # Looked at after the cut and before anything follows from it: what would happen again is known only by what
            # the cut takes away.
            if not self.leeway.may_repeat:
                check_repeats(
                    self.history, self.cut, f"extending {self.history.name} from {shown_address(*address)} on"
                )
        except JournalError as error:
            self.refused = error
            raise

    def start_over(self) -> None:
        """Keep nothing of the record: the run is started with something else; errors as for ``cut_off``."""
        self.cut_off(("", 0))
        # What was looked up for another start, such as its system prompt, is no longer what this one would find.
        self.history.prompts.clear()
        self.history.windows.clear()

    @property
    def left(self) -> int:
        """How many recorded effects the run did not come by."""
        return len(self.history.intents) - len(self._used)

    def same_elsewhere(self, asked: Intent, *, models: bool = False) -> Address | None:
        """
        Return where an equal effect with a result is recorded that the run has not reached yet.

        The first on the same path comes before the first on any other, so that siblings do not take each other's.

        Args:
            asked: The effect.
            models: Whether model calls may be equal, too; by default each is new.
        """
        # A child is not an answer but a run, with effects of its own below it. And a model that is asked the same twice
        # may say two things, so its recorded reply serves only where it is said to.
        if asked.begins_run or (asked.type == "model_call" and not models):
            return None
        if self._by_print is None:
            self._by_print = {}
            for address, intent in reversed(self.history.intents.items()):
                if not intent.begins_run and self._came_to_its_end(address, intent):
                    intent.fp = intent.fp or self.prints.of(intent.effect)
                    self._by_print.setdefault(intent.fp, {}).setdefault(address[0], []).append(address)
        asked.fp = asked.fp or self.prints.of(asked.effect)
        # Siblings run at once and often ask for the same. Each has its own records first, so that they do not take each
        # other's in an order that depends on who is faster.
        paths = self._by_print.get(asked.fp, {})
        own = [asked.path] if asked.path in paths else []
        # Each address is popped as it is looked at, so the whole search of a long run looks at each once (it was a scan
        # of all of them for each effect).
        for waiting in (paths[path] for path in [*own, *reversed(paths)]):
            while waiting:
                address = waiting.pop()
                if address not in self._used:
                    return address
        return None

    def _came_to_its_end(self, address: Address, intent: Intent) -> bool:
        """Return whether an effect has a result of its own, and was not given up by a race, as only members of races can be."""
        known = self.history.results.get(address)
        return known is not None and (intent.gather is None or not was_given_up(self.history.outcome(known)))

    def changes(self, plan: RunPlan) -> list[str]:
        """Return what is not as it was when the run was recorded; only effects decide whether it matters."""
        self._handler = defined_at(plan.definition.handle_steps)
        head = self.history.head
        return [] if head is None else changes_since(head, plan, self.history.name)

    def with_gone_tools(self, plan: RunPlan) -> RunPlan:
        """
        Return *plan* with a stand-in for each recorded tool that the agent does not have any more.

        What it did is in the record; a call that is not recorded fails, because nobody can carry it out.
        """
        # A replay calls no tool, so one that was deleted since must not keep an old recording from being replayed
        # (reliability:JR23). The stand-in only lets the machine find a binding; what comes is the recorded result.
        tools = plan.tools
        recorded = self.history.tools_of(plan.path)
        gone = [name for name in recorded if name not in tools or isinstance(tools[name].runs, Control)]
        if not gone:
            return plan
        stand_ins = {
            name: ToolBinding(ToolSpec(name, "", JsonDict()), lambda given: Validated(given, given)) for name in gone
        }
        return attrs.evolve(plan, tools=_WithStandIns(tools, stand_ins))

    def use(self, address: Address) -> None:
        """Note that the run has come by this address."""
        self._used.add(address)

    def equals(self, known: Intent, asked: Intent) -> bool:
        """Return whether an effect is what was recorded at its address."""
        # Computed when first compared, and kept: a journal's intents carry their own, and only those that were edited
        # by hand have none.
        known.fp = known.fp or self.prints.of(known.effect)
        asked.fp = asked.fp or self.prints.of(asked.effect)
        return known.fp == asked.fp

    def was_kept(self, address: Address, fp: str) -> bool:
        """Return whether an effect with this fingerprint was accepted here when the run went on after an edit."""
        return (address, fp) in self.history.kept

    def same_child(self, known: Value, child: ChildResult) -> bool:
        """Return whether a child that was run again ended as it is recorded."""
        return not self._child_fields(known.value, child)

    def has_run(self, path: str, tool_call_id: str) -> bool:
        """Return whether the record has what came of a tool call of the run at *path*."""
        calls = self.history.about_call("tool_call", path, tool_call_id)
        return any((path, call.seq) in self.history.results for call in calls)

    def has_run_as_asked(self, asked: Address, answer: Answer) -> bool:
        """Return whether the record has what came of the call for which the permission *asked* was given, as it was given."""
        form = self.history.form(self.history.intents[asked])
        (question,) = questions_of(form)
        wanted = question.details if answer.edited_input is None else answer.edited_input
        calls = self.history.about_call("tool_call", asked[0], form.get("tool_call_id"))
        forms = [self.history.form(call) for call in calls if (call.path, call.seq) in self.history.results]
        return any((call["tool_name"], call["input"]) == (question.tool_name, wanted) for call in forms)

    def permissions(self, path: str, tool_call_id: str) -> list[Address]:
        """Return where the run at *path* is recorded to have asked whether a call may run, as far as the run came by it."""
        asked = [(path, intent.seq) for intent in self.history.about_call("ask", path, tool_call_id)]
        return [address for address in asked if address in self._used]

    def end_print(self, child: ChildResult) -> str:
        """Return the fingerprint of how a child ended."""
        return self.prints.value(comparable(child))

    def result_print(self, result: ToolResult) -> str:
        """Return the fingerprint of the result of a tool that yields."""
        return self.prints.value(bare(result))

    def _child_fields(self, known: Any, child: ChildResult) -> Sequence[Field]:
        clean = self.prints.redactor.value
        return list(fields_between(clean(comparable(known)), clean(comparable(child))))

    # --- what is said when it differs ---------------------------------------------------------------------------------

    def changed(self, known: Intent, asked: Intent, item: Item, machine: Any) -> ReplayDivergence:
        """Return the error for an effect that is not the recorded one."""
        # All of them, here where the replay ends anyway: the guess at the cause says whether the same effect stands at
        # another address, so that it was inserted or removed before.
        for intent in self.history.intents.values():
            intent.fp = intent.fp or self.prints.of(intent.effect)
        address = (item.path, item.effect.seq)
        fields = fields_of_effects(self.history, known, asked, self.prints.redactor)
        old, new = effect_label(known.effect), effect_label(asked.effect)
        kind: DivergenceKind = "kind" if fields and fields[0].pointer == "/type" else "changed"
        hint = guess(self.history, address, asked.fp, fields)
        said = f"{new} instead of {old}" if kind == "kind" else f"{new} changed"
        return self._error(address, kind, said, (item, machine), fields=fields, hint=hint)

    def other_start(self, asked: Intent) -> ReplayDivergence:
        """Return the error for a root run that is started with something else than was recorded."""
        known = self.history.intents[ROOT]
        fields = fields_of_effects(self.history, known, asked, self.prints.redactor)
        said = "the run is started with something else"
        return divergence_error(self.history, ROOT, "changed", asked=said, fields=fields)

    def beyond(self, asked: Intent, item: Item, machine: object) -> ReplayDivergence:
        """Return the error for an effect that was not recorded, in a run that is recorded to its end."""
        said = f"{effect_label(asked.effect)} is asked for, but the recorded run had ended before it"
        return self._error((item.path, item.effect.seq), "extra", said, (item, machine))

    def undecodable(self, why: str, item: Item, machine: object) -> ReplayDivergence:
        """Return the error for a recorded outcome that cannot be read any more."""
        said = f"the recorded outcome cannot be read: {why}"
        return self._error((item.path, item.effect.seq), "undecodable", said, (item, machine))

    def other_child(self, known: Value, outcome: Single, item: Item, machine: object) -> ReplayDivergence:
        """Return the error for a child that ended in another way than it is recorded."""
        ours: object = outcome.value if isinstance(outcome, Value) else None
        fields = self._child_fields(known.value, ours) if isinstance(ours, ChildResult) else ()
        said = f"the child {known.value.agent_id} ended in another way"
        hint = "the child's handler computes its output differently"
        return self._error((item.path, item.effect.seq), "changed", said, (item, machine), fields=fields, hint=hint)

    def not_recorded(self, asked: Intent, item: Item, machine: object) -> ReplayDivergence:
        """Return the error for an effect that no model call led to when the run was recorded, and that must not be performed."""
        said = f"{effect_label(asked.effect)} with this input is not recorded, was not made up, and must not be performed here"
        return self._error((item.path, item.effect.seq), "extra", said, (item, machine))

    def other_result(
        self,
        known: Value | Failure,
        now: Value | Failure,
        item: Item,
        machine: object,
        kind: DivergenceKind = "live_result",
    ) -> ReplayDivergence:
        """Return the error for an effect that was performed again, or a body that ran again, and had another result."""
        fields = self._result_fields(known, now)
        said = f"{effect_label(self.history.intents[item.path, item.effect.seq].effect)} has another result than was recorded"
        place = (item.path, item.effect.seq)
        return self._error(place, kind, said, (item, machine), fields=fields)

    def same_result(self, known: Value | Failure, now: Value | Failure) -> bool:
        """Return whether an effect that was performed again had the recorded result."""
        return not self._result_fields(known, now)

    def _result_fields(self, known: Value | Failure, now: Value | Failure) -> Sequence[Field]:
        clean = self.prints.redactor.value
        return list(fields_between(clean(outcome_members(known)), clean(outcome_members(now))))

    def unused(self, agent_id: str, why: BaseException | None = None) -> ReplayDivergence | None:
        """Return the error for records that a run did not reach, if there are any; *why* is what made it fail."""
        # Two counts tell it for nearly every replay; the first that is missing is searched only where something is. A
        # run that was cut, or may leave something, has a reason to.
        #
        # What is left over shows that the code does less than it did when the run was recorded, which no other check
        # would notice. It is returned and not raised, since who asks decides what it means (`Replayer.ends`): a replay
        # raises it unless its mode may leave something, and a fork with `tools=` notes it as the place where the runs part.
        if len(self._used) == len(self.history.intents) or self.cut or self.leeway.may_leave:
            return None
        address, left = next((a, i) for a, i in self.history.intents.items() if a not in self._used)
        said = f"the run ended, but {effect_label(left.effect)} was recorded here"
        left_calls_model = left.type == "model_call"
        # The generator is gone: where it was written is all that is left of it, unless it raised.
        where = self._handler if not address[0] else ""
        if why is not None:
            said += f"\n  it failed: {why}"
            where = getattr(why, "location", "") or where
        return divergence_error(
            self.history,
            address,
            "unused",
            asked=said,
            agent_id=agent_id,
            location=where,
            now_calls_model=left_calls_model,
        )

    def _error(
        self,
        address: Address,
        kind: DivergenceKind,
        said: str,
        where: tuple[Item, object],
        *,
        fields: Sequence[Field] = (),
        hint: str = "",
    ) -> ReplayDivergence:
        # The line of the author's code where the run waits is the most useful thing in the message, and only the parked
        # machine knows it: so it is handed along to here.
        item, machine = where
        hint = self._other_sandbox(item) or hint
        return divergence_error(
            self.history,
            address,
            kind,
            asked=said,
            agent_id=item.plan.definition.id,
            location=parked_at(machine),
            fields=fields,
            hint=hint,
            now_calls_model=isinstance(item.effect, CallModel),
        )

    def _other_sandbox(self, item: Item) -> str:
        """Return the warning for a tool body that another sandbox than the present one carried out, if one did."""
        call, body = self.history.intents.get(parent_of(item.path)), item.plan.body
        form = {} if call is None or body is None else self.history.form(call)
        then, now = form.get("sandbox", ""), "" if body is None else sandbox_of(item.plan, body.tool_name)
        return "" if not then or then == now else f"the program ran in {then}, and runs in {now or 'none'} now"


def is_refused(value: object) -> bool:
    """Return whether a recorded child never started: a limit, an unknown agent, wrong params."""
    return isinstance(value, ChildResult) and not value.run_id


class Replayer:
    """
    The part of a run that deals with what was recorded.

    Args:
        run: The run.
        past: What was recorded.
    """

    def __init__(self, run: RunToReplay, past: RecordedPart) -> None:
        self._run = run
        self._past = past
        self._leeway = past.leeway
        # Asked once: whether the record has an end does not change while it is read.
        self._closed = run.mode.is_closed(past.history)
        self._given_up: set[str] = set()

    def is_performed(self, item: Item) -> bool:
        """Return whether a recorded effect is performed all the same, to see if its result is still the same."""
        # The body of a tool that yields is repeated; its own effects are performed.
        return not isinstance(item.effect, CallBody) and EFFECT_KINDS[type(item.effect)] in self._leeway.live

    def meets(self, item: Item, asked: Intent) -> bool:
        """
        Return whether an effect needs no intent any more: it is recorded, or the replay ends before it.

        Raises:
            ReplayDivergence: when it is not what was recorded, or a run that is recorded to its end goes on.
        """
        met = self._meets(item, asked)
        if not met:
            self._refuse_recorded_yes(item)
        return met

    def _meets(self, item: Item, asked: Intent) -> bool:
        run, past = self._run, self._past
        address = (item.path, item.effect.seq)
        known = past.intent(address)
        # A run that lost its race is cut in the middle, wherever it was; that it asks for one thing more, or less, than
        # last time is chance and no divergence.
        if known is None and self._was_given_up(item.path):
            return True
        if known is None:
            ended = self._end_of(item.path)
            # Nothing is recorded here: either the record just ends (it was cut off by a crash or a stop, and the run
            # goes on or halts there), or the run asks for something after its recorded end, which is a divergence of
            # the kind `extra`.
            over = self._closed and past.history.is_complete if ended is None else self._stop_in(ended) is None
            if over and run.mode.cuts_off:
                self._cut_off(address)
                return False
            if over:
                raise run.fail(past.beyond(asked, item, run.machines.get(item.path)))
            ends = self._closed or ended is not None
            past.grew = past.grew or not ends
            return ends
        is_equal = past.equals(known, asked)
        # The comparison is by fingerprint of what the outside world would see (replay:D2). Compared by all fields, each
        # new default of ours would break every journal.
        if (not is_equal and not self._serves(known, asked, item)) or self._is_doubted(address, item):
            self._cut_off(address)
            return False
        past.use(address)
        if run.mode.copies:
            run.append(known if is_equal and run.mode.takes_over else asked)
        # Nothing is written again, but later requests are stored as differences to this one, so its messages have to be
        # known.
        elif is_equal:
            run.remember(asked)
        return True

    def _serves(self, known: Intent, asked: Intent, item: Item) -> bool:
        """Return whether an effect is answered with the outcome of another one; if not, the record ends before it."""
        run, past, address = self._run, self._past, (asked.path, asked.seq)
        # Somebody has looked at this difference before and accepted it; the journal says so, and for exactly this
        # fingerprint.
        if past.was_kept(address, asked.fp):
            return True
        if run.mode.cuts_off:
            return False
        keeps = self._leeway.keeps or (self._leeway.keeps_replies and asked.type == "model_call")
        if keeps and known.type == asked.type and not self._approves_another(address, item):
            run.accept(address, asked.fp)
        else:
            self._accept(past.changed(known, asked, item, run.machines.get(item.path)))
        return True

    def _approves_another(self, address: Address, item: Item) -> bool:
        """
        Return whether an answer would let a call run that nobody was asked about: an approval covers only its own input.

        Where the call has run already, or nobody has agreed, nothing runs.
        """
        # "Keep what is recorded" must not mean that a yes to `rm a` is one to `rm b` (reliability:R8).
        effect = item.effect
        if not isinstance(effect, AskPerson) or effect.purpose != "permission":
            return False
        known = self.result(address)
        if known is None:
            return any(key in self._run.answers for q in effect.questions for key in (q.id, q.text))
        answers: Any = getattr(self._past.history.outcome(known), "value", ())
        return any(answer.agrees for answer in answers) and not self._past.has_run(item.path, effect.tool_call_id)

    def _is_doubted(self, address: Address, item: Item) -> bool:
        """
        Return whether a recorded permission would let a call run that nobody here allowed, so that it is asked for again.

        Raises:
            JournalError: where nothing can be asked, because the run is only repeated.
        """
        if not (self._leeway.doubts_yes and _is_permission(item)):
            return False
        # A journal that somebody else wrote may hold any permission. It is believed for a call whose result is recorded
        # with it, since then nothing runs; anything else would let a stranger's file allow calls on this machine.
        known, past, run = self.result(address), self._past, self._run
        answers: Any = () if known is None else getattr(past.history.outcome(known), "value", ())
        if not any(answer.agrees for answer in answers):
            return False
        if run.mode.cuts_off:
            return not past.has_run_as_asked(address, answers[0])
        if "tool_call" not in self._leeway.live:
            return False
        msg = (
            f"{past.history.name} is somebody else's, and its permission at {shown_address(*address)} would let "
            f"{item.effect.questions[0].tool_name!r} run, which nobody here allowed; a replay asks nobody"  # type: ignore[union-attr]
        )
        raise run.fail(JournalError(msg))

    def _refuse_recorded_yes(self, item: Item) -> None:
        """
        Let no call begin on somebody else's permission that was believed only because the call's outcome is recorded, too.

        Raises:
            JournalError: when it would, since the record does not hold any more in between.
        """
        # A yes was believed since the call that it allowed has its result in the record. If the record is then cut
        # between the two, that yes would let a call run that nobody here has allowed.
        call_id = getattr(item.effect, "tool_call_id", "")
        if not self._leeway.doubts_yes or not call_id or _is_permission(item):
            return
        for address in self._past.permissions(item.path, call_id):
            known = self.result(address)
            answers: Any = () if known is None else getattr(self._past.history.outcome(known), "value", ())
            if any(answer.agrees for answer in answers):
                msg = (
                    f"{self._past.history.name} is somebody else's, and its permission at {shown_address(*address)} would let "
                    f"a call run anew that nobody here allowed; fork it before that, so that you are asked"
                )
                raise self._run.fail(JournalError(msg))

    def starts_alike(self, asked: Intent) -> None:
        """
        Accept that the root run is started with something else than was recorded.

        Raises:
            ReplayDivergence: when that is to be the same.
        """
        if self._past.was_kept(ROOT, asked.fp):
            return
        if not self._leeway.keeps:
            raise self._past.other_start(asked)
        self._run.accept(ROOT, asked.fp)

    def _cut_off(self, address: Address) -> None:
        try:
            self._past.cut_off(address)
        except JournalError as error:
            raise self._run.fail(error) from None

    def _accept(self, error: ReplayDivergence) -> None:
        """Raise *error* unless the effect is of the recorded kind, and the caller says that its recorded outcome serves."""
        if error.kind != "changed" or self._leeway.accepts is None or not self._leeway.accepts(error):
            raise self._run.fail(error)

    def result(self, address: Address) -> Result | None:
        """Return the recorded result at an address."""
        return self._past.result(address)

    def is_live(self, path: str) -> bool:
        """Return whether what has no result may be performed: not in a run that is recorded to its end."""
        return not self._closed and self._end_of(path) is None and not self._was_given_up(path)

    def halts(self, item: Item) -> bool:
        """Return whether the run stops before an effect that has no result."""
        return not self.is_live(item.path)

    def until_cut(self, known: Result, item: Item) -> tuple[asyncio.Future[None], Sequence[str]] | None:
        """Return what is done once a result of children in the background holds no longer, and which; ``None`` where it holds for good."""
        return None

    def ends(self, error: ReplayDivergence | None) -> None:
        """
        Deal with records that the run did not come by.

        Raises:
            ReplayDivergence: that *error*, unless the run may leave something.
        """
        if error is not None and not self._run.mode.may_leave(self._past):
            raise error

    def _end_of(self, path: str) -> Result | None:
        """Return the recorded result of the child at *path*, or of the nearest run around it that has one."""
        past = self._past
        # The nearest run around counts, since a child that was cut off when its parent ended has no end of its own.
        while path:
            is_background = past.history.is_background(path)
            known = self.result((path, -1) if is_background else parent_of(path))
            if known is not None:
                return known
            path = parent_of(path)[0]
        return None

    def _stop_in(self, ended: Result) -> Stop | None:
        """Return what stopped a recorded child from outside, such as its time limit, if anything did."""
        child: object = getattr(self._past.history.outcome(ended), "value", None)
        if isinstance(child, ToolResult):
            return Stop("cancelled") if child.status == "cancelled" else None
        return stop_of(child.status, child.error) if isinstance(child, ChildResult) else None

    def was_begun(self, address: Address) -> bool:
        """Return whether an effect was begun by a process that ended before it had a result."""
        return self._past.intent(address) is not None

    def answer(self, known: Result, item: Item) -> Value | Failure:
        """Return the recorded outcome of an effect."""
        run = self._run
        try:
            outcome = self._past.history.outcome(known)
        # Read only now: a journal of 10,000 steps is compared by fingerprints, and what nobody asks for is never
        # decoded. So what does not decode any more shows here, and is told as a divergence with its place, which ends
        # the run like one.
        except JournalCorrupt as error:
            raise run.fail(self._past.undecodable(error.message, item, run.machines.get(item.path))) from error
        # Providers that count (a rehearsed model, a test's script) have to be at the right place when the run goes
        # live; so they are told of each call that the record answers, with its lost attempts.
        if isinstance(item.effect, CallModel):
            run.tell(item.effect.request, 1 + len(known.attempts))
        # Written anew without its "for good", so that whoever goes on from this journal does not find it again.
        if self._leeway.doubts_yes and isinstance(outcome, Value) and _is_permission(item):
            once = attrs.evolve(outcome, value=tuple(map(for_once, outcome.value)))
            if once != outcome:
                run.append(Result(item.path, item.effect.seq, known.at, once, known.attempts))
                run.timing.came_by(known.at)
                self._past.answered += 1
                return once
        self._came_by(known, outcome, item)
        return outcome

    def compare(self, known: Result, outcome: Single, item: Item) -> Single:
        """
        Return the recorded outcome of an effect that was performed again.

        Raises:
            ReplayDivergence: when it had another one.
        """
        run, past = self._run, self._past
        # The recorded value is what the run goes on with, though it was performed again: what is only equal may still
        # differ in what nobody compares.
        recorded = self.answer(known, item)
        if isinstance(outcome, Stop):
            return outcome
        if not past.same_result(recorded, outcome):
            raise run.fail(past.other_result(recorded, outcome, item, run.machines.get(item.path)))
        return recorded

    def _came_by(self, known: Result, outcome: Value | Failure, item: Item) -> None:
        self._run.timing.came_by(known.at)
        self._past.answered += 1
        # The very record is taken over, without its outcome being encoded again: a replay keeps no second copy of what
        # equals the first, and its journal is byte-equal by construction.
        if self._run.mode.takes_over:
            self._run.append(known)
        elif self._run.mode.copies:
            writes = [write.form() for write in self._past.history.writes(known)] if known.writes else ()
            made = Result(item.path, item.effect.seq, known.at, outcome, known.attempts, writes=writes)
            self._run.append(made)

    def refused_run(self, address: Address, item: Item) -> Single | None:
        """Return the recorded result of a child, or of the body of a tool, that never started; it must not start now."""
        known = self.result(address)
        if known is None:
            return None
        outcome = self._past.history.outcome(known)
        # A limit, or an agent that was unknown then, kept it from starting. Now it might well start, and would have
        # nothing recorded below it.
        refused = not isinstance(outcome, Value) or (isinstance(item.effect, Spawn) and is_refused(outcome.value))
        if isinstance(item.effect, CallBody) and isinstance(outcome, Value) and outcome.value.status == "cancelled":
            # It was given up before it began, or before anything that it did.
            refused = (child_path(*address), 0) not in self._past.history.intents
        return self.answer(known, item) if refused else None

    def halts_before_run(self, address: Address, item: Item) -> bool:
        """Return whether the run stops before it starts another one, which was never begun and so counts for nothing."""
        return type(item.effect) in RUNS and self._past.intent(address) is None and self.halts(item)

    def has_begun(self, address: Address) -> bool:
        """Return whether a child is recorded as one that ran, whatever would refuse it now."""
        past = self._past
        path = address[0] if address[1] == -1 else child_path(*address)
        return (past.result(address) or past.intent((path, 0))) is not None

    def confirm(self, known: Result, outcome: Single, item: Item) -> Single | None:
        """
        Return what a child gave that was run again; ``None`` when that is new, and may be.

        Raises:
            ReplayDivergence: when it ended in another way than it is recorded.
        """
        run, past = self._run, self._past
        # A child is run again over its own records, although its parent's record has its result: only so are its
        # effects compared, and only so does its output exist as the author's own type, which no journal holds. What the
        # parent recorded is the check.
        recorded: Any = past.history.outcome(known)
        if isinstance(item.effect, CallBody):
            if isinstance(outcome, Value):
                outcome = attrs.evolve(
                    outcome, inputs=recorded.inputs
                )  # what came meanwhile is nothing that the body gave
            same = isinstance(outcome, Value) and past.same_result(recorded, outcome)
        else:
            same = isinstance(outcome, Value) and past.same_child(recorded, outcome.value)
        if same:
            self._copy_computed(known, outcome)
            self._came_by(known, recorded, item)
            return Value(outcome.value, known.at, recorded.inputs, outcome.body)  # type: ignore[union-attr]  # it is the same
        if run.mode.cuts_off:
            told = past.history.told_at(item.path) if item.effect.seq == -1 else None
            self._cut_off(told or (item.path, item.effect.seq + 1))
            return None
        return self._other_end(known, recorded, outcome, item)

    def _other_end(self, known: Result, recorded: Any, outcome: Single, item: Item) -> Single:
        """Return the recorded end of a child that ended differently now, where the recorded one may serve."""
        run, past, address = self._run, self._past, (item.path, item.effect.seq)
        if isinstance(item.effect, CallBody):
            return self._other_result(known, recorded, outcome, item)
        error = past.other_child(recorded, outcome, item, run.machines.get(item.path))
        child: object = outcome.value if isinstance(outcome, Value) else None
        if not isinstance(child, ChildResult):
            raise run.fail(error)
        fp = past.end_print(child)
        if not past.was_kept(address, fp):
            if self._leeway.keeps:
                run.accept(address, fp)
            else:
                self._accept(error)
        path = item.path if item.effect.seq == -1 else child_path(*address)
        # The recorded output is JSON, and the handler expects its agent's own type: the child that was run again says
        # how to make it.
        decode = run.decoders.get(path, _as_it_is)
        was: ChildResult = recorded.value
        try:
            output = None if was.output is None else decode(was.output)
        except Exception as cause:  # the type is the author's, and may be another one by now
            raise run.fail(error) from cause
        self._came_by(known, recorded, item)
        ended = attrs.evolve(child, status=was.status, output=output, text=was.text, error=was.error)
        return Value(ended, known.at, recorded.inputs)

    def _other_result(self, known: Result, recorded: Any, outcome: Single, item: Item) -> Single:
        """Return the recorded result of a tool body that gave another one now, where the recorded one may serve."""
        run, past = self._run, self._past
        if not isinstance(outcome, Value):
            msg = f"the body of the tool {item.effect.tool_name!r} was stopped where it is recorded to have ended"  # type: ignore[union-attr]
            raise run.fail(JournalError(msg))
        error = past.other_result(recorded, outcome, item, run.machines.get(item.path), "changed")
        fp = past.result_print(outcome.value)
        if not past.was_kept((item.path, item.effect.seq), fp):
            if self._leeway.keeps:
                run.accept((item.path, item.effect.seq), fp)
            else:
                self._accept(error)
        self._copy_computed(known, outcome)
        self._came_by(known, recorded, item)
        return Value(recorded.value, known.at, recorded.inputs, outcome.body)

    def _copy_computed(self, known: Result, outcome: Single) -> None:
        """Write what was worked out in the body of a tool into a journal that is written anew, before its result."""
        body = getattr(outcome, "body", None)
        if self._run.mode.copies and body is not None and body.computed:
            self._run.append(computed_record((known.path, known.seq), known.at, body.computed))

    def begun(self, item: Item) -> Begun | None:
        """Return what a model call had used when it was stopped; ``None`` when nothing is known of that."""
        return self._past.history.begun.get((item.path, item.effect.seq))

    def computed(self, path: str, number: int) -> Any:
        """Return what is recorded of a ``Compute`` of the body at *path*; see ``Body.recalled``."""
        call = parent_of(path)
        values = self._past.history.computed.get(call)
        # Where the record was cut in the body, or after it, what was worked out is worked out again.
        if values is None or self._past.result(call) is None:
            return None
        return values[number] if number < len(values) else self.halt(path, ())

    def give_up(self, path: str) -> None:
        """Let the run at *path*, which began before another member of its race had won, end where its record does."""
        self._given_up.add(path)

    def _was_given_up(self, path: str) -> bool:
        """Return whether the run at *path*, or one around it, was given up."""
        while self._given_up and path:
            if path in self._given_up:
                return True
            path = parent_of(path)[0]
        return False

    def has_lost(self, item: Item) -> bool:
        """Return whether the race of a member that has no result was won by another one, before its process ended."""
        past, gather = self._past, item.gather
        if gather is None or not gather.races:
            return False
        # The winner of a race may have been recorded, and the process have died before its losers were: then these have
        # no result, and must not get one by being performed.
        first, seq = gather.effects[0].seq, item.effect.seq
        for start, stop in gather.races:
            if start <= seq - first < stop:
                others = [past.result((item.path, first + n)) for n in range(start, stop)]
                return any(known and not was_given_up(past.history.outcome(known)) for known in others)
        return False

    def halt(self, path: str, questions: tuple[Question, ...], *, waits: bool = False) -> Stop:
        """Return how a run stops where its record stops: as the recorded one did, for *questions*, or because it only *waits*."""
        # The run has to end here although nobody stopped it this time, because the recorded one did. Which end that was
        # is looked for from the nearest to the farthest: that of a child around, that of its race, a suspension, the
        # last stop that was written down. A record that says nothing of all this was cut off by a crash, which a replay
        # shows as cancelled.
        at = self._run.timing.last
        ended = self._end_of(path)
        stop = None if ended is None else self._stop_in(ended)
        if stop is not None:
            return attrs.evolve(stop, at=at)
        if self._was_given_up(path):
            # Those below a run that has lost are told nothing of its race, as where nothing is replayed.
            return Stop("cancelled", at, AgentError(LOST) if path in self._given_up else None)
        history = self._past.history
        last = history.stop
        if (questions or waits) and (last is None or last.input["kind"] == "suspended"):
            return Stop("suspended", at, questions=questions)
        for record in reversed(history.inputs):
            if record.input.get("type") == "stop" and record.input["kind"] != "suspended":
                error = record.input.get("error")
                return Stop(record.input["kind"], at, restored(error) if error else None)
        return Stop("cancelled", at)


def _as_it_is(output: Any) -> Any:
    """Return the output of an agent whose output is JSON."""
    return output


class _WithStandIns(dict[str, ToolBinding]):
    """A run's tools with stand-ins; a tool that ``pre_run`` hooks add goes to the run's own table, too, where performers look."""

    def __init__(self, own: Mapping[str, ToolBinding], stand_ins: Mapping[str, ToolBinding]) -> None:
        super().__init__({**own, **stand_ins})
        self._own = own

    def __setitem__(self, name: str, binding: ToolBinding) -> None:
        super().__setitem__(name, binding)
        self._own[name] = binding  # type: ignore[index]
