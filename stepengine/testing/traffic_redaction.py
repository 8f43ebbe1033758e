"""
Taking secrets out of recorded traffic, and finding those that are left.

Secret are headers, cookies, parameters, members of JSON and of forms with telling names, texts that look like keys, and the values of
a request's own secret headers wherever they appear. The same is done to a live request before it is looked up, so that a recording plays
with any key. A cleaned value cleans to itself.

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
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias
from urllib.parse import quote_plus, unquote_plus, urlsplit, urlunsplit

import attrs
from attrs import frozen

from stepengine.data.secret_names import (
    Place,
    is_credential_cookie,
    is_secret,
    is_secret_name,
    looks_random,
    may_differ_between_machines,
    may_name_secret_member,
)
from stepengine.redaction import (
    ANY,
    MIN_KNOWN,
    PLACEHOLDER,
    Redactor,
    Span,
    find_secret_members,
    make_redactor,
    parse_if_json,
    patch_json_text,
)
from stepengine.testing.cassette_bodies import decode_body
from stepengine.testing.cassette_files import Headers, RecordedRequest, RecordedResponse, is_event_stream
from stepengine.testing.cassette_matching import PORTS, find_boundary, is_compared_header, is_ignored_header

__tracebackhide__ = True  # a failed test ends at its author's line

Path: TypeAlias = tuple[str | int, ...]
LINE = re.compile(r"(\r\n|\n|\r)")


class Piece(NamedTuple):
    """One text of one event: the number of its line, and the text."""

    line: int
    text: str


def join_event_texts_by_path(stream: str) -> dict[str, str]:
    """Return the joined texts of a stream's JSON events by their JSON path."""
    pieces = _group_texts_by_path(_parse_event_trees(LINE.split(stream)))
    return {"".join(f"/{step}" for step in path): "".join([p.text for p in found]) for path, found in pieces.items()}


def clean_events(stream: str, redactor: Redactor) -> str:
    """Return *stream* without the secrets that *redactor* finds, in one event or spread over many."""
    mark = "\ufeff" if stream.startswith("\ufeff") else ""
    lines = LINE.split(stream.removeprefix(mark))
    trees = _parse_event_trees(lines)
    _redact_texts_across_trees(trees, redactor)
    rows = [
        row
        for row in _iterate_multiline_event_lines(lines)
        if not trees.keys() & row and _clean_data_lines(lines, row, redactor)
    ]
    done = {number for row in rows for number in row}
    for number, line in enumerate(lines):
        if number in done:
            continue
        if number not in trees:
            lines[number] = redactor.redact_json_text(line)
        else:
            lines[number] = line[:5] + _redact_and_patch_json(line[5:], trees[number], redactor)
    return "".join([mark, *lines])


def clean_json_lines(text: str, redactor: Redactor) -> str:
    """Return lines of JSON without the secrets that *redactor* finds, in one line or spread over many."""
    lines = text.split("\n")
    parsed = {number: parse_if_json(line.strip()) for number, line in enumerate(lines)}
    trees = {number: tree for number, tree in parsed.items() if not isinstance(tree, str)}
    _redact_texts_across_trees(trees, redactor)
    return "\n".join([
        _redact_and_patch_json(line, trees[number], redactor) if number in trees else redactor.redact_json_text(line)
        for number, line in enumerate(lines)
    ])  # fmt: skip


def _redact_texts_across_trees(trees: Mapping[int, object], redactor: Redactor) -> None:
    """Redact *trees* in place: find secrets in the joined texts at each JSON path, and replace every part of them."""
    for path, pieces in _group_texts_by_path(trees).items():
        joined = "".join([p.text for p in pieces])

        def make_span_placeholder(span: Span, joined: str = joined) -> str:
            return redactor.make_placeholder(joined[span.start : span.end], span.name)

        for piece, changed in _replace_spans(pieces, redactor.find_spans(joined), make_span_placeholder):
            _set_text_at_path(trees[piece.line], path, changed)


def _redact_and_patch_json(text: str, tree: object, redactor: Redactor) -> str:
    """Return JSON *text* with the values of its changed *tree*, after *redactor* has redacted that tree."""
    before, cleaned = json.loads(text), redactor.value(tree)
    return text if cleaned == before else patch_json_text(text, before, cleaned)


