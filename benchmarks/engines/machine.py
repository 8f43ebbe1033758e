"""
stepengine's machine alone: no event loop, no driver, no provider and no tool; the outcomes of all effects are there before.

The tool's input passes unchecked, since validation belongs to the tool. The collector is off meanwhile.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from random import Random

from benchmarks.journal_floor import agent
from stepengine import STEP, AgentDefinition, Limits, StepContext, Steps, ToolCall, ToolResult
from stepengine.data.effects import CallModel, CallTool
from stepengine.data.outcomes import Value
from stepengine.data.state import AgentState
from stepengine.data.tools import ToolBinding, ToolSpec, Validated
from stepengine.machine import RunPlan, run_agent
from stepengine.machine.plan import PlannedAgent, RunHost, RunInput
from stepengine.testing import text, tool_call

CREATED = datetime(2026, 1, 1, tzinfo=UTC)
REPEATS = 20


def stepping(_: StepContext) -> Steps:
    """Look at the state after every step."""
    while not (yield STEP).steps_complete:
        pass


def calling(steps: int) -> Callable[[StepContext], Steps]:
    """Return a handler that calls the tool itself."""

    def handler(_: StepContext) -> Steps:
        for number in range(steps):
            yield ToolCall("add", {"a": number, "b": 1})

    return handler


def plan_for(kind: str, steps: int) -> RunPlan:
    """Return the plan of a run of *steps* steps: by the model alone, with a handler's ``STEP`` or a handler's ``ToolCall``."""
    handlers = {"plain": None, "step": stepping, "call": calling(steps)}
    definition = AgentDefinition(
        "adder",
        model="counting/model",
        tools=["add"],
        limits=Limits(max_steps=steps + 1, max_actions=steps + 1),
        handle_steps=handlers[kind],
    )
    return RunPlan(
        agent=PlannedAgent(definition=definition, offered=("add",)),
        run_id="r",
        created=CREATED,
        random=partial(Random, 1),
        model=definition.model,
        tools={"add": ToolBinding(ToolSpec("add"), lambda value: Validated(value, value))},
        limits=definition.limits,
        input=RunInput(prompt="add"),
        host=RunHost(is_watched=bool),
    )


def floor_spent(steps: int) -> float:
    """Return the CPU seconds of a bare generator that makes a new state a step, sent what it asks for."""
    send, sent = agent(steps).send, None
    gc.collect()
    gc.disable()
    start = time.process_time()
    try:
        while True:
            kind, what = send(sent)
            sent = {"a": what, "b": 1} if kind == "model_call" else what["a"] + what["b"]
    except StopIteration as stop:
        state = stop.value
    took = time.process_time() - start
    gc.enable()
    assert (state.steps, state.last) == (steps, steps)
    return took


def spent(kind: str, steps: int) -> float:
    """Return the CPU seconds of one run of the machine, or of its floor."""
    if kind == "floor":
        return floor_spent(steps)
    plan, state = plan_for(kind, steps), AgentState(run_id="r", agent_id="adder")
    replies = [Value(tool_call("add", {"a": n, "b": 1}), at=n) for n in range(steps)]
    reply = iter([*replies, Value(text("done"), at=steps)]).__next__
    result = iter([Value(ToolResult.json(n + 1), at=n) for n in range(steps)]).__next__
    send, outcome = run_agent(plan, state).send, None
    gc.collect()
    gc.disable()
    start = time.process_time()
    try:
        while True:
            asked = type(send(outcome))
            outcome = reply() if asked is CallModel else result() if asked is CallTool else None
    except StopIteration as stop:
        finished = stop.value
    took = time.process_time() - start
    gc.enable()
    assert sum(call.result.data for call in finished.tool_calls) == sum(range(steps)) + steps, finished.error
    return took


def cost(kind: str, steps: int) -> float:
    """Return the CPU seconds of the best of many runs."""
    return min(spent(kind, steps) for _ in range(REPEATS))
