"""What a handler may do wrong, and that it is closed whatever happens (reliability GN01-GN21, generator-contract G32)."""

from __future__ import annotations

import functools
import json

import attrs
import pytest

from stepengine.data import yields as y
from stepengine.data.events import RunFailed
from stepengine.data.messages import ToolResult
from stepengine.data.outcomes import Stop
from stepengine.data.state import RunStatus
from stepengine.errors import (
    BadYield,
    HandlerError,
    LimitExceeded,
    ModelError,
    ToolError,
)
from stepengine.machine.signals import EndRun, Stopped
from tests.machine.world import ADD, STEP, STEP_ALL, World, adding, agent, limits, line_of, play, play_adding, reply


async def coroutine():
    """Never awaited."""


def generator():
    yield 1


class Awaitable:
    def __await__(self):
        yield


class Array:
    """Compares like a numpy array and hides like a proxy."""

    def __eq__(self, other):
        raise ValueError("ambiguous")

    __hash__ = None

    @property
    def __class__(self):
        raise RuntimeError("unbound")


NAMES = [row.name for row in y.YIELDS]
ACCEPTED = f"it may yield {', '.join(NAMES[:-1])} or {NAMES[-1]} (all from stepengine)."
BAD = {
    "none": (lambda: None, "None", ""),
    "number": (lambda: 7, "7", ""),
    "name": (lambda: "STEP", "'STEP'", " Yield the sentinel, not its name: `from stepengine import STEP`."),
    "dict": (lambda: {"a": 1}, "the dict {'a': 1}", " Write ToolCall(name, {...}) for a call of a tool."),
    "codebuff call": (
        lambda: {"toolName": "add", "input": {}},
        "the dict {'toolName': 'add', 'input': {}}",
        " Write ToolCall('add', {}).",
    ),
    "class": (
        lambda: y.ToolCall,
        "the class ToolCall",
        " This is the class; yield an instance, such as ToolCall(...).",
    ),
    "generator": (generator, "a generator", " Did you mean `yield from`?"),
    "coroutine": (coroutine, "a coroutine", " Handlers are not async: use `yield from Perform(fn, ...)`."),
    "awaitable": (Awaitable, "a Awaitable", " Handlers are not async: use `yield from Perform(fn, ...)`."),
    "proxy": (Array, "a Array", ""),
}


@pytest.mark.spec("reliability:GN01", "generator-contract:V1")
@pytest.mark.parametrize(("make", "shown", "hint"), BAD.values(), ids=BAD)
def test_invalid_yield_is_rejected_with_a_hint(make, shown, hint):
    def handler(ctx):
        yield make()  # bad yield

    played = play(agent(handler))
    where = line_of(__file__, "bad yield")
    assert played.status is RunStatus.FAILED
    assert played.error == BadYield(
        f"handle_steps of agent 'tester' ({where}) yielded {shown}; {ACCEPTED}{hint}", location=where
    )
    assert played.seen(RunFailed)[0].kind == "BadYield"

    def careful(ctx):
        with pytest.raises(BadYield):
            yield make()
        return "on"

    assert play(agent(careful)).output == "on"


@pytest.mark.spec("reliability:GN01", "generator-contract:G8")
def test_bad_yield_location_is_the_authors_deepest_line():
    def helper():
        yield 5  # bad yield in a helper

    def handler(ctx):
        yield from helper()

    assert play(agent(handler)).error.location == line_of(__file__, "bad yield in a helper")


@pytest.mark.spec("generator-contract:G46", "generator-contract:G47")
@pytest.mark.parametrize(
    "asked",
    [
        lambda: "garbage",
        lambda: y.ToolCall("add"),
        lambda: y.StepWith(tools=["nope"]),
        lambda: STEP,
        y.Parallel,
        lambda: y.Perform(lambda: 1 / 0),
    ],
    ids=[
        "garbage",
        "call",
        "unknown tool of a step",
        "failing model",
        "nothing",
        "failing perform",
    ],
)
def test_endless_handler_is_ended_by_its_action_limit(asked):
    log = []

    def handler(ctx):
        try:
            while True:
                try:
                    yield asked()
                except Exception:
                    log.append("swallowed")
        finally:
            log.append("closed")

    played = play_adding(handler, lambda _: ModelError("down"), limits=limits(max_actions=20))
    assert (played.status, played.error.kind, played.error.limit) == (RunStatus.FAILED, "actions", 20)
    assert "more than 20 actions" in played.error.message
    assert log.count("closed") == 1
    assert len(played.leaves) <= 21


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("generator-contract:G47", "generator-contract:G46", "requirements:X50")
def test_action_limit_counts_parallel_once_and_text_blocks_each():
    def handler(ctx):
        for _ in range(998):
            yield y.Parallel(y.ToolCall("add"), y.ToolCall("add"))
        block = '<tool_call>{"name": "add"}</tool_call>'
        yield y.StepText(block + "x" + block)
        yield y.Perform(lambda: 1)

    played = play(agent(handler, tools=["add"]), World(tools={"add": adding}), tools=[ADD])
    assert played.error == LimitExceeded(played.error.message, kind="actions", limit=1000)
    assert len(played.leaves) == 2 * 998 + 2


