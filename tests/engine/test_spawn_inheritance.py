"""
What a child takes over from its parent, and what an inline child leaves in its place.
"""

from __future__ import annotations

import json
from typing import Any

import attrs
import pydantic
import pytest

from stepengine import (
    STEP,
    AgentCall,
    AgentDefinition,
    Change,
    Engine,
    Hooks,
    Parallel,
    RunStatus,
    ToolCall,
    UserMessage,
    tool,
)
from stepengine.data.definition import InputSchema
from stepengine.journal import MemoryJournal
from stepengine.models import Models
from stepengine.testing import ScriptedModel, text, tool_call, tool_calls
from stepengine.tools.bundled import spawn_tools
from tests.engine.sums import add
from tests.faults.scripts import WIRES
from tests.faults.server import fault_server, json_answer
from tests.phrases import UNAVAILABLE


@tool(in_thread=False)
def own_tool(word: str) -> str:
    """
    Say a word.

    Args:
        word: The word.
    """
    return word


def agent(name: str, **fields: Any) -> AgentDefinition[Any]:
    return AgentDefinition(name, **{"model": "test/m", **fields})


def shown(request: Any) -> list[str]:
    return [m.text for m in request.all_messages]


def then_child(*calls: AgentCall[Any]) -> Any:
    def handle(ctx):
        yield STEP
        children = yield Parallel(*calls)
        return [c.output for c in children.value]

    return handle


# --- the prefix of siblings -------------------------------------------------------------------------------------------


class Wanted(pydantic.BaseModel):
    name: str


@pytest.mark.spec("generator-contract:L18", "generator-contract:S14")
async def test_inherited_prompt_shows_only_the_childs_output_schema_once():
    real = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
    fields = {"inherit_parent_system_prompt": True, "tools": ["set_output", own_tool]}
    kid = agent("kid", output_schema=real, **fields)
    free = agent("free", output_mode="structured_output", **fields)
    boss = agent("boss", system_prompt="Boss prompt", tools=spawn_tools(), spawnable_agents=[kid, free])
    entries = [{"agent_type": "kid"}, {"agent_type": "free"}]
    done = tool_call("set_output", {"name": "n"})
    scripted = ScriptedModel([tool_call("spawn_agents", {"agents": entries}), done, done, text("end")])
    result = await Engine([boss], models=scripted).run("boss", "go")
    told = [next(m.text for m in call.messages if "INSTRUCTIONS_PROMPT" in m.tags) for call in scripted.calls[1:3]]

    assert RunStatus.COMPLETED is result.status
    assert 1 == told[0].count("The output of set_output must fit")
    assert 1 == told[0].count('"name":{"type":"string"}')
    assert "The whole output." not in told[0]
    assert "- set_output: Set the output of this run" in told[0]
    assert 1 == told[1].count("The whole output.")


@pytest.mark.spec("generator-contract:L18", "reliability:PM39", "requirements:J8")
async def test_inherited_prompt_shows_parent_tools_but_allows_own_only():
    leaf = agent("leaf", description="A leaf.", input_schema=InputSchema(prompt="What to fetch.", params=Wanted))
    twig = agent("twig", input_schema=InputSchema())
    kid = agent(
        "kid",
        tools=[own_tool, "spawn_agents"],
        spawnable_agents=[leaf, twig],
        instructions_prompt="Do your part.",
        inherit_parent_system_prompt=True,
    )
    boss = agent("boss", system_prompt="Boss prompt", tools=[add, *spawn_tools()], spawnable_agents=[kid])
    scripted = ScriptedModel(
        [
            tool_call("spawn_agents", {"agents": [{"agent_type": "kid", "prompt": "x"}]}),
            tool_calls(
                tool_call("add", {"a": 1, "b": 2}),
                tool_call("own_tool", {"word": "mine"}),
                tool_call("kid", {}),
                tool_call("spawn_agents", {"agents": [{"agent_type": "kid"}]}),
            ),
            text("kid done"),
            text("end"),
        ]
    )
    result = await Engine([boss], models=scripted).run("boss", "go")
    first, inherited, second = scripted.calls[:3]
    refused, allowed, other, not_its_own = [m for m in second.messages if m.role == "tool"]
    instructions = inherited.messages[1].text

    assert result.status is RunStatus.COMPLETED
    assert ("Boss prompt", first.tools) == (inherited.system_prompt, inherited.tools)
    for message, name in ((refused, "add"), (other, "kid")):
        assert message.is_error
        assert f"Tool '{name}' {UNAVAILABLE} 'kid'. Available tools: own_tool, spawn_agents, leaf, twig" in message.text
    assert ("mine", "ok") == (allowed.text, allowed.status)
    assert "it may spawn: leaf, twig" in not_its_own.text
    assert instructions.startswith("Do your part.\n\n<system-reminder>")
    assert "you may call only: own_tool, spawn_agents, leaf, twig." in instructions
    assert "- own_tool: Say a word.\n  Its input: {" in instructions
    assert "- spawn_agents" not in instructions
    assert (
        'You may run the agent leaf: A leaf.\nIts prompt: What to fetch.\nIts params: {"properties":{"name"'
        in instructions
    )
    assert "You may run the agent twig\n" in instructions


