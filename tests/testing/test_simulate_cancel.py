"""
Runs on the real engine that are cancelled at every event, by every means (I12): how they end, what is left, how they go on.
"""

from __future__ import annotations

import asyncio

import pytest

from stepengine.data.events import RunFinished
from stepengine.data.state import RunStatus
from stepengine.data.wire import to_dicts
from stepengine.journal import MemoryJournal, check
from stepengine.testing.invariants import find_pairing_problem
from tests.testing.stages import CAST, RUN_ID, Stage

PATIENCE = 30
"""
Seconds within which everything of a cancelled run must have ended.
"""


async def cancelled(agent, journal, at, how):
    """
    Run until event number *at*, then cancel; return stage, result and whether the caller's task was cancelled.
    """
    seen, ended = [], []
    before = asyncio.all_tasks()
    stop = asyncio.Event()

    def observer(event):
        seen.append(event)
        if len(seen) - 1 == at:
            cancel()
        if isinstance(event, RunFinished):
            ended.append(event.result)

    def cancel():
        stop.set()
        if how == "interrupt":
            handle.interrupt()
        elif how == "task":
            task.cancel()

    async with Stage(agent, observers=[observer]) as stage:
        raised = False
        if how == "task":
            task = asyncio.create_task(stage.run(agent, "go", journal=journal))
            await asyncio.wait([task], timeout=PATIENCE)
            raised = task.cancelled()
        else:
            handle = stage.start(agent, "go", journal=journal)
            result = asyncio.create_task(handle.result())
            if how == "shutdown":
                stopped = asyncio.create_task(stop.wait())
                await asyncio.wait([stopped, result], timeout=PATIENCE, return_when=asyncio.FIRST_COMPLETED)
                stopped.cancel()
                await handle.shutdown()
            await asyncio.wait([result], timeout=PATIENCE)
        await asyncio.sleep(0)
        assert asyncio.all_tasks() <= before
    return stage, ended, raised, len(seen)


async def undisturbed(agent):
    journal = MemoryJournal()
    _, (result,), _, events = await cancelled(agent, journal, -1, "interrupt")
    return result, events


@pytest.mark.deep
@pytest.mark.anyio
@pytest.mark.spec("reliability:I12", "reliability:I1", "reliability:R10")
@pytest.mark.parametrize("how", ["interrupt", "task", "shutdown"])
@pytest.mark.parametrize("name", ["careful", "batching", "leading", "root"])
async def test_a_run_cancelled_at_any_event_ends_and_resumes(name, how):
    agent = CAST[name]
    expected, events = await undisturbed(agent)
    statuses = set()
    for at in range(events):
        journal = MemoryJournal()
        stage, (result,), raised, _ = await cancelled(agent, journal, at, how)
        statuses.add(result.status)
        assert result.status in (RunStatus.CANCELLED, expected.status)
        # A cancelled task raises, whatever the run came to; one that had ended before it was cancelled does not.
        assert how != "task" or raised or at == events - 1
        assert find_pairing_problem(result.state.message_history) is None
        assert find_pairing_problem(result.state.view) is None
        assert result.usage.requests == stage.deeds.requests
        assert check(journal).problems == ()
        if result.status is RunStatus.CANCELLED:
            await goes_on(agent, journal, expected)
        else:
            assert told(result) == told(expected)
    assert {RunStatus.CANCELLED, expected.status} == statuses


async def goes_on(agent, journal, expected):
    """
    Resume a cancelled run: it comes to its end, with what it had, and where nothing is in doubt to the same end.
    """
    before = MemoryJournal(journal.lines()).history()
    async with Stage(agent) as stage:
        result = await stage.resume(journal, agent=agent)
    assert not {*before.results} & {*stage.deeds.begun}
    assert RunStatus.CANCELLED is not result.status
    assert find_pairing_problem(result.state.message_history) is None
    if "unknown_outcome" not in repr(MemoryJournal(journal.lines()).lines()):
        assert told(result) == told(expected)


def told(result):
    # Not its output, which is also its text: "batching" returns a random number, and each run has a seed of its own.
    return result.status, RUN_ID.sub("", str(to_dicts(result.state.message_history)))
