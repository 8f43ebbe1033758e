"""When a handler runs, what it may yield, what it is sent."""

from __future__ import annotations

import json
from datetime import timedelta

import attrs
import pytest

from stepengine.data import yields as y
from stepengine.data.codec import to_json
from stepengine.data.definition import AgentDefinition
from stepengine.data.effects import AskPerson, CallFunction, Spawn
from stepengine.data.events import LogLine, Notification, RunStarted
from stepengine.data.messages import UserMessage
from stepengine.data.models import ModelSettings
from stepengine.data.outcomes import Value
from stepengine.data.state import AgentState, RunStatus
from stepengine.data.transcript import Transcript
from stepengine.errors import (
    AgentError,
    ChildError,
    LimitExceeded,
    ModelError,
    PerformError,
    ToolNotAvailable,
    UnknownModel,
)
from stepengine.machine.handler import default_handler
from tests.machine.world import (
    ADD,
    CREATED,
    STEP,
    STEP_ALL,
    World,
    adding,
    agent,
    binding,
    call,
    child,
    limits,
    play,
    play_adding,
    reply,
)
from tests.phrases import UNAVAILABLE


@pytest.mark.spec("generator-contract:G17", "generator-contract:G50")
def test_step_all_parks_the_handler_until_the_turn_ends():
    log = []

    def handler(ctx):
        for _ in range(2):
            result = yield STEP_ALL
            log.append((result.steps_complete, result.agent_state.step_index))
        result = yield STEP
        log.append((result.steps_complete, result.agent_state.step_index))

    replies = [reply(call("add")), reply("one"), reply("two"), reply(call("add"))]
    played = play_adding(handler, replies)
    assert log == [(True, 2), (True, 3), (False, 4)]
    assert played.output == "one\n\ntwo"
    assert played.state.steps_remaining == 46


@pytest.mark.spec("generator-contract:G22", "generator-contract:G16")
def test_steps_complete_reflects_the_last_step_only():
    log = []

    def handler(ctx):
        for asked in [y.ToolCall("add"), STEP, y.ToolCall("add"), STEP, y.ToolCall("add"), y.Perform(lambda: 1)]:
            result = yield asked
            log.append((result.steps_complete, len(result.tool_results), result.tool_result is not None))

    replies = [reply(call("add")), reply("done")]
    play_adding(handler, replies)
    called, stepped = (1, True), (0, False)
    assert log == [
        (False, *called),
        (False, *stepped),
        (False, *called),
        (True, *stepped),
        (True, *called),
        (True, *stepped),
    ]


@pytest.mark.spec("generator-contract:G23", "generator-contract:G22", "requirements:B1", "generator-contract:G2")
def test_yielded_states_are_current_and_never_change():
    kept, copies = [], []

    def handler(ctx):
        kept.append(ctx.agent_state)
        copies.append(json.dumps(to_json(ctx.agent_state)))
        asked = [y.ToolCall("add", {"a": 1}), y.ToolCall("set_output", {"x": 1}), STEP, y.AgentCall("helper")]
        for value in asked:
            result = yield value
            kept.append(result.agent_state)
            copies.append(json.dumps(to_json(result.agent_state)))
        assert ctx.agent_state is kept[0]

    world = World(replies=[reply("hi")], tools={"add": adding}, children={"helper": child()})
    played = play(agent(handler, tools=["add"]), world, tools=[ADD])
    assert [json.dumps(to_json(s)) for s in kept] == copies  # a deep copy would share the history
    assert [len(s.message_history) for s in kept] == [1, 3, 3, 4, 4]
    assert [s.output for s in kept] == [None, None, {"x": 1}, {"x": 1}, {"x": 1}]
    assert kept[-1].child_run_ids == ("r1-0",)
    assert kept[-1].steps_remaining == 49
    assert kept[-1].tool_definitions == {"add": ADD.spec}
    assert played.state.usage.total_tokens == 11


@pytest.mark.spec("generator-contract:G2", "generator-contract:G5", "generator-contract:L31")
def test_context_provides_prompt_params_state_time_and_seeded_random():
    seen = {}

    def handler(ctx):
        seen["first"] = (ctx.prompt, dict(ctx.params), ctx.model, ctx.now(), ctx.agent_state.system_prompt)
        seen["history"] = [(m.text, m.tags) for m in ctx.agent_state.message_history]
        seen["random"] = ctx.random.random()
        yield y.Perform(lambda: 1)
        seen["later"] = ctx.now()
        yield y.Parallel(y.Perform(int), y.Perform(int))
        seen["after both"] = ctx.now()

    definition = agent(handler, system_prompt="be good", instructions_prompt="look first", step_prompt="short")
    start = AgentState(run_id="r1", agent_id="tester", system_prompt="be good")
    world = World(at={0: Value(1, 1500), 1: Value(1, 3000), 2: Value(2, 2000)})
    played = play(definition, world, state=start, prompt="go", params={"depth": 2}, json={"depth": 2})
    assert seen["first"] == ("go", {"depth": 2}, "test/model", CREATED, "be good")
    assert seen["history"] == [('go\n\n{\n  "depth": 2\n}', ("USER_PROMPT",)), ("look first", ("INSTRUCTIONS_PROMPT",))]
    assert seen["later"] == CREATED + timedelta(milliseconds=1500)
    assert seen["after both"] == CREATED + timedelta(milliseconds=3000)
    assert seen["random"] == 0.13436424411240122
    assert played.seen(RunStarted) == [RunStarted(own_id="r1", agent_id="tester", prompt="go", params={"depth": 2})]


