"""Control tools: done by the machine itself, with no effect, one action each (generator-contract T23-T26, G51)."""

from __future__ import annotations

import pytest

from stepengine.data import yields as y
from stepengine.data.events import ToolFinished, ToolStarted
from stepengine.data.hooks import Change, Hooks
from stepengine.data.json import compact
from stepengine.data.messages import AssistantMessage, TextPart, ToolCallPart, ToolMessage, UserMessage
from stepengine.data.state import ChildResult, RunStatus
from stepengine.errors import ToolInputError, ToolNotAvailable
from tests.machine.world import STEP, World, agent, call, lines, play, play_adding, reply

TODOS = [{"task": "a", "completed": True}, {"task": "b", "completed": False}]


def test_machine_knows_only_the_tools_it_was_given():
    def handler(ctx):
        with pytest.raises(ToolNotAvailable, match="Tool 'end_turn' is not available"):
            yield y.ToolCall("end_turn", {})

    assert play(agent(handler), known={}).status is RunStatus.COMPLETED


@pytest.mark.spec("requirements:X14", "requirements:E25", "generator-contract:T34")
def test_only_listed_tools_are_offered():
    played = play(agent(), World(replies=[reply(call("write_todos", todos=[])), reply("x")]))
    assert played.requests[0].tools == ()
    assert played.history[2].is_error
    listed = play(agent(tools=["set_messages", "add_message", "end_turn"]), World(replies=[reply("x")]))
    assert [t.name for t in listed.requests[0].tools] == ["end_turn"]
    assert [*listed.state.tool_definitions] == ["end_turn"]


@pytest.mark.spec(
    "generator-contract:T34",
    "generator-contract:T23",
    "generator-contract:G51",
)
def test_control_tools_emit_events_and_results_without_effects():
    replies = [
        reply(call("think_deeply", thought="hm"), call("write_todos", todos=TODOS)),
        reply(call("end_turn", message="bye")),
    ]
    played = play(agent(tools=["think_deeply", "write_todos", "end_turn"]), World(replies=replies))
    assert [m.text for m in played.history if m.role == "tool"] == ["Thought noted.", "1 of 2 done.", "bye"]
    assert played.state.context == {"todos": TODOS}
    assert played.history[2].content == (TextPart("Thought noted."),)
    assert [c.result.data for c in played.tool_calls][::2] == [{"message": "Thought noted."}, {"message": "bye"}]
    assert len(played.leaves) == 2
    assert [e.tool_name for e in played.seen(ToolStarted)] == [e.tool_name for e in played.seen(ToolFinished)]
    assert played.seen(ToolStarted)[1].input == {"todos": TODOS}
    assert played.seen(ToolFinished)[2].result.tool_call_id == "c3"


ANSWERED = {
    "write_todos": ({"todos": TODOS}, "1 of 2 done."),
    "think_deeply": ({"thought": "hm"}, "Thought noted."),
    "set_output": ({"answer": 1}, "Output set."),
    "add_message": ({"role": "user", "content": "note"}, "Message added."),
    "set_messages": ({"messages": []}, "History replaced by 0 messages."),
    "task_completed": ({}, "Task completed."),
}


@pytest.mark.parametrize("tool", ANSWERED)
@pytest.mark.spec("generator-contract:T34", "generator-contract:T23", "generator-contract:S8", "generator-contract:T25", "generator-contract:T26", "generator-contract:G51")  # fmt: skip
def test_control_tool_answers_a_handler_with_a_message_object(tool):
    given, words = ANSWERED[tool]

    def handler(ctx):
        answered = yield y.ToolCall(tool, given, include_tool_call=False)
        return [answered.tool_result.data, answered.tool_result.text]

    played = play(agent(handler, output_mode="structured_output"))
    assert played.output == [{"message": words}, words]
    assert played.tool_calls[0].result.data == {"message": words}


@pytest.mark.spec("generator-contract:T25", "generator-contract:T26", "generator-contract:G32")
def test_add_message_appends_without_a_call_record():
    def handler(ctx):
        yield y.ToolCall("add_message", {"role": "user", "content": "note"})
        yield y.ToolCall("add_message", {"role": "assistant", "content": "noted"})
        with pytest.raises(ToolInputError, match='role: should be one of "user", "assistant"; not "system"'):
            yield y.ToolCall("add_message", {"role": "system", "content": "x"})

    assert play(agent(handler)).shown == ["user: go", "user: note", "assistant: noted"]


