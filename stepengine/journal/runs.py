"""
Recording, resuming, replaying and forking runs; *launch* runs one to its end.

An engine gives its own: it builds plan and services from ``run.opening``, and runs them with ``start_run`` and
``run.wrap_services``.
"""

from __future__ import annotations

import abc
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

import attrs

from stepengine.data.questions import AnswerLike
from stepengine.data.state import RunResult
from stepengine.errors import InputError, JournalError, ReplayDivergence, StepEngineError
from stepengine.journal.journaled_run import JournaledRun
from stepengine.journal.pending_items import find_open_questions
from stepengine.journal.provenance import are_calls_trusted, has_trusted_permissions, replace_records_by_derived
from stepengine.journal.questions import InDoubt, split_answers_and_decisions
from stepengine.journal.recorded_clock import ReplayPace
from stepengine.journal.sources import JournalLike, as_journal
from stepengine.journal.store import Journal

if TYPE_CHECKING:
    from datetime import datetime

    from stepengine.journal.file_undo import Roots

Launch: TypeAlias = Callable[[JournaledRun], Awaitable[RunResult]]
OnDivergence: TypeAlias = Literal["raise", "stop", "keep"]
"""What happens to a run whose agent was edited since; see ``ReplayOptions``. ``resume`` also takes ``"extend"``."""

Accepting: TypeAlias = Callable[[ReplayDivergence], bool]


class SelfOpeningJournal(Journal):
    """A journal that decides itself how a run uses it, such as that of a test, which records or replays."""

    @abc.abstractmethod
    def open_run(self, answers: Mapping[str, AnswerLike] | None = None) -> JournaledRun:
        """Return the run to be started on this journal."""


def open_recording(journal: JournalLike, answers: Mapping[str, AnswerLike] | None) -> JournaledRun:
    """
    Return the run for *journal*: a recording, unless the journal decides otherwise.

    Raises:
        JournalError: when *journal* is not a journal.
    """
    made = as_journal(journal)
    return made.open_run(answers) if isinstance(made, SelfOpeningJournal) else JournaledRun.record(made, answers)


async def record(journal: JournalLike, launch: Launch, *, answers: Mapping[str, AnswerLike] | None = None) -> Any:
    """
    Record a new run.

    Raises:
        JournalError: when the journal cannot be used, or holds a run already.
    """
    return await _run_to_end(JournaledRun.record(as_journal(journal), answers), launch, "stop")


async def resume(
    journal: JournalLike,
    launch: Launch,
    *,
    answers: Mapping[str, AnswerLike] | None = None,
    in_doubt: InDoubt = "fail",
    on_divergence: OnDivergence | Literal["extend"] = "raise",
    allow_repeat: bool = False,
    trust: bool | None = None,
    now: bool = False,
) -> RunResult:
    """
    Resume a run that was suspended, interrupted or cut off by a crash; recorded effects are not repeated.

    For a run that has ended, the recorded result is returned and nothing is performed.

    Args:
        journal: The journal, or the path of its file.
        launch: Runs a run to its end.
        answers: Answers to the open questions, by question id or text.
        in_doubt: The policy for a started effect without a result that is not idempotent: ``"fail"`` throws
            ``UnknownOutcome`` at the handler's yield, ``"retry"`` repeats the effect, ``"ask"`` suspends with a question.
        on_divergence: ``"raise"``, ``"stop"`` for a result with status ``failed``, or ``"keep"``: a recorded effect of the same
            kind with other content answers nevertheless, and the journal records that.
            ``"extend"`` records again from the first difference on, and replaces the journal unless the run fails. The journal's
            ``extended`` then holds the number of kept effects and the old journal.
        allow_repeat: With ``"extend"``: continue although removed effects changed the world and may happen again.
        trust: Whether the journal is this user's. If not, a person is asked about permissions and calls that only the journal
            holds. ``None``: the user's state folder decides.
        now: Whether recorded sleeps, and timeouts for messages and children, end at once.

    Raises:
        AnswerRejected: when an answer fits no open question; nothing is changed.
        JournalError: when the journal is locked, damaged, of a newer version or cannot be written, or an effect would be
            repeated.
        ReplayDivergence: when the run differs from its record.
    """
    _check_choice("in_doubt", in_doubt, get_args(InDoubt))
    _check_choice("on_divergence", on_divergence, (*get_args(OnDivergence), "extend"))
    if allow_repeat and on_divergence != "extend":
        msg = "allow_repeat=True needs on_divergence='extend': no other way to resume a run discards recorded effects"
        raise JournalError(msg)
    taken = as_journal(journal)
    asks_again = taken.is_there() and not has_trusted_permissions(taken, trust=trust)
    asks_about_calls = asks_again or (taken.is_there() and not are_calls_trusted(taken, trust=trust))
    if asks_again:
        from stepengine.journal.permission_reset import remove_approvals

        remove_approvals(taken)
    if on_divergence == "extend":
        return await _replay_then_continue_live(
            taken,
            launch,
            answers,
            in_doubt,
            allow_repeat=allow_repeat,
            asks_again=asks_again,
            asks_about_calls=asks_about_calls,
            now=now,
        )
    keep = on_divergence == "keep"
    run = JournaledRun.resume(
        taken,
        answers,
        in_doubt,
        accepts_edited_effects=keep,
        now=now,
        asks_again=asks_again,
        asks_about_calls=asks_about_calls,
    )
    return await _run_to_end(run, launch, on_divergence)


