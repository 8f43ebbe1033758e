"""Journals on the command line: find and open them, load their agents and limits, and resume, replay or create runs."""

from __future__ import annotations

import asyncio
import contextlib
import re
import secrets
import shlex
import signal
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import attrs

from stepengine.cli.bench import EngineSetup, make_engine_setup
from stepengine.cli.exits import Exit, get_exit_code_of_signal, print_error, run_explaining_errors
from stepengine.cli.options import Options, make_unique_dict
from stepengine.cli.perform import (
    FinishedRun,
    await_result_despite_limit,
    format_resume_command,
    format_shared_options,
    interrupt_run,
    run_with_display,
)
from stepengine.cli.screen.confirm import is_doubt_result_answer, parse_result_answer
from stepengine.cli.screen.interrupt_keys import call_on_interrupts
from stepengine.cli.settings import UsageProblem
from stepengine.cli.state_folder import (
    fill_options_from_recorded,
    find_recorded_run_by_prefix,
    get_newest_run,
    has_started_run,
)
from stepengine.cli.toolset import convert_to_code_mode, was_in_code_mode
from stepengine.data.alike import list_names
from stepengine.data.definition import AgentDefinition, normalised_id
from stepengine.data.limits import Limits
from stepengine.data.questions import AnswerLike
from stepengine.data.state import RunResult, RunStatus
from stepengine.errors import (
    DataError,
    DefinitionError,
    JournalCorrupt,
    JournalError,
    ReplayDivergence,
)
from stepengine.journal.encoding import get_recorded_questions
from stepengine.journal.history import parse_recorded_start
from stepengine.journal.journal_files import open_for_reading
from stepengine.journal.records import format_address

if TYPE_CHECKING:
    from stepengine.data.definition import AgentDefinition
    from stepengine.data.state import RunResult
    from stepengine.journal import Journal
    from stepengine.journal.history import History
    from stepengine.journal.records import Address
    from stepengine.runtime.handle import RunHandle

ADVISED = re.compile(r"stepengine (?:fork|resume) \S+(?: --at '[^']*'| --on-divergence (?:keep|extend))?")
Made = TypeVar("Made")
PLAIN_ID = re.compile(r"(?:[A-Za-z0-9_-]+/)?[A-Za-z0-9_-]+")


class Interrupted(Exception):
    """
    A signal ended the command.

    Attributes:
        number: The signal.
        options: The options that name the journal of the run that the command continued; ``None`` if it recorded nothing.
    """

    def __init__(self, number: int, options: Options | None = None) -> None:
        super().__init__(number)
        self.number = number
        self.options = options


def require_choice(option: str, value: str, choices: Sequence[str]) -> Any:
    """
    Return the value of an option; raise ``UsageProblem`` unless it is one of *choices*.

    Raises:
        UsageProblem: for any other value.
    """
    if value not in choices:
        msg = f"{option} {value!r} is unknown; valid values: {', '.join(choices)}"
        raise UsageProblem(msg)
    return value


def run_on_journal(options: Options, command: Callable[[Options], Exit], *, resumable_only: bool = False) -> Exit:
    """
    Find the run and its settings, run *command* with them, and report errors.

    Divergences, damaged journals and signals are reported. A journal that cannot be used exits with 1, not with 2.

    Args:
        options: The options of the command.
        command: Called with the options, filled with the journal and the settings.
        resumable_only: Let ``--last`` select the newest run that can be resumed.
    """
    return run_explaining_errors(
        lambda: _run_reporting_failures(
            command, add_journal_to_options(options, resumable_only=resumable_only).with_settings()
        )
    )


def _run_reporting_failures(command: Callable[[Options], Exit], options: Options) -> Exit:
    """Run *command*; report signals, divergences and journal errors, and return the exit code."""
    try:
        return command(options)
    except Interrupted as interrupted:
        name = signal.Signals(interrupted.number).name
        code = get_exit_code_of_signal(interrupted.number)
        from stepengine.journal import as_journal

        made = interrupted.options
        if made is None or not has_started_run(as_journal(made.journal)):
            return print_error(f"{name}: stopped; nothing was recorded", code)
        return print_error(f"{name}: the run was cancelled; resume it with: {format_resume_command(made)}", code)
    except ReplayDivergence as error:
        wrong_model = options.models and any(pointer.startswith("/model") for pointer, *_ in error.diff)
        hint = "\n  to use the recorded model, leave out --model" if wrong_model else ""
        told = format_shared_options(
            attrs.evolve(options, script="")
        )  # of the commands that are advised, only `resume` has it
        again = "" if options.stem else "".join([f" {option}" for option in told])
        name = f" {shlex.quote(options.stem or options.journal)}"
        message = ADVISED.sub(lambda advised: advised[0].replace(" FILE", name) + again, error.message)
        return print_error(message + hint, Exit.DIVERGED)
    except JournalError as error:
        return print_error(error.message, Exit.FAILED)


