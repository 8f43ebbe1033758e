"""
Servers that bend the protocol, and servers behind HTTP on the loopback interface.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from stepengine import AgentDefinition, Engine, Parallel, RunStatus, ToolCall, ToolMessage
from stepengine.adapters.mcp import McpRun, mcp_tools
from stepengine.errors import DefinitionError
from stepengine.testing import ScriptedModel, tool_call
from tests.phrases import OUTCOME_UNKNOWN
from tests.servers import Quiet
from tests.servers import served as web_server

HERE = Path(__file__).parent
LOOK = tool_call("odd__look", {})
FAR = tool_call("far__look", {})


async def texts(source: Any, agent: Any, *replies: Any) -> list[tuple[str, str]]:
    async with Engine([agent(source)], models=ScriptedModel([*replies, "ok"])) as engine:
        result = await engine.run("worker", "Go.")
    assert RunStatus.COMPLETED is result.status, result.error
    return [(one.result.status, one.result.text) for one in result.tool_calls]


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("reliability:MC11")
@pytest.mark.parametrize("mode", ["answers", "storm"])
async def test_unsolicited_answers_and_notification_storms_are_ignored(odd: Any, agent: Any, mode: str) -> None:
    assert [("ok", "seen"), ("ok", "seen")] == await texts(odd(mode), agent, LOOK, LOOK)


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("reliability:MC11")
async def test_a_server_of_an_unknown_version_is_refused(odd: Any, agent: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stepengine.adapters.mcp.connection.RESTART_WAITS", (0.0, 0.0))

    async with Engine([agent(odd("version"))], models=ScriptedModel([])) as engine:
        result = await engine.run("worker", "Go.")

    assert RunStatus.FAILED is result.status
    assert "1999-01-01" in str(result.error)


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("reliability:MC10", "reliability:MC05")
async def test_oversized_message_ends_the_connection_not_the_run(
    odd: Any, agent: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stepengine.adapters.mcp.connection.RESTART_WAITS", (0.0, 0.0))

    ((status, text),) = await texts(odd("huge"), agent, LOOK)

    assert "error" == status
    assert "it sent a message of more than 16 MiB" in text


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("interfaces:IF60")
async def test_endless_tool_list_is_read_to_its_limit(odd: Any, agent: Any) -> None:
    model = ScriptedModel(["ok"])

    async with Engine([agent(odd("endless", defer=False))], models=model) as engine:
        await engine.run("worker", "Go.")

    assert 1_000 == len(model.calls[0].tools)


# --- HTTP -------------------------------------------------------------------------------------------------------------


async def replying(answer: bytes) -> tuple[Any, str, list[bytes]]:
    """
    Start an HTTP server that gives one answer to everything; return it, its address, and what it was sent.
    """
    seen: list[bytes] = []

    async def serve(reader: Any, writer: Any) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        seen.append(head)
        writer.write(answer)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    return server, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/mcp", seen


@pytest.mark.spec("reliability:MC09")
async def test_sign_in_address_of_a_server_is_never_opened(agent: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import webbrowser

    monkeypatch.setattr("stepengine.adapters.mcp.connection.RESTART_WAITS", (0.0, 0.0))
    monkeypatch.setattr(webbrowser, "open", lambda *_: pytest.fail("a browser was opened"))
    other, elsewhere, followed = await replying(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")
    head = f'www-authenticate: Bearer resource_metadata="{elsewhere}", error_uri="javascript:$(touch x)"'
    answer = f"HTTP/1.1 401 Unauthorized\r\n{head}\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
    server, address, seen = await replying(answer.encode())
    async with server, other, Engine([agent(mcp_tools(address, name="odd"))], models=ScriptedModel([])) as engine:
        result = await engine.run("worker", "Go.")

    assert RunStatus.FAILED is result.status
    assert "the MCP server 'odd' cannot be used: it answered 401 Unauthorized" in str(result.error)
    assert seen
    assert [] == followed


class Guarded(Quiet):
    """
    An endpoint that answers some requests, and then with another status than 200.
    """

    protocol_version = "HTTP/1.1"
    status, answers, asked = 401, 0, 0
    tokens: frozenset[str] = frozenset()

    def do_POST(self) -> None:
        message = json.loads(self.rfile.read(int(self.headers["content-length"])))
        Guarded.asked += 1
        unknown = Guarded.tokens and self.headers["authorization"] not in Guarded.tokens
        if Guarded.asked > Guarded.answers or unknown:
            self._say(Guarded.status, b"")
        else:
            self._answer(message, self._reply(message))

    def do_GET(self) -> None:
        self._say(405, b"")

    def do_DELETE(self) -> None:
        self._say(405, b"")

    def _answer(self, message: Any, reply: Any) -> None:
        if "id" not in message:
            self._say(202, b"")
        else:
            self._say(200, json.dumps({"jsonrpc": "2.0", "id": message["id"], **reply}).encode())

    def _reply(self, message: Any) -> Any:
        match message.get("method"):
            case "initialize":
                about = {"capabilities": {"tools": {}}, "serverInfo": {"name": "far", "version": "1"}}
                return {"result": {"protocolVersion": "2025-11-25", **about}}
            case "tools/list":
                return {"result": {"tools": [{"name": "look", "inputSchema": {"type": "object"}}]}}
            case "tools/call":
                return {"result": {"content": [{"type": "text", "text": "seen"}]}}
        return {"error": {"code": -32601, "message": "Method not found"}}

    def _say(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        if status in (401, 403):
            self.send_header("www-authenticate", 'Bearer error="invalid_token"')
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def guarded(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """
    Give what starts a source behind an endpoint that answers so many requests and then another status.
    """
    monkeypatch.setattr(Guarded, "asked", 0)
    with web_server(Guarded) as address:

        def make(status: int, answers: int = 0, **options: Any) -> Any:
            monkeypatch.setattr(Guarded, "status", status)
            monkeypatch.setattr(Guarded, "answers", answers)
            return mcp_tools(f"{address}/mcp", name="far", protocol="legacy", **options)

        yield make


GIVE = "mcp_tools(headers={'Authorization': 'Bearer ...'})"
SUCH = "such as an OAuthClientProvider of the package mcp"
REFUSALS = {
    "no token": (401, {}, f"get a token and pass it with {GIVE}, or sign in with mcp_tools(auth=...), {SUCH}"),
    "an old token": (
        401,
        {"authorization": "Bearer old"},
        "the token in headers= is invalid or expired: get a new one",
    ),
    "a token of another": (
        403,
        {"Authorization": "Bearer x"},
        "the token in headers= does not have the permission for this",
    ),
    "forbidden": (403, {}, f"it may require a token, passed with {GIVE}"),
    "nothing there": (404, {}, "there is no MCP server at this URL, which often ends in /mcp"),
    "refused": (418, {}, "I'm a Teapot"),
}


@pytest.mark.parametrize("name", REFUSALS)
@pytest.mark.spec("reliability:MC09")
async def test_endpoint_refusal_is_explained_and_not_retried(
    guarded: Any, agent: Any, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr("stepengine.adapters.mcp.connection.RESTART_WAITS", (600.0, 600.0))
    status, headers, remedy = REFUSALS[name]
    async with Engine([agent(guarded(status, headers=headers))], models=ScriptedModel([])) as engine:
        result = await engine.run("worker", "Go.")

    said = result.error.message
    assert said.startswith(f"the MCP server 'far' cannot be used: it answered {status} ")
    assert said.endswith(remedy)
    assert ('(Bearer error="invalid_token")' in said) is (status in (401, 403))
    assert 1 == Guarded.asked


# --- signing in -------------------------------------------------------------------------------------------------------


class Signing:
    """
    An `Auth` as httpx and httpx2 have it, without either.
    """

    requires_request_body = requires_response_body = False

    async def async_auth_flow(self, request: Any) -> Any:
        request.headers["authorization"] = "Bearer flow"
        yield request


async def given_later(run: Any) -> dict[str, str]:
    return {"Authorization": "Bearer later"}


@pytest.mark.spec("interfaces:IF137")
@pytest.mark.parametrize(
    ("auth", "token"),
    [(lambda run: {"Authorization": "Bearer now"}, "now"), (given_later, "later"), (Signing(), "flow")],
    ids=["function", "async function", "flow"],
)
async def test_auth_is_called_for_each_request(
    guarded: Any, agent: Any, monkeypatch: pytest.MonkeyPatch, auth: Any, token: str
) -> None:
    monkeypatch.setattr(Guarded, "tokens", frozenset([f"Bearer {token}"]))

    async with Engine([agent(guarded(401, answers=99, auth=auth))], models=ScriptedModel([FAR, "ok"])) as engine:
        result = await engine.run("worker", "Go.")

    assert ["seen"] == [one.result.text for one in result.tool_calls]


@pytest.mark.spec("interfaces:IF137")
async def test_expired_token_is_requested_once_more(guarded: Any, agent: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Guarded, "tokens", frozenset(["Bearer new"]))
    given: list[str] = []

    def auth(run: Any) -> dict[str, str]:
        given.append("old" if len(given) == 0 else "new")
        return {"Authorization": f"Bearer {given[-1]}"}

    async with Engine([agent(guarded(401, answers=99, auth=auth))], models=ScriptedModel([FAR, "ok"])) as engine:
        result = await engine.run("worker", "Go.")

    assert ["seen"] == [one.result.text for one in result.tool_calls]
    assert ["old", "new"] == given[:2]


@pytest.mark.spec("interfaces:IF137")
@pytest.mark.parametrize("works", [0, 99])
async def test_failed_sign_in_is_explained_and_not_retried(
    guarded: Any, agent: Any, monkeypatch: pytest.MonkeyPatch, works: int
) -> None:
    monkeypatch.setattr("stepengine.adapters.mcp.connection.RESTART_WAITS", (600.0, 600.0))
    failing: list[int] = []

    def auth(run: Any) -> dict[str, str]:
        if works == 0 or failing:
            msg = "the keychain is locked"
            raise RuntimeError(msg)
        return {}

    def fail(event: Any) -> None:
        if type(event).__name__ == "ToolStarted":
            failing.append(1)

    source = guarded(401, answers=works, auth=auth)
    async with Engine([agent(source)], models=ScriptedModel([FAR, "ok"]), observers=[fail]) as engine:
        result = await engine.run("worker", "Go.")

    said = result.tool_calls[0].result.text if works else result.error.message
    assert "signing in with auth= failed: RuntimeError: the keychain is locked" in said


class OfUsers(Guarded):
    """
    An endpoint with sessions, which notes what came: method, session, token, and how the client calls itself.
    """

    seen: list[tuple[str, str, str]] = []
    clients: list[Any] = []

    def do_POST(self) -> None:
        message = json.loads(self.rfile.read(int(self.headers["content-length"])))
        method, token = message["method"], self.headers["authorization"].removeprefix("Bearer ")
        if method == "initialize":
            OfUsers.clients.append(message["params"]["clientInfo"])
            self.new_session = str(len(OfUsers.clients))
        OfUsers.seen.append((method, self.headers.get("mcp-session-id", self.new_session), token))
        self._answer(message, self._reply(message))

    new_session = ""

    def end_headers(self) -> None:
        if self.new_session:
            self.send_header("mcp-session-id", self.new_session)
        super().end_headers()


@pytest.fixture
def of_users(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(OfUsers, "seen", [])
    monkeypatch.setattr(OfUsers, "clients", [])
    with web_server(OfUsers) as address:
        yield f"{address}/mcp"


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("interfaces:IF137")
async def test_auth_function_receives_the_run_and_owners_get_separate_sessions(of_users: str, agent: Any) -> None:
    runs: set[Any] = set()

    async def auth(run: McpRun) -> dict[str, str]:
        await asyncio.sleep(0)
        runs.add((run.id, run.owner, str(run.params)))
        return {"Authorization": f"Bearer {run.owner} {run.params['tenant']}"}

    source = mcp_tools(of_users, name="far", protocol="legacy", auth=auth)
    model = ScriptedModel(lambda asked: "ok" if isinstance(asked.messages[-1], ToolMessage) else FAR)
    async with Engine([agent(source)], models=model) as engine:
        asked = [("ann", 1), ("bob", 2), ("ann", 3)]
        ran = [
            await engine.run("worker", "Go.", user_id=owner, params={"tenant": tenant}) for owner, tenant in asked[:1]
        ]
        ran += await asyncio.gather(
            *[engine.run("worker", "Go.", user_id=owner, params={"tenant": tenant}) for owner, tenant in asked[1:]]
        )

    assert [["seen"]] * 3 == [[one.result.text for one in result.tool_calls] for result in ran]
    assert {(r.state.run_id, owner, str({"tenant": n})) for r, (owner, n) in zip(ran, asked, strict=True)} == runs
    calls = sorted(token for method, _, token in OfUsers.seen if method == "tools/call")
    assert ["ann 1", "ann 3", "bob 2"] == calls
    assert {("1", "ann"), ("2", "bob")} == {(session, token.partition(" ")[0]) for _, session, token in OfUsers.seen}


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("interfaces:IF137")
async def test_idle_owner_session_is_closed_and_reopened(
    of_users: str, agent: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stepengine.adapters.mcp.connections.OWNER_IDLE_SECONDS", -1_000.0)
    source = mcp_tools(
        of_users, name="far", protocol="legacy", auth=lambda run: {"Authorization": f"Bearer {run.owner}"}
    )
    model = ScriptedModel(lambda asked: "ok" if isinstance(asked.messages[-1], ToolMessage) else FAR)
    async with Engine([agent(source)], models=model) as engine:
        for owner in ("ann", "bob", "ann"):
            result = await engine.run("worker", "Go.", user_id=owner)
            assert ["seen"] == [one.result.text for one in result.tool_calls]
            assert 1 == len(source._connections)

    assert 3 == len(OfUsers.clients)


@pytest.mark.spec("interfaces:IF137")
async def test_the_client_names_itself_with_its_version(of_users: str, agent: Any) -> None:
    source = mcp_tools(of_users, name="far", protocol="legacy", headers={"Authorization": "Bearer any"})
    async with Engine([agent(source)], models=ScriptedModel(["ok"])) as engine:
        await engine.run("worker", "Go.")

    assert [{"name": "stepengine", "version": version("stepengine")}] == OfUsers.clients


def test_auth_function_without_a_parameter_is_refused() -> None:
    def auth() -> dict[str, str]:
        return {"Authorization": "Bearer any"}

    with pytest.raises(DefinitionError, match=r"Write `def auth\(run\)"):
        mcp_tools("https://example.com/mcp", name="far", auth=auth)


async def test_temporary_endpoint_failure_is_retried(guarded: Any, agent: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stepengine.adapters.mcp.connection.RESTART_WAITS", (0.0, 0.0))
    async with Engine([agent(guarded(503))], models=ScriptedModel([])) as engine:
        result = await engine.run("worker", "Go.")

    assert "ended each time: it answered 503 Service Unavailable" in result.error.message
    assert 3 == Guarded.asked


async def test_token_expiring_in_a_run_is_explained_in_the_result(guarded: Any, agent: Any) -> None:
    """
    The greeting, its confirmation, the list and one call are answered.
    """
    looks = [tool_call("far__look", {}), tool_call("far__look", {}), "ok"]
    source = guarded(401, answers=4, headers={"Authorization": "Bearer short"})
    async with Engine([agent(source)], models=ScriptedModel(looks)) as engine:
        first, second = [one.result for one in (await engine.run("worker", "Go.")).tool_calls]

    assert "seen" == first.text
    refused = "the MCP server 'far' refused the request: it answered 401 Unauthorized"
    assert ("error", True) == (second.status, second.text.startswith(refused))
    assert "is invalid or expired: get a new one" in second.text


class Mixed(Guarded):
    """
    An endpoint that answers calls when all of them have come: some with 401, the others with an error of the protocol.
    """

    together = threading.Barrier(1)

    def do_POST(self) -> None:
        message = json.loads(self.rfile.read(int(self.headers["content-length"])))
        number = message.get("params", {}).get("arguments", {}).get("n")
        if number is not None:
            Mixed.together.wait(timeout=30)
        if number is not None and number % 2:
            self._say(401, b"")
        else:
            wrong = {"error": {"code": -32602, "message": f"no {number}"}}
            self._answer(message, self._reply(message) if number is None else wrong)


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("reliability:MC09")
async def test_simultaneous_calls_get_their_own_answers() -> None:
    calls = 6
    Mixed.together = threading.Barrier(calls)

    def handle_steps(ctx: Any) -> Any:
        results = yield from Parallel(*[ToolCall("far__look", {"n": n}) for n in range(calls)])
        return [result.text for result in results]

    with web_server(Mixed) as address:
        source = mcp_tools(f"{address}/mcp", name="far", protocol="legacy")
        worker = AgentDefinition("worker", tools=[source], handle_steps=handle_steps)
        async with Engine([worker], models=ScriptedModel([])) as engine:
            for _ in range(2):
                said = (await engine.run("worker", "Go.")).unwrap()

                assert [f"no {n}" for n in range(0, calls, 2)] == [text.rpartition(": ")[2] for text in said[::2]]
                assert [True] * (calls // 2) == ["it answered 401 Unauthorized" in text for text in said[1::2]]


@pytest.fixture
def served() -> Iterator[tuple[str, Any, list[subprocess.Popen[bytes]]]]:
    """
    Give the address of the small server over HTTP, what starts it again, and its processes.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    running: list[subprocess.Popen[bytes]] = []

    def start() -> None:
        for process in running:
            process.wait()  # as long as the one before is not wholly gone, it may be the one that answers below
        command = [sys.executable, str(HERE / "server.py"), "http", str(port)]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        running.append(process)
        while process.poll() is None:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    return
            time.sleep(0.05)
        raise AssertionError(f"the server ended with {process.returncode} before it listened")

    start()
    yield f"http://127.0.0.1:{port}/mcp", start, running
    for process in running:
        process.kill()
        process.wait()


