"""
``run_agent``: one run from its first message to its end.

A generator outside, the author's generator inside. It yields effects, is sent their outcomes, and returns ``Finished``.
Whatever happens, the handler is closed before the end of the run is told, and every tool call has one result.
"""

from __future__ import annotations

import json
import math
import traceback
from collections.abc import Callable, Generator
from functools import partial
from types import GeneratorType
from typing import Any, NamedTuple, TypeVar, assert_never, cast

from stepengine.data import events as ev
from stepengine.data.effects import RUNS, WAITS, AskPerson, Effect, Gather, Notify, Spawn, get_program_line
from stepengine.data.hooks import StepContext
from stepengine.data.json import compact, thaw
from stepengine.data.messages import TextPart, UserMessage
from stepengine.data.outcomes import Failure, Gathered, Outcome, Stop
from stepengine.data.record_sizes import cut_error_texts
from stepengine.data.state import (
    AgentState,
    ChildResult,
    RunPhase,
    RunStatus,
    join_run_and_child_warnings,
    mark_suspended_as_cancelled,
)
from stepengine.data.tools import format_timeout_text
from stepengine.errors import HandlerError, LimitExceeded, LimitReached, StepEngineError, ToolError
from stepengine.machine import hooks
from stepengine.machine.author import Author, make_handler_error
from stepengine.machine.background import NO_CHILDREN
from stepengine.machine.calls import end_or_await_children
from stepengine.machine.ceilings import ask_to_raise_limits
from stepengine.machine.child_effects import qualify_with_publisher
from stepengine.machine.control import HANDLER_ONLY, collect_offered_specs
from stepengine.machine.final_output import get_final_output, get_final_text, set_or_request_output
from stepengine.machine.handler import run_handler, run_without_handler
from stepengine.machine.placeholders import fill_prompt_text, fill_system_prompt
from stepengine.machine.plan import Finished, RunPlan, ToolBody
from stepengine.machine.protocol import Flow
from stepengine.machine.signals import Abort, Stopped, belongs_to_caller, status_from_stop
from stepengine.machine.state import BodyProgress, RunState

T = TypeVar("T")


class _Ending(NamedTuple):
    """Why a run ends."""

    status: RunStatus
    error: BaseException | None = None
    stop: Stop | None = None
    output: Any = None
    was_returned: bool = False
    text: str | None = None


class Machine(Generator[Effect, Outcome | None, Finished]):
    """
    One run: a generator of effects that also reports the location at which the run waits. ``run_agent`` creates it.

    Attributes:
        send: Sends the outcome of an effect and returns the next effect.
        throw: Closes the run and raises the exception again; there is no next effect.
        close: Closes the run.
    """

    __slots__ = ("__weakref__", "_run", "close", "send", "throw")

    send: Callable[[Outcome | None], Effect]
    throw: Any
    close: Callable[[], None]

    def __init__(self, run: RunState, flow: Flow[Finished]) -> None:
        self._run = run
        # The generator's own methods: a method of this class would be one more call for each effect.
        self.send, self.throw, self.close = flow.send, flow.throw, flow.close

    @property
    def author_stack(self) -> tuple[Author, ...]:
        """The running generators of the agent's code, outermost first: handler or tool body, then the hook or tool it waits for."""
        return tuple(self._run.progress.author_stack)

    @property
    def state(self) -> AgentState:
        """The state of the run at this moment."""
        return self._run.snapshot.state()

    @property
    def location(self) -> str:
        """
        The location where the author's code waits, or ``""``.

        That is ``file:line`` of the innermost handler, tool or hook; for a program that a model wrote, its line.
        """
        if self._run.progress.program_position is not None:
            text, line = self._run.progress.program_position
            return f"line {line} of the program: {get_program_line(text, line)}"
        return next((found for author in reversed(self._run.progress.author_stack) if (found := author.location)), "")