@pytest.mark.spec("generator-contract:L31", "requirements:A8")
def test_prompts_are_sent_at_their_positions():
    def handler(ctx):
        yield STEP
        yield y.ToolCall("set_messages", {"messages": []}, include_tool_call=False)
        yield STEP

    definition = agent(handler, system_prompt="X", instructions_prompt="do", step_prompt="briefly")
    start = AgentState(run_id="r1", agent_id="tester", system_prompt="X")
    played = play(definition, World(replies=[reply("a"), reply("b")]), state=start)
    assert [r.system_prompt for r in played.requests] == ["X", "X"]
    assert [[m.text for m in r.messages] for r in played.requests] == [["go", "do"], []]
    assert [[m.tags for m in r.tail] for r in played.requests] == [[("STEP_PROMPT",)]] * 2
    assert played.shown == ["assistant: b"]


@pytest.mark.spec("generator-contract:G4", "generator-contract:G1")
def test_notifications_and_logs_precede_the_next_effect():
    def handler(ctx):
        ctx.notify("half", {"percent": 50})
        ctx.notify("odd", object())
        for level in ("debug", "info", "warning", "error"):
            getattr(ctx.logger, level)(level, n=1)
        ctx.logger.info("plain")
        yield y.Perform(lambda: 1)
        ctx.logger.info("last")

    played = play(agent(handler))
    assert played.tokens == [
        "RunStarted",
        *["Notification"] * 2,
        *["LogLine"] * 5,
        "CallFunction",
        "LogLine",
        "PhaseChanged:done",
    ]
    assert [(e.message, e.data) for e in played.seen(Notification)] == [
        ("half", {"percent": 50}),
        ("odd", "<object that is not JSON>"),
    ]
    assert [(e.level, e.message, e.data) for e in played.seen(LogLine)][3:5] == [
        ("error", "error", {"n": 1}),
        ("info", "plain", None),
    ]
    assert played.shown == ["user: go"]


@pytest.mark.spec("generator-contract:G16")
def test_step_overrides_apply_to_one_step():
    def handler(ctx):
        over = y.StepWith(
            model="test/other", tools=["add"], tool_choice="required", settings=ModelSettings(max_tokens=5)
        )
        yield over
        yield y.StepWith(tools=[])
        yield STEP

    definition = agent(handler, tools=["add", "look"], settings=ModelSettings(temperature=0.5, tool_choice="auto"))
    played = play(definition, World(replies=[reply("a")] * 3), tools=[ADD, binding("look")])
    shown = [(r.model, [t.name for t in r.tools], r.tool_choice, r.settings.max_tokens) for r in played.requests]
    assert shown == [
        ("test/other", ["add"], "required", 5),
        ("test/model", [], None, None),
        ("test/model", ["add", "look"], "auto", None),
    ]
    assert [r.settings.temperature for r in played.requests] == [0.5] * 3


def test_step_with_unavailable_tools_is_rejected_at_the_yield():
    def handler(ctx):
        with pytest.raises(ToolNotAvailable, match=rf"'nope' {UNAVAILABLE} 'tester'\. Available tools: add"):
            yield y.StepWith(tools=["nope"])

    assert play(agent(handler, tools=["add"]), tools=[ADD]).status is RunStatus.COMPLETED


@pytest.mark.spec("generator-contract:G21", "requirements:J13", "generator-contract:L8")
def test_child_call_returns_its_result_and_counts_spending():
    def handler(ctx):
        result = yield y.AgentCall("helper", "look", {"depth": 1})
        assert result.value.output == "done"
        return (yield from y.AgentCall(other, "again"))

    other = AgentDefinition("other", model="m/m")
    world = World(children={"helper": child(), "other": child("fine", agent_id="other", run_id="r1-1")})
    played = play(agent(handler), world)
    first, second = played.leaves
    assert (first.agent_id, first.prompt, first.params, first.definition) == ("helper", "look", {"depth": 1}, None)
    assert (type(second), second.definition, second.parent().run_id) == (Spawn, other, "r1")
    assert played.output == "fine"
    assert [c.agent_id for c in played.children] == ["helper", "other"]
    assert played.state.child_run_ids == ("r1-0", "r1-1")


