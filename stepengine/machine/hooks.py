"""
Calling hooks: plain functions and generator functions, in list order, each with the rule for errors of its point.

A failing ``pre_run`` or ``pre_step`` hook ends the run, and a failing ``pre_tool`` hook denies its call. Every other failure becomes a
warning. A generator hook may yield the rows of ``YIELDS`` with ``for_hooks``, such as ``Perform``, ``Complete``, a ``Race``, or a
``ToolCall``, which stays out of the history. These pass through no hooks again. A hook that yields after the run was stopped is
closed, and a warning reports it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import CoroutineType, GeneratorType
from typing import Any

from stepengine.data import events as ev
from stepengine.data.effects import Notify
from stepengine.data.functions import format_location
from stepengine.data.hooks import Change
from stepengine.data.messages import Message, Source, TextPart, ToolCallPart, ToolResult, UserMessage
from stepengine.data.outcomes import Stop
from stepengine.data.questions import Decision
from stepengine.data.record_sizes import find_length_problem
from stepengine.data.yields import Race, StepResult, ToolCall
from stepengine.errors import HandlerError, LimitReached, StepEngineError
from stepengine.machine.author import (
    Author,
    ReturnValue,
    find_yield_length_error,
    make_bad_yield_error,
    make_handler_error,
)
from stepengine.machine.calls import (
    EffectMember,
    RaceMember,
    make_single_member,
    run_single_member,
    run_tool_call_of_hook,
)
from stepengine.machine.protocol import Flow, format_yieldable_names, get_yield_rows
from stepengine.machine.signals import Abort, Stopped, belongs_to_caller
from stepengine.machine.state import RunState

Hook = Callable[..., Any]
ACCEPTED = format_yieldable_names("hook")
YIELDS = get_yield_rows("hook")
RACED = "Perform, Sleep, Receive, Wait or Race in a Race (all from stepengine)"
MAX_REFUSALS = 10
"""
Times that `on_stop` may continue a run: enough to send a model back to failing tests, and an end for a hook that
always does.
"""
# Hooks have no budget of actions, so one that never ends needs a bound of its own.
MAX_YIELDS = 1000
CHANGES = ("system_prompt", "messages", "view", "context", "input", "result")


def _get_hook_name(hook: Hook) -> str:
    return getattr(hook, "__qualname__", type(hook).__qualname__)


def _describe_hook(run: RunState, point: str, hook: Hook) -> str:
    return f"{point} hook {_get_hook_name(hook)} of {run.plan.agent.definition.id!r}"


def _make_hook_error(run: RunState, point: str, hook: Hook, problem: str, kind: str = "TypeError") -> HandlerError:
    location = format_location(hook)
    return HandlerError(f"{_describe_hook(run, point, hook)} ({location}) {problem}", kind=kind, location=location)


def _call_hook(run: RunState, point: str, hook: Hook, args: Sequence[object], allowed: tuple[type, ...]) -> Flow[Any]:
    """Call one hook and return its result; raise ``HandlerError`` if the hook raises or its result is invalid."""
    try:
        value = hook(*args)
    except BaseException as error:
        if isinstance(error, StepEngineError) or belongs_to_caller(error):
            raise
        raise make_handler_error(_describe_hook(run, point, hook), error) from error
    # A hook may be a plain function, which is most of them, or a generator that asks for I/O. Only the second needs
    # somebody who drives it.
    if isinstance(value, GeneratorType):
        value = yield from _run_generator_hook(run, _describe_hook(run, point, hook), value)
    if value is None or issubclass(type(value), allowed):
        if why := find_length_problem(value):
            raise _make_hook_error(
                run, point, hook, f"returned a {type(value).__name__} that is too long: {why}", "too_long"
            )
        _refuse_misused_change(run, point, hook, value)
        return value
    if hasattr(type(value), "__await__"):
        if isinstance(value, CoroutineType):
            value.close()
        how = "is async; write a generator function and `yield from Perform(fn, ...)`"
        raise _make_hook_error(run, point, hook, how)
    names = ", ".join(["None", *[t.__name__ for t in allowed]])
    raise _make_hook_error(run, point, hook, f"returned a {type(value).__name__}; it may return {names}")


def _refuse_misused_change(run: RunState, point: str, hook: Hook, returned: object) -> None:
    """Raise if a hook requests a change that has no effect at its point."""
    # A change that nobody would make is a mistake of the hook's author; passed over in silence they would look for it
    # everywhere else.
    useless = returned.find_misuse(point) if isinstance(returned, Change) else ""
    result = returned.result if isinstance(returned, Change) else returned
    if not useless and isinstance(result, ToolResult) and result.change is not None:
        useless = result.change.find_misuse("tool")
    if useless:
        raise _make_hook_error(run, point, hook, f"returned {useless}")


def _run_generator_hook(run: RunState, hook_name: str, steps: GeneratorType[Any, Any, Any]) -> Flow[Any]:
    """Perform what a generator hook yields until it returns; return its value. The hook is closed on every way out."""
    author = Author(hook_name, steps, by="hook")
    run.progress.author_stack.append(author)
    try:
        asked = author.send(None)
        for _ in range(MAX_YIELDS):
            if isinstance(asked, ReturnValue):
                return asked.value
            try:
                answer = yield from _perform_yield(run, author, asked)
            except (StepEngineError, LimitReached) as error:
                asked = author.throw(error)
            else:
                asked = author.send(answer)
        msg = f"{hook_name} ({author.location}) yielded more than {MAX_YIELDS} times"
        raise HandlerError(msg, kind="RuntimeError", location=author.location)
    finally:
        run.side_events.add_warnings(*author.close())
        run.progress.author_stack.pop()


def _perform_yield(run: RunState, author: Author, yielded: Any) -> Flow[StepResult]:
    """Perform what a hook yielded and return the answer; a value that hooks may not yield raises."""
    row = YIELDS.get(type(yielded))
    if row is None:
        raise make_bad_yield_error(author.what, yielded, author.location, ACCEPTED)
    if (refused := find_yield_length_error(author.what, yielded)) is not None:
        raise refused
    if row.kind is ToolCall:
        result = yield from run_tool_call_of_hook(run, yielded)
        return StepResult(run.snapshot.state(), (result,))
    if row.kind is Race:
        return StepResult(run.snapshot.state(), value=(yield from _run_race(run, author, yielded)))
    value = yield from run_single_member(make_single_member(run, yielded))
    return StepResult(run.snapshot.state(), value=value)


def _run_race(run: RunState, author: Author, yielded: Race[Any]) -> Flow[Any]:
    """Run a race of waits, functions and model calls; tool calls are not allowed in a hook's race."""
    race = RaceMember(run, [_make_race_member(run, author, one) for one in yielded.members])
    outcomes = yield from run.effects.gather(effects := race.make_member_effects(), races=((0, len(effects)),))
    stop = race.apply_outcomes(outcomes)
    if stop is not None:
        raise Stopped(stop)
    race.set_winner_result()
    return race.result


