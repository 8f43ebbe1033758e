"""
Measures HTTP steps of one client in a fresh process: ``python -m benchmarks.http_worker KIND PROTOCOL CLIENT N [PORT]``.

KIND ``steps`` (W3): CPU milliseconds of the client per step of one run of N steps against the loopback server on PORT. KIND
``encode`` (W6): CPU milliseconds of one call with N messages before it, over a transport in memory. CLIENT is ``sdk``, a
bare loop over the official SDK, or ``stepengine``: for W3 an engine with an agent and a validated tool, for W6 the provider.
"""

from __future__ import annotations

import asyncio
import gc
import json
import sys
import time
import urllib.request
from collections.abc import Awaitable, Callable
from typing import Any

import httpx2

from benchmarks import loopback

REPEATS = 3
SLOW = 100
"""Steps above which an SDK's own loop is run once; its cost per step grows with history."""

MOST = 300
CALLS = 20
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
Loop = Callable[[int], Awaitable[int]]


def client_options(url: str, transport: Any) -> dict[str, Any]:
    """Return what the SDK clients of anthropic and openai are built with."""
    client = httpx2.AsyncClient(transport=transport) if transport else None
    return {"api_key": "k", "base_url": url, "max_retries": 0, **({"http_client": client} if client else {})}


# --- bare loops over the official SDKs: history, one call per message, the message of its result ----------------------


class Anthropic:
    """``messages.create`` in a loop."""

    def __init__(self, url: str, transport: Any = None) -> None:
        import anthropic

        self.client: Any = anthropic.AsyncAnthropic(**client_options(url, transport), open_telemetry=False)
        self.tools: list[Any] = [{"name": "add", "description": "Add.", "input_schema": SCHEMA}]
        self.history: list[Any] = [{"role": "user", "content": "add"}]

    async def ask(self) -> Any:
        """Return one reply."""
        return await self.client.messages.create(model="m", max_tokens=100, messages=self.history, tools=self.tools)

    def take(self, reply: Any) -> Any:
        """Add a reply to the history and return the id and the arguments of its call."""
        self.history.append({"role": "assistant", "content": [block.model_dump() for block in reply.content]})
        block = reply.content[0]
        return (block.id, block.input) if block.type == "tool_use" else None

    def answer(self, call_id: str, value: int) -> None:
        """Add the result of a call."""
        block = {"type": "tool_result", "tool_use_id": call_id, "content": str(value)}
        self.history.append({"role": "user", "content": [block]})


class Chat(Anthropic):
    """``chat.completions.create`` in a loop."""

    def __init__(self, url: str, transport: Any = None) -> None:
        import openai

        self.client = openai.AsyncOpenAI(**client_options(f"{url}/v1", transport))
        function = {"name": "add", "description": "Add.", "parameters": SCHEMA}
        self.tools = [{"type": "function", "function": function}]
        self.history = [{"role": "user", "content": "add"}]

    async def ask(self) -> Any:
        """Return one reply."""
        return await self.client.chat.completions.create(model="m", messages=self.history, tools=self.tools)

    def take(self, reply: Any) -> Any:
        """Add a reply to the history and return the id and the arguments of its call."""
        message = reply.choices[0].message
        self.history.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            return None
        call = message.tool_calls[0]
        return call.id, json.loads(call.function.arguments)

    def answer(self, call_id: str, value: int) -> None:
        """Add the result of a call."""
        self.history.append({"role": "tool", "tool_call_id": call_id, "content": str(value)})


class Responses(Chat):
    """``responses.create`` in a loop."""

    def __init__(self, url: str, transport: Any = None) -> None:
        super().__init__(url, transport)
        self.tools = [{"type": "function", "name": "add", "description": "Add.", "parameters": SCHEMA, "strict": False}]

    async def ask(self) -> Any:
        """Return one reply."""
        return await self.client.responses.create(model="m", input=self.history, tools=self.tools, store=False)

    def take(self, reply: Any) -> Any:
        """Add a reply to the history and return the id and the arguments of its call."""
        self.history += [item.model_dump(exclude_none=True) for item in reply.output]
        item = reply.output[0]
        return (item.call_id, json.loads(item.arguments)) if item.type == "function_call" else None

    def answer(self, call_id: str, value: int) -> None:
        """Add the result of a call."""
        self.history.append({"type": "function_call_output", "call_id": call_id, "output": str(value)})


