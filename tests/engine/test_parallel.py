"""
What a handler asks for at once: windows, limits that hold for it, and what a crash leaves in doubt (requirements X50).
"""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from stepengine import (
    STEP,
    AgentCall,
    AgentDefinition,
    Ask,
    Engine,
    Hooks,
    Limits,
    Parallel,
    Perform,
    RunStatus,
    ToolCall,
    best_of,
    map_agents,
    tool,
)
from stepengine.data.questions import Decision
from stepengine.errors import BadYield, LimitExceeded
from stepengine.events import RunStarted
from stepengine.journal import MemoryJournal, check
from stepengine.testing import ScriptedModel, text, tool_call
from stepengine.tools.bundled import spawn_tools
from tests.loop_clock import put_clock_ahead


class Counting:
    """
    Counts who is at work, and how many at most.
    """

    def __init__(self) -> None:
        self.now = self.most = 0
        self.done: list[str] = []

    async def work(self, name: str = "", turns: int = 3) -> str:
        self.now += 1
        self.most = max(self.most, self.now)
        for _ in range(turns):
            await asyncio.sleep(0)
        self.now -= 1
        self.done.append(name)
        return name

    def kid(self, ctx):
        return (yield from Perform(self.work, ctx.prompt))


def engine_of(handler, kid=None, limits=None, **options) -> Engine:
    kids = [AgentDefinition("kid", handle_steps=kid)] if kid else []
    tools = options.pop("tools", ())
    hooks = options.pop("hooks", None)
    made = AgentDefinition(
        "boss", model="test/m", spawnable_agents=kids, tools=tools, handle_steps=handler, limits=limits, hooks=hooks
    )
    return Engine([made], models=options.pop("models", ScriptedModel([])), **options)


# --- the window -------------------------------------------------------------------------------------------------------


@pytest.mark.spec("requirements:X50")
@pytest.mark.parametrize("members", ["children", "performs"])
async def test_slow_member_occupies_only_its_own_slot_of_the_window(members):
    last = asyncio.Event()

    async def work(name: str) -> str:
        if name == "0":
            await last.wait()  # ends after the last one, which a wave would never begin
        if name == "31":
            last.set()
        return name

    def kid(ctx):
        return (yield from Perform(work, ctx.prompt))

    def boss(ctx):
        if members == "children":
            children = yield from map_agents("kid", range(32), prompt=str, concurrency=2)
            return [c.output for c in children]
        return list((yield from Parallel([Perform(work, str(i)) for i in range(32)], concurrency=2)))

    result = await asyncio.wait_for(engine_of(boss, kid).run("boss"), 50)

    assert [str(i) for i in range(32)] == result.unwrap()


@pytest.mark.spec("requirements:X50")
@pytest.mark.parametrize(
    ("asked", "limits", "most"),
    [
        (None, None, 8),
        (32, None, 32),
        (3, None, 3),
        (None, Limits(max_concurrent_children=20), 20),
        (32, Limits(max_concurrent_children=5), 5),
        (3, Limits(max_concurrent_children=5), 3),
    ],
)
async def test_explicit_number_of_children_replaces_the_default_not_a_limit(asked, limits, most):
    counting = Counting()

    def boss(ctx):
        children = yield from Parallel([AgentCall("kid", str(i)) for i in range(40)], concurrency=asked)
        return [c.output for c in children]

    result = await engine_of(boss, counting.kid, limits).run("boss")

    assert [str(i) for i in range(40)] == result.unwrap()
    assert most == counting.most


@pytest.mark.spec("requirements:X50")
@pytest.mark.parametrize("asked", [None, 40])
async def test_waiting_children_block_no_perform_and_no_tool_call(asked):
    together = asyncio.Event()
    children, others = Counting(), Counting()

    async def meet() -> str:
        others.now += 1
        if others.now == 40:
            together.set()
        await together.wait()
        return "met"

    @tool
    async def meeting() -> str:
        """Wait until all are here."""
        return await meet()

    def boss(ctx):
        mixed = [[AgentCall("kid", str(i)), Perform(meet), ToolCall("meeting")] for i in range(20)]
        members = [member for three in mixed for member in three]
        if asked:  # as many as the window has room for stand before the last of the others
            members = members[::3] + members[1::3] + members[2::3]
        values = yield from Parallel(members, concurrency=asked and 60)
        return Counter([getattr(v, "text", v) for v in values])

    limits = Limits(max_concurrent_children=2)
    result = await asyncio.wait_for(engine_of(boss, children.kid, limits, tools=[meeting]).run("boss"), 50)

    assert 40 == result.unwrap()["met"]
    assert 2 == children.most


