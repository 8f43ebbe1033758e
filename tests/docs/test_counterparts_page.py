"""
`docs/works-with.md` is what the contract tests say of themselves, and `.ci/run` brings the versions that they name.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from .pages import ROOT, page
from .test_site import script

MADE = script("make_counterparts")
ROWS = MADE.counterparts()
RUN = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
FROZEN = dict(
    line.lower().replace("_", "-").split("==")
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    if "==" in line
)


@pytest.mark.spec("ecosystem:EC230")
def test_the_page_says_what_the_contract_tests_say() -> None:
    assert MADE.page() == page("works-with.md"), "python docs/make_counterparts.py"


def test_every_counterpart_has_a_registry_a_version_a_verdict_and_words_and_stands_once_in_a_test() -> None:
    wrong = [
        row
        for row in ROWS
        if row.registry not in MADE.REGISTRIES or row.verdict not in MADE.VERDICTS
        or not re.fullmatch(r"\d[\w.]*", row.version) or not row.covers or "|" in row.covers
    ]  # fmt: skip
    often = Counter((row.package, row.version, row.test) for row in ROWS)

    assert len(ROWS) > 15
    assert [] == wrong
    assert {1} == set(often.values())


def test_a_counterpart_has_one_version_for_each_major_one_that_is_tried() -> None:
    """
    Two tests that name different versions of one package cannot both have the one that is installed.
    """
    versions: dict[tuple[str, str], set[str]] = {}
    for row in ROWS:
        versions.setdefault((row.package, row.version.partition(".")[0]), set()).add(row.version)

    assert {} == {package: found for package, found in versions.items() if len(found) > 1}


@pytest.mark.spec("ecosystem:EC230")
def test_the_versions_from_pypi_are_those_that_the_checks_install() -> None:
    """
    Those of `constraints.txt`; what stands in an environment of its own, because it disagrees with ours, is installed by its row.
    """
    apart = {row.name for row in ROWS if row.registry == "pypi" and row.name not in FROZEN}
    named = {(row.name, FROZEN[row.name], row.version) for row in ROWS if row.registry == "pypi" and row.name in FROZEN}
    brought = {name for line in re.findall(r"make_counterparts\.py pip ([^)]*)\)", RUN) for name in line.split()}

    assert set() == {one for one in named if one[1] != one[2]}
    assert apart == brought


@pytest.mark.spec("ecosystem:EC230")
def test_the_versions_from_npm_are_those_that_the_checks_install() -> None:
    assert "$(python docs/make_counterparts.py npm)" in RUN
    assert {row.name for row in ROWS if row.registry == "npm"} == {
        re.sub(r"\d*@npm:.*|(?<=.)@.*", "", one) for one in MADE.npm()
    }


def test_the_checks_run_what_is_deep_and_bring_what_is_run_among_the_others() -> None:
    """
    Fast tests are the README's second command; those of the faults stand among them, and are skipped without llmock.
    """
    assert {"deep", "fast", "faults"} == {row.kind for row in ROWS}
    assert "python -m pytest -n auto -m deep" in RUN
    assert 'bash -euo pipefail -c "$(readme_command 1)"' in RUN
    assert "llmock" in {row.name for row in ROWS if row.kind == "faults"}


@pytest.mark.deep
@pytest.mark.skipif("AI_SDK" not in os.environ, reason="needs the packages of npm in AI_SDK=path/to/folder")
def test_what_npm_has_installed_is_what_the_rows_name() -> None:
    modules = Path(os.environ["AI_SDK"]) / "node_modules"
    wanted: dict[str, Any] = {}
    for one in MADE.npm():
        folder, _, rest = one[1:].partition("@")
        wanted[one[0] + folder] = rest.rpartition("@")[2] or rest

    assert wanted == {
        name: json.loads((modules / name / "package.json").read_text(encoding="utf-8"))["version"] for name in wanted
    }
