"""The calls of one reply: in turn or in four passes, turn-ending, what ends a turn."""

from __future__ import annotations

import pytest

from stepengine.data import yields as y
from stepengine.data.effects import AskPerson, CallTool, Gather, Notify
from stepengine.data.events import ToolFinished, ToolStarted, Warned
from stepengine.data.hooks import Hooks
from stepengine.data.messages import OpaquePart, RefusalPart, ToolCallPart, ToolResult
from stepengine.data.models import StopReason
from stepengine.data.questions import Decision
from stepengine.data.state import RunStatus
from tests.machine.batches import ANY, NAMES, TOOLS, run, statuses
from tests.machine.world import STEP, World, adding, agent, call, child, play, reply, thought


@pytest.mark.spec("requirements:X9", "generator-contract:G51", "generator-contract:G33")
def test_calls_run_one_after_another_in_call_order():
    played = run(reply(call("add", a=1), call("safe", a=2), call("add", a=3)), reply("done"))
    assert [c.input["a"] for c in played.calls] == [1, 2, 3]
    assert Gather not in {type(e) for e in played.emitted}
    assert [m.text for m in played.history if m.role == "tool"] == ["1", "2", "3"]


@pytest.mark.spec("requirements:X9", "requirements:B12")
@pytest.mark.parametrize("backwards", [False, True])
def test_parallel_safe_batch_runs_concurrently_and_isolates_failures(backwards):
    results = {1: adding, 2: lambda **_: ToolResult.error("no"), 3: adding}
    world = World(
        replies=[reply(*[call("safe", a=k) for k in (1, 2, 3)], call("strict"), call("nope")), reply("done")],
        tools={"safe": lambda a: results[a](a=a)},
        backwards=backwards,
    )
    played = run(world=world)
    [gather] = [e for e in played.emitted if type(e) is Gather]
    assert [e.seq for e in gather.effects] == [1, 2, 3]
    assert gather.concurrency is None
    assert statuses(played) == ["ok", "error", "ok", "error", "error"]


@pytest.mark.parametrize("name", ["add", "safe_ending", "write_todos"])
def test_one_other_call_makes_the_batch_sequential(name):
    value = {"todos": []} if name == "write_todos" else {}
    played = run(reply(call("safe"), call(name, value)), reply("done"), tools=[*NAMES, "write_todos"])
    assert Gather not in {type(e) for e in played.emitted}


@pytest.mark.spec("reliability:TL21", "generator-contract:G51")
@pytest.mark.parametrize("name", ["ending", "end_turn", "task_completed"])
def test_turn_ending_call_skips_later_calls(name):
    played = run(
        reply("t", call("add", a=1), call(name), call("add", a=2)), tools=[*NAMES, "end_turn", "task_completed"]
    )
    assert [c.input for c in played.calls if c.tool_name == "add"] == [{"a": 1}]
    assert statuses(played) == ["ok", "ok", "skipped"]
    assert played.history[-1].text == f"Skipped: {name} ended the turn before this call."
    assert (played.status, len(played.models)) == (RunStatus.COMPLETED, 1)


def test_failed_turn_ending_call_does_not_end_the_turn():
    world = World(replies=[reply(call("ending")), reply("done")], tools={"ending": lambda: ToolResult.error("no")})
    assert len(run(world=world).models) == 2


ENDS = {
    "text": (["text"], True),
    "nothing": ([], True),
    "no text": ([""], True),
    "blank": (["\n"], False),
    "refusal": ([RefusalPart("no")], True),
    "opaque": ([OpaquePart("p", {})], True),
    "thinking": ([thought("hm")], False),
    "thinking and blank": ([thought("hm"), "  \n"], False),
    "call": ([call("add")], False),
    "quiet call": ([call("quiet"), call("set_output", x=1)], True),
    "quiet and other": ([call("quiet"), call("add")], False),
    "unknown": ([call("nope")], False),
    "unknown beside quiet": ([call("quiet"), call("nope")], False),
    "invalid": ([call("strict")], False),
    "not JSON": ([ToolCallPart("", "quiet", raw_input="{", input_error="cut")], False),
    "think_deeply": ([call("think_deeply", thought="x")], True),
    "ending": ([call("add"), call("ending")], True),
    "ending beside unknown": ([call("nope"), call("ending")], False),
    "ending before unknown": ([call("ending"), call("nope")], False),
    "ending beside invalid": ([call("strict"), call("ending")], False),
    "ending beside no JSON": ([ToolCallPart("", "add", raw_input="{", input_error="cut"), call("ending")], False),
    "ending beside a failure": ([call("safe", a=7), call("ending")], True),
}


