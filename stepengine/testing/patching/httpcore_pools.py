"""Send the requests of httpcore2 and httpcore by ``Exchanges``: transports of httpx2 and httpx, and those of programs, send by their pools."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from stepengine.testing.cassette_files import Interaction, RecordedRequest
from stepengine.testing.exchanges import PASSING, Exchange, Exchanges, bypass_patches, header_pairs_from_bytes
from stepengine.testing.httpx_exchanges import (
    PlayedBody,
    WatchedBody,
    header_pairs_to_bytes,
    make_cut_reply_error,
    split_body_into_events,
)
from stepengine.testing.recorded_errors import wait_for_cancellation

__tracebackhide__ = True  # a failed test ends at its author's line

PORTS = {b"http": 80, b"https": 443}


def patch_library(module: Any, exchanges: Exchanges) -> Callable[[], None]:
    """Replace the request methods of the pools of *module*, and return a function that restores them."""
    sync, asynchronous = module.ConnectionPool, module.AsyncConnectionPool
    send, send_async = sync.handle_request, asynchronous.handle_async_request

    def handle_request(self: Any, request: Any) -> Any:
        """Return the recorded reply; without one, send the request and record the reply or the error."""
        if PASSING.get():
            return send(self, request)
        body = b"".join(request.stream)
        recorded = _to_recorded_request(request, body)
        found = exchanges.find_interaction(recorded)
        if found is not None:
            return _play_interaction(module, found)
        exchange = exchanges.start_recording(recorded)
        with bypass_patches(exchange):
            response = send(self, _replace_body(module, request, body))
        return _record_response_body(response, exchange)

    async def handle_async_request(self: Any, request: Any) -> Any:
        """Return the recorded reply; without one, send the request and record the reply or the error."""
        if PASSING.get():
            return await send_async(self, request)
        body = b"".join([piece async for piece in request.stream])
        recorded = _to_recorded_request(request, body)
        found = exchanges.find_interaction(recorded)
        if found is not None:
            await wait_for_cancellation(None if found.response.status else found.error)
            return _play_interaction(module, found)
        exchange = exchanges.start_recording(recorded)
        with bypass_patches(exchange):
            response = await send_async(self, _replace_body(module, request, body))
        return _record_response_body(response, exchange)

    sync.handle_request, asynchronous.handle_async_request = handle_request, handle_async_request

    def restore() -> None:
        """Restore the replaced methods."""
        sync.handle_request, asynchronous.handle_async_request = send, send_async

    return restore


def _to_recorded_request(request: Any, body: bytes) -> RecordedRequest:
    """Return a request of httpcore with its *body* and its whole URL."""
    url = request.url
    host = f"[{url.host.decode()}]" if b":" in url.host and not url.host.startswith(b"[") else url.host.decode()
    port = "" if url.port in (None, PORTS.get(url.scheme)) else f":{url.port}"
    address = f"{url.scheme.decode()}://{host}{port}{url.target.decode('latin-1')}"
    return RecordedRequest(request.method.decode(), address, header_pairs_from_bytes(request.headers), body)


def _replace_body(module: Any, request: Any, body: bytes) -> Any:
    """Return *request* with the *body* that has been read from it, and can be read once only."""
    return module.Request(
        request.method, request.url, headers=request.headers, content=body, extensions=request.extensions
    )


def _play_interaction(module: Any, interaction: Interaction) -> Any:
    """Return the recorded reply, or raise the recorded error."""
    reply, error = interaction.response, interaction.error
    if error is not None and not reply.status:
        raise error
    extensions = {"http_version": b"HTTP/1.1"}
    if reply.reason:
        extensions["reason_phrase"] = reply.reason.encode("latin-1", errors="replace")
    body = PlayedBody(split_body_into_events(reply), error or make_cut_reply_error(module, interaction))
    return module.Response(
        reply.status, headers=header_pairs_to_bytes(reply.headers), content=body, extensions=extensions
    )


def _record_response_body(response: Any, exchange: Exchange | None) -> Any:
    """Return *response* with a body that records itself while it is read."""
    reason = response.extensions.get("reason_phrase", b"").decode("latin-1")
    if exchange is not None and exchange.start_reply(
        response.status, reason, header_pairs_from_bytes(response.headers)
    ):
        response.stream = WatchedBody(response.stream, exchange)
    return response
