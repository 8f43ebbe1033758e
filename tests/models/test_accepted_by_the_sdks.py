"""Any transcript, by whomever it was made, is a request that every SDK's own types accept, with nothing unknown in it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import settings as limits
from hypothesis import strategies as st
from pydantic import TypeAdapter

from stepengine.data.messages import (
    AssistantMessage,
    OpaquePart,
    ToolCallPart,
    ToolMessage,
    ToolReferencePart,
    UserMessage,
)
from stepengine.data.models import ModelRequest, ModelSettings, Thinking
from stepengine.data.transcript import Transcript
from stepengine.models import CodeExecution, FileSearch, Programs, UrlContext, WebSearch
from stepengine.tools.agent_tools import BUILT_IN
from tests.models.histories import histories, users
from tests.models.wires import FOUR, MODEL, TOOL, provider_of

COUNTERPARTS = (
    ("pypi:anthropic", "2.12.0", "works", "requests validate against its types"),
    ("pypi:openai", "3.54.0", "works", "Responses and Chat Completions requests validate against its types"),
    (
        "pypi:google-genai",
        "3.4.0",
        "works",
        "requests validate against its types",
    ),
)

SCHEMA = {"title": "Answer", "type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
FULL = ModelSettings(
    max_tokens=20_000,
    stop_sequences=["X"],
    tool_choice="look",
    parallel_tool_calls=False,
    response_schema=SCHEMA,
)
settings = st.sampled_from(
    [
        ModelSettings(),
        FULL,
        attrs.evolve(FULL, tool_choice="required"),
        ModelSettings(thinking=Thinking("extended", 2_000), tool_choice="auto"),
        ModelSettings(thinking=Thinking("enabled")),
    ]
)
RUNS = {
    "anthropic": [
        WebSearch(max_uses=2, blocked_domains="a.org", location={"city": "Bonn"}),
        UrlContext(),
        CodeExecution(),
        Programs("look"),
    ],
    "openai": [
        WebSearch(allowed_domains="a.org", location={"country": "DE"}),
        CodeExecution(files="f_1"),
        FileSearch("s"),
        Programs("look", direct="look"),
    ],
    "openai_chat": [],
    "google": [WebSearch(), UrlContext(), CodeExecution(), FileSearch("s", max_results=3)],
}


def said(name: str) -> st.SearchStrategy[ModelSettings]:
    """Settings of one vocabulary, with the tools that the provider runs by itself."""
    return st.builds(
        ModelSettings,
        service_tier=st.sampled_from([None, "auto", "standard", "flex", "priority", "fast"]),
        seed=st.none() | st.integers(0, 9),
        logprobs=st.none() | st.integers(0, 20),
        store=st.none() | st.booleans(),
        safety=st.sampled_from([{}, {"harassment": "off", "dangerous_content": "only_high"}]),
        cache=st.sampled_from([None, "5m", "1h", "off"]),
        cache_key=st.sampled_from([None, "docs"]),
        fallbacks=st.sampled_from([(), "default", ["claude-opus-4-8"]]),
        response_schema=st.sampled_from([None, SCHEMA, {"type": "object"}, {"type": "array", "items": SCHEMA}]),
        output=st.sampled_from([None, "tool"]),
        parallel_tool_calls=st.none() | st.booleans(),
        tool_choice=st.sampled_from([None, "auto", "required", "none"]),
        server_tools=st.lists(st.sampled_from(RUNS[name]), max_size=2, unique=True) if RUNS[name] else st.just(()),
    )


NOT_IN_THE_SDK = {"reasoning_content", "reasoning_details", "reasoning"}
"""How other services of the same wire want thinking back; the SDK of the first one does not know it."""


@cache
def adapter(name: str) -> TypeAdapter[Any]:
    if name == "anthropic":
        from anthropic.types.message_create_params import MessageCreateParamsStreaming as Params
    elif name == "openai":
        from openai.types.responses.response_create_params import ResponseCreateParamsStreaming as Params
    else:
        from openai.types.chat.completion_create_params import CompletionCreateParamsStreaming as Params
    return TypeAdapter(Params)


def whole(value: Any) -> Any:
    """The value with its lazily validated iterables read."""
    if isinstance(value, Mapping):
        return {key: whole(item) for key, item in value.items()}
    if isinstance(value, str | bytes) or not hasattr(value, "__iter__"):
        return value
    return [whole(item) for item in value]


@cache
def google_adapters() -> dict[str, TypeAdapter[Any]]:
    """The members of a body of Gemini; its SDK has no type of the whole, and these refuse unknown members."""
    from google.genai import types

    kinds: dict[str, Any] = {
        "contents": list[types.Content],
        "systemInstruction": types.Content,
        "tools": list[types.Tool],
        "toolConfig": types.ToolConfig,
        "generationConfig": types.GenerationConfig,
        "safetySettings": list[types.SafetySetting],
        "serviceTier": types.ServiceTier,
        "store": bool,
    }
    return {member: TypeAdapter(kind) for member, kind in kinds.items()}


def check_google(body: dict[str, Any]) -> None:
    for member, value in body.items():
        kind = google_adapters()[member]
        dumped = kind.dump_json(kind.validate_json(json.dumps(value)), by_alias=True, exclude_none=True)
        assert plain_bytes(json.loads(dumped)) == plain_bytes(value)


def plain_bytes(value: Any) -> Any:
    """The value with base64 in the one alphabet; the SDK writes the other one."""
    if isinstance(value, list):
        return [plain_bytes(item) for item in value]
    if not isinstance(value, dict):
        return value
    signed = {k: v.replace("-", "+").replace("_", "/") for k, v in value.items() if k in {"data", "thoughtSignature"}}
    return {**{k: plain_bytes(v) for k, v in value.items()}, **signed}


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("requirements:G10", "requirements:B14", "reliability:TL09", "ecosystem:EC57", "ecosystem:EC88")
@given(messages=histories, how=settings, tail=st.lists(users, max_size=1))
def test_any_transcript_encodes_to_a_request_the_sdk_types_accept(messages, how, tail):
    for name in FOUR:
        model = f"{name}/{MODEL[name]}"
        check(name, ModelRequest(model, "Be good.", Transcript(messages), (TOOL,), settings=how, tail=tail))


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec(
    "requirements:A15", "providers:PV56", "providers:PV60", "providers:PV65", "providers:PV66", "providers:PV67"
)
@pytest.mark.parametrize("model", ["gpt-5.6", "gpt-4.1", "claude-opus-5", "claude-sonnet-4-0", "gemini-3-pro"])
@limits(max_examples=20)
@given(data=st.data(), strict=st.booleans())
def test_any_settings_encode_to_members_the_sdk_types_know(model, data, strict):
    names = (
        {"g": ["openai", "openai_chat"], "c": ["anthropic"]}.get(model[0], []) if "gemini" not in model else ["google"]
    )
    for name in names:
        how, tools = data.draw(said(name)), (attrs.evolve(TOOL, strict=strict),)
        if model == "claude-sonnet-4-0":  # whose programs call nothing
            kept = [item for item in how.server_tools if not isinstance(item, Programs)]
            how = attrs.evolve(how, server_tools=kept)
        check(name, ModelRequest(f"{name}/{model}", "Be good.", Transcript([UserMessage("hi")]), tools, settings=how))


HIDDEN = tuple([attrs.evolve(TOOL, name=name, defer_loading=True) for name in ("hear", "smell")])
SERVER = {"execution": "server", "call_id": None}
SEARCHED = {
    "openai": [
        {"type": "tool_search_call", "id": "tsc_1", **SERVER, "arguments": {"paths": ["smell"]}},
        {"type": "tool_search_output", "id": "tso_1", **SERVER, "tools": [], "created_by": "somebody"},
    ],
}


@pytest.mark.spec("providers:PV57", "providers:PV63", "providers:PV64")
@pytest.mark.parametrize("name", FOUR)
@pytest.mark.parametrize("strict", [False, True])
def test_hidden_and_found_tools_encode_to_known_sdk_members(name, strict):
    searches = [AssistantMessage([OpaquePart(name, block) for block in SEARCHED.get(name, ())]), UserMessage("go on")]
    found = ToolMessage("c1", "look", ["It is dark.", ToolReferencePart("hear")])
    messages = [UserMessage("hi"), AssistantMessage([ToolCallPart("c1", "look", {})]), found, *searches]
    tools = tuple([attrs.evolve(tool, strict=strict) for tool in (TOOL, *HIDDEN, BUILT_IN["find_tools"].spec)])
    model = {"openai": "gpt-5.6"}.get(name, MODEL[name])
    check(name, ModelRequest(f"{name}/{model}", "Be good.", Transcript(messages), tools))


def check(name: str, request: ModelRequest) -> None:
    body = json.loads(provider_of(name)._encode(request, stream=True).content)
    if name == "google":
        check_google(body)
        return
    if name == "openai_chat":
        body["messages"] = [{k: v for k, v in m.items() if k not in NOT_IN_THE_SDK} for m in body["messages"]]
    if "fallbacks" in body:
        from anthropic.types.beta.beta_fallbacks_param import BetaFallbacksParam

        names = body.pop("fallbacks")
        assert names == "default" or whole(TypeAdapter(BetaFallbacksParam).validate_python(names)) == names
    assert whole(adapter(name).validate_python(body)) == body
