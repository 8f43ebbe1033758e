"""
Programs that models write, in durable runs: one that asks goes on in another worker.
"""

from __future__ import annotations

import pytest

from stepengine import AgentDefinition, Engine, RunStatus
from stepengine.testing import ScriptedModel, text, tool_call

from .shared import DONE, note, worker_of

pytest.importorskip("pydantic_monty", reason="needs the extra programs")

from stepengine.sandbox import MontySandbox, code_mode

CODE = """
import asyncio
said = await asyncio.gather(note("a"), note("b"))
answer = await ask("Go on?", ["yes", "no"])
said.append(await note(answer))
said
"""


@pytest.mark.deep
@pytest.mark.leaks_allowed("what the sandbox opens once for a process stays")
@pytest.mark.spec("programs:PG26")
async def test_program_asks_and_resumes_on_another_worker(db: str):
    sandbox = MontySandbox(2)
    agent = AgentDefinition("writer", model="test/model", tools=[code_mode(note, ask=True, sandbox=sandbox)])
    DONE.clear()
    try:
        async with worker_of([agent], db, models=ScriptedModel([tool_call("run_code", {"code": CODE})])) as worker:
            run = await worker.submit(agent, "")
            waiting = await worker.result(run)
        async with worker_of([agent], db, models=ScriptedModel([text("end")])) as worker:
            result = await worker.resume(run, answers={waiting.pending_questions[0].text: "yes"})
            exported = await worker.export(run)
        replayed = await Engine([agent], models=ScriptedModel([])).replay(exported)
    finally:
        sandbox.close()

    assert (RunStatus.SUSPENDED, RunStatus.COMPLETED) == (waiting.status, result.status)
    assert ["a", "b", "yes"] == sorted(DONE)
    assert ['["a", "b", "yes"]'] == [one.result.text for one in result.tool_calls]
    assert (result.text, result.usage) == (replayed.text, replayed.usage)
