"""
What `stepengine deploy worker` takes for agents, before any database is asked.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from stepengine.cli.commands.worker import load_module_contents
from stepengine.cli.settings import UsageProblem


@pytest.mark.parametrize("name", ["agents/", "mine.py", "agents/mine.py"])
def test_missing_path_is_reported(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    with pytest.raises(UsageProblem, match=f"^there is no {name}; pass a Python file, a folder of agent files"):
        load_module_contents(name)


def test_a_missing_module_is_named_with_the_nearest_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "agents").mkdir()
    (tmp_path / "broken_agents.py").write_text("import nowhere_at_all\n")

    with pytest.raises(UsageProblem, match=r"^there is no agentz; pass a Python file, .*; did you mean 'agents'\?$"):
        load_module_contents("agentz")
    with pytest.raises(UsageProblem, match=r"broken_agents cannot be loaded: ModuleNotFoundError: .*nowhere_at_all"):
        load_module_contents("broken_agents")
