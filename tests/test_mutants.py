"""Random faults: each changes the program, a seed draws the same ones again; ``python -m tests.mutants`` plants them."""

from __future__ import annotations

import ast

import pytest

from tests.random_mutants import EQUIVALENT, ROOT, drawn, faults_of, files_of


@pytest.mark.deep
def test_a_random_fault_changes_the_program_and_is_unique() -> None:
    faults = [fault for path in files_of("permissions") for fault in faults_of(path)]
    few = [fault for fault in faults[::25] if fault.is_program]

    assert len(faults) == len({fault.name for fault in faults})
    assert len(few) > len(faults) / 40
    for fault in few:
        sound = (ROOT / fault.file).read_text()
        assert ast.dump(ast.parse(sound)) != ast.dump(ast.parse(fault.source)), fault.name


@pytest.mark.deep
def test_a_seed_reproduces_its_faults_and_larger_draws_extend_them() -> None:
    layers = ("sessions", "permissions")
    few, many = drawn(6, 7, layers), drawn(40, 7, layers)

    assert few == drawn(6, 7, layers)
    assert {fault.name for fault in few} < {fault.name for fault in many}
    assert [20, 20] == [sum(fault.layer == layer for fault in many) for layer in layers]
    assert {f.name for f in drawn(40, 8, layers)} != {f.name for f in many}


@pytest.mark.deep
@pytest.mark.smoke
def test_each_equivalent_fault_still_exists_and_has_a_reason() -> None:
    """One whose code has changed is taken out of the list, or looked at anew."""
    files = {name.partition(":")[0] for name in EQUIVALENT}
    names = {fault.name for file in files for fault in faults_of(ROOT / file)}

    assert [] == sorted(set(EQUIVALENT) - names)
    assert [] == [name for name, reason in EQUIVALENT.items() if len(reason.split()) < 4]
