"""Events of tool calls; a part of ``stepengine.data.events``, import them from there."""

from __future__ import annotations

import attrs

from stepengine.data.event import Event
from stepengine.data.json import JsonValue, freeze
from stepengine.data.results import ToolResult

__all__ = ("FileChanged", "FollowupsSuggested", "ToolFinished", "ToolLog", "ToolProgress", "ToolStarted")


@attrs.frozen(kw_only=True)
class ToolStarted(Event):
    """A tool call began."""

    tool_name: str
    tool_call_id: str = ""
    input: JsonValue = attrs.field(default=None, converter=freeze)
    source: str = "model"


@attrs.frozen(kw_only=True)
class ToolFinished(Event):
    """A tool call ended; *result* has ``is_error`` when it failed."""

    tool_name: str
    tool_call_id: str = ""
    result: ToolResult
    duration_ms: int = 0


@attrs.frozen(kw_only=True)
class ToolProgress(Event):
    """A tool says how far it is; *percent* is 0 to 100 (requirements E10)."""

    message: str
    percent: float | None = None
    tool_name: str = ""
    tool_call_id: str = ""


@attrs.frozen(kw_only=True)
class ToolLog(Event):
    """A tool logs a line."""

    message: str
    level: str = "info"
    tool_name: str = ""
    tool_call_id: str = ""


@attrs.frozen(kw_only=True)
class FileChanged(Event):
    """A tool changed a file; *action* is ``"created"``, ``"modified"`` or ``"deleted"``."""

    file: str
    action: str
    tool_name: str = ""
    tool_call_id: str = ""


@attrs.frozen(kw_only=True)
class FollowupsSuggested(Event):
    """A tool suggests what the user could ask next: a list of objects with ``prompt`` and perhaps ``label``."""

    followups: JsonValue = attrs.field(default=None, converter=freeze)
    tool_name: str = ""
    tool_call_id: str = ""
