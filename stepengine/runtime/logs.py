"""
Destinations of log lines: the standard logger ``stepengine``, silent until configured, or the caller's own.

Every record carries the run's id, agent, path and step.
"""

from __future__ import annotations

import inspect
import json
import logging
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Literal

import attrs

from stepengine.data.events import Event, ModelStarted, RunFinished, StepStarted, ToolFinished, ToolStarted
from stepengine.data.state import AgentState, RunResult
from stepengine.errors import DataError
from stepengine.redaction import KNOWN
from stepengine.workspace.calls import OWNER_FILE_MODE
from stepengine.workspace.file_formats import FileFormat

LOGGER = logging.getLogger("stepengine")
LOGGER.addHandler(logging.NullHandler())

LEVELS: Mapping[str, int] = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "warn": logging.WARNING,
    "error": logging.ERROR,
}


@cache
def log_once(text: str) -> None:
    """Log a warning that belongs to no run, once per process; ``""`` is ignored."""
    if text:
        LOGGER.warning("%s", text)


class LineLogger(ABC):
    """A ``RunLogger`` that passes the lines of all levels to ``log_line``."""

    __slots__ = ()

    @abstractmethod
    def log_line(self, level: str, message: str, data: dict[str, Any]) -> None:
        """Log one line."""

    def debug(self, message: str, /, **data: object) -> None:
        """Log for developers."""
        self.log_line("debug", message, data)

    def info(self, message: str, /, **data: Any) -> None:
        """Log at the level ``info``."""
        self.log_line("info", message, data)

    def warning(self, message: str, /, **data: object) -> None:
        """Log a problem that needs attention."""
        self.log_line("warning", message, data)

    def error(self, message: str, /, **data: Any) -> None:
        """Log an error."""
        self.log_line("error", message, data)


def write_log_line(logger: Any, level: str, message: str, context: Mapping[str, Any], data: Any) -> None:
    """
    Write one line with a logger of any signature.

    Args:
        logger: A ``logging.Logger`` or ``logging.LoggerAdapter``, whose records get the members of *context* and ``data`` as
            attributes; or an object with the methods ``debug``, ``info``, ``warning`` (or ``warn``) and ``error``. One that
            accepts keywords gets the members of a mapping and of *context* as keywords; one with a second argument
            (or ``data=``) gets them as one mapping; one with only a message gets the message.
        level: The level's name; an unknown one counts as ``"info"``.
        message: The line; it is never used as a format string.
        context: ``run_id``, ``agent_id``, ``path`` and ``step``.
        data: What the author added: a mapping, any JSON value, or ``None``.
    """
    number = LEVELS.get(level, logging.INFO)
    if isinstance(logger, logging.LoggerAdapter):
        # What the adapter makes of a line, in place of its own `log`, which would drop our fields.
        message, more = logger.process(message, {})
        write_log_line(logger.logger, level, message, {**(more.get("extra") or {}), **context}, data)
        return
    if isinstance(logger, logging.Logger):
        if logger.isEnabledFor(number):
            logger.log(number, "%s", message, extra={**context, "data": data})
        return
    name = "warning" if number == logging.WARNING else level
    method = getattr(logger, name if name in LEVELS else "info", None) or logger.warn
    extra = data if isinstance(data, Mapping) else {} if data is None else {"data": data}
    told = {**extra, **context}
    match _get_data_parameter_style(method):
        case "keywords":
            method(message, **told)
        case "data":
            method(message, data=told)
        case "second":
            method(message, told)
        case _:
            method(message)


def _get_data_parameter_style(method: Callable[..., object]) -> Literal["keywords", "data", "second", "message"]:
    """Return how a logger's method accepts data; an unknown signature counts as keywords."""
    try:
        parameters = list(inspect.signature(method).parameters.values())
    except (TypeError, ValueError):
        return "keywords"
    kinds = [parameter.kind for parameter in parameters]
    if inspect.Parameter.VAR_KEYWORD in kinds:
        return "keywords"
    if any(p.name == "data" and p.kind is not inspect.Parameter.POSITIONAL_ONLY for p in parameters):
        return "data"
    places = [kind for kind in kinds if kind is not inspect.Parameter.KEYWORD_ONLY]
    return "second" if len(places) > 1 or inspect.Parameter.VAR_POSITIONAL in places else "message"


