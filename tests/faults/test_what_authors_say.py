"""
What an author can say beside thinking, held against loopback servers that enforce the providers' rules: settings, structured
output, caching, server tools. A whole run keeps the rules, or the server refuses it.
"""

from __future__ import annotations

import json
from decimal import Decimal
from typing import Any

import pytest

from stepengine import AgentDefinition, Engine, ModelSettings, RetryPolicy, tool
from stepengine.data.json import thaw
from stepengine.data.models import ModelRequest, ReplyDone, TextChunk
from stepengine.errors import ModelError
from stepengine.models import (
    CitationPart,
    CodeExecution,
    FileSearch,
    Models,
    OpaquePart,
    OpenAIChatProvider,
    UrlContext,
    WebSearch,
)
from tests.faults.scripts import ANTHROPIC, CHAT, GOOGLE, RESPONSES, WIRES, chat_reply, google_chunk
from tests.faults.server import Rule, fault_server

SAID = ("It is five.", [], "end_turn")
SCHEMA = {
    "type": "object",
    "properties": {"sum": {"type": "integer"}},
    "required": ["sum"],
    "additionalProperties": False,
}
MAP = {"type": "object", "additionalProperties": {"type": "string"}}


@tool
def look(at: str) -> str:
    """Look at something."""
    return f"saw {at}"


async def ran(
    name: str, model: str, provider: Any, pricing: Any = None, prompt: Any = "What is it?", **fields: Any
) -> Any:
    fields.setdefault("tools", [look])
    agent = AgentDefinition("looker", model=f"{name}/{model}", **fields)
    models = Models({name: provider})
    how = {} if pricing else {"pricing": None}
    async with Engine(agents=[agent], models=models, retry=RetryPolicy(attempts=2, base_seconds=0), **how) as engine:
        first = await engine.run("looker", prompt)
        first.unwrap()
        again = await engine.run("looker", "And then?", previous=first.state)
        again.unwrap()
    return first


# --- settings that a wire has no word for -----------------------------------------------------------------------------

EVERYTHING = ModelSettings(
    service_tier="flex", seed=7, logprobs=2, store=True, safety={"harassment": "off"}, cache="1h", cache_key="docs",
    parallel_tool_calls=False, fallbacks="default",
)  # fmt: skip
DROPPED = {
    "anthropic": {"service_tier", "seed", "logprobs", "store", "safety", "cache_key"},
    "openai": {"seed", "safety", "cache", "fallbacks"},
    "openai_chat": {"service_tier", "store", "safety", "cache", "cache_key", "fallbacks"},
    "google": {"cache", "cache_key", "parallel_tool_calls", "fallbacks"},
}


@pytest.mark.spec("requirements:A15", "ecosystem:EC84", "providers:PV65", "providers:PV67")
@pytest.mark.parametrize("wire", WIRES, ids=str)
@pytest.mark.parametrize("stream", [False, True])
async def test_unsupported_settings_are_warned_once_and_named_in_replies(wire, stream, caplog):
    request = wire.request(settings=EVERYTHING)
    reply = wire.stream(*SAID) if stream else wire.reply(*SAID)
    async with fault_server(rule := Rule(reply)) as server:
        provider = wire.make(server.url)
        replies = [await whole(provider, request, stream=stream) for _ in range(2)]
        await provider.close()
    assert [set(reply.provider_data["dropped"]) for reply in replies] == [DROPPED[wire.name]] * 2
    told = [(record.setting, record.provider, record.model) for record in caplog.records]
    assert sorted(told) == sorted((name, wire.name, wire.model) for name in DROPPED[wire.name])
    assert all(f"{name}=" in caplog.text for name in DROPPED[wire.name])
    assert len(rule.bodies) == 2


async def whole(provider: Any, request: ModelRequest, *, stream: bool) -> Any:
    if not stream:
        return await provider.complete(request)
    deltas = [delta async for delta in provider.stream(request)]
    assert isinstance(deltas[-1], ReplyDone)
    return deltas[-1].reply


