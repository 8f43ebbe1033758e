"""Steps, the end at the limit, and limits that the world refuses by."""

from __future__ import annotations

import contextlib

import pytest

from stepengine.data import yields as y
from stepengine.data.messages import ToolResult, UserMessage
from stepengine.data.models import StopReason
from stepengine.data.state import RunStatus
from stepengine.data.usage import Usage
from stepengine.errors import LimitExceeded, LimitReached, ModelError, StepEngineError
from tests.machine.world import (
    ADD,
    STEP,
    STEP_ALL,
    World,
    adding,
    agent,
    call,
    child,
    limits,
    play,
    play_adding,
    reply,
    thought,
)

TWO = limits(max_steps=2)
SPENT = LimitExceeded("no tokens left", kind="tokens", limit=5)


def looping(k):
    return reply(call("add", a=k))


@pytest.mark.spec("generator-contract:G46", "generator-contract:G23")
def test_default_budget_is_fifty_steps():
    remaining = []

    def handler(ctx):
        while True:
            result = yield STEP
            remaining.append(result.agent_state.steps_remaining)
            if result.steps_complete:
                return

    played = play_adding(handler, lambda k: looping(k) if k < 50 else reply("that was it"))
    assert remaining == [*range(49, -1, -1), 0]
    assert (played.status, played.output, played.state.step_index) == (RunStatus.MAX_STEPS, "that was it", 50)


@pytest.mark.spec("requirements:D7", "generator-contract:G46")
def test_step_limit_requests_a_final_answer_without_tools():
    log = []

    def handler(ctx):
        result = yield STEP_ALL
        log.append(result.steps_complete)

    last = reply(thought("well"), "summary", call("add"), model="test/model")
    world = World(replies=[looping(0), looping(1), last], tools={"add": adding}, inputs={3: [UserMessage("and now?")]})
    settings = {"tools": ["add"], "limits": TWO}
    played = play(agent(handler, **settings), world, tools=[ADD])
    assert log == [True]
    assert [e.purpose for e in played.models] == ["step", "step", "final_answer"]
    request = played.requests[-1]
    assert (request.tools, request.tool_choice) == ((), None)
    assert "budget" in request.tail[0].text
    assert (played.status, played.output, played.thinking) == (RunStatus.MAX_STEPS, "summary", ("well",))
    assert played.shown[-3:] == [
        "user: and now?",
        "assistant: summary[add c3]",
        "tool c3 skipped: Skipped: the step budget of this run is spent.",
    ]
    assert played.stop_reason is StopReason.TOOL_USE
    assert played.tokens[-7:] == [
        "PhaseChanged",
        "CallModel:final_answer",
        "ThinkingCompleted",
        "TextCompleted",
        "ToolStarted",
        "ToolFinished",
        "PhaseChanged:done",
    ]


@pytest.mark.spec("requirements:D7")
@pytest.mark.parametrize("error", [ModelError("down"), SPENT, StepEngineError("odd")], ids=["model", "limit", "other"])
def test_failed_final_answer_leaves_the_same_result_as_stop(error):
    settings = {"tools": ["add"]}
    world = World(replies=[reply("one", call("add")), error], tools={"add": adding})
    played = play(agent(limits=limits(max_steps=1), **settings), world, tools=[ADD])
    stopping = limits(max_steps=1, on_max_steps="stop")
    world = World(replies=[reply("one", call("add"))], tools={"add": adding})
    stopped = play(agent(limits=stopping, **settings), world, tools=[ADD])
    assert (played.status, played.output) == (stopped.status, stopped.output) == (RunStatus.MAX_STEPS, "one")
    assert len(stopped.models) == 1


@pytest.mark.spec("requirements:D7")
def test_on_raise_throws_limit_at_first_refused_step():
    log = []

    def handler(ctx):
        try:
            yield STEP_ALL
        except LimitReached as reached:
            log.append(reached.error.kind)
            after = yield y.Perform(lambda: 1)
            log.append(after.steps_complete)
        return "swallowed"

    definition = agent(handler, tools=["add"], limits=limits(max_steps=2, on_max_steps="raise"))
    played = play(definition, World(replies=looping, tools={"add": adding}), tools=[ADD])
    assert log == ["steps", True]
    assert (played.status, played.error.kind, played.error.limit) == (RunStatus.FAILED, "steps", 2)
    assert "used all of its 2 steps" in played.error.message
    assert len(played.models) == 2


