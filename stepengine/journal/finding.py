"""What may be given for a journal: a journal, or the path of its file (design 10)."""

from __future__ import annotations

from pathlib import Path
from typing import TypeAlias

from stepengine.errors import JournalError
from stepengine.journal.files import FileJournal
from stepengine.journal.store import Journal

__all__ = ("JournalLike", "as_journal")

JournalLike: TypeAlias = "Journal | str | Path"


def as_journal(journal: JournalLike) -> Journal:
    """
    Return *journal*, or the ``FileJournal`` at a path.

    Raises:
        JournalError: for anything else.
    """
    if isinstance(journal, Journal):
        return journal
    if isinstance(journal, str | Path):
        return FileJournal(journal)
    msg = f"a journal is a MemoryJournal, FileJournal or SqliteJournal, or the path of a file, not a {type(journal).__name__}"
    raise JournalError(msg)