def _iterate_multiline_event_lines(lines: list[str]) -> Iterator[set[int]]:
    """Yield the line numbers of each server-sent event that has two or more consecutive data lines."""
    row: set[int] = set()
    for number in range(0, len(lines) + 1, 2):
        if number < len(lines) and lines[number].startswith("data:"):
            row.add(number)
            continue
        if len(row) > 1:
            yield row
        row = set()


def _clean_data_lines(lines: list[str], line_numbers: set[int], redactor: Redactor) -> bool:
    """Redact the data *lines* of one event in place; return False, without a change, if their number would change."""
    numbers = sorted(line_numbers)
    cleaned = redactor.redact_json_text("\n".join([lines[number][5:] for number in numbers])).split("\n")
    if len(cleaned) != len(numbers):
        return False
    for number, line in zip(numbers, cleaned, strict=True):
        lines[number] = f"data:{line}"
    return True


def _parse_event_trees(lines: list[str]) -> dict[int, object]:
    """Return the JSON value of each data line by line number; lines without JSON are left out."""
    trees: dict[int, object] = {}
    for number, line in enumerate(lines):
        tree = parse_if_json(line[5:].strip(" \t")) if line.startswith("data:") else ""
        if not isinstance(tree, str):
            trees[number] = tree
    return trees


def _group_texts_by_path(trees: Mapping[int, Any]) -> dict[Path, list[Piece]]:
    """Return all texts in *trees* by JSON path, each with the number of its line."""
    pieces: dict[Path, list[Piece]] = {}
    for number, tree in trees.items():
        for path, text in _iterate_texts_with_paths(tree, ()):
            pieces.setdefault(path, []).append(Piece(number, text))
    return pieces


def _iterate_texts_with_paths(value: object, path: Path) -> Iterator[tuple[Path, str]]:
    """Yield (path, text) of each text in a JSON value, at any depth."""
    if isinstance(value, str):
        yield path, value
        return
    members = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for step, member in members:
        yield from _iterate_texts_with_paths(member, (*path, step))


def _replace_spans(
    pieces: list[Piece], spans: list[Span], replace: Callable[[Span], str]
) -> Iterator[tuple[Piece, str]]:
    """Yield each piece with its spans replaced: by the result of *replace* at the start of a span, and by nothing where it continues."""
    begin = first = 0
    for piece in pieces if spans else ():
        end = begin + len(piece.text)
        text, at = "", begin
        for number in range(first, len(spans)):
            span = spans[number]
            if span.start >= end:
                break
            text += piece.text[at - begin : max(span.start, at) - begin]
            text += replace(span) if span.start >= at else ""
            at = span.end
            first = number if span.end > end else number + 1
        if at > begin:
            yield piece, text + piece.text[at - begin :]
        begin = end


def _set_text_at_path(tree: Any, path: Path, text: str) -> None:
    """Replace the text at a path of a JSON value in place."""
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
"""The headers that vcrpy is told to keep."""
SET_COOKIES = frozenset({"set-cookie", "set-cookie2"})
NEXT_COOKIE = re.compile(r",(?=\s*[^\s;,=]+=)")
"""The comma between two cookies that a server or proxy joined in one header; the one in a date is none."""
ACCOUNT_HEADERS = frozenset({"anthropic-organization-id", "openai-organization", "openai-project"})
"""Headers of replies that name an account: no secrets, and not for everybody to read."""
ADDRESS_HEADERS = frozenset({"content-location", "link", "location", "refresh"})
PAIR_IN_ADDRESS = re.compile(r"""(?<=[?&#])[^&#<>\s"';,]+""")
USERINFO = re.compile(r"(?<=://)[^/\s@<>]*@")
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
TOKEN_PATHS = ("/oauth/access_token", "/oauth2/introspect", "/oauth2/revoke")
GRANT = "granttype"
TOKEN_PARAMETERS = frozenset({GRANT, "clientsecret", "clientassertion", "refreshtoken", "code", "token"})
"""What a request about a token has in its form, JSON or query, of which one at least, beside a path that such requests have."""
HEAD_END = re.compile(rb"\r?\n\r?\n")
PART_NAME = re.compile(rb"""(?i)[;\s]name\*?="?(?:[\w-]{0,40}'[\w-]{0,40}')?([^";\r\n]{1,200})""")
PART_PARAMETER = re.compile(rb"""(?i)[;\s]([\w*-]{1,100})=(?:"((?:[^"\\]|\\.)*)"|[^;\r\n]*)""")
"""A parameter of a part's headers, quoted ones whole."""
PART_KIND = re.compile(rb"(?im)^content-type:[ \t]*([^\r\n]+)")
MOST_NESTED = 3
"""How deep multipart messages are looked into: nobody nests them deeper, and others could do it without end."""
CHARSET = re.compile(
    r"""charset=["']?(utf-?(?:8|16|32)(?:-?[bl]e)?|iso-8859-\d+|latin-?1|windows-\d+|shift_jis|euc-\w+|gb\w+|big5)(?![\w-])""",
    re.IGNORECASE,
)
UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")
"""How a text in UTF-16 starts, if it says so."""
FORM = "application/x-www-form-urlencoded"
FORM_TEXT = re.compile(r"[\w.~%\[\]+-]{1,100}=[^\s&;(){}<>'\"]*+(?:&[\w.~%\[\]+-]{1,100}=[^\s&;(){}<>'\"]*+)*+\s*")
"""A form that another kind, or none, is given for, as in replies with tokens."""
FORM_KINDS = ("", "text/html", "text/plain")
HTTP_KINDS = ("application/http", "message/http")
"""Requests and replies in the parts of a batch."""
TEXT_KINDS = (FORM, "application/json", "text/")
"""What is text even if it is not UTF-8, as the forms of old servers are not."""
SHAPES = ANY
SCHEMES = frozenset({"apikey", "basic", "bearer", "digest", "key", "negotiate", "token"})
"""What may precede the credential in any secret header. In headers of authorization, every first word is a scheme."""


