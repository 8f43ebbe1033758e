"""
Many small programs see the same live, while they are recorded, and while they are replayed.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

from stepengine.testing.recordings import CassetteFixture
from tests.http_programs.odd_server import OddServer, odd_server
from tests.http_programs.programs import COMMON, SCENES, Scene, hide, iter_clients

CLIENTS = dict(iter_clients())


@pytest.fixture(scope="module")
def server() -> Iterator[OddServer]:
    with odd_server() as running:
        yield running


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
    check(server, tmp_path / "c.yaml", client, scene)


def check(server: OddServer, file: Path, client: str, scene: Scene) -> None:
    """
    Run a program live, recorded and replayed, and compare what it saw.
    """
    base = f"http://127.0.0.1:{server.server_port}"
    run = CLIENTS[client]

    server.counts.clear()
    live = run(scene, base)
    server.counts.clear()
    recording = CassetteFixture(file, "once", record_errors=True, allow_unused=True)
    with recording.patch():
        recorded = run(scene, base)
    recording.check()
    recording.keep()
    replaying = CassetteFixture(file, "none")
    with replaying.patch():
        replayed = run(scene, base)
    replaying.check()
    gc.collect()  # a reply that a client dropped is closed here, and not in another test

    assert (scene.name, live) == (scene.name, recorded)
    assert (scene.name, hide(live)) == (scene.name, hide(replayed))
