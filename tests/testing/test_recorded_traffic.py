"""
Real provider traffic through our reader, writer and replay transport, with the three SDKs, sync and async, without a socket.

The recordings stand beside the repository and are read in place; without them these tests are skipped.
"""

from __future__ import annotations

import json
import re
import socket
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from stepengine.models._transport import get_ssl_context
from stepengine.testing import Cassette, CassetteMiss, ReplayTransport
from stepengine.testing.cassette_files import (
    Interaction,
    RecordedRequest,
    RecordedResponse,
    dump_cassette,
    is_event_stream,
    parse_cassette,
)
from stepengine.testing.cassette_matching import is_ignored_header
from stepengine.testing.traffic_redaction import Cleaner

RECORDED = Path(__file__).parents[2].parent / "shared" / "recorded"
FOLDERS = ("anthropic", "openai-responses", "openai-chat", "google-gla", "openrouter")
INTERACTIONS = 478

pytestmark = pytest.mark.skipif(
    not (RECORDED / "index.jsonl").exists(), reason="the recorded provider traffic (../shared/recorded) is not here"
)


def index() -> list[dict[str, Any]]:
    file = RECORDED / "index.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def value_of(message: RecordedRequest | RecordedResponse) -> Any:
    try:
        return json.loads(message.body)
    except ValueError:
        return message.body


@pytest.mark.deep
@pytest.mark.spec("replay:C1", "replay:C2")
def test_every_recording_reads_and_writes_as_valid_vcrpy():
    """
    478 interactions, equal as JSON or byte for byte in our own reader and in vcrpy's; in one of them a model filled in a
    member called "password", some name an account, and nothing else looks like a secret.
    """
    from vcr.serialize import deserialize
    from vcr.serializers import yamlserializer

    count, found = 0, []
    for entry in index():
        before = Cassette.load(RECORDED / entry["file"]).interactions
        data = dump_cassette(before)
        after = parse_cassette(data, entry["file"])
        requests, responses = deserialize(data.decode(), yamlserializer)
        count += len(before)

        assert entry["n"] == len(before) == len(after) == len(requests)
        for old, new, request, response in zip(before, after, requests, responses, strict=True):
            assert value_of(old.request) == value_of(new.request)
            assert value_of(old.response) == value_of(new.response)
            assert new.request.body == (request.body or b"")
            assert new.response.body == (response["body"]["string"] or b"")
            assert (old.request.url, old.response.status) == (request.uri, response["status"]["code"])
            found += Cleaner().find_remaining_secrets(old.response)
    assert INTERACTIONS == count
    in_headers = {name for place, name in found if place.startswith("headers/")}
    assert {"openai-organization", "openai-project"} == in_headers
    in_bodies = [one for one in found if not one[0].startswith("headers/")]
    assert [("body/candidates/0/content/parts/0/functionCall/args/password", "password")] == in_bodies


def plain_headers(message: RecordedRequest | RecordedResponse) -> list[tuple[str, str]]:
    """
    Return the headers of an exchange, other than those that a cassette takes out or replaces: cookies, accounts, what no reply
    depends on, and a Host that only repeats the address.
    """
    account = {"anthropic-organization-id", "openai-organization", "openai-project"}
    address = urlsplit(message.url).netloc if isinstance(message, RecordedRequest) else ""
    return [
        (name, value)
        for name, value in message.headers
        if not is_ignored_header(name.lower())
        and name.lower() not in {"cookie", "set-cookie", *account}
        and (name.lower(), value) != ("host", address)
    ]


@pytest.mark.deep
@pytest.mark.spec("replay:C2", "replay:C5")
def test_every_recording_loses_only_secrets_when_saved(tmp_path):
    """
    A copy that is saved holds the same exchanges, cleaned; saved again, it is the same file. Only what a model filled into a member
    called "password" is replaced, in the reply and in the next request.
    """
    replaced = []
    for entry in index():
        loaded = Cassette.load(RECORDED / entry["file"])
        first = loaded.save(tmp_path / "first.yaml")
        second = Cassette.load(first).save(tmp_path / "second.yaml")

        assert first.read_bytes() == second.read_bytes()
        for old, new in zip(loaded.interactions, Cassette.load(first).interactions, strict=True):
            assert (old.request.method, old.response.status) == (new.request.method, new.response.status)
            for side in ("request", "response"):
                assert plain_headers(getattr(old, side)) == plain_headers(getattr(new, side))
            for side, one in (("request", new.request), ("response", new.response)):
                text = getattr(old, side).body.decode(errors="replace").replace('"Secret1"', '"<redacted:password>"')
                if value_of(getattr(old, side)) != value_of(one):
                    assert json.loads(text) == value_of(one)
                    replaced.append((entry["file"].partition("/")[0], side))
    assert [("google-gla", "response"), ("google-gla", "request")] == replaced


