"""
Uvicorn servers for tests. They stop at once; uvicorn polls ten times a second.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import uvicorn

from tests.waits import HANG_SECONDS, LOOK_SECONDS


class PromptServer(uvicorn.Server):
    """
    A server that is told to end by an event, and that waits in short steps for the ends of its connections.
    """

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.startup_ended = threading.Event()
        """Whether it has started, or never will."""

    async def startup(self, sockets: Any = None) -> None:
        self._loop, self._stopping = asyncio.get_running_loop(), asyncio.Event()
        await super().startup(sockets)
        self.startup_ended.set()

    async def main_loop(self) -> None:
        await self.on_tick(0)
        await self._stopping.wait()

    def stop(self) -> None:
        """
        Stop the server. Thread-safe.
        """
        self._loop.call_soon_threadsafe(self._stopping.set)

    async def shutdown(self, sockets: Any = None) -> None:
        for server in self.servers:
            server.close()
        state = self.server_state
        for connection in list(state.connections):
            connection.shutdown()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.config.timeout_graceful_shutdown):
                while state.connections or state.tasks:  # noqa: ASYNC110 - uvicorn tells of no end
                    await asyncio.sleep(LOOK_SECONDS)
        for task in list(state.tasks):
            task.cancel()
        await self.lifespan.shutdown()

    @property
    def port(self) -> int:
        return int(self.servers[0].sockets[0].getsockname()[1])


@contextlib.contextmanager
def serve_in_thread(config: uvicorn.Config) -> Iterator[int]:
    """
    Serve within the block by a thread with an event loop of its own, and give the port.
    """
    server = PromptServer(config)

    def run() -> None:
        try:
            server.run()
        finally:
            server.startup_ended.set()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        assert server.startup_ended.wait(HANG_SECONDS), "the server hangs"
        assert server.started, "the server did not start"
        yield server.port
    finally:
        if server.started:
            server.stop()
        thread.join()


@contextlib.asynccontextmanager
async def serve_in_loop(config: uvicorn.Config) -> AsyncIterator[int]:
    """
    Serve within the block by the event loop of the test, and give the port.
    """
    config.load()
    server = PromptServer(config)
    server.lifespan = config.lifespan_class(config)
    await server.startup()
    task = asyncio.create_task(server.main_loop())
    try:
        yield server.port
    finally:
        server.stop()
        await task
        await server.shutdown()
