"""
What the tests of the command line share.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest
import typer.main
import typer.testing


@pytest.fixture(scope="session", autouse=True)
def commands_are_read_once() -> Iterator[None]:
    """
    A process reads the signatures of all commands once, and so does this one, instead of once for each `invoke`.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(typer.testing, "_get_command", functools.cache(typer.main.get_command), raising=False)
        yield


@pytest.fixture(autouse=True)
def folders_are_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    """
    The folders of these tests were made by them, and trusted like those that `stepengine init` makes; `test_trust` is about others.
    """
    from stepengine.engine import trust

    monkeypatch.setattr(trust, "is_trusted", lambda folder: True)
