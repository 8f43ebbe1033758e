"""The tool of most tests of the engine."""

from __future__ import annotations

from stepengine import tool


@tool(in_thread=False)
def add(a: int, b: int) -> int:
    """
    Add two numbers.

    Args:
        a: One.
        b: Another.
    """
    return a + b