def find_header_secrets(headers: Headers) -> dict[str, str]:
    """Return the secret values in request *headers*, mapped to the names of headers or cookies; short values are left out."""
    found: dict[str, str] = {}
    for name, value in headers:
        if not is_secret(name, value, "header"):
            continue
        scheme, credential = _split_auth_scheme(name, value)
        if name == "cookie":
            pairs = [
                (cookie.strip(), content) for cookie, _, content in (one.partition("=") for one in value.split(";"))
            ]
            # A cookie such as a theme may be an ordinary word of the reply.
            found.update({v or n: n if v else name for n, v in pairs if not v or is_credential_cookie(n, v)})
            continue
        found[credential] = name
        if scheme.lower() == "basic ":
            found.update(dict.fromkeys(_find_basic_auth_secrets(credential), name))
    return {value: name for value, name in found.items() if len(value) >= MIN_KNOWN}


def _split_auth_scheme(name: str, value: str) -> tuple[str, str]:
    """Return the scheme in a secret header with the space behind it, ``""`` if it has none, and the credential."""
    scheme, space, credential = value.partition(" ")
    if credential and (name.lower().endswith("authorization") or scheme.lower() in SCHEMES):
        return scheme + space, credential
    return "", value


def _find_basic_auth_secrets(credential: str) -> Iterable[str]:
    """Return the password of Basic credentials, and also the user name if it may be the key."""
    try:
        user, _, password = base64.b64decode(credential).decode().partition(":")
    except ValueError:
        return ()
    return (user, password) if len(password) < MIN_KNOWN or looks_random(user) else (password,)


def find_url_and_body_secrets(request: RecordedRequest) -> dict[str, str]:
    """Return the credentials in the URL and body of *request*, mapped to their names; a reply may quote them."""
    body = decode_body(request.body, request.get_header("content-encoding"))
    found = [
        *_find_form_secrets(urlsplit(request.url).query), *_find_body_secrets(body, request.get_header("content-type"), 0)
    ]  # fmt: skip
    return {value: name for name, value in found if len(value) >= MIN_KNOWN and not PLACEHOLDER.fullmatch(value)}


def _is_form_body(kind: str, text: str) -> bool:
    """Return True if a body is a form: by its lower-case content type, or by its text if the type is plain or missing."""
    return kind.startswith(FORM) or (
        kind.partition(";")[0].strip() in FORM_KINDS and FORM_TEXT.fullmatch(text) is not None
    )


def _find_form_secrets(text: str) -> Iterator[tuple[str, str]]:
    """Yield the name and value of each credential in a form or query."""
    for pair in [*text.split("&"), *(re.split("[&;]", text) if ";" in text else ())]:
        name, value = [unquote_plus(part) for part in pair.partition("=")[::2]]
        if may_differ_between_machines(name, value, "parameter"):
            yield name, value


