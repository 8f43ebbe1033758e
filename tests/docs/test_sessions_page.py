"""
`docs/sessions.md` is so: each of its blocks runs, in one folder and in order.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from .pages import follow


@pytest.mark.spec("requirements:L1", "requirements:L4", "requirements:L2", "requirements:P13", "requirements:K5")
def test_every_block_runs_and_shows_what_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    follow("sessions.md", tmp_path)

    assert ["chats.db", "chats.turns.db", "sessions"] == sorted(
        path.name for path in tmp_path.iterdir() if not path.name.endswith(("-wal", "-shm"))
    )
