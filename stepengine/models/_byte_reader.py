"""
Read the bytes of a reply, in pieces of any size and within time and size limits, into an accumulator.

The SDKs' own decoders are not used, because they accept a truncated reply as complete.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any, ClassVar, NoReturn, TypeVar

from attrs import frozen

from stepengine.data.messages import RefusalPart, TextPart, ThinkingPart
from stepengine.data.models import ModelDelta, ModelReply, TextChunk, ThinkingChunk
from stepengine.data.usage import Usage
from stepengine.errors import ModelError
from stepengine.models._aws_events import AWS_STREAM, AWSParser
from stepengine.models._failures import (
    RequestLabel,
    error_from_body,
    error_from_transport,
    find_request_id,
    make_protocol_error,
    make_truncated_error,
)
from stepengine.models._json import parse_json
from stepengine.models._reply import MAX_UNREAD_NAMES, add_unread_names
from stepengine.models._sse import SSEParser
from stepengine.models.base import Timeouts
from stepengine.models.keys import make_safe_excerpt

MAX_REPLY_BYTES = 64 * 1024 * 1024
"""A reply with pictures has some megabytes; a server that never stops must not fill the memory."""
MAX_TEXT_CHARS = 4 * 1024 * 1024
"""About a million tokens, which no model writes in one reply."""
SHOWN_CHARS = 200
"""About two lines of a reply that is not JSON, enough to recognize a proxy's page."""
DRAIN_SECONDS = 0.25
"""About the time for a new connection."""
DRAIN_BYTES = 64 * 1024
"""After its end a stream has a line or two; reading more is slower than a new connection."""
logger = logging.getLogger("stepengine.models")
T = TypeVar("T")


class Accumulator(ABC):
    """
    Assembles the events of one wire into the completed reply.

    Args:
        call: The request, for errors.
        model: The model's name in the request.
        request_id: The request id of the response's headers.

    Attributes:
        is_done: Whether the terminal marker was received.
    """

    decoder: ClassVar[staticmethod[[Mapping[str, Any], RequestLabel, str, str | None], ModelReply]]
    """Decodes a whole message; the other parameters are the arguments of the class."""
    usage_parser: ClassVar[staticmethod[[Mapping[str, Any]], Usage | None]]
    """Returns the usage in a whole message; ``None`` when it reports none."""

    def __init__(self, call: RequestLabel, model: str, request_id: str | None) -> None:
        self.is_done = False
        self._call = call
        self._model = model
        self._request_id = request_id
        self._unread: list[str] = []
        self._data: dict[str, Any] = {}
        """The members of the message that were received so far, its usage among them; streamed content may be elsewhere."""

    @property
    def has_reported_end(self) -> bool:
        """Whether the stream has reported its end; the body may still contain more, or stay open."""
        return self.is_done

    @property
    def usage(self) -> Usage | None:
        """The usage reported for the reply so far."""
        return self.usage_parser(self._data)

    @abstractmethod
    def add_event(self, name: str, data: bytes) -> list[ModelDelta]:
        """Add one event to the reply, and return its deltas."""

    @abstractmethod
    def finish(self, tail: bytes, *, is_clean: bool = True) -> ModelReply:
        """Return the reply; raise ``TruncatedReply`` if it is cut. *tail* is an incomplete event; *is_clean*: without a broken connection."""

    def _decode_message(self, message: Mapping[str, object]) -> ModelReply:
        """Return the reply in the assembled *message*, with the recorded unknown names."""
        return add_unread_names(self.decoder(message, self._call, self._model, self._request_id), self._unread)

    def _record_unknown_names(self, *names: str) -> None:
        """Record the names of unknown events and members, about 20 at most; the reply reports them."""
        if len(self._unread) < MAX_UNREAD_NAMES:
            self._unread += [name for name in names if name not in self._unread]

    def _make_stream_error(self, event: Mapping[str, object]) -> ModelError:
        """Return the error for an error event, with the usage so far."""
        return error_from_body(event, None, {}, self._call, self.usage)

    def _raise_protocol_error(self, reason: str) -> NoReturn:
        """Raise the retryable error for a stream that violates its protocol, with the usage so far."""
        raise make_protocol_error(self._call, reason, self.usage)

    def _raise_truncated_error(self, reason: str) -> NoReturn:
        """Raise ``TruncatedReply`` for a stream that ended too early, with the usage so far."""
        raise make_truncated_error(self._call, reason, self.usage)


