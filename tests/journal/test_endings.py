"""The ending of a run is part of its record: whoever replays code that ends otherwise is told both endings."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from stepengine import (
    STEP,
    AgentCall,
    AgentDefinition,
    Ask,
    Engine,
    Limits,
    Parallel,
    Perform,
    Race,
    RunResult,
    Sleep,
    Start,
    ToolCall,
    Wait,
    tool,
)
from stepengine.data.state import RunStatus
from stepengine.debugging import describe_run
from stepengine.errors import ReplayDivergence, ToolError
from stepengine.journal import Journal, MemoryJournal
from stepengine.testing import ScriptedModel, text


def echo(n: int) -> int:
    return n


def fail(error: Exception) -> Any:
    raise error


ENDINGS: dict[str, tuple[str, Callable[[], Any]]] = {
    "a value": ("1", lambda: "1"),
    "another value": ("2", lambda: "2"),
    "an error": ("ValueError: no", lambda: fail(ValueError("no"))),
    "it from another line": ("ValueError: no", lambda: fail(ValueError("no"))),
    "an error of other words": ("ValueError: never", lambda: fail(ValueError("never"))),
    "an error of another class": ("KeyError: no", lambda: fail(KeyError("no"))),
    "an error of ours": ("ToolError: no", lambda: fail(ToolError("no"))),
    "an error that names an object": ("ValueError: 0x", lambda: fail(ValueError(f"{object()}"))),
}
"""What an ending is compared by, and how it is reached."""

SHAPES = ("root", "child", "parallel", "race", "background", "background that is awaited", "tool")


def make_agent(shape: str, end: Callable[[], Any]) -> AgentDefinition:
    """Return an agent of which one part ends so: itself, a child, or a tool that yields."""

    def leaf(ctx):
        yield from Perform(echo, 1)
        return end()

    def handle_steps(ctx):
        match shape:
            case "child":
                yield AgentCall("leaf", "a")
            case "parallel":
                yield Parallel(AgentCall("leaf", "a"), AgentCall("leaf", "b"))
            case "race":
                yield Race(AgentCall("leaf", "a"), Sleep(3_600))
            case "background" | "background that is awaited":
                child = yield from Start(AgentCall("leaf", "a"))
                yield from Perform(echo, 2)
                if shape != "background":
                    yield from Wait(child)
        return "done"

    if shape == "root":
        return AgentDefinition("root", handle_steps=leaf)
    if shape == "tool":
        return make_caller(end)
    children = [AgentDefinition("leaf", handle_steps=leaf)]
    return AgentDefinition("root", handle_steps=handle_steps, spawnable_agents=children)


def make_caller(end: Callable[[], Any]) -> AgentDefinition:
    """Return an agent that calls a tool whose body ends so."""

    @tool
    def work() -> Any:
        """Work."""
        yield from Perform(echo, 1)
        return end()

    def handle_steps(ctx):
        yield ToolCall("work", {})
        return "done"

    return AgentDefinition("root", handle_steps=handle_steps, tools=[work])


async def use(agent: AgentDefinition, act: Callable[[Engine], Any]) -> RunResult:
    async with Engine([agent], models=ScriptedModel([])) as engine:
        return await act(engine)


async def record(agent: AgentDefinition) -> tuple[MemoryJournal, RunResult]:
    journal = MemoryJournal()
    return journal, await use(agent, lambda engine: engine.run("root", "go", journal=journal))


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("replay:D15", "replay:D4")
@pytest.mark.parametrize("shape", SHAPES)
async def test_a_replay_ends_as_recorded_or_names_both_endings(shape: str) -> None:
    # What a tool answers is compared to the letter: the model reads it.
    endings = {name: ending for name, ending in ENDINGS.items() if shape != "tool" or "object" not in name}
    recorded = {name: await record(make_agent(shape, end)) for name, (_, end) in endings.items()}
    for before, after in itertools.product(endings, endings):
        # The comparison knows no shapes: one of them is shown each pair.
        if shape != "root" and "an error" not in (before, after) and before != after:
            continue
        journal, result = recorded[before]
        (was, _), (now, end) = ENDINGS[before], ENDINGS[after]
        agent = make_agent(shape, end)
        again = await use(agent, lambda engine: engine.replay(journal, on_divergence="stop"))  # noqa: B023
        if was == now:
            assert (result.status, result.output) == (again.status, again.output), (before, after)
            continue
        assert isinstance(again.error, ReplayDivergence), (before, after)
        shown = " ".join([f"{recorded} {new}" for _, recorded, new in again.error.diff])
        assert was.rpartition(" ")[2] in shown
        assert now.rpartition(" ")[2] in shown


@pytest.mark.spec("replay:D14", "replay:D15")
async def test_an_accepted_ending_is_the_recorded_one() -> None:
    journal, _ = await record(make_agent("root", lambda: "1"))
    changed = make_agent("root", lambda: fail(ValueError("no")))
    lines = journal.lines()
    for act in (
        lambda engine: engine.replay(journal, on_divergence="keep"),
        lambda engine: engine.replay(journal, on_divergence=lambda error: error.kind == "end"),
        lambda engine: engine.resume(journal, on_divergence="keep"),
    ):
        kept = await use(changed, act)
        assert (RunStatus.COMPLETED, "1", None) == (kept.status, kept.output, kept.error)
    forked = await use(changed, lambda engine: engine.fork(journal, tools="recorded"))
    assert ("#-1", "end") == (forked.broke_at, forked.difference.kind)
    assert lines == journal.lines()


@pytest.mark.spec("replay:D16")
async def test_resuming_a_mended_failed_run_reports_the_stored_ending(store: Callable[..., Journal]) -> None:
    journal = store()
    broken, mended = make_agent("root", lambda: fail(ValueError("no"))), make_agent("root", lambda: "1")
    await use(broken, lambda engine: engine.run("root", "go", journal=journal))
    before = journal.content()
    with pytest.raises(ReplayDivergence, match='resume\\(journal, on_divergence="extend"\\)') as raised:
        await use(mended, lambda engine: engine.resume(journal))
    assert ("/status", '"failed"', '"completed"') == raised.value.diff[0]
    kept = await use(mended, lambda engine: engine.resume(journal, on_divergence="keep"))
    assert "ValueError: no" in str(kept.error)
    assert (RunStatus.FAILED, before) == (kept.status, journal.content())
    extended = await use(mended, lambda engine: engine.resume(journal, on_divergence="extend"))
    assert ("1", "completed") == (extended.output, describe_run(journal)["status"])
    again = await use(mended, lambda engine: engine.resume(journal))
    assert (RunStatus.COMPLETED, "1") == (again.status, again.output)


@pytest.mark.spec("replay:D16")
@pytest.mark.parametrize("ending", ["completed", "failed", "max_steps", "cancelled", "suspended"])
async def test_resuming_reports_the_status_that_is_stored(ending: str) -> None:
    reached: list[Any] = []

    def handle_steps(ctx):
        yield from Perform(echo, 1)
        match ending:
            case "failed":
                fail(ValueError("no"))
            case "max_steps":
                yield STEP
                yield STEP
            case "cancelled":
                for handle in reached:
                    handle.interrupt()
            case "suspended":
                yield from Ask("Ready?")
        yield from Perform(echo, 2)

    agent = AgentDefinition("root", model="t/m", handle_steps=handle_steps, limits=Limits(max_steps=1))

    journal = MemoryJournal()
    async with Engine([agent], models=ScriptedModel([text("a")])) as engine:
        reached.append(engine.start("root", "go", journal=journal))
        first = await reached[0].result()
        reached.clear()
        assert ending == first.status
        assert ending == describe_run(journal)["status"].removeprefix("stopped: ")
        for on_divergence in ("raise", "stop", "keep"):
            again = await engine.resume(journal, on_divergence=on_divergence)
            assert describe_run(journal)["status"] == again.status


@pytest.mark.spec("replay:D15")
async def test_a_stopped_run_replays_as_stopped_and_not_as_ended() -> None:
    journal = MemoryJournal()
    reached: list[Any] = []

    def make(*, ends: bool) -> AgentDefinition:
        def handle_steps(ctx):
            yield from Perform(echo, 1)
            for handle in reached:
                handle.interrupt()
            if not ends:
                yield from Perform(echo, 2)
            return "done"

        return AgentDefinition("root", handle_steps=handle_steps)

    async with Engine([make(ends=False)], models=ScriptedModel([])) as engine:
        handle = engine.start("root", "go", journal=journal)
        reached.append(handle)
        assert RunStatus.CANCELLED is (await handle.result()).status
        reached.clear()
        assert RunStatus.CANCELLED is (await engine.replay(journal)).status
    ended = await use(make(ends=True), lambda engine: engine.replay(journal, on_divergence="stop"))
    assert "end" == ended.error.kind
    assert [("/status", '"stopped: cancelled"', '"completed"')] == [*ended.error.diff]
    resumed = await use(make(ends=True), lambda engine: engine.resume(journal))
    assert RunStatus.COMPLETED is resumed.status
