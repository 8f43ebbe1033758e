"""What is said to a run while the body of a tool is under way: it belongs to the run, and is not part of what the body gives."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from stepengine import STEP, AgentDefinition, Engine, StepContext, Steps, call, tool
from stepengine.journal import MemoryJournal
from stepengine.models import ModelReply
from stepengine.testing import ScriptedModel

GATES: dict[str, asyncio.Event] = {}


@tool
async def gate() -> str:
    """Wait until it is opened."""
    GATES["reached"].set()
    await GATES["open"].wait()
    return "open"


@tool(uses=[gate])
def passed() -> Steps[str]:
    """Go through the gate."""
    return str((yield from call(gate)))


def goes_through(ctx: StepContext) -> Steps[Any]:
    yield from call(passed)
    reply = yield STEP
    return reply.text


def repeated(request: Any) -> ModelReply:
    return ModelReply(" | ".join([message.text for message in request.messages if message.role == "user"]))


AGENT = AgentDefinition("goer", model="test/model", tools=[passed], handle_steps=goes_through)


@pytest.mark.spec("programs:PG5", "requirements:N3")
async def test_message_during_a_body_is_replayed_and_resumed():
    GATES.update(reached=asyncio.Event(), open=asyncio.Event())
    journal = MemoryJournal()
    async with Engine([AGENT], models=ScriptedModel([repeated])) as engine:
        handle = engine.start(AGENT, "go", journal=journal)
        await GATES["reached"].wait()
        handle.send_input("left")
        GATES["open"].set()
        result = await handle.result()
    replayed = await Engine([AGENT], models=ScriptedModel([])).replay(journal)
    lines = journal.lines()
    later = await Engine([AGENT], models=ScriptedModel([repeated])).resume(MemoryJournal(lines[:-4]))

    assert "go | left" == result.output == replayed.output == later.output
    assert result.state.message_history == replayed.state.message_history
