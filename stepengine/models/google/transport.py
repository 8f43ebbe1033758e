"""
Send encoded bytes through google-genai.

The SDK has no public method for that. Its public methods build and sign a request with a placeholder. A transport catches
that request before it is sent. The bytes are then sent to its URL with its headers.
"""

from __future__ import annotations

import asyncio
import io
from collections.abc import Mapping
from typing import Any

from attrs import frozen

from stepengine.models._failures import HTTP_REDIRECT

QUESTION = "-"
INTERACTIONS = "interactions"
COUNTING = ":countTokens"
SOON, SELDOM = 0.1, 5.0
"""The first and the longest pause, in seconds, between two queries for the state of a file."""
SENT_BY_SDK = frozenset({"content-length", "transfer-encoding", "host", "connection"})


@frozen
class GoogleClients:
    """
    The clients of one provider.

    Attributes:
        building: A client of the SDK that only builds requests; they are caught and never sent.
        files: A client of the SDK for uploads, which sends its requests.
        http_client: The HTTP client that sends the encoded bytes.
    """

    building: Any
    files: Any
    http_client: Any


def create_clients(
    sdk: Any, access: Mapping[str, object], base_url: str, api_version: str | None, http_client: Any
) -> GoogleClients:
    """Return the clients for the credentials *access*, which send through *http_client*; add an error check to *http_client*."""
    import httpx2

    from stepengine.models._transport import get_ssl_context

    types = sdk.types
    http_client.event_hooks = {"response": [*http_client.event_hooks["response"], _raise_for_error_status]}

    def create_client(async_client: Any) -> Any:
        """Return a client of the SDK that sends through *async_client*."""
        options = types.HttpOptions(
            base_url=base_url,
            api_version=api_version,
            httpx_async_client=async_client,
            # For web sockets, which are never opened. Without it the SDK reads the certificates again.
            async_client_args={"ssl": get_ssl_context()},
            # The sync client is never used. Without it the SDK creates one and reads the certificates again.
            httpx_client=httpx2.Client(transport=httpx2.MockTransport(_raise_for_sync_request)),
        )
        return sdk.Client(**access, http_options=options)

    # The same headers as those of the sending client, which accepts only gzip, because gzip can be unpacked in pieces.
    catching = httpx2.AsyncClient(headers=http_client.headers, transport=httpx2.MockTransport(_raise_caught_request))
    return GoogleClients(create_client(catching), create_client(http_client), http_client)


async def send_with_sdk_headers(
    clients: GoogleClients, path: str, content: bytes | None, headers: Mapping[str, str]
) -> Any:
    """Send *content*, or a GET without it, with the SDK's URL and headers; return the response before its body is read."""
    url, signed = await _build_url_and_headers(clients.building, path, is_get=content is None)
    kept = {name: value for name, value in signed.items() if name.lower() not in SENT_BY_SDK}
    http_client = clients.http_client
    method = "GET" if content is None else "POST"
    request = http_client.build_request(method, url, content=content, headers={**kept, **headers})
    # Streamed even for a reply in one piece, because the reader limits its size (reliability:MP27).
    return await http_client.send(request, stream=True)


async def _build_url_and_headers(client: Any, path: str, *, is_get: bool) -> tuple[str, Mapping[str, str]]:
    """Let the SDK build a request for *path* without sending it, and return its (URL, headers), which include the credentials."""
    import httpx2

    model, _, method = path.partition(":")
    models = client.aio.models
    try:
        if path == INTERACTIONS:
            await client.aio.interactions.create(model=QUESTION, input=QUESTION)
        elif is_get:
            await (client.aio.batches.get(name=path) if path.startswith("batches/") else models.get(model=path))
        else:
            # The SDK builds this request fastest, and it logs nothing about function calls.
            await models.count_tokens(model=model, contents=QUESTION)
    except _CaughtRequest as caught:
        url = str(caught.request.url)
        return (f"{url.removesuffix(COUNTING)}:{method}" if method else url), caught.request.headers
    msg = "the SDK answered without sending a request"
    raise httpx2.LocalProtocolError(msg)


async def upload_file_and_wait(
    clients: GoogleClients, data: bytes, mime_type: str, name: str, headers: Mapping[str, str]
) -> Any:
    """Upload a file, wait until the API has processed it, and return the API's description with the final ``state``."""
    import httpx2

    files = clients.files.aio.files
    config = {"mime_type": mime_type, "display_name": name or None, "http_options": {"headers": dict(headers)}}
    try:
        held = await files.upload(file=io.BytesIO(data), config=config)
    except (KeyError, ValueError) as error:
        # The SDK raises these for an upload that the server did not accept or did not complete.
        msg = f"the server did not accept the file: {error}"
        raise httpx2.RemoteProtocolError(msg) from None
    pause = SOON
    while held.state == "PROCESSING":
        await asyncio.sleep(pause)
        pause = min(2 * pause, SELDOM)
        held = await files.get(name=held.name)
    return held


async def delete_uploaded_file(clients: GoogleClients, file_id: str, headers: Mapping[str, str]) -> None:
    """Delete an uploaded file by its URL or name."""
    name = f"files/{file_id.rpartition('files/')[2]}"
    await clients.files.aio.files.delete(name=name, config={"http_options": {"headers": dict(headers)}})


async def _raise_for_error_status(response: Any) -> None:
    """Raise for an error status before the SDK parses the body; the SDK would lose the status of a body that is not JSON."""
    if response.status_code >= HTTP_REDIRECT:
        await response.aread()
        response.raise_for_status()


class _CaughtRequest(BaseException):
    """The request that the SDK built; a ``BaseException``, so that no error handler of the SDK catches it."""

    def __init__(self, request: Any) -> None:
        super().__init__()
        self.request = request


def _raise_caught_request(request: object) -> Any:
    """Raise ``_CaughtRequest`` with the request that the SDK built, in place of sending it."""
    raise _CaughtRequest(request)


def _raise_for_sync_request(request: Any) -> Any:
    """Raise an error, because the SDK must not use its sync client."""
    import httpx2

    msg = f"the sync client of google-genai must not be used, but received a request for {request.url.path}"
    raise httpx2.UnsupportedProtocol(msg)
