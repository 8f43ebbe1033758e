"""The planted faults can all be planted; ``python -m tests.mutants`` plants them."""

from __future__ import annotations

import pytest

from tests.mutants import MUTANTS, Mutant


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_planted_fault_still_has_its_place_and_its_tests(mutant: Mutant) -> None:
    assert "" == mutant.problem()


def test_each_has_a_name_of_its_own_and_changes_something_of_its_own() -> None:
    assert len(MUTANTS) == len({mutant.name for mutant in MUTANTS})
    assert len(MUTANTS) == len({(mutant.file, mutant.old, mutant.new) for mutant in MUTANTS})


def test_a_planted_fault_is_gone_afterwards_and_one_without_a_place_is_told(tmp_path) -> None:
    (tmp_path / "a.py").write_text("x = 1\ny = 1\n")
    mutant = Mutant("y is two", "a.py", "y = 1\n", "y = 2\n", ("a.py",))

    assert "" == mutant.problem(tmp_path)
    with pytest.raises(ZeroDivisionError), mutant.planted(tmp_path):
        assert "x = 1\ny = 2\n" == (tmp_path / "a.py").read_text()
        raise ZeroDivisionError
    assert "x = 1\ny = 1\n" == (tmp_path / "a.py").read_text()
    (tmp_path / "a.py").write_text("y = 1\ny = 1\n")
    assert "its text stands 2 times in a.py, not once: 'y = 1'" == mutant.problem(tmp_path)
