"""A hand-off: the conversation goes on with another agent, by its own prompt, tools and model, and so do later messages."""

from __future__ import annotations

import attrs
import pytest

from stepengine import STEP_ALL, AgentDefinition, Ask, Engine, Hooks, Limits, Perform, RunStatus, ToolCall, tool
from stepengine.events import TextCompleted
from stepengine.journal import MemoryJournal
from stepengine.sessions import MemorySessions
from stepengine.testing import ScriptedModel, simulate, text, tool_call, tool_calls, with_thinking


@tool
def refund(order: str) -> str:
    """Refund an order."""
    return f"refunded {order}"


def agents(*, back=False, **options):
    billing = AgentDefinition(
        "billing",
        model="billing/m",
        description="Writes bills.",
        system_prompt="You write bills.",
        tools=[refund, *(["hand_off"] if back else [])],
        spawnable_agents=["desk"] if back else [],
        **options,
    )
    desk = AgentDefinition(
        "desk", model="desk/m", system_prompt="You greet.", tools=["hand_off"], spawnable_agents=[billing]
    )
    return desk, billing


def engine_of(desk, front, back, **options):
    models = {"desk": ScriptedModel([*front]), "billing": ScriptedModel([*back])}
    return Engine([desk], models=models, **options), models


HANDS = tool_call("hand_off", {"agent": "billing"})


def words(state):
    return [(m.role, m.text) for m in state.message_history if m.text and not m.text.startswith("<system")]


@pytest.mark.spec("generator-contract:L41")
async def test_hand_off_uses_the_other_agents_prompt_tools_and_model():
    desk, _ = agents()
    replies = [tool_call("refund", {"order": "7"}), text("Order 7 is refunded.")]
    engine, models = engine_of(desk, [HANDS], replies)
    journal = MemoryJournal()
    result = await engine.run(desk, "Refund order 7.", journal=journal)

    assert (RunStatus.COMPLETED, "Order 7 is refunded.") == (result.status, result.output)
    assert result.text == "Order 7 is refunded."
    first, _ = models["billing"].calls
    assert ("You write bills.", ["refund"]) == (first.system_prompt, [one.name for one in first.tools])
    assert ["Refund order 7.", "The conversation goes on with agent billing."] == [
        m.text for m in first.messages if m.text
    ]
    assert 1 == len(models["desk"].calls)
    assert [
        ("user", "Refund order 7."),
        ("tool", "The conversation goes on with agent billing."),
        ("tool", "refunded 7"),
        ("assistant", "Order 7 is refunded."),
    ] == words(result.state)
    assert "billing" == result.state.handed_to
    assert 3 == result.usage.requests
    replayed = await engine.replay(journal)
    assert (result.output, result.state) == (replayed.output, replayed.state)


@tool
def look_up(order: str) -> str:
    """Look up an order."""
    return f"order {order}"


def ask_first(ctx):
    yield from Ask("Continue?", key="sure")
    yield STEP_ALL


@pytest.mark.spec("requirements:D10", "generator-contract:L41")
@pytest.mark.parametrize("way", ["run", "replay", "resume"])
async def test_result_lists_calls_and_children_of_all_agents(way):
    clerk = AgentDefinition("clerk", model="clerk/m")
    last = AgentDefinition("last", model="last/m", tools=[look_up], handle_steps=ask_first if way == "resume" else None)
    billing = AgentDefinition(
        "billing", model="billing/m", tools=[look_up, "hand_off", "spawn_agents"], spawnable_agents=[last, clerk]
    )
    desk = AgentDefinition("desk", model="desk/m", tools=[look_up, "hand_off"], spawnable_agents=[billing])
    models = {
        "desk": ScriptedModel([tool_call("look_up", {"order": "1"}), HANDS]),
        "billing": ScriptedModel([tool_call("clerk", {"prompt": "2"}), tool_call("hand_off", {"agent": "last"})]),
        "clerk": ScriptedModel(["Hm."]),
        "last": ScriptedModel([with_thinking("Which?", tool_call("look_up", {"order": "3"})), text("Done.")]),
    }
    journal = MemoryJournal()
    async with Engine([desk], models=models) as engine:
        result = await engine.run(desk, "Order 1.", journal=journal)
        if way == "resume":
            assert ["look_up", "hand_off", "clerk", "hand_off"] == [call.tool_name for call in result.tool_calls]
            result = await engine.resume(journal, answers={result.pending_questions[0].id: "yes"})
        if way == "replay":
            replayed = await engine.replay(journal)
            assert replayed == result
            result = replayed

    assert [("look_up", ""), ("hand_off", ""), ("clerk", "3"), ("hand_off", "3")] == [
        (call.tool_name, call.path) for call in result.tool_calls[:-1]
    ]
    last_call = result.tool_calls[-1]
    assert ("look_up", {"order": "3"}) == (last_call.tool_name, last_call.input)
    assert last_call.path.startswith("3.")
    assert [("billing", "Done."), ("clerk", "Hm."), ("last", "Done.")] == [
        (child.agent_id, child.output) for child in result.children
    ]
    assert ("end_turn", ("Which?",), 7) == (result.stop_reason, result.thinking, result.usage.requests)


