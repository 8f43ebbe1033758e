"""Rules of single providers, each enforced by a loopback server: a whole run keeps them, or the server refuses it."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest

from stepengine import (
    AgentDefinition,
    AgentState,
    AssistantMessage,
    Engine,
    ImagePart,
    ModelSettings,
    RetryPolicy,
    TextPart,
    Thinking,
    ThinkingPart,
    UserMessage,
    tool,
)
from stepengine.data.messages import ToolResult
from stepengine.errors import ContextOverflow, ModelError, TruncatedReply
from stepengine.models import Models, OpenAIChatProvider, OpenAIProvider, fallback
from stepengine.models._failures import OVERFLOW, RequestLabel, error_from_body
from stepengine.models.keys import Credentials
from tests.faults.scripts import WIRES, chat_reply, chat_stream, chunk
from tests.faults.server import Rule, fault_server, json_answer, sse

GOOGLE = next(wire for wire in WIRES if wire.name == "google")
ANTHROPIC = next(wire for wire in WIRES if wire.name == "anthropic")
OPENAI = next(wire for wire in WIRES if wire.name == "openai")
CHAT = next(wire for wire in WIRES if wire.name == "openai_chat")
CALL = ("", [("look", '{"at": "it"}')], "tool_use")
SAID = ("It is five.", [], "end_turn")


@tool
def look(at: str) -> ToolResult:
    """
    Look at something.

    Args:
        at: What.
    """
    return ToolResult([ImagePart(data=b"\x89PNG\r\n\x1a\n", mime_type="image/png")])


@tool
def listen() -> str:
    """Listen."""
    return "nothing"


async def ran(name: str, model: str, provider: Any, **fields: Any) -> Any:
    agent = AgentDefinition("looker", tools=[look, listen], model=f"{name}/{model}", **fields)
    models = Models({name: provider})
    async with Engine(
        agents=[agent], models=models, retry=RetryPolicy(attempts=2, base_seconds=0), pricing=None
    ) as engine:
        return await engine.run("looker", "What is it?")


# --- the order of messages ------------------------------------------------------------------------------------------


def user_after_tool(body: dict[str, Any]) -> str | None:
    """Refuse a message of the user after a result, as Mistral does (code 3230)."""
    roles = [message["role"] for message in body["messages"]]
    return "Unexpected role 'user' after role 'tool'" if ("tool", "user") in itertools.pairwise(roles) else None


@pytest.mark.spec("ecosystem:EC111", "providers:PV34")
@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("mistral", "mistral-large-latest"),
        ("openrouter", "mistralai/mistral-small"),
        ("vllm", "mistralai/Mixtral-8x7B"),
    ],
)
async def test_mistral_accepts_step_prompts_and_images_after_a_result(name, model):
    rule = Rule(chat_reply(*CALL), chat_reply(*SAID), rules=(user_after_tool,))
    async with fault_server(rule) as server:
        provider = OpenAIChatProvider(name, api_key="k", base_url=server.url)
        result = await ran(name, model, provider, step_prompt="Go on.")
    assert result.unwrap() == "It is five."
    roles = [message["role"] for message in rule.bodies[-1]["messages"]]
    assert roles == ["user", "assistant", "tool", "assistant", "user"]
    assert rule.bodies[-1]["messages"][3] == {"role": "assistant", "content": "OK"}


@pytest.mark.spec("providers:PV34")
async def test_no_filler_is_inserted_where_the_server_accepts_both():
    async with fault_server(rule := Rule(chat_reply(*CALL), chat_reply(*SAID))) as server:
        provider = OpenAIChatProvider("groq", api_key="k", base_url=server.url)
        await ran("groq", "llama", provider, step_prompt="Go on.")
    assert [message["role"] for message in rule.bodies[-1]["messages"]] == ["user", "assistant", "tool", "user"]


class Responses(Rule):
    """Refuses reasoning without the item that it was for, as the service does; *strict* refuses all reasoning."""

    def __init__(self, *, strict: bool = False) -> None:
        super().__init__(OPENAI.reply(*SAID), rules=(self.problem,))
        self.strict = strict

    @property
    def inputs(self) -> list[list[dict[str, Any]]]:
        return [body["input"] for body in self.bodies]

    def problem(self, body: dict[str, Any]) -> str | None:
        items = body["input"]
        for item, after in zip(items, [*items[1:], {}], strict=True):
            if item.get("type") == "reasoning" and (self.strict or not after.get("id")):
                return f"Item '{item['id']}' of type 'reasoning' was provided without its required following item."
        return None


OWN = {"provider": "openai", "model": "gpt-5"}
REASONING = ThinkingPart(
    "hm", provider_data={**OWN, "item": {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x"}}
)


def said_before(*parts: Any) -> AgentState:
    return AgentState.from_messages([UserMessage("go"), AssistantMessage(parts)])


async def went_on(rule: Any, *parts: Any) -> Any:
    agent = AgentDefinition("thinker", model="openai/gpt-5")
    async with fault_server(rule) as server:
        provider = OpenAIProvider(api_key="k", base_url=server.url)
        retry = RetryPolicy(attempts=2, base_seconds=0)
        async with Engine(agents=[agent], models={"openai": provider}, retry=retry, pricing=None) as engine:
            return await engine.run("thinker", "on", previous=said_before(*parts))


@pytest.mark.spec("providers:PV28")
@pytest.mark.parametrize(
    "parts",
    [
        pytest.param((REASONING,), id="a reply cut during reasoning"),
        pytest.param((REASONING, TextPart("changed by a hook")), id="a text that a hook changed"),
        pytest.param(
            (REASONING, REASONING, TextPart("x", provider_data={**OWN, "model": "o3", "id": "m"})), id="foreign"
        ),
    ],
)
async def test_reasoning_without_its_following_item_is_not_sent(parts):
    result = await went_on(rule := Responses(), *parts)
    assert result.unwrap() == "It is five."
    assert not any(item.get("type") == "reasoning" for item in rule.inputs[0])


@pytest.mark.spec("providers:PV28")
async def test_reasoning_goes_back_with_its_text_until_refused_once():
    text = TextPart("kept", provider_data={**OWN, "id": "msg_1"})
    assert (await went_on(rule := Responses(), REASONING, text)).unwrap() == "It is five."
    assert [item.get("type") for item in rule.inputs[0]] == [None, "reasoning", "message", None]
    assert (await went_on(rule := Responses(strict=True), REASONING, text)).unwrap() == "It is five."
    assert [any(item.get("type") == "reasoning" for item in items) for items in rule.inputs] == [True, False]


TWICE = {
    "forced_thinking": "Thinking may not be enabled when tool_choice forces tool use.",
    "unknown_field": "Unknown parameter: 'input[1].action.sources'.",
    "dangling_reasoning": "Item 'rs_1' of type 'reasoning' was provided without its required following item.",
}


@pytest.mark.spec("providers:PV107", "providers:PV28")
@pytest.mark.parametrize("kind", TWICE)
async def test_a_recoverable_refusal_is_retried_once(kind):
    refused = json_answer(OPENAI.error("invalid_request_error", TWICE[kind]), 400)
    found = []
    async with fault_server(refused) as server:
        provider, request = OPENAI.make(server.url), OPENAI.request()
        for _ in range(3):
            with pytest.raises(ModelError) as caught:
                await provider.complete(request)
            found.append((caught.value.kind, caught.value.retryable))
        await provider.close()
    assert found == [(kind, True), (kind, False), (kind, False)]


@pytest.mark.spec("providers:PV107", "providers:PV28")
async def test_an_item_without_its_reasoning_is_sent_without_its_id():
    """The other way round: a text of a reply whose reasoning a context policy took out."""

    def named(body: dict[str, Any]) -> str | None:
        words = "Item 'msg_1' of type 'message' was provided without its required 'reasoning' item: 'rs_1'."
        return words if any(item.get("id") == "msg_1" for item in body["input"]) else None

    rule = Rule(OPENAI.reply(*SAID), rules=(named,))
    result = await went_on(rule, TextPart("kept", provider_data={**OWN, "id": "msg_1"}))
    assert result.unwrap() == "It is five."
    assert len(rule.bodies) == 2
    assert "kept" in json.dumps(rule.bodies[1]["input"])


@pytest.mark.spec("providers:PV28")
async def test_the_phase_of_a_text_goes_back_with_any_item():
    for more in ({}, {"id": "msg_1"}):
        await went_on(rule := Responses(), TextPart("so far", provider_data={**OWN, "phase": "commentary", **more}))
        assert rule.inputs[0][1]["phase"] == "commentary"


@pytest.mark.parametrize("extra", [{"background": True}, {"body": {"background": True}}])
async def test_a_background_reply_is_refused_before_the_request(extra):
    async with fault_server(json_answer(OPENAI.reply(*SAID))) as server:
        provider = OpenAIProvider(api_key="k", base_url=server.url)
        with pytest.raises(ModelError, match="in the background, which is not supported") as caught:
            await provider.complete(OPENAI.request(settings=ModelSettings(extra=extra)))
        await provider.close()
    assert not caught.value.retryable
    assert server.requests == []


@pytest.mark.spec("providers:PV59")
async def test_items_that_wait_for_the_client_fail_the_run():
    for item in (
        {"type": "mcp_approval_request", "id": "m", "name": "x", "arguments": "{}", "server_label": "s"},
        {"type": "computer_call", "id": "c", "call_id": "1", "action": {"type": "click"}},
        {"type": "custom_tool_call", "id": "c", "call_id": "1", "name": "x", "input": "y"},
        {"type": "local_shell_call", "id": "c", "call_id": "1", "action": {"type": "exec", "command": ["ls"]}},
        {"type": "shell_call", "id": "c", "call_id": "1"},
        {"type": "apply_patch_call", "id": "c", "call_id": "1"},
    ):
        reply = {**json.loads(OPENAI.reply("", [], "end_turn")), "output": [item]}
        result = await went_on(json_answer(json.dumps(reply).encode()), TextPart("so far"))
        assert (result.status, result.error.kind, result.error.retryable) == ("failed", "unanswerable", False)
        assert item["type"] in str(result.error)


@pytest.mark.spec("providers:PV59")
async def test_a_shell_of_the_provider_is_answered_by_the_provider():
    reply = json.loads(OPENAI.reply(*SAID))
    call = {"type": "shell_call", "id": "c", "call_id": "1", "action": {}}
    done = {"type": "shell_call_output", "id": "o", "call_id": "1", "output": []}
    answer = {**reply, "output": [call, done, *reply["output"]]}
    assert (await went_on(json_answer(json.dumps(answer).encode()), TextPart("so far"))).unwrap() == "It is five."


# --- current Claude -------------------------------------------------------------------------------------------------

NEWER = ("claude-opus-4-7", "claude-opus-5", "claude-sonnet-5")
ALWAYS = ("claude-fable-5", "claude-mythos-5-2")
MOST = {"claude-opus-4-6": 128_000, "claude-sonnet-4-5": 64_000, "claude-opus-4-1": 32_000, "claude-3-haiku-x": 4_096}


class Claude(Rule):
    """
    Refuses what the models refuse: a number of tokens, "disabled", demanded calls beside thinking, too large limits.

    It thinks unless it is told not to, as sonnet-5 does; *strict* refuses a demanded call beside adaptive thinking, too.
    """

    def __init__(self, *, strict: bool = False, window: int = 10**6) -> None:
        super().__init__(ANTHROPIC.reply(*SAID), rules=(self.problem,))
        self.strict, self.window = strict, window

    def problem(self, data: dict[str, Any]) -> str | None:
        model, kind = data["model"], (data.get("thinking") or {}).get("type", "disabled")
        demanded = (data.get("tool_choice") or {}).get("type") in {"any", "tool"}
        most = MOST.get(model, 128_000)
        if data["max_tokens"] > most:
            return (
                f"max_tokens: {data['max_tokens']} > {most}, which is the maximum allowed number of output tokens for x"
            )
        if 150_000 + data["max_tokens"] > self.window:
            return f"input length and `max_tokens` exceed context limit: 150000 + {data['max_tokens']} > {self.window}"
        if kind == "enabled" and model in (*NEWER, *ALWAYS):
            return '"thinking.type.enabled" is not supported for this model. Use "thinking.type.adaptive"'
        if model in ALWAYS and "thinking" in data and kind == "disabled":
            return '"thinking.type.disabled" is not supported for this model.'
        if demanded and (kind == "enabled" or model in ALWAYS or (self.strict and self.thinks(data))):
            return "Thinking may not be enabled when tool_choice forces tool use."
        return None

    @staticmethod
    def thinks(data: dict[str, Any]) -> bool:
        always = data["model"] in ALWAYS or (data["model"] == "claude-sonnet-5" and "thinking" not in data)
        return always or (data.get("thinking") or {}).get("type") in {"adaptive", "enabled"}


async def asked(rule: Claude, model: str, *, tool_choice: str | None = None, **settings: Any) -> Any:
    async with fault_server(rule) as server:
        provider = ANTHROPIC.make(server.url)
        result = await ran("anthropic", model, provider, settings=ModelSettings(tool_choice=tool_choice, **settings))
    assert result.unwrap() == "It is five."
    return result


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("providers:PV5", "providers:PV6", "providers:PV8")
@pytest.mark.parametrize("model", ["claude-opus-5", "claude-sonnet-5", "claude-fable-5", *MOST])
async def test_every_thinking_setting_is_accepted_by_claude_at_once(model):
    rule = Claude()
    every = (None, *(Thinking(word) for word in ("none", "low", "high", "max")), Thinking(), Thinking(tokens=4_000))
    async with fault_server(rule) as server:
        models = Models({"anthropic": ANTHROPIC.make(server.url)})
        async with Engine(models=models, retry=RetryPolicy(attempts=2, base_seconds=0), pricing=None) as engine:
            for choice, thinking in itertools.product((None, "required", "look"), every):
                settings = ModelSettings(thinking=thinking, tool_choice=choice)
                agent = AgentDefinition("looker", tools=[look, listen], model=f"anthropic/{model}", settings=settings)
                assert (await engine.run(agent, "What is it?")).unwrap() == "It is five."
    assert len(rule.bodies) == 3 * len(every)


@pytest.mark.spec("providers:PV39")
@pytest.mark.parametrize("model", NEWER)
async def test_a_demanded_call_is_retried_without_thinking_where_refused(model):
    await asked(rule := Claude(), model, thinking=Thinking("high"), tool_choice="look")
    assert [rule.thinks(data) for data in rule.bodies] == [True]
    await asked(rule := Claude(strict=True), model, thinking=Thinking("high"), tool_choice="look")
    assert [rule.thinks(data) for data in rule.bodies] == [True, False]
    assert {data["tool_choice"]["type"] for data in rule.bodies} == {"tool"}


@pytest.mark.spec("providers:PV39")
@pytest.mark.parametrize("model", ALWAYS)
async def test_only_the_wanted_tool_is_offered_where_demands_are_impossible(model):
    await asked(rule := Claude(), model, tool_choice="look")
    (data,) = rule.bodies
    assert data["tool_choice"] == {"type": "auto"}
    assert [tool["name"] for tool in data["tools"]] == ["look"]


@pytest.mark.spec("providers:PV5")
async def test_a_model_that_always_thinks_is_warned_about_once(caplog):
    for _ in range(2):
        await asked(Claude(), "claude-mythos-5-named", thinking=Thinking("none"))
    warned = [record.getMessage() for record in caplog.records if "always thinks" in record.getMessage()]
    assert warned == ["claude-mythos-5-named always thinks; Thinking('none') requests low effort"]


@pytest.mark.spec("providers:PV1", "providers:PV4", "providers:PV82")
async def test_the_output_limit_is_that_of_the_model_or_small():
    for model, most in MOST.items():
        await asked(rule := Claude(), model)
        assert [data["max_tokens"] for data in rule.bodies] == [most]
    await asked(rule := Claude(window=200_000), "claude-sonnet-4-5")
    assert [data["max_tokens"] for data in rule.bodies] == [64_000, 8_192]
    await asked(rule := Claude(), "claude-3-haiku-x", max_tokens=100)
    assert [data["max_tokens"] for data in rule.bodies] == [100]


# --- the end of a reply ---------------------------------------------------------------------------------------------


def unfinished(*events: bytes) -> list[bytes]:
    """Events of a chat stream without its finish reason."""
    return [event for event in events if CHAT.marker not in event]


@pytest.mark.spec("ecosystem:EC116", "reliability:MP20")
@pytest.mark.parametrize("said", [SAID, CALL], ids=["text", "call"])
async def test_a_chat_stream_without_finish_reason_ends_at_its_marker(said):
    async with fault_server(sse(*unfinished(*chat_stream(*said)), "fin")) as server:
        provider = CHAT.make(server.url)
        *_, last = [delta async for delta in provider.stream(CHAT.request())]
        await provider.close()
    assert (last.reply.stop_reason, last.reply.raw_stop_reason) == (said[2], None)
    assert last.reply.usage.total_tokens > 0


@pytest.mark.spec("ecosystem:EC116", "reliability:MP20", "reliability:MP22")
@pytest.mark.parametrize(
    "events",
    [
        pytest.param(unfinished(*chat_stream(*SAID))[:-1], id="without the marker"),
        pytest.param([b'data: {"choices":[]}\n\n', b"data: [DONE]\n\n"], id="without a choice"),
        pytest.param(unfinished(*chat_stream("", [("look", '{"at": "i')], "tool_use")), id="a call cut short"),
        pytest.param(
            [chunk({"content": "hi"}), b'data: {"error":{"code":502}}\n\n', b"data: [DONE]\n\n"], id="an error"
        ),
    ],
)
async def test_an_incomplete_chat_stream_without_finish_reason_is_no_reply(events):
    async with fault_server(sse(*events, "fin")) as server:
        provider = CHAT.make(server.url)
        with pytest.raises(ModelError) as caught:
            [delta async for delta in provider.stream(CHAT.request())]
        await provider.close()
    assert type(caught.value) is TruncatedReply or caught.value.status == 502


# --- a full window --------------------------------------------------------------------------------------------------

FULL = (
    "input length and `max_tokens` exceed context limit: 197202 + 21333 > 200000",
    "This model's maximum prompt length is 131072 but the request contains 136973 tokens.",
    "Please reduce the length of the messages or completion.",
    "Input validation error: `inputs` tokens + `max_new_tokens` must be <= 8193",
    "The input (300 tokens) is longer than the model's context length (200 tokens).",
    "tokens to keep from the initial prompt is greater than the context length",
    "However, the model is loaded with context length of only 4096 tokens, which is not enough",
    "The decoder prompt (length 8825) is longer than the maximum model length of 8192.",
    "Your request exceeded model token limit: 262144 (requested: 291351)",
    "Prompt exceeds max length",
    "Input is too long for requested model",
    "prompt token count of 5000 exceeds the limit of 4096",
    "Range of input length should be [1, 30000]",
    "prompt too long; exceeded max context length",
    "context size has been exceeded",
    "the request exceeds the maximum allowed input length",
    "Token limit reached",
    "prompt is too long: 208310 tokens > 200000 maximum",
    "request_too_large",
    "This model's maximum context length is 4096 tokens.",
    "context_length_exceeded",
    "Context length exceeded",
    "The input exceeds the context window of this model",
    "Too many tokens: 140000 > 131072",
    "The input token count (1048577) exceeds the maximum number of tokens allowed (1048576).",
    "the request exceeds the available context size",
)


async def refused(message: str, status: int = 400, **settings: Any) -> ModelError:
    body = json.dumps({"error": {"type": "invalid_request_error", "message": message}}).encode()
    async with fault_server(json_answer(body, status)) as server:
        provider = CHAT.make(server.url)
        with pytest.raises(ModelError) as caught:
            await provider.complete(CHAT.request(**settings))
        await provider.close()
    return caught.value


@pytest.mark.spec("providers:PV82")
def test_message_next_to_a_text_as_error_is_read():
    call = RequestLabel(provider="p", model="p/m", credentials=Credentials(None, "no key"))
    body = {"statusCode": 400, "error": "Bad Request", "message": FULL[0]}
    assert ContextOverflow is type(error_from_body(json.dumps(body).encode(), 400, {}, call))


@pytest.mark.spec("providers:PV82")
async def test_every_known_wording_of_a_full_window_is_an_overflow():
    for message in FULL:
        assert type(await refused(message)) is ContextOverflow, message
    unheard = {words for words in OVERFLOW if not any(words in message.casefold() for message in FULL)}
    assert unheard == set()


@pytest.mark.spec("providers:PV84")
@pytest.mark.parametrize(
    ("provider", "model", "size", "kind"),
    [
        ("cerebras", "llama3.1-8b", 200_000, ContextOverflow),
        ("cerebras", "llama3.1-8b", 2_000, ModelError),
        ("cerebras", "of-tomorrow", 2_000, ContextOverflow),
        ("groq", "of-tomorrow", 200_000, ModelError),
    ],
)
def test_an_empty_refusal_of_a_long_request_is_an_overflow(provider, model, size, kind):
    call = RequestLabel(
        provider=provider, model=f"{provider}/{model}", credentials=Credentials(None, "no key"), size=size
    )
    assert kind is type(error_from_body(b"", 400, {}, call))
    assert ContextOverflow is type(error_from_body(b"", 413, {}, call))


@pytest.mark.spec("providers:PV82")
async def test_similar_wordings_are_no_overflow():
    rate = "Request too large for model `x` on tokens per minute (TPM): Limit 6000, Requested 8000"
    assert type(await refused(rate, 413)) is ModelError
    both = "Input validation error: `inputs` tokens + `max_new_tokens` must be <= 8193. Given: 20 and 9000"
    assert type(await refused(both, settings=ModelSettings(max_tokens=9_000))) is ModelError
    assert type(await refused(both, settings=ModelSettings(max_tokens=900))) is ContextOverflow
    assert type(await refused("max_tokens is too large: 99999999")) is ModelError


# --- names ----------------------------------------------------------------------------------------------------------


@pytest.mark.spec("reliability:MP05")
async def test_a_400_for_an_unknown_model_falls_back_with_alternatives():
    body = {"error": {"code": "model_not_found", "message": "The requested model 'gpt-4o-minni' does not exist."}}
    route = fallback("openai/gpt-4o-minni", "openai_chat/gpt-4o", on="unknown_model")
    async with (
        fault_server(json_answer(json.dumps(body).encode(), 400)) as first,
        fault_server(json_answer(chat_reply(*SAID))) as second,
    ):
        models = {"openai": OPENAI.make(first.url), "openai_chat": CHAT.make(second.url)}
        agents = [AgentDefinition("m", model=model) for model in (route,)]
        async with Engine(agents=agents, models=models, pricing=None) as engine:
            assert (await engine.run("m", "Hi")).unwrap() == "It is five."
        agents = [AgentDefinition("m", model="openai/gpt-4o-minni")]
        async with Engine(agents=agents, models={"openai": OPENAI.make(first.url)}, pricing=None) as engine:
            failed = await engine.run("m", "Hi")
    assert (failed.error.kind, failed.error.retryable) == ("unknown_model", False)
    assert "gpt-4o-mini" in str(failed.error).replace("gpt-4o-minni", "")


@pytest.mark.spec("ecosystem:EC194")
async def test_a_latest_gemini_name_under_v1_gets_advice():
    words = "models/gemini-flash-latest is not found for API version v1, or is not supported for generateContent."
    problem = {"error": {"code": 404, "status": "NOT_FOUND", "message": words}}
    async with fault_server(json_answer(json.dumps(problem).encode(), 404)) as server:
        result = await ran("google", "gemini-flash-latest", GOOGLE.make(server.url))
        assert "GOOGLE_GENAI_API_VERSION=v1beta" in str(result.error)
        result = await ran("google", "gemini-9", GOOGLE.make(server.url))
        assert "GOOGLE_GENAI_API_VERSION" not in str(result.error)


# --- calls in a text ------------------------------------------------------------------------------------------------

QWEN = "<tool_call>\n<function=look>\n<parameter=at>\nthe sky\n</parameter>\n</function>\n</tool_call>"
WRITTEN = {
    "json": 'I look.\n<tool_call>\n{"name": "look", "arguments": {"at": "the sky"}}\n</tool_call>',
    "qwen": f"I look.\n{QWEN}",
    "open": 'I look.\n<tool_call>{"name": "look", "arguments": {"at": "the sky"}}',
}


@pytest.mark.spec("providers:PV75")
@pytest.mark.parametrize("form", WRITTEN)
@pytest.mark.parametrize("stream", [False, True])
async def test_calls_written_as_text_are_read_on_request(form, stream, caplog):
    said = [(WRITTEN[form], [], "end_turn"), SAID]
    answers = [sse(*chat_stream(*each), "fin") if stream else json_answer(chat_reply(*each)) for each in said]
    async with fault_server(*answers) as server:
        provider = OpenAIChatProvider("vllm", base_url=server.url, written_calls=True)
        result = await ran("vllm", "qwen", provider)
        assert result.unwrap() == "It is five."
        (asked_for,) = [call for message in result.state.message_history for call in getattr(message, "tool_calls", ())]
        assert (asked_for.tool_name, dict(asked_for.input)) == ("look", {"at": "the sky"})
        assert result.state.message_history[1].text == "I look."
    assert not caplog.records
