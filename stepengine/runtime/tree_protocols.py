"""
Protocols of a run tree and its runs: the members that the parts of a tree use.

The parts of a ``RunTree`` are below it and know it by these protocols. The protocols that name a part extend ``Tree`` in the module of
that part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, Protocol

from stepengine.data.events import Event
from stepengine.data.messages import UserMessage
from stepengine.data.outcomes import Begun, Stop
from stepengine.data.state import AgentState
from stepengine.data.waiting import Waits
from stepengine.machine.plan import RunPlan
from stepengine.runtime.asking import OpenQuestions
from stepengine.runtime.deferred_calls import Deferred
from stepengine.runtime.hub import Hub
from stepengine.runtime.mail import Mail
from stepengine.runtime.performer import IO, Item
from stepengine.runtime.prices import Prices
from stepengine.runtime.services import Services
from stepengine.system.threads import CancelSignal
from stepengine.tooling.context import Belongings

__all__ = ("Background", "Brake", "Members", "Run", "Runs", "Tree")


class Members(Protocol):
    """The effects that a run performs together."""

    def all_wait(self, is_waiting: Callable[[Item], bool]) -> bool:
        """Return whether each of them waits."""


class Run(Protocol):
    """One run of a tree; ``RunTask`` is the implementation."""

    plan: RunPlan
    path: str
    stopping: Stop | None
    spares: bool
    is_ending: bool

    @property
    def busy(self) -> Item | Members | Literal[True] | None:
        """The effects that it performs now."""

    def broken(self, error: BaseException) -> Stop:
        """End the run because a performer let an exception out."""

    def halt(self) -> Stop:
        """Return the outcome of an effect that was not performed."""


class Runs(Protocol):
    """The runs of a tree by path, in the order in which they started."""

    def __contains__(self, path: object, /) -> bool: ...

    def __reversed__(self) -> Iterator[str]: ...

    def get(self, path: str, /) -> Run | None:
        """Return the run at *path*."""


class Background(Protocol):
    """The children in the background; ``BackgroundChildren`` is the implementation."""

    def at_work(self) -> Iterator[str]:
        """Yield the paths of those that have not ended."""

    def is_at_work(self, path: str) -> bool:
        """Return whether there is a child at *path* that has not ended."""

    def is_used_by(self, path: str) -> bool:
        """Return whether a child that the run at *path* started is at work."""


class Brake(Protocol):
    """Stops the members of groups; ``StopOnFailure`` is the implementation."""

    def is_given_up(self, item: Item) -> bool:
        """Return whether another member of its race has won."""


class Tree(IO, Protocol):
    """A run tree as its parts see it; ``RunTree`` is the implementation and documents the members."""

    services: Services
    hub: Hub
    desk: OpenQuestions
    mail: Mail
    deferred: Deferred
    prices: Prices
    inbox: list[UserMessage]
    inboxes: dict[str, list[UserMessage]]
    deadlines: dict[str, tuple[float, float]]
    orphans: dict[str, Any]
    stopped_calls: dict[tuple[str, int], Begun]
    spawned_by: dict[str, str]
    leaked: list[str]
    reraise: BaseException | None
    is_replaying: bool

    @property
    def root(self) -> Run:
        """The root run."""

    @property
    def runs(self) -> Runs:
        """The runs that have not ended."""

    @property
    def background(self) -> Background:
        """The children in the background."""

    @property
    def brake(self) -> Brake:
        """Stops the members of groups."""

    @property
    def signal(self) -> CancelSignal:
        """Is set once the tree is being stopped."""

    def elapsed(self) -> int:
        """Return milliseconds since the root run was created."""

    def seconds_until(self, wakes: int, asked: int) -> float:
        """Return how many seconds are left until *wakes*."""

    def too_late(self, path: str) -> Stop | None:
        """Return why the run at *path* must end because its time is over."""

    def may_suspend(self, waits: Sequence[Waits]) -> bool:
        """Return whether a tree that waits for these is suspended."""

    def start(self, item: Item, plan: RunPlan, state: AgentState) -> None:
        """Start a child in the background."""

    def stop_child(self, path: str, stop: Stop) -> None:
        """End the child in the background at *path*."""

    def end_run(self, path: str, reason: str) -> None:
        """End the run at *path*."""

    def belongings(self, path: str) -> Belongings:
        """Return the objects that tools keep for the run at *path*."""

    def emit_from_anywhere(self, event: Event) -> None:
        """Show an event, from any thread."""
