"""What each family of models is sent for ``Thinking``: a table of every service, and what holds for all of them."""

from __future__ import annotations

import json
import logging
from itertools import product
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

from stepengine.data.messages import UserMessage
from stepengine.data.models import ModelRequest, ModelSettings, Thinking
from stepengine.data.tools import ToolSpec
from stepengine.data.transcript import Transcript
from stepengine.models._settings import warn_once
from stepengine.models.openai import OpenAIProvider
from stepengine.models.presets import PRESETS
from tests.models.wires import provider_of

EFFORTS = ("none", "low", "medium", "high", "max")
OFF: dict[str, Any] = {"thinking": {"type": "disabled"}}
MODELS = {
    "anthropic": ("claude-opus-4-1", "claude-opus-4-6", "claude-sonnet-5", "claude-fable-5", "other"),
    "google": (
        *("gemini-3-pro-preview", "gemini-3-flash-preview", "gemini-3.7-flash", "gemini-2.5-pro", "gemini-2.5-flash"),
        *("gemini-2.0-flash", "gemma-3", "gemini-flash-latest", "gemini-4-argon", "gemini-4-hydrogen"),
    ),
    "openai": ("gpt-6", "gpt-6-astra", "gpt-5.6", "gpt-5.4", "gpt-5.1", "gpt-5", "gpt-5-pro", "o3", "gpt-4o", "gpt-5.2-chat-latest"),
    "openai_chat": ("gpt-6", "gpt-5.6", "gpt-5.4", "gpt-5.1", "gpt-5-mini", "o3", "gpt-4o", "gpt-5-chat-latest", "other"),
    "openrouter": ("anthropic/claude-sonnet-5", "vendor/model"),
    "groq": ("openai/gpt-oss-120b", "qwen/qwen3-32b", "deepseek-r1-distill-llama-70b", "llama-3.3-70b-versatile"),
    "xai": ("grok-4.3", "grok-4.5", "grok-3-mini", "grok-4", "grok-4-fast-non-reasoning", "grok-3"),
    "deepseek": ("deepseek-v4", "deepseek-reasoner", "deepseek-chat"),
    "mistral": ("mistral-medium-3-5", "magistral-medium-latest", "ministral-8b-2512", "mistral-large-2411"),
    "zai": ("glm-5.2", "glm-5.3", "glm-4.6", "glm-4.6v"),
    "moonshot": ("kimi-k3", "kimi-k2.6", "kimi-k2-thinking", "moonshot-v1-8k"),
    "cerebras": ("gpt-oss-120b", "zai-glm-4.7", "llama-3.3-70b"),
    "snowflake": ("claude-sonnet-4-5", "gpt-5", "llama3"),
    "qwen": ("qwen3-max",),
    "vllm": ("Qwen/Qwen3-8B", "openai/gpt-oss-20b"),
    "llamacpp": ("qwen3", "gpt-oss-20b"),
    "ollama": ("qwen3", "gpt-oss:20b"),
    "lmstudio": ("whatever",),
    "azure": ("gpt-5.4", "my-deployment"),
    "together": ("vendor/model",),
    "google_interactions": ("gemini-3-pro-preview", "gemini-2.5-flash"),
    "bedrock_converse": (
        *("amazon.nova-2-lite-v1:0", "amazon.nova-pro-v1:0", "openai.gpt-oss-120b-1:0", "qwen.qwen3-32b-v1:0"),
        *("deepseek.r1-v1:0", "meta.llama4-scout-17b-instruct-v1:0"),
    ),
}  # fmt: skip
LOOK = ToolSpec("look", "Looks.", {"type": "object", "properties": {}})


def provider(name: str) -> Any:
    if PRESETS.get(name) and PRESETS[name].adapter == "openai":
        return OpenAIProvider("k", name=name)
    return provider_of(name)


def encoded(name: str, model: str, thinking: Thinking | None, **settings: Any) -> dict[str, Any]:
    asked = ModelRequest(
        f"{name}/{model}",
        "",
        Transcript([UserMessage("hi")]),
        (LOOK,),
        settings=ModelSettings(thinking=thinking, **settings),
    )
    body: dict[str, Any] = json.loads(provider(name)._encode(asked, stream=False).content)
    return body


def said(name: str, model: str, thinking: Thinking | None, **settings: Any) -> dict[str, Any]:
    """What a body says because of *thinking*."""
    plain = encoded(name, model, None, **settings)
    return {key: value for key, value in encoded(name, model, thinking, **settings).items() if plain.get(key) != value}


@pytest.fixture
def notes(caplog: pytest.LogCaptureFixture) -> Any:
    """The warnings so far; each comes once in a process, so that what others caused is forgotten."""
    warn_once.cache_clear()
    caplog.set_level(logging.WARNING, logger="stepengine.models")
    yield lambda: [record.getMessage() for record in caplog.records if record.name == "stepengine.models"]
    warn_once.cache_clear()


@pytest.mark.spec("providers:PV22", "providers:PV15")
def test_no_wire_is_sent_two_amounts_that_exclude_each_other():
    for name, models in MODELS.items():
        for model, wish in product(models, [Thinking("high"), Thinking("high", 5_000), Thinking()]):
            sent = said(name, model, wish)
            config = sent.get("generationConfig", {}).get("thinkingConfig", {})
            assert not {"thinkingLevel", "thinkingBudget"} <= config.keys()
            assert not (name == "moonshot" and {"thinking", "reasoning_effort"} <= sent.keys())
            assert not {"effort", "max_tokens"} <= sent.get("reasoning", {}).keys()


