"""
Runs that are recorded once for the tests of a file, and copied for each of them.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from stepengine.engine import trust

__all__ = ("copy_recording", "recording")


@contextmanager
def recording(folder: Path) -> Iterator[pytest.MonkeyPatch]:
    """
    Work in ``work`` below a new folder, with a state folder of its own, while the block records runs.
    """
    (folder / "work").mkdir(parents=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder / "work")
        patch.setenv("STEPENGINE_STATE_DIR", str(folder / "state"))
        patch.setenv("XDG_CONFIG_HOME", str(folder / "config"))
        patch.setattr(trust, "is_trusted", lambda folder: True)
        yield patch


def copy_recording(folder: Path, work: Path) -> None:
    """
    Copy the recorded files, and the state by which their journals are the user's own, into the folders of a test.
    """
    shutil.copytree(folder / "work", work, dirs_exist_ok=True)
    shutil.copytree(folder / "state", os.environ["STEPENGINE_STATE_DIR"], dirs_exist_ok=True)
