"""
What tests of durable runs share: a worker, and tools that need nothing.
"""

from __future__ import annotations

from typing import Any

from stepengine import Usage, tool
from stepengine.durable import DurableEngine
from stepengine.models import ModelReply
from stepengine.testing import ScriptedModel, text

DONE: list[str] = []
"""What ``note`` was given."""


def worker_of(agents: Any, db: str, **options: Any) -> DurableEngine:
    """
    A worker that looks often, and has a model that says nothing.
    """
    given = {"models": ScriptedModel([]), "executor": "worker-1", "polling": 0.05, **options}
    return DurableEngine(agents, db=db, **given)


def priced(count: int) -> ScriptedModel:
    """
    A model that says the same *count* times, for 100 tokens each.
    """
    return ScriptedModel([ModelReply("said", usage=Usage(input_tokens=4, output_tokens=96, requests=1))] * count)


def echo(request: Any) -> ModelReply:
    """
    Say all that the user has said.
    """
    return text(" | ".join([message.text for message in request.messages if message.role == "user"]))


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
