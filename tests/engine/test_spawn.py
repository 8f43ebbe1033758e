"""
The tools by which models run agents: what is asked for, what comes back, and what a model is told of them.
"""

from __future__ import annotations

import json
from decimal import Decimal
from typing import Any

import attrs
import pydantic
import pytest

from stepengine import (
    STEP,
    AgentCall,
    AgentDefinition,
    Change,
    Decision,
    Engine,
    GenerateN,
    Hooks,
    Limits,
    RunStatus,
    ToolCall,
    Usage,
    UserMessage,
    load_agent,
    tool,
)
from stepengine.errors import DefinitionError, LimitExceeded, LimitReached
from stepengine.events import AgentFinished, AgentSpawned, RunStarted
from stepengine.models import ModelReply
from stepengine.testing import ScriptedModel, text, tool_call, tool_calls
from stepengine.tools.bundled import agent_tool, ask_user_tool, control_tools, search_tools, spawn_tools, task_tool
from tests.engine.sums import add
from tests.phrases import NO_AGENT, UNAVAILABLE


class Wanted(pydantic.BaseModel):
    name: str
    size: int = 1


def echo(ctx):
    return f"{ctx.prompt}/{json.dumps(dict(ctx.params)) if isinstance(ctx.params, dict) else ctx.params.name}"
    yield


def crash(ctx):
    raise RuntimeError("broke")
    yield


@tool
def look_up() -> str:
    """Look something up."""
    return "found"


ECHO = AgentDefinition("echo-one", display_name="The Echo", description="Repeats what it is told.", handle_steps=echo)
TYPED = AgentDefinition("typed", description="Needs a name.", input_schema=Wanted, handle_steps=echo)
CRASH = AgentDefinition("crash", handle_steps=crash)
FORBIDDEN = AgentDefinition("forbidden", handle_steps=echo)


def boss(*replies: Any, **fields: Any) -> tuple[Engine, AgentDefinition[Any], ScriptedModel]:
    scripted = ScriptedModel([*replies, text("end")])
    given = {"tools": [*spawn_tools(), add], "spawnable_agents": [ECHO, TYPED, CRASH], **fields}
    made = AgentDefinition("boss", model="test/m", **given)
    return Engine([made, FORBIDDEN], models=scripted), made, scripted


async def spawned(*entries: Any, given: Any = None, **fields: Any) -> Any:
    """
    Return the result of one call of ``spawn_agents`` by a model, and the run that it belongs to.
    """
    engine, agent, _ = boss(tool_call("spawn_agents", {"agents": list(entries)} if given is None else given), **fields)
    result = await engine.run(agent, "go")
    return result.tool_calls[0].result, result


@pytest.mark.spec(
    "generator-contract:L3",
    "generator-contract:L6",
    "requirements:A13",
    "generator-contract:T2",
    "requirements:J8",
    "requirements:X16",
)
async def test_every_spawn_entry_has_its_result_in_order():
    engine, agent, _ = boss(
        tool_call(
            "spawn_agents",
            {
                "agents": [
                    {"agent_type": "forbidden", "prompt": "x"},
                    {"agent_type": "echo-one", "prompt": "a", "params": {"k": 1}},
                    {"agent_type": "nobody"},
                    {"agent_type": "crash"},
                    {"agent_type": "typed", "params": {"size": "much"}},
                    {"agent_type": "add"},
                    {"agent_type": "typed", "params": {"name": "n"}},
                ]
            },
        )
    )
    result = await engine.run(agent, "go", limits=Limits(max_total_children=4))
    data = result.tool_calls[0].result.data
    run_id = result.state.run_id

    assert [e["agent_type"] for e in data] == ["forbidden", "echo-one", "nobody", "crash", "typed", "add", "typed"]
    assert data[1] == {"agent_type": "echo-one", "run_id": f"{run_id}-1", "status": "completed", "output": 'a/{"k": 1}'}
    assert data[6]["output"] == "/n"
    for index in (0, 2, 5):
        assert "it may spawn: echo-one, typed, crash" in data[index]["error"]
    assert data[5]["error"].endswith("'add' is a tool: call it directly")
    assert "broke" in data[3]["error"]
    assert "name: Field required" in data[4]["error"]
    assert "size: " in data[4]["error"]
    assert [c.agent_id for c in result.children] == ["echo-one", "crash", "typed", "typed"]
    assert result.status is RunStatus.COMPLETED


