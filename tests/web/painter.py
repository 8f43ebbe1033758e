"""
The agent whose runs the pages show, with an engine of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from stepengine import AgentDefinition, Engine, ToolContext, ToolResult, tool
from stepengine.adapters.ag_ui import page_hooks
from stepengine.data.hooks import Change
from stepengine.permissions import Policy, Rule
from stepengine.testing import ScriptedModel


class Painter:
    """
    An agent that mixes colours, which its page shares, and paints after it was asked; ``gate`` lets its ``dry`` return.
    """

    def __init__(self, *replies: Any, otherwise: Any = (), others: Sequence[AgentDefinition] = ()) -> None:
        self.gate, self.has_painted = asyncio.Event(), asyncio.Event()
        self.seen: list[Any] = []
        self.painted: list[str] = []

        @tool
        async def mix(ctx: ToolContext, colour: str) -> ToolResult:
            """
            Mix a colour.
            """
            self.seen.append(ctx.agent_state.context.get("colours"))
            colours = {"all": [*(self.seen[-1] or {"all": []})["all"], colour]}
            return ToolResult.text("mixed", change=Change(context={"colours": colours, "secret": "not for pages"}))

        @tool
        async def paint(what: str) -> str:
            """
            Paint something.
            """
            self.painted.append(what)
            self.has_painted.set()
            return f"The {what} is red now."

        @tool
        async def dry(what: str) -> str:
            """
            Wait until something is dry.
            """
            await self.gate.wait()
            return f"The {what} is dry."

        self.model = ScriptedModel(replies or otherwise)
        agent = AgentDefinition("painter", model="m/m", tools=[mix, paint, dry])
        policy = Policy([Rule.ask_for_tool("paint"), Rule.allow_tool("dry"), Rule.allow_tool("mix")])
        self.engine = Engine([agent, *others], models=self.model, permissions=policy, hooks=page_hooks())
