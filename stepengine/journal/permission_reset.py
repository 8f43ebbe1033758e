"""
Remove the permissions from a third-party journal, so that a resumed run asks again.

A journal says who allowed what, and whoever writes one can say it. What is recorded as done stays done; but a yes whose call
has not begun would let it run now, and one for good would let later calls run, under rules that ask. An answer without a result would
be given to whichever question has its id or text, also a permission that the run asks for later.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import attrs

from stepengine.data.outcomes import Value
from stepengine.data.questions import Answer
from stepengine.journal.encoding import questions_of, restored
from stepengine.journal.history import History, get_start_address
from stepengine.journal.provenance import replace_with_derived
from stepengine.journal.recorded_part import JournalCut
from stepengine.journal.recorded_permissions import limit_to_one_call
from stepengine.journal.records import Address, Input, Intent, Record, Result
from stepengine.journal.store import Journal

PERMISSION = "permission"


def find_effective_questions(history: History, *, after: Address | None = None) -> list[str]:
    """
    Return the ids of questions whose recorded approval covers a call not started yet, or all later calls, or whose answer has no result.

    Args:
        history: What was recorded.
        after: Where it is cut off; by default nowhere.
    """
    cut = JournalCut(history)
    if after is not None:
        cut.cut_at((after[0], after[1] + 1))
    elif history.is_complete:
        return []
    found = [
        question.id
        for intent in _find_effective_permissions(history, cut)
        for question in questions_of(history.form(intent))
    ]
    return list(dict.fromkeys([*found, *[record.input["question_id"] for record in _find_unused_answers(history)]]))


def _find_unused_answers(history: History) -> list[Input]:
    """Return the recorded answers that are in no result of their question."""
    return [
        record
        for record in history.inputs
        if record.input.get("type") == "answer"
        and not (
            record.address in history.results and _is_answer_to(record, _find_question_ids(history, record.address))
        )
    ]


def _find_question_ids(history: History, address: Address) -> set[str]:
    """Return the ids of the questions of the effect at an address."""
    intent = history.intents.get(address)
    return {q.id for q in questions_of(history.form(intent))} if intent is not None and intent.type == "ask" else set()


def remove_approvals(journal: Journal) -> tuple[str, ...]:
    """
    Remove the recorded approvals of later calls, so that the run asks again; return the question ids.

    What stood there is kept beside the journal, where that has a place.

    Raises:
        JournalError: when the journal is damaged, holds no run, or cannot be written.
    """
    history = journal.history()
    found = find_effective_questions(history)
    if found:
        journal.set_aside()
        replace_with_derived(journal, list(drop_approvals(history)), journal)
    return tuple(found)


def _find_effective_permissions(history: History, cut: JournalCut) -> Iterator[Intent]:
    """Yield the permission questions whose recorded approvals still have an effect."""
    for address, intent in history.intents.items():
        is_permission = intent.type == "ask" and history.form(intent)["purpose"] == PERMISSION
        if not is_permission or not cut.keeps_result(address) or _has_ended(history, address[0], cut):
            continue
        has_begun = _has_call_started(history, intent, cut)
        if any(
            _approves_later_calls(answer, has_begun=has_begun) for answer in _get_recorded_answers(history, address)
        ):
            yield intent


def _get_recorded_answers(history: History, address: Address) -> Sequence[Answer]:
    """Return the recorded answers to an effect, those waiting for its other questions included."""
    known = history.results.get(address)
    if known is None:
        ids = _find_question_ids(history, address)
        return [restored(each.input["answer"]) for each in history.inputs if _is_answer_to(each, ids)]
    outcome: object = history.outcome(known)
    return outcome.value if isinstance(outcome, Value) else ()


def _is_answer_to(record: Input, ids: set[str]) -> bool:
    return record.input.get("type") == "answer" and record.input["question_id"] in ids


def _approves_later_calls(answer: object, *, has_begun: bool) -> bool:
    """Return whether an answer approves a call that has not started, or later calls."""
    agrees = answer.agrees if isinstance(answer, Answer) else bool(answer)
    return agrees and (not has_begun or (isinstance(answer, Answer) and answer.remember is not None))


def _has_call_started(history: History, asked: Intent, cut: JournalCut) -> bool:
    wanted = history.form(asked).get("tool_call_id")
    calls = history.find_effects_of_call("tool_call", asked.path, wanted)
    return any(cut.keeps_intent(call.address) for call in calls)


def _has_ended(history: History, path: str, cut: JournalCut) -> bool:
    """Return whether the run there, or one around it, has ended, so that nothing of it can begin."""
    while path:
        end = history.end_of(path)
        if end is not None and cut.keeps_result(end.address):
            return True
        path = get_start_address(path)[0]
    return False


def drop_approvals(history: History, *, keep: Address | None = None) -> Iterator[Record]:
    """
    Yield the records without approvals of later calls; lasting approvals become approvals for one call.

    Args:
        history: What was recorded.
        keep: The address of a question whose answers stay as they are.
    """
    cut = JournalCut(history)
    asked = {intent.address: intent for intent in _find_effective_permissions(history, cut) if intent.address != keep}
    ids = {question.id for intent in asked.values() for question in questions_of(history.form(intent))}
    ids |= {record.input["question_id"] for record in _find_unused_answers(history) if record.address != keep}
    for record in history.records:
        if isinstance(record, Input) and _is_answer_to(record, ids):
            continue
        intent = asked.get(record.address) if isinstance(record, Result) else None
        if intent is None:
            yield record
        elif _has_call_started(history, intent, cut):
            yield _limit_to_one_call(history, record)  # type: ignore[arg-type]  # only a result has an intent here


def _limit_to_one_call(history: History, result: Result) -> Result:
    outcome: Any = history.outcome(result)
    answers = tuple(map(limit_to_one_call, outcome.value))
    return Result(result.path, result.seq, result.at, attrs.evolve(outcome, value=answers), result.extras)