@pytest.mark.spec("generator-contract:L3", "generator-contract:T2", "requirements:J8")
@pytest.mark.parametrize("by", ["model", "handler"])
async def test_error_in_one_spawn_entry_leaves_the_others_running(by):
    entries = [
        {"agent_type": "echo-one", "prompt": "a", "model": "other"},
        {"agent_type": "echo-one", "prompt": "b"},
        {"prompt": "c"},
        "echo-one",
        {"agent_type": "echo-one", "prompt": ["d"]},
        {"agent_type": "echo-one", "prompt": "e"},
    ]

    def handle(ctx):
        yield ToolCall("spawn_agents", {"agents": entries})
        yield ToolCall("spawn_agents", {"agents": {"agent_type": "echo-one", "prompt": "alone"}})

    if by == "model":
        result = (await spawned(*entries))[1]
    else:
        engine, agent, _ = boss(handle_steps=handle)
        result = await engine.run(agent, "go")
    said = result.tool_calls[0].result

    assert ["echo-one", "echo-one", "", "", "echo-one", "echo-one"] == [e["agent_type"] for e in said.data]
    assert ["b/{}", "e/{}"] == [e["output"] for e in said.data if "error" not in e]
    assert [
        "not started: agents.0.model: is not a parameter; the parameters are: agent_type, params, prompt",
        "not started: agents.2.agent_type: is required",
        "not started: agents.3: should be object, not string",
        "not started: agents.4.prompt: should be string, not array",
    ] == [e["error"] for e in said.data if "error" in e]
    assert not said.is_error
    if by == "handler":
        assert "alone/{}" == result.tool_calls[1].result.data[0]["output"]


@pytest.mark.spec("generator-contract:L3", "generator-contract:G51")
@pytest.mark.parametrize("wrong", [{"agent_type": "echo-one", "model": "x"}, {"agent_type": "nobody"}])
async def test_bad_entry_is_reported_after_the_models_turn_ended(wrong):
    ends = [t for t in control_tools() if t.spec.name == "end_turn"]
    asked = tool_calls(tool_call("spawn_agents", {"agents": [wrong]}), tool_call("end_turn"))
    engine, agent, scripted = boss(asked, tools=[*spawn_tools(), *ends])
    await engine.run(agent, "go")

    assert 2 == len(scripted.calls)
    assert '"error":' in scripted.calls[1].messages[-2].text


COERCED = {
    "a list": {"agents": [{"agent_type": "echo-one", "prompt": "p", "params": {"k": 1}}]},
    "one object": {"agents": {"agent_type": "echo-one", "prompt": "p", "params": {"k": 1}}},
    "a list as text": {"agents": '[{"agent_type": "echo-one", "prompt": "p", "params": {"k": 1}}]'},
    "camel case": {"agents": [{"agentType": "echo-one", "prompt": "p", "params": {"k": 1}}]},
    "an older name": {"agents": [{"agent": "echo-one", "prompt": "p", "params": {"k": 1}}]},
}


@pytest.mark.spec("generator-contract:T2")
@pytest.mark.parametrize("given", COERCED.values(), ids=COERCED)
async def test_malformed_spawn_lists_of_models_are_understood(given):
    result, _ = await spawned(given=given, tools=["spawn_agents"])

    assert 'p/{"k": 1}' == result.data[0]["output"]


