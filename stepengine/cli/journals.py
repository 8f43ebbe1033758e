"""Journals on the command line: which one is meant, its agent, its limits, and a run that goes on over it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import secrets
import signal
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from stepengine.cli.bench import Bench, bench_for
from stepengine.cli.exits import Exit, complain, explain_errors
from stepengine.cli.options import Options
from stepengine.cli.perform import Run, interrupt, options_again, result_of, resume_hint, watch_run
from stepengine.cli.recording import find_recorded, latest, with_record
from stepengine.cli.screen.interrupting import interruptible
from stepengine.cli.settings import UsageProblem
from stepengine.cli.toolset import in_code_mode, is_in_code_mode
from stepengine.data.alike import list_names
from stepengine.data.definition import AgentDefinition, normalised_id
from stepengine.data.limits import Limits
from stepengine.data.questions import Answer, AnswerLike
from stepengine.data.state import RunResult, RunStatus
from stepengine.errors import (
    DataError,
    DefinitionError,
    JournalCorrupt,
    JournalError,
    ReplayDivergence,
)

if TYPE_CHECKING:
    from stepengine.data.definition import AgentDefinition
    from stepengine.data.state import RunResult
    from stepengine.journal import Journal, OnDivergence
    from stepengine.journal.history import History
    from stepengine.journal.records import Address
    from stepengine.runtime.handle import RunHandle

__all__ = (
    "RESULT",
    "Interrupted",
    "agent_id_of",
    "agent_of",
    "answer_with_result",
    "answers_of",
    "as_usage",
    "asks_again",
    "choice_of",
    "fields_of",
    "find_journal",
    "follow_run",
    "hooks_of",
    "is_cut_off",
    "is_taken",
    "journal_at",
    "limits_again",
    "name_of",
    "new_journal",
    "on_journal",
    "other_versions",
    "perform_run",
    "readable_journal",
    "recorded_agent",
    "refuse_foreign_yes",
    "repeat",
    "spread",
)

RESULT = "result:"
"""What an answer starts with that says what came of an effect in doubt."""
BY = "command line"
ADVISED = re.compile(r"stepengine (?:fork|resume) \S+(?: --at '[^']*'| --on-divergence (?:keep|extend))?")
PLAIN_ID = re.compile(r"(?:[A-Za-z0-9_-]+/)?[A-Za-z0-9_-]+")


class Interrupted(Exception):
    """A signal ended the command; it says which."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def choice_of(option: str, value: str, choices: Sequence[str]) -> Any:
    """
    Return the value of an option that has a few.

    Raises:
        UsageProblem: for any other.
    """
    if value not in choices:
        msg = f"{option} is {value!r}; it is one of {', '.join(choices)}"
        raise UsageProblem(msg)
    return value


def on_journal(options: Options, command: Callable[[Options], Exit], *, is_waiting: bool = False) -> Exit:
    """
    Do what *command* does with the run that is meant and the settings that are in force.

    Divergences, damaged journals and signals are told; a journal that cannot be used is a failure, and no wrong usage.
    """
    return explain_errors(lambda: _failing(command, find_journal(options, waiting=is_waiting).in_force()))


def _failing(command: Callable[[Options], Exit], options: Options) -> Exit:
    try:
        return command(options)
    except Interrupted as interrupted:
        name = signal.Signals(interrupted.number).name
        code = Exit.TERMINATED if interrupted.number == signal.SIGTERM else Exit.INTERRUPTED
        return complain(f"{name}: the run was cancelled; go on with: {resume_hint(options)}", code)
    except ReplayDivergence as error:
        wrong_model = options.models and any(pointer.startswith("/model") for pointer, *_ in error.diff)
        hint = "\n  the recorded model is taken without --model" if wrong_model else ""
        told = options_again(attrs.evolve(options, script=""))  # of the commands that are advised, only `resume` has it
        again = "" if options.stem else "".join([f" {option}" for option in told])
        name = f" {options.stem or options.journal}"
        message = ADVISED.sub(lambda advised: advised[0].replace(" FILE", name) + again, error.message)
        return complain(message + hint, Exit.DIVERGED)
    except JournalError as error:
        return complain(error.message, Exit.FAILED)


def is_cut_off(journal: Journal, replayed: RunResult) -> bool:
    """Return whether a replay stopped where a crash had ended the record, and nobody had cancelled the run."""
    history = journal.history()
    stopped = any(record.input.get("type") == "stop" for record in history.inputs)
    return replayed.status is RunStatus.CANCELLED and not history.is_complete and not stopped


