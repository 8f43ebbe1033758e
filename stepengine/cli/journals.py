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
from typing import TYPE_CHECKING, Any, Self, cast, get_args

import attrs

from stepengine.cli.hints import options_again, resume_hint
from stepengine.cli.options import Options, UsageProblem
from stepengine.cli.recording import Recording, latest, named, recorded_as, with_record
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
from stepengine.data.state import RunResult, RunStatus
from stepengine.errors import DefinitionError, JournalError, ReplayDivergence

if TYPE_CHECKING:
    from stepengine.data.definition import AgentDefinition
    from stepengine.journal import Journal

__all__ = (
    "Branch",
    "GoingOn",
    "agent_of",
    "answers_of",
    "extend_command",
    "fork_command",
    "found",
    "is_cut_off",
    "journal_at",
    "recorded_agent",
    "replay_command",
    "resume_command",
)

STORED = ("ModelReply", "ToolResult")
ADVISED = re.compile(r"stepengine (?:extend|fork|resume) \S+(?: --at '[^']*'| --on-divergence keep)?")
PLAIN_ID = re.compile(r"[A-Za-z0-9_-]+")


@attrs.frozen
class Branch:
    """Where a run is forked and what is changed there, as it was typed."""

    at: str
    edit: str | None = None
    into: str = ""
    allow_repeat: bool = False
    restore_files: bool = False


