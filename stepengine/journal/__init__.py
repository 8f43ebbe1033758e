"""
Recording, resuming, replaying, forking and comparing runs.

What lives here: the journal's stores (memory, file, SQLite), its records and their codec, the runs that are recorded,
resumed and replayed, and what compares, checks, cleans and mends journals. They wrap the performer from outside.

What users need is exported here: the stores, what is done with journals, and the rules about secrets. An engine and the
test kit open runs with ``runs`` and ``journaled_run``.

What must not: anything that the driver would have to know. The floors below have never heard of journals.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepengine.data.late import late

if TYPE_CHECKING:
    from stepengine.journal.comparing import Difference, diff
    from stepengine.journal.decided import Decided, decisions
    from stepengine.journal.files import FileJournal
    from stepengine.journal.finding import JournalLike, as_journal
    from stepengine.journal.following import Follower, News
    from stepengine.journal.mend import Edit, Report, Sealed, check, repair, scrub, sealed
    from stepengine.journal.questions import InDoubt
    from stepengine.journal.rerunning import Called, Purse, Rerun
    from stepengine.journal.runs import OnDivergence
    from stepengine.journal.scanning import Leak, scan
    from stepengine.journal.show import machine_data
    from stepengine.journal.signing import SigningKey
    from stepengine.journal.sqlite import SqliteJournal
    from stepengine.journal.store import Journal, MemoryJournal
    from stepengine.journal.undoing import Undone, undo
    from stepengine.journal.verifying import Verified, verify
    from stepengine.journal.watching import follow_events
    from stepengine.redaction import RedactField, RedactHeader, Redactor, RedactPattern, RedactValue, SecretFound
else:
    __getattr__, __dir__ = late(
        __name__,
        {
            "stepengine.journal.comparing": (
                "Difference",
                "diff",
            ),
            "stepengine.journal.decided": (
                "Decided",
                "decisions",
            ),
            "stepengine.journal.files": ("FileJournal",),
            "stepengine.journal.finding": (
                "JournalLike",
                "as_journal",
            ),
            "stepengine.journal.following": (
                "Follower",
                "News",
            ),
            "stepengine.journal.mend": (
                "Edit",
                "Report",
                "Sealed",
                "check",
                "repair",
                "scrub",
                "sealed",
            ),
            "stepengine.journal.questions": ("InDoubt",),
            "stepengine.journal.rerunning": (
                "Called",
                "Purse",
                "Rerun",
            ),
            "stepengine.journal.runs": ("OnDivergence",),
            "stepengine.journal.scanning": (
                "Leak",
                "scan",
            ),
            "stepengine.journal.show": ("machine_data",),
            "stepengine.journal.signing": ("SigningKey",),
            "stepengine.journal.sqlite": ("SqliteJournal",),
            "stepengine.journal.store": (
                "Journal",
                "MemoryJournal",
            ),
            "stepengine.journal.undoing": (
                "Undone",
                "undo",
            ),
            "stepengine.journal.verifying": (
                "Verified",
                "verify",
            ),
            "stepengine.journal.watching": ("follow_events",),
            "stepengine.redaction": (
                "RedactField",
                "RedactHeader",
                "Redactor",
                "RedactPattern",
                "RedactValue",
                "SecretFound",
            ),
        },
    )

__all__ = (
    "Called",
    "Decided",
    "Difference",
    "Edit",
    "FileJournal",
    "Follower",
    "InDoubt",
    "Journal",
    "JournalLike",
    "Leak",
    "MemoryJournal",
    "News",
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
    "SigningKey",
    "SqliteJournal",
    "Undone",
    "Verified",
    "as_journal",
    "check",
    "decisions",
    "diff",
    "follow_events",
    "machine_data",
    "repair",
    "scan",
    "scrub",
    "sealed",
    "undo",
    "verify",
)
