"""
Measures one thing in a fresh process and prints it as one JSON line; ``python -m benchmarks.worker KIND ENGINE N``.

KIND ``steps``: CPU microseconds per step of one run of N steps, the best of three after a warm-up, for short runs the median
of many. KIND ``long``: the same with the collector off, for runs whose histories it would walk again and again. KIND ``runs``:
CPU seconds of N concurrent runs of 5 steps, and the memory that they leave behind per run. KIND ``children``: CPU
microseconds of each of N children of one parent. KIND ``plain``, ``step`` and ``call``: CPU microseconds per step of the
machine alone; ENGINE is ``machine``.
"""

from __future__ import annotations

import asyncio
import gc
import importlib
import json
import statistics
import sys
import time
import tracemalloc
from collections.abc import Awaitable, Callable
from typing import Any

REPEATS = 3
SHORT = 100
SHORT_REPEATS = 60
STEPS_PER_RUN = 5


def expected(steps: int) -> int:
    """Return the sum that a run of *steps* steps must give."""
    return sum(range(steps)) + steps


def checked(total: int, steps: int) -> None:
    """Refuse a measurement of work that was not done."""
    if total != expected(steps):
        msg = f"the tool calls add up to {total}, not {expected(steps)}"
        raise SystemExit(msg)


def per_step(run: Callable[[int], Awaitable[int]], steps: int) -> dict[str, Any]:
    """Return CPU microseconds per step."""
    checked(asyncio.run(run(min(steps, 50))), min(steps, 50))  # type: ignore[arg-type]
    if steps < SHORT:
        return {"us_per_step": asyncio.run(warm(run, steps)) / steps * 1e6}
    best = float("inf")
    for _ in range(REPEATS):
        gc.collect()
        start = time.process_time()
        total = asyncio.run(run(steps))  # type: ignore[arg-type]
        best = min(best, time.process_time() - start)
        checked(total, steps)
    return {"us_per_step": best / steps * 1e6}


async def warm(run: Callable[[int], Awaitable[int]], steps: int) -> float:
    """Return the median CPU seconds of short runs, one after another in one loop, as a server has them."""
    spent = []
    for _ in range(SHORT_REPEATS):
        start = time.process_time()
        total = await run(steps)
        spent.append(time.process_time() - start)
        checked(total, steps)
    return statistics.median(spent)


def concurrent(run: Callable[[int], Awaitable[int]], runs: int) -> dict[str, Any]:
    """Return CPU seconds of concurrent runs."""

    async def all_runs(count: int) -> None:
        for total in await asyncio.gather(*(run(STEPS_PER_RUN) for _ in range(count))):
            checked(total, STEPS_PER_RUN)

    asyncio.run(all_runs(20))
    best = float("inf")
    for _ in range(REPEATS):
        gc.collect()
        start = time.process_time()
        asyncio.run(all_runs(runs))
        best = min(best, time.process_time() - start)
    return {"cpu_seconds": best}


def retained(module: Any, runs: int) -> dict[str, Any]:
    """Return the bytes that one kept result of a 5-step run holds."""

    async def keep() -> list[Any]:
        return [await module.result_of(STEPS_PER_RUN) for _ in range(runs)]

    asyncio.run(keep())
    gc.collect()
    tracemalloc.start()
    kept = asyncio.run(keep())
    gc.collect()
    size = tracemalloc.get_traced_memory()[0]
    return {"bytes_per_run": size / len(kept)}


def main() -> None:
    """Measure what the command line asks for."""
    kind, engine, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
    module = importlib.import_module(f"benchmarks.engines.{engine}")
    if kind == "steps":
        measured = per_step(module.run, count)
    elif kind == "long":
        gc.disable()
        measured = per_step(module.run, count)
    elif kind == "children":
        measured = {"us_per_child": asyncio.run(module.children(count)) / count * 1e6}
    elif kind in ("plain", "step", "call"):
        measured = {"us_per_step": module.cost(kind, count) / count * 1e6}
    elif kind == "runs":
        measured = concurrent(module.run, count)
    else:
        measured = retained(module, count)
    print(json.dumps(measured))


if __name__ == "__main__":
    main()
