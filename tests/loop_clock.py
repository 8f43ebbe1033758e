"""
The clock of the event loop, put ahead by a test: a time is over when the test says so, however slow the machine is.
"""

from __future__ import annotations

import asyncio

import pytest


def put_clock_ahead(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """
    Put the clock of the running loop ahead. Timers that are due by then fire in its next turn, also those of the test.
    """
    loop = asyncio.get_running_loop()
    before = loop.time
    monkeypatch.setattr(loop, "time", lambda: before() + seconds)
