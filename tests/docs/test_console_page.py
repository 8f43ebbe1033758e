"""
`docs/console.md` is so: its Python runs, and its keys are those of the console.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from stepengine.cli.commands.chat_commands import COMMANDS
from stepengine.cli.screen.console import ALWAYS, NO, YES

from .pages import blocks_of, execute, page

PAGE = page("console.md")


@pytest.mark.spec("requirements:N16")
@pytest.mark.parametrize("block", blocks_of(PAGE), ids=lambda block: f"line {block.line}")
def test_a_block_runs(block: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    execute(block, "console.md")


def test_the_keys_are_all_there() -> None:
    assert [] == [key for key in (*YES, *NO, *ALWAYS, "/skip") if f"`{key}`" not in PAGE]
    assert [] == [name for name in COMMANDS if f"`/{name}" not in PAGE]
