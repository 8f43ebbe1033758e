"""
`docs/viewing-runs.md` is so: what it pastes, runs and shows, and the pages that come of it.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from .pages import follow, page


@pytest.mark.deep
@pytest.mark.spec("evaluation:JG40", "evaluation:JG41", "evaluation:JG49")
def test_every_block_runs_and_shows_what_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    follow("viewing-runs.md", tmp_path)

    assert {"before.html", "both.html", "changed.html"} == {path.name for path in tmp_path.glob("*.html")}


def test_the_table_of_keys_has_those_of_the_page() -> None:
    """
    But `?` and Esc, which the text beside the table and every dialog tell.
    """
    script = (Path(__file__).parents[2] / "stepengine" / "debugging" / "viewing" / "page.js").read_text(
        encoding="utf-8"
    )
    keys = [part.split('"')[1] for part in script.partition("const KEYS = [")[2].partition("];")[0].split("[")[1:]]

    assert len(keys) > 10
    assert [] == [key for key in keys if f"`{key}`" not in page("viewing-runs.md")]
