"""
Calls that go on after their tool's body: what the tool needs of the run is asked for, and then the call has its result.
"""

from __future__ import annotations

from typing import Any

import attrs
import pytest

from stepengine.data import events as ev
from stepengine.data import yields as y
from stepengine.data.effects import AskPerson, CallFunction, CallModel, CallTool
from stepengine.data.messages import ToolResult
from stepengine.data.state import RunStatus
from stepengine.data.tools import Driving, Ordinary, Spawning, ToolBinding
from stepengine.errors import ToolError
from tests.machine.world import World, agent, binding, call, play, reply


def double(number: int) -> int:
    return 2 * number


def ordering(input: Any, given: ToolResult) -> Any:
    size = yield from y.Ask(f"Which size of {input['what']}?")
    number = yield from y.Perform(double, int(size))
    said = yield from y.Complete("Rhyme.")
    return ToolResult.text(f"{given.data}: {number} {said.text}")


def followed(follow: Any, **spec: Any) -> ToolBinding:
    return attrs.evolve(binding("order", **spec), runs=Ordinary(None, follow))


def pending(**_: Any) -> ToolResult:
    return ToolResult.json("waits", status="pending")


def ordered(follow: Any = ordering, *, count: int = 1, answers: Any = None, replies: Any = ("ok",), **spec: Any) -> Any:
    calls = [call("order", {"what": f"w{n}"}) for n in range(count)]
    known = {f"q{n}": "21" for n in range(20)} if answers is None else answers
    world = World(replies=[reply(*calls), *map(reply, replies)], tools={"order": pending}, answers=known)
    return play(agent(tools=["order"]), world, tools=[followed(follow, **spec)])


def results(played: Any) -> list[str]:
    return [one.result.text for one in played.finished.tool_calls]


@pytest.mark.parametrize("parallel", [False, True])
def test_followed_call_asks_performs_and_completes_before_its_result(parallel: bool) -> None:
    played = ordered(count=2, replies=["one", "two", "ok"], parallel_safe=parallel)

    kinds = [type(effect) for effect in played.leaves]
    own = [CallTool, AskPerson, CallFunction, CallModel]
    together = [CallTool, CallTool, AskPerson, CallFunction, CallModel, AskPerson, CallFunction, CallModel]
    assert [CallModel, *(together if parallel else own * 2), CallModel] == kinds
    assert ["waits: 42 one", "waits: 42 two"] == results(played)
    assert ["ok", "ok"] == [event.result.status for event in played.seen(ev.ToolFinished)]


def test_non_pending_result_is_final() -> None:
    world = World(
        replies=[reply(call("order", {"what": "x"})), reply("ok")], tools={"order": lambda **_: ToolResult.text("done")}
    )

    played = play(agent(tools=["order"]), world, tools=[followed(ordering)])

    assert ["done"] == results(played)


def test_open_question_of_a_followed_call_suspends_the_run() -> None:
    played = ordered(answers={}, replies=())

    assert RunStatus.SUSPENDED is played.finished.status
    assert "pending" == played.history[-1].status


def test_failure_in_a_followed_call_is_an_error_result() -> None:
    def failing(input: Any, given: ToolResult) -> Any:
        yield from y.Perform(int, "x")

    def raising(input: Any, given: ToolResult) -> Any:
        yield from y.Ask("?")
        msg = "no such thing"
        raise ToolError(msg)

    assert "invalid literal" in results(ordered(failing))[0]
    assert ["no such thing"] == results(ordered(raising))


def test_endless_followed_call_is_stopped() -> None:
    def endless(input: Any, given: ToolResult) -> Any:
        while True:
            yield from y.Perform(double, 1)

    assert "yielded more than 100 times in one call" in results(ordered(endless))[0]


def test_handler_receives_the_result_of_a_followed_call() -> None:
    def handler(ctx: Any) -> Any:
        result = yield from y.ToolCall("order", {"what": "x"})
        return result.text

    world = World(replies=[reply("rhymed")], tools={"order": pending}, answers={"q1": "3"})
    played = play(agent(handler, tools=["order"]), world, tools=[followed(ordering)])

    assert "waits: 6 rhymed" == played.finished.output


@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize(
    "runs", [Ordinary(), Spawning(lambda _: (), lambda _: pending())], ids=["ordinary", "spawning"]
)
def test_pending_result_without_follow_up_is_final(runs: Any, parallel: bool) -> None:
    world = World(replies=[reply(call("order", {}), call("order", {})), reply("ok")], tools={"order": pending})

    played = play(
        agent(tools=["order"]), world, tools=[attrs.evolve(binding("order", parallel_safe=parallel), runs=runs)]
    )

    assert RunStatus.COMPLETED is played.finished.status
    assert ["pending"] * 2 == [one.result.status for one in played.finished.tool_calls]


@pytest.mark.parametrize("asked", [y.ToolCall("add", {"a": 1}), y.AgentCall("helper"), y.STEP, 17], ids=str)
def test_driven_steps_that_yield_engine_requests_are_rejected(asked: Any) -> None:
    def steps(given: Any, background: Any) -> Any:
        yield asked

    seen: list[Any] = []

    def handler(ctx: Any) -> Any:
        try:
            yield from y.ToolCall("drive", {"a": 1})
        except ToolError as error:
            seen.append(str(error))

    drive = attrs.evolve(binding("drive"), runs=Driving(steps))
    played = play(agent(handler, tools=["drive"]), World(), tools=[drive])

    assert RunStatus.COMPLETED is played.finished.status, played.finished.error
    assert "it may yield Complete, Perform, Ask, Sleep" in seen[0]