def run_agent(plan: RunPlan, state: AgentState) -> Machine:
    """
    Run an agent: return its machine, a generator of effects that is sent their outcomes.

    Args:
        plan: The plan of the run.
        state: The state that the run starts from: identity, inherited or previous history, system prompt.

    Yields:
        Effects; the caller sends one outcome per effect, ``Gathered`` for a ``Gather``, and ``None`` for a ``Notify``.

    Returns:
        The end of the run. Errors of the author's code do not make the machine raise, except those for its caller, such as
        ``KeyboardInterrupt``. The handler is closed in each case.
    """
    run = RunState(plan, state, collect_offered_specs(plan))
    # Outermost, so that the events that it shows itself, which are most of a watched run's, pass nobody else.
    return Machine(run, relay_effects(run, _run_agent(run) if plan.body is None else _run_body(run, plan.body)))


def _run_agent(run: RunState) -> Flow[Finished]:
    """Run an agent from ``RunStarted`` to its end, with all hooks; return how it ended."""
    plan = run.plan
    started = ev.RunStarted(
        path=plan.path,
        own_id=plan.run_id,
        agent_id=plan.agent.definition.id,
        prompt=plan.input.prompt,
        params=plan.input.json,
    )
    if not plan.path and plan.host.set_history is not None:
        plan.host.set_history(lambda: run.history.record)
    try:
        yield Notify(started)
        ending = yield from _run_to_end(run)
        return (yield from _finish_run(run, ending))
    finally:
        run.side_events.close()


def _run_body(run: RunState, body: ToolBody) -> Flow[Finished]:
    """
    Run the body of a tool: like a handler, without prompt, history, steps and output of its own.

    Its start and end are not events, since those of its call are. Hooks and policies see the calls that it makes.
    """
    done = cast("BodyProgress", run.body)
    try:
        run.progress.mark_started()
        ending = yield from _run_with_time_limit(run, body, _run_body_to_end(run, body))
        if run.children.background is not NO_CHILDREN:
            ending = yield from _end_children(run, ending)
        if ending.stop is not None and ending.status is RunStatus.SUSPENDED:
            run.questions.pending = ending.stop.questions
        if run.side_events.waiting:
            yield from map(Notify, run.side_events.pop_waiting_events())
        if run.history.inbox:
            # What was sent to the body belongs to the conversation of its caller.
            done.changes.extend(run.history.pop_inbox_messages())
        return _make_finished(run, ending)
    finally:
        run.side_events.close()


def _run_with_time_limit(run: RunState, body: ToolBody, flow: Flow[T]) -> Flow[T]:
    """
    Run *flow* and return its result; throw a ``ToolError`` into it once its work takes longer than the tool's time limit.

    Waits for people and children do not count. The limit is checked before each effect, by the recorded time, so that a replay
    ends the body at the same effect. A running effect is not cancelled; it has its own limits.
    """
    if math.isinf(body.timeout):
        return (yield from flow)
    worked, limit = 0, body.timeout * 1_000
    try:
        effect = flow.send(None)
        while True:
            if worked > limit and run.effects.stop is None and not isinstance(effect, Notify):
                msg = f"{format_timeout_text(body.tool_name, body.timeout)} of work"
                effect = flow.throw(ToolError(msg, tool_name=body.tool_name))
                continue
            began = run.effects.now
            try:
                resume = partial(flow.send, (yield effect))
            except GeneratorExit:
                raise
            # A stop, or an error of the effect: raised where the body waits, as without a time limit.
            except BaseException as error:  # noqa: BLE001
                resume = partial(flow.throw, error)
            worked += 0 if _is_waiting_effect(effect) else run.effects.now - began
            effect = resume()
    except StopIteration as stop:
        returned: T = stop.value
        return returned
    finally:
        flow.close()


NO_WORK = (AskPerson, *RUNS, *WAITS)


def _is_waiting_effect(effect: Effect) -> bool:
    """Return whether an effect, or a member of a group, waits for a person, a time, a message or a run: no work of the body."""
    members = effect.effects if isinstance(effect, Gather) else (effect,)
    return any(isinstance(member, NO_WORK) for member in members)


def _run_body_to_end(run: RunState, body: ToolBody) -> Flow[_Ending]:
    """Run the generator of a tool's body and return how it ended; an error is logged and gives ``FAILED``."""
    what = f"the tool {body.tool_name!r}"
    try:
        author = Author(what, _start_author_generator(what, body.steps, _make_step_context(run)), by="tool")
        returned = yield from run_handler(run, author)
    except Stopped as stopped:
        return _ending_from_stop(stopped.stop)
    except (Abort, LimitReached) as spent:
        return _Ending(RunStatus.FAILED, spent.error)
    except StepEngineError as error:
        _log_body_failure(run, body, error)
        return _Ending(RunStatus.FAILED, error)
    return _Ending(RunStatus.COMPLETED, output=returned)


