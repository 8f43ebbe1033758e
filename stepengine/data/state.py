"""``AgentState``: everything that a run is, as one value (design 5, requirements B)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from typing import Any

import attrs

from stepengine.data.estimate import Measured, estimate_tokens, tool_tokens, transcript_tokens
from stepengine.data.json import JsonDict, JsonValue, freeze, freeze_object
from stepengine.data.makers import maker_of
from stepengine.data.messages import Message, ToolMessage, UserMessage
from stepengine.data.parts import tuple_of
from stepengine.data.questions import Question
from stepengine.data.tools import ToolSpec
from stepengine.data.transcript import Transcript
from stepengine.data.usage import Usage

__all__ = ("AgentState", "prompt_tokens", "quick_state", "suspended_at")

OWN_CALL_ID = re.compile(r"c([0-9]{1,9})")


def _specs(value: Mapping[str, ToolSpec]) -> JsonDict:
    return value if type(value) is JsonDict else JsonDict(value)


def _record(self: Any) -> Transcript:
    record: Transcript = self.message_history
    return record


@attrs.frozen(weakref_slot=False)
class AgentState:
    """
    The state of one run, an immutable value (requirements B1-B9).

    Attributes:
        run_id: Unique id of the run.
        agent_id: The id of the agent definition.
        parent_id: The run id of the parent; ``None`` for a root run.
        ancestor_run_ids: Run ids from the root down to the parent.
        child_run_ids: Run ids of children in spawn order.
        message_history: The record: the whole conversation.
        view: What the model is shown; the record itself until a policy changes it.
        system_prompt: The resolved system prompt, sent with every request, never part of the history.
        tool_definitions: Name to specification of exactly the tools that this agent can use.
        output: The output set so far; ``None`` until set.
        steps_remaining: Model steps that are left.
        step_index: The number of steps that have begun.
        usage: Tokens spent by this run and its children.
        cost: US dollars spent by this run and its children; ``None`` when a part is unknown.
        credits_used: Credits that tools reported.
        context: A JSON object that hooks and tools share between steps.
        pending: Questions that the run waits for.
        next_call: The number of the next tool call id.
        id_prefix: What stands before call ids of a child that inherited its history, such as ``"c3_"``; else ``"c"``.
    """

    run_id: str = ""
    agent_id: str = ""
    parent_id: str | None = None
    ancestor_run_ids: tuple[str, ...] = attrs.field(default=(), converter=tuple_of)
    child_run_ids: tuple[str, ...] = attrs.field(default=(), converter=tuple_of)
    message_history: Transcript = attrs.field(factory=Transcript)
    view: Transcript = attrs.field(default=attrs.Factory(_record, takes_self=True))
    system_prompt: str = ""
    tool_definitions: Mapping[str, ToolSpec] = attrs.field(factory=JsonDict, converter=_specs)
    output: JsonValue = attrs.field(default=None, converter=freeze)
    steps_remaining: int = 0
    step_index: int = 0
    usage: Usage = Usage()
    cost: Decimal | None = Decimal(0)
    credits_used: float = 0
    context: JsonDict = attrs.field(factory=JsonDict, converter=freeze_object)
    pending: tuple[Question, ...] = attrs.field(default=(), converter=tuple_of)
    next_call: int = 1
    id_prefix: str = "c"

    @property
    def context_tokens(self) -> int:
        """The estimated size of the next request in tokens: view, system prompt and tools (generator-contract G14)."""
        tools = tool_tokens(self.tool_definitions.values())
        return transcript_tokens(self.view) + estimate_tokens(self.system_prompt) + tools

    @classmethod
    def from_messages(cls, messages: Iterable[Message], **fields: Any) -> AgentState:
        """
        Return a state that holds a history, to be passed as ``previous=`` (requirements D18).

        Raises:
            TranscriptError: when calls and results do not pair.
        """
        history = Transcript(messages)
        taken = [OWN_CALL_ID.fullmatch(m.tool_call_id) for m in history if type(m) is ToolMessage]
        next_call = 1 + max([int(match[1]) for match in taken if match], default=0)
        return cls(message_history=history, next_call=next_call, **fields)

    @classmethod
    def from_dicts(cls, messages: Iterable[Any], **fields: Any) -> AgentState:
        """
        Return a state that holds a history in the ``{"role", "content"}`` form; system messages become its system prompt.

        Raises:
            DataError: when a message cannot be read.
            TranscriptError: when calls and results do not pair.
        """
        from stepengine.data.wire import read_history  # noqa: PLC0415

        history = read_history(messages)
        return cls.from_messages(history.transcript, system_prompt=history.system_prompt, **fields)


quick_state = maker_of(AgentState)


def suspended_at(record: Sequence[Message]) -> int | None:
    """
    Return where the reply stands whose calls wait for an answer; ``None`` when the last step of *record* is finished.

    Only people may have said something after it.
    """
    at = len(record) - 1
    while at >= 0 and type(record[at]) is UserMessage:
        at -= 1
    waits = False
    while at >= 0 and type(record[at]) is ToolMessage:
        waits = waits or record[at].status == "pending"  # type: ignore[union-attr]
        at -= 1
    return at if waits else None


def prompt_tokens(state: AgentState, measured: Measured | None) -> int:
    """
    Return how large the next prompt of a run is in tokens (requirements X45).

    What the provider last reported plus the estimate of what came after; where nothing was reported, or the prompt was
    rewritten since, all of it is estimated.
    """
    tokens = None if measured is None else measured.tokens_of(state.system_prompt, state.view)
    return state.context_tokens if tokens is None else tokens
