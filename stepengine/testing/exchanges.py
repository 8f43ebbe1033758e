"""
Record one HTTP exchange, or play one, whichever library sends it.

Each library has an adapter: ``transport`` for clients that take a transport, ``patching`` for programs that make their own clients. An
adapter turns its request into a ``RecordedRequest``, and asks ``Exchanges`` for a recorded reply. Without one it sends the request, and
hands each piece of the reply to an ``Exchange``.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from typing import Protocol

import attrs

from stepengine.data.json import JsonDict
from stepengine.testing.cassette import OpenExchange, Slot, UnrecordedReply
from stepengine.testing.cassette_bodies import decode_body
from stepengine.testing.cassette_files import Headers, Interaction, RecordedRequest, RecordedResponse, is_event_stream
from stepengine.testing.cassette_misses import CassetteMiss, wrap_miss_if_in_pool_worker
from stepengine.testing.recorded_errors import error_to_json
from stepengine.testing.stream_ends import is_stream_complete
from stepengine.testing.traffic_redaction import (
    clean_url,
    find_header_secrets,
    is_credential_exchange,
    is_presigned,
    is_telemetry,
)

__tracebackhide__ = True  # a failed test ends at its author's line

NOT_RECORDED = frozenset({408, 409, 429})
FIRST_SERVER_ERROR = 500
WITHOUT_BODY = frozenset({204, 304})
PASSING: ContextVar[bool] = ContextVar("PASSING", default=False)
"""Whether a request is on its way to the network through a transport that records it."""
SEEN: ContextVar[list[str] | None] = ContextVar("SEEN", default=None)
"""Where the requests and connections are noted that a transport of a program's own makes by patched libraries."""


class KnownReplies(Protocol):
    """A source of recorded replies: a ``Cassette``, in this or another process."""

    def consume(self, request: RecordedRequest) -> Interaction:
        """Return the recorded interaction of *request*, or raise ``CassetteMiss``."""

    def remove_miss(self, miss: CassetteMiss) -> None:
        """Remove a miss, because another source answers the request."""

    def has_replies_of_transport(self, name: str) -> bool:
        """Return True if there are recorded replies of the program's own transport *name*."""


class RecordingTarget(Protocol):
    """The cassette that recordings are stored in, in this or another process."""

    open_exchanges: set[OpenExchange]

    def reserve(self, secrets: dict[str, str] | None = None) -> Slot:
        """Reserve the next position for a request that starts now."""

    def finish(self, slot: Slot, interaction: Interaction) -> None:
        """Store an interaction at its reserved position, without its secrets."""

    def store_unrecorded_reply(self, reply: UnrecordedReply, slot: Slot | None = None) -> None:
        """Store the fact that a reply was not recorded, and for which reserved position."""


