"""
`docs/deploying.md` is so: its files are pasted and edited, its commands and blocks run, in one folder and in order.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from .pages import ROOT, Project, assert_shown, blocks_of, page

BLOCKS = blocks_of(page("deploying.md"))


@pytest.mark.deep
@pytest.mark.spec("requirements:X58", "requirements:X54", "reliability:R2")
def test_every_block_and_command_runs_with_its_shown_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    project, names = Project(tmp_path), dict[str, Any](__name__="page")
    for block in BLOCKS:
        if block.path is not None:
            project.paste(block.path, block.text)
        elif block.kind == "diff":
            project.edit(block)
            _deployed()
        elif block.kind == "python":
            exec(compile("\n" * block.line + block.text, str(ROOT / "docs" / "deploying.md"), "exec"), names)
        else:
            for command in block.text.split("$ ")[1:]:
                line, _, shown = command.partition("\n")
                assert_shown(shown, project.run(line))
    assert {"python", "diff", "console"} == {block.kind for block in BLOCKS}


def _deployed() -> None:
    """
    Forget the agents that were loaded: what comes next on the page happens in a process of its own.
    """
    for name in [name for name in sys.modules if name.startswith("stepengine_agents_")]:
        del sys.modules[name]
