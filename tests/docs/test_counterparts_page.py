"""
`docs/reference/works-with.md` is what the contract tests say of themselves, and `.ci/deep` brings the versions that they name.
"""

from __future__ import annotations

import functools
import re
from typing import Any

import pytest

from .pages import ROOT, page
from .test_site import script

MADE = script("make_counterparts")
DEEP = (ROOT / ".ci" / "deep").read_text(encoding="utf-8")
FROZEN = dict(
    line.lower().replace("_", "-").split("==")
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    if "==" in line
)


@functools.cache
def rows() -> list[Any]:
    """
    Return what all contract tests say. Six hundred files are read for it, which not every worker has to do when it collects.
    """
    return MADE.counterparts()


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("ecosystem:EC230")
def test_the_page_matches_the_contract_tests() -> None:
    assert MADE.page() == page("reference/works-with.md"), "python docs/make_counterparts.py"


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("ecosystem:EC230")
def test_the_versions_from_pypi_are_those_that_the_checks_install() -> None:
    """
    Those of `constraints.txt`; what stands in an environment of its own, because it disagrees with ours, is installed by its row.
    """
    apart = {row.name for row in rows() if row.registry == "pypi" and row.name not in FROZEN}
    named = {
        (row.name, FROZEN[row.name], row.version) for row in rows() if row.registry == "pypi" and row.name in FROZEN
    }
    brought = {one for text in re.findall(r"counterparts=\(([^)]*)\)", DEEP) for one in re.findall(r'"([^"]+)"', text)}
    (commands,) = re.findall(r"^COMMANDS_OF_PYPI = \{(.*?)^\}", DEEP, re.MULTILINE | re.DOTALL)
    brought |= set(re.findall(r': "([^"]+)"', commands))

    assert set() == {one for one in named if one[1] != one[2]}
    assert apart == brought


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("ecosystem:EC230")
def test_the_versions_from_npm_are_those_that_the_checks_install() -> None:
    """
    Each is asked for as it is named, or by its major version; the test that drives it says which one that was.
    """
    asked = re.findall(r"""(?<=[\s:"])(@?[\w/-]+)@(\d[\w.]*)""", DEEP)
    missing = [
        f"{row.name}@{row.version}"
        for row in rows()
        if row.registry == "npm" and not any(n == row.name and f"{row.version}.".startswith(f"{v}.") for n, v in asked)
    ]

    assert [] == missing
