"""
What several tests of editors need: a project, and the clients that other projects publish.
"""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "shop.py").write_text("rate = 1\nname = 2\n")
    return folder
