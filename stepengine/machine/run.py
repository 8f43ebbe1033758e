"""
``run_agent``: one run from its first message to its end.

A generator outside, the author's generator inside. It yields effects, is sent their outcomes, and returns ``Finished``.
Whatever happens, the handler is closed before the end of the run is told, and every tool call has one result.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Generator
from types import GeneratorType
from typing import Any, NamedTuple, TypeVar, assert_never, cast

from stepengine.data import events as ev
from stepengine.data.effects import RUNS, WAITS, AskPerson, Effect, Gather, Notify, Spawn, line_of
from stepengine.data.hooks import StepContext
from stepengine.data.json import compact, thaw
from stepengine.data.messages import TextPart, UserMessage
from stepengine.data.outcomes import Failure, Gathered, Outcome, Stop, Value
from stepengine.data.state import AgentState, ChildResult, RunPhase, RunStatus, no_longer_waiting
from stepengine.data.tools import timed_out
from stepengine.errors import HandlerError, LimitExceeded, LimitReached, StepEngineError, ToolError
from stepengine.machine import hooks
from stepengine.machine.author import Author, handler_error
from stepengine.machine.background import NO_CHILDREN
from stepengine.machine.calls import end_background
from stepengine.machine.ceilings import with_more
from stepengine.machine.control import HANDLER_ONLY, offered_of
from stepengine.machine.handler import converse, run_alone
from stepengine.machine.plan import Finished, RunPlan, ToolBody
from stepengine.machine.protocol import Flow
from stepengine.machine.settling import output_of, settle_output, text_of
from stepengine.machine.signals import Abort, Stopped, is_callers, status_of
from stepengine.machine.state import BodyProgress, RunState

__all__ = ("Machine", "run_agent")

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
    One run: a generator of effects that also tells where the run waits. Made by ``run_agent``.

    Attributes:
        send: Sends the outcome of an effect; returns the next one.
        throw: Raises in the run; returns the next effect.
        close: Ends the run where it waits.
    """

    __slots__ = ("_run", "close", "send", "throw")

    send: Callable[[Outcome | None], Effect]
    throw: Any
    close: Callable[[], None]

    def __init__(self, run: RunState, flow: Flow[Finished]) -> None:
        self._run = run
        # The generator's own methods: a method of this class would be one more call for each effect.
        self.send, self.throw, self.close = flow.send, flow.throw, flow.close

    @property
    def authors(self) -> tuple[Author, ...]:
        """The author's generators that the run is in, from the outside in: its handler or tool body, then the hook or tool it waits for."""
        return tuple(self._run.progress.authors)

    @property
    def state(self) -> AgentState:
        """The state of the run at this moment."""
        return self._run.snapshot.state()

    @property
    def location(self) -> str:
        """
        Where the author's code waits, ``""`` when none of it does.

        That is ``file:line`` of the innermost handler, tool or hook; for a program that a model wrote, its line.
        """
        if self._run.progress.place is not None:
            text, line = self._run.progress.place
            return f"line {line} of the program: {line_of(text, line)}"
        return next((found for author in reversed(self._run.progress.authors) if (found := author.location)), "")


def run_agent(plan: RunPlan, state: AgentState) -> Machine:
    """
    Run an agent.

    Args:
        plan: What the run is started with.
        state: The state it starts from: identity, inherited or previous history, system prompt.

    Yields:
        Effects; the caller sends one outcome per effect, ``Gathered`` for a ``Gather``, and ``None`` for a ``Notify``.

    Returns:
        How the run ended; nothing that author code does makes the machine raise, except what is meant for its caller, such as
        ``KeyboardInterrupt``; the handler is closed then, too.
    """
    run = RunState(plan, state, offered_of(plan))
    # Outermost, so that the events that it shows itself, which are most of a watched run's, pass nobody else.
    return Machine(run, exchange(run, _run_agent(run) if plan.body is None else _run_body(run, plan.body)))


def _run_agent(run: RunState) -> Flow[Finished]:
    plan = run.plan
    started = ev.RunStarted(
        path=plan.path, own_id=plan.run_id, agent_id=plan.definition.id, prompt=plan.prompt, params=plan.params_json
    )
    if plan.opened is not None:
        plan.opened(lambda: run.history.record)
    try:
        yield Notify(started)
        ending = yield from _until_end(run)
        return (yield from _finish(run, ending))
    finally:
        run.side_events.close()


