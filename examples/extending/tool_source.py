"""
A source of tools: a server describes its operations in the style of OpenAPI, and each operation becomes a tool.

`DescribedTools` looks the description up when a run begins, with `Perform`: the record has it, so a replay needs no server.

``python examples/extending/tool_source.py`` needs no key and no network: a small server below runs on this machine.
"""

import asyncio
import http.client
import json
import threading
from collections.abc import Generator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlencode, urlsplit

from stepengine import (
    AgentDefinition,
    Change,
    Engine,
    HookContext,
    Perform,
    StepContext,
    Steps,
    Tool,
    ToolCall,
    ToolResult,
)

PATHS = {
    "/weather": {
        "get": {
            "operationId": "weather",
            "summary": "Look up the weather of a city.",
            "parameters": [{"name": "city", "in": "query", "required": True, "schema": {"type": "string"}}],
        }
    },
    "/trains": {
        "get": {
            "operationId": "trains",
            "summary": "List the next trains.",
            "parameters": [{"name": "count", "in": "query", "schema": {"type": "integer", "minimum": 1}}],
        }
    },
}


class DescribedTools:
    """
    The operations of one server.

    Args:
        name: The name of the source; agents list it if the engine has it.
        server: The address of the server. Its description is at ``/openapi.json``.
    """

    def __init__(self, name: str, server: str) -> None:
        self.name = name
        self._server = server

    def pre_run(self, _ctx: HookContext) -> Generator[Any, Any, Change]:
        """Look up the description and give the run its tools."""
        described = yield from Perform.idempotent(self._get, "/openapi.json")
        operations = [(path, each["get"]) for path, each in described["paths"].items() if "get" in each]
        return Change(tools=tuple(self._make_tool(path, operation) for path, operation in operations))

    async def aclose(self, blocked: Any = None) -> None:
        """Close nothing: each request has a connection of its own."""

    def _make_tool(self, path: str, operation: Any) -> Tool[..., Any]:
        schema = {
            "type": "object",
            "properties": {one["name"]: dict(one["schema"]) for one in operation["parameters"]},
            "required": [one["name"] for one in operation["parameters"] if one.get("required")],
            "additionalProperties": False,
        }

        async def run(input: dict[str, Any]) -> ToolResult:
            try:
                return ToolResult.json(await asyncio.to_thread(self._get, f"{path}?{urlencode(input)}"))
            except OSError as error:
                return ToolResult.error(f"{path}: {error}")

        return Tool(operation["operationId"], operation["summary"], schema, run, category="network")

    def _get(self, path: str) -> Any:
        with closing(http.client.HTTPConnection(urlsplit(self._server).netloc, timeout=10)) as connection:
            connection.request("GET", path)
            response = connection.getresponse()
            body = response.read()
        if response.status != http.HTTPStatus.OK:
            msg = f"the server answers {response.status} {response.reason}"
            raise OSError(msg)
        return json.loads(body)


class Station(ThreadingHTTPServer):
    """A server with two operations."""

    daemon_threads = False

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self._thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.05})
        self._thread.start()

    def server_close(self) -> None:
        """Stop the server."""
        self.shutdown()
        self._thread.join()
        super().server_close()


class Handler(BaseHTTPRequestHandler):
    """One request."""

    def do_GET(self) -> None:
        """Send the description, or what an operation returns."""
        path, _, query = self.path.partition("?")
        found = {"paths": PATHS} if path == "/openapi.json" else {"operation": path[1:], "query": query, "sky": "grey"}
        data = json.dumps(found).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        """Print nothing."""


def travel(ctx: StepContext) -> Steps[str]:
    found = yield from ToolCall("weather", {"city": ctx.prompt})
    return found.text


def main() -> None:
    with Station() as server:
        traveller = AgentDefinition("traveller", tools=[DescribedTools("station", server.url)], handle_steps=travel)
        with Engine([traveller]) as engine:
            result = engine.run_sync(traveller, "Oslo", journal="journey.jsonl")
    with Engine([traveller]) as engine:
        assert engine.replay_sync("journey.jsonl").output == result.output  # the server is gone
    print(result.output)
    assert "grey" in result.unwrap()


if __name__ == "__main__":
    main()
