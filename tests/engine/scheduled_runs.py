"""
Where tests of schedules record runs: in a folder of files, and in a database.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from stepengine.journal import SqliteJournal

PLACES = pytest.mark.parametrize("place", ["runs", "runs.db"])


def names(place: Path) -> list[str]:
    """Return the names of the recorded runs."""
    return SqliteJournal(place).runs() if place.suffix else sorted([file.stem for file in place.glob("*.jsonl")])
