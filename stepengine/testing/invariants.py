"""
The invariants of every run in every world: the checks of ``simulate``.

They look at what a run shows from outside - effects, events, the states that its handler is sent, its end - and build on
nothing that the machine itself uses to keep its promises.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from copy import copy
from functools import lru_cache
from operator import attrgetter
from typing import Any, NoReturn

import attrs

from stepengine.data.effects import (
    AskPerson,
    AwaitTime,
    CallBody,
    CallFunction,
    CallModel,
    CallTool,
    Compute,
    Effect,
    Gather,
    Leaf,
    Notify,
    RunInBackground,
    Spawn,
    summarize_effect,
)
from stepengine.data.events import PhaseChanged, StepFinished, StepStarted, ToolFinished
from stepengine.data.messages import AssistantMessage, Message, ToolMessage, ToolResult, UserMessage
from stepengine.data.models import ModelReply
from stepengine.data.outcomes import BodyEnd, Failure, Single, Stop, Value
from stepengine.data.state import AgentState, ChildResult, RunPhase, RunStatus
from stepengine.data.usage import Spending, Usage
from stepengine.data.visible import cut_after
from stepengine.data.waits import Awaited
from stepengine.data.yields import AgentCall, GenerateN, Parallel, StepResult, ToolCall
from stepengine.errors import (
    BadYield,
    HandlerError,
    LimitExceeded,
    LimitReached,
    StepEngineError,
    ToolInputError,
    ToolNotAvailable,
    TranscriptError,
)
from stepengine.machine.handler import default_handler
from stepengine.machine.plan import Finished, RunPlan
from stepengine.machine.protocol import BODY, FIRST, LAST, REFUSALS, STOPPED, compute_next_states, get_protocol_token

__tracebackhide__ = True  # a failed test ends at its author's line

WIDTH = 300


class Violation(Exception):
    """
    A run violates an invariant.

    Attributes:
        row: Which row: ``"I1"`` ... of the invariants, ``"I3"`` for a run that goes on otherwise after a crash, ``"R1"``
            for a run that does not end well, ``"handler"`` for a handler that let out an error of its own.
    """

    def __init__(self, row: str, message: str) -> None:
        super().__init__(f"{row}: {message}")
        self.row = row


def raise_violation(invariant_id: str, message: str) -> NoReturn:
    """
    Raise ``Violation`` for an invariant that does not hold.

    Raises:
        Violation: always.
    """
    raise Violation(invariant_id, message)


def find_pairing_problem(messages: Sequence[Message]) -> str | None:
    """Return the problem with calls and results in *messages*; ``None`` if all are paired (I1)."""
    seen: set[str] = set()
    waiting: list[str] = []
    for message in messages:
        if isinstance(message, ToolMessage):
            if not waiting or waiting[0] != message.tool_call_id:
                return f"a result for {message.tool_call_id!r} is where {waiting[:1] or 'none'} is expected"
            waiting.pop(0)
            continue
        if waiting:
            return f"calls {waiting} have no result"
        if isinstance(message, AssistantMessage):
            waiting = [call.tool_call_id for call in message.tool_calls]
            if len({*waiting}) < len(waiting) or seen & {*waiting}:
                return f"call ids {waiting} are used twice"
            seen.update(waiting)
    return f"calls {waiting} have no result" if waiting else None


def expect_same_end(invariant_id: str, when: str, finished: Finished, expected: Finished) -> None:
    """
    Raise ``Violation`` if two ends of the same run differ.

    Raises:
        Violation: naming the field that differs.
    """
    problem = _describe_difference("", finished, expected, "state") or _describe_difference(
        "state's ", finished.state, expected.state
    )
    if problem:
        raise_violation(invariant_id, f"{when}, {problem}")


def remove_request_counts(finished: Finished) -> Finished:
    """Return the end of a run without numbers of requests, which include requests that a crash interrupted."""
    children = [
        attrs.evolve(child, spending=_remove_spending_request_counts(child.spending)) for child in finished.children
    ]
    state = attrs.evolve(finished.state, usage=_remove_request_count(finished.state.usage))
    spending = _remove_spending_request_counts(finished.spending)
    return attrs.evolve(finished, spending=spending, children=tuple(children), state=state)


def _remove_request_count(usage: Usage) -> Usage:
    return attrs.evolve(usage, requests=0, at_least=False)


def _remove_spending_request_counts(spending: Spending) -> Spending:
    """Return *spending* without numbers of requests, and without agents and models that used no tokens."""
    by_agent = {key: _remove_request_count(used) for key, used in spending.by_agent.items() if used.total_tokens}
    by_model = {key: _remove_request_count(used) for key, used in spending.by_model.items() if used.total_tokens}
    return attrs.evolve(
        spending,
        usage=_remove_request_count(spending.usage),
        by_agent=by_agent,
        by_model=by_model,
        agent_costs={key: cost for key, cost in spending.agent_costs.items() if key in by_agent},
        model_costs={key: cost for key, cost in spending.model_costs.items() if key in by_model},
    )


def _describe_difference(prefix: str, current: Any, expected: object, *ignored: str) -> str:
    """Describe the first field, except *ignored*, in which two objects differ; ``""`` if there is none."""
    for field in attrs.fields(type(current)):
        name = field.name
        ours, theirs = getattr(current, name), getattr(expected, name)
        if name not in ignored and ours != theirs and (name != "error" or repr(ours) != repr(theirs)):
            return f"the {prefix}{name} of the run is {_shorten_repr(ours)}, but was {_shorten_repr(theirs)}"
    return ""


def _shorten_repr(value: object) -> str:
    """Return the ``repr`` of a value, cut with its length if it is long."""
    said = repr(value)
    return cut_after(said, WIDTH, f"... ({len(said)} characters)")


AUTHORS_ERRORS = (HandlerError, BadYield, ToolNotAvailable, ToolInputError)
LATER = (UserMessage("later"),) * 20
NUMBERS = tuple([field.name for field in attrs.fields(Usage) if field.name != "at_least"])
AT_THE_END = ("Finished", "HookFailed", "PhaseChanged:done", "PhaseChanged:failed")
_advanced = lru_cache(maxsize=4096)(compute_next_states)


@attrs.define(eq=False)
class WatchedRun:
    """
    One run under observation, from its plan to its end.

    Attributes:
        plan: The plan, with a watched handler.
        may_raise: The errors that the handler may raise.
        is_bare: Whether an agent without a handler runs as it is, instead of with a watched one that does the same.
        entered: How often its handler was entered.
        left: How often its handler was left.
        found: Violations inside the handler, which the next check of the machine raises.
    """

    plan: RunPlan
    may_raise: tuple[type[BaseException], ...] = ()
    is_bare: bool = False
    entered: int = 0
    left: int = 0
    found: list[Violation] = attrs.field(factory=list)
    _places: frozenset[str] = frozenset([FIRST])
    _next: int = 0
    _steps: int = 0
    _replied: bool = False
    _stop: Stop | None = None
    _states: list[tuple[AgentState, list[Message], list[Message]]] = attrs.field(factory=list)
    _used: Usage = Usage()
    _children: list[ChildResult] = attrs.field(factory=list)
    _told: set[str] = attrs.field(factory=set)
    _bodies: list[BodyEnd] = attrs.field(factory=list)
    _ran: list[ChildResult] = attrs.field(factory=list)
    _results: dict[str, ToolResult] = attrs.field(factory=dict)
    _inputs: list[UserMessage] = attrs.field(factory=list)
    _replaced: bool = False
    _is_over: bool = False
    _step: int | None = None
    _left_as: RunStatus | None = None
    _limit: LimitExceeded | None = None

    def __attrs_post_init__(self) -> None:
        definition, body = self.plan.agent.definition, self.plan.body
        if body is not None:
            self._places = frozenset([BODY])
            self.plan = _replace_field(
                self.plan, "body", _replace_field(body, "steps", self._watch_handler(body.steps))
            )
            return
        if definition.handle_steps is None and self.is_bare:
            return
        watched = self._watch_handler(definition.handle_steps or default_handler)
        agent = attrs.evolve(self.plan.agent, definition=_replace_field(definition, "handle_steps", watched))
        self.plan = attrs.evolve(self.plan, agent=agent)

    # --- the handler's side -------------------------------------------------------------------------------------------

    def _watch_handler(self, handler: Callable[[Any], object]) -> Callable[[Any], Generator[Any, Any, Any]]:
        """Return *handler* with its entries and exits counted and each value that it is sent checked."""

        def watched(ctx: Any) -> Generator[Any, Any, Any]:
            self.entered += 1
            self._check_and_store_state(ctx.agent_state)
            try:
                return (yield from _Spy(handler(ctx), self))
            finally:
                self.left += 1

        return watched

    def check_sent_result(self, yielded: object, result: object) -> None:
        """Store a violation if the result sent to the handler for the yield *yielded* does not match it."""
        if not isinstance(result, StepResult):
            return
        self._check_and_store_state(result.agent_state)
        if isinstance(yielded, ToolCall):
            names = [r.tool_name for r in result.tool_results]
            if names != [yielded.tool]:
                self._add_violation("I1", f"the handler's call of {yielded.tool!r} got results of {names}")
        self._check_sent_tool_results(result)
        if isinstance(yielded, Parallel) and len(result.value or ()) != len(yielded.calls):
            self._add_violation("I1", f"a Parallel of {len(yielded.calls)} got {len(result.value or ())} values")
        if isinstance(yielded, GenerateN) and len(result.n_responses) > yielded.n:
            self._add_violation("I1", f"{yielded.n} candidates were requested, but {len(result.n_responses)} returned")
        if isinstance(yielded, AgentCall) and getattr(result.value, "agent_id", None) is None:
            self._add_violation("I1", f"the child {yielded.agent_id!r} returned {result.value!r}")

    def check_thrown_error(self, error: BaseException) -> None:
        """Store a violation if the error thrown into the handler is a stop or another error that it must not see."""
        if not isinstance(error, StepEngineError | LimitReached | GeneratorExit):
            self._add_violation("I12", f"{error!r} was thrown into the handler, which must not see it")

    def _check_sent_tool_results(self, result: StepResult) -> None:
        """Store a violation for each sent tool result that differs from its outcome; runs with hooks are skipped."""
        for given in () if self.plan.agent.hooks else result.tool_results:
            due = self._results.get(given.tool_call_id)
            if due is not None and due.content != given.content:
                self._add_violation(
                    "I1", f"call {due.tool_call_id!r} returned {due.text!r}, but the handler received {given.text!r}"
                )

    def _check_and_store_state(self, state: AgentState) -> None:
        """Store *state* with copies of its messages, and a violation if calls lack results or usage or cost went back."""
        history, view = [*state.message_history], [*state.view]
        for messages in (history, view):
            problem = find_pairing_problem(messages)
            if problem:
                self._add_violation("I1", problem)
        if self._states:
            before = self._states[-1][0]
            if not _has_not_shrunk(before.usage, state.usage):
                self._add_violation("I4", f"usage went from {before.usage} to {state.usage}")
            if before.cost is None and state.cost is not None:
                self._add_violation("I4", "an unknown cost became known")
        self._states.append((state, history, view))

    def _add_violation(self, invariant_id: str, message: str) -> None:
        """Store a violation, which the next check of an effect raises."""
        # Raised later, outside of the handler: here it would arrive at the author's own yield.
        self.found.append(Violation(invariant_id, message))

    # --- the machine's side -------------------------------------------------------------------------------------------

    def check_and_track_effect(self, effect: Effect) -> None:
        """Raise ``Violation`` for an effect with a wrong number or in a wrong state; else advance the number and the state."""
        if self.found:
            raise self.found[0]
        self._advance_protocol_state(get_protocol_token(effect))
        if isinstance(effect, Notify):
            self._check_and_track_event(effect.event)
            return
        if isinstance(effect, Compute):
            return
        if self._stop is not None:
            raise_violation("I7", f"{get_protocol_token(effect)} was requested after the run was stopped")
        for leaf in effect.effects if isinstance(effect, Gather) else (effect,):
            if leaf.seq != self._next:
                raise_violation(
                    "I2", f"{get_protocol_token(leaf)} has the number {leaf.seq}, but {self._next} is expected"
                )
            self._next += 1

    def _check_and_track_event(self, event: object) -> None:
        """Raise ``Violation`` for an event that must not occur now, such as a step within a step; else track the current step."""
        if isinstance(event, ToolFinished) and event.tool_name == "set_messages" and not event.result.is_error:
            self._replaced = True
        if isinstance(event, StepFinished):
            self._check_and_store_step_end(event)
        if isinstance(event, StepStarted):
            if self._step is not None:
                raise_violation("I9", f"step {event.step} started while step {self._step} was running")
            self._step = event.step
            self._replied = False
            limit = self.plan.limits.max_steps
            if limit is not None and self._steps >= limit:
                raise_violation("I8", f"a step started after {self._steps} of {limit} allowed steps")
        if isinstance(event, PhaseChanged) and event.phase in (RunPhase.DONE, RunPhase.FAILED):
            self._is_over = True
            self.expect_handler_closed()
            if self._step is not None:
                raise_violation("I9", f"the run has ended, but step {self._step} has not")

    def _check_and_store_step_end(self, event: StepFinished) -> None:
        """End the current step, and store the status of a stopped one; raise ``Violation`` for another step or status."""
        if event.step != self._step:
            raise_violation("I9", f"step {event.step} ended while step {self._step} was running")
        self._step = None
        if self._stop is not None:
            self._left_as = event.status
        elif event.status not in (RunStatus.COMPLETED, RunStatus.FAILED):
            raise_violation("I9", f"step {event.step} ended as {event.status.value}, but nothing stopped it")

    def expect_handler_closed(self) -> None:
        """Check that every handler that was entered was left once (I6)."""
        if self.entered != self.left or self.entered > 1:
            raise_violation("I6", f"the handler was entered {self.entered} times and left {self.left} times")

    def _advance_protocol_state(self, token: str) -> None:
        """Set the states that are possible after the effect or event *token*; raise ``Violation`` if there are none."""
        before, self._places = self._places, _advanced(self._places, token)
        if not self._places:
            over = self._is_over and token not in AT_THE_END
            raise_violation(
                "I7" if over else "I9", f"{token} must not occur in the state {' or '.join(sorted(before))}"
            )

    def track_outcomes(self, effects: Iterable[Leaf], outcomes: Iterable[Single]) -> None:
        """Add the outcomes of effects to the totals, store a stop or an exceeded limit, and advance the protocol state."""
        kinds = set()
        for effect, outcome in zip(effects, outcomes, strict=True):
            kinds.add(type(outcome).__name__)
            self._add_outcome_to_totals(effect, outcome)
            if isinstance(outcome, Stop):
                self._stop = outcome
                continue
            self._inputs.extend(outcome.inputs)
            if isinstance(outcome, Failure) and isinstance(outcome.error, LimitExceeded) and outcome.error.more is None:
                self._limit = self._limit or (None if outcome.error.kind in REFUSALS else outcome.error)
        if self._stop is not None:
            self._places = frozenset([STOPPED])
        elif self._places <= {"asking", "asking_last"}:
            self._advance_protocol_state(*kinds)

    def _collect_and_mark_child_results(self, awaited: object) -> list[ChildResult]:
        """Return the results of background children that were not reported to the run yet, and mark them as reported."""
        if not isinstance(awaited, Awaited):
            return []
        news = [path for path in awaited.done if path not in self._told]
        self._told.update(news)
        return [awaited.ended[path] for path in news]

    def _add_outcome_to_totals(self, effect: Leaf, outcome: Single) -> None:
        """Add usage, steps, children, inputs and results of an outcome to those that the end of the run must report."""
        child = outcome.child if isinstance(outcome, Stop) else getattr(outcome, "value", None)
        body = None if isinstance(outcome, Failure) else outcome.body
        if body is not None:
            self._bodies.append(body)
            self._ran += body.children
            self._inputs += [change for change in body.changes if isinstance(change, UserMessage)]
        ended = [child] if isinstance(child, ChildResult) else self._collect_and_mark_child_results(child)
        self._children += ended
        self._ran += ended
        if isinstance(effect, CallModel):
            used = outcome.value.usage if isinstance(outcome, Value) else None
            if isinstance(outcome, Failure):
                used = getattr(outcome.error, "usage", None)
            if effect.purpose == "step" and isinstance(outcome, Value) and not self._replied:
                # A step whose call failed does not count (reliability:MP01).
                self._replied = True
                self._steps += 1
            used = used or Usage()
            self._used = self._used + attrs.evolve(used, requests=used.requests or int(isinstance(outcome, Value)))
        elif isinstance(effect, CallTool):
            self._replaced = self._replaced or bool(getattr(getattr(outcome, "value", None), "change", None))
            if isinstance(outcome, Value):
                self._results[effect.tool_call_id] = outcome.value

    # --- the end ------------------------------------------------------------------------------------------------------

    def check_end(self, finished: Finished) -> None:
        """
        Check the end of the run.

        Raises:
            Violation: when something does not hold.
        """
        self._advance_protocol_state("Finished")
        if self._places != {LAST}:
            raise_violation("I9", f"the run ended in the state {' or '.join(sorted(self._places))}")
        self._check_and_store_state(finished.state)
        if self.found:
            raise self.found[0]
        self.expect_handler_closed()
        self._check_end_status(finished)
        self._check_usage_and_children(finished)
        self._check_history_results(finished.state.message_history)
        self._check_old_states_unchanged()
        self._check_handler_error(finished)

    def _check_end_status(self, finished: Finished) -> None:
        """Raise ``Violation`` if the status of the end does not fit the stop, the limit or the error of the run."""
        if isinstance(finished.error, TranscriptError):
            raise_violation("I1", f"calls and results in the history of the run do not match: {finished.error}")
        due = {"suspended": RunStatus.SUSPENDED, "cancelled": RunStatus.CANCELLED, "shutdown": RunStatus.CANCELLED}
        if self._stop is not None and finished.status is not due[self._stop.kind]:
            raise_violation("I12", f"the run was stopped ({self._stop.kind}) but ended as {finished.status.value}")
        limited = (RunStatus.FAILED, RunStatus.MAX_STEPS)
        if self._left_as not in (None, finished.status):
            raise_violation("I12", f"a stopped step ended as {self._left_as}, but its run as {finished.status.value}")
        if self._stop is None and self._limit is not None and finished.status not in limited:
            raise_violation("I8", f"the run exceeded a limit ({self._limit.kind}) but ended as {finished.status.value}")
        if (finished.status is RunStatus.FAILED) != (finished.error is not None) and self._stop is None:
            raise_violation("R1", f"the run ended as {finished.status.value} with the error {finished.error!r}")

    def _check_usage_and_children(self, finished: Finished) -> None:
        """Raise ``Violation`` if the usage or the children that a run reports are not those that were observed."""
        spent = finished.spending
        below = [child.spending for child in self._children] + [body.spending for body in self._bodies]
        due = sum([spending.usage for spending in below], self._used)
        for told, usage in (
            ("usage", spent.usage),
            ("usage of the state", finished.state.usage),
            ("sum by model", sum(spent.by_model.values(), Usage())),
            ("sum by agent", sum(spent.by_agent.values(), Usage())),
        ):
            if _numbers(usage) != _numbers(due):
                raise_violation("I10", f"the {told} is {usage}, but {due} was used")
        # A child that was refused is told of as well; it has no run.
        listed = [child for child in finished.children if child.run_id]
        ran = [child for child in self._ran if child.run_id]
        if listed != ran:
            raise_violation("I10", f"{len(ran)} children ran, but the run reports {len(listed)}")

    def _check_history_results(self, history: Iterable[Message]) -> None:
        """Raise ``Violation`` for a wrong tool result or a lost input in *history*; skip runs with hooks, replaced messages or a body."""
        if self.plan.agent.hooks or self._replaced or self.plan.body is not None:
            return
        messages = [*history]
        for message in messages:
            due = self._results.get(message.tool_call_id) if isinstance(message, ToolMessage) else None
            if due is not None and (message.content, message.status) != (due.content, due.status):  # type: ignore[union-attr]
                raise_violation(
                    "I1",
                    f"call {due.tool_call_id!r} returned {due.text!r}, but its result in the history is {message.text!r}",
                )
        held = Counter([message.text for message in messages])
        for sent, times in Counter([message.text for message in self._inputs]).items():
            if held[sent] != times:
                raise_violation("R1", f"{sent!r} was sent to the run but is not in its history")

    def _check_old_states_unchanged(self) -> None:
        """Append to every stored state; raise ``Violation`` if a state has changed since it was seen (I5)."""
        for state, _, _ in self._states:
            state.message_history.extend(LATER)
            state.view.extend(LATER)
        for state, history, view in self._states:
            if [*state.message_history] != history or [*state.view] != view:
                raise_violation("I5", f"a state of step {state.step_index} has changed since it was seen")

    def _check_handler_error(self, finished: Finished) -> None:
        """Raise ``Violation`` if the run ended with an error of its handler that is not in ``may_raise``."""
        error = finished.error
        if isinstance(error, AUTHORS_ERRORS) and not isinstance(error.__cause__ or error, self.may_raise):
            raise_violation("handler", str(error))


class Unwatched(WatchedRun):
    """A repeated run, of which only the effects and the end are compared."""

    def __attrs_post_init__(self) -> None:
        pass

    def check_and_track_effect(self, effect: Effect) -> None:
        """Do nothing."""

    def track_outcomes(self, effects: Iterable[Leaf], outcomes: Iterable[Single]) -> None:
        """Do nothing."""

    def check_end(self, finished: Finished) -> None:
        """Do nothing."""


def _replace_field(frozen: object, name: str, value: object) -> Any:
    """Return a copy of an immutable object with one field replaced, without its validators."""
    copied = copy(frozen)
    object.__setattr__(copied, name, value)
    return copied


class _Spy:
    """A wrapper around a handler's generator that checks the values sent to it; its frames remain visible to the machine."""

    def __init__(self, steps: Any, run: WatchedRun) -> None:
        self._steps = steps
        self._run = run
        self._asked: Any = None

    @property
    def gi_frame(self) -> Any:
        """The frame of the watched generator."""
        return self._steps.gi_frame

    @property
    def gi_yieldfrom(self) -> Any:
        """The iterator to which the watched generator delegates."""
        return self._steps.gi_yieldfrom

    def __iter__(self) -> _Spy:
        return self

    def __next__(self) -> object:
        self._asked = next(self._steps)
        return self._asked

    def send(self, value: Any) -> Any:
        """Check *value*, send it to the generator, and return its next yield."""
        self._run.check_sent_result(self._asked, value)
        self._asked = self._steps.send(value)
        return self._asked

    def throw(self, *error: Any) -> Any:
        """Check an error, throw it into the generator, and return its next yield."""
        self._run.check_thrown_error(error[0])
        self._asked = self._steps.throw(*error)
        return self._asked

    def close(self) -> None:
        """Close the watched generator."""
        self._steps.close()