@pytest.mark.spec("requirements:A15")
@pytest.mark.parametrize("wire", WIRES, ids=str)
async def test_unsupported_settings_can_be_made_an_error(wire):
    strict = ModelSettings(cache_key="docs", safety={"harassment": "off"}, seed=1, cache="1h", unsupported="error")
    async with fault_server(rule := Rule(wire.reply(*SAID))) as server:
        provider = wire.make(server.url)
        with pytest.raises(ModelError, match="does not support") as caught:
            await provider.complete(wire.request(settings=strict))
        await provider.complete(wire.request(settings=ModelSettings(unsupported="error", temperature=0.5)))
        await provider.close()
    assert (caught.value.kind, caught.value.retryable) == ("settings", False)
    assert len(rule.bodies) == 1


@pytest.mark.spec("providers:PV65")
@pytest.mark.parametrize(
    ("model", "fast"), [("claude-opus-4-7", True), ("claude-opus-5", True), ("claude-sonnet-5", False)]
)
async def test_the_fast_mode_of_claude_is_sent_only_where_available(model, fast):
    async with fault_server(Rule(ANTHROPIC.reply(*SAID))) as server:
        provider = ANTHROPIC.make(server.url)
        reply = await provider.complete(ModelRequest(f"anthropic/{model}", settings=ModelSettings(service_tier="fast")))
        await provider.close()
    head, body = server.requests[0]
    assert (json.loads(body).get("speed"), b"fast-mode-2026-02-01" in head) == (
        ("fast", True) if fast else (None, False)
    )
    assert reply.provider_data.get("dropped", []) == ([] if fast else ["service_tier"])


def chat_with_tokens() -> list[bytes]:
    tokens = [{"content": [{"token": piece, "logprob": -0.5, "top_logprobs": []}]} for piece in ("It ", "is.")]
    chunks = [{"delta": {"content": kept["content"][0]["token"]}, "logprobs": kept} for kept in tokens]
    ends = {"delta": {}, "finish_reason": "stop", "logprobs": None}
    return [
        *[b"data: %s\n\n" % json.dumps({"choices": [{"index": 0, **choice}]}).encode() for choice in [*chunks, ends]],
        b"data: [DONE]\n\n",
    ]


def gemini_with_tokens() -> list[bytes]:
    chunks = []
    for piece, finish in (("It ", None), ("is.", "STOP")):
        chunk = google_chunk([{"text": piece}], finish)
        chunk["candidates"][0]["logprobsResult"] = {"chosenCandidates": [{"token": piece, "logProbability": -0.5}]}
        chunks.append(chunk)
    return [b"data: %s\r\n\r\n" % json.dumps(chunk).encode() for chunk in chunks]


def responses_with_tokens() -> list[bytes]:
    tokens = [{"token": piece, "logprob": -0.5, "top_logprobs": []} for piece in ("It ", "is.")]
    events = RESPONSES.stream("It is.", [], "end_turn")
    return [
        event.replace(b'"annotations": []', b'"annotations": [], "logprobs": ' + json.dumps(tokens).encode())
        for event in events
    ]


@pytest.mark.spec("providers:PV67")
@pytest.mark.parametrize(
    ("wire", "events", "where"),
    [
        (CHAT, chat_with_tokens, lambda data: data["logprobs"]["content"]),
        (GOOGLE, gemini_with_tokens, lambda data: data["logprobsResult"]["chosenCandidates"]),
        (RESPONSES, responses_with_tokens, lambda data: data["logprobs"]),
    ],
    ids=["openai_chat", "google", "openai"],
)
async def test_the_probabilities_of_all_tokens_of_a_stream_are_kept(wire, events, where):
    async with fault_server(Rule(events())) as server:
        provider = wire.make(server.url)
        reply = await whole(provider, wire.request(settings=ModelSettings(logprobs=0)), stream=True)
        await provider.close()
    assert [token["token"] for token in where(reply.provider_data)] == ["It ", "is."]


@pytest.mark.spec("providers:PV13")
@pytest.mark.parametrize(("model", "sent"), [("o3", False), ("o4-mini", False), ("gpt-4o", True)])
async def test_stop_sequences_are_applied_locally_where_the_model_refuses_them(model, sent, monkeypatch):
    def refuses(body: dict[str, Any]) -> str | None:
        return "Unsupported parameter: 'stop'" if "stop" in body and not sent else None

    async with fault_server(rule := Rule(chat_reply("One STOP two", [], "end_turn"), rules=(refuses,))) as server:
        monkeypatch.setenv("OPENAI_BASE_URL", server.url)
        provider = OpenAIChatProvider("openai_chat", "k")
        reply = await provider.complete(
            ModelRequest(f"openai_chat/{model}", settings=ModelSettings(stop_sequences=["STOP"]))
        )
        await provider.close()
    assert reply.text == ("One STOP two" if sent else "One ")
    assert ("stop" in rule.bodies[0]) == sent


