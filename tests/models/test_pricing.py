"""Prices, context windows and names from the packaged data."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from decimal import Decimal
from random import Random

import attrs
import httpx2
import pytest
from genai_prices import Usage as PricedUsage
from genai_prices import calc_price
from genai_prices.data_snapshot import DataSnapshot, get_snapshot, set_custom_snapshot
from hypothesis import given
from hypothesis import strategies as st

from stepengine import AgentDefinition, Engine, TextPart
from stepengine.data.messages import OpaquePart, UserMessage
from stepengine.data.models import ModelReply, ModelRequest
from stepengine.data.transcript import Transcript
from stepengine.data.usage import Usage
from stepengine.errors import ModelError
from stepengine.models import OpenAIChatProvider
from stepengine.models.openai_chat.decode import parse_usage as chat_usage
from stepengine.models.pricing import LIST_PRICES, find_nearest_names, get_model_info
from stepengine.testing import ScriptedModel
from tests.faults.scripts import event
from tests.models.wires import made, reader


@pytest.mark.spec("reliability:MP05")
@pytest.mark.parametrize(
    ("model", "near"),
    [
        ("anthropic/claude-sonet-4-5", "claude-sonnet-4-5"),
        ("openai_chat/gpt-4o-minni", "gpt-4o-mini"),
        ("google/gemini-2.5-flas", "gemini-2.5-flash"),
    ],
)
def test_misspelt_model_finds_near_names_of_its_provider(model: str, near: str) -> None:
    found = find_nearest_names(model)

    assert near in found
    assert len(found) <= 3
    assert () == find_nearest_names(f"nobody/{near}")


def price_of_the_library(provider: str, model: str, usage: Usage, at: datetime) -> Decimal | None:
    priced = PricedUsage(
        input_tokens=usage.prompt_tokens,
        output_tokens=usage.completion_tokens,
        cache_read_tokens=usage.cache_read_tokens,
        cache_write_tokens=usage.cache_write_tokens,
    )
    try:
        return calc_price(priced, model_ref=model, provider_id=provider, genai_request_timestamp=at).total_price
    except (LookupError, ValueError):
        return None


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("requirements:G17")
def test_cost_equals_the_price_library_in_every_tier_and_time() -> None:
    random, now = Random(7), datetime(2026, 11, 1, tzinfo=UTC)
    compared = priced = 0
    for provider in get_snapshot().providers:
        for model in provider.models[::4]:
            size = random.choice([1, 1_000, 90_000, 400_000])
            usage = Usage(*[random.randrange(size) for _ in range(5)])
            at = now - timedelta(hours=random.randrange(10_000))
            expected = price_of_the_library(provider.id, model.id, usage, at)

            assert expected == LIST_PRICES(f"{provider.id}/{model.id}", usage, at), (provider.id, model.id, usage, at)
            compared += 1
            priced += bool(expected)
    assert priced > compared / 2 > 150


@pytest.mark.spec("requirements:G17")
@pytest.mark.parametrize("prompt", [199_999, 200_000, 200_001])
def test_a_tier_begins_above_its_start(prompt: int) -> None:
    at = datetime(2026, 11, 1, tzinfo=UTC)
    usage = Usage(prompt, 10)

    assert price_of_the_library("google", "gemini-2.5-pro", usage, at) == LIST_PRICES(
        "google/gemini-2.5-pro", usage, at
    )


@pytest.mark.spec("requirements:G17")
def test_unlisted_model_has_no_price_and_no_window() -> None:
    assert LIST_PRICES("ollama/llama3", Usage(1, 1), datetime.now(UTC)) is None
    assert LIST_PRICES("anthropic/claude-sonnet-4-5", None, datetime.now(UTC)) is None
    assert get_model_info("ollama/llama3").context_window is None
    assert 200_000 <= get_model_info("anthropic/claude-sonnet-4-5").context_window


def test_replaced_price_data_is_used() -> None:
    at, usage = datetime(2026, 11, 1, tzinfo=UTC), Usage(1_000, 1_000)
    before = LIST_PRICES("anthropic/claude-sonnet-4-5", usage, at)
    try:
        set_custom_snapshot(DataSnapshot(providers=[], from_auto_update=False))
        assert LIST_PRICES("anthropic/claude-sonnet-4-5", usage, at) is None
    finally:
        set_custom_snapshot(None)
    assert before == LIST_PRICES("anthropic/claude-sonnet-4-5", usage, at)


# --- what providers report beside text ----------------------------------------------------------------------------------

AT = datetime(2026, 11, 1, tzinfo=UTC)


@pytest.mark.spec("requirements:G17", "reliability:MP61")
@pytest.mark.parametrize(
    ("told", "more"),
    [
        ({"notes": ["x"]}, {}),
        ({"notes": [5, None]}, {}),
        ({"notes": [["TEXT"]]}, {}),
        ({"iterations": 5}, {}),
        ({}, {"groundingMetadata": {"webSearchQueries": 5}}),
    ],
)
def test_unknown_usage_forms_cost_their_tokens(told, more):
    raw = {"prompt_tokens": 10, "completion_tokens": 10, **told}
    data = {"provider": "openai_chat", "usage": raw, **more}
    content = [OpaquePart("openai_chat", {"type": "web_search_call", "action": "search"}), TextPart("x")]
    reply = ModelReply(content, usage=Usage(10, 10), provider_data=data)

    assert LIST_PRICES("openai_chat/gpt-4o", Usage(10, 10), AT) == LIST_PRICES.price_reply(
        "openai_chat/gpt-4o", reply, AT
    )


@pytest.mark.spec("requirements:G17", "reliability:MP61")
def test_usage_the_price_library_cannot_read_costs_its_tokens():
    raw = {"promptTokenCount": 10, "candidatesTokenCount": 5, "promptTokensDetails": [{"modality": 5, "tokenCount": 3}]}
    reply = ModelReply("x", usage=Usage(10, 5), provider_data={"provider": "google", "usage": raw})
    model = "google/gemini-2.5-flash"
    assert LIST_PRICES(model, Usage(10, 5), AT) == LIST_PRICES.price_reply(model, reply, AT) is not None


def reply_with(provider: str, usage: dict[str, object], *parts: object, **data: object) -> ModelReply:
    read = Usage(1_000_000, 100_000)
    return ModelReply(
        parts or [TextPart("x")], usage=read, provider_data={"provider": provider, "usage": usage, **data}
    )


@pytest.mark.spec("providers:PV78", "providers:PV79", "providers:PV80")
@pytest.mark.parametrize(
    ("model", "reply", "dollars"),
    [
        (
            "openai/gpt-5-mini",
            reply_with("openai", {"input_tokens": 1_000_000, "output_tokens": 100_000}, service_tier=tier),
            dollars,
        )
        for tier, dollars in (("default", "0.45"), ("flex", "0.225"), ("priority", "0.81"))
    ]
    + [
        (
            "openai/gpt-5-mini",
            reply_with(
                "openai",
                {"input_tokens": 1_000_000, "output_tokens": 100_000},
                OpaquePart("openai", {"type": "web_search_call", "action": {"type": "search"}}),
                OpaquePart("openai", {"type": "web_search_call", "action": {"type": "open_page"}}),
                OpaquePart("openai", {"type": "file_search_call"}),
            ),
            "0.4625",
        ),
        (
            "anthropic/claude-sonnet-4-5",
            reply_with(
                "anthropic",
                {
                    "input_tokens": 0,
                    "output_tokens": 0,
                    "cache_creation_input_tokens": 100_000,
                    "cache_creation": {"ephemeral_1h_input_tokens": 100_000, "ephemeral_5m_input_tokens": 0},
                },
            ),
            "0.6",
        ),
        (
            "anthropic/claude-sonnet-4-5",
            reply_with(
                "anthropic",
                {
                    "input_tokens": 1_000,
                    "output_tokens": 100,
                    "server_tool_use": {"web_search_requests": 2},
                    "iterations": [
                        {"type": "message", "input_tokens": 1_000, "output_tokens": 100},
                        {"type": "compaction", "input_tokens": 10_000, "output_tokens": 0},
                        {
                            "type": "advisor_message",
                            "model": "claude-opus-4-5",
                            "input_tokens": 1_000,
                            "output_tokens": 0,
                        },
                    ],
                },
            ),
            "0.0595",  # 0.0045 of its own, 0.03 of the compaction, 0.005 of the advisor, 0.02 for two searches
        ),
        (
            "google/gemini-2.5-flash",
            reply_with(
                "google",
                {"promptTokenCount": 1_000_000, "candidatesTokenCount": 0},
                groundingMetadata={"webSearchQueries": ["a", "b"]},
            ),
            "0.585",  # 0.3 and 0.25 for the tokens, one prompt with searches
        ),
    ],
)
def test_cost_includes_tiers_searches_caches_and_side_work(model: str, reply: ModelReply, dollars: str) -> None:
    assert Decimal(dollars) == LIST_PRICES.price_reply(model, reply, AT)


@pytest.mark.spec("requirements:G17")
async def test_gateway_reply_is_priced_by_the_requested_model() -> None:
    reply = ModelReply("hi", usage=Usage(1_000_000), model="openai/deployment-7")
    async with Engine(models={"openai": ScriptedModel([reply])}) as engine:
        result = await engine.run(AgentDefinition("a", model="openai/gpt-5-mini"), "go")

    assert result.cost == Decimal("0.25")


@pytest.mark.spec("providers:PV79")
def test_tokens_of_a_compaction_and_an_advisor_count() -> None:
    from stepengine.models.anthropic.decode import parse_usage

    beside = {"input_tokens": 55_196, "output_tokens": 0}
    raw = {
        "input_tokens": 150,
        "output_tokens": 31,
        "iterations": [
            {"type": "message", "input_tokens": 150, "output_tokens": 31},
            {"type": "compaction", **beside},
        ],
    }

    assert parse_usage(raw).total_tokens == 55_377


# --- a model that stood in, bills of xAI ------------------------------------------------------------------------------

ASKED, SERVED = "claude-opus-4-8", "claude-sonnet-4-5"


def stood_in(*before: dict[str, object]) -> dict[str, object]:
    whole = {"input_tokens": 412, "output_tokens": 264}
    return {**whole, "iterations": [*before, {"type": "fallback_message", "model": SERVED, **whole}]}


SAID_NOTHING = {"type": "message", "model": ASKED, "input_tokens": 408, "output_tokens": 0}
HAD_BEGUN = {"type": "message", "model": ASKED, "input_tokens": 400, "output_tokens": 100}
OWN_LOOP = {"type": "message", "model": SERVED, "input_tokens": 300, "output_tokens": 20}
ITSELF = Decimal("0.005196")  # 412 for 3 dollars and 264 for 15, a million


def block(index: int, content: dict[str, object], *deltas: dict[str, object]) -> list[bytes]:
    at = {"index": index}
    told = [event({"type": "content_block_delta", **at, "delta": delta}) for delta in deltas]
    begin = event({"type": "content_block_start", **at, "content_block": content})
    return [begin, *told, event({"type": "content_block_stop", **at})]


def stood_in_for(usage: dict[str, object], *, stream: bool) -> ModelReply:
    """Return the reply in which one model gave way to another, as it comes at once, or in a stream in the middle of an answer."""
    from stepengine.models.anthropic.decode import decode

    hop = {"type": "fallback", "from": {"model": ASKED}, "to": {"model": SERVED}, "trigger": {"type": "refusal"}}
    head = {"id": "msg_1", "role": "assistant", "content": [], "stop_reason": None}
    if not stream:
        content = [hop, {"type": "text", "text": "Hi."}]
        message = {**head, "model": SERVED, "content": content, "stop_reason": "end_turn", "usage": usage}
        return decode(message, made("anthropic", ASKED), ASKED, None)
    it = reader("anthropic", ASKED)
    begun = {**head, "model": ASKED, "usage": {"input_tokens": 408, "output_tokens": 1}}
    pieces = [
        event({"type": "message_start", "message": begun}),
        *block(0, {"type": "thinking", "thinking": "Hm.", "signature": "s"}),
        *block(1, {"type": "text", "text": "He"}),
        *block(2, {"type": "tool_use", "id": "t", "name": "rm", "input": {}}),
        *block(3, {"type": "server_tool_use", "id": "u", "name": "web_search", "input": {}}),
        *block(4, hop),
        *block(5, {"type": "text", "text": "llo."}),
        event({"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": usage}),
        event({"type": "message_stop"}),
    ]
    for piece in pieces:
        it.feed(piece)
    return it.finish()


@pytest.mark.spec("providers:PV79", "reliability:MP62", "requirements:X76")
@pytest.mark.parametrize("stream", [False, True], ids=["at once", "in a stream"])
@pytest.mark.parametrize(
    ("before", "tokens", "dollars"),
    [
        pytest.param([], 676, ITSELF, id="asked at once, since it had stood in before"),
        pytest.param([SAID_NOTHING], 676, ITSELF, id="after one that said nothing, which is not billed"),
        pytest.param([SAID_NOTHING, OWN_LOOP], 676, ITSELF, id="after a search of its own"),
        pytest.param([HAD_BEGUN], 1_176, ITSELF + Decimal("0.0045"), id="after one that had begun, at its own price"),
    ],
)
def test_substitute_model_is_counted_once_and_named(before, tokens, dollars, stream) -> None:
    """It was counted twice, at the price of the model that had refused: 0.03464 dollars for 0.00866."""
    reply = stood_in_for(stood_in(*before), stream=stream)

    assert (f"anthropic/{SERVED}", tokens, False) == (reply.model, reply.usage.total_tokens, reply.usage.at_least)
    assert dollars == LIST_PRICES.price_reply(f"anthropic/{ASKED}", reply, AT)


@pytest.mark.spec("ecosystem:EC91")
def test_calls_of_a_replaced_model_are_neither_run_nor_sent() -> None:
    reply = stood_in_for(stood_in(HAD_BEGUN), stream=True)

    assert () == reply.tool_calls
    assert ["text", "fallback", "text"] == [getattr(part, "data", {}).get("type", "text") for part in reply.content]
    assert reply.text == "Hello."


TOOLS_OF_XAI = {
    "web_search_calls": 2,
    "x_search_calls": 1,
    "code_interpreter_calls": 1,
    "file_search_calls": 2,
    "document_search_calls": 1,
    "mcp_calls": 3,
}


def told_by_xai(wire: str, **usage: object) -> ModelReply:
    from stepengine.models.openai.decode import decode as decode_responses
    from stepengine.models.openai_chat.decode import decode as decode_chat

    details = {"server_side_tool_usage_details": TOOLS_OF_XAI, "num_server_side_tools_used": 10}
    if wire == "responses":
        search = {
            "type": "custom_tool_call",
            "id": "i",
            "call_id": "xs_call_1",
            "name": "x_keyword_search",
            "input": "{}",
        }
        found = {"type": "message", "content": [{"type": "output_text", "text": "Found."}]}
        items = [{"type": "web_search_call", "action": {"type": "search"}}, {"type": "file_search_call"}, search, found]
        counts = {"input_tokens": 1_000_000, "output_tokens": 0, **details, **usage}
        response = {"output": items, "status": "completed", "model": "grok-4", "usage": counts}
        return decode_responses(response, made("xai", "grok-4"), "grok-4", None)
    choice = {"message": {"content": "Found."}, "finish_reason": "stop"}
    counts = {"prompt_tokens": 1_000_000, "completion_tokens": 0, "total_tokens": 1_000_000, **details, **usage}
    return decode_chat({"choices": [choice], "usage": counts}, made("xai", "grok-4"), "grok-4", None)


@pytest.mark.spec("requirements:X76", "requirements:G17")
@pytest.mark.parametrize("wire", ["responses", "chat"])
async def test_the_bill_that_xai_states_wins_over_any_price_list(wire: str) -> None:
    reply = told_by_xai(wire, cost_in_usd_ticks=161_500_000)
    assert reply.cost == Decimal("0.01615")

    async with Engine(models={"xai": ScriptedModel([reply])}) as engine:
        result = await engine.run(AgentDefinition("a", model="xai/grok-4"), "go")
    assert result.cost == Decimal("0.01615")
    for broken in (-1, 1.5, "12", None, True, 10**17):
        assert told_by_xai(wire, cost_in_usd_ticks=broken).cost is None


@pytest.mark.spec("requirements:X76")
@pytest.mark.parametrize("wire", ["responses", "chat"])
def test_tools_of_xai_cost_something_where_no_bill_is_stated(wire: str) -> None:
    """Three searches, a run of code, two searches of collections, one of a file; tools of MCP servers are paid by tokens."""
    reply = told_by_xai(wire)
    nothing_run = attrs.evolve(
        reply, content=[TextPart("x")], provider_data={"provider": "xai", "usage": {"input_tokens": 1_000_000, "prompt_tokens": 1_000_000, "output_tokens": 0, "completion_tokens": 0}}
    )  # fmt: skip

    tokens = LIST_PRICES.price_reply("xai/grok-4", nothing_run, AT)
    assert tokens is not None
    assert tokens + Decimal("0.035") == LIST_PRICES.price_reply("xai/grok-4", reply, AT)


def test_xai_search_in_a_stream_needs_no_client() -> None:
    search = {"type": "custom_tool_call", "id": "i", "call_id": "xs_call_1", "name": "x_keyword_search", "input": "{}"}
    done = {"status": "completed", "output": [search], "usage": {"input_tokens": 1, "output_tokens": 1}}

    def replied(provider: str) -> ModelReply:
        it = reader("openai", provider=provider)
        it.feed(event({"type": "response.created", "response": {"status": "in_progress"}}))
        for kind in ("added", "done"):
            it.feed(event({"type": f"response.output_item.{kind}", "output_index": 0, "item": search}))
        it.feed(event({"type": "response.completed", "response": done}))
        return it.finish()

    assert ["custom_tool_call"] == [part.data["type"] for part in replied("xai").content]
    with pytest.raises(ModelError, match="needs an action of its client"):
        replied("openai")


# --- bills that are stated elsewhere, and what has no price ------------------------------------------------------------


def told_by_chat(usage: dict[str, object], **message: object) -> ModelReply:
    from stepengine.models.openai_chat.decode import decode

    choice = {"message": {"content": "x", **message}, "finish_reason": "stop"}
    return decode({"choices": [choice], "usage": {"prompt_tokens": 1, "completion_tokens": 1, **usage}}, made("openai_chat", "m"), "m", None)  # fmt: skip


@pytest.mark.spec("requirements:X76", "providers:PV81")
@pytest.mark.parametrize(
    ("usage", "message", "dollars"),
    [
        ({"cost": {"input_tokens_cost": 0.001, "request_cost": 0.005, "total_cost": 0.006}}, {}, "0.006"),
        ({"cost": 0.25}, {}, "0.25"),
        ({"cost": 0.001, "is_byok": True, "cost_details": {"upstream_inference_cost": 0.5}}, {}, "0.501"),
        ({}, {"provider_metadata": {"gateway": {"cost": "0.0045405"}}}, "0.0045405"),
        ({"cost": {"total_cost": True}}, {}, None),
        ({}, {"provider_metadata": {"gateway": {"cost": "9e99"}}}, None),
        ({}, {"provider_metadata": {"gateway": {"cost": "NaN"}}}, None),
        ({"cost": -1}, {"provider_metadata": {"gateway": [1]}}, None),
        ({"cost": 0.001, "is_byok": True}, {"provider_metadata": {"gateway": {"cost": "1"}}}, None),
    ],
)
def test_stated_bill_wins_in_every_location(usage, message, dollars) -> None:
    assert (None if dollars is None else Decimal(dollars)) == told_by_chat(usage, **message).cost


def test_responses_gateway_states_its_bill_like_chat() -> None:
    from stepengine.models.openai.decode import decode

    usage = {"input_tokens": 1, "output_tokens": 1, "cost": 0.25}
    response = {"output": [], "status": "completed", "model": "m", "usage": usage}

    assert Decimal("0.25") == decode(response, made("openrouter", "m"), "m", None).cost


@pytest.mark.spec("requirements:X76", "reliability:MP61")
@pytest.mark.parametrize(
    ("raw", "usage"),
    [
        ({"totalTokenCount": 76}, Usage(76)),
        ({"totalTokenCount": 76, "candidatesTokenCount": 6, "thoughtsTokenCount": 20}, Usage(50, 6, 0, 0, 20)),
        ({"totalTokenCount": 76, "cachedContentTokenCount": 60}, Usage(16, 0, 60)),
        ({"candidatesTokenCount": 6}, Usage(0, 6, at_least=True)),
        ({"totalTokenCount": 3, "candidatesTokenCount": 6}, Usage(0, 6)),
    ],
)
def test_gemini_total_alone_is_counted(raw, usage) -> None:
    from stepengine.models.google.decode import parse_usage

    assert usage == parse_usage(raw)


@pytest.mark.spec("requirements:X76", "providers:PV81")
@pytest.mark.parametrize(
    ("total", "usage"),
    [
        (7 + 163 + 5, Usage(7, 5, 163)),
        (7 + 163 + 5 + 20, Usage(7, 5, 163, 0, 20)),
        (12, Usage(0, 0, 7, 0, 5, at_least=True)),
        (None, Usage(0, 0, 7, 0, 5, at_least=True)),
    ],
)
def test_cache_outside_the_prompt_is_added_if_totals_agree(total, usage) -> None:
    """Grok on Azure: 163 tokens from the cache of a prompt of 7."""
    from stepengine.models.openai_chat.decode import parse_usage

    details = {"prompt_tokens_details": {"cached_tokens": 163}, "completion_tokens_details": {"reasoning_tokens": 20}}
    if usage.reasoning_tokens == 0:
        details.pop("completion_tokens_details")

    assert usage == parse_usage({"prompt_tokens": 7, "completion_tokens": 5, "total_tokens": total, **details})


@pytest.mark.spec("requirements:X76", "providers:PV81")
@given(prompt=st.integers(0, 9_999), output=st.integers(0, 9_999), more=st.integers(0, 9_999))
def test_tokens_in_the_total_alone_count_as_reasoning(prompt, output, more) -> None:
    """Gemini behind Google's OpenAI endpoint: 109 in all for a prompt of 35 and 12 that were said."""
    from stepengine.models.openai_chat.decode import parse_usage

    parts = {"prompt_tokens": prompt, "completion_tokens": output}

    assert Usage(prompt, output, 0, 0, more) == parse_usage({**parts, "total_tokens": prompt + output + more})
    assert Usage(prompt, output) == parse_usage({**parts, "total_tokens": max(0, prompt + output - more)})
    known = {**parts, "completion_tokens_details": {"reasoning_tokens": output}}
    assert output == parse_usage({**known, "total_tokens": prompt + output}).completion_tokens


