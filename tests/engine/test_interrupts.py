"""
An interrupt with a grace: what cannot happen again comes to its end and is recorded, everything else ends at once.
"""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import attrs
import pytest

from stepengine import (
    AgentCall,
    AgentDefinition,
    Engine,
    Parallel,
    Perform,
    RunStatus,
    Shutdown,
    ToolCall,
    ToolContext,
    call,
    map_agents,
    tool,
)
from stepengine.data.tools import ToolAnnotations
from stepengine.journal import MemoryJournal
from stepengine.journal.mailbox import MailboxMessage
from stepengine.journal.questions import list_effects_in_doubt
from stepengine.testing import ScriptedModel

SECONDS = 50
LONG = 600.0


@attrs.define
class World:
    """
    What effects did, and what lets them come to their end.
    """

    began: list[str] = attrs.field(factory=list)
    ended: list[str] = attrs.field(factory=list)
    saw_cancel: list[bool] = attrs.field(factory=list)
    go_on: threading.Event = attrs.field(factory=threading.Event)

    async def works(self, name: str) -> str:
        self.began.append(name)
        while not self.go_on.is_set():  # noqa: ASYNC110 - a thread sets it, too
            await asyncio.sleep(0)
        self.ended.append(name)
        return f"did {name}"

    def works_in_thread(self, name: str) -> str:
        self.began.append(name)
        assert self.go_on.wait(SECONDS)
        self.ended.append(name)
        return f"did {name}"


@pytest.fixture
def world() -> World:
    return World()


def agents_of(world: World) -> list[AgentDefinition[Any]]:
    @tool(in_thread=False)
    async def write(ctx: ToolContext, name: str) -> str:
        """Write."""
        did = await world.works(name)
        world.saw_cancel.append(ctx.cancelled.is_set())
        return did

    @tool(in_thread=True)
    def write_slowly(name: str) -> str:
        """Write in a thread."""
        return world.works_in_thread(name)

    @tool(annotations=ToolAnnotations(read_only=True))
    async def look(name: str) -> str:
        """Look."""
        return await world.works(name)

    def one(make):
        def handle_steps(ctx):
            did = yield from make()
            yield Perform(len, "what follows does not begin")
            return did

        return handle_steps

    def parent(agent_id: str):
        def handle_steps(ctx):
            return (yield from AgentCall(agent_id, "go"))

        return handle_steps

    def several(ctx):
        results = yield from Parallel(
            ToolCall("write", {"name": "w"}), ToolCall("look", {"name": "l"}), ToolCall("write_slowly", {"name": "t"})
        )
        return [r.text for r in results]

    def family(ctx):
        results = yield from map_agents("tool", ["a", "b"])
        return [r.output for r in results]

    tools = [write, write_slowly, look]
    shapes = {
        "tool": one(lambda: call(write, name="w")),
        "thread": one(lambda: call(write_slowly, name="w")),
        "perform": one(lambda: Perform(world.works, "w")),
        "perform-thread": one(lambda: Perform(world.works_in_thread, "w")),
        "child": parent("tool"),
        "grandchild": parent("child"),
        "several": several,
        "family": family,
    }
    return [
        AgentDefinition(name, model=None, tools=tools, spawnable_agents=["tool", "child"], handle_steps=steps)
        for name, steps in shapes.items()
    ]


OUTPUTS = {
    "several": ["did w", "did l", "did t"],
    "family": ["did w", "did w"],
}


async def holds(condition: Any) -> None:
    async with asyncio.timeout(SECONDS):
        while not condition():  # noqa: ASYNC110 - nobody tells of it
            await asyncio.sleep(0)


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("requirements:X73")
@pytest.mark.parametrize(
    "shape", ["tool", "thread", "perform", "perform-thread", "child", "grandchild", "several", "family"]
)
async def test_effect_under_way_at_interrupt_is_recorded_and_never_repeated(world: World, shape: str):
    journal = MemoryJournal()
    async with Engine(agents_of(world)) as engine:
        handle = engine.start(shape, "go", journal=journal)
        await holds(lambda: len(world.began) == {"several": 3, "family": 2}.get(shape, 1))
        handle.interrupt(grace=LONG)
        await holds(lambda: "l" not in world.began or len(handle.calls_to_finish) == 2)
        assert handle.calls_to_finish
        for _ in range(20):
            await asyncio.sleep(0)
        world.go_on.set()
        async with asyncio.timeout(SECONDS):
            cut = await handle.result()
        done = list(world.ended)
        resumed = await engine.resume(journal)

    assert not any(world.saw_cancel[: len(done)])
    assert sorted(name for name in world.began if name != "l") == sorted(name for name in done if name != "l")
    assert RunStatus.COMPLETED is resumed.status
    assert OUTPUTS.get(shape, "did w") == resumed.output
    assert RunStatus.CANCELLED is cut.status


