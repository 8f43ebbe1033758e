"""Replies that were cut off or paused, messages sent meanwhile, ephemeral results."""

from __future__ import annotations

import attrs
import pytest

from stepengine.data import yields as y
from stepengine.data.hooks import Change, Hooks
from stepengine.data.messages import ThinkingPart, ToolCallPart, UserMessage
from stepengine.data.models import ModelSettings, StopReason
from stepengine.data.state import RunStatus
from stepengine.data.usage import Usage
from stepengine.errors import ModelError
from tests.machine.batches import run, single
from tests.machine.world import (
    ADD,
    STEP,
    World,
    adding,
    agent,
    binding,
    call,
    play,
    play_adding,
    reply,
    thought,
    yielding,
)


@pytest.mark.spec("reliability:MP55", "generator-contract:L37")
@pytest.mark.parametrize("raw", [None, '{"a": 1'])
def test_truncated_reply_executes_no_call(raw):
    last = ToolCallPart("", "add", {"a": 2} if raw is None else {}, raw_input=raw)
    played = run(reply("text", call("add", a=1), last, stop_reason="max_tokens"))
    assert (played.calls, played.status, played.stop_reason) == ([], RunStatus.TRUNCATED, StopReason.MAX_TOKENS)
    text = '{"a":2}' if raw is None else raw
    assert played.shown[1:] == [
        f"assistant: text[cut off: add {text}][add c1]",
        "tool c1 skipped: Not executed: the reply was cut off at the output limit.",
    ]
    assert played.output == f"text[cut off: add {text}]"


def test_handler_may_continue_after_a_truncated_reply():
    def handler(ctx):
        assert (yield STEP).steps_complete
        yield STEP

    cut = reply("x", stop_reason="max_tokens")
    played = run(cut, reply("whole"), handler=handler, settings=ModelSettings(continue_cut=False))
    assert (played.status, played.output) == (RunStatus.COMPLETED, "x\n\nwhole")


@pytest.mark.spec("generator-contract:L37")
@pytest.mark.parametrize("cuts", [0, 1, 3, 4])
def test_truncated_text_is_continued_at_most_three_times(cuts):
    texts = [reply(f"{k}", stop_reason="max_tokens", usage=Usage(1)) for k in range(cuts)]
    played = run(*texts, reply("end", usage=Usage(1)), step_prompt="short")
    whole = "".join(str(k) for k in range(cuts)) + "end"
    asked = min(cuts, 3) + 1
    assert (played.status, played.output) == ((RunStatus.COMPLETED, whole), (RunStatus.TRUNCATED, "0123"))[cuts > 3]
    assert (len(played.requests), played.state.step_index, played.state.usage.input_tokens) == (asked, 1, asked)
    for number, request in enumerate(played.requests):
        assert [message.role for message in request.tail] == ["user", *(["assistant", "user"] if number else [])]
        assert request.messages == played.requests[0].messages
        assert "".join(message.text for message in request.tail[1:2]) == whole[:number]
    assert [message.role for message in played.history] == ["user", "assistant"]


@pytest.mark.spec("generator-contract:L37")
def test_truncated_reply_with_calls_or_opt_out_is_not_continued():
    for parts, settings in (
        (("text", call("add", a=1)), ModelSettings()),
        ((), ModelSettings()),
        ((ThinkingPart("hm"),), ModelSettings()),
        (("text",), ModelSettings(continue_cut=False)),
        (('{"sum"',), ModelSettings(response_schema={"type": "object"})),
    ):
        played = run(reply(*parts, stop_reason="max_tokens"), settings=settings)
        assert (played.status, len(played.requests)) == (RunStatus.TRUNCATED, 1)


@pytest.mark.spec("generator-contract:L37")
def test_continuation_of_truncated_text_may_call_a_tool():
    played = run(reply("I add", stop_reason="max_tokens"), reply(" it.", call("add", a=1, b=2)), reply("done"))
    assert (played.history[1].text, [c.tool_name for c in played.history[1].tool_calls]) == ("I add it.", ["add"])
    assert (played.status, len(played.calls), played.state.step_index) == (RunStatus.COMPLETED, 1, 2)


