"""
Send the requests of httpx2 and httpx by ``Exchanges`` that go to a transport of a program's own.

Most of these transports send by another that is patched, such as one that adds a header to each request: they run in a replay, too, and
nothing is done here. The reply of one that does not, since it sends by itself or makes the reply up, is recorded with its name, and is
played in its place. An application that runs in this process is part of the program and never recorded as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from stepengine.testing.cassette_files import Interaction
from stepengine.testing.exchanges import PASSING, SEEN, Exchanges
from stepengine.testing.httpx_exchanges import HttpxExchanges, make_cut_reply_error, split_body_into_events
from stepengine.testing.recorded_errors import wait_for_cancellation

__tracebackhide__ = True  # a failed test ends at its author's line

APPLICATIONS = ("starlette.", "stepengine.testing.")
"""Modules whose transports pass requests on inside the process, or record them already."""


def patch_library(module: Any, exchanges: Exchanges) -> Callable[[], None]:
    """Patch the method that selects the transport of a request in the clients of *module*, and return a function that restores it."""
    plain = (module.HTTPTransport, module.AsyncHTTPTransport)
    applications = (module.ASGITransport, module.WSGITransport)
    clients = (module.Client, module.AsyncClient)
    before = [client._transport_for_url for client in clients]  # noqa: SLF001 - no public name stands between a client and its transport

    def patch_client(client: Any, find: Any, wrap: Any) -> None:
        """Replace the method of a client class that selects the transport of a request."""

        def find_and_wrap_transport(self: Any, url: Any) -> Any:
            transport = find(self, url)
            kind = type(transport)
            if kind in plain or isinstance(transport, applications) or kind.__module__.startswith(APPLICATIONS):
                return transport
            return wrap(transport, exchanges, module)

        client._transport_for_url = find_and_wrap_transport  # noqa: SLF001

    for client, find, wrap in zip(clients, before, (_SyncTransportRecorder, _AsyncTransportRecorder), strict=True):
        patch_client(client, find, wrap)

    def restore() -> None:
        """Restore the replaced methods."""
        for client, find in zip(clients, before, strict=True):
            client._transport_for_url = find  # noqa: SLF001

    return restore


class _TransportRecorder:
    def __init__(self, transport: Any, exchanges: Exchanges, module: Any) -> None:
        self._transport = transport
        self._name = f"{type(transport).__module__}.{type(transport).__qualname__}"
        self._exchanges = exchanges
        self._module = module
        self._convert = HttpxExchanges(module)

    def _find_recorded_reply(self, request: Any) -> Interaction | None:
        """Return the recorded reply of this transport; None if it has none, so that the transport is asked."""
        if PASSING.get() or not self._exchanges.has_replies_of_transport(self._name):
            return None
        return self._exchanges.find_interaction(self._convert.convert_request(request))

    def _play_interaction(self, interaction: Interaction, request: Any) -> Any:
        """Return the recorded response, or raise the recorded error."""
        if interaction.error is not None and not interaction.response.status:
            raise interaction.error
        error = interaction.error or make_cut_reply_error(self._module, interaction)
        return self._convert.make_response(
            interaction.response, request, split_body_into_events(interaction.response), error
        )

    def _record_or_replay_unseen_response(self, request: Any, response: Any, seen_addresses: list[str]) -> Any:
        """Return the response, recorded while it is read unless a patched library has seen the request; in a replay, the recorded one."""
        if seen_addresses or PASSING.get():
            return response
        recorded = self._convert.convert_request(request)
        if self._exchanges.is_replay_only:  # nothing says whether this transport has reached the network
            found = self._exchanges.find_interaction(recorded)
            return response if found is None else self._play_interaction(found, request)
        return self._convert.record_while_read(response, self._exchanges.start_recording(recorded, self._name))

    def _record_unseen_error(self, request: Any, error: BaseException, seen_addresses: list[str]) -> None:
        """Record the error of a request, unless a patched library has seen that request."""
        if seen_addresses or PASSING.get():
            return
        exchange = self._exchanges.start_recording(self._convert.convert_request(request), self._name)
        if exchange is not None:
            exchange.finish_with_error(error)


class _SyncTransportRecorder(_TransportRecorder):
    """A program's own transport whose replies are recorded or replayed."""

    def handle_request(self, request: Any) -> Any:
        """Return the recorded reply; without one, send by the program's transport and record the reply or the error."""
        request.read()
        found = self._find_recorded_reply(request)
        if found is not None:
            return self._play_interaction(found, request)
        with _collect_seen_addresses() as seen:
            try:
                response = self._transport.handle_request(request)
            except BaseException as error:
                self._record_unseen_error(request, error, seen)
                raise
        return self._record_or_replay_unseen_response(request, response, seen)


class _AsyncTransportRecorder(_TransportRecorder):
    """A program's own async transport whose replies are recorded or replayed."""

    async def handle_async_request(self, request: Any) -> Any:
        """Return the recorded reply; without one, send by the program's transport and record the reply or the error."""
        await request.aread()
        found = self._find_recorded_reply(request)
        if found is not None:
            await wait_for_cancellation(None if found.response.status else found.error)
            return self._play_interaction(found, request)
        with _collect_seen_addresses() as seen:
            try:
                response = await self._transport.handle_async_request(request)
            except BaseException as error:
                self._record_unseen_error(request, error, seen)
                raise
        return self._record_or_replay_unseen_response(request, response, seen)


@contextmanager
def _collect_seen_addresses() -> Iterator[list[str]]:
    """Yield a list that receives the addresses of requests and connections of patched libraries inside the block."""
    seen: list[str] = []
    token = SEEN.set(seen)
    try:
        yield seen
    finally:
        SEEN.reset(token)
