"""Models in the clouds, before a server that checks what the clouds check: signatures, tokens and keys."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any
from urllib.parse import unquote

import attrs
import boto3
import httpx2
import pytest
from botocore.config import Config
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from google.oauth2.service_account import Credentials
from hypothesis import example
from hypothesis import given as for_any
from hypothesis import settings as limits
from hypothesis import strategies as st

from stepengine import (
    ImagePart,
    ModelSettings,
    TextPart,
    Thinking,
    UserMessage,
)
from stepengine.data.messages import AssistantMessage, DocumentPart, ToolCallPart, ToolMessage
from stepengine.data.models import ModelRequest, ReplyDone
from stepengine.data.tools import FIND_TOOLS, ToolSpec
from stepengine.data.transcript import Transcript
from stepengine.data.usage import Usage
from stepengine.errors import ContextOverflow, MissingKey, ModelError, TruncatedReply
from stepengine.models import (
    AnthropicAwsProvider,
    AnthropicGoogleProvider,
    AnthropicProvider,
    BedrockProvider,
    FileSearch,
    FoundryProvider,
    GoogleProvider,
    Models,
    OpenAIChatProvider,
    OpenAIProvider,
    Provider,
    UrlContext,
    VertexProvider,
    WebSearch,
)
from tests.faults import cloud_server as cloud
from tests.faults.cloud_server import (
    ACCESS_KEY,
    AZURE_KEY,
    BEDROCK_KEY,
    PLATFORM_KEY,
    PROJECT,
    REGION,
    SCOPE,
    SECRET_KEY,
    SESSION_TOKEN,
    WORKSPACE,
    CloudServer,
    aws_error,
    aws_stream,
    cloud_server,
)
from tests.faults.scripts import TOOLS, anthropic_stream
from tests.faults.server import Answer, json_answer
from tests.phrases import NO_KEY

COUNTERPARTS = (
    (
        "pypi:boto3",
        "1.44.5",
        "works",
        "environment, profile and process credentials for Amazon Bedrock",
    ),
    ("pypi:azure-identity", "1.27.0", "works", "Entra ID tokens for Azure and Foundry"),
    ("pypi:google-auth", "2.62.2", "works", "service accounts and tokens for Vertex AI"),
)

PNG = b"\x89PNG\r\n\x1a\n" + bytes(range(40))
PDF = b"%PDF-1.7 a report"
KEYS = {"access_key": ACCESS_KEY, "secret_key": SECRET_KEY}
ENTRA = "a-token-of-entra-id-0123456789"
SONNET = "claude-sonnet-4-5"
FIND = ToolSpec(FIND_TOOLS, "Find tools.", {"type": "object", "properties": {}})


@pytest.fixture
async def server() -> AsyncIterator[CloudServer]:
    async with cloud_server() as state:
        state.entra.add(ENTRA)
        yield state


@pytest.fixture(scope="module")
def private_key() -> rsa.RSAPrivateKey:
    return rsa.generate_private_key(public_exponent=65537, key_size=2048)


@pytest.fixture(scope="module")
def another_key() -> rsa.RSAPrivateKey:
    return rsa.generate_private_key(public_exponent=65537, key_size=2048)


def pem(key: rsa.RSAPrivateKey) -> str:
    text = serialization.Encoding.PEM
    return key.private_bytes(text, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()).decode()


@pytest.fixture
def account(server, private_key) -> dict[str, str]:
    """The service account's file, as Google gives it."""
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    server.public_key = private_key.public_key().public_bytes(serialization.Encoding.PEM, form).decode()
    return {
        "type": "service_account",
        "project_id": PROJECT,
        "private_key_id": "1",
        "private_key": pem(private_key),
        "client_email": "tester@test-project.iam.gserviceaccount.com",
        "token_uri": f"{server.url}/token",
    }


# --- the ways in --------------------------------------------------------------------------------------------------------


def signed(server: CloudServer, account: Any, **options: Any) -> BedrockProvider:
    return BedrockProvider(base_url=server.url, region=REGION, **{**KEYS, **options})


def vertex(server: CloudServer, account: dict[str, str], **options: Any) -> VertexProvider:
    credentials = Credentials.from_service_account_info(account, scopes=[SCOPE])
    return VertexProvider(PROJECT, "us-east5", credentials, base_url=server.url, **options)


def with_bedrock_key(server: CloudServer, account: Any) -> BedrockProvider:
    return BedrockProvider(BEDROCK_KEY, server.url, region=REGION)


def foundry(server: CloudServer, account: Any, **options: Any) -> FoundryProvider:
    return FoundryProvider(base_url=f"{server.url}/anthropic", **options)


def chat(server: CloudServer, account: Any, **options: Any) -> OpenAIChatProvider:
    return OpenAIChatProvider("azure", base_url=server.url, **options)


def responses(server: CloudServer, account: Any, **options: Any) -> OpenAIProvider:
    return OpenAIProvider(name="azure_responses", base_url=server.url, **options)


def on_aws(server: CloudServer, account: Any, **options: Any) -> AnthropicAwsProvider:
    given = {"base_url": server.url, "region": REGION, "workspace_id": WORKSPACE, **options}
    return AnthropicAwsProvider(**given if "api_key" in given else {**KEYS, **given})


def on_google(server: CloudServer, account: dict[str, str], **options: Any) -> AnthropicGoogleProvider:
    credentials = Credentials.from_service_account_info(account, scopes=[SCOPE])
    given = {"base_url": server.url, "workspace_id": WORKSPACE, **options}
    return AnthropicGoogleProvider(credentials=credentials, **given)


async def entra() -> str:
    return ENTRA


def in_the_path(body: dict[str, Any]) -> dict[str, Any]:
    """What becomes of a body where the path names the model, and one mark for all is not known."""
    body = {name: value for name, value in body.items() if name not in {"model", "cache_control"}}
    body["messages"][-1]["content"][-1]["cache_control"] = {"type": "ephemeral"}
    return {**body, "anthropic_version": "2026-10-21"}


def invoked(body: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in in_the_path(body).items() if name != "stream"}


@attrs.frozen
class Way:
    """A way into a cloud: who goes it, what model it is asked for, and the model's own wire where the bodies are equal."""

    make: Callable[..., Provider]
    model: str
    direct: Callable[[], Provider] | None = None