@pytest.mark.spec("providers:PV39")
async def test_mistral_is_offered_no_tools_when_it_may_call_none():
    def garbles(body: dict[str, Any]) -> str | None:
        return "tool_choice none is not obeyed" if body.get("tool_choice") == "none" or "tools" in body else None

    async with fault_server(rule := Rule(chat_reply(*SAID), rules=(garbles,))) as server:
        provider = OpenAIChatProvider("mistral", "k", server.url)
        settings = ModelSettings(tool_choice="none", parallel_tool_calls=False)
        await ran("mistral", "mistral-large-latest", provider, settings=settings)
    assert rule.refused == []


@pytest.mark.spec("providers:PV24", "ecosystem:EC84")
async def test_cerebras_gets_no_parallel_calls_and_no_tier(caplog):
    def refuses(body: dict[str, Any]) -> str | None:
        return "property is unsupported" if {"parallel_tool_calls", "service_tier"} & body.keys() else None

    async with fault_server(rule := Rule(chat_reply(*SAID), rules=(refuses,))) as server:
        provider = OpenAIChatProvider("cerebras", "k", server.url)
        settings = ModelSettings(parallel_tool_calls=False, service_tier="flex", seed=3)
        await ran("cerebras", "gpt-oss-120b", provider, settings=settings)
    assert rule.refused == []
    assert rule.bodies[0]["seed"] == 3
    assert sorted(record.setting for record in caplog.records) == ["parallel_tool_calls", "service_tier"]


# --- structured output ------------------------------------------------------------------------------------------------


def optional_members(schema: Any) -> int:
    if isinstance(schema, list):
        return sum(map(optional_members, schema))
    if not isinstance(schema, dict):
        return 0
    here = set(schema.get("properties", {})) - set(schema.get("required", []))
    return len(here) + sum(map(optional_members, schema.values()))


def is_open(schema: Any) -> bool:
    if isinstance(schema, list):
        return any(map(is_open, schema))
    if not isinstance(schema, dict):
        return False
    here = schema.get("type") == "object" and schema.get("additionalProperties") is not False
    return here or any(map(is_open, schema.values()))


def anthropic_promises(body: dict[str, Any]) -> str | None:
    """What Anthropic says of schemas that it shall keep to (PV43)."""
    schemas = [tool["input_schema"] for tool in body.get("tools", []) if tool.get("strict")]
    if len(schemas) > 20:
        return f"Too many strict tools ({len(schemas)})"
    if answer := body.get("output_config", {}).get("format"):
        schemas.append(answer["schema"])
    if any(map(is_open, schemas)):
        return "For 'object' type, 'additionalProperties' must be explicitly set to false"
    count = sum(map(optional_members, schemas))
    return f"Schemas contains too many optional parameters ({count}) (limit: 24)" if count > 24 else None


def of_many(count: int, optional: int) -> list[Any]:
    """Strict tools with *optional* members that may be left out."""

    def made(number: int) -> Any:
        names = [f"m{n}" for n in range(optional)]
        source = f"def tool_{number}(at: str, {', '.join(f'{name}: int = 0' for name in names)}) -> str:\n    '''T.'''\n    return at"
        space: dict[str, Any] = {}
        exec(source, space)
        return tool(space[f"tool_{number}"], strict=True)

    return [made(number) for number in range(count)]


@pytest.mark.spec("providers:PV43")
@pytest.mark.parametrize(("count", "optional", "strict"), [(30, 0, 20), (9, 4, 5), (3, 1, 3)])
async def test_anthropic_gets_no_more_strict_schemas_than_it_allows(count, optional, strict, caplog):
    schema = {**SCHEMA, "properties": {**SCHEMA["properties"], "a": {"type": "string"}, "b": {"type": "string"}}}
    reply = ANTHROPIC.reply('{"sum": 5}', [], "end_turn")
    async with fault_server(rule := Rule(reply, rules=(anthropic_promises,))) as server:
        settings = ModelSettings(response_schema=schema)
        provider = ANTHROPIC.make(server.url)
        await ran("anthropic", "claude-opus-5", provider, tools=of_many(count, optional), settings=settings)
    assert rule.refused == []
    assert sum(bool(tool.get("strict")) for tool in rule.bodies[0]["tools"]) == strict
    assert rule.bodies[0]["tools"] == rule.bodies[1]["tools"]
    assert optional_members(rule.bodies[0]["output_config"]["format"]["schema"]) == 2
    assert ("strict=" in caplog.text) == (strict < count)


