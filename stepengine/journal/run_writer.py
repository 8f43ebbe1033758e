"""
``RunWriter``: the journal of one run while the run is open.

It opens the journal, appends records, makes them durable and releases it. It also holds the first error that stopped the run, and the
warnings of its result. ``PendingOutcomes`` knows which outcomes are not durable yet.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar

from stepengine.data.outcomes import Failure, Value
from stepengine.data.visible import cut_end
from stepengine.errors import JournalError, StepEngineError
from stepengine.journal.encoding import encode_effect
from stepengine.journal.provenance import determine_ownership, has_macs_of_user, replace_records_by_derived
from stepengine.journal.record_order import sort_by_address
from stepengine.journal.records import Head, Input, Intent, Record
from stepengine.journal.store import Commits, Journal, MemoryJournal, Writer, hold_lock
from stepengine.runtime.performer import Item

T = TypeVar("T")
MAX_NOTED_CHARS = 1_000
"""The outcome is lost otherwise, so more than a line of it is shown; a whole document would hide the error."""
Outcomes: TypeAlias = "Sequence[tuple[Item, Value | Failure]]"
"""Outcomes with what they are outcomes of."""


class RunWriter:
    """
    Writes the records of one run.

    Args:
        source: The journal of the caller.

    Attributes:
        source: The journal of the caller.
        journal: The journal of the run's result: the written one, or for a replay the new one.
        fatal: The error that stopped the run: a divergence, or a failed write.
        warnings: The warnings for the result.
        unwritten: Records that are written together with the next record.
        is_own: Whether this user's runs wrote all records of the journal.
        waits: Whether appended records are lost without ``request_commit``.
        request_commit: See ``Commits``; calls in one tick of the event loop share one commit. If a commit never blocks for long,
            this is the commit itself.
    """

    request_commit: Callable[[], asyncio.Future[None] | None]

    def __init__(self, source: Journal) -> None:
        self.source = source
        self.journal = source
        self.fatal: StepEngineError | None = None
        self.warnings: list[str] = []
        self.unwritten: list[Input] = []
        self.is_own = False
        self.waits = False
        self._writer: Writer | None = None
        self._write: Callable[[Record], None] = _ignore_record
        self._commits: Commits | None = None
        self._release: Callable[[], Any] | None = None
        self._unlock_source: Callable[[], Any] | None = None

    # --- opening ------------------------------------------------------------------------------------------------------

    def open_for_new_run(self, run_id: str) -> None:
        """
        Open and lock the journal for a new run; raise if it contains a run already.

        Raises:
            JournalError: when the journal cannot be used, or holds a run already.
        """
        self.journal = self.source.bind_run(run_id)
        writer = self.journal.writer()
        if _has_head_alone(self.journal):
            # A crash left the head alone: no run has started.
            writer.close()
            with hold_lock(self.journal):
                if _has_head_alone(self.journal):
                    self.journal.replace([])
            writer = self.journal.writer()
        self.attach_writer(writer)
        # Refused and not appended to: one file is one run. To record over one by a slip would destroy what may have
        # cost money.
        if writer.history.head is not None:
            msg = f"{self.journal.name} holds a run already; resume, replay or fork it, delete it first, or record into another journal"
            raise JournalError(msg)
        self.mark_as_written_by_user()

    def mark_as_written_by_user(self) -> None:
        """Mark all later records as written by this user's runs; all earlier ones must be marked already."""
        self.is_own = True
        # A stable recording is the same for every user; it is known by the note that its run leaves.
        if self._writer is not None and not self.source.stable:
            self._writer.enable_macs()

    def open_memory_journal(self) -> None:
        """Open an empty journal in memory, with the rules of the source journal, for the records of a repeated run."""
        # The journal that was given is only read: whatever goes wrong, the recording is as it was. Redaction is off in
        # the copy, since what it holds was cleaned when it was recorded, and would not be byte-equal if it were cleaned
        # twice.
        source = self.source
        copy = MemoryJournal(redact="off", link=source.link, stable=source.stable)
        # What equals the given journal has the same bytes.
        copy.macs = "new" if source.macs == "new" or has_macs_of_user(source) else "none"
        copy.is_own = determine_ownership(source)
        self.journal = copy.copy_redaction_rules_from(source)
        self.attach_writer(copy.writer())

    def lock_source(self) -> None:
        """
        Lock the source journal until ``close``, for a run that replaces it at the end.

        Raises:
            JournalMissing: when the journal does not exist; nothing is created.
            JournalLocked: when a run of this or another process has locked it.
        """
        if not self.source.is_there():
            raise self.source.make_missing_error()
        self._unlock_source = weakref.finalize(self, self.source.lock())

    def attach_writer(self, writer: Writer) -> Writer:
        """Write with this writer, and release it at the end."""
        self._writer, self._commits = writer, Commits(writer)
        self._write = writer.append
        self.waits = writer.waits
        # Where a commit blocks (a disk), it goes to a thread and results of one tick share it; where it does not, a
        # thread and a future would cost more than the commit.
        self.request_commit = self._commits.request_commit if writer.blocks else writer.commit
        # Called by `close`, too: while it waits, it keeps the writer alive, and with it every error and its frames.
        self._release = weakref.finalize(self, self._commits.close)
        if writer.repaired:
            self.warnings.append(
                f"{self.source.name}: {writer.repaired} bytes of an incomplete record were removed, left by a crash"
            )
        return writer

    @property
    def has_opened(self) -> bool:
        """Whether the journal was opened for writing; it may be closed by now."""
        return self._writer is not None

    # --- writing ------------------------------------------------------------------------------------------------------

    def append(self, record: Record) -> None:
        """Append a record; it is durable with the next commit. Before the journal is opened, nothing is written."""
        # Written with the next record and not when the difference was accepted: a resume that fails at once must leave
        # the journal as it was.
        if self.unwritten and self._writer is not None:
            self._append_unwritten(self._writer)
        self._write(record)

    def _append_unwritten(self, writer: Writer) -> None:
        """Append the records in ``unwritten``, and empty that list."""
        notes, self.unwritten = self.unwritten, []
        for note in notes:
            writer.append(note)

    def commit(self) -> None:
        """Write everything and make it durable; waits for the disk."""
        assert self._writer is not None  # noqa: S101 - there is one from start to end
        self._append_unwritten(self._writer)
        self._writer.commit()

    async def run_in_thread_if_blocking(self, work: Callable[[], T], *, blocks: bool = False) -> T:
        """Run *work* in a thread if the journal is on a disk or *blocks* is set, else directly."""
        assert self._writer is not None  # noqa: S101 - asked for an open journal
        assert self._commits is not None  # noqa: S101 - made with the writer
        return await self._commits.run_in_thread(work) if self._writer.blocks or blocks else work()

    def set_request_base(self, intent: Intent) -> None:
        """Store later requests as differences to this recorded one."""
        if self._writer is not None and intent.live is not None:
            self._writer.set_request_base(intent.path, intent.seq, intent.live.request.messages)

    def keep_first_fatal_error(self, error: StepEngineError) -> StepEngineError:
        """Store *error* as the reason why the run stops, unless an earlier one is stored; return the stored error."""
        # The first reason only: once one record could not be written, or one effect was another, all that follows are
        # consequences.
        self.fatal = self.fatal or error
        return self.fatal

    # --- the end ------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Release the journal, and the source journal if it is locked; may be called twice."""
        if self._release is not None:
            self._release()
        if self._unlock_source is not None:
            self._unlock_source()

    def replace_source_journal(self) -> None:
        """Overwrite the source journal with this run's records, and continue with that journal."""
        self.overwrite_journal(self.source)
        self.journal = self.source

    def overwrite_journal(self, target: Journal) -> None:
        """Replace the records of *target* by the records of this run, in address order if *target* is stable."""
        records = self.journal.records()
        # Whose they are was looked up when the copy was opened: the file may be another one by now.
        replace_records_by_derived(target, sort_by_address(records) if target.stable else records, self.journal)


