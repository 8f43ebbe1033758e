"""Calls that a handler makes: recorded or not, alone or at once; call ids and numbers."""

from __future__ import annotations

import pytest

from stepengine.data import yields as y
from stepengine.data.effects import AskPerson, CallFunction, CallTool, Gather, Spawn
from stepengine.data.hooks import Change, Hooks
from stepengine.data.messages import ToolResult, UserMessage
from stepengine.data.outcomes import Stop
from stepengine.data.questions import Decision
from stepengine.data.state import AgentState, ChildResult, RunStatus
from stepengine.data.usage import Spending, Usage
from stepengine.errors import (
    LimitExceeded,
    PerformError,
    StepEngineError,
    ToolError,
    ToolInputError,
    ToolNotAvailable,
    UnknownOutcome,
)
from tests.machine.world import ADD, STEP, World, adding, agent, binding, call, child, play, reply
from tests.phrases import UNAVAILABLE

HIDDEN = binding("hidden")
STRICT = binding("strict", lambda value: None if "a" in value else "a: missing")
TOOLS = {"tools": [ADD, HIDDEN, STRICT]}


def sees(**values):
    return ToolResult.json(sorted(values))


@pytest.mark.spec("generator-contract:G31", "generator-contract:G42")
def test_recorded_call_is_appended_with_its_result():
    during = []

    def handler(ctx):
        result = yield y.ToolCall("add", {"a": 1, "b": 2})
        assert (result.tool_result.data, result.tool_result.tool_call_id) == (3, "c1")
        yield y.ToolCall("add", {"a": 1}, include_tool_call=False)
        yield y.ToolCall("hidden", {}, include_tool_call=False)
        return (yield from y.ToolCall("add", {"b": 9})).data

    def add(**value):
        during.append(len(world.calls[-1].state().message_history))
        return adding(**value)

    world = World(tools={"add": add, "hidden": sees})
    played = play(agent(handler, tools=["add"]), world, **TOOLS)
    assert played.output == 9
    assert played.shown == [
        "user: go",
        "assistant: [add c1]",
        "tool c1 ok: 3",
        "assistant: [add c4]",
        "tool c4 ok: 9",
    ]
    assert during == [1, 3, 3]
    assert [(e.tool_call_id, e.source, e.step_index) for e in played.calls] == [
        (f"c{k}", "handler", 0) for k in range(1, 5)
    ]


@pytest.mark.spec("requirements:D10", "requirements:E12")
def test_the_log_holds_every_call_in_order():
    def handler(ctx):
        yield y.ToolCall("add", {"a": 1}, include_tool_call=False)
        yield STEP
        yield y.ToolCall("set_output", {"x": 1})

    replies = [reply(call("add", a=2), call("nope"), call("strict"), call("add", a=3))]
    played = play(agent(handler, tools=["add", "strict"]), World(replies=replies, tools={"add": adding}), **TOOLS)
    log = [(e.tool_name, e.result.text[:9], e.is_error, e.step, e.source, e.tool_call_id) for e in played.tool_calls]
    assert log == [
        ("add", "1", False, 0, "handler", "c1"),
        ("add", "2", False, 0, "model", "c2"),
        ("nope", "Tool 'nop", True, 0, "model", "c3"),
        ("strict", "Invalid p", True, 0, "model", "c4"),
        ("add", "3", False, 0, "model", "c5"),
        ("set_output", "Output se", False, 1, "handler", "c6"),
    ]
    assert [e.duration_ms for e in played.tool_calls] == [1, 1, 0, 0, 1, 0]
    assert played.tool_calls[1].input == {"a": 2}


@pytest.mark.spec("generator-contract:G32", "generator-contract:G31")
def test_call_of_an_unavailable_tool_raises_and_records_nothing():
    def handler(ctx):
        with pytest.raises(ToolNotAvailable, match=rf"'nope' {UNAVAILABLE} 'tester'\. Available tools: add\.$") as one:
            yield y.ToolCall("nope")
        assert one.value.available == ("add",)
        with pytest.raises(ToolNotAvailable, match="include_tool_call=False"):
            yield y.ToolCall("hidden")
        with pytest.raises(ToolNotAvailable):
            yield y.Parallel(y.ToolCall("add"), y.ToolCall("hidden"))
        yield y.ToolCall("add")

    played = play(agent(handler, tools=["add"]), World(tools={"add": adding}), **TOOLS)
    assert played.status is RunStatus.COMPLETED
    assert (len(played.calls), len(played.history)) == (1, 3)


