"""
Messages to the run of a journal, whichever process has it.

They are put into the mailbox beside the journal. Must not be here: runs that are in this process, which have a handle.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs

from stepengine.data.alike import list_names
from stepengine.data.codec import encode_stored
from stepengine.data.questions import Answer, AnswerLike, Question, find_answer_problem, to_answer
from stepengine.data.yields import require_topic
from stepengine.errors import AnswerRejected, StepEngineError, ToolError
from stepengine.journal.mailbox import MailboxMessage
from stepengine.journal.pending_items import find_open_questions
from stepengine.journal.sleepers import wake_for_mailbox_message
from stepengine.journal.sources import as_journal
from stepengine.runtime.messages import choose_message_id, make_result_message

if TYPE_CHECKING:
    from stepengine.journal.history import History
    from stepengine.journal.sources import JournalLike
    from stepengine.journal.store import Journal

SHOWN_CHARS = 200
"""A name that is not known is quoted up to about two lines: enough to see the slip."""


def send_message(journal: JournalLike, topic: str, value: Any, *, id: str | None = None, path: str = "") -> bool:
    """
    Send a message to the run of a journal, for its next ``Receive`` on that topic; return False if *id* was sent before.

    Args:
        journal: The journal; its run may be in any process, or in none.
        topic: The topic.
        value: JSON of at most 1 MiB.
        id: The id of the message; a second message with the same id is ignored. By default a random one.
        path: The path of the receiving run, if it is a child.

    Returns:
        True if the message is new. The message is on the disk.

    Raises:
        BadYield: when the topic is invalid.
        InputError: when the value is not JSON or over 1 MiB, or another message has the id.
        JournalError: as ``Engine.send_message``.
        StepEngineError: when the run has ended, or the child at *path*, or there is no such child.
    """
    mailbox_message = MailboxMessage(
        kind="message",
        value=value,
        id=choose_message_id(id),
        path=path,
        topic=require_topic(topic),
    )
    found = as_journal(journal)
    history = _read_open_run(found, path)
    if path and not history.tree.has_run(path):
        msg = f"there is no run at the path {path!r} in {found.name}; nothing was sent"
        raise StepEngineError(msg)
    return _send_and_wake(found, [mailbox_message])


def send_answers(journal: JournalLike, answers: Mapping[str, AnswerLike]) -> None:
    """
    Answer open questions of the run of a journal, all or none of them; a process that has the run gets them within seconds.

    The answers are on the disk when this returns. A run that waits for them is due for ``stepengine resume --due``.

    Args:
        journal: The journal; its run may be in any process, or in none.
        answers: The answers by question id.

    Raises:
        AnswerRejected: when a question is not open, or an answer does not fit its question.
        JournalError: as ``Engine.send_message``.
        StepEngineError: when the run has ended.
    """
    found = as_journal(journal)
    questions = {name: question for name, (_, question) in find_open_questions(_read_open_run(found)).items()}
    given = match_answers(answers, questions)
    _send_and_wake(
        found,
        [MailboxMessage(kind="answer", topic=name, value=encode_stored(answer)) for name, answer in given.items()],
    )


def match_answers(
    answers: Mapping[str, AnswerLike], questions: Mapping[str, Question], *, by: str | None = None
) -> dict[str, Answer]:
    """
    Return answers by question id, as ``Answer`` objects that name *by* as their author, if given.

    Raises:
        AnswerRejected: when an answer does not fit an open question.
    """
    given: dict[str, Answer] = {}
    for name, value in answers.items():
        question = questions.get(name)
        if question is None:
            there = f"open are: {list_names(questions, name, quoted=True)}" if questions else "none is open"
            msg = f"no question {name[:SHOWN_CHARS]!r} is open ({there}); no answer was sent"
            raise AnswerRejected(msg)
        answer = to_answer(value, question)
        if problem := find_answer_problem(answer, question):
            msg = f"{problem}; no answer was sent"
            raise AnswerRejected(msg)
        given[name] = answer if by is None else attrs.evolve(answer, by=by)
    return given


def send_input(journal: JournalLike, text: str, *, id: str | None = None) -> bool:
    """
    Send a user message to the run of a journal, for its next model call; return False if *id* was sent before.

    Args:
        journal: The journal; its run may be in any process, or in none.
        text: The message.
        id: The id of the message; a second message with the same id is ignored. By default a random one.

    Returns:
        True if the message is new. The message is on the disk.

    Raises:
        InputError: when the text is over 1 MiB, or another message has the id.
        JournalError: as ``Engine.send_message``.
        StepEngineError: when the run has ended.
    """
    found = as_journal(journal)
    _read_open_run(found)
    return _send_and_wake(found, [MailboxMessage(kind="input", value=text, id=choose_message_id(id))])


def send_tool_result(journal: JournalLike, call_id: str, result: object, *, path: str | None = None) -> bool:
    """
    Send the run of a journal the result of a deferred tool call; it is on the disk when this returns.

    Args:
        journal: The journal.
        call_id: The id of the call.
        result: A text or JSON.
        path: The path of the run that made the call; needed only if calls of several runs have this id.

    Returns:
        True if the result is new, False if the same result was sent before.

    Raises:
        ToolError: unless exactly one call with this id waits for its result.
        InputError: when the result is over 1 MiB, or another result was sent for the call.
        JournalError: as ``Engine.send_message``.
        StepEngineError: when the run has ended.
    """
    found = as_journal(journal)
    message = make_result_message(_get_waiting_call(_read_open_run(found), call_id, path), result)
    mailbox_message = MailboxMessage(
        kind="result", value=message.value, id=message.id, path=message.path, topic=message.topic
    )
    return _send_and_wake(found, [mailbox_message])


def _get_waiting_call(history: History, call_id: str, path: str | None) -> tuple[str, int]:
    """Return the address of the one call with this id that waits for its result; raise unless there is one."""
    calls = [
        (a, i)
        for a, i in history.open.items()
        if a in history.facts.pending_results and not history.tree.has_ended(a[0])
    ]
    waiting = {a: str(history.form(i)["tool_call_id"]) for a, i in calls}
    found = [a for a, name in waiting.items() if name == call_id and path in (None, a[0])]
    if len(found) != 1:
        listed = list_names([f"{name[:SHOWN_CHARS]!r} at path {a[0]!r}" for a, name in waiting.items()])
        what = "waits for its result" if not found else "can be chosen: several calls with this id wait, so pass a path"
        msg = f"no call {call_id[:SHOWN_CHARS]!r} {what}; waiting calls: {listed}"
        raise ToolError(msg)
    return found[0]


def send_cancel(journal: JournalLike, reason: str = "") -> None:
    """
    Cancel the run of a journal: the process that has it stops it within seconds, one that resumes it at once.

    Args:
        journal: The journal.
        reason: The reason, which is recorded.

    Raises:
        JournalError: as ``Engine.send_message``.
        StepEngineError: when the run has ended.
    """
    found = as_journal(journal)
    _read_open_run(found)
    _send_and_wake(found, [MailboxMessage(kind="cancel", value=reason)])


def _read_open_run(journal: Journal, path: str = "") -> History:
    """Return the history of a run that has not ended; raise if it, or the child at *path*, has, or if the journal is missing."""
    if not journal.is_there():
        raise journal.make_missing_error()
    history = journal.history()
    if history.is_complete or history.tree.has_ended(path):
        which = f"the child at {path!r}" if path and not history.is_complete else "the run"
        msg = f"{which} in {journal.name} has ended and accepts no messages; nothing was sent"
        raise StepEngineError(msg)
    return history


def _send_and_wake(journal: Journal, mailbox_messages: Sequence[MailboxMessage]) -> bool:
    """Send messages, all or none, and make a sleeping run that waits for them due; return whether one is new."""
    is_new = journal.mailbox().send_all(mailbox_messages)
    # Also where it was there already: who posted it first may have been killed in between.
    for kind in {mailbox_message.kind for mailbox_message in mailbox_messages}:
        wake_for_mailbox_message(journal, kind)
    return is_new
