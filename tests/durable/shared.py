"""
What tests of durable runs share: a worker, and tools that need nothing.
"""

from __future__ import annotations

from typing import Any

from stepengine import tool
from stepengine.durable import DurableEngine
from stepengine.testing import ScriptedModel

DONE: list[str] = []
"""What ``note`` was given."""


def worker_of(agents: Any, db: str, **options: Any) -> DurableEngine:
    """
    A worker that looks often, and has a model that says nothing.
    """
    given = {"models": ScriptedModel([]), "executor": "worker-1", "polling": 0.05, **options}
    return DurableEngine(agents, db=db, **given)


@tool
async def add(a: int, b: int) -> int:
    """
    Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


@tool
async def note(name: str) -> str:
    """
    Note something.

    Args:
        name: What.
    """
    DONE.append(name)
    return name


@tool
async def wipe(disk: str) -> str:
    """
    Wipe a disk.

    Args:
        disk: Which one.
    """
    return f"wiped {disk}"
