"""``Engine``: creates runs from agent definitions."""

from __future__ import annotations

import os
import weakref
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping
from contextlib import AsyncExitStack, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Never, Self, TypeVar, Unpack, overload

from stepengine.data.definition import AgentDefinition
from stepengine.data.hooks import Hooks
from stepengine.data.json import thaw
from stepengine.data.limits import Limits
from stepengine.data.questions import validate_interactor
from stepengine.engine.event_loops import refuse_trio, require_event_loop
from stepengine.engine.options import (
    AgentLike,
    ForkOptions,
    ModelsLike,
    Overrides,
    RecordedForkOptions,
    ReplayOptions,
    ResumeOptions,
    RunOptions,
    SessionsLike,
    StartForkOptions,
    StartOptions,
    StartResumeOptions,
    validate_options,
)
from stepengine.errors import InputError
from stepengine.models.pricing import LIST_PRICES

if TYPE_CHECKING:
    import asyncio
    from types import TracebackType

    from stepengine.data.definition import ToolSource
    from stepengine.data.events import Event
    from stepengine.data.models import ModelRequest
    from stepengine.data.questions import Interactor
    from stepengine.data.state import AgentState, RunResult
    from stepengine.data.tools import ToolLike
    from stepengine.data.yields import StepResult
    from stepengine.engine.session_turns import EngineSessions
    from stepengine.engine.stepper import Stepper
    from stepengine.engine.tape import Tape
    from stepengine.journal import JournalLike
    from stepengine.journal.journaled_run import JournaledRun
    from stepengine.journal.recorded_forks import ForkReport, ForkTools, SharedBudget
    from stepengine.journal.recorded_part import AllowedDifferences
    from stepengine.models.files import Files
    from stepengine.permissions import Policy, PolicyFile, Rule
    from stepengine.runtime.clock import TimeSource
    from stepengine.runtime.handle import ResultMaker, RunHandle
    from stepengine.runtime.hub import ObserverLike
    from stepengine.runtime.prices import Pricing
    from stepengine.runtime.rates import RateLimitsLike
    from stepengine.runtime.retry import RetryPolicy
    from stepengine.runtime.tree import RunTree
    from stepengine.tools.context import ResourceMap
    from stepengine.workspace.workspace import Workspace

Out = TypeVar("Out")


