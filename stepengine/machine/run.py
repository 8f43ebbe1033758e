"""
``run_agent``: one run from its first message to its end.

A generator outside, the author's generator inside. It yields effects, is sent their outcomes, and returns ``Finished``.
Whatever happens, the handler is closed before the end of the run is told, and every tool call has one result.
"""

from __future__ import annotations

import json
from collections.abc import Generator
from types import GeneratorType
from typing import Any, NamedTuple, assert_never

from stepengine.data import events as ev
from stepengine.data.contexts import StepContext
from stepengine.data.effects import Effect
from stepengine.data.json import compact, thaw
from stepengine.data.messages import Message, UserMessage
from stepengine.data.outcomes import Outcome, Stop
from stepengine.data.run import RunPhase, RunStatus
from stepengine.data.state import AgentState
from stepengine.errors import HandlerError, LimitExceeded, LimitReached, StepEngineError
from stepengine.machine import hooks
from stepengine.machine.author import Author, blamed
from stepengine.machine.handler import converse, run_alone
from stepengine.machine.lifetimes import expire
from stepengine.machine.live import Live
from stepengine.machine.output import output_of, settle_output, text_of
from stepengine.machine.plan import Finished, RunPlan
from stepengine.machine.signals import Abort, EndRun, Stopped, is_callers

__all__ = ("run_agent",)

Steps = Generator[Any, Any, Any]


class _Ending(NamedTuple):
    """Why a run ends."""

    status: RunStatus
    error: BaseException | None = None
    stop: Stop | None = None
    output: Any = None
    was_returned: bool = False


def run_agent(plan: RunPlan, state: AgentState) -> Generator[Effect, Outcome | None, Finished]:
    """
    Run an agent (design 3).

    Args:
        plan: What the run is started with.
        state: The state it starts from: identity, inherited or previous history, system prompt.

    Yields:
        Effects; the caller sends one outcome per effect, ``Gathered`` for a ``Gather``, and ``None`` for a ``Notify``.

    Returns:
        How the run ended; nothing that author code does makes the machine raise, except what is meant for its caller, such as
        ``KeyboardInterrupt``; the handler is closed then, too.
    """
    live = Live(plan, state)
    started = ev.RunStarted(
        path=plan.path, own_id=plan.run_id, agent_id=plan.definition.id, prompt=plan.prompt, params=plan.params_json
    )
    if plan.opened is not None:
        plan.opened(lambda: live.record)
    try:
        yield from live.notify(started)
        ending = yield from _until_end(live)
        return (yield from _finish(live, ending))
    finally:
        live.notes.close()


def _until_end(live: Live) -> Generator[Any, Any, _Ending]:
    """Run to the end and return why it is one; the handler is closed when this returns."""
    try:
        _open(live)
        yield from hooks.pre_run(live)
        live.began = True
        returned = yield from _handle(live)
        yield from settle_output(live, returned)
    except Stopped as stopped:
        return _stopped(stopped.stop)
    except Abort as abort:
        return _Ending(RunStatus.FAILED, abort.error)
    except LimitReached as reached:
        return _limited(live, reached.error)
    except StepEngineError as error:
        return _failed(live, error)
    if live.limit is not None:
        return _limited(live, live.limit, returned)
    return _with_output(live, RunStatus.TRUNCATED if live.truncated else RunStatus.COMPLETED, returned)


def _stopped(stop: Stop) -> _Ending:
    match stop.kind:
        case "suspended":
            return _Ending(RunStatus.SUSPENDED, stop=stop)
        case "cancelled" | "shutdown":
            return _Ending(RunStatus.CANCELLED, stop.error, stop)
        case "limit" | "diverged" | "crashed":
            error = stop.error or StepEngineError(f"the run was stopped: {stop.kind}")
            return _Ending(RunStatus.FAILED, error, stop)
        case _:
            assert_never(stop.kind)


def _failed(live: Live, error: StepEngineError) -> _Ending:
    """Return how a run fails; once a limit was reached, that is why it ends, and the error is noted."""
    if live.limit is None:
        return _Ending(RunStatus.FAILED, error)
    live.warnings.append(error.message)
    return _limited(live, live.limit)


def _limited(live: Live, error: LimitExceeded, returned: Any = None) -> _Ending:
    """Return how a run ends whose budget is spent; what its handler returned is kept (requirements X51)."""
    if error.kind == "steps" and live.limits.on_max_steps != "raise":
        return _with_output(live, RunStatus.MAX_STEPS, returned)
    if returned is None:
        return _Ending(RunStatus.FAILED, error)
    return _with_output(live, RunStatus.FAILED, returned, error)


def _with_output(live: Live, status: RunStatus, returned: Any, failure: LimitExceeded | None = None) -> _Ending:
    _expire_at_end(live, status)
    try:
        return _Ending(status, failure, output=output_of(live, returned), was_returned=returned is not None)
    except HandlerError as error:
        return _Ending(RunStatus.FAILED, failure or error)


