"""Which agent has the conversation of a run: its own, or the one to which it was handed over."""

from __future__ import annotations

__all__ = ("HandOff",)


class HandOff:
    """
    The hand-off of one run.

    Attributes:
        agent_id: The agent that takes the conversation over when the run's own agent has ended; ``None`` for none.
    """

    __slots__ = ("_before", "agent_id")

    def __init__(self, before: str | None) -> None:
        """Start with *before*, the agent to which an earlier run of the conversation handed it over."""
        self._before = before
        self.agent_id: str | None = None

    def assign(self, agent_id: str) -> None:
        """Hand the conversation over to *agent_id*."""
        self.agent_id = agent_id

    @property
    def handed_to(self) -> str | None:
        """The agent to which the conversation was handed over, in this run or before it."""
        return self.agent_id or self._before
