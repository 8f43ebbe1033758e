"""Two runs side by side: matching steps, and the differences that ``journal.diff`` finds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from stepengine.debugging.viewer.payload import PageTexts, RunPayload
from stepengine.journal.records import format_address
from stepengine.journal.run_diff import Difference
from stepengine.runtime.performer import child_path

DETAILED = 20
"""The number of changed requests whose changed fields are shown; later changes are mostly consequences."""


def pair_steps(a: RunPayload, b: RunPayload, difference: Difference, texts: PageTexts) -> list[list[Any]]:
    """
    Return the steps of two runs side by side: both numbers or ``None``, a mark, and the number of the text of the difference.

    Marks are ``=`` for equal, ``~`` for changed, ``+`` for those of the second run alone, ``-`` for those of the first.
    """
    changes: dict[str, list[list[str]]] = {"start": [], "end": []}
    removed, added = set(), set()
    for change in difference.changes:
        if change.kind == "removed":
            removed.add(change.a)
        elif change.kind == "added":
            added.add(change.b)
        else:
            found = changes.setdefault(change.kind if change.kind in ("start", "end") else change.a, [])
            found += [[f"{change.what} {field.pointer}", field.recorded, field.now] for field in change.fields]
            found += [] if change.fields else [[change.what, *["the requests differ: compare the Request tabs"] * 2]]
    beside = _pair_rows(a, b, removed, added)
    told = {
        number: [f for address in addresses for f in changes.get(address, ())]
        for number, addresses in _group_addresses_by_row(a).items()
    }
    # Differences of the start are shown at the first step, those of the end at the last one.
    for number, at in ((min(beside, default=-1), "start"), (max(beside, default=-1), "end")):
        told[number] = [*told.get(number, []), *changes[at]]
    gone = {a.lead[address] for address in a.lead if format_address(*address) in removed}
    come = {b.lead[address] for address in b.lead if format_address(*address) in added}
    return [
        [i, j, *_get_mark_and_store_text(i, j, told, texts, in_part=i in gone or j in come)]
        for i, j in _merge_rows(a, b, beside)
    ]


def _group_addresses_by_row(view: RunPayload) -> Mapping[int, list[str]]:
    found: dict[int, list[str]] = {}
    for address, number in view.lead.items():
        found.setdefault(number, []).append(format_address(*address))
    return found


def _pair_rows(a: RunPayload, b: RunPayload, removed: set[str], added: set[str]) -> dict[int, int]:
    """
    Return the row of the second run for rows of the first.

    In each run of the tree, effects that were neither added nor removed pair up in order. Rows of inputs pair by kind.
    """
    # Pairs are found by address, because rows are in the order in which they started, which is random among parallel
    # children. Without added and removed effects, the effects of a run correspond one to one. Several of them share a row
    # (a reply and its calls), so the first in program order, the request, decides about the row. The order of the runs does
    # not matter, since no row belongs to two runs.
    beside = dict(_pair_input_rows(a, b))
    taken = set(beside.values())
    waiting = [("", "")]
    while waiting:
        ours, theirs = waiting.pop()
        left = [e for e in _list_effects_of_run(a, ours) if format_address(*e) not in removed]
        right = [e for e in _list_effects_of_run(b, theirs) if format_address(*e) not in added]
        for one, other in zip(left, right, strict=False):
            if b.lead[other] not in taken and a.lead[one] not in beside:
                beside[a.lead[one]] = b.lead[other]
                taken.add(b.lead[other])
            waiting.append((child_path(*one), child_path(*other)))
    return beside


def _pair_input_rows(a: RunPayload, b: RunPayload) -> Iterator[tuple[int, int]]:
    """Yield pairs of rows with inputs of the same kind to runs at the same path, in order."""
    theirs: dict[tuple[str, str], list[int]] = {}
    for number, row in enumerate(b.rows):
        if row["kind"] == "input":
            theirs.setdefault((row["path"], row["name"]), []).append(number)
    for number, row in enumerate(a.rows):
        found = theirs.get((row["path"], row.get("name", "")), []) if row["kind"] == "input" else []
        if found:
            yield number, found.pop(0)


def _list_effects_of_run(view: RunPayload, run_path: str) -> list[tuple[str, int]]:
    """Return the addresses of the effects of one run, in order."""
    found: list[tuple[str, int]] = []
    while (run_path, len(found)) in view.lead:
        found.append((run_path, len(found)))
    return found


def _merge_rows(a: RunPayload, b: RunPayload, pairs: Mapping[int, int]) -> Iterator[tuple[int | None, int | None]]:
    """Yield the rows of both runs in the order of the first, ``None`` for a missing one; unpaired rows stay next to their neighbours."""
    # If both runs started the same effects in another order, the order is that of the first run. A row of the second run
    # alone comes after the row that is before it there.
    taken, paired = 0, set(pairs.values())
    for i in range(len(a.rows)):
        j = pairs.get(i)
        while j is not None and taken <= j:
            if taken not in paired:
                yield None, taken
            taken += 1
        yield i, j
    yield from [(None, j) for j in range(taken, len(b.rows)) if j not in paired]


def _get_mark_and_store_text(
    i: int | None, j: int | None, differences: Mapping[int, list[list[str]]], texts: PageTexts, *, in_part: bool
) -> tuple[str, int | None]:
    """Return (mark of a pair of rows, number of the stored text of its differences or ``None``)."""
    if i is None or j is None:
        return ("+" if i is None else "-"), None
    fields = differences.get(i, [])
    return ("~" if fields or in_part else "="), texts.add(fields) if fields else None
