"""What a body may do to its engine: the rows TL of the reliability page that the package `tools` holds."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from stepengine import Depends, Tool, ToolContext, tool
from stepengine.data.events import Event, Warned
from stepengine.data.messages import ImagePart, ToolResult
from stepengine.data.tools import ToolAnnotations
from stepengine.errors import DefinitionError, PathOutsideRoot, ToolError
from stepengine.tools import ToolRegistry
from stepengine.workspace.threads import ThreadPool
from tests.loop_clock import put_clock_ahead
from tests.waits import until_async

PNG = b"\x89PNG\r\n\x1a\n"


class Hostile(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text for you")


class Lines:
    """Collects what is logged."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, dict[str, Any]]] = []
        self.quiet: list[str] = []

    def debug(self, message: str, /, **data: Any) -> None:
        self.quiet.append(message)

    def error(self, message: str, /, **data: Any) -> None:
        self.lines.append((message, data))

    info = warning = error


KINDS = ["inline", "thread", "async"]


def raising(kind: str, error: BaseException) -> Tool[..., Any]:
    def body() -> str:
        raise error

    async def async_body() -> str:
        raise error

    return tool(name="bad")(async_body) if kind == "async" else tool(name="bad", in_thread=kind == "thread")(body)


async def run(made: Tool[..., Any], ctx: ToolContext | None = None, **arguments: Any) -> ToolResult:
    return await made.execute(arguments, ctx or ToolContext.for_test())


@pytest.mark.spec("reliability:TL01", "generator-contract:G33")
@pytest.mark.parametrize("kind", KINDS)
async def test_an_exception_is_an_error_result_with_a_logged_traceback(kind: str) -> None:
    log = Lines()
    result = await run(raising(kind, ValueError("no such thing")), ToolContext.for_test(logger=log))

    assert ("error", "ValueError: no such thing") == (result.status, result.text)
    ((message, data),) = log.lines
    assert "'bad' raised ValueError" in message
    assert "Traceback" in data["traceback"]
    assert "in body" in data["traceback"] or "in async_body" in data["traceback"]


@pytest.mark.spec("reliability:TL01")
@pytest.mark.parametrize("error", [PathOutsideRoot("outside"), ToolError("outside")])
async def test_a_tool_error_is_reported_by_its_own_message(error: ToolError) -> None:
    log = Lines()

    assert "outside" == (await run(raising("inline", error), ToolContext.for_test(logger=log))).text
    assert ([], [f"tool 'bad' raised {type(error).__name__}"]) == (log.lines, log.quiet)


@pytest.mark.spec("requirements:X59")
@pytest.mark.parametrize(
    ("kind", "error"), [*zip(KINDS, (KeyboardInterrupt, SystemExit, KeyboardInterrupt), strict=True)]
)
def test_an_interrupt_is_not_a_tool_error(kind: str, error: type[BaseException]) -> None:
    with pytest.raises(error):
        asyncio.run(run(raising(kind, error())))


@pytest.mark.spec("reliability:TL01")
@pytest.mark.parametrize("kind", KINDS)
async def test_cancelled_error_raised_by_the_body_is_an_error_result(kind: str) -> None:
    result = await run(raising(kind, asyncio.CancelledError("mine")))

    assert ("error", "CancelledError: mine") == (result.status, result.text)


@pytest.mark.spec("reliability:TL01")
async def test_a_real_cancellation_ends_the_task() -> None:
    started = asyncio.Event()

    @tool
    async def waits() -> None:
        started.set()
        await asyncio.sleep(60)

    task = asyncio.create_task(run(waits))
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.spec("reliability:TL01")
@pytest.mark.parametrize(
    ("kind", "error"), [*zip(KINDS, (GeneratorExit, StopIteration, StopAsyncIteration), strict=True)]
)
async def test_generator_exit_and_stop_iteration_are_error_results(kind: str, error: type[BaseException]) -> None:
    result = await run(raising(kind, error("x")))

    assert "error" == result.status
    assert error.__name__ in result.text