def _log_body_failure(run: RunState, body: ToolBody, error: StepEngineError) -> None:
    """Log the traceback of a body's exception; the caller of the tool gets only the message."""
    cause = (isinstance(error, HandlerError) and error.__cause__) or error
    log = run.side_events.debug if isinstance(cause, ToolError) else run.side_events.error
    trace = "".join(traceback.format_exception(cause))
    log(f"tool {body.tool_name!r} raised {type(cause).__name__}", traceback=trace)


def relay_effects(run: RunState, flow: Flow[T]) -> Flow[T]:  # noqa: C901 - one loop, so that an effect passes one generator
    """
    Run *flow*, pass its effects to the driver and the outcomes back; return its result.

    Queued events are shown before the next event or effect, and the new phase of the run before an effect. The state of the run is
    updated from an outcome before *flow* receives it. After a stop no effect is passed on: ``Stopped`` is raised in *flow* instead.
    """
    # The one place where the machine meets the world. Whoever needs something yields it here through any number of
    # `yield from`s, so no part of the machine has to know how events are shown, time is kept or a stop is handled.
    try:
        effect = flow.send(None)
        while True:
            is_shown = isinstance(effect, Notify)
            # After a stop nothing is handed out. It is raised where the part of the machine asks, so that each
            # `finally` and `except Stopped` on the way out gives its calls a result.
            if run.effects.stop is not None and not is_shown:
                effect = flow.throw(Stopped(run.effects.stop))
                continue
            # What a handler or tool said before this effect is shown before it, in the order in which it happened.
            if run.side_events.waiting or (not is_shown and run.plan.host.is_watched()):
                yield from map(Notify, run.side_events.enter_phase_and_pop_events(effect))
            outcome = yield effect
            if is_shown:
                effect = flow.send(None)
                continue
            try:
                # A spent limit may ask a person for more, which is an effect of its own: so it is looked at here,
                # before anybody takes the failure for the end.
                if isinstance(outcome, Failure) or (
                    isinstance(outcome, Gathered) and Failure in map(type, outcome.outcomes)
                ):
                    outcome = yield from ask_to_raise_limits(run, effect, outcome)  # type: ignore[arg-type]  # it is not shown
                received = run.effects.record_outcome(outcome, effect)  # type: ignore[arg-type]
                if run.effects.sources is not None:
                    run.effects.sources.add_outcome(effect, received)  # type: ignore[arg-type]
            except StepEngineError as error:
                effect = flow.throw(error)
            else:
                effect = flow.send(received)
    except StopIteration as stop:
        returned: T = stop.value
        return returned
    finally:
        flow.close()


def _run_to_end(run: RunState) -> Flow[_Ending]:
    """Run to the end and return how it ended; the handler is closed when this returns."""
    try:
        yield from _prepare_history(run)
        if run.plan.agent.hooks.pre_run:
            yield from hooks.call_pre_run_hooks(run)
        run.progress.mark_started()
        returned = yield from (
            run_without_handler(run)
            if run.plan.agent.definition.handle_steps is None
            else run_handler(run, _make_handler_author(run))
        )
        if run.children.successor is not None and run.budget.reached is None:
            _warn_of_dropped_output(run, returned, run.children.successor)
            return (yield from _run_successor(run, run.children.successor))
        yield from set_or_request_output(run, returned)
    # The order of these is that of what is stronger: a stop from outside, a hook that aborts, a spent limit, and last
    # an error.
    except Stopped as stopped:
        return _ending_from_stop(stopped.stop)
    except Abort as abort:
        return _Ending(RunStatus.FAILED, abort.error)
    except LimitReached as reached:
        return _ending_from_limit(run, reached.error)
    except StepEngineError as error:
        return _ending_from_error(run, error)
    # A handler may catch the signal of a spent limit and return in peace; the status still says what happened.
    if run.budget.reached is not None:
        return _ending_from_limit(run, run.budget.reached, returned)
    return _ending_with_output(run, RunStatus.TRUNCATED if run.progress.truncated else RunStatus.COMPLETED, returned)


