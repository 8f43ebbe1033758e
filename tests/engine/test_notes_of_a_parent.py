"""What a child that inherits a conversation does not inherit: what its parent was told about the agents that it may run."""

from __future__ import annotations

import pytest

from stepengine import AgentDefinition, Engine
from stepengine.journal import MemoryJournal
from stepengine.testing import ScriptedModel, text, tool_call

NOTE = "You may run these agents:"


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


@pytest.mark.spec("generator-contract:L15")
@pytest.mark.parametrize("instructions", ["", "Be quick."])
async def test_inherited_history_omits_the_note_of_the_parents_agents(instructions):
    kid = AgentDefinition("kid", model="kid/m", system_prompt="Work.", include_message_history=True)
    asked, work = await requests_of(kid, instructions=instructions)

    assert NOTE in asked.messages[-1].text
    said = [m.text for m in work.messages]
    assert not any(NOTE in one for one in said)
    assert ["go", *filter(None, [instructions]), "work"] == [one for one in said if one]


@pytest.mark.spec("generator-contract:L15", "generator-contract:L19")
async def test_inherited_history_is_followed_by_a_note_of_own_agents():
    other = AgentDefinition("other", description="Knows.")
    kid = AgentDefinition(
        "kid", model="kid/m", include_message_history=True, tools=["spawn_agents"], spawnable_agents=[other]
    )
    _, work = await requests_of(kid)

    (note,) = [m.text for m in work.messages if NOTE in m.text]
    assert ("- other: Knows." in note, "- kid" in note) == (True, False)
