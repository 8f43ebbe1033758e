"""
The modes in which a run opens its journal: the rules that differ between recording, resuming, replaying and the others.

A run has one journal and one mode, from start to end. A mode has no state: its methods receive the writer and the recorded part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

import attrs

from stepengine.data.events import Event, RunStarted
from stepengine.data.outcomes import Stop
from stepengine.journal.history import History
from stepengine.journal.questions import GivenAnswers
from stepengine.journal.record_order import drop_trailing_blobs, restore_order_and_inputs
from stepengine.journal.recorded_clock import RunClock
from stepengine.journal.records import ROOT, Blob, Head, Intent
from stepengine.journal.run_writer import RunWriter
from stepengine.journal.store import Extension, MemoryJournal
from stepengine.runtime.performer import Middleware, Performer
from stepengine.runtime.services import Services

if TYPE_CHECKING:
    from stepengine.data.models import ModelRequest
    from stepengine.journal.recorded_part import RecordedPart
    from stepengine.runtime.limits import CallEstimate

Around: TypeAlias = "Callable[[Performer, Callable[[ModelRequest], CallEstimate]], Performer]"
"""Wraps a performer, given a function that estimates how much a model call may use."""


class Mode:
    """
    The default rules for a run: it performs its effects and records them.

    Attributes:
        name: The name of the mode in the documentation.
        writes: Whether the run writes records.
        copies: Whether repeated effects are recorded in a new journal in memory, so that the source journal is only read.
        takes_over: Whether the new journal shares the records of equal effects with the source journal, to save memory.
        replaces: Whether the source journal is replaced at the end.
        cuts_off: Whether the record is discarded from the first difference on, and the run continues live from there.
        resumes: Whether the run appends to the source journal, unless that journal is complete.
        keeps_writes: Whether the file writes of calls are recorded, so that they can be undone.
        reads_mailbox: Whether the run receives the messages in the mailbox of the journal.
        waits: Whether a run tree that only waits for a near time stays in the process instead of being suspended.
    """

    name = ""
    writes = True
    copies = False
    takes_over = False
    replaces = False
    cuts_off = False
    resumes = False
    keeps_writes = True
    reads_mailbox = False
    waits = True

    def is_record_only(self, history: History) -> bool:
        """Return whether only recorded effects are answered and nothing is performed."""
        return False

    def appends_to_source(self, history: History) -> bool:
        """Return whether new records are appended to the source journal."""
        return self.resumes and not history.is_complete

    def make_new_event_filter(self, past: RecordedPart | None) -> Callable[[Event], bool] | None:
        """Return a predicate that is true for events that were not recorded before, or ``None`` if all events are new."""
        return None

    def is_full_repetition(self, past: RecordedPart) -> bool:
        """Return whether the whole run was answered from the record."""
        return False

    def records_stop(self, stop: Stop, past: RecordedPart | None) -> bool:
        """Return whether *stop* is recorded as the end of the run."""
        return stop.kind != "suspended" and (past is None or not self.is_full_repetition(past))

    def may_leave_unused_records(self, past: RecordedPart) -> bool:
        """Return whether the run may end without an error while records are unused."""
        return False

    def make_live_wrappers(self, services: Services) -> Sequence[Middleware]:
        """Return the wrappers of live effects that come in addition to those of the services."""
        return ()

    def write_start(
        self, writer: RunWriter, history: History, head: Head, requested: Intent, *, is_equal: bool
    ) -> None:
        """Record the start of a recorded run, with the current intent *requested* unless *is_equal*."""
        if self.copies:
            writer.append(attrs.evolve(head, line=None, signed=""))
            writer.append(requested)

    def finalize_journal(self, writer: RunWriter, past: RecordedPart | None, *, is_whole: bool) -> None:
        """Sort or replace the journal of an ended run as the mode requires; *is_whole*: it did not fail or leave records unused."""
        if past is not None and self.is_full_repetition(past):
            made = writer.journal
            assert isinstance(made, MemoryJournal)  # noqa: S101 - what repeats makes one
            restore_order_and_inputs(made, past.history.records)


class Recording(Mode):
    """A new run is recorded."""

    name = "record"
    reads_mailbox = True

    def finalize_journal(self, writer: RunWriter, past: RecordedPart | None, *, is_whole: bool) -> None:
        """Sort a recording by address if it is to be stable."""
        if writer.source.stable:
            writer.close()
            writer.overwrite_journal(writer.journal)


class Resuming(Mode):
    """A recorded run continues in its journal."""

    name = "resume"
    resumes = reads_mailbox = True

    def is_record_only(self, history: History) -> bool:
        """Return whether the record is complete, so that there is nothing to resume."""
        return history.is_complete

    def records_stop(self, stop: Stop, past: RecordedPart | None) -> bool:
        """Return whether the run does not wait, or was stopped before."""
        last = None if past is None else past.history.stop
        return stop.kind != "suspended" or (last is not None and last.input["kind"] != "suspended")

    def make_new_event_filter(self, past: RecordedPart | None) -> Callable[[Event], bool] | None:
        """Return the predicate that is false for recorded events; ``None`` for a new run."""
        return None if past is None else partial(_is_new_event, past.history)


def _is_new_event(history: History, event: Event) -> bool:
    """Return whether an event is not of a recorded outcome; the start of the root run is new."""
    if isinstance(event, RunStarted) and not event.path:
        return True
    return (event.path, event.seq) not in history.results


class Replaying(Mode):
    """A recorded run is repeated, and nothing is performed."""

    name = "replay"
    copies = takes_over = True
    keeps_writes = False

    def is_record_only(self, history: History) -> bool:
        """Return True: a replay performs nothing."""
        return True

    def is_full_repetition(self, past: RecordedPart) -> bool:
        """Return True: a replay answers the whole run from the record."""
        return True

    def write_start(
        self, writer: RunWriter, history: History, head: Head, requested: Intent, *, is_equal: bool
    ) -> None:
        """Copy the recorded head, blobs and start; write the requested start instead if it differs."""
        writer.append(head)
        # Whatever is taken over first may name one; the end puts all in order.
        for blob in [record for record in drop_trailing_blobs(history.records) if isinstance(record, Blob)]:
            writer.append(blob)
        writer.append(history.intents[ROOT] if is_equal else requested)


class _Replacing(Mode):
    """A recorded run is repeated, unrecorded effects are performed, and the journal is replaced."""

    copies = replaces = True

    def finalize_journal(self, writer: RunWriter, past: RecordedPart | None, *, is_whole: bool) -> None:
        """Replace the source journal, unless the run failed or left records unused."""
        if is_whole:
            writer.replace_source_journal()


class Extending(_Replacing):
    """A recorded run is repeated while it matches, then continues live; its journal is replaced."""

    name = "extend"
    cuts_off = True

    def finalize_journal(self, writer: RunWriter, past: RecordedPart | None, *, is_whole: bool) -> None:
        """Replace the source journal of a whole run; store a copy of it first, and how much of its record was used."""
        if is_whole and past is not None:
            asked, held = len(writer.journal.history().intents) - 1, len(past.history.intents) - 1
            source = writer.source
            source.extended = Extension(past.answered, held, asked - past.answered, source.make_backup())
        super().finalize_journal(writer, past, is_whole=is_whole)


class Adding(_Replacing):
    """A recorded run is repeated, and unrecorded effects are performed; its journal is replaced if any were."""

    name = "new"

    def may_leave_unused_records(self, past: RecordedPart) -> bool:
        """Return whether nothing new was recorded."""
        return not past.has_new_effects


@attrs.frozen
class Forking(Mode):
    """
    A recorded run is repeated up to an address and continues from there in a journal of its own.

    Attributes:
        around: Wraps the performer of live effects, given the estimates of model calls.
    """

    name = "fork"
    copies = True
    keeps_writes = False
    waits = False

    around: Around

    def make_live_wrappers(self, services: Services) -> Sequence[Middleware]:
        """Return the wrapper that performs the effects of the fork."""
        return (lambda inner: self.around(inner, services.estimate_call),)

    def is_full_repetition(self, past: RecordedPart) -> bool:
        """Return whether the run matched its record to the end."""
        return not past.cut


class Walking(Mode):
    """A recorded run whose machines the caller drives; nothing is performed or written."""

    name = "walk"
    writes = keeps_writes = False

    def is_record_only(self, history: History) -> bool:
        """Return True: nothing is performed."""
        return True


@attrs.frozen
class OpenJournal:
    """
    The journal of a run while it is open, as the parts of the run share it.

    Attributes:
        mode: The mode: how the run uses the journal.
        writer: Writes the journal; holds the first error and the warnings.
        answers: The caller's answers, and the decisions about effects in doubt.
        timing: The run's own clock.
    """

    mode: Mode
    writer: RunWriter
    answers: GivenAnswers
    timing: RunClock
