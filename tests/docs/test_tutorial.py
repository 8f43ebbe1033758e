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

from .pages import Project, blocks_of, follow, page

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


def test_every_tutorial_program_has_a_filename_and_a_command() -> None:
    """
    One that only asserts shows nothing, so that somebody who does not know how to run it learns nothing.
    """
    run = [block for name in PAGES for block in blocks_of(page(name)) if block.kind == "python" and block.path is None]

    assert 2 == len(run)
    for block in run:
        assert re.search(r"`(\w+\.py)`.*`python\s\1`", block.before, re.DOTALL), block.before


def test_the_tutorial_has_six_short_pages() -> None:
    assert 6 == len(PAGES)
    for name in PAGES:
        assert len(page(name).splitlines()) <= 80, name
