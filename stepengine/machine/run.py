"""
``run_agent``: one run from its first message to its end.

A generator outside, the author's generator inside. It yields effects, is sent their outcomes, and returns ``Finished``.
Whatever happens, the handler is closed before the end of the run is told, and every tool call has one result.
"""

from __future__ import annotations

import json
from collections.abc import Generator
from typing import Any, NamedTuple

from stepengine.data import events as ev
from stepengine.data.contexts import StepContext
from stepengine.data.effects import Effect
from stepengine.data.json import compact, thaw
from stepengine.data.messages import Message, UserMessage
from stepengine.data.outcomes import Outcome, Stop
from stepengine.data.run import RunStatus
from stepengine.data.state import AgentState
from stepengine.errors import HandlerError, LimitExceeded, LimitReached, StepEngineError
from stepengine.machine import hooks
from stepengine.machine.author import Author
from stepengine.machine.handler import converse, default_handler
from stepengine.machine.live import Live
from stepengine.machine.output import last_text, output_of, settle_output
from stepengine.machine.plan import Finished, RunPlan
from stepengine.machine.signals import Abort, EndRun, Stopped

__all__ = ("run_agent",)

Steps = Generator[Any, Any, Any]


class _Ending(NamedTuple):
    """Why a run ends."""

    status: RunStatus
    error: BaseException | None = None
    stop: Stop | None = None
    returned: Any = None


def run_agent(plan: RunPlan, state: AgentState) -> Generator[Effect, Outcome | None, Finished]:
    """
    Run an agent (design 3).

    Args:
        plan: What the run is started with.
        state: The state it starts from: identity, inherited or previous history, system prompt.

    Yields:
        Effects; the caller sends one outcome per effect, ``Gathered`` for a ``Gather``, and ``None`` for a ``Notify``.

    Returns:
        How the run ended; nothing that author code does makes the machine raise, except KeyboardInterrupt and SystemExit.
    """
    live = Live(plan, state)
    started = ev.RunStarted(
        path=plan.path, run_id=plan.run_id, agent_id=plan.definition.id, prompt=plan.prompt, params=plan.params_json
    )
    yield from live.notify(started)
    ending = yield from _until_end(live)
    return (yield from _finish(live, ending))


def _until_end(live: Live) -> Generator[Any, Any, _Ending]:
    """Run to the end and return why it is one; the handler is closed when this returns."""
    try:
        _open(live)
        yield from hooks.pre_run(live)
        returned = yield from _handle(live)
        yield from settle_output(live, returned)
    except Stopped as stopped:
        return _stopped(stopped.stop)
    except Abort as abort:
        return _Ending(RunStatus.FAILED, abort.error)
    except LimitReached as reached:
        return _limited(live, reached.error)
    except StepEngineError as error:
        return _Ending(RunStatus.FAILED, error) if live.limit is None else _limited(live, live.limit)
    if live.limit is not None:
        return _limited(live, live.limit, returned)
    return _Ending(RunStatus.TRUNCATED if live.truncated else RunStatus.COMPLETED, returned=returned)


def _stopped(stop: Stop) -> _Ending:
    match stop.kind:
        case "suspended":
            return _Ending(RunStatus.SUSPENDED, stop=stop)
        case "cancelled" | "shutdown":
            return _Ending(RunStatus.CANCELLED, stop.error, stop)
        case _:
            error = stop.error or StepEngineError(f"the run was stopped: {stop.kind}")
            return _Ending(RunStatus.FAILED, error, stop)


def _limited(live: Live, error: LimitExceeded, returned: Any = None) -> _Ending:
    if error.kind == "steps" and live.limits.on_max_steps != "raise":
        return _Ending(RunStatus.MAX_STEPS, returned=returned)
    return _Ending(RunStatus.FAILED, error)


def _open(live: Live) -> None:
    """Append the user's message and the instructions (generator-contract G5)."""
    plan, added = live.plan, []
    content = "\n\n".join([t for t in (plan.prompt, _shown_params(plan)) if t])
    if content:
        added.append(UserMessage(content, ("USER_PROMPT",)))
    if live.agent.instructions_prompt:
        added.append(UserMessage(_instructions(live), ("INSTRUCTIONS_PROMPT",)))
    messages: list[Message] = [*added]
    live.add(messages)


def _shown_params(plan: RunPlan) -> str:
    return json.dumps(thaw(plan.params_json), indent=2, ensure_ascii=False) if plan.params_json else ""


def _instructions(live: Live) -> str:
    text, schema = live.agent.instructions_prompt, live.plan.output_json_schema
    if schema is None:
        return text
    note = "The output of set_output must fit this JSON Schema; its fields may stand at the top level or inside `data`:"
    return f"{text}\n\n{note}\n{compact(schema)}"


def _handle(live: Live) -> Steps:
    """Start the handler, converse with it, and close it on every way out."""
    handler = live.agent.handle_steps or default_handler
    what = f"handle_steps of agent {live.agent.id!r}"
    author = Author(what, _started(what, handler, _context(live)))
    try:
        return (yield from converse(live, author))
    except EndRun:
        return None
    finally:
        for problem in author.close():
            live.warnings.append(problem)
            live.notes.waiting.append(
                ev.HandlerNotice(path=live.plan.path, seq=live.seq, kind="handler_ignored_close", message=problem)
            )


def _started(what: str, handler: Any, ctx: StepContext) -> Any:
    try:
        steps = handler(ctx)
    except Exception as error:
        msg = f"{what} raised {type(error).__name__}: {error}"
        raise HandlerError(msg, kind=type(error).__name__) from error
    if not hasattr(steps, "send"):
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
        random=plan.random,
        created=plan.created,
        elapsed=lambda: live.now,
        notify=live.notes.notify,
    )


def _finish(live: Live, ending: _Ending) -> Generator[Any, Any, Finished]:
    if ending.stop is not None and ending.status is RunStatus.SUSPENDED:
        live.pending = ending.stop.questions
        live.changed()
        yield from hooks.on_suspend(live, live.pending)
    if ending.status is RunStatus.FAILED and ending.error is not None:
        at = {"path": live.plan.path, "seq": live.seq}
        yield from live.notify(ev.RunFailed(**at, error=str(ending.error), kind=type(ending.error).__name__))
    finished = _finished(live, ending)
    if live.plan.hooks.post_run:
        yield from hooks.post_run(live, finished, stopped=ending.stop is not None)
        finished = _finished(live, ending)
    yield from live.flush()
    return finished


def _finished(live: Live, ending: _Ending) -> Finished:
    has_output = ending.status in (RunStatus.COMPLETED, RunStatus.MAX_STEPS, RunStatus.TRUNCATED)
    return Finished(
        status=ending.status,
        state=live.state(),
        stop_reason=live.stop_reason,
        output=output_of(live, ending.returned) if has_output else None,
        text="" if ending.status is RunStatus.SUSPENDED else last_text(live),
        error=ending.error,
        pending=live.pending,
        spending=live.spending,
        tool_calls=tuple(live.tool_log),
        thinking=tuple(live.thinking),
        children=tuple(live.children),
        warnings=tuple(live.warnings),
    )
