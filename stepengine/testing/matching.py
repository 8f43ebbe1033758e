"""
When two requests are the same: keys, and the differences between bodies (replay C8, C10).

Headers do not count unless they are asked for. JSON counts as a value: the order of keys and the form of numbers do not
matter, the order of arrays does.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from typing import Any, TypeAlias
from urllib.parse import parse_qsl, unquote, urlsplit

import attrs

from stepengine.errors import DataError
from stepengine.testing.cleaning import KEPT_REQUEST_HEADERS, clean_url
from stepengine.testing.interactions import RecordedRequest, is_json

__all__ = ("ABSENT", "Difference", "Key", "Matcher", "Place", "differences", "json_body", "place_of")

Key: TypeAlias = tuple[Any, ...]
PORTS = {"http": 80, "https": 443}


class _Absent:
    def __repr__(self) -> str:
        return "(absent)"


ABSENT = _Absent()


@attrs.frozen
class Place:
    """Where a request goes: everything of its URL that counts."""

    scheme: str
    host: str
    port: int | None
    path: str
    query: tuple[tuple[str, str], ...]

    @property
    def origin(self) -> str:
        """Scheme, host and port."""
        return f"{self.scheme}://{self.host}:{self.port}"


@attrs.frozen
class Difference:
    """One place at which two JSON bodies differ; ``ABSENT`` stands for nothing."""

    pointer: str
    recorded: Any
    now: Any


def place_of(url: str) -> Place:
    """Return the place of *url*, with query pairs sorted and secret values replaced."""
    parts = urlsplit(clean_url(url))
    query = tuple(sorted(parse_qsl(parts.query, keep_blank_values=True)))
    return Place(
        parts.scheme, parts.hostname or "", parts.port or PORTS.get(parts.scheme), unquote(parts.path) or "/", query
    )


def _stored(_: object, __: object, names: tuple[str, ...]) -> None:
    for name in names:
        if name.lower() not in KEPT_REQUEST_HEADERS:
            msg = f"the header {name!r} is never stored, so it cannot be matched; stored are {sorted(KEPT_REQUEST_HEADERS)}"
            raise DataError(msg)


@attrs.frozen
class Matcher:
    """
    Gives requests their keys.

    Attributes:
        ignore: JSON pointers of members that do not count, such as ``"/metadata/user_id"``.
        match_headers: Names of headers that count.
    """

    ignore: tuple[str, ...] = ()
    match_headers: tuple[str, ...] = attrs.field(default=(), validator=_stored)

    def key(self, request: RecordedRequest) -> Key:
        """Return the key of a cleaned *request*."""
        headers = tuple([request.header(name.lower()) for name in self.match_headers])
        return request.method, place_of(request.url), self._body(request), headers

    def _body(self, request: RecordedRequest) -> str:
        if not request.body:
            return ""
        kind = request.header("content-type").lower()
        if kind.startswith("multipart/form-data"):
            return _digest(_without_boundary(request.body, request.header("content-type")))
        if kind.startswith("application/x-www-form-urlencoded"):
            pairs = parse_qsl(request.body.decode(errors="replace"), keep_blank_values=True)
            return _digest(json.dumps(sorted(pairs)).encode())
        tree = self.json(request)
        if tree is ABSENT:
            return _digest(request.body)
        return _digest(json.dumps(tree, sort_keys=True, separators=(",", ":")).encode())

    def json(self, request: RecordedRequest) -> Any:
        """Return the JSON value of the body as far as it counts; ``ABSENT`` when it is no JSON."""
        tree = json_body(request)
        for pointer in self.ignore:
            _remove(tree, pointer)
        return tree


def json_body(request: RecordedRequest) -> Any:
    """Return the JSON value of a body, whole floats as ints; ``ABSENT`` when it is no JSON."""
    if not is_json(request) and request.body[:1].strip() not in (b"{", b"["):
        return ABSENT
    try:
        return json.loads(request.body, parse_float=_number, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return ABSENT


def _number(text: str) -> int | float:
    number = float(text)
    return int(number) if number.is_integer() else number


def _refuse(text: str) -> Any:
    raise ValueError(text)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _without_boundary(body: bytes, content_type: str) -> bytes:
    found = re.search(r'boundary="?([^";]+)', content_type)
    return body.replace(found[1].encode(), b"BOUNDARY") if found else body


def _remove(tree: Any, pointer: str) -> None:
    *path, last = [part.replace("~1", "/").replace("~0", "~") for part in pointer.split("/")[1:]] or [""]
    for part in path:
        tree = _member(tree, part)
    if isinstance(tree, dict):
        tree.pop(last, None)
    elif isinstance(tree, list) and last.isdigit() and int(last) < len(tree):
        del tree[int(last)]


def _member(tree: Any, part: str) -> Any:
    if isinstance(tree, dict):
        return tree.get(part)
    return tree[int(part)] if isinstance(tree, list) and part.isdigit() and int(part) < len(tree) else None


def differences(recorded: Any, now: Any, pointer: str = "") -> Iterator[Difference]:
    """Give the places at which two JSON values differ, in the order of the recorded one."""
    if isinstance(recorded, dict) and isinstance(now, dict):
        for key in [*recorded, *(k for k in now if k not in recorded)]:
            at = f"{pointer}/{key.replace('~', '~0').replace('/', '~1')}"
            yield from differences(recorded.get(key, ABSENT), now.get(key, ABSENT), at)
    elif isinstance(recorded, list) and isinstance(now, list):
        for index in range(max(len(recorded), len(now))):
            a = recorded[index] if index < len(recorded) else ABSENT
            b = now[index] if index < len(now) else ABSENT
            yield from differences(a, b, f"{pointer}/{index}")
    elif recorded != now or isinstance(recorded, bool) != isinstance(now, bool):
        yield Difference(pointer or "(body)", recorded, now)
