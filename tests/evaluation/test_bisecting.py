"""
`git bisect run stepengine test`: the commit that changed what recorded runs do (evaluation JG12).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from stepengine.cli.exits import Exit
from stepengine.testing import text, tool_call

from .conftest import SHOP

ROOT = Path(__file__).resolve().parents[2]
SKIPPING = "{python} -m stepengine.cli test journals --agent agents/shop.py; c=$?; [ $c = 2 ] && exit 125; exit $c"


@pytest.mark.spec("evaluation:JG12")
def test_an_unloadable_agent_is_usage_and_a_damaged_journal_failure(folder: Any) -> None:
    """
    Zero as recorded, 5 diverged, 2 where the file of the agent fails or is not there, 1 for a journal that nobody can read.
    """
    folder.record("journals/run.jsonl", "c0", [tool_call("look", {"shelf": "a"}), text("three")])
    words = ("test", "journals", "--agent")
    folder.write("broken.py", "import nothing_of_this_name\n")
    folder.write("other.py", SHOP.replace("Look at a shelf.", "Look."))

    folder.type(*words, "agents/shop.py", code=Exit.COMPLETED)
    folder.type(*words, "other.py", code=Exit.DIVERGED)
    assert "nothing_of_this_name" in folder.type(*words, "broken.py", code=Exit.USAGE).stdout
    folder.type(*words, "missing.py", code=Exit.USAGE)
    folder.write("journals/run.jsonl", "{}\n")
    folder.type(*words, "agents/shop.py", code=Exit.FAILED)


@pytest.mark.deep
@pytest.mark.spec("evaluation:JG12")
@pytest.mark.skipif(shutil.which("git") is None, reason="there is no git")
def test_bisecting_finds_the_commit_and_skips_unloadable_ones(folder: Any) -> None:
    """
    Eight commits, the fifth of which changed the text of a tool, the sixth of which does not import.
    """
    folder.record("journals/run.jsonl", "c0", [tool_call("look", {"shelf": "a"}), text("three")])
    names = {f"GIT_{who}_{what}": "x@example.com" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    environment = {**os.environ, **names, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}

    def git(*words: str) -> str:
        done = subprocess.run(
            ["git", *words], cwd=folder.path, env=environment, capture_output=True, text=True, check=True
        )
        return done.stdout

    git("init", "-q")
    for number in range(1, 9):
        source = SHOP if number < 5 else SHOP.replace("Look at a shelf.", "Look.")
        folder.write("agents/shop.py", "import nothing_of_this_name\n" if number == 6 else f"{source}# {number}\n")
        git("add", "-A")
        git("commit", "-q", "-m", f"commit {number}")
    git("bisect", "start", "HEAD", "HEAD~7")
    said = git("bisect", "run", "sh", "-c", SKIPPING.format(python=sys.executable))

    assert "is the first bad commit" in said
    assert "commit 5" in said[said.index("is the first bad commit") :]
    assert "125" in said or "skip" in git("bisect", "log")
