"""
`stepengine agents list --tree`: who may spawn whom.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from stepengine import AgentDefinition
from stepengine.cli.app import app
from stepengine.cli.commands.agents import format_agent_tree
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

    assert format_agent_tree([alone, boss, top, other, ping, pong]) == [
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


def test_the_command_shows_the_agents_that_can_be_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("agents").mkdir()
    Path("agents/zz_boss.py").write_text(
        "from stepengine import AgentDefinition\n"
        'agent = AgentDefinition("zz-boss", tools=["spawn_agents"], spawnable_agents=["zz_kid"])\n'
    )
    Path("agents/zz_kid.py").write_text('from stepengine import AgentDefinition\nagent = AgentDefinition("zz-kid")\n')
    Path("agents/broken.py").write_text("x = 1\n")
    result = CliRunner(charset="ascii").invoke(app, ["agents", "list", "--tree"])
    drawn = CliRunner().invoke(app, ["agents", "list", "--tree"])

    assert 0 == result.exit_code
    assert "zz-boss\n`-- zz-kid\n" in result.stdout
    assert "zz-boss\n\u2514\u2500\u2500 zz-kid\n" in drawn.stdout
    for ascii, mark in (("|-- ", "\u251c\u2500\u2500 "), ("`-- ", "\u2514\u2500\u2500 "), ("|   ", "\u2502   ")):
        assert 0 < result.stdout.count(ascii) == drawn.stdout.count(mark)
    assert "broken.py" in result.stderr

    both = CliRunner().invoke(app, ["agents", "list", "--tree", "--json"])
    assert (2, "") == (both.exit_code, both.stdout)
    assert "--json lists the spawnable_agents" in both.stderr
