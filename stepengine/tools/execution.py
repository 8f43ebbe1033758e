"""
Runs the body of a tool: dependencies, thread, timeout, retries, and what it leaves behind.

Whatever a body raises becomes an error result, with five exceptions that are not the tool's: a real cancellation of the
task, ``KeyboardInterrupt``, ``SystemExit``, other exceptions that are no ``Exception``, and ``UnknownOutcome``: nobody may do again,
or call failed, what may have happened.
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
from stepengine.tools.conversion import as_result, error_text, is_more_than_json
from stepengine.tools.depends import Overrides, Resolver, needs_event_loop
from stepengine.tools.leftovers import OWNER, CallMark, Checks, cancel_leftover_tasks
from stepengine.tools.signatures import FunctionBody
from stepengine.tools.worker import OnLoop, make_thread_context
from stepengine.workspace.threads import ThreadPool

# asyncio is imported where something runs: loading it takes as long as all that `from stepengine import tool` needs beside it.

RETRY_WAIT_SECONDS = 0.1
"""A lost connection is often back at once; each further wait is twice as long."""
RETRY_WAIT_SECONDS_MAX = 5.0
"""A tool is part of a step that somebody waits for; what does not work within seconds is told to the model instead."""


class ToolWithBody(Protocol):
    """The members of ``stepengine.Tool`` that running its body needs."""

    spec: ToolSpec
    body: FunctionBody
    in_thread: bool
    runs_inline: bool
    returns: str | None
    result_type: Any


class BodyFailure:
    """The exception that a body raised, as a value; *timeout* is set if the tool's timeout ended it."""

    __slots__ = ("error", "timeout")

    def __init__(self, error: BaseException, timeout: float | None = None) -> None:
        self.error = error
        self.timeout = timeout


async def execute(
    tool: ToolWithBody, arguments: Mapping[str, object], ctx: ToolContext, overrides: Overrides, seconds: float
) -> ToolResult:
    """Run the body at most *seconds*, retry failures as often as the tool allows, and return the tool's result."""
    body, spec = tool.body, tool.spec
    tries = spec.retries
    while True:
        scoped = ctx.reserve_for_call(spec.name) if body.wants_context or body.needs else ctx
        # A body that is known to be quick and synchronous is called where it stands: a thread costs some 50 us, more
        # than a step.
        if tool.runs_inline and not Checks.inline:
            # As it is bound, where it is bound to nothing but arguments.
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
            result_type = tool.result_type if is_more_than_json(outcome) and ctx.is_typed else Any
            return as_result(outcome, scoped.max_chars if body.wants_context else None, result_type)
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
    """Run the body without retries, return its value or a ``BodyFailure``, and cancel the tasks that it left running."""
    mark = CallMark()
    try:
        with mark:
            if tool.runs_inline:
                return _call_body_or_return_failure(bind_body(tool.body, ctx, arguments))
            return await _make_body_coroutine(tool, arguments, ctx, overrides, seconds)
    finally:
        if left := mark.find_unfinished_tasks():
            await cancel_leftover_tasks(left, tool.spec.name, ctx)


def _log_failure(tool_name: str, raised: BodyFailure, ctx: ToolContext, tries: int) -> None:
    """
    Log the traceback of a failed body: as debug line for a ``ToolError``, else as error.

    A ``ToolError`` is how a tool says no: its message is the whole story, so its traceback is for those who look closely.
    """
    import traceback

    trace = "".join(traceback.format_exception(raised.error))
    again = f"; retrying up to {tries} more times" if tries else ""
    message = f"tool {tool_name!r} raised {type(raised.error).__name__}{again}"
    log = ctx.logger.debug if isinstance(raised.error, ToolError) else ctx.logger.error
    log(message, traceback=trace)


def make_failure_result(tool_name: str, raised: BodyFailure) -> ToolResult:
    """Return the error result of a call whose body failed; a cancelled or timed-out body has its own text."""
    if raised.timeout is not None:
        return ToolResult.error(format_timeout_text(tool_name, raised.timeout))
    if _is_cancellation(raised.error):  # and nobody cancelled the call
        text = f"tool {tool_name!r} failed: what it waited for was cancelled, so its outcome is unknown"
        said = error_text(raised.error) if str(raised.error) else text
        return ToolResult.error(said, side_effects=(SideEffect(CUT_OFF, tool_name),))
    return ToolResult.error(error_text(raised.error))


