"""
Commits of one journal: one at a time, whoever asks meanwhile shares the next, and nobody waits for one that cannot come.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from stepengine.errors import JournalWriteFailed
from stepengine.journal.store import Commits


class Slow:
    """A writer whose commits wait until they are let go on."""

    def __init__(self) -> None:
        self.begun = 0
        self.goes_on = threading.Semaphore(0)
        self.error: Exception | None = None
        self.tell: Callable[[], object] = lambda: None

    def announce(self) -> None:
        """Nobody is told."""

    def commit(self) -> None:
        self.begun += 1
        with contextlib.suppress(RuntimeError):  # its loop is closed by now
            self.tell()
        self.goes_on.acquire()
        if self.error is not None:
            raise self.error

    def close(self) -> None:
        """Nothing is open."""


@pytest.fixture
def slow() -> Slow:
    return Slow()


@pytest.fixture
def commits(slow: Slow) -> Iterator[Commits]:
    made = Commits(slow)  # type: ignore[arg-type]
    yield made
    slow.goes_on.release(100)
    made.close()


async def begun(slow: Slow) -> None:
    """Wait until a commit is under way."""
    at = asyncio.Event()
    slow.tell = partial(asyncio.get_running_loop().call_soon_threadsafe, at.set)
    if not slow.begun:
        await at.wait()


async def test_commits_during_a_commit_share_the_next_one(slow: Slow, commits: Commits) -> None:
    first = commits.durable()
    await begun(slow)
    later = [commits.durable() for _ in range(5)]
    slow.goes_on.release()
    await first
    assert not any(future.done() for future in later)

    slow.goes_on.release()
    await asyncio.gather(*later)

    assert 2 == slow.begun


async def test_failed_commit_is_reported_to_all_waiters(slow: Slow, commits: Commits) -> None:
    slow.error = JournalWriteFailed("the disk is gone")
    waiting = [commits.durable(), commits.durable()]
    slow.goes_on.release()

    assert [slow.error, slow.error] == await asyncio.gather(*waiting, return_exceptions=True)


@pytest.mark.parametrize("broken", [False, True])
async def test_closing_resolves_waiters_and_releases_the_thread(slow: Slow, commits: Commits, broken: bool) -> None:
    users = Commits._users
    first = commits.durable()
    await begun(slow)
    later = commits.durable()
    commits.close()
    slow.error = JournalWriteFailed("the disk is gone") if broken else None
    slow.goes_on.release(2)

    assert [slow.error] * 2 == await asyncio.gather(first, later, return_exceptions=True)
    assert (2, users) == (slow.begun, Commits._users)
