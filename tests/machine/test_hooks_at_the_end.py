"""Hooks when a turn ends, and after the run was stopped."""

from __future__ import annotations

import pytest

from stepengine.data import yields as y
from stepengine.data.events import HookFailed, LogLine
from stepengine.data.hooks import Hooks
from stepengine.data.messages import ImagePart, ToolResult, UserMessage
from stepengine.data.outcomes import Stop
from stepengine.data.state import RunStatus
from stepengine.errors import LimitExceeded
from tests.machine.test_hooks import generating, greedy, raising, run
from tests.machine.world import World, adding, agent, binding, call, limits, play, reply


@pytest.mark.spec("requirements:H1", "generator-contract:G54")
def test_on_stop_message_keeps_the_turn_going():
    said = [None, "more", UserMessage("again", ("MINE",)), None]
    asked = []

    def hook(ctx):
        asked.append(ctx.step_index)
        return said[len(asked)] if len(asked) < 4 else None

    played = run(
        Hooks(on_stop=[hook, lambda ctx: "ignored" if len(asked) < 3 else None]), *[reply(f"{k}") for k in range(3)]
    )
    assert played.shown == ["user: go", "assistant: 0", "user: more", "assistant: 1", "user: again", "assistant: 2"]
    assert played.history[4].tags == ("MINE",)


@pytest.mark.spec("reliability:GN36")
@pytest.mark.parametrize("blank", ["", " \n", UserMessage(""), UserMessage(["", " "])])
def test_blank_message_of_on_stop_does_not_continue_the_turn(blank):
    said = iter(["more", None])
    alone = run(Hooks(on_stop=[lambda ctx: blank]), reply("0"), reply("1"))
    before_another = run(Hooks(on_stop=[lambda ctx: blank, lambda ctx: next(said)]), reply("0"), reply("1"))

    assert alone.shown == ["user: go", "assistant: 0"]
    assert before_another.shown == ["user: go", "assistant: 0", "user: more", "assistant: 1"]


@pytest.mark.spec("reliability:GN36")
def test_image_of_on_stop_continues_the_turn_without_text():
    said = iter([UserMessage([ImagePart(url="https://example.com/a.png")]), None])
    played = run(Hooks(on_stop=[lambda ctx: next(said)]), reply("0"), reply("1"))

    assert [message.role for message in played.history] == ["user", "assistant", "user", "assistant"]


@pytest.mark.spec("reliability:GN36")
def test_on_stop_can_refuse_ten_times_in_a_row():
    counts = []

    def handler(ctx):
        for _ in range(2):
            result = yield y.STEP_ALL
            counts.append(result.agent_state.step_index)

    run(Hooks(on_stop=[lambda ctx: "more"]), *[reply("x")] * 30, handler=handler)
    assert counts == [11, 22]
    bounded = run(Hooks(on_stop=[lambda ctx: "more"]), *[reply("x")] * 4, limits=limits(max_steps=3))
    assert bounded.state.step_index == 3


# --- after a stop ---------------------------------------------------------------------------------------------------


@pytest.mark.spec("requirements:H1", "requirements:K3")
def test_hooks_of_a_stopped_run_cannot_perform_effects():
    log = []

    def plain(ctx, *args):
        ctx.logger.info("here")
        log.append(args)

    def wanting(ctx, *args):
        ctx.logger.info("before")
        yield y.Perform(lambda: log.append("never"))

    def handler(ctx):
        yield y.Ask("Which?")

    points = Hooks(on_suspend=[plain, wanting, raising, greedy], post_run=[wanting, plain])
    played = run(points, handler=handler)
    assert played.status is RunStatus.SUSPENDED
    assert [q.text for q in log[0][0]] == ["Which?"]
    assert log[1][0].status is RunStatus.SUSPENDED
    assert len(log) == 2
    assert played.seen(HookFailed)[0].error.endswith("yielded an action, but the run was stopped")
    assert [e.point for e in played.seen(HookFailed)] == ["on_suspend"] * 3 + ["post_run"]
    assert len(played.seen(LogLine)) == 4


def test_finished_calls_of_a_stopped_batch_pass_post_tool_hooks():
    def hide(ctx, asked, result):
        return ToolResult.text("hidden")

    safe = binding("safe", parallel_safe=True)
    world = World(
        replies=[reply(call("safe", a=1), call("safe", a=2))], tools={"safe": adding}, at={2: Stop("cancelled")}
    )
    played = play(agent(tools=["safe"], hooks=Hooks(post_tool=[hide, generating])), world, tools=[safe])
    assert [(m.text[:9], m.status) for m in played.history if m.role == "tool"] == [
        ("hidden", "ok"),
        ("Cancelled", "cancelled"),
    ]
    assert played.status is RunStatus.CANCELLED
    assert "the run was stopped" in played.warnings[0]


@pytest.mark.spec("reliability:I12")
@pytest.mark.parametrize(
    ("kind", "status"),
    [("cancelled", RunStatus.CANCELLED), ("suspended", RunStatus.SUSPENDED), ("limit", RunStatus.FAILED)],
)
def test_stop_in_a_post_run_hook_determines_the_status(kind, status):
    log = []

    def wanting(ctx, result):
        log.append(result.status)
        yield y.Perform(lambda: 1)

    def plain(ctx, result):
        log.append("plain")

    played = run(
        Hooks(post_run=[wanting, wanting, plain]), reply("x"), world=World(replies=[reply("x")], at={1: Stop(kind)})
    )
    assert (played.status, played.output) == (status, None)
    assert log == [RunStatus.COMPLETED, RunStatus.COMPLETED, "plain"]
    assert len(played.leaves) == 2


def test_hook_is_closed_when_the_run_stops_in_it():
    log = []

    def hook(ctx):
        try:
            yield y.Perform(lambda: 1)
        finally:
            log.append("closed")
            raise RuntimeError("again")

    played = run(Hooks(pre_step=[hook]), world=World(at={0: Stop("shutdown")}))
    assert (played.status, log) == (RunStatus.CANCELLED, ["closed"])
    assert "RuntimeError: again" in played.warnings[0]


@pytest.mark.spec("requirements:X51")
def test_timeout_in_a_post_run_hook_keeps_the_output():
    def handler(ctx):
        yield y.Perform(int)
        return "mine"

    def slow(ctx, result):
        yield y.Perform(int)

    late = LimitExceeded("too late", kind="seconds", limit=1)
    played = run(Hooks(post_run=[slow]), handler=handler, world=World(at={1: Stop("limit", error=late)}))

    assert (RunStatus.FAILED, late, "mine") == (played.status, played.error, played.output)
