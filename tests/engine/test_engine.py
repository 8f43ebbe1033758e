"""
The engine from outside: what is checked when it is built, what a run gives, and how runs are started.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
import warnings

import pytest
from pydantic import BaseModel

from stepengine import (
    STEP,
    STEP_ALL,
    AgentCall,
    AgentDefinition,
    AgentState,
    Ask,
    Change,
    Decision,
    Engine,
    Hooks,
    Limits,
    Parallel,
    Perform,
    RunStatus,
    StopReason,
    ToolCall,
    ToolContext,
    Usage,
    UserMessage,
    tool,
)
from stepengine.engine import catalog
from stepengine.errors import (
    AgentError,
    DefinitionError,
    HandlerError,
    InputError,
    LimitExceeded,
    MissingKey,
    ModelError,
    ReplayDivergence,
    StepEngineError,
    UnknownModel,
)
from stepengine.journal import MemoryJournal
from stepengine.testing import ScriptedModel, failure, text, tool_call, tool_calls
from tests.engine.sums import add
from tests.loop_clock import put_clock_ahead


def plain(agent_id="plain", **fields):
    return AgentDefinition(agent_id, **{"model": "test/m", **fields})


def engine(*replies, agents=(), **fields):
    return Engine(agents, models=ScriptedModel(replies or ["hello"]), **fields)


# --- what is checked when an engine is built --------------------------------------------------------------------------


@pytest.mark.spec("requirements:H16")
async def test_the_smallest_agent_is_an_id_and_a_model():
    result = await engine("hello").run(AgentDefinition("x", model="test/m"), "hi")

    assert ("hello", RunStatus.COMPLETED, StopReason.END_TURN) == (result.text, result.status, result.stop_reason)


@pytest.mark.spec("requirements:A2")
def test_duplicate_agent_id_is_refused_with_underscore_equal_to_hyphen():
    first, second = plain("code-reviewer"), plain("code-reviewer", description="another")
    with pytest.raises(DefinitionError, match="'code-reviewer'"):
        Engine([first, second])
    with pytest.raises(DefinitionError, match="'code-reviewer'"):
        Engine([first, plain("boss", spawnable_agents=[second], tools=["spawn_agents"])])
    assert first is Engine([first]).agent("code_reviewer")


@pytest.mark.spec("requirements:A6", "requirements:O8")
def test_unknown_tool_name_is_refused_with_agent_and_available_tools():
    with pytest.raises(DefinitionError, match=r"'plain' lists the tool 'ad', .*available: add, add_message, "):
        Engine([plain(tools=["ad"])], tools=[add])


@pytest.mark.spec("reliability:TL20")
@pytest.mark.parametrize("tools", [[add, add], ["add"], [lambda: 1], [print]])
def test_invalid_or_duplicate_tool_is_refused(tools):
    with pytest.raises(DefinitionError):
        Engine(tools=tools)


@pytest.mark.spec("requirements:A6")
def test_an_unknown_spawnable_agent_is_refused():
    with pytest.raises(DefinitionError, match="'boss' lists 'nobody' in spawnable_agents, but no agent has that id"):
        Engine([plain("boss", spawnable_agents=["nobody"], tools=["spawn_agents"])])


@pytest.mark.spec("requirements:Q10")
def test_agents_reachable_through_spawnable_agents_are_collected():
    leaf = plain("leaf")
    middle = plain("middle", spawnable_agents=[leaf], tools=["spawn_agents"])
    top = plain("top", spawnable_agents=[middle, leaf], tools=["spawn_agents"])
    built = Engine([top])

    assert {"top", "middle", "leaf"} == {a.id for a in built.agents}
    assert leaf is built.agent("leaf")


@pytest.mark.parametrize("where", ["engine", "agent"])
def test_an_async_hook_is_refused_with_the_way_out(where):
    async def hook(ctx):
        return None

    hooks = Hooks(pre_run=hook)
    with pytest.raises(DefinitionError, match="Perform"):
        Engine(hooks=hooks) if where == "engine" else Engine([plain(hooks=hooks)])


def test_an_async_observer_is_refused():
    async def observer(event):
        return None

    with pytest.raises(DefinitionError, match="observer"):
        Engine(observers=[observer])


# --- misuse before a run exists ---------------------------------------------------------------------------------------


@pytest.mark.spec("requirements:X16")
async def test_an_unknown_agent_raises_and_lists_the_known_ones():
    with pytest.raises(AgentError, match="'nobody'; known are: 'plain'"):
        await engine(agents=[plain()]).run("nobody")


@pytest.mark.spec("requirements:X16")
@pytest.mark.parametrize("agent", [7, None, ["plain"]])
async def test_value_that_names_no_agent_is_refused(agent):
    with pytest.raises(AgentError, match="an agent must be an id or an AgentDefinition, not"):
        await engine(agents=[plain()]).run(agent)


class Wanted(BaseModel):
    name: str
    size: int = 3


SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "size": {"type": "integer"}},
    "required": ["name"],
    "additionalProperties": False,
}


@pytest.mark.spec("requirements:A13", "requirements:X16")
@pytest.mark.parametrize("schema", [Wanted, SCHEMA])
async def test_invalid_params_list_every_field_and_start_nothing(schema):
    scripted = ScriptedModel(["never"])
    events = []
    built = Engine([plain(input_schema=schema)], models=scripted, observers=[events.append])
    with pytest.raises(InputError) as caught:
        await built.run("plain", params={"size": "big"})

    assert 2 == len(caught.value.issues)
    assert "name" in str(caught.value)
    assert "size" in str(caught.value)
    assert [] == scripted.calls == events


@pytest.mark.spec("requirements:A13")
async def test_params_that_are_no_json_are_refused_by_name():
    built = engine(agents=[plain("free", input_schema={"type": "object"})])
    with pytest.raises(InputError, match=r"an? object at params\.a is not JSON"):
        await built.run("free", params={"a": object()})


@pytest.mark.spec("requirements:A13")
async def test_a_handler_sees_params_as_its_schema_says():
    seen = []

    def handle(ctx):
        seen.append(ctx.params)
        return
        yield

    built = engine()
    await built.run(plain("one", input_schema=Wanted, handle_steps=handle), params={"name": "x"})
    await built.run(plain("two", input_schema=SCHEMA, handle_steps=handle), params={"name": "x"})
    await built.run(plain("three", input_schema=Wanted, handle_steps=handle), params=Wanted(name="y"))

    assert [Wanted(name="x"), {"name": "x"}, Wanted(name="y")] == seen
    with pytest.raises(TypeError):
        seen[1]["name"] = "changed"


async def test_a_prompt_that_no_encoding_can_store_is_refused():
    with pytest.raises(InputError, match="prompt of agent 'plain' holds a lone surrogate"):
        await engine().run(plain(), "a\ud800b")


async def test_engine_runs_unregistered_definitions_and_keeps_the_last(monkeypatch):
    monkeypatch.setattr(catalog, "KEPT_DEFINITIONS", 3)
    built = engine(*["hello"] * 9)

    assert ["completed"] * 9 == [(await built.run(plain(f"given-{n % 7}"))).status for n in range(9)]
    assert 3 == len(built._launcher.catalog._met)


async def test_models_chosen_for_agents_are_journaled_by_full_name():
    journal, scripted = MemoryJournal(), ScriptedModel(["ok"] * 2)
    built = Engine([plain()], models={"first": scripted, "second": scripted}, agent_models={"plain": "second:m"})
    await built.run("plain", journal=journal)

    assert b'"second/m"' in journal.lines()[1]
    assert b'"second:m"' not in b"".join(journal.lines())


def asking_steps(ctx):
    first = yield STEP
    said = yield from Ask("Which?", ["one", "two"])
    child = yield from AgentCall("child", "Go.")
    last = yield STEP
    return [first.text, said, child, last.text]


def replying_steps(ctx):
    reply = yield STEP
    return reply.text


@pytest.mark.spec("requirements:A5")
@pytest.mark.parametrize(
    ("of_engine", "of_child"),
    [({}, "test/child"), ({"": "test/all"}, "test/all"), ({"a_b": "test/else"}, "test/child")],
)
async def test_models_of_one_run_override_others_and_hold_on_resume(of_engine, of_child):
    child = AgentDefinition("child", model="test/child", handle_steps=replying_steps)
    agent = AgentDefinition("a-b", model="test/own", spawnable_agents=[child], handle_steps=asking_steps)
    answers, journal = ScriptedModel(lambda request: request.model), MemoryJournal()
    built = Engine([agent], models=answers, agent_models=of_engine)
    suspended = await built.run("a-b", journal=journal, agent_models={"a_b": "test/run"})
    ended = await Engine([agent], models=answers, agent_models=of_engine).resume(journal, answers={"Which?": "one"})
    again = await Engine([agent], models=ScriptedModel([]), agent_models=of_engine).replay(journal)
    forked = await built.fork(journal, at=1, edit="two")
    with pytest.raises(ReplayDivergence, match="another model"):
        await built.fork(journal, at=1, edit="two", agent_models={"a-b": "test/later"})
    extended = await built.resume(
        journal, answers={"Which?": "one"}, agent_models={"a-b": "test/later"}, on_divergence="extend"
    )
    kept = await built.replay(journal)

    assert "suspended" == suspended.status
    assert ["test/run", "one", of_child, "test/run"] == ended.output == again.output
    assert ["test/run", "two", of_child, "test/run"] == forked.output
    assert ["test/later", "one", of_child, "test/later"] == extended.output == kept.output


@pytest.mark.parametrize(
    ("chosen", "said"),
    [
        ({"nobody": "test/m"}, "agent_models names 'nobody', which does not run here; agents that do: plain"),
        ({"plain": 5}, "agent_models must be a mapping from agent ids to models"),
        ("test/m", "agent_models must be a mapping from agent ids to models"),
    ],
)
async def test_invalid_models_of_one_run_are_refused_before_it_starts(chosen, said):
    scripted = ScriptedModel(["ok"])
    with pytest.raises(InputError, match=said):
        await Engine([plain()], models=scripted).run("plain", agent_models=chosen)

    assert [] == scripted.calls


@pytest.mark.parametrize("options", [{"prompt": 3}, {"params": [1]}, {"metadata": {"x": object()}}, {"previous": {}}])
async def test_input_of_a_wrong_kind_is_refused(options):
    with pytest.raises(InputError):
        await engine().run(plain(), **options)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"tools": ScriptedModel([])}, r"tools=.* \(models go to Engine\(agents, models=...\)\), not"),
        ({"tools": 3}, "a list of Tool objects"),
        ({"agents": plain("tester")}, "agents=.* must be a list of AgentDefinition objects, not"),
        ({"agents": "a"}, "not 'a'"),
        ({"hooks": print}, r"Hooks\(pre_step=\[check\]\) or None"),
        ({"hooks": {}}, "not {}"),
        ({"limits": {"max_steps": 3}}, r"Limits\(max_steps=20\) or None, not {'max_steps': 3}"),
        ({"observers": print}, "a list of functions that take an event"),
        ({"dependency_overrides": [1]}, "a mapping from functions to functions"),
        ({"pricing": 3}, "a function that takes model, usage and time or None, not 3"),
        ({"default_model": ["a/b"]}, "text or None"),
        ({"retry": 3}, r"RetryPolicy\(attempts=2\)"),
        ({"rate_limits": {"a": 3}}, "a RateLimit, or a mapping from provider prefixes to them"),
        ({"resources": {int: 42}}, "a list of objects, each found by its type; .* not {<class 'int'>: 42}"),
        ({"workspace": 3}, "a folder or a Workspace or None, not 3"),
        ({"model": "a/b"}, "Engine has no argument 'model'; valid arguments: models, .* and \\d+ more"),
    ],
)
def test_invalid_engine_argument_is_refused_where_it_is_written(arguments, said):
    with pytest.raises(DefinitionError, match=said):
        Engine(**{"agents": [plain("tester")], **arguments})


@pytest.mark.parametrize("method", ["run", "resume", "replay", "fork"])
async def test_unknown_option_is_refused_with_the_known_ones(method):
    engine = Engine([plain("tester")], models=ScriptedModel([]))
    at = {"at": 0} if method == "fork" else {}

    with pytest.raises(InputError, match=rf"{method}\(\) has no option 'model'; .*AgentDefinition\(model=...\)"):
        await getattr(engine, method)("tester", model="a/b", **at)


@pytest.mark.parametrize(
    "options", [{"limits": {"max_steps": 3}}, {"session_id": 3}, {"user_id": b"me"}], ids=lambda o: next(iter(o))
)
async def test_option_of_the_wrong_kind_is_refused_with_a_suggestion(options):
    engine = Engine([plain("tester")], models=ScriptedModel([]))

    with pytest.raises(InputError, match=f"{next(iter(options))} must be .* or None, not ") as caught:
        await engine.run("tester", "Hi", **options)

    assert 1 == len(caught.value.issues)


@pytest.mark.spec("requirements:G13")
async def test_an_unknown_provider_raises_before_the_run():
    built = Engine([plain(model="nobody/m")], models={"test": ScriptedModel([])})
    with pytest.raises(UnknownModel, match="nobody"):
        await built.run("plain")


@pytest.mark.spec("requirements:X16")
async def test_a_missing_key_raises_before_the_run():
    class Locked(ScriptedModel):
        def check(self, model):
            raise MissingKey("set TEST_API_KEY")

    scripted = Locked(["never"])
    with pytest.raises(MissingKey, match="TEST_API_KEY"):
        await Engine(models=scripted).run(plain(), "hi")
    assert [] == scripted.calls


@pytest.mark.spec("requirements:A5")
async def test_agent_without_a_model_uses_engine_or_provider_default():
    scripted = ScriptedModel(["hi", "hi"])
    result = await Engine(models=scripted, default_model="test/d").run(AgentDefinition("x"), "go")
    await Engine(models=scripted).run(AgentDefinition("x"), "go")
    failed = await Engine(models={"test": scripted}).run(AgentDefinition("x"), "go")

    assert RunStatus.COMPLETED is result.status
    assert ["test/d", "scripted/default"] == [c.model for c in scripted.calls]
    assert isinstance(failed.error, UnknownModel)
    assert "'x'" in str(failed.error)


# --- results ----------------------------------------------------------------------------------------------------------


@pytest.mark.spec("requirements:A8")
async def test_the_provider_gets_exactly_the_system_prompt():
    scripted = ScriptedModel(["hi"])
    await Engine(models=scripted).run(plain(system_prompt="X"), "hello")

    assert ("X", ["hello"]) == (scripted.calls[0].system_prompt, [m.text for m in scripted.calls[0].all_messages])


async def test_prompt_object_is_rendered_per_run_and_may_fail_it():
    class Prompt:
        def render(self, ctx):
            if ctx.user_id is None:
                raise ValueError("no user")
            ctx.logger.info("rendered")
            return f"for {ctx.user_id}"

    events, scripted = [], ScriptedModel(["hi"])
    built = Engine(models=scripted, observers=[events.append])
    fine = await built.run(plain(system_prompt=Prompt()), "go", user_id="ada")
    failed = await built.run(plain(system_prompt=Prompt()), "go")

    assert "for ada" == scripted.calls[0].system_prompt == fine.state.system_prompt
    assert isinstance(failed.error, HandlerError)
    assert ["run_started", "run_failed", "run_finished"] == [e.type for e in events][-3:]


@pytest.mark.spec("requirements:D9", "requirements:D10", "requirements:D15")
async def test_the_result_holds_text_state_calls_and_usage():
    replies = [
        tool_call("add", {"a": 1, "b": 2}, usage=Usage(input_tokens=10, output_tokens=1)),
        text("three", usage=Usage(input_tokens=20, output_tokens=2)),
    ]
    result = await engine(*replies, agents=[plain(tools=[add])]).run("plain", "1+2?")

    assert "three" == result.text == result.output == result.unwrap()
    assert ["user", "assistant", "tool", "assistant"] == [m.role for m in result.state.message_history]
    assert [("add", {"a": 1, "b": 2}, 3, False, "model")] == [
        (c.tool_name, c.input, c.result.data, c.is_error, c.source) for c in result.tool_calls
    ]
    assert Usage(input_tokens=30, output_tokens=3, requests=2) == result.usage
    assert {"plain"} == set(result.usage_by_agent)
    assert {"test/m"} == set(result.usage_by_model)


@pytest.mark.spec("generator-contract:S1", "generator-contract:S2")
@pytest.mark.parametrize("schema", [Wanted, SCHEMA])
async def test_structured_output_is_validated_and_returned_in_its_schema_form(schema):
    replies = [tool_call("set_output", {"size": 1}), tool_call("set_output", {"name": "x"}), "done"]
    result = await engine(*replies).run(plain(output_schema=schema), "go")

    assert (Wanted(name="x") if schema is Wanted else {"name": "x"}) == result.unwrap()
    assert ({"name": "x", "size": 3} if schema is Wanted else {"name": "x"}) == result.state.output
    assert [True, False] == [c.is_error for c in result.tool_calls]


@pytest.mark.spec("generator-contract:G36", "requirements:X16")
async def test_error_inside_a_run_gives_a_failed_result_unwrap_raises():
    result = await engine(failure(ModelError("no", status=400))).run(plain(), "hi")

    assert RunStatus.FAILED is result.status
    assert ["hi"] == [m.text for m in result.state.message_history]
    with pytest.raises(ModelError, match="no"):
        result.unwrap()


@pytest.mark.spec("requirements:X16", "requirements:O8")
async def test_a_crashing_handler_fails_its_own_run_and_says_where():
    def crash(ctx):
        yield STEP
        raise ZeroDivisionError("oops")

    built = engine("a", "b")
    failed, fine = await asyncio.gather(built.run(plain("bad", handle_steps=crash)), built.run(plain("good")))

    assert RunStatus.COMPLETED is fine.status
    assert isinstance(failed.error, HandlerError)
    assert "test_engine.py:" in failed.error.location


@pytest.mark.spec("requirements:D7")
@pytest.mark.parametrize("how", ["stop", "raise", "final_answer"])
async def test_step_limit_ends_a_run_in_one_of_three_ways(how):
    scripted = ScriptedModel([tool_call("add", {"a": 1, "b": 2})] * 2 + ["summary"])
    built = Engine([plain(tools=[add])], models=scripted)
    limits = Limits(max_steps=2, on_max_steps=how)
    if how == "raise":
        with pytest.raises(LimitExceeded) as caught:
            await built.run("plain", "go", limits=limits)
        result = caught.value.result
        assert RunStatus.FAILED is result.status
    else:
        result = await built.run("plain", "go", limits=limits)
        assert RunStatus.MAX_STEPS is result.status

    assert {"stop": 2, "raise": 2, "final_answer": 3}[how] == len(scripted.calls)
    assert 2 == len(result.tool_calls)


@pytest.mark.spec("generator-contract:G46", "requirements:A17")
async def test_limits_of_the_run_override_those_of_agent_and_engine():
    def steps(ctx):
        seen.append(ctx.agent_state.steps_remaining)
        return
        yield

    seen = []
    definition = plain(handle_steps=steps, limits=Limits(max_steps=7))
    built = engine(limits=Limits(max_steps=9))
    await built.run(definition, limits=Limits(max_steps=5))
    await built.run(definition)
    await built.run(plain("other", handle_steps=steps))
    await engine().run(plain("third", handle_steps=steps))

    assert [5, 7, 9, 50] == seen


@pytest.mark.spec("requirements:H1")
async def test_hooks_of_the_engine_run_before_those_of_the_agent():
    order = []
    hooks = {
        owner: Hooks(
            pre_run=lambda ctx, owner=owner: order.append(owner),
            post_run=lambda ctx, r, owner=owner: order.append(owner),
        )
        for owner in ("engine", "agent")
    }
    await engine(hooks=hooks["engine"]).run(plain(hooks=hooks["agent"]), "go")

    assert ["engine", "agent"] * 2 == order


@pytest.mark.spec("requirements:E6")
async def test_session_user_and_metadata_reach_hooks_and_tools():
    seen = []

    @tool
    def look(ctx: ToolContext) -> str:
        """Look at the context."""
        seen.append(
            (ctx.session_id, ctx.user_id, ctx.metadata, ctx.agent_id, ctx.run_id, ctx.workspace, ctx.resources.get(int))
        )
        return "ok"

    hooks = Hooks(pre_run=lambda ctx: seen.append((ctx.session_id, ctx.user_id, ctx.metadata)))
    async with engine(tool_call("look"), "done", hooks=hooks, workspace="/tmp", resources=[42]) as built:
        result = await built.run(plain(tools=[look]), "go", session_id="s", user_id="u", metadata={"k": 1})

    assert ("s", "u", {"k": 1}) == seen[0] == seen[1][:3]
    assert ("plain", result.state.run_id) == seen[1][3:5]
    assert ("/tmp", 42) == (str(seen[1][5].root), seen[1][6])
    assert "s" == result.session_id


# --- going on ---------------------------------------------------------------------------------------------------------


@pytest.mark.spec("requirements:D17", "requirements:D18")
async def test_run_continues_from_a_previous_state_without_changing_it():
    scripted = ScriptedModel(
        [
            tool_call("add", {"a": 1, "b": 2}, usage=Usage(input_tokens=5)),
            "three",
            tool_call("add", {"a": 3, "b": 4}),
            "seven",
        ]
    )
    hooks = Hooks(pre_run=lambda ctx: Change(context={"turns": ctx.state.context.get("turns", 0) + 1}))
    built = Engine([plain(tools=[add], hooks=hooks)], models=scripted)
    first = await built.run("plain", "1+2?")
    kept = first.state
    second = await built.run("plain", "3+4?", previous=first.state)

    assert ["1+2?", "three", "3+4?", "seven"] == [
        m.text for m in second.state.message_history if m.role != "tool" and m.text
    ]
    assert ["c1", "c2"] == [m.tool_call_id for m in second.state.message_history if m.role == "tool"]
    assert {"turns": 2} == second.state.context
    assert first.state.run_id != second.state.run_id
    assert 0 == second.usage.input_tokens
    assert 48 == second.state.steps_remaining
    assert 4 == len(kept.message_history)


@pytest.mark.spec("requirements:D17")
@pytest.mark.parametrize(("own", "sent"), [("", "Speak French."), ("Count.", "Count.")])
async def test_run_keeps_the_system_prompt_of_a_foreign_history(own, sent):
    """
    Of an agent with a prompt of its own that one counts: a history does not replace an agent's instructions.
    """
    previous = AgentState.from_dicts(
        [{"role": "system", "content": "Speak French."}, {"role": "user", "content": "I am Ada"}]
    )
    agent, scripted = AgentDefinition("plain", model="test/m", system_prompt=own), ScriptedModel(["oui", "oui"])
    async with Engine([agent], models=scripted) as built:
        first = await built.run(agent, "who am I?", previous=previous)
        await built.run(agent, "sure?", previous=first.state)

    assert [sent, sent] == [call.system_prompt for call in scripted.calls]


@pytest.mark.spec("requirements:D8")
async def test_single_step_continues_a_state_and_reports_turn_end():
    never = []

    def handle(ctx):
        never.append(ctx)
        yield STEP_ALL

    replies = [
        tool_call("add", {"a": 1, "b": 2}, usage=Usage(input_tokens=5)),
        text("three", usage=Usage(input_tokens=7)),
    ]
    definition = plain(tools=[add], handle_steps=handle, instructions_prompt="be brief", system_prompt="S")
    scripted = ScriptedModel(replies)
    built = Engine([definition], models=scripted)
    start = AgentState.from_messages([UserMessage("1+2?")], agent_id="plain", steps_remaining=10)
    one = await built.step(start)
    two = await built.step(one.agent_state)

    assert [False, True] == [one.steps_complete, two.steps_complete]
    assert ["user", "assistant", "tool", "assistant"] == [m.role for m in two.agent_state.message_history]
    assert "S" == scripted.calls[1].system_prompt
    assert (12, 8) == (two.agent_state.usage.input_tokens, two.agent_state.steps_remaining)
    assert one.agent_state.run_id == two.agent_state.run_id != ""
    assert 1 == len(start.message_history)
    assert [] == never


@pytest.mark.spec("requirements:D8")
async def test_failing_single_step_raises_its_error():
    with pytest.raises(ModelError, match="no"):
        await engine(failure(ModelError("no"))).step(AgentState(), plain())


# --- children ---------------------------------------------------------------------------------------------------------


def parent(*calls, **fields):
    def handle(ctx):
        children = yield Parallel(*calls)
        return [[c.agent_id, c.status.value, c.output, c.run_id] for c in children.value]

    return plain("boss", handle_steps=handle, **fields)


@pytest.mark.spec("generator-contract:L8", "requirements:D15", "requirements:A13", "generator-contract:L3")
async def test_children_have_own_ids_and_their_usage_rolls_up():
    kid = plain("kid", input_schema=Wanted)
    other = plain("other")
    boss = parent(
        AgentCall("kid", "go", {"name": "x"}),
        AgentCall("kid", "go", {"size": 1}),
        AgentCall("other"),
        spawnable_agents=[kid],
    )
    scripted = ScriptedModel([text("done", usage=Usage(input_tokens=7))])
    result = await Engine([boss, other], models=scripted).run("boss")
    run_id = result.state.run_id
    fine, wrong, forbidden = result.output

    assert ["kid", "completed", "done", f"{run_id}-0"] == fine
    assert ["failed", ""] == [wrong[1], wrong[3]] == [forbidden[1], forbidden[3]]
    assert "name" in result.children[1].error.message
    assert "it may spawn: kid" in result.children[2].error.message
    assert 7 == result.usage.input_tokens == result.usage_by_agent["kid"].input_tokens
    assert (f"{run_id}-0",) == result.state.child_run_ids


@pytest.mark.spec("requirements:A5", "requirements:J8")
async def test_a_child_without_a_model_uses_its_spawners():
    scripted = ScriptedModel(["a", "b"])
    mine, own = AgentDefinition("mine"), AgentDefinition("own", model="test/own")
    boss = parent(AgentCall(mine, "go"), AgentCall(own, "go"), spawnable_agents=[mine, own])
    await Engine(models=scripted, default_model="test/default").run(boss)

    assert {"test/m", "test/own"} == {c.model for c in scripted.calls}


@pytest.mark.spec("reliability:SP10", "requirements:K3")
async def test_question_of_a_child_suspends_the_tree_unless_already_answered():
    def ask(ctx):
        answer = yield from Ask("Really?")
        return answer

    kid = plain("kid", handle_steps=ask)
    boss = parent(AgentCall(kid), spawnable_agents=[kid])
    built = engine()
    open_ = await built.run(boss)
    answered = await built.run(boss, answers={"0.q0": "sure", "unasked": "?"})

    assert (RunStatus.SUSPENDED, "") == (open_.status, open_.text)
    assert [("0.q0", "Really?", "0")] == [(q.id, q.text, q.path) for q in open_.pending_questions]
    assert "sure" == answered.output[0][2]
    assert any("unasked" in w for w in answered.warnings)


# --- events and ways to start -----------------------------------------------------------------------------------------


@pytest.mark.spec("requirements:N10", "requirements:N8", "generator-contract:T34")
async def test_run_stream_handle_and_observer_show_the_same_run():
    observed = []
    replies = [tool_calls(tool_call("add", {"a": 1, "b": 2}), tool_call("add", {"a": 3, "b": 4})), "done"]

    def fresh():
        observed.clear()
        return Engine([plain(tools=[add])], models=ScriptedModel(replies), observers=[observed.append])

    ran = await fresh().run("plain", "go")
    seen_by_observer = [e.type for e in observed]
    streamed = [e async for e in fresh().stream("plain", "go")]
    handle = fresh().start("plain", "go")
    handled = [e async for e in handle.events()]
    result = await handle.result()

    assert seen_by_observer == [e.type for e in streamed] == [e.type for e in handled]
    assert list(range(len(streamed))) == [e.index for e in streamed]
    assert 1 == seen_by_observer.count("run_finished")
    assert "run_finished" == seen_by_observer[-1]
    texts = {r.text for r in (ran, streamed[-1].result, result)}
    histories = [list(r.state.message_history) for r in (ran, streamed[-1].result, result)]
    assert {"done"} == texts
    assert histories[0] == histories[1] == histories[2]


async def test_streamed_arguments_have_the_ids_of_their_calls():
    replies = [tool_calls(*[tool_call("add", {"a": n, "b": 0}) for n in range(3)]), "done"]
    events = [e async for e in Engine([plain(tools=[add])], models=ScriptedModel(replies)).stream("plain", "go")]
    deltas = dict.fromkeys([e.tool_call_id for e in events if e.type == "tool_input_delta"])

    assert ["c1", "c2", "c3"] == [e.tool_call_id for e in events if e.type == "tool_started"] == [*deltas]


async def test_misuse_raises_when_a_stream_is_made_and_not_later():
    with pytest.raises(AgentError):
        engine().stream("nobody")


class Hanging(ScriptedModel):
    """
    A model that never answers.
    """

    def __init__(self):
        super().__init__([])
        self.asked, self.left = asyncio.Event(), asyncio.Event()

    async def complete(self, request):
        self.asked.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.left.set()

    async def stream(self, request):
        await self.complete(request)
        yield


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("reliability:SS10", "reliability:I12")
@pytest.mark.parametrize("how", ["break", "drop"])
async def test_leaving_a_stream_cancels_the_run(how):
    model = Hanging()
    stream = Engine(models=model).stream(plain(), "go")
    async for event in stream:
        if event.type == "model_started":
            await model.asked.wait()
            break
    if how == "break":
        await stream.aclose()
    else:
        del stream
        gc.collect()
    async with asyncio.timeout(30):
        await model.left.wait()


@pytest.mark.spec("reliability:SS12", "reliability:I12")
async def test_timeout_around_a_run_is_raised_after_the_run_ends(monkeypatch):
    class Late(Hanging):
        async def complete(self, request):
            put_clock_ahead(monkeypatch, 6_000)
            await super().complete(request)

    events = []
    built = Engine(models=Late(), observers=[events.append])
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(3_000):
            await built.run(plain(), "go")
    assert RunStatus.CANCELLED is events[-1].result.status

    with pytest.raises(TimeoutError):
        await asyncio.wait_for(built.run(plain(), "go"), 3_000)
    assert 2 == [e.type for e in events].count("run_finished")
    assert 0 == asyncio.current_task().cancelling()


@pytest.mark.spec("reliability:GN34")
async def test_observer_may_start_one_run_and_interrupt_another():
    started = []

    def observer(event):
        if event.type == "model_started" and not started:
            started.append(other.start(plain("second"), "go"))
            handles[0].interrupt()

    other = engine("fine")
    handles = [Engine(models=Hanging(), observers=[observer]).start(plain(), "go")]
    first = await handles[0].result()
    second = await started[0].result()

    assert (RunStatus.CANCELLED, RunStatus.COMPLETED) == (first.status, second.status)


async def test_handle_whose_task_never_began_is_not_waited_for():
    built = engine()
    handle = built.start(plain(), "go")
    for task in asyncio.all_tasks():
        if task.get_name().startswith("stepengine"):
            task.cancel()
    await asyncio.sleep(0)
    await built.aclose()  # warns of runs that go on

    assert handle.done


@pytest.mark.spec("requirements:N1")
async def test_a_handle_stops_its_run_when_its_block_ends():
    model = Hanging()
    async with Engine(models=model).start(plain(), "go", session_id="s", metadata={"a": 1}) as handle:
        await model.asked.wait()
        assert ("s", {"a": 1}, "plain", "calling_model") == (
            handle.session_id,
            handle.metadata,
            handle.agent_id,
            handle.phase.value,
        )
    assert handle.done
    assert RunStatus.CANCELLED is (await handle.result()).status


@pytest.mark.spec("requirements:N3")
async def test_input_reaches_an_unfinished_run_before_its_next_model_call():
    release = asyncio.Event()

    @tool
    async def wait() -> str:
        """Wait."""
        handle.send_input("hurry up")
        release.set()
        return "waited"

    scripted = ScriptedModel([tool_call("wait"), "done"])
    handle = Engine(models=scripted).start(plain(tools=[wait]), "go")
    result = await handle.result()
    with pytest.raises(StepEngineError, match="has ended"):
        handle.send_input("too late")

    assert "hurry up" == scripted.calls[1].all_messages[-1].text
    assert RunStatus.COMPLETED is result.status


@pytest.mark.spec("reliability:SS10")
async def test_closing_an_engine_ends_runs_and_warns_of_unobserved_ones():
    model = Hanging()
    built = Engine(models=model)
    handle = built.start(plain(), "go")
    await model.asked.wait()
    with pytest.warns(ResourceWarning, match=handle.run_id):
        await built.aclose()
    assert handle.done
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        await built.aclose()


@pytest.mark.deep
@pytest.mark.spec("reliability:SS10")
@pytest.mark.parametrize("begun", [True, False], ids=["under way", "not begun"])
async def test_run_with_a_dropped_handle_ends_with_its_engine(begun):
    model = Hanging()
    events = []
    built = Engine(models=model, observers=[events.append])
    built.start(plain(), "go")
    gc.collect()
    if begun:
        await model.asked.wait()
    with pytest.warns(ResourceWarning, match="the engine was closed before the result of"):
        await built.aclose()

    assert ["run_finished"] == [e.type for e in events][-1:]
    assert RunStatus.CANCELLED is events[-1].result.status
    assert [] == [task for task in asyncio.all_tasks() if task.get_name().startswith("stepengine")]


@pytest.mark.spec("reliability:SS10")
async def test_close_names_a_run_that_does_not_end_and_returns(monkeypatch, caplog):
    monkeypatch.setattr("stepengine.engine.run.CLOSE_SECONDS", 0.1)
    begun, free = asyncio.Event(), asyncio.Event()

    async def stubborn():
        begun.set()
        while not free.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await free.wait()

    def handle(ctx):
        yield from Perform(stubborn)

    built = engine()
    run = built.start(plain(handle_steps=handle), "go")
    result = asyncio.create_task(run.result())
    await begun.wait()
    try:
        with pytest.warns(ResourceWarning, match=rf"could not be ended and are still running: {run.run_id} of 'plain'"):
            await built.aclose()
        assert f"{run.run_id} of 'plain'" in caplog.text
    finally:
        free.set()
    await result

    assert set() == built._launcher.runs.active


@pytest.mark.spec("reliability:SS10")
async def test_close_names_a_run_on_a_stopped_loop_at_once(monkeypatch):
    # Whoever waited for it would wait for longer than a test may take.
    monkeypatch.setattr("stepengine.engine.run.CLOSE_SECONDS", 3_000.0)
    built, loop = Engine(models=Hanging()), asyncio.new_event_loop()

    async def begun():
        stream = built.stream(plain(), "go")
        await anext(stream)
        return stream

    def ends(stream):
        loop.run_until_complete(stream.aclose())
        loop.close()

    stream = await asyncio.to_thread(loop.run_until_complete, begun())
    with pytest.warns(ResourceWarning, match="of 'plain'"):
        await built.aclose()
    await asyncio.to_thread(ends, stream)


@pytest.mark.spec("reliability:SS10")
def test_closing_from_synchronous_code_waits_for_runs_of_other_threads():
    model, ended = Hanging(), []
    begun = threading.Event()

    async def run():
        handle = built.start(plain(), "go")
        await model.asked.wait()
        begun.set()
        ended.append((await handle.result()).status)

    built = Engine(models=model)
    thread = threading.Thread(target=lambda: asyncio.run(run()))
    thread.start()
    begun.wait(50)
    built.close()
    assert set() == built._launcher.runs.active
    thread.join(50)

    assert [RunStatus.CANCELLED] == ended


@pytest.mark.spec("reliability:SS06")
async def test_overrides_of_concurrent_tasks_do_not_meet():
    built = engine("engine's own")

    async def one(name):
        with built.override(models=ScriptedModel([name])):
            await asyncio.sleep(0)
            return (await built.run(plain(), "go")).text

    assert ["a", "b", "c"] == await asyncio.gather(one("a"), one("b"), one("c"))
    assert "engine's own" == (await built.run(plain(), "go")).text


# --- tools that call back ---------------------------------------------------------------------------------------------


@pytest.mark.spec("reliability:TL17")
async def test_tool_may_start_a_root_run_that_shares_no_limits():
    @tool
    async def delegate() -> str:
        """Delegate."""
        return (await built.run(plain("helper"), "help")).text

    replies = [tool_call("delegate"), text("helped", usage=Usage(input_tokens=900)), "done"]
    built = engine(*replies)
    result = await built.run(plain(tools=[delegate]), "go", limits=Limits(max_tokens=1000))

    assert "helped" == result.tool_calls[0].result.text
    assert 0 == result.usage.input_tokens
    assert () == result.children


@pytest.mark.spec("requirements:X59")
@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
async def test_keyboard_interrupt_in_a_tool_is_reraised_after_run_end(kind):
    events = []

    @tool
    async def interrupt() -> str:
        """Interrupt."""
        raise kind

    built = engine(tool_call("interrupt"), observers=[events.append])
    with pytest.raises(kind):
        await built.run(plain(tools=[interrupt]), "go")
    result = events[-1].result

    assert RunStatus.CANCELLED is result.status
    assert ["user", "assistant", "tool"] == [m.role for m in result.state.message_history]


@pytest.mark.spec("generator-contract:G42", "generator-contract:G32")
async def test_handler_may_use_engine_tools_hidden_from_the_model():
    def handle(ctx):
        result = yield ToolCall("add", {"a": 2, "b": 2}, include_tool_call=False)
        return result.tool_result.data

    scripted = ScriptedModel([])
    result = await Engine(models=scripted, tools=[add]).run(plain(handle_steps=handle))

    assert 4 == result.output
    assert 0 == len(result.state.message_history)


@pytest.mark.spec("generator-contract:G2")
async def test_no_prompt_may_be_written_as_none():
    seen = []

    def handle(ctx):
        seen.append((ctx.prompt, ctx.is_asked))
        if ctx.agent_state.parent_id is None:
            yield AgentCall("plain", None)

    agent = plain(spawnable_agents=["plain"], handle_steps=handle)
    engine = Engine([agent], models=ScriptedModel([]))
    result = await engine.run("plain", None, journal=(journal := MemoryJournal()))
    assert (RunStatus.COMPLETED, [("", False)] * 2) == (result.status, seen)
    assert RunStatus.COMPLETED is (await engine.replay(journal)).status


@tool(in_thread=False)
def other() -> str:
    """Do something else."""
    return "other"


@pytest.mark.spec("generator-contract:G23")
async def test_state_names_exactly_its_agents_tools_with_their_specifications():
    seen = {}

    def handle(ctx):
        seen[ctx.agent_state.agent_id] = dict(ctx.agent_state.tool_definitions)
        if ctx.agent_state.agent_id == "boss":
            yield AgentCall("child", "go")
        yield STEP

    child = AgentDefinition("child", model="test/m", tools=["other"], handle_steps=handle)
    boss = AgentDefinition("boss", model="test/m", tools=[add], spawnable_agents=[child], handle_steps=handle)
    model = ScriptedModel([text("a"), text("b")])
    await Engine([boss], [other], models=model).run("boss")

    assert {"boss": {"add": add.spec}, "child": {"other": other.spec}} == seen
    assert [["other"], ["add"]] == [[spec.name for spec in request.tools] for request in model.calls]


@pytest.mark.spec("requirements:X47")
@pytest.mark.parametrize("ending", ["answer", "interrupt"])
async def test_input_during_a_permission_question_waits_and_answers_nothing(ending):
    def ask(ctx, call):
        return Decision.ask("May I?")

    agent = AgentDefinition("a", model="test/m", tools=[add], hooks=Hooks(pre_tool=ask))
    model = ScriptedModel([tool_call("add", {"a": 1, "b": 2}), text("done")])
    handle = Engine(models=model).start(agent, "go")
    async for event in handle.events():
        if event.type == "permission_requested":
            handle.send_input("no")
            await asyncio.sleep(0)

            assert not handle.done
            assert 1 == len(model.calls)

            if ending == "answer":
                handle.answer(event.question.id, True)
            else:
                handle.interrupt()
    result = await handle.result()

    if ending == "answer":
        assert [(3, False)] == [(c.result.data, c.is_error) for c in result.tool_calls]
        assert "no" in [m.text for m in model.calls[1].messages]
    else:
        assert RunStatus.CANCELLED is result.status
        assert all(c.is_error for c in result.tool_calls)
        assert 1 == len(model.calls)
