"""
`docs/prompt-injection.md` is so: its Python runs, and its picture shows an approval.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from stepengine.permissions import Rule

from .pages import follow, page

PAGE = page("prompt-injection.md")


@pytest.mark.spec("provenance:PV7", "provenance:PV12")
def test_every_block_runs_and_shows_what_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    follow("prompt-injection.md", tmp_path, names={"__name__": "page"})


def test_it_begins_with_what_is_not_stopped_and_names_every_rule() -> None:
    first = PAGE.partition("\n## ")[2]

    assert first.startswith("What this does not stop")
    for name in ("ask_untrusted", "deny_untrusted", "ask_after_untrusted"):
        assert f"`Rule.{name}(" in PAGE
        assert hasattr(Rule, name)