def _find_body_secrets(body: bytes, content_type: str, level: int) -> Iterator[tuple[str, str]]:
    """Yield the names and values of the credentials in the form, multipart form or JSON of a *body*."""
    kind = content_type.lower()
    if level < MOST_NESTED and kind.startswith("multipart/") and (boundary := find_boundary(content_type)):
        for part in _split_multipart(body, boundary)[::2]:
            head, content = _split_part_head(part)
            text = content.decode(errors="replace")
            yield from [
                (name, text) for name in _find_part_names(head) if may_differ_between_machines(name, text, "parameter")
            ]
            yield from _find_body_secrets(content, _parse_part_content_type(head), level + 1)
    elif _is_form_body(kind, body.decode("latin-1")):
        yield from _find_form_secrets(body.decode("latin-1"))
    else:
        text = body.decode(errors="replace")
        yield from find_secret_members(parse_if_json(text.strip())) if may_name_secret_member(text) else ()


def _split_multipart(body: bytes, boundary: str) -> list[bytes]:
    """Return the parts of a multipart message at the even indexes, and the boundaries between them at the odd ones."""
    return re.split(rb"((?:^|\r?\n)--%b(?=--|[ \t]*\r?\n|$))" % re.escape(boundary.encode()), body)


def _split_part_head(part: bytes) -> tuple[bytes, bytes]:
    """Return the headers and the content of a part of a multipart message; no headers if nothing ends them."""
    end = HEAD_END.search(part)
    return (b"", part) if end is None else (part[: end.end()], part[end.end() :])


def _parse_part_content_type(head: bytes) -> str:
    kind = PART_KIND.search(head)
    return kind[1].decode("latin-1") if kind else ""


def _detect_text_encoding(body: bytes, kind: str) -> str:
    """Return how the text of *body* is encoded; "" if it is no text."""
    found = CHARSET.search(kind)
    is_text = kind.startswith(TEXT_KINDS) or "json" in kind
    wide = [json.detect_encoding(body)] if is_text and (b"\0" in body[:4] or body[:2] in UTF16_MARKS) else []
    named = [found[1]] if found else []
    rest = ["latin-1"] if is_text else []
    for encoding in (*wide, *named, "utf-8", *rest):
        try:
            if body.decode(encoding).encode(encoding) == body:
                return encoding
        except (UnicodeError, LookupError):
            continue
    return ""


def has_binary_body(message: RecordedRequest | RecordedResponse) -> bool:
    """Return True if the body of *message* is not text, so that only known secret values are searched in it."""
    body = decode_body(message.body, message.get_header("content-encoding"))
    return message.body != b"" and (
        not body or not _detect_text_encoding(body, message.get_header("content-type").lower())
    )


def _find_part_names(head: bytes) -> list[str]:
    """Return the possible names of a part of a multipart message, because quotes and backslashes can be parsed in two ways."""
    names = [found[1] for found in PART_NAME.finditer(head)]
    names += [found[2] for found in PART_PARAMETER.finditer(head) if found[1].lower() == b"name" and found[2]]
    return [name.decode("latin-1") for name in names]


def is_credential_exchange(request: RecordedRequest) -> bool:
    """
    Return whether *request* requests or carries credentials; such requests are sent but never recorded.

    These are token requests of OAuth, cloud metadata, the services of AWS that hand out credentials, addresses that are signed
    themselves, and requests that carry a service account.
    """
    parts = urlsplit(request.url)
    if (parts.hostname or "") in METADATA_HOSTS:
        return True
    path = parts.path.rstrip("/")
    if request.method == "POST" and path.endswith("/token"):
        return GRANT in _collect_request_parameters(request)
    if request.method == "POST" and path.endswith(TOKEN_PATHS):
        return not TOKEN_PARAMETERS.isdisjoint(_collect_request_parameters(request))
    if SIGNED_CREDENTIALS.fullmatch(parts.hostname or "") or is_presigned(request):
        return True
    if request.get_header("content-type").lower().startswith(FORM):
        form = _collect_request_parameters(request)
        if GRANT in form or form.get("action", "").startswith("AssumeRole"):
            return True
    return b'"private_key_id"' in request.body and b'"client_email"' in request.body


def _collect_request_parameters(request: RecordedRequest) -> dict[str, str]:
    """Return the parameters of URL, form or JSON by lower-case name without underscores; JSON members have the value ``""``."""
    kind = request.get_header("content-type").lower()
    body = request.body.decode(errors="replace")
    texts = [urlsplit(request.url).query, body if not kind or kind.startswith(FORM) else ""]
    pairs = [pair.partition("=") for text in texts for pair in text.split("&")]
    found = {unquote_plus(name): unquote_plus(value) for name, _, value in pairs}
    tree = parse_if_json(body.strip())
    found.update(dict.fromkeys(tree, "") if isinstance(tree, dict) else {})
    return {name.lower().replace("_", ""): value for name, value in found.items()}


