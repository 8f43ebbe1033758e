"""``Engine``: what turns agent definitions into runs."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import datetime
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeAlias, TypeVar, Unpack, overload

import attrs

from stepengine.data.definition import AgentDefinition
from stepengine.data.events import Event
from stepengine.data.hooks import Hooks
from stepengine.data.limits import Limits
from stepengine.data.models import ModelRequest
from stepengine.data.outcomes import Stop
from stepengine.data.questions import Interactor
from stepengine.data.run import RunResult
from stepengine.data.state import AgentState
from stepengine.data.tools import ToolLike
from stepengine.data.yields import StepResult
from stepengine.engine.catalog import Catalog
from stepengine.engine.live import LiveRun, failing, streamed, warn_of
from stepengine.engine.options import ModelsLike, Override, Overrides, RunOptions, overrides, rates_of, watcher_of
from stepengine.engine.planning import Planner, Request, with_prompt
from stepengine.engine.portal import LoopThread, give_back
from stepengine.engine.single import ONE_STEP, StepRun
from stepengine.errors import StepEngineError
from stepengine.machine import RunPlan, run_agent
from stepengine.models import Models, Provider
from stepengine.models.pricing import cost_of
from stepengine.runtime.calls import Pricing
from stepengine.runtime.clock import Clock, SystemClock
from stepengine.runtime.handle import RunHandle
from stepengine.runtime.hub import Hub, ObserverLike
from stepengine.runtime.logs import LOGGER
from stepengine.runtime.rates import RateLimitsLike
from stepengine.runtime.retry import RetryPolicy
from stepengine.runtime.sizes import estimated_tokens
from stepengine.runtime.toolcalls import ToolSetting
from stepengine.runtime.tree import Machine, Services, Tree
from stepengine.tools.context import ResourceMap, Workspace
from stepengine.tools.threads import ThreadPool

__all__ = ("Engine",)

Out = TypeVar("Out")
Prepare: TypeAlias = Callable[[RunPlan, AgentState], tuple[RunPlan, AgentState]]
Wrap: TypeAlias = Callable[[Services], Services]


class Engine:
    """
    Runs agents. An engine holds no state of runs: any number may run at once, in any number of event loops.

    Usable as a sync or async context manager; closing it ends background runs and gives back connections and threads.

    Args:
        agents: The agents that may be named by id; those that they may spawn are collected from them.
        tools: Tools that agents may list by name.
        models: One ``Provider`` for every model string, a mapping from prefix to ``Provider``, a ``Models`` registry, or
            ``None`` for the real adapters with keys from the environment.
        hooks: Hooks of every agent, called before the agent's own.
        limits: Limits of every run that does not set its own.
        observers: Functions or objects with ``on_event`` that are shown every event.
        interactor: Somebody who answers questions in process.
        dependency_overrides: Dependency factories of tools that replace others.
        pricing: What model replies cost; ``None`` switches it off.
        default_model: The model of agents that name none.
        resources: Live objects for tools, by type.
        workspace: Where agents work: a folder, or a ``Workspace``.
        logger: Where log lines go; the standard logger ``stepengine`` by default.
        clock: Time and sleep.
        retry: How failed model calls are tried again.
        rate_limits: What each provider may be asked, by all runs together: one ``RateLimit`` that holds for each provider
            by itself, or limits by provider prefix; none by default.

    Raises:
        DefinitionError: when ids or tool names are used twice or name nothing, or a hook, observer or limit cannot be used.
    """

    def __init__(
        self,
        agents: Iterable[AgentDefinition[Any]] = (),
        tools: Iterable[ToolLike] = (),
        models: ModelsLike = None,
        *,
        hooks: Hooks | None = None,
        limits: Limits | None = None,
        observers: Iterable[ObserverLike] = (),
        interactor: Interactor | None = None,
        dependency_overrides: Overrides | None = None,
        pricing: Pricing | None = cost_of,
        default_model: str | None = None,
        resources: ResourceMap | Iterable[Any] = (),
        workspace: Workspace | Path | str | None = None,
        logger: Any = None,
        clock: Clock | None = None,
        retry: RetryPolicy | None = None,
        rate_limits: RateLimitsLike = None,
    ) -> None:
        self._catalog = Catalog(agents, tools, hooks or Hooks(), limits or Limits())
        self._models = Models.of(models)
        self._keep_names = isinstance(models, Provider)
        self._watchers = tuple([watcher_of(o) for o in observers])
        self._interactor = interactor
        self._pricing = pricing
        self._default_model = default_model
        self._logger = LOGGER if logger is None else logger
        self._clock = clock or SystemClock()
        self._retry = retry or RetryPolicy()
        self._rates = rates_of(rate_limits, self._models, self._clock)
        self._threads = ThreadPool()
        self._setting = ToolSetting(
            threads=self._threads,
            overrides=dict(dependency_overrides or {}),
            workspace=Workspace(Path(workspace)) if isinstance(workspace, str | Path) else workspace,
            resources=resources if isinstance(resources, ResourceMap) else ResourceMap(resources),
        )
        self._windows: weakref.WeakKeyDictionary[Models, dict[str, int | None]] = weakref.WeakKeyDictionary()
        self._active: set[LiveRun] = set()
        self._handles: weakref.WeakSet[RunHandle[Any]] = weakref.WeakSet()
        self._loop_thread = LoopThread()
        self._finalizer = weakref.finalize(self, give_back, self._loop_thread, self._threads)

    def __repr__(self) -> str:
        return f"<Engine with {len(self.agents)} agents>"

    @property
    def agents(self) -> tuple[AgentDefinition[Any], ...]:
        """Every known agent definition."""
        return self._catalog.definitions

    def agent(self, agent_id: str) -> AgentDefinition[Any]:
        """
        Return a definition by id; ``_`` counts as ``-``.

        Raises:
            AgentError: when no agent has that id.
        """
        return self._catalog.find(agent_id).definition

    # --- runs ---------------------------------------------------------------------------------------------------------

    @overload
    async def run(
        self, agent: AgentDefinition[Out], prompt: str = ..., **options: Unpack[RunOptions]
    ) -> RunResult[Out]: ...
    @overload
    async def run(self, agent: str, prompt: str = ..., **options: Unpack[RunOptions]) -> RunResult[Any]: ...
    async def run(
        self, agent: str | AgentDefinition[Any], prompt: str = "", **options: Unpack[RunOptions]
    ) -> RunResult[Any]:
        """
        Run an agent to its end and return the result; what fails inside is a result with status ``failed``.

        Args:
            agent: An agent's id, or its definition.
            prompt: What it should do.
            options: See ``RunOptions``.

        Raises:
            AgentError: when there is no such agent.
            InputError: when prompt, params or metadata cannot be used; it lists every offending field.
            UnknownModel: when the model names no provider.
            MissingKey: when there is no key for the model's provider.
            LimitExceeded: at the step limit with ``on_max_steps="raise"``.
        """
        return await self._begin(agent, prompt, **options)()

    def stream(
        self, agent: str | AgentDefinition[Any], prompt: str = "", **options: Unpack[RunOptions]
    ) -> AsyncGenerator[Event, None]:
        """
        Run an agent and give its events; the last one is ``RunFinished`` with the result.

        Leaving the iteration early, or closing the generator, cancels the run. Arguments and errors are those of ``run``.
        """
        return streamed(self._begin(agent, prompt, **options))

    @overload
    def start(
        self, agent: AgentDefinition[Out], prompt: str = ..., **options: Unpack[RunOptions]
    ) -> RunHandle[Out]: ...
    @overload
    def start(self, agent: str, prompt: str = ..., **options: Unpack[RunOptions]) -> RunHandle[Any]: ...
    def start(
        self, agent: str | AgentDefinition[Any], prompt: str = "", **options: Unpack[RunOptions]
    ) -> RunHandle[Any]:
        """
        Start a run in the background of the running event loop and return its handle; ``async with`` ends it on exit.

        Arguments and errors are those of ``run``.
        """
        live = self._begin(agent, prompt, **options)
        live.tree.hub.followed = True
        handle: RunHandle[Any] = RunHandle(live.tree, live)
        self._handles.add(handle)
        return handle

    async def step(self, state: AgentState, agent: str | AgentDefinition[Any] | None = None) -> StepResult:
        """
        Run a single step from *state* and return the new state and whether the turn ended (requirements D8).

        One model call and the tools it asks for: no handler, no prompt, no instructions, no hooks around a run.

        Args:
            state: A state, such as ``AgentState.from_messages(...)`` or one from an earlier step.
            agent: The agent; by default the one that the state names.

        Raises:
            StepEngineError: what kept the step from ending, such as the ``ModelError``.
        """
        found = self._catalog.find(state.agent_id if agent is None else agent)
        single = StepRun(found, state)
        live = self._begin_request(Request(agent=single.agent, limits=ONE_STEP), prepare=single.start)
        return single.result(await live.run())

    @overload
    def run_sync(
        self, agent: AgentDefinition[Out], prompt: str = ..., **options: Unpack[RunOptions]
    ) -> RunResult[Out]: ...
    @overload
    def run_sync(self, agent: str, prompt: str = ..., **options: Unpack[RunOptions]) -> RunResult[Any]: ...
    def run_sync(
        self, agent: str | AgentDefinition[Any], prompt: str = "", **options: Unpack[RunOptions]
    ) -> RunResult[Any]:
        """
        Do what ``run`` does for synchronous code, also inside a running event loop; Ctrl-C cancels the run and waits.

        All sync calls of an engine share one event loop in a thread of its own.
        """
        return self._loop_thread.run(lambda: self.run(agent, prompt, **options))

    def step_sync(self, state: AgentState, agent: str | AgentDefinition[Any] | None = None) -> StepResult:
        """Do what ``step`` does for synchronous code."""
        return self._loop_thread.run(lambda: self.step(state, agent))

    async def count_tokens(self, request: ModelRequest) -> int:
        """
        Return how many tokens *request* has: what its provider counts when it can be asked, else an estimate.

        Asking may be a network request, which no limit and no price covers (requirements I1, ecosystem EC75).

        Raises:
            ModelError: when there is no such model, or its provider failed.
        """
        provider = (self._override.models or self._models).provider_for(request.model)
        count = getattr(provider, "count_tokens", None)
        counted = None if count is None else await count(request)
        return estimated_tokens(request) if counted is None else counted

    def _begin(self, agent: str | AgentDefinition[Any], prompt: str, **options: Unpack[RunOptions]) -> LiveRun:
        return self._begin_request(Request(agent=self._catalog.find(agent), prompt=prompt, **options))

    def _begin_request(
        self,
        request: Request,
        *,
        prepare: Prepare | None = None,
        wrap: Wrap | None = None,
        seed: str | None = None,
        created: datetime | None = None,
    ) -> LiveRun:
        """
        Return a run that is ready to start.

        Args:
            request: What the caller asks for.
            prepare: Gives the plan and the state that the root is really started with.
            wrap: Gives the services that the run is really lent: with recorders among the ``middlewares``, inside the
                meter of limits and outside the gate; with tracers ``outermost``; with another ``clock`` or ``machine``.
            seed: The seed of a recorded run; drawn by default.
            created: When a recorded run was created (UTC); by default now.
        """
        override = self._override
        models = override.models or self._models
        window = partial(self._window, models)
        hub = Hub(self._watchers, self._logger)
        planner = Planner(
            self._catalog,
            models,
            self._default_model,
            window,
            keep_names=override.keep_names if override.models else self._keep_names,
            seed=seed,
            created=created,
            watched=hub.is_watched,
        )
        plan, state = planner.root(request)
        machine: Machine = run_agent
        try:
            state = with_prompt(plan, state)
        except StepEngineError as error:
            machine = failing(error)
        if prepare is not None:
            plan, state = prepare(plan, state)
        services = Services(
            machine=machine,
            models=models,
            tools=self._tools_with(override),
            pricing=self._pricing,
            window=window,
            planner=planner.child,
            interactor=self._interactor,
            retry=self._retry,
            rates=self._rates,
            seed=planner.seed,
            clock=self._clock,
        )
        if wrap is not None:
            services = wrap(services)
        return LiveRun(Tree(services, plan, state, hub, request.answers), self._active)

    def _tools_with(self, override: Override) -> ToolSetting:
        if not override.dependencies:
            return self._setting
        return attrs.evolve(self._setting, overrides={**self._setting.overrides, **override.dependencies})

    def _window(self, models: Models, model: str) -> int | None:
        """Return a model's context length; without pricing no price data are loaded for it (requirements G18)."""
        if self._pricing is None:
            return None
        known = self._windows.setdefault(models, {})
        if model not in known:
            known[model] = models.info(model).context_window
        return known[model]

    # --- settings for a while, and the end ----------------------------------------------------------------------------

    @contextmanager
    def override(self, *, models: ModelsLike = None, dependency_overrides: Overrides | None = None) -> Iterator[Self]:
        """
        Replace models or dependencies for the runs that this context starts, such as in a test.

        Overrides of concurrent tasks do not meet; nested ones add up.
        """
        made = self._override.replaced(models, dependency_overrides)
        token = overrides.set({**overrides.get({}), id(self): made})
        try:
            yield self
        finally:
            overrides.reset(token)

    @property
    def _override(self) -> Override:
        return overrides.get({}).get(id(self)) or Override()

    async def aclose(self) -> None:
        """End background runs, wait for them, and give back connections and threads. The engine stays usable."""
        forgotten = self._stop_all()
        for handle in list(self._handles):
            await handle.shutdown()
        if self._loop_thread.is_running:
            await asyncio.to_thread(self._loop_thread.close)
        await self._models.close()
        self._threads.close()
        warn_of(forgotten)

    def close(self) -> None:
        """Do what ``aclose`` does, for synchronous code; runs of other event loops are ended, but not waited for."""
        forgotten = self._stop_all()
        self._loop_thread.run(self._models.close)
        self._loop_thread.close()
        self._threads.close()
        warn_of(forgotten)

    def _stop_all(self) -> list[RunHandle[Any]]:
        """Tell every run to end; return the handles that nobody ever looked at."""
        forgotten = [h for h in self._handles if not h.done and not h.is_used]
        for live in list(self._active):
            live.tree.root.stop(Stop("shutdown"))
        return forgotten

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
