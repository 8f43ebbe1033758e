"""The recorded traffic through the official SDKs' clients: the same replies as from our codecs directly (recorded use R9)."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

import attrs
import pytest

from stepengine.data.models import ModelRequest, ReplyDone
from stepengine.errors import ModelError
from stepengine.models import AnthropicProvider, BedrockProvider, GoogleProvider, OpenAIChatProvider, OpenAIProvider
from stepengine.models._failures import error_from_body
from stepengine.models._http import RequestBody
from stepengine.testing import Cassette, ReplayTransport
from tests.models.recorded import FOLDER, NAMES, Recording, body_of, cassette, needs_recordings, recordings

pytestmark = [needs_recordings, pytest.mark.anyio]

KEY = "sk-test-0123456789"


def provider_of(recording: Recording, played: Cassette, request: Any) -> Any:
    """A provider that sends the recorded body to the recorded address, through the SDK's client."""
    name = NAMES[recording.wire]
    url = urlsplit(request["uri"])
    transport = ReplayTransport(played, chunks="random", seed=len(recording.reply))
    host = f"{url.scheme}://{url.netloc}"
    query = f"?{url.query}" if url.query else ""
    if name == "google":
        provider: Any = GoogleProvider(KEY, host, transport, api_version="v1beta")
        path = url.path.removeprefix("/v1beta/") + query
    elif name == "anthropic":
        provider, path = AnthropicProvider(KEY, host, transport), url.path + query
    elif name == "bedrock_converse":
        clouds = BedrockProvider(KEY, host, transport, region="us-east-1", name=name, endpoint="converse")
        provider, path = clouds._get_provider(recording.model), url.path
    else:
        base, _, leaf = url.path.partition("/v1/")
        kind = OpenAIProvider if name == "openai" else OpenAIChatProvider
        provider = kind(name=name, api_key=KEY, base_url=f"{host}{base}/v1", transport=transport)
        path = f"/{leaf}{query}"
    provider._encode = lambda *_args, **_kwargs: RequestBody(body_of(request), path=path)
    return provider


async def asked(recording: Recording, provider: Any) -> Any:
    request = ModelRequest(f"{NAMES[recording.wire]}/{recording.model}")
    try:
        if not recording.stream:
            return await provider.complete(request)
        items = [delta async for delta in provider.stream(request)]
        assert type(items[-1]) is ReplyDone
        return items[-1].reply
    except ModelError as error:
        return error
    finally:
        await provider.close()


@pytest.mark.deep
@pytest.mark.spec("ecosystem:EC210", "requirements:G5")
@pytest.mark.parametrize("wire", sorted(NAMES))
async def test_exchange_through_the_sdk_equals_the_codec(wire):
    files = {recording.name.partition("#")[0] for recording in recordings() if recording.wire == wire}
    seen = 0
    for file in sorted(files):
        played = Cassette.load(FOLDER / file)
        for recording in recordings():
            name, _, number = recording.name.partition("#")
            if name != file or recording.wire != wire:
                continue
            request = cassette(file)[int(number)]["request"]
            reply = await asked(recording, provider_of(recording, played, request))
            if recording.status >= 400:
                expected = error_from_body(recording.reply, recording.status, {}, recording.call)
                assert (reply.status, type(reply), reply.kind) == (expected.status, type(expected), expected.kind)
                assert reply.message.partition(" The key")[0] == expected.message.partition(" No key")[0]
            else:
                expected = recording.streamed(4096)[1] if recording.stream else recording.decoded()
                assert expected == without_request_id(reply, expected)
            seen += 1
    assert seen == sum(recording.wire == wire for recording in recordings())


def without_request_id(reply: Any, expected: Any) -> Any:
    """The id stands in a header, which the recordings do not have but for a few."""
    assert not isinstance(reply, ModelError), reply.message
    return attrs.evolve(reply, request_id=expected.request_id)