def _run_body(run: RunState, body: ToolBody) -> Flow[Finished]:
    """
    Run the body of a tool: a handler without a prompt, history, steps and output of its own.

    Nobody is told that it begins and ends, since its call is shown; hooks and policies see the calls that it makes.
    """
    done = cast("BodyProgress", run.body)
    try:
        run.progress.begin_run()
        ending = yield from _run_timed(run, body, _until_body_ends(run, body))
        if run.children.background is not NO_CHILDREN:
            ending = yield from _without_background(run, ending)
        if ending.stop is not None and ending.status is RunStatus.SUSPENDED:
            run.questions.suspend(ending.stop.questions)
        if run.side_events.waiting:
            yield from map(Notify, run.side_events.take())
        if run.history.inbox:
            # What was sent to the body belongs to the conversation of its caller.
            done.changes.extend(run.history.remove_inbox())
        return _make_finished(run, ending)
    finally:
        run.side_events.close()


def _run_timed(run: RunState, body: ToolBody, flow: Flow[T]) -> Flow[T]:
    """
    Run *flow*, and end it once it has worked for longer than the tool's time limit.

    What it waits for people and children does not count. It is looked at before an effect is asked for, by the recorded time,
    so that a replay ends it at the same place; what is under way is not cut off, it has limits of its own.
    """
    if body.timeout is None:
        return (yield from flow)
    worked, limit = 0, body.timeout * 1_000
    try:
        effect = flow.send(None)
        while True:
            if worked > limit and not isinstance(effect, Notify):
                msg = f"{timed_out(body.tool_name, body.timeout)} of work"
                effect = flow.throw(ToolError(msg, tool_name=body.tool_name))
                continue
            began = run.effects.now
            outcome = yield effect
            worked += 0 if _waits(effect) else run.effects.now - began
            effect = flow.send(outcome)
    except StopIteration as stop:
        returned: T = stop.value
        return returned
    finally:
        flow.close()


NO_WORK = (AskPerson, *RUNS, *WAITS)


def _waits(effect: Effect) -> bool:
    """Return whether an effect is not work of the body that asks for it, but a person, a time, a message, or a run of its own."""
    members = effect.effects if isinstance(effect, Gather) else (effect,)
    return any(type(member) in NO_WORK for member in members)


def _until_body_ends(run: RunState, body: ToolBody) -> Flow[_Ending]:
    what = f"the tool {body.tool_name!r}"
    try:
        author = Author(what, _start_handler(what, body.steps, _context(run)), by="tool")
        returned = yield from converse(run, author)
    except Stopped as stopped:
        return _end_stopped(stopped.stop)
    except (Abort, LimitReached) as spent:
        return _Ending(RunStatus.FAILED, spent.error)
    except StepEngineError as error:
        _log_failure(run, body, error)
        return _Ending(RunStatus.FAILED, error)
    return _Ending(RunStatus.COMPLETED, output=returned)


def _log_failure(run: RunState, body: ToolBody, error: StepEngineError) -> None:
    """Log what a body raised with its traceback; whoever called the tool gets the message, as of any tool."""
    cause = (isinstance(error, HandlerError) and error.__cause__) or error
    log = run.side_events.debug if isinstance(cause, ToolError) else run.side_events.error
    trace = "".join(traceback.format_exception(cause))
    log(f"tool {body.tool_name!r} raised {type(cause).__name__}", traceback=trace)


