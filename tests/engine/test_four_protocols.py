"""
One definition on every protocol: real adapters, a real server on the loopback, the same run.
"""

from __future__ import annotations

from typing import Any

import pytest

from stepengine import AgentDefinition, Engine, RunStatus
from stepengine.models import Models, OpenAIChatProvider
from tests.engine.sums import add
from tests.faults.scripts import CHAT, WIRES, Wire
from tests.faults.server import fault_server, json_answer, sse

CALL = ("", [("add", '{"a": 2, "b": 3}')], "tool_use")
SAID = ("It is five.", [], "end_turn")
OPENROUTER = "openrouter"


AGENT = AgentDefinition("adder", tools=[add], system_prompt="Be brief.")


async def ran(wire: Wire, prefix: str, *, watched: bool) -> tuple[Any, int]:
    """
    Run the definition; the model string is all that differs.
    """
    answers = [sse(*wire.stream(*s), "fin") if watched else json_answer(wire.reply(*s)) for s in (CALL, SAID)]
    async with fault_server(*answers) as server:
        if prefix == OPENROUTER:
            provider: Any = OpenAIChatProvider(OPENROUTER, api_key="sk-x", base_url=f"{server.url}/v1")
        else:
            provider = wire.make(server.url)
        model = f"{prefix}/{wire.model.partition('/')[2]}"
        observers = [lambda event: None] if watched else []
        engine = Engine(models=Models({prefix: provider}), default_model=model, observers=observers)
        async with engine:
            result = await engine.run(AGENT, "What is 2 + 3?")
    return result, len(server.requests)


@pytest.mark.spec("requirements:G10")
@pytest.mark.parametrize("watched", [False, True])
async def test_one_definition_runs_alike_on_every_provider_by_model_string(watched: bool) -> None:
    wires = [(wire, wire.model.partition("/")[0]) for wire in WIRES] + [(CHAT, OPENROUTER)]
    runs = {prefix: await ran(wire, prefix, watched=watched) for wire, prefix in wires}

    assert {"anthropic", "openai", "openai_chat", "google", "openrouter"} == set(runs)
    for prefix, (result, requests) in runs.items():
        logged = [(c.tool_name, c.input, c.result.data, c.source, c.step) for c in result.tool_calls]

        assert (RunStatus.COMPLETED, "It is five.", 2) == (result.status, result.text, requests), prefix
        assert [("add", {"a": 2, "b": 3}, 5, "model", 0)] == logged
        assert ["user", "assistant", "tool", "assistant"] == [m.role for m in result.state.message_history]
        assert 2 == result.usage.requests
        assert 40 <= result.usage.total_tokens <= 120
        assert result.cost is None or result.cost > 0
