"""
A short round of the kill script; the long one is `python -m tests.e2e.kills --rounds 200`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.smoke
@pytest.mark.deep
@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are forked")
@pytest.mark.spec("reliability:R1", "reliability:R2", "reliability:R3", "reliability:JR39", "reliability:I11")
@pytest.mark.parametrize("store", ["file", "sqlite"])
def test_runs_killed_at_random_end_alike_and_repeat_nothing(store: str) -> None:
    command = [sys.executable, "-m", "tests.e2e.kills", "--rounds", "8", "--store", store]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert f"{store}: 8 rounds" in done.stdout
