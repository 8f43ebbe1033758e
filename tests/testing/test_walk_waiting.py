"""
`Walk` and `run_script` answer what waits: times, messages, children in the background, races.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pydantic
import pytest

from stepengine.data.state import ChildResult, RunStatus, Waited
from stepengine.data.waits import ChildRef
from stepengine.data.yields import (
    AgentCall,
    Cancel,
    Parallel,
    Perform,
    Race,
    Receive,
    Send,
    Sleep,
    Start,
    ToolCall,
    Wait,
)
from stepengine.errors import ChildError, DataError
from stepengine.testing import Walk, run_script

START = datetime(2025, 1, 1, tzinfo=UTC)
HOUR = timedelta(hours=1)
A, B = ChildRef("walk-0", "reader", "0"), ChildRef("walk-1", "writer", "1")


class Order(pydantic.BaseModel):
    number: int


def asks(*yieldables):
    def handler(ctx):
        seen = []
        for one in yieldables:
            seen += [(yield one).value]
        return [*seen, ctx.now()]

    return handler


def children(asked):
    """Return a handler that starts two children and then asks for *asked*."""

    def handler(ctx):
        yield Start(AgentCall("reader"), AgentCall("writer"))
        return (yield asked).value

    return handler


@pytest.mark.spec("waiting:WT24")
def test_a_sleeper_wakes_on_time_or_when_the_test_decides():
    handler = asks(Sleep(3600), Sleep(until=START + 5 * HOUR), Sleep(until=START), Sleep(60))

    due, late = Walk(handler).send().send().send().send(), Walk(handler).send(START + 9 * HOUR).send().send().send()

    end = START + 5 * HOUR
    assert due.returned == [START + HOUR, end, end, end + timedelta(minutes=1), end + timedelta(minutes=1)]
    assert late.returned[:3] == [START + 9 * HOUR] * 3
    assert due.fork().returned == due.returned


@pytest.mark.spec("waiting:WT24")
def test_a_sent_message_is_given_and_none_means_the_timeout():
    def handler(ctx):
        order = yield from Receive("orders", schema=Order)
        return order.number, (yield from Receive("orders", timeout=90)), ctx.now()

    assert Walk(handler).send({"number": 3}).send(None).returned == (3, None, START + timedelta(seconds=90))


@pytest.mark.spec("waiting:WT24")
def test_background_children_are_simulated_and_end_as_the_test_decides():
    def handler(ctx):
        first = yield from Start(AgentCall("reader"))
        second = yield from Start(AgentCall("writer"))
        yield from Send(first, "hurry")
        waited = yield from Wait(first, second, need="any")
        rest = yield from Cancel(waited.open[0])
        return first, second, waited, rest

    first, second, waited, rest = Walk(handler).send().send().send().send({B: "text"}).send().returned

    assert (first, second) == (A, B)
    assert (waited[B].output, waited.open) == ("text", (A,))
    assert (rest.status, rest.run_id) == (RunStatus.CANCELLED, A.id)


@pytest.mark.spec("waiting:WT24")
def test_ended_children_have_short_forms_in_order():
    ways = [["x", ValueError("bad")], {A: "x", B: ChildResult(agent_id="writer", status="failed")}]
    for answer in ways:
        waited = Walk(children(Wait(A, B))).send().send(answer).returned
        assert [child.status for child in waited.done] == [RunStatus.COMPLETED, RunStatus.FAILED]
        with pytest.raises(ChildError):
            waited[B].unwrap()
    assert Walk(children(Wait(A, B))).send().send({B: 2, A: 1}).returned.done[0].output == 2
    assert Walk(children(Wait(A))).send().send([1, 2]).returned[A].output == [1, 2]
    assert Walk(children(Wait(A, B, timeout=5))).send().send().returned == Waited((), (A, B))


@pytest.mark.spec("waiting:WT24")
def test_a_race_is_answered_with_its_winner_and_value():
    race = Race(ToolCall("look"), Sleep(60), Race(Perform(int), Receive("stop")))

    def handler(ctx):
        return (yield from race), ctx.now()

    assert Walk(handler).send((1, START + HOUR)).returned == ((1, START + HOUR), START + HOUR)
    assert Walk(handler).send((2, (1, "now"))).returned == ((2, (1, "now")), START)
    number, failed = Walk(handler).send((0, OSError("gone"))).returned[0]
    assert (number, failed.is_error, failed.tool_name) == (0, True, "look")


@pytest.mark.spec("waiting:WT24")
def test_a_parallel_wait_takes_as_long_as_its_longest_member():
    def handler(ctx):
        woke = yield from Parallel(Sleep(3600), Receive("news", timeout=60))
        return woke, ctx.now()

    walk = Walk(handler).send([START + 2 * HOUR, None])

    assert walk.returned == ((START + 2 * HOUR, None), START + 2 * HOUR)


BAD = {
    "naive date": (Sleep(1), datetime(2026, 1, 1), "nothing, or a date with a time zone"),  # noqa: DTZ001
    "a date before": (Sleep(1), START - HOUR, "nothing, or a date with a time zone, not before 2025-01-01"),
    "seconds": (Sleep(1), 3, "nothing, or a date"),
    "no message": (Receive("a"), None, "a message, since it has no timeout"),
    "a message that does not fit": (Receive("a", schema=Order), {"number": "x"}, "a message that fits its schema"),
    "a message that is not JSON": (Receive("a"), object(), "is not an answer to"),
    "too few references": (Start(AgentCall("x"), AgentCall("y")), A, "a ChildRef for each of 'x', 'y'"),
    "another child": (Start(AgentCall("x")), A, "a ChildRef for each of 'x'"),
    "too few ends": (Wait(A, B), ["x"], "how each of its children ended"),
    "an end of another": (Wait(A), {B: 1}, "only children that it waits for"),
    "not enough": (Wait(A, B), {A: 1}, "the results of at least 2 of them, since it has no timeout"),
    "a result of another": (
        Wait(A),
        ChildResult(agent_id="reader", run_id="z"),
        "a ChildResult with run_id 'walk-0' or without one",
    ),
    "a Waited of another": (Wait(A), Waited((), (B,)), "a Waited with each of its children once"),
    "text for a bool": (Send(A, "x"), "yes", "a bool"),
    "no pair": (Race(Sleep(1)), "x", "a pair of the number of the first"),
    "no such member": (Race(Sleep(1)), (1, None), "a pair of the number of the first"),
    "a winner that does not fit": (Race(Sleep(1)), (0, "x"), "nothing, or a date"),
    "a sleeper that fails": (Parallel(Sleep(1)), [OSError("x")], "a value, since it cannot fail"),
}


@pytest.mark.spec("waiting:WT24")
@pytest.mark.parametrize("case", BAD)
def test_a_wrong_answer_is_refused_with_the_right_form(case):
    asked, answer, said = BAD[case]
    walk = Walk(asks(asked))

    with pytest.raises(DataError, match="is not an answer to") as caught:
        walk.send(answer)

    assert said in caught.value.message
    assert (walk.asked, walk.history) == (asked, ())


@pytest.mark.spec("waiting:WT24")
def test_a_script_answers_waits_and_throws_their_failures():
    def handler(ctx):
        ref = yield from Start(AgentCall("reader"))
        try:
            yield from Wait(ref)
        except OSError:
            return (yield from Race(Receive("go"), Sleep(5)))

    script = [Start, (Wait(A), OSError("lost")), (lambda asked: isinstance(asked, Race), (0, {"go": True}))]
    assert run_script(handler, script) == (0, {"go": True})
