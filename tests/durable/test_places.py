"""
What is looked into and marked before steps begin, and written when they end: each by one statement, which does all of it or nothing.
"""

from __future__ import annotations

import asyncio
import json
import time
from typing import Self

import pytest

from stepengine import AgentDefinition, Parallel, StepContext, ToolCall, tool
from stepengine import call as called
from stepengine.durable import Operator
from stepengine.durable.database import url_of
from stepengine.durable.places import FRESH_SECONDS, Drawn, Places, Records

from .shared import worker_of

pytestmark = pytest.mark.deep

RUN = "order-1"
MADE = """
insert into dbos.workflow_status (workflow_uuid, status, created_at, updated_at, priority, owner_xid)
values (%s, %s, 0, 0, 0, 'mine') returning 1
"""
RECORDED = """
insert into dbos.operation_outputs (workflow_uuid, function_id, function_name, output, serialization, retention_timestamp)
values (%s, %s, %s, %s, 'portable_json', 0) returning 1
"""
ROWS = "select function_id, function_name, output from dbos.operation_outputs where workflow_uuid = %s order by function_id"


@pytest.fixture
def owner(monkeypatch: pytest.MonkeyPatch):
    """
    Say which execution this is.
    """

    def be(name: str) -> None:
        monkeypatch.setattr("dbos._context.current_owner_xid", lambda run: name)

    be("mine")
    return be


class Opened:
    """
    A run in the database, and the places of one execution of it.
    """

    def __init__(self, db: str) -> None:
        self.records = Records(url_of(db), "stepengine")
        self.places = Places(self.records, RUN)
        self.db = db

    async def __aenter__(self) -> Self:
        self._connecting = await Operator.connect(self.db)
        self.operator = await self._connecting.__aenter__()
        return self

    async def __aexit__(self, *_) -> None:
        await self.records.close()
        await self._connecting.__aexit__(None, None, None)

    async def begun(self, status: str = "PENDING") -> Opened:
        await self.operator.rows(MADE, RUN, status)
        return self

    async def names(self) -> list[tuple[int, str]]:
        return [row[:2] for row in await self.operator.rows(ROWS, RUN)]


INTENT, RESULT = Drawn(1, "intent:aa", {"seq": 0, "token": "one"}), Drawn(2, "tool:aa")


@pytest.mark.spec("durable:U18", "durable:UT7")
@pytest.mark.parametrize("is_live", [True, False])
async def test_a_mark_is_there_when_the_look_returns_and_the_first_one_stays(db: str, owner, is_live: bool):
    async with Opened(db) as opened:
        await opened.begun()
        was_full = await opened.places.look([INTENT, RESULT], is_live=is_live)
        after = Places(opened.records, RUN)
        again = await after.look([INTENT._replace(mark={"seq": 0, "token": "two"}), RESULT], is_live=is_live)

        assert [(1, "intent:aa")] == await opened.names()
        assert (False, True) == (was_full, again)
        assert {"seq": 0, "token": "one"} == opened.places.marked(INTENT) == after.marked(INTENT)
        assert opened.places.is_empty(2)


@pytest.mark.spec("durable:U24", "durable:UT9")
@pytest.mark.parametrize("is_live", [True, False])
@pytest.mark.parametrize("full", [1, 2])
async def test_where_another_step_stands_nothing_is_marked(db: str, owner, full: int, is_live: bool):
    from dbos._error import DBOSUnexpectedStepError

    async with Opened(db) as opened:
        await opened.begun()
        await opened.operator.rows(RECORDED, RUN, full, "tool:bb", "1")
        with pytest.raises(DBOSUnexpectedStepError, match="tool:bb"):
            await opened.places.look([INTENT, RESULT], is_live=is_live)

        assert [(full, "tool:bb")] == await opened.names()


@pytest.mark.spec("durable:UF7", "durable:UT6")
@pytest.mark.parametrize("is_live", [True, False])
async def test_who_does_not_own_the_run_any_more_marks_and_writes_nothing(db: str, owner, is_live: bool):
    from dbos._error import DBOSWorkflowConflictIDError

    async with Opened(db) as opened:
        await opened.begun()
        owner("another")
        with pytest.raises(DBOSWorkflowConflictIDError):
            await opened.places.look([INTENT, RESULT], is_live=is_live)
        with pytest.raises(DBOSWorkflowConflictIDError):
            await opened.places.record(RESULT, {"value": 1}, began=0)

        assert [] == await opened.names()


