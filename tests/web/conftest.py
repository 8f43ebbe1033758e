"""
What several tests of web pages need: the programs that other projects publish.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from .npm import folder_of_packages


@pytest.fixture(scope="session")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """
    A folder with the packages of npm; tests that need it are skipped where node or npm is missing.
    """
    base = tmp_path_factory.getbasetemp()
    return folder_of_packages(base.parent if "PYTEST_XDIST_WORKER" in os.environ else base)
