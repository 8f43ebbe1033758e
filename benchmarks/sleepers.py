"""
What ten thousand sleeping runs cost who wakes them: ``python benchmarks/sleepers.py [RUNS]``.

Records the runs into one SQLite database, lets a waker of its own process rest beside them, then posts messages and measures how long
each run takes from the message to its end.
"""

from __future__ import annotations

import asyncio
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

from stepengine import AgentDefinition, Engine, Receive
from stepengine.engine.waker import Waker, WakeResult
from stepengine.journal import SqliteJournal
from stepengine.journal.sleepers import open_wake_index

REST_SECONDS = 20.0
MESSAGES = 50
EVERY = 1.0


def wait(_: Any) -> Generator[Any, Any, str]:
    """Wait a day for a message."""
    yield from Receive("go", timeout=86_400)
    return "woke"


SLEEPER = AgentDefinition("sleeper", handle_steps=wait)


async def record(place: Path, runs: int) -> float:
    """Record runs that sleep; return the seconds that it took."""
    began = time.perf_counter()
    async with Engine([SLEEPER]) as engine:
        for first in range(0, runs, 200):
            names = range(first, min(first + 200, runs))
            await asyncio.gather(*[engine.run("sleeper", journal=SqliteJournal(place, f"r{n}")) for n in names])
    return time.perf_counter() - began


async def rest(place: Path) -> None:
    """Rest beside the runs, and print what that costs; then wake what is posted."""
    told: asyncio.Queue[WakeResult] = asyncio.Queue()
    async with Engine([SLEEPER]) as engine:
        waker = Waker(place, lambda journal, _: engine.resume(journal), tell=told.put_nowait)
        watching = asyncio.create_task(waker.watch(EVERY))
        await asyncio.sleep(2)
        before = time.process_time()
        await asyncio.sleep(REST_SECONDS)
        used = time.process_time() - before
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(f"at rest: {used / REST_SECONDS:.3%} of a core, {memory:.0f} MiB at most")
        latencies = []
        for n in range(MESSAGES):
            began = time.perf_counter()
            await engine.send_message(SqliteJournal(place, f"r{n * 7}"), "go", n)
            woken = await told.get()
            assert woken.state == "woken", woken
            latencies.append(time.perf_counter() - began)
        watching.cancel()
        await asyncio.wait((watching,))
    median, worst = statistics.median(latencies), max(latencies)
    print(f"from message to end, looking every {EVERY:g} s: median {median:.3f} s, worst {worst:.3f} s")


def main() -> None:
    """Measure."""
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "runs.db"
        took = asyncio.run(record(place, runs))
        print(f"recorded {runs:,} sleeping runs in {took:.1f} s, {place.stat().st_size / 1024 / 1024:.0f} MiB")
        with open_wake_index(place) as index:
            began = time.perf_counter()
            index.rebuild()
            print(f"the index made anew in {time.perf_counter() - began:.1f} s")
        subprocess.run([sys.executable, __file__, "rest", str(place)], check=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["rest"]:
        asyncio.run(rest(Path(sys.argv[2])))
    else:
        main()
