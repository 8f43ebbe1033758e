"""
The messages that compactions removed from the model's view, found in a journal.

A journal has no record of a compaction: policies are pure, and a replay comes to the same again. But each request of a
step is in it, and what a compaction left out is in the request before and not in the one after. What was said between the
two, the reply and the results of its calls, stands in no request if it was left out at once; it is put together from what
the model and the tools gave.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs
from attrs import frozen

from stepengine.data.estimate import message_tokens
from stepengine.data.messages import (
    AssistantMessage,
    AssistantPart,
    Message,
    TextPart,
    ToolCallPart,
    ToolMessage,
    ToolResult,
    UserMessage,
)
from stepengine.data.models import ModelReply, StopReason
from stepengine.data.outcomes import Value
from stepengine.data.transcript import Transcript
from stepengine.journal.history import History, parse_recorded_start
from stepengine.journal.recorded_requests import RecordedRequests
from stepengine.journal.records import ROOT, Address, Intent

OF_A_STEP = ("step", "final_answer")
SAID_TO_IT = ("USER_PROMPT", "INSTRUCTIONS_PROMPT", "CHILDREN")
"""The tags of what a run is told meanwhile: it stands in place of nothing."""


@frozen(kw_only=True)
class Compaction:
    """
    The changes of one compaction, seen from the request after it.

    Attributes:
        address: The first model call without the removed messages.
        step: The number of its step in its run, from 1.
        left_out: The removed messages, oldest first: earlier requests contained them, or would have.
        instead: The messages that replace them: a summary, or notes in place of results.
        unrecorded: The number of further removed results that are in no request and not recorded as the result of a tool: those
            of the run itself and of children.
    """

    address: Address
    step: int
    left_out: tuple[Message, ...]
    instead: tuple[Message, ...]
    unrecorded: int

    @property
    def removed_tokens(self) -> int:
        """The estimated number of tokens in the removed messages."""
        return sum(map(message_tokens, self.left_out))

    @property
    def replacement_tokens(self) -> int:
        """The estimated number of tokens in the messages that replace them."""
        return sum(map(message_tokens, self.instead))


def find_compactions(history: History) -> Iterator[Compaction]:
    """
    Yield the compactions of a recorded run and its children, in the order of the requests after them.

    A compaction is left out if the run made no model call after it.

    Raises:
        JournalCorrupt: when a needed record cannot be read.
    """
    requests = RecordedRequests(history)
    before: dict[str, _SentMessages] = {}
    previous = parse_recorded_start(history).previous
    if previous is not None:
        before[""] = _SentMessages(previous.view)
    for address, intent in history.intents.items():
        if address == ROOT:
            continue
        sent = before.get(intent.path)
        if intent.type == "model_call" and history.form(intent)["purpose"] in OF_A_STEP:
            request = requests.get_request(intent)
            goes_on = any(isinstance(message, AssistantMessage) for message in request.tail)
            if sent is not None and not goes_on:
                found = _make_compaction(sent, request.messages, address)
                if found.left_out or found.unrecorded:
                    yield found
            known = (
                sent if sent is not None and goes_on else _SentMessages(request.messages, sent.step + 1 if sent else 1)
            )
            before[intent.path] = known.with_reply(history, intent)
        elif sent is not None and intent.type == "tool_call":
            before[intent.path] = sent.with_result(history, intent)


@frozen
class _SentMessages:
    """
    The last messages that a run's model saw, and the messages added since.

    Attributes:
        view: The messages of the request.
        step: The step of the request.
        said: The parts of the reply.
        results: The results of the calls in the reply that come from tools.
    """

    view: Transcript
    step: int = 0
    said: tuple[AssistantPart, ...] = ()
    results: tuple[ToolMessage, ...] = ()

    def with_reply(self, history: History, intent: Intent) -> _SentMessages:
        """Return a copy with the model's reply to the request added, if the run adds it to the history."""
        reply = _find_result_value(history, intent)
        if not isinstance(reply, ModelReply) or reply.stop_reason is StopReason.ERROR:
            return self
        parts = list(reply.content)
        if parts and reply.stop_reason is StopReason.MAX_TOKENS and isinstance(parts[-1], ToolCallPart):
            # A call that was cut off is kept as text, never carried out.
            parts.pop()
        return attrs.evolve(self, said=(*self.said, *parts))

    def with_result(self, history: History, intent: Intent) -> _SentMessages:
        """Return a copy with the result of a call added, if the result belongs to the conversation."""
        form, result = history.form(intent), _find_result_value(history, intent)
        if form.get("source") != "model" or not isinstance(result, ToolResult):
            return self
        message = ToolMessage(form["tool_call_id"], form["tool_name"], result.content, result.status)
        return attrs.evolve(self, results=(*self.results, message))


