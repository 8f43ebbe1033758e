"""
The soak itself: that it notices what is left behind, and its short version.
"""

from __future__ import annotations

import subprocess
import sys

import attrs
import pytest

from tests.soak import ROOT, Count, grown

SAME = Count(tasks=0, threads=30, processes=0, descriptors=100, objects=100_000, mib=80.0)


def test_constant_counts_over_rounds_are_no_growth() -> None:
    assert [] == grown([attrs.evolve(SAME, objects=50_000, mib=40.0), *[SAME] * 7])


@pytest.mark.parametrize(("name", "each"), [("threads", 2), ("descriptors", 20), ("objects", 1_000), ("mib", 3.0)])
def test_small_growth_in_every_round_is_reported(name: str, each: float) -> None:
    rounds = [attrs.evolve(SAME, **{name: getattr(SAME, name) + each * number}) for number in range(10)]

    assert [name] == [problem.split()[0] for problem in grown(rounds)]


@pytest.mark.parametrize("name", ["tasks", "processes"])
def test_a_leftover_task_or_process_is_reported(name: str) -> None:
    assert 1 == len(grown([SAME] * 5 + [attrs.evolve(SAME, **{name: 1})]))


@pytest.mark.memory
def test_a_short_soak_leaves_nothing_behind() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.soak", "--minutes", "0.17", "--runs", "60"],
        cwd=ROOT, capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip

    assert 0 == done.returncode, done.stdout + done.stderr
    assert "passed: nothing was left behind, and nothing grew" in done.stdout
