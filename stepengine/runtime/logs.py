"""
Where log lines go: the standard logger ``stepengine``, silent until somebody configures it, or the caller's own.

Every record carries the run's id, agent, path and step (requirements O1, O4). Who logs may also be told what agents do.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from stepengine.data.events import Event, ModelStarted, RunFinished, StepStarted, ToolFinished, ToolStarted

__all__ = ("LOGGER", "Lines", "LogObserver", "write")

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


class LogObserver:
    """
    An observer that tells a logger what agents do, through the methods that it has (requirements O2); all are optional.

    - ``on_tool_call(tool_name, input)`` when a tool call begins;
    - ``on_tool_result(tool_name, result)`` when it has ended, with its ``ToolResult``;
    - ``on_step(step, messages)`` before a model is asked for step *step*, from 0 in each run, with what it is shown;
    - ``on_complete(result)`` when a root run has ended, however it did, with its ``RunResult``.

    Children are told of like their parents. ``Engine(logger=...)`` makes one for a logger with any of these methods; for a run
    of ``engine.stream`` elsewhere, ``LogObserver(logger).on_event`` takes its events.

    Args:
        logger: An object with some of these methods.
    """

    METHODS = ("on_tool_call", "on_tool_result", "on_step", "on_complete")

    def __init__(self, logger: Any) -> None:
        self.logger = logger
        self._told = {name: getattr(logger, name, None) for name in self.METHODS}
        self._steps: dict[tuple[str, str], int] = {}

    @classmethod
    def of(cls, logger: Any) -> LogObserver | None:
        """Return the observer for a logger; ``None`` when it has none of the methods."""
        return cls(logger) if any(callable(getattr(logger, name, None)) for name in cls.METHODS) else None

    def on_event(self, event: Event, /) -> None:
        """Tell the logger of *event*, if it wants to know."""
        if isinstance(event, ToolStarted):
            self._tell("on_tool_call", event.tool_name, event.input)
        elif isinstance(event, ToolFinished):
            self._tell("on_tool_result", event.tool_name, event.result)
        elif isinstance(event, RunFinished):
            self._tell("on_complete", event.result)
        elif isinstance(event, StepStarted):
            self._steps[_run_of(event)] = event.step
        elif (
            isinstance(event, ModelStarted) and event.purpose in ("step", "final_answer") and event.request is not None
        ):
            self._tell("on_step", self._steps.pop(_run_of(event), 0), event.request.all_messages)

    def _tell(self, name: str, *arguments: Any) -> None:
        method = self._told[name]
        if method is not None:
            method(*arguments)


def _run_of(event: Event) -> tuple[str, str]:
    return getattr(event, "run_id", ""), event.path
