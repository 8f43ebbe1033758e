"""
Taking secrets out of recorded traffic, and finding those that are left (replay K, reliability SC01-SC03, SC10).

Headers pass by an allow-list, query values too. JSON and form members with telling names, texts that look like keys, and
the values of a request's own secret headers are replaced wherever they appear. The same is done to a live request before
it is looked up, so that a recording plays with any key. A cleaned value cleans to itself.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterable, Iterator
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

import attrs

from stepengine.journal.redaction import (
    MIN_KNOWN,
    NESTED_JSON,
    SECRET_MEMBERS,
    SHAPE,
    SecretFound,
    forms_of,
    json_in,
    looks_secret,
    shape_name,
)
from stepengine.testing.interactions import Headers, RecordedRequest, RecordedResponse, is_stream
from stepengine.testing.streams import clean_events, joined_texts

__all__ = ("Cleaner", "SecretFound", "clean_url", "known_secrets")

KEPT_REQUEST_HEADERS = frozenset({"accept", "anthropic-beta", "anthropic-version", "content-type", "openai-beta"})
KEPT_RESPONSE_HEADERS = frozenset({
    "anthropic-beta", "anthropic-version", "content-encoding", "content-type", "location", "retry-after",
    "retry-after-ms", "x-should-retry",
})  # fmt: skip
KEPT_PREFIXES = ("anthropic-ratelimit-", "x-ratelimit-")
SECRET_HEADERS = frozenset({"api-key", "authorization", "cookie", "proxy-authorization", "x-api-key", "x-goog-api-key"})
KEPT_QUERY = frozenset({"after", "alt", "api-version", "before", "beta", "include", "limit", "order", "stream"})
MEMBER_HINTS = (
    "api_key", "api-key", "apikey", "access_token", "access-token", "accesstoken", "refresh_token", "refresh-token",
    "refreshtoken", "id_token", "id-token", "idtoken", "secret", "passwd", "password", "private_key", "private-key",
    "privatekey", "authorization", "cookie",
)  # fmt: skip


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
    """

    known: dict[str, str] = attrs.field(factory=dict, repr=False)
    _written: dict[str, str] = attrs.field(init=False, repr=False)
    _abridged: re.Pattern[str] | None = attrs.field(init=False, repr=False)

    @_written.default
    def _known_in_all_forms(self) -> dict[str, str]:
        longest = sorted(self.known, key=len, reverse=True)
        return {form: self.known[value] for value in longest for form in forms_of(value)}

    @_abridged.default
    def _known_as_errors_print_them(self) -> re.Pattern[str] | None:
        forms = [
            rf"{re.escape(v[:2])}[\w-]*(?:\*{{3,}}|\.{{3,}}|\u2026)[\w*.-]*{re.escape(v[-4:])}" for v in self.known
        ]
        return re.compile("|".join(forms)) if forms else None

    def request(self, request: RecordedRequest) -> RecordedRequest:
        """Return *request* as it may be stored."""
        headers = [(n, self.text(v)) for n, v in request.headers if n in KEPT_REQUEST_HEADERS]
        kind = request.header("content-type")
        return RecordedRequest(
            request.method, self.text(clean_url(request.url)), headers, self.body(request.body, kind)
        )

    def response(self, response: RecordedResponse) -> RecordedResponse:
        """Return *response* as it may be stored."""
        headers = [
            (n, self.text(clean_url(v) if n == "location" else v))
            for n, v in response.headers
            if n in KEPT_RESPONSE_HEADERS or n.startswith(KEPT_PREFIXES)
        ]
        body = response.body if response.header("content-encoding") else self._reply_body(response)
        return RecordedResponse(response.status, response.reason, headers, body)

    def body(self, body: bytes, content_type: str = "") -> bytes:
        """Return *body* cleaned as the JSON, form or text that it is; binary bodies only lose known values."""
        try:
            text = body.decode()
        except UnicodeDecodeError:
            for form, name in self._written.items():
                body = body.replace(form.encode(), f"<redacted:{name}>".encode())
            return body
        if not self._suspicious(text):
            return body
        if content_type.startswith("application/x-www-form-urlencoded"):
            pairs = parse_qsl(text, keep_blank_values=True)
            return urlencode([(n, self._member(n, v, 0)) for n, v in pairs], safe="<>:/").encode()
        return self._json_or_text(text).encode()

    def text(self, text: str) -> str:
        """Return *text* with a placeholder for each known value and each thing that looks like a key."""
        for form, name in self._written.items():
            if form in text:
                text = text.replace(form, f"<redacted:{name}>")
        if self._abridged is not None:
            text = self._abridged.sub("<redacted:abridged>", text)
        if not looks_secret(text):
            return text
        return SHAPE.sub(lambda found: f"<redacted:{shape_name(found)}>", text)

    def findings(self, message: RecordedRequest | RecordedResponse) -> Iterator[tuple[str, str]]:
        """Give the place and the rule of each secret that is still in *message*; for streams over the joined text too."""
        for name, value in message.headers:
            if name in SECRET_HEADERS or self.text(value) != value:
                yield f"headers/{name}", name
        if isinstance(message, RecordedRequest) and clean_url(message.url) != message.url:
            yield "uri", "query"
        text = message.body.decode(errors="replace")
        if self._suspicious(text):
            for place, value in _strings(json_in(text), ""):
                yield from ((f"body{place}", rule) for rule in self._rules(value))
        if is_stream(message):
            for place, joined in joined_texts(text).items():
                yield from ((f"body (joined events){place}", rule) for rule in self._rules(joined))

    def _rules(self, text: str) -> Iterator[str]:
        yield from self._secrets(text).values()

    def _suspicious(self, text: str) -> bool:
        if looks_secret(text) or any(form in text for form in self._written):
            return True
        if self._abridged is not None and self._abridged.search(text):
            return True
        lower = text.lower()
        return any(hint in lower for hint in MEMBER_HINTS)

    def _reply_body(self, response: RecordedResponse) -> bytes:
        if not is_stream(response):
            return self.body(response.body, response.header("content-type"))
        text = response.body.decode(errors="surrogateescape")
        clean = clean_events(text, self._secrets, lambda tree: self._json(tree, 0), self.text)
        return clean.encode(errors="surrogateescape")

    def _secrets(self, text: str, level: int = 0) -> dict[str, str]:
        """Return each secret in *text* and its name; JSON is looked into, since an escape may hide where a key begins."""
        found = {form: name for form, name in self._written.items() if form in text}
        if self._abridged is not None:
            found.update({match[0]: "abridged" for match in self._abridged.finditer(text)})
        if looks_secret(text):
            found.update({match[0]: shape_name(match) for match in SHAPE.finditer(text)})
            tree = json_in(text) if level < NESTED_JSON else text
            for _, inner in _strings(tree, "") if tree is not text else ():
                found.update(self._secrets(inner, level + 1))
        return found

    def _json_or_text(self, text: str, level: int = 0) -> str:
        tree = json_in(text)
        if isinstance(tree, str):
            return self.text(text)
        clean = self._json(tree, level)
        return text if clean == tree else json.dumps(clean, ensure_ascii=False, separators=(",", ":"))

    def _json(self, value: Any, level: int) -> Any:
        if isinstance(value, dict):
            return {self.text(k): self._member(k, v, level) for k, v in value.items()}
        if isinstance(value, list):
            return [self._json(v, level) for v in value]
        if not isinstance(value, str):
            return value
        nested = level < NESTED_JSON and value[:1] in ("{", "[")
        return self._json_or_text(value, level + 1) if nested else self.text(value)

    def _member(self, name: str, value: Any, level: int) -> Any:
        if isinstance(value, str) and value and re.sub(r"[-_]", "", name).lower() in SECRET_MEMBERS:
            return value if value.startswith("<redacted:") else f"<redacted:{name}>"
        return self._json(value, level)


def _strings(value: Any, place: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for key, member in value.items():
            yield f"{place} (a key)", key
            yield from _strings(member, f"{place}/{key}")
    elif isinstance(value, list):
        for index, member in enumerate(value):
            yield from _strings(member, f"{place}/{index}")
    elif isinstance(value, str):
        yield place, value
