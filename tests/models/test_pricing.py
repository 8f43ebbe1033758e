"""Prices, context windows and names from the packaged data."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from decimal import Decimal
from random import Random

import pytest
from genai_prices import Usage as PricedUsage
from genai_prices import calc_price
from genai_prices.data_snapshot import DataSnapshot, get_snapshot, set_custom_snapshot

from stepengine.data.usage import Usage
from stepengine.models.pricing import cost_of, info_of, nearest_names


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