def _find_result_value(history: History, intent: Intent) -> Any:
    """Return the value that an effect returned; ``None`` if it failed or has no result."""
    result = history.results.get(intent.address)
    outcome = None if result is None else history.outcome(result)
    return outcome.value if isinstance(outcome, Value) else None


def _make_compaction(sent: _SentMessages, after: Transcript, address: Address) -> Compaction:
    """Return the compaction between two requests: the messages that *after* no longer has."""
    lost = [m for m in sent.view.find_missing_messages(after) if m.ttl is None and not _is_pending_result(m)]
    fresh = after.find_missing_messages(sent.view)
    there = {m.tool_call_id: m for m in fresh if isinstance(m, ToolMessage)}
    # A hook may have changed a result before anybody saw it: only a note in its place says that it was left out.
    results = [m for m in sent.results if m.tool_call_id not in there or _is_compaction_note(there[m.tool_call_id])]
    replaced = {m.tool_call_id for m in lost if isinstance(m, ToolMessage)}
    said, unrecorded = [], 0
    if sent.said and not any(isinstance(m, AssistantMessage) and _has_reply_parts(m, sent.said) for m in fresh):
        reply = _make_reply_with_result_ids(sent)
        said.append(reply)
        known = {m.tool_call_id for m in sent.results} | there.keys()
        unrecorded = sum(call.tool_call_id not in known for call in reply.tool_calls)
    return Compaction(
        address=address,
        step=sent.step + 1,
        left_out=(*lost, *said, *results),
        instead=tuple([m for m in fresh if _is_compaction_note(m) or getattr(m, "tool_call_id", "") in replaced]),
        unrecorded=unrecorded,
    )


def _is_pending_result(message: Message) -> bool:
    """Return whether a message is a placeholder for a result that had not arrived yet."""
    return isinstance(message, ToolMessage) and message.status == "pending"


def _is_compaction_note(message: Message) -> bool:
    """Return whether a message is the summary or note that a compaction inserts."""
    if isinstance(message, UserMessage):
        return message.ttl is None and set(SAID_TO_IT).isdisjoint(message.tags)
    if isinstance(message, AssistantMessage):
        return False
    part = message.content[0] if len(message.content) == 1 else None
    data = part.provider_data if isinstance(part, TextPart) else None
    return data is not None and data.get("provider") == "stepengine"


def _has_reply_parts(message: AssistantMessage, parts: Sequence[AssistantPart]) -> bool:
    """Return whether a message has the texts and calls of a reply, ignoring the ids of the calls."""
    calls = [(part.tool_name, part.input) for part in message.tool_calls]
    asked = [(part.tool_name, part.input) for part in parts if isinstance(part, ToolCallPart)]
    words = [part.text for part in parts if isinstance(part, TextPart)]
    return all(call in calls for call in asked) and all(text in message.text for text in words)


def _make_reply_with_result_ids(sent: _SentMessages) -> AssistantMessage:
    """Return the reply before a compaction as a message; its calls get the ids that their results have."""
    waiting: dict[str, list[str]] = {}
    for message in sent.results:
        waiting.setdefault(message.tool_name, []).append(message.tool_call_id)
    parts = [_pop_and_assign_result_id(part, waiting) for part in sent.said]
    return AssistantMessage(tuple(parts))


def _pop_and_assign_result_id(reply_part: AssistantPart, ids_by_tool: Mapping[str, list[str]]) -> AssistantPart:
    """Return a call with the next id of its tool, removed from *ids_by_tool*; return other parts unchanged."""
    if not isinstance(reply_part, ToolCallPart):
        return reply_part
    ids = ids_by_tool.get(reply_part.tool_name)
    return attrs.evolve(reply_part, tool_call_id=ids.pop(0) if ids else "")
