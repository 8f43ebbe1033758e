"""
Send the requests of aiohttp by ``Exchanges``: google-genai's async client uses aiohttp where it is installed.

A client middleware sees each request as it is sent, redirects included, and may answer it. Sessions are given theirs when they are
made, so the methods of ``ClientSession`` are replaced by ones that add it to a request.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from functools import wraps
from importlib import import_module
from types import SimpleNamespace
from typing import Any

from stepengine.errors import DataError
from stepengine.testing.cassette_files import RecordedRequest, RecordedResponse
from stepengine.testing.exchanges import FRAMING, PASSING, Exchange, Exchanges, bypass_patches
from stepengine.testing.httpx_exchanges import split_events

__tracebackhide__ = True  # a failed test ends at its author's line

METHODS = ("request", "get", "options", "head", "post", "put", "patch", "delete")
BUFFER = 1 << 26
UPGRADED = 101


def install(module: Any, exchanges: Exchanges) -> Callable[[], None]:
    """
    Replace the request methods of aiohttp sessions, and return a function that restores them.

    Raises:
        DataError: if this aiohttp has no client middlewares.
    """
    if not hasattr(module, "ClientMiddlewareType"):
        msg = f"aiohttp {module.__version__} cannot be recorded or replayed: pip install 'aiohttp>=3.12'"
        raise DataError(msg)
    middleware = _make_middleware(module, exchanges)
    originals = {name: getattr(module.ClientSession, name) for name in METHODS}
    request = module.request

    def with_middleware(send: Any) -> Any:
        @wraps(send)
        def send_recorded(session: Any, *args: Any, **kwargs: Any) -> Any:
            given = kwargs.pop("middlewares", None)
            # There is no public way to those of a session, and a request's own replace them.
            before = getattr(session, "_middlewares", ()) if given is None else given
            return send(session, *args, middlewares=(*before, middleware), **kwargs)

        return send_recorded

    @wraps(request)
    def request_once(*args: Any, **kwargs: Any) -> Any:
        return request(*args, middlewares=(*kwargs.pop("middlewares", ()), middleware), **kwargs)

    for name, send in originals.items():
        setattr(module.ClientSession, name, with_middleware(send))
    module.request = request_once

    def restore() -> None:
        for name, send in originals.items():
            setattr(module.ClientSession, name, send)
        module.request = request

    return restore


def _make_middleware(module: Any, exchanges: Exchanges) -> Any:
    replayed = _make_replayed_class(module)
    running: set[asyncio.Task[None]] = set()

    async def middleware(request: Any, send: Any) -> Any:
        if PASSING.get():
            return await send(request)
        recorded = await _read_request(request)
        reply = exchanges.find_reply(recorded)
        if reply is not None:
            return replayed(module, reply, request)
        exchange = exchanges.start(recorded)
        with bypass_patches(exchange):
            response = await send(request)
        if exchange is not None and _start_reply(exchange, response):
            live, response.content = response.content, _make_reader(module)
            task = asyncio.create_task(_record_and_forward(live, response.content, exchange))
            running.add(task)
            task.add_done_callback(running.discard)
        return response

    return middleware


async def _read_request(request: Any) -> RecordedRequest:
    body = request.body
    data = await body.as_bytes() if hasattr(body, "as_bytes") else bytes(body or b"")
    return RecordedRequest(request.method, str(request.url), [*request.headers.items()], data)


def _start_reply(exchange: Exchange, response: Any) -> bool:
    # The body arrives decompressed.
    headers = [(name, value) for name, value in response.headers.items() if name.lower() != "content-encoding"]
    if response.status == UPGRADED:
        exchange.fail()
        return False
    return exchange.start_reply(response.status, response.reason or "", headers)


async def _record_and_forward(live: Any, reader: Any, exchange: Exchange) -> None:
    """Record a body while it arrives, and pass it on to what the program reads."""
    try:
        async for piece in live.iter_any():
            exchange.add(piece)
            reader.feed_data(piece)
    except BaseException as error:
        exchange.end(read_to_end=False)
        reader.set_exception(error)
        if not isinstance(error, Exception):
            raise
    else:
        exchange.end(read_to_end=True)
        reader.feed_eof()


def _make_reader(module: Any) -> Any:
    """Return a reader that is filled here and has no connection to slow down."""
    idle = SimpleNamespace(
        _reading_paused=False, connected=True, pause_reading=lambda: None, resume_reading=lambda *_, **__: None
    )
    return module.StreamReader(idle, BUFFER, loop=asyncio.get_running_loop())


def _make_replayed_class(module: Any) -> Any:
    multidict = import_module("multidict")  # aiohttp brings it
    further = {}
    if "stream_writer" in inspect.signature(module.ClientResponse.__init__).parameters:
        further["stream_writer"] = SimpleNamespace(output_size=0)

    class Replayed(module.ClientResponse):  # type: ignore[misc]
        """A response that plays a recorded reply."""

        def __init__(self, module: Any, reply: RecordedResponse, request: Any) -> None:
            loop = asyncio.get_running_loop()
            super().__init__(
                request.method, request.url, writer=None, continue100=None, timer=None, traces=[], session=None,
                request_info=request.request_info, loop=loop, **further,
            )  # fmt: skip
            headers = multidict.CIMultiDict([(n, v) for n, v in reply.headers if n not in FRAMING])
            self._headers = multidict.CIMultiDictProxy(headers)
            self._raw_headers = tuple([(n.encode(), v.encode()) for n, v in headers.items()])
            self.version = module.HttpVersion11
            self.status, self.reason = reply.status, reply.reason
            self.content = _make_reader(module)
            for piece in split_events(reply):
                self.content.feed_data(piece)
            self.content.feed_eof()

    return Replayed
