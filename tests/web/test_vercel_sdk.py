"""
The AI SDK itself, in three versions, reads our answers and says what a person said: none of its own checks refuses anything.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from stepengine.adapters.vercel import sse, vercel

from .scenes import SCENES, engine

COUNTERPARTS = (
    ("npm:ai", "5.0.277", "works", "transport and stream reader with every kind of run"),
    ("npm:ai", "6.0.326", "works", "transport and stream reader with every kind of run"),
    ("npm:ai", "7.0.173", "works", "transport and stream reader with every kind of run"),
)
"""Whose program is used here: package, version that was seen, what came of it, what is covered."""
VERSIONS = (5, 6, 7)
pytestmark = pytest.mark.deep


async def read(events: Any, version: int, packages: Path, message: Any = None) -> tuple[Any, list[str]]:
    """
    Return the message that a page comes to, and what it complains of.
    """
    body = "".join([line async for line in sse(vercel(events, message_id="m1", version=version))])
    given = {"root": str(packages), "package": f"ai{version}", "body": body, "message": message}
    command = ["node", str(Path(__file__).with_name("ai_sdk.mjs"))]
    done = await asyncio.to_thread(subprocess.check_output, command, input=json.dumps(given), text=True, timeout=120)
    told = json.loads(done)
    return told["message"], [problem[:300] for problem in told["problems"]]


@pytest.mark.spec("interfaces:IF41")
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", SCENES)
async def test_sdk_reads_every_run_and_reports_only_failures(name: str, version: int, packages: Path) -> None:
    agent, replies = SCENES[name]
    async with engine(replies) as running:
        message, problems = await read(running.stream(agent, "go", session_id="t"), version, packages)

    assert ("m1", "assistant") == (message["id"], message["role"])
    assert (["Error: the model is down"] if name == "failed" else []) == problems