@contextlib.contextmanager
def as_usage() -> Iterator[None]:
    """Call what a journal cannot give wrong usage: nothing of the journal is wrong, and nothing was run."""
    try:
        yield
    except JournalError as error:
        raise UsageProblem(error.message) from None


def find_journal(options: Options, *, waiting: bool = False) -> Options:
    """
    Return *options* with the journal that is meant: the file, the run of that name, or the newest one.

    With a run that the command line keeps by a name comes what it was started with, where nothing else was typed.

    Args:
        options: What was typed.
        waiting: With ``--last``, take the newest run that can be resumed.

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
    entry = None if _is_file(options.journal) else find_recorded(options.journal)
    return options if entry is None else with_record(options, entry)


def _is_file(text: str) -> bool:
    from stepengine.journal.finding import database_of

    return Path((database_of(text) or (text, ""))[0]).exists()


def journal_at(text: str, *, sign: str = "") -> Journal:
    """
    Return the journal of a file or of a recorded run: JSON Lines, or ``RUNS.db#RUN`` for a run in an SQLite file; *sign* is the file of a key.

    Raises:
        UsageProblem: when there is no such file, or it holds several runs and none is named.
    """
    from stepengine.journal import FileJournal, SqliteJournal
    from stepengine.journal.finding import database_of

    if not _is_file(text) and (entry := find_recorded(text)) is not None:
        text = entry.journal
    database = database_of(text)
    name, run = database or (text, "")
    if not Path(name).is_file():
        near = FileJournal(name).missing().beside
        beside = f"; beside it: {list_names(near, quoted=True)}" if near else ""
        msg = f"there is no journal {text!r}{beside}; `stepengine runs --all` lists the recorded runs"
        raise UsageProblem(msg)
    if database is None:
        return FileJournal(name, sign=sign or None)
    # Not all runs where one is named: `check` names each of them in turn.
    runs = SqliteJournal(name).runs(run)
    if run not in runs and (run or len(runs) != 1):
        listed = list_names([f"{name}#{known}" for known in SqliteJournal(name).runs()], text)
        msg = f"{text!r} names no run; {name} holds: {listed}"
        raise UsageProblem(msg)
    return SqliteJournal(name, run or runs[0], sign=sign or None)


CASSETTES = (".yaml", ".yml")


def readable_journal(text: str) -> Journal:
    """
    Return the journal that ``journal_at`` returns, or the model calls of a cassette as a journal, which nothing can continue.

    Raises:
        UsageProblem: as ``journal_at``.
        JournalCorrupt: for a file that is named as a cassette and is none.
    """
    path = Path(text)
    if path.suffix.lower() not in CASSETTES or not path.is_file():
        return journal_at(text)
    from stepengine.testing.cassette_runs import journal_of_cassette

    try:
        return journal_of_cassette(path)
    except DataError as error:
        raise JournalCorrupt(error.message) from None
    except OSError as error:
        msg = f"{text!r} cannot be read: {error.strerror}"
        raise UsageProblem(msg) from None


def agent_id_of(history: History) -> str:
    """Return the id of the recorded agent, with its publisher if it comes from a package."""
    root, head = str(history.root["agent_id"]), history.head
    return root if head is None or "/" not in head.agent else head.agent


def other_versions(history: History) -> list[str]:
    """Return what is to be said of the packages of recorded agents that are installed in other versions, or not at all."""
    from stepengine.engine.packages import versions
    from stepengine.journal.history import other_packages

    head = history.head
    return [] if head is None or not head.packages else [*other_packages(head, versions(), history.name)]


def agent_of(history: History, given: str, folders: Iterable[Path] = (), *, option: str = "--agent") -> AgentDefinition:
    """
    Return the agent *given* on the command line, or the one whose id is recorded; of a file of several the recorded one.

    Raises:
        DefinitionError: when it is not found.
        JournalError: when the journal holds no run.
    """
    from stepengine.engine import load_agent
    from stepengine.engine.loading import AgentPlace

    agent_id = agent_id_of(history)
    if given:
        place = AgentPlace.of_text(given)
        if place is not None and not place.id and place.file.is_file() and len(place.agents()) > 1:
            given = str(attrs.evolve(place, id=normalised_id(agent_id)))
        return load_agent(given, folders=folders)
    # The id comes out of a file that may be anybody's: it must not name a file to be run.
    if PLAIN_ID.fullmatch(agent_id) is None or Path(agent_id).exists():
        msg = f"{history.name} is a run of {agent_id!r}; say where that agent is with {option} PATH"
        raise DefinitionError(msg)
    try:
        return load_agent(agent_id, folders=folders)
    except DefinitionError as error:
        was = {} if history.head is None else history.head.packages
        of = f" of {was[agent_id]}" if agent_id in was else ""
        msg = f"{history.name} is a run of {agent_id!r}{of}: {error.message}. Say where it is with {option} PATH"
        raise DefinitionError(msg) from error


def recorded_agent(
    journal: Journal,
    options: Options,
    history: History | None = None,
    *,
    folders: Sequence[Path] | None = None,
    option: str = "--agent",
) -> AgentDefinition:
    """
    Return the agent of a journal; one that was recorded with another model than its own goes without its own.

    Args:
        journal: The journal.
        options: The options.
        history: What it says, where that was read already.
        folders: Where the agent is looked for; by default where the settings say.
        option: What the command calls the option that says where it is.
    """
    history = journal.history() if history is None else history
    folders = options.settings.agent_folders if folders is None else folders
    agent = agent_of(history, options.agent, folders, option=option)
    if options.code_mode or is_in_code_mode(history, agent):
        agent = in_code_mode(agent)
    return attrs.evolve(agent, model=None) if "model" in history.root else agent


def hooks_of(history: History) -> Sequence[str]:
    """Return the names of the hooks that a run was recorded with: the run of a program has none of the command line's."""
    return () if history.head is None else history.head.hooks