@pytest.mark.spec("providers:PV43")
async def test_a_too_large_grammar_is_replaced_by_an_answer_tool():
    def too_large(body: dict[str, Any]) -> str | None:
        promised = "format" in body.get("output_config", {}) or any(tool.get("strict") for tool in body["tools"])
        return "The compiled grammar is too large. Simplify your schema." if promised else None

    replies = [ANTHROPIC.reply("", [("final_answer", '{"sum": 5}')], "tool_use")]
    async with fault_server(rule := Rule(*replies, rules=(too_large,))) as server:
        provider, settings = ANTHROPIC.make(server.url), ModelSettings(response_schema=SCHEMA)
        first = await ran("anthropic", "claude-opus-5", provider, tools=of_many(2, 0), settings=settings)
    assert json.loads(first.unwrap()) == {"sum": 5}
    assert len(rule.refused) == 2  # once for each of the two runs
    assert rule.bodies[1]["tool_choice"] == {"type": "any"}


UNPROMISED: list[Any] = [
    pytest.param(ANTHROPIC, "claude-opus-5", MAP, ModelSettings(), id="anthropic: a map"),
    pytest.param(ANTHROPIC, "claude-sonnet-4-0", SCHEMA, ModelSettings(), id="anthropic: an older model"),
    pytest.param(GOOGLE, "gemini-2.5-flash", SCHEMA, ModelSettings(), id="google: tools beside it"),
    *[pytest.param(wire, None, SCHEMA, ModelSettings(output="tool"), id=f"{wire}: asked for") for wire in WIRES],
    pytest.param(CHAT, None, {"type": "array"}, ModelSettings(output="tool"), id="openai_chat: a list"),
]


@pytest.mark.spec("ecosystem:EC88", "providers:PV41", "providers:PV43")
@pytest.mark.parametrize(("wire", "model", "schema", "how"), UNPROMISED)
async def test_an_unenforced_schema_is_answered_by_a_tool(wire, model, schema, how):
    value: Any = [1, 2] if schema == {"type": "array"} else {"sum": 5}
    answer = json.dumps({"answer": value} if isinstance(value, list) else value)

    def native(body: dict[str, Any]) -> str | None:
        generation = body.get("generationConfig", {})
        found = ("response_format" in body, "text" in body, "output_config" in body, "responseJsonSchema" in generation)
        return "no schemas here" if any(found) else None

    said = [("", [("look", '{"at": "it"}')], "tool_use"), ("Done.", [("final_answer", answer)], "tool_use")]
    replies = [wire.reply(*each) for each in (*said, *said)]
    name = wire.model.partition("/")[0]
    async with fault_server(rule := Rule(*replies, rules=(native,))) as server:
        fields = {"tools": [look], "settings": ModelSettings(response_schema=schema, output=how.output)}
        first = await ran(name, model or wire.model.partition("/")[2], wire.make(server.url), **fields)
    assert rule.refused == []
    assert json.loads(first.unwrap()) == value
    assert [call.tool_name for call in first.tool_calls] == ["look"]
    last = first.state.message_history[-1]
    assert (last.role, json.loads(last.text), last.tool_calls) == ("assistant", value, ())
    assert json.dumps(rule.bodies[2]).count("final_answer") == json.dumps(rule.bodies[0]).count("final_answer")


