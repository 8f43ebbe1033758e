"""
``Walk``: step a handler manually, without an engine, and fork it from its history.

What lives here drives a handler's generator and builds its context; what a short answer of a test means stands in ``short_answers``.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from datetime import UTC, datetime, timedelta
from functools import partial
from random import Random
from typing import Any, TypeAlias

from attrs import frozen

from stepengine.data.definition import AgentDefinition, require_generator_handler
from stepengine.data.effects import Compute
from stepengine.data.hooks import StepContext
from stepengine.data.json import ABSENT, JsonDict, freeze, freeze_object
from stepengine.data.outcomes import Failure
from stepengine.data.programs import RunningProgram
from stepengine.data.state import AgentState
from stepengine.data.tools import Yielding
from stepengine.data.typed_values import model_from_json
from stepengine.data.yields import (
    AgentCall,
    Parallel,
    Perform,
    Race,
    Start,
    StepResult,
)
from stepengine.errors import (
    DefinitionError,
    ReplayDivergence,
)
from stepengine.machine.author import find_waiting_line, make_bad_yield_error
from stepengine.machine.protocol import By, format_yieldable_names, get_yield_rows
from stepengine.runtime.performer import run_compute
from stepengine.testing.short_answers import YieldContext, compute_time_after_yield, make_step_result
from stepengine.tools.context import RunResources
from stepengine.tools.definition import Tool

__tracebackhide__ = True  # a failed test ends at its author's line


Handler: TypeAlias = "Callable[[StepContext], Generator[Any, Any, Any]] | AgentDefinition | Tool[..., Any]"


@frozen
class HandlerReturned:
    """The value of ``Walk.asked`` after the handler returned *value*."""

    value: Any = None


@frozen
class WalkStep:
    """
    One step of a walk.

    Attributes:
        asked: What the handler yielded.
        answer: The ``StepResult`` that it was sent, or the error that was thrown at its yield.
    """

    asked: Any
    answer: StepResult | BaseException


@frozen
class HandlerNote:
    """
    Output of a handler apart from its yields.

    Attributes:
        kind: ``"debug"``, ``"info"``, ``"warning"``, ``"error"`` for ``ctx.logger``, ``"notify"`` for ``ctx.notify``.
        message: The message.
        data: The data that came with it, as frozen JSON; ``None`` when there was none.
    """

    kind: str
    message: str
    data: Any = None


class Walk:
    """
    A handler that a test executes step by step.

    ``Walk(handler).send(...).send(...)`` runs on with every answer and returns the walk itself. Time stands still at *now*
    but for *tick_ms* per answer, chance is seeded, log lines and notifications end in ``notes``, and nothing is performed.

    Args:
        handler: A generator function of one context, a definition that has one, or a tool that yields.
        prompt: ``ctx.prompt``.
        params: For a tool, the input of its call; else ``ctx.params``: JSON, or what the handler shall get as it is. A definition whose ``input_schema`` is a
            pydantic model turns JSON into that model, as a run does.
        state: ``ctx.agent_state``.
        model: ``ctx.model``; the definition's by default.
        seed: Seeds ``ctx.random``.
        now: The time at the start; 2025-01-01 UTC by default.
        tick_ms: Milliseconds that pass with each answer.

    Attributes:
        state: The state of the latest answer; shorthand answers build on it.
        notes: What the handler logged and notified so far.

    Raises:
        DefinitionError: when *handler* is no handler.
        BadYield: when the handler yields what the machine does not know; it is thrown at that yield first.
    """

    def __init__(
        self,
        handler: Handler,
        prompt: str = "",
        params: object = None,
        state: AgentState | None = None,
        *,
        model: str | None = None,
        seed: int = 0,
        now: datetime = datetime(2025, 1, 1, tzinfo=UTC),
        tick_ms: int = 0,
    ) -> None:
        self._start = (handler, prompt, params, state)
        self._options: dict[str, Any] = {"model": model, "seed": seed, "now": now, "tick_ms": tick_ms}
        self._history: list[WalkStep] = []
        self._error: BaseException | None = None
        self._waited_ms = self._children = 0
        self.notes: list[HandlerNote] = []
        steps, definition = _get_handler_and_definition(handler, params)
        self._by: By = "tool" if isinstance(handler, Tool) else "handler"
        self._accepted = get_yield_rows(self._by)
        self.state = state or AgentState(run_id="walk", agent_id=definition.id if definition else "")
        self._context = StepContext(
            prompt=prompt,
            params=_convert_params(definition, params),
            agent_state=self.state,
            model=model or (definition.model if definition else None),
            logger=_NoteLogger(self.notes),
            random=partial(Random, seed),
            created=now,
            elapsed=lambda: tick_ms * len(self._history) + self._waited_ms,
            notify=lambda message, data: self.notes.append(HandlerNote("notify", message, freeze(data))),
        )
        self._kept = RunResources()
        self._steps = steps(self._context)
        self._program: RunningProgram | None = None
        self._asked: Any = None
        self._run_to_next_yield(lambda: self._steps.send(None))

    def __repr__(self) -> str:
        return f"Walk({self._handler_name}, {len(self._history)} answers, asked={self._asked!r})"

    @property
    def asked(self) -> Any:
        """The last yield of the handler; ``HandlerReturned(value)`` after it returned, ``None`` after it raised."""
        return self._asked

    @property
    def finished(self) -> bool:
        """Whether the handler has returned or raised."""
        return self._error is not None or isinstance(self._asked, HandlerReturned)

    @property
    def returned(self) -> object:
        """
        The return value of the handler.

        Raises:
            AssertionError: when it has not.
        """
        if isinstance(self._asked, HandlerReturned):
            return self._asked.value
        how = f"raised {self._error!r}" if self._error else f"waits at {self.location} with {self._asked!r}"
        msg = f"{self._handler_name} has not returned: it {how}"
        raise AssertionError(msg)

    @property
    def raised(self) -> BaseException | None:
        """The exception that the handler raised, or ``None``."""
        return self._error

    @property
    def history(self) -> tuple[WalkStep, ...]:
        """The yields and answers so far, in order."""
        return tuple(self._history)

    @property
    def location(self) -> str:
        """``file:line`` of the author's current yield; ``""`` after the end."""
        return "" if self.finished else find_waiting_line(self._steps, self._program)

    def send(self, answer: Any = ABSENT) -> Walk:
        """
        Answer the current yield, run to the next one, and return this walk.

        *answer* is a ``StepResult``, or shorthand for what was asked:

        - ``ToolCall``: a ``ToolResult``, a string for a text result, any other JSON value for a JSON result;
        - ``STEP``, ``STEP_ALL``, ``StepWith``: nothing, a string or ``ModelReply`` that the model says, or an ``AgentState``;
        - ``StepText``: nothing, or a list of results;
        - ``AgentCall``: a ``ChildResult``, or its output;
        - ``Perform``: its JSON value, or a ``PerformError``;
        - ``Ask``: a string, bool or ``Answer``;
        - ``GenerateN``: the texts;
        - ``Complete``: a string or ``ModelReply``;
        - ``Sleep``: nothing, or the date at which it woke; that is the time of the walk then;
        - ``Receive``: the message, which has to fit its schema, or ``None`` for its timeout;
        - ``Start``: nothing, for references that are made up, or a ``ChildRef`` for each call;
        - ``Wait``: how each child ended, in their order: an output, a ``ChildResult`` or an exception, for one child alone just
          that; a dict of these by ``ChildRef``, in the order in which they ended, without those that are still at work; or
          nothing where all are;
        - ``Send``: nothing, or whether the child is still at work;
        - ``Cancel``: nothing, or how the child had ended before;
        - ``Race``: a pair of the number of the first, from 0, and its shorthand;
        - ``Parallel``: a list with one shorthand per member; an exception for a member is what its entry then holds: a failed
          ``ToolResult`` or ``ChildResult``, or a ``PerformError``.

        Raises:
            DataError: when *answer* does not fit what was asked.
            AssertionError: when the handler has finished.
        """
        self._require_unfinished("send")
        now = self._context.now()
        result = make_step_result(self._asked, answer, YieldContext(self.state, now, self._children))
        self._history.append(WalkStep(self._asked, result))
        self.state = result.agent_state
        self._waited_ms += (compute_time_after_yield(self._asked, result.value, now) - now) // timedelta(milliseconds=1)
        self._children += len(self._asked.calls) if isinstance(self._asked, Start) else 0
        return self._run_to_next_yield(lambda: self._steps.send(result))

    def throw(self, error: BaseException) -> Walk:
        """
        Raise *error* at the current yield, run to the next one, and return this walk.

        Raises:
            BaseException: what the handler raises; *error* itself if it does not catch it.
            AssertionError: when the handler has finished.
        """
        self._require_unfinished("throw")
        self._history.append(WalkStep(self._asked, error))
        return self._run_to_next_yield(lambda: self._steps.throw(error))

    def fork(self) -> Walk:
        """
        Return a copy of this walk: the handler is started again and gets the same answers.

        Raises:
            ReplayDivergence: when it does not yield the same again, so that it depends on more than its answers.
        """
        other = Walk(*self._start, **self._options)
        for index, exchange in enumerate(self._history):
            _require_same_yield(self._handler_name, index, exchange.asked, other)
            other._send_or_throw_again(exchange)
        if self._error is None:
            _require_same_yield(self._handler_name, len(self._history), self._asked, other)
        return other

    def close(self) -> None:
        """Close the handler at its yield, as when a run ends there."""
        self._steps.close()
        self._kept.close_without_waiting()

    @property
    def _handler_name(self) -> str:
        return getattr(self._steps, "__qualname__", type(self._steps).__name__)

    def _send_or_throw_again(self, exchange: WalkStep) -> None:
        """Repeat a step of another walk: send its answer, or throw its error."""
        try:
            if isinstance(exchange.answer, StepResult):
                self.send(exchange.answer)
            else:
                self.throw(exchange.answer)
        except BaseException as error:
            # A walk whose handler raised has that error behind it; anything that is not the handler's own goes on.
            if error is not self._error:
                raise

    def _run_to_next_yield(self, resume: Callable[[], object]) -> Walk:
        """Call *resume*, do computations at once, and store the next yield, the return value or the error of the handler."""
        try:
            asked = resume()
            while isinstance(asked, Compute):
                asked = self._run_compute(asked)
            if type(asked) not in self._accepted:
                asked = self._throw_bad_yield_error(asked)
        except StopIteration as stop:
            self._asked = HandlerReturned(stop.value)
            self._kept.close_without_waiting()
        except BaseException as error:
            self._asked, self._error = None, error
            self._kept.close_without_waiting()
            raise
        else:
            self._asked = asked
        return self

    def _run_compute(self, compute: Compute) -> Any:
        """Do the work of a ``Compute`` at once, resume the handler with its result or error, and return the handler's next yield."""
        self._program = compute.program
        outcome = run_compute(compute, self._kept)
        if isinstance(outcome, Failure):
            return self._steps.throw(outcome.error)
        return self._steps.send(StepResult(self.state, value=freeze(outcome.value)))

    def _throw_bad_yield_error(self, unknown: object) -> Any:
        """Throw ``BadYield`` into the handler for each value that is not yieldable; return its first yieldable value."""
        asked = self._steps.throw(
            make_bad_yield_error(self._handler_name, unknown, self.location, format_yieldable_names(self._by))
        )
        return asked if type(asked) in self._accepted else self._throw_bad_yield_error(asked)

    def _require_unfinished(self, verb: str) -> None:
        """Raise an error if the handler has ended: there is no yield to *verb*."""
        if self.finished:
            how = f"raised {self._error!r}" if self._error else f"returned {self.returned!r}"
            msg = f"{self._handler_name} has {how}; there is no yield to {verb} to"
            raise AssertionError(msg)


