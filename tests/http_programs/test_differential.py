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
FAST = {
    (client, scene)
    for number, scene in enumerate(sorted(COMMON))
    for place, client in enumerate(CLIENTS)
    if (number + place) % 2 == 0
}
"""Each common scene with every other client, of both kinds of connections: sockets of http.client and those of httpx2."""


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    """
    Keep no record of urllib3, whose errors hold the sockets of dropped replies.
    """
    caplog.set_level("CRITICAL", logger="urllib3")


@pytest.mark.parametrize(
    ("client", "scene"),
    [
        pytest.param(
            client, scene, id=f"{client}-{scene.name}", marks=[] if (client, scene.name) in FAST else pytest.mark.deep
        )
        for client in CLIENTS
        for scene in SCENES
    ],
)
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
