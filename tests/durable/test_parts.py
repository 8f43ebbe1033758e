"""
The parts of a durable run, each by itself and without a database.
"""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from stepengine.data.outcomes import Stop
from stepengine.durable.database import ReopeningConnection
from stepengine.durable.event_order import PLACE, EventOrder
from stepengine.durable.executions import Activity, ExecutionEnd
from stepengine.durable.shared_events import RecordLooks
from stepengine.errors import DatabaseUnavailable, ReplayDivergence
from stepengine.journal.records import Input, Result


class Positions:
    """
    The table of positions that all processes share.
    """

    def __init__(self) -> None:
        self.rows_of: dict[int, list[str]] = {}

    async def fetch_rows(
        self, statement: str, run: str, first: int, keys: list[str] | None = None
    ) -> list[tuple[Any, ...]]:
        if statement != PLACE:
            return [(self.rows_of[place],) for place in sorted(self.rows_of) if place >= first]
        if first in self.rows_of:
            return []
        self.rows_of[first] = list(keys or ())
        return [(1,)]


def order(positions: Positions) -> EventOrder:
    return EventOrder(cast("Any", positions), "run")


async def test_records_are_shown_in_the_order_of_the_first_process():
    positions, first, second = Positions(), Result("", 1, 0), Result("", 2, 0)
    one, other = order(positions), order(positions)
    for place, records in ((one, (second, first)), (other, (first,))):
        for record in records:
            assert place.add_record(record)
        await place.read_and_append_positions()

    assert [second, first] == one.pop_ready_records(is_last=False)
    assert one.is_empty
    # The other process has not met the record that comes first.
    assert [] == other.pop_ready_records(is_last=False)
    other.add_record(second)
    await other.read_and_append_positions()
    assert [second, first] == other.pop_ready_records(is_last=False)


async def test_stop_of_a_run_is_shown_last():
    positions, result, stop = Positions(), Result("", 1, 0), Input("", -1, 0, {"type": "stop", "kind": "shutdown"})
    shown = order(positions)

    assert not shown.add_record(stop)
    assert shown.add_record(result)
    assert [] == shown.pop_ready_records(is_last=True)
    await shown.read_and_append_positions()
    assert [result, stop] == shown.pop_ready_records(is_last=True)


async def test_look_that_runs_already_answers_no_later_question():
    looks = RecordLooks()
    looks.started += 1
    waiting = asyncio.ensure_future(looks.wait_for_next_look())
    await asyncio.sleep(0)
    looks.finish_look()
    await asyncio.sleep(0)
    assert not waiting.done()
    looks.started += 1
    looks.finish_look()
    await waiting

    looks.close()
    await looks.wait_for_next_look()


def test_first_divergence_of_an_execution_is_kept():
    end = ExecutionEnd("run")
    end.raise_if_stopping()
    first = end.make_and_record_divergence("#1", ["tool:a", "tool:b"])
    assert first is end.make_and_record_divergence("#2", [])
    assert "#1" in str(first)
    assert "tool:a and tool:b" in str(first)
    with pytest.raises(ReplayDivergence):
        end.raise_if_stopping()


@pytest.mark.parametrize("leaves", [False, True])
def test_execution_that_ends_alone_leaves_its_children_alone(leaves: bool):
    end = ExecutionEnd("run")
    assert end.does_stop_end_children(Stop("cancelled"))
    assert end.does_stop_end_children(Stop("limit"))
    assert not end.does_stop_end_children(Stop("shutdown"))
    if leaves:
        end.is_leaving = True
    else:
        end.stop_without_result(RuntimeError("the database is away"))
    with pytest.raises(asyncio.CancelledError):
        end.raise_if_stopping()
    assert not end.does_stop_end_children(Stop("cancelled"))


async def test_worker_waits_for_running_effects_and_not_for_waits():
    activity = Activity()
    with activity.count_waiting():
        assert 1 == activity.waits
        await activity.wait_until_idle()
        with activity.count_running():
            idle = asyncio.ensure_future(activity.wait_until_idle())
            await asyncio.sleep(0)
            assert not idle.done()
        await idle
    assert 0 == activity.waits


class Connection:
    """
    A connection that raises the given errors.
    """

    broken = closed = False

    def __init__(self, failures: list[Exception]) -> None:
        self.failures = failures

    async def execute(self, statement: str, values: Any) -> Connection:
        if self.failures:
            raise self.failures.pop()
        return self

    async def fetchall(self) -> list[tuple[str]]:
        return [("here",)]

    async def close(self) -> None:
        self.closed = True


async def test_connection_is_reopened_after_a_restart(monkeypatch: pytest.MonkeyPatch):
    psycopg = pytest.importorskip("psycopg")
    opened: list[Connection] = []
    failures: list[Exception] = []

    async def open_one(url: str) -> Connection:
        opened.append(Connection(failures))
        return opened[-1]

    monkeypatch.setattr("stepengine.durable.database.open_connection", open_one)
    connection = ReopeningConnection("postgresql://host/x")
    failures.append(psycopg.OperationalError("away"))
    with pytest.raises(DatabaseUnavailable):
        await connection.fetch_rows("select")
    assert [("here",)] == await connection.fetch_rows("select")
    failures.append(psycopg.OperationalError("away"))
    assert [("here",)] == await connection.fetch_rows("select")

    assert [True, True, False] == [each.closed for each in opened]
