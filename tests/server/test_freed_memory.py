"""Memory that ended runs have freed goes back to the system."""

from __future__ import annotations

import sys
from pathlib import Path

import httpx2
import pytest

from stepengine.server import freed_memory
from tests.server.house import House, ended, started
from tests.server.served import Served
from tests.waits import until


@pytest.mark.spec("studio:SV16")
def test_server_trims_memory_after_its_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(freed_memory, "PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(freed_memory, "trim_memory", lambda: calls.append("trim"))
    with House(tmp_path).open() as house, house.client() as client:
        ended(client, started(client, "quick"))
        until(lambda: calls)


@pytest.mark.memory
@pytest.mark.skipif(sys.platform != "linux", reason="needs a file of Linux")
@pytest.mark.spec("studio:SV16")
async def test_server_shrinks_after_many_large_runs(tmp_path: Path) -> None:
    server = Served(tmp_path, tmp_path / "runs")
    server.start()
    headers = {"authorization": f"Bearer {server.token('anna')}"}
    try:
        await server.ready()
        with httpx2.Client(base_url=server.url, headers=headers, trust_env=False, timeout=50) as client:
            before = resident(server)
            for _ in range(4):
                runs = [started(client, "asking", "x" * 250_000) for _ in range(25)]
                for run in runs:
                    client.post(f"/runs/{run}/cancel")
                    ended(client, run)
            until(lambda: resident(server) - before < 200)
    finally:
        server.kill()


def resident(server: Served) -> int:
    """Return the resident memory of a server in MiB."""
    lines = Path(f"/proc/{server._process.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) // 1024