def exchange(run: RunState, flow: Flow[T]) -> Flow[T]:  # noqa: C901 - two calls less for each effect of a run
    """
    Run *flow*, all of a run, and pass its effects to the world: nothing else does.

    What was said on the side is shown before anything else that is shown or asked for, the phase that the run enters before an
    effect. What comes back is noted before *flow* gets it. After a stop nothing is handed out any more: ``Stopped`` is raised
    in *flow* where it asks.
    """
    # The one place where the machine meets the world. Whoever needs something yields it here through any number of
    # `yield from`s, so no part of the machine has to know how events are shown, time is kept or a stop is handled. It
    # costs 4 % of a bare step, and took the place of three ways that each did half of it.
    send, sides, watched = flow.send, run.side_events, run.plan.watched
    try:
        effect = send(None)
        while True:
            is_shown = isinstance(effect, Notify)
            # After a stop nothing is handed out. It is raised where the part of the machine asks, so that each
            # `finally` and `except Stopped` on the way out gives its calls a result.
            if run.effects.stop is not None and not is_shown:
                effect = flow.throw(Stopped(run.effects.stop))
                continue
            # What a handler or tool said before this effect is shown before it, in the order in which it happened.
            if sides.waiting or (not is_shown and watched()):
                # Not `yield from map(...)`: a function that C calls takes twice as long.
                for event in sides.before(effect):
                    yield Notify(event)
            outcome = yield effect
            if is_shown:
                effect = send(None)
                continue
            if isinstance(outcome, Value) and not isinstance(effect, Gather):
                # All that ``receive`` does with what nearly every outcome is.
                run.effects.note_arrival(outcome)
                effect = send(outcome)
                continue
            try:
                # A spent limit may ask a person for more, which is an effect of its own: so it is looked at here,
                # before anybody takes the failure for the end.
                kind = type(outcome)
                may_ask = kind is Failure or (kind is Gathered and Failure in map(type, outcome.outcomes))  # type: ignore[union-attr]
                outcome = (yield from with_more(run, effect, outcome)) if may_ask else outcome  # type: ignore[arg-type]
                received = run.effects.receive(outcome, effect)  # type: ignore[arg-type]  # what is only shown is gone by now
            except StepEngineError as error:
                effect = flow.throw(error)
            else:
                effect = send(received)
    except StopIteration as stop:
        returned: T = stop.value
        return returned
    finally:
        flow.close()


def _until_end(run: RunState) -> Flow[_Ending]:
    """Run to the end and return how it ended; the handler is closed when this returns."""
    try:
        _open(run)
        if run.plan.hooks.pre_run:
            yield from hooks.pre_run(run)
        run.progress.begin_run()
        returned = yield from (
            run_alone(run) if run.plan.definition.handle_steps is None else converse(run, _handler(run))
        )
        if run.children.successor is not None and run.budget.reached is None:
            return (yield from _hand_over(run, run.children.successor))
        yield from settle_output(run, returned)
    # The order of these is that of what is stronger: a stop from outside, a hook that aborts, a spent limit, and last
    # an error.
    except Stopped as stopped:
        return _end_stopped(stopped.stop)
    except Abort as abort:
        return _Ending(RunStatus.FAILED, abort.error)
    except LimitReached as reached:
        return _end_at_limit(run, reached.error)
    except StepEngineError as error:
        return _end_failed(run, error)
    # A handler may catch the signal of a spent limit and return in peace; the status still says what happened.
    if run.budget.reached is not None:
        return _end_at_limit(run, run.budget.reached, returned)
    return _with_output(run, RunStatus.TRUNCATED if run.progress.truncated else RunStatus.COMPLETED, returned)


def _hand_over(run: RunState, agent_id: str) -> Flow[_Ending]:
    """
    Let another agent continue the conversation; the run ends as that one does, with its output.

    Raises:
        Stopped: when the run is stopped meanwhile, such as for a question of the other agent.
        StepEngineError: when the other agent could not start.
    """
    # An effect with a number, as of any child: recorded, resumed and replayed as these are.
    effect = Spawn(run.effects.number(), agent_id, parent=run.snapshot.inheritable, is_inline=True, at=run.effects.now)
    child: ChildResult = run.effects.unwrap((yield effect))  # type: ignore[arg-type]  # of one effect comes one outcome
    run.spent.count_child(child)
    if child.left is not None:
        run.apply_inline_child(child.left)
        # It may have handed the conversation on, and then the next message is for that agent.
        run.children.hand_over(child.left.handed_to or agent_id)
    error = child.error
    if child.status is RunStatus.FAILED and error is None:
        error = StepEngineError(f"agent {agent_id!r}, to which the conversation was handed over, failed")
    return _Ending(child.status, error, output=child.output, text=child.text)


