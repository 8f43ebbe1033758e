"""
Comparison of requests by method, address, body and headers, not by their position.

JSON counts as a value: the order of members and the form of numbers do not matter, the order of arrays does. Of an address, the order of
parameters with different names does not matter. Headers count unless ``UNCOUNTED`` or ``UNCOUNTED_PREFIXES`` has them. Secrets of a
recording differ from those of a replay, but two that differ in one differ in the other: each placeholder holds a mark of its secret.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from decimal import Context, Decimal
from typing import Any, TypeAlias
from urllib.parse import urlsplit

import attrs
from attrs import frozen

from stepengine.data.json import ABSENT, make_object_with_unique_keys
from stepengine.data.secret_names import is_secret_name
from stepengine.testing.cassette_files import Interaction, RecordedRequest, may_be_json
from stepengine.workspace.writes import content_hash

__tracebackhide__ = True  # a failed test ends at its author's line

Key: TypeAlias = tuple[Any, ...]
PORTS = {"http": 80, "https": 443}
MARK = re.compile(r"<redacted:([^<>~]*)~([0-9a-f]{4})>")
"""A placeholder of a cassette for a credential, with its mark."""
COUNTED_MARK = re.compile(r"<redacted:([^<>]*)=([0-9a-f]{4})>")
"""A placeholder for a value that always counts."""
Marks: TypeAlias = Mapping[tuple[str, int], str]
"""Marks by their places: the name of a header, a cookie or a part of the request, and the number there."""
MOST_DIGITS = 400
UNRESERVED = re.compile(r"%([0-9A-Fa-f]{2})")

UNCOUNTED = frozenset({
    "accept-encoding", "baggage", "connection", "content-length", "content-md5", "date", "expect", "idempotency-key",
    "keep-alive", "openai-organization", "openai-project", "proxy-connection", "request-id", "te", "traceparent", "tracestate",
    "trailer", "transfer-encoding", "user-agent", "x-amz-content-sha256", "x-amz-date", "x-amzn-trace-id", "x-client-request-id",
    "x-correlation-id", "x-goog-api-client", "x-ms-client-request-id", "x-ms-date", "x-request-id",
})  # fmt: skip
"""Headers that tell of a connection, a client or one attempt, and that no reply depends on."""
UNCOUNTED_PREFIXES = ("amz-sdk-", "langsmith-", "sentry-", "x-b3-", "x-forwarded-", "x-stainless-")


def is_compared_header(name: str) -> bool:
    """Return whether requests are compared by the whole value of the header *name*, in lower case."""
    return not is_ignored_header(name) and not is_secret_name(name, "header")


def is_ignored_header(name: str) -> bool:
    """Return whether requests are never compared by the header *name*, in lower case."""
    return name in UNCOUNTED or name.startswith(UNCOUNTED_PREFIXES)


@frozen
class RequestPlace:
    """The parts of a request's address that are compared."""

    scheme: str
    host: str
    port: int | None
    path: str
    query: tuple[tuple[str, str], ...]

    @property
    def origin(self) -> str:
        """The scheme, host and port."""
        return f"{self.scheme}://{self.host}:{self.port}"


def parse_compared_url(url: str) -> RequestPlace:
    """Return the compared parts of *url*, which has no secrets."""
    parts = urlsplit(url)
    port = parts.port or PORTS.get(parts.scheme)
    return RequestPlace(
        parts.scheme,
        parts.hostname or "",
        port,
        _normalize_percent_encoding(parts.path) or "/",
        sort_query_pairs(_normalize_percent_encoding(parts.query)),
    )


def sort_query_pairs(text: str) -> tuple[tuple[str, str], ...]:
    """Return the pairs of a query or form as they are spelled, by name; values of one name remain in their order."""
    pieces = [piece.partition("=") for piece in text.split("&")] if text else []
    return tuple(sorted([(name, f"{sign}{value}") for name, sign, value in pieces], key=lambda pair: pair[0]))


def _normalize_percent_encoding(text: str) -> str:
    """Return *text* with one spelling of percent-encoded characters, as RFC 3986 has it."""
    return UNRESERVED.sub(_decode_unreserved, text)


def _decode_unreserved(match: re.Match[str]) -> str:
    """Return the character of a percent escape if it needs none, else the escape in upper case."""
    char = chr(int(match[1], 16))
    return char if char.isascii() and (char.isalnum() or char in "-._~") else match[0].upper()


@frozen
class ComparedRequest:
    """
    A cleaned request as it is compared.

    Attributes:
        key: A text that is equal for equal requests, without marks of credentials.
        headers: Its counted headers, without marks of credentials.
        marks: The marks of its credentials.
        counted: The marks of what always counts, in headers and cookies.
    """

    key: Key
    headers: tuple[tuple[str, str], ...]
    marks: Marks
    counted: Marks