@pytest.mark.spec("generator-contract:G51", "generator-contract:T3", "generator-contract:S8", "reliability:MP52")
@pytest.mark.parametrize(("parts", "ends"), ENDS.values(), ids=ENDS)
def test_turn_ends_by_content_of_the_reply(parts, ends):
    def handler(ctx):
        return (yield STEP).steps_complete

    def with_tools(*tools):
        failing = {**ANY, "safe": lambda a=0: ToolResult.error("no")}
        return run(handler=handler, tools=[*NAMES, *tools], world=World(replies=[reply(*parts)], tools=failing)).output

    assert with_tools("set_output", "think_deeply") is ends
    assert with_tools("set_output", "think_deeply", "task_completed") is (ends and "ending" in str(parts))


def told(played):
    """Return the calls whose start and end were shown, each with its status, and what came between the two."""
    shown, inside = [], ""
    for effect in played.emitted:
        event = effect.event if type(effect) is Notify else None
        if type(event) is ToolStarted:
            assert not inside
            inside = event.tool_call_id
        elif type(event) is ToolFinished:
            assert event.tool_call_id == inside == event.result.tool_call_id
            shown.append((event.tool_name, event.tool_call_id, event.result.status))
            inside = ""
        elif type(effect) in (Gather, AskPerson) and inside:
            shown.append(type(effect).__name__)
        elif type(effect) is CallTool:
            assert not inside
            shown.append(effect.tool_call_id)
    assert not inside
    return shown


@pytest.mark.spec("requirements:X66")
def test_every_model_call_has_start_and_finish_events():
    agents = {"agents": [{"agent_type": "helper"}]}
    replies = [
        reply(call("nope"), call("strict"), call("add", a=9), call("add", a=1), call("ending"), call("add")),
        reply(call("safe", a=9), call("safe", a=1), call("strict"), call("nope")),
        reply(call("spawn_agents", agents), call("ask_user", questions=[{"question": "So?"}])),
        reply(call("add"), call("add"), stop_reason="max_tokens"),
    ]
    deny = Hooks(pre_tool=[lambda ctx, asked: Decision.deny() if asked.input.get("a") == 9 else None])
    world = World(replies=replies, tools=ANY, children={"helper": child()}, answers={"q7": "yes"})

    def handler(ctx):
        for _ in replies:
            yield STEP

    played = run(world=world, handler=handler, hooks=deny, tools=[*NAMES, "spawn_agents", "ask_user"])
    assert told(played) == [
        ("nope", "c1", "error"),
        ("strict", "c2", "error"),
        ("add", "c3", "denied"),
        "c4",
        "c5",
        ("add", "c6", "skipped"),
        ("safe", "c7", "denied"),
        ("strict", "c9", "error"),
        ("nope", "c10", "error"),
        "Gather",
        ("spawn_agents", "c11", "ok"),
        "AskPerson",
        ("ask_user", "c12", "ok"),
        ("add", "c13", "skipped"),
    ]
    assert [e.source for e in played.seen(ToolStarted)] == ["model"] * 10
    assert played.seen(ToolStarted)[1].input == {}
    assert "a: missing" in played.seen(ToolFinished)[1].result.text


