"""
How the bytes of a reply are received: in whatever pieces, under time limits and size limits, into an accumulator.

The SDKs' own decoders are not used, because they take a cut-off reply for a whole one.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import aclosing, suppress
from typing import Any, ClassVar, NoReturn, TypeVar

from stepengine.data.frozen import frozen
from stepengine.data.messages import RefusalPart, TextPart, ThinkingPart
from stepengine.data.models import ModelDelta, ModelReply, TextChunk, ThinkingChunk
from stepengine.data.usage import Usage
from stepengine.errors import ModelError
from stepengine.models._aws_events import AWS_STREAM, AWSParser
from stepengine.models._failures import (
    Call,
    body_failure,
    protocol_failure,
    request_id_of,
    transport_failure,
    truncated,
)
from stepengine.models._json import read_json
from stepengine.models._reply import MOST_UNREAD, with_unread
from stepengine.models._sse import SSEParser
from stepengine.models.base import Timeouts
from stepengine.models.keys import printable

__all__ = (
    "Accumulator",
    "Exchange",
    "ReplyReader",
    "drained",
    "held",
    "pieces_of",
    "read_lines",
    "understood",
)

MAX_REPLY = 64 * 1024 * 1024
MAX_TEXT = 4 * 1024 * 1024
BEGIN = 200
DRAIN_SECONDS = 0.25
DRAIN_BYTES = 64 * 1024
logger = logging.getLogger("stepengine.models")
T = TypeVar("T")


class Accumulator(ABC):
    """
    Turns the events of one wire into the completed reply.

    Args:
        call: What was asked.
        model: The model's name as it was asked for.
        request_id: From the response's headers.

    Attributes:
        done: Whether the terminal marker has come.
    """

    decoder: ClassVar[staticmethod[[Mapping[str, Any], Call, str, str | None], ModelReply]]
    """Decodes a message that came, or was put together, in one piece; the others are the arguments of the class."""

    def __init__(self, call: Call, model: str, request_id: str | None) -> None:
        self.done = False
        self._call = call
        self._model = model
        self._request_id = request_id
        self._unread: list[str] = []

    @property
    def ended(self) -> bool:
        """Whether an end was told of, behind which the body may still say something or stay open."""
        return self.done

    @property
    @abstractmethod
    def usage(self) -> Usage | None:
        """What the reply is known to have used so far."""

    @abstractmethod
    def event(self, name: str, data: bytes) -> list[ModelDelta]:
        """Take one event and return what it adds."""

    @abstractmethod
    def finish(self, tail: bytes, *, clean: bool = True) -> ModelReply:
        """Return the reply; *tail* is an unfinished event, *clean* whether the body ended as it should."""

    def _decoded(self, message: Mapping[str, object]) -> ModelReply:
        return with_unread(self.decoder(message, self._call, self._model, self._request_id), self._unread)

    def _skip(self, *names: str) -> None:
        """Remember what of the stream is not read: the reply names it, and the run tells of it."""
        if len(self._unread) < MOST_UNREAD:
            self._unread += [name for name in names if name not in self._unread]

    def _failed(self, event: Mapping[str, object]) -> ModelError:
        return body_failure(event, None, {}, self._call, self.usage)

    def _broken(self, what: str) -> NoReturn:
        raise protocol_failure(self._call, what, self.usage)

    def _truncated(self, what: str) -> NoReturn:
        raise truncated(self._call, what, self.usage)


class ReplyReader:
    """Feeds the bytes of a streamed reply, in whatever pieces, through the event parser into an accumulator."""

    def __init__(self, accumulator: Accumulator, call: Call, parser: SSEParser | AWSParser | None = None) -> None:
        self.events = 0
        self._accumulator = accumulator
        self._call = call
        self._parser = parser or SSEParser()
        self._size = 0
        self._text = 0

    @property
    def done(self) -> bool:
        """Whether the terminal marker has come, after which nothing counts."""
        return self._accumulator.done

    @property
    def ended(self) -> bool:
        """Whether an end was told of, so that silence behind it costs nothing."""
        return self._accumulator.ended

    @property
    def usage(self) -> Usage | None:
        """What the reply is known to have used so far."""
        return self._accumulator.usage

    def feed(self, chunk: bytes) -> list[ModelDelta]:
        """
        Return what *chunk* adds.

        Raises:
            ModelError: for an error event, a broken protocol, and a reply that does not end.
        """
        self._size += len(chunk)
        if self._size > MAX_REPLY:
            raise too_large(self._call, f"{MAX_REPLY} bytes", self.usage)
        deltas: list[ModelDelta] = []
        for name, data in self._parser.feed(chunk):
            if self._accumulator.done:
                break
            self.events += name != "ping"
            deltas += self._event(name, data)
        self._text += sum([len(delta.text) for delta in deltas if isinstance(delta, TextChunk | ThinkingChunk)])
        if self._text > MAX_TEXT:
            raise too_large(self._call, f"{MAX_TEXT} characters of text", self.usage)
        return deltas

    def _event(self, name: str, data: bytes) -> list[ModelDelta]:
        return understood(self._call, lambda: self._accumulator.event(name, data), lambda: self.usage)

    def finish(self, *, clean: bool = True) -> ModelReply:
        """
        Return the completed reply after the last byte.

        Raises:
            ModelError: ``TruncatedReply`` when the terminal marker is missing.
        """
        tail = self._parser.tail
        return understood(
            self._call,
            lambda: held(self._accumulator.finish(tail, clean=clean), self._call),
            lambda: self.usage,
        )


def understood(call: Call, read: Callable[[], T], usage: Callable[[], Usage | None] = lambda: None) -> T:
    """
    Return what *read* makes of something that a provider sent.

    Decoders are pure, so whatever else they raise than a ``ModelError`` says that it is not what it should be.

    Raises:
        ModelError: for a reply that breaks its protocol.
    """
    try:
        return read()
    except ModelError:
        raise
    except Exception as error:  # noqa: BLE001 - see above
        what = f"it cannot be read ({type(error).__name__}: {error})"
    raise protocol_failure(call, what, usage())


def read_lines(content: bytes, call: Call) -> list[Mapping[str, Any]]:
    """
    Return the objects of a body that has one in each line.

    Raises:
        ModelError: for anything else.
    """
    try:
        found = [read_json(line) for line in content.splitlines() if line.strip()]
    except ValueError:
        found = [None]
    if not all(isinstance(each, Mapping) for each in found):
        raise protocol_failure(call, "it is not one object in each line", None)
    return found


def held(reply: ModelReply, call: Call) -> ModelReply:
    """Return *reply* if its text is within the cap, whichever way it came."""
    texts = [part.text for part in reply.content if isinstance(part, TextPart | ThinkingPart | RefusalPart)]
    if sum(map(len, texts)) > MAX_TEXT:
        raise too_large(call, f"{MAX_TEXT} characters of text", reply.usage)
    return reply


def too_large(call: Call, limit: str, usage: Usage | None = None) -> ModelError:
    """Return the error for a reply that does not end; asking again would bring another one."""
    msg = f"the reply of {call.model!r} is longer than {limit} and was cut"
    return ModelError(msg, kind="too_large", usage=usage)


@frozen
class Exchange:
    """
    A response whose body has not been read.

    Attributes:
        response: The HTTP library's response.
        call: What was asked.
        timeouts: How long its body may take.
        started: When the request was sent, by the event loop's clock.
    """

    response: Any
    call: Call
    timeouts: Timeouts
    started: float

    @property
    def request_id(self) -> str | None:
        """The provider's id of the request."""
        return request_id_of(self.response.headers)

    @property
    def is_event_stream(self) -> bool:
        """By the content type, whatever was asked for."""
        kind = self.response.headers.get("content-type", "").lower()
        return "text/event-stream" in kind or AWS_STREAM in kind

    @property
    def parser(self) -> SSEParser | AWSParser:
        """What takes the stream of events apart."""
        kind = self.response.headers.get("content-type", "").lower()
        return AWSParser(self.call) if AWS_STREAM in kind else SSEParser()

    async def content(self, most: int | None = None) -> bytes:
        """
        Return the whole body, decompressed, of at most *most* bytes: those of a reply by default.

        Raises:
            ModelError: when it breaks off, takes too long or is too long.
        """
        import httpx2

        most = MAX_REPLY if most is None else most
        pieces: list[bytes] = []
        size = 0
        failure: BaseException
        try:
            async with asyncio.timeout_at(self.started + self.timeouts.total):
                async for piece in self.response.aiter_bytes():
                    pieces.append(piece)
                    size += len(piece)
                    if size > most:
                        raise too_large(self.call, f"{most} bytes")
            return b"".join(pieces)
        except TimeoutError:
            failure = late(self.call, "total", self.timeouts)
        except (httpx2.HTTPError, httpx2.StreamError, OSError) as error:
            failure = transport_failure(error, self.call)
        raise failure

    def json(self, content: bytes) -> Mapping[str, Any]:
        """
        Return the object in *content*.

        Raises:
            ModelError: for anything else, quoting its beginning.
        """
        kind = self.response.headers.get("content-type", "").partition(";")[0].strip().lower()
        try:
            data = read_json(content)
        except ValueError:
            data = None
        if isinstance(data, list) and len(data) == 1:
            data = data[0]
        if isinstance(data, Mapping):
            return data
        begin = printable(content[: 2 * BEGIN].decode("utf-8", "replace"), BEGIN)
        what = printable(kind, BEGIN) or "something"
        msg = f"{self.call.provider} answered {what} that is not a reply of {self.call.asked}: {begin!r}"
        raise ModelError(msg, retryable=kind != "text/html", kind="protocol", request_id=self.request_id)


