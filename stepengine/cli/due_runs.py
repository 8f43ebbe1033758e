"""``stepengine resume --due``: resume the runs whose time has come, or for which something came."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
from attrs import frozen

from stepengine.cli.bench import bench_for
from stepengine.cli.exits import Exit, complain, exit_code
from stepengine.cli.journals import asks_again, limits_again, recorded_agent
from stepengine.cli.options import Options
from stepengine.cli.perform import GRACE, result_of
from stepengine.cli.recording import RunRecording, entry_of, runs_folder
from stepengine.cli.screen.interrupting import interruptible
from stepengine.cli.screen.render import message_of, one_line, say, wait_of, waiting_for
from stepengine.cli.settings import UsageProblem
from stepengine.data.quantities import format_age
from stepengine.data.state import RunResult, RunStatus
from stepengine.errors import DefinitionError, JournalError

if TYPE_CHECKING:
    from stepengine.data.definition import AgentDefinition
    from stepengine.engine.scheduler import Scheduler
    from stepengine.engine.schedules import Schedule
    from stepengine.engine.waking import Woken
    from stepengine.journal import Journal
    from stepengine.journal.waking import Sleeping

__all__ = ("resume_due",)

SHOWN_CHARS = 200
LATE = timedelta(minutes=1)
"""How late a run has to be for a word about it."""


def resume_due(
    options: Options,
    store: str,
    *,
    agents: Sequence[str],
    every: float | None,
    at_once: int,
    trusts: bool,
) -> Exit:
    """
    Resume the runs of a store that are due, and start what its schedules order.

    Args:
        options: The options of the command.
        store: A folder of journals, or an SQLite file; ``""`` for the runs that are recorded by default.
        agents: Agent files, and folders of them.
        every: Seconds between two looks, until the process is told to stop; ``None`` for one look.
        at_once: How many runs are resumed at the same time.
        trusts: Whether recorded permissions are believed, whoever wrote them.
    """
    options = attrs.evolve(options, quiet=True).in_force()
    where = _store(store)
    given = _AgentFinder.of(agents, options, starts=bool(store))
    made = _DueRuns(options, where, given, is_ours=not store, trusts=trusts)
    if not where.exists() and not (every is not None and not store):
        complain("nothing was recorded yet, so nothing sleeps", Exit.COMPLETED)
        return Exit.COMPLETED
    try:
        return asyncio.run(made.work(every, at_once))
    except JournalError as error:
        return complain(error.message, Exit.FAILED)


def _store(text: str) -> Path:
    """
    Return the folder or SQLite file of runs that is named.

    Raises:
        UsageProblem: when it is something else, or is not there.
    """
    from stepengine.journal.finding import database_of
    from stepengine.journal.sleeping import is_place

    if not text:
        folder = runs_folder()
        if folder is None:
            msg = "there is no home folder with recorded runs; name a STORE, or set STEPENGINE_STATE_DIR"
            raise UsageProblem(msg)
        return folder
    is_database = database_of(text) == (text, "")
    if not is_place(text) or (is_database and not Path(text).is_file()):
        what = "a run, or a journal alone" if Path(text).is_file() or "#" in text else "not there"
        msg = f"{text!r} is {what}; name a folder of journals or a database such as RUNS.db (`stepengine resume FILE` without --due resumes one run)"
        raise UsageProblem(msg)
    return Path(text)


@frozen
class _AgentFinder:
    """Where agents are found: files by the ids that are in them, and folders."""

    files: dict[str, str] = attrs.field(factory=dict)
    folders: tuple[Path, ...] = ()
    schedules: tuple[Schedule, ...] = ()

    @classmethod
    def of(cls, given: Sequence[str], options: Options, *, starts: bool) -> _AgentFinder:
        """Return what was typed, else with *starts* the schedules of the agents that are found anyway."""
        from stepengine.engine.loading import load_agents, load_schedules
        from stepengine.engine.schedules import unique

        files: dict[str, str] = {}
        schedules: list[Schedule] = []
        folders = [Path(text) for text in given if Path(text).is_dir()]
        for text in [text for text in given if not Path(text).is_dir()]:
            for agent in load_agents(text):
                files[agent.id] = text if "#" in text else f"{text}#{agent.id}"
            schedules += load_schedules(text) if starts else []
        if starts:
            schedules += _schedules_in(folders, options, is_given=bool(given))
        return cls(files, tuple(folders), tuple(unique(schedules)))


def _schedules_in(folders: Sequence[Path], options: Options, *, is_given: bool) -> Iterator[Schedule]:
    from stepengine.engine.loading import agent_folders, load_folder

    for folder in folders if is_given else agent_folders(options.settings.agent_folders):
        try:
            loaded = load_folder(folder)
        except DefinitionError as error:
            if is_given:
                raise
            complain(message_of(error))
            continue
        for problem in loaded.problems:
            complain(problem)
        yield from loaded.schedules


class _DueRuns:
    """
    Resumes due runs for the command line.

    Args:
        options: What was typed.
        place: Where the runs are.
        agents: Where their agents are.
        is_ours: Whether the place is where runs are recorded by themselves.
        trusts: Whether recorded permissions are believed, whoever wrote them.
    """

    def __init__(self, options: Options, place: Path, agents: _AgentFinder, *, is_ours: bool, trusts: bool) -> None:
        self._options = options
        self._place = place
        self._agents = agents
        self._is_ours = is_ours
        self._trusts = trusts
        self._code = Exit.COMPLETED

    async def work(self, every: float | None, at_once: int) -> Exit:
        """Wake once, or with *every* until told to stop."""
        from stepengine.engine.waking import Waker

        loop = asyncio.get_running_loop()
        async with contextlib.AsyncExitStack() as stack:
            schedulers = [await self._scheduler(stack, one) for one in self._agents.schedules]
            waker = Waker(self._place, self.resume, tell=self.tell, at_once=at_once)
            if every is None:
                work = [loop.create_task(_tick_once(scheduler)) for scheduler in schedulers]
                work.append(loop.create_task(waker.once()))
            else:
                work = [loop.create_task(scheduler.run_forever()) for scheduler in schedulers]
                work.append(loop.create_task(waker.watch(every)))

            def stop() -> None:
                for task in work:
                    loop.call_soon_threadsafe(task.cancel)

            with interruptible(stop) as received:
                await asyncio.wait(work, return_when=asyncio.FIRST_EXCEPTION)
                for task in work:
                    task.cancel()
                ended = await asyncio.gather(*work, return_exceptions=True)
        for problem in ended:
            if isinstance(problem, Exception):
                raise problem
        if received and every is None:
            return Exit.TERMINATED if received[0] == signal.SIGTERM else Exit.INTERRUPTED
        return Exit.COMPLETED if received else self._code

    async def _scheduler(self, stack: contextlib.AsyncExitStack, schedule: Schedule) -> Scheduler:
        from stepengine.engine import load_agent
        from stepengine.engine.scheduler import Scheduler

        agent = schedule.agent
        found = (
            agent
            if not isinstance(agent, str)
            else load_agent(self._agents.files.get(agent, agent), folders=self._folders)
        )
        bench = bench_for(self._options, found, is_new=True, asks_nobody=True, headless=False)
        await stack.enter_async_context(bench.engine)
        return Scheduler(bench.engine, [schedule], runs=self._place)

    @property
    def _folders(self) -> tuple[Path, ...]:
        return (*self._agents.folders, *self._options.settings.agent_folders)

    # --- one run ------------------------------------------------------------------------------------------------------

    async def resume(self, journal: Journal, one: Sleeping) -> RunResult:
        """Go on with a run; one that has to end with this process is ended as by Ctrl-C."""
        # Loading agents takes a moment, and so does reading a long journal.
        start, entry = await asyncio.to_thread(self._prepare, journal, one)
        bench, asked = start
        async with bench.engine:
            handle = await bench.engine.start_resume(journal, **asked)
            try:
                result = await result_of(handle.result())
            except asyncio.CancelledError:
                handle.interrupt(GRACE)
                with contextlib.suppress(Exception):
                    await handle.wait()
                raise
        RunRecording(journal, entry).ended(result)
        return result

    def _prepare(self, journal: Journal, one: Sleeping) -> tuple[tuple[Any, dict[str, Any]], Any]:
        from stepengine.cli.recording import with_record

        options, entry = attrs.evolve(self._options, journal=str(self._place / one.run)), None
        if self._is_ours:
            entry = entry_of(self._place, Path(one.run).stem)
        if entry is not None:
            options = with_record(options, entry).in_force()
        history = journal.history()
        agent_id = str(history.root["agent_id"])
        settings = options.settings
        options = attrs.evolve(options, agent=options.agent or self._agents.files.get(agent_id, ""))
        agent = self._agent(journal, options, history)
        again = not self._trusts and asks_again(journal, history)
        bench = bench_for(options, agent, asks_nobody=True, headless=False, recorded=history)
        limits = limits_again(journal, attrs.evolve(options, settings=settings))
        return (bench, {"agent": agent, "limits": limits, "in_doubt": "ask", "ask_again": again}), entry

    def _agent(self, journal: Journal, options: Options, history: Any) -> AgentDefinition:
        return recorded_agent(journal, options, history, folders=self._folders, option="--agents")

    # --- what is told -------------------------------------------------------------------------------------------------

    def tell(self, woken: Woken) -> None:
        """Print what became of a run that was due."""
        result = woken.result
        if woken.state == "failed" or (
            result is not None and exit_code(result) not in (Exit.COMPLETED, Exit.SUSPENDED)
        ):
            self._code = Exit.FAILED
        if self._options.as_json:
            print(json.dumps(_json_of(woken)), flush=True)
        elif woken.state == "failed":
            print(f"stepengine: {one_line(' '.join(_words(woken)), 2_000)}", file=sys.stderr, flush=True)
        else:
            say(one_line(" ".join(_words(woken)), 2_000), hang=4)


async def _tick_once(scheduler: Scheduler) -> None:
    await scheduler.tick()
    await scheduler.finished()


def _words(woken: Woken) -> Iterator[str]:
    name = woken.run.removesuffix(".jsonl")
    yield f"{name} ({woken.agent_id}):" if name else "the index of waking:"
    if woken.result is not None:
        yield _how(woken.result)
        late = _late(woken.due)
        if late:
            yield f"(it was due {late} ago)"
    elif woken.state == "held":
        yield "somebody else has it"
    elif woken.state == "gone":
        yield "is not there any more"
    else:
        yield f"could not be resumed: {message_of(woken.error) if woken.error is not None else ''}"
    if woken.again_at is not None:
        yield f"- tried again at {woken.again_at:%H:%M:%S} UTC"


def _how(result: RunResult) -> str:
    if result.status is RunStatus.SUSPENDED:
        return f"went on, and {'; '.join([waiting_for(one) for one in result.waits_for]) or 'is suspended'}"
    error = f": {one_line(message_of(result.error), SHOWN_CHARS)}" if result.error is not None else ""
    return f"{result.status.value}{error}"


def _late(due: datetime | None) -> str:
    """Return how long ago a run was due, where that is worth a word."""
    ago = timedelta() if due is None else datetime.now(UTC) - due
    return format_age(ago) if ago >= LATE else ""


def _json_of(woken: Woken) -> dict[str, object]:
    result, error = woken.result, woken.error
    if result is not None and error is None:
        error = result.error
    return {
        "run": woken.run,
        "agent": woken.agent_id,
        "state": woken.state,
        "due": woken.due and woken.due.isoformat(),
        "status": result and result.status.value,
        "waits_for": [] if result is None else [wait_of(one) for one in result.waits_for],
        "error": None if error is None else {"type": type(error).__name__, "message": message_of(error)},
        "again_at": woken.again_at and woken.again_at.isoformat(),
    }