@pytest.mark.spec("generator-contract:G46", "reliability:GN09")
def test_handler_is_resumed_then_interrupted_then_closed_after_the_limit():
    log = []

    def handler(ctx):
        for _ in range(9):
            try:
                result = yield STEP
                log.append(result.steps_complete)
            except LimitReached as reached:
                log.append(reached.error.kind)

    played = play(agent(handler, limits=TWO), World(replies=lambda k: reply(thought("x"))))
    assert log == [False, False, True, "steps", "steps"]
    assert (played.status, len(played.models)) == (RunStatus.MAX_STEPS, 3)


@pytest.mark.spec("generator-contract:G46")
def test_handler_cannot_change_status_after_the_limit():
    def returning(ctx):
        yield STEP_ALL
        return "mine"

    def raising(ctx):
        yield STEP_ALL
        raise ValueError("late")

    played = play_adding(returning, looping, limits=TWO)
    assert (played.status, played.output) == (RunStatus.MAX_STEPS, "mine")
    played = play_adding(raising, looping, limits=TWO)
    assert (played.status, played.error) == (RunStatus.MAX_STEPS, None)
    assert "ValueError: late" in played.warnings[0]


def test_turn_ending_with_the_last_step_completes():
    played = play(agent(limits=limits(max_steps=1)), World(replies=[reply("x")]))
    assert (played.status, played.output) == (RunStatus.COMPLETED, "x")


@pytest.mark.spec("generator-contract:G46", "reliability:GN21")
def test_candidates_need_a_step_and_are_at_most_64():
    def handler(ctx):
        yield STEP
        with pytest.raises(LimitReached, match="no step left for GenerateN"):
            yield y.GenerateN(1)

    assert play(agent(handler, limits=limits(max_steps=1)), World(replies=[reply("x")])).status is RunStatus.MAX_STEPS

    def greedy(ctx):
        yield y.GenerateN(10_000)

    played = play(agent(greedy))
    assert played.error == LimitExceeded(
        "GenerateN(10000) requests more than 64 candidates", kind="candidates", limit=64
    )


@pytest.mark.spec("reliability:GN09", "generator-contract:G33")
@pytest.mark.parametrize(
    "asked", [STEP, y.ToolCall("add"), y.Perform(int), y.GenerateN(2), y.Complete("x"), y.AgentCall("h")]
)
def test_external_limit_raises_signal_and_fails_the_run(asked):
    log = []

    def handler(ctx):
        try:
            yield asked
        except LimitReached as reached:
            log.append(reached.error)
        with pytest.raises(LimitReached):
            yield STEP
        return "swallowed"

    world = World(replies=[SPENT] * 2, tools={"add": lambda: SPENT}, children={"h": SPENT}, at={0: SPENT})
    played = play(agent(handler, tools=["add"]), world, tools=[ADD])
    assert log == [SPENT]
    assert (played.status, played.error) == (RunStatus.FAILED, SPENT)
    assert [m.status for m in played.history if m.role == "tool"] == (["error"] if type(asked) is y.ToolCall else [])


def test_limit_inside_a_batch_still_records_all_results():
    def handler(ctx):
        with pytest.raises(LimitReached):
            yield STEP
        assert len((yield y.Perform(lambda: 1)).agent_state.message_history) == 5

    world = World(replies=[reply(*[call("add", a=k) for k in range(3)])], tools={"add": adding}, at={2: SPENT})
    played = play(agent(handler, tools=["add"]), world, tools=[ADD])
    assert played.shown[2:] == [
        "tool c1 ok: 0",
        "tool c2 error: Not executed: no tokens left",
        "tool c3 skipped: Skipped: a limit of the run was spent before this call.",
    ]
    assert played.error == SPENT


