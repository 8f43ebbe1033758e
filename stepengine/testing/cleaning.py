"""
Taking secrets out of recorded traffic, and finding those that are left (replay K, reliability SC01-SC03, SC10).

Headers pass by an allow-list, query values too. JSON and form members with telling names, texts that look like keys, and
the values of a request's own secret headers are replaced wherever they appear. The same is done to a live request before
it is looked up, so that a recording plays with any key. A cleaned value cleans to itself.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Iterator, Mapping
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

import attrs

from stepengine.redaction import ANY, MIN_KNOWN, Redactor, SecretFound, json_in
from stepengine.testing.interactions import Headers, RecordedRequest, RecordedResponse, is_stream
from stepengine.testing.streams import clean_events, joined_texts

__all__ = (
    "KEPT_REQUEST_HEADERS",
    "SECRET_HEADERS",
    "SHAPES",
    "Cleaner",
    "SecretFound",
    "clean_url",
    "is_credential_exchange",
    "known_secrets",
)

KEPT_REQUEST_HEADERS = frozenset({"accept", "anthropic-beta", "anthropic-version", "content-type", "openai-beta"})
KEPT_RESPONSE_HEADERS = frozenset({
    "anthropic-beta", "anthropic-version", "content-encoding", "content-type", "location", "retry-after",
    "retry-after-ms", "x-should-retry",
})  # fmt: skip
KEPT_PREFIXES = ("anthropic-ratelimit-", "x-ratelimit-")
SECRET_HEADERS = frozenset({"api-key", "authorization", "cookie", "proxy-authorization", "x-api-key", "x-goog-api-key"})
METADATA_HOSTS = frozenset({
    "100.100.100.200", "169.254.169.254", "169.254.170.2", "fd00:ec2::254", "metadata.google.internal", "metadata.internal",
    "oauth2.googleapis.com",
})  # fmt: skip
TOKEN_PATHS = ("/token", "/oauth/access_token", "/oauth2/introspect", "/oauth2/revoke")
KEPT_QUERY = frozenset({"after", "alt", "api-version", "before", "beta", "include", "limit", "order", "stream"})
SHAPES = ANY


def known_secrets(headers: Headers) -> dict[str, str]:
    """Return the secret values that a request's *headers* carry, each with the name of its header."""
    found: dict[str, str] = {}
    for name, value in headers:
        if name not in SECRET_HEADERS:
            continue
        scheme, _, credential = value.partition(" ")
        found[credential or value] = name
        if scheme.lower() == "basic":
            found.update(dict.fromkeys(_basic(credential), name))
    return {value: name for value, name in found.items() if len(value) >= MIN_KNOWN}


def _basic(credential: str) -> Iterable[str]:
    try:
        return base64.b64decode(credential).decode().split(":", 1)
    except ValueError:
        return ()


def is_credential_exchange(request: RecordedRequest) -> bool:
    """
    Return whether *request* deals in credentials, so that it is passed on and never recorded (replay K15, SC04).

    These are token requests of OAuth, cloud metadata, requests with a signature instead of a key (SigV4), and those that
    carry a service account.
    """
    parts = urlsplit(request.url)
    if (parts.hostname or "") in METADATA_HOSTS or parts.path.rstrip("/").endswith(TOKEN_PATHS):
        return True
    if request.header("authorization").startswith("AWS4-") or request.header("x-amz-security-token"):
        return True
    is_form = request.header("content-type").startswith("application/x-www-form-urlencoded")
    if "x-amz-signature=" in parts.query.lower() or (is_form and b"grant_type=" in request.body):
        return True
    return b'"private_key_id"' in request.body and b'"client_email"' in request.body


def clean_url(url: str) -> str:
    """Return *url* without userinfo, and with a placeholder for each query value that is not known to be harmless."""
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    if not parts.query:
        return urlunsplit((parts.scheme, host, parts.path, "", ""))
    pairs = [(n, v if _harmless(n) else f"<redacted:{n}>") for n, v in parse_qsl(parts.query, keep_blank_values=True)]
    return urlunsplit((parts.scheme, host, parts.path, urlencode(pairs, safe="<>:/"), ""))


def _harmless(name: str) -> bool:
    return name.lower() in KEPT_QUERY or name.lower().startswith("page")


@attrs.frozen
class Cleaner:
    """
    Replaces secrets in recorded messages.

    Attributes:
        known: Secret values and the name that stands for each.
        base: What else is replaced in texts and JSON, and which headers of a user are left out.
    """

    known: Mapping[str, str] = attrs.field(factory=dict, repr=False)
    base: Redactor = attrs.field(default=SHAPES, kw_only=True)
    _redactor: Redactor = attrs.field(init=False, repr=False)

    @_redactor.default
    def _with_known(self) -> Redactor:
        return self.base.with_known(self.known)

    def request(self, request: RecordedRequest) -> RecordedRequest:
        """Return *request* as it may be stored."""
        left_out = self.base.rules.headers
        headers = [(n, self.text(v)) for n, v in request.headers if n in KEPT_REQUEST_HEADERS and n not in left_out]
        kind = request.header("content-type")
        return RecordedRequest(
            request.method, self.text(clean_url(request.url)), headers, self.body(request.body, kind)
        )

    def response(self, response: RecordedResponse) -> RecordedResponse:
        """Return *response* as it may be stored."""
        left_out = self.base.rules.headers
        headers = [
            (n, self.text(clean_url(v) if n == "location" else v))
            for n, v in response.headers
            if (n in KEPT_RESPONSE_HEADERS or n.startswith(KEPT_PREFIXES)) and n not in left_out
        ]
        body = response.body if response.header("content-encoding") else self._reply_body(response)
        return RecordedResponse(response.status, response.reason, headers, body)

    def body(self, body: bytes, content_type: str = "") -> bytes:
        """Return *body* cleaned as the JSON, form or text that it is; binary bodies only lose known values (replay K12)."""
        try:
            text = body.decode()
        except UnicodeDecodeError:
            return self._redactor.binary(body)
        if not self._redactor.suspicious(text):
            return body
        if content_type.startswith("application/x-www-form-urlencoded"):
            pairs = parse_qsl(text, keep_blank_values=True)
            return urlencode([(n, self._redactor.member(n, v)) for n, v in pairs], safe="<>:/").encode()
        return self._redactor.json_text(text).encode()

    def text(self, text: str) -> str:
        """Return *text* with a placeholder for each known value and each thing that looks like a key."""
        return self._redactor.text(text)

    def findings(self, message: RecordedRequest | RecordedResponse) -> Iterator[tuple[str, str]]:
        """Give the place and the rule of each secret that is still in *message*; for streams over the joined text too."""
        for name, value in message.headers:
            if name in SECRET_HEADERS or self.text(value) != value:
                yield f"headers/{name}", name
        if isinstance(message, RecordedRequest) and clean_url(message.url) != message.url:
            yield "uri", "query"
        text = message.body.decode(errors="replace")
        if self._redactor.suspicious(text):
            yield from self._redactor.findings(json_in(text), "body")
        if is_stream(message):
            for place, joined in joined_texts(text).items():
                rules = self._redactor.secrets(joined).values()
                yield from ((f"body (joined events){place}", rule) for rule in rules)

    def _reply_body(self, response: RecordedResponse) -> bytes:
        if not is_stream(response):
            return self.body(response.body, response.header("content-type"))
        text = response.body.decode(errors="surrogateescape")
        clean = clean_events(text, self._redactor)
        return clean.encode(errors="surrogateescape")
