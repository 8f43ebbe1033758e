"""
What is raised for the caller of a run and is no `Exception`, as `pytest.fail` does, ends the run and reaches him (X59).
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from stepengine import (
    STEP,
    AgentCall,
    AgentDefinition,
    Ask,
    Engine,
    Hooks,
    Parallel,
    Perform,
    RunStatus,
    ToolCall,
    tool,
)
from stepengine.data.state import RunPhase
from stepengine.events import RunFailed, RunFinished
from stepengine.journal import MemoryJournal, check
from stepengine.testing import ScriptedModel, simulate, tool_call, tool_calls


class Verdict(BaseException):
    """
    What a test framework raises to fail a test.
    """


def broken(*_: Any) -> Any:
    raise Verdict("no")


async def nothing() -> None:
    """
    Do nothing, in no thread.
    """


async def broken_later() -> None:
    await asyncio.sleep(0)
    raise Verdict("no")


@tool
async def on_loop() -> str:
    """Fail the test."""
    return await broken_later()


@tool(parallel_safe=True)
def in_thread() -> str:
    """Fail the test."""
    return broken()


@tool(parallel_safe=True)
async def patient() -> str:
    """Wait for ever."""
    await asyncio.sleep(60)
    return ""


def broken_hook(ctx, *_: Any):
    yield from Perform(nothing)
    broken()


class Nobody:
    """
    Answers by failing the test.
    """

    def ask(self, question):
        broken()


class AtTheEnd:
    """
    An observer that fails the test at one type of event.
    """

    def __init__(self, type_: str) -> None:
        self.type = type_

    def on_event(self, event) -> None:
        if event.type == self.type:
            broken()


def steps(*asked):
    def handler(ctx):
        for one in asked:  # noqa: UP028 - a tuple takes no answers
            yield one

    return handler


def inside(ctx):
    yield from Perform(nothing)
    broken()


def closing(ctx):
    try:
        yield ToolCall("end_turn")
    finally:
        broken()


WAITING = [Perform(asyncio.sleep, 60), ToolCall("patient"), AgentCall("leaf")]
CASES: dict[str, dict[str, Any]] = {
    "tool": {"handler": steps(ToolCall("on_loop"))},
    "tool in a thread": {"handler": steps(ToolCall("in_thread"))},
    "tool of the model": {"replies": [tool_call("in_thread")]},
    "tools of the model": {"replies": [tool_calls(tool_call("patient"), tool_call("in_thread"), tool_call("patient"))]},
    "perform": {"handler": steps(Perform(broken_later))},
    "perform in a thread": {"handler": steps(Perform(broken))},
    "handler": {"handler": inside},
    "handler that is closed": {"handler": closing},
    "tool in parallel": {"handler": steps(Parallel(*WAITING, ToolCall("on_loop")))},
    "perform in parallel": {"handler": steps(Parallel(*WAITING, Perform(broken), fail_fast=True))},
    "perform in a window": {"handler": steps(Parallel(*WAITING, Perform(nothing), Perform(broken), concurrency=4))},
    "child": {"handler": steps(AgentCall("broken"))},
    "effect of a child": {"handler": steps(AgentCall("middle"))},
    "child in parallel": {"handler": steps(Parallel(*WAITING, AgentCall("broken")))},
    "effect of a child in parallel": {"handler": steps(Parallel(*WAITING, AgentCall("middle"), fail_fast=True))},
    "pre_run": {"hooks": Hooks(pre_run=[broken_hook])},
    "pre_step": {"hooks": Hooks(pre_step=[broken])},
    "pre_tool": {"handler": steps(Parallel(ToolCall("patient"))), "hooks": Hooks(pre_tool=[broken])},
    "post_tool": {"handler": steps(ToolCall("quick")), "hooks": Hooks(post_tool=[broken_hook])},
    "post_step": {"hooks": Hooks(post_step=[broken])},
    "post_run": {"hooks": Hooks(post_run=[broken_hook])},
    "model": {"replies": [broken]},
    "interactor": {"handler": steps(Ask("Well?")), "interactor": Nobody()},
    "observer at the start": {"observers": [AtTheEnd("run_started")]},
    "observer in the middle": {"handler": steps(Perform(nothing), Perform(nothing)), "observers": [AtTheEnd("perform_finished")]},
}  # fmt: skip

UNRECORDED = ("observer in the middle", "handler that is closed")


class Case:
    """
    A run that goes wrong, and what is left of it.
    """

    def __init__(self, handler=None, replies=("done",), observers=(), interactor=None, hooks=None) -> None:
        self.entered = self.closed = 0
        self.finished: list[Any] = []
        self.failed: list[str] = []

        @tool
        def quick() -> str:
            """Do nothing."""
            return ""

        leaf = AgentDefinition("leaf", handle_steps=self.watched(steps(Perform(asyncio.sleep, 60))))
        innermost = AgentDefinition(
            "innermost", handle_steps=self.watched(steps(Perform(nothing), Perform(broken_later)))
        )
        middle = AgentDefinition(
            "middle",
            handle_steps=self.watched(steps(AgentCall("innermost"))),
            spawnable_agents=[innermost],
        )
        broken_kid = AgentDefinition("broken", handle_steps=self.watched(inside))
        boss = AgentDefinition(
            "boss",
            model="test/m",
            tools=[on_loop, in_thread, patient, quick],
            spawnable_agents=[leaf, middle, broken_kid],
            handle_steps=self.watched(handler or steps(STEP)),
            hooks=hooks,
        )
        watching = [*observers, self.look]
        self.engine = Engine([boss], models=ScriptedModel(replies), observers=watching, interactor=interactor)

    def watched(self, handler):
        def handle(ctx):
            self.entered += 1
            try:
                return (yield from handler(ctx))
            finally:
                self.closed += 1

        return handle

    def look(self, event) -> None:
        if isinstance(event, RunFailed) and not event.path:
            self.failed.append(event.kind)
        if isinstance(event, RunFinished):
            self.finished.append(event.result)

    async def go(self, way: str, journal=None) -> None:
        if way == "run":
            await self.engine.run("boss", journal=journal)
        elif way == "stream":
            async for event in self.engine.stream("boss"):
                self.last = event
        else:
            async with self.engine.start("boss") as handle:
                async for event in handle.events():
                    self.last = event
                assert handle.phase is RunPhase.FAILED or not self.failed
                await handle.result()


def assert_broken_off(case: Case, before: set[Any]) -> None:
    assert [RunStatus.FAILED] == [result.status for result in case.finished]
    assert isinstance(case.finished[0].error, Verdict)
    assert ["Verdict"] == case.failed
    assert case.entered == case.closed
    assert asyncio.all_tasks() <= before


@pytest.mark.spec("requirements:X59")
@pytest.mark.parametrize(
    ("name", "way"),
    [
        *((name, "run") for name in UNRECORDED),
        ("tool", "stream"),
        *((name, "handle") for name in ("tool", "handler that is closed", "observer at the start")),
    ],
)
async def test_base_exception_in_user_code_fails_the_run_and_reraises(name, way):
    case, before = Case(**CASES[name]), asyncio.all_tasks()
    with pytest.raises(Verdict, match="no"):
        await asyncio.wait_for(case.go(way), 50)

    assert_broken_off(case, before)
    assert way == "run" or isinstance(case.last, RunFinished)


@pytest.mark.spec("requirements:X59", "reliability:R3")
@pytest.mark.parametrize("name", [name for name in CASES if name not in UNRECORDED])
async def test_base_exception_records_nothing_for_its_effect_or_parent_run(name):
    case, journal, before = Case(**CASES[name]), MemoryJournal(), asyncio.all_tasks()
    with pytest.raises(Verdict, match="no"):
        await asyncio.wait_for(case.go("run", journal), 50)
    assert_broken_off(case, before)
    history = journal.history()
    open_ = [a for a in history.intents if a not in history.results]

    assert ("", -1) in open_
    assert () == check(journal).problems
    for path, seq in open_:  # what is open inside of a child leaves its Spawn open
        assert not path or (path.rpartition(".")[0], int(path.rpartition(".")[2])) in open_
        assert seq < 0 or (path, seq) in open_
    if name in ("tool", "perform", "perform in a thread", "child", "interactor"):
        assert ("", 0) in open_
    if name == "effect of a child":
        assert {("", 0), ("0", 0), ("0.0", 1)} <= {*open_}


@pytest.mark.spec("requirements:X59")
async def test_run_broken_off_by_its_handler_resumes_where_it_was() -> None:
    def handler(_: Any) -> Any:
        yield ToolCall("in_thread")
        broken()

    def mended(_: Any) -> Any:
        yield ToolCall("in_thread")

    @tool(name="in_thread")
    def fine() -> str:
        """Fail nothing."""
        return ""

    journal = MemoryJournal()
    with pytest.raises(Verdict):
        await Engine([AgentDefinition("boss", tools=[fine], handle_steps=handler)]).run("boss", journal=journal)
    kinds = [record.kind for record in journal.records()]
    again = Engine([AgentDefinition("boss", tools=[fine], handle_steps=mended)])

    assert ["head", "intent", "intent", "result"] == kinds
    assert RunStatus.COMPLETED is (await again.resume(journal, agent="boss")).status


@pytest.mark.spec("requirements:X59", "requirements:X16")
async def test_other_runs_go_on():
    case = Case(**CASES["tool in parallel"])
    fine = Engine([AgentDefinition("fine", handle_steps=steps(*[Perform(asyncio.sleep, 0)] * 20))])
    ended = await asyncio.gather(case.go("run"), fine.run("fine"), return_exceptions=True)

    assert isinstance(ended[0], Verdict)
    assert RunStatus.COMPLETED is ended[1].status


@pytest.mark.spec("requirements:X59")
async def test_observers_still_see_run_end_when_one_raises_base_exception():
    case = Case(observers=[AtTheEnd("run_finished")])
    with pytest.raises(Verdict):
        await asyncio.wait_for(case.go("handle"), 50)

    assert [RunStatus.COMPLETED] == [result.status for result in case.finished]
    assert isinstance(case.last, RunFinished)


@pytest.mark.parametrize("error", [GeneratorExit, asyncio.CancelledError, SystemExit("x"), KeyboardInterrupt])
async def test_exit_and_cancel_exceptions_of_an_observer_are_reraised(error):
    def observer(event) -> None:
        if event.type == "perform_finished":
            raise error

    engine = Engine(
        [AgentDefinition("a", handle_steps=steps(Perform(nothing), Perform(nothing)))], observers=[observer]
    )
    kind = error if isinstance(error, type) else type(error)
    if issubclass(kind, SystemExit | KeyboardInterrupt):
        with pytest.raises(kind):
            await engine.run("a")
    else:
        assert RunStatus.COMPLETED is (await engine.run("a")).status


@pytest.mark.parametrize("error", [GeneratorExit, asyncio.CancelledError])
async def test_perform_raising_generator_exit_or_cancelled_error_is_a_failure(error):
    def fail() -> None:
        raise error

    async def fail_later() -> None:
        raise error

    def handler(ctx):
        values = yield from Parallel(Perform(fail), Perform(fail_later))
        return [v.kind for v in values]

    async with Engine([AgentDefinition("a", handle_steps=handler)]) as engine:
        result = await engine.run("a")

    assert [error.__name__] * 2 == result.unwrap()


def test_run_sync_raises_it_too_and_so_does_a_simulation():
    with pytest.raises(Verdict):
        Case(**CASES["tool"]).engine.run_sync("boss")
    with pytest.raises(Verdict):
        simulate(AgentDefinition("a", handle_steps=inside), range(3), faults=())
    with pytest.raises(pytest.fail.Exception, match="as it is"):
        Engine([AgentDefinition("a", handle_steps=steps(Perform(pytest.fail, "as it is")))]).run_sync("a")
