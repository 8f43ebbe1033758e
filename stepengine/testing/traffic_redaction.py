"""
Taking secrets out of recorded traffic, and finding those that are left.

Headers pass by an allow-list, query values too. JSON and form members with telling names, texts that look like keys, and
the values of a request's own secret headers are replaced wherever they appear. The same is done to a live request before
it is looked up, so that a recording plays with any key. A cleaned value cleans to itself.

A secret may come in pieces, spread over many server-sent events: the texts that stand at one place of a stream's JSON
events, such as ``/delta/text``, are looked at joined, and what is found is taken out of every piece that holds a part of it.

The same is said to vcrpy, which people use to record HTTP that their tools make: what a tool did is in the journal anyway, and
our own cassettes never go through vcrpy.
"""

from __future__ import annotations

import base64
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

import attrs
from attrs import frozen

from stepengine.redaction import (
    ANY,
    MIN_KNOWN,
    SECRET_HEADERS,
    Redactor,
    SecretFound,
    Span,
    is_secret_header,
    is_secret_parameter,
    make_redactor,
    parse_if_json,
)
from stepengine.testing.cassette_files import Headers, RecordedRequest, RecordedResponse, is_stream

__all__ = (
    "KEPT_REQUEST_HEADERS",
    "SHAPES",
    "Cleaner",
    "SecretFound",
    "clean_events",
    "clean_url",
    "is_credential_exchange",
    "is_presigned",
    "is_telemetry",
    "join_texts",
    "secrets_in_headers",
    "vcr_config",
)
__tracebackhide__ = True  # a failed test ends at its author's line

Path: TypeAlias = tuple[str | int, ...]
LINE = re.compile(r"(\r\n|\n|\r)")


class Piece(NamedTuple):
    """One text of one event: the number of its line, and the text."""

    line: int
    text: str


def join_texts(stream: str) -> dict[str, str]:
    """Return the joined texts of a stream's JSON events by their JSON path."""
    pieces = _collect_pieces(_parse_event_trees(LINE.split(stream)))
    return {"".join(f"/{step}" for step in path): "".join([p.text for p in found]) for path, found in pieces.items()}


def clean_events(stream: str, redactor: Redactor) -> str:
    """Return *stream* without the secrets that *redactor* finds, in one event or spread over many."""
    lines = LINE.split(stream)
    trees = _parse_event_trees(lines)
    for path, pieces in _collect_pieces(trees).items():
        spans = redactor.spans("".join([p.text for p in pieces]))
        for piece, changed in _cut_spans(pieces, spans):
            _set_text(trees[piece.line], path, changed)
    for number, line in enumerate(lines):
        if number not in trees:
            lines[number] = redactor.text(line)
        elif (cleaned := redactor.value(trees[number])) != json.loads(line[5:]):
            lines[number] = f"data: {json.dumps(cleaned, ensure_ascii=False, separators=(',', ':'))}"
    return "".join(lines)


def _parse_event_trees(lines: list[str]) -> dict[int, object]:
    trees: dict[int, object] = {}
    for number, line in enumerate(lines):
        if line.startswith("data:") and line[5:].lstrip()[:1] in ("{", "["):
            try:
                trees[number] = json.loads(line[5:])
            except (ValueError, RecursionError):
                continue
    return trees


def _collect_pieces(trees: Mapping[int, Any]) -> dict[Path, list[Piece]]:
    pieces: dict[Path, list[Piece]] = {}
    for number, tree in trees.items():
        for path, text in _iter_texts(tree, ()):
            pieces.setdefault(path, []).append(Piece(number, text))
    return pieces


def _iter_texts(value: object, path: Path) -> Iterator[tuple[Path, str]]:
    if isinstance(value, str):
        yield path, value
        return
    members = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for step, member in members:
        yield from _iter_texts(member, (*path, step))


def _cut_spans(pieces: list[Piece], spans: list[Span]) -> Iterator[tuple[Piece, str]]:
    """Yield each piece with part of a span: a placeholder where the span starts, and nothing where it continues."""
    begin = first = 0
    for piece in pieces if spans else ():
        end = begin + len(piece.text)
        text, at = "", begin
        for number in range(first, len(spans)):
            span = spans[number]
            if span.start >= end:
                break
            text += piece.text[at - begin : max(span.start, at) - begin]
            text += f"<redacted:{span.name}>" if span.start >= at else ""
            at = span.end
            first = number if span.end > end else number + 1
        if at > begin:
            yield piece, text + piece.text[at - begin :]
        begin = end


def _set_text(tree: Any, path: Path, text: str) -> None:
    *steps, last = path
    for step in steps:
        tree = tree[step]
    tree[last] = text