class ReplyReader:
    """Parses the bytes of a streamed reply and feeds the events into an accumulator."""

    def __init__(
        self, accumulator: Accumulator, call: RequestLabel, parser: SSEParser | AWSParser | None = None
    ) -> None:
        self.event_count = 0
        self._accumulator = accumulator
        self._call = call
        self._parser = parser or SSEParser()
        self._size = 0
        self._text = 0

    @property
    def is_done(self) -> bool:
        """Whether the terminal marker was received, after which all bytes are ignored."""
        return self._accumulator.is_done

    @property
    def has_reported_end(self) -> bool:
        """Whether the stream has reported its end, after which silence is no error."""
        return self._accumulator.has_reported_end

    @property
    def usage(self) -> Usage | None:
        """The usage reported for the reply so far."""
        return self._accumulator.usage

    def feed(self, chunk: bytes) -> list[ModelDelta]:
        """
        Return the deltas that *chunk* adds to the reply; raise ``ModelError`` for an error event, invalid bytes or a too large reply.

        Raises:
            ModelError: for an error event, a protocol error, and a reply above a size limit.
        """
        # Counted before the reply is assembled, so that a huge one never fills the memory (reliability:MP24).
        self._size += len(chunk)
        if self._size > MAX_REPLY_BYTES:
            raise make_too_large_error(self._call, f"{MAX_REPLY_BYTES} bytes", self.usage)
        deltas: list[ModelDelta] = []
        taken = self._accumulator
        # As `decode_or_raise_protocol_error`, but once for all events of a piece, because a call for each event would slow every token.
        try:
            for name, data in self._parser.feed(chunk):
                if taken.is_done:
                    break
                self.event_count += name != "ping"
                deltas += taken.add_event(name, data)
        except ModelError:
            raise
        except Exception as error:  # noqa: BLE001 - see `decode_or_raise_protocol_error`
            broken = _describe_decode_error(error)
        else:
            self._count_text_or_raise(deltas)
            return deltas
        raise make_protocol_error(self._call, broken, self.usage)

    def _count_text_or_raise(self, deltas: list[ModelDelta]) -> None:
        """Count the characters of text in *deltas*; raise ``ModelError`` if the reply exceeds the limit."""
        for delta in deltas:
            if isinstance(delta, (TextChunk, ThinkingChunk)):
                self._text += len(delta.text)
        if self._text > MAX_TEXT_CHARS:
            raise make_too_large_error(self._call, f"{MAX_TEXT_CHARS} characters of text", self.usage)

    def finish(self, *, is_clean: bool = True) -> ModelReply:
        """
        Return the completed reply after the last byte; raise ``TruncatedReply`` if its end is missing.

        Raises:
            ModelError: ``TruncatedReply`` when the terminal marker is missing.
        """
        tail = self._parser.tail
        return decode_or_raise_protocol_error(
            self._call,
            lambda: require_reply_text_size(self._accumulator.finish(tail, is_clean=is_clean), self._call),
            lambda: self.usage,
        )


def decode_or_raise_protocol_error(
    call: RequestLabel, decode: Callable[[], T], get_usage: Callable[[], Usage | None] = lambda: None
) -> T:
    """
    Return the result of *decode*; any error other than a ``ModelError`` becomes a protocol error.

    Decoders are pure, so any other error than a ``ModelError`` means an invalid reply.

    Raises:
        ModelError: for a reply that violates its protocol.
    """
    try:
        return decode()
    except ModelError:
        raise
    # Decoders read many members that may be missing or of a wrong type. Checks for each would be most of their code, so
    # any exception counts as a protocol error.
    except Exception as error:  # noqa: BLE001 - see above
        what = _describe_decode_error(error)
    # Raised outside the `except`, so that the error has no context, whose frames would hold the reply.
    raise make_protocol_error(call, what, get_usage())


def _describe_decode_error(error: Exception) -> str:
    """Return the reason for a body that cannot be decoded, with the class and text of *error*."""
    return f"it cannot be read ({type(error).__name__}: {error})"


def parse_json_lines(content: bytes, call: RequestLabel) -> list[Mapping[str, Any]]:
    """
    Return the objects of a body with one JSON object in each line; raise ``ModelError`` for any other body.

    Raises:
        ModelError: for any other body.
    """
    try:
        found = [parse_json(line) for line in content.splitlines() if line.strip()]
    except ValueError:
        found = [None]
    if not all(isinstance(each, Mapping) for each in found):
        raise make_protocol_error(call, "it does not have one JSON object in each line", None)
    return found