MILLIONS = {"input_tokens": 1_000_000, "output_tokens": 100_000}
GEMINI_MILLIONS = {"promptTokenCount": 1_000_000, "candidatesTokenCount": 100_000}
DREW = {"input_tokens": 100, "output_tokens": 1_000, "total_tokens": 1_100}


def opaque(kind: str, **members: object) -> OpaquePart:
    return OpaquePart("openai", {"type": kind, **members})


@pytest.mark.spec("requirements:X76", "providers:PV78", "providers:PV79", "providers:PV80")
@pytest.mark.parametrize(
    ("model", "reply", "unpriced"),
    [
        ("openai/gpt-5-mini", reply_with("openai", MILLIONS), ()),
        ("openai/gpt-5-mini", reply_with("openai", MILLIONS, service_tier="priority"), ()),
        ("openai/gpt-5-mini", reply_with("openai", MILLIONS, service_tier="ultrafast"), ("ultrafast",)),
        ("openai/gpt-5-mini", reply_with("openai", MILLIONS, opaque("mcp_call"), opaque("web_search_call")), ()),
        (
            "openai/gpt-5-mini",
            reply_with("openai", MILLIONS, opaque("code_interpreter_call"), opaque("code_interpreter_call")),
            ("code_interpreter_call",),
        ),
        ("openai/gpt-5-mini", reply_with("openai", MILLIONS, opaque("dream_call")), ("dream_call",)),
        ("openai/gpt-5-mini", reply_with("openai", MILLIONS, opaque("image_generation_call")), ("image_gen",)),
        ("openai/gpt-5-mini", reply_with("openai", MILLIONS, tool_usage={"image_gen": DREW}), ("image_gen",)),
        (
            "openai/gpt-5-mini",
            reply_with("openai", MILLIONS, tool_usage={"image_gen": DREW}, image_model="gpt-image-1"),
            (),
        ),
        ("openai/gpt-5-mini", reply_with("openai", MILLIONS, tool_usage={"dreams": {"num": 3}}), ("dreams",)),
        (
            "google/gemini-2.5-flash",
            reply_with("google", {**GEMINI_MILLIONS, "trafficType": "ON_DEMAND_PRIORITY"}),
            ("priority",),
        ),
        ("google/gemini-2.5-flash", reply_with("google", {**GEMINI_MILLIONS, "serviceTier": "standard"}), ()),
        ("google/gemini-2.5-flash", reply_with("google", {**GEMINI_MILLIONS, "trafficType": "ON_DEMAND"}), ()),
        (
            "google/gemini-2.5-flash",
            reply_with(
                "google",
                GEMINI_MILLIONS,
                groundingMetadata={"imageSearchQueries": ["a"], "groundingChunks": [{"maps": {"uri": "u"}}]},
            ),
            ("imageSearchQueries", "google_maps"),
        ),
        (
            "google/gemini-2.5-pro",
            reply_with(
                "google", {**GEMINI_MILLIONS, "candidatesTokensDetails": [{"modality": "AUDIO", "tokenCount": 100_000}]}
            ),
            ("output_audio_tokens",),
        ),
        (
            "anthropic/claude-sonnet-4-5",
            reply_with("anthropic", {**MILLIONS, "server_tool_use": {"web_search_requests": 2, "web_fetch_requests": 1}}),
            (),
        ),
        (
            "anthropic/claude-sonnet-4-5",
            reply_with(
                "anthropic", {**MILLIONS, "speed": "ultrafast", "server_tool_use": {"code_execution_requests": 1}}
            ),
            ("ultrafast", "code_execution_requests"),
        ),
        ("xai/grok-4", reply_with("xai", {**MILLIONS, "server_side_tool_usage_details": {"x_search_calls": 1}}), ()),
        (
            "xai/grok-4",
            reply_with("xai", {**MILLIONS, "server_side_tool_usage_details": {"image_generation_calls": 1, "mcp_calls": 2}}),
            ("image_generation_calls",),
        ),
        ("xai/grok-4", reply_with("xai", {**MILLIONS, "num_server_side_tools_used": 3}), ("num_server_side_tools_used",)),
        ("ollama/nobodys", reply_with("openai", MILLIONS, service_tier="ultrafast"), ()),
        ("openai/gpt-5-mini", ModelReply("x", usage=Usage(1)), ()),
    ],
)  # fmt: skip
async def test_unpriced_work_makes_the_cost_a_lower_bound(model, reply, unpriced) -> None:
    assert unpriced == LIST_PRICES.list_unpriced(model, reply, AT)

    async with Engine(models={model.partition("/")[0]: ScriptedModel([reply])}) as engine:
        result = await engine.run(AgentDefinition("a", model=model), "go")
    assert bool(unpriced) == result.usage.at_least
    assert (result.cost is None) == (model == "ollama/nobodys")
    assert (LIST_PRICES.price_reply(model, reply, AT) or 0) == (result.cost or 0)