KEPT_REQUEST_HEADERS = frozenset({"accept", "anthropic-beta", "anthropic-version", "content-type", "openai-beta"})
KEPT_RESPONSE_HEADERS = frozenset({
    "anthropic-beta", "anthropic-version", "content-encoding", "content-type", "location", "retry-after",
    "retry-after-ms", "x-should-retry",
})  # fmt: skip
KEPT_PREFIXES = ("anthropic-ratelimit-", "x-ratelimit-")
METADATA_HOSTS = frozenset({
    "100.100.100.200", "169.254.169.254", "169.254.170.2", "fd00:ec2::254", "metadata.google.internal", "metadata.internal",
    "oauth2.googleapis.com",
})  # fmt: skip
SIGNED_CREDENTIALS = re.compile(
    r"(?:sts(?:-fips)?|cognito-identity(?:-fips)?|(?:portal|oidc)\.sso|oidc|signin)(?:\.[a-z0-9-]+)?\.amazonaws\.com(?:\.cn)?"
)
TELEMETRY = (("api.openai.com", "/v1/traces/ingest"),)
TELEMETRY_HOST = re.compile(
    r"(?:.+\.)?(?:api\.smith\.langchain\.com|logfire-(?:us|eu)\.pydantic\.dev|i\.posthog\.com|app\.posthog\.com"
    r"|ingest\.(?:\w+\.)?sentry\.io|cloud\.langfuse\.com)"
)
TOKEN_PATHS = ("/token", "/oauth/access_token", "/oauth2/introspect", "/oauth2/revoke")
KEPT_QUERY = frozenset({"after", "alt", "api-version", "before", "beta", "include", "limit", "order", "stream"})
SHAPES = ANY


def secrets_in_headers(headers: Headers) -> dict[str, str]:
    """Return the secret values in a request's *headers*, with the names of their headers."""
    found: dict[str, str] = {}
    for name, value in headers:
        if not is_secret_header(name):
            continue
        scheme, _, credential = value.partition(" ")
        found[credential or value] = name
        if scheme.lower() == "basic":
            found.update(dict.fromkeys(_basic_auth_values(credential), name))
    return {value: name for value, name in found.items() if len(value) >= MIN_KNOWN}


def _basic_auth_values(credential: str) -> Iterable[str]:
    try:
        return base64.b64decode(credential).decode().split(":", 1)
    except ValueError:
        return ()


def is_credential_exchange(request: RecordedRequest) -> bool:
    """
    Return whether *request* requests or carries credentials; such requests are sent but never recorded.

    These are token requests of OAuth, cloud metadata, the services of AWS that hand out credentials, addresses that are signed
    themselves, and requests that carry a service account.
    """
    parts = urlsplit(request.url)
    if (parts.hostname or "") in METADATA_HOSTS or parts.path.rstrip("/").endswith(TOKEN_PATHS):
        return True
    if SIGNED_CREDENTIALS.fullmatch(parts.hostname or "") or is_presigned(request):
        return True
    is_form = request.header("content-type").lower().startswith("application/x-www-form-urlencoded")
    if is_form and (b"grant_type=" in request.body or b"Action=AssumeRole" in request.body):
        return True
    return b'"private_key_id"' in request.body and b'"client_email"' in request.body


def is_kept_request_header(name: str) -> bool:
    """Return whether a header of a request, in lower case, is known to be harmless."""
    return name in KEPT_REQUEST_HEADERS


def is_kept_response_header(name: str) -> bool:
    """Return whether a header of a reply, in lower case, is known to be harmless."""
    return name in KEPT_RESPONSE_HEADERS or name.startswith(KEPT_PREFIXES)


def is_presigned(request: RecordedRequest) -> bool:
    """Return True if the URL of *request* is a credential itself, such as a presigned URL."""
    return "x-amz-signature=" in urlsplit(request.url).query.lower()


def is_telemetry(request: RecordedRequest) -> bool:
    """
    Return whether *request* only sends traces to a telemetry service, as openai-agents does.

    Such requests hold times and ids of the run and come from threads that outlive it, so no recording of them would play again.
    """
    parts = urlsplit(request.url)
    host, path = parts.hostname or "", parts.path
    return any(
        TELEMETRY_HOST.fullmatch(host) or (host == known and path.startswith(start)) for known, start in TELEMETRY
    )


def clean_url(url: str) -> str:
    """Return *url* without userinfo, and with a placeholder for each query value that is not known to be harmless."""
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    if not parts.query:
        return urlunsplit((parts.scheme, host, parts.path, "", ""))
    pairs = [
        (n, v if _is_harmless(n) else f"<redacted:{n}>") for n, v in parse_qsl(parts.query, keep_blank_values=True)
    ]
    return urlunsplit((parts.scheme, host, parts.path, urlencode(pairs, safe="<>:/"), ""))


