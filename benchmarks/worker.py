"""
Measures one thing in a fresh process and prints it as one JSON line; ``python -m benchmarks.worker KIND ENGINE SIZES CAP``.

KIND ``steps``: CPU microseconds per step of one run of each of the SIZES, the least of three after a warm-up, for short runs the
median of many. KIND ``long``: the same with the collector off, for runs whose histories it would walk again and again. KIND
``runs``: CPU milliseconds of each of N concurrent runs of 5 steps. KIND ``memory``: the bytes that each of N kept results holds.
KIND ``children`` and ``alone``: CPU microseconds of each of N children of one parent, and of each of N runs without one. KIND ``plain``,
``step`` and ``call``: CPU microseconds per step of the machine alone, ``floor`` that of a bare generator; ENGINE is ``machine``. A size is left out where one run
would take more than CAP seconds, by what the size before it took.
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
from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.engines import Run, checked

REPEATS = 3
LONG = 1.0
"""Seconds from which a run is measured once."""

SHORT = 100
SHORT_REPEATS = 300
SHORT_SECONDS = 0.7
"""Short runs are repeated so often, or for so many seconds."""

STEPS_PER_RUN = 5
UNKNOWN = 0.5
"""Seconds below which a cost says little about the next size: much of it may be there at any size."""


def sizes_within(sizes: list[int], spent: Mapping[int, float], cap: float, *, power: int = 2) -> Iterator[int]:
    """Give the sizes whose runs take at most *cap* seconds, if the cost grows with that power of the size, at worst."""
    for size in sizes:
        if spent:
            last = max(spent)
            if spent[last] > UNKNOWN and spent[last] * (size / last) ** power > cap:
                return
        yield size


async def timed(run: Run, steps: int) -> float:
    """Return the CPU seconds of one run, whose work is looked at afterwards."""
    start = time.process_time()
    told = await run(steps)
    spent = time.process_time() - start
    checked(told(), steps)
    return spent


def per_step(run: Run, steps: int) -> float:
    """Return the CPU seconds of a run."""
    if steps < SHORT:
        return asyncio.run(warm(run, steps))
    spent = []
    while len(spent) < REPEATS and (not spent or spent[0] < LONG):
        gc.collect()
        spent.append(asyncio.run(timed(run, steps)))
    return min(spent)


async def warm(run: Run, steps: int) -> float:
    """Return the median CPU seconds of short runs, one after another in one loop, as a server has them."""
    spent: list[float] = []
    while len(spent) < SHORT_REPEATS and (len(spent) < REPEATS or sum(spent) < SHORT_SECONDS):
        spent.append(await timed(run, steps))
    return statistics.median(spent)


def steps(run: Run, sizes: list[int], cap: float) -> dict[int, float]:
    """Return CPU microseconds per step by size."""
    asyncio.run(timed(run, min(sizes[0], 50)))
    spent: dict[int, float] = {}
    for size in sizes_within(sizes, spent, cap):
        spent[size] = per_step(run, size)
    return {size: seconds / size * 1e6 for size, seconds in spent.items()}


def runs(run: Run, sizes: list[int], cap: float) -> dict[int, float]:
    """Return CPU milliseconds of each of so many concurrent runs."""

    async def all_runs(count: int) -> float:
        start = time.process_time()
        told = await asyncio.gather(*(run(STEPS_PER_RUN) for _ in range(count)))
        spent = time.process_time() - start
        for one in told:
            checked(one(), STEPS_PER_RUN)
        return spent

    asyncio.run(all_runs(2))
    spent: dict[int, float] = {}
    for size in sizes_within(sizes, spent, cap, power=1):
        taken: list[float] = []
        while len(taken) < REPEATS and (not taken or taken[0] < LONG):
            gc.collect()
            taken.append(asyncio.run(all_runs(size)))
        spent[size] = min(taken)
    return {size: seconds / size * 1e3 for size, seconds in spent.items()}


def memory(module: Any, count: int) -> float:
    """Return the bytes that one kept result of a 5-step run holds."""

    async def keep() -> list[Any]:
        return [await module.result_of(STEPS_PER_RUN) for _ in range(count)]

    asyncio.run(keep())
    gc.collect()
    tracemalloc.start()
    kept = asyncio.run(keep())
    gc.collect()
    return tracemalloc.get_traced_memory()[0] / len(kept)


def measured(kind: str, module: Any, sizes: list[int], cap: float) -> dict[int, float]:
    """Return what is asked for, by size."""
    if kind == "long":
        gc.disable()
    match kind:
        case "steps" | "long":
            return steps(module.run, sizes, cap)
        case "runs":
            return runs(module.run, sizes, cap)
        case "children" | "alone":
            return {size: asyncio.run(getattr(module, kind)(size)) / size * 1e6 for size in sizes}
        case "memory":
            return {size: memory(module, size) for size in sizes}
        case _:
            return {size: module.cost(kind, size) / size * 1e6 for size in sizes}


def main() -> None:
    """Measure what the command line asks for."""
    kind, engine, sizes, cap = sys.argv[1:]
    module = importlib.import_module(f"benchmarks.engines.{engine}")
    print(json.dumps(measured(kind, module, [int(size) for size in sizes.split(",")], float(cap))))


if __name__ == "__main__":
    main()