def was_cut_off_by_crash(journal: Journal, replayed: RunResult) -> bool:
    """Return whether a replay was cancelled because a crash had cut off the record, and not because the run was cancelled."""
    history = journal.history()
    stopped = any(record.input.get("type") == "stop" for record in history.inputs)
    return replayed.status is RunStatus.CANCELLED and not history.is_complete and not stopped


@contextlib.contextmanager
def raise_journal_errors_as_usage() -> Iterator[None]:
    """Raise a ``JournalError`` of the block as ``UsageProblem``, because the journal is intact and nothing was run."""
    try:
        yield
    except JournalError as error:
        raise UsageProblem(error.message) from None


def add_journal_to_options(options: Options, *, resumable_only: bool = False) -> Options:
    """
    Return *options* with the journal of the run: a file, the name of a run, or the newest run.

    For a recorded run, options that were not typed are filled from its start options.

    Args:
        options: The typed options.
        resumable_only: Let ``--last`` select the newest run that can be resumed.

    Raises:
        UsageProblem: when the options name no run or several.
    """
    if options.last and options.journal:
        msg = f"--last and {options.journal!r} name two runs; pass one of them"
        raise UsageProblem(msg)
    if options.last:
        return fill_options_from_recorded(options, get_newest_run(resumable_only=resumable_only))
    if not options.journal:
        msg = "name a run: the FILE of its journal, its name as `stepengine runs` lists it, or --last"
        raise UsageProblem(msg)
    entry = None if _is_existing_file(options.journal) else find_recorded_run_by_prefix(options.journal)
    return options if entry is None else fill_options_from_recorded(options, entry)


def _is_existing_file(text: str) -> bool:
    from stepengine.journal.sources import get_journal_file

    return get_journal_file(text).exists()


def open_journal(text: str, *, sign: str = "") -> Journal:
    """
    Return the journal of a file, of ``RUNS.db#RUN``, or of the name of a recorded run; *sign* is a key file.

    Raises:
        UsageProblem: when there is no such file, or it holds several runs and none is named.
    """
    from stepengine.journal import FileJournal, SqliteJournal
    from stepengine.journal.sources import parse_database_path

    if not _is_existing_file(text) and (entry := find_recorded_run_by_prefix(text)) is not None:
        text = entry.journal
    database = parse_database_path(text)
    name, run = database or (text, "")
    if Path(name).exists() and not Path(name).is_file():
        msg = f"{name!r} is not a regular file; name the file of a journal"
        raise UsageProblem(msg)
    if not Path(name).is_file():
        near = FileJournal(name).make_missing_error().beside
        beside = f"; next to it: {list_names(near, quoted=True)}" if near else ""
        msg = f"there is no journal {text!r}{beside}; `stepengine runs --all` lists the recorded runs"
        raise UsageProblem(msg)
    if database is None:
        return FileJournal(name, sign=sign or None)
    # Not all runs where one is named: `check` names each of them in turn.
    runs = SqliteJournal(name).runs(run)
    if run not in runs and (run or len(runs) != 1):
        listed = list_names([f"{name}#{known}" for known in SqliteJournal(name).runs()], text)
        msg = f"{text!r} names no run; the runs in {name}: {listed}"
        raise UsageProblem(msg)
    return SqliteJournal(name, run or runs[0], sign=sign or None)


CASSETTES = (".yaml", ".yml")


def open_journal_or_cassette(text: str) -> Journal:
    """
    Return a journal as ``open_journal`` does, or the model calls of a cassette as a read-only journal.

    Raises:
        UsageProblem: as for ``open_journal``.
        JournalCorrupt: for a file that has the suffix of a cassette but is none.
    """
    path = Path(text)
    if path.suffix.lower() not in CASSETTES or not path.is_file():
        return open_journal(text)
    from stepengine.testing.cassette_runs import load_cassette_as_journal

    try:
        return load_cassette_as_journal(path)
    except DataError as error:
        raise JournalCorrupt(error.message) from None
    except OSError as error:
        msg = f"{text!r} cannot be read: {error.strerror}"
        raise UsageProblem(msg) from None