def _warn_of_dropped_output(run: RunState, returned: object, agent_id: str) -> None:
    """Warn that the value that a handler *returned* is ignored, because *agent_id* takes over the run."""
    # A handler that returns the text of the turn, which is empty where the model only called `hand_off`, loses nothing.
    if returned is None or (isinstance(returned, str) and not returned):
        return
    own = run.plan.agent.definition.id
    run.side_events.warn_once(
        f"agent {own!r} handed the conversation over to {agent_id!r}, whose output is the output of the run; the value that handle_steps of "
        f"{own!r} returned is ignored. turn.agent_state.handed_to names the other agent; to use its output, call it with AgentCall(...)"
    )


def _run_successor(run: RunState, agent_id: str) -> Flow[_Ending]:
    """
    Run another agent that continues the conversation; the run ends with its output.

    Raises:
        Stopped: when the run is stopped meanwhile, such as for a question of the other agent.
        StepEngineError: when the other agent could not start.
    """
    # An effect with a number, as of any child: recorded, resumed and replayed as these are.
    known = None if run.effects.sources is None else run.effects.sources.make_body_provenance()
    effect = Spawn(
        run.effects.allocate_number(),
        agent_id,
        parent=run.snapshot.make_inherited_state,
        is_inline=True,
        at=run.effects.now,
        provenance=known,
    )
    outcome: Any = yield effect
    if isinstance(outcome, Stop) and outcome.child is not None:
        run.children.record_successor_end(outcome.child.left)
    child: ChildResult = run.effects.unwrap(outcome)
    run.spent.count_child(child)
    if child.left is not None:
        run.children.record_successor_end(child.left)
        run.apply_inline_child(child.left.state)
        # It may have handed the conversation on, and then the next message is for that agent.
        handed_to = child.left.state.handed_to
        run.children.record_hand_over(agent_id if handed_to is None else qualify_with_publisher(agent_id, handed_to))
    error = child.error
    if child.status is RunStatus.FAILED and error is None:
        error = StepEngineError(f"agent {agent_id!r}, to which the conversation was handed over, failed")
    return _Ending(child.status, error, output=child.output, text=child.text)


def _ending_from_stop(stop: Stop) -> _Ending:
    """Return the ending of a stopped run; one that failed without an error gets one."""
    status, error = status_from_stop(stop), stop.error
    if status is RunStatus.SUSPENDED:
        return _Ending(status, stop=stop)
    if status is RunStatus.FAILED:
        error = error or StepEngineError(f"the run was stopped: {stop.kind}")
    return _Ending(status, error, stop)


def _ending_from_error(run: RunState, error: StepEngineError) -> _Ending:
    """Return the ending of a failed run; if a limit was reached before, that is the reason and the error a warning."""
    if run.budget.reached is None:
        return _Ending(RunStatus.FAILED, error)
    run.side_events.add_warnings(error.message)
    return _ending_from_limit(run, run.budget.reached)


def _ending_from_limit(run: RunState, error: LimitExceeded, returned: object = None) -> _Ending:
    """
    Return the ending of a run with a spent budget; the handler's return value is kept.

    Spent steps give ``MAX_STEPS``, unless ``on_max_steps`` is ``"raise"``. Every other limit gives ``FAILED``.
    """
    if error.kind == "steps" and run.budget.limits.on_max_steps != "raise":
        return _ending_with_output(run, RunStatus.MAX_STEPS, returned)
    if returned is None:
        return _Ending(RunStatus.FAILED, error)
    return _ending_with_output(run, RunStatus.FAILED, returned, error)


def _ending_with_output(
    run: RunState, status: RunStatus, returned: object, failure: LimitExceeded | None = None
) -> _Ending:
    """Remove expired messages and return an ending with the final output; ``FAILED`` if that has an error."""
    _remove_expired_at_end(run, status)
    try:
        return _Ending(status, failure, output=get_final_output(run, returned), was_returned=returned is not None)
    except HandlerError as error:
        return _Ending(RunStatus.FAILED, failure or error)


