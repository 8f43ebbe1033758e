"""Orders of the records of a journal: as written, by address, or as in the repeated journal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stepengine.journal.provenance import replace_records_by_derived
from stepengine.journal.records import Blob, Head, Input, Intent, Record, Result, to_compact_json
from stepengine.journal.store import MemoryJournal

RANK = {"input": 0, "intent": 1, "result": 2}
LAST_PLACE = 1 << 62
"""Above each place that a journal can have: addresses have at most nine digits."""


def sort_by_address(records: Sequence[Record]) -> list[Record]:
    """Return *records* sorted: each effect, then the run that it spawned, then its result; blobs before their first use."""
    made: list[Record] = [record for record in records if isinstance(record, Head)]
    blobs = {record.fp: record for record in records if isinstance(record, Blob)}
    for record in sorted([r for r in records if not isinstance(r, (Head, Blob))], key=_make_address_key):
        if blobs and record.line is not None:
            text = to_compact_json(record.line)
            places = {text.find(f'"{fp}"'): fp for fp in blobs}
            made += [blobs.pop(places[place]) for place in sorted(places) if place >= 0]
        made.append(record)
    return made


def restore_order_and_inputs(journal: MemoryJournal, original: Sequence[Record]) -> None:
    """
    Order a replay's records like the original ones, and add the original's external inputs that the replay lacks.
    """
    records = journal.records()
    made, kept = _drop_blobs(records), _drop_blobs(original)
    if list(map(_make_identity_key, kept)) != list(map(_make_identity_key, made)):
        replace_records_by_derived(journal, _sort_and_add_missing_inputs(records, original), journal)
    elif len(made) < len(records):
        following = iter(made)
        journal.replace_records_unchecked(
            [record if isinstance(record, Blob) else next(following) for record in drop_trailing_blobs(original)]
        )


def drop_trailing_blobs(records: Sequence[Record]) -> Sequence[Record]:
    """Return *records* without the blobs of a record that a crash cut off."""
    end = len(records)
    while end and isinstance(records[end - 1], Blob):
        end -= 1
    return records[:end]


def _drop_blobs(records: Sequence[Record]) -> list[Record]:
    return [record for record in records if not isinstance(record, Blob)]


def _sort_and_add_missing_inputs(records: Sequence[Record], original: Sequence[Record]) -> list[Record]:
    """Return *records* in the order of the equal ones in *original*, with the inputs of *original* that they lack."""
    places = {_make_identity_key(record): number for number, record in enumerate(original)}
    made = {_make_identity_key(record) for record in records if isinstance(record, Input)}
    outside = [r for r in original if isinstance(r, Input) and _make_identity_key(r) not in made]
    return sorted([*records, *outside], key=lambda record: places.get(_make_identity_key(record), LAST_PLACE))


def _make_identity_key(record: Record) -> tuple[Any, ...]:
    """Return a key that equal records of two journals share."""
    match record:
        case Intent():
            return "intent", record.path, record.seq
        case Result():
            return "result", record.path, record.seq
        case Input(input=said):
            kind = said.get("type")
            which = said.get("question_id", said.get("id"))
            return "input", record.path, record.seq, kind, which, kind == "stop" and record.at
        case Blob():
            return "blob", record.fp
        case Head():
            return ("head",)


def _make_address_key(record: Record) -> tuple[tuple[tuple[int, int], ...], int]:
    """Return the sort key: a child's records between its Spawn's intent and result, the root's around all."""
    path: str = getattr(record, "path", "")
    seq: int = getattr(record, "seq", -1)
    if not path and seq < 0:
        # The prompt of the root comes after its start; what stopped it stands where it would have ended.
        is_last = record.kind == "result" or (isinstance(record, Input) and record.input.get("type") == "stop")
        return (((LAST_PLACE, 0),), 0) if is_last else ((), 0 if record.kind == "intent" else 1)
    # A child's numbers follow those of its Spawn with rank 1: after its intent (0) and before its result (2).
    inside = [(int(n), 1) for n in path.split(".")] if path else []
    if seq < 0 and record.kind == "result":
        # How a child in the background ended comes after all that it did.
        return (*inside, (LAST_PLACE, 2)), 0
    return (*inside, (seq, 2 if record.kind == "result" else 0)), RANK[record.kind]