@pytest.mark.spec("generator-contract:L41")
async def test_next_message_after_hand_off_goes_to_the_other_agent():
    desk, _ = agents()
    engine, models = engine_of(desk, [HANDS], [text("What for?"), text("Here it is."), text("Bye.")])
    state = (await engine.run(desk, "A bill, please.")).state
    journal = MemoryJournal()
    result = await engine.run(desk, "For tea.", previous=state, journal=journal)
    last = await engine.run(desk, "Thanks.", previous=result.state)

    assert ("Here it is.", "Bye.") == (result.output, last.output)
    assert ("billing", "billing") == (result.state.agent_id, last.state.handed_to)
    assert (1, 3) == (len(models["desk"].calls), len(models["billing"].calls))
    assert "You write bills." == models["billing"].calls[1].system_prompt
    assert (await engine.replay(journal)).state == result.state


@pytest.mark.spec("generator-contract:L41")
async def test_state_without_handed_to_returns_to_first_agent():
    desk, _ = agents()
    engine, _ = engine_of(desk, [HANDS, text("Welcome back.")], [text("Which order?")])
    first = await engine.run(desk, "My money, please.")
    second = await engine.run(desk, "Hello?", previous=attrs.evolve(first.state, handed_to=None))
    assert ("Welcome back.", None) == (second.output, second.state.handed_to)


@pytest.mark.spec("generator-contract:L41")
async def test_session_stays_with_the_other_agent_until_it_hands_back():
    desk, _ = agents(back=True)
    back = tool_call("hand_off", {"agent": "desk"})
    front = [HANDS, text("Anything else?"), text("Bye.")]
    engine, models = engine_of(desk, front, [text("What for?"), back], sessions=MemorySessions())
    said = [(await engine.run(desk, word, session_id="s")).output for word in ("A bill.", "No.", "Thanks.")]

    assert ["What for?", "Anything else?", "Bye."] == said
    assert (3, 2) == (len(models["desk"].calls), len(models["billing"].calls))
    assert "You greet." == models["desk"].calls[1].system_prompt


@pytest.mark.spec("generator-contract:L41")
async def test_observers_see_the_message_that_the_other_agent_answers():
    desk, _ = agents()
    engine, _ = engine_of(desk, [HANDS], [text("What for?"), text("Here it is.")], sessions=MemorySessions())
    await engine.run(desk, "A bill.", session_id="s")
    handle = engine.start(desk, "For tea.", session_id="s")
    before = handle.run_id
    events = [event async for event in handle.events()]
    result = await handle.result()

    assert (before, "Here it is.") == (result.state.run_id, result.output)
    assert {before} == {event.run_id for event in events}
    assert ["Here it is."] == [event.text for event in events if isinstance(event, TextCompleted)]


@pytest.mark.spec("generator-contract:L41", "reliability:GN36")
async def test_on_stop_is_not_called_by_a_hand_off():
    desk, _ = agents()
    desk = attrs.evolve(desk, hooks=Hooks(on_stop=[lambda ctx: "Go on."]))
    engine, models = engine_of(desk, [HANDS], ["Order 7 is refunded."])

    assert "Order 7 is refunded." == (await engine.run(desk, "Refund order 7.")).output
    assert 1 == len(models["desk"].calls)


@pytest.mark.spec("generator-contract:L41")
async def test_handler_of_an_agent_that_handed_off_ends_first():
    log = []

    def handle_steps(ctx):
        turn = yield STEP_ALL
        log.append(turn.steps_complete)

    _, billing = agents()
    desk = AgentDefinition(
        "desk", model="desk/m", tools=["hand_off"], spawnable_agents=[billing], handle_steps=handle_steps
    )
    engine, _ = engine_of(desk, [tool_calls(HANDS, tool_call("hand_off", {"agent": "desk"}))], [text("Well?")])
    result = await engine.run(desk, "A bill.")

    assert ("Well?", [True]) == (result.output, log)
    assert ["ok", "skipped"] == [call.result.status for call in result.tool_calls]


@pytest.mark.spec("generator-contract:L41")
@pytest.mark.parametrize("agent", ["nobody", "desk"])
async def test_hand_off_to_a_forbidden_agent_is_an_error_result(agent):
    desk, _ = agents()
    engine, _ = engine_of(desk, [tool_call("hand_off", {"agent": agent}), text("I help.")], [])
    result = await engine.run(desk, "A bill.")

    assert ("I help.", None) == (result.output, result.state.handed_to)
    assert "error" == result.tool_calls[0].result.status


