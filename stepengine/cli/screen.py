"""
Text from models, tools and files on its way to a terminal (reliability UI01, UI02).

Everything that would steer the terminal or hide itself is shown as an escape (``stepengine.data.visible``); only our own
colours reach the screen.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from stepengine.data.visible import visible

__all__ = ("cut", "dumps", "is_terminal", "one_line", "visible")


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
