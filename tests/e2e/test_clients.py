"""
HTTP clients of an engine: how many there are, that they end with it, and what an engine that nobody closed leaves.
"""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import attrs
import httpx2
import pytest

from stepengine import AgentDefinition, Engine
from stepengine.models import OpenAIChatProvider
from tests.servers import Quiet, served


@attrs.define
class KeepsOpen:
    """
    A server of this machine that says "hi", and keeps its connections open until the client closes them.
    """

    url: str
    models: list[str] = attrs.field(factory=list)
    opened: int = 0
    open: int = 0

    def all_closed(self) -> bool:
        deadline = time.monotonic() + 50
        while self.open and time.monotonic() < deadline:
            time.sleep(0.01)
        return not self.open


REPLY = {
    "id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "local",
    "choices": [{"index": 0, "delta": {"role": "assistant", "content": "hi"}, "finish_reason": "stop"}],
}  # fmt: skip


@pytest.fixture
def servers() -> Iterator[list[KeepsOpen]]:
    """Two of them."""

    def serve() -> KeepsOpen:
        class Answers(Quiet):
            protocol_version = "HTTP/1.1"
            timeout = 30

            def setup(self) -> None:
                super().setup()
                with lock:
                    found.opened += 1
                    found.open += 1

            def finish(self) -> None:
                super().finish()
                with lock:
                    found.open -= 1

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                found.models.append(body["model"])
                stream = f"data: {json.dumps(REPLY)}\n\ndata: [DONE]\n\n".encode()
                self.send_response(200)
                self.send_header("content-type", "text/event-stream")
                self.send_header("content-length", str(len(stream)))
                self.end_headers()
                self.wfile.write(stream)

        lock = threading.Lock()
        found = KeepsOpen(f"{running.enter_context(served(Answers))}/v1")
        return found

    with ExitStack() as running:
        yield [serve(), serve()]


def agent(name: str) -> AgentDefinition[Any]:
    return AgentDefinition(name.replace("/", "-"), model=name)


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("reliability:RS11")
async def test_an_engine_has_one_client_per_provider_and_closes_it(
    servers: list[KeepsOpen], monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    Whatever the model, the agent and the run; another base URL has another client, and so has another key.
    """
    made: list[httpx2.AsyncClient] = []

    class Counted(httpx2.AsyncClient):
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            made.append(self)

    monkeypatch.setattr(httpx2, "AsyncClient", Counted)
    here, there = servers
    models = {name: OpenAIChatProvider(name, base_url=s.url) for name, s in (("here", here), ("there", there))}
    models["other"] = OpenAIChatProvider("other", "another-key-0123456789", base_url=there.url)
    async with Engine(models=models) as engine:
        asked = ("here/a", "here/b", "here/a", "there/a", "other/a", "other/b")
        said = [(await engine.run(agent(name), "go")).text for name in asked]
        clients, were_closed = len(made), [client.is_closed for client in made]
        opened, still_open = (here.opened, there.opened), (here.open, there.open)

    assert ["hi"] * 6 == said
    assert (["a", "b", "a"], ["a", "a", "b"]) == (here.models, there.models)
    assert (3, [False] * 3) == (clients, were_closed)
    assert ((1, 2), (1, 2)) == (opened, still_open)
    assert [True] * 3 == [client.is_closed for client in made]
    assert here.all_closed()
    assert there.all_closed()


HEAD = """
import asyncio, gc, os, sys, time
from stepengine import AgentDefinition, Engine
from stepengine.models import OpenAIChatProvider

def sockets():
    found = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            found += os.readlink(f"/proc/self/fd/{name}").startswith("socket:")
        except OSError:
            pass
    return found

def are_back_to(before):
    gc.collect()
    deadline = time.monotonic() + 50
    while sockets() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    return sockets() <= before

made = lambda: Engine(models=OpenAIChatProvider("local", base_url=sys.argv[1]))
agent = AgentDefinition("x", model="local/m")
"""
WAYS = {
    "sync, until the interpreter ends": """
        engine = made()
        print(engine.run_sync(agent, "go").text, True)
    """,
    "sync, collected": """
        before, engine = sockets(), made()
        said = engine.run_sync(agent, "go").text
        assert sockets() > before
        del engine
        print(said, are_back_to(before))
    """,
    "async, its event loop is over": """
        async def main():
            return (await engine.run(agent, "go")).text

        engine = made()
        print(asyncio.run(main()), True)
    """,
    "async, collected after its event loop": """
        async def main():
            return (await engine.run(agent, "go")).text

        before, engine = sockets(), made()
        said = asyncio.run(main())
        assert sockets() > before
        del engine
        print(said, are_back_to(before))
    """,
    "async, collected while its event loop runs": """
        async def main():
            before, engine = sockets(), made()
            said = (await engine.run(agent, "go")).text
            assert sockets() > before
            del engine
            gc.collect()
            for _ in range(5_000):
                await asyncio.sleep(0.01)
                if sockets() <= before:
                    break
            print(said, are_back_to(before))

        asyncio.run(main())
    """,
}


TOLD = (
    "ResourceWarning: the connections of <OpenAIChatProvider 'local'> were never closed; use `async with Engine(...)`"
)


@pytest.mark.deep
@pytest.mark.spec("reliability:RS11")
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("way", WAYS)
def test_an_unclosed_engine_warns_once_and_closes_its_connections(
    stepengine: Any, servers: list[KeepsOpen], way: str
) -> None:
    """
    One warning says what to do; those of each connection are Python's own.
    """
    done = subprocess.run(
        [sys.executable, "-W", "always::ResourceWarning", "-c", HEAD + textwrap.dedent(WAYS[way]), servers[0].url],
        env=attrs.evolve(stepengine, network=True).environment, capture_output=True, text=True, check=False, timeout=50,
    )  # fmt: skip

    assert (0, "hi True\n") == (done.returncode, done.stdout), done.stderr
    assert "ResourceWarning: unclosed transport" in done.stderr
    assert 1 == done.stderr.count(TOLD)
    for word in ("Event loop is closed", "Traceback", "Exception ignored", "was destroyed"):
        assert word not in done.stderr
    assert servers[0].all_closed()


CLOSED = {
    "with": """
        with made() as engine:
            print(engine.run_sync(agent, "go").text, True)
    """,
    "async with": """
        async def main():
            async with made() as engine:
                print((await engine.run(agent, "go")).text, True)

        asyncio.run(main())
    """,
    "shared": """
        provider = OpenAIChatProvider("local", base_url=sys.argv[1])
        for _ in range(2):
            said = Engine(models=provider).run_sync(agent, "go").text
            gc.collect()
        with Engine(models=provider):
            print(said, True)
    """,
}


@pytest.mark.deep
@pytest.mark.spec("reliability:RS11")
@pytest.mark.parametrize("way", CLOSED)
def test_a_closed_or_shared_provider_causes_no_warning(stepengine: Any, servers: list[KeepsOpen], way: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "always::ResourceWarning", "-c", HEAD + textwrap.dedent(CLOSED[way]), servers[0].url],
        env=attrs.evolve(stepengine, network=True).environment, capture_output=True, text=True, check=False, timeout=50,
    )  # fmt: skip

    assert (0, "hi True\n") == (done.returncode, done.stdout), done.stderr
    assert "were never closed" not in done.stderr