@pytest.mark.spec("generator-contract:L2", "generator-contract:L3")
@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        ("echo-one", True),
        ("echo_one", True),
        ("Echo-one", False),
        ("acme/echo-one", True),
        ("acme/echo_one@0.0.1", True),
        ("echo-one@1.0.0", False),
        ("", False),
        ("a/b/c", False),
    ],
)
async def test_agent_id_matches_when_all_given_parts_are_equal(wanted, found):
    result, _ = await spawned({"agent_type": wanted, "prompt": "p"})

    assert found is ("error" not in result.data[0])
    assert ("echo-one" if found else wanted) == result.data[0]["agent_type"]


@pytest.mark.spec("generator-contract:L2")
def test_omitted_id_parts_match_anything_and_the_first_match_wins():
    from stepengine.machine.child_effects import find_matching_id

    allowed = ["acme/helper@1", "other/helper@2", "helper"]

    assert [
        find_matching_id(w, allowed) for w in ("helper", "acme/helper", "helper@2", "other/helper@2", "other/helper@1")
    ] == [
        "helper",
        "acme/helper@1",
        "other/helper@2",
        "other/helper@2",
        None,
    ]
    assert find_matching_id("helper", allowed[:2]) == "acme/helper@1"


KID = AgentDefinition("kid", description="Says hello.", handle_steps=echo)


@pytest.mark.spec("generator-contract:L2")
async def test_publisher_id_selects_the_given_agent_with_one_warning():
    wanted = "codebuff/kid@0.0.1"

    def both(ctx):
        one = yield from AgentCall(wanted, "a")
        many = yield ToolCall("spawn_agents", {"agents": [{"agent_type": wanted, "prompt": "b"}] * 2})
        return [one, *[child["output"] for child in many.tool_result.data]]

    boss = AgentDefinition("boss", spawnable_agents=[wanted], handle_steps=both)
    told = f"the agent 'kid' stands for {wanted!r}: publishers and versions are not checked"
    async with Engine([boss, KID]) as engine:
        result = await engine.run("acme/boss@9.9.9")
        alone = await engine.run("boss")

    assert ["a/{}", "b/{}", "b/{}"] == result.unwrap()
    assert [told] == [*result.warnings] == [*alone.warnings]
    assert ["kid"] * 3 == [child.agent_id for child in result.children]


@pytest.mark.spec("generator-contract:L2")
async def test_unregistered_publisher_id_selects_a_bundled_agent_or_is_refused(tmp_path):
    def searching(ctx):
        found = yield from AgentCall("codebuff/code-searcher@0.0.1", params={"search_queries": [{"pattern": "needle"}]})
        return found

    (tmp_path / "hay.txt").write_text("a needle\n")
    boss = AgentDefinition("boss", spawnable_agents=["codebuff/code-searcher@0.0.1"], handle_steps=searching)
    async with Engine([boss], search_tools(tmp_path)) as engine:
        result = await engine.run("boss")
        own = await engine.run("codebuff/code-searcher@2.0.0", params={"search_queries": [{"pattern": "needle"}]})

    assert result.unwrap() == own.unwrap()
    assert "hay.txt" in str(own.unwrap())
    assert load_agent("codebuff/code-searcher@0.0.1") is load_agent("code-searcher")
    for unknown in ("codebuff/nobody@0.0.1", "code-searcher@0.0.1"):
        with pytest.raises(DefinitionError, match="but no agent has that id"):
            Engine([attrs.evolve(boss, spawnable_agents=(unknown,))], search_tools(tmp_path))
    with pytest.raises(DefinitionError, match=f"{NO_AGENT} 'codebuff/nobody@1'"):
        load_agent("codebuff/nobody@1")


# --- agents as tools --------------------------------------------------------------------------------------------------


