"""Requests and replies as the bytes of HTTP/1.1, for clients that write and read them directly."""

from __future__ import annotations

import io
import re
import socket
from collections.abc import Iterable
from functools import cache

from stepengine.testing.cassette_files import Interaction, RecordedResponse
from stepengine.testing.exchanges import WITHOUT_BODY
from stepengine.testing.httpx_exchanges import split_body_into_events

LAST_CHUNK = b"0\r\n\r\n"
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


def parse_request_bytes(sent: bytes) -> tuple[str, str, list[tuple[str, str]], bytes]:
    """Return method, target, headers and body of a request that a client wrote."""
    head, _, body = sent.partition(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    method, _, rest = first.partition(" ")
    headers = [(name, value.strip()) for name, _, value in (line.partition(":") for line in lines)]
    if is_chunked(headers):
        body, _ = decode_chunks(body)
    return method, rest.rpartition(" ")[0], headers, body


def is_complete_request(sent: bytes | bytearray) -> bool:
    """Return True if *sent* contains the head and the whole body of a request."""
    end = sent.find(b"\r\n\r\n")
    if end < 0:
        return False
    head = bytes(sent[:end]).lower()
    if b"\r\ntransfer-encoding:" in head:
        return sent.endswith(LAST_CHUNK) and decode_chunks(bytes(sent[end + 4 :]))[1]
    length = re.search(rb"\r\ncontent-length:\s*(\d+)", head)
    return length is None or len(sent) - end - 4 >= int(length[1])


def is_chunked(headers: Iterable[tuple[str, str]]) -> bool:
    """Return whether a body is sent in chunks."""
    return any(name.lower() == "transfer-encoding" and "chunked" in value.lower() for name, value in headers)


CHUNK_SIZE = re.compile(rb"[0-9A-Fa-f]{1,16}")
"""Python also reads a sign, an underscore and ``0x``; with a negative size the reading would never end."""


def decode_chunks(data: bytes) -> tuple[bytes, bool]:
    """Return the body in *data* with the chunked encoding, and True if its last chunk is there."""
    pieces: list[bytes] = []
    at = 0
    while True:
        end = data.find(b"\r\n", at)
        if end < 0:
            return b"".join(pieces), False
        digits = data[at:end].partition(b";")[0].strip()
        if not CHUNK_SIZE.fullmatch(digits):
            return b"".join(pieces), False
        size = int(digits, 16)
        if size == 0:
            return b"".join(pieces), True
        pieces.append(data[end + 2 : end + 2 + size])
        at = end + 2 + size + 2


def has_body(reply: RecordedResponse, method: str) -> bool:
    """Return True if a reply to *method* has a body, which can be empty."""
    return method != "HEAD" and reply.status not in WITHOUT_BODY


def make_reply_pieces(interaction: Interaction, method: str) -> list[bytes]:
    """
    Return the bytes of a reply to *method*, as a server sends them: the head, and each event of a stream by itself.

    If its end was not recorded, they break off. If an error came in its place, there are none.
    """
    reply, whole = interaction.response, interaction.is_complete
    if not reply.status:
        return []
    body = split_body_into_events(reply) if has_body(reply, method) else []
    headers = [*reply.headers]
    if is_chunked(headers):
        body = [b"%x\r\n%b\r\n" % (len(piece), piece) for piece in body]
        if whole and has_body(reply, method):
            body.append(LAST_CHUNK)
    elif whole and has_body(reply, method):
        length = str(len(reply.body))
        headers = [(name, length if name.lower() == "content-length" else value) for name, value in headers]
    lines = [f"HTTP/1.1 {reply.status} {reply.reason}", *[f"{name}: {value}" for name, value in headers], "", ""]
    return ["\r\n".join(lines).encode("latin-1", errors="replace"), *body]


class PlayedSocket:
    """
    A socket that discards sent bytes and returns the bytes of a recorded reply.

    Args:
        pieces: The bytes, one piece for each time that a client reads; None before the reply is known.
        error: What is raised behind the last piece; None ends the connection.
    """

    def __init__(self, pieces: Iterable[bytes] | None = None, error: Exception | None = None) -> None:
        self._pieces = [CONTINUE] if pieces is None else [*pieces]
        self._error = error

    def makefile(self, mode: str = "rb", buffering: int | None = None) -> io.BufferedReader:
        """Return the recorded reply as a file; before it is known, ``100 Continue``, with which a client sends its body."""
        return io.BufferedReader(_Pieces([*self._pieces], self._error))

    def fileno(self) -> int:
        """Return a file descriptor that can always be read."""
        return _make_readable_socket().fileno()

    def sendall(self, data: bytes) -> None:
        """Do nothing, because the request is read elsewhere."""

    def settimeout(self, seconds: float | None) -> None:
        """Do nothing: nothing waits."""

    def gettimeout(self) -> None:
        """Return None: there is no limit."""

    def setsockopt(self, *_: object) -> None:
        """Do nothing: there is no connection."""

    def shutdown(self, how: int) -> None:
        """Do nothing: there is no connection."""

    def close(self) -> None:
        """Do nothing: there is no connection."""


class _Pieces(io.RawIOBase):
    def __init__(self, pieces: list[bytes], error: Exception | None) -> None:
        self._pieces = pieces
        self._error = error

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        """Move bytes of the next piece into *buffer*, and return their number; at the end raise the recorded error or return 0."""
        if not self._pieces:
            if self._error is not None:
                raise self._error
            return 0
        piece = self._pieces.pop(0)
        if len(piece) > len(buffer):
            self._pieces.insert(0, piece[len(buffer) :])
            piece = piece[: len(buffer)]
        buffer[: len(piece)] = piece
        return len(piece)


@cache
def _make_readable_socket() -> socket.socket:
    """Return a socket that can always be read, because its other end is closed."""
    ours, other = socket.socketpair()
    other.close()
    return ours
