"""Prices, context windows and names from the packaged data."""

from __future__ import annotations

import pytest

from stepengine.models.pricing import nearest_names


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
