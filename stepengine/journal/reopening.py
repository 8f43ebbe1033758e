"""
Permissions of a journal that somebody else made: they are taken back, so that a run that goes on asks again.

A journal says who allowed what, and whoever writes one can say it. What is recorded as done stays done; but a yes whose call
has not begun would let it run now, and one for good would let later calls run, under rules that ask.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import attrs

from stepengine.data.outcomes import Value
from stepengine.data.questions import Answer
from stepengine.journal.encoding import questions_of, restored
from stepengine.journal.history import History, parent_of
from stepengine.journal.records import Address, Input, Intent, Record, Result
from stepengine.journal.replayer import Cut, for_once
from stepengine.journal.store import Journal

__all__ = ("permissions_ahead", "take_back")

PERMISSION = "permission"


def permissions_ahead(history: History, *, after: Address | None = None) -> list[str]:
    """
    Return the ids of the questions whose recorded yes would let a call run that has not begun, or calls for good.

    Args:
        history: What was recorded.
        after: Where it is cut off; by default nowhere.
    """
    cut = Cut(history)
    if after is not None:
        cut.at((after[0], after[1] + 1))
    elif history.is_complete:
        return []
    found = [question.id for intent in _open_questions(history, cut) for question in questions_of(history.form(intent))]
    return list(dict.fromkeys(found))


def take_back(journal: Journal) -> tuple[str, ...]:
    """
    Make a run ask again for what its journal allows in advance; return the ids of the questions.

    What stood there is kept beside the journal, where that has a place.

    Raises:
        JournalError: when the journal is damaged, holds no run, or cannot be written.
    """
    history = journal.history()
    found = permissions_ahead(history)
    if found:
        journal.set_aside()
        journal.replace(list(_without(history)))
    return tuple(found)


def _open_questions(history: History, cut: Cut) -> Iterator[Intent]:
    for address, intent in history.intents.items():
        is_permission = intent.type == "ask" and history.form(intent)["purpose"] == PERMISSION
        if not is_permission or not cut.keeps_result(address) or _is_over(history, address[0], cut):
            continue
        has_begun = _has_begun(history, intent, cut)
        if any(_reaches(answer, has_begun=has_begun) for answer in _answers(history, address)):
            yield intent


def _answers(history: History, address: Address) -> Sequence[Answer]:
    """Return what was answered; an answer that waits for the others of its effect counts, too."""
    known = history.results.get(address)
    if known is None:
        ids = {question.id for question in questions_of(history.form(history.intents[address]))}
        return [restored(each.input["answer"]) for each in history.inputs if _answers_one_of(each, ids)]
    outcome: object = history.outcome(known)
    return outcome.value if isinstance(outcome, Value) else ()


def _answers_one_of(record: Input, ids: set[str]) -> bool:
    return record.input.get("type") == "answer" and record.input["question_id"] in ids


def _reaches(answer: object, *, has_begun: bool) -> bool:
    agrees = answer.agrees if isinstance(answer, Answer) else bool(answer)
    return agrees and (not has_begun or (isinstance(answer, Answer) and answer.remember is not None))


def _has_begun(history: History, asked: Intent, cut: Cut) -> bool:
    wanted = history.form(asked).get("tool_call_id")
    calls = history.about_call("tool_call", asked.path, wanted)
    return any(cut.keeps_intent((call.path, call.seq)) for call in calls)


def _is_over(history: History, path: str, cut: Cut) -> bool:
    """Return whether the run there, or one around it, has ended, so that nothing of it can begin."""
    while path:
        end = history.end_of(path)
        if end is not None and cut.keeps_result((end.path, end.seq)):
            return True
        path = parent_of(path)[0]
    return False


def _without(history: History) -> Iterator[Record]:
    """Give the records without answers to later calls; a yes for good to a call that has begun counts for that call alone."""
    cut = Cut(history)
    asked = {(intent.path, intent.seq): intent for intent in _open_questions(history, cut)}
    ids = {question.id for intent in asked.values() for question in questions_of(history.form(intent))}
    for record in history.records:
        if isinstance(record, Input) and _answers_one_of(record, ids):
            continue
        intent = asked.get((record.path, record.seq)) if isinstance(record, Result) else None
        if intent is None:
            yield record
        elif _has_begun(history, intent, cut):
            yield _for_once(history, record)  # type: ignore[arg-type]  # only a result has an intent here


def _for_once(history: History, result: Result) -> Result:
    outcome: Any = history.outcome(result)
    answers = tuple(map(for_once, outcome.value))
    return Result(result.path, result.seq, result.at, attrs.evolve(outcome, value=answers), result.attempts)
