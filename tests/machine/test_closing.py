"""A handler is closed on every way out, and what it does then changes nothing (reliability GN06, GN09)."""

from __future__ import annotations

import re

import attrs
import pytest

from stepengine.data import yields as y
from stepengine.data.events import HandlerNotice
from stepengine.data.hooks import Hooks
from stepengine.data.outcomes import Stop
from stepengine.data.state import AgentState, RunStatus
from stepengine.errors import (
    LimitExceeded,
    ModelError,
    StepEngineError,
)
from stepengine.machine import run_agent
from tests.machine.world import ADD, STEP, World, adding, agent, limits, line_of, plan_of, play, reply

WAYS = {
    "return": (list, {}, RunStatus.COMPLETED),
    "step": (lambda: [STEP], {}, RunStatus.COMPLETED),
    "raise": (lambda: [1 / 0], {}, RunStatus.FAILED),
    "bad": (lambda: ["bad"], {}, RunStatus.FAILED),
    "end_turn": (lambda: [y.ToolCall("end_turn")], {}, RunStatus.COMPLETED),
    "max_steps": (lambda: [STEP] * 9, {}, RunStatus.MAX_STEPS),
    "actions": (lambda: [y.Perform(int)] * 9, {}, RunStatus.FAILED),
    "tokens": (lambda: [STEP], {0: LimitExceeded("spent", kind="tokens")}, RunStatus.FAILED),
    "suspended": (lambda: [y.Ask("?")], {}, RunStatus.SUSPENDED),
    "cancelled": (lambda: [STEP], {0: Stop("cancelled")}, RunStatus.CANCELLED),
}


@pytest.mark.spec("generator-contract:G40", "reliability:I6")
@pytest.mark.parametrize(("asked", "at", "status"), WAYS.values(), ids=WAYS)
def test_finally_runs_once_on_every_exit_before_run_end(asked, at, status):
    log = []

    def handler(ctx):
        try:
            for value in asked():  # noqa: UP028 - a list cannot be sent anything
                yield value
        finally:
            log.append(len(world.emitted))
            ctx.logger.info("closed")

    world = World(replies=lambda _: reply("x"), at=at)
    played = play(agent(handler, limits=limits(max_steps=3, max_actions=3)), world)
    assert played.status is status
    assert len(log) == 1
    assert log[0] <= next(
        (i for i, t in enumerate(played.tokens) if t in ("RunFailed", "PhaseChanged:done")), len(played.tokens)
    )
    assert played.tokens.count("LogLine") == 1


@pytest.mark.spec("reliability:I6")
def test_finally_runs_once_wherever_the_machine_is_closed():
    log = []

    def helper():
        try:
            yield y.Parallel(y.ToolCall("add"), y.ToolCall("add"))
        finally:
            log.append("helper")

    def handler(ctx):
        try:
            yield STEP
            yield from helper()
        finally:
            log.append("handler")

    def hook(ctx):
        try:
            yield y.Perform(lambda: 1)
        finally:
            log.append("hook")

    definition = agent(handler, tools=["add"], hooks=Hooks(pre_step=[hook], pre_tool=[lambda c, d: hook(c)]))
    total = len(play(definition, World(replies=[reply("a")], tools={"add": adding}), tools=[ADD]).emitted)
    for k in range(1, total + 1):
        log.clear()
        world = World(replies=[reply("a")], tools={"add": adding})
        machine = run_agent(plan_of(definition, tools=[ADD]), AgentState(run_id="r1", agent_id="tester"))
        sent = None
        for _ in range(k):
            sent = world.answer(machine.send(sent))
        machine.close()
        assert log.count("handler") == (k > 1)
        with pytest.raises(StopIteration):
            machine.send(None)


@pytest.mark.spec("reliability:GN06")
def test_yield_in_finally_is_ignored_and_reported_with_its_line():
    def handler(ctx):
        try:
            yield y.Perform(lambda: 1)
        finally:
            yield y.ToolCall("add")  # clean up

    played = play(agent(handler, tools=["add"]), World(at={0: Stop("cancelled")}), tools=[ADD])
    [notice] = played.seen(HandlerNotice)
    assert notice.kind == "handler_ignored_close"
    assert notice.message == (
        f"handle_steps of agent 'tester' yielded while it was closed, at {line_of(__file__, 'clean up')}; these yields are ignored"
    )
    assert played.warnings == (notice.message,)
    assert (played.status, len(played.leaves)) == (RunStatus.CANCELLED, 1)