@pytest.mark.spec("generator-contract:L18")
async def test_inherited_conversation_is_inherited_by_grandchildren():
    leaf = agent("leaf", inherit_parent_system_prompt=True)
    kid = agent(
        "kid", inherit_parent_system_prompt=True, spawnable_agents=[leaf], handle_steps=then_child(AgentCall("leaf"))
    )
    boss = agent(
        "boss", system_prompt="Boss", tools=[add], spawnable_agents=[kid], handle_steps=then_child(AgentCall("kid"))
    )
    scripted = ScriptedModel(["a", "b", "c"])
    await Engine([boss], models=scripted).run("boss", "go")

    assert {("Boss", (add.spec,))} == {(c.system_prompt, tuple(c.tools)) for c in scripted.calls}


@pytest.mark.spec(
    "generator-contract:L18",
    "generator-contract:L17",
    "generator-contract:L19",
    "generator-contract:L15",
    "generator-contract:L8",
)
@pytest.mark.parametrize("prompt", [False, True], ids=["own prompt", "inherited prompt"])
@pytest.mark.parametrize("history", [False, True], ids=["empty history", "inherited history"])
async def test_history_and_prompt_are_inherited_independently_of_each_other(history, prompt):
    own = {} if prompt else {"system_prompt": "Kid"}
    kid = agent(
        "kid",
        instructions_prompt="Kid rules.",
        tools=[own_tool],
        include_message_history=history,
        inherit_parent_system_prompt=prompt,
        **own,
    )
    boss = agent(
        "boss",
        system_prompt="Boss",
        instructions_prompt="Boss rules.",
        tools=[add],
        spawnable_agents=[kid],
        handle_steps=then_child(AgentCall("kid", "yours", {"k": 1})),
    )
    scripted = ScriptedModel(["said", "done"])
    await Engine([boss], models=scripted).run("boss", "go", params={"secret": 1})
    request = scripted.calls[1]
    messages = shown(request)
    before = ['go\n\n{\n  "secret": 1\n}', "Boss rules.", "said"] if history else []

    assert before == messages[: len(before)]
    mine, rules = messages[len(before) :]
    assert 'yours\n\n{\n  "k": 1\n}' == mine
    assert rules.startswith("Kid rules.")
    assert prompt is ("you may call only: own_tool" in rules)
    assert (
        ("Boss", ["add"]) == (request.system_prompt, [s.name for s in request.tools])
        if prompt
        else (("Kid", ["own_tool"]) == (request.system_prompt, [s.name for s in request.tools]))
    )


@pytest.mark.spec("requirements:A5", "requirements:J8")
async def test_handler_may_override_tools_and_model_of_a_spawnable_child():
    kid = agent("kid", model="test/small", tools=[add])
    strong = attrs.evolve(kid, model="test/large", tools=[own_tool])
    other = agent("other")

    def handle(ctx):
        children = yield Parallel(AgentCall("kid", "go"), AgentCall(strong, "go"), AgentCall(other, "go"))
        return [c.status.value for c in children.value]

    scripted = ScriptedModel(["a", "b"])
    boss = agent("boss", spawnable_agents=[kid], handle_steps=handle)
    result = await Engine([boss], models=scripted).run("boss")

    assert ["completed", "completed", "failed"] == result.output
    assert {("test/small", "add"), ("test/large", "own_tool")} == {(c.model, c.tools[0].name) for c in scripted.calls}


# --- inline -----------------------------------------------------------------------------------------------------------

