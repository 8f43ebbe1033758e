"""
Recording, resuming, replaying, forking and comparing runs.

A journal is a write-ahead log: the intent of an effect is written before it starts, its result before anybody sees it. There is no
snapshot of a state. To resume a run, the agent runs again over its records. Each effect is compared with the recorded one at the same
address and gets the recorded outcome, until the record ends. So a handler must do the same when it receives the same, and an edit of
it is found at the first effect that differs.

- ``JournaledRun`` composes the parts that work on one run and its journal. Its ``Mode`` has the rules that differ between recording,
  resuming, replaying and the other ways to open a journal.
- ``Recorder`` wraps the performer and writes through ``Encoder`` to a store. In a run with a past, ``RecordPlayer`` takes its place: it
  asks ``Replayer`` about the record, and passes live effects to the recorder.
- ``History`` holds the records by address and decodes them on demand. Its parts are ``RecordedTree`` (where runs start and end),
  ``RecordedFacts`` (the facts in the input records) and ``RecordBlobs`` (long texts). ``RecordedCalls`` finds the effects of a tool call.
- Stores (memory, file, SQLite) hold the same lines. They lock, commit and repair, and know nothing of effects. ``LineWriter`` encodes and
  signs; ``LockedStore`` appends the bytes.
- ``Mailbox`` brings answers, messages and results from other processes.

The other modules read a journal through ``Journal`` and ``History`` alone: they compare, check, scan, sign, undo and show records.

What users need is exported here: the stores, what is done with journals, and the rules about secrets. An engine and the test kit open
runs with ``runs`` and ``journaled_run``.

Must not be here: anything that the driver would have to know. The layers below do not know that there are journals.

Start with ``records``, then ``recorder``, ``record_player`` and ``replayer``; ``encoding`` and ``store`` for the bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepengine.data.late import make_lazy_exports

if TYPE_CHECKING:
    from stepengine.journal.event_stream import follow_events
    from stepengine.journal.file_undo import UndoResult, undo
    from stepengine.journal.files import FileJournal
    from stepengine.journal.follower import AddedRecords, Follower, JournalPosition, NewRecords
    from stepengine.journal.history import History
    from stepengine.journal.journal_repair import (
        EditedLine,
        JournalReport,
        SealedJournal,
        check,
        repair,
        scrub,
        seal_journal,
    )
    from stepengine.journal.line_journal import LineJournal
    from stepengine.journal.mailbox import Mailbox, MailboxMessage
    from stepengine.journal.messages import send_answers, send_cancel, send_input, send_message, send_tool_result
    from stepengine.journal.origins import CallOrigins, call_origins, value_sources
    from stepengine.journal.questions import InDoubt
    from stepengine.journal.recorded_decisions import JudgedCall, RecordedDecision, check_recorded_calls, decisions
    from stepengine.journal.recorded_forks import ExternalCall, ForkReport, SharedBudget
    from stepengine.journal.recorded_runs import RecordedRun, list_runs
    from stepengine.journal.records import Blob, Head, Input, Intent, Record, Result
    from stepengine.journal.run_diff import Difference, diff
    from stepengine.journal.runs import OnDivergence
    from stepengine.journal.secret_scan import SecretFinding, scan
    from stepengine.journal.show import machine_data
    from stepengine.journal.signing import SigningKey
    from stepengine.journal.sources import JournalLike, as_journal
    from stepengine.journal.sqlite import SqliteJournal
    from stepengine.journal.store import Journal, MemoryJournal, WakePlace, Writer
    from stepengine.journal.verification import VerificationResult, verify
    from stepengine.redaction import Redact, RedactField, RedactHeader, Redactor, RedactPattern, RedactValue
else:
    __getattr__, __dir__ = make_lazy_exports(
        __name__,
        {
            "stepengine.journal.run_diff": (
                "Difference",
                "diff",
            ),
            "stepengine.journal.recorded_decisions": (
                "RecordedDecision",
                "JudgedCall",
                "decisions",
                "check_recorded_calls",
            ),
            "stepengine.journal.files": ("FileJournal",),
            "stepengine.journal.origins": (
                "CallOrigins",
                "call_origins",
                "value_sources",
            ),
            "stepengine.journal.sources": (
                "JournalLike",
                "as_journal",
            ),
            "stepengine.journal.follower": (
                "Follower",
                "NewRecords",
                "AddedRecords",
                "JournalPosition",
            ),
            "stepengine.journal.history": ("History",),
            "stepengine.journal.line_journal": ("LineJournal",),
            "stepengine.journal.mailbox": ("MailboxMessage", "Mailbox"),
            "stepengine.journal.journal_repair": (
                "EditedLine",
                "JournalReport",
                "SealedJournal",
                "check",
                "repair",
                "scrub",
                "seal_journal",
            ),
            "stepengine.journal.messages": (
                "send_answers",
                "send_cancel",
                "send_input",
                "send_message",
                "send_tool_result",
            ),
            "stepengine.journal.questions": ("InDoubt",),
            "stepengine.journal.records": ("Blob", "Head", "Input", "Intent", "Record", "Result"),
            "stepengine.journal.recorded_runs": ("RecordedRun", "list_runs"),
            "stepengine.journal.recorded_forks": (
                "ExternalCall",
                "SharedBudget",
                "ForkReport",
            ),
            "stepengine.journal.runs": ("OnDivergence",),
            "stepengine.journal.secret_scan": (
                "SecretFinding",
                "scan",
            ),
            "stepengine.journal.show": ("machine_data",),
            "stepengine.journal.signing": ("SigningKey",),
            "stepengine.journal.sqlite": ("SqliteJournal",),
            "stepengine.journal.store": (
                "Journal",
                "MemoryJournal",
                "WakePlace",
                "Writer",
            ),
            "stepengine.journal.file_undo": (
                "UndoResult",
                "undo",
            ),
            "stepengine.journal.verification": (
                "VerificationResult",
                "verify",
            ),
            "stepengine.journal.event_stream": ("follow_events",),
            "stepengine.redaction": (
                "Redact",
                "RedactField",
                "RedactHeader",
                "Redactor",
                "RedactPattern",
                "RedactValue",
            ),
        },
    )

__all__ = (
    "AddedRecords",
    "Blob",
    "CallOrigins",
    "Difference",
    "EditedLine",
    "ExternalCall",
    "FileJournal",
    "Follower",
    "ForkReport",
    "Head",
    "History",
    "InDoubt",
    "Input",
    "Intent",
    "Journal",
    "JournalLike",
    "JournalPosition",
    "JournalReport",
    "JudgedCall",
    "LineJournal",
    "Mailbox",
    "MailboxMessage",
    "MemoryJournal",
    "NewRecords",
    "OnDivergence",
    "Record",
    "RecordedDecision",
    "RecordedRun",
    "Redact",
    "RedactField",
    "RedactHeader",
    "RedactPattern",
    "RedactValue",
    "Redactor",
    "Result",
    "SealedJournal",
    "SecretFinding",
    "SharedBudget",
    "SigningKey",
    "SqliteJournal",
    "UndoResult",
    "VerificationResult",
    "WakePlace",
    "Writer",
    "as_journal",
    "call_origins",
    "check",
    "check_recorded_calls",
    "decisions",
    "diff",
    "follow_events",
    "list_runs",
    "machine_data",
    "repair",
    "scan",
    "scrub",
    "seal_journal",
    "send_answers",
    "send_cancel",
    "send_input",
    "send_message",
    "send_tool_result",
    "undo",
    "value_sources",
    "verify",
)