def _is_harmless(name: str) -> bool:
    return name.lower() in KEPT_QUERY or name.lower().startswith("page")


@frozen
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
    def _redactor_with_known(self) -> Redactor:
        return self.base.with_known(self.known)

    def request(self, request: RecordedRequest) -> RecordedRequest:
        """Return *request* without secrets."""
        left_out = self.base.rules.headers
        headers = [(n, self.text(v)) for n, v in request.headers if is_kept_request_header(n) and n not in left_out]
        kind = request.header("content-type")
        return RecordedRequest(
            request.method, self.text(clean_url(request.url)), headers, self.body(request.body, kind)
        )

    def response(self, response: RecordedResponse) -> RecordedResponse:
        """Return *response* without secrets."""
        left_out = self.base.rules.headers
        headers = [
            (n, self.text(clean_url(v) if n == "location" else v))
            for n, v in response.headers
            if is_kept_response_header(n) and n not in left_out
        ]
        body = response.body if response.header("content-encoding") else self._clean_reply_body(response)
        return RecordedResponse(response.status, response.reason, headers, body)

    def body(self, body: bytes, content_type: str = "") -> bytes:
        """Return *body* cleaned as the JSON, form or text that it is; binary bodies only lose known values."""
        try:
            text = body.decode()
        except UnicodeDecodeError:
            return self._redactor.binary(body)
        if not self._redactor.suspicious(text):
            return body
        if content_type.lower().startswith("application/x-www-form-urlencoded"):
            pairs = parse_qsl(text, keep_blank_values=True)
            return urlencode([(n, self._redactor.member(n, v)) for n, v in pairs], safe="<>:/").encode()
        return self._redactor.json_text(text).encode()

    def text(self, text: str) -> str:
        """Return *text* with a placeholder for each known value and each thing that looks like a key."""
        return self._redactor.text(text)

    def findings(self, message: RecordedRequest | RecordedResponse) -> Iterator[tuple[str, str]]:
        """Yield path and rule of each secret that is still in *message*, also in the joined text of streams."""
        for name, value in message.headers:
            if name in SECRET_HEADERS or self.text(value) != value:
                yield f"headers/{name}", name
        if isinstance(message, RecordedRequest) and clean_url(message.url) != message.url:
            yield "uri", "query"
        text = message.body.decode(errors="replace")
        if self._redactor.suspicious(text):
            yield from self._redactor.findings(parse_if_json(text), "body")
        if is_stream(message):
            for place, joined in join_texts(text).items():
                rules = self._redactor.secrets(joined).values()
                yield from ((f"body (joined events){place}", rule) for rule in rules)

    def _clean_reply_body(self, response: RecordedResponse) -> bytes:
        if not is_stream(response):
            return self.body(response.body, response.header("content-type"))
        text = response.body.decode(errors="surrogateescape")
        clean = clean_events(text, self._redactor)
        return clean.encode(errors="surrogateescape")


# --- vcrpy -------------------------------------------------------------------------------------------------------------

MATCH_ON = ("method", "scheme", "host", "port", "path", "query", "body")
PROVIDER_HOSTS = ("api.anthropic.com", "generativelanguage.googleapis.com")
LOCAL_HOSTS = ("localhost", "127.0.0.1")


def vcr_config(secrets: Mapping[str, str] | None = None) -> dict[str, Any]:
    """
    Return settings for ``vcr.VCR(**settings)``, or for pytest-recording's fixture ``vcr_config``.

    Requests are matched by their bodies too. Only headers that are known to be harmless are stored, as in a ``Cassette``.
    Values of queries, forms and JSON members that are named like secrets, known secrets and texts that look like keys are
    replaced, on disk and while matching. Replies are stored decompressed. The model providers' hosts are left alone, since
    their traffic belongs in a ``Cassette``. vcrpy patches classes for the whole process: use one of its cassettes at a time.

    Args:
        secrets: Values that must not be written, each with the name that stands for it, beside those of environment
            variables that are named like secrets.
    """
    redactor = make_redactor("all", os.environ, secrets)

    def clean_request(request: Any) -> Any:
        kind = str(request.headers.get("content-type", "")).lower()
        known = secrets_in_headers(tuple([(name.lower(), _text(value)) for name, value in request.headers.items()]))
        cleans = _VcrCleaner(redactor.with_known(known))
        request.uri = cleans.address(request.uri)
        request.headers = {n: cleans.text(v) for n, v in request.headers.items() if is_kept_request_header(n.lower())}
        request.body = cleans.body(request.body, kind)
        return request

    def clean_response(response: dict[str, Any]) -> dict[str, Any]:
        cleans = _VcrCleaner(redactor)
        headers = {
            name: [cleans.address(v) if name.lower() == "location" else cleans.text(v) for v in _as_list(values)]
            for name, values in response["headers"].items()
            if is_kept_response_header(name.lower())
        }
        body = {**response["body"], "string": cleans.body(response["body"].get("string", b""), is_reply=True)}
        return {**response, "headers": headers, "body": body}

    return {
        "match_on": MATCH_ON,
        "decode_compressed_response": True,
        "ignore_hosts": _provider_hosts(),
        "before_record_request": clean_request,
        "before_record_response": clean_response,
    }


