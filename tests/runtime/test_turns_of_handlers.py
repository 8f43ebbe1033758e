"""
A turn of a handler that is done in a thread, when its run is stopped meanwhile.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from stepengine import AgentCall, AgentDefinition, Cancel, Engine, Perform, RunResult, RunStatus, Sleep, Start
from stepengine.data.effects import Compute
from stepengine.data.json import freeze
from stepengine.journal import FileJournal
from stepengine.testing import ScriptedModel

SOON = 0.03
PATIENCE = 50


def family(work: Callable[[], Any], stop: Callable[[], None], before: Callable[[], None]) -> list[AgentDefinition[Any]]:
    """Return an agent that cancels a child while a turn of its handler is under way."""

    def busy(ctx: Any) -> Any:
        yield from Sleep(0)
        return (yield Compute(lambda *_: freeze(work()), stop)).value

    def cancels(ctx: Any) -> Any:
        ref = yield from Start(AgentCall("busy"))
        yield from Perform(before)
        ended = yield from Cancel(ref, "enough")
        return ended.status.value

    return [
        AgentDefinition("root", handle_steps=cancels, spawnable_agents=["busy"]),
        AgentDefinition("busy", handle_steps=busy),
    ]


async def run_and_replay(agents: list[AgentDefinition[Any]], path: Path) -> tuple[RunResult, RunResult]:
    async with Engine(agents, models=ScriptedModel([])) as engine:
        result = await engine.run("root", journal=FileJournal(path))
        return result, await engine.replay(FileJournal(path))


async def test_handler_turn_of_a_stopped_run_finishes_and_replays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stepengine.runtime.driver.LAST_TURN_SECONDS", 3_000.0)
    begun, go_on = threading.Event(), threading.Event()

    def work() -> int:
        begun.set()
        go_on.wait(PATIENCE)
        return 3

    def before() -> None:
        begun.wait(PATIENCE)
        threading.Timer(SOON, go_on.set).start()

    result, replayed = await run_and_replay(family(work, go_on.set, before), tmp_path / "run.jsonl")

    assert [(RunStatus.COMPLETED, 3)] == [(child.status, child.output) for child in result.children]
    assert (replayed.output, replayed.children) == (result.output, result.children)


async def test_handler_turn_over_the_time_limit_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stepengine.runtime.driver.LAST_TURN_SECONDS", SOON)
    begun, stopped = threading.Event(), threading.Event()

    def work() -> int:
        begun.set()
        stopped.wait()
        return 3

    async with Engine(family(work, stopped.set, lambda: begun.wait() and None), models=ScriptedModel([])) as engine:
        result = await engine.run("root", journal=FileJournal(tmp_path / "run.jsonl"))

    assert stopped.is_set()
    assert (RunStatus.COMPLETED, "cancelled") == (result.status, result.output)


class Greeting:
    """
    An object whose call is asynchronous.
    """

    async def __call__(self) -> str:
        return "hello"


@pytest.mark.parametrize("function", [Greeting(), partial(Greeting())])
def test_perform_awaits_callable_objects_and_partials_of_them(function: Any) -> None:
    def performs(_: Any) -> Any:
        return (yield from Perform(function))

    with Engine([AgentDefinition("a", handle_steps=performs)]) as engine:
        assert "hello" == engine.run_sync("a").unwrap()
