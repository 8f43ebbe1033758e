"""What a child that inherits a conversation does not inherit: what its parent was told about the agents that it may run."""

from __future__ import annotations

import pytest

from stepengine import AgentDefinition, Engine
from stepengine.journal import MemoryJournal
from stepengine.testing import ScriptedModel, text, tool_call


async def requests_of(kid, *, instructions="", kids=()):
    boss = AgentDefinition(
        "boss", model="boss/m", system_prompt="Lead.", tools=["spawn_agents"], spawnable_agents=[kid, *kids],
        instructions_prompt=instructions,
    )  # fmt: skip
    leading = ScriptedModel(
        [tool_call("spawn_agents", {"agents": [{"agent_type": "kid", "prompt": "work"}]}), text("done")]
    )
    working = ScriptedModel(["worked"])
    engine, journal = Engine([boss], models={"boss": leading, "kid": working}), MemoryJournal()
    result = await engine.run(boss, "go", journal=journal)
    assert result.output == "done"
    assert (await engine.replay(journal)).output == "done"
    return leading.calls[0], working.calls[0]


@pytest.mark.spec("generator-contract:L15", "generator-contract:L18")
async def test_child_that_also_inherits_the_prompt_sends_the_same_bytes():
    kid = AgentDefinition("kid", model="kid/m", include_message_history=True, inherit_parent_system_prompt=True)
    asked, work = await requests_of(kid)

    assert list(asked.messages) == list(work.messages)[: len(asked.messages)]
