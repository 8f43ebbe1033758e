"""Text of files: detection of text and its encoding, and ranges of lines."""

from __future__ import annotations

import codecs
import hashlib
import mimetypes

from attrs import frozen

from stepengine.workspace import calls
from stepengine.workspace.calls import Fd

READ_LINE_CHARS = 2_000
"""Lines that people write are shorter; a longer one is data, and could fill the context with one line."""
READ_WHOLE_BYTES = 10_000_000
"""Source files are far smaller; a larger file is read by window, so that memory stays small."""

SNIFFED_BYTES = 8_192
"""Binary files have a null byte in their first block; git looks at 8,000 bytes."""
CHUNK_BYTES = 1024 * 1024
"""Few calls for a large file, with little memory."""
COUNTED_BYTES = 256 * CHUNK_BYTES
"""The lines of a file up to this size are counted, in a quarter of a second; for a longer one the number is omitted."""
BOMS = (
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)
MAGICS = (
    (b"\x89PNG", "image/png"),
    (b"\xff\xd8\xff", "image/jpeg"),
    (b"GIF8", "image/gif"),
    (b"%PDF-", "application/pdf"),
    (b"PK\x03\x04", "application/zip"),
    (b"\x7fELF", "an ELF program"),
    (b"\x1f\x8b", "application/gzip"),
    (b"SQLite format 3\x00", "an SQLite database"),
)


@frozen
class FileText:
    """
    The text of a file and how to write it back byte for byte.

    Attributes:
        text: The text; bytes that are not UTF-8 are lone surrogates in it.
        encoding: Its encoding.
        bom: The byte order mark before it.
    """

    text: str
    encoding: str = "utf-8"
    bom: bytes = b""

    def encode(self, text: str) -> bytes:
        """Encode *text* with the byte order mark and encoding of the file."""
        errors = "surrogateescape" if self.encoding == "utf-8" else "strict"
        return self.bom + text.encode(self.encoding, errors)

    @property
    def displayable_text(self) -> str:
        """The text with replacement characters for bytes that are not UTF-8."""
        return (
            self.text
            if self.text.isascii()
            else self.text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
        )


def decode_text(data: bytes) -> FileText | None:
    """Return the text in the bytes of a file; ``None`` if they are binary."""
    for bom, encoding in BOMS:
        if data.startswith(bom):
            try:
                errors = "surrogateescape" if encoding == "utf-8" else "strict"
                return FileText(data[len(bom) :].decode(encoding, errors), encoding, bom)
            except UnicodeDecodeError:
                return None
    if b"\0" in data[:SNIFFED_BYTES]:
        return None
    return FileText(data.decode("utf-8", "surrogateescape"))


def guess_binary_kind(data: bytes, name: str) -> str:
    """Guess the kind of a binary file from its first bytes and name."""
    found = next((kind for magic, kind in MAGICS if data.startswith(magic)), None)
    return found or mimetypes.guess_type(name, strict=False)[0] or "unknown type"


def short_content_hash(data: bytes) -> str:
    """Return a short hash by which a later write detects changes to the file."""
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def read_if_small(fd: Fd, limit: int = READ_WHOLE_BYTES) -> bytes | None:
    """Return the content of a file, or ``None`` if it has more than *limit* bytes."""
    chunks, left = [], limit + 1
    while left > 0 and (chunk := calls.read(fd, min(CHUNK_BYTES, left))):
        chunks.append(chunk)
        left -= len(chunk)
    return None if left <= 0 else b"".join(chunks)


def cut_long_line(line: str) -> str:
    """Return a line cut to 2,000 characters, with a note of how much was removed."""
    if len(line) <= READ_LINE_CHARS + 2:
        return line
    body = line.rstrip("\r\n")
    if len(body) <= READ_LINE_CHARS:
        return line
    return f"{body[:READ_LINE_CHARS]} [... {len(body) - READ_LINE_CHARS:,} characters of this line were cut]{line[len(body) :]}"


def read_line_range(fd: Fd, offset: int, limit: int) -> tuple[list[str], int | None]:
    """Return a range of lines of a UTF-8 file, and the number of its lines; ``None`` if the file is too long to count them."""
    window = _LineWindow(offset, limit)
    seen = 0
    while chunk := calls.read(fd, CHUNK_BYTES):
        seen += len(chunk)
        window.feed(chunk)
        if seen > COUNTED_BYTES and window.is_full:
            return window.lines, None
    return window.lines, window.finish()


class _LineWindow:
    """Collects a range of lines from a stream of bytes; of each line only the start is stored."""

    KEPT_CHARS = READ_LINE_CHARS * 4 + 64
    """Enough for the displayed part of a cut line, at four bytes for a character."""

    def __init__(self, offset: int, limit: int) -> None:
        self._first, self._after = offset, offset + limit
        self._number = 0
        self._open = bytearray()
        self._length = 0
        self.lines: list[str] = []

    @property
    def is_full(self) -> bool:
        """Whether all lines of the range are stored."""
        return self._number >= self._after

    def feed(self, chunk: bytes) -> None:
        """Split the next bytes of the file into lines, and store those in the range."""
        if self.is_full or self._number + chunk.count(b"\n") < self._first:
            ends = chunk.count(b"\n")
            self._number += ends
            self._length = len(chunk) - chunk.rfind(b"\n") - 1 if ends else self._length + len(chunk)
            if ends:
                self._open.clear()
            return
        pieces = chunk.split(b"\n")
        for piece in pieces[:-1]:
            self._add_piece(piece)
            self._store_line_and_advance(b"\n")
        self._add_piece(pieces[-1])

    def _add_piece(self, piece: bytes) -> None:
        """Add a part of the current line; bytes beyond the displayed part are only counted."""
        self._length += len(piece)
        if self._first <= self._number < self._after:
            self._open += piece[: max(0, self.KEPT_CHARS - len(self._open))]

    def _store_line_and_advance(self, end: bytes) -> None:
        """End the current line, and store it as text if it is in the range."""
        if self._first <= self._number < self._after:
            line = bytes(self._open).decode("utf-8", "replace")
            missing = self._length - len(self._open)
            if missing and len(line) > READ_LINE_CHARS:
                shown = line[:READ_LINE_CHARS]
                count = self._length - len(shown.encode())
                self.lines.append(f"{shown} [... at least {count:,} bytes of this line were cut]{end.decode()}")
            else:
                self.lines.append(cut_long_line(line + end.decode()))
        self._open.clear()
        self._length = 0
        self._number += 1

    def finish(self) -> int:
        """End a last line without a line end, and return the number of lines."""
        if self._length:
            self._store_line_and_advance(b"")
        return self._number
