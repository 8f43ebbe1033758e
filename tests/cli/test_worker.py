"""
What `stepengine deploy worker` takes for agents, before any database is asked.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from stepengine.cli.commands.worker import load_module_contents
from stepengine.cli.settings import UsageProblem


@pytest.mark.parametrize("name", ["agents/", "mine.py", "agents/mine.py"])
def test_a_path_at_which_nothing_is_is_said_to_be_missing(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    with pytest.raises(UsageProblem, match=f"^there is no {name}; pass a Python file, a folder of agent files"):
        load_module_contents(name)


def test_what_is_no_path_is_a_module_and_what_its_import_said_is_told() -> None:
    with pytest.raises(UsageProblem, match="nowhere_at_all cannot be loaded: ModuleNotFoundError"):
        load_module_contents("nowhere_at_all")