def require_reply_text_size(reply: ModelReply, call: RequestLabel) -> ModelReply:
    """Return *reply*; raise ``ModelError`` if its text exceeds the limit of characters."""
    texts = [part.text for part in reply.content if isinstance(part, TextPart | ThinkingPart | RefusalPart)]
    if sum(map(len, texts)) > MAX_TEXT_CHARS:
        raise make_too_large_error(call, f"{MAX_TEXT_CHARS} characters of text", reply.usage)
    return reply


def make_too_large_error(call: RequestLabel, limit: str, usage: Usage | None = None) -> ModelError:
    """Return the error for a reply above a size limit; it is not retryable."""
    msg = f"the reply of {call.model!r} is longer than {limit} and was cut"
    return ModelError(msg, kind="too_large", usage=usage or Usage(at_least=True))


@frozen
class HttpExchange:
    """
    A response with its body still unread.

    Attributes:
        response: The HTTP library's response.
        call: The request, for errors.
        timeouts: The time limits of the body.
        started: The time of the request, by the event loop's clock.
    """

    response: Any
    call: RequestLabel
    timeouts: Timeouts
    started: float

    @property
    def request_id(self) -> str | None:
        """The provider's id of the request."""
        return find_request_id(self.response.headers)

    @property
    def is_event_stream(self) -> bool:
        """Whether the content type is that of an event stream."""
        kind = self.response.headers.get("content-type", "").lower()
        return "text/event-stream" in kind or AWS_STREAM in kind

    @property
    def new_parser(self) -> SSEParser | AWSParser:
        """A new parser for the event stream of the response, at each access."""
        kind = self.response.headers.get("content-type", "").lower()
        return AWSParser(self.call) if AWS_STREAM in kind else SSEParser()

    async def read_content(self, max_bytes: int | None = None) -> bytes:
        """
        Return the whole decompressed body; raise ``ModelError`` if it is cut, slow or above *max_bytes* (by default the limit of a reply).

        Raises:
            ModelError: when it ends early, is too slow or too long.
        """
        import httpx2

        max_bytes = MAX_REPLY_BYTES if max_bytes is None else max_bytes
        pieces: list[bytes] = []
        size = 0
        failure: BaseException
        try:
            async with asyncio.timeout_at(self.started + self.timeouts.total):
                async for piece in self.response.aiter_bytes():
                    pieces.append(piece)
                    size += len(piece)
                    if size > max_bytes:
                        raise make_too_large_error(self.call, f"{max_bytes} bytes")
            return b"".join(pieces)
        except TimeoutError:
            failure = make_timeout_error(self.call, "total", self.timeouts)
        except (httpx2.HTTPError, httpx2.StreamError, OSError) as error:
            failure = error_from_transport(error, self.call)
        raise failure

    def parse_json_object(self, content: bytes) -> Mapping[str, Any]:
        """
        Return the JSON object in *content*, also from a list with only this object; raise ``ModelError`` for other content.

        Raises:
            ModelError: for any other content; the message quotes its start.
        """
        kind = self.response.headers.get("content-type", "").partition(";")[0].strip().lower()
        try:
            data = parse_json(content)
        except ValueError:
            data = None
        # Gemini's compatible endpoint wraps errors into a list of one.
        if isinstance(data, list) and len(data) == 1:
            data = data[0]
        if isinstance(data, Mapping):
            return data
        begin = make_safe_excerpt(content[: 2 * SHOWN_CHARS].decode("utf-8", "replace"), SHOWN_CHARS)
        what = make_safe_excerpt(kind, SHOWN_CHARS) or "something"
        msg = f"{self.call.provider} answered with {what}, which is not a reply of {self.call.model_and_address}: {begin!r}"
        raise ModelError(msg, retryable=kind != "text/html", kind="protocol", request_id=self.request_id)


def make_timeout_error(call: RequestLabel, limit: str, timeouts: Timeouts, usage: Usage | None = None) -> ModelError:
    """Return the retryable error for a call that exceeded one of its time limits."""
    what = {
        "first_byte": "sent nothing for",
        "idle": "paused in the middle of its reply for",
        "silence": "sent only keep-alives for",
        "total": "did not finish its reply within",
    }[limit]
    msg = (
        f"{call.provider} {what} {getattr(timeouts, limit):g} s after a request for {call.model_and_address}; if it needs longer, "
        f"raise Timeouts.{limit}"
    )
    return ModelError(msg, retryable=True, kind="timeout", usage=usage)


