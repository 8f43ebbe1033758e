"""
What a server of its own serves in tests of remote agents; what its tools do it tells the file WORLD, as in ``tests/server``.
"""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

from stepengine import STEP, AgentDefinition, Ask, InputSchema, StepContext, Usage, call, tool
from stepengine.permissions import Policy, Rule
from stepengine.testing import ScriptedModel, text
from stepengine.testing import tool_call as called

WORLD = Path(os.environ["WORLD"])


def happened(what: str, name: str) -> None:
    line = json.dumps({"what": what, "name": name, "pid": os.getpid()}) + "\n"
    with WORLD.open("a") as world:
        world.write(line)


@tool(category="read")
def look(name: str) -> str:
    """
    Look at something.

    Args:
        name: What.
    """
    happened("look", name)
    return f"{name} is there"


@tool(category="execute")
def deploy(place: str) -> str:
    """
    Deploy.

    Args:
        place: Where.
    """
    happened("deploy", place)
    return f"deployed to {place}"


@tool
async def hold(name: str) -> str:
    """
    Wait until somebody lets go.

    Args:
        name: What.
    """
    happened("begun", name)
    try:
        while not WORLD.with_suffix(".go").exists():  # noqa: ASYNC110 - another process makes it
            await asyncio.sleep(0.02)
    except asyncio.CancelledError:
        happened("cancelled", name)
        while WORLD.with_suffix(".linger").exists():  # noqa: ASYNC110 - as above
            await asyncio.sleep(0.02)
        raise
    happened("held", name)
    return f"held {name}"


def talking(ctx: StepContext) -> Any:
    yield STEP
    end = yield STEP
    return {"said": end.text, "params": ctx.params}


def asking(ctx: StepContext) -> Any:
    yield from call(look, name=ctx.prompt)
    size = yield from Ask("Which size?", options=["S", "L"])
    extras = yield from Ask("What else?", options=["bag", "card", "bow"], multi_select=True)
    try:
        done = yield from call(deploy, place=ctx.prompt)
    except Exception as error:
        done = f"no: {error}"
    return [size, extras, str(done)]


def holding(ctx: StepContext) -> Any:
    return (yield from call(hold, name=ctx.prompt))


def breaking(ctx: StepContext) -> Any:
    yield STEP
    msg = "nobody has told me how"
    raise ValueError(msg)


def reply(request: Any) -> Any:
    if any(message.role == "tool" for message in request.messages):
        return text("All of it is there.", usage=Usage(input_tokens=1_000, output_tokens=100), cost="0.0045")
    return called("look", {"name": "the shop"}, usage=Usage(input_tokens=10), cost="0.0005")


params = {"type": "object", "properties": {"depth": {"type": "integer"}}, "additionalProperties": False}
MODEL = "anthropic/claude-sonnet-4-5"
agents = [
    AgentDefinition(
        "talking", model=MODEL, tools=[look], handle_steps=talking, input_schema=InputSchema(params=params)
    ),
    AgentDefinition("asking", tools=[look, deploy], handle_steps=asking),
    AgentDefinition("holding", tools=[hold], handle_steps=holding),
    AgentDefinition("breaking", model=MODEL, tools=[look], handle_steps=breaking),
]
models = ScriptedModel(reply)
options = {"permissions": Policy([Rule.allow_category("read"), Rule.allow_tool("hold")])}
