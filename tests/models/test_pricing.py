"""Prices, context windows and names from the packaged data."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from decimal import Decimal
from random import Random

import pytest
from genai_prices import Usage as PricedUsage
from genai_prices import calc_price
from genai_prices.data_snapshot import DataSnapshot, get_snapshot, set_custom_snapshot

from stepengine import AgentDefinition, Engine, TextPart
from stepengine.data.json import freeze, thaw
from stepengine.data.messages import OpaquePart
from stepengine.data.models import ModelReply
from stepengine.data.usage import Usage
from stepengine.models.pricing import cost_of, info_of, nearest_names
from stepengine.testing import ScriptedModel
from tests.models.recorded import needs_recordings, recordings


@pytest.mark.spec("reliability:MP05")
@pytest.mark.parametrize(
    ("model", "near"),
    [
        ("anthropic/claude-sonet-4-5", "claude-sonnet-4-5"),
        ("openai_chat/gpt-4o-minni", "gpt-4o-mini"),
        ("google/gemini-2.5-flas", "gemini-2.5-flash"),
    ],
)
def test_a_name_with_a_slip_is_found_among_those_of_its_provider(model: str, near: str) -> None:
    found = nearest_names(model)

    assert near in found
    assert len(found) <= 3
    assert () == nearest_names(f"nobody/{near}")


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


@pytest.mark.spec("requirements:G17", "ecosystem:EC77")
def test_listed_models_cost_what_the_library_of_prices_says_in_every_tier_and_at_every_time() -> None:
    random, now = Random(7), datetime(2026, 11, 1, tzinfo=UTC)
    compared = priced = 0
    for provider in get_snapshot().providers:
        for model in provider.models[::4]:
            size = random.choice([1, 1_000, 90_000, 400_000])
            usage = Usage(*[random.randrange(size) for _ in range(5)])
            at = now - timedelta(hours=random.randrange(10_000))
            expected = price_of_the_library(provider.id, model.id, usage, at)

            assert expected == cost_of(f"{provider.id}/{model.id}", usage, at), (provider.id, model.id, usage, at)
            compared += 1
            priced += bool(expected)
    assert priced > compared / 2 > 150


@pytest.mark.spec("requirements:G17")
@pytest.mark.parametrize("prompt", [199_999, 200_000, 200_001])
def test_a_tier_begins_above_its_start(prompt: int) -> None:
    at = datetime(2026, 11, 1, tzinfo=UTC)
    usage = Usage(prompt, 10)

    assert price_of_the_library("google", "gemini-2.5-pro", usage, at) == cost_of("google/gemini-2.5-pro", usage, at)


@pytest.mark.spec("requirements:G18")
def test_what_is_not_listed_has_no_price_and_no_window() -> None:
    assert cost_of("ollama/llama3", Usage(1, 1), datetime.now(UTC)) is None
    assert cost_of("anthropic/claude-sonnet-4-5", None, datetime.now(UTC)) is None
    assert info_of("ollama/llama3").context_window is None
    assert 200_000 <= info_of("anthropic/claude-sonnet-4-5").context_window


def test_prices_that_were_replaced_are_looked_up_again() -> None:
    at, usage = datetime(2026, 11, 1, tzinfo=UTC), Usage(1_000, 1_000)
    before = cost_of("anthropic/claude-sonnet-4-5", usage, at)
    try:
        set_custom_snapshot(DataSnapshot(providers=[], from_auto_update=False))
        assert cost_of("anthropic/claude-sonnet-4-5", usage, at) is None
    finally:
        set_custom_snapshot(None)
    assert before == cost_of("anthropic/claude-sonnet-4-5", usage, at)


# --- what providers report beside text ----------------------------------------------------------------------------------

AT = datetime(2026, 11, 1, tzinfo=UTC)
LISTED = {
    "anthropic": ("anthropic", "default"),
    "openai": ("openai", "responses"),
    "openai_chat": ("openai", "chat"),
    "openrouter": ("openrouter", "chat"),
    "google": ("google", "default"),
}


def extracted(reply: ModelReply, name: str, provider: str) -> Decimal | None:
    """What the library's own extractor makes of a reply's usage; ``None`` where it refuses."""
    listed, flavor = LISTED[provider]
    raw = thaw(freeze(reply.provider_data["usage"]))
    tier = reply.provider_data.get("service_tier") or raw.get("service_tier")
    data = {"usage": raw, "usageMetadata": raw, "model": name, "modelVersion": name}
    try:
        usage = get_snapshot().extract_usage(data, provider_id=listed, api_flavor=flavor).usage
        context = {"service_tier": tier} if tier in {"flex", "priority"} else None
        return get_snapshot().calc(usage, name, listed, None, AT, context).total_price
    except (LookupError, ValueError):
        return None


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
def test_what_a_server_reports_in_forms_that_nobody_knows_costs_what_its_tokens_cost(told, more):
    raw = {"prompt_tokens": 10, "completion_tokens": 10, **told}
    data = {"provider": "openai_chat", "usage": raw, **more}
    content = [OpaquePart("openai_chat", {"type": "web_search_call", "action": "search"}), TextPart("x")]
    reply = ModelReply(content, usage=Usage(10, 10), provider_data=data)

    assert cost_of("openai_chat/gpt-4o", Usage(10, 10), AT) == cost_of.of_reply("openai_chat/gpt-4o", reply, AT)


@pytest.mark.spec("requirements:G17", "reliability:MP61")
def test_what_the_library_of_prices_cannot_read_costs_what_its_tokens_cost():
    raw = {"promptTokenCount": 10, "candidatesTokenCount": 5, "promptTokensDetails": [{"modality": 5, "tokenCount": 3}]}
    reply = ModelReply("x", usage=Usage(10, 5), provider_data={"provider": "google", "usage": raw})
    model = "google/gemini-2.5-flash"
    assert cost_of(model, Usage(10, 5), AT) == cost_of.of_reply(model, reply, AT) is not None


@needs_recordings
@pytest.mark.spec("requirements:G17", "providers:PV78", "providers:PV79", "providers:PV80")
def test_no_recorded_reply_costs_less_than_the_library_extracts_from_what_its_provider_reported() -> None:
    """
    Equal for all but what the library's extractor leaves out: searches that no usage counts, and work beside the message.
    """
    compared, above = 0, set()
    for recording in recordings():
        if recording.status != 200:
            continue
        reply = recording.streamed(10**9)[1] if recording.stream else recording.decoded()
        provider = recording.call.provider
        model = reply.model or recording.call.model
        if not (reply.provider_data or {}).get("usage") or reply.cost is not None:
            continue
        theirs = extracted(reply, model.partition("/")[2], provider)
        if theirs is None:
            continue
        ours = cost_of.of_reply(recording.call.model, reply, AT)
        assert ours is not None
        assert ours >= theirs, recording.name
        compared += 1
        if ours > theirs:
            raw = reply.provider_data["usage"]
            above |= {
                "iterations" if raw.get("iterations") else "",
                "grounding" if reply.provider_data.get("groundingMetadata") else "",
                "search" if any(isinstance(part, OpaquePart) for part in reply.content) else "",
            } - {""} or {recording.name}

    assert compared > 300
    assert above <= {"iterations", "grounding", "search"}


def reply_with(provider: str, usage: dict[str, object], *parts: object, **data: object) -> ModelReply:
    read = Usage(1_000_000, 100_000)
    return ModelReply(
        parts or [TextPart("x")], usage=read, provider_data={"provider": provider, "usage": usage, **data}
    )


@pytest.mark.spec("providers:PV78", "providers:PV79", "providers:PV80", "providers:PV108")
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
def test_a_reply_costs_what_was_done_for_it(model: str, reply: ModelReply, dollars: str) -> None:
    assert Decimal(dollars) == cost_of.of_reply(model, reply, AT)


@pytest.mark.spec("requirements:G17")
async def test_a_gateway_that_answers_under_its_own_name_is_priced_by_the_name_that_was_asked() -> None:
    reply = ModelReply("hi", usage=Usage(1_000_000), model="openai/deployment-7")
    async with Engine(models={"openai": ScriptedModel([reply])}) as engine:
        result = await engine.run(AgentDefinition("a", model="openai/gpt-5-mini"), "go")

    assert result.cost == Decimal("0.25")


@pytest.mark.spec("providers:PV79")
def test_tokens_of_a_compaction_and_an_advisor_count() -> None:
    from stepengine.models.anthropic.decode import usage_of

    beside = {"input_tokens": 55_196, "output_tokens": 0}
    raw = {
        "input_tokens": 150,
        "output_tokens": 31,
        "iterations": [
            {"type": "message", "input_tokens": 150, "output_tokens": 31},
            {"type": "compaction", **beside},
        ],
    }

    assert usage_of(raw).total_tokens == 55_377