def pair(call_id="c7"):
    return [AssistantMessage([ToolCallPart(call_id, "add", {"a": 1})]), ToolMessage(call_id, "add", "1")]


FORMS = {
    "dicts": [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "c7", "name": "add", "input": {"a": 1}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c7", "content": "1"}]},
    ],
    "messages": [UserMessage("hi"), *pair()],
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.spec("generator-contract:T26", "generator-contract:G42")
def test_set_messages_replaces_history_and_skips_used_ids(form):
    def handler(ctx):
        yield STEP
        result = yield y.ToolCall("set_messages", {"messages": FORMS[form]})
        assert result.tool_result.text == "History replaced by 3 messages."
        assert lines(result.agent_state.message_history) == ["user: hi", "assistant: [add c7]", "tool c7 ok: 1"]
        assert result.agent_state.view is result.agent_state.message_history
        assert result.agent_state.left_out == (), "only recall_history reads what was left out"
        for _ in range(7):
            yield y.ToolCall("add")

    played = play_adding(handler, [reply("x")])
    assert [c.tool_call_id for c in played.calls] == ["c2", "c3", "c4", "c5", "c6", "c8", "c9"]


@pytest.mark.spec("generator-contract:T26")
@pytest.mark.parametrize(
    ("messages", "issue"),
    [
        (FORMS["dicts"][:2], "have no result"),
        (
            [{"role": "robot", "content": "x"}],
            "needs role 'user', 'assistant', 'tool', 'system' or 'developer', not 'robot'",
        ),
        ("text", "messages: should be array, not string"),
        ([5], "needs role 'user', 'assistant', 'tool', 'system' or 'developer', not None"),
    ],
)
def test_invalid_history_is_rejected_and_changes_nothing(messages, issue):
    def handler(ctx):
        with pytest.raises(ToolInputError, match="Invalid parameters for set_messages") as caught:
            yield y.ToolCall("set_messages", {"messages": messages})
        assert issue in caught.value.message
        yield STEP

    assert play(agent(handler), World(replies=[reply("x")])).shown == ["user: go", "assistant: x"]


WRONG = {
    "missing": ("think_deeply", {}, "thought: is required"),
    "unknown": ("end_turn", {"why": 1}, "why: is not a parameter; the parameters are: message"),
    "no truth": (
        "write_todos",
        {"todos": [{"task": "a", "completed": 1}]},
        "todos.0.completed: should be boolean, not integer",
    ),
    "inner": ("write_todos", {"todos": [{"task": "a"}]}, "todos.0.completed: is required"),
}


@pytest.mark.spec("generator-contract:G32")
@pytest.mark.parametrize(("name", "value", "issue"), WRONG.values(), ids=WRONG)
def test_wrong_input_of_a_control_tool_names_every_issue(name, value, issue):
    played = play(agent(tools=[name]), World(replies=[reply(call(name, value)), reply("x")]))
    assert played.history[2].text == f"Invalid parameters for {name}: {issue}\nThe input was: {compact(value)}"


def test_call_ids_in_a_view_are_not_reused():
    def handler(ctx):
        yield STEP
        yield y.ToolCall("add")

    hooks = Hooks(pre_step=[lambda ctx: Change(view=pair("c1"))])
    played = play_adding(handler, [reply("x")], hooks=hooks)
    assert played.calls[0].tool_call_id == "c2"
    assert lines(played.state.view) == [
        "assistant: [add c1]",
        "tool c1 ok: 1",
        "assistant: x",
        "assistant: [add c2]",
        "tool c2 ok: 0",
    ]


@pytest.mark.spec("generator-contract:L41")
def test_failed_hand_off_names_the_successor():
    def handler(ctx):
        yield y.ToolCall("hand_off", {"agent": "billing"})

    failed = ChildResult(run_id="r1-1", agent_id="billing", status=RunStatus.FAILED)
    played = play(agent(handler), World(children={"billing": failed}), children={"billing": None})

    assert (RunStatus.FAILED, "agent 'billing', to which the conversation was handed over, failed") == (
        played.status,
        str(played.error),
    )
