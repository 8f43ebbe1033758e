"""
A worker for tests of limits that all workers share: ``python rated.py DB EXECUTOR PROVIDER_URL KEY``.
"""

from __future__ import annotations

import asyncio
import signal
import sys

from stepengine import STEP, AgentDefinition, RateLimit, StepContext
from stepengine.durable import DurableEngine
from stepengine.models import Models, OpenAIChatProvider


def asks(ctx: StepContext):
    said = yield STEP
    return said.text


ASKS = AgentDefinition("asks", model="local/m", handle_steps=asks)


def models(url: str, key: str) -> Models:
    return Models({"local": OpenAIChatProvider("local", base_url=url, api_key=key)})


async def serve(db: str, executor: str, url: str, key: str) -> None:
    rates = {"local": RateLimit(max_concurrency=2)}
    async with DurableEngine(
        [ASKS], models=models(url, key), rate_limits=rates, db=db, executor=executor, release="1", polling=0.1,
        concurrency=8, pricing=None,
    ):  # fmt: skip
        stopped = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
        await stopped.wait()


if __name__ == "__main__":
    asyncio.run(serve(*sys.argv[1:]))
