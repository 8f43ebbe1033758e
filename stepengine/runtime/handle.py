"""``RunHandle``: a run in the background, seen from outside (requirements N1-N8, N11, N12)."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncGenerator, Callable, Mapping
from types import TracebackType
from typing import Any, Generic, Protocol, Self

from typing_extensions import TypeVar

from stepengine.data.events import Event
from stepengine.data.messages import UserMessage
from stepengine.data.outcomes import Stop
from stepengine.data.questions import AnswerLike
from stepengine.data.run import RunPhase, RunResult
from stepengine.errors import StepEngineError
from stepengine.runtime.tree import Tree

__all__ = ("RunHandle",)

Out = TypeVar("Out", default=Any)


class Runner(Protocol):
    """What makes a handle's result."""

    async def __call__(self) -> RunResult[Any]:
        """Run to the end."""


class RunHandle(Generic[Out]):
    """
    A run that goes on in the background; ``engine.start`` makes one.

    ``async with`` ends the run on exit. Everything a handle shows can be had without it (requirements N8).

    While somebody iterates ``events()``, an open question waits for ``answer``; otherwise it suspends the run.
    """

    def __init__(self, tree: Tree, runner: Runner) -> None:
        self._tree = tree
        self._task: asyncio.Task[RunResult[Any]] = asyncio.create_task(
            runner(), name=f"stepengine {tree.root.state.run_id}"
        )
        self._task.add_done_callback(_retrieved)
        self._is_used = False

    def __repr__(self) -> str:
        return f"<RunHandle {self.run_id} of {self.agent_id!r}: {self.phase.value}>"

    @property
    def run_id(self) -> str:
        """The run's id."""
        return self._tree.root.state.run_id

    @property
    def agent_id(self) -> str:
        """The agent's id."""
        return self._tree.root.plan.definition.id

    @property
    def path(self) -> str:
        """The run's path in its tree: ``""``, a handle is for a root run."""
        return ""

    @property
    def session_id(self) -> str | None:
        """The conversation's id, if there is one."""
        return self._tree.root.plan.session_id

    @property
    def metadata(self) -> Mapping[str, Any]:
        """The caller's metadata."""
        return self._tree.root.plan.metadata

    @property
    def phase(self) -> RunPhase:
        """What the run is doing."""
        return self._tree.hub.phase

    @property
    def done(self) -> bool:
        """Whether the run has ended."""
        return self._task.done()

    @property
    def is_used(self) -> bool:
        """Whether anybody asked for the result or the events."""
        return self._is_used

    def on_end(self, tell: Callable[[], object]) -> None:
        """Call *tell* when the run has ended, or was cancelled before it began."""
        self._task.add_done_callback(lambda _: tell())

    async def result(self) -> RunResult[Out]:
        """Return the result when the run has ended; cancelling the wait does not end the run."""
        self._is_used = True
        return await asyncio.shield(self._task)

    def events(self) -> AsyncGenerator[Event, None]:
        """Give every event from now on; the last one is ``RunFinished``. To be iterated in the run's event loop."""
        self._is_used = True
        subscription = self._tree.hub.subscribe()
        desk = self._tree.desk

        async def shown() -> AsyncGenerator[Event, None]:
            desk.attend()
            try:
                async for event in subscription.events():
                    yield event
            finally:
                subscription.close()
                desk.depart()

        events = shown()
        # One that is never iterated has no `finally`.
        weakref.finalize(events, subscription.close).atexit = False
        return events

    def send_input(self, text: str) -> None:
        """
        Send *text* to the run; it becomes a user message before the next model call (requirements N3).

        Raises:
            StepEngineError: when the run has ended.
        """
        if self.done:
            msg = f"the run {self.run_id!r} has ended and takes no input; start another one with previous=result.state"
            raise StepEngineError(msg)
        self._tree.inbox.append(UserMessage(text))

    def answer(self, question_id: str, answer: AnswerLike) -> None:
        """
        Answer an open question.

        Raises:
            AnswerRejected: when no question with that id is open, or *answer* is none to it, such as a text that is no
                option.
        """
        self._tree.desk.answer(question_id, answer)

    def interrupt(self) -> None:
        """End the run gracefully with status ``cancelled``; may be called twice, from an observer and from any thread."""
        self._tree.root.stop(Stop("cancelled"))

    async def shutdown(self) -> None:
        """End the run and its children, and wait until nothing of them is left; may be called twice."""
        self._is_used = True
        self._tree.root.stop(Stop("shutdown"))
        await asyncio.wait((self._task,))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.shutdown()


def _retrieved(task: asyncio.Task[Any]) -> None:
    """Look at a run's exception, so that nobody is told that it was never retrieved."""
    if not task.cancelled():
        task.exception()
