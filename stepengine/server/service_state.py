"""``ServiceState``: whether a server process can start runs, and whether it stops."""

from __future__ import annotations

import asyncio


class ServiceState:
    """
    The state of a server process.

    Attributes:
        stopping: Is set when the server starts to stop.
        is_ready: Whether runs can be started.
        is_away: Whether the database cannot be reached; always False for runs on a disk.
    """

    def __init__(self) -> None:
        self.stopping = asyncio.Event()
        self.is_ready = self.is_away = False
