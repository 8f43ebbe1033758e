"""
No key reaches a log, whatever the SDKs and HTTP libraries log (reliability R11, R11).
"""

from __future__ import annotations

import base64
import logging

import httpx2
import pytest

from stepengine import UserMessage
from stepengine.data.models import ModelRequest
from stepengine.data.transcript import Transcript
from stepengine.errors import ModelError
from stepengine.models import AnthropicProvider, GoogleProvider, OpenAIChatProvider, OpenAIProvider

KEY = "PLANT" + "k7Q" * 10
LOGGERS = ("anthropic", "openai", "google_genai", "google.genai", "httpx2", "httpcore2", "httpx", "httpcore", "asyncio")


@pytest.mark.anyio
@pytest.mark.spec("reliability:R11")
@pytest.mark.parametrize("kind", [AnthropicProvider, OpenAIProvider, OpenAIChatProvider, GoogleProvider])
@pytest.mark.parametrize("status", [200, 401])
async def test_no_key_is_logged_while_everything_logs_at_debug(kind, status, caplog):
    def answer(request):
        assert KEY in str(request.url) + str(request.headers.raw)
        return httpx2.Response(status, json={"error": {"message": f"Incorrect key {KEY}"}, "echo": KEY})

    for name in LOGGERS:
        caplog.set_level(logging.DEBUG, name)
    provider = kind(api_key=KEY, base_url="http://127.0.0.1:9", transport=httpx2.MockTransport(answer))
    with pytest.raises(ModelError) as caught:
        await provider.complete(ModelRequest("any/m", messages=Transcript([UserMessage("hi")])))
    await provider.close()

    logged = "\n".join([record.getMessage() + repr(record.args) + repr(record.__dict__) for record in caplog.records])
    assert logged
    assert KEY not in logged
    assert base64.b64encode(KEY.encode()).decode() not in logged
    assert KEY not in str(caught.value) + repr(caught.value)
