"""
Cutting a journal off and going on from there: ``branch`` makes the new journal, with one outcome changed if asked for.

The original is only read. What is kept is what belongs to the past of the given address, not what stands before it in the
file: a sibling that had finished stays.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import assert_never

import attrs

from stepengine.data.outcomes import Value
from stepengine.errors import JournalError
from stepengine.journal.file_undo import Roots, UndoOptions, refuse_untrusted_undo, undo_writes
from stepengine.journal.history import History, parse_created
from stepengine.journal.provenance import is_written_by_user, replace_records_by_derived
from stepengine.journal.questions import make_edited_outcome
from stepengine.journal.recorded_part import JournalCut, parse_result_address, require_no_repeats
from stepengine.journal.records import (
    INPUTS,
    ROOT,
    UNKNOWN_INPUT,
    Address,
    Blob,
    Head,
    Input,
    Intent,
    Record,
    Result,
    format_address,
    get_starter_address,
)
from stepengine.journal.sources import JournalLike, as_journal, bind_fork_journal, make_fork_id
from stepengine.journal.store import Journal, MemoryJournal

MAX_FORKS = 10_000
"""A larger number is a loop that forks by mistake and fills the disk."""


def branch(
    journal: JournalLike,
    at: int | str,
    edit: object = None,
    *,
    allow_repeat: bool = False,
    into: JournalLike | None = None,
    restore_files: Roots | None = None,
    run_id: str = "",
    now: datetime | None = None,
) -> Journal:
    """
    Return a new journal that ends with the result of the effect *at*; resuming it continues from there.

    Args:
        journal: The journal to cut; it is not changed.
        at: The last effect to keep: a number of the root's effects, or ``"path#number"``; -1 keeps none.
        edit: Another outcome for it: a value (a ``ModelReply`` or text for a model call, a ``ToolResult`` or JSON for a
            tool, JSON for a ``Perform``, answers for an ``Ask``, an error for a failure), or a function from the recorded
            value to one. ``None`` keeps it.
        allow_repeat: Continue although removed effects have changed the world and may happen again.
        into: The new journal; by default one in memory.
        restore_files: The root folder of ``file_tools``. Files written after *at* are restored as by ``undo``; by default files
            stay unchanged.
        run_id: The id of the new run; by default one that starts with the id of its parent.
        now: The time of the fork; by default the current time. The duration of the new run counts from here.

    Raises:
        JournalError: when there is no such effect, the effect has no result, its outcome cannot be edited, or an effect would
            be repeated.
        UndoRefused: when a file cannot be restored, or the journal is not known as this user's and would restore one; nothing
            was changed, and there is no new journal.
    """
    source = as_journal(journal)
    if source.forks >= MAX_FORKS:
        msg = f"{source.name} has {source.forks} forks already, the most that one run may have; fork one of its forks instead"
        raise JournalError(msg)
    history = source.history()
    root = history.root
    address = parse_result_address(history, at)
    cut = JournalCut(history.tree)
    cut.cut_at((address[0], address[1] + 1))
    if not allow_repeat:
        require_no_repeats(history, cut, f"forking at {format_address(*address)}", undone=restore_files is not None)
    run = run_id or make_fork_id(str(root["run_id"]))
    records = _make_fork_records(history, cut, address, run)
    if edit is not None:
        records = _replace_outcome(history, records, address, edit)
    fresh = (
        MemoryJournal(redact="off", link=source.link).copy_redaction_rules_from(source)
        if into is None
        else as_journal(into)
    )
    target = bind_fork_journal(fresh, run)
    if restore_files is not None:
        if not is_written_by_user(source):
            remedy = f"undo(journal, root, at={format_address(*address)!r}, trust=True) (`stepengine undo --at`), then fork without restoring files"
            refuse_untrusted_undo(source, history, restore_files, cut.keeps_result, UndoOptions(), remedy=remedy)
        undo_writes(history, restore_files, cut.keeps_result, UndoOptions())
    replace_records_by_derived(target, _set_fork_time(records, now or datetime.now(UTC), stable=target.stable), source)
    source.forks += 1
    return target


def _set_fork_time(records: list[Record], now: datetime, *, stable: bool) -> list[Record]:
    """Return the records of a fork with the time at which it was made in its head."""
    head = records[0]
    if not isinstance(head, Head):
        return records
    last = max([record.at for record in records if isinstance(record, Result | Input)], default=0)
    # Times of a stable recording follow from addresses.
    passed = 0 if stable else (now - parse_created(head)) // timedelta(milliseconds=1)
    return [attrs.evolve(head, since=max(last, passed)), *records[1:]]


def _make_fork_records(history: History, cut: JournalCut, address: Address, run: str) -> list[Record]:
    """Return the records that *cut* keeps, with the id *run*, the parent and *address* in the head."""
    records: list[Record] = []
    for record in history.records:
        match record:
            case Head():
                parent = {"run": record.run, "at": format_address(*address)}
                records.append(attrs.evolve(record, run=run, parent=parent, signed="", workspace="", line=None))
            case Intent():
                keep = cut.keeps_intent(record.address)
                records += [record] if keep else []
            case Result():
                keep = cut.keeps_result(record.address)
                records += [record] if keep else []
            case Input():
                records += [record] if _is_input_kept(cut, record) else []
            case Blob():
                records.append(record)
            case _ as never:
                assert_never(never)
    return records


def _is_input_kept(cut: JournalCut, record: Input) -> bool:
    """Return whether a fork keeps an input: inputs of its type are kept, and *cut* keeps its effect or run."""
    if not INPUTS.get(record.input["type"], UNKNOWN_INPUT).is_forked:
        return False
    place = get_starter_address(record.path) if record.seq < 0 else record.address
    return cut.keeps_intent(place)


# --- another outcome ------------------------------------------------------------------------------------------------


def _replace_outcome(history: History, records: Sequence[Record], address: Address, edit: object) -> list[Record]:
    """Return the records with *edit*, or its result for the recorded value, as the outcome at *address*."""
    known = history.results.get(address)
    if address == ROOT or known is None:
        msg = "the start of a run has no outcome to edit; start another run with another prompt instead"
        raise JournalError(msg)
    outcome = history.outcome(known)
    value = outcome.value if isinstance(outcome, Value) else outcome.error
    wanted = edit(value) if callable(edit) else edit
    made = make_edited_outcome(history, history.intents[address], wanted, known.at)
    changed = Result(*address, known.at, attrs.evolve(made, inputs=outcome.inputs), history.extras(known))
    return [changed if record is known else record for record in records]