@pytest.mark.spec("generator-contract:G42", "generator-contract:G32", "generator-contract:G31")
def test_control_tool_unknown_to_the_model_is_not_recorded():
    def handler(ctx):
        yield y.ToolCall("write_todos", {"todos": []}, include_tool_call=True)

    lacking, having = [play(agent(handler, tools=names)) for names in ((), ("write_todos",))]
    assert lacking.state.context == having.state.context == {"todos": []}
    assert lacking.shown == ["user: go"]
    assert having.shown[1:] == ["assistant: [write_todos c1]", "tool c1 ok: 0 of 0 done."]


@pytest.mark.spec("generator-contract:G32", "generator-contract:T2")
@pytest.mark.parametrize("many", [False, True])
def test_invalid_handler_input_is_repaired_or_raised(many):
    repairing = binding(
        "strict",
        lambda value: None if "a" in value else "a: missing",
        repair=lambda value: value if "b" in value else {"a": 1},
    )

    def handler(ctx):
        yield y.ToolCall("strict")
        asked = y.ToolCall("strict", {"b": 1})
        with pytest.raises(ToolInputError, match="a: missing"):
            yield y.Parallel(y.ToolCall("add"), asked) if many else asked
        yield STEP

    world = World(replies=[reply(call("strict"))], tools={"strict": sees})
    played = play(agent(handler, tools=["strict", "add"]), world, tools=[repairing, ADD])
    assert [(e.source, e.input) for e in played.calls] == [("handler", {"a": 1}), ("model", {"a": 1})]
    assert [c.input for m in played.history if m.role == "assistant" for c in m.tool_calls] == [{"a": 1}] * 2


@pytest.mark.parametrize("source", ["handler", "model"])
def test_check_that_raises_counts_as_invalid_input(source):
    def check(_):
        raise KeyError("inside")

    def handler(ctx):
        yield y.ToolCall("odd") if source == "handler" else STEP

    world = World(replies=[reply(call("odd"))])
    played = play(agent(handler, tools=["odd"]), world, tools=[binding("odd", check)])
    text = "Invalid parameters for odd: the check raised KeyError: 'inside'"
    assert (played.error.message if source == "handler" else played.history[-1].text) == text


@pytest.mark.spec("generator-contract:G33")
def test_tool_failure_raises_only_from_yield_from():
    def handler(ctx):
        result = yield y.ToolCall("add")
        assert result.tool_result.is_error
        with pytest.raises(ToolError, match="no luck"):
            yield from y.ToolCall("add")
        return "on"

    played = play(agent(handler, tools=["add"]), World(tools={"add": lambda: ToolResult.error("no luck")}), **TOOLS)
    assert played.output == "on"
    assert [m.status for m in played.history if m.role == "tool"] == ["error", "error"]


@pytest.mark.spec("generator-contract:G39")
def test_unknown_outcome_is_raised_and_recorded():
    doubt = UnknownOutcome("cut off by a crash")

    def handler(ctx):
        with pytest.raises(UnknownOutcome):
            yield y.ToolCall("add")
        yield STEP
        results = yield from y.Parallel(y.ToolCall("add"), y.Perform(int))
        return [results[0].text, results[1].kind]

    world = World(
        replies=[reply(call("add"), call("add", a=5))],
        tools={"add": adding},
        at={0: doubt, 2: doubt, 4: doubt, 5: doubt},
    )
    played = play(agent(handler, tools=["add"]), world, **TOOLS)
    assert played.output == ["cut off by a crash", "UnknownOutcome"]
    assert [m.text for m in played.history if m.role == "tool"] == [
        "cut off by a crash",
        "cut off by a crash",
        "5",
        "cut off by a crash",
    ]


@pytest.mark.spec("requirements:B9", "requirements:H5")
def test_a_tool_may_change_the_context_recorded_or_not():
    changing = {k: ToolResult.text("x", change=Change(context={k: k, "gone": None if k == "c" else 1})) for k in "abc"}

    def handler(ctx):
        result = yield y.ToolCall("add", {"k": "a"})
        assert result.agent_state.context == {"a": "a", "gone": 1}
        yield y.ToolCall("add", {"k": "b"}, include_tool_call=False)
        yield STEP

    world = World(replies=[reply(call("add", k="c"))], tools={"add": lambda k: changing[k]})
    played = play(agent(handler, tools=["add"]), world, **TOOLS)
    assert played.state.context == {"a": "a", "b": "b", "c": "c"}