class _NoteLogger:
    """A ``RunLogger`` that stores its lines."""

    def __init__(self, notes: list[HandlerNote]) -> None:
        self._notes = notes

    def debug(self, message: str, /, **data: object) -> None:
        """Store a note of the level ``debug``."""
        self._append_note("debug", message, data)

    def info(self, message: str, /, **data: Any) -> None:
        """Store a note of the level ``info``."""
        self._append_note("info", message, data)

    def warning(self, message: str, /, **data: object) -> None:
        """Store a note of the level ``warning``."""
        self._append_note("warning", message, data)

    def error(self, message: str, /, **data: Any) -> None:
        """Store a note of the level ``error``."""
        self._append_note("error", message, data)

    def _append_note(self, kind: str, message: str, data: dict[str, object]) -> None:
        """Store a note with its level, message and frozen data."""
        self._notes.append(HandlerNote(kind, message, freeze(data) if data else None))


def _get_handler_and_definition(
    handler: Any, params: Any
) -> tuple[Callable[[Any], Generator[object, Any, object]], AgentDefinition | None]:
    """Return the generator function of *handler*, and its definition if it has one; raise ``DefinitionError`` for no handler."""
    if isinstance(handler, Tool):
        return _make_tool_body(handler, params), None
    if not isinstance(handler, AgentDefinition):
        if isinstance(handler, str):
            msg = f"Walk takes a handler or an AgentDefinition, not {handler!r}; load_agent(id) returns the agent with an id"
            raise DefinitionError(msg)
        require_generator_handler(getattr(handler, "__name__", repr(handler)), handler)
        return handler, None
    if handler.handle_steps is None:
        msg = f"agent {handler.id!r} has no handle_steps to walk; it behaves as if its handler were `yield STEP_ALL`"
        raise DefinitionError(msg)
    return handler.handle_steps, handler