@pytest.mark.spec("requirements:X76", "providers:PV78")
@pytest.mark.parametrize(
    ("model", "reply", "dollars"),
    [
        ("google/gemini-2.5-flash", reply_with("google", {**GEMINI_MILLIONS, "serviceTier": "flex"}), "0.275"),
        ("google/gemini-2.5-flash", reply_with("google", {**GEMINI_MILLIONS, "trafficType": "ON_DEMAND_FLEX"}), "0.275"),
        ("groq/openai/gpt-oss-120b", reply_with("groq", MILLIONS, service_tier="flex"), "0.21"),
        ("openai/gpt-5-mini", reply_with("openai", MILLIONS, service_tier="hammock"), None),
        (
            "google/gemini-2.5-flash",
            reply_with("google", {**GEMINI_MILLIONS, "trafficType": "PROVISIONED_THROUGHPUT"}),
            None,
        ),
    ],
)  # fmt: skip
def test_flex_costs_the_batch_price_and_unknown_tiers_are_unknown(model, reply, dollars) -> None:
    """All of these cost what the ordinary tier does before; Groq's flex still does."""
    assert (None if dollars is None else Decimal(dollars)) == LIST_PRICES.price_reply(model, reply, AT)


@pytest.mark.spec("requirements:X76", "providers:PV79")
def test_openai_searches_and_images_are_billed_by_its_counts() -> None:
    plain = LIST_PRICES.price_reply("openai/gpt-5-mini", reply_with("openai", MILLIONS), AT)
    counted = reply_with(
        "openai",
        MILLIONS,
        opaque("web_search_call", action={"type": "search"}),
        tool_usage={"web_search": {"num_requests": 3}, "image_gen": DREW},
        image_model="gpt-image-1",
    )

    drawn = Decimal("0.0005") + Decimal("0.04")  # 100 tokens for 5 dollars, 1,000 for 40, a million
    assert plain + Decimal("0.03") + drawn == LIST_PRICES.price_reply("openai/gpt-5-mini", counted, AT)


