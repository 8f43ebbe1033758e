"""The guide names every policy, and the page that compares them says what runs under them show."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from stepengine import context

pytestmark = pytest.mark.deep  # the pages are made from runs
DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    spec = importlib.util.spec_from_file_location("make_context_policies", DOCS / "make_context_policies.py")
    assert spec is not None
    assert spec.loader is not None
    script: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    made: dict[str, str] = script.pages()
    return made


def test_the_pages_are_made_from_runs_under_every_policy(pages: dict[str, str]) -> None:
    guide, costs = pages.values()
    for name, made in pages.items():
        assert (DOCS / name).read_text(encoding="utf-8") == made
    for name in ("truncate", "mask_tool_results", "output_cache", "prune_to_summary", "summarize", "raise_on_overflow"):
        assert callable(getattr(context, name))
        assert f"| `{name}()`" in costs
        assert f"| `{name}` |" in guide


@pytest.mark.spec("requirements:I2", "requirements:X28")
def test_every_documented_policy_keeps_window_and_most_of_the_cache(pages: dict[str, str]) -> None:
    rows = [
        line.strip("| ").split(" | ")
        for line in pages["reference/context-costs.md"].splitlines()
        if line.startswith("| `") and line.count("|") == 6
    ]
    found = {cells[0]: cells for cells in rows}

    assert 9 == len(found)
    for name, (_, steps, rewrites, largest, *_) in found.items():
        assert int(largest.replace(",", "")) <= 30_000 or name == "`summarize()`", name
        assert steps in ("400", "90 (failed)"), name
        assert int(rewrites) < 400 // 10 or "free_ratio=0" in name or "ephemeral" in name, name
    costs = {name: int(cells[-1].rstrip("%")) for name, cells in found.items() if cells[-1] != "-"}
    assert costs["`prune_to_summary()`"] < costs["`truncate()`"] < 100 < costs["`truncate(free_ratio=0)`"]