def late(call: Call, limit: str, timeouts: Timeouts, usage: Usage | None = None) -> ModelError:
    """Return the error for a call that broke one of its time limits; asking again may help."""
    what = {
        "first_byte": "sent nothing",
        "idle": "stopped in the middle of its reply",
        "silence": "sent nothing but keep-alives",
        "total": "did not finish its reply",
    }[limit]
    msg = f"{call.provider} {what} for {getattr(timeouts, limit):g} s when asked for {call.asked} (Timeouts.{limit})"
    return ModelError(msg, retryable=True, kind="timeout", usage=usage)


async def pieces_of(exchange: Exchange, reader: ReplyReader) -> AsyncGenerator[tuple[bytes | None, bool]]:
    """
    Give the pieces of a streamed body until the reader is done; last ``None`` and whether the body ended as it should.

    Raises:
        ModelError: when a time limit passes.
    """
    timeouts, started = exchange.timeouts, exchange.started
    loop = asyncio.get_running_loop()
    async with aclosing(exchange.response.aiter_bytes()) as chunks:
        limit, last, said, events = "first_byte", started, loop.time(), reader.events
        progress = started
        while not reader.done:
            deadlines = {
                last + getattr(timeouts, limit): limit,
                said + timeouts.silence: "silence",
                progress + timeouts.total: "total",
            }
            when = min(deadlines)
            chunk, clean, in_time = await _next(chunks, exchange.call, when)
            if not in_time and not reader.ended:
                raise late(exchange.call, deadlines[when], timeouts, reader.usage)
            yield chunk, clean
            if chunk is None:
                return
            limit, last = "idle", loop.time()
            if reader.events != events:
                said = progress = last
                events = reader.events
        await drained(chunks)


async def _next(chunks: AsyncIterator[bytes], call: Call, when: float) -> tuple[bytes | None, bool, bool]:
    """Return the next piece, or ``None`` and whether the body ended as it should; last, whether it came in time."""
    import httpx2

    try:
        async with asyncio.timeout_at(when):
            return await anext(chunks, None), True, True
    except TimeoutError:
        return None, False, False
    except httpx2.TimeoutException as error:
        failure = transport_failure(error, call)
    except (httpx2.HTTPError, httpx2.StreamError, OSError) as error:
        failure = transport_failure(error, call)
        if isinstance(failure, ModelError) and failure.kind == "connection":
            logger.debug("the connection to %s broke: %s", call.provider, type(error).__name__)
            return None, False, True
    raise failure


async def drained(chunks: AsyncIterator[bytes]) -> None:
    """Read what follows the terminal marker, for a moment, so that the connection can be used again."""
    import httpx2

    seen = 0
    with suppress(TimeoutError, httpx2.HTTPError, httpx2.StreamError, OSError):
        async with asyncio.timeout(DRAIN_SECONDS):
            async for chunk in chunks:
                seen += len(chunk)
                if seen > DRAIN_BYTES:
                    return