def _prepare_history(run: RunState) -> Flow[None]:
    """
    Fill the system prompt, then append the user message and the instructions; a reopened step gets no instructions.

    Tools that only handlers may call, but the agent offers to its model, give a warning.
    """
    plan = run.plan
    if plan.agent.placeholders is not None:
        yield from fill_system_prompt(run, plan.agent.placeholders)
    unoffered = tuple(filter(plan.agent.offered.__contains__, HANDLER_ONLY))
    if unoffered:
        listed = " and ".join(unoffered)
        has_handler = run.plan.agent.definition.handle_steps is not None
        remedy = "its handler can still call it" if has_handler else "the agent has no handler"
        run.side_events.warn_once(
            f"agent {run.plan.agent.definition.id!r} lists {listed} in tools=, but only handlers may call it, so no model sees it; "
            f"leave it out: {remedy}"
        )
    added: list[UserMessage] = []
    content = "\n\n".join(filter(str.strip, (plan.input.prompt, _format_params(plan))))
    if content:
        added.append(UserMessage((TextPart(content),), ("USER_PROMPT",)))
    # A run that goes on with an open step has its instructions in the history already, before that step; a second copy
    # would stand between a call and its result.
    if (
        run.questions.waiting
        and run.plan.agent.definition.handle_steps is None
        and run.history.reopen_suspended_step(added)
    ):
        # The instructions stand before it; what is said now follows the answer.
        return
    instructions = _render_instructions(run)
    if instructions:
        added.append(UserMessage(instructions, ("INSTRUCTIONS_PROMPT",)))
    run.history.append_opening(added)


def _format_params(plan: RunPlan) -> str:
    """Return the params as indented JSON, or ``""`` without any."""
    return json.dumps(thaw(plan.input.json), indent=2, ensure_ascii=False) if plan.input.json else ""


def _render_instructions(run: RunState) -> str:
    """Return the filled instructions, the note of the plan and, with either, the output schema; ``""`` without any."""
    plan, agent = run.plan, run.plan.agent
    text, schema = fill_prompt_text(run, agent.definition.instructions_prompt), agent.output_schema
    parts = [text, plan.note]
    if schema is not None and (text or plan.note):
        note = "The output of set_output must fit this JSON Schema; its fields may stand at the top level or inside `data`:"
        parts.append(f"{note}\n{compact(schema.json_schema)}")
    return "\n\n".join(filter(None, parts))


def _make_handler_author(run: RunState) -> Author:
    """Create the generator of ``handle_steps`` and return it as an ``Author``; none of its code runs yet."""
    what = f"handle_steps of agent {run.plan.agent.definition.id!r}"
    return Author(
        what,
        _start_author_generator(what, run.plan.agent.definition.handle_steps, _make_step_context(run)),
        by="handler",
    )


def _start_author_generator(author_name: str, handler: Any, ctx: StepContext) -> Any:
    """Call *handler* with *ctx* and return its generator; an error of its own, or another value, raises ``HandlerError``."""
    try:
        steps = handler(ctx)
    except BaseException as error:
        if belongs_to_caller(error):
            raise
        raise make_handler_error(author_name, error) from error
    if not isinstance(steps, GeneratorType):
        msg = f"{author_name} did not yield: it returned a {type(steps).__name__} instead of a generator"
        raise HandlerError(msg, kind="TypeError")
    return steps


def _make_step_context(run: RunState) -> StepContext:
    plan = run.plan
    return StepContext(
        prompt=plan.input.prompt,
        params=plan.input.params,
        agent_state=run.output.with_decoded_output(run.snapshot.state()),
        model=plan.model,
        logger=run.side_events,
        random=plan.random,  # type: ignore[arg-type]  # whoever plans for a handler gives one
        created=plan.created,
        elapsed=lambda: run.effects.now,
        notify=run.side_events.notify,
        is_asked=bool(plan.input.prompt.strip() or plan.input.json),
    )


