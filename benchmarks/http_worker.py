"""
Measures HTTP steps of one client in a fresh process: ``python -m benchmarks.http_worker KIND CLIENT PROTOCOL SIZES PORT CAP``.

KIND ``steps``, for W3: CPU milliseconds of the client per step of one run of each of the SIZES, against the loopback server on
PORT. KIND ``behind``, for W6: CPU milliseconds of one call behind that many messages. CLIENT is a module of the engines, and
``stepengine_run`` the second way of ``stepengine`` in W6. A size is left out where a run would take more than CAP seconds.
"""

from __future__ import annotations

import asyncio
import gc
import importlib
import inspect
import json
import sys
import time
import urllib.request
from typing import Any

from benchmarks.engines import checked
from benchmarks.worker import sizes_within

SHORT = 1.0
REPEATS = 3
"""How often a run that takes less than ``SHORT`` seconds is measured; the least counts."""

CALLS = 9


def served(url: str, path: str) -> int:
    """Ask the server for something, and return the number that it says."""
    with urllib.request.urlopen(f"{url}/{path}") as reply:
        return int(reply.read())


def bound(function: Any, url: str, protocol: str, *more: Any) -> Any:
    """Call what makes runs, with the protocol where it speaks several."""
    named = {"protocol": protocol} if "protocol" in inspect.signature(function).parameters else {}
    return function(url, *more, **named)


def steps(module: Any, protocol: str, url: str) -> Any:
    """Return what measures a run of N steps; one client serves all of them, as in an application."""
    run = bound(module.over_http, url, protocol)
    final = getattr(module, "FINAL", "")

    async def once(count: int) -> float:
        await asyncio.to_thread(served, url, f"reset/{count}/{final}")
        gc.collect()
        start = time.process_time()
        told = await run(count)
        spent = time.process_time() - start
        calls = await asyncio.to_thread(served, url, "count")
        checked(told()._replace(calls=calls), count)
        return spent

    async def least(count: int) -> float:
        first = await once(count)
        return min([first, *[await once(count) for _ in range(REPEATS - 1 if first < SHORT else 0)]])

    return once, least


def behind(module: Any, client: str, protocol: str, url: str) -> Any:
    """Return what measures a call behind N messages."""
    make = module.run_behind if client == "stepengine_run" else module.behind
    final = getattr(module, "FINAL", "")

    async def least(count: int) -> float:
        await asyncio.to_thread(served, url, f"reset/0/{final}")
        ask, spent = bound(make, url, protocol, count), []
        gc.collect()
        for _ in range(CALLS + 1):
            start = time.process_time()
            text = await ask()
            spent.append(time.process_time() - start)
            if text != "done":
                msg = f"the call of {client} behind {count} messages ended with {text!r}"
                raise SystemExit(msg)
        calls = await asyncio.to_thread(served, url, "count")
        if calls != CALLS + 1:
            msg = f"{client} made {calls} calls instead of {CALLS + 1}"
            raise SystemExit(msg)
        return min(spent[1:])

    return least


async def measured(
    kind: str, client: str, protocol: str, url: str, *, sizes: list[int], cap: float
) -> dict[int, float]:
    """Return milliseconds by size."""
    module = importlib.import_module(f"benchmarks.engines.{client.removesuffix('_run')}")
    found, spent = {}, {}
    if kind == "steps":
        once, least = steps(module, protocol, url)
        await once(5)
    else:
        least = behind(module, client, protocol, url)
    for size in sizes_within(sizes, spent, cap, power=2 if kind == "steps" else 1):
        spent[size] = await least(size)
        found[size] = spent[size] / (size if kind == "steps" else 1) * 1e3
    return found


def main() -> None:
    """Measure what the command line asks for."""
    kind, client, protocol, sizes, port, cap = sys.argv[1:]
    counts = [int(size) for size in sizes.split(",")]
    url = f"http://127.0.0.1:{port}"
    print(json.dumps(asyncio.run(measured(kind, client, protocol, url, sizes=counts, cap=float(cap)))))


if __name__ == "__main__":
    main()
