"""``SharedResponse``: a response that is the same for every client, made once, with an ETag by which a client keeps it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from http import HTTPStatus
from typing import TYPE_CHECKING

from attrs import frozen

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

MAX_TAGS = 2_000
"""Characters of ``If-None-Match`` that are read."""


@frozen
class SharedResponse:
    """
    A response that is the same for every client.

    Attributes:
        body: Its body.
        media_type: The type of the body.
        etag: The ETag of the body.
    """

    body: bytes
    media_type: str
    etag: str

    @classmethod
    def create(cls, body: bytes, media_type: str) -> SharedResponse:
        """Return a response with the ETag of its body."""
        return cls(body, media_type, f'"{hashlib.sha256(body).hexdigest()[:32]}"')

    def response(self, request: Request, headers: Mapping[str, str] = {}) -> Response:
        """Return the response for a request: 304 without a body for a client that has it already."""
        from starlette.responses import Response

        # The client asks each time, so that it never shows the answer of an older server.
        told = {"cache-control": "no-cache", "etag": self.etag, **headers}
        tags = request.headers.get("if-none-match", "")[:MAX_TAGS].split(",")
        # A proxy that compresses what it forwards marks the ETag as weak.
        if self.etag in [tag.strip().removeprefix("W/") for tag in tags]:
            return Response(status_code=HTTPStatus.NOT_MODIFIED, headers=told)
        return Response(self.body, headers=told, media_type=self.media_type)