MESSAGE = '{"message":"Agent helper ran in this conversation."}'
INLINE = {"agent_type": "helper", "prompt": "tidy up", "params": {"k": 1}}


def inline_boss(*, helper: dict[str, Any], **fields: Any) -> Engine:
    child = agent("helper", **{"instructions_prompt": "Helper rules.", **helper})
    boss = agent(
        "boss",
        **{
            "system_prompt": "Boss",
            "tools": [add, *spawn_tools(inline=True)],
            "spawnable_agents": [child],
            "instructions_prompt": "",
            **fields,
        },
    )
    return Engine([boss], models=ScriptedModel([]))


def without_notes(messages: Any) -> list[str]:
    return [m.text for m in messages if "<system-reminder>" not in m.text]


@pytest.mark.spec("generator-contract:L23", "generator-contract:L25", "requirements:D15")
async def test_inline_child_of_a_model_leaves_no_own_messages():
    scripted = ScriptedModel(
        [
            tool_calls(
                tool_call("add", {"a": 1, "b": 1}),
                tool_call("spawn_agent_inline", INLINE),
                tool_call("add", {"a": 2, "b": 2}),
            ),
            tool_call("own_tool", {"word": "tidied"}),
            text("All tidy."),
            text("end"),
        ]
    )
    engine = inline_boss(helper={"tools": [own_tool]})
    with engine.override(models=scripted):
        result = await engine.run("boss", "go")
    first, inside, inside_again, last = scripted.calls
    child = result.children[0]

    assert (first.system_prompt, first.tools) == (inside.system_prompt, inside.tools)
    assert ["go", 'tidy up\n\n{\n  "k": 1\n}'] == without_notes(inside.messages)[:2]
    assert any(m.text.startswith("Helper rules.") for m in inside.messages)
    assert ["go", "", "tidied", "All tidy.", "", "2", MESSAGE, "4"] == (without_notes(last.messages))
    assert not any("Helper rules." in m.text or "tidy up" in m.text for m in result.state.message_history)
    assert not any("All tidy." in m.text for m in inside_again.messages)
    assert child.left is None
    assert ["add", "spawn_agent_inline", "add"] == [c.tool_name for c in result.tool_calls]
    assert result.usage.requests == 4
    assert 2 == child.spending.usage.requests


@pytest.mark.spec("generator-contract:L25", "generator-contract:G42")
@pytest.mark.parametrize("recorded", [True, False])
async def test_inline_child_may_replace_its_callers_history(recorded):
    def prune(ctx):
        kept = [m for m in ctx.agent_state.message_history if m.text == "go"]
        yield ToolCall("set_messages", {"messages": [*kept, UserMessage("summary", ttl="user_prompt")]}, False)
        yield ToolCall("write_todos", {"todos": []}, include_tool_call=False)

    def handle(ctx):
        yield STEP
        yield STEP
        done = yield ToolCall("spawn_agent_inline", INLINE, include_tool_call=recorded)
        yield STEP
        return [m.text for m in done.agent_state.message_history], done.tool_result.data

    engine = inline_boss(helper={"handle_steps": prune, "instructions_prompt": ""}, handle_steps=handle)
    scripted = ScriptedModel(["one", "two", "three"])
    with engine.override(models=scripted):
        result = await engine.run("boss", "go")
    left, message = result.output
    pair = ["", MESSAGE] if recorded else []

    assert ["go", "summary"] == [t for t in left if "<system-reminder>" not in t][:2]
    assert pair == left[-2:] if recorded else left[-1] == "summary"
    assert {"message": "Agent helper ran in this conversation."} == message
    assert "summary" in shown(scripted.calls[2])
    assert "summary" not in [m.text for m in result.state.message_history]


@pytest.mark.spec("generator-contract:L23", "generator-contract:L25")
async def test_failing_inline_child_is_an_error_result_without_history_change():
    def broken(ctx):
        yield ToolCall("set_messages", {"messages": []}, include_tool_call=False)
        raise RuntimeError("broke")

    engine = inline_boss(helper={"handle_steps": broken})
    scripted = ScriptedModel(
        [
            tool_call("spawn_agent_inline", INLINE),
            tool_call("spawn_agent_inline", {"agent_type": "nobody"}),
            text("end"),
        ]
    )
    with engine.override(models=scripted):
        result = await engine.run("boss", "go")
    failed, unknown = [c.result for c in result.tool_calls]

    assert failed.is_error
    assert "the history stays as it was" in failed.text
    assert "broke" in failed.text
    assert unknown.is_error
    assert "it may spawn: helper" in unknown.text
    assert "go" == result.state.message_history[0].text
    assert RunStatus.COMPLETED is result.status


