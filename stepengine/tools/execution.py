"""
Runs the body of a tool: dependencies, thread, timeout, retries, and leftover tasks.

An exception of a body becomes an error result. Five kinds are raised instead: a real cancellation of the task,
``KeyboardInterrupt``, ``SystemExit``, other classes that are not an ``Exception``, and ``UnknownOutcome``: an effect that may have
happened must be neither repeated nor reported as failed.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, Protocol

from stepengine.data.messages import CUT_OFF, SideEffect, ToolResult
from stepengine.data.tools import ToolSpec, format_timeout_text
from stepengine.errors import ToolError, UnknownOutcome
from stepengine.tools.context import ToolContext
from stepengine.tools.conversion import format_tool_error, make_tool_result
from stepengine.tools.depends import Overrides, Resolver, needs_event_loop
from stepengine.tools.leftovers import OWNER, CallMark, Checks, cancel_leftover_tasks
from stepengine.tools.signatures import FunctionBody
from stepengine.tools.worker import LoopCaller, make_thread_context
from stepengine.workspace.threads import ThreadPool

# asyncio is imported only to run a body: it takes as long as the rest of `from stepengine import tool`.

RETRY_WAIT_SECONDS = 0.1
"""A lost connection often returns at once; each further wait is twice as long."""
RETRY_WAIT_SECONDS_MAX = 5.0
"""A person may wait for the step of a call; after some seconds the model receives the failure instead."""


class ToolWithBody(Protocol):
    """The members of ``stepengine.Tool`` that are needed to run its body."""

    spec: ToolSpec
    body: FunctionBody
    in_thread: bool
    runs_inline: bool
    returns: str | None
    result_type: Any


class BodyFailure:
    """The exception of a body as a value; *timeout*, in seconds, is set if the tool's time limit caused it."""

    __slots__ = ("error", "timeout")

    def __init__(self, error: BaseException, timeout: float | None = None) -> None:
        self.error = error
        self.timeout = timeout


async def execute(
    tool: ToolWithBody, arguments: Mapping[str, object], ctx: ToolContext, overrides: Overrides, seconds: float
) -> ToolResult:
    """Run the body for at most *seconds* in each attempt, retry failures up to the tool's ``retries``, and return the result."""
    body, spec = tool.body, tool.spec
    tries = spec.retries
    while True:
        scoped = ctx.reserve_for_call(spec.name) if body.wants_context or body.needs else ctx
        # A fast synchronous body is called directly: a thread costs some 50 us, more than a step.
        if tool.runs_inline and not Checks.inline:
            # Without binding, if only arguments are passed.
            is_plain = not (body.wants_context or body.positional or body.whole_input)
            outcome = (
                _call_body_or_return_failure(body.fn, **arguments)
                if is_plain
                else _call_body_or_return_failure(bind_body(body, scoped, arguments))
            )
        else:
            outcome = await _run_body_once(tool, arguments, scoped, overrides, seconds)
        if not isinstance(outcome, BodyFailure):
            if isinstance(outcome, str) and tool.returns is not None:
                from stepengine.data.events import Warned

                ctx.emit(
                    Warned(
                        message=f"tool {spec.name!r} is annotated `-> {tool.returns}` but returned a string; the result is "
                        f"that string, not a {tool.returns}. Change the annotation or the return value"
                    )
                )
            result_type = tool.result_type if ctx.is_typed else Any
            return make_tool_result(outcome, scoped.requested_max_chars if body.wants_context else None, result_type)
        if isinstance(outcome.error, UnknownOutcome):
            raise outcome.error
        _log_failure(spec.name, outcome, ctx, tries)
        if not tries:
            return make_failure_result(spec.name, outcome)
        await ctx.pause(min(RETRY_WAIT_SECONDS * 2 ** (spec.retries - tries), RETRY_WAIT_SECONDS_MAX))
        tries -= 1


async def _run_body_once(
    tool: ToolWithBody, arguments: Mapping[str, object], ctx: ToolContext, overrides: Overrides, seconds: float
) -> Any:
    """Run the body once, return its value or a ``BodyFailure``, and cancel the tasks that it left running."""
    mark = CallMark()
    try:
        with mark:
            if tool.runs_inline:
                return _call_body_or_return_failure(bind_body(tool.body, ctx, arguments))
            return await _make_body_coroutine(tool, arguments, ctx, overrides, seconds)
    finally:
        if left := mark.find_unfinished_tasks():
            await cancel_leftover_tasks(left, tool.spec.name, ctx)


