"""
stepengine: a model that answers in process, a validated tool, immutable state, events; no journal.

One engine serves all runs, as it would in an application; definitions and engines hold no run state.
"""

from __future__ import annotations

import gc
import time
from functools import cache

from stepengine import STEP, AgentCall, AgentDefinition, Engine, Limits, Parallel, RunResult, StepContext, Steps, tool
from stepengine.models import ModelReply, ModelRequest, Provider
from stepengine.testing import text, tool_call


@tool(in_thread=False)
def add(a: int, b: int) -> int:
    """
    Add two numbers.

    Args:
        a: One number.
        b: Another number.
    """
    return a + b


class Counting(Provider):
    """A model that asks for *steps* calls and then stops; what comes next is read from the request."""

    name = "counting"

    def __init__(self, steps: int) -> None:
        self.steps = steps

    async def complete(self, request: ModelRequest) -> ModelReply:
        """Return the next reply."""
        number = len(request.messages) // 2
        return tool_call("add", {"a": number, "b": 1}) if number < self.steps else text("done")


def until_done(_: StepContext) -> Steps:
    """Run step by step, looking at the state after each one."""
    while True:
        turn = yield STEP
        if turn.steps_complete:
            return


@cache
def engine_for(steps: int) -> Engine:
    """Return the engine for runs of *steps* steps, with an agent without a handler and one with."""
    limits = Limits(max_steps=steps + 1)
    agents = [
        AgentDefinition("adder", model="counting/model", tools=[add], limits=limits),
        AgentDefinition("stepper", model="counting/model", tools=[add], limits=limits, handle_steps=until_done),
    ]
    return Engine(agents=agents, models=Counting(steps), pricing=None)


async def result_of(steps: int, agent: str = "adder") -> RunResult:
    """Return the result of one run."""
    result = await engine_for(steps).run(agent, "add")
    result.unwrap()
    return result


async def children(count: int) -> float:
    """Return the CPU seconds of a parent and its children, which run at once; the best of three."""

    def lead(_: StepContext) -> Steps:
        yield Parallel(*[AgentCall("child", "go")] * count)

    agents = [AgentDefinition("lead", handle_steps=lead, spawnable_agents=["child"])]
    engine = Engine([*agents, AgentDefinition("child", model="counting/model")], models=Counting(0), pricing=None)
    best = float("inf")
    for _ in range(3):
        gc.collect()
        start = time.process_time()
        result = await engine.run("lead")
        best = min(best, time.process_time() - start)
        assert len(result.children) == count
        assert all(child.text == "done" for child in result.children)
    return best


async def run(steps: int, agent: str = "adder") -> int:
    """Run the agent without a handler; see the package's docstring."""
    result = await result_of(steps, agent)
    return sum(int(call.result.text) for call in result.tool_calls)