def _end_stopped(stop: Stop) -> _Ending:
    status, error = status_of(stop), stop.error
    if status is RunStatus.SUSPENDED:
        return _Ending(status, stop=stop)
    if status is RunStatus.FAILED:
        error = error or StepEngineError(f"the run was stopped: {stop.kind}")
    return _Ending(status, error, stop)


def _end_failed(run: RunState, error: StepEngineError) -> _Ending:
    """Return how a run fails; if a limit was reached before, that is why it ends, and the error is only noted."""
    if run.budget.reached is None:
        return _Ending(RunStatus.FAILED, error)
    run.side_events.warn(error.message)
    return _end_at_limit(run, run.budget.reached)


def _end_at_limit(run: RunState, error: LimitExceeded, returned: object = None) -> _Ending:
    """Return how a run ends whose budget is spent; what its handler returned is kept."""
    if error.kind == "steps" and run.budget.limits.on_max_steps != "raise":
        return _with_output(run, RunStatus.MAX_STEPS, returned)
    if returned is None:
        return _Ending(RunStatus.FAILED, error)
    return _with_output(run, RunStatus.FAILED, returned, error)


def _with_output(run: RunState, status: RunStatus, returned: object, failure: LimitExceeded | None = None) -> _Ending:
    _expire_at_end(run, status)
    try:
        return _Ending(status, failure, output=output_of(run, returned), was_returned=returned is not None)
    except HandlerError as error:
        return _Ending(RunStatus.FAILED, failure or error)


def _open(run: RunState) -> None:
    """Append the user's message and the instructions."""
    plan = run.plan
    unoffered = tuple(filter(plan.offered.__contains__, HANDLER_ONLY))
    if unoffered:
        listed = " and ".join(unoffered)
        has_handler = run.plan.definition.handle_steps is not None
        remedy = "its handler may call it without that" if has_handler else "the agent has no handler"
        run.side_events.tell(
            f"agent {run.plan.definition.id!r} lists {listed} in tools=, but no model is offered what only handlers may call; "
            f"leave it out, {remedy}"
        )
    added: list[UserMessage] = []
    content = "\n\n".join(filter(str.strip, (plan.prompt, _shown_params(plan))))
    if content:
        added.append(UserMessage((TextPart(content),), ("USER_PROMPT",)))
    # A run that goes on with an open step has its instructions in the history already, before that step; a second copy
    # would stand between a call and its result.
    if run.questions.waiting and run.plan.definition.handle_steps is None and run.history.reopen(added):
        # The instructions stand before it; what is said now follows the answer.
        return
    instructions = _instructions(run)
    if instructions:
        added.append(UserMessage(instructions, ("INSTRUCTIONS_PROMPT",)))
    run.history.begin_with(added)


def _shown_params(plan: RunPlan) -> str:
    return json.dumps(thaw(plan.params_json), indent=2, ensure_ascii=False) if plan.params_json else ""


def _instructions(run: RunState) -> str:
    plan, text = run.plan, run.plan.definition.instructions_prompt
    parts = [text, plan.note]
    if plan.output_json_schema is not None and (text or plan.note):
        note = "The output of set_output must fit this JSON Schema; its fields may stand at the top level or inside `data`:"
        parts.append(f"{note}\n{compact(plan.output_json_schema)}")
    return "\n\n".join(filter(None, parts))


def _handler(run: RunState) -> Author:
    """Start the handler."""
    what = f"handle_steps of agent {run.plan.definition.id!r}"
    return Author(what, _start_handler(what, run.plan.definition.handle_steps, _context(run)), by="handler")


def _start_handler(what: str, handler: Any, ctx: StepContext) -> Any:
    try:
        steps = handler(ctx)
    except BaseException as error:
        if is_callers(error):
            raise
        raise handler_error(what, error) from error
    if not isinstance(steps, GeneratorType):
        msg = f"{what} did not yield: it returned a {type(steps).__name__} instead of a generator"
        raise HandlerError(msg, kind="TypeError")
    return steps


def _context(run: RunState) -> StepContext:
    plan = run.plan
    return StepContext(
        prompt=plan.prompt,
        params=plan.params,
        agent_state=run.output.put_into(run.snapshot.state()),
        model=plan.model,
        logger=run.side_events,
        random=plan.random,  # type: ignore[arg-type]  # whoever plans for a handler gives one
        created=plan.created,
        elapsed=lambda: run.effects.now,
        notify=run.side_events.notify,
        is_asked=bool(plan.prompt.strip() or plan.params_json),
    )


