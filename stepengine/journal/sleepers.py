"""
The store of a journal, and the sleeping runs of a store.

A store is an SQLite database of journals, or a folder with several files ``*.jsonl``; each has a ``WakeIndex``. A journal that is alone
in its folder gets no index next to it. An index is rebuilt from the journals that this module lists.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import attrs
from attrs import frozen

from stepengine.data.waits import Waits
from stepengine.errors import JournalError, JournalMissing
from stepengine.journal.files import JOURNAL_FILE, FileJournal
from stepengine.journal.pending_items import find_open_questions, find_unread_messages, find_waits, list_message_ids
from stepengine.journal.sources import parse_database_path
from stepengine.journal.sqlite import SqliteJournal
from stepengine.journal.wake_index import MAX_NAME_CHARS, WAKING, Sleeping, WakeIndex

if TYPE_CHECKING:
    from stepengine.journal.history import History
    from stepengine.journal.mailbox import MailboxMessage, MailboxMessageKind
    from stepengine.journal.run_mailbox import RunMailbox
    from stepengine.journal.store import Journal

logger = logging.getLogger("stepengine.journal")

Journals: TypeAlias = "Mapping[str, Journal]"
"""The journals of a store by the names of their runs."""
SUFFIX = ".jsonl"
ASIDE = "before-"
"""The prefix of the file names of journals that ``extend`` replaced; their runs are never resumed."""


@frozen
class WakeEntry:
    """
    The entry of a run in the wake index of its folder or database.

    Attributes:
        place: The folder or database.
        run: The run's name in *place*.
        journals: The journals of the store, if they are not in *place*.
    """

    place: Path
    run: str
    journals: Journals | None

    def open_index(self) -> WakeIndex:
        """Return the wake index of the folder or database, for use as a context manager."""
        return open_wake_index(self.place, self.journals)

    def record_sleep(self, waits: Sequence[Waits], agent_id: str) -> None:
        """Insert or replace the wake time of the run, which waits for at least one thing."""
        found = make_wake_row(self.run, waits, agent_id)
        assert found is not None  # noqa: S101 - it waits
        with self.open_index() as index:
            index.record_sleep(found.run, found.wakes_at, found.kinds, found.agent_id)

    def wake_if_unread(self, journal: Journal, mail: RunMailbox) -> None:
        """Make the suspended run due at once if *mail* has messages that this process did not deliver, or an answer."""
        # By the record, and not by what was read: messages that this process read while the run was suspended may have
        # reached no run.
        box = mail.find_mailbox()
        has_unread = (
            box is not None
            and box.may_have_messages(0)
            and find_first_unread_message_time(journal, journal.history(), mail.list_undelivered_ids()) is not None
        )
        if has_unread or mail.was_answered:
            with self.open_index() as index:
                index.wake_for_message(self.run, "input")

    def remove(self) -> None:
        """Remove the entry of a run that no longer sleeps."""
        with self.open_index() as index:
            index.remove_run(self.run)


def locate_wake_entry(journal: Journal) -> WakeEntry | None:
    """Return the wake entry of a journal's run; ``None`` for a store without one, a lone file, and a file name that is not UTF-8."""
    found = journal.wake_place()
    if found is None or not _is_utf8(found.run):
        return None
    if journal.file is not None and not _is_wake_store(found.place, found.run):
        return None
    return WakeEntry(found.place, found.run, found.journals)


def _is_utf8(name: str) -> bool:
    """Return whether a file name is valid text, as the rows of an index must be."""
    return not any("\ud800" <= char <= "\udfff" for char in name)


def _is_wake_store(folder: Path, name: str) -> bool:
    """Return whether a folder has a wake index, or holds other journals."""
    try:
        if (folder / WAKING).exists():
            return True
        with os.scandir(folder) as found:
            return any(_is_journal_name(one.name) and one.name != name for one in found)
    except OSError:
        return False


def _is_journal_name(name: str) -> bool:
    """Return whether a file name has the suffix of journals, and is not that of a backup."""
    return name.endswith(SUFFIX) and not is_backup_name(name.removesuffix(SUFFIX))


def is_backup_name(run: str) -> bool:
    """Return whether a name is that of a copy that was made before an extension replaced the journal."""
    before, found, number = run.rpartition(ASIDE)
    return bool(found) and before.endswith((".", "-")) and number.isdecimal()


def open_wake_index(store_path: str | Path, journals: Journals | None = None) -> WakeIndex:
    """
    Return the wake index of a store; a missing one is built from the journals.

    Args:
        store_path: The folder or database of the index.
        journals: The journals of the store by name; by default those in *store_path*.

    Raises:
        JournalError: when *store_path* is neither a folder nor a database.
    """
    where = Path(store_path)
    return WakeIndex.for_store(where, lambda: find_sleeping_runs(where, journals))


def open_journal(store_path: str | Path, run: str, journals: Journals | None = None) -> Journal:
    """
    Return the journal of a run by its name in a store.

    Raises:
        JournalMissing: when *journals* has no journal of this name.
    """
    where = Path(store_path)
    if journals is not None:
        if run not in journals:
            msg = f"the store of {str(where)!r} no longer has a journal {run!r}"
            raise JournalMissing(msg)
        return journals[run]
    return FileJournal(where / run) if where.is_dir() else SqliteJournal(where, run)


