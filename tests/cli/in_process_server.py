"""
`stepengine serve` and `stepengine studio` in this process: everything that they do but listening.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from stepengine.cli.commands import studio
from stepengine.server import Tokens, uvicorn_server
from tests.cli.command import command
from tests.waits import until

__all__ = ("run_until_settled", "serve_in_process")


@contextmanager
def serve_in_process(*words: str) -> Iterator[tuple[TestClient, str]]:
    """
    Yield a client with all rights of the application that a command would serve, and what the command prints on stderr.
    """
    applications: list[Any] = []

    async def listen(application: Any, host: str, port: int, begun: Callable[[str], object]) -> None:
        applications.append(application)
        begun(f"http://{host}:{port}")

    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(uvicorn_server, "serve_until_signal", listen)
        token = Tokens.open(Path(folder, "tokens.json")).add("web", ["admin"])
        patch.setattr(studio, "LEAVING_SECONDS", 0.0)
        drain = ["--drain", "0"] if words[0] == "serve" else []
        said = command(*words, *drain, "--tokens", f"{folder}/tokens.json").stderr
        headers = {"authorization": f"Bearer {token}"}
        with TestClient(applications[0], base_url="http://localhost", headers=headers) as client:
            yield client, said


def run_until_settled(client: TestClient, agent: str, prompt: str = "") -> dict[str, Any]:
    """
    Start a run, and return its view when it has ended or waits for an answer.
    """
    run = client.post("/runs", json={"agent": agent, "prompt": prompt}).raise_for_status().json()["run_id"]

    def view() -> dict[str, Any] | None:
        found = client.get(f"/runs/{run}").raise_for_status().json()
        return found if found["status"] not in ("running", "suspended") or found.get("questions") else None

    return until(view)
