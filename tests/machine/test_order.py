"""The order of a run: the table, the page made from it, and one step with everything in it."""

from __future__ import annotations

import importlib.util
from functools import partial
from pathlib import Path

import attrs
import pytest

from stepengine.data import yields as y
from stepengine.data.events import PhaseChanged
from stepengine.data.hooks import Change
from stepengine.data.messages import ToolResult, UserMessage
from stepengine.data.outcomes import Stop
from stepengine.data.questions import Decision
from stepengine.data.tools import Driving, Ordinary
from stepengine.errors import ModelError
from stepengine.machine.calls import MEMBERS, OF_STEPS
from stepengine.machine.plan import ToolBody
from stepengine.machine.protocol import ANYWHERE, FIRST, ORDER, compute_next_states
from tests.machine.test_stops import COUNT, Rich
from tests.machine.world import (
    ADD,
    EXAMPLES,
    OF_CHILDREN,
    REF,
    STEP,
    World,
    adding,
    agent,
    binding,
    call,
    child,
    hooks,
    limits,
    play,
    reply,
    thought,
)
from tests.phrases import UNAVAILABLE

DOCS = Path(__file__).parents[2] / "docs"


def busy(*args):
    """Yield all that a hook may and that is about no child."""
    yield y.Wait()
    for row in y.YIELDS:
        if row.for_hooks and row.name not in OF_CHILDREN:
            yield EXAMPLES[row.name]


def busy_with_children(*args):
    yield y.Send(REF, "hurry")
    yield y.Cancel(REF)
    yield from busy()


def failing(*args):
    raise ValueError


def nothing_but_handlers(ctx):
    yield y.ToolCall("add")
    yield STEP


def one_step(ctx):
    yield STEP


def failing_hook(point):
    """Return the rows of a run in which a hook of *point* is busy and another fails."""
    world = World(
        replies=lambda k: reply(call("add")) if k == 1 else reply("x"),
        tools={"add": adding},
        children={"helper": child()},
    )

    def handler(ctx):
        yield y.Start(y.AgentCall("helper"))
        yield y.ToolCall("add")
        yield STEP

    points = hooks(**{point: [busy if point == "pre_run" else busy_with_children, failing]})
    return play(agent(handler, tools=["add"], hooks=points), world, tools=[ADD]).rows


def last_words(*replies):
    """Return the rows of a run that is out of steps, with *replies* as its last words."""
    world = World(replies=[reply("x"), *replies])

    def handler(ctx):
        yield STEP
        yield STEP

    return play(agent(handler, limits=limits(max_steps=1)), world).rows


def rows_of_bodies():
    """Return the rows of runs that are the bodies of tools."""
    given = {
        "tools": {"add": adding},
        "children": {"helper": child()},
        "answers": {f"q{n}": "yes" for n in range(40)},
    }

    def body(ctx):
        yield y.Start(y.AgentCall("helper"))
        yield from busy_with_children()
        yield y.ToolCall("write_todos", {"todos": []})
        yield y.ToolCall("add")
        yield y.AgentCall("helper")
        yield y.Parallel(y.ToolCall("add"), y.ToolCall("add"))
        try:
            yield y.ToolCall("spawn_agents", {"agents": [{"agent_type": "helper"}]})
            yield y.ToolCall("ask_user", {"questions": [{"question": "So?"}]})
            yield y.Ask("So?")
        finally:
            yield STEP

    def later(ctx):
        yield y.ToolCall("add")

    def follow(asked, given):
        yield y.Perform(int)
        yield y.Complete("x")
        return ToolResult.text("done")

    def careless(ctx):
        while True:
            try:
                yield y.ToolCall("add")
            except GeneratorExit:
                yield y.ToolCall("add")
                return
            except BaseException:
                continue

    def driven(ctx):
        yield y.ToolCall("drive")

    asking = hooks(pre_tool=[lambda ctx, asked: Decision.ask() if asked.tool_name == "add" else None])
    pending = attrs.evolve(ADD, runs=Ordinary(None, follow))
    used = set()
    for steps, points, tool in (
        (body, hooks(pre_tool=[busy], post_tool=[busy, failing]), ADD),
        (body, asking, ADD),
        (careless, hooks(), ADD),
        (later, hooks(), pending),
        (driven, hooks(), DRIVE),
    ):
        world = World(replies=lambda k: reply("x"), **given)
        if tool is pending:
            world = World(replies=lambda k: reply("x"), tools={"add": lambda **_: ToolResult.json(0, status="pending")})
        made = ToolBody(tool_name="release", tool_call_id="c1", by_model=True, steps=steps)
        used |= play(
            agent(tools=[tool.spec.name], hooks=points, limits=limits(max_actions=30)), world, tools=[tool], body=made
        ).rows
    return used


