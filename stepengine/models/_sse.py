"""
Server-sent events from bytes, however they are cut and whatever line ends they use.

The SDKs' own decoders are not used: they hide the bytes of an event that was begun and not finished, which decide
whether a reply that ends early may count.
"""

from __future__ import annotations

BOM = b"\xef\xbb\xbf"
CR_BYTE = 13
"""A carriage return in ASCII."""
END = b"\n\n"


class SSEParser:
    """
    Takes pieces of a body and gives whole events as ``(name, data)``; *name* is ``""`` when the event has none.

    Attributes:
        id: The id of the last event that had one.
    """

    def __init__(self) -> None:
        self.id = ""
        self._held = bytearray()
        self._after_cr = False
        self._first = True

    @property
    def tail(self) -> bytes:
        """The bytes of an event that began and has not ended, line ends as LF; empty between events."""
        held = bytes(self._held)
        *lines, rest = (held.removeprefix(BOM) if self._first else held).split(b"\n")
        return b"".join([line + b"\n" for line in lines if line and not line.startswith(b":")]) + rest

    def feed(self, chunk: bytes) -> list[tuple[str, bytes]]:
        """Return the events that *chunk* completes."""
        # Bytes are looked for by number: by a text of one it takes four times as long.
        if self._after_cr or CR_BYTE in chunk:
            chunk = self._normalize_line_ends(chunk)
        if self._first or self._held or not chunk.endswith(END):
            chunk = self._split_complete(chunk)
        events: list[tuple[str, bytes]] = []
        name, pieces = "", []
        # Nothing is called for most lines: each token of a stream has two or three.
        for line in chunk.split(b"\n"):
            if line.startswith(b"data: "):
                pieces.append(line[6:])
            elif not line:
                if pieces:
                    events.append((name, b"\n".join(pieces)))
                    pieces = []
                name = ""
            elif line.startswith(b"event: "):
                name = line[7:].decode("utf-8", "replace")
            else:
                name = self._parse_rare_line(line, name, pieces)
        return events

    def _split_complete(self, chunk: bytes) -> bytes:
        """Return the events that *chunk* completes, the one that was held included, and hold what has begun in it."""
        held = self._held
        # Searched alone: an event in a thousand pieces is not looked through a thousand times.
        if END not in chunk and not (held.endswith(b"\n") and chunk.startswith(b"\n")):
            held += chunk
            return b""
        # A body that comes in one piece is copied nowhere.
        chunk = bytes(held) + chunk if held else chunk
        end = chunk.rfind(END) + len(END)
        self._held = bytearray(chunk[end:])
        if self._first:
            self._first = False
            return chunk[:end].removeprefix(BOM)
        return chunk[:end]

    def _normalize_line_ends(self, chunk: bytes) -> bytes:
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

    def _parse_rare_line(self, line: bytes, name: str, pieces: list[bytes]) -> str:
        """Parse a line of a rarer form, a comment included, and return the name of its event."""
        field, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if field == b"data":
            pieces.append(value)
        elif field == b"event":
            return value.decode("utf-8", "replace")
        elif field == b"id":
            self.id = value.decode("utf-8", "replace")
        return name
