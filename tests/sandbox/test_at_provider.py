"""Code mode where the provider runs the programs of its models: the tools themselves and a setting stand in the place of ``run_code``."""

from __future__ import annotations

import sys
from typing import Any

import attrs
import pytest

from stepengine import STEP_ALL, AgentDefinition, AgentState, Engine, ModelSettings, RunResult, UserMessage, tool
from stepengine.data.tools import ToolSpec
from stepengine.errors import DefinitionError
from stepengine.models import Programs, WebSearch
from stepengine.models._programs import supports_programs
from stepengine.sandbox import code_mode, program_tool
from stepengine.sessions import MemorySessions
from stepengine.testing import ScriptedModel, text, tool_call

pytest.importorskip("pydantic_monty", reason="needs the extra programs")

pytestmark = pytest.mark.anyio

CLAUDE, OTHER = "anthropic/claude-sonnet-5", "google/gemini-3-pro"


@tool(category="read")
def price(item: str) -> int:
    """What an item costs."""
    return len(item) * 10


@tool
def book(item: str) -> str:
    """Book an item."""
    return f"booked {item}"


def buyer(model: str | None, *more: Any, **options: Any) -> AgentDefinition[Any]:
    options = {"where": "provider"} | options
    return AgentDefinition("buyer", model=model, tools=[code_mode(price, book, **options), *more])


async def ran(agent: AgentDefinition[Any], *replies: Any, **options: Any) -> tuple[RunResult, ScriptedModel]:
    model = ScriptedModel(replies)
    async with Engine([agent], models=model, **options) as engine:
        return await engine.run(agent, "go"), model


def offered(model: ScriptedModel, call: int = 0) -> tuple[list[str], tuple[Any, ...]]:
    request = model.calls[call]
    return [spec.name for spec in request.tools], request.settings.server_tools


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("programs:PG29")
async def test_provider_run_programs_get_tools_and_others_get_run_code() -> None:
    result, model = await ran(buyer(CLAUDE), tool_call("price", {"item": "tea"}), text("end"))
    assert (["price", "book"], (Programs(["price", "book"]),)) == offered(model)
    assert ["30"] == [call.result.text for call in result.tool_calls]

    result, model = await ran(buyer(OTHER), tool_call("run_code", {"code": "await price('tea')"}), text("end"))
    assert (["run_code"], ()) == offered(model)
    assert ["30"] == [call.result.text for call in result.tool_calls]

    _, model = await ran(buyer(CLAUDE, where="here"), text("end"))
    assert (["run_code"], ()) == offered(model)


@pytest.mark.spec("programs:PG29")
@pytest.mark.parametrize(
    ("model", "runs"),
    [
        ("anthropic/claude-sonnet-5", True),
        ("anthropic/claude-sonnet-4-0", False),
        ("foundry/claude-haiku-4-5", True),
        ("openai/gpt-5.6", True),
        ("openai/gpt-5.12", True),
        ("openai/gpt-5.4", False),
        ("openai/gpt-5.6-chat", False),
        ("azure/gpt-5.6", False),
        ("bedrock/claude-sonnet-5", False),
        ("gpt-5.6", False),
    ],
)
def test_model_names_tell_whether_the_provider_runs_programs(model: str, runs: bool) -> None:
    assert runs is supports_programs(model)


@pytest.mark.spec("programs:PG29")
async def test_the_model_in_force_decides_for_children_and_defaults() -> None:
    lead = AgentDefinition("lead", model=CLAUDE, spawnable_agents=[buyer(None)], tools=["spawn_agents"])
    spawn = tool_call("spawn_agents", {"agents": [{"agent_type": "buyer", "prompt": "go"}]})
    _, model = await ran(lead, spawn, text("bought"), text("end"))
    assert (["price", "book"], (Programs(["price", "book"]),)) == offered(model, 1)

    for default, names in ((CLAUDE, ["price", "book"]), (OTHER, ["run_code"])):
        _, model = await ran(buyer(None), text("end"), default_model=default)
        assert names == offered(model)[0]
    _, model = await ran(buyer(CLAUDE), text("end"), agent_models={"buyer": OTHER})
    assert ["run_code"] == offered(model)[0]


