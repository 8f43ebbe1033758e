"""
How a run is opened on its journal; one journal, one mode, from start to end. What differs by the mode stands here, alone.

A mode is not a state: it is asked about the run and its past, and says what is to be done.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import Any, Protocol

import attrs

from stepengine.data.events import Event, RunStarted
from stepengine.data.models import ModelRequest
from stepengine.data.outcomes import Stop
from stepengine.data.questions import AnswerLike
from stepengine.errors import StepEngineError
from stepengine.journal.history import History
from stepengine.journal.ordering import put_as_recorded, without_cut_off_blobs
from stepengine.journal.records import ROOT, Address, Blob, Head, Intent, Record
from stepengine.journal.store import Journal, MemoryJournal
from stepengine.journal.timing import Timing

__all__ = ("Adding", "Extending", "Forking", "Mode", "Recording", "Replaying", "Resuming", "Walking")


class Past(Protocol):
    """What a mode knows of the recorded part of a run; see ``RecordedPart``."""

    history: History
    grew: bool

    @property
    def cut(self) -> object:
        """What was cut off; false for nothing."""


class OpenedRun(Protocol):
    """What a mode knows of the run that is opened in it; see ``JournaledRun``."""

    source: Journal
    journal: Journal
    leftover: StepEngineError | None

    @property
    def past(self) -> Past | None:
        """The recorded part; ``None`` for a new run."""

    def append(self, record: Record) -> None:
        """Write a record."""

    def close(self) -> None:
        """Give the journal back."""

    def put_in_order(self, target: Journal) -> None:
        """Put what was made into *target*."""

    def replace_source(self) -> None:
        """Put what was made in place of the journal that was given."""


class Mode:
    """
    What holds of a run unless its mode says otherwise: it goes on as it likes, and is written down.

    Attributes:
        name: As the documentation calls it.
        writes: Whether anything is written down.
        copies: Whether what is repeated is written anew, into a journal beside the one that was given.
        takes_over: Whether the journal that is made has the recorded records of what is the same, and no second ones: of a
            long run those would be a third of what is in memory.
        replaces: Whether the journal that was given is replaced at the end.
        cuts_off: Whether what does not hold any more is cut off the record, and the run goes on live from there.
        resumes: Whether the run goes on in the journal that was given, behind what that holds, unless that has an end.
        keeps_writes: Whether what calls write to files is kept, so that it can be undone.
        takes_letters: Whether the mailbox of the journal is that of the run, and what others post there is for it.
        waits: Whether a tree that only waits for a time that comes soon waits for it.
    """

    name = ""
    writes = True
    copies = False
    takes_over = False
    replaces = False
    cuts_off = False
    resumes = False
    keeps_writes = True
    takes_letters = False
    waits = True

    def is_closed(self, history: History) -> bool:
        """Return whether nothing is performed that is not recorded."""
        return False

    def goes_on(self, history: History) -> bool:
        """Return whether new records are appended to the journal that was given."""
        return self.resumes and not history.is_complete

    def news(self, past: Past | None) -> Callable[[Event], bool] | None:
        """Return what says whether an event is news; ``None`` where each is."""
        return None

    def known_lookups(self, history: History, path: str) -> Collection[str]:
        """Return the kinds of look-ups for the run at *path* that are in the journal being written."""
        return ()

    def repeats(self, past: Past) -> bool:
        """Return whether nothing was performed, from start to end."""
        return False

    def tells_stop(self, stop: Stop, past: Past | None) -> bool:
        """Return whether it is written down that *stop* ended the run; a run that waits says so by its questions."""
        return stop.kind != "suspended" and (past is None or not self.repeats(past))

    def may_leave(self, past: Past) -> bool:
        """Return whether the run may end without having reached all records."""
        return False

    def write_start(self, run: OpenedRun, head: Head, asked: Intent, *, is_equal: bool) -> None:
        """Write down that a recorded run starts again with what is *asked* now, and whether that is what was recorded."""
        if self.copies:
            run.append(attrs.evolve(head, line=None, signed=""))
            run.append(asked)

    def settle(self, run: OpenedRun, *, failed: bool) -> None:
        """Put the journal of a run that has ended in its final place and order."""
        if run.past is not None and self.repeats(run.past):
            assert isinstance(run.journal, MemoryJournal)  # noqa: S101 - what repeats makes one
            put_as_recorded(run.journal, run.past.history.records)


class Recording(Mode):
    """A new run is recorded."""

    name = "record"
    takes_letters = True

    def settle(self, run: OpenedRun, *, failed: bool) -> None:
        """Put a recording that is to be stable in the order of its addresses."""
        if run.source.stable:
            run.close()
            run.put_in_order(run.journal)


class Resuming(Mode):
    """A recorded run goes on in its journal."""

    name = "resume"
    resumes = takes_letters = True

    def is_closed(self, history: History) -> bool:
        """Return whether the record has an end: then there is nothing to resume."""
        return history.is_complete

    def tells_stop(self, stop: Stop, past: Past | None) -> bool:
        """Return whether it does not wait, or follows a stop: else the journal would be that of the stopped run."""
        last = None if past is None else past.history.stop
        return stop.kind != "suspended" or (last is not None and last.input["kind"] != "suspended")

    def news(self, past: Past | None) -> Callable[[Event], bool] | None:
        """Return the test that drops recorded events, so that they are not shown again."""
        return None if past is None else partial(_is_news, past.history)

    def known_lookups(self, history: History, path: str) -> Collection[str]:
        """Return what the journal holds already."""
        return history.kinds.get((path, -1), ())


def _is_news(history: History, event: Event) -> bool:
    if isinstance(event, RunStarted) and not event.path:
        return True
    return (event.path, event.seq) not in history.results


class Replaying(Mode):
    """A recorded run is repeated, and nothing is performed."""

    name = "replay"
    copies = takes_over = True
    keeps_writes = False

    def is_closed(self, history: History) -> bool:
        """Return that it is."""
        return True

    def repeats(self, past: Past) -> bool:
        """Return that it does."""
        return True

    def write_start(self, run: OpenedRun, head: Head, asked: Intent, *, is_equal: bool) -> None:
        """Take over the recorded start."""
        assert run.past is not None  # noqa: S101 - it is what is repeated
        history = run.past.history
        run.append(head)
        # Whatever is taken over first may name one; the end puts all in order.
        for blob in [record for record in without_cut_off_blobs(history.records) if isinstance(record, Blob)]:
            run.append(blob)
        run.append(history.intents[ROOT] if is_equal else asked)


class _Replacing(Mode):
    """A recorded run is repeated, what is not recorded is performed, and the journal is replaced."""

    copies = replaces = True

    def settle(self, run: OpenedRun, *, failed: bool) -> None:
        """Replace the journal, unless the run failed or left something."""
        if not failed and run.leftover is None:
            run.replace_source()


class Extending(_Replacing):
    """A recorded run is repeated as far as it holds, then goes on live; its journal is replaced."""

    name = "extend"
    cuts_off = True


class Adding(_Replacing):
    """A recorded run is repeated, and what is not recorded is performed; its journal is replaced when something came."""

    name = "new"

    def may_leave(self, past: Past) -> bool:
        """Return whether nothing came that is not recorded."""
        return not past.grew


class Forking(Mode):
    """A recorded run is repeated up to a place, and goes on from there in a journal of its own."""

    name = "fork"
    copies = True
    keeps_writes = False
    waits = False

    def repeats(self, past: Past) -> bool:
        """Return whether it went as recorded."""
        return not past.cut


class Walking(Mode):
    """A recorded run is repeated by somebody who drives its machines; nothing is performed and nothing is written."""

    name = "walk"
    writes = keeps_writes = False

    def is_closed(self, history: History) -> bool:
        """Return that it is."""
        return True


class RunToReplay(Protocol):
    """What a replayer needs of its run; see ``JournaledRun``."""

    mode: Mode
    answers: dict[str, AnswerLike]
    machines: dict[str, Any]
    decoders: dict[str, Callable[[Any], Any]]
    timing: Timing

    def append(self, record: Record) -> None:
        """Write a record."""

    def remember(self, intent: Intent) -> None:
        """Let later requests be stored as differences to this one."""

    def accept(self, address: Address, fp: str) -> None:
        """Record that the record at an address serves for another effect."""

    def tell(self, request: ModelRequest, times: int) -> None:
        """Notify the provider that the record answers a model call."""

    def fail(self, error: StepEngineError) -> StepEngineError:
        """End the run; return the first error that ended it."""
