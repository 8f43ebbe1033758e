"""What may be given for a journal: a journal, or the path of its file."""

from __future__ import annotations

from pathlib import Path
from typing import TypeAlias

from stepengine.errors import JournalError
from stepengine.journal.files import FileJournal
from stepengine.journal.store import Journal

__all__ = ("JournalLike", "as_journal", "database_of")

JournalLike: TypeAlias = "Journal | str | Path"
"""A journal, or the path of its file; ``RUNS.db`` holds many runs, ``RUNS.db#RUN`` is one of them."""

DATABASES = (".db", ".sqlite", ".sqlite3")


def as_journal(journal: JournalLike) -> Journal:
    """
    Return *journal*, or the one at a path: a ``SqliteJournal`` for ``RUNS.db`` and ``RUNS.db#RUN``, else a ``FileJournal``.

    Raises:
        JournalError: for anything else.
    """
    if isinstance(journal, Journal):
        return journal
    if isinstance(journal, str | Path):
        database = database_of(str(journal))
        if database is None:
            return FileJournal(journal)
        from stepengine.journal.sqlite import SqliteJournal

        return SqliteJournal(database[0], database[1] or None)
    msg = f"a journal is a MemoryJournal, FileJournal or SqliteJournal, or the path of a file, not a {type(journal).__name__}"
    raise JournalError(msg)


def database_of(text: str) -> tuple[str, str] | None:
    """Return the SQLite file and the run (empty when none is named) that *text* names; ``None`` for any other file."""
    name, _, run = (text, "", "") if Path(text).suffix in DATABASES or "#" not in text else text.rpartition("#")
    return (name, run) if Path(name).suffix in DATABASES else None
