"""Notes that stand where a tool result was: told by the part's own data, since their text could be anybody's."""

from __future__ import annotations

from stepengine.data.json import JsonDict
from stepengine.data.messages import TextPart, ToolMessage, ToolResult

__all__ = ("is_placeholder", "placeholder")


def placeholder(message: ToolMessage, mark: str, text: str) -> ToolResult:
    """
    Return *text* as what stands in the place of a result.

    Args:
        message: The result that makes room.
        mark: Whose placeholder it is.
        text: What the model is told.
    """
    data = JsonDict({"provider": "stepengine", mark: len(message.text)})
    return ToolResult((TextPart(text, provider_data=data),), status=message.status)


def is_placeholder(message: ToolMessage, mark: str) -> bool:
    """Return whether a result is a placeholder with this mark."""
    part = message.content[0] if len(message.content) == 1 else None
    return type(part) is TextPart and part.provider_data is not None and mark in part.provider_data