def _make_race_member(run: RunState, author: Author, yielded: Any) -> EffectMember:
    """Return a member of a hook's race; a tool call, or what no hook may yield, raises."""
    if isinstance(yielded, Race):
        return RaceMember(run, [_make_race_member(run, author, one) for one in yielded.members])
    if isinstance(yielded, ToolCall) or type(yielded) not in YIELDS:
        raise make_bad_yield_error(author.what, yielded, author.location, RACED)
    return make_single_member(run, yielded)


def _apply_hook_change(run: RunState, point: str, hook: Hook, change: Change) -> None:
    """Apply a hook's change to the run, and log which fields it changed."""
    run.apply_change(change, _get_hook_name(hook))
    changed = [name for name in CHANGES if getattr(change, name) is not None]
    if changed:
        run.side_events.debug(f"{_describe_hook(run, point, hook)} changed {', '.join(changed)}")


def _call_optional_hook(
    run: RunState, point: str, hook: Hook, args: Sequence[object], allowed: tuple[type, ...]
) -> Flow[Any]:
    """Call one hook and apply its change; its failure is recorded and ignored."""
    # Late hooks run also after a stop, to look at how it ended; then they may not ask for anything any more, which is
    # their failure and no second stop.
    was_stopped = run.effects.stop is not None
    try:
        said = yield from _call_hook(run, point, hook, args, allowed)
    except Stopped:
        if not was_stopped:
            raise
        error = _make_hook_error(run, point, hook, "yielded an action, but the run was stopped", "Stopped")
        yield from _warn_of_failed_hook(run, point, hook, error)
    except (StepEngineError, LimitReached) as error:
        yield from _warn_of_failed_hook(run, point, hook, error)
    else:
        if isinstance(said, Change):
            _apply_hook_change(run, point, hook, said)
        return said