class _Interrupted(Exception):
    """A signal ended the run; it says which."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@attrs.frozen
class GoingOn:
    """What decides how a recorded run goes on, as it was typed."""

    in_doubt: str = "fail"
    on_divergence: str = "raise"

    def checked(self) -> Self:
        """
        Return this.

        Raises:
            UsageProblem: for a word that there is not.
        """
        from stepengine.journal import InDoubt, OnDivergence

        for name, value, kind in (
            ("--in-doubt", self.in_doubt, InDoubt),
            ("--on-divergence", self.on_divergence, OnDivergence),
        ):
            if value not in get_args(kind):
                msg = f"{name} is {value!r}; it is one of {', '.join(get_args(kind))}"
                raise UsageProblem(msg)
        return self


def resume_command(options: Options, answers: Iterable[str], how: GoingOn) -> Exit:
    """Go on with a run and print what came out."""
    return _explained(options, lambda options: _resume(options, answers, how), is_waiting=True)


def replay_command(options: Options, live: Sequence[str] = (), speed: float | None = None) -> Exit:
    """Repeat a run and print what came out."""
    return _explained(options, lambda options: _replay(options, live, speed))


def extend_command(options: Options, answers: Iterable[str], *, allow_repeat: bool) -> Exit:
    """Record a run again as far as it has changed, and print what came out."""
    return _explained(options, lambda options: _extend(options, answers, allow_repeat=allow_repeat))


def fork_command(options: Options, branch: Branch, answers: Iterable[str]) -> Exit:
    """Go on from the middle of a run and print what came out."""
    return _explained(options, lambda options: _fork(options, branch, answers))


def _explained(options: Options, command: Callable[[Options], Exit], *, is_waiting: bool = False) -> Exit:
    """
    Do what *command* does with the run that is meant and the settings that are in force.

    Divergences, damaged journals and signals are told; a journal that cannot be used is a failure, and no wrong usage.
    """
    return explained(lambda: _failing(command, found(options, waiting=is_waiting).in_force()))


def _failing(command: Callable[[Options], Exit], options: Options) -> Exit:
    try:
        return command(options)
    except _Interrupted as interrupted:
        name = signal.Signals(interrupted.number).name
        code = Exit.TERMINATED if interrupted.number == signal.SIGTERM else Exit.INTERRUPTED
        return complain(f"{name}: the run was cancelled; go on with: {resume_hint(options)}", code)
    except ReplayDivergence as error:
        wrong_model = options.models and any(pointer.startswith("/model") for pointer, *_ in error.diff)
        hint = "\n  the recorded model is taken without --model" if wrong_model else ""
        again = "" if options.stem else "".join([f" {option}" for option in options_again(options)])
        name = f" {options.stem or options.journal}"
        message = ADVISED.sub(lambda advised: advised[0].replace(" FILE", name) + again, error.message)
        return complain(message + hint, Exit.DIVERGED)
    except JournalError as error:
        return complain(error.message, Exit.FAILED)


def _resume(options: Options, answers: Iterable[str], how: GoingOn) -> Exit:
    in_doubt, divergence = cast("Any", attrs.astuple(how.checked()))
    journal, given = journal_at(options.journal), answers_of(answers)
    agent = recorded_agent(journal, options)
    bench = bench_for(options, agent, performs=not journal.history().is_complete)
    limits = _limits_again(journal, options)
    resume = bench.engine.resume
    asked = partial(resume, in_doubt=in_doubt, on_divergence=divergence)
    run = _perform(bench, lambda: asked(journal, agent=agent, answers=given, limits=limits))
    Recording(journal, recorded_as(options.journal)).ended(run.result)
    return told(run, options, bench)


def _replay(options: Options, live: Sequence[str], speed: float | None) -> Exit:
    from stepengine.journal.replayer import live_kinds

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
    if run.result.status is not RunStatus.FAILED:
        Recording(journal, recorded_as(options.journal)).ended(run.result)
    if run.result.status is RunStatus.FAILED:
        complain(f"{options.journal} stays as it was")
    elif (made := journal.extended) is not None and not options.quiet:
        before = "" if made.before is None else f"; as it was: {name_of(made.before)}"
        counted = f"kept {made.kept} of {made.recorded} effects, recorded {made.anew} anew"
        complain(f"{options.journal}: {counted}{before}")
    return told(run, options, bench)


def _fork(options: Options, branch: Branch, answers: Iterable[str]) -> Exit:
    from stepengine.journal.replayer import place_of

    journal, given = journal_at(options.journal), answers_of(answers)
    history = journal.history()
    with _as_usage():
        place_of(history, branch.at)
    into = _target(options, branch)
    agent = recorded_agent(journal, options)
    bench = bench_for(options, agent, into="" if into is None else name_of(into))
    edit = None if branch.edit is None else _edit(branch.edit)
    limits = _limits_again(journal, options)
    about = {"agent_id": agent.id, "prompt": str(history.root.get("prompt", ""))}
    origin = {"stem": options.stem or None, "at": branch.at}
    with Recording.begun(options, into, command="fork", forked_from=origin, **about) as recording:
        if recording.journal is None:
            msg = "a fork needs a journal: name one with --into FILE"
            raise UsageProblem(msg)
        made = recording.journal
        root = options.cwd if branch.restore_files else None
        fork = partial(bench.engine.fork, journal, at=branch.at, edit=edit, into=made, restore_files=root)
        fork = partial(fork, allow_repeat=branch.allow_repeat)
        run = _perform(bench, lambda: fork(answers=given, agent=agent, limits=limits))
        recording.ended(run.result)
    stem = recording.stem if into is None else ""
    if not options.quiet:
        complain(f"the new run is recorded {f'as {stem}' if stem else f'in {name_of(made)}'}")
    return told(run, attrs.evolve(options, journal=name_of(made), stem=stem), bench)


def _target(options: Options, branch: Branch) -> Journal | None:
    """Return where a fork goes: what was typed, else beside its source; ``None`` for the state folder, beside a run of it."""
    if not branch.into and options.stem:
        return None
    place = re.sub(r"[^0-9]+", "-", branch.at.lstrip("#"))
    source = Path(options.journal.partition("#")[0])
    return new_journal(branch.into or str(source.with_name(f"{source.stem}.fork-{place}.jsonl")))


@contextlib.contextmanager
def _as_usage() -> Iterator[None]:
    """Call what a journal cannot give wrong usage: nothing of the journal is wrong, and nothing was run."""
    try:
        yield
    except JournalError as error:
        raise UsageProblem(error.message) from None


# --- from what was typed ----------------------------------------------------------------------------------------------


def found(options: Options, *, waiting: bool = False) -> Options:
    """
    Return *options* with the journal that is meant: the file, the run of that name, or the newest one.

    With a run that the command line keeps by a name comes what it was started with, where nothing else was typed.

    Args:
        options: What was typed.
        waiting: With ``--last``, take the newest run that can be gone on with.

    Raises:
        UsageProblem: when no run or several are meant.
    """
    if options.last and options.journal:
        msg = f"--last and {options.journal!r} name two runs; give one of them"
        raise UsageProblem(msg)
    if options.last:
        return with_record(options, latest(waiting=waiting))
    if not options.journal:
        msg = "name a run: the FILE of its journal, its name as `stepengine runs` lists it, or --last"
        raise UsageProblem(msg)
    entry = None if _is_file(options.journal) else named(options.journal)
    return options if entry is None else with_record(options, entry)


def _is_file(text: str) -> bool:
    from stepengine.journal.finding import database_of

    return Path((database_of(text) or (text, ""))[0]).exists()


def journal_at(text: str) -> Journal:
    """
    Return the journal of a file or of a recorded run: JSON Lines, or ``RUNS.db#RUN`` for a run in an SQLite file.

    Raises:
        UsageProblem: when there is no such file, or it holds several runs and none is named.
    """
    from stepengine.journal import FileJournal, SqliteJournal
    from stepengine.journal.finding import database_of

    if not _is_file(text) and (entry := named(text)) is not None:
        text = entry.journal
    database = database_of(text)
    name, run = database or (text, "")
    if not Path(name).is_file():
        msg = f"there is no journal {text!r}; `stepengine runs --all` lists the recorded runs"
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
    """Return the agent of a journal; one that was recorded with another model than its own goes without its own."""
    agent = agent_of(journal, options.agent, options.settings.agent_folders)
    return attrs.evolve(agent, model=None) if "model" in journal.history().root else agent


def _limits_again(journal: Journal, options: Options) -> Limits | None:
    """Return the limits of a run that goes on: those that it was started with, and what is set beside them."""
    from stepengine.journal.history import opening_of

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
    from stepengine.journal.encoding import restored

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
