"""
Checking and repairing journals: ``check``, ``scrub``, ``seal_journal``, ``repair``.

Mending is an explicit act: nothing here happens by itself.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from attrs import frozen

from stepengine.data.visible import cut_after
from stepengine.errors import JournalCorrupt, JournalError, StepEngineError
from stepengine.journal.fingerprints import Fingerprints, fingerprint
from stepengine.journal.history import History
from stepengine.journal.line_reader import Reading, parse_members, parse_members_strictly, read_lines
from stepengine.journal.provenance import determine_ownership, replace_records_by_derived
from stepengine.journal.recorded_requests import RecordedRequests
from stepengine.journal.records import (
    TAIL_BYTES,
    TAIL_FORM,
    UNREADABLE,
    Blob,
    Head,
    Intent,
    Record,
    Result,
    format_address,
    parse_record,
    to_compact_json,
)
from stepengine.journal.redacted_records import redact_records
from stepengine.journal.sources import JournalLike, as_journal
from stepengine.journal.store import Journal, MemoryJournal
from stepengine.redaction import RedactionRules, Redactor


@frozen
class JournalReport:
    """
    The result of checking a journal without running it; true if it has no problems.

    Attributes:
        name: The name of the journal.
        records: The number of records.
        is_complete: Whether the run has ended.
        torn: The number of bytes after the last complete record; resuming cuts them off.
        problems: The problems, one sentence each.
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


def check(journal: JournalLike, *, allow_secrets: Iterable[str] = ()) -> JournalReport:
    """
    Check every record of a journal: checksums, order, fingerprints, blobs, outcomes, and likely secrets.

    Nothing is changed, and no error is raised for damage: the report lists all problems.

    Args:
        journal: The journal.
        allow_secrets: Hashes (``SecretFinding.digest``) of values that look like secrets but are not.
    """
    source = as_journal(journal)
    try:
        content = source.content()
        reading = read_lines(content, source.name)
        history = History(reading.records, source.name)
    except StepEngineError as error:
        return JournalReport(source.name, problems=(error.message,))
    problems = [*_find_line_problems(content, reading, source.name), *_find_record_problems(history)]
    if not reading.records:
        problems.append(f"{source.name} contains no records")
    return JournalReport(
        source.name,
        len(reading.records),
        history.is_complete,
        reading.torn,
        tuple(problems),
        tuple(_find_secrets(reading.records, allow_secrets)),
    )


def _find_line_problems(content: bytes, reading: Reading, name: str) -> Iterator[str]:
    """Yield the problem of each line that is not a valid JSON object."""
    for number, line in enumerate(content[: reading.end].split(b"\n"), 1):
        try:
            if line:
                parse_members_strictly(line, f"record {number} of {name}")
        except StepEngineError as error:
            yield error.message


def _find_record_problems(history: History) -> Iterator[str]:
    """Yield each blob or effect that does not match its fingerprint, and each effect or outcome that cannot be read."""
    prints = Fingerprints(Redactor({}, shapes=False))
    for record in history.records:
        if isinstance(record, Blob) and record.fp != fingerprint(record.data):
            yield f"the blob {record.fp} does not match its fingerprint"
        elif isinstance(record, (Intent, Result)):
            yield from _find_effect_problems(history, record, prints)


def _find_effect_problems(history: History, record: Intent | Result, prints: Fingerprints) -> Iterator[str]:
    where = format_address(record.path, record.seq)
    try:
        if isinstance(record, Result):
            history.outcome(record)
            return
        form = history.form(record)
        if form["type"] != "model_call" and record.fp != prints.for_effect(form):
            yield f"the fingerprint of the intent {where} does not match its effect"
    except (StepEngineError, *UNREADABLE) as error:
        yield f"the {record.kind} of {where} cannot be read: {error}"


def _find_secrets(records: list[Record], allowed: Iterable[str]) -> Iterator[str]:
    """Yield a sentence for each likely secret in records; texts in *allowed* are no secrets."""
    redactor = Redactor({}, shapes=True, rules=RedactionRules(allowed=allowed))
    for number, record in enumerate(records, 1):
        # One that cannot be read stands among the problems.
        with contextlib.suppress(JournalError, RecursionError):
            for place, rule in redactor.find_secret_pointers(record.line):
                yield f"record {number} {place}: {rule}"


def scrub(journal: JournalLike) -> MemoryJournal:
    """
    Return a copy without texts that look like secrets; fingerprints are recomputed so that the copy can be replayed.

    Raises:
        JournalError: when the journal cannot be read.
    """
    source = as_journal(journal)
    history = source.history()
    if history.head is None:
        raise source.make_missing_error()
    copy = MemoryJournal(redact="all", link=history.head.link)
    copy.replace(redact_records(history, copy.redactor))
    made = MemoryJournal(copy.lines(), redact="all", link=copy.link)
    made.is_own = determine_ownership(source)
    return made


SHOWN_CHARS = 160
"""Two lines of a terminal for each record that changes: enough to recognize it."""


@frozen
class EditedLine:
    """
    A line that was changed after stepengine wrote it.

    Attributes:
        number: The number of the line, from 1.
        what: The kind and address of the record, such as ``"result of #2"``.
        now: The present content, shortened.
    """

    number: int
    what: str
    now: str


@frozen
class SealedJournal:
    """
    A journal whose edited lines were made valid.

    Attributes:
        journal: The valid journal, in memory.
        edits: The edited lines, and lines that follow a removed line.
    """

    journal: MemoryJournal
    edits: tuple[EditedLine, ...]