@pytest.mark.spec("interfaces:IF55", "interfaces:IF57")
@pytest.mark.deep
@pytest.mark.parametrize("protocol", ["auto", "legacy"])
async def test_http_server_crash_loses_one_call_and_recovers(served: Any, agent: Any, protocol: str) -> None:
    address, start, _ = served
    adds = tool_call("small__add", {"a": 1, "b": 2})

    def later(request: Any) -> Any:
        start()
        return adds

    source = mcp_tools(address, name="small", protocol=protocol)
    calls = [adds, tool_call("small__crash", {}), later, "ok"]
    async with Engine([agent(source)], models=ScriptedModel(calls)) as engine:
        result = await engine.run("worker", "Go.")

    ended = [(one.result.status, one.result.text) for one in result.tool_calls]
    assert RunStatus.COMPLETED is result.status
    assert ("ok", "3") == ended[0] == ended[2]
    assert "error" == ended[1][0]
    assert f"the {OUTCOME_UNKNOWN}" in ended[1][1]


@pytest.mark.spec("interfaces:IF55", "reliability:MC05")
@pytest.mark.deep
@pytest.mark.parametrize("protocol", ["auto", "legacy"])
async def test_http_server_restart_between_calls_loses_no_call(served: Any, agent: Any, protocol: str) -> None:
    address, start, running = served
    adds = tool_call("small__add", {"a": 1, "b": 2})

    def restart(request: Any) -> Any:
        running[-1].kill()
        start()
        return adds

    source = mcp_tools(address, name="small", protocol=protocol)
    async with Engine([agent(source)], models=ScriptedModel([adds, restart, adds, "ok"])) as engine:
        result = await engine.run("worker", "Go.")

    assert [("ok", "3")] * 3 == [(one.result.status, one.result.text) for one in result.tool_calls]


