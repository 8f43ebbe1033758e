"""
`fail_fast`: one child that fails ends its siblings, and a replay ends them where they ended.
"""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from stepengine import AgentCall, AgentDefinition, Engine, Limits, Parallel, Perform, RunStatus
from stepengine.journal import MemoryJournal, check
from stepengine.testing import ScriptedModel


def empty() -> ScriptedModel:
    return ScriptedModel([])


class Nursery:
    """
    Eight children, of which one fails while some work, some hang, and some have not begun.
    """

    def __init__(self, fail: int = 1, *, replayed: bool = False) -> None:
        self.done: list[str] = []
        self.closed: list[str] = []
        self.replayed = replayed
        self.fail = fail
        self.early = asyncio.Event()

    async def after_the_first(self) -> None:
        await self.early.wait()

    async def work(self, name: str, seconds: float) -> str:
        assert not self.replayed, name
        self.done.append(name)
        await asyncio.sleep(seconds)
        return name

    def kid(self, ctx):
        index = int(ctx.prompt)
        try:
            yield from Perform(self.work, f"{index} begins", 0)
            if index == self.fail:
                yield from Perform(self.after_the_first)
                raise RuntimeError("broke")
            if index == 0:
                self.early.set()
                return "early"
            yield from Perform(self.work, f"{index} hangs", 30)
        finally:
            self.closed.append(ctx.prompt)

    def boss(self, ctx):
        calls = [AgentCall("kid", str(i)) for i in range(8)]
        children = yield Parallel(calls, fail_fast=True)
        return [[c.agent_id, c.status.value, c.error.message if c.error else ""] for c in children.value]

    def engine(self) -> Engine:
        kid = AgentDefinition("kid", handle_steps=self.kid)
        boss = AgentDefinition("boss", spawnable_agents=[kid], handle_steps=self.boss)
        return Engine([boss], models=empty(), limits=Limits(max_concurrent_children=4))


@pytest.mark.spec("reliability:SP05", "generator-contract:L6")
async def test_fail_fast_cancels_and_marks_siblings_live_and_on_replay():
    live, journal = Nursery(), MemoryJournal()
    result = await asyncio.wait_for(live.engine().run("boss", journal=journal), 50)
    states = [status for _, status, _ in result.output]

    assert RunStatus.COMPLETED is result.status
    assert states[0] == "completed"
    assert states[1] == "failed"
    assert ["cancelled"] * 6 == states[2:]
    assert ["kid"] * 8 == [agent for agent, _, _ in result.output]
    assert 1 <= sum("before it started" in why for _, _, why in result.output)
    assert Counter(live.closed) == Counter({p for p, c in zip("01234567", result.children, strict=True) if c.run_id})
    assert check(journal).problems == ()

    for _ in range(3):
        again = Nursery(replayed=True)
        replayed = await asyncio.wait_for(again.engine().replay(journal), 50)
        assert (result.output, result.children) == (replayed.output, replayed.children)


@pytest.mark.spec("reliability:SP05")
async def test_without_fail_fast_the_siblings_finish():
    class Patient(Nursery):
        async def work(self, name: str, seconds: float) -> str:
            return await super().work(name, 0)

        def boss(self, ctx):
            children = yield Parallel([AgentCall("kid", str(i)) for i in range(8)])
            return [c.status.value for c in children.value]

    result = await Patient().engine().run("boss")

    assert ["completed", "failed", *["completed"] * 6] == result.output


class Nested:
    """
    A group in which one waits for a child that hangs, and one had a group of its own that failed before.
    """

    def __init__(self) -> None:
        self.closed: list[str] = []
        self.states: list[list[str]] = []
        self.hanging = 0
        self.two, self.four = asyncio.Event(), asyncio.Event()

    async def hang(self) -> None:
        self.hanging += 1
        if self.hanging == 2:
            self.two.set()
        if self.hanging == 4:
            self.four.set()
        await asyncio.sleep(30)

    async def until(self, hanging: int) -> None:
        await (self.two if hanging == 2 else self.four).wait()

    def leaf(self, ctx):
        try:
            yield from Perform(self.hang)
        finally:
            self.closed.append("leaf")

    def middle(self, ctx):
        try:
            yield AgentCall("leaf")
        finally:
            self.closed.append("middle")

    def broken(self, ctx):
        yield from Perform(self.until, 4)
        raise RuntimeError("broke")

    def inner(self, ctx):
        yield from Perform(self.until, 2)
        raise RuntimeError("inner broke")

    def nested(self, ctx):
        children = yield Parallel(AgentCall("leaf"), AgentCall("inner"), fail_fast=True)
        self.states.append([c.status.value for c in children.value])
        yield Parallel(AgentCall("leaf"), AgentCall("leaf"), fail_fast=True)

    def boss(self, ctx):
        calls = [AgentCall(name) for name in ("middle", "nested", "broken")]
        children = yield Parallel(*calls, fail_fast=True)
        return [c.status.value for c in children.value]

    def engine(self) -> Engine:
        leaf = AgentDefinition("leaf", handle_steps=self.leaf)
        inner = AgentDefinition("inner", handle_steps=self.inner)
        children = [
            AgentDefinition("middle", handle_steps=self.middle, spawnable_agents=[leaf]),
            AgentDefinition("nested", handle_steps=self.nested, spawnable_agents=[leaf, inner]),
            AgentDefinition("broken", handle_steps=self.broken),
        ]
        return Engine([AgentDefinition("boss", spawnable_agents=children, handle_steps=self.boss)], models=empty())


@pytest.mark.spec("reliability:SP05", "reliability:I12")
async def test_sibling_waiting_for_its_children_is_cancelled_with_them():
    live, journal = Nested(), MemoryJournal()
    result = await asyncio.wait_for(live.engine().run("boss", journal=journal), 50)

    assert ["cancelled", "cancelled", "failed"] == result.output
    assert [["cancelled", "failed"]] == live.states
    assert Counter({"leaf": 4, "middle": 1}) == Counter(live.closed)
    assert check(journal).problems == ()
    replayed = await asyncio.wait_for(Nested().engine().replay(journal), 50)
    assert (result.output, result.children) == (replayed.output, replayed.children)
