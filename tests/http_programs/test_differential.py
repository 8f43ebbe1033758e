"""
Many small programs see the same live, while they are recorded, and while they are replayed.
"""

from __future__ import annotations

import gc
from pathlib import Path

import pytest

from .conftest import record_and_replay
from .odd_server import OddServer
from .programs import COMMON, SCENES, Scene, Seen, hide, iter_clients

CLIENTS = dict(iter_clients())


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    """
    Keep no record of urllib3, whose errors hold the sockets of dropped replies.
    """
    caplog.set_level("CRITICAL", logger="urllib3")


@pytest.mark.parametrize(
    "scene",
    [pytest.param(scene, id=scene.name, marks=[] if scene.name in COMMON else [pytest.mark.deep]) for scene in SCENES],
)
@pytest.mark.parametrize("client", CLIENTS)
def test_a_program_sees_the_same_live_recorded_and_replayed(
    server: OddServer, tmp_path: Path, client: str, scene: Scene
) -> None:
    def program() -> Seen:
        server.counts.clear()
        return CLIENTS[client](scene, f"http://127.0.0.1:{server.server_port}")

    live = program()
    recorded, replayed = record_and_replay(tmp_path / "c.yaml", program, allow_unused=True)
    gc.collect(1)  # a reply that a client dropped is young; it is closed here, and not in another test

    assert (scene.name, live) == (scene.name, recorded)
    assert (scene.name, hide(live)) == (scene.name, hide(replayed))
