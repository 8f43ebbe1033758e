"""
The odd server, one for each file, and what a program sees while it is recorded and replayed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest

from stepengine.testing.recordings import CassetteFixture

from .odd_server import OddServer, odd_server

T = TypeVar("T")


@pytest.fixture(scope="module")
def server() -> Iterator[OddServer]:
    with odd_server() as running:
        yield running


def record_and_replay(file: Path, program: Callable[[], T], *, allow_unused: bool = False) -> tuple[T, T]:
    """
    Return what a program gives while it is recorded, and from the recording.
    """
    recording = CassetteFixture(file, "once", record_errors=True, allow_unused=allow_unused)
    with recording.patch():
        recorded = program()
    recording.check_usage()
    recording.write_recordings()
    replaying = CassetteFixture(file, "none")
    with replaying.patch():
        replayed = program()
    replaying.check_usage()
    return recorded, replayed
