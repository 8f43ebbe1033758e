"""
What can be seen of a program that the body of a tool runs, for whoever steps through a run; programs themselves stand elsewhere.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ("KeepsVariables", "RunsProgram", "runs_in_sandbox", "set_in_sandbox")


class RunsProgram(ABC):
    """What a body has among its variables while it runs a program."""

    @property
    @abstractmethod
    def code(self) -> str:
        """Its text."""

    @property
    @abstractmethod
    def line(self) -> int:
        """The line that waits, from 1; 0 where it does not."""

    @property
    def file(self) -> str:
        """The file whose text it is; ``""`` for a program of a model."""
        return ""

    @abstractmethod
    def printed(self) -> str | None:
        """Return what it has printed so far; ``None`` where there is no sandbox that says so."""


class KeepsVariables(ABC):
    """What is kept of programs for a run, from one to the next."""

    @abstractmethod
    def variables(self) -> Mapping[str, str]:
        """Return what programs have left, by name, each as a text of at most a few hundred characters; none while one waits."""


def set_in_sandbox(handler: Callable[..., Any]) -> None:
    """Take note that a handler is run by workers that stay with this process."""
    handler.__dict__["is_in_sandbox"] = True


def runs_in_sandbox(handler: Callable[..., Any] | None) -> bool:
    """Return whether a handler runs in the sandbox, so that no forked process can go on with it."""
    return getattr(handler, "is_in_sandbox", False) is True
