"""The HTTP connections of a provider: one client per event loop, because connections belong to the loop that opened them."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any
from weakref import WeakKeyDictionary, finalize

import attrs

from stepengine.models.base import Timeouts
from stepengine.models.keys import Credentials
from stepengine.workspace.after_fork import hold_references, register_for_fork_reset


@attrs.define(eq=False)
class LoopClients:
    """
    The clients of one event loop.

    Attributes:
        client: The SDK's client.
        credentials: The client's key and the source of the key.
        http_client: The HTTP client with the connections.
        address: The base URL, for messages.
        request_count: The number of running requests.
        is_released: Whether to close the HTTP client after the last request.
    """

    client: Any
    credentials: Credentials
    http_client: Any
    address: str
    request_count: int = 0
    is_released: bool = False

    @asynccontextmanager
    async def lease_connections(self) -> AsyncIterator[None]:
        """Prevent the connections from being closed during the block."""
        self.request_count += 1
        try:
            yield
        finally:
            self.request_count -= 1
            if self.is_released:
                await self.close_when_unused()

    async def close_when_unused(self) -> None:
        """Close the connections now, or after the last running request, since engines may share a provider."""
        self.is_released = True
        if not self.request_count:
            await self.http_client.aclose()


class Connections:
    """
    The clients of a provider, by event loop.

    Args:
        owner: The provider, for warnings.
        transport: An ``httpx2.AsyncBaseTransport`` to use in place of the network.
        timeouts: Time limits of calls.
    """

    def __init__(self, owner: str, transport: Any, timeouts: Timeouts) -> None:
        self._owner = owner
        self.transport = transport
        self._timeouts = timeouts
        # Weak, so that connections do not outlive their loop.
        self._clients: WeakKeyDictionary[asyncio.AbstractEventLoop, LoopClients] = WeakKeyDictionary()
        self._unclosed: set[str] = set()
        register_for_fork_reset(self)
        finalize(self, _warn_of_unclosed, self._unclosed)

    def reset_after_fork(self) -> None:
        """Drop the parent's connections in a forked child process, which opens its own."""
        hold_references(self._clients)
        self._clients = WeakKeyDictionary()
        self._unclosed.clear()

    def find_loop_clients(self) -> LoopClients | None:
        """Return the clients of this event loop; ``None`` before the first request."""
        return self._clients.get(asyncio.get_running_loop())

    def add_loop_clients(self, clients: LoopClients) -> None:
        """Store the clients of this event loop."""
        self._clients[asyncio.get_running_loop()] = clients
        if self.transport is None:
            self._unclosed.add(self._owner)

    def create_http_client(self) -> Any:
        """Return a new HTTP client for an SDK; it follows no redirects and limits the size of responses."""
        import httpx2

        from stepengine.models._transport import decompress_and_limit_response, get_ssl_context

        # It accepts only gzip, which can be decompressed in bounded pieces. It follows no redirects, which would send the
        # key to another host (reliability:MP06). Its time limits are above ours, which ignore keep-alives.
        return httpx2.AsyncClient(
            headers={"accept-encoding": "gzip"},
            event_hooks={"response": [decompress_and_limit_response]},
            transport=self.transport,
            verify=get_ssl_context(),
            timeout=httpx2.Timeout(connect=self._timeouts.connect, read=self._timeouts.total, write=60.0, pool=60.0),
            limits=httpx2.Limits(max_connections=1000, max_keepalive_connections=100),
            follow_redirects=False,
        )

    async def close(self) -> None:
        """
        Close the clients of this event loop and of other running loops, each after its running requests.

        All clients are closed even if closing one fails.
        """
        self._unclosed.clear()
        async with AsyncExitStack() as stack:
            for loop, ready in list(self._clients.items()):
                self._clients.pop(loop, None)
                stack.push_async_callback(_close_in_loop, ready, loop)


async def _close_in_loop(ready: LoopClients, loop: asyncio.AbstractEventLoop) -> None:
    """Close the clients in their event loop *loop*, after their running requests; do nothing if that loop no longer runs."""
    if loop is asyncio.get_running_loop():
        await ready.close_when_unused()
    elif loop.is_running():
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(ready.close_when_unused(), loop))


def _warn_of_unclosed(unclosed: set[str]) -> None:
    """Warn of providers that were garbage-collected without being closed, because Python's own warning names only sockets."""
    for name in unclosed:
        msg = f"the connections of {name} were never closed; use `async with Engine(...)`, or its aclose() or close()"
        warnings.warn(msg, ResourceWarning, stacklevel=2)
