"""
Remove the permissions from a third-party journal, so that a resumed run asks again.

The author of a journal can put any approval into it. Finished calls stay recorded. An approval whose call has not started would run it
now, and a lasting approval would run later calls without a question. An answer without a result would answer any question with its id or
text, also a permission question that the run asks later.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import attrs

from stepengine.data.questions import Answer
from stepengine.errors import JournalError
from stepengine.journal.encoding import decode_stored, get_recorded_questions
from stepengine.journal.fingerprints import Fingerprints
from stepengine.journal.history import History
from stepengine.journal.provenance import has_trusted_permissions, replace_records_by_derived
from stepengine.journal.recorded_calls import RecordedCalls
from stepengine.journal.recorded_part import JournalCut
from stepengine.journal.recorded_permissions import limit_to_one_call, list_answers
from stepengine.journal.records import Address, Input, Intent, Record, Result, format_address, get_starter_address
from stepengine.journal.store import Journal, hold_lock
from stepengine.redaction import Redactor

PERMISSION = "permission"
ANSWERED = ("ask", "perform")
"""The kinds of effects whose outcome may be a list of answers."""


def find_effective_approvals(history: History, *, after: Address | None = None) -> list[str]:
    """
    Return the question ids or effect addresses of recorded approvals that still cover a call, and of answers without a result.

    Args:
        history: The recorded run.
        after: The last effect that is kept; by default all are kept.
    """
    calls, cut = RecordedCalls(history), JournalCut(history.tree)
    if after is not None:
        cut.cut_at((after[0], after[1] + 1))
    elif history.is_complete:
        return []
    found = [
        name
        for intent in _find_effective_permissions(calls, cut)
        for name in [q.id for q in get_recorded_questions(history.form(intent))] or [format_address(*intent.address)]
    ]
    return list(dict.fromkeys([*found, *[record.input["question_id"] for record in _find_unused_answers(history)]]))


def _find_unused_answers(history: History) -> list[Input]:
    """Return the answers in input records that are not part of the result of their question."""
    answers = [record for record in history.inputs if record.input.get("type") == "answer"]
    # Once for each effect: one may have as many answers as questions.
    ids = {address: _find_question_ids(history, address) for address in {record.address for record in answers}}
    return [
        record
        for record in answers
        if not (record.address in history.results and _is_answer_to(record, ids[record.address]))
    ]


def _find_question_ids(history: History, address: Address) -> set[str]:
    intent = history.intents.get(address)
    return (
        {q.id for q in get_recorded_questions(history.form(intent))}
        if intent is not None and intent.type == "ask"
        else set()
    )


def remove_approvals(journal: Journal) -> tuple[str, ...]:
    """
    Remove the recorded approvals of calls that have not started, after a backup, so that the run asks again; return the question ids.

    The journal is backed up first, if its store supports backups. It is not locked here, so no process may run it meanwhile.

    Raises:
        JournalError: when the journal is damaged, holds no run, or cannot be written; ``JournalLocked`` when a run writes to it.
    """
    if not find_effective_approvals(journal.history()):
        return ()
    with hold_lock(journal):
        history = journal.history()
        found = find_effective_approvals(history)
        if found:
            journal.make_backup()
            replace_records_by_derived(journal, list(drop_approvals(history)), journal)
    return tuple(found)


def find_approving_permissions(history: History) -> list[Intent]:
    """Return the effects whose recorded answers approve a call, or may approve one because their fingerprint does not match."""
    prints = Fingerprints(Redactor({}, shapes=False))
    return [
        intent
        for address, intent in history.intents.items()
        if intent.type in ANSWERED
        and any(answer.agrees for answer in _get_recorded_answers(history, address))
        and _may_be_permission(history, intent, prints)
    ]


def refuse_approvals_of_others(journal: Journal, history: History, *, trust: bool | None = None) -> None:
    """
    Raise if a journal contains approvals that this user did not give; see ``resume`` for *trust*.

    Raises:
        JournalError: when there are such approvals; the error names the effects and a remedy.
    """
    if has_trusted_permissions(journal, trust=trust):
        return
    found = [format_address(*intent.address) for intent in find_approving_permissions(history)]
    if found:
        msg = (
            f"{journal.name} was written or changed by others, and its approvals would allow calls that you did not approve: "
            f'{", ".join(found)}; tools="recorded" (--tools recorded) performs none'
        )
        raise JournalError(msg)


def _may_be_permission(history: History, intent: Intent, prints: Fingerprints) -> bool:
    """Return whether an effect is a permission question, or its fingerprint does not match its record."""
    form = history.form(intent)
    is_permission = intent.type == "ask" and form["purpose"] == PERMISSION
    # A run compares fingerprints only. If one does not fit its record, the record may answer any question.
    return is_permission or intent.fp != prints.for_effect(form)


def _find_effective_permissions(calls: RecordedCalls, cut: JournalCut) -> Iterator[Intent]:
    """Yield the permission questions whose recorded approvals still have an effect."""
    history = calls.history
    for intent in find_approving_permissions(history):
        address = intent.address
        if not cut.keeps_result(address) or _has_kept_end(history, address[0], cut):
            continue
        if any(
            _approves_later_calls(answer, has_call_started=_has_call_started(calls, intent, answer, cut))
            for answer in _get_recorded_answers(history, address)
        ):
            yield intent


def _get_recorded_answers(history: History, address: Address) -> Sequence[Answer]:
    """Return the recorded answers to an effect; without a result, those in input records."""
    known = history.results.get(address)
    if known is None:
        ids = _find_question_ids(history, address)
        return [decode_stored(each.input["answer"]) for each in history.inputs if _is_answer_to(each, ids)]
    return list_answers(history.outcome(known))


def _is_answer_to(record: Input, ids: set[str]) -> bool:
    return record.input.get("type") == "answer" and record.input["question_id"] in ids


def _approves_later_calls(answer: Answer, *, has_call_started: bool) -> bool:
    return answer.agrees and (not has_call_started or answer.remember is not None)


def _has_call_started(calls: RecordedCalls, permission: Intent, answer: Answer, cut: JournalCut) -> bool:
    """Return whether the call that an answer to a permission question approves has started after it."""
    history = calls.history
    form = history.form(permission)
    if permission.type != "ask" or form["purpose"] != PERMISSION:
        return False
    # The id alone may be that of another call, as no fingerprint covers it; the name may be an alias.
    approved = [
        question.details if answer.edited_input is None else answer.edited_input
        for question in get_recorded_questions(form)
    ]
    same_id = calls.find_effects_of_call("tool_call", permission.path, form.get("tool_call_id"))
    later = [history.form(call) for call in same_id if call.seq > permission.seq and cut.keeps_intent(call.address)]
    return any(call["input"] in approved for call in later)


def _has_kept_end(history: History, path: str, cut: JournalCut) -> bool:
    """Return whether the child at *path*, or one around it, has a recorded end that *cut* keeps, so that none of its effects can start."""
    while path:
        end = history.tree.find_end(path)
        if end is not None and cut.keeps_result(end.address):
            return True
        path = get_starter_address(path)[0]
    return False


def drop_approvals(history: History, *, kept_question: Address | None = None) -> Iterator[Record]:
    """
    Yield the records without unused answers and approvals of calls that have not started; lasting approvals cover one call.

    Args:
        history: The recorded run.
        kept_question: The address of a question whose answers stay unchanged.
    """
    calls, cut = RecordedCalls(history), JournalCut(history.tree)
    asked = {
        intent.address: intent for intent in _find_effective_permissions(calls, cut) if intent.address != kept_question
    }
    ids = {question.id for intent in asked.values() for question in get_recorded_questions(history.form(intent))}
    ids |= {record.input["question_id"] for record in _find_unused_answers(history) if record.address != kept_question}
    for record in history.records:
        if isinstance(record, Input) and _is_answer_to(record, ids):
            continue
        intent = asked.get(record.address) if isinstance(record, Result) else None
        if intent is None:
            yield record
        elif all(
            _has_call_started(calls, intent, each, cut) for each in _get_recorded_answers(history, intent.address)
        ):
            yield _limit_result_to_one_call(history, record)  # type: ignore[arg-type]  # only a result has an intent here


def _limit_result_to_one_call(history: History, result: Result) -> Result:
    """Return the result of a question with lasting approvals turned into approvals of one call."""
    outcome: Any = history.outcome(result)
    answers = tuple(map(limit_to_one_call, outcome.value))
    return Result(result.path, result.seq, result.at, attrs.evolve(outcome, value=answers), result.extras)
