"""
Recording, resuming, replaying, forking and comparing runs.

What lives here: the journal's stores (memory, file, SQLite), its records and their codec, the recorder and the replayer,
and `diff`. Recorder and replayer wrap the performer from outside.

What must not: anything that the driver would have to know. The floors below have never heard of journals.
"""

from stepengine.journal.checking import Report, check, scrub
from stepengine.journal.comparing import Difference, diff
from stepengine.journal.files import FileJournal
from stepengine.journal.finding import JournalLike, as_journal
from stepengine.journal.forks import branch
from stepengine.journal.redaction import Redactor, SecretFound
from stepengine.journal.runs import Launch, OnDivergence, extend, fork, record, replay, resume
from stepengine.journal.session import InDoubt, Session
from stepengine.journal.sqlite import SqliteJournal
from stepengine.journal.store import Journal, MemoryJournal

__all__ = (
    "Difference",
    "FileJournal",
    "InDoubt",
    "Journal",
    "JournalLike",
    "Launch",
    "MemoryJournal",
    "OnDivergence",
    "Redactor",
    "Report",
    "SecretFound",
    "Session",
    "SqliteJournal",
    "as_journal",
    "branch",
    "check",
    "diff",
    "extend",
    "fork",
    "record",
    "replay",
    "resume",
    "scrub",
)