class Engine:
    """
    Runs agents. Any number may run at once, in any number of event loops.

    Usable as a sync or async context manager; closing it ends background runs and gives back connections and threads.

    Args:
        agents: The agents that may be named by id; those that they may spawn are collected from them.
        tools: Tools that agents may list by name, and sources of tools such as ``mcp_tools(...)``, by theirs. They go before those
            of *workspace*.
        models: One ``Provider`` for every model string, a mapping from prefix to ``Provider``, a ``Models`` registry, or
            ``None`` for the real adapters with keys from the environment.
        hooks: Hooks of every agent, called before the agent's own.
        permissions: Which tool calls may run, need a person, or never run, in every agent of a tree: a ``Policy``, or a
            ``PolicyFile``, which also keeps what people allow for good; ``None`` allows all.
        limits: Limits of every run that does not set its own.
        observers: Functions or objects with ``on_event`` that are shown every event.
        interactor: Somebody who answers questions in process: an object with a method ``ask(question)``, plain or async,
            that returns a string, a bool or an ``Answer``, or ``None`` to leave the question open.
        headless: Whether nobody is there to permit a tool call, or to allow more than a limit that asks: what needs a person's
            approval is denied and the model is told, and a limit ends the run; a handler's ``Ask`` still suspends it. By default
            that holds for a ``run`` with neither interactor, journal nor session, which nobody could resume.
        dependency_overrides: Dependency factories of tools that replace others.
        pricing: What model replies cost; ``None`` switches it off.
        default_model: The model of agents that name none; by default the ``default_model`` of the one ``Provider`` that
            *models* is, if it has one.
        agent_models: Models in place of those that agents name, by agent id; that of ``""`` holds for all others. They are
            recorded with a run and hold for it again, unless there are other ones then. Models that a handler names in a
            yield stay.
        resources: Live objects for tools, such as ``[pool]``; ``ctx.resources.get(Pool)`` finds one by its type.
        workspace: Where agents work: a folder, or a ``Workspace``. It also gives each agent the bundled tools that it names, as far as
            ``Workspace(folder, write=True, shell=True, web=address)`` allows; a folder alone allows those that read and search.
        logger: Where log lines go; the standard logger ``stepengine`` by default.
        clock: Date, time and sleep: an object with ``now()``, ``now_ms()`` and ``sleep(seconds)``; see ``TimeSource``.
        retry: How failed model calls are tried again.
        rate_limits: What each provider may be asked, by all runs together: one ``RateLimit`` that holds for each provider
            by itself, or limits by provider prefix; none by default.
        sessions: Where conversations are kept between runs: ``FileSessions``, ``SqliteSessions``, ``MemorySessions``, or any
            object with ``get_history(id)`` and ``save_history(id, messages)``, plain or async. Plain methods of a store
            with ``blocking = True`` are called in a thread. Without a store every run stands for itself.
        child_sessions: Whether the conversations of children are kept, too, as sessions that name the one they began in.
        sleep_in_process: Seconds up to which a recorded run waits for a time in this process; for a longer one it is
            suspended when nothing else of it is at work, and `stepengine resume --due` or ``resume`` continues it. 60 by default; 0
            for never, ``math.inf`` for always. A run that is not recorded always waits here.

    Raises:
        DefinitionError: when ids or tool names are used twice or name nothing, or a hook, observer, interactor or
            limit cannot be used.
    """

    def __init__(
        self,
        agents: Iterable[AgentDefinition] = (),
        tools: Iterable[ToolLike | ToolSource] = (),
        models: ModelsLike = None,
        *,
        hooks: Hooks | None = None,
        permissions: Policy | PolicyFile | None = None,
        limits: Limits | None = None,
        observers: Iterable[ObserverLike] = (),
        interactor: Interactor | None = None,
        headless: bool | None = None,
        dependency_overrides: Overrides | None = None,
        pricing: Pricing | None = LIST_PRICES,
        default_model: str | None = None,
        agent_models: Mapping[str, str] | None = None,
        resources: ResourceMap | Iterable[object] = (),
        workspace: Workspace | Path | str | None = None,
        logger: object = None,
        clock: TimeSource | None = None,
        retry: RetryPolicy | None = None,
        rate_limits: RateLimitsLike = None,
        sessions: SessionsLike = None,
        child_sessions: bool = False,
        sleep_in_process: float = 60.0,
        **unknown: Never,
    ) -> None:
        arguments = locals()
        # Loaded with the first engine: whoever only names the class, to annotate or to define agents, waits for none of it.
        from stepengine.engine.catalog import Catalog
        from stepengine.engine.engine_arguments import (
            check_engine_arguments,
            make_engine_sessions,
            make_rate_limits,
            make_watcher,
        )
        from stepengine.engine.launcher import Launcher
        from stepengine.engine.loop_thread import LoopThread, close_threads
        from stepengine.engine.run_models import EngineModels
        from stepengine.machine import run_agent
        from stepengine.models.base import Provider
        from stepengine.models.registry import Models
        from stepengine.redaction import GIVEN
        from stepengine.runtime.clock import SystemClock
        from stepengine.runtime.logs import LOGGER
        from stepengine.runtime.retry import RetryPolicy
        from stepengine.runtime.services import ModelSetting, Services, TimeSetting, ToolSetting
        from stepengine.tools.context import ResourceMap
        from stepengine.workspace.threads import ThreadPool
        from stepengine.workspace.workspace import Workspace

        check_engine_arguments(arguments)
        GIVEN.add_from_environment(os.environ)
        registry, time = Models.from_value(models), clock or SystemClock()
        place = Workspace(Path(workspace)) if isinstance(workspace, str | Path) else workspace
        self._headless = headless
        self._threads = ThreadPool()
        setting = ToolSetting(
            threads=self._threads,
            overrides=dict(dependency_overrides or {}),
            workspace=place,
            resources=resources if isinstance(resources, ResourceMap) else ResourceMap(resources),
            guard=permissions.make_guard if permissions is not None and permissions.may_guard_calls else None,
        )
        catalog = Catalog(agents, tools, hooks or Hooks(), limits or Limits(), permissions=permissions, workspace=place)
        self._launcher = Launcher(
            catalog=catalog,
            models=EngineModels(
                registry=registry,
                keep_names=isinstance(models, Provider),
                default=default_model,
                by_agent=agent_models or {},
                has_pricing=pricing is not None,
            ),
            services=Services(
                machine=run_agent,
                models=ModelSetting(
                    registry=registry,
                    pricing=pricing,
                    retry=retry or RetryPolicy(),
                    rates=make_rate_limits(rate_limits, registry, time),
                ),
                tools=setting,
                time=TimeSetting(clock=time, sleep_in_process=sleep_in_process),
                interactor=validate_interactor(interactor, "Engine(interactor=...)"),
            ),
            watchers=tuple([make_watcher(o) for o in observers]),
            logger=LOGGER if logger is None else logger,
            headless=bool(headless),
            sessions=make_engine_sessions(sessions, children=child_sessions),
        )
        self._loop_thread = LoopThread()
        self._finalizer = weakref.finalize(self, close_threads, self._loop_thread, self._threads)

    def __repr__(self) -> str:
        return f"<Engine with {len(self.agents)} agents>"

    @property
    def agents(self) -> tuple[AgentDefinition, ...]:
        """Every known agent definition."""
        return self._launcher.catalog.definitions

    @property
    def sessions(self) -> EngineSessions | None:
        """The session store; ``None`` without one."""
        return self._launcher.sessions

    def agent(self, agent_id: str) -> AgentDefinition:
        """
        Return a definition by id; ``_`` counts as ``-``.

        Raises:
            AgentError: when no agent has that id.
        """
        return self._launcher.catalog.get_agent(agent_id).definition

    def add_observer(self, observer: ObserverLike) -> None:
        """
        Add an observer, which receives the events of all runs that start after this call.

        Args:
            observer: A function of an event, or an object with ``on_event``.
        """
        from stepengine.engine.engine_arguments import make_watcher

        self._launcher.watchers = (*self._launcher.watchers, make_watcher(observer))

    # --- runs ---------------------------------------------------------------------------------------------------------

    @overload
    async def run(
        self, agent: AgentDefinition[Out], prompt: str | None = ..., **options: Unpack[RunOptions]
    ) -> RunResult[Out]: ...
    @overload
    async def run(self, agent: str, prompt: str | None = ..., **options: Unpack[RunOptions]) -> RunResult: ...
    async def run(
        self, agent: str | AgentDefinition, prompt: str | None = "", **options: Unpack[RunOptions]
    ) -> RunResult:
        """
        Run an agent to its end and return the result; an error in the run is a result with status ``failed``.

        Args:
            agent: An agent's id, or its definition.
            prompt: What it should do; ``None`` and ``""`` both mean no prompt.
            options: See ``RunOptions``.

        Raises:
            AgentError: when there is no such agent.
            InputError: when prompt, params or metadata cannot be used; it lists every offending field.
            AnswerRejected: when an answer is not valid, or a suspended run cannot go on from ``previous`` alone.
            UnknownModel: when the model names no provider.
            MissingKey: when there is no key for the model's provider.
            SessionError: when the session cannot be loaded; nothing was run.
            LimitExceeded: at the step limit with ``on_max_steps="raise"``.
        """
        require_event_loop("run()", "run_sync()")
        live = self._launcher.create_requested_run(agent, prompt, validate_options("run", RunOptions, options))
        if self._headless is None:
            tree = live.tree
            has_way_back = live.journaled_run is not None or tree.root.plan.info.session_id is not None
            tree.questions.headless = tree.services.interactor is None and not has_way_back
        return await live()

    def stream(
        self, agent: str | AgentDefinition, prompt: str | None = "", **options: Unpack[RunOptions]
    ) -> AsyncGenerator[Event, None]:
        """
        Run an agent and yield its events. The last one is ``RunFinished`` with the result.

        Leaving the iteration early, or closing the generator, cancels the run. Arguments and errors are those of ``run``.
        """
        from stepengine.engine.run import stream_run

        refuse_trio("stream()", "run_sync()")
        live = self._launcher.create_requested_run(agent, prompt, validate_options("run", RunOptions, options))
        events = stream_run(live)
        if live.journaled_run is not None:
            weakref.finalize(events, live.close_journal_if_unstarted)
        return events

    @overload
    def start(
        self, agent: AgentDefinition[Out], prompt: str | None = ..., **options: Unpack[StartOptions]
    ) -> RunHandle[Out]: ...
    @overload
    def start(self, agent: str, prompt: str | None = ..., **options: Unpack[StartOptions]) -> RunHandle: ...
    def start(self, agent: AgentLike, prompt: str | None = "", **options: Unpack[StartOptions]) -> RunHandle:
        """
        Start a run in the background of the running event loop and return its handle; ``async with`` ends it on exit.

        Its events are kept from the first one on, so that nobody has to be there in time to see them.

        Args:
            agent: An agent's id, or its definition.
            prompt: What it should do; ``None`` and ``""`` both mean no prompt.
            options: See ``StartOptions``.

        Raises:
            StepEngineError: when no event loop runs here; for the rest, see ``run``.
        """
        require_event_loop("start()", "run_sync()")
        asked = validate_options("start", StartOptions, options)
        keeps_open = asked.pop("keep_open", False)
        default = None if self._launcher.sessions is None and asked.get("journal") is None else 0.0
        patience = asked.pop("wait_for_answers", default)
        if keeps_open and asked.get("journal") is not None:
            msg = (
                "a journal holds one run, but a handle with keep_open starts a run for each turn. With "
                "Engine(sessions=...) each turn gets its own journal"
            )
            raise InputError(msg, issues=("journal cannot be combined with keep_open",))
        first = dict(asked)
        asked.pop("run_id", None)  # which no other turn may have
        live = self._launcher.create_requested_run(agent, prompt, first)
        live.tree.questions.patience = patience

        def create_next_turn(last: RunResult, text: str) -> tuple[RunTree, ResultMaker]:
            following = {**asked, "answers": None, "session_id": handle.session_id}
            following["previous"] = None if self._launcher.sessions is not None else last.state
            known = self._launcher.create_requested_run(agent, text, following, hub=live.tree.hub)
            known.tree.questions.patience = patience
            known.handle = handle
            return known.tree, known

        handle = self._launcher.runs.start_in_background(live, create_next_turn if keeps_open else None)
        return handle

    async def step(self, state: AgentState, agent: str | AgentDefinition | None = None) -> StepResult:
        """
        Run a single step from *state* and return the new state and whether the turn ended.

        One model call and the tools it asks for: no handler, no prompt, no instructions, no hooks around a run.

        Args:
            state: A state, such as ``AgentState.from_messages(...)`` or one from an earlier step.
            agent: The agent; by default the one that the state names.

        Raises:
            InputError: when *state* is no ``AgentState``.
            StepEngineError: what kept the step from ending, such as the ``ModelError``.
        """
        from stepengine.engine.launcher import ONE_STEP, StepRun, require_agent_state
        from stepengine.engine.run_plans import RunRequest

        require_event_loop("step()", "step_sync()")
        require_agent_state(state)
        found = self._launcher.catalog.get_agent(state.agent_id if agent is None else agent)
        step = StepRun(found, state)
        planned = self._launcher.plan_root_run(RunRequest(agent=step.agent, limits=ONE_STEP))
        live = self._launcher.create_planned_run(planned, prepare=step.with_caller_state)
        return step.make_step_result(await live.run())

    @overload
    def run_sync(
        self, agent: AgentDefinition[Out], prompt: str | None = ..., **options: Unpack[RunOptions]
    ) -> RunResult[Out]: ...
    @overload
    def run_sync(self, agent: str, prompt: str | None = ..., **options: Unpack[RunOptions]) -> RunResult: ...
    def run_sync(
        self, agent: str | AgentDefinition, prompt: str | None = "", **options: Unpack[RunOptions]
    ) -> RunResult:
        """
        Call ``run`` from synchronous code, also inside a running event loop; Ctrl-C cancels the run and waits.

        All sync calls of an engine share one event loop in a thread of its own.
        """
        return self._loop_thread.run(lambda: self.run(agent, prompt, **options))

    def step_sync(self, state: AgentState, agent: str | AgentDefinition | None = None) -> StepResult:
        """Call ``step`` from synchronous code."""
        return self._loop_thread.run(lambda: self.step(state, agent))

    # --- journals -----------------------------------------------------------------------------------------------------

    async def resume(self, journal: JournalLike, **options: Unpack[ResumeOptions]) -> RunResult:
        """
        Resume a run that was suspended, or that an interrupt or a crash ended, in this process or another one.

        What is recorded is not done again. A run that has ended gives its result again, and nothing is performed.

        With ``on_divergence="extend"`` a run whose agent was edited is recorded anew from the first difference on, also one that
        has ended. The journal is replaced when the run has ended or waits for an answer, and stays as it is when the run
        fails. The old one is kept as ``run.before-1.jsonl``, or in an SQLite file as the run ``RUN-before-1``.

        Args:
            journal: The journal, or the path of its file.
            options: See ``ResumeOptions``.

        Raises:
            AgentError: when the engine has no agent of the recorded id.
            AnswerRejected: when an answer fits no open question, or was given before; nothing is changed.
            JournalError: when the journal is locked, damaged, of a newer version, holds no run, or cannot be written; when
                something that changed the world would be repeated.
            MissingKey: when the run goes on and there is no key for its model.
            ReplayDivergence: when the handler does something else than is recorded.
        """
        require_event_loop("resume()", "resume_sync()")
        from stepengine.journal import runs

        asked = validate_options("resume", ResumeOptions, options)
        launch = partial(self._run_recorded, **_pop_launch_options(asked))
        return await runs.resume(journal, launch, **asked)

    async def replay(self, journal: JournalLike, **options: Unpack[ReplayOptions]) -> RunResult:
        """
        Repeat a recorded run; nothing is performed, so no model, no tool, no network and no key is needed.

        With ``live={"tool_call"}`` tools really run, and must come to the recorded results. With ``live={"model_call"}`` models
        answer anew against the recorded results of tools.

        The result's journal is what the replay would have recorded: that of an unchanged agent is equal byte for byte.

        Args:
            journal: The journal, or the path of its file; it is only read.
            options: See ``ReplayOptions``.

        Raises:
            AgentError: when the engine has no agent of the recorded id.
            JournalError: when the journal is damaged, of a newer version, or holds no run.
            ReplayDivergence: at the first effect that is not what was recorded; it names step, file, line and fields.
        """
        require_event_loop("replay()", "replay_sync()")
        from stepengine.journal import runs

        asked = validate_options("replay", ReplayOptions, options)
        return await runs.replay(journal, partial(self._run_recorded, **_pop_launch_options(asked)), **asked)

    @overload
    async def fork(
        self, journal: JournalLike, *, tools: ForkTools, **options: Unpack[RecordedForkOptions]
    ) -> ForkReport: ...
    @overload
    async def fork(self, journal: JournalLike, **options: Unpack[ForkOptions]) -> RunResult: ...
    async def fork(self, journal: JournalLike, **options: Any) -> RunResult | ForkReport:
        """
        Copy a recorded run up to an effect into a new journal, and continue from there. The result names the journal.

        Without ``tools=`` everything after the place ``at=`` happens.

        With ``tools=`` models are asked after the place, by default the first difference, and the record answers tools. A call
        is answered by an equal recorded one, by ``simulate=``, by the tool itself where ``tools=`` permits it, or not at all:
        then the run ends there, and ``refused`` of the ``ForkReport`` names the call. Questions have their recorded answers,
        or suspend the run.

        Args:
            journal: The journal, or the path of its file; it is only read.
            tools: Which calls are performed that nothing else answers: ``"recorded"`` for none, ``"idempotent"`` for those of
                tools that are ``idempotent`` or ``read_only`` and of ``Perform.idempotent``, ``"working-copy"`` for all, where
                tools work on something that may be thrown away.
            options: See ``ForkOptions``; with ``tools=`` see ``RecordedForkOptions``.

        Raises:
            AgentError: when the engine has no agent of the recorded id.
            InputError: when neither ``at=`` nor ``tools=`` is given.
            JournalError: when there is no such effect, it has no result, its outcome cannot be edited, or something that
                changed the world would be repeated; when *simulate* fails.
            MissingKey: when there is no key for the model.
            ReplayDivergence: when the kept part does not fit the code.
        """
        require_event_loop("fork()", "fork_sync()")
        from stepengine.journal import as_journal, runs

        if "tools" in options:
            from stepengine.journal.recorded_forks import fork_from_record

            tools: ForkTools = options.pop("tools")
            asked = validate_options("fork", RecordedForkOptions, options)
            launch = partial(self._run_recorded, **_pop_launch_options(asked))
            return await fork_from_record(journal, launch, tools=tools, **asked)
        asked = validate_options("fork", ForkOptions, options)
        source = as_journal(journal)
        launch = partial(self._run_recorded, **_pop_launch_options(asked), forked=source)
        return await runs.fork(source, launch, now=self._launcher.services.time.clock.now(), **asked)

    async def start_resume(self, journal: JournalLike, **options: Unpack[StartResumeOptions]) -> RunHandle:
        """
        Resume a recorded run in the background and return its handle; arguments and errors are those of ``resume``.

        What is recorded shows no events. A divergence is raised by ``handle.result()``. ``wait_for_answers=`` says how long its
        questions stay open for ``handle.answer``.
        """
        from stepengine.engine.handles import BackgroundLaunch

        require_event_loop("start_resume()", "resume_sync()")
        from stepengine.journal import runs

        asked = validate_options("start_resume", StartResumeOptions, options)
        other = _pop_launch_options(asked)
        patience = asked.pop("wait_for_answers", 0.0)
        raises = asked.get("on_divergence", "raise") == "raise"
        create_run = partial(self._launcher.create_run_from_record, **other)
        launch = BackgroundLaunch(self._launcher.runs, create_run, raises=raises, patience=patience)
        return await launch.start_and_get_handle(runs.resume(journal, launch, **asked))

    async def start_fork(self, journal: JournalLike, **options: Unpack[StartForkOptions]) -> RunHandle:
        """
        Fork a recorded run in the background and return its handle; arguments and errors are those of ``fork`` without ``tools=``.

        ``wait_for_answers=`` says how long its questions stay open for ``handle.answer``.
        """
        from stepengine.engine.handles import BackgroundLaunch

        require_event_loop("start_fork()", "fork_sync()")
        from stepengine.journal import as_journal, runs

        asked = validate_options("start_fork", StartForkOptions, options)
        source = as_journal(journal)
        other = _pop_launch_options(asked)
        patience = asked.pop("wait_for_answers", 0.0)
        create_run = partial(self._launcher.create_run_from_record, **other, forked=source)
        launch = BackgroundLaunch(self._launcher.runs, create_run, raises=True, patience=patience)
        return await launch.start_and_get_handle(
            runs.fork(source, launch, now=self._launcher.services.time.clock.now(), **asked)
        )

    def resume_sync(self, journal: JournalLike, **options: Unpack[ResumeOptions]) -> RunResult:
        """Call ``resume`` from synchronous code."""
        return self._loop_thread.run(lambda: self.resume(journal, **options))

    def replay_sync(self, journal: JournalLike, **options: Unpack[ReplayOptions]) -> RunResult:
        """Call ``replay`` from synchronous code."""
        return self._loop_thread.run(lambda: self.replay(journal, **options))

    @overload
    def fork_sync(
        self, journal: JournalLike, *, tools: ForkTools, **options: Unpack[RecordedForkOptions]
    ) -> ForkReport: ...
    @overload
    def fork_sync(self, journal: JournalLike, **options: Unpack[ForkOptions]) -> RunResult: ...
    def fork_sync(self, journal: JournalLike, **options: Any) -> RunResult | ForkReport:
        """Call ``fork`` from synchronous code."""
        forked: RunResult | ForkReport = self._loop_thread.run(lambda: self.fork(journal, **options))
        return forked

    async def _run_recorded(self, session: JournaledRun, **changes: Any) -> RunResult:
        """Run the session of a recorded run to its end; *changes* are those of ``Launcher.create_run_from_record``."""
        return await self._launcher.create_run_from_record(session, **changes)()

    def stepper(
        self, journal: JournalLike | Tape, *, agent: AgentLike | None = None, leeway: AllowedDifferences | None = None
    ) -> Stepper:
        """
        Return a ``Stepper``, which replays a recorded run one result at a time, without loop or threads; close it when done.

        Args:
            journal: The journal, or the path of its file; it is read once, and only read. A ``Tape`` is one that was read before.
            agent: Id or definition of the agent; by default the engine's agent that the journal names.
            leeway: What the run may do differently; by default nothing.

        Raises:
            AgentError: when the engine has no agent of the recorded id.
            JournalError: when the journal is damaged, of a newer version, or holds no run.
            ReplayDivergence: when the run begins with something else than is recorded.
        """
        from stepengine.engine.stepper import Stepper
        from stepengine.engine.tape import Tape
        from stepengine.journal import as_journal
        from stepengine.journal.recorded_part import NO_LEEWAY

        tape = journal if isinstance(journal, Tape) else Tape(as_journal(journal))
        return Stepper(self._launcher, tape, agent, leeway=leeway or NO_LEEWAY)

    async def send_message(
        self, run: RunHandle | JournalLike, topic: str, value: object, *, id: str | None = None, path: str = ""
    ) -> bool:
        """
        Send a message to a run, for its next ``Receive`` on that topic; return False if *id* was sent before.

        It is on the disk when this returns, in the mailbox beside the journal, whoever holds the run. One that sleeps and waits
        for it is due at once for `stepengine resume --due`; one that is under way, here or elsewhere, gets it within moments.

        Args:
            run: A handle, the id of a run (or session) that is under way in this engine, or a journal or the path of its file.
            topic: The topic.
            value: What it says, JSON of at most 1 MiB.
            id: Its id; a second message with the same id is none. By default it has one of its own.
            path: The path of the run that it is for, where that is a child.

        Returns:
            Whether it is new: ``False`` when it was sent before.

        Raises:
            BadYield: for what is not a topic.
            DataError: for what is not JSON.
            InputError: when it is too long, or another message has its id.
            JournalMissing: when there is no such run.
            JournalError: when it cannot be kept.
            StepEngineError: when the run has ended, or the child at *path*, or there is none; or when no event loop runs here.
        """
        require_event_loop("send_message()", "send_message_sync()")
        from stepengine.engine.run_messages import send_message

        return await send_message(self._launcher.runs, run, topic, value, id=id, path=path)

    def send_message_sync(
        self, run: RunHandle | JournalLike, topic: str, value: object, *, id: str | None = None, path: str = ""
    ) -> bool:
        """Send a message as ``send_message`` does, from synchronous code."""
        return self._loop_thread.run(lambda: self.send_message(run, topic, value, id=id, path=path))

    # --- beside runs --------------------------------------------------------------------------------------------------

    async def count_tokens(self, request: ModelRequest) -> int:
        """
        Return the number of tokens of *request*, counted by its provider if possible, else estimated.

        Asking may be a network request, which no limit and no price covers.

        Raises:
            ModelError: when there is no such model, or its provider failed.
        """
        from stepengine.runtime.sizes import estimate_request_tokens

        provider = (self._launcher.override.models or self._launcher.models.registry).provider_for(request.model)
        count = getattr(provider, "count_tokens", None)
        counted = None if count is None else await count(request)
        return estimate_request_tokens(request) if counted is None else counted

    @property
    def files(self) -> Files:
        """The files at providers: uploads and deletions."""
        from stepengine.models.files import Files

        return Files(lambda: self._launcher.override.models or self._launcher.models.registry)

    def list_rules(self, session_id: str) -> tuple[Rule, ...]:
        """
        Return the rules that people set in a conversation with ``Answer(remember=...)`` since the engine was created.

        The engine keeps these rules in its memory, of the last 10,000 conversations: another process asks again, unless they
        stand in a ``PolicyFile``.
        """
        from stepengine.permissions import Policy

        return Policy.from_json({"rules": thaw(self._launcher.rules.get_rules_as_json(session_id))}).rules

    def remove_rules(self, session_id: str, *ids: str) -> None:
        """Remove the rules that people set in a conversation: those with these ids, or all without ids."""
        self._launcher.remove_rules(session_id, ids)

    @contextmanager
    def override(
        self,
        *,
        models: ModelsLike = None,
        dependency_overrides: Overrides | None = None,
        budget: SharedBudget | None = None,
    ) -> Iterator[Self]:
        """
        Replace models or dependencies for the runs that this context starts, such as in a test.

        Overrides of concurrent tasks do not meet; nested ones add up.

        Args:
            models: As in ``Engine(models=...)``; by default ``None``, which keeps them.
            dependency_overrides: Factories by the dependency that each replaces; by default ``None``.
            budget: US dollars that all these runs share, besides their own limits; by default ``None``, no bound.
        """
        with self._launcher.override_in_context(models, dependency_overrides, budget):
            yield self

    # --- by id --------------------------------------------------------------------------------------------------------

    def get(self, run: str) -> RunHandle | None:
        """
        Return the handle of a session or run in this process, also an idle one; ``None`` if there is none.

        Args:
            run: A session's id, or that of a run. Of several handles in a session it is the one that was made first.
        """
        return next(iter(self._launcher.runs.find_by_id(run)[0]), None)

    def is_running(self, run: str) -> bool:
        """Return whether a session or run with this id exists in this process, running or idle."""
        return any(self._launcher.runs.find_by_id(run))

    def active(self) -> tuple[str, ...]:
        """Return the ids of the sessions that are running or idle here, and of runs without a session."""
        return self._launcher.runs.list_ids()

    async def shutdown(self, run: str) -> bool:
        """End the session or run with this id in this process, and wait; return whether there was one."""
        return await self._launcher.runs.shutdown(run)

    async def shutdown_all(self) -> None:
        """End all runs, and wait for them. The engine stays open; ``aclose`` also closes connections and threads."""
        await self._launcher.runs.shutdown()

    # --- the end ----------------------------------------------------------------------------

    async def aclose(self) -> None:
        """
        End all runs, wait for them, and release connections and threads. The engine stays usable.

        Runs that have not ended after ten seconds, or whose event loop stands still, are named in a ``ResourceWarning``.
        """
        import asyncio

        from stepengine.engine.run import stop_runs_and_wait, warn_of_abandoned_runs

        if _find_running_loop() is None:  # under trio, where nothing of this engine runs in the loop that waits
            self.close()
            return
        runs = self._launcher.runs
        forgotten = runs.list_runs_with_unused_handles()
        runs.request_shutdown()
        left = await stop_runs_and_wait(runs.active)
        # The last one is called first. All are called even if one fails.
        async with AsyncExitStack() as stack:
            stack.callback(self._threads.close)
            stack.push_async_callback(self._launcher.models.registry.close)
            if self._loop_thread.is_running:
                stack.push_async_callback(asyncio.to_thread, self._loop_thread.close)
            await self._close_sources()
        warn_of_abandoned_runs(forgotten, left)

    def close(self) -> None:
        """Close the engine from synchronous code. Runs in the caller's event loop are stopped but not awaited."""
        from stepengine.engine.run import stop_runs_and_wait, warn_of_abandoned_runs

        runs = self._launcher.runs
        forgotten = runs.list_runs_with_unused_handles()
        runs.request_shutdown()
        here = _find_running_loop()
        left = self._loop_thread.run(lambda: stop_runs_and_wait(runs.active, here))
        with ExitStack() as stack:
            stack.callback(self._threads.close)
            stack.callback(self._loop_thread.close)
            stack.callback(self._loop_thread.run, self._launcher.models.registry.close)
            self._loop_thread.run(lambda: self._close_sources(here))
        warn_of_abandoned_runs(forgotten, left)

    async def _close_sources(self, blocked: asyncio.AbstractEventLoop | None = None) -> None:
        """Close all tool sources in every event loop but *blocked*, even if one of them fails."""
        async with AsyncExitStack() as stack:
            for source in self._launcher.catalog.sources:
                stack.push_async_callback(source.aclose, blocked)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _find_running_loop() -> asyncio.AbstractEventLoop | None:
    """Return the event loop that runs in this thread, if one does."""
    import asyncio

    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def _pop_launch_options(options: dict[str, Any]) -> dict[str, Any]:
    """Remove the options of ``Launcher.create_run_from_record`` from *options* and return them; the others are the journal's."""
    return {name: options.pop(name) for name in ("agent", "limits", "agent_models") if name in options}