@pytest.mark.spec("programs:PG29")
@pytest.mark.parametrize("where", ["provider", "here"])
async def test_single_step_is_the_same_wherever_programs_run(where: str) -> None:
    agent = attrs.evolve(buyer(CLAUDE, where=where), instructions_prompt="Only for whole runs.")
    model = ScriptedModel([text("end")])
    async with Engine([agent], models=model) as engine:
        step = await engine.step(AgentState.from_messages([UserMessage("go")]), agent)

    assert ["go", "end"] == [message.text for message in step.agent_state.message_history]
    assert (["price", "book"] if where == "provider" else ["run_code"]) == offered(model)[0]


@pytest.mark.spec("programs:PG29")
async def test_own_and_direct_tools_are_callable_by_the_model_too() -> None:
    own = AgentDefinition(
        "own",
        model=CLAUDE,
        tools=[book, code_mode(price, book, where="provider")],
        settings=ModelSettings(server_tools=[WebSearch()]),
    )
    _, model = await ran(own, text("end"))
    assert (["book", "price"], (WebSearch(), Programs(["price", "book"], direct=["book"]))) == offered(model)

    direct = code_mode(price, direct=[book], where="provider")
    _, model = await ran(AgentDefinition("direct", model=CLAUDE, tools=[direct]), text("end"))
    assert (["price", "book"], (Programs(["price", "book"], direct=["book"]),)) == offered(model)


@pytest.mark.spec("programs:PG29")
async def test_a_conversation_continues_with_another_model() -> None:
    model = ScriptedModel(
        [tool_call("price", {"item": "tea"}), text("30"), tool_call("run_code", {"code": "1 + 1"}), text("2")]
    )
    async with Engine([buyer(None)], models=model) as engine:
        first = await engine.run(buyer(CLAUDE), "go")
        second = await engine.run(buyer(OTHER), "again", previous=first.state)

    assert ["run_code"] == offered(model, 2)[0]
    assert ["2"] == [call.result.text for call in second.tool_calls]


@pytest.mark.spec("programs:PG29")
async def test_a_queued_session_run_knows_its_tools() -> None:
    seen: list[list[str]] = []

    def work(ctx: Any) -> Any:
        seen.append(list(ctx.agent_state.tool_definitions))
        yield STEP_ALL

    agent, model = attrs.evolve(buyer(CLAUDE), handle_steps=work), ScriptedModel([text("one"), text("two")])
    async with Engine([agent], models=model, sessions=MemorySessions()) as engine:
        for handle in [engine.start("buyer", said, session_id="s") for said in ("go", "again")]:
            await handle.result()

    assert [["price", "book"]] * 2 == seen
    assert offered(model, 0) == offered(model, 1)


@pytest.mark.spec("programs:PG29")
async def test_where_the_provider_runs_them_no_sandbox_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program_tool, "_SHARED", [])
    monkeypatch.setitem(sys.modules, "pydantic_monty", None)
    result, _ = await ran(buyer(CLAUDE, sandbox=None), text("end"))
    assert "end" == result.text
    with pytest.raises(DefinitionError, match=r"stepengine\[programs\]"):
        await ran(buyer(OTHER, sandbox=None), text("end"))


@pytest.mark.spec("programs:PG29")
async def test_a_tool_spec_means_the_tool_of_the_engine_there() -> None:
    assert isinstance(price.spec, ToolSpec)
    run_code = code_mode(price.spec, where="provider")
    agent = AgentDefinition("a", model=CLAUDE, tools=[run_code])
    result, _ = await ran(agent, tool_call("price", {"item": "tea"}), text("end"), tools=[price])

    assert ["30"] == [call.result.text for call in result.tool_calls]


@pytest.mark.spec("programs:PG29")
def test_options_of_local_programs_are_refused_at_a_provider() -> None:
    helper = AgentDefinition("helper", model=CLAUDE)
    for options, said in (
        ({"agents": [helper]}, "agents="),
        ({"ask": True}, "ask=True"),
        ({"where": "there"}, "'there'"),
    ):
        with pytest.raises(DefinitionError, match=said):
            code_mode(price, **({"where": "provider"} | options))
