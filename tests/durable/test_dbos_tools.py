"""
Runs as the command and the client of DBOS itself show them: by their agent, with readable steps.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from stepengine import AgentCall, AgentDefinition, Ask, StepContext, Steps, ToolCall

from .shared import add, worker_of

COUNTERPARTS = (("pypi:dbos", "3.4.0", "works", "runs survive process exit and are listed by agent"),)
COMMAND = Path(sys.executable).with_name("dbos")
pytestmark = [
    pytest.mark.deep,
    pytest.mark.skipif(not COMMAND.exists(), reason="needs the extra 'durable': dbos is not installed"),
]


def order(ctx: StepContext) -> Steps[str]:
    yield ToolCall("add", {"a": 1, "b": 2}, include_tool_call=False)
    yield AgentCall("packer", prompt="Pack it.")
    answer = yield from Ask("Which size?", key="size")
    return f"size {answer}"


def pack(ctx: StepContext) -> Steps[str]:
    yield from ()
    return "packed"


PACKER = AgentDefinition("packer", handle_steps=pack)
ORDER = AgentDefinition("order", handle_steps=order, spawnable_agents=[PACKER], tools=[add])


async def told(db: str, *arguments: str) -> Any:
    """
    Return what ``dbos workflow ...`` prints.
    """
    command = [str(COMMAND), "workflow", *arguments, "--sys-db-url", db]
    done = await asyncio.to_thread(subprocess.check_output, command, text=True, timeout=120)
    return json.loads(done)


@pytest.mark.spec("durable:UC20")
async def test_dbos_tools_list_runs_by_agent_with_readable_steps(db: str, until) -> None:
    from dbos import DBOSClient

    client = await asyncio.to_thread(DBOSClient, system_database_url=db)
    try:
        async with worker_of([ORDER, PACKER], db) as engine:
            await engine.submit("order", "Boots.", id="order-1")
            await engine.submit("order", "Shoes.", id="order-2", session_id="ann")
            await until(lambda: waiting_of(engine, "order-1"), bool)
            await until(lambda: waiting_of(engine, "order-2"), bool)
            waiting = await found(client, "order")
            children = await found(client, "packer")
            listed = await told(db, "list", "--name", "stepengine.run", "--limit", "20")
            steps = await told(db, "steps", "order-1")
            (asked,) = await engine.operator.list_questions("order-1")
            await engine.resume("order-1", answers={asked.questions[0].id: "42"})
            ended = await told(db, "get", "order-1")
    finally:
        await asyncio.to_thread(client.destroy)

    assert {"order-1": "PENDING", "order-2": "PENDING"} == waiting
    assert {"order-1/1": "SUCCESS", "order-2/1": "SUCCESS"} == children
    assert {("order-1", "order"), ("order-2", "order"), ("order-1/1", "packer"), ("order-2/1", "packer")} == {
        (each["workflow_id"], each["attributes"]["agent"]) for each in listed
    }
    kinds = [step["function_name"].partition(":")[0] for step in steps]
    assert {"tool", "child"} <= set(kinds)
    assert [3] == [s["output"]["value"]["content"][0]["value"] for s in steps if s["function_name"].startswith("tool:")]
    assert ("SUCCESS", "order", "size 42") == (ended["status"], ended["attributes"]["agent"], ended["output"]["output"])


async def found(client: Any, agent: str) -> dict[str, str]:
    """
    Return the runs of an agent and their states, as the client of the package finds them by an attribute.
    """
    runs = await client.list_workflows_async(attributes={"agent": agent})
    return {run.workflow_id: run.status for run in runs}


async def waiting_of(engine: Any, run: str) -> Any:
    return await engine.operator.list_questions(run)
