"""Runs of calls under rules."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from stepengine import AgentDefinition, Engine, Limits, ToolCall
from stepengine.permissions import Policy, PolicyFile


def run_calls(tools: Any, calls: Iterable[ToolCall], policy: Policy | PolicyFile, **options: Any) -> list[str]:
    """
    Make calls in one run, and return what a model would see of each.
    """

    def handle_steps(ctx: Any) -> Any:
        found = []
        for one in calls:
            turn = yield one
            found.append(str(turn.tool_result.text))
        return found

    agent = AgentDefinition("user", tools=tools, handle_steps=handle_steps)
    limits = Limits(max_denials=100_000, max_actions=100_000)
    with Engine([agent], permissions=policy, limits=limits, **options) as engine:
        found: list[str] = engine.run_sync("user").unwrap()
    return found
