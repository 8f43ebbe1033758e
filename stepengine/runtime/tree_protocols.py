"""
Protocols of a run tree and its runs: the members that the parts of a tree use.

The parts of a ``RunTree`` are below it and know it by these protocols. The protocols that name a part extend ``Tree`` in the module of
that part.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from stepengine.runtime.active_runs import ActiveRuns, TreeLoop
from stepengine.runtime.clock import TreeClock
from stepengine.runtime.deferred_calls import DeferredCalls
from stepengine.runtime.hub import Hub
from stepengine.runtime.leftovers import Leftovers
from stepengine.runtime.messages import Inboxes, RunMessages
from stepengine.runtime.performer import IO, Item, Performer
from stepengine.runtime.questions import OpenQuestions
from stepengine.runtime.run_protocol import Run
from stepengine.runtime.services import Services


class Background(Protocol):
    """The children in the background; ``BackgroundChildren`` is the implementation."""

    def iterate_running_paths(self) -> Iterator[str]:
        """Yield the paths of running children."""

    def is_running(self, path: str) -> bool:
        """Return whether the child at *path* is still running."""

    def has_running_child(self, path: str) -> bool:
        """Return whether a background child of the run at *path* is still running."""


class GroupStopper(Protocol):
    """Stops the members of groups; ``StopOnFailure`` is the implementation."""

    def has_lost_race(self, item: Item) -> bool:
        """Return whether another member of its race has won."""


class Performers(Protocol):
    """The performers of a tree; ``PerformerStack`` is the implementation."""

    @property
    def group_stopper(self) -> GroupStopper:
        """The performer that stops the members of groups."""

    @property
    def recording(self) -> Performer:
        """The outermost performer that records, or the gate for refusals if none records."""


class Tree(IO, Protocol):
    """A run tree as its parts see it; ``RunTree`` is the implementation and documents the members."""

    services: Services
    hub: Hub
    questions: OpenQuestions
    mail: RunMessages
    inboxes: Inboxes
    deferred: DeferredCalls
    clock: TreeClock
    runs: ActiveRuns
    loop: TreeLoop
    leftovers: Leftovers

    @property
    def root(self) -> Run:
        """The root run."""

    @property
    def performers(self) -> Performers:
        """The performers of its effects."""

    @property
    def background(self) -> Background:
        """The children in the background."""