class Exchange:
    """
    A request that is being recorded, with the part of its reply that has arrived.

    Args:
        cassette: Where it is stored.
        request: The request.
        record_errors: Store replies with status 408, 409, 429 and 5xx, and streams that end in an error event.
        keep_chunks: Store the sizes of a stream's pieces.
        transport: The name of the program's own transport that gives the reply.

    Attributes:
        pieces: The pieces of the body that have arrived.
        unframe: Returns the body in the pieces, and whether its end is there; None for pieces of the body itself.
    """

    def __init__(
        self,
        cassette: RecordingTarget,
        request: RecordedRequest,
        *,
        record_errors: bool,
        keep_chunks: bool,
        transport: str,
    ) -> None:
        self._cassette = cassette
        self._request = request
        self._record_errors = record_errors
        self._keep_chunks = keep_chunks
        self._about: dict[str, object] = {"transport": transport} if transport else {}
        self._slot: Slot | None = cassette.reserve(find_header_secrets(request.headers))
        cassette.open_exchanges.add(self)
        self._head = RecordedResponse(0)
        self.pieces: list[bytes] = []
        self.unframe: Callable[[bytes], tuple[bytes, bool]] | None = None

    def start_reply(self, status: int, reason: str, headers: Iterable[tuple[str, str]]) -> bool:
        """Store status and headers of the reply; return False if the reply is not recorded."""
        self._head = RecordedResponse(status, reason, tuple(headers))
        if (status in NOT_RECORDED or status >= FIRST_SERVER_ERROR) and not self._record_errors:
            self._report_unrecorded_reply("error_status", self._close_slot())
            return False
        return True

    def add_piece(self, piece: bytes) -> None:
        """Store a piece of the body as it arrived."""
        self.pieces.append(piece)

    def finish(self, *, read_to_end: bool, error: BaseException | None = None) -> None:
        """
        Store the exchange, unless no reply has arrived. Only the first call counts, since clients read to the end and close then.

        Args:
            read_to_end: Whether the client read until nothing came any more.
            error: The error that the client met while it read.
        """
        slot = self._close_slot()
        if slot is None:
            return
        if not self._head.status:
            self._report_unrecorded_reply("no_reply", slot)
            return
        reply, complete = self._assemble_reply(read_to_end=read_to_end)
        extras = {**self._about} if complete else {**self._about, "complete": False}
        form = None if complete or error is None or not self._record_errors else error_to_json(error)
        if form is not None:
            extras["error"] = form
        elif not complete and is_event_stream(reply):
            self._report_unrecorded_reply("cut" if read_to_end else "not_read", slot)
        if self._keep_chunks and is_event_stream(reply):
            extras["chunks"] = [len(piece) for piece in self.pieces]
        self._cassette.finish(slot, Interaction(self._request, reply, JsonDict(extras)))

    def finish_with_error(self, error: BaseException, *, while_sending: bool = False) -> None:
        """Store *error* in place of a reply, if errors are recorded. With *while_sending*, the client raised it while it sent the request."""
        slot = self._close_slot()
        if slot is None:
            return
        form = error_to_json(error) if self._record_errors else None
        self._head = RecordedResponse(0)
        if form is None:
            self._report_unrecorded_reply("no_reply", slot)
        else:
            error_form = {**form, "while_sending": True} if while_sending else form
            extras = JsonDict({**self._about, "error": error_form})
            self._cassette.finish(slot, Interaction(self._request, self._head, extras))

    def _close_slot(self) -> Slot | None:
        """Return the reserved slot, and remove the exchange from the open ones; ``None`` if it has ended before."""
        slot, self._slot = self._slot, None
        self._cassette.open_exchanges.discard(self)
        return slot

    def finish_if_complete(self) -> None:
        """Store the exchange if nothing is missing, although the client has not closed the reply yet."""
        if self._head.status and self._assemble_reply(read_to_end=False)[1]:
            self.finish(read_to_end=False)

    def _assemble_reply(self, *, read_to_end: bool) -> tuple[RecordedResponse, bool]:
        """Return the reply as far as it has arrived, and whether that is all of it."""
        body, whole = b"".join(self.pieces), read_to_end
        if self.unframe is not None:
            body, whole = self.unframe(body)
        reply = attrs.evolve(self._head, body=body)
        if self._request.method == "HEAD" or reply.status in WITHOUT_BODY:
            return reply, True
        length = reply.get_header("content-length")
        if length.isdecimal() and self.unframe is None:  # a client that knows the length asks for nothing behind it
            whole = len(body) >= int(length)
        if is_event_stream(reply):
            text = decode_body(body, reply.get_header("content-encoding")).decode(errors="replace")
            whole = is_stream_complete(text, read_to_end=whole, with_errors=self._record_errors)
        return reply, whole

    def _report_unrecorded_reply(self, reason: str, slot: Slot | None) -> None:
        """Report to the cassette that the reply is not recorded, and why."""
        left = UnrecordedReply(self._request.method, clean_url(self._request.url), self._head.status, reason)
        self._cassette.store_unrecorded_reply(left, slot)


@contextlib.contextmanager
def bypass_patches(exchange: Exchange | None) -> Iterator[None]:
    """Let patched libraries send requests unrecorded inside the block; finish *exchange* with an error raised there."""
    token = PASSING.set(True)
    try:
        yield
    except BaseException as error:
        if exchange is not None:
            exchange.finish_with_error(error)
        raise
    finally:
        PASSING.reset(token)


