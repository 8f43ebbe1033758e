"""
Server-sent events from bytes, however they are cut and whatever line ends they use.

The SDKs' own decoders are not used: they hide the bytes of an event that was begun and not finished, which decide
whether a reply that ends early may count.
"""

from __future__ import annotations

__all__ = ("SSEParser",)

BOM = b"\xef\xbb\xbf"


class SSEParser:
    """
    Takes pieces of a body and gives whole events as ``(name, data)``; *name* is ``""`` when the event has none.

    Attributes:
        id: The id of the last event that had one.
    """

    def __init__(self) -> None:
        self.id = ""
        self._line = bytearray()
        self._searched = 0
        self._after_cr = False
        self._first = True
        self._name = ""
        self._data: list[bytes] = []
        self._raw: list[bytes] = []

    @property
    def tail(self) -> bytes:
        """The bytes of an event that began and has not ended, line ends as LF; empty between events."""
        return b"".join([line + b"\n" for line in self._raw]) + bytes(self._line)

    def feed(self, chunk: bytes) -> list[tuple[str, bytes]]:
        """Return the events that *chunk* completes."""
        if self._after_cr and chunk.startswith(b"\n"):
            chunk = chunk[1:]
            self._after_cr = False
        if b"\r" in chunk:
            self._after_cr = chunk.endswith(b"\r")
            chunk = chunk.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        elif chunk:
            self._after_cr = False
        self._line += chunk
        events: list[tuple[str, bytes]] = []
        start = 0
        end = self._line.find(b"\n", self._searched)
        while end >= 0:
            self._take(bytes(self._line[start:end]), events)
            start = end + 1
            end = self._line.find(b"\n", start)
        if start:
            del self._line[:start]
        self._searched = len(self._line)
        return events

    def _take(self, line: bytes, events: list[tuple[str, bytes]]) -> None:
        if self._first:
            line = line.removeprefix(BOM)
            self._first = False
        if not line:
            if self._data:
                events.append((self._name, b"\n".join(self._data)))
            self._name = ""
            self._data = []
            self._raw = []
            return
        if line.startswith(b":"):
            return
        self._raw.append(line)
        field, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if field == b"data":
            self._data.append(value)
        elif field == b"event":
            self._name = value.decode("utf-8", "replace")
        elif field == b"id":
            self.id = value.decode("utf-8", "replace")
