"""
Bytes to records: lines, checksums, the torn tail.

Opening a journal reads its lines once for their checksums, and of an intent or a result no more than its address and what
else is in front; such a record stays where it stands until somebody needs it. So a replay never parses the effects that it
compares, and a long journal costs its index, not its text.
"""

from __future__ import annotations

import json
import os
import re
import weakref
from collections.abc import Mapping, Sequence
from functools import lru_cache
from io import BytesIO
from math import isfinite
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from stepengine.data.faults import SHOWN_CHARS
from stepengine.data.json import MAX_LINE_DEPTH_LEVELS, is_text_nested_deeper
from stepengine.errors import JournalCorrupt, JournalError
from stepengine.journal.encoding import decode_with_blobs
from stepengine.journal.journal_files import open_for_reading
from stepengine.journal.records import (
    EXTRAS,
    MAX_AT_MS,
    NO_EXTRAS,
    TAIL_BYTES,
    UNREADABLE,
    Head,
    Intent,
    Record,
    Result,
    format_file_argument,
    parse_record,
    to_compact_json,
    verify_checksum,
)

# How we write intents and results: enough of a line to find it again without reading it whole.
INTENT_FORM = re.compile(
    rb'\{"kind":"intent","path":"((?:[0-9]{1,9}(?:\.[0-9]{1,9})*)?)","seq":(-1|[0-9]{1,9}),"fp":"([0-9a-f]{32})","effect":\{"type":"([a-z_]+)"'
    rb'(?:(?:,"purpose":"[a-z_]+","request":\{"model"|,"tool_name"):"([ !#-\[\]-~]*)")?'
)
RESULT_FORM = re.compile(
    rb'\{"kind":"result","path":"((?:[0-9]{1,9}(?:\.[0-9]{1,9})*)?)","seq":(-1|[0-9]{1,9}),"at":([0-9]{1,13}),"'
    + f"({'|'.join(EXTRAS)}|value|error)".encode()
    + rb'":'
)
BESIDE_FORM = re.compile(
    rb'\}(?:,"gather":([0-9]{1,9}))?(?:,"program_line":([1-9][0-9]{0,8}))?(?:,"mac":"[0-9a-f]{32}")?,"crc":"[0-9a-f]{8}"\}\Z'
)
BESIDE_TAIL_BYTES = 100
"""All three members, with numbers of nine digits, have 86."""
AHEAD_BYTES = 256 * 1024
"""Some dozen ordinary records in one call; a larger window is read in vain when a reader jumps."""
PLAIN_RESULT = {"kind", "path", "seq", "at", "value", "crc"}
PLAIN_RESULTS = (PLAIN_RESULT, PLAIN_RESULT | {"mac"})
# We never write it, but a line that was edited and sealed may hold it.
ESCAPED_DOLLAR = rb"\u0024"


def _reject_constant(name: str) -> object:
    msg = f"{name} is not a JSON number"
    raise ValueError(msg)


def _parse_finite(text: str) -> float:
    """Return the number in a text; raise if it is too large for a float."""
    value = float(text)
    if not isfinite(value):
        msg = f"{text[:SHOWN_CHARS]} is too large for a number"
        raise ValueError(msg)
    return value


# Half a pair of surrogates is not text: nobody could write it down again. We never write the escape.
SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_DECODER: Any = json.JSONDecoder(parse_constant=_reject_constant, parse_float=_parse_finite)


class JournalBytes:
    """
    The bytes of a journal in memory, all of them or those from an offset on.

    Args:
        data: The bytes.
        name: The journal's name, for errors.
        start: The offset of the first byte in the journal.
        line_count: The number of lines that end before *start*.
    """

    def __init__(self, data: bytes, name: str, start: int = 0, line_count: int = 0) -> None:
        self._data = data
        self.name = name
        self._start = start
        self._lines = line_count

    def read(self, start: int, end: int) -> bytes:
        """Return the bytes from *start* to *end* of the journal."""
        return self._data[start - self._start : end - self._start]

    def count_lines_before(self, end: int) -> int:
        """Return the number of lines of the journal that end before the byte *end*."""
        return self._lines + self._data.count(b"\n", 0, end - self._start)

    def read_line_members(self, start: int, end: int) -> Mapping[str, Any]:
        """
        Return the members of a line.

        Raises:
            JournalCorrupt: when the line is not a record.
        """
        return self._parse_line(self.read(start, end), start)

    def read_filled_members(self, start: int, end: int, blobs: Mapping[str, object]) -> Mapping[str, Any]:
        """
        Return the members of a line with its blobs filled in.

        Raises:
            JournalCorrupt: when the line is not a record.
            KeyError: when a blob is missing.
        """
        line = self.read(start, end)
        members = self._parse_line(line, start)
        return decode_with_blobs(members, blobs) if b'"$' in line or ESCAPED_DOLLAR in line else members

    def _parse_line(self, line: bytes, start: int) -> Mapping[str, object]:
        """Return the members of the line at byte *start*; raise if they are not a valid record."""
        place = RecordPosition(self, start)
        members = parse_members(line, place)
        if not _is_plain_result(members):
            parse_record(members, place)
        return members


