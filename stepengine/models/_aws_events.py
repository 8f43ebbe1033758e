"""
Parse AWS event streams, the format of Bedrock's streamed replies.

A message consists of its length, the length of its headers, a checksum of both, the headers, the payload, and a checksum of
all. The payload of a ``chunk`` event has an event of the model's own wire as base64. The payload of any other event is the
event itself, with its type in a header. A message of another kind reports a failure.
"""

from __future__ import annotations

import struct
from base64 import b64decode
from collections.abc import Iterator
from zlib import crc32

from stepengine.models._failures import RequestLabel, make_protocol_error
from stepengine.models._json import get_optional_object, get_optional_text, parse_json
from stepengine.models._wire import encode_json

AWS_STREAM = "application/vnd.amazon.eventstream"

PRELUDE_BYTES, CHECKSUM_BYTES = 12, 4
"""Two lengths and their checksum before a message and a checksum after it, as AWS documents its event streams."""
MAX_MESSAGE_BYTES = 24 * 1024 * 1024
"""AWS's limit for the size of a message."""
TEXT_TYPE = 7
"""The type number of headers with text."""
SIZES = {0: 0, 1: 0, 2: 1, 3: 2, 4: 4, 5: 8, 8: 8, 9: 16}
"""Bytes of a header's value, for each type of fixed size."""


class AWSParser:
    """Parses pieces of a body into events of the model's wire, as pairs ``(name, data)``."""

    def __init__(self, call: RequestLabel) -> None:
        self._call = call
        self._bytes = bytearray()

    @property
    def tail(self) -> bytes:
        """The bytes of an incomplete message; empty between messages."""
        return bytes(self._bytes)

    def feed(self, chunk: bytes) -> list[tuple[str, bytes]]:
        """
        Return the events that *chunk* completes; raise ``ModelError`` for bytes that are not an event stream.

        Raises:
            ModelError: for bytes that are not an event stream, and for a wrong checksum.
        """
        self._bytes += chunk
        try:
            return self._pop_complete_events()
        except (ValueError, TypeError, IndexError, struct.error) as error:
            what = f"{type(error).__name__}: {error}"
        raise make_protocol_error(self._call, what)

    def _pop_complete_events(self) -> list[tuple[str, bytes]]:
        """Remove all complete messages from the stored bytes and return their events; raise ``ValueError`` for an invalid size or checksum."""
        events, start = [], 0
        while len(self._bytes) - start >= PRELUDE_BYTES:
            size, headers, check = struct.unpack_from(">III", self._bytes, start)
            if crc32(self._bytes[start : start + PRELUDE_BYTES - CHECKSUM_BYTES]) != check:
                msg = "the start of a message of the event stream does not match its checksum"
                raise ValueError(msg)
            if not PRELUDE_BYTES + headers + CHECKSUM_BYTES <= size <= MAX_MESSAGE_BYTES:
                msg = f"a message of the event stream has the invalid size {size}, with {headers} bytes of headers"
                raise ValueError(msg)
            if len(self._bytes) - start < size:
                break
            message = bytes(self._bytes[start : start + size])
            start += size
            events.append(_parse_message(message, headers))
        del self._bytes[:start]
        return events


def _parse_message(message: bytes, header_bytes: int) -> tuple[str, bytes]:
    """Return (name, data) of the event in a complete message; a failure becomes an ``error`` event. Raise for invalid bytes."""
    body, check = message[:-CHECKSUM_BYTES], message[-CHECKSUM_BYTES:]
    if crc32(body).to_bytes(CHECKSUM_BYTES, "big") != check:
        msg = "a message of the event stream does not match its checksum"
        raise ValueError(msg)
    named = dict(_parse_text_headers(message[PRELUDE_BYTES : PRELUDE_BYTES + header_bytes]))
    payload = body[PRELUDE_BYTES + header_bytes :]
    kind = named.get(":message-type", "event")
    if kind == "event":
        if named.get(":event-type") != "chunk":
            return named.get(":event-type", ""), payload or b"{}"
        data = b64decode(
            get_optional_text(get_optional_object({"chunk": parse_json(payload)}, "chunk"), "bytes"), validate=True
        )
        return get_optional_text(parse_json(data), "type"), data
    if kind == "exception":
        said = (
            get_optional_text(get_optional_object({"said": parse_json(payload)}, "said"), "message") if payload else ""
        )
        problem = {"type": named.get(":exception-type", kind), "message": said}
    else:
        problem = {"type": named.get(":error-code", kind), "message": named.get(":error-message", "")}
    return "error", encode_json({"type": "error", "error": problem})


def _parse_text_headers(block: bytes) -> Iterator[tuple[str, str]]:
    """Yield the names and values of text headers; raise ``struct.error`` or ``IndexError`` for an invalid *block*."""
    at = 0
    while at < len(block):
        name = block[at + 1 : at + 1 + block[at]].decode()
        at += 1 + block[at]
        kind = block[at]
        at += 1
        if kind in SIZES:
            at += SIZES[kind]
            continue
        (size,) = struct.unpack_from(">H", block, at)
        value = block[at + 2 : at + 2 + size]
        at += 2 + size
        if kind == TEXT_TYPE:
            yield name, value.decode()