@pytest.mark.spec("reliability:TL01")
@pytest.mark.parametrize(
    ("error", "text"),
    [
        (Hostile(), "Hostile: (its text could not be read)"),
        (ValueError(), "ValueError"),
        (ValueError("\ud800"), "ValueError: \ufffd"),
        (
            ExceptionGroup("two", [ValueError("a"), KeyError("b")]),
            "ExceptionGroup: two (2 sub-exceptions): ValueError: a; KeyError: 'b'",
        ),
    ],
)
async def test_an_exception_gets_a_safe_text(error: Exception, text: str) -> None:
    assert text == (await run(raising("inline", error))).text


@pytest.mark.spec("reliability:TL01")
async def test_the_text_of_an_exception_is_capped() -> None:
    text = (await run(raising("inline", ValueError("x" * 10_000_000)))).text

    assert (4_000, "…") == (len(text), text[-1])


@pytest.mark.spec("reliability:TL07")
@pytest.mark.parametrize("stubborn", [False, True])
async def test_an_async_body_that_hangs_is_cancelled_at_its_timeout(
    stubborn: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    @tool(timeout=3_000)
    async def hangs() -> str:
        put_clock_ahead(monkeypatch, 6_000)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            seen.append("cancelled")
            if not stubborn:
                raise
        return "late"

    result = await run(hangs)
    assert ("error", "tool 'hangs' timed out after 3000 s", ["cancelled"]) == (result.status, result.text, seen)


async def test_a_timeout_that_the_body_raised_is_its_own() -> None:
    assert "TimeoutError: mine" == (await run(raising("async", TimeoutError("mine")))).text


@pytest.mark.spec("reliability:TL07")
async def test_a_hanging_thread_is_abandoned_named_and_blocks_no_call(monkeypatch: pytest.MonkeyPatch) -> None:
    release, leaked, seen = threading.Event(), [], []
    loop = asyncio.get_running_loop()
    pool = ThreadPool(1, grace=0.05)
    ctx = ToolContext.for_test(threads=pool, leaked=leaked)

    @tool(timeout=3_000)
    def hangs(ctx: ToolContext) -> str:
        loop.call_soon_threadsafe(put_clock_ahead, monkeypatch, 6_000)
        release.wait(50)
        seen.append(ctx.cancelled.is_set())
        return "late"

    @tool
    def quick() -> str:
        return threading.current_thread().name

    result = await run(hangs, ctx)
    assert ("error", "tool 'hangs' timed out after 3000 s") == (result.status, result.text)
    assert 1 == len(leaked)
    assert leaked[0].endswith("-hangs")
    assert tuple(leaked) == pool.leaked
    assert (await run(quick, ctx)).text.endswith("-quick")
    release.set()
    await until_async(lambda: not pool.leaked)
    assert [True] == seen
    assert not ctx.cancelled.is_set()
    pool.close()


@pytest.mark.spec("reliability:TL07", "requirements:E6")
async def test_a_thread_that_handles_cancellation_is_awaited() -> None:
    pool = ThreadPool(1, grace=30)
    started = threading.Event()
    ended = []

    @tool
    def heeds(ctx: ToolContext) -> None:
        started.set()
        while not ctx.cancelled.is_set():
            time.sleep(0.005)
        ended.append(True)

    task = asyncio.create_task(run(heeds, ToolContext.for_test(threads=pool)))
    await until_async(started.is_set)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ([True], ()) == (ended, pool.leaked)
    pool.close()


@pytest.mark.spec("requirements:E1")
async def test_a_synchronous_body_does_not_block_the_loop() -> None:
    release = threading.Event()

    @tool
    def waits() -> str:
        return "released" if release.wait(30) else "blocked"

    task = asyncio.create_task(run(waits))
    await asyncio.sleep(0)
    release.set()
    assert "released" == (await task).text


async def test_more_bodies_than_threads_wait_for_their_turn() -> None:
    pool = ThreadPool(2)
    running, most = [], []

    @tool
    def one(n: int) -> int:
        running.append(n)
        most.append(len(running))
        time.sleep(0.002)
        running.remove(n)
        return n

    ctx = ToolContext.for_test(threads=pool)
    results = await asyncio.gather(*[run(one, ctx, n=n) for n in range(12)])
    pool.close()
    assert list(range(12)) == [r.data for r in results]
    assert max(most) <= 2


def fail_to_start(*_: object) -> None:
    msg = "can't start new thread"
    raise RuntimeError(msg)


async def test_a_body_without_a_thread_never_runs_later(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, ran = ThreadPool(1), list[str]()
    for _ in range(3):
        with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="new thread"):
            patch.setattr(threading.Thread, "start", fail_to_start)
            await pool.run("first", lambda: ran.append("first"))
    for _ in range(3):
        await pool.run("second", lambda: ran.append("second"))
    pool.close()

    assert ["second"] * 3 == ran


async def test_bodies_share_the_threads_that_the_system_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, ran, release = ThreadPool(2), list[int](), threading.Event()
    busy = asyncio.create_task(pool.run("busy", release.wait))
    await asyncio.sleep(0)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail_to_start)
        others = [asyncio.create_task(pool.run("other", lambda n=n: ran.append(n))) for n in range(3)]
        await asyncio.sleep(0)
    release.set()
    await asyncio.gather(busy, *others)
    pool.close()

    assert [0, 1, 2] == sorted(ran)