ORDINARY_IN_REPLIES = frozenset({"auth", "code", "key", "pass"})
"""Parameters that are secret in a request, and in a reply mostly name something else."""


FORM_PART = re.compile(r'(\bname="([^"\r\n]{1,200})"[^\r\n]*\r?\n(?:[^\r\n]+\r?\n)*\r?\n)(.*?)(?=\r?\n--)', re.DOTALL)
"""A part of a multipart form: the text before its value, its name, and its value."""


def _clean_part(part: re.Match[str]) -> str:
    return f"{part[1]}<redacted:{part[2]}>" if is_secret_parameter(part[2]) else part[0]


@frozen
class _VcrCleaner:
    """Replaces secrets in messages that vcrpy stores or compares."""

    redactor: Redactor

    def address(self, address: str) -> str:
        """Return *address* without userinfo and without the values of parameters that are named like secrets."""
        parts = urlsplit(address)
        host = parts.netloc.rpartition("@")[2]
        return self.redactor.text(
            urlunsplit(
                parts._replace(
                    netloc=host, query=self._clean_pairs(parts.query), fragment=self._clean_pairs(parts.fragment)
                )
            )
        )

    def text(self, value: Any) -> Any:
        """Return a text without secrets; other values unchanged."""
        return self.redactor.text(value) if isinstance(value, str) else value

    def body(self, body: Any, kind: str = "", *, is_reply: bool = False) -> Any:
        """Return the body of a request or reply without secrets: JSON, form or text; binary bodies lose only known values."""
        if isinstance(body, str):
            return self._clean_body(body, kind, is_reply=is_reply)
        if not isinstance(body, bytes):
            return body
        try:
            return self._clean_body(body.decode(), kind, is_reply=is_reply).encode()
        except UnicodeDecodeError:
            return self.redactor.binary(body)

    def _clean_body(self, text: str, kind: str, *, is_reply: bool) -> str:
        if kind.startswith("application/x-www-form-urlencoded"):
            return self.redactor.text(self._clean_pairs(text))
        if kind.startswith("multipart/form-data"):
            return self.redactor.text(FORM_PART.sub(_clean_part, text))
        tree = parse_if_json(text.lstrip("\ufeff \t\r\n"))
        if isinstance(tree, str):
            lines = text.splitlines(keepends=True)
            if len(lines) > 1 and any(line.startswith(("{", "[")) for line in lines):
                return "".join([self._clean_body(line, is_reply=is_reply, kind="") for line in lines])
            return self.redactor.text(text)
        named = _without_named(tree, ORDINARY_IN_REPLIES if is_reply else frozenset())
        return self.redactor.json_text(text if named == tree else json.dumps(named, ensure_ascii=False))

    def _clean_pairs(self, text: str) -> str:
        pairs = parse_qsl(text, keep_blank_values=True)
        if not any(is_secret_parameter(name) for name, _ in pairs):
            return text
        return urlencode([(n, f"<redacted:{n}>" if is_secret_parameter(n) else v) for n, v in pairs], safe="<>:/")


def _without_named(value: Any, ordinary: frozenset[str]) -> Any:
    """Return a JSON value with a placeholder for each text whose member is named like a secret."""
    if isinstance(value, list):
        return [_without_named(member, ordinary) for member in value]
    if not isinstance(value, dict):
        return value
    return {
        name: _hide_texts(name, member)
        if name.lower() not in ordinary and is_secret_parameter(name)
        else _without_named(member, ordinary)
        for name, member in value.items()
    }


def _hide_texts(name: str, member: Any) -> Any:
    """Return placeholders for a text or the texts of a list; in an object the names of its members decide."""
    if isinstance(member, str):
        return f"<redacted:{name}>" if member else member
    return (
        [_hide_texts(name, one) for one in member] if isinstance(member, list) else _without_named(member, frozenset())
    )


def _as_list(values: Any) -> list[Any]:
    return values if isinstance(values, list) else [values]


def _text(value: Any) -> str:
    return value.decode("latin-1") if isinstance(value, bytes) else str(value)


def _provider_hosts() -> list[str]:
    from stepengine.models.presets import PRESETS

    hosts = {urlsplit(preset.base_url).hostname or "" for preset in PRESETS.values() if preset.base_url}
    return sorted({*PROVIDER_HOSTS, *hosts} - {"", *LOCAL_HOSTS})
