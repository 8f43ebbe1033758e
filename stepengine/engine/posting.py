"""Messages to runs from whoever does not hold them: what ``Engine.post`` does."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import attrs

from stepengine.data.alike import list_names
from stepengine.data.codec import bare
from stepengine.data.questions import Answer, AnswerLike, Question, answer_problem, answered
from stepengine.data.yields import a_topic
from stepengine.engine.handles import find_by_name
from stepengine.errors import AnswerRejected, JournalMissing, StepEngineError, ToolError
from stepengine.runtime.handle import RunHandle
from stepengine.runtime.mail import Message, result_message
from stepengine.runtime.tree import RunTree

if TYPE_CHECKING:
    from stepengine.engine.launching import Launcher
    from stepengine.journal import Journal, JournalLike
    from stepengine.journal.history import History
    from stepengine.journal.mailbox import Letter

__all__ = (
    "answer_journal",
    "cancel_journal",
    "fitting_answers",
    "post",
    "post_to_journal",
    "result_to_journal",
    "tell_journal",
)


SHOWN_CHARS = 200
"""A name that is not known is quoted up to about two lines: enough to see the slip."""


async def post(
    launcher: Launcher, run: RunHandle | JournalLike, topic: str, value: object, *, id: str | None, path: str
) -> bool:
    """Send a message to a run, as ``Engine.post`` says."""
    message = Message(secrets.token_hex(16) if id is None else id, path, a_topic(topic), value)
    if isinstance(run, RunHandle):
        return await asyncio.to_thread(run.send_message, message)
    tree = _under_way(launcher, run) if isinstance(run, str) else None
    if tree is not None:
        return await asyncio.to_thread(tree.post, message)
    try:
        return await asyncio.to_thread(post_to_journal, run, message)
    except JournalMissing as error:
        if isinstance(run, str):
            msg = f"{run!r} is neither a run that is under way in this engine nor a journal: {error.message}"
            raise JournalMissing(msg, path=error.path, beside=error.beside) from None
        raise


def _under_way(launcher: Launcher, run: str) -> RunTree | None:
    """Return the tree of the run, or of the session, of that id; ``None`` when none is under way."""
    return next((live.tree for live in find_by_name(launcher, run)[1]), None)


def post_to_journal(journal: JournalLike, message: Message) -> bool:
    """
    Put a message into the mailbox of a journal, and let its run be due if it sleeps; waits for the disk.

    Raises:
        JournalError: as ``Engine.post``.
        StepEngineError: when the run has ended, or the child that it is for, or there is no such child.
    """
    from stepengine.journal import as_journal
    from stepengine.journal.mailbox import Letter

    letter = Letter(kind="message", value=message.value, id=message.id, path=message.path, topic=message.topic)
    found: Journal = as_journal(journal)
    history = _open(found, message.path)
    if message.path and not history.has_run(message.path):
        msg = f"there is no run at the path {message.path!r} in {found.name}; nothing was sent"
        raise StepEngineError(msg)
    return _post_letters(found, [letter])


def answer_journal(journal: JournalLike, answers: Mapping[str, AnswerLike]) -> None:
    """
    Put answers to open questions into the mailbox of a journal, all or none of them, and let its run be due; waits for the disk.

    Raises:
        AnswerRejected: when a question is not open, or is not answered by that.
        JournalError: as ``Engine.post``.
        StepEngineError: when the run has ended.
    """
    from stepengine.journal import as_journal
    from stepengine.journal.mailbox import Letter

    found: Journal = as_journal(journal)
    questions = {name: question for name, (_, question) in _open(found).open_questions().items()}
    given = fitting_answers(answers, questions)
    _post_letters(found, [Letter(kind="answer", topic=name, value=bare(answer)) for name, answer in given.items()])


def fitting_answers(
    answers: Mapping[str, AnswerLike], questions: Mapping[str, Question], *, by: str | None = None
) -> dict[str, Answer]:
    """
    Return answers by question id, as those of *by*.

    Raises:
        AnswerRejected: unless every one of them fits an open question.
    """
    given: dict[str, Answer] = {}
    for name, value in answers.items():
        question = questions.get(name)
        if question is None:
            there = f"open are: {list_names(questions, name, quoted=True)}" if questions else "none is open"
            msg = f"no question {name[:SHOWN_CHARS]!r} is open ({there}); nothing was taken"
            raise AnswerRejected(msg)
        answer = answered(value, question)
        if problem := answer_problem(answer, question):
            msg = f"{problem}; nothing was taken"
            raise AnswerRejected(msg)
        given[name] = answer if by is None else attrs.evolve(answer, by=by)
    return given


def tell_journal(journal: JournalLike, text: str, *, id: str | None = None) -> bool:
    """
    Put what somebody says into the mailbox of a journal; its next model call sees it. Returns whether it is new; waits for the disk.

    Raises:
        InputError: when it is over 1 MiB, or something else has its id.
        JournalError: as ``Engine.post``.
        StepEngineError: when the run has ended.
    """
    from stepengine.journal import as_journal
    from stepengine.journal.mailbox import Letter

    found: Journal = as_journal(journal)
    _open(found)
    return _post_letters(found, [Letter(kind="input", value=text, id=id or secrets.token_hex(16))])


def result_to_journal(journal: JournalLike, call_id: str, result: object, *, path: str | None = None) -> bool:
    """
    Put what came of a call of a deferred tool into the mailbox of a journal, and let its run be due; waits for the disk.

    Args:
        journal: The journal.
        call_id: The id of the call.
        result: A text or JSON.
        path: The path of the run that made the call; needed only where calls of several runs of the tree have that id.

    Returns:
        Whether it is new: ``False`` when the same was sent before.

    Raises:
        ToolError: when there is no such call that has no result yet, or several are.
        InputError: when it is over 1 MiB, or the call was given another result.
        JournalError: as ``Engine.post``.
        StepEngineError: when the run has ended.
    """
    from stepengine.journal import as_journal
    from stepengine.journal.mailbox import Letter

    found: Journal = as_journal(journal)
    message = result_message(_call_of(_open(found), call_id, path), result)
    letter = Letter(kind="result", value=message.value, id=message.id, path=message.path, topic=message.topic)
    return _post_letters(found, [letter])


def _call_of(history: History, call_id: str, path: str | None) -> tuple[str, int]:
    """Return the place of a call whose body has returned, and that the record has no result of."""
    calls = [(a, i) for a, i in history.open.items() if a in history.waiting and not history.has_ended(a[0])]
    waiting = {a: str(history.form(i)["tool_call_id"]) for a, i in calls}
    found = [a for a, name in waiting.items() if name == call_id and path in (None, a[0])]
    if len(found) != 1:
        listed = list_names([f"{name[:SHOWN_CHARS]!r} at path {a[0]!r}" for a, name in waiting.items()])
        what = "waits for its result" if not found else "is one call: several wait, and a path says which"
        msg = f"no call {call_id[:SHOWN_CHARS]!r} {what}; waiting are: {listed}"
        raise ToolError(msg)
    return found[0]


def cancel_journal(journal: JournalLike, reason: str = "") -> None:
    """
    Put a cancel into the mailbox of a journal: whoever holds its run, or resumes it, ends it; waits for the disk.

    Raises:
        JournalError: as ``Engine.post``.
        StepEngineError: when the run has ended.
    """
    from stepengine.journal import as_journal
    from stepengine.journal.mailbox import Letter

    found: Journal = as_journal(journal)
    _open(found)
    _post_letters(found, [Letter(kind="cancel", value=reason)])


def _open(journal: Journal, path: str = "") -> History:
    """Return what is recorded; raise where the run that something is for has ended, or was never begun."""
    if not journal.is_there():
        raise journal.missing()
    history = journal.history()
    if history.is_complete or history.has_ended(path):
        which = f"the child at {path!r}" if path and not history.is_complete else "the run"
        msg = f"{which} in {journal.name} has ended and takes no messages; nothing was sent"
        raise StepEngineError(msg)
    return history


def _post_letters(journal: Journal, letters: Sequence[Letter]) -> bool:
    from stepengine.journal.sleeping import make_due

    box = journal.mailbox()
    is_new = [box.post(letter) for letter in letters]
    # Also where it was there already: who posted it first may have been killed in between.
    for kind in {letter.kind for letter in letters}:
        make_due(journal, kind)
    return all(is_new)