class FileSource(JournalBytes):
    """
    The bytes of a journal in a file, read on demand.

    Args:
        descriptor: The open file; it is closed with this object.
        name: The journal's name, for errors.
    """

    def __init__(self, descriptor: int, name: str) -> None:
        super().__init__(b"", name)
        self._descriptor = descriptor
        self._window = (0, b"")
        weakref.finalize(self, os.close, descriptor)

    def read(self, start: int, end: int) -> bytes:
        """
        Return the bytes from *start* to *end*.

        A repeated run reads records in order, so 256 KiB are read ahead and cached.

        Raises:
            JournalCorrupt: when the file no longer has these bytes.
        """
        begin, window = self._window
        if start < begin or end > begin + len(window):
            begin, window = self._window = start, os.pread(self._descriptor, max(end - start, AHEAD_BYTES), start)
        data = window[start - begin : end - begin]
        if len(data) != end - start:
            msg = f"{self.name} was cut off at byte {start + len(data)} while it was read"
            raise JournalCorrupt(msg)
        return data

    def count_lines_before(self, end: int) -> int:
        """Return the number of lines that end before the byte *end*."""
        pieces = range(0, end, AHEAD_BYTES)
        return sum([os.pread(self._descriptor, min(AHEAD_BYTES, end - at), at).count(b"\n") for at in pieces])


class RecordPosition(NamedTuple):
    """The position of a record in a journal, formatted on demand."""

    source: JournalBytes
    start: int

    def __str__(self) -> str:
        number = self.source.count_lines_before(self.start) + 1
        return f"record {number} (byte {self.start}) of {self.source.name}"


def _is_plain_result(members: Mapping[str, object]) -> bool:
    """Return whether members are those of a plain result, of which only time and value are used."""
    at = members.get("at")
    return members.keys() in PLAIN_RESULTS and members["kind"] == "result" and type(at) is int and 0 <= at < MAX_AT_MS


def parse_members(line: bytes, where: object) -> Mapping[str, object]:
    """
    Return the members of a line; error messages start with ``str(where)``.

    Raises:
        JournalCorrupt: when the line is not a JSON object.
    """
    if is_text_nested_deeper(line, MAX_LINE_DEPTH_LEVELS):
        raise _make_depth_error(where)
    try:
        # What begins like this is UTF-8, and need not be looked at to find that out.
        is_ours = line.startswith(b'{"')
        members = (
            _decode_value(line.decode())
            if is_ours
            else json.loads(line, parse_constant=_reject_constant, parse_float=_parse_finite)
        )
        if line.find(b"\\") >= 0 and SURROGATE.search(line):
            to_compact_json(members).encode()
    except (ValueError, RecursionError) as error:
        msg = f"{where} is not JSON: {error}"
        raise JournalCorrupt(msg) from error
    if not isinstance(members, dict):
        msg = f"{where} is not a JSON object"
        raise JournalCorrupt(msg)
    return members


def _make_depth_error(where: object) -> JournalCorrupt:
    msg = f"{where} is nested deeper than {MAX_LINE_DEPTH_LEVELS} levels, more than any run"
    return JournalCorrupt(msg)


def _decode_value(text: str) -> object:
    """Return the value of JSON text without surrounding spaces; faster than ``decode``."""
    try:
        value, end = _DECODER.scan_once(text, 0)
    except StopIteration:
        value, end = None, -1
    return value if end == len(text) else _DECODER.decode(text)