@pytest.mark.spec("generator-contract:L41")
async def test_the_run_ends_as_the_other_agent_does():
    desk, _ = agents(limits=Limits(max_steps=1, on_max_steps="stop"))
    engine, _ = engine_of(desk, [HANDS], [tool_call("refund", {"order": "7"})])
    result = await engine.run(desk, "Refund order 7.")
    assert (RunStatus.MAX_STEPS, "billing") == (result.status, result.state.handed_to)
    assert ("tool", "refunded 7") == words(result.state)[-1]

    desk, _ = agents(hooks=Hooks(pre_run=lambda ctx: 1 / 0))
    engine, _ = engine_of(desk, [HANDS], [])
    result = await engine.run(desk, "Refund order 7.")
    assert (RunStatus.FAILED, True) == (result.status, "ZeroDivisionError" in str(result.error))


@pytest.mark.spec("generator-contract:L41")
@pytest.mark.parametrize("seeds", [range(20), pytest.param(None, marks=pytest.mark.deep)], ids=["some", "all"])
def test_a_run_with_a_hand_off_survives_every_crash(seeds):
    def handle_steps(ctx):
        return (yield from Perform(work, "7"))

    def work(order):
        return order

    desk, billing = agents(handle_steps=handle_steps)
    seen = simulate(desk, seeds, replies=[HANDS], results={"work": lambda order: f"did {order}"}, agents=[billing])
    assert seen.runs > 10 if seeds is None else seen.runs == len(seeds)


@pytest.mark.spec("generator-contract:L41")
@pytest.mark.parametrize("returned", [None, "", "Mine.", {"mine": 1}])
async def test_handler_return_value_after_hand_off_is_dropped_with_warning(returned):
    seen = []

    def handle_steps(ctx):
        turn = yield STEP_ALL
        seen.append((turn.text, turn.agent_state.handed_to))
        return returned

    _, billing = agents()
    desk = AgentDefinition(
        "desk", model="desk/m", tools=["hand_off"], spawnable_agents=[billing], handle_steps=handle_steps
    )
    engine, _ = engine_of(desk, [HANDS], [text("Well?")])
    result = await engine.run(desk, "A bill.")

    assert ("Well?", [("", "billing")]) == (result.output, seen)
    said = "agent 'desk' handed the conversation over to 'billing', whose output is the output of the run; "
    assert [said] * bool(returned) == [warning[: len(said)] for warning in result.warnings]


@pytest.mark.spec("generator-contract:L41", "reliability:SP01")
async def test_a_hand_off_too_many_is_reported_as_one():
    other = {"ping": "pong", "pong": "ping"}
    ping, pong = [
        AgentDefinition(one, model=f"{one}/m", tools=["hand_off"], spawnable_agents=[other[one]]) for one in other
    ]
    models = {one: ScriptedModel([tool_call("hand_off", {"agent": other[one]})] * 4) for one in other}
    engine = Engine([ping, pong], models=models)
    result = await engine.run(ping, "Go.")

    assert (RunStatus.FAILED, "depth", 6) == (result.status, result.error.kind, result.usage.requests)
    assert str(result.error) == (
        "the conversation cannot be handed over to agent 'ping': each hand-off of a run counts as a level of children, and "
        "max_depth is 5; raise Limits(max_depth=...) to allow more hand-offs"
    )


@pytest.mark.spec("generator-contract:L41")
@pytest.mark.parametrize("way", ["previous", "session"])
async def test_agent_without_a_model_keeps_the_model_of_its_predecessor(way):
    clerk = AgentDefinition("clerk")
    billing = AgentDefinition("billing", model="billing/m", tools=["hand_off"], spawnable_agents=[clerk])
    desk = AgentDefinition("desk", model="desk/m", tools=["hand_off"], spawnable_agents=[billing])
    to_clerk = tool_call("hand_off", {"agent": "clerk"})
    options = {"sessions": MemorySessions()} if way == "session" else {}
    engine, models = engine_of(desk, [HANDS], [to_clerk, text("What for?"), text("Here it is.")], **options)
    more = {"session_id": "s"} if way == "session" else {}
    first = await engine.run(desk, "A bill.", **more)
    journal = MemoryJournal()
    more |= {"previous": first.state} if way == "previous" else {}
    second = await engine.run(desk, "For tea.", journal=journal, **more)

    assert [("What for?", "clerk"), ("Here it is.", "clerk")] == [
        (one.output, one.state.handed_to) for one in (first, second)
    ]
    assert (1, 3) == (len(models["desk"].calls), len(models["billing"].calls))
    assert second.output == (await engine.replay(journal)).output


@pytest.mark.spec("generator-contract:L41")
async def test_hand_off_without_any_model_names_the_agent_lacking_one():
    def handle_steps(ctx):
        yield ToolCall("hand_off", {"agent": "clerk"}, include_tool_call=False)

    desk = AgentDefinition("desk", spawnable_agents=[AgentDefinition("clerk")], handle_steps=handle_steps)
    result = await Engine([desk], models={"a": ScriptedModel([]), "b": ScriptedModel([])}).run(desk, "A bill.")

    assert (RunStatus.FAILED, "no_model") == (result.status, result.error.kind)
    assert "agent 'clerk' has no model" in str(result.error)