SETS = ToolResult.text("x", change=Change(context={"todos": "of the tool"}))
LATER = Change(context={"todos": "later"})
WRITERS = {
    "a control tool": (Hooks(), call("write_todos", todos=[{"task": "t", "completed": True}])),
    "its post_tool hook": (Hooks(post_tool=[lambda ctx, asked, result: LATER]), call("hidden")),
    "the next call's pre_tool hook": (
        Hooks(pre_tool=[lambda ctx, asked: LATER if asked.tool_name == "hidden" else None]),
        call("hidden"),
    ),
    "a later tool": (Hooks(), call("later")),
}


@pytest.mark.spec("requirements:B9", "requirements:H5", "reliability:GN37")
@pytest.mark.parametrize(("points", "second"), WRITERS.values(), ids=WRITERS)
@pytest.mark.parametrize("by", ["the model", "the handler"])
def test_tool_change_is_applied_once_and_later_writes_win(points, second, by):
    def handler(ctx):
        if by == "the model":
            yield STEP
        else:
            yield y.ToolCall("add")
            yield y.ToolCall(second.tool_name, second.input)

    tools = {"add": lambda: SETS, "hidden": lambda: ToolResult.text("y"), "later": lambda: later}
    later = ToolResult.text("z", change=LATER)
    names = ["add", "hidden", "later", "write_todos"]
    world = World(replies=[reply(call("add"), second)], tools=tools)
    played = play(agent(handler, tools=names, hooks=points), world, tools=[ADD, HIDDEN, binding("later")])
    written = [{"task": "t", "completed": True}] if second.tool_name == "write_todos" else "later"
    assert played.state.context == {"todos": written}


@pytest.mark.spec("requirements:B9")
def test_tool_change_is_visible_to_the_next_call():
    seen = []

    def look():
        seen.append(world.calls[-1].state().context)
        return ToolResult.text("seen", change=Change(messages=[UserMessage("short")]))

    world = World(
        replies=[reply(call("add"), call("hidden")), reply("done")], tools={"add": lambda: SETS, "hidden": look}
    )
    played = play(agent(tools=["add", "hidden"]), world, **TOOLS)
    assert seen == [{"todos": "of the tool"}]
    assert played.shown == [
        "user: short",
        "assistant: [add c1][hidden c2]",
        "tool c1 ok: x",
        "tool c2 ok: seen",
        "assistant: done",
    ]


# --- at once --------------------------------------------------------------------------------------------------------


@pytest.mark.spec("generator-contract:G20", "generator-contract:L6", "reliability:I2", "generator-contract:G22")
@pytest.mark.parametrize("backwards", [False, True])
def test_parallel_members_keep_their_order_and_numbers(backwards):
    def handler(ctx):
        result = yield y.Parallel(
            y.ToolCall("add", {"a": 1}),
            y.AgentCall("helper"),
            y.ToolCall("set_output", {"x": 1}),
            y.Perform(lambda: "io"),
            y.Ask("Which?"),
            y.ToolCall("hidden", include_tool_call=False),
        )
        assert [r.tool_name for r in result.tool_results] == ["add", "set_output", "hidden"]
        return [type(v).__name__ for v in result.value]

    world = World(
        tools={"add": adding, "hidden": sees}, children={"helper": child()}, answers={"q3": "me"}, backwards=backwards
    )
    played = play(agent(handler, tools=["add"]), world, **TOOLS)
    assert played.output == ["ToolResult", "ChildResult", "ToolResult", "str", "str", "ToolResult"]
    [gather] = [e for e in played.emitted if type(e) is Gather]
    assert [(e.seq, type(e)) for e in gather.effects] == list(
        enumerate([CallTool, Spawn, CallFunction, AskPerson, CallTool])
    )
    assert (gather.concurrency, gather.fail_fast) == (None, False)
    assert played.shown == ["user: go", "assistant: [add c1]", "tool c1 ok: 1"]


@pytest.mark.spec("reliability:GN21")
def test_empty_parallel_returns_nothing():
    def handler(ctx):
        return list((yield from y.Parallel()))

    played = play(agent(handler))
    assert (played.output, played.leaves) == ([], [])


@pytest.mark.spec("generator-contract:L3", "requirements:X9")
def test_parallel_failures_stay_in_their_entries():
    spent = LimitExceeded("no more children", kind="children")

    def handler(ctx):
        asked = [y.Perform(lambda: 1 / 0), y.AgentCall("helper"), y.ToolCall("add"), y.Ask("?"), y.Perform(lambda: 2)]
        return [repr(type(v)) + str(getattr(v, "status", "")) for v in (yield from y.Parallel(*asked))]

    world = World(
        tools={"add": lambda: ToolResult.error("no")}, children={"helper": spent}, at={3: StepEngineError("nobody")}
    )
    played = play(agent(handler, tools=["add"]), world, **TOOLS)
    assert played.output == [
        repr(PerformError),
        repr(ChildResult) + "failed",
        repr(ToolResult) + "error",
        repr(PerformError),
        repr(int),
    ]
    assert played.status is RunStatus.COMPLETED
    assert played.children[0].error == spent