def parse_record_lazily(line: bytes, source: JournalBytes, start: int) -> Intent | Result | None:
    """
    Return the intent or result in a line in our own format without parsing it all, else ``None``.

    ``None`` means that the line must be parsed completely. The line starts at the byte *start* of *source*.
    """
    found = INTENT_FORM.match(line)
    if found is not None:
        together, of_program = None, 0
        if line[-TAIL_BYTES - 1 : -TAIL_BYTES] != b"}":
            beside = BESIDE_FORM.search(line, max(0, len(line) - BESIDE_TAIL_BYTES - TAIL_BYTES))
            if beside is None:
                return None
            together = None if beside[1] is None else int(beside[1])
            of_program = int(beside[2] or 0)
        path, seq, fp, kind, subject = found.groups()
        named = None if subject is None else _decode_interned(subject)
        intent = Intent(
            _decode_interned(path),
            int(seq),
            None,
            fp.decode(),
            together,
            source,
            _decode_interned(kind),
            named,
            of_program,
        )
        intent.start, intent.end = start, start + len(line)
        return intent
    found = RESULT_FORM.match(line)
    if found is None:
        return None
    path, seq, at, first = found.groups()
    extras = NO_EXTRAS if first in (b"value", b"error") else None
    result = Result(_decode_interned(path), int(seq), int(at), None, extras, source)
    result.start, result.end = start, start + len(line)
    return result


@lru_cache(maxsize=1024)  # the paths and names of one long journal
def _decode_interned(text: bytes) -> str:
    """Return a path or a name as an interned text."""
    return text.decode()


# --- a whole journal --------------------------------------------------------------------------------------------------

MAX_HELD_BYTES = 4 * 1024 * 1024
"""A journal of an ordinary run is read whole, which is fastest. Long texts of a larger one stay in the file."""


class Reading(NamedTuple):
    """
    The records of a journal.

    Attributes:
        records: The records in order.
        end: The offset of the end of the last complete record, in bytes.
        torn: The number of bytes after *end*, which are no complete record.
        open_end: Whether the last complete record lacks its newline.
        crc: The last checksum, from which the next line of a linked journal starts.
    """

    records: list[Record]
    end: int = 0
    torn: int = 0
    open_end: bool = False
    crc: int = 0


def read_lines(data: bytes, name: str) -> Reading:
    """
    Return the records of *data*, a whole journal; most of them are parsed on first use.

    Raises:
        JournalCorrupt: for a damaged record that is not the last one; the error names record and offset.
        JournalVersion: when a newer version wrote the journal.
    """
    return _read_records(BytesIO(data), JournalBytes(data, name))


def read_more_lines(data: bytes, name: str, earlier: Reading, line_count: int, *, link: bool) -> Reading:
    """
    Return the records after those of an earlier reading that ended with a whole line.

    Args:
        data: The journal's bytes from ``before.end`` on.
        name: Its name, for errors.
        earlier: The earlier reading.
        line_count: How many records that, and those before it, had.
        link: Whether lines are chained, as the journal's head says.

    Raises:
        JournalCorrupt: as ``read_lines``.
    """
    source = JournalBytes(data, name, earlier.end, line_count)
    return _read_records(BytesIO(data), source, earlier.end, earlier.crc, link=link)


def parse_head(line: bytes, name: str) -> Head | None:
    """
    Return the first record of a journal, or ``None`` while its line is incomplete.

    Args:
        line: The bytes of the journal up to and including the first newline.
        name: The journal's name, for errors.

    Raises:
        JournalCorrupt: when the line is not a head.
        JournalVersion: when a newer version wrote the journal.
    """
    body = line.removesuffix(b"\n")
    if verify_checksum(body, 0) is None:
        if _is_non_journal_text(line):
            raise _make_no_journal_error(name)
        if not line.endswith(b"\n"):
            return None
        raise _make_damage_error((), 0, JournalBytes(line, name), is_moved=False)
    where = RecordPosition(JournalBytes(line, name), 0)
    record = parse_record(parse_members(body, where), where)
    if not isinstance(record, Head):
        msg = f"{where} is not a head; this file may not be a journal"
        raise JournalCorrupt(msg)
    return record


