"""
Bytes to records: lines, checksums, the torn tail (replay J1, J9, J30, J34, reliability JR01-JR06, JR18).
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from stepengine.errors import JournalCorrupt, JournalError
from stepengine.journal.lines import FileSource, Line, Source, glimpsed, members_of
from stepengine.journal.places import opened
from stepengine.journal.records import UNREADABLE, Head, Record, checked, file_of, record_of, to_text

__all__ = ("Reading", "read_file", "read_lines", "strict_members")

MAX_HELD = 4 * 1024 * 1024


class Reading(NamedTuple):
    """
    What stands in a journal.

    Attributes:
        records: The records in order.
        end: Where the last whole record ends, in bytes.
        torn: How many bytes after that belong to no whole record.
        open_end: Whether the last whole record lacks its newline.
        crc: The last checksum, which the next line of a linked journal starts from.
    """

    records: list[Record]
    end: int = 0
    torn: int = 0
    open_end: bool = False
    crc: int = 0


def read_lines(data: bytes, name: str) -> Reading:
    """
    Return the records that *data*, a whole journal, holds; most of them are read only when somebody needs them.

    Raises:
        JournalCorrupt: for a damaged record that is not the last one; it names record and offset.
        JournalVersion: when a newer version wrote it.
    """
    return _read(BytesIO(data), Source(data, name))


def read_file(descriptor: int, path: Path, name: str) -> Reading:
    """
    Return the records of an open file as ``read_lines`` does; a long one stays in the file.

    Args:
        descriptor: The open file.
        path: Its path.
        name: The journal's name, for errors.
    """
    os.lseek(descriptor, 0, os.SEEK_SET)
    with open(descriptor, "rb", closefd=False) as file:
        if os.fstat(descriptor).st_size <= MAX_HELD:
            return read_lines(file.read(), name)
        # A descriptor of its own: one that was duplicated would keep the lock of the first.
        again = opened(path)
        source = None if again is None else FileSource(again, name)
        if again is None or source is None or not os.path.sameopenfile(descriptor, again):
            msg = f"{name} was moved, deleted or replaced while it was read; nothing was run"
            raise JournalError(msg)
        return _read(file, source)


def _read(lines: BinaryIO, source: Source) -> Reading:
    records: list[Record] = []
    offset, previous, link = 0, 0, False
    for line in lines:
        end = offset + len(line)
        body = line[:-1] if line.endswith(b"\n") else line
        crc = checked(body, previous)
        if crc is None:
            if next(lines, None) is None:
                return Reading(records, offset, end - offset, crc=previous)
            is_moved = bool(link and previous and checked(body, 0) is not None)
            raise _damaged(records, offset, source, is_moved=is_moved)
        place = Line(source, offset, offset + len(body), len(records) + 1)
        record: Record | None = glimpsed(body, place)
        if record is None:
            where = _where(records, offset, source)
            record = record_of(members_of(body, where), where)
            if type(record) is Head:
                link = record.link
        previous = crc if link else 0
        records.append(record)
        if body is line:
            return Reading(records, end, open_end=True, crc=previous)
        offset = end
    return Reading(records, offset, crc=previous)


def _where(records: Sequence[Record], offset: int, source: Source) -> str:
    return f"record {len(records) + 1} (byte {offset}) of {source.name}"


def _damaged(records: Sequence[Record], offset: int, source: Source, *, is_moved: bool) -> JournalCorrupt:
    why = "its checksum does not follow from the record before it" if is_moved else "its checksum is wrong"
    file = file_of(source.name)
    msg = (
        f"{_where(records, offset, source)} is damaged: {why}. Nothing was run. If it was edited by hand: `stepengine seal {file}` shows what was "
        "edited and makes it valid. "
    )
    if records:
        msg += (
            f"The records before it are whole: `stepengine repair {file} --until {len(records)}` keeps them in a new file, "
            "which can be resumed"
        )
    else:
        msg += "It is the first one: perhaps this is no journal"
    return JournalCorrupt(msg)


def strict_members(line: bytes, where: str) -> Mapping[str, Any]:
    """
    Return a line's members, read with suspicion: no name twice, nothing that we would have written differently.

    Raises:
        JournalCorrupt: naming *where*.
    """

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        members = dict(pairs)
        if len(members) != len(pairs):
            msg = f"{where} has a member twice"
            raise JournalCorrupt(msg)
        return members

    try:
        members: dict[str, Any] = json.loads(line, object_pairs_hook=once)
        is_ours = to_text(members).encode() == line
    except UNREADABLE as error:
        msg = f"{where} cannot be read: {type(error).__name__}: {error}"
        raise JournalCorrupt(msg) from error
    if not is_ours:
        msg = f"{where} is not written as stepengine writes"
        raise JournalCorrupt(msg)
    return members