@pytest.mark.spec("reliability:GN06")
def test_several_yields_while_closing_give_one_notice():
    log = []

    def handler(ctx):
        try:
            try:
                yield y.Perform(lambda: 1)
            finally:
                yield STEP  # first
        finally:
            try:
                yield STEP  # second
            finally:
                log.append("closed")

    played = play(agent(handler), World(at={0: Stop("suspended")}))
    [notice] = played.seen(HandlerNotice)
    assert f"at {line_of(__file__, 'first')}, {line_of(__file__, 'second')}; these yields are ignored" in notice.message
    assert (log, played.status) == (["closed"], RunStatus.SUSPENDED)


@pytest.mark.spec("reliability:GN06")
def test_error_in_finally_changes_no_status_and_is_noted():
    def handler(ctx):
        try:
            yield STEP
        finally:
            raise RuntimeError("again")

    stopped = play(agent(handler), World(at={0: Stop("diverged", error=StepEngineError("other"))}))
    assert stopped.error == StepEngineError("other")
    [note] = stopped.error.__notes__
    assert re.fullmatch(r".*raised RuntimeError: again \(.*\) while it was closed", note)
    assert stopped.warnings == (note,)
    ended = play(agent(handler), World(replies=[LimitExceeded("spent", kind="tokens")]))
    assert ended.error == LimitExceeded("spent", kind="tokens")
    assert "RuntimeError: again" in ended.warnings[0]


@pytest.mark.spec("reliability:GN09")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_handler_that_swallows_everything_is_abandoned():
    def handler(ctx):
        while True:
            try:
                yield STEP
            except BaseException:  # swallowed
                continue

    played = play(agent(handler, limits=limits(max_steps=2)), World(replies=lambda _: reply("x")))
    assert played.status is RunStatus.MAX_STEPS
    assert [e.kind for e in played.seen(HandlerNotice)] == ["handler_ignored_close"]
    assert "continued after its limit was spent" in played.warnings[0]
    assert len(played.models) == 3
    stopped = play(agent(handler), World(at={0: Stop("cancelled")}))
    assert (stopped.status, len(stopped.leaves)) == (RunStatus.CANCELLED, 1)


@pytest.mark.spec("reliability:GN09", "generator-contract:G33")
def test_except_exception_catches_errors_but_no_limit_and_no_stop():
    log = []

    def handler(ctx):
        for _ in range(5):
            try:
                yield STEP
            except Exception as error:
                log.append(type(error).__name__)
            except BaseException as error:
                log.append(type(error).__name__)
                raise

    replies = [ModelError("x"), reply("a"), LimitExceeded("spent", kind="tokens")]
    played = play(agent(handler), World(replies=replies))
    assert log == ["ModelError", "LimitReached"]
    assert (played.status, played.error) == (RunStatus.FAILED, LimitExceeded("spent", kind="tokens"))
    log.clear()
    play(agent(handler), World(at={0: Stop("cancelled")}))
    assert log == ["GeneratorExit"]


@pytest.mark.spec("reliability:GN16")
def test_non_json_value_can_be_an_output():
    def handler(ctx):
        return {1, 2}
        yield

    assert play(agent(handler)).output == {1, 2}


@pytest.mark.spec("generator-contract:G22", "reliability:GN14", "requirements:B1")
def test_objects_passed_to_a_handler_are_immutable():
    def handler(ctx):
        result = yield STEP
        for change in (
            lambda: setattr(ctx, "prompt", "x"),
            lambda: setattr(result.agent_state, "output", 1),
            lambda: result.agent_state.context.update(a=1),
            lambda: setattr(result, "steps_complete", False),
            lambda: ctx.params.update(a=1),
        ):
            with pytest.raises((attrs.exceptions.FrozenInstanceError, TypeError, AttributeError)):
                change()

    assert play(agent(handler), World(replies=[reply("x")])).status is RunStatus.COMPLETED