def _add_to_content_length(length: str, added_bytes: int) -> str:
    """Return the header value *length* plus *added_bytes*; unchanged if it is no number."""
    return str(int(length) + added_bytes) if length.isdecimal() else length


def _is_host_of_url(value: str, url: str) -> bool:
    """Return True if the value of a Host header is the host of *url*, with or without the default port."""
    parts = urlsplit(url)
    port = f":{PORTS.get(parts.scheme, '')}"
    host = parts.netloc.rpartition("@")[2].lower()
    return value.strip().lower().removesuffix(port) == host.removesuffix(port)


def is_recorded_request_header(name: str) -> bool:
    """Return True if a request header, in lower case, is stored: matching compares its value, or whether it has a secret."""
    return is_compared_header(name) or (is_secret_name(name, "header") and not is_ignored_header(name))


def is_harmless_response_header(name: str) -> bool:
    """Return whether a header of a reply, in lower case, is known to be harmless."""
    return name in KEPT_RESPONSE_HEADERS or name.startswith(KEPT_PREFIXES)


def is_presigned(request: RecordedRequest) -> bool:
    """Return True if the URL of *request* is presigned for AWS, and so is a credential itself. Those of other clouds are not found."""
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


def clean_url(url: str, redactor: Redactor = SHAPES) -> str:
    """Return *url* without userinfo and fragment, and with placeholders for secrets."""
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    return redactor.text(urlunsplit((parts.scheme, host, parts.path, clean_query_or_form(parts.query, redactor), "")))


def clean_query_or_form(text: str, redactor: Redactor) -> str:
    """Return a query or form with placeholders for the values of secret names. All other text stays unchanged."""
    return "&".join([_clean_pair_with_semicolons(piece, redactor) for piece in text.split("&")])


def _clean_pair_with_semicolons(piece: str, redactor: Redactor) -> str:
    """Return a redacted pair. If it has no secret as a whole, redact it from the first secret pair behind a semicolon."""
    clean = _clean_pair(piece, redactor)
    if clean != piece or ";" not in piece:
        return clean
    pieces = piece.split(";")
    for number, one in enumerate(pieces):
        name, _, value = one.partition("=")
        if is_secret(unquote_plus(name), unquote_plus(value), "parameter"):
            return ";".join([*pieces[:number], _clean_pair(";".join(pieces[number:]), redactor)])
    return piece


def _clean_pair(piece: str, redactor: Redactor) -> str:
    """Return a ``name=value`` pair with a placeholder for a secret value, or without the secrets in nested JSON or URLs."""
    name, sign, value = piece.partition("=")
    plain = unquote_plus(value)
    if not sign and unquote_plus(name)[:1] in {"{", "["}:
        clean = redactor.redact_json_text(whole := unquote_plus(name))
        return piece if clean == whole else quote_plus(clean, safe="<>:~=")
    if not value or PLACEHOLDER.fullmatch(plain):
        return piece
    if not is_secret(unquote_plus(name), plain, "parameter"):
        is_nested = (plain[0] in "{[" or "://" in plain or "?" in plain) and redactor.may_contain_secret(plain)
        clean = redactor.redact_json_text(plain) if is_nested else plain
        return piece if clean == plain else f"{name}{sign}{quote_plus(clean, safe='<>:~=')}"
    return f"{name}{sign}{redactor.make_placeholder_for_named_secret(plain, unquote_plus(name), 'parameter')}"


