"""What a provider refuses, told by what it says: keys, with 401 or with 400 where 401 belongs, and prompts that are too long."""

from __future__ import annotations

import json
from typing import Any

import httpx2
import pytest

from stepengine.data.messages import UserMessage
from stepengine.data.models import ModelReply, ModelRequest, ReplyDone
from stepengine.data.transcript import Transcript
from stepengine.errors import ContextOverflow, ModelError
from stepengine.models import GoogleProvider, Models, OpenAIChatProvider, OpenAIProvider, fallback
from stepengine.models._failures import error_from_body
from stepengine.models.base import Provider
from tests.models.wires import made

pytestmark = pytest.mark.anyio


def google_says(message: str) -> dict[str, Any]:
    info = {
        "@type": "type.googleapis.com/google.rpc.ErrorInfo",
        "reason": "API_KEY_INVALID",
        "domain": "googleapis.com",
    }
    return {"error": {"code": 400, "message": message, "status": "INVALID_ARGUMENT", "details": [info]}}


XAI = {
    "code": "Client specified an invalid argument",
    "error": "Incorrect API key provided: xa***23. You can obtain an API key from https://console.x.ai.",
}
NOT_VALID = google_says("API key not valid. Please pass a valid API key.")
SAID = {
    "google": (400, NOT_VALID),
    "google, expired": (400, google_says("API key expired. Please renew the API key.")),
    "google, unknown": (400, google_says("API Key not found. Please pass a valid API key.")),
    "google, openai's form": (400, [NOT_VALID]),
    "google, in words alone": (400, {"error": {"code": 400, "message": NOT_VALID["error"]["message"]}}),
    "google, by its reason alone": (400, google_says("The request cannot be served.")),
    "google, leaked": (
        403,
        {
            "error": {
                "code": 403,
                "message": "Your API key was reported as leaked. Please use another API key.",
                "status": "PERMISSION_DENIED",
            }
        },
    ),
    "xai": (400, XAI),
    "xai, responses": (400, XAI),
    "openai": (401, {"error": {"message": "Incorrect API key provided: k.", "code": "invalid_api_key"}}),
}


def refusing(whose: str, key: str | None = "k") -> Provider:
    status, body = SAID[whose]
    transport = httpx2.MockTransport(lambda _: httpx2.Response(status, json=body))
    if whose.startswith("google") and "openai" not in whose:
        return GoogleProvider(key, transport=transport)
    if "responses" in whose or whose == "openai":
        return OpenAIProvider(key, name=whose.partition(",")[0], transport=transport)
    return OpenAIChatProvider(whose.partition(",")[0], key, base_url="http://localhost/v1", transport=transport)


async def failure_of(provider: Provider, *, stream: bool) -> ModelError:
    request = ModelRequest(f"{provider.name}/m", messages=Transcript([UserMessage("hi")]))
    with pytest.raises(ModelError) as caught:
        if stream:
            async for _ in provider.stream(request):
                pass
        else:
            await provider.complete(request)
    await provider.close()
    return caught.value


@pytest.mark.spec("reliability:MP16", "requirements:G23", "reliability:MP03")
@pytest.mark.parametrize("stream", [False, True], ids=["at once", "stream"])
@pytest.mark.parametrize("whose", SAID)
async def test_refused_key_is_reported_with_its_source_for_any_status(whose, stream):
    error = await failure_of(refusing(whose), stream=stream)

    assert ("auth", False, SAID[whose][0]) == (error.kind, error.retryable, error.status)
    assert "The key was passed as api_key=." in str(error)


async def test_the_variable_that_held_a_refused_key_is_named(monkeypatch):
    monkeypatch.setenv("GOOGLE_API_KEY", "wrong")
    error = await failure_of(refusing("google", None), stream=False)

    assert "The key was read from the environment variable GOOGLE_API_KEY." in str(error)


class Answering(Provider):
    name = "answering"

    async def complete(self, request):
        return ModelReply("fine")


@pytest.mark.parametrize("stream", [False, True], ids=["at once", "stream"])
@pytest.mark.parametrize("whose", ["google", "openai"])
async def test_fallback_moves_on_by_default_after_a_refused_key(whose, stream):
    first = refusing(whose)
    models = Models({first.name: first, "answering": Answering()})
    route = fallback(f"{first.name}/m", "answering/m")
    request = ModelRequest(route, messages=Transcript([UserMessage("hi")]))
    provider = models.provider_for(route)
    if stream:
        (reply,) = [delta.reply async for delta in provider.stream(request) if type(delta) is ReplyDone]
    else:
        reply = await provider.complete(request)
    await first.close()

    assert ("fine", "answering/m") == (reply.text, reply.model)


@pytest.mark.spec("reliability:MP22")
def test_refused_key_inside_a_reply_is_an_auth_error():
    inside = error_from_body({"error": {"message": "no", "code": "invalid_api_key"}}, None, {}, made("openai"))
    other = error_from_body(json.dumps({"error": {"message": "Bad value."}}).encode(), 400, {}, made("google"))

    assert ("auth", False, "http") == (inside.kind, inside.retryable, other.kind)
    forbidden = error_from_body({"error": {"message": "Not in your country."}}, 403, {}, made("google"))
    assert forbidden.kind == "http"


@pytest.mark.spec("providers:PV82")
@pytest.mark.parametrize("status", [400, None])
def test_too_many_prompt_tokens_from_perplexity_is_an_overflow(status) -> None:
    told = {"error": {"message": "Too large.", "type": "too_many_prompt_tokens", "code": 400}}

    assert type(error_from_body(told, status, {}, made("perplexity"))) is ContextOverflow
