"""
`docs/layered-agents.md` is so: its Python runs, its commands show what it shows, the pages that it links list every agent and every limit.
"""

from __future__ import annotations

import re
from pathlib import Path

import attrs
import pytest

from stepengine import Limits, load_agents
from stepengine.data.limits import DEFAULT_LIMITS

from .pages import ROOT, follow, page

PAGE = page("layered-agents.md")

pytestmark = pytest.mark.deep


def table(heading: str, text: str = PAGE) -> str:
    rows = text.partition(f"| {heading} |")[2].partition("\n\n")[0]
    assert rows, heading
    return rows


@pytest.mark.spec("requirements:P13", "generator-contract:L3", "requirements:J13")
def test_every_block_runs_and_shows_what_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    follow("layered-agents.md", tmp_path)


def test_every_agent_that_comes_with_it_is_named_on_the_page_of_them() -> None:
    named = {*re.findall(r"`([a-z0-9-]+)`", table("agents", page("bundled.md")))}

    assert {agent.id for agent in load_agents(ROOT / "agents")} == named


def test_the_defaults_of_the_limits_are_so() -> None:
    told: dict[str, float | None] = {}
    for names, _, values in re.findall(
        r"^\| (`max_.*?) \| (.*?) \| (.*?) \|$", table("limit", page("cost.md")), re.MULTILINE
    ):
        fields = re.findall(r"`(\w+)`", names)
        found = [int(n.replace(",", "")) for n in re.findall(r"\d[\d,]*\d|\d", values)] or [None] * len(fields)
        told |= dict(zip(fields, found, strict=True))

    assert told == {name: getattr(DEFAULT_LIMITS, name) for name in told}
    rest = {field.name for field in attrs.fields(Limits)} - set(told)
    assert {"allow_unpriced", "ask", "on_max_steps"} == rest


def test_pages_that_are_linked_exist() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", PAGE):
        assert (ROOT / "docs" / target).exists(), target
