"""
A PostgreSQL for servers of runs in a database: the one that the tests of durable runs have, each test with a database of its own.
"""

from __future__ import annotations

import pytest

from tests.durable.conftest import db, postgres_url, template

__all__ = ("db", "postgres_url", "template")

POSTGRESQL = "postgresql"
"""The place of runs that is a database, among those with which a test is repeated."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # The server is the run's and not the test's: what a test leaves behind is counted from before its own things begin.
    for item in items:
        params = getattr(getattr(item, "callspec", None), "params", {})
        if any(isinstance(value, str) and value == POSTGRESQL for value in params.values()):
            item.fixturenames.insert(0, "template")  # type: ignore[attr-defined]
