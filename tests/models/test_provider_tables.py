"""A provider of the package has its row in every table about providers; a new one is named with the table that lacks it."""

from __future__ import annotations

import pytest

from stepengine.adapters.otel import PROVIDERS
from stepengine.models import Models
from stepengine.models._price_book import PRICE_LISTS
from stepengine.models.presets import PRESETS
from stepengine.testing.engines import make_models_with_transport
from stepengine.testing.placeholders import list_hosts, make_replay_variables

STANDARD = sorted(Models.standard().providers)
LOCAL = {"llamacpp", "lmstudio", "ollama", "vllm"}
"""Servers on one's own machine: they cost nothing, and the conventions do not name them."""
UNLISTED_PRICES = {"huggingface", "qwen", "snowflake"}
"""`genai_prices` has no list for them; their replies say what they cost, or the cost is unknown."""
UNNAMED_IN_TRACES = {
    *("cerebras", "fireworks", "huggingface", "openrouter", "qwen", "snowflake", "together", "zai"),
}
"""The conventions of OpenTelemetry have no name for them, so traces have ours."""


def test_recordings_of_every_provider_are_replayed() -> None:
    assert STANDARD == sorted(make_models_with_transport(lambda: None, "key").providers)


def test_every_provider_has_a_price_list_or_a_listed_exception() -> None:
    data = pytest.importorskip("genai_prices.data")
    lists = {provider.id for provider in data.providers}

    without = {name for name in STANDARD if PRICE_LISTS.get(name, name) not in lists}

    assert LOCAL | UNLISTED_PRICES == without


def test_every_provider_has_an_otel_name_or_a_listed_exception() -> None:
    conventions = pytest.importorskip("opentelemetry.semconv._incubating.attributes.gen_ai_attributes")
    names = {value.value for value in conventions.GenAiProviderNameValues} | {"moonshot_ai"}

    without = {name for name in STANDARD if PROVIDERS.get(name, name) not in names}

    assert LOCAL | UNNAMED_IN_TRACES == without


def test_every_remote_provider_gets_a_placeholder_key_when_replaying() -> None:
    remote = [preset for preset in PRESETS.values() if preset.base_url and preset.name not in LOCAL]
    keys = {preset.name: preset.key_variable for preset in remote if preset.key_variable}

    got = {name: make_replay_variables({}, list_hosts([PRESETS[name].base_url or ""])) for name in keys}

    assert {name: {key} for name, key in keys.items()} == {name: {*changes} for name, changes in got.items()}
