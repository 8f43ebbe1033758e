"""
The pages that explain limits and hooks name what the code has.
"""

from __future__ import annotations

import re
from pathlib import Path

import attrs
import pytest

from stepengine.data.limits import DEFAULT_LIMITS
from stepengine.data.yields import YIELDS

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.mark.spec("requirements:A17")
def test_the_page_about_limits_names_every_default() -> None:
    page = (DOCS / "cost.md").read_text(encoding="utf-8")
    told = dict(re.findall(r"^\| `(max_\w+)` \| .* \| ([\d,]+) \|$", page, re.MULTILINE))
    defaults = {name: value for name, value in attrs.asdict(DEFAULT_LIMITS).items() if isinstance(value, int | float)}

    assert defaults == {name: int(number.replace(",", "")) for name, number in told.items()}


@pytest.mark.spec("requirements:A17")
def test_the_first_answer_about_limits_names_the_default_of_steps_and_actions() -> None:
    page = " ".join((DOCS / "first-questions.md").read_text(encoding="utf-8").split())

    assert "a run has 50 steps, 1,000 other actions of its handler" in page


def test_the_page_about_hooks_names_what_a_hook_may_yield() -> None:
    page = " ".join((DOCS / "hooks.md").read_text(encoding="utf-8").split())
    names = re.search(r"It may yield everything except (.*?) \(", page)

    assert names is not None
    assert {row.name for row in YIELDS if not row.for_hooks} == set(re.findall(r"`(\w+)`", names[1]))
