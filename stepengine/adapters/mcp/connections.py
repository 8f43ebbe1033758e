"""The connections of one source of tools: one for each event loop and, where requests are signed for a run, for each owner."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from stepengine.adapters.mcp._caps import OWNER_IDLE_SECONDS
from stepengine.adapters.mcp.connection import ConnectionOptions, ServerConnection
from stepengine.adapters.mcp.http import RUN, McpRun
from stepengine.workspace.after_fork import hold_references

END_SECONDS = 10.0
"""How long the end of a server in another event loop is waited for."""


def needs_run_for_headers(auth: object) -> bool:
    """Return whether *auth* is a function of the run, and not an ``Auth`` object for all runs."""
    return callable(auth) and not hasattr(auth, "async_auth_flow")


class ServerConnections(dict[tuple[int, str], ServerConnection]):
    """
    Connections by event loop and owner, shared by all engines with the same source.

    Args:
        options: How the server is reached. A function as ``auth`` gives each owner a connection of its own.
    """

    def __init__(self, options: ConnectionOptions) -> None:
        super().__init__()
        self._options = options
        self._by_owner = needs_run_for_headers(options.auth)
        self._closing: set[asyncio.Task[None]] = set()

    def get_connection_and_add_user(self, run: McpRun, engine: object) -> ServerConnection:
        """
        Return the connection for a run in the running event loop, and register *engine* as its user.

        Later requests of this task belong to that run. With a session for each owner, idle sessions are closed.
        """
        RUN.set(run)
        loop = asyncio.get_running_loop()
        # A session has the rights of its owner, so no other owner may use it.
        key = (id(loop), run.owner if self._by_owner else "")
        found = self.get(key)
        if found is None or found.loop is not loop:
            for closed in [k for k, c in list(self.items()) if c.loop.is_closed()]:
                self.pop(closed, None)
            found = self[key] = ServerConnection(self._options)
        found.add_user(engine)
        found.used_at = loop.time()
        if self._by_owner:
            self._close_idle_sessions(loop, found)
        return found

    def _close_idle_sessions(self, loop: asyncio.AbstractEventLoop, used: ServerConnection) -> None:
        """Close the sessions of other owners that were not used for long. They are opened again when they are needed."""
        before = loop.time() - OWNER_IDLE_SECONDS - self._options.timeout
        for key, one in list(self.items()):
            if one is not used and one.loop is loop and one.is_idle and one.used_at < before:
                self.pop(key, None)
                closing = loop.create_task(one.aclose())
                self._closing.add(closing)
                closing.add_done_callback(self._closing.discard)

    def drop_after_fork(self) -> None:
        """Drop all connections in a forked child, since they belong to the parent."""
        hold_references(list(self.values()))
        self.clear()
        self._closing.clear()

    async def aclose(self, engine: object, *, is_shared: bool, blocked: object) -> None:
        """
        End the connections in every event loop; those in a stopped loop are only signalled.

        Args:
            engine: The source of the engine that is closed.
            is_shared: Whether a connection that another engine uses stays open.
            blocked: The event loop that is blocked by the caller, or ``None``.
        """
        here = asyncio.get_running_loop()
        closing = [task for task in self._closing if task.get_loop() is here]
        if closing:
            await asyncio.wait(closing)
        for key, connection in list(self.items()):
            if is_shared and not connection.remove_user(engine):
                continue
            self.pop(key, None)
            if connection.loop is here:
                await connection.aclose()
            elif connection.loop is blocked:
                connection.loop.call_soon(connection.end_without_waiting)
            elif connection.loop.is_running():
                ending = asyncio.run_coroutine_threadsafe(connection.aclose(), connection.loop)
                with suppress(TimeoutError):
                    await asyncio.wait_for(asyncio.wrap_future(ending), END_SECONDS)
