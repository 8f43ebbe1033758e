"""
`stepengine agents list --tree`: who may spawn whom.
"""

from __future__ import annotations

import pytest

from stepengine import AgentDefinition
from stepengine.cli.commands.agents import tree_lines
from stepengine.tools.bundled import agent_tool, task_tool

TOOLS = ["spawn_agents"]


@pytest.mark.spec("generator-contract:B1")
def test_tree_shows_spawnable_agents_and_marks_circles() -> None:
    leaf = AgentDefinition("leaf", description="A leaf.")
    carried = AgentDefinition("carried", description="In a tool.")
    middle = AgentDefinition("middle", tools=[*TOOLS, task_tool([carried])], spawnable_agents=[leaf, "top"])
    top = AgentDefinition(
        "top", tools=[*TOOLS, agent_tool(carried)], spawnable_agents=[middle, "leaf", "other_middle", "nobody", "top"]
    )
    other = AgentDefinition("other-middle", tools=TOOLS, spawnable_agents=["middle"])
    alone = AgentDefinition("alone")
    ping = AgentDefinition("ping", tools=TOOLS, spawnable_agents=["pong"])
    pong = AgentDefinition("pong", tools=TOOLS, spawnable_agents=["ping"])
    boss = AgentDefinition("boss", tools=TOOLS, spawnable_agents=["top"])

    assert tree_lines([alone, boss, top, other, ping, pong]) == [
        "alone",
        "boss",
        "`-- top",
        "    |-- middle",
        "    |   |-- leaf",
        "    |   |-- top (circle)",
        "    |   `-- carried",
        "    |-- leaf",
        "    |-- other-middle",
        "    |   `-- middle (see above)",
        "    |-- nobody (not found)",
        "    |-- top (circle)",
        "    `-- carried",
        "ping",
        "`-- pong",
        "    `-- ping (circle)",
    ]
