"""
Structured output through a tool, for providers without support for schemas: the input of the tool is the answer.

The tool is added before a request is encoded. Its call in the reply becomes text, so it never appears in the conversation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import Any

import attrs

from stepengine.data.json import JsonDict, compact
from stepengine.data.messages import TextPart, ToolCallPart
from stepengine.data.models import (
    ModelDelta,
    ModelReply,
    ModelRequest,
    StopReason,
    TextChunk,
    ToolCallChunk,
    ToolCallEnded,
    ToolCallStarted,
)
from stepengine.data.schemas import nest_schema_under_property
from stepengine.data.tools import ToolSpec
from stepengine.errors import ModelError
from stepengine.models._failures import GRAMMAR

ANSWER = "final_answer"
SAYS = "Gives the final answer, once nothing else is left to do: its input is the answer itself."
WHOLE = "answer"
"""The member with the answer if that is not an object, because the input of a tool must be one."""
KEPT_TOOLS = 100
"""More response schemas than the agents of a process have at once."""


def add_answer_tool_if_needed(
    request: ModelRequest,
    provider: str,
    explain_unsupported_schema: Callable[[ModelRequest], str],
    previous_failure: str,
) -> ModelRequest:
    """
    Return *request*, with the answer tool if its schema is unsupported or it asks for the tool; raise ``ModelError`` if that is impossible.

    Args:
        request: The request.
        provider: The provider, for errors.
        explain_unsupported_schema: Returns why the provider does not support the schema; ``""`` if it does.
        previous_failure: The failure kind of the previous attempt.

    Raises:
        ModelError: when the settings require native support of the schema, or an agent's tool has the same name.
    """
    schema, how = request.settings.response_schema, request.settings.output
    if schema is None:
        return request
    why = explain_unsupported_schema(request) if how != "tool" else ""
    if not can_use_answer_tool(request):
        if why or how == "tool":
            msg = f"the answer of {request.model!r} needs a tool named {ANSWER!r}, but the agent already has a tool of that name; rename it"
            raise ModelError(msg, kind="settings")
        return request
    if why and how == "native":
        msg = f"{provider} does not support this response_schema for {request.model!r}: {why}; remove output='native'"
        raise ModelError(msg, kind="settings")
    if how != "tool" and not why and (how == "native" or previous_failure != GRAMMAR):
        return request
    settings = attrs.evolve(request.settings, response_schema=None, tool_choice=None)
    choice = request.tool_choice or request.settings.tool_choice
    # A call is required if the model can call nothing else.
    if choice == "none" or not (request.tools or settings.server_tools):
        choice = ANSWER
    elif choice in {None, "auto", "required"}:
        # A forced call would prevent the model from using its provider's own tools.
        choice = "auto" if settings.server_tools else "required"
    return attrs.evolve(
        request, tools=(*request.tools, _make_answer_tool(schema)), tool_choice=choice, settings=settings
    )


@lru_cache(maxsize=KEPT_TOOLS)  # encoded tools are cached by their identity
def _make_answer_tool(schema: JsonDict) -> ToolSpec:
    """Return the answer tool; its input has the form *schema*, inside an object with one member if *schema* is not that of an object."""
    if schema.get("type") == "object":
        return ToolSpec(ANSWER, SAYS, schema, strict=True)
    inner, defined = nest_schema_under_property(schema, WHOLE)
    members = {"type": "object", "properties": {WHOLE: inner}, "required": [WHOLE], "additionalProperties": False}
    return ToolSpec(ANSWER, SAYS, {**members, **defined}, strict=True)


def can_use_answer_tool(request: ModelRequest) -> bool:
    """Return whether *request* has a response schema, and none of its tools has the name ``ANSWER`` of the answer tool."""
    return request.settings.response_schema is not None and all(tool.name != ANSWER for tool in request.tools)


def convert_answer_call_to_text(reply: ModelReply, schema: Mapping[str, object]) -> ModelReply:
    """
    Return *reply* with its answer call as text; an answer next to other calls is dropped.

    An answer next to other calls is premature. The other calls are executed, and the model answers again.
    """
    answers = [call for call in reply.tool_calls if call.tool_name == ANSWER]
    if not answers:
        return reply
    parts = [part for part in reply.content if part not in answers]
    if len(reply.tool_calls) > len(answers):
        return attrs.evolve(reply, content=tuple(parts))
    text = TextPart(_extract_answer_text(answers[0], schema))
    stop = StopReason.END_TURN if reply.stop_reason is StopReason.TOOL_USE else reply.stop_reason
    # Other text is dropped, because the text of the reply must be JSON.
    kept = [part for part in parts if not isinstance(part, TextPart)]
    data = {**reply.provider_data, "output": "tool"}
    return attrs.evolve(reply, content=(*kept, text), stop_reason=stop, provider_data=data)


def _extract_answer_text(call: ToolCallPart, schema: Mapping[str, object]) -> str:
    """Return the answer in the arguments of the answer call as JSON text; return unreadable arguments unchanged."""
    if call.raw_input is not None:
        return call.raw_input
    value: Any = call.input
    return compact(value[WHOLE] if schema.get("type") != "object" and WHOLE in value else JsonDict(value))


class AnswerChunks:
    """Converts the deltas of an answer call in a stream to text deltas."""

    def __init__(self) -> None:
        self._answers: set[int] = set()

    def convert_delta(self, delta: ModelDelta) -> Iterable[ModelDelta]:
        """Return *delta*; for a delta of the answer call return its arguments as text, and nothing for the call's start and end."""
        match delta:
            case ToolCallStarted(index=index, tool_name=name) if name == ANSWER:
                self._answers.add(index)
                return ()
            case ToolCallChunk(index=index, text=text) if index in self._answers:
                return (TextChunk(text),)
            case ToolCallEnded(index=index) if index in self._answers:
                return ()
            case _:
                return (delta,)

    def flush(self) -> Iterable[ModelDelta]:
        """Return no deltas, because none are held back."""
        return ()
