"""
A small application behind a guard, which tells what it was asked; in the event loop of the test, or over real connections.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2

from stepengine.server import Guard, Logins, Tokens
from stepengine.server.access import CALLER, require_caller

HOST = "runs.example.com"


class Clock:
    """
    Seconds that pass when a test says so.
    """

    def __init__(self) -> None:
        self.now = 1_000.0

    def __call__(self) -> float:
        return self.now


class Behind:
    """
    An application that answers with who asked, behind a guard with a token of *anna*'s.

    Attributes:
        reached: What the application was asked: method, path, caller, body.
    """

    def __init__(self, folder: Path, **options: Any) -> None:
        from starlette.applications import Starlette
        from starlette.responses import JSONResponse
        from starlette.routing import Route

        async def answer(request: Any) -> Any:
            name = require_caller(request).name if CALLER in request.scope else None
            self.reached.append((request.method, request.url.path, name, await request.body()))
            return JSONResponse({"caller": name})

        methods = ["GET", "POST", "OPTIONS"]
        routed = Starlette(routes=[Route("/{path:path}", answer, methods=methods)])

        async def inner(scope: Any, receive: Any, send: Any) -> None:
            if scope["path"] == "/fails":
                msg = "the key of the vault is hunter2"
                raise RuntimeError(msg)
            await routed(scope, receive, send)

        self.reached: list[tuple[str, str, str | None, bytes]] = []
        self.clock = Clock()
        self.tokens = Tokens.open(folder / "tokens.json")
        self.token = self.tokens.add("anna", ["read", "answer"])
        self.logins = Logins(clock=self.clock)
        given = {"tokens": self.tokens, "logins": self.logins, "hosts": [HOST], "clock": self.clock, **options}
        self.guard = Guard(inner, **given)

    @property
    def bearer(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.token}"}

    def client(self, *, address: str = "203.0.113.7") -> httpx2.AsyncClient:
        transport = httpx2.ASGITransport(app=self.guard, client=(address, 40_000))
        return httpx2.AsyncClient(transport=transport, base_url=f"http://{HOST}")

    @asynccontextmanager
    async def browser(self) -> AsyncIterator[httpx2.AsyncClient]:
        """
        Give a client that was let in by a link, and sends what a browser sends of a page of this server.
        """
        async with self.client() as client:
            client.headers["sec-fetch-site"] = "same-origin"
            entered = await client.post("/login", json={"code": self.logins.make_login_link().partition("=")[2]})
            client.headers["authorization"] = f"Bearer {entered.json()['token']}"
            yield client

    async def raw(self, headers: list[tuple[bytes, bytes]], **scope: Any) -> tuple[int, dict[bytes, bytes], bytes]:
        """
        Ask with bytes that no client would send; return status, headers and body.
        """
        sent: list[Any] = []

        async def receive() -> Any:
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message: Any) -> None:
            sent.append(message)

        asked = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "GET", "scheme": "http", "path": "/runs",
            "raw_path": b"/runs", "query_string": b"", "root_path": "", "headers": headers, "client": ("203.0.113.7", 4), "server": (HOST, 80),
        }  # fmt: skip
        await self.guard({**asked, **scope}, receive, send)
        start, *rest = sent
        return start["status"], dict(start["headers"]), b"".join(part.get("body", b"") for part in rest)

    @asynccontextmanager
    async def served(self) -> AsyncIterator[int]:
        """
        Serve it by uvicorn on a port of loopback, and give the port.
        """
        import uvicorn

        from tests.uvicorn_servers import serve_in_loop

        config = uvicorn.Config(self.guard, port=0, log_level="critical", timeout_graceful_shutdown=1)
        async with serve_in_loop(config) as port:
            yield port


def kind_of(answer: httpx2.Response | bytes) -> str:
    """
    Return the kind of the problem that an answer is.
    """
    document = json.loads(answer) if isinstance(answer, bytes) else answer.json()
    return document["type"].removeprefix("urn:stepengine:problem:")
