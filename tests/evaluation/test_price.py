"""
`stepengine compare price`: what recorded runs would have cost (evaluation JG82).
"""

from __future__ import annotations

from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepengine import Usage
from stepengine.cli.exits import Exit
from stepengine.evaluation import price
from stepengine.evaluation.prices import RecordedCall, list_answered_calls, price_calls, tokenizer_family
from stepengine.journal import FileJournal
from stepengine.models.pricing import LIST_PRICES
from stepengine.testing import text, tool_call

NOW = datetime(2026, 6, 1, tzinfo=UTC)
MODEL = "anthropic/claude-sonnet-4-5"
TOKENS = st.integers(0, 1_000_000)


def by_bucket(model: str, usage: Usage, at: datetime) -> Decimal:
    """
    A price list whose four buckets are all different.
    """
    return Decimal(
        3 * usage.input_tokens + 15 * usage.completion_tokens + usage.cache_read_tokens + 4 * usage.cache_write_tokens
    )


@given(st.builds(Usage, TOKENS, TOKENS, TOKENS, TOKENS, TOKENS), st.floats(0, 1))
@pytest.mark.spec("evaluation:JG82")
def test_the_price_range_contains_every_guess_about_tokens(usage: Usage, shared: float) -> None:
    """
    For any usage: the recorded buckets, no cache, no thoughts, and the tokens of other tokenizers all lie within.
    """
    same = price_calls([RecordedCall("x/claude-1", usage, None, shared)], "y/claude-2", by_bucket, NOW)
    other = price_calls([RecordedCall("x/claude-1", usage, None, shared)], "y/gpt-5", by_bucket, NOW)
    no_cache = Usage(usage.prompt_tokens, usage.output_tokens, 0, 0, usage.reasoning_tokens)

    assert same.low is not None
    assert other.low is not None
    for guess in (usage, no_cache, attrs.evolve(usage, reasoning_tokens=0)):
        assert same.low <= by_bucket("", guess, NOW) <= same.high
    assert other.low <= same.low
    assert same.high <= other.high
    assert other.high >= by_bucket("", no_cache, NOW) * Decimal("1.349") - 50


@pytest.mark.spec("evaluation:JG82")
def test_a_family_shares_a_tokenizer() -> None:
    """
    Names of one maker's models are one family, whoever serves them.
    """
    assert "claude" == tokenizer_family("anthropic/claude-sonnet-4-5") == tokenizer_family("bedrock/claude-3")
    assert tokenizer_family("openai/gpt-5") == tokenizer_family("openai/o3") == "gpt"
    assert "" == tokenizer_family("")
    assert tokenizer_family("meta/llama-4") != tokenizer_family("openai/gpt-5")


@pytest.mark.spec("evaluation:JG82", "evaluation:JG87", "evaluation:JG12")
def test_the_price_command_fails_where_there_is_no_price(folder: Any) -> None:
    """
    Two calls of a thousand tokens each; the same family has one bound fewer, and an unknown model is unknown, not free.
    """
    used = Usage(1000, 100, requests=1)
    replies = [tool_call("look", {"shelf": "a"}, usage=used, cost="0.01"), text("three", usage=used, cost="0.02")]
    folder.record("run.jsonl", "go", replies)
    report = folder.json("compare", "price", "run.jsonl", "--model", MODEL, "--model", "openai/gpt-5-mini")
    mine, other = report["runs"][0]["models"]
    whole = 2 * LIST_PRICES(MODEL, Usage(1000, 100), NOW)

    assert "stepengine.price/1" == report["format"]
    assert report["runs"][0]["models"] == [one.to_json() for one in price("run.jsonl", MODEL, "openai/gpt-5-mini")]
    assert ("0.03", 0) == (mine["recorded"], mine["unknown"])
    assert Decimal(mine["low"]) <= whole * Decimal("1.36")
    assert Decimal(mine["high"]) == pytest.approx(whole * Decimal("1.35"))
    assert Decimal(other["low"]) < Decimal(other["high"]) < Decimal(mine["high"])
    unknown = folder.json("compare", "price", "run.jsonl", "--model", "nobody/knows-1", code=Exit.FAILED)
    assert (None, None) == (unknown["runs"][0]["models"][0]["low"], unknown["runs"][0]["models"][0]["high"])
    said = folder.type("compare", "price", "run.jsonl", "run.jsonl", "--model", MODEL)
    assert "together" in said.stdout
    assert "would also act differently" in said.stderr
    folder.type("compare", "price", "none.jsonl", "--model", MODEL, code=Exit.USAGE)
    assert 0 < list_answered_calls(FileJournal("run.jsonl"))[1].shared < 1


@pytest.mark.spec("evaluation:JG82")
def test_calls_without_usage_are_counted_and_not_taken_for_free(folder: Any) -> None:
    """
    A run of which nobody knows what it used has no price; one of which that is known in part says so.
    """
    folder.record("none.jsonl", "go", [text("three")])
    folder.record("some.jsonl", "go", [tool_call("look", {"shelf": "a"}, usage=Usage(1000, 100)), text("three")])
    none = folder.json("compare", "price", "none.jsonl", "--model", MODEL, code=Exit.FAILED)["runs"][0]["models"][0]
    some = folder.json("compare", "price", "some.jsonl", "--model", MODEL)["runs"][0]["models"][0]

    assert (None, 1) == (none["low"], none["unknown"])
    assert (1, None) == (some["unknown"], some["recorded"])
    assert Decimal(some["low"]) > 0
