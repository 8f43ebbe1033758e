"""Serve an application with uvicorn until this process is stopped. The limits of connections are in ``workspace.http_connections``."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING

from stepengine.errors import DefinitionError
from stepengine.workspace.http_connections import limit_connection_logs, uvicorn_connection_options

if TYPE_CHECKING:
    from stepengine.server.application import Application


async def serve_until_signal(served: Application, host: str, port: int, on_listening: Callable[[str], object]) -> None:
    """
    Serve requests until SIGTERM or SIGINT.

    Args:
        served: The application.
        host: The address.
        port: The port; 0 for a free one.
        on_listening: Is called with the URL once the server listens.

    Raises:
        DefinitionError: If the address cannot be used, such as a port of another server; no run was resumed.
        StepEngineError: If the store of the runs cannot be used.
    """
    import uvicorn
    from uvicorn.protocols.http.h11_impl import H11Protocol

    try:
        # Before the runs are resumed: without an address they would be interrupted again.
        bound = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        msg = f"the server cannot listen on {host}:{port}: {error.strerror or error}"
        raise DefinitionError(msg) from None
    config = uvicorn.Config(
        served,
        log_level="warning",
        # With its own lifespan uvicorn would report a failed start as a traceback alone.
        lifespan="off",
        server_header=False,
        **uvicorn_connection_options(H11Protocol),
        # A client that reads slowly would delay the end.
        timeout_graceful_shutdown=1,
    )
    server = uvicorn.Server(config)

    def stop_server() -> None:
        server.should_exit = True
        served.end_event_streams()

    # uvicorn would raise the signal again after its end, which would kill the process.
    server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign,assignment]
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop_server)
    try:
        with bound:
            async with served.lifespan():
                with limit_connection_logs():
                    on_listening(_get_url(bound))
                    await server.serve([bound])
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


def _get_url(bound: socket.socket) -> str:
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
