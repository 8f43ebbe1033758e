"""
The innermost performers: one small method for each kind of effect.

They stamp outcomes with the run's time and hand over what was sent to the run meanwhile (design 3).
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import attrs

from stepengine.data.effects import Ask, CallModel, CallTool, Perform, Spawn
from stepengine.data.json import freeze
from stepengine.data.outcomes import Failure, Single, Stop, quick_value
from stepengine.data.run import ChildResult, RunStatus
from stepengine.data.tools import Asking
from stepengine.errors import DataError, LimitExceeded, PerformError, StepEngineError
from stepengine.runtime.asking import shown_questions
from stepengine.runtime.performer import IO, Item, child_path
from stepengine.runtime.toolcalls import call_tool

if TYPE_CHECKING:
    from stepengine.data.questions import Interactor
    from stepengine.runtime.calls import ModelCaller
    from stepengine.runtime.tree import Tree

__all__ = ("Leaves",)


class _Nothing:
    """An awaitable that is done at once, again and again; a coroutine would have to be made for every effect."""

    __slots__ = ()

    def __await__(self) -> Iterator[Any]:
        return iter(())


NOTHING = cast("Awaitable[None]", _Nothing())


class Leaves:
    """The innermost performer of one run tree."""

    def __init__(self, tree: Tree, caller: ModelCaller) -> None:
        self._tree = tree
        self._caller = caller
        self._elapsed = tree.elapsed
        self._inbox = tree.inbox

    def begin(self, batch: Sequence[Item]) -> Awaitable[None]:
        """Nothing needs to be prepared to perform something."""
        return NOTHING

    def perform(self, item: Item, io: IO) -> Awaitable[Single]:
        """Perform one effect."""
        return BY_KIND[type(item.effect)](self, item, io)

    def _value(self, item: Item, value: Any) -> Single:
        late = self._tree.too_late(item.path) if self._tree.deadlines else None
        if late is not None:
            # What did not end in time is cut off, also where nothing could cut it off in time.
            return late
        inputs = self._take_inbox() if self._inbox and not item.path else ()
        return quick_value(value, self._elapsed(), inputs)

    def _failure(self, item: Item, error: StepEngineError) -> Single:
        late = self._tree.too_late(item.path)
        if late is not None:
            return late
        # The frames of this package mean nothing to an author, and hold on to whole transcripts.
        error.__traceback__ = None
        inputs = self._take_inbox() if self._inbox and not item.path else ()
        return Failure(error, self._elapsed(), inputs)

    def _take_inbox(self) -> tuple[Any, ...]:
        inputs = tuple(self._inbox)
        for _ in inputs:
            self._inbox.popleft()
        return inputs

    async def _call_model(self, item: Item, io: IO) -> Single:
        try:
            reply = await self._caller.call(item, io)
        except StepEngineError as error:
            return self._failure(item, error)
        return self._value(item, reply)

    async def _call_tool(self, item: Item, io: IO) -> Single:
        try:
            result = await call_tool(item, self._tree)
        except StepEngineError as error:
            return self._failure(item, error)
        return self._value(item, result)

    async def _perform(self, item: Item, io: IO) -> Single:
        call = cast("Perform", item.effect).call
        try:
            value = freeze(await self._returned(call.name, partial(call.fn, *call.args, **call.kwargs), call.fn))
        except DataError as error:
            msg = f"Perform({call.name}) returned what is not JSON: {error.message}"
            return self._failure(item, _because(PerformError(msg, kind="DataError"), error))
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            return self._failure(item, _failed(call.name, error))
        except (Exception, GeneratorExit) as error:  # noqa: BLE001
            return self._failure(item, _failed(call.name, error))
        return self._value(item, value)

    async def _returned(self, name: str, body: Callable[[], Any], fn: Any) -> Any:
        if inspect.iscoroutinefunction(_innermost(fn)):
            return await body()
        tree = self._tree
        value, error = await tree.services.tools.threads.run(name, partial(_caught, body), leaked=tree.leaked)
        if error is not None:
            raise error
        return await value if inspect.isawaitable(value) else value

    async def _ask(self, item: Item, io: IO) -> Single:
        questions = shown_questions(item)
        try:
            answers = await self._tree.desk.ask(questions, _interactor_of(item))
        except LimitExceeded as error:
            return self._failure(item, error)
        waiting = tuple([q for q, answer in zip(questions, answers, strict=True) if answer is None])
        if waiting:
            return Stop("suspended", self._elapsed(), questions=waiting)
        return self._value(item, tuple(answers))

    async def _spawn(self, item: Item, io: IO) -> Single:
        effect = cast("Spawn", item.effect)
        path = child_path(item.path, effect.seq)
        try:
            plan, state = self._tree.services.planner(item.plan, effect, path)
        except StepEngineError as error:
            error.__traceback__ = None
            refused: ChildResult[Any] = ChildResult(agent_id=effect.agent_id, status=RunStatus.FAILED, error=error)
            return self._value(item, refused)
        self._tree.spawned_by[path] = effect.tool_call_id
        finished = await io.drive(plan, state, path)
        child = finished.as_child(is_inline=effect.is_inline)
        if finished.status is RunStatus.SUSPENDED:
            return Stop("suspended", self._elapsed(), questions=finished.pending, child=child)
        stop = self._tree.root.stopping
        if stop is not None and self._tree.reraise is not None:
            # What happened in the child is in doubt, so it has not ended for whoever records.
            return Stop(stop.kind, self._elapsed(), stop.error, child=child)
        ended = self._value(item, child)
        return attrs.evolve(ended, child=child) if type(ended) is Stop else ended


BY_KIND: Mapping[type[Any], Callable[[Leaves, Item, IO], Awaitable[Single]]] = {
    CallModel: Leaves._call_model,  # noqa: SLF001
    CallTool: Leaves._call_tool,  # noqa: SLF001
    Perform: Leaves._perform,  # noqa: SLF001
    Ask: Leaves._ask,  # noqa: SLF001
    Spawn: Leaves._spawn,  # noqa: SLF001
}
"""The method for each kind of effect; unbound, so that the leaves do not refer to themselves."""


def _interactor_of(item: Item) -> Interactor | None:
    """Return who was given to the tool that asks, ``ask_user_tool(interactor)``; ``None`` for nobody."""
    effect = cast("Ask", item.effect)
    of_tool = effect.tool_call_id and effect.purpose == "question"
    binding = item.plan.tools.get("ask_user") if of_tool else None
    return binding.runs.interactor if binding is not None and type(binding.runs) is Asking else None


def _innermost(fn: Any) -> Any:
    while isinstance(fn, partial):
        fn = fn.func
    return fn if inspect.isroutine(fn) else getattr(fn, "__call__", fn)  # noqa: B004


def _caught(body: Callable[[], Any]) -> tuple[Any, Exception | None]:
    """Return what *body* returns or raises: a ``StopIteration`` cannot travel through a future."""
    try:
        return body(), None
    except Exception as error:  # noqa: BLE001
        return None, error


def _failed(name: str, error: BaseException) -> PerformError:
    kind = type(error).__name__
    return _because(PerformError(f"Perform({name}) raised {kind}: {error}", kind=kind), error)


def _because(error: PerformError, cause: BaseException) -> PerformError:
    error.__cause__ = cause
    return error
