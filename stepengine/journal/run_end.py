"""
How a journaled run ends: the end that is recorded, the wake entry of a run that sleeps, the warnings of the result.
"""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import attrs

from stepengine.data.outcomes import Stop, Value
from stepengine.data.state import RunStatus
from stepengine.data.waits import Waits
from stepengine.errors import StepEngineError
from stepengine.journal.encoding import encode_stored
from stepengine.journal.history import find_outside_stop
from stepengine.journal.journaled_run import JournaledRun
from stepengine.journal.pending_items import find_waits
from stepengine.journal.provenance import record_as_written_by_user
from stepengine.journal.records import ROOT, Input, Result, format_address
from stepengine.machine.plan import Finished

if TYPE_CHECKING:
    from stepengine.journal.sleepers import WakeEntry

LISTED_EFFECTS = 10
"""Enough to see which effects they are; further ones are only counted."""


async def finish_run(run: JournaledRun, finished: Finished, waits: Sequence[Waits] = ()) -> Finished:
    """
    Record a run's end, update its wake entry and close the journal; return *finished* with write errors and warnings.

    A stopped run gets no end, and a failed write makes the run fail. Without an opened journal, nothing is done.

    Args:
        run: The run.
        finished: The end of the run.
        waits: The waits of a suspended run, which the wake index stores.
    """
    if not run.writer.has_opened:
        return finished
    # In a thread, as it writes and syncs; the loop has other runs.
    return await run.writer.run_in_thread_if_blocking(
        partial(_write_end_and_close, run, finished, waits), blocks=run.mode.replaces
    )


def _write_end_and_close(run: JournaledRun, finished: Finished, waits: Sequence[Waits]) -> Finished:
    """Record the end, update the wake entry, close the journal, and return *finished* with write errors and warnings."""
    writer, entry = run.writer, find_wake_entry(run, finished)
    # The journal is given back on every way, before the end of the run is reported: whoever waited for the result may
    # open it at once.
    try:
        if writer.fatal is None:
            # Before the suspension is durable: a run in the index that does not sleep costs one look; one that sleeps
            # and is not in the index would never wake.
            if entry is not None and waits:
                with _warn_on_index_errors(run, entry):
                    entry.record_sleep(waits, finished.state.agent_id)
            finished = _record_end(run, finished)
    except StepEngineError as error:
        writer.keep_first_fatal_error(error)
    finally:
        writer.close()
        if writer.is_own:
            record_as_written_by_user(writer.journal)
    if entry is not None and writer.fatal is None:
        with _warn_on_index_errors(run, entry):
            entry.wake_if_unread(writer.journal, run.mail) if waits else entry.remove()
    if writer.fatal is not None:
        finished = attrs.evolve(finished, status=RunStatus.FAILED, error=writer.fatal, output=None)
    return attrs.evolve(finished, warnings=(*finished.warnings, *writer.warnings)) if writer.warnings else finished


def find_wake_entry(run: JournaledRun, finished: Finished) -> WakeEntry | None:
    """Return the wake entry of a run that is suspended or was just resumed; ``None`` for any other run or without an index."""
    is_asleep = finished.status is RunStatus.SUSPENDED
    extends, source = run.mode.cuts_off, run.writer.source
    past = None if run.recorded_part is None else run.recorded_part.history
    slept = past is not None and (extends or run.mode.appends_to_source(past)) and bool(find_waits(past))
    if not (run.mode.reads_mailbox or extends) or source.stable or not (is_asleep or slept):
        return None
    from stepengine.journal.sleepers import locate_wake_entry

    return locate_wake_entry(source if extends else run.writer.journal)


@contextlib.contextmanager
def _warn_on_index_errors(run: JournaledRun, entry: WakeEntry) -> Iterator[None]:
    """Turn an error of the wake index into a warning of the result."""
    try:
        yield
    except StepEngineError as error:
        finder = f"`stepengine resume --due {shlex.quote(str(entry.place))}`" if entry.journals is None else "a Waker"
        run.writer.warnings.append(
            f"the wake time of {entry.run!r} could not be stored: {error.message}; {finder} finds it in the journal"
        )


def _record_end(run: JournaledRun, finished: Finished) -> Finished:
    """Record the result of the root run, or only the reason of a stop; return the end. A replay compares it instead."""
    # A stopped run gets no result, because nothing may follow a result (replay:J41): a stopped run can be resumed.
    past, stop, unused = run.recorded_part, find_outside_stop(finished.status, finished.error), None
    if past is not None and stop is None:
        assert run.replayer is not None  # noqa: S101 - there is one for everything recorded
        if not run.mode.cuts_off:
            unused = past.find_unused_difference(finished.state.agent_id, finished.error)
        run.replayer.handle_unused_records_error(unused)
        if not run.mode.cuts_off:
            finished = run.replayer.confirm_root_end(finished)
    _warn_of_replaced_effects(run)
    if past is not None and run.mode.resumes and past.history.is_complete:
        return finished
    at = run.timing.last
    if stop is None:
        run.writer.append(Result(*ROOT, at, _choose_root_end(run, Value(finished.to_child_result(), at))))
    elif run.mode.records_stop(stop, past):
        if stop.kind == "cancelled":
            run.mail.record_root_cancels()
        # Followers then wait for the next process; they do not receive an end of the run.
        kind = "shutdown" if finished.is_left and stop.kind == "cancelled" else stop.kind
        run.writer.append(_make_stop_record(attrs.evolve(stop, kind=kind), at))
    run.writer.commit()
    is_whole = finished.status is not RunStatus.FAILED and unused is None
    run.mode.finalize_journal(run.writer, past, is_whole=is_whole)
    return finished


def _warn_of_replaced_effects(run: JournaledRun) -> None:
    """Add a warning that lists the effects answered by records of other effects."""
    kept = () if run.replayer is None else run.replayer.acceptance.notes
    if kept:
        places = [format_address(note.path, note.seq) for note in kept]
        listed = ", ".join(places[:LISTED_EFFECTS]) + (
            f" and {len(places) - LISTED_EFFECTS} more" if len(places) > LISTED_EFFECTS else ""
        )
        run.writer.warnings.append(
            f"the run differs from {run.writer.source.name} at {listed}; the recorded effects were kept"
        )


def _choose_root_end(run: JournaledRun, end: Value) -> Value:
    """Return the outcome of the root run: the recorded one if a full repetition has an equal one, else *end*."""
    past = run.recorded_part
    if past is None or not run.mode.is_full_repetition(past):
        return end
    recorded = past.root_outcome
    return recorded if isinstance(recorded, Value) and past.is_same_child_end(recorded, end.value) else end


def _make_stop_record(stop: Stop, at: int) -> Input:
    error: Mapping[str, object] = (
        {"error": encode_stored(stop.error)} if isinstance(stop.error, StepEngineError) else {}
    )
    return Input("", -1, at, {"type": "stop", "kind": stop.kind, **error})
