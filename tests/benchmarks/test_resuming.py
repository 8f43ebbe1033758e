"""
The script behind the figures of "Resuming a long run" resumes both runs and prints a line for each.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.deep
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from a file of Linux")
def test_both_runs_are_resumed_and_measured() -> None:
    command = [sys.executable, "-m", "benchmarks.resuming", "40", "5"]
    lines = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines()

    assert ["40 effects", "5 calls"] == [line.partition(":")[0] for line in lines]
    assert all(re.search(r"resumed in \d+\.\d\d s of CPU, \d+ MB of memory$", line) for line in lines)
