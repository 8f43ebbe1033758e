"""
A night of the script of the nightly agent in each store; more of them are `python -m tests.e2e.nightly --seeds 10`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.deep
@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are forked")
@pytest.mark.spec("waiting:WT1", "waiting:WT3", "waiting:WT4", "waiting:WT5", "waiting:WT21")
@pytest.mark.parametrize("store", ["file", "sqlite"])
def test_a_nightly_run_killed_five_times_does_everything_once(store: str) -> None:
    command = [sys.executable, "-m", "tests.e2e.nightly", "--seeds", "1", "--store", store]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert f"{store}: 1 nights, 5 processes killed" in done.stdout
