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
