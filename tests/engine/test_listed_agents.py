"""
The list of the agents of the agent folders.
"""

from __future__ import annotations

from pathlib import Path

from stepengine.engine import list_agents
from stepengine.errors import DefinitionError

AGENT = "from stepengine import AgentDefinition\n\nagent = AgentDefinition(id={!r})\n"


def test_broken_agent_files_and_hidden_agents_are_listed_with_files(tmp_path: Path) -> None:
    first, second, broken = [tmp_path / name / "own.py" for name in ("first", "second", "broken")]
    for file, code in (
        (first, AGENT.format("own")),
        (second, AGENT.format("own")),
        (broken, "import nowhere_at_all\n"),
    ):
        file.parent.mkdir()
        file.write_text(code, encoding="utf-8")

    listed = {one.source: one for one in list_agents([first.parent, second.parent, broken.parent])}

    assert listed[first].hidden_by is None
    assert listed[second].hidden_by == first
    assert listed[broken].agent is None
    assert isinstance(listed[broken].problem, DefinitionError)
    assert "nowhere_at_all" in str(listed[broken].problem)
    assert {one.agent.id for one in listed.values() if one.agent is not None} > {"own", "code-reviewer"}
