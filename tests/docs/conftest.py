"""
The site, for the tests that look at it: building it takes a minute.
"""

from __future__ import annotations

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
    The site, built as CI builds it.
    """
    pytest.importorskip("sphinx")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "-n", "--keep-going", str(ROOT / "docs"), str(folder)]
    built = subprocess.run(command, capture_output=True, text=True, check=False, timeout=540)
    assert (0, "") == (built.returncode, built.stderr)
    return folder