def _warn_of_failed_hook(run: RunState, point: str, hook: Hook, error: BaseException) -> Flow[None]:
    """Add a hook's error to the warnings of the run and emit ``HookFailed``."""
    run.side_events.add_warnings(str(error))
    yield from _emit_hook_failure(run, point, hook, error)


def _emit_hook_failure(run: RunState, point: str, hook: Hook, error: BaseException) -> Flow[None]:
    """Emit the event for a hook that failed."""
    event = ev.HookFailed(
        path=run.plan.path, seq=run.effects.seq, point=point, hook=_get_hook_name(hook), error=str(error)
    )
    yield Notify(event)


def _call_required_hooks(run: RunState, point: str) -> Flow[list[Change]]:
    """Call all hooks of a point whose failure ends the run; apply and return their changes."""
    changes: list[Change] = []
    # These hooks stand before something is paid for (a run, a model call). One that fails may be the very one that was
    # to shorten, check or forbid, so nothing goes on without it; the later ones only look at what has happened, and
    # their failures change nothing (reliability:GN30, GN32).
    for hook in run.plan.agent.hooks.get_hooks(point):
        try:
            change = yield from _call_hook(run, point, hook, (run.make_hook_context(),), (Change,))
        except (StepEngineError, LimitReached) as error:
            yield from _emit_hook_failure(run, point, hook, error)
            raise Abort(error.error if isinstance(error, LimitReached) else error) from error
        if change is not None:
            _apply_hook_change(run, point, hook, change)
            changes.append(change)
    return changes


def call_pre_run_hooks(run: RunState) -> Flow[None]:
    """Call the ``pre_run`` hooks and keep their messages for the end of each request; a failure ends the run."""
    changes = yield from _call_required_hooks(run, "pre_run")
    run.prompt.tail = tuple([message for change in changes for message in change.tail])


def call_pre_step_hooks(run: RunState) -> Flow[Sequence[Message]]:
    """Call the ``pre_step`` hooks; return the messages for the end of the request."""
    if not run.plan.agent.hooks.pre_step:
        return ()
    changes = yield from _call_required_hooks(run, "pre_step")
    return [message for change in changes for message in change.tail]


def call_post_step_hooks(run: RunState, reply: object) -> Flow[None]:
    """Call the ``post_step`` hooks."""
    for hook in run.plan.agent.hooks.post_step:
        yield from _call_optional_hook(run, "post_step", hook, (run.make_hook_context(), reply), (Change,))


