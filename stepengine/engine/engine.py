"""``Engine``: what turns agent definitions into runs."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncGenerator
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack, overload

from stepengine.data.definition import AgentDefinition
from stepengine.data.events import Event
from stepengine.data.models import ModelRequest
from stepengine.data.outcomes import Stop
from stepengine.data.run import RunResult
from stepengine.data.state import AgentState
from stepengine.data.yields import StepResult
from stepengine.engine.live import LiveRun, streamed, until_ended, warn_of
from stepengine.engine.options import RunOptions
from stepengine.engine.planning import Request
from stepengine.engine.recorded import Recorded
from stepengine.engine.single import ONE_STEP, StepRun
from stepengine.runtime.handle import RunHandle
from stepengine.runtime.sizes import estimated_tokens

__all__ = ("Engine",)

Out = TypeVar("Out")


class Engine(Recorded):
    """
    Runs agents. An engine holds no state of runs: any number may run at once, in any number of event loops.

    Usable as a sync or async context manager; closing it ends background runs and gives back connections and threads.

    Args:
        agents: The agents that may be named by id; those that they may spawn are collected from them.
        tools: Tools that agents may list by name.
        models: One ``Provider`` for every model string, a mapping from prefix to ``Provider``, a ``Models`` registry, or
            ``None`` for the real adapters with keys from the environment.
        hooks: Hooks of every agent, called before the agent's own.
        permissions: Which tool calls may run, need a person, or never run, in every agent of a tree; ``None`` allows all.
        limits: Limits of every run that does not set its own.
        observers: Functions or objects with ``on_event`` that are shown every event.
        interactor: Somebody who answers questions in process: an object with a method ``ask(question)``, plain or async,
            that returns a string, a bool or an ``Answer``, or ``None`` to leave the question open.
        headless: Whether nobody is there to permit a tool call, so that what needs a person's approval is denied and the
            model is told; a handler's ``Ask`` still suspends the run. By default that holds for a ``run`` with neither
            interactor, journal nor session, which nobody could go on with.
        dependency_overrides: Dependency factories of tools that replace others.
        pricing: What model replies cost; ``None`` switches it off.
        default_model: The model of agents that name none.
        agent_models: Models in place of those that agents name, by agent id; that of ``""`` holds for all others. They are
            recorded with a run and hold for it again, unless there are other ones then. Models that a handler names in a
            yield stay.
        resources: Live objects for tools, by type.
        workspace: Where agents work: a folder, or a ``Workspace``.
        logger: Where log lines go; the standard logger ``stepengine`` by default.
        clock: Time and sleep.
        retry: How failed model calls are tried again.
        rate_limits: What each provider may be asked, by all runs together: one ``RateLimit`` that holds for each provider
            by itself, or limits by provider prefix; none by default.
        sessions: Where conversations are kept between runs: ``FileSessions``, ``SqliteSessions``, ``MemorySessions``, or any
            object with ``get_history(id)`` and ``save_history(id, messages)``, plain or async. Plain methods of a store
            with ``blocking = True`` are called in a thread. Without a store every run stands for itself.
        child_sessions: Whether the conversations of children are kept, too, as sessions that name the one they began in.

    Raises:
        DefinitionError: when ids or tool names are used twice or name nothing, or a hook, observer, interactor or
            limit cannot be used.
    """

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
            AnswerRejected: when an answer is none, or a suspended run cannot go on from ``previous`` alone.
            UnknownModel: when the model names no provider.
            MissingKey: when there is no key for the model's provider.
            SessionError: when the session cannot be loaded; nothing was run.
            LimitExceeded: at the step limit with ``on_max_steps="raise"``.
        """
        live = self._begin(agent, prompt, **options)
        if self._headless is None:
            reached_by = (self._interactor, live.session, live.tree.root.plan.session_id)
            live.tree.desk.headless = all(way is None for way in reached_by)
        return await live()

    def stream(
        self, agent: str | AgentDefinition[Any], prompt: str = "", **options: Unpack[RunOptions]
    ) -> AsyncGenerator[Event, None]:
        """
        Run an agent and give its events; the last one is ``RunFinished`` with the result.

        Leaving the iteration early, or closing the generator, cancels the run. Arguments and errors are those of ``run``.
        """
        live = self._begin(agent, prompt, **options)
        events = streamed(live)
        if live.session is not None:
            weakref.finalize(events, live.forsake)
        return events

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
        return live.start()

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

    # --- the end ----------------------------------------------------------------------------

    async def aclose(self) -> None:
        """
        End all runs, wait for them, and give back connections and threads. The engine stays usable.

        Runs that have not ended after ten seconds, or whose event loop stands still, are named in a ``ResourceWarning``.
        """
        forgotten = self._stop_all()
        left = await until_ended(self._active)
        if self._loop_thread.is_running:
            await asyncio.to_thread(self._loop_thread.close)
        await self._models.close()
        self._threads.close()
        warn_of(forgotten, left)

    def close(self) -> None:
        """Do what ``aclose`` does, for synchronous code; runs of the event loop that calls it are only told to end."""
        forgotten = self._stop_all()
        here = _loop_here()
        left = self._loop_thread.run(lambda: until_ended(self._active, here))
        self._loop_thread.run(self._models.close)
        self._loop_thread.close()
        self._threads.close()
        warn_of(forgotten, left)

    def _stop_all(self) -> list[LiveRun]:
        """Tell every run to end; return those in the background whose handles nobody ever looked at."""
        runs = list(self._active)
        for live in runs:
            live.tree.root.stop(Stop("shutdown"))
        return [live for live in runs if live.handle and not (live.handle.done or live.handle.is_used)]

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


def _loop_here() -> asyncio.AbstractEventLoop | None:
    """Return the event loop that runs in this thread, if one does."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