@pytest.mark.spec("requirements:X66")
def test_handler_and_text_calls_have_start_and_finish_events():
    def handler(ctx):
        yield y.ToolCall("spawn_agents", {"agents": [{"agent_type": "gone"}]})
        yield y.ToolCall("add", {"a": 9})
        yield y.Parallel(y.ToolCall("add", {"a": 9}), y.ToolCall("add"))
        yield y.StepText('<tool_call>{"name": "nope"}</tool_call>')

    deny = Hooks(pre_tool=[lambda ctx, asked: Decision.deny() if asked.input.get("a") == 9 else None])
    fields = {"tools": TOOLS, "children": {"helper": "Helper"}}
    played = play(agent(handler, tools=["add"], hooks=deny), World(tools=ANY), **fields)
    shown = [("spawn_agents", "c1", "error"), ("add", "c2", "denied"), ("add", "c3", "denied")]
    assert told(played) == [*shown, ("nope", "c5", "error")]
    assert [e.source for e in played.seen(ToolStarted)] == ["handler"] * 3 + ["model"]


@pytest.mark.spec("requirements:X66")
def test_call_stopped_by_the_world_has_no_finish_event():
    played = run(reply(call("ask_user", questions=[{"question": "So?"}]), call("add")), tools=["ask_user", "add"])
    assert played.status is RunStatus.SUSPENDED
    assert ([e.tool_name for e in played.seen(ToolStarted)], played.seen(ToolFinished)) == (["ask_user"], [])


@pytest.mark.parametrize("parts", [[], [""]])
def test_an_empty_reply_counts_as_a_step_and_is_reported(parts):
    played = run(reply(*parts))
    assert (played.state.step_index, played.output, played.status) == (1, "", RunStatus.COMPLETED)
    assert [e.message for e in played.seen(Warned)] == ["The model sent an empty reply."]


@pytest.mark.spec("reliability:MP59")
def test_unread_parts_of_a_reply_warn_once():
    def odd(*names):
        return {"provider_data": {"provider": "openai", "unread": [*names]}}

    played = run(reply(call("add"), **odd("choices[1]", "x")), reply("x", **odd("choices[1]")), tools=["add"])
    told = [event.message for event in played.seen(Warned)]

    assert [text.partition(", which")[0] for text in told] == [
        "a reply of openai contains 'choices[1]'",
        "a reply of openai contains 'x'",
    ]
    assert told == list(played.warnings)
    assert () == run(reply("x", provider_data={"unread": 3})).warnings


@pytest.mark.spec("reliability:MP59")
def test_unread_parts_of_a_requested_reply_warn_too():
    def handler(ctx):
        yield y.Complete("x")
        yield y.StepText("Done.")

    played = play(agent(handler), World(replies=[reply("x", provider_data={"unread": ["choices[1]"]})]))

    assert 1 == len(played.seen(Warned)) == len(played.warnings)


@pytest.mark.spec("ecosystem:EC97", "reliability:MP54")
def test_refusal_ends_the_turn_with_its_stop_reason():
    played = run(reply(RefusalPart("I will not."), stop_reason="refusal"))
    assert (played.stop_reason, played.output, len(played.models)) == (StopReason.REFUSAL, "I will not.", 1)


@pytest.mark.spec("reliability:MP58")
def test_reply_content_overrides_its_stop_reason():
    played = run(reply(call("add"), stop_reason="end_turn"), reply("done", stop_reason="tool_use"))
    assert (len(played.calls), len(played.models), played.output) == (1, 2, "done")


@pytest.mark.spec("requirements:D10", "requirements:B12", "generator-contract:G32")
def test_reply_is_stored_verbatim_with_our_call_ids():
    odd = ToolCallPart(
        "", "add", raw_input="{oops", input_error="line 1", provider_data={"provider": "p", "id": "toolu_1"}
    )
    signed = thought("why")
    played = run(reply("a", signed, odd, "b", call("nope")), reply("done"))
    message = played.history[1]
    assert [type(p).__name__ for p in message.content] == [
        "TextPart",
        "ThinkingPart",
        "ToolCallPart",
        "TextPart",
        "ToolCallPart",
    ]
    assert message.content[1] is signed
    kept = message.tool_calls[0]
    assert (kept.tool_call_id, kept.raw_input, kept.provider_data["id"]) == ("c1", "{oops", "toolu_1")
    assert played.history[2].text == "Invalid parameters for add: the arguments are not a JSON object: line 1"
    assert played.thinking == ("why",)