def read_file(descriptor: int, path: Path, name: str) -> Reading:
    """
    Return the records of an open file as ``read_lines`` does; a long file is read on demand.

    Args:
        descriptor: The open file.
        path: Its path.
        name: The journal's name, for errors.
    """
    os.lseek(descriptor, 0, os.SEEK_SET)
    with open(descriptor, "rb", closefd=False) as file:
        if os.fstat(descriptor).st_size <= MAX_HELD_BYTES:
            return read_lines(file.read(), name)
        # A descriptor of its own: one that was duplicated would keep the lock of the first.
        again = open_for_reading(path)
        source = None if again is None else FileSource(again, name)
        if again is None or source is None or not os.path.sameopenfile(descriptor, again):
            msg = f"{name} was moved, deleted or replaced while it was read; nothing was run"
            raise JournalError(msg)
        return _read_records(file, source)


def _read_records(
    lines: BinaryIO, source: JournalBytes, offset: int = 0, previous: int = 0, *, link: bool = False
) -> Reading:
    """Return the records of *lines*, which start at *offset* of *source* after the checksum *previous*; raise for damage."""
    records: list[Record] = []
    for line in lines:
        end = offset + len(line)
        body = line[:-1] if line.endswith(b"\n") else line
        crc = verify_checksum(body, previous)
        if crc is None:
            _refuse_non_journal_text(line, offset, source)
            if next(lines, None) is None:
                return Reading(records, offset, end - offset, crc=previous)
            is_moved = bool(link and previous and verify_checksum(body, 0) is not None)
            raise _make_damage_error(records, offset, source, is_moved=is_moved)
        if is_text_nested_deeper(body, MAX_LINE_DEPTH_LEVELS):
            raise _make_depth_error(RecordPosition(source, offset))
        record: Record | None = parse_record_lazily(body, source, offset)
        if record is None:
            where = RecordPosition(source, offset)
            record = parse_record(parse_members(body, where), where)
            if isinstance(record, Head):
                link = record.link
        previous = crc if link else 0
        records.append(record)
        if body is line:
            return Reading(records, end, open_end=True, crc=previous)
        offset = end
    return Reading(records, offset, crc=previous)


def _make_damage_error(
    records: Sequence[Record], offset: int, source: JournalBytes, *, is_moved: bool
) -> JournalCorrupt:
    why = "its checksum does not follow from the record before it" if is_moved else "its checksum is wrong"
    file = format_file_argument(source.name)
    msg = (
        f"{RecordPosition(source, offset)} is damaged: {why}. Nothing was run. If you edited it manually: `stepengine journal repair {file} --seal` shows what was "
        "edited and makes it valid. "
    )
    if records:
        msg += (
            f"The records before it are whole: `stepengine journal repair {file} --until {len(records)}` keeps them in a new file, "
            "which can be resumed"
        )
    else:
        msg += "It is the first record: this file may not be a journal"
    return JournalCorrupt(msg)


def _is_non_journal_text(line: bytes) -> bool:
    """Return whether the first line is text that is no part of a record, so the file was never a journal."""
    # A damaged record has the one or the other; a crash may leave zeros or bytes of another file.
    try:
        text = line.decode()
    except UnicodeDecodeError:
        return False
    is_text = text.strip() == "" or text.strip().isprintable()
    return is_text and not (text.startswith('{"') or '{"'.startswith(text) or '"crc":"' in text)


def _refuse_non_journal_text(line: bytes, offset: int, source: JournalBytes) -> None:
    """Raise if a line is the first one of the file and ordinary text."""
    if not offset and _is_non_journal_text(line):
        raise _make_no_journal_error(source.name)


def _make_no_journal_error(name: str) -> JournalCorrupt:
    msg = f"{name} is not a journal: record 1 (byte 0) is text, not a record. Name the journal of a run; `stepengine runs` lists them"
    return JournalCorrupt(msg)


def parse_members_strictly(line: bytes, where: str) -> Mapping[str, object]:
    """
    Return a line's members; only the exact form that we write is accepted, which has no name twice.

    Raises:
        JournalCorrupt: naming *where*.
    """
    try:
        members: dict[str, object] = json.loads(line)
        is_ours = to_compact_json(members).encode() == line
    except UNREADABLE as error:
        msg = f"{where} cannot be read: {type(error).__name__}: {error}"
        raise JournalCorrupt(msg) from error
    if not is_ours:
        msg = f"{where} is not in the exact form that stepengine writes"
        raise JournalCorrupt(msg)
    return members
