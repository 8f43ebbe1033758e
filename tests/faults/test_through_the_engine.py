"""What the faults of a provider do to a whole run: attempts, waits, events, and which tools are carried out."""

from __future__ import annotations

from typing import Any

import pytest

from stepengine import AgentDefinition, Engine, RetryPolicy, RunStatus, tool
from stepengine.errors import ModelError
from stepengine.models import Models
from tests.engine.clocks import NotingClock
from tests.faults.scripts import CHAT, GOOGLE
from tests.faults.server import fault_server, json_answer, sse
from tests.faults.test_adapters import before_the_end

pytestmark = pytest.mark.parametrize("wire", [CHAT, GOOGLE], ids=str)

SAID = ("It is five.", [], "end_turn")
CALL = ("", [("add", '{"a": 2, "b": 3}')], "tool_use")


async def ran(wire, *answers, watched=True, attempts=4):
    """A run against the answers: its result, its events, the sums that were computed, the requests, the waits."""
    sums: list[int] = []

    @tool(in_thread=False)
    def add(a: int, b: int) -> int:
        """
        Add two numbers.

        Args:
            a: One.
            b: Another.
        """
        sums.append(a + b)
        return a + b

    events: list[Any] = []
    clock = NotingClock()
    agent = AgentDefinition("adder", tools=[add], model=wire.model)
    async with fault_server(*answers) as server:
        engine = Engine(
            agents=[agent],
            models=Models({wire.name: wire.make(server.url)}),
            observers=[events.append] if watched else [],
            retry=RetryPolicy(attempts=attempts),
            clock=clock,
            pricing=None,
        )
        async with engine:
            result = await engine.run("adder", "What is 2 + 3?")
    return result, events, sums, server.requests, clock.sleeps


def names(events):
    return [type(event).__name__ for event in events]


@pytest.mark.spec("reliability:MP06", "reliability:R21")
@pytest.mark.parametrize("watched", [True, False], ids=["stream", "complete"])
async def test_a_failing_server_is_requested_as_often_as_configured(wire, watched):
    down = json_answer(wire.error("api_error", "Down."), 503)
    result, events, _, requests, sleeps = await ran(wire, down, watched=watched, attempts=3)
    assert (len(requests), len(sleeps)) == (3, 2)
    assert result.status is RunStatus.FAILED
    assert isinstance(result.error, ModelError)
    assert (result.error.status, result.error.retryable) == (503, True)
    assert names(events).count("ModelRetry") == (2 if watched else 0)


@pytest.mark.spec("reliability:MP10")
async def test_a_requested_wait_uses_the_clock_of_the_run(wire):
    slow = json_answer(wire.error("rate_limit_error", "Slow down."), 429, retry_after="2")
    result, events, _, requests, sleeps = await ran(wire, slow, sse(*wire.stream(*SAID), "fin"))
    assert (result.status, len(requests)) == (RunStatus.COMPLETED, 2)
    assert len(sleeps) == 1
    assert sleeps[0] >= 2
    (retry,) = [event for event in events if type(event).__name__ == "ModelRetry"]
    assert retry.wait == sleeps[0]


@pytest.mark.spec("reliability:MP19", "reliability:MP20")
@pytest.mark.parametrize("end", ["rst", "fin"])
async def test_a_lost_reply_runs_no_tool_and_is_discarded(wire, end):
    both = ("Let me add.", [("add", '{"a": 2, "b": 3}')], "tool_use")
    lost = sse(*before_the_end(wire, wire.stream(*both)), end)
    result, events, sums, requests, _ = await ran(wire, lost, sse(*wire.stream(*SAID), "fin"))
    assert (result.status, result.text, sums, len(requests)) == (RunStatus.COMPLETED, SAID[0], [], 2)
    seen = names(events)
    assert seen.index("TextDelta") < seen.index("ReplyDiscarded") < seen.index("ModelRetry")
    assert [message.text for message in result.state.message_history][-1] == SAID[0]


@pytest.mark.spec("reliability:MP40", "reliability:MP42", "reliability:MP48")
@pytest.mark.parametrize(
    "bad", [("add", '"not an object"'), ("ad\u200bd", "{}"), ("Add", '{"a": 2, "b": 3}'), ("add", '{"a": "two"}')]
)
async def test_an_impossible_call_gets_an_error_result_and_runs_continue(wire, bad):
    answers = [sse(*wire.stream("", [bad], "tool_use"), "fin"), sse(*wire.stream(*SAID), "fin")]
    result, _, sums, requests, _ = await ran(wire, *answers)
    assert (result.status, result.text, sums, len(requests)) == (RunStatus.COMPLETED, SAID[0], [], 2)
    (call,) = result.tool_calls
    assert call.is_error


@pytest.mark.spec("requirements:G10")
async def test_a_loop_with_a_tool_goes_round(wire):
    answers = [sse(*wire.stream(*CALL), "fin"), sse(*wire.stream(*SAID), "fin")]
    result, _, sums, requests, _ = await ran(wire, *answers)
    assert (result.status, result.text, sums, len(requests)) == (RunStatus.COMPLETED, SAID[0], [5], 2)
