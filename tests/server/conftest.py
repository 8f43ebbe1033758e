"""
A PostgreSQL for servers of runs in a database: the one that the tests of durable runs have, each test with a database of its own.
Servers as processes, which end with their test.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.durable.conftest import db, postgres_url, template

if TYPE_CHECKING:
    from .served import Serve, Served

__all__ = ("db", "postgres_url", "template")

POSTGRESQL = "postgresql"
"""The place of runs that is a database, among those with which a test is repeated."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # The server is the run's and not the test's: what a test leaves behind is counted from before its own things begin.
    for item in items:
        params = getattr(getattr(item, "callspec", None), "params", {})
        if any(isinstance(value, str) and value == POSTGRESQL for value in params.values()):
            item.fixturenames = ["template", *item.fixturenames]  # type: ignore[attr-defined]


@pytest.fixture
def servers() -> Iterator[list[Served]]:
    """
    The servers of a test, which are stopped when it ends.
    """
    started: list[Served] = []
    yield started
    for one in started:
        one.stop()


@pytest.fixture
def serve(servers: list[Served], tmp_path: Path) -> Serve:
    """
    Start a server of a place, and wait until it is ready.
    """
    from .served import Served

    async def start(place: Path | str, **options: Any) -> Served:
        server = Served(tmp_path, place, **options)
        servers.append(server)
        await server.restart()
        return server

    return start