@pytest.mark.spec("generator-contract:L28", "generator-contract:L19")
@pytest.mark.parametrize("name", ["echo_one", "echo-one"])
async def test_spawnable_agent_is_a_tool_whose_call_is_spawn_agents(name):
    engine, agent, scripted = boss(tool_call(name, {"prompt": "hi", "params": {"k": 2}}))
    result = await engine.run(agent, "go")
    first = scripted.calls[0]
    specs = {s.name: s for s in first.tools}

    assert ["spawn_agents", "add", "echo_one", "typed", "crash"] == list(specs) == list(result.state.tool_definitions)
    assert "Repeats what it is told." == specs["echo_one"].description
    assert {"name"} == {*specs["typed"].input_schema["properties"]["params"]["required"]}
    assert (["params"], []) == (specs["typed"].input_schema["required"], specs["echo_one"].input_schema["required"])
    entry = {"agent_type": "echo-one", "run_id": f"{result.state.run_id}-1", "status": "completed"}
    assert [{**entry, "output": 'hi/{"k": 2}'}] == result.tool_calls[0].result.data
    assert name == result.tool_calls[0].tool_name == result.state.message_history[2].tool_calls[0].tool_name
    told = first.messages[1]
    assert ("INSTRUCTIONS_PROMPT",) == told.tags
    assert "- echo-one: Repeats what it is told.\n- typed: Needs a name.\n- crash\n" in told.text


@pytest.mark.spec("generator-contract:L28")
@pytest.mark.parametrize("name", ["echo_one", "echo-one"])
async def test_hook_sees_any_agent_call_as_spawn_agents(name):
    seen = []

    def closed(ctx, call):
        return Decision.deny("closed") if call.tool_name == "echo_one" else None

    def reworded(ctx, call):
        return Change(input={"prompt": "other"})

    def looked(ctx, call, result):
        seen.append(call.tool_name)

    engine, agent, _ = boss(tool_call(name, {"prompt": "hi"}), hooks=Hooks(pre_tool=[closed]))
    denied = (await engine.run(agent, "go")).tool_calls[0]
    engine, agent, _ = boss(tool_call(name, {"prompt": "hi"}), hooks=Hooks(pre_tool=[reworded], post_tool=[looked]))
    changed = (await engine.run(agent, "go")).tool_calls[0]

    assert ("denied", "closed", name) == (denied.result.status, denied.result.text, denied.tool_name)
    assert ("other/{}", name) == (changed.result.data[0]["output"], changed.tool_name)
    assert ["echo_one"] == seen


@pytest.mark.spec("generator-contract:L28")
@pytest.mark.parametrize("name", ["end-turn", "ask-user", "look-up"])
async def test_only_agents_have_alias_names_among_tools(name):
    tools = [*(t for t in control_tools() if t.spec.name == "end_turn"), ask_user_tool(), look_up]
    engine, agent, _ = boss(tool_call(name, {}), tools=tools, spawnable_agents=[])
    result = await engine.run(agent, "go")

    assert (RunStatus.COMPLETED, "end") == (result.status, result.output)
    assert f"Tool '{name}' {UNAVAILABLE} 'boss'" in result.tool_calls[0].result.text


@pytest.mark.spec("generator-contract:L28")
@pytest.mark.parametrize(
    ("given", "output"),
    [
        ({"prompt": ["no text"], "params": "no object"}, "/{}"),
        ({"params": '{"k": 3}'}, '/{"k": 3}'),
        ({}, "/{}"),
    ],
)
async def test_non_text_prompt_and_non_object_params_are_dropped(given, output):
    engine, agent, _ = boss(tool_call("echo_one", given))

    assert output == (await engine.run(agent, "go")).tool_calls[0].result.data[0]["output"]


