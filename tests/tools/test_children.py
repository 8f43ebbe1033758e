"""The tools by which a model runs agents in the background, and waits: each of them, what the model is told, and its record."""

from __future__ import annotations

import asyncio
import json
import math

import pytest

from stepengine import AgentDefinition, Engine, Limits, Parallel, Sleep, ToolCall
from stepengine.errors import ToolInputError
from stepengine.journal import MemoryJournal
from stepengine.testing import Clock, ScriptedModel, text, tool_call
from stepengine.tools.bundled import child_tools, sleep_tool


def quick(ctx):
    return f"did {ctx.prompt}"
    yield


def slow(ctx):
    yield from Sleep(3600)
    return "late"


def broken(ctx):
    raise ValueError("no such file")
    yield


HELPERS = [
    AgentDefinition("quick", handle_steps=quick),
    AgentDefinition("slow", handle_steps=slow),
    AgentDefinition("broken", handle_steps=broken),
]


def lead(**fields):
    names = [agent.id for agent in HELPERS]
    return AgentDefinition("lead", model="t/m", tools=[*child_tools(), sleep_tool()], spawnable_agents=names, **fields)


def start(*names):
    return tool_call("start_agents", {"agents": [{"agent_type": name, "prompt": "it"} for name in names]})


def by_hand(handler):
    return AgentDefinition(
        "lead", handle_steps=handler, tools=[*child_tools(), sleep_tool()], spawnable_agents=[a.id for a in HELPERS]
    )


async def ran(agent, **fields):
    async with Engine([agent, *HELPERS], **fields) as engine:
        return await engine.run(agent, "go")


def said(request):
    return "\n".join([str(message) for message in request.messages])


@pytest.mark.spec("waiting:WT10")
async def test_a_handler_starts_lists_cancels_and_waits_with_tool_calls():
    def handle_steps(ctx):
        agents = [{"agent_type": "quick", "prompt": "it"}, {"agent_type": "slow"}, {"agent_type": "nobody"}]
        begun = (yield from ToolCall("start_agents", {"agents": agents})).data
        first, second = begun[0]["id"], begun[1]["id"]
        done = (yield from ToolCall("wait_agents", {"ids": [first]})).data
        listed = (yield from ToolCall("list_agents", {})).data["agents"]
        ended = (yield from ToolCall("cancel_agent", {"id": second, "reason": "enough"})).data
        late = yield ToolCall("message_agent", {"id": first, "text": "hi"})
        wrong = yield ToolCall("wait_agents", {"ids": ["77"]})
        return [begun, done, listed, ended, str(late.tool_result), str(wrong.tool_result)]

    async with asyncio.timeout(60):
        result = await ran(by_hand(handle_steps))

    result.unwrap()
    begun, done, listed, ended, late, wrong = json.loads(json.dumps(result.output, default=list))
    assert "nobody" in begun[2]["error"]
    assert "id" not in begun[2]
    assert [entry["output"] for entry in done["done"]] == ["did it"]
    assert done["at_work"] == []
    assert [(entry["agent_type"], entry["at_work"]) for entry in listed] == [("quick", False), ("slow", True)]
    assert ended["id"] == begun[1]["id"]
    assert "enough" in ended["error"]
    assert "has ended already" in late
    assert "'77'" in wrong
    assert "(quick)" in wrong


@pytest.mark.spec("waiting:WT10")
async def test_a_model_is_notified_once_of_each_finished_child():
    model = ScriptedModel([start("quick", "broken"), text("I wait."), text("I wait on."), text("All done.")])
    result = await ran(lead(), models=model)

    heard = [said(call) for call in model.calls]
    assert result.status.value == "completed", result.error
    assert "did it" in heard[-1]
    assert "no such file" in heard[-1]
    assert heard[-1].count("did it") == 1
    assert heard[-1].count("no such file") == 1


