"""
`docs/layered-agents.md` is so: its Python runs, its commands show what it shows, its tables name what is there.
"""

from __future__ import annotations

import re
from pathlib import Path

import attrs
import pytest

from stepengine import Limits, load_agents
from stepengine.data.limits import DEFAULT_LIMITS

from .pages import ROOT, Project, assert_shown, blocks_of, execute, page

PAGE = page("layered-agents.md")
BLOCKS = blocks_of(PAGE)

pytestmark = pytest.mark.deep


def table(heading: str) -> str:
    rows = PAGE.partition(f"| {heading} |")[2].partition("\n\n")[0]
    assert rows, heading
    return rows


@pytest.mark.spec("requirements:P13", "requirements:J5", "requirements:J11", "requirements:J13", "requirements:J17")
def test_every_block_runs_and_shows_what_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """
    In one folder and in order, since commands look at what Python recorded; each block of Python has names of its own.
    """
    monkeypatch.chdir(tmp_path)
    project, said = Project(tmp_path), ""
    for block in BLOCKS:
        match block.kind:
            case "python":
                execute(block, "layered-agents.md")
            case "sh":
                said = "".join([project.run(line) for line in block.text.splitlines()])
            case "text":
                assert_shown(block.text, said)
            case other:
                pytest.fail(f"nobody runs a block of {other}")


def test_every_agent_that_comes_with_it_is_named() -> None:
    named = {*re.findall(r"`([a-z0-9-]+)`", table("leader") + table("specialists"))} - {"fast"}

    assert {agent.id for agent in load_agents(ROOT / "agents")} == named


def test_the_defaults_of_the_limits_are_so() -> None:
    told: dict[str, float | None] = {}
    for names, _, values in re.findall(r"^\| (`max_.*?) \| (.*?) \| (.*?) \|$", table("limit"), re.MULTILINE):
        fields = re.findall(r"`(\w+)`", names)
        found = [int(n.replace(",", "")) for n in re.findall(r"\d[\d,]*\d|\d", values)] or [None] * len(fields)
        told |= dict(zip(fields, found, strict=True))

    assert told == {name: getattr(DEFAULT_LIMITS, name) for name in told}
    rest = {field.name for field in attrs.fields(Limits)} - set(told)
    assert {"allow_unpriced", "max_concurrent_tools", "max_identical_calls", "on_max_steps"} == rest


def test_pages_that_are_linked_exist() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", PAGE):
        assert (ROOT / "docs" / target).exists(), target