CLAUDE = partial(AnthropicProvider, "k" * 20)
CHAT = partial(OpenAIChatProvider, "openai_chat", "k" * 20)
RESPONSES = partial(OpenAIProvider, "k" * 20)
PIXTRAL = "arn:aws:bedrock:us-east-1:123456789012:inference-profile/us.mistral.pixtral-large-2502-v1:0"
WAYS = {
    "bedrock": Way(signed, f"bedrock/us.anthropic.{SONNET}-20250929-v1:0", CLAUDE),
    "bedrock-key": Way(with_bedrock_key, f"bedrock/anthropic.{SONNET}"),
    "mantle": Way(partial(signed, endpoint="mantle"), f"bedrock/anthropic.{SONNET}", CLAUDE),
    "bedrock-openai": Way(signed, "bedrock/openai.gpt-5.4", RESPONSES),
    "converse": Way(signed, "bedrock/us.amazon.nova-pro-v1:0"),
    "converse-key": Way(with_bedrock_key, f"bedrock/{PIXTRAL}"),
    "converse-claude": Way(
        partial(signed, name="bedrock_converse", endpoint="converse"), f"bedrock_converse/anthropic.{SONNET}"
    ),
    "vertex-claude": Way(vertex, f"vertex/{SONNET}@20250929", CLAUDE),
    "vertex-gemini": Way(vertex, "vertex/gemini-2.5-pro", partial(GoogleProvider, "k" * 20)),
    "foundry": Way(partial(foundry, api_key=AZURE_KEY), f"foundry/{SONNET}", CLAUDE),
    "foundry-entra": Way(partial(foundry, token_provider=entra), f"foundry/{SONNET}"),
    "platform-aws": Way(on_aws, f"anthropic_aws/{SONNET}", CLAUDE),
    "platform-aws-key": Way(partial(on_aws, api_key=PLATFORM_KEY), f"anthropic_aws/{SONNET}"),
    "platform-google": Way(on_google, f"anthropic_google/{SONNET}", CLAUDE),
    "azure": Way(partial(chat, api_key=AZURE_KEY), "azure/gpt-4o", CHAT),
    "azure-entra": Way(partial(chat, token_provider=entra), "azure/gpt-4o"),
    "azure-responses": Way(partial(responses, api_key=AZURE_KEY), "azure_responses/gpt-5", RESPONSES),
    "azure-responses-entra": Way(partial(responses, token_provider=lambda: ENTRA), "azure_responses/gpt-5"),
}
every_way = pytest.mark.parametrize("name", WAYS)


def asked(model: str, *messages: Any, **settings: Any) -> ModelRequest:
    given = Transcript(messages or [UserMessage("What is 2 + 3?")])
    return ModelRequest(model, "Be brief.", given, TOOLS, settings=ModelSettings(**{"max_tokens": 3_000, **settings}))


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec(
    *("providers:PV90", "providers:PV91", "providers:PV92", "providers:PV93"),
    *("providers:PV94", "providers:PV96", "providers:PV97", "providers:PV109", "providers:PV131"),
)
@every_way
async def test_an_accepted_cloud_request_is_answered_whole_and_streamed(name, server, account):
    way = WAYS[name]
    provider = way.make(server, account)
    whole = await provider.complete(asked(way.model))
    pieces = [delta async for delta in provider.stream(asked(way.model))]
    await provider.close()

    assert isinstance(pieces[-1], ReplyDone)
    streamed = pieces[-1].reply
    for reply in (whole, streamed):
        assert "It is five." == reply.text
        assert [("add", {"a": 2, "b": 3})] == [(call.tool_name, dict(call.input)) for call in reply.tool_calls]
        assert 12 == reply.usage.output_tokens
    assert len(pieces) > 3


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("providers:PV90", "providers:PV91", "providers:PV93", "providers:PV109")
@pytest.mark.parametrize("name", [name for name, way in WAYS.items() if way.direct is not None])
async def test_a_cloud_body_equals_the_direct_one_except_documented_changes(name, server, account):
    """Media, tools, calls with their results and thinking, in a second turn over a first reply of the same provider."""
    way = WAYS[name]
    provider, bare = way.make(server, account), way.model.partition("/")[2]
    first = asked(way.model)
    reply = await provider.complete(first)
    media = [ImagePart(data=PNG, mime_type="image/png")]
    if "azure" not in way.model.partition("/")[0].split("_")[:1] or "responses" in name:
        media.append(DocumentPart(data=PDF, mime_type="application/pdf", name="report.pdf"))

    def second(model: str, whose: str) -> ModelRequest:
        (text, call) = reply.content
        call = attrs.evolve(call, tool_call_id="t1", provider_data={**(call.provider_data or {}), "provider": whose})
        history = [
            UserMessage([TextPart("What is this, and 2 + 3?"), *media]),
            AssistantMessage([TextPart(text.text), call]),
            ToolMessage("t1", "add", "5"),
        ]
        return asked(model, *history, thinking=Thinking(effort="low"))

    (call,) = reply.tool_calls
    own = call.provider_data["provider"]
    await provider.complete(second(way.model, own))
    async for _ in provider.stream(second(way.model, own)):
        pass
    assert way.direct is not None
    direct = way.direct()
    request = second(f"{direct.name}/{bare}", direct.name)
    more = {"include": ["reasoning.encrypted_content"]} if name == "azure-responses" else {}
    changed = {"bedrock": invoked, "vertex-claude": in_the_path}.get(name, dict)
    expected = [changed(json.loads(direct._encode(request, stream=stream).content)) | more for stream in (False, True)]
    await provider.close()

    assert expected == [one.json for one in server.asked_for[-2:]]


# --- who is not let in --------------------------------------------------------------------------------------------------


class Changing(httpx2.AsyncHTTPTransport):
    """A way on which somebody changes the body of a request."""

    async def handle_async_request(self, request: Any) -> Any:
        content = request.content.replace(b"What is 2", b"What is 3")
        changed = httpx2.Request(request.method, request.url, headers=request.headers, content=content)
        return await super().handle_async_request(changed)


BAD = {
    "another secret": ({"secret_key": "x" * 40}, "InvalidSignatureException"),
    "another key": ({"access_key": "AKIAANOTHERANOTHER00"}, "UnrecognizedClientException"),
    "another region": ({"region": "eu-west-1"}, "InvalidSignatureException"),
    "an old session": ({"session_token": "an-expired-token-0123456789"}, "ExpiredTokenException"),
    "a changed body": ({"transport": Changing}, "InvalidSignatureException"),
    "a late request": ({}, "Signature expired"),
}


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("reliability:MP03", "ecosystem:EC60")
@pytest.mark.parametrize("what", BAD)
async def test_a_wrong_signature_is_refused_with_the_source_of_credentials(what, server):
    change, word = BAD[what]
    options = {name: value() if value is Changing else value for name, value in change.items()}
    if what == "a late request":
        server.now = lambda: datetime.now(UTC) + timedelta(minutes=16)
    provider = BedrockProvider(base_url=server.url, **{"region": REGION, **KEYS, **options})
    with pytest.raises(ModelError, match=word) as caught:
        await provider.complete(asked(WAYS["bedrock"].model))
    await provider.close()

    assert (403, False) == (caught.value.status, caught.value.retryable)
    assert "with the access key passed as access_key=" in str(caught.value)
    assert SECRET_KEY not in str(caught.value)
    assert [] == server.asked_for


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("providers:PV93")
async def test_one_token_serves_both_wires_until_it_expires(server, account):
    model = f"vertex/{SONNET}"
    credentials = Credentials.from_service_account_info(account, scopes=[SCOPE])
    provider = VertexProvider(None, "us-east5", credentials, base_url=server.url)
    await provider.complete(asked(model))
    await provider.complete(asked("vertex/gemini-2.5-flash"))
    assert 1 == server.given

    server.tokens.clear()
    with pytest.raises(ModelError, match="invalid authentication credentials") as caught:
        await provider.complete(asked(model))
    assert (401, False) == (caught.value.status, caught.value.retryable)
    assert "the credentials passed as credentials=" in str(caught.value)

    credentials.expiry = datetime.now(UTC).replace(tzinfo=None) - timedelta(seconds=1)
    await provider.complete(asked(model))
    await provider.close()

    assert 2 == server.given


