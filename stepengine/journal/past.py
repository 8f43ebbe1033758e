"""``Past``: what a run must repeat: its records by address, what of them was used, and how they are compared."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs

from stepengine.data.effects import CallModel
from stepengine.data.json import JsonDict
from stepengine.data.outcomes import Failure, Single, Stop, Value
from stepengine.data.state import ChildResult, RunStatus
from stepengine.data.tools import Control, ToolBinding, ToolSpec, Validated
from stepengine.errors import JournalError, LimitExceeded, ReplayDivergence
from stepengine.journal.cut import Cut, check_repeats
from stepengine.journal.divergence import (
    DivergenceKind,
    Field,
    defined_at,
    diverged,
    fields_between,
    fields_of_effects,
    guess,
    parked_at,
    verb,
)
from stepengine.journal.fingerprints import Fingerprints
from stepengine.journal.forms import comparable, outcome_members
from stepengine.journal.history import History
from stepengine.journal.openings import changes_since
from stepengine.journal.records import ROOT, Address, Intent, Result, shown_address
from stepengine.machine.plan import RunPlan
from stepengine.runtime.performer import Item

__all__ = ("Past", "is_refused", "stop_of")


class Past:
    """
    The recorded part of a run.

    Args:
        history: What was recorded.
        prints: Computes the fingerprints of what is asked for now.

    Attributes:
        cut: Where the record does not hold any more.
        is_loose: Whether models answer anew, so that not everything recorded will be asked for again.
        grew: Whether the run asked for something that is not recorded, and got it.
        may_leave: Whether the run may end before its record does.
        may_repeat: Whether effects that changed the world may be cut off, and so happen again.
        refused: Why nothing was cut off, if that was asked for and is not allowed.
        answered: How many effects were answered from the record.
    """

    def __init__(self, history: History, prints: Fingerprints) -> None:
        self.history = history
        self.prints = prints
        self.cut = Cut(history.last_together)
        self.grew = False
        self.is_loose = False
        self.may_leave = False
        self.may_repeat = False
        self.refused: JournalError | None = None
        self.answered = 0
        self._handler = ""
        self._by_print: dict[str, list[Address]] | None = None
        self._used: set[Address] = {ROOT}

    def intent(self, address: Address) -> Intent | None:
        """Return the recorded intent at an address that still holds."""
        known = self.history.intents.get(address)
        return known if known is None or not self.cut or self.cut.keeps_intent(address) else None

    def result(self, address: Address) -> Result | None:
        """Return the recorded result at an address that still holds."""
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
            if not self.may_repeat:
                check_repeats(
                    self.history, self.cut, f"extending {self.history.name} from {shown_address(*address)} on"
                )
        except JournalError as error:
            self.refused = error
            raise

    def start_over(self) -> None:
        """Keep nothing of the record: the run is started with something else; errors as for ``cut_off``."""
        self.cut_off(("", 0))
        self.history.prompts.clear()
        self.history.windows.clear()

    @property
    def left(self) -> int:
        """How many recorded effects the run did not come by."""
        return len(self.history.intents) - len(self._used)

    def same_elsewhere(self, asked: Intent) -> Address | None:
        """Return where an equal effect with a result stands that the run did not come by yet (replay D12)."""
        if self._by_print is None:
            self._by_print = {}
            for address, intent in reversed(self.history.intents.items()):
                if intent.type not in ("CallModel", "Spawn") and address in self.history.results:
                    intent.fp = intent.fp or self.prints.of(intent.effect)
                    self._by_print.setdefault(intent.fp, []).append(address)
        asked.fp = asked.fp or self.prints.of(asked.effect)
        waiting = self._by_print.get(asked.fp, [])
        while waiting:
            address = waiting.pop()
            if address not in self._used:
                return address
        return None

    def changes(self, plan: RunPlan) -> list[str]:
        """Return what is not as it was when the run was recorded; only effects decide whether it matters (JR24)."""
        self._handler = defined_at(plan.definition.handle_steps)
        head = self.history.head
        return [] if head is None else changes_since(head, plan, self.history.name)

    def with_gone_tools(self, plan: RunPlan) -> RunPlan:
        """
        Return *plan* with a stand-in for each recorded tool that the agent does not have any more (reliability JR23).

        What it did is in the record; a call that is not recorded fails, because nobody can carry it out.
        """
        tools = plan.tools
        recorded = self.history.tools_of(plan.path)
        gone = [name for name in recorded if name not in tools or type(tools[name].runs) is Control]
        if not gone:
            return plan
        stand_ins = {
            name: ToolBinding(ToolSpec(name, "", JsonDict()), lambda given: Validated(given, given)) for name in gone
        }
        return attrs.evolve(plan, tools={**tools, **stand_ins})

    def use(self, address: Address) -> None:
        """Note that the run has come by this address."""
        self._used.add(address)

    def equals(self, known: Intent, asked: Intent) -> bool:
        """Return whether an effect is what was recorded at its address."""
        known.fp = known.fp or self.prints.of(known.effect)
        asked.fp = asked.fp or self.prints.of(asked.effect)
        return known.fp == asked.fp

    def was_kept(self, address: Address, fp: str) -> bool:
        """Return whether what has this fingerprint was accepted here when the run went on after an edit."""
        return (address, fp) in self.history.kept

    def same_child(self, known: Value, child: ChildResult[Any]) -> bool:
        """Return whether a child that was run again ended as it is recorded."""
        return not self._child_fields(known.value, child)

    def has_run(self, path: str, tool_call_id: str) -> bool:
        """Return whether the record has what came of a tool call of the run at *path*."""
        calls = [i for (p, _), i in self.history.intents.items() if p == path and i.type == "CallTool"]
        return any(
            self.history.form(call)["tool_call_id"] == tool_call_id and (path, call.seq) in self.history.results
            for call in calls
        )

    def end_print(self, child: ChildResult[Any]) -> str:
        """Return the fingerprint of how a child ended."""
        return self.prints.value(comparable(child))

    def _child_fields(self, known: Any, child: ChildResult[Any]) -> Sequence[Field]:
        clean = self.prints.redactor.value
        return list(fields_between(clean(comparable(known)), clean(comparable(child))))

    # --- what is said when it differs ---------------------------------------------------------------------------------

    def changed(self, known: Intent, asked: Intent, item: Item, machine: Any) -> ReplayDivergence:
        """Return the error for an effect that is not the recorded one."""
        for intent in self.history.intents.values():
            intent.fp = intent.fp or self.prints.of(intent.effect)
        address = (item.path, item.effect.seq)
        fields = fields_of_effects(self.history, known, asked, self.prints.redactor)
        old, new = verb(known.effect), verb(asked.effect)
        kind: DivergenceKind = "kind" if fields and fields[0].pointer == "/type" else "changed"
        hint = guess(self.history, address, asked.fp, fields)
        said = f"{new} instead of {old}" if kind == "kind" else f"{new} changed"
        return self._error(address, kind, said, (item, machine), fields=fields, hint=hint)

    def other_start(self, asked: Intent) -> ReplayDivergence:
        """Return the error for a root run that is started with something else than was recorded."""
        known = self.history.intents[ROOT]
        fields = fields_of_effects(self.history, known, asked, self.prints.redactor)
        said = "the run is started with something else"
        return diverged(self.history, ROOT, "changed", asked=said, fields=fields)

    def beyond(self, asked: Intent, item: Item, machine: Any) -> ReplayDivergence:
        """Return the error for an effect that was not recorded, in a run that is recorded to its end."""
        said = f"{verb(asked.effect)} is asked for, but the recorded run had ended before it"
        return self._error((item.path, item.effect.seq), "extra", said, (item, machine))

    def undecodable(self, why: str, item: Item, machine: Any) -> ReplayDivergence:
        """Return the error for a recorded outcome that cannot be read any more."""
        said = f"the recorded outcome cannot be read: {why}"
        return self._error((item.path, item.effect.seq), "undecodable", said, (item, machine))

    def other_child(self, known: Value, outcome: Single, item: Item, machine: Any) -> ReplayDivergence:
        """Return the error for a child that ended in another way than it is recorded."""
        ours: Any = outcome.value if type(outcome) is Value else None
        fields = self._child_fields(known.value, ours) if isinstance(ours, ChildResult) else ()
        said = f"the child {known.value.agent_id} ended in another way"
        hint = "the child's handler computes its output differently"
        return self._error((item.path, item.effect.seq), "changed", said, (item, machine), fields=fields, hint=hint)

    def not_recorded(self, asked: Intent, item: Item, machine: Any) -> ReplayDivergence:
        """Return the error for an effect that no model call led to when the run was recorded."""
        said = f"{verb(asked.effect)} with this input is not recorded, and only models are live here"
        return self._error((item.path, item.effect.seq), "extra", said, (item, machine))

    def other_result(self, known: Value | Failure, now: Value | Failure, item: Item, machine: Any) -> ReplayDivergence:
        """Return the error for an effect that was performed again and had another result."""
        fields = self._result_fields(known, now)
        said = f"{verb(self.history.intents[item.path, item.effect.seq].effect)} has another result than was recorded"
        place = (item.path, item.effect.seq)
        return self._error(place, "live_result", said, (item, machine), fields=fields)

    def same_result(self, known: Value | Failure, now: Value | Failure) -> bool:
        """Return whether an effect that was performed again had the recorded result."""
        return not self._result_fields(known, now)

    def _result_fields(self, known: Value | Failure, now: Value | Failure) -> Sequence[Field]:
        clean = self.prints.redactor.value
        return list(fields_between(clean(outcome_members(known)), clean(outcome_members(now))))

    def unused(self, agent_id: str) -> ReplayDivergence | None:
        """Return the error for records that the run did not come by, if there are any (reliability JR26)."""
        if len(self._used) == len(self.history.intents) or self.cut or self.is_loose or self.may_leave:
            return None
        address, left = next((a, i) for a, i in self.history.intents.items() if a not in self._used)
        said = f"the run ended, but {verb(left.effect)} was recorded here"
        left_calls_model = left.type == "CallModel"
        # The generator is gone: where it was written is all that is left of it.
        where = self._handler if not address[0] else ""
        return diverged(
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
        where: tuple[Item, Any],
        *,
        fields: Sequence[Field] = (),
        hint: str = "",
    ) -> ReplayDivergence:
        item, machine = where
        return diverged(
            self.history,
            address,
            kind,
            asked=said,
            agent_id=item.plan.definition.id,
            location=parked_at(machine),
            fields=fields,
            hint=hint,
            now_calls_model=type(item.effect) is CallModel,
        )


def stop_of(status: RunStatus, error: BaseException | None) -> Stop | None:
    """Return what stopped a run from outside, or ``None`` for one that ended by itself."""
    if status is RunStatus.SUSPENDED:
        return Stop("suspended")
    if status is RunStatus.CANCELLED or (error is not None and not isinstance(error, Exception)):
        return Stop("cancelled")
    if isinstance(error, LimitExceeded) and error.kind == "seconds":
        return Stop("limit", error=error)
    return None


def is_refused(value: Any) -> bool:
    """Return whether a recorded child never started: a limit, an unknown agent, wrong params."""
    return isinstance(value, ChildResult) and not value.run_id