@pytest.mark.spec("reliability:MP56")
@pytest.mark.parametrize("pauses", [1, 5, 7])
def test_a_paused_reply_is_continued_at_most_five_times(pauses):
    replies = [
        *[reply(f"{k}", stop_reason="pause", usage=Usage(1)) for k in range(pauses)],
        reply(call("add"), usage=None),
    ]
    played = run(*replies, reply("done"), step_prompt="short", handler=single)
    asked = min(pauses, 5) + 1
    assert [len(r.tail) for r in played.requests] == [1, *[2] * (asked - 1)]
    assert played.requests[1].tail[1].text == "0"
    assert (played.state.step_index, len(played.requests)) == (1, asked)
    assert played.history[1].text == "012345"[: min(pauses, 6)]
    assert len(played.calls) == (pauses < 6)


def test_post_step_hook_receives_the_whole_paused_reply():
    seen = []
    hooks = Hooks(post_step=[lambda ctx, whole: seen.append((whole.text, whole.usage))])
    run(reply("a", stop_reason="pause", usage=Usage(1)), reply("b", usage=Usage(2)), hooks=hooks)
    run(reply("a", stop_reason="pause", usage=None), reply("b", usage=None), hooks=hooks)
    assert seen == [("ab", Usage(3)), ("ab", None)]


def test_reply_ending_in_error_counts_only_its_usage():
    played = run(reply("half", call("add"), stop_reason="error", raw_stop_reason="overloaded"))
    assert played.error == ModelError(
        "the model 'test/model' ended its reply with an error (overloaded)", kind="reply_error"
    )
    assert (played.shown, played.spending.usage.requests) == (["user: go"], 1)


@pytest.mark.spec("generator-contract:G54")
def test_received_messages_are_appended_after_the_step():
    log = []

    def handler(ctx):
        log.append((yield STEP).steps_complete)
        log.append((yield STEP).steps_complete)
        yield y.Perform(lambda: 1)

    sent = {0: [UserMessage("wait"), UserMessage("tagged", ("MINE",))], 2: [UserMessage("too late")]}
    played = run(world=World(replies=[reply("done?"), reply("done")], inputs=sent), handler=handler)
    assert log == [False, True]
    assert played.shown == [
        "user: go",
        "assistant: done?",
        "user: wait",
        "user: tagged",
        "assistant: done",
        "user: too late",
    ]
    assert [m.tags for m in played.history if m.role == "user"] == [
        ("USER_PROMPT",),
        ("USER_PROMPT",),
        ("MINE",),
        ("USER_PROMPT",),
    ]
    between = run(
        world=World(replies=[reply("x")], inputs={0: [UserMessage("hi")]}),
        handler=yielding(y.Perform(lambda: 1), STEP),
    )
    assert between.shown == ["user: go", "user: hi", "assistant: x"]


@pytest.mark.spec("requirements:I12", "generator-contract:G23", "generator-contract:P32")
def test_ephemeral_results_leave_the_view_and_stay_in_the_record():
    views = []

    def handler(ctx):
        assert ctx.agent_state.view is ctx.agent_state.message_history
        for _ in range(4):
            result = yield STEP
            views.append([m.text for m in result.agent_state.view if m.role == "tool"])

    look = binding("look", ephemeral=1)
    other = binding("other", ephemeral=0)
    world = World(
        replies=[
            reply(call("look", a=1), call("other", a=9)),
            reply(call("look", a=2)),
            reply(call("add", a=3)),
            reply("x"),
        ],
        tools={"look": adding, "other": adding, "add": adding},
    )
    played = play(agent(handler, tools=["look", "other", "add"]), world, tools=[look, other, ADD])
    gone = "[This result is no longer shown; call the tool again if you need it.]"
    assert views == [["1", "9"], ["1", gone, "2"], [gone, gone, "2", "3"], [gone, gone, "2", "3"]]
    assert [m.text for m in played.history if m.role == "tool"] == ["1", "9", "2", "3"]
    assert [m.text for m in played.requests[-1].messages if m.role == "tool"] == views[-1]
    assert played.state.view is not played.history


