"""
Runs whose events the encoders for web pages are tested with: texts, thoughts, two calls of one tool, a child, questions, failures.
"""

from __future__ import annotations

from typing import Any

from stepengine import STEP, AgentCall, AgentDefinition, Ask, Engine, Limits, ToolContext, ToolResult, call, tool
from stepengine.data import events as ev
from stepengine.data.messages import ThinkingPart
from stepengine.data.state import RunPhase
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

TODOS = [{"task": "look", "completed": True}, {"task": "paint", "completed": False}]
TOLD: tuple[ev.Event, ...] = (
    ev.Notification(message="half of it"),
    ev.Compacted(by="x", record=False, tokens_before=9, tokens_after=1, messages_before=9, messages_after=1),
    ev.ModelRetry(model="m/m", attempt=1, wait=2.0, error="busy"),
    ev.RateLimited(model="m/m", provider="m", limit="tokens"),
    ev.Warned(message="slow"),
    ev.Repeat(tool_name="look", count=3),
    ev.FollowupsSuggested(followups=[{"prompt": "And now?"}]),
    ev.EventsDropped(count=3),
)
"""Events that a page is told of beside what it shows."""
UNTOLD: tuple[ev.Event, ...] = (
    ev.PhaseChanged(phase=RunPhase.EXECUTING_TOOL),
    ev.ModelStarted(model="m/m"),
    ev.ModelFinished(model="m/m"),
    ev.PerformStarted(name="f"),
    ev.PerformFinished(name="f"),
    ev.LogLine(level="info", message="x"),
    ev.HookFailed(point="pre_step", hook="h", error="x"),
    ev.HandlerNotice(kind="k", message="x"),
    ev.RunFailed(error="x", kind="k"),
)
"""Events that no page is told of, unless it wants to know everything."""


async def all_of(*events: ev.Event) -> Any:
    """
    Give events as those of one run whose stream breaks off after them.
    """
    yield ev.RunStarted(own_id="x", agent_id="boss", run_id="x")
    for event in events:
        yield event
