"""Graphs of LangGraph's dev server: ``working`` asks its model twice and calls one tool, ``waiting`` has a tool that takes an hour."""

from __future__ import annotations

import asyncio
import os
from typing import Any

from langchain_core.messages import AIMessage
from langchain_core.tools import tool
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode

DELAY = float(os.environ["DELAY"])


@tool
async def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@tool
async def wait() -> str:
    """Wait for an hour."""
    await asyncio.sleep(3600)
    return "over"


def graph(call: dict[str, Any], used: Any) -> Any:
    """Return a graph whose model asks for one call, then ends."""

    async def model(state: MessagesState) -> dict[str, Any]:
        await asyncio.sleep(DELAY)
        if state["messages"][-1].type == "tool":
            return {"messages": [AIMessage("done")]}
        return {"messages": [AIMessage("", tool_calls=[{**call, "id": "call_0", "type": "tool_call"}])]}

    def goes_on(state: MessagesState) -> str:
        return "tools" if state["messages"][-1].tool_calls else END

    made = StateGraph(MessagesState)
    made.add_node("model", model)
    made.add_node("tools", ToolNode([used]))
    made.add_edge(START, "model")
    made.add_conditional_edges("model", goes_on, ["tools", END])
    made.add_edge("tools", "model")
    return made.compile()


working = graph({"name": "add", "args": {"a": 1, "b": 1}}, add)
waiting = graph({"name": "wait", "args": {}}, wait)
