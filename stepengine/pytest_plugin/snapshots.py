"""The snapshot fixtures: runs, requests and events as text files that people review."""

from __future__ import annotations

from typing import Any

import pytest

__all__ = ("events_snapshot", "request_snapshot", "run_snapshot")


@pytest.fixture
def run_snapshot(request: pytest.FixtureRequest) -> Any:
    """Return what a run is compared with: `assert result == run_snapshot`; `pytest --snapshot-update` writes it."""
    return _snapshot(request, "RunSnapshot")


@pytest.fixture
def request_snapshot(request: pytest.FixtureRequest) -> Any:
    """Return what the body of a request is compared with."""
    return _snapshot(request, "RequestSnapshot")


@pytest.fixture
def events_snapshot(request: pytest.FixtureRequest) -> Any:
    """Return what the events of a run are compared with."""
    return _snapshot(request, "EventsSnapshot")


def _snapshot(request: pytest.FixtureRequest, name: str) -> object:
    if not request.config.pluginmanager.hasplugin("syrupy"):
        msg = f"{request.fixturename} needs the plugin syrupy: pip install 'stepengine[test]'"
        raise pytest.UsageError(msg)
    from stepengine.testing import snapshots

    return request.getfixturevalue("snapshot").use_extension(getattr(snapshots, name))
