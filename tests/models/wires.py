"""The wires by name, and what tests ask of their encoders."""

from __future__ import annotations

import json
from typing import Any

from stepengine.data.messages import (
    ToolCallPart,
    ToolMessage,
)
from stepengine.data.models import ModelRequest, ModelSettings, Thinking
from stepengine.data.tools import ToolSpec
from stepengine.data.transcript import Transcript
from stepengine.models import (
    AnthropicProvider,
    BedrockProvider,
    GoogleInteractionsProvider,
    GoogleProvider,
    OpenAIChatProvider,
    OpenAIProvider,
)
from stepengine.models._byte_reader import ReplyReader
from stepengine.models._failures import RequestLabel
from stepengine.models.anthropic.stream import AnthropicAccumulator
from stepengine.models.google.decode import GoogleAccumulator
from stepengine.models.keys import Credentials
from stepengine.models.openai.decode import ResponsesAccumulator
from stepengine.models.openai_chat.decode import ChatAccumulator

FOUR = ("anthropic", "openai", "openai_chat", "google")
EACH = (*FOUR, "bedrock_converse", "google_interactions")
MODEL = {
    "anthropic": "claude-sonnet-4-5",
    "openai": "gpt-5",
    "openai_chat": "gpt-4o",
    "google": "gemini-3-pro",
    "openrouter": "vendor/model",
    "ollama": "llama3",
    "bedrock_converse": "amazon.nova-pro-v1:0",
    "google_interactions": "gemini-3-pro",
}
HISTORY = {"anthropic": "messages", "openai": "input", "google": "contents"}
OWN = {
    "anthropic": AnthropicProvider,
    "openai": OpenAIProvider,
    "google": GoogleProvider,
    "google_interactions": GoogleInteractionsProvider,
}
ACCUMULATORS = {"anthropic": AnthropicAccumulator, "openai": ResponsesAccumulator, "google": GoogleAccumulator}
PNG = b"\x89PNG"
TOOL = ToolSpec("look", "Looks.", {"type": "object", "properties": {"at": {"type": "string"}}})


def provider_of(name: str, **options: Any) -> Any:
    if name == "bedrock_converse":
        return BedrockProvider(
            "k", region="us-east-1", name=name, endpoint="converse", **options
        )._get_prefixed_provider("")
    return OWN[name]("k", **options) if name in OWN else OpenAIChatProvider(name, "k", **options)


def body(name: str, *messages: Any, stream: bool = False, **fields: Any) -> dict[str, Any]:
    request = ModelRequest(f"{name}/{MODEL[name]}", messages=Transcript(messages), **fields)
    return json.loads(provider_of(name)._encode(request, stream=stream).content)


def sent(name: str, *messages: Any, **fields: Any) -> list[dict[str, Any]]:
    return body(name, *messages, **fields)[HISTORY.get(name, "messages")]


def call(number: int, name: str = "look", made_by: str | None = None, **fields: Any) -> ToolCallPart:
    data = {"provider": made_by, "model": MODEL.get(made_by), "id": f"their_{number}"} if made_by else None
    return ToolCallPart(f"c{number}", name, {"at": str(number)}, provider_data=data, **fields)


def result(number: int, *content: Any, status: str = "ok") -> ToolMessage:
    return ToolMessage(f"c{number}", "look", content or (f"saw {number}",), status)


MANUAL = ModelSettings(thinking=Thinking("extended", 2_000))


def made(provider: str, model: str = "m") -> RequestLabel:
    return RequestLabel(provider=provider, model=f"{provider}/{model}", credentials=Credentials(None, "no key"))


def reader(wire: str, model: str = "m", provider: str = "") -> ReplyReader:
    kind, call = ACCUMULATORS.get(wire, ChatAccumulator), made(provider or wire, model)
    return ReplyReader(kind(call, model, None), call)