def limits_again(journal: Journal, options: Options) -> Limits | None:
    """Return the limits of a run that goes on: those that it was started with, and what is set beside them."""
    from stepengine.journal.history import opening_of

    if not options.settings.table("limits"):
        return None
    return (opening_of(journal.history()).limits or Limits()).over(options.settings.limits)


def answers_of(texts: Iterable[str]) -> dict[str, AnswerLike]:
    """
    Return answers by question id; of an effect in doubt also ``result:`` with what came of it, as JSON or text.

    Raises:
        UsageProblem: for what is no ``ID=TEXT``.
    """
    answers: dict[str, AnswerLike] = {}
    for text in texts:
        question, separator, answer = text.partition("=")
        if not separator or not question.strip():
            msg = f"--answer {text!r} is no ID=TEXT, such as --answer q3=yes"
            raise UsageProblem(msg)
        key = question.strip()
        answers[key] = answer_with_result(answer) if is_taken(key, answer) else answer
    return answers


def is_taken(question_id: str, text: str) -> bool:
    """Return whether an answer says what came of an effect in doubt."""
    from stepengine.journal.questions import DOUBT

    return question_id.startswith(DOUBT) and text.startswith(RESULT)


def answer_with_result(text: str) -> Answer:
    """Return the answer that takes what follows ``result:`` for the result of an effect: JSON where it is some, else a text."""
    given = text.removeprefix(RESULT)
    try:
        result = json.loads(given)
    except (ValueError, RecursionError):
        result = given
    return Answer(result=result, by=BY)


def perform_run(bench: Bench, make: Callable[[], Coroutine[object, Any, RunResult]]) -> Run:
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
                    raise Interrupted(received[0]) from None

    return watch_run(ended, bench.progress)


def repeat(journal: Journal, options: Options, on_divergence: OnDivergence = "raise") -> RunResult:
    """Return what the present code makes of a recorded run; nothing is performed."""
    history = journal.history()
    agent = recorded_agent(journal, options, history)
    bench = bench_for(options, agent, performs=False, recorded=history)

    async def ended() -> RunResult:
        async with bench.engine:
            return await bench.engine.replay(journal, agent=agent, on_divergence=on_divergence)

    return asyncio.run(ended())


def fields_of(diff: Iterable[tuple[str, str, str]]) -> list[dict[str, str]]:
    """Return the fields that differ, as JSON."""
    return [{"pointer": pointer, "recorded": recorded, "now": now} for pointer, recorded, now in diff]


def follow_run(bench: Bench, start: Callable[[], Coroutine[object, Any, RunHandle]]) -> Run:
    """Run what *start* starts to its end; Ctrl-C and SIGTERM end it gracefully, a second one at once."""

    async def ended() -> Run:
        loop = asyncio.get_running_loop()
        async with bench.engine:
            starting = asyncio.ensure_future(start())

            def stop() -> None:
                if starting.done():
                    interrupt(starting.result(), loop)
                else:
                    loop.call_soon_threadsafe(starting.cancel)

            with interruptible(stop) as received:
                try:
                    async with await starting as handle:
                        result = await result_of(handle.result())
                except asyncio.CancelledError:
                    if not received:
                        raise
                    raise Interrupted(received[0]) from None
        return Run(result, received[0] if received else None)

    return watch_run(ended, bench.progress)


