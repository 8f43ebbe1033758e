"""
Agents on a stage: a real engine with a simulated model and tools, whose every deed is counted outside of the engine.

What the model says depends on the request and a seed alone, so that a call that is made again gets the same reply.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from typing import Any

import attrs

from stepengine import (
    STEP,
    STEP_ALL,
    AgentCall,
    AgentDefinition,
    Ask,
    Complete,
    Engine,
    GenerateN,
    Hooks,
    Limits,
    Parallel,
    Perform,
    StepText,
    StepWith,
    Tool,
    ToolCall,
    map_agents,
)
from stepengine.data.effects import AskPerson, CallModel, Spawn
from stepengine.data.models import ModelReply
from stepengine.data.outcomes import Value
from stepengine.data.tools import ToolAnnotations
from stepengine.errors import StepEngineError
from stepengine.models import Provider
from stepengine.testing import Clock
from stepengine.testing.world import GeneratedOutcomes

RUN_ID = re.compile("[0-9a-f]{12}")
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}}


async def acted(given: Any) -> str:
    await asyncio.sleep(0)
    return f"did {given.get('n', 0)}"


READ = Tool(
    name="read",
    description="Read.",
    input_schema=SCHEMA,
    run=acted,
    annotations=ToolAnnotations(read_only=True),
    parallel_safe=True,
)
WRITE = Tool(name="write", description="Write.", input_schema=SCHEMA, run=acted)
BOTH = [READ, WRITE]


async def fetched(name: str) -> dict[str, str]:
    await asyncio.sleep(0)
    return {"name": name}


# --- agents ---------------------------------------------------------------------------------------------------------


def careful(ctx):
    total = []
    for n in range(4):
        try:
            total.append((yield from ToolCall("write", {"n": n})).text)
            total.append((yield from Perform(fetched, f"page {n}"))["name"])
        except StepEngineError as error:
            total.append(type(error).__name__)
        yield from Perform.idempotent(fetched, "again")
    return total


def batching(ctx):
    yield Parallel(
        [ToolCall("read", {"n": 1}), ToolCall("write", {"n": 2}), Perform(fetched, "beside"), AgentCall("kid")]
    )
    yield GenerateN(3)
    yield Complete("x")
    yield STEP
    return str(ctx.random.random())


def wording(ctx):
    yield STEP
    yield ToolCall("set_messages", {"messages": [{"role": "user", "content": "begin again"}]})
    yield ToolCall("add_message", {"role": "user", "content": "x"})
    yield StepText('<tool_call>{"name": "read", "input": {"n": 3}}</tool_call>')
    yield StepWith(tool_choice="none")


def asking(ctx):
    answer = yield from Ask("Which?", ["a", "b"])
    yield ToolCall("write", {"n": 7})
    return answer


def leading(ctx):
    children = yield from map_agents("kid", ["one", "two", "three"])
    yield STEP_ALL
    return len(children)


def noting(ctx, *_):
    yield from Perform(fetched, f"note {ctx.step_index}")
    yield ToolCall("read", {"n": 9})


KID = AgentDefinition("kid", description="Helps.", tools=BOTH)
BOSS = AgentDefinition("boss", description="Leads.", tools=[READ, "spawn_agents"], spawnable_agents=[KID])
FEW = Limits(max_steps=3, on_max_steps="stop")
CAST = {
    agent.id: agent
    for agent in (
        AgentDefinition("plain", tools=BOTH, limits=FEW),
        AgentDefinition("careful", tools=BOTH, handle_steps=careful),
        AgentDefinition("batching", tools=BOTH, spawnable_agents=[KID], handle_steps=batching, limits=FEW),
        AgentDefinition("wording", tools=BOTH, handle_steps=wording),
        AgentDefinition("asking", tools=BOTH, handle_steps=asking),
        AgentDefinition("leading", tools=[READ], spawnable_agents=[KID], handle_steps=leading, limits=FEW),
        AgentDefinition("hooked", tools=BOTH, hooks=Hooks(pre_step=[noting], post_tool=[noting]), limits=FEW),
        AgentDefinition("root", tools=["spawn_agents", WRITE], spawnable_agents=[BOSS, KID], limits=FEW),
        AgentDefinition("within", tools=["spawn_agent_inline", READ], spawnable_agents=[KID], limits=FEW),
        AgentDefinition(
            "spent", tools=BOTH, handle_steps=batching, spawnable_agents=[KID], limits=Limits(max_tokens=250)
        ),
        AgentDefinition("last-words", tools=BOTH, limits=Limits(max_steps=1)),
        AgentDefinition(
            "planning", tools=["write_todos", "set_output", READ], output_mode="structured_output", limits=FEW
        ),
    )
}
ANSWERS = {"Which?": "b"}


# --- the stage ------------------------------------------------------------------------------------------------------


class Voice(Provider):
    """
    A model whose reply depends on seed and request alone.
    """

    name = "voice"

    def __init__(self, seed: int) -> None:
        self.canned = GeneratedOutcomes(seed)
        self.seed = seed

    def supports_model(self, model: str) -> bool:
        return True

    def check(self, model: str) -> None:
        pass

    async def complete(self, request: Any) -> ModelReply:
        await asyncio.sleep(0)
        said = [(m.role, m.text) for m in request.all_messages]
        # Results of children tell of run ids, which no two runs share.
        outcome = self.canned.create_outcome(RUN_ID.sub("", f"{said}"), CallModel(0, request), 0)
        assert isinstance(outcome, Value)
        return outcome.value


@attrs.define
class Deeds:
    """
    What was done for real: how often each effect began, and how many requests were sent.
    """

    begun: Counter[tuple[str, int]] = attrs.field(factory=Counter)
    requests: int = 0

    def wrap(self, inner: Any) -> Any:
        return _Counting(self, inner)


class _Counting:
    """
    Stands between the leaves and whatever records.
    """

    def __init__(self, deeds: Deeds, inner: Any) -> None:
        self.deeds = deeds
        self.inner = inner
        self.begin = inner.begin

    async def perform(self, item: Any, io: Any) -> Any:
        deeds, effect = self.deeds, item.effect
        if not isinstance(effect, AskPerson | Spawn):
            deeds.begun[(item.path, effect.seq)] += 1
        deeds.requests += isinstance(effect, CallModel)
        return await self.inner.perform(item, io)


class Stage(Engine):
    """
    An engine that counts what is done for real.
    """

    def __init__(self, agent: AgentDefinition[Any], seed: int = 0, **options: Any) -> None:
        super().__init__(
            [agent], models=Voice(seed), pricing=None, default_model="test/model", clock=Clock(), **options
        )
        self.deeds = Deeds()
        services = self._launcher.services
        self._launcher.services = attrs.evolve(services, middlewares=(self.deeds.wrap,))