Call = Callable[[Any, RecordedRequest], Any]


def clients(transport: ReplayTransport, url: str) -> tuple[Any, Any, Call]:
    """
    Return a sync client, an async client and how to send a recorded request, for the SDK that speaks to *url*.
    """
    import httpx2

    sync_http, async_http = httpx2.Client(transport=transport), httpx2.AsyncClient(transport=transport)
    if "googleapis" in url:
        from google import genai
        from google.genai.types import HttpOptions

        # The SDK would read the trusted certificates for each client, for web sockets that nobody opens.
        trust = {"ssl": get_ssl_context()}
        options = HttpOptions(
            api_version="v1beta", httpx_client=sync_http, httpx_async_client=async_http, async_client_args=trust
        )
        client = genai.Client(api_key="replay", vertexai=False, http_options=options)
        return client, client.aio, send_google
    if "anthropic" in url:
        from anthropic import Anthropic, AsyncAnthropic

        base = "https://api.anthropic.com"
        return (
            Anthropic(api_key="replay", base_url=base, max_retries=0, http_client=sync_http),
            AsyncAnthropic(api_key="replay", base_url=base, max_retries=0, http_client=async_http),
            send_post,
        )
    from openai import AsyncOpenAI, OpenAI

    base = url.partition("/v1")[0] + "/v1"
    return (
        OpenAI(api_key="replay", base_url=base, max_retries=0, http_client=sync_http),
        AsyncOpenAI(api_key="replay", base_url=base, max_retries=0, http_client=async_http),
        send_post,
    )


def send_post(client: Any, request: RecordedRequest) -> Any:
    """
    Send the recorded body through an anthropic or openai client, streaming when the body asks for it.
    """
    body = json.loads(request.body)
    path = request.url.partition("/v1")[2]
    kind = "anthropic" if "anthropic" in request.url else "openai"
    module = __import__(kind)
    is_async = type(client).__name__.startswith("Async")
    stream = module.AsyncStream[object] if is_async else module.Stream[object]
    prefix = "/v1" if kind == "anthropic" else ""
    return client.post(prefix + path, body=body, cast_to=object, stream=bool(body.get("stream")), stream_cls=stream)


def send_google(client: Any, request: RecordedRequest) -> Any:
    """
    Send the recorded body through google-genai's own request layer.
    """
    api = client._api_client
    path = request.url.partition("/v1beta/")[2]
    body = json.loads(request.body)
    is_async = type(client).__name__.startswith("Async")
    if "streamGenerateContent" in path:
        return api.async_request_streamed("post", path, body) if is_async else api.request_streamed("post", path, body)
    return api.async_request("post", path, body) if is_async else api.request("post", path, body)


SDK_ERRORS = ("APIStatusError", "ClientError", "ServerError")


def status_of(error: Exception) -> int:
    if not any(base.__name__ in SDK_ERRORS for base in type(error).__mro__):
        raise error
    return int(getattr(error, "status_code", None) or error.code)  # type: ignore[attr-defined]


def ask_sync(client: Any, request: RecordedRequest, send: Call) -> int:
    """
    Return the status that the SDK reports, after the whole reply was read.
    """
    try:
        answer = send(client, request)
        if hasattr(answer, "__next__") or type(answer).__name__ == "Stream":
            assert list(answer)
    except Exception as error:
        return status_of(error)
    return 200


async def ask_async(client: Any, request: RecordedRequest, send: Call) -> int:
    """
    The same with an async client.
    """
    try:
        answer = await send(client, request)
        if hasattr(answer, "__aiter__"):
            assert [item async for item in answer]
    except Exception as error:
        return status_of(error)
    return 200


ENDPOINTS = ("/v1/messages", "/v1/responses", "/chat/completions", ":generateContent", ":streamGenerateContent")
HOSTS = ("api.anthropic.com", "api.openai.com", "generativelanguage.googleapis.com", "openrouter.ai")


def is_generating(method: str, host: str, path: str) -> bool:
    return method == "POST" and host in HOSTS and path.endswith(ENDPOINTS) and "/openai/" not in path


@cache
def sdk_interactions(folder: str) -> list[list[Interaction]]:
    """
    Return the requests of each cassette that an SDK's client makes to the generating endpoint of its provider.
    """
    loaded = [Cassette.load(path).interactions for path in sorted((RECORDED / folder).glob("*.yaml"))]
    kept = [[i for i in many if is_generating(i.request.method, *urlsplit(i.request.url)[1:3])] for many in loaded]
    return [many for many in kept if many]


