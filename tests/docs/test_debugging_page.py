"""
`docs/debugging.md` is so: each of its blocks runs, its table names the commands that there are.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from stepengine.cli.commands.debug import COMMANDS

from .pages import Block, assert_shown, follow, page

NAME = "debugging.md"


@pytest.mark.deep
@pytest.mark.spec("evaluation:JG6", "evaluation:JG28")
def test_every_block_of_the_page_runs_with_its_shown_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")

    def has_columns(block: Block, said: str) -> None:
        parts = [part for line in block.text.splitlines() for part in re.split(r" {2,}", line.strip())]
        assert_shown("\n".join(parts), said.replace("  ", "\n"))

    def is_seen_at_a_save(block: Block, _: str) -> None:
        command, _, shown = block.text.removeprefix("$ ").partition("\n")
        # The first line says when it was and how long it took.
        assert_shown(shown.partition("\n")[2], seen_at_a_save(tmp_path, command))

    follow(NAME, tmp_path, others={"text": has_columns, "console": is_seen_at_a_save})


def seen_at_a_save(folder: Path, command: str) -> str:
    """
    What is shown when the mistake of the page is mended; it is not, afterwards.
    """
    file = folder / "tally.py"
    line, code = [sys.executable, "-m", *shlex.split(command)], file.read_text()
    with subprocess.Popen(line, stdout=subprocess.PIPE, text=True, cwd=folder) as process:
        assert process.stdout is not None
        try:
            for said in process.stdout:
                if "as recorded" in said:
                    break
            file.write_text(code.replace("total = cents", "total += cents"))
            shown = []
            for said in process.stdout:
                shown.append(said)
                if "as recorded" in said:
                    return "".join(shown)
        finally:
            process.kill()
            file.write_text(code)
    pytest.fail("nothing was shown")


def test_the_table_names_every_command() -> None:
    rows = re.findall(r"^\| (`[^|]*) \|", page(NAME), re.MULTILINE)
    named = {word.split()[0] for row in rows for word in re.findall(r"`([^`]+)`", row)}

    assert {*COMMANDS} == named | {"step", "unstep"}
    assert "`step` and `unstep`" in page(NAME)
