"""
Calling hooks: plain functions and generator functions, in list order, with the error rules of requirements X2.

Pre-hooks abort the run, a failing ``pre_tool`` denies its call, every other failure is noted and dropped. A generator
hook may yield ``Perform``, ``Complete`` or an unrecorded ``ToolCall``; these pass through no hooks again.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from types import GeneratorType
from typing import Any, NamedTuple

from stepengine.data import events as ev
from stepengine.data.definition import location_of
from stepengine.data.hooks import Change, HookContext
from stepengine.data.messages import UserMessage
from stepengine.data.parts import ToolCallPart
from stepengine.data.questions import Decision
from stepengine.data.results import ToolResult
from stepengine.data.yields import Complete, Perform, StepResult, ToolCall
from stepengine.errors import AgentError, HandlerError, LimitReached, StepEngineError
from stepengine.machine.author import Author, Returned, describe_yield
from stepengine.machine.live import Live
from stepengine.machine.requests import complete, perform_call
from stepengine.machine.signals import Abort
from stepengine.machine.slots import hook_call

__all__ = ("Judgement", "judge_call", "on_stop", "on_suspend", "post_run", "post_step", "post_tool", "pre_run", "pre_step")

Steps = Generator[Any, Any, Any]
MAX_REFUSALS = 10


class Judgement(NamedTuple):
    """What the ``pre_tool`` hooks of one call decided together: deny beats ask beats allow (requirements X3)."""

    decision: Decision | None
    call: ToolCallPart


def _name(hook: Callable[..., Any]) -> str:
    return getattr(hook, "__qualname__", type(hook).__qualname__)


def _call(live: Live, point: str, hook: Callable[..., Any], args: Sequence[Any], allowed: tuple[type, ...]) -> Steps:
    """Call one hook and return what it returned; raise ``HandlerError`` for what it must not do."""
    what = f"{point} hook {_name(hook)} of {live.agent.id!r}"
    try:
        value = hook(*args)
    except StepEngineError:
        raise
    except Exception as error:
        msg = f"{what} raised {type(error).__name__}: {error} ({location_of(hook)})"
        raise HandlerError(msg, kind=type(error).__name__, location=location_of(hook)) from error
    if isinstance(value, GeneratorType):
        value = yield from _drive(live, what, Author(what, value))
    if value is None or isinstance(value, allowed):
        return value
    if hasattr(value, "__await__"):
        value.close()
        msg = f"{what} ({location_of(hook)}) is async; write a generator function and `yield from Perform(fn, ...)`"
        raise HandlerError(msg, kind="TypeError", location=location_of(hook))
    names = ", ".join(["None", *[t.__name__ for t in allowed]])
    msg = f"{what} ({location_of(hook)}) returned a {type(value).__name__}; it may return {names}"
    raise HandlerError(msg, kind="TypeError", location=location_of(hook))


def _drive(live: Live, what: str, author: Author) -> Steps:
    try:
        asked = author.send(None)
        while not isinstance(asked, Returned):
            try:
                answer = yield from _answer(live, what, author, asked)
            except (StepEngineError, LimitReached) as error:
                asked = author.throw(error)
            else:
                asked = author.send(answer)
        return asked.value
    finally:
        live.warnings.extend(author.close())


def _answer(live: Live, what: str, author: Author, asked: Any) -> Steps:
    match asked:
        case Perform():
            return StepResult(live.state(), value=(yield from perform_call(live, asked)))
        case Complete():
            return StepResult(live.state(), value=(yield from complete(live, asked)))
        case ToolCall():
            result: ToolResult = yield from hook_call(live, asked)
            return StepResult(live.state(), (result,))
    error = describe_yield(what, asked, author.location)
    error.message = f"{error.message} A hook may yield only Perform, Complete and ToolCall."
    raise error


def _all(live: Live, point: str, args: Sequence[Any], allowed: tuple[type, ...], then: Callable[[Any], None]) -> Steps:
    """Call all hooks of a point whose failure is noted and dropped."""
    for hook in live.plan.hooks.at(point):
        try:
            value = yield from _call(live, point, hook, (live.hook_context(), *args), allowed)
            if value is not None:
                then(value)
        except (StepEngineError, LimitReached) as error:
            yield from _dropped(live, point, hook, error)


def _dropped(live: Live, point: str, hook: Callable[..., Any], error: BaseException) -> Steps:
    text = str(error)
    live.warnings.append(text)
    failed = ev.HookFailed(path=live.plan.path, seq=live.seq, point=point, hook=_name(hook), error=text)
    yield from live.notify(failed)


def _aborting(live: Live, point: str) -> Generator[Any, Any, list[Change]]:
    """Call all hooks of a point whose failure ends the run; apply and return their changes."""
    changes: list[Change] = []
    for hook in live.plan.hooks.at(point):
        try:
            change = yield from _call(live, point, hook, (live.hook_context(),), (Change,))
        except (StepEngineError, LimitReached) as error:
            failed = ev.HookFailed(path=live.plan.path, seq=live.seq, point=point, hook=_name(hook), error=str(error))
            yield from live.notify(failed)
            raise Abort(_as_error(error)) from error
        if change is not None:
            live.apply(change)
            changes.append(change)
    return changes


def _as_error(error: BaseException) -> StepEngineError:
    if isinstance(error, LimitReached):
        return error.error
    return error if isinstance(error, StepEngineError) else AgentError(str(error))


def pre_run(live: Live) -> Steps:
    """Call the ``pre_run`` hooks; a failure aborts the run before anything else happens."""
    yield from _aborting(live, "pre_run")


def pre_step(live: Live) -> Steps:
    """Call the ``pre_step`` hooks; return the step-scoped messages that they want at the end of the request."""
    tail: list[Any] = []
    for change in (yield from _aborting(live, "pre_step")):
        tail.extend(change.tail)
    return tail


def post_step(live: Live, reply: Any) -> Steps:
    """Call the ``post_step`` hooks."""
    yield from _all(live, "post_step", (reply,), (Change,), live.apply)


def judge_call(live: Live, call: ToolCallPart, revalidate: Callable[[ToolCallPart], None]) -> Generator[Any, Any, Judgement]:
    """Ask all ``pre_tool`` hooks about *call*; changes of its input are validated before the next hook sees them."""
    strongest: Decision | None = None
    for hook in live.plan.hooks.at("pre_tool"):
        try:
            said = yield from _call(live, "pre_tool", hook, (live.hook_context(), call), (Decision, Change))
            if isinstance(said, Change):
                live.apply(said)
                if said.input is not None:
                    changed = ToolCallPart(call.tool_call_id, call.tool_name, said.input, provider_data=call.provider_data)
                    revalidate(changed)
                    call = changed
        except (StepEngineError, LimitReached) as error:
            yield from _dropped(live, "pre_tool", hook, error)
            said = Decision.deny(f"The check of this call failed, so it was not run: {error}")
        if isinstance(said, Decision) and (strongest is None or _weight(said) > _weight(strongest)):
            strongest = said
    return Judgement(strongest, call)


def _weight(decision: Decision) -> int:
    return ("allow", "ask", "deny").index(decision.kind)


def post_tool(live: Live, call: ToolCallPart, result: ToolResult) -> Generator[Any, Any, ToolResult]:
    """Call the ``post_tool`` hooks; return the result as the last of them wants it."""
    current = result

    def replace(said: Any) -> None:
        nonlocal current
        if isinstance(said, Change):
            live.apply(said)
            said = said.result
        if said is not None:
            current = said

    for hook in live.plan.hooks.at("post_tool"):
        try:
            said = yield from _call(live, "post_tool", hook, (live.hook_context(), call, current), (ToolResult, Change))
            replace(said)
        except (StepEngineError, LimitReached) as error:
            yield from _dropped(live, "post_tool", hook, error)
    return current


def on_stop(live: Live) -> Generator[Any, Any, bool]:
    """Call the ``on_stop`` hooks; append the first message that one returns and say whether there was one."""
    said: list[Any] = []
    yield from _all(live, "on_stop", (), (UserMessage, str), said.append)
    if not said or live.refusals >= MAX_REFUSALS:
        return False
    live.refusals += 1
    live.add([said[0] if isinstance(said[0], UserMessage) else UserMessage(said[0])])
    return True


def on_suspend(live: Live, questions: Sequence[Any]) -> Steps:
    """Call the plain ``on_suspend`` hooks; the run is stopped, so a generator hook cannot do its I/O."""
    yield from _stopped(live, "on_suspend", (tuple(questions),))


def post_run(live: Live, finished: Any, *, stopped: bool) -> Steps:
    """Call the ``post_run`` hooks; their failures change nothing."""
    if stopped:
        yield from _stopped(live, "post_run", (finished,))
    else:
        for hook in live.plan.hooks.at("post_run"):
            try:
                yield from _call(live, "post_run", hook, (live.hook_context(live.added()), finished), ())
            except (StepEngineError, LimitReached) as error:
                yield from _dropped(live, "post_run", hook, error)


def _stopped(live: Live, point: str, args: Sequence[Any]) -> Steps:
    for hook in live.plan.hooks.at(point):
        ctx: HookContext = live.hook_context(live.added())
        steps = _call(live, point, hook, (ctx, *args), ())
        try:
            effect = next(steps)
        except StopIteration:
            continue
        except StepEngineError as error:
            yield from _dropped(live, point, hook, error)
            continue
        steps.close()
        msg = f"{point} hook {_name(hook)} wanted a {type(effect).__name__}, but the run was stopped"
        yield from _dropped(live, point, hook, HandlerError(msg, kind="Stopped", location=location_of(hook)))