def test_ephemeral_results_are_hidden_in_stored_and_replaced_views():
    look = binding("look", ephemeral=1)
    first = play(
        agent(tools=["look"]),
        World(replies=[reply(call("look", a=1)), reply(call("look", a=2)), reply("x")], tools={"look": adding}),
        tools=[look],
    )
    dropped = Hooks(pre_run=[lambda ctx: Change(view=ctx.state.message_history)])
    again = play(
        agent(tools=["look"], hooks=dropped),
        World(replies=[reply("y")]),
        tools=[look],
        state=attrs.evolve(first.state, usage=Usage()),
    )
    shown = [m.text for m in again.requests[0].messages if m.role == "tool"]
    assert shown == ["[This result is no longer shown; call the tool again if you need it.]", "2"]


@pytest.mark.spec("reliability:MP48")
@pytest.mark.parametrize("over", [y.StepWith(tool_choice="none"), y.StepWith(tools=(), tool_choice="none")])
def test_calls_after_tool_choice_none_run_only_if_offered(over):
    def handler(ctx):
        yield over

    played = play_adding(handler, [reply(call("add", a=1)), reply("done")])
    refused = over.tools == ()
    assert [type(e).__name__ for e in played.leaves] == ["CallModel", *([] if refused else ["CallTool"])]
    assert ("Tool 'add' is not available" in played.shown[-1]) is refused


# --- thoughts in text -----------------------------------------------------------------------------------------------

THOUGHTS = ["<think>I should answer.</think>", "<reasoning>never closed", thought("hm"), " \n", "</think>\n"]


@pytest.mark.spec("requirements:X53", "generator-contract:G51")
@pytest.mark.parametrize("only", THOUGHTS)
def test_three_thought_only_replies_in_a_row_end_the_turn(only):
    played = run(reply(only), reply(only), reply("<think>x</think>\nSo."))
    assert (played.status, played.output, played.text, len(played.models)) == (RunStatus.COMPLETED, "So.", "So.", 3)

    cut = run(world=World(replies=lambda k: reply(only)))
    assert (cut.status, cut.output, cut.text, len(cut.models)) == (RunStatus.TRUNCATED, "", "", 3)
    assert "3 consecutive replies with only thinking" in cut.warnings[0]
    text = only if isinstance(only, str) else ""
    assert [m.text for m in cut.history if m.role == "assistant"] == [text] * 3

    def handler(ctx):
        ended = []
        while len(ended) < 4:
            ended.append((yield STEP).steps_complete)
        return ended

    world = World(replies=[reply(only), reply(only), reply("x"), reply(only)])
    again = run(world=world, handler=handler)
    assert (again.status, again.output) == (RunStatus.COMPLETED, [False, False, True, False])


@pytest.mark.spec("requirements:X53", "generator-contract:G51")
def test_thought_only_replies_end_an_explicitly_ended_turn_too():
    played = run(world=World(replies=lambda k: reply("<think>x</think>")), tools=["task_completed"])
    assert (played.status, len(played.models)) == (RunStatus.TRUNCATED, 3)
    called = [reply("<think>x</think>"), reply("<think>x</think>", call("add")), reply("<think>x"), reply("y")]
    assert run(world=World(replies=called, tools={"add": adding})).output == "y"


@pytest.mark.spec("requirements:X53", "requirements:D10", "generator-contract:S2")
def test_thoughts_in_text_count_as_thinking_and_stay_recorded():
    whole = "<think>deep</think>\n\nThe answer."
    played = run(reply(thought("first"), whole))
    assert (played.output, played.text, played.thinking) == ("The answer.", "The answer.", ("first", "deep"))
    assert played.history[-1].text == whole
    mentioned = run(reply("Write <think> first."))
    assert (mentioned.output, mentioned.thinking) == ("Write <think> first.", ())


@pytest.mark.spec("requirements:X53")
def test_candidates_omit_thoughts():
    def handler(ctx):
        return (yield from y.GenerateN(2))

    played = run(reply("<think>a</think>b"), reply("c"), handler=handler)
    assert played.output == ("b", "c")