class ReplyBody:
    """
    The body of a streamed reply, piece by piece.

    Args:
        exchange: The response.
        reader: The reader of the reply, which knows events and usage.
        chunks: The iterator over the pieces.

    Attributes:
        has_ended: Whether there are no more pieces.
        is_clean: Whether the body is still open or ended properly; false after a timeout or a broken connection.
    """

    __slots__ = (
        "_alarm",
        "_begun",
        "_chunks",
        "_exchange",
        "_has_come",
        "_patience",
        "_reader",
        "has_ended",
        "is_clean",
    )

    def __init__(self, exchange: HttpExchange, reader: ReplyReader, chunks: AsyncIterator[bytes]) -> None:
        self.has_ended = False
        self.is_clean = True
        self._exchange = exchange
        self._reader = reader
        self._chunks = chunks
        self._patience = _WaitLimits(exchange, asyncio.get_running_loop().time(), reader.event_count)
        self._alarm = _WaitTimer()
        self._has_come = False
        self._begun: tuple[Any, object] | BaseException | None = None

    # A plain function, because another generator would slow every token. A started wait must be awaited at once by
    # `wait_for_piece`: the consumer of a delta may continue in another task or in a scope of its own.
    def read_or_start_wait(self) -> bytes | None:
        """Return the next piece if it is available; else start a wait, which ``wait_for_piece`` must finish, and return ``None``."""
        step = anext(self._chunks).__await__()
        try:
            self._begun = step, next(step)
        except StopIteration as came:
            self._has_come = True
            piece: bytes = came.value
            return piece
        except BaseException as error:  # noqa: BLE001 - see `_is_clean_end_or_raise`
            self._begun = error
        return None

    async def wait_for_piece(self) -> bytes | None:
        """
        Finish the wait of ``read_or_start_wait`` and return the piece, ``None`` at the body's end; raise ``ModelError`` after a time limit.

        Raises:
            ModelError: when a time limit passes.
        """
        begun, self._begun = self._begun, None
        piece: bytes | None = None
        ended = begun if isinstance(begun, BaseException) else None
        if isinstance(begun, tuple):
            if self._has_come:
                self._patience.record_piece(asyncio.get_running_loop().time(), self._reader.event_count)
            self._has_come = True
            try:
                piece = await self._alarm.await_started_step(*begun, self._patience.get_earliest_deadline())
            except (Exception, StopAsyncIteration) as error:  # noqa: BLE001 - see `_is_clean_end_or_raise`
                ended = error
        exchange, reader = self._exchange, self._reader
        self.has_ended = piece is None
        self.is_clean = ended is None or _is_clean_end_or_raise(ended, exchange.call)
        # After a reported end silence is no error: some servers leave the connection open.
        if isinstance(ended, TimeoutError) and not reader.has_reported_end:
            raise make_timeout_error(
                exchange.call, self._patience.get_earliest_limit_name(), exchange.timeouts, reader.usage
            )
        return piece

    def close(self) -> None:
        """Cancel the timer."""
        self._alarm.cancel()


class _WaitLimits:
    """The time limits of the wait for the next piece of a body, by the event loop's clock."""

    __slots__ = ("_events", "_is_first", "_last", "_progress", "_said", "_timeouts")

    def __init__(self, exchange: HttpExchange, now: float, event_count: int) -> None:
        self._timeouts = exchange.timeouts
        self._is_first = True
        self._last = self._progress = exchange.started
        self._said = now
        self._events = event_count

    def record_piece(self, now: float, event_count: int) -> None:
        """Record the arrival of a piece at the time *now*; it counts as progress if *event_count* changed."""
        self._is_first = False
        self._last = now
        if event_count != self._events:
            self._events = event_count
            self._said = self._progress = now

    # Three limits run at once: for the next byte, for the next event with content (not keep-alives), and for the whole.
    # The first one to expire names the failure, because their remedies differ.
    def _list_deadlines(self) -> tuple[float, float, float]:
        """Return the deadlines for the whole call, for the next event with content, and for the next byte."""
        timeouts = self._timeouts
        silent = timeouts.first_byte if self._is_first else timeouts.idle
        return self._progress + timeouts.total, self._said + timeouts.silence, self._last + silent

    def get_earliest_deadline(self) -> float:
        return min(self._list_deadlines())

    def get_earliest_limit_name(self) -> str:
        """Return the name of the earliest limit, a member of ``Timeouts``."""
        limits = self._list_deadlines()
        return ("total", "silence", "first_byte" if self._is_first else "idle")[limits.index(min(limits))]


