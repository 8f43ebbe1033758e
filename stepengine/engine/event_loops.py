"""
Errors for callers without asyncio's event loop.
"""

from __future__ import annotations

import sys

from stepengine.errors import StepEngineError


def require_event_loop(operation: str, alternative: str = "") -> None:
    """
    Raise if no asyncio event loop runs here, before *operation* creates anything; *alternative* needs no loop.

    Raises:
        StepEngineError: when no event loop runs here, or trio's; it names *alternative*, which needs none.
    """
    import asyncio

    refuse_trio(operation, alternative)
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        beside = f", or use {alternative}, which needs no event loop" if alternative else ""
        msg = f"{operation} needs a running event loop: call it inside `async def`{beside}"
        raise StepEngineError(msg) from None


def refuse_trio(operation: str, alternative: str) -> None:
    """Raise if trio's event loop runs here, and name *operation*; do nothing where no loop runs."""
    if _is_in_trio_task():
        beside = f", or call {alternative} in a thread, by anyio.to_thread.run_sync" if alternative else ""
        msg = f"{operation} needs asyncio's event loop, but trio's is running: use anyio with its backend 'asyncio'{beside}"
        raise StepEngineError(msg)


def _is_in_trio_task() -> bool:
    """Return whether a task of trio runs here; where trio's loop is a guest of asyncio's, both are there."""
    trio = sys.modules.get("trio")
    if trio is None:
        return False
    try:
        trio.lowlevel.current_task()
    except RuntimeError:
        return False
    return True