class Google(Anthropic):
    """``models.generate_content`` in a loop."""

    def __init__(self, url: str, transport: Any = None) -> None:
        from google import genai

        http = httpx2.AsyncClient(transport=transport) if transport else httpx2.AsyncClient()
        options = genai.types.HttpOptions(base_url=url, httpx_async_client=http)
        self.client = genai.Client(api_key="k", http_options=options)
        declaration = {"name": "add", "description": "Add.", "parameters_json_schema": SCHEMA}
        self.tools = [{"function_declarations": [declaration]}]
        self.history = [{"role": "user", "parts": [{"text": "add"}]}]

    async def ask(self) -> Any:
        """Return one reply."""
        config = {"tools": self.tools, "automatic_function_calling": {"disable": True}}
        return await self.client.aio.models.generate_content(model="m", contents=self.history, config=config)

    def take(self, reply: Any) -> Any:
        """Add a reply to the history and return the id and the arguments of its call."""
        content = reply.candidates[0].content
        self.history.append(content.model_dump(exclude_none=True))
        call = content.parts[0].function_call
        return (call.id, call.args) if call else None

    def answer(self, call_id: str, value: int) -> None:
        """Add the result of a call."""
        part = {"function_response": {"name": "add", "id": call_id, "response": {"output": str(value)}}}
        self.history.append({"role": "user", "parts": [part]})


BARE = {"anthropic": Anthropic, "openai_chat": Chat, "openai": Responses, "google": Google}
REPLIES = {
    "anthropic": loopback.anthropic,
    "openai_chat": loopback.chat,
    "openai": loopback.responses,
    "google": loopback.google,
}


def sdk_loop(protocol: str, url: str) -> Loop:
    """Return the bare loop over one client; it gives the sum of the results."""
    made: list[Any] = []

    async def run(steps: int) -> int:
        if not made:
            made.append(BARE[protocol](url))
        (bare,), total = made, 0
        del bare.history[1:]
        for _ in range(steps + 1):
            call = bare.take(await bare.ask())
            if call is None:
                break
            value = call[1]["a"] + call[1]["b"]
            total += value
            bare.answer(call[0], value)
        return total

    return run


# --- stepengine -------------------------------------------------------------------------------------------------------


def provider_of(protocol: str, url: str, transport: Any = None) -> Any:
    """Return our adapter."""
    from stepengine.models import AnthropicProvider, GoogleProvider, OpenAIChatProvider, OpenAIProvider

    if protocol == "anthropic":
        return AnthropicProvider("k", url, transport)
    if protocol == "google":
        return GoogleProvider("k", url, transport)
    kind = OpenAIProvider if protocol == "openai" else OpenAIChatProvider
    return kind(api_key="k", base_url=f"{url}/v1", transport=transport)


def stepengine_loop(protocol: str, url: str) -> Loop:
    """Return a run of an engine with an agent and a validated tool."""
    from stepengine import AgentDefinition, Engine, Limits, tool

    @tool(in_thread=False)
    def add(a: int, b: int) -> int:
        """
        Add two numbers.

        Args:
            a: One number.
            b: Another number.
        """
        return a + b

    limits = Limits(max_steps=MOST + 1, max_actions=10 * MOST)
    agent = AgentDefinition("adder", model=f"{protocol}/m", tools=[add], limits=limits)
    engine = Engine(agents=[agent], models={protocol: provider_of(protocol, url)}, pricing=None)

    async def run(_: int) -> int:
        result = await engine.run("adder", "add")
        result.unwrap()
        return sum(int(call.result.text) for call in result.tool_calls)

    return run


# --- measuring --------------------------------------------------------------------------------------------------------