IDS = re.compile(rb"(?:call|chatcmpl|fc|gen|msg|req|resp|rs|toolu)[_-][A-Za-z0-9]{16,}")


@pytest.mark.deep
def test_recordings_in_the_repository_carry_their_licence():
    """
    Every exchange has ids that stand nowhere else.
    """
    ids = {found for file in RECORDED.rglob("*.yaml") for found in IDS.findall(file.read_bytes())}
    root = Path(__file__).parents[2]
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=root, capture_output=True, check=False).stdout.decode()
    if not listed:
        pytest.skip("this is no checkout")
    files = [root / name for name in listed.split("\0") if name and (root / name).is_file()]
    copied = [file for file in files if ids & set(IDS.findall(file.read_bytes()))]

    assert len(ids) > 500
    assert [] == [str(file) for file in copied if not (file.parent / "NOTICE.md").exists()]


@pytest.fixture
def no_sockets(monkeypatch):
    """
    Make any attempt to open a connection or to look up a host fail the test.
    """
    seen: list[Any] = []

    def refuse(*args: Any, **kwargs: Any) -> None:
        seen.append(args)
        raise AssertionError("a socket was opened")

    for name in ("connect", "connect_ex", "sendto"):
        monkeypatch.setattr(socket.socket, name, refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    return seen


@pytest.mark.deep
@pytest.mark.spec("replay:C8", "replay:C4", "replay:C20", "replay:Y10")
@pytest.mark.parametrize("chunks", ["events", "random"])
@pytest.mark.parametrize("folder", FOLDERS)
async def test_every_sdk_replays_its_recorded_traffic_sync_and_async(folder, chunks, no_sockets):
    sent = 0
    for interactions in sdk_interactions(folder):
        held = Cassette([*interactions, *interactions])
        transport = ReplayTransport(held, chunks)
        for interaction in interactions:
            sync_client, async_client, send = clients(transport, interaction.request.url)
            status = interaction.response.status

            assert status == ask_sync(sync_client, interaction.request, send)
            assert status == await ask_async(async_client, interaction.request, send)
            sent += 1
        held.assert_all_used()

    assert [] == no_sockets
    listed = [i for entry in index() if entry["file"].startswith(f"{folder}/") for i in entry["interactions"]]
    assert sent == sum(is_generating(i["method"], i["host"], i["path"]) for i in listed) > 25


RETRIES = {"anthropic": {"max_retries": 2}, "openai-chat": {"max_retries": 2}, "openai-responses": {"max_retries": 2}}


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("replay:C14")
@pytest.mark.parametrize("folder", ["anthropic", "openai-responses", "openai-chat", "google-gla"])
async def test_a_miss_passes_through_every_sdk_without_retries(folder):
    interactions = sdk_interactions(folder)[0]
    held = Cassette()
    sync_client, async_client, send = clients(ReplayTransport(held), interactions[0].request.url)
    if folder in RETRIES:
        sync_client, async_client = (
            sync_client.with_options(**RETRIES[folder]),
            async_client.with_options(**RETRIES[folder]),
        )

    with pytest.raises(CassetteMiss) as one:
        ask_sync(sync_client, interactions[0].request, send)
    with pytest.raises(CassetteMiss) as two:
        await ask_async(async_client, interactions[0].request, send)

    assert [one.value, two.value] == held.misses


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("replay:C16")
@pytest.mark.parametrize("folder", ["anthropic", "openai-responses", "openai-chat", "google-gla"])
async def test_cut_streams_end_and_broken_ones_raise_through_every_sdk(folder):
    """
    That is why adapters must ask for the terminal marker: the SDKs do not.
    """
    import httpx2
    import openai

    streams = [i for many in sdk_interactions(folder) for i in many if is_event_stream(i.response)]
    interaction = min(streams, key=lambda i: len(i.response.body))
    whole, request = interaction.response.body, interaction.request
    first_event = len(whole.replace(b"\r\n", b"\n").partition(b"\n\n")[0]) + 8
    error = openai.APIConnectionError if folder.startswith("openai") else httpx2.RemoteProtocolError

    cut = Cassette([interaction] * 2)
    client, async_client, send = clients(ReplayTransport(cut, cut=first_event), request.url)
    list(send(client, request))
    _ = [item async for item in await send(async_client, request)]
    cut.assert_all_used()

    broken = Cassette([interaction] * 2)
    client, async_client, send = clients(ReplayTransport(broken, reset_after=first_event), request.url)
    with pytest.raises(error):
        list(send(client, request))
    with pytest.raises(error):
        assert [item async for item in await send(async_client, request)]
    broken.assert_all_used()
