"""
Requests of the Gemini API: everything of the body but its contents. Pure: no SDK, no clock, no I/O.

Names are written as the API documents them, in camel case (EC57).
"""

from __future__ import annotations

from typing import Any

from stepengine.data.models import ModelRequest, Thinking
from stepengine.data.tools import ToolSpec
from stepengine.models._failures import INVALID_SIGNATURE
from stepengine.models._wire import budget_of, encoded, join_members, members_of, tool_choice_of
from stepengine.models.google.encode import SIGNED_SINCE, Flags, encode_messages, generation_of

__all__ = ("encode", "encode_count", "encode_tool", "path_of")

MODES = {"auto": "AUTO", "none": "NONE", "required": "ANY"}
LEVELS_SINCE = 3
"""The generation of Gemini that takes a level of thinking in place of a budget."""
OURS = b'[{"functionDeclarations":'

Json = dict[str, Any]


def path_of(model: str, method: str) -> str:
    """Return where a request goes; tuned models are named with their collection."""
    return f"{model if '/' in model else f'models/{model}'}:{method}"


def encode(request: ModelRequest, model: str, provider: str, tools: bytes, *, after: str = "") -> bytes:
    """
    Return the body of a request; whether the reply is a stream stands in the path and not here (EC58).

    Args:
        request: What is asked.
        model: The model's name at the provider.
        provider: The provider's name.
        tools: The encoded function declarations.
        after: How the same request failed before: a refused signature leaves earlier thoughts and signatures out.
    """
    return join_members(_members(request, model, provider, tools, thinking=after != INVALID_SIGNATURE))


def encode_count(request: ModelRequest, model: str, provider: str, tools: bytes) -> bytes:
    """Return the body of the question how many tokens a request has, with its system prompt and tools (EC75)."""
    members = {"model": encoded(path_of(model, "")[:-1]), **_members(request, model, provider, tools, thinking=True)}
    return join_members({"generateContentRequest": join_members(members)})


def encode_tool(spec: ToolSpec) -> Json:
    """Return a function declaration."""
    return {"name": spec.name, "description": spec.description, "parametersJsonSchema": spec.input_schema}


def _members(request: ModelRequest, model: str, provider: str, tools: bytes, *, thinking: bool) -> dict[str, bytes]:
    settings = request.settings
    generation = {
        "temperature": settings.temperature,
        "topP": settings.top_p,
        "maxOutputTokens": settings.max_tokens,
        "stopSequences": list(settings.stop_sequences) or None,
        "thinkingConfig": _thinking(settings.thinking, model),
        "responseMimeType": "application/json" if settings.response_schema is not None else None,
        "responseJsonSchema": settings.response_schema,
    }
    config = {name: value for name, value in generation.items() if value is not None}
    optional = {
        "systemInstruction": {"parts": [{"text": request.system_prompt}]} if request.system_prompt else None,
        "toolConfig": _tool_config(request),
        "generationConfig": config or None,
    }
    members = members_of(request, optional, OURS + tools + b"}]")
    flags = Flags(provider, model if thinking else "", generation_of(model) >= SIGNED_SINCE)
    members["contents"] = encode_messages(request, flags)
    return members


def _thinking(thinking: Thinking | None, model: str) -> Json | None:
    if thinking is None or thinking.mode == "none":
        return None
    config: Json = {"includeThoughts": thinking.show}
    if thinking.tokens is None and thinking.effort is not None and generation_of(model) >= LEVELS_SINCE:
        return {**config, "thinkingLevel": "high" if thinking.effort == "max" else thinking.effort}
    budget = budget_of(thinking)
    return config if budget is None else {**config, "thinkingBudget": budget}


def _tool_config(request: ModelRequest) -> Json | None:
    choice = tool_choice_of(request)
    if choice is None:
        return None
    if choice in MODES:
        return {"functionCallingConfig": {"mode": MODES[choice]}}
    return {"functionCallingConfig": {"mode": "ANY", "allowedFunctionNames": [choice]}}
