"""
Sending encoded bytes through google-genai, which has no public way to do that.

The fast way uses private names, all of them in ``_post_privately``. The fallback uses public names only: it lets the SDK
build a request of its own with an empty question, takes that request's address and headers, and never lets it go out. The
way is decided once, when the first client is made. A contract test pins the private names and compares both ways.
"""

from __future__ import annotations

import asyncio
import io
from collections.abc import Mapping
from typing import Any

__all__ = ("INTERACTIONS", "Refused", "client_of", "deleted", "post", "uploaded")

QUESTION = "-"
INTERACTIONS = "interactions"
SOON, SELDOM = 0.1, 5.0
"""Seconds between two questions whether a file has been read, the first and at most."""
FIRST_REFUSAL = 300
SENT_BY_SDK = frozenset({"content-length", "transfer-encoding", "host", "connection"})


class Way:
    """A client of the SDK, how to send bytes with it, and one whose own requests go out, for files."""

    def __init__(self, client: Any, http_client: Any, files: Any, *, private: bool) -> None:
        self.client = client
        self.files = files
        self.http_client = http_client
        self.private = private


def client_of(sdk: Any, access: Mapping[str, object], base_url: str, api_version: str | None, http_client: Any) -> Way:
    """Return a client of the SDK, let in by *access*, that uses *http_client* and none of its own."""
    import httpx2

    from stepengine.models._transport import trusted

    types = sdk.types
    http_client.event_hooks = {"response": [*http_client.event_hooks["response"], _raise_if_refused]}

    def client(async_client: Any) -> Any:
        options = types.HttpOptions(
            base_url=base_url,
            api_version=api_version,
            httpx_async_client=async_client,
            # For web sockets, which nobody opens; without it the SDK reads the certificates once more.
            async_client_args={"ssl": trusted()},
            # Of the sync client nothing is used; given one, the SDK does not make one with certificates of its own.
            httpx_client=httpx2.Client(transport=httpx2.MockTransport(_refuse)),
        )
        return sdk.Client(**access, http_options=options)

    fast = client(http_client)
    if _has_private_names(fast):
        return Way(fast, http_client, fast, private=True)
    caught = client(httpx2.AsyncClient(transport=httpx2.MockTransport(_catch)))
    return Way(caught, http_client, fast, private=False)


def _has_private_names(client: object) -> bool:
    api = getattr(client, "_api_client", None)
    return callable(getattr(api, "_build_request", None)) and callable(getattr(api, "_async_request", None))


async def post(way: Way, path: str, content: bytes | None, headers: Mapping[str, str]) -> Any:
    """Send *content*, or ask for what is at *path*; return the HTTP library's response with its body still to come."""
    if way.private:
        return await _post_privately(way, path, content, headers)
    return await _post_publicly(way, path, content, headers)


async def _post_privately(way: Way, path: str, content: bytes | None, headers: Mapping[str, str]) -> object:
    api = way.client._api_client  # noqa: SLF001 - there is no public way
    request = api._build_request("get" if content is None else "post", path, {}, None)  # noqa: SLF001
    request.data = content or {}
    request.headers.update(headers)
    # The SDK passes on its own timeout, which is None, and None would override all timeouts of the client (reliability:MP23).
    request.timeout = way.http_client.timeout
    # Streamed on the HTTP level also for a reply in one piece, whose size is then limited by the reader (reliability:MP27).
    response = await api._async_request(request, None, stream=True)  # noqa: SLF001
    return response.response_stream


async def _post_publicly(way: Way, path: str, content: bytes | None, headers: Mapping[str, str]) -> object:
    import httpx2
    from google.genai import errors

    model, _, method = path.partition(":")
    models = way.client.aio.models
    try:
        if method.startswith("stream"):
            async for _chunk in await models.generate_content_stream(model=model, contents=QUESTION):
                break
        elif method == "countTokens":
            await models.count_tokens(model=model, contents=QUESTION)
        elif method == "batchGenerateContent":
            await way.client.aio.batches.create(model=model, src=[{"contents": QUESTION}])
        elif path == INTERACTIONS:
            await way.client.aio.interactions.create(model=QUESTION, input=QUESTION)
        elif content is None:
            await (way.client.aio.batches.get(name=path) if path.startswith("batches/") else models.get(model=path))
        else:
            await models.generate_content(model=model, contents=QUESTION)
        msg = "the SDK answered without sending a request"
        raise httpx2.LocalProtocolError(msg)
    except _Caught as caught:
        built = caught.request
    kept = {name: value for name, value in built.headers.items() if name.lower() not in SENT_BY_SDK}
    request = way.http_client.build_request(built.method, built.url, content=content, headers={**kept, **headers})
    response = await way.http_client.send(request, stream=True)
    await errors.APIError.raise_for_async_response(response)
    return response


async def uploaded(way: Way, data: bytes, mime_type: str, name: str, headers: Mapping[str, str]) -> Any:
    """Upload a file and return what the API says of it once it has been read, whose ``state`` then is no longer PROCESSING."""
    import httpx2

    files = way.files.aio.files
    config = {"mime_type": mime_type, "display_name": name or None, "http_options": {"headers": dict(headers)}}
    try:
        held = await files.upload(file=io.BytesIO(data), config=config)
    except (KeyError, ValueError) as error:
        # The SDK's own words for an upload that the server did not take up or did not end.
        msg = f"the file was not taken: {error}"
        raise httpx2.RemoteProtocolError(msg) from None
    pause = SOON
    while held.state == "PROCESSING":
        await asyncio.sleep(pause)
        pause = min(2 * pause, SELDOM)
        held = await files.get(name=held.name)
    return held


async def deleted(way: Way, file_id: str, headers: Mapping[str, str]) -> None:
    """Delete a file, known by its address or its name."""
    name = f"files/{file_id.rpartition('files/')[2]}"
    await way.files.aio.files.delete(name=name, config={"http_options": {"headers": dict(headers)}})


class Refused(Exception):
    """
    Carries a reply with an error status past the SDK.

    That reads the body as JSON, and loses the status where it is not UTF-8, or JSON that Python does not read.
    """

    def __init__(self, response: Any) -> None:
        super().__init__()
        self.response = response


async def _raise_if_refused(response: Any) -> None:
    if response.status_code >= FIRST_REFUSAL:
        await response.aread()
        raise Refused(response)


class _Caught(BaseException):
    """Carries the request that the SDK built past all of its handlers for errors."""

    def __init__(self, request: Any) -> None:
        super().__init__()
        self.request = request


def _catch(request: object) -> Any:
    raise _Caught(request)


def _refuse(request: Any) -> Any:
    import httpx2

    msg = f"the sync client of google-genai is not used, but was asked for {request.url.path}"
    raise httpx2.UnsupportedProtocol(msg)
