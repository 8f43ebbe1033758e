"""What the requests of a run carry beside its history, and how large providers found them."""

from __future__ import annotations

from stepengine.data.estimate import Measured
from stepengine.data.messages import Message
from stepengine.data.models import ModelRequest
from stepengine.errors import ContextOverflow

__all__ = ("Prompt",)


class Prompt:
    """
    System prompt and tail of one run, and the sizes that providers reported.

    Attributes:
        system: The system prompt in force.
        tail: Messages at the end of every request, from ``pre_run``.
        measured: The size that the provider last reported for a request of a step.
        overflow: The refusal of the current request as too long; hooks are shown it.
        refused_tokens: The estimated size of what was refused.
    """

    __slots__ = ("measured", "overflow", "refused_tokens", "system", "tail")

    def __init__(self, system: str) -> None:
        self.system = system
        self.tail: tuple[Message, ...] = ()
        self.measured: Measured | None = None
        self.overflow: ContextOverflow | None = None
        self.refused_tokens: int | None = None

    def replace_system(self, system: str) -> None:
        """Replace the system prompt."""
        self.system = system

    def set_tail(self, tail: tuple[Message, ...]) -> None:
        """Send *tail* at the end of every request from now on."""
        self.tail = tail

    def measure(self, request: ModelRequest, tokens: int) -> None:
        """Record how many tokens the provider counted for *request*."""
        self.measured = Measured(request.system_prompt, request.messages, tokens)

    def refuse(self, overflow: ContextOverflow, tokens: int) -> None:
        """Record that a request of *tokens* estimated tokens was refused as too long."""
        self.overflow, self.refused_tokens = overflow, tokens

    def accept(self) -> None:
        """Forget the refusal."""
        self.overflow = self.refused_tokens = None
