"""
Steps whose connections to the database are lost.
"""

from __future__ import annotations

import asyncio
import time

import pytest

from stepengine import AgentDefinition, Parallel, StepContext, ToolCall, tool
from stepengine import call as called
from stepengine.durable import Operator

from .shared import worker_of


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
        lost, until = 0, time.monotonic() + 20
        while not ended.done() and time.monotonic() < until:
            lost += len(await operator.deployment.fetch_rows(kill))
            await asyncio.sleep(0.02)
        form = await ended
        steps = await operator.deployment.load_steps(run)

    assert lost
    assert "done" == form["output"]
    assert sorted([*map(str, range(60)), *[f"g{number}" for number in range(20)]]) == sorted(SENT)
    kinds = [step.name.partition(":")[0] for step in steps]
    assert (80, 80, 1) == (kinds.count("intent"), kinds.count("tool"), kinds.count("end"))
