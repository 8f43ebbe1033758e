"""
One recorded request and its response, as values.

What lives here knows HTTP messages and nothing of YAML, SDKs or transports. Bodies are bytes as they are handed over;
header names are lower-case, and values that came several times are several pairs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

import attrs

from stepengine.data.json import JsonDict, freeze

__all__ = ("Headers", "Interaction", "RecordedRequest", "RecordedResponse", "is_json", "is_stream")

Headers: TypeAlias = tuple[tuple[str, str], ...]


def _headers(value: Mapping[str, str] | Iterable[tuple[str, str]]) -> Headers:
    pairs = value.items() if isinstance(value, Mapping) else value
    return tuple([(name.lower(), content) for name, content in pairs])


def _upper(method: str) -> str:
    return method.upper()


@attrs.frozen
class RecordedRequest:
    """
    A request as it is matched and stored.

    Attributes:
        method: Such as ``"POST"``.
        url: The whole URL.
        headers: Pairs of lower-case name and value.
        body: The body; ``b""`` for none.
    """

    method: str = attrs.field(converter=_upper)
    url: str
    headers: Headers = attrs.field(default=(), converter=_headers)
    body: bytes = b""

    def header(self, name: str) -> str:
        """Return the values of header *name* joined by commas; ``""`` when there is none."""
        return ", ".join([v for n, v in self.headers if n == name])


@attrs.frozen
class RecordedResponse:
    """
    A response as it is stored and handed back.

    Attributes:
        status: The status code.
        reason: The reason phrase; ``""`` when unknown.
        headers: Pairs of lower-case name and value.
        body: The body; compressed only when ``content-encoding`` says so.
    """

    status: int
    reason: str = ""
    headers: Headers = attrs.field(default=(), converter=_headers)
    body: bytes = b""

    def header(self, name: str) -> str:
        """Return the values of header *name* joined by commas; ``""`` when there is none."""
        return ", ".join([v for n, v in self.headers if n == name])


@attrs.frozen
class Interaction:
    """
    A request and its response.

    Attributes:
        request: What was asked.
        response: What came back.
        extras: What stands beside them under ``x_stepengine``: ``chunks`` (sizes of the pieces as they arrived),
            ``complete`` (false when the reply was not read to its end).
    """

    request: RecordedRequest
    response: RecordedResponse
    extras: JsonDict = attrs.field(factory=JsonDict, converter=freeze)

    @property
    def complete(self) -> bool:
        """Whether the reply was read to its end while recording."""
        return bool(self.extras.get("complete", True))


def is_json(message: RecordedRequest | RecordedResponse) -> bool:
    """Return whether the content type of *message* is a JSON one."""
    kind = message.header("content-type").partition(";")[0].strip().lower()
    return kind == "application/json" or kind.endswith("+json")


def is_stream(message: Any) -> bool:
    """Return whether *message* is a stream of server-sent events."""
    return bool(message.header("content-type").strip().lower().startswith("text/event-stream"))