def _make_tool_body(tool: Tool, params: Any) -> Callable[[Any], Generator[object, Any, object]]:
    """Return a function that starts the body of a generator tool with *params* as input; raise ``DefinitionError`` for other tools."""
    binding = tool.binding()
    if not isinstance(binding.runs, Yielding):
        msg = f"tool {tool.name!r} does not yield, so there is nothing to walk; call its function, {tool.name}.fn(...)"
        raise DefinitionError(msg)
    begin, arguments = binding.runs.steps, binding.validate(freeze_object(params or {})).arguments
    return lambda ctx: begin(ctx, arguments)


def _convert_params(definition: AgentDefinition | None, params: object) -> object:
    """Return *params* as the pydantic model of the definition, else frozen if it is a dict, else unchanged; None is an empty object."""
    schema = definition.input_schema.params if definition and definition.input_schema else None
    if hasattr(schema, "model_validate") and not isinstance(params, schema):  # type: ignore[arg-type]
        return model_from_json(schema, freeze(params or {}, "params"))
    if params is None:
        return JsonDict()
    return freeze(params) if isinstance(params, dict) else params


def _require_same_yield(name: str, index: int, expected: object, walk: Walk) -> None:
    """Raise ``ReplayDivergence`` unless the yield of *walk* equals *expected*, which came after *index* answers."""
    if is_same_yield(expected, walk.asked):
        return
    where = f" ({walk.location})" if walk.location else ""
    now = f"raised {walk._error!r}" if walk._error else f"asked {walk.asked!r}{where}"  # noqa: SLF001
    msg = (
        f"{name} cannot be forked: after {index} answers it first asked {expected!r} and now {now}. "
        "A handler may depend only on its context and its answers"
    )
    raise ReplayDivergence(msg)


def is_same_yield(a: object, b: object) -> bool:
    """Return whether two yields are equal; functions of ``Perform`` are compared by name, since lambdas differ in every run."""
    if isinstance(a, Perform) and isinstance(b, Perform):
        return (a.name, a.args, a.kwargs, a.is_idempotent) == (b.name, b.args, b.kwargs, b.is_idempotent)
    if isinstance(a, Parallel) and isinstance(b, Parallel):
        return len(a.calls) == len(b.calls) and all(map(is_same_yield, a.calls, b.calls))
    if isinstance(a, Race) and isinstance(b, Race):
        return len(a.members) == len(b.members) and all(map(is_same_yield, a.members, b.members))
    if isinstance(a, AgentCall) and isinstance(b, AgentCall):
        return (a.agent_id, a.prompt, a.params) == (b.agent_id, b.prompt, b.params)
    return bool(a == b) and type(a) is type(b)
