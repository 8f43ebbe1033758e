"""
A task in the manner of SWE-bench: repository in, patch out, hidden tests decide, in sandboxes and in containers.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from stepengine.cli.app import app
from tests.bundled_tools.podman import NAME, as_command, podman

SUITE = Path(__file__).resolve().parents[2] / "examples" / "evaluations" / "patches.py"
EXPECTED = {
    ("slug", "repairs"): (True, "resolved: all hidden tests pass; the patch has 8 lines"),
    ("slug", "breaks"): (False, "broken: test_empty does not pass; the patch has 8 lines"),
    ("slug", "cheats"): (False, "open: test_blanks does not pass; the patch has 13 lines"),
    ("slug", "rests"): (False, "open: test_blanks does not pass; the patch has 0 lines"),
    ("mean", "repairs"): (True, "resolved: all hidden tests pass; the patch has 8 lines"),
    ("mean", "breaks"): (False, "broken: test_zero does not pass; the patch has 8 lines"),
    ("mean", "cheats"): (False, "open: test_none does not pass; the patch has 13 lines"),
    ("mean", "rests"): (False, "open: test_none does not pass; the patch has 0 lines"),
}


@pytest.mark.deep
@pytest.mark.spec("evaluation:JG68", "remote:WS1")
@pytest.mark.parametrize("way", ["bubblewrap", "podman"])
def test_hidden_tests_judge_each_patch_in_its_own_workspace(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    Who repairs passes; who breaks something else, changes the tests or does nothing does not.
    """
    if shutil.which("git") is None:
        pytest.skip("git is not there")
    if way == "bubblewrap" and shutil.which("bwrap") is None:
        pytest.skip("needs bubblewrap")
    place = "bubblewrap:."
    if way == "podman":
        found = podman(tmp_path)
        if found.why:
            pytest.skip(found.why)
        monkeypatch.setenv("PATH", f"{as_command(found, tmp_path / 'bin')}:{os.environ['PATH']}")
        place = f"podman:{NAME}"
    monkeypatch.setenv("PATCHES_IN", place)
    monkeypatch.chdir(tmp_path)
    gates = ["--gate", "repairs.pass >= 1", "--gate", "breaks.pass <= 0"]

    said = CliRunner().invoke(app, ["eval", str(SUITE), "--shell", "--workspace", place, "--json", "-q", *gates])

    assert 0 == said.exit_code, said.output
    report = json.loads(said.stdout)
    told = {
        (case["id"], sample["side"]): (sample["scores"]["resolved"]["passed"], sample["scores"]["resolved"]["reason"])
        for case in report["cases"]
        for sample in case["samples"]
    }
    assert told == EXPECTED