def _log_failure(tool_name: str, failure: BodyFailure, ctx: ToolContext, retries_left: int) -> None:
    """
    Log the traceback of a failed body, for a ``ToolError`` at the level debug, else at the level error.

    A tool raises ``ToolError`` to reject a call. Its message is sufficient, so the traceback is only a debug line.
    """
    import traceback

    trace = "".join(traceback.format_exception(failure.error))
    again = f"; retrying up to {retries_left} more times" if retries_left else ""
    message = f"tool {tool_name!r} raised {type(failure.error).__name__}{again}"
    log = ctx.logger.debug if isinstance(failure.error, ToolError) else ctx.logger.error
    log(message, traceback=trace)


def make_failure_result(tool_name: str, failure: BodyFailure) -> ToolResult:
    """Return the error result of a call whose body failed; for a timeout or an inner cancellation it has a special text."""
    if failure.timeout is not None:
        return ToolResult.error(format_timeout_text(tool_name, failure.timeout))
    if _is_cancellation(failure.error):  # not that of the call
        text = f"tool {tool_name!r} failed: what it waited for was cancelled, so its outcome is unknown"
        said = format_tool_error(failure.error) if str(failure.error) else text
        return ToolResult.error(said, side_effects=(SideEffect(CUT_OFF, tool_name),))
    return ToolResult.error(format_tool_error(failure.error))


def bind_body(
    body: FunctionBody, ctx: Any, arguments: Mapping[str, object], dependencies: Mapping[str, object] | None = None
) -> Any:
    """Return a callable without parameters that calls the body with its context, arguments and dependencies."""
    first = (ctx,) if body.wants_context else ()
    if body.whole_input:
        return functools.partial(body.fn, *first, arguments, **dependencies or {})
    if dependencies:
        arguments = {**arguments, **dependencies}
    if body.positional:
        first = (*first, *[arguments[name] for name in body.positional])
        arguments = {k: v for k, v in arguments.items() if k not in body.positional}
    return functools.partial(body.fn, *first, **arguments)


def _call_body_or_return_failure(body: Callable[..., object], /, **arguments: object) -> Any:
    """Call a synchronous body; return its value, or its exception as a ``BodyFailure``."""
    try:
        return body(**arguments)
    except (Exception, GeneratorExit) as error:  # noqa: BLE001  (a body may raise anything)
        return BodyFailure(error)
    # A cancellation in synchronous code can only come from the body and is its failure. Any other exception that is not an
    # `Exception` is for the caller of the run (requirements:X59).
    except BaseException as error:
        if _is_cancellation(error):  # no other code can cancel synchronous code
            return BodyFailure(error)
        raise


def _is_cancellation(error: BaseException) -> bool:
    import asyncio

    return isinstance(error, asyncio.CancelledError)


def _is_inner_cancellation(error: BaseException) -> bool:
    """Return True if *error* is the cancellation of a task that the body awaited, and the call itself is not cancelled."""
    import asyncio

    try:
        task = asyncio.current_task()
    except RuntimeError:  # a thread, where nothing can be cancelled
        task = None
    return _is_cancellation(error) and (task is None or not task.cancelling())


def _make_body_coroutine(
    tool: ToolWithBody, arguments: Mapping[str, object], ctx: ToolContext, overrides: Overrides, seconds: float
) -> Coroutine[Any, Any, Any]:
    """Return the coroutine that runs the body once with its time limit, on the event loop or in a thread."""
    body = tool.body
    limit = None if math.isinf(seconds) else seconds
    if not body.needs and body.is_async:
        return _await_with_limit(bind_body(body, ctx, arguments), limit)
    if tool.in_thread:
        return _run_in_thread(tool, arguments, ctx, overrides, limit)
    return _run_with_dependencies(
        body, arguments, ctx, overrides, _call_inline, functools.partial(_await_with_limit, limit=limit)
    )


async def _await_with_limit(work: Callable[[], Awaitable[object]], limit: float | None) -> Any:
    """Await *work* for at most *limit* seconds; return its value, or its exception or timeout as a ``BodyFailure``."""
    import asyncio

    clock = asyncio.timeout(None)
    try:
        async with clock:
            if limit is not None:
                # Unmarked: a cancelled timer waits in the loop's heap, and its context would keep the mark's owner there.
                token = OWNER.set(None)
                clock.reschedule(asyncio.get_running_loop().time() + limit)
                OWNER.reset(token)
            value = await work()
    except asyncio.CancelledError as error:
        if not _is_inner_cancellation(error):
            raise
        return BodyFailure(error)
    except (Exception, GeneratorExit) as error:  # noqa: BLE001  (a body may raise anything)
        return BodyFailure(error, limit if clock.expired() and isinstance(error, TimeoutError) else None)
    # A body that catches its cancellation and returns a value has exceeded its time limit nevertheless, and the model must
    # know this.
    if clock.expired():
        msg = "the body swallowed its cancellation"
        return BodyFailure(TimeoutError(msg), limit)
    return value


