"""
Where log lines go: the standard logger ``stepengine``, silent until somebody configures it, or the caller's own.

Every record carries the run's id, agent, path and step (requirements O1, O4).
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

__all__ = ("LOGGER", "Lines", "write")

LOGGER = logging.getLogger("stepengine")
LOGGER.addHandler(logging.NullHandler())

LEVELS: Mapping[str, int] = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "warn": logging.WARNING,
    "error": logging.ERROR,
}


class Lines(ABC):
    """A ``RunLogger``: whatever its level, a line goes through ``line``."""

    __slots__ = ()

    @abstractmethod
    def line(self, level: str, message: str, data: dict[str, Any]) -> None:
        """Log one line."""

    def debug(self, message: str, /, **data: Any) -> None:
        """Log for developers."""
        self.line("debug", message, data)

    def info(self, message: str, /, **data: Any) -> None:
        """Log for users who asked for detail."""
        self.line("info", message, data)

    def warning(self, message: str, /, **data: Any) -> None:
        """Log what somebody should look at."""
        self.line("warning", message, data)

    def error(self, message: str, /, **data: Any) -> None:
        """Log what went wrong."""
        self.line("error", message, data)


def write(logger: Any, level: str, message: str, context: Mapping[str, Any], data: Any = None) -> None:
    """
    Write one line.

    Args:
        logger: A ``logging.Logger``, or an object with the methods ``debug``, ``info``, ``warning`` (or ``warn``) and
            ``error``, each taking the message and keywords.
        level: The level's name; an unknown one counts as ``"info"``.
        message: The line; it is never used as a format string.
        context: ``run_id``, ``agent_id``, ``path`` and ``step``.
        data: What the author added: a mapping, any JSON value, or ``None``.
    """
    number = LEVELS.get(level, logging.INFO)
    if isinstance(logger, logging.Logger):
        if logger.isEnabledFor(number):
            logger.log(number, "%s", message, extra={**context, "data": data})
        return
    name = "warning" if number == logging.WARNING else level
    method = getattr(logger, name if name in LEVELS else "info", None) or logger.warn
    extra = data if isinstance(data, Mapping) else {} if data is None else {"data": data}
    method(message, **{**extra, **context})