def load_given_or_recorded_agent(
    history: History, given: str, folders: Iterable[Path], *, option: str
) -> AgentDefinition:
    """
    Return the agent *given* on the command line, else the recorded one.

    Raises:
        DefinitionError: when it is not found.
        JournalError: when the journal holds no run.
    """
    from stepengine.engine import load_agent
    from stepengine.engine.loader import AgentLocation
    from stepengine.journal.show import get_root_agent_id

    agent_id = get_root_agent_id(history)
    if given:
        place = AgentLocation.from_text(given)
        if place is not None and not place.id and place.file.is_file() and len(place.load_all()) > 1:
            given = str(attrs.evolve(place, id=normalised_id(agent_id)))
        return load_agent(given, folders=folders)
    # The id comes from a file that anyone may have written: it must not name a file to run.
    if PLAIN_ID.fullmatch(agent_id) is None or Path(agent_id).exists():
        msg = f"{history.name} is a run of {agent_id!r}; name its agent with {option} PATH"
        raise DefinitionError(msg)
    try:
        return load_agent(agent_id, folders=folders)
    except DefinitionError as error:
        was = {} if history.head is None else history.head.packages
        of = f" of {was[agent_id]}" if agent_id in was else ""
        msg = f"{history.name} is a run of {agent_id!r}{of}: {error.message}. Name its file with {option} PATH"
        raise DefinitionError(msg) from error


def load_recorded_agent(
    options: Options,
    history: History,
    *,
    folders: Sequence[Path] | None = None,
    option: str = "--agent",
) -> AgentDefinition:
    """
    Return the agent of a journal, without its own model if another one was recorded.

    Args:
        options: The options.
        history: The content of the journal.
        folders: The folders to search for the agent; by default those of the settings.
        option: The name of the command's option for the path of the agent.
    """
    folders = options.settings.agent_folders if folders is None else folders
    agent = load_given_or_recorded_agent(history, options.agent, folders, option=option)
    if options.code_mode or was_in_code_mode(history, agent):
        agent = convert_to_code_mode(agent)
    return attrs.evolve(agent, model=None) if "model" in history.root else agent


def list_recorded_hook_names(history: History) -> Sequence[str]:
    """Return the names of the hooks in the record of a run."""
    return () if history.head is None else history.head.hooks


def make_resume_limits(journal: Journal, options: Options) -> Limits | None:
    """Return the recorded limits of a run, filled from the settings, for its resumption; ``None`` if the settings have no limits."""
    if not options.settings.table("limits"):
        return None
    return (parse_recorded_start(journal.history()).limits or Limits()).resolve(options.settings.limits)


def parse_answers(texts: Iterable[str]) -> dict[str, AnswerLike]:
    """
    Parse ``ID=TEXT`` options into answers by question id; ``result:`` supplies the result of an effect in doubt.

    Raises:
        UsageProblem: when an option is not ``ID=TEXT``, or a question has two answers.
    """
    answers: list[tuple[str, AnswerLike]] = []
    for text in texts:
        question, separator, answer = text.partition("=")
        if not separator or not question.strip():
            msg = f"--answer {text!r} is not ID=TEXT, such as --answer q3=yes"
            raise UsageProblem(msg)
        key = question.strip()
        answers.append((key, parse_result_answer(answer) if is_doubt_result_answer(key, answer) else answer))
    return make_unique_dict("--answer", answers)


async def await_unless_interrupted(work: Coroutine[object, Any, Made]) -> tuple[Made, int | None]:
    """
    Await *work*, which Ctrl-C and SIGTERM cancel; return its result, and the number of the signal or ``None``.

    Raises:
        Interrupted: when a signal arrived and *work* returned no partial result.
    """
    loop = asyncio.get_running_loop()
    task = asyncio.ensure_future(work)
    with call_on_interrupts(lambda: loop.call_soon_threadsafe(task.cancel)) as received:
        try:
            return await task, received[0] if received else None
        except asyncio.CancelledError:
            if not received:
                raise
            raise Interrupted(received[0]) from None


