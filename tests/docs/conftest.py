"""
The site, for the tests that look at it: building it takes a minute.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from .pages import ROOT


@pytest.fixture(scope="session", autouse=True)
def commands_are_forked(forks: None) -> None:
    """
    The commands of pages are processes that are forked, each a second sooner.
    """


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """
    The site, built as CI builds it: once, for all processes that run tests.
    """
    pytest.importorskip("sphinx")
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "site"
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            being_built = folder.with_suffix(".new")
            command = [
                sys.executable,
                "-m",
                "sphinx",
                "-q",
                "-W",
                "-n",
                "--keep-going",
                str(ROOT / "docs"),
                str(being_built),
            ]
            built = subprocess.run(command, capture_output=True, text=True, check=False, timeout=540)
            assert (0, "") == (built.returncode, built.stderr)
            being_built.rename(folder)
    return folder
