"""
The engine takes back its own cancellation of a task, and none by others.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest

from stepengine import STEP, AgentDefinition, Ask, Engine, Perform, ToolCall, tool
from stepengine.errors import PerformError
from stepengine.models import ModelReply
from stepengine.runtime.driver import TaskCancellation
from stepengine.testing import ScriptedModel, text


async def wait(cancellation: TaskCancellation) -> None:
    try:
        await asyncio.sleep(60)
    except asyncio.CancelledError:
        cancellation.revoke()


async def drive(cancellation: TaskCancellation, entered: asyncio.Event) -> tuple[bool, int]:
    """
    Return whether the wait was cancelled by others, and how many cancellations the task has afterwards.
    """
    cancellation.attach_current_task()
    entered.set()
    await wait(cancellation)
    is_from_outside = cancellation.is_from_outside
    cancellation.detach_task()
    return is_from_outside, asyncio.current_task().cancelling()


async def start() -> tuple[TaskCancellation, asyncio.Task[tuple[bool, int]]]:
    cancellation, entered = TaskCancellation(), asyncio.Event()
    task = asyncio.create_task(drive(cancellation, entered))
    await entered.wait()
    return cancellation, task


async def test_own_cancellation_is_taken_back():
    cancellation, task = await start()
    cancellation.cancel()
    cancellation.cancel()

    assert (False, 0) == await task


async def test_cancellation_from_outside_stays():
    cancellation, task = await start()
    cancellation.cancel()
    task.cancel()

    assert (True, 1) == await task


async def test_earlier_cancellation_does_not_count():
    cancellation = TaskCancellation()

    async def cancelled_before():
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancellation.attach_current_task()
        return cancellation.is_from_outside

    task = asyncio.create_task(cancelled_before())
    await asyncio.sleep(0)
    task.cancel()

    assert not await task


class Cancels:
    """
    A part of an author that awaits a task that somebody cancelled: a function, a tool, an interactor or a model.
    """

    async def __call__(self, *_: object) -> str:
        task = asyncio.create_task(asyncio.sleep(60))
        task.cancel()
        await task
        return "never"

    ask = __call__

    async def work(self) -> str:
        """Work."""
        return await self()


class CancelledModel(ScriptedModel):
    async def complete(self, request: object) -> ModelReply:
        return text(await Cancels()())


def handle_steps(ctx: Any) -> Any:
    if ctx.prompt == "function":
        with pytest.raises(PerformError):
            yield from Perform(Cancels().work)
    elif ctx.prompt == "tool":
        turn = yield ToolCall("work", {})
        assert turn.tool_result.is_error
    elif ctx.prompt == "interactor":
        with contextlib.suppress(PerformError):
            yield from Ask("Which?")
    else:
        yield STEP
    return "done"


@pytest.mark.spec("reliability:SS12", "reliability:TL01")
@pytest.mark.parametrize("way", ["function", "tool", "interactor", "model"])
@pytest.mark.parametrize("is_late", [False, True])
async def test_run_in_a_cleanup_survives_cancellations_of_its_parts(way: str, is_late: bool) -> None:
    works = tool(Cancels().work, in_thread=False)
    agent = AgentDefinition("lead", model="t/m", tools=[works], handle_steps=handle_steps)
    ends = []

    async def run() -> None:
        async with Engine([agent], models=CancelledModel([]), interactor=Cancels()) as engine:
            ends.append(await engine.run("lead", way))

    async def waits() -> int:
        task = asyncio.current_task()
        assert task is not None
        if is_late:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(60)
        await run()
        return task.cancelling()

    count = await asyncio.create_task(waits())

    assert is_late == count
    assert {"interactor": "suspended", "model": "failed"}.get(way, "completed") == ends[0].status.value


async def test_cancellation_is_scheduled_from_threads_only_while_driven():
    cancellation, task = await start()

    assert await asyncio.to_thread(cancellation.schedule_cancel, cancellation.cancel)
    assert (False, 0) == await task
    assert not cancellation.schedule_cancel(cancellation.cancel)
