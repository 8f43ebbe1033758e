"""
Bare loops over the official SDKs: history, one call per message, the message of its result. No agent, no validation, no engine.

A client that calls itself is switched off where it exists, and so are the SDKs' own retries.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

from benchmarks.engines import UNCOUNTED, Run, Told, Work, arguments

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
PACKAGES = {"anthropic": "anthropic", "openai_chat": "openai", "openai": "openai", "google": "google-genai"}
"""Each protocol with the package that speaks it."""


class Anthropic:
    """``messages.create`` in a loop."""

    def __init__(self, url: str) -> None:
        import anthropic

        self.client: Any = anthropic.AsyncAnthropic(api_key="k", base_url=url, max_retries=0, open_telemetry=False)
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

    def called(self, number: int) -> Any:
        """Return the message of a call."""
        block = {"type": "tool_use", "id": f"call_{number}", "name": "add", "input": arguments(number)}
        return {"role": "assistant", "content": [block]}

    def text(self, reply: Any) -> str:
        """Return the text of a reply."""
        return str(reply.content[0].text)


class Chat(Anthropic):
    """``chat.completions.create`` in a loop."""

    def __init__(self, url: str) -> None:
        import openai

        self.client = openai.AsyncOpenAI(api_key="k", base_url=f"{url}/v1", max_retries=0)
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

    def called(self, number: int) -> Any:
        """Return the message of a call."""
        function = {"name": "add", "arguments": json.dumps(arguments(number))}
        return {"role": "assistant", "tool_calls": [{"id": f"call_{number}", "type": "function", "function": function}]}

    def text(self, reply: Any) -> str:
        """Return the text of a reply."""
        return str(reply.choices[0].message.content)


class Responses(Chat):
    """``responses.create`` in a loop."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
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

    def called(self, number: int) -> Any:
        """Return the message of a call."""
        call = {"type": "function_call", "call_id": f"call_{number}", "name": "add"}
        return {**call, "arguments": json.dumps(arguments(number))}

    def text(self, reply: Any) -> str:
        """Return the text of a reply."""
        return str(reply.output_text)


class Google(Anthropic):
    """``models.generate_content`` in a loop."""

    def __init__(self, url: str) -> None:
        from google import genai

        self.client = genai.Client(api_key="k", http_options=genai.types.HttpOptions(base_url=url))
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

    def called(self, number: int) -> Any:
        """Return the message of a call."""
        call = {"name": "add", "id": f"call_{number}", "args": arguments(number)}
        return {"role": "model", "parts": [{"function_call": call}]}

    def text(self, reply: Any) -> str:
        """Return the text of a reply."""
        return str(reply.text)


BARE = {"anthropic": Anthropic, "openai_chat": Chat, "openai": Responses, "google": Google}


def over_http(url: str, protocol: str) -> Run:
    """Return runs over one client; see the package's docstring."""
    bare: Any = BARE[protocol](url)

    async def http_run(steps: int) -> Told:
        results: list[int] = []
        del bare.history[1:]
        for _ in range(steps + 1):
            reply = await bare.ask()
            call = bare.take(reply)
            if call is None:
                return lambda: Work(UNCOUNTED, results, bare.text(reply))
            results.append(call[1]["a"] + call[1]["b"])
            bare.answer(call[0], results[-1])
        return lambda: Work(UNCOUNTED, results, "")

    return http_run


def behind(url: str, count: int, protocol: str) -> Callable[[], Awaitable[str]]:
    """Return one call behind a history; see the package's docstring."""
    bare: Any = BARE[protocol](url)
    for number in range((count - 1) // 2):
        bare.history.append(bare.called(number))
        bare.answer(f"call_{number}", number + 1)

    async def ask() -> str:
        return str(bare.text(await bare.ask()))

    return ask