@pytest.mark.spec("generator-contract:L29")
def test_agents_that_cannot_be_tools_are_refused_at_engine_construction():
    class Strange(pydantic.BaseModel):
        call: Any = None

        @classmethod
        def model_json_schema(cls, *args, **kwargs):
            raise TypeError("no schema for this")

    def built(child, tools=("spawn_agents",)):
        return Engine([AgentDefinition("boss", tools=list(tools), spawnable_agents=[child])])

    with pytest.raises(DefinitionError, match="its spawnable agent 'add' is offered as the tool 'add'"):
        built(AgentDefinition("add"), ["spawn_agents", add])
    with pytest.raises(DefinitionError, match="offered as the tool 'set_output'"):
        built(AgentDefinition("set-output"))
    with pytest.raises(DefinitionError, match=r"'odd': its params have no JSON Schema.*no schema for this"):
        built(AgentDefinition("odd", input_schema=Strange))
    with pytest.raises(
        DefinitionError, match="'listy': the schema of its params must have the type 'object', not 'array'"
    ):
        built(AgentDefinition("listy", input_schema={"type": "array"}))


@pytest.mark.spec("generator-contract:L28")
async def test_params_schema_definitions_resolve_inside_the_tool_schema():
    class Leaf(pydantic.BaseModel):
        n: int

    class Tree(pydantic.BaseModel):
        leaves: list[Leaf]

    kid = AgentDefinition("kid", input_schema=Tree, handle_steps=echo)
    plain = AgentDefinition(
        "plain", handle_steps=echo, input_schema={"type": "object", "properties": {"a": {"$ref": "#/properties/b"}}}
    )
    made = {t.spec.name: t.spec.input_schema for t in (agent_tool(kid), agent_tool(plain))}

    assert {"Leaf"} == {*made["kid"]["$defs"]}
    assert "#/$defs/Leaf" == made["kid"]["properties"]["params"]["properties"]["leaves"]["items"]["$ref"]
    assert "#/properties/params/properties/b" == made["plain"]["properties"]["params"]["properties"]["a"]["$ref"]


@pytest.mark.spec("requirements:J17")
async def test_agent_as_tool_has_its_own_name_and_description():
    structured = AgentDefinition(
        "counter", output_schema={"type": "object"}, handle_steps=lambda ctx: (yield from two())
    )
    counting = agent_tool(structured, name="count", description="Counts.")
    scripted = ScriptedModel(
        [
            tool_calls(
                tool_call("count", {"prompt": "x"}), tool_call("crash", {}), tool_call("echo_one", {"prompt": "e"})
            ),
            text("end"),
        ]
    )
    made = AgentDefinition("boss", model="test/m", tools=[counting, agent_tool(CRASH), agent_tool(ECHO)])
    engine = Engine([made], models=scripted)
    result = await engine.run("boss", "go")
    one, two_, three = [c.result for c in result.tool_calls]

    assert [("count", "Counts."), ("crash", "Run the agent crash."), ("echo_one", "Repeats what it is told.")] == [
        (s.name, s.description) for s in scripted.calls[0].tools
    ]
    assert {"n": 2} == one.data
    assert two_.is_error
    assert "Agent crash failed:" in two_.text
    assert ("e/{}", False) == (three.text, three.is_error)
    assert ["counter", "crash", "echo-one"] == [c.agent_id for c in result.children]
    assert "counter" in [d.id for d in engine.agents]


def two():
    return {"n": 2}
    yield


