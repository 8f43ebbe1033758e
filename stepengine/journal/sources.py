"""Journal arguments: a journal, or the path of its file."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import TypeAlias

from stepengine.errors import JournalError
from stepengine.journal.files import FileJournal
from stepengine.journal.store import Journal

JournalLike: TypeAlias = "Journal | str | Path"
"""A journal, or the path of its file; ``RUNS.db`` holds many runs, ``RUNS.db#RUN`` is one of them."""

PARENT_ID_CHARS = 40
"""Enough to recognize the parent; with the rest, the id of a fork of forks stays short enough for every store."""
DATABASES = (".db", ".sqlite", ".sqlite3")


def as_journal(journal: JournalLike) -> Journal:
    """
    Return *journal*, or open the path: ``RUNS.db`` and ``RUNS.db#RUN`` as SQLite, any other as a file.

    Raises:
        JournalError: when *journal* is neither a journal nor a path.
    """
    if isinstance(journal, Journal):
        return journal
    if isinstance(journal, str | Path):
        database = parse_database_path(str(journal))
        if database is None:
            return FileJournal(journal)
        from stepengine.journal.sqlite import SqliteJournal

        return SqliteJournal(database[0], database[1] or None)
    msg = f"a journal must be a MemoryJournal, FileJournal or SqliteJournal, or the path of a file, not a {type(journal).__name__}"
    raise JournalError(msg)


def make_fork_id(parent: str) -> str:
    """Return a new id for a fork of the run with the id *parent*."""
    return f"{parent[:PARENT_ID_CHARS]}-{secrets.token_hex(4)}"  # a run has at most some thousand forks


def bind_fork_journal(journal: Journal, run: str) -> Journal:
    """
    Return the journal of a fork with this run id.

    Raises:
        JournalError: when *journal* holds a run already.
    """
    target = journal.bind_run(run)
    if target.records():
        msg = f"{target.name} holds a run already; a fork needs its own journal"
        raise JournalError(msg)
    return target


def get_journal_file(text: str) -> Path:
    """Return the file that the address of a journal names, without the run of an SQLite file."""
    database = parse_database_path(text)
    return Path(text if database is None else database[0])


def parse_database_path(text: str) -> tuple[str, str] | None:
    """Split ``FILE.db#RUN`` into the SQLite file and the run, ``""`` without one; return ``None`` for other files."""
    name, _, run = (text, "", "") if Path(text).suffix in DATABASES or "#" not in text else text.rpartition("#")
    return (name, run) if Path(name).suffix in DATABASES else None
