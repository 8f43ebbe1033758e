"""``diff``: the differences between two recorded runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal, TypeAlias

from attrs import frozen

from stepengine.data.effects import CallModel
from stepengine.data.matching import BoundedMatcher
from stepengine.journal.divergence import FieldDifference, compare_effects, compare_values, describe_effect
from stepengine.journal.encoding import encode_outcome_members
from stepengine.journal.fingerprints import Fingerprints
from stepengine.journal.history import History
from stepengine.journal.recorded_requests import RecordedRequests
from stepengine.journal.records import ROOT, Address, Intent, format_address
from stepengine.journal.show import compute_spending
from stepengine.journal.sources import JournalLike, as_journal
from stepengine.redaction import Redactor
from stepengine.runtime.performer import child_path

ChangeKind: TypeAlias = Literal["added", "removed", "changed", "outcome", "start", "end"]
# What differs between two runs of the same thing without meaning anything (replay:J23).
VOLATILE = frozenset({"at", "run_id", "request_id", "provider_data", "spending", "tool_call_id"})
VOLATILE_OF_CHILD_REF = VOLATILE | {"id"}
"""The id of a child starts with that of its run."""
MARKS: Mapping[str, str] = {"added": "+", "removed": "-", "changed": "~", "outcome": "=", "start": "^", "end": "$"}
SHOWN_FIELDS = 12
"""A change with more fields than this is a different request; the first dozen shows that."""


@frozen
class RunChange:
    """
    One difference.

    Attributes:
        kind: ``"added"`` and ``"removed"`` effects, ``"changed"`` ones, another ``"outcome"`` of an equal effect, another
            ``"start"`` or ``"end"`` of a run.
        a: The address in the first journal, or ``""``.
        b: The address in the second journal, or ``""``.
        what: The effect in one or two words.
        fields: The differing fields.
    """

    kind: ChangeKind
    a: str
    b: str
    what: str
    fields: tuple[FieldDifference, ...] = ()

    def __str__(self) -> str:
        place = self.a if self.a == self.b else f"{self.a or 'nothing'} -> {self.b or 'nothing'}"
        lines = [f"{MARKS[self.kind]} {place}  {self.what} ({self.kind})"]
        lines += [f"    {f.pointer}   {f.recorded}  ->  {f.now}" for f in self.fields[:SHOWN_FIELDS]]
        return "\n".join(lines)


@frozen
class Difference:
    """
    The differences between two journals; true if there are any.

    Attributes:
        changes: Every difference, in the order of the first journal.
        totals: Effects, model calls, tokens, cost and milliseconds of both.
    """

    changes: tuple[RunChange, ...]
    totals: Mapping[str, tuple[Any, Any]]

    def __bool__(self) -> bool:
        """Return whether the journals differ."""
        return bool(self.changes)

    def __str__(self) -> str:
        if not self.changes:
            return "no difference"
        numbers = [f"{name} {a} -> {b}" for name, (a, b) in self.totals.items() if a != b and None not in (a, b)]
        return "\n".join([*map(str, self.changes), *([", ".join(numbers)] if numbers else [])])

    def to_json(self) -> dict[str, Any]:
        """Return the difference as JSON."""
        changes = [
            {"kind": c.kind, "a": c.a, "b": c.b, "what": c.what, "fields": [f._asdict() for f in c.fields]}
            for c in self.changes
        ]
        return {"changes": changes, "totals": {name: list(pair) for name, pair in self.totals.items()}}


def diff(a: JournalLike, b: JournalLike, *, detailed: int | None = None) -> Difference:
    """
    Compare two recorded runs; effects are aligned, so an inserted one does not shift the rest.

    Args:
        a: The first run.
        b: The second run.
        detailed: The maximum number of changed model requests with a list of fields; ``None`` for all. A request contains the
            history, so the time for all of them grows with the square of the steps.

    Raises:
        JournalError: when a journal cannot be read.
    """
    sides = _HistoryComparison(as_journal(a).history(), as_journal(b).history(), detailed)
    return Difference(tuple(sides.compare()), sides.compute_totals())


class _HistoryComparison:
    """Two histories under comparison."""

    def __init__(self, a: History, b: History, detailed: int | None) -> None:
        self._a, self._b = a, b
        self._a_requests, self._b_requests = RecordedRequests(a), RecordedRequests(b)
        self._left = detailed
        self._plain = Redactor({}, shapes=False)
        prints = Fingerprints(self._plain)
        for history in (a, b):
            for intent in history.intents.values():
                intent.fp = intent.fp or prints.for_effect(intent.effect)

    def compare(self) -> Iterator[RunChange]:
        """Yield the differences of the starts, the effects and the ends of both root runs."""
        start = tuple([f for f in compare_values(self._a.root, self._b.root) if f.pointer != "/run_id"])
        if start:
            yield RunChange("start", "#-1", "#-1", "the run", start)
        yield from self._compare_runs("", "")
        yield from self._compare_outcomes(ROOT, ROOT, "end", "the run")

    def _compare_runs(self, a: str, b: str) -> Iterator[RunChange]:
        """Yield the differences between the runs at two paths, with their effects aligned."""
        ours, theirs = self._a.tree.list_effects(a), self._b.tree.list_effects(b)
        matcher = BoundedMatcher([i.fp for i in ours], [i.fp for i in theirs], autojunk=False)
        for tag, i1, i2, j1, j2 in matcher.get_opcodes():
            for offset in range(max(i2 - i1, j2 - j1)):
                left = ours[i1 + offset] if i1 + offset < i2 else None
                right = theirs[j1 + offset] if j1 + offset < j2 else None
                yield from self._compare_effects(left, right, equal=tag == "equal")

    def _compare_effects(self, a: Intent | None, b: Intent | None, *, equal: bool) -> Iterator[RunChange]:
        """Yield the differences of two aligned effects, one of which may be missing, of the runs in them, and of their outcomes."""
        if a is None or b is None or (not equal and a.type != b.type):
            if a is not None:
                yield RunChange("removed", format_address(a.path, a.seq), "", describe_effect(a.effect))
            if b is not None:
                yield RunChange("added", "", format_address(b.path, b.seq), describe_effect(b.effect))
            return
        places = format_address(a.path, a.seq), format_address(b.path, b.seq)
        if not equal:
            yield RunChange("changed", *places, describe_effect(b.effect), tuple(self._compare_fields(a, b)))
        if a.starts_child_or_body and b.starts_child_or_body:
            ours, theirs = child_path(a.path, a.seq), child_path(b.path, b.seq)
            yield from self._compare_runs(ours, theirs)
            if a.is_background and b.is_background:
                yield from self._compare_outcomes((ours, -1), (theirs, -1), "end", describe_effect(b.effect))
        yield from self._compare_outcomes(a.address, b.address, "outcome", describe_effect(b.effect))

    def _compare_fields(self, a: Intent, b: Intent) -> list[FieldDifference]:
        """Return the fields in which two effects differ; none for model calls beyond the number of *detailed* ones."""
        if a.type == "model_call" and self._left is not None:
            if self._left <= 0:
                return []
            self._left -= 1
        return _compare_effect_fields(self._a_requests, self._b_requests, a, b, self._plain)

    def _compare_outcomes(self, a: Address, b: Address, kind: ChangeKind, effect_name: str) -> Iterator[RunChange]:
        """Yield one change if the outcomes at two addresses differ, or only one of them is recorded."""
        ours, theirs = _encode_stable_outcome(self._a, a), _encode_stable_outcome(self._b, b)
        if (ours is None) != (theirs is None):
            known = ("no result", "a result") if kind == "outcome" else ("not ended", "ended")
            field = FieldDifference("/", known[ours is not None], known[theirs is not None])
            yield RunChange(kind, format_address(*a), format_address(*b), effect_name, (field,))
            return
        fields = tuple(compare_values(ours, theirs))
        if fields:
            yield RunChange(kind, format_address(*a), format_address(*b), effect_name, fields)

    def compute_totals(self) -> dict[str, tuple[Any, Any]]:
        """Return effects, model calls, tokens, cost and milliseconds of both runs, by name."""
        a, b = _compute_run_totals(self._a), _compute_run_totals(self._b)
        return {name: (a[name], b[name]) for name in a}


def _compare_effect_fields(
    a: RecordedRequests, b: RecordedRequests, effect_a: Intent, effect_b: Intent, plain: Redactor
) -> list[FieldDifference]:
    if effect_a.type == "model_call":
        now = Intent(effect_b.path, effect_b.seq, CallModel(effect_b.seq, b.get_request(effect_b)))
        return compare_effects(a, effect_a, now, plain)
    return compare_effects(a, effect_a, Intent(effect_b.path, effect_b.seq, b.history.form(effect_b)), plain)


def _encode_stable_outcome(history: History, address: Address) -> Any:
    """Return an outcome as JSON without members that differ between equal runs; ``None`` if there is no result."""
    known = history.results.get(address)
    return None if known is None else _drop_volatile(encode_outcome_members(history.outcome(known)))


def _drop_volatile(value: object) -> object:
    """Return a JSON value without the members that differ between equal runs, such as ids and times."""
    if isinstance(value, Mapping):
        dropped = VOLATILE_OF_CHILD_REF if value.get("type") == "child_ref" else VOLATILE
        return {k: _drop_volatile(v) for k, v in value.items() if k not in dropped}
    return [_drop_volatile(v) for v in value] if isinstance(value, list | tuple) else value


def _compute_run_totals(history: History) -> dict[str, object]:
    spending = compute_spending(history)
    return {
        "effects": len(history.intents) - 1,
        "model calls": sum(i.type == "model_call" for i in history.intents.values()),
        "tokens": spending.usage.total_tokens,
        "cost": None if spending.cost is None else str(spending.cost),
        "milliseconds": history.duration_ms,
    }
