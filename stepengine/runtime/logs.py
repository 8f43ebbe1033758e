"""
Where log lines go: the standard logger ``stepengine``, silent until somebody configures it, or the caller's own.

Every record carries the run's id, agent, path and step (requirements O1, O4).
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
    An observer that calls those of four methods that an object has, such as a log provider (requirements O2).

    Give it to ``Engine(observers=[LogObserver(logger)])``. The methods are plain functions, called for every run of a tree;
    what they raise is logged, and the run goes on:

    - ``on_tool_call(tool_name, input)`` before a tool runs;
    - ``on_tool_result(tool_name, result)`` after it, with its ``ToolResult``;
    - ``on_step(step, messages)`` before the model is called in a step, which counts from 0, with what it is shown;
    - ``on_complete(result)`` when a root run has ended, with its ``RunResult``.
    """

    def __init__(self, logger: Any) -> None:
        self._logger = logger
        self._steps: dict[tuple[str, str], int] = {}

    def on_event(self, event: Event) -> None:
        """Tell the logger of an event that it has a method for."""
        match event:
            case ToolStarted():
                self._call("on_tool_call", event.tool_name, event.input)
            case ToolFinished():
                self._call("on_tool_result", event.tool_name, event.result)
            case StepStarted():
                self._steps[event.run_id, event.path] = event.step
            case ModelStarted(purpose="step", request=request) if request is not None:
                # A step that is asked again, after its prompt was too long, is one step.
                step = self._steps.pop((event.run_id, event.path), None)
                if step is not None:
                    self._call("on_step", step, request.messages)
            case RunFinished():
                for place in [place for place in self._steps if place[0] == event.run_id]:
                    del self._steps[place]
                self._call("on_complete", event.result)
            case _:
                pass

    def _call(self, name: str, *arguments: Any) -> None:
        method = getattr(self._logger, name, None)
        if method is not None:
            method(*arguments)