def seal_journal(journal: JournalLike) -> SealedJournal:
    """
    Return a valid copy of a manually edited journal, with checksums and fingerprints recomputed.

    The journal itself is not changed; ``seal_journal(journal).journal.copy_to(journal)`` does that.

    Raises:
        JournalCorrupt: when a line is not a record, or the records contradict each other.
        JournalVersion: when a newer version wrote the journal.
    """
    source = as_journal(journal)
    lines = [line for line in source.content().split(b"\n") if line.strip()]
    parsed = [(_parse_edited_line(n, line, source.name), line) for n, line in enumerate(lines, 1)]
    records = [
        parse_record({k: v for k, v in m.items() if k != "crc"}, f"record {n}") for n, (m, _) in enumerate(parsed, 1)
    ]
    numbers = set(_find_edited_lines(records, [line for _, line in parsed]))
    records = _update_blob_names(records, numbers)
    records = list(_recompute_fingerprints(records, numbers, source))
    copy = MemoryJournal(redact="off", link=source.link)
    copy.replace(records)
    edits = [EditedLine(n, _describe_record(records[n - 1]), _format_members(records[n - 1])) for n in sorted(numbers)]
    made = MemoryJournal(copy.lines(), redact="off", link=source.link)
    made.is_own = determine_ownership(source)
    return SealedJournal(made, tuple(edits))


def repair(journal: JournalLike, until: int, into: JournalLike) -> Journal:
    """
    Copy the first records of a damaged journal into another one, which can be resumed.

    Args:
        journal: The journal; it is only read.
        until: The number of the last record to keep, from 1.
        into: An empty journal.

    Raises:
        JournalError: when the journal has fewer complete records, or *into* is not empty.
    """
    source, target = as_journal(journal), as_journal(into)
    if target.records():
        msg = f"{target.name} holds a run already; name a file that does not exist"
        raise JournalError(msg)
    lines = source.content().split(b"\n")
    reading = read_lines(b"".join([line + b"\n" for line in (lines[:until] if until > 0 else lines)]), source.name)
    whole = len(reading.records)
    if until != whole:
        msg = f"{source.name} has {whole} whole records; until must be a number from 1 to {whole}, not {until}"
        raise JournalError(msg)
    replace_records_by_derived(target, reading.records, source)
    return target


def _parse_edited_line(number: int, line: bytes, name: str) -> Mapping[str, object]:
    """Return the members of a line whose checksum may be wrong; raise ``JournalCorrupt`` if it is no JSON object."""
    where = f"record {number} of {name}"
    try:
        line.decode()
    except UnicodeDecodeError as error:
        msg = f"{where} is not UTF-8: {error}; seal only edited lines; for damage use `stepengine journal repair`"
        raise JournalCorrupt(msg) from error
    return parse_members(line, where)


def _find_edited_lines(records: list[Record], lines: list[bytes]) -> Iterator[int]:
    """Yield the numbers of the lines with a missing or wrong checksum, which were edited or follow a removed line."""
    head = records[0] if records else None
    link = isinstance(head, Head) and head.link
    before = 0
    for number, line in enumerate(lines, 1):
        found = TAIL_FORM.search(line[-TAIL_BYTES:])
        if found is None or zlib.crc32(line[:-TAIL_BYTES], before) != int(found[1], 16):
            yield number
        before = int(found[1], 16) if found is not None and link else 0


def _update_blob_names(records: list[Record], numbers: set[int]) -> list[Record]:
    """Return the records with edited blobs under their new names."""
    names: dict[str, str] = {}
    for number in numbers:
        record = records[number - 1]
        if isinstance(record, Blob):
            names[record.fp] = fingerprint(record.data)
    return [_rebuild_record(r, _replace_blob_names(r.line, names)) for r in records] if names else records


def _replace_blob_names(value: object, names: Mapping[str, str]) -> object:
    """Return a JSON value with each text that is a key of *names* replaced."""
    if isinstance(value, dict):
        return {k: _replace_blob_names(v, names) for k, v in value.items()}
    if isinstance(value, list):
        return [_replace_blob_names(v, names) for v in value]
    return names.get(value, value) if isinstance(value, str) else value


def _recompute_fingerprints(records: list[Record], numbers: set[int], source: Journal) -> Iterator[Record]:
    """Yield the records with the fingerprints of edited effects and of dependent requests recomputed."""
    history, prints = History(records, source.name), Fingerprints(source.redactor)
    requests = RecordedRequests(history)
    touched: set[str] = set()
    blobs = any(isinstance(records[number - 1], Blob) for number in numbers)
    for number, record in enumerate(records, 1):
        if not isinstance(record, Intent):
            yield record
            continue
        if number in numbers:
            touched.add(record.path)
        is_request = record.type == "model_call"
        stale = blobs or any(f"{record.path}.".startswith(f"{path}." if path else "") for path in touched)
        if number in numbers or (is_request and stale):
            fp = (
                prints.for_request(requests.get_request(record))
                if is_request
                else prints.for_effect(history.form(record))
            )
            yield _rebuild_record(record, {**(record.line or {}), "fp": fp})
        else:
            yield record


def _rebuild_record(record: Record, members: Any) -> Record:
    return parse_record(members, f"the {record.kind} record")


def _describe_record(record: Record) -> str:
    if isinstance(record, Intent | Result):
        return f"{record.kind} of {format_address(record.path, record.seq)}"
    return record.kind


def _format_members(record: Record) -> str:
    """Return the content of a record as one shortened line of JSON, without its address and checks."""
    hidden = ("kind", "path", "seq", "at", "fp", "crc")
    text = to_compact_json({k: v for k, v in (record.line or {}).items() if k not in hidden})
    return cut_after(text, SHOWN_CHARS)
