"""``check`` tells what a journal is worth; ``scrub`` makes a copy of it that can be shown to others (replay K8, K13)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import attrs

from stepengine.data.effects import CallModel
from stepengine.errors import JournalError, StepEngineError
from stepengine.journal.finding import JournalLike, as_journal
from stepengine.journal.fingerprints import Fingerprints, fingerprint
from stepengine.journal.history import History
from stepengine.journal.reading import Reading, read_lines, strict_members
from stepengine.journal.records import Blob, Head, Input, Intent, Record, Result, shown_address
from stepengine.journal.shapes import UNREADABLE
from stepengine.journal.store import MemoryJournal
from stepengine.redaction import Redactor

__all__ = ("Report", "check", "scrub")


@attrs.frozen
class Report:
    """
    What is known of a journal without running anything; true when nothing is wrong with it.

    Attributes:
        name: The journal.
        records: How many records it holds.
        is_complete: Whether the run has ended.
        torn: Bytes at the end that belong to no whole record; resuming cuts them off.
        problems: What is wrong, one sentence each.
        secrets: Texts that look like keys: ``"record 5 /effect/input/text: provider-key"``.
    """

    name: str
    records: int = 0
    is_complete: bool = False
    torn: int = 0
    problems: tuple[str, ...] = ()
    secrets: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return not self.problems


def check(journal: JournalLike) -> Report:
    """
    Look at every record of a journal: checksums, order, fingerprints, blobs, outcomes, and what looks like a secret.

    Nothing is changed and nothing raised: what is wrong stands in the report.
    """
    source = as_journal(journal)
    try:
        content = source.content()
        reading = read_lines(content, source.name)
        history = History(reading.records, source.name)
    except StepEngineError as error:
        return Report(source.name, problems=(error.message,))
    problems = [*_line_problems(content, reading, source.name), *_record_problems(history)]
    if not reading.records:
        problems.append(f"{source.name} holds no record")
    return Report(
        source.name,
        len(reading.records),
        history.is_complete,
        reading.torn,
        tuple(problems),
        tuple(_secrets(reading.records)),
    )


def _line_problems(content: bytes, reading: Reading, name: str) -> Iterator[str]:
    for number, line in enumerate(content[: reading.end].split(b"\n"), 1):
        try:
            if line:
                strict_members(line, f"record {number} of {name}")
        except StepEngineError as error:
            yield error.message


def _record_problems(history: History) -> Iterator[str]:
    prints = Fingerprints(Redactor({}, shapes=False))
    for record in history.records:
        if type(record) is Blob and record.fp != fingerprint(record.data):
            yield f"the blob {record.fp} is not what its fingerprint says"
        elif type(record) is Intent or type(record) is Result:
            yield from _effect_problems(history, record, prints)


def _effect_problems(history: History, record: Intent | Result, prints: Fingerprints) -> Iterator[str]:
    where = shown_address(record.path, record.seq)
    try:
        if type(record) is Result:
            history.outcome(record)
            return
        form = history.form(record)  # type: ignore[arg-type]
        if form["type"] != "CallModel" and record.fp != prints.of(form):  # type: ignore[union-attr]
            yield f"the fingerprint of the intent {where} is not that of its effect"
    except (StepEngineError, *UNREADABLE) as error:
        yield f"the {record.kind} of {where} cannot be read: {error}"


def _secrets(records: list[Record]) -> Iterator[str]:
    redactor = Redactor({}, shapes=True)
    for number, record in enumerate(records, 1):
        # One that cannot be read stands among the problems.
        with contextlib.suppress(JournalError, RecursionError):
            for place, rule in redactor.findings(record.line):
                yield f"record {number} {place}: {rule}"


def scrub(journal: JournalLike) -> MemoryJournal:
    """
    Return a copy without anything that looks like a secret; its fingerprints are made anew, so it replays (SC08).

    Raises:
        JournalError: when the journal cannot be read.
    """
    source = as_journal(journal)
    history = source.history()
    if history.head is None:
        msg = f"{source.name} holds no run, so there is nothing to copy"
        raise JournalError(msg)
    copy = MemoryJournal(redact="all", link=history.head.link)
    copy.replace([_anew(history, record) for record in history.records if type(record) is not Blob])
    return MemoryJournal(copy.lines(), redact="all", link=copy.link)


def _anew(history: History, record: Record) -> Record:
    """Return a record as this process would make it."""
    match record:
        case Intent():
            form: Any = history.form(record)
            if form["type"] == "CallModel":
                form = CallModel(record.seq, history.request(record), form["purpose"])
            return attrs.evolve(record, effect=form, fp="", line=None)
        case Result():
            return attrs.evolve(record, outcome=history.outcome(record), attempts=record.attempts, line=None)
        case Head() | Input() | Blob():
            return attrs.evolve(record, line=None)
