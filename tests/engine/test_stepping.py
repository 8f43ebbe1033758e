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
    Ask,
    Change,
    Engine,
    Hooks,
    Limits,
    Parallel,
    Perform,
    RunStatus,
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


@pytest.mark.spec("evaluation:JG111", "requirements:X59")
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
        assert "nothing more: the run ended as failed with SystemExit: after text" == moments[-1].asked
        assert "text" == moments[-1].state.message_history[-1].text
    with stepped(run, journal) as stepper:
        assert stepper.advance()
        assert not stepper.advance()


@pytest.mark.spec("evaluation:JG3", "evaluation:JG5")
def test_frames_of_a_waiting_handler_are_its_authors_with_variables() -> None:
    def handle_steps(ctx: Any) -> Any:
        seen: list[Any] = []
        for number in range(2):
            seen.append((yield from retry(lambda: inner(number))))  # noqa: B023, PERF401
        return seen

    agent = AgentDefinition("reader", tools=[read], handle_steps=handle_steps)
    with stepped(agent, recorded(agent)) as stepper:
        stepper.advance_to(1)
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
        stepper.advance_to(1)
        moment = stepper.moment()

    assert ["look", "inner"] == [
        frame.function.rpartition(".")[2] for frame in moment.frames if frame.kind != "package"
    ]
    assert "return (yield from inner(number))  # the tool waits" == moment.frames[0].source.strip()
    assert moment.location.startswith(f"{__file__}:")


@pytest.mark.spec("evaluation:JG5")
def test_waiting_hook_of_a_tool_with_timeout_is_shown() -> None:
    def asks(ctx: Any, call: Any) -> Any:
        yield from Perform(int)  # the hook waits

    agent = attrs.evolve(looker(5.0), hooks=Hooks(pre_tool=asks))
    with stepped(agent, recorded(agent, [tool_call("look"), text("ok")])) as stepper:
        waiting = [next((f for f in m.frames if f.kind != "package"), None) for m in stepper.moments()]
        tops = [(frame.kind, frame.source.partition("# ")[2]) for frame in waiting if frame is not None]

    assert [("hook", "the hook waits"), ("hook", "the hook waits"), ("tool", "the tool waits")] == tops


@pytest.mark.spec("evaluation:JG5")
def test_uninspectable_frame_is_one_line_and_ends_the_chain() -> None:
    class Delegate:
        def __init__(self) -> None:
            self.steps = inner(1)

        def __iter__(self) -> Any:
            return self

        def __next__(self) -> Any:
            return self.steps.send(None)

        def send(self, value: Any) -> Any:
            return self.steps.send(value)

    def handle_steps(ctx: Any) -> Any:
        yield from Delegate()

    agent = AgentDefinition("reader", tools=[read], handle_steps=handle_steps)
    with stepped(agent, recorded(agent)) as stepper:
        frames = stepper.moment().frames

    assert [("handler", True), ("opaque", False)] == [(frame.kind, frame.line > 0) for frame in frames]
    assert "Delegate" == frames[-1].function


@pytest.mark.spec("evaluation:JG3")
def test_siblings_stop_at_recorded_places_in_any_completion_order() -> None:
    """
    After the first three results of two children at once, the loop variables are those that the recorded run had.
    """
    stood: list[tuple[str, int]] = []
    fast_is_over = asyncio.Event()

    def handle_child(ctx: Any) -> Any:
        for number in range(4):
            yield from Perform.idempotent(pause, ctx.prompt)
            stood.append((ctx.prompt, number))
        if ctx.prompt == "fast":
            fast_is_over.set()

    def handle_steps(ctx: Any) -> Any:
        yield from Parallel(AgentCall("child", "slow"), AgentCall("child", "fast"))

    async def pause(who: str) -> None:
        if who == "slow":
            await fast_is_over.wait()

    child = AgentDefinition("child", handle_steps=handle_child)
    agent = AgentDefinition("parent", spawnable_agents=[child], handle_steps=handle_steps)
    journal = recorded(agent)
    live = list(stood)
    stood.clear()
    with stepped(agent, journal) as stepper:
        for taken in range(stepper.tape.last_position + 1):
            stepper.advance_to(taken)
            if taken < len(live):
                stepper.moment()

            assert live[: len(stood)] == stood

    assert [("fast", 0), ("fast", 3), ("slow", 1)] == [live[0], live[3], live[5]]
    assert live == stood


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
        stepper.advance_to(stepper.tape.last_position)

        assert "done" == stepper.finished.output

    assert lines == journal.content()