@pytest.mark.spec("durable:UT12")
@pytest.mark.parametrize("is_live", [True, False])
async def test_of_a_cancelled_run_nothing_is_marked(db: str, owner, is_live: bool):
    from dbos._error import DBOSWorkflowCancelledError

    async with Opened(db) as opened:
        await opened.begun("CANCELLED")
        with pytest.raises(DBOSWorkflowCancelledError):
            await opened.places.look([INTENT, RESULT], is_live=is_live)

        assert [] == await opened.names()


@pytest.mark.spec("durable:U12", "durable:U19")
async def test_a_result_is_written_once_and_another_one_is_refused(db: str, owner, monkeypatch: pytest.MonkeyPatch):
    from dbos._error import DBOSStepNondeterminismError

    async with Opened(db) as opened:
        await opened.begun()
        monkeypatch.setattr("stepengine.durable.places.time.time", lambda: 7.0)
        await opened.places.record(RESULT, {"value": 1}, began=0)
        # As after a connection that was lost when this was committed already.
        await opened.places.record(RESULT, {"value": 1}, began=0)
        monkeypatch.setattr("stepengine.durable.places.time.time", lambda: 8.0)
        with pytest.raises(DBOSStepNondeterminismError):
            await opened.places.record(RESULT, {"value": 2}, began=0)

        ((_, _, output),) = await opened.operator.rows(ROWS, RUN)
        assert {"value": 1} == json.loads(output)


@pytest.mark.spec("durable:U25")
async def test_a_look_counts_for_a_moment_only(db: str, owner, monkeypatch: pytest.MonkeyPatch):
    async with Opened(db) as opened:
        await opened.begun()
        await opened.places.look([INTENT, RESULT], is_live=True)
        loop = asyncio.get_running_loop()
        later = loop.time() + FRESH_SECONDS
        monkeypatch.setattr(loop, "time", lambda: later)

        assert not opened.places.is_empty(2)


@pytest.mark.spec("durable:UF20")
async def test_what_is_recorded_further_on_is_read_along_up_to_a_bound(db: str, owner):
    async with Opened(db) as opened:
        await opened.begun()
        for number in range(1, 6):
            await opened.operator.rows(RECORDED, RUN, number, f"tool:{number}", json.dumps("x" * 400_000))
        await opened.places.look([Drawn(1, "tool:1")], is_live=False)

        found = [opened.places.recorded(number) for number in range(1, 6)]
        assert [True, True, False, False, False] == [each is not None for each in found]


@tool
async def send(name: str) -> str:
    """
    Send something that must not be sent twice.

    Args:
        name: What.
    """
    SENT.append(name)
    return name


SENT: list[str] = []


def sending(ctx: StepContext):
    for number in range(60):
        yield from called(send, str(number))
    yield Parallel(*[ToolCall("send", {"name": f"g{number}"}) for number in range(20)])
    return "done"


@pytest.mark.spec("durable:UF18", "durable:UT3")
async def test_connections_that_are_lost_again_and_again_repeat_nothing_and_fail_no_run(db: str):
    kill = """
        select pg_terminate_backend(pid) from pg_stat_activity
        where datname = current_database() and pid <> pg_backend_pid() and query like '%%operation_outputs%%'
    """
    SENT.clear()
    agent = AgentDefinition("sending", tools=[send], handle_steps=sending)
    async with worker_of([agent], db) as worker, await Operator.connect(db) as operator:
        run = await worker.submit(agent, "")
        ended = asyncio.create_task(worker.operator.result(run))
        lost, until = 0, time.monotonic() + 60
        while not ended.done() and time.monotonic() < until:
            lost += len(await operator.rows(kill))
            await asyncio.sleep(0.02)
        form = await ended
        steps = await operator.steps(run)

    assert lost
    assert "done" == form["output"]
    assert sorted([*map(str, range(60)), *[f"g{number}" for number in range(20)]]) == sorted(SENT)
    kinds = [step.name.partition(":")[0] for step in steps]
    assert (80, 80, 1) == (kinds.count("intent"), kinds.count("tool"), kinds.count("end"))
