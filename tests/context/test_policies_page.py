"""The guide names every policy, and the page that compares them says what runs under them show."""

from __future__ import annotations

from pathlib import Path

import pytest

from stepengine import context
from tests.scripts import load_script

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.deep
def test_the_pages_are_made_from_runs_under_every_policy() -> None:
    pages: dict[str, str] = load_script(DOCS / "make_context_policies.py").pages()
    guide, costs = pages.values()

    for name, made in pages.items():
        assert (DOCS / name).read_text(encoding="utf-8") == made
    for name in ("truncate", "mask_tool_results", "output_cache", "prune_to_summary", "summarize", "raise_on_overflow"):
        assert callable(getattr(context, name))
        assert f"| `{name}()`" in costs
        assert f"| `{name}` |" in guide