def new_journal(path: str, *, sign: str = "") -> Journal:
    """
    Return a journal for a new run: one more in an SQLite file, else a file of its own.

    Raises:
        UsageProblem: when the file, or the run that is named in it, holds something already.
    """
    from stepengine.journal import FileJournal, SqliteJournal
    from stepengine.journal.finding import database_of

    database = database_of(path)
    if database is not None:
        name, run = database
        taken = run in SqliteJournal(name).runs()
        made: Journal = SqliteJournal(name, run or f"r{secrets.token_hex(6)}", sign=sign or None)
    else:
        made = FileJournal(path, sign=sign or None)
        taken = Path(path).is_file() and Path(path).stat().st_size > 0 and not _is_unstarted(made)
    if taken:
        msg = (
            f"{path!r} exists already; `stepengine resume {path}` continues its run, `stepengine show {path}` shows it. "
            "Name another one to record another run"
        )
        raise UsageProblem(msg)
    return made


def _is_unstarted(journal: Journal) -> bool:
    """Return whether a journal holds only the head of a run, which a crash left before the run started."""
    try:
        return len(journal.records()) == 1
    except JournalError:
        return False


def name_of(journal: Journal) -> str:
    """Return how a journal is named on the command line."""
    from stepengine.journal import SqliteJournal

    return f"{journal.path}#{journal.run}" if isinstance(journal, SqliteJournal) else journal.name


SUFFIX = ".jsonl"


def spread(files: Iterable[str]) -> list[str]:
    """
    Return the files, for a folder the journals in it, and for an SQLite file the runs in it.

    Raises:
        UsageProblem: when a folder holds none.
    """
    from stepengine.journal import SqliteJournal
    from stepengine.journal.finding import database_of

    found: list[str] = []
    for file in files:
        if not Path(file).is_dir():
            runs = SqliteJournal(file).runs() if database_of(file) == (file, "") else []
            found += [f"{file}#{run}" for run in runs] or [file]
            continue
        inside = [str(path) for path in sorted(Path(file).rglob(f"*{SUFFIX}"))]
        if not inside:
            msg = f"there is no *{SUFFIX} in {file!r}; name journals, or a folder that holds some"
            raise UsageProblem(msg)
        found += inside
    return found


# --- whose journal it is ----------------------------------------------------------------------------------------------


def asks_again(journal: Journal, history: History) -> bool:
    """Return whether a journal that somebody else made allows what has not begun; a person is told what is asked again."""
    from stepengine.journal.provenance import has_known_permissions
    from stepengine.journal.reopening import permissions_ahead

    ahead = permissions_ahead(history)
    if not ahead or has_known_permissions(journal):
        return _has_foreign_letters(journal)
    listed = f"{', '.join(ahead)} {'is' if len(ahead) == 1 else 'are'}"
    complain(
        f"{name_of(journal)} is not as your own commands left it, and allows calls that have not begun: {listed} "
        "asked again (--trust-answers takes what stands there)"
    )
    return True


def _has_foreign_letters(journal: Journal) -> bool:
    """Return whether somebody answered by the mailbox of a journal outside of the state folder: whoever made it could have."""
    from stepengine.journal.provenance import is_in_state_folder

    if is_in_state_folder(journal):
        return False
    box = journal.mailbox()
    return box.changed(0) and any(letter.kind == "answer" for letter in box.read()[0])


def refuse_foreign_yes(
    journal: Journal, history: History, after: Address | None = None, *, edited: bool = False
) -> None:
    """
    Refuse a journal that somebody else made for what would run on its own yes.

    Args:
        journal: The journal.
        history: What it says.
        after: Where it is forked; by default it goes on where it ends.
        edited: Whether the outcome there is given anew, which is not a word of the journal.

    Raises:
        UsageProblem: when it allows a call that has not begun; it says what helps.
    """
    from stepengine.journal.encoding import questions_of
    from stepengine.journal.provenance import has_known_permissions
    from stepengine.journal.records import shown_address
    from stepengine.journal.reopening import permissions_ahead

    own = questions_of(history.form(history.intents[after])) if edited and after is not None else ()
    ahead = [each for each in permissions_ahead(history, after=after) if each not in {q.id for q in own}]
    if not ahead or has_known_permissions(journal):
        return
    where, how = ("behind its end", "`stepengine resume` asks you first, and --trust-answers takes what stands there")
    if after is not None:
        where, how = f"behind {shown_address(*after)}", "fork it at an effect before that, so that you are asked"
    msg = (
        f"{name_of(journal)} is not as your own commands left it, and {where} its {', '.join(ahead)} would let calls run "
        f"that nobody here allowed; {how}"
    )
    raise UsageProblem(msg)
