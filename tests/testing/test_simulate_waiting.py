"""
`simulate` makes up times, messages and orders of completion, and loses wakes.
"""

from __future__ import annotations

from datetime import timedelta

import pytest

from stepengine import (
    AgentCall,
    AgentDefinition,
    Cancel,
    Parallel,
    Perform,
    Race,
    Receive,
    Send,
    Sleep,
    Start,
    ToolCall,
    Wait,
)
from stepengine.testing import SimulationFailed, simulate
from stepengine.testing.faults import Fault


def named(name):
    def handle_steps(ctx):
        yield from Perform(print, name)
        said = yield from Receive("go", timeout=60)
        return f"{name} {ctx.prompt} {said is None}"

    return AgentDefinition(name, handle_steps=handle_steps)


CHILDREN = [named(name) for name in "abcd"]


def parent(handle_steps):
    return AgentDefinition("parent", handle_steps=handle_steps, spawnable_agents=CHILDREN)


def busy(ctx):
    """Do all that waits."""
    first, second, third = yield from Start(*[AgentCall(one.id, "x") for one in CHILDREN[:3]])
    yield from Send(first, "hurry")
    yield from Send(second, {"now": True}, topic="go")
    some = yield from Wait(first, second, third, need="any", timeout=30)
    before = ctx.now()
    woke = yield from Sleep(3600)
    assert woke - before >= timedelta(hours=1)
    order = yield from Receive(
        "orders", timeout=10, schema={"type": "object", "properties": {"n": {"type": "integer"}}}
    )
    number, _ = yield from Race(Sleep(60), Receive("stop"), AgentCall("d"), Wait(third))
    yield from Parallel(Sleep(60), Wait(first), AgentCall("d"), Perform(len, "x"))
    for ref in some.open:
        yield from Cancel(ref, "no need")
    yield from Start(AgentCall("d", "left"))
    yield from Start(AgentCall("a", "kept"), on_return="wait")
    return [number, order is None]


@pytest.mark.deep
@pytest.mark.spec("waiting:WT24", "waiting:WT4")
def test_all_that_waits_goes_through_every_kind_of_fault():
    done = simulate(parent(busy), seeds=range(300))

    assert {"late", "never", "lost_wake", "crash", "crash_inside", "crash_after", "cancel"} <= {*done.faults}


@pytest.mark.spec("waiting:WT4", "waiting:WT24")
@pytest.mark.deep
def test_all_500_orders_of_ending_children_give_one_result():
    def handle_steps(ctx):
        refs = yield from Start(*[AgentCall(one.id) for one in CHILDREN])
        first = yield from Wait(*refs, need=2)
        rest = yield from Wait(*first.open)
        by_id = {child.agent_id: child.output for child in (*first.done, *rest.done)}
        return [by_id[one.id] for one in CHILDREN]

    assert simulate(parent(handle_steps), seeds=[0], orders=500, messages={"go": []}).runs == 500


@pytest.mark.spec("waiting:WT24")
def test_an_order_dependent_handler_is_reported_with_both_orders():
    def handle_steps(ctx):
        refs = yield from Start(*[AgentCall(one.id) for one in CHILDREN[:2]])
        first = (yield from Wait(*refs, need="any")).done[0]
        yield from ToolCall(f"use_{first.agent_id}", include_tool_call=False)
        return first.agent_id

    with pytest.raises(SimulationFailed) as caught:
        simulate(parent(handle_steps), seeds=[0], orders=50, results={"use_a": "x", "use_b": "y"})

    said = str(caught.value)
    assert caught.value.row == "WT4"
    assert "when children end in the order " in said
    assert "they differ at 3" in said


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("waiting:WT24")
def test_sent_messages_come_in_order_and_then_end():
    seen = []

    def handle_steps(ctx):
        got, before = [], ctx.now()
        while (order := (yield from Receive("orders", timeout=60))) is not None:
            got.append(order)
        seen.append((got, ctx.now() - before >= timedelta(minutes=1)))
        return got

    simulate(parent(handle_steps), seeds=range(20), faults=["crash", "lost_wake"], messages={"orders": [1, 2, 3]})

    assert {(tuple(got), is_over) for got, is_over in seen} == {((1, 2, 3), True)}


@pytest.mark.spec("waiting:WT24")
def test_a_lost_wake_reveals_a_handler_with_its_own_clock():
    def handle_steps(ctx):
        before = ctx.now()
        woke = yield from Sleep(60)
        if woke - before > timedelta(hours=1):
            raise ValueError("too late")

    with pytest.raises(SimulationFailed, match="the run wakes hours too late") as caught:
        simulate(parent(handle_steps), seeds=range(200))

    assert caught.value.faults == (Fault(0, "lost_wake"),)


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("waiting:WT4")
@pytest.mark.parametrize("seeds", [range(20), None])
def test_orders_are_compared_with_the_same_faults(seeds):
    """
    A fault changes the output, and so does not count as another order.
    """

    def child(name):
        def handle_steps(ctx):
            result = yield from ToolCall("use", include_tool_call=False)
            return f"{name} {result.is_error}"

        return AgentDefinition(name, handle_steps=handle_steps)

    def handle_steps(ctx):
        refs = yield from Start(AgentCall("a"), AgentCall("b"))
        done = (yield from Wait(*refs)).done
        return sorted([str(one.output) for one in done])

    agent = AgentDefinition("parent", handle_steps=handle_steps, spawnable_agents=[child("a"), child("b")])

    done = simulate(agent, seeds=seeds, orders=3, faults=["failure"], results={"use": "x"})

    assert 0 < done.faults["failure"]
