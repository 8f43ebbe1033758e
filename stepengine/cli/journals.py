"""``stepengine resume``, ``replay``, ``extend`` and ``fork``: from a journal to an engine, from the engine to a result."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import signal
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast, get_args

import attrs

from stepengine.cli.hints import options_again, resume_hint
from stepengine.cli.options import Options, UsageProblem
from stepengine.cli.report import Exit
from stepengine.cli.running import (
    Bench,
    Run,
    bench_for,
    complain,
    explained,
    name_of,
    new_journal,
    result_of,
    told,
    watched,
)
from stepengine.cli.signals import interruptible
from stepengine.data.limits import Limits
from stepengine.data.run import RunResult, RunStatus
from stepengine.errors import DefinitionError, JournalError, ReplayDivergence

if TYPE_CHECKING:
    from stepengine.data.definition import AgentDefinition
    from stepengine.journal import Journal

__all__ = (
    "Branch",
    "agent_of",
    "answers_of",
    "extend_command",
    "fork_command",
    "is_cut_off",
    "journal_at",
    "recorded_agent",
    "replay_command",
    "resume_command",
)

STORED = ("ModelReply", "ToolResult")
ADVISED = re.compile(r"stepengine (?:extend|fork) \S+(?: --at '[^']*')?")
PLAIN_ID = re.compile(r"[A-Za-z0-9_-]+")


@attrs.frozen
class Branch:
    """Where a run is forked and what is changed there, as it was typed."""

    at: str
    edit: str | None = None
    into: str = ""
    allow_repeat: bool = False


class _Interrupted(Exception):
    """A signal ended the run; it says which."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def resume_command(options: Options, answers: Iterable[str], in_doubt: str) -> Exit:
    """Go on with a run and print what came out."""
    return _explained(options, lambda options: _resume(options, answers, in_doubt))


def replay_command(options: Options, live: Sequence[str] = (), speed: float | None = None) -> Exit:
    """Repeat a run and print what came out."""
    return _explained(options, lambda options: _replay(options, live, speed))


def extend_command(options: Options, answers: Iterable[str], *, allow_repeat: bool) -> Exit:
    """Record a run again as far as it has changed, and print what came out."""
    return _explained(options, lambda options: _extend(options, answers, allow_repeat=allow_repeat))


def fork_command(options: Options, branch: Branch, answers: Iterable[str]) -> Exit:
    """Go on from the middle of a run and print what came out."""
    return _explained(options, lambda options: _fork(options, branch, answers))


def _explained(options: Options, command: Callable[[Options], Exit]) -> Exit:
    """Do what *command* does with the settings that are in force; tell divergences, damaged journals and signals."""
    try:
        return explained(lambda: _failing(command, options.in_force()))
    except _Interrupted as interrupted:
        name = signal.Signals(interrupted.number).name
        code = Exit.TERMINATED if interrupted.number == signal.SIGTERM else Exit.INTERRUPTED
        return complain(f"{name}: the run was cancelled; go on with: {resume_hint(options)}", code)


def _failing(command: Callable[[Options], Exit], options: Options) -> Exit:
    """Do what *command* does; a journal that cannot be used is a failure, and no wrong usage."""
    try:
        return command(options)
    except ReplayDivergence as error:
        wrong_model = options.model and any(pointer.startswith("/model") for pointer, *_ in error.diff)
        hint = "\n  the recorded model is taken without --model" if wrong_model else ""
        again = "".join([f" {option}" for option in options_again(options)])
        message = ADVISED.sub(lambda found: found[0].replace(" FILE", f" {options.journal}") + again, error.message)
        return complain(message + hint, Exit.DIVERGED)
    except JournalError as error:
        return complain(error.message, Exit.FAILED)


