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
        if self._after_cr or b"\r" in chunk:
            chunk = self._mend(chunk)
        events: list[tuple[str, bytes]] = []
        # Nothing is called for most lines: each token of a stream has two or three.
        for line in self._lines(chunk):
            if not line:
                if self._data:
                    events.append((self._name, b"\n".join(self._data)))
                    self._data = []
                self._name = ""
                self._raw = []
            elif line.startswith(b"data: "):
                self._raw.append(line)
                self._data.append(line[6:])
            elif line.startswith(b"event: "):
                self._raw.append(line)
                self._name = line[7:].decode("utf-8", "replace")
            elif not line.startswith(b":"):
                self._take(line)
        return events

    def _lines(self, chunk: bytes) -> list[bytes]:
        """Return the lines that *chunk* ends, without their ends."""
        if b"\n" not in chunk:  # searched alone: a line in a thousand pieces is not looked through a thousand times
            self._line += chunk
            return []
        *lines, rest = chunk.split(b"\n")
        if self._line:
            lines[0] = bytes(self._line) + lines[0]
        self._line = bytearray(rest)
        if self._first:
            lines[0] = lines[0].removeprefix(BOM)
            self._first = False
        return lines

    def _mend(self, chunk: bytes) -> bytes:
        """Return *chunk* with LF for every other line end, also for one that is cut in two."""
        if self._after_cr and chunk.startswith(b"\n"):
            chunk = chunk[1:]
            self._after_cr = False
        if b"\r" in chunk:
            self._after_cr = chunk.endswith(b"\r")
            return chunk.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        if chunk:
            self._after_cr = False
        return chunk

    def _take(self, line: bytes) -> None:
        self._raw.append(line)
        field, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if field == b"data":
            self._data.append(value)
        elif field == b"event":
            self._name = value.decode("utf-8", "replace")
        elif field == b"id":
            self.id = value.decode("utf-8", "replace")