def _open(live: Live) -> None:
    """Append the user's message and the instructions (generator-contract G5)."""
    plan = live.plan
    added: list[Message] = []
    content = "\n\n".join([t for t in (plan.prompt, _shown_params(plan)) if t])
    if content:
        added.append(UserMessage(content, ("USER_PROMPT",)))
    if live.waiting and live.agent.handle_steps is None:
        live.take_open_step()
    if live.open_step is not None:
        # The instructions stand before it; what is said now follows the answer.
        live.inbox += [m for m in added if type(m) is UserMessage]
        return
    instructions = _instructions(live)
    if instructions:
        added.append(UserMessage(instructions, ("INSTRUCTIONS_PROMPT",)))
    live.opening = tuple(added)
    live.add(added)


def _shown_params(plan: RunPlan) -> str:
    return json.dumps(thaw(plan.params_json), indent=2, ensure_ascii=False) if plan.params_json else ""


def _instructions(live: Live) -> str:
    plan, text = live.plan, live.agent.instructions_prompt
    parts = [text, plan.note]
    if plan.output_json_schema is not None and (text or plan.note):
        note = "The output of set_output must fit this JSON Schema; its fields may stand at the top level or inside `data`:"
        parts.append(f"{note}\n{compact(plan.output_json_schema)}")
    return "\n\n".join([part for part in parts if part])


def _handle(live: Live) -> Steps:
    """Start the handler, converse with it, and close it on every way out."""
    handler = live.agent.handle_steps
    if handler is None:
        yield from run_alone(live)
        return None
    what = f"handle_steps of agent {live.agent.id!r}"
    author = Author(what, _started(what, handler, _context(live)))
    try:
        return (yield from converse(live, author))
    except EndRun:
        return None
    finally:
        live.problems = author.close()
        for problem in live.problems:
            live.warnings.append(problem)
            live.notes.waiting.append(
                ev.HandlerNotice(path=live.plan.path, seq=live.seq, kind="handler_ignored_close", message=problem)
            )


def _started(what: str, handler: Any, ctx: StepContext) -> Any:
    try:
        steps = handler(ctx)
    except BaseException as error:
        if is_callers(error):
            raise
        raise blamed(what, error) from error
    if not isinstance(steps, GeneratorType):
        msg = f"{what} did not yield: it returned a {type(steps).__name__} instead of a generator"
        raise HandlerError(msg, kind="TypeError")
    return steps


def _context(live: Live) -> StepContext:
    plan = live.plan
    return StepContext(
        prompt=plan.prompt,
        params=plan.params,
        agent_state=live.state(),
        model=plan.model,
        logger=live.notes,
        random=plan.random,  # type: ignore[arg-type]  # whoever plans for a handler gives one
        created=plan.created,
        elapsed=lambda: live.now,
        notify=live.notes.notify,
    )


def _finish(live: Live, ending: _Ending) -> Generator[Any, Any, Finished]:
    """Tell the end, let the hooks look at it, and return it; nothing that was sent to the run is lost."""
    live.take_inbox()
    _expire_at_end(live, ending.status)
    if ending.error is not None:
        for problem in live.problems:
            ending.error.add_note(problem)
    yield from live.flush()
    yield from _tell(live, ending)
    if live.plan.hooks.post_run:
        stop = yield from hooks.post_run(live, _finished(live, ending))
        if stop is not None and ending.stop is None:
            kept = ending.output if stop.kind == "limit" and ending.was_returned else None
            ending = _stopped(stop)._replace(output=kept)
            yield from _tell(live, ending)
    yield from live.flush()
    return _finished(live, ending)


def _expire_at_end(live: Live, status: RunStatus) -> None:
    """Remove what is over with the run; one that is suspended goes on, and so does the one around an inline child."""
    expire(live, "agent_step")
    if status is not RunStatus.SUSPENDED and not live.plan.is_inline:
        expire(live, "user_prompt")


def _tell(live: Live, ending: _Ending) -> Generator[Any, Any, None]:
    match ending.status:
        case RunStatus.SUSPENDED:
            live.pending = ending.stop.questions if ending.stop is not None else ()
            live.changed()
            yield from hooks.on_suspend(live, live.pending)
        case RunStatus.FAILED:
            error, path = ending.error, live.plan.path
            yield from live.notify(ev.RunFailed(path=path, seq=live.seq, error=str(error), kind=type(error).__name__))
            yield from live.enter(RunPhase.FAILED, "", live.seq)
        case RunStatus.COMPLETED | RunStatus.MAX_STEPS | RunStatus.TRUNCATED | RunStatus.CANCELLED:
            yield from live.enter(RunPhase.DONE, "", live.seq)
        case _:
            assert_never(ending.status)


def _finished(live: Live, ending: _Ending) -> Finished:
    return Finished(
        status=ending.status,
        state=live.state(),
        stop_reason=live.stop_reason,
        output=ending.output,
        text="" if ending.status is RunStatus.SUSPENDED else text_of(live),
        error=ending.error,
        limit=live.limit,
        pending=live.pending,
        began=live.began,
        spending=live.spent.total(live.agent.id),
        tool_calls=tuple(live.tool_log),
        thinking=tuple(live.thinking),
        children=tuple(live.spent.children),
        warnings=tuple(live.warnings),
        opening=live.opening,
    )