def _resume(options: Options, answers: Iterable[str], in_doubt: str) -> Exit:
    from stepengine.journal import InDoubt

    if in_doubt not in get_args(InDoubt):
        msg = f"--in-doubt is {in_doubt!r}; it is one of {', '.join(get_args(InDoubt))}"
        raise UsageProblem(msg)
    journal, given = journal_at(options.journal), answers_of(answers)
    agent = recorded_agent(journal, options)
    bench = bench_for(options, agent, performs=not journal.history().is_complete)
    policy = cast("InDoubt", in_doubt)
    limits = _limits_again(journal, options)
    resume = bench.engine.resume
    run = _perform(bench, lambda: resume(journal, agent=agent, answers=given, in_doubt=policy, limits=limits))
    return told(run, options, bench)


def _replay(options: Options, live: Sequence[str], speed: float | None) -> Exit:
    from stepengine.journal import live_kinds

    with _as_usage():
        live_kinds(live)
    journal = journal_at(options.journal)
    agent = recorded_agent(journal, options)
    bench = bench_for(options, agent, performs=bool(live))
    replay = bench.engine.replay
    run = _perform(bench, lambda: replay(journal, agent=agent, live=live, speed=speed))
    if is_cut_off(journal, run.result):
        complain(f"{options.journal} ends before its run did; what it holds was repeated")
    return told(run, options, bench)


def is_cut_off(journal: Journal, replayed: RunResult[Any]) -> bool:
    """Return whether a replay stopped where a crash had ended the record, and nobody had cancelled the run."""
    history = journal.history()
    stopped = any(record.input.get("type") == "Stop" for record in history.inputs)
    return replayed.status is RunStatus.CANCELLED and not history.is_complete and not stopped


def _extend(options: Options, answers: Iterable[str], *, allow_repeat: bool) -> Exit:
    journal, given = journal_at(options.journal), answers_of(answers)
    agent = recorded_agent(journal, options)
    bench = bench_for(options, agent)
    extend = bench.engine.extend
    limits = _limits_again(journal, options)
    run = _perform(bench, lambda: extend(journal, agent=agent, answers=given, allow_repeat=allow_repeat, limits=limits))
    if run.result.status is RunStatus.FAILED:
        complain(f"{options.journal} stays as it was")
    elif (made := journal.extended) is not None and not options.quiet:
        before = "" if made.before is None else f"; as it was: {name_of(made.before)}"
        counted = f"kept {made.kept} of {made.recorded} effects, recorded {made.anew} anew"
        complain(f"{options.journal}: {counted}{before}")
    return told(run, options, bench)


def _fork(options: Options, branch: Branch, answers: Iterable[str]) -> Exit:
    from stepengine.journal.forks import place_of

    journal, given = journal_at(options.journal), answers_of(answers)
    history = journal.history()
    with _as_usage():
        place_of(history, branch.at)
    place = re.sub(r"[^0-9]+", "-", branch.at.lstrip("#"))
    source = Path(options.journal.partition("#")[0])
    target = branch.into or str(source.with_name(f"{source.stem}.fork-{place}.jsonl"))
    into = new_journal(target)
    agent = recorded_agent(journal, options)
    bench = bench_for(options, agent, into=target)
    edit = None if branch.edit is None else _edit(branch.edit)
    fork = partial(bench.engine.fork, journal, at=branch.at, edit=edit, into=into, allow_repeat=branch.allow_repeat)
    limits = _limits_again(journal, options)
    run = _perform(bench, lambda: fork(answers=given, agent=agent, limits=limits))
    if not options.quiet:
        complain(f"the new run is recorded in {name_of(into)}")
    return told(run, attrs.evolve(options, journal=name_of(into)), bench)


@contextlib.contextmanager
def _as_usage() -> Iterator[None]:
    """Call what a journal cannot give wrong usage: nothing of the journal is wrong, and nothing was run."""
    try:
        yield
    except JournalError as error:
        raise UsageProblem(error.message) from None


# --- from what was typed ----------------------------------------------------------------------------------------------