def test_limit_in_parallel_is_an_entry_and_ends_later():
    spent = LimitExceeded("no tokens", kind="tokens")

    def handler(ctx):
        values = yield from y.Parallel(y.Perform(int), y.ToolCall("add"))
        assert (values[0].kind, values[1].text) == ("LimitExceeded", "Not executed: no tokens")
        yield STEP

    played = play(agent(handler, tools=["add"]), World(at={0: spent, 1: spent}), **TOOLS)
    assert (played.status, played.error) == (RunStatus.FAILED, spent)


def test_expanding_tools_are_rejected_in_parallel():
    def handler(ctx):
        yield y.Parallel(y.ToolCall("spawn_agents", {"agents": [{"agent_type": "helper"}]}))

    assert "use AgentCall(...) or Ask(...) there instead" in play(agent(handler)).error.message


@pytest.mark.spec("requirements:D15")
def test_stop_in_parallel_keeps_finished_results_and_child_usage():
    spent = Spending(Usage(5, requests=1))

    def handler(ctx):
        calls = [
            y.ToolCall("add", {"a": 1}),
            y.AgentCall("a"),
            y.AgentCall("b"),
            y.ToolCall("add", {"a": 2}),
            y.Ask("?"),
        ]
        yield y.Parallel(*calls)

    world = World(
        tools={"add": adding},
        children={
            "a": Stop("suspended", child=child(agent_id="a", status="suspended", spending=spent)),
            "b": child(agent_id="b", spending=spent),
        },
        at={3: Stop("suspended")},
    )
    played = play(agent(handler, tools=["add"]), world, **TOOLS)
    assert played.status is RunStatus.SUSPENDED
    assert [q.id for q in played.pending] == ["q4"]
    assert [c.agent_id for c in played.children] == ["a", "b"]
    assert played.spending.usage == Usage(10, requests=2)
    assert played.shown == [
        "user: go",
        "assistant: [add c1][add c2]",
        "tool c1 ok: 1",
        "tool c2 pending: Pending: the run is suspended.",
    ]


# --- ids ------------------------------------------------------------------------------------------------------------


@pytest.mark.spec("generator-contract:G45", "requirements:D17", "generator-contract:G42")
def test_call_ids_continue_from_previous_state_without_collisions():
    def handler(ctx):
        yield y.ToolCall("add", {"a": 1})
        yield STEP

    def run(state):
        world = World(replies=[reply(call("add"), call("add"))], tools={"add": adding})
        return play(agent(handler, tools=["add"]), world, state=state, **TOOLS)

    first = run(AgentState(run_id="r1", agent_id="tester"))
    assert [m.tool_call_id for m in first.history if m.role == "tool"] == ["c1", "c2", "c3"]
    again = AgentState(run_id="r2", agent_id="tester", message_history=first.history, next_call=first.state.next_call)
    assert [c.tool_call_id for c in run(again).calls] == ["c4", "c5", "c6"]
    taken = AgentState(run_id="r2", agent_id="tester", message_history=first.history)
    assert [c.tool_call_id for c in run(taken).calls] == ["c4", "c5", "c6"]
    inherited = AgentState(run_id="r3", agent_id="tester", id_prefix="c3_", next_call=7)
    assert [c.tool_call_id for c in run(inherited).calls] == ["c3_7", "c3_8", "c3_9"]


@pytest.mark.spec("reliability:I2")
def test_hook_effects_are_numbered_where_they_happen():
    def pre_tool(ctx, asked):
        yield y.Perform(lambda: 1)
        return Decision.ask()

    def handler(ctx):
        yield y.Parallel(y.ToolCall("add", {"a": 1}), y.Perform(lambda: 2), y.ToolCall("add", {"a": 2}))

    definition = agent(handler, tools=["add"], hooks=Hooks(pre_tool=[pre_tool]))
    played = play(definition, World(tools={"add": adding}, answers={"q2": "yes", "q3": True}), **TOOLS)
    assert [type(e).__name__ for e in played.leaves] == [
        "CallFunction",
        "CallFunction",
        "AskPerson",
        "AskPerson",
        "CallTool",
        "CallFunction",
        "CallTool",
    ]


def test_a_child_path_prefixes_question_ids():
    def handler(ctx):
        yield y.Ask("?")

    assert play(agent(handler), path="3.1").pending[0].id == "3.1.q0"
