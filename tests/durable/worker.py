"""
A worker for tests that kill it: ``python worker.py DB EXECUTOR WORLD [DIES]``.

Its tools tell a file, the world, when they begin and end. With DIES, the process kills itself in the middle of each effect,
and right after each effect has ended, once for each in the whole life of the world.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

from stepengine import (
    STEP,
    AgentCall,
    AgentDefinition,
    Ask,
    Parallel,
    Perform,
    Receive,
    Sleep,
    Start,
    StepContext,
    Steps,
    ToolAnnotations,
    ToolCall,
    Wait,
    call,
    tool,
)
from stepengine.durable import DurableEngine
from stepengine.errors import UnknownOutcome
from stepengine.testing import ScriptedModel, text, tool_call

WORLD = Path(os.environ.get("WORLD", "world.jsonl"))
DIES = os.environ.get("DIES") == "1"
SLOW = float(os.environ.get("SLOW", "0"))


def tell(what: str, name: str) -> None:
    with WORLD.open("a") as file:
        file.write(json.dumps({"what": what, "name": name, "pid": os.getpid()}) + "\n")
        file.flush()
        os.fsync(file.fileno())


def die_once(where: str) -> None:
    if DIES and not any(json.loads(line)["name"] == where for line in WORLD.read_text().splitlines()):
        tell("died", where)
        os.kill(os.getpid(), signal.SIGKILL)


async def happen(name: str) -> str:
    tell("began", name)
    die_once(f"in {name}")
    await asyncio.sleep(SLOW)
    tell("ended", name)
    if DIES:
        # A moment later: before, while or after the result is written.
        asyncio.get_running_loop().call_later(0.002, die_once, f"after {name}")
    return name


@tool(annotations=ToolAnnotations(idempotent=True))
async def look(name: str) -> str:
    """
    Do something that may be done again.

    Args:
        name: What.
    """
    return await happen(name)


@tool
async def fire(name: str) -> str:
    """
    Do something that must not be done twice.

    Args:
        name: What.
    """
    return await happen(name)


async def measured(name: str) -> str:
    return await happen(name)


def child_steps(ctx: StepContext):
    first = yield from call(look, f"{ctx.prompt}-look")
    second = yield from Perform.idempotent(measured, f"{ctx.prompt}-measured")
    return [first, second]


def steps(ctx: StepContext):
    run = ctx.prompt
    seen = [(yield from call(look, f"{run}-0")), (yield from call(look, f"{run}-1"))]
    try:
        yield from call(fire, f"{run}-fire")
        fired = "fired"
    except UnknownOutcome:
        fired = "unknown"
    child = yield from AgentCall("child", f"{run}-a")
    both = yield from Parallel(
        ToolCall("look", {"name": f"{run}-p"}), AgentCall("child", f"{run}-b"), ToolCall("look", {"name": f"{run}-q"})
    )
    said = yield STEP
    end = yield STEP
    return {
        "seen": seen, "fired": fired, "child": child, "both": [both[0].text, both[1].output, both[2].text],
        "called": [result.text for result in said.tool_results], "end": end.text,
    }  # fmt: skip


@tool(uses=[look])
def twice(name: str) -> Steps[str]:
    """
    Look twice.

    Args:
        name: At what.
    """
    first = yield from call(look, f"{name}-first")
    second = yield from call(look, f"{name}-second")
    return f"{first} {second}"


@tool(uses=[look, fire, twice])
def prepare(name: str) -> Steps[str]:
    """
    Do what takes a few effects.

    Args:
        name: What for.
    """
    seen = yield from call(twice, f"{name}-inner")
    try:
        yield from call(fire, f"{name}-fire")
        fired = "fired"
    except UnknownOutcome:
        fired = "unknown"
    child = yield from AgentCall("child", f"{name}-child")
    return f"{seen} {fired} {child[0]} {child[1]}"


def yielding_steps(ctx: StepContext):
    run = ctx.prompt
    alone = yield from call(prepare, f"{run}-alone")
    together = yield from Parallel(
        ToolCall("prepare", {"name": f"{run}-a"}),
        ToolCall("look", {"name": f"{run}-p"}),
        ToolCall("twice", {"name": f"{run}-b"}),
    )
    yield from call(look, f"{run}-last")
    return [alone, *[each.text for each in together]]


def talking_steps(ctx: StepContext):
    heard = [message.text for message in ctx.agent_state.message_history if message.role == "user"]
    yield from call(look, f"{ctx.prompt}-first")
    yield from call(look, f"{ctx.prompt}-second")
    return heard


def night_steps(ctx: StepContext):
    name, _, seconds = ctx.prompt.partition(":")
    if name == "hook":
        name = (yield from Receive("webhook"))["name"]
    if seconds:
        yield from Sleep(float(seconds))
    first = yield from call(look, f"{name}-look")
    second = yield from call(fire, f"{name}-fire")
    return [first, second]


def nightly_steps(ctx: StepContext):
    yield from call(fire, "begin")
    refs = yield from Start(
        AgentCall("night", "hook"), AgentCall("night", f"sleeper:{ctx.prompt}"), AgentCall("night", "worker")
    )
    worker = yield from Wait(refs[2])
    size = yield from Ask("How large?")
    yield from call(fire, "asked")
    waited = yield from Wait(*refs)
    yield from call(fire, "end")
    return [worker.done[0].output, size, [waited[ref].output for ref in refs]]


def reply(request):
    """
    Give one tool call, and the end when its result is there.
    """
    name = next(m.text for m in request.messages if m.role == "user")
    if any(m.role == "tool" and m.text == f"{name}-model" for m in request.messages):
        return text(f"done {name}")
    return tool_call("look", {"name": f"{name}-model"})


def model() -> ScriptedModel:
    return ScriptedModel([reply] * 100_000)


CHILD = AgentDefinition("child", tools=[look], handle_steps=child_steps)
PARENT = AgentDefinition("parent", model="test/model", tools=[look, fire], spawnable_agents=[CHILD], handle_steps=steps)
TALKING = AgentDefinition("talking", tools=[look], handle_steps=talking_steps)
YIELDING = AgentDefinition(
    "yielding", tools=[prepare, twice, look], spawnable_agents=[CHILD], handle_steps=yielding_steps
)
NIGHT = AgentDefinition("night", tools=[look, fire], handle_steps=night_steps)
NIGHTLY = AgentDefinition("nightly", tools=[fire], spawnable_agents=[NIGHT], handle_steps=nightly_steps)
AGENTS = [PARENT, TALKING, YIELDING, NIGHTLY]


async def serve(db: str, executor: str) -> None:
    async with DurableEngine(AGENTS, models=model(), db=db, executor=executor, polling=0.1):
        tell("serves", executor)
        stopped = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
        await stopped.wait()


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], sys.argv[2]))
