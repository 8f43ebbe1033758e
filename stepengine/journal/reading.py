"""
Bytes to records: lines, checksums, the torn tail (replay J1, J9, J30, J34, reliability JR01-JR06, JR18).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from stepengine.errors import JournalCorrupt
from stepengine.journal.records import Head, Record, checked, record_of, to_text

__all__ = ("Reading", "read_lines", "strict_members")


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
    Return the records that *data*, a whole journal, holds.

    Raises:
        JournalCorrupt: for a damaged record that is not the last one; it names record and offset.
        JournalVersion: when a newer version wrote it.
    """
    records: list[Record] = []
    offset, previous, link = 0, 0, False
    while offset < len(data):
        end = data.find(b"\n", offset)
        line = data[offset:] if end < 0 else data[offset:end]
        where = f"record {len(records) + 1} (byte {offset}) of {name}"
        crc = checked(line, previous)
        if crc is None:
            if end < 0 or end + 1 == len(data):
                return Reading(records, offset, len(data) - offset, crc=previous)
            raise _damaged(where, line, previous, link=link)
        record = record_of(_members(line, where), where)
        if type(record) is Head:
            link = record.link
        previous = crc if link else 0
        records.append(record)
        if end < 0:
            return Reading(records, len(data), 0, open_end=True, crc=previous)
        offset = end + 1
    return Reading(records, offset, crc=previous)


def _damaged(where: str, line: bytes, previous: int, *, link: bool) -> JournalCorrupt:
    moved = link and previous and checked(line, 0) is not None
    why = "its checksum does not follow from the record before it" if moved else "its checksum is wrong"
    msg = (
        f"{where} is damaged: {why}. Nothing was run. The records before it are whole: "
        "a copy of the lines before it is a journal that can be resumed"
    )
    return JournalCorrupt(msg)


def _members(line: bytes, where: str) -> Mapping[str, Any]:
    try:
        members = json.loads(line)
    except (ValueError, RecursionError) as error:
        msg = f"{where} is not JSON: {error}"
        raise JournalCorrupt(msg) from error
    if not isinstance(members, dict):
        msg = f"{where} is no JSON object"
        raise JournalCorrupt(msg)
    return members


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

    members: dict[str, Any] = json.loads(line, object_pairs_hook=once)
    if to_text(members).encode() != line:
        msg = f"{where} is not written as stepengine writes"
        raise JournalCorrupt(msg)
    return members
