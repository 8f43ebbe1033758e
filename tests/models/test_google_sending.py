"""How encoded bytes reach Gemini through the public interface of google-genai."""

from __future__ import annotations

import json

import httpx2
import pytest

from stepengine.data.messages import UserMessage
from stepengine.data.models import ModelRequest, ModelSettings, ReplyDone
from stepengine.data.transcript import Transcript
from stepengine.errors import ModelError
from stepengine.models import GoogleProvider
from tests.faults.scripts import google_reply, google_stream

pytestmark = pytest.mark.anyio

REQUEST = ModelRequest(
    "google/gemini-3-pro",
    "é",
    Transcript([UserMessage("hi 🎉")]),
    settings=ModelSettings(extra={"headers": {"x-mine": "yes"}}),
)


def provider(handler, **options):
    return GoogleProvider("the-key", transport=httpx2.MockTransport(handler), **options)


@pytest.mark.spec("ecosystem:EC210", "ecosystem:EC194")
@pytest.mark.parametrize("stream", [True, False])
async def test_encoded_bytes_reach_the_sdk_address_with_key_and_headers(stream):
    seen = []

    def answer(request):
        seen.append(request)
        said = ("hello", [], "end_turn")
        body = b"".join(google_stream(*said)) if stream else google_reply(*said)
        kind = "text/event-stream" if stream else "application/json"
        return httpx2.Response(200, content=body, headers={"content-type": kind})

    it = provider(answer)
    if stream:
        deltas = [delta async for delta in it.stream(REQUEST)]
        assert type(deltas[-1]) is ReplyDone
        reply = deltas[-1].reply
    else:
        reply = await it.complete(REQUEST)
    await it.close()
    assert reply.text == "hello"
    (got,) = seen
    assert got.content == it._encode(REQUEST, stream=stream).content
    assert json.loads(got.content)["contents"][0]["parts"] == [{"text": "hi 🎉"}]
    method = "streamGenerateContent" if stream else "generateContent"
    assert got.url.path == f"/v1/models/gemini-3-pro:{method}"
    assert dict(got.url.params) == ({"alt": "sse"} if stream else {})
    assert got.headers["x-goog-api-key"] == "the-key"
    assert got.headers["content-type"] == "application/json"
    assert got.headers["x-mine"] == "yes"
    assert int(got.headers["content-length"]) == len(got.content)


@pytest.mark.spec("ecosystem:EC194")
@pytest.mark.parametrize(
    ("environment", "options", "version"),
    [
        ("", {}, "v1"),
        ("v1beta", {}, "v1beta"),
        ("", {"api_version": "v1beta"}, "v1beta"),
        ("v1beta", {"api_version": "v1"}, "v1"),
    ],
)
async def test_api_version_comes_from_option_environment_or_sdk(environment, options, version, monkeypatch):
    """
    Aliases such as gemini-flash-latest live at v1beta alone; the client is ours, so that no other one retries by itself.
    """
    seen = []

    def answer(request):
        seen.append(request)
        return httpx2.Response(503, json={"error": {"code": 503, "status": "UNAVAILABLE", "message": "Busy."}})

    monkeypatch.delenv("GOOGLE_GENAI_API_VERSION", raising=False)
    if environment:
        monkeypatch.setenv("GOOGLE_GENAI_API_VERSION", environment)
    it = provider(answer, **options)
    with pytest.raises(ModelError):
        await it.complete(REQUEST)
    await it.close()

    assert [request.url.path for request in seen] == [f"/{version}/models/gemini-3-pro:generateContent"]


@pytest.mark.spec("ecosystem:EC49", "requirements:G23")
def test_google_s_own_variable_wins_over_the_older_one(monkeypatch):
    monkeypatch.setenv("GEMINI_API_KEY", "old")
    assert GoogleProvider()._resolve_credentials_and_url()[0].source == "GEMINI_API_KEY"
    monkeypatch.setenv("GOOGLE_API_KEY", "new")
    assert GoogleProvider()._resolve_credentials_and_url()[0].source == "GOOGLE_API_KEY"


async def test_vertex_environment_does_not_redirect_requests(monkeypatch):
    monkeypatch.setenv("GOOGLE_GENAI_USE_VERTEXAI", "true")
    seen = []

    def answer(request):
        seen.append(str(request.url))
        return httpx2.Response(200, content=google_reply("hello", [], "end_turn"))

    it = GoogleProvider("the-key", transport=httpx2.MockTransport(answer))
    await it.complete(REQUEST)
    await it.close()
    assert seen == ["https://generativelanguage.googleapis.com/v1/models/gemini-3-pro:generateContent"]


BODIES = {
    "latin": b'{"error": {"message": "caf\xe9 is full"}}',
    "utf-16": '{"error": {"message": "no"}}'.encode("utf-16"),
    "deep": b"[" * 20_000,
    "a long number": b'{"error": {"code": ' + b"9" * 5_000 + b"}}",
    "a list of two": b"[1, 2]",
    "null": b"null",
    "nothing": b"",
}


@pytest.mark.spec("ecosystem:EC59")
@pytest.mark.parametrize("body", list(BODIES))
@pytest.mark.parametrize("status", [400, 503])
async def test_refusal_status_counts_for_any_body(body, status):
    one = provider(lambda request: httpx2.Response(status, content=BODIES[body]))
    with pytest.raises(ModelError) as raised:
        await one.complete(REQUEST)
    await one.close()

    assert (status, status != 400) == (raised.value.status, raised.value.retryable)
