"""
Record one HTTP exchange, or play one, whichever library sends it.

Each library has an adapter: ``transport`` for clients that take a transport, ``patching`` for programs that make their own clients. An
adapter turns its request into a ``RecordedRequest``, and asks ``Exchanges`` for a recorded reply. Without one it sends the request, and
hands each piece of the reply to an ``Exchange``.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from typing import Protocol

from stepengine.data.json import JsonDict
from stepengine.redaction import Redactor
from stepengine.testing.cassette import CassetteMiss, LeftOut, OpenExchange, Slot
from stepengine.testing.cassette_files import Headers, Interaction, RecordedRequest, RecordedResponse, is_stream
from stepengine.testing.stream_ends import stream_is_complete
from stepengine.testing.traffic_redaction import (
    Cleaner,
    clean_url,
    is_credential_exchange,
    is_presigned,
    is_telemetry,
    secrets_in_headers,
)

__tracebackhide__ = True  # a failed test ends at its author's line

NOT_RECORDED = frozenset({408, 409, 429})
FIRST_SERVER_ERROR = 500
# They describe the bytes of the original connection; a library frames those that it is given itself.
FRAMING = frozenset({"connection", "content-length", "transfer-encoding"})
PASSING: ContextVar[bool] = ContextVar("PASSING", default=False)
"""Whether a request is on its way to the network through a transport that records it."""


class KnownReplies(Protocol):
    """A source of recorded replies: a ``Cassette``, in this or another process."""

    def take(self, request: RecordedRequest) -> Interaction:
        """Return the recorded interaction of *request*, or raise ``CassetteMiss``."""

    def forget(self, miss: CassetteMiss) -> None:
        """Remove a miss, because another source answers the request."""


class RecordingTarget(Protocol):
    """The cassette that recordings are stored in, in this or another process."""

    open_exchanges: set[OpenExchange]

    @property
    def redactor(self) -> Redactor:
        """The rules for secrets."""

    def reserve(self, secrets: dict[str, str] | None = None) -> Slot:
        """Reserve the next position for a request that starts now."""

    def finish(self, slot: Slot, interaction: Interaction) -> None:
        """Store an interaction at its reserved position."""

    def leave_out(self, left: LeftOut) -> None:
        """Store the fact that a reply was not recorded."""


class Exchange:
    """
    A request that is being recorded, with the part of its reply that has arrived.

    Args:
        cassette: Where it is stored.
        request: The request.
        record_errors: Store replies with status 408, 409, 429 and 5xx, and streams that end in an error event.
        keep_chunks: Store the sizes of a stream's pieces.
    """

    def __init__(
        self,
        cassette: RecordingTarget,
        request: RecordedRequest,
        *,
        record_errors: bool = False,
        keep_chunks: bool = False,
    ) -> None:
        self._cassette = cassette
        self._request = request
        self._record_errors = record_errors
        self._keep_chunks = keep_chunks
        self._slot: Slot | None = cassette.reserve(secrets_in_headers(request.headers))
        cassette.open_exchanges.add(self)
        self._head = RecordedResponse(200)
        self._pieces: list[bytes] = []

    def start_reply(self, status: int, reason: str, headers: Iterable[tuple[str, str]]) -> bool:
        """Store status and headers of the reply; return False if the reply is not recorded."""
        self._head = RecordedResponse(status, reason, tuple(headers))
        if (status in NOT_RECORDED or status >= FIRST_SERVER_ERROR) and not self._record_errors:
            self._report_left_out("error_status")
            self._slot = None
            self._cassette.open_exchanges.discard(self)
            return False
        return True

    def add(self, piece: bytes) -> None:
        """Store a piece of the body as it arrived."""
        self._pieces.append(piece)

    def end(self, *, read_to_end: bool) -> None:
        """Store the exchange. Only the first call counts, since clients read to the end and close then."""
        slot, self._slot = self._slot, None
        if slot is None:
            return
        self._cassette.open_exchanges.discard(self)
        raw, whole = b"".join(self._pieces), self._decompressed_reply()
        complete = self._is_complete(whole, read_to_end=read_to_end)
        if not complete:
            self._report_left_out("cut" if read_to_end else "not_read")
            whole = RecordedResponse(self._head.status, self._head.reason, self._head.headers, raw)
        cleaner = Cleaner(slot.secrets, base=self._cassette.redactor)
        clean = cleaner.response(whole)
        extras: dict[str, object] = {} if complete else {"complete": False}
        if self._keep_chunks and is_stream(whole) and clean.body == raw:
            extras["chunks"] = [len(piece) for piece in self._pieces]
        self._cassette.finish(slot, Interaction(cleaner.request(self._request), clean, JsonDict(extras)))

    def fail(self) -> None:
        """Discard the exchange, because there was no reply."""
        self._head = RecordedResponse(0)
        self._report_left_out("no_reply")
        self._slot = None
        self._cassette.open_exchanges.discard(self)

    def end_if_complete(self) -> None:
        """Store the exchange if nothing is missing, although the client has not closed the reply yet."""
        if self._is_complete(self._decompressed_reply(), read_to_end=False):
            self.end(read_to_end=False)

    def _decompressed_reply(self) -> RecordedResponse:
        head, body = self._head, b"".join(self._pieces)
        encoding = head.header("content-encoding")
        if not encoding:
            return RecordedResponse(head.status, head.reason, head.headers, body)
        headers = tuple([(n, v) for n, v in head.headers if n != "content-encoding"])
        return RecordedResponse(head.status, head.reason, headers, _decompress_pieces(encoding, self._pieces))

    def _is_complete(self, reply: RecordedResponse, *, read_to_end: bool) -> bool:
        if is_stream(reply):
            text = reply.body.decode(errors="replace")
            return stream_is_complete(text, read_to_end=read_to_end, with_errors=self._record_errors)
        length = self._head.header("content-length")
        return read_to_end or length == str(sum(map(len, self._pieces)))

    def _report_left_out(self, reason: str) -> None:
        left = LeftOut(self._request.method, clean_url(self._request.url), self._head.status, reason)
        self._cassette.leave_out(left)


@contextlib.contextmanager
def bypass_patches(exchange: Exchange | None) -> Iterator[None]:
    """Inside the block, patched libraries send requests unrecorded; an error there discards *exchange*."""
    token = PASSING.set(True)
    try:
        yield
    except BaseException:
        if exchange is not None:
            exchange.fail()
        raise
    finally:
        PASSING.reset(token)


def start_exchange(
    cassette: RecordingTarget, request: RecordedRequest, *, record_errors: bool = False, keep_chunks: bool = False
) -> Exchange | None:
    """Start to record *request*; return ``None`` for a request about credentials, which is never recorded."""
    if is_credential_exchange(request):
        return None
    return Exchange(cassette, request, record_errors=record_errors, keep_chunks=keep_chunks)


class Exchanges:
    """
    Replays the known requests and records the others.

    Args:
        known: What is played; None plays nothing.
        fresh: Where the rest is recorded; None records nothing, so that an unknown request is a miss.
        record_errors: As for ``Exchange``.
    """

    def __init__(
        self, known: KnownReplies | None, fresh: RecordingTarget | None, *, record_errors: bool = False
    ) -> None:
        self._known = known
        self._fresh = fresh
        self._record_errors = record_errors

    @property
    def replaying(self) -> bool:
        """Whether nothing is recorded."""
        return self._fresh is None

    def find_reply(self, request: RecordedRequest) -> RecordedResponse | None:
        """
        Return the recorded reply to *request*, or None if the request is to be sent.

        Raises:
            CassetteMiss: if there is none and nothing is recorded.
        """
        if is_telemetry(request):
            return NO_TELEMETRY if self.replaying else None
        if is_credential_exchange(request) and not is_presigned(request):
            return _make_placeholder_reply(request) if self.replaying else None
        if self._known is None:
            return None
        try:
            return self._known.take(request).response
        except CassetteMiss as miss:
            if self._fresh is None:
                raise
            self._known.forget(miss)
            return None

    def start(self, request: RecordedRequest) -> Exchange | None:
        """Start to record a request that is sent; None for one that is not recorded."""
        if self._fresh is None or is_telemetry(request):
            return None
        return start_exchange(self._fresh, request, record_errors=self._record_errors)


NO_TELEMETRY = RecordedResponse(200, "OK", {"content-type": "application/json"}, b"{}")
TOKEN = {"access_token": "replay", "token_type": "Bearer", "expires_in": 3600}


def _make_placeholder_reply(request: RecordedRequest) -> RecordedResponse:
    """Return a reply with a token for a program that replays; other exchanges of credentials get a 404."""
    if request.method != "POST":
        return RecordedResponse(404, "Not Found", {"content-type": "application/json"}, b"{}")
    return RecordedResponse(200, "OK", {"content-type": "application/json"}, json.dumps(TOKEN).encode())


def _decompress_pieces(encoding: str, pieces: list[bytes]) -> bytes:
    """Return the body without its compression, as far as it arrived."""
    import httpx2

    decoded: list[bytes] = []
    reply = httpx2.Response(200, headers={"content-encoding": encoding}, content=iter(pieces))
    with contextlib.suppress(httpx2.DecodingError):
        decoded.extend(reply.iter_bytes())
    return b"".join(decoded)


def headers_from_raw(raw: Iterable[tuple[bytes, bytes]]) -> Headers:
    """Return header pairs as text."""
    return tuple([(name.decode("latin-1").lower(), value.decode("latin-1")) for name, value in raw])