async def test_bodies_behind_an_abandoned_one_run_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, ran, release, started = ThreadPool(1, grace=0), list[str](), threading.Event(), threading.Event()
    busy = asyncio.create_task(pool.run("busy", lambda: (started.set(), release.wait())))
    await until_async(started.is_set)
    waiting = asyncio.create_task(pool.run("waiting", lambda: ran.append("waiting")))
    await asyncio.sleep(0)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail_to_start)
        busy.cancel()
        with pytest.raises(asyncio.CancelledError):
            await busy
    release.set()
    await waiting
    pool.close()

    assert ["waiting"] == ran


@pytest.mark.spec("requirements:E10")
@pytest.mark.parametrize("in_thread", [True, False])
async def test_a_body_can_have_its_own_result_cut(in_thread: bool) -> None:
    @tool(in_thread=in_thread)
    def long(ctx: ToolContext, cut: bool) -> str:
        if cut:
            ctx.request_truncation(10)
        return "0123456789abcdefghij"

    ctx = ToolContext.for_test(remaining_tokens=7, tool_name="long")
    first, second = await run(long, ctx, cut=True), await run(long, ctx, cut=False)
    assert first.text.startswith("01234\n[... 10 characters were cut")
    assert "0123456789abcdefghij" == second.text
    assert 7 == ctx.remaining_tokens


@pytest.mark.spec("reliability:TL11")
@pytest.mark.parametrize(
    ("part", "outcome"),
    [
        (ImagePart(data=PNG, mime_type="image/png"), "image/png"),
        (ImagePart(data=PNG, mime_type="image/jpeg"), "image/png"),
        (ImagePart(data=PNG, mime_type="image/x-odd"), "image/png"),
        (ImagePart(data=b"no image", mime_type="image/png"), "its bytes are none of"),
        (ImagePart(data=PNG + bytes(5 * 1024 * 1024), mime_type="image/png"), "5,242,888 bytes"),
        (ImagePart(url="https://example.com/a.png"), "image/png"),
    ],
    ids=["right", "wrong type", "unknown type", "no image", "too large", "by url"],
)
async def test_the_bytes_of_an_image_decide_its_type(part: ImagePart, outcome: str) -> None:
    @tool(in_thread=False)
    def image() -> ImagePart:
        return part

    result = await run(image)
    assert outcome == result.media[0].mime_type if result.media else outcome in result.text
    assert result.is_error is not bool(result.media)