def reset(url: str, number: int) -> None:
    """Make the next *number* replies tool calls."""
    urllib.request.urlopen(f"{url}/reset/{number}").close()


def steps(protocol: str, client: str, count: int, port: str) -> float:
    """Return CPU milliseconds per step, the best of three; one client serves all runs, as in an application."""
    url = f"http://127.0.0.1:{port}"
    run = (sdk_loop if client == "sdk" else stepengine_loop)(protocol, url)

    async def once(number: int) -> float:
        await asyncio.to_thread(reset, url, number)
        gc.collect()
        start = time.process_time()
        total = await run(number)
        spent = time.process_time() - start
        if total != sum(range(number)) + number:
            msg = f"the tool calls of {client} over {protocol} add up to {total}"
            raise SystemExit(msg)
        return spent

    async def all_runs() -> float:
        await once(5)
        repeats = 1 if client == "sdk" and count > SLOW else REPEATS
        return min([await once(count) for _ in range(repeats)]) / count * 1e3

    return asyncio.run(all_runs())


def encode(protocol: str, client: str, count: int) -> float:
    """Return CPU milliseconds of one call with *count* messages before it, the best of three."""
    body = json.dumps(REPLIES[protocol](0, done=True)).encode()
    kind = {"content-type": "application/json"}
    transport = httpx2.MockTransport(lambda _: httpx2.Response(200, content=body, headers=kind))
    if client == "sdk":
        bare = BARE[protocol]("http://loopback", transport)
        shaped = sdk_history(protocol, count)
        bare.history = shaped

        async def ask() -> None:
            await bare.ask()
    else:
        ask = ours(protocol, transport, count)

    async def many() -> float:
        await ask()
        best = float("inf")
        for _ in range(REPEATS):
            gc.collect()
            start = time.process_time()
            for _ in range(CALLS):
                await ask()
            best = min(best, (time.process_time() - start) / CALLS)
        return best

    return asyncio.run(many()) * 1e3


def sdk_history(protocol: str, count: int) -> list[Any]:
    """Return a history of *count* messages in the shape that the SDK takes."""
    from stepengine.models import ModelRequest

    member = {"openai": "input", "google": "contents"}.get(protocol, "messages")
    request = ModelRequest(f"{protocol}/m", messages=our_history(count))
    encoded = json.loads(provider_of(protocol, "http://loopback")._encode(request, stream=False).content)  # noqa: SLF001
    return list(encoded[member])


def our_history(count: int) -> Any:
    """Return a transcript of *count* messages: a question, then calls and results."""
    from stepengine.data.messages import AssistantMessage, ToolCallPart, ToolMessage, UserMessage
    from stepengine.data.transcript import Transcript

    messages: list[Any] = [UserMessage("add")]
    for number in range((count - 1) // 2):
        messages += [
            AssistantMessage([ToolCallPart(f"c{number}", "add", {"a": number, "b": 1})]),
            ToolMessage(f"c{number}", "add", str(number + 1)),
        ]
    return Transcript(messages)


def ours(protocol: str, transport: Any, count: int) -> Callable[[], Awaitable[None]]:
    """Return a call of our provider with a history that has grown by a step since the last one."""
    from stepengine.data.messages import AssistantMessage, UserMessage
    from stepengine.models import ModelRequest

    provider = provider_of(protocol, "http://loopback", transport)
    grown = [our_history(count)]

    async def ask() -> None:
        number = len(grown)
        history = grown[-1].extend([AssistantMessage(f"answer {number}"), UserMessage(f"question {number}")])
        grown.append(history)
        await provider.complete(ModelRequest(f"{protocol}/m", messages=history))

    return ask


def main() -> None:
    """Measure what the command line asks for."""
    kind, protocol, client, count = sys.argv[1:5]
    ms = steps(protocol, client, int(count), sys.argv[5]) if kind == "steps" else encode(protocol, client, int(count))
    print(json.dumps({"ms": ms}))


if __name__ == "__main__":
    main()
