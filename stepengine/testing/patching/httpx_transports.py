"""Send the requests of httpx2 and httpx by ``Exchanges``: every client of theirs that reaches the network has one of two transports."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from stepengine.testing.exchanges import PASSING, Exchanges, bypass_patches
from stepengine.testing.httpx_exchanges import HttpxExchanges, split_events

__tracebackhide__ = True  # a failed test ends at its author's line


def install(module: Any, exchanges: Exchanges) -> Callable[[], None]:
    """Replace the request methods of the transports of *module*, and return a function that restores them."""
    ours = HttpxExchanges(module)
    sync, asynchronous = module.HTTPTransport, module.AsyncHTTPTransport
    send, send_async = sync.handle_request, asynchronous.handle_async_request

    def handle_request(self: Any, request: Any) -> Any:
        if PASSING.get():
            return send(self, request)
        request.read()
        recorded = ours.read_request(request)
        reply = exchanges.find_reply(recorded)
        if reply is not None:
            return ours.make_response(reply, request, split_events(reply))
        exchange = exchanges.start(recorded)
        with bypass_patches(exchange):
            response = send(self, request)
        return ours.watch(response, exchange)

    async def handle_async_request(self: Any, request: Any) -> Any:
        if PASSING.get():
            return await send_async(self, request)
        await request.aread()
        recorded = ours.read_request(request)
        reply = exchanges.find_reply(recorded)
        if reply is not None:
            return ours.make_response(reply, request, split_events(reply))
        exchange = exchanges.start(recorded)
        with bypass_patches(exchange):
            response = await send_async(self, request)
        return ours.watch(response, exchange)

    sync.handle_request, asynchronous.handle_async_request = handle_request, handle_async_request

    def restore() -> None:
        sync.handle_request, asynchronous.handle_async_request = send, send_async

    return restore
