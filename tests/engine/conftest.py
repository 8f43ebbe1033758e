"""
What the tests of the engine share.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

MEMORY = Path("/dev/shm")
ROOM_BYTES = 1 << 28


def is_in_memory() -> bool:
    """
    Return whether the system has a folder in memory, with room, from which programs may be started.
    """
    if not os.access(MEMORY, os.W_OK | os.X_OK):
        return False
    status = os.statvfs(MEMORY)
    return status.f_bavail * status.f_frsize > ROOM_BYTES and not status.f_flag & getattr(os, "ST_NOEXEC", 0)


@pytest.fixture
def tmp_path(tmp_path: Path) -> Iterator[Path]:
    """
    A folder in memory, where there is one: half of the time of a test with journals and databases is the disk's, which has
    to have what they wrote before they go on.
    """
    if not is_in_memory():
        yield tmp_path
        return
    folder = Path(tempfile.mkdtemp(prefix="stepengine-", dir=MEMORY))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)
