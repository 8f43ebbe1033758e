"""How many tokens a request has: estimated before it is sent, and as its provider measured it afterwards (requirements I1, X45)."""

from __future__ import annotations

from functools import lru_cache

from stepengine.data.estimate import Measured, estimate_tokens, message_tokens, transcript_tokens
from stepengine.data.models import ModelReply, ModelRequest
from stepengine.data.state import AgentState
from stepengine.data.tools import ToolSpec

__all__ = ("Sizes", "estimated_tokens", "expected_tokens")


@lru_cache(maxsize=256)
def _tool_tokens(tools: tuple[ToolSpec, ...]) -> int:
    return sum([estimate_tokens(t.name + t.description) + estimate_tokens(t.input_schema) for t in tools])


def estimated_tokens(request: ModelRequest) -> int:
    """Return about how many tokens a request has; each message of the history, and each set of tools, is measured once."""
    tokens = transcript_tokens(request.messages) + sum([message_tokens(m) for m in request.tail])
    return tokens + estimate_tokens(request.system_prompt) + _tool_tokens(request.tools)


def expected_tokens(request: ModelRequest) -> int:
    """Return about how many tokens a request and its reply have; without ``max_tokens`` nothing is set aside for the reply."""
    return estimated_tokens(request) + (request.settings.max_tokens or 0)


class Sizes:
    """How large the prompts of the runs of one tree are, by path."""

    def __init__(self) -> None:
        self._measured: dict[str, Measured] = {}

    def note(self, path: str, request: ModelRequest, reply: ModelReply) -> None:
        """Take note of how many prompt tokens a step's reply reports, if it does."""
        if reply.usage is not None and reply.usage.prompt_tokens:
            self._measured[path] = Measured(request.system_prompt, request.messages, reply.usage.prompt_tokens)

    def forget(self, path: str) -> None:
        """Forget a run that has ended."""
        self._measured.pop(path, None)

    def knows(self, path: str) -> bool:
        """Return whether the provider of a run has reported a prompt."""
        return path in self._measured

    def of(self, path: str, state: AgentState) -> int:
        """
        Return how large the next prompt of a run is: what its provider last reported, plus the estimate of what came after.

        Where nothing was reported, or the prompt was rewritten since, all of it is estimated.
        """
        known = self._measured.get(path)
        tokens = None if known is None else known.tokens_of(state.system_prompt, state.view)
        return state.context_tokens if tokens is None else tokens
