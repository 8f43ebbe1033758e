"""``RecordedCalls``: the tool calls of a record, by the run that made them and by their ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from stepengine.journal.history import History
from stepengine.journal.records import Intent


class RecordedCalls:
    """
    The tool calls of one record.

    Args:
        history: The records.

    Attributes:
        history: The records.
    """

    def __init__(self, history: History) -> None:
        self.history = history
        # Built on first use: most repeated runs use neither, and each takes a walk over all records.
        self._tools: dict[str, set[str]] | None = None
        self._effects: dict[tuple[str, str, str | None], list[Intent]] | None = None

    def list_called_tools(self, path: str) -> frozenset[str]:
        """Return the names of the tools that the run at *path* called."""
        if self._tools is None:
            self._tools = {}
            for intent in self.history.intents.values():
                if intent.type == "tool_call":
                    named = intent.subject
                    name = named if isinstance(named, str) else self.history.form(intent)["tool_name"]
                    self._tools.setdefault(intent.path, set()).add(name)
        return frozenset(self._tools.get(path, ()))

    def find_effects_of_call(
        self, kind: Literal["tool_call", "ask"], path: str, tool_call_id: str | None
    ) -> Sequence[Intent]:
        """
        Return the recorded calls, or questions, with this tool call id in the run at *path*, in order.

        A run never has two calls with one id, but an edited journal may.
        """
        if self._effects is None:
            self._effects = {}
            for intent in self.history.intents.values():
                if intent.type in ("tool_call", "ask"):
                    key = intent.type, intent.path, self.history.form(intent).get("tool_call_id")
                    self._effects.setdefault(key, []).append(intent)
        return self._effects.get((kind, path, tool_call_id), ())