@pytest.mark.spec("requirements:J11", "requirements:E25", "requirements:J17")
async def test_task_tool_lists_its_agents_and_returns_the_final_text():
    talker = AgentDefinition("talker", model="test/m", description="Talks.", display_name="The Talker")
    made = task_tool([talker, ECHO, CRASH])
    schema = made.spec.input_schema
    scripted = ScriptedModel(
        [
            tool_call("task", {"agent": "talker", "prompt": "say"}),
            text("I said it"),
            tool_call("task", {"agent": "crash", "prompt": "x"}),
            text("end"),
        ]
    )
    root = AgentDefinition("boss", model="test/m", tools=[made])
    result = await Engine([root], models=scripted).run("boss", "go")

    assert "task" == made.spec.name
    assert ["talker", "echo-one"] == [*schema["properties"]["agent"]["enum"]]
    assert "- talker: Talks.\n- echo-one: Repeats what it is told." in made.spec.description
    assert 2 == made.spec.description.count('Use {"agent": ')
    assert ("I said it", False) == (result.tool_calls[0].result.text, result.tool_calls[0].result.is_error)
    assert 'agent: should be one of "talker", "echo-one"; not "crash"' in result.tool_calls[1].result.text
    assert ["say"] == [m.text for m in scripted.calls[1].messages]

    with pytest.raises(DefinitionError, match=r"no agent has a description.*'crash'"):
        task_tool([CRASH])
    with pytest.raises(DefinitionError, match="no agent has a description; describe at least one"):
        task_tool([])
    with pytest.raises(DefinitionError, match="two agents have the same id"):
        task_tool([talker, talker])


@pytest.mark.spec("requirements:J17", "reliability:SP02")
async def test_every_way_to_spawn_is_counted_by_the_same_limits():
    def handle(ctx):
        yield AgentCall("echo-one")
        yield ToolCall("spawn_agents", {"agents": [{"agent_type": "echo-one"}]})
        yield ToolCall("echo_one", {"prompt": "x"})
        yield ToolCall("echo", {"prompt": "x"})
        yield ToolCall("task", {"agent": "echo-one", "prompt": "x"})
        inline = yield ToolCall("spawn_agent_inline", {"agent_type": "echo-one"})
        return inline.tool_result.text

    agent = AgentDefinition(
        "boss",
        tools=["spawn_agents", agent_tool(ECHO, name="echo"), task_tool([ECHO])],
        spawnable_agents=[ECHO],
        handle_steps=handle,
    )
    result = await Engine([agent], models=ScriptedModel([])).run("boss", limits=Limits(max_total_children=5))

    assert ["completed"] * 5 + ["failed"] == [c.status.value for c in result.children]
    assert "max_total_children is 5" in result.output


@pytest.mark.spec("generator-contract:T0", "requirements:Q10")
async def test_engine_agent_can_be_looked_up_by_its_id():
    engine, agent, _ = boss(
        tool_calls(
            tool_call("lookup_agent_info", {"agent_id": "typed"}),
            tool_call("lookup_agent_info", {"agentId": "no_body"}),
            tool_call("lookup_agent_info", {"agent_id": "boss"}),
        ),
        tools=spawn_tools(lookup=True),
    )
    found, missing, itself = [c.result.data for c in (await engine.run(agent, "go")).tool_calls]

    assert {
        "id": "typed",
        "full_agent_id": "typed",
        "display_name": "typed",
        "model": None,
        "tool_names": [],
        "spawnable_agents": [],
        "include_message_history": False,
        "spawner_prompt": "Needs a name.",
        "input_schema": {
            "prompt": None,
            "params": {
                "type": "object",
                "properties": {"name": {"type": "string"}, "size": {"type": "integer", "default": 1}},
                "required": ["name"],
            },
        },
        "output_mode": "last_message",
        "output_schema": None,
    } == found["agent"]
    assert found["found"]
    assert ["echo-one", "typed", "crash"] == itself["agent"]["spawnable_agents"]
    assert not missing["found"]
    assert f"{NO_AGENT} 'no_body'" in missing["error"]


# --- what is shown ----------------------------------------------------------------------------------------------------


