"""
Servers of this machine for tests: one runs as long as somebody is within its block, and nothing is left of it.
"""

from __future__ import annotations

import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

__all__ = ("NO_TLS", "Quiet", "served")

NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""What a client verifies with: nothing here is encrypted, and to read the certificates of the system takes longer than a test."""


class Quiet(BaseHTTPRequestHandler):
    """
    Answers requests, and keeps no log of them.
    """

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def served(handler: type[Quiet]) -> Iterator[str]:
    """
    Serve on a port of loopback, a thread for each connection, and give the address without a slash at its end.
    """
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = False
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