async def _replay_then_continue_live(
    journal: Journal,
    launch: Launch,
    answers: Mapping[str, AnswerLike] | None,
    in_doubt: InDoubt,
    *,
    allow_repeat: bool,
    asks_again: bool,
    asks_about_calls: bool,
    now: bool,
) -> RunResult:
    """Repeat a run while it matches its record, then continue it live; its journal is replaced."""
    from stepengine.journal.recorded_part import AllowedDifferences

    leeway = AllowedDifferences(may_repeat=allow_repeat, doubts_yes=asks_again, asks_about_calls=asks_about_calls)
    run = JournaledRun.replay_then_continue(journal, answers, leeway=leeway)
    run.answers.in_doubt, run.wakes_now = in_doubt, now
    result = await _run_to_end(run, launch, "stop")
    refused = None if run.recorded_part is None else run.recorded_part.refused
    if refused is not None:
        raise refused
    return result


async def replay(
    journal: JournalLike,
    launch: Launch,
    *,
    live: Collection[str] = (),
    speed: float | None = None,
    complete: bool = True,
    on_divergence: OnDivergence | Accepting = "raise",
    trust: bool | None = None,
) -> RunResult:
    """
    Repeat a run from its record without model, tools, network or key; nothing is performed.

    The result has a new journal with the records of the replay.

    Args:
        journal: The journal, or the path of its file.
        launch: Runs a run to its end.
        live: Kinds of effects that are performed again: ``"tool_call"`` and ``"perform"``, whose results must equal the
            recorded ones; or ``"model_call"`` alone: models reply again, calls get the recorded results of equal calls, and the
            first unrecorded call is the divergence.
        speed: The speed of recorded results: 1.0 as recorded, 2.0 twice as fast; ``None`` without delays.
        complete: Whether the run must reach every record; if not, the run may end earlier.
        on_divergence: ``"raise"``, ``"stop"`` for a result with status ``failed``, ``"keep"`` to use the recorded outcome of
            an effect of the same kind with other content, or the recorded end, or a function that receives the error for such a
            difference and returns whether it is accepted; other differences are raised.
        trust: Whether the journal is this user's. If not, effects in *live* are not performed, except tools that only read on this
            machine. ``None``: the user's state folder decides.

    Raises:
        JournalError: when the journal is damaged or of a newer version, or requests a call that may not be performed.
        ReplayDivergence: when the run differs from its record, or ends before it.
    """
    from stepengine.journal.recorded_part import AllowedDifferences, parse_live_kinds

    if not callable(on_divergence):
        _check_choice("on_divergence", on_divergence, get_args(OnDivergence))
    source, kinds, pace = (
        as_journal(journal),
        parse_live_kinds(live, has_pace=speed is not None),
        None if speed is None else ReplayPace(speed),
    )
    # A run without an effect has no place from which a model could answer anew: it asks none.
    if "model_call" in kinds and ("", 0) in source.history().intents:
        return await _replay_calling_models(source, launch, stops=on_divergence == "stop")
    accepts = on_divergence if callable(on_divergence) else None
    # Only "keep" and a function let a run go on at another effect; "raise" and "stop" say what becomes of the error behind it.
    doubts = bool(kinds) and not has_trusted_permissions(source, trust=trust)
    leeway = AllowedDifferences(
        live=kinds,
        may_leave=not complete,
        keeps=on_divergence == "keep",
        accepts=accepts,
        doubts_yes=doubts,
        asks_about_calls=bool(kinds) and not are_calls_trusted(source, trust=trust),
    )
    run = JournaledRun.replay(source, leeway=leeway, pace=pace)
    return await _run_to_end(run, launch, "raise" if callable(on_divergence) else on_divergence)


