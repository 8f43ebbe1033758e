"""
What ``stepengine serve`` serves in tests that kill it: agents without a real model, whose tools tell a file, the world, what they do.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator

from stepengine import (
    STEP,
    AgentCall,
    AgentDefinition,
    Ask,
    Parallel,
    Receive,
    Sleep,
    StepContext,
    ToolAnnotations,
    ToolCall,
    call,
    tool,
)
from stepengine.data.models import ModelDelta, ModelRequest
from stepengine.errors import UnknownOutcome
from stepengine.testing import ScriptedModel, tool_call

WORLD = os.environ["WORLD"]
SLOW = float(os.environ.get("SLOW", "0.02"))


async def happen(what: str, name: str) -> str:
    line = json.dumps({"what": what, "name": name, "pid": os.getpid()}) + "\n"
    descriptor = os.open(WORLD, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        # One write: several servers tell one world.
        os.write(descriptor, line.encode())
    finally:
        os.close(descriptor)
    await asyncio.sleep(SLOW)
    return name


@tool(annotations=ToolAnnotations(idempotent=True))
async def look(name: str) -> str:
    """
    Do something that may be done again.

    Args:
        name: What.
    """
    return await happen("look", name)


@tool
async def fire(name: str) -> str:
    """
    Do something that must not be done twice.

    Args:
        name: What.
    """
    return await happen("fire", name)


@tool(deferred=True, annotations=ToolAnnotations(idempotent=True))
async def order(name: str) -> None:
    """
    Ask for something whose result comes later, from outside.

    Args:
        name: What.
    """


def fired(name: str):
    try:
        yield from call(fire, name)
    except UnknownOutcome:
        return "unknown"
    return "fired"


def child_steps(ctx: StepContext):
    seen = yield from call(look, f"{ctx.prompt}-look")
    return [seen, (yield from fired(f"{ctx.prompt}-fire"))]


def working_steps(ctx: StepContext):
    before = yield from fired(f"{ctx.prompt}-1")
    child = yield from AgentCall("child", f"{ctx.prompt}-child")
    return [before, child, (yield from fired(f"{ctx.prompt}-2"))]


def asking_steps(ctx: StepContext):
    before = yield from fired(f"{ctx.prompt}-1")
    first = yield from Ask("How large?")
    second = yield from Ask("How many?")
    return [before, first, second, (yield from fired(f"{ctx.prompt}-2"))]


def waiting_steps(ctx: StepContext):
    before = yield from fired(f"{ctx.prompt}-1")
    first = yield from Receive("hook")
    yield from Sleep(0.3)
    second = yield from Receive("hook")
    return [before, first, second, (yield from fired(f"{ctx.prompt}-2"))]


def ordering_steps(ctx: StepContext):
    before = yield from fired(f"{ctx.prompt}-1")
    came = yield from ToolCall("order", {"name": ctx.prompt})
    return [before, came.text, (yield from fired(f"{ctx.prompt}-2"))]


def crowd_steps(ctx: StepContext):
    results = yield from Parallel([AgentCall("child", f"{ctx.prompt}-{number}") for number in range(4)])
    looks = yield from Parallel([ToolCall("look", {"name": f"{ctx.prompt}-all-{number}"}) for number in range(4)])
    return [len(results), len(looks)]


def talking_steps(ctx: StepContext):
    said = yield STEP
    end = yield STEP
    return [[result.text for result in said.tool_results], end.text]


class SlowModel(ScriptedModel):
    """A model that asks for one call, then says how that went, some characters at a time."""

    async def stream(self, request: ModelRequest) -> AsyncIterator[ModelDelta]:
        async for delta in super().stream(request):
            await asyncio.sleep(SLOW)
            yield delta


def reply(request: ModelRequest):
    name, *more = [message.text for message in request.messages if message.role == "user"]
    if any(message.role == "tool" for message in request.messages):
        return f"all of it is done for {name}, as was asked {more}"
    return tool_call("look", {"name": f"{name}-model"})


child = AgentDefinition("child", tools=[look, fire], handle_steps=child_steps)
agents = [
    AgentDefinition("working", tools=[fire], spawnable_agents=[child], handle_steps=working_steps),
    AgentDefinition("asking", tools=[fire], handle_steps=asking_steps),
    AgentDefinition("waiting", tools=[fire], handle_steps=waiting_steps),
    AgentDefinition("ordering", tools=[fire, order], handle_steps=ordering_steps),
    AgentDefinition("crowd", tools=[look], spawnable_agents=[child], handle_steps=crowd_steps),
    AgentDefinition("talking", model="test/model", tools=[look], handle_steps=talking_steps),
]
models = SlowModel(reply)

if __name__ == "__main__":
    import sys

    import uvicorn

    from stepengine import Engine
    from stepengine.durable import DurableEngine
    from stepengine.server import app

    place, tokens, port, patience = sys.argv[1:]
    engine = Engine(agents, models=models)
    if "://" in place:
        durable = DurableEngine(on=engine, db=place, executor=f"served-{port}", polling=0.1)
        served = app(durable, tokens=tokens, wait_for_answers=float(patience))
    else:
        served = app(
            engine,
            runs=place,
            tokens=tokens,
            wait_for_answers=float(patience),
            webhooks=os.environ.get("WEBHOOKS"),
        )
    uvicorn.run(served, port=int(port), log_level="warning", timeout_graceful_shutdown=1)
