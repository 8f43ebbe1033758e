"""What of a request reaches the transport: the encoded bytes as they are, the key, the headers."""

from __future__ import annotations

import json
import ssl

import httpcore2
import httpx2
import pytest

from stepengine.data.messages import UserMessage
from stepengine.data.models import ModelRequest, ModelSettings
from stepengine.data.transcript import Transcript
from stepengine.errors import ModelError
from stepengine.models._transport import _create_ssl_context
from stepengine.models.anthropic import VERSION
from tests.models.wires import FOUR, MODEL, provider_of


@pytest.mark.spec("ecosystem:EC95")
@pytest.mark.anyio
async def test_long_reply_is_streamed_on_the_wire():
    seen = []

    def handler(request: httpx2.Request) -> httpx2.Response:
        seen.append(json.loads(request.content).get("stream"))
        return httpx2.Response(200, json={"content": [], "stop_reason": "end_turn"})

    provider = provider_of("anthropic", transport=httpx2.MockTransport(handler))
    for limit in (None, 64_000):
        request = ModelRequest("anthropic/m", settings=ModelSettings(max_tokens=limit))
        assert (await provider.complete(request)).content == ()
    await provider.close()
    assert seen == [None, True]


@pytest.mark.spec("ecosystem:EC210", "ecosystem:EC191", "replay:C20")
@pytest.mark.anyio
@pytest.mark.parametrize("name", ["anthropic", "openai_chat"])
@pytest.mark.parametrize("sampling", [False, True])
async def test_encoded_bytes_reach_the_transport_unchanged_with_key_and_type(name, sampling):
    seen = []

    def handler(request: httpx2.Request) -> httpx2.Response:
        seen.append(request)
        return httpx2.Response(529 if len(seen) == 1 else 200, json={})

    more = {"max_tokens": 8_192} if name == "anthropic" else {}
    provider = provider_of(name, transport=httpx2.MockTransport(handler), **more)
    how = ModelSettings(temperature=0.3) if sampling else ModelSettings()
    request = ModelRequest(f"{name}/{MODEL[name]}", "é", Transcript([UserMessage("hi 🎉")]), settings=how)
    with pytest.raises(ModelError):
        await provider.complete(request)
    await provider.close()
    assert len(seen) == 1
    (got,) = seen
    assert got.content == provider._encode(request, stream=False).content
    assert got.headers["authorization"] == "Bearer k"
    assert got.headers["content-type"] == "application/json"
    assert got.url.path == ("/v1/messages" if name == "anthropic" else "/v1/chat/completions")
    if name == "anthropic":
        assert got.headers["anthropic-version"] == ("2023-06-01" if sampling else VERSION)


@pytest.mark.anyio
async def test_ca_certificates_load_once_and_reload_when_the_variable_changes(tmp_path, monkeypatch):
    reads = []
    read = ssl.SSLContext.load_verify_locations
    monkeypatch.setattr(
        ssl.SSLContext, "load_verify_locations", lambda self, *files: reads.append(files) or read(self, *files)
    )
    monkeypatch.setattr(httpcore2, "default_ssl_context", httpcore2._ssl.default_ssl_context)  # the one that reads them
    _create_ssl_context.cache_clear()
    for name in FOUR:
        for _ in range(2):
            provider = provider_of(name, base_url="http://127.0.0.1:9/v1")
            provider._get_or_create_clients()
            await provider.close()
    assert len(reads) == 1

    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "missing"))
    with pytest.raises(FileNotFoundError):
        provider_of("anthropic")._get_or_create_clients()
