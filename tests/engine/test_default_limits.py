"""
What holds for a run when nobody set a limit, seen from outside (reliability 4.9).
"""

from __future__ import annotations

from decimal import Decimal

import httpx2
import pytest

from stepengine import STEP, AgentCall, AgentDefinition, Engine, Limits, RunStatus, ToolCall
from stepengine.models import Models, OpenAIChatProvider
from stepengine.testing import ScriptedModel, tool_call


@pytest.mark.spec("reliability:R6", "generator-contract:G47")
async def test_a_handler_has_a_thousand_actions():
    done = 0

    def handle(ctx):
        nonlocal done
        while True:
            yield ToolCall("think_deeply", {"thought": "on"}, include_tool_call=False)
            done += 1

    result = await Engine(models=ScriptedModel([])).run(AgentDefinition("a", handle_steps=handle), "go")

    assert (RunStatus.FAILED, 1_000, "actions", 1_000) == (result.status, done, result.error.kind, result.error.limit)


@pytest.mark.spec("reliability:SP01")
async def test_children_stand_at_most_five_levels_below_the_root():
    depths, refused = [], []

    def handle(ctx):
        depths.append(len(ctx.agent_state.ancestor_run_ids))
        child = (yield AgentCall("deep")).value
        if child.error is not None:
            refused.append(child.error.kind)

    engine = Engine([AgentDefinition("deep", spawnable_agents=["deep"], handle_steps=handle)], models=ScriptedModel([]))
    await engine.run("deep")

    assert ([0, 1, 2, 3, 4, 5], ["depth"]) == (depths, refused)


@pytest.mark.spec("reliability:SP02")
async def test_the_models_of_a_tree_start_a_hundred_children():
    def handle(ctx):
        yield ToolCall("think_deeply", {"thought": "here"}, include_tool_call=False)

    kid = AgentDefinition("kid", handle_steps=handle)
    boss = AgentDefinition("boss", model="t/m", tools=["spawn_agents"], spawnable_agents=[kid])
    spawn = tool_call("spawn_agents", {"agents": [{"agent_type": "kid"}] * 15})
    result = await Engine(models=ScriptedModel([*[spawn] * 7, "done"])).run(boss, "go")
    refused = [child for child in result.children if child.is_error]

    assert (105, 5) == (len(result.children), len(refused))
    assert {("children", 100)} == {(child.error.kind, child.error.limit) for child in refused}


@pytest.mark.spec("requirements:X76", "providers:PV81")
@pytest.mark.parametrize("usage", [None, {"prompt_tokens": 0, "completion_tokens": 0}])
async def test_dollar_limit_counts_a_gateways_cost_header_without_usage(usage):
    body = {"choices": [{"message": {"content": "x"}, "finish_reason": "stop"}]} | ({"usage": usage} if usage else {})
    answered = []

    def answer(request):
        answered.append(request)
        return httpx2.Response(200, json=body, headers={"x-litellm-response-cost": "2.0"})

    def handle(ctx):
        for _ in range(6):
            yield STEP

    provider = OpenAIChatProvider("proxy", "k", base_url="http://localhost/v1", transport=httpx2.MockTransport(answer))
    engine = Engine(
        models=Models({"proxy": provider}), pricing=lambda model, usage, at: Decimal(usage.total_tokens) / 10**6
    )
    agent = AgentDefinition("a", model="proxy/m", handle_steps=handle)
    result = await engine.run(agent, "go", limits=Limits(max_cost_usd=5))
    await provider.close()

    assert (RunStatus.FAILED, "cost", 3) == (result.status, result.error.kind, len(answered))
    assert 6 == result.cost
