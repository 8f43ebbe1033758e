"""``DurableEngine``: runs that outlive their process, with the interface of ``Engine``."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Iterable, Mapping
from types import TracebackType
from typing import Any, Self

import attrs

from stepengine.data.definition import AgentDefinition, ToolSource
from stepengine.data.events import Event
from stepengine.data.questions import AnswerLike
from stepengine.data.state import RunResult
from stepengine.data.tools import ToolLike
from stepengine.durable.database import parse_database_url
from stepengine.durable.journals import export_run, find_divergence, fork_run, move_run, submit_unfinished_journal
from stepengine.durable.message_delivery import deliver_messages_until_cancelled
from stepengine.durable.operator import Operator
from stepengine.durable.process import WorkerProcess, WorkerSetting, compute_release_id
from stepengine.durable.rates import SharedRates
from stepengine.durable.records import follow_run
from stepengine.durable.run_results import ResultReader, refuse_child
from stepengine.durable.run_waits import Waiting
from stepengine.durable.shared_events import SharedEvents
from stepengine.durable.submission import (
    get_refused_options_and_rate_limits,
    make_submission,
    refuse_engine_options,
    refuse_unsupported_agents,
)
from stepengine.engine.engine import Engine
from stepengine.engine.event_loops import require_event_loop
from stepengine.engine.options import AgentLike, ModelsLike
from stepengine.engine.run import raise_at_step_limit
from stepengine.errors import DefinitionError, ReplayDivergence, StepEngineError
from stepengine.journal import Journal, JournalLike
from stepengine.runtime.rates import RateLimitsLike
from stepengine.workspace.after_fork import hold_references, register_for_fork_reset


class DurableEngine:
    """
    Runs agents on a database. This process or any other worker of the deployment executes a submitted run.

    ``async with DurableEngine(...) as engine`` connects and, unless it only submits, works; what is under way when it is
    closed is resumed by the next worker under the same executor id, or by whoever takes over.

    Args:
        agents: As for ``Engine``.
        tools: As for ``Engine``.
        models: As for ``Engine``.
        db: The PostgreSQL database's URL, or ``@FILE`` with it.
        on: An engine that was made already: its agents, tools, models and options are this one's, in place of those given here.
        works: Whether this process runs agents; without, it only submits, answers and looks.
        app: The deployment's name.
        pool: Which workers: runs that are submitted to a pool are run by workers of that pool.
        executor: This worker's own id: stable, and held by one process at a time; by default the host's name.
        release: The version of the agents, which a run keeps; by default a hash of definitions, tool specs, handlers and tools that yield.
        concurrency: How many runs this worker holds at once, those that wait for answers and children included; the runs of
            each depth count by themselves.
        global_concurrency: How many roots all workers of the pool hold at once, those of dead workers included until they are
            taken over; no bound by default.
        starts_per_minute: How many roots all workers of the pool begin within any 60 seconds; no bound by default. It limits
            starts of runs and not calls of models, which ``rate_limits`` of ``Engine`` does, here for all workers together.
        effects: How many effects it performs at once.
        depth: How deep run trees may be.
        polling: Seconds that the queue of roots rests after roots were taken from it; an idle worker looks more often.
        migrate: Whether missing tables are created, and those of DBOS updated, when it opens.
        allow_async_commit: Whether a database is fine that may lose commits in a power cut.
        engine: The other options of ``Engine``, but ``sessions``, ``interactor`` and ``headless``.

    Raises:
        DefinitionError: when an option cannot be used.
    """

    def __init__(
        self,
        agents: Iterable[AgentDefinition] = (),
        tools: Iterable[ToolLike | ToolSource] = (),
        models: ModelsLike = None,
        *,
        db: str,
        on: Engine | None = None,
        works: bool = True,
        app: str = "stepengine",
        pool: str = "default",
        executor: str | None = None,
        release: str | None = None,
        concurrency: int = 500,
        global_concurrency: int | None = None,
        starts_per_minute: int | None = None,
        effects: int = 32,
        depth: int = 4,
        polling: float = 1.0,
        migrate: bool = True,
        allow_async_commit: bool = False,
        **engine: Any,
    ) -> None:
        given = engine if on is None else get_refused_options_and_rate_limits(on)
        refuse_engine_options(given)
        if on is not None and (agents or tools or models is not None or engine):
            msg = "pass a DurableEngine either on=ENGINE, or agents, tools and models, but not both"
            raise DefinitionError(msg)
        self._engine = Engine(agents, tools, models, **engine) if on is None else on
        self._launcher = self._engine._launcher  # noqa: SLF001 - this is the same engine, on another ground
        refuse_unsupported_agents(self._launcher)
        setting = WorkerSetting(
            url=parse_database_url(db), app=app, pool=pool, concurrency=concurrency, global_concurrency=global_concurrency,
            starts_per_minute=starts_per_minute, effects=effects, depth=depth, polling=polling,
            migrate=migrate, allow_async_commit=allow_async_commit,
            **({} if executor is None else {"executor": executor}),
        )  # fmt: skip
        self.setting = attrs.evolve(
            setting,
            release=release or compute_release_id(self._launcher.catalog),
        )
        self._results = ResultReader(self._launcher, lambda: self.operator)
        self._works = works
        limits: RateLimitsLike = given.get("rate_limits")
        self._rates = None if limits is None or not works else SharedRates(limits, setting.url)
        if self._rates is not None:
            services = self._launcher.services
            self._launcher.services = attrs.evolve(services, models=attrs.evolve(services.models, rates=self._rates))
        self._process: WorkerProcess | None = None
        self._operator: Operator | None = None
        self._chores: list[asyncio.Task[None]] = []
        self._was_forked = False
        register_for_fork_reset(self)

    def reset_after_fork(self) -> None:
        """Drop the connections in a forked child, which does not have their threads. The parent's connections stay open."""
        self._was_forked = self._was_forked or self._operator is not None
        hold_references(self._operator, self._process, self._chores)
        self._operator = self._process = None
        self._chores = []

    @property
    def agents(self) -> tuple[AgentDefinition, ...]:
        """Every known agent definition."""
        return self._engine.agents

    @property
    def embedded_engine(self) -> Engine:
        """The engine with the same agents, which runs them without the database; only rate limits are shared through it."""
        return self._engine

    @property
    def release(self) -> str:
        """The version of the agents that this process runs, and submits for."""
        return self.setting.release

    @property
    def works(self) -> bool:
        """Whether this process runs agents, while it is open."""
        return self._works

    @property
    def is_open(self) -> bool:
        """Whether it is connected."""
        return self._operator is not None

    @property
    def live(self) -> int:
        """The number of root runs that this process executes, waiting ones included."""
        return 0 if self._process is None else sum(1 for run in self._process.runs if not run.order.path)

    def shared_events(self, run: str, *, tries: int = 0) -> SharedEvents:
        """Return the events of a root run for readers of this process, with the ids that they have in every process; close it."""
        return SharedEvents(self._launcher, self.operator, run, tries=tries)

    @property
    def operator(self) -> Operator:
        """The operator of runs, while the engine is open."""
        if self._operator is None and self._was_forked:
            msg = (
                "the engine was opened before this process was forked, and its connections and threads belong to the parent; create "
                "and open an engine in each process, after the fork"
            )
            raise StepEngineError(msg)
        if self._operator is None:
            msg = "the engine is not open: use `async with DurableEngine(...) as engine`, or await engine.open()"
            raise StepEngineError(msg)
        return self._operator

    async def open(self) -> Self:
        """
        Connect and start to work; once for each process, after a fork.

        Raises:
            DatabaseUnavailable: when the database cannot be reached.
            ExecutorBusy: when another process has the same executor id.
            StepEngineError: when the extra is not installed, when this process works for another engine, or when the event
                loop is not asyncio's.
        """
        require_event_loop("a DurableEngine")
        setting = self.setting
        if self._works:
            process = WorkerProcess(setting, self._launcher, self._rates)
            await process.open()
            self._process = process
        try:
            self._operator = await Operator.connect(setting.url, app=setting.app, pool=setting.pool)
        except BaseException:
            await self.aclose(drain=0)
            raise
        working = self._process
        if working is not None:
            working.set_database_clients(self._operator.deployment, self._operator.sessions)
            self._chores = [
                asyncio.create_task(self._operator.sessions.dispatch_turns_until_cancelled()),
                asyncio.create_task(deliver_messages_until_cancelled(self._operator.deployment, lambda: working.runs)),
            ]
        return self

    async def aclose(self, *, drain: float = 30.0) -> None:
        """Stop taking runs, wait up to *drain* seconds for running effects, and close all connections."""
        operator, self._operator = self._operator, None
        process, self._process = self._process, None
        chores, self._chores = self._chores, []
        for chore in chores:
            chore.cancel()
        if chores:
            await asyncio.wait(chores)
        try:
            if process is not None:
                await process.close(drain=drain)
        finally:
            if operator is not None:
                await operator.close()
            await self._engine.aclose()

    async def __aenter__(self) -> Self:
        return await self.open()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose(drain=0)

    # --- runs ---------------------------------------------------------------------------------------------------------

    async def submit(
        self,
        agent: AgentLike,
        prompt: str | None = "",
        *,
        id: str | None = None,
        priority: int = 0,
        release: str | None = None,
        seed: str | None = None,
        **options: Any,
    ) -> str:
        """
        Submit a run and return its id at once; it is checked here as ``Engine.run`` checks it.

        Args:
            agent: An agent's id, or its definition.
            prompt: What it should do; ``None`` and ``""`` both mean no prompt.
            id: Id of the run; the same id is the same run.
            priority: 1 is first, larger numbers later; 0 goes before all of them.
            release: Which release runs it; by default this engine's.
            seed: What its randomness depends on; drawn by default.
            options: ``params``, ``previous``, ``limits``, ``agent_models``, ``answers``, ``session_id``, ``user_id`` and
                ``metadata`` of ``RunOptions``. With ``session_id`` it is a turn: it starts after all earlier turns of the session, with
                the state after them. If its agent waits for an answer in the session, the prompt is that answer, and the result
                is that of the run which asked.

        Raises:
            AgentError: when there is no such agent, or its params do not fit.
            AnswerRejected: when the session waits for an answer, and this is not one.
            InputError: when an option cannot be used.
            UnknownModel: when the model names no provider.
            MissingKey: when there is no key for the model's provider.
        """
        submission = make_submission(self._launcher, agent, prompt, options)
        return await submission.send(
            self.operator, id=id, priority=priority, release=release or self.release, seed=seed
        )

    async def run(
        self,
        agent: AgentLike,
        prompt: str | None = "",
        *,
        id: str | None = None,
        priority: int = 0,
        release: str | None = None,
        seed: str | None = None,
        **options: Any,
    ) -> RunResult:
        """
        Run an agent to its end, on any worker, and return the result.

        If it waits for an answer, the result is ``suspended``, with the questions in ``pending_questions``.
        ``engine.resume(run, answers=...)`` continues it; ``result.journal`` is the run's id.

        Args:
            agent: An agent's id, or its definition.
            prompt: What it should do; ``None`` and ``""`` both mean no prompt.
            id: This and the next ones as for ``submit``.
            priority: See ``submit``.
            release: See ``submit``.
            seed: See ``submit``.
            options: See ``submit``.

        Raises:
            StepEngineError: as ``submit``, and ``LimitExceeded`` at the step limit with ``on_max_steps="raise"``.
        """
        submission = make_submission(self._launcher, agent, prompt, options)
        run = await submission.send(self.operator, id=id, priority=priority, release=release or self.release, seed=seed)
        try:
            result = await self.result(run)
        except asyncio.CancelledError:
            await self.operator.cancel(run)
            raise
        raise_at_step_limit(result, submission.plan.limits)
        return result

    def start(self, agent: AgentLike, prompt: str | None = "", **options: Any) -> DurableHandle:
        """Submit a run in the background of the running event loop, and return its handle; see ``submit``."""
        return DurableHandle(self, asyncio.ensure_future(self.submit(agent, prompt, **options)))

    async def stream(self, agent: AgentLike, prompt: str | None = "", **options: Any) -> AsyncGenerator[Event, None]:
        """
        Submit a run and yield its events, from any worker. The last one is ``RunFinished`` with the result.

        Leaving the iteration early, closing the generator, or cancelling the task that waits for the next event cancels the run.
        Errors are those of ``submit``.
        """
        run = await self.submit(agent, prompt, **options)
        async with contextlib.aclosing(self.events(run)) as events:
            try:
                async for event in events:
                    yield event
            except (GeneratorExit, asyncio.CancelledError):
                await self.cancel(run)
                raise

    def events(self, run: str) -> AsyncGenerator[Event, None]:
        """
        Yield the events of a run from its start, in whichever process it runs; closing the stream does not affect the run.

        They follow the record: there are none of parts of replies, and those of effects that run at once come as they end.

        Args:
            run: A root run's id.

        Raises:
            JournalError: when there is no such run.
            ReplayDivergence: when this engine's agents ask for something else than is recorded.
        """
        return follow_run(self._launcher, self.operator.deployment, run)

    async def result(self, run: str, *, waits: bool = False) -> RunResult:
        """
        Wait until a run ends or is suspended, and return its result.

        A suspended run waits for answers, for messages, or for times further than ``sleep_in_process`` of ``Engine``. Workers
        resume it when these come, even if no caller waits for the result.

        Args:
            run: A root run's id.
            waits: Whether to wait for the end even while the run is suspended; by default the result then has its open waits.

        Raises:
            DatabaseUnavailable: when the database is away for more than a minute.
            JournalError: when there is no such root run.
            ReplayDivergence: when it stopped because the code does something else than is recorded.
        """
        return await self._results.wait_for_result(run, waits=waits)

    async def answer(self, run: str, answers: Mapping[str, AnswerLike]) -> None:
        """Answer open questions of a run; see ``Operator.answer``."""
        await self.operator.answer(run, answers)

    async def send_message(self, run: str, topic: str, value: object, *, id: str | None = None, path: str = "") -> None:
        """Send a message to a running run; see ``Operator.send_message``."""
        await self.operator.send_message(run, topic, value, id=id, path=path)

    async def resume(self, run: str, *, answers: Mapping[str, AnswerLike] | None = None) -> RunResult:
        """
        Answer open questions of a run, and wait for its result; errors as ``answer`` and ``result``.

        A run that stopped without a result is not retried; ``Operator.retry`` does that.
        """
        refuse_child(run)
        if answers:
            await self.answer(run, answers)
        return await self._results.wait_for_next_result(run, frozenset(answers or ()))

    async def cancel(self, run: str) -> None:
        """Cancel a run and everything below it; see ``Operator.cancel``."""
        await self.operator.cancel(run)

    # --- journals -----------------------------------------------------------------------------------------------------

    async def export(self, run: str, into: JournalLike | None = None) -> Journal:
        """
        Return the record of a run as a journal: to replay, fork, compare, show, or resume elsewhere.

        The database keeps no requests, so the agents are driven over the recorded outcomes; nothing is performed.

        Args:
            run: A root run's id, whether it has ended or not.
            into: A journal that holds no run, or the path of its file; in memory by default.

        Raises:
            JournalError: when there is no such run, or *into* cannot be written or holds a run.
            ReplayDivergence: when this engine's agents ask for something else than is recorded.
        """
        return await export_run(self._launcher, self.operator.deployment, self._results, run, into)

    async def submit_journal(
        self, journal: JournalLike, *, release: str | None = None, trust: bool | None = None
    ) -> str:
        """
        Continue the run of an unfinished journal in the database, and return its id.

        Recorded effects are not repeated. The journal is not changed, and must not be resumed elsewhere.

        Args:
            journal: The journal of a run that was suspended, stopped, or cut off, or the path of its file.
            release: Which release resumes it; by default this engine's.
            trust: Whether the journal is this user's; if not, calls that only it asks for or approves are refused. ``None``: if
                the user's state folder knows it.

        Raises:
            JournalError: when the journal is damaged, holds no run, its run has ended, or the database has that run already;
                when it is refused.
        """
        return await submit_unfinished_journal(self.operator, journal, release=release or self.release, trust=trust)

    async def fork(
        self,
        run: str,
        *,
        at: int | str,
        edit: object = None,
        allow_repeat: bool = False,
        id: str | None = None,
        release: str | None = None,
    ) -> str:
        """
        Submit a run that continues another one from an effect, and return its id; the other one is not changed.

        Args:
            run: A root run's id, whether it has ended or not.
            at: The last effect to keep; this and the next two as for ``Engine.fork``.
            edit: Another outcome for it.
            allow_repeat: Go on although effects that are cut off have changed the world and may happen again.
            id: The new run's id; drawn by default.
            release: Which release resumes it; by default the one that *run* belongs to.

        Raises:
            InputError: when *id* cannot be used.
            JournalError: when there is no such run or effect, its outcome cannot be edited, or something would be repeated.
            ReplayDivergence: when this engine's agents ask for something else than is recorded.
        """
        return await fork_run(
            self._launcher,
            self.operator,
            self._results,
            run,
            at=at,
            edit=edit,
            allow_repeat=allow_repeat,
            id=id,
            release=release,
        )

    async def fits(self, run: str) -> ReplayDivergence | None:
        """
        Return the divergence of a run from this engine's agents; ``None`` if they can continue it.

        The record is replayed with these agents, and nothing is performed.

        Raises:
            JournalError: when there is no such root run.
        """
        return await find_divergence(self._launcher, self.operator.deployment, run)

    async def move(self, run: str) -> list[str]:
        """
        Move an unfinished tree of runs to this engine's release, and return the ids of its runs.

        It is interrupted where it is, and everything recorded stays; answers that wait for it are kept. What was under way
        happens again, or is in doubt, as after the death of a worker.

        Raises:
            JournalError: when there is no such root run, or it has ended.
            ReplayDivergence: when these agents ask for something else than is recorded; nothing was changed.
        """
        return await move_run(self._launcher, self.operator, run, release=self.release)