def driving(given, background):
    yield y.Start(y.AgentCall("helper"))
    (ref,) = background.refs[-1:]
    yield y.Wait(ref, timeout=5)
    yield y.Send(ref, "hurry")
    yield y.Cancel(ref)
    yield y.Sleep(1)
    yield y.Receive("news")
    for kind, name in OF_STEPS.items():
        if kind not in MEMBERS:
            yield EXAMPLES[name]
    return ToolResult.text("done")


DRIVE = attrs.evolve(binding("drive"), runs=Driving(driving))


def driven_calls():
    """Return the rows of a run in which a model and a handler call a tool whose steps are the run's own."""
    world = World(replies=lambda k: reply(call("drive")) if k == 0 else reply("x"), children={"helper": child()})

    def handler(ctx):
        yield STEP
        yield y.ToolCall("drive")

    return play(agent(handler, tools=["drive"]), world, tools=[DRIVE]).rows


def calls_that_start_children():
    """Return the rows of a run whose model starts children by two calls of one reply, with busy hooks behind them."""
    spawning = call("spawn_agents", agents=[{"agent_type": "helper"}])
    world = World(
        replies=lambda k: reply(spawning, spawning) if k == 0 else reply("x"),
        children={"helper": child()},
        tools={"add": adding},
    )

    def handler(ctx):
        yield y.Start(y.AgentCall("helper"))
        yield STEP

    points = hooks(post_tool=[busy_with_children, failing])
    return play(agent(handler, tools=["spawn_agents", "add"], hooks=points), world, tools=[ADD]).rows


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("reliability:I9", "reliability:LA1")
def test_every_row_of_the_table_is_used(monkeypatch):
    used = rows_used()
    monkeypatch.setitem(globals(), "World", partial(World, refuses=True))
    used |= rows_used("limit")
    assert {(state, token) for state, row in ORDER.items() for token in row} - used == set()


def rows_used(*stops):
    """Return the rows of many runs, one of them stopped at each effect in these ways."""
    used = driven_calls() | calls_that_start_children()
    for point in ("pre_run", "pre_step", "pre_tool", "post_tool", "post_step", "on_stop", "post_run"):
        used |= failing_hook(point)
    paused = [reply(thought("t"), stop_reason="pause"), reply()]
    for replies in ([ModelError("down")], [reply(thought("t"), "x")], [reply()], [reply("x")], paused):
        used |= last_words(*replies)
    for replies in ([reply()], paused, [ModelError("down")]):
        used |= play(agent(one_step), World(replies=replies)).rows
    for at in ({}, *[{k: Stop(kind)} for k in range(COUNT) for kind in stops]):
        used |= Rich().play(at).rows

    def careless(ctx):
        try:
            yield y.StepText("<tool_call></tool_call>")
            yield y.ToolCall("spawn_agents", {"agents": [{"agent_type": "helper"}]})
            yield y.Ask("?")
        finally:
            yield STEP

    used |= play(agent(careless), World(children={"helper": child()})).rows

    def asking_itself(ctx):
        yield y.ToolCall("ask_user", {"questions": [{"question": "So?"}]})

    used |= play(agent(asking_itself, tools=["ask_user"]), World(answers={"q0": "yes"})).rows

    def follow(asked, given):
        yield y.Perform(int)
        yield y.Complete("x")
        return ToolResult.text("done")

    later = attrs.evolve(ADD, runs=Ordinary(None, follow))
    world = World(
        replies=lambda k: reply(call("add")) if k == 1 else reply("x"),
        tools={"add": lambda **_: ToolResult.json(0, status="pending")},
    )
    used |= play(agent(nothing_but_handlers, tools=["add"]), world, tools=[later]).rows
    used |= rows_of_bodies()
    asking = hooks(pre_tool=[lambda ctx, asked: Decision.ask()])
    used |= play(agent(nothing_but_handlers, tools=["add"], hooks=asking), tools=[ADD]).rows
    stopping = hooks(post_run=[failing])
    return used | play(agent(hooks=stopping), World(at={0: Stop("cancelled")})).rows