@pytest.mark.spec("reliability:I5", "requirements:E6")
async def test_a_body_cannot_change_the_recorded_input() -> None:
    @tool
    def changes(ctx: ToolContext, items: list[int]) -> str:
        items.append(3)
        for change in (lambda: ctx.metadata.update(a=1), lambda: setattr(ctx, "step_index", 5)):
            with pytest.raises((TypeError, AttributeError)):
                change()
        return str(items)

    given = {"items": [1, 2]}
    result = await ToolRegistry([changes]).execute("changes", given, ToolContext.for_test(metadata={"a": 0}))
    assert ("[1, 2, 3]", {"items": [1, 2]}) == (result.text, given)


@pytest.mark.spec("reliability:TL15", "requirements:E23")
@pytest.mark.parametrize("body", ["sync", "async", "inline"])
@pytest.mark.parametrize("mixed", [False, True])
async def test_dependencies_are_torn_down_in_reverse_even_when_one_fails(body: str, mixed: bool) -> None:
    order: list[str] = []

    def first() -> Iterator[str]:
        order.append("+first")
        try:
            yield "1"
        finally:
            order.append("-first")

    def second(one: str = Depends(first)) -> Iterator[str]:
        order.append("+second")
        yield one + "2"
        order.append("-second")
        raise OSError("cannot close")

    async def third(two: str = Depends(second), one: str = Depends(first)) -> AsyncIterator[str]:
        order.append("+third")
        yield two + one + "3"
        order.append("-third")

    needed = third if mixed else second

    def sync_body(value: str = Depends(needed), again: str = Depends(first)) -> str:
        order.append(value)
        return value

    async def async_body(value: str = Depends(needed), again: str = Depends(first)) -> str:
        return sync_body(value, again)

    made = tool(name="t", in_thread=body == "sync")(async_body if body == "async" else sync_body)
    result = await run(made)

    expected = ["+first", "+second", "+third", "1213", "-third", "-second", "-first"]
    if not mixed:
        expected = ["+first", "+second", "12", "-second", "-first"]
    assert expected == order
    assert ("error", "OSError: cannot close") == (result.status, result.text)


@pytest.mark.spec("reliability:TL15")
@pytest.mark.parametrize("in_thread", [True, False])
async def test_a_failing_factory_or_body_tears_down_its_dependencies(in_thread: bool) -> None:
    seen: list[BaseException | None] = []

    def connection() -> Iterator[str]:
        try:
            yield "open"
            seen.append(None)
        except ValueError as error:
            seen.append(error)
            raise

    def fails(value: str = Depends(connection)) -> str:
        raise ValueError("no luck")

    @tool(in_thread=in_thread)
    def one(value: str = Depends(fails)) -> None: ...

    @tool(in_thread=in_thread)
    def two(value: str = Depends(connection)) -> None:
        raise ValueError("body")

    assert "ValueError: no luck" == (await run(one)).text
    assert "ValueError: body" == (await run(two)).text
    assert ["no luck", "body"] == [str(error) for error in seen]


@pytest.mark.spec("reliability:TL15")
@pytest.mark.parametrize("in_thread", [True, False])
@pytest.mark.parametrize("body_fails", [True, False])
async def test_a_teardown_that_awaits_a_cancelled_task_is_an_error(in_thread: bool, body_fails: bool) -> None:
    closed: list[str] = []

    def outer() -> Iterator[str]:
        yield "outer"
        closed.append("outer")

    async def asynchronous(_: str = Depends(outer)) -> AsyncIterator[str]:
        try:
            yield "inner"
        finally:
            task = asyncio.ensure_future(asyncio.sleep(60))
            task.cancel()
            await task

    def synchronous() -> Iterator[str]:
        try:
            yield "inner"
        finally:
            raise asyncio.CancelledError

    for factory in (asynchronous, synchronous):

        @tool(in_thread=in_thread)
        def body(x: str = Depends(factory)) -> str:
            if body_fails:
                raise ValueError("body")
            return x

        result = await run(body)
        assert result.is_error
        assert ("ValueError: body" if body_fails else "was cancelled, so its outcome is unknown") in result.text
    assert body_fails or closed == ["outer"]


@pytest.mark.spec("reliability:TL15")
async def test_a_factory_that_hangs_is_timed_out() -> None:
    async def hangs() -> None:
        await asyncio.sleep(60)

    @tool(timeout=0.05)
    async def body(value: None = Depends(hangs)) -> None: ...

    assert "tool 'body' timed out after 0.05 s" == (await run(body)).text


