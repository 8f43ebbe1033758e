"""``ConversationRules``: the remembered permission rules of each conversation."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from stepengine.data.json import JsonDict
from stepengine.runtime.questions import RememberedRules

if TYPE_CHECKING:
    from stepengine.permissions import PolicyFile

KEPT_SESSIONS = 10_000
"""A bound, because no one reports the end of a conversation. A dropped rule only means another question."""


class ConversationRules:
    """
    The rules that people remembered in the conversations of an engine.

    Args:
        file: The policy file that stores lasting rules; ``None`` to have them in memory alone.
    """

    def __init__(self, file: PolicyFile | None) -> None:
        self._file = file
        self._by_session: dict[str, RememberedRules] = {}

    def get_or_create_rules(self, session_id: str | None) -> RememberedRules | None:
        """
        Return the rules that runs of a conversation share, created on first use; ``None`` without conversation and policy file.

        Of more than 10,000 conversations, the oldest are dropped.
        """
        if session_id is None:
            return None if self._file is None else RememberedRules(self._file)
        kept = self._by_session.setdefault(session_id, RememberedRules(self._file))
        while len(self._by_session) > KEPT_SESSIONS:
            self._by_session.pop(next(iter(self._by_session)), None)
        return kept

    def get_rules_as_json(self, session_id: str) -> tuple[JsonDict, ...]:
        """Return the rules of a conversation, as policy files have them."""
        kept = self._by_session.get(session_id)
        return () if kept is None else kept.rules

    def remove_rules(self, session_id: str, ids: Collection[str]) -> None:
        """Remove the rules with these *ids* from a conversation, or all its rules if *ids* is empty."""
        kept = self._by_session.get(session_id)
        if kept is not None:
            kept.remove_rules(ids)
