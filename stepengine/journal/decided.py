"""Who decided what in a recorded run: ``decisions``, the answers to questions and permissions, and results that a person gave."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from attrs import frozen

from stepengine.data.outcomes import Value
from stepengine.data.questions import Answer, Question
from stepengine.journal.encoding import questions_of, restored
from stepengine.journal.finding import JournalLike, as_journal
from stepengine.journal.history import History, created_of
from stepengine.journal.records import Input, Result, shown_address

__all__ = ("Decided", "decisions")


@frozen(kw_only=True)
class Decided:
    """
    One thing that was decided from outside of a run.

    Attributes:
        record: The number of the record that says so, from 1.
        address: The effect that it is about.
        time: When, by the run's clock.
        kind: ``"question"``, ``"permission"``, or ``"result"`` for what somebody said had come of an effect in doubt.
        asked: The question; of a result the effect.
        tool: For a permission, the tool.
        said: The answer; ``""`` for none.
        declined: Whether nobody wanted to answer.
        edited: Whether another input was given than was asked about.
        remembered: ``"session"`` or ``"always"`` where it holds for later calls as well; ``""`` where it does not.
        by: Who decided, as they were called; ``""`` where nobody said.
        reason: Why; ``""`` where nobody said.
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


def decisions(journal: JournalLike) -> list[Decided]:
    """
    Return who answered what in a run, in the order of the record.

    Raises:
        JournalError: when the journal cannot be read, or holds no run.
    """
    history = as_journal(journal).history()
    if history.head is None:
        raise as_journal(journal).missing()
    return list(_all(history, created_of(history.head)))


class _DecisionPlace(NamedTuple):
    record: int
    address: str
    time: datetime

    @classmethod
    def of(cls, record: Input | Result, number: int, created: datetime) -> _DecisionPlace:
        """Return where and when a record says something."""
        return cls(number, shown_address(record.path, record.seq), created + timedelta(milliseconds=record.at))


def _all(history: History, created: datetime) -> Iterator[Decided]:
    # Inputs as they were read: texts that stand apart are put in.
    inputs = iter(history.inputs)
    for number, record in enumerate(history.records, 1):
        if isinstance(record, Input):
            yield from _of_input(history, next(inputs), number, created)
        elif isinstance(record, Result):
            yield from _of_result(history, record, number, created)


def _of_result(history: History, record: Result, number: int, created: datetime) -> Iterator[Decided]:
    intent = history.intents[record.path, record.seq]
    outcome = history.outcome(record) if intent.type == "ask" else None
    if isinstance(outcome, Value):
        form = history.form(intent)
        for question, answer in zip(questions_of(form), outcome.value, strict=True):
            yield _decided_by_answer(_DecisionPlace.of(record, number, created), form, question, answer)


def _of_input(history: History, record: Input, number: int, created: datetime) -> Iterator[Decided]:
    address, said = (record.path, record.seq), record.input
    if said["type"] == "manual_result":
        yield Decided(
            **_DecisionPlace.of(record, number, created)._asdict(),
            kind="result",
            asked=str(history.intents[address].subject or history.intents[address].type),
            by=said["by"],
            reason=said["reason"],
        )
    elif said["type"] == "answer" and address not in history.results:
        # With the last answer all of them stand in the result.
        form = history.form(history.intents[address])
        found = next((each for each in questions_of(form) if each.id == said["question_id"]), None)
        if found is not None:
            yield _decided_by_answer(_DecisionPlace.of(record, number, created), form, found, restored(said["answer"]))


def _decided_by_answer(at: _DecisionPlace, form: Mapping[str, Any], question: Question, answer: Answer) -> Decided:
    return Decided(
        **at._asdict(),
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