@pytest.mark.spec("reliability:GN03")
@pytest.mark.parametrize("after", [0, 1])
def test_handler_exception_fails_the_run_with_file_and_line(after):
    log = []

    def handler(ctx):
        try:
            for _ in range(after):
                yield STEP
            raise ValueError("bad luck")  # raised
        finally:
            log.append("closed")

    played = play(agent(handler), World(replies=[reply("a")]))
    where = line_of(__file__, "raised")
    assert played.error == HandlerError(
        f"handle_steps of agent 'tester' raised ValueError: bad luck ({where})", kind="ValueError", location=where
    )
    assert isinstance(played.error.__cause__, ValueError)
    assert (played.status, played.output, log) == (RunStatus.FAILED, None, ["closed"])
    assert played.shown == ["user: go", "assistant: a"][: 1 + after]


@pytest.mark.parametrize("error", [StopIteration(), GeneratorExit(), EndRun(), Stopped(Stop("cancelled"))], ids=repr)
def test_only_the_callers_exceptions_leave_the_machine(error):
    def handler(ctx):
        yield y.Perform(lambda: 1)
        raise error

    played = play(agent(handler))
    assert (played.status, type(played.error)) == (RunStatus.FAILED, HandlerError)


def test_unprintable_error_is_reported_without_a_second_error():
    class Silent(Exception):
        def __str__(self):
            raise RuntimeError("no")

    def handler(ctx):
        raise Silent
        yield

    assert "Silent: <an error that cannot be shown>" in play(agent(handler)).error.message


@pytest.mark.spec("requirements:X59")
@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, BaseException, pytest.fail.Exception])
@pytest.mark.parametrize("where", ["send", "throw", "close", "start"])
def test_interrupts_and_exits_propagate_to_the_caller(error, where):
    def handler(ctx):
        try:
            yield "bad" if where == "throw" else y.Perform(lambda: 1)
        except BadYield:
            raise error from None
        finally:
            if where in ("send", "close"):
                raise error

    if where == "start":
        handler = broken(lambda: (_ for _ in ()).throw(error()))
    stop = {0: Stop("cancelled")} if where == "close" else {}
    with pytest.raises(error):
        play(agent(handler), World(at=stop))


def broken(fn):
    """Return a definition's handler that is called as *fn* though it looks like a generator function."""

    class Handler:
        def __call__(self, ctx):
            return fn()

    made = Handler()
    made.__call__ = generator_function
    return made


def generator_function(ctx):
    yield STEP_ALL


@pytest.mark.spec("reliability:GN11")
def test_partials_and_methods_work_and_non_generators_are_rejected():
    class Kit:
        def handle(self, ctx, word="method"):
            return word
            yield

    kit = Kit()
    assert play(agent(kit.handle)).output == "method"
    assert play(agent(functools.partial(kit.handle, word="partial"))).output == "partial"
    played = play(agent(broken(lambda: 5)))
    assert (
        played.error.message == "handle_steps of agent 'tester' did not yield: it returned a int instead of a generator"
    )
    played = play(agent(broken(lambda: 1 / 0)))
    assert played.error.kind == "ZeroDivisionError"


@pytest.mark.spec("reliability:GN03")
def test_handler_that_drives_itself_gets_an_error():
    def handler(ctx):
        next(itself[0])
        yield

    def outer(ctx):
        itself.append(handler(ctx))
        yield from itself[0]

    itself = []
    assert "generator already executing" in play(agent(outer)).error.message


@pytest.mark.spec("generator-contract:G8")
def test_typed_error_keeps_its_type_and_notes_its_location():
    def handler(ctx):
        yield from y.ToolCall("nope", include_tool_call=False)  # no such tool

    played = play(agent(handler))
    assert type(played.error).__name__ == "ToolNotAvailable"
    assert played.error.__notes__ == [f"at {line_of(__file__, 'no such tool')}"]

    def failing(ctx):
        yield from y.ToolCall("add")

    world = World(tools={"add": lambda: ToolResult.error("no luck")})
    assert play(agent(failing, tools=["add"]), world, tools=[ADD]).error == ToolError(
        "tool 'add' failed: no luck", tool_name="add"
    )


@pytest.mark.spec("reliability:GN03", "generator-contract:G8")
@pytest.mark.parametrize(
    ("call", "kind"),
    [
        pytest.param(lambda: json.loads("{"), "HandlerError", id="the library of Python"),
        pytest.param(
            lambda: attrs.evolve(ToolResult.error("no"), nothing=1), "HandlerError", id="an installed package"
        ),
        pytest.param(lambda: y.ToolCall("", {}), "BadYield", id="a method that attrs made"),
        pytest.param(lambda: y.GenerateN(0), "BadYield", id="a refused number"),
    ],
)
def test_error_location_is_the_innermost_frame_of_author_code(call, kind):
    def handler(ctx):
        yield made(call)

    error = play(agent(handler)).error

    assert kind == type(error).__name__
    # The innermost frame of this file is the lambda's own.
    assert f"{__file__}:{call.__code__.co_firstlineno}" == error.location


def made(call):
    return call()