class _WaitTimer:
    """
    One timer that limits a sequence of waits, one at a time.

    ``asyncio.timeout_at`` would create and cancel a timer for each wait, which costs a sixth of the time per token. This timer
    is restarted only if it fires too early, or if a wait has an earlier limit.
    """

    __slots__ = ("_due", "_has_rung", "_loop", "_task", "_timer")

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[Any] | None = None
        self._due = 0.0
        self._has_rung = False

    async def await_started_step(self, step: Any, yielded: object, deadline: float) -> bytes:
        """
        Await the rest of a started *step* and return its bytes; raise ``TimeoutError`` at the time *deadline*.

        Raises:
            TimeoutError: at the time *deadline*, by the event loop's clock.
        """
        self._task = task = asyncio.current_task()
        assert task is not None  # noqa: S101 - only a task waits
        self._due = deadline
        if self._timer is None or deadline < self._timer.when():
            self._restart_timer()
        cancelling = task.cancelling()
        try:
            return await _StartedAwait(step, yielded)
        except asyncio.CancelledError as stopped:
            # A cancellation of the task itself, at the same time or earlier, is passed on.
            if self._has_rung and task.cancelling() - 1 <= cancelling:
                raise TimeoutError from stopped
            raise
        finally:
            self._task = None
            if self._has_rung:
                self._has_rung = False
                task.uncancel()

    def cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _restart_timer(self) -> None:
        """Replace the timer by one for the current deadline."""
        self.cancel()
        self._timer = self._loop.call_at(self._due, self._cancel_task_or_restart)

    def _cancel_task_or_restart(self) -> None:
        """Cancel the waiting task at its deadline; restart a timer that fired before it."""
        timer, self._timer = self._timer, None
        if self._task is None or timer is None:
            return
        if timer.when() < self._due:
            self._restart_timer()
        else:
            self._has_rung = True
            self._task.cancel()


@asynccontextmanager
async def open_reply_body(exchange: HttpExchange, reader: ReplyReader) -> AsyncGenerator[ReplyBody]:
    """
    Yield the body of a reply for *reader*; afterwards read the rest of the body briefly, and close it.

    Pieces are read below the HTTP library's own generators, which split them again and would slow every token.
    """
    response = exchange.response
    chunks = aiter(response.aiter_bytes() if response.is_stream_consumed else response.stream)
    body = ReplyBody(exchange, reader, chunks)
    try:
        yield body
        if not body.has_ended:
            await drain_chunks_briefly(chunks)
    finally:
        body.close()
        close = getattr(chunks, "aclose", None)
        if close is not None:
            await close()


def _is_clean_end_or_raise(error: BaseException, call: RequestLabel) -> bool:
    """
    Return whether *error* is the proper end of a body; false for a timeout or a broken connection. Raise any other error.

    Raises:
        BaseException: any other error of the transport, as a ``ModelError``, and errors that do not concern the body.
    """
    import httpx2

    if isinstance(error, StopAsyncIteration | TimeoutError):
        return isinstance(error, StopAsyncIteration)
    if not isinstance(error, httpx2.HTTPError | httpx2.StreamError | OSError):
        raise error
    failure = error_from_transport(error, call)
    is_cut = isinstance(failure, ModelError) and failure.kind == "connection"
    if isinstance(error, httpx2.TimeoutException) or not is_cut:
        raise failure
    logger.debug("the connection to %s broke: %s", call.provider, type(error).__name__)
    return False


class _StartedAwait:
    """The rest of an awaitable after its first *step*, which yielded *waits* to the event loop."""

    __slots__ = ("_step", "_waits")

    def __init__(self, step: Any, waits: object) -> None:
        self._step = step
        self._waits = waits

    def __await__(self) -> Generator[Any, Any, bytes]:
        step, waits = self._step, self._waits
        while True:
            try:
                yield waits
            except BaseException as error:  # noqa: BLE001 - passed to the awaitable, most of all a cancellation
                try:
                    waits = step.throw(error)
                except StopIteration as came:
                    return bytes(came.value)
            else:
                rest: bytes = yield from step
                return rest


async def drain_chunks_briefly(chunks: AsyncIterator[bytes]) -> None:
    """Read the rest of a body for at most 0.25 seconds or 64 KiB, so that the connection can be reused; ignore errors."""
    import httpx2

    # A connection can be reused only if its body was read to the end. The limits are short, because a new connection is
    # cheaper than a long wait.
    seen = 0
    with suppress(TimeoutError, httpx2.HTTPError, httpx2.StreamError, OSError):
        async with asyncio.timeout(DRAIN_SECONDS):
            async for chunk in chunks:
                seen += len(chunk)
                if seen > DRAIN_BYTES:
                    return