def start_exchange(
    cassette: RecordingTarget,
    request: RecordedRequest,
    *,
    record_errors: bool,
    keep_chunks: bool = False,
    transport: str = "",
) -> Exchange | None:
    """Start to record *request*; return ``None`` for a request about credentials, which is never recorded."""
    if is_presigned(request):
        # A program expects what is behind such an address, and no replay can make it up.
        cassette.store_unrecorded_reply(UnrecordedReply(request.method, clean_url(request.url), 0, "presigned"))
    if is_credential_exchange(request):
        return None
    return Exchange(cassette, request, record_errors=record_errors, keep_chunks=keep_chunks, transport=transport)


class Exchanges:
    """
    Replays the known requests and records the others.

    Args:
        known: The replies to play; None plays nothing.
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
    def has_known_replies(self) -> bool:
        """Whether recorded replies may be played; then each request is looked up before it is sent."""
        return self._known is not None

    @property
    def is_replay_only(self) -> bool:
        """Whether nothing is recorded."""
        return self._fresh is None

    def find_interaction(self, request: RecordedRequest) -> Interaction | None:
        """
        Return the recorded interaction of *request*, or None if the request is to be sent.

        In a replay, requests of telemetry and for credentials get a made-up reply.

        Raises:
            CassetteMiss: if there is none and nothing is recorded.
        """
        _append_seen_address(request.url)
        if is_telemetry(request):
            return Interaction(request, NO_TELEMETRY) if self.is_replay_only else None
        if is_credential_exchange(request) and not is_presigned(request):
            return Interaction(request, make_credential_reply(request)) if self.is_replay_only else None
        if self._known is None:
            return None
        try:
            return self._known.consume(request)
        except CassetteMiss as miss:
            if self._fresh is None:
                raise wrap_miss_if_in_pool_worker(miss) from None
            self._known.remove_miss(miss)
            return None

    def has_replies_of_transport(self, name: str) -> bool:
        """Return True if there are replies of the program's own transport *name* to play."""
        return self._known is not None and self._known.has_replies_of_transport(name)

    def report_unrecorded_connection(self, address: str) -> None:
        """Report that a client that is not recorded, such as one on plain sockets, opened a connection to *address*."""
        _append_seen_address(address)
        if self._fresh is not None:
            self._fresh.store_unrecorded_reply(UnrecordedReply("CONNECT", address, 0, "other_client"))

    def start_recording(self, request: RecordedRequest, transport: str = "") -> Exchange | None:
        """Start to record a request that is sent; *transport* names the program's own transport. None if the request is not recorded."""
        _append_seen_address(request.url)
        if self._fresh is None or is_telemetry(request):
            return None
        return start_exchange(self._fresh, request, record_errors=self._record_errors, transport=transport)


def _append_seen_address(address: str) -> None:
    """Append *address* to the list of addresses that the enclosing block collects, if there is one."""
    seen = SEEN.get()
    if seen is not None:
        seen.append(address)


NO_TELEMETRY = RecordedResponse(200, "OK", {"content-type": "application/json"}, b"{}")
TOKEN = {"access_token": "replay", "token_type": "Bearer", "expires_in": 3600}


def make_credential_reply(request: RecordedRequest) -> RecordedResponse:
    """Return a made-up reply to a request for credentials in a replay: a token for POST, else status 404."""
    if request.method != "POST":
        return RecordedResponse(404, "Not Found", {"content-type": "application/json"}, b"{}")
    return RecordedResponse(200, "OK", {"content-type": "application/json"}, json.dumps(TOKEN).encode())


def header_pairs_from_bytes(raw: Iterable[tuple[bytes, bytes]]) -> Headers:
    """Return header pairs of bytes as text, decoded as Latin-1."""
    return tuple([(name.decode("latin-1"), value.decode("latin-1")) for name, value in raw])