@pytest.mark.spec("providers:PV93")
async def test_signing_with_another_key_gets_no_token(server, account, another_key):
    account["private_key"] = pem(another_key)
    provider = vertex(server, account)
    with pytest.raises(MissingKey, match="Invalid JWT") as caught:
        await provider.complete(asked("vertex/gemini-2.5-pro"))
    await provider.close()

    assert ("credentials", False) == (caught.value.kind, caught.value.retryable)
    assert [] == server.asked_for


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("providers:PV96", "providers:PV97")
@pytest.mark.parametrize("name", ["azure-entra", "azure-responses-entra", "foundry-entra"])
async def test_an_expired_token_is_refused_and_a_failing_source_named(name, server, account):
    way = WAYS[name]
    tokens = ["an-old-token-of-entra-0123456789", ENTRA]
    provider = way.make(server, account, token_provider=lambda: tokens.pop(0))
    with pytest.raises(ModelError, match="wrong key or token") as caught:
        await provider.complete(asked(way.model))
    assert 401 == caught.value.status
    assert "The request was sent with an Entra ID token" in str(caught.value)
    assert "It is five." == (await provider.complete(asked(way.model))).text

    with pytest.raises(MissingKey, match="pop from empty list") as empty:
        await provider.complete(asked(way.model))
    await provider.close()

    assert "credentials" == empty.value.kind


@pytest.mark.spec("providers:PV96")
@pytest.mark.parametrize(("make", "by_token"), [(chat, False), (chat, True), (responses, True)])
async def test_the_dated_api_of_azure_takes_keys_and_tokens_too(make, by_token, server, account, monkeypatch):
    monkeypatch.setenv("OPENAI_API_VERSION", "2025-04-01-preview")
    provider = make(server, account, **({"token_provider": entra} if by_token else {"api_key": AZURE_KEY}))
    reply = await provider.complete(asked(f"{provider.name}/my-deployment"))
    await provider.close()

    assert "It is five." == reply.text
    (one,) = server.asked_for
    place = "deployments/my-deployment/chat/completions" if make is chat else "responses"
    assert f"/openai/{place}?api-version=2025-04-01-preview" == one.path
    expected = (f"Bearer {ENTRA}", None) if by_token else (None, AZURE_KEY)
    assert expected == (one.headers.get("authorization"), one.headers.get("api-key"))


# --- failures -------------------------------------------------------------------------------------------------------------


def google_error(status: int, kind: str, why: str, **headers: str) -> Answer:
    return json_answer(
        json.dumps({"error": {"code": status, "status": kind, "message": why}}).encode(), status, **headers
    )


def azure_error(status: int, kind: str, why: str, **headers: str) -> Answer:
    return json_answer(json.dumps({"error": {"code": kind, "message": why}}).encode(), status, **headers)


FAILURES = {
    "throttled": [
        ("bedrock", aws_error(429, "ThrottlingException", "Too many requests, please wait.", retry_after="3")),
        ("converse-key", aws_error(429, "ModelNotReadyException", "The model is not ready.", retry_after="3")),
        ("vertex-gemini", google_error(429, "RESOURCE_EXHAUSTED", "Quota exceeded.", retry_after="3")),
        ("azure", azure_error(429, "429", "Requests have exceeded call rate limit.", retry_after="3")),
    ],
    "denied": [
        ("converse", aws_error(403, "AccessDeniedException", "You don't have access to the model with that ID.")),
        ("vertex-claude", google_error(403, "PERMISSION_DENIED", "Permission denied.")),
        ("azure-responses", azure_error(403, "PermissionDenied", "The principal lacks the data action.")),
    ],
    "no model": [
        ("bedrock", aws_error(400, "ValidationException", "The provided model identifier is invalid.")),
        ("vertex-gemini", google_error(404, "NOT_FOUND", "Publisher Model was not found.")),
        ("azure", azure_error(404, "DeploymentNotFound", "The API deployment does not exist.")),
    ],
    "too long": [
        ("converse", aws_error(400, "ValidationException", "Input is too long for requested model.")),
        ("vertex-claude", google_error(400, "INVALID_ARGUMENT", "prompt is too long: 3 tokens > 2 maximum")),
        ("azure", azure_error(400, "context_length_exceeded", "This model's maximum context length is 2 tokens.")),
    ],
}


@pytest.mark.spec("providers:PV82", "reliability:MP05", "providers:PV136", "reliability:MP22")
@pytest.mark.parametrize(
    ("what", "row"),
    [pytest.param(what, row, id=f"{what}-{row[0]}") for what, rows in FAILURES.items() for row in rows],
)
async def test_a_refusal_of_a_cloud_is_a_typed_error(what, row, server, account):
    name, answer = row
    way = WAYS[name]
    server.refusals.append(answer)
    provider = way.make(server, account)
    with pytest.raises(ModelError) as caught:
        await provider.complete(asked(way.model))
    await provider.close()

    error = caught.value
    assert error.status == answer.status
    assert (what == "throttled") == error.retryable
    assert (3.0 if what == "throttled" else None) == error.retry_after
    assert (what == "too long") == isinstance(error, ContextOverflow)


# --- Bedrock's streams ----------------------------------------------------------------------------------------------------


EVENTS = anthropic_stream("It is five.", [], "end_turn")


def spoiled(answer: Answer, change: Callable[[bytes], bytes]) -> Answer:
    """The stream with its third message changed."""
    items = list(answer.items)
    return attrs.evolve(answer, items=(*items[:2], change(items[2]), *items[3:]))


async def streamed(server: CloudServer, answer: Answer) -> Any:
    server.refusals.append(answer)
    provider = signed(server, None)
    try:
        return [delta async for delta in provider.stream(asked(WAYS["bedrock"].model))][-1].reply
    finally:
        await provider.close()


@pytest.mark.spec("providers:PV91")
@pytest.mark.parametrize("size", [1, 7, 100_000])
async def test_bedrock_s_stream_is_read_however_it_is_cut(size, server):
    body = b"".join([item for item in aws_stream(*EVENTS).items if isinstance(item, bytes)])
    unknown = cloud.message(b"{}", event_type="somethingNew", message_type="event")
    body = unknown + body
    cut = [body[start : start + size] for start in range(0, len(body), size)]
    reply = await streamed(server, Answer((*cut, "fin"), content_type=cloud.AWS_STREAM))

    assert "It is five." == reply.text
    assert 12 == reply.usage.output_tokens


