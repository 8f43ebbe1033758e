"""
The decisions in a recorded run.

``decisions`` are answers to questions and permissions, and results stated by people; ``check_recorded_calls`` yields the decisions of another policy.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from attrs import frozen

from stepengine.data.json import freeze_object
from stepengine.data.outcomes import Value
from stepengine.data.questions import Answer, Question
from stepengine.data.tools import ToolSpec
from stepengine.journal.encoding import decode_stored, get_recorded_questions
from stepengine.journal.history import History, parse_created
from stepengine.journal.records import Input, Result, format_address
from stepengine.journal.sources import JournalLike, as_journal
from stepengine.runtime.performer import child_path

if TYPE_CHECKING:
    from stepengine.permissions import Policy


@frozen(kw_only=True)
class RecordedDecision:
    """
    A decision about a run from outside of it.

    Attributes:
        record: The number of the record with the decision, from 1.
        address: The address of the effect.
        time: The time of the decision, by the run's clock.
        kind: ``"question"``, ``"permission"``, or ``"result"`` for the stated result of an effect in doubt.
        asked: The question; for a result the effect.
        tool: For a permission, the tool.
        said: The answer, or ``""``.
        declined: Whether the person declined to answer.
        edited: Whether the answer changed the input of the call.
        remembered: ``"session"`` or ``"always"`` if the decision covers later calls; else ``""``.
        by: The recorded name of the person who decided, or ``""``.
        reason: The reason, or ``""``.
    """

    record: int
    address: str
    time: datetime
    kind: str
    asked: str
    tool: str = ""
    said: str = ""
    declined: bool = False
    edited: bool = False
    remembered: str = ""
    by: str = ""
    reason: str = ""


def decisions(journal: JournalLike) -> list[RecordedDecision]:
    """
    Return the answers to questions and permissions of a run, and the results stated by people, in recorded order.

    Raises:
        JournalError: when the journal cannot be read, or holds no run.
    """
    history = as_journal(journal).history()
    if history.head is None:
        raise as_journal(journal).make_missing_error()
    return list(_find_decisions(history, parse_created(history.head)))


def _make_position_members(record: Input | Result, number: int, created: datetime) -> dict[str, Any]:
    """Return number, address and time of a record, as members of ``RecordedDecision``."""
    time = created + timedelta(milliseconds=record.at)
    return {"record": number, "address": format_address(*record.address), "time": time}


def _find_decisions(history: History, created: datetime) -> Iterator[RecordedDecision]:
    """Yield the decisions of people in a record, in order; *created* is the time of its start."""
    # Inputs as they were read: texts that stand apart are put in.
    inputs = iter(history.inputs)
    for number, record in enumerate(history.records, 1):
        if isinstance(record, Input):
            yield from _find_decisions_in_input(history, next(inputs), number, created)
        elif isinstance(record, Result):
            yield from _find_decisions_in_result(history, record, number, created)


def _find_decisions_in_result(
    history: History, record: Result, number: int, created: datetime
) -> Iterator[RecordedDecision]:
    """Yield the answers in the outcome of questions."""
    intent = history.intents.get(record.address)  # the end of a background child has none
    outcome = history.outcome(record) if intent is not None and intent.type == "ask" else None
    if intent is not None and isinstance(outcome, Value):
        form = history.form(intent)
        for question, answer in zip(get_recorded_questions(form), outcome.value, strict=True):
            yield _make_decision(_make_position_members(record, number, created), form, question, answer)


def _find_decisions_in_input(
    history: History, record: Input, number: int, created: datetime
) -> Iterator[RecordedDecision]:
    """Yield the decisions in an input, such as a manual result."""
    address, said = record.address, record.input
    if said["type"] == "manual_result":
        yield RecordedDecision(
            **_make_position_members(record, number, created),
            kind="result",
            asked=str(history.intents[address].subject or history.intents[address].type),
            by=said["by"],
            reason=said["reason"],
        )
    elif said["type"] == "answer" and address not in history.results:
        # The result that follows the last answer contains all answers.
        form = history.form(history.intents[address])
        found = next((each for each in get_recorded_questions(form) if each.id == said["question_id"]), None)
        if found is not None:
            yield _make_decision(
                _make_position_members(record, number, created), form, found, decode_stored(said["answer"])
            )


def _make_decision(
    position: Mapping[str, Any], form: Mapping[str, Any], question: Question, answer: Answer
) -> RecordedDecision:
    return RecordedDecision(
        **position,
        kind=str(form["purpose"]),
        asked=question.text,
        tool=question.tool_name or "",
        said=answer.value,
        declined=answer.declined,
        edited=answer.edited_input is not None,
        remembered=answer.remember or "",
        by=answer.by,
        reason=answer.reason,
    )


@frozen
class JudgedCall:
    """
    The decision of a policy about a recorded tool call.

    Attributes:
        address: The address of the call, such as ``#3``.
        agent: The id of the agent that made the call.
        tool: The name of the tool.
        input: The recorded input.
        decision: ``"allow"``, ``"deny"`` or ``"ask"``.
        why: The reason, one sentence.
    """

    address: str
    agent: str
    tool: str
    input: Mapping[str, Any]
    decision: str
    why: str


def check_recorded_calls(journal: JournalLike, policy: Policy, tools: Mapping[str, ToolSpec]) -> Iterator[JudgedCall]:
    """
    Yield the decision of a policy about each tool call of a recorded run, in order; nothing is run.

    Args:
        journal: The run.
        policy: The policy.
        tools: The tools by name. Rules about categories match no other tool, and modes treat every other as one that may change something.

    Raises:
        JournalError: when the journal cannot be read, or holds no run.
    """
    from stepengine.permissions import Request

    history = as_journal(journal).history()
    root, agents = history.root, dict[str, str]()
    for (path, seq), intent in history.intents.items():
        if intent.type == "agent_call":
            child = "" if seq < 0 else child_path(path, seq)
            agents[child] = str(intent.effect["agent_id"])  # type: ignore[index]  # only a model call is not a mapping
        elif intent.starts_child_or_body:
            agents[child_path(path, seq)] = agents.get(path, "")
        if intent.type != "tool_call":
            continue
        form: Any = history.form(intent)
        tool, agent = str(form["tool_name"]), agents.get(path, "")
        request = Request(
            tool=tools.get(tool) or ToolSpec(tool),
            input=freeze_object(form["input"]),
            agent_id=agent,
            session_id=root.get("session_id"),
            user_id=root.get("user_id"),
            source=str(form["source"]),
        )
        verdict = policy.check(request)
        yield JudgedCall(format_address(path, seq), agent, tool, form["input"], verdict.decision, verdict.why)
