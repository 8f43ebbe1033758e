"""Finds and kills what left a command's process group, by the marker in its environment (reliability SH03; Linux only)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Mapping
from pathlib import Path

from stepengine.tools.shell.environment import MARKER

__all__ = ("end_marked", "marked")

PROC = Path("/proc")
ROUNDS = 40
PAUSE_SECONDS = 0.01


def marked(marker: str) -> list[int]:
    """Return the ids of running processes of ours whose environment holds the marker."""
    wanted, user = f"{MARKER}={marker}".encode(), os.getuid()
    found: list[int] = []
    if not PROC.is_dir():
        return found
    with os.scandir(PROC) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):  # it ended meanwhile, or is not ours to read
                if (
                    entry.name.isdigit()
                    and entry.stat().st_uid == user
                    and wanted in Path(entry, "environ").read_bytes()
                ):
                    found.append(int(entry.name))
    return found


async def end_marked(env: Mapping[str, str]) -> None:
    """Kill every process with the marker of *env*, again and again until there is none; a fork bomb may win."""
    for _ in range(ROUNDS):
        left = marked(env[MARKER])
        if not left:
            return
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        await asyncio.sleep(PAUSE_SECONDS)