def _finish(run: RunState, ending: _Ending) -> Flow[Finished]:
    """Announce the end, let the hooks look at it, and return it; nothing that was sent to the run is lost."""
    if run.children.background is not NO_CHILDREN:
        ending = yield from _without_background(run, ending)
    # Said too late to be answered, but said: the next run of the conversation reads it.
    if run.history.inbox:
        run.history.take_inbox()
    _expire_at_end(run, ending.status)
    if ending.error is not None:
        for problem in run.side_events.problems:
            ending.error.add_note(problem)
    yield from _tell(run, ending)
    if run.plan.hooks.post_run:
        stop = yield from hooks.post_run(run, _make_finished(run, ending))
        # A `post_run` hook may do I/O, and the run may be stopped in it: then it ends as stopped, though its handler
        # had returned.
        if stop is not None and ending.stop is None:
            kept = ending.output if stop.kind == "limit" and ending.was_returned else None
            ending = _end_stopped(stop)._replace(output=kept)
            yield from _tell(run, ending)
    if run.side_events.waiting:
        yield from map(Notify, run.side_events.take())
    return _make_finished(run, ending)


def _without_background(run: RunState, ending: _Ending) -> Flow[_Ending]:
    """Return how a run ends once none of its background children is at work; whoever drives a stopped run ends them itself."""
    if run.effects.stop is not None:
        return ending
    try:
        yield from end_background(run)
    except Stopped as stopped:
        return _end_stopped(stopped.stop)
    return ending


def _expire_at_end(run: RunState, status: RunStatus) -> None:
    """Remove what ends with the run; a suspended run goes on, and so does the run around an inline child."""
    # A suspended run is in the middle, and what is there for this run has to be there when it goes on. So has what an
    # inline child finds: it stands in its parent's conversation.
    is_over = status is not RunStatus.SUSPENDED and not run.plan.is_inline
    run.history.expire(*(("agent_step", "user_prompt") if is_over else ("agent_step",)))


def _tell(run: RunState, ending: _Ending) -> Flow[None]:
    match ending.status:
        case RunStatus.SUSPENDED:
            run.questions.suspend(ending.stop.questions if ending.stop is not None else ())
            yield from hooks.on_suspend(run, run.questions.pending)
        case RunStatus.FAILED:
            error, path = ending.error, run.plan.path
            yield Notify(ev.RunFailed(path=path, seq=run.effects.seq, error=str(error), kind=type(error).__name__))
            yield from map(Notify, run.side_events.enter(RunPhase.FAILED, "", run.effects.seq))
        case RunStatus.COMPLETED | RunStatus.MAX_STEPS | RunStatus.TRUNCATED | RunStatus.CANCELLED:
            yield from map(Notify, run.side_events.enter(RunPhase.DONE, "", run.effects.seq))
        case _:
            assert_never(ending.status)


def _text_at_end(run: RunState, ending: _Ending) -> str:
    if ending.status is RunStatus.SUSPENDED or run.plan.body is not None:
        return ""
    return text_of(run) if ending.text is None else ending.text


def _make_finished(run: RunState, ending: _Ending) -> Finished:
    children, body = run.spent.children, run.body
    if children and ending.status is not RunStatus.SUSPENDED:
        children = list(map(no_longer_waiting, children))
    return Finished(
        status=ending.status,
        state=run.snapshot.state(),
        stop_reason=run.progress.stop_reason,
        output=ending.output,
        text=_text_at_end(run, ending),
        error=ending.error,
        is_left=ending.stop is not None and ending.stop.kind == "shutdown",
        limit=run.budget.reached,
        pending=run.questions.pending,
        began=run.progress.began,
        spending=run.spent.total(run.plan.definition.id),
        tool_calls=tuple(run.tools.log),
        thinking=tuple(run.progress.thinking),
        children=tuple(children),
        warnings=tuple(run.side_events.warnings),
        opening=run.history.opening,
        changes=() if body is None else tuple(body.changes),
        computed=() if body is None else tuple(body.computed),
    )
