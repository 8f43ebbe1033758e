"""What is known of a model: our tables, and what its provider states when it is asked (PV1)."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx2
import pytest
from genai_prices.data_snapshot import get_snapshot

from stepengine.data.messages import UserMessage
from stepengine.data.models import ModelRequest, ModelSettings, Thinking
from stepengine.data.transcript import Transcript
from stepengine.errors import ModelError
from stepengine.models import (
    AnthropicProvider,
    GoogleProvider,
    ModelInfo,
    Models,
    OpenAIChatProvider,
    OpenAIProvider,
)
from tests.faults.scripts import anthropic_reply, anthropic_stream

NEW = "claude-novel-9"
TYPES = ("adaptive", "enabled", "disabled", "between_tools")


class Anthropic:
    """
    The API with a model that it describes, and that refuses what it did not say that it takes.

    Attributes:
        seen: Method and path of each request.
        bodies: The bodies of the requests for replies.
    """

    def __init__(
        self,
        *,
        types: tuple[str, ...] = ("enabled", "disabled"),
        efforts: tuple[str, ...] = ("low", "high"),
        **members: Any,
    ) -> None:
        self.types, self.efforts = types, efforts
        self.described: Any = {
            "id": NEW,
            "type": "model",
            "lifecycle": "active",
            "max_input_tokens": 300_000,
            "max_tokens": 40_000,
            "capabilities": {
                "thinking": {"supported": True, "types": {name: {"supported": name in types} for name in TYPES}},
                "effort": {
                    "supported": True,
                    **{name: {"supported": name in efforts} for name in ("low", "medium", "high", "xhigh", "max")},
                },
            },
            **members,
        }
        self.status = 200
        self.seen: list[tuple[str, str]] = []
        self.bodies: list[dict[str, Any]] = []

    def __call__(self, request: httpx2.Request) -> httpx2.Response:
        self.seen.append((request.method, request.url.path))
        if request.method == "GET":
            assert request.headers["authorization"] == "Bearer the-key"
            return httpx2.Response(self.status, json=self.described)
        body = json.loads(request.content)
        self.bodies.append(body)
        kind = body.get("thinking", {}).get("type")
        effort = body.get("output_config", {}).get("effort")
        if (
            (kind is not None and kind not in self.types)
            or body["max_tokens"] > 40_000
            or (effort and effort not in self.efforts)
        ):
            error = {"type": "invalid_request_error", "message": "not supported for this model"}
            return httpx2.Response(400, json={"type": "error", "error": error})
        said = ("Hi.", [], "end_turn")
        if not body.get("stream"):
            return httpx2.Response(200, content=anthropic_reply(*said), headers={"content-type": "application/json"})
        headers = {"content-type": "text/event-stream"}
        return httpx2.Response(200, content=b"".join(anthropic_stream(*said)), headers=headers)

    def provider(self, **options: Any) -> AnthropicProvider:
        return AnthropicProvider("the-key", transport=httpx2.MockTransport(self), **options)


def request(effort: Any = "max", model: str = NEW) -> ModelRequest:
    return ModelRequest(
        f"anthropic/{model}", "", Transcript([UserMessage("hi")]), settings=ModelSettings(thinking=Thinking(effort))
    )


@pytest.mark.spec("providers:PV1")
async def test_model_capabilities_are_asked_once_and_shape_requests():
    api = Anthropic()
    provider = api.provider(ask_models=True)

    for effort in ("max", "high", "none"):
        assert "Hi." == (await provider.complete(request(effort))).text

    assert [("GET", f"/v1/models/{NEW}")] == [seen for seen in api.seen if seen[0] == "GET"]
    assert ["enabled", "enabled", "disabled"] == [body["thinking"]["type"] for body in api.bodies]
    assert {40_000} == {body["max_tokens"] for body in api.bodies}
    await provider.close()


@pytest.mark.spec("providers:PV1")
async def test_unsupported_effort_becomes_the_next_lower_one():
    for efforts, asked in {
        ("low", "high"): ["low", "low", "high", "high"],
        ("medium", "high", "xhigh"): ["medium", "medium", "high", "xhigh"],
    }.items():
        api = Anthropic(types=("adaptive", "disabled"), efforts=efforts)
        provider = api.provider(ask_models=True)
        for effort in ("low", "medium", "high", "max"):
            assert "Hi." == (await provider.complete(request(effort))).text

        assert asked == [body["output_config"]["effort"] for body in api.bodies]
        await provider.close()


@pytest.mark.spec("providers:PV1")
async def test_capabilities_are_asked_only_on_request_and_for_unknown_models():
    api = Anthropic(types=TYPES)
    for provider, model in ((api.provider(), NEW), (api.provider(ask_models=True), "claude-sonnet-4-5")):
        with pytest.raises(ModelError):
            await provider.complete(request("max", model))
        await provider.close()

    assert {"POST"} == {method for method, _ in api.seen}


@pytest.mark.spec("providers:PV1")
@pytest.mark.parametrize("status", [200, 404, 500])
async def test_empty_capability_answer_is_asked_once_and_assumes_newest_family(status):
    api = Anthropic(types=("adaptive",), efforts=("high",), capabilities=["adaptive"])
    api.status = status
    provider = api.provider(ask_models=True, max_tokens=100)

    for _ in range(2):
        assert "Hi." == (await provider.complete(request("high"))).text
    with pytest.raises(ModelError):
        await provider.describe(NEW)

    assert ["GET", "POST", "POST", "GET"] == [method for method, _ in api.seen]
    await provider.close()


@pytest.mark.spec("providers:PV1", "requirements:G15")
async def test_stated_model_info_is_remembered():
    api = Anthropic()
    models = Models({"anthropic": api.provider(), "other": AnthropicProvider("k", name="other")})
    before = models.info(f"anthropic/{NEW}")

    stated = await models.ask(f"anthropic/{NEW}")

    assert (None, 64_000, None) == (before.context_window, before.max_output, before.thinking)
    assert ModelInfo(300_000, 40_000, thinking=("enabled", "disabled"), efforts=("low", "high")) == stated
    assert stated == models.info(f"anthropic/{NEW}") == await models.ask(f"anthropic/{NEW}")
    assert 1 == len(api.seen)
    await models.close()


class States:
    """A server that answers questions about models, and nothing else; ``seen`` holds path and authorization of each."""

    def __init__(self, answer: Any, status: int = 200) -> None:
        self.answer, self.status = answer, status
        self.seen: list[tuple[str, str, str | None]] = []

    def __call__(self, request: httpx2.Request) -> httpx2.Response:
        key = request.headers.get("x-goog-api-key") or request.headers.get("authorization")
        self.seen.append((request.method, request.url.path, key))
        return httpx2.Response(self.status, json=self.answer)


@pytest.mark.spec("providers:PV1", "requirements:G15")
@pytest.mark.parametrize(
    ("told", "stated"),
    [
        (
            {"inputTokenLimit": 2_000_000, "outputTokenLimit": 70_000, "thinking": True},
            ModelInfo(2_000_000, 70_000, thinking=("thinking",)),
        ),
        ({"inputTokenLimit": 8_192, "thinking": False}, ModelInfo(8_192, None, thinking=())),
        ({"inputTokenLimit": "many", "outputTokenLimit": -1, "thinking": "yes"}, ModelInfo()),
        ({}, ModelInfo()),
    ],
)
async def test_gemini_states_windows_and_thinking_and_is_asked_once(told, stated):
    api = States({"name": "models/gemini-9-flash", **told})
    provider = GoogleProvider("the-key", transport=httpx2.MockTransport(api))

    for model in ("google/gemini-9-flash", "gemini-9-flash"):
        assert stated == await provider.describe(model)
    assert [("GET", "/v1/models/gemini-9-flash", "the-key")] == api.seen
    await provider.close()


LISTED = {
    "data": [
        {
            "id": "vendor/model",
            "context_length": 131_072,
            "top_provider": {"context_length": 131_072, "max_completion_tokens": 16_384},
            "supported_parameters": ["tools", "reasoning", "include_reasoning"],
        },
        {"id": "vendor/model:free", "context_length": 32_768, "top_provider": {"max_completion_tokens": None}},
        {"id": "vendor/plain", "context_length": 8_192, "supported_parameters": ["tools"]},
        {"id": "vendor/odd", "context_length": "x", "top_provider": 5, "supported_parameters": {}},
        {"id": 7},
        "x",
    ]
}


@pytest.mark.spec("providers:PV1", "requirements:G15")
async def test_openrouter_model_list_is_fetched_once_and_used():
    api = States(LISTED)
    models = Models({"openrouter": OpenAIChatProvider("openrouter", "the-key", transport=httpx2.MockTransport(api))})
    stated = {
        "vendor/model": ModelInfo(131_072, 16_384, thinking=("reasoning",)),
        "vendor/model:nitro": ModelInfo(131_072, 16_384, thinking=("reasoning",)),
        "vendor/model:free": ModelInfo(32_768),
        "vendor/plain": ModelInfo(8_192, thinking=()),
        "vendor/odd": ModelInfo(),
    }
    for name, info in stated.items():
        assert info == await models.ask(f"openrouter/{name}") == models.info(f"openrouter/{name}"), name
    with pytest.raises(ModelError, match="openrouter does not list the model 'vendor/modle' among its 5 models"):
        await models.ask("openrouter/vendor/modle")

    assert [("GET", "/api/v1/models", "Bearer the-key")] == api.seen
    await models.close()


@pytest.mark.spec("providers:PV1")
@pytest.mark.parametrize("name", ["openrouter", "google"])
async def test_a_question_about_a_model_that_fails_is_no_answer(name):
    api = States({"error": {"code": 503, "message": "Busy."}}, 503)
    kind = GoogleProvider if name == "google" else OpenAIChatProvider
    provider = kind(api_key="k", name=name, transport=httpx2.MockTransport(api))
    for _ in range(2):
        with pytest.raises(ModelError) as caught:
            await provider.describe(f"{name}/m")
    assert (503, True, 2) == (caught.value.status, caught.value.retryable, len(api.seen))
    await provider.close()


@pytest.mark.spec("providers:PV1")
async def test_a_server_that_states_nothing_is_not_asked():
    api = States(LISTED)
    transport = httpx2.MockTransport(api)
    for provider in (OpenAIChatProvider("groq", "k", transport=transport), OpenAIProvider("k", transport=transport)):
        assert None is await provider.describe(f"{provider.name}/vendor/model")
    assert [] == api.seen


@pytest.mark.spec("requirements:G15")
@pytest.mark.parametrize(
    ("model", "window", "output"),
    [
        ("google/gemini-2.5-pro", 1_048_576, 65_536),
        ("google/gemini-pro-latest", 1_048_576, 65_536),
        ("openrouter/google/gemini-2.5-pro", 1_048_576, 65_536),
        ("google/gemini-2.5-flash-preview-tts", 8_192, None),
        ("mistral/mistral-large-latest", 262_144, 262_144),
        ("mistral/mistral-large-4", 1_048_576, 1_048_576),
        ("mistral/magistral-medium-latest", 128_000, 16_384),
        ("openai/gpt-5", 400_000, 128_000),
        ("anthropic/claude-sonnet-5", 1_000_000, 128_000),
        ("ollama/nobodys-model", None, None),
    ],
)
def test_windows_and_largest_outputs_of_current_models_are_known(model, window, output):
    assert ModelInfo(window, output) == Models.standard().info(model)


@pytest.mark.spec("requirements:G15")
def test_every_listed_text_gemini_has_window_and_output_limit():
    listed = next(provider for provider in get_snapshot().providers if provider.id == "google").models
    text = [
        m.id for m in listed if re.fullmatch(r"gemini-(?:2\.5|3[.\d]*)-(?:pro|flash|flash-lite)(?:-preview)?", m.id)
    ]

    assert len(text) > 8
    for name in text:
        info = Models.standard().info(f"google/{name}")
        assert (info.context_window or 0) >= 1_000_000, name
        assert 65_536 == info.max_output, name