def loop_a(b: int = Depends(lambda: 1)) -> int:
    return b


def loop_b(a: int = Depends(loop_a)) -> int:
    return a


loop_a.__defaults__ = (Depends(loop_b),)


@pytest.mark.spec("reliability:TL15")
def test_a_cycle_of_dependencies_is_refused_at_construction() -> None:
    with pytest.raises(DefinitionError, match="loop_b -> loop_a -> loop_b"):
        tool(name="t")(lambda value=Depends(loop_b): value)  # noqa: B008


@pytest.mark.spec("reliability:TL18")
@pytest.mark.parametrize("kind", ["inline", "async"])
async def test_tasks_that_a_body_leaves_behind_are_cancelled_and_named(kind: str) -> None:
    left: list[asyncio.Task[None]] = []
    events: list[Event] = []

    async def goes_on() -> None:
        await asyncio.sleep(60)

    def inline_body() -> str:
        left.append(asyncio.create_task(goes_on(), name="stray"))
        return "done"

    async def async_body() -> str:
        inline_body()
        await asyncio.sleep(0)
        return "done"

    made = tool(name="t")(async_body) if kind == "async" else tool(name="t", in_thread=False)(inline_body)
    mine = asyncio.create_task(goes_on())
    result = await run(made, ToolContext.for_test(emit=events.append))

    assert "done" == result.text
    assert left[0].cancelled()
    assert not mine.done()
    (warned,) = events
    assert isinstance(warned, Warned)
    assert "stray" in warned.message
    assert "goes_on" in warned.message
    mine.cancel()


@pytest.mark.spec("reliability:TL18")
async def test_finished_tasks_of_a_body_cause_no_warning() -> None:
    events: list[Event] = []

    async def short() -> int:
        return 1

    @tool
    async def body() -> int:
        return sum(await asyncio.gather(asyncio.create_task(short()), short()))

    assert 2 == (await run(body, ToolContext.for_test(emit=events.append))).data
    assert [] == events


@pytest.mark.spec("requirements:E15")
async def test_only_an_idempotent_tool_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stepengine.tools.execution.RETRY_WAIT_SECONDS", 0)
    tries: list[int] = []

    def body() -> str:
        tries.append(1)
        if len(tries) < 3:
            raise OSError("not yet")
        return "done"

    once = tool(name="once")(body)
    again = tool(name="again", retries=2, annotations=ToolAnnotations(idempotent=True))(body)

    assert "OSError: not yet" == (await run(once)).text
    assert 1 == len(tries)
    tries.clear()
    assert "done" == (await run(again)).text
    assert 3 == len(tries)


@pytest.mark.spec("requirements:E15")
async def test_retries_wait_with_capped_exponential_backoff() -> None:
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    @tool(retries=8, annotations=ToolAnnotations(idempotent=True))
    def down() -> str:
        raise OSError("down")

    assert (await run(down, ToolContext.for_test(sleep=sleep))).is_error
    assert [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0] == waits


@pytest.mark.spec("requirements:E10")
@pytest.mark.parametrize("in_thread", [True, False])
async def test_events_of_a_body_carry_tool_name_and_call_id(in_thread: bool) -> None:
    from stepengine.data.events import ToolLog, ToolProgress

    events: list[Event] = []
    where: list[int] = []

    def emit(event: Event) -> None:
        events.append(event)
        where.append(threading.get_ident())

    @tool(in_thread=in_thread)
    def body(ctx: ToolContext) -> str:
        ctx.emit(ToolProgress(message="half", percent=50))
        ctx.emit(ToolLog(message="note"))
        return "done"

    await run(body, ToolContext.for_test(emit=emit))
    assert [
        ToolProgress(message="half", percent=50, tool_name="body", tool_call_id="c1"),
        ToolLog(message="note", tool_name="body", tool_call_id="c1"),
    ] == events
    assert {threading.get_ident()} == set(where)