@pytest.mark.spec("evaluation:JG3", "evaluation:JG111")
def test_only_an_unanswered_question_ends_the_walk() -> None:
    def handle_child(ctx: Any) -> Any:
        kept = yield from call("read", str)
        return (yield from Ask(f"Keep {kept}?"))

    def handle_steps(ctx: Any) -> Any:
        return (yield from AgentCall("child"))

    child = AgentDefinition("child", tools=[read], handle_steps=handle_child)
    agent = AgentDefinition("parent", spawnable_agents=[child], handle_steps=handle_steps)
    journal = recorded(agent)
    with stepped(agent, journal) as stepper:
        stepper.advance_to(99)
        moment = stepper.moment()

        assert (1, "0#1", "Keep text?", None) == (stepper.position, moment.address, moment.asked, moment.outcome)
        assert "text" == moment.frames[0].locals["kept"]

    with Engine([agent], models=ScriptedModel([])) as engine:
        engine.resume_sync(journal, answers={"Keep text?": "yes"})
    with stepped(agent, journal) as stepper:
        stepper.advance_to(99)

        assert ("", "yes") == (stepper.moment().address, stepper.finished.output)


@pytest.mark.spec("evaluation:JG38")
def test_stepper_stops_where_a_run_diverges() -> None:
    def handler(last: int) -> Any:
        def handle_steps(ctx: Any) -> Any:
            for number in (0, 1, last):
                yield from call("read", str, n=number)

        return handle_steps

    agent = AgentDefinition("reader", tools=[read], handle_steps=handler(2))
    journal = recorded(agent)
    edited = attrs.evolve(agent, handle_steps=handler(7))
    with stepped(edited, journal) as stepper:
        for _ in range(2):
            with pytest.raises(ReplayDivergence) as raised:
                stepper.advance_to(stepper.tape.last_position)

        assert ("#2", "/input/n") == (raised.value.address, raised.value.diff[0].pointer)
        assert (2, raised.value.site) == (stepper.position, stepper.moment().location)
        assert 'read {"n": 7}' == stepper.moment().asked
        assert 7 == stepper.moment().frames[0].locals["number"]


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
        stepper.advance_to(stepper.tape.last_position)

    assert {1: "unused", 3: "extra"}[count] == raised.value.kind


@pytest.mark.spec("evaluation:JG3", "evaluation:JG5")
def test_hooks_are_listed_with_outcomes_and_waiting_frames() -> None:
    def count(ctx: Any) -> Change:
        return Change(context={"n": 1})

    def look(ctx: Any) -> Any:
        size = yield from Perform.idempotent(len, "abc")
        return Change(context={"size": size})

    def handle_steps(ctx: Any) -> Any:
        yield STEP

    agent = AgentDefinition("worker", model="m/x", handle_steps=handle_steps, hooks=Hooks(pre_step=[count, look]))
    with stepped(agent, recorded(agent, [text("hi")])) as stepper:
        waiting = stepper.moment()
        stepper.advance_to(1)
        asking = stepper.moment()
        stepper.advance_to(2)

        assert RunStatus.COMPLETED is stepper.finished.status

    assert ["hook"] == [frame.kind for frame in waiting.frames if frame.kind != "package"]
    assert ["look"] == [frame.function.rpartition(".")[2] for frame in waiting.frames if frame.kind == "hook"]
    assert [("pre_step", {"n": 1})] == [(call.point, call.said.context) for call in waiting.hooks]
    assert [{"size": 3}] == [call.said.context for call in asking.hooks]
    assert {"n": 1, "size": 3} == asking.state.context
    assert asking.request is not None
    assert ("m/x", 1) == (asking.request.model, asking.step)


