"""The other agents of a run: its background children, as known from its outcomes, and the agent that continues its conversation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from stepengine.data.alike import list_names
from stepengine.data.state import EndedRun
from stepengine.data.waits import ChildRef
from stepengine.errors import AgentError


class BackgroundChildRefs:
    """The children that a run started in the background; updated only by the outcomes of the run."""

    __slots__ = ("_refs", "_running")

    def __init__(self) -> None:
        self._refs: dict[str, ChildRef[Any]] = {}
        self._running: dict[str, Literal["cancel", "wait"]] = {}

    @property
    def running(self) -> tuple[ChildRef[Any], ...]:
        """The children whose end was not reported to the run yet, in start order."""
        return tuple([self._refs[path] for path in self._running])

    @property
    def refs(self) -> tuple[ChildRef[Any], ...]:
        """All children, in start order."""
        return tuple(self._refs.values())

    def record_start(self, ref: ChildRef[Any], *, on_return: Literal["cancel", "wait"]) -> None:
        """Record a started child, and whether the end of the run cancels or awaits it."""
        self._refs[ref.path] = ref
        self._running[ref.path] = on_return

    def get_own_child_path(self, ref: ChildRef[Any]) -> str:
        """
        Return the path of a child that this run started in the background; raise ``AgentError`` for any other child.

        Raises:
            AgentError: for any other child.
        """
        if self._refs.get(ref.path) == ref:
            return ref.path
        known = list_names([f"{one.agent_id!r} at {one.path!r}" for one in self._refs.values()])
        msg = (
            f"the child {ref.agent_id!r} at {ref.path!r} was not started in the background by this run; only the run that started a child may "
            f"wait for it, message it or cancel it. Started here: {known}"
        )
        raise AgentError(msg)

    def mark_reported(self, path: str) -> bool:
        """Record that the end of a child was reported to the run; return whether that is new."""
        return self._running.pop(path, None) is not None

    def group_unfinished_children(self) -> Iterator[tuple[Literal["cancel", "wait"], tuple[str, ...]]]:
        """Yield the paths of children that are running at the end of the run, by whether to cancel or await them."""
        kinds: tuple[Literal["cancel", "wait"], ...] = ("cancel", "wait")
        for kind in kinds:
            paths = tuple([path for path, what in self._running.items() if what == kind])
            if paths:
                yield kind, paths


NO_CHILDREN = BackgroundChildRefs()
"""The shared, empty references of all runs without background children; a run that starts one creates its own."""


class Children:
    """
    The other agents of one run.

    Attributes:
        background: Its children in the background; ``NO_CHILDREN`` until it may start some.
        successor: The agent that continues the conversation when the run's own agent has ended; ``None`` for none.
        handed_to: The agent to which the conversation was handed over, in this run or before it.
        successor_end: How that agent ended; ``None`` until it did.
    """

    __slots__ = ("background", "handed_to", "successor", "successor_end")

    def __init__(self, handed_to: str | None) -> None:
        """Start with *handed_to*, the agent to which an earlier run handed the conversation over."""
        # One empty value that all runs share: hardly a run has children in the background, and the question `is not
        # NO_CHILDREN` at each step costs no call.
        self.background: BackgroundChildRefs = NO_CHILDREN
        self.successor: str | None = None
        self.successor_end: EndedRun | None = None
        self.handed_to = handed_to

    def ensure_background(self) -> BackgroundChildRefs:
        """Return the registry of background children for code that starts some; it is created on first use."""
        if self.background is NO_CHILDREN:
            self.background = BackgroundChildRefs()
        return self.background

    def record_hand_over(self, agent_id: str) -> None:
        """Record that *agent_id* continues the conversation when the run's own agent has ended."""
        self.successor = self.handed_to = agent_id

    def record_successor_end(self, end: EndedRun | None) -> None:
        """Store how the agent ended that continued the conversation; ``None`` if it never started."""
        self.successor_end = end
