"""
`docs/what-a-change-does.md` is so: its Python runs, its commands show what it shows, its options are there.
"""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path

import pytest

from stepengine.cli.commands.impact import impact

from .pages import Block, blocks_of, execute, follow, page

NAME = "what-a-change-does.md"
PAGE = page(NAME)


@pytest.mark.deep
@pytest.mark.spec("evaluation:JG70", "evaluation:JG76", "evaluation:JG80")
def test_every_block_of_the_page_runs_with_its_shown_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """
    In one folder and in order; what is edited is what the block before it names.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))

    def run_anew(block: Block, _: str) -> None:
        for name in [n for n in sys.modules if n == "model" or n.startswith("stepengine_agents_")]:
            del sys.modules[name]
        execute(block, NAME)

    # A command of the page names a file that stands below it.
    (checks,) = [block.text for block in blocks_of(PAGE) if block.path == "checks.py"]
    (tmp_path / "checks.py").write_text(checks)
    # Git's history is not part of the page; tests/evaluation bisects with the line of a console.
    follow(NAME, tmp_path, others={"python": run_anew, "console": lambda *_: None})


def test_the_options_of_the_table_are_those_of_the_command() -> None:
    rows = re.findall(r"^\| `(--?[a-z-]+)", PAGE, re.MULTILINE)
    given = inspect.signature(impact).parameters

    assert rows
    assert all(row.lstrip("-").replace("-", "_") in given for row in rows)