def _has_head_alone(journal: Journal) -> bool:
    """Return whether a journal's only record is its head."""
    records = journal.records()
    return len(records) == 1 and isinstance(records[0], Head)


class PendingOutcomes:
    """
    The outcomes of one run that are not durable yet.

    Args:
        writer: Writes the journal.

    Attributes:
        owed: Replies that the machine has received. They become durable before another effect starts or an event is sent.
    """

    __slots__ = ("_writer", "owed")

    def __init__(self, writer: RunWriter) -> None:
        self.owed: list[tuple[Item, Value | Failure]] = []
        self._writer = writer

    # A sync of the disk takes milliseconds, more than all other work of a step; so it is never waited for by itself
    # where it can go with one that comes anyway. A reply that only the machine has seen need not be durable before the
    # calls in it begin, as their intents are behind it in the same file and cannot be durable without it.
    def start_commit(self) -> tuple[Outcomes, asyncio.Future[None] | None]:
        """
        Start a commit of all appended records, which the owed outcomes are among.

        An effect waits for it if it must not happen twice, may be undone, or is shown to people (reliability:R1). A question must be
        durable, because its answer may arrive after the process has ended. The first effect of a run waits, too, so that a paid call
        belongs to a run that can be resumed. So does every effect after an owed reply, which a crash could lose.

        Returns:
            The owed outcomes that become durable, and a future that is done then; ``None`` if they are durable already.
        """
        owed, request_commit = self.owed.copy(), self._writer.request_commit
        self.owed.clear()
        try:
            return owed, request_commit()
        except StepEngineError as error:
            raise self.stop_with_unrecorded_outcomes(error, owed) from error.__cause__

    async def wait(self, waiting: asyncio.Future[None], owed_outcomes: Outcomes) -> None:
        """Wait until a commit is done. If it fails, stop the run and raise an error that lists *owed_outcomes*."""
        try:
            await waiting
        except StepEngineError as error:
            raise self.stop_with_unrecorded_outcomes(error, owed_outcomes) from error.__cause__

    async def wait_ignoring_cancellation(self, waiting: asyncio.Future[None] | None, owed_outcomes: Outcomes) -> None:
        """
        Wait until a commit is done, even when the run is stopped meanwhile.

        The driver of the run notices a cancellation afterwards.
        """
        try:
            while waiting is not None:
                try:
                    return await waiting
                except asyncio.CancelledError:
                    # Cancelling took the future along. The commit goes on, and the next one ends no sooner.
                    waiting = self._writer.request_commit()
        except StepEngineError as error:
            raise self.stop_with_unrecorded_outcomes(error, owed_outcomes) from error.__cause__
        return None

    def stop_with_unrecorded_outcomes(self, error: StepEngineError, owed_outcomes: Outcomes) -> StepEngineError:
        """Stop the run, and return its first fatal error with notes on the outcomes that could not be recorded (reliability:JR08)."""
        for item, outcome in owed_outcomes:
            _add_outcome_note(error, item, outcome)
        return self._writer.keep_first_fatal_error(error)


def _add_outcome_note(error: StepEngineError, item: Item, outcome: Value | Failure) -> None:
    """Add a note to an error about an outcome that happened but is not recorded."""
    value = outcome.value if isinstance(outcome, Value) else getattr(outcome, "error", None)
    said = cut_end(str(getattr(value, "text", value)), MAX_NOTED_CHARS)
    asked = Intent(*item.address, encode_effect(item))
    what = f"{asked.type} {asked.path}#{asked.seq}"
    error.add_note(
        f"{what} happened, but its result is not in the journal, so a resumed run treats it as in doubt: {said}"
    )


def _ignore_record(_: Record) -> None:
    """Ignore a record, where nothing is written."""