def _finish_run(run: RunState, ending: _Ending) -> Flow[Finished]:
    """End background children, append unread messages, emit the end events, call the ``post_run`` hooks and return the end of the run."""
    if run.children.background is not NO_CHILDREN:
        ending = yield from _end_children(run, ending)
    # Said too late to be answered, but said: the next run of the conversation reads it.
    if run.history.inbox:
        run.history.append_inbox()
    _remove_expired_at_end(run, ending.status)
    if ending.error is not None:
        cut_error_texts(ending.error)
        for problem in run.side_events.problems:
            ending.error.add_note(problem)
    yield from _emit_end_or_suspend(run, ending)
    if run.plan.agent.hooks.post_run:
        stop = yield from hooks.call_post_run_hooks(run, _make_finished(run, ending))
        # A `post_run` hook may do I/O, and the run may be stopped in it: then it ends as stopped, though its handler
        # had returned.
        if stop is not None and ending.stop is None:
            kept = ending.output if stop.kind == "limit" and ending.was_returned else None
            ending = _ending_from_stop(stop)._replace(output=kept)
            yield from _emit_end_or_suspend(run, ending)
    if run.side_events.waiting:
        yield from map(Notify, run.side_events.pop_waiting_events())
    return _make_finished(run, ending)


def _end_children(run: RunState, ending: _Ending) -> Flow[_Ending]:
    """End the background children of a run and return its ending; the driver ends those of a stopped run."""
    if run.effects.stop is not None:
        return ending
    try:
        yield from end_or_await_children(run)
    except Stopped as stopped:
        return _ending_from_stop(stopped.stop)
    return ending


def _remove_expired_at_end(run: RunState, status: RunStatus) -> None:
    """Remove expired messages; suspended runs and inline children keep those that expire with the run."""
    # A suspended run is in the middle, and what is there for this run has to be there when it goes on. So has what an
    # inline child finds: it stands in its parent's conversation.
    is_over = status is not RunStatus.SUSPENDED and not run.plan.is_inline
    run.history.remove_expired(*(("agent_step", "user_prompt") if is_over else ("agent_step",)))


def _emit_end_or_suspend(run: RunState, ending: _Ending) -> Flow[None]:
    """Emit the events for the end of a run; a suspended run stores its questions and calls its ``on_suspend`` hooks instead."""
    match ending.status:
        case RunStatus.SUSPENDED:
            run.questions.pending = ending.stop.questions if ending.stop is not None else ()
            yield from hooks.call_on_suspend_hooks(run)
        case RunStatus.FAILED:
            error, path = ending.error, run.plan.path
            yield Notify(ev.RunFailed(path=path, seq=run.effects.seq, error=str(error), kind=type(error).__name__))
            yield from map(Notify, run.side_events.enter_phase_and_make_event(RunPhase.FAILED, "", run.effects.seq))
        case RunStatus.COMPLETED | RunStatus.MAX_STEPS | RunStatus.TRUNCATED | RunStatus.CANCELLED:
            yield from map(Notify, run.side_events.enter_phase_and_make_event(RunPhase.DONE, "", run.effects.seq))
        case _:
            assert_never(ending.status)


def _make_finished(run: RunState, ending: _Ending) -> Finished:
    """Return the end of the run with its state, totals, children and warnings."""
    children, body, text = run.spent.children, run.body, ending.text
    if children and ending.status is not RunStatus.SUSPENDED:
        children = list(map(mark_suspended_as_cancelled, children))
    if ending.status is RunStatus.SUSPENDED or body is not None:
        text = ""
    own, sources = run.side_events.collect_warnings(), run.effects.sources
    if ending.error is not None:
        cut_error_texts(ending.error)
    return Finished(
        status=ending.status,
        state=run.snapshot.state(),
        stop_reason=run.progress.stop_reason,
        output=ending.output,
        text=get_final_text(run) if text is None else text,
        error=ending.error,
        is_left=ending.stop is not None and ending.stop.kind == "shutdown",
        limit=run.budget.reached,
        pending=run.questions.pending,
        began=run.progress.began,
        spending=run.spent.make_spending(run.plan.agent.definition.id),
        tool_calls=tuple(run.tools.log),
        thinking=tuple(run.progress.thinking),
        children=tuple(children),
        own_warnings=own,
        warnings=join_run_and_child_warnings(own, children) if own or children else (),
        opening=run.history.opening,
        successor=run.children.successor_end,
        changes=() if body is None else tuple(body.changes),
        computed=() if body is None else tuple(body.computed),
        trust="untrusted" if sources is None else sources.compute_output_trust(ending.output),
        text_trust="untrusted" if sources is None or sources.index.saw_untrusted else "trusted",
    )
