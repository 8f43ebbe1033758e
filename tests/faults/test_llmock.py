"""
The adapters against llmock, which speaks the providers' protocols over a real socket and breaks them in its own way.

It runs as a process of its own, because it brings another HTTP library. Needs the extra ``faults``.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from stepengine.data.messages import AssistantMessage, ToolCallPart, ToolMessage, UserMessage
from stepengine.data.models import ModelRequest, ReplyDone
from stepengine.data.tools import ToolSpec
from stepengine.data.transcript import Transcript
from stepengine.errors import ModelError, TruncatedReply
from stepengine.models import AnthropicProvider, GoogleProvider, OpenAIChatProvider, OpenAIProvider

COUNTERPARTS = (
    (
        "pypi:llmock",
        "0.2.2",
        "works",
        "five services: replies, tool calls, errors, rate limits, dropped connections; no thinking",
    ),
)

COMMAND = shutil.which("llmock")
WIRES = {
    "anthropic": "claude-sonnet-4-5",
    "openai": "gpt-4o",
    "openai_chat": "gpt-4o",
    "google": "gemini-2.5-flash",
    "groq": "llama-3.3-70b-versatile",
}
PATHS = {
    "anthropic": "/anthropic",
    "openai": "/v1",
    "openai_chat": "/v1",
    "google": "/gemini",
    "groq": "/groq/openai/v1",
}
TOOL = ToolSpec("add", "Adds.", {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})

pytestmark = [
    pytest.mark.faults,
    pytest.mark.anyio,
    pytest.mark.skipif(COMMAND is None, reason="the command llmock is not installed (extra 'faults')"),
    pytest.mark.parametrize("wire", WIRES),
]


@contextmanager
def served(*options: str) -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # It may live in an environment of its own, where this one's import path means nothing.
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [COMMAND, "serve", "--port", str(port), "--log-level", "error", *options]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=env)
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(300):
            try:
                post(url, "reset")
                break
            except urllib.error.URLError:
                time.sleep(0.1)
        yield url
    finally:
        process.terminate()
        process.wait(10)


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with served() as url:
        yield url


def post(url: str, what: str, **body: Any) -> None:
    data = json.dumps(body).encode()
    request = urllib.request.Request(f"{url}/_llmock/{what}", data, {"content-type": "application/json"}, method="POST")
    urllib.request.urlopen(request, timeout=10).close()


@pytest.fixture
def scenario(server: str) -> Iterator[Any]:
    yield lambda *behaviors: post(server, "scenario", behaviors=list(behaviors))
    post(server, "reset")


def provider_of(wire: str, url: str) -> Any:
    if wire == "anthropic":
        return AnthropicProvider("k", url)
    if wire == "google":
        return GoogleProvider("k", url, api_version="v1beta")  # the only version that llmock knows
    return OpenAIProvider("k", url) if wire == "openai" else OpenAIChatProvider(wire, "k", url)


@pytest.fixture
async def ask(server: str, wire: str):
    url = server + PATHS[wire]
    provider = provider_of(wire, url)

    async def asked(*messages: Any, stream: bool = True, tools: tuple[ToolSpec, ...] = ()) -> Any:
        history = Transcript(messages or [UserMessage("hello")])
        request = ModelRequest(f"{provider.name}/{WIRES[wire]}", "Be brief.", history, tools)
        if not stream:
            return await provider.complete(request)
        items = [delta async for delta in provider.stream(request)]
        assert type(items[-1]) is ReplyDone
        return items[-1].reply

    yield asked
    await provider.close()


@pytest.mark.spec("requirements:G5")
@pytest.mark.parametrize("stream", [True, False])
async def test_a_text_reply_is_read(wire, ask, scenario, stream):
    scenario({"type": "reply", "text": "It is five."})
    reply = await ask(stream=stream)
    assert reply.text == "It is five."
    assert reply.usage.total_tokens > 0


async def test_a_tool_loop_goes_round(wire, ask):
    reply = await ask(UserMessage("add"), tools=(TOOL,))
    (call,) = reply.tool_calls
    assert call.tool_name == "add"
    numbered = ToolCallPart("c1", call.tool_name, call.input, provider_data=call.provider_data)
    again = await ask(UserMessage("add"), AssistantMessage([numbered]), ToolMessage("c1", "add", "5"), tools=(TOOL,))
    assert again.text
    assert not again.tool_calls


@pytest.mark.spec("reliability:R21", "reliability:MP06")
@pytest.mark.parametrize("status", [400, 429, 503])
async def test_a_status_is_classified_with_the_original_error_body(wire, ask, scenario, status):
    scenario({"type": "fail", "status": status, **({"retry_after": 3} if status == 429 else {})})
    with pytest.raises(ModelError) as caught:
        await ask()
    assert caught.value.status == status
    assert caught.value.retryable == (status in (408, 409, 429) or status >= 500)
    if status == 429:
        assert caught.value.retry_after == 3


@pytest.mark.spec("reliability:MP19", "reliability:MP20")
@pytest.mark.parametrize("kind", ["disconnect", "truncate", "malformed"])
async def test_a_broken_stream_is_never_a_reply(wire, ask, scenario, kind):
    scenario({"type": "stream_fault", "kind": kind, "after_chunks": 3})
    with pytest.raises(ModelError) as caught:
        await ask()
    assert caught.value.retryable
    assert isinstance(caught.value, TruncatedReply) == (kind != "malformed")