@pytest.mark.spec("generator-contract:L25", "requirements:I2")
async def test_inline_child_in_every_step_keeps_view_and_record():
    def shorten(ctx):
        yield from ()

    hooks = Hooks(pre_run=[lambda ctx: Change(view=ctx.state.view[-2:])])

    def handle(ctx):
        for _ in range(3):
            yield ToolCall("spawn_agent_inline", {"agent_type": "helper"}, include_tool_call=False)
            if (yield STEP).steps_complete and _ == 2:
                return

    engine = inline_boss(
        helper={"handle_steps": shorten, "hooks": hooks, "instructions_prompt": "Rules."}, handle_steps=handle
    )
    scripted = ScriptedModel(["one", "two", "three"])
    with engine.override(models=scripted):
        result = await engine.run("boss", "go")

    assert ["one", "two", "three"] == [m.text for m in result.state.message_history if m.role == "assistant"]
    assert [["one"], ["two"]] == [[m.text for m in c.messages][-1:] for c in scripted.calls[1:]]
    assert len(result.state.view) < len(result.state.message_history)


@pytest.mark.spec("generator-contract:L25", "reliability:I3", "reliability:I11")
async def test_inline_history_is_equal_on_replay_and_after_any_crash():
    def handle(ctx):
        for _ in range(2):
            yield ToolCall("spawn_agent_inline", {"agent_type": "helper", "prompt": "look"}, include_tool_call=False)
            yield STEP

    def made() -> Engine:
        return inline_boss(helper={"tools": [own_tool]}, handle_steps=handle)

    def answer(request: Any) -> Any:
        inside = any(m.text == "look" for m in request.messages)
        return text(f"{'inside' if inside else 'boss'} {len(request.messages)}")

    journal = MemoryJournal()
    live = made()
    with live.override(models=ScriptedModel([answer] * 6)):
        expected = await live.run("boss", "go", journal=journal)
    lines = journal.lines()

    assert ["go", "inside 4", "boss 3", "inside 6", "boss 5"] == without_notes(expected.state.message_history)
    dead = made()
    with dead.override(models=ScriptedModel([])):
        assert expected.state.message_history == (await dead.replay(journal)).state.message_history
    for cut in range(2, len(lines)):
        again = made()
        with again.override(models=ScriptedModel([answer] * 6)):
            result = await again.resume(MemoryJournal(lines[:cut]))
        assert expected.state.message_history == result.state.message_history, cut
        assert expected.state.view == result.state.view, cut


@pytest.mark.spec("generator-contract:L25", "generator-contract:T34")
async def test_inline_child_shares_its_context_but_other_children_do_not():
    """
    What both keep in the context is theirs together, and what the child took away is gone.
    """

    def note(ctx):
        known = ctx.state.context.get("seen", 0)
        return Change(context={"seen": known + 1, "draft": None})

    def handle(ctx):
        for tool_name in ("spawn_agent_inline", "spawn_agents"):
            asked = {"agent_type": "child"}
            yield ToolCall(tool_name, asked if tool_name.endswith("inline") else {"agents": [asked]})
        turn = yield ToolCall("spawn_agent_inline", {"agent_type": "child"}, include_tool_call=False)
        return dict(turn.agent_state.context)

    def idle(ctx):
        return ctx.agent_state.context.get("seen", 0)
        yield

    child = agent("child", handle_steps=idle, hooks=Hooks(pre_run=[note]))
    boss = agent(
        "boss",
        handle_steps=handle,
        spawnable_agents=[child],
        hooks=Hooks(pre_run=[lambda ctx: Change(context={"draft": "x", "own": 1})]),
    )
    async with Engine([boss], models=ScriptedModel()) as engine:
        result = await engine.run("boss", "go")

    assert {"seen": 2, "own": 1} == result.unwrap()
    assert [1, 1, 2] == [c.output for c in result.children]


