"""
Parse server-sent events from pieces of bytes of any size, with any line ends.

The SDKs' own decoders are not used, because they hide the bytes of an incomplete event. These decide whether a reply that
ends early counts.
"""

from __future__ import annotations

BOM = b"\xef\xbb\xbf"
CR_BYTE = 13
"""A carriage return in ASCII."""
END = b"\n\n"


class SSEParser:
    """
    Parses pieces of a body into complete events ``(name, data)``; *name* is ``""`` if the event has none.

    Attributes:
        id: The id of the last event with an id.
    """

    def __init__(self) -> None:
        self.id = ""
        self._held = bytearray()
        self._after_cr = False
        self._first = True

    @property
    def tail(self) -> bytes:
        """The bytes of an incomplete event, with LF as line ends; empty between events."""
        held = bytes(self._held)
        *lines, rest = (held.removeprefix(BOM) if self._first else held).split(b"\n")
        return b"".join([line + b"\n" for line in lines if line and not line.startswith(b":")]) + rest

    def feed(self, chunk: bytes) -> list[tuple[str, bytes]]:
        """Return the events that *chunk* completes."""
        # The search for a byte by number is four times as fast.
        if self._after_cr or CR_BYTE in chunk:
            chunk = self._normalize_line_ends(chunk)
        if self._first or self._held or not chunk.endswith(END):
            chunk = self._split_complete_events(chunk)
        events: list[tuple[str, bytes]] = []
        name, pieces = "", []
        # No function calls for most lines, because each token of a stream has two or three lines.
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

    def _split_complete_events(self, chunk: bytes) -> bytes:
        """Return the bytes of the events that *chunk* completes, and store the rest for the next call."""
        held = self._held
        # Only the new chunk is searched, so an event in many pieces is not searched many times.
        if END not in chunk and not (held.endswith(b"\n") and chunk.startswith(b"\n")):
            held += chunk
            return b""
        # A body in one piece is not copied.
        chunk = bytes(held) + chunk if held else chunk
        end = chunk.rfind(END) + len(END)
        self._held = bytearray(chunk[end:])
        if self._first:
            self._first = False
            return chunk[:end].removeprefix(BOM)
        return chunk[:end]

    def _normalize_line_ends(self, chunk: bytes) -> bytes:
        """Return *chunk* with LF as line ends; store whether it ended in CR, because a CR LF may be split between two chunks."""
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
        """Parse a line in a rare format: append data to *pieces*, store an id, and return the name of the event."""
        field, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if field == b"data":
            pieces.append(value)
        elif field == b"event":
            return value.decode("utf-8", "replace")
        elif field == b"id":
            self.id = value.decode("utf-8", "replace")
        return name
