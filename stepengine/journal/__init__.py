"""
Recording, resuming, replaying, forking and comparing runs.

A journal is a log that is written ahead: the intent of an effect before it begins, its result before anybody sees that. There is no
snapshot of a state. To go on with a run is to run the agent again over its records: each effect that it asks for is compared with
the one at the same address, and answered with what came of it then, until the record ends. That is why a handler has to do the same
when it is sent the same, and why an edit of it is found at the first effect that differs.

``Recorder`` wraps the performer from outside, between limits and gate. It asks ``Replayer`` about the past and writes to a store by
way of the ``Encoder``. ``JournaledRun`` holds what belongs to one run and its journal, and its ``Mode`` says what differs between
recording, resuming, replaying and the other ways to open one. ``History`` is what was read: intents and results by address, decoded
when somebody asks. Stores (memory, file, SQLite) hold the same lines; they lock, commit and mend, and know nothing of effects.
What others send to a run (answers, messages, results) comes by the mailbox beside the journal.

The rest of the folder are readers: what compares, checks, scans, signs, undoes and shows records.

What users need is exported here: the stores, what is done with journals, and the rules about secrets. An engine and the test kit open
runs with ``runs`` and ``journaled_run``.

Must not be here: anything that the driver would have to know. The floors below have never heard of journals.

Begin with ``records``, then ``recorder`` and ``replayer``; ``encoding`` and ``store`` for the bytes.
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
    from stepengine.journal.recorded_forks import Called, ForkReport, Purse
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
            "stepengine.journal.recorded_forks": (
                "Called",
                "Purse",
                "ForkReport",
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
    "ForkReport",
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
