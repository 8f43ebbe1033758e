"""The snapshot fixtures: runs, requests and events as text files that people review."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture
def run_snapshot(request: pytest.FixtureRequest) -> Any:
    """Return the snapshot to compare a run with: `assert result == run_snapshot`; `pytest --snapshot-update` writes it."""
    return _make_snapshot(request, "RunSnapshot")


@pytest.fixture
def request_snapshot(request: pytest.FixtureRequest) -> Any:
    """Return the snapshot to compare the body of a request with."""
    return _make_snapshot(request, "RequestSnapshot")


@pytest.fixture
def events_snapshot(request: pytest.FixtureRequest) -> Any:
    """Return the snapshot to compare the events of a run with."""
    return _make_snapshot(request, "EventsSnapshot")


def _make_snapshot(request: pytest.FixtureRequest, name: str) -> object:
    """Return the snapshot fixture with an extension of stepengine; raise ``pytest.UsageError`` without syrupy."""
    if not request.config.pluginmanager.hasplugin("syrupy"):
        msg = f"{request.fixturename} needs the plugin syrupy: pip install 'stepengine[test]'"
        raise pytest.UsageError(msg)
    from stepengine.testing import snapshots

    return request.getfixturevalue("snapshot").use_extension(getattr(snapshots, name))
