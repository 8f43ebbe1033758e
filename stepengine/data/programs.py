"""
Access to the program that a tool body runs, for debuggers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any


class RunningProgram(ABC):
    """
    The object among a body's variables that describes its running program.

    Attributes:
        code: The program's text.
        line: The waiting line, from 1; 0 if it does not wait.
        file: The program's file; ``""`` for a program of a model.
    """

    code: str
    line: int
    file: str = ""

    @abstractmethod
    def printed(self) -> str | None:
        """Return its output so far, or ``None`` without a sandbox that reports it."""


class ProgramVariables(ABC):
    """The variables of a run's programs; each program continues with those of the last one."""

    @abstractmethod
    def variables(self) -> Mapping[str, str]:
        """Return the variables that programs have left, by name, as shortened texts; none while a program waits."""


def mark_as_sandboxed(handler: Callable[..., Any]) -> None:
    """Mark a handler as run by sandbox workers of this process."""
    handler.__dict__["is_in_sandbox"] = True


def is_sandboxed(handler: Callable[..., Any] | None) -> bool:
    """Return whether a handler runs in the sandbox, so that a forked process cannot continue it."""
    return getattr(handler, "is_in_sandbox", False) is True
