"""
A loopback cloud that lets nobody in whom the clouds would not let in (providers PV90 to PV97).

It recomputes the signatures of requests to Bedrock by the published rules of Signature Version 4, with code of its own; gives
tokens for Vertex AI to whoever signed the question with the service account's key, and takes only those; takes the keys and
the tokens of Entra ID on Azure and Foundry. A request that is let in is answered by the wire that its path belongs to.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import re
import struct
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import parse_qs, quote
from zlib import crc32

import attrs
import jwt

from tests.faults.scripts import (
    anthropic_reply,
    anthropic_stream,
    chat_reply,
    chat_stream,
    converse_events,
    converse_reply,
    google_reply,
    google_stream,
    responses_reply,
    responses_stream,
)
from tests.faults.server import Answer, FaultServer, json_answer, listening, sse

ACCESS_KEY = "AKIATESTTESTTESTTEST"
SECRET_KEY = "test/secret/of/an/access/key/0123456789"
SESSION_TOKEN = "a-session-token-0123456789"
BEDROCK_KEY = "a-key-of-bedrocks-own-0123456789"
AZURE_KEY = "a-key-of-azure-0123456789"
REGION = "us-east-1"
PROJECT = "test-project"
WORKSPACE = "wrkspc_1"
PLATFORM_KEY = "a-key-of-claude-on-aws-0123456789"
SCOPE = "https://www.googleapis.com/auth/cloud-platform"
AUDIENCE = "https://oauth2.googleapis.com/token"
PATIENCE = timedelta(minutes=5)
SAID = ("It is five.", [("add", '{"a":2,"b":3}')], "tool_use")
AWS_STREAM = "application/vnd.amazon.eventstream"

Json = dict[str, Any]


class Refused(Exception):
    """What the cloud does not let in: the status, the word for it, and why."""

    def __init__(self, status: int, kind: str, why: str) -> None:
        super().__init__(why)
        self.status = status
        self.kind = kind


def need(fine: Any, status: int, kind: str, why: str) -> None:
    if not fine:
        raise Refused(status, kind, why)


@attrs.frozen
class Asked:
    """One request that was let in."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Json:
        return json.loads(self.body)