@pytest.mark.spec("reliability:R3", "requirements:X50")
@pytest.mark.parametrize(("room", "width", "most"), [(2, 5, 2), (None, 3, 3)])
async def test_only_tool_calls_under_way_are_recorded_as_begun(room, width, most):
    journal, seen = MemoryJournal(), []

    @tool
    async def work() -> str:
        """Work."""
        history = journal.history()
        seen.append(sum(i.type == "tool_call" and a not in history.results for a, i in history.intents.items()))
        await asyncio.sleep(0)
        return "done"

    def boss(ctx):
        yield Parallel(*[ToolCall("work")] * 5, Perform(int), *[ToolCall("work")] * 5, concurrency=width)

    engine = engine_of(boss, limits=Limits(max_concurrent_tools=room), tools=[work])
    (await engine.run("boss", journal=journal)).unwrap()
    assert 10 == len(seen)
    assert most == max(seen)


@pytest.mark.parametrize("concurrency", [0, True, 2.0])
def test_empty_concurrency_window_is_refused_where_it_is_written(concurrency):
    with pytest.raises(BadYield, match="the concurrency of a Parallel must be an integer of at least 1, or None"):
        Parallel(Perform(int), concurrency=concurrency)


@pytest.mark.spec("requirements:X50", "generator-contract:G47")
async def test_parallel_counts_as_one_action():
    counting = Counting()

    def boss(ctx):
        yield from Parallel([Perform(counting.work, turns=0) for _ in range(2_000)])
        yield from map_agents("kid", range(30), prompt=str)
        with pytest.raises(BaseException, match="requested more than 2 actions"):
            yield Perform(int)

    await engine_of(boss, counting.kid, Limits(max_actions=2)).run("boss")
    assert 2_030 == len(counting.done)


# --- limits -----------------------------------------------------------------------------------------------------------


@pytest.mark.spec("requirements:X50")
async def test_defaults_for_model_calls_bind_no_handler():
    counting = Counting()

    def boss(ctx):
        yield from Parallel([AgentCall("kid", str(i)) for i in range(150)])
        yield from best_of("kid", n=20, judge=lambda _: 0)
        yield STEP

    entries = {"agents": [{"agent_type": "kid", "prompt": str(i)} for i in range(17)]}
    scripted = ScriptedModel([tool_call("spawn_agents", entries), text("end")])
    result = await engine_of(boss, counting.kid, tools=spawn_tools(), models=scripted).run("boss")
    shown = result.tool_calls[0].result.data

    assert 170 + 16 == len(counting.done)
    assert ["completed"] * 16 == [entry["status"] for entry in shown[:16]]
    assert "this is child 17 of one call, and max_children is 16; raise Limits(max_children=...)" == shown[16]["error"]


@tool
def touch() -> str:
    """Do nothing."""
    return "touched"


@pytest.mark.spec("requirements:X50", "reliability:SP02")
@pytest.mark.parametrize("way", ["parallel", "window", "map_agents", "best_of", "mixed"])
@pytest.mark.parametrize("limit", ["max_children", "max_total_children"])
async def test_parallel_above_a_set_limit_is_refused_before_anything_starts(way, limit):
    counting, caught = Counting(), []

    def ask():
        calls = [AgentCall("kid", str(i)) for i in range(10)]
        if way == "map_agents":
            yield from map_agents("kid", range(10), prompt=str)
        elif way == "best_of":
            yield from best_of("kid", n=10, judge=lambda _: 0)
        elif way == "mixed":
            yield Parallel(Perform(counting.work, "io"), ToolCall("touch"), Ask("Well?"), *calls)
        else:
            yield Parallel(calls, concurrency=2 if way == "window" else None)

    def boss(ctx):
        try:
            yield from ask()
        except Exception as error:
            caught.append(error)
        history = len(ctx.agent_state.message_history)
        children = yield from Parallel([AgentCall("kid", str(i)) for i in range(6)])
        return [history, *[c.output for c in children]]

    events, journal = [], MemoryJournal()
    limits = Limits(**{limit: 6})
    made = engine_of(boss, counting.kid, limits, tools=[touch], observers=[events.append])
    result = await made.run("boss", journal=journal)
    started = [e.path for e in events if isinstance(e, RunStarted) and e.path]
    replayed = await made.replay(journal)

    assert [0, *"012345"] == result.unwrap()
    assert [*"012345"] == counting.done
    assert 6 == len(started)
    assert [("children", 6)] * 2 == [(e.kind, e.limit) for e in caught if isinstance(e, LimitExceeded)]
    assert f"{limit} is 6" in caught[0].message
    assert () == result.tool_calls
    assert result == replayed
    assert journal.lines() == replayed.journal.lines()
    assert () == check(journal).problems


