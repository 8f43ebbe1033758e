"""
Measures who watches, in a fresh process: ``python -m benchmarks.watching_worker PROTOCOL TOKENS PORT``, or ``... steps N``.

The first prints the CPU microseconds that a token of one streamed reply costs each of ``CLIENTS``, one after another, the least of
several replies each; the second those of a step of the run of W1, whose model answers in process, at first while the process knows no key, then while it knows one:

- ``floor`` reads the lines of the response with the HTTP library and takes the text out of each with jiter, nothing else.
- ``run`` is ``Engine.run``, which nobody watches.
- ``observed`` is a run that shows an observer every event.
- ``stream`` is ``Engine.stream``, read to its end.
"""

from __future__ import annotations

import asyncio
import gc
import json
import sys
import time
import urllib.request
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import httpx2
import jiter

from benchmarks.engines.stepengine import Counting, add, provider_of
from benchmarks.loopback import WORD
from stepengine import AgentDefinition, Engine, Limits
from stepengine.events import RunFinished, TextDelta
from stepengine.redaction import GIVEN

REPEATS = 7
KEY = "sk-a-key-as-long-as-those-of-providers-0123456789"
"""Events are kept free of keys that the process knows; a shorter one would be no secret, and cost nothing."""
PATHS = {"openai_chat": "/v1/chat/completions", "anthropic": "/v1/messages"}
Client = Callable[[], Awaitable[str]]


def floor(protocol: str, url: str) -> Client:
    """Return the least code that reads a text."""
    client = httpx2.AsyncClient(timeout=60)

    async def ask() -> str:
        said: list[str] = []
        async with client.stream("POST", f"{url}{PATHS[protocol]}", json={"model": "m", "stream": True}) as response:
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                data: Any = jiter.from_json(line[6:].encode())
                if protocol == "anthropic":
                    text = data["delta"].get("text") if "delta" in data else None
                else:
                    text = data["choices"][0]["delta"].get("content") if data["choices"] else None
                if text:
                    said.append(text)
        return "".join(said)

    return ask


def engine_of(protocol: str, url: str, **more: Any) -> Engine:
    """Return an engine with an agent that answers."""
    agent = AgentDefinition("speaker", model=f"{protocol}/m")
    return Engine(agents=[agent], models={protocol: provider_of(protocol, url, KEY)}, pricing=None, **more)


def run(protocol: str, url: str) -> Client:
    """Return runs that nobody watches."""
    engine = engine_of(protocol, url)

    async def ask() -> str:
        return str((await engine.run("speaker", "speak")).unwrap())

    return ask


def observed(protocol: str, url: str) -> Client:
    """Return runs whose text an observer puts together."""
    said: list[str] = []

    def look(event: object) -> None:
        if type(event) is TextDelta:
            said.append(event.text)

    engine = engine_of(protocol, url, observers=[look])

    async def ask() -> str:
        said.clear()
        (await engine.run("speaker", "speak")).unwrap()
        return "".join(said)

    return ask


def stream(protocol: str, url: str) -> Client:
    """Return runs whose text a reader of the stream puts together."""
    engine = engine_of(protocol, url)

    async def ask() -> str:
        said: list[str] = []
        async for event in engine.stream("speaker", "speak"):
            if type(event) is TextDelta:
                said.append(event.text)
            elif type(event) is RunFinished:
                event.result.unwrap()
        return "".join(said)

    return ask


CLIENTS = {"floor": floor, "run": run, "observed": observed, "stream": stream}


async def measured(protocol: str, url: str, tokens: int, clients: list[str]) -> dict[str, float]:
    """
    Return microseconds a token by client.

    Raises:
        SystemExit: when a client read another text than the server's.
    """
    await asyncio.to_thread(urllib.request.urlopen, f"{url}/speak/{tokens}")
    asks = {name: CLIENTS[name](protocol, url) for name in clients}
    return await least(asks, WORD * tokens, tokens)


async def least(asks: dict[str, Client], wanted: str, count: int) -> dict[str, float]:
    """Return the microseconds of each of *count* parts, by client; the least of several times."""
    found: dict[str, float] = {}
    for turn in range(REPEATS + 1):
        for name, ask in asks.items():
            gc.collect()
            start = time.process_time()
            text = await ask()
            spent = time.process_time() - start
            if text != wanted:
                msg = f"{name} ended with {text[:50]!r} of {len(text)} characters"
                raise SystemExit(msg)
            if turn:
                found[name] = min(found.get(name, spent), spent)
    return {name: spent / count * 1e6 for name, spent in found.items()}


async def steps(count: int) -> dict[str, float]:
    """
    Return microseconds a step by who watches the run.

    Raises:
        SystemExit: when a run ended with another text.
    """
    agent = AgentDefinition("adder", model="counting/model", tools=[add], limits=Limits(max_steps=count + 1))
    plain = Engine([agent], models=Counting(count), pricing=None)
    shown = Engine([agent], models=Counting(count), pricing=None, observers=[lambda _: None])

    async def streamed() -> str:
        async for event in plain.stream("adder", "add"):
            if type(event) is RunFinished:
                return str(event.result.unwrap())
        return ""

    async def ran(engine: Engine) -> str:
        return str((await engine.run("adder", "add")).unwrap())

    asks = {"run": partial(ran, plain), "observed": partial(ran, shown), "stream": streamed}
    found = await least(asks, "done", count)
    # As in every process that calls a provider.
    GIVEN.add(KEY, "KEY")
    with_key = {f"{name}, a key": ask for name, ask in asks.items()}
    return found | await least(with_key, "done", count)


def main() -> None:
    """Measure what the command line asks for."""
    if sys.argv[1] == "steps":
        print(json.dumps(asyncio.run(steps(int(sys.argv[2])))))
        return
    protocol, tokens, port, *clients = sys.argv[1:]
    url = f"http://127.0.0.1:{port}"
    print(json.dumps(asyncio.run(measured(protocol, url, int(tokens), clients or list(CLIENTS)))))


if __name__ == "__main__":
    main()
