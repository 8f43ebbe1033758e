"""Connections that send nothing, or half of something: the server answers others, runs have files, and logs stay short."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import resource
import socket
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import httpx2
import pytest

from stepengine.errors import StepEngineError
from stepengine.server import Caps, Guard, Tokens
from stepengine.server.uvicorn_server import serve_until_signal
from stepengine.workspace.http_connections import (
    ConnectionLimits,
    ConnectionTable,
    OncePerSecond,
    compute_connection_limits,
    make_limited_protocol,
    report_verified_token,
)
from tests.server.served import Served
from tests.waits import until

pytestmark = [pytest.mark.anyio]
KEYED = {"Authorization": "Bearer k"}


async def app(scope: Any, receive: Any, send: Any) -> None:
    """Answer with the length of the body; only with the right key on ``/``."""
    if scope["path"] == "/endless":
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while (
            await asyncio.wait_for(send({"type": "http.response.body", "body": b"x" * 65_536, "more_body": True}), 20)
        ) is None:
            pass
    headers = dict(scope["headers"])
    is_let_in = headers.get(b"authorization") == b"Bearer k" or scope["path"] in ("/open", "/health")
    if is_let_in and scope["path"] == "/":
        report_verified_token(scope)
    size = 0
    if is_let_in:
        message = {"more_body": True}
        while message.get("more_body", False):
            message = await receive()
            size += len(message.get("body", b""))
    status, body = (200, b"%d" % size) if is_let_in else (401, b"no")
    await send({"type": "http.response.start", "status": status, "headers": [(b"content-length", b"%d" % len(body))]})
    await send({"type": "http.response.body", "body": body})


@contextlib.contextmanager
def served(limits: ConnectionLimits, app: Any = app) -> Iterator[tuple[int, ConnectionTable]]:
    import uvicorn
    from uvicorn.protocols.http.h11_impl import H11Protocol

    from tests.uvicorn_servers import serve_in_thread

    table = ConnectionTable(limits)
    config = uvicorn.Config(
        app, port=0, log_level="warning", lifespan="off", http=make_limited_protocol(table, H11Protocol), ws="none", backlog=limits.backlog,
        timeout_graceful_shutdown=1,
    )  # fmt: skip
    with serve_in_thread(config) as port:
        yield port, table


def connected(port: int, sent: bytes = b"") -> socket.socket:
    made = socket.create_connection(("127.0.0.1", port), timeout=10)
    made.sendall(sent)
    return made


def client_of(port: int) -> httpx2.Client:
    return httpx2.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False)


def rest(connection: socket.socket) -> bytes:
    """Read until the other end closes."""
    found = b""
    with contextlib.suppress(ConnectionResetError):
        while part := connection.recv(65_536):
            found += part
    connection.close()
    return found


UNENDED = [
    b"",
    b"GET / HTTP/1.1\r\nHost: x\r\n",
    b"POST /open HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\nhalf",
    b"POST /open HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nha",
]


@pytest.mark.spec("studio:SV15")
def test_unfinished_requests_close_their_connections() -> None:
    with served(ConnectionLimits(connections=20, header_seconds=0.1, body_seconds=0.1)) as (port, table):
        opened = [connected(port, sent) for sent in UNENDED]
        assert [b""] * len(UNENDED) == [rest(one) for one in opened]
        until(lambda: len(table) == 0)


@pytest.mark.spec("studio:SV15")
def test_dripping_bytes_do_not_extend_the_header_timeout() -> None:
    with served(ConnectionLimits(connections=20, header_seconds=0.1)) as (port, _):
        began = time.monotonic()
        connection = connected(port, b"GET / HTTP/1.1\r\n")
        with connection, pytest.raises(ConnectionError):
            while time.monotonic() - began < 50:
                connection.sendall(b"X: y\r\n")
                time.sleep(0.01)


@pytest.mark.spec("studio:SV15")
def test_idle_connections_make_room_for_a_request() -> None:
    with served(ConnectionLimits(connections=20)) as (port, table):
        idle = [connected(port, b"GET / HTTP/1.1\r\n") for _ in range(60)]
        answer = httpx2.get(f"http://127.0.0.1:{port}/", headers=KEYED, trust_env=False)
        count = len(table)
        for one in idle:
            one.close()

    assert answer.status_code == 200
    assert count <= 20


@pytest.mark.spec("studio:SV15")
def test_authenticated_connection_is_not_closed_for_others() -> None:
    with (
        served(ConnectionLimits(connections=20)) as (port, _),
        client_of(port) as client,
    ):
        first = client.get("/", headers=KEYED)
        idle = [connected(port) for _ in range(40)]
        before = first.extensions["network_stream"].get_extra_info("client_addr")
        again = client.get("/", headers=KEYED)
        after = again.extensions["network_stream"].get_extra_info("client_addr")
        for one in idle:
            one.close()

    assert (first.status_code, again.status_code) == (200, 200)
    assert before == after


@pytest.mark.spec("studio:SV15")
@pytest.mark.parametrize(
    ("path", "status"), [("/health", 200), ("/nowhere", 401), ("/often", 429), ("/", 503), ("/strange", 421)]
)
def test_connection_with_unverified_token_is_closed_first(path: str, status: int, tmp_path: Path) -> None:
    """A request can be answered before its token was looked at, or without looking at it."""
    file = tmp_path / "tokens.json"
    tokens = Tokens.open(file)
    good = {"Authorization": f"Bearer {tokens.add('ann', ['read'])}"}
    guard = Guard(app, tokens=tokens, caps=Caps(failures=1) if status == 429 else None)
    junk = {"Authorization": "Bearer junk"} | ({"Host": "strange.example"} if status == 421 else {})
    with (
        served(ConnectionLimits(connections=20), guard) as (port, _),
        client_of(port) as client,
    ):
        if status == 429:
            client.get("/", headers=junk)
        written = file.read_bytes()
        file.write_bytes(b"no tokens" if status == 503 else written)
        answer = client.get(path, headers=junk)
        file.write_bytes(written)
        of_junk = address(answer)
        kept = []
        for _ in range(2):
            idle = [connected(port) for _ in range(40)]
            assert rest(idle.pop(0)) == b""  # the oldest ones are closed
            kept.append(address(client.get("/open", headers=good)))
            for one in idle:
                one.close()

    assert status == answer.status_code
    assert of_junk != kept[0]
    assert kept[0] == kept[1]


def address(answer: httpx2.Response) -> object:
    return answer.extensions["network_stream"].get_extra_info("client_addr")


@pytest.mark.spec("studio:SV15")
def test_content_length_with_transfer_encoding_closes_the_connection() -> None:
    both = b"POST /open HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
    with served(ConnectionLimits(connections=20)) as (port, _):
        answer = rest(connected(port, both + b"GET /open HTTP/1.1\r\nHost: x\r\n\r\n"))

    assert answer.startswith(b"HTTP/1.1 400 ")
    assert answer.count(b"HTTP/1.1") == 1


@pytest.mark.deep
@pytest.mark.spec("studio:SV15")
def test_client_that_does_not_read_is_closed() -> None:
    with served(ConnectionLimits(connections=20, read_seconds=0.3)) as (port, table):
        connection = connected(port, b"GET /endless HTTP/1.1\r\nHost: x\r\n\r\n")
        until(lambda: len(table) == 1)
        until(lambda: len(table) == 0)
        connection.close()


@pytest.mark.spec("studio:SV15")
def test_waiting_connections_per_address_are_bounded() -> None:
    table, closed = ConnectionTable(ConnectionLimits(connections=100, per_address=3)), list[str]()
    for name, address in (("a", "192.0.2.1"), ("b", "192.0.2.2"), *[(f"c{n}", "192.0.2.1") for n in range(4)]):
        table.add(name, address, lambda name=name: closed.append(name))
    table.mark_serving("c3")
    table.add("d", "192.0.2.1", lambda: closed.append("d"))
    for n in range(10):
        table.add(f"local{n}", "127.0.0.1", lambda: closed.append("local"))

    assert closed == ["a", "c0"]


@pytest.mark.spec("studio:SV15")
def test_busy_connections_are_kept_and_the_newest_is_refused() -> None:
    table, closed = ConnectionTable(ConnectionLimits(connections=3)), list[str]()
    for name in "abc":
        table.add(name, "::1", lambda name=name: closed.append(name))
        table.mark_serving(name)
    table.add("d", "::1", lambda: closed.append("d"))
    table.remove("a")
    table.add("e", "::1", lambda: closed.append("e"))

    assert (closed, len(table)) == (["d"], 3)


@pytest.mark.spec("studio:SV15")
def test_longest_idle_connection_makes_room() -> None:
    table, closed = ConnectionTable(ConnectionLimits(connections=3)), list[str]()
    for name in "abc":
        table.add(name, "::1", lambda name=name: closed.append(name))
        table.mark_serving(name)
    for name in "cab":
        table.mark_idle(name)
    table.mark_serving("c")
    for name in "de":
        table.add(name, "::1", lambda name=name: closed.append(name))

    assert ["a", "d"] == closed


@pytest.mark.spec("studio:SV15")
def test_connection_limits_leave_files_for_runs() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = []
    try:
        for files in (512, 1_024, 8_192):
            resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))
            limits = compute_connection_limits()
            found.append((limits.connections, limits.backlog))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    assert found == [(256, 64), (768, 64), (6_144, 512)]


def test_repeated_log_message_is_emitted_once_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    only, now = OncePerSecond(), 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    record = logging.LogRecord("asyncio", logging.ERROR, "", 1, "out of files", (), None)
    other = logging.LogRecord("asyncio", logging.ERROR, "", 1, "another", (), None)
    found = [only.filter(record), only.filter(record), only.filter(other)]
    now = 101.5

    assert [*found, only.filter(record)] == [True, False, True, True]


@pytest.mark.deep
@pytest.mark.spec("studio:SV15")
async def test_a_server_of_few_files_answers_among_idle_connections(tmp_path: Path) -> None:
    server = Served(tmp_path, tmp_path / "runs")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        server.start()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    idle: list[socket.socket] = []
    try:
        await server.ready()
        idle += [connected(server.port, b"GET / HTTP/1.1\r\n" if n % 2 else b"") for n in range(300)]
        async with asyncio.timeout(5):  # long before the idle connections are closed for their age
            await server.ready()
        log = server.log.read_text()
    finally:
        for one in idle:
            one.close()
        server.kill()

    assert "system resource" not in log
    assert len(log) < 4_000


async def test_port_is_held_while_runs_are_resumed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    refused: list[int | None] = []

    class Resuming:
        @asynccontextmanager
        async def lifespan(self) -> AsyncIterator[None]:
            with pytest.raises(OSError) as taken:
                socket.create_server(("127.0.0.1", port))
            refused.append(taken.value.errno)
            raise StepEngineError("the store is gone")
            yield

    with pytest.raises(StepEngineError, match="the store is gone"):
        await serve_until_signal(cast("Any", Resuming()), "127.0.0.1", port, print)

    assert [errno.EADDRINUSE] == refused
    socket.create_server(("127.0.0.1", port)).close()