def run_cancelling_on_signal(
    bench: EngineSetup, make_coroutine: Callable[[], Coroutine[object, Any, RunResult]]
) -> FinishedRun:
    """
    Run the coroutine of *make_coroutine* in a new event loop and return its result.

    It must record nothing before its end. Ctrl-C and SIGTERM cancel it and raise ``Interrupted``; a second signal ends the process.
    """

    async def run_to_end() -> FinishedRun:
        """Await the coroutine unless a signal arrives, and close the engine."""
        async with bench.engine:
            result, _ = await await_unless_interrupted(await_result_despite_limit(make_coroutine()))
            return FinishedRun(result)

    return run_with_display(run_to_end, bench.progress)


def load_replay_setup(options: Options, history: History) -> tuple[AgentDefinition, EngineSetup]:
    """Return the agent of a journal, and an engine that replays its run without performing anything."""
    agent = load_recorded_agent(options, history)
    return agent, make_engine_setup(options, agent, performs=False, recorded=history)


def replay_recorded_run(journal: Journal, options: Options) -> RunResult:
    """Replay a recorded run with the current code and return the result."""
    agent, bench = load_replay_setup(options, journal.history())

    async def replay_to_end() -> RunResult:
        """Replay the journal, close the engine, and return the result."""
        async with bench.engine:
            return await bench.engine.replay(journal, agent=agent)

    return asyncio.run(replay_to_end())


def start_run_and_wait(
    bench: EngineSetup, start: Callable[[], Coroutine[object, Any, RunHandle]], options: Options
) -> FinishedRun:
    """
    Start a run and wait for its end. Ctrl-C and SIGTERM interrupt it gracefully, a second one at once.

    Args:
        bench: The engine.
        start: Starts the run.
        options: The options that name the journal of the run.

    Raises:
        Interrupted: when a signal arrives before the run has started.
    """

    async def run_to_end() -> FinishedRun:
        """Start the run, wait for its end while signals interrupt it, and close the engine."""
        loop = asyncio.get_running_loop()
        async with bench.engine:
            starting = asyncio.ensure_future(start())

            def interrupt_or_cancel_start() -> None:
                """Interrupt the run gracefully; cancel its start if it has not started."""
                if starting.done():
                    interrupt_run(starting.result(), loop)
                else:
                    loop.call_soon_threadsafe(starting.cancel)

            with call_on_interrupts(interrupt_or_cancel_start) as received:
                try:
                    async with await starting as handle:
                        result = await await_result_despite_limit(handle.result())
                except asyncio.CancelledError:
                    if not received:
                        raise
                    raise Interrupted(received[0], options) from None
        return FinishedRun(result, received[0] if received else None)

    return run_with_display(run_to_end, bench.progress)


def create_journal(path: str, *, sign: str = "") -> Journal:
    """
    Return a journal for a new run, in an SQLite file or a file of its own; raise ``UsageProblem`` if that run exists.

    Raises:
        UsageProblem: when the file, or the named run in it, is not empty.
    """
    from stepengine.journal import FileJournal, SqliteJournal
    from stepengine.journal.sources import parse_database_path

    database = parse_database_path(path)
    if database is not None:
        name, run = database
        taken = run in SqliteJournal(name).runs()
        made: Journal = SqliteJournal(name, run or f"r{secrets.token_hex(6)}", sign=sign or None)
    else:
        made = FileJournal(path, sign=sign or None)
        taken = Path(path).is_file() and Path(path).stat().st_size > 0 and not _has_only_head(made)
    if taken:
        typed = shlex.quote(path)
        msg = (
            f"{path!r} exists already; `stepengine resume {typed}` continues its run, `stepengine show {typed}` shows it. "
            "Name another file to record another run"
        )
        raise UsageProblem(msg)
    return made


def _has_only_head(journal: Journal) -> bool:
    """Return whether a journal holds only the head of a run, which a crash left before the run started."""
    try:
        return len(journal.records()) == 1
    except JournalError:
        return False


SUFFIX = ".jsonl"
HEAD = b'{"kind":"head"'
"""The start of a journal file."""
CHECKSUM = b'"crc":'
"""A part of every line of a journal."""
HEAD_BYTES = 1 << 16


def expand_to_journals(files: Iterable[str]) -> list[str]:
    """
    Return the files, with folders replaced by their journals and SQLite files by their runs.

    Raises:
        UsageProblem: when a folder has no journals.
    """
    from stepengine.journal import SqliteJournal
    from stepengine.journal.sources import parse_database_path

    found: list[str] = []
    for file in files:
        if not Path(file).is_dir():
            runs = SqliteJournal(file).runs() if parse_database_path(file) == (file, "") else []
            found += [f"{file}#{run}" for run in runs] or [file]
            continue
        inside = [str(path) for path in sorted(Path(file).rglob(f"*{SUFFIX}"))]
        if not inside:
            msg = f"there is no *{SUFFIX} in {file!r}; pass journals, or a folder with journals"
            raise UsageProblem(msg)
        found += inside
    return found