def test_refused_spawn_is_a_failed_child():
    error = LimitExceeded("too deep", kind="depth", limit=5)

    def handler(ctx):
        result = yield y.AgentCall("helper")
        assert result.value.error == error
        with pytest.raises(ChildError, match="too deep"):
            yield from y.AgentCall("helper")
        yield STEP

    played = play(agent(handler), World(replies=[reply("ok")], children={"helper": error}))
    assert (played.status, played.output) == (RunStatus.COMPLETED, "ok")


def test_perform_ask_and_complete_return_values_without_history():
    def handler(ctx):
        value = yield from y.Perform(dict, a=(1, 2))
        with pytest.raises(PerformError, match="raised ZeroDivisionError"):
            yield from y.Perform(lambda: 1 / 0)
        answer = yield from y.Ask("Which?", ["a", "b"], multi_select=True, details={"why": 1})
        settings = ModelSettings(temperature=0.0)
        said = yield from y.Complete("shorten", model="test/small", system_prompt="be short", settings=settings)
        bare = yield y.Complete([UserMessage("x")])
        return [value, answer, said.text, bare.value.text]

    world = World(replies=[reply("short"), reply("y")], answers={"q2": "b"})
    played = play(agent(handler, settings=ModelSettings(max_tokens=7)), world)
    assert played.output == [{"a": [1, 2]}, "b", "short", "y"]
    assert played.shown == ["user: go"]
    assert [type(e) for e in played.leaves[:3]] == [CallFunction, CallFunction, AskPerson]
    question = played.leaves[2].questions[0]
    assert (question.id, question.options, question.multi_select, question.details) == (
        "q2",
        ("a", "b"),
        True,
        {"why": 1},
    )
    first, second = played.requests
    assert (first.model, first.system_prompt, first.settings.temperature) == ("test/small", "be short", 0.0)
    assert (second.model, second.system_prompt, second.settings.max_tokens) == ("test/model", "", 7)
    assert [m.text for m in first.messages] == ["shorten"]


@pytest.mark.spec("generator-contract:G36", "generator-contract:G33", "reliability:GN03")
@pytest.mark.parametrize("asked", [STEP, STEP_ALL, y.StepWith(), y.GenerateN(2), y.Complete("x")], ids=str)
def test_model_error_is_raised_at_the_yield(asked):
    error = ModelError("down", retryable=True)

    def handler(ctx):
        with pytest.raises(ModelError) as caught:
            yield asked
        assert caught.value is error
        return "survived"

    assert play(agent(handler), World(replies=lambda _: error)).output == "survived"

    def careless(ctx):
        yield asked

    played = play(agent(careless), World(replies=lambda _: error))
    assert (played.status, played.error, played.output) == (RunStatus.FAILED, error, None)
    assert played.shown == ["user: go"]


def test_step_without_a_model_is_raised_at_the_yield():
    def handler(ctx):
        with pytest.raises(UnknownModel, match="'tester' has no model"):
            yield STEP
        yield y.StepWith(model="test/given")

    played = play(agent(handler, model=None), World(replies=[reply("ok")]))
    assert (played.output, played.requests[0].model) == ("ok", "test/given")


def test_step_result_shows_its_state_even_when_read_later():
    def steps(look):
        def handler(ctx):
            turns = []
            for _ in range(3):
                turns.append((yield STEP))
                if look:
                    assert turns[-1].agent_state is turns[-1].agent_state
                yield y.ToolCall("add_message", {"role": "user", "content": "more"})
            states.append([turn.agent_state for turn in turns])

        return handler

    states = []
    for look in (True, False):
        play(agent(steps(look)), World(replies=[reply(word) for word in ("one", "two", "three")]))
    at_once, late = states
    assert at_once == late
    assert [2, 4, 6] == [len(state.message_history) for state in late]
    assert [1, 2, 3] == [state.step_index for state in late]


def test_state_keeps_every_field_the_run_started_with():
    start = AgentState(
        run_id="r9",
        agent_id="tester",
        parent_id="r8",
        ancestor_run_ids=("r7", "r8"),
        message_history=Transcript([UserMessage("before")]),
        system_prompt="Be brief.",
        step_index=4,
        context={"a": 1},
        next_call=7,
        id_prefix="c3_",
        left_out=(UserMessage("long ago"),),
        handed_to="other",
    )
    own = {"child_run_ids", "tool_definitions", "output", "steps_remaining", "usage", "cost", "credits_used", "pending"}
    names = [field.name for field in attrs.fields(AgentState)]
    assert own == {name for name in names if getattr(start, name) == getattr(AgentState(), name)}, (
        "give it to the start"
    )

    def handler(ctx):
        return (yield y.ToolCall("add_message", {"role": "user", "content": "more"})).agent_state

    (state,) = [play(agent(handler), World(), state=start).output]
    changed = {name for name in names if getattr(state, name) != getattr(start, name)}
    assert {"message_history", "view", "next_call"} == changed - own


