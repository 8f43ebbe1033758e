"""Journal arguments: a journal, or the path of its file."""

from __future__ import annotations

from pathlib import Path
from typing import TypeAlias

from stepengine.errors import JournalError
from stepengine.journal.files import FileJournal
from stepengine.journal.store import Journal

JournalLike: TypeAlias = "Journal | str | Path"
"""A journal, or the path of its file; ``RUNS.db`` holds many runs, ``RUNS.db#RUN`` is one of them."""

DATABASES = (".db", ".sqlite", ".sqlite3")


def as_journal(journal: JournalLike) -> Journal:
    """
    Return *journal*, or open the path: ``RUNS.db`` and ``RUNS.db#RUN`` as SQLite, any other as a file.

    Raises:
        JournalError: for anything else.
    """
    if isinstance(journal, Journal):
        return journal
    if isinstance(journal, str | Path):
        database = parse_database_path(str(journal))
        if database is None:
            return FileJournal(journal)
        from stepengine.journal.sqlite import SqliteJournal

        return SqliteJournal(database[0], database[1] or None)
    msg = f"a journal is a MemoryJournal, FileJournal or SqliteJournal, or the path of a file, not a {type(journal).__name__}"
    raise JournalError(msg)


def parse_database_path(text: str) -> tuple[str, str] | None:
    """Return the SQLite file and the run that *text* names (empty without one), or ``None`` for other files."""
    name, _, run = (text, "", "") if Path(text).suffix in DATABASES or "#" not in text else text.rpartition("#")
    return (name, run) if Path(name).suffix in DATABASES else None
