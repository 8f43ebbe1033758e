"""Random handlers in random worlds: the machine never raises and always ends well (reliability I1-I12)."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import attrs
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from stepengine.data import yields as y
from stepengine.data.hooks import Change, Hooks
from stepengine.data.messages import AssistantMessage, RefusalPart, ToolCallPart, ToolResult, UserMessage
from stepengine.data.outcomes import Failure, Stop, Value
from stepengine.data.questions import Decision
from stepengine.data.state import RunStatus
from stepengine.data.usage import Usage
from stepengine.errors import LimitExceeded, ModelError, PerformError, UnknownOutcome
from stepengine.machine import run as machine_run
from stepengine.machine.run import relay_effects
from stepengine.machine.state import Snapshot
from tests.machine.world import ADD, STEP, STEP_ALL, World, agent, binding, call, child, limits, play, reply, thought

TOOLS = [
    ADD,
    binding("safe", parallel_safe=True),
    binding("ending", ends_turn=True),
    binding("quiet", forces_next_step=False),
    binding("look", ephemeral=1),
    binding("hidden"),
    binding("strict", lambda value: None if "a" in value else "a: missing", parallel_safe=True),
]
LISTED = [
    "add",
    "safe",
    "ending",
    "quiet",
    "look",
    "strict",
    "set_output",
    "end_turn",
    "spawn_agents",
    "ask_user",
    "write_todos",
]
RESULTS = {
    1: ToolResult.error("no luck"),
    2: ToolResult.text("x", change=Change(context={"a": 1})),
    3: ToolResult.text("x", credits_used=1.5),
}
tool_names = st.sampled_from([*LISTED, "hidden", "nope", "set_messages"])
inputs = st.one_of(
    st.fixed_dictionaries({"a": st.integers(0, 4)}),
    st.just({}),
    st.just({"agents": [{"agent_type": "helper"}, {"agent_type": "other"}]}),
    st.just({"questions": [{"question": "?"}, {"question": "!", "options": ["a", "b"]}]}),
    st.just({"messages": [{"role": "user", "content": "new"}]}),
    st.just({"todos": []}),
)
tool_calls = st.builds(y.ToolCall, tool_names, inputs, st.booleans())
performs = st.sampled_from([y.Perform(int), y.Perform(lambda: 1 / 0)])
agent_calls = st.sampled_from([y.AgentCall("helper"), y.AgentCall("other", "p", {"a": 1})])
asks = st.sampled_from([y.Ask("Which?"), y.Ask("Which?", ["a", "b"])])
members = tool_calls | performs | agent_calls | asks
blocks = st.builds(
    lambda n, v: f'<tool_call>{{"name": "{n}", "input": {v}}}</tool_call>',
    tool_names,
    st.sampled_from(["{}", '{"a": 1}', "["]),
)
steps = st.sampled_from([STEP, STEP_ALL, STEP_ALL])
asked = st.one_of(
    steps,
    steps,
    steps,
    members,
    st.lists(members, max_size=4).map(y.Parallel),
    st.sampled_from([y.StepWith(tools=["add"]), y.StepWith(tools=["nope"]), y.StepWith(model="test/b")]),
    st.lists(blocks | st.just("text"), max_size=3).map(lambda parts: y.StepText(" ".join(parts))),
    st.integers(1, 3).map(y.GenerateN),
    st.just(y.Complete("x")),
    st.sampled_from(["STEP", None, 5, {"a": 1}, ToolResult]),
)
swallowing = st.sampled_from(["nothing", "errors", "errors", "errors", "everything"])
endings = st.sampled_from([None, "value", {"a": 1}, {1, 2}, ValueError("late"), KeyError("x")])


@attrs.frozen
class Program:
    """What a handler does: its yields, what it swallows, how it ends, whether its ``finally`` misbehaves."""

    steps: list[Any]
    swallows: str
    ending: Any
    nested: bool
    rude: bool


programs = st.builds(Program, st.lists(asked, max_size=8), swallowing, endings, st.booleans(), st.booleans())
model_calls = st.builds(call, tool_names, inputs)
parts = st.one_of(
    model_calls,
    model_calls,
    st.sampled_from(
        ["text", "", thought("t"), RefusalPart("no"), ToolCallPart("", "add", input_error="cut", raw_input="{")]
    ),
)
replies = st.one_of(
    st.builds(
        lambda content, reason, usage: reply(*content, usage=usage, **reason),
        st.lists(parts, max_size=4),
        st.sampled_from([{}] * 6 + [{"stop_reason": r} for r in ("max_tokens", "pause", "refusal", "error")]),
        st.sampled_from([Usage(3, 2), Usage(1), None]),
    ),
    st.sampled_from([ModelError("down"), ModelError("half", usage=Usage(2))]),
)
faults = st.one_of(
    st.sampled_from(["suspended", "cancelled", "shutdown", "limit", "diverged"]).map(Stop),
    st.sampled_from(["tokens", "cost", "children", "depth"]).map(lambda kind: Failure(LimitExceeded(kind, kind=kind))),
    st.sampled_from([UnknownOutcome("cut off"), PerformError("odd"), ModelError("x")]).map(Failure),
)
hook_kinds = st.sampled_from(["none", "io", "raise", "change", "garbage", "decide"])
hook_points = st.dictionaries(
    st.sampled_from(["pre_run", "pre_step", "pre_tool", "post_tool", "post_step", "on_stop", "post_run", "on_suspend"]),
    hook_kinds,
    max_size=3,
)


def made_hook(point, kind):
    def hook(ctx, *args):
        if kind == "raise":
            raise ValueError("hook")
        if kind == "garbage":
            return object()
        if kind == "decide" and point == "pre_tool":
            value = args[0].input.get("a", 0)
            return (None, Decision.allow(), Decision.ask(), Decision.deny(), Change(input={"a": 1}))[value % 5]
        if kind == "change" and point == "pre_step" and len(ctx.messages) > 6:
            return Change(view=ctx.messages[:1], messages=None)
        if kind == "change" and point in ("pre_run", "post_step"):
            return Change(context={"n": len(ctx.messages)})
        return None

    def generating(ctx, *args):
        yield y.Perform(int)
        yield y.ToolCall("hidden", {"a": 1})

    return generating if kind == "io" else hook


class Recorder:
    """A handler made from a program, and a record of how it was opened and closed."""

    def __init__(self, program):
        self.program = program
        self.opened = self.closed = 0
        self.states: list[Any] = []
        self.histories: list[Any] = []

    def __call__(self, ctx):
        self.opened += 1
        try:
            if self.program.nested:
                yield from self.body()
            else:
                for step in self.body():  # noqa: UP028 - a handler that drives its own helper
                    yield step
            if isinstance(self.program.ending, Exception):
                raise self.program.ending
            return self.program.ending
        finally:
            self.closed += 1
            if self.program.rude:
                yield y.ToolCall("add")

    def body(self):
        caught = {"nothing": (), "errors": Exception, "everything": (Exception, GeneratorExit)}[self.program.swallows]
        for step in self.program.steps:
            try:
                result = yield step
                if result is not None:
                    self.states.append(result.agent_state)
                    self.histories.append([*result.agent_state.message_history])
            except caught:
                if self.program.swallows == "everything":
                    return


worlds = st.fixed_dictionaries(
    {
        "replies": st.lists(replies, min_size=1, max_size=6),
        "at": st.just({}) | st.dictionaries(st.integers(0, 20), faults, max_size=2),
        "answers": st.just(set(range(30))) | st.sets(st.integers(0, 12)),
        "inputs": st.dictionaries(st.integers(0, 12), st.just([UserMessage("hello")]), max_size=1),
        "backwards": st.booleans(),
        "budget": st.sampled_from(["final_answer", "stop", "raise"]),
    }
)


def play_in(given_world, handler, points):
    """Play a handler in a drawn world, with hooks at *points*; return the world and what was played."""
    hooks = Hooks(**{point: [made_hook(point, kind)] for point, kind in points.items()})
    named = {f"q{k}": "yes" for k in given_world["answers"]} | {
        f"q{k}.{i}": "a" for k in given_world["answers"] for i in (0, 1)
    }
    script = given_world["replies"]
    world = World(
        replies=lambda k: script[k % len(script)],
        tools={b.spec.name: lambda a=0, **_: RESULTS.get(a, ToolResult.text("ok")) for b in TOOLS},
        answers=named,
        children={"helper": child(), "other": child(agent_id="other", status="failed")},
        at=given_world["at"],
        inputs=given_world["inputs"],
        backwards=given_world["backwards"],
    )
    definition = agent(
        handler,
        tools=LISTED,
        hooks=hooks,
        limits=limits(max_steps=4, max_actions=9, on_max_steps=given_world["budget"]),
    )
    return world, play(definition, world, tools=TOOLS)


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec(
    "reliability:I1",
    "reliability:I2",
    "reliability:I4",
    "reliability:I5",
    "reliability:I6",
    "reliability:I9",
    "requirements:B16",
    "requirements:X16",
)
@settings(max_examples=80)
@given(programs, worlds, hook_points)
def test_any_handler_in_any_world_ends_cleanly(program, given_world, points):
    handler = Recorder(program)
    world, played = play_in(given_world, handler, points)
    assert handler.opened == handler.closed <= 1
    assert (played.status is RunStatus.FAILED) == (played.error is not None)
    answered = {m.tool_call_id for m in played.history if m.role == "tool"}
    replaced = any(e.tool_name == "set_messages" for e in played.tool_calls)
    shown = {c.tool_call_id for m in played.history if isinstance(m, AssistantMessage) for c in m.tool_calls}
    assert answered == shown
    ran = {e.tool_call_id for e in played.calls if e.source == "model" and isinstance(world.outcomes[e.seq], Value)}
    assert replaced or ran <= answered | {e.tool_call_id for e in played.tool_calls}
    played.history.extend([UserMessage("later")] * 100)
    assert [[*state.message_history] for state in handler.states] == handler.histories
    for earlier, later in zip(handler.states, handler.states[1:], strict=False):
        assert earlier.usage.total_tokens <= later.usage.total_tokens
        assert earlier.steps_remaining >= later.steps_remaining
        assert earlier.next_call <= later.next_call


@pytest.mark.deep
@pytest.mark.smoke
@settings(max_examples=60)
@given(programs, worlds, hook_points)
def test_cached_state_equals_a_fresh_snapshot_at_any_moment(program, given_world, points):
    """A state is made anew when anything that it holds has changed, whoever of the run's parts changed it."""
    state_of, kept = Snapshot.state, []

    def shown(snapshot):
        known = snapshot._latest
        state = state_of(snapshot)
        if snapshot._latest is known:
            kept.append(state)
            snapshot._latest = None
            # The id of a call is taken before anything is to be seen of the call.
            assert attrs.evolve(state_of(snapshot), next_call=state.next_call) == state
            snapshot._latest, snapshot._state = known, state
        return state

    def exchange_looking(run, flow):
        # Looked at after each outcome, too.
        effects = relay_effects(run, flow)
        try:
            effect = effects.send(None)
            while True:
                outcome = yield effect
                shown(run.snapshot)
                effect = effects.send(outcome)
        except StopIteration as stop:
            return stop.value
        finally:
            effects.close()

    with patch.object(Snapshot, "state", shown), patch.object(machine_run, "relay_effects", exchange_looking):
        play_in(given_world, Recorder(program), points)
    event("kept" if kept else "made anew each time")
