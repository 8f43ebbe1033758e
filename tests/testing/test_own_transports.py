"""
Transports of httpx2 that a program made itself are recorded and played, or run in a replay, too.
"""

from __future__ import annotations

import asyncio
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
import requests

from stepengine.testing import CassetteMiss
from stepengine.testing.recordings import CassetteFixture
from tests.http_programs.odd_server import OddServer, odd_server

pytestmark = [pytest.mark.spec("replay:Y20")]


@pytest.fixture(scope="module")
def server() -> Iterator[OddServer]:
    with odd_server() as running:
        yield running


class Stamping(httpx2.BaseTransport):
    """
    Adds a header to each request and sends it by a transport of httpx2.
    """

    def __init__(self) -> None:
        self.stamped = 0
        self._inner = httpx2.HTTPTransport()

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        self.stamped += 1
        request.headers["x-stamp"] = "ours"
        return self._inner.handle_request(request)

    def close(self) -> None:
        self._inner.close()


class Counting(httpx2.BaseTransport, httpx2.AsyncBaseTransport):
    """
    Answers by itself, as one does that sends with a library in C.
    """

    def __init__(self, first: int = 0) -> None:
        self.count = first

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        self.count += 1
        if request.url.path == "/refused":
            raise httpx2.ConnectError("nobody there", request=request)
        return httpx2.Response(200, text=f"{request.content.decode()} {self.count}")

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        return self.handle_request(request)


def post(transport: Counting, text: str, path: str = "") -> str:
    with httpx2.Client(transport=transport) as client:
        return client.post(f"http://own.example{path}", content=text).text


def post_async(transport: Counting, text: str, path: str = "") -> str:
    async def run() -> str:
        async with httpx2.AsyncClient(transport=transport) as client:
            return (await client.post(f"http://own.example{path}", content=text)).text

    return asyncio.run(run())


def record(file: Path, program: Callable[[], Any]) -> Any:
    recording = CassetteFixture(file, "once", record_errors=True)
    with recording.patch():
        seen = program()
    recording.check_usage()
    recording.write_recordings()
    return seen


def replay(file: Path, program: Callable[[], Any]) -> Any:
    with CassetteFixture(file, "none").patch():
        return program()


def test_a_transport_around_another_runs_in_a_replay_too(server: OddServer, tmp_path: Path) -> None:
    transports = []

    def program() -> str:
        transports.append(Stamping())
        with httpx2.Client(transport=transports[-1]) as client:
            return client.get(f"http://127.0.0.1:{server.server_port}/echo").text

    recorded = record(tmp_path / "c.yaml", program)
    (held,) = CassetteFixture(tmp_path / "c.yaml", "none").interactions

    assert recorded == replay(tmp_path / "c.yaml", program)
    assert [1, 1] == [transport.stamped for transport in transports]
    assert "ours" == held.request.get_header("x-stamp")


@pytest.mark.parametrize("send", [post, post_async])
def test_a_transport_that_sends_by_itself_is_played(send: Any, tmp_path: Path) -> None:
    transport = Counting()

    recorded = record(tmp_path / "c.yaml", lambda: [send(transport, text) for text in ("a", "b", "a")])
    other = Counting(first=100)
    replayed = replay(tmp_path / "c.yaml", lambda: [send(other, text) for text in ("a", "a", "b")])

    assert ["a 1", "b 2", "a 3"] == recorded
    assert ["a 1", "a 3", "b 2"] == replayed
    assert 100 == other.count


@pytest.mark.parametrize("send", [post, post_async])
def test_an_error_of_an_own_transport_is_raised_again(send: Any, tmp_path: Path) -> None:
    def program(transport: Counting) -> str:
        with pytest.raises(httpx2.ConnectError) as met:
            send(transport, "a", "/refused")
        return str(met.value)

    other = Counting()

    assert "nobody there" == record(tmp_path / "c.yaml", lambda: program(Counting()))
    assert "nobody there" == replay(tmp_path / "c.yaml", lambda: program(other))
    assert 0 == other.count


def test_a_partly_read_reply_breaks_off_in_a_replay(tmp_path: Path) -> None:
    def program(transport: httpx2.BaseTransport) -> Iterator[bytes]:
        with httpx2.Client(transport=transport) as client, client.stream("GET", "http://own.example/") as response:
            yield from response.iter_raw()

    pieces = httpx2.MockTransport(lambda _: httpx2.Response(200, content=iter([b"one", b"two"])))
    record(tmp_path / "c.yaml", lambda: next(program(pieces)))

    with pytest.raises(httpx2.RemoteProtocolError, match="ends here"):
        replay(tmp_path / "c.yaml", lambda: [*program(pieces)])


def test_another_request_of_an_own_transport_is_a_miss(tmp_path: Path) -> None:
    record(tmp_path / "c.yaml", lambda: post(Counting(), "a"))
    other = Counting()

    with pytest.raises(CassetteMiss):
        replay(tmp_path / "c.yaml", lambda: post(other, "b"))
    assert 0 == other.count


def test_an_application_in_the_process_is_part_of_the_program(tmp_path: Path) -> None:
    def application(environ: Any, start: Any) -> list[bytes]:
        start("200 OK", [("content-type", "text/plain")])
        return [b"from the application"]

    def program() -> str:
        with httpx2.Client(transport=httpx2.WSGITransport(app=application)) as client:
            return client.get("http://app.example/").text

    recording = CassetteFixture(tmp_path / "c.yaml", "once")
    with recording.patch():
        assert "from the application" == program()
    assert () == recording.fresh.interactions


@pytest.mark.parametrize("library", ["requests", "urllib"])
def test_a_transport_on_another_library_is_recorded_once(server: OddServer, tmp_path: Path, library: str) -> None:
    class Passing(httpx2.BaseTransport):
        def handle_request(self, request: httpx2.Request) -> httpx2.Response:
            if library == "requests":
                return httpx2.Response(200, content=requests.get(str(request.url), timeout=9).content)
            with urllib.request.urlopen(str(request.url), timeout=9) as reply:
                return httpx2.Response(200, content=reply.read())

    def program() -> str:
        with httpx2.Client(transport=Passing()) as client:
            return client.get(f"http://127.0.0.1:{server.server_port}/echo").text

    recorded = record(tmp_path / "c.yaml", program)
    replaying = CassetteFixture(tmp_path / "c.yaml", "none")
    with replaying.patch():
        assert recorded == program()

    assert (1, ()) == (len(replaying), replaying.unused)


@pytest.mark.parametrize("send", [post, post_async])
def test_extra_cassettes_replay_the_replies_of_own_transports(send: Any, tmp_path: Path) -> None:
    record(tmp_path / "more.yaml", lambda: send(Counting(), "a"))
    record(tmp_path / "c.yaml", lambda: send(httpx2.MockTransport(lambda _: httpx2.Response(200, text="b")), "b"))
    other = Counting()

    with CassetteFixture(tmp_path / "c.yaml", "none", extra=[tmp_path / "more.yaml"]).patch():
        assert "a 1" == send(other, "a")
    assert 0 == other.count