@pytest.mark.spec("ecosystem:EC88")
@pytest.mark.parametrize("wire", WIRES, ids=str)
async def test_answers_by_tool_stream_as_text_and_early_ones_repeat(wire):
    settings = ModelSettings(response_schema=SCHEMA, output="tool")
    calls = [("add", '{"a": 2, "b": 3}'), ("final_answer", '{"sum": 0}')]
    replies = [wire.stream("", [("final_answer", '{"sum": 5}')], "tool_use"), wire.stream("", calls, "tool_use")]
    async with fault_server(Rule(*replies)) as server:
        provider = wire.make(server.url)
        deltas = [delta async for delta in provider.stream(wire.request(settings=settings))]
        early = await whole(provider, wire.request(settings=settings), stream=True)
        await provider.close()
    assert json.loads("".join([delta.text for delta in deltas[:-1] if isinstance(delta, TextChunk)])) == {"sum": 5}
    assert {type(delta) for delta in deltas[:-1]} == {TextChunk}
    assert (deltas[-1].reply.stop_reason, deltas[-1].reply.provider_data["output"]) == ("end_turn", "tool")
    assert [call.tool_name for call in early.tool_calls] == ["add"]
    assert early.stop_reason == "tool_use"


@pytest.mark.spec("providers:PV43")
async def test_an_impossible_native_schema_is_refused_before_sending():
    async with fault_server(rule := Rule(ANTHROPIC.reply(*SAID))) as server:
        provider = ANTHROPIC.make(server.url)
        with pytest.raises(ModelError, match="open objects") as caught:
            await provider.complete(ANTHROPIC.request(settings=ModelSettings(response_schema=MAP, output="native")))
        await provider.close()
    assert (caught.value.kind, rule.bodies) == ("settings", [])


async def test_a_tool_named_final_answer_conflicts_with_answers_by_tool():
    @tool
    def final_answer(text: str) -> str:
        """Say it."""
        return text

    async with fault_server(rule := Rule(CHAT.reply('{"sum": 5}', [], "end_turn"))) as server:
        for output in ("tool", None):
            settings = ModelSettings(response_schema=SCHEMA, output=output)
            agent = AgentDefinition("a", model="openai_chat/gpt-4o", tools=[final_answer], settings=settings)
            async with Engine([agent], models={"openai_chat": CHAT.make(server.url)}, pricing=None) as engine:
                result = await engine.run("a", "Hi")
            assert (result.error is not None) == (output == "tool")
    assert len(rule.bodies) == 1


# --- caching ------------------------------------------------------------------------------------------------------------