def _to_lower(names: Iterable[str]) -> tuple[str, ...]:
    return tuple([name.lower() for name in names])


@frozen
class Matcher:
    """
    Computes the compared parts of requests.

    Attributes:
        ignore: JSON pointers of members that do not count, such as ``"/metadata/user_id"``.
        ignore_headers: Names of headers that do not count.
    """

    ignore: tuple[str, ...] = ()
    ignore_headers: tuple[str, ...] = attrs.field(default=(), converter=_to_lower)

    def extract_compared_parts(self, request: RecordedRequest) -> ComparedRequest:
        """Return the compared parts of a cleaned *request*."""
        plain = attrs.evolve(
            request, url=_remove_credential_marks(request.url), body=_remove_credential_marks_in_bytes(request.body)
        )
        key = (request.method, parse_compared_url(plain.url), self._make_body_key(plain))
        texts = [("url", request.url), ("body", request.body.decode(errors="replace"))]
        marks = _collect_marks_by_place(MARK, [*request.headers, *texts])
        return ComparedRequest(
            key, self.list_compared_headers(request), marks, _collect_marks_by_place(COUNTED_MARK, request.headers)
        )

    def list_compared_headers(self, request: RecordedRequest) -> tuple[tuple[str, str], ...]:
        """Return the counted headers of *request*, by name; values of one name remain in their order."""
        counted = [
            (name, _remove_credential_marks(_replace_boundary_in_header(name, value)))
            for name, value in request.headers
            if is_compared_header(name) and name not in self.ignore_headers
        ]
        return tuple(sorted(counted, key=lambda pair: pair[0]))

    def _make_body_key(self, request: RecordedRequest) -> str:
        """Return a hash that is equal for equal bodies: JSON values, forms, multipart messages, else bytes; ``""`` for no body."""
        if not request.body:
            return ""
        kind = request.get_header("content-type").lower()
        if kind.startswith("multipart/"):
            return content_hash(_replace_boundary_in_body(request.body, request.get_header("content-type")))
        if kind.startswith("application/x-www-form-urlencoded"):
            return content_hash(
                json.dumps(sort_query_pairs(_normalize_percent_encoding(request.body.decode("latin-1")))).encode()
            )
        tree = self.parse_compared_json(request)
        if tree is ABSENT:
            return content_hash(request.body)
        return content_hash(json.dumps(tree, sort_keys=True, separators=(",", ":"), default=_decimal_to_json).encode())

    def parse_compared_json(self, request: RecordedRequest) -> Any:
        """Return the compared part of the body as JSON; ``ABSENT`` if it is not JSON."""
        tree = parse_json_body(request)
        for pointer in self.ignore:
            _remove_json_member(tree, pointer)
        return tree


def _decimal_to_json(number: object) -> list[object]:
    """Return a list that stands for a number that no float can hold, and that no JSON text contains."""
    return [math.nan, str(number)]


def _replace_boundary_in_header(name: str, value: str) -> str:
    """Return a header value; that of ``content-type`` gets a fixed boundary."""
    if name != "content-type":
        return value
    return re.sub(r'boundary="?[^";]+"?', "boundary=BOUNDARY", value, flags=re.IGNORECASE)


def _remove_credential_marks(text: str) -> str:
    """Replace each marked placeholder of a credential in *text* by a plain one."""
    return MARK.sub("<redacted>", text)


def _collect_marks_by_place(pattern: re.Pattern[str], texts: Iterable[tuple[str, str]]) -> Marks:
    """Return the marks in *texts* by place. Names go before positions, since members and parameters may change their places."""
    found = [
        (f"cookie {match[1]}" if place == "cookie" else place, match[1], match[2])
        for place, text in texts
        for match in pattern.finditer(text)
    ]
    marks: dict[tuple[str, int], str] = {}
    counts: Counter[str] = Counter()
    for place, _, mark in sorted(found, key=lambda one: one[:2]):
        marks[place, counts[place]] = mark
        counts[place] += 1
    return marks


def _remove_credential_marks_in_bytes(body: bytes) -> bytes:
    """Return *body* with each marked placeholder of a credential replaced by a plain one."""
    if b"<redacted:" not in body:
        return body
    return _remove_credential_marks(body.decode(errors="surrogateescape")).encode(errors="surrogateescape")


def parse_json_body(request: RecordedRequest) -> object:
    """Return the JSON value of a body, whole floats as ints; ``ABSENT`` when it is not JSON, or repeats a name."""
    if not may_be_json(request):
        return ABSENT
    try:
        return json.loads(
            request.body,
            parse_float=_parse_exact_number,
            parse_constant=_raise_for_constant,
            object_pairs_hook=make_object_with_unique_keys,
        )
    except (ValueError, RecursionError, ArithmeticError):  # the last for exponents beyond those of Decimal
        return ABSENT


