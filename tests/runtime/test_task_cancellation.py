"""
The engine takes back its own cancellation of a task, and none by others.
"""

from __future__ import annotations

import asyncio

from stepengine.runtime.driver import TaskCancellation


async def wait(cancellation: TaskCancellation) -> None:
    try:
        await asyncio.sleep(60)
    except asyncio.CancelledError:
        cancellation.revoke()


async def drive(cancellation: TaskCancellation, entered: asyncio.Event) -> tuple[bool, int]:
    """
    Return whether the wait was cancelled by others, and how many cancellations the task has afterwards.
    """
    cancellation.attach_task()
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
            cancellation.attach_task()
        return cancellation.is_from_outside

    task = asyncio.create_task(cancelled_before())
    await asyncio.sleep(0)
    task.cancel()

    assert not await task


async def test_cancellation_is_scheduled_from_threads_only_while_driven():
    cancellation, task = await start()

    assert await asyncio.to_thread(cancellation.schedule, cancellation.cancel)
    assert (False, 0) == await task
    assert not cancellation.schedule(cancellation.cancel)
