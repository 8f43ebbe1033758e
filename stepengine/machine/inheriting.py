"""
What a child takes over from the run that spawns it, and what an inline child leaves (generator-contract L14 to L27).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import attrs

from stepengine.data.hooks import Change
from stepengine.data.messages import AssistantMessage, Message
from stepengine.data.parts import TextPart, ToolCallPart
from stepengine.data.state import AgentState
from stepengine.data.transcript import Transcript
from stepengine.machine.lifetimes import without

if TYPE_CHECKING:
    from stepengine.data.run import ChildResult
    from stepengine.machine.live import Live

__all__ = ("inheritable", "left_by", "take_history")


def inheritable(live: Live, call_id: str = "") -> AgentState:
    """
    Return the state as a child may inherit it: without step-scoped messages, with what the open reply said before its call.

    Args:
        live: The run that spawns.
        call_id: The call of the open reply that spawns; ``""`` for a handler's own.
    """
    state = live.state()
    record, view = state.message_history, state.view
    if live.lifetimes.has("agent_step"):
        same = view is record
        record = without(record, ("agent_step",))
        view = record if same else without(view, ("agent_step",))
    said = said_before(live, call_id)
    if said is not None:
        longer = record.append(said)
        view = longer if view is record else view.append(said)
        record = longer
    if record is state.message_history and view is state.view:
        return state
    return attrs.evolve(state, message_history=record, view=view)


def said_before(live: Live, call_id: str) -> AssistantMessage | None:
    """Return the text of the open reply that stands before the call *call_id*, as a message of its own."""
    said = []
    for part in live.open_reply.content if live.open_reply is not None else ():
        if type(part) is ToolCallPart and part.tool_call_id == call_id:
            break
        if type(part) is TextPart and part.text.strip():
            said.append(part)
    return AssistantMessage(tuple(said), ("OPEN_REPLY",)) if said else None


def left_by(state: AgentState, opening: Sequence[Message]) -> AgentState:
    """Return what a run leaves to the run that it went on from: its state without the messages that it began with."""
    if not opening:
        return state
    record = _less(state.message_history, opening)
    view = record if state.view is state.message_history else _less(state.view, opening)
    return attrs.evolve(state, message_history=record, view=view)


def take_history(live: Live, call_id: str, child: ChildResult[Any]) -> None:
    """Put the history that an inline child leaves in the place of the run's own (generator-contract L25, L26)."""
    left = child.left
    if left is None or child.is_error:
        return
    said = said_before(live, call_id)
    record = _unsaid(left.message_history, said)
    view = record if left.view is left.message_history else _unsaid(left.view, said)
    live.apply(Change(messages=record, view=None if view is record else view))


def _less(messages: Transcript, gone: Sequence[Message]) -> Transcript:
    return _kept(messages, [m for m in messages if not any(m is g for g in gone)])


def _unsaid(messages: Transcript, said: AssistantMessage | None) -> Transcript:
    if said is None:
        return messages
    return _kept(messages, [m for m in messages if type(m) is not AssistantMessage or m != said])


def _kept(messages: Transcript, kept: list[Message]) -> Transcript:
    return messages if len(kept) == len(messages) else Transcript(kept)
