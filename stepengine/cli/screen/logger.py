"""``ConsoleLogger``: a logger for programs without a logger of their own."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any, TextIO

from stepengine.cli.screen.render import one_line, truncate_text, visible
from stepengine.data.codec import plain
from stepengine.data.messages import Message, ToolResult
from stepengine.data.state import RunResult
from stepengine.errors import DefinitionError

LEVELS = ("debug", "info", "warn", "error")
MAX_LINE = 8_192
MAX_TEXT = 200


class ConsoleLogger:
    """
    Prints one line for each log entry: ``Engine(logger=ConsoleLogger(level="info"))``.

    With ``observers=[LogObserver(logger)]`` it also logs events of agents: at ``"debug"`` each step, tool call and result, at ``"info"``
    the end of each run. Text of models and tools is made visible. A line has at most 8,192 characters.

    Args:
        level: The lowest level that is printed: ``"debug"``, ``"info"``, ``"warn"`` or ``"error"``.
        file: The output; stderr by default.

    Raises:
        DefinitionError: for an unknown level.
    """

    def __init__(self, level: str = "info", *, file: TextIO | None = None) -> None:
        if level not in LEVELS:
            msg = f"ConsoleLogger has no level {level!r}; valid levels: {', '.join(LEVELS)}"
            raise DefinitionError(msg)
        self._lowest = LEVELS.index(level)
        self._file = file

    def debug(self, message: str, data: object = None, /, **more: object) -> None:
        """Print a debug line."""
        self._print_entry("debug", message, data, more)

    def info(self, message: str, data: Any = None, /, **more: Any) -> None:
        """Print an info line."""
        self._print_entry("info", message, data, more)

    def warn(self, message: str, data: object = None, /, **more: object) -> None:
        """Print a warning line."""
        self._print_entry("warn", message, data, more)

    warning = warn

    def error(self, message: str, data: Any = None, /, **more: Any) -> None:
        """Print an error line."""
        self._print_entry("error", message, data, more)

    def on_tool_call(self, tool_name: str, input: object) -> None:
        """Print the start of a tool call."""
        self.debug("tool call", input, tool=tool_name)

    def on_tool_result(self, tool_name: str, result: ToolResult) -> None:
        """Print the result of a tool call, at the level debug."""
        self.debug("tool result", tool=tool_name, status=result.status, text=one_line(result.text, MAX_TEXT))

    def on_step(self, step: int, messages: Sequence[Message]) -> None:
        """Print the start of a step."""
        self.debug("step", step=step, messages=len(messages))

    def on_complete(self, result: RunResult) -> None:
        """Print the end of a run."""
        usage = result.usage
        self.info(
            "run ended",
            agent=result.state.agent_id,
            run_id=result.state.run_id,
            status=result.status.value,
            input_tokens=usage.prompt_tokens,
            output_tokens=usage.completion_tokens,
        )

    def _print_entry(self, level: str, message: str, data: object, more: dict[str, object]) -> None:
        """Print one line with the level, the message and the data, unless the level is too low."""
        if LEVELS.index(level) < self._lowest:
            return
        fields = {"data": data, **more} if data is not None else more
        said = [
            f"{visible(name, strict=True)}={_format_value(value)}"
            for name, value in fields.items()
            if value not in (None, "")
        ]
        line = truncate_text(" ".join([f"{level}:", visible(str(message), strict=True), *said]), MAX_LINE)
        print(line, file=self._file or sys.stderr, flush=True)


def _format_value(value: object) -> str:
    """Return a value as text: one printable word as it is, anything else as JSON."""
    if isinstance(value, str):
        shown = visible(value, strict=True)
        return shown if shown.isprintable() and " " not in shown and '"' not in shown else f'"{shown}"'
    return visible(json.dumps(plain(value), ensure_ascii=False, default=repr), strict=True)