def marks_of(body: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    found = []
    for message in body["messages"]:
        content = message["content"]
        blocks = content if isinstance(content, list) else []
        found += [(message["role"], block["cache_control"]) for block in blocks if "cache_control" in block]
        assert all(block["text"] for block in blocks if "cache_control" in block)
    return found


@pytest.mark.spec("providers:PV66", "ecosystem:EC93")
@pytest.mark.parametrize(
    ("model", "cache", "mark"),
    [
        ("anthropic/claude-sonnet-5", None, {"type": "ephemeral"}),
        ("anthropic/claude-sonnet-5", "off", None),
        ("google/gemini-3-pro", None, None),
        ("google/gemini-3-pro", "5m", {"type": "ephemeral"}),
        ("openai/gpt-5", "5m", None),
    ],
)
async def test_gateway_prompts_are_marked_for_caching_at_both_ends(model, cache, mark):
    calls = ("", [("look", '{"at": "it"}')], "tool_use")
    async with fault_server(rule := Rule(*[chat_reply(*each) for each in (calls, SAID, SAID)])) as server:
        provider = OpenAIChatProvider("openrouter", "k", server.url)
        await ran("openrouter", model, provider, system_prompt="Be good.", settings=ModelSettings(cache=cache))
    roles = [["system", "user"], ["system", "tool"], ["system", "user"]]
    expected = [[(role, mark) for role in each] for each in roles] if mark else [[], [], []]
    assert [marks_of(body) for body in rule.bodies] == expected
    texts = [[texts_of(message) for message in body["messages"]] for body in rule.bodies]
    assert texts[1][: len(texts[0])] == texts[0]


def texts_of(message: dict[str, Any]) -> list[str]:
    content = message["content"]
    return [content] if isinstance(content, str) else [block["text"] for block in content or ()]


# --- server tools -------------------------------------------------------------------------------------------------------

SEARCHED = [
    {
        "type": "server_tool_use",
        "id": "srv_1",
        "name": "web_search",
        "input": {"query": "five"},
        "caller": {"type": "direct"},
    },
    {
        "type": "web_search_tool_result",
        "tool_use_id": "srv_1",
        "content": [
            {"type": "web_search_result", "url": "https://five.org", "title": "Five", "encrypted_content": "e"}
        ],
    },
    {
        "type": "text",
        "text": "It is five.",
        "citations": [
            {
                "type": "char_location",
                "cited_text": "5",
                "document_title": "Numbers",
                "document_index": 0,
                "start_char_index": 0,
                "end_char_index": 1,
                "file_id": "file_1",
            },
            {
                "type": "web_search_result_location",
                "url": "https://five.org",
                "title": "Five",
                "cited_text": "5",
                "encrypted_index": "i",
            },
        ],
    },
]


def shown(result: Any) -> list[tuple[str, str]]:
    (message,) = result.state.message_history[-1:]
    return [(part.tool, part.text) for part in message.content if isinstance(part, OpaquePart)]


def cited(result: Any) -> list[CitationPart]:
    (message,) = result.state.message_history[-1:]
    return [part for part in message.content if isinstance(part, CitationPart)]


@pytest.mark.spec("providers:PV56", "providers:PV57", "providers:PV62", "providers:PV79")
async def test_anthropic_searches_go_back_without_file_ids_and_are_priced():
    def takes_back(body: dict[str, Any]) -> str | None:
        extra = [c for m in body["messages"] for b in m["content"] for c in b.get("citations") or () if "file_id" in c]
        return "citations.0.char_location.file_id: Extra inputs are not permitted" if extra else None

    usage = {"input_tokens": 1_000, "output_tokens": 100, "server_tool_use": {"web_search_requests": 1}}
    reply = {
        "id": "m",
        "role": "assistant",
        "model": "claude-sonnet-4-5",
        "content": SEARCHED,
        "stop_reason": "end_turn",
    }
    body = json.dumps({**reply, "usage": usage}).encode()
    settings = ModelSettings(server_tools=[WebSearch(max_uses=2)])
    async with fault_server(rule := Rule(body, rules=(takes_back,))) as server:
        result = await ran(
            "anthropic", "claude-sonnet-4-5", ANTHROPIC.make(server.url), pricing=True, settings=settings
        )
    assert rule.refused == []
    assert [tool["name"] for tool in rule.bodies[0]["tools"]] == ["look", "web_search"]
    first, second, text = rule.bodies[1]["messages"][1]["content"]
    assert [first, second] == SEARCHED[:2]
    kept = [
        {name: value for name, value in citation.items() if name != "file_id"} for citation in SEARCHED[2]["citations"]
    ]
    assert text == {**SEARCHED[2], "citations": kept}
    assert shown(result) == [("web_search", "five"), ("web_search", "Five https://five.org")]
    assert cited(result) == [
        CitationPart("", "Numbers", quote="5", said="It is five.", source="file_1"),
        CitationPart("https://five.org", "Five", quote="5", said="It is five."),
    ]
    assert result.cost == Decimal("0.0145")  # 0.003 and 0.0015 for the tokens, 0.01 for the search


@pytest.mark.spec("providers:PV57")
async def test_an_unanswered_server_tool_call_returns_only_at_the_end():
    def answered(body: dict[str, Any]) -> str | None:
        for message in body["messages"]:
            blocks = message["content"] if isinstance(message["content"], list) else []
            results = {block.get("tool_use_id") for block in blocks}
            for block in blocks[:-1]:
                if block["type"] == "server_tool_use" and block["id"] not in results:
                    return "server_tool_use ids were found without web_search_tool_result blocks"
        return None

    content = [SEARCHED[0], {"type": "text", "text": "Never mind."}]
    reply = {"id": "m", "role": "assistant", "model": "m", "content": content, "stop_reason": "end_turn"}
    body = json.dumps({**reply, "usage": {"input_tokens": 1, "output_tokens": 1}}).encode()
    async with fault_server(rule := Rule(body, rules=(answered,))) as server:
        await ran("anthropic", "claude-sonnet-4-5", ANTHROPIC.make(server.url))
    assert rule.refused == []
    assert rule.bodies[1]["messages"][1]["content"] == [content[1]]


def response_of(*items: dict[str, Any]) -> bytes:
    whole = json.loads(RESPONSES.reply(*SAID))
    return json.dumps({**whole, "output": [*items, *whole["output"]]}).encode()


ITEMS: tuple[dict[str, Any], ...] = (
    {
        "type": "web_search_call",
        "id": "ws_1",
        "status": "completed",
        "action": {"type": "search", "query": "five", "sources": [{"type": "url", "url": "https://five.org"}]},
    },
    {
        "type": "code_interpreter_call",
        "id": "ci_1",
        "status": "completed",
        "code": "2 + 3",
        "container_id": "c",
        "outputs": [{"type": "logs", "logs": "5"}],
    },
    {
        "type": "file_search_call",
        "id": "fs_1",
        "status": "completed",
        "queries": ["five"],
        "results": [{"file_id": "f", "filename": "five.txt", "text": "5"}],
    },
    {"type": "compaction", "id": "cmp_1", "encrypted_content": "e", "created_by": "server"},
)
RUNS = ModelSettings(server_tools=[WebSearch(), CodeExecution(), FileSearch("vs_1")])


@pytest.mark.spec("providers:PV56", "providers:PV58", "providers:PV62", "providers:PV68")
@pytest.mark.parametrize("refuses", [False, True])
async def test_responses_items_go_back_unchanged_or_without_sources(refuses):
    def sources(body: dict[str, Any]) -> str | None:
        given = any("sources" in item.get("action", {}) for item in body["input"])
        return "Unknown parameter: 'input[1].action.sources'." if refuses and given else None

    def created_by(body: dict[str, Any]) -> str | None:
        return "Unknown parameter: 'created_by'." if any("created_by" in item for item in body["input"]) else None

    async with fault_server(rule := Rule(response_of(*ITEMS), rules=(created_by, sources))) as server:
        result = await ran("openai", "gpt-5", RESPONSES.make(server.url), pricing=True, settings=RUNS)
    assert len(rule.refused) == int(refuses)
    went = [item for item in rule.bodies[-1]["input"] if item.get("id") in {"ws_1", "ci_1", "fs_1", "cmp_1"}]
    search = {**ITEMS[0], "action": {"type": "search", "query": "five"}} if refuses else ITEMS[0]
    assert went == [search, *ITEMS[1:3], {name: value for name, value in ITEMS[3].items() if name != "created_by"}]
    assert rule.bodies[0]["include"] == ["file_search_call.results", "code_interpreter_call.outputs"]
    assert shown(result) == [
        ("web_search", "five"),
        ("code_execution", "2 + 3\n5"),
        ("file_search", "five\nfive.txt"),
        ("", ""),
    ]
    assert result.cost > Decimal("0.0125")


@pytest.mark.spec("providers:PV41", "providers:PV56", "providers:PV62")
async def test_gemini_tools_work_beside_functions_and_calls_are_echoed():
    asked = {
        "toolCall": {"toolType": "GOOGLE_SEARCH_WEB", "id": "t1", "args": {"queries": ["five"]}},
        "thoughtSignature": "c2ln",
    }
    came = {"toolResponse": {"toolType": "GOOGLE_SEARCH_WEB", "id": "t1", "response": {}}, "thoughtSignature": "c2lo"}
    ran_code = [
        {"executableCode": {"language": "PYTHON", "code": "2 + 3", "id": "x"}},
        {"codeExecutionResult": {"outcome": "OUTCOME_OK", "output": "5", "id": "x"}},
    ]
    reply = google_chunk([asked, came, *ran_code, {"text": "Fünf is five."}], "STOP")
    reply["candidates"][0]["groundingMetadata"] = {
        "webSearchQueries": ["five"],
        "groundingChunks": [{"web": {"uri": "https://five.org", "title": "Five"}}],
        "groundingSupports": [
            {"segment": {"startIndex": 6, "endIndex": 14, "text": "is five."}, "groundingChunkIndices": [0]}
        ],
    }

    def circulation(body: dict[str, Any]) -> str | None:
        kinds = {name for tool in body["tools"] for name in tool}
        both = "functionDeclarations" in kinds and len(kinds) > 1
        allowed = body.get("toolConfig", {}).get("includeServerSideToolInvocations")
        return "Tool call context circulation is not enabled" if both and not allowed else None

    settings = ModelSettings(server_tools=[WebSearch(), CodeExecution()])
    async with fault_server(rule := Rule(json.dumps(reply).encode(), rules=(circulation,))) as server:
        result = await ran("google", "gemini-3-pro", GOOGLE.make(server.url), settings=settings)
    assert rule.refused == []
    assert rule.bodies[1]["contents"][1]["parts"] == [asked, came, *ran_code, {"text": "Fünf is five."}]
    assert shown(result) == [
        ("web_search", "five"),
        ("web_search", ""),
        ("code_execution", "2 + 3"),
        ("code_execution", "5"),
    ]
    assert cited(result) == [CitationPart("https://five.org", "Five", said="is five.")]


@pytest.mark.spec("providers:PV60", "providers:PV62")
async def test_openrouter_searches_and_says_where_it_found_things():
    reply = json.loads(chat_reply(*SAID))
    note = {"url": "https://five.org", "title": "Five", "start_index": 3, "end_index": 5, "content": "5"}
    reply["choices"][0]["message"]["annotations"] = [{"type": "url_citation", "url_citation": note}]
    place = {"city": "Bonn"}
    settings = ModelSettings(server_tools=[WebSearch(max_uses=1, allowed_domains="five.org", location=place)])
    async with fault_server(rule := Rule(json.dumps(reply).encode())) as server:
        provider = OpenAIChatProvider("openrouter", "k", server.url)
        result = await ran("openrouter", "openai/gpt-4.1-mini", provider, settings=settings, tools=[])
    near = {"type": "approximate", **place}
    parameters = {"max_uses": 1, "allowed_domains": ["five.org"], "user_location": near}
    assert rule.bodies[0]["tools"] == [{"type": "openrouter:web_search", "parameters": parameters}]
    assert cited(result) == [CitationPart("https://five.org", "Five", quote="5", said="is")]
    assert rule.bodies[1]["messages"][-2] == {"role": "assistant", "content": "It is five."}


REFUSED = [
    (ANTHROPIC, "claude-opus-5", FileSearch("s"), "does not offer this tool"),
    (ANTHROPIC, "claude-opus-5", CodeExecution(files="f"), "parts of a message"),
    (ANTHROPIC, "claude-opus-5", WebSearch(allowed_domains="a.org", blocked_domains="b.org"), "not both"),
    (RESPONSES, "gpt-5", UrlContext(), "use WebSearch() instead"),
    (RESPONSES, "gpt-5", WebSearch(blocked_domains="a.org"), "only allowed_domains"),
    (CHAT, "gpt-4o", WebSearch(), "does not offer this tool"),
    (GOOGLE, "gemini-3-pro", WebSearch(allowed_domains="a.org"), "restricted to domains"),
    (GOOGLE, "gemini-3-pro", CodeExecution(files="f"), "no files"),
    (GOOGLE, "gemini-2.5-flash", WebSearch(), "before Gemini 3"),
]


@pytest.mark.spec("providers:PV41", "providers:PV56", "providers:PV60")
@pytest.mark.parametrize(("wire", "model", "item", "words"), REFUSED)
async def test_an_unavailable_server_tool_is_refused_before_sending(wire, model, item, words):
    name = wire.model.partition("/")[0]
    async with fault_server(rule := Rule(wire.reply(*SAID))) as server:
        agent = AgentDefinition("a", model=f"{name}/{model}", tools=[look], settings=ModelSettings(server_tools=item))
        async with Engine([agent], models={name: wire.make(server.url)}, pricing=None) as engine:
            result = await engine.run("a", "Hi")
    assert rule.bodies == []
    assert (result.error.kind, result.error.retryable) == ("settings", False)
    assert words in str(result.error)
    assert type(item).__name__ in str(result.error)


def test_an_invalid_setting_is_refused_where_it_is_written():
    from stepengine.errors import DefinitionError

    wrong: list[dict[str, Any]] = [
        {"service_tier": "cheap"}, {"seed": 1.5}, {"logprobs": 21}, {"store": "yes"}, {"safety": {"harassment": 1}},
        {"cache": "2h"}, {"cache_key": 5}, {"output": "json"}, {"server_tools": ["web_search"]}, {"unsupported": "skip"},
        {"fallbacks": ["a", 1]},
    ]  # fmt: skip
    for each in wrong:
        (name,) = each
        with pytest.raises(DefinitionError, match=rf"ModelSettings\({name}=...\) must be "):
            ModelSettings(**each)
    for make in (
        lambda: FileSearch([]),
        lambda: WebSearch(max_uses=-1),
        lambda: WebSearch(location={"planet": "Mars"}),
    ):
        with pytest.raises(DefinitionError):
            make()
    assert thaw(WebSearch(location={"city": "Bonn"}).location) == {"city": "Bonn"}
