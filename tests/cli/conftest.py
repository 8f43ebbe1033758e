"""
What the tests of the command line share.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stepengine.cli import bench
from stepengine.engine import trust
from stepengine.models import Provider
from stepengine.testing import ScriptedModel


@pytest.fixture(autouse=True)
def folders_are_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    """
    The folders of these tests were made by them, and trusted like those that `stepengine init` makes; `test_trust` is about others.
    """
    monkeypatch.setattr(trust, "is_trusted", lambda folder: True)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """
    An empty folder, in which commands run.
    """
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """
    Return a function that lets every run use a model with these replies, or the given provider.
    """

    def use(*replies: Any) -> Any:
        model = replies[0] if replies and isinstance(replies[0], Provider) else ScriptedModel(replies)
        monkeypatch.setattr(bench, "make_model_registry", lambda *_: model)
        return model

    return use
