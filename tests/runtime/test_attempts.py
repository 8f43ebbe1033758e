"""
The retry coordinator over the real adapters: what a server on the loopback sees, and what a run gets.
"""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from itertools import pairwise

import pytest

from stepengine.data.effects import CallModel
from stepengine.data.outcomes import Failure, Stop, Value
from stepengine.errors import TruncatedReply
from stepengine.models import Models
from tests.faults.scripts import WIRES
from tests.faults.server import fault_server, json_answer, sse

SAID = ("It is five.", [], "end_turn")

EACH_WIRE = pytest.mark.parametrize("wire", WIRES, ids=str)
ONE_WIRE = pytest.mark.parametrize("wire", WIRES[:1], ids=str)
"""The statuses and headers of an error are read by one function for all."""


class Asked:
    """
    What one model call came to.
    """

    def __init__(self, world, wire, server, *, watched, **services):
        self.clock = world.JumpingClock()
        self.events = []
        self.provider = wire.make(server.url)
        self.machine = self._machine(wire.request())
        services = {"models": Models.from_value(self.provider), "clock": self.clock, **services}
        self.tree = world.tree(self.machine, observers=[self.events.append] if watched else [], **services)
        self.outcome = None

    def _machine(self, request):
        def machine(plan, state):
            from stepengine.data.state import RunStatus
            from stepengine.machine.plan import Finished

            self.outcome = yield CallModel(0, request)
            return Finished(status=RunStatus.COMPLETED, state=state)

        return machine

    @property
    def shown(self):
        return [e.type for e in self.events if e.type in ("text_delta", "reply_discarded", "model_retry")]


async def asked(world, wire, *answers, watched=False, **services):
    """
    Ask once through the coordinator; give what came of it, and how many requests the server saw.
    """
    async with fault_server(*answers) as server:
        call = Asked(world, wire, server, watched=watched, **services)
        await call.tree.run()
        await call.provider.close()
    return call, len(server.requests)


def good(wire, watched):
    return sse(*wire.stream(*SAID), "fin") if watched else json_answer(wire.reply(*SAID))


def bad(wire, status, kind="overloaded_error", **headers):
    return json_answer(wire.error(kind, "Overloaded"), status, **headers)


@EACH_WIRE
@pytest.mark.spec("reliability:MP06", "reliability:R21")
@pytest.mark.parametrize("watched", [False, True])
async def test_server_sees_one_request_per_attempt(world, wire, watched):
    call, requests = await asked(world, wire, bad(wire, 500), watched=watched)

    assert 4 == requests
    assert isinstance(call.outcome, Failure)
    assert (True, 500) == (call.outcome.error.retryable, call.outcome.error.status)


@ONE_WIRE
@pytest.mark.spec("reliability:MP06")
@pytest.mark.parametrize(
    ("answer", "requests"),
    [
        ((403, "permission_error", {}), 1),
        ((408, "timeout_error", {}), 2),
        ((409, "conflict_error", {}), 2),
        ((422, "invalid_request_error", {}), 1),
        ((429, "insufficient_quota", {}), 1),
        ((429, "rate_limit_error", {}), 2),
        ((500, "api_error", {"x_should_retry": "false"}), 1),
        ((400, "invalid_request_error", {"x_should_retry": "true"}), 2),
    ],
)
async def test_only_transient_answers_are_retried(world, wire, answer, requests):
    status, kind, headers = answer
    call, seen = await asked(world, wire, bad(wire, status, kind, **headers), good(wire, False))

    assert requests == seen
    assert (Value if requests == 2 else Failure) is type(call.outcome)


@ONE_WIRE
@pytest.mark.spec("reliability:MP10")
@pytest.mark.parametrize(
    ("header", "least", "most"),
    [
        ({"retry_after": "2"}, 2, 2.5),
        ({"retry_after_ms": "1500"}, 1.5, 2),
        ({"retry_after": "soon"}, 0, 0.5),
        ({"retry_after": "-5"}, 0, 0.5),
        ({"retry_after": "3600"}, None, None),
        ({"retry_after": "date"}, 20, 31),
    ],
)
async def test_retry_after_header_is_waited_by_the_run_clock(world, wire, header, least, most):
    if "date" in header.values():
        header = {"retry_after": format_datetime(datetime.now(UTC) + timedelta(seconds=30), usegmt=True)}
    call, requests = await asked(world, wire, bad(wire, 429, "rate_limit_error", **header), good(wire, False))

    if least is None:
        assert (1, 3600) == (requests, call.outcome.error.retry_after)
    else:
        assert 2 == requests
        assert least <= call.clock.sleeps[0] <= most
        assert least * 1000 <= call.outcome.at


@EACH_WIRE
@pytest.mark.spec("reliability:MP19", "reliability:R3", "reliability:MP20", "generator-contract:L37")
async def test_cut_stream_is_discarded_retried_and_counted_as_billed(world, wire):
    events = wire.stream(*SAID)
    end = next(index for index, event in enumerate(events) if wire.marker in event)
    call, requests = await asked(world, wire, sse(*events[:end], "rst"), sse(*events, "fin"), watched=True)
    half = call.shown.index("reply_discarded")

    assert 2 == requests
    assert "It is five." == call.outcome.value.text
    assert ["reply_discarded", "model_retry"] == call.shown[half : half + 2]
    assert {"text_delta"} == set(call.shown[:half]) == set(call.shown[half + 2 :])
    usage = call.outcome.value.usage
    assert usage.at_least or usage.prompt_tokens > 30


@EACH_WIRE
@pytest.mark.spec("reliability:MP19", "reliability:MP20", "generator-contract:L37")
async def test_stream_that_is_always_cut_fails_after_four_requests(world, wire):
    events = wire.stream("", [("add", '{"a": 2, "b": 3}')], "tool_use")
    end = next(index for index, event in enumerate(events) if wire.marker in event)
    call, requests = await asked(world, wire, sse(*events[:end], "rst"), watched=True)

    assert 4 == requests
    assert isinstance(call.outcome.error, TruncatedReply)


@EACH_WIRE
@pytest.mark.spec("reliability:MP33")
@pytest.mark.parametrize("when", ["before its first event", "in its middle"])
async def test_cancel_during_a_request_returns_and_closes_the_connection(world, wire, when):
    events = wire.stream(*SAID) if when == "in its middle" else []
    async with fault_server(sse(*events[:1], "hang")) as server:
        call = Asked(world, wire, server, watched=True)
        task = asyncio.create_task(call.tree.run())
        await server.asked.wait()
        await asyncio.sleep(0.01)
        task.cancel()
        async with asyncio.timeout(50):
            await task
            await server.closed.wait()
        await call.provider.close()

    assert isinstance(call.outcome, Stop)
    assert 1 == len(server.requests)


@EACH_WIRE
@pytest.mark.spec("reliability:R21")
async def test_attempts_send_the_same_bytes(world, wire):
    async with fault_server(bad(wire, 500)) as server:
        call = Asked(world, wire, server, watched=False)
        await call.tree.run()
        await call.provider.close()

    assert all(first[1] == second[1] for first, second in pairwise(server.requests))