# --- replies that cannot be read ----------------------------------------------------------------------------------------


def _http(body: bytes, kind: str = "application/json", status: str = "200 OK", *more: str) -> bytes:
    head = [f"HTTP/1.1 {status}", f"content-type: {kind}", f"content-length: {len(body)}", "connection: close", *more]
    return "\r\n".join([*head, "", ""]).encode() + body


def _events(*data: bytes) -> bytes:
    return _http(b"".join([b"event: message\ndata: " + one + b"\n\n" for one in data]), "text/event-stream")


def _saying(**members: Any) -> bytes:
    return json.dumps({"jsonrpc": "2.0", **members}).encode()


def _replies(number: int) -> dict[str, bytes]:
    """
    Return replies to a call, none of which is one that can be read.
    """
    good = _saying(id=number, result={"content": [{"type": "text", "text": "seen"}]})
    long = good.replace(b"seen", b"x" * 100_000)
    return {
        "nothing": _http(b""),
        "no JSON": _http(b"<html>"),
        "no UTF-8": _http(good.replace(b"seen", b"\xff\xfe")),
        "UTF-16": _http(good.decode().encode("utf-16")),
        "another type": _http(good, "text/html"),
        "a list": _http(b"[" + good + b"]"),
        "another id": _http(_saying(id=999_999, result={})),
        "null for an id": _http(_saying(id=None, error={"code": -32700, "message": "what?"})),
        "a request": _http(_saying(id=number, method="ping")),
        "an old version": _http(good.replace(b"2.0", b"1.0")),
        "deep": _http(b'{"jsonrpc":"2.0","id":1,"result":' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
        "half a pair": _http(good.replace(b"seen", b"\\ud800")),
        "too long": _http(long),
        "too long, said to be packed as it is": _http(long, "application/json", "200 OK", "content-encoding: identity"),
        "packed": _http(
            gzip.compress(long + random.Random(1).randbytes(2_000)),
            "application/json",
            "200 OK",
            "content-encoding: gzip",
        ),
        "taken": _http(b"", "text/plain", "202 Accepted"),
        "refused oddly": _http(b'{"error":', "application/json", "400 Bad Request"),
        "events without JSON": _events(b"what?"),
        "deep events": _events(b"[" * 100_000),
    }


class Unreadable(Guarded):
    """
    An endpoint that answers calls with these replies, one after the other, and at last with a good one.
    """

    left: list[str] = []

    def do_POST(self) -> None:
        message = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if message.get("method") == "tools/call" and Unreadable.left:
            self.wfile.write(_replies(message["id"])[Unreadable.left.pop(0)])
            self.close_connection = True
        else:
            self._answer(message, self._reply(message))


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("reliability:MC05", "reliability:MC10")
async def test_unreadable_http_reply_is_an_immediate_error_and_connection_stays(
    agent: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stepengine.adapters.mcp.http.LINE_BYTES", 64 * 1024)
    monkeypatch.setattr("stepengine.adapters.mcp.http.PACKED_BYTES", 1024)
    names = [*_replies(1)]
    monkeypatch.setattr(Unreadable, "left", [*names])

    with web_server(Unreadable) as address:
        async with asyncio.timeout(50):
            said = await texts(mcp_tools(f"{address}/mcp", name="odd", timeout=600), agent, *[LOOK] * (len(names) + 1))

    assert ("ok", "seen") == said.pop()
    assert {} == {name: text for name, (status, text) in zip(names, said, strict=True) if status != "error"}
    assert [] == [text for _, text in said if "was lost" in text or "did not answer within" in text]
    told = dict(zip(names, [text for _, text in said], strict=True))
    assert "what?" in told["null for an id"], "what a server says itself is told"
    assert "none to what was asked" in told["another id"]
    assert "packed, which was not asked for" in told["packed"]
    assert ("64 KiB" in told["too long"], "packed" in told["too long"]) == (True, False)
    assert "64 KiB" in told["too long, said to be packed as it is"]


@pytest.mark.spec("interfaces:IF137")
async def test_unchanged_refused_headers_are_sent_once(
    guarded: Any, agent: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stepengine.adapters.mcp.connection.RESTART_WAITS", (600.0, 600.0))
    source = guarded(401, auth=lambda run: {"Authorization": "Bearer old"})

    async with Engine([agent(source)], models=ScriptedModel([])) as engine:
        result = await engine.run("worker", "Go.")

    assert result.error.message.endswith("the token of auth= is invalid or expired: get a new one")
    assert 1 == Guarded.asked