async def _replay_calling_models(source: Journal, launch: Launch, *, stops: bool) -> RunResult:
    """Repeat a run with new replies of models; raise the error of an unrecorded call, unless *stops*."""
    from stepengine.journal.recorded_forks import fork_from_record

    made = await fork_from_record(source, launch, at=-1, reuse=False)
    if made.refused is not None and made.result.error is not None and not stops:
        raise made.result.error
    return made.result


async def fork(
    journal: JournalLike,
    launch: Launch,
    *,
    at: int | str | None = None,
    edit: object = None,
    answers: Mapping[str, AnswerLike] | None = None,
    allow_repeat: bool = False,
    into: JournalLike | None = None,
    restore_files: Roots | None = None,
    run_id: str = "",
    trust: bool | None = None,
    now: datetime | None = None,
) -> RunResult:
    """
    Continue a run from the middle in a journal of its own; see ``branch`` for the arguments, and ``resume`` for *trust*.

    Raises:
        InputError: when *at* is missing.
        AnswerRejected: when *answers* is not a mapping, or an answer does not fit.
        JournalError: as ``branch``.
        ReplayDivergence: when the kept part does not fit the code.
        UndoRefused: as ``branch``.
    """
    if at is None:
        msg = "fork() needs at=, the last effect to keep; only with tools= it defaults to the first difference"
        raise InputError(msg, issues=("at is missing",))
    # With it comes what brings files back, which no other run needs.
    from stepengine.journal.forks import branch

    given, _ = split_answers_and_decisions(answers)
    source = as_journal(journal)
    asks_again = not has_trusted_permissions(source, trust=trust)
    asks_about_calls = asks_again or not are_calls_trusted(source, trust=trust)
    made = branch(
        source, at, edit, allow_repeat=allow_repeat, into=into, restore_files=restore_files, run_id=run_id, now=now
    )
    branched = len(made.records())
    try:
        if asks_about_calls:
            _drop_approvals_of_others(made, at if edit is not None else None)
            branched = len(made.records())
        waiting = find_open_questions(made.history())
        texts = {question.text for _, question in waiting.values()}
        asked = {key: answer for key, answer in given.items() if key in waiting or key in texts}
        # What is asked only after the fork may be answered up front, as in a new run.
        run = JournaledRun.resume(
            made, asked, later_answers=given, asks_again=asks_again, asks_about_calls=asks_about_calls
        )
        return await _run_to_end(run, launch, "raise")
    except StepEngineError as error:
        # It could not start, for a wrong answer or for lack of a model or a key: nothing is left in the way of the next try.
        if not isinstance(error, ReplayDivergence) and len(made.records()) == branched:
            made.discard()
        raise


def _drop_approvals_of_others(fork: Journal, edited_address: int | str | None) -> None:
    """Remove the recorded approvals of later calls from a fork, except the one at *edited_address*, which the caller gave."""
    from stepengine.journal.permission_reset import drop_approvals, find_effective_approvals
    from stepengine.journal.recorded_part import parse_result_address

    history = fork.history()
    if find_effective_approvals(history):
        keep = None if edited_address is None else parse_result_address(history, edited_address)
        replace_records_by_derived(fork, list(drop_approvals(history, kept_question=keep)), fork)


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Raise ``JournalError`` unless *value* is one of *choices*."""
    if value not in choices:
        msg = f"{name} must be one of {', '.join(choices)}, not {value!r}"
        raise JournalError(msg)


async def _run_to_end(run: JournaledRun, launch: Launch, on_divergence: OnDivergence) -> RunResult:
    """Run to the end, close the journal, and return the result; raise its divergence unless *on_divergence* is ``"stop"``."""
    try:
        result = await launch(run)
    finally:
        run.writer.close()
    if on_divergence != "stop" and isinstance(result.error, ReplayDivergence):
        raise result.error
    return attrs.evolve(result, journal=run.writer.journal)
