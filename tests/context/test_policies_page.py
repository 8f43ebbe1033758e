"""The guide names every policy, and the page that compares them says what runs under them show."""

from __future__ import annotations

from pathlib import Path

import pytest

from stepengine import context
from tests.scripts import load_script

DOCS = Path(__file__).parents[2] / "docs"
COSTS = DOCS / "reference" / "context-costs.md"
POLICIES = ("truncate", "mask_tool_results", "output_cache", "prune_to_summary", "summarize", "raise_on_overflow")


def test_guide_and_comparison_name_every_policy() -> None:
    guide, costs = (DOCS / "context-policies.md").read_text(encoding="utf-8"), COSTS.read_text(encoding="utf-8")

    for name in POLICIES:
        assert callable(getattr(context, name))
        assert f"| `{name}()`" in costs
        assert f"| `{name}` |" in guide


@pytest.mark.deep
def test_comparison_equals_runs_under_every_policy() -> None:
    made: str = load_script(DOCS / "make_context_costs.py").page()

    assert COSTS.read_text(encoding="utf-8") == made
