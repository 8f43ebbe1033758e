"""
How long the way of one step is: calls of Python functions, which are the same on every machine. Nothing here takes times.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MOST = {
    "bare call": (131, 29),
    "call with a body": (433, 47),
    "bare STEP": (190, 30),
    "watched STEP": (250, 36),
    "streamed STEP": (257, 37),
    "two children": (1000, 53),
    "recorded STEP": (626, 56),
    "recorded STEP, a key": (676, 56),
}
"""Calls and files. What makes a way longer says here by how much, and in its commit why."""


@pytest.mark.speed
def test_a_step_makes_no_more_calls_than_before() -> None:
    """
    In a process of its own: what tests watch tasks and texts with walks along.
    """
    ran = subprocess.run(
        [sys.executable, "-m", "benchmarks.walks", "--json"], cwd=ROOT, check=True, capture_output=True, text=True
    )
    walks = {name: tuple(counts) for name, counts in json.loads(ran.stdout).items()}

    assert MOST.keys() == walks.keys()
    assert {} == {
        name: found for name, found in walks.items() if any(a > b for a, b in zip(found, MOST[name], strict=True))
    }
