"""
Recording, resuming, replaying, forking and comparing runs.

What lives here: the journal's stores (memory, file, SQLite), its records and their codec, the runs that are recorded,
resumed and replayed, and what compares, checks, cleans and mends journals. They wrap the performer from outside.

What users need is exported here: the stores, what is done with journals, and the rules about secrets. An engine and the
test kit open runs with ``runs`` and ``journaled_run``.

What must not: anything that the driver would have to know. The floors below have never heard of journals.
"""

from stepengine.journal.comparing import Difference, diff
from stepengine.journal.files import FileJournal
from stepengine.journal.finding import JournalLike, as_journal
from stepengine.journal.mend import Edit, Report, Sealed, check, repair, scrub, sealed
from stepengine.journal.questions import InDoubt
from stepengine.journal.rerunning import Called, Purse, Rerun
from stepengine.journal.runs import OnDivergence
from stepengine.journal.scanning import Leak, scan
from stepengine.journal.show import machine_data
from stepengine.journal.sqlite import SqliteJournal
from stepengine.journal.store import Journal, MemoryJournal
from stepengine.journal.undoing import Undone, undo
from stepengine.redaction import RedactField, RedactHeader, Redactor, RedactPattern, RedactValue, SecretFound

__all__ = (
    "Called",
    "Difference",
    "Edit",
    "FileJournal",
    "InDoubt",
    "Journal",
    "JournalLike",
    "Leak",
    "MemoryJournal",
    "OnDivergence",
    "Purse",
    "RedactField",
    "RedactHeader",
    "RedactPattern",
    "RedactValue",
    "Redactor",
    "Report",
    "Rerun",
    "Sealed",
    "SecretFound",
    "SqliteJournal",
    "Undone",
    "as_journal",
    "check",
    "diff",
    "machine_data",
    "repair",
    "scan",
    "scrub",
    "sealed",
    "undo",
)
