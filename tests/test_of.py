"""
The table that says which tests prove a module.
"""

from __future__ import annotations

import sys

import pytest

from tests import of


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
