"""
A model provider for another protocol: a request is one JSON object, and a reply is a stream of JSON lines.

`LinesProvider` has the two methods that matter, `complete` and `stream`, over a plain asyncio connection. Every failure is a
`ModelError` that says whether another attempt may succeed; the engine retries.

``python examples/extending/provider.py`` needs no key and no network: a small server below speaks the protocol on this machine.
"""

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from contextlib import aclosing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from stepengine import AgentDefinition, AssistantMessage, Engine, TextPart, ToolCallPart, ToolMessage, Usage, tool
from stepengine.errors import ModelError, TruncatedReply
from stepengine.models import (
    ModelDelta,
    ModelReply,
    ModelRequest,
    Provider,
    ReplyDone,
    TextChunk,
    ToolCallChunk,
    ToolCallEnded,
    ToolCallStarted,
)


class LinesProvider(Provider):
    """Models behind a server that answers in lines."""

    name = "lines"

    def __init__(self, host: str, port: int) -> None:
        self._address = host, port

    async def complete(self, request: ModelRequest) -> ModelReply:
        """Return the reply at the end of the stream."""
        async with aclosing(self.stream(request)) as deltas:
            async for delta in deltas:
                if isinstance(delta, ReplyDone):
                    return delta.reply
        msg = "the stream ended without a reply"
        raise TruncatedReply(msg, retryable=True)

    async def stream(self, request: ModelRequest) -> AsyncIterator[ModelDelta]:
        """Yield each line as it arrives, and the whole reply last."""
        try:
            reader, writer = await asyncio.open_connection(*self._address)
        except OSError as error:
            msg = f"{self.name} cannot be reached: {error}"
            raise ModelError(msg, retryable=True, kind="connection") from error
        try:
            await self._send(writer, request)
            await self._check_status(reader)
            parts: list[TextPart | ToolCallPart] = []
            while line := await reader.readline():
                event = json.loads(line)
                if "text" in event:
                    parts.append(TextPart(event["text"]))
                    yield TextChunk(event["text"])
                elif "call" in event:
                    index = sum(isinstance(part, ToolCallPart) for part in parts)
                    parts.append(ToolCallPart(event["id"], event["call"], event["input"]))
                    yield ToolCallStarted(index, event["call"])
                    yield ToolCallChunk(index, json.dumps(event["input"]))
                    yield ToolCallEnded(index)
                else:
                    yield ReplyDone(
                        ModelReply(parts, usage=Usage(input_tokens=event["read"], output_tokens=event["written"]))
                    )
                    return
        except (OSError, ValueError, KeyError) as error:
            msg = f"{self.name} answered nonsense: {error!r}"
            raise ModelError(msg, retryable=True, kind="protocol") from error
        finally:
            writer.close()
        msg = f"the stream of {self.name} was cut off"
        raise TruncatedReply(msg, retryable=True, kind="truncated")

    async def _send(self, writer: asyncio.StreamWriter, request: ModelRequest) -> None:
        messages: list[dict[str, Any]] = []
        for message in request.all_messages:
            calls = message.tool_calls if isinstance(message, AssistantMessage) else ()
            made = [{"id": call.tool_call_id, "call": call.tool_name, "input": dict(call.input)} for call in calls]
            result_of = message.tool_call_id if isinstance(message, ToolMessage) else None
            messages.append({"role": message.role, "text": message.text, "calls": made, "result_of": result_of})
        tools = [{"name": one.name, "about": one.description, "input": one.input_schema} for one in request.tools]
        asked = {
            "model": self.strip_prefix(request.model),
            "system": request.system_prompt,
            "messages": messages,
            "tools": tools,
        }
        body = json.dumps(asked).encode()
        writer.write(b"POST / HTTP/1.0\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
        await writer.drain()

    async def _check_status(self, reader: asyncio.StreamReader) -> None:
        status = await reader.readline()
        while (await reader.readline()).strip():
            pass
        code = int(status.split()[1]) if status.count(b" ") >= 1 else 0
        if code != 200:
            retryable = code in (0, 408, 429) or code >= 500
            msg = f"{self.name} answers {status!r}"
            raise ModelError(msg, status=code, retryable=retryable, kind="http")


class LinesServer(ThreadingHTTPServer):
    """A model that repeats the last message, and first calls a tool that it is offered."""

    daemon_threads = False

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.plays = "normal"
        self.goes_on = threading.Event()
        self._thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.05})
        self._thread.start()

    def server_close(self) -> None:
        """Stop the server."""
        self.goes_on.set()
        self.shutdown()
        self._thread.join()
        super().server_close()


class Handler(BaseHTTPRequestHandler):
    """One request."""

    server: LinesServer

    def do_POST(self) -> None:
        """Answer in lines, or fail as the test wants."""
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        plays = self.server.plays
        if plays == "silent":
            self.server.goes_on.wait(20)
            return
        if plays == "refused":
            self.send_error(429)
            return
        self.send_response(200)
        self.end_headers()
        if asked["tools"] and not asked["messages"][-1]["result_of"]:
            lines: list[Any] = [{"call": asked["tools"][0]["name"], "id": "call-1", "input": {"city": "Oslo"}}]
        else:
            lines = [{"text": "You said: "}, {"text": asked["messages"][-1]["text"]}]
        lines.append({"read": 20, "written": 5})
        for line in lines[:-1] if plays == "cut" else lines:
            self.wfile.write(json.dumps(line).encode() + b"\n")

    def log_message(self, *_: Any) -> None:
        """Print nothing."""


@tool
def weather(city: str) -> str:
    """Look up the weather of a city."""
    return f"rain in {city}"


def main() -> None:
    forecaster = AgentDefinition("forecaster", model="lines/small", tools=[weather])
    with LinesServer() as server:
        provider = LinesProvider("127.0.0.1", server.server_port)
        with Engine([forecaster], models={"lines": provider}, pricing=None) as engine:
            result = engine.run_sync(forecaster, "How is the weather?")
    print(result.text)
    assert result.text == "You said: rain in Oslo"


if __name__ == "__main__":
    main()