class DurableHandle:
    """
    A run that was submitted in the background.

    Args:
        engine: The engine.
        submitted: Gives its id.
    """

    def __init__(self, engine: DurableEngine, submitted: asyncio.Future[str]) -> None:
        self._engine = engine
        self._submitted = submitted

    async def id(self) -> str:
        """Return the run's id once it is in the database; raise if it could not be submitted."""
        return await asyncio.shield(self._submitted)

    async def result(self) -> RunResult:
        """Wait for the result of the run; open questions wait until they are answered."""
        return await self._engine.result(await self.id(), waits=True)

    async def questions(self) -> tuple[Waiting, ...]:
        """Return the open questions of the run."""
        return tuple(await self._engine.operator.list_questions(await self.id()))

    async def answer(self, question: str, answer: AnswerLike) -> None:
        """Answer one open question."""
        await self._engine.answer(await self.id(), {question: answer})

    async def send_input(self, text: str) -> None:
        """Send user input to the run; see ``Operator.send_input``."""
        await self._engine.operator.send_input(await self.id(), text)

    async def send_message(self, topic: str, value: object, *, id: str | None = None, path: str = "") -> None:
        """Send a message to the run; see ``Operator.send_message``."""
        await self._engine.send_message(await self.id(), topic, value, id=id, path=path)

    async def cancel(self) -> None:
        """Cancel it, and everything below it."""
        await self._engine.cancel(await self.id())