def find_sleeping_runs(store_path: str | Path, journals: Journals | None = None) -> Iterator[Sleeping]:
    """Yield the sleeping runs of a store; an unreadable journal is logged and skipped."""
    found_journals = (
        _list_journals(Path(store_path)) if journals is None else ((journals[name], name) for name in journals)
    )
    for journal, name in found_journals:
        try:
            found = read_wake_row(journal, name)
        except JournalError as error:
            logger.warning("cannot read whether a run sleeps: %s", error)
            continue
        if found is not None:
            yield found


def _list_journals(store_path: Path) -> Iterator[tuple[Journal, str]]:
    """Yield the journals of a folder or database, each with its run's name, without backups."""
    if not store_path.is_dir():
        for run in SqliteJournal(store_path).runs():
            if not is_backup_name(run):
                yield SqliteJournal(store_path, run), run
        return
    for path in sorted(store_path.iterdir()):
        if path.is_file() and (_is_journal_name(path.name) or _has_journal_content(path)):
            if _is_utf8(path.name):
                yield open_journal(store_path, path.name), path.name
            else:
                logger.warning("the run in %r is never woken: its file name is not UTF-8; rename the file", path.name)


def _has_journal_content(path: Path) -> bool:
    """Return whether a file with another suffix holds a journal that is not a backup: a run may be recorded into any file."""
    if path.suffix == SUFFIX or is_backup_name(path.stem):
        return False
    try:
        return path.stat().st_size > 0 and JOURNAL_FILE.matches(path)
    except OSError:
        return False


def read_wake_row(journal: Journal, name: str) -> Sleeping | None:
    """Return the index row for a recorded run, or ``None`` if it ended, was stopped or waits for nothing."""
    history = journal.history()
    if history.is_complete or (history.stop is not None and history.stop.input["kind"] != "suspended"):
        return None
    found = make_wake_row(name, find_waits(history), str(history.root["agent_id"]))
    came = None if found is None else find_first_unread_message_time(journal, history)
    return found if found is None or came is None else attrs.evolve(found, wakes_at=came)


def find_first_unread_message_time(
    journal: Journal, history: History, ignored_ids: Collection[str] = ()
) -> datetime | None:
    """
    Return when the first mailbox message that can still have an effect on the run was sent, or ``None``.

    Messages with *ignored_ids* are for runs that have not started, and wake no run.
    """
    try:
        box = journal.mailbox()
    except JournalError:
        return None  # a store without mailboxes
    mailbox_messages = box.read()[0] if box.may_have_messages(0) else []
    known, open_ = (
        list_message_ids(history) if mailbox_messages else set(),
        find_open_questions(history) if mailbox_messages else {},
    )
    known -= _find_receivable_ids(history, find_waits(history)) if mailbox_messages else set()
    gone = {*known, *ignored_ids}
    new = [one for one in mailbox_messages if one.id not in gone and _can_have_effect(one, history, open_)]
    return min([one.sent for one in new], default=None)


def _can_have_effect(mailbox_message: MailboxMessage, history: History, open_questions: Collection[str]) -> bool:
    """Return whether a message can still have an effect: its question is open, or its call has no result."""
    if mailbox_message.kind == "answer":
        return mailbox_message.topic in open_questions
    return mailbox_message.kind != "result" or (mailbox_message.path, int(mailbox_message.topic)) in history.open


def _find_receivable_ids(history: History, waits: Sequence[Waits]) -> set[str]:
    """Return the ids of recorded messages that the waiting runs will receive when resumed."""
    topics = {(one.path, one.topic) for one in waits if one.kind == "message"}
    return {one["id"] for one in find_unread_messages(history) if (one["path"], one["topic"]) in topics}


def wake_for_mailbox_message(journal: Journal, kind: MailboxMessageKind = "message") -> None:
    """Make the run of a journal due if it waits for a mailbox message of this kind."""
    entry = locate_wake_entry(journal)
    # A folder without an index needs no entry: the mailboxes are read when its index is made.
    if entry is not None and (not entry.place.is_dir() or (entry.place / WAKING).exists()):
        with entry.open_index() as index:
            index.wake_for_message(entry.run, kind)


def make_wake_row(name: str, waits: Sequence[Waits], agent_id: str) -> Sleeping | None:
    """Return the index row for a run with these waits, or ``None`` without any."""
    if not waits:
        return None
    times = [one.wakes_at for one in waits if one.wakes_at is not None]
    # An agent may be called whatever it likes, and the index only shows that: no run is forgotten for it.
    return Sleeping(name, min(times, default=None), {one.kind for one in waits}, agent_id[:MAX_NAME_CHARS])


def is_due(journal: Journal, waits: Sequence[Waits], now: datetime) -> bool:
    """Return whether one of the wake times has passed, or the mailbox has an unread message of the kind ``message``."""
    if any(one.wakes_at is not None and one.wakes_at <= now for one in waits):
        return True
    known = {one.input.get("id") for one in journal.history().inputs}
    return any(
        mailbox_message.kind == "message" and mailbox_message.id not in known
        for mailbox_message in journal.mailbox().read()[0]
    )


def is_store_path(text: str) -> bool:
    """Return whether a path is a folder or a database of journals."""
    return Path(text).is_dir() or parse_database_path(text) == (text, "")
