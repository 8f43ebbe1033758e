"""``Services``: the parts of an engine that the trees of its runs use."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import attrs
from attrs import frozen

from stepengine.data.effects import Spawn
from stepengine.data.models import ModelDelta, ModelReply, ModelRequest
from stepengine.data.outcomes import Outcome
from stepengine.data.questions import Interactor
from stepengine.data.state import AgentState
from stepengine.errors import StepEngineError
from stepengine.machine.plan import Finished, RunPlan
from stepengine.runtime.clock import SystemClock, TimeSource
from stepengine.runtime.limits import CallEstimate, estimate_call
from stepengine.runtime.messages import MessageStore
from stepengine.runtime.performer import Item, Middleware
from stepengine.runtime.prices import Prices, Pricing
from stepengine.runtime.questions import RememberedRules
from stepengine.runtime.rates import LimiterSource
from stepengine.runtime.retry import RetryPolicy
from stepengine.tools.context import ResourceMap
from stepengine.workspace.guard import CallGuard
from stepengine.workspace.threads import ThreadPool
from stepengine.workspace.workspace import Workspace

if TYPE_CHECKING:
    from stepengine.permissions import Request
    from stepengine.workspace.writes import FileWrite


class ModelProvider(Protocol):
    """The members of a provider that are used here; ``stepengine.models.Provider`` has them."""

    async def complete(self, request: ModelRequest) -> ModelReply:
        """Return the completed reply."""

    def stream(self, request: ModelRequest) -> AsyncIterator[ModelDelta]:
        """Yield deltas, and exactly one ``ReplyDone`` at the end."""


class ModelRegistry(Protocol):
    """The members of a registry without rate limits; ``stepengine.models.Models`` has them."""

    def provider_for(self, model: str) -> ModelProvider:
        """Return the provider of a model string or raise ``UnknownModel``."""


@frozen(kw_only=True)
class ToolSetting:
    """
    The settings and resources for the tools of an engine.

    Attributes:
        threads: Where sync bodies run.
        overrides: Dependency factories that replace others.
        workspace: Where agents work.
        resources: Live objects by type.
        guard: Returns the guard of the files that a call may open; ``None`` where no rule is about files.
    """

    threads: ThreadPool = attrs.field(factory=ThreadPool)
    overrides: Mapping[Callable[..., Any], Callable[..., Any]] = attrs.field(factory=dict)
    workspace: Workspace | None = None
    resources: ResourceMap = attrs.field(factory=ResourceMap)
    guard: Callable[[Request], CallGuard | None] | None = None


MachineMaker = Callable[[RunPlan, AgentState], Generator[Any, Outcome | None, Finished]]
"""Makes the machine of a run; ``stepengine.machine.run_agent`` is one."""
ChildPlanner = Callable[[RunPlan, Any, str], tuple[RunPlan, AgentState]]
"""Returns the plan and the first state of the child or tool body at a path, or raises the reason why it must not start."""


def _refuse_child(_: RunPlan, effect: Spawn, path: str) -> tuple[RunPlan, AgentState]:
    """Raise, since a tree without an engine knows no agents."""
    # A tree without an engine, as in tests of performers: to ask for a child there is an error that says so, and no
    # AttributeError.
    msg = f"agent {effect.agent_id!r} is unknown here; nothing was started at {path!r}"
    raise StepEngineError(msg)


def _return_unknown_window(_: str) -> int | None:
    return None


def get_requested_output_limit(request: ModelRequest) -> int | None:
    """Return ``max_tokens`` of the settings of a request, or ``None`` if it is not set."""
    return request.settings.max_tokens


class ReplayProgress(Protocol):
    """The record of a tree whose runs resume in parallel."""

    def has_begun(self, item: Item) -> bool:
        """Return whether an effect was started, or will never start."""

    def has_outcome(self, item: Item) -> bool:
        """Return whether an effect has a recorded outcome or will never start; a started child run counts, too."""


@frozen(kw_only=True, weakref_slot=False)
class ModelSetting:
    """
    The settings for the model calls of a run tree.

    Attributes:
        registry: The source of providers.
        pricing: The prices of replies; ``None`` for nothing but what providers report.
        window: Returns a model's context length in tokens, if known.
        output_limit: Returns the most tokens that the reply to a request may have, if known.
        retry: How often and when failed model calls are repeated.
        rates: The rate limiters of providers; ``None`` for no limits.
    """

    registry: ModelRegistry
    pricing: Pricing | None = None
    window: Callable[[str], int | None] = _return_unknown_window
    output_limit: Callable[[ModelRequest], int | None] = get_requested_output_limit
    retry: RetryPolicy = attrs.field(factory=RetryPolicy)
    rates: LimiterSource | None = None


@frozen(kw_only=True, weakref_slot=False)
class TimeSetting:
    """
    The settings for the times and waits of a run tree.

    Attributes:
        clock: Time and sleep.
        sleep_in_process: Seconds; a longer wait for a time suspends the tree.
        since: The run's time when this process took over, in milliseconds since the root was created; ``None`` if its times are
            invented.
        is_timed: Whether the time limits of runs stop them; a run that is only replayed takes no time of its own.
        wakes_now: Whether recorded sleeps end at once, whatever time it is.
    """

    clock: TimeSource = attrs.field(factory=SystemClock)
    # A suspended run costs a second to resume, and a process that only waits costs memory: at a minute the one is worth the other.
    sleep_in_process: float = 60.0
    since: int | None = 0
    is_timed: bool = True
    wakes_now: bool = False


@frozen(kw_only=True, weakref_slot=False)
class Services:
    """
    The parts of an engine that the trees of its runs use.

    Attributes:
        machine: Makes the machine of a run.
        models: The settings for model calls.
        tools: The settings and resources for tools.
        time: The settings for times and waits.
        planner: Returns the plan and the first state of a child or of the body of a tool, or raises why it must not start.
        interactor: Answers questions in this process.
        remembered: The lasting permissions of the conversation; by default a run tree has only its own.
        seed: The seed of everything random in performing effects; by default the run's id.
        middlewares: The wrappers of the innermost performer of every tree, from the inside out, such as recorders.
        keep_write: Stores the data to undo a file write of the call at an address; ``None`` if no one stores it.
        resumable: Whether a suspended tree can be resumed, because it is recorded.
        mail: The store of the messages to its runs; ``None`` for this process alone.
        record: The record of a tree whose runs resume in parallel: nothing new starts before all of them have reached the end of
            their records. ``None`` for any other tree.
    """

    machine: MachineMaker
    models: ModelSetting
    tools: ToolSetting = attrs.field(factory=ToolSetting)
    time: TimeSetting = attrs.field(factory=TimeSetting)
    planner: ChildPlanner = _refuse_child
    interactor: Interactor | None = None
    remembered: RememberedRules | None = None
    seed: str = ""
    middlewares: Sequence[Middleware] = ()
    keep_write: Callable[[str, int, FileWrite], None] | None = None
    resumable: bool = False
    mail: MessageStore | None = None
    record: ReplayProgress | None = None

    def estimate_call(self, request: ModelRequest) -> CallEstimate:
        """Return how much a model call of *request* may use."""
        models = self.models
        return estimate_call(request, Prices(models.pricing, self.time.clock.now), models.output_limit)
