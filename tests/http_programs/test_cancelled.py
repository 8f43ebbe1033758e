"""
A request that a program gives up is given up again in a replay, and what comes after it is played.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from stepengine.testing.cassette import Cassette
from tests.servers import NO_TLS

from .conftest import record_and_replay
from .odd_server import OddServer

SECONDS = 0.05


async def with_httpx(module: Any, base: str) -> list[str]:
    async with module.AsyncClient(verify=NO_TLS) as client:
        return [await give_up(client.get(f"{base}/never")), (await client.get(f"{base}/text")).text]


async def with_aiohttp(module: Any, base: str) -> list[str]:
    async with module.ClientSession() as session:
        given_up = await give_up(session.get(f"{base}/never"))
        async with session.get(f"{base}/text") as response:
            return [given_up, await response.text()]


async def give_up(request: Any) -> str:
    try:
        await asyncio.wait_for(request, SECONDS)
    except TimeoutError:
        return "given up"
    return "answered"


@pytest.mark.spec("replay:C7")
@pytest.mark.parametrize(
    ("library", "program"), [("httpx2", with_httpx), ("httpx", with_httpx), ("aiohttp", with_aiohttp)]
)
def test_a_cancelled_request_replays_as_cancelled(
    library: str, program: Any, server: OddServer, tmp_path: Path
) -> None:
    module = pytest.importorskip(library)
    base = f"http://127.0.0.1:{server.server_port}"
    recorded, replayed = record_and_replay(tmp_path / "c.yaml", lambda: asyncio.run(program(module, base)))

    assert "given up" == recorded[0]
    assert recorded == replayed


@pytest.mark.spec("replay:C7")
def test_a_redirect_with_unread_body_is_recorded_without_error(server: OddServer, tmp_path: Path) -> None:
    aiohttp = pytest.importorskip("aiohttp")

    async def follow() -> list[object]:
        base = f"http://127.0.0.1:{server.server_port}"
        async with aiohttp.ClientSession() as session, session.get(f"{base}/redirect-unfinished") as response:
            return [len(response.history), response.status, await response.text()]

    recorded, replayed = record_and_replay(tmp_path / "c.yaml", lambda: asyncio.run(follow()))

    assert recorded == replayed
    assert [(302, None), (200, None)] == [
        (one.response.status, one.error) for one in Cassette.load(tmp_path / "c.yaml").interactions
    ]