@frozen
class Cleaner:
    """
    Replaces secrets in recorded messages.

    Attributes:
        known: Secret values and the name that stands for each.
        base: What else is replaced in texts and JSON, and which headers of a user are left out.
        redactor: What replaces both.
    """

    known: Mapping[str, str] = attrs.field(factory=dict, repr=False)
    base: Redactor = attrs.field(default=SHAPES, kw_only=True)
    redactor: Redactor = attrs.field(init=False, repr=False)

    @redactor.default
    def _redactor_with_known(self) -> Redactor:
        """The redactor that also replaces the known values."""
        return self.base.with_known_values(self.known)

    def clean_request(self, request: RecordedRequest) -> RecordedRequest:
        """Return *request* without secrets, and without headers that are neither compared nor secret."""
        headers = [
            (n, self.clean_header_value(n, v))
            for n, v in request.headers
            if is_recorded_request_header(n) and not (n == "host" and _is_host_of_url(v, request.url))
        ]
        kind, encoding = request.get_header("content-type"), request.get_header("content-encoding")
        plain = decode_body(request.body, encoding)
        body = self.clean_body(plain, kind)
        if encoding and body == plain:
            body = request.body
        elif encoding:
            headers = [(n, v) for n, v in headers if n != "content-encoding"]
        return RecordedRequest(
            request.method, clean_url(request.url, self.redactor), self._drop_excluded_headers(headers), body
        )

    def clean_response(self, response: RecordedResponse) -> RecordedResponse:
        """Return *response* without secrets."""
        headers = self._drop_excluded_headers([(n, self.clean_header_value(n, v)) for n, v in response.headers])
        body = self._clean_reply_body(response)
        if body != response.body:
            grown = len(body) - len(response.body)
            headers = [
                (n, _add_to_content_length(v, grown) if n.lower() == "content-length" else v) for n, v in headers
            ]
            headers = [(n, v) for n, v in headers if n.lower() != "content-encoding"]
        return RecordedResponse(response.status, self.clean_text(response.reason), headers, body)

    def _drop_excluded_headers(self, headers: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
        """Return *headers* without those that the rules of the user leave out."""
        left_out = self.base.rules.headers
        return [(name, value) for name, value in headers if name.lower() not in left_out]

    def clean_header_value(self, name: str, value: str) -> str:
        """Return the value of the header *name* with placeholders for its secrets."""
        low = name.lower()
        if low == "cookie":
            return ";".join([self._clean_cookie(one) for one in value.split(";")])
        if low in SET_COOKIES:
            return ",".join([self._clean_set_cookie(one) for one in NEXT_COOKIE.split(value)])
        if is_secret(low, value, "header"):
            scheme, credential = _split_auth_scheme(low, value)
            return scheme + self._make_secret_placeholder(credential, low, "header")
        if low in ACCOUNT_HEADERS:
            return self._make_secret_placeholder(value, low, "header")
        clean = self.clean_text_with_urls(value) if low in ADDRESS_HEADERS or "://" in value else value
        return self.redactor.redact_json_text(clean)

    def _clean_set_cookie(self, text: str) -> str:
        """Return a cookie with a placeholder for its value, and its attributes unchanged."""
        cookie, end, attributes = text.partition(";")
        return f"{self._clean_cookie(cookie)}{end}{attributes}"

    def _clean_cookie(self, text: str) -> str:
        """Return a ``name=value`` cookie with a placeholder for its value."""
        name, sign, value = text.partition("=")
        if not sign:
            return self._make_secret_placeholder(text, "cookie", "header") if text else ""
        # aiohttp sends the placeholder that it received in a replayed `Set-Cookie` in quotes.
        if not value or PLACEHOLDER.fullmatch(value.strip('"')):
            return name + sign + value.strip('"')
        name_alone = name.strip()
        differs_by_machine = is_credential_cookie(name_alone, value)
        return f"{name}{sign}{self.redactor.make_placeholder(value, name_alone, differs_by_machine=differs_by_machine)}"

    def _make_secret_placeholder(self, secret: str, name: str, place: Place) -> str:
        """Return the placeholder for *secret*; a placeholder stays as it is."""
        return (
            secret
            if PLACEHOLDER.fullmatch(secret)
            else self.redactor.make_placeholder_for_named_secret(secret, name, place)
        )

    def clean_body(self, body: bytes, content_type: str = "", level: int = 0) -> bytes:
        """Return *body* cleaned as the form, JSON or text that it is; binary bodies lose only known values."""
        kind = content_type.lower()
        if level < MOST_NESTED and kind.startswith("multipart/") and (boundary := find_boundary(content_type)):
            return self._clean_multipart_body(body, boundary, level)
        if level < MOST_NESTED and kind.startswith(HTTP_KINDS):
            return self._clean_http_message(body, level)
        encoding = _detect_text_encoding(body, kind)
        if not encoding:
            return self.redactor.redact_binary(body)
        text = body.decode(encoding)
        if _is_form_body(kind, text):
            clean = self.clean_text(clean_query_or_form(text, self.redactor))
        elif kind.startswith("text/event-stream"):
            clean = clean_events(text, self.redactor)
        else:
            clean = self._clean_json_or_text(text)
        return body if clean == text else clean.encode(encoding, errors="backslashreplace")

    def _clean_multipart_body(self, body: bytes, boundary: str, level: int) -> bytes:
        """Return the *body* of a multipart message without secrets."""
        pieces = _split_multipart(body, boundary)
        return b"".join(
            [piece if number % 2 else self._clean_multipart_part(piece, level) for number, piece in enumerate(pieces)]
        )

    def _clean_multipart_part(self, part: bytes, level: int) -> bytes:
        """Return a part with a placeholder for its content if its name is secret, else with its content redacted."""
        head, content = _split_part_head(part)
        text = content.decode("latin-1")
        field = next((name for name in _find_part_names(head) if is_secret(name, text, "parameter")), "")
        if content and field:
            return head + self._make_secret_placeholder(text, field, "parameter").encode("latin-1")
        return head + self.clean_body(content, _parse_part_content_type(head), level + 1)

    def _clean_http_message(self, message: bytes, level: int) -> bytes:
        """Return a request or reply that is a body itself, without secrets."""
        head, content = _split_part_head(message)
        first, *lines = LINE.split((head or content).decode("latin-1"))
        made = "".join([self.clean_text_with_urls(first), *map(self._clean_header_line, lines)])
        clean = made.encode("latin-1", errors="backslashreplace")
        return clean + self.clean_body(content, _parse_part_content_type(head), level + 1) if head else clean

    def _clean_header_line(self, line: str) -> str:
        """Return a header line with placeholders for the secrets in its value."""
        name, _, value = line.partition(":")
        clean = self.clean_header_value(name, plain := value.strip())
        return line if clean == plain else f"{name}: {clean}"

    def _clean_json_or_text(self, text: str) -> str:
        """Return JSON, lines of JSON or other text without secrets."""
        plain = text.lstrip("\ufeff \t\r\n")
        first, _, rest = plain.partition("\n")
        if rest.strip() and not isinstance(parse_if_json(first.strip()), str):
            return text[: len(text) - len(plain)] + clean_json_lines(plain, self.redactor)
        if not self.redactor.may_contain_secret(text):
            return text
        return text[: len(text) - len(plain)] + self.redactor.redact_json_text(plain)

    def clean_text(self, text: str) -> str:
        """Return *text* with a placeholder for each known value and each thing that looks like a key."""
        return self.redactor.text(text)

    def clean_text_with_urls(self, text: str) -> str:
        """Return *text* with secrets removed, including userinfo and secret parameters of URLs."""
        return self.clean_text(
            PAIR_IN_ADDRESS.sub(lambda found: _clean_pair(found[0], self.redactor), USERINFO.sub("", text))
        )

    def clean_json_value(self, value: Any) -> Any:
        """Return a JSON value with the secrets removed from all its strings, including URLs in them."""
        if isinstance(value, Mapping):
            return {name: self.clean_json_value(member) for name, member in value.items()}
        if isinstance(value, list | tuple):
            return [self.clean_json_value(member) for member in value]
        return self.clean_text_with_urls(value) if isinstance(value, str) else value

    def find_remaining_secrets(self, message: RecordedRequest | RecordedResponse) -> Iterator[tuple[str, str]]:
        """Yield path and rule of each secret that is still in *message*, also in the joined text of streams."""
        for name, value in message.headers:
            if self.clean_header_value(name, value) != value:
                yield f"headers/{name}", name.lower()
        if isinstance(message, RecordedRequest) and clean_url(message.url, self.redactor) != message.url:
            yield "uri", "query"
        text = decode_body(message.body, message.get_header("content-encoding")).decode(errors="replace")
        if self.redactor.may_contain_secret(text):
            yield from self.redactor.find_secret_pointers(parse_if_json(text), "body")
        if is_event_stream(message):
            for place, joined in join_event_texts_by_path(text).items():
                rules = self.redactor.find_secrets(joined).values()
                yield from ((f"body (joined events){place}", rule) for rule in rules)

    def _clean_reply_body(self, response: RecordedResponse) -> bytes:
        """Return the body unchanged if it has no secret, else decoded and without secrets."""
        plain = decode_body(response.body, response.get_header("content-encoding"))
        if not is_event_stream(response):
            clean = self.clean_body(plain, response.get_header("content-type"))
        else:
            text = plain.decode(errors="surrogateescape")
            clean = clean_events(text, self.redactor).encode(errors="surrogateescape")
        return response.body if clean == plain else clean


# --- vcrpy -------------------------------------------------------------------------------------------------------------

MATCH_ON = ("method", "scheme", "host", "port", "path", "query", "body")
PROVIDER_HOSTS = ("api.anthropic.com", "generativelanguage.googleapis.com")
LOCAL_HOSTS = ("localhost", "127.0.0.1")


def vcr_config(secrets: Mapping[str, str] | None = None) -> dict[str, Any]:
    """
    Return settings for ``vcr.VCR(**settings)``, or for pytest-recording's fixture ``vcr_config``.

    Requests are matched by their bodies too. Unlike in a ``Cassette``, only headers that are known to be harmless are stored.
    Values of queries, forms and JSON members that are named like secrets, known secrets and texts that look like keys are
    replaced, on disk and while matching. Replies are stored decompressed. The model providers' hosts are left alone, since
    their traffic belongs in a ``Cassette``. vcrpy patches classes for the whole process: use one of its cassettes at a time.

    Args:
        secrets: Values that must not be written, each with the name that stands for it, beside those of environment
            variables that are named like secrets.
    """
    redactor = make_redactor("all", os.environ, secrets)

    def clean_vcr_request(request: Any) -> Any:
        """Replace the secrets in a request of vcrpy in place, and return the request."""
        headers = [(name.lower(), _header_to_text(value)) for name, value in request.headers.items()]
        cleaner = Cleaner(find_header_secrets(tuple(headers)), base=redactor)
        request.uri = clean_url(request.uri, cleaner.redactor)
        request.headers = {
            n: cleaner.clean_header_value(n, _header_to_text(v))
            for n, v in request.headers.items()
            if n.lower() in KEPT_REQUEST_HEADERS
        }
        given = request.body
        clean = _clean_vcr_body(cleaner, _drain_vcr_body(given), dict(headers).get("content-type", ""))
        # vcrpy makes an iterator of a list again, and a file of bytes.
        request.body = [clean] if isinstance(given, Iterator) and not hasattr(given, "read") else clean
        return request

    def clean_vcr_response(response: dict[str, Any]) -> dict[str, Any]:
        """Return a response of vcrpy without secrets."""
        cleaner = Cleaner(base=redactor)
        headers = {
            name: [cleaner.clean_header_value(name, value) for value in _as_list(values)]
            for name, values in response["headers"].items()
            if is_harmless_response_header(name.lower())
        }
        kinds = [value for name, values in headers.items() if name.lower() == "content-type" for value in values]
        string = _clean_vcr_body(cleaner, response["body"].get("string", b""), kinds[0] if kinds else "")
        body = {**response["body"], "string": string}
        return {**response, "headers": headers, "body": body}

    return {
        "match_on": MATCH_ON,
        "decode_compressed_response": True,
        "ignore_hosts": _list_provider_hosts(),
        "before_record_request": clean_vcr_request,
        "before_record_response": clean_vcr_response,
    }


def _drain_vcr_body(body: Any) -> Any:
    """Return a body; if vcrpy stored it as a file or an iterator, read it into bytes."""
    if hasattr(body, "read"):
        return body.read()
    return (
        b"".join([one.encode() if isinstance(one, str) else one for one in body])
        if isinstance(body, Iterator)
        else body
    )


def _clean_vcr_body(cleaner: Cleaner, body: Any, kind: str) -> Any:
    """Return a body as vcrpy has it, text or bytes, without secrets; other values, such as iterators, unchanged."""
    if isinstance(body, str):
        return cleaner.clean_body(body.encode(errors="surrogateescape"), kind).decode(errors="surrogateescape")
    return cleaner.clean_body(body, kind) if isinstance(body, bytes) else body


def _as_list(values: Any) -> list[Any]:
    """Return a list unchanged, and any other value as a list of one."""
    return values if isinstance(values, list) else [values]


def _header_to_text(value: Any) -> str:
    return value.decode("latin-1") if isinstance(value, bytes) else str(value)


def _list_provider_hosts() -> list[str]:
    """Return the sorted hosts of all model providers with a public address."""
    from stepengine.models.presets import PRESETS

    hosts = {urlsplit(preset.base_url).hostname or "" for preset in PRESETS.values() if preset.base_url}
    return sorted({*PROVIDER_HOSTS, *hosts} - {"", *LOCAL_HOSTS})
