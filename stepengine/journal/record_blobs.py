"""``RecordBlobs``: the long texts that other records of a journal name, and the limit for filling them in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from stepengine.journal.reading_limit import ReadingLimit
from stepengine.journal.records import Input, Intent, Record, Result, to_compact_json


class RecordBlobs:
    """
    The blobs of one journal.

    Args:
        records: All records of the journal; they may grow.

    Attributes:
        values: Blob values by fingerprint.
        limit: Counts the bytes that are filled in.
    """

    def __init__(self, records: Sequence[Record]) -> None:
        self.values: dict[str, Any] = {}
        self.limit = ReadingLimit(self._measure_stored_bytes)
        self._records = records

    def get_counted_texts(self, part: str, record: Intent | Result | Input) -> Mapping[str, Any]:
        """Return the blobs for filling in a part of a record; they count once for each part of each record."""
        # Several inputs may have one address. The records live as long as this object does, so no two have one id.
        key = id(record) if isinstance(record, Input) else record.address
        return self.limit.make_counted_texts((part, key), self.values) if self.values else self.values

    def _measure_stored_bytes(self) -> int:
        """Return the size of the records in bytes, of which long texts are most."""
        # Of those that were read lazily, the positions are known; of the others, their members.
        lines = [getattr(record, "end", 0) - getattr(record, "start", 0) for record in self._records]
        others = [record.line for record, size in zip(self._records, lines, strict=True) if not size]
        return sum(lines) + sum([len(to_compact_json(line)) for line in others if line is not None])
