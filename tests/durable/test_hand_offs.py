"""
Hand-offs, and children of several calls of one reply, in durable runs.
"""

from __future__ import annotations

import pytest

from stepengine import STEP_ALL, AgentDefinition, Perform, RunStatus, ToolCall
from stepengine.testing import ScriptedModel, text, tool_call, tool_calls
from stepengine.tools.bundled import task_tool

from .shared import worker_of


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("generator-contract:L41", "requirements:D10")
async def test_durable_run_hands_its_conversation_over(db: str) -> None:
    clerk = AgentDefinition("clerk", model="clerk/m")
    billing = AgentDefinition(
        "billing",
        model="billing/m",
        system_prompt="You write bills.",
        tools=["spawn_agents"],
        spawnable_agents=[clerk],
    )
    desk = AgentDefinition("desk", model="desk/m", tools=["hand_off"], spawnable_agents=[billing])
    bills = ScriptedModel([tool_call("clerk", {"prompt": "2"}), text("What for?"), text("For tea: 12 euros.")])
    models = {
        "desk": ScriptedModel([tool_call("hand_off", {"agent": "billing"})]),
        "billing": bills,
        "clerk": ScriptedModel(["Hm."]),
    }
    async with worker_of([desk], db, models=models) as worker:
        first = await worker.run(desk, "A bill, please.")
        second = await worker.run(desk, "For tea.", previous=first.state)

    assert (RunStatus.COMPLETED, "What for?", "end_turn") == (first.status, first.output, first.stop_reason)
    assert "billing" == first.state.handed_to
    assert "You write bills." == bills.calls[0].system_prompt
    assert [("hand_off", ""), ("clerk", "1")] == [(call.tool_name, call.path) for call in first.tool_calls]
    assert ["billing", "clerk"] == [child.agent_id for child in first.children]
    assert "For tea: 12 euros." == second.output


def review_inline(ctx):
    yield ToolCall("spawn_agent_inline", {"agent_type": "critic", "prompt": "Review it."}, include_tool_call=False)
    yield STEP_ALL


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("generator-contract:L25")
async def test_durable_inline_child_leaves_its_messages_to_its_parent(db: str) -> None:
    critic = AgentDefinition("critic", model="critic/m")
    writer = AgentDefinition("writer", model="writer/m", spawnable_agents=[critic], handle_steps=review_inline)
    models = {"critic": ScriptedModel(["Too long."]), "writer": ScriptedModel(["Shorter."])}
    async with worker_of([writer], db, models=models) as worker:
        result = await worker.run(writer, "Write.")

    assert ["Too long.", "Shorter."] == [m.text for m in result.state.message_history if m.role == "assistant"]
    assert ["spawn_agent_inline"] == [call.tool_name for call in result.tool_calls]


def did(prompt: str) -> str:
    return f"did {prompt}"


def work(ctx):
    return (yield from Perform(did, ctx.prompt))


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("requirements:X9")
async def test_durable_run_starts_children_of_several_calls(db: str) -> None:
    kid = AgentDefinition("kid", description="Works.", handle_steps=work)
    boss = AgentDefinition("boss", model="t/m", tools=[task_tool([kid])])
    calls = [tool_call("task", {"agent": "kid", "prompt": n}) for n in "123"]
    async with worker_of([boss], db, models=ScriptedModel([tool_calls(*calls), text("done")])) as worker:
        result = await worker.run(boss, "go")

    assert ["did 1", "did 2", "did 3"] == [one.result.text for one in result.tool_calls]


BILLING = AgentDefinition("billing", model="billing/m", description="Writes bills.", system_prompt="You write bills.")


DESK = AgentDefinition("desk", model="desk/m", tools=["hand_off"], spawnable_agents=[BILLING])


@pytest.mark.deep
@pytest.mark.spec("generator-contract:L41")
async def test_durable_session_continues_with_the_agent_it_was_handed_to(db: str) -> None:
    billing = ScriptedModel([text("What for?"), text("For tea: 12 euros.")])
    models = {"desk": ScriptedModel([tool_call("hand_off", {"agent": "billing"})]), "billing": billing}
    async with worker_of([DESK], db, models=models) as worker:
        said = [(await worker.run(DESK, word, session_id="s")).output for word in ("A bill.", "For tea.")]

    assert ["What for?", "For tea: 12 euros."] == said