@pytest.mark.spec("requirements:X50")
async def test_outer_limit_counts_inner_requests_and_refunds_unstarted_ones(monkeypatch):
    seen = []

    def kid(ctx):
        seen.append(ctx.prompt)
        if not ctx.prompt:
            return
        if ctx.prompt == "cut":
            yield Parallel([AgentCall("kid", "hang") for _ in range(8)], concurrency=1)
        elif ctx.prompt == "hang":
            yield Perform(hang)

    async def hang():
        put_clock_ahead(monkeypatch, 6_000)
        await asyncio.Event().wait()

    def boss(ctx):
        cut = yield AgentCall("kid", "cut")
        rest = yield from Parallel([AgentCall("kid")] * 8)
        try:
            yield AgentCall("kid")
        except LimitExceeded as error:
            return [cut.value.error.kind, len(rest), error.message]

    child = AgentDefinition("kid", handle_steps=kid, spawnable_agents=["kid"], limits=Limits(max_seconds=3_000))
    made = AgentDefinition("boss", spawnable_agents=[child], handle_steps=boss, limits=Limits(max_total_children=10))
    result = await Engine([made], models=ScriptedModel([])).run("boss")

    expected = (
        "the run tree has started 10 children, and max_total_children is 10; raise Limits(max_total_children=...)"
    )
    assert ["seconds", 8, expected] == result.unwrap()
    assert Counter({"": 8, "cut": 1, "hang": 1}) == Counter(seen)


# --- fail_fast --------------------------------------------------------------------------------------------------------


@pytest.mark.spec("reliability:SP05", "requirements:X50")
@pytest.mark.parametrize("how", ["raises", "denied"])
async def test_failing_tool_call_cancels_the_children_beside_it(how):
    closed = []

    @tool
    async def failing() -> str:
        """Fail, when a child is at work."""
        await begun.wait()
        raise ValueError("no")

    begun = asyncio.Event()

    async def hang() -> None:
        begun.set()
        await asyncio.sleep(30)

    def kid(ctx):
        try:
            yield Perform(hang)
        finally:
            closed.append(ctx.prompt)

    def boss(ctx):
        values = yield from Parallel(AgentCall("kid"), ToolCall("failing"), Perform(int), fail_fast=True)
        return [values[0].status.value, values[1].status, values[2]]

    hooks = Hooks(pre_tool=[lambda ctx, call: Decision.deny("no")]) if how == "denied" else None
    journal = MemoryJournal()
    made = engine_of(boss, kid, tools=[failing], hooks=hooks)
    result = await asyncio.wait_for(made.run("boss", journal=journal), 50)
    replayed = await asyncio.wait_for(made.replay(journal), 50)

    assert ["cancelled", "denied" if how == "denied" else "error", 0] == result.unwrap() == replayed.unwrap()
    assert ([] if how == "denied" else [""] * 2) == closed


# --- records ----------------------------------------------------------------------------------------------------------


def in_doubt(journal) -> list[int]:
    history = journal.history()
    return [seq for (path, seq) in history.intents if seq >= 0 and (path, seq) not in history.results]


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("requirements:X50", "replay:J24", "reliability:I11")
@pytest.mark.parametrize(("width", "doubtful"), [(3, 3), (None, 12)])
async def test_member_intent_is_recorded_at_admission(width, doubtful):
    counting = Counting()

    def boss(ctx):
        values = yield from Parallel(
            [Perform(counting.work, str(i), turns=i * 7 % 5) for i in range(12)], concurrency=width
        )
        return [str(v) for v in values]

    made, journal = engine_of(boss), MemoryJournal()
    result = await made.run("boss", journal=journal)
    lines = journal.lines()
    assert journal.lines() == (await made.replay(journal)).journal.lines()
    assert [*range(12)] == [seq for _, seq in journal.history().intents if seq >= 0]

    most = 0
    for cut in range(2, len(lines)):
        left = MemoryJournal(lines[:cut])
        known, unknown = left.history(), in_doubt(left)
        most = max(most, len(unknown))
        counting.done.clear()
        resumed = await made.resume(left)

        sure = {seq for _, seq in known.results if seq >= 0}
        assert sorted(counting.done, key=int) == [str(i) for i in range(12) if i not in {*sure, *unknown}]
        assert [i for i, v in enumerate(resumed.unwrap()) if v != str(i)] == unknown
        assert check(left).problems == ()
    assert doubtful == most
    assert RunStatus.COMPLETED is result.status


@pytest.mark.spec("reliability:I3", "reliability:I2")
async def test_recorded_child_is_not_refused_on_replay_in_any_order():
    """
    Two runs share what the tree may have; which of them comes too late depends on their timing, but not on replay.
    """

    async def wait(turns: int) -> None:
        for _ in range(turns * slow):
            await asyncio.sleep(0)

    def kid(ctx):
        yield Perform(wait, int(ctx.prompt))
        try:
            yield AgentCall("leaf")
        except LimitExceeded:
            return "late"
        return "in time"

    def leaf(ctx):
        return 1
        yield

    def boss(ctx):
        children = yield from Parallel(AgentCall("kid", "20"), AgentCall("kid", "1"))
        return [c.output for c in children]

    kids = AgentDefinition("kid", handle_steps=kid, spawnable_agents=[AgentDefinition("leaf", handle_steps=leaf)])
    made = AgentDefinition("boss", spawnable_agents=[kids], handle_steps=boss, limits=Limits(max_total_children=3))
    engine, journal, slow = Engine([made], models=ScriptedModel([])), MemoryJournal(), 1
    result = await engine.run("boss", journal=journal)

    assert ["late", "in time"] == result.unwrap() == (await engine.replay(journal)).unwrap()