@attrs.define
class CloudServer(FaultServer):
    """
    The server while it runs.

    Attributes:
        now: What it takes for the time.
        public_key: Of the service account that gets tokens.
        tokens: The tokens for Vertex AI that are in force.
        entra: The tokens of Entra ID that are in force.
        given: How many tokens were given.
        asked_for: The requests that were let in, in order.
        refusals: What the next requests that are let in are answered, before any reply.
        said: Text, calls and reason to stop of every reply.
    """

    now: Callable[[], datetime] = lambda: datetime.now(UTC)
    public_key: str = ""
    tokens: set[str] = attrs.field(factory=set)
    entra: set[str] = attrs.field(factory=set)
    given: int = 0
    asked_for: list[Asked] = attrs.field(factory=list)
    refusals: list[Answer] = attrs.field(factory=list)
    said: tuple[str, list[tuple[str, str]], str] = SAID

    def answer(self, head: bytes, body: bytes) -> Answer:
        first, *lines = head.decode().split("\r\n")
        headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in lines if line)}
        method, path, _ = first.split(" ")
        try:
            if path == "/token":
                return json_answer(json.dumps(self._token(body)).encode())
            kind = self._let_in(method, path, headers, body)
        except Refused as refused:
            return self._refusal(path, refused)
        self.asked_for.append(Asked(method, path, headers, body))
        return self.refusals.pop(0) if self.refusals else self._reply(kind, path, body)

    # --- who is let in --------------------------------------------------------------------------------------------------

    def _let_in(self, method: str, path: str, headers: dict[str, str], body: bytes) -> str:
        """Return which wire answers."""
        authorization = headers.get("authorization", "")
        if "anthropic-workspace-id" in headers:
            wrong = "The workspace is not known."
            need(headers["anthropic-workspace-id"] == WORKSPACE, 403, "AccessDeniedException", wrong)
            if authorization != f"Bearer {PLATFORM_KEY}":
                self._signed(method, path, headers, body, "aws-external-anthropic")
            return "anthropic"
        if path.startswith("/model/") or authorization.startswith("AWS4-"):
            service = "bedrock" if path.startswith("/model/") else "bedrock-mantle"
            if not authorization.startswith("Bearer "):
                self._signed(method, path, headers, body, service)
            else:
                need(authorization == f"Bearer {BEDROCK_KEY}", 403, "AccessDeniedException", "The key is not known.")
            return "bedrock" if service == "bedrock" else "responses" if path.endswith("responses") else "anthropic"
        if "/projects/" in path:
            token = authorization.removeprefix("Bearer ")
            need(token in self.tokens, 401, "UNAUTHENTICATED", "Request had invalid authentication credentials.")
            need(f"/projects/{PROJECT}/" in path, 403, "PERMISSION_DENIED", "Permission denied on the project.")
            if "/workspaces/" in path:
                place = f"/v1/projects/{PROJECT}/locations/global/workspaces/{WORKSPACE}/invoke/v1/"
                need(path.startswith(place), 404, "NOT_FOUND", "No such workspace.")
            return "anthropic" if "/publishers/anthropic/" in path or "/workspaces/" in path else "google"
        keys = {headers[name] for name in ("api-key", "x-api-key") if name in headers}
        bearer = authorization.removeprefix("Bearer ")
        need(
            keys == {AZURE_KEY} or bearer in {AZURE_KEY, *self.entra},
            401,
            "401",
            "Access denied: a wrong key or token.",
        )
        if "/v1/messages" in path:
            return "anthropic"
        return "responses" if path.partition("?")[0].endswith("/responses") else "chat"

    def _signed(self, method: str, path: str, headers: dict[str, str], body: bytes, service: str) -> None:
        """Recompute the signature of a request from what came."""
        scheme, _, rest = headers.get("authorization", "").partition(" ")
        need(scheme == "AWS4-HMAC-SHA256", 403, "MissingAuthenticationTokenException", "Missing Authentication Token")
        fields = dict(part.strip().split("=", 1) for part in rest.split(","))
        access_key, day, region, named, end = fields["Credential"].split("/")
        need(access_key == ACCESS_KEY, 403, "UnrecognizedClientException", "The security token is invalid.")
        wrong = "Credential should be scoped to another service or region."
        need((region, named, end) == (REGION, service, "aws4_request"), 403, "InvalidSignatureException", wrong)
        names = fields["SignedHeaders"].split(";")
        need(
            {"host", *[name for name in headers if name.startswith("x-amz-")]} <= set(names),
            403,
            "InvalidSignatureException",
            "A header must be signed.",
        )
        stamp = headers["x-amz-date"]
        age = self.now() - datetime.strptime(stamp, "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
        need(abs(age) < PATIENCE and stamp[:8] == day, 403, "InvalidSignatureException", "Signature expired")
        token = headers.get("x-amz-security-token")
        need(token in {None, SESSION_TOKEN}, 403, "ExpiredTokenException", "The security token is expired.")
        digest = hashlib.sha256(body).hexdigest()
        need(headers.get("x-amz-content-sha256", digest) == digest, 403, "InvalidSignatureException", "Another body.")
        place, _, query = path.partition("?")
        said = [f"{name}:{' '.join(headers[name].split())}\n" for name in names]
        canonical = "\n".join([method, quote(place, safe="/~"), query, "".join(said), fields["SignedHeaders"], digest])
        scope = f"{day}/{region}/{service}/aws4_request"
        whole = f"AWS4-HMAC-SHA256\n{stamp}\n{scope}\n{hashlib.sha256(canonical.encode()).hexdigest()}"
        key = f"AWS4{SECRET_KEY}".encode()
        for step in (day, region, service, "aws4_request"):
            key = hmac.digest(key, step.encode(), "sha256")
        signature = hmac.new(key, whole.encode(), "sha256").hexdigest()
        why = "The request signature we calculated does not match the signature you provided."
        need(hmac.compare_digest(signature, fields["Signature"]), 403, "InvalidSignatureException", why)

    def _token(self, body: bytes) -> Json:
        """Give a token to whoever signed the question with the service account's key."""
        form = parse_qs(body.decode())
        need(
            form["grant_type"] == ["urn:ietf:params:oauth:grant-type:jwt-bearer"],
            400,
            "invalid_request",
            "Another grant.",
        )
        try:
            claims = jwt.decode(form["assertion"][0], self.public_key, ["RS256"], audience=AUDIENCE)
        except jwt.InvalidTokenError as error:
            raise Refused(400, "invalid_grant", f"Invalid JWT: {error}") from error
        need(claims["scope"] == SCOPE, 400, "invalid_scope", "Another scope.")
        self.given += 1
        token = f"ya29.a-token-of-google-{self.given:08}"
        self.tokens.add(token)
        return {"access_token": token, "expires_in": 3600, "token_type": "Bearer"}

    def _refusal(self, path: str, refused: Refused) -> Answer:
        if path == "/token":
            body: Json = {"error": refused.kind, "error_description": str(refused)}
        elif refused.kind.endswith("Exception"):
            body = {"message": str(refused)}
            return json_answer(json.dumps(body).encode(), refused.status, x_amzn_errortype=refused.kind)
        else:
            body = {"error": {"code": refused.status, "status": refused.kind, "message": str(refused)}}
        return json_answer(json.dumps(body).encode(), refused.status)

    # --- what is said -----------------------------------------------------------------------------------------------------

    def _reply(self, kind: str, path: str, body: bytes) -> Answer:
        text, calls, stop = self.said
        asked = json.loads(body)
        if "count" in path:
            return json_answer(b'{"input_tokens": 7, "totalTokens": 7, "inputTokens": 7}')
        if "/converse" in path:
            if path.endswith("-stream"):
                return converse_stream(*converse_events(text, calls, stop))
            return json_answer(converse_reply(text, calls, stop))
        if kind == "bedrock":
            if not {"model", "stream", "cache_control"}.isdisjoint(asked) or "anthropic_version" not in asked:
                return aws_error(400, "ValidationException", "extraneous key is not permitted")
            if path.endswith("/invoke"):
                return json_answer(anthropic_reply(text, calls, stop))
            return aws_stream(*anthropic_stream(text, calls, stop))
        if "rawPredict" in path.casefold() and ("model" in asked or "cache_control" in asked):
            return json_answer(b'{"error": {"code": 400, "message": "Extra inputs are not permitted"}}', 400)
        streams = {"anthropic": anthropic_stream, "chat": chat_stream, "responses": responses_stream}
        replies = {"anthropic": anthropic_reply, "chat": chat_reply, "responses": responses_reply}
        if kind == "google":
            whole = "alt=sse" not in path
            return (
                json_answer(google_reply(text, calls, stop)) if whole else sse(*google_stream(text, calls, stop), "fin")
            )
        if asked.get("stream"):
            return sse(*streams[kind](text, calls, stop), "fin")
        return json_answer(replies[kind](text, calls, stop))


# --- AWS's own framing ------------------------------------------------------------------------------------------------


def message(payload: bytes, **headers: str) -> bytes:
    """Return one message of an AWS event stream; underscores in header names are dashes, and a colon goes before them."""
    block = b""
    for name, value in headers.items():
        word = f":{name.replace('_', '-')}".encode()
        block += bytes([len(word)]) + word + b"\x07" + struct.pack(">H", len(value)) + value.encode()
    prelude = struct.pack(">II", 16 + len(block) + len(payload), len(block))
    body = prelude + struct.pack(">I", crc32(prelude)) + block + payload
    return body + struct.pack(">I", crc32(body))


def chunk_of(event: bytes) -> bytes:
    """Return an event of Anthropic's stream as Bedrock sends it."""
    data = re.search(rb"^data: (.*)$", event, re.MULTILINE)
    assert data is not None
    payload = json.dumps({"bytes": base64.b64encode(data[1]).decode(), "p": "abcdefgh"}).encode()
    return message(payload, event_type="chunk", content_type="application/json", message_type="event")


def aws_stream(*events: bytes) -> Answer:
    """Return a stream of Bedrock's; its last event repeats the usage, as Bedrock's does."""
    *before, last = [event for event in events if b"event: ping" not in event]
    metrics = b'"amazon-bedrock-invocationMetrics": {"inputTokenCount": 25, "outputTokenCount": 12}}'
    ended = last.rstrip().removesuffix(b"}") + b", " + metrics
    return Answer((*[chunk_of(event) for event in (*before, ended)], "fin"), content_type=AWS_STREAM)


def converse_frames(*events: tuple[str, Json]) -> list[bytes]:
    """Return events of Converse as messages of an AWS event stream."""
    about = {"content_type": "application/json", "message_type": "event"}
    return [message(json.dumps(told).encode(), event_type=name, **about) for name, told in events]


def converse_stream(*events: tuple[str, Json]) -> Answer:
    """Return a stream of Converse."""
    return Answer((*converse_frames(*events), "fin"), content_type=AWS_STREAM)


def aws_error(status: int, kind: str, why: str, **headers: str) -> Answer:
    return json_answer(json.dumps({"message": why}).encode(), status, x_amzn_errortype=f"{kind}:http://x/", **headers)


def cloud_server() -> AbstractAsyncContextManager[CloudServer]:
    """Run the server."""
    return listening(CloudServer("", []))