@pytest.mark.spec("requirements:X76", "providers:PV81")
@pytest.mark.parametrize(("header", "dollars"), [("0.00123", "0.00123"), ("0.0", None), ("None", None), ("-1", None)])
async def test_litellm_cost_header_wins_unless_it_is_zero(header, dollars) -> None:
    """It says 0 of models whose price it does not know, and nothing costs that."""
    body = {
        "choices": [{"message": {"content": "x"}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 1, "completion_tokens": 1},
    }
    headers = {"x-litellm-response-cost": header}
    transport = httpx2.MockTransport(lambda _: httpx2.Response(200, json=body, headers=headers))
    provider = OpenAIChatProvider("proxy", "k", base_url="http://localhost/v1", transport=transport)
    reply = await provider.complete(ModelRequest("proxy/m", messages=Transcript([UserMessage("hi")])))
    await provider.close()

    assert (None if dollars is None else Decimal(dollars)) == reply.cost


TOKENS = st.integers(0, 100_000)


@pytest.mark.spec("providers:PV81")
@pytest.mark.parametrize("provider", ["azure", "x-ai"])
@given(prompt=TOKENS, completion=TOKENS, reasoning=TOKENS, images=st.integers(1, 300))
def test_unpriced_counts_leave_the_cost_of_all_tokens(
    provider: str, prompt: int, completion: int, reasoning: int, images: int
) -> None:
    counted = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion + reasoning,
        "completion_tokens_details": {"reasoning_tokens": reasoning},
        "prompt_tokens_details": {"image_tokens": images},
    }
    at = datetime(2026, 11, 1, tzinfo=UTC)
    reply = ModelReply("x", usage=chat_usage(counted), provider_data={"provider": provider, "usage": counted})

    assert prompt + completion + reasoning == reply.usage.total_tokens
    assert LIST_PRICES(f"{provider}/grok-4", reply.usage, at) == LIST_PRICES.price_reply(
        f"{provider}/grok-4", reply, at
    )
