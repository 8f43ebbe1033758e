"""
`docs/sharing-an-agent.md` is so: its package is made, installed and run, and says what the page shows.
"""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from .pages import ROOT, Project, follow


@pytest.mark.deep
@pytest.mark.spec("packages:PK3", "packages:PK6", "packages:PK8", "packages:PK9", "packages:PK11")
def test_every_block_of_the_page_runs_with_its_shown_output(tmp_path: Path) -> None:
    project = Project(tmp_path / "page")
    project.folder.mkdir()
    lead = {"python": lambda block, _: project.paste("lead.py", block.text)}
    follow("sharing-an-agent.md", project.folder, run=partial(ran, project, tmp_path / "site"), others=lead)


def ran(project: Project, site: Path, line: str) -> str:
    """
    Run a line of the page; what is installed goes into a folder that Python looks through, in place of this environment.
    """
    words = line.split()
    if words[:4] != ["python", "-m", "pip", "install"]:
        return project.run(line, PYTHONPATH=f"{site}:{ROOT}", STEPENGINE_STATE_DIR=str(site.with_name("state")))
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--target", str(site)]
    done = subprocess.run(
        [sys.executable, "-m", "pip", "install", *options, *words[4:]],
        check=False, capture_output=True, text=True, cwd=project.folder, timeout=300,
    )  # fmt: skip
    assert 0 == done.returncode, done.stderr
    return done.stdout