async def _run_in_thread(
    tool: ToolWithBody, arguments: Mapping[str, object], ctx: ToolContext, overrides: Overrides, limit: float | None
) -> Any:
    """Run the synchronous functions of a call in a thread, and return the body's value or a ``BodyFailure``."""
    import asyncio

    body, name = tool.body, tool.spec.name
    loop = LoopCaller(asyncio.get_running_loop())
    pool = ctx.threads or ThreadPool(1)
    wanted = body.wants_context or body.needs
    inside, signal = make_thread_context(ctx, loop) if wanted else (ctx, None)
    in_thread = functools.partial(pool.run, name, signal=signal, leaked=ctx.leaked)
    try:
        if not body.needs:
            job = functools.partial(_call_body_or_return_failure, bind_body(body, inside, arguments))
            return await _await_with_limit(functools.partial(in_thread, job), limit)
        if not body.is_async and not any(needs_event_loop(node, overrides) for _, node in body.needs.values()):
            whole = functools.partial(
                _run_with_dependencies, body, arguments, inside, overrides, _call_inline, _await_or_return_failure
            )
            return await _await_with_limit(
                functools.partial(in_thread, functools.partial(_run_coroutine_without_loop, whole)), limit
            )
        guard = functools.partial(_await_with_limit, limit=limit)
        return await _run_with_dependencies(body, arguments, inside, overrides, in_thread, guard)
    # An abandoned thread cannot be stopped; it must not use the event loop of a call that has ended.
    finally:
        loop.is_open = False
        if ctx.threads is None:
            pool.close()


async def _run_with_dependencies(  # noqa: PLR0917  (bound step by step with partial)
    body: FunctionBody,
    arguments: Mapping[str, object],
    ctx: ToolContext,
    overrides: Overrides,
    run: Callable[[Callable[[], Any]], Awaitable[object]],
    guard: Callable[[Callable[[], Awaitable[Any]]], Awaitable[object]],
) -> Any:
    """Create the dependencies and run the body, both within *guard*, tear down, and return the value or a ``BodyFailure``."""
    resolver = Resolver(ctx, overrides, run)

    async def resolve_and_call() -> Any:
        needed = {name: await resolver.resolve_dependency(*need) for name, need in body.needs.items()}
        bound = bind_body(body, ctx, arguments, needed)
        return await bound() if body.is_async else await run(bound)

    try:
        outcome = await guard(resolve_and_call)
    except BaseException as error:
        for problem in await resolver.close_dependencies(error):
            error.add_note(f"and a teardown raised {format_tool_error(problem)}")
        raise
    # Every outcome is followed by the teardowns, in reverse order; a failing teardown does not prevent the next one
    # (reliability:TL15).
    broken = await resolver.close_dependencies(outcome.error if isinstance(outcome, BodyFailure) else None)
    for problem in broken:
        if not isinstance(problem, Exception | GeneratorExit) and not _is_inner_cancellation(problem):
            raise problem
        if not isinstance(outcome, BodyFailure):
            outcome = BodyFailure(problem)
        elif outcome.error is not problem:
            outcome.error.add_note(f"and a teardown raised {format_tool_error(problem)}")
    return outcome


async def _call_inline(function: Callable[[], object]) -> Any:
    """Call a function and return its value: the *run* function for calls without a thread."""
    return function()


async def _await_or_return_failure(work: Callable[[], Awaitable[object]]) -> Any:
    """Await *work* and return its value, or its error as a ``BodyFailure``: the *guard* for threads, without a time limit."""
    import asyncio

    try:
        return await work()
    except (Exception, GeneratorExit, asyncio.CancelledError) as error:  # noqa: BLE001  (a body may raise anything)
        return BodyFailure(error)


def _run_coroutine_without_loop(make: Callable[[], Coroutine[object, Any, object]]) -> Any:
    """Run a coroutine that must not wait, and return its value; a ``BodyFailure`` if it waits."""
    coroutine = make()
    try:
        # A coroutine that never waits ends in one step. So the same code resolves dependencies in threads and on event loops.
        coroutine.send(None)
    except StopIteration as stop:
        return stop.value
    coroutine.close()
    msg = "a synchronous dependency returned something to await; make its factory async"
    return BodyFailure(TypeError(msg))
