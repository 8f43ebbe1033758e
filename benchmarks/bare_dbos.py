"""
A worker that somebody wrote by hand on DBOS, without us: ``python -m benchmarks.bare_dbos --db URL``.

It is the floor of durable runs: one queue, one workflow, one step for each call of an ordinary tool, everything as DBOS's own pages show
it. It says ``serves`` when it is ready, then its CPU seconds whenever a line comes in, and ends with its standard input. Runs are put on
its queue by ``benchmarks.durable``, so that what is measured is a whole worker and nothing else.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from typing import Any

from dbos import DBOS, DBOSConfig

APP, QUEUE, WORKFLOW = "bench-bare", "bench", "bench.loop"


@DBOS.step()
async def look_up(number: int, size: int, seconds: float) -> dict[str, Any]:
    """Do what ours does in ``benchmarks.durable``."""
    if seconds:
        await asyncio.sleep(seconds)
    return {"number": number, "payload": os.urandom(size // 2).hex()}


@DBOS.workflow(name=WORKFLOW)
async def loop(count: int, size: int, seconds: float) -> str:
    """Call the tool so often."""
    for number in range(count):
        await look_up(number, size, seconds)
    return "done"


async def serve(db: str, executor: str, concurrency: int) -> None:
    """Be a worker until nobody listens any more."""
    config: DBOSConfig = {
        "name": APP,
        "system_database_url": db,
        "executor_id": executor,
        "application_version": "1",
        "log_level": "WARNING",
    }
    DBOS(config=config)
    DBOS.listen_queues([QUEUE])
    DBOS.launch()
    await DBOS.register_queue_async(QUEUE, worker_concurrency=concurrency)
    print("serves", flush=True)
    async for _ in lines():
        print(time.process_time(), flush=True)
    os._exit(0)


async def lines() -> Any:
    """Give what comes in, a line at a time."""
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        yield line


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bare_dbos")
    parser.add_argument("--db", required=True)
    parser.add_argument("--executor", required=True)
    parser.add_argument("--concurrency", type=int, default=500)
    given = parser.parse_args()
    asyncio.run(serve(given.db, given.executor, given.concurrency))
