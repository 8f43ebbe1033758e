"""
The tutorial is so: who follows its six pages in an empty folder sees what they show.
"""

from __future__ import annotations

import re
import sys
from functools import partial
from pathlib import Path

import pytest
import yaml

from .pages import Project, follow, page

PAGES = [f"tutorial/{name}.md" for name in re.findall(r"^(\d-.+)$", page("tutorial/index.md"), re.MULTILINE)]


@pytest.mark.deep
@pytest.mark.spec("requirements:P13")
def test_following_the_tutorial_gives_the_shown_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "project").mkdir()
    project = Project(tmp_path / "project")
    monkeypatch.chdir(project.folder)
    for name in PAGES:
        for module in [module for module in sys.modules if module.startswith("stepengine_agents_")]:
            del sys.modules[module]  # each page is a new process of its reader
        follow(name, project.folder, run=partial(project.run, STEPENGINE_STATE_DIR=str(tmp_path / "state")))

    workflow = yaml.safe_load((project.folder / ".github/workflows/tests.yml").read_text())
    run = [step["run"] for step in workflow["jobs"]["tests"]["steps"] if "run" in step]
    assert 'pip install "$(ls vendor/stepengine-*.whl)[test]"' == run[0]
    for line in run[2:]:
        project.run(line)
