"""``Base``: what an engine is made of, and how it turns a request into a run that is ready to start."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Never, Self, TypeAlias

import attrs

from stepengine.data.definition import AgentDefinition, normalised_id
from stepengine.data.events import Event
from stepengine.data.hooks import Hooks
from stepengine.data.json import thaw
from stepengine.data.limits import Limits
from stepengine.data.questions import Interactor, checked_interactor
from stepengine.data.state import AgentState
from stepengine.data.tools import ToolLike
from stepengine.engine.catalog import Catalog
from stepengine.engine.live import LiveRun, failing
from stepengine.engine.options import (
    ModelsLike,
    Override,
    Overrides,
    SessionsLike,
    check_engine,
    overrides,
    rates_of,
    watcher_of,
)
from stepengine.engine.planning import NOTHING_KNOWN, Known, Planner, Request, with_prompt
from stepengine.engine.portal import LoopThread, give_back
from stepengine.engine.turns import Sessions
from stepengine.errors import StepEngineError, UnknownModel
from stepengine.machine import RunPlan, run_agent
from stepengine.models import Models, Provider
from stepengine.models.pricing import cost_of
from stepengine.permissions import Policy, Rule
from stepengine.redaction import GIVEN
from stepengine.runtime.asking import Remembered
from stepengine.runtime.calls import Pricing
from stepengine.runtime.clock import Clock, SystemClock
from stepengine.runtime.hub import Hub, ObserverLike
from stepengine.runtime.logs import LOGGER
from stepengine.runtime.rates import RateLimitsLike
from stepengine.runtime.retry import RetryPolicy
from stepengine.runtime.toolcalls import ToolSetting
from stepengine.runtime.tree import Machine, Services, Tree
from stepengine.tools.context import ResourceMap, Workspace
from stepengine.tools.threads import ThreadPool

if TYPE_CHECKING:
    from stepengine.journal import Session

__all__ = ("Base",)

KEPT_SESSIONS = 10_000
NO_OVERRIDES: Mapping[int, Override] = {}
NOTHING_REPLACED = Override()
Prepare: TypeAlias = Callable[[RunPlan, AgentState], tuple[RunPlan, AgentState]]
Wrap: TypeAlias = Callable[[Services], Services]


class Base:
    """The part of an engine that starts runs; ``Engine`` documents the arguments."""

    def __init__(
        self,
        agents: Iterable[AgentDefinition[Any]] = (),
        tools: Iterable[ToolLike] = (),
        models: ModelsLike = None,
        *,
        hooks: Hooks | None = None,
        permissions: Policy | None = None,
        limits: Limits | None = None,
        observers: Iterable[ObserverLike] = (),
        interactor: Interactor | None = None,
        headless: bool | None = None,
        dependency_overrides: Overrides | None = None,
        pricing: Pricing | None = cost_of,
        default_model: str | None = None,
        agent_models: Mapping[str, str] | None = None,
        resources: ResourceMap | Iterable[Any] = (),
        workspace: Workspace | Path | str | None = None,
        logger: Any = None,
        clock: Clock | None = None,
        retry: RetryPolicy | None = None,
        rate_limits: RateLimitsLike = None,
        sessions: SessionsLike = None,
        child_sessions: bool = False,
        **unknown: Never,
    ) -> None:
        check_engine(locals())
        GIVEN.learn(os.environ)
        self._catalog = Catalog(agents, tools, hooks or Hooks(), limits or Limits(), permissions)
        self._models = Models.of(models)
        self._keep_names = isinstance(models, Provider)
        self._watchers = tuple([watcher_of(o) for o in observers])
        self._interactor = checked_interactor(interactor, "Engine(interactor=...)")
        self._headless = headless
        self._pricing = pricing
        self._default_model = default_model
        self._agent_models = {
            normalised_id(agent): self._canonical(model) for agent, model in (agent_models or {}).items()
        }
        self._logger = LOGGER if logger is None else logger
        self._clock = clock or SystemClock()
        self._retry = retry or RetryPolicy()
        self._rates = rates_of(rate_limits, self._models, self._clock)
        self._sessions = Sessions(sessions, children=child_sessions) if sessions is not None or child_sessions else None
        self._threads = ThreadPool()
        self._setting = ToolSetting(
            threads=self._threads,
            overrides=dict(dependency_overrides or {}),
            workspace=Workspace(Path(workspace)) if isinstance(workspace, str | Path) else workspace,
            resources=resources if isinstance(resources, ResourceMap) else ResourceMap(resources),
        )
        self._remembered: dict[str, Remembered] = {}
        self._windows: weakref.WeakKeyDictionary[Models, dict[str, int | None]] = weakref.WeakKeyDictionary()
        self._active: set[LiveRun] = set()
        self._loop_thread = LoopThread()
        self._finalizer = weakref.finalize(self, give_back, self._loop_thread, self._threads)

    def _begin_request(
        self,
        request: Request,
        *,
        prepare: Prepare | None = None,
        wrap: Wrap | None = None,
        seed: str | None = None,
        created: datetime | None = None,
        shows: Callable[[Event], bool] | None = None,
        known: Known = NOTHING_KNOWN,
        into: LiveRun | None = None,
        is_sketch: bool = False,
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
            shows: Says which events are news; by default all are.
            known: What a record tells of models.
            into: A sketch of this run, which is to start from this request instead of its own.
            is_sketch: Whether the run is planned once more before it starts; then nothing of the author's is called yet.
        """
        override = self._override
        models = override.models or self._models
        window = partial(self._window, models, offline=known.is_whole)
        hub = Hub(self._watchers, self._logger) if into is None else into.tree.hub
        hub.shows = shows
        planner = Planner(
            self._catalog,
            models,
            self._default(models, known),
            window,
            keep_names=override.keep_names if override.models else self._keep_names,
            seed=seed,
            created=created,
            watched=hub.is_watched,
            known=known,
            chosen=self._agent_models or known.chosen,
        )
        plan, state = planner.root(request)
        machine: Machine = run_agent
        try:
            state = state if is_sketch else with_prompt(plan, state)
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
            remembered=self._remembered_in(plan.session_id),
            retry=self._retry,
            rates=self._rates,
            seed=planner.seed,
            clock=self._clock,
        )
        if wrap is not None:
            services = wrap(services)
        if into is None:
            live = LiveRun(Tree(services, plan, state, hub, request.answers, earlier=request.earlier), self._active)
        else:
            live = into
            if into.turn is not None:
                services = into.turn.watched(services, into)
            into.tree.seat(services, plan, state, request.answers, earlier=request.earlier)
        live.tree.desk.headless = bool(self._headless)
        return live

    def _begin_session(
        self, session: Session, request: Request, known: Known = NOTHING_KNOWN, into: LiveRun | None = None
    ) -> LiveRun:
        """Return a run that goes through *session*; when it cannot start, the journal is given back."""
        try:
            live = self._begin_request(
                request,
                prepare=lambda plan, state: session.start(
                    plan, state, limits=request.limits, models=self._agent_models
                ),
                wrap=session.wrap,
                shows=session.shows,
                known=known,
                into=into,
            )
        except BaseException:
            session.close()
            raise
        live.session = session
        return live

    def _remembered_in(self, session_id: str | None) -> Remembered | None:
        """Return where the rules of a conversation are kept; those of the oldest conversations are forgotten."""
        if session_id is None:
            return None
        kept = self._remembered.setdefault(session_id, Remembered())
        while len(self._remembered) > KEPT_SESSIONS:
            self._remembered.pop(next(iter(self._remembered)), None)
        return kept

    def remembered(self, session_id: str) -> tuple[Rule, ...]:
        """
        Return what people allowed for good in a conversation, with ``Answer(remember="session")``, since the engine was made.

        The engine keeps these rules in its memory, of the last 10,000 conversations: another process asks again.
        """
        kept = self._remembered.get(session_id)
        found = [] if kept is None else [dict(rule) for rule in kept.rules]
        return Policy.from_json({"rules": thaw(found)}).rules

    def forget(self, session_id: str, *ids: str) -> None:
        """Ask again about what people allowed for good in a conversation: about the rules of these ids, about all without one."""
        trees = [live.tree for live in list(self._active) if live.tree.root.plan.session_id == session_id]
        for kept in (self._remembered.get(session_id), *[tree.desk.remembered for tree in trees]):
            if kept is not None:
                kept.forget(ids)

    def _canonical(self, model: str) -> str:
        """Return how requests name *model*; one that no provider serves stays, and is told when a run asks for it."""
        if self._keep_names:
            return model
        try:
            return str(self._models.parse(model))
        except UnknownModel:
            return model

    def _default(self, models: Models, known: Known) -> str | None:
        """Return the model of roots that name none: of a recorded run the one that it had."""
        own = self._default_model
        if own is None or not known.models or own in known.models:
            return own or known.default
        try:
            canonical = str(models.parse(own))
        except UnknownModel:
            canonical = own
        return own if canonical in known.models else known.default or own

    def _tools_with(self, override: Override) -> ToolSetting:
        if not override.dependencies:
            return self._setting
        return attrs.evolve(self._setting, overrides={**self._setting.overrides, **override.dependencies})

    def _window(self, models: Models, model: str, *, offline: bool = False) -> int | None:
        """Return a model's context length; without pricing no price data are loaded for it (requirements G18)."""
        if self._pricing is None:
            return None
        known = self._windows.setdefault(models, {})
        if model not in known:
            try:
                known[model] = models.info(model).context_window
            except UnknownModel:
                if not offline:
                    raise
                return None
        return known[model]

    @contextmanager
    def override(self, *, models: ModelsLike = None, dependency_overrides: Overrides | None = None) -> Iterator[Self]:
        """
        Replace models or dependencies for the runs that this context starts, such as in a test.

        Overrides of concurrent tasks do not meet; nested ones add up.
        """
        made = self._override.replaced(models, dependency_overrides)
        token = overrides.set({**overrides.get(NO_OVERRIDES), id(self): made})
        try:
            yield self
        finally:
            overrides.reset(token)

    @property
    def _override(self) -> Override:
        return overrides.get(NO_OVERRIDES).get(id(self), NOTHING_REPLACED)
