"""
`docs/viewing-runs.md` is so: what it pastes, runs and shows, and the pages that come of it.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from .pages import follow


@pytest.mark.deep
@pytest.mark.spec("evaluation:JG40", "evaluation:JG49")
def test_every_block_runs_and_shows_what_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    follow("viewing-runs.md", tmp_path)

    assert {"before.html", "both.html"} == {path.name for path in tmp_path.glob("*.html")}
