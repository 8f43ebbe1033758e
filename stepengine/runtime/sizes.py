"""How many tokens a request has, estimated before it is sent."""

from __future__ import annotations

from stepengine.data.estimate import estimate_tokens, message_tokens, tool_tokens, transcript_tokens
from stepengine.data.models import ModelRequest


def estimate_request_tokens(request: ModelRequest) -> int:
    """Return the estimated tokens of a request; each message and tool is measured once."""
    tokens = transcript_tokens(request.messages) + sum([message_tokens(m) for m in request.tail])
    return tokens + estimate_tokens(request.system_prompt) + tool_tokens(request.tools)


def estimate_total_tokens(request: ModelRequest) -> int:
    """Return the estimated tokens of a request and its reply; without ``max_tokens`` the reply counts as 0."""
    return estimate_request_tokens(request) + (request.settings.max_tokens or 0)