def bind_body(
    body: FunctionBody, ctx: Any, arguments: Mapping[str, object], needed: Mapping[str, object] | None = None
) -> Any:
    """Return a callable that calls the body with its context, arguments and dependencies."""
    first = (ctx,) if body.wants_context else ()
    if body.whole_input:
        return functools.partial(body.fn, *first, arguments, **needed or {})
    if needed:
        arguments = {**arguments, **needed}
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
    # A cancellation out of synchronous code can only be the body's own, and is its failure; anything else that is no
    # `Exception` is meant for who called the run (requirements:X59).
    except BaseException as error:
        if _is_cancellation(error):  # nobody can cancel synchronous code, so it is the body's own
            return BodyFailure(error)
        raise


def _is_cancellation(error: BaseException) -> bool:
    import asyncio

    return isinstance(error, asyncio.CancelledError)


def _is_inner_cancellation(error: BaseException) -> bool:
    """Return True for the cancellation of something that the body awaited, while the call itself is not cancelled."""
    import asyncio

    try:
        task = asyncio.current_task()
    except RuntimeError:  # a thread, where nothing can be cancelled
        task = None
    return _is_cancellation(error) and (task is None or not task.cancelling())


def _make_body_coroutine(
    tool: ToolWithBody, arguments: Mapping[str, object], ctx: ToolContext, overrides: Overrides, seconds: float
) -> Coroutine[Any, Any, Any]:
    """Return the coroutine that runs the body with its time limit: on the loop, in a thread or with dependencies."""
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
    # A body that catches its cancellation and returns in peace has been too slow all the same; what it returned came
    # after the limit, and the model has to be told so.
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
    loop = OnLoop(asyncio.get_running_loop())
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
    # A thread that is left behind, since it cannot be stopped, must not reach into the loop of a call that is over.
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
    """Create the dependencies, run the body under *guard*, tear them down, and return the body's value or a ``BodyFailure``."""
    resolver = Resolver(ctx, overrides, run)

    async def resolve_and_call() -> Any:
        needed = {name: await resolver.resolve_dependency(*need) for name, need in body.needs.items()}
        bound = bind_body(body, ctx, arguments, needed)
        return await bound() if body.is_async else await run(bound)

    try:
        outcome = await guard(resolve_and_call)
    except BaseException as error:
        for problem in await resolver.close_dependencies(error):
            error.add_note(f"and a teardown raised {error_text(problem)}")
        raise
    # Torn down on every way out, in reverse order, and a teardown that fails does not keep the next from running
    # (reliability:TL15).
    broken = await resolver.close_dependencies(outcome.error if isinstance(outcome, BodyFailure) else None)
    for problem in broken:
        if not isinstance(problem, Exception | GeneratorExit) and not _is_inner_cancellation(problem):
            raise problem
        if not isinstance(outcome, BodyFailure):
            outcome = BodyFailure(problem)
        elif outcome.error is not problem:
            outcome.error.add_note(f"and a teardown raised {error_text(problem)}")
    return outcome


async def _call_inline(function: Callable[[], object]) -> Any:
    """Call a function in this task and return its value: the runner for dependencies without a thread."""
    return function()


async def _await_or_return_failure(work: Callable[[], Awaitable[object]]) -> Any:
    """Await *work* in a thread, where nothing can be cancelled; return its value, or its error as a ``BodyFailure``."""
    import asyncio

    try:
        return await work()
    except (Exception, GeneratorExit, asyncio.CancelledError) as error:  # noqa: BLE001  (a body may raise anything)
        return BodyFailure(error)


def _run_coroutine_without_loop(make: Callable[[], Coroutine[object, Any, object]]) -> Any:
    """Run a coroutine that never waits, and return its value; a ``BodyFailure`` if it waits."""
    coroutine = make()
    try:
        # One step is enough for what never waits; so one way of resolving dependencies serves threads and loops.
        coroutine.send(None)
    except StopIteration as stop:
        return stop.value
    coroutine.close()
    msg = "a synchronous dependency returned something to await; make its factory async"
    return BodyFailure(TypeError(msg))