@pytest.mark.spec("requirements:J12")
async def test_child_events_name_spawner_and_input_even_on_failure():
    engine, agent, _ = boss(
        tool_call("spawn_agents", {"agents": [{"agent_type": "echo-one", "prompt": "p", "params": {"k": 1}}]}),
        tool_call("spawn_agents", {"agents": [{"agent_type": "crash"}, {"agent_type": "echo-one"}]}),
    )
    events = [event async for event in engine.stream(agent, "go")]
    spawned = [e for e in events if isinstance(e, AgentSpawned)]
    ended = [e for e in events if isinstance(e, AgentFinished)]
    began = {e.path: e for e in events if isinstance(e, RunStarted)}

    assert [
        ("echo-one", "boss", True, {"k": 1}),
        ("crash", "boss", False, None),
        ("echo-one", "boss", False, None),
    ] == [(e.agent_id, e.parent_agent_id, e.only_child, e.params) for e in spawned]
    assert ["The Echo", "crash", "The Echo"] == [e.display_name for e in spawned]
    assert {("echo-one", "completed"), ("crash", "failed")} == {(e.agent_id, e.status.value) for e in ended}
    assert sorted(e.child_path for e in spawned) == sorted(e.child_path for e in ended)
    assert {e.child_path: e.agent_id for e in spawned} == {p: e.agent_id for p, e in began.items() if p}


@pytest.mark.spec("requirements:X51")
@pytest.mark.parametrize("way", ["spawn_agents", "tool"])
async def test_child_result_reaches_its_parent_after_the_token_limit(way):
    def thrifty(ctx):
        try:
            yield STEP
        except LimitReached:
            return {"so far": 3}

    kid = AgentDefinition("thrifty", model="test/m", handle_steps=thrifty, limits=Limits(max_tokens=1))
    tools = [*spawn_tools(), agent_tool(kid, name="ask_kid")]
    entry = {"agent_type": "thrifty", "prompt": "go on " * 9}
    asked = {"agents": [entry]} if way == "spawn_agents" else {"prompt": entry["prompt"]}
    call = tool_call("spawn_agents" if way == "spawn_agents" else "ask_kid", asked)
    engine, agent, _ = boss(call, tools=tools, spawnable_agents=[kid])
    result = await engine.run(agent, "go")
    shown = result.tool_calls[0].result

    assert (RunStatus.FAILED, {"so far": 3}) == (result.children[0].status, result.children[0].output)
    assert shown.is_error
    if way == "tool":
        assert shown.text.endswith('\nIts output until then: {"so far":3}')
    else:
        assert {"so far": 3} == shown.data[0]["output"]
        assert "of 1 tokens" in shown.data[0]["error"]
    alone = await engine.run(kid, "go on " * 9)
    assert (RunStatus.FAILED, {"so far": 3}) == (alone.status, alone.output)
    with pytest.raises(LimitExceeded):
        alone.unwrap()


@pytest.mark.spec("requirements:D15", "generator-contract:L8")
async def test_run_and_child_report_spending_under_the_same_names():
    def reply(words, cost, model=None):
        return ModelReply(words, usage=Usage(10, 5), cost=None if cost is None else Decimal(cost), model=model)

    def handler(ctx):
        yield AgentCall("kid", prompt="go")
        yield STEP

    kid = AgentDefinition("kid", model="m/small")
    boss = AgentDefinition("boss", model="m/big", spawnable_agents=[kid], handle_steps=handler)
    for costs, known in ((("0.5", "2"), "2.5"), (("0.5", None), None)):
        replies = [reply("kid", costs[0]), reply("boss", costs[1])]
        result = await Engine([boss], models=ScriptedModel(replies), pricing=None).run("boss", "go")
        (child,) = result.children
        own = costs[1] and Decimal(costs[1])
        assert {"boss": own, "kid": Decimal("0.5")} == result.cost_by_agent
        assert {"m/big": own, "m/small": Decimal("0.5")} == result.cost_by_model
        assert (known and Decimal(known)) == result.cost
        assert (Decimal("0.5"), {"kid": Decimal("0.5")}, {"m/small": Decimal("0.5")}) == (
            child.cost, child.cost_by_agent, child.cost_by_model,
        )  # fmt: skip
        assert (Usage(10, 5, requests=1), {"kid": child.usage}, {"m/small": child.usage}) == (
            child.usage, child.usage_by_agent, child.usage_by_model,
        )  # fmt: skip