@pytest.mark.spec("requirements:X73")
@pytest.mark.parametrize("shape", ["tool", "family"])
@pytest.mark.parametrize("end", ["interrupt again", "shutdown", "grace is over"])
async def test_second_interrupt_or_end_of_grace_stops_effects_at_once(world: World, shape: str, end: str):
    journal = MemoryJournal()
    async with Engine(agents_of(world)) as engine:
        handle = engine.start(shape, "go", journal=journal)
        await holds(lambda: world.began)
        handle.interrupt(grace=0.05 if end == "grace is over" else LONG)
        if end == "interrupt again":
            handle.interrupt(grace=LONG)
        elif end == "shutdown":
            handle.send(Shutdown())
        async with asyncio.timeout(SECONDS):
            cut = await handle.result()
        world.go_on.set()

    assert RunStatus.CANCELLED is cut.status
    assert [] == world.ended
    assert list_effects_in_doubt(journal.history())


@pytest.mark.spec("requirements:X73", "waiting:WT2")
@pytest.mark.parametrize("later", ["input", "answer", "result"])
async def test_later_messages_leave_a_posted_cancel_its_grace(world: World, later: str):
    journal = MemoryJournal()
    async with Engine(agents_of(world)) as engine:
        handle = engine.start("tool", "go", journal=journal)
        await holds(lambda: world.began)
        journal.mailbox().send(MailboxMessage(kind="cancel", value="stop"))
        await handle.fetch_mail()
        topic = {"input": "", "answer": "q1", "result": "7"}[later]
        journal.mailbox().send(MailboxMessage(kind=later, value="more", topic=topic))
        await handle.fetch_mail()
        is_finishing = bool(handle.calls_to_finish)
        world.go_on.set()
        async with asyncio.timeout(SECONDS):
            cut = await handle.result()

    assert (True, ["w"], RunStatus.CANCELLED) == (is_finishing, world.ended, cut.status)
    assert 1 == sum("cancelled by a mailbox message" in warning for warning in cut.warnings)
    assert not list_effects_in_doubt(journal.history())


@pytest.mark.spec("requirements:X73")
async def test_interrupt_cuts_a_model_call_and_finishes_concurrent_effects(world: World):
    class Waits(ScriptedModel):
        was_cut = False

        async def stream(self, request):
            world.began.append("model")
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                self.was_cut = True
                raise
            yield

    model = Waits([])

    def both(ctx):
        yield from Parallel(AgentCall("asks", "go"), AgentCall("tool", "go"))

    agents = [
        *agents_of(world),
        AgentDefinition("asks", model="t/m"),
        AgentDefinition("both", model=None, spawnable_agents=["asks", "tool"], handle_steps=both),
    ]
    journal = MemoryJournal()
    async with Engine(agents, models=model) as engine:
        handle = engine.start("both", "go", journal=journal)
        await holds(lambda: {"model", "w"} <= {*world.began})
        assert ("write (1#0)",) == handle.calls_to_finish
        handle.interrupt(grace=LONG)
        await holds(lambda: model.was_cut)
        assert [] == world.ended
        world.go_on.set()
        async with asyncio.timeout(SECONDS):
            await handle.result()

    assert ["w"] == world.ended
    assert [] == list_effects_in_doubt(journal.history())


async def test_interrupt_without_effects_to_spare_ends_the_run_at_once():
    waits = asyncio.Event()

    async def look() -> None:
        waits.set()
        await asyncio.Event().wait()

    def handle_steps(ctx):
        yield Perform.idempotent(look)

    async with Engine([AgentDefinition("a", model=None, handle_steps=handle_steps)]) as engine:
        handle = engine.start("a", "go")
        await waits.wait()
        handle.interrupt(grace=LONG)
        async with asyncio.timeout(SECONDS):
            assert RunStatus.CANCELLED is (await handle.result()).status
