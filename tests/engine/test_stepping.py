"""
`engine.stepper`: a recorded run, one result at a time, with the author's own frames; no loop, no threads, nothing is written.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from typing import Any

import attrs
import pytest

from stepengine import (
    STEP,
    AgentCall,
    AgentDefinition,
    Engine,
    Perform,
    call,
    retry,
    tool,
)
from stepengine.errors import AgentError, JournalError, ReplayDivergence
from stepengine.journal import MemoryJournal
from stepengine.testing import ScriptedModel, text, tool_call


@tool
async def read(n: int = 0) -> str:
    """Read."""
    return "text"


def reading(ctx: Any) -> Any:
    yield from inner(1)


def inner(number: int) -> Any:
    return (yield from call("read", str, n=number))


def recorded(agent: Any, replies: Any = (), **options: Any) -> MemoryJournal:
    journal = MemoryJournal()
    engine = Engine([agent], models=ScriptedModel(list(replies)))
    engine.run_sync(agent, "go", journal=journal, **options)
    engine.close()
    return journal


def stepped(agent: Any, journal: MemoryJournal) -> Any:
    return Engine([agent], models=ScriptedModel([])).stepper(journal)


@pytest.mark.spec("evaluation:JG112", "requirements:X59")
@pytest.mark.parametrize("where", ["root", "child"])
def test_system_exit_of_a_run_does_not_end_the_stepper(where: str) -> None:
    def leaving(ctx: Any) -> Any:
        got = yield from call("read", str, n=1)
        sys.exit(f"after {got}")

    def calling(ctx: Any) -> Any:
        yield from AgentCall(agent, "go")

    agent = AgentDefinition("leaver", tools=[read], handle_steps=leaving)
    run, journal = AgentDefinition("caller", spawnable_agents=[agent], handle_steps=calling), MemoryJournal()
    run = agent if where == "root" else run
    with Engine([run]) as engine, pytest.raises(SystemExit):
        engine.run_sync(run, "go", journal=journal)

    with stepped(run, journal) as stepper:
        moments = list(stepper.moments())

    assert [{"n": 1}, None] == [getattr(moment.effect, "input", None) for moment in moments]
    if where == "root":
        assert "nothing more: the run has ended, failed with SystemExit: after text" == moments[-1].asked
        assert "text" == moments[-1].state.message_history[-1].text
    with stepped(run, journal) as stepper:
        assert stepper.advance()
        assert not stepper.advance()


@pytest.mark.spec("evaluation:JG4", "evaluation:JG5")
def test_frames_of_a_waiting_handler_are_its_authors_with_variables() -> None:
    def handle_steps(ctx: Any) -> Any:
        seen: list[Any] = []
        for number in range(2):
            seen.append((yield from retry(lambda: inner(number))))  # noqa: B023, PERF401
        return seen

    agent = AgentDefinition("reader", tools=[read], handle_steps=handle_steps)
    with stepped(agent, recorded(agent)) as stepper:
        stepper.go(1)
        moment = stepper.moment()

    assert ["handler", "package", "helper", "package", "package", "package"] == [frame.kind for frame in moment.frames]
    handler, helper = moment.frames[0], moment.frames[2]
    assert handler.function.endswith("handle_steps")
    assert "inner" == helper.function
    assert (["text"], 1) == (handler.locals["seen"], handler.locals["number"])
    assert {"number": 1} == helper.locals
    assert 'yield from call("read"' in helper.source
    assert f"{helper.file}:{helper.line}" == moment.location
    assert inner is helper.globals["inner"]
    assert ("#1", "reader", 1) == (moment.address, moment.agent_id, moment.position)
    assert 'read {"n": 1}' == moment.asked


def looking_tool(timeout: float | None, number: int = 1) -> Any:
    @tool(timeout=timeout, uses=[read])
    def look() -> Any:
        """Look."""
        return (yield from inner(number))  # the tool waits

    return look


def looker(timeout: float | None, number: int = 1) -> Any:
    return AgentDefinition("looker", model="t/m", tools=[looking_tool(timeout, number)])


@pytest.mark.spec("evaluation:JG5")
@pytest.mark.parametrize("timeout", [None, 5.0])
def test_frames_of_a_waiting_tool_are_shown_despite_a_timeout(timeout: float | None) -> None:
    agent = looker(timeout)
    with stepped(agent, recorded(agent, [tool_call("look"), text("ok")])) as stepper:
        stepper.go(1)
        moment = stepper.moment()

    assert ["look", "inner"] == [
        frame.function.rpartition(".")[2] for frame in moment.frames if frame.kind != "package"
    ]
    assert "return (yield from inner(number))  # the tool waits" == moment.frames[0].source.strip()
    assert moment.location.startswith(f"{__file__}:")


@pytest.mark.spec("evaluation:JG2")
def test_stepper_needs_no_loop_or_thread_and_writes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def handle_steps(ctx: Any) -> Any:
        yield STEP
        yield from Perform(len, "abc")
        return "done"

    agent = AgentDefinition("worker", model="m/x", handle_steps=handle_steps)
    journal = recorded(agent, [text("hi")])
    engine, lines = Engine([agent], models=ScriptedModel([])), journal.content()

    def refused(*_: object) -> None:
        raise AssertionError

    for name in ("new_event_loop", "create_task", "get_running_loop"):
        monkeypatch.setattr(asyncio, name, refused)
    monkeypatch.setattr(threading.Thread, "start", refused)
    with engine.stepper(journal) as stepper:
        stepper.go(stepper.last)

        assert "done" == stepper.finished.output

    assert lines == journal.content()


@pytest.mark.spec("evaluation:JG38")
@pytest.mark.parametrize("count", [1, 3])
def test_stepper_finds_a_run_shorter_or_longer_than_its_record(count: int) -> None:
    def handler(count: int) -> Any:
        def handle_steps(ctx: Any) -> Any:
            for number in range(count):
                yield from call("read", str, n=number)

        return handle_steps

    agent = AgentDefinition("reader", tools=[read], handle_steps=handler(2))
    journal = recorded(agent)
    edited = attrs.evolve(agent, handle_steps=handler(count))
    with stepped(edited, journal) as stepper, pytest.raises(ReplayDivergence) as raised:
        stepper.go(stepper.last)

    assert {1: "unused", 3: "extra"}[count] == raised.value.kind


@pytest.mark.spec("evaluation:JG112")
def test_cut_off_run_stops_at_its_effect_in_doubt() -> None:
    def handle_steps(ctx: Any) -> Any:
        for number in range(3):
            yield from call("read", str, n=number)

    agent = AgentDefinition("reader", tools=[read], handle_steps=handle_steps)
    lines = recorded(agent).lines()
    cut = MemoryJournal(lines[:5])
    with stepped(agent, cut) as stepper:
        stepper.go(99)
        moment = stepper.moment()

    assert (1, "#1", None, 1) == (moment.position, moment.address, moment.outcome, moment.frames[0].locals["number"])


@pytest.mark.spec("evaluation:JG119")
def test_stepper_refuses_a_non_run_or_missing_agent() -> None:
    agent = AgentDefinition("reader", tools=[read], handle_steps=reading)
    with pytest.raises(JournalError):
        stepped(agent, MemoryJournal())
    with pytest.raises(AgentError), Engine() as engine:
        engine.stepper(recorded(agent))


def test_places_are_found_by_step_and_by_address() -> None:
    def handle_steps(ctx: Any) -> Any:
        while not (yield STEP).steps_complete:
            pass

    agent = AgentDefinition("worker", model="m/x", tools=[read], handle_steps=handle_steps)
    journal = recorded(agent, [tool_call("read", {}), tool_call("read", {}), text("hi")])
    with stepped(agent, journal) as stepper:
        assert [1, 1, 2, 2, 3] == [stepper.step_at(position) for position in range(stepper.last)]
        assert [0, 2, 4, None, None] == [stepper.position_of_step(step) for step in (1, 2, 3, 4, 0)]
        assert (3, None) == (stepper.position_of("", 3), stepper.position_of("3", 0))
        assert (3, 0) == (stepper.steps(), stepper.steps("1"))