@pytest.mark.spec("evaluation:JG2", "evaluation:JG111")
@pytest.mark.parametrize("how", ["fail_fast", "refused", "depth", "tokens", "window"])
def test_refused_and_cancelled_children_end_as_recorded(how: str) -> None:
    async def pause() -> None:
        await asyncio.sleep(5)

    def handle_child(ctx: Any) -> Any:
        if ctx.prompt == "bad":
            yield from Perform.idempotent(len, "a")
            raise ValueError
        if how == "fail_fast":
            yield from Perform.idempotent(pause)
        yield STEP

    members = {"refused": [AgentCall("nobody")], "depth": [AgentCall("child", "a")]}
    calls = members.get(how, [AgentCall("child", "a"), AgentCall("child", "bad"), AgentCall("child", "b")])

    def handle_steps(ctx: Any) -> Any:
        ended = yield from Parallel(*calls, fail_fast=how == "fail_fast")
        return [[child.status.value, type(child.error).__name__] for child in ended]

    child = AgentDefinition("child", model="m/x", handle_steps=handle_child)
    agent = AgentDefinition("parent", spawnable_agents=[child], handle_steps=handle_steps)
    limits = {"depth": Limits(max_depth=0), "tokens": Limits(max_tokens=3), "window": Limits(max_concurrent_children=1)}
    journal = recorded(agent, [text("hi")] * 3, limits=limits.get(how))
    with Engine([agent], models=ScriptedModel([])) as engine:
        replayed = engine.replay_sync(journal)
        with engine.stepper(journal) as stepper:
            stepper.advance_to(stepper.tape.last_position)

            assert replayed.output == stepper.finished.output
            assert replayed.state == attrs.evolve(stepper.finished.state, usage=replayed.state.usage)


@pytest.mark.spec("evaluation:JG111")
def test_cut_off_run_stops_at_its_effect_in_doubt() -> None:
    def handle_steps(ctx: Any) -> Any:
        for number in range(3):
            yield from call("read", str, n=number)

    agent = AgentDefinition("reader", tools=[read], handle_steps=handle_steps)
    lines = recorded(agent).lines()
    cut = MemoryJournal(lines[:5])
    with stepped(agent, cut) as stepper:
        stepper.advance_to(99)
        moment = stepper.moment()

    assert (1, "#1", None, 1) == (moment.position, moment.address, moment.outcome, moment.frames[0].locals["number"])


@pytest.mark.spec("evaluation:JG2")
def test_second_stepper_shares_the_record_and_finds_other_effects() -> None:
    kinds: list[Any] = []

    def handle_steps(ctx: Any) -> Any:
        yield from (call("read", str) if not kinds else Perform(len, "a"))

    agent = AgentDefinition("reader", tools=[read], handle_steps=handle_steps)
    with stepped(agent, recorded(agent)) as stepper:
        stepper.advance_to(stepper.tape.last_position)
        with stepper.copy_at_start() as other:
            assert other.tape.history is stepper.tape.history

            other.advance_to(1)

            assert "" == other.moment().address
        kinds.append(1)
        with pytest.raises(ReplayDivergence):
            stepper.copy_at_start()


def test_closing_runs_the_finally_blocks_of_handlers_children_first() -> None:
    closed: list[str] = []

    def handle_child(ctx: Any) -> Any:
        try:
            yield from call("read", str)
        finally:
            closed.append("child")

    def handle_steps(ctx: Any) -> Any:
        try:
            yield from AgentCall("child")
        finally:
            closed.append("parent")

    child = AgentDefinition("child", tools=[read], handle_steps=handle_child)
    agent = AgentDefinition("parent", spawnable_agents=[child], handle_steps=handle_steps)
    journal = recorded(agent)
    closed.clear()
    stepper = stepped(agent, journal)
    stepper.moment()
    stepper.close()
    stepper.close()

    assert ["child", "parent"] == closed


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
        assert [1, 1, 2, 2, 3] == [stepper.tape.get_step_at(position) for position in range(stepper.tape.last_position)]
        assert [0, 2, 4, None, None] == [stepper.tape.find_step_position(step) for step in (1, 2, 3, 4, 0)]
        assert (3, None) == (stepper.tape.find_position("", 3), stepper.tape.find_position("3", 0))
        assert (3, 0) == (stepper.tape.count_steps(), stepper.tape.count_steps("1"))
