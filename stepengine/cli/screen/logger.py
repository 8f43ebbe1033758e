"""``ConsoleLogger``: a logger for a console, for programs that have none of their own."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any, TextIO

from stepengine.cli.screen.render import cut, one_line, visible
from stepengine.data.codec import plain
from stepengine.data.messages import Message, ToolResult
from stepengine.data.state import RunResult
from stepengine.errors import DefinitionError

__all__ = ("ConsoleLogger",)

LEVELS = ("debug", "info", "warn", "error")
MAX_LINE = 8_192
MAX_TEXT = 200


class ConsoleLogger:
    """
    Prints one line for each thing that is logged: ``Engine(logger=ConsoleLogger(level="info"))``.

    With ``observers=[LogObserver(logger)]`` it is told what agents do: at ``"debug"`` each step, tool call and result, at
    ``"info"`` how each run ended. Text of models and tools is
    made visible; a line has at most 8,192 characters.

    Args:
        level: The lowest level that is printed: ``"debug"``, ``"info"``, ``"warn"`` or ``"error"``.
        file: Where; stderr by default.

    Raises:
        DefinitionError: for an unknown level.
    """

    def __init__(self, level: str = "info", *, file: TextIO | None = None) -> None:
        if level not in LEVELS:
            msg = f"ConsoleLogger has no level {level!r}; it is one of {', '.join(LEVELS)}"
            raise DefinitionError(msg)
        self._lowest = LEVELS.index(level)
        self._file = file

    def debug(self, message: str, data: object = None, /, **more: object) -> None:
        """Print what developers want to know."""
        self._print("debug", message, data, more)

    def info(self, message: str, data: Any = None, /, **more: Any) -> None:
        """Print what users want to know who asked for detail."""
        self._print("info", message, data, more)

    def warn(self, message: str, data: object = None, /, **more: object) -> None:
        """Print what somebody should look at."""
        self._print("warn", message, data, more)

    warning = warn

    def error(self, message: str, data: Any = None, /, **more: Any) -> None:
        """Print what went wrong."""
        self._print("error", message, data, more)

    def on_tool_call(self, tool_name: str, input: object) -> None:
        """Print a tool call that begins."""
        self.debug("tool call", input, tool=tool_name)

    def on_tool_result(self, tool_name: str, result: ToolResult) -> None:
        """Print how a tool call ended."""
        self.debug("tool result", tool=tool_name, status=result.status, text=one_line(result.text, MAX_TEXT))

    def on_step(self, step: int, messages: Sequence[Message]) -> None:
        """Print a step that begins."""
        self.debug("step", step=step, messages=len(messages))

    def on_complete(self, result: RunResult) -> None:
        """Print how a run ended."""
        usage = result.usage
        self.info(
            "run ended",
            agent=result.state.agent_id,
            run_id=result.state.run_id,
            status=result.status.value,
            input_tokens=usage.prompt_tokens,
            output_tokens=usage.completion_tokens,
        )

    def _print(self, level: str, message: str, data: object, more: dict[str, object]) -> None:
        if LEVELS.index(level) < self._lowest:
            return
        fields = {"data": data, **more} if data is not None else more
        said = [
            f"{visible(name, strict=True)}={_format_value(value)}"
            for name, value in fields.items()
            if value not in (None, "")
        ]
        line = cut(" ".join([f"{level}:", visible(str(message), strict=True), *said]), MAX_LINE)
        print(line, file=self._file or sys.stderr, flush=True)


def _format_value(value: object) -> str:
    """Return a value as it is if it is one word, else as JSON, so that its ends can be seen."""
    if isinstance(value, str):
        shown = visible(value, strict=True)
        return shown if shown.isprintable() and " " not in shown and '"' not in shown else f'"{shown}"'
    return visible(json.dumps(plain(value), ensure_ascii=False, default=repr), strict=True)