class LogObserver:
    """
    An observer that calls up to four methods of an object, such as a log provider, if the object has them.

    A standard logger has none of them. It gets a line for each event at the level ``DEBUG``, with ``run_id``, ``path`` and
    ``data`` as attributes of the record, and a line at ``INFO`` for the end of a run. The lines contain no conversation, and no
    inputs or results of tools.

    Pass it to ``Engine(observers=[LogObserver(logger)])``. The methods are plain functions, called for every run of a tree.
    Their exceptions are logged, and the run continues:

    - ``on_tool_call(tool_name, input)`` before a tool runs;
    - ``on_tool_result(tool_name, result)`` after it, with its ``ToolResult``;
    - ``on_step(step, messages)`` before a step calls the model: the number of the step, from 0, and the model's messages;
    - ``on_complete(result)`` when a root run has ended, with its ``RunResult``.
    """

    def __init__(self, logger: object) -> None:
        self._logger = logger
        self._steps: dict[tuple[str, str], int] = {}

    def on_event(self, event: Event) -> None:
        """Pass an event to the logger's method for it."""
        match event:
            case ToolStarted():
                self._call_method_if_defined("on_tool_call", event.tool_name, event.input)
                self._log_to_standard_logger(
                    event, "debug", "tool call", tool_name=event.tool_name, tool_call_id=event.tool_call_id
                )
            case ToolFinished():
                self._call_method_if_defined("on_tool_result", event.tool_name, event.result)
                call = {"tool_name": event.tool_name, "tool_call_id": event.tool_call_id}
                self._log_to_standard_logger(
                    event, "debug", "tool result", **call, status=event.result.status, ms=event.duration_ms
                )
            case StepStarted():
                self._steps[event.run_id, event.path] = event.step
            case ModelStarted(purpose="step", request=request) if request is not None:
                # A step that is asked again, after its prompt was too long, is one step.
                step = self._steps.pop((event.run_id, event.path), None)
                if step is not None:
                    self._call_method_if_defined("on_step", step, request.messages)
                    self._log_to_standard_logger(
                        event, "debug", "step", step=step, model=event.model, messages=len(request.messages)
                    )
            case RunFinished():
                for place in [place for place in self._steps if place[0] == event.run_id]:
                    del self._steps[place]
                self._call_method_if_defined("on_complete", event.result)
                self._log_to_standard_logger(event, "info", "run ended", **_make_end_fields(event.result))
            case _:
                pass

    def _log_to_standard_logger(self, event: Event, level: str, message: str, **data: object) -> None:
        """Write a line for *event* if the logger is a ``logging.Logger`` or ``LoggerAdapter``; do nothing for other loggers."""
        if isinstance(self._logger, logging.Logger | logging.LoggerAdapter):
            write_log_line(self._logger, level, message, {"run_id": event.run_id, "path": event.path}, data)

    def _call_method_if_defined(self, name: str, *arguments: object) -> None:
        """Call a method of the logger, if it has that method."""
        method = getattr(self._logger, name, None)
        if method is not None:
            method(*arguments)


def _make_end_fields(result: RunResult) -> dict[str, object]:
    return {
        "agent_id": result.state.agent_id,
        "status": result.status.value,
        "input_tokens": result.usage.prompt_tokens,
        "output_tokens": result.usage.completion_tokens,
        "cost_usd": None if result.cost is None else str(result.cost),
        "error": "" if result.error is None else type(result.error).__name__,
    }


EVENTS_FILE = FileFormat(
    "a file of events", re.compile(rb'\{"type":"[a-z_]+","path":"[0-9.]*","seq":-?[0-9]+,'), DataError
)


class EventFile:
    """
    An observer that appends every event to a file as one line of JSON: ``Engine(observers=[EventFile("events.jsonl")])``.

    Each line is ``event.to_json()``, whole when ``on_event`` returns; several engines and processes may append to one file.
    The file contains the text of events, so only its owner can read it. Keys that this process sends to providers are
    redacted.

    Args:
        path: The file; it is created at the first event.
        full: Whether to include the requests of model calls and the final state of runs, which contain whole conversations.
    """

    def __init__(self, path: str | os.PathLike[str], *, full: bool = False) -> None:
        self._path = path
        self._full = full

    def on_event(self, event: Event) -> None:
        """Append *event* to the file as one line of JSON."""
        line = json.dumps(self._make_line_members(event), ensure_ascii=True, separators=(",", ":")) + "\n"
        EVENTS_FILE.check(self._path)
        file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, OWNER_FILE_MODE)
        try:
            left = memoryview(line.encode("ascii"))
            while left:
                left = left[os.write(file, left) :]
        finally:
            os.close(file)

    def _make_line_members(self, event: Event) -> dict[str, Any]:
        """Return the JSON of *event* for the file: a result without secrets, and without conversations unless ``full``."""
        if isinstance(event, RunFinished):
            # The hub shows the result as its caller gets it, which may hold a key.
            told: dict[str, object] = KNOWN.value(
                (event if self._full else _copy_without_conversation(event)).to_json()
            )
            return told
        return (
            attrs.evolve(event, request=None) if isinstance(event, ModelStarted) and not self._full else event
        ).to_json()


def _copy_without_conversation(event: RunFinished) -> RunFinished:
    result = event.result
    state = AgentState(run_id=result.state.run_id, agent_id=result.state.agent_id)
    return attrs.evolve(event, result=attrs.evolve(result, state=state, tool_calls=(), thinking=()))
