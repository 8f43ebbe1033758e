"""
Runs whose events the encoders for web pages are tested with: texts, thoughts, two calls of one tool, a child, questions, failures.
"""

from __future__ import annotations

from typing import Any

from stepengine import (
    STEP,
    AgentCall,
    AgentDefinition,
    Ask,
    Engine,
    Limits,
    ToolContext,
    ToolResult,
    call,
    tool,
)
from stepengine.data.messages import ThinkingPart
from stepengine.errors import ModelError
from stepengine.events import ToolProgress
from stepengine.models import ModelReply
from stepengine.permissions import Policy, Rule
from stepengine.sessions import MemorySessions
from stepengine.testing import ScriptedModel, failure, tool_call, tool_calls


@tool(in_thread=False, parallel_safe=True)
def look(ctx: ToolContext, where: str) -> ToolResult:
    """
    Look somewhere.
    """
    ctx.emit(ToolProgress(message="looking", percent=50))
    return ToolResult.error("it is dark") if where == "cellar" else ToolResult.text(f"nothing in the {where}")


@tool(in_thread=False)
def paint(what: str) -> str:
    """
    Paint something.
    """
    return f"{what} is red"


def asking(ctx: Any) -> Any:
    yield STEP
    ctx.notify("halfway", {"percent": 50})
    size = yield from Ask("Which size?", options=["S", "L"])
    yield AgentCall("kid", prompt=size)
    yield from call(paint, what="the door")
    return f"size {size}"


KID = AgentDefinition("kid", display_name="The kid", model="m/kid", tools=[look, "paint"])
BOSS = AgentDefinition(
    "boss", model="m/boss", tools=[look, paint, "spawn_agents"], spawnable_agents=[KID], limits=Limits(max_steps=5)
)
ASKER = AgentDefinition("asker", model="m/boss", tools=[paint], spawnable_agents=[KID], handle_steps=asking)
POLICY = Policy(rules=[Rule.ask_for_tool("paint"), Rule.allow_tool("look")])
THOUGHT = ModelReply(
    [ThinkingPart("Let me see."), *tool_calls(*[tool_call("look", {"where": w}) for w in ("attic", "cellar")]).content]
)
SPAWN = tool_call("spawn_agents", {"agents": [{"agent_type": "kid", "prompt": "Look there, too."}]})
BUSY = [THOUGHT, SPAWN, tool_call("look", {"where": "shed"}), "The shed is empty.", "All is **empty**."]


def engine(replies: list[Any], **options: Any) -> Engine:
    options = {"sessions": MemorySessions(), "permissions": POLICY} | options
    return Engine([BOSS, ASKER], tools=[paint], models=ScriptedModel(replies), **options)


SCENES: dict[str, tuple[str, list[Any]]] = {
    "busy": ("boss", BUSY),
    "failed": ("boss", [THOUGHT, failure(ModelError("the model is down"))]),
    "max_steps": ("boss", [tool_call("look", {"where": "attic"})] * 5),
    "permission": ("boss", [tool_call("paint", {"what": "the wall"})]),
    "permission in a child": ("boss", [SPAWN, tool_call("paint", {"what": "the wall"})]),
    "question": ("asker", ["I will ask."]),
}
"""By name, an agent and what its model replies."""