def call_pre_tool_hooks(
    run: RunState, call: ToolCallPart, source: Source, replace_call: Callable[[ToolCallPart], ToolCallPart]
) -> Flow[Decision | None]:
    """
    Call the ``pre_tool`` hooks and return their combined decision about *call* by *source*: deny beats ask beats allow.

    Each hook sees the input that would run. One that a hook changed is validated before the next one sees it, and taken over
    by *replace_call*.
    """
    strongest: Decision | None = None
    for hook in run.plan.agent.hooks.pre_tool:
        try:
            said = yield from _call_hook(
                run, "pre_tool", hook, (run.make_hook_context(call_source=source), call), (Decision, Change)
            )
            if isinstance(said, Change):
                _apply_hook_change(run, "pre_tool", hook, said)
                call = _apply_input_change(call, said, replace_call)
        # A check that failed has not said yes (reliability:GN30).
        except (StepEngineError, LimitReached) as error:
            yield from _warn_of_failed_hook(run, "pre_tool", hook, error)
            said = Decision.deny(f"The check of this call failed, so it was not run: {error}")
        # All are asked even after a deny: a hook may be there to see every call, such as one that counts.
        if isinstance(said, Decision) and (strongest is None or _rank_decision(said) > _rank_decision(strongest)):
            strongest = said
    return strongest


def _apply_input_change(
    call: ToolCallPart, change: Change, replace_call: Callable[[ToolCallPart], ToolCallPart]
) -> ToolCallPart:
    """Return *call* with the input of a hook's change, once *replace_call* has accepted it; *call* itself without one."""
    if change.input is None:
        return call
    changed = ToolCallPart(call.tool_call_id, call.tool_name, change.input, provider_data=call.provider_data)
    return replace_call(changed)


def _rank_decision(decision: Decision) -> int:
    return ("allow", "ask", "deny").index(decision.kind)


def call_post_tool_hooks(run: RunState, call: ToolCallPart, source: Source, result: ToolResult) -> Flow[ToolResult]:
    """Call the ``post_tool`` hooks; return the result as changed by them."""
    for hook in run.plan.agent.hooks.post_tool:
        args = (run.make_hook_context(call_source=source), call, result)
        said = yield from _call_optional_hook(run, "post_tool", hook, args, (ToolResult, Change))
        wanted = said.result if isinstance(said, Change) else said
        if wanted is None:
            continue
        if wanted.change is not None and wanted.change is not result.change:
            run.apply_change(wanted.change, _get_hook_name(hook))
        result = wanted
    return result


def call_on_stop_hooks(run: RunState) -> Flow[bool]:
    """Call the ``on_stop`` hooks; append the first message with content, at most ten times in a row. Return whether one was appended."""
    first: UserMessage | None = None
    # All are called, and the first message counts: each of them may look at the end, but a model that is told three
    # things at once does the last.
    for hook in run.plan.agent.hooks.on_stop:
        said = yield from _call_optional_hook(run, "on_stop", hook, (run.make_hook_context(),), (UserMessage, str))
        message = UserMessage(said) if isinstance(said, str) else said
        if first is None and message is not None and not _is_blank(message):
            first = message
    if first is None or not run.progress.refuse_stop(MAX_REFUSALS):
        return False
    run.history.add([first])
    return True


def _is_blank(message: UserMessage) -> bool:
    """Return whether a message has nothing but empty text, which is nothing to answer."""
    return all(isinstance(part, TextPart) and not part.text.strip() for part in message.content)


def call_on_suspend_hooks(run: RunState) -> Flow[None]:
    """Call the ``on_suspend`` hooks; the run is stopped, so a generator hook cannot do its I/O."""
    for hook in run.plan.agent.hooks.on_suspend:
        yield from _call_optional_hook(run, "on_suspend", hook, (run.make_hook_context(), run.questions.pending), ())


def call_post_run_hooks(run: RunState, finished: object) -> Flow[Stop | None]:
    """Call the ``post_run`` hooks; their failures change nothing. Return the stop if the run is stopped in one."""
    stop: Stop | None = None
    for hook in run.plan.agent.hooks.post_run:
        args = (run.make_hook_context(run.history.list_added_messages()), finished)
        try:
            yield from _call_optional_hook(run, "post_run", hook, args, ())
        except Stopped as stopped:
            stop = stopped.stop
    return stop