@pytest.mark.spec("providers:PV91", "reliability:MP20")
@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (lambda data: data[:-1] + bytes([data[-1] ^ 1]), "protocol"),
        (lambda data: data[:30] + bytes([data[30] ^ 1]) + data[31:], "protocol"),
        (lambda data: b"\x7f" + data[1:], "protocol"),
        (lambda data: data[:2] + bytes([data[2] ^ 0x10]) + data[3:], "protocol"),
        (lambda data: b"data: {}\n\n" * 4, "protocol"),
    ],
    ids=["end", "middle", "no length", "another length", "text"],
)
async def test_a_corrupted_message_of_a_bedrock_stream_is_refused(change, kind, server):
    with pytest.raises(ModelError, match="event stream") as caught:
        await streamed(server, spoiled(aws_stream(*EVENTS), change))

    assert (kind, True) == (caught.value.kind, caught.value.retryable)


@pytest.mark.spec("providers:PV91", "reliability:MP20")
async def test_a_bedrock_stream_without_its_last_message_is_truncated(server):
    whole = aws_stream(*EVENTS)
    last = whole.items[-2]
    with pytest.raises(TruncatedReply):
        await streamed(server, attrs.evolve(whole, items=(*whole.items[:-2], last[: len(last) // 2], "fin")))


# --- Bedrock's Converse, and AWS's own program before the same server ------------------------------------------------------


def with_bytes(value: Any) -> Any:
    """A body as boto3 takes it."""
    if isinstance(value, dict):
        return {name: base64.b64decode(one) if name == "bytes" else with_bytes(one) for name, one in value.items()}
    return [with_bytes(one) for one in value] if isinstance(value, list) else value


def boto(server: CloudServer) -> Any:
    return boto3.client(
        "bedrock-runtime",
        endpoint_url=server.url,
        region_name=REGION,
        aws_access_key_id=ACCESS_KEY,
        aws_secret_access_key=SECRET_KEY,
        config=Config(retries={"max_attempts": 0}),
    )


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("providers:PV131", "providers:PV133")
async def test_boto3_sends_and_reads_the_same_as_we_do(server):
    """The same body from both, in one piece and as a stream: path, JSON and reply are equal; the server checks both signatures."""
    model, png = "us.amazon.nova-pro-v1:0", ImagePart(data=PNG, mime_type="image/png")
    pdf = DocumentPart(data=PDF, name="report.pdf")
    call = ToolCallPart("c1", "add", {"a": 2, "b": 3})
    history = [
        UserMessage([TextPart("See."), png, pdf]),
        AssistantMessage([call]),
        ToolMessage("c1", "add", ["5", png]),
    ]
    request = asked(f"bedrock/{model}", *history, stop_sequences=("x",), temperature=0.5)
    provider = signed(server, None, headers={"x-amz-of-tomorrow": "yes"})
    whole = await provider.complete(request)
    streamed = [delta async for delta in provider.stream(request)][-1].reply
    await provider.close()
    ours = list(server.asked_for)

    def theirs() -> tuple[Any, list[Any]]:
        client = boto(server)
        given = with_bytes(ours[0].json)
        reply = client.converse(modelId=model, **given)
        events = list(client.converse_stream(modelId=model, **given)["stream"])
        client.close()
        return reply, events

    reply, events = await asyncio.to_thread(theirs)

    assert ["yes", "yes"] == [one.headers["x-amz-of-tomorrow"] for one in ours]
    assert [one.json for one in ours] == [one.json for one in server.asked_for[2:]]
    assert [one.path for one in ours] == [unquote(one.path) for one in server.asked_for[2:]]
    assert whole == streamed
    text, tool = reply["output"]["message"]["content"]
    ((called,),) = [whole.tool_calls]
    assert (text["text"], tool["toolUse"]["input"]) == (whole.text, dict(called.input))
    assert tool["toolUse"]["toolUseId"] == called.provider_data["id"]
    assert reply["usage"]["outputTokens"] == whole.usage.output_tokens
    deltas = [event["contentBlockDelta"]["delta"] for event in events if "contentBlockDelta" in event]
    assert whole.text == "".join([delta.get("text", "") for delta in deltas])
    assert json.loads("".join([delta["toolUse"]["input"] for delta in deltas if "toolUse" in delta])) == called.input


@pytest.mark.spec("providers:PV136")
async def test_tokens_are_counted_only_for_claude_under_its_bare_name(server):
    provider = signed(server, None, name="bedrock_converse", endpoint="converse")
    counted = [
        await provider.count_tokens(asked(f"bedrock_converse/us.{model}"))
        for model in (f"anthropic.{SONNET}", "amazon.nova-pro-v1:0")
    ]
    await provider.close()

    assert [7, None] == counted
    (one,) = server.asked_for
    assert f"/model/anthropic.{SONNET}/count-tokens" == one.path
    assert {"messages", "toolConfig", "system"} == set(one.json["input"]["converse"])


# --- what the environment says --------------------------------------------------------------------------------------------


@pytest.fixture
def nothing(monkeypatch, tmp_path):
    """A machine on which no cloud was ever heard of."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    return monkeypatch


@pytest.mark.spec("providers:PV90", "providers:PV93", "providers:PV96", "requirements:G23")
@pytest.mark.parametrize(
    ("model", "words"),
    [
        (f"bedrock/anthropic.{SONNET}", "AWS_REGION"),
        ("bedrock/openai.gpt-5.4", "AWS_BEARER_TOKEN_BEDROCK"),
        ("vertex/gemini-2.5-pro", "GOOGLE_CLOUD_PROJECT"),
        (f"vertex/{SONNET}", "GOOGLE_APPLICATION_CREDENTIALS"),
        (f"foundry/{SONNET}", "ANTHROPIC_FOUNDRY_API_KEY"),
        ("azure/gpt-4o", "AZURE_OPENAI_API_KEY"),
    ],
)
def test_a_run_without_cloud_credentials_is_refused_before_it_starts(model, words, nothing):
    with pytest.raises(MissingKey, match=words):
        Models.standard().check(model)


@pytest.mark.spec("providers:PV90", "requirements:G23", "ecosystem:EC48")
def test_a_missing_setting_is_named_with_a_valid_example(nothing, monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
    with pytest.raises(ModelError, match=r"has no region: set AWS_REGION, such as AWS_REGION=us-east-1") as region:
        Models.standard().check(f"bedrock/anthropic.{SONNET}")
    with pytest.raises(ModelError, match="pass both access_key= and secret_key="):
        BedrockProvider(access_key=ACCESS_KEY)
    with pytest.raises(ModelError, match=r"has no project: set GOOGLE_CLOUD_PROJECT") as project:
        VertexProvider(credentials="a-token-0123456789").check("vertex/gemini-2.5-pro")
    monkeypatch.setenv("ANTHROPIC_FOUNDRY_API_KEY", AZURE_KEY)
    with pytest.raises(ModelError, match=r"pass base_url= or set ANTHROPIC_FOUNDRY_BASE_URL") as address:
        Models.standard().check(f"foundry/{SONNET}")

    assert ["missing_region", "missing_project", "missing_base_url"] == [
        one.value.kind for one in (region, project, address)
    ]


@pytest.mark.spec("providers:PV90", "providers:PV96")
@pytest.mark.parametrize(
    ("model", "brought", "variables"),
    [
        (f"bedrock/anthropic.{SONNET}", ("boto3", "bedrock"), {"AWS_REGION": REGION}),
        (
            "azure/gpt-4o",
            ("azure-identity", "azure"),
            {"AZURE_CLIENT_ID": "x", "AZURE_OPENAI_ENDPOINT": "https://r.openai.azure.com"},
        ),
        (f"foundry/{SONNET}", ("azure-identity", "azure"), {"AZURE_TENANT_ID": "x", "ANTHROPIC_FOUNDRY_RESOURCE": "r"}),
    ],
)
def test_a_missing_extra_is_named_when_its_cloud_is_configured(model, brought, variables, nothing, monkeypatch):
    monkeypatch.setattr("stepengine.models._cloud_auth.find_spec", lambda name: None)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    package, extra = brought
    words = rf"needs the package '{package}', which is not installed: pip install 'stepengine\[{extra}\]'"
    with pytest.raises(ModelError, match=words) as caught:
        Models.standard().check(model)

    assert "missing_sdk" == caught.value.kind


@pytest.mark.spec("providers:PV90", "providers:PV91", "reliability:SC12")
async def test_aws_credentials_of_the_environment_sign_for_trusted_hosts_only(server, nothing, monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
    monkeypatch.setenv("AWS_SESSION_TOKEN", SESSION_TOKEN)
    monkeypatch.setenv("AWS_DEFAULT_REGION", REGION)
    monkeypatch.setenv("ANTHROPIC_BEDROCK_BASE_URL", server.url)
    model = WAYS["bedrock"].model
    with pytest.raises(MissingKey, match=r"trust the host with STEPENGINE_KEY_HOSTS=127\.0\.0\.1"):
        Models.standard().check(model)
    monkeypatch.setenv("STEPENGINE_KEY_HOSTS", "127.0.0.1")
    models = Models.standard()
    reply = await models.provider_for(model).complete(asked(model))
    await models.close()

    assert "It is five." == reply.text
    assert SESSION_TOKEN == server.asked_for[0].headers["x-amz-security-token"]
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x" * 40)
    later = Models.standard()
    with pytest.raises(ModelError, match="InvalidSignatureException"):
        await later.provider_for(model).complete(asked(model))
    await later.close()


@pytest.mark.spec("providers:PV90", "providers:PV92")
@pytest.mark.parametrize("name", ["bedrock", "converse"])
async def test_a_profile_gives_region_and_credentials(name, server, nothing, monkeypatch, tmp_path):
    folder = tmp_path / ".aws"
    folder.mkdir()
    (folder / "config").write_text(f"[profile mine]\nregion = {REGION}\n")
    (folder / "credentials").write_text(
        f"[mine]\naws_access_key_id = {ACCESS_KEY}\naws_secret_access_key = {SECRET_KEY}\n"
    )
    way = WAYS[name]
    provider = BedrockProvider(base_url=server.url, profile="mine")
    reply = await provider.complete(asked(way.model))
    await provider.close()
    lost = BedrockProvider(base_url=server.url, profile="another", region=REGION)
    with pytest.raises(MissingKey, match="another") as caught:
        await lost.complete(asked(way.model))
    await lost.close()

    assert "It is five." == reply.text
    assert "credentials" == caught.value.kind


@pytest.mark.spec("providers:PV90", "providers:PV91", "providers:PV92")
@pytest.mark.parametrize("name", ["bedrock", "bedrock-openai"])
async def test_missing_aws_credentials_are_reported_at_the_first_request(name, server, nothing):
    provider = BedrockProvider(base_url=server.url, region="eu-north-1")
    nothing.setenv("STEPENGINE_KEY_HOSTS", "127.0.0.1")
    with pytest.raises(MissingKey, match=r"has no usable credentials.*Requests went to eu-north-1") as caught:
        await provider.complete(asked(WAYS[name].model))
    await provider.close()

    assert ("credentials", False) == (caught.value.kind, caught.value.retryable)
    assert [] == server.asked_for


@pytest.mark.spec("providers:PV93")
async def test_a_service_account_file_is_found_with_its_project(server, account, nothing, monkeypatch, tmp_path):
    file = tmp_path / "account.json"
    file.write_text(json.dumps(account))
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(file))
    monkeypatch.setenv("GOOGLE_VERTEX_BASE_URL", server.url)
    monkeypatch.setenv("ANTHROPIC_VERTEX_BASE_URL", f"{server.url}/v1")
    monkeypatch.setenv("STEPENGINE_KEY_HOSTS", "127.0.0.1")
    models = Models.standard()
    for model in ("vertex/gemini-2.5-pro", f"vertex/{SONNET}"):
        models.check(model)
        assert "It is five." == (await models.provider_for(model).complete(asked(model))).text
    await models.close()

    assert [True, True] == [f"/projects/{PROJECT}/locations/global/" in one.path for one in server.asked_for]
    assert 1 == server.given


@pytest.mark.spec("providers:PV93")
def test_explicit_project_and_location_win_over_the_environment(monkeypatch):
    for name in ("GOOGLE_CLOUD_PROJECT", "GOOGLE_CLOUD_LOCATION", "CLOUD_ML_REGION"):
        monkeypatch.setenv(name, name.lower().replace("_", "-"))
    found = {}
    for given in (("mine", "eu"), (None, None)):
        provider = VertexProvider(*given, credentials="a-token-0123456789")
        wires = provider._get_prefixed_provider("vertex/claude-x"), provider._get_prefixed_provider("vertex/gemini-x")
        found[given] = [
            wires[0]._make_request_path("claude-x", stream=False),
            *[wire.settings().base_url for wire in wires],
        ]

    assert [
        "/projects/mine/locations/eu/publishers/anthropic/models/claude-x:rawPredict",
        "https://aiplatform.eu.rep.googleapis.com/v1",
        "https://aiplatform.eu.rep.googleapis.com",
    ] == found["mine", "eu"]
    assert [
        "/projects/google-cloud-project/locations/cloud-ml-region/publishers/anthropic/models/claude-x:rawPredict",
        "https://cloud-ml-region-aiplatform.googleapis.com/v1",
        "https://google-cloud-location-aiplatform.googleapis.com",
    ] == found[None, None]


@pytest.mark.spec("providers:PV93")
async def test_missing_google_credentials_are_reported_at_the_first_request(nothing, monkeypatch, tmp_path):
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "nowhere.json"))
    models = Models.standard()
    with pytest.raises(MissingKey, match=r"nowhere\.json was not found.*Look at GOOGLE_APPLICATION_CREDENTIALS"):
        await models.provider_for("vertex/gemini-2.5-pro").complete(asked("vertex/gemini-2.5-pro"))
    await models.close()


@pytest.mark.spec("providers:PV96")
@pytest.mark.parametrize("model", ["azure/gpt-4o", "azure_responses/gpt-5"])
async def test_a_token_in_the_environment_wins_over_a_key(model, server, monkeypatch):
    monkeypatch.setenv("AZURE_OPENAI_ENDPOINT", server.url)
    monkeypatch.setenv("AZURE_OPENAI_API_KEY", AZURE_KEY)
    monkeypatch.setenv("AZURE_OPENAI_AD_TOKEN", ENTRA)
    models = Models.standard()
    models.check(model)
    await models.provider_for(model).complete(asked(model))
    await models.close()

    assert f"Bearer {ENTRA}" == server.asked_for[0].headers["authorization"]


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("providers:PV96")
async def test_azure_identity_provides_entra_tokens_where_configured(server, nothing, monkeypatch):
    """The source is Microsoft's own; only the credentials behind it are ours, since theirs speak to TLS hosts alone."""
    import azure.identity
    from azure.core.credentials import AccessToken

    scopes: list[str] = []

    class Principal:
        def get_token(self, *wanted: str, **_: Any) -> AccessToken:
            scopes.extend(wanted)
            return AccessToken(ENTRA, 4_000_000_000)

    monkeypatch.setattr(azure.identity, "DefaultAzureCredential", Principal)
    monkeypatch.setenv("AZURE_CLIENT_ID", "a-principal")
    monkeypatch.setenv("AZURE_OPENAI_ENDPOINT", server.url)
    models = Models.standard()
    for model in ("azure/gpt-4o", "azure_responses/gpt-5"):
        models.check(model)
        await models.provider_for(model).complete(asked(model))
    await models.close()

    assert {"https://ai.azure.com/.default"} == set(scopes)


# --- what a cloud cannot do -----------------------------------------------------------------------------------------------


def encoded(provider: Provider, request: ModelRequest) -> dict[str, Any]:
    """The body that goes out, taken before it is signed."""
    wire = provider._get_prefixed_provider(request.model) if hasattr(provider, "_get_prefixed_provider") else provider
    return json.loads(wire._encode(request, stream=False).content)


@pytest.mark.spec("providers:PV90", "providers:PV91", "providers:PV93", "providers:PV97", "providers:PV65")
@pytest.mark.parametrize("name", ["bedrock", "foundry"])
async def test_clouds_drop_and_report_the_fast_mode_of_claude(name, server, account):
    way = WAYS[name]
    provider = way.make(server, account)
    model = way.model.replace("sonnet-4-5", "opus-4-8")
    reply = await provider.complete(asked(model, service_tier="fast"))
    with pytest.raises(ModelError, match="does not support service_tier="):
        await provider.complete(asked(model, service_tier="fast", unsupported="error"))
    await provider.close()

    assert ("service_tier",) == tuple(reply.provider_data["dropped"])
    assert "speed" not in server.asked_for[0].json
    assert "fast-mode" not in server.asked_for[0].headers.get("anthropic-beta", "")


@pytest.mark.spec("providers:PV91")
async def test_only_the_bedrock_runtime_endpoint_refuses_to_open_pages(server):
    for tool_ in (WebSearch(), UrlContext()):
        with pytest.raises(ModelError, match=r"it cannot open web pages at Amazon Bedrock") as caught:
            encoded(signed(server, None), asked(WAYS["bedrock"].model, server_tools=[tool_]))
        assert "settings" == caught.value.kind
        mantle = signed(server, None, endpoint="mantle")
        assert 2 == len(encoded(mantle, asked(WAYS["mantle"].model, server_tools=[tool_]))["tools"])


@pytest.mark.spec("providers:PV88", "providers:PV91")
async def test_our_tool_search_replaces_the_missing_one_of_bedrock(server):
    hidden = attrs.evolve(TOOLS[0], name="rarely", defer_loading=True)
    found = {}
    for name in ("bedrock", "mantle"):
        provider = WAYS[name].make(server, None)
        request = attrs.evolve(asked(WAYS[name].model), tools=(*TOOLS, FIND, hidden))
        found[name] = [tool["name"] for tool in encoded(provider, request)["tools"]]

    assert ["add", FIND.name] == found["bedrock"]
    assert ["add", "rarely", "tool_search_tool_bm25"] == sorted(found["mantle"])


@pytest.mark.spec("providers:PV41", "providers:PV60", "providers:PV93")
async def test_features_missing_on_vertex_are_refused_or_dropped(server, account):
    provider = vertex(server, account)
    model = "vertex/gemini-3-pro-preview"
    with pytest.raises(ModelError, match=r"on Vertex AI it cannot be combined with"):
        encoded(provider, asked(model, server_tools=[WebSearch()]))
    alone = attrs.evolve(asked(model, server_tools=[WebSearch()]), tools=())
    with pytest.raises(ModelError, match="FileSearch"):
        encoded(provider, attrs.evolve(alone, settings=ModelSettings(server_tools=[FileSearch(stores=["a"])])))
    body = encoded(provider, alone)

    assert [{"googleSearch": {}}] == body["tools"]
    assert "toolConfig" not in body
    assert "store" not in encoded(provider, asked(model, store=True))
    assert ("store",) == provider._get_prefixed_provider(model)._list_unsupported_settings(asked(model, store=True))


@pytest.mark.spec("providers:PV91", "providers:PV93", "providers:PV96", "providers:PV53")
@pytest.mark.parametrize("name", ["bedrock", "vertex-claude", "vertex-gemini", "foundry", "azure"])
async def test_a_cloud_refuses_files_and_batches_before_any_request(name, server, account):
    way = WAYS[name]
    provider = way.make(server, account)
    held = DocumentPart(file_id="file_1", provider="anthropic", mime_type="application/pdf")
    with pytest.raises(ModelError) as part:
        await provider.complete(asked(way.model, UserMessage([TextPart("Read."), held])))
    with pytest.raises(ModelError, match="stores no files") as upload:
        await provider.upload(PDF, mime_type="application/pdf")
    with pytest.raises(ModelError, match="stores no files"):
        await provider.delete_file("file_1")
    with pytest.raises(ModelError, match="does not support batches"):
        provider.encode_batch_member(asked(way.model))
    await provider.close()

    assert ["unsupported_part"] * 2 == [part.value.kind, upload.value.kind]
    assert [] == server.asked_for


@pytest.mark.spec("providers:PV66", "providers:PV91", "providers:PV93")
@pytest.mark.parametrize("name", ["bedrock", "vertex-claude"])
async def test_the_cache_mark_is_at_the_last_block_and_optional(name, server, account):
    way = WAYS[name]
    provider = way.make(server, account)
    result = ToolMessage("t1", "add", [TextPart("5"), ImagePart(data=PNG, mime_type="image/png")])
    call = AssistantMessage([ToolCallPart("t1", "add", {"a": 2, "b": 3})])
    request = asked(way.model, UserMessage("What?"), call, result)
    marked = encoded(provider, attrs.evolve(request, settings=ModelSettings(cache="1h")))
    off = encoded(provider, attrs.evolve(request, settings=ModelSettings(cache="off")))
    paused = encoded(provider, attrs.evolve(request, tail=[AssistantMessage("I go on")]))

    last = marked["messages"][-1]["content"][-1]
    assert ("tool_result", {"type": "ephemeral", "ttl": "1h"}) == (last["type"], last["cache_control"])
    assert 3 == json.dumps(marked).count("cache_control")
    assert 0 == json.dumps(off).count("cache_control")
    assert "cache_control" not in json.dumps(paused["messages"])


@pytest.mark.spec("providers:PV94")
@pytest.mark.parametrize(
    ("make", "home"),
    [
        (on_aws, f"https://aws-external-anthropic.{REGION}.api.aws/"),
        (
            on_google,
            f"https://claude.googleapis.com/v1/projects/{PROJECT}/locations/global/workspaces/{WORKSPACE}/invoke/",
        ),
    ],
)
async def test_the_platform_has_the_address_and_api_of_the_sdk(make, home, server, account):
    provider = make(server, account, base_url=None)
    request = asked(f"{provider.name}/claude-opus-4-6", service_tier="fast")
    if make is on_google:
        await provider._google.load_credentials_if_missing(request.model)
    async with httpx2.AsyncClient() as http_client:
        client = provider._make_client(*provider._resolve_credentials_and_url(), http_client)
    await provider.close()

    assert home == f"{str(client.base_url).rstrip('/')}/"
    assert WORKSPACE == client.workspace_id
    assert provider.encode_batch_member(asked(request.model)).content is not None
    assert () == provider._list_unsupported_settings(request)
    assert "anthropic" == provider_list(provider.name)


def provider_list(name: str) -> str:
    from stepengine.models._price_book import PRICE_LISTS

    return PRICE_LISTS[name]


@pytest.mark.spec("providers:PV94")
async def test_files_of_the_platform_are_uploaded_where_its_messages_go(server, account):
    for make in (on_aws, on_google):
        provider = make(server, account)
        server.refusals.append(json_answer(b'{"id": "file_1", "type": "file", "filename": "a", "mime_type": "a/b"}'))
        assert "file_1" == await provider.upload(b"x", mime_type="text/plain", name="a.txt")
        await provider.close()

    paths = [one.path for one in server.asked_for]
    assert ["/v1/files", f"/v1/projects/{PROJECT}/locations/global/workspaces/{WORKSPACE}/invoke/v1/files"] == [
        path.partition("?")[0] for path in paths
    ]


@pytest.mark.spec("providers:PV94")
@pytest.mark.parametrize("name", ["anthropic_aws", "anthropic_google"])
def test_missing_platform_credentials_or_workspace_are_named(name, nothing, monkeypatch):
    models = Models.standard()
    with pytest.raises(MissingKey, match=r"ANTHROPIC_AWS_API_KEY|GOOGLE_CLOUD_PROJECT"):
        models.check(f"{name}/{SONNET}")
    monkeypatch.setenv("AWS_REGION", REGION)
    monkeypatch.setenv("ANTHROPIC_AWS_API_KEY", PLATFORM_KEY)
    monkeypatch.setenv("ANTHROPIC_GOOGLE_CLOUD_PROJECT", PROJECT)
    with pytest.raises(
        ModelError, match=rf"'{name}' has no workspace: set ANTHROPIC_\w+_WORKSPACE_ID, or pass"
    ) as missing:
        models.check(f"{name}/{SONNET}")
    assert "missing_workspace" == missing.value.kind
    monkeypatch.setenv("ANTHROPIC_AWS_WORKSPACE_ID", WORKSPACE)
    monkeypatch.setenv("ANTHROPIC_GOOGLE_CLOUD_WORKSPACE_ID", WORKSPACE)
    models.check(f"{name}/{SONNET}")


@pytest.mark.spec("providers:PV91", "ecosystem:EC98")
async def test_betas_stand_in_the_body_where_bedrock_wants_them(server):
    provider = signed(server, None, headers={"anthropic-beta": "mine-2026-01-01"})
    model = "bedrock/us.anthropic.claude-fable-5-1-v1:0"
    body = encoded(
        provider, asked(model, thinking=Thinking(effort="low"), extra={"headers": {"anthropic-beta": "other"}})
    )

    assert ["mine-2026-01-01", "thinking-binding-controls-2026-08-01", "other"] == body["anthropic_beta"]
    assert "block_binding" in body["thinking"]
    assert "anthropic_beta" not in encoded(signed(server, None), asked(WAYS["bedrock"].model))


@pytest.mark.spec("providers:PV91", "providers:PV93")
@pytest.mark.parametrize(
    ("name", "count"), [("bedrock", None), ("vertex-claude", 7), ("vertex-gemini", 7), ("mantle", 7)]
)
async def test_tokens_are_counted_where_the_cloud_counts_them(name, count, server, account):
    way = WAYS[name]
    provider = way.make(server, account)
    assert count == await provider.count_tokens(asked(way.model))
    assert await provider.describe(way.model) is None
    await provider.close()


# --- the SDKs' own way ----------------------------------------------------------------------------------------------------


@pytest.mark.spec("providers:PV91", "providers:PV93", "providers:PV109")
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("bedrock", f"us.anthropic.{SONNET}-v1:0"),
        ("bedrock", "arn:aws:bedrock:us-east-1:1:inference-profile/us.anthropic.claude-sonnet-5"),
        ("vertex-claude", "claude-opus-4-1@20250805"),
    ],
)
async def test_path_and_body_equal_those_of_the_sdk(name, model, stream, server, account):
    """What the SDK's client does with a body of its own form, its deep copies aside; only the mark of the cache is ours."""
    provider = WAYS[name].make(server, account)
    request = asked(f"{name.partition('-')[0]}/{model}", cache="off")
    wire = provider._get_prefixed_provider(request.model)
    if name == "vertex-claude":
        await wire._google.load_credentials_if_missing(request.model)
    ours = wire._encode(request, stream=stream)
    direct = AnthropicProvider("k" * 20)._encode(attrs.evolve(request, model=f"anthropic/{model}"), stream=stream)
    caught: list[httpx2.Request] = []

    def catch(sent: httpx2.Request) -> httpx2.Response:
        caught.append(sent)
        return httpx2.Response(200, json={})

    async with httpx2.AsyncClient(transport=httpx2.MockTransport(catch)) as http_client:
        credentials, url = wire._resolve_credentials_and_url()
        client = wire._make_client(credentials, url, http_client)
        await client.post("/v1/messages", body=json.loads(direct.content), cast_to=object)
        await client.post(ours.path, content=ours.content, cast_to=object)
    await provider.close()

    theirs, own = caught
    assert theirs.url.raw_path == own.url.raw_path
    assert json.loads(theirs.content) == json.loads(own.content)


# --- prices and the rest --------------------------------------------------------------------------------------------------


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("providers:PV78", "reliability:MP03")
async def test_a_cloud_reply_is_priced_by_the_clouds_own_list(server, account):
    from stepengine.models.pricing import LIST_PRICES

    at, costs = datetime(2026, 11, 1, tzinfo=UTC), {}
    for name in ("bedrock", "vertex-claude", "vertex-gemini", "foundry", "azure", "azure-responses"):
        way = WAYS[name]
        provider = way.make(server, account)
        reply = await provider.complete(asked(way.model))
        costs[name] = LIST_PRICES.price_reply(way.model, reply, at)
        await provider.close()
        if name == "vertex-claude":
            long = {"cache_creation_input_tokens": 1_000, "cache_creation": {"ephemeral_1h_input_tokens": 1_000}}
            usage = {**reply.provider_data["usage"], **long}
            longer = attrs.evolve(reply, provider_data={**reply.provider_data, "usage": usage})
            direct = attrs.evolve(longer, provider_data={**longer.provider_data, "provider": "anthropic"})
            special = [
                LIST_PRICES.price_reply(way.model, longer, at),
                LIST_PRICES.price_reply(f"anthropic/{SONNET}", direct, at),
            ]
    reply = attrs.evolve(reply, model="bedrock/claude-sonnet-5")
    here, everywhere = (
        LIST_PRICES.price_reply(f"bedrock/{place}.anthropic.claude-sonnet-5", reply, at) for place in ("us", "global")
    )

    assert None not in costs.values()
    assert here > everywhere
    assert costs["vertex-claude"] < special[0] == special[1]
    assert LIST_PRICES("azure/my-deployment", Usage(input_tokens=5), at) is None


async def test_cloud_secrets_are_registered_for_redaction(server, account):
    from stepengine.redaction import GIVEN

    provider = vertex(server, account)
    await provider.complete(asked("vertex/gemini-2.5-pro"))
    await provider.close()
    token = next(iter(server.tokens))
    BedrockProvider(secret_key="a-new/secret/key/9876543210", access_key="x", session_token="a-new-session-9876543210")

    assert {token, "a-new/secret/key/9876543210", "a-new-session-9876543210"} <= set(GIVEN.names)


@pytest.mark.spec("providers:PV109")
def test_requests_are_counted_by_the_account_in_the_cloud():
    """Limits that several processes share hold for a key, a profile or a project, and for both wires of a cloud together."""
    first, other = ({"access_key": f"AKIA{n}" * 4, "secret_key": "s" * 40, "region": REGION} for n in (1, 2))
    accounts = [BedrockProvider(**keys).get_account() for keys in (first, first, other)]
    projects = [
        VertexProvider(name, place, "a-token-0123456789").get_account()
        for name, place in (("a", "us"), ("a", "eu"), ("b", "us"))
    ]

    for one, same, another in (accounts, projects):
        assert one == same != another
        assert one
        assert "AKIA" not in one


@pytest.mark.spec("reliability:SC12")
@pytest.mark.parametrize("where", ["argument", "variable"])
def test_entra_credentials_of_the_environment_go_to_their_resource_only(where, nothing, monkeypatch):
    monkeypatch.setenv("AZURE_OPENAI_AD_TOKEN", "a-token-of-the-environment")
    monkeypatch.setenv("ANTHROPIC_FOUNDRY_RESOURCE", "mine")
    elsewhere = "https://elsewhere.test/anthropic"
    if where == "variable":
        monkeypatch.setenv("ANTHROPIC_FOUNDRY_BASE_URL", elsewhere)
    given = {"base_url": elsewhere} if where == "argument" else {}

    with pytest.raises(MissingKey, match=r"the host of 'foundry' is 'elsewhere.test'"):
        FoundryProvider(**given).check(f"foundry/{SONNET}")
    FoundryProvider(token_provider=entra, **given).check(f"foundry/{SONNET}")
    monkeypatch.setenv("STEPENGINE_KEY_HOSTS", "elsewhere.test")
    FoundryProvider(**given).check(f"foundry/{SONNET}")
    monkeypatch.delenv("STEPENGINE_KEY_HOSTS")
    with pytest.raises(MissingKey, match=f"there is {NO_KEY} 'foundry'"):
        FoundryProvider(base_url="http://127.0.0.1:1/anthropic", key_env="NONE").check(f"foundry/{SONNET}")


REGIONAL = {
    f"bedrock/anthropic.{SONNET}": (BedrockProvider, "AWS_REGION", ".amazonaws.com"),
    "bedrock/amazon.nova-pro-v1:0": (BedrockProvider, "AWS_REGION", ".amazonaws.com"),
    "bedrock/openai.gpt-5.4": (BedrockProvider, "AWS_DEFAULT_REGION", ".api.aws"),
    f"anthropic_aws/{SONNET}": (AnthropicAwsProvider, "AWS_REGION", ".api.aws"),
    "vertex/gemini-2.5-pro": (
        partial(VertexProvider, "p", credentials="t" * 20),
        "GOOGLE_CLOUD_LOCATION",
        ".googleapis.com",
    ),
    f"vertex/{SONNET}": (partial(VertexProvider, "p", credentials="t" * 20), "CLOUD_ML_REGION", ".googleapis.com"),
    f"foundry/{SONNET}": (FoundryProvider, "ANTHROPIC_FOUNDRY_RESOURCE", ".services.ai.azure.com"),
}
"""The providers with a variable in their host name, and the end of every host of their cloud."""


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("reliability:SC12", "providers:PV96")
@pytest.mark.parametrize("model", REGIONAL)
@for_any(
    place=st.text(st.characters(codec="ascii", exclude_characters="\0"), min_size=1)
    | st.from_regex(r"[a-z0-9.@:/?#\\-]+", fullmatch=True)
)
@example(place="x.evil.test/")
@example(place="evil.test/")
@example(place="evil.test#")
@example(place="a@evil.test/?")
@limits(max_examples=15, deadline=None)
def test_a_region_never_moves_credentials_to_another_host(model, place):
    make, variable, cloud_of = REGIONAL[model]
    hosts: list[str] = []

    def answer(request: httpx2.Request) -> httpx2.Response:
        hosts.append(request.url.host)
        return httpx2.Response(400, json={"error": {"message": "no"}})

    with pytest.MonkeyPatch.context() as environment:
        for name in ("AWS_BEARER_TOKEN_BEDROCK", "ANTHROPIC_AWS_API_KEY", "ANTHROPIC_FOUNDRY_API_KEY"):
            environment.setenv(name, "k" * 20)
        environment.setenv("ANTHROPIC_AWS_WORKSPACE_ID", WORKSPACE)
        environment.setenv(variable, place)
        with pytest.raises(ModelError) as caught:
            asyncio.run(make(transport=httpx2.MockTransport(answer)).complete(asked(model)))

    assert all(host.endswith(cloud_of) for host in hosts)
    assert hosts or caught.value.kind in {"settings", "missing_region", "missing_base_url"}


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            partial(BedrockProvider, session_token="s" * 20),
            "session_token= without an access key; pass access_key= and secret_key=",
        ),
        (partial(FoundryProvider, AZURE_KEY, token_provider=entra), "was given api_key= and token_provider="),
        (
            partial(BedrockProvider, "k" * 20, access_key=ACCESS_KEY, secret_key=SECRET_KEY),
            "was given api_key= and access_key=; pass only one of them",
        ),
        (
            partial(BedrockProvider, endpoint="bedrock-mantle"),
            "unknown endpoint='bedrock-mantle' .*'runtime', 'mantle' or 'converse'",
        ),
    ],
)
def test_two_kinds_of_credentials_at_once_are_refused(make, words):
    with pytest.raises(ModelError, match=words) as caught:
        make()

    assert "settings" == caught.value.kind
