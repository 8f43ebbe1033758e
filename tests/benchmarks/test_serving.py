"""The load table of servers: what it says was counted, also of a server that fails."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from benchmarks import serving

ROOT = Path(__file__).parents[2]


@pytest.mark.deep
@pytest.mark.spec("studio:SV5")
def test_all_runs_end_and_all_idle_watchers_stay() -> None:
    asked = ["--runs", "30", "--watchers", "150", "--rest", "0.2", "--seconds", "120"]
    ran = subprocess.run(
        [sys.executable, "-m", "benchmarks.serving", *asked],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
        timeout=500,
    )
    rows = [line.strip("| ").split(" | ") for line in ran.stdout.splitlines() if line.startswith("| stepengine")]

    assert ["30 of 30", "30 of 30", "150 of 150", "150 of 150"] == [row[1] for row in rows]
    assert {"-"} == {row[-1] for row in rows}
    for row in rows:
        assert all(re.fullmatch(r"[\d,]+ / [\d,]+", cell) for cell in row[2:3]), row


async def test_refused_and_cut_requests_are_counted() -> None:
    load = serving.Load(3)

    async def refused() -> None:
        raise serving.Refused("503")

    async def cut() -> None:
        raise ConnectionResetError

    for work in (refused(), refused(), cut()):
        await load.taken(work)
    late = asyncio.ensure_future(asyncio.sleep(3600))
    await serving.finished(load, [late], 0.01)

    assert Counter({"HTTP 503": 2, "ConnectionResetError": 1, "not done after 0 s": 1}) == load.failed
    assert "0 of 3" in serving.run_row("a server", load)
    assert "2 HTTP 503" in serving.idle_row("a server", load)