def journal_at(text: str) -> Journal:
    """
    Return the journal of a file: JSON Lines, or ``RUNS.db#RUN`` for a run in an SQLite file.

    Raises:
        UsageProblem: when there is no such file, or it holds several runs and none is named.
    """
    from stepengine.journal import FileJournal, SqliteJournal
    from stepengine.journal.finding import database_of

    database = database_of(text)
    name, run = database or (text, "")
    if not Path(name).is_file():
        msg = f"there is no journal {text!r}; record one with `stepengine run AGENT --journal FILE`"
        raise UsageProblem(msg)
    if database is None:
        return FileJournal(name)
    runs = SqliteJournal(name).runs()
    if run not in runs and (run or len(runs) != 1):
        listed = ", ".join([f"{name}#{known}" for known in runs]) or "none"
        msg = f"{text!r} names no run; {name} holds: {listed}"
        raise UsageProblem(msg)
    return SqliteJournal(name, run or runs[0])


def agent_of(journal: Journal, given: str, folders: Iterable[Path] = ()) -> AgentDefinition[Any]:
    """
    Return the agent *given* on the command line, or the one whose id stands in the journal.

    Raises:
        DefinitionError: when it is not found.
        JournalError: when the journal holds no run.
    """
    from stepengine.engine import load_agent

    if given:
        return load_agent(given, folders=folders)
    agent_id = str(journal.history().root["agent_id"])
    # The id comes out of a file that may be anybody's: it must not name a file to be run.
    if PLAIN_ID.fullmatch(agent_id) is None or Path(agent_id).exists():
        msg = f"{journal.name} is a run of {agent_id!r}; say where that agent is with --agent PATH"
        raise DefinitionError(msg)
    try:
        return load_agent(agent_id, folders=folders)
    except DefinitionError as error:
        msg = f"{journal.name} is a run of {agent_id!r}: {error.message}. Say where it is with --agent PATH"
        raise DefinitionError(msg) from error


def recorded_agent(journal: Journal, options: Options) -> AgentDefinition[Any]:
    """Return the agent of a journal, with the model that was given, now or when the run was recorded."""
    agent = agent_of(journal, options.agent, options.settings.agent_folders)
    if options.model:
        return attrs.evolve(agent, model=options.model)
    return attrs.evolve(agent, model=None) if "model" in journal.history().root else agent


def _limits_again(journal: Journal, options: Options) -> Limits | None:
    """Return the limits of a run that goes on: those that it was started with, and what is set beside them."""
    from stepengine.journal.openings import opening_of

    if not options.settings.table("limits"):
        return None
    return (opening_of(journal.history()).limits or Limits()).over(options.settings.limits)


def answers_of(texts: Iterable[str]) -> dict[str, str]:
    """
    Return answers by question id.

    Raises:
        UsageProblem: for what is no ``ID=TEXT``.
    """
    answers: dict[str, str] = {}
    for text in texts:
        question, separator, answer = text.partition("=")
        if not separator or not question.strip():
            msg = f"--answer {text!r} is no ID=TEXT, such as --answer q3=yes"
            raise UsageProblem(msg)
        answers[question.strip()] = answer
    return answers


def _edit(text: str) -> Callable[[Any], Any]:
    """Return what makes another outcome of a recorded one: what was typed as JSON where that fits, else as text."""
    from stepengine.data.models import ModelReply
    from stepengine.journal.forms import restored

    if text.startswith("@"):
        try:
            text = Path(text[1:]).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            msg = f"--edit {text!r} cannot be read: {error}"
            raise UsageProblem(msg) from None
    try:
        value: Any = json.loads(text)
    except (ValueError, RecursionError):
        value = text

    def edited(recorded: Any) -> Any:
        if isinstance(value, dict) and value.get("type") in STORED:
            return restored(value)
        # A reply and an answer are text, also where that happens to be JSON.
        return text if isinstance(recorded, ModelReply | tuple) else value

    return edited


def _perform(bench: Bench, make: Callable[[], Coroutine[Any, Any, RunResult[Any]]]) -> Run:
    """Run to the end; Ctrl-C and SIGTERM end it gracefully, a second one at once."""

    async def ended() -> Run:
        loop = asyncio.get_running_loop()
        async with bench.engine:
            task = asyncio.ensure_future(make())
            with interruptible(lambda: loop.call_soon_threadsafe(task.cancel)) as received:
                try:
                    return Run(await result_of(task))
                except asyncio.CancelledError:
                    if not received:
                        raise
                    raise _Interrupted(received[0]) from None

    return watched(ended, bench.progress)
