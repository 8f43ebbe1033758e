"""
Recording, resuming, replaying, forking and comparing runs.

What lives here: the journal's stores (memory, file, SQLite), its records and their codec, sessions that record, resume and
replay, and what compares, checks, cleans and mends journals. Sessions wrap the performer from outside.

What must not: anything that the driver would have to know. The floors below have never heard of journals.
"""

from stepengine.journal.comparing import Difference, diff
from stepengine.journal.files import FileJournal
from stepengine.journal.finding import JournalLike, as_journal
from stepengine.journal.forks import branch
from stepengine.journal.mend import Edit, Report, Sealed, check, repair, scrub, sealed
from stepengine.journal.replayer import live_kinds
from stepengine.journal.runs import Deciding, Launch, OnDivergence, begin, extend, fork, record, replay, resume
from stepengine.journal.scanning import Leak, scan
from stepengine.journal.session import InDoubt, Session
from stepengine.journal.show import machine_data
from stepengine.journal.sqlite import SqliteJournal
from stepengine.journal.store import Journal, MemoryJournal
from stepengine.journal.undoing import Undone, undo
from stepengine.redaction import RedactField, RedactHeader, Redactor, RedactPattern, RedactValue, SecretFound

__all__ = (
    "Deciding",
    "Difference",
    "Edit",
    "FileJournal",
    "InDoubt",
    "Journal",
    "JournalLike",
    "Launch",
    "Leak",
    "MemoryJournal",
    "OnDivergence",
    "RedactField",
    "RedactHeader",
    "RedactPattern",
    "RedactValue",
    "Redactor",
    "Report",
    "Sealed",
    "SecretFound",
    "Session",
    "SqliteJournal",
    "Undone",
    "as_journal",
    "begin",
    "branch",
    "check",
    "diff",
    "extend",
    "fork",
    "live_kinds",
    "machine_data",
    "record",
    "repair",
    "replay",
    "resume",
    "scan",
    "scrub",
    "sealed",
    "undo",
)