NO_MESSAGE = "agent 'kid' was started without a prompt and params, so its first request has no user message"


def starts_kid(call):
    def handle(ctx):
        child = (yield call).value
        return child[0] if isinstance(child, tuple) else child

    return handle


@pytest.mark.spec("generator-contract:L17")
@pytest.mark.parametrize("steps", [None, "STEP", "GenerateN"])
async def test_child_without_a_user_message_fails_without_a_model_call(steps):
    def kid(ctx):
        yield STEP if steps == "STEP" else GenerateN(2)

    agent = AgentDefinition("kid", model="t/m", system_prompt="Work.", handle_steps=None if steps is None else kid)
    boss = AgentDefinition("boss", spawnable_agents=[agent], handle_steps=starts_kid(AgentCall("kid")))
    model = ScriptedModel([text("paid for")] * 2)
    result = await Engine([boss], models=model).run("boss", "Go.")

    assert [] == model.calls
    assert RunStatus.FAILED == result.output.status
    assert NO_MESSAGE in str(result.output.error)
    assert "instructions_prompt" in str(result.output.error)


@pytest.mark.spec("generator-contract:L17")
@pytest.mark.parametrize(
    ("fields", "call"),
    [
        ({}, AgentCall("kid", "Look.")),
        ({}, AgentCall("kid", params={"q": 1})),
        ({"instructions_prompt": "Look."}, AgentCall("kid")),
        ({"step_prompt": "Look."}, AgentCall("kid")),
        ({"include_message_history": True}, AgentCall("kid")),
        ({"hooks": Hooks(pre_step=lambda ctx: Change(tail=[UserMessage("Look.")]))}, AgentCall("kid")),
    ],
)
async def test_a_child_may_have_its_user_message_from_anywhere(fields, call):
    agent = AgentDefinition("kid", model="t/m", **fields)
    boss = AgentDefinition("boss", spawnable_agents=[agent], handle_steps=starts_kid(call))
    result = await Engine([boss], models=ScriptedModel([text("seen")])).run("boss", "Go.")

    assert "seen" == result.output.unwrap()


@pytest.mark.spec("generator-contract:L2")
async def test_bare_id_selects_a_bundled_agent_unless_engine_has_one(tmp_path):
    """
    codebuff finds ``"code-searcher"`` among local agents and then in its store.
    """
    (tmp_path / "a.txt").write_text("a needle\n")

    def searching(ctx):
        return (yield from AgentCall("code-searcher", params={"search_queries": [{"pattern": "needle"}]}))

    boss = AgentDefinition("boss", spawnable_agents=["code-searcher"], handle_steps=searching)
    bundled = await Engine([boss], search_tools(tmp_path)).run("boss")
    mine = AgentDefinition("code-searcher", handle_steps=lambda ctx: (yield from echoed("mine")))
    own = await Engine([boss, mine], search_tools(tmp_path)).run("boss")

    assert "a.txt" in str(bundled.unwrap())
    assert bundled.warnings == ()
    assert own.unwrap() == "mine"
    with pytest.raises(DefinitionError, match="nobody-at-all"):
        Engine([AgentDefinition("boss", spawnable_agents=["nobody-at-all"], handle_steps=searching)])


def echoed(value):
    yield from ()
    return value


@pytest.mark.spec("requirements:J17", "reliability:SP12")
async def test_agent_tool_output_that_is_no_json_is_an_error():
    def strange(ctx):
        return {"deep": [object()]}
        yield

    tool = agent_tool(AgentDefinition("strange", handle_steps=strange))
    scripted = ScriptedModel([tool_call("strange", {}), text("end")])
    made = AgentDefinition("boss", model="test/m", tools=[tool])
    result = (await Engine([made], models=scripted).run("boss", "go")).tool_calls[0].result

    assert result.is_error
    assert "output.deep[0]" in result.text