def test_tokens_outside_the_table_are_impossible():
    assert compute_next_states([FIRST], "StepStarted") == frozenset()
    assert compute_next_states(["asking"], "CallTool:model") == frozenset()
    assert compute_next_states([FIRST], "LogLine") == {FIRST}
    assert not {token for row in ORDER.values() for token in row} & set(ANYWHERE)


def test_order_page_is_generated_from_the_table():
    spec = importlib.util.spec_from_file_location("make_step_order", DOCS / "make_step_order.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert (DOCS / "reference" / "step-order.md").read_text(encoding="utf-8") == script.page()


@pytest.mark.spec(
    "requirements:N11",
    "generator-contract:G13",
    "reliability:I9",
)
def test_full_step_has_one_fixed_order():
    """Expiry, pre_step, step prompt, model, validation, pre_tool, permission, call, post_tool, commit, post_step, end."""
    seen: list[str] = []

    def note(word):
        def hook(ctx, *args):
            seen.append(f"{word} {len(ctx.state.message_history)}/{len(ctx.state.view)}")

        return hook

    def pre_step(ctx):
        note("pre_step")(ctx)
        yield y.Perform(lambda: 1)
        return Change(tail=(UserMessage("tail"),))

    def pre_tool(ctx, asked):
        note("pre_tool")(ctx)
        return Decision.ask("May it?") if asked.tool_name == "add" else None

    def add(**value):
        seen.append(f"add {value}")
        return adding(**value)

    def handler(ctx):
        for _ in range(3):
            yield STEP

    definition = agent(
        handler,
        step_prompt="be brief",
        tools=["look", "add"],
        hooks=hooks(
            pre_step=[pre_step],
            pre_tool=[pre_tool],
            post_tool=[note("post_tool")],
            post_step=[note("post_step")],
            on_stop=[note("on_stop")],
        ),
    )
    world = World(
        replies=[
            reply(call("look")),
            reply(call("look")),
            reply(thought("hm"), "text", call("add", a=1, b=2), call("look"), call("nope")),
        ],
        tools={"add": add, "look": lambda: seen.append("look") or adding()},
        answers={"q8": "yes"},
    )
    look = binding("look", ephemeral=1)
    played = play(definition, world, tools=[look, binding("add", category="checked")])

    start = [i for i, token in enumerate(played.tokens) if token == "StepStarted"][2]
    assert played.tokens[start:] == [
        "StepStarted",
        "CallFunction",
        "PhaseChanged",
        "CallModel:step",
        "ThinkingCompleted",
        "TextCompleted",
        "PhaseChanged",
        "AskPerson:permission",
        "PermissionDecided",
        "PhaseChanged",
        "CallTool:model",
        "PhaseChanged",
        "CallTool:model",
        "ToolStarted",
        "ToolFinished",
        "StepFinished",
        "PhaseChanged:done",
    ]
    # During a step everybody sees the history as it was before the step.
    assert seen[-8:] == [
        "pre_step 5/5",
        "pre_tool 5/5",
        "add {'a': 1, 'b': 2, 'checked': True}",
        "post_tool 5/5",
        "pre_tool 5/5",
        "look",
        "post_tool 5/5",
        "post_step 9/9",
    ]
    request = played.requests[-1]
    assert [m.text for m in request.tail] == ["tail", "<system-reminder>\nbe brief\n</system-reminder>"]
    assert [m.text for m in request.messages][2].startswith("[This result is no longer shown")
    phases = [(e.phase.value, e.detail) for e in played.seen(PhaseChanged)]
    assert phases[-5:] == [
        ("calling_model", ""),
        ("awaiting_permission", "add"),
        ("executing_tool", "add"),
        ("executing_tool", "look"),
        ("done", ""),
    ]
    assert played.shown[-4:] == [
        "assistant: text[add c3][look c4][nope c5]",
        "tool c3 ok: 3",
        "tool c4 ok: 0",
        f"tool c5 error: Tool 'nope' {UNAVAILABLE} 'tester'. Available tools: look, add.",
    ]
