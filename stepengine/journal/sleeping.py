"""
Which place a journal stands in, and which runs of a place sleep.

A place is an SQLite database of journals, or a folder of several: what ``WakeIndex`` is kept for. A file that is alone in its
folder is somebody's own, and nothing is put beside it. Whoever makes an index anew reads the journals here.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
from attrs import frozen

from stepengine.data.waiting import Waits
from stepengine.errors import JournalError
from stepengine.journal.files import FileJournal
from stepengine.journal.finding import as_journal, database_of
from stepengine.journal.sqlite import SqliteJournal
from stepengine.journal.waking import MAX_NAME_CHARS, WAKING, Sleeping, WakeIndex

if TYPE_CHECKING:
    from stepengine.journal.history import History
    from stepengine.journal.mailbox import Letter, LetterKind
    from stepengine.journal.store import Journal

__all__ = (
    "Bed",
    "bed_of",
    "first_unread",
    "index_of",
    "is_due",
    "is_place",
    "journal_in",
    "make_due",
    "sleeper",
    "sleepers",
    "sleeping",
)

logger = logging.getLogger("stepengine.journal")

SUFFIX = ".jsonl"
ASIDE = "before-"
"""What stands before the number in the name of what ``extend`` put aside: nobody goes on with that."""


@frozen
class Bed:
    """Where a run sleeps: the place, and the run's name in it."""

    place: Path
    run: str

    def index(self) -> WakeIndex:
        """Return the index of the place."""
        return index_of(self.place)


def bed_of(journal: Journal) -> Bed | None:
    """Return where the run of a journal sleeps; ``None`` for one in memory, or in a file that stands alone. Looks at the folder."""
    if isinstance(journal, SqliteJournal):
        run = journal.run or next(iter(journal.runs()), None)
        return None if run is None else Bed(journal.path, run)
    if not isinstance(journal, FileJournal):
        return None
    folder, name = journal.path.parent, journal.path.name
    return Bed(folder, name) if _is_place(folder, name) else None


def _is_place(folder: Path, name: str) -> bool:
    """Return whether somebody wakes runs of a folder, or it holds another journal than the one of that name."""
    try:
        if (folder / WAKING).exists():
            return True
        with os.scandir(folder) as found:
            return any(_is_journal(one.name) and one.name != name for one in found)
    except OSError:
        return False


def _is_journal(name: str) -> bool:
    return name.endswith(SUFFIX) and not _is_aside(name.removesuffix(SUFFIX))


def _is_aside(run: str) -> bool:
    before, found, number = run.rpartition(ASIDE)
    return bool(found) and before.endswith((".", "-")) and number.isdecimal()


def index_of(place: str | Path) -> WakeIndex:
    """
    Return the index of a place; made from its journals where there is none.

    Raises:
        JournalError: for what is neither a folder nor a database.
    """
    where = Path(place)
    return WakeIndex.of(where, lambda: sleepers(where))


def journal_in(place: str | Path, run: str) -> Journal:
    """Return the journal of a run by its name in a place."""
    where = Path(place)
    return FileJournal(where / run) if where.is_dir() else SqliteJournal(where, run)


def sleepers(place: str | Path) -> Iterator[Sleeping]:
    """Give the runs of a place that sleep; a journal that cannot be read is logged, and sleeps for nobody."""
    for journal, name in _journals(Path(place)):
        try:
            found = sleeper(journal, name)
        except JournalError as error:
            logger.warning("whether a run sleeps is not known: %s", error)
            continue
        if found is not None:
            yield found


def _journals(place: Path) -> Iterator[tuple[Journal, str]]:
    if not place.is_dir():
        for run in SqliteJournal(place).runs():
            if not _is_aside(run):
                yield SqliteJournal(place, run), run
        return
    for path in sorted(place.iterdir()):
        if _is_journal(path.name) and path.is_file():
            yield as_journal(path), path.name


def sleeper(journal: Journal, name: str) -> Sleeping | None:
    """Return what the index says of a recorded run; ``None`` for one that has ended, was stopped, or waits for nothing."""
    history = journal.history()
    if history.is_complete or (history.stop is not None and history.stop.input["kind"] != "suspended"):
        return None
    found = sleeping(name, history.waits(), str(history.root["agent_id"]))
    came = None if found is None else first_unread(journal, history)
    return found if found is None or came is None else attrs.evolve(found, wakes_at=came)


def first_unread(journal: Journal, history: History, early: Collection[str] = ()) -> datetime | None:
    """
    Return when the first letter that the run has not taken in was sent, since the run is due then; ``None`` when there is none.

    Letters whose ids are in *early* are for runs that have not begun, and wake nobody.
    """
    box = journal.mailbox()
    letters = box.read()[0] if box.changed(0) else []
    known, open_ = history.kept_ids() if letters else set(), history.open_questions() if letters else {}
    known -= _received_next(history, history.waits()) if letters else set()
    gone = {*known, *early}
    new = [one for one in letters if one.id not in gone and _is_wanted(one, history, open_)]
    return min([one.sent for one in new], default=None)


def _is_wanted(letter: Letter, history: History, open_questions: Collection[str]) -> bool:
    """Return whether a letter can still have an effect: one that answers or ends something that is over is in no record."""
    if letter.kind == "answer":
        return letter.topic in open_questions
    return letter.kind != "result" or (letter.path, int(letter.topic)) in history.open


def _received_next(history: History, waits: Sequence[Waits]) -> set[str]:
    """Return the ids of messages that are written down and will be received once somebody resumes what waits."""
    topics = {(one.path, one.topic) for one in waits if one.kind == "message"}
    return {one["id"] for one in history.unread_messages() if (one["path"], one["topic"]) in topics}


def make_due(journal: Journal, kind: LetterKind = "message") -> None:
    """Make the run of a journal due if it waits for the letter that was put into its mailbox."""
    bed = bed_of(journal)
    # Where there is no index of a folder yet, whoever makes it looks into the mailboxes.
    if bed is not None and (not bed.place.is_dir() or (bed.place / WAKING).exists()):
        with bed.index() as index:
            index.post_arrived(bed.run, kind)


def sleeping(name: str, waits: Sequence[Waits], agent_id: str) -> Sleeping | None:
    """Return what the index says of a run that waits for these; ``None`` where it waits for nothing."""
    if not waits:
        return None
    times = [one.wakes_at for one in waits if one.wakes_at is not None]
    # An agent may be called whatever it likes, and the index only shows that: no run is forgotten for it.
    return Sleeping(name, min(times, default=None), {one.kind for one in waits}, agent_id[:MAX_NAME_CHARS])


def is_due(journal: Journal, waits: Sequence[Waits], now: datetime) -> bool:
    """Return whether one of these times has come, or there is a message that the run has not taken."""
    if any(one.wakes_at is not None and one.wakes_at <= now for one in waits):
        return True
    known = {one.input.get("id") for one in journal.history().inputs}
    return any(letter.kind == "message" and letter.id not in known for letter in journal.mailbox().read()[0])


def is_place(text: str) -> bool:
    """Return whether a path names a folder, or a database of journals."""
    return Path(text).is_dir() or database_of(text) == (text, "")