@pytest.mark.spec("generator-contract:G23")
def test_state_reports_the_size_of_the_next_request():
    def handler(ctx):
        before = ctx.agent_state.context_tokens
        after = (yield STEP).agent_state.context_tokens
        pruned = (yield y.ToolCall("set_messages", {"messages": []})).agent_state.context_tokens
        return [before, after, pruned]

    start = AgentState(run_id="r1", agent_id="tester", system_prompt="x" * 400)
    before, after, pruned = play(agent(handler), World(replies=[reply("y" * 4000)]), state=start).output
    assert after == before + 1008
    assert pruned == 100 < before


@pytest.mark.spec("performance:Q2")
def test_unwatched_run_gives_same_result_without_step_events():
    def world(*, watched=True):
        return World(watched=watched, replies=[reply("adding", call("add", a=1)), reply("done")], tools={"add": adding})

    watched = play(agent(None, tools=["add"]), world(), tools=[ADD])
    unwatched = play(agent(None, tools=["add"]), world(watched=False), tools=[ADD])
    assert unwatched.finished == watched.finished
    assert unwatched.leaves == watched.leaves
    assert {type(e).__name__ for e in watched.events} >= {
        "StepStarted",
        "StepFinished",
        "PhaseChanged",
        "TextCompleted",
    }
    assert [type(e).__name__ for e in unwatched.events] == ["RunStarted"]


@pytest.mark.spec("reliability:GN14")
@pytest.mark.parametrize(
    "speak", [lambda ctx: ctx.notify("x"), lambda ctx: ctx.logger.info("x")], ids=["notify", "logger"]
)
def test_notify_from_another_thread_is_rejected(speak):
    def handler(ctx):
        speak(ctx)
        yield STEP

    played = play(agent(handler), World(), is_own_thread=lambda: False)
    assert (played.status, type(played.error)) == (RunStatus.FAILED, AgentError)
    assert "from another thread" in str(played.error)
    assert not [e for e in played.events if isinstance(e, Notification | LogLine)]


@pytest.mark.spec("generator-contract:G12", "generator-contract:G1", "requirements:H16")
@pytest.mark.parametrize("watched", [True, False])
@pytest.mark.parametrize(
    ("last", "bounds"),
    [
        (reply("done"), {}),
        (ModelError("down"), {}),
        (ModelError("down"), {"max_actions": 0}),
        (reply("done"), {"max_steps": 1}),
        (reply("done"), {"max_steps": 1, "on_max_steps": "raise"}),
        (LimitExceeded("spent", kind="tokens", limit=1), {}),
    ],
)
def test_missing_handler_equals_default_handler_in_every_ending(last, bounds, watched):
    def found(handler):
        world = World(replies=[reply(call("add", {"a": 1})), last], tools={"add": adding}, watched=watched)
        definition = agent(handler, tools=["add"], limits=limits(**bounds))
        played = play(definition, world, tools=[ADD])
        error = played.finished.error
        notes = getattr(error, "__notes__", None)
        told = (type(error), str(error), notes, error is not None and error.__cause__)
        return told, played.status, played.shown, played.tokens, to_json(played.finished.state), played.warnings

    assert found(None) == found(default_handler)


@pytest.mark.parametrize("prompt", ["", " ", "\n\t "])
@pytest.mark.spec("generator-contract:G5")
def test_blank_prompt_adds_no_message(prompt):
    asked = play(agent(instructions_prompt="Rules."), World(replies=[reply("x")]), prompt=prompt)
    assert asked.shown == ["user: Rules.", "assistant: x"]


@pytest.mark.parametrize("prompt", ["", " ", "\n\t "])
def test_blank_prompt_keeps_inherited_messages(prompt):
    def handler(ctx):
        return [[m.text for m in ctx.inherited_messages], len(ctx.prompt_messages)]
        yield

    before = AgentState.from_messages([UserMessage("earlier", ("USER_PROMPT",))])
    played = play(agent(handler, output_mode="structured_output"), state=before, prompt=prompt)
    assert played.output == [["earlier"], 0]


def test_params_without_prompt_are_one_message():
    with_params = play(agent(), World(replies=[reply("x")]), prompt="\n", json={"k": 1})
    assert with_params.shown[0] == 'user: {\n  "k": 1\n}'
