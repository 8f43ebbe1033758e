"""
The table that says which tests prove a module.
"""

from __future__ import annotations

import random
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from tests import of

SEED = 35
DRAWN = 3
SLACK = 15
"""Percent points: which cases of a property are drawn differs between versions of Python."""


def test_every_module_has_existing_tests() -> None:
    rows = of.proofs()

    assert set(of.modules()) == {row.module for row in rows}, "python -m tests.of --make"
    assert [] == [row.tests for row in rows if not (of.ROOT / row.tests).is_file()]


@pytest.mark.parametrize("word", ["machine/step", "stepengine/machine/step.py", "stepengine.machine.step"])
def test_a_module_is_found_by_every_spelling(word: str) -> None:
    assert {"machine/step.py"} == {row.module for row in of.asked(word, of.proofs())}


def test_an_unknown_module_is_reported(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["tests.of", "machine/leap"])

    assert 2 == of.main()
    assert "no test is known to go through a module 'machine/leap'" in capsys.readouterr().err


@pytest.mark.deep
def test_coverage_in_the_table_is_confirmed_for_random_modules(tmp_path: Path) -> None:
    by_tests: defaultdict[str, list[of.Proof]] = defaultdict(list)
    for row in of.proofs():
        if row.percent > SLACK:
            by_tests[row.tests].append(row)
    for tests in random.Random(SEED).sample(sorted(by_tests), DRAWN):
        settings = tmp_path / "coveragerc"
        settings.write_text(of.COVERAGE.format(tmp_path / Path(tests).stem / "data"))
        (tmp_path / Path(tests).stem).mkdir()
        command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.of", "--cov=stepengine", f"--cov-config={settings}", "--cov-report=", tests]  # fmt: skip
        subprocess.run(command, cwd=of.ROOT, check=True, capture_output=True)
        seen = of.reached(sorted((tmp_path / Path(tests).stem).glob("data*")))
        for row in by_tests[tests]:
            whole = len(of.in_functions(of.ROOT / "stepengine" / row.module))
            assert abs(100 * len(seen[row.module][tests]) / whole - row.percent) <= SLACK, row
