"""
Text from models, tools and files on its way to a terminal (reliability UI01, UI02).

Everything that would steer the terminal or hide itself is shown as an escape (``stepengine.data.visible``); only our own
colours reach the screen.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import attrs

from stepengine.data.visible import visible

__all__ = ("COLORS", "ColorScheme", "cut", "dumps", "is_terminal", "one_line", "visible")


@attrs.frozen(kw_only=True)
class ColorScheme:
    """
    The style of each kind of line, in the words of rich: ``"bold cyan"``, ``"#ff8800"``, ``"dim"``; ``""`` for none.

    On an output that is no terminal, and where ``NO_COLOR`` is set, there are no colours whatever the scheme says.

    Attributes:
        step: A step of the model.
        tool: A tool call that begins.
        result: A tool call that went well; a todo that is done.
        agent: A child that begins or ends.
        thinking: Thoughts.
        question: What a person is asked.
        warning: What somebody should look at.
        error: What failed.
        note: What is said in passing.
        summary: How a run ended; the names of files in a diff.
        place: A place in a diff.
        added: A line that a diff adds.
        removed: A line that a diff removes.
    """

    step: str = "bold cyan"
    tool: str = "blue"
    result: str = "dim"
    agent: str = "magenta"
    thinking: str = "dim"
    question: str = "bold yellow"
    warning: str = "yellow"
    error: str = "red"
    note: str = "dim"
    summary: str = "bold"
    place: str = "cyan"
    added: str = "green"
    removed: str = "red"


COLORS = ColorScheme()


def cut(text: str, width: int) -> str:
    """Return *text*, cut with an ellipsis to at most *width* characters."""
    return text if len(text) <= width else f"{text[: max(0, width - 3)]}..."


def one_line(text: str, width: int = 100) -> str:
    """Return *text* as one visible line of at most *width* characters."""
    return cut(visible(" ".join(text[: 4 * width].split()), strict=True), width)


def dumps(value: Any) -> str:
    """Return *value* as indented JSON in ASCII, so that no byte of it can steer a terminal."""
    return json.dumps(value, indent=2).replace("\x7f", "\\u007f")


def is_terminal(stream: Any = None) -> bool:
    """Return whether *stream*, by default stderr, is a terminal that can redraw a line."""
    return bool((stream or sys.stderr).isatty())