@pytest.mark.spec("requirements:D15", "generator-contract:G23", "requirements:G17")
def test_usage_and_cost_are_counted_for_every_call():
    from decimal import Decimal

    from stepengine.data.usage import Spending

    def handler(ctx):
        yield STEP
        for value in (y.Complete("x", model="test/small"), y.GenerateN(2), STEP):
            with contextlib.suppress(ModelError):
                yield value
        result = yield y.AgentCall("helper")
        assert result.agent_state.usage == Usage(7 + 5 + 3 + 3 + 4 + 9, requests=5)
        assert result.agent_state.credits_used == 2.5

    spent = Spending(
        Usage(9, requests=1),
        Decimal("0.5"),
        1,
        {"helper": Usage(9, requests=1)},
        {"m": Usage(9, requests=1)},
        {"helper": Decimal("0.5")},
        {"m": Decimal("0.5")},
    )
    world = World(
        replies=[
            reply(call("add"), usage=Usage(7), cost=Decimal(1)),
            reply("b", usage=Usage(5), cost=Decimal(1)),
            reply("c", usage=Usage(3), cost=Decimal(1), model="test/other"),
            reply("d", usage=Usage(3), cost=Decimal(1)),
            ModelError("half", usage=Usage(4)),
        ],
        tools={"add": lambda: ToolResult.text("x", credits_used=1.5)},
        children={"helper": child(spending=spent)},
    )
    played = play(agent(handler, tools=["add"]), world, tools=[ADD])
    total = played.spending
    assert total.usage == Usage(31, requests=5)
    assert (total.cost, total.credits_used) == (None, 2.5)
    assert total.by_agent == {"tester": Usage(22, requests=4), "helper": Usage(9, requests=1)}
    assert total.by_model["test/model"] == Usage(7 + 3 + 4, requests=2)
    assert (total.by_model["test/small"], total.by_model["test/other"]) == (Usage(5, requests=1), Usage(3, requests=1))
    assert total.cost_by_agent == {"tester": None, "helper": Decimal("0.5")}
    assert total.cost_by_model == {
        "test/model": None, "test/small": Decimal(1), "test/other": Decimal(1), "m": Decimal("0.5"),
    }  # fmt: skip


@pytest.mark.spec("reliability:I4")
def test_a_reply_without_usage_makes_the_sum_a_lower_bound():
    played = play(agent(), World(replies=[reply("x", usage=None)]))
    assert played.spending.usage == Usage(requests=1, at_least=True)
    assert played.spending.cost is None


@pytest.mark.spec("requirements:X51")
def test_returned_value_is_kept_after_any_limit():
    def handler(ctx):
        try:
            yield STEP
        except LimitReached as reached:
            return {"so far": reached.error.kind}

    for mode in ("last_message", "all_messages", "structured_output"):
        played = play(agent(handler, output_mode=mode), World(replies=[SPENT]))
        assert (played.status, played.error, played.output) == (RunStatus.FAILED, SPENT, {"so far": "tokens"})


@pytest.mark.spec("requirements:X51")
def test_spent_run_without_returned_value_has_no_output():
    def handler(ctx):
        yield STEP
        with contextlib.suppress(LimitReached):
            yield STEP

    played = play(agent(handler), World(replies=[reply("half"), SPENT]))
    assert (played.status, played.error, played.output, played.text) == (RunStatus.FAILED, SPENT, None, "half")


@pytest.mark.spec("requirements:X51")
def test_spent_child_reports_error_and_output_to_its_parent():
    entries = [{"agent_type": "a"}, {"agent_type": "b"}, {"agent_type": "c"}]
    world = World(
        replies=[reply(call("spawn_agents", agents=entries)), reply("x")],
        children={
            "a": child({"so far": 1}, agent_id="a", status="failed", error=SPENT),
            "b": child("half", agent_id="b", status="max_steps"),
            "c": child(None, agent_id="c", status="failed", error=StepEngineError("broke")),
        },
    )
    played = play(agent(tools=["spawn_agents"]), world)
    first, second, third = played.finished.tool_calls[0].result.data
    run = {"run_id": "r1-0", "status": "failed"}
    assert {"agent_type": "a", **run, "error": "no tokens left", "output": {"so far": 1}} == first
    assert (second["output"], second["error"]) == ("half", "it ended as max_steps")
    assert {"agent_type": "c", **run, "error": "broke"} == third