@pytest.mark.spec("generator-contract:P5", "generator-contract:G2")
@pytest.mark.parametrize("inline", [False, True])
@pytest.mark.parametrize(
    ("asked", "own"),
    [
        ({}, []),
        ({"prompt": "Do."}, ["Do."]),
        ({"params": {"k": 1}}, []),
        ({"prompt": "Do.", "params": {"k": 1}}, ["Do."]),
    ],
)
async def test_handler_can_tell_inherited_messages_from_added_ones(asked, own, inline):
    def handle(ctx):
        return [[m.text for m in ctx.inherited_messages], [m.text for m in ctx.prompt_messages]]
        yield

    child = agent("child", handle_steps=handle, instructions_prompt="Rules.", include_message_history=True)

    def spawn(ctx):
        call = {"agent_type": "child", **asked}
        yield ToolCall("spawn_agent_inline" if inline else "spawn_agents", call if inline else {"agents": [call]})

    boss = agent("boss", handle_steps=spawn, spawnable_agents=[child])
    async with Engine([boss, child], models=ScriptedModel()) as engine:
        inner = (await engine.run("boss", "Outer.")).children[0].output
        alone = (await engine.run("child", **asked)).output

    assert [[], own] == alone
    assert "Outer." == inner[0][0]
    assert own == inner[1]
    assert not {"Do.", "Rules."} & {text for text in inner[0] if "system-reminder" not in text}
    assert not any('"k"' in text for text in inner[0])


# --- notes of a parent --------------------------------------------------------------------------------------------------

NOTE = "You may run these agents:"


async def requests_of(kid, *, instructions=""):
    boss = AgentDefinition(
        "boss", model="boss/m", system_prompt="Lead.", tools=["spawn_agents"], spawnable_agents=[kid],
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


@pytest.mark.spec("generator-contract:L15", "generator-contract:L18")
async def test_child_that_also_inherits_the_prompt_sends_the_same_bytes():
    kid = AgentDefinition("kid", model="kid/m", include_message_history=True, inherit_parent_system_prompt=True)
    asked, work = await requests_of(kid)

    assert list(asked.messages) == list(work.messages)[: len(asked.messages)]


def shared(bodies: list[bytes]) -> bytes:
    """
    Return the bytes with which all bodies begin.
    """
    first, last = min(bodies), max(bodies)
    length = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))
    return first[:length]


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("generator-contract:L18", "generator-contract:L15", "requirements:J8")
@pytest.mark.parametrize("wire", WIRES, ids=str)
async def test_ten_inheriting_siblings_send_the_parents_request_as_prefix(wire):
    entries = [{"agent_type": f"kid-{i}", "prompt": f"part {i}"} for i in range(10)]
    kids = [
        agent(
            f"kid-{i}",
            model=None,
            tools=[own_tool],
            instructions_prompt=f"Be kid {i}.",
            include_message_history=True,
            inherit_parent_system_prompt=True,
        )
        for i in range(10)
    ]
    calls = [("add", '{"a": 1, "b": 2}'), ("spawn_agents", json.dumps({"agents": entries}))]
    boss = agent(
        "boss",
        model=wire.model,
        system_prompt="You are the boss. " * 50,
        tools=[add, *spawn_tools()],
        spawnable_agents=kids,
    )
    answers = [wire.reply("First I add.", calls[:1], "tool_use"), wire.reply("Now I ask.", calls[1:], "tool_use")]
    answers += [wire.reply("done", [], "end_turn")]
    async with fault_server(*[json_answer(a) for a in answers]) as server:
        engine = Engine([boss], models=Models({wire.name: wire.make(server.url)}), pricing=None)
        async with engine:
            result = await engine.run("boss", "go")
    bodies = [body for _, body in server.requests]
    parent, siblings = bodies[1], bodies[2:12]
    common = shared(siblings)

    assert (RunStatus.COMPLETED, 13) == (result.status, len(bodies))
    assert all(e["status"] == "completed" for e in result.tool_calls[1].result.data)
    assert 10 == len(set(siblings))
    if wire.name == "anthropic":
        closing = b'"}]}]}'
        assert parent.endswith(closing)
        assert common.startswith(parent[: -len(closing)])
        assert b"Now I ask." in common
        assert b"spawn_agents" in common
        assert b"own_tool" not in common
    else:
        members = [json.loads(body) for body in [parent, *siblings]]
        listed = next(n for n in ("input", "messages", "contents") if n in members[0])
        for member in members[1:]:
            assert member[listed][: len(members[0][listed])] == members[0][listed]
            assert {k: v for k, v in member.items() if k != listed} == {
                k: v for k, v in members[0].items() if k != listed
            }
