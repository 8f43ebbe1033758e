"""
How long messages stay, and where the messages that the engine adds stand.
"""

from __future__ import annotations

import pytest

from stepengine.data import yields as y
from stepengine.data.codec import from_json, to_json
from stepengine.data.hooks import Change
from stepengine.data.messages import AssistantMessage, TextPart, ToolCallPart, ToolMessage, UserMessage
from stepengine.data.outcomes import Stop
from stepengine.data.state import AgentState, RunStatus
from stepengine.data.transcript import Transcript
from stepengine.errors import DataError, ModelError
from tests.machine.batches import ANY, NAMES, TOOLS
from tests.machine.world import STEP, World, agent, call, child, hooks, play, reply


def add(content, role="user", **fields):
    return y.ToolCall("add_message", {"role": role, "content": content, **fields}, include_tool_call=False)


def texts(messages):
    return [m.text for m in messages]


@pytest.mark.spec("generator-contract:L35")
def test_step_and_prompt_messages_expire_on_time():
    seen = []

    def handler(ctx):
        yield add("for the step", ttl="agent_step", tags=["HINT"])
        yield add("for the run", ttl="user_prompt")
        yield add("a note", role="assistant", ttl="agent_step")
        before = yield add("for good")
        seen.append(texts(before.agent_state.message_history))
        for _ in range(2):
            after = yield STEP
            seen.append(texts(after.agent_state.message_history))

    world = World(replies=[reply("one"), reply("two")])
    played = play(agent(handler), world)

    assert seen[0] == ["go", "for the step", "for the run", "a note", "for good"]
    assert texts(world.requests[0].messages) == seen[0]
    assert seen[1] == ["go", "for the run", "for good", "one"]
    assert texts(world.requests[1].messages) == seen[1]
    assert seen[2] == [*seen[1], "two"]
    assert texts(played.history) == ["go", "for good", "one", "two"]
    assert world.requests[0].messages[1].tags == ("HINT",)


@pytest.mark.spec("generator-contract:L35")
@pytest.mark.parametrize("how", ["model error", "cancelled", "suspended", "failed"])
def test_expired_messages_are_absent_from_every_result(how):
    def handler(ctx):
        yield add("for the step", ttl="agent_step")
        yield add("for the run", ttl="user_prompt")
        try:
            after = yield STEP
        except ModelError:
            after = yield add("seen")
        if how == "suspended":
            yield y.Ask("?")
        if how == "failed":
            raise RuntimeError
        return texts(after.agent_state.message_history)

    outcome = {"model error": ModelError("down"), "cancelled": Stop("cancelled")}.get(how, reply("one"))
    played = play(agent(handler), World(replies=[outcome]))
    left = texts(played.history)

    assert "for the step" not in left
    assert ("for the run" in left) is (how == "suspended")
    if how == "model error":
        assert played.output == ["go", "for the run", "seen"]
    assert (
        played.status
        is {
            "model error": RunStatus.COMPLETED,
            "cancelled": RunStatus.CANCELLED,
            "suspended": RunStatus.SUSPENDED,
            "failed": RunStatus.FAILED,
        }[how]
    )


@pytest.mark.spec("generator-contract:L35")
def test_expired_messages_leave_inherited_history_and_view():
    old = [UserMessage("old step", ttl="agent_step"), UserMessage("old run", ttl="user_prompt"), UserMessage("old")]
    state = AgentState(run_id="r1", agent_id="tester", message_history=Transcript(old))
    shorten = hooks(pre_run=[lambda ctx: Change(view=[*ctx.state.view][1:])])
    world = World(replies=[reply("one")])
    played = play(agent(None, hooks=shorten, output_mode="all_messages"), world, state=state)

    assert texts(world.requests[0].messages) == ["old run", "old", "go"]
    assert texts(played.history) == texts(played.finished.state.view) == ["old", "go", "one"]
    assert [m["content"][0]["text"] for m in played.output] == ["go", "one"]


def test_tool_calls_never_expire_and_ttl_round_trips():
    spoken = AssistantMessage((TextPart("x"), ToolCallPart("c1", "add", {})), ttl="agent_step")
    answered = ToolMessage("c1", "add", (TextPart("1"),))
    start = AgentState(message_history=Transcript([spoken, answered]))
    played = play(agent(None), World(replies=[reply("one")]), state=start)

    assert list(played.history)[:2] == [spoken, answered]
    assert spoken == from_json(to_json(spoken))
    assert "ttl" not in to_json(UserMessage("x"))
    with pytest.raises(DataError, match="'agent_step', 'user_prompt' or None, not 'for ever'"):
        UserMessage("x", ttl="for ever")


@pytest.mark.spec("generator-contract:L35")
def test_a_handler_sets_messages_with_their_tags_and_lifetimes():
    def handler(ctx):
        kept = [UserMessage("a", ("T",), ttl="agent_step"), UserMessage("b", ttl="user_prompt"), UserMessage("c")]
        yield y.ToolCall("set_messages", {"messages": kept}, include_tool_call=False)
        after = yield STEP
        return texts(after.agent_state.message_history)

    world = World(replies=[reply("one")])
    played = play(agent(handler), world)

    assert [(m.text, m.tags) for m in world.requests[0].messages] == [("a", ("T",)), ("b", ()), ("c", ())]
    assert played.output == ["b", "c", "one"]
    assert texts(played.history) == ["c", "one"]


@pytest.mark.spec("generator-contract:L15")
def test_child_does_not_inherit_step_messages():
    seen = []

    def spawned(effect):
        state = effect.parent()
        seen.append((texts(state.message_history), texts(state.view)))
        return child()

    def handler(ctx):
        yield add("for the step", ttl="agent_step")
        yield add("for the run", ttl="user_prompt")
        yield y.AgentCall("helper")

    shortened = hooks(pre_run=[lambda ctx: Change(view=[UserMessage("short", ttl="agent_step")])])
    play(agent(handler), World(children={"helper": spawned}))
    play(agent(handler, hooks=shortened), World(children={"helper": spawned}))

    assert seen == [(["go", "for the run"],) * 2, (["go", "for the run"], ["for the run"])]


@pytest.mark.spec("generator-contract:L15")
def test_child_inherits_earlier_step_text_once():
    seen = []

    def spawned(effect):
        seen.append(texts(effect.parent().message_history))
        return child()

    def handler(ctx):
        yield y.STEP
        yield y.AgentCall("helper")

    world = World(replies=[reply(TextPart("I add."), call("add"))], tools=ANY, children={"helper": spawned})
    played = play(agent(handler, tools=NAMES), world, tools=TOOLS)

    assert [["go", "I add.", "0"]] == seen
    assert played.status is RunStatus.COMPLETED