_numbers: Callable[[Usage], tuple[int, ...]] = attrgetter(*NUMBERS)


def _has_not_shrunk(before: Usage, after: Usage) -> bool:
    """Return whether no number in *after* is below that in *before*."""
    return all(a <= b for a, b in zip(_numbers(before), _numbers(after), strict=True))


# --- what is told of effects and outcomes, one line each ---------------------------------------------------------------

TOLD_WIDTH = 100


def format_address(at: tuple[str, int]) -> str:
    """Return an effect's path and number as ``path:number``; the number alone for the root run."""
    return f"{at[0]}:{at[1]}" if at[0] else str(at[1])


def describe_effect(effect: Leaf) -> str:
    """Describe an effect in one line."""
    return _shorten_line(SHOWN.get(type(effect), summarize_effect)(effect))


def _describe_tool_call(effect: CallTool) -> str:
    """Return name, input and source of a tool call on one line."""
    return f"tool {effect.tool_name} {effect.input!r} ({effect.source})"


SHOWN: Mapping[type[Leaf], Callable[[Any], str]] = {
    CallModel: lambda effect: f"model {effect.purpose}, {len(effect.request.messages)} messages",
    CallTool: _describe_tool_call,
    CallBody: _describe_tool_call,
    Spawn: lambda effect: f"agent {effect.agent_id} {effect.prompt!r}",
    CallFunction: lambda effect: f"perform {effect.call.name}{effect.call.args!r}",
    AskPerson: lambda effect: f"ask {', '.join([repr(question.text) for question in effect.questions])}",
    AwaitTime: lambda effect: (
        f"sleep until {effect.until}" if effect.seconds is None else f"sleep {effect.seconds:g} s"
    ),
    RunInBackground: lambda effect: f"end of the agent {effect.agent_id}",
}
"""The request of an effect, in a line of the report, where it is not said by its row."""


def describe_outcome(outcome: Single) -> str:
    """Describe an outcome in one line."""
    if isinstance(outcome, Stop):
        return f"stop: {outcome.kind}"
    if isinstance(outcome, Failure):
        return _shorten_line(f"{type(outcome.error).__name__}: {outcome.error}")
    value = outcome.value
    if isinstance(value, ModelReply):
        return _shorten_line(" ".join([p for p in (value.text, *[f"[{c.tool_name}]" for c in value.tool_calls]) if p]))
    if isinstance(value, ToolResult):
        return _shorten_line(f"{value.status}: {value.text}")
    if isinstance(value, Awaited):
        return _shorten_line(f"ended: {', '.join(value.done) or 'none'}; at work: {', '.join(value.open) or 'none'}")
    return _shorten_line(f"{value.status.value}: {value.text}" if isinstance(value, ChildResult) else repr(value))


def _shorten_line(text: str) -> str:
    """Return a text on one line, cut if it is long."""
    text = text.replace("\n", "\\n")
    return cut_after(text, TOLD_WIDTH)