def iterate_files_and_journals(path: str) -> Iterator[tuple[str, Journal | None]]:
    """
    Yield the files of a path, each with its journal if it is one; the runs of an SQLite file separately.

    Raises:
        UsageProblem: when there is neither a file nor a recorded run.
        JournalError: when a database that was named cannot be read.
    """
    from stepengine.journal import SqliteJournal
    from stepengine.journal.secret_scan import list_files
    from stepengine.journal.sources import parse_database_path

    if not Path(path).exists():
        yield path, open_journal(path)
        return
    for file in map(str, list_files(path)):
        if parse_database_path(file) != (file, ""):
            yield file, open_journal(file) if is_journal_file(Path(file)) else None
            continue
        try:
            runs = SqliteJournal(file).runs()
        except JournalError:
            if file == path:
                raise
            runs = []  # a database of something else
        yield from [(f"{file}#{run}", open_journal(f"{file}#{run}")) for run in runs]
        yield file, None


def is_journal_file(file: Path) -> bool:
    """
    Return whether a file is a journal, even with a damaged first line; ``False`` for ``*.jsonl`` with other JSON.

    Raises:
        JournalError: when the file cannot be read, or is a pipe or a device.
    """
    descriptor = open_for_reading(file)
    if descriptor is None:
        return False
    with open(descriptor, "rb") as opened:  # noqa: PTH123 - it is open already
        first = opened.readline(HEAD_BYTES)
    if first.startswith(HEAD):
        return True
    return file.suffix == SUFFIX and (CHECKSUM in first or not first.lstrip().startswith((b"{", b"[", b'"')))


# --- whose journal it is ----------------------------------------------------------------------------------------------


def report_ignored_approvals(journal: Journal, history: History) -> bool:
    """Print the ignored approvals of an untrusted journal; return whether a person must approve calls that only it requests."""
    from stepengine.journal.permission_reset import find_effective_approvals
    from stepengine.journal.provenance import has_trusted_permissions

    if has_trusted_permissions(journal):
        return _has_untrusted_answers(journal)
    ahead = find_effective_approvals(history)
    if not ahead:
        return True
    listed = f"{', '.join(ahead)} {'is' if len(ahead) == 1 else 'are'}"
    print_error(
        f"{journal.address} was written or changed by others, and approves calls that have not started: {listed} "
        "asked again (to accept the recorded approvals, pass --trust-journal)"
    )
    return True


def _has_untrusted_answers(journal: Journal) -> bool:
    """Return whether the mailbox of a journal outside of the state folder has answers: anyone may have sent them."""
    from stepengine.journal.provenance import is_in_private_runs_folder

    if is_in_private_runs_folder(journal):
        return False
    box = journal.mailbox()
    return box.may_have_messages(0) and any(letter.kind == "answer" for letter in box.read()[0])


def refuse_untrusted_approvals(
    journal: Journal, history: History, after: Address | None = None, *, edited: bool = False
) -> None:
    """
    Raise if an untrusted journal approves calls that have not started yet.

    Args:
        journal: The journal.
        history: Its content.
        after: The effect after which the run is forked; by default it is resumed at its end.
        edited: Whether the outcome at *after* is replaced, so that it does not come from the journal.

    Raises:
        UsageProblem: when it approves a call that has not started; the message names a solution.
    """
    from stepengine.journal.permission_reset import find_effective_approvals
    from stepengine.journal.provenance import has_trusted_permissions

    own = get_recorded_questions(history.form(history.intents[after])) if edited and after is not None else ()
    ahead = [each for each in find_effective_approvals(history, after=after) if each not in {q.id for q in own}]
    if not ahead or has_trusted_permissions(journal):
        return
    where, how = (
        "after its end",
        "`stepengine resume` asks you first, and --trust-journal accepts them",
    )
    if after is not None:
        where, how = f"after {format_address(*after)}", "fork it at an earlier effect, so that you are asked"
    msg = (
        f"{journal.address} was written or changed by others, and its approvals {where} ({', '.join(ahead)}) would allow calls "
        f"that you did not approve; {how}"
    )
    raise UsageProblem(msg)
