"""
One side, in a process of its own: ``python -m benchmarks.programs.working ENGINE WAY URL ROUNDS``.

It does the task once to warm up, and then so often, and prints the wall time of each in milliseconds. It ends with an error when the
answer is wrong, or when it did not look up each item once.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

from benchmarks.programs.market import ITEMS, QUESTION, TOTAL, entry

looked: Counter[str] = Counter()


def look_up(item: str) -> dict[str, Any]:
    """Return what is known of an item: its price in euros, where it stands, who delivers it."""
    looked[item] += 1
    return entry(item)


def by_stepengine(way: str, url: str) -> Callable[[], Awaitable[str]]:
    """Return a run of stepengine."""
    from stepengine import AgentDefinition, Engine, Limits, tool
    from stepengine.models import OpenAIChatProvider

    tools: list[Any] = [tool(look_up)]
    if way == "program":
        from stepengine.sandbox import code_mode

        tools = [code_mode(*tools)]
    agent = AgentDefinition("buyer", model="openai_chat/m", tools=tools, limits=Limits(max_steps=100))
    provider = OpenAIChatProvider(api_key="k", base_url=url)
    engine = Engine([agent], models={"openai_chat": provider}, pricing=None)

    async def once() -> str:
        return (await engine.run(agent, QUESTION)).unwrap()

    return once


def by_pydantic_ai(way: str, url: str) -> Callable[[], Awaitable[str]]:
    """Return a run of pydantic-ai, with the code mode of its harness."""
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    more: dict[str, Any] = {}
    if way == "program":
        from pydantic_ai_harness import CodeMode

        more["capabilities"] = [CodeMode()]
    model = OpenAIChatModel("m", provider=OpenAIProvider(base_url=url, api_key="k"))
    agent = Agent(model, tools=[look_up], **more)

    async def once() -> str:
        return (await agent.run(QUESTION)).output

    return once


ENGINES = {"stepengine": by_stepengine, "pydantic_ai": by_pydantic_ai}
PACKAGES = {"stepengine": ("stepengine", "pydantic-monty"), "pydantic_ai": ("pydantic-ai-slim", "pydantic-ai-harness")}


async def spent(once: Callable[[], Awaitable[str]], rounds: int) -> list[float]:
    """Return milliseconds of each round."""
    found = []
    for _ in range(rounds + 1):
        looked.clear()
        start = time.perf_counter()
        answer = await once()
        found.append((time.perf_counter() - start) * 1e3)
        if answer != f"They cost {TOTAL} euros." or looked != Counter(ITEMS):
            msg = f"the work was not done: {answer!r}, {looked.total()} lookups of {len(looked)} items"
            raise SystemExit(msg)
    return found[1:]


def main() -> None:
    """Do what the command line asks for."""
    from importlib.metadata import version

    engine, way, url, rounds = sys.argv[1:]
    once = ENGINES[engine](way, f"{url}/{way.replace(' ', '-')}/v1")
    milliseconds = asyncio.run(spent(once, int(rounds)))
    print(json.dumps({"ms": milliseconds, "versions": {name: version(name) for name in PACKAGES[engine]}}))


if __name__ == "__main__":
    main()
