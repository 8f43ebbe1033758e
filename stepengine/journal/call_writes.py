"""What calls wrote to files, until their results are recorded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from stepengine.journal.encoding import drop_secret_old_content
from stepengine.journal.records import Address
from stepengine.redaction import Redactor
from stepengine.runtime.performer import Item, is_repeatable
from stepengine.workspace.writes import FileWrite


class CallWrites:
    """
    The file writes of calls whose results are not recorded yet.

    Args:
        redactor: Redacts secrets in the writes.

    Attributes:
        pending: The file writes, by the address of the call.
    """

    def __init__(self, redactor: Redactor) -> None:
        self.pending: dict[Address, list[FileWrite]] = {}
        self._redactor = redactor

    def add(self, run_path: str, seq: int, write: FileWrite) -> None:
        """Store a write until the result of its call is recorded."""
        self.pending.setdefault((run_path, seq), []).append(write)

    def pop_writes_as_json(self, item: Item, *, was_started_earlier: bool) -> list[Mapping[str, Any]]:
        """Remove and return a call's writes as JSON; if an earlier process may have started the call, they may be marked doubtful."""
        forms = list[Mapping[str, Any]]()
        for write in self.pending.pop(item.address, ()):
            # Done twice, a call that is like one done once finds its own work, or nothing of it.
            doubtful = was_started_earlier and (write.hash_before == write.after or not is_repeatable(item))
            forms.append(attrs.evolve(drop_secret_old_content(write, self._redactor), doubtful=doubtful).to_json())
        return forms
