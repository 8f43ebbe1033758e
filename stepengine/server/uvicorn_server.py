"""Serve an application with uvicorn until this process is stopped. The limits of connections are in ``workspace.http_connections``."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from stepengine.errors import DefinitionError
from stepengine.workspace.http_connections import limit_connection_logs, uvicorn_connection_options

if TYPE_CHECKING:
    from stepengine.server.application import Application


async def serve_until_signal(served: Application, host: str, port: int, on_listening: Callable[[str], object]) -> bool:
    """
    Serve requests until SIGTERM or SIGINT; return False if the address could not be used.

    Args:
        served: The application.
        host: The address.
        port: The port; 0 for a free one.
        on_listening: Is called with the URL once the server listens.

    Returns:
        Whether the server listened; otherwise uvicorn's log has the reason.

    Raises:
        DefinitionError: If the address cannot be used, such as a port of another server; no run was resumed.
        StepEngineError: If the store of the runs cannot be used.
    """
    import uvicorn
    from uvicorn.protocols.http.h11_impl import H11Protocol

    try:
        # Before the runs are resumed, which would be interrupted again.
        socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
    except OSError as error:
        msg = f"the server cannot listen on {host}:{port}: {error.strerror or error}"
        raise DefinitionError(msg) from None
    config = uvicorn.Config(
        served,
        host=host,
        port=port,
        log_level="warning",
        # By uvicorn's own way what cannot begin is told with a traceback, and as nothing else.
        lifespan="off",
        server_header=False,
        **uvicorn_connection_options(H11Protocol),
        # Whoever is slow to read would hold the end up.
        timeout_graceful_shutdown=1,
    )
    server = uvicorn.Server(config)
    begin = server.startup

    async def start_and_report_url(sockets: Any = None) -> None:
        """Start the server, and call *on_listening* with its URL if it listens."""
        await begin(sockets)
        if server.started:
            on_listening(_get_server_url(server))

    def stop_server() -> None:
        """Let the server stop, and end its event streams."""
        server.should_exit = True
        served.end_event_streams()

    server.startup = start_and_report_url  # type: ignore[method-assign]
    # By uvicorn's own way a signal is raised again behind its end, and the process would be killed by it.
    server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign,assignment]
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop_server)
    try:
        async with served.lifespan():
            # uvicorn raises SystemExit where it cannot listen.
            with limit_connection_logs(), contextlib.suppress(SystemExit):
                await server.serve()
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
    return server.started


def _get_server_url(server: Any) -> str:
    """Return the URL of the first socket on which a server listens."""
    host, port = server.servers[0].sockets[0].getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
