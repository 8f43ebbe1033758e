"""
What is read of recorded steps while a run is resumed, and what happens to steps whose connections are lost.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any, NamedTuple

import pytest

from stepengine import AgentDefinition, Parallel, StepContext, ToolCall, tool
from stepengine import call as called
from stepengine.durable import Operator
from stepengine.durable.step_records import PAGE_STEPS, ReservedStep, StepRecords

from .shared import worker_of


class Reservation(NamedTuple):
    step_id: int


class Recorded:
    """
    A database with the recorded steps of one run.
    """

    def __init__(self, *numbers: int) -> None:
        self.rows: dict[int, dict[str, Any]] = {}
        for number in numbers:
            self.record(number)

    def record(self, number: int, name: str = "tool:aa", output: object = None) -> None:
        output = {"value": number} if output is None else output
        self.rows[number] = {"function_id": number, "function_name": name, "output": output, "error": None}

    async def list_workflow_steps_async(self, run: str, *, limit: int, offset: int) -> list[dict[str, Any]]:
        assert "order-1" == run
        return [self.rows[number] for number in sorted(self.rows)][offset : offset + limit]


def step(number: int) -> ReservedStep:
    return ReservedStep(Reservation(number), "tool:aa")


def records(recorded: Recorded) -> StepRecords:
    from dbos import error

    return StepRecords(recorded, error, "order-1")


@pytest.mark.spec("durable:UF20", "durable:U20")
async def test_step_recorded_between_pages_hides_no_other():
    recorded = Recorded(*range(2, 2 * PAGE_STEPS))
    read = records(recorded)
    assert not await read.look_up([step(1)])
    recorded.record(1)

    for number in range(2, 2 * PAGE_STEPS):
        assert await read.look_up([step(number)])
        assert {"value": number} == read.pop(step(number))


@pytest.mark.spec("durable:UT9")
async def test_different_step_under_a_known_number_is_an_error():
    from dbos import error

    recorded = Recorded(1)
    recorded.record(2, "tool:bb")
    with pytest.raises(error.DBOSUnexpectedStepError, match="tool:bb"):
        await records(recorded).look_up([step(1), step(2)])


@pytest.mark.spec("durable:U32")
async def test_undecodable_result_is_left_to_dbos():
    recorded = Recorded()
    recorded.record(1, output="gASVBQ==")
    read = records(recorded)

    assert await read.look_up([step(1)])
    assert read.pop(step(1)) is None


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


@pytest.mark.deep
@pytest.mark.spec("durable:UF18")
async def test_lost_connections_repeat_no_effect_and_fail_no_run(db: str):
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
