"""
``ReadingLimit``: how much is made from a journal when texts and messages that it names are put in their places.

A line may name one long text a thousand times, and a request the messages of earlier ones that name earlier ones. So a
file of a few kilobytes can stand for gigabytes. What is in the file has no bound but its size; what is made of it has.
Must not be here: how texts are named (``encoding``) and how requests share messages (``recorded_requests``).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any

from stepengine.errors import DataError

MAX_MADE_BYTES = 64 * 1024 * 1024
"""From a journal of any size. A reader holds what it makes several times: as values, without secrets, and as the text it prints."""
MAX_MADE_TIMES = 32
"""From a journal of any size: a run names a long text in a result and a few requests, and a run of ours never came to 4."""
VALUE_BYTES = 64
"""What a value takes at least, however short it is."""
SHARED_BYTES = 16
"""What a message takes in one more list of messages."""


class ReadingLimit:
    """
    Counts the bytes that one operation decodes from a journal.

    Args:
        stored: Returns the size of the journal; called only if the limit depends on the size.
    """

    def __init__(self, stored: Callable[[], int]) -> None:
        self._stored = stored
        self._made = 0
        self._most = MAX_MADE_BYTES
        self._problem = ""
        self._counted: set[Hashable] = set()

    def copy_with_zero_count(self) -> ReadingLimit:
        """Return a limit for the same journal with a count of zero."""
        return ReadingLimit(self._stored)

    def count_bytes_or_raise(self, size: int) -> None:
        """
        Count *size* more bytes; raise ``DataError`` if the total exceeds the limit.

        Raises:
            DataError: when the total exceeds the limit.
        """
        self._made += size
        if self._made <= self._most:
            return
        if not self._problem:
            stored = self._stored()
            self._most = MAX_MADE_BYTES + MAX_MADE_TIMES * stored
            if self._made <= self._most:
                return
            self._problem = (
                f"up to this record, references to earlier texts and messages expand to more than {self._most:,} bytes "
                f"in a journal of {stored:,} bytes"
            )
        raise DataError(self._problem)

    def make_counted_texts(self, record: Hashable, texts: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return *texts* as a mapping that counts each text read for *record*; without counting if the record was counted before."""
        return texts if record in self._counted else _CountedTexts(self, record, texts)

    def mark_counted(self, record: Hashable) -> None:
        """Record that the texts of *record* were counted, so that they are not counted again."""
        self._counted.add(record)


class _CountedTexts(Mapping[str, Any]):
    """The stored texts of a journal; each access counts the text."""

    def __init__(self, limit: ReadingLimit, record: Hashable, texts: Mapping[str, Any]) -> None:
        self._limit = limit
        self._record = record
        self._texts = texts
        self._sizes: dict[str, int] = {}

    def __getitem__(self, name: str) -> Any:
        text = self._texts[name]
        if name not in self._sizes:
            self._sizes[name] = estimate_json_size(text)
            self._limit.mark_counted(self._record)
        self._limit.count_bytes_or_raise(self._sizes[name])
        return text

    def __iter__(self) -> Iterator[str]:
        return iter(self._texts)

    def __len__(self) -> int:
        return len(self._texts)


def estimate_json_size(value: object) -> int:
    """Return the approximate size of a JSON value in bytes."""
    size, waiting = 0, [value]
    while waiting:
        one = waiting.pop()
        size += VALUE_BYTES
        if isinstance(one, str):
            size += len(one)
        elif isinstance(one, Mapping):
            size += sum(map(len, one))
            waiting += one.values()
        elif isinstance(one, list | tuple):
            waiting += one
        elif isinstance(one, int):
            size += one.bit_length() // 8
    return size