@pytest.mark.spec("providers:PV16", "providers:PV9", "providers:PV19")
def test_numbers_and_hidden_thoughts_go_where_a_wire_knows_them(notes):
    def config(model: str, thinking: Thinking) -> Any:
        return said("google", model, thinking)["generationConfig"]["thinkingConfig"]

    assert {"includeThoughts": False, "thinkingBudget": 128} == config("gemini-2.5-pro", Thinking(tokens=5, show=False))
    assert 24_576 == config("gemini-2.5-flash", Thinking(tokens=99_999))["thinkingBudget"]
    assert 4_000 == config("gemini-3-pro-preview", Thinking("low", 4_000))["thinkingBudget"]
    assert {"reasoning": {"max_tokens": 4_000, "exclude": True}} == said(
        "openrouter", "a/b", Thinking(tokens=4_000, show=False)
    )
    hidden = Thinking("low", show=False)
    assert {"reasoning_effort": "low", "include_reasoning": False} == said("groq", "openai/gpt-oss-120b", hidden)
    assert "hidden" == said("groq", "qwen/qwen3-32b", hidden)["reasoning_format"]
    assert "hidden" == said("cerebras", "zai-glm-4.7", hidden)["reasoning_format"]
    assert [] == [note for note in notes() if "show=False" in note and "sends its thoughts" in note]

    said("deepseek", "deepseek-v4", hidden)

    assert notes()[-1].startswith("deepseek-v4 always sends its thoughts; the show=False")


@pytest.mark.spec("providers:PV17", "providers:PV21", "providers:PV39")
def test_forced_call_disables_deepseek_thinking_and_warns_for_claude(notes):
    assert OFF == {"thinking": encoded("deepseek", "deepseek-v4", Thinking("high"), tool_choice="required")["thinking"]}
    assert [] == notes()

    said("openrouter", "anthropic/claude-sonnet-5", Thinking("high"), tool_choice="required")

    assert ["anthropic/claude-sonnet-5 answers a forced tool call without thinking"] == notes()


@pytest.mark.spec("providers:PV25")
def test_temperature_incompatible_with_thinking_is_dropped_with_warning(notes):
    asked = encoded("snowflake", "claude-sonnet-4-5", Thinking("low"), temperature=0.5)
    assert (1, {"effort": "low"}) == (asked["temperature"], asked["reasoning"])
    assert ["claude-sonnet-4-5 thinks at temperature 1 only; temperature=0.5 is not sent"] == notes()

    assert 0.5 == encoded("snowflake", "claude-sonnet-4-5", None, temperature=0.5)["temperature"]


PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "thinking.md"
BEGIN, END = "<!-- table of thinking -->\n", "<!-- end of the table of thinking -->\n"
WISHES = {
    **{f'`"{word}"`': Thinking(word) for word in EFFORTS},
    "`tokens=4_000`": Thinking(tokens=4_000),
    "`show=False`": Thinking(show=False),
}


def shown(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {shown(inner)}" for key, inner in value.items())
    return json.dumps(value).strip('"')


def cell(name: str, model: str, wish: Thinking, notes: Any) -> str:
    warn_once.cache_clear()
    before = len(notes())
    sent = said(name, model, wish)
    if "generationConfig" in sent:
        sent = sent["generationConfig"]["thinkingConfig"]
    sent = sent.get("additionalModelRequestFields") or sent.get("generation_config") or sent
    words = "; ".join(f"`{key}: {shown(value)}`" for key, value in sent.items()) or "nothing"
    return f"{words} (!)" if len(notes()) > before else words


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("requirements:A16")
@pytest.mark.spec(
    *("providers:PV10", "providers:PV11", "providers:PV13", "providers:PV14", "providers:PV15", "providers:PV16"),
    *("providers:PV17", "providers:PV19", "providers:PV20", "providers:PV21", "providers:PV22", "providers:PV24"),
    *("providers:PV25", "providers:PV26"),
)
def test_thinking_table_of_the_page_matches_the_encoders(notes):
    lines = [["", *WISHES], ["---"] * (len(WISHES) + 1)]
    for name, models in MODELS.items():
        lines += [
            [f"`{name}/{model}`", *(cell(name, model, wish, notes) for wish in WISHES.values())] for model in models
        ]
    made = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    found = PAGE.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]

    assert found == made, f"put this between the marks of {PAGE.name}:\n{made}"


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("requirements:A16")
def test_old_spellings_ask_for_the_same_as_the_words():
    for name, models in MODELS.items():
        for model in models:
            assert said(name, model, Thinking(mode="none")) == said(name, model, Thinking("none"))
            assert said(name, model, Thinking("enabled")) == said(name, model, Thinking())
            extended = Thinking(mode="extended", budget_tokens=3_000)
            assert said(name, model, extended) == said(name, model, Thinking(tokens=3_000))


@pytest.mark.spec("providers:PV15", "providers:PV10", "providers:PV11")
def test_every_effort_an_sdk_knows_is_sent_to_some_model():
    from anthropic.types.beta import BetaOutputConfigParam
    from google.genai.types import ThinkingLevel
    from openai.types.shared import ReasoningEffort

    efforts = get_args(get_type_hints(BetaOutputConfigParam)["effort"])
    known = {
        # "xhigh" is less than "max" there, and ours has no word between "high" and "max".
        "anthropic": {word for kind in efforts for word in get_args(kind)} - {"xhigh"},
        "google": {word.value.lower() for word in ThinkingLevel} - {"thinking_level_unspecified"},
        "openai": {word for kind in get_args(ReasoningEffort) for word in get_args(kind)},
    }
    for name, words in known.items():
        sent = json.dumps([said(name, model, Thinking(effort)) for model, effort in product(MODELS[name], EFFORTS)])

        assert words == {word for word in words if f'"{word}"' in sent}, name
