"""
Resuming, replaying, extending and forking runs, for whoever can start one: *launch* runs a session to its end.

An engine gives its own: it builds plan and services from ``session.opening``, and runs them with ``session.start`` and
``session.wrap``.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Literal, TypeAlias

import attrs

from stepengine.data.questions import AnswerLike
from stepengine.data.run import RunResult
from stepengine.errors import ReplayDivergence
from stepengine.journal.finding import JournalLike, as_journal
from stepengine.journal.forks import branch
from stepengine.journal.session import InDoubt, Session

__all__ = ("Launch", "OnDivergence", "extend", "fork", "record", "replay", "resume")

Launch: TypeAlias = Callable[[Session], Awaitable[RunResult[Any]]]
OnDivergence: TypeAlias = Literal["raise", "stop"]


async def record(journal: JournalLike, launch: Launch, *, answers: Mapping[str, AnswerLike] | None = None) -> Any:
    """
    Record a new run.

    Raises:
        JournalError: when the journal cannot be used, or holds a run already.
    """
    return await _run(Session.record(as_journal(journal), answers), launch, "stop")


async def resume(
    journal: JournalLike,
    launch: Launch,
    *,
    answers: Mapping[str, AnswerLike] | None = None,
    in_doubt: InDoubt = "fail",
    on_divergence: OnDivergence = "raise",
) -> RunResult[Any]:
    """
    Go on with a run that was suspended, interrupted or cut off by a crash; what is recorded is not done again.

    A run that has ended gives its result again, and nothing is performed.

    Args:
        journal: The journal, or the path of its file.
        launch: Runs a session to its end.
        answers: Answers to the open questions, by question id or text.
        in_doubt: What becomes of an effect that was begun, has no result, and is not idempotent: ``"fail"`` throws
            ``UnknownOutcome`` at the handler's yield, ``"retry"`` does it again, ``"ask"`` suspends with a question.
        on_divergence: ``"raise"``, or ``"stop"`` for a result with status ``failed``.

    Raises:
        AnswerRejected: when an answer fits no open question; nothing is changed.
        JournalError: when the journal is locked, damaged, of a newer version or cannot be written.
        ReplayDivergence: when the handler does something else than is recorded.
    """
    return await _run(Session.resume(as_journal(journal), answers, in_doubt), launch, on_divergence)


async def replay(journal: JournalLike, launch: Launch, *, on_divergence: OnDivergence = "raise") -> RunResult[Any]:
    """
    Repeat a run from its record: no model, no tool, no network, no key is needed, and nothing is performed.

    The result's journal is what the replay would have recorded.

    Raises:
        JournalError: when the journal is damaged or of a newer version.
        ReplayDivergence: when the handler does something else than is recorded, or less.
    """
    return await _run(Session.replay(as_journal(journal)), launch, on_divergence)


async def extend(
    journal: JournalLike, launch: Launch, *, answers: Mapping[str, AnswerLike] | None = None
) -> RunResult[Any]:
    """
    Repeat a run as far as its record holds, then go on live; the journal is replaced unless the run fails (replay D10).

    Raises:
        JournalError: when the journal is damaged, of a newer version, or cannot be written.
    """
    return await _run(Session.extend(as_journal(journal), answers), launch, "stop")


async def fork(
    journal: JournalLike,
    launch: Launch,
    *,
    at: int | str,
    edit: Any = None,
    answers: Mapping[str, AnswerLike] | None = None,
    allow_repeat: bool = False,
    into: JournalLike | None = None,
) -> RunResult[Any]:
    """
    Go on from the middle of a run in a journal of its own; see ``branch`` for the arguments.

    Raises:
        JournalError: as ``branch``.
        ReplayDivergence: when the kept part does not fit the code.
    """
    made = branch(journal, at, edit, allow_repeat=allow_repeat, into=into)
    return await _run(Session.resume(made, answers), launch, "raise")


async def _run(session: Session, launch: Launch, on_divergence: OnDivergence) -> RunResult[Any]:
    try:
        result = await launch(session)
    finally:
        session.close()
    if on_divergence == "raise" and isinstance(result.error, ReplayDivergence):
        raise result.error
    return attrs.evolve(result, journal=session.journal)
