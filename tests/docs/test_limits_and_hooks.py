"""
The pages that explain limits and hooks name what the code has.
"""

from __future__ import annotations

import re
from pathlib import Path

import attrs
import pytest

from stepengine import Limits
from stepengine.data.limits import DEFAULT_LIMITS
from stepengine.data.yields import YIELDS

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.mark.spec("requirements:A17")
def test_the_defaults_of_the_limits_are_so() -> None:
    table = (DOCS / "cost.md").read_text(encoding="utf-8").partition("| limit |")[2].partition("\n\n")[0]
    told: dict[str, float | None] = {}
    for names, _, values in re.findall(r"^\| (`max_.*?) \| (.*?) \| (.*?) \|$", table, re.MULTILINE):
        fields = re.findall(r"`(\w+)`", names)
        found = [int(n.replace(",", "")) for n in re.findall(r"\d[\d,]*\d|\d", values)] or [None] * len(fields)
        told |= dict(zip(fields, found, strict=True))

    assert told == {name: getattr(DEFAULT_LIMITS, name) for name in told}
    assert {"allow_unpriced", "ask", "on_max_steps"} == {field.name for field in attrs.fields(Limits)} - set(told)


def test_the_hooks_page_names_the_yieldables_hooks_may_not_use() -> None:
    page = " ".join((DOCS / "hooks.md").read_text(encoding="utf-8").split())
    names = re.search(r"A generator hook can yield anything except these values. (.*?) \(", page)

    assert names is not None
    assert {row.name for row in YIELDS if not row.for_hooks} == set(re.findall(r"`(\w+)`", names[1]))