def _parse_exact_number(text: str) -> int | float | Decimal:
    """Return a JSON number without loss: a whole one as int, else a float if it is exact, else a ``Decimal``."""
    exact = Decimal(text)
    if exact == exact.to_integral_value() and exact.adjusted() < MOST_DIGITS:
        return int(exact)
    number = float(text)
    return number if Decimal(repr(number)) == exact else exact.normalize(Context(prec=len(text)))


def _raise_for_constant(text: str) -> Any:
    """Raise ``ValueError`` for ``NaN`` and ``Infinity``: the ``parse_constant`` of ``json``."""
    raise ValueError(text)


def find_boundary(content_type: str) -> str:
    """Return the boundary of a multipart message; "" if its *content_type* names none."""
    found = re.search(r'boundary="?([^";]+)', content_type, re.IGNORECASE)
    return found[1].strip() if found else ""


def _replace_boundary_in_body(body: bytes, content_type: str) -> bytes:
    """Return a multipart body with a fixed boundary; other bodies unchanged."""
    boundary = find_boundary(content_type)
    return body.replace(boundary.encode(), b"BOUNDARY") if boundary else body


def _remove_json_member(tree: object, pointer: str) -> None:
    """Remove the member at a JSON *pointer* from *tree* in place, if it exists."""
    *path, last = [part.replace("~1", "/").replace("~0", "~") for part in pointer.split("/")[1:]] or [""]
    for part in path:
        tree = _find_json_member(tree, part)
    if isinstance(tree, dict):
        tree.pop(last, None)
    elif isinstance(tree, list) and last.isdigit() and int(last) < len(tree):
        del tree[int(last)]


def _find_json_member(tree: object, part: str) -> Any:
    """Return a member of an object or an item of an array; None if there is none."""
    if isinstance(tree, dict):
        return tree.get(part)
    return tree[int(part)] if isinstance(tree, list) and part.isdigit() and int(part) < len(tree) else None


def have_equal_headers(recorded: ComparedRequest, current: ComparedRequest, *, is_complete: bool) -> bool:
    """
    Return whether the counted headers are equal.

    Args:
        recorded: The recorded request.
        current: The request.
        is_complete: Whether the recording has all counted headers; one by another recorder may have left some out.
    """
    if is_complete:
        return recorded.headers == current.headers
    names = {name for name, _ in recorded.headers}
    return recorded.headers == tuple([pair for pair in current.headers if pair[0] in names])


class SecretPairs:
    """
    Maps the secrets of a replay to those of the recording, by their marks.

    A secret that the recording has stands for itself. Another one, such as the key of the machine that replays, stands for the first
    recorded secret that it is met in place of, and from then on for that one.
    """

    def __init__(self) -> None:
        self._recorded: set[str] = set()
        self._pairs: dict[str, str] = {}

    def add_recorded_marks(self, marks: Iterable[str]) -> None:
        """Add marks of secrets in a recording."""
        self._recorded.update(marks)

    def can_match(self, recorded: ComparedRequest, current: ComparedRequest) -> bool:
        """Return True if the secrets of two requests can correspond, given the pairs that are known."""
        taken = {known: own for own, known in self._pairs.items()}
        return all(
            mark == known
            if mark in self._recorded
            else self._pairs.get(mark, known) == known and taken.get(known, mark) == mark
            for known, mark in _pair_marks(recorded.marks, current.marks)
        )

    def has_no_recorded_secret(self, recorded: ComparedRequest, current: ComparedRequest) -> bool:
        """Return True if no credential of the current request occurs in the recording."""
        return self._recorded.isdisjoint(current.marks.values())

    def add_pairs(self, recorded: ComparedRequest, current: ComparedRequest) -> None:
        """Store which recorded secret each new secret of the current request corresponds to."""
        self._pairs.update(
            {mark: known for known, mark in _pair_marks(recorded.marks, current.marks) if mark not in self._recorded}
        )


def _pair_marks(recorded: Marks, current: Marks) -> list[tuple[str, str]]:
    """Return the recorded and the current mark of each place that has both."""
    return [(known, current[place]) for place, known in recorded.items() if place in current]


def have_equal_counted_marks(recorded: ComparedRequest, current: ComparedRequest, *, is_complete: bool) -> bool:
    """Return whether the marks that always count are equal; if not *is_complete*, those that only one request has are left out."""
    if is_complete:
        return recorded.counted == current.counted
    return all(known == mark for known, mark in _pair_marks(recorded.counted, current.counted))


def find_mark_key(interactions: Iterable[Interaction]) -> str:
    """Return the key of the marks in *interactions*; ``""`` if they do not all have one and the same."""
    keys = {interaction.mark_key for interaction in interactions}
    return keys.pop() if len(keys) == 1 else ""
