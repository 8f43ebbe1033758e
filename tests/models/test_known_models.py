"""
The list of providers and the known facts of models, without a request.
"""

from __future__ import annotations

from decimal import Decimal

import pytest

from stepengine.errors import UnknownModel
from stepengine.models import Models, OpenAIChatProvider, find_known_models, list_providers


def test_providers_are_listed_with_key_state_but_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-hidden")
    models = Models.standard()

    listed = list_providers(models)

    assert [*models.providers] == [one.prefix for one in listed]
    assert {one.prefix: (one.key, one.key_from) for one in listed}["openai"] == ("set", "OPENAI_API_KEY")
    assert "sk-hidden" not in repr(listed)


def test_each_model_of_a_fallback_has_its_limits_and_prices() -> None:
    first, second = find_known_models(Models.standard(), "openai/gpt-5|google/gemini-2.5-flash")

    assert (first.model, second.model) == ("openai/gpt-5", "google/gemini-2.5-flash")
    assert first.prices["input"] == Decimal("1.25")
    assert second.context_window


def test_a_model_of_no_provider_is_unknown_at_once() -> None:
    with pytest.raises(UnknownModel):
        find_known_models(Models({}), "nowhere/model")


def test_served_models_show_the_provider_that_serves_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-hidden")
    models = Models.standard()
    for name in ("my-model", "openai/gpt-oss-20b"):
        models.serve(name, OpenAIChatProvider("gpu", base_url="http://localhost:1/v1"))

    for name, prefix in (
        ("my-model", "gpu"),
        ("openai/gpt-oss-20b", "openai"),
        ("my-model | openai/gpt-oss-20b", "gpu"),
    ):
        known = find_known_models(models, name)[0]
        assert (prefix, "not needed", "http://localhost:1/v1") == (
            known.provider.prefix,
            known.provider.key,
            known.provider.base_url,
        )
