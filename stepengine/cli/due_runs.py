"""``stepengine resume --due``: resume runs whose wait has ended or that received a message, and start scheduled runs."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
from attrs import frozen

from stepengine.cli.bench import make_engine_setup
from stepengine.cli.exits import Exit, choose_exit_code, get_exit_code_of_signal, print_error
from stepengine.cli.journals import load_recorded_agent, make_resume_limits, report_ignored_approvals
from stepengine.cli.options import Options
from stepengine.cli.perform import GRACE, await_result_despite_limit
from stepengine.cli.screen.interrupt_keys import call_on_interrupts
from stepengine.cli.screen.render import format_error, one_line, print_visible
from stepengine.cli.settings import UsageProblem
from stepengine.cli.state_folder import RunRecording, fill_options_from_recorded
from stepengine.data.quantities import format_age
from stepengine.data.state import RunResult, RunStatus
from stepengine.data.waits import describe_wait, wait_to_json
from stepengine.errors import JournalError
from stepengine.journal.recorded_runs import find_recorded_run, get_runs_folder

if TYPE_CHECKING:
    from stepengine.engine.scheduler import Scheduler
    from stepengine.engine.schedules import Schedule
    from stepengine.engine.waker import WakeResult
    from stepengine.journal import Journal
    from stepengine.journal.wake_index import Sleeping

SHOWN_CHARS = 200
LATE = timedelta(minutes=1)
"""The lateness from which a line reports how late a run was."""


def resume_all_due_runs(
    options: Options,
    store: str,
    *,
    agents: Sequence[str],
    interval_seconds: float | None,
    concurrency: int,
    trusts: bool,
) -> Exit:
    """
    Resume the due runs of a store, and start the runs of its schedules.

    Args:
        options: The options of the command.
        store: A folder of journals, or an SQLite file; ``""`` for the runs that are recorded by default.
        agents: Agent files, and folders of them.
        interval_seconds: Seconds between two checks, until a signal stops the process; ``None`` for one check.
        concurrency: The number of runs that are resumed concurrently.
        trusts: Whether recorded approvals count, regardless of their author.
    """
    options = attrs.evolve(options, quiet=True).with_settings()
    where = _get_store_path(store)
    given = _AgentFinder.from_arguments(agents, options, with_schedules=bool(store))
    made = _DueRunResumer(options, where, given, is_ours=not store, trusts=trusts)
    if not where.exists() and not (interval_seconds is not None and not store):
        print_error("no run is recorded yet, so none is due", Exit.COMPLETED)
        return Exit.COMPLETED
    try:
        return asyncio.run(made.resume_and_start_runs(interval_seconds, concurrency))
    except JournalError as error:
        return print_error(error.message, Exit.FAILED)


def _get_store_path(text: str) -> Path:
    """
    Return the folder or SQLite file of runs that *text* names; for an empty text, the folder of recorded runs.

    Raises:
        UsageProblem: when it is neither, or does not exist.
    """
    from stepengine.journal.sleepers import is_store_path
    from stepengine.journal.sources import parse_database_path

    if not text:
        folder = get_runs_folder()
        if folder is None:
            msg = "no home folder found with recorded runs; name a STORE, or set STEPENGINE_STATE_DIR"
            raise UsageProblem(msg)
        return folder
    is_database = parse_database_path(text) == (text, "")
    if not is_store_path(text) or (is_database and not Path(text).is_file()):
        what = "a run, or a journal alone" if Path(text).is_file() or "#" in text else "not there"
        msg = f"{text!r} is {what}; name a folder of journals or a database such as RUNS.db (`stepengine resume FILE` without --due resumes one run)"
        raise UsageProblem(msg)
    return Path(text)


@frozen
class _AgentFinder:
    """Finds agents in files by id, and in folders."""

    files: dict[str, str] = attrs.field(factory=dict)
    folders: tuple[Path, ...] = ()
    schedules: tuple[Schedule, ...] = ()

    @classmethod
    def from_arguments(cls, paths: Sequence[str], options: Options, *, with_schedules: bool) -> _AgentFinder:
        """Return a finder for the given agent files and folders, which are loaded; *with_schedules* also loads their schedules."""
        from stepengine.cli.schedules import load_schedules_of_folders
        from stepengine.engine.loader import load_agents, load_schedules
        from stepengine.engine.schedules import require_unique_ids

        files: dict[str, str] = {}
        schedules: list[Schedule] = []
        folders = [Path(text) for text in paths if Path(text).is_dir()]
        for text in [text for text in paths if not Path(text).is_dir()]:
            for agent in load_agents(text):
                files[agent.id] = text if "#" in text else f"{text}#{agent.id}"
            schedules += load_schedules(text) if with_schedules else []
        if with_schedules:
            given = folders if paths else None
            schedules += load_schedules_of_folders(given, options.settings.agent_folders, print_error)
        return cls(files, tuple(folders), tuple(require_unique_ids(schedules)))


class _DueRunResumer:
    """
    Resumes due runs for the command line.

    Args:
        options: The options of the command.
        place: The store of the runs.
        agents: Finds their agents.
        is_ours: Whether the store is the state folder, where runs have companion files.
        trusts: Whether recorded approvals count, regardless of their author.
    """

    def __init__(self, options: Options, place: Path, agents: _AgentFinder, *, is_ours: bool, trusts: bool) -> None:
        self._options = options
        self._place = place
        self._agents = agents
        self._is_ours = is_ours
        self._trusts = trusts
        self._code = Exit.COMPLETED

    async def resume_and_start_runs(self, interval_seconds: float | None, concurrency: int) -> Exit:
        """Resume due runs and start scheduled ones: once, or with *interval_seconds* until stopped. Return the exit code."""
        from stepengine.engine.waker import Waker

        loop = asyncio.get_running_loop()
        async with contextlib.AsyncExitStack() as stack:
            schedulers = [await self._make_scheduler(stack, one) for one in self._agents.schedules]
            waker = Waker(self._place, self.resume_run, tell=self.record_and_print_outcome, at_once=concurrency)
            if interval_seconds is None:
                work = [loop.create_task(_start_due_runs_and_wait(scheduler)) for scheduler in schedulers]
                work.append(loop.create_task(waker.once()))
            else:
                work = [loop.create_task(scheduler.run_forever()) for scheduler in schedulers]
                work.append(loop.create_task(waker.watch(interval_seconds)))

            def cancel_work() -> None:
                """Cancel the tasks that resume and start runs."""
                for task in work:
                    loop.call_soon_threadsafe(task.cancel)

            with call_on_interrupts(cancel_work) as received:
                await asyncio.wait(work, return_when=asyncio.FIRST_EXCEPTION)
                for task in work:
                    task.cancel()
                ended = await asyncio.gather(*work, return_exceptions=True)
        for problem in ended:
            if isinstance(problem, Exception):
                raise problem
        if received and interval_seconds is None:
            return get_exit_code_of_signal(received[0])
        return Exit.COMPLETED if received else self._code

    async def _make_scheduler(self, stack: contextlib.AsyncExitStack, schedule: Schedule) -> Scheduler:
        """Return a scheduler for the agent of *schedule*; *stack* closes its engine."""
        from stepengine.engine import load_agent
        from stepengine.engine.scheduler import Scheduler

        agent = schedule.agent
        found = (
            agent
            if not isinstance(agent, str)
            else load_agent(self._agents.files.get(agent, agent), folders=self._agent_folders)
        )
        bench = make_engine_setup(self._options, found, is_new=True, asks_nobody=True, headless=False)
        await stack.enter_async_context(bench.engine)
        return Scheduler(bench.engine, [schedule], runs=self._place)

    @property
    def _agent_folders(self) -> tuple[Path, ...]:
        """The folders in which agents are found by id."""
        return (*self._agents.folders, *self._options.settings.agent_folders)

    # --- one run ------------------------------------------------------------------------------------------------------

    async def resume_run(self, journal: Journal, sleeping: Sleeping) -> RunResult:
        """Resume one run, record its end and return its result; if this process has to stop, interrupt the run as Ctrl-C does."""
        # Loading agents takes a moment, and so does reading a long journal.
        start, entry = await asyncio.to_thread(self._make_resume_arguments, journal, sleeping)
        bench, asked = start
        async with bench.engine:
            handle = await bench.engine.start_resume(journal, **asked)
            try:
                result = await await_result_despite_limit(handle.result())
            except asyncio.CancelledError:
                handle.interrupt(GRACE)
                with contextlib.suppress(Exception):
                    await handle.wait()
                raise
        RunRecording(journal, entry).record_end(result)
        return result

    def _make_resume_arguments(self, journal: Journal, sleeping: Sleeping) -> tuple[tuple[Any, dict[str, Any]], Any]:
        """Return the engine setup and arguments for resuming a run, and its recorded run, if there is one."""
        options, entry = attrs.evolve(self._options, journal=str(self._place / sleeping.run)), None
        if self._is_ours:
            entry = find_recorded_run(self._place, Path(sleeping.run).stem)
        if entry is not None:
            options = fill_options_from_recorded(options, entry).with_settings()
        history = journal.history()
        agent_id = str(history.root["agent_id"])
        settings = options.settings
        options = attrs.evolve(options, agent=options.agent or self._agents.files.get(agent_id, ""))
        agent = load_recorded_agent(options, history, folders=self._agent_folders, option="--agents")
        again = not self._trusts and report_ignored_approvals(journal, history)
        bench = make_engine_setup(options, agent, asks_nobody=True, headless=False, recorded=history)
        limits = make_resume_limits(journal, attrs.evolve(options, settings=settings))
        return (
            bench,
            {"agent": agent, "limits": limits, "in_doubt": "ask", "trust": self._trusts or (False if again else None)},
        ), entry

    # --- output ------------------------------------------------------------------------------------------------------

    def record_and_print_outcome(self, woken: WakeResult) -> None:
        """Print the outcome of a due run, and store ``FAILED`` as the exit code if it failed."""
        result = woken.result
        if woken.state == "failed" or (
            result is not None and choose_exit_code(result) not in (Exit.COMPLETED, Exit.SUSPENDED)
        ):
            self._code = Exit.FAILED
        if self._options.as_json:
            print(json.dumps(_woken_run_to_dict(woken)), flush=True)
        elif woken.state == "failed":
            print(f"stepengine: {one_line(' '.join(_describe_woken_run(woken)), 2_000)}", file=sys.stderr, flush=True)
        else:
            print_visible(one_line(" ".join(_describe_woken_run(woken)), 2_000), hanging_indent=4)


async def _start_due_runs_and_wait(scheduler: Scheduler) -> None:
    await scheduler.tick()
    await scheduler.wait_until_idle()


def _describe_woken_run(woken: WakeResult) -> Iterator[str]:
    """Yield the parts of a line about a due run: name, result or error, and lateness."""
    name = woken.run.removesuffix(".jsonl")
    yield f"{name} ({woken.agent_id}):" if name else "the wake index:"
    if woken.result is not None:
        yield _describe_result(woken.result)
        late = _format_lateness(woken.due)
        if late:
            yield f"(it was due {late} ago)"
    elif woken.state == "held":
        yield "is in use by another process"
    elif woken.state == "gone":
        yield "does not exist any more"
    else:
        yield f"could not be resumed: {format_error(woken.error) if woken.error is not None else ''}"
    if woken.again_at is not None:
        yield f"- next attempt at {woken.again_at:%H:%M:%S} UTC"


def _describe_result(result: RunResult) -> str:
    """Return a text about the status of a resumed run, with its waits or its error."""
    if result.status is RunStatus.SUSPENDED:
        return f"was resumed, and {'; '.join([describe_wait(one) for one in result.waits_for]) or 'is suspended'}"
    error = f": {one_line(format_error(result.error), SHOWN_CHARS)}" if result.error is not None else ""
    return f"{result.status.value}{error}"


def _format_lateness(due: datetime | None) -> str:
    """Return how late a run was resumed; ``""`` for less than a minute."""
    ago = timedelta() if due is None else datetime.now(UTC) - due
    return format_age(ago) if ago >= LATE else ""


def _woken_run_to_dict(woken: WakeResult) -> dict[str, object]:
    """Return the outcome of a due run as JSON values."""
    result, error = woken.result, woken.error
    if result is not None and error is None:
        error = result.error
    return {
        "run": woken.run,
        "agent": woken.agent_id,
        "state": woken.state,
        "due": woken.due and woken.due.isoformat(),
        "status": result and result.status.value,
        "waits_for": [] if result is None else [wait_to_json(one) for one in result.waits_for],
        "error": None if error is None else {"type": type(error).__name__, "message": format_error(error)},
        "again_at": woken.again_at and woken.again_at.isoformat(),
    }
