"""
A handler in the sandbox, in a durable run: it asks, and goes on in another worker.
"""

from __future__ import annotations

import pytest

from stepengine import Engine, RunStatus
from stepengine.testing import ScriptedModel

from .shared import DONE, note, worker_of

pytest.importorskip("pydantic_monty", reason="needs the extra programs")

from stepengine.sandbox import MontySandbox
from stepengine.sandbox.untrusted_handlers import load_source

TEXT = """
from stepengine import AgentDefinition, Ask, Parallel, Sleep, ToolCall


def handle_steps(ctx):
    first = yield from Parallel([ToolCall("note", {"name": "a"}), ToolCall("note", {"name": "b"})])
    answer = yield from Ask("Go on?", ["yes", "no"])
    last = yield from ToolCall("note", {"name": answer})
    return [one.text for one in [*first, last]] + [ctx.random.randint(1, 1000)]


agent = AgentDefinition("stranger", tools=["note"], handle_steps=handle_steps)
"""


@pytest.mark.deep
@pytest.mark.leaks_allowed("what the sandbox opens once for a process stays")
@pytest.mark.spec("programs:PG42")
async def test_sandboxed_handler_asks_and_resumes_on_another_worker(db: str):
    sandbox = MontySandbox(2)
    (agent,) = load_source(TEXT, sandbox=sandbox)
    names: dict[str, object] = {}
    exec(TEXT, names)
    DONE.clear()
    try:
        async with worker_of([agent], db, tools=[note]) as worker:
            run = await worker.submit(agent, "")
            waiting = await worker.result(run)
        async with worker_of([agent], db, tools=[note]) as worker:
            result = await worker.resume(run, answers={waiting.pending_questions[0].id: "yes"})
            exported = await worker.export(run)
        replayed = await Engine([agent], [note], models=ScriptedModel([])).replay(exported)
        plain = await Engine([names["agent"]], [note], models=ScriptedModel([])).replay(exported)
    finally:
        sandbox.close()

    assert (RunStatus.SUSPENDED, RunStatus.COMPLETED) == (waiting.status, result.status)
    assert ["a", "b", "yes"] == sorted(DONE)
    assert ["a", "b", "yes"] == result.output[:3]
    assert result.output == replayed.output == plain.output
