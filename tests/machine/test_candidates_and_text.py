"""``GenerateN``, ``StepText`` and long runs."""

from __future__ import annotations

import sys
import tracemalloc

import pytest

from stepengine.data import yields as y
from stepengine.data.events import HandlerNotice, TextCompleted
from stepengine.data.messages import UserMessage
from stepengine.data.state import RunStatus
from stepengine.errors import ModelError
from tests.machine.world import (
    ADD,
    STEP,
    World,
    adding,
    agent,
    call,
    limits,
    play,
    play_adding,
    reply,
    thought,
)


@pytest.mark.spec("generator-contract:G19", "generator-contract:G22", "generator-contract:G46", "reliability:GN21")
def test_candidates_are_independent_replies_in_order_and_take_one_step():
    log = []

    def handler(ctx):
        result = yield y.GenerateN(3)
        log.append((result.n_responses, result.steps_complete, result.agent_state.steps_remaining))
        later = yield y.Perform(lambda: 1)
        log.append(later.n_responses)

    replies = [reply("a", call("add")), reply(thought("t"), "b"), reply("c")]
    definition = agent(handler, tools=["add"], step_prompt="short", system_prompt="X")
    played = play(definition, World(replies=replies, backwards=True), tools=[ADD])
    assert log == [(("c", "b", "a"), False, 49), ()]
    assert [e.purpose for e in played.models] == ["candidate"] * 3
    assert len({e.request for e in played.models}) == 1
    assert [m.tags for m in played.requests[0].tail] == [("STEP_PROMPT",)]
    assert played.shown == ["user: go"]
    assert [e.kind for e in played.seen(HandlerNotice)] == ["calls_dropped"]


@pytest.mark.spec("generator-contract:G19")
def test_candidates_that_fail_are_left_out():
    def handler(ctx):
        return list((yield from y.GenerateN(3)))

    played = play(agent(handler), World(replies=[ModelError("x"), reply("b"), reply("c")]))
    assert played.output == ["b", "c"]
    assert played.spending.usage.requests == 2


@pytest.mark.spec("generator-contract:G18", "generator-contract:G30", "generator-contract:G24")
def test_text_becomes_messages_and_its_blocks_run_in_order():
    text = """Before
<tool_call>{"name": "add", "input": {"a": 1, "b": 2}}</tool_call>
  between
<codebuff_tool_call>
{"cb_tool_name": "add", "a": 3, "cb_easp": true}
</codebuff_tool_call>
<tool_call>not json</tool_call>
```
<tool_call>{"name": "add", "input": {}}</tool_call>
```
<tool_call>{"name": "nope"}</tool_call>
<tool_call>{"name": "set_output", "input": {"data": 5}}</tool_call>
after <tool_call>{"name": "add"}"""

    def handler(ctx):
        results = yield from y.StepText(text)
        return [f"{r.tool_name} {r.status}" for r in results]

    played = play(agent(handler, tools=["add"]), World(tools={"add": adding}), tools=[ADD])
    assert played.output == [
        "add ok",
        "add ok",
        " error",
        "nope error",
        "set_output ok",
    ]
    assert played.shown == [
        "user: go",
        "assistant: Before",
        "assistant: [add c1]",
        "tool c1 ok: 3",
        "assistant: between",
        "assistant: [add c2]",
        "tool c2 ok: 3",
        'assistant: ```\n<tool_call>{"name": "add", "input": {}}</tool_call>\n```',
        'assistant: after <tool_call>{"name": "add"}',
    ]
    assert [e.text for e in played.seen(TextCompleted)][:2] == ["Before", "between"]
    assert [e.kind for e in played.seen(HandlerNotice)] == ["broken_block"]
    assert "not JSON" in played.seen(HandlerNotice)[0].message


@pytest.mark.spec("generator-contract:G50")
@pytest.mark.parametrize("end", ["end_turn", "task_completed"])
def test_text_that_ends_the_turn_skips_its_later_blocks(end):
    log = []

    def handler(ctx):
        text = f'<tool_call>{{"name": "{end}"}}</tool_call><tool_call>{{"name": "add"}}</tool_call>'
        for wrong in ("<tool_call>{</tool_call>", '<tool_call>{"name": "nope"}</tool_call>', ""):
            result = yield y.StepText(wrong + text)
            log.append((result.steps_complete, [r.status for r in result.tool_results]))
        log.append((yield STEP).steps_complete)
        yield y.StepText("more")

    played = play_adding(handler, [reply(call("add"))])
    assert log == [
        (False, ["error", "ok", "skipped"]),
        (False, ["error", "ok", "skipped"]),
        (True, ["ok", "skipped"]),
        False,
    ]
    assert (played.status, played.output, len(played.models)) == (RunStatus.COMPLETED, "more", 1)


@pytest.mark.spec("generator-contract:G50", "generator-contract:G54")
def test_pending_message_is_answered_before_text_ends_the_turn():
    def handler(ctx):
        yield y.Perform(int)
        return (yield y.StepText('<tool_call>{"name": "end_turn"}</tool_call>')).steps_complete

    played = play(agent(handler), World(inputs={0: [UserMessage("wait")]}))
    assert (played.output, played.shown) == (False, ["user: go", "user: wait"])


@pytest.mark.spec("generator-contract:G49", "generator-contract:G51")
def test_task_completed_and_refused_end_turn_keep_the_run_going():
    def handler(ctx):
        yield y.ToolCall("task_completed")
        result = yield y.StepText('<tool_call>{"name": "end_turn", "input": {"nope": 1}}</tool_call>')
        assert result.tool_result.is_error
        return "on"

    assert play(agent(handler)).output == "on"


@pytest.mark.spec("reliability:RS03")
def test_steps_and_nested_helpers_do_not_deepen_the_stack():
    depths = set()

    def deep(levels):
        if levels:
            yield from deep(levels - 1)
        else:
            for _ in range(100):
                yield STEP
                depths.add(depth())

    def handler(ctx):
        yield from deep(150)

    played = play(agent(handler, limits=limits(max_steps=200)), World(replies=lambda _: reply("k")))
    assert (played.state.step_index, len(depths)) == (100, 1)


def depth():
    frame, count = sys._getframe(), 0
    while frame is not None:
        frame, count = frame.f_back, count + 1
    return count


@pytest.mark.memory
@pytest.mark.spec("reliability:RS03")
def test_memory_grows_only_with_the_history():
    sizes = []

    def handler(ctx):
        for k in range(1_001):
            yield STEP
            if k % 500 == 0:
                sizes.append(tracemalloc.get_traced_memory()[0])

    world = World(replies=lambda _: reply("k"))
    world.emitted = Forgetful()
    tracemalloc.start()
    try:
        play(agent(handler, limits=limits(max_steps=2_000)), world, checked=False)
    finally:
        tracemalloc.stop()
    first, second, third = sizes
    assert third - second < (second - first) * 1.5


class Forgetful(list):
    """A list that keeps nothing, so that only what the machine holds is measured."""

    def append(self, value):
        pass