@pytest.mark.spec("waiting:WT12")
@pytest.mark.parametrize("most", [None, math.inf, 1e12])
async def test_a_turn_with_a_running_child_continues_at_its_end(most):
    clock, model = Clock(waits=True), ScriptedModel([start("slow"), text("I wait."), text("It said late.")])
    agent = lead(limits=Limits(max_wait_seconds=most))
    async with Engine([agent, *HELPERS], models=model, clock=clock) as engine:
        running = asyncio.create_task(engine.run("lead", "go"))
        async with asyncio.timeout(60):
            await clock.wait_for_sleepers()
            assert len(model.calls) == 2
            clock.advance(hours=1)
            result = await running

    assert result.text == "It said late."
    assert "late" in said(model.calls[2])


@pytest.mark.spec("waiting:WT12")
async def test_a_turn_waits_no_longer_than_its_limit():
    clock, model = Clock(waits=True), ScriptedModel([start("slow"), text("I wait.")])
    agent = lead(limits=Limits(max_wait_seconds=60))
    async with Engine([agent, *HELPERS], models=model, clock=clock) as engine:
        running = asyncio.create_task(engine.run("lead", "go"))
        async with asyncio.timeout(60):
            await clock.wait_for_sleepers(2)
            clock.advance(seconds=61)
            result = await running

    assert result.text == "I wait."
    assert any("it waited 60 s for background children" in warning for warning in result.warnings)


@pytest.mark.spec("waiting:WT10")
async def test_a_returned_result_is_replayed_and_not_notified_again():
    model = ScriptedModel([start("quick"), tool_call("wait_agents", {}), text("Done.")])
    journal = MemoryJournal()
    async with Engine([lead(), *HELPERS], models=model) as engine:
        first = await engine.run("lead", "go", journal=journal)
        again = await engine.replay(journal)

    assert (again.text, again.tool_calls) == (first.text, first.tool_calls)
    assert said(model.calls[-1]).count("did it") == 1
    assert "have ended" not in said(model.calls[-1])
    assert len(model.calls) == 3


@pytest.mark.spec("waiting:WT11")
async def test_a_model_sleeps_and_receives_its_note():
    clock = Clock(waits=True)
    model = ScriptedModel([tool_call("sleep", {"seconds": 600, "note": "look at the build"}), text("Looked.")])
    async with Engine([lead(), *HELPERS], models=model, clock=clock) as engine:
        running = asyncio.create_task(engine.run("lead", "go"))
        async with asyncio.timeout(60):
            await clock.wait_for_sleepers()
            clock.advance(minutes=10)
            result = await running

    assert result.text == "Looked."
    assert "Your note: look at the build" in said(model.calls[1])


@pytest.mark.parametrize("seconds", [-1, 31 * 24 * 3600, "soon"])
async def test_an_invalid_sleep_is_refused(seconds):
    def handle_steps(ctx):
        turn = yield ToolCall("sleep", {"seconds": seconds})
        return str(turn.tool_result)

    result = await ran(by_hand(handle_steps))
    assert isinstance(result.error, ToolInputError)


@pytest.mark.spec("waiting:WT10")
async def test_child_tools_are_refused_in_parallel():
    def handle_steps(ctx):
        yield from Parallel(ToolCall("list_agents", {}), ToolCall("list_agents", {}))

    result = await ran(by_hand(handle_steps))
    assert isinstance(result.error, ToolInputError)
    assert "cannot be in Parallel" in str(result.error)


@pytest.mark.spec("waiting:WT12")
async def test_a_run_is_suspended_while_its_child_sleeps_and_resumes():
    model, journal = ScriptedModel([start("slow"), text("I wait."), text("It said late.")]), MemoryJournal()
    clock = Clock(waits=True)
    async with asyncio.timeout(60), Engine([lead(), *HELPERS], models=model, clock=clock) as engine:
        first = await engine.run("lead", "go", journal=journal)
        clock.advance(hours=1)
        then = await engine.resume(journal)
        again = await engine.replay(journal)

    assert (first.status.value, first.wakes_at is not None) == ("suspended", True)
    assert (then.status.value, then.text, again.text) == ("completed", "It said late.", "It said late.")
    assert said(model.calls[-1]).count("have ended") == 1
    assert len(model.calls) == 3
