"""
What the tests of the command line share.
"""

from __future__ import annotations

import pytest

from stepengine.engine import trust


@pytest.fixture(autouse=True)
def folders_are_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    """
    The folders of these tests were made by them, and trusted like those that `stepengine init` makes; `test_trust` is about others.
    """
    monkeypatch.setattr(trust, "is_trusted", lambda folder: True)
